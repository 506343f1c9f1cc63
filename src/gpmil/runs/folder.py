"""A run as a folder: what a model says of slides and patches, safe from interruption.

    config.json             command, options, where the data are, model settings, versions; steps
                            of the grids and sides of the patches
    model/                  the fitted model (`gpmil.load`)
    splits.csv              who was trained on and who was tested
    predictions.csv         a row a slide
    patches/<slide>.csv.gz  a row a patch; patches/coupling-<c>/ for each of several couplings,
                            patches/repeat-<k>/ for the later repeats of a cross-validation
    labels.csv              what gpmil evaluate was given in place of the labels that were read
    metrics.json            with intervals by patient, or by slide where no patient is known
    log.txt                 the only place for times

Everything is assembled in `<out>.partial`, each file written beside its place and renamed; a part
of the work (a fold, a batch of slides) counts as done once its rows are in `.units`. The folder
gets its name when it is complete. The same command continues from the parts that are done, and
what it writes does not depend on where it was stopped.
"""

import copy
import gzip
import hashlib
import json
import logging
import math
import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TextIO
from urllib.parse import quote, unquote

import numpy as np
import pandas as pd
from jaxtyping import Float, Int

from gpmil.data import classes
from gpmil.data.bags import Bags
from gpmil.decide import metrics
from gpmil.decide.refer import ReferRule
from gpmil.files.persistence import swap, written_by_someone
from gpmil.models import BagClassifier, InstancePredictions
from gpmil.models.base import log_odds
from gpmil.models.checks import count, share
from gpmil.models.fitted import FittedGP
from gpmil.runs import files as run_files
from gpmil.show.report import CARD, FORMAT, check_target

logger = logging.getLogger("gpmil")

DIGITS = "%.9g"  # what does not depend on the number of threads
PREDICTIONS, METRICS, PATCHES, LOG = "predictions.csv", "metrics.json", "patches", "log.txt"
ENDING, UNITS = ".csv.gz", ".units"
RESAMPLES = 1000
MANY_PATCHES, FEWER_RESAMPLES = 200_000, 200
LEVEL = 0.9  # of the interval of a slide's probability
NEEDED = ("slide", "patient", "probability", "log_odds", "decision", "label")
NO_PATIENT = (
    "No patient is known: every slide is taken as a patient of its own. If patients have several "
    "slides, folds leak and intervals are too narrow: give --patient."
)


# --- The folder -----------------------------------------------------------------------------------
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
        tables = [run_files.read_table(self._unit(u), "a finished part") for u in units]
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
    partial = path.with_name(path.name + ".partial")
    card = json.loads(json.dumps({"format": FORMAT, **config}))
    _check_same(partial, card)
    partial.mkdir(parents=True, exist_ok=True)
    with _log(partial) as log_file:
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
        if item.name != UNITS:
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


@contextmanager
def _log(partial: Path) -> Iterator[TextIO]:
    """log.txt, locked: two processes must not assemble the same run."""
    with (partial / LOG).open("a", encoding="utf-8") as file:
        if find_spec("fcntl"):  # the lock ends with the process, however it ends
            fcntl = import_module("fcntl")
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                raise ValueError(
                    f"{partial} is being written by another gpmil: wait for it, or name another "
                    "folder with --out."
                ) from error
        yield file


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


def write_whole(path: Path, content: bytes) -> None:
    """Write beside and rename: the file is there whole, or as it was before."""
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = path.with_name(f".{path.name}.new")
    fresh.write_bytes(content)
    os.replace(fresh, path)


def csv_bytes(frame: pd.DataFrame) -> bytes:
    """A table as csv, the same bytes for the same numbers."""
    return frame.to_csv(index=False, float_format=DIGITS, lineterminator="\n").encode()


def json_bytes(content: Mapping[str, Any]) -> bytes:
    """Readable JSON, the same bytes for the same content."""
    return (json.dumps(content, indent=2) + "\n").encode()


