"""Coupled patches of positive bags in which the labels of some are known.

EP on the known patches L alone, each cut on its own side, gives l = log P_L with its derivatives g
(at L) and -A (L x L). Where one of them is positive the bag's label says no more. Else the bag has
Z = P_L - P_all, and EP on all m < 0 gives log P_all, mhat and V. With Sigma_L the columns of
Sigma at L, d_L = Sigma_L g, d = mhat - mu and r = P_all / Z,

    log Z = l                  E - mu = d_L                    Sigma A_Z Sigma = Sigma_L A Sigma_L'
    log Z = l + log(1 - e^(log P_all - l))
                               E - mu = (1 + r) d_L - r d =: e
         Sigma A_Z Sigma = (1 + r) (Sigma_L A Sigma_L' - d_L d_L') - r (Sigma - V - d d') + e e'

with E - mu = Sigma gamma and dE/dmu = I - Sigma A_Z, gamma and -A_Z the derivatives of log Z. Where
the difference cancels, one patch of the rest at most is positive: with m | L ~ N(mu + d_L, V_L),
V_L = Sigma - Sigma_L A Sigma_L', log Z = l + log U and U = sum_j Phi((mu + d_L)_j / sqrt(V_L)_jj).
How V_L moves with mu is left out of the derivatives there.
"""

import math
from functools import partial
from typing import NamedTuple, Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from gpmil.moments.coupled_bags import TOLERANCE, Large, SideBySide
from gpmil.moments.coupled_effect import Average, Shared, at_a_time, averaged, shared_by
from gpmil.moments.ep import ep
from gpmil.moments.given_effect import Patches
from gpmil.moments.likelihood import Group
from gpmil.moments.sites import Sites
from gpmil.moments.taught import AtEffect, Lesson, lesson_rows
from gpmil.moments.truncated import log_not

NEARLY = -1e-5  # log P_all - log P_L above which the difference loses its digits


# --- N(mu, Sigma), and cut to all m < 0 -----------------------------------------------------------


@runtime_checkable
class Ground(Protocol):
    """Some bags before anything is known of them, padded to one length."""

    mask: Bool[Tensor, "b p"]
    variance: Float[Tensor, "b p"]  # diag Sigma
    sites: Sites | None  # with which the next EP begins

    @property
    def converged(self) -> Bool[Tensor, " b"]:
        """EP, at the last mu."""

    def smooth(self, x: Float[Tensor, "b p k"]) -> Float[Tensor, "b p k"]:
        """Sigma x."""

    def below(self, mu: Float[Tensor, "b p"]) -> tuple[Float[Tensor, " b"], Float[Tensor, "b p"]]:
        """log P(all m < 0) and mhat."""

    def inside(self, x: Float[Tensor, "b p k"]) -> Float[Tensor, "b p k"]:
        """V x at the last mu."""


class Matrices:
    """Small bags, Sigma as matrices."""

    def __init__(self, sigma: Float[Tensor, "b p p"], mask: Bool[Tensor, "b p"]):
        self.sigma, self.mask = sigma, mask
        self.variance = sigma.diagonal(dim1=-2, dim2=-1)
        self.converged = torch.ones_like(mask[:, 0])
        self.sites: Sites | None = None

    def smooth(self, x: Float[Tensor, "b p k"]) -> Float[Tensor, "b p k"]:
        """Sigma x."""
        return self.sigma @ x

    def below(self, mu: Float[Tensor, "b p"]) -> tuple[Float[Tensor, " b"], Float[Tensor, "b p"]]:
        """log P(all m < 0) and mhat."""
        found = ep(mu, self.sigma, self.mask, tol=TOLERANCE, start=self.sites)
        if self.sites is not None and not bool(found.converged.all()):
            found = ep(mu, self.sigma, self.mask, tol=TOLERANCE)  # kept sites led astray
        self.converged, self.V = found.converged, found.cov
        finite = bool(torch.isfinite(found.tau).all() & torch.isfinite(found.nu).all())
        self.sites = Sites(found.tau, found.nu) if finite else None
        return found.log_p, found.mean

    def inside(self, x: Float[Tensor, "b p k"]) -> Float[Tensor, "b p k"]:
        """V x."""
        return self.V @ x


