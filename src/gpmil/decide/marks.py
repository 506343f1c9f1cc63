"""Patches to mark at an error rate: conformal p-values and Benjamini-Hochberg.

Arrays in, arrays out. What comes in is *out-of-fold* (`data.folds` keeps patients together): every
score is by a model that has not seen the patient it is about. What is promised:

* `p_values`: all patches of a negative bag are negative, so held-out negative bags show how high
  negative patches score. P(p <= a) <= a for a patch *exchangeable with those of negative bags*.
  Benign tissue beside a lesion is not: it may look different, the coupling pulls it towards the
  lesion, and nothing is promised about it.
* `benjamini_hochberg`: among marked patches the share of negative ones is on average at most
  rate x share of negatives, under the same condition.

What dependence between patches does. p-values that share a reference are positively dependent in
the way (PRDS) that Benjamini-Hochberg allows, if patches are otherwise independent. Patches of one
bag are not, and this costs twice. The rate is a mean over cohorts: the realised one scatters the
more, the more a bag's patches move together (simulated, 36 reference bags, rate x share = 8 %:
standard deviation 2 points if independent, 8 at correlation .7). And the reference is worth its
bags rather than its patches: if bags are exchangeable but patches are not, then of B reference bags
of equal size P(p <= a) <= a + (1 - a) / (B + 1), and `weights="bag"` takes the excess away.

The share of negatives is not estimated (Storey) to use up the rate: where benign tissue scores high
that estimate is too low, and it would worsen the one case in which the rate is missed.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from jaxtyping import Bool, Float, Int
from scipy.stats import false_discovery_control

from gpmil.data.folds import codes
from gpmil.decide.checks import ROUNDING, check_share, check_within, refuse_nan

# ------------------------------------------------------------------ p-values


@dataclass(frozen=True)
class ConformalReference:
    """How high the patches of held-out negative bags score: fold k's, scored by model k.

    `vars(reference)` are the arrays to save; `ConformalReference(**arrays)` has them back.
    """

    scores: Float[np.ndarray, " n"]  # ascending within a fold
    offsets: Int[np.ndarray, " edges"]  # K + 1; fold k is scores[offsets[k] : offsets[k + 1]]
    bag: Int[np.ndarray, " n"]  # which training bag (or patient) a score belongs to

    @classmethod
    def build(
        cls,
        scores: Float[np.ndarray, " n"],
        fold: Int[np.ndarray, " n"],
        bag: Int[np.ndarray, " n"],
        n_folds: int,
    ) -> "ConformalReference":
        """From patches of negative bags in any order: score by the fold's own model, fold, bag.

        Patients in place of bags are allowed: then `weights="bag"` counts patients.
        """
        refuse_nan(scores, "scores of negative bags")
        sizes = np.bincount(fold, minlength=n_folds)
        if len(sizes) > n_folds or not sizes.all():
            raise ValueError(
                f"conformal p-values need patches of negative bags in each of {n_folds} folds, "
                f"found {sizes.tolist()} patches per fold. Make the folds with gpmil.data.folds."
            )
        order = np.lexsort((scores, fold))
        offsets = np.concatenate([[0], np.cumsum(sizes)])
        return cls(scores[order], offsets, bag[order])

    @property
    def fold(self) -> Int[np.ndarray, " n"]:
        """The fold of each score."""
        return np.repeat(np.arange(len(self.offsets) - 1), np.diff(self.offsets))

    def weight(self, weights: str) -> Float[np.ndarray, " n"]:
        """1 per patch, or 1 per bag, shared among its patches."""
        if weights not in ("patch", "bag"):
            raise ValueError(f"weights: expected 'patch' or 'bag', found {weights!r}.")
        sizes = np.bincount(codes(self.bag))
        return np.ones(len(self.bag)) if weights == "patch" else 1 / sizes[codes(self.bag)]

    def smallest(self, weights: str = "patch") -> float:
        """The smallest p-value there can be: 1 / (1 + number of patches, or of bags)."""
        n = len(self.scores) if weights == "patch" else round(self.weight(weights).sum())
        return 1 / (1 + n)


def p_values(
    reference: ConformalReference,
    scores: Float[np.ndarray, "K N"],
    *,
    weights: str = "patch",
    own_fold: Int[np.ndarray, " N"] | None = None,
    own_bag: Int[np.ndarray, " N"] | None = None,
) -> Float[np.ndarray, " N"]:
    """Conformal p-values of N patches scored by each of the K models; high scores are suspicious.

    Model k's score is compared with fold k's reference alone, and the ranks are pooled, so scores
    of different models never meet. Ties count against the patch.

    weights : "patch" needs negative patches to be exchangeable with the reference patches.
        "bag" needs it of bags only: it counts every negative bag once, and holds for a random patch
        of a random negative bag. It cannot fall below 1 / (1 + bags): for large cohorts.
    own_fold, own_bag : for patches of the *training* bags, their fold and bag. Only row
        own_fold[i] of column i is read (the one model that has not seen the patch), and its own bag
        is left out of the reference, so that a bag is not compared with itself.

    With K = 1, or with `own_fold`, P(p <= a) <= a. The pooled p-value is in effect a mean of K such
    p-values: near a if the models agree, the further below the more they disagree (a patch must
    look odd to all of them), though only about 2 a is proved whatever the models do.

    >>> reference = ConformalReference.build(
    ...     np.array([0.1, 0.4, 0.8, -3.0]), *np.array([[0, 0, 0, 1], [5, 5, 6, 7]]), n_folds=2
    ... )
    >>> p_values(reference, np.array([[0.4, 0.9], [-4.0, -1.0]]))
    array([0.8, 0.2])
    """
    n_folds = len(reference.offsets) - 1
    if len(scores) != n_folds:
        raise ValueError(
            f"scores: expected one row for each of {n_folds} models, found shape {scores.shape}."
        )
    if own_fold is not None:
        own_scores = scores[own_fold, np.arange(scores.shape[1])]
        return _own_p_values(reference, own_scores, weights, own_fold, own_bag)
    refuse_nan(scores, "scores")
    w = reference.weight(weights)
    pieces = [slice(*ends) for ends in pairwise(reference.offsets.tolist())]
    # p = (1 + sum_k r_k) / (1 + sum_k n_k), r_k = #{reference scores of fold k >= s_k}
    r = sum(_above(reference.scores[k], w[k], s) for k, s in zip(pieces, scores))
    return np.minimum((1 + r) / (1 + w.sum()), 1.0)


def _own_p_values(
    reference: ConformalReference,
    scores: Float[np.ndarray, " N"],
    weights: str,
    fold: Int[np.ndarray, " N"],
    bag: Int[np.ndarray, " N"] | None,
) -> Float[np.ndarray, " N"]:
    if bag is None:
        raise ValueError("own_bag: expected with own_fold, to compare no bag with itself.")
    refuse_nan(scores, "scores")
    w = reference.weight(weights)
    r_fold, n_fold = _above_within(reference.scores, w, reference.fold, scores, fold)
    r_bag, n_bag = _above_within(reference.scores, w, reference.bag, scores, bag)
    # p = (1 + r) / (1 + n) over the patches of the own fold that are not of the own bag
    r, n = np.maximum(r_fold - r_bag, 0), np.maximum(n_fold - n_bag, 0)
    return np.minimum((1 + r) / (1 + n), 1.0)


def _above(ascending: np.ndarray, w: np.ndarray, s: np.ndarray) -> Float[np.ndarray, " N"]:
    """Weight of the reference scores >= s."""
    from_here = np.append(np.cumsum(w[::-1])[::-1], 0.0)
    return from_here[np.searchsorted(ascending, s, side="left")]


def _above_within(
    reference: np.ndarray, w: np.ndarray, reference_key: np.ndarray, s: np.ndarray, key: np.ndarray
) -> tuple[Float[np.ndarray, " N"], Float[np.ndarray, " N"]]:
    """Weight of the reference scores >= s, and of all, among those with the same key."""
    r, n = np.zeros(len(s)), np.zeros(len(s))
    inside = dict(_rows(reference_key))
    for value, rows in _rows(key):
        if value in inside:
            same = inside[value]
            r[rows], n[rows] = _above(reference[same], w[same], s[rows]), w[same].sum()
    return r, n


def _rows(key: np.ndarray) -> Iterator[tuple[Any, np.ndarray]]:
    """Each value and where it stands, in order."""
    order = np.argsort(key, kind="stable")
    values, starts = np.unique(key[order], return_index=True)
    return zip(values.tolist(), np.split(order, starts[1:]))


# ------------------------------------------------------------------ flags


def benjamini_hochberg(
    p: Float[np.ndarray, " N"], rate: float, groups: Int[np.ndarray, " N"] | None = None
) -> Bool[np.ndarray, " N"]:
    """Which patches to mark, at a false discovery rate: over all, or within each group (slide).

    Over the cohort the rate is about all marks together; within slides it is about each slide, and
    holds of all marks only if slides with few marks are not mostly wrong ones.

    >>> benjamini_hochberg(np.array([0.001, 0.09, 0.04, 0.8]), 0.1)
    array([ True, False,  True, False])
    """
    check_share(rate, "rate")
    check_within(p, "p: expected p-values between 0 and 1")
    everywhere = np.zeros(len(p), dtype=np.int64)
    adjusted = np.empty(len(p))
    for _, rows in _rows(everywhere if groups is None else groups):
        adjusted[rows] = false_discovery_control(p[rows])
    return adjusted <= rate * (1 + ROUNDING)
