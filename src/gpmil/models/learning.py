"""From a cohort to the settings that "auto" stands for, and every bag left out of the fit.

Settings are judged by the likelihood of every bag under a fit without its fold; tuning.py searches.
"""

import copy
import logging
import math
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from gpytorch.kernels import Kernel as GPyTorchKernel
from jaxtyping import Float, Int, Shaped
from scipy.special import ndtri
from torch import Tensor

from gpmil.data.bags import Bags
from gpmil.data.folds import left_out_together, share_patients, whole_patients
from gpmil.distributed import Facts, Plan, WholeCohort
from gpmil.fast.lanes import few_threads, one_blas_thread
from gpmil.inference import simpler, tuning
from gpmil.inference import solvers as inference
from gpmil.inference.at_settings import Settings
from gpmil.inference.folded_cohort import Cohort, SlidesInContext, folded
from gpmil.inference.leave_out import label_scores
from gpmil.inference.pieces import LIKELIHOODS
from gpmil.inference.tuning import Space
from gpmil.models.base import resolve_device, training_labels
from gpmil.models.checks import is_word
from gpmil.models.cross_fit import suspicion
from gpmil.models.sparse import DTYPES, TrainingCohort
from gpmil.models.with_patients import PatientGP
from gpmil.process.kernels import Kernel
from gpmil.process.sparse_gp import SparseGP

logger = logging.getLogger("gpmil")

MOST_BAGS = 500  # bags that tuning looks at
MOST_INSTANCES = 1_000  # instances per bag that tuning looks at
BESIDE_A_GPU = 4  # threads of learning, which such machines have many more of
LARGE_H = 1e9  # bytes of H in float64 from which "auto" stores float32
CPU = torch.device("cpu")
AUTO_KERNELS = ("rbf", "matern52", "linear")


@dataclass(frozen=True)
class LearnedSettings:
    """What was chosen, how well it scored, and everything that was tried."""

    kernel: str | GPyTorchKernel
    settings: Settings
    score: float
    trace: list[dict[str, Any]]


def balanced_level(sizes: Int[np.ndarray, " B"]) -> float:
    """u with Phi(-u)^n = 1/2, n the median bag: a typical bag is positive with probability 1/2.

    The prior mean is then c = u sqrt(1 + variance), the deviation of a patch variable.

    >>> round(balanced_level(np.array([50, 100, 400])), 3)
    -2.462
    """
    return -float(ndtri(0.5 ** (1 / np.median(sizes))))


def is_small(sizes: Int[np.ndarray, " B"]) -> bool:
    """Whether tuning looks at the whole cohort."""
    return len(sizes) <= MOST_BAGS and int(sizes.max()) <= MOST_INSTANCES


def subsample(
    labels: Int[np.ndarray, " B"], seed: int, groups: Shaped[np.ndarray, " B"] | None = None
) -> Int[np.ndarray, " b"]:
    """The bags to tune on: all, or 500 with the classes in their proportion, patients whole."""
    if len(labels) <= MOST_BAGS:
        return np.arange(len(labels))
    if groups is not None:
        patients = whole_patients(labels, groups, MOST_BAGS, seed)
        if left_out_together(labels[patients], groups[patients]) is not None:
            return patients
    logger.info("tuning on a stratified subsample of %d of %d bags", MOST_BAGS, len(labels))
    rng = np.random.default_rng(seed)
    positive, negative = np.flatnonzero(labels == 1), np.flatnonzero(labels == 0)
    # a rare class keeps two bags at least, or all it has
    share = round(MOST_BAGS * len(positive) / len(labels))
    n_positive = int(np.clip(share, min(2, len(positive)), MOST_BAGS - min(2, len(negative))))
    chosen = np.concatenate(
        [
            rng.choice(positive, min(n_positive, len(positive)), replace=False),
            rng.choice(negative, min(MOST_BAGS - n_positive, len(negative)), replace=False),
        ]
    )
    return np.sort(chosen)


def thinned_rows(
    bags: Bags,
    score: Callable[[Bags], Float[np.ndarray, " N"]],
    labelled: bool = False,
) -> Int[np.ndarray, " n"]:
    """Rows to tune on: of a bag above the limit those that a first model finds most suspicious.

    They all but decide the bag's probability, in negative bags as in positive ones. `labelled`:
    patches whose labels are known come first.
    """
    large = bags.sizes > MOST_INSTANCES
    if not large.any():
        return np.arange(bags.n_instances)
    logger.info(
        "tuning looks at the %d most suspicious instances of %d bags that have more",
        MOST_INSTANCES,
        int(large.sum()),
    )
    suspicion = score(bags)
    if labelled:
        suspicion = np.where(bags.instance_labels >= 0, np.inf, suspicion)
    kept = [
        np.arange(start, stop)
        if stop - start <= MOST_INSTANCES
        else start + np.sort(np.argsort(-suspicion[start:stop], kind="stable")[:MOST_INSTANCES])
        for start, stop in zip(bags.offsets[:-1], bags.offsets[1:], strict=True)
    ]
    return np.concatenate(kept)


