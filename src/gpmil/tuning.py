"""Kernel variance, length scale, prior mean and coupling learned from the bags' labels alone.

What is maximised is the mean leave-one-bag-out log likelihood (leave_out.py) at the maximum w of
the collapsed bound, over

    z = (log variance, log(length / sqrt d), c / sqrt(1 + variance), log lambda),

by L-BFGS from the best of a few starts. The gradient goes through the optimum: with g(w, z) = 0
the condition for w and J = -dg/dw,

    d LOO / dz = LOO_z + LOO_w' J^-1 g_z.

Distances between instances and inducing points are kept, so that another z costs no distances;
bags go in batches of similar size, so that nothing larger than a few bags is differentiated.
"""

import logging
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np
import scipy.sparse as sp
import torch
from jaxtyping import Bool, Float, Int
from linear_operator.utils.cholesky import psd_safe_cholesky
from scipy.optimize import minimize
from torch import Tensor

from gpmil import inference, leave_out
from gpmil.coupling import batches, padded_precision
from gpmil.inference import Chunk, Problem
from gpmil.leave_out import Bag, Optimum
from gpmil.sparse_gp import JITTER

logger = logging.getLogger("gpmil")

NAMES = ("variance", "lengthscale", "mean", "coupling")
KEPT_ELEMENTS = 2**27  # numbers of cached distances: one GB
TOLERANCE = 1e-9  # of w
# variance, length / sqrt d, c / sqrt(1 + variance), lambda: what is tried first, and how far
# the search may go
STARTS = (
    (9.0, 2.0, -1.3, 1.0),
    (50.0, 4.0, -0.6, 1.0),
    (1.0, 1.0, -1.5, 0.5),
    (30.0, 2.0, -1.4, 5.0),
    (4.0, 4.0, -2.0, 1.0),
    (200.0, 8.0, -0.6, 1.0),
)
CENTRE = (20.0, 3.0, -1.5, 1.0)
WIDTH = (1.5, 0.7, 1.0, 1.0)  # standard deviations of z
LOWEST = (0.05, 0.2, -4.0, 0.01)
HIGHEST = (5000.0, 50.0, 2.0, 100.0)


class Settings(NamedTuple):
    """The numbers of a model, in the space of the kernel's inputs."""

    variance: float
    lengthscale: float
    mean: float
    coupling: float


# --- Kernels as functions of what can be kept -------------------------------------------------


def squared_distances(x: Tensor, z: Tensor) -> Tensor:
    """|x - z|^2 between the rows of x and of z."""
    center = z.flatten(0, -2).mean(0)
    x, z = x - center, z - center
    out = x.square().sum(-1, keepdim=True) + z.square().sum(-1)[..., None, :] - 2 * (x @ z.mT)
    return out.clamp(min=0)


def inner_products(x: Tensor, z: Tensor) -> Tensor:
    """x'z between the rows of x and of z."""
    return x @ z.mT


def _rbf(s: Tensor, length: Tensor) -> Tensor:
    return torch.exp(s * (-0.5 / length**2))


def _matern32(s: Tensor, length: Tensor) -> Tensor:
    r = (3 * s).sqrt() / length
    return (1 + r) * torch.exp(-r)


def _matern52(s: Tensor, length: Tensor) -> Tensor:
    r = (5 * s).sqrt() / length
    return (1 + r + r * r / 3) * torch.exp(-r)


def _linear(g: Tensor, length: Tensor) -> Tensor:
    return g / length**2


Pairwise = Callable[[Tensor, Tensor], Tensor]
KERNELS: dict[str, tuple[Pairwise, Callable[[Tensor, Tensor], Tensor]]] = {
    "rbf": (squared_distances, _rbf),
    "matern32": (squared_distances, _matern32),
    "matern52": (squared_distances, _matern52),
    "linear": (inner_products, _linear),
}


# --- The cohort -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Batch:
    """Some bags of similar size; what does not depend on the settings."""

    mask: Bool[Tensor, "b p"]
    positive: Bool[Tensor, " b"]
    bags: Int[np.ndarray, " b"]
    C: Float[Tensor, "b p p"]  # Laplacians, zero in the padding
    to_inducing: Float[Tensor, "n M"]
    within: Float[Tensor, "b p p"]


