"""Newton's direction from a Hessian of -L, which the steps taken mend, and when to end."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from gpmil.fast import triangles
from gpmil.fast.lanes import few_threads

FEW_COLUMNS = 512  # up to which a CPU is done with M x M before a GPU has begun


class Solution(NamedTuple):
    """w, and how it was reached; `trace` is the collapsed bound at each step, less a constant."""

    w: Float[Tensor, " M"]
    n_iter: int
    converged: bool
    residual: float
    trace: list[float]
    curvature: Float[Tensor, "M M"] | None = None  # the Hessian of -L there or nearby, if kept

    def on(self, device: torch.device) -> "Solution":
        """The same, kept elsewhere."""
        J = None if self.curvature is None else self.curvature.to(device)
        return self._replace(w=self.w.to(device), curvature=J)


@contextmanager
def few_columns_here(at: Float[Tensor, "..."]) -> Iterator[torch.device]:
    """Where w and M x M matrices are at hand: beside a GPU, unless there are many columns."""
    if not at.is_cuda or len(at) > FEW_COLUMNS:
        yield at.device
        return
    with few_threads():  # sixteen would wait for each other
        yield torch.device("cpu")


def ascent(curvature: Tensor, gradient: Tensor) -> Tensor:
    """Newton's direction; where -L is not convex, with the curvatures' absolute values."""
    found = _solution(curvature, gradient)
    if found is not None:
        return found
    values, vectors = torch.linalg.eigh((curvature + curvature.mT) / 2)
    return vectors @ ((vectors.mT @ gradient) / values.abs().clamp(min=1e-3))


def _solution(J: Float[Tensor, "M M"], gradient: Float[Tensor, " M"]) -> Tensor | None:
    """J^-1 gradient; None where J is not positive definite."""
    if not J.is_cuda:
        x = triangles.solution(J.detach().numpy(), gradient.detach().numpy())
        return None if x is None else torch.tensor(x)  # in torch's memory
    factor, failed = torch.linalg.cholesky_ex(J)
    return None if failed else torch.cholesky_solve(gradient[:, None], factor)[:, 0]


def mended(
    J: Float[Tensor, "M M"], s: Float[Tensor, " M"], y: Float[Tensor, " M"]
) -> Float[Tensor, "M M"]:
    """A Hessian of -L that is right along a step s (Broyden, Fletcher, Goldfarb and Shanno).

    With y the gradient of -L less the one before the step, J <- J - J s s'J / s'J s + y y' / y's:
    J s = y. It stays as it is where -L is not convex along s.
    """
    Js = J @ s
    if float(s @ y) <= 0 or float(s @ Js) <= 0:
        return J
    return torch.addr(J, Js, Js / -(s @ Js)).addr_(y, y / (s @ y))


def stalled(trace: list[float]) -> bool:
    """The bound has not risen beyond rounding for ten steps: what is left is noise."""
    recent = trace[-11:]
    return len(recent) == 11 and max(recent) - recent[0] <= 1e-12 * abs(recent[0])


def steps_left(before: float, residual: float, tol: float) -> float:
    """How many steps like the last one lead to the tolerance."""
    if residual < tol:
        return 0.0
    if not residual < before < math.inf:
        return math.inf
    return math.log(tol / residual) / math.log(residual / before)


def relative(F: Tensor, scale: Tensor) -> float:
    """|F| / |scale|."""
    return float(F.norm() / scale.norm().clamp(min=torch.finfo(torch.float64).tiny))
