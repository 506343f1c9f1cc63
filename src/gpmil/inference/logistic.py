"""Inference of VGPMIL (Haussmann et al. 2017): q(u), xi and q(h) in turn, one pass for each turn.

The pieces of the cohort (pieces.py) are those of the other models, with W in place of H. A pass at
q(u) brings xi and q(h) of their instances to their best (moments/logistic.py), and what it adds up
is the next q(u): W is read once per iteration, wherever it lies.
"""

import logging
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from gpmil.inference.solvers import Problem, summed
from gpmil.moments.logistic import Process, State
from gpmil.process.sparse_gp import Posterior

logger = logging.getLogger("gpmil")
SETTLED = 1e-6  # relative change of w in an iteration that counts as converged


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
    max_iter: int,
    tol: float,
) -> Solution:
    """q(u), xi and q(h) in turn, from the given start, until w moves by less than `tol`."""
    state = torch.from_numpy(np.stack([np.log(pi) - np.log1p(-pi), xi])).to(problem.R.device)
    _, b, R = turn(problem, state, None)
    w, trace = torch.zeros_like(b), list[float]()
    while True:
        q = _process(b, R)
        at = Process(q.w, torch.cholesky_inverse(q.chol_R))
        value, b, R = turn(problem, state, at)
        trace.append(float(value) - _divergence(q, at))
        logger.info("iteration %d: bound %.6f", len(trace), trace[-1])
        size = q.w.norm().clamp(min=torch.finfo(torch.float64).tiny)  # w = 0: nothing in reach of Z
        residual, w = float((q.w - w).norm() / size), q.w
        if residual <= tol or len(trace) == max_iter:
            break
    return Solution(
        q, state[0].cpu().numpy(), len(trace), residual <= (tol or SETTLED), residual, trace
    )


def turn(
    problem: Problem, state: State, at: Process | None
) -> tuple[Tensor, Float[Tensor, " M"], Float[Tensor, "M M"]]:
    """The pass over all pieces; `state` is brought to its best for q(u) where one is given."""
    return summed(problem, lambda piece: piece.turn(state, at, problem.c))


def _process(b: Float[Tensor, " M"], sums: Float[Tensor, "M M"]) -> Posterior:
    """q(u) from R - I and R w."""
    R = (sums + sums.mT) / 2 + torch.eye(len(b), dtype=b.dtype, device=b.device)
    chol = torch.linalg.cholesky(R)
    return Posterior(torch.cholesky_solve(b[:, None], chol)[:, 0], R, chol)


def _divergence(q: Posterior, at: Process) -> float:
    """KL(q(u) | p(u))."""
    log_det = 2 * q.chol_R.diagonal().log().sum()
    return float(at.covariance.trace() + q.w @ q.w - len(q.w) + log_det) / 2
