"""Sigma of small bags from the envelope of P: loops for Numba, the twin of torch's inverse.

The envelope of a row reaches from its first neighbour to the diagonal, and L in P = L L' has no
more entries than that: some ten in a row, as patches come slide by slide and line by line. Imported
only where Numba is installed. Inner loops go over rows that lie close, whatever the width of the
vector units.
"""

from typing import no_type_check

import numpy as np
from numba import njit

EVEN = 8  # numbers in a line of memory, and in the widest vectors
FUSED = {"contract"}  # a * b + c in one step
# What Python calls, and what only loops call; wrappers that nobody needs take time to compile.
DOOR = {"error_model": "numpy", "no_cfunc_wrapper": True, "nogil": True, "cache": True}
INNER = {"error_model": "numpy", "no_cfunc_wrapper": True, "no_cpython_wrapper": True}
WITHIN = INNER | {"forceinline": True}  # where sums are free: fast/tails.py says why


@njit(**DOOR)
@no_type_check
def entries(start, column, first, size):
    """How many entries the envelope of some bags has."""
    total = 0
    for b in range(len(first)):
        for i in range(first[b], first[b] + size[b]):
            low = i
            for k in range(start[i], start[i + 1]):
                low = min(low, column[k])
            total += i - low + 1
    return total


@njit(fastmath=FUSED, **DOOR)
@no_type_check
def factor(start, column, weight, degree, first, size, strength, n_entries):
    """L in P = L L' of some bags, one after the other.

    `start`, `column`, `weight` and `degree` are the neighbours of the whole cohort, `first` and
    `size` the rows of the bags. Back come the first column of every row (counted within its bag),
    where the row begins in L, and L.
    """
    rows = size.sum()
    low, at, L = np.empty(rows, np.int64), np.zeros(rows + 1, np.int64), np.zeros(n_entries)
    row = np.int64(0)  # a plain 0 is a type of its own, and all below would be compiled for it
    for b in range(len(first)):
        for i in range(size[b]):
            own = first[b] + i
            low[row + i] = i
            for k in range(start[own], start[own + 1]):
                low[row + i] = min(low[row + i], column[k] - first[b])
            at[row + i + 1] = at[row + i] + i - low[row + i] + 1
            line = L[at[row + i] : at[row + i + 1]]
            # P = I + lambda (diag(A 1) - A)
            for k in range(start[own], start[own + 1]):
                j = column[k] - first[b]
                if j < i:
                    line[j - low[row + i]] -= strength * weight[k]
            line[i - low[row + i]] += 1 + strength * degree[own]
            _eliminate(low, at, L, row, i)
        row += size[b]
    return low, at, L


@njit(fastmath=FUSED, **WITHIN)
@no_type_check
def _eliminate(low, at, L, row, i):
    """Row i of P becomes that of L: L_ij = (P_ij - sum_k L_ik L_jk) / L_jj."""
    mine, line = low[row + i], L[at[row + i] : at[row + i + 1]]
    for j in range(mine, i + 1):
        theirs, other = low[row + j], L[at[row + j] : at[row + j + 1]]
        total = line[j - mine]
        for k in range(max(mine, theirs), j):
            total -= line[k - mine] * other[k - theirs]
        line[j - mine] = total / other[j - theirs] if j < i else np.sqrt(total)


@njit(fastmath=FUSED, **DOOR)
@no_type_check
def invert(low, at, L, size, sigma):
    """Write Sigma_b into the zeros of sigma, unit rows behind it; log|Sigma_b| of every bag."""
    logdet, lower = np.empty(len(size)), len(size) > 0  # no constant, for the same reason
    row = np.int64(0)
    for b in range(len(size)):
        n, S = size[b], sigma[b]
        total = 0.0
        for i in range(n):
            total -= 2 * np.log(L[at[row + i + 1] - 1])
        logdet[b] = total
        # L^-1, which is lower triangular
        for i in range(n):
            S[i, i] = 1.0
            forward(low, at, L, row, i, S, lower)
        # the lower half of Sigma = L^-T L^-1, then the other one
        for i in range(n - 1, -1, -1):
            backward(low, at, L, row, i, S, lower)
        for i in range(n):
            for c in range(i):
                S[c, i] = S[i, c]
        for i in range(n, len(S)):
            S[i, i] = 1.0
        row += n
    return logdet