class Band:
    """One large bag on its sparse P."""

    def __init__(self, large: Large):
        self.large, self.variance = large, large.variance[None]
        self.mask = torch.ones_like(self.variance, dtype=torch.bool)

    @property
    def converged(self) -> Bool[Tensor, " b"]:
        """EP, at the last mu."""
        return self.large.converged

    @property
    def sites(self) -> Sites | None:
        """With which the next EP begins."""
        return self.large.sites

    @sites.setter
    def sites(self, sites: Sites | None) -> None:
        self.large.sites = sites

    def smooth(self, x: Float[Tensor, "b p k"]) -> Float[Tensor, "b p k"]:
        """Sigma x."""
        return self.large.part.apply(x[0])[None]

    def below(self, mu: Float[Tensor, "b p"]) -> tuple[Float[Tensor, " b"], Float[Tensor, "b p"]]:
        """log P(all m < 0) and mhat."""
        mean, log_p = self.large.expectations(mu[0])
        return log_p, mean[None]

    def inside(self, x: Float[Tensor, "b p k"]) -> Float[Tensor, "b p k"]:
        """V x."""
        return self.large.factor.apply(x[0])[None]


# --- Bags that teach ------------------------------------------------------------------------------


class Few(NamedTuple):
    """Of bags whose rest is nearly sure to be negative: log U and its derivatives in mu + d_L."""

    log_u: Float[Tensor, " b"]
    pull: Float[Tensor, "b p"]
    bend: Float[Tensor, "b p"]


