"""All training patches but those of a patient, from sums over all of them; see novelty.py."""

from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from gpmil.fast.products import gram
from gpmil.fast.triangles import factor, solved

RIDGE = 0.01  # r, of the mean variance in C
TINY, EPS = np.finfo(float).tiny, 1e-12


class Sums(NamedTuple):
    """n, sum w and sum w w' of some patches."""

    n: float
    first: Float[Tensor, " M"]
    second: Float[Tensor, "M M"]

    def plus(self, other: "Sums") -> "Sums":
        """With some more."""
        n, first, second = other
        return Sums(self.n + n, self.first + first, self.second + second)

    def precision(self) -> Float[Tensor, "M M"]:
        """R = I + sum w w'."""
        R = self.second.clone()
        R.diagonal().add_(1)
        return R

    def metric(self) -> Float[Tensor, "M M"]:
        """The Cholesky factor of C + r I."""
        mean = self.first / self.n
        C = (self.second / self.n).addr_(mean, mean, alpha=-1)
        C.diagonal().add_(ridge(float(self.second.trace()) / self.n, mean))
        return torch.linalg.cholesky(C)


def sums(W: Float[Tensor, "n M"]) -> Sums:
    """Over some patches."""
    return Sums(float(len(W)), W.sum(0), gram(W))


def ridge(power: float, mean: Float[Tensor | np.ndarray, " M"]) -> float:
    """r, from the mean of |w|^2 and that of w."""
    # where all patches are one, C is what rounding leaves of a difference
    variance = max(power - float(mean @ mean), 0.0) / len(mean)
    return RIDGE * variance + EPS * power / len(mean) + TINY


class Turned(NamedTuple):
    """All patches in the eigenbasis of sum w w' = Q diag(s) Q', in which it is easy to leave out.

    With the rows v = Q'w of a patient as V, and m the mean of the others, both matrices of the
    others are a diagonal one less a few rows:

        R = diag(1 + s) - V'V,    n (C + r I) = diag(s + n r) - V'V - n m m'.
    """

    n: float
    mean: Float[np.ndarray, " M"]  # Q' mean w
    s: Float[np.ndarray, " M"]
    Q: Float[np.ndarray, "M M"]

    @classmethod
    def of(cls, every: Sums) -> "Turned":
        """From the sums over all patches."""
        s, Q = (x.numpy() for x in torch.linalg.eigh(every.second))
        return cls(every.n, every.first.numpy() / every.n @ Q, s.clip(min=0.0), Q)

    def spreads(
        self, V: Float[np.ndarray, "k M"], phi: Float[np.ndarray, "s M"], bag: Int[np.ndarray, " k"]
    ) -> Float[np.ndarray, " s"]:
        """v of slides in the metric of all patches, from their rows Q'w and the means of these."""
        D = 1 / (self.s + self.n * ridge(float(self.s.sum()) / self.n, self.mean))
        # one row is taken away: A / n = D + D m m' D / (1 / n - m' D m)
        by, share = D * self.mean, 1 / (1 / self.n - self.mean @ (D * self.mean))

        def form(X: Float[np.ndarray, "l M"]) -> Float[np.ndarray, " l"]:
            return np.einsum("ij,ij,j->i", X, X, D) + share * (X @ by) ** 2

        starts, counts = _slides(bag)
        mean = np.add.reduceat(form(V), starts) / counts
        return self.n * (mean - form(phi)).clip(min=0.0)

    def without(
        self, n: float, total: Float[np.ndarray, " M"], lost: Float[np.ndarray, "l M"]
    ) -> "Others":
        """All but some patches, n of the sum `total`; the rows `lost` have their second moments."""
        rest = self.n - n
        mean = (self.n * self.mean - total) / rest
        power = (float(self.s.sum()) - float((lost**2).sum())) / rest
        b = self.s + rest * ridge(power, mean)
        R = DiagonalLess(1 + self.s, lost, lost[:0])
        return Others(rest, R, DiagonalLess(b, lost, rest**0.5 * mean[None]))


Roots = tuple[Float[np.ndarray, "k r"], Float[np.ndarray, "k l"]]


class DiagonalLess:
    """diag(b) - U'U, of which products with the inverse are asked for; U are rows and some more."""

    def __init__(
        self,
        b: Float[np.ndarray, " M"],
        rows: Float[np.ndarray, "l M"],
        more: Float[np.ndarray, "m M"],
    ):
        U = np.concatenate([rows, more]) if len(more) else rows
        self.rows, self.few = rows, len(U) < len(b)
        if not self.few:
            self.L = factor(np.diag(b) - U.T @ U)
            return
        # D + D U'(I - U D U')^-1 U D,  D = diag(b)^-1 (Woodbury's formula)
        self.D = 1 / np.sqrt(b)
        self.U = U * self.D
        self.G = self.U @ self.U.T
        rest = -self.G
        rest.flat[:: len(U) + 1] += 1
        self.L = factor(rest)

    def roots(self, X: Float[np.ndarray, "k M"]) -> Roots:
        """Two matrices side by side that are Y, Y Y' = X (diag(b) - U'U)^-1 X'."""
        if not self.few:
            return solved(self.L, X.copy()), X[:, :0]
        if X is self.rows:
            return self.U[: len(X)], solved(self.L, self.G[: len(X)].copy())
        X = X * self.D
        return X, solved(self.L, X @ self.U.T)


class Others(NamedTuple):
    """What a patient is judged by: the patches of all others."""

    n: float
    R: DiagonalLess
    metric: DiagonalLess  # n (C + r I)

    def explained(
        self, own: Float[np.ndarray, " k"], V: Float[np.ndarray, "k M"]
    ) -> Float[np.ndarray, " k"]:
        """e of rows V: w'(I - R^-1) w / k(x, x)."""
        return (_squares(V) - sum(map(_squares, self.R.roots(V)))) / own

    def nearest(
        self,
        V: Float[np.ndarray, "k M"],
        bag: Int[np.ndarray, " k"],
        mine: Float[np.ndarray, "b M"],
        phi: Float[np.ndarray, "s M"],
        spreads: Float[np.ndarray, " s"],
    ) -> Float[np.ndarray, " b"]:
        """d_b of slides of the rows V with means `mine`, from phi_j and v_j of others."""
        starts, counts = _slides(bag)
        middles, theirs = self.metric.roots(mine), self.metric.roots(phi)
        # tr(A S) = mean |y|^2 - |mean y|^2
        power = np.add.reduceat(sum(map(_squares, self.metric.roots(V))), starts) / counts
        own = (power - sum(map(_squares, middles))).clip(min=0.0)
        found = [
            self.n * sum(_squares(y - at[b]) for y, at in zip(theirs, middles))
            / (self.n * own[b] + spreads).clip(min=EPS)
            for b in range(len(own))
        ]  # fmt: skip
        return np.min(found, axis=1)


def _squares(Y: Float[np.ndarray, "k r"]) -> Float[np.ndarray, " k"]:
    return np.einsum("ij,ij->i", Y, Y)


def _slides(bag: Int[np.ndarray, " k"]) -> tuple[np.ndarray, np.ndarray]:
    """Where the rows of every slide begin, which lie together, and how many there are."""
    starts = np.flatnonzero(np.diff(bag, prepend=-1))
    return starts, np.diff(starts, append=len(bag))
