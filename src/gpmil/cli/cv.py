"""`gpmil cv`: every slide predicted by a model that has not seen it, nor its patient if known."""

import hashlib
import logging
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from jaxtyping import Int, Shaped
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components
from sklearn.base import clone

from gpmil.cli.config import repeated, run_config
from gpmil.cli.grades import by_class, true_classes
from gpmil.cli.options import LabelTable, Source, labelled
from gpmil.cli.settings import model_card, model_from_card
from gpmil.cli.terminal import print_line, progress, show_metrics
from gpmil.data.bags import Bags
from gpmil.data.checks import listed
from gpmil.data.folds import folds
from gpmil.files.whole import json_bytes
from gpmil.io import tables
from gpmil.io.labels import column_of, key, read_table
from gpmil.io.table_files import is_table, read_frame
from gpmil.models import BagClassifier
from gpmil.models.checks import count
from gpmil.models.several import SeveralClasses
from gpmil.runs.data_card import placement
from gpmil.runs.files import (
    ATTENTION,
    METRICS,
    PATCHES,
    PREDICTIONS,
    read_predictions,
    repeat_folder,
)
from gpmil.runs.grades import class_rows, several
from gpmil.runs.judge import judge_run
from gpmil.runs.page import write as write_report
from gpmil.runs.patient_table import PATIENTS
from gpmil.runs.patients import asks_for_patients, patient_rows
from gpmil.runs.predict import PredictionOptions, attention, predict, refer_rule, write_patches
from gpmil.runs.workspace import Workspace, csv_bytes, workspace
from gpmil.show.report import RESEARCH

logger = logging.getLogger("gpmil")
PARTS = ("train", "val", "test")  # columns of CLAM's splits


@dataclass(frozen=True)
class Folds:
    """Which slides are held out."""

    folds: int = 5
    repeats: int = 1
    splits: str | None = None
    site: str | None = None
    seed: int = 0

    def check(self) -> None:
        """Before any file is read."""
        count("--folds", self.folds, least=2)
        count("--repeats", self.repeats, least=1)
        count("--seed", self.seed, least=0)
        if self.splits is not None and (self.site is not None or self.repeats > 1):
            raise ValueError("--splits says who is tested: leave out --site and --repeats.")


@dataclass(frozen=True)
class Split:
    """One model to fit: who it is trained on and who it is tested on."""

    repeat: int
    fold: str
    train: Int[np.ndarray, " train"]
    test: Int[np.ndarray, " test"]

    @property
    def unit(self) -> str:
        """Its name as a part of the work."""
        return f"repeat-{self.repeat}-fold-{self.fold}"


def repeat(file: Path, out: Path, cache: Path | None) -> None:
    """Cross-validate again as a config.json says."""
    card, source, asked, options, cache = repeated(file, "cv", cache)
    model = model_from_card(card["model"])
    run(source, Folds(**options), asked, out, model, cache, before=card)


def run(
    source: Source,
    held_out: Folds,
    asked: PredictionOptions,
    out: Path,
    model: BagClassifier,
    cache: Path | None = None,
    before: dict[str, Any] | None = None,
) -> None:
    """Fit and predict split by split; finished ones are not computed again."""
    held_out.check()
    asked.check()
    bags, lines = by_class(source, model).cohort(cache)
    bags = labelled(bags)
    y = true_classes(source, model, bags)
    splits = planned(bags, held_out, source)
    options = {"source": source.card(), "asked": asdict(asked), **asdict(held_out)}
    config = run_config("cv", options, model_card(model), bags, lines, cache, before)
    table = csv_bytes(_table(splits, bags))
    config["splits"] = hashlib.blake2b(table, digest_size=16).hexdigest()
    config |= placement(bags)
    with workspace(out, config) as space, progress(len(splits) + 1) as step:
        places = _patch_places(splits)
        for k, split in enumerate(splits):
            if space.done(split.unit):
                step(f"{k + 1}/{len(splits)} {split.unit}: from before")
                continue
            step(f"{k + 1}/{len(splits)} {split.unit}: training on {len(split.train)} slides")
            _carry_out(space, split, bags, y, model, asked, places[k])
        step("metrics")
        units = [split.unit for split in splits]
        space.write(PREDICTIONS, csv_bytes(space.pooled(units)))
        if asks_for_patients(model, bags):
            pooled = space.pooled([_of_patients(unit) for unit in units])
            space.write(PATIENTS, csv_bytes(pooled))
        if file := several(model):
            space.write(file, csv_bytes(space.pooled([_of_classes(unit) for unit in units])))
        space.write("splits.csv", table)
        found = judge_run(space.folder, read_predictions(space.folder))
        space.write(METRICS, json_bytes(found))
        write_report(space.folder)
    show_metrics(found)
    print_line(f"Written to {out}. {RESEARCH}")


