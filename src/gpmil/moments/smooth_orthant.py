"""log P(all m < 0) by plain EP, for labels of patches: no correction, no sampling.

Differences of such logarithms, with a label and without, must not have the noise of either.

With a slide effect, m ~ N(mu, S + tau^2 11'), EP on the whole covariance is wrong (by .2 in log P
at tau = 2), and S alone is where it is right; orthant_effect.py has the sum over the effect s from
EP at one value s*, p(s) = N(s; 0, tau^2) exp f~(s). That f~ is off a little from EP's own
f(s); so EP is run again at a few s_k, the nodes of Gauss's rule for p(s) / P~,

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
from gpmil.moments.ep import ep
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
    """log P(all m < 0), below its bound min_i log P(m_i < 0).

    `effect` is tau where tau^2 11' is a part of cov.
    """
    t = mu * cov.diagonal(dim1=-2, dim2=-1).rsqrt()
    bound = torch.special.log_ndtr(-torch.where(mask, t, -math.inf)).amin(-1)
    if has_effect(effect):
        tau = torch.as_tensor(effect, dtype=torch.float64, device=mu.device)
        alone = cov - tau.square() * (mask[:, :, None] & mask[:, None, :])
        log_p = _over_effect(mu, alone, mask, float(tau))
    else:
        log_p = ep(mu, cov, mask, tol=TOLERANCE).log_p
    return torch.minimum(log_p, bound).clamp(max=-TINY)


def _over_effect(mu: Tensor, cov: Tensor, mask: Tensor, tau: float) -> Float[Tensor, " b"]:
    """The sum over the effect, cov without it."""
    profile = _profile(mu, cov, mask, tau)
    over = integrate(profile, tau)
    rule = gauss_rule(over.s, over.weight, NODES)
    terms = profile.terms(rule.s)
    ratios, sites = rule.weight.log() - profile.value(rule.s, terms), terms.sites()
    found = []
    for k in range(NODES):
        start = Sites(*(x[..., k] for x in sites))
        # log P is stationary in the sites
        again = ep(mu + rule.s[:, k, None], cov, mask, tol=100 * TOLERANCE, start=start)
        found.append(again.log_p)
    return over.log_p + torch.logsumexp(ratios + torch.stack(found, -1), -1)


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
