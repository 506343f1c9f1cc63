"""The sum over a slide effect of one bag's orthant probabilities; see moments/orthant_effect.py.

All in one call: in torch the same takes some two hundred operations on short vectors. Loops are
written out: sums along an axis, slices and expressions of whole arrays take Numba three times as
long to compile.
"""

import math
from typing import no_type_check

import numpy as np
from numba import njit

from gpmil.fast.sites import bends, pulls
from gpmil.fast.tails import ANY_ORDER, DOOR, FUSED, INNER, ROOT_HALF, tail


@njit(**INNER)
@no_type_check
def nodes(s, fall, effect, rule):
    """Values of the effect, and log ds between them."""
    step, before, after, broad, turn, far = rule
    k = int(before + after) + 1
    width = 1 / math.sqrt(effect**-2 + fall)
    at, log_ds = np.empty(k), np.empty(k)
    more = 0.0
    for j in range(k):
        u = step * (j - before)
        z = broad * (u - turn)
        soft = (math.log1p(math.exp(-z)) - math.log1p(math.exp(broad * turn))) / broad
        if j == 0:
            more = max((max(s, 0.0) + far * effect + width * u) / soft, 0.0)
        at[j] = s + width * u - more * soft
        log_ds[j] = math.log((width + more / (1 + math.exp(z))) * step)
    return at, log_ds


@njit(fastmath=FUSED, **INNER)
@no_type_check
def _next(pull, a, last_a, last_f, remembers):
    """a becomes pull - g (da + df), f = pull - a and g = argmin |f - g df| in every column."""
    n, k = a.shape
    g, size = np.zeros(k), np.zeros(k)
    for i in range(n):
        for j in range(k):
            f = pull[i, j] - a[i, j]
            df = f - last_f[i, j]
            g[j] += df * f
            size[j] += df * df
    for j in range(k):
        g[j] = g[j] / max(size[j], 1e-300) if remembers else 0.0
    for i in range(n):
        for j in range(k):
            f = pull[i, j] - a[i, j]
            step = (a[i, j] - last_a[i, j]) + (f - last_f[i, j])
            last_a[i, j], last_f[i, j] = a[i, j], f
            a[i, j] = pull[i, j] - g[j] * step


@njit(**INNER)
@no_type_check
def solved(C, M, nu, var, left, inside, passes):
    """x = M + C a with a = lambda'(x) after some passes; a'C a in every column; the largest t."""
    n, k = M.shape
    a, last_a, last_f = np.zeros((n, k)), np.zeros((n, k)), np.zeros((n, k))
    x, pull, pulled, top = M.copy(), np.empty((n, k)), np.zeros(k), -1.0
    for number in range(passes - 1):
        top = max(top, pulls(x, nu, var, left, inside, pull))
        _next(pull, a, last_a, last_f, number > 0)
        u = np.dot(C, a)
        for i in range(n):
            for j in range(k):
                x[i, j] = M[i, j] + u[i, j]
    for i in range(n):
        for j in range(k):
            pulled[j] += a[i, j] * (x[i, j] - M[i, j])
    return x, pulled, top


@njit(fastmath=ANY_ORDER, **INNER)
@no_type_check
def _moved(V, tau):
    """1 - V tau."""
    out = np.empty(len(tau))
    for i in range(len(tau)):
        total, row = 0.0, V[i]
        for j in range(len(tau)):
            total += row[j] * tau[j]
        out[i] = 1 - total
    return out


@njit(**INNER)
@no_type_check
def _more_than_two(whole, second, shared):
    """Rings of three and more at some s from those without constraints."""
    if second <= 1e-12:
        return 0.0
    q = min(max(whole / second - 1, -0.8), 20.0)
    e, much = 1.5 * q / (1 + 1.13 * q), shared / second
    if abs(e) < 1e-3:
        return q * second * much**3
    x = min(e * much, 0.99)
    at_s = -math.log1p(-x) / 2 - x / 2 - x * x / 4
    return q * second * at_s / (-math.log1p(-e) / 2 - e / 2 - e * e / 4)


