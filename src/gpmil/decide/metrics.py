"""How well bags and patches were predicted, each number with an interval over patients.

`bag_metrics` and `patch_metrics` return a dict of `Estimate`. Bags of one patient (and patches of
one bag) are alike: taking them one by one would promise far too narrow an interval, so patients are
the unit of all of them. The intervals are of the cohort at hand, and know nothing of how a model
refitted on other bags would vary.

* Shares (accuracy, precision, recall, power, false discovery rate, and F1, which is a function of
  one) have the exact binomial interval of as many rows as theirs are worth; the AUC has DeLong's
  variance by patient, on the logit scale (`intervals`). 16 of 16 right is 1.000 (0.79 to
  1.00). In simulated cohorts of 16 to 100 bags 95 % intervals of shares held the truth in at least
  94 %, of the AUC in 93 to 99 % (90 % with 10 positives among 100); see
  docs/explanation/decisions.md and ``benchmarks/interval_coverage.py``.
* All others have percentiles of a bootstrap: a resample draws patients with replacement, all bags
  of a patient together. From few patients these are too narrow. Where every resample gives the
  same 0 or 1 (an average precision of 1) the exact interval of as many patients takes their place.

What is reported, for 0/1 decisions (by default probability > 0.5, as `predict` decides) ...

* ``accuracy``, ``precision``, ``recall``, ``f1``;
* ``false_discovery_rate`` (patches): share of the flagged patches that are negative; ``power``
  (patches): share of the positive patches that are flagged, another name of recall;

... and for probabilities

* ``auc``, ``average_precision``: ranking; ``within_bag_auc`` (patches): ranking inside bags;
* ``log_loss`` (probabilities kept one machine epsilon of their type away from 0 and 1, as
  scikit-learn does), ``brier``;
* ``calibration_error``: mean over bins of |observed share - mean probability|, weighted by rows.

What is not defined is nan, without a warning: AUC needs both classes (within_bag_auc a bag that
holds both); recall, power, F1 and average precision need a positive. With nothing flagged the
precision is 0 (as in scikit-learn with zero_division=0) and the false discovery rate 0. Resamples
in which a number is undefined are left out of its interval and counted in `n_undefined`.

A calibration error is positive by chance alone (0.03 to 0.05 on average for 300 bags whose
probabilities are exact, in 10 bins), and more so in a resample than in the cohort: its interval
leans upwards, and of a well calibrated model may lie above the value.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from numbers import Integral, Real
from typing import Any, Literal, get_args

import numpy as np
import pandas as pd
from jaxtyping import Bool, Float, Int
from scipy.stats import binomtest

from gpmil.data.checks import UNKNOWN, as_array, as_groups, as_names, encode_instance_labels, listed
from gpmil.data.folds import codes
from gpmil.decide import intervals

__all__ = [
    "COUNTED",
    "FLAGS",
    "LABELS",
    "NARROW",
    "Binning",
    "Estimate",
    "ReliabilityCurve",
    "Totals",
    "Weights",
    "bag_metrics",
    "calibration_error",
    "false_discovery_rate",
    "patch_metrics",
    "reliability_curve",
    "table",
    "within_bag_auc",
]

NARROW = 0.02  # width below which an interval is shown with three digits

Binning = Literal["mass", "width"]
Weights = Float[np.ndarray, " units"]  # how often each patient is in a resample
Totals = dict[str, Float[np.ndarray, " units"]]  # sums over the rows of each patient


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


@dataclass(frozen=True)
class ReliabilityCurve:
    """Bins of rising probability: what was predicted, what was observed, with its interval."""

    predicted: Float[np.ndarray, " bins"]  # mean probability
    observed: Float[np.ndarray, " bins"]  # share of positives
    count: Int[np.ndarray, " bins"]  # rows
    low: Float[np.ndarray, " bins"]  # Clopper-Pearson interval of the share
    high: Float[np.ndarray, " bins"]


# --- Bags and patches -----------------------------------------------------------------------------
def bag_metrics(
    y: Any,
    p: Any,
    *,
    decision: Any = None,
    threshold: float = 0.5,
    groups: Any = None,
    n_bootstrap: int = 1000,
    level: float = 0.95,
    seed: int = 0,
    n_bins: int = 10,
    binning: Binning = "mass",
) -> dict[str, Estimate]:
    """Accuracy, precision, recall, F1, AUC, average precision, log loss, Brier, calibration error.

    Parameters
    ----------
    y : (B,) labels, 0 or 1
    p : (B,) probabilities P(y = 1)
    decision : (B,) 0/1 or bool; by default p > `threshold`, which is not looked at otherwise
    groups : (B,) the patient of each bag; by default every bag is one of its own
    n_bootstrap : resamples
    level : of the intervals
    seed : same seed, same bits
    n_bins, binning : of the calibration error, see `calibration_error`

    >>> y, p = [0, 1, 1, 0, 1, 0], [0.2, 0.9, 0.6, 0.7, 0.8, 0.1]
    >>> found = bag_metrics(y, p, n_bootstrap=200)
    >>> print(found["auc"], found["auc"].n)
    0.889 (0.26 to 0.99) 6
    """
    y = _labels(y)
    p = _probabilities(p, "p", len(y), "bag")
    flagged = _decision(decision, p, threshold, "bag")
    unit = np.arange(len(y)) if groups is None else _patients(groups, len(y))
    _check_settings(n_bootstrap, level, seed, n_bins, binning)
    totals, ranked = _totals(y, p, flagged, unit), _ranked(y, p, unit)

    def measure(c: Weights) -> dict[str, float]:
        ranks = _rank_measures(ranked, c, n_bins, binning)
        return _decision_measures(totals, c) | ranks | _losses(totals, c)

    found = _bootstrap(measure, int(unit.max()) + 1, n_bootstrap, level, seed)
    return _exactly(found, totals, intervals.auc(y, p, unit, level))


def patch_metrics(
    labels: Any,
    score: Any,
    bag_index: Any,
    *,
    decision: Any = None,
    threshold: float = 0.5,
    groups: Any = None,
    n_bootstrap: int = 1000,
    level: float = 0.95,
    seed: int = 0,
    n_bins: int = 10,
    binning: Binning = "mass",
) -> dict[str, Estimate]:
    """What `bag_metrics` reports, for patches, with within-bag AUC, false discovery rate, power.

    Every patch of known label counts once, so large bags weigh more (in `within_bag_auc` each bag
    counts once). Whole bags, or all bags of a patient, are resampled; those without a patch of
    known label are not, and not counted in `n`.

    Parameters
    ----------
    labels : (N,) 0, 1, or -1 for unknown: left out
    score : (N,) probabilities P(h = 1)
    bag_index : (N,) the bag of each patch, counted from 0 (`Bags.bag_index`)
    decision : (N,) 0/1 or bool, as `predict_instances(...).flagged`; by default score > `threshold`
    groups : (B,) the patient of each *bag* (`Bags.groups`)

    The other parameters are those of `bag_metrics`.

    >>> labels, score = [1, 0, -1, 0, 1, 0], [0.9, 0.3, 0.8, 0.4, 0.2, 0.1]
    >>> found = patch_metrics(labels, score, [0, 0, 0, 1, 1, 1], n_bootstrap=200)
    >>> print(found["within_bag_auc"])
    0.750 (0.50 to 1.00)
    """
    labels = _patch_labels(labels)
    score = _probabilities(score, "score", len(labels), "patch")
    flagged = _decision(decision, score, threshold, "patch")
    bag = _bag_index(bag_index, len(labels))
    patient = bag if groups is None else _patients(groups, int(bag.max()) + 1)[bag]
    _check_settings(n_bootstrap, level, seed, n_bins, binning)

    known = labels != UNKNOWN
    y, score, flagged = labels[known].astype(np.float64), score[known], flagged[known]
    # Only what holds a patch of known label is numbered, and resampled.
    bag, unit = codes(bag[known]), codes(patient[known])
    totals, ranked = _totals(y, score, flagged, unit), _ranked(y, score, unit)
    totals |= _within_bag_totals(y, score, bag, unit)

    def measure(c: Weights) -> dict[str, float]:
        ranks = _rank_measures(ranked, c, n_bins, binning)
        every = _decision_measures(totals, c) | ranks | _losses(totals, c)
        return every | _patch_measures(totals, c)

    found = _bootstrap(measure, int(unit.max()) + 1, n_bootstrap, level, seed)
    return _exactly(found, totals, intervals.auc(y, score, unit, level))


def table(estimates_by_name: Mapping[str, Mapping[str, Estimate]]) -> pd.DataFrame:
    """One row a model, one column a metric, as text with intervals; empty where not reported.

    >>> auc = Estimate(0.9121, 0.853, 0.962, level=0.95, n=40, n_undefined=0)
    >>> print(table({"VGPMILPRI": {"auc": auc}}))
                                auc
    model
    VGPMILPRI  0.912 (0.85 to 0.96)
    """
    columns = dict.fromkeys(name for found in estimates_by_name.values() for name in found)
    rows = [
        [str(found[name]) if name in found else "" for name in columns]
        for found in estimates_by_name.values()
    ]
    index = pd.Index(list(estimates_by_name), name="model", dtype=object)
    return pd.DataFrame(rows, index=index, columns=list(columns), dtype=object)


# --- Single numbers -------------------------------------------------------------------------------
def within_bag_auc(labels: Any, score: Any, bag_index: Any) -> float:
    """Mean AUC inside the bags that hold both classes; nan if there is none.

    Only the order of `score` (N,) inside a bag matters, so it may be on any scale. Labels (N,) are
    0, 1, or -1 for unknown, which is left out; `bag_index` (N,) is the bag of each patch.

    >>> within_bag_auc([0, 1, 1, 0], [0.1, 0.2, 0.3, 0.4], [0, 0, 1, 1])
    0.5
    """
    labels = _patch_labels(labels)
    score, bag = _finite(score, "score", len(labels), "patch"), _bag_index(bag_index, len(labels))
    known = labels != UNKNOWN
    y, bag = labels[known].astype(np.float64), codes(bag[known])
    area, mixed = _bag_aucs(y, score[known], bag)
    return _ratio(float(area.sum()), float(mixed.sum()))


def false_discovery_rate(labels: Any, flagged: Any) -> float:
    """Share of the flagged patches of known label that are negative; 0 if none is flagged.

    >>> false_discovery_rate([1, 0, -1, 1, 0], [1, 1, 1, 1, 0])
    0.3333333333333333
    """
    labels = _patch_labels(labels)
    chosen = labels[_binary(flagged, "flagged", len(labels), "patch", FLAGS) == 1]
    negative, known = float((chosen == 0).sum()), float((chosen != UNKNOWN).sum())
    return _ratio(negative, known, otherwise=0.0)


def calibration_error(y: Any, p: Any, n_bins: int = 10, *, binning: Binning = "mass") -> float:
    """Expected calibration error: sum over bins of |positives - sum of p|, over all rows.

    ``binning="mass"`` (default) puts as many rows into each bin, rows of equal probability into
    the same one: MIL probabilities crowd near 0, where bins of equal width would hold nearly all
    of them. ``binning="width"`` cuts [0, 1] into equal intervals, closed on the left.

    >>> round(calibration_error([0, 0, 1, 1], [0.1, 0.2, 0.6, 0.7], n_bins=2), 3)
    0.25
    """
    y = _labels(y)
    p = _probabilities(p, "p", len(y), "bag")
    _check_bins(n_bins, binning)
    one = np.zeros(len(y), dtype=np.int64)
    return _rank_measures(_ranked(y, p, one), np.ones(1), n_bins, binning)["calibration_error"]


def reliability_curve(y: Any, p: Any, n_bins: int = 10, *, level: float = 0.95) -> ReliabilityCurve:
    """Mean probability and observed share of positives in bins of equally many rows.

    The bins are those of `calibration_error`; ties can make them fewer. The Clopper-Pearson
    intervals take rows for independent: right for one bag a patient, too narrow for patches.

    >>> curve = reliability_curve([0, 0, 1, 0, 1, 1], [0.1, 0.2, 0.3, 0.6, 0.7, 0.8], n_bins=2)
    >>> curve.observed.round(2), curve.low.round(2), curve.high.round(2)
    (array([0.33, 0.67]), array([0.01, 0.09]), array([0.91, 0.99]))
    """
    y = _labels(y)
    p = _probabilities(p, "p", len(y), "bag")
    _check_bins(n_bins, "mass")
    _check_level(level)
    order = np.argsort(p, kind="stable")
    y, p = y[order], p[order].astype(np.float64)
    below = np.searchsorted(p, p, side="left")
    _, bins = np.unique(_mass_bins(below, len(p), n_bins), return_inverse=True)
    size, positive = np.bincount(bins), np.bincount(bins, y)
    interval = [
        binomtest(int(k), int(n)).proportion_ci(level, method="exact")
        for k, n in zip(positive, size)
    ]
    low, high = np.array(interval).T
    return ReliabilityCurve(np.bincount(bins, p) / size, positive / size, size, low, high)


# --- Sums over the rows of a patient: what a resample weighs --------------------------------------
def _totals(
    y: Float[np.ndarray, " n"],
    p: Float[np.ndarray, " n"],
    flagged: Bool[np.ndarray, " n"],
    unit: Int[np.ndarray, " n"],
) -> Totals:
    columns = {
        "rows": np.ones(len(y)),
        "positive": y,
        "flagged": flagged,
        "hit": y * flagged,
        "log_loss": _log_losses(y, p),
        "brier": (y - p) ** 2,
    }
    return {name: np.bincount(unit, column) for name, column in columns.items()}


def _log_losses(y: Float[np.ndarray, " n"], p: Float[np.ndarray, " n"]) -> Float[np.ndarray, " n"]:
    """-log P(label), p one epsilon away from 0 and 1: a rounded certainty would cost infinity."""
    eps = np.finfo(p.dtype).eps
    q = np.clip(p, eps, 1 - eps).astype(np.float64)
    return -np.where(y == 1, np.log(q), np.log1p(-q))


def _within_bag_totals(
    y: Float[np.ndarray, " n"],
    score: Float[np.ndarray, " n"],
    bag: Int[np.ndarray, " n"],
    unit: Int[np.ndarray, " n"],
) -> Totals:
    """Sum of the AUCs of a patient's bags that hold both classes, and their number."""
    area, mixed = _bag_aucs(y, score, bag)
    unit_of_bag = np.zeros(len(area), dtype=np.int64)
    unit_of_bag[bag] = unit
    return {
        "within_bag_auc": np.bincount(unit_of_bag, area, minlength=unit.max() + 1),
        "mixed_bags": np.bincount(unit_of_bag, mixed, minlength=unit.max() + 1),
    }


