"""Simulation-based calibration of the posterior (Talts et al., 2018).

Draw f and s from the prior, labels from them, fit at the true settings, and ask at which quantile
of the posterior the truth lies. If the posterior is right, these ranks are uniform, whatever the
labels; heaped at both ends they say that it is too narrow, in the middle that it is too wide.

The rank of f is that of a patch of a training bag, and of a patch of a bag that was not seen; one
of each per cohort, so that ranks are independent. Of s, what the patches of a slide share, it is
that of one training bag under

    q(s) ~ N(s; 0, tau^2) q_b(s) for a negative bag, N(s; 0, tau^2) (1 - q_b(s)) for a positive one,
    q_b(s) = prod_i Phi(-(mu_i + s) / sigma_i).

q(u) of the paper has the covariance that it would have if every m were seen. Beside it stands
Laplace's approximation at the same mode, with the curvature of the labels' likelihood:

    precision of w = I - sum_b H_b' (d^2 log Z_b / d mu_b^2) H_b.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Float
from scipy.special import log_ndtr, logsumexp, ndtr
from scipy.stats import kstest, norm

from gpmil.models import VGPMILPRI
from gpmil.proof.from_the_model import Prior, Truth, cohort
from gpmil.proof.tissue import D

KINDS = {
    "seen": "first: f of a patch in a training bag",
    "new": "second: f of a patch in a new bag",
    "seen, Laplace": "the first, Laplace's covariance",
    "new, Laplace": "the second, Laplace's covariance",
    "effect": "s of a training bag",
}
GRID = np.linspace(-8, 8, 4001)  # of s / tau


@dataclass(frozen=True)
class RankCase:
    """What is drawn and fitted."""

    name: str
    prior: Prior
    n_bags: int = 100


CASES = (
    RankCase("no coupling, no effect", Prior(0.0, 0.0, (4, 6), n_inducing=40)),
    RankCase("coupling .7, effect 1", Prior(0.7, 1.0, (4, 6), n_inducing=40)),
)


def one_cohort(case: RankCase, seed: int) -> dict[str, Any]:
    """The rank of one f that was seen, of one that was not, and of one s."""
    prior = case.prior
    truth = cohort(prior, case.n_bags + 1, (seed, 14, round(100 * prior.effect)))
    train = truth.bags[: case.n_bags]
    model = VGPMILPRI(
        variance=prior.variance,
        lengthscale=prior.length * np.sqrt(D),
        mean=truth.c,
        coupling=prior.coupling,
        slide_effect=prior.effect,
        inducing=truth.Z,
        standardize=False,
        device="cpu",
        random_state=0,
    ).fit(train)
    rng = np.random.default_rng((seed, 15))
    bag = int(rng.integers(case.n_bags))
    found = {"effect": np.nan}
    laplace = laplace_covariance(model, truth, prior, case.n_bags)
    for kind, b in (("seen", bag), ("new", case.n_bags)):
        found |= ranks_of_f(model, truth, prior, b, rng, laplace, kind)
    if prior.effect:
        mu, sigma = fitted_moments(model, truth, prior, bag)
        positive = bool(train.labels[bag])
        found["effect"] = rank_of_s(float(truth.s[bag]), mu, sigma, prior.effect, positive)
    return found


def ranks_of_f(
    model: VGPMILPRI,
    truth: Truth,
    prior: Prior,
    bag: int,
    rng: np.random.Generator,
    laplace: Float[np.ndarray, "m m"],
    kind: str,
) -> dict[str, float]:
    """Phi((f - mean) / sd) of one patch of the bag, under q(f) and with Laplace's covariance."""
    slide = truth.slides[bag]
    i = int(rng.integers(len(slide.x)))
    mean, variance = moments_of_f(model, slide.x[i : i + 1], truth, prior)
    away = truth.f[bag][i] - mean[0]
    W = slide.W[i]
    # variance of f = kxx - w w' + w cov(w) w'
    wide = prior.variance - W @ W + W @ laplace @ W
    return {
        kind: float(ndtr(away / np.sqrt(variance[0]))),
        f"{kind}, Laplace": float(ndtr(away / np.sqrt(wide))),
    }


