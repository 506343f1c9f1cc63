"""Adjoints of mu, sigma and tau from those of the sums of effect.py: its derivatives, backwards.

One node adds to the sums, with w its weight, f, h, G and x = (s - mode) / width as in effect.py,
v = h (h - t) = dh/dt, and P a polynomial in x,

    S = w (b0 + b1 s + b2 s^2 + sum_i r2 (h - t))
        + w f (b3 s G + sum_i h r0 + v r1 + G h (r3 + x r4)) + w |f| G^2 P
      = S0 + Sf,

where b and r are the adjoints of the sums per bag and per patch. Nodes stay where they are. By
log q the weight w has the derivative -f w, and w f is proportional to q for both kinds of bags:

    dS / d log q = Sf - f S0,   d log q / dt = -h,   dh / dt = v,   dv / dt = v (h - t) + h (v - 1)
"""

from typing import no_type_check

import numpy as np
from numba import njit

from gpmil.fast.effect import (
    ROOT_2,
    H,
    Z,
    at_once,
    filled,
    five,
    padded,
    put,
    room_for,
    row,
    slopes,
    tails_at,
    value,
)
from gpmil.fast.tails import ANY_ORDER, DOOR, FUSED, WITHIN, widest

SERIES = 20.0  # t above which d2 h / dt2 cancels and its series in 1/t takes over


@njit(fastmath=ANY_ORDER, **WITHIN)
@no_type_check
def _products(bag, k, bars):
    """sum_i h r0 + v r1, and of r2 (h - t), h r3 and h r4, at the k-th s."""
    room, n = bag
    z, h = row(room, n, Z + k), row(room, n, H + k)
    r0, r1, r2, r3, r4 = five(bars, n)
    pulled, mean, low, bent = 0.0, 0.0, 0.0, 0.0
    for i in range(n):
        gap = h[i] - ROOT_2 * z[i]
        pulled += h[i] * (r0[i] + r1[i] * gap)
        mean += r2[i] * gap
        low += h[i] * r3[i]
        bent += h[i] * r4[i]
    return pulled, mean, low, bent


@njit(fastmath=FUSED, **WITHIN)
@no_type_check
def _hand_back(bag, k, bars, weights, out):
    """What one node adds to the adjoints of t, and to those of sigma but for -1 / sigma."""
    widest()
    room, n = bag
    _, inverse, _, _, _ = five(room, n)
    z, h = row(room, n, Z + k), row(room, n, H + k)
    r0, r1, r2, r3, r4 = five(bars, n)
    w, wf, wfG, wfGx, by_G, by_log_q = weights
    of_t, of_sigma = out[:n], out[n : 2 * n]
    for i in range(n):
        t = ROOT_2 * z[i]
        gap = h[i] - t
        v = h[i] * gap
        far = 1 / max(t, SERIES)
        s = far * far
        # d2 h / dt2 = 2/t^3 - 24/t^5 + 300/t^7 - 4144/t^9 + 63540/t^11 - ...
        series = far * s * (2 + s * (-24 + s * (300 + s * (-4144 + s * 63540))))
        third = series if t > SERIES else v * gap + h[i] * (v - 1)
        by_h = ROOT_2 * inverse[i] * by_G + wf * r0[i] + wfG * r3[i] + wfGx * r4[i]
        by_v, by_gap = wf * r1[i], w * r2[i]
        by_t = by_h * v + by_v * third + by_gap * (v - 1) - by_log_q * h[i]
        of_t[i] += by_t
        # h / sigma, v / sigma^2 and sigma (h - t) depend on sigma beside t
        of_sigma[i] += by_t * t + by_h * h[i] + 2 * by_v * v - by_gap * gap


@njit(**WITHIN)
@no_type_check
def _over_nodes(bag, tau, at, rare, b, bars, out):
    """The adjoints of one bag, and that of log tau."""
    first, many, step, mode, width, top, _ = at
    many, count, by_log_tau = int(many), at_once(bag[1]), 0.0
    for j in range(many):
        s, k = (first + j) * step, j % count
        if k == 0:
            tails_at(bag, first + j, step, min(count, many - j))
        log_z, f, _, within = value(bag, k, rare)
        if not within:
            continue  # as in the sums
        G = slopes(bag, k)[0]
        w, x = np.exp(log_z - (s / tau) ** 2 / 2 - top), (s - mode) / width
        pulled, mean, low, bent = _products(bag, k, bars)
        crossed, wf = low + x * bent, w * f
        P = abs(wf) * (b[4] + x * (b[5] + x * b[6]))
        S0 = w * (b[0] + s * (b[1] + s * b[2]) + mean)
        Sf = wf * (b[3] * s * G + pulled + G * crossed) + G * G * P
        by_G = wf * (b[3] * s + crossed) + 2 * G * P
        weights = (w, wf, wf * G, wf * G * x, by_G, Sf - f * S0)
        _hand_back(bag, k, bars, weights, out)
        # w has exp(-s^2 / (2 tau^2))
        by_log_tau += (S0 + Sf) * (s / tau) ** 2
    return by_log_tau


@njit(**DOOR)
@no_type_check
def adjoints(mu, sigma, offsets, tau, nodes, served, rare, by_bag, by_row):
    """Adjoints of mu, sigma and tau from those of the sums of the bags that are served."""
    longest = np.int64(0)
    for b in range(len(served)):
        longest = max(longest, offsets[b + 1] - offsets[b])
    room, p = room_for(longest), padded(longest)
    bars, out = np.empty(5 * p), np.empty(2 * p)
    of_mu, of_sigma, of_tau = np.zeros(len(mu)), np.zeros(len(mu)), 0.0
    for b in range(len(served)):
        if not served[b]:
            continue
        start, stop = offsets[b], offsets[b + 1]
        n, own = stop - start, sigma[start:stop]
        p = padded(n)
        bars[:], out[:] = 0, 0  # of the patches that fill up as well
        for i in range(n):
            put(room, n, i, mu[start + i], own[i], 1.0)
            bars[i] = by_row[0, start + i] / own[i]
            bars[p + i] = by_row[1, start + i] / own[i] ** 2
            # E[m] of one patch = -sigma (h - t) for m < 0; the others' is not summed
            bars[2 * p + i] = 0.0 if rare else -by_row[2, start + i] * own[i]
            bars[3 * p + i] = by_row[3, start + i] / own[i]
            bars[4 * p + i] = by_row[4, start + i] / own[i]
        bag = filled(room, n)
        of_tau += _over_nodes(bag, tau, nodes[:, b], rare, by_bag[:, b], bars, out) / tau
        for i in range(n):
            of_mu[start + i] = out[i] / own[i]
            of_sigma[start + i] = -out[p + i] / own[i]
    return of_mu, of_sigma, of_tau
