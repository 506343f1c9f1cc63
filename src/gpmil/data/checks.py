"""What `Bags` is given, as it keeps it: features, offsets, names, groups and labels.

Each function turns one argument into an array of known shape and type, or raises a ValueError
that says what was expected, what was found, in which bag, and what to do.  What is odd but no
error is logged.  Positions and neighbour graphs are in ``gpmil.data.positions``.
"""

import logging
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import pandas as pd
from jaxtyping import Float, Int
from scipy.sparse import csr_array, issparse

from gpmil.data import classes
from gpmil.data.neighbours import Offsets

logger = logging.getLogger("gpmil")

UNKNOWN = -1
"""Label of an unlabelled bag, or of an instance nobody has looked at."""

SHOWN = 5
"""Names or values listed in a message before "..."."""

PerBag = Int[np.ndarray, " bags"]
PerInstance = Int[np.ndarray, " n"]


# ------------------------------------------------------------------ words of a message


def count(n: int, noun: str) -> str:
    """A number and its noun.

    >>> count(1, "bag"), count(2713, "instance"), count(1, "patch"), count(2, "patch")
    ('1 bag', '2,713 instances', '1 patch', '2 patches')
    """
    several = "es" if noun.endswith(("s", "x", "ch", "sh")) else "s"
    return f"{n:,} {noun}" if n == 1 else f"{n:,} {noun}{several}"


def listed(values: Iterable[Any]) -> str:
    """The first few distinct values, for a message.

    >>> listed(["a", "b", "a", 3.5])
    "'a', 'b', 3.5"
    """
    words = list(dict.fromkeys(f"'{v}'" if isinstance(v, str) else str(v) for v in values))
    more = f", ... ({len(words)} in all)" if len(words) > SHOWN else ""
    return ", ".join(words[:SHOWN]) + more


def all_columns(names: Iterable[Any]) -> str:
    """Every column of a table, for a message; those numbered alike, as features are, in one.

    >>> all_columns(["Slide", "x", *(f"f{k}" for k in range(1024))])
    "'Slide', 'x', 'f0' to 'f1023'"
    """
    alike: dict[str, list[str]] = {}
    for name in map(str, names):
        beginning = name.rstrip("0123456789")
        alike.setdefault(beginning if beginning != name else f"{name} ", []).append(name)
    several = [
        [f"'{group[0]}' to '{group[-1]}'"] if len(group) > 3 else [f"'{n}'" for n in group]
        for group in alike.values()
    ]
    return ", ".join(word for words in several for word in words)


# ------------------------------------------------------------------ arrays and lists


def as_array(values: Any, name: str) -> np.ndarray:
    """Anything as an array, with a readable error; a memmap stays one."""
    if issparse(values):
        raise ValueError(f"{name}: expected a dense array, found a sparse matrix; use .toarray()")
    if isinstance(values, np.memmap):
        return values
    try:
        return np.asarray(values)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(f"{name}: cannot be read as an array: {error}") from None


def column(values: Any, name: str, length: int, each: str = "bag") -> np.ndarray:
    """One value per bag (or instance), (length,); of Python objects unless it was an array."""
    if not _is_list_like(values):
        raise ValueError(f"{name}: expected one value per {each}, found {values!r}")
    if hasattr(values, "__array__"):
        array = as_array(values, name)
        found = f"shape {array.shape}"
    else:
        # Not np.asarray: a list with None, text and numbers must keep them as they are.
        array = np.fromiter(values, dtype=object)
        found = str(len(array))
    if array.shape != (length,):
        raise ValueError(f"{name}: expected one value per {each}, {length} in all, found {found}")
    return array


def one_per_bag(values: Any, name: str, names: np.ndarray | None = None) -> list[Any]:
    """A list with one array per bag, as many as there are `names`."""
    if not _is_list_like(values):
        raise ValueError(f"{name}: expected one array per bag, found {type(values).__name__}")
    parts = list(values)
    if names is not None and len(parts) != len(names):
        raise ValueError(
            f"{name}: expected one array per bag, {len(names)} in all, found {len(parts)}"
        )
    if not parts:
        raise ValueError(f"{name}: expected one array per bag, found none")
    return parts


def _is_list_like(values: Any) -> bool:
    return isinstance(values, Iterable) and not isinstance(values, (str, bytes, Mapping))


