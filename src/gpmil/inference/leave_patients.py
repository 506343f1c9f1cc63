"""The bags of a patient left out together, to the end: where one step is short, a solver goes on.

One Newton step (leave_groups.py) leads to the optimum without group g if the group adds little. A
patient with a fifth of the images, or with the only ones of their kind, adds more. There the
problem without the group is solved, from where the step ended: every sum over its bags is that over
the cohort less that over the group,

    sum_{b not in g} x_b = sum_b x_b - sum_{b in g} x_b,    R_-g = R - (R_g - I),

with R_g that of the group's bags alone. H of the cohort stays as it is, wherever it lies.
"""

import functools
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor

from gpmil.inference import leave_groups, leave_out, nearby, solvers
from gpmil.inference.leave_groups import Padded
from gpmil.inference.solvers import Problem

OPTIMAL = 1e-5  # relative residual above which w is no optimum, as after the paper's sweeps
# Of the solver without a group. Log likelihoods of bags are then within 4e-5 of the end, those that
# one step decides within .001 on average.
TOLERANCE, MOST_STEPS = 1e-4, 50

Alone = Callable[[Int[np.ndarray, " k"]], Problem]  # chosen bags as a problem of their own


def leave_one_group_out(
    problem: Problem,
    padded: Padded,
    alone: Alone,
    groups: Shaped[np.ndarray, " B"],
    w: Float[Tensor, " M"],
    direct: bool,
    score: leave_out.Score = leave_out.scores,
) -> Float[Tensor, " B"]:
    """log p(y_b) of every bag under the fit without any bag of its group, all from the fit at w.

    `padded` gives chosen bags as leave_out.py takes them; `direct` as in `leave_one_bag_out`.
    """
    at, mean = solvers.without_each_bag(problem, w, direct)
    coupled = any(piece.likelihood.moments_are_gradient for piece in problem.chunks)
    share: leave_groups.Share = leave_groups.share_of_bound
    if not direct or coupled:
        share = functools.partial(leave_groups.share_of_fixed_point, coupled=coupled)

    def settle(
        bags: Int[np.ndarray, " k"], near: Float[Tensor, " M"], N: Float[Tensor, "M M"]
    ) -> Float[Tensor, " M"]:
        rest = less(problem, alone(bags))
        if not direct:
            return solvers.newton(rest, MOST_STEPS, TOLERANCE, start=near).w
        # the Hessian without the group, at w: near enough to begin with
        return nearby.maximum(rest, MOST_STEPS, TOLERANCE, near, J - (N + N.mT) / 2).w

    J = torch.linalg.inv(at.J_inverse)
    ended = is_optimum(problem, w, direct)
    go_on = settle if ended else None
    return leave_groups.scores_without(padded, groups, at, mean, share, go_on, score)


def is_optimum(problem: Problem, w: Float[Tensor, " M"], direct: bool) -> bool:
    """Whether w fulfils its condition: without a group there is then an optimum to go to."""
    if direct:
        return solvers.relative(solvers.rise(problem, w)[1], w) < OPTIMAL
    F = solvers.pull(problem, w)[1] - problem.R @ w
    return solvers.relative(F, problem.R @ w) < OPTIMAL


def less(problem: Problem, taken: Problem) -> Problem:
    """A problem without some of its bags, which are a problem of their own."""
    eye = torch.eye(len(problem.R), dtype=problem.R.dtype, device=problem.R.device)
    R = problem.R - (taken.R - eye)
    return replace(problem, R=R, chol_R=torch.linalg.cholesky(R), less=taken.chunks)
