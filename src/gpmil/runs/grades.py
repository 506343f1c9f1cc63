"""Grades of the slides of a run: grades.csv, how good they are, and their part of the page."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pandas as pd

from gpmil.data.bags import Bags
from gpmil.data.classes import fold, text
from gpmil.decide.estimates import Estimate
from gpmil.decide.grade_metrics import confusion, grade_metrics
from gpmil.models import BagClassifier
from gpmil.models.graded import GradedClassifier
from gpmil.models.graded_areas import isup
from gpmil.models.ordinal import MOST_AREA, OrdinalMIL
from gpmil.runs.workspace import Workspace, csv_bytes
from gpmil.show.report import Section, Table

GRADES = "grades.csv"
SHOWN = {
    "kappa": "quadratic weighted kappa",
    "accuracy": "accuracy",
    "within_one": "within one grade",
    "log_loss": "log loss",
}
WHAT = (
    "The grade of a slide is that of its worst patch. Shares of area, patterns and ISUP in "
    f"{GRADES} are a rule on top, which was checked on no data."
)


def grade_rows(
    model: GradedClassifier, bags: Bags, y: Sequence[str | None] | None = None
) -> pd.DataFrame:
    """A probability per grade of every slide, the grade that is called, areas, the true grade."""
    p = model.predict_proba(bags)
    table = pd.DataFrame({"slide": bags.names.astype(str)})
    table = table.assign(**{f"P({g})": column for g, column in zip(model.classes_, p.T)})
    table["expected_grade"] = p @ np.arange(p.shape[1])
    table["call"] = model.classes_[model.decided(p)]
    if isinstance(model, OrdinalMIL) and bags.sizes.max() <= MOST_AREA:
        areas = model.predict_areas(bags).to_frame().drop(columns="bag")
        pairs = zip(areas["first"].astype(str), areas["second"].astype(str))
        groups = [isup(*pair) for pair in pairs]
        table = pd.concat([table, areas], axis=1)
        if any(group is not None for group in groups):
            table["isup"] = pd.array(groups, dtype="Int64")
    if y is not None:
        known = {fold(str(text(g))): str(g) for g in model.classes_}
        table["grade"] = ["" if v is None else known.get(fold(v), v) for v in y]
    return table


def write_grades(
    space: Workspace, model: BagClassifier, bags: Bags, y: Sequence[str | None] | None = None
) -> None:
    """grades.csv, where the model has three grades or more."""
    if isinstance(model, GradedClassifier) and len(model.classes_) > 2:
        space.write(GRADES, csv_bytes(grade_rows(model, bags, y)))


# --- How good they are ----------------------------------------------------------------------------
def read_grades(folder: Path) -> tuple[pd.DataFrame, list[str]] | None:
    """grades.csv and the grades in their order; None where there is none, or no grade is known."""
    file = Path(folder) / GRADES
    if not file.is_file():
        return None
    table = pd.read_csv(file, dtype={"slide": str, "call": str, "grade": str})
    names = [column[2:-1] for column in table if column.startswith("P(")]
    if "grade" not in table:
        return None
    known = table[table["grade"].isin(names)]
    return (known, names) if len(known) else None


def grade_estimates(folder: Path, predictions: pd.DataFrame) -> dict[str, Estimate]:
    """The metrics of the grades that a run called, intervals over patients; none where unknown."""
    found = read_grades(folder)
    if found is None:
        return {}
    known, names = found
    patient = predictions.drop_duplicates("slide").set_index("slide")["patient"]
    own = patient.reindex(known["slide"]).fillna("").to_numpy()
    p = known[[f"P({name})" for name in names]].to_numpy()
    return grade_metrics(
        _codes(known["grade"], names),
        p / p.sum(1, keepdims=True),
        decision=_codes(known["call"], names),
        groups=np.where(own == "", "slide " + known["slide"], own),
    )


def _codes(column: pd.Series, names: list[str]) -> np.ndarray:
    return column.map({name: k for k, name in enumerate(names)}).to_numpy(dtype=np.int64)


def section(folder: Path, judged: dict[str, str]) -> Section | None:
    """Grades on the page: metrics, as text by their names, and who was called what."""
    found = read_grades(folder)
    if found is None or not judged:
        return None
    known, names = found
    shown = SHOWN | {
        f"calibration_error_{k}": f"calibration error of {name} or more"
        for k, name in enumerate(names)
        if k
    }
    rows = [[word, judged[key]] for key, word in shown.items() if key in judged]
    caption = f"{len(known):,} predictions of slides whose grade is known."
    metrics = Table(["", "value, with 95 % interval"], rows, caption, text=[""])
    table = confusion(_codes(known["grade"], names), _codes(known["call"], names), names)
    cells = [[name, *map(str, row)] for name, row in zip(names, table.to_numpy().tolist())]
    heads = ["true grade", *(f"called {name}" for name in names)]
    return Section("Grades", [WHAT], [metrics, Table(heads, cells, text=["true grade"])])
