"""The RBF kernel from inner products, in one pass over the matrix. Imported only with Numba."""

from typing import no_type_check

import numpy as np
from numba import njit

from gpmil.fast.tails import ANY_ORDER, DOOR, FUSED, INNER, WITHIN, exp
from gpmil.fast.tiles import (  # as many rows as numbers in a vector
    ACROSS,
    ROWS,
    TOGETHER,
    filled_up,
    in_lines,
    into,
    product,
    tiles,
    turned,
)

LOWEST = -700.0  # below, exp is zero
NOTHING = 1e-17  # of the weight of an instance with itself: thousands of them are lost in rounding


@njit(fastmath=FUSED, **DOOR)
@no_type_check
def rbf(products, half_x, half_z, variance):
    """x_i'z_j becomes variance exp(x_i'z_j - |x_i|^2 / 2 - |z_j|^2 / 2); nan stays nan."""
    for i in range(len(products)):
        _row(products[i], half_x[i], half_z, variance)


@njit(fastmath=FUSED, **WITHIN)
@no_type_check
def _row(row, half, half_z, variance):
    for j in range(len(row)):
        s = row[j] - half - half_z[j]
        s = 0.0 if s > 0 else s
        e = exp(LOWEST if s < LOWEST else s)
        row[j] = variance * (0.0 if s < LOWEST else e)


@njit(fastmath=FUSED, **DOOR)
@no_type_check
def rbf_times(x, z, scale, variance, right, triangle, out):
    """out = K right, K_ij = variance exp(-|scale (x_i - z_j)|^2 / 2); `triangle` as in tiles.times.

    Some rows at a time, from what is centred to the product in the nearest caches: to write K and
    to read it again takes as long as its exponentials.
    """
    about, m, zero = _mean(z), out.shape[1], np.int64(0)
    columns, half_z = _columns(z, about, scale)
    right = filled_up(right, m + -m % ROWS)
    many = np.int64(TOGETHER)
    some, half = in_lines(many, x.shape[1], x), np.empty(many)
    K, room = in_lines(many, columns.shape[1], x), in_lines(many, right.shape[1], x)
    for start in range(0, len(x), TOGETHER):
        rows = min(TOGETHER, len(x) - start)
        for i in range(rows):
            half[i] = _scaled(x[start + i], about, scale, some[i])
        product(some, zero, columns, K, zero, rows, zero)
        for i in range(rows):
            _row(K[i, : len(z)], half[i], half_z, variance)
        into(K, zero, right, out, start, rows, triangle, room)


@njit(fastmath=ANY_ORDER, **WITHIN)
@no_type_check
def _scaled(row, about, scale, out):
    """scale (row - about), and half of its square."""
    total = 0.0
    for k in range(len(row)):
        value = (row[k] - about[k]) * scale[k]
        out[k] = value
        total += value * value
    return total / 2


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
        columns, half = _columns(rows, _mean(rows), scale)
        out = in_lines(np.int64(ROWS), columns.shape[1], x)
        for i in range(0, len(rows), ROWS):
            low = _first(own, i, min(i + ROWS, len(rows)))
            low -= low % ROWS
            _products(columns, i, low, out)
            for k in range(i, min(i + ROWS, len(rows))):
                before = _before(out[k - i, : k - low], half[k], half[low:], own[k, low:])
                total += 2 * before + own[k, k]
        begin += sizes[b]
    return total


@njit(fastmath=FUSED, **DOOR)
@no_type_check
def rbf_less(x, scale, variance, rows, sizes, out):
    """variance exp(-|scale (x_i - x_j)|^2 / 2) - y_i'y_j over the rows [., y] of every bag."""
    begin, zero = np.int64(0), np.int64(0)
    for b in range(len(sizes)):
        n, S = sizes[b], out[b]
        own = x[begin : begin + n]
        columns, half = _columns(own, _mean(own), scale)
        others = turned(rows[begin : begin + n])[1:]
        many = np.int64(ROWS)
        K, lost = in_lines(many, columns.shape[1], x), in_lines(many, columns.shape[1], x)
        for i in range(0, n, ROWS):
            _products(columns, i, zero, K)
            _products(others, i, zero, lost)
            for k in range(i, min(i + ROWS, n)):
                full, less, line = K[k - i, : k + 1], lost[k - i], S[k]
                _row(full, half[k], half, variance)
                for j in range(k + 1):
                    line[j] = full[j] - less[j]
            for j in range(min(i + ROWS, n)):
                for k in range(max(i, j + 1), min(i + ROWS, n)):
                    S[j, k] = S[k, j]
        begin += n


@njit(**INNER)
@no_type_check
def _mean(x):
    """The mean of the rows."""
    out = np.zeros(x.shape[1])
    for i in range(len(x)):
        for k in range(len(out)):
            out[k] += x[i, k]
    for k in range(len(out)):
        out[k] /= len(x)
    return out


@njit(fastmath=ANY_ORDER, **WITHIN)
@no_type_check
def _columns(x, about, scale):
    """The columns of scale (x - about) side by side, zeros up to whole tiles; |row|^2 / 2."""
    n, d = x.shape
    columns, half = turned(x), np.zeros(n)
    for k in range(d):
        column = columns[k, :n]
        for i in range(n):
            column[i] = (column[i] - about[k]) * scale[k]
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


@njit(**INNER)
@no_type_check
def _products(columns, i, low, out):
    """out[r, j] = x_(i + r)'x_(low + j), a tile of rows up to the diagonal."""
    # no constants: their types would be new ones, and all below compiled once more
    (d, n), stop, one, many, fresh = columns.shape, i + ROWS, np.int64(1), np.int64(ROWS), i >= 0
    for j in range(low, stop, ACROSS * ROWS):
        across = min(ACROSS, (stop - j) // ROWS)
        tiles(columns, i, one, n, columns, j, n, out, j - low, n, d, fresh, many, across)


@njit(fastmath=ANY_ORDER, **WITHIN)
@no_type_check
def _before(row, own, half, weights):
    total = 0.0
    for j in range(len(row)):
        s = row[j] - own - half[j]
        s = 0.0 if s > 0 else s
        e = exp(LOWEST if s < LOWEST else s)
        total += weights[j] * (0.0 if s < LOWEST else e)
    return total
