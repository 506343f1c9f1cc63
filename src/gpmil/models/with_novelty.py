"""Novelty: what a model keeps of its training cohort, to say how unlike it other slides are."""

import logging
from typing import Any

import numpy as np
import torch
from jaxtyping import Float

from gpmil.data.bags import Bags
from gpmil.data.rows import batches
from gpmil.fast.lanes import one_blas_thread
from gpmil.files.persistence import ARRAYS as FILE
from gpmil.models import saved_checks
from gpmil.models.base import resolve_device
from gpmil.models.saved_checks import Array, Damaged
from gpmil.models.saved_gp import SavedGP
from gpmil.models.sparse import TrainingCohort
from gpmil.process.novelty import LEVELS, MOST_PATCHES, MOST_SLIDES, Seen, enough, evenly

logger = logging.getLogger("gpmil")
SEEN = {
    "novelty_precision_": "R",
    "novelty_mean_": "mean",
    "novelty_slides_": "slides",
    "novelty_spreads_": "spreads",
    "novelty_patches_": "patches",
    "novelty_scores_": "scores",
    "novelty_count_": "count",
}
UNKNOWN = (
    "novelty is not known: the model was fitted by an earlier gpmil, or to fewer than 10 slides (3 "
    "patients). Far slides are not told from others."
)


class NovelGP(SavedGP):
    """A Gaussian-process model that knows what it has seen."""

    ARRAYS = SavedGP.ARRAYS | {
        "novelty_precision_": Array(("K", "K"), "precision", optional=True),
        "novelty_mean_": Array(("K",), "finite", optional=True),
        "novelty_slides_": Array(("S", "K"), "finite", optional=True),
        "novelty_spreads_": Array(("S",), "finite", optional=True),
        "novelty_patches_": Array((len(LEVELS),), "finite", optional=True),
        "novelty_scores_": Array(("S", 2), "positive", optional=True),
        "novelty_count_": Array((1,), "positive", optional=True),
    }
    learns_range = True
    """Whether fit keeps what novelty and intervals are made of; set it before. It is not saved."""

    novelty_precision_: np.ndarray | None  # None: novelty is not known, as are those below
    novelty_mean_: np.ndarray | None
    novelty_slides_: np.ndarray | None
    novelty_spreads_: np.ndarray | None
    novelty_patches_: np.ndarray | None
    novelty_scores_: np.ndarray | None
    novelty_count_: np.ndarray | None

    @one_blas_thread()
    def predict_novelty(self, bags) -> Float[np.ndarray, " B"]:
        """How unlike the training slides each bag is; above 1 it is beyond their range.

        The range is that of the training slides, each judged without its patient, less the odd
        ones among them (process/novelty.py). Nan where it is not known. What the model says of a
        slide beyond is a guess, and `refer_rule` accepts none of them.
        """
        return self._novelty(self._check_predictable(bags))[1]

    def _learn_range(self, cohort: TrainingCohort, device: torch.device) -> None:
        """Keep what was seen, here or in partitions, which send sums."""
        n, groups, seen = len(cohort.whole), cohort.whole.groups, None
        chosen = evenly(n, MOST_SLIDES)
        patient = np.asarray(np.arange(n) if groups is None else groups)[chosen]
        patient = np.unique(patient, return_inverse=True)[1]
        if self.learns_range and enough(patient):
            gp = self._gp(device).first(self._n_lasting())
            seen = cohort.seen(chosen, MOST_PATCHES, self._feature_map(), gp, patient)
        for name, part in SEEN.items():
            value = getattr(seen, part, None)
            setattr(self, name, value.cpu().numpy() if isinstance(value, torch.Tensor) else value)

    def _n_lasting(self) -> int:
        """The first so many inducing points, which stay when labels of patches come and go."""
        return len(self.inducing_points_)

    def _novelty(
        self, bags: Bags
    ) -> tuple[Float[np.ndarray, " N"] | None, Float[np.ndarray, " B"]]:
        """Of patches (None where it is not known) and of slides."""
        seen = self._seen(device := resolve_device(self.device))
        if seen is None:
            self._say_once([UNKNOWN] if self.learns_range else [])
            return None, np.full(len(bags), np.nan)
        patches, slides = np.empty(bags.n_instances), np.empty(len(bags))
        with torch.no_grad():
            gp = self._gp(device).first(len(seen.mean))
            for some in batches(bags.sizes):
                own = slice(bags.offsets[some[0]], bags.offsets[some[-1] + 1])
                x = self._inputs(bags.features[own], device)
                K, before = gp.kernel(x, gp.inducing), gp.kernel.diagonal(x)
                patches[own], slides[some] = seen.of(gp, K, before, bags.sizes[some])
        return patches, slides

    def _seen(self, device: torch.device) -> Seen | None:
        kept: dict[str, Any] = {part: getattr(self, name) for name, part in SEEN.items()}
        if kept["R"] is None:
            return None
        names = ("R", "mean", "slides", "spreads")
        return Seen(**(kept | {name: torch.from_numpy(kept[name]).to(device) for name in names}))

    def _check_sizes(self, sizes: saved_checks.Symbols) -> None:
        super()._check_sizes(sizes)
        lacking = [name for name in SEEN if getattr(self, name) is None]
        if lacking and len(lacking) < len(SEEN):
            raise Damaged(f"{FILE}: {lacking[0]}: expected with the others of novelty_")
        if sizes.get("K", 0) > len(self.inducing_points_):
            raise Damaged(
                f"{FILE}: novelty_mean_: expected at most {len(self.inducing_points_)} numbers, as "
                f"many as inducing points, found {sizes['K']}"
            )
        seen = self._seen(torch.device("cpu"))
        if seen is not None and not seen.is_sound:
            raise Damaged(
                f"{FILE}: novelty_precision_, novelty_mean_, novelty_scores_: no patches have such "
                "a mean and such a covariance"
            )
