"""Grades or types of the slides of a run: their table, how good they are, and their section."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pandas as pd

from gpmil.data.bags import Bags
from gpmil.data.classes import text
from gpmil.decide.estimates import Estimate
from gpmil.decide.grade_metrics import class_metrics, confusion, grade_metrics
from gpmil.models import BagClassifier
from gpmil.models.graded import GradedClassifier
from gpmil.models.graded_areas import isup
from gpmil.models.ordinal import MOST_AREA, OrdinalMIL
from gpmil.models.several import SeveralClasses
from gpmil.runs.class_table import CLASSES, GRADES, ClassTable
from gpmil.runs.naming import shown
from gpmil.runs.workspace import Workspace, csv_bytes
from gpmil.show.report import Section, Table

SHOWN_SLIDES = 60  # on the page; all of them are in the table
SHOWN = {
    "kappa": "quadratic weighted kappa",
    "accuracy": "accuracy",
    "mean_recall": "mean recall over the classes",
    "within_one": "within one grade",
    "log_loss": "log loss",
}
WHAT = {
    GRADES: "The grade of a slide is that of its worst patch. Shares of area, patterns and ISUP in "
    f"{GRADES} are a rule on top, which was checked on no data.",
    CLASSES: f"Types have no order; {CLASSES} has a probability of each for every slide.",
}


def several(model: BagClassifier) -> str | None:
    """The table that the model's predictions make; None where it knows two classes alone."""
    if not isinstance(model, SeveralClasses):
        return None
    named = model.named_classes
    n = len(model.classes_) if named is None else len(named)
    return (GRADES if isinstance(model, GradedClassifier) else CLASSES) if n > 2 else None


def class_rows(
    model: SeveralClasses, bags: Bags, y: Sequence[str | None] | None = None
) -> ClassTable:
    """A probability per class of every slide, the class that is called, areas, the true class."""
    p, file = model.predict_proba(bags), several(model)
    assert file is not None
    table = pd.DataFrame({"slide": bags.names.astype(str)})
    table = table.assign(**{f"P({g})": column for g, column in zip(model.classes_, p.T)})
    if file == GRADES:
        table["expected_grade"] = p @ np.arange(p.shape[1])
    table["call"] = [str(text(c)) for c in model.classes_[model.decided(p)]]
    if isinstance(model, OrdinalMIL) and bags.sizes.max() <= MOST_AREA:
        areas = model.predict_areas(bags).to_frame().drop(columns="bag")
        pairs = zip(areas["first"].astype(str), areas["second"].astype(str))
        groups = [isup(*pair) for pair in pairs]
        table = pd.concat([table, areas], axis=1)
        if any(group is not None for group in groups):
            table["isup"] = pd.array(groups, dtype="Int64")
    found = ClassTable(table, [str(text(c)) for c in model.classes_], file)
    return found if y is None else found.told(dict(zip(table["slide"], y)))


def write_classes(
    space: Workspace, model: BagClassifier, bags: Bags, y: Sequence[str | None] | None = None
) -> None:
    """grades.csv or classes.csv, where the model has three classes or more."""
    if isinstance(model, SeveralClasses) and several(model):
        found = class_rows(model, bags, y)
        space.write(found.file, csv_bytes(found.rows))


# --- How good they are ----------------------------------------------------------------------------
def class_estimates(table: ClassTable, predictions: pd.DataFrame) -> dict[str, Estimate]:
    """The metrics of the classes that a run called, intervals over patients; none where unknown."""
    known = table.known()
    if not len(known.rows):
        return {}
    slides = known.rows["slide"]
    patient = predictions.drop_duplicates("slide").set_index("slide")["patient"]
    own = patient.reindex(slides).fillna("").to_numpy()
    measure = grade_metrics if table.ordered else class_metrics
    return measure(
        known.codes(table.truth),
        known.p,
        decision=known.codes("call"),
        groups=np.where(own == "", "slide " + slides, own),
    )


def in_words(folder: Path) -> str:
    """How many grades or types are called rightly, to end a sentence; "" where none is known."""
    table = ClassTable.read(folder)
    known = None if table is None else table.known()
    if known is None or not len(known.rows):
        return ""
    right = int((known.rows["call"] == known.rows[known.truth]).sum())
    what = "grades" if known.ordered else "types"
    return (
        f" as {known.names[0]} or not; {right:,} of {len(known.rows):,} {what} are called rightly"
    )


def section(folder: Path, judged: dict[str, str]) -> Section | None:
    """Grades or types on the page: metrics, as text by their names, who was called what, slides."""
    table = ClassTable.read(folder)
    if table is None:
        return None
    tables = [*(_judged(table, judged) if judged else ()), _slides(table)]
    return Section("Grades" if table.ordered else "Types", [WHAT[table.file]], tables)


def _slides(table: ClassTable) -> Table:
    """The calls of slides, those that are least sure first."""
    order = np.argsort(table.p.max(1), kind="stable")[:SHOWN_SLIDES]
    more = [c for c in ("first", "second", "isup", table.truth) if c in table.rows]
    heads = ["slide", "called", *(f"P({name})" for name in table.names)]
    heads += [f"true {c}" if c == table.truth else f"{c} by area" for c in more]
    rows = [
        [row["slide"], row["call"], *(shown(p) for p in table.p[k]), *(row[c] for c in more)]
        for k, row in zip(order.tolist(), table.rows.iloc[order].to_dict("records"))
    ]
    rest = len(table.rows) - len(rows)
    caption = "Slides, the least sure first" + (
        f"; {rest:,} more in {table.file}." if rest else "."
    )
    return Table(heads, rows, caption, text=["slide", "called", *heads[-len(more) :]])


def _judged(table: ClassTable, judged: dict[str, str]) -> list[Table]:
    known, names, truth = table.known(), table.names, table.truth
    told = "calibration error of {} or more" if table.ordered else "calibration error of {}"
    each = {f"auc_{k}": f"AUC of {name} against the rest" for k, name in enumerate(names)}
    each |= {f"calibration_error_{k}": told.format(name) for k, name in enumerate(names)}
    rows = [[word, judged[key]] for key, word in (SHOWN | each).items() if key in judged]
    caption = f"{len(known.rows):,} predictions of slides whose {truth} is known."
    metrics = Table(["", "value, with 95 % interval"], rows, caption, text=[""])
    found = confusion(known.codes(truth), known.codes("call"), names)
    cells = [[name, *map(str, row)] for name, row in zip(names, found.to_numpy().tolist())]
    heads = [f"true {truth}", *(f"called {name}" for name in names)]
    return [metrics, Table(heads, cells, text=heads[:1])]
