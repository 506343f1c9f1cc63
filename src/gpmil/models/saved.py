"""A fitted model to and from a folder: which arrays and numbers are kept."""

import copy
import os
from typing import Any

import numpy as np
import torch
from sklearn.utils.validation import check_is_fitted

from gpmil import persistence
from gpmil.models import cross_fit
from gpmil.models.base import package_versions
from gpmil.models.checks import plain
from gpmil.models.fitted import FittedGP
from gpmil.models.kernel_objects import compare_kernel, fill_kernel, kernel_arrays

CPU = torch.device("cpu")
ARRAYS = (
    "inducing_points_",
    "posterior_mean_",
    "posterior_covariance_",
    "whitened_mean_",
    "whitened_precision_",
    "feature_mean_",
    "feature_scale_",
    "feature_components_",
    "elbo_trace_",
    "evidence_trace_",
    "relevance_",
    "classes_",
)
NUMBERS = (
    "coupling_",
    "variance_",
    "lengthscale_",
    "mean_",
    "n_iter_",
    "converged_",
    "residual_",
    "loo_log_likelihood_",
    "tuning_trace_",
    "n_features_in_",
    "cohort_",
)


class Saved(FittedGP):
    """A fitted model that can be saved and loaded."""

    kernel: Any
    inducing: Any

    def save(self, path: str | os.PathLike) -> None:
        """Write the model to a folder (safetensors and JSON); `gpmil.load` reads it."""
        check_is_fitted(self)
        persistence.write(path, *self._saved())

    def _saved(self) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
        """Arrays and card; the models of a cross-fit under names of their own."""
        arrays = {k: getattr(self, k) for k in ARRAYS if getattr(self, k) is not None}
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
            "fitted": {k: getattr(self, k) for k in NUMBERS},
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
        settings = dict(card["settings"].items())
        if "setting.inducing" in arrays:
            settings["inducing"] = arrays["setting.inducing"]
        if card["kernel_object"] is None and kernel is not None:
            raise ValueError(
                f"the model was fitted with kernel {card['kernel']!r}: load it without kernel=."
            )
        settings["optimize"] = tuple(settings["optimize"])
        model = cls(**settings)
        optional = {"feature_components_", "evidence_trace_", "relevance_"}
        for name in ARRAYS:
            setattr(model, name, arrays.get(name) if name in optional else arrays[name])
        for name in NUMBERS:
            setattr(model, name, card["fitted"][name])
        model.kernel = model.kernel_ = card["kernel"]
        if card["kernel_object"] is not None:
            kernel = fill_kernel(card["kernel_object"], kernel, arrays)
            model.kernel, model.kernel_ = kernel, copy.deepcopy(kernel)
            compare_kernel(kernel, model._inputs(model.inducing_points_, CPU), arrays)
        model.cross_fit_ = None
        if card["folds"]:
            folds = [
                cls._from_saved(_with_prefix(arrays, f"fold{k}."), own, kernel)
                for k, own in enumerate(card["folds"])
            ]
            model.cross_fit_ = cross_fit.restore(folds, arrays, card["calibrator"])
        return model


def _with_prefix(arrays: dict[str, np.ndarray], prefix: str) -> dict[str, np.ndarray]:
    return {k.removeprefix(prefix): v for k, v in arrays.items() if k.startswith(prefix)}
