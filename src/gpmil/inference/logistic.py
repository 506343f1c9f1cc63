"""Inference of VGPMIL (Haussmann et al. 2017): logistic likelihood, Jaakkola's bound, q(h).

    p(h_i | f_i) = sigmoid(f_i)^h_i (1 - sigmoid(f_i))^(1 - h_i)                  eq. (hgf)
    p(y_b | h_b) = H^G_b / (H + 1),  G_b = 1[y_b = max h_b]                       eq. (ygh_vgpmil)

The logistic is bounded below by a Gaussian with one parameter xi_i per instance,

    log sigmoid(f) >= log sigmoid(xi) + (f - xi)/2 - l(xi) (f^2 - xi^2),  l(xi) = tanh(xi/2)/(4 xi),

and q(u) q(h) with q(h_i = 1) = pi_i maximises what remains, one factor after the other:

    R = I + W' 2 l(xi) W,  w = R^-1 W'(pi - 1/2 - 2 l(xi) c)                      q(u), whitened
    xi_i^2 = E[f_i^2] = (c + W w)_i^2 + (W R^-1 W')_ii + (Kxx - W W')_ii          FITC's diagonal
    logit pi_i = E[f_i] +- log(H) P(all others negative)                          q(h)

The sign is that of the bag. Log odds s = logit(pi) are kept in place of pi, so that nothing
saturates.

With a slide effect, f_i + e_b in place of f_i, e_b ~ N(0, tau^2), the bounded likelihood is a
Gaussian of (u, e) still, and q(u, e) q(h) the best of its kind. With theta = 2 l(xi),

    q(e_b | u) = N(a_b - v_b'(L^-1 u - w), 1 / p_b)                               p, v and a by bag
    p_b = tau^-2 + sum_i theta_i,  v_b = W_b'theta_b / p_b

and R loses p_b v_b v_b' for every bag. Given u and e instances are independent as before.
"""

import functools
import itertools
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from scipy.special import expit, log_ndtr
from torch import Tensor

from gpmil.process.sparse_gp import Posterior, SparseGP

logger = logging.getLogger("gpmil")
CHUNK_ROWS = 8192  # rows of W in float64 at a time
SETTLED = 1e-6  # relative change of w in an iteration that counts as converged
HERMITE, WIDE = 96, 1.5  # nodes of the expectation of a sigmoid, up to which deviation
REACH = 6.5  # deviations of an effect that are gone through
EXPECTED_MAX = ("product", "largest")


# --- Bags -----------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Columns:
    """The bags, largest first, and the rows of their 1st, 2nd, 3rd ... instances.

    Column k holds the k-th instance of every bag that has one: updates that must be made one
    after the other inside a bag run over the columns, for all bags at once.
    """

    rows: list[Int[np.ndarray, " _"]]
    sign: Float[np.ndarray, " B"]  # +1 for positive bags, in this order
    order: Int[np.ndarray, " B"]  # the bags in this order
    offsets: Int[np.ndarray, " B1"]  # of the bags as given

    @classmethod
    def build(cls, offsets: Int[np.ndarray, " B1"], positive: Bool[np.ndarray, " B"]) -> "Columns":
        """From where bags begin and which are positive."""
        sizes = np.diff(offsets)
        order = np.argsort(-sizes, kind="stable")
        first, descending = offsets[:-1][order], sizes[order]
        reach = np.searchsorted(-descending, -np.arange(sizes.max(initial=0)), side="left")
        rows = [first[:k] + i for i, k in enumerate(reach)]
        return cls(rows, np.where(positive[order], 1.0, -1.0), order, offsets)

    def log_none(self, s: Float[np.ndarray, " N"]) -> Float[np.ndarray, " B"]:
        """log prod_i (1 - pi_i) of every bag, largest first."""
        return -np.add.reduceat(softplus(s), self.offsets[:-1])[self.order]


def softplus(s: Float[np.ndarray, "*n"]) -> Float[np.ndarray, "*n"]:
    """log(1 + e^s) = -log(1 - sigmoid(s))."""
    return np.logaddexp(0.0, s)


def update_labels(
    s: Float[np.ndarray, " N"], Ef: Float[np.ndarray, " N"], bags: Columns, log_H: float
) -> Float[np.ndarray, " N"]:
    """q(h), one instance after the other: each step maximises the bound in its own pi_i."""
    s, log_none = s.copy(), bags.log_none(s)
    for rows in bags.rows:
        k = len(rows)
        own = softplus(s[rows])
        # E[G_b | h_i = 1] - E[G_b | h_i = 0] = +- prod_{j != i} (1 - pi_j)
        s[rows] = Ef[rows] + bags.sign[:k] * log_H * np.exp(log_none[:k] + own)
        log_none[:k] += own - softplus(s[rows])
    return s


