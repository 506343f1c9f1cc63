"""The inverse of I - U U' for some rows U that are left out, and slides compared without them.

Imported only with Numba.
"""

from typing import no_type_check

import numpy as np
from numba import njit

from gpmil.fast.tails import ANY_ORDER, DOOR, WITHIN
from gpmil.fast.tiles import below, eliminate, in_lines, room, turned


@njit(**DOOR)
@no_type_check
def inverse(U):
    """L^-1 in I - U U' = L L', and the diagonal of (L L')^-1; nan where it is not positive."""
    n, columns = len(U), turned(U)
    wide = columns.shape[1]
    products, root, diagonal = in_lines(wide, wide, U), np.zeros((n, n)), np.zeros(n)
    below(columns, columns, len(columns), products)
    Z, minus = room(n, n, U)
    for i in range(n):
        for j in range(n):
            one = 1 if i == j else 0
            Z[i, j], Z[wide + i, j] = one - products[i, j], one
    eliminate(Z, minus)
    for j in range(n):
        column = Z[wide + j]  # L^-1 1_j
        for i in range(j, n):
            root[i, j] = column[i]
            diagonal[j] += column[i] * column[i]
    return root, diagonal


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


@njit(fastmath=ANY_ORDER, **WITHIN)
@no_type_check
def _apart(x, other, D, y):
    """y = D (x - other), and |y|^2."""
    total = 0.0
    for k in range(len(D)):
        y[k] = D[k] * (x[k] - other[k])
        total += y[k] * y[k]
    return total


@njit(fastmath=ANY_ORDER, **WITHIN)
@no_type_check
def _beyond(y, U, root, left):
    """|L^-1 U y|^2."""
    total = 0.0
    for i in range(len(U)):
        left[i] = _dot(U[i], y)
    for i in range(len(U)):
        total += _dot(root[i, : i + 1], left) ** 2
    return total


@njit(fastmath=ANY_ORDER, **WITHIN)
@no_type_check
def _dot(x, y):
    total = 0.0
    for k in range(len(x)):
        total += x[k] * y[k]
    return total
