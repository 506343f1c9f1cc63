"""Inducing points and kernel settings moved up the collapsed evidence bound.

The direct solver maximises ELBO(w, theta) over w; here theta (inducing points, variance, length,
prior mean) moves too, by L-BFGS with w at its optimum for every theta. There d ELBO / d theta is
the partial derivative, and with gamma = d log Z / d mu and R, H held still it is that of

    sum_b (Sigma_b gamma_b)' W_b w + c sum gamma - (tr Q K + 2 tr (R^-1 - I) (Q W)'W) / 2

with Q W held still in the last term; Q = Sigma, and Sigma - k 11' in every bag with a slide effect.
So only the kernel is differentiated, one part of the coupling at a time.
"""

import logging
import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import scipy.sparse as sp
import torch
from gpytorch.kernels import Kernel as GPyTorchKernel
from jaxtyping import Float
from scipy.optimize import minimize
from torch import Tensor

from gpmil.coupling import operator as coupling
from gpmil.inference import solvers as inference
from gpmil.inference.solvers import Problem
from gpmil.moments.likelihood import Family, downdate
from gpmil.process.kernels import Kernel
from gpmil.process.sparse_gp import SparseGP
from gpmil.warn import warn_caller

logger = logging.getLogger("gpmil")
SETTINGS = ("inducing", "variance", "lengthscale", "mean")
MAX_ITER = 50
FARTHEST = 40.0  # how far a coordinate (a logarithm, for variance and length) may go


@dataclass(frozen=True)
class Theta:
    """What the bound can be maximised over, in the space of the kernel's inputs."""

    inducing: Float[Tensor, "M d"]
    variance: float
    lengthscale: float
    mean: float


@dataclass(frozen=True)
class Cohort:
    """The training data as `inference.prepare` takes it."""

    kernel: str | GPyTorchKernel
    inputs: Callable[[Tensor], Tensor]
    adjacency: sp.csr_array
    offsets: np.ndarray
    positive: np.ndarray
    strength: float
    likelihood: Family
    tol: float
    effect: float = 0.0  # tau, which stays as it is

    def gp(self, variance, lengthscale, inducing: Tensor) -> SparseGP:
        """The sparse GP, its parameters given as numbers or as tensors to differentiate."""
        kernel = self.kernel_at(variance, lengthscale, inducing.device)
        return SparseGP.build(kernel, inducing, self.effect)

    def kernel_at(self, variance, lengthscale, device: torch.device) -> Kernel:
        """The kernel alone, its parameters as numbers or as tensors."""
        return Kernel(self.kernel, variance, lengthscale, device)

    def problem(self, theta: Theta) -> Problem:
        """The inference problem at theta."""
        gp = self.gp(theta.variance, theta.lengthscale, theta.inducing)
        return inference.prepare(
            gp, self.inputs, self.adjacency, self.offsets, self.positive, self.strength,
            theta.mean, likelihood=self.likelihood,
        )  # fmt: skip


def maximise(
    cohort: Cohort, theta: Theta, moving: tuple[str, ...], max_iter: int = MAX_ITER
) -> tuple[Theta, list[float]]:
    """Theta at a maximum of the bound over the named settings, and the bound on the way."""
    trace: list[float] = []
    latest: dict[str, Tensor] = {}

    def objective(packed: np.ndarray) -> tuple[float, np.ndarray]:
        here = unpack(packed, theta, moving)
        value, gradient, latest["w"] = bound(cohort, here, latest.get("w"))
        trace.append(value)
        logger.info("evidence bound %.4f", value)
        return -value, -pack(gradient, moving)

    start = pack_theta(theta, moving)
    found = minimize(
        objective,
        start,
        jac=True,
        method="L-BFGS-B",
        bounds=np.stack([start - FARTHEST, start + FARTHEST], axis=1),
        options={"maxiter": max_iter, "maxcor": 20},
    )
    best = unpack(found.x, theta, moving)
    _warn_of_collapse(theta, best)
    return best, trace


def _warn_of_collapse(before: Theta, after: Theta) -> None:
    for name in ("variance", "lengthscale"):
        old, new = getattr(before, name), getattr(after, name)
        if abs(math.log(new / old)) > math.log(1e3):
            warn_caller(
                f"the evidence bound moved the {name} from {old:.3g} to {new:.3g}: its maximum is "
                "a process that explains nothing. Keep the kernel settings out of optimize=.",
            )


