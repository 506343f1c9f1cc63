"""The maximum of the collapsed bound near one that is known: a few labels more, or fewer.

The Hessian of the fit before serves again, and a new one would cost ten gradients. Every step mends
it instead, so that it is right along the steps taken (`steps.mended`).
"""

import logging

from jaxtyping import Float
from torch import Tensor

from gpmil.inference.solvers import (
    Problem,
    climb,
    collapsed_bound,
    relative,
    rise,
)
from gpmil.inference.steps import Solution, ascent, few_columns_here, mended, stalled

logger = logging.getLogger("gpmil")
SURE = 0.1  # of tol: the residual expected of the last step, which is not looked at
PATIENCE = 12  # steps with one Hessian, which costs as much as fifteen gradients
WORSE = 4.0  # times the residual before: a step that leaves as much or more had no use


def maximum(
    problem: Problem,
    max_iter: int,
    tol: float,
    start: Float[Tensor, " M"],
    curvature: Float[Tensor, "M M"],
) -> Solution:
    """As solvers.maximise, from `start` with a Hessian of -L that is near the one there.

    A step leaves the share of the residual that the one before has left, or less: where that is
    far below `tol` the step is the last, and the gradient behind it is not asked for.
    """
    with few_columns_here(start) as here:
        found = _climbed(problem, max_iter, tol, start.to(here), curvature.to(here))
    return found.on(start.device)


def _climbed(
    problem: Problem, max_iter: int, tol: float, w: Float[Tensor, " M"], J: Float[Tensor, "M M"]
) -> Solution:
    age, seen = 0, 0
    value, gradient = rise(problem, w)
    residual, left, trace = relative(gradient, w), 1.0, [value]
    for step in range(1, max_iter + 1):
        delta, age = ascent(J, gradient), age + 1
        if residual < tol or left * residual < SURE * tol:
            return Solution(w + delta, step, True, residual, trace, J)
        serves = left < WORSE and age <= PATIENCE
        found = climb(problem, w, value, gradient, delta) if serves else None
        if found is None:
            J, age, seen = collapsed_bound(problem, w)[2], 0, seen + 1
            found = climb(problem, w, value, gradient, ascent(J, gradient))
        if found is None or (seen and stalled(trace)):
            return Solution(w, step, residual < tol, residual, trace, J)
        J = mended(J, found[0] - w, gradient - found[2])
        before, (w, value, gradient) = residual, found
        residual = relative(gradient, w)
        left = residual / before
        trace.append(value)
        logger.debug("step %d nearby: bound %.6f, residual %.2e", step, value, residual)
    return Solution(w, max_iter, residual < tol, residual, trace, J)
