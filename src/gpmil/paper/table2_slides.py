"""Table 2: predictions of slides."""

from gpmil.paper import scores
from gpmil.paper.exhibit import Exhibit
from gpmil.paper.methods import COUPLINGS, key_of
from gpmil.paper.results import Results

KEYS = ("vgpmil", "pr", *map(key_of, COUPLINGS), "tuned")


def build(results: Results) -> Exhibit:
    """Accuracy, precision, recall and F1 of slides for the Gaussian-process models."""
    found = scores.frame(results, KEYS, "table2", "slide")
    caption = (
        f"Test slides of the {results.name}, even odds, per cent, mean ± deviation over runs. "
        "Highlighted (the paper's rule): at least as good as VGPMIL and VGPMIL-PR in all four. "
        f"{results.source}"
    )
    return Exhibit(
        "Table 2",
        "table2_slides",
        "Predictive performance at the level of images",
        [_grain(results)],
        found,
        [scores.table(found, caption, scores.better_than_baselines(found))],
        scores.picture(found, f"Slides of the {results.name}"),
        "Accuracy, precision, recall and F1 of slides for every method, with the paper's values",
        "The table as a picture. Circles: here, with the deviation over runs; diamonds: the paper.",
    )


def _grain(results: Results) -> str:
    n = len(results.test)
    return (
        f"With {n} test slides one slide is {100 / n:.1f} points of accuracy. The deviation is "
        "over runs on the same slides; over other slides it would be larger (see the table of all "
        "models with intervals)."
    )
