"""Naive twins of gpmil.metrics: rows are copied, scikit-learn and loops do the rest."""

import math

import numpy as np
from sklearn import metrics as sk


def mass_bins(p, n_bins):
    """Bin of each row: n_bins x (rows strictly below it) // rows."""
    return [n_bins * sum(other < value for other in p) // len(p) for value in p]


def width_bins(p, n_bins):
    """Bin of each row: the last of the equal intervals whose left end it reaches."""
    edges = np.linspace(0, 1, n_bins + 1)[:-1]
    return [max(k for k, edge in enumerate(edges) if value >= edge) for value in p]


def calibration_error(y, p, bins):
    total = 0.0
    for k in set(bins):
        rows = [i for i, b in enumerate(bins) if b == k]
        total += len(rows) * abs(np.mean(y[rows]) - np.mean(p[rows]))
    return total / len(y)


def row_measures(y, p, flagged, n_bins=10, binning="mass"):
    """The measures that bags and patches share."""
    bins = (mass_bins if binning == "mass" else width_bins)(p, n_bins)
    some, both = y.any(), len(set(y)) == 2
    return {
        "accuracy": sk.accuracy_score(y, flagged),
        "precision": sk.precision_score(y, flagged, zero_division=0),
        "recall": sk.recall_score(y, flagged) if some else math.nan,
        "f1": sk.f1_score(y, flagged, zero_division=0) if some else math.nan,
        "auc": sk.roc_auc_score(y, p) if both else math.nan,
        "average_precision": sk.average_precision_score(y, p) if some else math.nan,
        "calibration_error": calibration_error(y, p, bins),
        "log_loss": sk.log_loss(y, p, labels=[0, 1]),
        "brier": np.mean([(a - b) ** 2 for a, b in zip(y, p)]),
    }


def within_bag_auc(y, p, bag):
    found = []
    for b in dict.fromkeys(bag):
        rows = [i for i in range(len(y)) if bag[i] == b and y[i] != -1]
        if {*y[rows]} == {0, 1}:
            found.append(sk.roc_auc_score(y[rows], p[rows]))
    return np.mean(found) if found else math.nan


def patch_measures(y, p, flagged, bag, **bins):
    """All measures of patches whose labels are known."""
    chosen = [label for label, flag in zip(y, flagged) if flag]
    return row_measures(y, p, flagged, **bins) | {
        "within_bag_auc": within_bag_auc(y, p, bag),
        "false_discovery_rate": chosen.count(0) / len(chosen) if chosen else 0.0,
        "power": np.mean(flagged[y == 1]) if y.any() else math.nan,
    }


def resampled_rows(patient, n_bootstrap, seed):
    """Rows of each resample, a patient's rows once for every time it is drawn, draw by draw."""
    patients = sorted(set(patient))
    rng = np.random.default_rng(seed)
    for _ in range(n_bootstrap):
        drawn = rng.integers(len(patients), size=len(patients))
        yield [[i for i, name in enumerate(patient) if name == patients[k]] for k in drawn]


def interval(values, level):
    """Percentiles of the defined values, and how many are not defined."""
    defined = [v for v in values if not math.isnan(v)]
    if not defined:
        return math.nan, math.nan, len(values)
    tail = (1 - level) / 2
    return *np.quantile(defined, [tail, 1 - tail]), len(values) - len(defined)


def bag_bootstrap(y, p, flagged, patient, n_bootstrap, level, seed, **bins):
    """(low, high, undefined) of every measure."""
    found = []
    for draws in resampled_rows(patient, n_bootstrap, seed):
        rows = [i for draw in draws for i in draw]
        found.append(row_measures(y[rows], p[rows], flagged[rows], **bins))
    return {name: interval([f[name] for f in found], level) for name in found[0]}


def patch_bootstrap(y, p, flagged, bag, patient, n_bootstrap, level, seed, **bins):
    """The same for patches of known label; a bag drawn twice is two bags."""
    found = []
    for draws in resampled_rows(patient, n_bootstrap, seed):
        rows = [i for draw in draws for i in draw]
        copies = [(k, bag[i]) for k, draw in enumerate(draws) for i in draw]
        found.append(patch_measures(y[rows], p[rows], flagged[rows], copies, **bins))
    return {name: interval([f[name] for f in found], level) for name in found[0]}
