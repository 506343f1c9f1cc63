"""What inference asks of a bag likelihood: log Z_b as a function of mu_b, with its derivatives.

A cohort's likelihood is prod_b Z_b(mu_b), mu_b = c + H_b w, where Z_b is the probability of what
is known of bag b under m_b ~ N(mu_b, Sigma_b). `Likelihood` is the one place where inference
meets it: independent.py and coupled.py have the two that there are, and docs/extending.md adds
another.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import scipy.sparse as sp
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from gpmil.coupling import operator as coupling
from gpmil.fast import compiled, products

# (W, H) -> W'X H for some X of n x n with a block per bag, X itself never formed
Product = Callable[[Float[Tensor, "n M"], Float[Tensor, "n M"]], Float[Tensor, "M M"]]
MANY = 32  # rows of a bag, on average, from which its own product is quicker on a CPU
LogZ = float | Tensor  # sum_b log Z_b: a number, or a tensor without dimensions


@dataclass(frozen=True)
class Group:
    """Some whole bags as a likelihood is told of them, the rows of one bag after the other."""

    sigma: Float[Tensor, " n"]  # square roots of the diagonal of Sigma
    offsets: Int[Tensor, " b1"]
    positive: Bool[Tensor, " b"]
    precision: coupling.Precision | None  # P = Sigma^-1; None where Sigma = I
    rows: slice  # of the cohort; for what a likelihood knows beside the labels of bags
    strength: float = 0.0
    graph: sp.csr_array | None = None  # the neighbours of the whole cohort
    effect: float | Float[Tensor, ""] = 0.0  # tau, the deviation of what a bag's instances share
    known: Int[Tensor, " n"] | None = None  # labels of instances: 0, 1, or -1 where unknown
    residual: Float[Tensor, " n"] | None = None  # diag(Kxx - W W'), where it is asked for

    @functools.cached_property
    def row(self) -> Int[Tensor, " n"]:
        """The bag of every instance."""
        sizes = self.offsets.diff()
        return torch.arange(len(sizes), device=sizes.device).repeat_interleave(sizes)

    @functools.cached_property
    def largest_first(self) -> Int[Tensor, " b"]:
        """The bags in the order of their sizes."""
        return self.offsets.diff().argsort(descending=True, stable=True)

    def some(self, bags: Bool[Tensor, " b"]) -> tuple["Group", Int[Tensor, " k"]]:
        """Some of the bags, as if patches had no neighbours, and where their rows are."""
        rows = bags[self.row].nonzero()[:, 0]
        sizes = self.offsets.diff()[bags]
        offsets = torch.cat([sizes.new_zeros(1), sizes.cumsum(0)])
        known = None if self.known is None else self.known[rows]
        own = (self.sigma[rows], offsets, self.positive[bags], None, slice(0, len(rows)))
        return Group(*own, effect=self.effect, known=known), rows

    def unsmooth(self, x: Tensor) -> Tensor:
        """(Sigma + tau^2 11')^-1 x = P x - k 1 1'x, k = tau^2 / (1 + tau^2 n): P 1 = 1."""
        out = x if self.precision is None else self.precision.apply(x)
        if not has_effect(self.effect):
            return out
        totals = x.new_zeros(len(self.positive), *x.shape[1:]).index_add_(0, self.row, x)
        share = downdate(self.effect, self.offsets.diff())
        return out - (share.view(-1, *(1 for _ in x.shape[1:])) * totals)[self.row]


def has_effect(effect: float | Float[Tensor, ""]) -> bool:
    """Whether tau is there; a tensor is, whatever its value: its gradient is wanted."""
    return isinstance(effect, Tensor) or effect != 0


def downdate(effect: float | Float[Tensor, ""], sizes: Int[Tensor, " b"]) -> Float[Tensor, " b"]:
    """k = tau^2 / (1 + tau^2 n): Sigma (Sigma + tau^2 11')^-1 Sigma = Sigma - k 11'."""
    return effect**2 / (1 + effect**2 * sizes.double())


@runtime_checkable
class Traits(Protocol):
    """What a fit must know of a likelihood, wherever the bags lie."""

    # Sigma times the gradient of log Z is E - mu: the paper's fixed point is the maximum then
    moments_are_gradient: bool = False
    leaves_out: bool = False  # whether leave_out.py can take a bag out of the fit
    roughness: float = 0.0  # by how much log Z may jump where it should not, rounding aside

    @property
    def unsettled(self) -> int:
        """Bags whose numbers at the last mu are rough."""
        return 0


@runtime_checkable
class Likelihood(Traits, Protocol):
    """sum_b log Z_b of a group, and its derivatives in mu (n,).

    The direct solver needs `curvature` alone. What a likelihood leaves out is refused in words.
    """

    group: Group

    def gradient(self, mu: Float[Tensor, " n"]) -> tuple[Float[Tensor, " n"], LogZ]:
        """gamma = d log Z / dmu, and log Z."""
        return self.curvature(mu)[:2]

    def curvature(self, mu: Float[Tensor, " n"]) -> tuple[Float[Tensor, " n"], LogZ, Product]:
        """gamma, log Z, and A = -d2 log Z / dmu2."""

    def expectations(self, mu: Float[Tensor, " n"]) -> tuple[Float[Tensor, " n"], LogZ]:
        """E[m] given the labels, and log Z."""
        raise self._without_moments()

    def jacobian(self, mu: Float[Tensor, " n"]) -> tuple[Float[Tensor, " n"], LogZ, Product]:
        """E[m], log Z, and D = dE/dmu."""
        raise self._without_moments()

    def turn(
        self, W: Float[Tensor, "n M"], state: Float[Tensor, "two n"], at: Any, c: float
    ) -> tuple[Tensor, Float[Tensor, " M"], Float[Tensor, "M M"]]:
        """A turn of VGPMIL's q(h), see logistic.py."""
        raise ValueError(f"{type(self).__name__} has no q(h): it is no likelihood of VGPMIL.")

    def loop(self, H: Float[Tensor, "n M"]) -> compiled.Loop | None:
        """The compiled twin of a pass over these bags, where there is one."""
        return None

    def rise(
        self, H: Float[Tensor, "n M"], w: Float[Tensor, " M"], c: float
    ) -> compiled.Sums | None:
        """sum_b log Z_b at mu = c + H w and its gradient in w, where one compiled pass has them."""
        loop = self.loop(H)
        return None if loop is None else loop.rise(w, c)

    def bound(
        self, H: Float[Tensor, "n M"], w: Float[Tensor, " M"], c: float
    ) -> tuple[float, Float[Tensor, " M"], Float[Tensor, "M M"]] | None:
        """As `rise`, and minus the Hessian, where one pass has them."""
        loop = self.loop(H)
        return None if loop is None else loop.bound(w, c)

    def _without_moments(self) -> ValueError:
        return ValueError(
            f"{type(self).__name__} has no truncated moments, which solver='sweeps' and "
            "solver='newton' iterate. Use solver='direct'."
        )


Family = Callable[[Group], Likelihood]


@dataclass(frozen=True)
class LowRank:
    """X = diag(diagonal) + left right' inside every bag; as many columns as the likelihood has."""

    diagonal: Float[Tensor, " n"]
    left: Float[Tensor, "n r"]
    right: Float[Tensor, "n r"]
    offsets: Int[Tensor, " b1"]
    signs: Float[Tensor, "b r"] | None = None  # if left = signs right: spares products with left

    def __call__(self, W: Float[Tensor, "n M"], H: Float[Tensor, "n M"]) -> Float[Tensor, "M M"]:
        """W'X H, multiplied in the dtype of H."""
        weights = stored_like(self.diagonal, H)
        if W is H:
            out = products.weighted_gram(H, weights)
        else:
            out = (W.mT @ (weights[:, None] * H)).double()
        of_H = self._per_bag(self.right, H)
        if W is H and self.signs is not None:
            of_W = self.signs.mT.reshape(-1, 1) * of_H
        else:
            symmetric = W is H and self.left is self.right
            of_W = of_H if symmetric else self._per_bag(self.left, W)
        return out + of_W.mT @ of_H

    def _per_bag(self, x: Float[Tensor, "n r"], H: Float[Tensor, "n M"]) -> Float[Tensor, "rb M"]:
        """H_b'x_b of every column and bag: H times a sparse matrix that has one row for each."""
        n, r = x.shape
        if not H.is_cuda and n >= MANY * (len(self.offsets) - 1):
            sizes = self.offsets.diff().tolist()
            rows = torch.stack([stored_like(column, H) for column in x.unbind(1)])
            found = [own @ of for own, of in zip(rows.split(sizes, 1), H.split(sizes))]
            return torch.stack(found, 1).flatten(0, 1).double()
        values = torch.cat([stored_like(column, H) for column in x.unbind(1)])
        instances = torch.arange(n, device=x.device).repeat(r)
        starts = self.offsets[:-1] + n * torch.arange(r, device=x.device)[:, None]
        ends = torch.cat([starts.flatten(), starts.new_tensor([n * r])])
        by_bag = coupling.sparse_rows(ends, instances, values, (len(ends) - 1, n))
        return (by_bag @ H).double()


def stored_like(x: Float[Tensor, " n"], H: Float[Tensor, "n M"]) -> Float[Tensor, " n"]:
    """Weights of the rows of H in its dtype; what float32 could not add up anyway becomes zero.

    Products with numbers near the smallest of float32 take a CPU ten times as long.
    """
    if H.dtype == torch.float64:
        return x
    return torch.where(x.abs() > 1e-12 * x.abs().max(), x, 0.0).to(H.dtype)
