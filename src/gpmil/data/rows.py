"""Rows of a cohort: those of chosen bags, with their features and their graph.

Features may lie in a file. They are then gone through some rows at a time, and the rows of a large
subset go to another file.
"""

import tempfile
from collections.abc import Iterator
from typing import Any

import numpy as np
from jaxtyping import Int
from scipy.sparse import csr_array

from gpmil.data.neighbours import Offsets

Chosen = Int[np.ndarray, " chosen"]  # numbers of bags
NewOffsets = Int[np.ndarray, " chosen_and_one"]
Rows = slice | Int[np.ndarray, " rows"]

ROOM = 1 << 28  # bytes of a subset of a file that are read into memory
CHUNK = 1 << 24  # values looked at, or copied, at a time, so that a memmap stays one


def chosen(key: Any, n_bags: int) -> Chosen:
    """Bag numbers that an index asks for."""
    if isinstance(key, tuple) and len(key) == 2 and key[1] is Ellipsis:
        key = key[0]  # how scikit-learn indexes arrays of any number of axes
    if isinstance(key, slice):
        return np.arange(*key.indices(n_bags))
    if isinstance(key, tuple):
        raise IndexError(f"Bags have one axis: use a list, bags[{list(key)}]")
    index = np.asarray(key)
    if index.dtype == bool and index.ndim == 1:
        if len(index) != n_bags:
            raise IndexError(f"boolean mask: expected {n_bags} entries, found {len(index)}")
        return np.flatnonzero(index)
    if index.size == 0 and index.ndim == 1:
        index = index.astype(np.int64)  # to numpy an empty list is one of floats
    if index.dtype.kind not in "iu" or index.ndim > 1:
        raise IndexError(
            "Bags are indexed by int, slice, list of ints or boolean mask, "
            f"found {key!r}. By name: bags[bags.names == name]."
        )
    return _from_the_front(np.atleast_1d(index).astype(np.int64), n_bags)


def _from_the_front(index: Chosen, n_bags: int) -> Chosen:
    """Negative numbers count from the end; those out of range raise IndexError."""
    outside = (index < -n_bags) | (index >= n_bags)
    if outside.any():
        raise IndexError(f"bag {index[outside][0]} is out of range for {n_bags} bags")
    return np.where(index < 0, index + n_bags, index)


def rows_of(offsets: Offsets, chosen: Chosen, new_offsets: NewOffsets) -> Rows:
    """Rows of the chosen bags; a slice (no copy) where they lie together in order."""
    if len(chosen) and (np.diff(chosen) == 1).all():
        return slice(int(offsets[chosen[0]]), int(offsets[chosen[-1] + 1]))
    shift = offsets[chosen] - new_offsets[:-1]
    return np.arange(new_offsets[-1]) + np.repeat(shift, np.diff(new_offsets))


def take_features(features: np.ndarray, rows: Rows) -> np.ndarray:
    """The rows; those of a large file go to another file, not into memory.

    The file has no name and is gone with the array. A slice stays a view of the first one.
    """
    if isinstance(rows, slice) or not isinstance(features, np.memmap):
        return features[rows]
    if len(rows) * features.shape[1] * features.itemsize <= ROOM:
        return features[rows]
    with tempfile.TemporaryFile() as file:
        shape = (len(rows), features.shape[1])
        taken = np.memmap(file, dtype=features.dtype, mode="w+", shape=shape)
        step = max(1, CHUNK // features.shape[1])
        for start in range(0, len(rows), step):
            taken[start : start + step] = features[rows[start : start + step]]
    return taken


def take_blocks(
    adjacency: csr_array, offsets: Offsets, chosen: Chosen, new_offsets: NewOffsets, rows: Rows
) -> csr_array:
    """Diagonal blocks of the chosen bags: their rows, with the columns moved along."""
    n = int(new_offsets[-1])
    part = adjacency[rows]
    # column - start of the bag there + start of the bag here
    shift = np.repeat(new_offsets[:-1] - offsets[chosen], np.diff(new_offsets))
    columns = part.indices + np.repeat(shift, np.diff(part.indptr))
    return csr_array((part.data, columns.astype(part.indices.dtype), part.indptr), shape=(n, n))


def count_not_finite(features: np.ndarray) -> Int[np.ndarray, " n"]:
    """How many values of each row are NaN or infinite, (N,)."""
    bad = np.zeros(len(features), dtype=np.int64)
    step = max(1, CHUNK // max(1, features.shape[1]))
    for start in range(0, len(features), step):
        finite = np.isfinite(features[start : start + step])
        if not finite.all():
            bad[start : start + step] = (~finite).sum(axis=1)
    return bad


def batches(sizes: Int[np.ndarray, " B"], most: int = 20_000) -> Iterator[Int[np.ndarray, " b"]]:
    """Bags in order, about `most` instances at a time; the same for the same cohort.

    >>> [b.tolist() for b in batches(np.array([3, 4, 9, 1]), most=8)]
    [[0, 1], [2], [3]]
    """
    start, total = 0, 0
    for b, n in enumerate(sizes):
        if total and total + n > most:
            yield np.arange(start, b)
            start, total = b, 0
        total += int(n)
    if start < len(sizes):
        yield np.arange(start, len(sizes))
