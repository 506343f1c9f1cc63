"""VGPMIL-PR-I, the probit Gaussian-process MIL model with coupled neighbours, and VGPMIL-PR.

One implementation: VGPMIL-PR is the coupling at zero. What is fitted is q(u), the posterior of
the Gaussian process at M inducing points; predictions follow from it in closed form.
"""

import copy
import logging
import math
import os
import warnings
from numbers import Integral, Real
from typing import Any

import gpytorch
import numpy as np
import torch
from jaxtyping import Float
from scipy.special import ndtr
from sklearn.exceptions import ConvergenceWarning
from sklearn.utils.validation import check_is_fitted

from gpmil import evidence, features, inference, orthant, persistence
from gpmil.bags import Bags
from gpmil.coupling import check_strength, dense_parts, parts, sparse_precision
from gpmil.inducing import kmeans_by_class
from gpmil.models.base import (
    BagClassifier,
    InstancePredictions,
    Predictions,
    check_bags,
    cohort_card,
    package_versions,
    progress_shown,
    resolve_device,
    training_labels,
)
from gpmil.orthant_large import log_orthant_large
from gpmil.sparse_gp import Kernel, Posterior, Predictor, SparseGP, joint, marginal

logger = logging.getLogger("gpmil")

CPU = torch.device("cpu")
LARGE = 1500  # instances a bag above which dense matrices cost more than sparse ones on a CPU
DTYPES = {"float64": torch.float64, "float32": torch.float32}
SOLVERS = ("direct", "newton", "sweeps")
ARRAYS = (
    "inducing_points_",
    "posterior_mean_",
    "posterior_covariance_",
    "whitened_mean_",
    "whitened_precision_",
    "feature_mean_",
    "feature_scale_",
    "feature_components_",
    "elbo_trace_",
    "evidence_trace_",
    "classes_",
)
NUMBERS = (
    "coupling_",
    "variance_",
    "lengthscale_",
    "mean_",
    "n_iter_",
    "converged_",
    "residual_",
    "loo_log_likelihood_",
    "n_features_in_",
    "cohort_",
)


