"""Truncated moments of coupled patches: q(m_b) is N(mu_b, Sigma_b) cut by the bag's label.

The paper replaces Sigma_b by its diagonal here. EP (`moments.ep`) keeps all of it: coupled_bags.py
has the bags, small ones together as matrices, a large one on its sparse P. E - mu is then Sigma
times the gradient of log Z, so the paper's fixed point and the maximum of the collapsed bound are
one, and W' (dE/dmu) H is symmetric. With a slide effect all of this is averaged over its values
(coupled_effect.py); where labels of patches are known, coupled_taught.py has the bag.
"""

from functools import partial
from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np
import scipy.sparse as sp
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from gpmil.coupling import operator as coupling
from gpmil.coupling.operator import Banded, Dense, Identity
from gpmil.moments.coupled_bags import TOLERANCE, Alone, Large, Small, positive_bag
from gpmil.moments.coupled_effect import (
    AloneWithEffect,
    Average,
    Shared,
    at_a_time,
    averaged,
    labelled,
    shared_by,
)
from gpmil.moments.coupled_taught import Band, Matrices, Told, taught_bags, taught_slope
from gpmil.moments.ep import ep
from gpmil.moments.likelihood import Group, Likelihood, LogZ, Product, has_effect
from gpmil.moments.taught import patches
from gpmil.moments.with_effect import JUMP


def coupled_patches(group: Group) -> Likelihood:
    """The likelihood of bags whose neighbours stay correlated; without neighbours it is simpler."""
    return patches(group) if group.precision is None else CoupledPatches(group)


class CoupledPatches(Likelihood):
    """Z_b under the whole of S_b = Sigma_b + tau^2 11', where S^-1 (E - mu) is its gradient."""

    moments_are_gradient = True
    leaves_out = True

    def __init__(self, group: Group):
        assert group.graph is not None
        self.group = group
        self.moments = CoupledMoments(
            coupling.block(group.graph, group.rows),
            group.offsets.cpu().numpy(),
            group.positive.cpu().numpy(),
            group.strength,
            group.sigma.device,
            float(group.effect),
            group.known,
        )
        self.roughness = JUMP * len(group.positive) if has_effect(group.effect) else 0.0

    @property
    def unsettled(self) -> int:
        """Bags whose EP has not converged at the last mu."""
        return self.moments.unsettled

    def gradient(self, mu: Float[Tensor, " n"]) -> tuple[Float[Tensor, " n"], LogZ]:
        """gamma and log Z."""
        E, log_z = self.moments.expectations(mu)
        return self.group.unsmooth(E - mu), log_z

    def curvature(self, mu: Float[Tensor, " n"]) -> tuple[Float[Tensor, " n"], LogZ, Product]:
        """gamma, log Z, and A = S^-1 - S^-1 D."""
        return *self.gradient(mu), self._curved

    def expectations(self, mu: Float[Tensor, " n"]) -> tuple[Float[Tensor, " n"], LogZ]:
        """E[m] and log Z."""
        return self.moments.expectations(mu)

    def jacobian(self, mu: Float[Tensor, " n"]) -> tuple[Float[Tensor, " n"], LogZ, Product]:
        """E[m], log Z, and D."""
        return *self.moments.expectations(mu), self.moments.slope

    def _curved(self, G: Float[Tensor, "n M"], H: Float[Tensor, "n M"]) -> Float[Tensor, "M M"]:
        """G'(S^-1 - S^-1 D) H."""
        W, H = self.group.unsmooth(G.double()), H.double()
        return W.mT @ H - self.moments.slope(W, H)


@runtime_checkable
class _Part(Protocol):
    @property
    def unsettled(self) -> int:
        """Bags whose EP has not converged at the last mu."""

    def expectations(self, mu: Tensor) -> tuple[Tensor, Tensor]:
        """E (n,) and log Z (b,) at mu (n,)."""

    def slope(self, W: Tensor, H: Tensor) -> Tensor:
        """W' (dE/dmu) H at the last mu."""


