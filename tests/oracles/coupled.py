"""Naive twins of moments.coupled: long sampling, exact integrals in two and three dimensions."""

import numpy as np
import torch
from scipy.integrate import quad
from scipy.special import log_ndtr, logsumexp, ndtr, ndtri_exp, owens_t

from oracles.model import norm_logpdf


def gibbs(mu, precision, chains=3000, sweeps=220, burn=60, seed=0):
    """E[m | all m < 0] for m ~ N(mu, P^-1) and its standard error, by long Gibbs sampling."""
    rng = np.random.default_rng(seed)
    n = len(mu)
    m = np.minimum(mu, -0.1)[:, None] - 0.1 * rng.random((n, chains))
    total = np.zeros((n, chains))
    scale = 1 / np.sqrt(np.diag(precision))
    for sweep in range(sweeps):
        for i in range(n):
            others = precision[i] @ (m - mu[:, None]) - precision[i, i] * (m[i] - mu[i])
            center = mu[i] - others / precision[i, i]
            # m_i < 0: inverse of the distribution function, in logs
            log_u = np.log(rng.random(chains)) + log_ndtr(-center / scale[i])
            m[i] = center + scale[i] * ndtri_exp(log_u)
        if sweep >= burn:
            total += m
    means = total / (sweeps - burn)
    return means.mean(1), means.std(1) / np.sqrt(chains)


def bivariate(h, k, rho):
    """P(X < h, Y < k) of a standard bivariate normal, by Owen's T."""
    s = np.sqrt(1 - rho**2)
    if h == 0 and k == 0:
        return 0.25 + np.arcsin(rho) / (2 * np.pi)
    a_h = (k - rho * h) / (h * s) if h else np.inf * np.sign(k)
    a_k = (h - rho * k) / (k * s) if k else np.inf * np.sign(h)
    beta = 0.0 if h * k > 0 or (h * k == 0 and h + k >= 0) else 0.5
    return (ndtr(h) + ndtr(k)) / 2 - owens_t(h, a_h) - owens_t(k, a_k) - beta


def below(mean, cov):
    """P(all m < 0) in one, two or three dimensions, to twelve digits."""
    s = np.sqrt(np.diag(cov))
    h = -mean / s
    if len(mean) == 1:
        return ndtr(h[0])
    if len(mean) == 2:
        return bivariate(h[0], h[1], cov[0, 1] / (s[0] * s[1]))

    def slice_(x):
        m, c = conditional(mean, cov, 0, x)
        return np.exp(norm_logpdf((x - mean[0]) / s[0])) / s[0] * below(m, c)

    low = min(mean[0], 0.0) - 9 * s[0]
    return quad(slice_, low, 0.0, epsabs=1e-15, epsrel=1e-13, limit=400)[0]


def conditional(mean, cov, i, value):
    """Mean and covariance of the others given m_i = value."""
    rest = np.arange(len(mean)) != i
    gain = cov[rest, i] / cov[i, i]
    return mean[rest] + gain * (value - mean[i]), cov[np.ix_(rest, rest)] - np.outer(
        gain, cov[i, rest]
    )


def exact(mean, cov, label):
    """E[m] and log Z of a bag of up to three patches: E = mu + Sigma d log Z / d mu."""
    P = below(mean, cov)
    gradient = np.empty(len(mean))
    for i in range(len(mean)):
        s = np.sqrt(cov[i, i])
        at_zero = np.exp(norm_logpdf(mean[i] / s)) / s
        rest = below(*conditional(mean, cov, i, 0.0)) if len(mean) > 1 else 1.0
        gradient[i] = -at_zero * rest  # dP / dmu_i
    if label == 0:
        return mean + cov @ gradient / P, np.log(P)
    return mean - cov @ gradient / (1 - P), np.log1p(-P)


def over_effect(mu, Sigma, label, tau, plain, below):
    """log Z, E and dE/dmu of one bag that shares an effect: a dense sum over its values.

    `plain` and `below` are CoupledMoments of the bag without an effect, with its label and with
    the negative one. A positive bag has Z = 1 - Q where that keeps digits.
    """
    S, n = Sigma + tau**2, len(mu)
    P = np.linalg.inv(Sigma)

    def averages(moments):
        s = np.linspace(-6.5 * tau, 6.5 * tau, 101)
        log_f, first, second = np.empty(len(s)), [], []
        for k, x in enumerate(s):
            E, log_z = moments.expectations(torch.from_numpy(mu + x))
            gamma = P @ (E.numpy() - mu - x)
            D = moments.slope(torch.from_numpy(P), torch.eye(n).double()).numpy()  # P D
            log_f[k] = log_z - (x / tau) ** 2 / 2
            first.append(gamma)
            second.append(np.outer(gamma, gamma) - P + D)
        pi = np.exp(log_f - logsumexp(log_f))
        log_z = logsumexp(log_f) + np.log((s[1] - s[0]) / (tau * np.sqrt(2 * np.pi)))
        return log_z, pi @ np.array(first), np.tensordot(pi, np.array(second), 1)

    log_z, gamma, second = averages(below)
    if label and log_z > -0.05:
        log_z, gamma, second = averages(plain)
    elif label:
        r = np.exp(log_z) / -np.expm1(log_z)
        log_z, gamma, second = np.log(-np.expm1(log_z)), -r * gamma, -r * second
    hessian = second - np.outer(gamma, gamma)
    return {"log_z": log_z, "mean": mu + S @ gamma, "slope": np.eye(n) + S @ hessian}
