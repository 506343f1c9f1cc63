"""The mean leave-one-bag-out log likelihood of a cohort at given settings, and its gradient.

The fit is the maximum w of the collapsed bound, a bag is left out of it as leave_out.py does, the
bags of a patient together as leave_groups.py does. The gradient in the settings z goes through
the optimum: with g(w, z) = 0 the condition for w and J = -dg/dw,

    d LOO / dz = LOO_z + LOO_w' J^-1 g_z.

Distances between instances and inducing points are kept, so that another z costs no distances;
bags go in batches of similar size, so that nothing larger than a few bags is differentiated.
"""

import functools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np
import scipy.sparse as sp
import torch
from gpytorch.kernels import Kernel as GPyTorchKernel
from jaxtyping import Bool, Float, Int, Num, Shaped
from linear_operator.utils.cholesky import psd_safe_cholesky
from torch import Tensor

from gpmil.coupling.operator import Edges, Precision, bags_block, batches, padded_precision
from gpmil.inference import leave_groups, leave_out
from gpmil.inference import solvers as inference
from gpmil.inference.leave_groups import Parcel, Without, collected
from gpmil.inference.leave_out import Bag, Optimum
from gpmil.inference.pieces import Chunk
from gpmil.inference.solvers import Problem
from gpmil.moments.likelihood import Group
from gpmil.moments.taught import patches
from gpmil.process.kernels import JITTER, Formula, formula_of
from gpmil.process.slide_context import whitened

KEPT_ELEMENTS = 2**27  # numbers of cached distances: one GB
TOLERANCE = 1e-9  # of w


class Settings(NamedTuple):
    """The numbers of a model, in the space of the kernel's inputs."""

    variance: float
    lengthscale: float
    mean: float
    coupling: float
    slide_effect: float = 0.0
    slide_context: float = 0.0  # gamma_s
    slide_context_lengthscale: float = 1.0  # no meaning where gamma_s is 0


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
    parcel: int = 0
    group: Int[Tensor, " b"] | None = None  # in the parcel; None: every bag is left out alone
    known: Int[Tensor, " n"] | None = None  # labels of instances


class SlidesInContext(NamedTuple):
    """What the slide context sees of the bags, and its inducing points."""

    z: Float[Tensor, "B d"]
    points: Float[Tensor, "m d"]


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
    context: SlidesInContext | None = None  # None where gamma_s is 0
    groups: Shaped[np.ndarray, " B"] | None = None  # whose bags are left out together: patients
    known: Int[np.ndarray, " N"] | None = None  # labels of instances, -1 where unknown

    @property
    def formula(self) -> Formula:
        """The kernel as a function of what can be kept."""
        return formula_of(self.kernel, self.inputs.device)

    @functools.cached_property
    def parcels(self) -> list[Parcel]:
        """The bags that are left out alone, then the others, some groups at a time."""
        return leave_groups.parcels(self.groups, len(self.positive), len(self.inducing))

    def batches(self, parcel: int | None = None) -> Iterator[Batch]:
        """All bags or a parcel; kept where memory allows, otherwise made again every time."""
        sizes, every = np.diff(self.offsets), range(len(self.parcels))
        small = len(self.inducing) * sizes.sum() + 2 * (sizes**2).sum() <= KEPT_ELEMENTS
        if small and not self.kept:
            self.kept.extend(list(self._made(every)))
        if self.kept:
            yield from (batch for batch in self.kept if parcel in (None, batch.parcel))
        else:
            yield from self._made(every if parcel is None else [parcel])

    def _made(self, parcels: Iterable[int]) -> Iterator[Batch]:
        sizes, most = np.diff(self.offsets), leave_groups.at_once(len(self.inducing))
        for k in parcels:
            chosen, group = self.parcels[k]
            for bags in batches(chosen, sizes, self.inputs.device):
                if group is None:
                    yield self._batch(bags)
                    continue
                for some in np.split(bags, range(most, len(bags), most)):
                    own = torch.from_numpy(group[np.searchsorted(chosen, some)])
                    found = self._batch(some)
                    yield replace(found, parcel=k, group=own.to(self.inputs.device))

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
            known=None if self.known is None else torch.from_numpy(self.known[rows]).to(device),
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
    slide_effect: Float[Tensor, ""] | float = 0.0  # a number where there is none
    slide_context: Float[Tensor, ""] | float = 0.0
    slide_context_lengthscale: Float[Tensor, ""] | float = 1.0
    weights: Float[Tensor, " d"] | None = None  # of the columns: lengths are lengthscale / weights


