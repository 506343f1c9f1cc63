"""What a model of grades says of every instance: a probability per grade, and what to expect."""

from dataclasses import dataclass, fields

import numpy as np
import pandas as pd
from jaxtyping import Float
from scipy.special import log_ndtr

from gpmil.models.base import InstancePredictions


@dataclass(frozen=True)
class GradedInstances(InstancePredictions):
    """As `InstancePredictions`, `probability` that of any grade above the lowest; and all grades.

    `grade_probability` are P(grade_i = k), `expected_grade` is sum_k k P(grade_i = k).
    """

    grade_probability: Float[np.ndarray, "N K"] | None = None
    grades: np.ndarray | None = None  # (K,), the names of the columns

    @classmethod
    def of(
        cls, found: InstancePredictions, cuts: Float[np.ndarray, " k"], grades: np.ndarray
    ) -> "GradedInstances":
        """From mean and deviation of m_i: P(b_k < m_i < b_k+1)."""
        known = {field.name: getattr(found, field.name) for field in fields(found)}
        t = (cuts - found.mean[:, None]) / found.std[:, None]
        known |= {"grade_probability": interval_probability(t), "grades": grades}
        return cls(**known)

    @property
    def expected_grade(self) -> Float[np.ndarray, " N"]:
        """From 0, the lowest grade, to K - 1."""
        assert self.grade_probability is not None
        return self.grade_probability @ np.arange(self.grade_probability.shape[1])

    def split(self) -> list[InstancePredictions]:
        """One per bag."""
        assert self.grade_probability is not None
        own = np.split(self.grade_probability, self.bags.offsets[1:-1])
        names = [field.name for field in fields(InstancePredictions)]
        return [
            GradedInstances(
                **{name: getattr(part, name) for name in names},
                grade_probability=p,
                grades=self.grades,
            )
            for part, p in zip(super().split(), own, strict=True)
        ]

    def to_frame(self) -> pd.DataFrame:
        """With a column per grade, "P(grade)", and "expected_grade"."""
        assert self.grade_probability is not None and self.grades is not None
        columns = {f"P({g})": p for g, p in zip(self.grades, self.grade_probability.T)}
        return super().to_frame().assign(**columns, expected_grade=self.expected_grade)


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
