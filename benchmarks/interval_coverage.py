"""How often 95 % intervals of `gpmil.metrics` hold the truth, in cohorts of 16, 30 and 100 slides.

    python benchmarks/interval_coverage.py

Shares: every slide is right with the same probability; or three slides per patient, all right or
all wrong together in the share `alike` of the patients. AUC: scores of positives are normal and
shifted; or a share of the positives looks like negatives (lesions that are missed) and the rest
stands apart. The bootstrap that intervals were made by before stands beside them.
"""

import argparse
import math

import numpy as np
from scipy.stats import norm
from sklearn.metrics import roc_auc_score

from gpmil.decide import intervals

LEVEL = 0.95
SIZES = ((8, 8), (4, 12), (15, 15), (6, 24), (50, 50), (10, 90))


def shares(cohorts: int, rng: np.random.Generator) -> None:
    """Coverage of accuracies."""
    print("| slides | a patient | alike | accuracy | exact | bootstrap |")
    print("| --: | --: | --: | --: | --: | --: |")
    for n, own, alike in ((16, 1, 0), (30, 1, 0), (100, 1, 0), (30, 3, 1), (99, 3, 0), (99, 3, 1)):
        unit = np.arange(n) // own
        for truth in (0.6, 0.8, 0.9, 0.95, 0.99):
            held = np.zeros(2)
            for _ in range(cohorts):
                together = (rng.random(n) < alike)[unit]
                right = (np.where(together, rng.random(n)[unit], rng.random(n)) < truth) * 1.0
                hits, rows = np.bincount(unit, right), np.bincount(unit).astype(float)
                found = intervals.share(hits, rows, LEVEL)
                held += [inside(truth, *found), inside(truth, *resampled_share(hits, rows, rng))]
            print(f"| {n} | {own} | {alike} | {truth} | {percent(held, cohorts)} |", flush=True)


def aucs(cohorts: int, rng: np.random.Generator) -> None:
    """Coverage of AUCs."""
    print("\n| positive | negative | scores | AUC | gpmil | bootstrap |")
    print("| --: | --: | :-- | --: | --: | --: |")
    for positive, negative in SIZES:
        y = np.repeat([1.0, 0.0], [positive, negative])
        for kind in (shifted, mixed):
            for truth in (0.6, 0.8, 0.9, 0.95, 0.99):
                held = np.zeros(2)
                for _ in range(cohorts):
                    score = np.append(kind(truth, positive, rng), rng.normal(size=negative))
                    found = intervals.auc(y, score, np.arange(len(y)), LEVEL)
                    held += [inside(truth, *found), inside(truth, *resampled_auc(y, score, rng))]
                row = f"| {positive} | {negative} | {kind.__name__} | {truth} "
                print(f"{row}| {percent(held, cohorts)} |", flush=True)


def shifted(auc: float, n: int, rng: np.random.Generator) -> np.ndarray:
    """Normal scores of positives with this AUC against standard normal ones."""
    return rng.normal(math.sqrt(2) * norm.ppf(auc), 1, n)


def mixed(auc: float, n: int, rng: np.random.Generator) -> np.ndarray:
    """Positives of which 2 (1 - AUC) look like negatives, and the others are far above."""
    return rng.normal(np.where(rng.random(n) < 2 * (1 - auc), 0.0, 9.0))


def resampled_share(hits: np.ndarray, rows: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Percentiles of a share over 200 resamples of patients."""
    drawn = rng.integers(len(rows), size=(200, len(rows)))
    return np.quantile(hits[drawn].sum(1) / rows[drawn].sum(1), [0.025, 0.975])


def resampled_auc(y: np.ndarray, score: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Percentiles of the AUC over 100 resamples, those of one class apart."""
    drawn = rng.integers(len(y), size=(100, len(y)))
    both = (y[rows].min() < y[rows].max() for rows in drawn)
    values = [roc_auc(y[rows], score[rows]) for rows, good in zip(drawn, both) if good]
    return np.quantile(values, [0.025, 0.975])


def roc_auc(y: np.ndarray, score: np.ndarray) -> float:
    """As scikit-learn's, by `gpmil.decide.intervals`, which is faster for few slides."""
    return intervals.delong(y, score, np.arange(len(y)))[0]


def inside(truth: float, low: float, high: float) -> bool:
    """Whether the interval holds the truth, rounding apart."""
    return low - 1e-12 <= truth <= high + 1e-12


def percent(held: np.ndarray, cohorts: int) -> str:
    """Coverage in percent."""
    return " | ".join(f"{100 * h / cohorts:.1f}" for h in held)


def main() -> None:
    """Print both tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cohorts", type=int, default=2000, help="simulated, a row of the tables")
    given = parser.parse_args()
    y, score = np.array([0.0, 1, 1, 0, 1]), np.array([0.2, 0.1, 0.5, 0.5, 0.9])
    assert math.isclose(roc_auc(y, score), roc_auc_score(y, score))
    rng = np.random.default_rng(0)
    shares(given.cohorts, rng)
    aucs(given.cohorts, rng)


if __name__ == "__main__":
    main()
