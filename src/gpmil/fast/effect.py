"""Sums over the values of a slide effect, bag by bag: the twin of slide_effect.py's, compiled.

A bag is finished before the next one is begun, so that its patches stay in the cache while the
effect goes through its nodes. With t = (mu + s) / sigma, the hazard h, G = sum_i h_i / sigma_i and
C = sum_i h_i (h_i - t_i) / sigma_i^2, both kinds of bags have one form:

    d log z / dmu = f h / sigma,   f = -1 for z = q,  f = r = q / (1 - q) for z = 1 - q
    d log z / ds = f G,   d2 log z / ds2 = f C  or  r C - r G^2 / (1 - q)

A patch may also be known to lie above zero: q then has Phi(t) = 1 - Phi(-t) of it, and -mu, -s in
place of mu and s. Its `side` is -1, that of the others 1, and G = sum_i side_i h_i / sigma_i.

Bags in which h - t loses its digits, or 1 - q underflows, are not served.
"""

import math
from typing import no_type_check

import numpy as np
from numba import njit

from gpmil.fast.passes import DOUBTFUL
from gpmil.fast.tails import (
    ANY_ORDER,
    DOOR,
    FUSED,
    INNER,
    LARGEST,
    ROOT_HALF,
    WITHIN,
    below,
    tail,
    widest,
)

TOGETHER = 128  # numbers multiplied before a logarithm is taken of them: .0078^128 = 1e-270
ROOT_2 = 1 / ROOT_HALF
LEAST = 1e-300  # what is divided by
UNDERFLOW = -600.0  # log of the integrand's peak from which on what underflows beside it counts
LIMIT = 700.0  # z = t / sqrt 2 from which h - t loses more than half of its digits
MOST = 1e6  # nodes
PADDED = 8  # patches of a bag come in multiples of it
NOWHERE = -1e6  # mu of those that fill up the last one: 1 - Phi is 1, h is 0
SIDE_BY_SIDE = 4  # values of s gone through at once
MOST_SIDE_BY_SIDE = 1024  # patches up to which they are: more would not stay in the cache
NOTHING = -36.0  # log of a term, to the largest, that no sum shows: e^-36 = 2e-16


# --- A bag at some s ------------------------------------------------------------------------------
# A bag is one array, and how many patches it has room for: mu, 1 / (sigma sqrt 2) and side of all
# patches, then z = t / sqrt 2, h and 1 - Phi of up to SIDE_BY_SIDE values of s. Numba counts who
# holds an array whenever one is handed on, five nanoseconds each time: with one array per row that
# took as long as the arithmetic of a small bag.
Z, H, UPPER = 3, 3 + SIDE_BY_SIDE, 3 + 2 * SIDE_BY_SIDE
ROWS = 3 + 3 * SIDE_BY_SIDE


@njit(**INNER)
@no_type_check
def padded(n):
    """So many patches, and some that are far below zero: loops do not end with single ones."""
    return n + -n % PADDED


@njit(forceinline=True, **INNER)
@no_type_check
def row(rows, n, k):
    """The k-th n numbers."""
    return rows[k * n : (k + 1) * n]


@njit(forceinline=True, **INNER)
@no_type_check
def five(rows, n):
    """The first five rows of n numbers; a row with a constant number would be compiled for it."""
    return rows[:n], rows[n : 2 * n], rows[2 * n : 3 * n], rows[3 * n : 4 * n], rows[4 * n : 5 * n]


@njit(**INNER)
@no_type_check
def room_for(n):
    """An array for bags of up to n patches."""
    return np.empty(ROWS * padded(n))


@njit(**INNER)
@no_type_check
def put(room, n, i, mu, sigma, side):
    """Patch i of a bag of n."""
    n = padded(n)
    room[i], room[n + i], room[2 * n + i] = mu, ROOT_HALF / sigma, side


@njit(**INNER)
@no_type_check
def filled(room, n):
    """The bag of n patches that are put there."""
    for i in range(n, padded(n)):
        put(room, n, i, NOWHERE, 1.0, 1.0)
    return room, padded(n)


@njit(**INNER)
@no_type_check
def at_once(n):
    """How many values of s are gone through side by side: as many as stay in the cache."""
    return SIDE_BY_SIDE if n <= MOST_SIDE_BY_SIDE else 1


