"""What every sparse Gaussian-process model of bags shares: inputs, inducing points, q(u).

Features become kernel inputs (features.py), inducing points are placed among them (inducing.py),
and q(u) is kept whitened (sparse_gp.py). The likelihood is the model's own.
"""

import copy
import logging
import math
from numbers import Integral
from typing import Any, ClassVar, TypeVar

import gpytorch
import numpy as np
import torch
from jaxtyping import Float, Int

from gpmil import distributed
from gpmil.data.bags import Bags
from gpmil.distributed import Cohort, Facts, WholeCohort
from gpmil.fast.lanes import few_threads, one_blas_thread
from gpmil.models.base import resolve_device
from gpmil.models.checks import (
    check_inducing,
    check_lengths,
    count,
    flag,
    generator,
    is_word,
    one_of,
)
from gpmil.models.progress import progress_shown
from gpmil.models.saved import SavedModel
from gpmil.process.features import FeatureMap, Rows
from gpmil.process.kernels import Kernel
from gpmil.process.slide_context import SlideContext
from gpmil.process.sparse_gp import Posterior, Predictor, SparseGP, doubt

logger = logging.getLogger("gpmil")
Model = TypeVar("Model", bound="SparseGPModel")
TrainingCohort = WholeCohort | Cohort  # here, or in partitions elsewhere
ROWS = 8192  # instances at a time where no bag has to be whole
QUICK = 2**22  # numbers in H up to which one thread fits: others would only wait for each other
DTYPES = {"float64": torch.float64, "float32": torch.float32}


