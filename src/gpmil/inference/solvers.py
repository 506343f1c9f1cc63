"""Inference of q(u) and q(m): the paper's sweeps, its fixed point by Newton, the direct optimum.

With W the whitened features, H = Sigma W and R = I + W'H (sparse_gp.py), all in terms of w:

    mu = c + H w                     eq. (mu_mb)
    E  = E_q(m)[m] at mu             eqs. (qmi_0), (qmi_1); truncated.py
    w  = R^-1 W'(E - c)              eqs. (sigma_u), (mu_u)

One pass over the pieces of the cohort (pieces.py) gives E and everything summed from it. E and
log Z are those of a likelihood (moments/likelihood.py): patches independent, as in the paper, or
coupled.
"""

import functools
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar, cast

import numpy as np
import scipy.sparse as sp
import torch
from jaxtyping import Float, Int
from sklearn.exceptions import ConvergenceWarning
from torch import Tensor

from gpmil.fast.lanes import in_lanes
from gpmil.inference import fused, leave_out
from gpmil.inference.leave_out import Optimum
from gpmil.inference.pieces import Chunk, Piece, bend
from gpmil.inference.steps import (
    Solution,
    ascent,
    few_columns_here,
    mended,
    relative,
    stalled,
    steps_left,
)
from gpmil.inference.stores import Gathered, Source, gather
from gpmil.moments.likelihood import Family
from gpmil.moments.taught import patches
from gpmil.process.sparse_gp import SparseGP
from gpmil.warn import warn_caller

logger = logging.getLogger("gpmil")
Terms = TypeVar("Terms", bound=tuple[Any, ...])
Look = Callable[..., tuple[Any, ...]]  # the bound at w, its gradient, and what more there is
SIDE_BY_SIDE = 8  # chunks from which threads pay
WARM_SWEEPS = 4  # plain sweeps before Newton: most of the distance at a tenth of the cost
HESSIAN = 15.0  # gradients that it costs: it is kept while fewer steps with it lead to the end,
PATIENCE = 6  # or for so many steps, if none of them had to be shortened
ON_A_GPU = 5.0, 3  # the same where products are quick beside the passes in between
FROM_R = 0.3  # of R - I, as a first guess at the Hessian
EVERY = 8  # of the pieces of a large cohort make the sample that the direct solver starts with
FEWEST = 4  # pieces in such a sample
NEAR = 1.0  # relative residual at which a sample has served: its optimum is not the one of all
SETTLED = 1e-6  # residual below which steps are too short to mend a Hessian by: all is rounding
SHORTEST = 2.0**-6  # a line search that needs a shorter step than this gives up


@dataclass(frozen=True)
class Problem:
    """The training cohort as inference sees it."""

    chunks: Sequence[Piece]
    R: Float[Tensor, "M M"]
    chol_R: Float[Tensor, "M M"]
    c: float
    n_instances: int
    constant: float  # of the collapsed bound
    share: float = 1.0  # of the cohort that the pieces are; the prior on w weighs as much
    less: Sequence[Piece] = ()  # bags of the pieces that do not count

    def solve_R(self, x: Float[Tensor, " M"]) -> Float[Tensor, " M"]:
        """R^-1 x."""
        return torch.cholesky_solve(x[:, None], self.chol_R)[:, 0]


def prepare(
    gp: SparseGP,
    inputs: Callable[[Tensor], Tensor],
    adjacency: sp.csr_array,
    offsets: Int[np.ndarray, " b1"],
    positive: np.ndarray,
    strength: float,
    c: float,
    dtype: torch.dtype = torch.float64,
    likelihood: Family = patches,
    store: str = "memory",
) -> Problem:
    """Compute H, sigma and R, part by part of the coupling; `inputs(rows)` gives kernel inputs.

    H is stored in `dtype`; factorisations and sums are float64 always. `store` says where H is kept
    (stores.py).
    """
    source = Source(gp, inputs, adjacency, offsets, positive, strength, dtype, likelihood)
    chunks, found = gather(source, store)
    return assemble(chunks, found, c, int(offsets[-1]))


