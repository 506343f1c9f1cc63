"""OrdinalMIL: slides with grades. A slide is as bad as its worst patch.

One process and cut points b_1 = 0 < b_2 < ... < b_K-1: a patch has the grade #{k : m_i > b_k}, a
slide the largest of its patches, P(Y <= k) = P(all m_i < b_k+1). Two grades are VGPMILPRI.
"""

import copy
import logging
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
import torch
from jaxtyping import Float, Int
from scipy.special import ndtr

from gpmil.data.bags import Bags
from gpmil.data.folds import left_out_together
from gpmil.decide import cumulative
from gpmil.decide.calibration import NEEDED as CALIBRATE
from gpmil.decide.grade_metrics import expected_kappa
from gpmil.fast.lanes import one_blas_thread
from gpmil.files.persistence import ARRAYS as FILE
from gpmil.inference import solvers as inference
from gpmil.inference.at_settings import Settings
from gpmil.inference.graded_folds import GradedFolds
from gpmil.models import graded_areas, learned_grades
from gpmil.models.base import (
    InstancePredictions,
    resolve_device,
)
from gpmil.models.checks import count, is_word, share
from gpmil.models.cross_fit import CrossFit, Marks
from gpmil.models.graded import GradedClassifier, differences, odds_above
from gpmil.models.graded_areas import GradeAreas
from gpmil.models.graded_instances import GradedInstances
from gpmil.models.saved import Arrays, Card
from gpmil.models.saved_checks import Array, Damaged, Symbols
from gpmil.models.several import with_counts
from gpmil.models.several_gp import SeveralGP
from gpmil.models.sparse import TrainingCohort
from gpmil.models.vgpmil_pr import VGPMILPRI
from gpmil.process.sparse_gp import SparseGP, joint

logger = logging.getLogger("gpmil")
MOST_AREA = 6000  # patches of a slide whose grades are drawn together
NEEDED = 3  # bags of a grade from which a cut point is learned


