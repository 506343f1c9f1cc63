"""Where the instances of `Bags` lie and which are neighbours: coordinates, step and graph.

Arguments are converted and checked as in ``gpmil.data.checks``; ``gpmil.data.graphs`` makes the
graph.  A step that has to be inferred is logged; a graph that came out empty where it should
not have is a warning, in the name of the code that called gpmil.
"""

import logging
from typing import Any

import numpy as np
from jaxtyping import Float
from scipy.sparse import csr_array, issparse

from gpmil.data import graphs
from gpmil.data.checks import SHOWN, PerBag, as_array, concatenate, count, listed, one_per_bag
from gpmil.data.lattice import infer_step
from gpmil.data.neighbours import BagIndex, Coords, Offsets, bag_index
from gpmil.warn import warn_caller

logger = logging.getLogger("gpmil")

FARTHEST = 1e15
"""Positions beyond are damage: whole numbers so large are no longer exact in float64."""
MANY_INSTANCES = 10
"""A bag of this many instances without a single edge is worth a warning."""

Steps = Float[np.ndarray, "bags k"]


# ------------------------------------------------------------------ coordinates


def join_coords(coords: Any, sizes: PerBag, names: np.ndarray) -> Coords | None:
    """Positions given bag by bag as one array, (N, k)."""
    if coords is None:
        return None
    arrays = []
    for part, n, name in zip(one_per_bag(coords, "coords", names), sizes, names):
        array = _positions(part, f"coords of bag '{name}'")
        if len(array) != n:
            raise ValueError(f"coords of bag '{name}': expected {n} rows, found {len(array)}")
        arrays.append(array)
    return concatenate(arrays, "coords", "axes", names)


def as_coords(coords: Any, offsets: Offsets, names: np.ndarray) -> Coords | None:
    """Positions as (N, k) float64: finite, and no two instances of a bag at one place."""
    if coords is None:
        return None
    array = _positions(coords, "coords")
    if len(array) != offsets[-1]:
        raise ValueError(
            f"coords: expected one row per instance, {offsets[-1]} in all, found {len(array)}"
        )
    bag = bag_index(offsets)
    bad = ~np.isfinite(array).all(axis=1)
    if bad.any():
        raise ValueError(
            f"coords: {count(int(bad.sum()), 'position')} NaN or infinite, "
            f"in {listed(names[np.unique(bag[bad])])}"
        )
    far = (np.abs(array) > FARTHEST).any(axis=1)
    if far.any():
        raise ValueError(
            f"coords: {count(int(far.sum()), 'position')} beyond {FARTHEST:g}, "
            f"in {listed(names[np.unique(bag[far])])}: no slide is so large"
        )
    _refuse_duplicates(array, bag, names)
    return array


def _positions(values: Any, name: str) -> Coords:
    """Positions as (n, k) float64; (n,) is (n, 1)."""
    if values is None:
        raise ValueError(f"{name}: missing; give positions to all bags or to none")
    array = as_array(values, name)
    if array.dtype.kind not in "iuf":
        raise ValueError(f"{name}: expected numbers, found type {array.dtype}")
    array = array[:, None] if array.ndim == 1 else array
    if array.ndim != 2 or array.shape[1] not in (1, 2, 3):
        raise ValueError(f"{name}: expected (n, 1), (n, 2) or (n, 3), found shape {array.shape}")
    return array.astype(np.float64)


def _refuse_duplicates(coords: Coords, bag: BagIndex, names: np.ndarray) -> None:
    order = np.lexsort((*coords.T, bag))
    same = (coords[order[1:]] == coords[order[:-1]]).all(axis=1)
    again = order[1:][same & (bag[order[1:]] == bag[order[:-1]])]
    if len(again):
        first = again[0]
        place = ", ".join(f"{c:.10g}" for c in coords[first])
        times = int((coords[bag == bag[first]] == coords[first]).all(axis=1).sum())
        raise ValueError(
            f"coords: bag '{names[bag[first]]}' has {times} instances at ({place}); "
            f"{count(len(again), 'duplicate')} in {count(len(np.unique(bag[again])), 'bag')}. "
            "Remove the duplicates, or make a bag of each region or scan."
        )


# ------------------------------------------------------------------ the step


def as_step(step: Any, names: np.ndarray, coords: Coords | None) -> Steps | None:
    """The step as (B, k), whichever way it was given, checked to be positive."""
    if step is None or coords is None:
        return None
    array = _spread_step(step, (len(names), coords.shape[1]))
    bad = ~(np.isfinite(array) & (array > 0)).all(axis=1)
    if bad.any():
        raise ValueError(
            f"step: expected positive numbers, found {array[bad][0].tolist()} "
            f"for {listed(names[bad])}"
        )
    return array


def _spread_step(step: Any, shape: tuple[int, int]) -> Steps:
    """One number, one per axis, one per bag or all of them, as (B, k) = `shape`."""
    array = as_array(step, "step")
    if array.dtype.kind not in "iuf":
        raise ValueError(f"step: expected numbers, found {step!r}")
    if array.ndim == 1:
        array = array[None, :] if _is_one_per_axis(step, array, shape) else array[:, None]
    if array.ndim > 2 or any(a not in (1, b) for a, b in zip(array.shape, shape)):
        raise ValueError(
            f"step: expected one number, {shape[1]} (one per axis), {shape[0]} (one per bag) or "
            f"an array {shape}, found shape {np.shape(step)}"
        )
    return np.broadcast_to(array, shape).astype(np.float64)


