"""Naive twins of gpmil.decide.metrics: rows are copied, scikit-learn and loops do the rest."""

import math

import numpy as np
from scipy.special import betainc
from scipy.stats import norm
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


def froc(y, p, bag, false_per_bag=(0.25, 0.5, 1, 2, 4, 8)):
    """Every threshold is tried; the best sensitivity with few enough false positives counts."""
    rows = [i for i in range(len(y)) if y[i] != -1]
    up, down = ([p[i] for i in rows if y[i] == k] for k in (1, 0))
    if not up:
        return math.nan
    n_bags, best = len({bag[i] for i in rows}), []
    for most in false_per_bag:
        tried = [t for t in {*p, math.inf} if sum(v >= t for v in down) <= most * n_bags]
        best.append(max(sum(v >= t for v in up) for t in tried) / len(up))
    return np.mean(best)


def patch_measures(y, p, flagged, bag, **bins):
    """All measures of patches whose labels are known."""
    chosen = [label for label, flag in zip(y, flagged) if flag]
    return row_measures(y, p, flagged, **bins) | {
        "within_bag_auc": within_bag_auc(y, p, bag),
        "false_discovery_rate": chosen.count(0) / len(chosen) if chosen else 0.0,
        "power": np.mean(flagged[y == 1]) if y.any() else math.nan,
        "froc": froc(y, p, bag),
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


def intervals(cohort, found, level):
    """Of every measure; calibration errors, which chance makes larger in resamples, moved back."""
    out = {}
    for name in found[0]:
        values = [f[name] for f in found]
        defined = [v for v in values if not math.isnan(v)]
        if name == "calibration_error" and defined:
            excess = sum(defined) / len(defined) - cohort[name]
            values = [v if math.isnan(v) else max(v - excess, 0.0) for v in values]
        out[name] = interval(values, level)
    return out


def bag_bootstrap(y, p, flagged, patient, n_bootstrap, level, seed, **bins):
    """(low, high, undefined) of every measure."""
    found = []
    for draws in resampled_rows(patient, n_bootstrap, seed):
        rows = [i for draw in draws for i in draw]
        found.append(row_measures(y[rows], p[rows], flagged[rows], **bins))
    return intervals(row_measures(y, p, flagged, **bins), found, level)


def patch_bootstrap(y, p, flagged, bag, patient, n_bootstrap, level, seed, **bins):
    """The same for patches of known label; a bag drawn twice is two bags."""
    found = []
    for draws in resampled_rows(patient, n_bootstrap, seed):
        rows = [i for draw in draws for i in draw]
        copies = [(k, bag[i]) for k, draw in enumerate(draws) for i in draw]
        found.append(patch_measures(y[rows], p[rows], flagged[rows], copies, **bins))
    return intervals(patch_measures(y, p, flagged, bag, **bins), found, level)


# --- Intervals that are not bootstrapped ----------------------------------------------------------
def bisected(function, low, high):
    """Where a falling function crosses zero."""
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (middle, high) if function(middle) > 0 else (low, middle)
    return low


def at_least(k, n, p):
    """P(X >= k) of X binomial, added up where k and n are whole."""
    if float(k).is_integer() and float(n).is_integer():
        terms = (math.comb(int(n), i) * p**i * (1 - p) ** (int(n) - i) for i in range(int(k)))
        return 1 - sum(terms)
    return betainc(k, n - k + 1, p)


def clopper_pearson(k, n, level):
    """The shares under which so many, or so few, are just not too rare."""
    tail = (1 - level) / 2
    low = 0.0 if k == 0 else bisected(lambda p: tail - at_least(k, n, p), 0, 1)
    high = 1.0 if k == n else bisected(lambda p: (1 - at_least(k + 1, n, p)) - tail, 0, 1)
    return low, high


def counts(hits, rows, patient):
    """[hits, rows] of every patient who has rows."""
    found = {}
    for name, hit, row in zip(patient, hits, rows):
        if row:
            of = found.setdefault(name, [0, 0])
            of[0] += int(hit)
            of[1] += 1
    return list(found.values())


def effective_number(hits, rows, patient):
    """Between as if rows of a patient were one, and as if each had a patient of its own."""
    of = counts(hits, rows, patient)
    n = sum(r for _, r in of)
    share = sum(h for h, _ in of) / n
    kish = n**2 / sum(r**2 for _, r in of)
    spread = sum((h - share * r) ** 2 for h, r in of)
    if len(of) < 2 or spread == 0:
        return kish
    variance = len(of) / (len(of) - 1) * spread / n**2
    return min(n, max(kish, 1 + share * (1 - share) / variance))


def share_interval(hits, rows, patient, level):
    """Of the hits among the rows that count."""
    if not any(rows):
        return math.nan, math.nan
    n = effective_number(hits, rows, patient)
    share = sum(int(h) for h, r in zip(hits, rows) if r) / sum(map(bool, rows))
    return clopper_pearson(share * n, n, level)


def auc_interval(y, p, patient, level):
    """DeLong over all pairs, summed by patient; Newcombe where that has no variance."""
    up, down = ([i for i in range(len(y)) if y[i] == k] for k in (1, 0))
    if not up or not down:
        return math.nan, math.nan
    win = {(i, j): (p[i] > p[j]) + 0.5 * (p[i] == p[j]) for i in up for j in down}
    auc = sum(win.values()) / len(win)
    variance = pair_variance(win, auc, up, down, patient)
    z = norm.ppf((1 + level) / 2)
    if variance > 0 and 0 < auc < 1:
        middle, half = math.log(auc / (1 - auc)), z * math.sqrt(variance) / (auc * (1 - auc))
        return tuple(1 / (1 + math.exp(-(middle + s * half))) for s in (-1, 1))
    sizes = [1 / sum(f**2 for f in shares(rows, patient)) for rows in (up, down)]
    low = newcombe_low(auc, *sizes, z)
    return low, 1 - newcombe_low(1 - auc, *sizes, z)


def shares(rows, patient):
    """The share of the rows that each patient has."""
    names = [patient[i] for i in rows]
    return [names.count(name) / len(names) for name in set(names)]


def pair_variance(win, auc, up, down, patient):
    """Products of the deviations of all rows of the same patient, one pair of rows at a time."""
    out = {i: (np.mean([win[i, j] for j in down]) - auc) / len(up) for i in up}
    out |= {j: (np.mean([win[i, j] for i in up]) - auc) / len(down) for j in down}
    total = 0.0
    for a, b in ((up, up), (down, down), (up, down), (down, up)):
        k = len({patient[i] for i in (a if a is b else up + down)})
        if k < 2:
            return 0.0
        total += (
            k / (k - 1) * sum(out[i] * out[j] for i in a for j in b if patient[i] == patient[j])
        )
    return 0.0 if total < 1e-15 else total


def newcombe_low(auc, m, n, z):
    """The smallest AUC that the one seen does not contradict."""
    size = (m + n) / 2

    def excess(t):
        shape = 1 + (size - 1) * ((1 - t) / (2 - t) + t / (1 + t))
        return (auc - t) ** 2 - z**2 * t * (1 - t) * shape / (m * n)

    return 0.0 if auc == 0 else bisected(excess, 0, min(auc, 1 - 1e-9))


def exact_intervals(y, p, flagged, patient, level):
    """(low, high) of every measure that is a share, and of the AUC."""
    hit = [a and f for a, f in zip(y, flagged)]
    every, either = [True] * len(y), [a or f for a, f in zip(y, flagged)]
    jaccard = share_interval(hit, either, patient, level)
    recall = share_interval(hit, y, patient, level)
    false = [f and not a for a, f in zip(y, flagged)]
    return {
        "accuracy": share_interval([a == f for a, f in zip(y, flagged)], every, patient, level),
        "precision": share_interval(hit, flagged, patient, level),
        "recall": recall,
        "f1": tuple(2 * j / (1 + j) for j in jaccard) if any(y) else (math.nan, math.nan),
        "false_discovery_rate": share_interval(false, flagged, patient, level),
        "power": recall,
        "auc": auc_interval(y, p, patient, level),
    }
