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

import contextlib
import logging
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np
import scipy.sparse as sp
import torch
from gpytorch.kernels import Kernel as GPyTorchKernel
from jaxtyping import Bool, Float, Int, Num
from linear_operator.utils.cholesky import psd_safe_cholesky
from scipy.optimize import minimize
from torch import Tensor

from gpmil.coupling.operator import Edges, Precision, bags_block, batches, padded_precision
from gpmil.inference import leave_out
from gpmil.inference import solvers as inference
from gpmil.inference.leave_out import Bag, Optimum
from gpmil.inference.pieces import Chunk
from gpmil.inference.solvers import Problem
from gpmil.moments.independent import IndependentPatches
from gpmil.moments.likelihood import Group
from gpmil.process.kernels import Formula, formula_of
from gpmil.process.sparse_gp import JITTER

logger = logging.getLogger("gpmil")

NAMES = ("variance", "lengthscale", "mean", "coupling")
KEPT_ELEMENTS = 2**27  # numbers of cached distances: one GB
TOLERANCE = 1e-9  # of w
# variance, length / sqrt d, c / sqrt(1 + variance), lambda: the centre and the width (of z) of the
# weak prior, what is tried first, and how far the search may go. The centre and the starts are
# settings that work on features of deep networks; the widths span a factor of four to twenty.
CENTRE = (20.0, 3.0, -1.5, 1.0)
WIDTH = (1.5, 0.7, 1.0, 1.0)
STARTS = (
    CENTRE,
    (9.0, 2.0, -1.3, 1.0),
    (50.0, 4.0, -0.6, 0.5),
    (4.0, 4.0, -2.0, 1.0),
    (30.0, 2.0, -1.4, 5.0),
    (1.0, 1.0, -1.5, 0.5),
)
LOWEST = (0.05, 0.2, -4.0, 0.01)
HIGHEST = (5000.0, 50.0, 2.0, 100.0)
WEIGHT_WIDTH = 0.5  # of the logarithms of the columns' weights
FAILED = -1e6  # the objective where it is not a number: a step to be shortened
GRADIENT_COST = 4  # fits' worth of work in one value with its gradient


class Settings(NamedTuple):
    """The numbers of a model, in the space of the kernel's inputs."""

    variance: float
    lengthscale: float
    mean: float
    coupling: float


# --- The cohort -------------------------------------------------------------------------------


@dataclass(frozen=True)
class StoredRows:
    """Kernel inputs that are made from stored features when a batch asks for them.

    Features stay where they are, in their own dtype: float64 copies of a whole cohort would take
    four times the room of float16 ones.
    """

    features: Num[np.ndarray, "F D"]
    rows: Int[np.ndarray, " N"]
    inputs: Callable[[np.ndarray], Tensor]
    shape: tuple[int, int]  # N, d
    device: torch.device

    def __getitem__(self, i: Int[Tensor, " n"]) -> Float[Tensor, "n d"]:
        """Some of the rows."""
        return self.inputs(self.features[self.rows[i.cpu().numpy()]])


@dataclass(frozen=True)
class Batch:
    """Some bags of similar size; what does not depend on the settings."""

    mask: Bool[Tensor, "b p"]
    positive: Bool[Tensor, " b"]
    bags: Int[np.ndarray, " b"]
    C: Float[Tensor, "b p p"]  # Laplacians, zero in the padding
    edges: Edges  # the same without padding
    to_inducing: Float[Tensor, "n j"]  # (n, M), or the inputs themselves, (n, d)
    within: Float[Tensor, "b p k"]  # (b, p, p), or (b, p, d)