class Told(SideBySide):
    """Positive bags that teach, all with a known positive patch (`explained`) or all without."""

    def __init__(self, ground: Ground, known: Int[Tensor, "b p"], explained: bool):
        self.ground, self.explained, self.mask = ground, explained, ground.mask
        held = known >= 0
        self.rest = self.mask & ~held
        # L first in every bag; others are padding
        most = int(held.sum(-1).max())
        self.at = (~held).byte().argsort(dim=1, stable=True)[:, :most]
        self.held = held.gather(1, self.at)
        self.side = torch.where(known.gather(1, self.at) == 1, -1.0, 1.0).double()
        unit = torch.zeros(*self.mask.shape, most, dtype=torch.float64, device=known.device)
        unit.scatter_(1, self.at[:, None, :], self.held[:, None, :].double())
        self.columns = ground.smooth(unit)  # Sigma_L
        inner = self.columns.gather(1, self.at[:, :, None].expand(-1, -1, most))
        self.flipped = self.side[:, :, None] * inner * self.side[:, None, :]
        self.converged = torch.ones_like(held[:, 0])

    @property
    def sites(self) -> Sites | None:
        """Of the EP on all patches; that on the known ones is quick."""
        return self.ground.sites

    @sites.setter
    def sites(self, sites: Sites | None) -> None:
        self.ground.sites = sites

    def expectations(self, mu: Float[Tensor, " n"]) -> tuple[Tensor, Tensor]:
        """E and log Z."""
        moved, log_z = self.moved(self.pad(mu))
        return mu + moved[self.mask], log_z

    def moved(self, mu: Float[Tensor, "b p"]) -> tuple[Float[Tensor, "b p"], Float[Tensor, " b"]]:
        """E - mu = Sigma gamma, and log Z."""
        found = ep(self.side * mu.gather(1, self.at), self.flipped, self.held, tol=TOLERANCE)
        # g = nu - T mhat and A = T - T V T, back on their sides
        tau = torch.where(self.held, found.tau, 0.0)
        g = self.side * torch.where(self.held, found.nu - tau * found.mean, 0.0)
        A = torch.diag_embed(tau) - tau[:, :, None] * found.cov * tau[:, None, :]
        self.A = self.side[:, :, None] * A * self.side[:, None, :]
        self.d_L = (self.columns @ g[..., None])[..., 0]
        self.converged, self.e = found.converged, self.d_L
        if self.explained:
            return self.d_L, found.log_p
        log_q, mean = self.ground.below(mu)
        self.converged = self.converged & self.ground.converged
        return self._difference(mu, found.log_p, log_q, mean)

    def _difference(
        self, mu: Tensor, log_l: Tensor, log_q: Tensor, mean: Tensor
    ) -> tuple[Float[Tensor, "b p"], Float[Tensor, " b"]]:
        """Z = P_L - P_all."""
        ratio = log_q - log_l
        self.few = ratio > NEARLY
        log_z = log_l + log_not(ratio.clamp(max=NEARLY))
        self.r = torch.exp(log_q - log_z)[:, None, None]
        self.d = torch.where(self.mask, mean - mu, 0.0)
        self.e = (1 + self.r[..., 0]) * self.d_L - self.r[..., 0] * self.d
        if bool(self.few.any()):
            self.one = one = self._at_most_one(mu)
            rare = self.d_L + self._given_known(one.pull[..., None])[..., 0]
            self.e = torch.where(self.few[:, None], rare, self.e)
            log_z = torch.where(self.few, log_l + one.log_u, log_z)
        return self.e, log_z

    def _at_most_one(self, mu: Float[Tensor, "b p"]) -> Few:
        """log U, in logs: phi and the sum may both underflow."""
        variance = self.ground.variance - ((self.columns @ self.A) * self.columns).sum(-1)
        s = variance.clamp(min=1e-300).sqrt()
        a = torch.where(self.rest, (mu + self.d_L) / s, -math.inf)
        log_u = torch.logsumexp(torch.special.log_ndtr(a), -1)
        log_pull = -a.square() / 2 - math.log(2 * math.pi) / 2 - s.log() - log_u[:, None]
        pull = torch.where(self.rest, torch.exp(log_pull), 0.0)
        return Few(log_u, pull, torch.where(self.rest, -a / s * pull, 0.0))

    def _known_alone(self, x: Float[Tensor, "b p k"]) -> Float[Tensor, "b p k"]:
        """Sigma_L A Sigma_L'x."""
        return self.columns @ (self.A @ (self.columns.mT @ x))

    def _given_known(self, x: Float[Tensor, "b p k"]) -> Float[Tensor, "b p k"]:
        """V_L x."""
        return self.ground.smooth(x) - self._known_alone(x)

    def times(
        self, x: Float[Tensor, "b p k"], smooth: Float[Tensor, "b p k"]
    ) -> Float[Tensor, "b p k"]:
        """dE/dmu Sigma x = Sigma x - Sigma A_Z Sigma x at the last mu; `smooth` is Sigma x."""
        given = smooth - self._known_alone(x)  # V_L x
        if self.explained:
            return given
        near = (
            (1 + self.r) * (given + _outer(self.d_L, x))
            - self.r * (self.ground.inside(x) + _outer(self.d, x))
            - _outer(self.e, x)
        )
        if not bool(self.few.any()):
            return near
        g, bend = self.one.pull, self.one.bend[..., None]
        rare = given + self._given_known(bend * given - _outer(g, given))
        return torch.where(self.few[:, None, None], rare, near)

    def slope(self, W: Float[Tensor, "n M"], H: Float[Tensor, "n M"]) -> Float[Tensor, "M M"]:
        """W' (dE/dmu) H, W = Sigma^-1 H."""
        padded = self.pad(W)
        return padded.flatten(0, 1).mT @ self.times(padded, self.pad(H)).flatten(0, 1)


def _outer(d: Float[Tensor, "b p"], x: Float[Tensor, "b p k"]) -> Float[Tensor, "b p k"]:
    """d d'x."""
    return d[..., None] * (d[:, None, :] @ x)


# --- The same with a slide effect -----------------------------------------------------------------