def _bag_aucs(
    y: Float[np.ndarray, " n"], score: Float[np.ndarray, " n"], bag: Int[np.ndarray, " n"]
) -> tuple[Float[np.ndarray, " bags"], Bool[np.ndarray, " bags"]]:
    """AUC of each bag, 0 where it is not defined, and whether the bag holds both classes."""
    rank = pd.Series(score).groupby(bag).rank().to_numpy()
    size, positive, ranks = np.bincount(bag), np.bincount(bag, y), np.bincount(bag, y * rank)
    # Mann-Whitney: AUC = (sum of the positives' ranks - P (P + 1) / 2) / (P (n - P))
    pairs = positive * (size - positive)
    above = ranks - positive * (positive + 1) / 2
    return np.divide(above, pairs, out=np.zeros(len(size)), where=pairs > 0), pairs > 0


def _decision_measures(totals: Totals, c: Weights) -> dict[str, float]:
    n, positive, flagged, hit = (
        float(c @ totals[k]) for k in ("rows", "positive", "flagged", "hit")
    )
    return {
        # right = true positives + true negatives = hit + (n - positive - flagged + hit)
        "accuracy": (n - positive - flagged + 2 * hit) / n,
        "precision": _ratio(hit, flagged, otherwise=0.0),
        "recall": _ratio(hit, positive),
        # F1 = 2 TP / (2 TP + FP + FN)
        "f1": 2 * hit / (flagged + positive) if positive else math.nan,
    }


