"""Table 6: slides of a much larger cohort, PANDA in the paper."""

from gpmil.paper import scores
from gpmil.paper.exhibit import Exhibit
from gpmil.paper.methods import DEFAULT, key_of
from gpmil.paper.results import Results

KEYS = (
    "vgpmil",
    "pr",
    key_of(DEFAULT),
    "tuned",
    "attention",
    "gated",
    "smooth",
    "mean",
    "max",
    "pseudo",
)
TITLE = "Predictive performance at the level of images, PANDA"


def build(results: Results | None) -> Exhibit:
    """Accuracy, precision, recall and F1 of slides."""
    if results is None:
        missing = "Not run (--panda none): --panda tenth simulates 1,050 slides, --panda full all."
        return Exhibit("Table 6", "table6_panda", TITLE, missing=missing)
    found = scores.frame(results, KEYS, "table6", "slide")
    caption = (
        f"Test slides of the {results.name}, even odds, per cent, mean ± deviation over runs "
        "(PS-MIL once, as in the paper). Highlighted: the highest accuracy. " + results.source
    )
    return Exhibit(
        "Table 6",
        "table6_panda",
        TITLE,
        frame=found,
        tables=[scores.table(found, caption, scores.most_accurate(found))],
        figure=scores.picture(found, f"Slides of the {results.name}"),
        alt="Accuracy, precision, recall and F1 of slides of the large cohort, with the paper's",
        caption="The table as a picture. Circles: here, with the deviation over runs; diamonds: "
        "the paper.",
    )
