"""What a Gaussian-process model keeps in its folder: q(u), the kernel, and its cross-fit."""

import copy
import warnings
from dataclasses import asdict
from functools import partial
from typing import Any

import numpy as np
import torch
from linear_operator.utils.warnings import NumericalWarning

from gpmil.decide.calibration import SlideCalibrator
from gpmil.decide.unlike import FLAT
from gpmil.files.persistence import ARRAYS as FILE
from gpmil.files.persistence import CARD
from gpmil.models import saved_checks
from gpmil.models.checks import check_inducing, check_lengths, flag, number, one_of
from gpmil.models.cross_fit import CrossFit, restore
from gpmil.models.kernel_objects import compare_kernel, fill_kernel, kernel_arrays
from gpmil.models.saved import Arrays, Card, SavedModel
from gpmil.models.saved_checks import Array, Damaged
from gpmil.models.sparse import SparseGPModel
from gpmil.process.kernels import KERNELS

CPU = torch.device("cpu")
LARGEST = 1e100  # of a setting: its square is still a number
AGREEMENT = 1e-3  # of the largest number: another machine factors a stiff kernel a little otherwise
FLOATS = (
    *("variance_", "lengthscale_", "mean_", "coupling_", "slide_effect_", "slide_context_"),
    *("slide_context_lengthscale_", "slide_context_scale_", "slide_context_level_"),
)

KERNEL_VALUES = {"kernel_values": Array(("M",), "finite", optional=True)}
CROSS_FIT: saved_checks.Expected = {
    "cross_fit.labels": Array(("B",), "zero_one"),
    "cross_fit.groups": Array(("B",), "whole"),
    "cross_fit.fold": Array(("B",), "whole"),
    "cross_fit.fingerprints": Array(("B",), "whole"),
    "cross_fit.log_odds": Array(("B",), "finite"),
    "reference.scores": Array(("n",), "finite"),
    "reference.offsets": Array(("folds + 1",), "whole"),
    "reference.bag": Array(("n",), "whole"),
    "unlike.edges": Array(("edges",), "finite", optional=True),
    "unlike.density": Array(("steps",), "finite", optional=True),
    "unlike.alike": Array((len(FLAT),), "finite", optional=True),
    "unlike.same_kind": Array((1,), "finite", optional=True),
    "patches.numbers": Array((2,), "finite", optional=True),
}
CALIBRATOR: dict[str, saved_checks.Check] = {
    "slope": partial(number, least=0),
    "intercept": number,
}
STEPS: tuple[tuple[str, Any], ...] = (("method", "sigmoid"), ("knots", []), ("values", []))


