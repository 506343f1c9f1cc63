"""Table 5: slides, against attention, aggregation and pseudo labels."""

from functools import partial

from gpmil.paper import scores
from gpmil.paper.exhibit import Exhibit
from gpmil.paper.methods import DEFAULT, TUNED, key_of
from gpmil.paper.results import Results

KEYS = (key_of(DEFAULT), *TUNED, "attention", "gated", "smooth", "mean", "max", "pseudo")
exhibit = partial(
    Exhibit,
    "Table 5",
    "table5_other_models",
    "Comparison with other MIL methods, at the level of images",
    [
        "Smooth-Att-MIL carries the coupling into attention, which the paper names as future "
        "work: attention scores are smoothed by (I + αC)⁻¹ inside every slide, α learned. "
        "Max-Agg, not in the paper, is the simplest model that scores patches too."
    ],
)


def build(results: Results) -> Exhibit:
    """Accuracy, precision, recall and F1 of slides for other families of models."""
    alt = "slides for other families, with the paper's values"
    return exhibit(**scores.shown(results, KEYS, "table5", "slide", scores.ACCURACY, alt))
