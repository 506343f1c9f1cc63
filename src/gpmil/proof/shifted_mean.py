"""Shifted mean (Harvey et al., 2025): bags whose best classifier is known in closed form.

A bag is a chain of 15 to 45 instances N(0, I_M). In a positive bag three neighbours are shifted by
Delta in the first feature, at a place that is equally likely everywhere. Half of the bags are
positive.
"""

import numpy as np
from jaxtyping import Float
from scipy.special import logsumexp

from gpmil.data.bags import Bags

SHORTEST, LONGEST = 15, 45
SHIFTED = 3  # neighbours
DELTA = 2.0


def draw(n_bags: int, n_features: int, seed: tuple[int, ...], delta: float = DELTA) -> Bags:
    """Bags in float32, every second one positive, with the labels of their instances.

    >>> bags = draw(4, 2, seed=(0,))
    >>> bags.labels.tolist(), int(bags.split(bags.instance_labels)[1].sum())
    ([0, 1, 0, 1], 3)
    """
    rng = np.random.default_rng(seed)
    labels = np.arange(n_bags) % 2
    arrays, truth = [], []
    for y in labels:
        n = int(rng.integers(SHORTEST, LONGEST, endpoint=True))
        x, h = rng.standard_normal((n, n_features), dtype=np.float32), np.zeros(n, dtype=int)
        first = int(rng.integers(n - SHIFTED + 1))
        h[first : first + SHIFTED] = y
        x[:, 0] += np.float32(delta) * h
        arrays.append(x)
        truth.append(h)
    return Bags.from_arrays(arrays, labels=labels, graph="chain", instance_labels=truth)


def bayes_log_odds(bags: Bags, delta: float = DELTA) -> Float[np.ndarray, " B"]:
    """log P(y = 1 | x) - log P(y = 0 | x) of the classifier that knows how bags are drawn.

    Shifted by Delta at i, i+1, i+2, the likelihood ratio is exp(Delta S_i - 3 Delta^2 / 2) with
    S_i = x_i + x_(i+1) + x_(i+2) in the first feature; the place is averaged over.
    """
    found = np.empty(len(bags))
    for b, x in enumerate(bags.split(bags.features[:, 0].astype(np.float64))):
        S = np.convolve(x, np.ones(SHIFTED), mode="valid")
        found[b] = logsumexp(delta * S - SHIFTED * delta**2 / 2) - np.log(len(S))
    return found
