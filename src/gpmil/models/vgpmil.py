"""VGPMIL, the logistic Gaussian-process MIL model of Haussmann et al. (2017)."""

import logging
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar

import numpy as np
import torch
from jaxtyping import Float
from sklearn.exceptions import ConvergenceWarning

from gpmil.data.bags import Bags
from gpmil.distributed import Plan
from gpmil.inference import logistic as inference
from gpmil.inference.solvers import Problem
from gpmil.inference.stores import STORES
from gpmil.models.base import InstancePredictions, Predictions, resolve_device
from gpmil.models.checks import generator, number, one_of, require_numbers, word_or_number
from gpmil.models.sparse import DTYPES, TrainingCohort
from gpmil.models.with_novelty import NovelGP
from gpmil.moments import logistic
from gpmil.process.features import ROWS
from gpmil.process.kernels import KERNELS
from gpmil.process.sparse_gp import SparseGP
from gpmil.warn import warn_caller

logger = logging.getLogger("gpmil")
BAG_RULES = ("noisy_or", "max")


@dataclass(kw_only=True, eq=False, repr=False)
class VGPMIL(NovelGP):
    """Logistic Gaussian-process MIL with Jaakkola's bound (Haussmann et al. 2017).

    Parameters
    ----------
    kernel, variance, lengthscale, mean
        As `VGPMILPR`, as numbers; `lengthscale="sqrt_dim"` is the square root of the number of
        features. The published model has mean 0.
    slide_effect : float
        tau >= 0, the deviation of what all patches of a slide share beyond their features, added
        to f; 0 is the published model. Not learned.
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
        As `VGPMILPR`; not inducing="lesions", because no bag can be left out of this fit.
    max_iter, tol : int, float
        Most iterations; relative change of the posterior mean at which to stop before. 0 makes
        exactly `max_iter` iterations, as the publication does; convergence is slow.
    random_state : int, Generator or None
        Seeds k-means and the start: q(h_i = 1) uniform in (0, 0.1), xi standard normal, as in the
        original code.
    device, dtype, store, verbose
        As `VGPMILPR`, with W in place of H.

    Examples
    --------
    >>> import gpmil
    >>> bags = gpmil.simulate.cohort(n_bags=12, n_features=16, seed=1)
    >>> model = gpmil.VGPMIL(n_inducing=30, random_state=0).fit(bags)
    >>> bool((np.diff(model.elbo_trace_) > -1e-8).all())
    True
    """

    kernel: Any = "rbf"
    variance: Any = 1.0
    lengthscale: Any = "sqrt_dim"
    mean: Any = 0.0
    slide_effect: Any = 0.0
    H: Any = 100.0
    expected_max: Any = "product"
    bag: Any = "noisy_or"
    n_inducing: Any = 200
    inducing: Any = "kmeans"
    standardize: Any = True
    n_components: Any = None
    max_iter: Any = 200
    tol: Any = 0.0
    random_state: Any = None
    device: Any = None
    dtype: Any = "float64"
    store: Any = "auto"
    verbose: Any = False

    NUMBERS = NovelGP.NUMBERS | {"slide_effect_": partial(number, least=0)}
    LATER: ClassVar[dict[str, dict[str, Any]]] = {"slide_effect": {"slide_effect_": 0.0}}

    # --- Fit ----------------------------------------------------------------------------------

    def _fit_to(self, cohort: TrainingCohort, y, device: torch.device) -> None:
        facts = cohort.whole
        labels = self._remember_cohort(facts, facts.y if y is None else y)
        self._place(cohort, labels, device)
        self._set_kernel_numbers()
        self.slide_effect_ = float(self.slide_effect)
        self._check_kernel(device)
        gp = self._prior(facts, device)
        problem, rng = self._problem(gp, cohort), generator(self.random_state)
        found = inference.sweeps(
            problem,
            rng.uniform(1e-12, 0.1, problem.n_instances),
            rng.standard_normal(problem.n_instances),
            int(self.max_iter),
            float(self.tol),
        )
        self._keep(gp, found.q)
        self._learn_range(cohort, device)
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

    def _problem(self, gp: SparseGP, cohort: TrainingCohort) -> Problem:
        """The cohort in pieces; tau is the likelihood's own affair."""
        plan = Plan(
            self._feature_map(), self.kernel_, self.variance_ or 1.0, self.lengthscale_ or 1.0,
            gp.inducing.cpu(), gp.L.cpu(), 0.0, DTYPES[self.dtype],
            logistic.Logistic(float(np.log(self.H)), self.expected_max, self.slide_effect_),
            self.store, 0.0, residual=True,
        )  # fmt: skip
        return cohort.problem(plan, self.mean_, device=gp.L.device)

    def _check_settings(self) -> None:
        self._check_common_settings()
        one_of("dtype", self.dtype, tuple(DTYPES))
        one_of("store", self.store, STORES)
        one_of("expected_max", self.expected_max, logistic.EXPECTED_MAX)
        one_of("bag", self.bag, BAG_RULES)
        if np.ndim(self.lengthscale) != 1:
            word_or_number("lengthscale", self.lengthscale, ("sqrt_dim",), above=0)
        number("variance", self.variance, above=0)
        number("mean", self.mean)
        number("slide_effect", self.slide_effect, least=0)
        number("H", self.H, above=1)
        number("tol", self.tol, least=0)
        if isinstance(self.kernel, str):
            one_of("kernel", self.kernel, tuple(KERNELS))

    # --- Predict ------------------------------------------------------------------------------

    def predict_instances(self, bags) -> InstancePredictions:
        """P(h_i = 1) = E[sigmoid(f_i)] of every instance, with mean and deviation of f_i."""
        bags = self._check_predictable(bags)
        return replace(self._instances(bags), novelty=self._novelty(bags)[0])

    def predict_all(
        self,
        bags,
        *,
        rate: float = 0.1,
        level: float | None = None,
        interval_size: int | None = None,
    ) -> Predictions:
        """All that the model says of bags and instances; it marks none and knows no intervals."""
        bags = self._check_predictable(bags)
        found = super().predict_all(bags, rate=rate, level=level, interval_size=interval_size)
        patches, slides = self._novelty(bags)
        assert found.instances is not None
        instances = replace(found.instances, novelty=patches)
        return replace(found, instances=instances, novelty=slides)

    def log_proba_negative(self, bags) -> tuple[Float[np.ndarray, " B"], Float[np.ndarray, " B"]]:
        """log P(y_b = 0) by the rule `bag`, instances independent but for the slide effect.

        Its error is nil.
        """
        return self._bags_and_instances(bags)[:2]

    def _bags_and_instances(
        self, bags
    ) -> tuple[Float[np.ndarray, " B"], Float[np.ndarray, " B"], InstancePredictions]:
        instances = self._instances(self._check_predictable(bags))
        log_p = self._bags(instances)
        return log_p, np.zeros(len(log_p)), instances

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
                # f* ~ N(c + W w, K + tau^2 - W W' + W R^-1 W') (eq. f_star), its diagonal
                own = predictor.gp.kernel.diagonal(x) + predictor.gp.effect**2
                variance = (own - found[:, 1:].square().sum(1)).clamp(min=0)
                mean[rows] = (predictor.c + found[:, 0]).cpu().numpy()
                std[rows] = variance.sqrt().cpu().numpy()
                require_numbers(mean[rows], std[rows])
                probability[rows] = np.exp(logistic.log_expected_sigmoid(mean[rows], std[rows]))
        return InstancePredictions(probability, mean, std, bags, doubt=self._doubt(bags))

    def _bags(self, found: InstancePredictions) -> Float[np.ndarray, " B"]:
        if self.slide_effect_ and self.bag == "noisy_or":
            # instances are independent given the effect that they share
            own = np.sqrt(np.maximum(np.square(found.std) - self.slide_effect_**2, 0.0))
            bags = zip(found.bags.split(found.mean), found.bags.split(own))
            return np.array([logistic.log_none_shared(*x, self.slide_effect_) for x in bags])
        # 1 - E[sigmoid(f)] = E[sigmoid(-f)], without the rounding of the difference
        log_not = np.empty(len(found))
        for start in range(0, len(found), ROWS):
            rows = slice(start, start + ROWS)
            log_not[rows] = logistic.log_expected_sigmoid(-found.mean[rows], found.std[rows])
        rule = np.add if self.bag == "noisy_or" else np.minimum
        return np.array([rule.reduce(piece) for piece in found.bags.split(log_not)])
