"""What every model of grades shares: grades of bags in, a grade per bag out."""

from dataclasses import replace
from typing import Any

import numpy as np
from jaxtyping import Float, Int

from gpmil.data import grades as grade_labels
from gpmil.data.grades import Graded
from gpmil.decide.grade_metrics import least_cost, most_kappa
from gpmil.files.persistence import ARRAYS as FILE
from gpmil.models.base import (
    BagClassifier,
    Predictions,
    check_bags,
    cohort_card,
    log_odds,
)
from gpmil.models.checks import one_of
from gpmil.models.saved_checks import Array, Damaged, Expected

COSTS = ("quadratic", "kappa", "mode")


def with_grades(arrays: Expected) -> Expected:
    """What a model of grades keeps: its classes are the settings'."""
    rest = {name: kind for name, kind in arrays.items() if name != "classes_"}
    return rest | {"grade_counts_": Array(("grades",), "whole")}


class GradedClassifier(BagClassifier):
    """A model of two to eight grades."""

    grade_counts_: Int[np.ndarray, " K"]  # training bags of every grade
    expected_kappa_: Float[np.ndarray, " 1"] | None = None  # where fits without folds tell
    grades: Any
    cost: Any
    _codes: Int[np.ndarray, " B"]  # grades of the bags of a fit, while it runs

    def _graded(self, bags: Any, y: Any) -> Graded:
        values = bags.labels if y is None else y
        return grade_labels.encode(values, self.grades, np.asarray(bags.names))

    def _remember_cohort(self, bags: Any, y: Any) -> Int[np.ndarray, " B"]:
        """Grades as codes; what a binary model would see of them, 1 above the lowest grade."""
        if not len(bags):
            raise ValueError("no bags to fit: the cohort, or this part of it, is empty.")
        found = self._graded(bags, y)
        self._codes, self.classes_, self.grade_counts_ = found.codes, found.classes, found.counts
        self._check_grades(len(found.classes))
        labels = (found.codes > 0).astype(np.int64)
        self.n_features_in_, self.cohort_ = bags.n_features, cohort_card(bags, labels)
        return labels

    def _check_grades(self, n_grades: int) -> None:
        """What depends on the number of grades."""

    def _check_grade_settings(self) -> None:
        if self.grades is not None:
            grade_labels.check_names(self.grades)
        one_of("cost", self.cost, COSTS)
        if self.cost == "kappa" and not getattr(self, "calibrated", False):
            raise ValueError(
                "cost='kappa' needs to know how well grades of slides that were not seen are "
                "predicted: OrdinalMIL with calibrated=True."
            )

    def predict_all(self, bags, **options: Any) -> Predictions:
        """As of two classes, `proba` that of "above the lowest grade"; `grade_proba` has all."""
        found = super().predict_all(bags, **options)
        return replace(found, grade_proba=self.predict_proba(bags))

    def predict(self, bags) -> np.ndarray:
        """The grade of each bag, as a value of `classes_`; see `cost`."""
        return self.classes_[self.decided(self.predict_proba(bags))]

    def decided(self, p: Float[np.ndarray, "B K"]) -> Int[np.ndarray, " B"]:
        """The grades, as numbers, that `predict` calls where P(Y = k) are p; see `cost`."""
        if self.cost == "mode":
            return p.argmax(1)
        if self.cost == "quadratic" or self.expected_kappa_ is None:
            return least_cost(p)
        shares = self.grade_counts_ / self.grade_counts_.sum()
        return most_kappa(p, shares, float(self.expected_kappa_[0]))

    def score(self, bags, y=None) -> float:
        """Accuracy over bags."""
        known = self.classes_[self._graded(check_bags(bags), y).codes]
        return float(np.mean(known == self.predict(bags)))

    def _restore_grades(self) -> None:
        """The classes of a saved model, from its settings."""
        counts = self.grade_counts_
        if len(counts) < grade_labels.FEWEST or (counts < 0).any():
            raise Damaged(f"{FILE}: grade_counts_: expected counts of two grades or more")
        if self.grades is not None and len(self.grades) != len(counts):
            raise Damaged(f"{FILE}: grade_counts_: expected {len(self.grades)}, as settings say")
        self.classes_ = grade_labels.classes_of(self.grades, len(counts))

    def __sklearn_tags__(self):
        tags = super().__sklearn_tags__()
        tags.classifier_tags.multi_class = True
        return tags


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
