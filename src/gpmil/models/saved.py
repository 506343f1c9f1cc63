"""A fitted model to and from a folder: every class says what it keeps, one writer and one reader.

What is kept is said once: names, shapes and kinds of the arrays, and a check for each number. The
reader trusts nothing that it has not checked (saved_checks.py).
"""

import os
from typing import Any, ClassVar, TypeVar

import numpy as np
from sklearn.utils.validation import check_is_fitted

from gpmil.files import persistence
from gpmil.models import saved_checks
from gpmil.models.base import BagClassifier, package_versions
from gpmil.models.checks import plain

Model = TypeVar("Model", bound="SavedModel")
Arrays = dict[str, np.ndarray]
Card = dict[str, Any]


class SavedModel(BagClassifier):
    """A model that can be saved and loaded."""

    ARRAYS: ClassVar[saved_checks.Expected] = saved_checks.FEATURES  # fitted attributes
    NUMBERS: ClassVar[dict[str, saved_checks.Check]] = saved_checks.COHORT  # fitted attributes
    # numbers that models of earlier versions lack, by the setting that came with them
    LATER: ClassVar[dict[str, dict[str, Any]]] = {}
    NOT_SETTINGS: ClassVar[tuple[str, ...]] = ("device",)  # chosen anew where it is loaded

    def _check_settings(self) -> None:
        raise NotImplementedError

    def save(self, path: str | os.PathLike) -> None:
        """Write the model to a folder (safetensors and JSON); `gpmil.load` reads it."""
        check_is_fitted(self)
        persistence.write(path, *self._saved())

    def _saved(self) -> tuple[Arrays, Card]:
        """The arrays and the card of the folder."""
        arrays = {k: getattr(self, k) for k in self.ARRAYS if getattr(self, k) is not None}
        card = {
            "class": type(self).__name__,
            "settings": self._saved_settings(),
            "fitted": {k: getattr(self, k) for k in self.NUMBERS},
            "versions": package_versions(),
        }
        more_arrays, more_card = self._saved_besides()
        return arrays | more_arrays, card | more_card

    def _saved_settings(self) -> dict[str, Any]:
        settings = self.get_params(deep=False)
        return {k: plain(v) for k, v in settings.items() if k not in self.NOT_SETTINGS}

    def _saved_besides(self) -> tuple[Arrays, Card]:
        """What a class keeps that is neither a setting nor one of its arrays and numbers."""
        return {}, {}

    @classmethod
    def _from_saved(cls: type[Model], arrays: Arrays, card: Card, kernel: Any = None) -> Model:
        """The model, once all of it is right."""
        besides = cls._settings_besides(arrays, card, kernel)
        settings = saved_checks.mapping(card, "settings")
        known = set(cls().get_params(deep=False)) - {*cls.NOT_SETTINGS}
        saved_checks.check_known("settings", settings, known, cls.__name__)
        model = cls(**(settings | besides))
        saved_checks.as_damage("settings", model._check_settings)
        fitted = saved_checks.mapping(card, "fitted")
        for setting, without in cls.LATER.items():
            fitted = fitted if setting in settings else without | fitted
        saved_checks.check_numbers(fitted, cls.NUMBERS)
        sizes = saved_checks.check_fitted(arrays, cls._expected(arrays), fitted, model.n_components)
        for name in cls.ARRAYS:
            setattr(model, name, arrays.get(name))
        for name in cls.NUMBERS:
            setattr(model, name, fitted[name])
        model._restore(arrays, card, sizes)
        return model

    @classmethod
    def _expected(cls, arrays: Arrays) -> saved_checks.Expected:
        """What the arrays of the folder must be."""
        return cls.ARRAYS

    @classmethod
    def _settings_besides(cls, arrays: Arrays, card: Card, kernel: Any) -> dict[str, Any]:
        """Settings that are no entries of the card as they are."""
        if kernel is not None:
            raise ValueError(f"a {cls.__name__} has no kernel: load it without kernel=.")
        return {}

    def _restore(self, arrays: Arrays, card: Card, sizes: saved_checks.Symbols) -> None:
        """Take over what `_saved_besides` kept, checked."""
