"""Inference of q(u) and q(m): the paper's sweeps, its fixed point by Newton, the direct optimum.

With W the whitened features, H = Sigma W and R = I + W'H (sparse_gp.py), all in terms of w:

    mu = c + H w                     eq. (mu_mb)
    E  = E_q(m)[m] at mu             eqs. (qmi_0), (qmi_1); truncated.py
    w  = R^-1 W'(E - c)              eqs. (sigma_u), (mu_u)

Only H is stored: W'x = H'(P x), P = Sigma^-1 = I + lambda C sparse. One pass over H, a chunk of
bags at a time, gives E and everything summed from it.
"""

import itertools
import logging
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import scipy.sparse as sp
import torch
from jaxtyping import Float, Int
from sklearn.exceptions import ConvergenceWarning
from torch import Tensor

from gpmil import coupling
from gpmil.sparse_gp import SparseGP
from gpmil.truncated import Moments, moments

logger = logging.getLogger("gpmil")
CHUNK_ROWS = 8192  # rows of H in float64 at a time
WARM_SWEEPS = 4  # plain sweeps before Newton: most of the distance at a tenth of the cost
SHORTEST = 2.0**-6  # a line search that needs a shorter step than this gives up


@dataclass(frozen=True)
class Chunk:
    """Some whole bags: all that one pass needs of them."""

    H: Float[Tensor, "n M"]  # in the storage dtype
    sigma: Float[Tensor, " n"]
    offsets: Int[Tensor, " b1"]
    positive: Tensor  # (b,) bool
    precision: Tensor | None  # P as sparse CSR; None where lambda = 0
    rows: slice

    def moments(self, mu: Float[Tensor, " n"]) -> Moments:
        """q(m) of these bags at mu."""
        return moments(mu, self.sigma, self.positive, self.offsets)

    def unsmooth(self, x: Tensor) -> Tensor:
        """P x."""
        return x if self.precision is None else self.precision @ x

    def per_bag(self, x: Float[Tensor, "n M"]) -> Float[Tensor, "b M"]:
        """Sum over the instances of each bag."""
        return torch.segment_reduce(x, "sum", offsets=self.offsets, axis=0, initial=0.0)


@dataclass(frozen=True)
class Problem:
    """The training cohort as inference sees it."""

    chunks: list[Chunk]
    R: Float[Tensor, "M M"]
    chol_R: Float[Tensor, "M M"]
    c: float
    n_instances: int

    def solve_R(self, x: Float[Tensor, " M"]) -> Float[Tensor, " M"]:
        """R^-1 x."""
        return torch.cholesky_solve(x[:, None], self.chol_R)[:, 0]


class Solution(NamedTuple):
    """w, and how it was reached."""

    w: Float[Tensor, " M"]
    n_iter: int
    converged: bool
    residual: float


def prepare(
    gp: SparseGP,
    inputs: Callable[[np.ndarray], Tensor],
    adjacency: sp.csr_array,
    offsets: Int[np.ndarray, " b1"],
    positive: np.ndarray,
    strength: float,
    c: float,
    dtype: torch.dtype = torch.float64,
) -> Problem:
    """Compute H, sigma and R, part by part of the coupling; `inputs(rows)` gives kernel inputs.

    H is stored in `dtype`; factorisations and sums are float64 always.
    """
    device = gp.L.device
    N, M = int(offsets[-1]), len(gp.L)
    H = torch.empty(N, M, dtype=dtype, device=device)
    sigma = torch.empty(N, dtype=torch.float64, device=device)
    R = torch.eye(M, dtype=torch.float64, device=device)
    for part in coupling.parts(adjacency, offsets, strength, device):
        W = gp.whiten(inputs(part.rows.cpu().numpy()))
        smoothed = part.apply(W)
        # R = I + W' Sigma W
        R += W.mT @ smoothed
        H[part.rows] = smoothed.to(dtype)
        sigma[part.rows] = part.diagonal().sqrt()
    R = (R + R.mT) / 2
    chunks = _chunks(H, sigma, adjacency, offsets, positive, strength)
    return Problem(chunks, R, torch.linalg.cholesky(R), c, N)


def _chunks(
    H: Tensor,
    sigma: Tensor,
    adjacency: sp.csr_array,
    offsets: np.ndarray,
    positive: np.ndarray,
    strength: float,
) -> list[Chunk]:
    """Whole bags, about CHUNK_ROWS rows together, in the order of the cohort."""
    group = offsets[:-1] // CHUNK_ROWS
    starts = np.concatenate([[0], np.flatnonzero(np.diff(group)) + 1, [len(group)]])
    chunks = []
    for first, last in itertools.pairwise(starts):
        rows = slice(int(offsets[first]), int(offsets[last]))
        local = sp.csr_array(adjacency[rows, rows])
        coupled = strength > 0 and local.nnz > 0
        chunks.append(
            Chunk(
                H[rows],
                sigma[rows],
                torch.from_numpy(offsets[first : last + 1] - offsets[first]).to(H.device),
                torch.from_numpy(positive[first:last]).to(H.device),
                coupling.precision_matrix(local, strength, H.device) if coupled else None,
                rows,
            )
        )
    return chunks


