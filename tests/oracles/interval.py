"""Naive twins of `predict_interval`: dense matrices from the formulas, and many draws of u or w."""

import numpy as np
import torch
from scipy.spatial.distance import cdist
from scipy.stats import norm

from gpmil.moments.ep import ep


def geometry(model, bag):
    """H with E[m | w] = c + H w, u = L w, and the covariance of m | w: eqs. (fgu), (m_star)."""
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
    S = sigma + sigma @ (k(x, x) - A @ k(z, x)) @ sigma
    return sigma @ A @ np.linalg.cholesky(Kzz), (S + S.T) / 2


def given_u(model, bag, n_draws, seed):
    """Means (S, n) of m | u for draws of w as wide as intervals have it, and its covariance."""
    H, S = geometry(model, bag)
    w = np.random.default_rng(seed).multivariate_normal(
        model.interval_mean_, np.linalg.inv(model.interval_precision_), n_draws, method="eigh"
    )
    return model.mean_ + w @ H.T, S


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
    return 1 - pair_below(mu, S)


def pair_below(mu, S, points=2_001):
    """P(m1 < 0, m2 < 0) of means (b, 2) and one covariance, or one for each, by quadrature."""
    S = np.broadcast_to(S, (len(mu), 2, 2))
    sd = np.sqrt(S[:, :1, 0])
    m = np.linspace(-12, 0, points) * sd + np.minimum(mu[:, :1], 0)
    m = m - m[:, -1:]  # up to zero
    # P = int_{m1 < 0} N(m1) Phi(-E[m2 | m1] / sd[m2 | m1])
    ahead = mu[:, 1:] + S[:, :1, 1] / sd**2 * (m - mu[:, :1])
    left = np.sqrt(S[:, 1:, 1] - S[:, :1, 1] ** 2 / sd**2)
    values = norm.pdf(m, mu[:, :1], sd) * norm.cdf(-ahead / left)
    return np.trapezoid(values, m, axis=1)


def posterior_of_w(model, bags, n_steps, seed=3):
    """Draws of w from its exact posterior, bags of two: elliptical slice sampling (Murray 2010)."""
    H, S = (np.stack(a) for a in zip(*(geometry(model, bag) for bag in bags)))

    def log_likelihood(w):
        below = pair_below(model.mean_ + H @ w, S, 201)
        return np.log(np.where(bags.labels == 1, 1 - below, below)).sum()

    rng = np.random.default_rng(seed)
    w, kept = model.whitened_mean_, []
    here = log_likelihood(w)
    for _ in range(n_steps):
        other, bar = rng.standard_normal(len(w)), here + np.log(rng.random())
        angle = rng.uniform(0, 2 * np.pi)
        low, high = angle - 2 * np.pi, angle
        while True:
            trial = w * np.cos(angle) + other * np.sin(angle)
            there = log_likelihood(trial)
            if there > bar:
                break
            low, high = (angle, high) if angle < 0 else (low, angle)
            angle = rng.uniform(low, high)
        w, here = trial, there
        kept.append(w)
    return np.array(kept[n_steps // 10 :])


def quadratic_draws(a, b, B, n_draws=200_000, seed=5):
    """Draws of a + b'x + x'B x / 2."""
    x = np.random.default_rng(seed).standard_normal((n_draws, len(b)))
    return a + x @ b + ((x @ B) * x).sum(1) / 2