def _is_one_per_axis(step: Any, array: np.ndarray, shape: tuple[int, int]) -> bool:
    """Whether a row of steps is one per axis; where B = k a tuple is, a list or array is not."""
    n_bags, k = shape
    if len(array) != n_bags or len(array) != k or (array == array[0]).all():
        return len(array) == k
    by_axis = isinstance(step, tuple)
    logger.warning(
        "step: %d numbers for %d bags with %d axes were read as one per %s; "
        "a tuple is one per axis, a list or array one per bag",
        *(len(array), n_bags, k),
        "axis" if by_axis else "bag",
    )
    return by_axis


def _inferred_step(coords: Coords, offsets: Offsets) -> Steps | None:
    """The step that the coordinates show, or None; either way it is said."""
    step = infer_step(coords, offsets)
    if np.isfinite(step).all():
        logger.warning("step not given; the coordinates show %s", _describe_steps(step))
        return step
    if (np.diff(offsets) > 1).any():
        warn_caller(
            "step not given and not to be inferred: the instances do not lie in lines. "
            'The graph is empty. Give step=, or use graph="knn" or "radius".'
        )
    return None


def _describe_steps(step: Steps) -> str:
    """Such as "1024 x 1024 (27 bags), 512 x 512 (3 bags)"."""
    rows, times = np.unique(step.round(6), axis=0, return_counts=True)
    parts = [
        f"{' x '.join(f'{s:.10g}' for s in rows[i])} ({count(int(times[i]), 'bag')})"
        for i in np.argsort(-times, kind="stable")[:SHOWN]
    ]
    return ", ".join(parts) + (", ..." if len(rows) > SHOWN else "")


# ------------------------------------------------------------------ the graph


def graph_from_coords(
    coords: Coords | None,
    offsets: Offsets,
    names: np.ndarray,
    graph: str | None,
    step: Steps | None,
    radius: Any,
    n_neighbors: int,
) -> tuple[csr_array, str | None, Steps | None]:
    """The N x N adjacency that coordinates (or the order of rows) make, its kind and the step.

    A step that is needed and not given is inferred; where it cannot be, there are no edges.
    """
    graphs.check_graph(graph)
    if coords is None:
        graph = graph if graph == "chain" else None
        return graphs.adjacency_from_coords(None, offsets, graph), graph, step
    needs_step = graph in ("grid4", "grid8") or (graph == "radius" and radius is None)
    if needs_step and step is None:
        step = _inferred_step(coords, offsets)
    made = None if needs_step and step is None else graph
    adjacency = graphs.adjacency_from_coords(coords, offsets, made, step, radius, n_neighbors)
    if made is not None:
        _warn_without_edges(adjacency, coords, offsets, names, step)
    return adjacency, graph, step


def graph_from_edges(edges: Any, offsets: Offsets, names: np.ndarray) -> csr_array:
    """The N x N adjacency of edges given bag by bag."""
    return graphs.adjacency_from_edges(one_per_bag(edges, "edges", names), offsets, names)


def as_adjacency(adjacency: Any, offsets: Offsets) -> csr_array:
    """A given graph: symmetric, weights positive, no loops, no edge between bags."""
    n = int(offsets[-1])
    if not issparse(adjacency) or adjacency.shape != (n, n):
        raise ValueError(
            f"adjacency: expected a sparse {n} x {n} matrix, found {type(adjacency).__name__} "
            f"of shape {np.shape(adjacency)}"
        )
    matrix = csr_array(adjacency, dtype=np.float64, copy=True)
    matrix.sum_duplicates()
    matrix.eliminate_zeros()
    if not (np.isfinite(matrix.data) & (matrix.data > 0)).all():
        raise ValueError("adjacency: expected positive, finite weights")
    rows = np.repeat(np.arange(n), np.diff(matrix.indptr))
    bag = bag_index(offsets)
    if (rows == matrix.indices).any():
        raise ValueError("adjacency: expected a zero diagonal, found an instance joined to itself")
    if (bag[rows] != bag[matrix.indices]).any():
        raise ValueError("adjacency: expected diagonal blocks, found an edge between two bags")
    if (matrix != matrix.T).nnz:
        raise ValueError("adjacency: expected a symmetric matrix")
    return matrix


def _warn_without_edges(
    adjacency: csr_array, coords: Coords, offsets: Offsets, names: np.ndarray, step: Steps | None
) -> None:
    """Many instances and not one edge: most likely the step is in other units."""
    lonely = (np.diff(adjacency.indptr[offsets]) == 0) & (np.diff(offsets) >= MANY_INSTANCES)
    if not lonely.any():
        return
    used = "" if step is None else f" The step is {_describe_steps(step[lonely])}."
    seen = infer_step(coords, offsets)[lonely]
    shown = f" The coordinates show {_describe_steps(seen)}." if np.isfinite(seen).all() else ""
    warn_caller(
        f"{count(int(lonely.sum()), 'bag')} with at least {MANY_INSTANCES} instances and not one "
        f"edge: {listed(names[lonely])}.{used}{shown} Probably the step or radius is in other "
        "units than the coordinates (another magnification, pixels against cells)."
    )
