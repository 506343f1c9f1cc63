"""VGPMIL-PR-I, the probit Gaussian-process MIL model with coupled neighbours, and VGPMIL-PR.

One implementation: VGPMIL-PR is the coupling at zero. What is fitted is q(u), the posterior of
the Gaussian process at M inducing points; predictions follow from it in closed form.
"""

import logging
from dataclasses import dataclass
from typing import Any

import gpytorch
import numpy as np
import torch
from sklearn.base import clone
from sklearn.exceptions import ConvergenceWarning

from gpmil.coupling.operator import check_strength
from gpmil.data.bags import Bags
from gpmil.distributed import Facts
from gpmil.inference import evidence
from gpmil.inference import solvers as inference
from gpmil.inference.pieces import LIKELIHOODS
from gpmil.inference.stores import STORES
from gpmil.models.checks import count, flag, generator, is_word, number, one_of, word_or_number
from gpmil.models.cross_fit import CrossFit, planned_folds
from gpmil.models.learning import is_small
from gpmil.models.on_lesions import Fit
from gpmil.models.sparse import DTYPES, TrainingCohort
from gpmil.models.teaching import TeachableGP
from gpmil.process import features
from gpmil.process.sparse_gp import Posterior, SparseGP
from gpmil.warn import warn_caller

logger = logging.getLogger("gpmil")

SOLVERS = ("direct", "newton", "sweeps")


