"""A model that is taught: known labels of patches in its fit, and new ones taken in by `update`.

Labels of patches in positive bags enter the likelihood (moments/taught.py), and these patches are
inducing points as well: what was pointed at must not be lost between k-means centres.

Labels say what tumour is, and with that also what else is not, though it may tell slides apart. So
q(u) of the fit without them is kept, and a slide's probability is the average of the two.
"""

import copy
import logging
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar, NamedTuple, TypeVar

import numpy as np
import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor

from gpmil.data.bags import Bags
from gpmil.distributed import WholeCohort
from gpmil.fast.lanes import one_blas_thread
from gpmil.files.persistence import ARRAYS as FILE
from gpmil.files.persistence import CARD
from gpmil.inference import nearby
from gpmil.inference import solvers as inference
from gpmil.inference.extended import Kept
from gpmil.inference.pieces import Chunk
from gpmil.models.base import progress_shown, resolve_device, training_labels
from gpmil.models.checks import count, flag, is_word, one_of
from gpmil.models.cross_fit import CrossFit
from gpmil.models.on_lesions import PointsOnLesions
from gpmil.models.saved import Arrays, Card
from gpmil.models.saved_checks import Array, Damaged, Symbols
from gpmil.models.sparse import TrainingCohort
from gpmil.moments.taught import patches
from gpmil.process.sparse_gp import Posterior, SparseGP

logger = logging.getLogger("gpmil")
Model = TypeVar("Model", bound="TeachableGP")
WORDS = ("ignore", "use")
UNTAUGHT = ("untaught_mean_", "untaught_precision_", "untaught_level_")
UNTAUGHT_WIDE = ("untaught_interval_mean_", "untaught_interval_precision_")
MANY_COUPLED, MOST_COUPLED = 1000, 5000  # patches: .07 s each were seen, on one core
MOST_POINTS = 500  # labelled patches that become inducing points


class Lesson(NamedTuple):
    """What an update leaves for the next one."""

    curvature: Float[Tensor, "M M"] | None = None
    known: Int[np.ndarray, " N"] | None = None  # labels of patches
    kept: Kept | None = None
    features: Shaped[np.ndarray, "N D"] | None = None  # those of `kept`

    def kept_of(self, bags: Bags) -> Kept | None:
        """W and H, if they are of these features: with_instance_labels hands them on."""
        one, other = self.features, bags.features
        if one is None or one.shape != other.shape or one.dtype != other.dtype:
            return None
        same = one.__array_interface__["data"] == other.__array_interface__["data"]
        return self.kept if same else None