def assemble(chunks: Sequence[Piece], found: Gathered, c: float, n_instances: int) -> Problem:
    """The problem from the pieces and the sums of the first pass over all of them."""
    # R = I + W' Sigma W
    R = found.gram + torch.eye(len(found.gram), dtype=torch.float64, device=found.gram.device)
    chol_R = torch.linalg.cholesky(R)
    return Problem(chunks, R, chol_R, c, n_instances, _constant(R, chol_R, found.trace))


def _constant(R: Tensor, chol_R: Tensor, trace: float) -> float:
    """The part of the evidence bound that w does not enter.

    -sum_b tr(Sigma_b V_b)/2 - (tr R^-1 - M + log|R|)/2 with V_b = K_bb - W_b W_b' + W_b R^-1 W_b'
    and sum_b W_b' Sigma_b W_b = R - I, so that the traces of R^-1 cancel.
    """
    spread = trace - float(R.trace() - len(R)) + len(R)
    return -(spread - len(R) + 2 * float(chol_R.diagonal().log().sum())) / 2


# --- The paper: Algorithm 1 -------------------------------------------------------------------


def sweeps(
    problem: Problem, expectation: Float[Tensor, " N"], max_iter: int, tol: float
) -> Solution:
    """Exactly `max_iter` sweeps from a given E[m] (Algorithm 1 of the paper)."""
    w = weights(problem, expectation)
    fast = fused.advance(problem.chunks, problem.chol_R, problem.c, w, max_iter - 1)
    if fast is None:
        fast = _compiled(problem, w, max_iter - 1)
    w, trace = _sweep(problem, w, max_iter - 1) if fast is None else fast
    log_z, pulled = pull(problem, w)
    trace.append(float(log_z) - float(w @ w) / 2)
    residual = relative(pulled - problem.R @ w, problem.R @ w)
    logger.info("%d sweeps; residual of the fixed point %.1e", max_iter, residual)
    return Solution(w, max_iter, residual < tol, residual, trace)


def _compiled(
    problem: Problem, w: Float[Tensor, " M"], count: int
) -> tuple[Tensor, list[float]] | None:
    """All sweeps in one compiled loop, where the cohort is one piece in memory."""
    piece = problem.chunks[0]
    if len(problem.chunks) > 1 or not isinstance(piece, Chunk) or piece.loop is None or count < 1:
        return None
    return piece.loop.sweeps(problem.chol_R, w, problem.c, count)


def _sweep(problem: Problem, w: Float[Tensor, " M"], count: int) -> tuple[Tensor, list[float]]:
    trace = w.new_zeros(max(count, 0))
    for k in range(count):
        # E at mu = c + H w, then w = R^-1 W'(E - c)
        log_z, pulled = pull(problem, w)
        trace[k] = log_z - w @ w / 2
        w = problem.solve_R(pulled)
    return w, trace.tolist()


def weights(problem: Problem, expectation: Float[Tensor, " N"]) -> Float[Tensor, " M"]:
    """w = R^-1 W'(E - c) for a given E[m] (eq. mu_u)."""
    return problem.solve_R(summed(problem, lambda piece: piece.weigh(expectation, problem.c))[0])


def pull(problem: Problem, w: Float[Tensor, " M"]) -> tuple[float | Tensor, Float[Tensor, " M"]]:
    """sum_b log Z_b and W'(E - c) at w."""
    return summed(problem, lambda piece: piece.pull(w, problem.c))


def _of_lane(terms: Callable[[Piece], Terms], pieces: Sequence[Piece]) -> Terms:
    return functools.reduce(_add, map(terms, pieces))


