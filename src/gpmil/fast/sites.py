"""The vector arithmetic of expectation propagation in one bag, between its factorisations.

See ep_bag.py, and moments/sites.py for the same in torch. An iteration takes some hundred
operations on vectors of the length of a bag, which cost more to call one by one than to do.
"""

import math
from typing import no_type_check

import numpy as np
from numba import njit

from gpmil.fast import tiles
from gpmil.fast.tails import ANY_ORDER, DOOR, FUSED, ROOT_HALF, WITHIN, tail

FURTHEST = 30.0  # t of a cavity: beyond, the fourth cumulant loses its digits as t^6


@njit(fastmath=FUSED, **WITHIN)
@no_type_check
def refined(mean, var, left, tau, nu, new_tau, new_nu):
    """The sites that match the moments of their cavities; and the largest t among these."""
    largest = -1.0
    for i in range(len(mean)):
        # cavity: p = 1/v - tau, h = mhat/v - nu; t = h / sqrt p, and 1 / p its variance
        spread = var[i] / left[i]
        t = (mean[i] - nu[i] * var[i]) / math.sqrt(left[i] * var[i])
        hazard = tail(t * ROOT_HALF)[1]
        # delta = h (h - t);  tau = delta / ((1 - delta) v)
        # nu = (t delta - h) / ((1 - delta) sqrt v)
        gap = hazard - t
        delta = hazard * gap
        kept = 1 - delta
        pull = -(gap + t * kept) if t > 0 else t * delta - hazard
        new_tau[i] = delta / (kept * spread)
        new_nu[i] = pull / (kept * math.sqrt(spread))
        largest = max(largest, t)
    return largest


@njit(fastmath=FUSED, **DOOR)
@no_type_check
def first(mu, prior, share):
    """Sites of coordinates on their own, a share of each; and the largest t."""
    n = len(mu)
    zero, one, x = np.zeros(n), np.ones(n), np.empty(2 * n)
    largest = refined(mu, prior, one, zero, zero, x[:n], x[n:])
    return x * share, largest


@njit(**DOOR)
@no_type_check
def room(n, like):
    """Where `step` works, in the dtype of `like`."""
    return tiles.room(n, n + 1, like)


@njit(fastmath=FUSED, **WITHIN)
@no_type_check
def condition(cov, mu, x, Z, minus):
    """L of B = I + T^.5 S T^.5 = L L', and rows L^-1 T^.5 [S, T^-1 nu - mu] after it in Z."""
    n, first, root = len(mu), Z.shape[1], np.empty_like(Z[0])
    for j in range(n):
        root[j] = math.sqrt(x[j])
    for i in range(n):
        row, below = Z[i], Z[first + i]
        for j in range(n):
            below[j] = root[j] * cov[i, j]
            row[j] = root[i] * below[j]
        row[i] += 1
        pull = x[n + i] / math.sqrt(x[i]) if x[i] > 0 else 0.0
        Z[first + n, i] = pull - math.sqrt(x[i]) * mu[i]
    tiles.eliminate(Z, minus)


@njit(fastmath=ANY_ORDER, **WITHIN)
@no_type_check
def marginals(Z, mu, prior, mean, var):
    """mhat and v of N(mu, S) times all sites, from the rows that `condition` left in Z."""
    n, first = len(mu), Z.shape[1]
    white = Z[first + n]
    for j in range(n):
        half, square, product = Z[first + j], 0.0, 0.0
        for i in range(first):
            square += half[i] * half[i]
            product += half[i] * white[i]
        # v = S_jj - |half_j|^2,  mhat = mu + half' L^-1 (T^-.5 nu - T^.5 mu)
        var[j] = max(prior[j] - square, 1e-300)
        mean[j] = mu[j] + product


@njit(fastmath=FUSED, **DOOR)
@no_type_check
def step(cov, mu, prior, x, gauss, f, Z, minus):
    """mhat, v and v p at the sites x (rows of `gauss`); f: what the next sites add to x.

    In the dtype of `cov`, `Z` and `minus`. Returns the largest change and the largest site, in
    units of the prior, and the largest t.
    """
    n = len(mu)
    mean, var, left = gauss[0], gauss[1], gauss[2]
    condition(cov, mu, x, Z, minus)
    marginals(Z, mu, prior, mean, var)
    for i in range(n):
        left[i] = max(1 - x[i] * var[i], 1e-15)
    largest = refined(mean, var, left, x[:n], x[n:], f[:n], f[n:])
    change, size = 0.0 * mean[0], 0.0  # no number, and stays none, where B is not positive definite
    for i in range(n):
        f[i] -= x[i]
        f[n + i] -= x[n + i]
        root = math.sqrt(prior[i])
        change = max(change, abs(f[i]) * prior[i], abs(f[n + i]) * root)
        size = max(size, abs(x[i]) * prior[i], abs(x[n + i]) * root)
    return change, size, largest


