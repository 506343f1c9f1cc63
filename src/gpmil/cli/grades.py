"""Grades and types of slides on the command line: which class is which, and what the table says."""

from collections.abc import Sequence
from dataclasses import replace
from typing import TypeVar

from gpmil.cli.options import LabelTable, Source
from gpmil.data.bags import Bags
from gpmil.data.classes import text, write_list
from gpmil.io import labels as tables
from gpmil.models import BagClassifier
from gpmil.models.graded import GradedClassifier
from gpmil.models.several import SeveralClasses

Table = TypeVar("Table", bound=LabelTable)


def by_class(source: Source, model: BagClassifier) -> Source:
    """The same data with the first class as the negative one, all others as positive ones."""
    if not isinstance(model, SeveralClasses):
        return source
    ordered = isinstance(model, GradedClassifier)
    if model.named_classes is None:
        why = f"{'grades have an order' if ordered else 'types have names'}, which nobody said"
        first = "the lowest first" if ordered else "the negative one first"
        names = "--grades benign,3,4,5" if ordered else "--classes benign,ductal,lobular"
        raise ValueError(f"{why}: {names}, {first}.")
    return two_sides(source, [str(text(name)) for name in model.named_classes])


def two_sides(table: Table, names: Sequence[str]) -> Table:
    """Any class but the first is positive."""
    if table.positive or table.negative:
        raise ValueError(
            "--positive and --negative are for two classes, and the model has "
            f"{len(names)}: {', '.join(names)}, the first one negative. Leave them out, or fit "
            "with --task binary."
        )
    return replace(table, negative=write_list(names[:1]), positive=write_list(names[1:]))


def true_classes(source: Source, model: BagClassifier, bags: Bags) -> list[str | None] | None:
    """The class of every slide as the table of labels has it; None where there are two classes."""
    if not isinstance(model, SeveralClasses) or model.named_classes is None:
        return None
    if source.labels is None:
        raise ValueError(
            "grades and types need a table with one row per slide: --labels labels.csv, with the "
            "columns slide and label (or --slide, --label)."
        )
    return written(source, bags.names.astype(str).tolist())


def written(table: LabelTable, slides: Sequence[str]) -> list[str | None]:
    """What a table says of slides, word for word."""
    said = table.arguments()
    own = {name: said[name] for name in ("slide", "label", "patient", "slide_table")}
    return tables.written(slides, said["labels"], **own)