def _carry_out(
    space: Workspace,
    split: Split,
    bags: Bags,
    y: Sequence[str | None] | None,
    model: BagClassifier,
    asked: PredictionOptions,
    places: dict[str, Int[np.ndarray, " _"]],
) -> None:
    own = None if y is None else [y[b] for b in split.train]
    fitted = clone(model).fit(bags[split.train], own)
    held_out = bags[split.test]
    rule = refer_rule(fitted, asked.alpha)
    rows, patches = predict(fitted, held_out, asked, rule)
    names = held_out.names.astype(str)
    for kind, found in ((PATCHES, patches), (ATTENTION, attention(fitted, held_out))):
        for under, chosen in places.items() if found else ():
            write_patches(space, names[chosen].tolist(), [found[i] for i in chosen], under, kind)
    if asks_for_patients(model, bags):
        space.finish(_of_patients(split.unit), _placed(patient_rows(fitted, held_out), split))
    if isinstance(fitted, SeveralClasses) and several(fitted):
        known = None if y is None else [y[b] for b in split.test]
        table = class_rows(fitted, held_out, known).rows
        space.finish(_of_classes(split.unit), _placed(table, split))
    space.finish(split.unit, _placed(rows, split))


def _of_classes(unit: str) -> str:
    """The part that holds a unit's rows of grades.csv or classes.csv: finished first."""
    return f"grades-{unit}"


def _of_patients(unit: str) -> str:
    """The part that holds a unit's rows of patients.csv: finished first."""
    return f"patients-{unit}"


def _placed(rows: pd.DataFrame, split: Split) -> pd.DataFrame:
    """With the repeat and the fold they are of."""
    rows.insert(2, "repeat", split.repeat)
    rows.insert(3, "fold", split.fold)
    return rows


def _patch_places(splits: Sequence[Split]) -> list[dict[str, Int[np.ndarray, " _"]]]:
    """For every split the test slides whose patches are kept, by folder.

    Right in patches/ lies every slide the first time it is tested, in repeat-<k> the first time
    that a later repeat tests it: every repeat can be drawn on its own.
    """
    seen: dict[str, set[int]] = {}
    found = []
    for split in splits:
        later = [repeat_folder(split.repeat)] if split.repeat != splits[0].repeat else []
        found.append(
            {
                under: _first_tested(split.test, seen.setdefault(under, set()))
                for under in ["", *later]
            }
        )
    return found


def _first_tested(test: Int[np.ndarray, " test"], seen: set[int]) -> Int[np.ndarray, " new"]:
    """Places in `test` of slides not seen before, which are seen now."""
    new = np.array([i for i, b in enumerate(test) if b not in seen], dtype=np.int64)
    seen.update(test.tolist())
    return new


def _table(splits: Sequence[Split], bags: Bags) -> pd.DataFrame:
    """splits.csv, which --splits reads back."""
    patients = np.full(len(bags), "") if bags.groups is None else bags.groups.astype(str)
    pieces = []
    for split in splits:
        for part, chosen in (("train", split.train), ("test", split.test)):
            slides = {"slide": bags.names[chosen].astype(str), "patient": patients[chosen]}
            where = {"repeat": split.repeat, "fold": split.fold, "part": part}
            pieces.append(pd.DataFrame(slides | where))
    return pd.concat(pieces, ignore_index=True)


# --- Who is held out ------------------------------------------------------------------------------
def planned(bags: Bags, asked: Folds, source: Source) -> list[Split]:
    """The splits; a ValueError where one of them cannot be fitted or leaks a patient."""
    if asked.splits is not None:
        found = list(_read_splits(bags, Path(asked.splits)))
    else:
        found = list(_make_splits(bags, asked, source))
    for split in found:
        _check_fair(split, bags)
    return found


