"""Passes over the bags as Triton kernels. Imported only where Triton is installed.

erfcx(x) = p(u) / (1 + 2 x), u = (x - K) / (x + K), for x >= 0: the Chebyshev expansion of
(1 + 2 x) erfcx(x) in u, cut where it is below 1e-16 and written in powers of u.

`no_type_check`: Triton compiles the source of a function, and must find the function itself, not a
wrapper that checks types.
"""

from typing import no_type_check

import triton
import triton.language as tl


@triton.jit
@no_type_check
def _double(value: tl.constexpr):
    """A number with all its digits: as a literal Triton would take it for a float32."""
    return tl.full([], value, tl.float64)


@triton.jit
@no_type_check
def erfcx(x):
    """exp(x^2) erfc(x), x >= 0, to 4e-16."""
    u = (x - 3.75) / (x + 3.75)
    p = _double(3.1114333809799254e-10)
    p = p * u + _double(-2.623107347133476e-09)
    p = p * u + _double(-3.744210080962018e-09)
    p = p * u + _double(3.197926671666804e-08)
    p = p * u + _double(2.3263508708859124e-08)
    p = p * u + _double(-2.4857126248016745e-07)
    p = p * u + _double(-5.7218230603224086e-08)
    p = p * u + _double(1.7419821586224816e-06)
    p = p * u + _double(-9.73559896736775e-07)
    p = p * u + _double(-1.1438048033346894e-05)
    p = p * u + _double(2.238423915508223e-05)
    p = p * u + _double(5.164652974177416e-05)
    p = p * u + _double(-0.0002901540805408417)
    p = p * u + _double(0.000293714378044958)
    p = p * u + _double(0.0017556258528952954)
    p = p * u + _double(-0.009746579683265262)
    p = p * u + _double(0.028362277418956406)
    p = p * u + _double(-0.05869339857664934)
    p = p * u + _double(0.09230432116037748)
    p = p * u + _double(-0.10880393014244462)
    p = p * u + _double(0.0822767384901452)
    p = p * u + _double(0.0035854154854790257)
    p = p * u + _double(-0.14024059858554697)
    p = p * u + _double(1.2375126308378275)
    return p / (1 + 2 * x)


@triton.jit
@no_type_check
def log_one_minus(q):
    """log(1 - q), 0 <= q < 1, accurate for small q."""
    series = -q * (
        1
        + q
        * (
            0.5
            + q * (_double(1 / 3) + q * (0.25 + q * (_double(0.2) + q * (_double(1 / 6) + q / 7))))
        )
    )
    return tl.where(q < 0.004, series, tl.log(1 - tl.minimum(q, 0.75)))


@triton.jit
@no_type_check
def tails(t):
    """log(1 - Phi(t)), the hazard h(t), and h(t) - t."""
    x = tl.abs(t) * _double(0.7071067811865476)
    g = erfcx(x)
    e = tl.exp(-x * x)
    tail = 0.5 * e * g  # Phi(-|t|)
    left = t < 0
    log_upper = tl.where(left, log_one_minus(tail), tl.log(g * 0.5) - x * x)
    # sqrt(1/(2 pi)) exp(-t^2/2) / (1 - Phi(t)) on the left, sqrt(2/pi) / erfcx on the right
    h = tl.where(
        left, _double(0.3989422804014327) * e / (1 - tail), _double(0.7978845608028654) / g
    )
    s = 1 / tl.maximum(t, 50.0)
    s2 = s * s
    # h - t = 1/t - 2/t^3 + 10/t^5 - 74/t^7 + 706/t^9 where it would cancel
    series = s * (1 + s2 * (-2 + s2 * (10 + s2 * (-74 + s2 * 706))))
    return log_upper, h, tl.where(t > 50.0, series, h - t)


@triton.jit
@no_type_check
def minus_expm1(y):
    """1 - exp(y), y <= 0."""
    series = -y * (
        1
        + y
        * (0.5 + y * (_double(1 / 6) + y * (_double(1 / 24) + y * (_double(1 / 120) + y / 720))))
    )
    return tl.where(y > -0.01, series, 1 - tl.exp(y))


@triton.jit
@no_type_check
def _rows_of_H(H, rows, here, columns, inside, M: tl.constexpr):
    return tl.load(
        H + rows[:, None] * M + columns[None, :],
        mask=here[:, None] & inside[None, :],
        other=0.0,
    )


