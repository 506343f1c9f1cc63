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
from gpmil.fast.tails import ANY_ORDER, DOOR, FUSED, INNER, LARGEST, ROOT_HALF, below, tail

TOGETHER = 128  # numbers multiplied before a logarithm is taken of them: .0078^128 = 1e-270
ROOT_2 = 1 / ROOT_HALF
LEAST = 1e-300  # what is divided by
UNDERFLOW = -600.0  # log of the integrand's peak from which on what underflows beside it counts
LIMIT = 700.0  # z = t / sqrt 2 from which h - t loses more than half of its digits
MOST = 1e6  # nodes
NOTHING = -36.0  # log of a term, to the largest, that no sum shows: e^-36 = 2e-16


# --- A bag at one s -------------------------------------------------------------------------------
@njit(fastmath=ANY_ORDER, **INNER)
@no_type_check
def _some(bag, s, start, stop):
    """z = t / sqrt 2 and h of some patches; what they add to log q, G and C."""
    mu, inverse, z, h, side = bag  # inverse: 1 / (sigma sqrt 2)
    # from zero on, over slices: LLVM sees that they do not overlap, and takes several at a time
    mu, inverse, side = mu[start:stop], inverse[start:stop], side[start:stop]
    z, h = z[start:stop], h[start:stop]
    product, squares, G, C = 1.0, 0.0, 0.0, 0.0
    for i in range(len(mu)):
        x = (mu[i] + side[i] * s) * inverse[i]
        upper, hazard = tail(x)
        z[i], h[i] = x, hazard
        product *= upper
        squares += max(x, 0.0) ** 2
        g = hazard * inverse[i]
        G += side[i] * g
        C += g * (hazard - ROOT_2 * x) * inverse[i]
    return math.log(product) - squares, ROOT_2 * G, 2 * C


@njit(**INNER)
@no_type_check
def _beyond(bag):
    """What log q, G and C lack where z > LARGEST; h is set right there. And if z < LIMIT."""
    _, inverse, z, h, side = bag
    log_q, G, C, within = 0.0, 0.0, 0.0, True
    for i in range(len(z)):
        within = within and z[i] < LIMIT  # z.max() takes Numba a quarter of a second more
        if z[i] > LARGEST:
            t, before = ROOT_2 * z[i], h[i]
            s = 1 / (t * t)
            # h(t) - t = 1/t - 2/t^3 + 10/t^5 - ...
            h[i] = t + (1 + s * (-2 + s * (10 + s * (-74 + s * 706)))) / t
            log_q += math.log(before / h[i])
            G += side[i] * (h[i] - before) * inverse[i]
            C += (h[i] * (h[i] - t) - before * (before - t)) * inverse[i] ** 2
    return log_q, ROOT_2 * G, 2 * C, within


@njit(fastmath=ANY_ORDER, **INNER)
@no_type_check
def _log_q_near_one(z):
    """log q where it is nearly 0: the sum keeps all digits of 1 - q."""
    total = 0.0
    for i in range(len(z)):
        u = below(z[i])
        # -log(1 - u), u < 1e-3
        total += u * (1 + u * (1 / 2 + u * (1 / 3 + u * (1 / 4 + u / 5))))
    return -total


@njit(**INNER)
@no_type_check
def given(bag, s, rare):
    """log z(s), f, G and d2 log z / ds2, and whether all is within range; `rare`: z = 1 - q."""
    log_q, G, C = 0.0, 0.0, 0.0
    n = len(bag[0])
    for start in range(0, n, TOGETHER):
        more = _some(bag, s, start, min(start + TOGETHER, n))
        log_q += more[0]
        G += more[1]
        C += more[2]
    if not rare:
        within = True
        if not log_q > -(LARGEST**2):  # one z beyond makes it less
            missing, more_G, more_C, within = _beyond(bag)
            log_q, G, C = log_q + missing, G + more_G, C + more_C
        return log_q, -1.0, G, -C, within
    if log_q > DOUBTFUL:
        log_q = _log_q_near_one(bag[2])
    p = -math.expm1(log_q)
    r = math.exp(log_q) / p
    return math.log(p), r, G, r * C - r * G * G / p, p > LEAST


# --- Which nodes ----------------------------------------------------------------------------------
@njit(**INNER)
@no_type_check
def _mode(bag, tau, rare, most):
    """The mode of the integrand, its width, and the bag there: log z, its two derivatives in s."""
    square = tau * tau
    log_z, f, G, bend, fine = given(bag, 0.0, rare)
    slope, width = f * G, tau
    sign = 0.0 if slope == 0 else math.copysign(1.0, slope)
    low, high = 0.0, square * abs(slope)
    size = high / (1 - square * bend)
    for _ in range(most):
        log_z, f, G, bend, within = given(bag, sign * size, rare)
        fine = fine and within
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


