"""The mean log likelihood of bags under fits that have not seen them, and its gradient.

The cohort is cut into folds, patients whole. Without fold k the fit is the maximum w_k of the
collapsed bound of the other bags, really fitted, and R_k is their R: a step from the fit of all
bags would stay near a maximum that the bags left out helped to choose, and with a slide effect
the bound has several. Of the bags of fold k

    mu = c + H w_k,   S = Sigma + Sigma V Sigma + tau^2 11',   V = K - W W' + W R_k^-1 W',

and log p(y_b) is that of one_factor.py, which asks for the diagonal of S and one product S g. The
residual K - W W' counts by its diagonal r alone, so that nothing is larger than N x M:

    S_ii = Sigma_ii + (Sigma diag(r) Sigma)_ii + H_i R_k^-1 H_i' + tau^2.

The gradient in the settings z goes through each optimum: with g_k(w_k, z) = 0 the condition for
w_k and J_k = -dg_k/dw_k,

    d score / dz = score_z + sum_k score_w_k' J_k^-1 g_k,z.

All of it is computed with the bags in the order of their folds (folded_cohort.py).
"""

import math
import operator
from collections.abc import Callable, Iterable
from typing import NamedTuple, TypeVar, cast

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from gpmil.fast.lanes import in_lanes
from gpmil.inference import fold_grams, nearby, row_products
from gpmil.inference import solvers as inference
from gpmil.inference.at_settings import (
    Features,
    Settings,
    Theta,
    features,
    inducing_factor,
    theta_of,
)
from gpmil.inference.folded_cohort import Cohort, Fold
from gpmil.inference.pieces import Chunk
from gpmil.inference.solvers import Problem
from gpmil.moments import one_factor
from gpmil.moments.likelihood import Group, Product
from gpmil.moments.taught import patches

Own = TypeVar("Own")  # what a fold has
Found = TypeVar("Found")  # and what is found for it
TOLERANCE = 1e-6  # of w
LOST = 1e-2  # residual of w, relative, at which a start has led nowhere
ROUGH = 1e-4  # where fits are compared, and not differentiated


# --- The fits ------------------------------------------------------------------------------------


class Prior(NamedTuple):
    """What f = c + L w is at the inducing points, before any bag is seen."""

    factor: Float[Tensor, "m m"]  # L; M of the M weights, without those of a slide context
    mean: float
    deviation: float  # sqrt(1 + variance), that of a patch


def prior_of(cohort: Cohort, theta: Theta) -> Prior:
    """At some settings."""
    with torch.no_grad():
        deviation = math.sqrt(1 + float(theta.variance))
        return Prior(inducing_factor(cohort, theta), float(theta.mean), deviation)


class Fits(NamedTuple):
    """The fit without each fold: w, the inverse of R = I + sum W'H, and J, about the Hessian."""

    w: Float[Tensor, "k M"]
    R_inverse: Float[Tensor, "k M M"]
    J: Float[Tensor, "k M M"]  # of minus the collapsed bound
    prior: Prior

    def moved(self, to: Prior) -> tuple[Float[Tensor, "k M"], Float[Tensor, "k M M"]]:
        """w and J as a start at other settings: f keeps its place in units of a patch's deviation.

        c' + L'w' = a (c + L w), a the ratio of the deviations, and with T = L^-1 L' about
        J' - I = T'(J - I) T / a^2; weights of a slide context stay.
        """
        L, c, n, a = *self.prior[:2], len(to.factor), to.deviation / self.prior.deviation
        at_points = a * (c + self.w[:, :n] @ L.mT) - to.mean
        w = torch.linalg.solve_triangular(to.factor, at_points.mT, upper=False).mT
        rest = torch.eye(self.w.shape[1] - n).to(L)
        T = torch.block_diag(torch.linalg.solve_triangular(L, to.factor, upper=False) / a, rest)
        eye = torch.eye(len(T)).to(T)
        return torch.cat([w, self.w[:, n:]], 1), eye + T.mT @ (self.J - eye) @ T


def problems(cohort: Cohort, theta: Theta, made: Features) -> list[Problem]:
    """Without each fold: the bags of all others as solvers take them."""
    tau, c = float(theta.slide_effect), float(theta.mean)
    R = fold_grams.precisions(cohort, theta, made)
    H, sigma = (cohort.twice(x) for x in (made.H, made.noise.sqrt()))
    chunks = [Chunk(H[f.rows], patches(group_of(f, sigma[f.rows], tau))) for f in cohort.around]
    return [
        Problem([chunk], own, torch.linalg.cholesky(own), c, len(chunk.H), 0.0)
        for chunk, own in zip(chunks, R, strict=True)
    ]


