"""Truncated moments of coupled patches: q(m_b) is N(mu_b, Sigma_b) cut by the bag's label.

The paper replaces Sigma_b by its diagonal here. EP (`moments.ep`) keeps all of it: with mhat, V and
l = log P_EP(all m < 0) of a bag, and d = mu - mhat,

    negative bag   E = mhat           log Z = l             dE/dmu = V P
    positive bag   E = mu + r d       log Z = log(1 - e^l)  r = e^l / (1 - e^l)
                   dE/dmu = I + r (I - V P) - r (1 + r) d d'P

E - mu is then Sigma times the gradient of log Z, so the paper's fixed point and the maximum of
the collapsed bound are one, and W' (dE/dmu) H is symmetric. Sites are kept between calls: the
next mu is near the last one. Small bags go together as matrices, a large one on its sparse P.
With a slide effect all of this is averaged over its values (coupled_effect.py).
"""

import math
from functools import partial
from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np
import scipy.sparse as sp
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from gpmil.coupling import operator as coupling
from gpmil.coupling.operator import Banded, Dense, Identity
from gpmil.moments.coupled_effect import AloneWithEffect, Average, Shared, at_a_time, labelled
from gpmil.moments.ep import ep
from gpmil.moments.given_effect import Patches
from gpmil.moments.likelihood import Group, Likelihood, LogZ, Product, has_effect
from gpmil.moments.sites import Gauss, Sites, first_sites, fixed_point, site_terms
from gpmil.moments.truncated import log_not, moments
from gpmil.moments.with_effect import JUMP, patches

