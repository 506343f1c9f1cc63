"""Genz's estimate of log P(all m < 0): separation of variables without EP, in NumPy."""

import math
import warnings

import mpmath
import numpy as np
import torch
from scipy.special import log_ndtr, logsumexp, ndtri_exp

from gpmil.moments.ep import check_gaussians
from gpmil.moments.sampling import BLOCK, jittered_cholesky, points

GENZ_LIMIT = 2_000


def genz(mu, cov, *, n_points=512, n_replicates=8, seed=0):
    """log P(all m < 0) and its standard error, from `n_replicates` shifts of `n_points` points.

    >>> value, error = genz(np.array([0.3, -1.0]), np.array([[1.0, 0.6], [0.6, 2.0]]))
    >>> round(value, 3), error < 1e-3
    (-1.082, True)
    """
    mu, cov = np.asarray(mu, dtype=float), np.asarray(cov, dtype=float)
    check_gaussians(*(torch.from_numpy(a)[None] for a in (mu, cov, np.ones(len(mu), dtype=bool))))
    n = len(mu)
    if n > GENZ_LIMIT:
        warnings.warn(
            f"the Genz estimate was made for up to {GENZ_LIMIT} coordinates and this bag has {n}: "
            "it is slow there, and its standard error may be too small",
            stacklevel=2,
        )
    sd = np.sqrt(np.diag(cov))
    if n == 1:
        return float(log_ndtr(-mu[0] / sd[0])), 0.0
    # The coordinate most likely to be positive first: it carries most of the variation.
    order = np.argsort(-mu / sd, kind="stable")
    factor = jittered_cholesky(torch.from_numpy(cov[np.ix_(order, order)])).numpy()
    u = points(n, n_points, n_replicates, seed)
    log_w = _separate(mu[order], factor, u.reshape(-1, n)).reshape(n_replicates, n_points)
    return _pool(log_w)


def _separate(mu, factor, u):
    """log w of every point: log w = sum_i log Phi(b_i), y_i ~ N(0, 1) given y_i < b_i."""
    k, n = u.shape
    log_w = np.zeros(k)
    y = np.empty((n, k))
    for start in range(0, n, BLOCK):
        stop = min(start + BLOCK, n)
        # What earlier blocks add to the conditional means, in one matrix product.
        past = mu[start:stop, None] + factor[start:stop, :start] @ y[:start]
        for i in range(start, stop):
            # b_i = -(mu_i + sum_{j<i} L_ij y_j) / L_ii
            b = -(past[i - start] + factor[i, start:i] @ y[start:i]) / factor[i, i]
            log_phi = log_ndtr(b)
            log_w += log_phi
            y[i] = ndtri_exp(np.log(u[:, i]) + log_phi)
    return log_w


def _pool(log_w):
    """Log of the mean weight over r replicates of k points, and its standard error."""
    per_replicate = log_mean_exp(log_w)
    value = log_mean_exp(per_replicate)
    if len(per_replicate) < 2:
        return float(value), float("nan")
    # se(log P) = se(P) / P, with P_r / P - 1 = expm1(log P_r - log P) exact near P = 1.
    error = np.std(np.expm1(per_replicate - value), ddof=1) / np.sqrt(len(per_replicate))
    return float(value), float(error)


def log_mean_exp(log_w):
    """log mean exp(log_w) over the last axis, for log_w <= 0; exact near 0 and near -inf.

    >>> print(f"{log_mean_exp(np.array([-1e-14, -3e-14])):.9g}")
    -2e-14
    """
    below_one = np.expm1(log_w).mean(axis=-1)
    # 1 - P has no digits left once P is small: there the plain log-sum-exp is the exact one.
    near_one = np.log1p(np.maximum(below_one, -0.5))
    far = logsumexp(log_w, axis=-1) - np.log(log_w.shape[-1])
    return np.asarray(np.where(below_one > -0.5, near_one, far))


def genz_loop(mu, cov, points):
    """log mean of the separation-of-variables weights, a loop over points and coordinates."""
    order = np.argsort(-mu / np.sqrt(np.diag(cov)), kind="stable")
    mu, factor = mu[order], np.linalg.cholesky(cov[np.ix_(order, order)])
    log_w = []
    for u in points:
        y, total = [], 0.0
        for i in range(len(mu)):
            b = -(mu[i] + sum(factor[i, j] * y[j] for j in range(i))) / factor[i, i]
            total += log_ndtr(b)
            y.append(ndtri_exp(math.log(u[i]) + log_ndtr(b)))
        log_w.append(total)
    return float(mpmath.log(mpmath.fsum(mpmath.exp(w) for w in log_w) / len(log_w)))
