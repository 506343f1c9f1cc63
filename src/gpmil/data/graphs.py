"""Which patches are neighbours: coordinates, or given edges, to a sparse graph and its Laplacian.

A cohort is ragged: the instances of bag b are rows ``offsets[b]:offsets[b + 1]``, and no edge
ever leaves a bag, so one N x N block-diagonal matrix holds every graph.
This module knows coordinates and row ranges only, nothing of ``Bags``.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxtyping import Float, Int
from scipy.sparse import csr_array, diags_array

from gpmil.data.lattice import infer_step
from gpmil.data.neighbours import (
    NO_EDGES,
    Coords,
    Edges,
    Offsets,
    bag_index,
    chain_edges,
    grid_edges,
    knn_edges,
    radius_edges,
)

__all__ = [
    "GRAPHS",
    "adjacency_from_coords",
    "adjacency_from_edges",
    "bag_index",
    "check_graph",
    "grid_edges",
    "infer_step",
    "laplacian",
]

GRAPHS = ("grid4", "grid8", "radius", "knn", "chain")
"""The graphs that coordinates can make."""

DEFAULT_RADIUS = 1.5
"""Radius of the "radius" graph, and the longest link of a chain, in steps."""


def adjacency_from_coords(
    coords: Coords | None,
    offsets: Offsets,
    graph: str | None = "grid4",
    step: Any = None,
    radius: Any = None,
    n_neighbors: int = 8,
) -> csr_array:
    """Neighbour graph of every bag, as one symmetric block-diagonal N x N matrix of ones.

    Parameters
    ----------
    coords : (N, k), k = 1, 2 or 3
        Positions; may be None for ``graph="chain"`` (rows in their order) and ``graph=None``.
    offsets : (B + 1,)
        Bag b is rows ``offsets[b]:offsets[b + 1]``.
    graph : "grid4", "grid8", "radius", "knn", "chain" or None
        "grid4": one step along one axis (2 neighbours in 1-D, 4 in 2-D, 6 in 3-D).
        "grid8": the diagonals too (2, 8, 26).  "radius": no farther than `radius`.
        "knn": the `n_neighbors` nearest, of either end.  "chain": consecutive along the first
        coordinate.  None: no edges.
    step : number, (B,) one per bag, or (B, k)
        Distance of neighbouring patches.  Needed by the grids and by "radius" without `radius`;
        for "chain" it is optional, and a gap of more than 1.5 steps then breaks the chain.
    radius : number, or one per bag, in units of the coordinates
        For "radius"; 1.5 steps when None.
    n_neighbors : int
        For "knn".

    Examples
    --------
    >>> coords = np.array([[0.0, 0], [1, 0], [0, 1], [1, 1], [2, 1]])
    >>> adjacency_from_coords(coords, np.array([0, 5]), step=1).toarray().astype(int)
    array([[0, 1, 1, 0, 0],
           [1, 0, 0, 1, 0],
           [1, 0, 0, 1, 0],
           [0, 1, 1, 0, 1],
           [0, 0, 0, 1, 0]])
    """
    edges = _edges_from_coords(coords, offsets, graph, step, radius, n_neighbors)
    return _symmetric(edges, int(offsets[-1]))


def check_graph(graph: str | None) -> None:
    """Raise ValueError if coordinates cannot make such a graph."""
    if graph is not None and graph not in GRAPHS:
        raise ValueError(f"graph: expected {', '.join(GRAPHS)} or None, found {graph!r}")


def _edges_from_coords(
    coords: Coords | None,
    offsets: Offsets,
    graph: str | None,
    step: Any,
    radius: Any,
    n_neighbors: int,
) -> Edges:
    check_graph(graph)
    bag = bag_index(offsets)
    if graph is None:
        return NO_EDGES
    if graph == "chain":
        return chain_edges(coords, bag, _longest_link(step, offsets))
    if coords is None:
        raise ValueError(f'graph="{graph}" needs coordinates')
    if graph == "knn":
        return knn_edges(coords, bag, n_neighbors)
    if graph == "radius":
        unit = _reach(step, radius, offsets, coords.shape[1])
        return radius_edges(coords / unit[bag], bag)
    if step is None:
        raise ValueError(f'graph="{graph}" needs step=, the distance of neighbouring patches')
    unit = _per_bag(step, "step", offsets, coords.shape[1])
    return grid_edges(coords / unit[bag], bag, diagonal=graph == "grid8")


def _per_bag(value: Any, name: str, offsets: Offsets, k: int) -> Float[np.ndarray, "bags k"]:
    """A number, one per bag or (B, k) as (B, k), checked to be positive."""
    value = np.asarray(value, dtype=np.float64)
    n_bags = len(offsets) - 1
    if value.ndim == 1:
        value = value[:, None]
    if value.ndim > 2 or any(a not in (1, b) for a, b in zip(value.shape, (n_bags, k))):
        raise ValueError(
            f"{name}: expected a number, one per bag ({n_bags},) or ({n_bags}, {k}), "
            f"found an array of shape {value.shape}"
        )
    value = np.broadcast_to(value, (n_bags, k))
    bad = np.flatnonzero(~(np.isfinite(value) & (value > 0)).all(axis=1))
    if len(bad):
        found = value[bad[0]].tolist()
        raise ValueError(f"{name} must be positive, found {found} for bag {bad[0]}")
    return value


def _longest_link(step: Any, offsets: Offsets) -> Float[np.ndarray, " bags"] | None:
    """Longest link of a chain, one per bag: 1.5 steps along the first axis."""
    if step is None:
        return None
    step = np.asarray(step, dtype=np.float64)
    along = step[:, :1] if step.ndim == 2 else step
    return DEFAULT_RADIUS * _per_bag(along, "step", offsets, 1)[:, 0]


def _reach(step: Any, radius: Any, offsets: Offsets, k: int) -> Float[np.ndarray, "bags k"]:
    """The unit of the radius graph, one per bag and axis: the radius, or 1.5 steps."""
    if radius is not None:
        return _per_bag(radius, "radius", offsets, k)
    if step is None:
        raise ValueError('graph="radius" needs radius= or step=')
    return DEFAULT_RADIUS * _per_bag(step, "step", offsets, k)


def laplacian(adjacency: csr_array) -> csr_array:
    """Graph Laplacian C = diag(A 1) - A of a symmetric adjacency, N x N; C 1 = 0.

    Examples
    --------
    >>> chain = adjacency_from_coords(None, np.array([0, 3]), graph="chain")
    >>> laplacian(chain).toarray().astype(int)
    array([[ 1, -1,  0],
           [-1,  2, -1],
           [ 0, -1,  1]])
    """
    degree = np.asarray(adjacency.sum(axis=1)).ravel()
    # C = diag(A 1) - A
    result = csr_array(diags_array(degree) - adjacency)
    result.sort_indices()
    return result


def _symmetric(edges: Edges, n: int, weights: Float[np.ndarray, " e"] | None = None) -> csr_array:
    """N x N adjacency with both directions of every (distinct) edge."""
    weights = np.ones(len(edges)) if weights is None else weights
    # Half the memory, and what SuperLU wants.
    small = max(n, 2 * len(edges)) <= np.iinfo(np.int32).max
    i, j = edges.T.astype(np.int32 if small else np.int64)
    both = (np.concatenate([i, j]), np.concatenate([j, i]))
    matrix = csr_array((np.concatenate([weights, weights]), both), shape=(n, n))
    matrix.sort_indices()
    return matrix


# ------------------------------------------------------------------ given edges


def adjacency_from_edges(
    edges_per_bag: Sequence[Any], offsets: Offsets, names: Any = None
) -> csr_array:
    """Neighbour graph from given edges, as one symmetric block-diagonal N x N matrix.

    Parameters
    ----------
    edges_per_bag : one (E, 2) or (E, 3) array per bag
        Local indices i, j in 0..n_b - 1, and a weight > 0 in a third column (1 without it).
        An edge may be given in one direction or both; with two weights it is an error.
        None or an empty array is a bag without edges.
    offsets : (B + 1,)
    names : B names of the bags, for error messages
    """
    sizes = np.diff(offsets)
    if len(edges_per_bag) != len(sizes):
        raise ValueError(
            f"edges: expected one array per bag, {len(sizes)} in all, found {len(edges_per_bag)}"
        )
    called = [f"bag {b}" if names is None else f"bag '{names[b]}'" for b in range(len(sizes))]
    parts = [_edge_array(e, n, who) for e, n, who in zip(edges_per_bag, sizes.tolist(), called)]
    table = np.concatenate(parts) if parts else np.empty((0, 3))
    bag = np.repeat(np.arange(len(sizes)), [len(p) for p in parts])
    ends = table[:, :2].astype(np.int64) + offsets[:-1][bag][:, None]
    ends, weights = _merge_directions(ends, table[:, 2], bag, called)
    return _symmetric(ends, int(offsets[-1]), weights)


def _edge_array(edges: Any, n: int, who: str) -> Float[np.ndarray, "e 3"]:
    """One bag's edges as i, j, weight; checked."""
    array = np.empty((0, 3)) if edges is None else np.asarray(edges)
    if array.size == 0:
        return np.empty((0, 3))
    if array.ndim != 2 or array.shape[1] not in (2, 3) or array.dtype.kind not in "iuf":
        raise ValueError(
            f"edges of {who}: expected an (E, 2) array of indices or (E, 3) with weights, "
            f"found shape {array.shape} and type {array.dtype}"
        )
    array = array.astype(np.float64)
    if array.shape[1] == 2:
        array = np.column_stack([array, np.ones(len(array))])
    _check_ends(array[:, :2], n, who)
    bad = ~(np.isfinite(array[:, 2]) & (array[:, 2] > 0))
    if bad.any():
        found = array[bad][0, 2]
        raise ValueError(f"edges of {who}: weights must be positive and finite, found {found}")
    return array