@dataclass(frozen=True)
class Cohort:
    """A labelled cohort made ready for many settings; `inputs` are what the kernel sees."""

    inputs: Float[Tensor, "N d"] | StoredRows
    inducing: Float[Tensor, "M d"]
    adjacency: sp.csr_array
    offsets: Int[np.ndarray, " b1"]
    positive: Bool[np.ndarray, " B"]
    kernel: str | GPyTorchKernel
    kept: list[Batch] = field(default_factory=list)
    relevance: bool = False  # every column has a weight: batches then hold inputs, not distances

    @property
    def formula(self) -> Formula:
        """The kernel as a function of what can be kept."""
        return formula_of(self.kernel, self.inputs.device)

    def batches(self) -> Iterator[Batch]:
        """All bags; kept where memory allows, otherwise made again every time."""
        if self.kept:
            yield from self.kept
            return
        sizes = np.diff(self.offsets)
        made: Iterator[Batch] = (
            self._batch(b) for b in batches(np.arange(len(sizes)), sizes, self.inputs.device)
        )
        if len(self.inducing) * sizes.sum() + 2 * (sizes**2).sum() <= KEPT_ELEMENTS:
            self.kept.extend(list(made))
            made = iter(self.kept)
        yield from made

    def _batch(self, bags: np.ndarray) -> Batch:
        device = self.inputs.device
        pairs = _first if self.relevance else self.formula.pairs
        rows, mask, P = padded_precision(self.adjacency, self.offsets, bags, 1.0)
        x = self.inputs[torch.from_numpy(rows).to(device)]
        padded = x.new_zeros(*mask.shape, x.shape[1])
        padded[mask.to(device)] = x
        return Batch(
            mask.to(device),
            torch.from_numpy(self.positive[bags]).to(device),
            bags,
            (P - torch.eye(P.shape[-1], dtype=P.dtype)).to(device),
            Edges.of(bags_block(self.adjacency, self.offsets, bags, rows), device),
            pairs(x, self.inducing),
            pairs(padded, padded),
        )

    def with_kernel(self, kernel: str | GPyTorchKernel) -> "Cohort":
        """The same bags under another kernel."""
        return replace(self, kernel=kernel, kept=[])


def _first(x: Tensor, z: Tensor) -> Tensor:
    return x


class Theta(NamedTuple):
    """The settings as numbers of torch, to differentiate or not."""

    variance: Float[Tensor, ""]
    lengthscale: Float[Tensor, ""]
    mean: Float[Tensor, ""]
    coupling: Float[Tensor, ""]
    weights: Float[Tensor, " d"] | None = None  # of the columns: lengths are lengthscale / weights


def inducing_factor(cohort: Cohort, theta: Theta) -> Float[Tensor, "M M"]:
    """L = chol(Kzz + jitter)."""
    formula = cohort.formula
    Z = cohort.inducing if theta.weights is None else cohort.inducing * theta.weights
    unit = formula.value(formula.pairs(Z, Z), theta.lengthscale)
    jitter = JITTER if isinstance(cohort.kernel, str) else JITTER * unit.diagonal().mean()
    eye = torch.eye(len(unit), dtype=unit.dtype, device=unit.device)
    return psd_safe_cholesky(theta.variance * (unit + jitter * eye))


def bag_of(cohort: Cohort, batch: Batch, theta: Theta, L: Tensor, with_K: bool = True) -> Bag:
    """W, H, Sigma and K of a batch at some settings."""
    formula = cohort.formula
    to_inducing, within = batch.to_inducing, batch.within
    if theta.weights is not None:
        x, padded = to_inducing * theta.weights, within * theta.weights
        to_inducing = formula.pairs(x, cohort.inducing * theta.weights)
        within = formula.pairs(padded, padded) if with_K else padded
    Kxz = theta.variance * formula.value(to_inducing, theta.lengthscale)
    W_rows = torch.linalg.solve_triangular(L, Kxz.mT, upper=False).mT
    W = W_rows.new_zeros(*batch.mask.shape, W_rows.shape[1])
    W = W.masked_scatter(batch.mask[..., None], W_rows)
    eye = torch.eye(batch.C.shape[-1], dtype=W.dtype, device=W.device)
    # Sigma = (I + lambda C)^-1
    sigma = torch.cholesky_inverse(torch.linalg.cholesky(eye + theta.coupling * batch.C))
    K = theta.variance * formula.value(within, theta.lengthscale) if with_K else sigma
    return Bag(batch.mask, batch.positive, W, sigma @ W, sigma, K)


# --- The objective ----------------------------------------------------------------------------


class Fit(NamedTuple):
    """The fit at some settings: the optimum, and the settings themselves."""

    L: Tensor
    at: Optimum
    theta: Theta