def inducing_factor(cohort: Cohort, theta: Theta) -> Float[Tensor, "M M"]:
    """L = chol(Kzz + jitter)."""
    formula = cohort.formula
    Z = cohort.inducing if theta.weights is None else cohort.inducing * theta.weights
    unit = formula.value(formula.pairs(Z, Z), theta.lengthscale)
    jitter = JITTER if isinstance(cohort.kernel, str) else JITTER * unit.diagonal().mean()
    eye = torch.eye(len(unit), dtype=unit.dtype, device=unit.device)
    return psd_safe_cholesky(theta.variance * (unit + jitter * eye))


def context_rows(cohort: Cohort, theta: Theta) -> Float[Tensor, "B m"] | None:
    """v_b of every bag: what its context adds to each row of W."""
    if cohort.context is None:
        return None
    return whitened(*cohort.context, theta.slide_context, theta.slide_context_lengthscale)


def bag_of(
    cohort: Cohort,
    batch: Batch,
    theta: Theta,
    L: Tensor,
    v: Float[Tensor, "B m"] | None = None,
    with_K: bool = True,
) -> Bag:
    """W, H, Sigma and K of a batch at some settings; v as `context_rows` has it."""
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
    H, tau = sigma @ W, theta.slide_effect
    K = K + tau**2
    if v is not None:  # Sigma 1 v' = 1 v'
        K = K + theta.slide_context
        own = v[torch.from_numpy(batch.bags).to(v.device), None] * batch.mask[..., None]
        W, H = torch.cat([W, own], -1), torch.cat([H, own], -1)
    unsmoothed = leave_out.less_shared(W, batch.mask, tau)
    bag = Bag(batch.mask, batch.positive, unsmoothed, H, sigma, K, tau)
    return bag if batch.known is None else bag.with_known(batch.known)


# --- The objective ----------------------------------------------------------------------------


class Fit(NamedTuple):
    """The fit at some settings: the optimum, and the settings themselves."""

    L: Tensor
    at: Optimum
    theta: Theta
    v: Float[Tensor, "B m"] | None = None  # of the slide context


def fit(cohort: Cohort, theta: Theta, start: Float[Tensor, " M"] | None = None) -> Fit:
    """Maximise the collapsed bound in w."""
    L, v = inducing_factor(cohort, theta), context_rows(cohort, theta)
    R = torch.eye(len(L) + (0 if v is None else v.shape[1])).to(L)
    chunks, row = [], 0
    for batch in cohort.batches():
        # of a bag only H is held: with Sigma and K a large cohort would take tens of GB
        bag = bag_of(cohort, batch, theta, L, v, with_K=False)
        R += bag.W.flatten(0, 1).mT @ bag.H.flatten(0, 1)
        deviation, offsets = leave_out.flat(bag, bag.sigma.diagonal(dim1=-2, dim2=-1).sqrt())
        rows = slice(row, row + len(deviation))  # in the order of the batches, not of the cohort
        P = Precision.of(batch.edges, slice(0, len(deviation)), float(theta.coupling))
        tau, own = float(theta.slide_effect), (deviation, offsets, bag.positive, P, rows)
        group = Group(*own, effect=tau, known=batch.known)
        chunks.append(Chunk(bag.H[bag.mask], patches(group)))
        row = rows.stop
    chol_R = torch.linalg.cholesky((R + R.mT) / 2)
    problem = Problem(chunks, R, chol_R, float(theta.mean), row, 0.0)
    w = inference.direct(problem, 100, TOLERANCE, start).w
    J = inference.collapsed_bound(problem, w)[2]
    at = Optimum(w, theta.mean, torch.cholesky_inverse(chol_R), torch.linalg.inv((J + J.mT) / 2))
    return Fit(L, at, theta, v)