# --- What a run was made of -----------------------------------------------------------------------
def read_config(folder: Path) -> dict[str, Any]:
    """config.json of a run; a ValueError where there is none that gpmil wrote."""
    file = folder / CARD if folder.is_dir() else folder
    if not file.exists():
        raise ValueError(f"{folder} is no run of gpmil: there is no {CARD}. Check the path.")
    card = run_files.read_config(file)
    if card.get("format") != FORMAT or not isinstance(card.get("command"), str):
        raise ValueError(f"{file} does not describe a run of gpmil (format {FORMAT!r} expected).")
    return card


def cache_of(card: Mapping[str, Any]) -> Path | None:
    """Where a run kept the features, as it was said; None: where `gpmil.read` keeps them anyway."""
    given = card.get("cache")
    return None if given is None else Path(given)


def data_card(bags: Bags) -> dict[str, Any]:
    """What a run remembers of its data; the fingerprint changes when they do."""
    known = bags.metadata.get("classes") or classes.of_codes(bags.labels, bags.class_names)
    return {
        "slides": len(bags),
        "patches": bags.n_instances,
        "features": bags.n_features,
        "fingerprint": fingerprint(bags),
        "classes": {name: list(facts) for name, facts in known.items()},
    }


def fingerprint(bags: Bags) -> str:
    """A digest of everything that a result can depend on, slide by slide: files stay on disk."""
    digest = hashlib.blake2b(digest_size=16)
    for a, b in zip(bags.offsets[:-1], bags.offsets[1:]):
        digest.update(np.ascontiguousarray(bags.features[a:b]).data)
    groups = [] if bags.groups is None else bags.groups.tolist()
    for words in (bags.names.tolist(), groups):
        digest.update(json.dumps([str(w) for w in words]).encode())
    arrays = [bags.offsets, bags.labels, bags.instance_labels, bags.coords, bags.step]
    graph = bags.adjacency
    for array in (*arrays, graph.indptr, graph.indices, graph.data):
        digest.update(b"-" if array is None else np.ascontiguousarray(array).tobytes())
    return digest.hexdigest()


def places(bags: Bags) -> dict[str, Any]:
    """What maps need besides positions: spacing, side, units, whether positions are centres.

    Beside it, how the features were extracted and which classes the labels have, where known.
    """
    known = {key: bags.metadata[key] for key in ("units", "anchor") if bags.metadata.get(key)}
    classes = None if bags.class_names is None else list(bags.class_names)
    told = {"sizes": sizes(bags), "extraction": dict(bags.facts), "classes": classes}
    return {"steps": steps(bags), **{k: v for k, v in told.items() if v}, **known}


def steps(bags: Bags) -> dict[str, float | list[float]]:
    """The spacing of every slide's grid, where it is known."""
    if bags.step is None:
        return {}
    found = {}
    for name, step in zip(bags.names, np.asarray(bags.step, dtype=float).reshape(len(bags), -1)):
        if np.isfinite(step).all():
            found[str(name)] = _side(step)
    return found


def sizes(bags: Bags) -> dict[str, float | list[float]]:
    """The side of every slide's patches, where files tell it; overlapping ones exceed the step."""
    told = bags.metadata.get("sizes", {})
    names = [str(name) for name in bags.names]
    return {name: _side(np.asarray(told[name], dtype=float)) for name in names if name in told}


def _side(lengths: Float[np.ndarray, " k"]) -> float | list[float]:
    """One number where all axes have the same."""
    return float(lengths[0]) if (lengths == lengths[0]).all() else lengths.tolist()


# --- Predictions ----------------------------------------------------------------------------------
@dataclass(frozen=True)
class Asked:
    """What predictions are to say besides probabilities."""

    rate: float = 0.1  # false discovery rate of flagged patches
    alpha: float = 0.1  # error among accepted slides
    interval_patches: int = 20_000  # slides of more get no interval: two matrices n x n
    batch: int = 20_000  # patches at a time

    def check(self) -> None:
        """Before any file is read."""
        share("--rate", self.rate)
        share("--alpha", self.alpha)
        count("--interval-patches", self.interval_patches, least=0)
        count("--batch", self.batch, least=1)


