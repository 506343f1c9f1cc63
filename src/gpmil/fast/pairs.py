"""The RBF kernel from inner products, in one pass over the matrix. Imported only with Numba."""

from typing import no_type_check

import numpy as np
from numba import njit

from gpmil.fast.tails import ANY_ORDER, DOOR, FUSED, INNER, exp

LOWEST = -700.0  # below, exp is zero
NOTHING = 1e-17  # of the weight of an instance with itself: thousands of them are lost in rounding


@njit(fastmath=FUSED, **DOOR)
@no_type_check
def rbf(products, half_x, half_z, variance):
    """x_i'z_j becomes variance exp(x_i'z_j - |x_i|^2 / 2 - |z_j|^2 / 2); nan stays nan."""
    for i in range(len(products)):
        _row(products[i], half_x[i], half_z, variance)


@njit(fastmath=FUSED, **INNER)
@no_type_check
def _row(row, half, half_z, variance):
    for j in range(len(row)):
        s = row[j] - half - half_z[j]
        s = 0.0 if s > 0 else s
        e = exp(LOWEST if s < LOWEST else s)
        row[j] = variance * (0.0 if s < LOWEST else e)


# --- Sums over the pairs of a bag -----------------------------------------------------------------


@njit(fastmath=FUSED, **DOOR)
@no_type_check
def rbf_against(x, scale, sizes, weights):
    """sum_bij weights_bij exp(-|scale (x_i - x_j)|^2 / 2) over the rows of every bag.

    Weights are symmetric. Far from the diagonal those of a coupling are next to nothing: a row
    begins where they count.
    """
    total, begin = 0.0, np.int64(0)
    for b in range(len(sizes)):
        rows, own = x[begin : begin + sizes[b]], weights[b]
        columns, half = _columns(rows, scale)
        out = np.empty((4, columns.shape[1]))
        for i in range(0, len(rows), 4):
            low = _first(own, i, min(i + 4, len(rows)))
            _products(columns, i, low, out)
            for k in range(i, min(i + 4, len(rows))):
                before = _before(out[k - i, : k - low], half[k], half[low:], own[k, low:])
                total += 2 * before + own[k, k]
        begin += sizes[b]
    return total


@njit(fastmath=ANY_ORDER, **INNER)
@no_type_check
def _columns(x, scale):
    """The columns of scale (x - its mean) side by side, zeros up to fours; |row|^2 / 2."""
    n, d = x.shape
    columns, half, mean = np.zeros((d + -d % 4, n + -n % 4)), np.zeros(n), np.zeros(d)
    for i in range(n):
        row = x[i]
        for k in range(d):
            mean[k] += row[k] / n
    for start in range(0, n, 8):  # whole lines of the cache
        for k in range(d):
            column = columns[k]
            for i in range(start, min(start + 8, n)):
                column[i] = (x[i, k] - mean[k]) * scale[k]
    for k in range(d):
        column = columns[k]
        for i in range(n):
            half[i] += column[i] * column[i] / 2
    return columns, half


@njit(**INNER)
@no_type_check
def _first(weights, start, stop):
    """The first column with a weight that counts in any of these rows."""
    low = start
    for i in range(start, stop):
        j, least = 0, NOTHING * abs(weights[i, i])
        while j < low and abs(weights[i, j]) <= least:
            j += 1
        low = j
    return low


@njit(fastmath=FUSED, **INNER)
@no_type_check
def _products(columns, i, low, out):
    """out[r, j] = x_(i + r)'x_(low + j), four rows and four entries of each at a time."""
    n = i + 4 - low
    r0, r1, r2, r3 = out[0, :n], out[1, :n], out[2, :n], out[3, :n]
    out[:, :n] = 0.0
    for k in range(0, len(columns), 4):
        c0, c1, c2, c3 = columns[k], columns[k + 1], columns[k + 2], columns[k + 3]
        a0, a1, a2, a3 = c0[i], c1[i], c2[i], c3[i]
        b0, b1, b2, b3 = c0[i + 1], c1[i + 1], c2[i + 1], c3[i + 1]
        d0, d1, d2, d3 = c0[i + 2], c1[i + 2], c2[i + 2], c3[i + 2]
        e0, e1, e2, e3 = c0[i + 3], c1[i + 3], c2[i + 3], c3[i + 3]
        c0, c1, c2, c3 = c0[low:], c1[low:], c2[low:], c3[low:]
        for j in range(n):
            x0, x1, x2, x3 = c0[j], c1[j], c2[j], c3[j]
            r0[j] = r0[j] + a0 * x0 + a1 * x1 + a2 * x2 + a3 * x3
            r1[j] = r1[j] + b0 * x0 + b1 * x1 + b2 * x2 + b3 * x3
            r2[j] = r2[j] + d0 * x0 + d1 * x1 + d2 * x2 + d3 * x3
            r3[j] = r3[j] + e0 * x0 + e1 * x1 + e2 * x2 + e3 * x3


@njit(fastmath=ANY_ORDER, **INNER)
@no_type_check
def _before(row, own, half, weights):
    total = 0.0
    for j in range(len(row)):
        s = row[j] - own - half[j]
        s = 0.0 if s > 0 else s
        e = exp(LOWEST if s < LOWEST else s)
        total += weights[j] * (0.0 if s < LOWEST else e)
    return total
