"""Tables and .npz, which hold a whole cohort, as one `Bags` with a report."""

import inspect
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from gpmil.data import classes
from gpmil.data.bags import Bags
from gpmil.io import npz, patients, sicapv2, tables
from gpmil.io.labels import LABEL_OPTIONS, JoinedLabels, join
from gpmil.io.report import NO_POSITIONS, ReadReport, cohort_facts
from gpmil.io.steps import describe
from gpmil.io.table_files import is_table

FORMATS = ("table", "npz", "sicapv2")
ONE = "The parts of the split are read as one; gpmil.io.read_splits keeps them apart."
UNDERSTOOD = """\
  a folder with Train.csv and Test.csv (and Val.csv, wsi_labels.csv): the SICAPv2 feature tables
  a file .npz: arrays X, bag, y_bag, bag_id (and y_inst, x, y, split, group)
  a table .csv, .tsv, .csv.gz or .parquet, one row per patch: slide, label, features (x, y, split)
  a folder that holds exactly one such file"""


def reader(path: Path) -> tuple[Callable[..., dict[str, Bags]], Path] | None:
    """Who reads the splits of what is at the path, and the file or folder to be read."""
    if path.is_file():
        if path.suffix == ".npz":
            return npz.read, path
        return (tables.read, path) if is_table(path) else None
    if all((path / name).is_file() for name in ("Train.csv", "Test.csv")):
        return sicapv2.read, path
    files = sorted(f for f in path.iterdir() if f.suffix == ".npz" or is_table(f))
    if len(files) == 1:
        return reader(files[0])
    if files:
        raise ValueError(
            f"{path}: expected Train.csv and Test.csv, or exactly one table or .npz; found "
            f"{', '.join(f.name for f in files[:5])}{', ...' if len(files) > 5 else ''}. Name the "
            f"file itself. Understood are\n{UNDERSTOOD}"
        )
    return None


def read(
    path: Path,
    labels: Any,
    said: dict[str, Any],
    step: Any,
    graph: str | None,
    format: str | None = None,
) -> tuple[Bags, ReadReport]:
    """A table, an .npz or the SICAPv2 tables as one cohort, splits together.

    `said` are options of `labels.join`.
    """
    found = reader(path)
    if found is None:
        raise ValueError(f"{path} is no file that can be read. Understood are\n{UNDERSTOOD}")
    which, path = found
    kind = {tables.read: "table", npz.read: "npz"}.get(which, "sicapv2")
    if format not in (None, kind):
        raise ValueError(f"{path}: expected format {format!r}, found {kind!r}.")
    own = labels is None
    if own and said["slide_table"] is not None:
        raise ValueError("slide_table= belongs to a table of labels: name that with labels=.")
    bags, notes = _whole(kind, path, said if own else NOTHING_SAID, step, graph)
    joined = None if own else join(bags.names.tolist(), labels, **said)
    if joined is not None:
        bags = bags.with_labels(joined.labels, joined.groups)
        notes += joined.notes
    guessed = patients.Guess()
    if bags.groups is None and said["patient"] is not False:
        guessed = patients.guess(bags.names.astype(str).tolist())
        bags = bags if guessed.patients is None else bags.with_groups(guessed.patients)
        notes += filter(None, [guessed.note])
    report = _report(bags, kind, joined, notes, given=step is not None)
    return bags, replace(report, patients_doubted=guessed.warning)


# Of a file that is to give no labels; the patients of the slides are those of the labels, too.
NOTHING_SAID: dict[str, Any] = dict.fromkeys(LABEL_OPTIONS) | {"label": False, "patient": False}


def _whole(
    kind: str, path: Path, said: dict[str, Any], step: Any, graph: str | None
) -> tuple[Bags, list[str]]:
    """The cohort of a file, splits together, and notes on it."""
    given = {k: v for k, v in said.items() if v is not None and v is not False}
    words = {k: v for k, v in given.items() if k in classes.WORDS}
    if kind == "table":
        names = {k: said[k] for k in ("slide", "label", "patient")}
        bags, _, notes = tables.whole(path, names, words, step, graph)
        return bags, list(notes)
    if kind == "npz":
        _refuse({k: v for k, v in given.items() if k not in words}, path)
        bags, split, notes = npz.whole(path, words, step, graph)
        return bags, [*([] if split is None else [ONE]), *notes]
    _refuse(given | ({} if step is None else {"step": step}), path)
    return sicapv2.whole(path), [ONE]


def _refuse(options: dict[str, Any], path: Path) -> None:
    for name in options:
        raise ValueError(f"{path} has no choice of {name}: leave {name}= out.")


def _report(
    bags: Bags, kind: str, joined: JoinedLabels | None, notes: list[str], given: bool
) -> ReadReport:
    unlabelled = tuple(bags.names[bags.labels < 0].tolist())
    steps = "none" if bags.step is None else describe(bags.step)
    where = "given" if given else "from the format" if kind == "sicapv2" else "from the positions"
    return ReadReport(
        format=kind,
        n_files=1,
        encoder=None,
        step=steps if bags.step is None else f"{steps}, {where}",
        units=NO_POSITIONS if bags.coords is None else "as in the file",
        matched=len(bags) - len(unlabelled),
        labels_without_slide=() if joined is None else joined.labels_without_slide,
        slides_without_label=unlabelled,
        duplicates=() if joined is None else joined.duplicates,
        skipped=(),
        notes=tuple(notes),
        classes=bags.metadata.get("classes") or classes.of_codes(bags.labels),
        **cohort_facts(bags),
    )


def options_of(which: Callable[..., Any]) -> list[str]:
    """Names of the options that a reader of splits takes."""
    return list(inspect.signature(which).parameters)[1:]
