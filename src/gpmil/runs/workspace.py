"""A run being written: assembled in a folder beside, continued after an interruption.

    config.json             command, options, where the data are, model settings, versions; steps
                            of the grids and sides of the patches
    model/                  the fitted model (`gpmil.load`)
    splits.csv              who was trained on and who was tested
    predictions.csv         one row per slide
    patients.csv            one row per patient, where any has several slides
    patches/<slide>.csv.gz  one row per patch; patches/coupling-<c>/ if there are several couplings,
                            patches/repeat-<k>/ for the later repeats of a cross-validation
    attention/              as patches/, the weights of a model of attention: no probabilities
    labels.csv              what gpmil evaluate was given in place of the labels that were read
    metrics.json            with intervals by patient, or by slide where no patient is known
    marks.jsonl             marks of patches made in the viewer; taught/, what it saved
    log.txt                 the only place for times

Everything is assembled in `<out>.partial`, each file written beside its place and renamed; a part
of the work (a fold, a batch of slides) counts as done once its rows are in `.units`. The folder
gets its name when it is complete. The same command continues from the parts that are done, and
what it writes does not depend on where it was stopped.
"""

import json
import logging
import os
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

import pandas as pd

from gpmil.files.whole import (
    LOCK,
    PARTIAL,
    fresh_folder,
    json_bytes,
    locked,
    swap,
    write_whole,
    written_by_someone,
)
from gpmil.runs.files import CARD, FORMAT, MARKS, PATCHES, read_config, read_table

logger = logging.getLogger("gpmil")

DIGITS = "%.9g"  # what does not depend on the number of threads
LOG, UNITS = "log.txt", ".units"
MADE = ".made"  # in folders of files that are made once
ADDED = ("heatmaps", "qupath")
"""Folders that later commands add to a finished run."""


# --- A run that can be continued ------------------------------------------------------------------
@dataclass(frozen=True)
class Workspace:
    """The folder in which a run is assembled."""

    folder: Path
    log_file: TextIO

    def log(self, text: str) -> None:
        """A line in log.txt, with the time."""
        self.log_file.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {text}\n")
        self.log_file.flush()

    def write(self, name: str, content: bytes) -> None:
        """A file of the run, whole or not at all."""
        write_whole(self.folder / name, content)

    def done(self, unit: str) -> bool:
        """Whether a part of the work was finished, now or before."""
        return self._unit(unit).is_file()

    def finish(self, unit: str, rows: pd.DataFrame) -> None:
        """Note a part as finished, with its rows of predictions.csv."""
        write_whole(self._unit(unit), csv_bytes(rows))
        self.log(f"finished {unit}")

    def pooled(self, units: Sequence[str]) -> pd.DataFrame:
        """The rows of all parts as they were written, digit by digit."""
        tables = [read_table(self._unit(u), "a finished part") for u in units]
        return pd.concat(tables, ignore_index=True)

    def _unit(self, unit: str) -> Path:
        return self.folder / UNITS / f"{unit}.csv"


@contextmanager
def workspace(out: str | os.PathLike, config: Mapping[str, Any]) -> Iterator[Workspace]:
    """A folder to write into, which becomes `out` when the block ends.

    Where it fails, or is killed, finished parts stay in `<out>.partial` for the same command to
    continue; without any there is nothing to keep, and it vanishes.
    """
    path = _check_free(Path(out), config)
    partial = path.with_name(path.name + PARTIAL)
    card = json.loads(json.dumps({"format": FORMAT, **config}))
    _check_same(partial, card)
    partial.mkdir(parents=True, exist_ok=True)
    with locked(partial) as unlock, (partial / LOG).open("a", encoding="utf-8") as log_file:
        try:
            _begin(partial, card)
            space = Workspace(partial, log_file)
            with _logged(space):
                yield space
            names = sorted(p.name for p in partial.iterdir() if not p.name.startswith("."))
            write_whole(partial / CARD, json_bytes(card | {"files": names}))
            space.log("complete")
            _check_free(path, config)
            log_file.close()  # an open file would keep its folder from being renamed on Windows
            unlock()
            swap(partial, path)
        except BaseException:
            _keep_finished(partial)
            raise
    shutil.rmtree(path / UNITS)


def _keep_finished(partial: Path) -> None:
    if any((partial / UNITS).glob("[!.]*.csv")):
        logger.warning(
            "finished parts are kept in %s: the same command continues from there.", partial
        )
    else:
        shutil.rmtree(partial, ignore_errors=True)


def _check_free(path: Path, config: Mapping[str, Any]) -> Path:
    """The place of the run, if it is free or holds an earlier run of the same command."""
    path = check_target(path)
    there = read_config(path)["command"] if (path / CARD).is_file() else config["command"]
    if there != config["command"]:
        raise ValueError(
            f"{path} holds a run of gpmil {there}, which gpmil {config['command']} does not "
            "replace: name another folder with --out."
        )
    return path


def _begin(partial: Path, card: dict[str, Any]) -> None:
    """The config, and away with what was being written when an earlier run was killed."""
    leftovers = [
        *partial.glob(".*"),
        *partial.glob(f"{UNITS}/.*"),
        *partial.glob(f"{PATCHES}/**/.*"),
    ]
    for item in leftovers:
        if item.name not in (UNITS, LOCK):
            shutil.rmtree(item) if item.is_dir() else item.unlink()
    (partial / UNITS).mkdir(exist_ok=True)
    write_whole(partial / CARD, json_bytes(card))


