"""Sums over the values of a slide effect as a Triton kernel: the twin of effect.py's, for GPUs.

One program per bag, which finds the bag's nodes and goes through them. Formulas and names are those
of effect.py. Imported only where Triton is installed.

`no_type_check`: Triton compiles the source of a function, and must find the function itself, not a
wrapper that checks types.
"""

from typing import no_type_check

import triton
import triton.language as tl

from gpmil.fast.fused_kernel import minus_expm1, tails

LEAST = tl.constexpr(1e-300)  # what is divided by
UNDERFLOW = tl.constexpr(-600.0)  # log of the peak from which on what underflows beside it counts
NOTHING = tl.constexpr(-36.0)  # log of a term, to the largest, that no sum shows
MOST = tl.constexpr(1e5)  # nodes


@triton.jit
@no_type_check
def given(mu, sigma, hazard, gaps, start, stop, s, RARE: tl.constexpr, THREADS: tl.constexpr):
    """log z(s), f, G and d2 log z / ds2, and whether all is within range; h / sigma and h - t."""
    log_q = tl.zeros((THREADS,), dtype=tl.float64)
    G = tl.zeros((THREADS,), dtype=tl.float64)
    C = tl.zeros((THREADS,), dtype=tl.float64)
    for first in range(start, stop, THREADS):
        rows = first + tl.arange(0, THREADS)
        here = rows < stop
        inverse = 1 / tl.load(sigma + rows, mask=here, other=1.0)
        log_upper, h, gap = tails((tl.load(mu + rows, mask=here, other=0.0) + s) * inverse)
        h = tl.where(here, h * inverse, 0.0)
        log_q += tl.where(here, log_upper, 0.0)
        G += h
        C += h * gap * inverse
        tl.store(hazard + rows, h, mask=here)
        tl.store(gaps + rows, gap, mask=here)
    log_q = tl.sum(log_q, axis=0)
    G = tl.sum(G, axis=0)
    C = tl.sum(C, axis=0)
    if RARE:
        p = minus_expm1(log_q)
        r = tl.exp(log_q) / p
        return tl.log(p), r, G, r * C - r * G * G / p, p > LEAST
    return log_q, tl.full([], -1.0, tl.float64), G, -C, C == C


@triton.jit
@no_type_check
def _nearest(mu, sigma, start, stop, THREADS: tl.constexpr):
    """The least sigma and the largest t of a bag, at s = 0."""
    least = tl.full((THREADS,), float("inf"), dtype=tl.float64)
    t = tl.full((THREADS,), -float("inf"), dtype=tl.float64)
    for first in range(start, stop, THREADS):
        rows = first + tl.arange(0, THREADS)
        here = rows < stop
        s = tl.load(sigma + rows, mask=here, other=1.0)
        least = tl.minimum(least, tl.where(here, s, float("inf")))
        own = tl.load(mu + rows, mask=here, other=0.0) / s
        t = tl.maximum(t, tl.where(here, own, -float("inf")))
    return tl.min(least, axis=0), tl.max(t, axis=0)


@triton.jit
@no_type_check
def _mode(
    mu, sigma, hazard, gaps, start, stop, tau, RARE: tl.constexpr, SEARCH: tl.constexpr,
    THREADS: tl.constexpr,
):  # fmt: skip
    """The mode of the integrand, its width, and the bag there: log z, its two derivatives in s."""
    square = tau * tau
    log_z, f, G, bend, fine = given(mu, sigma, hazard, gaps, start, stop, 0.0, RARE, THREADS)
    slope = f * G
    if RARE:
        # all so far below zero that 1 - q is nothing: log(1 - q) ~ -t^2 / 2 of the nearest
        least, t = _nearest(mu, sigma, start, stop, THREADS)
        slope = tl.where(fine, slope, -t / least)
        bend = tl.where(fine, bend, -1 / (least * least))
        fine = t == t
    sign = tl.where(slope > 0, 1.0, tl.where(slope < 0, -1.0, 0.0)).to(tl.float64)
    low = tl.zeros([], dtype=tl.float64)
    high = square * tl.abs(slope)
    size = high / (1 - square * tl.minimum(bend, 0.0))
    width = tau
    step = 0
    while step < SEARCH:
        log_z, f, G, bend, within = given(
            mu, sigma, hazard, gaps, start, stop, sign * size, RARE, THREADS
        )
        fine = fine & within
        slope = tl.maximum(sign * f * G, LEAST)  # beyond the mode it may have turned round
        width = 1 / tl.sqrt(1 / square - tl.minimum(bend, 0.0))
        goal = square * slope
        low = tl.where(goal > size, size, low)
        high = tl.where(goal > size, high, size)
        ratio = tl.abs(size * bend / slope)
        new = size * tl.exp(tl.log(goal / tl.maximum(size, LEAST)) / (1 + ratio))
        new = tl.where((new > low) & (new < high), new, (low + high) / 2)
        done = (tl.abs(new - size) < 0.1 * width) | (new != new)
        size = tl.where(done, size, new)
        step = tl.where(done, SEARCH, step + 1)
    return sign * size, width, log_z, slope, bend, fine


