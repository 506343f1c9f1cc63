"""Checks of single settings, and of results: what was expected, what was found."""

import math
from numbers import Integral, Real
from typing import Any

import numpy as np
import torch
from jaxtyping import Float


def generator(random_state: Any) -> np.random.Generator:
    """The generator that random_state names."""
    try:
        return np.random.default_rng(random_state)
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"random_state must be a whole number >= 0, a generator or None, got {random_state!r}."
        ) from error


def one_of(name: str, value: Any, allowed: tuple[str, ...]) -> None:
    """Insist on one of some words."""
    if not isinstance(value, str) or value not in allowed:
        raise ValueError(f"{name} must be one of {list(allowed)}, got {value!r}.")


def is_word(value: Any, *words: str) -> bool:
    """Whether it is one of some words; a setting may be an array, which compares otherwise."""
    return isinstance(value, str) and value in words


def number(
    name: str,
    value: Any,
    above: float | None = None,
    least: float | None = None,
    words: tuple[str | None, ...] = (),
) -> None:
    """Insist on a finite number within its limits; `words` that were allowed are named as well."""
    wanted = "a finite number"
    if above is not None:
        wanted += f" > {above:g}"
    if least is not None:
        wanted += f" >= {least:g}"
    wanted += f" or one of {list(words)}" if words else ""
    good = is_number(value) and math.isfinite(value)
    if not good or (above is not None and value <= above) or (least is not None and value < least):
        raise ValueError(f"{name} must be {wanted}, got {value!r}.")


def is_number(value: Any) -> bool:
    """Whether it is a number that a float can hold, if only as infinity; truth values are none."""
    if not isinstance(value, Real) or isinstance(value, bool):
        return False
    try:
        float(value)
    except OverflowError:  # a whole number of hundreds of digits
        return False
    return True


def flag(name: str, value: Any) -> None:
    """Insist on True or False."""
    if not isinstance(value, bool | np.bool_):
        raise ValueError(f"{name} must be True or False, got {value!r}.")


def share(name: str, value: Any) -> None:
    """Insist on a number between 0 and 1, neither of them."""
    if not is_number(value) or not 0 < float(value) < 1:
        raise ValueError(f"{name} must be a number between 0 and 1 (10 % is 0.1), got {value!r}.")


def word_or_number(
    name: str,
    value: Any,
    words: tuple[str | None, ...],
    above: float | None = None,
    least: float | None = None,
) -> None:
    """Insist on one of some words (None counts as one), or on a number."""
    if not (value is None or isinstance(value, str)) or value not in words:
        number(name, value, above, least, words)


def count(name: str, value: Any, least: int) -> None:
    """Insist on a whole number."""
    if not isinstance(value, Integral) or isinstance(value, bool) or value < least:
        raise ValueError(f"{name} must be a whole number >= {least}, got {value!r}.")


def check_inducing(points: Any, n_features: int) -> Float[np.ndarray, "M D"]:
    """Inducing points given as an array."""
    try:
        found = np.array(points, dtype=np.float64)
    except (TypeError, ValueError, OverflowError) as error:
        raise ValueError(
            f"inducing must be an (M, {n_features}) array of numbers, or 'kmeans': {error}."
        ) from error
    if found.ndim != 2 or found.shape[1] != n_features or not len(found):
        raise ValueError(
            f"inducing must be an (M, {n_features}) array in the feature space of the bags, or "
            f"'kmeans'; got an array of shape {found.shape}."
        )
    if not np.isfinite(found).all():
        raise ValueError("inducing points hold NaN or infinite values.")
    return found


def check_lengths(lengths: Any, n_inputs: int) -> Float[np.ndarray, " d"]:
    """Length scales given one per column."""
    found = np.asarray(lengths)
    good = found.dtype.kind in "iuf" and found.shape == (n_inputs,)
    if not good or not (np.isfinite(found) & (found > 0)).all():
        raise ValueError(
            f"lengthscale must be a number, a word, or {n_inputs} positive numbers, one per column "
            f"of the kernel's inputs; got an array of shape {found.shape} and type {found.dtype}."
        )
    return found.astype(np.float64)


def require_numbers(*results: np.ndarray | torch.Tensor) -> None:
    """Refuse a prediction that is no number: nothing of it may reach a table."""
    # a sum of numbers is one, and quicker to look at; unless it overflows
    if not all(
        math.isfinite(a.sum()) or bool(torch.as_tensor(a).isfinite().all()) for a in results
    ):
        raise ValueError(
            "the model predicts NaN or infinite values for these bags: their features, or the "
            "numbers of the model, are far out of range. Are they features of another encoder, or "
            "is the model damaged?"
        )


def plain(value: Any) -> Any:
    """A setting as JSON: numbers and strings stay, a generator's state is not kept."""
    if isinstance(value, np.generic | np.ndarray):
        return value.tolist()
    if isinstance(value, tuple | list):
        return [plain(v) for v in value]
    return value if isinstance(value, str | bool | int | float | None) else None
