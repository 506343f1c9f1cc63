"""Inducing points on lesions: added after a first fit, and kept if bags left out gain by them."""

import dataclasses
import logging
import math
from functools import partial
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Int, Shaped

from gpmil.data.folds import left_out_together
from gpmil.files.persistence import CARD
from gpmil.inference import objective
from gpmil.inference.leave_groups import standard_error
from gpmil.models.checks import count
from gpmil.models.learning import TunedGP
from gpmil.models.saved import Arrays, Card
from gpmil.models.saved_checks import Damaged, Symbols
from gpmil.models.sparse import TrainingCohort
from gpmil.process.lesion_points import pivots
from gpmil.process.sparse_gp import Posterior

logger = logging.getLogger("gpmil")
SHARE = 0.2  # points added, as a share of those that k-means placed


class Fit(NamedTuple):
    """q(u), and log p(y_b) of every bag left out where it was computed."""

    q: Posterior
    left_out: Float[np.ndarray, " B"] | None


def rises(gain: Float[np.ndarray, " B"], patients: Shaped[np.ndarray, " B"] | None = None) -> bool:
    """Whether bags left out gain more than the standard error of what they gain.

    >>> rises(np.array([0.4, -0.1, 0.3])), rises(np.array([0.3, -0.2, 0.1]))
    (True, False)
    """
    return bool(gain.mean() > standard_error(gain, patients))


class PointsOnLesions(TunedGP):
    """A model whose inducing points may be placed in two steps: k-means, then lesions."""

    PLACEMENTS: ClassVar[tuple[str, ...]] = ("kmeans", "lesions")
    NUMBERS = TunedGP.NUMBERS | {"inducing_from_lesions_": partial(count, least=0)}
    # no setting of its own came with it; the slide context is of the same version
    LATER: ClassVar[dict[str, dict[str, Any]]] = TunedGP.LATER | {
        "slide_context": TunedGP.LATER["slide_context"] | {"inducing_from_lesions_": 0}
    }

    inducing_from_lesions_: int  # the last so many of inducing_points_; 0: none, or not kept

    def _fit_at_points(
        self, cohort: TrainingCohort, labels: Int[np.ndarray, " B"], device: torch.device
    ) -> Fit:
        """The fit at the inducing points and settings found, kept."""
        raise NotImplementedError

    def _add_points_on_lesions(
        self, first: Fit, cohort: TrainingCohort, labels: Int[np.ndarray, " B"],
        device: torch.device,
    ) -> Fit:  # fmt: skip
        """Fit with more points, once, and keep them if bags left out are predicted better."""
        points = self._points_on_lesions(first.q, cohort, device)
        if not len(points):
            logger.info("the inducing points explain every suspicious patch: none is added")
            return first
        kept = first
        if first.left_out is None:
            gain, patients = self._gain_on_a_sample(points, cohort, labels, device)
            if rises(gain, patients):
                kept = self._take_points(points, cohort, labels, device)
        else:
            before = {k: v for k, v in vars(self).items() if k.endswith("_")}
            kept = self._take_points(points, cohort, labels, device)
            gain = kept.left_out - first.left_out
            if not rises(gain, left_out_together(labels, cohort.whole.groups)):
                self.__dict__.update(before)
                kept = first
        logger.info(
            "%d inducing points on lesions change the leave-one-bag-out log likelihood by %.4f per "
            "bag: %s", len(points), gain.mean(), "not kept" if kept is first else "kept",
        )  # fmt: skip
        return kept

    def _restore(self, arrays: Arrays, card: Card, sizes: Symbols) -> None:
        super()._restore(arrays, card, sizes)
        if self.inducing_from_lesions_ > len(self.inducing_points_):
            raise Damaged(
                f"{CARD}: inducing_from_lesions_: expected at most {len(self.inducing_points_)}, "
                f"the number of inducing points, found {self.inducing_from_lesions_}"
            )

    def _take_points(
        self, points: Float[np.ndarray, "m D"], cohort: TrainingCohort,
        labels: Int[np.ndarray, " B"], device: torch.device,
    ) -> Fit:  # fmt: skip
        self.inducing_points_ = np.concatenate([self.inducing_points_, points])
        self.inducing_from_lesions_ = len(points)
        return self._fit_at_points(cohort, labels, device)

    def _points_on_lesions(
        self, q: Posterior, cohort: TrainingCohort, device: torch.device
    ) -> Float[np.ndarray, "m D"]:
        """Patches of positive bags by probability times unexplained variance."""
        found = cohort.suspects(q, self.mean_)
        found = type(found)(*(a.to(device) for a in found))
        wanted = math.ceil(SHARE * len(self.inducing_points_))
        chosen = found.x[pivots(self._gp(device), found, wanted)]
        return self._feature_map().inverse(chosen.cpu().numpy())

    def _gain_on_a_sample(
        self, points: Float[np.ndarray, "m D"], cohort: TrainingCohort,
        labels: Int[np.ndarray, " B"], device: torch.device,
    ) -> tuple[Float[np.ndarray, " b"], Shaped[np.ndarray, " b"] | None]:  # fmt: skip
        """What bags that tuning looks at gain by the points, left out, and their patients."""
        chosen, groups = self._learned_from(labels, cohort.whole.groups)
        without = self._tuning_cohort(cohort.some_bags(chosen), labels[chosen], device, groups)
        more = torch.cat([without.inducing, self._inputs(points, device)])
        before, after = (
            objective.left_out(one, self._settings())[0].numpy()
            for one in (without, dataclasses.replace(without, inducing=more))
        )
        return after - before, groups