def learn(
    made: Cohort,
    kernels: tuple[str | GPyTorchKernel, ...],
    space: Space,
    budget: int,
    spare: str | None = None,
    seed: int = 0,
    device: torch.device = CPU,
) -> LearnedSettings:
    """Search under every kernel; the best objective wins, with the setting `spare` or without.

    On `device` are the last steps; those of a pilot are too small for a GPU.
    """
    apart = 0 if spare is None else simpler.part_of(budget)
    add = spare == "slide_effect" and apart > 0
    # an effect is added to the best settings without it, with a part of the budget more
    first, at_most = (space.without("slide_effect"), budget) if add else (space, budget - apart)
    few = tuning.fewer_points(made, seed)
    small = tuning.pilot(few, seed)
    last = few if tuning.is_large(made) else made
    enough = tuning.ENOUGH if small is last else tuning.ON_A_PILOT
    searches = [tuning.search(small.with_kernel(k), first, at_most, enough) for k in kernels]
    best = max(searches, key=lambda s: s.best.objective)
    rivals = []
    if spare is not None and apart:
        rivals = [
            simpler.added(best, spare, apart, space) if add else simpler.without(best, spare, apart)
        ]
    ends = [search for search in (best, *rivals) if search.trace]
    if small is not last:
        whole = last.with_kernel(best.cohort.kernel).on(device)
        # where no value with all bags is a number, the pilot has the last word
        ends = tuning.judged(ends, whole) or [best]
    begun = ends[0].cohort is not best.cohort
    if spare is not None and len(ends) == 2:
        having, lacking = ends[::-1] if add else ends
        winner = simpler.decided(spare, having, lacking, begun)
    else:
        winner = tuning.finished(ends[0]) if begun else ends[0]
    tried = {id(search): search for search in (*searches, *rivals, *ends)}
    trace = [trial.in_table() for search in tried.values() for trial in search.trace]
    kept = winner.best
    return LearnedSettings(best.cohort.kernel, kept.settings, kept.score, trace)


def spared(names: list[str], has_geometry: bool) -> str | None:
    """The setting that is 0 where the bags are predicted as well without it.

    Not the slide effect of slides with positions: their labels prefer none even where it makes
    the map (docs/explanation/tuning.md); the prior holds it.
    """
    if "coupling" in names:
        return "coupling"
    return "slide_effect" if "slide_effect" in names and not has_geometry else None