def concatenate(parts: list[np.ndarray], name: str, noun: str, names: np.ndarray) -> np.ndarray:
    """The (n_b, D) arrays of all bags as one, (N, D); `noun` is what D counts."""
    widths = np.array([part.shape[1] for part in parts])
    other = np.flatnonzero(widths != widths[0])
    if len(other):
        raise ValueError(
            f"{name}: bag '{names[0]}' has {widths[0]} {noun}, bag '{names[other[0]]}' has "
            f"{widths[other[0]]}; all bags need the same"
        )
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


def factorize(values: Any, name: str) -> tuple[Int[np.ndarray, " n"], Any]:
    """``pandas.factorize`` with a readable error: codes (-1 where missing), distinct values."""
    try:
        return pd.factorize(values)
    except TypeError:
        kinds = listed(type(v).__name__ for v in values)
        raise ValueError(
            f"{name}: expected text or numbers, found values of type {kinds}"
        ) from None


# ------------------------------------------------------------------ features, offsets, names


def as_features(features: Any, name: str, n: int | None = None) -> Float[np.ndarray, "n d"]:
    """An (n, D) floating array; a memmap stays one, integers become float64."""
    array = as_array(features, name)
    if array.ndim != 2 or array.shape[1] == 0:
        raise ValueError(
            f"{name}: expected two axes, (instances, features), found shape {array.shape}"
        )
    if n is not None and len(array) != n:
        raise ValueError(f"{name}: expected one row per instance, {n}, found {len(array)}")
    if array.dtype.kind in "iub":
        return np.ascontiguousarray(array, dtype=np.float64)
    if array.dtype.kind != "f" or array.dtype.itemsize > 8:
        raise ValueError(f"{name}: expected float16, 32 or 64, found type {array.dtype}")
    if isinstance(array, np.memmap) and array.dtype.isnative:
        return array
    return np.ascontiguousarray(array, dtype=array.dtype.newbyteorder("="))


def join_features(arrays: Any, names: Any) -> tuple[Float[np.ndarray, "n d"], PerBag, np.ndarray]:
    """Features given bag by bag as one array (N, D), the sizes of the bags, and their names."""
    parts = one_per_bag(arrays, "arrays")
    names = as_names(names, len(parts))
    refuse_same_names(names)
    parts = [as_features(a, f"arrays, bag '{who}'") for a, who in zip(parts, names)]
    sizes = np.array([len(part) for part in parts])
    require_instances(offsets_of(sizes), names)
    return concatenate(parts, "arrays", "features", names), sizes, names


def offsets_of(sizes: Int[np.ndarray, " any"]) -> Offsets:
    """Where bags of these sizes begin, and where the last one ends.

    >>> offsets_of(np.array([4, 1, 6]))
    array([ 0,  4,  5, 11])
    """
    return np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)


def as_offsets(offsets: Any, n: int) -> Offsets:
    """Offsets as int64, rising from 0 to `n`."""
    array = as_array(offsets, "offsets")
    if array.ndim != 1 or len(array) < 2 or array.dtype.kind not in "iu":
        raise ValueError(
            "offsets: expected B + 1 integers, where each bag begins and the last one ends, "
            f"found shape {array.shape} and type {array.dtype}"
        )
    if array[0] != 0 or array[-1] != n or (array[1:] < array[:-1]).any():
        raise ValueError(
            f"offsets: expected to rise from 0 to {n}, the rows of features, found {listed(array)}"
        )
    return array.astype(np.int64)


def require_instances(offsets: Offsets, names: np.ndarray) -> None:
    """Raise ValueError, naming the bags, if one has no instance."""
    empty = names[np.diff(offsets) == 0]
    if len(empty):
        raise ValueError(f"{count(len(empty), 'bag')} without an instance: {listed(empty)}")


def as_names(names: Any, n_bags: int) -> np.ndarray:
    """Names as text, (B,); by default "bag0", "bag1", ..., so padded that they sort."""
    if names is None:
        digits = len(str(max(0, n_bags - 1)))
        return np.array([f"bag{b:0{digits}d}" for b in range(n_bags)])
    values = column(names, "names", n_bags)
    if pd.isna(values).any():
        raise ValueError(f"names: missing for bag {np.flatnonzero(pd.isna(values))[0]}")
    return np.array([str(v) for v in values])


