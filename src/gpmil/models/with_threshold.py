"""The operating point of a model: chosen in fit for a stated aim, kept, and used by `predict`."""

from dataclasses import asdict
from functools import partial
from typing import Any, ClassVar

import numpy as np
from jaxtyping import Float, Int, Shaped
from scipy.special import logit

from gpmil.data.folds import codes
from gpmil.decide import calibration
from gpmil.decide.operating import EQUAL_ODDS, Aim, OperatingPoint
from gpmil.models import saved_checks
from gpmil.models.checks import number
from gpmil.models.cross_fit import CrossFit
from gpmil.models.with_context import ContextGP

LEFT_OUT = "every slide left out of the fit"
OUT_OF_FOLD = "models that have not seen the slide's fold"
WITHOUT: dict[str, Any] = {
    "threshold_": 0.5,
    "operating_point_": None,
    "level_information_": None,
}


def _share(name: str, value: Any) -> None:
    number(name, value, least=0)
    if value > 1:
        raise ValueError(f"{name} must be a probability, got {value!r}.")


class DecidingGP(ContextGP):
    """A Gaussian-process model that calls slides from a threshold on."""

    NUMBERS = ContextGP.NUMBERS | {
        "threshold_": _share,
        "operating_point_": saved_checks.or_none(saved_checks.part),
        "level_information_": saved_checks.or_none(partial(number, least=0)),
    }
    LATER: ClassVar[dict[str, dict[str, Any]]] = ContextGP.LATER | {"aim": WITHOUT}

    aim: Any
    threshold_: float  # P(y = 1) above which a slide is called positive
    operating_point_: dict[str, Any] | None  # what it reaches; None where no slide was left out
    level_information_: float | None  # what those slides tell of the level of the log odds

    def predict(self, bags) -> np.ndarray:
        """The class of each bag, as a value of `classes_`: positive above `threshold_`.

        That is the likelier class, unless the model was fitted with another aim.
        """
        score = self.decision_function(bags)
        with np.errstate(divide="ignore"):  # 0 and 1: all, or none
            cut = logit(self.threshold_)
        return self.classes_[(score > cut).astype(int)]

    def _level_deviation(self) -> float:
        """How well the level of the log odds is known.

        Where no slide was left out from the number of training slides of either class alone, which
        tell at most n0 n1 / (n0 + n1).
        """
        found = self.level_information_
        if found is None:
            n, positive = (int(self.cohort_.get(name, 0)) for name in ("bags", "positive"))
            found = positive * (n - positive) / max(n, 1)
        return calibration.level_deviation(found)

    def _check_aim(self) -> None:
        Aim.read(self.aim)

    def _aims(self) -> bool:
        """Whether a threshold has to be looked for."""
        return self.aim != EQUAL_ODDS

    def _keep_operating_point(
        self,
        left_out: Float[np.ndarray, " B"] | None,
        cross_fit: CrossFit | None,
        labels: Int[np.ndarray, " B"],
        groups: Shaped[np.ndarray, " B"] | None,
    ) -> None:
        """From out-of-fold probabilities where there are any, else log p(y_b) of bags left out."""
        self.__dict__.update(WITHOUT)
        if cross_fit is not None:
            p, basis = cross_fit.held_out(), OUT_OF_FOLD
        elif left_out is not None:
            p, basis = np.where(labels == 1, np.exp(left_out), -np.expm1(left_out)), LEFT_OUT
        elif self._aims():
            raise ValueError(
                f"aim={self.aim!r} needs probabilities of slides left out, which cohorts this "
                "large, or in partitions, have with calibrated=True (or flags=True) alone."
            )
        else:
            return
        units = np.arange(len(labels)) if groups is None else codes(groups)
        rows = np.bincount(units).astype(float)
        self.level_information_ = calibration.level_information(p, rows)
        point = OperatingPoint.choose(self.aim, np.clip(p, 0, 1), labels, basis, groups)
        self.threshold_, self.operating_point_ = point.threshold, asdict(point)
