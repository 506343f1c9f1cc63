"""The inverse of I - U U' for some rows U that are left out. Imported only with Numba.

By tiles (tiles.py), a few rows at a time: LAPACK takes twice as long for so small a matrix. All is
filled up with unit rows to whole tiles. What is taken away is added with the opposite sign.
"""

from typing import no_type_check

import numpy as np
from numba import njit

from gpmil.fast.tails import DOOR, FUSED, INNER
from gpmil.fast.tiles import ACROSS, ROWS, in_lines, tiles, turned

WIDTH = ROWS  # of a vector in float64
STRIP = ACROSS * WIDTH  # columns of a tile


@njit(fastmath=FUSED, **DOOR)
@no_type_check
def inverse(U):
    """L^-1 in I - U U' = L L', and the diagonal of (L L')^-1; nan where it is not positive."""
    n, R = len(U), _less_products(U)
    wide = len(R)
    minus, root, diagonal = in_lines(wide, wide, U), in_lines(wide, wide, U), np.zeros(wide)
    for start in range(0, len(R), ROWS):
        _finish(R, minus, start)
        _less_below(R, minus, start)
    for start in range(0, len(R), ROWS):
        _invert(R, minus, root, start)
        for i in range(start, start + ROWS):
            for c in range(i + 1):
                diagonal[c] += root[i, c] * root[i, c]
    return root[:n, :n], diagonal[:n]


@njit(fastmath=FUSED, **INNER)
@no_type_check
def _less_products(U):
    """I - U U', on and above its diagonal."""
    n, d = U.shape
    # no constants: their types would be new ones, and all below compiled once more
    wide, zero, one, fresh = n + -n % ROWS, np.int64(0), np.int64(1), n > 0
    columns, out = turned(U), in_lines(wide, wide, U)
    for j in range(0, wide, STRIP):
        across = min(ACROSS, (wide - j) // WIDTH)
        rows = min(n, j + across * WIDTH)
        tiles(U, zero, d, one, columns, j, wide, out, j, wide, d, fresh, rows, across)
    for i in range(wide):
        for j in range(i, wide):
            out[i, j] = -out[i, j]
        out[i, i] += 1
    return out


@njit(fastmath=FUSED, **INNER)
@no_type_check
def _finish(R, minus, start):
    """Some rows of the upper triangle R in R'R, those before taken out already."""
    for k in range(start, start + ROWS):
        row = R[k, k:]
        for j in range(start, k):
            _less(row, R[j, k], R[j, k:])
        scale = 1 / np.sqrt(row[0])
        for c in range(len(row)):
            row[c] *= scale
            minus[k, k + c] = -row[c]


@njit(**INNER)
@no_type_check
def _less_below(R, minus, start):
    """R_ij -= sum_k R_ki R_kj over these rows k, in all rows below."""
    n, first, one, many, fresh = len(R), start + ROWS, np.int64(1), np.int64(ROWS), start < 0
    for j in range(first, n, STRIP):
        across = min(ACROSS, (n - j) // WIDTH)
        rows = min(n, j + across * WIDTH) - first
        tiles(
            minus, start * n + first, one, n, R, start * n + j, n, R, first * n + j, n,
            many, fresh, rows, across,
        )  # fmt: skip


@njit(fastmath=FUSED, **INNER)
@no_type_check
def _invert(R, minus, root, start):
    """Some rows of L^-1, those before done: X_i = (1_i - sum_k R_ki X_k) / R_ii."""
    n, stop, one, many, fresh = len(R), start + ROWS, np.int64(1), np.int64(ROWS), start < 0
    for i in range(start, stop):
        root[i, i] = 1.0
    for j in range(0, stop, STRIP):
        across = min(ACROSS, (stop - j) // WIDTH)
        tiles(
            minus, start, one, n, root, j, n, root, start * n + j, n, start, fresh, many, across
        )  # fmt: skip
    for i in range(start, stop):
        row = root[i, : i + 1]
        for k in range(start, i):
            _less(row, R[k, i], root[k])
        scale = 1 / R[i, i]
        for c in range(len(row)):
            row[c] *= scale


@njit(fastmath=FUSED, **INNER)
@no_type_check
def _less(row, factor, other):
    for c in range(len(row)):
        row[c] -= factor * other[c]
