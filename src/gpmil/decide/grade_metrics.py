"""How well grades or types were predicted: weighted kappa, calibration per threshold; recall, AUC.

Intervals are percentiles of a bootstrap over patients, as in metrics.py, and those of shares exact.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from jaxtyping import Float, Int

from gpmil.data.folds import codes
from gpmil.decide import intervals
from gpmil.decide.estimates import Estimate, bootstrap
from gpmil.decide.measures import Binning, Ranked, Weights, rank_measures, ranked_by_score
from gpmil.decide.metric_inputs import check_settings, finite, patient_numbers

MOST_ROUNDS, SAME = 100, 1e-9  # in which kappa and the calls for it settle
LEAST_KAPPA = 0.05  # expected of calls: below, grades are guessed and calls need no spread
Confusion = Float[np.ndarray, "K K"]  # rows: the true grade, columns: the predicted one


def grade_metrics(
    y: Any,
    p: Any,
    *,
    decision: Any = None,
    groups: Any = None,
    n_bootstrap: int = 1000,
    level: float = 0.95,
    seed: int = 0,
    n_bins: int = 10,
    binning: Binning = "mass",
) -> dict[str, Estimate]:
    """Quadratic weighted kappa, accuracy, within one grade, log loss, calibration per threshold.

    Parameters
    ----------
    y : (B,) grades as numbers 0 to K - 1
    p : (B, K) probabilities P(Y = k)
    decision : (B,) predicted grades as numbers; by default of least expected quadratic cost
    groups : (B,) the patient of each bag; by default every bag is one of its own
    n_bootstrap, level, seed, n_bins, binning : as in `bag_metrics`

    ``calibration_error_k`` is that of P(Y >= k), for k = 1 to K - 1.

    >>> y, p = [0, 1, 2, 2], [[0.8, 0.1, 0.1], [0.2, 0.6, 0.2], [0.1, 0.2, 0.7], [0.1, 0.6, 0.3]]
    >>> found = grade_metrics(y, p, n_bootstrap=200)
    >>> round(found["kappa"].value, 3), found["within_one"].value
    (0.8, 1.0)
    """
    said = _Said.of(y, p, decision, least_cost, groups)
    at_least = said.p[:, ::-1].cumsum(1)[:, ::-1].clip(0, 1)
    ranked = {
        k: ranked_by_score((said.y >= k).astype(float), at_least[:, k], said.unit)
        for k in range(1, at_least.shape[1])
    }
    how = (n_bootstrap, level, seed, n_bins, binning)
    return _judged(said, ranked, agreement, ("calibration_error",), *how)


def class_metrics(
    y: Any,
    p: Any,
    *,
    decision: Any = None,
    groups: Any = None,
    n_bootstrap: int = 1000,
    level: float = 0.95,
    seed: int = 0,
    n_bins: int = 10,
    binning: Binning = "mass",
) -> dict[str, Estimate]:
    """Accuracy, mean recall and log loss of classes in no order; each against the rest.

    Arguments as of `grade_metrics`; the default decision is the likeliest class. ``auc_k`` and
    ``calibration_error_k`` are those of P(Y = k), for k = 0 to K - 1.

    >>> y, p = [0, 1, 2, 2], [[0.8, 0.1, 0.1], [0.2, 0.6, 0.2], [0.1, 0.2, 0.7], [0.1, 0.6, 0.3]]
    >>> found = class_metrics(y, p, n_bootstrap=200)
    >>> found["accuracy"].value, round(found["mean_recall"].value, 3), found["auc_2"].value
    (0.75, 0.833, 1.0)
    """
    said = _Said.of(y, p, decision, lambda q: q.argmax(1), groups)
    ranked = {
        k: ranked_by_score((said.y == k).astype(float), said.p[:, k], said.unit)
        for k in range(said.p.shape[1])
    }
    how = (n_bootstrap, level, seed, n_bins, binning)
    return _judged(said, ranked, _recalls, ("auc", "calibration_error"), *how)


def _judged(
    said: "_Said",
    ranked: Mapping[int, Ranked],
    of_table: Callable[[Confusion], dict[str, float]],
    of_each: Sequence[str],
    n_bootstrap: int,
    level: float,
    seed: int,
    n_bins: int,
    binning: Binning,
) -> dict[str, Estimate]:
    """What a confusion matrix says, the log loss, and `of_each` of every question's ranks."""
    check_settings(n_bootstrap, level, seed, n_bins, binning)

    def measure(c: Weights) -> dict[str, float]:
        found = of_table(said.table(c)) | said.log_loss(c)
        for k, rows in ranked.items():
            one = rank_measures(rows, c, n_bins, binning)
            found |= {f"{name}_{k}": one[name] for name in of_each}
        return found

    found = bootstrap(measure, len(said.tables), n_bootstrap, level, seed)
    return found | _exact_shares(found, said.tables)


