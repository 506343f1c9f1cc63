"""NominalMIL: slides that are negative or have one of several types of lesion, in no order.

One process says whether a slide is positive, as VGPMILPRI does, and one process per type whether
that type occurs, one type against the rest, on the same features, inducing points and settings.
Types are independent before the label is known, and a positive slide has exactly one of them:

    P(c occurs, and no other) = (1 - Q_c) prod_{j != c} Q_j,    Q_c = P(no patch is of type c),
    P(Y = c) = P(positive) o_c / sum_j o_j,    o_c = (1 - Q_c) / Q_c.
"""

from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar

import numpy as np
import pandas as pd
from jaxtyping import Float, Int
from scipy.special import log_ndtr, log_softmax

from gpmil.data import types
from gpmil.data.bags import Bags
from gpmil.data.classes import text
from gpmil.data.grades import Graded
from gpmil.files.persistence import ARRAYS as FILE
from gpmil.models import saved_checks
from gpmil.models.base import (
    InstancePredictions,
    Predictions,
    check_bags,
    cohort_card,
    log_odds,
)
from gpmil.models.cross_fit import Marks
from gpmil.models.saved import Arrays, Card
from gpmil.models.saved_checks import Array, Damaged, Symbols
from gpmil.models.vgpmil_pr import VGPMILPRI


@dataclass(frozen=True)
class TypedInstances(InstancePredictions):
    """As `InstancePredictions`, `probability` that of any type; `class_probability` of each."""

    class_probability: Float[np.ndarray, "N K"] | None = None
    classes: np.ndarray | None = None  # (K,), the names of the columns

    @classmethod
    def of(
        cls, found: InstancePredictions, given: Float[np.ndarray, "N k"], classes: np.ndarray
    ) -> "TypedInstances":
        """From P(type | positive) of every instance."""
        known = {field.name: getattr(found, field.name) for field in fields(found)}
        p = np.column_stack([1 - found.probability, found.probability[:, None] * given])
        return cls(**known, class_probability=p, classes=classes)

    def split(self) -> list[InstancePredictions]:
        """One per bag."""
        assert self.class_probability is not None
        own = np.split(self.class_probability, self.bags.offsets[1:-1])
        names = [field.name for field in fields(InstancePredictions)]
        return [
            TypedInstances(
                **{name: getattr(part, name) for name in names},
                class_probability=p,
                classes=self.classes,
            )
            for part, p in zip(super().split(), own, strict=True)
        ]

    def to_frame(self) -> pd.DataFrame:
        """With a column per class, "P(class)"."""
        assert self.class_probability is not None and self.classes is not None
        columns = {f"P({c})": p for c, p in zip(self.classes, self.class_probability.T)}
        return super().to_frame().assign(**columns)