def taught_bags(
    ground: Ground, known: Int[Tensor, "b p"], explained: bool, effect: float
) -> Told | Shared:
    """Bags that teach, alike in whether one of their patches is known to be positive."""
    if not effect:
        return Told(ground, known, explained)
    mask, sizes = ground.mask, ground.mask.sum(-1)
    offsets = torch.cat([sizes.new_zeros(1), sizes.cumsum(0)])
    many = at_a_time(mask) if isinstance(ground, Matrices) else 1
    make, rule = partial(_made, ground, known, explained), _Rule(mask, known)
    deviation = ground.variance.sqrt()[mask]
    return Shared(make, deviation, offsets, False, effect, many, rule)


def _made(
    ground: Ground, known: Int[Tensor, "b p"], explained: bool, bags: Int[Tensor, " k"], _: bool
) -> Told:
    """Some of the bags, each as often as it is wanted."""
    if isinstance(ground, Matrices):
        return Told(Matrices(ground.sigma[bags], ground.mask[bags]), known[bags], explained)
    return Told(ground, known, explained)


class _Rule:
    """Bags at values of their effect as if patches were independent: which values count."""

    def __init__(self, mask: Bool[Tensor, "b p"], known: Int[Tensor, "b p"]):
        sizes = mask.sum(-1)
        offsets = torch.cat([sizes.new_zeros(1), sizes.cumsum(0)])
        positive, rows = torch.ones_like(mask[:, 0]), slice(0, int(sizes.sum()))
        none = torch.ones(rows.stop, dtype=torch.float64, device=mask.device)
        self.rows = lesson_rows(Group(none, offsets, positive, None, rows, known=known[mask]))

    def __call__(self, patches: Patches, s: Float[Tensor, " b"]) -> AtEffect:
        used, side, offsets = self.rows
        own = Patches.of(patches.mu[used], patches.sigma[used], offsets, None)
        return AtEffect(*(x[0] for x in Lesson(own, side).at(s[None])))


def taught_slope(
    mu: Float[Tensor, "b p"],
    sigma: Float[Tensor, "b p p"],
    mask: Bool[Tensor, "b p"],
    known: Int[Tensor, "b p"],
    X: Float[Tensor, "b p k"],
    effect: float,
) -> tuple[Float[Tensor, "b p"], Float[Tensor, "b p k"]]:
    """E of padded bags that teach, and dE/dmu times (Sigma + tau^2 11') X."""
    E, out = torch.zeros_like(mu), torch.zeros_like(X)
    above = (known == 1).any(-1)
    for explained, some in ((True, above), (False, ~above)):
        if not bool(some.any()):
            continue
        bags = mu[some], sigma[some], mask[some], X[some]
        told = Told(Matrices(*bags[1:3]), known[some], explained)
        if effect:
            E[some], out[some] = _with_effect(told, bags, known[some], effect)
        else:
            E[some] = torch.where(bags[2], bags[0] + told.moved(bags[0])[0], 0.0)
            out[some] = told.times(bags[3], bags[1] @ bags[3])
    return E, out


def _with_effect(
    told: Told, bags: tuple[Tensor, Tensor, Tensor, Tensor], known: Tensor, effect: float
) -> tuple[Float[Tensor, "b p"], Float[Tensor, "b p k"]]:
    """The same where they share an effect: D S X = S X - S A S X, S = Sigma + tau^2 11'."""
    mu, sigma, mask, X = bags
    X = shared_by(mask, effect, X)  # Sigma^-1 S X, as Sigma 1 = 1
    make = partial(_made, told.ground, known, told.explained)
    every = torch.arange(len(mu), device=mu.device)
    average = Average(make, every, False, at_a_time(mask), _Rule(mask, known))

    def cut(at: Tensor) -> tuple[Tensor, Tensor]:
        return at + told.moved(at)[0], told.times(X, sigma @ X)

    _, delta, bent = averaged(average, mu, sigma, mask, X, effect, cut)
    bent = bent + delta[..., None] * (delta[:, None, :] @ X)
    moved = shared_by(mask, effect, delta[..., None])[..., 0]
    return mu + moved, sigma @ X - shared_by(mask, effect, bent)