def _check_ends(ends: Float[np.ndarray, "e 2"], n: int, who: str) -> None:
    """Whole numbers from 0 to n - 1, and no edge from an instance to itself."""
    if not (ends == np.rint(ends)).all():
        raise ValueError(f"edges of {who}: indices must be whole numbers")
    outside = (ends < 0) | (ends >= n)
    if outside.any():
        raise ValueError(
            f"edges of {who}: index {int(ends[outside][0])} is out of range, "
            f"the bag's {n} instances are numbered 0 to {n - 1}"
        )
    loops = ends[:, 0] == ends[:, 1]
    if loops.any():
        raise ValueError(f"edges of {who}: instance {int(ends[loops][0, 0])} is joined to itself")


def _merge_directions(
    ends: Edges, weights: Float[np.ndarray, " e"], bag: Int[np.ndarray, " e"], called: list[str]
) -> tuple[Int[np.ndarray, "u 2"], Float[np.ndarray, " u"]]:
    """Each undirected edge once; an edge with two different weights is an error."""
    ends = np.sort(ends, axis=1)
    order = np.lexsort((ends[:, 1], ends[:, 0]))
    ends, weights, bag = ends[order], weights[order], bag[order]
    repeat = np.concatenate([[False], (ends[1:] == ends[:-1]).all(axis=1)])[: len(ends)]
    clash = np.flatnonzero(repeat[1:] & (weights[1:] != weights[:-1]))
    if len(clash):
        e = clash[0]
        raise ValueError(
            f"edges of {called[bag[e]]}: one edge is given with two weights, "
            f"{weights[e]} and {weights[e + 1]}"
        )
    return ends[~repeat], weights[~repeat]
