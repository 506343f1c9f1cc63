"""The inverse of I - U U' for some rows U that are left out, and slides compared without them.

The inverse is computed by tiles (tiles.py), a few rows at a time: LAPACK takes twice as long for so
small a matrix. All is filled up with unit rows to whole tiles. What is taken away is added with the
opposite sign. Imported only with Numba.
"""

from typing import no_type_check

import numpy as np
from numba import njit

from gpmil.fast.tails import ANY_ORDER, DOOR, FUSED, INNER
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


# --- Slides compared ------------------------------------------------------------------------------
@njit(fastmath=ANY_ORDER, **DOOR)
@no_type_check
def forms(X, D, by, share):
    """x'(diag(D) + share by by') x of every row."""
    out = np.empty(len(X))
    for i in range(len(X)):
        row, plain, along = X[i], 0.0, 0.0
        for k in range(len(D)):
            plain += D[k] * row[k] * row[k]
            along += by[k] * row[k]
        out[i] = plain + share * along**2
    return out


@njit(fastmath=ANY_ORDER, **DOOR)
@no_type_check
def nearest(mine, own, phi, spreads, counts, n, smallest, D, U, root):
    """The least n (|y|^2 + |z|^2) / (v + v_j) from each of mine, y = D (phi - phi_j), z = L^-1 U y.

    By |y|^2 alone most are too far already. `smallest`: what a sum of spreads is at least.
    """
    found, apart = np.empty(len(mine)), np.empty(len(D))
    at_least, left = np.empty(len(phi)), np.empty(len(U))
    for b in range(len(mine)):
        for j in range(len(phi)):
            share = n / max(own[b] + spreads[j], smallest)
            at_least[j] = share * _apart(mine[b], phi[j], D, apart) if counts[j] else np.inf
        least, j = np.inf, np.argmin(at_least)
        while at_least[j] < least:
            square, share = (
                _apart(mine[b], phi[j], D, apart),
                n / max(own[b] + spreads[j], smallest),
            )
            least = min(least, share * (square + _beyond(apart, U, root, left)))
            at_least[j] = np.inf
            j = np.argmin(at_least)
        found[b] = least
    return found


@njit(fastmath=ANY_ORDER, **INNER)
@no_type_check
def _apart(x, other, D, y):
    """y = D (x - other), and |y|^2."""
    total = 0.0
    for k in range(len(D)):
        y[k] = D[k] * (x[k] - other[k])
        total += y[k] * y[k]
    return total


@njit(fastmath=ANY_ORDER, **INNER)
@no_type_check
def _beyond(y, U, root, left):
    """|L^-1 U y|^2."""
    total = 0.0
    for i in range(len(U)):
        left[i] = _dot(U[i], y)
    for i in range(len(U)):
        total += _dot(root[i, : i + 1], left) ** 2
    return total


@njit(fastmath=ANY_ORDER, **INNER)
@no_type_check
def _dot(x, y):
    total = 0.0
    for k in range(len(x)):
        total += x[k] * y[k]
    return total
