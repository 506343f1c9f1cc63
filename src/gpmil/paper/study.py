"""Fit every method several times and predict the test slides; what is finished is kept.

A part is one method with one seed on one cohort. Its result is written to a file of its own, so
that an interrupted study goes on where it stopped, and a repeated one has nothing to do.
"""

import hashlib
import io
import json
import time
import zipfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import joblib
import numpy as np
from jaxtyping import Bool
from sklearn.base import clone
from sklearn.model_selection import GridSearchCV
from threadpoolctl import threadpool_limits

from gpmil import __version__
from gpmil.data.bags import Bags
from gpmil.data.folds import codes, folds
from gpmil.decide import marks
from gpmil.files.whole import write_whole
from gpmil.models.base import BagClassifier
from gpmil.models.checks import plain
from gpmil.paper.cohorts import StudyData
from gpmil.paper.methods import TUNED, Method
from gpmil.paper.results import MethodRun, Results
from gpmil.runs.learned import LEARNED

RATE = 0.1  # false discovery rate of the marked patches
FLAG_FOLDS = 5
ARRAYS = ("log_odds", "probability", "patch_probability", "flagged")
FOUND = (*LEARNED, "smooth_", "n_epochs_", "n_rounds_")  # by a fit, noted beside its run


@dataclass(frozen=True)
class Part:
    """One method with one seed on one cohort."""

    cohort: StudyData
    fingerprint: str  # of the cohort
    method: Method
    seed: int
    flags: bool  # mark patches too

    @property
    def title(self) -> str:
        """In words."""
        return f"{self.cohort.name}: {self.method.label}, run {self.seed + 1}"

    @property
    def effort(self) -> float:
        """Rough cost: fits, with those for the marks."""
        fits = (1 + FLAG_FOLDS * (self.method.key not in TUNED)) if self.flags else 1
        return self.method.effort * fits * sum(train.n_instances for train, _ in self.cohort.pairs)

    def name(self) -> str:
        """The stem of its files: changes with the data, the settings and the version."""
        # every setting, also those at their defaults: a default may change
        given = self.method.make(self.seed).get_params(deep=True)
        settings = f"{sorted(given.items(), key=str)}, {self.flags}, {__version__}"
        key = hashlib.blake2b((self.fingerprint + settings).encode(), digest_size=6).hexdigest()
        return f"{self.cohort.slug}-{self.method.key}-{self.seed}-{key}"


def planned(
    cohort: StudyData, methods: Sequence[Method], n_runs: int, flags: bool = True
) -> list[Part]:
    """Every method with seeds 0, 1, ...; patches are marked in the first run."""
    seal = cohort.fingerprint()
    return [
        Part(cohort, seal, method, seed, flags and seed == 0)
        for method in methods
        for seed in range(1 if method.runs_once else n_runs)
    ]


# --- One part -------------------------------------------------------------------------------------
def compute(part: Part) -> MethodRun:
    """Fit and predict, on one thread: times of different methods are comparable."""
    with threadpool_limits(1):
        runs = [_pair(part, train, test) for train, test in part.cohort.pairs]
    joined: dict[str, Any] = {
        name: _joined([getattr(run, name) for run in runs]) for name in ARRAYS
    }
    cost: dict[str, Any] = {
        k: sum(getattr(r, k) for r in runs) for k in ("fit_seconds", "predict_seconds")
    }
    return MethodRun(**joined, **cost, notes=runs[0].notes)


def _joined(pieces: list[np.ndarray | None]) -> np.ndarray | None:
    known = [piece for piece in pieces if piece is not None]
    return np.concatenate(known) if len(known) == len(pieces) else None


def _pair(part: Part, train: Bags, test: Bags) -> MethodRun:
    model = part.method.make(part.seed)
    start = time.perf_counter()
    model.fit(train, train.labels)
    fitted = time.perf_counter()
    found = getattr(model, "best_estimator_", model)
    odds, probability, patches = _predict(found, test)
    done = time.perf_counter()
    flagged = None
    if part.flags and patches is not None:
        flagged = marked(found, train, test, part.seed)
    notes = {k: plain(getattr(found, k)) for k in FOUND if getattr(found, k, None) is not None}
    if isinstance(model, GridSearchCV):
        notes |= model.best_params_
    return MethodRun(odds, probability, patches, flagged, fitted - start, done - fitted, notes)


