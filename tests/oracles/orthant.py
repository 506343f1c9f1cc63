"""Slow, plain twins of the orthant engine: one point, one coordinate, one formula at a time."""

import math

import mpmath
import numpy as np
import torch
from scipy.special import log_ndtr, logsumexp, ndtri_exp
from scipy.stats import norm


def _log_integral(log_integrand, low, high):
    """log of the integral of exp(log_integrand), a bump: trapezia converge spectrally on it."""
    coarse = np.linspace(low, high, 4_001)
    peak = coarse[np.argmax(log_integrand(coarse))]
    z = np.linspace(peak - 13, peak + 13, 20_001)
    return logsumexp(log_integrand(z)) + math.log(z[1] - z[0])


def equicorrelated(mu, rho):
    """log P(all m < 0) for unit variances and correlation rho > 0, by a one-dimensional integral.

    m_i = mu_i + sqrt(rho) z + sqrt(1-rho) e_i, so
    P = E_z prod_i Phi(-(mu_i + sqrt(rho) z)/sqrt(1-rho)).
    """

    def log_p(z):
        inner = -(np.asarray(mu) + math.sqrt(rho) * z[:, None]) / math.sqrt(1 - rho)
        return log_ndtr(inner).sum(axis=1)

    return _log_integral(lambda z: norm.logpdf(z) + log_p(z), -300, 60)


def union_equicorrelated(mu, rho):
    """log P(any m > 0), unit variances and correlation rho > 0; exact in the right tail."""

    def log_1mp(z):
        inner = -(np.asarray(mu) + math.sqrt(rho) * z[:, None]) / math.sqrt(1 - rho)
        log_p = np.minimum(log_ndtr(inner).sum(axis=1), -1e-300)
        return np.log(-np.expm1(log_p))

    return _log_integral(lambda z: norm.logpdf(z) + log_1mp(z), -12, 38)


def site(mean, var):
    """tau, nu of N(m | mean, var) 1[m < 0] from its mean and variance, in 60 digits; log Z too."""
    with mpmath.workdps(60):
        t = mpmath.mpf(mean) / mpmath.sqrt(var)
        log_z = mpmath.log(mpmath.ncdf(-t))
        h = mpmath.npdf(t) / mpmath.ncdf(-t)
        tilted_mean, tilted_var = mean - mpmath.sqrt(var) * h, var * (1 - h * (h - t))
        tau = 1 / tilted_var - 1 / mpmath.mpf(var)
        return float(tau), float(tilted_mean / tilted_var - mean / mpmath.mpf(var)), float(log_z)


def standard_cumulants(mean, var):
    """Third and fourth cumulants of N(mean, var) given m < 0, standardised, by quadrature."""
    t = mean / math.sqrt(var)
    with mpmath.workdps(40):
        edges = [-mpmath.inf, min(t, 0) - 5, min(t, 0) - 1, 0]
        moment = [mpmath.quad(lambda x, k=k: x**k * mpmath.npdf(x - t), edges) for k in range(5)]
        m1, m2, m3, m4 = (m / moment[0] for m in moment[1:])
        var0 = m2 - m1**2
        k3 = m3 - 3 * m1 * m2 + 2 * m1**3
        k4 = m4 - 4 * m3 * m1 - 3 * m2**2 + 12 * m2 * m1**2 - 6 * m1**4
        return float(k3 / var0**1.5), float(k4 / var0**2)


