"""Finished runs as one list of slides: what their files say, digit by digit.

Labels that `gpmil evaluate` was given take the place of those that a run has read.

Slides of several runs are matched by name. A run of `gpmil cv --repeats` has several rows per
slide and shows the first; a run with several couplings has a table for each.
"""

import gzip
import logging
import math
import os
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import pandas as pd

from gpmil import __version__
from gpmil.files import persistence
from gpmil.files.foreign import BadFile, read_json
from gpmil.runs.files import (
    EVIDENCE,
    LEVEL,
    PREDICTIONS,
    coupling_folder,
    patch_path,
    read_config,
    read_predictions,
    with_given_labels,
)
from gpmil.runs.learned import in_words, is_finite, numbers
from gpmil.runs.naming import class_words
from gpmil.runs.patient_table import PATIENTS, read_patients, with_labels_of_slides
from gpmil.show import slides

logger = logging.getLogger("gpmil")

NUMBERS = ("probability", "low", "high", "log_odds")
COUNTED = 64_000_000  # bytes of tables that are looked through to count their patches


class Missing(Exception):
    """What was asked for is not there; the message says why, in one line."""


# --- A run ----------------------------------------------------------------------------------------
@dataclass(frozen=True)
class ShownRun:
    """A finished run: its configuration, and rows of predictions.csv by slide and coupling."""

    folder: Path
    name: str
    config: dict[str, Any]
    tables: dict[str, pd.DataFrame]  # by coupling, "" where there is but one; the index: slides
    fitted_coupling: float | None = None

    @property
    def couplings(self) -> list[str] | None:
        """The couplings that were predicted with, None where there is but that of the fit."""
        return None if list(self.tables) == [""] else list(self.tables)

    @property
    def shown(self) -> str:
        """The coupling that is shown first: that of the fit, or the first."""
        fitted = (c for c in self.couplings or [] if float(c) == self.fitted_coupling)
        return next(fitted, next(iter(self.tables)))

    def coupling(self, asked: str | None) -> str:
        """The coupling asked for by its text, that which is shown first by default."""
        if asked is None or asked == "":
            return self.shown
        if asked not in self.tables:
            known = ", ".join(self.couplings or ["only that of the fit"])
            raise Missing(f"run {self.name} has no coupling {asked!r}; it has {known}.")
        return asked

    def calls(self, coupling: str) -> bool:
        """Whether slides are called with a coupling: with that of the fit alone."""
        return coupling == "" or float(coupling) == self.fitted_coupling

    def patch_table(self, slide: str, coupling: str) -> Path:
        """patches/<slide>.csv.gz; Missing where there is none."""
        under = coupling_folder(coupling) if coupling else ""  # later repeats have folders, too
        file = patch_path(self.folder, slide, under)
        if not file.is_file():
            raise Missing(f"run {self.name} has no table of patches for slide {slide!r}.")
        return self._own(file)

    def file(self, name: str) -> Path | None:
        """A file of the run, where it is there."""
        path = self.folder / name
        return self._own(path) if path.is_file() else None

    def _own(self, file: Path) -> Path:
        if not inside(file, self.folder):
            raise Missing(f"{file.name} of run {self.name} is a link out of its folder: not read.")
        return file


def inside(file: Path, folder: Path) -> bool:
    """Whether a file, all links followed, lies in the folder."""
    return os.path.realpath(file).startswith(_root(os.fspath(folder)) + os.sep)


@lru_cache
def _root(folder: str) -> str:
    return os.path.realpath(folder)


def open_run(folder: Path, name: str | None = None) -> ShownRun:
    """Read a run; a ValueError says in one line why it cannot be shown."""
    config = read_config(folder)
    table = _predictions(folder)
    if "coupling" in table:
        tables = {str(c): _once(rows) for c, rows in table.groupby("coupling", sort=False)}
    else:
        tables = {"": _once(table)}
    return ShownRun(folder, name or folder.resolve().name, config, tables, _fitted(folder, config))


def _predictions(folder: Path) -> pd.DataFrame:
    frame = read_predictions(folder, ["slide", "probability"])
    likelier = (frame["probability"] > 0.5).astype(float)  # what earlier versions called
    frame["call"] = frame.get("call", likelier)
    for name in (*NUMBERS, *EVIDENCE, "label"):
        frame[name] = frame.get(name, math.nan)
    for name in ("patient", "decision"):
        frame[name] = frame.get(name, "")
    return with_given_labels(frame, folder)


def _once(rows: pd.DataFrame) -> pd.DataFrame:
    """Every slide once: the first repeat."""
    return rows.drop_duplicates("slide").set_index("slide")


def _fitted(folder: Path, config: dict[str, Any]) -> float | None:
    """The coupling of the fit, where the run, or the model it used, says it."""
    settings = as_dict(as_dict(config.get("model")).get("settings"))
    card = model_card(folder, config)
    known: Any = as_dict(card.get("fitted")).get("coupling_", settings.get("coupling"))
    return float(known) if is_finite(known) else None


