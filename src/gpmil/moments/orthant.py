"""log P(all m < 0) for a Gaussian bag m ~ N(mu, S): the probability that a slide is negative.

`log_orthant` is the one to call. It chooses by rule, bag by bag:

* no correlation at all: the exact product of one-dimensional probabilities;
* otherwise EP with its third-order correction (`gpmil.moments.ep`), deterministic;
* in the right tail `log_union`, which samples the rare event that some m_i > 0: always where
  sum_i P(m_i > 0) < 0.01, and where that sum is below 1 if it has the smaller error;
* where EP does not converge: `tilted`.

`tilted` (separation of variables under EP's Gaussian) and `genz` (the same without EP) are
unbiased, seeded estimates with a standard error: the check, and its naive twin. All of it works
in logs, so that P = 1e-300 and 1 - P = 1e-12 keep their digits.
"""

import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Float, UInt64
from scipy.special import log_ndtr, logsumexp
from scipy.special import ndtri_exp as numpy_ndtri_exp
from scipy.stats import qmc
from torch import Tensor

from gpmil.moments import ep_bag
from gpmil.moments.ep import EP, ep, padded
from gpmil.moments.truncated import hazard, log_not
from gpmil.warn import warn_caller

GENZ_LIMIT = 2_000
TINY = 2.0**-1022
TOLERANCE = 3e-3  # of the sites: log P + c3 is then a few 1e-4 off, 1e-3 at coupling 10
LARGE = 100  # coordinates from which bags are taken one by one on a CPU; below, batches are faster
BLOCK = 64  # coordinates whose past is one matrix product
JITTERS = (0.0, 1e-12, 1e-10, 1e-8, 1e-6)
RARE = 0.01  # sum_i P(m_i > 0) below which EP's error estimate says nothing about 1 - P
SMOOTH_TOLERANCE = 1e-6  # of the sites, where log P is differentiated
TAIL = 2e-3  # relative error of 1 - P that needs no sampling
UNION_TARGET = 4e-3  # relative standard error of 1 - P at which that sampling stops
UNION_ROUNDS = 8
UNION_FLOOR = 1e-4  # what is left out, and what so many draws may not have met
RESAMPLING = 1_000  # the stream of random numbers that resampling uses
UNION_SHAPE = (16, 256)  # replicates and draws of a round; each draw is counted four times


@dataclass(frozen=True)
class LogProbability:
    """log P(all m < 0) and log P(any m > 0) of b bags, each with its own digits.

    `error` estimates the absolute error of `log_p`; `error_1mp` is the same for `log_1mp`.
    """

    log_p: Float[Tensor, " b"]
    log_1mp: Float[Tensor, " b"]
    error: Float[Tensor, " b"]

    @property
    def error_1mp(self) -> Float[Tensor, " b"]:
        """d log(1 - P) = -P / (1 - P) d log P."""
        return self.error * torch.exp(self.log_p - self.log_1mp)


def log_orthant(
    mu: Float[Tensor, "b n"],
    cov: Float[Tensor, "b n n"],
    mask: Bool[Tensor, "b n"] | None = None,
    *,
    seed: int = 0,
) -> LogProbability:
    """log P(all m < 0), m ~ N(mu, cov), for b bags padded to n coordinates (mask: not padding).

    Deterministic: `seed` fixes the draws of the right tail. Works on the device of `mu`, in
    float64. Bags of similar size belong in one call; what a bag gets depends on no other bag, but
    for rounding.

    >>> mu, cov = torch.tensor([[0.3, -1.0]]).double(), torch.tensor([[[1.0, 0.6], [0.6, 2.0]]])
    >>> log_orthant(mu, cov.double()).log_p
    tensor([-1.0820], dtype=torch.float64)
    """
    mu, cov = mu.double(), cov.double()
    mask = torch.ones_like(mu, dtype=torch.bool) if mask is None else mask
    _check(mu, cov, mask)
    return _from_ep(_by_bag(mu, cov, mask), mu, cov, mask, seed)