@dataclass(kw_only=True, eq=False, repr=False)
class VGPMILPR(TeachableGP):
    """Probit Gaussian-process MIL without coupling (Wang et al.; eqs. mgf, ygm).

    Parameters
    ----------
    kernel : "rbf", "matern32", "matern52", "linear", "auto", or a gpytorch kernel
        A kernel object is used as it is; `variance` and `lengthscale` do not apply to it. "auto"
        tries rbf, matern52 and linear.
    variance, lengthscale, mean : "auto", float, or for the length scale an array
        Kernel variance, length scale and the constant prior mean c, in the space of standardised
        features. "auto": learned in fit, together, from the labels of the bags, by maximising the
        likelihood of every bag's label under a fit without its fold, one of five (patients whole,
        where `bags.groups` names them). `lengthscale="sqrt_dim"`
        is the square root of the number of features (the paper); "ard" learns one length per column
        after the common one (with many bags), an array gives them. `mean="balanced"`
        is the one at which a bag of median size is positive with probability one half.
    n_inducing, inducing : int, "kmeans", "lesions" or (M, D) array
        Number of inducing points, and how they are placed: k-means, half in positive and half in
        negative bags; or given, in the feature space of `bags.features`. "lesions": k-means and a
        fit, then a fifth more on suspicious patches that those points do not explain, and a second
        fit, kept if bags left out are predicted better (`inducing_from_lesions_`, their number).
    standardize, n_components : bool, int or None
        Standardise the columns of the features; or reduce them to PCA scores first.
    solver : "direct", "newton" or "sweeps"
        Maximum of the collapsed bound; the paper's fixed point, converged; the paper's
        Algorithm 1, exactly `max_iter` sweeps.
    moments : "diagonal" or "coupled"
        Truncated moments of the patch variables: the paper's independent patches, or all the
        correlation of neighbours, by expectation propagation; with a slide effect at each of
        twenty to thirty values of it, which takes as many times as long.
    slide_effect : None, "auto" or float
        tau >= 0, the deviation of what all patches of a slide share beyond their features (stain,
        scanner); 0 is the paper. "auto": learned with the other settings. None: learned where any
        of the others is (and `moments` are "diagonal"), 0 where all are given.
    slide_context, slide_context_lengthscale : float or "auto"
        gamma_s >= 0, the variance of a second process on the mean feature of the slide, which is
        added to every patch, and its length; 0 is the strict multiple-instance rule. "auto":
        learned. Slides are ranked better where the whole slide tells. The price: it can learn
        stain or site, and one more benign patch may lower the slide's probability; look at
        `predict_evidence`.
    instance_labels : "ignore" or "use"
        Whether known labels of patches in positive bags (`bags.instance_labels`) enter the
        likelihood; these patches are then inducing points as well. `update` takes in new ones.
        Probabilities of bags are then the average of those with and without the labels.
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
    aim : "equal odds", "sensitivity=0.95", "specificity=0.9" or "cost=5:1"
        What `predict` calls positive: the likelier class; or above a threshold that reaches this
        sensitivity or specificity, or costs least (of a false negative : a false positive), on
        bags left out of the fit, or out of fold with `calibrated` or `flags`. It is kept in
        `threshold_`, and what it reached in `operating_point_`.
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

    kernel: Any = "rbf"
    variance: Any = "auto"
    lengthscale: Any = "auto"
    mean: Any = "auto"
    n_inducing: Any = 200
    inducing: Any = "kmeans"
    standardize: Any = True
    n_components: Any = None
    solver: Any = "direct"
    moments: Any = "diagonal"
    slide_effect: Any = None
    slide_context: Any = 0.0
    slide_context_lengthscale: Any = "auto"
    instance_labels: Any = "ignore"
    optimize: Any = ()
    tuning_budget: Any = 40
    calibrated: Any = False
    flags: Any = False
    n_folds: Any = 5
    aim: Any = "equal odds"
    max_iter: Any = 200
    tol: Any = 1e-10
    random_state: Any = None
    device: Any = None
    dtype: Any = "auto"
    store: Any = "auto"
    verbose: Any = False

    # --- Fit ----------------------------------------------------------------------------------

    def _fit_to(self, cohort: TrainingCohort, y, device: torch.device) -> None:
        """The steps of a fit: to bags here, or on sums over partitions of them elsewhere."""
        facts, bags = cohort.whole, cohort.bags
        labels = self._remember_cohort(facts, facts.y if y is None else y)
        # what is impossible is said before the work
        fold = None if bags is None else self._planned_folds(bags, labels)
        self.coupling_ = self._coupling_strength(facts)
        self._place(cohort, labels, device)
        slides = self._place_context(cohort)
        self._find_settings(cohort, labels, device)
        self.evidence_trace_, self.cross_fit_ = None, None
        if bags is not None and self.optimize:
            self._climb_evidence(bags, labels, device)

        self.inducing_from_lesions_ = 0
        found = self._fit_at_points(cohort, labels, device)
        if is_word(self.inducing, "lesions"):
            found = self._add_points_on_lesions(found, cohort, labels, device)
        self._keep_level(self._gp(device), found.q, slides)
        self._learn_range(cohort, device)
        self._fit_untaught(cohort, device)
        if bags is not None and fold is not None:
            self.cross_fit_ = self._cross_fitted(bags, labels, fold)
        self._keep_operating_point(found.left_out, self.cross_fit_, labels, facts.groups)

    def _fit_at_points(
        self, cohort: TrainingCohort, labels: np.ndarray, device: torch.device
    ) -> Fit:
        gp = self._prior(cohort.whole, device)
        problem = self._problem(gp, cohort)
        q, left_out = self._settle(gp, problem), None
        judged = self.tuning_trace_ is not None or is_word(self.inducing, "lesions")
        judged = judged or (self._aims() and not (self.calibrated or self.flags))
        if judged and is_small(cohort.whole.sizes):
            left_out = self._left_out(cohort, labels, problem, q.w)
        if left_out is not None:  # that of the fit itself, with its solver
            self.loo_log_likelihood_ = float(left_out.mean())
        return Fit(q, left_out)

    def _settle(self, gp: SparseGP, problem: inference.Problem) -> Posterior:
        """Solve, and keep what was found."""
        return self._kept(gp, problem, self._solve(problem))

    def _kept(
        self, gp: SparseGP, problem: inference.Problem, solution: inference.Solution
    ) -> Posterior:
        _warn_unsettled(problem)
        q = Posterior.build(solution.w, problem.R)
        self._keep(gp, q)
        self._keep_wide(problem, solution)
        self.n_iter_, self.converged_, self.residual_, trace = solution[1:5]
        self.elbo_trace_ = np.array(trace) + problem.constant
        return q

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

    def _cross_fitted(self, bags: Bags, labels: np.ndarray, fold: np.ndarray) -> CrossFit:
        return CrossFit.fit(self, bags, labels, fold, bool(self.calibrated))

    def with_settings_fixed(self) -> "VGPMILPR":
        """A new model with what was learned here as its settings, to fit to other bags."""
        fixed = {
            "kernel": self.kernel_,
            "mean": self.mean_,
            "calibrated": False,
            "flags": False,
            "aim": "equal odds",
            "optimize": (),
        }
        if self.variance_ is not None:
            fixed |= {"variance": self.variance_, "lengthscale": self.lengthscale_}
            if self.relevance_ is not None:
                fixed["lengthscale"] = self.lengthscale_ / self.relevance_
        if "coupling" in self.get_params(deep=False):
            fixed["coupling"] = self.coupling_
        fixed |= {"slide_effect": self.slide_effect_, "slide_context": self.slide_context_}
        if self.slide_context_lengthscale_ is not None:
            fixed["slide_context_lengthscale"] = self.slide_context_lengthscale_
        return clone(self).set_params(**fixed)

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
            self.slide_effect_,
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

    def _check_settings(self) -> None:
        self._check_common_settings()
        one_of("moments", self.moments, tuple(LIKELIHOODS))
        one_of("solver", self.solver, SOLVERS)
        self._check_optimize()
        word_or_number("slide_effect", self.slide_effect, ("auto", None), least=0)
        self._check_slide_context()
        self._check_teaching()
        self._check_aim()
        one_of("dtype", self.dtype, ("auto", *DTYPES))
        one_of("store", self.store, STORES)
        if np.ndim(self.lengthscale) != 1:
            words = ("auto", "ard", "sqrt_dim")
            word_or_number("lengthscale", self.lengthscale, words, above=0)
        word_or_number("variance", self.variance, ("auto",), above=0)
        word_or_number("mean", self.mean, ("auto", "balanced"))
        count("tuning_budget", self.tuning_budget, least=1)
        number("tol", self.tol, above=0)
        count("n_folds", self.n_folds, least=2)
        for name in ("calibrated", "flags"):
            flag(name, getattr(self, name))

    def _check_slide_context(self) -> None:
        super()._check_slide_context()
        if self._has_context() and self.optimize:
            raise ValueError(
                f"optimize={self.optimize!r} knows no slide context, got slide_context="
                f"{self.slide_context!r}. Leave one of the two out."
            )

    def _check_optimize(self) -> None:
        names = self.optimize if isinstance(self.optimize, tuple | list) else [None]
        known = [name for name in evidence.SETTINGS if name in names]
        if len(known) != len(names):
            raise ValueError(
                f"optimize must be a tuple of different names among {list(evidence.SETTINGS)}, "
                f"got {self.optimize!r}."
            )
        learned = {n for n in self.optimize if is_word(getattr(self, n, None), "auto", "ard")}
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


@dataclass(kw_only=True, eq=False, repr=False)
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
    >>> model = gpmil.VGPMILPRI(n_inducing=30, tuning_budget=6, random_state=0).fit(bags)
    >>> model.predict_proba(bags).shape
    (12, 2)
    >>> len(model.predict_instances(bags)) == bags.n_instances
    True
    """

    coupling: Any = "auto"

    def _check_settings(self) -> None:
        super()._check_settings()
        word_or_number("coupling", self.coupling, ("auto",), least=0)

    def _coupling_strength(self, facts: Facts) -> float:
        learned = is_word(self.coupling, "auto")
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


def _warn_unsettled(problem: inference.Problem) -> None:
    unsettled = sum(piece.likelihood.unsettled for piece in problem.chunks)
    if unsettled:
        warn_caller(
            f"expectation propagation has not converged in {unsettled} bags: their truncated "
            "moments are rough. A smaller coupling or variance, or moments='diagonal', avoids it.",
            ConvergenceWarning,
        )
