"""What a saved model must be, entry by entry: shapes in symbols, kinds of numbers.

A checksum that fits says that nothing was changed by accident, not that the numbers make a model:
another program, or a person, may have written them. So every array and every entry of the card is
checked before a model is made of them. A symbol in a shape stands for the size that it is first
met with: M inducing points, D features, d inputs of the kernel or of the network after PCA.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np

from gpmil.coupling.operator import check_strength
from gpmil.decide.calibration import SlideCalibrator
from gpmil.files.persistence import ARRAYS, CARD
from gpmil.models.checks import count, flag, is_number, number, one_of
from gpmil.process.kernels import KERNELS

Shape = tuple[str | int, ...]
Symbols = dict[str, int]  # the sizes met so far
Expected = Mapping[str, tuple[Shape, str]]
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


# --- The arrays of every model --------------------------------------------------------------------
FEATURES: Expected = {
    "classes_": ((2,), "classes"),
    "feature_mean_": (("D",), "finite"),
    "feature_components_": (("d", "D"), "orthonormal"),
    "feature_scale_": (("scales",), "positive"),
}
SPARSE_GP: Expected = {
    "inducing_points_": (("M", "D"), "finite"),
    "posterior_mean_": (("M",), "finite"),
    "posterior_covariance_": (("M", "M"), "covariance"),
    "whitened_mean_": (("M",), "finite"),
    "whitened_precision_": (("M", "M"), "precision"),
    "elbo_trace_": (("sweeps",), "trace"),
    "evidence_trace_": (("steps",), "trace"),
    "relevance_": (("d",), "positive"),
    "kernel_values": (("M",), "finite"),
}
OPTIONAL = ("feature_components_", "evidence_trace_", "relevance_", "kernel_values")
CROSS_FIT: Expected = {
    "cross_fit.labels": (("B",), "zero_one"),
    "cross_fit.groups": (("B",), "whole"),
    "cross_fit.fold": (("B",), "whole"),
    "cross_fit.fingerprints": (("B",), "whole"),
    "cross_fit.log_odds": (("B",), "finite"),
    "reference.scores": (("n",), "finite"),
    "reference.offsets": (("folds + 1",), "whole"),
    "reference.bag": (("n",), "whole"),
}
NETWORK: dict[str, Shape] = {
    "embed.weight": ("hidden_dim", "d"),
    "embed.bias": ("hidden_dim",),
    "classify.weight": (1, "hidden_dim"),
    "classify.bias": (1,),
}
ATTENTION: dict[str, Shape] = {
    "attend.weight": ("attention_dim", "hidden_dim"),
    "attend.bias": ("attention_dim",),
    "score.weight": (1, "attention_dim"),
}
GATE: dict[str, Shape] = {
    "gate.weight": ("attention_dim", "hidden_dim"),
    "gate.bias": ("attention_dim",),
}


def check_arrays(arrays: Arrays, expected: Expected, sizes: Symbols) -> None:
    """Insist on every array, its shape and its kind; new symbols are added to `sizes`."""
    for name, (shape, kind) in expected.items():
        if name not in arrays and name in OPTIONAL:
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
        raise Damaged(f"{CARD}: {name}: expected names with values, found {_type(found)}")
    return found


def listing(part: Mapping[str, Any], name: str) -> list[dict[str, Any]]:
    """An entry that is a list of parts with names in them."""
    found = entry(part, name)
    if not isinstance(found, list) or not all(isinstance(f, dict) for f in found):
        raise Damaged(f"{CARD}: {name}: expected a list of parts, found {_type(found)}")
    return found


def text_or_none(part: Mapping[str, Any], name: str) -> str | None:
    """An entry that is a word, or null."""
    found = entry(part, name)
    if found is not None and not isinstance(found, str):
        raise Damaged(f"{CARD}: {name}: expected a word or null, found {_type(found)}")
    return found


def _type(value: Any) -> str:
    return f"{value!r:.40} ({type(value).__name__})"


def check_numbers(fitted: Mapping[str, Any], checks: Mapping[str, Check]) -> None:
    """Insist on every number that a fit leaves."""
    for name, check in checks.items():
        as_damage("fitted", partial(check, name, entry(fitted, name)))


def as_damage(part: str, check: Callable[[], None]) -> None:
    """What a check of settings says, said of the card."""
    try:
        check()
    except ValueError as error:
        raise Damaged(f"{CARD}: {part}: {str(error).rstrip('.')}") from error


def check_known(part: str, given: Mapping[str, Any], known: Mapping[str, Any], of: str) -> None:
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


def cohort(name: str, value: Any) -> None:
    """What a model remembers of the cohort it was fitted on."""
    if not isinstance(value, dict):
        raise ValueError(f"{name} must be a part with names, got {value!r:.40}.")
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


def architecture(name: str, value: Any) -> None:
    """The arguments of a network; compared with the settings elsewhere."""
    if not isinstance(value, dict):
        raise ValueError(f"{name} must be a part with names, got {value!r:.40}.")


def strength(name: str, value: Any) -> None:
    """How strongly neighbours are coupled, or smoothed."""
    number(name, value, least=0)
    try:
        check_strength(value)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from error


_positive: Check = partial(number, above=0)
_counted: Check = partial(count, least=0)
_from_one: Check = partial(count, least=1)

COMMON: dict[str, Check] = {"n_features_in_": _from_one, "cohort_": cohort}
GP_NUMBERS: dict[str, Check] = COMMON | {
    "variance_": or_none(_positive),
    "lengthscale_": or_none(_positive),
    "mean_": number,
    "n_iter_": _counted,
    "converged_": flag,
    "residual_": residual,
}
COUPLED_NUMBERS: dict[str, Check] = {
    "coupling_": strength,
    "loo_log_likelihood_": or_none(number),
    "tuning_trace_": or_none(trials),
}
NETWORK_NUMBERS: dict[str, Check] = COMMON | {
    "architecture_": architecture,
    "n_epochs_": _from_one,
    "best_epoch_": _counted,
    "converged_": or_none(flag),
    "history_": parts,
}
SMOOTHING: dict[str, Check] = {"smooth_": strength}
ROUNDS: dict[str, Check] = COMMON | {
    "n_rounds_": _from_one,
    "converged_": flag,
    "history_": parts,
}


# --- What belongs together ------------------------------------------------------------------------
def check_features(arrays: Arrays, fitted: Mapping[str, Any], n_components: int | None) -> Symbols:
    """The way from features to inputs; the sizes D and d it binds."""
    sizes: Symbols = {"D": fitted["n_features_in_"]}
    sizes["d"] = sizes["D"] if n_components is None else n_components
    if (n_components is None) == ("feature_components_" in arrays):
        raise Damaged(
            f"{ARRAYS}: feature_components_: expected with n_components and not without it, and "
            f"{CARD} has n_components {n_components}"
        )
    check_arrays(arrays, FEATURES, sizes)
    if sizes["scales"] != sizes["d"] and (n_components is None or sizes["scales"] != 1):
        raise Damaged(
            f"{ARRAYS}: feature_scale_: expected {sizes['d']} numbers, found {sizes['scales']}"
        )
    known = fitted["cohort_"].get("features", sizes["D"])
    if known != sizes["D"]:
        raise Damaged(f"{CARD}: cohort_ has {known} features, n_features_in_ is {sizes['D']}")
    return sizes


def check_cross_fit(arrays: Arrays, n_folds: int, n_features: list[int]) -> None:
    """Labels, folds and scores of the bags that calibrate a model."""
    check_arrays(arrays, CROSS_FIT, {"folds + 1": n_folds + 1})
    fold, offsets = arrays["cross_fit.fold"], arrays["reference.offsets"]
    if not np.array_equal(np.unique(fold), np.arange(n_folds)):
        raise Damaged(f"{ARRAYS}: cross_fit.fold: expected the folds 0 to {n_folds - 1}, all used")
    n = len(arrays["reference.scores"])
    if offsets[0] != 0 or offsets[-1] != n or (np.diff(offsets) <= 0).any():
        raise Damaged(f"{ARRAYS}: reference.offsets: expected rising numbers from 0 to {n}")
    falls = np.diff(arrays["reference.scores"]) < 0
    falls[offsets[1:-1] - 1] = False  # from one fold to the next
    if falls.any():
        raise Damaged(f"{ARRAYS}: reference.scores: expected ascending numbers in every fold")
    if len(set(n_features)) > 1:
        raise Damaged(f"{CARD}: folds: expected one number of features, found {n_features}")


def calibrator(card: Any) -> SlideCalibrator | None:
    """From its part of the card."""
    if card is None:
        return None
    if not isinstance(card, dict):
        raise Damaged(f"{CARD}: calibrator: expected names with values, found {_type(card)}")
    check_known("calibrator", card, vars(SlideCalibrator()), "a calibrator")
    for name in vars(SlideCalibrator()):
        entry(card, name, f"{CARD}: calibrator")
    as_damage("calibrator", partial(_check_calibrator, card))
    return SlideCalibrator.from_dict(card)


def _check_calibrator(card: dict[str, Any]) -> None:
    one_of("method", card["method"], ("sigmoid", "isotonic"))
    number("slope", card["slope"], least=0)
    number("intercept", card["intercept"])
    for name in ("knots", "values"):
        if not isinstance(card[name], list):
            raise ValueError(f"{name} must be a list of numbers, got {card[name]!r:.40}.")
        for value in card[name]:
            number(name, value)
    if len(card["knots"]) != len(card["values"]):
        raise ValueError("knots and values must be equally many.")
    if card["method"] == "isotonic" and not card["knots"]:
        raise ValueError("knots must not be empty.")
    rises = all((np.diff(card[name]) >= 0).all() for name in ("knots", "values"))
    if not rises or not all(0 <= v <= 1 for v in card["values"]):
        raise ValueError("knots and values must not fall, and values lie between 0 and 1.")


def check_weights(weights: Arrays, shapes: dict[str, Shape], kind: str, sizes: Symbols) -> None:
    """The weights of a network, all of them and no others."""
    others = sorted(set(weights) - set(shapes))
    if others:
        raise Damaged(f"{ARRAYS}: weights.{others[0]:.60}: no weight of the network in {CARD}")
    expected = {f"weights.{name}": (shape, kind) for name, shape in shapes.items()}
    check_arrays({f"weights.{name}": w for name, w in weights.items()}, expected, sizes)


def check_same(name: str, found: Any, expected: Any) -> None:
    """Refuse a part of the card that contradicts another."""
    if found != expected or type(found) is not type(expected):
        raise Damaged(
            f"{CARD}: {name}: expected {expected!r}, as settings say, found {found!r:.80}"
        )
