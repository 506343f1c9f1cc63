"""A fitted model to and from a folder: which arrays and numbers are kept."""

import copy
import os
import warnings
from functools import partial
from typing import Any

import numpy as np
import torch
from linear_operator.utils.warnings import NumericalWarning
from sklearn.utils.validation import check_is_fitted

from gpmil.files import persistence
from gpmil.models import saved_checks
from gpmil.models.base import package_versions
from gpmil.models.checks import check_inducing, check_lengths, one_of, plain
from gpmil.models.cross_fit import CrossFit, restore
from gpmil.models.kernel_objects import compare_kernel, fill_kernel, kernel_arrays
from gpmil.models.saved_checks import Damaged
from gpmil.models.sparse import SparseGPModel
from gpmil.process.kernels import KERNELS

CPU = torch.device("cpu")
AGREEMENT = 1e-3  # of the largest number: another machine factors a stiff kernel a little otherwise


class Saved(SparseGPModel):
    """A fitted model that can be saved and loaded; a class says what it keeps besides q(u)."""

    ARRAYS: tuple[str, ...] = (
        "inducing_points_",
        "posterior_mean_",
        "posterior_covariance_",
        "whitened_mean_",
        "whitened_precision_",
        "feature_mean_",
        "feature_scale_",
        "classes_",
        "elbo_trace_",
    )
    OPTIONAL_ARRAYS: tuple[str, ...] = ("feature_components_", "relevance_")
    NUMBERS: tuple[str, ...] = (
        "variance_",
        "lengthscale_",
        "mean_",
        "n_iter_",
        "converged_",
        "residual_",
        "n_features_in_",
        "cohort_",
    )

    CHECKS: dict[str, saved_checks.Check] = saved_checks.GP_NUMBERS

    cross_fit_: CrossFit | None  # None unless calibrated or flags
    kernel: Any

    def _check_settings(self) -> None:
        raise NotImplementedError

    def save(self, path: str | os.PathLike) -> None:
        """Write the model to a folder (safetensors and JSON); `gpmil.load` reads it."""
        check_is_fitted(self)
        persistence.write(path, *self._saved())

    def _saved(self) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
        """Arrays and card; the models of a cross-fit under names of their own."""
        names = (*self.ARRAYS, *self.OPTIONAL_ARRAYS)
        arrays = {k: getattr(self, k) for k in names if getattr(self, k) is not None}
        settings = self.get_params(deep=False)
        del settings["kernel"], settings["device"]  # kept apart; chosen anew where it is loaded
        if not isinstance(self.inducing, str):
            arrays["setting.inducing"] = np.asarray(settings.pop("inducing"))
        named = isinstance(self.kernel_, str)
        if not named:
            arrays |= kernel_arrays(self.kernel_, self._gp(CPU).inducing)
        card: dict[str, Any] = {
            "class": type(self).__name__,
            "settings": {k: plain(v) for k, v in settings.items() if k not in ("device", "kernel")},
            "kernel": self.kernel_ if named else None,
            "kernel_object": None if named else type(self.kernel_).__name__,
            "fitted": {k: getattr(self, k) for k in self.NUMBERS},
            "versions": package_versions(),
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
            card["calibrator"] = self.cross_fit_.calibrator.to_dict()
        return arrays | self.cross_fit_.arrays(), card

    @classmethod
    def _from_saved(cls, arrays: dict[str, np.ndarray], card: dict[str, Any], kernel=None):
        name = saved_checks.text_or_none(card, "kernel")
        object_name = saved_checks.text_or_none(card, "kernel_object")
        if object_name is None and kernel is not None:
            raise ValueError(f"the model was fitted with kernel {name!r}: load it without kernel=.")
        model = cls._with_settings(arrays, saved_checks.mapping(card, "settings"))
        if object_name is None:
            saved_checks.as_damage("kernel", lambda: one_of("kernel", name, tuple(KERNELS)))
            model.kernel = model.kernel_ = name
        else:
            kernel = fill_kernel(object_name, kernel, arrays)
            model.kernel, model.kernel_ = kernel, copy.deepcopy(kernel)
        model._check_saved(arrays, saved_checks.mapping(card, "fitted"))
        if object_name is not None:
            compare_kernel(kernel, model._inputs(model.inducing_points_, CPU), arrays)
        model._restore_folds(arrays, card, kernel)
        return model

    @classmethod
    def _with_settings(cls, arrays: dict[str, np.ndarray], settings: dict[str, Any]):
        """A model that is not fitted; its inducing points, where they were given, are an array."""
        known = cls().get_params(deep=False)
        del known["kernel"], known["device"]
        saved_checks.check_known("settings", settings, known, cls.__name__)
        settings = {
            k: tuple(v) if k == "optimize" and isinstance(v, list) else v
            for k, v in settings.items()
        }
        if "setting.inducing" in arrays:
            settings["inducing"] = arrays["setting.inducing"]
        saved_checks.entry(settings, "inducing", f"{persistence.CARD}: settings")
        return cls(**settings)

    def _check_saved(self, arrays: dict[str, np.ndarray], fitted: dict[str, Any]) -> None:
        """Take over what a fit left, once all of it is right."""
        saved_checks.as_damage("settings", self._check_settings)
        saved_checks.check_numbers(fitted, self.CHECKS)
        sizes = saved_checks.check_features(arrays, fitted, self.n_components)
        saved_checks.check_arrays(arrays, saved_checks.SPARSE_GP, sizes)
        for name in ("variance_", "lengthscale_"):
            if (fitted[name] is None) == isinstance(self.kernel_, str):
                raise Damaged(
                    f"{persistence.CARD}: {name}: expected null with a kernel object only"
                )
        if isinstance(self.kernel_, str) == ("kernel_values" in arrays):
            raise Damaged(
                f"{persistence.ARRAYS}: kernel_values: expected with a kernel object only"
            )
        for name in (*self.ARRAYS, *self.OPTIONAL_ARRAYS):
            setattr(self, name, arrays.get(name))
        for name in self.NUMBERS:
            setattr(self, name, fitted[name])
        saved_checks.as_damage("settings", partial(self._check_given, sizes))
        self._check_posterior()

    def _check_posterior(self) -> None:
        """q(u) is there twice, whitened and not: both must agree by the kernel of the card."""
        try:
            with torch.no_grad(), warnings.catch_warnings():
                warnings.simplefilter("ignore", NumericalWarning)  # said when it is used
                gp, q = self._gp(CPU), self._posterior(CPU)
        except RuntimeError as error:
            raise Damaged(
                f"{persistence.ARRAYS}: inducing_points_: their covariance has no factor ({error})"
            ) from error
        for name, expected in (
            ("posterior_mean_", q.mean_u(gp).numpy()),
            ("posterior_covariance_", q.covariance_u(gp).numpy()),
        ):
            apart = np.abs(getattr(self, name) - expected).max()
            if not apart <= AGREEMENT * np.abs(expected).max():
                raise Damaged(
                    f"{persistence.ARRAYS}: {name} does not follow from whitened_mean_, "
                    "whitened_precision_, inducing_points_ and the kernel: one is of another model"
                )

    def _check_given(self, sizes: saved_checks.Symbols) -> None:
        """Settings that are arrays: inducing points, a length for every input."""
        if not isinstance(self.inducing, str):
            check_inducing(self.inducing, sizes["D"])
        if np.ndim(self.lengthscale) == 1:
            check_lengths(self.lengthscale, sizes["d"])

    def _restore_folds(self, arrays: dict[str, np.ndarray], card: dict[str, Any], kernel) -> None:
        """The models of the cross-fit, and what they said of the bags held out."""
        folds = saved_checks.listing(card, "folds")
        calibrator = saved_checks.calibrator(saved_checks.entry(card, "calibrator"))
        asked = [bool(getattr(self, name, False)) for name in ("calibrated", "flags")]
        saved_checks.check_same("folds", bool(folds), any(asked))
        saved_checks.check_same("calibrator", calibrator is not None, asked[0])
        self.cross_fit_ = None
        if not folds:
            return
        models = [self._fold(arrays, own, k, kernel) for k, own in enumerate(folds)]
        widths = [self.n_features_in_, *(model.n_features_in_ for model in models)]
        saved_checks.check_cross_fit(arrays, len(folds), widths)
        self.cross_fit_ = restore(models, arrays, calibrator)

    @classmethod
    def _fold(cls, arrays: dict[str, np.ndarray], card: dict[str, Any], k: int, kernel):
        try:
            return cls._from_saved(_with_prefix(arrays, f"fold{k}."), card, kernel)
        except Damaged as error:
            raise Damaged(f"fold {k}: {error}") from error


def _with_prefix(arrays: dict[str, np.ndarray], prefix: str) -> dict[str, np.ndarray]:
    return {k.removeprefix(prefix): v for k, v in arrays.items() if k.startswith(prefix)}
