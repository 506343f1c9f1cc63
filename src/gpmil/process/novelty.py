"""How far patches and slides lie from all that was seen in training, by the kernel alone.

With w_i the row of W = Kxz L^-T of a patch, phi_b the mean of w_i over a slide, and of the training
patches the number n, the mean and the covariance C of w_i,

    e_i = w_i'(I - R^-1) w_i / k(x_i, x_i),    R = I + sum_j w_j w_j'
    d_b = min_j (phi_b - phi_j)' (C + r I)^-1 (phi_b - phi_j),    j the training slides

e_i is the share of the variance of f at a patch that the training patches, each seen with unit
noise, explain: a patch is as novel as -log e_i. d_b is the distance to the most similar training
slide where directions count by how little patches vary in them. It sees what e cannot: patches
that are near to all and too much alike, as those of another organ or encoder may be. A slide is as
novel as the larger of d_b and -log of its mean e_i, in units of the edge of the training range.

Training slides are judged without their patient: sums less its patches, j from other patients. The
edge of their range is Tukey's fence of the logarithms, which a few odd slides do not move: near
for d_b, far out for e, which is there for slides that no inducing point is near to.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from gpmil.process.sparse_gp import Posterior, Predictor, SparseGP

MOST_SLIDES = 256  # training slides that are kept, evenly spaced among all
MOST_PATCHES = 200  # patches of a slide that are looked at, evenly spaced among all
FEWEST_SLIDES, FEWEST_PATIENTS = 10, 3  # below which nothing can be said
PATCHES_BEYOND = 0.01  # share of the training patches that lie outside of their own range
FENCES = (1.0, 3.0)  # quartile ranges from the third quartile to the edge, of d_b and of e
RIDGE = 0.01  # r, of the mean variance in C
LEVELS = np.linspace(0, 1, 101)  # of the quantiles kept of the patches
TINY, EPS = np.finfo(float).tiny, 1e-12


class Sums(NamedTuple):
    """n, sum w and sum w w' of some patches."""

    n: float
    first: Float[Tensor, " M"]
    second: Float[Tensor, "M M"]

    def less(self, other: "Sums") -> "Sums":
        """Without some of them."""
        n, first, second = other
        return Sums(self.n - n, self.first - first, self.second - second)

    def precision(self) -> Float[Tensor, "M M"]:
        """R = I + sum w w'."""
        return torch.eye(len(self.first)).to(self.second) + self.second

    def metric(self) -> Float[Tensor, "M M"]:
        """The Cholesky factor of C + r I."""
        mean = self.first / self.n
        C = self.second / self.n - torch.outer(mean, mean)
        # where all patches are one, C is what rounding leaves of a difference
        rounded = EPS * (self.second / self.n).diagonal().mean()
        r = RIDGE * C.diagonal().mean().clamp(min=0.0) + rounded + TINY
        return torch.linalg.cholesky((C + C.mT) / 2 + r * torch.eye(len(C)).to(C))


@dataclass(frozen=True)
class Seen:
    """What a model keeps of its training cohort, to know what is unlike it."""

    R: Float[Tensor, "M M"]
    mean: Float[Tensor, " M"]  # of w_i
    slides: Float[Tensor, "S M"]  # phi_j
    patches: Float[np.ndarray, " Q"]  # quantiles of -log e_i, each without its own patient
    scores: Float[np.ndarray, "S 2"]  # d_b and -log of the mean e_i of the slides, likewise
    count: Float[np.ndarray, " 1"]  # n

    @classmethod
    def learn(
        cls, gp: SparseGP, slides: Sequence[Float[Tensor, "_ d"]], patient: Int[np.ndarray, " S"]
    ) -> "Seen | None":
        """From kernel inputs of patches of the slides; None where they are too few."""
        if len(slides) < FEWEST_SLIDES or len(np.unique(patient)) < FEWEST_PATIENTS:
            return None
        W = [gp.whiten(x) for x in slides]
        phi = torch.stack([w.mean(0) for w in W])
        every = sums(W)
        d, e = np.empty(len(W)), [np.empty(0)] * len(W)
        for p in np.unique(patient):
            inside, outside = np.flatnonzero(patient == p), np.flatnonzero(patient != p)
            others = every.less(sums([W[b] for b in inside.tolist()]))
            d[inside] = nearest(others.metric(), phi[inside], phi[outside])
            chol = torch.linalg.cholesky(others.precision())
            for b in inside.tolist():
                e[b] = explained(chol, gp.kernel.diagonal(slides[b]), W[b]).cpu().numpy()
        scores = np.stack([d, surprise(np.array([a.mean() for a in e]))], axis=1).clip(TINY)
        quantiles, n = np.quantile(surprise(np.concatenate(e)), LEVELS), np.array([every.n])
        return cls(every.precision(), every.first / every.n, phi, quantiles, scores, n)

    def of(
        self, gp: SparseGP, K: Float[Tensor, "n M"], own: Float[Tensor, " n"],
        sizes: Int[np.ndarray, " b"],
    ) -> tuple[Float[np.ndarray, " n"], Float[np.ndarray, " b"]]:  # fmt: skip
        """Of the patches and the slides of whole bags, one after the other, from Kxz and k(x, x).

        In units of the edge of the training range: 1 is where all but PATCHES_BEYOND of the
        training patches lie below, and for slides the fence.
        """
        q = Posterior.build(torch.zeros_like(self.mean), self.R)
        # w'(I - R^-1) w = |Y|^2
        Y = K @ Predictor.build(gp, q, 0.0).columns[:, 1:]
        e = Y.square().sum(1) / own
        rows, bag = looked_at(sizes)
        mean = bag_mean(torch.cat([K[rows], e[rows, None]], dim=1), bag)
        phi = torch.linalg.solve_triangular(gp.L, mean[:, :-1].mT, upper=False).mT
        d = nearest(self._metric(), phi, self.slides)
        # an edge at zero, where all are alike, is none to measure by
        edges = fences(self.scores).clip(EPS)
        scores = np.stack([d, surprise(mean[:, -1].cpu().numpy())], axis=1) / edges
        limit = max(float(np.interp(1 - PATCHES_BEYOND, LEVELS, self.patches)), EPS)
        return surprise(e.cpu().numpy()) / limit, scores.max(1)

    @property
    def is_sound(self) -> bool:
        """Whether these can be sums over patches: no file says so of itself."""
        try:
            finite = bool(self._metric().isfinite().all())
        except torch.linalg.LinAlgError:
            return False
        with np.errstate(over="ignore"):
            return finite and bool(np.isfinite(fences(self.scores)).all())

    def _metric(self) -> Float[Tensor, "M M"]:
        n = float(self.count[0])
        return Sums(n, n * self.mean, self.R - torch.eye(len(self.R)).to(self.R)).metric()


