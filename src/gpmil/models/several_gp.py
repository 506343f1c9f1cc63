"""What Gaussian-process models of more than two classes share: one base for grades and for types.

Whatever needs two classes alone (inducing points, range of the features, marks) is that of
"any but the first".
"""

import copy
from typing import Any, ClassVar

import numpy as np

from gpmil.models.saved import Arrays, Card
from gpmil.models.saved_checks import Symbols
from gpmil.models.several import SeveralClasses
from gpmil.models.vgpmil_pr import VGPMILPRI


class SeveralGP(SeveralClasses, VGPMILPRI):
    """A Gaussian-process model of a negative class and some others."""

    ABOVE: ClassVar[str] = "positive or not"  # the question that two classes ask
    ONLY: ClassVar[dict[str, Any]] = {"instance_labels": "ignore"}  # what is known of settings

    def _fit_to(self, cohort: Any, y: Any, device: Any) -> None:
        super()._fit_to(cohort, y, device)
        self._finish(cohort, device)
        del self._codes

    def _finish(self, cohort: Any, device: Any) -> None:
        """What is left to do when q(u) is fitted; the codes of the bags are still there."""

    def _fitted_problem(self, bags, y):
        codes = self._coded(self._check_predictable(bags), y).codes
        asked = copy.copy(self)
        asked._codes = codes
        return super(SeveralGP, asked)._fitted_problem(bags, (codes > 0).astype(np.int64))

    def update(self, bags, y=None, *, cross_fit=True):
        """Refused: labels of patches say tumour or not, and not which class."""
        raise ValueError(
            f"{type(self).__name__} knows instance_labels='ignore' alone: labels of patches teach "
            f"VGPMILPRI, fitted to '{self.ABOVE}'."
        )

    def _check_settings(self) -> None:
        super()._check_settings()
        for name, only in self.ONLY.items():
            value = getattr(self, name)
            if value != only:
                raise ValueError(
                    f"{type(self).__name__} knows {name}={only!r} alone, got {value!r}: leave it "
                    f"out, or fit VGPMILPRI to '{self.ABOVE}'."
                )

    def _restore(self, arrays: Arrays, card: Card, sizes: Symbols) -> None:
        self._restore_classes()
        super()._restore(arrays, card, sizes)
