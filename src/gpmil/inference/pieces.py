"""The training cohort in pieces, and what each adds to the sums of one pass.

With W the whitened features, H = Sigma W and P = Sigma^-1 = I + lambda C (sparse), a pass needs
H alone: W'x = H'(P x). A piece is some whole bags. Its H lies in memory (`Chunk`), in a file or
nowhere (stores.py), or the piece lies on other machines altogether (distributed/). What the labels
say at mu = c + H w comes from its likelihood (moments/likelihood.py).

With H in float32 the sweeps and the second derivatives multiply in float32, chunk by chunk, and
add the chunks in float64; what decides convergence, the gradient, multiplies in float64 as well.
"""

import functools
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Float
from torch import Tensor

from gpmil.fast import compiled, fused_pass
from gpmil.moments.coupled import coupled_patches
from gpmil.moments.likelihood import Family, Group, Likelihood, Traits
from gpmil.moments.logistic import Process, State
from gpmil.moments.taught import patches

BLOCK_ROWS = 512  # rows of H turned into float64 at a time
SUM_ROWS = 128  # of products added up in float32: more would lose digits
LIKELIHOODS: dict[str, Family] = {  # by the name that models know as `moments`
    "diagonal": patches,
    "coupled": coupled_patches,
}


@runtime_checkable
class Piece(Protocol):
    """Some of the cohort, here or elsewhere: what it adds to the sums of one pass."""

    @property
    def anew(self) -> bool:
        """Whether H is computed for every pass, at more than the cost of a Hessian."""

    @property
    def likelihood(self) -> Traits:
        """What its labels say, or what must be known of it here."""

    def pull(self, w: Tensor, c: float) -> tuple[float | Tensor, Tensor]:
        """sum_b log Z_b and W'(E - c)."""

    def fixed_point(self, w: Tensor, c: float) -> tuple[float, Tensor, Tensor]:
        """sum_b log Z_b, W'(E - c) and W'D H."""

    def rise(self, w: Tensor, c: float) -> tuple[float, Tensor]:
        """sum_b log Z_b and its gradient."""

    def four_slopes(self, w: Tensor, c: float) -> tuple[Tensor]:
        """The gradients of `rise` at four w, added up."""

    def bound(self, w: Tensor, c: float) -> tuple[float, Tensor, Tensor]:
        """sum_b log Z_b, its gradient and minus its Hessian."""

    def weigh(self, expectation: Tensor, c: float) -> tuple[Tensor]:
        """W'(E - c) for a given E[m] of the whole cohort."""

    def weigh_signs(self, c: float) -> tuple[Tensor]:
        """W'(E - c) for E[m] = 1 in positive bags, -1 in negative ones."""

    def gamma(self, w: Tensor, c: float) -> Tensor:
        """d log Z_b / d mu of every instance."""

    def turn(self, state: Tensor, at: Process | None, c: float) -> tuple[Tensor, Tensor, Tensor]:
        """VGPMIL: xi and q(h) at their best for q(u), and what they add to the next q(u)."""