class VGPMILPR(BagClassifier):
    """Probit Gaussian-process MIL without coupling (Wang et al.; eqs. mgf, ygm).

    Parameters
    ----------
    kernel : "rbf", "matern32", "matern52", "linear", or a gpytorch kernel
        A kernel object is used as it is; `variance` and `lengthscale` do not apply to it.
    variance, lengthscale, mean : float
        Kernel variance, length scale ("sqrt_dim": the square root of the number of features)
        and the constant prior mean c, in the space of standardised features.
    n_inducing, inducing : int, "kmeans" or (M, D) array
        Number of inducing points, and how they are placed: k-means, half in positive and half in
        negative bags; or given, in the feature space of `bags.features`.
    standardize, n_components : bool, int or None
        Standardise the columns of the features; or reduce them to PCA scores first.
    solver : "direct", "newton" or "sweeps"
        Maximum of the collapsed bound; the paper's fixed point, converged; the paper's
        Algorithm 1, exactly `max_iter` sweeps.
    moments : "diagonal" or "coupled"
        Truncated moments of the patch variables: the paper's independent patches, or all the
        correlation of neighbours, by expectation propagation.
    optimize : tuple of "inducing", "variance", "lengthscale", "mean"
        What the direct solver also moves to raise the collapsed evidence bound. The bound is a
        poor judge of kernel settings on real data: see the page on the two integrals.
    max_iter, tol : int, float
        Most steps of the solver; relative residual at which it has converged.
    random_state : int, Generator or None
        Seeds k-means and the start of the sweeps.
    device, dtype : str or None, "float64" or "float32"
        None takes a GPU where there is one. float32 stores the N x M matrix in half the memory;
        factorisations and sums stay float64.
    verbose : bool
        Show progress lines while fitting.

    Examples
    --------
    >>> import numpy as np, gpmil
    >>> rng = np.random.default_rng(0)
    >>> x = [rng.normal(size=(8, 3)) + 3 * (b % 2) * (np.arange(8) < 3)[:, None] for b in range(20)]
    >>> bags = gpmil.Bags.from_arrays(x, labels=[b % 2 for b in range(20)])
    >>> model = gpmil.VGPMILPR(n_inducing=20, random_state=0).fit(bags)
    >>> float(model.score(bags)) > 0.9
    True
    """

    coupling_: float
    variance_: float | None  # None with a kernel object
    lengthscale_: float | None
    mean_: float
    evidence_trace_: np.ndarray | None  # None where nothing was optimised

    def __init__(
        self,
        *,
        kernel="rbf",
        variance=1.0,
        lengthscale="sqrt_dim",
        mean=0.0,
        n_inducing=200,
        inducing="kmeans",
        standardize=True,
        n_components=None,
        solver="direct",
        moments="diagonal",
        optimize=(),
        max_iter=200,
        tol=1e-10,
        random_state=None,
        device=None,
        dtype="float64",
        verbose=False,
    ):
        self.kernel = kernel
        self.variance = variance
        self.lengthscale = lengthscale
        self.mean = mean
        self.n_inducing = n_inducing
        self.inducing = inducing
        self.standardize = standardize
        self.n_components = n_components
        self.solver = solver
        self.moments = moments
        self.optimize = optimize
        self.max_iter = max_iter
        self.tol = tol
        self.random_state = random_state
        self.device = device
        self.dtype = dtype
        self.verbose = verbose

    # --- Fit ----------------------------------------------------------------------------------

    def fit(self, bags, y=None) -> "VGPMILPR":
        """Fit q(u) to labelled bags; y (0/1, one a bag) wins over `bags.labels`."""
        fresh = copy.copy(self)  # a fit that fails leaves this model as it was
        with progress_shown(self.verbose), torch.no_grad():
            fresh._fit(check_bags(bags), y)
        self.__dict__.update(fresh.__dict__)
        return self

    def _fit(self, bags: Bags, y) -> None:
        self._check_settings()
        labels, self.classes_ = training_labels(bags, y)
        device = resolve_device(self.device)
        self.n_features_in_ = bags.n_features
        self.cohort_ = cohort_card(bags, labels)
        self.coupling_ = self._coupling_strength(bags)
        self._fit_feature_map(bags)
        positive_row = (labels == 1)[bags.bag_index]
        self.inducing_points_ = self._place_inducing(bags, positive_row)
        self._set_kernel_numbers()
        self._check_kernel(device)
        self.evidence_trace_ = None
        if self.optimize:
            self._climb_evidence(bags, labels, device)

        gp = self._gp(device)
        counts = len(bags), bags.n_instances, len(gp.L)
        logger.info("fit: %d bags, %d instances, %d inducing points", *counts)
        problem = inference.prepare(
            gp,
            lambda rows: self._inputs(bags.features[rows], device),
            bags.adjacency,
            bags.offsets,
            labels == 1,
            self.coupling_,
            self.mean_,
            DTYPES[self.dtype],
            coupled=self.moments == "coupled",
        )
        solution = self._solve(problem)
        _warn_unsettled(problem)
        q = Posterior.build(solution.w, problem.R)
        self.whitened_mean_ = q.w.cpu().numpy()
        self.whitened_precision_ = q.R.cpu().numpy()
        self.posterior_mean_ = q.mean_u(gp).cpu().numpy()
        self.posterior_covariance_ = q.covariance_u(gp).cpu().numpy()
        self.n_iter_, self.converged_, self.residual_, trace = solution[1:]
        self.elbo_trace_ = np.array(trace) + problem.constant
        self.loo_log_likelihood_ = None

    def _solve(self, problem: inference.Problem) -> inference.Solution:
        max_iter, tol = int(self.max_iter), float(self.tol)
        if self.solver == "direct":
            return inference.direct(problem, max_iter, tol)
        if self.solver == "newton":
            return inference.newton(problem, max_iter, tol)
        start = _generator(self.random_state).standard_normal(problem.n_instances)
        expectation = torch.from_numpy(start).to(problem.R.device)
        return inference.sweeps(problem, expectation, max_iter, tol)

    def _climb_evidence(self, bags: Bags, labels: np.ndarray, device: torch.device) -> None:
        """Move what `optimize` names to a maximum of the collapsed bound."""
        cohort = evidence.Cohort(
            self.kernel_,
            lambda rows: self._inputs(bags.features[rows], device),
            bags.adjacency,
            bags.offsets,
            labels == 1,
            self.coupling_,
            self.moments == "coupled",
            float(self.tol),
        )
        Z = self._inputs(self.inducing_points_, device)
        theta = evidence.Theta(Z, self.variance_ or 1.0, self.lengthscale_ or 1.0, self.mean_)
        theta, trace = evidence.maximise(cohort, theta, tuple(self.optimize))
        self.evidence_trace_ = np.array(trace)
        self.inducing_points_ = self._feature_map().inverse(theta.inducing.cpu().numpy())
        self.mean_ = theta.mean
        if self.variance_ is not None:
            self.variance_, self.lengthscale_ = theta.variance, theta.lengthscale

    def _coupling_strength(self, bags: Bags) -> float:
        return 0.0

    def _fit_feature_map(self, bags: Bags) -> None:
        if self.n_components is not None:
            found = features.pca(bags.features, int(self.n_components))
        elif self.standardize:
            found = features.standardizer(bags.features)
        else:
            found = features.identity(bags.n_features)
        self.feature_mean_, self.feature_scale_ = found.mean, found.scale
        self.feature_components_ = found.components

    def _place_inducing(self, bags: Bags, positive_row: np.ndarray) -> Float[np.ndarray, "M D"]:
        if not isinstance(self.inducing, str):
            return _check_inducing(self.inducing, bags.n_features)
        seed = self.random_state
        if not isinstance(seed, Integral):
            seed = _generator(seed).integers(2**31)
        return kmeans_by_class(
            bags.features, positive_row, self._feature_map(), int(self.n_inducing), int(seed)
        )

    def _set_kernel_numbers(self) -> None:
        self.kernel_ = copy.deepcopy(self.kernel)
        self.mean_ = float(self.mean)
        if isinstance(self.kernel, gpytorch.kernels.Kernel):
            self.variance_ = self.lengthscale_ = None
            return
        n_inputs = len(self.feature_scale_) if self.n_components is None else self.n_components
        sqrt_dim = isinstance(self.lengthscale, str)
        self.variance_ = float(self.variance)
        self.lengthscale_ = float(np.sqrt(n_inputs)) if sqrt_dim else float(self.lengthscale)

    def _check_kernel(self, device: torch.device) -> None:
        try:
            self._gp(device)
        except RuntimeError as error:
            raise ValueError(
                f"the kernel cannot be evaluated on inputs of {len(self.feature_scale_)} columns: "
                f"{error}. A kernel object with one length a column must have as many."
            ) from error

    def _check_settings(self) -> None:
        for name in ("variance", "lengthscale", "mean", "coupling"):
            if isinstance(getattr(self, name, None), str) and getattr(self, name) == "auto":
                raise NotImplementedError(f"{name}='auto' is not available yet: give a number.")
        _generator(self.random_state)
        _one_of("moments", self.moments, ("diagonal", "coupled"))
        _one_of("solver", self.solver, SOLVERS)
        self._check_optimize()
        _one_of("dtype", self.dtype, tuple(DTYPES))
        if isinstance(self.inducing, str):
            _one_of("inducing", self.inducing, ("kmeans",))
        if isinstance(self.lengthscale, str):
            _one_of("lengthscale", self.lengthscale, ("sqrt_dim",))
        else:
            _number("lengthscale", self.lengthscale, above=0)
        _number("variance", self.variance, above=0)
        _number("mean", self.mean)
        _number("tol", self.tol, above=0)
        _count("n_inducing", self.n_inducing, least=2)
        _count("max_iter", self.max_iter, least=1)
        for name in ("standardize", "verbose"):
            if not isinstance(getattr(self, name), bool | np.bool_):
                raise ValueError(f"{name} must be True or False, got {getattr(self, name)!r}.")
        if self.n_components is not None:
            _count("n_components", self.n_components, least=1)
        if not isinstance(self.kernel, str | gpytorch.kernels.Kernel):
            raise ValueError(
                f"kernel must be a name or a gpytorch kernel, got {type(self.kernel).__name__}."
            )

    def _check_optimize(self) -> None:
        names = self.optimize if isinstance(self.optimize, tuple | list) else [None]
        known = [name for name in evidence.SETTINGS if name in names]
        if len(known) != len(names):
            raise ValueError(
                f"optimize must be a tuple of different names among {list(evidence.SETTINGS)}, "
                f"got {self.optimize!r}."
            )
        if self.optimize and self.solver != "direct":
            raise ValueError(f"optimize needs solver='direct', got solver={self.solver!r}.")
        fixed = {"variance", "lengthscale"} & set(self.optimize)
        if fixed and isinstance(self.kernel, gpytorch.kernels.Kernel):
            raise ValueError(
                f"optimize={sorted(fixed)} needs a kernel by name: a kernel object is taken as it "
                "is. Leave them out, or name the kernel."
            )

    # --- Predict ------------------------------------------------------------------------------

    def predict_instances(self, bags) -> InstancePredictions:
        """P(h_i = 1) of every instance with mean and deviation of m*_i (eq. pred_instance)."""
        bags = self._check_predictable(bags)
        device = resolve_device(self.device)
        mean = np.empty(bags.n_instances)
        std = np.empty(bags.n_instances)
        with torch.no_grad():
            predictor = self._predictor(device)
            for part in parts(bags.adjacency, bags.offsets, self._predict_strength(bags), device):
                rows = part.rows.cpu().numpy()
                x = self._inputs(bags.features[rows], device)
                mu, variance = marginal(predictor, part, x)
                mean[rows], std[rows] = mu.cpu().numpy(), variance.sqrt().cpu().numpy()
        # p(h_i = 1) = Phi(mu_i / sqrt(S_ii))
        return InstancePredictions(ndtr(mean / std), mean, std, bags)

    def log_proba_negative(self, bags) -> tuple[Float[np.ndarray, " B"], Float[np.ndarray, " B"]]:
        """log P(all instances negative) of each bag, and an estimate of its error (eq. pred_bag).

        Deterministic, and never minus infinity or zero; see `gpmil.orthant`.
        """
        found = self._slides(self._check_predictable(bags), resolve_device(self.device))
        return found[0], found[1]

    def predict_all(self, bags) -> Predictions:
        """Bags and instances from one pass, cheaper than one for each."""
        bags = self._check_predictable(bags)
        log_p, error, mean, std = self._slides(bags, resolve_device(self.device))
        instances = InstancePredictions(ndtr(mean / std), mean, std, bags)
        return Predictions(log_p, error, instances)

    def _slides(self, bags: Bags, device: torch.device) -> tuple[np.ndarray, ...]:
        """log P(all negative) and its error a bag; mean and deviation of m* an instance."""
        strength = self._predict_strength(bags)
        log_p, error = np.empty(len(bags)), np.empty(len(bags))
        mean, std = np.empty(bags.n_instances), np.empty(bags.n_instances)
        large = (bags.sizes > LARGE) & (device.type == "cpu")
        with torch.no_grad():
            predictor = self._predictor(device)
            for part in dense_parts(
                bags.adjacency, bags.offsets, np.flatnonzero(~large), strength, device
            ):
                rows = part.rows.cpu().numpy()
                x = self._inputs(bags.features[rows], device)
                mu, S = joint(predictor, part.sigma, part.pad(x))
                found = orthant.log_orthant(mu, S, part.mask)
                sd = S.diagonal(dim1=-2, dim2=-1).sqrt()
                log_p[part.bags], error[part.bags] = (
                    a.cpu().numpy() for a in (found.log_p, found.error)
                )
                mean[rows], std[rows] = (a[part.mask].cpu().numpy() for a in (mu, sd))
            for b in np.flatnonzero(large):
                rows = slice(bags.offsets[b], bags.offsets[b + 1])
                log_p[b], error[b], mean[rows], std[rows] = self._large_bag(
                    bags[int(b)], predictor, strength
                )
        return log_p, error, mean, std

    def _large_bag(self, bag: Bags, predictor: Predictor, strength: float) -> tuple:
        """The same for one bag too large for dense matrices on the CPU."""
        (part,) = parts(bag.adjacency, bag.offsets, strength)
        x = self._inputs(bag.features, CPU)
        mean, variance = torch.empty(len(x)).double(), torch.empty(len(x)).double()
        mean[part.rows], variance[part.rows] = marginal(predictor, part, x[part.rows])
        gp, q = predictor.gp, self._posterior(CPU)
        W = gp.whiten(x)
        own = torch.cat(
            [gp.kernel(block[:, None], block[:, None])[:, 0, 0] for block in x.split(512)]
        )
        result = log_orthant_large(
            mean,
            variance,
            sparse_precision(bag.adjacency, strength),
            q.shrink(W).mT,
            lambda i: gp.kernel(x[i], x) - W[i] @ W.mT,
            own - W.square().sum(1),
        )
        std = variance.sqrt().numpy()
        return float(result.log_p[0]), float(result.error[0]), mean.numpy(), std

    def _predict_strength(self, bags: Bags) -> float:
        if self.coupling_ > 0 and not bags.has_geometry:
            logger.warning(
                "these bags have neither coordinates nor edges: their instances are predicted "
                "uncoupled, though the model was fitted with coupling %g.",
                self.coupling_,
            )
        return self.coupling_

    def _feature_map(self) -> features.FeatureMap:
        return features.FeatureMap(
            self.feature_mean_, self.feature_scale_, self.feature_components_
        )

    def _inputs(self, x: np.ndarray, device: torch.device) -> torch.Tensor:
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

    # --- Save and load ------------------------------------------------------------------------

    def save(self, path: str | os.PathLike) -> None:
        """Write the model to a folder (safetensors and JSON); `gpmil.load` reads it."""
        check_is_fitted(self)
        arrays = {k: getattr(self, k) for k in ARRAYS if getattr(self, k) is not None}
        settings = self.get_params(deep=False)
        del settings["kernel"], settings["device"]  # kept apart; chosen anew where it is loaded
        if not isinstance(self.inducing, str):
            arrays["setting.inducing"] = np.asarray(settings.pop("inducing"))
        named = isinstance(self.kernel_, str)
        if not named:
            arrays |= _kernel_arrays(self.kernel_, self._gp(CPU).inducing)
        card = {
            "class": type(self).__name__,
            "settings": {
                k: _plain(v) for k, v in settings.items() if k not in ("device", "kernel")
            },
            "kernel": self.kernel_ if named else None,
            "kernel_object": None if named else type(self.kernel_).__name__,
            "fitted": {k: getattr(self, k) for k in NUMBERS},
            "versions": package_versions(),
        }
        persistence.write(path, arrays, card)

    @classmethod
    def _from_saved(cls, arrays: dict[str, np.ndarray], card: dict[str, Any], kernel=None):
        settings = dict(card["settings"].items())
        if "setting.inducing" in arrays:
            settings["inducing"] = arrays["setting.inducing"]
        if card["kernel_object"] is None and kernel is not None:
            raise ValueError(
                f"the model was fitted with kernel {card['kernel']!r}: load it without kernel=."
            )
        settings["optimize"] = tuple(settings["optimize"])
        model = cls(**settings)
        optional = {"feature_components_", "evidence_trace_"}
        for name in ARRAYS:
            setattr(model, name, arrays.get(name) if name in optional else arrays[name])
        for name in NUMBERS:
            setattr(model, name, card["fitted"][name])
        model.kernel = model.kernel_ = card["kernel"]
        if card["kernel_object"] is not None:
            kernel = _fill_kernel(card["kernel_object"], kernel, arrays)
            model.kernel, model.kernel_ = kernel, copy.deepcopy(kernel)
            _compare_kernel(kernel, model._inputs(model.inducing_points_, CPU), arrays)
        return model


