"""Grades of the slides of a run: grades.csv."""

from collections.abc import Sequence

import numpy as np
import pandas as pd

from gpmil.data.bags import Bags
from gpmil.models import BagClassifier
from gpmil.models.graded import GradedClassifier
from gpmil.runs.workspace import Workspace, csv_bytes

GRADES = "grades.csv"


def write_grades(
    space: Workspace, model: BagClassifier, bags: Bags, y: Sequence[str | None] | None = None
) -> None:
    """A probability per grade of every slide, the grade that is called, and the true one if known.

    Of a model of two grades predictions.csv says it all.
    """
    if not isinstance(model, GradedClassifier) or len(model.classes_) < 3:
        return
    p = model.predict_proba(bags)
    table = pd.DataFrame({"slide": bags.names.astype(str)})
    table = table.assign(**{f"P({g})": column for g, column in zip(model.classes_, p.T)})
    table["expected_grade"] = p @ np.arange(p.shape[1])
    table["call"] = model.classes_[model.decided(p)]
    if y is not None:
        table["grade"] = ["" if value is None else value for value in y]
    space.write(GRADES, csv_bytes(table))