def _losses(totals: Totals, c: Weights) -> dict[str, float]:
    return {k: float(c @ totals[k] / (c @ totals["rows"])) for k in ("log_loss", "brier")}


def _patch_measures(totals: Totals, c: Weights) -> dict[str, float]:
    positive, flagged, hit, area, mixed = (
        float(c @ totals[k]) for k in ("positive", "flagged", "hit", "within_bag_auc", "mixed_bags")
    )
    return {
        "within_bag_auc": _ratio(area, mixed),
        "false_discovery_rate": _ratio(flagged - hit, flagged, otherwise=0.0),
        "power": _ratio(hit, positive),
    }


def _ratio(part: float, whole: float, otherwise: float = math.nan) -> float:
    return part / whole if whole else otherwise


# --- Ranks: sorted once, then cumulative sums of the weights of a resample ------------------------
@dataclass(frozen=True)
class _Ranked:
    """Rows from the highest score down, and the distinct scores among them."""

    positive: Float[np.ndarray, " n"]
    unit: Int[np.ndarray, " n"]  # the patient of each row
    last: Int[np.ndarray, " T"]  # the last row of each distinct score
    score: Float[np.ndarray, " T"]


def _ranked(
    y: Float[np.ndarray, " n"], score: Float[np.ndarray, " n"], unit: Int[np.ndarray, " n"]
) -> _Ranked:
    order = np.argsort(-score, kind="stable")
    score = score[order].astype(np.float64)
    last = np.append(np.flatnonzero(score[1:] != score[:-1]), len(score) - 1)
    return _Ranked(y[order], unit[order], last, score[last])


