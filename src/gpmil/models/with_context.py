"""The slide context of a model: where it is placed, what it keeps, and whether a folder has it all.

The process itself is in process/slide_context.py. It sees the columns of the inputs unweighted,
whatever lengths the columns have in the kernel of the patches.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from gpmil.files.persistence import ARRAYS as FILE
from gpmil.files.persistence import CARD
from gpmil.models import saved_checks
from gpmil.models.checks import is_word, number, word_or_number
from gpmil.models.saved import Arrays
from gpmil.models.saved_checks import Array, Damaged
from gpmil.models.sparse import TrainingCohort
from gpmil.models.with_novelty import NovelGP
from gpmil.process.inducing import kmeans
from gpmil.process.slide_context import MOST_POINTS, Frame, SlideContext
from gpmil.process.sparse_gp import Posterior, SparseGP

NUMBERS: dict[str, saved_checks.Check] = {
    "slide_context_": partial(number, least=0),
    "slide_context_lengthscale_": saved_checks.or_none(saved_checks.positive),
    "slide_context_scale_": saved_checks.or_none(saved_checks.positive),
    "slide_context_level_": number,
}
WITHOUT: dict[str, Any] = {
    "slide_context_": 0.0,
    "slide_context_lengthscale_": None,
    "slide_context_scale_": None,
    "slide_context_level_": 0.0,
}
PARTS = (
    *("slide_context_lengthscale_", "slide_context_scale_"),
    *("slide_context_center_", "slide_context_points_"),
)
OF_WEIGHTS = ("posterior_mean_", "posterior_covariance_", "whitened_mean_", "whitened_precision_")


@dataclass(frozen=True)
class SlideEvidence:
    """Log odds of a positive slide, before calibration, by where the evidence comes from."""

    patches: Float[np.ndarray, " B"]  # were the slide as a whole like the average training slide
    slide: Float[np.ndarray, " B"]  # what the slide as a whole adds to that; 0 without a context

    @property
    def total(self) -> Float[np.ndarray, " B"]:
        """Both together: the log odds of the model."""
        return self.patches + self.slide


class ContextGP(NovelGP):
    """A Gaussian-process model that may have a slide context."""

    ARRAYS = NovelGP.ARRAYS | {
        "slide_context_center_": Array(("d",), "finite", optional=True),
        "slide_context_points_": Array(("M_s", "d"), "finite", optional=True),
    }
    NUMBERS = NovelGP.NUMBERS | NUMBERS

    slide_context: Any
    slide_context_lengthscale: Any
    slide_context_: float  # gamma_s
    slide_context_lengthscale_: float | None  # None without a context, as are those below
    slide_context_center_: Float[np.ndarray, " d"] | None  # of the slides' means
    slide_context_scale_: float | None  # by which they are divided
    slide_context_points_: Float[np.ndarray, "M_s d"] | None  # inducing points, centred and scaled
    slide_context_level_: float  # mean over the training slides of what the context adds; 0

    def _has_context(self) -> bool:
        return is_word(self.slide_context, "auto") or float(self.slide_context) > 0

    def _check_slide_context(self) -> None:
        word_or_number("slide_context", self.slide_context, ("auto",), least=0)
        length = self.slide_context_lengthscale
        word_or_number("slide_context_lengthscale", length, ("auto",), above=0)

    # --- Fit ----------------------------------------------------------------------------------

    def _place_context(self, cohort: TrainingCohort) -> Float[Tensor, "B d"] | None:
        """z of the training slides, and inducing points among them: all, or k-means of many."""
        self.slide_context_center_, self.slide_context_points_ = None, None
        self.__dict__.update(WITHOUT)
        if not self._has_context():
            return None
        means = cohort.slide_means(self._feature_map()) / self._column_weights()
        frame = Frame.of(means)
        z = frame(means)
        self.slide_context_center_ = frame.center.numpy()
        self.slide_context_scale_ = float(frame.scale)
        self.slide_context_points_ = kmeans(z, MOST_POINTS, self._seed())
        return z

    def _set_context_numbers(self) -> None:
        """The settings as numbers; a word is a first guess, until what it stands for is learned."""
        if not self._has_context():
            return
        gamma, length = self.slide_context, self.slide_context_lengthscale
        self.slide_context_ = 1.0 if is_word(gamma, "auto") else float(gamma)
        guess = float(np.sqrt(self._n_inputs()))
        self.slide_context_lengthscale_ = guess if is_word(length, "auto") else float(length)

    def _keep_level(self, gp: SparseGP, q: Posterior, z: Float[Tensor, "B d"] | None) -> None:
        """The mean of g over the training slides, which predict_evidence measures slides from."""
        if gp.context is not None and z is not None:
            own = gp.context.at(z.to(gp.L.device)) @ q.w[len(gp.L) :]
            self.slide_context_level_ = float(own.mean())

    def _column_weights(self) -> Float[Tensor, " d"]:
        if self.relevance_ is None:
            return torch.ones(self._n_inputs(), dtype=torch.float64)
        return torch.from_numpy(self.relevance_)

    def _context(self, device: torch.device) -> SlideContext | None:
        if self.slide_context_center_ is None or self.slide_context_points_ is None:
            return None
        assert self.slide_context_scale_ is not None and self.slide_context_lengthscale_ is not None
        weights = self._column_weights()
        center = torch.from_numpy(self.slide_context_center_) * weights
        frame = Frame(center.to(device), (self.slide_context_scale_ * weights).to(device))
        points = torch.from_numpy(self.slide_context_points_).to(device)
        length = self.slide_context_lengthscale_
        return SlideContext.build(frame, points, self.slide_context_, length)

    # --- Files --------------------------------------------------------------------------------

    @classmethod
    def _expected(cls, arrays: Arrays) -> saved_checks.Expected:
        """q(u) of a model with a context has M_s more entries than inducing points."""
        expected = super()._expected(arrays)
        if "slide_context_points_" not in arrays:
            return expected
        longer = {
            name: Array(("M + M_s",) * len(expected[name].shape), expected[name].kind)
            for name in OF_WEIGHTS
        }
        return expected | longer

    def _check_sizes(self, sizes: saved_checks.Symbols) -> None:
        """A context is there whole, and q(u) has its entries, or it is not there at all."""
        super()._check_sizes(sizes)
        odd = [k for k in PARTS if (getattr(self, k) is not None) != (self.slide_context_ > 0)]
        if odd:
            raise Damaged(
                f"{FILE} and {CARD}: {odd[0]}: expected with a slide context and not without it, "
                f"and slide_context_ is {self.slide_context_:g}"
            )
        wanted = sizes["M"] + sizes.get("M_s", 0)
        if sizes.get("M + M_s", wanted) != wanted:
            raise Damaged(
                f"{FILE}: whitened_mean_: expected {wanted} numbers, one for every inducing point "
                f"and every point of the slide context, found {sizes['M + M_s']}"
            )