def _recalls(table: Confusion) -> dict[str, float]:
    """Accuracy, and the mean recall of the classes that there are."""
    n = table.sum(1)
    recall = np.diag(table)[n > 0] / n[n > 0]
    return {"accuracy": float(np.trace(table) / n.sum()), "mean_recall": float(recall.mean())}


class _Said(NamedTuple):
    """Classes and what was said of them, ready to be resampled by patient."""

    y: Int[np.ndarray, " B"]
    p: Float[np.ndarray, "B K"]
    unit: Int[np.ndarray, " B"]  # the patient
    tables: Float[np.ndarray, "U K K"]  # a confusion matrix per patient
    loss: Float[np.ndarray, " U"]

    @classmethod
    def of(
        cls, y: Any, p: Any, decision: Any, by_default: Callable[..., Any], groups: Any
    ) -> "_Said":
        p = _probabilities(p)
        y, n = _grades(y, "y", *p.shape), p.shape[1]
        said = by_default(p) if decision is None else _grades(decision, "decision", *p.shape)
        unit = np.arange(len(y)) if groups is None else codes(patient_numbers(groups, len(y)))
        tables = np.zeros((int(unit.max()) + 1, n, n))
        np.add.at(tables, (unit, y, said), 1.0)
        least = np.finfo(float).eps
        return cls(
            y, p, unit, tables, np.bincount(unit, -np.log(np.maximum(p[range(len(y)), y], least)))
        )

    def table(self, c: Weights) -> Confusion:
        """The confusion matrix of a resample."""
        return np.tensordot(c, self.tables, axes=1)

    def log_loss(self, c: Weights) -> dict[str, float]:
        """Of a resample."""
        return {"log_loss": float(c @ self.loss / self.table(c).sum())}


def _exact_shares(found: dict[str, Estimate], tables: np.ndarray) -> dict[str, Estimate]:
    """Shares of bags with the interval of as many as theirs are worth."""
    rows, apart = tables.sum((1, 2)), _apart(tables.shape[1])
    if len(rows) < 2:
        return {}
    out = {}
    for name, most in (("accuracy", 0), ("within_one", 1)):
        if name not in found:
            continue
        one = found[name]
        low, high = intervals.share((tables * (apart <= most)).sum((1, 2)), rows, one.level)
        out[name] = Estimate(one.value, low, high, one.level, one.n, 0)
    return out


def agreement(table: Confusion) -> dict[str, float]:
    """Quadratic weighted kappa, accuracy, and the share within one grade, of a confusion matrix.

    >>> agreement(np.array([[2.0, 0], [1, 1]]))["kappa"]
    0.5
    """
    n, apart = table.sum(), _apart(len(table))
    # 1 - observed / expected disagreement, w_ij = (i - j)^2
    expected = (apart**2 * np.outer(table.sum(1), table.sum(0))).sum() / n
    kappa = 1 - float((apart**2 * table).sum() / expected) if expected else math.nan
    return {
        "kappa": kappa,
        "accuracy": float(np.trace(table) / n),
        "within_one": float(table[apart <= 1].sum() / n),
    }


def _apart(n_grades: int) -> Int[np.ndarray, "K K"]:
    k = np.arange(n_grades)
    return np.abs(k[:, None] - k)