class VGPMILPRI(VGPMILPR):
    """Probit Gaussian-process MIL with coupled neighbours (eq. mgf_ising).

    Parameters
    ----------
    coupling : float
        lambda >= 0, the strength of the coupling between contiguous instances; 0 is VGPMIL-PR.
        Bags without coordinates or edges run uncoupled, which is said once.
    **others
        As `VGPMILPR`.

    Examples
    --------
    >>> import gpmil
    >>> bags = gpmil.simulate.cohort(n_bags=12, n_features=16, seed=1)
    >>> model = gpmil.VGPMILPRI(coupling=1.0, n_inducing=30, random_state=0).fit(bags)
    >>> model.predict_proba(bags).shape
    (12, 2)
    >>> len(model.predict_instances(bags)) == bags.n_instances
    True
    """

    def __init__(
        self,
        *,
        coupling=0.5,
        kernel="rbf",
        variance=1.0,
        lengthscale="sqrt_dim",
        mean=0.0,
        n_inducing=200,
        inducing="kmeans",
        standardize=True,
        n_components=None,
        solver="direct",
        moments="diagonal",
        optimize=(),
        max_iter=200,
        tol=1e-10,
        random_state=None,
        device=None,
        dtype="float64",
        verbose=False,
    ):
        super().__init__(
            kernel=kernel,
            variance=variance,
            lengthscale=lengthscale,
            mean=mean,
            n_inducing=n_inducing,
            inducing=inducing,
            standardize=standardize,
            n_components=n_components,
            solver=solver,
            moments=moments,
            optimize=optimize,
            max_iter=max_iter,
            tol=tol,
            random_state=random_state,
            device=device,
            dtype=dtype,
            verbose=verbose,
        )
        self.coupling = coupling

    def _check_settings(self) -> None:
        super()._check_settings()
        _number("coupling", self.coupling, least=0)

    def _coupling_strength(self, bags: Bags) -> float:
        strength = check_strength(float(self.coupling))
        if strength > 0 and not bags.has_geometry:
            logger.warning(
                "the bags have neither coordinates nor edges: the model runs uncoupled "
                "(coupling 0 instead of %g). Give coords= or edges= to couple neighbours.",
                strength,
            )
            return 0.0
        return strength


