"""What the labels leave open of w: Laplace's covariance at the mode, around the mean.

q(u) has the covariance that it would have if every m had been seen, and is far too narrow to say
how unsure a prediction is. The curvature of the labels' own likelihood tells that: with J the
Hessian of -L at the optimum (solvers.py) w has about the covariance J^-1. A mode is not a mean,
though: L falls faster where patches of negative bags rise than where they sink. The mean v is that
of the normal distribution with this covariance that is nearest in the sense of Kullback and
Leibler, where the slope of L vanishes on average:

    E[L'(v + x)] = 0,  x ~ N(0, J^-1).

The average is one over a few x, and the root is found by Newton steps with J, mended on the way.
"""

import math
from dataclasses import replace

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from gpmil.inference.solvers import Problem, collapsed_bound, rise, sampled, summed
from gpmil.inference.steps import few_columns_here, mended
from gpmil.process.sparse_gp import Posterior

POINTS = 4  # x that an average is taken over, as many gradients: `Piece.four_slopes`
STEPS = 3  # averages
FARTHEST = 3**0.5  # deviations between the mode of one hump and its mean
PIECES = 4  # of a large cohort: so many, or up to twice as many, stand for all


def laplace(
    problem: Problem, w: Float[Tensor, " M"], curvature: Float[Tensor, "M M"] | None = None
) -> Posterior:
    """N(v, J^-1) about a fit w; `curvature` is the Hessian of -L there, where it is known."""
    with few_columns_here(w) as here:
        w = w.to(here)
        J = collapsed_bound(problem, w)[2] if curvature is None else curvature.to(here)
        q = Posterior.build(w, at_least_one(J))
        return replace(q, w=mean(problem, q))


def at_least_one(J: Float[Tensor, "M M"]) -> Float[Tensor, "M M"]:
    """J with eigenvalues of one at least: no direction is known less than before any label."""
    J = (J + J.mT) / 2
    if not torch.linalg.cholesky_ex(J - torch.eye(len(J)).to(J)).info:  # none is below one
        return J
    values, vectors = torch.linalg.eigh(J)
    return (vectors * values.clamp(min=1.0)) @ vectors.mT


def signs(n: int) -> Float[Tensor, "n k"]:
    """+1 and -1, the same in every run; in every row they add up to zero, as x and -x do."""
    row = np.resize([1.0, -1.0], POINTS)
    return torch.tensor(np.random.default_rng(0).permuted(np.tile(row, (n, 1)), axis=1))


def mean(problem: Problem, q: Posterior) -> Float[Tensor, " M"]:
    """v of N(v, J^-1), from the fit w that q has; in large cohorts by a sample of their pieces."""
    some = sampled(problem, max(1, len(problem.chunks) // PIECES))
    # chol(J)^-T: of all roots one that every machine finds
    x = torch.linalg.solve_triangular(q.chol_R.mT, signs(len(q.w)).to(q.w), upper=True).mT
    rest = rise(some, q.w)[1]  # zero at the maximum of the bound, but for the sample

    def slope(v: Tensor) -> Tensor:
        return (mean_slope(some, v + x) - rest) * (problem.share / some.share)

    v, B, here = q.w, q.R, slope(q.w)
    for _ in range(STEPS - 1):
        step = torch.linalg.solve(B, here)
        there = slope(v + step)
        v, B, here = v + step, mended(B, step, here - there), there
    return q.w + within(v + torch.linalg.solve(B, here) - q.w, q.R)


def mean_slope(problem: Problem, w: Float[Tensor, "4 M"]) -> Float[Tensor, " M"]:
    """The mean of the gradients of L at four w."""
    (found,) = summed(problem, lambda piece: piece.four_slopes(w, problem.c))
    return found / len(w) - problem.share * w.mean(0)


def within(shift: Float[Tensor, " M"], J: Float[Tensor, "M M"]) -> Float[Tensor, " M"]:
    """From a mode to a mean: no farther than FARTHEST deviations in the mean over directions."""
    size = float(shift @ J @ shift / len(shift)) ** 0.5
    if not math.isfinite(size):
        return torch.zeros_like(shift)
    return shift * (FARTHEST / max(size, FARTHEST))
