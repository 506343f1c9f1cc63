"""Loops compiled for CPUs, and when they are used: a pass over the bags, EP, slide effects.

The plain pass (pieces.Chunk) reads H twice, for mu = c + H w and for H'x, with some thirty vector
operations between them. In the loop of passes.py a bag is finished before the next one is
begun: its rows of H are still in the cache when they are needed again, and nothing is written but
the M sums.

They need Numba (the extra `fast`) and are compiled at their first use, some seconds
once; Numba keeps the result beside the package or in the user's cache. Everything here returns
None where it does not apply: no Numba, too little work to be worth it, another device, numbers
outside the range of the loop. The caller goes the plain way then.
"""

import functools
import itertools
import logging
import operator
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from gpmil import extras
from gpmil.coupling.operator import Precision
from gpmil.fast import fused_effect, fused_pass, products
from gpmil.fast.lanes import in_lanes

logger = logging.getLogger("gpmil")
WORTH = 2**18  # numbers in H from which the loop is used: below, the plain pass takes a millisecond
RUNS = 8  # of bags, side by side: their number decides the order in which is added
SIDE_BY_SIDE = 2**21  # numbers in H from which that is worth the threads' meeting
WORTH_PATCHES = 2**3  # patches from which sums over a slide effect are compiled

Sums = tuple[float, Float[Tensor, " M"]]


class Loop(NamedTuple):
    """Some whole bags, as the compiled pass takes them."""

    H: Float[Tensor, "n M"]
    sigma: Float[Tensor, " n"]
    offsets: Int[Tensor, " b1"]
    positive: Bool[Tensor, " b"]
    precision: Precision | None  # P; None where lambda = 0
    largest_first: Int[Tensor, " b"] | None = None  # the bags in this order, on a GPU

    def pull(self, w: Float[Tensor, " M"], c: float) -> Sums | None:
        """sum_b log Z_b and W'(E - c) at mu = c + H w, multiplied in H's own dtype."""
        return self._one_pass(w.to(self.H.dtype), c, want_gradient=False)

    def rise(self, w: Float[Tensor, " M"], c: float) -> Sums | None:
        """sum_b log Z_b and its gradient in w, multiplied in float64."""
        on_gpu = self._on_gpu()
        if on_gpu is not None:
            return on_gpu.rise(w, c)
        return self._one_pass(w.double(), c, want_gradient=True)

    def four_slopes(self, w: Float[Tensor, "4 M"], c: float) -> Float[Tensor, " M"] | None:
        """The gradients of `rise` at four w, added up."""
        if not self._serves():
            return None
        bags = (x.numpy() for x in self[:4])
        total, in_range = kernels().passes.four_slopes(*bags, w.contiguous().numpy(), c)
        return torch.from_numpy(total) if in_range else None

    def bound(
        self, w: Float[Tensor, " M"], c: float
    ) -> tuple[float, Float[Tensor, " M"], Float[Tensor, "M M"]] | None:
        """As `rise`, and minus the Hessian, on a GPU."""
        on_gpu = self._on_gpu()
        return None if on_gpu is None else on_gpu.bound(w, c)

    def _on_gpu(self) -> fused_pass.Pass | None:
        order = self.largest_first
        if order is None or not fused_pass.available() or not self.H.is_contiguous():
            return None
        return fused_pass.Pass(self.H, self.sigma, self.offsets, self.positive, order)

    def sweeps(
        self, chol_R: Float[Tensor, "M M"], w: Float[Tensor, " M"], c: float, count: int
    ) -> tuple[Float[Tensor, " M"], list[float]] | None:
        """w after some sweeps w <- R^-1 W'(E - c), and the bound before each of them."""
        if not self._serves():
            return None
        L = chol_R.contiguous().numpy()
        end, bound, in_range = kernels().passes.sweeps(*self._arrays(), L, w.numpy(), c, count)
        return (torch.from_numpy(end), bound.tolist()) if in_range else None

    def _serves(self) -> bool:
        return passes_over(self.H)

    def _one_pass(self, w: Tensor, c: float, want_gradient: bool) -> Sums | None:
        if not self._serves():
            return None
        log_z, total, in_range = kernels().passes.one_pass(
            *self._arrays(), w.numpy(), c, want_gradient
        )
        return (log_z, torch.from_numpy(total)) if in_range else None

    def _arrays(self) -> tuple[np.ndarray, ...]:
        """The bags, and P as its diagonal, the start of every row, the columns, their weights."""
        bags = tuple(x.numpy() for x in self[:4])
        if self.precision is None:
            n = len(self.sigma)
            return *bags, np.ones(n), np.zeros(n + 1, np.int64), np.zeros(0, np.int64), np.zeros(0)
        diagonal, near = self.precision
        rows = (diagonal, near.crow_indices(), near.col_indices(), near.values())
        return *bags, *(part.numpy() for part in rows)