@dataclass(frozen=True)
class Chunk:
    """Some whole bags in memory: all that one pass needs of them."""

    H: Float[Tensor, "n M"]  # in the storage dtype
    likelihood: Likelihood

    @property
    def anew(self) -> bool:
        """Here it lies in memory."""
        return False

    @property
    def group(self) -> Group:
        """The bags but for H."""
        return self.likelihood.group

    @property
    def loop(self) -> compiled.Loop | None:
        """The compiled pass over these bags, where their likelihood has one."""
        return self.likelihood.loop(self.H)

    def times(self, w: Float[Tensor, " M"]) -> Float[Tensor, " n"]:
        """H w, in float64 whatever H is stored in."""
        if self.H.dtype == torch.float64 or self.H.is_cuda:
            return fused_pass.times(self.H, w)
        return torch.cat([block.double() @ w for block in self.H.split(BLOCK_ROWS)])

    def against(self, x: Float[Tensor, " n"]) -> Float[Tensor, " M"]:
        """H'x, in float64 whatever H is stored in."""
        if self.H.dtype == torch.float64 or self.H.is_cuda:
            return fused_pass.against(self.H, x)
        blocks = zip(self.H.split(BLOCK_ROWS), x.split(BLOCK_ROWS))
        return total(H.double().mT @ part for H, part in blocks)

    def against_in_blocks(self, x: Float[Tensor, " n"]) -> Float[Tensor, " M"]:
        """H'x, multiplied in H's own dtype and added up in float64 every few rows."""
        if self.H.dtype == torch.float64:
            return self.H.mT @ x
        even = len(x) - len(x) % SUM_ROWS
        by_block = x[:even].to(self.H.dtype).view(-1, 1, SUM_ROWS)
        out = (by_block @ self.H[:even].unflatten(0, (-1, SUM_ROWS))).double().sum((0, 1))
        return out + self.H[even:].double().mT @ x[even:]

    def weigh(self, expectation: Float[Tensor, " N"], c: float) -> tuple[Float[Tensor, " M"]]:
        """W'(E - c) for a given E[m] of the whole cohort."""
        return (self.against(self.group.unsmooth(expectation[self.group.rows] - c)),)

    def weigh_signs(self, c: float) -> tuple[Float[Tensor, " M"]]:
        """W'(E - c) for E[m] = 1 in positive bags, -1 in negative ones."""
        group = self.group
        signs = torch.where(group.positive, 1.0, -1.0).double().index_select(0, group.row)
        return (self.against(group.unsmooth(signs - c)),)

    def pull(self, w: Float[Tensor, " M"], c: float) -> tuple[float | Tensor, Float[Tensor, " M"]]:
        """sum_b log Z_b and W'(E - c) at mu = c + H w, on a CPU multiplied in H's own dtype."""
        found = None if self.loop is None else self.loop.pull(w, c)
        if found is not None:
            return found
        mu = self.times(w) if self.H.is_cuda else (self.H @ w.to(self.H.dtype)).double()
        mu += c
        E, log_z = self.likelihood.expectations(mu)
        x = self.group.unsmooth(E.sub_(c))
        return log_z, self.against(x) if self.H.is_cuda else self.against_in_blocks(x)

    def fixed_point(
        self, w: Float[Tensor, " M"], c: float
    ) -> tuple[float, Float[Tensor, " M"], Float[Tensor, "M M"]]:
        """sum_b log Z_b, W'(E - c) and W'D H, D = dE/dmu."""
        H = self.H.double()
        W = self.group.unsmooth(H)
        E, log_z, D = self.likelihood.jacobian(c + H @ w)
        return float(log_z), W.mT @ (E - c), D(W, H)

    def gamma(self, w: Float[Tensor, " M"], c: float) -> Float[Tensor, " n"]:
        """d log Z_b / d mu at mu = c + H w."""
        return self.likelihood.curvature(c + self.times(w))[0]

    def rise(self, w: Float[Tensor, " M"], c: float) -> tuple[float, Float[Tensor, " M"]]:
        """sum_b log Z_b and its gradient in w, where w is: there, or on the CPU."""
        at = w.to(self.H.device)
        found = self.likelihood.rise(self.H, at, c)
        if found is None:
            gamma, log_z = self.likelihood.gradient(self.times(at).add_(c))
            found = float(log_z), self.against(gamma)
        return found[0], found[1].to(w.device)

    def four_slopes(self, w: Float[Tensor, "4 M"], c: float) -> tuple[Float[Tensor, " M"]]:
        """The gradients of `rise` at four w, added up; compiled with one look at H."""
        found = None if self.loop is None else self.loop.four_slopes(w, c)
        return (total(self.rise(one, c)[1] for one in w) if found is None else found,)

    def bound(
        self, w: Float[Tensor, " M"], c: float
    ) -> tuple[float, Float[Tensor, " M"], Float[Tensor, "M M"]]:
        """sum_b log Z_b, its gradient in w, and minus its Hessian, where w is."""
        at = w.to(self.H.device)
        found = self.likelihood.bound(self.H, at, c)
        if found is None:
            gamma, log_z, A = self.likelihood.curvature(c + self.times(at))
            found = float(log_z), self.against(gamma), A(self.H, self.H)
        return found[0], found[1].to(w.device), found[2].to(w.device)

    def turn(
        self, state: State, at: Process | None, c: float
    ) -> tuple[Tensor, Float[Tensor, " M"], Float[Tensor, "M M"]]:
        """A turn of VGPMIL; `state` is that of the whole cohort, and here its own part changes."""
        return self.likelihood.turn(self.H, state[:, self.group.rows], at, c)


class Deferred:
    """A piece whose chunk is made for the pass and let go."""

    likelihood: Likelihood
    anew = False

    def chunk(self) -> Chunk:
        """The chunk, H and all."""
        raise NotImplementedError

    def pull(self, w: Tensor, c: float) -> tuple[float | Tensor, Tensor]:
        """As `Chunk.pull`."""
        return self.chunk().pull(w, c)

    def fixed_point(self, w: Tensor, c: float) -> tuple[float, Tensor, Tensor]:
        """As `Chunk.fixed_point`."""
        return self.chunk().fixed_point(w, c)

    def rise(self, w: Tensor, c: float) -> tuple[float, Tensor]:
        """As `Chunk.rise`."""
        return self.chunk().rise(w, c)

    def four_slopes(self, w: Tensor, c: float) -> tuple[Tensor]:
        """As `Chunk.four_slopes`, of one chunk that is made."""
        return self.chunk().four_slopes(w, c)

    def bound(self, w: Tensor, c: float) -> tuple[float, Tensor, Tensor]:
        """As `Chunk.bound`."""
        return self.chunk().bound(w, c)

    def weigh(self, expectation: Tensor, c: float) -> tuple[Tensor]:
        """As `Chunk.weigh`."""
        return self.chunk().weigh(expectation, c)

    def weigh_signs(self, c: float) -> tuple[Tensor]:
        """As `Chunk.weigh_signs`."""
        return self.chunk().weigh_signs(c)

    def gamma(self, w: Tensor, c: float) -> Tensor:
        """As `Chunk.gamma`."""
        return self.chunk().gamma(w, c)

    def turn(self, state: Tensor, at: Process | None, c: float) -> tuple[Tensor, Tensor, Tensor]:
        """As `Chunk.turn`."""
        return self.chunk().turn(state, at, c)


def total(pieces: Iterable[Tensor]) -> Tensor:
    """The sum of some tensors, in order."""
    return functools.reduce(torch.add, pieces)


def bend(piece: Piece, w: Float[Tensor, " M"], c: float) -> Float[Tensor, "M M"]:
    """Minus the Hessian of `bound`, of a chunk in float32: it leads the way of a solver.

    The gradient says where to end.
    """
    if not isinstance(piece, Chunk):
        return piece.bound(w, c)[2]
    at = w.to(piece.H.device)
    found = piece.likelihood.bound(piece.H, at, c)
    if found is not None:
        return found[2].to(w.device)
    A, H = piece.likelihood.curvature(c + piece.times(at))[2], piece.H.float()
    return A(H, H).to(w.device)