class _Found(NamedTuple):
    """What is needed of EP to settle log P."""

    log_p: Float[Tensor, " b"]
    c3: Float[Tensor, " b"]
    error: Float[Tensor, " b"]
    converged: Bool[Tensor, " b"]


def _by_bag(mu: Tensor, cov: Tensor, mask: Tensor) -> "_Found | EP":
    """EP of every bag; on a CPU large ones one by one, and all that this cannot do together."""
    if mu.is_cuda:
        return _run_ep(mu, cov, mask)
    large = (mask.sum(-1) >= LARGE).tolist()
    found = [
        ep_bag.log_p(*_one(mu, cov, mask, b), tol=TOLERANCE) if large[b] else None
        for b in range(len(mu))
    ]
    left = torch.tensor([one is None for one in found])
    if bool(left.all()):
        return _run_ep(mu, cov, mask)
    log_p, c3, error = torch.zeros(3, len(mu), dtype=torch.float64)
    out = _Found(log_p, c3, error, torch.zeros_like(left))
    for b, one in enumerate(found):
        if one is not None:
            out.log_p[b], out.c3[b], out.error[b] = one.log_p, one.c3, one.error
            out.converged[b] = one.converged
    if bool(left.any()):
        rest = _run_ep(mu[left], cov[left], mask[left])
        for ours, theirs in zip(out, (rest.log_p, rest.c3, rest.error, rest.converged)):
            ours[left] = theirs
    return out


def _from_ep(
    result: "_Found | EP", mu: Tensor, cov: Tensor, mask: Tensor, seed: int
) -> LogProbability:
    """What EP found, put right where it is not good enough."""
    t = torch.where(mask, mu / cov.diagonal(dim1=-2, dim2=-1).sqrt(), -math.inf)
    log_p, error = result.log_p + result.c3, result.error
    for b in torch.nonzero(~result.converged).flatten().tolist():
        log_p[b], error[b] = _floats(log_p, tilted(*_one(mu, cov, mask, b), seed=seed))
    found = settle(log_p, error, t, lambda b: log_union(*_one(mu, cov, mask, b), seed=seed))

    # No correlation: the exact product, log P = sum_i log Phi(-t_i)
    alone = _independent(cov, mask)
    product = torch.where(mask, torch.special.log_ndtr(-t), 0.0).sum(-1)
    # 1 - P = sum_i Phi(t_i) to the last digit where that is tiny
    tail = torch.logsumexp(torch.special.log_ndtr(t), dim=-1)
    rest = torch.where(tail < -40, tail, log_not(product))
    return LogProbability(
        torch.where(alone, product.clamp(max=-TINY), found.log_p),
        torch.where(alone, rest.clamp(max=-TINY), found.log_1mp),
        torch.where(alone, 0.0, found.error),
    )


class Expansion(NamedTuple):
    """log P of b bags at mu + G x for small x: log_p + slope'x - x'bend x / 2."""

    value: LogProbability
    slope: Float[Tensor, "b k"]
    bend: Float[Tensor, "b k k"]


def expand(
    mu: Float[Tensor, "b n"],
    cov: Float[Tensor, "b n n"],
    mask: Bool[Tensor, "b n"],
    G: Float[Tensor, "b n k"],
    *,
    seed: int = 0,
) -> Expansion:
    """log P(all m < 0) as `log_orthant` has it, and how it changes as mu moves along G.

    Derivatives are those of EP: the second one is S^-1 (Cov[m | all m < 0] - S) S^-1 of the exact
    log P, with EP's covariance in place of the exact one.
    """
    found = _run_ep(mu, cov, mask)
    X, white = _whitened(found, mu, cov, mask, G)
    value = _from_ep(found, mu, cov, mask, seed)
    return Expansion(value, (X.mT @ white)[..., 0], X.mT @ X)


def slope(
    mu: Float[Tensor, "b n"],
    cov: Float[Tensor, "b n n"],
    mask: Bool[Tensor, "b n"],
    G: Float[Tensor, "b n k"],
) -> Float[Tensor, "b k"]:
    """d log P / dx of EP at mu + G x, x = 0."""
    X, white = _whitened(_run_ep(mu, cov, mask), mu, cov, mask, G)
    return (X.mT @ white)[..., 0]