@dataclass(frozen=True)
class Cohort:
    """A labelled cohort made ready for many settings.

    `pairs` computes, and `values` turns into the unit kernel, what the kernel is a function of:
    squared distances or inner products.
    """

    inputs: Float[Tensor, "N d"]
    inducing: Float[Tensor, "M d"]
    adjacency: sp.csr_array
    offsets: Int[np.ndarray, " b1"]
    positive: Bool[np.ndarray, " B"]
    kernel: str
    kept: list[Batch] = field(default_factory=list)

    def batches(self) -> Iterator[Batch]:
        """All bags; kept where memory allows, otherwise made again every time."""
        if self.kept:
            yield from self.kept
            return
        sizes = np.diff(self.offsets)
        small = len(self.inducing) * sizes.sum() + 2 * (sizes**2).sum() <= KEPT_ELEMENTS
        for bags in batches(np.arange(len(sizes)), sizes, self.inputs.device):
            batch = self._batch(bags)
            if small:
                self.kept.append(batch)
            yield batch

    def _batch(self, bags: np.ndarray) -> Batch:
        pairs, device = KERNELS[self.kernel][0], self.inputs.device
        rows, mask, P = padded_precision(self.adjacency, self.offsets, bags, 1.0)
        x = self.inputs[torch.from_numpy(rows).to(device)]
        padded = x.new_zeros(*mask.shape, x.shape[1])
        padded[mask.to(device)] = x
        return Batch(
            mask.to(device),
            torch.from_numpy(self.positive[bags]).to(device),
            bags,
            (P - torch.eye(P.shape[-1], dtype=P.dtype)).to(device),
            pairs(x, self.inducing),
            pairs(padded, padded),
        )

    def with_kernel(self, kernel: str) -> "Cohort":
        """The same bags under another kernel."""
        return replace(self, kernel=kernel, kept=[])


class Theta(NamedTuple):
    """The settings as numbers of torch, to differentiate or not."""

    variance: Float[Tensor, ""]
    lengthscale: Float[Tensor, ""]
    mean: Float[Tensor, ""]
    coupling: Float[Tensor, ""]


def inducing_factor(cohort: Cohort, theta: Theta) -> Float[Tensor, "M M"]:
    """L = chol(Kzz + jitter)."""
    pairs, values = KERNELS[cohort.kernel]
    unit = values(pairs(cohort.inducing, cohort.inducing), theta.lengthscale)
    eye = torch.eye(len(unit), dtype=unit.dtype, device=unit.device)
    return psd_safe_cholesky(theta.variance * (unit + JITTER * eye))


def bag_of(cohort: Cohort, batch: Batch, theta: Theta, L: Tensor, with_K: bool = True) -> Bag:
    """W, H, Sigma and K of a batch at some settings."""
    values = KERNELS[cohort.kernel][1]
    Kxz = theta.variance * values(batch.to_inducing, theta.lengthscale)
    W_rows = torch.linalg.solve_triangular(L, Kxz.mT, upper=False).mT
    W = W_rows.new_zeros(*batch.mask.shape, W_rows.shape[1])
    W = W.masked_scatter(batch.mask[..., None], W_rows)
    eye = torch.eye(batch.C.shape[-1], dtype=W.dtype, device=W.device)
    # Sigma = (I + lambda C)^-1
    sigma = torch.cholesky_inverse(torch.linalg.cholesky(eye + theta.coupling * batch.C))
    K = theta.variance * values(batch.within, theta.lengthscale) if with_K else sigma
    return Bag(batch.mask, batch.positive, W, sigma @ W, sigma, K)


# --- The objective ----------------------------------------------------------------------------


class Fit(NamedTuple):
    """The fit at some settings: the optimum, and the bags it was found with."""

    L: Tensor
    at: Optimum
    bags: list[tuple[Batch, Bag]]


