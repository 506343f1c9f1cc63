"""Calibrated slides: probabilities that mean what they say, and intervals of them.

`SlideCalibrator`: from out-of-fold log odds, each by a model that has not seen the patient (see
`data.folds`), to probabilities that hold on slides like those of the cohort.
"""

from dataclasses import dataclass
from logging import getLogger

import numpy as np
from jaxtyping import Float, Int
from scipy.special import expit, logit
from sklearn.linear_model import LogisticRegression

from gpmil.data.checks import listed
from gpmil.data.folds import zero_one
from gpmil.decide.checks import check_share, refuse_nan
from gpmil.decide.intervals import independent

logger = getLogger("gpmil")
NEEDED = 5  # bags of each class, to calibrate slides


@dataclass(frozen=True)
class SlideCalibrator:
    """From a model's log odds of a positive slide to a calibrated probability; never falling.

    expit(slope x + intercept): two numbers, right for small cohorts.
    """

    slope: float = 1.0
    intercept: float = 0.0

    @classmethod
    def fit(
        cls, log_odds: Float[np.ndarray, " B"], labels: Int[np.ndarray, " B"]
    ) -> "SlideCalibrator":
        """From out-of-fold log odds and the labels of the same bags."""
        x = np.asarray(log_odds, dtype=float)
        targets = platt_targets(zero_one(labels, len(x)))
        if not np.isfinite(x).all():
            odd = x[~np.isfinite(x)].tolist()
            raise ValueError(f"log_odds: expected finite numbers, found {listed(odd)}.")
        return cls(*_sigmoid(x, targets))

    def predict(self, log_odds: Float[np.ndarray, " B"]) -> Float[np.ndarray, " B"]:
        """P(y = 1); never exactly 0 or 1."""
        x = np.asarray(log_odds, dtype=float)
        refuse_nan(x, "log_odds")
        x = np.clip(x, -np.finfo(float).max, np.finfo(float).max)
        with np.errstate(over="ignore"):
            p = expit(self.slope * x + self.intercept)
        return np.clip(p, np.finfo(float).tiny, np.nextafter(1.0, 0.0))


def platt_targets(labels: np.ndarray) -> Float[np.ndarray, " B"]:
    """(n1 + 1) / (n1 + 2) for positives, 1 / (n0 + 2) for negatives (Platt 1999).

    They keep the slope finite where the classes separate, and probabilities off 0 and 1.
    """
    n0, n1 = np.bincount(labels, minlength=2)
    if min(n0, n1) < NEEDED:
        raise ValueError(
            f"calibrating slides needs at least {NEEDED} negative and {NEEDED} positive bags "
            f"(better 50 of each), found {n0} and {n1}. Add bags, or do without calibration."
        )
    return np.where(labels == 1, (n1 + 1) / (n1 + 2), 1 / (n0 + 2))


def _sigmoid(x: np.ndarray, targets: np.ndarray) -> tuple[float, float]:
    """Slope >= 0 and intercept of Platt's regression on targets between 0 and 1."""
    weights, intercept = weighed(x[:, None], targets, np.inf)
    if weights[0] * np.std(x) <= 1e-6:  # convex: the best slope >= 0 is then 0
        logger.warning(
            "slide calibration: positive bags do not get higher out-of-fold log odds than negative "
            "ones, so every slide gets the same probability. The model does not rank new slides."
        )
        return 0.0, float(logit(targets.mean()))
    return float(weights[0]), intercept


def weighed(
    columns: Float[np.ndarray, "B c"], targets: Float[np.ndarray, " B"], width: float
) -> tuple[Float[np.ndarray, " c"], float]:
    """Weights of the columns and intercept of a logistic regression on targets between 0 and 1.

    A priori the weight of a column of unit deviation is normal of deviation `width`.
    """
    mean, scale = columns.mean(0), columns.std(0)
    scale = np.where(scale > 0, scale, 1.0)
    z = np.tile((columns - mean) / scale, (2, 1))
    # a target t is a positive of weight t and a negative of weight 1 - t
    y, weight = np.repeat([1, 0], len(targets)), np.concatenate([targets, 1 - targets])
    fit = LogisticRegression(C=width**2, tol=1e-8, max_iter=1000).fit(z, y, sample_weight=weight)
    weights = fit.coef_[0] / scale
    return weights, float(fit.intercept_[0] - weights @ mean)


def interval(
    draws: Float[np.ndarray, "S B"], level: float = 0.9
) -> tuple[Float[np.ndarray, " B"], Float[np.ndarray, " B"]]:
    """Equal-tailed interval of each slide's P(y = 1 | u) over S draws of u; by default 5-95 %.

    >>> interval(np.linspace(0, 1, 201)[:, None])
    (array([0.05]), array([0.95]))
    """
    low, high = np.quantile(draws, tails(level), axis=0)
    return low, high


LEVEL_PRIOR = 2.0  # deviation of the level of the log odds before any slide is seen


def level_information(
    probability: Float[np.ndarray, " B"], rows: Float[np.ndarray, " units"]
) -> float:
    """What slides not seen tell of the level of the log odds: sum of p (1 - p), as a logistic
    regression with a free intercept has it, less where patients have several of the `rows`.

    >>> level_information(np.array([0.5, 0.5, 0.9]), np.ones(3))
    0.59
    """
    p = np.asarray(probability, dtype=float)
    return float((p * (1 - p)).sum() * independent(rows) / len(p))


def level_deviation(information: float) -> float:
    """Of the level of the log odds, given what slides tell of it."""
    return float((LEVEL_PRIOR**-2 + information) ** -0.5)


def widened(
    ends: Float[np.ndarray, "B 2"], point: Float[np.ndarray, " B"], half: float
) -> Float[np.ndarray, "B 2"]:
    """Intervals of log odds about a point, to which something independent of this half width adds.

    >>> widened(np.array([[-3.0, 3.0], [1.0, 1.0], [2.0, 5.0]]), np.array([0.0, 1.0, 1.0]), 3.0)
    array([[-4.24264069,  4.24264069],
           [-2.        ,  4.        ],
           [-2.        ,  6.        ]])
    """
    away = np.maximum((ends - point[:, None]) * (-1.0, 1.0), 0.0)  # the point lies within
    # half widths of independent normal variables add up in squares
    return point[:, None] + np.hypot(away, half) * (-1.0, 1.0)


def tails(level: float) -> tuple[float, float]:
    """The two quantiles between which an equal-tailed interval lies.

    >>> tails(0.5)
    (0.25, 0.75)
    """
    check_share(level, "level")
    return (1 - level) / 2, (1 + level) / 2