def _whitened(
    found: EP, mu: Tensor, cov: Tensor, mask: Tensor, G: Tensor
) -> tuple[Float[Tensor, "b n k"], Float[Tensor, "b n 1"]]:
    """X and z with d log P / dx = X'z and -d2 log P / dx2 = X'X.

    With B = I + T^.5 S T^.5 = L L' and s = T^-.5 nu: d log P / d mu = nu - tau mhat
    = T^.5 B^-1 (s - T^.5 mu), and -d2 log P / d mu2 = (T^-1 + S)^-1 = T^.5 B^-1 T^.5; in this form
    nothing cancels in the deepest tail.
    """
    mu, cov, _ = padded(mu, cov, mask)
    root = found.tau.sqrt()
    b = root[:, :, None] * cov * root[:, None, :]
    b.diagonal(dim1=-2, dim2=-1).add_(1.0)
    s = torch.where(found.tau > 0, found.nu / root, 0.0)
    right = torch.cat([root[:, :, None] * G, (s - root * mu)[:, :, None]], dim=-1)
    out = torch.linalg.solve_triangular(torch.linalg.cholesky(b), right, upper=False)
    return out[..., :-1], out[..., -1:]


class _SmoothLogP(torch.autograd.Function):
    """Plain EP's log P. At its fixed point the sites stand still to first order, so that

    d log P / d mu = S^-1 (mhat - mu) = nu - tau mhat =: g
    d log P / d S  = (g g' - (T^-1 + S)^-1) / 2,  (T^-1 + S)^-1 = T - T V T.
    """

    @staticmethod
    def forward(ctx, mu: Tensor, cov: Tensor, mask: Tensor) -> Tensor:
        found = ep(mu, cov, mask, tol=SMOOTH_TOLERANCE)
        ctx.save_for_backward(found.tau, found.nu, found.mean, found.cov)
        return found.log_p

    @staticmethod
    def backward(ctx, up: Tensor) -> tuple[Tensor, Tensor, None]:
        tau, nu, mean, V = ctx.saved_tensors
        g = nu - tau * mean
        inner = torch.diag_embed(tau) - tau[:, :, None] * V * tau[:, None, :]
        both = (g[:, :, None] * g[:, None, :] - inner) / 2
        return up[:, None] * g, up[:, None, None] * both, None


def log_orthant_ep(
    mu: Float[Tensor, "b n"], cov: Float[Tensor, "b n n"], mask: Bool[Tensor, "b n"]
) -> Float[Tensor, " b"]:
    """log P(all m < 0) by plain EP, below its bound min_i log P(m_i < 0); differentiable."""
    t = mu * cov.diagonal(dim1=-2, dim2=-1).rsqrt()
    bound = torch.special.log_ndtr(-torch.where(mask, t, -math.inf)).amin(-1)
    return torch.minimum(_SmoothLogP.apply(mu, cov, mask), bound).clamp(max=-TINY)


def settle(
    log_p: Float[Tensor, " b"],
    error: Float[Tensor, " b"],
    t: Float[Tensor, "b n"],
    union: Callable[[int], tuple[float, float]],
) -> LogProbability:
    """EP's log P and its error, with the right tail put right.

    t are the means over the standard deviations (minus infinity where padded); `union(b)` samples
    log P(any m > 0) of bag b.
    """
    # P(all m < 0) <= P(m_i < 0): keeps log P below zero whatever the correction adds
    bound = torch.special.log_ndtr(-t).amin(-1)
    log_p, error = torch.minimum(log_p, bound), error.clone()
    log_1mp = log_not(log_p)
    # EP's error, harmless in log P, can be all of 1 - P.
    sum_p = torch.special.ndtr(t).sum(-1)
    off = torch.where(sum_p < RARE, math.inf, error * torch.exp(log_p - log_1mp))
    for b in torch.nonzero((sum_p < 1) & (off > TAIL)).flatten().tolist():
        value, spread = _floats(log_p, union(b))
        if spread < off[b]:
            log_p[b], log_1mp[b] = log_not(value), value
            error[b] = spread * torch.exp(value - log_p[b])
    # Certainty is never reported: the smallest number stands for what double precision rounds away.
    return LogProbability(log_p.clamp(max=-TINY), log_1mp.clamp(max=-TINY), error)