class Held(NamedTuple):
    """What bags are made from, batch by batch: the settings, chol(Kzz), and v; or its leaves."""

    theta: Theta
    L: Float[Tensor, "M M"]
    v: Float[Tensor, "B m"] | None = None


def bag_scores(cohort: Cohort, found: Fit) -> Float[Tensor, " B"]:
    """log p(y_b) of every bag left out, by plain EP, in the order of the cohort."""
    out = torch.full((len(cohort.positive),), torch.nan, dtype=torch.float64)
    held = Held(found.theta, found.L, found.v)
    for k in range(len(cohort.parcels)):
        left = _without(cohort, k, held, found.at)
        for batch in cohort.batches(k):
            bag = bag_of(cohort, batch, *held)
            scores = leave_out.smooth_scores(bag, *_predicted(bag, batch, found.at, left))
            out[torch.from_numpy(batch.bags)] = scores.cpu()
    return out


def _without(cohort: Cohort, k: int, held: Held, at: Optimum) -> Without | None:
    """The fit without each group of a parcel; None where bags are left out alone."""
    sums = _group_sums(cohort, k, held, at)
    return None if sums is None else leave_groups.without(sums, at)


def _group_sums(cohort: Cohort, k: int, held: Held, at: Optimum) -> leave_groups.Shares | None:
    count = cohort.parcels[k].n_groups
    if not count:
        return None

    def shares() -> Iterator[tuple[Tensor, leave_groups.Shares]]:
        for batch in cohort.batches(k):
            assert batch.group is not None
            bag = bag_of(cohort, batch, *held, with_K=False)
            yield batch.group, leave_groups.share_of_bound(bag, at)

    return leave_groups.summed(count, shares())


def _predicted(bag: Bag, batch: Batch, at: Optimum, left: Without | None) -> tuple[Tensor, Tensor]:
    """mu and S of every bag without it, or without its group."""
    if left is None or batch.group is None:
        return leave_out.mean_direct(bag, at), leave_out.covariance(bag, at)
    return leave_groups.predicted(bag, batch.group, at.c, left)


def value(
    cohort: Cohort, settings: Settings, start: Tensor | None = None
) -> tuple[float, Float[Tensor, " M"]]:
    """The mean leave-one-bag-out log likelihood, and w."""
    scores, w = left_out(cohort, settings, start)
    return float(scores.mean()), w


def left_out(
    cohort: Cohort, settings: Settings, start: Tensor | None = None
) -> tuple[Float[Tensor, " B"], Float[Tensor, " M"]]:
    """The log likelihood of every bag without it (without its patient), and w."""
    with torch.no_grad():
        found = fit(cohort, theta_of(settings, cohort.inputs.device), start)
        return bag_scores(cohort, found), found.at.w