class TypedGP(VGPMILPRI):
    """A model of a negative class and some types: how it is fitted, and what it says."""

    ARRAYS: ClassVar[dict[str, Array]] = {
        **{name: kind for name, kind in VGPMILPRI.ARRAYS.items() if name != "classes_"},
        "class_counts_": Array(("classes",), "whole"),
    }

    class_counts_: Int[np.ndarray, " K"]  # training bags of every class
    types_: list[VGPMILPRI]  # one per type; none where there is one type only
    classes: Any
    _codes: Int[np.ndarray, " B"]  # classes of the bags of a fit, while it runs

    # --- Fit ----------------------------------------------------------------------------------

    def fit(self, bags, y=None, *, client=None, group=None):
        """Fit to bags of several classes; y, a class per bag, wins over `bags.labels`."""
        if client is not None or group is not None:
            raise ValueError(
                f"{type(self).__name__} needs all bags in one place: fit with neither client nor "
                "group."
            )
        return super().fit(bags, y)

    def _fit(self, bags: Bags, y) -> None:
        super()._fit(bags, y)
        codes, kinds = self._codes, range(1, len(self.classes_))
        del self._codes
        self.types_ = []
        if len(kinds) > 1:
            for k in kinds:
                self.types_.append(self._of_type())
                self.types_[-1].fit(bags, (codes == k).astype(np.int64))

    def _of_type(self) -> VGPMILPRI:
        """A model of one type against the rest, with what this one has learned."""
        settings = self.with_settings_fixed().get_params(deep=False)
        del settings["classes"]
        settings |= {"inducing": self.inducing_points_, "verbose": False}
        made = VGPMILPRI(**settings)
        made.learns_range = False  # what is novel is asked of the model itself
        return made

    def with_settings_fixed(self) -> VGPMILPRI:
        """A new model of "positive or not", labels 0 and 1, at the settings learned here."""
        return super().with_settings_fixed().set_params(classes=None)

    def _coded(self, bags: Any, y: Any) -> Graded:
        values = bags.labels if y is None else y
        return types.encode(values, self.classes, np.asarray(bags.names))

    def _remember_cohort(self, bags: Any, y: Any) -> Int[np.ndarray, " B"]:
        """Classes as codes; what a binary model sees of them."""
        if not len(bags):
            raise ValueError("no bags to fit: the cohort, or this part of it, is empty.")
        found = self._coded(bags, y)
        self._codes, self.classes_, self.class_counts_ = found.codes, found.classes, found.counts
        labels = (found.codes > 0).astype(np.int64)
        self.n_features_in_, self.cohort_ = bags.n_features, cohort_card(bags, labels)
        return labels

    def _fitted_problem(self, bags, y):
        codes = self._coded(self._check_predictable(bags), y).codes
        return super()._fitted_problem(bags, (codes > 0).astype(np.int64))

    def update(self, bags, y=None, *, cross_fit=True):
        """Refused: labels of patches name no type."""
        raise ValueError(
            f"{type(self).__name__} knows instance_labels='ignore' alone: labels of patches teach "
            "VGPMILPRI, fitted to 'positive or not'."
        )

    # --- Predictions --------------------------------------------------------------------------

    def _given_positive(self, bags) -> Float[np.ndarray, "B k"]:
        """P(Y = c | positive) of every bag and type."""
        if not self.types_:
            return np.ones((len(bags), 1))
        odds = [log_odds(model.log_proba_negative(bags)[0]) for model in self.types_]
        return np.exp(log_softmax(np.stack(odds, axis=1), axis=1))

    def predict_proba(self, bags) -> Float[np.ndarray, "B K"]:
        """P(Y = c) of each bag and class, the negative one first; rows sum to 1."""
        two = super().predict_proba(bags)
        return np.column_stack([two[:, 0], two[:, 1:] * self._given_positive(bags)])

    def predict_all(self, bags, **options: Any) -> Predictions:
        """As of two classes, `proba` that of "positive or not"; `grade_proba` has all."""
        found = super().predict_all(bags, **options)
        p = np.column_stack([found.proba[:, 0], found.proba[:, 1:] * self._given_positive(bags)])
        return replace(found, grade_proba=p)

    def predict(self, bags) -> np.ndarray:
        """The likeliest class of each bag, as a value of `classes_`; of two as `VGPMILPRI`."""
        if len(self.classes_) == 2:
            return super().predict(bags)
        return self.classes_[self.predict_proba(bags).argmax(1)]

    def score(self, bags, y=None) -> float:
        """Accuracy over bags."""
        known = self.classes_[self._coded(check_bags(bags), y).codes]
        return float(np.mean(known == self.predict(bags)))

    def _marked(self, found: InstancePredictions, marks: Marks) -> InstancePredictions:
        given = np.ones((len(found), 1))
        if self.types_:
            each = [model.predict_instances(found.bags) for model in self.types_]
            t = np.stack([one.mean / one.std for one in each], axis=1)
            given = np.exp(log_softmax(log_ndtr(t) - log_ndtr(-t), axis=1))
        return super()._marked(TypedInstances.of(found, given, self.classes_), marks)

    # --- Settings, and a folder ---------------------------------------------------------------

    def _check_settings(self) -> None:
        super()._check_settings()
        if self.classes is not None:
            types.check_names(self.classes)
        if self.instance_labels != "ignore":
            raise ValueError(
                f"{type(self).__name__} knows instance_labels='ignore' alone, got "
                f"{self.instance_labels!r}: leave it out, or fit VGPMILPRI to 'positive or not'."
            )

    def _saved_besides(self) -> tuple[Arrays, Card]:
        arrays, card = super()._saved_besides()
        card["types"] = []
        for k, model in enumerate(self.types_):
            own, own_card = model._saved()
            arrays |= {f"type{k}.{name}": a for name, a in own.items()}
            card["types"].append(own_card)
        return arrays, card

    def _restore(self, arrays: Arrays, card: Card, sizes: Symbols) -> None:
        counts = self.class_counts_
        if len(counts) < 2 or (counts < 0).any():
            raise Damaged(f"{FILE}: class_counts_: expected counts of two classes or more")
        if self.classes is not None and len(self.classes) != len(counts):
            raise Damaged(f"{FILE}: class_counts_: expected {len(self.classes)}, as settings say")
        names = None if self.classes is None else [str(text(c)) for c in self.classes]
        self.classes_ = np.arange(len(counts)) if names is None else np.array(names)
        super()._restore(arrays, card, sizes)
        cards = saved_checks.listing(card, "types")
        saved_checks.check_same("types", len(cards), 0 if len(counts) == 2 else len(counts) - 1)
        self.types_ = [self._type(arrays, own, k) for k, own in enumerate(cards)]

    def _type(self, arrays: Arrays, card: Card, k: int) -> VGPMILPRI:
        prefix, kernel = f"type{k}.", None if isinstance(self.kernel, str) else self.kernel
        own = {k.removeprefix(prefix): a for k, a in arrays.items() if k.startswith(prefix)}
        try:
            found = VGPMILPRI._from_saved(own, card, kernel)
        except Damaged as error:
            raise Damaged(f"type {k}: {error}") from error
        if found.n_features_in_ != self.n_features_in_:
            raise Damaged(f"type {k}: expected {self.n_features_in_} features")
        return found


@dataclass(kw_only=True, eq=False, repr=False)
class NominalMIL(TypedGP):
    """Gaussian-process MIL for several types of lesion in no order, and slides without any.

    Parameters
    ----------
    classes : list of names, the negative class first, or None
        The negative class and the types; None: the labels are 0 (negative), 1, ..., K - 1.
    **others
        As `VGPMILPRI`, without labels of patches. Settings that are "auto" are learned from
        "positive or not", and shared by the process of every type. `calibrated`, `flags` and `aim`
        are about "positive or not" as well.

    Examples
    --------
    >>> import numpy as np, gpmil
    >>> rng = np.random.default_rng(0)
    >>> y = np.arange(24) % 3
    >>> shift = np.array([[0, 0], [4, 0], [0, 4]])
    >>> x = [rng.normal(size=(6, 2)) + shift[k] * (np.arange(6) < 2)[:, None] for k in y]
    >>> settings = {"variance": 20, "lengthscale": 2, "mean": -3, "slide_effect": 0}
    >>> model = gpmil.NominalMIL(**settings, n_inducing=20, random_state=0)
    >>> bags = gpmil.Bags.from_arrays(x, graph=None)
    >>> p = model.fit(bags, y).predict_proba(bags)
    >>> p.shape, bool(np.allclose(p.sum(axis=1), 1)), model.score(bags, y) > 0.9
    ((24, 3), True, True)
    """

    classes: Any = None
