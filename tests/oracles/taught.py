"""Naive twins of known patch labels: dense quadrature over the effect bag by bag, in NumPy."""

import numpy as np
from scipy.optimize import minimize
from scipy.special import log_ndtr, logsumexp

from oracles import slide_effect
from oracles.coupled import below

NODES = 801


def log_given(m, sigma, label, known):
    """log P(what is known of a bag) for independent patches at m, one row per value of the effect.

    A loop over patches, as the likelihood is written down.
    """
    log_z, rest = np.zeros(len(m)), np.zeros(len(m))
    for i in range(m.shape[1]):
        t = m[:, i] / sigma[i]
        if known[i] >= 0:
            log_z += log_ndtr(t if known[i] else -t)
        else:
            rest += log_ndtr(-t)
    if 1 in known:
        return log_z
    return log_z + (slide_effect.log_not(rest) if label else rest)


def weights(mu, sigma, label, known, tau):
    """Values of the effect and the logs of N(s; 0, tau^2) z(s) ds."""
    if tau == 0:
        return np.zeros(1), log_given(mu[None], sigma, label, known)
    s = np.linspace(-9 * tau, 9 * tau, NODES)
    log_n = -((s / tau) ** 2) / 2 - np.log(tau * np.sqrt(2 * np.pi)) + np.log(s[1] - s[0])
    return s, log_n + log_given(mu + s[:, None], sigma, label, known)


def log_z(mu, sigma, label, known, tau):
    return float(logsumexp(weights(mu, sigma, label, known, tau)[1]))


def differences(f, x, step):
    """Central differences of fourth order of a number or an array, one row per coordinate."""
    rows = []
    for e in step * np.eye(len(x)):
        near, far = f(x + e) - f(x - e), f(x + 2 * e) - f(x - 2 * e)
        rows.append((8 * near - far) / (12 * step))
    return np.array(rows)


def gamma(mu, sigma, label, known, tau):
    """d log Z / dmu."""
    return differences(lambda x: log_z(x, sigma, label, known, tau), mu, 1e-3)


def hessian(mu, sigma, label, known, tau):
    """d2 log Z / dmu2."""
    return differences(lambda x: gamma(x, sigma, label, known, tau), mu, 4e-3)


def collapsed_optimum(bags, c, tau):
    """The maximum of sum_b log Z_b(c + H_b w) - w'w / 2; `bags`: (H_b, sigma_b, y_b, known_b)."""

    def objective(w):
        value, slope = -w @ w / 2, -w
        for H, sigma, y, known in bags:
            mu = c + H @ w
            value += log_z(mu, sigma, y, known, tau)
            slope = slope + H.T @ gamma(mu, sigma, y, known, tau)
        return -value, -slope

    start = np.zeros(bags[0][0].shape[1])
    found = minimize(objective, start, jac=True, method="BFGS", options={"gtol": 1e-8})
    assert np.abs(found.jac).max() < 1e-6
    return found.x


def coupled_log_z(mu, S, known):
    """log P of what is known of a positive bag of up to three patches, m ~ N(mu, S): exact."""
    held = np.array(known) >= 0
    side = np.where(np.array(known) == 1, -1.0, 1.0)[held]
    told = below(side * mu[held], side[:, None] * S[np.ix_(held, held)] * side)
    return float(np.log(told if 1 in known else told - below(mu, S)))


def coupled_mean(mu, S, known):
    """E[m] = mu + S d log Z / dmu."""
    return mu + S @ differences(lambda x: coupled_log_z(x, S, known), mu, 1e-3)
