"""Scores smoothed over neighbours, (I + alpha C)^-1 s, C the Laplacian of a bag's neighbour graph.

This is the minimiser of |t - s|^2 + alpha t'C t. The operator is symmetric, so its own transpose in
the gradient. It comes from factors, from Chebyshev steps, or by repeated squaring on a GPU.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import repeat
from typing import Any, NamedTuple

import numpy as np
import scipy.sparse as sp
import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.autograd.function import once_differentiable

from gpmil.coupling.operator import DENSE_LIMIT, Coupling, Edges, Precision, instance_rows
from gpmil.data.graphs import laplacian
from gpmil.models.batches import bag_sizes

Operator = Callable[[Tensor], Tensor]
Smoothing = Callable[[Tensor, Tensor], Tensor]
TOLERANCE = 1e-6  # relative error of approximate smoothing
ROOM = 2**27  # numbers in the factors kept while training: 1 GiB
PADDED = 2**21  # entries of the padded Laplacians of a batch, up to which a GPU multiplies them out


class Smooth(torch.autograd.Function):
    """t = (I + alpha C)^-1 s and its derivatives, from the operator and C alone."""

    @staticmethod
    def forward(
        ctx: Any, s: Tensor, alpha: Tensor, sigma: Operator, laplacian: Operator | None
    ) -> Tensor:
        """Sigma s in float64, given back as s came."""
        t = sigma(s.double())
        ctx.sigma, ctx.laplacian, ctx.alpha = sigma, laplacian, alpha
        ctx.save_for_backward(t)
        return t.to(s)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """g -> Sigma g for s, and -g' Sigma C Sigma s for alpha."""
        (t,) = ctx.saved_tensors
        back = ctx.sigma(grad.double())
        slope = None
        if ctx.needs_input_grad[1]:
            slope = -(back @ ctx.laplacian(t)).to(ctx.alpha)
        return back.to(grad), slope, None, None


def chebyshev(
    alpha: float,
    laplacian: Operator,
    largest: float,
    s: Float[Tensor, " n"],
    tolerance: float = TOLERANCE,
) -> Float[Tensor, " n"]:
    """(I + alpha C)^-1 s by Chebyshev iteration; `largest` bounds the eigenvalues of C.

    P = I + alpha C has its eigenvalues in [1, 1 + alpha largest] = [theta - delta, theta + delta];
    after k steps the error is at most |t| / T_k(theta / delta), which sets k beforehand.
    Every step is one product with the sparse C.
    """
    delta = alpha * largest / 2
    theta = 1 + delta
    if delta == 0:
        return s.clone()
    steps = math.ceil(math.acosh(1 / tolerance) / math.acosh(theta / delta))
    rho = delta / theta
    t, residual = torch.zeros_like(s), s
    step = residual / theta
    for _ in range(steps):
        t = t + step
        residual = torch.sub(residual - step, laplacian(step), alpha=alpha)
        # the three-term recurrence of T_k: rho_{k+1} = 1 / (2 theta / delta - rho_k)
        following = 1 / (2 * theta / delta - rho)
        step = torch.add(following * rho * step, residual, alpha=2 * following / delta)
        rho = following
    return t


def squared(
    alpha: float, C: Float[Tensor, "b p p"], largest: float, tolerance: float = TOLERANCE
) -> Float[Tensor, "b p p"]:
    """(I + alpha C)^-1 of many small Laplacians by repeated squaring, all of them at once.

    With theta = 1 + alpha largest / 2 the norm of E = I - (I + alpha C) / theta is at most
    rho = 1 - 1 / theta, and (I + alpha C)^-1 = sum_j E^j / theta, where
    sum_{j < 2^k} E^j = (I + E)(I + E^2)(I + E^4)... with k factors, short of the whole by a
    relative rho^(2^k). A few large products: on a GPU less than many with a vector.
    """
    theta = 1 + alpha * largest / 2
    rho = 1 - 1 / theta
    E = -alpha / theta * C
    E.diagonal(dim1=1, dim2=2).add_(rho)
    sigma = E / theta
    sigma.diagonal(dim1=1, dim2=2).add_(1 / theta)
    rate = -math.log1p(-1 / theta) if theta > 1 else math.inf  # -log rho
    n_factors = math.ceil(math.log2(-math.log(tolerance) / rate)) if rate < math.inf else 1
    for _ in range(n_factors - 1):
        E = torch.bmm(E, E)
        sigma = torch.baddbmm(sigma, sigma, E)
    return sigma


