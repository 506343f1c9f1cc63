"""A number and its interval over patients: bootstrap, and exact limits where there are any."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import numpy as np
from jaxtyping import Float

from gpmil.decide import intervals
from gpmil.decide.measures import Totals, Weights

NARROW = 0.02  # width below which an interval is shown with three digits


@dataclass(frozen=True)
class Estimate:
    """A number and its interval at `level`, from `n` patients (or bags).

    `n_undefined` resamples had no such number (average precision without a positive) and are not in
    the interval. With fewer than two patients, or nothing to count (precision where nothing is
    flagged), `low` and `high` are nan.

    >>> estimate = Estimate(0.9121, 0.853, 0.962, level=0.95, n=40, n_undefined=0)
    >>> print(estimate)
    0.912 (0.85 to 0.96)
    >>> float(estimate)
    0.9121
    """

    value: float
    low: float
    high: float
    level: float
    n: int
    n_undefined: int

    def __float__(self) -> float:
        return self.value

    def __str__(self) -> str:
        if math.isnan(self.value):
            return "undefined"
        if math.isnan(self.low):
            return f"{self.value:.3f} (no interval)"
        # A narrow interval keeps a digit more, so that its ends differ.
        digits = 2 if self.high - self.low >= NARROW else 3
        return f"{self.value:.3f} ({self.low:.{digits}f} to {self.high:.{digits}f})"


# --- The bootstrap --------------------------------------------------------------------------------
def bootstrap(
    measure: Callable[[Weights], dict[str, float]],
    n_units: int,
    n_bootstrap: int,
    level: float,
    seed: int,
) -> dict[str, Estimate]:
    """`measure` of the cohort, and its spread over resamples of the units."""
    found = measure(np.ones(n_units))
    # One unit alone gives the same resample every time: that is no interval.
    drawn = [measure(c) for c in _resamples(n_units, n_bootstrap, seed)] if n_units > 1 else []
    return {
        name: _estimate(value, _of(name, value, drawn), level, n_units)
        for name, value in found.items()
    }


def _of(name: str, value: float, drawn: list[dict[str, float]]) -> Float[np.ndarray, " resamples"]:
    """One measure of all resamples.

    Calibration errors add up gaps without their signs. Chance makes gaps, and a resample has them
    twice, so that all of its errors may lie above that of the cohort: they are moved back.
    """
    found = np.array([d[name] for d in drawn], dtype=float)
    if not name.startswith("calibration_error") or not np.isfinite(found).any():
        return found
    return np.maximum(found - (np.nanmean(found) - value), 0.0)


def _resamples(n_units: int, n_bootstrap: int, seed: int) -> Iterator[Weights]:
    """How often each unit is drawn when n_units are drawn with replacement."""
    rng = np.random.default_rng(seed)
    for _ in range(n_bootstrap):
        drawn = rng.integers(n_units, size=n_units)
        yield np.bincount(drawn, minlength=n_units).astype(np.float64)


def _estimate(
    value: float, drawn: Float[np.ndarray, " resamples"], level: float, n_units: int
) -> Estimate:
    defined = drawn[~np.isnan(drawn)]
    low, high = math.nan, math.nan
    if len(defined):
        low, high = np.quantile(defined, [(1 - level) / 2, (1 + level) / 2]).tolist()
    return Estimate(value, low, high, level, n_units, len(drawn) - len(defined))


# --- Exact intervals, where there are any ---------------------------------------------------------
def with_exact_intervals(
    found: dict[str, Estimate], totals: Totals, auc: intervals.Interval
) -> dict[str, Estimate]:
    """The estimates with the intervals of `gpmil.decide.intervals` in place of the bootstrap's."""
    one = next(iter(found.values()))
    if one.n < 2:  # the rows of one patient tell nothing of others
        return found
    ends = {"auc": auc} | {
        name: intervals.share(hits, rows, one.level)
        for name, (hits, rows) in _shares(totals).items()
    }
    ends["f1"] = _f1(ends.pop("jaccard"))
    exact = {
        name: replace(found[name], low=low, high=high, n_undefined=0)
        for name, (low, high) in ends.items()
        if name in found and not math.isnan(found[name].value)
    }
    rest = {
        name: _of_certainty(found[name], totals[of])
        for name, of in COUNTED.items()
        if name in found
    }
    return found | exact | rest


def _shares(totals: Totals) -> dict[str, tuple[Weights, Weights]]:
    """What is counted, and among what, patient by patient."""
    rows, positive, flagged, hit = (totals[k] for k in ("rows", "positive", "flagged", "hit"))
    return {
        "accuracy": (rows - positive - flagged + 2 * hit, rows),
        "precision": (hit, flagged),
        "recall": (hit, positive),
        "jaccard": (hit, flagged + positive - hit),
        "false_discovery_rate": (flagged - hit, flagged),
        "power": (hit, positive),
    }


def _f1(jaccard: intervals.Interval) -> intervals.Interval:
    """F1 = 2 J / (1 + J), J the share of true positives among what is positive or flagged."""
    low, high = (2 * j / (1 + j) for j in jaccard)
    return low, high


COUNTED = {
    "average_precision": "positive",
    "within_bag_auc": "mixed_bags",
    "froc": "positive",
    "brier": "rows",
    "calibration_error": "rows",
}
"""Averages of numbers between 0 and 1, with a bootstrap interval, and what they are averages over.

The mean of n such numbers that are all 0 (or all 1) has the exact limits of 0 (or n) of n: no other
numbers with the same mean are as often all 0.
"""


def _of_certainty(estimate: Estimate, rows: Weights) -> Estimate:
    """The exact interval where the resamples are all 0, or all 1; else the estimate as it is."""
    if not (estimate.low == estimate.high == estimate.value and estimate.value in (0, 1)):
        return estimate
    low, high = intervals.exact(estimate.value, intervals.independent(rows), estimate.level)
    return replace(estimate, low=low, high=high)
