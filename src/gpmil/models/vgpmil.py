"""VGPMIL, the logistic Gaussian-process MIL model of Haussmann et al. (2017)."""

import copy
import logging
import math

import gpytorch
import numpy as np
import torch
from jaxtyping import Float
from sklearn.exceptions import ConvergenceWarning

from gpmil.data.bags import Bags
from gpmil.inference import logistic
from gpmil.models.base import (
    InstancePredictions,
    Predictions,
    both_classes,
    cohort_card,
    resolve_device,
    training_labels,
)
from gpmil.models.checks import (
    count,
    flag,
    generator,
    number,
    one_of,
    require_numbers,
    word_or_number,
)
from gpmil.models.saved import Saved
from gpmil.process.features import ROWS
from gpmil.process.kernels import KERNELS
from gpmil.warn import warn_caller

logger = logging.getLogger("gpmil")
DTYPES = {"float64": torch.float64, "float32": torch.float32}
BAG_RULES = ("noisy_or", "max")


class VGPMIL(Saved):
    """Logistic Gaussian-process MIL with Jaakkola's bound (Haussmann et al. 2017).

    Parameters
    ----------
    kernel, variance, lengthscale, mean
        As `VGPMILPR`, as numbers; `lengthscale="sqrt_dim"` is the square root of the number of
        features. The published model has mean 0.
    H : float
        How firmly a bag follows its instances: p(y_b | h_b) = H / (H + 1) if y_b is their
        maximum. 100 in the publication, 1e12 in its code.
    expected_max : "product" or "largest"
        E[max of the other instances] in the update of q(h): exact, one instance after the other,
        so that the bound never falls; or the largest of their probabilities, all at once, as the
        original code has it.
    bag : "noisy_or" or "max"
        P(y = 1) = 1 - prod (1 - p_i), or the largest p_i. Both are in use.
    n_inducing, inducing, standardize, n_components
        As `VGPMILPR`.
    max_iter, tol : int, float
        Most iterations; relative change of the posterior mean at which to stop before. 0 makes
        exactly `max_iter` iterations, as the publication does; convergence is slow.
    random_state : int, Generator or None
        Seeds k-means and the start: q(h_i = 1) uniform in (0, 0.1), xi standard normal, as in the
        original code.
    device, dtype, verbose
        As `VGPMILPR`.

    Examples
    --------
    >>> import gpmil
    >>> bags = gpmil.simulate.cohort(n_bags=12, n_features=16, seed=1)
    >>> model = gpmil.VGPMIL(n_inducing=30, random_state=0).fit(bags)
    >>> bool((np.diff(model.elbo_trace_) > -1e-8).all())
    True
    """

    def __init__(
        self,
        *,
        kernel="rbf",
        variance=1.0,
        lengthscale="sqrt_dim",
        mean=0.0,
        H=100.0,
        expected_max="product",
        bag="noisy_or",
        n_inducing=200,
        inducing="kmeans",
        standardize=True,
        n_components=None,
        max_iter=200,
        tol=0.0,
        random_state=None,
        device=None,
        dtype="float64",
        verbose=False,
    ):
        self.kernel = kernel
        self.variance = variance
        self.lengthscale = lengthscale
        self.mean = mean
        self.H = H
        self.expected_max = expected_max
        self.bag = bag
        self.n_inducing = n_inducing
        self.inducing = inducing
        self.standardize = standardize
        self.n_components = n_components
        self.max_iter = max_iter
        self.tol = tol
        self.random_state = random_state
        self.device = device
        self.dtype = dtype
        self.verbose = verbose

    # --- Fit ----------------------------------------------------------------------------------

    def _fit(self, bags: Bags, y) -> None:
        self._check_settings()
        labels, self.classes_ = training_labels(bags, y)
        device = resolve_device(self.device)
        self.n_features_in_ = bags.n_features
        self.cohort_ = cohort_card(bags, labels)
        self._fit_feature_map(bags.features)
        positive_row = (labels == 1)[bags.bag_index]
        self.inducing_points_ = self._place_inducing(bags.features, positive_row, device)
        self._set_kernel_numbers()
        self._check_kernel(device)
        gp = self._gp(device)
        counts = len(bags), bags.n_instances, len(gp.L)
        logger.info("fit: %d bags, %d instances, %d inducing points", *counts)
        problem = logistic.prepare(
            gp,
            lambda rows: self._inputs(bags.features[rows], device),
            bags.offsets,
            labels == 1,
            self.mean_,
            DTYPES[self.dtype],
        )
        rng = generator(self.random_state)
        found = logistic.sweeps(
            problem,
            rng.uniform(1e-12, 0.1, bags.n_instances),
            rng.standard_normal(bags.n_instances),
            float(self.H),
            int(self.max_iter),
            float(self.tol),
            self.expected_max,
        )
        self._keep(gp, found.q)
        self.cross_fit_ = None
        self.n_iter_, self.converged_ = found.n_iter, found.converged
        self.residual_ = found.residual
        self.elbo_trace_ = np.array(found.trace)
        if not self.converged_ and self.tol > 0:
            warn_caller(
                f"VGPMIL stopped after {self.n_iter_} iterations; the last one still moved the "
                f"posterior mean by {self.residual_:.1e} (tol {self.tol:g}). Raise max_iter, or "
                "tol; tol=0 makes a fixed number of iterations, as the publication does.",
                ConvergenceWarning,
            )

    def _set_kernel_numbers(self) -> None:
        own = isinstance(self.kernel, gpytorch.kernels.Kernel)
        self.kernel_ = copy.deepcopy(self.kernel)
        lengths = np.asarray(
            math.sqrt(self._n_inputs()) if isinstance(self.lengthscale, str) else self.lengthscale
        )
        self.variance_ = None if own else float(self.variance)
        self.lengthscale_ = None if own else float(np.exp(np.log(lengths).mean()))
        self.mean_ = float(self.mean)

    def _check_settings(self) -> None:
        generator(self.random_state)
        one_of("dtype", self.dtype, tuple(DTYPES))
        one_of("expected_max", self.expected_max, logistic.EXPECTED_MAX)
        one_of("bag", self.bag, BAG_RULES)
        if isinstance(self.inducing, str):
            one_of("inducing", self.inducing, ("kmeans",))
        if np.ndim(self.lengthscale) != 1:
            word_or_number("lengthscale", self.lengthscale, ("sqrt_dim",), above=0)
        number("variance", self.variance, above=0)
        number("mean", self.mean)
        number("H", self.H, above=1)
        number("tol", self.tol, least=0)
        count("n_inducing", self.n_inducing, least=2)
        count("max_iter", self.max_iter, least=1)
        for name in ("standardize", "verbose"):
            flag(name, getattr(self, name))
        if self.n_components is not None:
            count("n_components", self.n_components, least=1)
        if isinstance(self.kernel, str):
            one_of("kernel", self.kernel, tuple(KERNELS))
        elif not isinstance(self.kernel, gpytorch.kernels.Kernel):
            raise ValueError(
                f"kernel must be a name or a gpytorch kernel, got {type(self.kernel).__name__}."
            )

    # --- Predict ------------------------------------------------------------------------------

    def predict_instances(self, bags) -> InstancePredictions:
        """P(h_i = 1) = E[sigmoid(f_i)] of every instance, with mean and deviation of f_i."""
        return self._instances(self._check_predictable(bags))

    def log_proba_negative(self, bags) -> tuple[Float[np.ndarray, " B"], Float[np.ndarray, " B"]]:
        """log P(y_b = 0) by the rule `bag`, instances independent; its error is nil."""
        log_p = self._bags(self.predict_instances(bags))
        return log_p, np.zeros(len(log_p))

    def predict_all(self, bags) -> Predictions:
        """Bags and instances from one pass."""
        instances = self.predict_instances(bags)
        log_p = self._bags(instances)
        return Predictions(log_p, np.zeros(len(log_p)), both_classes(log_p), instances)

    def _instances(self, bags: Bags) -> InstancePredictions:
        device = resolve_device(self.device)
        mean, std = np.empty(bags.n_instances), np.empty(bags.n_instances)
        probability = np.empty(bags.n_instances)
        with torch.no_grad():
            predictor = self._predictor(device)
            for start in range(0, bags.n_instances, ROWS):
                rows = slice(start, start + ROWS)
                x = self._inputs(bags.features[rows], device)
                found = predictor.unsmoothed(x)
                # f* ~ N(c + W w, K - W W' + W R^-1 W') (eq. f_star), its diagonal
                own = predictor.gp.kernel.diagonal(x)
                variance = (own - found[:, 1:].square().sum(1)).clamp(min=0)
                mean[rows] = (predictor.c + found[:, 0]).cpu().numpy()
                std[rows] = variance.sqrt().cpu().numpy()
                require_numbers(mean[rows], std[rows])
                probability[rows] = np.exp(logistic.log_expected_sigmoid(mean[rows], std[rows]))
        return InstancePredictions(probability, mean, std, bags)

    def _bags(self, found: InstancePredictions) -> Float[np.ndarray, " B"]:
        # 1 - E[sigmoid(f)] = E[sigmoid(-f)], without the rounding of the difference
        log_not = np.empty(len(found))
        for start in range(0, len(found), ROWS):
            rows = slice(start, start + ROWS)
            log_not[rows] = logistic.log_expected_sigmoid(-found.mean[rows], found.std[rows])
        rule = np.add if self.bag == "noisy_or" else np.minimum
        return np.array([rule.reduce(piece) for piece in found.bags.split(log_not)])