@triton.jit
@no_type_check
def _edges(mu, sigma, start, stop, ONE: tl.constexpr, THREADS: tl.constexpr):
    """The least sigma, and s up to which every t < ONE."""
    least = tl.full((THREADS,), float("inf"), dtype=tl.float64)
    most = tl.full((THREADS,), -float("inf"), dtype=tl.float64)
    for first in range(start, stop, THREADS):
        rows = first + tl.arange(0, THREADS)
        here = rows < stop
        s = tl.load(sigma + rows, mask=here, other=float("inf"))
        least = tl.minimum(least, s)
        end = tl.load(mu + rows, mask=here, other=0.0) - ONE * s
        most = tl.maximum(most, tl.where(here, end, -float("inf")))
    return tl.min(least, axis=0), -tl.max(most, axis=0)


@triton.jit
@no_type_check
def find_nodes(
    mu, sigma, hazard, gaps, start, stop, tau, RARE: tl.constexpr, RULE: tl.constexpr,
    THREADS: tl.constexpr,
):  # fmt: skip
    """first, many, step, mode, width, top, certain; and whether all is in range."""
    STEP: tl.constexpr = RULE[0]
    LEVELS: tl.constexpr = RULE[1]
    DROP: tl.constexpr = RULE[2]
    SEARCH: tl.constexpr = RULE[5]
    TOGETHER: tl.constexpr = RULE[6]
    mode, width, log_z, slope, bend, fine = _mode(
        mu, sigma, hazard, gaps, start, stop, tau, RARE, SEARCH, THREADS
    )
    reach = tl.sqrt(tl.full([], 2 * DROP, tl.float64))
    begin = mode - tau * reach
    end = mode + tau * reach
    least, sure = _edges(mu, sigma, start, stop, RULE[3], THREADS)
    narrow = least / (1 + 0.43 * tl.log((stop - start).to(tl.float64)))
    if RARE:
        sure = -float("inf") + 0 * sure
    else:
        end = mode + width * reach
        # within which distance q falls from one to zero
        further = slope / tl.maximum(tl.abs(bend), LEAST) * -tl.log(tl.maximum(-log_z, LEAST))
        at = tl.minimum(mode + tl.maximum(further, 0.0), end)
        _, _, G, there, within = given(mu, sigma, hazard, gaps, start, stop, at, False, THREADS)
        fall = 0.75 * G / tl.maximum(tl.abs(there), LEAST)
        narrow = tl.maximum(narrow, tl.minimum(fall, least))
        fine = fine & within
    finest = STEP * tl.minimum(width, 1 / tl.sqrt(1 / (tau * tau) + 1 / (narrow * narrow)))
    step = tl.exp2(tl.floor(LEVELS * tl.log2(finest)) / LEVELS)
    certain = (sure > begin) & (step < RULE[4] * tau)
    first = tl.ceil(tl.where(certain, tl.minimum(sure, mode), begin) / step)
    many = tl.ceil((tl.floor(end / step) - first + 1) / TOGETHER) * TOGETHER
    top = log_z - (mode / tau) * (mode / tau) / 2
    return first, many, step, mode, width, top, certain, fine & (many > 0) & (many < MOST)


