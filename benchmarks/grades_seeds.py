"""Simulated grades over several populations: OrdinalMIL against networks, paired over slides.

python benchmarks/grades_seeds.py --seeds 0,1,2,3,4 --jobs 5

Every seed is a population of its own: 500 slides to learn from, 300 of other patients and 1,200 of
still others to judge by. All models see the same components. Each is called twice, at least
quadratic cost and for the largest expected kappa; the networks, which have no probabilities
out of fold, with the kappa that is expected of the slides they are judged by; attention also
calibrated by networks without a fold each. In hindsight: with the cut points on the expected grade
that are best for these very slides, which nobody can know.
"""

import argparse
import logging
import multiprocessing
import os
import time
from typing import Any, NamedTuple

THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMBA_NUM_THREADS")
if __name__ == "__main__":
    os.environ.update(dict.fromkeys(THREADS, "1"))  # one process per seed, one thread each

import numpy as np  # noqa: E402

import gpmil  # noqa: E402
from gpmil.data.folds import folds  # noqa: E402
from gpmil.decide import cumulative  # noqa: E402
from gpmil.decide.grade_metrics import agreement, expected_kappa, least_cost, most_kappa  # noqa: E402
from gpmil.metrics import calibration_error  # noqa: E402
from gpmil.models import OrdinalAttentionMIL, OrdinalMeanPoolMIL  # noqa: E402
from gpmil.models.graded import differences  # noqa: E402
from gpmil.simulate import GradedCohort, graded_cohort  # noqa: E402

OURS = "OrdinalMIL, calibrated"
RESAMPLES = 200
PARTS = {300: 1, 1200: 2}  # slides, and the part of the population


class Said(NamedTuple):
    """What one model said of some slides of one seed."""

    model: str
    seed: int
    grades: np.ndarray
    p: np.ndarray
    calls: dict[str, np.ndarray]
    seconds: float

    def line(self) -> str:
        """For the eye."""
        y, n = self.grades, len(self.grades)
        kappas = [f"{name} {kappa(y, call):.3f}" for name, call in self.calls.items()]
        loss = -np.log(self.p[np.arange(n), y]).mean()
        cuts = range(1, self.p.shape[1])
        errors = [calibration_error((y >= k).astype(int), above(self.p, k)) for k in cuts]
        return (
            f"seed {self.seed}, {n} slides, {self.model}: kappa {', '.join(kappas)}, in hindsight "
            f"{hindsight(y, self.p @ np.arange(self.p.shape[1])):.3f}; log loss "
            f"{loss:.3f}; calibration errors {', '.join(f'{e:.3f}' for e in errors)}; "
            f"fit {self.seconds:.0f} s"
        )


def above(p: np.ndarray, k: int) -> np.ndarray:
    """P(Y >= k)."""
    return p[:, k:].sum(1).clip(0, 1)


def kappa(y: np.ndarray, call: np.ndarray) -> float:
    """Quadratic weighted."""
    table = np.zeros((4, 4))
    np.add.at(table, (y, call), 1.0)
    return agreement(table)["kappa"]


def hindsight(y: np.ndarray, expected: np.ndarray) -> float:
    """The largest kappa of cut points on the expected grade, found one after the other."""
    cuts, places = np.arange(y.max()) + 0.5, np.linspace(0.05, y.max() - 0.05, 60)
    for j in list(range(len(cuts))) * 4:
        tried = [np.sort([*np.delete(cuts, j), place]) for place in places]
        cuts = tried[int(np.argmax([kappa(y, np.digitize(expected, one)) for one in tried]))]
    return kappa(y, np.digitize(expected, cuts))