def summed(problem: Problem, terms: Callable[[Piece], Terms]) -> Terms:
    """The terms that the pieces of the cohort give, added up."""
    one_lane = functools.partial(_of_lane, terms)
    on_cpu = problem.R.device.type == "cpu"
    side_by_side = on_cpu and len(problem.chunks) >= SIDE_BY_SIDE
    found = in_lanes(problem.chunks, one_lane, _add, side_by_side)
    if not problem.less:
        return found
    return cast(Terms, tuple(x - y for x, y in zip(found, one_lane(problem.less))))


def _add(a: Terms, b: Terms) -> Terms:
    return cast(Terms, tuple(x + y for x, y in zip(a, b)))


# --- The paper's fixed point, converged -------------------------------------------------------


def newton(
    problem: Problem,
    max_iter: int,
    tol: float,
    expectation: Float[Tensor, " N"] | None = None,
    start: Float[Tensor, " M"] | None = None,
) -> Solution:
    """The fixed point F(w) = W'(E(w) - c) - R w = 0 by Newton steps after a few sweeps.

    Starts at E[m] = 1 in positive bags and -1 in negative ones, or at a given E[m] or w. A step
    that does not bring the residual down even when shortened is replaced by plain sweeps, which
    contract. One more step is taken once the residual is below `tol`: where the problem is stiff
    w is then still off by a hundred times as much.
    """
    if start is None:
        w = signed(problem) if expectation is None else weights(problem, expectation)
        start = _plain(problem, w)
    w = start
    F, slope, value = fixed_point(problem, w)
    residual, trace = relative(F, problem.R @ w), [value]
    for step in range(1, max_iter + 1):
        last = residual < tol
        delta = _toward(problem.R - slope, F)
        w, F, slope, value = _shorten(problem, w, F, delta, accept_below=tol)
        residual = relative(F, problem.R @ w)
        trace.append(value)
        logger.debug("newton step %d: residual %.2e", step, residual)
        if last and residual < tol:
            return Solution(w, step, True, residual, trace)
    return said(Solution(w, max_iter, residual < tol, residual, trace), tol)


def signed(problem: Problem) -> Float[Tensor, " M"]:
    """w = R^-1 W'(E - c) for E[m] = 1 in positive bags, -1 in negative ones."""
    return problem.solve_R(summed(problem, lambda piece: piece.weigh_signs(problem.c))[0])


def fixed_point(
    problem: Problem, w: Float[Tensor, " M"]
) -> tuple[Float[Tensor, " M"], Float[Tensor, "M M"], float]:
    """F(w), W'D H with D = dE/dmu, and the collapsed bound less its constant."""
    log_z, pulled, slope = summed(problem, lambda piece: piece.fixed_point(w, problem.c))
    return pulled - problem.R @ w, slope, log_z - float(w @ w) / 2


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
) -> tuple[Tensor, Tensor, Tensor, float]:
    """The longest of delta, delta/2, ... that is progress.

    Progress is a smaller |R^-1 F| (the length of a sweep), or F still not pointing back along
    delta (on the way out of an unstable region |F| grows first), or a residual `accept_below`,
    where |F| is rounding and need not fall.
    """
    merit, length = problem.solve_R(F).norm(), 1.0
    while length >= SHORTEST and torch.isfinite(delta).all():
        trial = w + length * delta
        F_trial, slope, value = fixed_point(problem, trial)
        lower = problem.solve_R(F_trial).norm() < (1 - 1e-4 * length) * merit
        forward = F_trial @ delta > 0
        if lower or forward or relative(F_trial, problem.R @ trial) < accept_below:
            return trial, F_trial, slope, value
        length /= 2
    w = _plain(problem, w)
    return w, *fixed_point(problem, w)


def _plain(problem: Problem, w: Tensor) -> Tensor:
    for _ in range(WARM_SWEEPS):
        w = problem.solve_R(pull(problem, w)[1])
    return w


# --- The collapsed bound, maximised directly --------------------------------------------------