class SavedGP(SparseGPModel):
    """A Gaussian-process model that can be saved and loaded."""

    ARRAYS = SavedModel.ARRAYS | {
        "relevance_": Array(("d",), "positive", optional=True),
        "inducing_points_": Array(("M", "D"), "finite"),
        "posterior_mean_": Array(("M",), "finite"),
        "posterior_covariance_": Array(("M", "M"), "covariance"),
        "whitened_mean_": Array(("M",), "finite"),
        "whitened_precision_": Array(("M", "M"), "precision"),
        "elbo_trace_": Array(("sweeps",), "trace"),
    }
    NUMBERS = SavedModel.NUMBERS | {
        "variance_": saved_checks.or_none(saved_checks.positive),
        "lengthscale_": saved_checks.or_none(saved_checks.positive),
        "mean_": number,
        "n_iter_": saved_checks.from_zero,
        "converged_": flag,
        "residual_": saved_checks.residual,
    }
    NOT_SETTINGS = ("device", "kernel")

    cross_fit_: CrossFit | None  # None unless calibrated or flags

    def _saved_settings(self) -> dict[str, Any]:
        settings = super()._saved_settings()
        if not isinstance(self.inducing, str):
            del settings["inducing"]  # an array
        return settings

    def _saved_besides(self) -> tuple[Arrays, Card]:
        named = isinstance(self.kernel_, str)
        arrays = {} if named else kernel_arrays(self.kernel_, self._gp(CPU).inducing)
        if not isinstance(self.inducing, str):
            arrays["setting.inducing"] = np.asarray(self.inducing)
        card: Card = {
            "kernel": self.kernel_ if named else None,
            "kernel_object": None if named else type(self.kernel_).__name__,
            "folds": [],
            "calibrator": None,
        }
        if self.cross_fit_ is None:
            return arrays, card
        for k, model in enumerate(self.cross_fit_.models):
            own, own_card = model._saved()
            arrays |= {f"fold{k}.{name}": a for name, a in own.items()}
            card["folds"].append(own_card)
        if self.cross_fit_.calibrator is not None:
            card["calibrator"] = asdict(self.cross_fit_.calibrator)
        return arrays | self.cross_fit_.arrays(), card

    @classmethod
    def _settings_besides(cls, arrays: Arrays, card: Card, kernel: Any) -> dict[str, Any]:
        settings = saved_checks.mapping(card, "settings")
        besides = {"kernel": _kernel(arrays, card, kernel)}
        if "setting.inducing" in arrays:
            besides["inducing"] = arrays["setting.inducing"]
        else:
            saved_checks.entry(settings, "inducing", f"{CARD}: settings")
        if isinstance(settings.get("optimize"), list):
            besides["optimize"] = tuple(settings["optimize"])
        return besides

    def _restore(self, arrays: Arrays, card: Card, sizes: saved_checks.Symbols) -> None:
        self.kernel_ = copy.deepcopy(self.kernel)
        named = isinstance(self.kernel_, str)
        for name in FLOATS:
            if getattr(self, name, None) is not None:  # torch takes no int of more than 64 bits
                setattr(self, name, float(getattr(self, name)))
                if abs(getattr(self, name)) > LARGEST:
                    raise Damaged(f"{CARD}: {name}: expected numbers up to {LARGEST:g}")
        saved_checks.check_arrays(arrays, KERNEL_VALUES, sizes)
        for name in ("variance_", "lengthscale_"):
            if (getattr(self, name) is None) == named:
                raise Damaged(f"{CARD}: {name}: expected null with a kernel object only")
        if named == ("kernel_values" in arrays):
            raise Damaged(f"{FILE}: kernel_values: expected with a kernel object only")
        saved_checks.as_damage("settings", partial(self._check_given, sizes))
        self._check_sizes(sizes)
        self._check_posterior()
        if not named:
            compare_kernel(self.kernel, self._inputs(self.inducing_points_, CPU), arrays)
        self._restore_folds(arrays, card)

    def _check_given(self, sizes: saved_checks.Symbols) -> None:
        """Settings that are arrays: inducing points, one length per input."""
        if not isinstance(self.inducing, str):
            check_inducing(self.inducing, sizes["D"])
        if np.ndim(self.lengthscale) == 1:
            check_lengths(self.lengthscale, sizes["d"])

    def _check_sizes(self, sizes: saved_checks.Symbols) -> None:
        """Arrays that belong together, where a class has such."""

    def _check_posterior(self) -> None:
        """q(u) is there twice, whitened and not: both must agree by the kernel of the card."""
        try:
            with torch.no_grad(), warnings.catch_warnings():
                warnings.simplefilter("ignore", NumericalWarning)  # said when it is used
                gp, q = self._gp(CPU), self._posterior(CPU)
        except RuntimeError as error:
            raise Damaged(
                f"{FILE}: inducing_points_: their covariance has no factor ({error})"
            ) from error
        for name, expected in (
            ("posterior_mean_", q.mean_u(gp).numpy()),
            ("posterior_covariance_", q.covariance_u(gp).numpy()),
        ):
            apart = np.abs(getattr(self, name) - expected).max()
            if not apart <= AGREEMENT * np.abs(expected).max():
                raise Damaged(
                    f"{FILE}: {name} does not follow from whitened_mean_, "
                    "whitened_precision_, inducing_points_ and the kernel: one is of another model"
                )

    def _restore_folds(self, arrays: Arrays, card: Card) -> None:
        """The models of the cross-fit, and what they said of the bags held out."""
        folds = saved_checks.listing(card, "folds")
        calibrator = _calibrator(saved_checks.entry(card, "calibrator"))
        asked = [bool(getattr(self, name, False)) for name in ("calibrated", "flags")]
        saved_checks.check_same("folds", bool(folds), any(asked))
        saved_checks.check_same("calibrator", calibrator is not None, asked[0])
        self.cross_fit_ = None
        if not folds:
            return
        kernel = None if isinstance(self.kernel, str) else self.kernel
        models = [self._fold(arrays, own, k, kernel) for k, own in enumerate(folds)]
        widths = [self.n_features_in_, *(model.n_features_in_ for model in models)]
        _check_cross_fit(arrays, len(folds), widths)
        self.cross_fit_ = restore(models, arrays, calibrator)

    @classmethod
    def _fold(cls, arrays: Arrays, card: Card, k: int, kernel: Any):
        prefix = f"fold{k}."
        own = {k.removeprefix(prefix): v for k, v in arrays.items() if k.startswith(prefix)}
        try:
            return cls._from_saved(own, card, kernel)
        except Damaged as error:
            raise Damaged(f"fold {k}: {error}") from error