# --- The paper: Algorithm 1 -------------------------------------------------------------------


def sweeps(problem: Problem, expectation: Float[Tensor, " N"], max_iter: int, tol: float):
    """Exactly `max_iter` sweeps from a given E[m] (Algorithm 1 of the paper)."""
    w = weights(problem, expectation)
    for _ in range(max_iter - 1):
        # E at mu = c + H w, then w = R^-1 W'(E - c)
        w = problem.solve_R(pull(problem, w))
    F = pull(problem, w) - problem.R @ w
    residual = relative(F, problem.R @ w)
    logger.info("%d sweeps; residual of the fixed point %.1e", max_iter, residual)
    return Solution(w, max_iter, residual < tol, residual)


def weights(problem: Problem, expectation: Float[Tensor, " N"]) -> Float[Tensor, " M"]:
    """w = R^-1 W'(E - c) for a given E[m] (eq. mu_u)."""
    total = torch.zeros(len(problem.R), dtype=torch.float64, device=problem.R.device)
    for chunk in problem.chunks:
        centred = expectation[chunk.rows] - problem.c
        total += chunk.H.double().mT @ chunk.unsmooth(centred)
    return problem.solve_R(total)


def pull(problem: Problem, w: Float[Tensor, " M"]) -> Float[Tensor, " M"]:
    """W'(E(w) - c)."""
    total = torch.zeros_like(w)
    for chunk in problem.chunks:
        H = chunk.H.double()
        m = chunk.moments(problem.c + H @ w)
        total += H.mT @ chunk.unsmooth(m.mean - problem.c)
    return total


# --- The paper's fixed point, converged -------------------------------------------------------


def newton(
    problem: Problem,
    max_iter: int,
    tol: float,
    expectation: Float[Tensor, " N"] | None = None,
) -> Solution:
    """The fixed point F(w) = W'(E(w) - c) - R w = 0 by Newton steps after a few sweeps.

    Starts at E[m] = 1 in positive bags and -1 in negative ones, or at a given E[m]. A step that
    does not bring the residual down even when shortened is replaced by plain sweeps, which
    contract. One more step is taken once the residual is below `tol`: where the problem is stiff
    w is then still off by a hundred times as much.
    """
    if expectation is None:
        expectation = label_signs(problem)
    w = _plain(problem, weights(problem, expectation))
    F, slope = fixed_point(problem, w)
    residual = relative(F, problem.R @ w)
    for step in range(1, max_iter + 1):
        last = residual < tol
        delta = _toward(problem.R - slope, F)
        w, F, slope = _shorten(problem, w, F, delta, accept_below=tol)
        residual = relative(F, problem.R @ w)
        logger.debug("newton step %d: residual %.2e", step, residual)
        if last and residual < tol:
            return Solution(w, step, True, residual)
    return _finish(w, max_iter, residual, tol)


def label_signs(problem: Problem) -> Float[Tensor, " N"]:
    """E[m] = 1 in positive bags, -1 in negative ones."""
    signs = [
        torch.where(chunk.positive, 1.0, -1.0).double().repeat_interleave(chunk.offsets.diff())
        for chunk in problem.chunks
    ]
    return torch.cat(signs)


def fixed_point(
    problem: Problem, w: Float[Tensor, " M"]
) -> tuple[Float[Tensor, " M"], Float[Tensor, "M M"]]:
    """F(w) and W'D H, D = dE/dmu (diagonal plus one rank a positive bag)."""
    F, slope = -problem.R @ w, torch.zeros_like(problem.R)
    for chunk in problem.chunks:
        H = chunk.H.double()
        W = chunk.unsmooth(H)
        m = chunk.moments(problem.c + H @ w)
        F += W.mT @ (m.mean - problem.c)
        # W'D H = W' diag(slope) H - sum_b (W_b' left_b)(H_b' right_b)'
        slope += W.mT @ (m.slope[:, None] * H)
        slope -= chunk.per_bag(m.left[:, None] * W).mT @ chunk.per_bag(m.right[:, None] * H)
    return F, slope


def _toward(jacobian: Tensor, F: Tensor) -> Tensor:
    """Newton's step (R - W'D H) delta = F, bent to follow the flow of the sweeps.

    The matrix is not symmetric for lambda > 0, so LU. Where its symmetric part is indefinite
    Newton would run to an unstable point; with the negative curvatures turned round, F'delta > 0.
    """
    symmetric = (jacobian + jacobian.mT) / 2
    if torch.linalg.cholesky_ex(symmetric).info:
        values, vectors = torch.linalg.eigh(symmetric)
        jacobian = jacobian + (vectors * (values.abs().clamp(min=1e-3) - values)) @ vectors.mT
    return torch.linalg.solve(jacobian, F)


