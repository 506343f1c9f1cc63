"""A cohort at some settings: W, H = Sigma W, and what inducing points do not explain of each row.

Differentiable in the settings, which are numbers of torch where a gradient is asked for.
"""

from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Float
from linear_operator.utils.cholesky import psd_safe_cholesky
from torch import Tensor

from gpmil.inference import row_products
from gpmil.inference.folded_cohort import Cohort
from gpmil.process.kernels import JITTER
from gpmil.process.slide_context import whitened


class Settings(NamedTuple):
    """The numbers of a model, in the space of the kernel's inputs."""

    variance: float
    lengthscale: float
    mean: float
    coupling: float
    slide_effect: float = 0.0
    slide_context: float = 0.0  # gamma_s
    slide_context_lengthscale: float = 1.0  # no meaning where gamma_s is 0


class Theta(NamedTuple):
    """The settings as numbers of torch, to differentiate or not."""

    variance: Float[Tensor, ""]
    lengthscale: Float[Tensor, ""]
    mean: Float[Tensor, ""]
    coupling: Float[Tensor, ""] | float
    slide_effect: Float[Tensor, ""] | float = 0.0  # a number where there is none
    slide_context: Float[Tensor, ""] | float = 0.0
    slide_context_lengthscale: Float[Tensor, ""] | float = 1.0
    weights: Float[Tensor, " d"] | None = None  # of the columns: lengths are lengthscale / weights

    @property
    def leaves(self) -> list[Tensor]:
        """Those to differentiate."""
        return [x for x in self if isinstance(x, Tensor)]


def theta_of(
    settings: Settings, device: torch.device | str, weights: np.ndarray | None = None
) -> Theta:
    """The settings as numbers of torch; what is not there, an effect, a context, stays a number."""
    names = ["variance", "lengthscale", "mean"]
    names += [name for name in ("coupling", "slide_effect") if getattr(settings, name) > 0]
    if settings.slide_context > 0:
        names += ["slide_context", "slide_context_lengthscale"]
    tensors = {
        name: torch.tensor(getattr(settings, name), dtype=torch.float64, device=device)
        for name in names
    }
    columns = None if weights is None else torch.tensor(weights, device=device)
    return Theta(**(settings._asdict() | tensors), weights=columns)


def inducing_factor(cohort: Cohort, theta: Theta) -> Float[Tensor, "M M"]:
    """L = chol(Kzz + jitter)."""
    formula = cohort.formula
    Z = cohort.inducing if theta.weights is None else cohort.inducing * theta.weights
    unit = formula.value(formula.pairs(Z, Z), theta.lengthscale)
    jitter = JITTER if isinstance(cohort.kernel, str) else JITTER * unit.diagonal().mean()
    eye = torch.eye(len(unit), dtype=unit.dtype, device=unit.device)
    return psd_safe_cholesky(theta.variance * (unit + jitter * eye))


class Features(NamedTuple):
    """The rows of all bags at some settings."""

    W: Float[Tensor, "N M"]
    H: Float[Tensor, "N M"]  # Sigma W
    noise: Float[Tensor, " N"]  # the diagonal of Sigma
    spread: Float[Tensor, " N"]  # the diagonal of Sigma diag(r) Sigma
    residual: Float[Tensor, " N"]  # r, the diagonal of K - W W'
    common: Float[Tensor, " B"]  # in the covariance of any two patches of a bag

    def leaves(self) -> "Features":
        """Copies to collect adjoints on."""
        return Features(*(x.detach().requires_grad_() for x in self))


def features(cohort: Cohort, theta: Theta) -> Features:
    """W, H and what is not explained by inducing points, of every instance."""
    formula, L = cohort.formula, inducing_factor(cohort, theta)
    pairs, own = _pairs(cohort, theta)
    W = _whitened(formula.value(pairs, theta.lengthscale), theta.variance, L)
    diagonal = theta.variance * formula.value(own, theta.lengthscale)
    r = (diagonal - row_products.squares(W)).clamp(min=0)
    sigma = cohort.smoothing.at(theta.coupling)
    noise, spread = sigma.diagonals(r, theta.coupling)
    H = sigma.apply(W, theta.coupling)
    common = torch.zeros_like(cohort.labels, dtype=W.dtype) + theta.slide_effect**2
    if cohort.context is not None:
        v = whitened(*cohort.context, theta.slide_context, theta.slide_context_lengthscale)
        # Sigma 1 v' = 1 v'
        W, H = (torch.cat([x, v[cohort.row]], 1) for x in (W, H))
        common = common + (theta.slide_context - v.square().sum(1)).clamp(min=0)
    return Features(W, H, noise, spread, r, common)


def _whitened(
    K: Float[Tensor, "N M"], variance: Float[Tensor, ""], L: Float[Tensor, "M M"]
) -> Float[Tensor, "N M"]:
    """W = Kxz L^-T."""
    # a product takes half the time of a triangular solve with as many rows
    inverse = torch.linalg.solve_triangular(L, torch.eye(len(L)).to(L), upper=False)
    return row_products.triangular(K, variance * inverse.mT)


def _pairs(cohort: Cohort, theta: Theta) -> tuple[Float[Tensor, "N M"], Float[Tensor, " N"]]:
    """What the kernel is a function of; columns may have weights."""
    if theta.weights is None:
        return cohort.pairs, cohort.own
    x, formula = torch.cat(list(cohort.blocks())) * theta.weights, cohort.formula
    return formula.pairs(x, cohort.inducing * theta.weights), formula.own(x)
