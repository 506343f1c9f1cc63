"""Table 6: slides of a much larger cohort, PANDA in the paper."""

from functools import partial

from gpmil.paper import scores, table5_other_models
from gpmil.paper.exhibit import Exhibit
from gpmil.paper.results import Results

KEYS = ("vgpmil", "pr", *table5_other_models.KEYS)
exhibit = partial(
    Exhibit, "Table 6", "table6_panda", "Predictive performance at the level of images, PANDA"
)


def build(results: Results | None) -> Exhibit:
    """Accuracy, precision, recall and F1 of slides."""
    if results is None:
        missing = "Not run (--panda none): --panda tenth simulates 1,050 slides, --panda full all."
        return exhibit(missing=missing)
    alt = "slides of the large cohort, with the paper's"
    return exhibit(**scores.shown(results, KEYS, "table6", "slide", scores.ACCURACY, alt))