def laplace_covariance(
    model: VGPMILPRI, truth: Truth, prior: Prior, n_bags: int
) -> Float[np.ndarray, "m m"]:
    """Of w, at the mode that was fitted."""
    precision = np.eye(len(truth.Z))
    for bag in range(n_bags):
        mu, sigma = fitted_moments(model, truth, prior, bag)
        positive = bool(truth.bags.labels[bag])
        H = truth.slides[bag].Sigma @ truth.slides[bag].W
        precision -= H.T @ curvature(mu, sigma, prior.effect, positive) @ H
    return np.linalg.inv(precision)


def curvature(
    mu: Float[np.ndarray, " n"], sigma: Float[np.ndarray, " n"], tau: float, positive: bool
) -> Float[np.ndarray, "n n"]:
    """d^2 log Z / d mu^2 of one bag; the effect s is summed over at Gauss-Hermite nodes.

    At a node q_k = prod_i Phi(-t_ik), with gradient g_k = -h(t_k) / sigma of its logarithm and
    second derivatives -h (h - t) / sigma^2; nodes weigh pi_k ~ w_k q_k.
    """
    nodes, weights = np.polynomial.hermite_e.hermegauss(31) if tau else (np.zeros(1), np.ones(1))
    t = (mu[:, None] + tau * nodes) / sigma[:, None]
    each = log_ndtr(-t).sum(axis=0) + np.log(weights / weights.sum())
    log_q = logsumexp(each)
    pi = np.exp(each - log_q)
    h = np.exp(norm.logpdf(t) - log_ndtr(-t))
    g_k, bend = -h / sigma[:, None], -h * (h - t) / sigma[:, None] ** 2
    g = g_k @ pi
    # the second derivatives of log q, plus g g'
    both = np.diag(bend @ pi) + (g_k * pi) @ g_k.T
    if not positive:
        return both - np.outer(g, g)
    # log(1 - q): r = q / (1 - q)
    r = np.exp(log_q) / -np.expm1(log_q)
    return -r * both - r**2 * np.outer(g, g)


def moments_of_f(
    model: VGPMILPRI, x: Float[np.ndarray, "n d"], truth: Truth, prior: Prior
) -> tuple[Float[np.ndarray, " n"], Float[np.ndarray, " n"]]:
    """Mean and variance of f at x under q(u) = N(mu_u, S_u), written down once more.

    A = Kxz Kzz^-1,  mean = c + A mu_u,  variance = kxx - (A Kzz A')_ii + (A S_u A')_ii
    """
    Kzz = prior.kernel(truth.Z, truth.Z) + 1e-6 * prior.variance * np.eye(len(truth.Z))
    A = np.linalg.solve(Kzz, prior.kernel(truth.Z, x)).T
    mean = truth.c + A @ model.posterior_mean_
    variance = prior.variance + np.einsum("nm,mk,nk->n", A, model.posterior_covariance_ - Kzz, A)
    return mean, variance


def fitted_moments(
    model: VGPMILPRI, truth: Truth, prior: Prior, bag: int
) -> tuple[Float[np.ndarray, " n"], Float[np.ndarray, " n"]]:
    """mu = Sigma E f and sigma_i = sqrt(Sigma_ii) of a training bag: what q(s) is made of."""
    slide = truth.slides[bag]
    mean, _ = moments_of_f(model, slide.x, truth, prior)
    return slide.Sigma @ mean, np.sqrt(np.diag(slide.Sigma))


def rank_of_s(s: float, mu: np.ndarray, sigma: np.ndarray, tau: float, positive: bool) -> float:
    """The share of q(s) below s, by sums over a fine grid."""
    log_q = log_ndtr(-(mu[:, None] + tau * GRID) / sigma[:, None]).sum(axis=0)
    likelihood = -np.expm1(log_q) if positive else np.exp(log_q - log_q.max())
    weight = np.exp(-(GRID**2) / 2) * likelihood
    below = np.interp(s / tau, GRID, np.cumsum(weight) - weight / 2)
    return float(below / weight.sum())


def summary(ranks: Float[np.ndarray, " n"]) -> dict[str, float]:
    """How far from uniform: how often 50 and 90 % intervals hold the truth, and a test."""
    away = np.abs(ranks - 0.5)
    return {
        "held by 50 %": float((away < 0.25).mean()),
        "held by 90 %": float((away < 0.45).mean()),
        "mean rank": float(ranks.mean()),
        "p": float(kstest(ranks, "uniform").pvalue),
    }
