"""What a label tells, by integration; how much is alike, by loops."""

import math

from scipy.integrate import quad
from scipy.stats import norm


def entropy(p: float) -> float:
    """Bits of a coin."""
    return -sum(q * math.log2(q) for q in (p, 1 - p) if q > 0)


def information(mean: float, std: float, noise: float) -> float:
    """H(y) - E_f[H(y | f)], f ~ N(mean, std^2 - noise), P(y = 1 | f) = Phi(f / sqrt(noise))."""
    wide = math.sqrt(std**2 - noise)
    chance = quad(
        lambda x: norm.pdf(x) * entropy(norm.cdf((mean + wide * x) / math.sqrt(noise))), -9, 9
    )[0]
    return entropy(norm.cdf(mean / std)) - chance


def alike(z, others, length: float) -> list[float]:
    """The mean of a Gaussian kernel over all others."""
    return [
        sum(math.exp(-sum((a - b) ** 2 for a, b in zip(x, y)) / (2 * length**2)) for y in others)
        / len(others)
        for x in z
    ]