@njit(**INNER)
@no_type_check
def _bound(mu, prior, d):
    """min_i log Phi(-(mu_i + d) / sd_i)."""
    worst = -math.inf
    for i in range(len(mu)):
        worst = max(worst, (mu[i] + d) / math.sqrt(prior[i]))
    if worst < -8:
        return 0.0
    z = worst * ROOT_HALF
    return math.log(tail(z)[0]) - max(z, 0.0) ** 2


@njit(**INNER)
@no_type_check
def _pairs(C, free, B, third):
    """Rings of two and c3 in every column; how B and `free`, its limit, make rings of two."""
    n, k = B.shape
    both, square, cube = np.empty((n, k + 1)), np.empty((n, n)), np.empty((n, n))
    for i in range(n):
        both[i, k] = free[i]
        for j in range(k):
            both[i, j] = B[i, j]
        for j in range(n):
            square[i, j] = C[i, j] * C[i, j]
            cube[i, j] = square[i, j] * C[i, j]
    pairs, cubes = np.dot(square, both), np.dot(cube, third)
    added, shared, limit = np.zeros(k), np.zeros(k), 0.0
    for i in range(n):
        limit += free[i] * pairs[i, k] / 4
        for j in range(k):
            added[j] += B[i, j] * pairs[i, j] / 4 + third[i, j] * cubes[i, j] / 12
            shared[j] += B[i, j] * pairs[i, k] / 4
    return added, shared, limit


@njit(**INNER)
@no_type_check
def _profile(C, at, s, mean, moved, sites, passes):
    """log E[prod_i r_i] but for rings of more than two, those that B makes, and the largest t."""
    tau, nu, var, left = sites
    n, k = len(mean), len(at)
    inside, free, M = np.ones(n, dtype=np.bool_), np.empty(n), np.empty((n, k))
    for i in range(n):
        free[i] = tau[i] / left[i]
        for j in range(k):
            M[i, j] = mean[i] + moved[i] * (at[j] - s)
    x, pulled, top = solved(C, M, nu, var, left, inside, passes)
    value, a, B, third = np.empty((n, k)), np.empty((n, k)), np.empty((n, k)), np.empty((n, k))
    bends(x, nu, var, left, inside, value, a, B, third)
    f, shared, limit = _pairs(C, free, B, third)
    for j in range(k):
        f[j] -= pulled[j] / 2
        for i in range(n):
            f[j] += value[i, j]
    return f, shared, limit, top


@njit(**DOOR)
@no_type_check
def over_effect(V, tau, nu, mean, mu, prior, s, log_gauss, log_p, effect, rule, passes):
    """log P, the rings of more than two in it, and the largest t."""
    C, n = V.copy(), len(mu)
    var, left = np.empty(n), np.empty(n)
    moved = _moved(V, tau)
    rise, fall, whole = 0.0, 0.0, -log_gauss
    for i in range(n):
        var[i], C[i, i] = V[i, i], 0.0
        left[i] = max(1 - tau[i] * var[i], 1e-15)
        pull = nu[i] - tau[i] * mean[i]
        rise += pull
        fall += tau[i] * moved[i]
        # log|I + S T| / 2 = -lZG + (nu'mhat + mu'(nu - T mhat)) / 2
        whole += (nu[i] * mean[i] + mu[i] * pull + math.log(left[i])) / 2
    at, log_ds = nodes(s, fall, effect, rule)
    f, shared, free, top = _profile(C, at, s, mean, moved, (tau, nu, var, left), passes)
    more = np.empty(len(at))
    for j in range(len(at)):
        d = at[j] - s
        more[j] = _more_than_two(whole, free, shared[j])
        f[j] += log_gauss + rise * d - fall * d * d / 2 + more[j]
        most = _bound(mu, prior, d)
        most = min(most, log_p + rise * d) if d > 0 else most
        f[j] = most if not math.isfinite(f[j]) else f[j]
        f[j] = min(max(f[j], log_p) if d < 0 else f[j], most)
        # N(s; 0, tau^2) exp f(s) ds
        f[j] += log_ds[j] - (at[j] / effect) ** 2 / 2 - math.log(effect * math.sqrt(2 * math.pi))
    largest, total, spent = -math.inf, 0.0, 0.0
    for j in range(len(at)):
        largest = max(largest, f[j])
    for j in range(len(at)):
        weight = math.exp(f[j] - largest)
        total += weight
        spent += weight * abs(more[j])
    return largest + math.log(total), spent / total, top