def _run_ep(mu: Tensor, cov: Tensor, mask: Tensor) -> EP:
    try:
        return ep(mu, cov, mask, tol=TOLERANCE)
    except torch.linalg.LinAlgError:
        smallest = torch.linalg.eigvalsh(padded(mu, cov, mask)[1])[:, 0]
        raise ValueError(
            f"expected positive semi-definite covariances, found an eigenvalue of "
            f"{float(smallest.min()):.3g} in bag {int(smallest.argmin())}: was the variance of a "
            "difference computed from rounded terms?"
        ) from None


def _one(mu: Tensor, cov: Tensor, mask: Tensor, b: int) -> tuple[Tensor, Tensor]:
    """Mean and covariance of bag b without its padding."""
    rows = mask[b]
    n = int(rows.sum())
    if bool(rows[:n].all()):  # padding comes last: no copy
        return mu[b, :n], cov[b, :n, :n]
    return mu[b, rows], cov[b][rows][:, rows]


def _floats(like: Tensor, pair: tuple[float, float]) -> Tensor:
    return torch.tensor(pair, dtype=like.dtype, device=like.device)


def tilted(
    mu: Float[Tensor, " n"],
    cov: Float[Tensor, "n n"],
    *,
    n_points: int = 512,
    n_replicates: int = 8,
    seed: int = 0,
    sites: EP | None = None,
) -> tuple[float, float]:
    """log P(all m < 0) and its standard error by separation of variables under EP's Gaussian.

    Unbiased in P for any sites; EP's make the weights nearly equal. `sites` are those of one bag
    (found here if not given). Same seed, same bits.

    >>> mu, cov = torch.tensor([0.3, -1.0]).double(), torch.tensor([[1.0, 0.6], [0.6, 2.0]])
    >>> value, error = tilted(mu, cov.double())
    >>> round(value, 3), error < 1e-3
    (-1.082, True)
    """
    mu, cov = mu.double(), cov.double()
    _check(mu[None], cov[None], torch.ones_like(mu, dtype=torch.bool)[None])
    found = ep(mu[None], cov[None]) if sites is None else sites
    walk = _Walk(found, n_replicates, n_points, seed)
    for start in range(0, len(mu), BLOCK):
        walk.advance(start, min(start + BLOCK, len(mu)))
    log_w = walk.settled + _log_mean_exp(walk.log_w)
    # log P = lZG + log mean w; se(log P) = se(P) / P
    value = _log_mean_exp(log_w)
    error = torch.expm1(log_w - value).std() / math.sqrt(n_replicates)
    return float(found.log_gauss[0] + value), float(error)