def fit(cohort: Cohort, theta: Theta, start: Float[Tensor, " M"] | None = None) -> Fit:
    """Maximise the collapsed bound in w."""
    L = inducing_factor(cohort, theta)
    R = torch.eye(len(L), dtype=L.dtype, device=L.device)
    chunks, row = [], 0
    for batch in cohort.batches():
        # of a bag only H is held: with Sigma and K a large cohort would take tens of GB
        bag = bag_of(cohort, batch, theta, L, with_K=False)
        R += bag.W.flatten(0, 1).mT @ bag.H.flatten(0, 1)
        deviation, offsets = leave_out.flat(bag, bag.sigma.diagonal(dim1=-2, dim2=-1).sqrt())
        n = len(deviation)
        rows = slice(row, row + n)  # in the order of the batches, not of the cohort
        P = Precision.of(batch.edges, slice(0, n), float(theta.coupling))
        group = Group(deviation, offsets, bag.positive, P, rows)
        chunks.append(Chunk(bag.H[bag.mask], IndependentPatches(group)))
        row = rows.stop
    chol_R = torch.linalg.cholesky((R + R.mT) / 2)
    problem = Problem(chunks, R, chol_R, float(theta.mean), row, 0.0)
    w = inference.direct(problem, 100, TOLERANCE, start).w
    J = inference.collapsed_bound(problem, w)[2]
    at = Optimum(w, theta.mean, torch.cholesky_inverse(chol_R), torch.linalg.inv((J + J.mT) / 2))
    return Fit(L, at, theta)


def bag_scores(cohort: Cohort, found: Fit) -> Float[Tensor, " B"]:
    """log p(y_b) of every bag left out, by plain EP, in the order of the cohort."""
    out = torch.full((len(cohort.positive),), torch.nan, dtype=torch.float64)
    for batch in cohort.batches():
        bag = bag_of(cohort, batch, found.theta, found.L)
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


def _theta(
    settings: Settings, device: torch.device | str, weights: np.ndarray | None = None
) -> Theta:
    variance, length, mean, strength = (
        torch.tensor(x, dtype=torch.float64, device=device) for x in settings
    )
    columns = None if weights is None else torch.tensor(weights, device=device)
    return Theta(variance, length, mean, strength, columns)


class Slopes(NamedTuple):
    """The score, its derivatives in the settings and in the weights of the columns, and w."""

    score: float
    settings: Settings
    w: Float[Tensor, " M"]
    weights: Float[np.ndarray, " d"] | None


def gradient(
    cohort: Cohort,
    settings: Settings,
    start: Tensor | None = None,
    weights: Float[np.ndarray, " d"] | None = None,
) -> Slopes:
    """The same with its derivatives in variance, length, mean and lambda (and the weights)."""
    theta = _theta(settings, cohort.inputs.device, weights)
    with torch.no_grad():
        found = fit(cohort, theta, start)
    for x in theta:
        if x is not None:
            x.requires_grad_()
    leaves = [x.detach().clone().requires_grad_() for x in (found.at.w, *found.at[2:])]
    w, R_inverse, J_inverse = leaves
    total = 0.0
    with torch.enable_grad():
        L_of_theta = inducing_factor(cohort, theta)
        L = L_of_theta.detach().requires_grad_()
        at = Optimum(w, theta.mean, R_inverse, J_inverse)
        # LOO with R and J held: their adjoints, and that of w, are collected on the way
        for batch in cohort.batches():
            bag = bag_of(cohort, batch, theta, L)
            mu, S = leave_out.mean_direct(bag, at), leave_out.covariance(bag, at)
            part = leave_out.smooth_scores(bag, mu, S).sum() / len(cohort.positive)
            part.backward()
            total += float(part.detach())
        # d X^-1 = -X^-1 dX X^-1
        R_bar, J_bar = (-x.detach().mT @ _grad(x) @ x.detach().mT for x in (R_inverse, J_inverse))
        for batch in cohort.batches():
            bag = bag_of(cohort, batch, theta, L, with_K=False)
            _, bend, pull = leave_out.curvature(bag, theta.mean + bag.H @ w)
            pulled = (pull[..., None] * bag.H[:, :, None]).sum(1)
            # R = I + sum W'H,  J = I + sum H'A H,  A = diag(bend) + pull pull'
            held = ((bag.W @ R_bar) * bag.H).sum() + ((pulled @ J_bar) * pulled).sum()
            held = held + (bend * ((bag.H @ J_bar) * bag.H).sum(-1)).sum()
            held.backward()
        # g(w, z) = sum H'gamma - w = 0
        v = found.at.J_inverse @ _grad(w)
        w = w.detach()
        for batch in cohort.batches():
            bag = bag_of(cohort, batch, theta, L, with_K=False)
            gamma = leave_out.curvature(bag, theta.mean + bag.H @ w).gamma
            ((bag.H @ v) * gamma).sum().backward()
        L_of_theta.backward(L.grad)
    return Slopes(
        total,
        Settings(*(float(_grad(x)) for x in theta[:4])),
        w,
        None if theta.weights is None else _grad(theta.weights).cpu().numpy(),
    )