@njit(fastmath=FUSED, **WITHIN)
@no_type_check
def tails_at(bag, first, step, count):
    """z, h and 1 - Phi of all patches at s = (first + k) step, k < count."""
    widest()
    room, n = bag
    mu, inverse, side, _, _ = five(room, n)
    # from zero on, over slices: LLVM sees that they do not overlap, and takes several at a time
    for k in range(count):
        s, z = (first + k) * step, row(room, n, Z + k)
        for i in range(n):
            z[i] = (mu[i] + side[i] * s) * inverse[i]
    z, h = room[Z * n : (Z + count) * n], room[H * n : (H + count) * n]
    upper = room[UPPER * n : (UPPER + count) * n]
    for i in range(len(z)):
        upper[i], h[i] = tail(z[i])


@njit(fastmath=ANY_ORDER, **WITHIN)
@no_type_check
def _log_product(bag, k, start, stop):
    """sum_i log(1 - Phi(t_i)) of some patches at the k-th s."""
    room, n = bag
    z, upper = row(room, n, Z + k)[start:stop], row(room, n, UPPER + k)[start:stop]
    product, squares = 1.0, 0.0
    for i in range(len(z)):
        product *= upper[i]
        squares += max(z[i], 0.0) ** 2
    return math.log(product) - squares


@njit(fastmath=ANY_ORDER, **WITHIN)
@no_type_check
def slopes(bag, k):
    """G and C at the k-th s."""
    room, n = bag
    _, inverse, side, _, _ = five(room, n)
    z, h = row(room, n, Z + k), row(room, n, H + k)
    G, C = 0.0, 0.0
    for i in range(n):
        g = h[i] * inverse[i]
        G += side[i] * g
        C += g * (h[i] - ROOT_2 * z[i]) * inverse[i]
    return ROOT_2 * G, 2 * C


@njit(**INNER)
@no_type_check
def _beyond(bag, k):
    """What log q lacks where z > LARGEST; h is set right there. And if z < LIMIT."""
    room, n = bag
    z, h = row(room, n, Z + k), row(room, n, H + k)
    log_q, within = 0.0, True
    for i in range(n):
        within = within and z[i] < LIMIT  # z.max() takes Numba a quarter of a second more
        if z[i] > LARGEST:
            t, before = ROOT_2 * z[i], h[i]
            s = 1 / (t * t)
            # h(t) - t = 1/t - 2/t^3 + 10/t^5 - ...
            h[i] = t + (1 + s * (-2 + s * (10 + s * (-74 + s * 706)))) / t
            log_q += math.log(before / h[i])
    return log_q, within


@njit(fastmath=ANY_ORDER, **WITHIN)
@no_type_check
def _log_q_near_one(bag, k):
    """log q where it is nearly 0: the sum keeps all digits of 1 - q."""
    room, n = bag
    z, total = row(room, n, Z + k), 0.0
    for i in range(n):
        u = below(z[i])
        # -log(1 - u), u < 1e-3
        total += u * (1 + u * (1 / 2 + u * (1 / 3 + u * (1 / 4 + u / 5))))
    return -total


@njit(**WITHIN)
@no_type_check
def value(bag, k, rare):
    """log z, f and 1 - q at the k-th s, and whether all is within range; `rare`: z = 1 - q."""
    log_q, n = 0.0, bag[1]
    for start in range(0, n, TOGETHER):
        log_q += _log_product(bag, k, start, min(start + TOGETHER, n))
    if not rare:
        within = True
        if not log_q > -(LARGEST**2):  # one z beyond makes it less
            missing, within = _beyond(bag, k)
            log_q += missing
        return log_q, -1.0, 1.0, within
    if log_q > DOUBTFUL:
        log_q = _log_q_near_one(bag, k)
    p = -math.expm1(log_q)
    return math.log(p), math.exp(log_q) / p, p, p > LEAST


@njit(**WITHIN)
@no_type_check
def given(bag, s, rare):
    """log z(s), f, G and d2 log z / ds2, and whether all is within range; `rare`: z = 1 - q."""
    first, one = np.int64(0), np.int64(1)  # plain numbers are types of their own
    tails_at(bag, s, 1.0, one)
    log_z, f, p, within = value(bag, first, rare)
    G, C = slopes(bag, first)
    return log_z, f, G, f * C - (f * G * G / p if rare else 0.0), within