@triton.jit
@no_type_check
def _add(
    sigma, hazard, gaps, by_row, n, start, stop, f, weight, G, x, FULL: tl.constexpr,
    THREADS: tl.constexpr,
):  # fmt: skip
    """What one node adds per patch."""
    for begin in range(start, stop, THREADS):
        rows = begin + tl.arange(0, THREADS)
        here = rows < stop
        pull = f * weight * tl.load(hazard + rows, mask=here, other=0.0)
        at = by_row + rows
        tl.store(at, tl.load(at, mask=here) + pull, mask=here)
        if FULL:
            s = tl.load(sigma + rows, mask=here, other=1.0)
            gap = tl.load(gaps + rows, mask=here, other=0.0)
            tl.store(at + n, tl.load(at + n, mask=here) + pull * gap / s, mask=here)
            tl.store(at + 2 * n, tl.load(at + 2 * n, mask=here) - weight * gap * s, mask=here)
            tl.store(at + 3 * n, tl.load(at + 3 * n, mask=here) + G * pull, mask=here)
            tl.store(at + 4 * n, tl.load(at + 4 * n, mask=here) + G * x * pull, mask=here)


@triton.jit
@no_type_check
def _store(out, n_bags, fine, other, v0, v1, v2, v3, v4, v5, v6):
    """Seven numbers of a bag; of one that is not served one, and others."""
    tl.store(out, tl.where(fine, v0, 1.0))
    tl.store(out + n_bags, tl.where(fine, v1, other))
    tl.store(out + 2 * n_bags, tl.where(fine, v2, other))
    tl.store(out + 3 * n_bags, tl.where(fine, v3, other))
    tl.store(out + 4 * n_bags, tl.where(fine, v4, other))
    tl.store(out + 5 * n_bags, tl.where(fine, v5, other))
    tl.store(out + 6 * n_bags, tl.where(fine, v6.to(tl.float64), other))


@triton.jit
@no_type_check
def sums(
    mu, sigma, offsets, order, effect, nodes, by_bag, by_row, served, hazard, gaps, n, n_bags,
    RARE: tl.constexpr, FULL: tl.constexpr, RULE: tl.constexpr, THREADS: tl.constexpr,
):  # fmt: skip
    """Nodes, sums per bag and per patch (zeros at first), and whether the bag is served."""
    b = tl.load(order + tl.program_id(0))
    start = tl.load(offsets + b)
    stop = tl.load(offsets + b + 1)
    tau = tl.load(effect)
    first, many, step, mode, width, top, certain, fine = find_nodes(
        mu, sigma, hazard, gaps, start, stop, tau, RARE, RULE, THREADS
    )
    zero = tl.zeros([], dtype=tl.float64)
    t0, t1, t2, t3, t4, t5, t6 = zero, zero, zero, zero, zero, zero, zero
    j = zero
    last = tl.where(fine, many, 0.0)
    counted = zero
    while j < last:
        s = (first + j) * step
        log_z, f, G, _, within = given(mu, sigma, hazard, gaps, start, stop, s, RARE, THREADS)
        log_weight = log_z - (s / tau) * (s / tau) / 2 - top
        fine = fine & (within | (RARE & (top >= UNDERFLOW)))
        # q N is log-concave: from there on it only falls
        ends = (not RARE) & (s > mode) & (log_weight < NOTHING)
        counts = within & ~ends
        weight = tl.where(counts, tl.exp(log_weight), 0.0)
        f = tl.where(counts, f, 0.0)
        x = (s - mode) / width
        heavy = weight * tl.abs(f) * G * G
        t0 += weight
        t1 += weight * s
        t2 += weight * s * s
        t3 += weight * s * f * G
        t4 += heavy
        t5 += heavy * x
        t6 += heavy * x * x
        _add(sigma, hazard, gaps, by_row, n, start, stop, f, weight, G, x, FULL, THREADS)
        counted = tl.where(ends, j, j + 1)
        j = tl.where(ends | ~fine, last, j + 1)
    tl.store(served + b, fine)
    here = nodes + b
    _store(here, n_bags, fine, 1.0, first, counted, step, mode, width, top, certain)
    _store(by_bag + b, n_bags, fine, 0.0, t0, t1, t2, t3, t4, t5, t6)