class _Walk:
    """r replicates of k points on their way through the coordinates, with their log weights.

    V = L L' is EP's covariance; coordinate i is drawn from N(c, s^2), c = mhat_i + sum_j L_ij y_j,
    s = L_ii, with its site taken out and its constraint put in.
    """

    def __init__(self, sites: EP, r: int, k: int, seed: int) -> None:
        self.tau, self.nu, self.mean = sites.tau[0], sites.nu[0], sites.mean[0]
        self.factor = _cholesky(sites.cov[0])
        self.n, self.r, self.k, self.seed = len(self.mean), r, k, seed
        self.y = self.mean.new_empty(self.n, r, k)
        self.log_w = self.mean.new_zeros(r, k)
        self.settled = self.mean.new_zeros(r)  # log mean weights folded in by resampling
        self.rng = np.random.default_rng([seed, self.n, RESAMPLING])

    def advance(self, start: int, stop: int) -> None:
        """Draw coordinates start to stop; resample replicates whose weights have drifted apart."""
        u = _points(self.n, self.k, self.r, self.seed, slice(start, stop))
        log_u = torch.from_numpy(np.moveaxis(np.log(u), -1, 0).copy()).to(self.mean)
        past = self._product(slice(start, stop), slice(0, start))
        past += self.mean[start:stop, None, None]
        for i in range(start, stop):
            c = past[i - start] + self._product(slice(i, i + 1), slice(start, i))[0]
            self.y[i] = self._draw(i, c, log_u[i - start])
        self._resample(stop)

    def _product(self, rows: slice, cols: slice) -> Tensor:
        """L[rows, cols] y[cols]."""
        y = self.y[cols].reshape(cols.stop - cols.start, self.r * self.k)
        return (self.factor[rows, cols] @ y).reshape(-1, self.r, self.k)

    def _draw(self, i: int, c: Tensor, log_u: Tensor) -> Tensor:
        s, tau, nu = self.factor[i, i], self.tau[i], self.nu[i]
        # p = 1/s^2 - tau, h = c/s^2 - nu; here q = s^2 p and t = h / sqrt p
        q = (1 - tau * s * s).clamp(min=1e-15)
        t = (c - nu * s * s) / (s * q.sqrt())
        log_phi = torch.special.log_ndtr(-t)
        # log w += -log(s^2 p)/2 + h^2/(2p) - c^2/(2 s^2) + log Phi(-h/sqrt p)
        self.log_w += -q.log() / 2 + (t - c / s) * (t + c / s) / 2 + log_phi
        # m_i = h/p + z / sqrt p, z ~ N(0, 1) given m_i < 0;  y_i = (m_i - c) / s
        return (t + ndtri_exp(log_u + log_phi)) / q.sqrt() - c / s

    def _resample(self, stop: int) -> None:
        """Systematic resampling of replicates whose effective sample size has halved."""
        w = torch.softmax(self.log_w, dim=-1)
        shift = self.rng.random(self.r)
        if stop == self.n:
            return
        for r in torch.nonzero(1 / (w * w).sum(-1) < self.k / 2).flatten().tolist():
            self.settled[r] += _log_mean_exp(self.log_w[r])
            ends = w[r].cumsum(0)
            ticks = (torch.arange(self.k, device=w.device) + shift[r]) / self.k * ends[-1]
            chosen = torch.searchsorted(ends, ticks).clamp(max=self.k - 1)
            self.y[:stop, r] = self.y[:stop, r][:, chosen]
            self.log_w[r] = 0.0


def log_union(
    mu: Float[Tensor, " n"], cov: Float[Tensor, "n n"], *, seed: int = 0
) -> tuple[float, float]:
    """log P(any m > 0) where that is rare, and its relative standard error.

    Draw I with probability p_I / sum p, p_i = P(m_i > 0), and m given m_I > 0; then
    P(any m > 0) = sum_i p_i E[1 / #{m > 0}], a mean of numbers between 1/n and 1 however small
    the probability is.

    >>> value, error = log_union(torch.tensor([-6.0, -7.0]).double(), torch.eye(2).double())
    >>> round(value, 3), error < 1e-3
    (-20.735, True)
    """
    mu, cov = mu.double(), cov.double()
    log_p = torch.special.log_ndtr(mu / cov.diagonal().sqrt())
    rows = relevant(log_p)
    if not rows.any():  # numbers beyond all bounds: so unlikely that it is 0, or not a number
        return float(log_p.max()), UNION_FLOOR
    event = _Union(mu[rows], cov[rows][:, rows], log_p[rows], seed)
    means = event.round(0)
    error = _relative_error(means)
    for number in range(1, UNION_ROUNDS):
        if error < UNION_TARGET:
            break
        means = torch.cat([means, event.round(number)])
        error = _relative_error(means)
    return float(torch.logsumexp(log_p, 0) + means.mean().log()), max(error, UNION_FLOOR)


def relevant(log_p: Float[Tensor, " n"]) -> Bool[Tensor, " n"]:
    """Coordinates worth drawing; the others together add less than 1e-4 of the likeliest one."""
    return log_p > log_p.max() - math.log(len(log_p) / UNION_FLOOR)