class GradedGP(GradedClassifier, SeveralGP):
    """A model of two to eight grades: how it is fitted, and what it says of bags."""

    ABOVE: ClassVar[str] = "above the lowest grade"
    ONLY: ClassVar[dict[str, Any]] = SeveralGP.ONLY | {
        "solver": "direct",
        "moments": "diagonal",
        "optimize": (),
        "aim": "equal odds",
    }
    PLACEMENTS: ClassVar[tuple[str, ...]] = ("kmeans",)
    ARRAYS: ClassVar[dict[str, Array]] = {
        **with_counts(VGPMILPRI.ARRAYS),
        "cut_points_": Array(("cuts",), "finite"),
        "calibration_": Array(("cuts", "columns"), "finite", optional=True),
        "expected_kappa_": Array((1,), "finite", optional=True),
    }

    cut_points_: Float[np.ndarray, " k"]  # b_1 = 0, b_2, ...
    calibration_: Float[np.ndarray, "k columns"] | None  # of P(Y >= k), see decide/cumulative.py
    expected_kappa_: Float[np.ndarray, " 1"] | None  # of calls that aim at it, out of fold
    cut_points: Any

    # --- Fit ----------------------------------------------------------------------------------

    def _check_classes(self, n_classes: int) -> None:
        self._check_cut_points(n_classes)

    def _find_settings(
        self, cohort: TrainingCohort, labels: Int[np.ndarray, " B"], device: torch.device
    ) -> None:
        """Every setting as a number, and cut points."""
        self.cut_points_ = np.zeros(1)
        if not is_word(self.cut_points, "auto"):
            self.cut_points_ = np.array(self.cut_points, dtype=np.float64)
        super()._find_settings(cohort, labels, device)
        alone = is_word(self.cut_points, "auto") and not self._learned_names()
        if alone and len(self.classes_) > 2:
            self._learn_grades(cohort, labels, device, [], None)

    def _learn(
        self, cohort: TrainingCohort, labels: Int[np.ndarray, " B"], device: torch.device
    ) -> None:
        """What is "auto" of the settings and cut points, from grades of bags left out."""
        names = self._learned_names()
        here = None
        if len(self.classes_) == 2 or "kernel" in names or is_word(self.lengthscale, "ard"):
            super()._learn(cohort, labels, device)
            # a kernel, and a weight per column, are those of "above the lowest grade"
            here = self._settings()
            gone = {"kernel", *(() if self.coupling_ else ("coupling",))}
            gone |= set() if self.relevance_ is None else {"lengthscale"}
            names = [name for name in names if name not in gone]
        if len(self.classes_) > 2:
            self._learn_grades(cohort, labels, device, names, here)

    def _learn_grades(
        self, cohort: TrainingCohort, labels: Int[np.ndarray, " B"], device: torch.device,
        names: list[str], from_here: Settings | None,
    ) -> None:  # fmt: skip
        """The settings that are named, and cut points where they are "auto"."""
        free = is_word(self.cut_points, "auto")
        if free:
            self._check_enough()
        most = learned_grades.MOST_BAGS if names else learned_grades.MOST_FOR_CUTS
        chosen = learned_grades.sample(self._codes, self._seed(), most)
        bags, labels, patients = cohort.some_bags(chosen), labels[chosen], cohort.whole.groups
        groups = left_out_together(labels, None if patients is None else patients[chosen])
        made = self._tuning_cohort(bags, labels, device, groups)
        folds = GradedFolds(made, self._codes[chosen])
        search = learned_grades.Search(
            folds, len(self.classes_), int(self.tuning_budget), None if free else self.cut_points_
        )
        space = self._space(cohort.whole, names)
        found = learned_grades.learn(search, space, from_here if names else self._settings())
        self._keep_settings(found.settings)
        self.cut_points_, self.loo_log_likelihood_ = found.cuts, found.score
        if names:
            self.tuning_trace_ = [*(self.tuning_trace_ or []), *found.trace]

    def _keep_settings(self, found: Settings) -> None:
        if self.variance_ is not None:
            self.variance_, self.lengthscale_ = found[:2]
        self.mean_, self.coupling_, self.slide_effect_ = found[2:5]
        if self._has_context():
            self.slide_context_, self.slide_context_lengthscale_ = found[5:]

    def _check_enough(self) -> None:
        few = self.class_counts_[self.class_counts_ > 0].min()
        if few < NEEDED:
            raise ValueError(
                f"learning cut points needs {NEEDED} bags of every grade, "
                f"{NEEDED * len(self.classes_)} in all; found "
                f"{dict(zip(self.classes_.tolist(), self.class_counts_.tolist()))}. "
                "Join grades, add bags, or give cut_points as numbers."
            )

    def _problem(self, gp: SparseGP, cohort: TrainingCohort) -> inference.Problem:
        found = super()._problem(gp, cohort)
        if len(self.cut_points_) == 1:
            return found
        return cohort.take_grades(found, self._codes, self.cut_points_)

    def _fit_to(self, cohort: TrainingCohort, y: Any, device: torch.device) -> None:
        self.calibration_, self.expected_kappa_ = None, None
        super()._fit_to(cohort, y, device)

    def _left_out(
        self, cohort: TrainingCohort, labels: Int[np.ndarray, " B"], problem: inference.Problem,
        w: Float[torch.Tensor, " M"],
    ) -> Float[np.ndarray, " B"] | None:  # fmt: skip
        if len(self.cut_points_) == 1:
            return super()._left_out(cohort, labels, problem, w)
        return cohort.leave_one_bag_out(problem, w, direct=True)

    def _keep_operating_point(
        self, left_out: Any, cross_fit: CrossFit | None, labels: Any, groups: Any
    ) -> None:
        """What is left out is a grade: it says nothing of a threshold on P(above the lowest)."""
        known = left_out if len(self.cut_points_) == 1 else None
        super()._keep_operating_point(known, cross_fit, labels, groups)

    def _first_look(self, bags: Bags, labels: np.ndarray) -> Float[np.ndarray, " N"]:
        return super(GradedGP, self._of_two_grades())._first_look(bags, labels)

    def _of_two_grades(self) -> "GradedGP":
        """The same for labels 0 and 1: whether a bag is above the lowest grade."""
        binary = copy.copy(self)
        binary.grades, binary.cut_points = None, (0.0,)
        binary.classes_, binary.cut_points_ = np.arange(2), np.zeros(1)
        return binary

    def with_settings_fixed(self) -> VGPMILPRI:
        """A new model of grades as numbers 0, 1, ..., at settings and cut points learned here."""
        codes = list(range(len(self.classes_)))
        fixed = {"grades": codes, "cut_points": tuple(self.cut_points_.tolist()), "cost": "mode"}
        return super().with_settings_fixed().set_params(**fixed)

    def _cross_fitted(self, bags: Bags, labels: np.ndarray, fold: np.ndarray) -> CrossFit:
        """Models of grades without each fold; what they say of it calibrates every threshold."""
        if not self.calibrated:  # marks are about the lowest grade alone
            return CrossFit.fit(self._of_two_grades(), bags, labels, fold, False)
        found = CrossFit.fit(self, bags, labels, fold, True, y=self._codes)
        odds, above = np.empty((2, len(bags), len(self.cut_points_)))
        for k, model in enumerate(found.models):
            log_p, _, above[fold == k] = model._cut(bags[fold == k])
            odds[fold == k] = odds_above(log_p)
        self.calibration_ = cumulative.chosen(odds, above, self._codes, fold, bags.groups)
        p = differences(cumulative.calibrated(odds, above, self.calibration_))
        shares = self.class_counts_ / self.class_counts_.sum()
        self.expected_kappa_ = np.array([expected_kappa(p, shares)])
        return found

    def _planned_folds(self, bags: Bags, labels: np.ndarray) -> np.ndarray | None:
        fold = super()._planned_folds(bags, labels)
        if fold is None or not self.calibrated:
            return fold
        # bags above every threshold, and of the highest grade outside every fold
        highest = self._codes == len(self.classes_) - 1
        outside = min(highest[fold != k].sum() for k in range(int(fold.max()) + 1))
        if highest.sum() < CALIBRATE or not outside:
            raise ValueError(
                f"calibrated=True needs {CALIBRATE} bags of the highest grade, not all of one "
                f"fold; found {self.class_counts_[-1]}. Add bags, join grades, or fit with "
                "calibrated=False."
            )
        return fold

    # --- Every bag left out -------------------------------------------------------------------

    def leave_one_bag_out(self, bags, y=None) -> Float[np.ndarray, " B"]:
        """log P(Y_b = its grade) of every training bag under the fit without it, from this fit.

        `bags` and y are those the model was fitted on. Bag b is taken out by one Newton step of
        the problem without it; inducing points, settings and cut points stay.
        """
        return super().leave_one_bag_out(bags, y)

    def _leave_out(self, bags, y, patients: bool) -> Float[np.ndarray, " B"]:
        if patients and len(self.cut_points_) > 1:
            raise ValueError("grades are left out bag by bag: use leave_one_bag_out.")
        return super()._leave_out(bags, y, patients)

    # --- Predictions --------------------------------------------------------------------------

    def log_proba_at_most(self, bags) -> tuple[Float[np.ndarray, "B k"], Float[np.ndarray, "B k"]]:
        """log P(Y <= 0), ..., log P(Y <= K - 2) of each bag, and estimates of their errors."""
        log_p, error, _ = self._cut(bags)
        return log_p, error

    @one_blas_thread()
    def _cut(self, bags) -> tuple[Float[np.ndarray, "B k"], ...]:
        """The same, and the number of patches expected above every cut point."""
        bags, device = self._check_predictable(bags), resolve_device(self.device)
        with torch.no_grad():
            predictor = self._predictor(device)
        # P(all m < b) is the orthant at means less b
        moved = [replace(predictor, c=predictor.c - float(cut)) for cut in self.cut_points_]
        log_p, error, mean, std = zip(*(self._slides(bags, device, one) for one in moved))
        # means are less the cut points: sum over patches of P(m_i > b_k)
        patches = ndtr(np.stack(mean, 1) / np.stack(std, 1))
        above = np.add.reduceat(patches, bags.offsets[:-1], axis=0)
        # each has its own small error, and may not fall below the one before for that
        return np.maximum.accumulate(np.stack(log_p, 1), axis=1), np.stack(error, 1), above

    def predict_proba(self, bags) -> Float[np.ndarray, "B K"]:
        """P(Y = k) of each bag and grade; never exactly 0 or 1 by rounding."""
        log_p, _, above = self._cut(bags)
        if self.calibration_ is not None and self.cross_fit_ is not None:
            log_p = cumulative.calibrated(odds_above(log_p), above, self.calibration_)
        return differences(log_p)

    @one_blas_thread()
    def predict_areas(self, bags, *, level: float = 0.9, n_draws: int = 400) -> GradeAreas:
        """Of each bag the share of its patches of every grade, expected, with an interval.

        From draws of all patches of a slide together (seeded), given what the model has learned,
        not the slide's label. Patterns by area are a rule on top: `GradeAreas.patterns`, `isup`.
        """
        bags, device = self._check_predictable(bags), resolve_device(self.device)
        share("level", level)
        count("n_draws", n_draws, least=20)
        graded_areas.refuse_large(bags.sizes, MOST_AREA)
        every, strength = np.ones(len(bags), dtype=bool), self._predict_strength(bags)
        cuts = torch.from_numpy(self.cut_points_).to(device)
        found: list[Any] = [None] * len(bags)
        with torch.no_grad():
            predictor = self._predictor(device)
            for part, x in self._dense(bags, every, strength, device):
                mu, S = joint(predictor, part, x)
                for b, own_mu, own_S, mask in zip(part.bags, mu, S, part.mask):
                    noise = graded_areas.standard_normal(int(mask.sum()), int(n_draws), int(b))
                    own = own_mu[mask], own_S[mask][:, mask], cuts, torch.from_numpy(noise).to(mu)
                    found[b] = graded_areas.drawn_shares(*own).cpu().numpy()
        parts = graded_areas.summary(found, level)
        return GradeAreas(*parts, level, self.classes_, bags)

    def _marked(self, found: InstancePredictions, marks: Marks) -> InstancePredictions:
        known = GradedInstances.cut(found, self.cut_points_, self.classes_)
        return super()._marked(known, marks)

    # --- Settings, and a folder ---------------------------------------------------------------

    def _check_settings(self) -> None:
        super()._check_settings()
        self._check_grade_settings()
        if not is_word(self.cut_points, "auto"):
            self._check_cut_points(None)

    def _check_cut_points(self, n_grades: int | None) -> None:
        """Rising numbers from 0 on, one less than there are grades."""
        if is_word(self.cut_points, "auto"):
            return
        try:
            cuts = np.array(self.cut_points, dtype=np.float64)
        except (TypeError, ValueError):
            cuts = np.array(np.nan)
        good = cuts.ndim == 1 and len(cuts) > 0 and np.isfinite(cuts).all()
        if not good or cuts[0] != 0 or (np.diff(cuts) <= 0).any():
            raise ValueError(
                "cut_points must be 'auto' or rising numbers, the first one 0, as in [0, 1.5, 3]; "
                f"got {self.cut_points!r:.80}."
            )
        if n_grades is not None and len(cuts) != n_grades - 1:
            raise ValueError(
                f"{n_grades} grades need {n_grades - 1} cut points, got {len(cuts)}: "
                f"{self.cut_points!r:.80}. Name all grades with grades=, or use 'auto'."
            )

    def _restore(self, arrays: Arrays, card: Card, sizes: Symbols) -> None:
        cuts, counts = self.cut_points_, self.class_counts_
        if not len(cuts) or cuts[0] != 0 or (np.diff(cuts) <= 0).any():
            raise Damaged(f"{FILE}: cut_points_: expected rising numbers from 0 on, found {cuts}")
        if len(counts) != len(cuts) + 1:
            raise Damaged(f"{FILE}: class_counts_: expected {len(cuts) + 1} counts")
        super()._restore(arrays, card, sizes)
        there = [x is not None for x in (self.calibration_, self.expected_kappa_)]
        if there != [bool(self.calibrated)] * 2:
            raise Damaged(f"{FILE}: calibration_, expected_kappa_: expected where calibrated")
        columns = 2 if self.calibration_ is None else self.calibration_.shape[1]
        if columns not in (2, len(cuts) + 2):  # by the odds alone, or by area
            raise Damaged(f"{FILE}: calibration_: expected 2 or {len(cuts) + 2} columns")
        if self.expected_kappa_ is not None and not 0 < self.expected_kappa_[0] <= 1:
            raise Damaged(f"{FILE}: expected_kappa_: expected a number in (0, 1]")


