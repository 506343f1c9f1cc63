"""Table 2: predictions of slides."""

from functools import partial

from gpmil.paper import scores
from gpmil.paper.exhibit import Exhibit
from gpmil.paper.methods import COUPLINGS, TUNED, key_of
from gpmil.paper.results import Results

KEYS = ("vgpmil", "pr", *map(key_of, COUPLINGS), *TUNED)
exhibit = partial(
    Exhibit, "Table 2", "table2_slides", "Predictive performance at the level of images"
)


def build(results: Results) -> Exhibit:
    """Accuracy, precision, recall and F1 of slides for the Gaussian-process models."""
    n = len(results.test)
    grain = (
        f"With {n} test slides one slide is {100 / n:.1f} points of accuracy. The deviation is "
        "over runs on the same slides; over other slides it would be larger (see the table of all "
        "models with intervals)."
    )
    alt = "slides for every method, with the paper's values"
    return exhibit(
        [grain], **scores.shown(results, KEYS, "table2", "slide", scores.OF_THE_PAPER, alt)
    )