def update_labels_by_largest(
    s: Float[np.ndarray, " N"], Ef: Float[np.ndarray, " N"], bags: Columns, log_H: float
) -> Float[np.ndarray, " N"]:
    """q(h) as the original code has it: all at once, E[max of the others] ~ their largest pi."""
    sizes, begin = np.diff(bags.offsets), bags.offsets[:-1]
    largest = np.maximum.reduceat(s, begin)
    # the largest of the others is the second largest, at the first instance that is the largest
    where = np.flatnonzero(s == np.repeat(largest, sizes))
    bag = np.repeat(np.arange(len(sizes)), sizes)
    top = where[np.unique(bag[where], return_index=True)[1]]
    rest = s.copy()
    rest[top] = -np.inf
    others = np.repeat(largest, sizes)
    others[top] = np.maximum.reduceat(rest, begin)
    sign = np.empty(len(sizes))
    sign[bags.order] = bags.sign
    # 2 y + m - 2 y m - 1 = +- (1 - m)
    return Ef + np.repeat(sign, sizes) * log_H * expit(-others)


# --- q(u) -----------------------------------------------------------------------------------------
def curvature(xi: Float[Tensor, " n"]) -> Float[Tensor, " n"]:
    """2 l(xi) = tanh(xi/2) / (2 xi), 1/4 at zero."""
    small = xi.abs() < 1e-3
    safe = torch.where(small, 1.0, xi)
    return torch.where(small, 0.25 - xi.square() / 48, torch.tanh(safe / 2) / (2 * safe))


@dataclass(frozen=True)
class Problem:
    """The training cohort as inference sees it."""

    chunks: list[Float[Tensor, "_ M"]]  # W, in the storage dtype
    residual: Float[Tensor, " N"]  # diag(Kxx - W W'), FITC's variance
    c: float
    bags: Columns
    effect: float = 0.0  # tau

    @functools.cached_property
    def bag(self) -> Int[Tensor, " N"]:
        """The bag of every instance."""
        sizes = np.diff(self.bags.offsets)
        return torch.from_numpy(np.repeat(np.arange(len(sizes)), sizes)).to(self.residual.device)

    def rows(self) -> list[slice]:
        """Where the chunks lie."""
        ends = np.cumsum([0, *(len(W) for W in self.chunks)])
        return [slice(int(a), int(b)) for a, b in itertools.pairwise(ends)]


def prepare(
    gp: SparseGP,
    inputs: Callable[[slice], Tensor],
    offsets: Int[np.ndarray, " B1"],
    positive: Bool[np.ndarray, " B"],
    c: float,
    dtype: torch.dtype = torch.float64,
) -> Problem:
    """Whitened features of every instance; `inputs(rows)` gives the kernel's inputs."""
    chunks, residual = [], []
    for start in range(0, int(offsets[-1]), CHUNK_ROWS):
        x = inputs(slice(start, min(start + CHUNK_ROWS, int(offsets[-1]))))
        W = gp.whiten(x)
        residual.append((gp.kernel.diagonal(x) - W.square().sum(1)).clamp(min=0))
        chunks.append(W.to(dtype))
    return Problem(chunks, torch.cat(residual), c, Columns.build(offsets, positive), gp.effect)


class Effects(NamedTuple):
    """q(e_b | u) of every bag: its mean at u = L w, how it leans on u, and its precision."""

    mean: Float[Tensor, " B"]  # a
    lean: Float[Tensor, "B M"]  # v
    precision: Float[Tensor, " B"]  # p

    def divergence(self, q: Posterior, tau: float) -> float:
        """E_u KL(q(e | u) | p(e)), summed over the bags."""
        square = self.mean.square() + q.shrink(self.lean).square().sum(0) + 1 / self.precision
        log_ratio = (tau**2 * self.precision).log()
        return float((square / tau**2 - 1 + log_ratio).sum()) / 2