def _rank_measures(ranked: _Ranked, c: Weights, n_bins: int, binning: Binning) -> dict[str, float]:
    """AUC, average precision and calibration error of a resample."""
    weight = c[ranked.unit]
    # Rows, and positives, that score at least as high as each distinct score
    rows = np.cumsum(weight)[ranked.last]
    true = np.cumsum(weight * ranked.positive)[ranked.last]
    if binning == "mass":
        bins = _mass_bins(rows[-1] - rows, rows[-1], n_bins)
    else:
        bins = np.digitize(ranked.score, np.linspace(0, 1, n_bins + 1)[1:-1])
    # |positives - sum of p| of each bin
    gap = np.bincount(bins, _steps(true) - ranked.score * _steps(rows))
    return {
        "auc": _auc(true, rows - true),
        "average_precision": _average_precision(true, rows),
        "calibration_error": float(np.abs(gap).sum() / rows[-1]),
    }


def _auc(true: Float[np.ndarray, " T"], false: Float[np.ndarray, " T"]) -> float:
    """Area under true against false positives; ties are slopes, so that a tied pair counts half."""
    area = _steps(false) @ (true - _steps(true) / 2)
    return _ratio(float(area), float(true[-1] * false[-1]))


def _average_precision(true: Float[np.ndarray, " T"], rows: Float[np.ndarray, " T"]) -> float:
    """Sum over thresholds of (recall gained) x precision; no row yet gains no recall."""
    precision = true / np.maximum(rows, 1)
    return _ratio(float(_steps(true) @ precision), float(true[-1]))


