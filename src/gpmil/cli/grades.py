"""Grades and types of slides on the command line: which class is which, and what the table says."""

import csv
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import TypeVar

from gpmil.cli.options import LabelTable, Source
from gpmil.data.bags import Bags
from gpmil.data.classes import fold, text, write_list
from gpmil.io import labels as tables
from gpmil.models import BagClassifier
from gpmil.models.graded import GradedClassifier
from gpmil.models.several import SeveralClasses

Table = TypeVar("Table", bound=LabelTable)
MOST = 5  # labels in a message


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
    model.check_named_classes()
    return two_sides(source, [str(text(name)) for name in model.named_classes], f"--{model.WORD}")


def two_sides(table: Table, names: Sequence[str], where: str) -> Table:
    """Any class but the first is positive; `where` they are named, for messages."""
    if table.positive or table.negative:
        raise ValueError(
            "--positive and --negative are for two classes, and the model has "
            f"{len(names)}: {', '.join(names)}, the first one negative. Leave them out, or fit "
            "with --task binary."
        )
    if table.labels is not None:
        _check_words(table, names, where)
    return replace(table, negative=write_list(names[:1]), positive=write_list(names[1:]))


def _check_words(table: LabelTable, names: Sequence[str], where: str) -> None:
    """Refuse labels that are no class of the model, in its own words and not in those of two."""
    excluded = next(csv.reader([table.exclude or ""], skipinitialspace=True), [])
    known = {fold(word) for word in (*names, *excluded, "-1")}
    found = Counter(word for word in written(table, None) if word is not None)
    other = {word: n for word, n in found.items() if fold(str(text(word))) not in known}
    if other:
        said = ", ".join(f"{word!r} ({n:,})" for word, n in list(other.items())[:MOST])
        more = f" and {len(other) - MOST} more" if len(other) > MOST else ""
        raise ValueError(
            f"{table.labels}: the labels {said}{more} are not among {where} {','.join(names)}. "
            "Is it the right column (--label)? Name all classes in their order, or leave some out "
            "with --exclude."
        )


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


def written(table: LabelTable, slides: Sequence[str] | None) -> list[str | None]:
    """What a table says of slides (None: of all that it has), word for word."""
    said = table.arguments()
    own = {name: said[name] for name in ("slide", "label", "patient", "slide_table")}
    return tables.written(slides, said["labels"], **own)
