"""Which patches to ask about next: those whose label is expected to tell most about the process.

The information of a patch's label y about the process f there, for a probit with m ~ N(mu, v + n)
of which v is uncertainty of the process and n is noise that no label can remove:

    I(y; f) = H(Phi(mu / sqrt(v + n))) - E_f[H(Phi(f / sqrt(n)))]

in bits, H the entropy of a coin. It is large near the boundary (mu about 0) where the process is
not known yet, and small where the label is certain, or would be a matter of chance anyway.
The mean entropy is C / sqrt(v / n + C^2) exp(-mu^2 / n / (2 (v / n + C^2))), C^2 = pi log(2) / 2
(Houlsby et al. 2011), to three digits.
"""

import math

import numpy as np
from jaxtyping import Float, Int
from scipy.special import ndtr, xlogy

Column = Float[np.ndarray, " n"]

C2 = math.pi * math.log(2) / 2


def information(mean: Column, std: Column, noise: float | Column = 1.0) -> Column:
    """Bits that the label of each patch tells of the process; `std`^2 has the noise in it.

    >>> information(np.array([0.0, 0.0, 3.0]), np.array([1.5, 1.1, 1.5])).round(3)
    array([0.321, 0.08 , 0.13 ])
    """
    p = ndtr(mean / std)
    entropy = -(xlogy(p, p) + xlogy(1 - p, 1 - p)) / math.log(2)
    wide = np.maximum(std**2 / noise - 1, 0) + C2
    chance = np.sqrt(C2 / wide) * np.exp(-(mean**2) / noise / (2 * wide))
    return np.maximum(entropy - chance, 0)


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
