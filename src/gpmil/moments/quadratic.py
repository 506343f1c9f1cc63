"""Quantiles of a quadratic form of Gaussian variables."""

import math

import numpy as np
from jaxtyping import Float
from scipy.special import ndtri

FARTHEST, EDGE, HALVINGS = 1e4, 1 - 1e-12, 64  # where a saddlepoint is looked for, and how long


def quadratic_quantile(
    a: float, b: Float[np.ndarray, " k"], B: Float[np.ndarray, "k k"], p: float
) -> float:
    """The p-quantile of a + b'x + x'B x / 2, x ~ N(0, I), by its saddlepoint approximation.

    Lugannani and Rice's formula for the probability below K'(t), in the form Phi(r*) of
    Barndorff-Nielsen, is searched for the t at which it is p.

    >>> round(quadratic_quantile(2.0, np.array([3.0, 4.0]), np.zeros((2, 2)), 0.95), 3)
    10.224
    """
    e, Q = np.linalg.eigh(B)
    c = (Q.T @ b) ** 2
    sd = math.sqrt(c.sum() + (e**2).sum() / 2)
    if not sd > 0:
        return float(a)
    # in units of sd; K exists while 1 - t e > 0
    e, c = e / sd, c / sd**2
    skew = 3 * (c * e).sum() + (e**3).sum()

    def at(t: float) -> tuple[float, float]:
        d = 1 - t * e
        # K = sum [t^2 c / d - log d] / 2 and its first two derivatives
        K = (t * t * c / d - np.log(d)).sum() / 2
        K1 = ((2 * t - t * t * e) * c / d**2 + e / d).sum() / 2
        K2 = (c / d**3 + e**2 / d**2 / 2).sum()
        r = math.copysign(math.sqrt(max(2 * (t * K1 - K), 0.0)), t)
        # r* = r + log(t sqrt(K'') / r) / r, with its limit at t = 0
        return K1, r + (math.log(t * math.sqrt(K2) / r) / r if abs(r) > 1e-3 else skew / 6)

    z = float(ndtri(p))
    lowest = max(-FARTHEST, EDGE / e[0] if e[0] < 0 else -np.inf)
    highest = min(FARTHEST, EDGE / e[-1] if e[-1] > 0 else np.inf)
    for _ in range(HALVINGS):
        t = (lowest + highest) / 2
        lowest, highest = (t, highest) if at(t)[1] < z else (lowest, t)
    return float(a + sd * at((lowest + highest) / 2)[0])