def model_card(folder: Path, config: dict[str, Any]) -> dict[str, Any]:
    """model.json of the model in the run, or of the one it predicted with; empty without one."""
    place = model_folder(folder, config)
    if place is None:
        return {}
    try:
        return as_dict(read_json(place / persistence.CARD))
    except BadFile as error:
        logger.warning("%s", error)
        return {}


def model_folder(folder: Path, config: dict[str, Any]) -> Path | None:
    """Where the model of a run is, if it is still there."""
    used = as_dict(config.get("options")).get("model")
    for place in (folder, *(found_again(str(used), folder) if used else ())):
        for model in (place / "model", place):
            if (model / persistence.CARD).is_file():
                return model
    return None


def found_again(path: str, folder: Path) -> list[Path]:
    """Where a path that a run has noted may be: as it was given, or beside the run."""
    places = [Path.cwd(), *list(folder.resolve().parents)[:3]]
    return [place / path for place in places if (place / path).exists()]


def as_dict(value: Any) -> dict[str, Any]:
    """What a configuration says, empty where it says something else."""
    return value if isinstance(value, dict) else {}


def patient_columns(run: ShownRun, names: Sequence[str]) -> dict[str, list[Any]] | None:
    """Every patient with its slides, by their numbers; None where no patient has several."""
    try:
        known = None if run.file(PATIENTS) is None else read_patients(run.folder)
    except (Missing, BadFile) as error:
        logger.warning("%s", error)
        return None
    if known is None:
        return None
    slides = run.tables[run.shown]
    of = slides.groupby("patient").groups
    place = {name: k for k, name in enumerate(names)}
    first = with_labels_of_slides(known.drop_duplicates("patient"), slides)
    # those whose slides are others now than were predicted together say nothing
    own = first[[len(of.get(p, ())) == n for p, n in zip(first["patient"], first["slides"])]]
    found: dict[str, list[Any]] = {c: _known(own[c]) for c in ("probability", "call", "label")}
    own_slides = [[place[str(name)] for name in of[p]] for p in own["patient"]]
    return {"name": own["patient"].tolist(), "slides": own_slides} | found


# --- All runs -------------------------------------------------------------------------------------
@dataclass(frozen=True)
class ShownCohort:
    """The slides of all runs, in the order of the first run; its files where they are known."""

    runs: list[ShownRun]
    names: list[str]
    files: dict[str, Path] = field(default_factory=dict)  # slide files by name
    slides_folder: Path | None = None

    def run(self, k: int) -> ShownRun:
        """The k-th run."""
        if not 0 <= k < len(self.runs):
            raise Missing(f"there is no run {k}: there are {len(self.runs)}, counted from 0.")
        return self.runs[k]

    def slide(self, k: int) -> str:
        """The name of the k-th slide."""
        if not 0 <= k < len(self.names):
            raise Missing(f"there is no slide {k}: there are {len(self.names)}, counted from 0.")
        return self.names[k]

    def slide_file(self, k: int) -> Path:
        """The file of the k-th slide."""
        name = self.slide(k)
        file = self.files.get(name)
        if file is None:
            advice = "" if self.slides_folder else " Give their folder with --slides."
            raise Missing(f"there is no slide file for {name!r}.{advice}")
        if not file.is_file():
            raise Missing(f"the slide file {file.name} is no longer there.")
        if self.slides_folder is not None and not inside(file, self.slides_folder):
            raise Missing(f"the slide file {file.name} is now a link out of its folder: not read.")
        return file


def open_cohort(folders: Sequence[Path], slides_folder: Path | None = None) -> ShownCohort:
    """Open runs and look for slide files; a ValueError names what cannot be shown."""
    runs = [
        open_run(folder, name) for folder, name in zip(folders, unique_names(folders), strict=True)
    ]
    names = list(dict.fromkeys(s for run in runs for t in run.tables.values() for s in t.index))
    if not names:
        raise ValueError(f"{folders[0]}: {PREDICTIONS} has no slide, there is nothing to show.")
    files = {} if slides_folder is None else _slide_files(slides_folder, names)
    return ShownCohort(runs, names, files, slides_folder)


def unique_names(folders: Sequence[Path]) -> list[str]:
    """Names of folders, with as much of the path as tells them apart; numbered where that fails.

    >>> unique_names([Path("a/cv"), Path("b/cv"), Path("c/fit")])
    ['a/cv', 'b/cv', 'fit']
    """
    paths = [folder.resolve() for folder in folders]
    names = [path.name for path in paths]
    for k, path in enumerate(paths):
        if sum(other.name == path.name for other in paths) > 1:
            names[k] = f"{path.parent.name}/{path.name}"
    return [f"{n} ({k})" if n in names[:k] else n for k, n in enumerate(names)]


def _slide_files(folder: Path, names: Iterable[str]) -> dict[str, Path]:
    found = slides.find(folder)
    kept = {name: found[name] for name in names if name in found}
    outside = [name for name, file in kept.items() if not inside(file, folder)]
    for name in outside:
        logger.warning("%s is a link out of %s: not shown.", kept.pop(name).name, folder)
    if not kept:
        logger.warning("no slide of the runs has a file in %s.", folder)
    return kept


