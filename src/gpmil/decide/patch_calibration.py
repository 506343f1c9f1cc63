"""Patch probabilities that mean what they say, once some patches are labelled.

The labels of patches come from positive slides; patches of negative slides are negative. Both are
scored by models that have not seen the slide, and

    P(h = 1 | score s) = Phi(a + b s)

has a and b from them: the model's own Phi(s) is a = 0, b = 1, around which the prior lies, so that
a handful of labels moves it little.

A patch is positive only in a positive slide, P(h) = P(h | y = 1) P(y = 1). The patches imply a
probability of their slide, which is not what the model says of it in the end (that is averaged with
the model before it was taught, and calibrated): so P(h | y = 1) is taken from the patches, and
P(y = 1) as said.

Labels must not be chosen by what they are, given the score: who clicks on the clearest tumours
alone makes everything look like tumour. Suggested and random clicks are good.
"""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Float, Int
from scipy.optimize import minimize
from scipy.special import log_ndtr, ndtr

NEEDED = 10  # labelled patches of positive slides
INTERCEPT, SLOPE = 1.0, 0.5  # deviations of a and of log b before any label is seen


@dataclass(frozen=True)
class PatchCalibrator:
    """From the score of a patch to P(h = 1)."""

    intercept: float
    slope: float

    @classmethod
    def fit(
        cls,
        scores: Float[np.ndarray, " n"],
        labels: Int[np.ndarray, " n"],
        weights: Float[np.ndarray, " n"],
    ) -> "PatchCalibrator":
        """The likeliest numbers, given out-of-fold scores of patches whose label is known.

        >>> s = np.linspace(-4, 2, 60)
        >>> found = PatchCalibrator.fit(s, (s > -1).astype(int), np.ones(60))
        >>> bool(abs(found.predict(np.array([-1.0]))[0] - 0.5) < 0.1)
        True
        """
        side = np.where(labels == 1, 1.0, -1.0)

        def loss(at: np.ndarray) -> tuple[float, np.ndarray]:
            a, log_b = at
            b = np.exp(log_b)
            t = side * (a + b * scores)
            # d log Phi(t) / dt = phi(t) / Phi(t)
            d = weights * side * np.exp(-(t**2) / 2 - log_ndtr(t)) / np.sqrt(2 * np.pi)
            prior = a**2 / (2 * INTERCEPT**2) + log_b**2 / (2 * SLOPE**2)
            slope = a / INTERCEPT**2 - d.sum(), log_b / SLOPE**2 - (d * b * scores).sum()
            return float(prior - (weights * log_ndtr(t)).sum()), np.array(slope)

        a, log_b = minimize(loss, np.zeros(2), jac=True, method="L-BFGS-B", bounds=[(-9, 9)] * 2).x
        return cls(float(a), float(np.exp(log_b)))

    def __str__(self) -> str:
        return (
            "patches are calibrated by labelled ones that the models had not seen, "
            f"Phi({self.intercept:.2g} + {self.slope:.2g} s) where the model's own is Phi(s)"
        )

    def predict(self, scores: Float[np.ndarray, " n"]) -> Float[np.ndarray, " n"]:
        """P(h = 1 | score)."""
        return ndtr(self.intercept + self.slope * scores)

    def in_slides(
        self,
        scores: Float[np.ndarray, " n"],
        implied: Float[np.ndarray, " n"],
        said: Float[np.ndarray, " n"],
    ) -> Float[np.ndarray, " n"]:
        """P(h = 1), given P(y = 1) of its slide as the patches imply it and as it is said."""
        # P(h | y = 1) = P(h) / P(y = 1)
        p = self.predict(scores)
        within = np.divide(p, implied, out=np.ones_like(p), where=implied > p)
        return within * said


def calibrated(
    scores: Float[np.ndarray, " n"], known: Int[np.ndarray, " n"], positive: Bool[np.ndarray, " n"]
) -> PatchCalibrator | None:
    """From out-of-fold scores of a cohort, labels (-1: not known) and the classes of the slides.

    Labelled patches stand for all patches of positive slides, so those of negative slides have
    together the weight that fits. None where too few are labelled.
    """
    labelled = positive & (known >= 0)
    n, share = int(labelled.sum()), float(positive.mean())
    if n < NEEDED:
        return None
    weights = np.where(labelled, 1.0, n * (1 - share) / share / max(int((~positive).sum()), 1))
    used = labelled | ~positive
    labels = np.where(labelled, known, 0)
    return PatchCalibrator.fit(scores[used], labels[used], weights[used])
