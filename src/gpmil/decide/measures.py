"""What is measured of rows of patients, as sums that a resample weighs: nothing is sorted twice."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
import pandas as pd
from jaxtyping import Bool, Float, Int

Binning = Literal["mass", "width"]
Weights = Float[np.ndarray, " units"]  # how often each patient is in a resample
Totals = dict[str, Float[np.ndarray, " units"]]  # sums over the rows of each patient
FALSE_PER_BAG = (0.25, 0.5, 1.0, 2.0, 4.0, 8.0)  # at which `froc` takes the sensitivity


class Rows(NamedTuple):
    """Bags, or patches of known label, that are judged."""

    y: Float[np.ndarray, " n"]
    p: Float[np.ndarray, " n"]
    flagged: Bool[np.ndarray, " n"]
    unit: Int[np.ndarray, " n"]  # the patient, counted from 0
    bag: Int[np.ndarray, " n"] | None = None  # of patches


# --- Sums over the rows of a patient: what a resample weighs --------------------------------------
def totals_of(rows: Rows) -> Totals:
    """What every metric counts, summed over the rows of each patient."""
    y, p, flagged, unit, bag = rows
    columns = {
        "rows": np.ones(len(y)),
        "positive": y,
        "flagged": flagged,
        "hit": y * flagged,
        "log_loss": _log_losses(y, p),
        "brier": (y - p) ** 2,
    }
    found = {name: np.bincount(unit, column) for name, column in columns.items()}
    if bag is None:
        return found
    # The AUCs of a patient's bags that hold both classes, and their number
    area, mixed = bag_aucs(y, p, bag)
    unit_of_bag = np.zeros(len(area), dtype=np.int64)
    unit_of_bag[bag] = unit
    n_units = len(found["rows"])
    return found | {
        "within_bag_auc": np.bincount(unit_of_bag, area, minlength=n_units),
        "mixed_bags": np.bincount(unit_of_bag, mixed, minlength=n_units),
        "bags": np.bincount(unit_of_bag, minlength=n_units).astype(np.float64),
    }


def _log_losses(y: Float[np.ndarray, " n"], p: Float[np.ndarray, " n"]) -> Float[np.ndarray, " n"]:
    """-log P(label), p one epsilon away from 0 and 1: a rounded certainty would cost infinity."""
    eps = np.finfo(p.dtype).eps
    q = np.clip(p, eps, 1 - eps).astype(np.float64)
    return -np.where(y == 1, np.log(q), np.log1p(-q))


def bag_aucs(
    y: Float[np.ndarray, " n"], score: Float[np.ndarray, " n"], bag: Int[np.ndarray, " n"]
) -> tuple[Float[np.ndarray, " bags"], Bool[np.ndarray, " bags"]]:
    """AUC of each bag, 0 where it is not defined, and whether the bag holds both classes."""
    rank = pd.Series(score).groupby(bag).rank().to_numpy()
    size, positive, ranks = np.bincount(bag), np.bincount(bag, y), np.bincount(bag, y * rank)
    # Mann-Whitney: AUC = (sum of the positives' ranks - P (P + 1) / 2) / (P (n - P))
    pairs = positive * (size - positive)
    above = ranks - positive * (positive + 1) / 2
    return np.divide(above, pairs, out=np.zeros(len(size)), where=pairs > 0), pairs > 0


def decision_measures(totals: Totals, c: Weights) -> dict[str, float]:
    """Accuracy, precision, recall and F1 of a resample."""
    n, positive, flagged, hit = (
        float(c @ totals[k]) for k in ("rows", "positive", "flagged", "hit")
    )
    return {
        # right = true positives + true negatives = hit + (n - positive - flagged + hit)
        "accuracy": (n - positive - flagged + 2 * hit) / n,
        "precision": ratio(hit, flagged, otherwise=0.0),
        "recall": ratio(hit, positive),
        # F1 = 2 TP / (2 TP + FP + FN)
        "f1": 2 * hit / (flagged + positive) if positive else math.nan,
    }


def losses(totals: Totals, c: Weights) -> dict[str, float]:
    """Log loss and Brier score of a resample."""
    return {k: float(c @ totals[k] / (c @ totals["rows"])) for k in ("log_loss", "brier")}


def patch_measures(totals: Totals, c: Weights) -> dict[str, float]:
    """What is reported of patches only, of a resample."""
    positive, flagged, hit, area, mixed = (
        float(c @ totals[k]) for k in ("positive", "flagged", "hit", "within_bag_auc", "mixed_bags")
    )
    return {
        "within_bag_auc": ratio(area, mixed),
        "false_discovery_rate": ratio(flagged - hit, flagged, otherwise=0.0),
        "power": ratio(hit, positive),
    }


def ratio(part: float, whole: float, otherwise: float = math.nan) -> float:
    """part / whole, and `otherwise` where there is no whole."""
    return part / whole if whole else otherwise


# --- Ranks: sorted once, then cumulative sums of the weights of a resample ------------------------
@dataclass(frozen=True)
class Ranked:
    """Rows from the highest score down, and the distinct scores among them."""

    positive: Float[np.ndarray, " n"]
    unit: Int[np.ndarray, " n"]  # the patient of each row
    last: Int[np.ndarray, " T"]  # the last row of each distinct score
    score: Float[np.ndarray, " T"]


def ranked_by_score(
    y: Float[np.ndarray, " n"], score: Float[np.ndarray, " n"], unit: Int[np.ndarray, " n"]
) -> Ranked:
    """The rows sorted once, for all resamples."""
    order = np.argsort(-score, kind="stable")
    score = score[order].astype(np.float64)
    last = np.append(np.flatnonzero(score[1:] != score[:-1]), len(score) - 1)
    return Ranked(y[order], unit[order], last, score[last])


def counted(ranked: Ranked, c: Weights) -> tuple[Float[np.ndarray, " T"], Float[np.ndarray, " T"]]:
    """Rows, and positives, of a resample that score at least as high as each distinct score."""
    weight = c[ranked.unit]
    return np.cumsum(weight)[ranked.last], np.cumsum(weight * ranked.positive)[ranked.last]


def rank_measures(ranked: Ranked, c: Weights, n_bins: int, binning: Binning) -> dict[str, float]:
    """AUC, average precision and calibration error of a resample."""
    rows, true = counted(ranked, c)
    if binning == "mass":
        bins = mass_bins(rows[-1] - rows, rows[-1], n_bins)
    else:
        bins = np.digitize(ranked.score, np.linspace(0, 1, n_bins + 1)[1:-1])
    # |positives - sum of p| of each bin
    gap = np.bincount(bins, _steps(true) - ranked.score * _steps(rows))
    return {
        "auc": _auc(true, rows - true),
        "average_precision": _average_precision(true, rows),
        "calibration_error": float(np.abs(gap).sum() / rows[-1]),
    }


def sensitivities(
    ranked: Ranked, c: Weights, n_bags: float, false_per_bag: Sequence[float]
) -> Float[np.ndarray, " rates"]:
    """The share of positives above the lowest threshold with at most so many false ones per bag."""
    rows, true = counted(ranked, c)
    # rows are counted from the highest score down: false ones only become more
    allowed = np.searchsorted(rows - true, np.multiply(false_per_bag, n_bags), side="right")
    found = np.append(0.0, true)[allowed]
    return found / true[-1] if true[-1] else np.full(len(found), math.nan)


def froc(ranked: Ranked, totals: Totals, c: Weights) -> dict[str, float]:
    """Mean sensitivity at FALSE_PER_BAG of a resample, whose bags are counted as often as drawn."""
    found = sensitivities(ranked, c, float(c @ totals["bags"]), FALSE_PER_BAG)
    return {"froc": float(found.mean())}


def _auc(true: Float[np.ndarray, " T"], false: Float[np.ndarray, " T"]) -> float:
    """Area under true against false positives; ties are slopes, so that a tied pair counts half."""
    area = _steps(false) @ (true - _steps(true) / 2)
    return ratio(float(area), float(true[-1] * false[-1]))


def _average_precision(true: Float[np.ndarray, " T"], rows: Float[np.ndarray, " T"]) -> float:
    """Sum over thresholds of (recall gained) x precision; no row yet gains no recall."""
    precision = true / np.maximum(rows, 1)
    return ratio(float(_steps(true) @ precision), float(true[-1]))


def _steps(total: Float[np.ndarray, " T"]) -> Float[np.ndarray, " T"]:
    return np.diff(total, prepend=0.0)


def mass_bins(below: np.ndarray, n: float, n_bins: int) -> Int[np.ndarray, " T"]:
    """floor(n_bins x share of the rows that score lower): equal scores share a bin."""
    return np.floor(n_bins * below / n).astype(np.int64)