@triton.jit
@no_type_check
def _mu(
    H, w, mean, start, stop, c, columns, inside, M: tl.constexpr, ROWS: tl.constexpr,
    EXACT: tl.constexpr,
):  # fmt: skip
    """mu = c + H w of one bag into `mean`; EXACT: multiplied in float64."""
    w_here = tl.load(w + columns, mask=inside, other=0.0)
    for first in range(start, stop, ROWS):
        rows = first + tl.arange(0, ROWS)
        here = rows < stop
        block = _rows_of_H(H, rows, here, columns, inside, M)
        if EXACT:
            block = block.to(tl.float64)
        mu = tl.sum(block * w_here[None, :], axis=1).to(tl.float64) + c
        tl.store(mean + rows, mu, mask=here)


@triton.jit
@no_type_check
def _against(
    H, x, start, stop, columns, inside, M: tl.constexpr, COLUMNS: tl.constexpr, ROWS: tl.constexpr,
    EXACT: tl.constexpr,
):  # fmt: skip
    """H'x of one bag."""
    number = tl.float64 if EXACT else H.dtype.element_ty
    products = tl.zeros((ROWS, COLUMNS), dtype=number)
    for first in range(start, stop, ROWS):
        rows = first + tl.arange(0, ROWS)
        here = rows < stop
        by = tl.load(x + rows, mask=here, other=0.0)
        block = _rows_of_H(H, rows, here, columns, inside, M).to(number)
        products += block * by[:, None].to(number)
    return tl.sum(products, axis=0).to(tl.float64)


@triton.jit
@no_type_check
def _hazards(
    sigma, mean, out, diagonal, start, stop, THREADS: tl.constexpr, GRADIENT: tl.constexpr
):
    """log q = sum_i log(1 - Phi(t_i)); sigma h into `out`, or h / sigma for a GRADIENT."""
    log_q = tl.zeros((1,), dtype=tl.float64)
    for first in range(start, stop, THREADS):
        rows = first + tl.arange(0, THREADS)
        here = rows < stop
        s = tl.load(sigma + rows, mask=here, other=1.0)
        log_upper, h, gap = tails(tl.load(mean + rows, mask=here, other=0.0) / s)
        log_q += tl.sum(tl.where(here, log_upper, 0.0), axis=0)
        tl.store(out + rows, h / s if GRADIENT else s * h, mask=here)
        if GRADIENT:
            tl.store(diagonal + rows, h * gap / (s * s), mask=here)
    return log_q


@triton.jit
@no_type_check
def _label(log_q, is_positive):
    """log Z_b, and f_b with E - mu = f sigma h and d log Z / dmu = f h / sigma: r, or -1."""
    not_q = minus_expm1(log_q)
    factor = tl.where(is_positive, tl.exp(log_q) / not_q, -1.0)
    return tl.where(is_positive, tl.log(not_q), log_q), factor, not_q


