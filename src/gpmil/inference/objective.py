"""The mean log likelihood of bags under fits that have not seen them, and its gradient.

The cohort is cut into folds, patients whole. Without fold k the fit is the maximum w_k of the
collapsed bound of the other bags, really fitted, and R_k is their R: a step from the fit of all
bags would stay near a maximum that the bags left out helped to choose, and with a slide effect
the bound has several. The gradient in the settings z goes through each optimum: with
g_k(w_k, z) = 0 the condition for w_k and J_k = -dg_k/dw_k,

    d score / dz = score_z + sum_k score_w_k' J_k^-1 g_k,z.

Bags go in batches of similar size (folded_cohort.py): nothing larger than a few is differentiated.
"""

from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from linear_operator.utils.cholesky import psd_safe_cholesky
from torch import Tensor

from gpmil.inference import leave_out
from gpmil.inference import solvers as inference
from gpmil.inference.folded_cohort import Batch, Cohort
from gpmil.inference.leave_out import Bag
from gpmil.inference.pieces import Chunk
from gpmil.inference.solvers import Problem
from gpmil.moments.likelihood import Group
from gpmil.moments.taught import patches
from gpmil.process.kernels import JITTER
from gpmil.process.slide_context import whitened

TOLERANCE = 1e-9  # of w
CHUNK_ROWS = 2048  # instances that solvers take at once, at least


class Settings(NamedTuple):
    """The numbers of a model, in the space of the kernel's inputs."""

    variance: float
    lengthscale: float
    mean: float
    coupling: float
    slide_effect: float = 0.0
    slide_context: float = 0.0  # gamma_s
    slide_context_lengthscale: float = 1.0  # no meaning where gamma_s is 0


# --- Bags at some settings -----------------------------------------------------------------------


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


class Fits(NamedTuple):
    """The fit without each fold: w, and R = I + sum W'H over the bags of the others."""

    w: Float[Tensor, "k M"]
    R_inverse: Float[Tensor, "k M M"]


class Held(NamedTuple):
    """What bags are made from, batch by batch: the settings, chol(Kzz), and v; or its leaves."""

    theta: Theta
    L: Float[Tensor, "M M"]
    v: Float[Tensor, "B m"] | None = None


def held_at(cohort: Cohort, theta: Theta) -> Held:
    """The same at some settings."""
    return Held(theta, inducing_factor(cohort, theta), context_rows(cohort, theta))


class Folds(NamedTuple):
    """The cohort at some settings as solvers take it: the bags of each fold, and their W'H."""

    chunks: list[list[Chunk]]
    gram: list[Float[Tensor, "M M"]]
    c: float

    def without(self, k: int) -> Problem:
        """The problem of the bags of all other folds."""
        others = [j for j in range(len(self.gram)) if j != k]
        R = torch.eye(len(self.gram[k])).to(self.gram[k]) + sum(self.gram[j] for j in others)
        R = (R + R.mT) / 2
        chunks = [chunk for j in others for chunk in self.chunks[j]]
        n = sum(len(chunk.H) for chunk in chunks)
        return Problem(chunks, R, torch.linalg.cholesky(R), self.c, n, 0.0)


def folds_at(cohort: Cohort, held: Held) -> Folds:
    """H and W'H of every fold. Of a bag only H is held: Sigma and K would take tens of GB."""
    parts: list[list[Flat]] = [[] for _ in range(cohort.n_folds)]
    gram = [torch.zeros(()) for _ in parts]
    for batch in cohort.batches():
        bag = bag_of(cohort, batch, *held, with_K=False)
        gram[batch.fold] = gram[batch.fold].to(bag.H) + bag.W.flatten(0, 1).mT @ bag.H.flatten(0, 1)
        parts[batch.fold].append(Flat.of(bag))
    tau = float(held.theta.slide_effect)
    return Folds([joined(some, tau) for some in parts], gram, float(held.theta.mean))


class Flat(NamedTuple):
    """Bags one after the other, without padding."""

    H: Float[Tensor, "n M"]
    deviation: Float[Tensor, " n"]
    sizes: Int[Tensor, " b"]
    positive: Bool[Tensor, " b"]
    known: Int[Tensor, " n"] | None

    @classmethod
    def of(cls, bag: Bag) -> "Flat":
        """The same bags as they are left out."""
        deviation = bag.sigma.diagonal(dim1=-2, dim2=-1).sqrt()[bag.mask]
        known = None if bag.known is None else bag.known[bag.mask]
        return cls(bag.H[bag.mask], deviation, bag.mask.sum(-1), bag.positive, known)

    def chunk(self, tau: float) -> Chunk:
        """As solvers take them; no precision, which the direct solver does not ask for."""
        offsets = torch.cat([self.sizes.new_zeros(1), self.sizes.cumsum(0)])
        rows = slice(0, len(self.deviation))
        group = Group(
            self.deviation, offsets, self.positive, None, rows, effect=tau, known=self.known
        )
        return Chunk(self.H, patches(group))


def joined(parts: list[Flat], tau: float) -> list[Chunk]:
    """Chunks of whole batches, CHUNK_ROWS and more where there are as many: few, not tiny."""
    found: list[Chunk] = []
    while parts:
        rows = np.cumsum([len(part.H) for part in parts])
        n = 1 + int(np.searchsorted(rows[:-1], CHUNK_ROWS))
        H, deviation, sizes, positive, known = zip(*parts[:n], strict=True)
        whole = [torch.cat(column) for column in (H, deviation, sizes, positive)]
        labels = None if known[0] is None else torch.cat(known)
        found.append(Flat._make([*whole, labels]).chunk(tau))
        parts = parts[n:]
    return found


