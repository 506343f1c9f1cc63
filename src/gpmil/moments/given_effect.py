"""Bags at given values s of their slide effect: independent patches at mu + s.

What slide_effect.py averages over s: z(s) = q(s), the probability that all patches lie below zero,
or 1 - q(s), with its derivatives in mu and in s.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from gpmil.moments import truncated
from gpmil.moments.truncated import excess, segment_sum, upper_tail

PLAIN = 8.0  # t up to which erfc keeps its digits, and h - t twelve


class Patches(NamedTuple):
    """The patches of some bags in float64; `row` is the bag of every patch."""

    mu: Tensor
    sigma: Tensor
    offsets: Tensor
    row: Tensor

    @classmethod
    def of(cls, mu: Tensor, sigma: Tensor, offsets: Tensor, row: Tensor | None) -> "Patches":
        """From what truncated.moments takes."""
        if row is None:
            sizes = offsets.diff()
            row = torch.arange(len(sizes), device=mu.device).repeat_interleave(sizes)
        return cls(mu.double(), sigma.double(), offsets, row)

    def some(self, keep: Tensor) -> tuple["Patches", Tensor]:
        """Some of the bags, and where their rows are."""
        rows = keep[self.row].nonzero()[:, 0]
        sizes = self.offsets.diff()[keep]
        offsets = torch.cat([sizes.new_zeros(1), sizes.cumsum(0)])
        return Patches.of(self.mu[rows], self.sigma[rows], offsets, None), rows

    def repeated(self, copies: int) -> "Patches":
        """So many copies of all bags, one after the other."""
        n, bags = len(self.mu), len(self.offsets) - 1
        copy = torch.arange(copies, device=self.mu.device)
        starts = (self.offsets[:-1] + n * copy[:, None]).flatten()
        offsets = torch.cat([starts, starts.new_full((1,), n * copies)])
        row = (self.row + bags * copy[:, None]).flatten()
        return Patches(self.mu.repeat(copies), self.sigma.repeat(copies), offsets, row)

    def detach(self) -> "Patches":
        """Without derivatives."""
        return Patches(*(x.detach() for x in self))


class Given(NamedTuple):
    """Bags at one s each: log z(s), and its derivatives in s and in mu.

    d2 z / z = diag(curvature) +- size^2 direction direction'. Directions change little with s, so
    that averages over s of their squares are of low rank.
    """

    log_z: Tensor
    slope: Tensor  # d log z / ds
    bend: Tensor  # d2 log z / ds2
    gamma: Tensor
    curvature: Tensor
    mean: Tensor
    direction: Tensor
    size: Tensor


def all_below(patches: Patches, s: Tensor) -> Given:
    """z = q."""
    mu, sigma, offsets, row = patches
    t = (mu + s.index_select(0, row)) / sigma
    if bool((t > PLAIN).any()):
        log_upper, h = upper_tail(t)
        gap = excess(t)
    else:
        # to the absolute precision that sums over s need
        z = t * math.sqrt(0.5)
        upper = torch.erfc(z) / 2
        log_upper, h = upper.log(), torch.exp(-z.square()) / upper * (1 / math.sqrt(2 * math.pi))
        gap = h - t
    gamma = -h / sigma
    curvature = gamma * gap / sigma
    log_q, slope, bend = (segment_sum(x, offsets) for x in (log_upper, gamma, curvature))
    size = slope.abs().clamp(min=1e-300)
    direction = gamma / size.index_select(0, row)
    return Given(log_q, slope, bend, gamma, curvature, -sigma * gap, direction, size)


def some_above(patches: Patches, s: Tensor) -> Given:
    """z = 1 - q; size direction = sqrt((1 - q) / q) gamma."""
    mu, sigma, offsets, row = patches
    m = truncated.moments(mu + s[row], sigma, torch.ones_like(s, dtype=torch.bool), offsets, row)
    f = m.pull * torch.exp(m.log_z / 2)[row]
    size, slope, curved, pull = (segment_sum(x, offsets) for x in (f, m.gamma, m.curvature, m.pull))
    unit = f / size.clamp(min=1e-300)[row]
    return Given(m.log_z, slope, curved - pull.square(), m.gamma, m.curvature, m.mean, unit, size)