def paper_settings(model: str = "VGPMILPRI") -> dict[str, Any]:
    """The paper's keyword arguments for a model, only those that its class takes.

    >>> paper_settings()["coupling"]
    0.5
    >>> "coupling" in paper_settings("VGPMILPR")
    False
    """
    classes = {"VGPMILPRI": VGPMILPRI, "VGPMILPR": VGPMILPR}
    if model not in classes:
        raise ValueError(f"model must be one of {sorted(classes)}, got {model!r}.")
    settings = {
        "coupling": 0.5,
        "variance": 1.0,
        "lengthscale": "sqrt_dim",
        "mean": 0.0,
        "n_inducing": 200,
        "solver": "sweeps",
        "moments": "diagonal",
        "max_iter": 200,
    }
    taken = classes[model]().get_params()
    return {k: v for k, v in settings.items() if k in taken}


def _warn_unsettled(problem: inference.Problem) -> None:
    unsettled = sum(chunk.coupled.unsettled for chunk in problem.chunks if chunk.coupled)
    if unsettled:
        warnings.warn(
            f"expectation propagation has not converged in {unsettled} bags: their truncated "
            "moments are rough. A smaller coupling or variance, or moments='diagonal', avoids it.",
            ConvergenceWarning,
            stacklevel=5,
        )


