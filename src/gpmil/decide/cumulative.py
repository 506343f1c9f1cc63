"""Calibrated grades: every P(Y >= k) from what was said of bags out of fold, in the right order.

By the odds alone: logit P(Y >= k) = slope x_k + intercept, x_k the model's log odds of Y >= k;
where two would cross the larger one holds. By area: the same for k = 1, and then step by step,

    logit P(Y >= k | Y >= k - 1) = slope x_k + sum_j weight_j log(1 + n_j) + intercept,

n_j the number of patches expected above cut point j. The largest of many alike patches is further
above what they have in common than the largest of few, and the model, whose patches are
independent given the slide effect, makes too much of it: large lesions get too high a grade.
"""

import numpy as np
from jaxtyping import Float, Int
from scipy.special import expit

from gpmil.decide.calibration import NEEDED, SlideCalibrator, platt_targets, weighed
from gpmil.inference.leave_groups import standard_error

Odds = Float[np.ndarray, "B k"]  # log odds of Y >= 1, ..., Y >= K - 1
Above = Float[np.ndarray, "B k"]  # expected number of patches above b_1, ..., b_K-1
# a row for every threshold: slope, the weights of the areas (none by the odds alone), intercept
Calibration = Float[np.ndarray, "k columns"]
WIDTH = 2.0  # of the prior of weights, of columns with unit deviation
WITHIN = np.finfo(float).tiny, np.nextafter(1.0, 0.0)


def chosen(
    odds: Odds,
    above: Above,
    codes: Int[np.ndarray, " B"],
    fold: Int[np.ndarray, " B"],
    groups: np.ndarray | None = None,
) -> Calibration:
    """By area where grades out of fold are likelier so by a standard error, else by the odds."""
    plain = by_odds(odds, codes)
    if odds.shape[1] == 1 or not _enough(codes, fold, odds.shape[1]):
        return plain
    gain = left_out(odds, above, codes, fold, area=True) - left_out(odds, above, codes, fold)
    better = gain.mean() > standard_error(gain, groups)
    return by_area(odds, above, codes) if better else plain


def by_odds(odds: Odds, codes: Int[np.ndarray, " B"]) -> Calibration:
    """Slope and intercept of every threshold.

    >>> rng = np.random.default_rng(0)
    >>> odds = rng.normal(0, 1, 500)[:, None] - [0.0, 1.0]  # said; true ones are twice as far off
    >>> y = (rng.logistic(size=500)[:, None] < 2 * odds).sum(1)
    >>> slope, intercept = by_odds(odds, y).T
    >>> bool((np.abs(slope - 2) < 0.5).all() and (np.abs(intercept) < 0.5).all())
    True
    """
    each = (SlideCalibrator.fit(x, (codes > k).astype(np.int64)) for k, x in enumerate(odds.T))
    return np.array([(one.slope, one.intercept) for one in each])


def by_area(odds: Odds, above: Above, codes: Int[np.ndarray, " B"]) -> Calibration:
    """Slope, weights of the areas and intercept: P(Y >= 1), then of every step."""
    first = by_odds(odds[:, :1], codes)[0]
    rows = [[first[0], *np.zeros(odds.shape[1]), first[1]]]
    for k in range(1, odds.shape[1]):
        reached = codes >= k
        columns = np.column_stack([odds[:, k], np.log1p(above)])[reached]
        weights, intercept = weighed(
            columns, platt_targets((codes[reached] > k).astype(np.int64)), WIDTH
        )
        rows.append([*weights, intercept])
    return np.array(rows)


def calibrated(odds: Odds, above: Above, calibration: Calibration) -> Float[np.ndarray, "B k"]:
    """log P(Y <= 0), ..., log P(Y <= K - 2), calibrated, which never falls."""
    slope, weights, intercept = calibration[:, 0], calibration[:, 1:-1], calibration[:, -1]
    if not weights.size:
        found = [SlideCalibrator(*numbers).predict(x) for x, numbers in zip(odds.T, calibration)]
        return np.maximum.accumulate(np.log1p(-np.stack(found, axis=1)), axis=1)
    most = np.finfo(float).max
    with np.errstate(over="ignore"):
        steps = expit(slope * np.clip(odds, -most, most) + np.log1p(above) @ weights.T + intercept)
    # P(Y >= k) = product of the steps up to k
    return np.log1p(-np.cumprod(np.clip(steps, *WITHIN), axis=1))


def left_out(
    odds: Odds,
    above: Above,
    codes: Int[np.ndarray, " B"],
    fold: Int[np.ndarray, " B"],
    area: bool = False,
) -> Float[np.ndarray, " B"]:
    """log P(Y_b), by a calibration that has not seen the fold of bag b."""
    log_p = np.empty_like(odds)
    for k in np.unique(fold):
        rest, own = fold != k, fold == k
        others = odds[rest], above[rest], codes[rest]
        found = by_area(*others) if area else by_odds(odds[rest], codes[rest])
        log_p[own] = calibrated(odds[own], above[own], found)
    ends = np.zeros((len(codes), 1))
    at_most = np.hstack([ends, np.exp(log_p), ends + 1])
    own = at_most[np.arange(len(codes)), codes + 1] - at_most[np.arange(len(codes)), codes]
    return np.log(np.maximum(own, 1 / len(codes)))  # two that crossed do not decide


def _enough(codes: Int[np.ndarray, " B"], fold: Int[np.ndarray, " B"], n_cuts: int) -> bool:
    """Whether every grade has bags enough outside every fold."""
    counts = [np.bincount(codes[fold != k], minlength=n_cuts + 1) for k in np.unique(fold)]
    return int(np.min(counts)) >= NEEDED