def refer_rule(model: BagClassifier, alpha: float) -> ReferRule | None:
    """When slides may be accepted, if the model was fitted with calibrated=True."""
    known = getattr(model, "cross_fit_", None)
    if known is None or known.calibrator is None or not isinstance(model, FittedGP):
        return None
    try:
        return model.refer_rule(alpha)
    except ValueError as error:
        logger.warning("slides are neither accepted nor referred: %s", error)
        return None


def with_coupling(model: BagClassifier, coupling: float) -> BagClassifier:
    """A copy of the model that couples neighbours by another strength when it predicts."""
    if not isinstance(model, FittedGP):
        raise ValueError(
            f"a {type(model).__name__} has no coupling to replace: only VGPMILPR and VGPMILPRI do."
        )
    if not (math.isfinite(coupling) and coupling >= 0):
        raise ValueError(f"coupling must be a finite number >= 0, got {coupling:g}.")
    other = copy.copy(model)
    if coupling != model.coupling_:
        other.coupling_ = float(coupling)
        if model.cross_fit_ is not None:
            logger.warning(
                "coupling %g is not that of the fit (%g): what was calibrated there does not hold, "
                "so there are no calibrated probabilities, p-values and flags for it.",
                coupling,
                model.coupling_,
            )
            other.cross_fit_ = None
    return other


def predict_in_batches(
    space: Workspace,
    model: BagClassifier,
    bags: Bags,
    asked: Asked,
    step: Callable[[str], None],
    coupling: str = "",
) -> list[str]:
    """Predict what was not predicted before, some slides at a time; the names of the parts."""
    rule = refer_rule(model, asked.alpha)
    under = coupling_folder(coupling) if coupling else ""
    parts = list(batches(bags.sizes, asked.batch))
    units = [f"{under}-batch-{k}".lstrip("-") for k in range(len(parts))]
    for unit, part in zip(units, parts):
        if space.done(unit):
            step(f"{unit} of {len(parts)}: from before")
            continue
        step(f"{unit} of {len(parts)}: {len(part)} slides")
        rows, patches = predict(model, bags[part], asked, rule)
        write_patches(space, bags.names[part].tolist(), patches, under)
        if coupling:
            rows.insert(2, "coupling", coupling)
        space.finish(unit, rows)
    return units


def predict(
    model: BagClassifier, bags: Bags, asked: Asked, rule: ReferRule | None
) -> tuple[pd.DataFrame, list[pd.DataFrame]]:
    """Rows of predictions.csv, and a table of patches for every slide (none from some models)."""
    log_negative, instances = _both(model, bags, asked.rate)
    calibrated = model._calibrate(log_negative)
    probability = -np.expm1(calibrated)
    low, high = _intervals(model, bags, asked.interval_patches)
    decision = np.full(len(bags), "", dtype=object)
    if rule is not None:
        decision[:] = np.where(rule.decide(probability), "accept", "refer")
    patients = "" if bags.groups is None else bags.groups.astype(str)
    rows = pd.DataFrame(
        {
            "slide": bags.names.astype(str),
            "patient": patients,
            "probability": probability,
            "low": low,
            "high": high,
            "log_odds": log_odds(calibrated),
            "decision": decision,
            "label": [str(y) if y >= 0 else "" for y in bags.labels],
        }
    )
    return rows, [] if instances is None else [patch_table(p) for p in instances.split()]


def _both(
    model: BagClassifier, bags: Bags, rate: float
) -> tuple[Float[np.ndarray, " B"], InstancePredictions | None]:
    if isinstance(model, FittedGP):
        found = model.predict_all(bags, rate=rate)
        return found.log_proba_negative, found.instances
    if hasattr(model, "predict_all"):
        found = model.predict_all(bags)
        return found.log_proba_negative, found.instances
    log_negative, _ = model.log_proba_negative(bags)
    try:
        return log_negative, model.predict_instances(bags)
    except ValueError as error:  # the bags are fine, as the line above shows
        logger.info("no tables of patches: %s", error)
        return log_negative, None


