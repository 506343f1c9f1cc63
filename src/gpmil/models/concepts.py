"""AllConceptsMIL: a bag is positive if it holds all of several concepts.

The multiple-instance rule says that one positive instance makes a bag positive; "an A and a B" is
beyond it. Here every concept is a model of the rule of its own, and

    P(y_b = 1) = prod_k P(some instance of b holds concept k).

A positive bag holds every concept. A negative one lacks at least one, and which is not known: it is
guessed, the models are fitted, and every negative bag goes to the concept that its instances lack
most probably under fits that have not seen it, until nothing moves.
"""

import logging
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Float, Int
from scipy.special import logsumexp
from sklearn.base import clone
from sklearn.cluster import KMeans

from gpmil.data.bags import Bags
from gpmil.models.base import BagClassifier, InstancePredictions
from gpmil.models.checks import count, generator
from gpmil.models.vgpmil_pr import VGPMILPR

logger = logging.getLogger("gpmil")

LEAST = 2  # negative bags of a concept: fewer cannot be left out one by one


@dataclass(eq=False, repr=False)
class AllConceptsMIL(BagClassifier):
    """Several concepts, all of which a positive bag holds; P(y = 1) is their product.

    Parameters
    ----------
    n_concepts : int
        From 2.
    model : VGPMILPR or VGPMILPRI
        What every concept is fitted with; None is `VGPMILPR()`. What is "auto" is learned for
        every concept at the first guess, and again when negative bags have found their place.
    max_rounds : int
        Most times that negative bags are given to concepts anew.
    random_state : int or None
        Of the first guess: k-means of the means of negative bags.

    Attributes
    ----------
    models_ : the fitted model of every concept
    lacking_ : (B,) the concept that a negative training bag is thought to lack; -1 of positive ones
    n_rounds_ : how often bags were given anew

    Examples
    --------
    >>> import gpmil
    >>> from gpmil.models import AllConceptsMIL
    >>> from gpmil.proof import algorithmic  # "an A and a B" makes a bag positive
    >>> train, test = (algorithmic.draw(3, 60, seed=0, moved=moved) for moved in (False, True))
    >>> given = {"variance": 9.0, "lengthscale": 4.0, "mean": -3.0, "n_inducing": 40}
    >>> one = gpmil.VGPMILPR(**given, random_state=0)
    >>> both = AllConceptsMIL(model=one, random_state=0).fit(train)
    >>> bool(both.score(test) > 0.8), bool(one.fit(train).score(test) < 0.7)
    (True, True)
    """

    n_concepts: Any = 2
    model: Any = None
    max_rounds: Any = 10
    random_state: Any = None
    verbose: Any = False

    def _fit(self, bags: Bags, y) -> None:
        base = self._base()
        labels = self._remember_cohort(bags, y)
        lacking = self._first_guess(bags, labels)
        models = self._fitted([base] * int(self.n_concepts), bags, lacking)
        for n_rounds in range(1, int(self.max_rounds) + 1):
            self.n_rounds_ = n_rounds
            again = self._guessed(models, bags, lacking)
            moved = int((again != lacking).sum())
            logger.info("round %d: %d negative bags lack another concept", n_rounds, moved)
            if not moved:
                break
            lacking = again
            models = self._fitted([m.with_settings_fixed() for m in models], bags, lacking)
        if self.n_rounds_ > 1 and models[0].get_params() != base.get_params():
            models = self._fitted([base] * len(models), bags, lacking)  # settings of the last guess
        self.models_, self.lacking_ = models, lacking

    def _base(self) -> VGPMILPR:
        count("n_concepts", self.n_concepts, least=2)
        count("max_rounds", self.max_rounds, least=1)
        base = VGPMILPR() if self.model is None else self.model
        if not isinstance(base, VGPMILPR):
            raise ValueError(
                f"model must be a VGPMILPR or VGPMILPRI, got {type(base).__name__}: negative bags "
                "are given to concepts by fits that leave them out."
            )
        if base.random_state is None and self.random_state is not None:
            base = clone(base).set_params(random_state=self.random_state)
        return base

    def _first_guess(self, bags: Bags, labels: Int[np.ndarray, " B"]) -> Int[np.ndarray, " B"]:
        """Negative bags in clusters of their means; -1 for positive bags."""
        negative, K = np.flatnonzero(labels == 0), int(self.n_concepts)
        if len(negative) < LEAST * K:
            raise ValueError(
                f"{K} concepts need {LEAST * K} negative bags at least, found {len(negative)}."
            )
        scale = bags.features.std(axis=0, dtype=np.float64)
        sums = np.add.reduceat(bags.features.astype(np.float64), bags.offsets[:-1])
        means = sums / bags.sizes[:, None] / np.where(scale > 0, scale, 1)
        seed = int(generator(self.random_state).integers(2**31))
        found = KMeans(K, n_init=10, random_state=seed).fit(means[negative])
        lacking = np.full(len(labels), -1)
        lacking[negative] = _filled(found.labels_, found.transform(means[negative]))
        return lacking

    def _fitted(
        self, bases: list[VGPMILPR], bags: Bags, lacking: Int[np.ndarray, " B"]
    ) -> list[VGPMILPR]:
        """Concept k from the positive bags, and the negative ones that lack it."""
        found = []
        for k, base in enumerate(bases):
            own = np.flatnonzero((lacking == k) | (lacking == -1))
            found.append(clone(base).fit(bags[own], (lacking[own] == -1).astype(int)))
        return found

    def _guessed(
        self, models: list[VGPMILPR], bags: Bags, lacking: Int[np.ndarray, " B"]
    ) -> Int[np.ndarray, " B"]:
        """The concept that each negative bag lacks most probably, by fits without the bag."""
        absent = np.empty((len(bags), len(models)))
        for k, model in enumerate(models):
            own = np.flatnonzero((lacking == k) | (lacking == -1))
            # log P(no instance holds the concept): of a bag that was in the fit, without it
            absent[:, k] = model.log_proba_negative(bags)[0]
            left_out = model.leave_one_bag_out(bags[own], (lacking[own] == -1).astype(int))
            negative = lacking[own] == k
            absent[own[negative], k] = left_out[negative]
        again = lacking.copy()
        negative = lacking >= 0
        again[negative] = _filled(absent[negative].argmax(axis=1), -absent[negative])
        return again

    # --- Predict ------------------------------------------------------------------------------

    def log_proba_negative(self, bags) -> tuple[Float[np.ndarray, " B"], Float[np.ndarray, " B"]]:
        """log P(some concept is lacking) of each bag, and the largest error of the concepts'."""
        bags = self._check_predictable(bags)
        each = [model.log_proba_negative(bags) for model in self.models_]
        absent = np.stack([log_p for log_p, _ in each])
        # log P(y = 1) = sum_k log(1 - P(k is lacking))
        log_positive = np.log1p(-np.exp(np.minimum(absent, -1e-300))).sum(axis=0)
        with np.errstate(divide="ignore"):
            log_p = np.log(-np.expm1(log_positive))
        # P(y = 0) near 0 is the sum of what is lacking: no digits are lost
        log_p = np.where(log_positive > -1e-8, logsumexp(absent, axis=0), log_p)
        return np.minimum(log_p, 0.0), np.max([error for _, error in each], axis=0)

    def predict_concepts(self, bags) -> list[InstancePredictions]:
        """What the model of every concept says of the instances: P(instance i holds concept k)."""
        bags = self._check_predictable(bags)
        return [model.predict_instances(bags) for model in self.models_]


def _filled(
    choice: Int[np.ndarray, " n"], distance: Float[np.ndarray, "n K"]
) -> Int[np.ndarray, " n"]:
    """The choice, with the LEAST nearest ones given to a concept that has fewer."""
    choice = choice.astype(np.int64)
    for k in range(distance.shape[1]):
        if (choice == k).sum() < LEAST:
            choice[np.argsort(distance[:, k], kind="stable")[:LEAST]] = k
    return choice
