"""k-means on a CPU: seeds, and the points of every centre. Imported only with Numba.

Points come in panels, some of them side by side: a tile (tiles.py) then holds the distances of a
few centres to all points of a panel, and the nearest centre is looked for in all of these at once.
"""

from typing import no_type_check

import numpy as np
from numba import njit

from gpmil.fast.tails import ANY_ORDER, DOOR, FUSED, INNER
from gpmil.fast.tiles import ACROSS, ROWS, VECTOR, in_lines, tiles


@njit(**DOOR)
@no_type_check
def panels(x):
    """Points side by side, a row for each column, panel after panel; zeros behind the last one."""
    n, d = x.shape
    wide = ACROSS * (VECTOR // x.itemsize)
    out = in_lines((n + wide - 1) // wide * d, wide, x)
    for i in range(n):
        row, first, at = x[i], i // wide * d, i % wide
        for k in range(d):
            out[first + k, at] = row[k]
    return out


@njit(**INNER)
@no_type_check
def _products(left, points, panel, out):
    """z'x of the rows z of `left`, whole tiles of them, and the points of a panel."""
    (rows, d), wide = left.shape, points.shape[1]
    # no constants: their types would be new ones, and all below compiled once more
    zero, one, across, fresh = np.int64(0), np.int64(1), np.int64(ACROSS), d >= 0
    tiles(
        left, zero, d, one, points, panel * d * wide, wide, out, zero, wide,
        d, fresh, rows, across,
    )  # fmt: skip


@njit(**INNER)
@no_type_check
def _rows(count, x):
    """Room for some rows like those of x: zeros, whole tiles."""
    return np.zeros((count + -count % ROWS, x.shape[1]), x.dtype)


# --- Every point to its nearest centre ------------------------------------------------------------
@njit(**DOOR)
@no_type_check
def tally(x, points, centres, square):
    """Sums and numbers of the points nearest to each centre, and the sum of |x - z|^2 - |x|^2.

    `points` are the panels of x, `square` the |z|^2.
    """
    k, (n, d) = len(centres), x.shape
    sums, counts, total = np.zeros((k, d)), np.zeros(k), 0.0
    left, wide = _rows(k, x), points.shape[1]
    for c in range(k):
        for j in range(d):
            left[c, j] = -2 * centres[c, j]
    out = in_lines(len(left), wide, x)
    least, nearest = np.empty(wide, x.dtype), np.empty(wide, np.int32)
    for panel in range(len(points) // d):
        _products(left, points, panel, out)
        _nearest(out, square, least, nearest)
        for i in range(min(wide, n - panel * wide)):
            at, row = nearest[i], x[panel * wide + i]
            own = sums[at]
            for j in range(d):
                own[j] += row[j]
            counts[at] += 1
            total += least[i]
    return sums, counts, total


@njit(fastmath=FUSED, **INNER)
@no_type_check
def _nearest(out, square, least, nearest):
    """The first of the smallest out + square in every column."""
    least[:] = np.inf
    nearest[:] = 0
    for c in range(len(square)):
        row, more = out[c], square[c]
        for i in range(len(row)):
            # |x - z|^2 - |x|^2 = |z|^2 - 2 x'z
            value = row[i] + more
            closer = value < least[i]
            least[i] = value if closer else least[i]
            nearest[i] = c if closer else nearest[i]


# --- k-means++ ------------------------------------------------------------------------------------
@njit(**DOOR)
@no_type_check
def spread(x, points, square, first, draws):
    """Greedy k-means++ among points of which the |x|^2 are known, one row of draws a centre.

    The numbers of the points chosen.
    """
    (n, d), wide, (steps, t) = x.shape, points.shape[1], draws.shape
    chosen, drawn = np.empty(steps + 1, np.int64), np.empty(t, np.int64)
    left, out = _rows(t, x), in_lines(t + -t % ROWS, wide, x)
    nearest, mass = np.empty(n, x.dtype), np.empty(n, x.dtype)
    after = np.empty((t, n), x.dtype)
    nearest[:] = np.inf
    for step in range(steps + 1):
        if step > 0:
            _cumulative(nearest, mass)
        for c in range(t):
            drawn[c] = _reached(mass, draws[step - 1, c]) if step > 0 else first
            for j in range(d):
                left[c, j] = x[drawn[c], j]
        for panel in range(len(points) // d):
            _products(left, points, panel, out)
            start, stop = panel * wide, min((panel + 1) * wide, n)
            for c in range(t):
                own = square[drawn[c]]
                _nearer(
                    out[c], square[start:stop], own, nearest[start:stop], after[c, start:stop]
                )  # fmt: skip
        best, least = 0, np.inf
        for c in range(t):
            total = _sum(after[c])
            if total < least:
                best, least = c, total
        chosen[step] = drawn[best]
        for i in range(n):
            nearest[i] = after[best, i]
    return chosen


@njit(**INNER)
@no_type_check
def _reached(mass, share):
    """The first place at which so much of the mass is reached."""
    low, high, wanted = 0, len(mass) - 1, mass[-1] * share
    while low < high:
        middle = (low + high) // 2
        if mass[middle] >= wanted:
            high = middle
        else:
            low = middle + 1
    return low


@njit(fastmath=FUSED, **INNER)
@no_type_check
def _nearer(products, square, own, nearest, after):
    """The smaller of what was and |x - z|^2 = |x|^2 - 2 x'z + |z|^2."""
    for i in range(len(after)):
        value = square[i] - 2 * products[i]
        value = value + own
        value = value if value > 0 else np.float32(0)
        after[i] = value if value < nearest[i] else nearest[i]


@njit(**INNER)
@no_type_check
def _cumulative(x, out):
    total = 0.0
    for i in range(len(x)):
        total += x[i]
        out[i] = total


@njit(fastmath=ANY_ORDER, **INNER)
@no_type_check
def _sum(x):
    total = 0.0
    for i in range(len(x)):
        total += x[i]
    return total