def _intervals(
    model: BagClassifier, bags: Bags, most: int
) -> tuple[Float[np.ndarray, " B"], Float[np.ndarray, " B"]]:
    """Where the probability lies at LEVEL; nan where that is not known, or too dear."""
    low, high = np.full(len(bags), np.nan), np.full(len(bags), np.nan)
    small = bags.sizes <= most
    if isinstance(model, FittedGP) and small.any():
        low[small], high[small] = model.predict_interval(bags[small], level=LEVEL)
    return low, high


def patch_table(found: InstancePredictions) -> pd.DataFrame:
    """The patches of a slide as patches/<slide>.csv.gz has them."""
    bag = found.bags
    frame = found.to_frame().drop(columns=["bag", "mean"]).rename(columns={"std": "sd"})
    if found.flagged is not None:
        frame["flagged"] = found.flagged.astype(np.int64)
    if (bag.instance_labels >= 0).any():
        frame["label"] = [str(y) if y >= 0 else "" for y in bag.instance_labels]
    return frame


def coupling_folder(coupling: str) -> str:
    """Where in patches/ the tables of one of several couplings lie."""
    return f"coupling-{coupling}"


def repeat_folder(repeat: int | str) -> str:
    """Where in patches/ the tables of a later repeat lie."""
    return f"repeat-{repeat}"


def patch_file(slide: str) -> str:
    """The name of a slide's table of patches, whatever the slide is called.

    >>> patch_file("TCGA-01"), patch_file("a/b 1"), patch_file("../x")
    ('TCGA-01.csv.gz', 'a%2Fb 1.csv.gz', '%2E.%2Fx.csv.gz')
    """
    safe = quote(slide, safe=" ()[]{}+,;=@!$&'#~^")
    return (f"%2E{safe[1:]}" if safe.startswith(".") else safe) + ENDING


def slide_name(file: Path) -> str:
    """The slide whose patches a file holds.

    >>> slide_name(Path("patches") / patch_file("../x"))
    '../x'
    """
    return unquote(file.name.removesuffix(ENDING))


def write_patches(
    space: Workspace, slides: Sequence[str], tables: Sequence[pd.DataFrame], under: str = ""
) -> None:
    """patches/<slide>.csv.gz, or patches/<under>/<slide>.csv.gz; no time stamps inside."""
    for slide, frame in zip(slides, tables):
        name = str(Path(PATCHES) / under / patch_file(str(slide)))
        space.write(name, gzip.compress(csv_bytes(frame), mtime=0))


def read_predictions(folder: Path) -> pd.DataFrame:
    """predictions.csv of a run, with the numbers exactly as they are written."""
    file = folder / PREDICTIONS
    if not file.exists():
        raise ValueError(
            f"{folder} has no {PREDICTIONS}: expected a run of gpmil predict or gpmil cv."
        )
    return run_files.read_predictions(file, NEEDED)


def read_patches(file: Path) -> pd.DataFrame:
    """One table of patches."""
    return run_files.read_patches(file)


# --- Metrics --------------------------------------------------------------------------------------
def judge(folder: Path, predictions: pd.DataFrame, patch_labels: Any = None) -> dict[str, Any]:
    """metrics.json from the files of a run; empty where no label is known.

    `predictions` is predictions.csv, maybe with other labels; `patch_labels(slide, table)` gives
    those of patches in place of the tables' own.
    """
    if "coupling" not in predictions:
        return _judge(predictions, folder / PATCHES, patch_labels)
    found = {
        str(c): _judge(rows, folder / PATCHES / coupling_folder(str(c)), patch_labels)
        for c, rows in predictions.groupby("coupling", sort=False)
    }
    return {"couplings": found} if any(found.values()) else {}


def _judge(rows: pd.DataFrame, patches: Path, patch_labels: Any) -> dict[str, Any]:
    found: dict[str, Any] = {}
    known = rows[rows["label"].notna()]
    patient = np.where(rows["patient"] == "", "slide " + rows["slide"], rows["patient"])
    if len(known):
        groups = patient[rows["label"].notna()]
        found["slides"] = _slide_metrics(known, groups)
    truth = _patch_metrics(rows["slide"], patient, patches, patch_labels)
    return found | ({"patches": truth} if truth else {})