def passes_over(H: Float[Tensor, "n M"]) -> bool:
    """Whether a pass over these rows is compiled."""
    large = H.numel() >= WORTH
    return large and not H.is_cuda and H.is_contiguous() and kernels() is not None


def rise_with_effect(
    H: Float[Tensor, "n M"], sigma: Float[Tensor, " n"], offsets: Int[Tensor, " b1"],
    positive: Bool[Tensor, " b"], known: Int[Tensor, " n"] | None, w: Float[Tensor, " M"], c: float,
    tau: float, rule: tuple[float, ...], near_one: float,
) -> tuple[float, Float[Tensor, " M"], Float[Tensor, " n"], Bool[Tensor, " b"]]:  # fmt: skip
    """sum_b log Z_b with a slide effect, its gradient in w, mu, and which bags are in both."""
    h, s, starts, signs, at = _plain_arrays(H, sigma, offsets, positive, w.double())
    told = np.zeros(0, np.int64) if known is None else _plain_arrays(known.long())[0]
    settings = at, c, float(tau), tuple(float(x) for x in rule), near_one
    if h.size < SIDE_BY_SIDE:
        log_z, *found = kernels().effect_pass.rise(h, s, starts, signs, told, *settings)
        return log_z, *(torch.from_numpy(x) for x in found)

    def one_lane(runs: Sequence[slice]) -> list[tuple]:
        (run,) = runs
        rows = slice(starts[run.start], starts[run.stop])
        own = starts[run.start : run.stop + 1] - rows.start
        known_here = told[rows] if len(told) else told
        bags = h[rows], s[rows], own, signs[run], known_here
        return [kernels().effect_pass.rise(*bags, *settings)]

    runs = _runs(starts, RUNS)
    log_z, gradients, mu, served = zip(*in_lanes(runs, one_lane, operator.add, most=RUNS))
    joined = sum(gradients[1:], gradients[0]), np.concatenate(mu), np.concatenate(served)
    return sum(log_z), *(torch.from_numpy(x) for x in joined)


def _runs(starts: np.ndarray, most: int) -> list[slice]:
    """Consecutive bags of about as many rows in each run.

    >>> _runs(np.array([0, 5, 6, 9, 12]), 2)
    [slice(0, 2, None), slice(2, 4, None)]
    """
    ends = np.searchsorted(starts, np.linspace(0, starts[-1], most + 1)[1:-1])
    edges = np.unique([0, *ends, len(starts) - 1]).tolist()
    return [slice(a, b) for a, b in itertools.pairwise(edges)]


def sites() -> Any:
    """The module with the vector arithmetic of EP; None where torch's is to be used."""
    return None if kernels() is None else kernels().sites


def pairs() -> Any:
    """The module with the RBF kernel; None as above."""
    return None if kernels() is None else kernels().pairs


def smoothed() -> Any:
    """The module that smooths bags where they stay; None as above, or where tiles are no gain."""
    return None if products.tiled() is None or kernels() is None else kernels().smoothed


def centres() -> Any:
    """The module with k-means; None as above."""
    return None if kernels() is None else kernels().centres