def _kernel(arrays: Arrays, card: Card, kernel: Any) -> Any:
    """The kernel by name, or the user's new object with the saved numbers in it."""
    name = saved_checks.text_or_none(card, "kernel")
    object_name = saved_checks.text_or_none(card, "kernel_object")
    if object_name is not None:
        return fill_kernel(object_name, kernel, arrays)
    if kernel is not None:
        raise ValueError(f"the model was fitted with kernel {name!r}: load it without kernel=.")
    saved_checks.as_damage("kernel", lambda: one_of("kernel", name, tuple(KERNELS)))
    return name


def _check_cross_fit(arrays: Arrays, n_folds: int, n_features: list[int]) -> None:
    """Labels, folds and scores of the bags that calibrate a model."""
    saved_checks.check_arrays(arrays, CROSS_FIT, {"folds + 1": n_folds + 1})
    fold, offsets = arrays["cross_fit.fold"], arrays["reference.offsets"]
    if not np.array_equal(np.unique(fold), np.arange(n_folds)):
        raise Damaged(f"{FILE}: cross_fit.fold: expected the folds 0 to {n_folds - 1}, all used")
    n = len(arrays["reference.scores"])
    if offsets[0] != 0 or offsets[-1] != n or (np.diff(offsets) <= 0).any():
        raise Damaged(f"{FILE}: reference.offsets: expected rising numbers from 0 to {n}")
    falls = np.diff(arrays["reference.scores"]) < 0
    falls[offsets[1:-1] - 1] = False  # from one fold to the next
    if falls.any():
        raise Damaged(f"{FILE}: reference.scores: expected ascending numbers in every fold")
    if len(set(n_features)) > 1:
        raise Damaged(f"{CARD}: folds: expected one number of features, found {n_features}")
    if "patches.numbers" in arrays and not arrays["patches.numbers"][1] > 0:
        raise Damaged(f"{FILE}: patches.numbers: expected an intercept and a slope above 0")
    _check_unlike({k: v for k, v in arrays.items() if k.startswith("unlike.")})


def _check_unlike(arrays: Arrays) -> None:
    """All of the density of p-values, or nothing of it: steps that fall, from 0 to 1."""
    if not arrays:
        return
    edges, g = (saved_checks.entry(arrays, f"unlike.{k}", FILE) for k in ("edges", "density"))
    alike = saved_checks.entry(arrays, "unlike.alike", FILE)
    saved_checks.entry(arrays, "unlike.same_kind", FILE)
    steps = len(edges) == len(g) + 1 and edges[0] == 0 and edges[-1] == 1
    falling = (np.diff(edges) > 0).all() and (np.diff(g) < 0).all() and (g >= 0).all()
    if not (steps and falling and ((alike >= 0) & (alike <= 1)).all()):
        raise Damaged(f"{FILE}: unlike.density: expected a falling density over p-values 0 to 1")


def _calibrator(card: Any) -> SlideCalibrator | None:
    """From its part of the card."""
    if card is None:
        return None
    if not isinstance(card, dict):
        found = saved_checks.type_shown(card)
        raise Damaged(f"{CARD}: calibrator: expected names with values, found {found}")
    # earlier versions knew of steps as well, and no model had any
    card = {k: v for k, v in card.items() if (k, v) not in STEPS}
    saved_checks.check_known("calibrator", card, vars(SlideCalibrator()), "a calibrator")
    saved_checks.check_numbers(card, CALIBRATOR, "calibrator")
    return SlideCalibrator(**card)