def _grad(x: Tensor) -> Tensor:
    """What was collected; zero where the score does not depend on x."""
    return torch.zeros_like(x) if x.grad is None else x.grad


# --- The search -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Space:
    """Which settings are learned, and what the others are: z <-> settings."""

    fixed: dict[str, float]  # the settings that are not learned
    root_dim: float  # sqrt d
    level: float | None = None  # c / sqrt(1 + variance), where the mean follows the variance

    @property
    def learned(self) -> tuple[str, ...]:
        """The names in the order of z."""
        given = {*self.fixed, *(() if self.level is None else ("mean",))}
        return tuple(name for name in NAMES if name not in given)

    def settings(self, z: Float[Tensor, " k"]) -> Float[Tensor, " 4"]:
        """variance, length, mean and lambda at z."""
        free = dict(zip(self.learned, z, strict=True))
        known = {k: torch.tensor(v, dtype=torch.float64) for k, v in self.fixed.items()}
        if self.level is not None:
            free["mean"] = torch.tensor(self.level, dtype=torch.float64)
        variance = known["variance"] if "variance" in known else free["variance"].exp()
        moved = {
            "variance": lambda: variance,
            "lengthscale": lambda: self.root_dim * free["lengthscale"].exp(),
            # c = u sqrt(1 + variance): u alone says how likely a patch is positive a priori
            "mean": lambda: free["mean"] * (1 + variance).sqrt(),
            "coupling": lambda: free["coupling"].exp(),
        }
        return torch.stack([known[n] if n in known else moved[n]() for n in NAMES])

    def z(self, start: tuple[float, ...]) -> Float[np.ndarray, " k"]:
        """From variance, length / sqrt d, c / sqrt(1 + variance) and lambda."""
        variance, length, level, strength = start
        all_ = (math.log(variance), math.log(length), level, math.log(strength))
        return np.array([all_[NAMES.index(name)] for name in self.learned])

    @property
    def bounds(self) -> list[tuple[float, float]]:
        """How far z may go."""
        return list(zip(self.z(LOWEST), self.z(HIGHEST), strict=True))

    def log_prior(self, z: Float[Tensor, " k"]) -> Float[Tensor, ""]:
        """A weak prior: what few bags leave open stays where models of this kind work."""
        width = torch.tensor([WIDTH[NAMES.index(name)] for name in self.learned]).double()
        return -((z - torch.from_numpy(self.z(CENTRE))) / width).square().sum() / 2


class Spent(Exception):
    """The budget is used up."""


class Trial(NamedTuple):
    """Settings that were tried: their leave-one-bag-out score, and with the prior."""

    kernel: str
    settings: Settings
    score: float
    objective: float


