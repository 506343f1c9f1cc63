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
* ``froc`` (patches): free-response ROC, the mean share of positive patches that are found at 1/4,
  1/2, 1, 2, 4 and 8 false positive patches per bag (`froc`);
* ``log_loss`` (probabilities kept one machine epsilon of their type away from 0 and 1, as
  scikit-learn does), ``brier``;
* ``calibration_error``: mean over bins of |observed share - mean probability|, weighted by rows.

What is not defined is nan, without a warning: AUC needs both classes (within_bag_auc a bag that
holds both); recall, power, F1, FROC and average precision need a positive. With nothing flagged the
precision is 0 (as in scikit-learn with zero_division=0) and the false discovery rate 0. Resamples
in which a number is undefined are left out of its interval and counted in `n_undefined`.

A calibration error is positive by chance alone (0.03 to 0.05 on average for 300 bags whose
probabilities are exact, in 10 bins), and more so in a resample than in the cohort: its interval
leans upwards, and of a well calibrated model may lie above the value.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
from jaxtyping import Float, Int

from gpmil.data.checks import UNKNOWN
from gpmil.data.folds import codes
from gpmil.decide import intervals, measures
from gpmil.decide.estimates import COUNTED, NARROW, Estimate, bootstrap, with_exact_intervals
from gpmil.decide.grade_metrics import class_metrics, confusion, grade_metrics
from gpmil.decide.measures import (
    FALSE_PER_BAG,
    Binning,
    Rows,
    Totals,
    Weights,
    bag_aucs,
    decision_measures,
    losses,
    mass_bins,
    patch_measures,
    rank_measures,
    ranked_by_score,
    ratio,
    sensitivities,
    totals_of,
)
from gpmil.decide.metric_inputs import (
    FLAGS,
    LABELS,
    bag_labels,
    bag_numbers,
    check_bins,
    check_level,
    check_settings,
    decided,
    finite,
    patch_labels,
    patient_numbers,
    probabilities,
    zero_or_one,
)

__all__ = [
    "COUNTED",
    "FALSE_PER_BAG",
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
    "class_metrics",
    "confusion",
    "false_discovery_rate",
    "froc",
    "grade_metrics",
    "patch_metrics",
    "reliability_curve",
    "table",
    "within_bag_auc",
]


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
    y = bag_labels(y)
    p = probabilities(p, "p", len(y), "bag")
    flagged = decided(decision, p, threshold, "bag")
    unit = np.arange(len(y)) if groups is None else patient_numbers(groups, len(y))
    rows = Rows(y, p, flagged, unit)
    return _estimates(rows, n_bootstrap, level, seed, n_bins, binning)


def patch_metrics(
    labels: Any,
    score: Any,
    bag_index: Any,
    *,
    decision: Any = None,
    threshold: float = 0.5,
    groups: Any = None,
    **settings: Any,
) -> dict[str, Estimate]:
    """What `bag_metrics` reports, and within-bag AUC, FROC, false discovery rate, power.

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
    settings : n_bootstrap, level, seed, n_bins and binning, as in `bag_metrics`

    >>> labels, score = [1, 0, -1, 0, 1, 0], [0.9, 0.3, 0.8, 0.4, 0.2, 0.1]
    >>> found = patch_metrics(labels, score, [0, 0, 0, 1, 1, 1], n_bootstrap=200)
    >>> print(found["within_bag_auc"])
    0.750 (0.50 to 1.00)
    """
    labels = patch_labels(labels)
    score = probabilities(score, "score", len(labels), "patch")
    flagged = decided(decision, score, threshold, "patch")
    bag = bag_numbers(bag_index, len(labels))
    patient = bag if groups is None else patient_numbers(groups, int(bag.max()) + 1)[bag]

    known = labels != UNKNOWN
    y, score, flagged = labels[known].astype(np.float64), score[known], flagged[known]
    # Only what holds a patch of known label is numbered, and resampled.
    rows = Rows(y, score, flagged, codes(patient[known]), codes(bag[known]))
    return _estimates(rows, **settings)


def _estimates(
    rows: Rows,
    n_bootstrap: int = 1000,
    level: float = 0.95,
    seed: int = 0,
    n_bins: int = 10,
    binning: Binning = "mass",
) -> dict[str, Estimate]:
    check_settings(n_bootstrap, level, seed, n_bins, binning)
    y, p, _, unit, bag = rows
    totals, ranked = totals_of(rows), ranked_by_score(y, p, unit)

    def measure(c: Weights) -> dict[str, float]:
        ranks = rank_measures(ranked, c, n_bins, binning)
        every = decision_measures(totals, c) | ranks | losses(totals, c)
        if bag is None:
            return every
        return every | patch_measures(totals, c) | measures.froc(ranked, totals, c)

    found = bootstrap(measure, int(unit.max()) + 1, n_bootstrap, level, seed)
    return with_exact_intervals(found, totals, intervals.auc(y, p, unit, level))