class Graphs:
    """The neighbour graphs of a cohort, as smoothing operators for batches of its bags.

    `exact` factors I + alpha C (see `gpmil.coupling`); where alpha stays the same (`fixed`) the
    factors are kept for the next epochs. Otherwise Chebyshev steps: no factor, and the cost of
    some products with the sparse C; small bags on a GPU by repeated squaring.
    """

    def __init__(
        self,
        adjacency: sp.csr_array,
        offsets: Int[np.ndarray, " edges"],
        device: torch.device,
        exact: bool = True,
        fixed: bool = False,
    ):
        self.adjacency, self.offsets, self.device = adjacency, offsets, device
        self.exact, self.fixed = exact, fixed
        self.edge_offsets = adjacency.indptr[offsets].astype(np.int64)  # a bag's edges lie together
        self.degree = np.asarray(adjacency.sum(axis=1)).ravel()
        self.C: sp.csr_array | None = None
        if device.type == "cuda" and not exact:
            self.C = laplacian(adjacency)
        self.kept: dict[int, Coupling] = {}
        self.room = ROOM

    def batches(self, parts: Sequence[np.ndarray]) -> Iterator[Smoothing]:
        """(s, alpha) -> (I + alpha C_b)^-1 s_b for each part of the bags."""
        for bags, padded in zip(parts, self._side_by_side(parts), strict=True):
            yield partial(self._smooth, bags, padded)

    def smooth(
        self, s: Float[Tensor, " n"], alpha: Float[Tensor, ""], bags: Int[np.ndarray, " b"]
    ) -> Float[Tensor, " n"]:
        """(I + alpha C_b)^-1 s_b of some bags, differentiable in s and, unless fixed, alpha."""
        return next(self.batches([bags]))(s, alpha)

    def _smooth(
        self, bags: Int[np.ndarray, " b"], padded: "Padded | None", s: Tensor, alpha: Tensor
    ) -> Tensor:
        strength = float(alpha.detach())
        if self.exact and self.fixed:
            return Smooth.apply(s, alpha, self._by_kept_factors(bags, strength), None)
        # Gershgorin: no eigenvalue of C exceeds twice the largest degree
        largest = 2 * float(self.degree[instance_rows(self.offsets, bags)].max())
        if padded is not None:
            C = padded.laplacians()
            inverse = squared(strength, C, largest)
            return Smooth.apply(s, alpha, padded.operator(inverse), padded.operator(C))
        block = self._block(bags)
        product = _product(block, self.device)
        if self.exact:
            offsets = np.concatenate([[0], np.cumsum(bag_sizes(self.offsets, bags))])
            factors = Coupling(block, offsets, strength, self.device)
            return Smooth.apply(s, alpha, factors.apply, product)
        return Smooth.apply(s, alpha, partial(chebyshev, strength, product, largest), product)

    def _side_by_side(self, parts: Sequence[np.ndarray]) -> Iterator["Padded | None"]:
        """The bags of each part padded to one size; None where they are too large for that."""
        if self.C is None:
            yield from repeat(None, len(parts))
            return
        bags, counts = np.concatenate(parts), np.array([len(part) for part in parts])
        sizes, first = bag_sizes(self.offsets, bags), np.cumsum(counts) - counts
        longest = np.maximum.reduceat(sizes, first)
        p = np.repeat(longest, counts)
        rows = instance_rows(self.offsets, bags)
        number = np.arange(len(rows)) - np.repeat(np.cumsum(sizes) - sizes, sizes)  # in the bag
        of_bag = np.arange(len(bags)) - np.repeat(first, counts)  # in the part
        place = np.repeat(of_bag * p, sizes) + number
        # the entries of C in the rows of a bag lie together, their columns are of the same bag
        start = self.C.indptr.astype(np.int64)
        entries, n_entries = (f(start[self.offsets], bags) for f in (instance_rows, bag_sizes))
        row = np.repeat(place, start[rows + 1] - start[rows])
        column = self.C.indices[entries] - np.repeat(self.offsets[bags], n_entries)
        where = row * np.repeat(p, n_entries) + column
        of_rows, of_entries = (np.add.reduceat(n, first).tolist() for n in (sizes, n_entries))
        pieces = zip(
            self._moved(place, of_rows),
            self._moved(where, of_entries),
            self._moved(self.C.data[entries], of_entries),
            strict=True,
        )
        for b, size, piece in zip(counts.tolist(), longest.tolist(), pieces, strict=True):
            yield Padded((b, size), *piece) if b * size**2 <= PADDED else None

    def _moved(self, array: np.ndarray, counts: list[int]) -> tuple[Tensor, ...]:
        return torch.from_numpy(array).to(self.device).split(counts)

    def _block(self, bags: Int[np.ndarray, " b"]) -> sp.csr_array:
        """The adjacency of some bags alone: their edges, columns moved along with their rows."""
        rows, edges = (instance_rows(o, bags) for o in (self.offsets, self.edge_offsets))
        sizes, n_edges = (bag_sizes(o, bags) for o in (self.offsets, self.edge_offsets))
        shift = np.cumsum(sizes) - sizes - self.offsets[bags]
        columns = self.adjacency.indices[edges] + np.repeat(shift, n_edges)
        first, data = self.adjacency.indptr, self.adjacency.data[edges]
        starts = np.concatenate([[0], np.cumsum(first[rows + 1] - first[rows])])
        return sp.csr_array((data, columns, starts), shape=(len(rows),) * 2)

    def _by_kept_factors(self, bags: Int[np.ndarray, " b"], alpha: float) -> Operator:
        factors = [self._factor(int(b), alpha) for b in bags]
        sizes = bag_sizes(self.offsets, bags).tolist()

        def sigma(s: Tensor) -> Tensor:
            pieces = zip(factors, s.split(sizes), strict=True)
            return torch.cat([factor.apply(piece) for factor, piece in pieces])

        return sigma

    def _factor(self, bag: int, alpha: float) -> Coupling:
        if bag in self.kept:
            return self.kept[bag]
        start, stop = self.offsets[bag : bag + 2].tolist()
        own = sp.csr_array(self.adjacency[start:stop, start:stop])
        factor = Coupling(own, np.array([0, stop - start]), alpha, self.device)
        # a dense inverse, or two bands about as wide as the slide
        cost = (stop - start) * min(stop - start, 2 * DENSE_LIMIT)
        if cost <= self.room:
            self.kept[bag] = factor
            self.room -= cost
        return factor


