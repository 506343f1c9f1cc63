"""Bags of coupled patches cut by their labels: small ones together as matrices, a large one sparse.

With mhat, V and l = log P_EP(all m < 0) of a bag, and d = mu - mhat,

    negative bag   E = mhat           log Z = l             dE/dmu = V P
    positive bag   E = mu + r d       log Z = log(1 - e^l)  r = e^l / (1 - e^l)
                   dE/dmu = I + r (I - V P) - r (1 + r) d d'P

Sites are kept between calls: the next mu is near the last one.
"""

import math
from functools import partial
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from gpmil.coupling.operator import Banded
from gpmil.moments.ep import ep
from gpmil.moments.sites import Gauss, Sites, first_sites, fixed_point, site_terms
from gpmil.moments.truncated import log_not, moments

TOLERANCE = 1e-9  # of the sites' last change; what is left is a small part of it
RARE = math.log(1e-7)  # log sum_j Phi(t_j) below which a positive bag has one positive patch


class Positive(NamedTuple):
    """A positive bag from its EP or, where every patch is far below zero, from its union bound."""

    r: Tensor
    log_z: Tensor
    rare: Tensor  # (b,) bool
    pull: Tensor  # (b, n): g / sum_j Phi(t_j), g = phi(t) / sigma, of the rare ones
    bend: Tensor  # (b, n): -t g / (sigma sum_j Phi(t_j))


def positive_bag(log_p: Tensor, mu: Tensor, sigma: Tensor, mask: Tensor) -> Positive:
    """r and log Z of positive bags from log P(all m < 0), or from their union bound."""
    t = torch.where(mask, mu / sigma, -math.inf)
    log_sum = torch.logsumexp(torch.special.log_ndtr(t), -1)
    rare = log_sum < RARE
    log_z = torch.where(rare, log_sum, log_not(log_p))
    r = torch.where(rare, 0.0, torch.exp(log_p - log_z))
    # in logs: phi(t) and the sum may both underflow
    log_g = -(t**2) / 2 - math.log(2 * math.pi) / 2 - sigma.log() - log_sum[:, None]
    pull = torch.where(mask & rare[:, None], torch.exp(log_g), 0.0)
    bend = torch.where(mask & rare[:, None], -t / sigma * pull, 0.0)
    return Positive(r, log_z, rare, pull, bend)


class Alone:
    """Bags without an edge: Sigma = I, and the factorised moments are exact."""

    unsettled = 0

    def __init__(self, sizes: Int[Tensor, " b"], positive: Bool[Tensor, " b"]):
        self.positive = positive
        self.offsets = torch.cat([sizes.new_zeros(1), sizes.cumsum(0)])

    def expectations(self, mu: Float[Tensor, " n"]) -> tuple[Tensor, Tensor]:
        """E (n,) and log Z (b,) at mu (n,)."""
        self.found = moments(mu, torch.ones_like(mu), self.positive, self.offsets)
        return self.found.mean, self.found.log_z

    def slope(self, W: Float[Tensor, "n M"], H: Float[Tensor, "n M"]) -> Float[Tensor, "M M"]:
        """W' (dE/dmu) H at the last mu."""
        left, right = (
            torch.segment_reduce(a[:, None] * x, "sum", offsets=self.offsets, axis=0, initial=0.0)
            for a, x in ((self.found.left, W), (self.found.right, H))
        )
        return W.mT @ (self.found.slope[:, None] * H) - left.mT @ right


class SideBySide:
    """Bags padded to one size, and whether the EP of each has settled."""

    mask: Bool[Tensor, "b p"]
    converged: Bool[Tensor, " b"]

    @property
    def unsettled(self) -> int:
        """Bags whose EP has not converged at the last mu."""
        return int((~self.converged).sum())

    def pad(self, x: Float[Tensor, "n ..."]) -> Float[Tensor, "b p ..."]:
        """The bags side by side, zeros where a bag is shorter."""
        out = x.new_zeros(*self.mask.shape, *x.shape[1:])
        out[self.mask] = x
        return out


class Small(SideBySide):
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

    def expectations(self, mu: Float[Tensor, " n"]) -> tuple[Tensor, Tensor]:
        """E (n,) and log Z (b,) at mu (n,)."""
        mask, mu = self.mask, self.pad(mu)
        found = ep(mu, self.sigma, mask, tol=TOLERANCE, start=self.sites)
        if self.sites is not None and not bool(found.converged.all()):
            found = ep(mu, self.sigma, mask, tol=TOLERANCE)  # kept sites led astray
        self.converged = found.converged
        finite = bool(torch.isfinite(found.tau).all() & torch.isfinite(found.nu).all())
        self.sites = Sites(found.tau, found.nu) if finite else None
        self.V, self.d = found.cov, mu - found.mean
        self.up = up = positive_bag(found.log_p, mu, self.deviation, mask)
        # rare: E = mu + Sigma g / sum_j Phi(t_j)
        near = mu + up.r[:, None] * self.d
        rare = mu + (self.sigma @ up.pull[..., None])[..., 0]
        E = torch.where(up.rare[:, None], rare, near)
        E = torch.where(self.positive[:, None], E, found.mean)
        return E[mask], torch.where(self.positive, up.log_z, found.log_p)

    def slope(self, W: Float[Tensor, "n M"], H: Float[Tensor, "n M"]) -> Float[Tensor, "M M"]:
        """W' (dE/dmu) H at the last mu."""
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


class Large:
    """One large bag: EP on the block-tridiagonal P + T, V never formed."""

    def __init__(self, part: Banded, blocks: tuple[Tensor, Tensor], positive: bool):
        self.part, self.blocks, self.positive = part, blocks, positive
        self.variance = part.diagonal()
        self.sites: Sites | None = None
        self.converged = torch.ones(1, dtype=torch.bool, device=part.rows.device)

    @property
    def unsettled(self) -> int:
        """Bags whose EP has not converged at the last mu."""
        return int(not bool(self.converged))

    def expectations(self, mu: Float[Tensor, " n"]) -> tuple[Tensor, Tensor]:
        """E (n,) and log Z (b,) at mu (n,)."""
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
        self.up = up = positive_bag(log_p, mu[None], variance.sqrt(), mask)
        rare = mu + self.part.apply(up.pull[0][:, None])[:, 0]
        return torch.where(up.rare, rare, mu + up.r * self.d), up.log_z

    def slope(self, W: Float[Tensor, "n M"], H: Float[Tensor, "n M"]) -> Float[Tensor, "M M"]:
        """W' (dE/dmu) H at the last mu."""
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