@njit(fastmath=ANY_ORDER, **WITHIN)
@no_type_check
def dot(a, b):
    """a'b."""
    total = 0.0
    for i in range(len(a)):
        total += a[i] * b[i]
    return total


@njit(fastmath=FUSED, **WITHIN)
@no_type_check
def fitted(df, f):
    """gamma = argmin |f - gamma df|, by elimination; the ridge keeps empty slots at zero."""
    depth = len(df)
    gram, gamma, ridge = np.empty((depth, depth)), np.empty(depth), 0.0
    for a in range(depth):
        gamma[a] = dot(df[a], f)
        for b in range(depth):
            gram[a, b] = dot(df[a], df[b])
        ridge = max(ridge, gram[a, a])
    for a in range(depth):
        gram[a, a] += 1e-12 * ridge + 1e-300
    for a in range(depth):
        for b in range(a + 1, depth):
            factor = gram[b, a] / gram[a, a]
            gamma[b] -= factor * gamma[a]
            for c in range(a, depth):
                gram[b, c] -= factor * gram[a, c]
    for a in range(depth - 1, -1, -1):
        for c in range(a + 1, depth):
            gamma[a] -= gram[a, c] * gamma[c]
        gamma[a] /= gram[a, a]
    return gamma


@njit(fastmath=FUSED, **DOOR)
@no_type_check
def accelerated(x, f, unit, dx, df, last_x, last_f, slot, weak):
    """The next sites by Anderson's rule, all memory in units of the prior; slot -1: none yet."""
    k, n = len(x), len(x) // 2
    new = np.empty(k)
    for i in range(k):
        new[i] = (x[i] + f[i]) * unit[i]
        if slot >= 0:
            dx[slot, i], df[slot, i] = x[i] * unit[i] - last_x[i], f[i] * unit[i] - last_f[i]
        last_x[i], last_f[i] = x[i] * unit[i], f[i] * unit[i]
    if slot >= 0:
        gamma = fitted(df, last_f)
        for a in range(len(df)):
            for i in range(k):
                new[i] -= gamma[a] * (dx[a, i] + df[a, i])
    least, total = new[0], 0.0
    for i in range(k):
        total += new[i]
        least = min(least, new[i] if i < n else least)
    # a step that leads to a negative precision starts afresh
    afresh = least < 0 or not math.isfinite(total)
    if afresh:
        dx[:], df[:] = 0.0, 0.0
    for i in range(n):
        # tau and nu that all but vanish must come from one cavity: nu / sqrt tau is used
        plain = afresh or new[i] < weak
        for j in (i, n + i):
            new[j] = x[j] + f[j] if plain else new[j] / unit[j]
    return new


@njit(fastmath=FUSED, **DOOR)
@no_type_check
def closed(gauss, x):
    """sum_i and sum_i |.| of what the constraints add to log P; the t of the cavities."""
    n = gauss.shape[1]
    total, size, t = 0.0, 0.0, np.empty(n)
    for i in range(n):
        mean, var, left = gauss[0, i], gauss[1, i], gauss[2, i]
        t[i] = (mean - x[n + i] * var) / math.sqrt(left * var)
        s = mean / math.sqrt(var)
        z = t[i] * ROOT_HALF
        # -log(v p)/2 + h^2/(2p) - mhat^2/(2v) + log Phi(-h/sqrt p)
        upper = math.log(tail(z)[0]) - max(z, 0.0) ** 2
        term = -math.log(left) / 2 + (t[i] - s) * (t[i] + s) / 2 + upper
        total += term
        size += abs(term)
    return total, size, t


@njit(fastmath=FUSED, **DOOR)
@no_type_check
def cumulants(t):
    """Third and fourth cumulants of N(t, 1) given m < 0, over its standard deviation^3 and ^4."""
    k3, k4 = np.empty(len(t)), np.empty(len(t))
    for i in range(len(t)):
        h = tail(t[i] * ROOT_HALF)[1]
        # cumulants are derivatives in t: with r = h(t), r' = h (h - t), k3 = -r'', k4 = -r'''
        r1 = h * (h - t[i])
        r2 = r1 * (2 * h - t[i]) - h
        r3 = r2 * (2 * h - t[i]) + r1 * (2 * r1 - 2)
        kept = 1 - r1
        k3[i] = -r2 / (kept * math.sqrt(kept))
        k4[i] = -r3 / (kept * kept)
    return k3, k4


