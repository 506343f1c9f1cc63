"""What every model of grades shares: grades of bags in, a grade per bag out."""

from typing import Any, ClassVar

import numpy as np
from jaxtyping import Float, Int

from gpmil.data import grades as grade_labels
from gpmil.data.grades import Graded
from gpmil.decide.grade_metrics import least_cost, most_kappa
from gpmil.models.base import log_odds
from gpmil.models.checks import one_of
from gpmil.models.several import SeveralClasses

COSTS = ("quadratic", "kappa", "mode")


class GradedClassifier(SeveralClasses):
    """A model of two to eight grades."""

    WORD: ClassVar[str] = "grades"

    expected_kappa_: Float[np.ndarray, " 1"] | None = None  # where fits without folds tell
    grades: Any
    cost: Any

    def _encoded(self, values: Any, names: np.ndarray) -> Graded:
        return grade_labels.encode(values, self.grades, names)

    def check_named_classes(self) -> None:
        """Insist on names of two to eight grades."""
        grade_labels.check_names(self.grades)

    def _check_grade_settings(self) -> None:
        if self.grades is not None:
            self.check_named_classes()
        one_of("cost", self.cost, COSTS)
        if self.cost == "kappa" and not getattr(self, "calibrated", False):
            raise ValueError(
                "cost='kappa' needs to know how well grades of slides that were not seen are "
                "predicted: OrdinalMIL with calibrated=True."
            )

    def decided(self, p: Float[np.ndarray, "B K"]) -> Int[np.ndarray, " B"]:
        """The grades, as numbers, that `predict` calls where P(Y = k) are p; see `cost`."""
        if self.cost == "mode":
            return p.argmax(1)
        if self.cost == "quadratic" or self.expected_kappa_ is None:
            return least_cost(p)
        shares = self.class_counts_ / self.class_counts_.sum()
        return most_kappa(p, shares, float(self.expected_kappa_[0]))


def differences(log_p: Float[np.ndarray, "B k"]) -> Float[np.ndarray, "B K"]:
    """P(Y = k) from log P(Y <= 0), ..., log P(Y <= K - 2), rising.

    >>> differences(np.log([[0.5, 0.75]])).round(6)
    array([[0.5 , 0.25, 0.25]])
    """
    ends = np.zeros((len(log_p), 1))
    low, high = np.hstack([ends - np.inf, log_p]), np.hstack([log_p, ends])
    # near one the digits are in 1 - P
    near = (high > -0.5) & (low > -np.inf)
    p = np.where(near, np.expm1(high) - np.expm1(low), np.exp(high) - np.exp(low))
    return np.clip(p, np.finfo(float).tiny, np.nextafter(1.0, 0.0))


def odds_above(log_p: Float[np.ndarray, "B k"]) -> Float[np.ndarray, "B k"]:
    """Log odds of Y >= 1, ..., Y >= K - 1 from log P(Y <= 0), ..., log P(Y <= K - 2)."""
    return log_odds(log_p.ravel()).reshape(log_p.shape)