def _product(adjacency: sp.csr_array, device: torch.device) -> Operator:
    """x -> C x = diag(A 1) x - A x."""
    edges = Edges.of(adjacency, device)
    A = Precision.of(edges, slice(0, adjacency.shape[0]), 1.0).neighbours
    return lambda x: torch.addmv(edges.degree * x, A, x, alpha=-1)


class Padded(NamedTuple):
    """The Laplacians of some bags as matrices, padded with zeros to one size."""

    shape: tuple[int, int]  # b bags of p places
    place: Int[Tensor, " n"]  # of every instance among the b x p
    where: Int[Tensor, " e"]  # of the entries that are not zero among the b x p x p
    value: Float[Tensor, " e"]

    def laplacians(self) -> Float[Tensor, "b p p"]:
        """C of every bag."""
        b, p = self.shape
        return self.value.new_zeros(b * p * p).index_copy_(0, self.where, self.value).view(b, p, p)

    def operator(self, matrix: Float[Tensor, "b p p"]) -> Operator:
        """x -> M_b x_b, bag by bag."""
        b, p = self.shape

        def apply(x: Tensor) -> Tensor:
            apart = x.new_zeros(b * p).index_copy_(0, self.place, x).view(b, p, 1)
            return torch.bmm(matrix, apart).view(-1).index_select(0, self.place)

        return apply
