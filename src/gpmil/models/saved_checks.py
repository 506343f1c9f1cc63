"""What a saved model must be, entry by entry: shapes in symbols, kinds of numbers.

A checksum that fits says that nothing was changed by accident, not that the numbers make a model:
another program, or a person, may have written them. So every array and every entry of the card is
checked before a model is made of them. A symbol in a shape stands for the size that it is first
met with: M inducing points, D features, d inputs of the kernel or of the network after PCA.
"""

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from gpmil.coupling.operator import check_strength
from gpmil.files.persistence import ARRAYS, CARD
from gpmil.models.checks import count, is_number, number, one_of
from gpmil.process.kernels import KERNELS

Shape = tuple[str | int, ...]
Symbols = dict[str, int]  # the sizes met so far
Check = Callable[[str, Any], None]
Arrays = Mapping[str, np.ndarray]

ROUNDING = 1e-8  # of the largest eigenvalue: what factors may have lost


class Damaged(ValueError):
    """An entry that is not there, or that no fit has left like this."""


# --- Kinds of arrays ------------------------------------------------------------------------------
def _double(a: np.ndarray) -> bool:
    return a.dtype == np.float64 and bool(np.isfinite(a).all())


def _definite(a: np.ndarray, least: float) -> bool:
    """Symmetric, with no eigenvalue below `least` but for rounding."""
    if not _double(a) or not np.allclose(a, a.T, rtol=1e-6, atol=ROUNDING * np.abs(a).max()):
        return False
    slack = ROUNDING * np.abs(a).max()
    try:
        if least > 0:
            np.linalg.cholesky(a)  # as predictions will, without any slack
        np.linalg.cholesky(a + (slack - least) * np.eye(len(a)))
    except np.linalg.LinAlgError:
        return False
    return True


def _whole(a: np.ndarray) -> bool:
    return a.dtype == np.int64


KINDS: dict[str, tuple[str, Callable[[np.ndarray], bool]]] = {
    "finite": ("finite float64 numbers", _double),
    "positive": ("finite float64 numbers > 0", lambda a: _double(a) and bool((a > 0).all())),
    "covariance": ("a positive definite float64 matrix", lambda a: _definite(a, 0.0)),
    # R = I + W' Sigma W
    "precision": ("a float64 matrix I + W'W", lambda a: _definite(a, 1 - ROUNDING)),
    "classes": ("two numbers, the smaller first", lambda a: a.dtype.kind in "biuf" and a[0] < a[1]),
    "whole": ("int64 numbers", _whole),
    "zero_one": ("int64 numbers 0 and 1", lambda a: _whole(a) and bool(np.isin(a, (0, 1)).all())),
    "float32": ("finite float32 numbers", lambda a: a.dtype == np.float32 and _finite(a)),
    "orthonormal": ("orthonormal float64 rows", lambda a: _double(a) and _orthonormal(a)),
    "trace": ("float64 numbers", lambda a: a.dtype == np.float64),
}


def _finite(a: np.ndarray) -> bool:
    return bool(np.isfinite(a).all())


def _orthonormal(a: np.ndarray) -> bool:
    if np.abs(a).max() > 2:  # its square would overflow
        return False
    return bool(np.allclose(a @ a.T, np.eye(len(a)), atol=1e-6))


# --- Arrays ---------------------------------------------------------------------------------------
class Array(NamedTuple):
    """What an array that a model keeps must be."""

    shape: Shape
    kind: str  # of KINDS
    optional: bool = False


Expected = dict[str, Array]
FEATURES: Expected = {
    "classes_": Array((2,), "classes"),
    "feature_mean_": Array(("D",), "finite"),
    "feature_components_": Array(("d", "D"), "orthonormal", optional=True),
    "feature_scale_": Array(("scales",), "positive"),
}


