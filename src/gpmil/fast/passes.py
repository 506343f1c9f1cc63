"""One pass over the bags of a cohort: sums of log Z and of its gradient, H read once.

See compiled.py. H comes from memory row by row for H w (four rows side by side took 2.6 times as
long on an AMD machine), and from the cache, four rows at a time, for H'x. No branch stands inside
the loops over the instances of a bag, and nothing depends on the width of the vector units.
"""

import math
from typing import no_type_check

import numpy as np
from numba import njit

from gpmil.fast.tails import ANY_ORDER, DOOR, FUSED, INNER, LARGEST, ROOT_HALF, WITHIN, tail

ROWS = 128  # products of so many rows of H are added up in its own dtype, then in float64
TOGETHER = 16  # numbers multiplied before a logarithm is taken of them
SMALLEST = -21.0  # z below which exp(-z^2) tells patches of a positive bag no longer apart
DOUBTFUL = -1e-3  # log q of a positive bag above which 1 - q needs care


# --- A bag ----------------------------------------------------------------------------------------
@njit(fastmath=ANY_ORDER, **WITHIN)
@no_type_check
def times(H, start, stop, w, c, mu):
    """mu = c + H w, one row after the other: memory comes fastest in one stream."""
    for i in range(stop - start):
        row, total = H[start + i], w.dtype.type(0)
        for j in range(len(w)):
            total += row[j] * w[j]
        mu[i] = c + total


@njit(fastmath=ANY_ORDER, **WITHIN)
@no_type_check
def _times_four(H, start, stop, w, c, mu):
    """The same for four w, with one look at H."""
    w0, w1, w2, w3 = w[0], w[1], w[2], w[3]
    for i in range(stop - start):
        row, t0, t1, t2, t3 = H[start + i], 0.0, 0.0, 0.0, 0.0
        for j in range(len(row)):
            t0 += row[j] * w0[j]
            t1 += row[j] * w1[j]
            t2 += row[j] * w2[j]
            t3 += row[j] * w3[j]
        mu[0, i], mu[1, i], mu[2, i], mu[3, i] = c + t0, c + t1, c + t2, c + t3


@njit(fastmath=FUSED, **WITHIN)
@no_type_check
def _tails(mu, sigma, start, n, z, upper, hazard):
    """z = t / sqrt 2, upper = 1 - Phi(t), without its factor exp(-z^2) where z > 0, and h(t)."""
    for i in range(n):
        z[i] = mu[i] / sigma[start + i] * ROOT_HALF
        upper[i], hazard[i] = tail(z[i])


@njit(fastmath=FUSED, **WITHIN)
@no_type_check
def _log_q(z, upper, n):
    """log q = sum_i log(1 - Phi(t_i)), and the largest z."""
    total, product, largest = 0.0, 1.0, z[0]
    for i in range(n):
        largest = max(largest, z[i])
        total -= max(z[i], 0.0) ** 2
        product *= upper[i]
        if i % TOGETHER == TOGETHER - 1:
            total += math.log(product)
            product = 1.0
    return total + math.log(product), largest


@njit(**INNER)
@no_type_check
def _log_q_near_one(z, n):
    """log q where it is nearly 0: the sum keeps all digits of 1 - q."""
    total = 0.0
    for i in range(n):
        total += math.log1p(-0.5 * math.erfc(-z[i]))
    return total


@njit(**INNER)
@no_type_check
def _log_z(log_q, positive):
    """log Z_b, and what multiplies sigma h in E - mu: -1 (eq. qmi_0), q / (1 - q) (eq. qmi_1)."""
    if not positive:
        return log_q, -1.0
    p = -math.expm1(log_q)
    return math.log(p), math.exp(log_q) / p


@njit(**WITHIN)
@no_type_check
def _of_bag(mu, sigma, start, n, positive, z, upper, hazard):
    """What `_log_z` gives at mu, and whether all was within range; the hazards are left behind."""
    _tails(mu, sigma, start, n, z, upper, hazard)
    log_q, top = _log_q(z, upper, n)
    doubtful = positive and log_q > DOUBTFUL
    if not log_q <= 0 or top > LARGEST or (doubtful and top < SMALLEST):
        return 0.0, 0.0, False
    if doubtful:
        log_q = _log_q_near_one(z, n)
    log_z, factor = _log_z(log_q, positive)
    return log_z, factor, True


@njit(fastmath=FUSED, **WITHIN)
@no_type_check
def _unsmooth(e, start, n, diagonal, first, column, weight, x):
    """x = P e: the diagonal, and the weighted neighbours.

    Places have no sign: Numba would ask of each whether it counts from the end, half of the time.
    """
    for i in range(n):
        total = diagonal[start + i] * e[i]
        for k in range(np.uint64(first[start + i]), np.uint64(first[start + i + 1])):
            total -= weight[k] * e[np.uint64(column[k] - start)]
        x[i] = total


