"""The sum over a slide effect of one bag's orthant probabilities; see moments/orthant_effect.py.

All in one call: in torch the same takes some two hundred operations on short vectors. Values of
the effect are rows here, as inner loops want more than a few numbers. Loops are
written out: sums along an axis, slices and expressions of whole arrays take Numba three times as
long to compile.
"""

import math
from typing import no_type_check

import numpy as np
from numba import njit

from gpmil.fast.sites import dot
from gpmil.fast.tails import ANY_ORDER, DOOR, FUSED, INNER, ROOT_HALF, WITHIN, tail


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


@njit(fastmath=FUSED, **WITHIN)
@no_type_check
def _pulls(x, shift, scale, per, pull):
    """lambda' at every x, the mean of a constraint over its site."""
    for k in range(len(x)):
        row, out = x[k], pull[k]
        for i in range(len(row)):
            t = (row[i] - shift[i]) * scale[i]
            out[i] = (t - tail(t * ROOT_HALF)[1]) * scale[i] - row[i] * per[i]


@njit(fastmath=ANY_ORDER | {"nnan"}, **WITHIN)
@no_type_check
def _largest(x, shift, scale):
    """The largest t."""
    top = -1.0
    for k in range(len(x)):
        row = x[k]
        for i in range(len(row)):
            top = max(top, (row[i] - shift[i]) * scale[i])
    return top


@njit(fastmath=FUSED, **WITHIN)
@no_type_check
def _bends(x, shift, scale, per, left, upper, B, third):
    """The tails at every x, and the second and third derivatives of lambda."""
    for k in range(len(x)):
        row, tails, second, cubic = x[k], upper[k], B[k], third[k]
        for i in range(len(row)):
            t = (row[i] - shift[i]) * scale[i]
            tails[i], h = tail(t * ROOT_HALF)
            r1 = h * (h - t)
            r2 = r1 * (2 * h - t) - h
            second[i] = ((1 - r1) / left[i] - 1) * per[i]
            cubic[i] = -r2 * scale[i] * scale[i] * scale[i]


@njit(fastmath=ANY_ORDER, **WITHIN)
@no_type_check
def _gains(x, shift, scale, per):
    """sum_i of h^2/(2p) - x^2/(2v), and of the factor that `tail` leaves out, in one row."""
    total = 0.0
    for i in range(len(x)):
        t = (x[i] - shift[i]) * scale[i]
        right = max(t, 0.0)
        total += (t * t - right * right - x[i] * x[i] * per[i]) / 2
    return total


@njit(**INNER)
@no_type_check
def _logs(upper):
    """sum_i log of numbers between 1e-3 and 1: of products, as logarithms take long."""
    total, product = 0.0, 1.0
    for i in range(len(upper)):
        product *= upper[i]
        if i % 16 == 15:
            total += math.log(product)
            product = 1.0
    return total + math.log(product)


@njit(fastmath=ANY_ORDER, **WITHIN)
@no_type_check
def _share(pull, a, last_f):
    """g = argmin |f - g df|, f = pull - a, in one row."""
    product, size = 0.0, 0.0
    for i in range(len(a)):
        f = pull[i] - a[i]
        df = f - last_f[i]
        product += df * f
        size += df * df
    return product / max(size, 1e-300)


@njit(fastmath=FUSED, **WITHIN)
@no_type_check
def _next(pull, a, last_a, last_f, g):
    """a becomes pull - g (da + df), in one row."""
    for i in range(len(a)):
        f = pull[i] - a[i]
        step = (a[i] - last_a[i]) + (f - last_f[i])
        last_a[i], last_f[i] = a[i], f
        a[i] = pull[i] - g * step


@njit(**WITHIN)
@no_type_check
def solved(C, M, shift, scale, per, passes):
    """x = M + C a with a = lambda'(x) after some passes; a'C a in every row; the largest t."""
    k, n = M.shape
    a, last_a, last_f = np.zeros((k, n)), np.zeros((k, n)), np.zeros((k, n))
    x, pull, pulled, top = M.copy(), np.empty((k, n)), np.zeros(k), -1.0
    for number in range(passes - 1):
        top = max(top, _largest(x, shift, scale))
        _pulls(x, shift, scale, per, pull)
        for j in range(k):
            g = _share(pull[j], a[j], last_f[j]) if number > 0 else 0.0
            _next(pull[j], a[j], last_a[j], last_f[j], g)
        u = np.dot(a, C)
        for j in range(k):
            for i in range(n):
                x[j, i] = M[j, i] + u[j, i]
    for j in range(k):
        for i in range(n):
            pulled[j] += a[j, i] * (x[j, i] - M[j, i])
    return x, pulled, top


@njit(fastmath=ANY_ORDER, **WITHIN)
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


@njit(**WITHIN)
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


@njit(**WITHIN)
@no_type_check
def _pairs(C, free, B, third):
    """Rings of two and c3 in every row; how B and `free`, its limit, make rings of two."""
    k, n = B.shape
    both, square, cube = np.empty((k + 1, n)), np.empty((n, n)), np.empty((n, n))
    for j in range(k + 1):
        row = free if j == k else B[j]
        for i in range(n):
            both[j, i] = row[i]
    for i in range(n):
        row, second, cubic = C[i], square[i], cube[i]
        for j in range(n):
            second[j] = row[j] * row[j]
            cubic[j] = second[j] * row[j]
    pairs, cubes = np.dot(both, square), np.dot(third, cube)
    added, shared = np.empty(k), np.empty(k)
    for j in range(k):
        added[j] = dot(B[j], pairs[j]) / 4 + dot(third[j], cubes[j]) / 12
        shared[j] = dot(B[j], pairs[k]) / 4
    return added, shared, dot(free, pairs[k]) / 4


@njit(**WITHIN)
@no_type_check
def _profile(C, at, s, mean, moved, sites, passes):
    """log E[prod_i r_i] but for rings of more than two, those that B makes, and the largest t."""
    tau, nu, var, left = sites
    k, n = len(at), len(mean)
    free, shift, scale, per, logs = np.empty(n), np.empty(n), np.empty(n), np.empty(n), 0.0
    M, upper, B, third = np.empty((k, n)), np.empty((k, n)), np.empty((k, n)), np.empty((k, n))
    for i in range(n):
        free[i], shift[i], per[i] = tau[i] / left[i], nu[i] * var[i], 1 / var[i]
        scale[i] = 1 / math.sqrt(left[i] * var[i])
        logs += math.log(left[i]) / 2
    for j in range(k):
        for i in range(n):
            M[j, i] = mean[i] + moved[i] * (at[j] - s)
    x, pulled, top = solved(C, M, shift, scale, per, passes)
    _bends(x, shift, scale, per, left, upper, B, third)
    f, shared, limit = _pairs(C, free, B, third)
    for j in range(k):
        # h^2/(2p) - x^2/(2v) - log(v p)/2 + log Phi(-h/sqrt p)
        f[j] += _gains(x[j], shift, scale, per) + _logs(upper[j]) - logs - pulled[j] / 2
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
