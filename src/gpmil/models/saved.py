"""A fitted model to and from a folder: which arrays and numbers are kept."""

import copy
import os
from typing import Any

import numpy as np
import torch
from sklearn.utils.validation import check_is_fitted

from gpmil import persistence
from gpmil.models.base import package_versions
from gpmil.models.checks import plain
from gpmil.models.cross_fit import CrossFit, restore
from gpmil.models.kernel_objects import compare_kernel, fill_kernel, kernel_arrays
from gpmil.models.sparse import SparseGPModel

CPU = torch.device("cpu")


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

    cross_fit_: CrossFit | None  # None unless calibrated or flags
    kernel: Any

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
        settings = dict(card["settings"].items())
        if "setting.inducing" in arrays:
            settings["inducing"] = arrays["setting.inducing"]
        if card["kernel_object"] is None and kernel is not None:
            raise ValueError(
                f"the model was fitted with kernel {card['kernel']!r}: load it without kernel=."
            )
        model = cls(**{k: tuple(v) if k == "optimize" else v for k, v in settings.items()})
        for name in cls.ARRAYS:
            setattr(model, name, arrays[name])
        for name in cls.OPTIONAL_ARRAYS:
            setattr(model, name, arrays.get(name))
        for name in cls.NUMBERS:
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
            model.cross_fit_ = restore(folds, arrays, card["calibrator"])
        return model


def _with_prefix(arrays: dict[str, np.ndarray], prefix: str) -> dict[str, np.ndarray]:
    return {k.removeprefix(prefix): v for k, v in arrays.items() if k.startswith(prefix)}
