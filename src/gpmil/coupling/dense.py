"""Small bags: P and Sigma as dense matrices side by side, padded with unit rows to one length."""

import functools
from typing import Any, NamedTuple

import numpy as np
import scipy.sparse as sp
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from gpmil.coupling.part import Halved, Kernel
from gpmil.coupling.precision import Edges, Offsets, bags_block, instance_rows, sent

WIDEST = 64  # entries in a row of the envelope, on average: above it LAPACK is quicker
NARROW = 8  # columns below which a product with Sigma is quicker than the envelope


class Dense:
    """Small bags at once: Sigma as an explicit inverse, padded with unit rows to one length.

    P has its eigenvalues in [1, 1 + 2 lambda max degree], so the explicit inverse is as accurate
    as a solve, and applying it is one batched product.
    """

    def __init__(
        self,
        bags: Int[np.ndarray, " b"],
        rows: Int[Tensor, " n"],
        mask: Bool[Tensor, "b p"],
        sigma: Float[Tensor, "b p p"],
        logdet: Float[Tensor, " b"],
        factor: "Factor | None" = None,
    ):
        self.bags, self.rows, self.mask = bags, rows, mask
        self.sigma, self._logdet, self._factor = sigma, logdet, factor

    @classmethod
    def of(
        cls, edges: Edges, offsets: Offsets, bags: Int[np.ndarray, " b"], strength: float,
        entries: int | None = None,
    ) -> "Dense":  # fmt: skip
        """Of some bags of a cohort, where its edges are; `entries` is their number, if known."""
        places = Places.of(edges, offsets, bags)
        if strength == 0:
            return cls(bags, places.rows, places.mask, *_uncoupled(places))
        factor = Factor.of(edges, places, strength)
        if factor is None:
            found = inverted(places.precision(edges, strength, entries))
        else:
            found = factor.inverted(*places.mask.shape)
        made = cls(bags, places.rows, places.mask, *found, factor)
        made._place = places.place
        return made

    def pad(self, x: Float[Tensor, "n k"]) -> Float[Tensor, "b p k"]:
        """The bags side by side, zeros where a bag is shorter."""
        out = x.new_zeros(self.mask.numel(), x.shape[1]).index_copy_(0, self._place, x)
        return out.view(*self.mask.shape, -1)

    @functools.cached_property
    def _place(self) -> Int[Tensor, " n"]:
        """Of every row among the b x p padded ones: a mask would make a GPU wait each time."""
        return self.mask.view(-1).nonzero()[:, 0]

    def _taken(self, x: Float[Tensor, "b p ..."]) -> Float[Tensor, "n ..."]:
        """The rows of the bags alone."""
        return x.flatten(0, 1).index_select(0, self._place)

    def apply(self, x: Float[Tensor, "n k"]) -> Float[Tensor, "n k"]:
        """Sigma x: from the envelope, or one batched product."""
        halved = self.halved(x)
        return self._taken(self.sigma @ self.pad(x)) if halved is None else halved[1]

    def halved(self, x: Float[Tensor, "n k"]) -> Halved | None:
        """V with V'V = x'Sigma x, and Sigma x."""
        factor = self.factor_for(x)
        return None if factor is None else factor.smooth(x)

    def factor_for(self, x: Float[Tensor, "n k"]) -> "Factor | None":
        """L, where loops over it are how x is smoothed."""
        if self._factor is None or x.requires_grad or x.dtype != torch.float64:
            return None
        # columns side by side, or the loops have nothing to do at a time
        return self._factor if x.is_contiguous() and x.shape[1] >= NARROW else None

    def congruence(self, S: Float[Tensor, "b p p"]) -> Float[Tensor, "b p p"]:
        """Sigma S Sigma of symmetric matrices, which may be lost; the padding means nothing."""
        if self._factor is None or S.requires_grad or not S.is_contiguous():
            return self.sigma @ S @ self.sigma
        self._factor.congruence(S)
        return S

    def diagonal(self) -> Float[Tensor, " n"]:
        """diag Sigma."""
        return self._taken(self.sigma.diagonal(dim1=-2, dim2=-1))

    def logdet(self) -> Float[Tensor, " b"]:
        """log|Sigma_b|."""
        return self._logdet

    def congruence_diagonal(self, x: Float[Tensor, "n d"], kernel: Kernel) -> Float[Tensor, " n"]:
        """(Sigma K Sigma)_ii = sum_j (Sigma K)_ij Sigma_ij; padding has Sigma_ij = 0."""
        padded = self.pad(x)
        return ((self.sigma @ kernel(padded, padded)) * self.sigma).sum(-1)[self.mask]

    def trace(self, x: Float[Tensor, "n d"], kernel: Kernel, every: int = 1) -> Float[Tensor, ""]:
        """tr(Sigma K) = sum_ij Sigma_ij K_ij, padding left out."""
        if every == 1 and not x.is_cuda:
            return x.new_zeros(()) + kernel.against(x, self.mask.sum(1).tolist(), self.sigma)
        padded, taken = self.pad(x), self.mask[:, ::every]
        column = (self.sigma[..., ::every] * kernel(padded, padded[:, ::every])).sum(-2)
        # Sigma_ij = 0 for i in the padding and j not
        total = torch.where(taken, column, 0.0).sum(1)
        return (total * self.mask.sum(1) / taken.sum(1)).sum()


