"""Truncated moments of coupled patches: q(m_b) is N(mu_b, Sigma_b) cut by the bag's label.

The paper replaces Sigma_b by its diagonal here. EP (`moments.ep`) keeps all of it: with mhat, V and
l = log P_EP(all m < 0) of a bag, and d = mu - mhat,

    negative bag   E = mhat           log Z = l             dE/dmu = V P
    positive bag   E = mu + r d       log Z = log(1 - e^l)  r = e^l / (1 - e^l)
                   dE/dmu = I + r (I - V P) - r (1 + r) d d'P

E - mu is then Sigma times the gradient of log Z, so the paper's fixed point and the maximum of
the collapsed bound are one, and W' (dE/dmu) H is symmetric. Sites are kept between calls: the
next mu is near the last one. Small bags go together as matrices, a large one on its sparse P.
"""

import math
from functools import partial
from typing import NamedTuple, Protocol

import numpy as np
import scipy.sparse as sp
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from gpmil.coupling import operator as coupling
from gpmil.coupling.operator import Banded, Dense, Identity
from gpmil.moments.ep import ep
from gpmil.moments.independent import IndependentPatches
from gpmil.moments.likelihood import Group, Likelihood, LogZ, Product
from gpmil.moments.sites import Gauss, Sites, first_sites, fixed_point, site_terms
from gpmil.moments.truncated import log_not, moments

TOLERANCE = 1e-9  # of the sites' last change; what is left is a small part of it
RARE = math.log(1e-7)  # log sum_j Phi(t_j) below which a positive bag has one positive patch


def coupled_patches(group: Group) -> Likelihood:
    """The likelihood of bags whose neighbours stay correlated; without neighbours it is simpler."""
    return IndependentPatches(group) if group.precision is None else CoupledPatches(group)


class CoupledPatches(Likelihood):
    """Z_b under the whole of Sigma_b, where P (E - mu) is the gradient of log Z."""

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
        )

    @property
    def unsettled(self) -> int:
        """Bags whose EP has not converged at the last mu."""
        return self.moments.unsettled

    def gradient(self, mu: Float[Tensor, " n"]) -> tuple[Float[Tensor, " n"], LogZ]:
        """gamma and log Z."""
        E, log_z = self.moments.expectations(mu)
        return self.group.unsmooth(E - mu), log_z

    def curvature(self, mu: Float[Tensor, " n"]) -> tuple[Float[Tensor, " n"], LogZ, Product]:
        """gamma, log Z, and A = P - P D."""
        return *self.gradient(mu), self._curved

    def expectations(self, mu: Float[Tensor, " n"]) -> tuple[Float[Tensor, " n"], LogZ]:
        """E[m] and log Z."""
        return self.moments.expectations(mu)

    def jacobian(self, mu: Float[Tensor, " n"]) -> tuple[Float[Tensor, " n"], LogZ, Product]:
        """E[m], log Z, and D."""
        return *self.moments.expectations(mu), self.moments.slope

    def _curved(self, G: Float[Tensor, "n M"], H: Float[Tensor, "n M"]) -> Float[Tensor, "M M"]:
        """G'(P - P D) H."""
        W, H = self.group.unsmooth(G.double()), H.double()
        return W.mT @ H - self.moments.slope(W, H)


class _Part(Protocol):
    unsettled: int  # bags whose EP has not converged at the last mu

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
    ):
        self.n = int(offsets[-1])
        labels = torch.from_numpy(positive).to(device)
        self.parts: list[tuple[Int[Tensor, " n"], _Part]] = []
        for part in coupling.parts(adjacency, offsets, strength, device):
            mine = labels[torch.from_numpy(part.bags).to(device)]
            if isinstance(part, Identity):
                sizes = torch.from_numpy(np.diff(offsets)[part.bags]).to(device)
                self.parts.append((part.rows, _Alone(sizes, mine)))
            elif isinstance(part, Dense):
                self.parts.append((part.rows, _Small(part, mine)))
            else:
                self.parts.append((part.rows, _large(part, adjacency, strength, bool(mine[0]))))

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


class _Small:
    """Small bags as padded matrices."""

    def __init__(self, part: Dense, positive: Bool[Tensor, " b"]):
        self.part, self.positive = part, positive
        self.sigma = part.sigma.diagonal(dim1=-2, dim2=-1).sqrt()
        self.sites: Sites | None = None
        self.unsettled = 0

    def expectations(self, mu: Float[Tensor, " n"]) -> tuple[Tensor, Tensor]:
        mask = self.part.mask
        mu = self.part.pad(mu[:, None])[..., 0]
        found = ep(mu, self.part.sigma, mask, tol=TOLERANCE, start=self.sites)
        if self.sites is not None and not bool(found.converged.all()):
            found = ep(mu, self.part.sigma, mask, tol=TOLERANCE)  # kept sites led astray
        self.unsettled = int((~found.converged).sum())
        finite = bool(torch.isfinite(found.tau).all() & torch.isfinite(found.nu).all())
        self.sites = Sites(found.tau, found.nu) if finite else None
        self.V, self.d = found.cov, mu - found.mean
        self.up = up = _positive(found.log_p, mu, self.sigma, mask)
        # rare: E = mu + Sigma g / sum_j Phi(t_j)
        near = mu + up.r[:, None] * self.d
        rare = mu + (self.part.sigma @ up.pull[..., None])[..., 0]
        E = torch.where(up.rare[:, None], rare, near)
        E = torch.where(self.positive[:, None], E, found.mean)
        return E[mask], torch.where(self.positive, up.log_z, found.log_p)

    def slope(self, W: Float[Tensor, "n M"], H: Float[Tensor, "n M"]) -> Float[Tensor, "M M"]:
        W, H = self.part.pad(W), self.part.pad(H)
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
        self.unsettled = 0

    def expectations(self, mu: Float[Tensor, " n"]) -> tuple[Tensor, Tensor]:
        mask = torch.ones(1, len(mu), dtype=torch.bool, device=mu.device)
        variance = self.variance[None]
        start = self.sites or first_sites(mu[None], variance, mask)
        step = partial(self._gaussian_step, mu)
        _, sites, gauss, converged = fixed_point(step, start, variance, mask, tol=TOLERANCE)
        self.unsettled = int(not bool(converged))
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


def _large(part: coupling.Part, adjacency: sp.csr_array, strength: float, positive: bool) -> _Large:
    if not isinstance(part, Banded):
        raise ValueError(
            f"moments='coupled' needs a graph of narrow band in bags of {len(part.rows)} "
            "instances; this one has edges all over it. Use moments='diagonal'."
        )
    rows = part.rows.cpu().numpy()
    p = coupling.sparse_precision(sp.csr_array(adjacency[rows][:, rows]), strength)
    diagonal, lower = coupling.tridiagonal(p.tocoo(), part.size)
    blocks = diagonal.to(part.rows.device), lower.to(part.rows.device)
    return _Large(part, blocks, positive)


def cut_slope(
    mu: Float[Tensor, "b p"],
    sigma: Float[Tensor, "b p p"],
    positive: Bool[Tensor, " b"],
    mask: Bool[Tensor, "b p"],
    X: Float[Tensor, "b p k"],
) -> tuple[Float[Tensor, "b p"], Float[Tensor, "b p k"]]:
    """E of padded bags, and dE/dmu times Sigma X, bag by bag."""
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
