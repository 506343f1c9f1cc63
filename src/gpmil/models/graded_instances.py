"""What a model of grades says of every instance: a probability per grade, and what to expect."""

from dataclasses import dataclass

import numpy as np
import pandas as pd
from jaxtyping import Float
from scipy.special import log_ndtr

from gpmil.models.base import InstancePredictions
from gpmil.models.class_instances import ClassInstances


@dataclass(frozen=True)
class GradedInstances(ClassInstances):
    """As `InstancePredictions`, `probability` that of any grade above the lowest; and all grades.

    `grade_probability` are P(grade_i = k), `expected_grade` is sum_k k P(grade_i = k).
    """

    @classmethod
    def cut(
        cls, found: InstancePredictions, cuts: Float[np.ndarray, " k"], grades: np.ndarray
    ) -> "GradedInstances":
        """From mean and deviation of m_i: P(b_k < m_i < b_k+1)."""
        t = (cuts - found.mean[:, None]) / found.std[:, None]
        return cls.of(found, interval_probability(t), grades)

    @property
    def grade_probability(self) -> Float[np.ndarray, "N K"]:
        """P(grade_i = k), in the order of the grades."""
        assert self.class_probability is not None
        return self.class_probability

    @property
    def expected_grade(self) -> Float[np.ndarray, " N"]:
        """From 0, the lowest grade, to K - 1."""
        return self.grade_probability @ np.arange(self.grade_probability.shape[1])

    def to_frame(self) -> pd.DataFrame:
        """With a column per grade, "P(grade)", and "expected_grade"."""
        return super().to_frame().assign(expected_grade=self.expected_grade)


def interval_probability(t: Float[np.ndarray, "N k"]) -> Float[np.ndarray, "N K"]:
    """Phi(t_1), Phi(t_2) - Phi(t_1), ..., 1 - Phi(t_k), of rising t; digits kept in both tails.

    >>> interval_probability(np.array([[-40.0, -39.0, 39.0]])).round(3)
    array([[0., 0., 1., 0.]])
    """
    end = np.full((len(t), 1), np.inf)
    low, high = np.hstack([-end, t]), np.hstack([t, end])
    # on the right of zero the same interval on the left
    turned = low > -high
    low, high = np.where(turned, -high, low), np.where(turned, -low, high)
    log_high, log_low = log_ndtr(high), log_ndtr(low)
    return np.exp(log_high) * -np.expm1(np.minimum(log_low - log_high, 0.0))