def table(estimates_by_name: Mapping[str, Mapping[str, Estimate]]) -> pd.DataFrame:
    """One row per model, one column per metric, as text with intervals; empty where not reported.

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
    labels = patch_labels(labels)
    score, bag = finite(score, "score", len(labels), "patch"), bag_numbers(bag_index, len(labels))
    known = labels != UNKNOWN
    y, bag = labels[known].astype(np.float64), codes(bag[known])
    area, mixed = bag_aucs(y, score[known], bag)
    return ratio(float(area.sum()), float(mixed.sum()))


def froc(
    labels: Any, score: Any, bag_index: Any, false_per_bag: Sequence[float] = FALSE_PER_BAG
) -> float:
    """Free-response ROC: mean share of positive patches found at some false positives per bag.

    At each of `false_per_bag` the threshold is the lowest at which at most so many negative patches
    per bag lie above it, on average over the bags with a patch of known label; patches of equal
    score are above it together. A patch is a find of its own: no lesion is drawn around several.
    Labels (N,) are 0, 1, or -1 for unknown, which is left out; nan without a positive patch. Only
    the order of `score` (N,) matters; `bag_index` (N,) is the bag of each patch.

    >>> froc([1, 0, 1, 0], [0.9, 0.8, 0.7, 0.1], [0, 0, 1, 1], false_per_bag=(0.25, 0.5))
    0.75
    """
    labels = patch_labels(labels)
    score, bag = finite(score, "score", len(labels), "patch"), bag_numbers(bag_index, len(labels))
    rates = np.asarray(false_per_bag, dtype=np.float64)
    if rates.ndim != 1 or not len(rates) or not (rates >= 0).all():
        raise ValueError(
            f"false_per_bag: expected numbers of false positives per bag, found {false_per_bag!r}."
        )
    known = labels != UNKNOWN
    y, n_bags = labels[known].astype(np.float64), len(np.unique(bag[known]))
    ranked = ranked_by_score(y, score[known], np.zeros(len(y), dtype=np.int64))
    return float(sensitivities(ranked, np.ones(1), n_bags, rates.tolist()).mean())


def false_discovery_rate(labels: Any, flagged: Any) -> float:
    """Share of the flagged patches of known label that are negative; 0 if none is flagged.

    >>> false_discovery_rate([1, 0, -1, 1, 0], [1, 1, 1, 1, 0])
    0.3333333333333333
    """
    labels = patch_labels(labels)
    chosen = labels[zero_or_one(flagged, "flagged", len(labels), "patch", FLAGS) == 1]
    negative, known = float((chosen == 0).sum()), float((chosen != UNKNOWN).sum())
    return ratio(negative, known, otherwise=0.0)


def calibration_error(y: Any, p: Any, n_bins: int = 10, *, binning: Binning = "mass") -> float:
    """Expected calibration error: sum over bins of |positives - sum of p|, over all rows.

    ``binning="mass"`` (default) puts as many rows into each bin, rows of equal probability into
    the same one: MIL probabilities crowd near 0, where bins of equal width would hold nearly all
    of them. ``binning="width"`` cuts [0, 1] into equal intervals, closed on the left.

    >>> round(calibration_error([0, 0, 1, 1], [0.1, 0.2, 0.6, 0.7], n_bins=2), 3)
    0.25
    """
    y = bag_labels(y)
    p = probabilities(p, "p", len(y), "bag")
    check_bins(n_bins, binning)
    one = np.zeros(len(y), dtype=np.int64)
    return rank_measures(ranked_by_score(y, p, one), np.ones(1), n_bins, binning)[
        "calibration_error"
    ]


def reliability_curve(y: Any, p: Any, n_bins: int = 10, *, level: float = 0.95) -> ReliabilityCurve:
    """Mean probability and observed share of positives in bins of equally many rows.

    The bins are those of `calibration_error`; ties can make them fewer. The Clopper-Pearson
    intervals take rows for independent: right for one bag per patient, too narrow for patches.

    >>> curve = reliability_curve([0, 0, 1, 0, 1, 1], [0.1, 0.2, 0.3, 0.6, 0.7, 0.8], n_bins=2)
    >>> curve.observed.round(2), curve.low.round(2), curve.high.round(2)
    (array([0.33, 0.67]), array([0.01, 0.09]), array([0.91, 0.99]))
    """
    y = bag_labels(y)
    p = probabilities(p, "p", len(y), "bag")
    check_bins(n_bins, "mass")
    check_level(level)
    order = np.argsort(p, kind="stable")
    y, p = y[order], p[order].astype(np.float64)
    below = np.searchsorted(p, p, side="left")
    _, bins = np.unique(mass_bins(below, len(p), n_bins), return_inverse=True)
    size, positive = np.bincount(bins), np.bincount(bins, y)
    predicted, observed = np.bincount(bins, p) / size, positive / size
    ends = [intervals.exact(share, n, level) for share, n in zip(observed.tolist(), size.tolist())]
    return ReliabilityCurve(predicted, observed, size, *np.array(ends).T)