def ep_loop(mu, cov, sweeps=300):
    """Sequential EP with explicit inverses: tau, nu, mean, covariance, log P_EP, c3, c4."""
    n = len(mu)
    tau, nu = np.zeros(n), np.zeros(n)
    precision = np.linalg.inv(cov)
    for _ in range(sweeps):
        for i in range(n):
            v = np.linalg.inv(precision + np.diag(tau))
            mean = v @ (precision @ mu + nu)
            p, h = 1 / v[i, i] - tau[i], mean[i] / v[i, i] - nu[i]
            tau[i], nu[i], _ = site(h / p, 1 / p)
    v = np.linalg.inv(precision + np.diag(tau))
    mean = v @ (precision @ mu + nu)
    # log of the Gaussian integral by completing the square
    log_p = (
        0.5 * np.linalg.slogdet(v)[1]
        - 0.5 * np.linalg.slogdet(cov)[1]
        - 0.5 * mu @ precision @ mu
        + 0.5 * mean @ np.linalg.inv(v) @ mean
    )
    k3, k4 = np.zeros(n), np.zeros(n)
    for i in range(n):
        p, h = 1 / v[i, i] - tau[i], mean[i] / v[i, i] - nu[i]
        _, _, log_z = site(h / p, 1 / p)
        log_p += -0.5 * math.log(v[i, i] * p) + h * h / (2 * p) - mean[i] ** 2 / (2 * v[i, i])
        log_p += log_z
        k3[i], k4[i] = standard_cumulants(h / p, 1 / p)
    c3 = c4 = 0.0
    for i in range(n):
        for j in range(n):
            if i != j:
                r = v[i, j] / math.sqrt(v[i, i] * v[j, j])
                c3 += k3[i] * k3[j] * r**3 / 12
                c4 += k4[i] * k4[j] * r**4 / 48
    return tau, nu, mean, v, log_p, c3, c4


def tilted_loop(tau, nu, mean, v, log_gauss, points):
    """The tilted sampler without resampling, a loop over points and coordinates."""
    factor = np.linalg.cholesky(v)
    log_w = []
    for u in points:
        y, total = [], 0.0
        for i in range(len(mean)):
            c = mean[i] + sum(factor[i, j] * y[j] for j in range(i))
            s = factor[i, i]
            p, h = 1 / s**2 - tau[i], c / s**2 - nu[i]
            log_phi = log_ndtr(-h / math.sqrt(p))
            total += -0.5 * math.log(s**2 * p) + h**2 / (2 * p) - c**2 / (2 * s**2) + log_phi
            m = h / p + ndtri_exp(math.log(u[i]) + log_phi) / math.sqrt(p)
            y.append((m - c) / s)
        log_w.append(total)
    return log_gauss + logsumexp(log_w) - math.log(len(log_w))


def random_problem(n, seed, shift=0.0):
    """A mean and a covariance without structure."""
    rng = np.random.default_rng(seed)
    a = rng.standard_normal((n, n + 2))
    return rng.standard_normal(n) + shift, a @ a.T / n + 0.3 * np.eye(n)


def tensors(mu, cov):
    return torch.from_numpy(np.asarray(mu)), torch.from_numpy(np.asarray(cov))


def batch(mu, cov):
    """One bag as a batch."""
    return tuple(x[None] for x in tensors(mu, cov))


def slide_parts(
    rows, cols, coupling, variance=1.0, length=1.0, mean=0.0, seed=0, dim=12, inducing=15
):
    """A made-up slide: mu, P, F, E with S = Sigma + Sigma (F F' + E) Sigma, Sigma = P^-1.

    F F' + E is the covariance of f under a sparse GP on features; `length` is in units of
    sqrt(dim).
    """
    rng = np.random.default_rng(seed)
    n = rows * cols
    r, c = np.divmod(np.arange(n), cols)
    field = np.sin(0.7 * r + rng.uniform(0, 6))[:, None] + np.cos(0.5 * c)[:, None]
    x = 0.5 * field * rng.standard_normal(dim) + rng.standard_normal((n, dim))
    z = rng.standard_normal((inducing, dim))

    def kernel(a, b):
        square = ((a[:, None] - b[None]) ** 2).sum(-1)
        return variance * np.exp(-square / (2 * length**2 * dim))

    near = np.abs(r[:, None] - r) + np.abs(c[:, None] - c) == 1
    precision = np.eye(n) + coupling * (np.diag(near.sum(1)) - near)
    sigma = np.linalg.inv(precision)
    lower = np.linalg.cholesky(kernel(z, z) + 1e-6 * variance * np.eye(inducing))
    w = np.linalg.solve(lower, kernel(z, x)).T
    posterior = np.linalg.inv(np.eye(inducing) + 5 * w.T @ sigma @ w)
    mu = mean + sigma @ w @ rng.standard_normal(inducing)
    return mu, precision, w @ np.linalg.cholesky(posterior), kernel(x, x) - w @ w.T


def slide(*args, **kwargs):
    """mu and the dense S of a made-up slide."""
    mu, precision, factor, residual = slide_parts(*args, **kwargs)
    sigma = np.linalg.inv(precision)
    cov = sigma + sigma @ (factor @ factor.T + residual) @ sigma
    return mu, (cov + cov.T) / 2