# --- Checks of single settings ----------------------------------------------------------------


def _generator(random_state: Any) -> np.random.Generator:
    try:
        return np.random.default_rng(random_state)
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"random_state must be a whole number >= 0, a generator or None, got {random_state!r}."
        ) from error


def _one_of(name: str, value: Any, allowed: tuple[str, ...]) -> None:
    if not isinstance(value, str) or value not in allowed:
        raise ValueError(f"{name} must be one of {list(allowed)}, got {value!r}.")


def _number(name: str, value: Any, above: float | None = None, least: float | None = None) -> None:
    wanted = "a finite number"
    if above is not None:
        wanted += f" > {above:g}"
    if least is not None:
        wanted += f" >= {least:g}"
    good = isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value)
    if not good or (above is not None and value <= above) or (least is not None and value < least):
        raise ValueError(f"{name} must be {wanted}, got {value!r}.")


def _count(name: str, value: Any, least: int) -> None:
    if not isinstance(value, Integral) or isinstance(value, bool) or value < least:
        raise ValueError(f"{name} must be a whole number >= {least}, got {value!r}.")


def _check_inducing(points: Any, n_features: int) -> Float[np.ndarray, "M D"]:
    try:
        found = np.array(points, dtype=np.float64)
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"inducing must be an (M, {n_features}) array of numbers, or 'kmeans': {error}."
        ) from error
    if found.ndim != 2 or found.shape[1] != n_features or not len(found):
        raise ValueError(
            f"inducing must be an (M, {n_features}) array in the feature space of the bags, or "
            f"'kmeans'; got an array of shape {found.shape}."
        )
    if not np.isfinite(found).all():
        raise ValueError("inducing points hold NaN or infinite values.")
    return found


