"""H = Sigma W of small bags, put where it stays, and W'H: one look at W. Imported only with Numba.

In steps (coupling/dense.py) V with V'V = W'H is written and read again for the product, and H once
more to be put into its place. These are the largest matrices of a cohort: memory takes longer than
the arithmetic. Here V of one bag lies in a cache for all of that, and becomes its H there.
"""

from typing import no_type_check

import numpy as np
from numba import njit

from gpmil.coupling.envelope import backward, forward
from gpmil.fast.tails import DOOR, FUSED, INNER
from gpmil.fast.tiles import ROWS, TOGETHER, add_symmetric, below, in_lines, unfilled


@njit(fastmath=FUSED, **DOOR)
@no_type_check
def smooth(low, at, L, size, W, first, H, gram):
    """H = Sigma W in the rows from `first` on of every bag, and W'H added to `gram`.

    P = L L' as envelope.py has it, and the rows of W one bag after the other.
    """
    m, row, lower = W.shape[1], np.int64(0), len(size) == 0  # no constants: see tails.py
    padded, largest = m + -m % ROWS, np.int64(0)
    for b in range(len(size)):
        largest = max(largest, size[b])
    room, sums = unfilled(largest, padded, W), in_lines(padded, padded, W)
    for b in range(len(size)):
        n = size[b]
        V, out = room[:n], H[first[b] : first[b] + n]
        for i in range(n):
            _copy(W[row + i], V[i])
            forward(low, at, L, row, i, V, lower)  # L^-1 W
        for start in range(0, n, TOGETHER):
            some = V[start : min(start + TOGETHER, n)]
            below(some, some, len(some), sums)
        for i in range(n - 1, -1, -1):
            backward(low, at, L, row, i, V, lower)  # L^-T V
            for c in range(m):
                out[i, c] = V[i, c]
        row += n
    add_symmetric(sums, gram)


@njit(**INNER)
@no_type_check
def _copy(row, out):
    """A row, and zeros behind it."""
    for c in range(len(row)):
        out[c] = row[c]
    for c in range(len(row), len(out)):
        out[c] = 0