def group_of(fold: Fold, sigma: Float[Tensor, " n"], tau: float | Tensor) -> Group:
    """As likelihoods take the bags; no precision, which the direct solver does not ask for."""
    rows = slice(0, len(sigma))
    return Group(sigma, fold.offsets, fold.positive, None, rows, effect=tau, known=fold.known)


def fit(
    posed: list[Problem], prior: Prior, start: Fits | None = None, tolerance: float = TOLERANCE
) -> Fits:
    """Maximise the collapsed bound without each fold; from zero, or from fits of the same folds.

    Where one fit alone is known to start from, it is for the first fold, as zero is.
    """
    device = posed[0].R.device
    if start is None:
        found = _from_first(posed, tolerance, _afresh(posed[0], tolerance))
    elif len(start.w) < len(posed):
        (w, *_), (J, *_) = start.moved(prior)
        found = _from_first(posed, tolerance, _from_nearby(posed[0], tolerance, w, J))
    else:
        starts = zip(posed, *start.moved(prior), strict=True)
        found = _fold_by_fold(starts, lambda own: _from_nearby(own[0], tolerance, *own[1:]), device)
    ends = zip(posed, found, strict=True)
    J = _fold_by_fold(ends, lambda own: _hessian(*own), device)
    inverse = [torch.cholesky_inverse(problem.chol_R) for problem in posed]
    w = torch.stack([one.w for one in found])
    return Fits(w, torch.stack(inverse), torch.stack(J), prior)


def _from_first(
    posed: list[Problem], tolerance: float, first: inference.Solution
) -> list[inference.Solution]:
    """From the fit without the first fold, with three of four bags shared, those without others."""
    J = _hessian(posed[0], first)
    others = _fold_by_fold(
        posed[1:], lambda own: _from_nearby(own, tolerance, first.w, J), J.device
    )
    return [first._replace(curvature=J), *others]


def _fold_by_fold(
    folds: Iterable[Own], work: Callable[[Own], Found], device: torch.device
) -> list[Found]:
    """`work` on every fold, which does not see the others: side by side where there are threads.

    Beside a GPU they would wait for each other to launch what it is to do.
    """
    given, beside = list(folds), device.type == "cpu"
    return in_lanes(
        given, lambda own: [work(one) for one in own], operator.add, beside, most=len(given)
    )


def _hessian(problem: Problem, found: inference.Solution) -> Float[Tensor, "M M"]:
    """That of minus the bound where a solver ended, if it kept none."""
    kept = found.curvature
    return inference.collapsed_bound(problem, found.w)[2] if kept is None else kept


def _from_nearby(
    problem: Problem, tolerance: float, w: Float[Tensor, " M"], J: Float[Tensor, "M M"]
) -> inference.Solution:
    """From a start that may lead nowhere, or else from zero."""
    found = nearby.maximum(problem, 100, tolerance, w, J)
    return found if found.residual < LOST else _afresh(problem, tolerance)


def _afresh(problem: Problem, tolerance: float) -> inference.Solution:
    """From zero. The Hessian that led there is left: gradients in the settings want that of w."""
    return inference.maximise(problem, 100, tolerance)._replace(curvature=None)


def carried(fits: Fits, cohort: Cohort, to: Cohort, settings: Settings) -> Fits:
    """The first of fits at these settings, as a start with more bags and points: Z to Z'.

    u' = K_z'z Kzz^-1 u, so that w' = L'^-1 K_z'z L^-T w; what a slide context has stays. The other
    way round w = T w', and with the Hessian of N' rows as large as that of N allows to expect,
    J' - I = N'/N T'(J - I) T. A start is asked for w and J alone: R^-1 is left as it was.
    """
    with torch.no_grad():
        theta = theta_of(settings, to.device)
        formula, prior = to.formula, prior_of(to, theta)
        w, J, L, Z = (
            x.to(to.device) for x in (fits.w, fits.J[:1], fits.prior.factor, cohort.inducing)
        )
        cross = formula.value(formula.pairs(to.inducing, Z), theta.lengthscale)
        half = torch.linalg.solve_triangular(L, theta.variance * cross.mT, upper=False)
        T = torch.linalg.solve_triangular(prior.factor, half.mT, upper=False).mT
        T = torch.block_diag(T, torch.eye(w.shape[1] - len(L)).to(T))
        more = int(to.offsets[-1]) / int(cohort.offsets[-1])
        eye, one = (torch.eye(size).to(T) for size in T.shape)
        return Fits(w[:1] @ T, fits.R_inverse, one + more * T.mT @ (J - eye) @ T, prior)


# --- The score -----------------------------------------------------------------------------------