@dataclass
class Search:
    """Everything tried so far, and the w that warms the next fit."""

    cohort: Cohort
    space: Space
    budget: int
    trace: list[Trial] = field(default_factory=list)
    w: Tensor | None = None

    def value(self, z: Float[np.ndarray, " k"]) -> float:
        """The objective at z."""
        self._spend(1)
        point = torch.from_numpy(z)
        settings = Settings(*self.space.settings(point).tolist())
        score, w = value(self.cohort, settings, self.w)
        return self._note(settings, score, self.space.log_prior(point), w)

    def slopes(self, z: Float[np.ndarray, " k"]) -> tuple[float, Float[np.ndarray, " k"]]:
        """The objective and its gradient at z."""
        self._spend(GRADIENT_COST)
        point = torch.tensor(z, requires_grad=True)
        with torch.enable_grad():
            moved = self.space.settings(point)
            prior = self.space.log_prior(point)
            settings = Settings(*moved.tolist())
            score, by_setting, w, _ = gradient(self.cohort, settings, self.w)
            slope = moved @ torch.tensor(by_setting, dtype=torch.float64)
            (slope + prior / len(self.cohort.positive)).backward()
        slopes = _grad(point).numpy()
        if not np.isfinite(slopes).all():
            return FAILED, np.zeros_like(slopes)
        return self._note(settings, score, prior, w), slopes

    def _spend(self, cost: int) -> None:
        if self.trace and cost > self.budget:
            raise Spent
        self.budget -= cost

    def _note(self, settings: Settings, score: float, log_prior: Tensor, w: Tensor) -> float:
        objective = score + float(log_prior.detach()) / len(self.cohort.positive)
        if not math.isfinite(objective):
            return FAILED
        self.w = w
        kernel = self.cohort.kernel
        name = kernel if isinstance(kernel, str) else type(kernel).__name__
        self.trace.append(Trial(name, settings, score, objective))
        logger.info(
            "tuning %d: %s, variance %.3g, length %.3g, mean %.3g, coupling %.3g: %.4f",
            len(self.trace), name, *settings, score,
        )  # fmt: skip
        return objective

    @property
    def best(self) -> Trial:
        """The best so far; of equals the first."""
        return max(self.trace, key=lambda trial: trial.objective)


def search(cohort: Cohort, space: Space, budget: int) -> Search:
    """Climb the leave-one-bag-out likelihood with about `budget` fits' worth of work."""
    found, begin = started(cohort, space, budget)
    with contextlib.suppress(Spent):
        if space.learned:
            minimize(
                lambda z: tuple(-a for a in found.slopes(z)),
                begin,
                jac=True,
                method="L-BFGS-B",
                bounds=space.bounds,
                options={"ftol": 1e-5, "gtol": 1e-4},
            )
    return found


def started(cohort: Cohort, space: Space, budget: int) -> tuple[Search, Float[np.ndarray, " k"]]:
    """A search that has tried its starts, and the best of them."""
    found = Search(cohort, space, budget)
    starts = list(dict.fromkeys(tuple(space.z(s)) for s in STARTS))[: max(1, budget)]
    scores = [found.value(np.array(z)) for z in starts]
    if not found.trace:
        raise ValueError(
            "the leave-one-bag-out likelihood is not a number at any of the starting settings: "
            "features far from unit scale? Standardise them, or give the settings as numbers."
        )
    return found, np.array(starts[int(np.argmax(scores))])


# --- A weight for every column ----------------------------------------------------------------


def relevance(
    cohort: Cohort, settings: Settings, budget: int
) -> tuple[Float[np.ndarray, " d"], float]:
    """Weights of the columns (geometric mean one) at given settings, and their score.

    L-BFGS over the logarithms of the weights, which a normal prior of width WEIGHT_WIDTH ties to
    zero: with few bags most columns keep about the common length.
    """
    made = replace(cohort, kept=[], relevance=True)
    d, B = made.inputs.shape[1], len(made.positive)
    last: dict[str, Tensor] = {}
    tried: list[tuple[float, float, np.ndarray]] = []

    def objective(a: np.ndarray) -> tuple[float, np.ndarray]:
        if tried and GRADIENT_COST * (1 + len(tried)) > budget:
            raise Spent
        # weights exp(a - mean a): the common length stays what it was
        weights = np.exp(a - a.mean())
        score, _, last["w"], slope = gradient(made, settings, last.get("w"), weights)
        assert slope is not None
        by_log = slope * weights
        value = score - (a**2).sum() / (2 * WEIGHT_WIDTH**2 * B)
        tried.append((value, score, weights))
        logger.info("relevance %d: %.4f", len(tried), score)
        return -value, -(by_log - by_log.mean() - a / (WEIGHT_WIDTH**2 * B))

    with contextlib.suppress(Spent):
        minimize(objective, np.zeros(d), jac=True, method="L-BFGS-B", options={"ftol": 1e-5})
    _, score, weights = max(tried, key=lambda t: t[0])
    return weights, score