def check_arrays(arrays: Arrays, expected: Expected, sizes: Symbols) -> None:
    """Insist on every array, its shape and its kind; new symbols are added to `sizes`."""
    for name, (shape, kind, optional) in expected.items():
        if name not in arrays and optional:
            continue
        array = entry(arrays, name, ARRAYS)
        _check_shape(name, array.shape, shape, sizes)
        words, good = KINDS[kind]
        if not good(array):
            raise Damaged(f"{ARRAYS}: {name}: expected {words}, found {_shown(array)}")


def _check_shape(name: str, found: tuple[int, ...], shape: Shape, sizes: Symbols) -> None:
    if len(found) == len(shape) and 0 not in found:
        for symbol, size in zip(shape, found):
            sizes.setdefault(str(symbol), size if isinstance(symbol, str) else symbol)
        if found == tuple(sizes[str(symbol)] for symbol in shape):
            return
    known = [f"{s} = {sizes[s]}" for s in dict.fromkeys(map(str, shape)) if not s.isdigit()
             and s in sizes]  # fmt: skip
    wanted = ", ".join(map(str, shape)) + ("," if len(shape) == 1 else "")
    raise Damaged(
        f"{ARRAYS}: {name}: expected shape ({wanted}){' with ' if known else ''}"
        f"{', '.join(known)}, found {found}"
    )


def _shown(array: np.ndarray) -> str:
    """The type of an array, and what stands out among its numbers."""
    if array.dtype.kind != "f":
        return f"{array.dtype} numbers"
    odd = int((~np.isfinite(array)).sum())
    if odd:
        return f"{array.dtype} numbers, {odd} of them NaN or infinite"
    return f"{array.dtype} numbers from {array.min():.3g} to {array.max():.3g}"


# --- Entries of the card --------------------------------------------------------------------------
def entry(part: Mapping[str, Any], name: str, where: str = CARD) -> Any:
    """An entry that must be there."""
    if name not in part:
        raise Damaged(f"{where}: {name} is missing")
    return part[name]


def mapping(part: Mapping[str, Any], name: str) -> dict[str, Any]:
    """An entry that has names in it."""
    found = entry(part, name)
    if not isinstance(found, dict):
        raise Damaged(f"{CARD}: {name}: expected names with values, found {type_shown(found)}")
    return found


def listing(part: Mapping[str, Any], name: str) -> list[dict[str, Any]]:
    """An entry that is a list of parts with names in them."""
    found = entry(part, name)
    if not isinstance(found, list) or not all(isinstance(f, dict) for f in found):
        raise Damaged(f"{CARD}: {name}: expected a list of parts, found {type_shown(found)}")
    return found


def text_or_none(part: Mapping[str, Any], name: str) -> str | None:
    """An entry that is a word, or null."""
    found = entry(part, name)
    if found is not None and not isinstance(found, str):
        raise Damaged(f"{CARD}: {name}: expected a word or null, found {type_shown(found)}")
    return found


def type_shown(value: Any) -> str:
    """A value that was not expected, with its type."""
    return f"{value!r:.40} ({type(value).__name__})"


def check_numbers(
    found: Mapping[str, Any], checks: Mapping[str, Check], part: str = "fitted"
) -> None:
    """Insist on every number of a part of the card."""
    for name, check in checks.items():
        as_damage(part, partial(check, name, entry(found, name, f"{CARD}: {part}")))


def as_damage(part: str, check: Callable[[], None]) -> None:
    """What a check of settings says, said of the card."""
    try:
        check()
    except ValueError as error:
        raise Damaged(f"{CARD}: {part}: {str(error).rstrip('.')}") from error


def check_known(part: str, given: Iterable[str], known: Iterable[str], of: str) -> None:
    """Refuse settings that nobody knows here."""
    unknown = sorted(set(given) - set(known))
    if unknown:
        raise Damaged(
            f"{CARD}: {part}: {unknown[0]!r:.60} is no setting of {of} in this gpmil. If a newer "
            "gpmil has written it, upgrade"
        )


def or_none(check: Check) -> Check:
    """The same, where null is as good."""
    return lambda name, value: None if value is None else check(name, value)