def bound(
    cohort: Cohort, theta: Theta, start: Float[Tensor, " M"] | None = None
) -> tuple[float, dict[str, np.ndarray], Float[Tensor, " M"]]:
    """max_w ELBO(w, theta), its gradient in theta (logs of variance and length), and that w."""
    problem = cohort.problem(theta)
    solution = inference.direct(problem, 200, cohort.tol, start)
    w = solution.w
    gamma = torch.cat([chunk.gamma(w, theta.mean) for chunk in problem.chunks])
    log_variance, log_length = (
        torch.tensor(math.log(x), dtype=torch.float64, requires_grad=True)
        for x in (theta.variance, theta.lengthscale)
    )
    inducing = theta.inducing.clone().requires_grad_(True)
    with torch.enable_grad():
        gp = cohort.gp(log_variance.exp(), log_length.exp(), inducing)
    L = gp.L.detach().requires_grad_(True)  # the parts collect its gradient
    inverse = torch.cholesky_inverse(problem.chol_R)
    rest = inverse - torch.eye(len(w), dtype=w.dtype, device=w.device)
    for part in coupling.parts(
        cohort.adjacency, cohort.offsets, cohort.strength, theta.inducing.device
    ):
        x = cohort.inputs(part.rows)
        smoothed = part.apply(gamma[part.rows][:, None])[:, 0]
        with torch.enable_grad():
            kernel = cohort.kernel_at(log_variance.exp(), log_length.exp(), inducing.device)
            W = SparseGP(kernel, inducing, L).whiten(x)
            spread = part.trace(x, kernel) + 2 * ((part.apply(W.detach()) @ rest) * W).sum()
            if cohort.effect:
                spread = spread - _shared(cohort, part, x, kernel, W, rest)
            (smoothed @ (W @ w) - spread / 2).backward()
    gp.L.backward(L.grad)  # through the Cholesky factor once
    gradient = {
        "inducing": _array(inducing.grad),
        "variance": _array(log_variance.grad),
        "lengthscale": _array(log_length.grad),
        "mean": _array(gamma.sum()),
    }
    return solution.trace[-1] + problem.constant, gradient, w


def _shared(
    cohort: Cohort,
    part: coupling.Part,
    x: Float[Tensor, "n d"],
    kernel: Kernel,
    W: Float[Tensor, "n M"],
    rest: Float[Tensor, "M M"],
) -> Float[Tensor, ""]:
    """What the slide effect takes from both traces: Q = Sigma - k 11' (stores.py)."""
    sizes = torch.from_numpy(np.diff(cohort.offsets)[part.bags]).to(W.device)
    total = W.new_zeros(())
    shares, lengths = downdate(cohort.effect, sizes).tolist(), sizes.tolist()
    for k, rows, W_b in zip(shares, x.split(lengths), W.split(lengths)):
        column = W_b.sum(0)  # W_b'1
        total = total + k * (kernel(rows, rows).sum() + 2 * column.detach() @ rest @ column)
    return total


def _array(x: Tensor | None) -> np.ndarray:
    return np.zeros(1) if x is None else x.detach().cpu().numpy().reshape(-1)


def pack(values: dict[str, np.ndarray], moving: tuple[str, ...]) -> np.ndarray:
    """The moving parts as one vector."""
    return np.concatenate([values[name] for name in moving])


def pack_theta(theta: Theta, moving: tuple[str, ...]) -> np.ndarray:
    """Theta as L-BFGS sees it: variance and length by their logarithms."""
    values = {
        "inducing": _array(theta.inducing),
        "variance": np.log([theta.variance]),
        "lengthscale": np.log([theta.lengthscale]),
        "mean": np.array([theta.mean]),
    }
    return pack(values, moving)


def unpack(packed: np.ndarray, theta: Theta, moving: tuple[str, ...]) -> Theta:
    """Theta with its moving parts taken from the vector."""
    sizes = [theta.inducing.numel() if name == "inducing" else 1 for name in moving]
    pieces = dict(zip(moving, np.split(packed, np.cumsum(sizes)[:-1]), strict=True))

    def number(name: str, kept: float, logarithm: bool = True) -> float:
        if name not in pieces:
            return kept
        value = float(pieces[name][0])
        return math.exp(value) if logarithm else value

    inducing = theta.inducing
    if "inducing" in pieces:
        inducing = torch.tensor(pieces["inducing"]).view_as(inducing).to(inducing.device)
    return Theta(
        inducing,
        number("variance", theta.variance),
        number("lengthscale", theta.lengthscale),
        number("mean", theta.mean, logarithm=False),
    )