class CoupledMoments:
    """E[m], log Z and their slopes for the bags of one chunk, rows as in the chunk."""

    def __init__(
        self,
        adjacency: sp.csr_array,
        offsets: Int[np.ndarray, " b1"],
        positive: Bool[np.ndarray, " b"],
        strength: float,
        device: str | torch.device = "cpu",
        effect: float = 0.0,
        known: Int[Tensor, " n"] | None = None,
    ):
        self.n = int(offsets[-1])
        labels = torch.from_numpy(positive).to(device)
        self.parts: list[tuple[Int[Tensor, " n"], _Part]] = []
        for part in coupling.parts(adjacency, offsets, strength, device):
            bags = _Bags(
                part.rows,
                torch.from_numpy(np.diff(offsets)[part.bags]).to(device),
                labels[torch.from_numpy(part.bags).to(device)],
                torch.full_like(part.rows, -1) if known is None else known[part.rows],
            )
            if isinstance(part, Identity):
                self.parts.append((part.rows, _alone(bags, effect)))
            elif isinstance(part, Dense):
                self.parts.extend(_small(part, bags, effect))
            else:
                self.parts.append((part.rows, _large(part, bags, adjacency, strength, effect)))

    def expectations(self, mu: Float[Tensor, " n"]) -> tuple[Float[Tensor, " n"], float]:
        """E[m] and sum_b log Z_b at mu."""
        E, log_z = torch.empty_like(mu), 0.0
        for rows, part in self.parts:
            E[rows], values = part.expectations(mu[rows])
            log_z += float(values.sum())
        return E, log_z

    @property
    def unsettled(self) -> int:
        """Bags whose EP has not converged at the last mu."""
        return sum(part.unsettled for _, part in self.parts)

    def slope(self, W: Float[Tensor, "n M"], H: Float[Tensor, "n M"]) -> Float[Tensor, "M M"]:
        """W' (dE/dmu) H at the mu of the last `expectations`."""
        total = W.new_zeros(W.shape[1], W.shape[1])
        for rows, part in self.parts:
            total += part.slope(W[rows], H[rows])
        return total


class _Bags(NamedTuple):
    """The bags of one part of the coupling."""

    rows: Int[Tensor, " n"]
    sizes: Int[Tensor, " b"]
    positive: Bool[Tensor, " b"]
    known: Int[Tensor, " n"]  # -1 where unknown

    @property
    def teaches(self) -> Bool[Tensor, " b"]:
        """Positive bags with known patches."""
        return self._any(self.known >= 0) & self.positive

    @property
    def explained(self) -> Bool[Tensor, " b"]:
        """Those of them with a known positive patch."""
        return self.teaches & self._any(self.known == 1)

    def _any(self, rows: Bool[Tensor, " n"]) -> Bool[Tensor, " b"]:
        counts = torch.zeros_like(self.sizes)
        row = torch.arange(len(self.sizes), device=rows.device).repeat_interleave(self.sizes)
        return counts.index_add(0, row, rows.to(counts.dtype)) > 0

    @property
    def offsets(self) -> Int[Tensor, " b1"]:
        """Where each bag begins."""
        return torch.cat([self.sizes.new_zeros(1), self.sizes.cumsum(0)])

    def some(self, keep: Bool[Tensor, " b"]) -> "_Bags":
        """Some of them."""
        own = keep.repeat_interleave(self.sizes)
        return _Bags(self.rows[own], self.sizes[keep], self.positive[keep], self.known[own])


def _alone(bags: _Bags, effect: float) -> _Part:
    if not effect and not bool(bags.teaches.any()):
        return Alone(bags.sizes, bags.positive)
    deviation = torch.ones(len(bags.rows), dtype=torch.float64, device=bags.rows.device)
    own = (deviation, bags.offsets, bags.positive, None, slice(0, len(deviation)))
    return AloneWithEffect(Group(*own, effect=effect, known=bags.known))


def _small(part: Dense, bags: _Bags, effect: float) -> list[tuple[Tensor, _Part]]:
    """Small bags with their rows; those that teach apart, others with an effect label by label."""
    out: list[tuple[Tensor, _Part]] = []
    for explained, mine in ((True, bags.explained), (False, bags.teaches & ~bags.explained)):
        if bool(mine.any()):
            mask, some = part.mask[mine], bags.some(mine)
            known = _padded(mask, some.known)
            ground = Matrices(part.sigma[mine], mask)
            out.append((some.rows, taught_bags(ground, known, explained, effect)))
    rest = ~bags.teaches
    if not effect:
        own = bags.some(rest)
        plain = Small(part.sigma[rest], part.mask[rest], own.positive)
        return [*out, (own.rows, plain)] if bool(rest.any()) else out
    deviation = part.sigma.diagonal(dim1=-2, dim2=-1).sqrt()
    for label in (False, True):
        mine = rest & (bags.positive == label)
        if bool(mine.any()):
            mask, some = part.mask[mine], bags.some(mine)
            make, sigma = partial(_some, part.sigma[mine], mask), deviation[mine][mask]
            shared = Shared(make, sigma, some.offsets, label, effect, at_a_time(mask))
            out.append((some.rows, shared))
    return out


def _padded(mask: Bool[Tensor, "b p"], known: Int[Tensor, " n"]) -> Int[Tensor, "b p"]:
    return torch.full_like(mask, -1, dtype=known.dtype).masked_scatter(mask, known)


def _some(sigma: Tensor, mask: Tensor, bags: Tensor, positive: bool) -> "Small":
    return Small(sigma[bags], mask[bags], torch.full_like(mask[bags, 0], positive))