def residual(name: str, value: Any) -> None:
    """A number that may be infinite, or not known, where a fit was stopped."""
    if not is_number(value) or value < 0:
        raise ValueError(f"{name} must be a number >= 0, got {value!r:.40}.")


def parts(name: str, value: Any) -> None:
    """A list of parts, such as the history of a training."""
    if not isinstance(value, list) or not all(isinstance(v, dict) for v in value):
        raise ValueError(f"{name} must be a list of parts, got {value!r:.40}.")


def part(name: str, value: Any) -> None:
    """A part with names."""
    if not isinstance(value, dict):
        raise ValueError(f"{name} must be a part with names, got {value!r:.40}.")


def cohort(name: str, value: Any) -> None:
    """What a model remembers of the cohort it was fitted on."""
    part(name, value)
    for key in ("bags", "positive", "instances", "features", "edges"):
        if key in value:
            count(f"{name} {key}", value[key], least=0)
    for key in ("graph", "encoder"):
        if not isinstance(value.get(key, ""), str | None):
            raise ValueError(f"{name} {key} must be a word, got {value[key]!r:.40}.")


def trials(name: str, value: Any) -> None:
    """The settings that were tried."""
    parts(name, value)
    for trial in value:
        one_of(f"{name} kernel", trial.get("kernel"), tuple(KERNELS))
        for key in ("variance", "lengthscale", "mean", "coupling", "score", "objective"):
            if not is_number(trial.get(key)):
                raise ValueError(f"{name} {key} must be a number, got {trial.get(key)!r:.40}.")


def strength(name: str, value: Any) -> None:
    """How strongly neighbours are coupled, or smoothed."""
    number(name, value, least=0)
    try:
        check_strength(value)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from error


positive: Check = partial(number, above=0)
from_zero: Check = partial(count, least=0)
from_one: Check = partial(count, least=1)

COHORT: dict[str, Check] = {"n_features_in_": from_one, "cohort_": cohort}


# --- What belongs together ------------------------------------------------------------------------
def check_fitted(
    arrays: Arrays, expected: Expected, fitted: Mapping[str, Any], n_components: int | None
) -> Symbols:
    """The arrays of a model, the way from features to inputs among them; the sizes they bind."""
    sizes: Symbols = {"D": fitted["n_features_in_"]}
    sizes["d"] = sizes["D"] if n_components is None else n_components
    if (n_components is None) == ("feature_components_" in arrays):
        raise Damaged(
            f"{ARRAYS}: feature_components_: expected with n_components and not without it, and "
            f"{CARD} has n_components {n_components}"
        )
    check_arrays(arrays, expected, sizes)
    if sizes["scales"] != sizes["d"] and (n_components is None or sizes["scales"] != 1):
        raise Damaged(
            f"{ARRAYS}: feature_scale_: expected {sizes['d']} numbers, found {sizes['scales']}"
        )
    known = fitted["cohort_"].get("features", sizes["D"])
    if known != sizes["D"]:
        raise Damaged(f"{CARD}: cohort_ has {known} features, n_features_in_ is {sizes['D']}")
    return sizes


def check_weights(weights: Arrays, shapes: dict[str, Shape], kind: str, sizes: Symbols) -> None:
    """The weights of a network, all of them and no others."""
    others = sorted(set(weights) - set(shapes))
    if others:
        raise Damaged(f"{ARRAYS}: weights.{others[0]:.60}: no weight of the network in {CARD}")
    expected = {f"weights.{name}": Array(shape, kind) for name, shape in shapes.items()}
    check_arrays({f"weights.{name}": w for name, w in weights.items()}, expected, sizes)


def check_same(name: str, found: Any, expected: Any) -> None:
    """Refuse a part of the card that contradicts another."""
    if found != expected or type(found) is not type(expected):
        raise Damaged(
            f"{CARD}: {name}: expected {expected!r}, as settings say, found {found!r:.80}"
        )
