"""One pass over bags with a slide effect, known patches among them: log Z and its gradient in w.

The twin of slide_effect.gradient and of taught.py between mu = c + H w and H'gamma, bag by bag, so
that the rows of H are still in the cache when they are needed again. With Q the chance that all
patches of a bag lie below zero and Q_L that known patches lie on their sides,

    negative bag   Z = Q        a known positive patch   Z = Q_L        else   Z = Q_L - Q, Q_L = 1
                                                                               if nothing is known

Bags in which this loses digits, or beyond the range of effect.py, are left to the caller.
"""

import math
from typing import no_type_check

import numpy as np
from numba import njit

from gpmil.fast.effect import UNDERFLOW, filled, find_nodes, over_nodes, padded, put, room_for
from gpmil.fast.passes import against, times
from gpmil.fast.tails import DOOR, INNER, ROOT_HALF, WITHIN

ROOT_2PI = math.sqrt(2 * math.pi)


# --- Averages over the effect ---------------------------------------------------------------------
@njit(**INNER)
@no_type_check
def _before(tau, at):
    """The sum over the lattice before the first node, where q = 1: slide_effect.weight_before."""
    first, _, step, _, _, top, _ = at
    d = step / tau
    a = (first - 0.5) * d
    whole = 0.5 * math.erfc(-a * ROOT_HALF) * ROOT_2PI
    more = d**2 / 24 * a + 7 * d**4 / 5760 * (3 * a - a**3)
    return (whole + math.exp(-a * a / 2) * more) * math.exp(-top) / d


@njit(**WITHIN)
@no_type_check
def _average(bag, sigma, tau, rule, rare, pulled):
    """log of int N(s) z(s) ds, and whether it is in range; `pulled` becomes its gradient in mu."""
    total = np.zeros(7)
    pulled[:] = 0
    at, fine = find_nodes(bag, sigma, tau, rule, rare)
    fine = fine and at[5] > UNDERFLOW
    if fine:
        fine = over_nodes(bag, tau, at, rare, tau < 0, total, pulled) >= 0
    if not fine:
        return 0.0, False
    step, top, whole = at[2], at[5], total[0]
    if at[6] > 0:
        whole += _before(tau, at)
    room, n = bag
    for i in range(len(sigma)):
        pulled[i] *= room[2 * n + i] / (whole * sigma[i])
    density = 1 + 2 * math.exp(-2 * (math.pi * tau / step) ** 2)
    return min(top + math.log(step * whole / (tau * ROOT_2PI * density)), 0.0), True


@njit(**INNER)
@no_type_check
def _all_of(mu, sigma, room):
    """All patches as if they were negative, as effect.py takes them."""
    for i in range(len(mu)):
        put(room, len(mu), i, mu[i], sigma[i], 1.0)
    return filled(room, len(mu))


@njit(**INNER)
@no_type_check
def _known_of(mu, sigma, known, room):
    """The same of known patches, each on its side; and their sigma."""
    own, count, k = np.empty(len(mu)), 0, 0
    for i in range(len(mu)):
        count += known[i] >= 0
    for i in range(len(mu)):
        if known[i] >= 0:
            side = -1.0 if known[i] == 1 else 1.0
            put(room, count, k, side * mu[i], sigma[i], side)
            own[k] = sigma[i]
            k += 1
    return filled(room, count), own[:count]


# --- A bag ----------------------------------------------------------------------------------------
@njit(**WITHIN)
@no_type_check
def _of_bag(mu, sigma, known, positive, tau, rule, room, pulled, gamma, near_one):
    """log Z of a bag with its gradient as `gamma`, and whether it is in range.

    Q_L, then Q, then 1 - Q where that is small: averages of one call, because all that it calls is
    compiled into it.
    """
    n, told, log_q, fine, own = len(mu), 0.0, 0.0, True, sigma
    any_known, explained = _knows(known, positive)
    gamma[:] = 0
    rare = tau < 0  # no constants: see tails.py
    bag = _all_of(mu, sigma, room)
    for step in range(3):
        if step == 0:
            if not any_known:
                continue
            bag, own = _known_of(mu, sigma, known, room)
        elif step == 1 and any_known:
            bag, own = _all_of(mu, sigma, room), sigma
        elif step == 2:
            rare = tau >= 0
        log_q, fine = _average(bag, own, tau, rule, rare, pulled)
        if step == 0:
            told = log_q
            _spread(pulled, known, gamma)
            if explained or not fine:
                return told, fine
        elif step == 1 and (any_known or not (positive and fine and log_q > near_one)):
            break
    if rare or not positive:
        for i in range(n):
            gamma[i] = pulled[i]
        return log_q, fine
    if not fine or log_q - told > near_one:
        return 0.0, False
    log_z = told + math.log(-math.expm1(log_q - told))
    # d log Z = (1 + r) d log Q_L - r d log Q,  r = Q / Z
    more, less = math.exp(told - log_z), math.exp(log_q - log_z)
    for i in range(n):
        gamma[i] = more * gamma[i] - less * pulled[i]
    return log_z, True


@njit(**INNER)
@no_type_check
def _knows(known, positive):
    """Whether labels of patches count, which they do in positive bags; whether one is positive."""
    some, above = False, False
    if positive:
        for i in range(len(known)):
            some, above = some or known[i] >= 0, above or known[i] == 1
    return some, above


@njit(**INNER)
@no_type_check
def _spread(pulled, known, gamma):
    """What known patches, one behind the other, are pulled: each in its place."""
    k = 0
    for i in range(len(known)):
        if known[i] >= 0:
            gamma[i] = pulled[k]
            k += 1


# --- All bags -------------------------------------------------------------------------------------
@njit(**DOOR)
@no_type_check
def rise(H, sigma, offsets, positive, known, w, c, tau, rule, near_one):
    """sum_b log Z_b, its gradient in w, mu, and which bags are in both.

    `known` is empty where nothing is known of patches.
    """
    bags, longest = len(positive), np.int64(0)
    for b in range(bags):
        longest = max(longest, offsets[b + 1] - offsets[b])
    room, pulled, gamma = room_for(longest), np.empty(padded(longest)), np.empty(padded(longest))
    total = 0.0
    mu, served, out, some = np.empty(len(sigma)), np.zeros(bags, np.bool_), np.zeros(len(w)), w * 0
    for b in range(bags):
        start, stop = offsets[b], offsets[b + 1]
        m, own = mu[start:stop], sigma[start:stop]
        times(H, start, stop, w, c, m)
        told = known[start:stop] if len(known) else known
        log_z, fine = _of_bag(m, own, told, positive[b], tau, rule, room, pulled, gamma, near_one)
        served[b] = fine
        if fine:
            total += log_z
            against(H, start, stop, gamma, some, out)
    return total, out, mu, served
