"""Naive twins of graded bags: dense quadrature over the effect bag by bag, in NumPy."""

import numpy as np
from scipy.special import log_ndtr, logsumexp, ndtr

from oracles import slide_effect
from oracles.taught import differences

NODES = 1601


def log_below(m, sigma, cut):
    """log P(all patches below a cut point) at m, one row per value of the effect, by a loop."""
    total = np.zeros(len(m))
    for i in range(m.shape[1]):
        total += log_ndtr((cut - m[:, i]) / sigma[i])
    return total


def log_given(m, sigma, grade, cuts):
    """log P(Y = grade) for independent patches at m."""
    ends = [-np.inf, *cuts, np.inf]
    upper = log_below(m, sigma, ends[grade + 1]) if grade < len(cuts) else np.zeros(len(m))
    if grade == 0:
        return upper
    return upper + slide_effect.log_not(log_below(m, sigma, ends[grade]) - upper)


def log_z(mu, sigma, grade, cuts, tau):
    """log P(Y = grade), m ~ N(mu, diag(sigma^2) + tau^2 11')."""
    if tau == 0:
        return float(log_given(mu[None], sigma, grade, cuts)[0])
    s = np.linspace(-10 * tau, 10 * tau, NODES)
    log_n = -((s / tau) ** 2) / 2 - np.log(tau * np.sqrt(2 * np.pi)) + np.log(s[1] - s[0])
    return float(logsumexp(log_n + log_given(mu + s[:, None], sigma, grade, cuts)))


def gamma(mu, sigma, grade, cuts, tau):
    """d log Z / dmu."""
    return differences(lambda x: log_z(x, sigma, grade, cuts, tau), mu, 1e-3)


def hessian(mu, sigma, grade, cuts, tau):
    """d2 log Z / dmu2."""
    return differences(lambda x: gamma(x, sigma, grade, cuts, tau), mu, 4e-3)


def condition(w, bags, c, cuts, tau):
    """The gradient of sum_b log Z_b(c + H_b w) - w'w / 2; `bags`: (H_b, sigma_b, grade_b)."""
    slope = -w
    for H, sigma, grade in bags:
        slope = slope + H.T @ gamma(c + H @ w, sigma, grade, cuts, tau)
    return slope


def probabilities(mu, cov, cuts):
    """P(Y = k), the largest of m ~ N(mu, cov) in its interval, for few patches."""
    return np.diff([0.0, *(all_below(cut, mu, cov) for cut in cuts), 1.0])


def all_below(cut, mu, cov):
    """P(all m < cut), one patch after the other by Gauss and Legendre.

    SciPy's integration draws its points anew in every call, and differs from itself by 1e-6.
    """
    sd = np.sqrt(cov[0, 0])
    if len(mu) == 1:
        return ndtr((cut - mu[0]) / sd)
    low, high = mu[0] - 9 * sd, min(cut, mu[0] + 9 * sd)
    if high <= low:
        return 0.0
    node, weight = np.polynomial.legendre.leggauss(40)
    m = low + (high - low) * (node + 1) / 2
    # m_2, ... given m_1
    slope = cov[1:, 0] / cov[0, 0]
    rest = cov[1:, 1:] - np.outer(slope, cov[0, 1:])
    given = [all_below(cut, mu[1:] + slope * (own - mu[0]), rest) for own in m]
    density = np.exp(-(((m - mu[0]) / sd) ** 2) / 2) / (sd * np.sqrt(2 * np.pi))
    return (high - low) / 2 * (weight * density) @ given
