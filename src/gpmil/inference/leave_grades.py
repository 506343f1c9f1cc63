"""Graded bags: the problem of a fit to them, and the grade of every bag under the fit without it.

As leave_out.py has it for bags of two classes. The covariance of a bag left out knows no labels;
its mean is that of one Newton step with the likelihood of graded bags (moments/grades.py), and
P(Y = k) is the difference of two orthants, P(all m < b_k+1) - P(all m < b_k).
"""

import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from gpmil.inference import leave_out
from gpmil.inference.leave_out import Bag, Curvature, Optimum
from gpmil.inference.solvers import Problem
from gpmil.moments import orthant
from gpmil.moments.grades import graded
from gpmil.moments.truncated import log_not

APART = -1e-8  # log P of two orthants, each to its own error: never nearer than this


@dataclass(frozen=True)
class Grades:
    """The grade of every bag of a cohort, where bags begin, and the cut points."""

    codes: Int[np.ndarray, " B"]
    offsets: Int[np.ndarray, " b1"]
    cuts: Float[np.ndarray, " k"]

    def of(self, bags: Any, device: torch.device) -> tuple[Int[Tensor, " b"], Float[Tensor, " k"]]:
        """Grades of some bags and the cut points, as a likelihood takes them."""
        codes = torch.from_numpy(self.codes[bags]).to(device)
        return codes, torch.from_numpy(self.cuts).to(device)

    def problem(self, binary: Problem) -> Problem:
        """The problem of a fit to `grade > 0` with all that grades say; R knows no labels."""
        pieces: list[Any] = []
        for piece in binary.chunks:
            group: Any = getattr(piece.likelihood, "group")  # noqa: B009
            first = int(np.searchsorted(self.offsets, group.rows.start))
            own = self.of(slice(first, first + len(group.positive)), group.sigma.device)
            pieces.append(replace(piece, likelihood=graded(group, *own)))  # type: ignore[type-var]
        return replace(binary, chunks=pieces)

    def left_out(self, bags: Int[np.ndarray, " b"], bag: Bag, at: Optimum) -> Float[Tensor, " b"]:
        """log P(Y_b) of some bags under the fit without each, from the fit to all of them."""
        grade, cuts = self.of(bags, at.w.device)
        mu, S = mean_without(bag, at, grade, cuts), leave_out.covariance(bag, at)
        return scores(bag, mu, S, grade, cuts)


def scores(
    bag: Bag, mu: Float[Tensor, "b p"], S: Float[Tensor, "b p p"],
    grade: Int[Tensor, " b"], cuts: Float[Tensor, " k"],
) -> Float[Tensor, " b"]:  # fmt: skip
    """log P(Y = grade) of every bag, m ~ N(mu, S)."""
    none = torch.full_like(mu[:, 0], -math.inf)
    # log P(all below the upper cut point), log of the rest; the same of the lower one
    upper, lower = [torch.zeros_like(none), none], [none, torch.zeros_like(none)]
    for found, own, cut in (
        (upper, grade < len(cuts), cuts[grade.clamp(max=len(cuts) - 1)]),
        (lower, grade > 0, cuts[(grade - 1).clamp(min=0)]),
    ):
        if bool(own.any()):
            at = own.nonzero()[:, 0]
            moved, effect = mu[own] - cut[own, None], float(bag.effect)
            p = orthant.log_orthant(moved, S[own], bag.mask[own], effect=effect)
            found[:] = (x.index_copy(0, at, y) for x, y in zip(found, (p.log_p, p.log_1mp)))
    return torch.where(grade == len(cuts), lower[1], log_between(*upper, *lower))


def log_between(
    log_p: Tensor, log_1mp: Tensor, log_p_low: Tensor, log_1mp_low: Tensor
) -> Float[Tensor, " b"]:
    """log(P - P_low) from both with their complements, P >= P_low but for their errors."""
    by_p = log_p + log_not((log_p_low - log_p).clamp(max=APART))
    by_rest = log_1mp_low + log_not((log_1mp - log_1mp_low).clamp(max=APART))
    return torch.where(log_p_low < -math.log(2), by_p, by_rest)


def mean_without(
    bag: Bag, at: Optimum, grade: Int[Tensor, " b"], cuts: Float[Tensor, " k"]
) -> Float[Tensor, "b p"]:
    """mu_b at the maximum of the bound without bag b."""
    mu = at.c + bag.H @ at.w
    likelihood = graded(leave_out.group_of(bag), grade, cuts)
    gamma, _, A = likelihood.curvature(mu[bag.mask])
    rows = (leave_out.spread(bag, x) for x in (gamma, A.diagonal, A.left, A.right))
    return mu - leave_out.taken_out(bag, at, Curvature(*rows))