def _slide_metrics(known: pd.DataFrame, groups: np.ndarray) -> dict[str, Any]:
    labels = known["label"].to_numpy().astype(np.int64)
    probability = known["probability"].to_numpy()
    estimates = metrics.bag_metrics(labels, probability, groups=groups, n_bootstrap=RESAMPLES)
    by_patient = bool((known["patient"] != "").any())
    found: dict[str, Any] = {
        "predictions": len(known),
        "slides": int(known["slide"].nunique()),
        "patients": len(np.unique(groups)) if by_patient else None,
        "intervals_by": "patient" if by_patient else "slide",
        "positive": int(labels.sum()),
        "resamples": RESAMPLES,
        "metrics": _plain(estimates),
    }
    accepted = (known["decision"] == "accept").to_numpy()
    if (known["decision"] != "").any():
        wrong = accepted & ((probability > 0.5) != (labels == 1))
        found["decisions"] = {"accepted": int(accepted.sum()), "wrong": int(wrong.sum())}
    return found


def _patch_metrics(
    slides: pd.Series, patient: np.ndarray, folder: Path, patch_labels: Any
) -> dict[str, Any]:
    """Of all slides whose patches have labels, each slide once."""
    tables, groups = [], []
    for slide, group in zip(*_once(slides, patient)):
        file = folder / patch_file(slide)
        if not file.is_file():
            continue
        table = read_patches(file)
        if patch_labels is not None:
            table["label"] = patch_labels(slide, table)
        if "label" in table and table["label"].notna().any():
            tables.append(table)
            groups.append(group)
    if not tables:
        return {}
    bag = np.repeat(np.arange(len(tables)), [len(t) for t in tables])
    every = pd.concat(tables, ignore_index=True)
    labels = every["label"].fillna(-1).to_numpy().astype(np.int64)
    flagged = every["flagged"].to_numpy() if "flagged" in every else None
    resamples = RESAMPLES if len(every) <= MANY_PATCHES else FEWER_RESAMPLES
    estimates = metrics.patch_metrics(
        labels,
        every["probability"].to_numpy(),
        bag,
        decision=flagged,
        groups=np.array(groups),
        n_bootstrap=resamples,
    )
    return {
        "patches": int((labels >= 0).sum()),
        "slides": len(tables),
        "positive": int((labels == 1).sum()),
        "decided": "probability > 0.5" if flagged is None else "flagged",
        "resamples": resamples,
        "metrics": _plain(estimates),
    }


def _once(slides: pd.Series, patient: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    first = ~slides.duplicated().to_numpy()
    return slides.to_numpy()[first], patient[first]


def _plain(estimates: Mapping[str, metrics.Estimate]) -> dict[str, dict[str, Any]]:
    """As JSON, which knows no nan."""
    return {
        name: {
            k: None if isinstance(v, float) and math.isnan(v) else v for k, v in asdict(e).items()
        }
        for name, e in estimates.items()
    }


def estimate(card: Mapping[str, Any]) -> metrics.Estimate:
    """An estimate as metrics.json has it."""
    names = metrics.Estimate.__dataclass_fields__
    known: dict[str, Any] = {k: math.nan if v is None else v for k, v in card.items() if k in names}
    return metrics.Estimate(**known)


def batches(sizes: Int[np.ndarray, " B"], most: int = 20_000) -> Iterator[Int[np.ndarray, " b"]]:
    """Slides in order, about `most` patches at a time; the same for the same cohort.

    >>> [b.tolist() for b in batches(np.array([3, 4, 9, 1]), most=8)]
    [[0, 1], [2], [3]]
    """
    start, total = 0, 0
    for b, n in enumerate(sizes):
        if total and total + n > most:
            yield np.arange(start, b)
            start, total = b, 0
        total += int(n)
    if start < len(sizes):
        yield np.arange(start, len(sizes))