def theta_of(
    settings: Settings, device: torch.device | str, weights: np.ndarray | None = None
) -> Theta:
    """The settings as numbers of torch."""
    variance, length, mean, strength, effect, gamma, slide_length = (
        torch.tensor(x, dtype=torch.float64, device=device) for x in settings
    )
    columns = None if weights is None else torch.tensor(weights, device=device)
    shared = effect if settings.slide_effect > 0 else 0.0
    if not settings.slide_context > 0:
        return Theta(variance, length, mean, strength, shared, weights=columns)
    return Theta(variance, length, mean, strength, shared, gamma, slide_length, columns)


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
    """The same with its derivatives in the settings (and the weights of the columns)."""
    theta = theta_of(settings, cohort.inputs.device, weights)
    with torch.no_grad():
        found = fit(cohort, theta, start)
    for x in theta:
        if isinstance(x, Tensor):
            x.requires_grad_()
    w, R_inverse, J_inverse = (
        x.detach().clone().requires_grad_() for x in (found.at.w, *found.at[2:])
    )
    with torch.enable_grad():
        L_of_theta, v_of_theta = inducing_factor(cohort, theta), context_rows(cohort, theta)
        held = Held(theta, _leaf(L_of_theta), None if v_of_theta is None else _leaf(v_of_theta))
        score = _score_at(cohort, held, Optimum(w, theta.mean, R_inverse, J_inverse))
        # d X^-1 = -X^-1 dX X^-1
        R_bar, J_bar = (
            -x.detach().mT @ collected(x) @ x.detach().mT for x in (R_inverse, J_inverse)
        )
        _through_matrices(cohort, held, w, R_bar, J_bar)
        _through_optimum(cohort, held, w.detach(), found.at.J_inverse @ collected(w))
        L_of_theta.backward(held.L.grad)
        if v_of_theta is not None and held.v is not None:
            v_of_theta.backward(held.v.grad)
    return Slopes(
        score,
        Settings(*(float(collected(x)) if isinstance(x, Tensor) else 0.0 for x in theta[:7])),
        w.detach(),
        None if theta.weights is None else collected(theta.weights).cpu().numpy(),
    )


def _leaf(x: Tensor) -> Tensor:
    return x.detach().requires_grad_()


def _score_at(cohort: Cohort, held: Held, at: Optimum) -> float:
    """The score with w, R and J held; their adjoints are collected on the way."""
    total = 0.0
    for k in range(len(cohort.parcels)):
        with torch.no_grad():
            sums = _group_sums(cohort, k, held, at)
        left = None if sums is None else leave_groups.Leaves.of(sums, at)
        for batch in cohort.batches(k):
            bag = bag_of(cohort, batch, *held)
            made = _predicted(bag, batch, at, None if left is None else left.without)
            part = leave_out.smooth_scores(bag, *made).sum() / len(cohort.positive)
            part.backward()
            total += float(part.detach())
        if left is not None:
            _through_groups(cohort, k, held, at, left.adjoint())
    return total


def _through_groups(
    cohort: Cohort, k: int, held: Held, at: Optimum, adjoint: leave_groups.Shares
) -> None:
    """What the sums of the groups add."""
    for batch in cohort.batches(k):
        bag = bag_of(cohort, batch, *held, with_K=False)
        shares = leave_groups.share_of_bound(bag, at)
        parts = [(x * bar[batch.group]).sum() for x, bar in zip(shares, adjoint)]
        torch.stack(parts).sum().backward()


def _through_matrices(cohort: Cohort, held: Held, w: Tensor, R_bar: Tensor, J_bar: Tensor) -> None:
    """What R = I + sum W'H and J = I + sum H'A H, A = diag(bend) + left right', add."""
    for batch in cohort.batches():
        bag = bag_of(cohort, batch, *held, with_K=False)
        _, bend, *sides = leave_out.curvature(bag, held.theta.mean + bag.H @ w)
        left, right = ((side[..., None] * bag.H[:, :, None]).sum(1) for side in sides)
        out = ((bag.W @ R_bar) * bag.H).sum() + ((left @ J_bar) * right).sum()
        out = out + (bend * ((bag.H @ J_bar) * bag.H).sum(-1)).sum()
        out.backward()


def _through_optimum(cohort: Cohort, held: Held, w: Tensor, v: Tensor) -> None:
    """What the condition g(w, z) = sum H'gamma - w = 0 adds, v = J^-1 LOO_w."""
    for batch in cohort.batches():
        bag = bag_of(cohort, batch, *held, with_K=False)
        gamma = leave_out.curvature(bag, held.theta.mean + bag.H @ w).gamma
        ((bag.H @ v) * gamma).sum().backward()