@njit(fastmath=ANY_ORDER, **DOOR)
@no_type_check
def paired(v, k3, k4):
    """sum_{i!=j} k_i k_j corr_ij^p for p = 3 and 4, each followed by the sum of absolute terms."""
    n = len(k3)
    scale = np.empty(n)
    for i in range(n):
        scale[i] = 1 / math.sqrt(v[i, i])
    c3, size3, c4, size4 = 0.0, 0.0, 0.0, 0.0
    for i in range(n):
        row, own = v[i], scale[i]
        s3, a3, s4, a4 = 0.0, 0.0, 0.0, 0.0
        for j in range(i):
            corr = own * row[j] * scale[j]
            square = corr * corr
            cube, fourth = square * corr * k3[j], square * square * k4[j]
            s3 += cube
            a3 += abs(cube)
            s4 += fourth
            a4 += abs(fourth)
        # both orders of a pair: twice
        c3 += 2 * k3[i] * s3
        size3 += 2 * abs(k3[i]) * a3
        c4 += 2 * k4[i] * s4
        size4 += 2 * abs(k4[i]) * a4
    return c3, size3, c4, size4


# --- Of several values of a slide effect, one per column (orthant_effect.py) ----------------------


@njit(fastmath=FUSED, **DOOR)
@no_type_check
def pulls(x, nu, var, left, inside, pull):
    """lambda' at every x, the mean of a constraint over its site; and the largest t."""
    largest = -1.0
    for i in range(len(x)):
        scale, shift, v = 1 / math.sqrt(left[i] * var[i]), nu[i] * var[i], 1 / var[i]
        for k in range(x.shape[1]):
            t = (x[i, k] - shift) * scale
            hazard = tail(t * ROOT_HALF)[1]
            pull[i, k] = (t - hazard) * scale - x[i, k] * v if inside[i] else 0.0
            largest = max(largest, t if inside[i] else largest)
    return largest


@njit(fastmath=FUSED, **DOOR)
@no_type_check
def bends(x, nu, var, left, inside, value, pull, second, third):
    """lambda and its first three derivatives at every x, zero where padded."""
    for i in range(len(x)):
        scale, shift, v = 1 / math.sqrt(left[i] * var[i]), nu[i] * var[i], 1 / var[i]
        half_log = math.log(left[i]) / 2
        for k in range(x.shape[1]):
            t = (x[i, k] - shift) * scale
            z = t * ROOT_HALF
            upper, h = tail(z)
            # h^2/(2p) - x^2/(2v) - log(v p)/2 + log Phi(-h/sqrt p)
            gain = (t * t - x[i, k] * x[i, k] * v) / 2 - max(z, 0.0) ** 2 - half_log
            r1 = h * (h - t)
            r2 = r1 * (2 * h - t) - h
            here = inside[i]
            value[i, k] = gain + math.log(upper) if here else 0.0
            pull[i, k] = (t - h) * scale - x[i, k] * v if here else 0.0
            second[i, k] = ((1 - r1) / left[i] - 1) * v if here else 0.0
            third[i, k] = -r2 * scale**3 if here else 0.0


@njit(fastmath=FUSED, forceinline=True, **DOOR)
@no_type_check
def slope_and_bend(mu, sd, s):
    """d/ds and d2/ds2 of sum_i log Phi(-(mu_i + s) / sd_i); and the largest t."""
    slope, bend, largest = 0.0, 0.0, -1.0
    for i in range(len(mu)):
        t = (mu[i] + s) / sd[i]
        h = tail(t * ROOT_HALF)[1]
        slope -= h / sd[i]
        bend -= h * (h - t) / (sd[i] * sd[i])
        largest = max(largest, t)
    return slope, bend, largest


@njit(**WITHIN)
@no_type_check
def mode(mu, sd, tau, most):
    """Where N(s; 0, tau^2) prod_i Phi(-(mu_i + s) / sd_i) is largest; its width; the largest t.

    As effect_nodes.find_mode.
    """
    square = tau * tau
    slope, bend, largest = slope_and_bend(mu, sd, 0.0)
    low, high = 0.0, -square * slope
    size, width = high / (1 - square * bend), tau
    for _ in range(most):
        slope, bend, _ = slope_and_bend(mu, sd, -size)
        slope = max(-slope, 1e-300)
        width = 1 / math.sqrt(1 / square - bend)
        goal = square * slope
        if goal > size:
            low = size
        else:
            high = size
        new = size * math.exp(math.log(goal / max(size, 1e-300)) / (1 - size * bend / slope))
        if not (low < new < high):
            new = (low + high) / 2
        if abs(new - size) < 0.1 * width:
            break
        size = new
    return -size, width, largest


@njit(**DOOR)
@no_type_check
def middle(mu, sd, tau, most, reach, far, halvings):
    """Where the integrand falls: orthant_effect.middle; and the largest t on the way."""
    low, width, largest = mode(mu, sd, tau, most)
    high = min(low + reach * width, max(far * tau, low))
    for _ in range(halvings):
        s = (low + high) / 2
        slope, bend, top = slope_and_bend(mu, sd, s)
        largest = max(largest, top)
        if slope + bend / min(slope, -1e-300) > s / (tau * tau):
            low = s
        else:
            high = s
    return (low + high) / 2, largest
