"""Intervals of shares and of the AUC that hold with few slides, of several slides per patient.

A share is given the exact binomial (Clopper-Pearson) interval, of as many independent rows as the
rows of the patients are worth (`effective_number`). The AUC is given DeLong's variance, with
Obuchowski's sums over patients, on the logit scale. Where that variance says nothing (every
positive above every negative, or a class of one patient only) Newcombe's interval (2006, method 5)
takes its place. None has zero width, or leaves [0, 1], or misses the value it is about.
"""

import math

import numpy as np
from jaxtyping import Float, Int
from scipy.optimize import brentq
from scipy.special import expit, logit
from scipy.stats import beta, norm

Interval = tuple[float, float]
UNKNOWN = (math.nan, math.nan)


def share(
    hits: Float[np.ndarray, " units"], rows: Float[np.ndarray, " units"], level: float
) -> Interval:
    """Of sum(hits) / sum(rows), both counted for each patient; nan where there is no row.

    >>> low, high = share(np.ones(16), np.ones(16), 0.95)
    >>> round(low, 3), high
    (0.794, 1.0)
    """
    if not rows.sum():
        return UNKNOWN
    return exact(float(hits.sum() / rows.sum()), effective_number(hits, rows), level)


def exact(value: float, n: float, level: float) -> Interval:
    """Clopper and Pearson's limits of a share seen in n rows; n need not be whole."""
    tail, hits = (1 - level) / 2, value * n
    low = float(beta.ppf(tail, hits, n - hits + 1)) if value > 0 else 0.0
    high = float(beta.ppf(1 - tail, hits + 1, n - hits)) if value < 1 else 1.0
    return low, high


def effective_number(hits: Float[np.ndarray, " units"], rows: Float[np.ndarray, " units"]) -> float:
    """How many independent rows tell as much of the share as these do.

    From the spread of the patients' own shares, between `independent` (rows of a patient all
    alike) and the number of rows (as good as from different patients). Where all rows agree there
    is no spread to learn from, and the smaller one is taken.

    >>> effective_number(np.array([1.0, 0, 1]), np.ones(3))
    3.0
    >>> effective_number(np.array([2.0, 2, 2]), np.full(3, 2.0))
    3.0
    """
    fewest, most = independent(rows), float(rows.sum())
    units = int((rows > 0).sum())
    p = hits.sum() / most
    # Variance of a ratio of sums over patients: units / (units - 1) sum (hits - p rows)^2 / n^2
    spread = float(((hits - p * rows) ** 2).sum()) / most**2
    if units < 2 or not spread:
        return fewest
    # v = p (1 - p) / (n - 1) of n independent rows
    number = 1 + p * (1 - p) * (units - 1) / (units * spread)
    return float(min(max(number, fewest), most))


def independent(rows: Float[np.ndarray, " units"]) -> float:
    """Kish's number: what rows are worth if those of a patient say all the same.

    >>> independent(np.array([1.0, 1, 0])), independent(np.array([4.0, 4, 4]))
    (2.0, 3.0)
    """
    return float(rows.sum() ** 2 / (rows**2).sum())


# --- AUC ------------------------------------------------------------------------------------------
def auc(
    y: Float[np.ndarray, " n"],
    score: Float[np.ndarray, " n"],
    unit: Int[np.ndarray, " n"],
    level: float,
) -> Interval:
    """Of the AUC of scores with labels 0 and 1, `unit` the patient of each row, from 0.

    >>> y, one = np.array([0.0, 0, 0, 1, 1, 1]), np.arange(6)
    >>> low, high = auc(y, np.array([0.1, 0.2, 0.4, 0.3, 0.8, 0.9]), one, 0.95)
    >>> round(low, 2), round(high, 2)
    (0.26, 0.99)
    >>> low, high = auc(y, np.arange(6.0), one, 0.95)
    >>> round(low, 2), high
    (0.5, 1.0)
    """
    positive, negative = np.bincount(unit, y), np.bincount(unit, 1 - y)
    if not (positive.any() and negative.any()):
        return UNKNOWN
    value, variance = delong(y, score, unit)
    z = float(norm.ppf((1 + level) / 2))
    if 0 < value < 1 and variance > 0:
        # d logit(A) / dA = 1 / (A (1 - A))
        half = z * math.sqrt(variance) / (value * (1 - value))
        return float(expit(logit(value) - half)), float(expit(logit(value) + half))
    return newcombe(value, independent(positive), independent(negative), z)


def delong(
    y: Float[np.ndarray, " n"], score: Float[np.ndarray, " n"], unit: Int[np.ndarray, " n"]
) -> tuple[float, float]:
    """AUC and its variance; 0 where that cannot be told.

    DeLong, DeLong and Clarke-Pearson (1988), with the sums over patients of Obuchowski (1997): the
    same where every row is a patient of its own.
    """
    positive, negative = y == 1, y == 0
    above = _share_below(score[positive], score[negative])  # of the negatives, a positive
    below = 1 - _share_below(score[negative], score[positive])  # of the positives, a negative
    value = float(above.mean())
    n_units = int(unit.max()) + 1
    ours = np.bincount(unit[positive], above - value, minlength=n_units) / len(above)
    theirs = np.bincount(unit[negative], below - value, minlength=n_units) / len(below)
    units = [len(np.unique(unit[rows])) for rows in (positive, negative, positive | negative)]
    if min(units) < 2:
        return value, 0.0
    parts = (ours @ ours, theirs @ theirs, 2 * (ours @ theirs))
    variance = sum(k / (k - 1) * part for k, part in zip(units, parts))
    return value, max(0.0, float(variance))


def _share_below(
    ones: Float[np.ndarray, " m"], others: Float[np.ndarray, " n"]
) -> Float[np.ndarray, " m"]:
    """The share of the others that lies below each one; equal ones count half."""
    order = np.sort(others)
    less, not_more = np.searchsorted(order, ones), np.searchsorted(order, ones, side="right")
    return (less + not_more) / 2 / len(others)


def newcombe(value: float, positive: float, negative: float, z: float) -> Interval:
    """Where |AUC - theta| = z sqrt(V(theta)), V that of Hanley and McNeil with like-sized classes.

    >>> low, high = newcombe(1.0, 8, 8, 1.96)
    >>> round(low, 3), high
    (0.756, 1.0)
    """
    size = (positive + negative) / 2 - 1

    def excess(theta: float, at: float) -> float:
        shape = 1 + size * ((1 - theta) / (2 - theta) + theta / (1 + theta))
        return (at - theta) ** 2 - z**2 * theta * (1 - theta) * shape / (positive * negative)

    def low(at: float) -> float:
        # theta = 1 is a root where the AUC is 1; the other one is meant.
        return float(brentq(excess, 0, min(at, 1 - 1e-9), args=(at,))) if at > 0 else 0.0

    return low(value), 1 - low(1 - value)