def update_process(
    problem: Problem, s: Float[np.ndarray, " N"], xi: Float[Tensor, " N"]
) -> tuple[Posterior, Effects | None]:
    """q(u), or q(u, e), given q(h) and xi."""
    pull = torch.from_numpy(expit(s) - 0.5).to(xi.device)
    theta = curvature(xi)
    M = problem.chunks[0].shape[1]
    R = torch.eye(M, dtype=torch.float64, device=xi.device)
    b = torch.zeros(M, dtype=torch.float64, device=xi.device)
    for rows, stored in zip(problem.rows(), problem.chunks):
        W = stored.double()
        # R = I + W' 2 l(xi) W,   R w = W'(pi - 1/2 - 2 l(xi) c)
        R.addmm_((theta[rows, None] * W).mT, W)
        b += W.mT @ (pull[rows] - theta[rows] * problem.c)
    if problem.effect:
        lean, p, pulled = _shared(problem, theta, pull)
        # u with e taken out: R - sum_b lean lean' / p
        R -= lean.mT @ (lean / p[:, None])
        b -= lean.mT @ (pulled / p)
    R = (R + R.mT) / 2
    chol = torch.linalg.cholesky(R)
    q = Posterior(torch.cholesky_solve(b[:, None], chol)[:, 0], R, chol)
    return q, Effects((pulled - lean @ q.w) / p, lean / p[:, None], p) if problem.effect else None


def _shared(
    problem: Problem, theta: Float[Tensor, " N"], pull: Float[Tensor, " N"]
) -> tuple[Float[Tensor, "B M"], Float[Tensor, " B"], Float[Tensor, " B"]]:
    """W_b'theta_b, p_b and sum_i (pi_i - 1/2 - theta_i c) of every bag."""
    bag, B = problem.bag, len(problem.bags.sign)
    lean = theta.new_zeros(B, problem.chunks[0].shape[1])
    for rows, stored in zip(problem.rows(), problem.chunks):
        lean.index_add_(0, bag[rows], theta[rows, None] * stored.double())
    p = theta.new_full((B,), problem.effect**-2).index_add_(0, bag, theta)
    return lean, p, theta.new_zeros(B).index_add_(0, bag, pull - theta * problem.c)


def moments(
    problem: Problem, q: Posterior, effects: Effects | None = None
) -> tuple[Float[Tensor, " N"], Float[Tensor, " N"]]:
    """E[f_i] and E[f_i^2] under q(u), the effect of the bag included."""
    inverse = torch.cholesky_inverse(q.chol_R)
    mean, variance = [], []
    for rows, stored in zip(problem.rows(), problem.chunks):
        W, bag = stored.double(), problem.bag[rows]
        known = problem.c + W @ q.w
        if effects is not None:
            known, W = known + effects.mean[bag], W - effects.lean[bag]
        mean.append(known)
        own = ((W @ inverse) * W).sum(1)
        variance.append(own if effects is None else own + 1 / effects.precision[bag])
    Ef = torch.cat(mean)
    return Ef, Ef.square() + torch.cat(variance) + problem.residual


def bound(
    problem: Problem,
    q: Posterior,
    xi: Float[Tensor, " N"],
    Eff: Float[Tensor, " N"],
    Ef: Float[np.ndarray, " N"],
    s: Float[np.ndarray, " N"],
    log_H: float,
    effects: Effects | None = None,
) -> float:
    """The evidence bound: Jaakkola's in place of the likelihood, less the two divergences."""
    pi, log_none = expit(s), problem.bags.log_none(s)
    # sum_i (pi - 1/2) E f - l(xi) (E f^2 - xi^2) - log 2 cosh(xi/2)
    gap = float((curvature(xi) / 2 * (Eff - xi.square())).sum())
    cosh = float((xi.abs() / 2 + torch.log1p(torch.exp(-xi.abs()))).sum())
    fit = float(((pi - 0.5) * Ef).sum()) - gap - cosh
    entropy = float((softplus(s) - s * pi).sum())
    # log H E[G_b] - log(H + 1)
    right = np.where(problem.bags.sign > 0, -np.expm1(log_none), np.exp(log_none))
    labels = log_H * float(right.sum()) - len(right) * float(np.logaddexp(0.0, log_H))
    trace = torch.cholesky_inverse(q.chol_R).diagonal().sum()
    log_det = 2 * q.chol_R.diagonal().log().sum()
    kl = float(trace + q.w @ q.w - len(q.w) + log_det) / 2
    if effects is not None:
        kl += effects.divergence(q, problem.effect)
    return fit + entropy + labels - kl


class Solution(NamedTuple):
    """q(u), the log odds of q(h), and how they were reached."""

    q: Posterior
    s: Float[np.ndarray, " N"]
    n_iter: int
    converged: bool
    residual: float  # relative change of w in the last iteration
    trace: list[float]  # the bound after every iteration


