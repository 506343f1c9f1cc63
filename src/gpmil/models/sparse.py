"""What every sparse Gaussian-process model of bags shares: inputs, inducing points, q(u).

Features become kernel inputs (features.py), inducing points are placed among them (inducing.py),
and q(u) is kept whitened (sparse_gp.py). The likelihood is the model's own.
"""

from numbers import Integral
from typing import Any, TypeVar

import gpytorch
import numpy as np
import torch
from jaxtyping import Float

from gpmil.models.base import BagClassifier
from gpmil.models.checks import check_inducing, check_lengths, generator
from gpmil.process.features import FeatureMap, Rows
from gpmil.process.inducing import kmeans_by_class
from gpmil.process.kernels import Kernel
from gpmil.process.sparse_gp import Posterior, Predictor, SparseGP

Model = TypeVar("Model", bound="SparseGPModel")


class SparseGPModel(BagClassifier):
    """The Gaussian process of a model, fitted or about to be."""

    kernel_: str | gpytorch.kernels.Kernel
    variance_: float | None  # None with a kernel object
    lengthscale_: float | None
    mean_: float
    inducing_points_: np.ndarray
    posterior_mean_: np.ndarray
    posterior_covariance_: np.ndarray
    whitened_mean_: np.ndarray
    whitened_precision_: np.ndarray
    relevance_: np.ndarray | None  # weights of the columns, where each has its length
    lengthscale: Any
    n_inducing: Any
    inducing: Any
    random_state: Any
    device: Any

    def fit(self: Model, bags, y=None) -> Model:
        """Fit q(u) to labelled bags; y (0/1, one a bag) wins over `bags.labels`."""
        with torch.no_grad():
            return super().fit(bags, y)

    def _keep(self, gp: SparseGP, q: Posterior) -> None:
        """q(u) as fitted attributes."""
        self.whitened_mean_, self.whitened_precision_ = q.w.cpu().numpy(), q.R.cpu().numpy()
        self.posterior_mean_ = q.mean_u(gp).cpu().numpy()
        self.posterior_covariance_ = q.covariance_u(gp).cpu().numpy()

    def _keep_feature_map(self, found: FeatureMap) -> None:
        super()._keep_feature_map(found)
        self.relevance_ = None
        if np.ndim(self.lengthscale) == 1:
            lengths = check_lengths(self.lengthscale, self._n_inputs())
            self._weigh_columns(np.exp(np.log(lengths).mean()) / lengths)

    def _weigh_columns(self, weights: Float[np.ndarray, " d"]) -> None:
        """Lengths lengthscale_ / weights: the weights go into the scale of the inputs."""
        self.relevance_ = weights
        self.feature_scale_ = self.feature_scale_ / weights

    def _place_inducing(
        self, rows: Rows, positive_row: np.ndarray, device: torch.device
    ) -> Float[np.ndarray, "M D"]:
        if not isinstance(self.inducing, str):
            return check_inducing(self.inducing, rows.shape[1])
        return kmeans_by_class(
            rows, positive_row, self._feature_map(), int(self.n_inducing), self._seed(), device
        )

    def _seed(self) -> int:
        if isinstance(self.random_state, Integral):
            return int(self.random_state)
        return int(generator(self.random_state).integers(2**31))

    def _n_inputs(self) -> int:
        return len(self.feature_scale_) if self.n_components is None else int(self.n_components)

    def _check_kernel(self, device: torch.device) -> None:
        try:
            self._gp(device)
        except RuntimeError as error:
            raise ValueError(
                f"the kernel cannot be evaluated on inputs of {len(self.feature_scale_)} columns: "
                f"{error}. A kernel object with one length a column must have as many."
            ) from error

    def _inputs(self, x: Rows, device: torch.device) -> torch.Tensor:
        return self._feature_map()(x, device)

    def _gp(self, device: torch.device) -> SparseGP:
        kernel = Kernel(self.kernel_, self.variance_ or 1.0, self.lengthscale_ or 1.0, device)
        return SparseGP.build(kernel, self._inputs(self.inducing_points_, device))

    def _predictor(self, device: torch.device) -> Predictor:
        return Predictor.build(self._gp(device), self._posterior(device), self.mean_)

    def _posterior(self, device: torch.device) -> Posterior:
        w, R = (
            torch.from_numpy(a).to(device) for a in (self.whitened_mean_, self.whitened_precision_)
        )
        return Posterior.build(w, R)