def fit(cohort: Cohort, theta: Theta, start: Float[Tensor, " M"] | None = None) -> Fit:
    """Maximise the collapsed bound in w."""
    L = inducing_factor(cohort, theta)
    bags = [(batch, bag_of(cohort, batch, theta, L)) for batch in cohort.batches()]
    R = torch.eye(len(L), dtype=L.dtype, device=L.device)
    chunks, row = [], 0
    for _, bag in bags:
        R += bag.W.flatten(0, 1).mT @ bag.H.flatten(0, 1)
        deviation, offsets = leave_out.flat(bag, bag.sigma.diagonal(dim1=-2, dim2=-1).sqrt())
        rows = slice(row, row + len(deviation))
        chunks.append(
            Chunk(bag.H[bag.mask], deviation, offsets, bag.positive, None, rows, None)
        )
        row = rows.stop
    chol_R = torch.linalg.cholesky((R + R.mT) / 2)
    problem = Problem(chunks, R, chol_R, float(theta.mean), row, 0.0)
    w = inference.direct(problem, 100, TOLERANCE, start).w
    J = inference.collapsed_bound(problem, w)[2]
    at = Optimum(w, theta.mean, torch.cholesky_inverse(chol_R), torch.linalg.inv((J + J.mT) / 2))
    return Fit(L, at, bags)


def bag_scores(cohort: Cohort, found: Fit) -> Float[Tensor, " B"]:
    """log p(y_b) of every bag left out, by plain EP, in the order of the cohort."""
    out = torch.empty(len(cohort.positive), dtype=torch.float64)
    for batch, bag in found.bags:
        mu = leave_out.mean_direct(bag, found.at)
        S = leave_out.covariance(bag, found.at)
        out[torch.from_numpy(batch.bags)] = leave_out.smooth_scores(bag, mu, S).cpu()
    return out


def value(
    cohort: Cohort, settings: Settings, start: Tensor | None = None
) -> tuple[float, Float[Tensor, " M"]]:
    """The mean leave-one-bag-out log likelihood, and w."""
    with torch.no_grad():
        found = fit(cohort, _theta(settings, cohort.inputs.device), start)
        return float(bag_scores(cohort, found).mean()), found.at.w


def _theta(settings: Settings, device: torch.device | str) -> Theta:
    return Theta(*(torch.tensor(x, dtype=torch.float64, device=device) for x in settings))


def gradient(
    cohort: Cohort, settings: Settings, start: Tensor | None = None
) -> tuple[float, Settings, Float[Tensor, " M"]]:
    """The same with its derivatives in variance, length, mean and lambda."""
    with torch.no_grad():
        found = fit(cohort, _theta(settings, cohort.inputs.device), start)
    theta = Theta(*(x.requires_grad_() for x in _theta(settings, cohort.inputs.device)))
    leaves = [x.detach().clone().requires_grad_() for x in (found.at.w, *found.at[2:])]
    w, R_inverse, J_inverse = leaves
    total = 0.0
    with torch.enable_grad():
        L_of_theta = inducing_factor(cohort, theta)
        L = L_of_theta.detach().requires_grad_()
        at = Optimum(w, theta.mean, R_inverse, J_inverse)
        # LOO with R and J held: their adjoints, and that of w, are collected on the way
        for batch, _ in found.bags:
            bag = bag_of(cohort, batch, theta, L)
            mu, S = leave_out.mean_direct(bag, at), leave_out.covariance(bag, at)
            part = leave_out.smooth_scores(bag, mu, S).sum() / len(cohort.positive)
            part.backward()
            total += float(part.detach())
        # d X^-1 = -X^-1 dX X^-1
        R_bar, J_bar = (-x.detach().mT @ x.grad @ x.detach().mT for x in (R_inverse, J_inverse))
        for batch, _ in found.bags:
            bag = bag_of(cohort, batch, theta, L, with_K=False)
            _, A = leave_out.curvature(bag, theta.mean + bag.H @ w)
            # R = I + sum W'H,  J = I + sum H'A H
            held = ((bag.W @ R_bar) * bag.H).sum() + ((A @ bag.H @ J_bar) * bag.H).sum()
            held.backward()
        # g(w, z) = sum H'gamma - w = 0
        v = (found.at.J_inverse @ w.grad).detach()
        w = w.detach()
        for batch, _ in found.bags:
            bag = bag_of(cohort, batch, theta, L, with_K=False)
            gamma, _ = leave_out.curvature(bag, theta.mean + bag.H @ w)
            ((bag.H @ v) * gamma).sum().backward()
        L_of_theta.backward(L.grad)
    return total, Settings(*(float(x.grad) for x in theta)), w