def _steps(total: Float[np.ndarray, " T"]) -> Float[np.ndarray, " T"]:
    return np.diff(total, prepend=0.0)


def _mass_bins(below: np.ndarray, n: float, n_bins: int) -> Int[np.ndarray, " T"]:
    """floor(n_bins x share of the rows that score lower): equal scores share a bin."""
    return np.floor(n_bins * below / n).astype(np.int64)


# --- The bootstrap --------------------------------------------------------------------------------
def _bootstrap(
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
        name: _estimate(value, np.array([d[name] for d in drawn], dtype=float), level, n_units)
        for name, value in found.items()
    }


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
def _exactly(
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


# --- What comes in --------------------------------------------------------------------------------
LABELS = (
    "Leave out bags without a label (-1), as in bags[bags.labels >= 0]; make classes with other "
    'names 0 and 1, as in (y == "cancer").'
)
FLAGS = "Pass what was decided, as in (p > 0.3) or predict_instances(bags).flagged."


def _vector(values: Any, name: str, n: int | None, each: str) -> np.ndarray:
    """One value a bag (or patch), (n,); a column of Python objects as one of numbers if it is."""
    array = as_array(values, name)
    expected = f"one value a {each}" + ("" if n is None else f", {n:,} in all")
    if array.ndim == 2 and array.shape[1] == 2 and name in ("p", "score"):
        raise ValueError(
            f"{name}: expected {expected}, found shape {array.shape}: both columns of "
            "predict_proba? Take the second, predict_proba(bags)[:, 1]."
        )
    if array.ndim != 1 or n not in (None, len(array)):
        raise ValueError(f"{name}: expected {expected}, found shape {array.shape}.")
    if not len(array):
        raise ValueError(f"{name}: expected {expected}, found none: an empty cohort or split?")
    if array.dtype == object:
        array = np.array([np.nan if v is None or v is pd.NA else v for v in array])
    return array


def _binary(
    values: Any, name: str, n: int | None, each: str, advice: str
) -> Float[np.ndarray, " n"]:
    array = _vector(values, name, n, each)
    # Text is refused before np.isin, which takes "1" for 1.
    other = ~np.isin(array, (0, 1)) if array.dtype.kind in "biuf" else np.full(len(array), True)
    if other.any():
        raise ValueError(
            f"{name}: expected 0 or 1, found {listed(array[other])} ({int(other.sum()):,} of "
            f"{len(array):,}). {advice}"
        )
    return array.astype(np.float64)


def _labels(y: Any) -> Float[np.ndarray, " B"]:
    return _binary(y, "y", None, "bag", LABELS)


def _patch_labels(labels: Any) -> Int[np.ndarray, " N"]:
    """0, 1 or -1 a patch, some of them known."""
    array = _vector(labels, "labels", None, "patch")
    encoded = encode_instance_labels(array, len(array))
    if (encoded == UNKNOWN).all():
        raise ValueError(
            f"labels: all {len(encoded):,} are unknown (-1), so patches cannot be judged. Were "
            "instance_labels given when the bags were built?"
        )
    return encoded


def _finite(values: Any, name: str, n: int, each: str) -> Float[np.ndarray, " n"]:
    """Finite numbers, in the precision they came in."""
    array = _vector(values, name, n, each)
    if array.dtype.kind not in "biuf":
        raise ValueError(f"{name}: expected numbers, found {listed(array)}.")
    if array.dtype.kind != "f" or array.dtype.itemsize > 8:
        array = array.astype(np.float64)
    bad = np.flatnonzero(~np.isfinite(array))
    if len(bad):
        raise ValueError(
            f"{name}: expected finite numbers, found {array[bad[0]]} in row {bad[0]} "
            f"({len(bad):,} of {len(array):,}): did a model diverge, or a join leave gaps?"
        )
    return array


def _probabilities(values: Any, name: str, n: int, each: str) -> Float[np.ndarray, " n"]:
    array = _finite(values, name, n, each)
    if array.min() < 0 or array.max() > 1:
        raise ValueError(
            f"{name}: expected probabilities between 0 and 1, found {array.min():.4g} to "
            f"{array.max():.4g}: log odds or means? Pass predict_proba(bags)[:, 1], or "
            "predict_instances(bags).probability."
        )
    return array


def _decision(
    decision: Any, p: Float[np.ndarray, " n"], threshold: float, each: str
) -> Bool[np.ndarray, " n"]:
    if decision is not None:
        return _binary(decision, "decision", len(p), each, FLAGS) == 1
    if not isinstance(threshold, Real) or not 0 <= threshold <= 1:
        raise ValueError(f"threshold: expected a probability between 0 and 1, found {threshold!r}.")
    return p > threshold


def _bag_index(bag_index: Any, n: int) -> Int[np.ndarray, " N"]:
    array = _vector(bag_index, "bag_index", n, "patch")
    if array.dtype.kind not in "iu" or array.min() < 0:
        raise ValueError(
            "bag_index: expected the number of each patch's bag, counted from 0, found "
            f"{listed(array)}. Pass bags.bag_index, or pandas.factorize(names)[0]."
        )
    return array.astype(np.int64)


def _patients(groups: Any, n_bags: int) -> Int[np.ndarray, " B"]:
    """The number of each bag's patient, counted from 0."""
    shape = as_array(groups, "groups").shape
    if shape != (n_bags,):
        raise ValueError(
            f"groups: expected the patient of each bag, {n_bags:,} in all, found shape {shape}. "
            "Of patches pass all, with label -1 where unknown, and groups still one a bag."
        )
    return codes(np.asarray(as_groups(groups, as_names(None, n_bags))))


def _check_settings(
    n_bootstrap: int, level: float, seed: int, n_bins: int, binning: Binning
) -> None:
    if not isinstance(n_bootstrap, Integral) or n_bootstrap < 1:
        raise ValueError(f"n_bootstrap: expected a whole number from 1, found {n_bootstrap!r}.")
    if not isinstance(seed, Integral) or seed < 0:
        raise ValueError(f"seed: expected a whole number from 0, found {seed!r}.")
    _check_level(level)
    _check_bins(n_bins, binning)


def _check_level(level: float) -> None:
    if not isinstance(level, Real) or not 0 < level < 1:
        raise ValueError(f"level: expected a share between 0 and 1, such as 0.95, found {level!r}.")


def _check_bins(n_bins: int, binning: Binning) -> None:
    if not isinstance(n_bins, Integral) or n_bins < 1:
        raise ValueError(f"n_bins: expected a whole number from 1, found {n_bins!r}.")
    if binning not in get_args(Binning):
        raise ValueError(f"binning: expected 'mass' or 'width', found {binning!r}.")