def _shorten(
    problem: Problem, w: Tensor, F: Tensor, delta: Tensor, accept_below: float
) -> tuple[Tensor, ...]:
    """The longest of delta, delta/2, ... that is progress.

    Progress is a smaller |R^-1 F| (the length of a sweep), or F still not pointing back along
    delta (on the way out of an unstable region |F| grows first), or a residual `accept_below`,
    where |F| is rounding and need not fall.
    """
    merit, length = problem.solve_R(F).norm(), 1.0
    while length >= SHORTEST and torch.isfinite(delta).all():
        trial = w + length * delta
        F_trial, slope = fixed_point(problem, trial)
        lower = problem.solve_R(F_trial).norm() < (1 - 1e-4 * length) * merit
        forward = F_trial @ delta > 0
        if lower or forward or relative(F_trial, problem.R @ trial) < accept_below:
            return trial, F_trial, slope
        length /= 2
    w = _plain(problem, w)
    return w, *fixed_point(problem, w)


def _plain(problem: Problem, w: Tensor) -> Tensor:
    for _ in range(WARM_SWEEPS):
        w = problem.solve_R(pull(problem, w))
    return w


# --- The collapsed bound, maximised directly --------------------------------------------------


def direct(problem: Problem, max_iter: int, tol: float) -> Solution:
    """Maximise L(w) = sum_b log Z_b(c + H_b w) - w'w / 2 by Newton with a line search."""
    w = torch.zeros_like(problem.R[0])
    value, gradient, curvature = collapsed_bound(problem, w)
    residual = float("inf")
    for step in range(1, max_iter + 1):
        last = residual < tol  # one more step below tol, as in `newton`
        delta = _ascent(curvature, gradient)
        w, value, gradient, curvature = _climb(problem, w, value, gradient, delta)
        residual = relative(gradient, w)
        logger.debug("direct step %d: bound %.6f, residual %.2e", step, value, residual)
        if last and residual < tol:
            return Solution(w, step, True, residual)
    return _finish(w, max_iter, residual, tol)


def collapsed_bound(
    problem: Problem, w: Float[Tensor, " M"]
) -> tuple[float, Float[Tensor, " M"], Float[Tensor, "M M"]]:
    """L(w), its gradient H'gamma - w, and the Hessian of -L."""
    value = -0.5 * float(w @ w)
    gradient, curvature = -w, torch.eye(len(w), dtype=w.dtype, device=w.device)
    for chunk in problem.chunks:
        H = chunk.H.double()
        m = chunk.moments(problem.c + H @ w)
        value += float(m.log_z.sum())
        gradient = gradient + H.mT @ m.gamma
        # -d2 log Z_b / dw2 = -H_b' diag(curvature) H_b + (H_b' pull)(H_b' pull)'
        curvature -= H.mT @ (m.curvature[:, None] * H)
        pulled = chunk.per_bag(m.pull[:, None] * H)
        curvature += pulled.mT @ pulled
    return value, gradient, curvature


def _ascent(curvature: Tensor, gradient: Tensor) -> Tensor:
    """Newton's direction; where -L is not convex, with the curvatures' absolute values."""
    factor, failed = torch.linalg.cholesky_ex(curvature)
    if not failed:
        return torch.cholesky_solve(gradient[:, None], factor)[:, 0]
    values, vectors = torch.linalg.eigh((curvature + curvature.mT) / 2)
    return vectors @ ((vectors.mT @ gradient) / values.abs().clamp(min=1e-3))


def _climb(problem: Problem, w: Tensor, value: float, gradient: Tensor, delta: Tensor):
    """The first of delta, delta/2, ... with enough of the promised rise (Armijo)."""
    promised, length = float(gradient @ delta), 1.0
    rounding = 1e-13 * abs(value)
    while True:
        trial = w + length * delta
        found = collapsed_bound(problem, trial)
        if found[0] >= value + 1e-4 * length * promised - rounding or length < 1e-8:
            return trial, *found
        length /= 2


# --- Shared -----------------------------------------------------------------------------------


def relative(F: Tensor, scale: Tensor) -> float:
    """|F| / |scale|."""
    return float(F.norm() / scale.norm().clamp(min=torch.finfo(torch.float64).tiny))


def _finish(w: Tensor, max_iter: int, residual: float, tol: float) -> Solution:
    if residual >= tol:
        warnings.warn(
            f"No convergence in {max_iter} steps: relative residual {residual:.1e}, tol {tol:.1e}. "
            "Raise max_iter, or look at the settings: a very large variance or coupling, or "
            "features far from unit scale (standardize=False), make the problem stiff.",
            ConvergenceWarning,
            stacklevel=4,
        )
    return Solution(w, max_iter, residual < tol, residual)