TOLERANCE = 1e-9  # of the sites' last change; what is left is a small part of it
RARE = math.log(1e-7)  # log sum_j Phi(t_j) below which a positive bag has one positive patch


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
    ):
        self.n = int(offsets[-1])
        labels = torch.from_numpy(positive).to(device)
        self.parts: list[tuple[Int[Tensor, " n"], _Part]] = []
        for part in coupling.parts(adjacency, offsets, strength, device):
            bags = _Bags(
                part.rows,
                torch.from_numpy(np.diff(offsets)[part.bags]).to(device),
                labels[torch.from_numpy(part.bags).to(device)],
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

    @property
    def offsets(self) -> Int[Tensor, " b1"]:
        """Where each bag begins."""
        return torch.cat([self.sizes.new_zeros(1), self.sizes.cumsum(0)])

    def some(self, keep: Bool[Tensor, " b"]) -> "_Bags":
        """Some of them."""
        rows = self.rows[keep.repeat_interleave(self.sizes)]
        return _Bags(rows, self.sizes[keep], self.positive[keep])


def _alone(bags: _Bags, effect: float) -> _Part:
    if not effect:
        return _Alone(bags.sizes, bags.positive)
    deviation = torch.ones(len(bags.rows), dtype=torch.float64, device=bags.rows.device)
    rows = slice(0, len(deviation))
    return AloneWithEffect(Group(deviation, bags.offsets, bags.positive, None, rows, effect=effect))


class _Alone:
    """Bags without an edge: Sigma = I, and the factorised moments are exact."""

    unsettled = 0

    def __init__(self, sizes: Int[Tensor, " b"], positive: Bool[Tensor, " b"]):
        self.positive = positive
        self.offsets = torch.cat([sizes.new_zeros(1), sizes.cumsum(0)])

    def expectations(self, mu: Float[Tensor, " n"]) -> tuple[Tensor, Tensor]:
        self.found = moments(mu, torch.ones_like(mu), self.positive, self.offsets)
        return self.found.mean, self.found.log_z

    def slope(self, W: Float[Tensor, "n M"], H: Float[Tensor, "n M"]) -> Float[Tensor, "M M"]:
        left, right = (
            torch.segment_reduce(a[:, None] * x, "sum", offsets=self.offsets, axis=0, initial=0.0)
            for a, x in ((self.found.left, W), (self.found.right, H))
        )
        return W.mT @ (self.found.slope[:, None] * H) - left.mT @ right


class _Positive(NamedTuple):
    """A positive bag from its EP or, where every patch is far below zero, from its union bound."""

    r: Tensor
    log_z: Tensor
    rare: Tensor  # (b,) bool
    pull: Tensor  # (b, n): g / sum_j Phi(t_j), g = phi(t) / sigma, of the rare ones
    bend: Tensor  # (b, n): -t g / (sigma sum_j Phi(t_j))


def _positive(log_p: Tensor, mu: Tensor, sigma: Tensor, mask: Tensor) -> _Positive:
    t = torch.where(mask, mu / sigma, -math.inf)
    log_sum = torch.logsumexp(torch.special.log_ndtr(t), -1)
    rare = log_sum < RARE
    log_z = torch.where(rare, log_sum, log_not(log_p))
    r = torch.where(rare, 0.0, torch.exp(log_p - log_z))
    # in logs: phi(t) and the sum may both underflow
    log_g = -(t**2) / 2 - math.log(2 * math.pi) / 2 - sigma.log() - log_sum[:, None]
    pull = torch.where(mask & rare[:, None], torch.exp(log_g), 0.0)
    bend = torch.where(mask & rare[:, None], -t / sigma * pull, 0.0)
    return _Positive(r, log_z, rare, pull, bend)


def _small(part: Dense, bags: _Bags, effect: float) -> list[tuple[Tensor, _Part]]:
    """Small bags with their rows; those that share an effect label by label."""
    if not effect:
        return [(bags.rows, _Small(part.sigma, part.mask, bags.positive))]
    deviation = part.sigma.diagonal(dim1=-2, dim2=-1).sqrt()
    out: list[tuple[Tensor, _Part]] = []
    for label in (False, True):
        mine = bags.positive == label
        if bool(mine.any()):
            mask, some = part.mask[mine], bags.some(mine)
            make, sigma = partial(_some, part.sigma[mine], mask), deviation[mine][mask]
            shared = Shared(make, sigma, some.offsets, label, effect, at_a_time(mask))
            out.append((some.rows, shared))
    return out


def _some(sigma: Tensor, mask: Tensor, bags: Tensor, positive: bool) -> "_Small":
    return _Small(sigma[bags], mask[bags], torch.full_like(mask[bags, 0], positive))


class _Small:
    """Small bags as padded matrices."""

    def __init__(
        self,
        sigma: Float[Tensor, "b p p"],
        mask: Bool[Tensor, "b p"],
        positive: Bool[Tensor, " b"],
    ):
        self.sigma, self.mask, self.positive = sigma, mask, positive
        self.deviation = sigma.diagonal(dim1=-2, dim2=-1).sqrt()
        self.sites: Sites | None = None
        self.converged = torch.ones_like(positive)

    @property
    def unsettled(self) -> int:
        return int((~self.converged).sum())

    def pad(self, x: Float[Tensor, "n ..."]) -> Float[Tensor, "b p ..."]:
        """The bags side by side, zeros where a bag is shorter."""
        out = x.new_zeros(*self.mask.shape, *x.shape[1:])
        out[self.mask] = x
        return out

    def expectations(self, mu: Float[Tensor, " n"]) -> tuple[Tensor, Tensor]:
        mask, mu = self.mask, self.pad(mu)
        found = ep(mu, self.sigma, mask, tol=TOLERANCE, start=self.sites)
        if self.sites is not None and not bool(found.converged.all()):
            found = ep(mu, self.sigma, mask, tol=TOLERANCE)  # kept sites led astray
        self.converged = found.converged
        finite = bool(torch.isfinite(found.tau).all() & torch.isfinite(found.nu).all())
        self.sites = Sites(found.tau, found.nu) if finite else None
        self.V, self.d = found.cov, mu - found.mean
        self.up = up = _positive(found.log_p, mu, self.deviation, mask)
        # rare: E = mu + Sigma g / sum_j Phi(t_j)
        near = mu + up.r[:, None] * self.d
        rare = mu + (self.sigma @ up.pull[..., None])[..., 0]
        E = torch.where(up.rare[:, None], rare, near)
        E = torch.where(self.positive[:, None], E, found.mean)
        return E[mask], torch.where(self.positive, up.log_z, found.log_p)

    def slope(self, W: Float[Tensor, "n M"], H: Float[Tensor, "n M"]) -> Float[Tensor, "M M"]:
        W, H = self.pad(W), self.pad(H)
        up, pos = self.up, self.positive
        near = pos & ~up.rare
        # W'(V P) H = W'V W, W'H: weights of the two in each kind of bag
        r = torch.where(near, up.r, 0.0)
        weight_V = torch.where(pos, -r, 1.0)
        weight_I = torch.where(pos, 1 + r, 0.0)
        left = weight_V[:, None, None] * (self.V @ W) + weight_I[:, None, None] * H
        total = W.flatten(0, 1).mT @ left.flatten(0, 1)
        # - r (1 + r) (W'd)(W'd)'
        Wd = (W * self.d[..., None]).sum(1) * (r * (1 + r)).sqrt()[:, None]
        # rare: + H' diag(bend) H - (H'g)(H'g)' / (sum_j Phi(t_j))^2
        rare = (pos & up.rare)[:, None, None]
        Hg = torch.where(rare[..., 0], (H * up.pull[..., None]).sum(1), 0.0)
        bent = torch.where(rare, H * up.bend[..., None], 0.0)
        return total - Wd.mT @ Wd - Hg.mT @ Hg + H.flatten(0, 1).mT @ bent.flatten(0, 1)


class _Large:
    """One large bag: EP on the block-tridiagonal P + T, V never formed."""

    def __init__(self, part: Banded, blocks: tuple[Tensor, Tensor], positive: bool):
        self.part, self.blocks, self.positive = part, blocks, positive
        self.variance = part.diagonal()
        self.sites: Sites | None = None
        self.converged = torch.ones(1, dtype=torch.bool, device=part.rows.device)

    @property
    def unsettled(self) -> int:
        return int(not bool(self.converged))

    def expectations(self, mu: Float[Tensor, " n"]) -> tuple[Tensor, Tensor]:
        mask = torch.ones(1, len(mu), dtype=torch.bool, device=mu.device)
        variance = self.variance[None]
        start = self.sites or first_sites(mu[None], variance, mask)
        step = partial(self._gaussian_step, mu)
        _, sites, gauss, self.converged = fixed_point(step, start, variance, mask, tol=TOLERANCE)
        log_p = gauss.log_gauss + site_terms(gauss, sites, mask).sum(-1)
        self.sites = sites if bool(torch.isfinite(log_p)) else None
        self.d = mu - gauss.mean[0]
        if not self.positive:
            return gauss.mean[0], log_p
        self.up = up = _positive(log_p, mu[None], variance.sqrt(), mask)
        rare = mu + self.part.apply(up.pull[0][:, None])[:, 0]
        return torch.where(up.rare, rare, mu + up.r * self.d), up.log_z

    def slope(self, W: Float[Tensor, "n M"], H: Float[Tensor, "n M"]) -> Float[Tensor, "M M"]:
        if not self.positive:
            return W.mT @ self.factor.apply(W)
        up = self.up
        if bool(up.rare):
            Hg = H.mT @ up.pull[0]
            return W.mT @ H + H.mT @ (up.bend[0][:, None] * H) - Hg[:, None] * Hg
        Wd = W.mT @ self.d
        left = (1 + up.r) * H - up.r * self.factor.apply(W)
        return W.mT @ left - up.r * (1 + up.r) * Wd[:, None] * Wd

    def _gaussian_step(self, mu: Float[Tensor, " n"], sites: Sites) -> Gauss:
        """N(mu, Sigma) times the sites, on P + T: mhat = mu + V d, V = (P + T)^-1."""
        tau, nu = sites.tau[0], sites.nu[0]
        diagonal, lower = self.blocks
        diagonal = diagonal.clone()
        padded = tau.new_zeros(diagonal.shape[:2])
        padded.view(-1)[: len(tau)] = tau
        diagonal.diagonal(dim1=-2, dim2=-1).add_(padded)
        self.factor = Banded(0, self.part.rows, diagonal, lower)
        d = nu - tau * mu
        moved = self.factor.apply(d[:, None])[:, 0]
        var = self.factor.diagonal()
        # lZG = (log|P| - log|P + T|)/2 + d'V d/2 + sum(nu mu - tau mu^2/2)
        log_gauss = (self.factor.logdet() - self.part.logdet()) / 2 + (
            d @ moved / 2 + (nu * mu - tau * mu**2 / 2).sum()
        )
        left = (1 - tau * var).clamp(min=1e-15)
        return Gauss((mu + moved)[None], var[None], left[None], log_gauss)


def _large(
    part: coupling.Part, bags: _Bags, adjacency: sp.csr_array, strength: float, effect: float
) -> _Large | Shared:
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
    if not effect:
        return _Large(part, blocks, positive)
    one, sigma = (lambda _, label: _Large(part, blocks, label)), part.diagonal().sqrt()
    return Shared(one, sigma, bags.offsets, positive, effect)


def cut_slope(
    mu: Float[Tensor, "b p"],
    sigma: Float[Tensor, "b p p"],
    positive: Bool[Tensor, " b"],
    mask: Bool[Tensor, "b p"],
    X: Float[Tensor, "b p k"],
    effect: float = 0.0,
) -> tuple[Float[Tensor, "b p"], Float[Tensor, "b p k"]]:
    """E of padded bags, and dE/dmu times (Sigma + tau^2 11') X, bag by bag."""
    if effect:
        return _cut_slope_with_effect(mu, sigma, positive, mask, X, effect)
    found = ep(mu, sigma, mask, tol=TOLERANCE)
    deviation = sigma.diagonal(dim1=-2, dim2=-1).sqrt()
    up = _positive(found.log_p, mu, deviation, mask)
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

    def shared(x: Tensor) -> Tensor:
        """(I + tau^2 11') x."""
        return x + effect**2 * mask[..., None] * x.sum(1, keepdim=True)

    X = shared(X)  # Sigma^-1 S X, as Sigma 1 = 1
    log_q, delta, bent = _averaged(mu, sigma, mask, X, effect, False)
    _, factor, rare = labelled(log_q, positive)
    delta, bent = factor[:, None] * delta, factor[:, None, None] * bent
    if bool(rare.any()):
        some = mu[rare], sigma[rare], mask[rare], X[rare]
        _, delta[rare], bent[rare] = _averaged(*some, effect, True)
    # Sigma A S X, as gamma'S X = delta'Sigma^-1 S X
    bent = bent + delta[..., None] * (delta[:, None, :] @ X)
    return mu + shared(delta[..., None])[..., 0], sigma @ X - shared(bent)


def _averaged(
    mu: Tensor, sigma: Tensor, mask: Tensor, X: Tensor, effect: float, label: bool
) -> tuple[Float[Tensor, " b"], Float[Tensor, "b p"], Float[Tensor, "b p k"]]:
    """Log Z, delta and sum_k pi_k Sigma (A_k - gamma_k gamma_k') Sigma X of bags of one label."""
    labels, sizes = torch.full_like(mask[:, 0], label), mask.sum(-1)
    offsets = torch.cat([sizes.new_zeros(1), sizes.cumsum(0)])
    bags = torch.arange(len(mu), device=mu.device)
    average = Average(partial(_some, sigma, mask), bags, label, at_a_time(mask))
    deviation = sigma.diagonal(dim1=-2, dim2=-1).sqrt()
    rows = Patches.of(mu[mask], deviation[mask], offsets, None)
    average.over(rows, torch.as_tensor(effect, dtype=mu.dtype, device=mu.device))
    delta, bent = torch.zeros_like(mu).masked_scatter(mask, average.delta), torch.zeros_like(X)
    for s, pi in zip(average.effects, average.pi):
        E, slope = cut_slope(mu + s[:, None], sigma, labels, mask, X)
        own = torch.where(mask, E - mu - s[:, None], 0.0)[..., None]
        bent += pi[:, None, None] * (sigma @ X - slope - own * (own.mT @ X))
    return average.log_z, delta, bent