# --- As JSON --------------------------------------------------------------------------------------
def as_json(cohort: ShownCohort, similar: bool) -> dict[str, Any]:
    """The cohort as the page reads it; null where a number is not known."""
    label = _labels(cohort)
    return {
        "version": __version__,
        "title": ", ".join(run.name for run in cohort.runs),
        "runs": [_run_card(k, run) for k, run in enumerate(cohort.runs)],
        "columns": {
            "name": cohort.names,
            "patient": _first_said(cohort, "patient", ""),
            "label": label,
            "image": [name in cohort.files for name in cohort.names],
            "patches": count_patches(cohort),
            "runs": [_run_columns(run, cohort.names) for run in cohort.runs],
        },
        "patients": [patient_columns(run, cohort.names) for run in cohort.runs],
        "positive_class": _positive(cohort.runs),
        "class_words": _class_words(cohort.runs),
        "similar": similar,
        "labels_known": any(y is not None for y in label),
    }


def _run_card(k: int, run: ShownRun) -> dict[str, Any]:
    options = as_dict(run.config.get("options"))
    first, card = _first_columns(run), model_card(run.folder, run.config)
    return {
        "id": k,
        "name": run.name,
        "model": as_dict(run.config.get("model")).get("class") or card.get("class"),
        "command": run.config["command"],
        "couplings": run.couplings,
        "rate": as_dict(options.get("asked")).get("rate"),
        "fitted_coupling": run.fitted_coupling,
        "learned": in_words(numbers(as_dict(card.get("fitted")))) or None,
        "level": LEVEL,
        "has_p_values": "p_value" in first,
        "has_patches": bool(first),
    }


def _first_columns(run: ShownRun) -> list[str]:
    """The columns of the first table of patches that can be read, of the coupling shown first."""
    for coupling in dict.fromkeys([run.shown, *run.tables]):
        for slide in run.tables[coupling].index[:20]:
            try:
                with gzip.open(run.patch_table(slide, coupling), "rt", encoding="utf-8") as file:
                    return file.readline().strip().split(",")
            except (Missing, OSError, EOFError, ValueError, zlib.error):
                continue
    return []


def _run_columns(run: ShownRun, names: Sequence[str]) -> dict[str, Any]:
    found = {c: _columns(table, names) for c, table in run.tables.items()}
    own = found[run.shown]
    if run.couplings is None:
        return own
    if not run.calls(run.shown):  # maps to compare, and nothing to call slides by
        own = {name: [None] * len(names) for name in own} | {"decision": [""] * len(names)}
    return own | {"couplings": found}


def _columns(table: pd.DataFrame, names: Sequence[str]) -> dict[str, list[Any]]:
    rows = table.reindex(names)
    split = [c for c in EVIDENCE if rows[c].notna().any()]  # of models with a slide context
    found: dict[str, list[Any]] = {c: _known(rows[c]) for c in (*NUMBERS, "call", *split)}
    return found | {"decision": rows["decision"].fillna("").tolist()}


def _known(column: pd.Series) -> list[float | None]:
    """JSON knows neither nan nor infinity; log odds of a certainty are the largest number."""
    most = 1.7976931348623157e308
    return [None if math.isnan(v) else min(max(v, -most), most) for v in column.tolist()]


def _first_said(cohort: ShownCohort, column: str, nothing: Any) -> list[Any]:
    """What the first run that says anything says of every slide."""
    said: dict[str, Any] = {}
    for run in cohort.runs:
        for slide, value in run.tables[run.shown][column].items():
            if value != nothing and value == value:
                said.setdefault(str(slide), value)
    return [said.get(name, nothing) for name in cohort.names]


def _labels(cohort: ShownCohort) -> list[int | None]:
    values = _first_said(cohort, "label", math.nan)
    return [int(v) if v in (0.0, 1.0) else None for v in values]


def _positive(runs: Sequence[ShownRun]) -> str | None:
    for run in runs:
        source = as_dict(as_dict(run.config.get("options")).get("source"))
        if source.get("positive") is not None:
            return str(source["positive"])
    return None


def _class_words(runs: Sequence[ShownRun]) -> tuple[str, str]:
    """What negative and positive slides are called, by the first run that names them."""
    found = [class_words(run.config) for run in runs]
    return next((words for words in found if words != class_words({})), found[0])


def count_patches(cohort: ShownCohort) -> list[int | None]:
    """Patches of every slide, by the first run with a table; None for all where that is long."""
    tables = [_any_table(cohort, name) for name in cohort.names]
    if sum(file.stat().st_size for file in tables if file is not None) > COUNTED:
        return [None] * len(tables)
    return [None if file is None else _count(file) for file in tables]


def _any_table(cohort: ShownCohort, slide: str) -> Path | None:
    for run in cohort.runs:
        try:
            return run.patch_table(slide, run.shown)
        except Missing:
            continue
    return None


def _count(file: Path) -> int | None:
    try:
        return max(gzip.decompress(file.read_bytes()).count(b"\n") - 1, 0)
    except (OSError, EOFError, zlib.error):
        return None
