"""Fit every method several times and predict the test slides; what is finished is kept.

A part is one method with one seed on one cohort (`gpmil.paper.parts` says how it is kept).
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
from jaxtyping import Bool
from sklearn.base import clone
from sklearn.model_selection import GridSearchCV
from threadpoolctl import threadpool_limits

from gpmil.data.bags import Bags
from gpmil.data.folds import codes, folds
from gpmil.decide import marks
from gpmil.models.base import BagClassifier
from gpmil.models.checks import plain
from gpmil.paper.cohorts import Drawn, StudyData
from gpmil.paper.methods import TUNED, Method
from gpmil.paper.parts import Packed, sealed
from gpmil.paper.results import MethodRun, Results
from gpmil.runs.learned import LEARNED

RATE = 0.1  # false discovery rate of the marked patches
FLAG_FOLDS = 5
ARRAYS = ("log_odds", "probability", "patch_probability", "flagged")
FOUND = (*LEARNED, "smooth_", "n_epochs_", "n_rounds_")  # by a fit, noted beside its run


@dataclass(frozen=True)
class Part:
    """One method with one seed on one cohort."""

    cohort: StudyData | Drawn
    fingerprint: str  # of the cohort
    method: Method
    seed: int
    flags: bool  # mark patches too

    @property
    def title(self) -> str:
        """In words."""
        return f"{self.cohort.name}: {self.method.label}, run {self.seed + 1}"

    @property
    def table(self) -> str:
        """All methods on this cohort."""
        return self.cohort.name

    @property
    def turn(self) -> int:
        """Seeds one after the other."""
        return self.seed

    @property
    def effort(self) -> float:
        """Rough cost: fits, with those for the marks."""
        fits = (1 + FLAG_FOLDS * (self.method.key not in TUNED)) if self.flags else 1
        return self.method.effort * fits * self.cohort.n_instances

    def name(self) -> str:
        """The stem of its files: changes with the data, the settings and the version."""
        # every setting, also those at their defaults: a default may change
        given = self.method.make(self.seed).get_params(deep=True)
        settings = f"{sorted(given.items(), key=str)}, {self.flags}"
        stem = f"{self.cohort.slug}-{self.method.key}-{self.seed}"
        return sealed(stem, self.fingerprint + settings)

    def compute(self) -> MethodRun:
        """Fit and predict."""
        return compute(self)

    def pack(self, result: MethodRun) -> Packed:
        """A run as arrays and a card."""
        arrays = {k: getattr(result, k) for k in ARRAYS if getattr(result, k) is not None}
        card = {f.name: getattr(result, f.name) for f in fields(result) if f.name not in ARRAYS}
        return arrays, card

    def unpack(self, packed: Packed) -> MethodRun:
        """The run of what `pack` made."""
        arrays: dict[str, Any] = {k: packed[0].get(k) for k in ARRAYS}
        return MethodRun(**arrays, **packed[1])


def planned(
    cohort: StudyData | Drawn, methods: Sequence[Method], n_runs: int, flags: bool = True
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