class Latent(NamedTuple):
    """m of every instance under the fit without its fold: mean, variance, and R_k^-1."""

    mu: Float[Tensor, " N"]
    variance: Float[Tensor, " N"]
    R_inverse: Float[Tensor, "k M M"]


def latent(cohort: Cohort, theta: Theta, made: Features, fits: Fits) -> Latent:
    """mu = c + H w_k, and S_ii."""
    own = cohort.by_fold(made.H)
    mu = cohort.placed([H @ w for H, w in zip(own, fits.w, strict=True)])
    forms = cohort.placed(
        [row_products.forms(H, Q) for H, Q in zip(own, fits.R_inverse, strict=True)]
    )
    common = made.common.index_select(0, cohort.row)
    variance = made.noise + made.spread + forms + common
    return Latent(theta.mean + mu, variance, fits.R_inverse)


def loadings(
    cohort: Cohort, theta: Theta, made: Features, m: Latent, mu: Float[Tensor, " N"]
) -> Float[Tensor, " N"]:
    """u of one_factor.py, for what happens where `mu` is near zero: m.mu, or above a cut point."""
    row, sigma, strength = cohort.row, cohort.smoothing.at(theta.coupling), theta.coupling
    g = one_factor.weights(mu, m.variance)
    # S_o g = (S - diag(Sigma)) g, S = Sigma + Sigma diag(r) Sigma + H R^-1 H' + common 11'
    smooth = sigma.apply(g[:, None], strength)
    again = sigma.apply(made.residual[:, None] * smooth, strength)[:, 0]
    pulled = [
        row_products.with_bags(H, Q, own, f.offsets)
        for f, H, own, Q in zip(
            cohort.folds, cohort.by_fold(made.H), cohort.by_fold(g), m.R_inverse, strict=True
        )
    ]
    total = fold_grams.totals(g[:, None], cohort.starts)[:, 0] * made.common
    shared = smooth[:, 0] - made.noise * g + again + cohort.placed(pulled)
    shared = shared + total.index_select(0, row)
    return one_factor.loadings(shared, g, m.variance, row, cohort.n_bags)


def scores(cohort: Cohort, theta: Theta, made: Features, fits: Fits) -> Float[Tensor, " B"]:
    """log p(y_b) of every bag under the fit without its fold."""
    m = latent(cohort, theta, made, fits)
    u = loadings(cohort, theta, made, m, m.mu)
    bags = (cohort.starts, cohort.labels, cohort.told)
    return one_factor.log_labels(m.mu, m.variance, u, *bags)


def left_out(
    cohort: Cohort,
    settings: Settings,
    start: Fits | None = None,
    tolerance: float = TOLERANCE,
) -> tuple[Float[Tensor, " B"], Fits]:
    """log p(y_b) of every bag under the fit without its fold, in the order of the cohort."""
    own = cohort.in_folds
    with torch.no_grad():
        theta = theta_of(settings, own.device)
        made = features(own, theta)
        fits = fit(problems(own, theta, made), prior_of(own, theta), start, tolerance)
        return cohort.as_given(scores(own, theta, made, fits)).cpu(), fits


def value(cohort: Cohort, settings: Settings, start: Fits | None = None) -> tuple[float, Fits]:
    """The mean log likelihood of a bag under the fit without its fold, and these fits."""
    found, fits = left_out(cohort, settings, start)
    return float(found.mean()), fits


# --- Its gradient --------------------------------------------------------------------------------


class Slopes(NamedTuple):
    """The scores of bags left out, and the derivatives of their mean in all that is learned."""

    scores: Float[Tensor, " B"]
    settings: Settings
    fits: Fits
    weights: Float[np.ndarray, " d"] | None  # of the columns, where they have any

    @property
    def score(self) -> float:
        """The mean log likelihood of a bag."""
        return float(self.scores.mean())


def gradient(
    cohort: Cohort,
    settings: Settings,
    start: Fits | None = None,
    weights: Float[np.ndarray, " d"] | None = None,
) -> Slopes:
    """The same with its derivatives in the settings (and the weights of the columns)."""
    own = cohort.in_folds
    theta = theta_of(settings, own.device, weights)
    for x in theta.leaves:
        x.requires_grad_()
    with torch.enable_grad():
        made = features(own, theta)
        held = made.leaves()
        with torch.no_grad():
            posed = problems(own, theta, made)
            found = fit(posed, prior_of(own, theta), start)
        optima = _optima(own, theta, held, found.w)
        found = found._replace(J=_hessians(posed, optima))
        fits = found._replace(w=_leaf(found.w), R_inverse=_leaf(found.R_inverse))
        found_scores = scores(own, theta, held, fits)
        found_scores.mean().backward()
        _through_fits(own, theta, held, optima, found.w, *_adjoint(fits))
        live = [(x, collected(leaf)) for x, leaf in zip(made, held) if x.requires_grad]
        torch.autograd.backward([x for x, _ in live], [bar for _, bar in live])
    slopes = [float(collected(x)) if isinstance(x, Tensor) else 0.0 for x in theta[:7]]
    columns = None if theta.weights is None else collected(theta.weights).cpu().numpy()
    by_bag = cohort.as_given(found_scores.detach()).cpu()
    return Slopes(by_bag, Settings(*slopes), found, columns)