@njit(fastmath=ANY_ORDER, **WITHIN)
@no_type_check
def _add(H, start, n, x, at, out):
    """out += H'x over n rows, four at a time."""
    M = H.shape[1]
    four = n - n % 4
    for i in range(0, four, 4):
        row, k = start + i, at + i
        x0, x1, x2, x3 = x[k], x[k + 1], x[k + 2], x[k + 3]
        for j in range(M):
            out[j] += (x0 * H[row, j] + x1 * H[row + 1, j]) + (
                x2 * H[row + 2, j] + x3 * H[row + 3, j]
            )
    for i in range(four, n):
        for j in range(M):
            out[j] += x[at + i] * H[start + i, j]


@njit(fastmath=ANY_ORDER, **WITHIN)
@no_type_check
def against(H, start, stop, x, block, out):
    """out += H'x, in x's dtype within ROWS rows, in float64 beyond."""
    n = stop - start
    for at in range(0, n, ROWS):
        block[:] = 0
        _add(H, start + at, min(ROWS, n - at), x, at, block)
        for j in range(len(out)):
            out[j] += block[j]


# --- All bags -------------------------------------------------------------------------------------
@njit(**INNER)
@no_type_check
def _largest(offsets):
    largest = 0
    for b in range(len(offsets) - 1):
        largest = max(largest, offsets[b + 1] - offsets[b])
    return largest


@njit(fastmath=FUSED, forceinline=True, **DOOR)
@no_type_check
def one_pass(
    H, sigma, offsets, positive, diagonal, first, column, weight, w, c, want_gradient
):  # fmt: skip
    """sum_b log Z_b with W'(E - c), or its gradient in w; and whether all was within range.

    Products with H are in the dtype of w, everything else in float64.
    """
    largest = _largest(offsets)
    mu, z, upper = np.empty(largest), np.empty(largest), np.empty(largest)
    hazard, e = np.empty(largest), np.empty(largest)
    x, block, out = np.empty(largest, w.dtype), np.empty(len(w), w.dtype), np.zeros(len(w))
    total = 0.0
    for b in range(len(positive)):
        start, stop = offsets[b], offsets[b + 1]
        n = stop - start
        times(H, start, stop, w, c, mu)
        log_z, factor, fine = _of_bag(mu, sigma, start, n, positive[b], z, upper, hazard)
        if not fine:
            return total, out, False
        total += log_z
        if want_gradient:
            # d log Z / dmu = (E - mu) / sigma^2
            for i in range(n):
                x[i] = factor * hazard[i] / sigma[start + i]
        else:
            for i in range(n):
                e[i] = mu[i] - c + factor * sigma[start + i] * hazard[i]
            _unsmooth(e, start, n, diagonal, first, column, weight, x)
        against(H, start, stop, x, block, out)
    return total, out, True


@njit(fastmath=FUSED, **DOOR)
@no_type_check
def four_slopes(H, sigma, offsets, positive, w, c):
    """The gradient of sum_b log Z_b, added up over four w; and whether all was within range."""
    largest = _largest(offsets)
    mu, z, upper = np.empty((4, largest)), np.empty(largest), np.empty(largest)
    hazard, x = np.empty(largest), np.empty(largest)
    block, out = np.empty(w.shape[1]), np.zeros(w.shape[1])
    for b in range(len(positive)):
        start, stop = offsets[b], offsets[b + 1]
        n = stop - start
        _times_four(H, start, stop, w, c, mu)
        x[:] = 0.0
        for p in range(4):
            _, factor, fine = _of_bag(mu[p], sigma, start, n, positive[b], z, upper, hazard)
            if not fine:
                return out, False
            # d log Z / dmu = (E - mu) / sigma^2
            for i in range(n):
                x[i] += factor * hazard[i] / sigma[start + i]
        against(H, start, stop, x, block, out)
    return out, True


# --- Sweeps ---------------------------------------------------------------------------------------
@njit(fastmath=ANY_ORDER, **WITHIN)
@no_type_check
def _solve(L, x):
    """x becomes (L L')^-1 x."""
    M = len(x)
    for i in range(M):
        total = 0.0
        for j in range(i):
            total += L[i, j] * x[j]
        x[i] = (x[i] - total) / L[i, i]
    for i in range(M - 1, -1, -1):
        x[i] /= L[i, i]
        for j in range(i):
            x[j] -= L[i, j] * x[i]


@njit(fastmath=FUSED, **DOOR)
@no_type_check
def sweeps(
    H, sigma, offsets, positive, diagonal, first, column, weight, L, w, c, count
):  # fmt: skip
    """w after `count` sweeps w <- R^-1 W'(E - c), R = L L'; the bound before each; all in range."""
    bound = np.empty(count)
    for k in range(count):
        log_z, pulled, in_range = one_pass(
            H, sigma, offsets, positive, diagonal, first, column, weight,
            w.astype(H.dtype), c, False,
        )  # fmt: skip
        if not in_range:
            return w, bound, False
        bound[k] = log_z - (w * w).sum() / 2
        _solve(L, pulled)
        w = pulled
    return w, bound, True