def refuse_same_names(names: np.ndarray) -> None:
    """A new cohort names each bag once; only a subset may hold a bag twice."""
    unique, times = np.unique(names, return_counts=True)
    if (times > 1).any():
        raise ValueError(
            f"names: every bag needs its own, found more than once: {listed(unique[times > 1])}"
        )


def as_groups(groups: Any, names: np.ndarray) -> np.ndarray | None:
    """Groups, (B,), as integers where they are whole numbers, else as text."""
    if groups is None:
        return None
    values = column(groups, "groups", len(names))
    missing = pd.isna(values)
    if missing.any():
        raise ValueError(f"groups: missing for {listed(names[missing])}")
    whole = all(_is_whole(v) for v in values)
    return values.astype(np.int64) if whole else np.array([str(v) for v in values])


def _is_whole(value: Any) -> bool:
    real = isinstance(value, (int, float, np.integer, np.floating))
    return real and abs(value) < 2**53 and float(value).is_integer()


# ------------------------------------------------------------------ labels


def encode_labels(
    labels: Any, n_bags: int, positive: Any, negative: Any = None, exclude: Any = None
) -> tuple[PerBag, tuple[str, str] | None]:
    """0, 1 or -1 per bag, and the names of classes 0 and 1 where they were chosen by name."""
    if labels is None:
        return np.full(n_bags, UNKNOWN), None
    values = column(labels, "labels", n_bags)
    if positive is None and negative is None and exclude is None:
        encoded = _zero_one(values)
        if encoded is None:
            raise ValueError(
                f"labels: expected 0, 1 or -1 (unlabelled), found {listed(values)}. "
                'With other labels say which one is positive, as in positive="cancer".'
            )
        return encoded, None
    factorize(values, "labels")  # refuses what is neither text nor a number
    found = classes.encode(values, positive, negative, exclude)
    for note in found.notes:
        logger.warning("labels: %s", note)
    return found.values, found.names


def encode_instance_labels(labels: Any, n: int) -> PerInstance:
    """0, 1 or -1 per instance, (n,)."""
    if labels is None:
        return np.full(n, UNKNOWN)
    values = column(labels, "instance_labels", n, "instance")
    encoded = _zero_one(values)
    if encoded is None:
        raise ValueError(f"instance_labels: expected 0, 1 or -1 (unknown), found {listed(values)}")
    return encoded


def _zero_one(values: np.ndarray) -> PerInstance | None:
    """Values as 0, 1 or -1 (missing too), or None where one is something else."""
    if values.dtype == object:
        values = np.where(pd.isna(values), UNKNOWN, values)
        if not all(isinstance(v, (bool, int, float, np.bool_, np.number)) for v in values):
            return None
    if values.dtype.kind not in "biufO":
        return None
    numbers = np.nan_to_num(values.astype(np.float64), nan=UNKNOWN)
    return numbers.astype(np.int64) if np.isin(numbers, (0, 1, UNKNOWN)).all() else None


def join_instance_labels(labels: Any, sizes: PerBag, names: np.ndarray) -> np.ndarray | None:
    """Instance labels given bag by bag as one column, (N,); None for a bag is unknown."""
    if labels is None:
        return None
    parts = one_per_bag(labels, "instance_labels", names)
    full = [
        np.full(n, UNKNOWN)
        if part is None
        else column(part, f"instance_labels of bag '{name}'", int(n), "instance")
        for part, n, name in zip(parts, sizes, names)
    ]
    return np.concatenate(full)


def mention_contradictions(
    instance_labels: PerInstance, labels: PerBag, offsets: Offsets, names: np.ndarray
) -> None:
    """Annotations are noisy: a positive instance in a negative bag is said, not refused."""
    holds = np.logical_or.reduceat(instance_labels == 1, offsets[:-1])
    odd = names[holds & (labels == 0)]
    if len(odd):
        logger.warning(
            "%s labelled negative with instances labelled positive: %s",
            count(len(odd), "bag"),
            listed(odd),
        )


def frozen(value: Any) -> Any:
    """The same array (or sparse matrix) read-only, without touching the owner's flags."""
    if issparse(value):
        parts = tuple(frozen(part) for part in (value.data, value.indices, value.indptr))
        value = csr_array(parts, shape=value.shape)
        # All our graphs are canonical; finding that out again would cost a pass over them.
        value.has_sorted_indices = value.has_canonical_format = True
    elif isinstance(value, np.ndarray):
        value = value.view()
        value.flags.writeable = False
    return value