def direct(
    problem: Problem, max_iter: int, tol: float, start: Float[Tensor, " M"] | None = None
) -> Solution:
    """Maximise L(w) = sum_b log Z_b(c + H_b w) - w'w / 2 by Newton with a line search.

    A Hessian costs as much as fifteen gradients. It is mended at every step, and a new one computed
    only after a step that had to be shortened, or after so many; at zero, far from the optimum, R
    does as well. Where H itself is computed for every pass, all that it can tell is taken from
    each: gradient and Hessian.
    """
    return said(maximise(problem, max_iter, tol, start), tol)


def maximise(problem: Problem, max_iter: int, tol: float, start: Tensor | None = None) -> Solution:
    """As `direct`, without its warning: for a sample, or a trial, that is only a place to start."""
    R = problem.R
    # elsewhere the bound may have several maxima, and a GPU shall climb to that of a CPU
    quick = R.is_cuda and all(isinstance(p, Chunk) and p.loop is not None for p in problem.chunks)
    worth = ON_A_GPU if quick else (HESSIAN, PATIENCE)
    with few_columns_here(R) as here:
        at_hand = replace(problem, R=R.to(here), chol_R=problem.chol_R.to(here))
        start = None if start is None else start.to(here)
        return _climbed(at_hand, max_iter, tol, start, *worth).on(R.device)


def _climbed(
    problem: Problem, max_iter: int, tol: float, start: Tensor | None, worth: float, patience: int
) -> Solution:
    w = _from_a_sample(problem, max_iter) if start is None else start
    look = collapsed_bound if any(piece.anew for piece in problem.chunks) else rise
    residual, age = float("inf"), 0
    real = look is not rise or bool(w.any())  # whether J is a Hessian, and no guess from R
    if real:
        value, gradient, J = collapsed_bound(problem, w)
    else:
        (value, gradient), J, age = rise(problem, w), _from_R(problem), 1
    trace, kept = [value], None
    for step in range(1, max_iter + 1):
        last = residual < tol  # one more step below tol, as in `newton`
        if real and (residual > SETTLED or kept is None):
            kept = J
        delta = ascent(J, gradient)
        found = climb(problem, w, value, gradient, delta, look)
        if found is None and age:  # an old Hessian led nowhere
            J, age, real = _curvature(problem, w), 0, True
            found = climb(problem, w, value, gradient, ascent(J, gradient), look)
        if found is None:
            return Solution(w, step, residual < tol, residual, trace, kept)
        shortened = not torch.equal(found[0], w + delta)
        J, age = mended(J, found[0] - w, gradient - found[2]), age + 1
        J, age = (found[3], 0) if len(found) > 3 else (J, age)
        before, (w, value, gradient) = residual, found[:3]
        residual = relative(gradient, w)
        trace.append(value)
        logger.debug("direct step %d: bound %.6f, residual %.2e", step, value, residual)
        if (last and residual < tol) or stalled(trace):
            return Solution(w, step, residual < tol, residual, trace, kept)
        if age and (shortened or age > patience) and steps_left(before, residual, tol) > worth:
            J, age, real = _curvature(problem, w), 0, True
    return Solution(w, max_iter, residual < tol, residual, trace, kept)


def _from_R(problem: Problem) -> Float[Tensor, "M M"]:
    """A guess at the Hessian of -L, I + H'D H: R = I + W'Sigma W is at hand, and D is below one."""
    eye = torch.eye(len(problem.R), dtype=torch.float64, device=problem.R.device)
    return problem.share * (FROM_R * problem.R + (1 - FROM_R) * eye)


def _curvature(problem: Problem, w: Float[Tensor, " M"]) -> Float[Tensor, "M M"]:
    """The Hessian of -L to lead the way."""
    J = summed(problem, lambda piece: (bend(piece, w, problem.c),))[0]
    J.diagonal().add_(problem.share)
    return J