class _Union:
    """Draws from the union of the events m_i > 0. Fields are float32: only signs are counted."""

    def __init__(self, mu: Tensor, cov: Tensor, log_p: Tensor, seed: int) -> None:
        # The likeliest first: its coordinate gets the best points.
        order = torch.argsort(log_p, descending=True, stable=True)
        self.mu, self.log_p, self.seed = mu[order], log_p[order], seed
        cov = cov[order][:, order]
        self.sd = cov.diagonal().sqrt()
        self.ends = torch.softmax(self.log_p, 0).cumsum(0)
        self.factor = _cholesky(cov).float()
        self.gain = (cov / cov.diagonal()[:, None]).float()  # row I: S_I,: / S_II

    def round(self, number: int) -> Float[Tensor, " r"]:
        """Mean of 1 / #{m > 0} in each of r replicates."""
        r, k = UNION_SHAPE
        n = len(self.mu)
        draws = _normals(1 << (n + 1).bit_length(), self.seed, number).to(self.mu.device)
        # Two of the normals choose I and t, the others make a field x0 ~ N(0, S).
        u, v = (torch.special.ndtr(draws[:, :, i].double()) for i in (0, 1))
        first = torch.searchsorted(self.ends, u * self.ends[-1]).clamp(max=n - 1)
        field = draws[:, :, 2 : n + 2] @ self.factor.mT
        gain = self.gain.index_select(0, first.flatten()).reshape(r, k, n)
        own = first[:, :, None]
        # m = mu + gain (t - mu_I) + (x0 - gain x0_I); also mirrored in t and in x0
        rest = field - gain * field.gather(2, own)
        total = self.mu.new_zeros(r)
        for w in (v, 1 - v):
            # t - mu_I = -sd z, z ~ N(0, 1) given z < mu_I / sd_I
            step = -self.sd[first] * ndtri_exp(w.log() + self.log_p[first])
            level = self.mu.float() + gain * step.float()[:, :, None]
            for m in (level + rest, level - rest):
                # m_I = t > 0 exactly
                count = m.scatter_(2, own, 1.0).gt_(0).sum(-1)
                total += (1 / count.double()).mean(-1) / 4
        return total


@lru_cache(maxsize=UNION_ROUNDS)
def _normals(dimension: int, seed: int, number: int) -> Float[Tensor, "r k {dimension}"]:
    """Quasi-random standard normals, shared by all bags of about this size."""
    r, k = UNION_SHAPE
    u = torch.from_numpy(_points(dimension, k, r, seed, stream=number))
    # float32 keeps u = ndtr(z) away from 0 and 1
    return torch.special.ndtri(u.clamp(1e-7, 1 - 1e-7)).float()


def ndtri_exp(y: Float[Tensor, "*n"]) -> Float[Tensor, "*n"]:
    """x with log Phi(x) = y, for y < 0 near zero as well as y = -1e6.

    >>> ndtri_exp(torch.tensor([-1e-20, -2.0, -1e6]).double())
    tensor([ 9.2623e+00, -1.1015e+00, -1.4142e+03], dtype=torch.float64)
    """
    x = torch.where(
        y > -math.log(2), -torch.special.ndtri(-torch.expm1(y)), torch.special.ndtri(torch.exp(y))
    )
    far = y < -600
    if bool(far.any()):
        low = y.clamp(max=-600)
        # log Phi(x) = -x^2/2 - log(-x sqrt(2 pi)) - ...: a start for Newton steps
        z = -torch.sqrt(-2 * low - math.log(2 * math.pi) - torch.log(-2 * low))
        for _ in range(3):
            z = z - (torch.special.log_ndtr(z) - low) / hazard(-z)
        x = torch.where(far, z, x)
    return x


def _relative_error(means: Float[Tensor, " r"]) -> float:
    """Standard error of the mean of independent replicates, over that mean."""
    return float(means.std() / means.mean()) / math.sqrt(len(means))


def _log_mean_exp(log_w: Float[Tensor, "*batch k"]) -> Float[Tensor, "*batch"]:
    return torch.logsumexp(log_w, dim=-1) - math.log(log_w.shape[-1])