def _uncoupled(places: "Places") -> tuple[Float[Tensor, "b p p"], Float[Tensor, " b"]]:
    """Sigma = I, and log|Sigma| = 0."""
    b, p = places.mask.shape
    one = torch.eye(p, dtype=torch.float64, device=places.mask.device)
    return one.repeat(b, 1, 1), one.new_zeros(b)


def inverted(
    precision: Float[Tensor, "b p p"],
) -> tuple[Float[Tensor, "b p p"], Float[Tensor, " b"]]:
    """Sigma = P^-1, and log|Sigma|."""
    factor = torch.linalg.cholesky_ex(precision).L  # nothing to check: all eigenvalues >= 1
    # log|Sigma_b| = -log|P_b|
    logdet = -2 * factor.diagonal(dim1=-2, dim2=-1).log().sum(-1)
    if not precision.is_cuda:
        return torch.cholesky_inverse(factor), logdet
    # of many matrices on a GPU in two thirds of the time: P^-1 = L^-T L^-1
    eye = torch.eye(precision.shape[-1], dtype=precision.dtype, device=precision.device)
    root = torch.linalg.solve_triangular(factor, eye, upper=False)
    return root.mT @ root, logdet


def padded_precision(
    adjacency: sp.csr_array, offsets: Offsets, bags: Int[np.ndarray, " b"], strength: float
) -> tuple[Int[np.ndarray, " n"], Bool[Tensor, "b p"], Float[Tensor, "b p p"]]:
    """Rows of some bags, which of the padded places they fill, and P with unit rows elsewhere."""
    rows = instance_rows(offsets, bags)
    # their edges alone: those of the whole cohort would be gone through again for every batch
    own = Edges.of(bags_block(adjacency, offsets, bags, rows), "cpu")
    starts = np.concatenate([[0], np.cumsum(offsets[bags + 1] - offsets[bags])])
    places = Places.of(own, starts, np.arange(len(bags)))
    return rows, places.mask, places.precision(own, strength)