# --- Which nodes ----------------------------------------------------------------------------------
@njit(**WITHIN)
@no_type_check
def _mode(bag, tau, rare, most):
    """The mode of the integrand, its width, and the bag there: log z, its two derivatives in s."""
    square, width, fine = tau * tau, tau, True
    sign, size, low, high = 0.0, 0.0, 0.0, 0.0
    log_z, slope, bend = 0.0, 0.0, 0.0
    for k in range(most + 1):  # from zero on, in one call: all that it calls is compiled into it
        log_z, f, G, bend, within = given(bag, sign * size, rare)
        fine = fine and within
        if k == 0:
            slope = f * G
            sign = 0.0 if slope == 0 else math.copysign(1.0, slope)
            high = square * abs(slope)
            size = high / (1 - square * bend)
            continue
        slope = max(sign * f * G, LEAST)  # beyond the mode it may have turned round
        width = 1 / math.sqrt(1 / square - bend)
        goal = square * slope
        if goal > size:
            low = size
        else:
            high = size
        ratio = abs(size * bend / slope)
        new = size * math.exp(math.log(goal / max(size, LEAST)) / (1 + ratio))
        if not (low < new < high):
            new = (low + high) / 2
        if not fine or abs(new - size) < 0.1 * width:
            break
        size = new
    return sign * size, width, log_z, slope, bend, fine


@njit(**WITHIN)
@no_type_check
def _fall(bag, mode, end, log_z, slope, bend, rare):
    """Within which distance q falls from one to zero, and whether all is within range."""
    further = slope / max(abs(bend), LEAST) * -math.log(max(-log_z, LEAST))
    _, _, G, bend, fine = given(bag, min(mode + max(further, 0.0), end), rare)
    return 0.75 * G / max(abs(bend), LEAST), fine


@njit(**WITHIN)
@no_type_check
def find_nodes(bag, sigma, tau, rule, rare):
    """first, many, step, mode, width, top, certain as slide_effect.py has them; all in range."""
    finest, levels, drop, one, smooth, search, together = rule
    mode, width, log_z, slope, bend, fine = _mode(bag, tau, rare, int(search))
    reach = math.sqrt(2 * drop)
    start, end = mode - tau * reach, mode + tau * reach
    least, sure, falls = math.inf, -math.inf, not rare  # falls: from one to zero as s grows
    room, n = bag
    for i in range(len(sigma)):
        least = min(least, sigma[i])
        sure = max(sure, room[i] - one * sigma[i])
        falls = falls and room[2 * n + i] > 0
    narrow = least / (1 + 0.43 * math.log(len(sigma)))
    sure = -sure if falls else -math.inf
    if falls:
        end = mode + width * reach
        fall, within = _fall(bag, mode, end, log_z, slope, bend, rare)
        narrow, fine = max(narrow, min(fall, least)), fine and within
    finest *= min(width, 1 / math.sqrt(tau**-2 + narrow**-2))
    step = 2 ** (np.floor(levels * math.log2(finest)) / levels)
    certain = sure > start and step < smooth * tau
    first = np.ceil((min(sure, mode) if certain else start) / step)
    many = np.ceil((np.floor(end / step) - first + 1) / together) * together
    top = log_z - (mode / tau) ** 2 / 2
    nodes = (first, many, step, mode, width, top, 1.0 if certain else 0.0)
    return nodes, fine and 0 < many < MOST


# --- Sums -----------------------------------------------------------------------------------------
@njit(fastmath=FUSED, **WITHIN)
@no_type_check
def _add_slope(bag, k, weight, pulled):
    """What one node adds to d log z / dmu, but for 1 / sigma."""
    room, n = bag
    h, pulled = row(room, n, H + k), pulled[:n]
    for i in range(n):
        pulled[i] += weight * h[i]