def columns() -> Any:
    """The module with sums over columns of features; None as above."""
    return None if kernels() is None else kernels().columns


def less_rows() -> Any:
    """The module with inverses of a few rows that are left out; None as above."""
    return None if kernels() is None else kernels().less_rows


def less_bag() -> Any:
    """The module with covariances of bags left out; None as above, or where tiles are no gain."""
    return None if products.tiled() is None or kernels() is None else kernels().less_bag


def over_effect() -> Any:
    """The module with the sum of orthant probabilities over a slide effect; None as above."""
    return None if kernels() is None else kernels().over_effect


def sums_effects(among: int, device: torch.device) -> bool:
    """Whether sums over a slide effect are compiled for bags out of `among` patches.

    Some of a large cohort do not go another way than all of it. Derivatives of a GPU's sums are
    those of the loops of a CPU.
    """
    if device.type == "cuda":
        return fused_pass.available() and not (torch.is_grad_enabled() and kernels() is None)
    return among >= WORTH_PATCHES and device.type == "cpu" and kernels() is not None


def effect_sums(
    mu: Float[Tensor, " n"],
    sigma: Float[Tensor, " n"],
    offsets: Int[Tensor, " b1"],
    tau: Float[Tensor, ""],
    rule: tuple[float, ...],
    rare: bool,
    full: bool,
) -> list[Tensor]:
    """Sums over a slide effect: nodes, sums per bag and per patch, and which bags are served."""
    if mu.is_cuda:
        return fused_effect.sums(mu, sigma, offsets, tau, rule, rare, full)
    numbers = tuple(float(x) for x in rule)
    bags = _plain_arrays(mu, sigma, offsets)
    found = kernels().effect.sums(*bags, float(tau), numbers, rare, full)
    return [torch.from_numpy(x) for x in found]


def effect_adjoints(
    mu: Float[Tensor, " n"],
    sigma: Float[Tensor, " n"],
    offsets: Int[Tensor, " b1"],
    tau: Float[Tensor, ""],
    nodes: Float[Tensor, "k b"],
    served: Bool[Tensor, " b"],
    rare: bool,
    by_bag: Float[Tensor, "s b"],
    by_row: Float[Tensor, "r n"],
) -> tuple[Float[Tensor, " n"], Float[Tensor, " n"], Float[Tensor, ""]]:
    """Adjoints of mu, sigma and tau from those of the sums."""
    bags, sums = _plain_arrays(mu, sigma, offsets), _plain_arrays(by_bag, by_row)
    at = _plain_arrays(nodes, served)
    *found, by_tau = kernels().effect_adjoint.adjoints(*bags, float(tau), *at, rare, *sums)
    of_mu, of_sigma = (torch.from_numpy(x).to(mu.device) for x in found)
    return of_mu, of_sigma, tau.new_tensor(by_tau)


def _plain_arrays(*tensors: Tensor) -> list[np.ndarray]:
    return [x.detach().cpu().contiguous().numpy() for x in tensors]


@functools.cache
def kernels() -> Any:
    """The package of loops; None without Numba, or with one that cannot be used here."""
    try:
        from gpmil.fast import (
            centres,
            columns,
            effect,
            effect_adjoint,
            effect_pass,
            less_bag,
            less_rows,
            over_effect,
            pairs,
            passes,
            sites,
            smoothed,
        )
    except (ImportError, RuntimeError) as error:  # RuntimeError: no place for its cache
        logger.info(
            "passes over the bags are not compiled, which costs up to half of the speed (%s): %s",
            error, extras.install("fast"),
        )  # fmt: skip
        return None
    return SimpleNamespace(
        centres=centres,
        columns=columns,
        effect=effect,
        effect_adjoint=effect_adjoint,
        effect_pass=effect_pass,
        less_bag=less_bag,
        less_rows=less_rows,
        over_effect=over_effect,
        pairs=pairs,
        passes=passes,
        sites=sites,
        smoothed=smoothed,
    )