def sweeps(
    problem: Problem,
    pi: Float[np.ndarray, " N"],
    xi: Float[np.ndarray, " N"],
    H: float,
    max_iter: int,
    tol: float,
    expected_max: str = "product",
) -> Solution:
    """q(u), xi and q(h) in turn, from the given start, until w moves by less than `tol`."""
    update = {"product": update_labels, "largest": update_labels_by_largest}[expected_max]
    log_H = float(np.log(H))
    s = np.log(pi) - np.log1p(-pi)
    xi_ = torch.from_numpy(xi).to(problem.residual.device)
    w = torch.zeros(problem.chunks[0].shape[1], dtype=torch.float64, device=xi_.device)
    trace: list[float] = []
    while True:
        q, effects = update_process(problem, s, xi_)
        mean, Eff = moments(problem, q, effects)
        xi_, Ef = Eff.sqrt(), mean.cpu().numpy()
        s = update(s, Ef, problem.bags, log_H)
        trace.append(bound(problem, q, xi_, Eff, Ef, s, log_H, effects))
        logger.info("iteration %d: bound %.6f", len(trace), trace[-1])
        size = q.w.norm().clamp(min=torch.finfo(torch.float64).tiny)  # w = 0: nothing in reach of Z
        residual, w = float((q.w - w).norm() / size), q.w
        if residual <= tol or len(trace) == max_iter:
            break
    return Solution(q, s, len(trace), residual <= (tol or SETTLED), residual, trace)


# --- Predictions ----------------------------------------------------------------------------------
def log_expected_sigmoid(
    mean: Float[np.ndarray, " n"], std: Float[np.ndarray, " n"]
) -> Float[np.ndarray, " n"]:
    """log E[sigmoid(f)], f ~ N(mean, std^2), to about 1e-12.

    Gauss-Hermite quadrature where f is narrow. Where it is wide the sigmoid is a step to those
    nodes, and the other factor is the smooth one: E[sigmoid(f)] = E[Phi((mean - L) / std)], L
    logistic.
    """
    wide = std > WIDE
    out = np.empty(len(mean))
    out[~wide] = _narrow(mean[~wide], std[~wide])
    out[wide] = _wide(mean[wide], std[wide])
    return out


def log_none_shared(
    mean: Float[np.ndarray, " n"], std: Float[np.ndarray, " n"], tau: float
) -> float:
    """log E[prod_i E[sigmoid(-(f_i + e))]] of one bag, e ~ N(0, tau^2) shared, to about 1e-6.

    A sum over a lattice of e, as fine as the integrand is narrow, around its mode. Both come from
    E[sigmoid(f)] ~ sigmoid(m / sqrt(1 + pi s^2 / 8)), the numbers themselves do not.
    """
    scale = np.sqrt(1 + np.pi / 8 * np.square(std))
    # e / tau^2 = -sum_i sigmoid / scale at the mode: the left side rises, the right one falls
    low, high = -len(mean) * tau**2, 0.0
    for _ in range(60):
        mode = (low + high) / 2
        p = expit((mean + mode) / scale)
        low, high = (mode, high) if mode / tau**2 < -(p / scale).sum() else (low, mode)
    width = (tau**-2 + (p * (1 - p) / scale**2).sum()) ** -0.5
    step = min(0.7 * width, 0.5)
    e = step * np.arange(np.ceil((mode - REACH * tau) / step), (mode + REACH * tau) / step)
    rough = -np.square(e / tau) / 2
    rough -= np.array([softplus((mean + x) / scale).sum() for x in e])
    e = e[rough > rough.max() - REACH**2 / 2]
    given = np.array([log_expected_sigmoid(-(mean + x), std).sum() for x in e])
    log_sum = np.logaddexp.reduce(given - np.square(e / tau) / 2)
    return min(float(log_sum + np.log(step / (tau * np.sqrt(2 * np.pi)))), 0.0)


def _narrow(mean: np.ndarray, std: np.ndarray) -> Float[np.ndarray, " n"]:
    x, weight = _hermite()
    f = mean[:, None] + std[:, None] * x
    return np.logaddexp.reduce(np.log(weight / np.sqrt(2 * np.pi)) - softplus(-f), axis=1)


@functools.cache
def _hermite() -> tuple[np.ndarray, np.ndarray]:
    return np.polynomial.hermite_e.hermegauss(HERMITE)


def _wide(mean: np.ndarray, std: np.ndarray) -> Float[np.ndarray, " n"]:
    # far below zero the mass lies where e^f does: E_m = e^(m + s^2/2) E_(-m - s^2)
    tail = mean < -np.square(std) / 2
    m = np.where(tail, -(mean + np.square(std)), mean)
    L = np.arange(-80, 80.25, 0.5)
    # density of the logistic, times the step of the trapezoid rule
    log_density = -np.abs(L) - 2 * softplus(-np.abs(L)) + np.log(0.5)
    found = np.logaddexp.reduce(log_density + log_ndtr((m[:, None] - L) / std[:, None]), axis=1)
    return np.minimum(found + np.where(tail, mean + np.square(std) / 2, 0.0), 0.0)
