"""Sigma of small bags from the envelope of P: loops for Numba, the twin of torch's inverse.

The envelope of a row reaches from its first neighbour to the diagonal, and L in P = L L' has no
more entries than that: some ten in a row, as patches come slide by slide and line by line. Imported
only where Numba is installed. Inner loops go over rows that lie close, whatever the width of the
vector units.
"""

from typing import no_type_check

import numpy as np
from numba import njit

FUSED = {"contract"}  # a * b + c in one step


@njit(nogil=True, cache=True, error_model="numpy")
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


@njit(nogil=True, cache=True, fastmath=FUSED, error_model="numpy")
@no_type_check
def invert(start, column, weight, degree, first, size, strength, sigma):
    """Write Sigma_b into the zeros of sigma, unit rows behind it; log|Sigma_b| of every bag.

    `start`, `column`, `weight` and `degree` are the neighbours of the whole cohort, `first` and
    `size` the rows of the bags.
    """
    logdet = np.empty(len(first))
    for b in range(len(first)):
        n, S = size[b], sigma[b]
        low, at, L = _factor(start, column, weight, degree, first[b], n, strength)
        total = 0.0
        for i in range(n):
            total -= 2 * np.log(L[at[i] + i - low[i]])
        logdet[b] = total
        _forward(low, at, L, S)
        _backward(low, at, L, S)
        for i in range(n, len(S)):
            S[i, i] = 1.0
    return logdet


@njit(nogil=True, cache=True, fastmath=FUSED, error_model="numpy")
@no_type_check
def _factor(start, column, weight, degree, first, n, strength):
    """L in P = L L': the first column of every row, where the row begins in L, and L."""
    low, at = np.empty(n, np.int64), np.empty(n + 1, np.int64)
    at[0] = 0
    for i in range(n):
        low[i] = i
        for k in range(start[first + i], start[first + i + 1]):
            low[i] = min(low[i], column[k] - first)
        at[i + 1] = at[i] + i - low[i] + 1
    L = np.zeros(at[n])
    for i in range(n):
        row = L[at[i] : at[i + 1]]
        # P = I + lambda (diag(A 1) - A)
        for k in range(start[first + i], start[first + i + 1]):
            j = column[k] - first
            if j < i:
                row[j - low[i]] -= strength * weight[k]
        row[i - low[i]] += 1 + strength * degree[first + i]
        for j in range(low[i], i + 1):
            # L_ij = (P_ij - sum_k L_ik L_jk) / L_jj
            begin = max(low[i], low[j])
            other = L[at[j] : at[j + 1]]
            total = row[j - low[i]]
            for k in range(begin, j):
                total -= row[k - low[i]] * other[k - low[j]]
            row[j - low[i]] = total / other[j - low[j]] if j < i else np.sqrt(total)
    return low, at, L


@njit(nogil=True, cache=True, fastmath=FUSED, error_model="numpy")
@no_type_check
def _forward(low, at, L, S):
    """S becomes L^-1, which is lower triangular."""
    for i in range(len(low)):
        row = S[i, : i + 1]
        row[i] = 1.0
        for j in range(low[i], i):
            _less(row, L[at[i] + j - low[i]], S[j, : j + 1])
        scale = 1 / L[at[i] + i - low[i]]
        for c in range(i + 1):
            row[c] *= scale


@njit(nogil=True, cache=True, fastmath=FUSED, error_model="numpy")
@no_type_check
def _backward(low, at, L, S):
    """S = L^-1 becomes Sigma = L^-T L^-1: its lower half, then the other one."""
    for i in range(len(low) - 1, -1, -1):
        row = S[i, : i + 1]
        scale = 1 / L[at[i] + i - low[i]]
        for c in range(i + 1):
            row[c] *= scale
        for j in range(low[i], i):
            _less(S[j, : j + 1], L[at[i] + j - low[i]], row)
    for i in range(len(low)):
        for c in range(i):
            S[c, i] = S[i, c]


@njit(nogil=True, fastmath=FUSED, error_model="numpy")
@no_type_check
def _less(row, factor, other):
    """row -= factor other, as far as the shorter of them goes."""
    for c in range(min(len(row), len(other))):
        row[c] -= factor * other[c]
