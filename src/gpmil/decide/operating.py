"""Operating points: from which probability on a slide is called positive, for a stated aim.

The threshold is chosen on probabilities of slides that no model in question has seen (left out, or
out of fold), so that what it reaches there is what may be expected of slides like them; it is
stated with exact intervals (`decide.intervals`), patients as units where they are known.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Bool, Float, Int, Shaped
from scipy.special import expit, logit

from gpmil.data.folds import codes, zero_one
from gpmil.decide import intervals
from gpmil.decide.checks import check_within

EQUAL_ODDS = "equal odds"
LEVEL = 0.95  # of the intervals
ADVICE = "expected 'equal odds', 'sensitivity=0.95', 'specificity=0.9' or 'cost=5:1' (FN:FP)"


@dataclass(frozen=True)
class Aim:
    """What a threshold is chosen for."""

    kind: str
    wanted: float = 0.5  # of sensitivity or specificity; for costs FP / (FN + FP)

    @classmethod
    def read(cls, text: Any) -> "Aim":
        """From its words.

        >>> Aim.read("sensitivity=0.95"), Aim.read("cost=4:1")
        (Aim(kind='sensitivity', wanted=0.95), Aim(kind='cost', wanted=0.2))
        """
        if text == EQUAL_ODDS:
            return cls(EQUAL_ODDS)
        kind, _, value = str(text).replace(" ", "").partition("=")
        try:
            if kind in ("sensitivity", "specificity") and 0 < float(value) <= 1:
                return cls(kind, float(value))
            if kind == "cost":
                fn, fp = (float(piece) for piece in value.split(":"))
                if 0 < fn < np.inf and 0 < fp < np.inf:
                    return cls(kind, fp / (fn + fp))
        except ValueError:
            pass
        raise ValueError(f"aim: {ADVICE}, found {text!r}.")

    def threshold(
        self, probability: Float[np.ndarray, " B"], labels: Int[np.ndarray, " B"]
    ) -> float:
        """A slide is positive above it."""
        positive = labels == 1
        if self.kind == EQUAL_ODDS:
            return 0.5
        steps = _between(probability)
        tpr = (probability[positive] > steps[:, None]).mean(1)
        tnr = (probability[~positive] <= steps[:, None]).mean(1)
        if self.kind == "sensitivity":
            return float(steps[tpr >= self.wanted - 1e-12].max())
        if self.kind == "specificity":
            return float(steps[tnr >= self.wanted - 1e-12].min())
        # FN (1 - wanted) + FP wanted, each in slides; of equals the nearest to calibrated costs
        cost = (1 - tpr) * positive.sum() * (1 - self.wanted) + (1 - tnr) * (
            ~positive
        ).sum() * self.wanted
        best = steps[cost <= cost.min() + 1e-9]
        return float(best[np.abs(logit(best) - logit(self.wanted)).argmin()])


def _between(probability: Float[np.ndarray, " B"]) -> Float[np.ndarray, " k"]:
    """Thresholds that tell all slides apart: half way between neighbours, and beyond both ends."""
    odds = np.unique(logit(np.clip(probability, 1e-300, 1 - 1e-16)))
    return expit(np.concatenate([[odds[0] - 1], (odds[1:] + odds[:-1]) / 2, [odds[-1] + 1]]))


@dataclass(frozen=True)
class OperatingPoint:
    """A threshold, what it was chosen for, and what it reaches on slides not seen."""

    aim: str
    threshold: float
    basis: str  # where the probabilities come from
    rates: dict[str, list[float]]  # value, low, high, of how many slides

    @classmethod
    def choose(
        cls,
        aim: str,
        probability: Float[np.ndarray, " B"],
        labels: Int[np.ndarray, " B"],
        basis: str,
        groups: Shaped[np.ndarray, " B"] | None = None,
    ) -> "OperatingPoint":
        """From probabilities of slides left out, and their labels."""
        check_within(probability, "probability: expected numbers from 0 to 1")
        labels = zero_one(labels, len(probability))
        threshold = Aim.read(aim).threshold(probability, labels)
        return cls(aim, threshold, basis, rates(probability > threshold, labels, groups))


def rates(
    called: Bool[np.ndarray, " B"],
    labels: Int[np.ndarray, " B"],
    groups: Shaped[np.ndarray, " B"] | None = None,
    level: float = LEVEL,
) -> dict[str, list[float]]:
    """Sensitivity, specificity and predictive values: value, low, high, of how many slides.

    Intervals are Clopper and Pearson's, for patients of several slides of as many independent
    slides as theirs are worth. What no slide tells (a predictive value where none is called) is
    left out.

    >>> found = rates(np.array([True] * 16 + [False] * 9), np.array([1] * 16 + [0] * 9))
    >>> [round(v, 3) for v in found["sensitivity"]]
    [1.0, 0.794, 1.0, 16.0]
    """
    unit = np.arange(len(labels)) if groups is None else codes(groups)
    truth = labels == 1
    among = {
        "sensitivity": (truth, called),
        "specificity": (~truth, ~called),
        "positive predictive value": (called, truth),
        "negative predictive value": (~called, ~truth),
    }
    found = {}
    for name, (of, right) in among.items():
        rows, hits = (np.bincount(unit, w.astype(float)) for w in (of, of & right))
        if rows.sum():
            low, high = intervals.share(hits, rows, level)
            found[name] = [float(hits.sum() / rows.sum()), low, high, float(rows.sum())]
    return found
