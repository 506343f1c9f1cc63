"""What every model of more than two classes shares: one class per bag in, a probability each out.

The first class is the negative one: for everything that is about two classes (marks, novelty, maps
of suspicion) a bag of any other class is positive.
"""

from dataclasses import replace
from typing import Any, ClassVar

import numpy as np
from jaxtyping import Float, Int

from gpmil.data.grades import FEWEST, Graded, classes_of
from gpmil.distributed import Facts
from gpmil.files.persistence import ARRAYS as FILE
from gpmil.models.base import BagClassifier, Predictions, check_bags, cohort_card
from gpmil.models.saved_checks import Array, Damaged, Expected


def with_counts(arrays: Expected) -> Expected:
    """What such a model keeps: its classes are the settings'."""
    rest = {name: kind for name, kind in arrays.items() if name != "classes_"}
    return rest | {"class_counts_": Array(("classes",), "whole")}


class SeveralClasses(BagClassifier):
    """A model of a negative class and some others, in an order or not."""

    WORD: ClassVar[str] = "classes"  # the setting that names them

    class_counts_: Int[np.ndarray, " K"]  # training bags of every class
    _codes: Int[np.ndarray, " B"]  # classes of the bags of a fit, while it runs

    @property
    def named_classes(self) -> Any:
        """The classes as settings name them, the negative one first; None: 0, 1, ..."""
        return getattr(self, self.WORD)

    def check_named_classes(self) -> None:
        """Insist on different names, as many as the model can have."""
        raise NotImplementedError

    def _encoded(self, values: Any, names: np.ndarray) -> Graded:
        raise NotImplementedError

    def _coded(self, bags: Any, y: Any) -> Graded:
        return self._encoded(bags.labels if y is None else y, np.asarray(bags.names))

    def _remember_cohort(self, bags: Any | Facts, y: Any) -> Int[np.ndarray, " B"]:
        """Classes as codes; what a binary model would see of them, 1 beyond the first."""
        if not len(bags):
            raise ValueError("no bags to fit: the cohort, or this part of it, is empty.")
        found = self._coded(bags, y)
        self._codes, self.classes_, self.class_counts_ = found.codes, found.classes, found.counts
        self._check_classes(len(found.classes))
        labels = (found.codes > 0).astype(np.int64)
        self.n_features_in_, self.cohort_ = bags.n_features, cohort_card(bags, labels)
        return labels

    def _check_classes(self, n_classes: int) -> None:
        """What depends on the number of classes."""

    # --- Predictions --------------------------------------------------------------------------

    def decided(self, p: Float[np.ndarray, "B K"]) -> Int[np.ndarray, " B"]:
        """The classes, as numbers, that `predict` calls where P(Y = k) are p: the likeliest."""
        return p.argmax(1)

    def predict(self, bags) -> np.ndarray:
        """The class of each bag, as a value of `classes_`; of two as a binary model has it."""
        if len(self.classes_) == 2:
            return super().predict(bags)
        return self.classes_[self.decided(self.predict_proba(bags))]

    def predict_all(self, bags, **options: Any) -> Predictions:
        """As of two classes, `proba` that of "any but the first"; `class_proba` has all."""
        found = super().predict_all(bags, **options)
        return replace(found, class_proba=self.predict_proba(bags))

    def score(self, bags, y=None) -> float:
        """Accuracy over bags."""
        known = self.classes_[self._coded(check_bags(bags), y).codes]
        return float(np.mean(known == self.predict(bags)))

    # --- A folder -----------------------------------------------------------------------------

    def _restore_classes(self) -> None:
        """The classes of a saved model, from its settings."""
        counts, named = self.class_counts_, self.named_classes
        if len(counts) < FEWEST or (counts < 0).any():
            raise Damaged(f"{FILE}: class_counts_: expected counts of two {self.WORD} or more")
        if named is not None and len(named) != len(counts):
            raise Damaged(f"{FILE}: class_counts_: expected {len(named)}, as settings say")
        self.classes_ = classes_of(named, len(counts))

    def __sklearn_tags__(self):
        tags = super().__sklearn_tags__()
        tags.classifier_tags.multi_class = True
        return tags
