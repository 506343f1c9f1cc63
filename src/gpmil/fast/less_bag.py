"""What is known of a bag's patches without the bag, by tiles (tiles.py). Imported only with Numba.

torch computes all of X X', pads bags to the largest, and its MKL uses half of the vectors of AMD's
processors.
"""

from typing import no_type_check

from numba import njit

from gpmil.fast.tails import DOOR, INNER
from gpmil.fast.tiles import below, eliminate, in_lines, room, turned


@njit(**DOOR)
@no_type_check
def outer(X, out):
    """out = X X', as far as X has rows."""
    found = _outer(X)
    for i in range(len(X)):
        for j in range(i + 1):
            out[i, j] = found[i, j]
            out[j, i] = found[i, j]


@njit(**DOOR)
@no_type_check
def covariance(X, S, H, out):
    """out += G + G (S - G)^-1 G - H H', G = X X', as far as X has rows; nan where S <= G."""
    n, G, known = len(X), _outer(X), _outer(H)
    Z, minus = room(n, n, X)
    wide = Z.shape[1]
    for i in range(n):
        for j in range(i + 1):
            left = S[i, j] - G[i, j]
            Z[i, j], Z[j, i] = left, left
            Z[wide + i, j], Z[wide + j, i] = G[i, j], G[i, j]
    eliminate(Z, minus)
    columns = turned(Z[wide : wide + n])  # L^-1 G, S - G = L L'
    below(columns, columns, len(columns), G)
    for i in range(n):
        for j in range(i + 1):
            more = G[i, j] - known[i, j]
            out[i, j] += more
            out[j, i] += more if j < i else 0.0


@njit(**INNER)
@no_type_check
def _outer(X):
    """X X', on and below the diagonal."""
    columns = turned(X)
    out = in_lines(columns.shape[1], columns.shape[1], X)
    below(columns, columns, len(columns), out)
    return out