def least_cost(p: Float[np.ndarray, "B K"]) -> Int[np.ndarray, " B"]:
    """The grade of least expected quadratic cost.

    >>> least_cost(np.array([[0.5, 0.1, 0.4]]))
    array([1])
    """
    # sum_k P(Y = k) (k - j)^2 of every answer j
    return (p @ np.square(_apart(p.shape[1]))).argmin(1)


def most_kappa(
    p: Float[np.ndarray, "B K"], shares: Float[np.ndarray, " K"], kappa: float
) -> Int[np.ndarray, " B"]:
    """The grade j for which quadratic weighted kappa is expected to be largest.

    kappa = 1 - O / E, O the mean of (Y - j)^2 and E that of grades and calls paired at random. At
    the best kappa no call can lower O - (1 - kappa) E, so each j minimises
    sum_k P(Y = k) (k - j)^2 - (1 - kappa) sum_k share_k (k - j)^2: calls are spread out, from the
    mean of the shares on, by 1 / kappa.

    >>> p = np.array([[0.3, 0.5, 0.2, 0.0]])
    >>> least_cost(p), most_kappa(p, np.full(4, 0.25), 0.5)
    (array([1]), array([0]))
    """
    apart = np.square(_apart(p.shape[1]))
    return (p @ apart - (1 - kappa) * (shares @ apart)).argmin(1)


def expected_kappa(p: Float[np.ndarray, "B K"], shares: Float[np.ndarray, " K"]) -> float:
    """The kappa that calls by `most_kappa` are expected to have where P(Y = k) are p.

    >>> round(expected_kappa(np.eye(3), np.full(3, 1 / 3)), 3)
    1.0
    """
    apart, kappa = np.square(_apart(p.shape[1])), 0.5
    for _ in range(MOST_ROUNDS):
        said = most_kappa(p, shares, kappa)
        observed = (p @ apart)[np.arange(len(p)), said].mean()
        found = 1 - observed / (shares @ apart)[said].mean()
        if found <= LEAST_KAPPA or abs(found - kappa) < SAME:
            return max(float(found), LEAST_KAPPA)
        kappa = float(found)
    return kappa


def confusion(y: Any, decision: Any, grades: Any) -> pd.DataFrame:
    """Bags by true grade (rows) and predicted grade (columns); `grades` are their names, in order.

    >>> confusion([0, 1, 1], [0, 1, 0], ["benign", "3"]).to_numpy()
    array([[1, 0],
           [1, 1]])
    """
    names = [str(g) for g in grades]
    true = _grades(y, "y", len(np.asarray(y)), len(names))
    said = _grades(decision, "decision", len(true), len(names))
    table = np.zeros((len(names), len(names)), dtype=np.int64)
    np.add.at(table, (true, said), 1)
    return pd.DataFrame(table, pd.Index(names, name="true"), pd.Index(names, name="predicted"))


# --- What is given, checked -----------------------------------------------------------------------
def _probabilities(p: Any) -> Float[np.ndarray, "B K"]:
    found = np.asarray(p, dtype=np.float64) if np.ndim(p) == 2 else np.zeros(0)
    if found.ndim != 2 or found.shape[1] < 2 or not len(found):
        raise ValueError(
            f"p: expected (bags, grades) probabilities of two grades or more, found shape "
            f"{np.shape(p)}. They are what OrdinalMIL.predict_proba gives."
        )
    if not ((found >= 0) & (found <= 1)).all() or np.abs(found.sum(1) - 1).max() > 1e-6:
        raise ValueError("p: expected probabilities that sum to 1 in every row.")
    return found


def _grades(values: Any, name: str, n: int, n_grades: int) -> Int[np.ndarray, " B"]:
    found = finite(values, name, n, "bag")
    whole = found.astype(np.int64)
    if (whole != found).any() or whole.min() < 0 or whole.max() >= n_grades:
        raise ValueError(
            f"{name}: expected grades as numbers 0 to {n_grades - 1}, found "
            f"{sorted(set(found.tolist()))[:10]}. Names become numbers by their place among the "
            "grades."
        )
    return whole