class SparseGPModel(SavedModel):
    """The Gaussian process of a model, fitted or about to be."""

    PLACEMENTS: ClassVar[tuple[str, ...]] = ("kmeans",)  # of inducing points, in a word

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
    kernel: Any
    variance: Any
    lengthscale: Any
    mean: Any
    n_inducing: Any
    max_iter: Any
    inducing: Any
    random_state: Any
    device: Any

    def fit(self: Model, bags, y=None, *, client=None, group=None) -> Model:
        """Fit q(u) to labelled bags; y (0/1, one per bag) wins over `bags.labels`.

        Over several machines, to the same model: with `client`, a `dask.distributed.Client`, bags
        may also be a list of Bags, or of functions that build them on the workers; with `group`, a
        torch.distributed process group, every process passes its own bags. See
        `gpmil.distributed`.
        """
        if client is None and group is None:
            with torch.no_grad():
                return super().fit(bags, y)
        fresh = copy.copy(self)

        def work(cluster: distributed.Cluster, y: Any) -> dict[str, Any]:
            fresh._check_settings()
            fresh._check_apart()
            cohort, device = Cohort.meet(cluster), resolve_device(fresh.device)
            with one_blas_thread():
                fresh._fit_to(cohort, y, device)
            return {name: value for name, value in vars(fresh).items() if name.endswith("_")}

        with torch.no_grad(), progress_shown(bool(self.verbose)):
            fitted = distributed.run(work, bags, y, client=client, group=group, device=self.device)
        self.__dict__.update(fitted)
        return self

    def _notices_missing_values(self) -> bool:
        """A fit that takes statistics of the features need not read a file for that before."""
        return bool(self.standardize) or self.n_components is not None

    def _fit(self, bags: Bags, y) -> None:
        self._check_settings()
        device = resolve_device(self.device)
        quick = bags.n_instances * int(self.n_inducing) <= QUICK and device.type == "cpu"
        with few_threads() if quick else one_blas_thread():
            self._fit_to(WholeCohort(bags, device), y, device)

    def _fit_to(self, cohort: TrainingCohort, y, device: torch.device) -> None:
        """The steps of a fit: to bags here, or on sums over partitions of them elsewhere."""
        raise NotImplementedError

    def _check_apart(self) -> None:
        """Refuse what needs all bags in one place."""

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

    def _place(
        self, cohort: TrainingCohort, labels: Int[np.ndarray, " B"], device: torch.device
    ) -> None:
        """The way from features to kernel inputs, and inducing points among them."""
        cohort.take_labels(labels)
        self._map_features(cohort)
        self.inducing_points_ = self._place_inducing(cohort, labels, device)

    def _map_features(self, cohort: TrainingCohort) -> None:
        wanted = None if self.n_components is None else int(self.n_components)
        self._keep_feature_map(cohort.feature_map(wanted, bool(self.standardize)))

    def _place_inducing(
        self, cohort: TrainingCohort, labels: Int[np.ndarray, " B"], device: torch.device
    ) -> Float[np.ndarray, "M D"]:
        if not isinstance(self.inducing, str):
            return check_inducing(self.inducing, self.n_features_in_)
        n_inducing, seed = int(self.n_inducing), self._seed()
        return cohort.kmeans_by_class(labels, self._feature_map(), n_inducing, seed, device)

    def _set_kernel_numbers(self) -> None:
        """The settings as numbers; a word is a first guess, until what it stands for is learned."""
        self.kernel_ = "rbf" if is_word(self.kernel, "auto") else copy.deepcopy(self.kernel)
        self.variance_ = 1.0 if isinstance(self.variance, str) else float(self.variance)
        if isinstance(self.lengthscale, str):
            self.lengthscale_ = math.sqrt(self._n_inputs())
        elif np.ndim(self.lengthscale) == 1:
            self.lengthscale_ = float(np.exp(np.log(self.lengthscale).mean()))
        else:
            self.lengthscale_ = float(self.lengthscale)
        if isinstance(self.kernel, gpytorch.kernels.Kernel):
            self.variance_ = self.lengthscale_ = None
        self.mean_ = 0.0 if isinstance(self.mean, str) else float(self.mean)

    def _check_common_settings(self) -> None:
        generator(self.random_state)
        if isinstance(self.inducing, str):
            one_of("inducing", self.inducing, self.PLACEMENTS)
        count("n_inducing", self.n_inducing, least=2)
        count("max_iter", self.max_iter, least=1)
        for name in ("standardize", "verbose"):
            flag(name, getattr(self, name))
        if self.n_components is not None:
            count("n_components", self.n_components, least=1)
        if not isinstance(self.kernel, str | gpytorch.kernels.Kernel):
            raise ValueError(
                f"kernel must be a name or a gpytorch kernel, got {type(self.kernel).__name__}."
            )

    def _seed(self) -> int:
        if isinstance(self.random_state, Integral):
            return int(self.random_state)
        return int(generator(self.random_state).integers(2**31))

    def _n_inputs(self) -> int:
        return len(self.feature_scale_) if self.n_components is None else int(self.n_components)

    def _prior(self, facts: Facts, device: torch.device) -> SparseGP:
        """The Gaussian process at the settings found; says what is about to be fitted."""
        gp = self._gp(device)
        counts = len(facts), facts.n_instances, len(gp.L)
        logger.info("fit: %d bags, %d instances, %d inducing points", *counts)
        return gp

    def _check_kernel(self, device: torch.device) -> None:
        try:
            self._gp(device)
        except RuntimeError as error:
            raise ValueError(
                f"the kernel cannot be evaluated on inputs of {len(self.feature_scale_)} columns: "
                f"{error}. A kernel object with one length per column must have as many."
            ) from error

    def _inputs(self, x: Rows, device: torch.device) -> torch.Tensor:
        return self._feature_map()(x, device)

    def _gp(self, device: torch.device) -> SparseGP:
        kernel = Kernel(self.kernel_, self.variance_ or 1.0, self.lengthscale_ or 1.0, device)
        inducing = self._inputs(self.inducing_points_, device)
        effect = getattr(self, "slide_effect_", 0.0)
        return SparseGP.build(kernel, inducing, effect, self._context(device))

    def _context(self, device: torch.device) -> SlideContext | None:
        """What the mean of a slide adds to each of its patches, in models that have it."""
        return None

    def _predictor(self, device: torch.device) -> Predictor:
        return Predictor.build(self._gp(device), self._posterior(device), self.mean_)

    def _posterior(self, device: torch.device) -> Posterior:
        w, R = (
            torch.from_numpy(a).to(device) for a in (self.whitened_mean_, self.whitened_precision_)
        )
        return Posterior.build(w, R)

    def _doubt(self, bags: Bags) -> Float[np.ndarray, " N"]:
        """How unsure f is at every instance, see `sparse_gp.doubt`."""
        device, found = resolve_device(self.device), np.empty(bags.n_instances)
        with torch.no_grad():
            predictor = self._predictor(device)
            for start in range(0, bags.n_instances, ROWS):
                rows = slice(start, start + ROWS)
                x = self._inputs(bags.features[rows], device)
                found[rows] = doubt(predictor, x).cpu().numpy()
        return found
