"""Tables and .npz, which hold a whole cohort, as one `Bags` with a report."""

import inspect
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from gpmil.data import classes
from gpmil.data.bags import Bags
from gpmil.io import npz, patients, sicapv2, tables
from gpmil.io.labels import Joined, join
from gpmil.io.report import NO_POSITIONS, ReadReport, graph_facts
from gpmil.io.steps import describe

FORMATS = ("table", "npz", "sicapv2")
ONE = "The parts of the split are read as one; gpmil.io.read_splits keeps them apart."
UNDERSTOOD = """\
  a folder with Train.csv and Test.csv (and Val.csv, wsi_labels.csv): the SICAPv2 feature tables
  a file .npz: arrays X, bag, y_bag, bag_id (and y_inst, x, y, split, group)
  a file .csv, .tsv, .csv.gz or .parquet: one row a patch: slide, label, features (and x, y, split)
  a folder that holds exactly one such file"""


def reader(path: Path) -> tuple[Callable[..., dict[str, Bags]], Path] | None:
    """Who reads the splits of what is at the path, and the file or folder to be read."""
    if path.is_file():
        if path.suffix == ".npz":
            return npz.read, path
        return (tables.read, path) if tables.is_table(path) else None
    if all((path / name).is_file() for name in ("Train.csv", "Test.csv")):
        return sicapv2.read, path
    files = sorted(f for f in path.iterdir() if f.suffix == ".npz" or tables.is_table(f))
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
    notes: list[str] = []
    own = labels is None
    if own and said["slide_table"] is not None:
        raise ValueError("slide_table= belongs to a table of labels: name that with labels=.")
    asked = {k: v for k, v in said.items() if v not in (None, False) and own}
    if which is tables.read:
        columns = asked if own else _NO_LABELS
        if said["patient"] is False:
            columns = columns | {"patient": False}
        bags, _, about = tables.whole(path, split=None, step=step, graph=graph, **columns)
        notes += about
    elif which is npz.read:
        _refuse({k: v for k, v in asked.items() if k not in classes.WORDS}, path)
        bags, split, about = npz.whole(path, step, graph, **asked)
        notes += [*([] if split is None else [ONE]), *about]
    else:
        _refuse(asked | ({} if step is None else {"step": step}), path)
        bags = sicapv2.whole(path)
        notes.append(ONE)
    joined = None if own else join(bags.names.tolist(), labels, **said)
    if joined is not None:
        bags = bags._with_labels(joined.labels, joined.groups)
        notes += joined.notes
    guessed = patients.Guess()
    if bags.groups is None and said["patient"] is not False:
        guessed = patients.guess(bags.names.astype(str).tolist())
        bags = bags if guessed.patients is None else bags._with_groups(guessed.patients)
        notes += filter(None, [guessed.note])
    report = _report(bags, kind, joined, notes, given=step is not None)
    return bags, replace(report, patients_doubted=guessed.warning)


_NO_LABELS: dict[str, Any] = {"label": False, "patient": False}


def _refuse(options: dict[str, Any], path: Path) -> None:
    for name in options:
        raise ValueError(f"{path} has no choice of {name}: leave {name}= out.")


def _report(
    bags: Bags, kind: str, joined: Joined | None, notes: list[str], given: bool
) -> ReadReport:
    unlabelled = tuple(bags.names[bags.labels < 0].tolist())
    steps = "none" if bags.step is None else describe(bags.step)
    where = "given" if given else "from the format" if kind == "sicapv2" else "from the positions"
    return ReadReport(
        format=kind,
        n_files=1,
        n_slides=len(bags),
        n_patches=bags.n_instances,
        n_features=bags.n_features,
        dtype=str(bags.features.dtype),
        encoder=None,
        step=steps if bags.step is None else f"{steps}, {where}",
        units=NO_POSITIONS if bags.coords is None else "as in the file",
        matched=len(bags) - len(unlabelled),
        labels_without_slide=() if joined is None else joined.labels_without_slide,
        slides_without_label=unlabelled,
        duplicates=() if joined is None else joined.duplicates,
        skipped=(),
        notes=tuple(notes),
        n_patients=None if bags.groups is None else len(set(bags.groups.tolist())),
        classes=bags.metadata.get("classes") or classes.of_codes(bags.labels),
        **graph_facts(bags),
    )


def options_of(which: Callable[..., Any]) -> list[str]:
    """Names of the options that a reader of splits takes."""
    return list(inspect.signature(which).parameters)[1:]
