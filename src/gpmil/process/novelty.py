"""How far patches and slides lie from all that was seen in training, by the kernel alone.

With w_i the row of W = Kxz L^-T of a patch, phi_b the mean of w_i over a slide, and of the training
patches the number n, the mean and the covariance C of w_i,

    e_i = w_i'(I - R^-1) w_i / k(x_i, x_i),    R = I + sum_j w_j w_j'
    d_b = min_j (phi_b - phi_j)' A (phi_b - phi_j) / (v_b + v_j),    j the training slides,
    v_b = tr(A S_b),    A = (C + r I)^-1,    S_b the covariance of w_i within a slide

e_i is the share of the variance of f at a patch that the training patches, each seen with unit
noise, explain: a patch is as novel as -log e_i. d_b is the distance to the most similar training
slide, in units of how much the patches of the two vary, where directions count by how little all
patches vary in them. It sees what e cannot: patches that are near to all and too much alike, as
those of another organ or encoder may be. A slide is as novel as the larger of d_b and -log of its
mean e_i, in units of the edge of the training range.

Training slides are judged without their patient: sums less its patches, j from other patients (v_j
stays). Inducing points lie on their own patches all the same, which makes both the distance and v_b
of a training slide larger than those of a new one; the ratio hardly knows of it. The edge of their
range is Tukey's fence of the logarithms, which a few odd slides do not move: the inner one for d_b,
the outer one for e, which is there for slides that no inducing point is near to.
"""

import functools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from gpmil.fast import products
from gpmil.process.kernels import squared_norms
from gpmil.process.others import EPS, TINY, Sums, Turned, sums
from gpmil.process.sparse_gp import Posterior, Predictor, SparseGP

MOST_SLIDES = 256  # training slides that are kept, evenly spaced among all
MOST_PATCHES = 64  # patches of a slide that are looked at, evenly spaced among all
FEWEST_SLIDES, FEWEST_PATIENTS = 10, 3  # below which nothing can be said
PATCHES_BEYOND = 0.01  # share of the training patches that lie outside of their own range
FENCES = (1.5, 3.0)  # quartile ranges from the third quartile to the edge, of d_b and of e
LEVELS = np.linspace(0, 1, 101)  # of the quantiles kept of the patches


Ask = Callable[..., list[Any]]  # the name of a method, and its arguments


class Slides(NamedTuple):
    """Slides in the metric A = (chol chol')^-1."""

    middle: Float[Tensor, "b M"]  # chol^-1 phi_b
    spread: Float[Tensor, " b"]  # v_b

    @classmethod
    def of(cls, Y: Float[Tensor, "n M"], bag: Int[np.ndarray, " n"]) -> "Slides":
        """From chol^-1 w_i of their patches."""
        found = bag_mean(torch.cat([Y, Y.square().sum(1, keepdim=True)], dim=1), bag)
        middle = found[:, :-1]
        # tr(A S) = mean |y|^2 - |mean y|^2
        return cls(middle, (found[:, -1] - middle.square().sum(1)).clamp(min=0.0))

    def nearest(self, others: "Slides") -> Float[np.ndarray, " b"]:
        """d_b."""
        apart = torch.cdist(
            self.middle, others.middle, compute_mode="donot_use_mm_for_euclid_dist"
        ).square()
        spreads = (self.spread[:, None] + others.spread).clamp(min=EPS)
        return (apart / spreads).min(1).values.cpu().numpy()


class Watched(NamedTuple):
    """w_i and k(x_i, x_i) of patches that novelty will look at, kept when a fit comes by them."""

    gp: SparseGP
    rows: Int[np.ndarray, " n"]
    place: Int[Tensor, " N"]  # of every instance among them, -1 of all others
    W: Float[Tensor, "n M"]
    own: Float[Tensor, " n"]

    @classmethod
    def of(cls, gp: SparseGP, rows: Int[np.ndarray, " n"], n_instances: int) -> "Watched":
        """Nothing seen yet."""
        place = torch.full((n_instances,), -1, device=gp.L.device)
        place[torch.from_numpy(rows).to(gp.L.device)] = torch.arange(len(rows)).to(place)
        W = gp.L.new_empty(len(rows), len(gp.L))
        return cls(gp, rows, place, W, W.new_empty(len(rows)))

    def see(
        self, rows: Int[Tensor, " k"], x: Float[Tensor, "k d"], W: Float[Tensor, "k m"]
    ) -> None:
        """Some instances: their kernel inputs, and W."""
        at = self.place[rows]
        here = (at >= 0).nonzero()[:, 0]
        at = at[here]
        self.W.index_copy_(0, at, W[:, : self.W.shape[1]].index_select(0, here))
        self.own.index_copy_(0, at, self.gp.kernel.diagonal(x)[here])

    def serves(self, gp: SparseGP, rows: Int[np.ndarray, " k"]) -> bool:
        """Whether these are the patches, seen by a process that begins with the same points."""
        m = len(gp.L)
        same = torch.equal(self.gp.inducing[:m], gp.inducing)
        same = same and torch.equal(self.gp.L[:m, :m], gp.L)
        return same and np.array_equal(self.rows, rows)