def sums(W: Sequence[Float[Tensor, "_ M"]]) -> Sums:
    """Over some slides."""
    first, second = (sum(parts) for parts in zip(*((w.sum(0), w.mT @ w) for w in W)))
    return Sums(float(sum(map(len, W))), first, second)


def looked_at(sizes: Int[np.ndarray, " b"]) -> tuple[np.ndarray, np.ndarray]:
    """The rows that slides are judged by, of whole bags one after the other; the bag of each.

    >>> rows, bag = looked_at(np.array([2, 3]))
    >>> rows.tolist(), bag.tolist()
    ([0, 1, 2, 3, 4], [0, 0, 1, 1, 1])
    """
    starts = np.concatenate([[0], np.cumsum(sizes)[:-1]])
    own = [start + evenly(int(n), MOST_PATCHES) for start, n in zip(starts, sizes)]
    return np.concatenate(own), np.repeat(np.arange(len(sizes)), [len(r) for r in own])


def evenly(n: int, most: int) -> Int[np.ndarray, " k"]:
    """At most so many of the numbers 0, ..., n - 1.

    >>> evenly(3, 5).tolist(), evenly(10, 4).tolist()
    ([0, 1, 2], [0, 3, 6, 9])
    """
    return np.unique(np.linspace(0, n - 1, min(n, most)).round().astype(np.int64))


def bag_mean(values: Float[Tensor, "n k"], bag: Int[np.ndarray, " n"]) -> Float[Tensor, "b k"]:
    """The mean of the rows of every bag."""
    counts = torch.from_numpy(np.bincount(bag)).to(values)
    total = values.new_zeros(len(counts), values.shape[1])
    return total.index_add_(0, torch.from_numpy(bag).to(values.device), values) / counts[:, None]


def fences(scores: Float[np.ndarray, "S 2"]) -> Float[np.ndarray, " 2"]:
    """Where the range of d_b and that of e end: Q3 + c (Q3 - Q1) of the logarithms.

    >>> fences(np.array([[1.0, 1], [2, 2], [4, 4], [8, 8], [1e9, 1e9]])).round(9).tolist()
    [32.0, 512.0]
    """
    first, third = np.quantile(np.log(scores), [0.25, 0.75], axis=0)
    return np.exp(third + np.array(FENCES) * (third - first))


def nearest(
    chol: Float[Tensor, "M M"], phi: Float[Tensor, "a M"], others: Float[Tensor, "b M"]
) -> Float[np.ndarray, " a"]:
    """min_j |chol^-1 (phi - phi_j)|^2."""
    one, two = (torch.linalg.solve_triangular(chol, p.mT, upper=False).mT for p in (phi, others))
    apart = torch.cdist(one, two, compute_mode="donot_use_mm_for_euclid_dist")
    return apart.min(1).values.square().cpu().numpy()


def explained(
    chol: Float[Tensor, "M M"], own: Float[Tensor, " n"], W: Float[Tensor, "n M"]
) -> Float[Tensor, " n"]:
    """w'(I - R^-1) w / k(x, x)."""
    root = torch.linalg.solve_triangular(chol, W.mT, upper=False)
    return (W.square().sum(1) - root.square().sum(0)) / own


def surprise(share: Float[np.ndarray, " n"]) -> Float[np.ndarray, " n"]:
    """-log e, a number even where nothing is explained."""
    return -np.log(share.clip(TINY, 1.0))
