"""P(all m < 0) and P(any m > 0) of a Gaussian bag by sampling, each with a standard error.

`tilted` (separation of variables under EP's Gaussian) is unbiased in P(all m < 0): what EP is
checked against. `log_union` is for P(any m > 0) where that is rare. Points are quasi-random; the
same seed gives the same bits.
"""

import math
import warnings
from functools import lru_cache

import numpy as np
import torch
from jaxtyping import Bool, Float, UInt64
from scipy.stats import qmc
from torch import Tensor

from gpmil.moments.ep import EP, check_gaussians, ep
from gpmil.moments.truncated import hazard

BLOCK = 64  # coordinates whose past is one matrix product
JITTERS = (0.0, 1e-12, 1e-10, 1e-8, 1e-6)
UNION_TARGET = 4e-3  # relative standard error of P(any m > 0) at which its sampling stops
UNION_ROUNDS = 8
UNION_FLOOR = 1e-4  # what is left out, and what so many draws may not have met
UNION_SHAPE = (16, 256)  # replicates and draws of a round; each draw is counted four times
RESAMPLING = 1_000  # the stream of random numbers that resampling uses


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
    check_gaussians(mu[None], cov[None], torch.ones_like(mu, dtype=torch.bool)[None])
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
        self.factor = jittered_cholesky(sites.cov[0])
        self.n, self.r, self.k, self.seed = len(self.mean), r, k, seed
        self.y = self.mean.new_empty(self.n, r, k)
        self.log_w = self.mean.new_zeros(r, k)
        self.settled = self.mean.new_zeros(r)  # log mean weights folded in by resampling
        self.rng = np.random.default_rng([seed, self.n, RESAMPLING])

    def advance(self, start: int, stop: int) -> None:
        """Draw coordinates start to stop; resample replicates whose weights have drifted apart."""
        u = points(self.n, self.k, self.r, self.seed, slice(start, stop))
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
        self.factor = jittered_cholesky(cov).float()
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
    u = torch.from_numpy(points(dimension, k, r, seed, stream=number))
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


def points(
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


def jittered_cholesky(cov: Float[Tensor, "n n"]) -> Float[Tensor, "n n"]:
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
