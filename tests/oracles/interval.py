"""Naive twins of `predict_interval`: dense matrices from the formulas, and many draws of u."""

import numpy as np
import torch
from scipy.spatial.distance import cdist
from scipy.stats import norm

from gpmil.moments.ep import ep


def given_u(model, bag, n_draws, seed):
    """Means (S, n) of m | u for draws of u ~ q(u), and its covariance: eqs. (fgu), (m_star)."""
    x, z = (
        (a - model.feature_mean_) / model.feature_scale_
        for a in (bag.features, model.inducing_points_)
    )

    def k(a, b):
        return model.variance_ * np.exp(-(cdist(a, b) ** 2) / (2 * model.lengthscale_**2))

    Kzz = k(z, z) + 1e-6 * model.variance_ * np.eye(len(z))
    A = np.linalg.solve(Kzz, k(z, x)).T
    edges = bag.adjacency.toarray()
    laplacian = np.diag(edges.sum(1)) - edges
    sigma = np.linalg.inv(np.eye(len(x)) + model.coupling_ * laplacian)
    u = np.random.default_rng(seed).multivariate_normal(
        model.posterior_mean_, model.posterior_covariance_, size=n_draws, method="eigh"
    )
    S = sigma + sigma @ (k(x, x) - A @ k(z, x)) @ sigma
    return (model.mean_ + u @ A.T) @ sigma, (S + S.T) / 2


def drawn(model, bag, n_draws=2_000, seed=7):
    """P(y = 1 | u) of one bag for draws of u."""
    mu, S = (torch.from_numpy(a) for a in given_u(model, bag, n_draws, seed))
    found = [ep(some, S.expand(len(some), -1, -1), tol=1e-3) for some in mu.split(250)]
    return np.concatenate([-np.expm1((e.log_p + e.c3).numpy()) for e in found])


def drawn_with_effect(model, bag, n_draws=500, seed=7):
    """The same of a model with a slide effect: a sum over 41 values of it for every draw."""
    mu, S = given_u(model, bag, n_draws, seed)
    tau = model.slide_effect_
    s = np.linspace(-6 * tau, 6 * tau, 41)
    at = torch.from_numpy((mu[:, None] + s[:, None]).reshape(-1, mu.shape[1]))
    found = ep(at, torch.from_numpy(S).expand(len(at), -1, -1), tol=1e-3)
    p = np.exp((found.log_p + found.c3).numpy()).reshape(n_draws, len(s))
    return 1 - p @ norm.pdf(s, scale=tau) * (s[1] - s[0])


def drawn_pair(model, bag, n_draws=2_000, seed=7):
    """The same for a bag of two instances, by quadrature in place of EP."""
    mu, S = given_u(model, bag, n_draws, seed)
    sd = np.sqrt(S[0, 0])
    m = np.linspace(-12 * sd + mu[:, 0].min(), 0, 2_001)
    # P = int_{m1 < 0} N(m1) Phi(-E[m2 | m1] / sd[m2 | m1])
    ahead = mu[:, 1:] + S[0, 1] / S[0, 0] * (m - mu[:, :1])
    left = np.sqrt(S[1, 1] - S[0, 1] ** 2 / S[0, 0])
    values = norm.pdf(m, mu[:, :1], sd) * norm.cdf(-ahead / left)
    return 1 - np.trapezoid(values, m, axis=1)


def quadratic_draws(a, b, B, n_draws=200_000, seed=5):
    """Draws of a + b'x + x'B x / 2."""
    x = np.random.default_rng(seed).standard_normal((n_draws, len(b)))
    return a + x @ b + ((x @ B) * x).sum(1) / 2
