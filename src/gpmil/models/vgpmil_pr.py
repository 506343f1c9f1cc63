"""VGPMIL-PR-I, the probit Gaussian-process MIL model with coupled neighbours, and VGPMIL-PR.

One implementation: VGPMIL-PR is the coupling at zero. What is fitted is q(u), the posterior of
the Gaussian process at M inducing points; predictions follow from it in closed form.
"""

import copy
import logging
import math
from collections.abc import Callable, Iterator
from typing import Any

import gpytorch
import numpy as np
import torch
from jaxtyping import Float
from sklearn.base import clone
from sklearn.exceptions import ConvergenceWarning

from gpmil import distributed
from gpmil.coupling.operator import check_strength, dense_parts
from gpmil.data.bags import Bags
from gpmil.distributed import Facts
from gpmil.inference import evidence, leave_out, tuning
from gpmil.inference import solvers as inference
from gpmil.inference.objective import Cohort
from gpmil.inference.pieces import LIKELIHOODS
from gpmil.inference.stores import STORES
from gpmil.models import learning
from gpmil.models.base import (
    cohort_card,
    progress_shown,
    resolve_device,
    training_labels,
)
from gpmil.models.checks import (
    check_inducing,
    count,
    flag,
    generator,
    number,
    one_of,
    word_or_number,
)
from gpmil.models.cross_fit import CrossFit, planned_folds, suspicion
from gpmil.models.fitted import FittedGP
from gpmil.process import features
from gpmil.process.kernels import Kernel
from gpmil.process.sparse_gp import Posterior, SparseGP
from gpmil.warn import warn_caller

logger = logging.getLogger("gpmil")

CPU = torch.device("cpu")
DTYPES = {"float64": torch.float64, "float32": torch.float32}
LARGE_H = 1e9  # bytes of H in float64 from which "auto" stores float32
MOST_LENGTHS = 256
SOLVERS = ("direct", "newton", "sweeps")