class Places(NamedTuple):
    """Some bags side by side, on the device that has the edges."""

    first: Int[Tensor, " b"]  # the row that a bag begins with
    size: Int[Tensor, " b"]
    mask: Bool[Tensor, "b p"]  # which of the padded places are filled
    rows: Int[Tensor, " n"]
    place: Int[Tensor, " n"]  # of every row among the b x p padded ones

    @classmethod
    def of(cls, edges: Edges, offsets: Offsets, bags: Int[np.ndarray, " b"]) -> "Places":
        """Padded to the size of the largest."""
        device, sizes = edges.start.device, offsets[bags + 1] - offsets[bags]
        first, size = sent(np.stack([offsets[bags], sizes]), device)
        p, n = int(sizes.max()), int(sizes.sum())
        mask = torch.arange(p, device=device) < size[:, None]
        # without a look at the mask, for which a GPU would be waited for
        here, before = torch.arange(len(bags), device=device), size.cumsum(0) - size
        bag = here.repeat_interleave(size, output_size=n)
        within = torch.arange(n, device=device) - before[bag]
        return cls(first, size, mask, first[bag] + within, bag * p + within)

    def precision(
        self, edges: Edges, strength: float, entries: int | None = None
    ) -> Float[Tensor, "b p p"]:
        """P = I + lambda (diag(A 1) - A), the padding with unit rows."""
        (b, p), device, rows = self.mask.shape, edges.start.device, self.rows
        P = torch.zeros(b * p, p, dtype=torch.float64, device=device)
        count = edges.start[rows + 1] - edges.start[rows]
        edge = torch.arange(int(count.sum()) if entries is None else entries, device=device)
        before = edges.start[rows] - (count.cumsum(0) - count)
        edge += before.repeat_interleave(count, output_size=len(edge))
        of = self.place.repeat_interleave(count, output_size=len(edge))
        P[of, edges.column[edge] - self.first[of // p]] = -strength * edges.weight[edge]
        P = P.view(b, p, p)
        diagonal = torch.ones(b * p, dtype=torch.float64, device=device)
        diagonal.index_add_(0, self.place, strength * edges.degree[rows])
        P.diagonal(dim1=-2, dim2=-1).add_(diagonal.view(b, p))
        return P


# --- Compiled -------------------------------------------------------------------------------------


class Factor(NamedTuple):
    """L in P = L L' of some bags, by compiled loops (envelope.py)."""

    low: Int[np.ndarray, " n"]  # the first column of every row, within its bag
    at: Int[np.ndarray, " n1"]  # where the row begins in L
    L: Float[np.ndarray, " e"]
    size: Int[np.ndarray, " b"]  # of the bags

    @classmethod
    def of(cls, edges: Edges, places: Places, strength: float) -> "Factor | None":
        """None without Numba, on a GPU, or where rows are wide."""
        loops = None if edges.start.is_cuda else _loops()
        if loops is None:
            return None
        graph, bags = [x.numpy() for x in edges], [x.numpy() for x in places[:2]]
        entries = loops.entries(*graph[:2], *bags)
        if entries > WIDEST * len(places.rows):
            return None
        low, at, L = loops.factor(*graph, *bags, strength, entries)
        return cls(low, at, L, bags[1])

    def inverted(self, b: int, p: int) -> tuple[Float[Tensor, "b p p"], Float[Tensor, " b"]]:
        """Sigma padded to p places, and log|Sigma|."""
        # where torch has it: MKL multiplies what begins between two lines to other last digits
        sigma = torch.zeros(b, p, p, dtype=torch.float64)
        logdet = _loops().invert(*self, sigma.numpy())
        return sigma, torch.from_numpy(logdet)

    def congruence(self, S: Float[Tensor, "b p p"]) -> None:
        """Sigma S Sigma in place."""
        _loops().congruence(*self, S.numpy())

    def smooth(self, x: Float[Tensor, "n k"]) -> Halved:
        """L^-1 x and Sigma x."""
        V, H = x.clone(), torch.empty_like(x)
        _loops().smooth(*self, V.numpy(), H.numpy())
        return V, H


@functools.cache
def _loops() -> Any:
    """The module of loops; None where Numba cannot be used (fast/compiled.py says so)."""
    try:
        from gpmil.coupling import envelope
    except (ImportError, RuntimeError):  # RuntimeError: no place for its cache
        return None
    return envelope
