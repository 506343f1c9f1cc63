"""Slides to accept and slides to refer, with a bound on the error among the accepted ones.

`ReferRule`: with probability 1 - delta the error among accepted slides is at most alpha. The slides
(or patients) must be independent draws of what comes later, and a slide's chance of being wrong
must not rise with its confidence. Probabilities come in *out-of-fold*, as in `decide.marks`.
"""

import math
from dataclasses import dataclass
from logging import getLogger

import numpy as np
from jaxtyping import Bool, Float, Int, Shaped
from scipy.stats import beta, binom

from gpmil.data.checks import count
from gpmil.data.folds import check_groups, codes, zero_one
from gpmil.decide.checks import ROUNDING, check_share, check_within

logger = getLogger("gpmil")


def slides_needed(alpha: float, delta: float = 0.1) -> int:
    """The fewest slides, all of them right, that show an error of at most alpha.

    >>> slides_needed(0.05), slides_needed(0.1), slides_needed(0.01, delta=0.05)
    (45, 22, 299)
    """
    check_share(alpha, "alpha")
    check_share(delta, "delta")
    # (1 - alpha)^n <= delta
    return math.ceil(math.log(delta) / math.log1p(-alpha) * (1 - ROUNDING))


@dataclass(frozen=True)
class ReferRule:
    """Accept a slide if its confidence max(p, 1 - p) reaches a threshold, refer it otherwise.

    With probability 1 - delta over cohorts the error among accepted slides is at most alpha,
    although the threshold is chosen on the same cohort: thresholds are tested from the strictest
    on, and the first that fails ends the walk (fixed-sequence testing). Too loose a threshold is
    kept only if the first too loose one passes its test, which has probability delta at most.
    Which thresholds are tested depends on no label.

    With groups the unit is the patient: counted once any slide of it is accepted, and as an error
    once any accepted slide of it is wrong. At most alpha of such *patients* are errors. That bounds
    the error among slides too, unless patients with more slides are wrong more often.

    The test is exact if units are independent and a unit's chance of being wrong does not rise with
    its confidence. It is about out-of-fold predictions: the final model has seen more bags.
    """

    alpha: float
    delta: float
    threshold: float | None  # None: nothing is accepted
    accepted: int  # slides (patients) of the cohort at that threshold
    errors: int  # wrong ones among them
    total: int  # slides (patients) of the cohort
    unit: str = "slide"

    @classmethod
    def fit(
        cls,
        probability: Float[np.ndarray, " B"],
        labels: Int[np.ndarray, " B"],
        alpha: float,
        delta: float = 0.1,
        groups: Shaped[np.ndarray, " B"] | None = None,
    ) -> "ReferRule":
        """From out-of-fold P(y = 1) and the labels of the same slides."""
        check_share(alpha, "alpha")
        check_share(delta, "delta")
        wrong = (probability > 0.5) != (zero_one(labels, len(probability)) == 1)
        conf = confidence(probability)
        check_groups(groups, len(wrong))
        patient = np.arange(len(wrong)) if groups is None else codes(groups)
        # a patient is in once its surest slide is, and an error once its surest wrong slide is
        enters = _highest(conf, patient)
        errs = _highest(np.where(wrong, conf, -np.inf), patient)
        allowed = _allowed_errors(len(enters), alpha, delta)
        kept: tuple[float | None, int, int] = (None, 0, 0)
        for t in _thresholds(enters, allowed, conf.min(initial=1.0)):
            n, errors = int((enters >= t).sum()), int((errs >= t).sum())
            if errors > allowed[n]:
                break
            kept = (t, n, errors)
        unit = "slide" if groups is None else "patient"
        rule = cls(alpha, delta, *kept, total=len(enters), unit=unit)
        if rule.threshold is None:
            logger.warning("%s", rule)
        return rule

    def decide(
        self, probability: Float[np.ndarray, " B"], novelty: Float[np.ndarray, " B"] | None = None
    ) -> Bool[np.ndarray, " B"]:
        """True: accept the likelier class. False: refer the slide to somebody.

        A slide whose novelty is above 1 lies beyond the training range and is never accepted,
        however sure the model is; the bound on the error says nothing of such slides. Where
        novelty is not known (nan) confidence alone decides.
        """
        conf = confidence(probability)
        if self.threshold is None:
            return np.zeros(len(conf), dtype=bool)
        beyond = np.zeros(len(conf), dtype=bool) if novelty is None else np.asarray(novelty) > 1
        return (conf >= self.threshold) & ~beyond

    @property
    def needed(self) -> int:
        """The fewest slides (patients), all of them right, that allow to accept any."""
        return slides_needed(self.alpha, self.delta)

    @property
    def bound(self) -> float:
        """Clopper-Pearson upper limit, at level 1 - delta, of the error among accepted slides."""
        if self.errors == self.accepted:
            return 1.0
        # P(Binomial(n, bound) <= e) = delta
        return float(beta.ppf(1 - self.delta, self.errors + 1, self.accepted - self.errors))

    def __str__(self) -> str:
        units = count(self.total, self.unit)
        if self.threshold is not None:
            return (
                f"accept at confidence {self.threshold:.4f} or more: {self.accepted:,} of {units}, "
                f"{self.errors} wrong; error at most {self.bound:.3f} <= {self.alpha:g} with "
                f"probability {1 - self.delta:g}"
            )
        why = "there are fewer" if self.total < self.needed else "among the surest some are wrong"
        return (
            f"no slide can be accepted: an error of at most {self.alpha:g} with probability "
            f"{1 - self.delta:g} takes {count(self.needed, self.unit)} that are all right, found "
            f"{units} ({why}). Add slides, or allow a larger alpha or delta."
        )


def confidence(probability: Float[np.ndarray, " B"]) -> Float[np.ndarray, " B"]:
    """max(p, 1 - p), of the likelier class."""
    p = np.asarray(probability, dtype=float)
    check_within(p, "probability: expected numbers from 0 to 1")
    return np.maximum(p, 1 - p)


def _allowed_errors(n: int, alpha: float, delta: float) -> Int[np.ndarray, " sizes"]:
    """The most errors among 0, ..., n with an upper limit <= alpha; -1 where not even 0 will do.

    The limit is at most alpha if and only if P(Binomial(n, alpha) <= errors) <= delta.
    """
    first_above = binom.ppf(min(delta * (1 + ROUNDING), 1.0), np.arange(1, n + 1), alpha)
    return np.concatenate([[-1], first_above.astype(np.int64) - 1])


def _thresholds(enters: np.ndarray, allowed: np.ndarray, lowest: float) -> list[float]:
    """Confidences at which one more error is affordable, and the lowest; from the strictest on.

    Any sequence that ignores the labels is valid. This one takes no test that the next slide would
    make easier.
    """
    if allowed[-1] < 0:
        return []
    # allowed rises when the (i + 1)-th patient enters
    i = np.flatnonzero(np.diff(allowed) > 0)
    return [*np.sort(enters)[::-1][i].tolist(), float(lowest)]


def _highest(values: np.ndarray, patient: np.ndarray) -> Float[np.ndarray, " patients"]:
    highest = np.full(patient.max(initial=-1) + 1, -np.inf)
    np.maximum.at(highest, patient, values)
    return highest