class TeachableGP(PointsOnLesions):
    """A model whose fit may know the labels of some patches."""

    ARRAYS = PointsOnLesions.ARRAYS | {
        "untaught_mean_": Array(("U",), "finite", optional=True),
        "untaught_precision_": Array(("U", "U"), "precision", optional=True),
        "untaught_level_": Array((1,), "finite", optional=True),
        "untaught_interval_mean_": Array(("U",), "finite", optional=True),
        "untaught_interval_precision_": Array(("U", "U"), "precision", optional=True),
    }
    NUMBERS = PointsOnLesions.NUMBERS | {"inducing_from_labels_": partial(count, least=0)}
    LATER: ClassVar[dict[str, dict[str, Any]]] = PointsOnLesions.LATER | {
        "instance_labels": {"inducing_from_labels_": 0}
    }

    # so many of inducing_points_, before those on lesions
    inducing_from_labels_: int
    # whitened q(u) and the level of the context without labels; None where none were used
    untaught_mean_: Float[np.ndarray, " U"] | None = None
    untaught_precision_: Float[np.ndarray, "U U"] | None = None
    untaught_level_: Float[np.ndarray, " 1"] | None = None
    # the same for intervals; None also in models of earlier versions
    untaught_interval_mean_: Float[np.ndarray, " U"] | None = None
    untaught_interval_precision_: Float[np.ndarray, "U U"] | None = None
    instance_labels: Any
    _lesson: Lesson = Lesson()  # of the last update, neither saved nor copied

    def _check_teaching(self) -> None:
        one_of("instance_labels", self.instance_labels, WORDS)
        if not self._is_taught():
            return
        if self.solver == "sweeps":
            raise ValueError(
                "instance_labels='use' is not for solver='sweeps': the paper's algorithm knows "
                "labels of bags alone. Use solver='direct'."
            )
        if self.optimize:
            raise ValueError(
                f"optimize={self.optimize!r} knows no labels of patches, got "
                "instance_labels='use'. Leave one of the two out."
            )

    def _check_time(self, cohort: TrainingCohort, has_effect: bool) -> None:
        """Coupled moments, a slide effect and labels together: the slowest of all fits."""
        n = cohort.whole.n_instances
        if not (self._is_taught() and self.moments == "coupled" and has_effect):
            return
        if n > MOST_COUPLED:
            raise ValueError(
                "moments='coupled' with a slide effect and labelled patches takes some minutes for "
                f"every {MOST_COUPLED:,} patches, and these are {n:,}: it is refused above that. "
                "Use moments='diagonal' (seconds), or slide_effect=0."
            )
        if n > MANY_COUPLED:
            logger.warning(
                "moments='coupled' with a slide effect and labelled patches may take minutes for "
                "%d patches; moments='diagonal' takes seconds.", n,
            )  # fmt: skip

    def _is_taught(self) -> bool:
        return bool(self.instance_labels == "use")

    # --- Inducing points ----------------------------------------------------------------------

    def _n_lasting(self) -> int:
        return len(self.inducing_points_) - self.inducing_from_labels_ - self.inducing_from_lesions_

    def _place_inducing(
        self, cohort: TrainingCohort, labels: Int[np.ndarray, " B"], device: torch.device
    ) -> Float[np.ndarray, "M D"]:
        """Those of the model without labels, and the labelled patches."""
        self.inducing_from_labels_, self._lesson = 0, Lesson()
        effect = self.slide_effect
        self._check_time(cohort, is_word(effect, "auto") or bool(effect))
        # what is wrong with labels is said before the work
        new = cohort.labelled_patches() if self._is_taught() else None
        points = super()._place_inducing(cohort, labels, device)
        return points if new is None else self._with_labelled(points, new)

    def _with_labelled(
        self, points: Float[np.ndarray, "M D"], new: Float[np.ndarray, "k D"]
    ) -> Float[np.ndarray, "M2 D"]:
        """Labelled patches that are no inducing points yet, in the order of the cohort."""
        if len(new) > MOST_POINTS:
            logger.info(
                "%d patches are labelled: %d of them become inducing points", len(new), MOST_POINTS
            )
            new = new[np.linspace(0, len(new) - 1, MOST_POINTS).round().astype(int)]
        _, first = np.unique(np.concatenate([points, new]), axis=0, return_index=True)
        new = new[np.sort(first[first >= len(points)]) - len(points)]
        self.inducing_from_labels_ = len(new)
        return np.concatenate([points, new])

    def _restore(self, arrays: Arrays, card: Card, sizes: Symbols) -> None:
        super()._restore(arrays, card, sizes)
        most = len(self.inducing_points_) - self.inducing_from_lesions_
        if self.inducing_from_labels_ > most:
            raise Damaged(
                f"{CARD}: inducing_from_labels_: expected at most {most}, found "
                f"{self.inducing_from_labels_}"
            )
        there = [getattr(self, name) is not None for name in UNTAUGHT]
        if any(there) and not (all(there) and self._is_taught()):
            raise Damaged(f"{FILE}: {UNTAUGHT[0]}: expected with a taught model, and the others")
        wide = [getattr(self, name) is not None for name in UNTAUGHT_WIDE]
        if any(wide) and not all(wide + there):
            raise Damaged(f"{FILE}: {UNTAUGHT_WIDE[0]}: expected with {UNTAUGHT[0]}, both or none")
        wanted = len(self.whitened_mean_) - self.inducing_from_labels_
        if self.untaught_mean_ is not None and len(self.untaught_mean_) != wanted:
            raise Damaged(
                f"{FILE}: {UNTAUGHT[0]}: expected {wanted} numbers, one for every weight that "
                f"belongs to no label, found {len(self.untaught_mean_)}"
            )

    # --- The model without labels -------------------------------------------------------------

    def _voices(self) -> list["TeachableGP"]:
        known = self.untaught_mean_
        if known is None or np.array_equal(known, self.whitened_mean_):
            return [self]
        assert self.untaught_level_ is not None and self.untaught_precision_ is not None
        plain = self._at_other_points()
        plain.whitened_mean_, plain.whitened_precision_ = known, self.untaught_precision_
        plain.interval_mean_ = self.untaught_interval_mean_
        plain.interval_precision_ = self.untaught_interval_precision_
        plain.slide_context_level_ = float(self.untaught_level_[0])
        return [self, plain]

    def _at_other_points(self: Model) -> Model:
        """A copy that knows no labels, nor their inducing points."""
        plain, points = copy.copy(self), self.inducing_points_
        last = len(points) - self.inducing_from_lesions_
        first = last - self.inducing_from_labels_
        plain.inducing_points_ = np.concatenate([points[:first], points[last:]])
        plain.instance_labels, plain.inducing_from_labels_ = "ignore", 0
        plain.__dict__.update(dict.fromkeys(UNTAUGHT + UNTAUGHT_WIDE))
        return plain

    def _keep_untaught(self, of: "TeachableGP") -> None:
        self.untaught_mean_, self.untaught_precision_ = of.whitened_mean_, of.whitened_precision_
        self.untaught_interval_mean_ = of.interval_mean_
        self.untaught_interval_precision_ = of.interval_precision_
        self.untaught_level_ = np.array([of.slide_context_level_])

    def _fit_untaught(self, cohort: TrainingCohort, device: torch.device) -> None:
        """The same fit without labels, after that with them; where there are none, it is that."""
        self.__dict__.update(dict.fromkeys(UNTAUGHT + UNTAUGHT_WIDE))
        if not self._is_taught():
            return
        plain = self._at_other_points()
        if len(cohort.labelled_patches()):
            gp = plain._gp(device)
            problem = plain._problem(gp, cohort)
            plain._keep_level_of(cohort, gp, plain._kept(gp, problem, plain._solve(problem)))
        self._keep_untaught(plain)

    def _keep_level_of(self, cohort: TrainingCohort, gp: SparseGP, q: Posterior) -> None:
        if gp.context is not None:
            means = cohort.slide_means(self._feature_map()).to(gp.L.device)
            self._keep_level(gp, q, gp.context.frame(means))

    # --- New labels ---------------------------------------------------------------------------

    @one_blas_thread()
    def update(self: Model, bags, y=None, *, cross_fit=True) -> Model:
        """Take in the labels of patches as they are now in `bags.instance_labels`; returns self.

        `bags` (and y) are those of the fit, with more labels, other ones or fewer. The result is
        the fit to them at the settings, the way of the features and the other inducing points of
        this model, from where it stands: the first labels cost some steps, the next ones fewer.
        A model fitted with instance_labels="ignore" is taught from now on. Probabilities of bags
        are the average of those with and without the labels.

        The models behind `calibrated` and `flags` are fitted again, too, which takes as long as
        `n_folds` fits at given settings; cross_fit=False leaves them as they are, for a quick look:
        calibration and p-values are then those of the model before.
        """
        flag("cross_fit", cross_fit)
        bags = self._check_predictable(bags)
        fresh = copy.copy(self)  # an update that fails leaves this model as it was
        fresh._lesson = self._lesson
        if not self._is_taught():
            fresh._keep_untaught(self)
        with torch.no_grad(), progress_shown(bool(self.verbose)):
            fresh.instance_labels = "use"
            fresh._check_teaching()
            labels, _ = training_labels(bags, y)
            fresh._check_same_cohort(bags, labels)
            fresh._update(bags, labels, resolve_device(self.device))
            if fresh.cross_fit_ is not None and cross_fit:
                fold, calibrated = fresh.cross_fit_.fold, bool(self.calibrated)
                fresh.cross_fit_ = CrossFit.fit(fresh, bags, labels, fold, calibrated)
        self.__dict__.update(fresh.__dict__)
        return self

    def _check_same_cohort(self, bags: Bags, labels: Int[np.ndarray, " B"]) -> None:
        found = {"bags": len(bags), "positive": int(labels.sum()), "instances": bags.n_instances}
        known = {k: self.cohort_[k] for k in found}
        if found != known:
            raise ValueError(
                "update takes the bags of the fit with new labels of patches; the fit had "
                f"{known}, these are {found}. Fit a new model to other bags."
            )

    def _update(self, bags: Bags, labels: Int[np.ndarray, " B"], device: torch.device) -> None:
        cohort, before = WholeCohort(bags, device, labels), self._gp(device)
        self._check_time(cohort, self.slide_effect_ > 0)
        w = torch.from_numpy(self.whitened_mean_).to(device)
        self.inducing_points_ = self._points_with(cohort.labelled_patches())
        gp = self._gp(device)
        cohort.keep(self._lesson.kept_of(bags))
        problem = self._problem(gp, cohort)
        T = moved(before, gp)
        if self.solver == "direct":
            found = self._solve_near(problem, T, T @ w, bags.instance_labels)
            self._lesson = self._lesson._replace(kept=cohort.kept, features=bags.features)
        else:
            found = self._solve(problem)
        self._keep_level_of(cohort, gp, self._kept(gp, problem, found))
        if self.untaught_mean_ is None:  # a taught model of an earlier version
            self._fit_untaught(WholeCohort(bags, device, labels), device)
        self.loo_log_likelihood_ = None  # that of the fit before

    def _solve_near(
        self, problem: inference.Problem, T: Float[Tensor, "M2 M"], w: Float[Tensor, " M2"],
        known: Int[np.ndarray, " N"],
    ) -> inference.Solution:  # fmt: skip
        """The optimum from w, with the Hessian of the last update."""
        J = self._near_curvature(problem, T, w, known)
        tol = float(self.tol)
        found = inference.said(nearby.maximum(problem, int(self.max_iter), tol, w, J), tol)
        self._lesson = Lesson(found.curvature, known)
        return found

    def _near_curvature(
        self, problem: inference.Problem, T: Float[Tensor, "M2 M"], w: Float[Tensor, " M2"],
        known: Int[np.ndarray, " N"],
    ) -> Float[Tensor, "M2 M2"]:  # fmt: skip
        """The Hessian at w, or that of the last update with what newly labelled bags change.

        In the new w it is T J T' + I - T T': where the earlier points say nothing, the prior.
        """
        J, before = self._lesson[:2]
        in_memory = [piece for piece in problem.chunks if isinstance(piece, Chunk)]
        if J is None or before is None or len(in_memory) < len(problem.chunks):
            return inference.collapsed_bound(problem, w)[2]
        earlier = torch.tensor(before, device=T.device)
        new = torch.tensor(known, device=T.device) != earlier
        eye = torch.eye(len(T)).to(T)
        out = T @ J.to(T) @ T.mT + eye - T @ T.mT
        for piece in in_memory:
            group = piece.group
            changed = torch.zeros_like(group.positive)
            changed[group.row[new[group.rows]]] = True
            if bool(changed.any()):
                some, rows = group.some(changed)
                told = replace(some, known=earlier[group.rows][rows])
                H, c = piece.H[rows], problem.c
                now, then = (Chunk(H, patches(g)).bound(w, c)[2] for g in (some, told))
                out = out + now - then
        return (out + out.mT) / 2

    def __getstate__(self) -> dict[str, Any]:
        """A copy for another process begins its lessons anew."""
        state = super().__getstate__()
        return {name: value for name, value in state.items() if name != "_lesson"}

    def _points_with(self, labelled: Float[np.ndarray, "k D"]) -> Float[np.ndarray, "M D"]:
        """The other inducing points with those of the labels as they are now."""
        points, lesions = self.inducing_points_, self.inducing_from_lesions_
        last = len(points) - lesions
        first = last - self.inducing_from_labels_
        return np.concatenate([self._with_labelled(points[:first], labelled), points[last:]])

    def _solve(self, problem: inference.Problem) -> inference.Solution:
        raise NotImplementedError

    def _kept(
        self, gp: SparseGP, problem: inference.Problem, solution: inference.Solution
    ) -> Posterior:
        """What was found as fitted attributes."""
        raise NotImplementedError

    # --- Labels left out ----------------------------------------------------------------------

    @one_blas_thread()
    def leave_one_label_out(self, bags, y=None) -> Float[np.ndarray, " N"]:
        """log p of every known label of a patch, given all that is known but this label.

        `bags` (and y) are those the model was fitted on with instance_labels="use". The bag is
        taken out of the fit as in `leave_one_bag_out`, then its label and its other labels count
        again; inducing points stay. nan where no label is known; 0 in negative bags.
        """
        if not self._is_taught():
            raise ValueError(
                "the model knows no labels of patches: fit it with instance_labels='use', or call "
                "update(bags) with labelled patches."
            )
        with torch.no_grad():
            cohort, problem, w = self._fitted_problem(bags, y)
            return cohort.leave_one_label_out(problem, w, self.solver == "direct")


def moved(before: SparseGP, now: SparseGP) -> Float[Tensor, "M2 M"]:
    """T, with w' = T w at other inducing points: what the process at the earlier ones says there.

    u' = K_z'z Kzz^-1 u = K_z'z L^-T w and w' = L'^-1 u'; entries of the slide context stay.
    """
    T = torch.linalg.solve_triangular(now.L, before.whiten(now.inducing), upper=False)
    more = before.n_weights - len(before.L)
    return torch.block_diag(T, torch.eye(more).to(T)) if more else T