def one_seed(asked: tuple[int, int, list[int]]) -> list[Said]:
    """All models of one population."""
    seed, components, sizes = asked
    logging.getLogger("gpmil").setLevel(logging.ERROR)
    train = graded_cohort(500, seed=seed, part=0)
    others = [graded_cohort(n, seed=seed, part=PARTS[n]) for n in sizes]
    shared: dict[str, Any] = {"n_components": components, "random_state": 0}
    said = []
    own = {"slide_context": "auto", "calibrated": True}
    for name, model in (
        (OURS, gpmil.OrdinalMIL(**shared, **own)),
        ("attention", OrdinalAttentionMIL(**shared)),
        ("mean pooling", OrdinalMeanPoolMIL(**shared)),
    ):
        start = time.process_time()
        model.fit(train.bags, train.grades)
        seconds = time.process_time() - start
        numbers = calibration(shared, train) if name == "attention" else None
        for other in others:
            p = model.predict_proba(other.bags)
            said.append(judged(name, seed, other.grades, p, model, seconds))
            if numbers is not None:
                known = differences(cumulative.calibrated(odds_of(p), odds_of(p), numbers))
                said.append(judged(f"{name}, calibrated", seed, other.grades, known, None, seconds))
            if name == OURS:
                plain = differences(model.log_proba_at_most(other.bags)[0])
                said.append(judged("OrdinalMIL", seed, other.grades, plain, None, seconds))
    return said


def calibration(shared: dict[str, Any], train: GradedCohort) -> np.ndarray:
    """Slope and intercept of every threshold of attention, from networks without a fold each."""
    fold = folds((train.grades > 0).astype(np.int64), train.bags.groups, 5, 0)
    odds = np.empty((len(fold), train.grades.max()))
    for k in range(5):
        rest, own = np.flatnonzero(fold != k), np.flatnonzero(fold == k)
        model = OrdinalAttentionMIL(**shared).fit(train.bags[rest], train.grades[rest])
        odds[own] = odds_of(model.predict_proba(train.bags[own]))
    return cumulative.by_odds(odds, train.grades)


def odds_of(p: np.ndarray) -> np.ndarray:
    """Log odds of Y >= 1, ..., Y >= K - 1."""
    below = p[:, :-1].cumsum(1)
    return np.log1p(-below.clip(1e-12, 1 - 1e-12)) - np.log(below.clip(1e-12, 1))


def judged(
    name: str, seed: int, grades: np.ndarray, p: np.ndarray, model: Any, seconds: float
) -> Said:
    """Called in two ways."""
    shares = np.full(p.shape[1], 1 / p.shape[1])
    known = getattr(model, "expected_kappa_", None)
    expected = expected_kappa(p, shares) if known is None else float(known[0])
    calls = {"quadratic": least_cost(p), "kappa": most_kappa(p, shares, expected)}
    return Said(name, seed, grades, p, calls, seconds)


def compared(said: list[Said], n: int) -> None:
    """Mean differences over the seeds, with the standard error of slides, paired, and of seeds."""
    here = {(s.model, s.seed): s for s in said if len(s.grades) == n}
    seeds, rng = sorted({seed for _, seed in here}), np.random.default_rng(0)
    drawn = [rng.integers(n, size=(RESAMPLES, n)) for _ in seeds]
    for other in ("OrdinalMIL", "attention", "attention, calibrated", "mean pooling"):
        for call in ("quadratic", "kappa"):
            pairs = [(here[OURS, seed], here[other, seed]) for seed in seeds]
            each = [
                kappa(a.grades, a.calls[call]) - kappa(b.grades, b.calls[call]) for a, b in pairs
            ]
            again = [
                [
                    kappa(a.grades[i], a.calls[call][i]) - kappa(b.grades[i], b.calls[call][i])
                    for i in rows
                ]
                for (a, b), rows in zip(pairs, drawn)
            ]
            slides = np.mean(again, axis=0).std()
            spread = np.std(each, ddof=1) / np.sqrt(len(each)) if len(each) > 1 else np.nan
            print(
                f"{n} slides, {OURS} less {other}, calls for {call}: {np.mean(each):+.3f} "
                f"(standard error {slides:.3f} over slides, {spread:.3f} over seeds); "
                f"by seed {', '.join(f'{d:+.3f}' for d in each)}"
            )


def main() -> None:
    """Seeds side by side."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--components", type=int, default=32)
    parser.add_argument("--sizes", default="300,1200")
    parser.add_argument("--jobs", type=int, default=1)
    asked = parser.parse_args()
    sizes = [int(n) for n in asked.sizes.split(",")]
    todo = [(int(seed), asked.components, sizes) for seed in asked.seeds.split(",")]
    said: list[Said] = []
    with multiprocessing.get_context("spawn").Pool(asked.jobs) as pool:
        for found in pool.imap_unordered(one_seed, todo):
            said += found
            for one in found:
                print(one.line(), flush=True)
    for n in sizes:
        compared(said, n)


if __name__ == "__main__":
    main()