@dataclass(kw_only=True, eq=False, repr=False)
class OrdinalMIL(GradedGP):
    """Gaussian-process MIL for grades: a slide has the grade of its worst patch.

    Parameters
    ----------
    grades : list of names, the lowest first, or None
        The grades, two to eight; None: the labels are 0, 1, ..., K - 1. The lowest one is the
        negative class of `predict_instances`, `log_proba_negative` and p-values.
    cut_points : "auto" or K - 1 rising numbers, the first 0
        Where one grade of a patch ends and the next begins, on the scale of m. "auto": learned from
        grades of bags left out, together with the settings that are "auto".
    cost : "quadratic", "kappa" or "mode"
        What `predict` calls: the grade of least expected quadratic cost; that for which quadratic
        weighted kappa is expected to be largest, which spreads calls as far as grades are (needs
        calibrated=True); or the likeliest one.
    **others
        As `VGPMILPRI`; only solver="direct" and moments="diagonal", and neither labels of patches,
        inducing="lesions" nor `optimize`. `calibrated` is about every P(Y >= k).

    Examples
    --------
    >>> import numpy as np, gpmil
    >>> rng = np.random.default_rng(0)
    >>> y = np.arange(24) % 3
    >>> x = [rng.normal(size=(6, 3)) + 3 * k * (np.arange(6) < 2)[:, None] for k in y]
    >>> model = gpmil.OrdinalMIL(
    ...     variance=20, lengthscale=4, mean=-3, cut_points=[0, 3], n_inducing=20, random_state=0
    ... ).fit(gpmil.Bags.from_arrays(x), y)
    >>> model.predict_proba(gpmil.Bags.from_arrays(x)).shape
    (24, 3)
    """

    grades: Any = None
    cut_points: Any = "auto"
    cost: Any = "quadratic"