def _check_same(partial: Path, card: dict[str, Any]) -> None:
    """What an earlier run left must be of the same command and configuration."""
    if not partial.exists():
        return
    if not partial.is_dir():
        raise ValueError(f"{partial} is a file, where a run is to be assembled: move it away.")
    if not (partial / CARD).exists():
        if any(not n.startswith(".") and n != LOG for n in written_by_someone(partial)):
            raise ValueError(
                f"{partial} was not written by gpmil (it has no {CARD}): delete or rename it."
            )
        return
    # Where features are kept for the next time changes no result.
    before, now = (
        {k: v for k, v in c.items() if k not in ("files", "cache")}
        for c in (read_config(partial), card)
    )
    differ = sorted(differences(before, now))
    if differ:
        shown = "; ".join(differ[:4]) + ("; ..." if len(differ) > 4 else "")
        raise ValueError(
            f"{partial} was left by another run than this one ({shown}). Repeat that command to "
            "continue it, or delete or rename the folder."
        )


def differences(before: Any, now: Any, name: str = "") -> Iterator[str]:
    """What differs between two configurations, in words.

    >>> list(differences({"options": {"folds": 5}}, {"options": {"folds": 3}}))
    ['options.folds: 5 there, 3 here']
    """
    if isinstance(before, dict) and isinstance(now, dict):
        for key in dict.fromkeys([*before, *now]):
            yield from differences(before.get(key), now.get(key), f"{name}.{key}".lstrip("."))
    elif before != now:
        yield f"{name}: {before!r:.60} there, {now!r:.60} here"


class _ToLog(logging.Handler):
    def __init__(self, space: Workspace):
        super().__init__(logging.INFO)
        self.space = space

    def emit(self, record: logging.LogRecord) -> None:
        self.space.log(record.getMessage())


@contextmanager
def _logged(space: Workspace) -> Iterator[None]:
    """The library's messages go to log.txt; warnings still reach the terminal too."""
    handlers: list[logging.Handler] = [_ToLog(space)]
    if not logger.hasHandlers():
        handlers.append(logging.StreamHandler())
        handlers[1].setLevel(logging.WARNING)
    level = logger.level
    for handler in handlers:
        logger.addHandler(handler)
    logger.setLevel(min(level or logging.INFO, logging.INFO))
    try:
        yield
    finally:
        logger.setLevel(level)
        for handler in handlers:
            logger.removeHandler(handler)


def csv_bytes(frame: pd.DataFrame) -> bytes:
    """A table as csv, the same bytes for the same numbers."""
    return frame.to_csv(index=False, float_format=DIGITS, lineterminator="\n").encode()


# --- Where a run may be written -------------------------------------------------------------------
@contextmanager
def run_folder(path: str | os.PathLike, config: Mapping[str, Any]) -> Iterator[Path]:
    """A folder to write into; it becomes `path` when the block ends, and vanishes if it fails.

    `config` is written to config.json with the names of everything else in the folder: a later
    run knows what it may replace. A folder that gpmil did not write, or that holds other files
    too, is refused (ValueError) before the block begins.
    """
    path = check_target(Path(path))
    with fresh_folder(path) as fresh:
        yield fresh
        names = sorted(item.name for item in fresh.iterdir())
        write_whole(fresh / CARD, json_bytes({"format": FORMAT, **config, "files": names}))


def check_target(path: Path) -> Path:
    """A folder that may be written: new, empty, or of an earlier run of gpmil alone."""
    path = path.resolve()
    if path == Path.cwd():
        raise ValueError("the current folder cannot be replaced: name a folder to be made in it.")
    if path.exists() and not path.is_dir():
        raise ValueError(f"{path} is a file: name a folder.")
    if not path.exists() or not any(path.iterdir()):
        return path
    others = sorted(_not_ours(path))
    if MARKS in others:
        raise ValueError(
            f"{path} holds marks that people made in the viewer ({MARKS}), which no run replaces: "
            "name another folder, or move them away."
        )
    if others:
        found = ", ".join(others[:3]) + (", ..." if len(others) > 3 else "")
        raise ValueError(
            f"{path} holds files that gpmil did not write ({found}): name a new or empty folder."
        )
    return path


def _not_ours(path: Path) -> set[str]:
    """Names in a folder that no run of gpmil wrote; hidden ones and a desktop's do not count.

    Maps that were added to a run later are not on its list, and ours.
    """
    names = {name for name in written_by_someone(path) if not name.startswith(".")}
    try:
        card = json.loads((path / CARD).read_text(encoding="utf-8"))
        written = {*card["files"], CARD} if card["format"] == FORMAT else set()
    except (OSError, ValueError, KeyError, TypeError):
        written = set()
    added = {name for name in names - written if name.removesuffix(PARTIAL) in ADDED}
    return names - written - {name for name in added if _only_maps(path / name)}


def _only_maps(path: Path) -> bool:
    """Whether a folder holds what gpmil added to a run, or a folder of it for each coupling."""
    if not path.is_dir():
        return False
    if (path / MADE).is_file():  # it is still being filled
        return True
    return all(_only_maps(path / name) for name in _not_ours(path))