def _from_a_sample(problem: Problem, max_iter: int) -> Float[Tensor, " M"]:
    """Where the solver starts: at zero, or at the optimum of some pieces where there are many."""
    # most steps lead from zero to near the optimum; a sample shows the way as well as all pieces
    zero = torch.zeros_like(problem.R[0])
    sample = sampled(problem, EVERY)
    return zero if len(sample.chunks) < FEWEST else maximise(sample, max_iter, NEAR, zero).w


def sampled(problem: Problem, every: int) -> Problem:
    """Some of the pieces."""
    some = problem.chunks[::every]
    return replace(problem, chunks=some, share=problem.share * len(some) / len(problem.chunks))


def collapsed_bound(
    problem: Problem, w: Float[Tensor, " M"]
) -> tuple[float, Float[Tensor, " M"], Float[Tensor, "M M"]]:
    """L(w), its gradient H'gamma - w, and the Hessian of -L."""
    log_z, gradient, curvature = summed(problem, lambda piece: piece.bound(w, problem.c))
    eye = torch.eye(len(w), dtype=w.dtype, device=w.device)
    prior = problem.share
    return log_z - prior * float(w @ w) / 2, gradient - prior * w, prior * eye + curvature


def rise(problem: Problem, w: Float[Tensor, " M"]) -> tuple[float, Float[Tensor, " M"]]:
    """L(w) and its gradient."""
    log_z, gradient = summed(problem, lambda piece: piece.rise(w, problem.c))
    return log_z - problem.share * float(w @ w) / 2, gradient - problem.share * w


def climb(
    problem: Problem, w: Tensor, value: float, gradient: Tensor, delta: Tensor, look: Look = rise
):
    """The first of delta, delta/2, ... with enough of the promised rise (Armijo), or None.

    With what `look` says of it: the bound, its gradient, and the Hessian if asked for.
    """
    promised, length = float(gradient @ delta), 1.0
    rounding = 1e-13 * abs(value) + sum(piece.likelihood.roughness for piece in problem.chunks)
    while length >= 1e-8:
        trial = w + length * delta
        found = look(problem, trial)
        finite = bool(torch.isfinite(found[1]).all())
        if finite and found[0] >= value + 1e-4 * length * promised - rounding:
            return trial, *found
        length /= 2
    return None


# --- Leaving bags out -------------------------------------------------------------------------


def without_each_bag(
    problem: Problem, w: Float[Tensor, " M"], direct: bool
) -> tuple[Optimum, leave_out.Mean]:
    """The fit at w with the Jacobian of its condition, and how a bag is taken out of it."""
    likelihoods = [piece.likelihood for piece in problem.chunks]
    for one in likelihoods:
        if not one.leaves_out:
            raise ValueError(
                f"a bag cannot be left out of a fit with {type(one).__name__}: its likelihood is "
                "not known to leave_out.py. Fit without the bag instead."
            )
    coupled = any(one.moments_are_gradient for one in likelihoods)
    mean: leave_out.Mean
    if direct and not coupled:
        J, mean = collapsed_bound(problem, w)[2], leave_out.mean_direct
    else:
        J = problem.R - fixed_point(problem, w)[1]
        mean = functools.partial(leave_out.mean_fixed_point, coupled=coupled)
    R_inverse = torch.cholesky_inverse(problem.chol_R)
    return Optimum(w, problem.c, R_inverse, torch.linalg.inv(J)), mean


# --- Shared -----------------------------------------------------------------------------------


def said(found: Solution, tol: float) -> Solution:
    """What was found, with a warning where it is not the end."""
    if not found.converged:
        warn_caller(
            f"No convergence in {found.n_iter} steps: relative residual {found.residual:.1e}, tol "
            f"{tol:.1e}. "
            "Raise max_iter if it was reached, or look at the settings: a very large variance or "
            "coupling, or features far from unit scale (standardize=False), make the problem "
            "stiff, and rounding may end it earlier.",
            ConvergenceWarning,
        )
    return found