def _make_splits(bags: Bags, asked: Folds, source: Source) -> Iterator[Split]:
    groups, unit = bags.groups, "patient"
    if asked.site is not None:
        sites = _sites(bags, asked.site, source)
        groups, unit = together(sites, sites if groups is None else groups), "site"
        n_sites, n_groups = len(np.unique(sites)), len(np.unique(groups))
        if n_groups < n_sites:
            logger.warning(
                "%d sites make %d groups: patients with slides at several sites join them.",
                n_sites,
                n_groups,
            )
        _check_sites(bags.labels, groups, sites, asked.site)
    _check_classes(bags.labels, groups, unit)
    every = np.arange(len(bags))
    for repeat in range(asked.repeats):
        fold = folds(bags.labels, groups, asked.folds, asked.seed + repeat, unit)
        for k in range(int(fold.max()) + 1):
            yield Split(repeat, str(k), every[fold != k], every[fold == k])


def together(a: Shaped[np.ndarray, " B"], b: Shaped[np.ndarray, " B"]) -> Int[np.ndarray, " B"]:
    """Groups that keep together what shares a value of a, or of b, along any chain.

    >>> together(np.array(["s", "s", "t", "u"]), np.array([1, 2, 2, 3])).tolist()
    [0, 0, 0, 1]
    """
    left, right = (np.unique(v, return_inverse=True)[1] for v in (a, b))
    n = left.max() + 1
    links = coo_array((np.ones(len(a)), (left, n + right)), shape=(n + right.max() + 1,) * 2)
    return connected_components(links, directed=False)[1][left].astype(np.int64)


def _check_sites(
    labels: Int[np.ndarray, " B"],
    groups: Int[np.ndarray, " B"],
    sites: Shaped[np.ndarray, " B"],
    column: str,
) -> None:
    """Both classes must be found at two sites (or groups of them): one is always held out."""
    for y, name in enumerate(("negative", "positive")):
        holders = np.unique(groups[labels == y])
        if len(holders) == 1:
            own = np.unique(sites[groups == holders[0]])
            several = f"the sites {listed(own)}, which share patients" if len(own) > 1 else ""
            raise ValueError(
                f"--site {column}: all {int((labels == y).sum())} {name} slides are of "
                f"{several or f'one site, {str(own[0])!r}'}: a model that has not seen them would "
                f"see no {name} slide. Sites cannot be held out here: leave out --site, or add "
                f"{name} slides of another site."
            )


def _check_classes(
    labels: Int[np.ndarray, " B"], groups: Shaped[np.ndarray, " B"] | None, unit: str
) -> None:
    """Two slides of each class, of two patients: what is tested is not trained on."""
    for y, name in enumerate(("negative", "positive")):
        n = int((labels == y).sum())
        holders = np.arange(n) if groups is None else np.unique(groups[labels == y])
        if len(holders) < 2:
            of = f", all of {unit} {str(holders[0])!r}" if n > 1 else ""
            raise ValueError(
                f"cross-validation needs at least 2 {name} slides of different {unit}s; found "
                f"{n} of {len(labels)}{of}. Check the label column, or add {name} slides."
            )


def _sites(bags: Bags, column: str, source: Source) -> Shaped[np.ndarray, " B"]:
    """The site of every slide, from the label table or the table of patches."""
    path = Path(source.labels or source.data)
    if not (path.is_file() and is_table(path)):
        raise ValueError(f"--site {column}: name the table that has this column with --labels.")
    frame, slide = _slide_table(path, source)
    tables.require([column], list(frame), str(path), "--site")
    known = frame[frame[column].notna()]
    site = dict(zip(known[slide].map(key), known[column]))
    missing = [name for name in bags.names if key(name) not in site]
    if missing:
        raise ValueError(
            f"{path}: {len(missing)} slides have no {column}: {listed(missing)}. Every slide "
            "needs one to keep sites together."
        )
    return np.array([site[key(name)] for name in bags.names])


def _slide_table(path: Path, said: LabelTable) -> tuple[pd.DataFrame, str]:
    """A table with a column of slides, all as text, and the name of that column."""
    where, frame, _ = read_table(path, said.slide_table, said.slide, said.patient)
    return frame, column_of("slide", said.slide, frame, where)


