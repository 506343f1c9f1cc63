"""Which patches to ask about next: those whose label is expected to change the maps most.

The information of a patch's label y about the process f there, for a probit with m ~ N(mu, v + n)
of which v is uncertainty of the process and n is noise that no label can remove:

    I(y; f) = H(Phi(mu / sqrt(v + n))) - E_f[H(Phi(f / sqrt(n)))]

in bits, H the entropy of a coin. It is large near the boundary (mu about 0) where the process is
not known yet, and small where the label is certain, or would be a matter of chance anyway.
The mean entropy is C / sqrt(v / n + C^2) exp(-mu^2 / n / (2 (v / n + C^2))), C^2 = pi log(2) / 2
(Houlsby et al. 2011), to three digits.

What a label tells, it tells about patches that look alike, too. The change to be expected of all
maps is about I(y; f) times the mean correlation of the patch with others, k(x, x_j) / k(x, x).
"""

import math

import numpy as np
from jaxtyping import Float, Int
from scipy.spatial.distance import cdist
from scipy.special import ndtr, xlogy

Column = Float[np.ndarray, " n"]

C2 = math.pi * math.log(2) / 2
ROWS = 4096  # at a time


def information(mean: Column, std: Column, noise: float | Column = 1.0) -> Column:
    """Bits that the label of each patch tells of the process; `std`^2 has the noise in it.

    >>> information(np.array([0.0, 0.0, 3.0]), np.array([1.5, 1.1, 1.5])).round(3)
    array([0.318, 0.084, 0.057])
    """
    p = ndtr(mean / std)
    entropy = -(xlogy(p, p) + xlogy(1 - p, 1 - p)) / math.log(2)
    wide = np.maximum(std**2 / noise - 1, 0) + C2
    chance = np.sqrt(C2 / wide) * np.exp(-(mean**2) / noise / (2 * wide))
    return np.maximum(entropy - chance, 0)


def alike(z: Float[np.ndarray, "n d"], others: Float[np.ndarray, "k d"], length: float) -> Column:
    """The mean of exp(-|z - z_j|^2 / (2 length^2)) over others: how much of the cohort is alike.

    >>> alike(np.array([[0.0], [2.0]]), np.array([[0.0], [0.5]]), length=1.0).round(3)
    array([0.941, 0.23 ])
    """
    found = np.empty(len(z))
    for start in range(0, len(z), ROWS):
        block = slice(start, start + ROWS)
        apart = cdist(z[block], others, "sqeuclidean")
        found[block] = np.exp(-apart / (2 * length**2)).mean(axis=1)
    return found


def spread(
    score: Column, slide: Int[np.ndarray, " n"], count: int, per_slide: int = 1
) -> Int[np.ndarray, " k"]:
    """The patches of the highest scores, at most so many of a slide: alike ones tell the same.

    >>> spread(np.array([0.9, 0.8, 0.7, 0.1]), np.array([0, 0, 1, 1]), 3)
    array([0, 2])
    """
    chosen: list[int] = []
    taken: dict[int, int] = {}
    for i in np.argsort(-score, kind="stable").tolist():
        if len(chosen) == count or not score[i] > 0:
            break
        if taken.get(int(slide[i]), 0) < per_slide:
            chosen.append(i)
            taken[int(slide[i])] = taken.get(int(slide[i]), 0) + 1
    return np.array(chosen, dtype=np.int64)