def _plain(value: Any) -> Any:
    """A setting as JSON: numbers and strings stay, a generator's state is not kept."""
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, tuple | list):
        return [_plain(v) for v in value]
    return value if isinstance(value, str | bool | int | float | None) else None


def _kernel_arrays(
    kernel: gpytorch.kernels.Kernel, inducing: torch.Tensor
) -> dict[str, np.ndarray]:
    """The parameters of a kernel object, and a column of its values to know it again by."""
    state = {f"kernel.{k}": v.detach().cpu().numpy() for k, v in kernel.state_dict().items()}
    return state | {"kernel_values": _kernel_column(kernel, inducing)}


def _kernel_column(kernel: gpytorch.kernels.Kernel, inducing: torch.Tensor) -> np.ndarray:
    return Kernel(kernel, 1.0, 1.0)(inducing, inducing[:1])[:, 0].numpy()


def _fill_kernel(name: str, kernel: Any, arrays: dict[str, np.ndarray]) -> gpytorch.kernels.Kernel:
    if type(kernel).__name__ != name:
        raise ValueError(
            f"the model was fitted with a kernel object of class {name}: pass a new one, "
            f"gpmil.load(path, kernel={name}(...)), and its saved values are filled in."
        )
    state = {
        k.removeprefix("kernel."): torch.from_numpy(v)
        for k, v in arrays.items()
        if k.startswith("kernel.")
    }
    kernel = copy.deepcopy(kernel)
    try:
        kernel.load_state_dict(state)
    except RuntimeError as error:
        raise ValueError(
            f"the saved values do not fit this kernel: build it as it was for fit. {error}"
        ) from error
    return kernel


def _compare_kernel(
    kernel: gpytorch.kernels.Kernel, inducing: torch.Tensor, arrays: dict[str, np.ndarray]
) -> None:
    if not np.allclose(_kernel_column(kernel, inducing), arrays["kernel_values"], rtol=1e-6):
        raise ValueError(
            "this kernel takes the saved parameters but gives other values than the one the model "
            "was fitted with: build it as it was for fit (its parts, the order of a Matern)."
        )