def _predict(model: BagClassifier, test: Bags) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
    """Log odds and probability of slides, probability of patches where the model gives one."""
    found = model.predict_all(test)
    patches = None if found.instances is None else found.instances.probability
    return found.log_odds, found.proba[:, 1], patches


def marked(model: BagClassifier, train: Bags, test: Bags, seed: int) -> Bool[np.ndarray, " N"]:
    """Test patches marked at a false discovery rate of RATE within every slide.

    Conformal p-values against held-out patches of negative training slides, for any model that
    scores patches: five more fits at this one's settings, each without a fold of the slides.
    """
    fold = folds(train.labels, train.groups, FLAG_FOLDS, seed)
    n_folds = int(fold.max()) + 1
    out, scores = np.empty(train.n_instances), np.empty((n_folds, test.n_instances))
    for k in range(n_folds):
        again = _settings_fixed(model).fit(train[fold != k])
        out[fold[train.bag_index] == k] = again.predict_instances(train[fold == k]).probability
        scores[k] = again.predict_instances(test).probability
    negative = train.labels[train.bag_index] == 0
    bag = train.bag_index[negative]
    patient = codes(np.arange(len(train)) if train.groups is None else train.groups)
    reference = marks.ConformalReference.build(out[negative], fold[bag], patient[bag], n_folds)
    p = marks.p_values(reference, scores)
    return marks.benjamini_hochberg(p, RATE, test.bag_index)


def _settings_fixed(model: BagClassifier) -> BagClassifier:
    """A new model at what was learned, if anything was."""
    return model.with_settings_fixed() if hasattr(model, "with_settings_fixed") else clone(model)


# --- Files ----------------------------------------------------------------------------------------
def keep(run: MethodRun, file: Path) -> None:
    """Write a run, all or nothing."""
    arrays = {k: getattr(run, k) for k in ARRAYS if getattr(run, k) is not None}
    card = {f.name: getattr(run, f.name) for f in fields(run) if f.name not in ARRAYS}
    stream = io.BytesIO()
    np.savez_compressed(stream, card=np.array(json.dumps(card)), **arrays)
    write_whole(file, stream.getvalue())


def kept(file: Path) -> MethodRun | None:
    """A run that was written; None where there is none, or an unreadable one."""
    try:
        with np.load(file, allow_pickle=False) as found:
            card = json.loads(str(found["card"]))
            arrays: dict[str, Any] = {k: found.get(k) for k in ARRAYS}
            return MethodRun(**arrays, **card)
    except (OSError, ValueError, KeyError, TypeError, zipfile.BadZipFile):
        return None


def carry_out(
    parts: Sequence[Part], folder: Path, n_jobs: int = 1
) -> Iterator[tuple[Part, MethodRun, bool]]:
    """Every part with its run, and whether it was kept from before, as they become known."""
    files = {id(part): folder / f"{part.name()}.npz" for part in parts}
    waiting = []
    for part in parts:
        known = kept(files[id(part)])
        if known is None:
            waiting.append(part)
        else:
            yield part, known, True
    if n_jobs != 1:  # the longest first, or the last of them would run alone
        waiting.sort(key=lambda part: -part.effort)
    work = joblib.Parallel(n_jobs=n_jobs, return_as="generator_unordered")(
        joblib.delayed(_compute_and_keep)(k, part, files[id(part)])
        for k, part in enumerate(waiting)
    )
    for k, run in work:
        yield waiting[k], run, False


def _compute_and_keep(number: int, part: Part, file: Path) -> tuple[int, MethodRun]:
    run = compute(part)
    keep(run, file)
    return number, run


def collect(
    cohort: StudyData, methods: Sequence[Method], found: Sequence[tuple[Part, MethodRun]]
) -> Results:
    """All runs on one cohort."""
    runs: dict[str, list[MethodRun]] = {}
    for part, run in sorted(found, key=lambda pair: pair[0].seed):
        if part.cohort is cohort:
            runs.setdefault(part.method.key, []).append(run)
    return Results(
        cohort.name, cohort.source, cohort.train, cohort.test, methods, runs, cohort.images
    )