@dataclass(frozen=True)
class Looked:
    """Some of the training slides, where they lie: w_i and k(x_i, x_i) of patches looked at."""

    start: int  # the number of the first one among all of them
    W: Float[Tensor, "n M"]
    own: Float[Tensor, " n"]
    bag: Int[np.ndarray, " n"]  # which of the slides here every patch is of, in order
    slides: int
    _cache: dict[str, np.ndarray] = field(default_factory=dict, compare=False)

    @classmethod
    def at(
        cls, start: int, gp: SparseGP, x: Float[Tensor, "n d"], sizes: Int[np.ndarray, " s"]
    ) -> "Looked":
        """From kernel inputs of slides, one after the other."""
        return cls.seen(start, gp.whiten(x).contiguous(), gp.kernel.diagonal(x), sizes)

    @classmethod
    def seen(
        cls,
        start: int,
        W: Float[Tensor, "n M"],
        own: Float[Tensor, " n"],
        sizes: Int[np.ndarray, " s"],
    ) -> "Looked":
        """From W and k(x, x)."""
        return cls(start, W, own, np.repeat(np.arange(len(sizes)), sizes), len(sizes))

    def cpu(self) -> "Looked":
        """The same to be asked from elsewhere."""
        return replace(self, W=self.W.cpu(), own=self.own.cpu()) if self.W.is_cuda else self

    def first(self) -> tuple[Sums | None, Float[Tensor, "s M"]]:
        """The sums, and phi of every slide."""
        return self._sums(slice(None)), bag_mean(self.W, self.bag)

    def spreads(self, every: Turned) -> Float[np.ndarray, " s"]:
        """v of every slide."""
        if not self.slides:
            return np.empty(0)
        phi = bag_mean(self.W, self.bag).numpy() @ every.Q
        return every.spreads(self._turned(every), phi, self.bag)

    def _turned(self, every: Turned) -> Float[np.ndarray, "n M"]:
        """W in the eigenbasis, which is asked for twice."""
        if not ("Q" in self._cache and np.array_equal(self._cache["Q"], every.Q)):
            self._cache.update(Q=every.Q, V=products.times(self.W.numpy(), every.Q))
        return self._cache["V"]

    def of_patient(self, patient: Int[np.ndarray, " S"], p: int) -> Sums | None:
        """The sums over the slides of a patient that lie here."""
        return self._sums(self._patches_of(self._mine(patient) == p))

    def scores(
        self,
        every: Turned,
        phi: Float[Tensor, "S M"],
        spreads: Float[np.ndarray, " S"],
        patient: Int[np.ndarray, " S"],
        apart: Mapping[int, Sums],  # those of patients who have slides elsewhere, too
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """d_b, the mean e_i of every slide, and all e_i: each without its patient."""
        mine, V, middles = self._mine(patient), self._turned(every), phi.numpy() @ every.Q
        ours = middles[self.start : self.start + self.slides]
        d, e = np.empty(self.slides), np.empty(len(self.bag))
        for p in np.unique(mine):
            here = mine == p
            rows = self._patches_of(here)
            own = V[rows]
            others = every.without(*_lost(every, own, apart.get(int(p))))
            slides = ours[here], middles, spreads, patient != p
            d[here] = others.nearest(own, self.bag[rows], *slides)
            e[rows] = others.explained(self.own[rows].numpy(), own)
        each = bag_mean(torch.from_numpy(e)[:, None], self.bag)[:, 0]
        return d, each.numpy(), e

    def _mine(self, patient: Int[np.ndarray, " S"]) -> Int[np.ndarray, " s"]:
        return patient[self.start : self.start + self.slides]

    def _patches_of(self, slides: Bool[np.ndarray, " s"]) -> slice | Int[np.ndarray, " k"]:
        """The rows of some slides; one slide after the other is no copy."""
        rows = np.flatnonzero(slides[self.bag])
        together = len(rows) > 0 and rows[-1] - rows[0] == len(rows) - 1
        return slice(int(rows[0]), int(rows[-1]) + 1) if together else rows

    def _sums(self, rows: slice | Int[np.ndarray, " k"]) -> Sums | None:
        return sums(self.W[rows]) if len(self.bag[rows]) else None


@dataclass(frozen=True)
class Seen:
    """What a model keeps of its training cohort, to know what is unlike it."""

    R: Float[Tensor, "M M"]
    mean: Float[Tensor, " M"]  # of w_i
    slides: Float[Tensor, "S M"]  # phi_j
    spreads: Float[Tensor, " S"]  # v_j
    patches: Float[np.ndarray, " Q"]  # quantiles of -log e_i, each without its own patient
    scores: Float[np.ndarray, "S 2"]  # d_b and -log of the mean e_i of the slides, likewise
    count: Float[np.ndarray, " 1"]  # n

    @classmethod
    def learn(cls, ask: Ask, patient: Int[np.ndarray, " S"]) -> "Seen":
        """From slides that lie in one place or in several: `ask` calls a method of all `Looked`.

        Nothing comes back but sums, and a few numbers per slide and patch.
        """
        totals, means = zip(*ask("first"))
        every, phi = _added(totals), torch.cat(means)
        turned = Turned.of(every)
        spreads = np.concatenate(ask("spreads", turned))
        parts = np.repeat(np.arange(len(means)), [len(part) for part in means])
        split = [p for p in np.unique(patient) if len(np.unique(parts[patient == p])) > 1]
        apart = {int(p): _added(ask("of_patient", patient, int(p))) for p in split}
        d, mean, e = zip(*ask("scores", turned, phi, spreads, patient, apart))
        scores = np.stack([np.concatenate(d), surprise(np.concatenate(mean))], axis=1).clip(TINY)
        quantiles, n = np.quantile(surprise(np.concatenate(e)), LEVELS), np.array([every.n])
        middle, v = every.first / every.n, torch.from_numpy(spreads)
        return cls(every.precision(), middle, phi, v, quantiles, scores, n)

    def of(
        self, gp: SparseGP, K: Float[Tensor, "n M"], own: Float[Tensor, " n"],
        sizes: Int[np.ndarray, " b"],
    ) -> tuple[Float[np.ndarray, " n"], Float[np.ndarray, " b"]]:  # fmt: skip
        """Of the patches and the slides of whole bags, one after the other, from Kxz and k(x, x).

        In units of the edge of the training range: 1 is where all but PATCHES_BEYOND of the
        training patches lie below, and for slides the fence.
        """
        rows, bag = looked_at(sizes)
        some, metric = K[rows], self._metric()
        known = Slides(_solved(metric, self.slides), self.spreads)
        # y' = w' chol^-T = k(x, Z) L^-T chol^-T
        both = _solved(metric, gp.L_inverse.mT).mT
        d = Slides.of(products.matmul(some, both.mT, triangle=1), bag).nearest(known)
        q = Posterior.build(torch.zeros_like(self.mean), self.R)
        # w'(I - R^-1) w = |B'k|^2 = |U k|^2,  B' = Q U with a triangle U
        U = torch.linalg.qr(Predictor.build(gp, q, 0.0).columns[:, 1:].mT, mode="r").R
        e = squared_norms(products.matmul(K, U.mT, triangle=-1)) / own
        # an edge at zero, where all are alike, is none to measure by
        edges = fences(self.scores).clip(EPS)
        mean = bag_mean(e[rows, None], bag)[:, 0].cpu().numpy()
        scores = np.stack([d, surprise(mean)], axis=1) / edges
        limit = max(float(np.interp(1 - PATCHES_BEYOND, LEVELS, self.patches)), EPS)
        return surprise(e.cpu().numpy()) / limit, scores.max(1)

    @property
    def is_sound(self) -> bool:
        """Whether these can be sums over patches: no file says so of itself."""
        try:
            finite = bool(self._metric().isfinite().all() and (self.spreads >= 0).all())
        except torch.linalg.LinAlgError:
            return False
        with np.errstate(over="ignore"):
            return finite and bool(np.isfinite(fences(self.scores)).all())

    def _metric(self) -> Float[Tensor, "M M"]:
        n = float(self.count[0])
        return Sums(n, n * self.mean, self.R - torch.eye(len(self.R)).to(self.R)).metric()


def enough(patient: Int[np.ndarray, " S"]) -> bool:
    """Whether anything can be said from slides of these patients."""
    return len(patient) >= FEWEST_SLIDES and len(np.unique(patient)) >= FEWEST_PATIENTS


def _lost(
    every: Turned, own: Float[np.ndarray, "k M"], elsewhere: Sums | None
) -> tuple[float, Float[np.ndarray, " M"], Float[np.ndarray, "l M"]]:
    """Number, sum and rows of a patient's patches; of slides elsewhere rows with the same sums."""
    if elsewhere is None:
        return float(len(own)), own.sum(0), own
    s, Q = (x.numpy() for x in torch.linalg.eigh(elsewhere.second))
    rows = (np.sqrt(s.clip(min=0.0)) * Q).T @ every.Q
    return elsewhere.n, elsewhere.first.numpy() @ every.Q, rows


def _added(parts: Iterable[Sums | None]) -> Sums:
    """All together; None is of no slides."""
    found = [part for part in parts if part is not None]
    return functools.reduce(Sums.plus, found)


def looked_at(sizes: Int[np.ndarray, " b"]) -> tuple[np.ndarray, np.ndarray]:
    """The rows that slides are judged by, of whole bags one after the other; the bag of each.

    >>> rows, bag = looked_at(np.array([2, 3]))
    >>> rows.tolist(), bag.tolist()
    ([0, 1, 2, 3, 4], [0, 0, 1, 1, 1])
    """
    starts = np.concatenate([[0], np.cumsum(sizes)[:-1]])
    rows, counts = evenly_of_each(starts, sizes, MOST_PATCHES)
    return rows, np.repeat(np.arange(len(sizes)), counts)


def evenly_of_each(
    starts: Int[np.ndarray, " b"], sizes: Int[np.ndarray, " b"], most: int
) -> tuple[Int[np.ndarray, " n"], Int[np.ndarray, " b"]]:
    """`evenly` of every bag, and how many there are of each.

    >>> rows, counts = evenly_of_each(np.array([0, 3]), np.array([3, 10]), 4)
    >>> rows.tolist(), counts.tolist()
    ([0, 1, 2, 3, 6, 9, 12], [3, 4])
    """
    counts = np.minimum(sizes, most)
    # k (n - 1) / (most - 1), k = 0, 1, ..., and k itself where all are taken
    step = np.where(sizes <= most, 1.0, (sizes - 1) / max(most - 1, 1))
    within = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    offset = (within * np.repeat(step, counts)).round().astype(np.int64)
    return np.repeat(starts, counts) + offset, counts


def evenly(n: int, most: int) -> Int[np.ndarray, " k"]:
    """At most so many of the numbers 0, ..., n - 1.

    >>> evenly(3, 5).tolist(), evenly(10, 4).tolist()
    ([0, 1, 2], [0, 3, 6, 9])
    """
    # more than one apart, so that no two of them are rounded to one number
    return np.arange(n) if n <= most else np.linspace(0, n - 1, most).round().astype(np.int64)


def bag_mean(values: Float[Tensor, "n k"], bag: Int[np.ndarray, " n"]) -> Float[Tensor, "b k"]:
    """The mean of the rows of every bag."""
    counts = torch.from_numpy(np.bincount(bag)).to(values)
    total = values.new_zeros(len(counts), values.shape[1])
    return total.index_add_(0, torch.from_numpy(bag).to(values.device), values) / counts[:, None]


def fences(scores: Float[np.ndarray, "S 2"]) -> Float[np.ndarray, " 2"]:
    """Where the range of d_b and that of e end: Q3 + c (Q3 - Q1) of the logarithms.

    >>> fences(np.array([[1.0, 1], [2, 2], [4, 4], [8, 8], [1e9, 1e9]])).round(9).tolist()
    [64.0, 512.0]
    """
    first, third = np.quantile(np.log(scores), [0.25, 0.75], axis=0)
    return np.exp(third + np.array(FENCES) * (third - first))


def _solved(chol: Float[Tensor, "M M"], rows: Float[Tensor, "n M"]) -> Float[Tensor, "n M"]:
    """chol^-1 of every row."""
    return torch.linalg.solve_triangular(chol, rows.mT, upper=False).mT


def surprise(share: Float[np.ndarray, " n"]) -> Float[np.ndarray, " n"]:
    """-log e, a number even where nothing is explained."""
    return -np.log(share.clip(TINY, 1.0))