def _read_splits(bags: Bags, path: Path) -> Iterator[Split]:
    """Splits from CLAM's files, or from a table slide, fold (repeat, part)."""
    if not path.exists():
        raise ValueError(f"--splits: there is nothing at {path}. Check the path.")
    files = [path]
    if path.is_dir():
        files = [f for f in path.glob("splits_*.csv") if _number(f) is not None]
        files.sort(key=lambda f: _number(f) or 0)
        if not files:
            raise ValueError(
                f"--splits {path}: expected files splits_0.csv, splits_1.csv, ...; found none."
            )
    place = {key(name): b for b, name in enumerate(bags.names)}
    found = 0
    for file in files:
        frame = read_frame(file, rows="slide", dtype=str)
        if {"train", "test"} <= set(frame):
            made = [_from_clam(frame, file, str(_number(file) or 0), place)]
        else:
            made = list(_from_table(file, place))
        for split in made:
            found += len(split.test)
            yield split
    if not found:
        raise ValueError(
            f"--splits {path}: none of its slides is in the data, whose slides are called "
            f"{listed(bags.names)}."
        )


def _number(file: Path) -> int | None:
    digits = file.stem.rpartition("_")[2]
    return int(digits) if digits.isdigit() else None


def _from_clam(frame: pd.DataFrame, file: Path, fold: str, place: dict[str, int]) -> Split:
    """Ragged columns train, val, test; gpmil needs no slides to stop early, so val is trained on.

    Files with true and false in the columns (splits_0_bool.csv) have another shape.
    """
    part = {
        name: [place[k] for k in map(key, frame[name].dropna()) if k in place]
        for name in PARTS
        if name in frame
    }
    both = set(part["test"]) & {*part["train"], *part.get("val", [])}
    if both:
        raise ValueError(f"{file}: {len(both)} slides are both trained on and tested.")
    train = np.unique(np.array([*part["train"], *part.get("val", [])], dtype=np.int64))
    return Split(0, fold, train, np.unique(np.array(part["test"], dtype=np.int64)))


def _from_table(file: Path, place: dict[str, int]) -> Iterator[Split]:
    frame, slide = _slide_table(file, LabelTable())
    tables.require(["fold"], list(frame), str(file), "--splits")
    frame = frame.assign(place=[place.get(key(name), -1) for name in frame[slide]])
    frame = frame[(frame["place"] >= 0) & frame["fold"].notna()]
    repeats = frame["repeat"] if "repeat" in frame else pd.Series("0", frame.index)
    for repeat, own in frame.groupby(repeats, sort=False):
        if "part" in own:
            for fold, rows in own.groupby("fold", sort=False):
                test = rows["part"] == "test"
                yield _split(repeat, fold, rows["place"][~test], rows["place"][test])
            continue
        if own["place"].duplicated().any():
            raise ValueError(
                f"{file}: {listed(own[slide][own['place'].duplicated()])} is in several rows: "
                "expected every slide once, with the fold in which it is tested."
            )
        for fold in sorted(own["fold"].unique(), key=lambda f: (len(f), f)):
            test = own["fold"] == fold
            yield _split(repeat, fold, own["place"][~test], own["place"][test])


def _split(repeat: Any, fold: Any, train: pd.Series, test: pd.Series) -> Split:
    if not str(repeat).isdigit():
        raise ValueError(f"--splits: repeat must be a number from 0, found {repeat!r}.")
    fold = "".join(c if c.isalnum() else "-" for c in str(fold))  # part of a file's name
    return Split(int(repeat), fold, np.sort(train.to_numpy()), np.sort(test.to_numpy()))


def _check_fair(split: Split, bags: Bags) -> None:
    labels = bags.labels[split.train]
    if not len(split.test):
        raise ValueError(f"{split.unit}: no slide is tested. Check the splits, or use fewer folds.")
    if len(np.unique(labels)) < 2:
        raise ValueError(
            f"{split.unit}: the {len(labels)} training slides are of one class; a model needs "
            "both. Check the splits, or use fewer folds."
        )
    if bags.groups is not None:
        both = np.intersect1d(bags.groups[split.train], bags.groups[split.test])
        if len(both):
            raise ValueError(
                f"{split.unit}: {len(both)} patients are both trained on and tested: "
                f"{listed(both)}. Slides of a patient belong together."
            )
