"""Naive twin of inducing points on lesions: the dense residual kernel, point after point."""

import numpy as np

from oracles import model as oracle


def residual(x, inducing, name, variance, lengthscale):
    """K - Kxz (Kzz + jitter)^-1 Kzx."""
    Kzz = oracle.kernel(inducing, inducing, name, variance, lengthscale)
    Kxz = oracle.kernel(x, inducing, name, variance, lengthscale)
    inner = np.linalg.inv(Kzz + oracle.JITTER * variance * np.eye(len(inducing)))
    return oracle.kernel(x, x, name, variance, lengthscale) - Kxz @ inner @ Kxz.T


def pivots(x, p, inducing, count, name, variance, lengthscale, least):
    """The patch with the largest p v, then the same given that patch, and so on."""
    own = np.diag(oracle.kernel(x, x, name, variance, lengthscale))
    left = residual(x, inducing, name, variance, lengthscale)
    chosen = []
    for _ in range(count):
        v = np.diag(left)
        worth = np.where(v > least * own, p * v, 0.0)
        worth[chosen] = 0.0
        i = int(worth.argmax())
        if worth[i] <= 0:
            break
        chosen.append(i)
        left = left - np.outer(left[:, i], left[i]) / left[i, i]
    return chosen