def _independent(cov: Tensor, mask: Tensor) -> Bool[Tensor, " b"]:
    """Bags whose coordinates are all uncorrelated."""
    size = mask.sum(-1)
    # One row tells most bags apart; the others are looked at whole.
    first = mask.int().argmax(-1)
    row = cov[torch.arange(len(cov), device=cov.device), first]
    alone = (mask & (row != 0)).sum(-1) <= 1
    for b in torch.nonzero(alone & (size > 1)).flatten().tolist():
        _, own = _one(row, cov, mask, b)
        alone[b] = int((own != 0).sum()) == int(size[b])
    return alone


def _check(mu: Tensor, cov: Tensor, mask: Tensor) -> None:
    """Raise ValueError, naming the bag, for what is not a mean and a covariance."""
    empty = ~mask.any(-1)
    if empty.any():
        raise ValueError(f"expected at least one coordinate, found none in bag {_first(empty)}")
    bad = (mask & ~mu.isfinite()).any(-1)
    if not bool(cov.sum().isfinite()):  # padding may hold anything
        both = mask[:, :, None] & mask[:, None, :]
        bad |= (both & ~cov.isfinite()).any(-1).any(-1)
    if bad.any():
        raise ValueError(
            "expected a finite mean and covariance, found entries that are NaN or infinite in bag "
            f"{_first(bad)}: check the features and the kernel settings"
        )
    flat = mask & (cov.diagonal(dim1=-2, dim2=-1) <= 0)
    if flat.any():
        bag = _first(flat.any(-1))
        raise ValueError(
            f"expected positive variances, found a variance that is not at coordinate "
            f"{_first(flat[bag])} of bag {bag}"
        )


def _first(flags: Bool[Tensor, " k"]) -> int:
    return int(torch.nonzero(flags)[0])


def genz(
    mu: Float[np.ndarray, " n"],
    cov: Float[np.ndarray, "n n"],
    *,
    n_points: int = 512,
    n_replicates: int = 8,
    seed: int = 0,
) -> tuple[float, float]:
    """Estimate log P(all m < 0), m ~ N(mu, cov), on seeded quasi-random points.

    Parameters
    ----------
    mu, cov
        Mean (n,) and positive definite covariance (n, n).
    n_points, n_replicates
        Points of one scrambled Sobol net (a power of two balances it best), and how many
        independently shifted copies of it are averaged.
    seed
        Fixes the points: they depend on n and the seed alone. Same seed, same bits.

    Returns
    -------
    value, error
        log P and its standard error, from the spread of the replicates.

    Examples
    --------
    >>> value, error = genz(np.array([0.3, -1.0]), np.array([[1.0, 0.6], [0.6, 2.0]]))
    >>> round(value, 3), error < 1e-3
    (-1.082, True)
    """
    mu, cov = np.asarray(mu, dtype=float), np.asarray(cov, dtype=float)
    _check(*(torch.from_numpy(a)[None] for a in (mu, cov, np.ones(len(mu), dtype=bool))))
    n = len(mu)
    if n > GENZ_LIMIT:
        warn_caller(
            f"the Genz estimate was made for up to {GENZ_LIMIT} coordinates and this bag has {n}: "
            "it is slow there, and its standard error may be too small",
        )
    sd = np.sqrt(np.diag(cov))
    if n == 1:
        return float(log_ndtr(-mu[0] / sd[0])), 0.0
    # The coordinate most likely to be positive first: it carries most of the variation.
    order = np.argsort(-mu / sd, kind="stable")
    factor = _cholesky(torch.from_numpy(cov[np.ix_(order, order)])).numpy()
    u = _points(n, n_points, n_replicates, seed)
    log_w = _separate(mu[order], factor, u.reshape(-1, n)).reshape(n_replicates, n_points)
    return _pool(log_w)