# --- The search -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Space:
    """Which settings are learned, and what the others are: z <-> settings."""

    fixed: dict[str, float]  # the settings that are not learned
    root_dim: float  # sqrt d

    @property
    def learned(self) -> tuple[str, ...]:
        """The names in the order of z."""
        return tuple(name for name in NAMES if name not in self.fixed)

    def settings(self, z: Float[Tensor, " k"]) -> Float[Tensor, " 4"]:
        """variance, length, mean and lambda at z."""
        free = dict(zip(self.learned, z, strict=True))
        known = {k: torch.tensor(v, dtype=torch.float64) for k, v in self.fixed.items()}
        variance = known["variance"] if "variance" in known else free["variance"].exp()
        length = known.get("lengthscale")
        if length is None:
            length = self.root_dim * free["lengthscale"].exp()
        # c = u sqrt(1 + variance): u alone says how likely a patch is positive a priori
        mean = known["mean"] if "mean" in known else free["mean"] * (1 + variance).sqrt()
        strength = known["coupling"] if "coupling" in known else free["coupling"].exp()
        return torch.stack([variance, length, mean, strength])

    def z(self, start: tuple[float, float, float, float]) -> Float[np.ndarray, " k"]:
        """From variance, length / sqrt d, c / sqrt(1 + variance) and lambda."""
        variance, length, level, strength = start
        logs = dict(
            zip(NAMES, (math.log(variance), math.log(length), level, math.log(strength)))
        )
        return np.array([logs[name] for name in self.learned])


class Trial(NamedTuple):
    """Settings that were tried, and what they scored."""

    kernel: str
    settings: Settings
    score: float


@dataclass
class Search:
    """Everything tried so far, the best of it, and the w that warms the next fit."""

    cohort: Cohort
    space: Space
    trace: list[Trial] = field(default_factory=list)
    w: Tensor | None = None

    def log_prior(self, z: Tensor) -> Tensor:
        """A weak prior: what few bags leave open stays where models of this kind work."""
        centre = torch.from_numpy(self.space.z(CENTRE))
        width = torch.tensor([WIDTH[NAMES.index(name)] for name in self.space.learned])
        return -0.5 * ((z - centre) / width.double()).square().sum() / len(self.cohort.positive)

    def __call__(self, z: np.ndarray, slopes: bool = False):
        """The score at z, and its gradient where asked for."""
        point = torch.tensor(z, dtype=torch.float64, requires_grad=slopes)
        with torch.enable_grad():
            moved = self.space.settings(point)
            prior = self.log_prior(point)
        settings = Settings(*moved.tolist())
        if slopes:
            score, by_setting, self.w = gradient(self.cohort, settings, self.w)
            (prior + moved @ torch.tensor(by_setting, dtype=torch.float64)).backward()
        else:
            score, self.w = value(self.cohort, settings, self.w)
        score += float(prior.detach())
        self.trace.append(Trial(self.cohort.kernel, settings, score))
        logger.info(
            "tuning %d: variance %.3g, length %.3g, mean %.3g, coupling %.3g: %.4f",
            len(self.trace), *settings, score,
        )  # fmt: skip
        return (score, point.grad.numpy()) if slopes else score

    @property
    def best(self) -> Trial:
        """The best so far."""
        return max(self.trace, key=lambda trial: trial.score)


def search(cohort: Cohort, space: Space, budget: int, method: str = "gradient") -> Search:
    """Climb the leave-one-bag-out likelihood; at most about `budget` fits' worth of work."""
    found = Search(cohort, space)
    starts = np.unique(np.stack([space.z(s) for s in STARTS]), axis=0)
    scores = [found(z) for z in starts[: max(1, budget)]]
    bounds = list(zip(space.z(LOWEST), space.z(HIGHEST), strict=True))
    best = starts[int(np.argmax(scores))]
    left = budget - len(scores)
    if method == "gradient":
        minimize(
            lambda z: tuple(-a for a in found(z, slopes=True)), best, jac=True,
            method="L-BFGS-B", bounds=bounds, options={"maxfun": max(left // 4, 1), "ftol": 1e-5},
        )  # fmt: skip
    else:
        minimize(
            lambda z: -found(z), best, method="COBYQA", bounds=bounds,
            options={"maxfev": left, "initial_tr_radius": 0.5, "final_tr_radius": 0.02},
        )  # fmt: skip
    return found
