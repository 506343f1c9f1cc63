"""A patch probability from slide labels alone: that a patch is unlike tissue of negative slides.

Patches of positive slides are a mixture, a share pi unlike those of negative slides and the rest
like them. With f_N and f_P the densities of a score in negative and in positive slides,

    P(unlike | score, positive slide) = 1 - (1 - pi) f_N / f_P,

and a slide of unknown class has it with its own probability of being positive. The score is the
conformal p-value (`marks`), cross-fitted and uniform in negative slides: f_N = 1. Its density g in
positive slides is the likeliest that falls as p rises (Grenander), so that the probability is
monotone in the score. 1 - pi is the height at which g runs out: the share of p-values above 1/2,
doubled (Storey).

What it answers. "Unlike negative slides" is not "tumour": benign tissue that only positive slides
have (the stroma of a tumour) is unlike, too. Two checks notice it, and `supported` is both:

* if like patches were like, g would be flat from 1/2 on, and it would not matter where 1 - pi is
  read (`misfit`);
* if positive slides had lesions and otherwise the tissue of negative ones, then kinds of tissue
  that are no lesion would score alike in both. Where every kind of tissue scores higher in positive
  slides, it is the slides that differ, and not a share of their patches (`same_kind`).
"""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Float, Int
from sklearn.isotonic import isotonic_regression

from gpmil.decide.checks import check_within

FLAT = (0.5, 0.8)  # p-values above which positive slides should look like negative ones
TOLERATED = 0.1  # difference of 1 - pi between the two, and so of probabilities
MOST = 0.5  # of the tissue of positive slides: beyond this it can hardly all be tumour
NEEDED = 100  # p-values of positive slides
LIKE = 0.3  # of tissue of the same kind that must score as in negative slides
OF_A_KIND = 20  # patches of positive slides, and of negative ones, to be compared
ANSWERS = (
    "the probability that a patch is unlike the tissue of negative slides, from slide labels "
    "alone; not that it is tumour: what only positive slides have, stroma around a tumour too, "
    "is unlike"
)


@dataclass(frozen=True)
class Unlike:
    """The density of p-values in positive slides; `vars(unlike)` are the arrays to save."""

    edges: Float[np.ndarray, " k1"]  # p-values, from 0 to 1
    density: Float[np.ndarray, " k"]  # g between the edges, falling
    alike: Float[np.ndarray, " tails"]  # 1 - pi, read above each of FLAT
    same_kind: Float[np.ndarray, " 1"]  # `like_in_kinds`

    @classmethod
    def fit(cls, p: Float[np.ndarray, " n"], same_kind: float = 1.0) -> "Unlike":
        """From the cross-fitted p-values of the patches of positive slides.

        `same_kind` is `like_in_kinds` of the cohort; 1 where kinds of tissue are not known.
        """
        check_within(p, "p: expected p-values between 0 and 1")
        if len(p) < NEEDED:
            raise ValueError(
                f"the density of p-values needs at least {NEEDED} patches of positive slides, "
                f"found {len(p)}."
            )
        edges, steps = _falling(p)
        alike = [min((p > cut).mean() / (1 - cut), 1.0) for cut in FLAT]
        return cls(edges, steps, np.array(alike), np.array([same_kind]))

    @property
    def share(self) -> float:
        """pi, the share of patches of positive slides that are unlike those of negative ones."""
        return float(1 - self.alike[0])

    @property
    def misfit(self) -> float:
        """By how much 1 - pi depends on where it is read: 0 if like patches are like."""
        return float(np.abs(self.alike - self.alike[0]).max())

    @property
    def supported(self) -> bool:
        """Whether the probabilities are offered."""
        flat = self.misfit <= TOLERATED
        return self.share > 0 and flat and bool(self.same_kind[0] >= LIKE)

    def probability(self, p: Float[np.ndarray, " n"]) -> Float[np.ndarray, " n"]:
        """P(unlike | p-value, positive slide)."""
        place = np.searchsorted(self.edges, p, side="left") - 1
        g = self.density[np.clip(place, 0, len(self.density) - 1)]
        # 1 - (1 - pi) f_N / f_P with f_N = 1, f_P = g
        odd = 1 - np.divide(self.alike[0], g, out=np.full(len(g), np.inf), where=g > 0)
        return np.clip(odd, 0.0, 1.0)

    def __str__(self) -> str:
        low, high = FLAT
        read = (
            f"{self.share:.3g} of the patches of positive slides are unlike those of negative "
            f"slides, read from p > {low:g}; from p > {high:g} it would be "
            f"{1 - self.alike[-1]:.3g} (a difference of at most {TOLERATED:g} is allowed). Among "
            f"tissue of the same kind {self.same_kind[0]:.2g} of them score as in negative slides "
            f"(at least {LIKE:g} is asked for: with less, whole slides differ, by stain or "
            "reaction, and not some of their patches)"
        )
        if self.supported and self.share > MOST:
            read += "; with so much of them, tissue around tumours is likely to be among it"
        if self.supported:
            return f"{read}: patch probabilities from slide labels alone are given"
        return f"{read}: no patch probabilities from slide labels alone are given"


def like_in_kinds(
    p: Float[np.ndarray, " n"], positive: Bool[np.ndarray, " n"], kind: Int[np.ndarray, " n"]
) -> float:
    """The share of patches of positive slides that score as negative slides' of the same kind do.

    Of kind t it is 2 P(p > median of p in negative slides | t, positive slide), at most 1; the mean
    is over kinds as frequent as in negative slides. 1 where no kind has enough patches.

    >>> p = np.linspace(0.01, 1, 200)
    >>> like_in_kinds(np.concatenate([p, p / 4]), np.arange(400) >= 200, np.zeros(400, dtype=int))
    0.0
    """
    shares, weights = [], []
    for t in np.unique(kind):
        there, here = p[(kind == t) & ~positive], p[(kind == t) & positive]
        if min(len(there), len(here)) >= OF_A_KIND:
            shares.append(min(2 * float((here > np.median(there)).mean()), 1.0))
            weights.append(len(there))
    return float(np.average(shares, weights=weights)) if shares else 1.0


def _falling(
    p: Float[np.ndarray, " n"],
) -> tuple[Float[np.ndarray, " k1"], Float[np.ndarray, " k"]]:
    """The likeliest falling density on (0, 1]: slopes of the least concave majorant.

    >>> _falling(np.array([0.1, 0.1, 0.5, 0.4]))
    (array([0. , 0.1, 0.5, 1. ]), array([5.  , 1.25, 0.  ]))
    """
    values, counts = np.unique(p, return_counts=True)
    ends = np.unique(np.concatenate([[0.0], values, [1.0]]))
    mass = np.zeros(len(ends) - 1)
    mass[np.searchsorted(ends, np.maximum(values, ends[1])) - 1] += counts / len(p)
    width = np.diff(ends)
    slope = isotonic_regression(mass / width, sample_weight=width, increasing=False)
    last = np.append(np.flatnonzero(np.diff(slope) != 0), len(slope) - 1)
    return np.append(0.0, ends[last + 1]), slope[last]
