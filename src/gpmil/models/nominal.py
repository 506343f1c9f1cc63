"""NominalMIL: slides that are negative or have one of several types of lesion, in no order.

One process says whether a slide is positive, as VGPMILPRI does, and one process per type whether
that type occurs, one type against the rest, on the same features, inducing points and settings.
Types are independent before the label is known, and a positive slide has exactly one of them:

    P(c occurs, and no other) = (1 - Q_c) prod_{j != c} Q_j,    Q_c = P(no patch is of type c),
    P(Y = c) = P(positive) o_c / sum_j o_j,    o_c = (1 - Q_c) / Q_c.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from jaxtyping import Float
from scipy.special import log_ndtr, log_softmax

from gpmil.data import types
from gpmil.data.grades import Graded
from gpmil.models import saved_checks
from gpmil.models.base import InstancePredictions, log_odds
from gpmil.models.class_instances import ClassInstances
from gpmil.models.cross_fit import Marks
from gpmil.models.saved import Arrays, Card
from gpmil.models.saved_checks import Array, Damaged, Symbols
from gpmil.models.several import with_counts
from gpmil.models.several_gp import SeveralGP
from gpmil.models.sparse import TrainingCohort
from gpmil.models.vgpmil_pr import VGPMILPRI


class TypedGP(SeveralGP):
    """A model of a negative class and some types: how it is fitted, and what it says."""

    ARRAYS: ClassVar[dict[str, Array]] = with_counts(VGPMILPRI.ARRAYS)

    types_: list[VGPMILPRI]  # one per type; none where there is one type only
    classes: Any

    # --- Fit ----------------------------------------------------------------------------------

    def _finish(self, cohort: TrainingCohort, device: torch.device) -> None:
        """A model per type, where there are several."""
        kinds = range(1, len(self.classes_)) if len(self.classes_) > 2 else ()
        self.types_ = [self._of_type() for _ in kinds]
        for k, model in zip(kinds, self.types_):
            model._fit_to(cohort, (self._codes == k).astype(np.int64), device)

    def _of_type(self) -> VGPMILPRI:
        """A model of one type against the rest, with what this one has learned."""
        settings = self.with_settings_fixed().get_params(deep=False)
        del settings["classes"]
        settings |= {"inducing": self.inducing_points_, "verbose": False}
        made = VGPMILPRI(**settings)
        made.learns_range = False  # novelty and intervals are asked of the model itself
        return made

    def with_settings_fixed(self) -> VGPMILPRI:
        """A new model of "positive or not", labels 0 and 1, at the settings learned here."""
        return super().with_settings_fixed().set_params(classes=None)

    def check_named_classes(self) -> None:
        """Insist on different names, the negative class first."""
        types.check_names(self.classes)

    def _encoded(self, values: Any, names: np.ndarray) -> Graded:
        return types.encode(values, self.classes, names)

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

    def _marked(self, found: InstancePredictions, marks: Marks) -> InstancePredictions:
        given = np.ones((len(found), 1))
        if self.types_:
            each = [model.predict_instances(found.bags) for model in self.types_]
            t = np.stack([one.mean / one.std for one in each], axis=1)
            given = np.exp(log_softmax(log_ndtr(t) - log_ndtr(-t), axis=1))
        p = np.column_stack([1 - found.probability, found.probability[:, None] * given])
        return super()._marked(ClassInstances.of(found, p, self.classes_), marks)

    # --- Settings, and a folder ---------------------------------------------------------------

    def _check_settings(self) -> None:
        super()._check_settings()
        if self.classes is not None:
            self.check_named_classes()

    def _saved_besides(self) -> tuple[Arrays, Card]:
        arrays, card = super()._saved_besides()
        card["types"] = []
        for k, model in enumerate(self.types_):
            own, own_card = model._saved()
            arrays |= {f"type{k}.{name}": a for name, a in own.items()}
            card["types"].append(own_card)
        return arrays, card

    def _restore(self, arrays: Arrays, card: Card, sizes: Symbols) -> None:
        super()._restore(arrays, card, sizes)
        cards, n = saved_checks.listing(card, "types"), len(self.class_counts_)
        saved_checks.check_same("types", len(cards), 0 if n == 2 else n - 1)
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
