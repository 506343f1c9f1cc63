"""Sums of the points of every centre, for k-means on a CPU. Imported only with Numba."""

from typing import no_type_check

import numpy as np
from numba import njit

from gpmil.fast.tails import DOOR, FUSED


@njit(fastmath=FUSED, **DOOR)
@no_type_check
def tally(x, nearest, distance):
    """Sums and numbers of the points nearest to each centre, and the sum of their distances."""
    k = distance.shape[1]
    sums, counts, total = np.zeros((k, x.shape[1])), np.zeros(k), 0.0
    for i in range(len(x)):
        at = nearest[i]
        own, row = sums[at], x[i]
        for j in range(len(row)):
            own[j] += row[j]
        counts[at] += 1
        total += distance[i, at]
    return sums, counts, total