@njit(fastmath=FUSED, **WITHIN)
@no_type_check
def _add_all(bag, k, f, weights, rows):
    """What one node adds per patch, but for powers of sigma."""
    (room, n), (w, w0, w1) = bag, weights
    z, h = row(room, n, Z + k), row(room, n, H + k)
    pulled, curved, mean, low, bent = five(rows, n)
    for i in range(n):
        gap, pull = h[i] - ROOT_2 * z[i], f * h[i]
        pulled[i] += w * pull
        curved[i] += w * pull * gap
        mean[i] -= w * gap
        low[i] += w0 * pull
        bent[i] += w1 * pull


@njit(**INNER)
@no_type_check
def _add_to_bag(total, weight, s, slope, heavy, x):
    """What one node adds per bag, beside its weight."""
    total[1] += weight * s
    total[2] += weight * s * s
    total[3] += weight * s * slope
    total[4] += heavy
    total[5] += heavy * x
    total[6] += heavy * x * x


@njit(**WITHIN)
@no_type_check
def over_nodes(bag, tau, at, rare, full, total, rows):
    """The sums of one bag over its nodes, and how many counted; -1 if one was out of range.

    `rows` has room for one sum per patch, or for five, one behind the other, where all are asked.
    """
    first, many, step, mode, width, top, _ = at
    many, count = int(many), at_once(bag[1])
    for j in range(many):
        s, k = (first + j) * step, j % count
        if k == 0:
            tails_at(bag, first + j, step, min(count, many - j))
        log_z, f, _, within = value(bag, k, rare)
        if not within and (not rare or top < UNDERFLOW):
            return -1
        if not within:
            continue  # next to nothing beside the peak
        log_weight = log_z - (s / tau) ** 2 / 2 - top
        if not rare and s > mode and log_weight < NOTHING:
            return j  # q N is log-concave: from here on it only falls
        weight = math.exp(log_weight)
        total[0] += weight
        if full:
            G, x = slopes(bag, k)[0], (s - mode) / width
            _add_to_bag(total, weight, s, f * G, weight * abs(f) * G * G, x)
            _add_all(bag, k, f, (weight, weight * G, weight * G * x), rows)
        else:
            _add_slope(bag, k, weight * f, rows)
    return many


@njit(**INNER)
@no_type_check
def _keep(sigma, full, rows, start, by_row):
    """Sums per patch with their powers of sigma."""
    n = padded(len(sigma))
    for i in range(len(sigma)):
        by_row[0, start + i] = rows[i] / sigma[i]
        if full:
            by_row[1, start + i] = rows[n + i] / sigma[i] ** 2
            by_row[2, start + i] = sigma[i] * rows[2 * n + i]
            by_row[3, start + i] = rows[3 * n + i] / sigma[i]
            by_row[4, start + i] = rows[4 * n + i] / sigma[i]


@njit(**DOOR)
@no_type_check
def sums(mu, sigma, offsets, tau, rule, rare, full):
    """Nodes, sums per bag and per patch, and which bags are served.

    `rule` is what the nodes follow; `rare`: of 1 - q instead of q; not `full`: only what the
    gradient needs. E[m] is summed as for m < 0. Bags that are not served have a sum of one and
    nothing else.
    """
    bags, longest = len(offsets) - 1, np.int64(0)
    for b in range(bags):
        longest = max(longest, offsets[b + 1] - offsets[b])
    room, rows = room_for(longest), np.zeros((5 if full else 1) * padded(longest))
    nodes, by_bag = np.ones((7, bags)), np.zeros((7, bags))
    by_row, served = np.zeros((5 if full else 1, len(mu))), np.zeros(bags, np.bool_)
    for b in range(bags):
        start, stop = offsets[b], offsets[b + 1]
        n, own, total = stop - start, sigma[start:stop], np.zeros(7)
        for i in range(n):
            put(room, n, i, mu[start + i], own[i], 1.0)
        bag = filled(room, n)
        rows[:] = 0
        at, fine = find_nodes(bag, own, tau, rule, rare)
        counted = over_nodes(bag, tau, at, rare, full, total, rows) if fine else -1
        served[b] = counted >= 0
        if served[b]:
            for k in range(7):
                nodes[k, b], by_bag[k, b] = at[k], total[k]
            nodes[1, b] = counted
            _keep(own, full, rows, start, by_row)
        else:
            by_bag[0, b] = 1
    return nodes, by_bag, by_row, served
