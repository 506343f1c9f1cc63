"""All patches of the slides of a patient as one Gaussian, with explicit inverses."""

import numpy as np
from scipy.stats import multivariate_normal

from oracles import model as oracle


def gaussian(bags, Z, w, R, kernel, coupling, c, tau):
    """Mean and covariance of m*: q(u) through W = Kxz L^-T, each slide its Sigma and its effect."""
    Kzz = kernel(Z, Z)
    L = np.linalg.cholesky(Kzz + oracle.JITTER * Kzz[0, 0] * np.eye(len(Z)))
    W = np.vstack([np.linalg.solve(L, kernel(Z, bag.features)).T for bag in bags])
    n, owner = len(W), np.repeat(np.arange(len(bags)), bags.sizes)
    Sigma = np.zeros((n, n))
    for b, bag in enumerate(bags):
        rows = np.flatnonzero(owner == b)
        Sigma[np.ix_(rows, rows)] = oracle.coupling_matrix(bag.adjacency.toarray(), coupling)
    K = kernel(bags.features, bags.features) + tau**2 * (owner[:, None] == owner)
    V = K - W @ W.T + W @ np.linalg.inv(R) @ W.T
    return c + Sigma @ W @ w, Sigma + Sigma @ V @ Sigma


def negative(mu, cov):
    """P(all m < 0) by Genz's method, as SciPy has it, with many points."""
    return multivariate_normal.cdf(
        np.zeros(len(mu)), mu, cov, abseps=1e-9, releps=1e-9, maxpts=400_000, rng=3
    )