class TunedGP(PatientGP):
    """A model whose settings may be "auto": learned from the labels of the bags."""

    n_iter_: int
    converged_: bool
    residual_: float
    tuning_budget: Any
    solver: Any
    moments: Any
    slide_effect: Any
    instance_labels: Any
    optimize: Any
    calibrated: Any
    dtype: Any
    store: Any

    def _find_settings(
        self, cohort: TrainingCohort, labels: Int[np.ndarray, " B"], device: torch.device
    ) -> None:
        """Every setting as a number."""
        self._set_kernel_numbers()
        if is_word(self.mean, "balanced"):
            variance = self._own_variance() if self.variance_ is None else self.variance_
            self.mean_ = balanced_level(cohort.whole.sizes) * math.sqrt(1 + variance)
        learned = "slide_effect" in self._learned_names()
        self.slide_effect_ = 1.0 if learned else float(self.slide_effect or 0.0)
        self._set_context_numbers()
        self._check_kernel(device)
        self.tuning_trace_, self.loo_log_likelihood_ = None, None
        if self._learned_names():
            self._learn(cohort, labels, device)

    def _own_variance(self) -> float:
        """Mean variance of a kernel object at the inducing points."""
        z = self._inputs(self.inducing_points_, CPU)
        return float(Kernel(self.kernel_, 1.0, 1.0).diagonal(z).mean())

    def _learned_names(self) -> list[str]:
        """The settings that are "auto" and apply."""
        own_kernel = isinstance(self.kernel, GPyTorchKernel)
        named = ("mean", "coupling", "slide_context")
        names = [n for n in named if is_word(getattr(self, n, 0.0), "auto")]
        if not own_kernel:
            names += ["variance"] if is_word(self.variance, "auto") else []
            names += ["lengthscale"] if is_word(self.lengthscale, "auto", "ard") else []
        if self._has_context() and is_word(self.slide_context_lengthscale, "auto"):
            names.append("slide_context_lengthscale")
        if "coupling" in names and self.coupling_ == 0:
            names.remove("coupling")  # no edges
        names += ["kernel"] if is_word(self.kernel, "auto") else []
        # nobody who gives all settings waits for a search, or for thirty times as many moments
        with_others = self.slide_effect is None and names and self.moments == "diagonal"
        learned = with_others or is_word(self.slide_effect, "auto")
        return [*names, "slide_effect"] if learned else names

    def _learn(
        self, cohort: TrainingCohort, labels: Int[np.ndarray, " B"], device: torch.device
    ) -> None:
        """Replace what is "auto" by what the likelihood of bags left out prefers."""
        names, budget = self._learned_names(), int(self.tuning_budget)
        ard = "lengthscale" in names and is_word(self.lengthscale, "ard")
        self._check_learnable(labels)
        chosen, groups = self._learned_from(labels, cohort.whole.groups)
        kernels = AUTO_KERNELS if is_word(self.kernel, "auto") else (self.kernel_,)
        made = self._tuning_cohort(cohort.some_bags(chosen), labels[chosen], CPU, groups)
        spare, space = spared(names, cohort.whole.has_geometry), self._space(cohort.whole, names)
        with few_threads(BESIDE_A_GPU) if device.type == "cuda" else nullcontext():
            found = learn(made, kernels, space, budget, spare, self._seed(), device)
        self.kernel_ = found.kernel
        if self.variance_ is not None:
            self.variance_, self.lengthscale_ = found.settings[:2]
        self.mean_, self.coupling_, self.slide_effect_ = found.settings[2:5]
        if self._has_context():
            self.slide_context_, self.slide_context_lengthscale_ = found.settings[5:]
        self.loo_log_likelihood_, self.tuning_trace_ = found.score, found.trace
        if ard:
            made = made.with_kernel(found.kernel)
            weights, self.loo_log_likelihood_ = tuning.relevance(made, found.settings, budget)
            self._weigh_columns(weights)
        if not self._is_taught():  # with labels of patches in it no share of bags compares
            self._warn_of_guessing(labels[chosen])
        logger.info(
            "learned from %d bags: %s; log likelihood %.4f per bag in %d folds left out%s",
            len(chosen), tuning.in_words(found.settings), self.loo_log_likelihood_, made.n_folds,
            "" if groups is None else ", patients whole",
        )  # fmt: skip

    def _learned_from(
        self, labels: Int[np.ndarray, " B"], groups: Shaped[np.ndarray, " B"] | None
    ) -> tuple[Int[np.ndarray, " b"], Shaped[np.ndarray, " b"] | None]:
        """The bags that are looked at, and the patients among them that are left out together."""
        whole = left_out_together(labels, groups)
        if whole is None and share_patients(groups):
            logger.warning(
                "all bags of a class are of one patient (group): learning leaves out bags, not "
                "patients, and flatters settings that profit from slides of the same patient."
            )
        chosen = subsample(labels, self._seed(), whole)
        return chosen, None if whole is None else left_out_together(labels[chosen], whole[chosen])

    def _check_learnable(self, labels: Int[np.ndarray, " B"]) -> None:
        if (np.bincount(labels, minlength=2) < 2).any():
            raise ValueError(
                f"learning the settings needs two bags of each class, found "
                f"{int((labels == 0).sum())} negative and {int(labels.sum())} positive: leaving "
                "one out would leave none. Give variance, lengthscale, mean and coupling as "
                "numbers, see gpmil.paper_settings()."
            )

    def _tuning_cohort(
        self, bags: Bags, labels: np.ndarray, device: torch.device, groups: np.ndarray | None
    ) -> Cohort:
        taught = self._is_taught()
        rows = thinned_rows(bags, lambda b: self._first_look(b, labels), taught)
        inducing = self._inputs(self.inducing_points_, device)
        made = folded(
            bags, rows, labels == 1, lambda x: self._inputs(x, device), inducing, self.kernel_,
            groups, self._seed(),
        )  # fmt: skip
        known = bags.instance_labels[rows] if taught else None
        return replace(made, context=self._slides_in_context(bags, device), known=known)

    def _slides_in_context(self, bags: Bags, device: torch.device) -> SlidesInContext | None:
        """z of some bags, from all of their patches, and the inducing points of the context."""
        context = self._context(device)
        if context is None:
            return None
        means = WholeCohort(bags, device).slide_means(self._feature_map()).to(device)
        return SlidesInContext(context.frame(means), context.points)

    def _is_taught(self) -> bool:
        """Whether known labels of patches count."""
        return False

    def _settings(self) -> Settings:
        """All of them as numbers; one that has no meaning here, None, is 1."""
        known = (getattr(self, f"{name}_") for name in Settings._fields)
        return Settings(*(1.0 if value is None else value for value in known))

    def _space(self, facts: Facts, names: list[str]) -> Space:
        """What is searched, and the numbers that stay."""
        fixed = {k: v for k, v in self._settings()._asdict().items() if k not in names}
        level = None
        if is_word(self.mean, "balanced") and "variance" in names:
            level = balanced_level(facts.sizes)  # the mean follows the variance
            del fixed["mean"]
        root, context = math.sqrt(self._n_inputs()), any(n.startswith("slide_c") for n in names)
        return Space(fixed, root, level, "slide_effect" in names, context)

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
        variance, length, level, strength, *_ = tuning.CENTRE
        first = copy.copy(self)
        first.variance, first.lengthscale = variance, length * math.sqrt(self._n_inputs())
        first.mean = level * math.sqrt(1 + variance)
        first.coupling, first.kernel = min(self.coupling_, strength), "rbf"
        first.inducing, first.moments, first.solver = self.inducing_points_, "diagonal", "direct"
        first.optimize, first.calibrated, first.flags = (), False, False
        first.aim, first.learns_range = "equal odds", False
        first.slide_effect, first.slide_context, first.instance_labels = 0.0, 0.0, "ignore"
        return suspicion(first.fit(bags, labels).predict_instances(bags))

    # --- Every bag left out -------------------------------------------------------------------

    def leave_one_bag_out(self, bags, y=None) -> Float[np.ndarray, " B"]:
        """log p(y_b) of every training bag under the fit without it, from this one fit.

        `bags` (and y) are those the model was fitted on. Bag b is taken out by one Newton step of
        the problem without it; inducing points and settings stay. Where labels of its patches
        are known and used, log p(y_b | these labels): 0 with a positive one among them.
        """
        return self._leave_out(bags, y, patients=False)

    def leave_one_patient_out(self, bags, y=None) -> Float[np.ndarray, " B"]:
        """The same under the fit without any bag of its patient (`bags.groups`).

        Where one Newton step is short of the fit without a patient, the solver goes on from there.
        """
        return self._leave_out(bags, y, patients=True)

    @one_blas_thread()
    def _leave_out(self, bags, y, patients: bool) -> Float[np.ndarray, " B"]:
        with torch.no_grad():
            cohort, problem, w = self._fitted_problem(bags, y)
            direct, groups, score = self.solver == "direct", cohort.bags.groups, label_scores
            if not patients or groups is None:
                return cohort.leave_one_bag_out(problem, w, direct, score)
            return cohort.leave_one_group_out(problem, w, direct, groups, score)

    def _fitted_problem(
        self, bags, y
    ) -> tuple[WholeCohort, inference.Problem, Float[Tensor, " M"]]:
        """The training bags as the fit saw them, and w; refused where they are others."""
        bags = self._check_predictable(bags)
        labels, _ = training_labels(bags, y)
        device = resolve_device(self.device)
        gp, q = self._gp(device), self._posterior(device)
        cohort = WholeCohort(bags, device, labels)
        problem = self._problem(gp, cohort)
        if inference.relative(problem.R - q.R, q.R) > 1e-6:
            raise ValueError(
                "these are not the bags the model was fitted on: leaving one of them out of "
                "the fit has no meaning. Pass the training bags."
            )
        self._check_same_labels(problem, q.w)
        return cohort, problem, q.w

    def _left_out(
        self, cohort: TrainingCohort, labels: Int[np.ndarray, " B"], problem: inference.Problem,
        w: Float[Tensor, " M"],
    ) -> Float[np.ndarray, " B"] | None:  # fmt: skip
        """log p(y_b) without the bag, or its patient; None for patients over partitions."""
        direct, groups = self.solver == "direct", left_out_together(labels, cohort.whole.groups)
        if groups is None:
            return cohort.leave_one_bag_out(problem, w, direct)
        if isinstance(cohort, WholeCohort):
            return cohort.leave_one_group_out(problem, w, direct, groups)
        return None

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

    def _problem(self, gp: SparseGP, cohort: TrainingCohort) -> inference.Problem:
        plan = Plan(
            self._feature_map(), self.kernel_, self.variance_ or 1.0, self.lengthscale_ or 1.0,
            gp.inducing.cpu(), gp.L.cpu(), self.coupling_,
            self._storage_dtype(cohort.whole.n_instances, gp.n_weights),
            LIKELIHOODS[self.moments], self.store, self.slide_effect_,
            None if gp.context is None else gp.context.to("cpu"), self._is_taught(),
        )  # fmt: skip
        return cohort.problem(plan, self.mean_, gp.L.device)

    def _storage_dtype(self, N: int, M: int) -> torch.dtype:
        if self.dtype != "auto":
            return DTYPES[self.dtype]
        if 8 * N * M <= LARGE_H:
            return torch.float64
        logger.info("H is stored in float32, %.1f GB (dtype='float64' to double it)", 4e-9 * N * M)
        return torch.float32
