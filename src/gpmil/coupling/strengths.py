"""Sigma_b = (I + lambda C_b)^-1 of a cohort for many values of lambda, differentiable in it.

dSigma/dlambda = -Sigma C Sigma, and lambda C Sigma = I - Sigma: no matrix but Sigma is needed. For
y = Sigma x an adjoint y' hands back

    x' = Sigma y',    lambda' = -<x', x - y> / lambda,

and for n = diag(Sigma) and s = diag(Sigma diag(r) Sigma) = (Sigma o Sigma) r adjoints n', s' do

    r' = (Sigma o Sigma) s',
    lambda' = -<n', n - diag(Sigma^2)> / lambda - 2 s' (Sigma o (Sigma - Sigma^2)) r / lambda.

For learning, which asks for tens of lambdas: `operator.py` has the ways to one.
"""

from functools import cached_property
from typing import Any

import numpy as np
import scipy.sparse as sp
import torch
from jaxtyping import Float
from torch import Tensor

from gpmil.coupling.operator import Dense, Device, Edges, Offsets, batches

Strength = float | Float[Tensor, ""]


class Smoothing:
    """The graphs of all bags; those without an edge are left alone."""

    def __init__(self, adjacency: sp.csr_array, offsets: Offsets, device: Device = "cpu"):
        self.edges, self.offsets = Edges.of(adjacency, device), offsets
        coupled = np.flatnonzero(np.diff(adjacency.indptr[offsets]) > 0)
        self.batches = list(batches(coupled, np.diff(offsets), device))
        self.last: Smoothed | None = None

    def at(self, strength: Strength) -> "Smoothed":
        """Sigma at one lambda; the last one is kept."""
        value = float(strength.detach() if isinstance(strength, Tensor) else strength)
        if self.last is None or self.last.value != value:
            some = self.batches if value else []
            parts = [Dense.of(self.edges, self.offsets, bags, value) for bags in some]
            self.last = Smoothed(parts, value)
        return self.last


class Smoothed:
    """Sigma of all bags at one lambda."""

    def __init__(self, parts: list[Dense], value: float):
        self.parts, self.value = parts, value

    def apply(self, x: Float[Tensor, "N k"], strength: Strength) -> Float[Tensor, "N k"]:
        """Sigma x for the rows of all bags."""
        if not self.parts:
            return x
        return _Apply.apply(x, torch.as_tensor(strength, dtype=x.dtype), self)

    def diagonals(
        self, r: Float[Tensor, " N"], strength: Strength
    ) -> tuple[Float[Tensor, " N"], Float[Tensor, " N"]]:
        """The diagonals of Sigma and of Sigma diag(r) Sigma."""
        if not self.parts:
            return torch.ones_like(r), r
        return _Diagonals.apply(r, torch.as_tensor(strength, dtype=r.dtype), self)

    def product(self, x: Float[Tensor, "N k"]) -> Float[Tensor, "N k"]:
        """Sigma x, not to be differentiated."""
        y = x.clone()
        for part in self.parts:
            y[part.rows] = part.apply(x[part.rows])
        return y

    def squared(self, x: Float[Tensor, " N"]) -> Float[Tensor, " N"]:
        """(Sigma o Sigma) x, not to be differentiated."""
        y = x.clone()
        for part, square in zip(self.parts, self.squares, strict=True):
            y[part.rows] = (square @ part.pad(x[part.rows, None]))[part.mask][:, 0]
        return y

    @cached_property
    def squares(self) -> list[Float[Tensor, "b p p"]]:
        """Sigma o Sigma."""
        return [part.sigma.square() for part in self.parts]

    @cached_property
    def gaps(self) -> list[Float[Tensor, "b p p"]]:
        """Sigma - Sigma^2 = lambda Sigma C Sigma = -lambda dSigma/dlambda, but for the padding."""
        found = []
        for part in self.parts:
            one = torch.eye(part.sigma.shape[-1]).to(part.sigma)
            found.append(part.sigma - part.congruence(one.repeat(len(part.sigma), 1, 1)))
        return found


class _Apply(torch.autograd.Function):
    """y = Sigma x."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, strength: Tensor, sigma: Smoothed) -> Tensor:
        y = sigma.product(x)
        ctx.save_for_backward(x, y)
        ctx.sigma = sigma
        return y

    @staticmethod
    def backward(ctx: Any, by_y: Tensor) -> tuple[Tensor | None, ...]:
        x, y = ctx.saved_tensors
        by_x = ctx.sigma.product(by_y.contiguous())
        by_strength = None
        if ctx.needs_input_grad[1]:
            # lambda' = -<x', x - y> / lambda
            by_strength = (torch.vdot(by_x.flatten(), (y - x).flatten())) / ctx.sigma.value
        return by_x, by_strength, None


class _Diagonals(torch.autograd.Function):
    """n = diag(Sigma) and s = diag(Sigma diag(r) Sigma)."""

    @staticmethod
    def forward(ctx: Any, r: Tensor, strength: Tensor, sigma: Smoothed) -> tuple[Tensor, Tensor]:
        noise = torch.ones_like(r)
        for part in sigma.parts:
            noise[part.rows] = part.diagonal()
        ctx.save_for_backward(r)
        ctx.sigma = sigma
        return noise, sigma.squared(r)

    @staticmethod
    def backward(ctx: Any, by_noise: Tensor, by_spread: Tensor) -> tuple[Tensor | None, ...]:
        (r,), sigma = ctx.saved_tensors, ctx.sigma
        by_strength = None
        if ctx.needs_input_grad[1]:
            by_strength = r.new_zeros(())
            for part, gap in zip(sigma.parts, sigma.gaps, strict=True):
                own = gap.diagonal(dim1=-2, dim2=-1)[part.mask]
                left, right = (part.pad(x[part.rows, None]) for x in (by_spread, r))
                by_strength -= torch.vdot(by_noise[part.rows], own)
                by_strength -= 2 * (left * ((part.sigma * gap) @ right)).sum()
            by_strength = by_strength / sigma.value
        return sigma.squared(by_spread), by_strength, None
