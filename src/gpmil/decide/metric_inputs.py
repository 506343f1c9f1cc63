"""What metrics are given, checked: labels, probabilities, decisions, bags and patients."""

from numbers import Integral, Real
from typing import Any, get_args

import numpy as np
import pandas as pd
from jaxtyping import Bool, Float, Int

from gpmil.data.checks import UNKNOWN, as_array, as_groups, as_names, encode_instance_labels, listed
from gpmil.data.folds import codes
from gpmil.decide.measures import Binning

LABELS = (
    "Leave out bags without a label (-1), as in bags[bags.labels >= 0]; make classes with other "
    'names 0 and 1, as in (y == "cancer").'
)
FLAGS = "Pass what was decided, as in (p > 0.3) or predict_instances(bags).flagged."


def _vector(values: Any, name: str, n: int | None, each: str) -> np.ndarray:
    """One value per bag (or patch), (n,); a column of Python objects as one of numbers if it is."""
    array = as_array(values, name)
    expected = f"one value per {each}" + ("" if n is None else f", {n:,} in all")
    if array.ndim == 2 and array.shape[1] == 2 and name in ("p", "score"):
        raise ValueError(
            f"{name}: expected {expected}, found shape {array.shape}: both columns of "
            "predict_proba? Take the second, predict_proba(bags)[:, 1]."
        )
    if array.ndim != 1 or n not in (None, len(array)):
        raise ValueError(f"{name}: expected {expected}, found shape {array.shape}.")
    if not len(array):
        raise ValueError(f"{name}: expected {expected}, found none: an empty cohort or split?")
    if array.dtype == object:
        array = np.array([np.nan if v is None or v is pd.NA else v for v in array])
    return array


def zero_or_one(
    values: Any, name: str, n: int | None, each: str, advice: str
) -> Float[np.ndarray, " n"]:
    """One 0 or 1 per bag (or patch)."""
    array = _vector(values, name, n, each)
    # Text is refused before np.isin, which takes "1" for 1.
    other = ~np.isin(array, (0, 1)) if array.dtype.kind in "biuf" else np.full(len(array), True)
    if other.any():
        raise ValueError(
            f"{name}: expected 0 or 1, found {listed(array[other])} ({int(other.sum()):,} of "
            f"{len(array):,}). {advice}"
        )
    return array.astype(np.float64)


def bag_labels(y: Any) -> Float[np.ndarray, " B"]:
    """One label per bag, 0 or 1."""
    return zero_or_one(y, "y", None, "bag", LABELS)


def patch_labels(labels: Any) -> Int[np.ndarray, " N"]:
    """0, 1 or -1 per patch, some of them known."""
    array = _vector(labels, "labels", None, "patch")
    encoded = encode_instance_labels(array, len(array))
    if (encoded == UNKNOWN).all():
        raise ValueError(
            f"labels: all {len(encoded):,} are unknown (-1), so patches cannot be judged. Were "
            "instance_labels given when the bags were built?"
        )
    return encoded


def finite(values: Any, name: str, n: int, each: str) -> Float[np.ndarray, " n"]:
    """Finite numbers, in the precision they came in."""
    array = _vector(values, name, n, each)
    if array.dtype.kind not in "biuf":
        raise ValueError(f"{name}: expected numbers, found {listed(array)}.")
    if array.dtype.kind != "f" or array.dtype.itemsize > 8:
        array = array.astype(np.float64)
    bad = np.flatnonzero(~np.isfinite(array))
    if len(bad):
        raise ValueError(
            f"{name}: expected finite numbers, found {array[bad[0]]} in row {bad[0]} "
            f"({len(bad):,} of {len(array):,}): did a model diverge, or a join leave gaps?"
        )
    return array


def probabilities(values: Any, name: str, n: int, each: str) -> Float[np.ndarray, " n"]:
    """One probability per bag (or patch)."""
    array = finite(values, name, n, each)
    if array.min() < 0 or array.max() > 1:
        raise ValueError(
            f"{name}: expected probabilities between 0 and 1, found {array.min():.4g} to "
            f"{array.max():.4g}: log odds or means? Pass predict_proba(bags)[:, 1], or "
            "predict_instances(bags).probability."
        )
    return array


def decided(
    decision: Any, p: Float[np.ndarray, " n"], threshold: float, each: str
) -> Bool[np.ndarray, " n"]:
    """Which bags (or patches) are taken for positive: as decided, or above the threshold."""
    if decision is not None:
        return zero_or_one(decision, "decision", len(p), each, FLAGS) == 1
    if not isinstance(threshold, Real) or not 0 <= threshold <= 1:
        raise ValueError(f"threshold: expected a probability between 0 and 1, found {threshold!r}.")
    return p > threshold


def bag_numbers(bag_index: Any, n: int) -> Int[np.ndarray, " N"]:
    """The number of each patch's bag, counted from 0."""
    array = _vector(bag_index, "bag_index", n, "patch")
    if array.dtype.kind not in "iu" or array.min() < 0:
        raise ValueError(
            "bag_index: expected the number of each patch's bag, counted from 0, found "
            f"{listed(array)}. Pass bags.bag_index, or pandas.factorize(names)[0]."
        )
    return array.astype(np.int64)


def patient_numbers(groups: Any, n_bags: int) -> Int[np.ndarray, " B"]:
    """The number of each bag's patient, counted from 0."""
    shape = as_array(groups, "groups").shape
    if shape != (n_bags,):
        raise ValueError(
            f"groups: expected the patient of each bag, {n_bags:,} in all, found shape {shape}. "
            "Of patches pass all, with label -1 where unknown, and groups still one per bag."
        )
    return codes(np.asarray(as_groups(groups, as_names(None, n_bags))))


def check_settings(
    n_bootstrap: int, level: float, seed: int, n_bins: int, binning: Binning
) -> None:
    """Refuse settings that make no interval."""
    if not isinstance(n_bootstrap, Integral) or n_bootstrap < 1:
        raise ValueError(f"n_bootstrap: expected a whole number from 1, found {n_bootstrap!r}.")
    if not isinstance(seed, Integral) or seed < 0:
        raise ValueError(f"seed: expected a whole number from 0, found {seed!r}.")
    check_level(level)
    check_bins(n_bins, binning)


def check_level(level: float) -> None:
    """Refuse a level that is no share."""
    if not isinstance(level, Real) or not 0 < level < 1:
        raise ValueError(f"level: expected a share between 0 and 1, such as 0.95, found {level!r}.")


def check_bins(n_bins: int, binning: Binning) -> None:
    """Refuse bins that cannot be made."""
    if not isinstance(n_bins, Integral) or n_bins < 1:
        raise ValueError(f"n_bins: expected a whole number from 1, found {n_bins!r}.")
    if binning not in get_args(Binning):
        raise ValueError(f"binning: expected 'mass' or 'width', found {binning!r}.")