def _leaf(x: Tensor) -> Tensor:
    return x.detach().requires_grad_()


def collected(x: Tensor) -> Tensor:
    """What was collected; zero where the score does not depend on x."""
    return torch.zeros_like(x) if x.grad is None else x.grad


class Optimum(NamedTuple):
    """The bags of all folds but one at w_k: gamma and A, which go back to mu and sigma."""

    mu: Float[Tensor, " n"]
    sigma: Float[Tensor, " n"]
    gamma: Float[Tensor, " n"]
    A: Product


def _optima(cohort: Cohort, theta: Theta, held: Features, w: Float[Tensor, "k M"]) -> list[Optimum]:
    """The likelihoods at each optimum, for its Hessian and for the way back through it."""
    with torch.no_grad():
        mu, sigma = cohort.twice(held.H @ w.mT), cohort.twice(held.noise.sqrt())
    found = []
    for k, others in enumerate(cohort.around):
        at, own = _leaf(mu[others.rows, k]), _leaf(sigma[others.rows])
        likelihood = patches(group_of(others, own, theta.slide_effect))
        gamma, _, A = likelihood.curvature(theta.mean + at)
        found.append(Optimum(at, own, gamma, A))
    return found


def _hessians(posed: list[Problem], optima: list[Optimum]) -> Float[Tensor, "k M M"]:
    """J_k = I + H'A H."""
    with torch.no_grad():
        H = [cast(Chunk, problem.chunks[0]).H for problem in posed]
        pairs = zip(optima, H, strict=True)
        curved = _fold_by_fold(pairs, lambda own: own[0].A(own[1], own[1]), H[0].device)
        return torch.eye(H[0].shape[1]).to(H[0]) + torch.stack(curved)


def _adjoint(fits: Fits) -> tuple[Float[Tensor, "k M"], Float[Tensor, "k M M"]]:
    """v_k = J_k^-1 score_w_k, and what the score says of R_k."""
    v = torch.linalg.solve((fits.J + fits.J.mT) / 2, collected(fits.w))
    # d R^-1 = -R^-1 dR R^-1
    inverse = fits.R_inverse.detach()
    return v, -inverse @ collected(fits.R_inverse) @ inverse


def _through_fits(
    cohort: Cohort,
    theta: Theta,
    held: Features,
    optima: list[Optimum],
    w: Float[Tensor, "k M"],
    v: Float[Tensor, "k M"],
    R_bar: Float[Tensor, "k M M"],
) -> None:
    """What g_k = sum H'gamma - w_k = 0 and R_k = I + sum W'H add, sums over the other folds."""
    _through_optima(cohort, held, optima, w, v)
    symmetric = (R_bar + R_bar.mT) / 2
    fold_grams.through(cohort, theta, held, symmetric.sum(0) - symmetric)


def _through_optima(
    cohort: Cohort,
    held: Features,
    optima: list[Optimum],
    w: Float[Tensor, "k M"],
    v: Float[Tensor, "k M"],
) -> None:
    """sum_k v_k'g_k at fixed w_k; its derivative in H is of rank two per fold.

    With gamma(mu) at mu = c + H w_k it is (H v_k)'gamma, so that H' = gamma v_k' + mu' w_k'.
    """
    with torch.no_grad():
        along, sigma = cohort.twice(held.H @ v.mT), cohort.twice(held.noise.sqrt())
    by_mu, gammas, by_sigma = (torch.zeros_like(x) for x in (along, along, sigma))
    for k, (others, at) in enumerate(zip(cohort.around, optima, strict=True)):
        (along[others.rows, k] * at.gamma).sum().backward()
        gammas[others.rows, k], by_mu[others.rows, k] = at.gamma.detach(), collected(at.mu)
        by_sigma[others.rows] += collected(at.sigma)
    by_H = cohort.once(torch.cat([gammas, by_mu], 1)) @ torch.cat([v, w])
    torch.autograd.backward(
        [held.H, held.noise], [by_H, cohort.once(by_sigma) / (2 * held.noise.detach().sqrt())]
    )