def fit(folds: Folds, start: Float[Tensor, "k M"] | None = None) -> Fits:
    """Maximise the collapsed bound without each fold; from zero, or from fits of the same folds."""
    problems = [folds.without(k) for k in range(len(folds.gram))]
    starts = [None for _ in problems] if start is None else list(start)
    w = [inference.direct(p, 100, TOLERANCE, s).w for p, s in zip(problems, starts, strict=True)]
    inverse = [torch.cholesky_inverse(p.chol_R) for p in problems]
    return Fits(torch.stack(w), torch.stack(inverse))


def scores(cohort: Cohort, batch: Batch, held: Held, fits: Fits) -> Float[Tensor, " b"]:
    """log p(y_b) of some bags of one fold under the fit without it, by plain EP."""
    bag, k = bag_of(cohort, batch, *held), batch.fold
    S = leave_out.covariance_from(bag, bag.H @ fits.R_inverse[k] @ bag.H.mT)
    return leave_out.smooth_scores(bag, held.theta.mean + bag.H @ fits.w[k], S)


def left_out(
    cohort: Cohort, settings: Settings, start: Tensor | None = None
) -> tuple[Float[Tensor, " B"], Float[Tensor, "k M"]]:
    """log p(y_b) of every bag under the fit without its fold, in the order of the cohort, and w."""
    with torch.no_grad():
        held = held_at(cohort, theta_of(settings, cohort.inputs.device))
        fits = fit(folds_at(cohort, held), start)
        out = torch.full((len(cohort.positive),), torch.nan, dtype=torch.float64)
        for batch in cohort.batches():
            out[torch.from_numpy(batch.bags)] = scores(cohort, batch, held, fits).cpu()
    return out, fits.w


def value(
    cohort: Cohort, settings: Settings, start: Tensor | None = None
) -> tuple[float, Float[Tensor, "k M"]]:
    """The mean log likelihood of a bag under the fit without its fold, and w."""
    found, w = left_out(cohort, settings, start)
    return float(found.mean()), w


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
    w: Float[Tensor, "k M"]
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
        folds = folds_at(cohort, held_at(cohort, theta))
        found = fit(folds, start)
    for x in theta:
        if isinstance(x, Tensor):
            x.requires_grad_()
    fits = Fits(*(_leaf(x) for x in found))
    with torch.enable_grad():
        made = held_at(cohort, theta)
        held = Held(theta, _leaf(made.L), None if made.v is None else _leaf(made.v))
        score = _score_at(cohort, held, fits)
        _through_fits(cohort, held, found, *_adjoint(folds, fits))
        made.L.backward(held.L.grad)
        if made.v is not None and held.v is not None:
            made.v.backward(held.v.grad)
    return Slopes(
        score,
        Settings(*(float(collected(x)) if isinstance(x, Tensor) else 0.0 for x in theta[:7])),
        found.w,
        None if theta.weights is None else collected(theta.weights).cpu().numpy(),
    )


def _leaf(x: Tensor) -> Tensor:
    return x.detach().requires_grad_()


def collected(x: Tensor) -> Tensor:
    """What was collected; zero where the score does not depend on x."""
    return torch.zeros_like(x) if x.grad is None else x.grad


def _score_at(cohort: Cohort, held: Held, fits: Fits) -> float:
    """The score with w and R of every fold held; their adjoints are collected on the way."""
    total = 0.0
    for batch in cohort.batches():
        part = scores(cohort, batch, held, fits).sum() / len(cohort.positive)
        part.backward()
        total += float(part.detach())
    return total


def _adjoint(folds: Folds, fits: Fits) -> tuple[Float[Tensor, "k M"], Float[Tensor, "k M M"]]:
    """v_k = J_k^-1 score_w_k, and what the score says of R_k."""
    v = []
    for k, (w, bar) in enumerate(zip(fits.w.detach(), collected(fits.w), strict=True)):
        J = inference.collapsed_bound(folds.without(k), w)[2]
        v.append(torch.linalg.solve((J + J.mT) / 2, bar))
    # d R^-1 = -R^-1 dR R^-1
    inverse = fits.R_inverse.detach()
    return torch.stack(v), -inverse @ collected(fits.R_inverse) @ inverse


def _through_fits(
    cohort: Cohort,
    held: Held,
    fits: Fits,
    v: Float[Tensor, "k M"],
    R_bar: Float[Tensor, "k M M"],
) -> None:
    """What g_k = sum H'gamma - w_k = 0 and R_k = I + sum W'H add, sums over the other folds."""
    for batch in cohort.batches():
        bag = bag_of(cohort, batch, *held, with_K=False)
        others = [k for k in range(cohort.n_folds) if k != batch.fold]
        mu = held.theta.mean + torch.einsum("bpm,km->kbp", bag.H, fits.w[others])
        push = torch.einsum("bpm,km->kbp", bag.H, v[others])
        out = (push * leave_out.gammas(bag, mu)).sum()
        out = out + ((bag.W @ R_bar[others].sum(0)) * bag.H).sum()
        out.backward()