@njit(**INNER)
@no_type_check
def _fall(bag, mode, end, log_z, slope, bend, rare):
    """Within which distance q falls from one to zero, and whether all is within range."""
    further = slope / max(abs(bend), LEAST) * -math.log(max(-log_z, LEAST))
    _, _, G, bend, fine = given(bag, min(mode + max(further, 0.0), end), rare)
    return 0.75 * G / max(abs(bend), LEAST), fine


@njit(**INNER)
@no_type_check
def find_nodes(bag, sigma, tau, rule, rare):
    """first, many, step, mode, width, top, certain as slide_effect.py has them; all in range."""
    finest, levels, drop, one, smooth, search, together = rule
    mode, width, log_z, slope, bend, fine = _mode(bag, tau, rare, int(search))
    reach = math.sqrt(2 * drop)
    start, end = mode - tau * reach, mode + tau * reach
    least, sure, falls = math.inf, -math.inf, not rare  # falls: from one to zero as s grows
    for i in range(len(sigma)):
        least = min(least, sigma[i])
        sure = max(sure, bag[0][i] - one * sigma[i])
        falls = falls and bag[4][i] > 0
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
@njit(fastmath=FUSED, **INNER)
@no_type_check
def _add_slope(h, weight, pulled):
    """What one node adds to d log z / dmu, but for 1 / sigma."""
    for i in range(len(h)):
        pulled[i] += weight * h[i]


@njit(fastmath=FUSED, **INNER)
@no_type_check
def _add_all(z, h, f, weights, rows):
    """What one node adds per patch, but for powers of sigma."""
    pulled, curved, mean, low, bent = rows
    w, w0, w1 = weights
    for i in range(len(h)):
        gap, pull = h[i] - ROOT_2 * z[i], f * h[i]
        pulled[i] += w * pull
        curved[i] += w * pull * gap
        mean[i] -= w * gap
        low[i] += w0 * pull
        bent[i] += w1 * pull


@njit(**INNER)
@no_type_check
def over_nodes(bag, tau, at, rare, full, total, rows):
    """The sums of one bag over its nodes, and how many counted; -1 if one was out of range."""
    first, many, step, mode, width, top, _ = at
    for j in range(int(many)):
        s = (first + j) * step
        log_z, f, G, _, within = given(bag, s, rare)
        if not within and (not rare or top < UNDERFLOW):
            return -1
        if not within:
            continue  # next to nothing beside the peak
        log_weight = log_z - (s / tau) ** 2 / 2 - top
        if not rare and s > mode and log_weight < NOTHING:
            return j  # q N is log-concave: from here on it only falls
        weight = math.exp(log_weight)
        total[0] += weight
        if not full:
            _add_slope(bag[3], weight * f, rows[0])
            continue
        x, heavy = (s - mode) / width, weight * abs(f) * G * G
        total[1] += weight * s
        total[2] += weight * s * s
        total[3] += weight * s * f * G
        total[4] += heavy
        total[5] += heavy * x
        total[6] += heavy * x * x
        _add_all(bag[2], bag[3], f, (weight, weight * G, weight * G * x), rows)
    return int(many)


@njit(**INNER)
@no_type_check
def _keep(sigma, full, rows, start, by_row):
    """Sums per patch with their powers of sigma."""
    pulled, curved, mean, low, bent = rows
    for i in range(len(sigma)):
        by_row[0, start + i] = pulled[i] / sigma[i]
        if full:
            by_row[1, start + i] = curved[i] / sigma[i] ** 2
            by_row[2, start + i] = sigma[i] * mean[i]
            by_row[3, start + i] = low[i] / sigma[i]
            by_row[4, start + i] = bent[i] / sigma[i]


@njit(**DOOR)
@no_type_check
def sums(mu, sigma, offsets, tau, rule, rare, full):
    """Nodes, sums per bag and per patch, and which bags are served.

    `rule` is what the nodes follow; `rare`: of 1 - q instead of q; not `full`: only what the
    gradient needs. E[m] is summed as for m < 0. Bags that are not served have a sum of one and
    nothing else.
    """
    bags, longest = len(offsets) - 1, 0
    for b in range(bags):
        longest = max(longest, offsets[b + 1] - offsets[b])
    # one block: how a loop is run may depend on where its arrays lie, and sums then on the day
    block = np.ones((10, longest))
    own_mu, inverse, z, h, side = block[0], block[1], block[2], block[3], block[4]
    r0, r1, r2, r3, r4 = block[5], block[6], block[7], block[8], block[9]
    nodes, by_bag = np.ones((7, bags)), np.zeros((7, bags))
    by_row, served = np.zeros((5 if full else 1, len(mu))), np.zeros(bags, np.bool_)
    for b in range(bags):
        start, stop = offsets[b], offsets[b + 1]
        n, own, total = stop - start, sigma[start:stop], np.zeros(7)
        for i in range(n):
            own_mu[i], inverse[i] = mu[start + i], ROOT_HALF / own[i]
        bag = (own_mu[:n], inverse[:n], z[:n], h[:n], side[:n])
        rows = (r0[:n], r1[:n], r2[:n], r3[:n], r4[:n])
        for row in rows:
            row[:] = 0
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
