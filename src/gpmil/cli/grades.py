"""Grades of slides on the command line: which class is which, and what the table says."""

from dataclasses import replace

from gpmil.cli.options import Source
from gpmil.data.bags import Bags
from gpmil.data.classes import text
from gpmil.io import labels as tables
from gpmil.models import BagClassifier
from gpmil.models.graded import GradedClassifier


def by_grade(source: Source, model: BagClassifier) -> Source:
    """The same data with the lowest grade as the negative class, all others as positive ones."""
    if not isinstance(model, GradedClassifier):
        return source
    if source.positive or source.negative:
        raise ValueError(
            "--positive and --negative are for two classes; grades have an order: --grades "
            "benign,3,4,5, the lowest first."
        )
    if model.grades is None:
        raise ValueError(
            "grades have an order, which nobody said: --grades benign,3,4,5, the lowest first."
        )
    names = _names(model)
    return replace(source, negative=_quoted(names[:1]), positive=_quoted(names[1:]))


def grades_of(source: Source, model: BagClassifier, bags: Bags) -> list[str | None] | None:
    """The grade of every slide as the table of labels has it; None where there are two classes."""
    if not isinstance(model, GradedClassifier) or model.grades is None:
        return None
    if source.labels is None:
        raise ValueError(
            "grades need a table with one row per slide: --labels labels.csv, with the columns "
            "slide and label (or --slide, --label)."
        )
    said = source.arguments()
    own = {name: said[name] for name in ("slide", "label", "patient", "slide_table")}
    return tables.written(bags.names.astype(str).tolist(), source.labels, **own)


def _names(model: GradedClassifier) -> list[str]:
    return [str(text(name)) for name in model.grades]


def _quoted(names: list[str]) -> str:
    """Names with commas between, as labels are asked for."""
    return ",".join(f'"{name}"' if "," in name else name for name in names)
