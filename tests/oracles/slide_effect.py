"""Naive twins of the slide effect: dense quadrature bag by bag, dense matrices, in NumPy.

m_b ~ N(mu_b, Sigma_b + tau^2 11'), cut by the label of the bag; Sigma_b diagonal in a bag's
likelihood, full in the posterior of u.
"""

import numpy as np
from scipy.optimize import minimize
from scipy.special import log_ndtr, logsumexp

NODES = 4001


def log_not(log_q):
    with np.errstate(divide="ignore"):
        return np.where(
            log_q > -0.5, np.log(-np.expm1(log_q)), np.log1p(-np.exp(np.minimum(log_q, -0.5)))
        )


def log_integrand(s, mu, sigma, label, tau, copies):
    """log N(s; 0, tau^2) z(s); every patch is there `copies` times."""
    t = (mu + s[:, None]) / sigma
    log_q = copies * log_ndtr(-t).sum(1)
    # where 1 - q = sum Phi(t) to the last digit, which log_not could not tell from zero
    far = t.max(1) < -9
    log_p = np.where(far, np.log(copies) + logsumexp(log_ndtr(t), axis=1), log_not(log_q))
    log_z = log_p if label else log_q
    return log_z - (s / tau) ** 2 / 2 - np.log(tau * np.sqrt(2 * np.pi)), log_q, log_z


def nodes(mu, sigma, label, tau, copies):
    """Evenly spaced where the integrand is not negligible: found on coarser and coarser grids."""
    widest = np.abs(mu).max() + 10 * sigma.max() + 13 * tau
    low, high = -widest, widest
    for _ in range(6):
        s = np.linspace(low, high, NODES)
        value = log_integrand(s, mu, sigma, label, tau, copies)[0]
        kept = s[value > value.max() - 45]
        step = s[1] - s[0]
        low, high = kept[0] - step, kept[-1] + step
    return np.linspace(low, high, NODES)


def bag(mu, sigma, label, tau, copies=1):
    """log Z, gamma, Hessian, E[m], E[s], Var[s] and d log Z / d log tau of one bag."""
    s = nodes(mu, sigma, label, tau, copies)
    log_f, log_q, log_z_at = log_integrand(s, mu, sigma, label, tau, copies)
    log_z = logsumexp(log_f) + np.log(s[1] - s[0])
    if label and log_z > -1e-3:  # where 1 - Q keeps more digits of log Z
        s0 = nodes(mu, sigma, 0, tau, copies)
        log_q0 = logsumexp(log_integrand(s0, mu, sigma, 0, tau, copies)[0]) + np.log(s0[1] - s0[0])
        log_z = float(log_not(log_q0))
    pi = np.exp(log_f - logsumexp(log_f))
    t = (mu + s[:, None]) / sigma
    log_h = -(t**2) / 2 - np.log(2 * np.pi) / 2 - log_ndtr(-t)
    # d q / q = -h / sigma, and d z / z = that, or -q / (1 - q) times that
    sign = 1 if label else -1
    first = sign * np.exp(log_h + (log_q - log_z_at)[:, None]) / sigma
    gap = np.exp(log_h) - t  # d2 q / q = diag(-h gap / sigma^2) + h h' / sigma^2
    second = first * gap / sigma
    gamma = pi @ first
    h = np.exp(log_h) / sigma
    hessian = np.diag(pi @ second) - np.outer(gamma, gamma)
    hessian -= np.einsum("k,ki,kj->ij", pi, first, h)
    effect = pi @ s
    mean = pi @ (mu + s[:, None] + sigma**2 * first)
    return {
        "log_z": log_z,
        "gamma": gamma,
        "hessian": hessian,
        "mean": mean,
        "effect": effect,
        "effect_variance": pi @ (s - effect) ** 2,
        "by_log_tau": pi @ (s / tau) ** 2 - 1,
    }


def precision(W, Sigma, tau):
    """R of q(u), m_b | f_b ~ N(Sigma_b f_b, Sigma_b + tau^2 11'), with explicit inverses."""
    R = np.eye(W[0].shape[1])
    for W_b, S in zip(W, Sigma):
        H = S @ W_b
        R += H.T @ np.linalg.inv(S + tau**2) @ H
    return R


def precision_by_downdates(W, Sigma, tau):
    """The same by Sherman and Morrison, as Sigma_b 1 = 1."""
    R = np.eye(W[0].shape[1])
    for W_b, S in zip(W, Sigma):
        column = W_b.sum(0)
        R += W_b.T @ S @ W_b - tau**2 / (1 + tau**2 * len(W_b)) * np.outer(column, column)
    return R


def collapsed_bound(w, bags, c, tau):
    """sum_b log Z_b(c + H_b w) - w'w / 2, its gradient and Hessian; `bags`: (H_b, sigma_b, y_b)."""
    value, gradient, hessian = -w @ w / 2, -w, -np.eye(len(w))
    for H, sigma, y in bags:
        found = bag(c + H @ w, sigma, y, tau)
        value += found["log_z"]
        gradient = gradient + H.T @ found["gamma"]
        hessian = hessian + H.T @ found["hessian"] @ H
    return value, gradient, hessian


def collapsed_optimum(bags, c, tau):
    """Its maximum by L-BFGS, polished by Newton."""

    def objective(w):
        value, gradient, _ = collapsed_bound(w, bags, c, tau)
        return -value, -gradient

    start = np.zeros(bags[0][0].shape[1])
    w = minimize(objective, start, jac=True, method="L-BFGS-B").x
    for _ in range(4):
        _, gradient, hessian = collapsed_bound(w, bags, c, tau)
        w = w - np.linalg.solve(hessian, gradient)
    assert np.linalg.eigvalsh(hessian).max() < 0
    return w