@njit(fastmath=FUSED, **DOOR)
@no_type_check
def smooth(low, at, L, size, V, H):
    """V = W becomes L^-1 W, and H = Sigma W = L^-T V; rows as in L, columns side by side."""
    row, lower = np.int64(0), len(size) == 0
    for b in range(len(size)):
        own, out = V[row : row + size[b]], H[row : row + size[b]]
        for i in range(size[b]):
            forward(low, at, L, row, i, own, lower)
            for c in range(own.shape[1]):  # `out[:] = own` takes Numba two seconds more
                out[i, c] = own[i, c]
        for i in range(size[b] - 1, -1, -1):
            backward(low, at, L, row, i, out, lower)
        row += size[b]


@njit(fastmath=FUSED, **DOOR)
@no_type_check
def congruence(low, at, L, size, S):
    """Symmetric S_b become Sigma_b S_b Sigma_b, in place; what is in the padding means nothing."""
    row, lower = np.int64(0), len(size) == 0
    for b in range(len(size)):
        n, own = size[b], S[b]
        for _ in range(2):
            for i in range(n):
                forward(low, at, L, row, i, own, lower)
            for i in range(n - 1, -1, -1):
                backward(low, at, L, row, i, own, lower)
            _transpose(own, n)
        row += n


@njit(**INNER)
@no_type_check
def _transpose(S, n):
    """The first n rows and columns, block by block: whole lines of the cache."""
    for a in range(0, n, 8):
        for b in range(0, a + 1, 8):
            for i in range(a, min(a + 8, n)):
                for j in range(b, min(b + 8, i)):
                    S[i, j], S[j, i] = S[j, i], S[i, j]


@njit(fastmath=FUSED, **WITHIN)
@no_type_check
def forward(low, at, L, row, i, S, lower):
    """Row i of L^-1 S, those before it done; `lower`: S is zero above its diagonal and stays so."""
    first, begin = low[row + i], at[row + i] - low[row + i]
    line = _of(S, i, lower)
    four = i - (i - first) % 4
    for j in range(first, four, 4):
        _less_four(line, L[begin + j : begin + j + 4], S[j : j + 4])
    for j in range(four, i):
        _less(line, L[begin + j], _of(S, j, lower))
    _scale(line, 1 / L[begin + i])


@njit(fastmath=FUSED, **WITHIN)
@no_type_check
def backward(low, at, L, row, i, S, lower):
    """Row i of L^-T S, those behind it done, taken out of the rows before it."""
    begin = at[row + i] - low[row + i]
    line = _of(S, i, lower)
    _scale(line, 1 / L[begin + i])
    for j in range(low[row + i], i):
        _less(_of(S, j, lower), L[begin + j], line)


@njit(**INNER)
@no_type_check
def _of(S, i, lower):
    """Row i, all of it or to its diagonal, and on to whole vectors: no loop over what is left.

    Above the diagonal that changes zeros alone, or what `invert` writes over at the end.
    """
    return S[i, : min(i + EVEN - i % EVEN, S.shape[1])] if lower else S[i, :]


@njit(**INNER)
@no_type_check
def _scale(row, factor):
    for c in range(len(row)):
        row[c] *= factor


@njit(fastmath=FUSED, **WITHIN)
@no_type_check
def _less_four(row, factors, others):
    """row -= factors others, four rows at a time: the first one is read and written once."""
    f0, f1, f2, f3 = factors[0], factors[1], factors[2], factors[3]
    r0, r1, r2, r3 = others[0], others[1], others[2], others[3]
    for c in range(len(row)):
        row[c] = row[c] - f0 * r0[c] - f1 * r1[c] - f2 * r2[c] - f3 * r3[c]


@njit(fastmath=FUSED, **WITHIN)
@no_type_check
def _less(row, factor, other):
    """row -= factor other, as far as the shorter of them goes."""
    for c in range(min(len(row), len(other))):
        row[c] -= factor * other[c]
