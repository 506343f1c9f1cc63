"""log P(all m < 0) for a Gaussian bag m ~ N(mu, S): the probability that a slide is negative.

`log_orthant` is the one to call. It chooses by rule, bag by bag:

* no correlation at all: the exact product of one-dimensional probabilities;
* two or three coordinates: sums that are exact to ten digits (`gpmil.moments.tiny`);
* otherwise EP with its third-order correction (`gpmil.moments.ep`), deterministic;
* in the right tail `sampling.log_union`, which samples the rare event that some m_i > 0: always
  where sum_i P(m_i > 0) < 0.01, and where that sum is below 1 if it has the smaller error;
* where EP does not converge: `sampling.tilted`.

All of it works in logs, so that P = 1e-300 and 1 - P = 1e-12 keep their digits.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from gpmil.moments import ep_bag
from gpmil.moments.effect_terms import at_one, dense
from gpmil.moments.ep import EP, check_gaussians, ep, padded
from gpmil.moments.orthant_effect import OverEffect, Profile, integrate, middle, quick
from gpmil.moments.sampling import log_union, tilted
from gpmil.moments.sites import Sites, matvec, pick
from gpmil.moments.tiny import NODES, log_tiny
from gpmil.moments.truncated import log_not

TINY = 2.0**-1022
TOLERANCE = 3e-3  # of the sites: log P + c3 is then a few 1e-4 off, 1e-3 at coupling 10
LARGE = 32  # coordinates from which bags are taken one by one on a CPU; below, batches are faster
LARGE_WITH_EFFECT = 16  # and where values of an effect are summed over, which torch is slow at
RARE = 0.01  # sum_i P(m_i > 0) below which EP's error estimate says nothing about 1 - P
NOTHING = 1e-6  # of the largest part of a slope: what is smaller is left out
DIGITS = 1e-10  # of the sums for two and three coordinates
TAIL = 2e-3  # relative error of 1 - P that needs no sampling


@dataclass(frozen=True)
class LogProbability:
    """log P(all m < 0) and log P(any m > 0) of b bags, each with its own digits.

    `error` estimates the absolute error of `log_p`; `error_1mp` is the same for `log_1mp`.
    """

    log_p: Float[Tensor, " b"]
    log_1mp: Float[Tensor, " b"]
    error: Float[Tensor, " b"]

    @property
    def error_1mp(self) -> Float[Tensor, " b"]:
        """d log(1 - P) = -P / (1 - P) d log P."""
        return self.error * torch.exp(self.log_p - self.log_1mp)


def log_orthant(
    mu: Float[Tensor, "b n"],
    cov: Float[Tensor, "b n n"],
    mask: Bool[Tensor, "b n"] | None = None,
    *,
    effect: float = 0.0,
    seed: int = 0,
) -> LogProbability:
    """log P(all m < 0), m ~ N(mu, cov), for b bags padded to n coordinates (mask: not padding).

    `effect` is tau where tau^2 11' is a part of cov: not told, P is less exact and takes longer.
    Deterministic: `seed` fixes the draws of the right tail. Works on the device of `mu`, in
    float64. Bags of similar size belong in one call; what a bag gets depends on no other bag, but
    for rounding.

    >>> mu, cov = torch.tensor([[0.3, -1.0]]).double(), torch.tensor([[[1.0, 0.6], [0.6, 2.0]]])
    >>> log_orthant(mu, cov.double()).log_p
    tensor([-1.0820], dtype=torch.float64)
    """
    mu, cov = mu.double(), cov.double()
    mask = torch.ones_like(mu, dtype=torch.bool) if mask is None else mask
    check_gaussians(mu, cov, mask)
    return _from_ep(_by_bag(_Way(mu, cov, mask, effect)), mu, cov, mask, seed)


class _Found(NamedTuple):
    """What is needed of EP to settle log P."""

    log_p: Float[Tensor, " b"]
    c3: Float[Tensor, " b"]
    error: Float[Tensor, " b"]
    converged: Bool[Tensor, " b"]


class _Way:
    """How EP is run on bags: as they are, or at one value of their effect."""

    def __init__(self, mu: Tensor, cov: Tensor, mask: Tensor, effect: float) -> None:
        self.mu, self.cov, self.mask, self.effect = mu, cov, mask, effect
        if effect:
            self.cov = cov - effect**2
            self.s = middle(mu, self.cov.diagonal(dim1=-2, dim2=-1), mask, effect)
            self.mu = mu + self.s[:, None]

    def alone(self, b: int) -> "_Found | ep_bag.LogP | None":
        """One bag by itself on a CPU; None where this cannot be done."""
        own = _one(self.mu, self.cov, self.mask, b)
        if not self.effect:
            return ep_bag.log_p(*own, tol=TOLERANCE)
        found = ep_bag.settled(*own, tol=TOLERANCE)
        if found is None:
            return None
        one = quick(*found, float(self.s[b]), self.effect)
        if one is not None:
            return one
        whole, mu, cov = found[0].as_batch(found[1]), own[0][None], own[1][None]
        at = at_one(whole, mu, cov, torch.ones_like(mu, dtype=torch.bool), self.s[b : b + 1])
        return _summed(integrate(Profile(at, dense(whole.cov)), self.effect), whole)

    def together(self, rows: Bool[Tensor, " b"]) -> "_Found | EP":
        """Some bags."""
        if self.effect:
            return _summed(*self.over_effect(rows))
        every = (self.mu, self.cov, self.mask)
        return _run_ep(*(every if bool(rows.all()) else pick(rows, every)))

    def over_effect(self, rows: Bool[Tensor, " b"]) -> tuple[OverEffect, EP]:
        """The sum over the effect of some bags, and EP at s*."""
        every = (self.mu, self.cov, self.mask, self.s)
        mu, cov, mask, s = every if bool(rows.all()) else pick(rows, every)
        found = _run_ep(mu, cov, mask)
        at = at_one(found, mu, cov, mask, s)
        return integrate(Profile(at, dense(found.cov)), self.effect), found


def _summed(over: OverEffect, found: EP) -> _Found:
    return _Found(over.log_p, torch.zeros_like(over.log_p), over.error, found.converged)


def _by_bag(way: _Way) -> "_Found | EP":
    """EP of every bag; on a CPU large ones one by one, and all that this cannot do together."""
    many = len(way.mu)
    if way.mu.is_cuda:
        return way.together(torch.ones(many, dtype=torch.bool, device=way.mu.device))
    large = (way.mask.sum(-1) >= (LARGE_WITH_EFFECT if way.effect else LARGE)).tolist()
    found = [way.alone(b) if large[b] else None for b in range(many)]
    left = torch.tensor([one is None for one in found])
    if bool(left.all()):
        return way.together(left)
    log_p, c3, error = torch.zeros(3, many, dtype=torch.float64)
    out = _Found(log_p, c3, error, torch.zeros_like(left))
    for b, one in enumerate(found):
        if one is not None:
            out.log_p[b], out.c3[b], out.error[b] = one.log_p, one.c3, one.error
            out.converged[b] = one.converged
    if bool(left.any()):
        rest = way.together(left)
        for ours, theirs in zip(out, (rest.log_p, rest.c3, rest.error, rest.converged)):
            ours[left] = theirs
    return out


def _from_ep(
    result: "_Found | EP", mu: Tensor, cov: Tensor, mask: Tensor, seed: int
) -> LogProbability:
    """What EP found, put right where it is not good enough."""
    t = torch.where(mask, mu / cov.diagonal(dim1=-2, dim2=-1).sqrt(), -math.inf)
    log_p, error = result.log_p + result.c3, result.error
    for b in torch.nonzero(~result.converged).flatten().tolist():
        log_p[b], error[b] = _floats(log_p, tilted(*_one(mu, cov, mask, b), seed=seed))
    found = settle(log_p, error, t, lambda b: log_union(*_one(mu, cov, mask, b), seed=seed))

    # No correlation: the exact product, log P = sum_i log Phi(-t_i)
    alone = _independent(cov, mask)
    product = torch.where(mask, torch.special.log_ndtr(-t), 0.0).sum(-1)
    # 1 - P = sum_i Phi(t_i) to the last digit where that is tiny
    tail = torch.logsumexp(torch.special.log_ndtr(t), dim=-1)
    rest = torch.where(tail < -40, tail, log_not(product))
    settled = LogProbability(
        torch.where(alone, product.clamp(max=-TINY), found.log_p),
        torch.where(alone, rest.clamp(max=-TINY), found.log_1mp),
        torch.where(alone, 0.0, found.error),
    )
    return _with_tiny(settled, mu, cov, mask & ~alone[:, None])


def _with_tiny(found: LogProbability, mu: Tensor, cov: Tensor, mask: Tensor) -> LogProbability:
    """The same, exact for bags of two and of three."""
    log_p, log_1mp, error = found.log_p, found.log_1mp, found.error
    for n in NODES:
        own = (mask.sum(-1) == n).nonzero()[:, 0]
        if not len(own):
            continue
        at = mask[own].nonzero()[:, 1].view(len(own), n)  # where a bag's coordinates are
        some = mu[own].gather(1, at)
        square = cov[own[:, None, None], at[:, :, None], at[:, None, :]]
        p, rest, exact = log_tiny(some, square)
        good = own[exact]
        log_p = log_p.index_copy(0, good, p[exact].clamp(max=-TINY))
        log_1mp = log_1mp.index_copy(0, good, rest[exact].clamp(max=-TINY))
        error = error.index_copy(0, good, torch.full_like(p[exact], DIGITS))
    return LogProbability(log_p, log_1mp, error)


class Expansion(NamedTuple):
    """log P of b bags at mu + G x for small x: log_p + slope'x - x'bend x / 2."""

    value: LogProbability
    slope: Float[Tensor, "b k"]
    bend: Float[Tensor, "b k k"]


def expand(
    mu: Float[Tensor, "b n"],
    cov: Float[Tensor, "b n n"],
    mask: Bool[Tensor, "b n"],
    G: Float[Tensor, "b n k"],
    *,
    effect: float = 0.0,
    seed: int = 0,
) -> Expansion:
    """log P(all m < 0) as `log_orthant` has it, and how it changes as mu moves along G.

    Derivatives are those of EP: the second one is S^-1 (Cov[m | all m < 0] - S) S^-1 of the exact
    log P, with EP's covariance in place of the exact one; `effect` as there.
    """
    if effect:
        way = _Way(mu, cov, mask, effect)
        over, at = way.over_effect(mask.any(-1))
        value = _from_ep(_summed(over, at), mu, cov, mask, seed)
        return Expansion(value, *_over_values(way, over, G))
    found = _run_ep(mu, cov, mask)
    X, white = _whitened(found, mu, cov, mask, G)
    value = _from_ep(found, mu, cov, mask, seed)
    return Expansion(value, (X.mT @ white)[..., 0], X.mT @ X)


def _over_values(
    way: _Way, over: OverEffect, G: Tensor
) -> tuple[Float[Tensor, "b k"], Float[Tensor, "b k k"]]:
    """Slope and bend where P = sum_j w_j P_j over values of the effect, pi_j = w_j P_j / P:

    slope = sum_j pi_j slope_j,  bend = sum_j pi_j (bend_j - slope_j slope_j') + slope slope'.
    """
    sites, pi = over.terms.sites(), over.weight
    # where no constraint counts there is neither slope nor bend
    size = pi * sites.nu.abs().sum(1)
    counts = size > NOTHING * size.amax(-1, keepdim=True)
    share, one = over.shares(torch.where(way.mask[..., None], G, 0.0)), way.mask[..., None].double()
    G = torch.cat([G - one * share[:, None], one], -1)
    slopes = G.new_zeros(len(G), G.shape[-1], pi.shape[-1])
    bend = G.new_zeros(len(G), G.shape[-1], G.shape[-1])
    for j in torch.nonzero(counts.any(0)).flatten().tolist():
        at, here = Sites(sites.tau[..., j], sites.nu[..., j]), counts[:, j, None]
        X, white = _whitened(at, way.mu + over.further[:, j, None], way.cov, way.mask, G)
        slopes[..., j] = (X.mT @ white)[..., 0] * here
        bend += (pi[:, j, None] * here)[..., None] * (X.mT @ X)
    return over.joined(share, slopes, bend)


def slope(
    mu: Float[Tensor, "b n"],
    cov: Float[Tensor, "b n n"],
    mask: Bool[Tensor, "b n"],
    G: Float[Tensor, "b n k"],
    *,
    effect: float = 0.0,
) -> Float[Tensor, "b k"]:
    """d log P / dx of EP at mu + G x, x = 0."""
    if effect:
        over, _ = _Way(mu, cov, mask, effect).over_effect(mask.any(-1))
        return matvec(G.mT, matvec(over.pulls(over.terms.sites()), over.weight))
    X, white = _whitened(_run_ep(mu, cov, mask), mu, cov, mask, G)
    return (X.mT @ white)[..., 0]


def _whitened(
    found: EP | Sites, mu: Tensor, cov: Tensor, mask: Tensor, G: Tensor
) -> tuple[Float[Tensor, "b n k"], Float[Tensor, "b n 1"]]:
    """X and z with d log P / dx = X'z and -d2 log P / dx2 = X'X.

    With B = I + T^.5 S T^.5 = L L' and s = T^-.5 nu: d log P / d mu = nu - tau mhat
    = T^.5 B^-1 (s - T^.5 mu), and -d2 log P / d mu2 = (T^-1 + S)^-1 = T^.5 B^-1 T^.5; in this form
    nothing cancels in the deepest tail.
    """
    mu, cov, _ = padded(mu, cov, mask)
    root = found.tau.sqrt()
    b = root[:, :, None] * cov * root[:, None, :]
    b.diagonal(dim1=-2, dim2=-1).add_(1.0)
    s = torch.where(found.tau > 0, found.nu / root, 0.0)
    right = torch.cat([root[:, :, None] * G, (s - root * mu)[:, :, None]], dim=-1)
    out = torch.linalg.solve_triangular(torch.linalg.cholesky(b), right, upper=False)
    return out[..., :-1], out[..., -1:]


def settle(
    log_p: Float[Tensor, " b"],
    error: Float[Tensor, " b"],
    t: Float[Tensor, "b n"],
    union: Callable[[int], tuple[float, float]],
) -> LogProbability:
    """EP's log P and its error, with the right tail put right.

    t are the means over the standard deviations (minus infinity where padded); `union(b)` samples
    log P(any m > 0) of bag b.
    """
    # P(all m < 0) <= P(m_i < 0): keeps log P below zero whatever the correction adds
    bound = torch.special.log_ndtr(-t).amin(-1)
    log_p, error = torch.minimum(log_p, bound), error.clone()
    log_1mp = log_not(log_p)
    # EP's error, harmless in log P, can be all of 1 - P.
    sum_p = torch.special.ndtr(t).sum(-1)
    off = torch.where(sum_p < RARE, math.inf, error * torch.exp(log_p - log_1mp))
    for b in torch.nonzero((sum_p < 1) & (off > TAIL)).flatten().tolist():
        value, spread = _floats(log_p, union(b))
        if spread < off[b]:
            log_p[b], log_1mp[b] = log_not(value), value
            error[b] = spread * torch.exp(value - log_p[b])
    # Certainty is never reported: the smallest number stands for what double precision rounds away.
    return LogProbability(log_p.clamp(max=-TINY), log_1mp.clamp(max=-TINY), error)


def _run_ep(mu: Tensor, cov: Tensor, mask: Tensor) -> EP:
    try:
        return ep(mu, cov, mask, tol=TOLERANCE)
    except torch.linalg.LinAlgError:
        smallest = torch.linalg.eigvalsh(padded(mu, cov, mask)[1])[:, 0]
        raise ValueError(
            f"expected positive semi-definite covariances, found an eigenvalue of "
            f"{float(smallest.min()):.3g} in bag {int(smallest.argmin())}: was the variance of a "
            "difference computed from rounded terms?"
        ) from None


def _one(mu: Tensor, cov: Tensor, mask: Tensor, b: int) -> tuple[Tensor, Tensor]:
    """Mean and covariance of bag b without its padding."""
    rows = mask[b]
    n = int(rows.sum())
    if bool(rows[:n].all()):  # padding comes last: no copy
        return mu[b, :n], cov[b, :n, :n]
    return mu[b, rows], cov[b][rows][:, rows]


def _floats(like: Tensor, pair: tuple[float, float]) -> Tensor:
    return torch.tensor(pair, dtype=like.dtype, device=like.device)


def _independent(cov: Tensor, mask: Tensor) -> Bool[Tensor, " b"]:
    """Bags whose coordinates are all uncorrelated."""
    size = mask.sum(-1)
    # One row tells most bags apart; the others are looked at whole.
    first = mask.int().argmax(-1)
    row = cov[torch.arange(len(cov), device=cov.device), first]
    alone = (mask & (row != 0)).sum(-1) <= 1
    for b in torch.nonzero(alone & (size > 1)).flatten().tolist():
        _, own = _one(row, cov, mask, b)
        alone[b] = int((own != 0).sum()) == int(size[b])
    return alone