def _large(
    part: coupling.Part, bags: _Bags, adjacency: sp.csr_array, strength: float, effect: float
) -> Large | Shared | Told:
    if not isinstance(part, Banded):
        raise ValueError(
            f"moments='coupled' needs a graph of narrow band in bags of {len(part.rows)} "
            "instances; this one has edges all over it. Use moments='diagonal'."
        )
    rows = part.rows.cpu().numpy()
    p = coupling.sparse_precision(sp.csr_array(adjacency[rows][:, rows]), strength)
    diagonal, lower = coupling.tridiagonal(p.tocoo(), part.size)
    blocks = diagonal.to(part.rows.device), lower.to(part.rows.device)
    positive = bool(bags.positive[0])
    if bool(bags.teaches):
        ground = Band(Large(part, blocks, False))
        return taught_bags(ground, bags.known[None], bool(bags.explained), effect)
    if not effect:
        return Large(part, blocks, positive)
    one, sigma = (lambda _, label: Large(part, blocks, label)), part.diagonal().sqrt()
    return Shared(one, sigma, bags.offsets, positive, effect)


def cut_slope(
    mu: Float[Tensor, "b p"],
    sigma: Float[Tensor, "b p p"],
    positive: Bool[Tensor, " b"],
    mask: Bool[Tensor, "b p"],
    X: Float[Tensor, "b p k"],
    effect: float = 0.0,
    known: Int[Tensor, "b p"] | None = None,
) -> tuple[Float[Tensor, "b p"], Float[Tensor, "b p k"]]:
    """E of padded bags, and dE/dmu times (Sigma + tau^2 11') X, bag by bag."""
    teaches = torch.zeros_like(positive) if known is None else positive & (known >= 0).any(-1)
    if known is not None and bool(teaches.any()):
        plain = cut_slope(mu, sigma, positive, mask, X, effect)
        some = mu[teaches], sigma[teaches], mask[teaches], known[teaches], X[teaches]
        own = taught_slope(*some, effect)
        return plain[0].index_put((teaches,), own[0]), plain[1].index_put((teaches,), own[1])
    if effect:
        return _cut_slope_with_effect(mu, sigma, positive, mask, X, effect)
    found = ep(mu, sigma, mask, tol=TOLERANCE)
    deviation = sigma.diagonal(dim1=-2, dim2=-1).sqrt()
    up = positive_bag(found.log_p, mu, deviation, mask)
    d = torch.where(mask, mu - found.mean, 0.0)
    r, smooth = up.r[:, None, None], sigma @ X
    # negative: V P Sigma X = V X;  positive: (I + r (I - V P) - r (1 + r) d d'P) Sigma X
    negative = found.cov @ X
    near = smooth + r * (smooth - negative) - r * (1 + r) * d[..., None] * (d[:, None, :] @ X)
    # rare: E = mu + Sigma g,  dE/dmu = I + Sigma (diag(bend) - g g')
    g = up.pull[..., None]
    rare = smooth + sigma @ (up.bend[..., None] * smooth - g * (g.mT @ smooth))
    E_positive = torch.where(up.rare[:, None], mu + (sigma @ g)[..., 0], mu + up.r[:, None] * d)
    slope = torch.where(up.rare[:, None, None], rare, near)
    return (
        torch.where(positive[:, None], E_positive, found.mean),
        torch.where(positive[:, None, None], slope, negative),
    )


def _cut_slope_with_effect(
    mu: Tensor, sigma: Tensor, positive: Tensor, mask: Tensor, X: Tensor, effect: float
) -> tuple[Float[Tensor, "b p"], Float[Tensor, "b p k"]]:
    """The same where bags share an effect: D S X = S X - S A S X, S = Sigma + tau^2 11'."""
    X = shared_by(mask, effect, X)  # Sigma^-1 S X, as Sigma 1 = 1
    log_q, delta, bent = _averaged(mu, sigma, mask, X, effect, False)
    _, factor, rare = labelled(log_q, positive)
    delta, bent = factor[:, None] * delta, factor[:, None, None] * bent
    if bool(rare.any()):
        some = mu[rare], sigma[rare], mask[rare], X[rare]
        _, delta[rare], bent[rare] = _averaged(*some, effect, True)
    # Sigma A S X, as gamma'S X = delta'Sigma^-1 S X
    bent = bent + delta[..., None] * (delta[:, None, :] @ X)
    moved = shared_by(mask, effect, delta[..., None])[..., 0]
    return mu + moved, sigma @ X - shared_by(mask, effect, bent)


def _averaged(
    mu: Tensor, sigma: Tensor, mask: Tensor, X: Tensor, effect: float, label: bool
) -> tuple[Float[Tensor, " b"], Float[Tensor, "b p"], Float[Tensor, "b p k"]]:
    """Log Z, delta and sum_k pi_k Sigma (A_k - gamma_k gamma_k') Sigma X of bags of one label."""
    labels = torch.full_like(mask[:, 0], label)
    bags = torch.arange(len(mu), device=mu.device)
    average = Average(partial(_some, sigma, mask), bags, label, at_a_time(mask))

    def cut(at: Tensor) -> tuple[Tensor, Tensor]:
        return cut_slope(at, sigma, labels, mask, X)

    return averaged(average, mu, sigma, mask, X, effect, cut)
