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

from gpmil.fast.effect import UNDERFLOW, find_nodes, over_nodes
from gpmil.fast.passes import against, times
from gpmil.fast.tails import DOOR, INNER, ROOT_HALF

ROOT_2PI = math.sqrt(2 * math.pi)


# --- Averages over the effect ---------------------------------------------------------------------
@njit(**INNER)
@no_type_check
def _before(tau, at):
    """The sum over the lattice before the first node, where q = 1: slide_effect.sum_before."""
    first, _, step, _, _, top, _ = at
    d = step / tau
    a = (first - 0.5) * d
    whole = 0.5 * math.erfc(-a * ROOT_HALF) * ROOT_2PI
    more = d**2 / 24 * a + 7 * d**4 / 5760 * (3 * a - a**3)
    return (whole + math.exp(-a * a / 2) * more) * math.exp(-top) / d


@njit(**INNER)
@no_type_check
def _average(bag, sigma, tau, rule, rare, pulled):
    """log of int N(s) z(s) ds, and whether it is in range; `pulled` becomes its gradient in mu."""
    total = np.zeros(7)
    pulled[:] = 0
    at, fine = find_nodes(bag, sigma, tau, rule, rare)
    fine = fine and at[5] > UNDERFLOW
    if fine:
        rows = (pulled, pulled, pulled, pulled, pulled)
        fine = over_nodes(bag, tau, at, rare, tau < 0, total, rows) >= 0
    if not fine:
        return 0.0, False
    step, top, whole = at[2], at[5], total[0]
    if at[6] > 0:
        whole += _before(tau, at)
    for i in range(len(sigma)):
        pulled[i] *= bag[4][i] / (whole * sigma[i])
    density = 1 + 2 * math.exp(-2 * (math.pi * tau / step) ** 2)
    return min(top + math.log(step * whole / (tau * ROOT_2PI * density)), 0.0), True


@njit(**INNER)
@no_type_check
def _gather(mu, sigma, bag, own):
    """All patches as if they were negative, as effect.py takes them."""
    for i in range(len(mu)):
        bag[0][i], bag[4][i], own[i] = mu[i], 1.0, sigma[i]
        bag[1][i] = ROOT_HALF / sigma[i]


@njit(**INNER)
@no_type_check
def _gather_known(mu, sigma, known, bag, own):
    """The same of known patches, each on its side; how many."""
    k = 0
    for i in range(len(mu)):
        if known[i] >= 0:
            side = -1.0 if known[i] == 1 else 1.0
            bag[0][k], bag[4][k], own[k] = side * mu[i], side, sigma[i]
            bag[1][k] = ROOT_HALF / sigma[i]
            k += 1
    return k


@njit(**INNER)
@no_type_check
def _first(bag, k):
    """The first k patches."""
    return bag[0][:k], bag[1][:k], bag[2][:k], bag[3][:k], bag[4][:k]


# --- A bag ----------------------------------------------------------------------------------------
@njit(**INNER)
@no_type_check
def _told(mu, sigma, known, tau, rule, room, pulled, gamma):
    """log Q_L with its gradient as `gamma`, whether it is in range, whether one is positive."""
    bag, own = room
    positive, no = False, tau < 0
    k = _gather_known(mu, sigma, known, bag, own)
    log_q, fine = _average(_first(bag, k), own[:k], tau, rule, no, pulled[:k])
    k = 0
    for i in range(len(mu)):
        if known[i] >= 0:
            gamma[i], positive, k = pulled[k], positive or known[i] == 1, k + 1
    return log_q, fine, positive


@njit(**INNER)
@no_type_check
def _positive(mu, sigma, known, tau, rule, room, pulled, gamma, near_one):
    """log Z of a positive bag with its gradient as `gamma`, and whether it is in range."""
    (bag, own), yes, no = room, tau >= 0, tau < 0
    n, told, any_known = len(mu), 0.0, False
    gamma[:] = 0
    if known is not None:
        for i in range(n):
            any_known = any_known or known[i] >= 0
        if any_known:
            told, fine, explained = _told(mu, sigma, known, tau, rule, room, pulled, gamma)
            if explained or not fine:
                return told, fine
    _gather(mu, sigma, bag, own)
    log_q, fine = _average(_first(bag, n), own[:n], tau, rule, no, pulled)
    if fine and not any_known and log_q > near_one:
        return _average(_first(bag, n), own[:n], tau, rule, yes, gamma)
    if not fine or log_q - told > near_one:
        return 0.0, False
    log_z = told + math.log(-math.expm1(log_q - told))
    # d log Z = (1 + r) d log Q_L - r d log Q,  r = Q / Z
    more, less = math.exp(told - log_z), math.exp(log_q - log_z)
    for i in range(n):
        gamma[i] = more * gamma[i] - less * pulled[i]
    return log_z, True


# --- All bags -------------------------------------------------------------------------------------
@njit(**DOOR)
@no_type_check
def rise(H, sigma, offsets, positive, known, w, c, tau, rule, near_one):
    """sum_b log Z_b, its gradient in w, mu, and which bags are in both.

    `known` may be None: Numba then compiles nothing of what known patches need.
    """
    bags, longest = len(positive), 0
    for b in range(bags):
        longest = max(longest, offsets[b + 1] - offsets[b])
    block, total = np.empty((8, longest)), 0.0
    room = ((block[0], block[1], block[2], block[3], block[4]), block[5])
    mu, served, out, some = np.empty(len(sigma)), np.zeros(bags, np.bool_), np.zeros(len(w)), w * 0
    for b in range(bags):
        start, stop = offsets[b], offsets[b + 1]
        n, m, own = stop - start, mu[start:stop], sigma[start:stop]
        pulled, gamma = block[6][:n], block[7][:n]
        times(H, start, stop, w, c, m)
        if positive[b]:
            told = None if known is None else known[start:stop]
            log_z, fine = _positive(m, own, told, tau, rule, room, pulled, gamma, near_one)
        else:
            _gather(m, own, *room)
            log_z, fine = _average(_first(room[0], n), own, tau, rule, tau < 0, gamma)
        served[b] = fine
        if fine:
            total += log_z
            against(H, start, stop, gamma, some, out)
    return total, out, mu, served
