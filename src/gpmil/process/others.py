"""All training patches but those of a patient, from sums over all of them; see novelty.py."""

from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from gpmil.fast import compiled, products

RIDGE = 0.01  # r, of the mean variance in C
TINY, EPS = np.finfo(float).tiny, 1e-12
FEW = 4  # slides that are compared at a time


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
    return Sums(float(len(W)), W.sum(0), products.gram(W))


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
        starts, counts = _slides(bag)
        mean = np.add.reduceat(_forms(V, D, by, share), starts) / counts
        return self.n * (mean - _forms(phi, D, by, share)).clip(min=0.0)

    def without(
        self, n: float, total: Float[np.ndarray, " M"], lost: Float[np.ndarray, "l M"]
    ) -> "Others":
        """All but some patches, n of the sum `total`; the rows `lost` have their second moments."""
        rest = self.n - n
        mean = (self.n * self.mean - total) / rest
        power = (float(self.s.sum()) - float(_squares(lost).sum())) / rest
        b = self.s + rest * ridge(power, mean)
        R = DiagonalLess(1 + self.s, lost, lost[:0])
        return Others(rest, R, DiagonalLess(b, lost, rest**0.5 * mean[None]))


class DiagonalLess:
    """diag(b) - U'U, of which x'(diag(b) - U'U)^-1 x is asked for; U are rows and some more.

    With y = b^-1/2 x, and U scaled likewise, that is y'(I - U'U)^-1 y. Where U has few rows it is
    |y|^2 + |z|^2 with z = L^-1 U y, L L' = I - U U' (Woodbury's formula); else |L^-1 y|^2 with
    L L' = I - U'U, and y stands for L^-1 y.
    """

    def __init__(
        self,
        b: Float[np.ndarray, " M"],
        rows: Float[np.ndarray, "l M"],
        more: Float[np.ndarray, "m M"],
    ):
        self.rows, self.few = rows, len(rows) + len(more) < len(b)
        self.D = 1 / np.sqrt(b)
        self.U = np.concatenate([rows, more])
        self.U *= self.D
        self.root, self.diagonal = _inverse(self.U if self.few else np.ascontiguousarray(self.U.T))

    def scaled(self, X: Float[np.ndarray, "k M"]) -> Float[np.ndarray, "k M"]:
        """y of every row."""
        Y = X * self.D
        return Y if self.few else products.times(Y, self.root.T, triangle=1)

    def beyond(self, Y: Float[np.ndarray, "k M"]) -> Float[np.ndarray, "k l"]:
        """z of rows y."""
        return Y @ self.U.T @ self.root.T if self.few else Y[:, :0]

    def roots(self, X: Float[np.ndarray, "k M"]) -> tuple[np.ndarray, np.ndarray]:
        """y and z of every row."""
        Y = self.scaled(X)
        return Y, self.beyond(Y)

    def powers(self, X: Float[np.ndarray, "k M"]) -> Float[np.ndarray, " k"]:
        """x'(diag(b) - U'U)^-1 x of every row."""
        if self.few and X is self.rows:
            # U (I - U'U)^-1 U' = (I - U U')^-1 - I
            return self.diagonal[: len(X)] - 1
        return sum(map(_squares, self.roots(X)), np.zeros(len(X)))


def _inverse(U: Float[np.ndarray, "l M"]) -> tuple[np.ndarray, Float[np.ndarray, " l"]]:
    """L^-1 in I - U U' = L L', and the diagonal of (L L')^-1."""
    loop = compiled.less_rows()
    if loop is None:
        root = np.linalg.inv(np.linalg.cholesky(np.eye(len(U)) - U @ U.T))
        return root, np.einsum("ij,ij->j", root, root)
    root, diagonal = loop.inverse(U)
    if not np.isfinite(diagonal).all():
        raise np.linalg.LinAlgError("all patches without those of a patient: not positive definite")
    return root, diagonal


class Others(NamedTuple):
    """What a patient is judged by: the patches of all others."""

    n: float
    R: DiagonalLess
    metric: DiagonalLess  # n (C + r I)

    def explained(
        self, own: Float[np.ndarray, " k"], V: Float[np.ndarray, "k M"]
    ) -> Float[np.ndarray, " k"]:
        """e of rows V: w'(I - R^-1) w / k(x, x)."""
        return (_squares(V) - self.R.powers(V)) / own

    def nearest(
        self,
        V: Float[np.ndarray, "k M"],
        bag: Int[np.ndarray, " k"],
        mine: Float[np.ndarray, "b M"],
        phi: Float[np.ndarray, "s M"],
        spreads: Float[np.ndarray, " s"],
        counts: Bool[np.ndarray, " s"],
    ) -> Float[np.ndarray, " b"]:
        """d_b of slides of the rows V with means `mine`, from phi_j and v_j of those that count."""
        starts, sizes = _slides(bag)
        # tr(A S) = mean |y|^2 - |mean y|^2
        power = np.add.reduceat(self.metric.powers(V), starts) / sizes
        own = self.n * (power - self.metric.powers(mine)).clip(min=0.0)
        loop = compiled.less_rows() if self.metric.few else None
        if loop is None:
            return self._nearest(mine, own, phi[counts], spreads[counts])
        D, U, root = self.metric.D, self.metric.U, self.metric.root
        return loop.nearest(mine, own, phi, spreads, counts, self.n, EPS, D, U, root)

    def _nearest(
        self,
        mine: Float[np.ndarray, "b M"],
        own: Float[np.ndarray, " b"],
        phi: Float[np.ndarray, "s M"],
        spreads: Float[np.ndarray, " s"],
    ) -> Float[np.ndarray, " b"]:
        """The least n (|y|^2 + |z|^2) / spread; by |y|^2 alone most are too far already."""
        middles, theirs = self.metric.scaled(mine), self.metric.scaled(phi)
        pairs = zip(middles, own)
        return np.array([self._least(theirs - y, v + spreads) for y, v in pairs])

    def _least(self, apart: Float[np.ndarray, "s M"], spreads: Float[np.ndarray, " s"]) -> float:
        shares, squares = self.n / spreads.clip(min=EPS), _squares(apart)
        at_least, least = shares * squares, np.inf
        order = at_least.argsort()
        for start in range(0, len(order), FEW):
            some = order[start : start + FEW]
            if at_least[some[0]] >= least:
                break
            found = shares[some] * (squares[some] + _squares(self.metric.beyond(apart[some])))
            least = min(least, float(found.min()))
        return least


def _forms(
    X: Float[np.ndarray, "l M"],
    D: Float[np.ndarray, " M"],
    by: Float[np.ndarray, " M"],
    share: float,
) -> Float[np.ndarray, " l"]:
    """x'(diag(D) + share by by') x of every row."""
    loop = compiled.less_rows()
    if loop is not None:
        return loop.forms(X, D, by, share)
    return np.einsum("ij,ij,j->i", X, X, D) + share * (X @ by) ** 2


def _squares(Y: Float[np.ndarray, "k r"]) -> Float[np.ndarray, " k"]:
    return np.vecdot(Y, Y)


def _slides(bag: Int[np.ndarray, " k"]) -> tuple[np.ndarray, np.ndarray]:
    """Where the rows of every slide begin, which lie together, and how many there are."""
    edges = np.concatenate([[0], np.flatnonzero(bag[1:] != bag[:-1]) + 1, [len(bag)]])
    return edges[:-1], edges[1:] - edges[:-1]