def _separate(
    mu: Float[np.ndarray, " n"], factor: Float[np.ndarray, "n n"], u: Float[np.ndarray, "k n"]
) -> Float[np.ndarray, " k"]:
    """log w of every point: log w = sum_i log Phi(b_i), y_i ~ N(0, 1) given y_i < b_i."""
    k, n = u.shape
    log_w = np.zeros(k)
    y = np.empty((n, k))
    for start in range(0, n, BLOCK):
        stop = min(start + BLOCK, n)
        # What earlier blocks add to the conditional means, in one matrix product.
        past = mu[start:stop, None] + factor[start:stop, :start] @ y[:start]
        for i in range(start, stop):
            # b_i = -(mu_i + sum_{j<i} L_ij y_j) / L_ii
            b = -(past[i - start] + factor[i, start:i] @ y[start:i]) / factor[i, i]
            log_phi = log_ndtr(b)
            log_w += log_phi
            y[i] = numpy_ndtri_exp(np.log(u[:, i]) + log_phi)
    return log_w


def _pool(log_w: Float[np.ndarray, "r k"]) -> tuple[float, float]:
    """Log of the mean weight over r replicates of k points, and its standard error."""
    per_replicate = log_mean_exp(log_w)
    value = log_mean_exp(per_replicate)
    if len(per_replicate) < 2:
        return float(value), float("nan")
    # se(log P) = se(P) / P, with P_r / P - 1 = expm1(log P_r - log P) exact near P = 1.
    error = np.std(np.expm1(per_replicate - value), ddof=1) / np.sqrt(len(per_replicate))
    return float(value), float(error)


def log_mean_exp(log_w: Float[np.ndarray, "*batch k"]) -> Float[np.ndarray, "*batch"]:
    """log mean exp(log_w) over the last axis, for log_w <= 0; exact near 0 and near -inf.

    >>> print(f"{log_mean_exp(np.array([-1e-14, -3e-14])):.9g}")
    -2e-14
    """
    below_one = np.expm1(log_w).mean(axis=-1)
    # 1 - P has no digits left once P is small: there the plain log-sum-exp is the exact one.
    near_one = np.log1p(np.maximum(below_one, -0.5))
    far = logsumexp(log_w, axis=-1) - np.log(log_w.shape[-1])
    return np.asarray(np.where(below_one > -0.5, near_one, far))


def _points(
    n: int,
    n_points: int,
    n_replicates: int,
    seed: int,
    columns: slice = slice(None),
    stream: int = 0,
) -> Float[np.ndarray, "{n_replicates} {n_points} d"]:
    """Independent digital shifts of one scrambled Sobol net in the open unit cube (n columns).

    Every stream has shifts of its own.
    """
    # Nets are cached for powers of two, so that bags of many sizes share a few of them.
    net = _net(1 << (n - 1).bit_length(), n_points, seed)[:, :n]
    shift = np.random.default_rng([seed, n, stream]).integers(
        1 << 52, size=(n_replicates, 1, n), dtype=np.uint64
    )
    return ((net[:, columns] ^ shift[:, :, columns]) + 0.5) * 2.0**-52


@lru_cache(maxsize=4)
def _net(dimension: int, n_points: int, seed: int) -> UInt64[np.ndarray, "{n_points} {dimension}"]:
    """Scrambled Sobol points as 52-bit integers."""
    sobol = qmc.Sobol(dimension, scramble=True, bits=30, rng=np.random.default_rng(seed))
    with warnings.catch_warnings():
        # SciPy warns when the number of points is no power of two: less balanced, still right.
        warnings.simplefilter("ignore", UserWarning)
        net = np.ldexp(sobol.random(n_points), 52).astype(np.uint64)
    net.setflags(write=False)
    return net


def _cholesky(cov: Float[Tensor, "n n"]) -> Float[Tensor, "n n"]:
    """Lower Cholesky factor, with the least jitter (relative to the mean variance) that works."""
    scale = cov.diagonal().mean()
    for jitter in JITTERS:
        shifted = cov.clone()
        shifted.diagonal().add_(jitter * scale)
        factor, failed = torch.linalg.cholesky_ex(shifted)
        if not int(failed):
            return factor
    raise ValueError(
        "expected a positive definite covariance, found one that is not even with a jitter of "
        f"{JITTERS[-1]:g} times its mean variance: is it symmetric, and was the variance of a "
        "difference computed from rounded terms?"
    )