@triton.jit
@no_type_check
def sweep(
    H, sigma, w, diagonal, neighbour, weight, offsets, positive, order, mean, above,
    partial, log_z, prior_mean, n_bags, M: tl.constexpr, COLUMNS: tl.constexpr, ROWS: tl.constexpr,
    THREADS: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    """Some of the bags: sum of log Z_b, and W'(E - mu) = sum_b f_b H_b'P sigma h.

    Products with H go by ROWS rows; what is done for each instance alone goes by THREADS of them,
    one per thread. In between, threads read what others wrote: hence the barriers.
    """
    g = tl.program_id(0)
    c = tl.load(prior_mean)
    columns = tl.arange(0, COLUMNS)
    inside = columns < M
    pulled = tl.zeros((COLUMNS,), dtype=tl.float64)
    total = tl.zeros((1,), dtype=tl.float64)
    for k in range(g, n_bags, tl.num_programs(0)):
        b = tl.load(order + k)
        start = tl.load(offsets + b)
        stop = tl.load(offsets + b + 1)
        _mu(H, w, mean, start, stop, c, columns, inside, M, ROWS, False)
        tl.debug_barrier()
        log_q = _hazards(sigma, mean, above, above, start, stop, THREADS, False)
        log_p, factor, _ = _label(log_q, tl.load(positive + b) != 0)
        total += log_p
        tl.debug_barrier()
        # P sigma h
        for first in range(start, stop, THREADS):
            rows = first + tl.arange(0, THREADS)
            here = rows < stop
            x = tl.load(diagonal + rows, mask=here) * tl.load(above + rows, mask=here)
            for near in tl.static_range(K):
                other = tl.load(neighbour + rows * K + near, mask=here, other=0)
                by = tl.load(weight + rows * K + near, mask=here, other=0.0)
                x -= by * tl.load(above + other, mask=here, other=0.0)
            tl.store(mean + rows, x, mask=here)
        tl.debug_barrier()
        pulled += factor * _against(H, mean, start, stop, columns, inside, M, COLUMNS, ROWS, False)
        tl.debug_barrier()
    tl.store(partial + g * M + columns, pulled, mask=inside)
    tl.store(log_z + g + tl.arange(0, 1), total)


@triton.jit
@no_type_check
def rise(
    H, sigma, w, offsets, positive, order, mean, weight, partial, log_z, diagonal, per_bag,
    prior_mean, n_bags, M: tl.constexpr, COLUMNS: tl.constexpr, ROWS: tl.constexpr,
    THREADS: tl.constexpr,
):  # fmt: skip
    """Some of the bags: sum of log Z_b, and its gradient H'gamma = sum_b f_b v_b.

    v_b = H_b'(h / sigma) is all that must be known of a bag. Also what minus the Hessian follows
    from, next to nothing beside it: A = diag(d) + pull pull' of every bag, d_i = -f_b h_i (h_i -
    t_i) / sigma_i^2, and H'pull = sqrt(q) / (1 - q) v_b of a positive bag. Multiplied in float64,
    as all that decides convergence.
    """
    g = tl.program_id(0)
    c = tl.load(prior_mean)
    columns = tl.arange(0, COLUMNS)
    inside = columns < M
    gradient = tl.zeros((COLUMNS,), dtype=tl.float64)
    total = tl.zeros((1,), dtype=tl.float64)
    for k in range(g, n_bags, tl.num_programs(0)):
        b = tl.load(order + k)
        start = tl.load(offsets + b)
        stop = tl.load(offsets + b + 1)
        _mu(H, w, mean, start, stop, c, columns, inside, M, ROWS, True)
        tl.debug_barrier()
        log_q = _hazards(sigma, mean, weight, diagonal, start, stop, THREADS, True)
        is_positive = tl.load(positive + b) != 0
        log_p, factor, not_q = _label(log_q, is_positive)
        total += log_p
        tl.debug_barrier()
        v = _against(H, weight, start, stop, columns, inside, M, COLUMNS, ROWS, True)
        gradient += factor * v
        pull = tl.where(is_positive, tl.exp(0.5 * log_q) / not_q, 0.0)
        tl.store(per_bag + b * M + columns, pull * v, mask=inside)
        for first in range(start, stop, THREADS):
            rows = first + tl.arange(0, THREADS)
            here = rows < stop
            d = tl.load(diagonal + rows, mask=here, other=0.0)
            tl.store(diagonal + rows, -factor * d, mask=here)
        tl.debug_barrier()
    tl.store(partial + g * M + columns, gradient, mask=inside)
    tl.store(log_z + g + tl.arange(0, 1), total)


@triton.jit
@no_type_check
def times(H, w, out, n, M: tl.constexpr, COLUMNS: tl.constexpr, ROWS: tl.constexpr):
    """H w in float64, some rows per program."""
    slab = tl.cdiv(n, tl.num_programs(0))
    start = tl.program_id(0) * slab
    columns = tl.arange(0, COLUMNS)
    _mu(H, w, out, start, tl.minimum(start + slab, n), 0.0, columns, columns < M, M, ROWS, True)


@triton.jit
@no_type_check
def against(H, x, partial, n, M: tl.constexpr, COLUMNS: tl.constexpr, ROWS: tl.constexpr):
    """H'x in float64, some rows per program."""
    slab = tl.cdiv(n, tl.num_programs(0))
    start = tl.program_id(0) * slab
    columns = tl.arange(0, COLUMNS)
    inside = columns < M
    stop = tl.minimum(start + slab, n)
    found = _against(H, x, start, stop, columns, inside, M, COLUMNS, ROWS, True)
    tl.store(partial + tl.program_id(0) * M + columns, found, mask=inside)


@triton.jit
@no_type_check
def spread(
    distances, u, chosen, n, k, PLACES: tl.constexpr, DRAWS: tl.constexpr
):  # fmt: skip
    """Greedy k-means++ by one program, from all squared distances; chosen[0] is given."""
    places = tl.arange(0, PLACES)
    inside = places < n
    first = tl.load(chosen)
    nearest = tl.load(distances + first * n + places, mask=inside, other=0.0)
    for j in range(1, k):
        mass = tl.cumsum(nearest.to(tl.float64), axis=0)
        total = tl.max(mass, axis=0)
        least = tl.full([], float("inf"), tl.float32)
        best = first
        for draw in range(DRAWS):
            below = mass < total * tl.load(u + (j - 1) * DRAWS + draw)
            drawn = tl.minimum(tl.sum(below.to(tl.int64), axis=0), n - 1)
            row = tl.load(distances + drawn * n + places, mask=inside, other=0.0)
            after = tl.sum(tl.minimum(nearest, row), axis=0)
            best = tl.where(after < least, drawn, best)
            least = tl.minimum(after, least)
        tl.store(chosen + j, best)
        row = tl.load(distances + best * n + places, mask=inside, other=0.0)
        nearest = tl.minimum(nearest, row)
