"""k-means on a CPU: seeds, and the points of every centre. Imported only with Numba.

Points come in panels, some of them side by side: a tile (tiles.py) then holds the distances of a
few centres to all points of a panel, and the nearest centre is looked for in all of these at once.
"""

from typing import no_type_check

import numpy as np
from numba import njit

from gpmil.fast.tails import ANY_ORDER, DOOR, FUSED, INNER, WITHIN
from gpmil.fast.tiles import ACROSS, FEW, ROWS, VECTOR, few_wide, in_lines, tiles


@njit(**DOOR)
@no_type_check
def panels(x):
    """Points side by side, a row for each column, panel after panel; zeros behind the last one."""
    out = _room_for_panels(x)
    for i in range(len(x)):
        _put(x[i], i, out)
    return out


@njit(**DOOR)
@no_type_check
def about(x, mean, scale, origin):
    """Points (x - mean) / scale - origin of rows of features in float32, and their panels."""
    points = np.empty(x.shape, np.float32)
    out = _room_for_panels(points)
    for i in range(len(x)):
        row, own = x[i], points[i]
        for k in range(len(row)):
            # in float64, one operation after the other as in FeatureMap: the same last digit
            own[k] = (row[k] - mean[k]) / scale[k] - origin[k]
        _put(own, i, out)
    return points, out


@njit(**INNER)
@no_type_check
def _room_for_panels(x):
    """Zeros, of the dtype of x."""
    (n, d), wide = x.shape, ACROSS * (VECTOR // x.itemsize)
    return in_lines((n + wide - 1) // wide * d, wide, x)


@njit(**INNER)
@no_type_check
def _put(point, i, panels):
    """A point to where the panels have their i-th."""
    d, wide = len(point), panels.shape[1]
    first, at = i // wide * d, i % wide
    for k in range(d):
        panels[first + k, at] = point[k]


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


@njit(fastmath=FUSED, **WITHIN)
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
    (n, d), (steps, t) = x.shape, draws.shape
    chosen, drawn = np.empty(steps + 1, np.int64), np.empty(t, np.int64)
    left = np.zeros((t + -t % FEW, d), x.dtype)
    after = in_lines(len(left), len(points) // d * points.shape[1], x)
    nearest, mass = np.empty(n, x.dtype), np.empty(n, x.dtype)
    nearest[:] = np.inf
    for step in range(steps + 1):
        if step > 0:
            _cumulative(nearest, mass)
        for c in range(t):
            drawn[c] = _reached(mass, draws[step - 1, c]) if step > 0 else first
            for j in range(d):
                left[c, j] = x[drawn[c], j]
        _products_of_few(left, points, after)
        best, least = 0, np.inf
        for c in range(t):
            _nearer(square, square[drawn[c]], nearest, after[c])
            total = _sum(after[c, :n])
            if total < least:
                best, least = c, total
        chosen[step] = drawn[best]
        for i in range(n):
            nearest[i] = after[best, i]
    return chosen


@njit(**INNER)
@no_type_check
def _products_of_few(left, points, out):
    """z'x of the rows z of `left`, whole low tiles of them, and the points of all panels."""
    (rows, d), wide, along = left.shape, points.shape[1], out.shape[1]
    one, fresh = np.int64(1), d >= 0  # no constants, see `_products`
    for panel in range(len(points) // d):
        for c in range(0, rows, FEW):
            at, to = panel * d * wide, c * along + panel * wide
            few_wide(left, c * d, d, one, points, at, wide, out, to, along, d, fresh)


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


@njit(fastmath=FUSED, **WITHIN)
@no_type_check
def _nearer(square, own, nearest, after):
    """The smaller of what was and |x - z|^2 = |x|^2 - 2 x'z + |z|^2; x'z is in `after` before.

    All points in one run: parts of arrays, made for every panel, took longer than the numbers.
    """
    for i in range(len(nearest)):
        value = square[i] - 2 * after[i]
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


@njit(fastmath=ANY_ORDER, **WITHIN)
@no_type_check
def _sum(x):
    total = 0.0
    for i in range(len(x)):
        total += x[i]
    return total