class VGPMILPR(FittedGP):
    """Probit Gaussian-process MIL without coupling (Wang et al.; eqs. mgf, ygm).

    Parameters
    ----------
    kernel : "rbf", "matern32", "matern52", "linear", "auto", or a gpytorch kernel
        A kernel object is used as it is; `variance` and `lengthscale` do not apply to it. "auto"
        tries rbf, matern52 and linear.
    variance, lengthscale, mean : "auto", float, or for the length scale an array
        Kernel variance, length scale and the constant prior mean c, in the space of standardised
        features. "auto": learned in fit, together, from the labels of the bags, by maximising the
        likelihood of every bag's label under the fit without that bag. `lengthscale="sqrt_dim"`
        is the square root of the number of features (the paper); "ard" learns one length a column
        after the common one (up to 256 columns, many bags), an array gives them. `mean="balanced"`
        is the one at which a bag of median size is positive with probability one half.
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
    tuning_budget : int
        About how many fits' worth of work may go into what is "auto" (for every kernel tried).
    calibrated, flags, n_folds : bool, bool, int
        Fit `n_folds` more models, each without one fold of the bags (patients, `bags.groups`, kept
        together), at the settings of this one. With `calibrated` their predictions of what they
        have not seen calibrate `predict_proba`, and `refer_rule` is there; with `flags`
        `predict_instances` gives p-values and marks patches at a false discovery rate.
    max_iter, tol : int, float
        Most steps of the solver; relative residual at which it has converged.
    random_state : int, Generator or None
        Seeds k-means and the start of the sweeps.
    device, dtype, store : str or None, "auto", "float64" or "float32", "auto" or a place
        None takes a GPU where there is one. float32 stores the N x M matrix H in half the memory;
        factorisations and sums stay float64; "auto" takes it where H would exceed 1 GB. H is kept
        in "memory", on "disk" (a temporary file), or nowhere: "recompute" computes it in every
        pass. "auto": in memory if it fits, within the limit of a container too.
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

    def __init__(
        self,
        *,
        kernel="rbf",
        variance="auto",
        lengthscale="auto",
        mean="auto",
        n_inducing=200,
        inducing="kmeans",
        standardize=True,
        n_components=None,
        solver="direct",
        moments="diagonal",
        optimize=(),
        tuning_budget=40,
        calibrated=False,
        flags=False,
        n_folds=5,
        max_iter=200,
        tol=1e-10,
        random_state=None,
        device=None,
        dtype="auto",
        store="auto",
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
        self.tuning_budget = tuning_budget
        self.calibrated = calibrated
        self.flags = flags
        self.n_folds = n_folds
        self.max_iter = max_iter
        self.tol = tol
        self.random_state = random_state
        self.device = device
        self.dtype = dtype
        self.store = store
        self.verbose = verbose

    # --- Fit ----------------------------------------------------------------------------------

    def fit(self, bags, y=None, *, client=None, group=None):
        """Fit q(u) to labelled bags; y (0/1, one a bag) wins over `bags.labels`.

        Over several machines, to the same model: with `client`, a `dask.distributed.Client`, bags
        may also be a list of Bags, or of functions that build them on the workers; with `group`, a
        torch.distributed process group, every process passes its own bags. See
        `gpmil.distributed`.
        """
        if client is None and group is None:
            return super().fit(bags, y)
        fresh = copy.copy(self)

        def work(cluster: distributed.Cluster, y: Any) -> dict[str, Any]:
            fresh._fit_apart(cluster, y)
            return {name: value for name, value in vars(fresh).items() if name.endswith("_")}

        with torch.no_grad(), progress_shown(bool(self.verbose)):
            fitted = distributed.run(work, bags, y, client=client, group=group, device=self.device)
        self.__dict__.update(fitted)
        return self

    def _fit(self, bags: Bags, y) -> None:
        self._check_settings()
        labels, self.classes_ = training_labels(bags, y)
        device = resolve_device(self.device)
        fold = self._planned_folds(bags, labels)  # what is impossible is said before the work
        self.n_features_in_ = bags.n_features
        self.cohort_ = cohort_card(bags, labels)
        facts = Facts.of(bags)
        self.coupling_ = self._coupling_strength(facts)
        rows = features.on_device(bags.features, device)
        self._fit_feature_map(rows)
        positive_row = (labels == 1)[bags.bag_index]
        self.inducing_points_ = self._place_inducing(rows, positive_row, device)
        self._settings_for(facts, labels, lambda chosen: bags[chosen], device)
        self.evidence_trace_ = None
        if self.optimize:
            self._climb_evidence(bags, labels, device)

        gp = self._gp(device)
        counts = len(bags), bags.n_instances, len(gp.L)
        logger.info("fit: %d bags, %d instances, %d inducing points", *counts)
        problem = self._problem(gp, bags, labels, rows)
        q = self._settle(gp, problem)
        if self.tuning_trace_ is not None and learning.is_small(bags):
            left_out = self._leave_out(gp, problem, q, bags, labels)
            self.loo_log_likelihood_ = float(left_out.mean())
        self.cross_fit_ = None
        if fold is not None:
            self.cross_fit_ = CrossFit.fit(self, bags, labels, fold, bool(self.calibrated))

    def _settings_for(
        self,
        facts: Facts,
        labels: np.ndarray,
        take: Callable[[np.ndarray], Bags],
        device: torch.device,
    ) -> None:
        """Every setting as a number; `take` gives the bags that some are learned from."""
        self._set_kernel_numbers(facts)
        self._check_kernel(device)
        self.tuning_trace_, self.loo_log_likelihood_ = None, None
        if self._learned_names():
            self._learn(facts, labels, take, device)

    def _settle(self, gp: SparseGP, problem: inference.Problem) -> Posterior:
        """Solve, and keep what was found."""
        solution = self._solve(problem)
        _warn_unsettled(problem)
        q = Posterior.build(solution.w, problem.R)
        self._keep(gp, q)
        self.n_iter_, self.converged_, self.residual_, trace = solution[1:]
        self.elbo_trace_ = np.array(trace) + problem.constant
        return q

    def _fit_apart(self, cluster: distributed.Cluster, y) -> None:
        """`_fit` over partitions: the same steps, on sums that come from them."""
        self._check_settings()
        self._check_apart()
        cohort = distributed.Cohort.meet(cluster)
        facts = cohort.whole
        labels, self.classes_ = training_labels(facts, facts.y if y is None else y)
        device = resolve_device(self.device)
        self.n_features_in_ = facts.n_features
        self.cohort_ = cohort_card(facts, labels)
        self.coupling_ = self._coupling_strength(facts)
        cohort.take_labels(labels)
        wanted = None if self.n_components is None else int(self.n_components)
        self._keep_feature_map(cohort.feature_map(wanted, bool(self.standardize)))
        if isinstance(self.inducing, str):
            self.inducing_points_ = cohort.kmeans_by_class(
                labels, self._feature_map(), int(self.n_inducing), self._seed(), device
            )
        else:
            self.inducing_points_ = check_inducing(self.inducing, facts.n_features)
        self._settings_for(facts, labels, cohort.some_bags, device)
        self.evidence_trace_, self.cross_fit_ = None, None

        gp = self._gp(device)
        counts = len(facts), facts.n_instances, len(gp.L)
        logger.info("fit: %d bags, %d instances, %d inducing points", *counts)
        plan = distributed.Plan(
            self._feature_map(), self.kernel_, self.variance_ or 1.0, self.lengthscale_ or 1.0,
            gp.inducing.cpu(), gp.L.cpu(), self.coupling_, self._storage_dtype(*counts[1:]),
            LIKELIHOODS[self.moments], self.store,
        )  # fmt: skip
        problem = cohort.problem(plan, self.mean_, device)
        q = self._settle(gp, problem)
        few = len(facts) <= learning.MOST_BAGS and facts.sizes.max() <= learning.MOST_INSTANCES
        if self.tuning_trace_ is not None and few:
            left_out = cohort.leave_one_bag_out(problem, q.w, self.solver == "direct")
            self.loo_log_likelihood_ = float(left_out.mean())

    def _check_apart(self) -> None:
        used = [name for name in ("calibrated", "flags", "optimize") if getattr(self, name)]
        if used:
            raise ValueError(
                f"{', '.join(used)} cannot be had over partitions: they need all bags in one "
                "place. Leave them out, or fit with neither client nor group."
            )

    def _planned_folds(self, bags: Bags, labels: np.ndarray) -> np.ndarray | None:
        if not (self.calibrated or self.flags):
            return None
        seed, calibrated = self._seed(), bool(self.calibrated)
        return planned_folds(bags, labels, int(self.n_folds), seed, calibrated)

    def with_settings_fixed(self) -> "VGPMILPR":
        """A new model with what was learned here as its settings, to fit to other bags."""
        fixed = {
            "kernel": self.kernel_,
            "mean": self.mean_,
            "calibrated": False,
            "flags": False,
            "optimize": (),
        }
        if self.variance_ is not None:
            fixed |= {"variance": self.variance_, "lengthscale": self.lengthscale_}
            if self.relevance_ is not None:
                fixed["lengthscale"] = self.lengthscale_ / self.relevance_
        if "coupling" in self.get_params(deep=False):
            fixed["coupling"] = self.coupling_
        return clone(self).set_params(**fixed)

    def _problem(
        self, gp: SparseGP, bags: Bags, labels: np.ndarray, rows: features.Rows | None = None
    ) -> inference.Problem:
        stored = bags.features if rows is None else rows
        return inference.prepare(
            gp,
            lambda which: self._inputs(features.take(stored, which), gp.L.device),
            bags.adjacency,
            bags.offsets,
            labels == 1,
            self.coupling_,
            self.mean_,
            self._storage_dtype(bags.n_instances, len(gp.L)),
            likelihood=LIKELIHOODS[self.moments],
            store=self.store,
        )

    def _storage_dtype(self, N: int, M: int) -> torch.dtype:
        if self.dtype != "auto":
            return DTYPES[self.dtype]
        if 8 * N * M <= LARGE_H:
            return torch.float64
        logger.info("H is stored in float32, %.1f GB (dtype='float64' to double it)", 4e-9 * N * M)
        return torch.float32

    # --- Learn the settings -------------------------------------------------------------------

    def _learned_names(self) -> list[str]:
        """The settings that are "auto" and apply."""
        own_kernel = isinstance(self.kernel, gpytorch.kernels.Kernel)
        names = [n for n in ("mean", "coupling") if _is(getattr(self, n, 0.0), "auto")]
        if not own_kernel:
            names += ["variance"] if _is(self.variance, "auto") else []
            names += ["lengthscale"] if _is(self.lengthscale, "auto", "ard") else []
        if "coupling" in names and self.coupling_ == 0:
            names.remove("coupling")  # no edges
        return [*names, "kernel"] if _is(self.kernel, "auto") else names

    def _learn(
        self,
        facts: Facts,
        labels: np.ndarray,
        take: Callable[[np.ndarray], Bags],
        device: torch.device,
    ) -> None:
        """Replace what is "auto" by what the leave-one-bag-out likelihood prefers."""
        if (np.bincount(labels, minlength=2) < 2).any():
            raise ValueError(
                f"learning the settings needs two bags of each class, found "
                f"{int((labels == 0).sum())} negative and {int(labels.sum())} positive: leaving "
                "one out would leave none. Give variance, lengthscale, mean and coupling as "
                "numbers, see gpmil.paper_settings()."
            )
        chosen = learning.subsample(labels, self._seed())
        names, budget = self._learned_names(), int(self.tuning_budget)
        ard = "lengthscale" in names and _is(self.lengthscale, "ard")
        if ard and self._n_inputs() > MOST_LENGTHS:
            raise ValueError(
                f"lengthscale='ard' learns one length a column, for up to {MOST_LENGTHS} columns; "
                f"found {self._n_inputs()}. Reduce them with n_components=64, say, or use 'auto'."
            )
        kernels = learning.AUTO_KERNELS if _is(self.kernel, "auto") else (self.kernel_,)
        made = self._tuning_cohort(take(chosen), labels[chosen], device)
        found = learning.learn(made, kernels, self._space(facts, names), budget)
        self.kernel_ = found.kernel
        if self.variance_ is not None:
            self.variance_, self.lengthscale_ = found.settings[:2]
        self.mean_, self.coupling_ = found.settings[2:]
        self.loo_log_likelihood_, self.tuning_trace_ = found.score, found.trace
        if ard:
            made = made.with_kernel(found.kernel)
            weights, self.loo_log_likelihood_ = tuning.relevance(made, found.settings, budget)
            self._weigh_columns(weights)
        self._warn_of_guessing(labels[chosen])
        logger.info(
            "learned from %d bags: variance %.3g, length %.3g, mean %.3g, coupling %.3g; "
            "leave-one-bag-out log likelihood %.4f a bag",
            len(chosen), *found.settings, self.loo_log_likelihood_,
        )  # fmt: skip

    def _tuning_cohort(self, bags: Bags, labels: np.ndarray, device: torch.device) -> Cohort:
        rows = learning.thinned_rows(bags, lambda b: self._first_look(b, labels))
        inducing = self._inputs(self.inducing_points_, device)
        return learning.cohort(
            bags, rows, labels == 1, lambda x: self._inputs(x, device), inducing, self.kernel_
        )

    def _space(self, facts: Facts, names: list[str]) -> tuning.Space:
        """What is searched, and the numbers that stay."""
        known = (self.variance_, self.lengthscale_, self.mean_, self.coupling_)
        fixed = {
            name: 1.0 if value is None else value  # None: a kernel object has its own
            for name, value in zip(tuning.NAMES, known, strict=True)
            if name not in names
        }
        level = None
        if _is(self.mean, "balanced") and "variance" in names:
            level = learning.balanced_level(facts.sizes)  # the mean follows the variance
            del fixed["mean"]
        return tuning.Space(fixed, math.sqrt(self._n_inputs()), level)

    def _warn_of_guessing(self, labels: np.ndarray) -> None:
        share = labels.mean()
        guess = float(share * np.log(share) + (1 - share) * np.log1p(-share))
        if self.loo_log_likelihood_ is not None and self.loo_log_likelihood_ < guess:
            logger.warning(
                "the learned model predicts a bag left out no better than the share of positive "
                "bags does (log likelihood %.3f against %.3f): too few bags, or features that do "
                "not tell the classes apart.",
                self.loo_log_likelihood_,
                guess,
            )

    def _first_look(self, bags: Bags, labels: np.ndarray) -> Float[np.ndarray, " N"]:
        """m*/sd of every instance under a fit at the settings that tuning starts from."""
        variance, length, level, strength = tuning.CENTRE
        first = copy.copy(self)
        first.variance, first.lengthscale = variance, length * math.sqrt(self._n_inputs())
        first.mean = level * math.sqrt(1 + variance)
        first.coupling, first.kernel = min(self.coupling_, strength), "rbf"
        first.inducing, first.moments, first.solver = self.inducing_points_, "diagonal", "direct"
        first.optimize, first.calibrated, first.flags = (), False, False
        return suspicion(first.fit(bags, labels).predict_instances(bags))

    def leave_one_bag_out(self, bags, y=None) -> Float[np.ndarray, " B"]:
        """log p(y_b) of every training bag under the fit without it, from this one fit.

        `bags` (and y) are those the model was fitted on. Bag b is taken out by one Newton step of
        the problem without it; inducing points and settings stay.
        """
        bags = self._check_predictable(bags)
        labels, _ = training_labels(bags, y)
        device = resolve_device(self.device)
        with torch.no_grad():
            gp, q = self._gp(device), self._posterior(device)
            problem = self._problem(gp, bags, labels)
            if inference.relative(problem.R - q.R, q.R) > 1e-6:
                raise ValueError(
                    "these are not the bags the model was fitted on: leaving one of them out of "
                    "the fit has no meaning. Pass the training bags."
                )
            self._check_same_labels(problem, q.w)
            return self._leave_out(gp, problem, q, bags, labels)

    def _check_same_labels(self, problem: inference.Problem, w: torch.Tensor) -> None:
        """R holds no labels; the condition that w fulfils does."""
        if self.solver == "sweeps" and not self.converged_:
            return
        if self.solver == "direct":
            residual = inference.relative(inference.collapsed_bound(problem, w)[1], w)
        else:
            residual = inference.relative(inference.fixed_point(problem, w)[0], problem.R @ w)
        if residual > max(1e-5, 100 * float(self.residual_)):
            raise ValueError(
                "these labels are not those the model was fitted with (its optimum is none for "
                f"them, residual {residual:.1e}). Pass the labels of the fit."
            )

    def _leave_out(
        self,
        gp: SparseGP,
        problem: inference.Problem,
        q: Posterior,
        bags: Bags,
        labels: np.ndarray,
    ) -> Float[np.ndarray, " B"]:
        device = gp.L.device
        positive = torch.from_numpy(labels == 1).to(device)

        def batches() -> Iterator[tuple[np.ndarray, leave_out.Bag]]:
            for part in dense_parts(
                bags.adjacency, bags.offsets, np.arange(len(bags)), self.coupling_, device
            ):
                x = self._inputs(bags.features[part.rows.cpu().numpy()], device)
                yield part.bags, leave_out.padded_bag(gp, part, x, positive[part.bags])

        found = inference.leave_one_bag_out(problem, batches(), q.w, self.solver == "direct")
        return found.cpu().numpy()

    def _solve(self, problem: inference.Problem) -> inference.Solution:
        max_iter, tol = int(self.max_iter), float(self.tol)
        if self.solver == "direct":
            return inference.direct(problem, max_iter, tol)
        if self.solver == "newton":
            return inference.newton(problem, max_iter, tol)
        start = generator(self.random_state).standard_normal(problem.n_instances)
        expectation = torch.from_numpy(start).to(problem.R.device)
        return inference.sweeps(problem, expectation, max_iter, tol)

    def _climb_evidence(self, bags: Bags, labels: np.ndarray, device: torch.device) -> None:
        """Move what `optimize` names to a maximum of the collapsed bound."""
        cohort = evidence.Cohort(
            self.kernel_,
            lambda rows: self._inputs(features.take(bags.features, rows), device),
            bags.adjacency,
            bags.offsets,
            labels == 1,
            self.coupling_,
            LIKELIHOODS[self.moments],
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

    def _coupling_strength(self, facts: Facts) -> float:
        return 0.0

    def _set_kernel_numbers(self, facts: Facts) -> None:
        """The settings as numbers; "auto" stands at one until it is learned."""
        self.kernel_ = "rbf" if _is(self.kernel, "auto") else copy.deepcopy(self.kernel)
        root_dim = math.sqrt(self._n_inputs())
        self.variance_ = 1.0 if _is(self.variance, "auto") else float(self.variance)
        if isinstance(self.lengthscale, str):
            self.lengthscale_ = root_dim  # until it is learned, if it is
        elif np.ndim(self.lengthscale) == 1:
            self.lengthscale_ = float(np.exp(np.log(self.lengthscale).mean()))
        else:
            self.lengthscale_ = float(self.lengthscale)
        if isinstance(self.kernel, gpytorch.kernels.Kernel):
            self.variance_ = self.lengthscale_ = None
        if _is(self.mean, "balanced"):
            variance = self._own_variance() if self.variance_ is None else self.variance_
            self.mean_ = learning.balanced_level(facts.sizes) * math.sqrt(1 + variance)
        else:
            self.mean_ = 0.0 if _is(self.mean, "auto") else float(self.mean)

    def _own_variance(self) -> float:
        """Mean variance of a kernel object at the inducing points."""
        z = self._inputs(self.inducing_points_, CPU)
        return float(Kernel(self.kernel_, 1.0, 1.0)(z, z).diagonal().mean())

    def _check_settings(self) -> None:
        generator(self.random_state)
        one_of("moments", self.moments, tuple(LIKELIHOODS))
        one_of("solver", self.solver, SOLVERS)
        self._check_optimize()
        one_of("dtype", self.dtype, ("auto", *DTYPES))
        one_of("store", self.store, STORES)
        if isinstance(self.inducing, str):
            one_of("inducing", self.inducing, ("kmeans",))
        if np.ndim(self.lengthscale) != 1:
            words = ("auto", "ard", "sqrt_dim")
            word_or_number("lengthscale", self.lengthscale, words, above=0)
        word_or_number("variance", self.variance, ("auto",), above=0)
        word_or_number("mean", self.mean, ("auto", "balanced"))
        count("tuning_budget", self.tuning_budget, least=1)
        number("tol", self.tol, above=0)
        count("n_inducing", self.n_inducing, least=2)
        count("max_iter", self.max_iter, least=1)
        count("n_folds", self.n_folds, least=2)
        for name in ("standardize", "verbose", "calibrated", "flags"):
            flag(name, getattr(self, name))
        if self.n_components is not None:
            count("n_components", self.n_components, least=1)
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
        learned = {n for n in self.optimize if _is(getattr(self, n, None), "auto", "ard")}
        if learned:
            raise ValueError(
                f"{sorted(learned)} cannot be both 'auto' and in optimize: give a number to start "
                "from, or leave it out of optimize."
            )
        if self.optimize and self.solver != "direct":
            raise ValueError(f"optimize needs solver='direct', got solver={self.solver!r}.")
        fixed = {"variance", "lengthscale"} & set(self.optimize)
        if fixed and isinstance(self.kernel, gpytorch.kernels.Kernel):
            raise ValueError(
                f"optimize={sorted(fixed)} needs a kernel by name: a kernel object is taken as it "
                "is. Leave them out, or name the kernel."
            )


class VGPMILPRI(VGPMILPR):
    """Probit Gaussian-process MIL with coupled neighbours (eq. mgf_ising).

    Parameters
    ----------
    coupling : "auto" or float
        lambda >= 0, the strength of the coupling between contiguous instances; 0 is VGPMIL-PR.
        "auto": learned with the other settings. Bags without coordinates or edges run uncoupled,
        which is said once.
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
        coupling="auto",
        kernel="rbf",
        variance="auto",
        lengthscale="auto",
        mean="auto",
        n_inducing=200,
        inducing="kmeans",
        standardize=True,
        n_components=None,
        solver="direct",
        moments="diagonal",
        optimize=(),
        tuning_budget=40,
        calibrated=False,
        flags=False,
        n_folds=5,
        max_iter=200,
        tol=1e-10,
        random_state=None,
        device=None,
        dtype="auto",
        store="auto",
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
            tuning_budget=tuning_budget,
            calibrated=calibrated,
            flags=flags,
            n_folds=n_folds,
            max_iter=max_iter,
            tol=tol,
            random_state=random_state,
            device=device,
            dtype=dtype,
            store=store,
            verbose=verbose,
        )
        self.coupling = coupling

    def _check_settings(self) -> None:
        super()._check_settings()
        word_or_number("coupling", self.coupling, ("auto",), least=0)

    def _coupling_strength(self, facts: Facts) -> float:
        learned = _is(self.coupling, "auto")
        strength = 1.0 if learned else check_strength(float(self.coupling))
        if learned and facts.has_geometry and not facts.n_edges:
            logger.warning("no two instances are neighbours: the model runs uncoupled.")
            return 0.0
        if strength > 0 and not facts.has_geometry:
            logger.warning(
                "the bags have neither coordinates nor edges: the model runs uncoupled "
                "(coupling 0 instead of %s). Give coords= or edges= to couple neighbours.",
                "a learned one" if learned else f"{strength:g}",
            )
            return 0.0
        return strength


def _is(value: Any, *words: str) -> bool:
    return isinstance(value, str) and value in words


def _warn_unsettled(problem: inference.Problem) -> None:
    unsettled = sum(piece.likelihood.unsettled for piece in problem.chunks)
    if unsettled:
        warn_caller(
            f"expectation propagation has not converged in {unsettled} bags: their truncated "
            "moments are rough. A smaller coupling or variance, or moments='diagonal', avoids it.",
            ConvergenceWarning,
        )
