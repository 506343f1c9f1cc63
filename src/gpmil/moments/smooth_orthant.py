"""log P(all m < 0) by plain EP, with its derivatives in the mean, the covariance and tau.

For learning: no correction, no sampling, so that a small change of the settings changes it little.

With a slide effect, m ~ N(mu, S + tau^2 11'), EP on the whole covariance is wrong (by .2 in log P
at tau = 2), and S alone is where it is right; orthant_effect.py has the sum over the effect s from
EP at one value s*, p(s) = N(s; 0, tau^2) exp f~(s). That f~ has no simple derivatives. EP's own
f(s) has them at every s; so EP is run again at a few s_k, the nodes of Gauss's rule for p(s) / P~,

    P = P~ E[exp(f - f~)] = P~ sum_k w_k exp(f(s_k) - f~(s_k)),

with f - f~ small and smooth. On the slides of two data sets three of them give the mean score of
thirteen nodes of a lattice to 2e-4, to 5e-4 at tau = 4.
"""

import math
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from gpmil.moments.effect_terms import at_one, dense
from gpmil.moments.ep import EP, ep
from gpmil.moments.likelihood import has_effect
from gpmil.moments.orthant import TINY
from gpmil.moments.orthant_effect import Profile, integrate, middle
from gpmil.moments.sites import Sites

TOLERANCE = 1e-6  # of the sites
NODES = 3  # values of the effect at which EP is run
FIRST = 1e-3  # of the sites at s*, which only say where those are, and begin with what sites


def log_orthant_ep(
    mu: Float[Tensor, "b n"],
    cov: Float[Tensor, "b n n"],
    mask: Bool[Tensor, "b n"],
    effect: float | Float[Tensor, ""] = 0.0,
) -> Float[Tensor, " b"]:
    """log P(all m < 0), below its bound min_i log P(m_i < 0); differentiable.

    `effect` is tau where tau^2 11' is a part of cov.
    """
    t = mu * cov.diagonal(dim1=-2, dim2=-1).rsqrt()
    bound = torch.special.log_ndtr(-torch.where(mask, t, -math.inf)).amin(-1)
    if has_effect(effect):
        tau = torch.as_tensor(effect, dtype=torch.float64, device=mu.device)
        alone = cov - tau.square() * (mask[:, :, None] & mask[:, None, :])
        log_p = _OverEffect.apply(mu, alone, mask, tau)
    else:
        log_p = _Plain.apply(mu, cov, mask)
    return torch.minimum(log_p, bound).clamp(max=-TINY)


class _Plain(torch.autograd.Function):
    """EP's log P without an effect."""

    @staticmethod
    def forward(ctx, mu: Tensor, cov: Tensor, mask: Tensor) -> Tensor:
        found = ep(mu, cov, mask, tol=TOLERANCE)
        ctx.save_for_backward(*slopes(found))
        return found.log_p

    @staticmethod
    def backward(ctx, up: Tensor) -> tuple[Tensor, Tensor, None]:
        by_mu, by_cov = ctx.saved_tensors
        return up[:, None] * by_mu, up[:, None, None] * by_cov, None


def slopes(found: EP) -> tuple[Float[Tensor, "b n"], Float[Tensor, "b n n"]]:
    """At the fixed point of EP the sites stand still to first order, so that

    d log P / d mu = S^-1 (mhat - mu) = nu - tau mhat =: g
    d log P / d S  = (g g' - (T^-1 + S)^-1) / 2,  (T^-1 + S)^-1 = T - T V T.
    """
    tau = found.tau
    g = found.nu - tau * found.mean
    inner = torch.diag_embed(tau) - tau[:, :, None] * found.cov * tau[:, None, :]
    return g, (g[:, :, None] * g[:, None, :] - inner) / 2


class _OverEffect(torch.autograd.Function):
    """The sum over the effect, cov without it; the derivatives are means over its nodes."""

    @staticmethod
    def forward(ctx, mu: Tensor, cov: Tensor, mask: Tensor, effect: Tensor) -> Tensor:
        tau = float(effect)
        profile = _profile(mu, cov, mask, tau)
        over = integrate(profile, tau)
        rule = gauss_rule(over.s, over.weight, NODES)
        terms = profile.terms(rule.s)
        ratios, sites = rule.weight.log() - profile.value(rule.s, terms), terms.sites()
        found = []
        for k in range(NODES):
            start = Sites(*(x[..., k] for x in sites))
            moved = mu + rule.s[:, k, None]
            # log P is stationary in the sites
            found.append(ep(moved, cov, mask, tol=100 * TOLERANCE, start=start))
        log_w = ratios + torch.stack([one.log_p for one in found], -1)
        weight = log_w.softmax(-1)
        by_mu, by_cov = torch.zeros_like(mu), torch.zeros_like(cov)
        for w, one in zip(weight.unbind(-1), found):
            for total, slope in zip((by_mu, by_cov), slopes(one)):
                total += slope * w.view(-1, *(1 for _ in slope.shape[1:]))
        # d log N(s; 0, tau^2) / d tau
        by_effect = (weight * rule.s.square()).sum(-1) / tau**3 - 1 / tau
        ctx.save_for_backward(by_mu, by_cov, by_effect)
        return over.log_p + torch.logsumexp(log_w, -1)

    @staticmethod
    def backward(ctx, up: Tensor) -> tuple[Tensor, Tensor, None, Tensor]:
        by_mu, by_cov, by_effect = ctx.saved_tensors
        return up[:, None] * by_mu, up[:, None, None] * by_cov, None, (up * by_effect).sum()


def _profile(mu: Tensor, cov: Tensor, mask: Tensor, tau: float) -> Profile:
    """f~(s), from EP at s*."""
    s = middle(mu, cov.diagonal(dim1=-2, dim2=-1), mask, tau)
    moved = mu + s[:, None]
    found = ep(moved, cov, mask, tol=FIRST)
    return Profile(at_one(found, moved, cov, mask, s), dense(found.cov))


class Rule(NamedTuple):
    """sum_k weight_k h(s_k)."""

    s: Float[Tensor, "b k"]
    weight: Float[Tensor, "b k"]


def gauss_rule(s: Float[Tensor, "b k"], w: Float[Tensor, "b k"], count: int) -> Rule:
    """Gauss's rule for values s with weights w: right for polynomials up to 2 count - 1.

    By Golub and Welsch: the nodes are the eigenvalues of the matrix of the three-term recurrence
    beta_k+1 p_k+1 = (x - alpha_k) p_k - beta_k p_k-1 of the orthogonal polynomials.
    """
    mean = (w * s).sum(-1, keepdim=True)
    deviation = (w * (s - mean).square()).sum(-1, keepdim=True).sqrt()
    x = (s - mean) / deviation
    before, p, beta = torch.zeros_like(x), torch.ones_like(x), torch.zeros_like(mean)
    J = x.new_zeros(len(x), count, count)
    for k in range(count):
        alpha = (w * x * p * p).sum(-1, keepdim=True)
        J[:, k, k] = alpha[:, 0]
        new = (x - alpha) * p - beta * before
        beta = (w * new * new).sum(-1, keepdim=True).sqrt()
        if k + 1 < count:
            J[:, k, k + 1] = J[:, k + 1, k] = beta[:, 0]
        before, p = p, new / beta
    at, vectors = torch.linalg.eigh(J)
    return Rule(mean + deviation * at, vectors[:, 0].square())
