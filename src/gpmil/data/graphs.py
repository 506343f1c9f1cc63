"""Which patches are neighbours: coordinates, or given edges, to a sparse graph and its Laplacian.

A cohort is ragged: the instances of bag b are rows ``offsets[b]:offsets[b + 1]``, and no edge
ever leaves a bag, so one N x N block-diagonal matrix holds every graph.  All bags are treated
at once: an extra axis keeps them apart in one k-d tree, and nothing loops over bags.
This module knows coordinates and row ranges only, nothing of ``Bags``.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxtyping import Float, Int
from scipy.sparse import csr_array, diags_array
from scipy.spatial import cKDTree

GRAPHS = ("grid4", "grid8", "radius", "knn", "chain")
"""The graphs that coordinates can make."""

GRID_TOLERANCE = 0.15
"""How far from one step (or from zero) an offset on a grid may be, in steps."""

DEFAULT_RADIUS = 1.5
"""Radius of the "radius" graph, and the longest link of a chain, in steps."""

MAX_PAIRS = 5e7
"""More candidate pairs than this (2 GB) are refused: a step or radius in the wrong units."""

MIN_ALIGNED = 4
"""A distance seen less often than this says nothing of a bag's own step."""

# Distances are compared with this relative slack, so that shifting coordinates changes no edge.
ROUNDING = 1e-9

Coords = Float[np.ndarray, "n k"]
Offsets = Int[np.ndarray, " bags_and_one"]
BagIndex = Int[np.ndarray, " n"]
Edges = Int[np.ndarray, "e 2"]

NO_EDGES = np.empty((0, 2), dtype=np.int64)


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
    step : number, (B,) one a bag, or (B, k)
        Distance of neighbouring patches.  Needed by the grids and by "radius" without `radius`;
        for "chain" it is optional, and a gap of more than 1.5 steps then breaks the chain.
    radius : number, or one a bag, in units of the coordinates
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
    n = int(offsets[-1])
    if graph is None:
        return _symmetric(NO_EDGES, n)
    if graph not in GRAPHS:
        raise ValueError(f"graph must be one of {', '.join(GRAPHS)} or None, found {graph!r}")
    bag = bag_index(offsets)
    if graph == "chain":
        return _symmetric(chain_edges(coords, bag, _longest_link(step, offsets)), n)
    if coords is None:
        raise ValueError(f'graph="{graph}" needs coordinates')
    if graph == "knn":
        return _symmetric(knn_edges(coords, bag, n_neighbors), n)
    if graph == "radius":
        unit = _reach(step, radius, offsets, coords.shape[1])
        return _symmetric(radius_edges(coords / unit[bag], bag), n)
    if step is None:
        raise ValueError(f'graph="{graph}" needs step=, the distance of neighbouring patches')
    unit = _per_bag(step, "step", offsets, coords.shape[1])
    return _symmetric(grid_edges(coords / unit[bag], bag, diagonal=graph == "grid8"), n)


def adjacency_from_edges(
    edges_per_bag: Sequence[Any], offsets: Offsets, names: Any = None
) -> csr_array:
    """Neighbour graph from given edges, as one symmetric block-diagonal N x N matrix.

    Parameters
    ----------
    edges_per_bag : one (E, 2) or (E, 3) array a bag
        Local indices i, j in 0..n_b - 1, and a weight > 0 in a third column (1 without it).
        An edge may be given in one direction or both; with two weights it is an error.
        None or an empty array is a bag without edges.
    offsets : (B + 1,)
    names : B names of the bags, for error messages
    """
    sizes = np.diff(offsets)
    if len(edges_per_bag) != len(sizes):
        raise ValueError(
            f"edges: expected one array a bag, {len(sizes)} in all, found {len(edges_per_bag)}"
        )
    called = [f"bag {b}" if names is None else f"bag '{names[b]}'" for b in range(len(sizes))]
    parts = [_edge_array(e, n, who) for e, n, who in zip(edges_per_bag, sizes.tolist(), called)]
    table = np.concatenate(parts) if parts else np.empty((0, 3))
    bag = np.repeat(np.arange(len(sizes)), [len(p) for p in parts])
    ends = table[:, :2].astype(np.int64) + offsets[:-1][bag][:, None]
    ends, weights = _merge_directions(ends, table[:, 2], bag, called)
    return _symmetric(ends, int(offsets[-1]), weights)


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


def bag_index(offsets: Offsets) -> BagIndex:
    """Number of the bag each instance belongs to, (N,)."""
    return np.repeat(np.arange(len(offsets) - 1), np.diff(offsets))


# ------------------------------------------------------------------ edges, one graph a function


def grid_edges(points: Coords, bag: BagIndex, diagonal: bool = False) -> Edges:
    """Pairs one step apart along one axis (`diagonal`: along any of them), points in steps.

    Offsets are compared with one and zero directly, within ``GRID_TOLERANCE``; positions are
    never rounded to cells, so tissue pieces may each have their own origin.
    """
    k = points.shape[1]
    # With tolerance t a face neighbour has |d|_1 <= 1 + t k, a diagonal one |d|_inf <= 1 + t.
    norm, reach = (np.inf, 1 + GRID_TOLERANCE) if diagonal else (1.0, 1 + GRID_TOLERANCE * k)
    pairs = _pairs_within(points, bag, reach + ROUNDING, norm)
    offset = np.abs(points[pairs[:, 0]] - points[pairs[:, 1]])
    one = np.abs(offset - 1) <= GRID_TOLERANCE + ROUNDING
    zero = offset <= GRID_TOLERANCE + ROUNDING
    ones = one.sum(axis=1)
    steps = ones >= 1 if diagonal else ones == 1
    return pairs[(one | zero).all(axis=1) & steps]


def radius_edges(points: Coords, bag: BagIndex) -> Edges:
    """Pairs at a Euclidean distance of at most one, points in units of the radius."""
    return _pairs_within(points, bag, 1 + ROUNDING, 2.0)


def knn_edges(points: Coords, bag: BagIndex, n_neighbors: int = 8) -> Edges:
    """Pairs of which one is among the `n_neighbors` nearest of the other within its bag.

    Everything as near as the k-th neighbour counts, so ties (every lattice has them) are not
    settled by the order of the rows.  Bags of at most `n_neighbors` + 1 become complete graphs.
    """
    if n_neighbors < 1:
        raise ValueError(f"n_neighbors must be at least 1, found {n_neighbors}")
    tree, far = _tree_far_apart(points, bag)
    found = []
    ask, rows = n_neighbors + 5, np.arange(len(points))
    while len(rows):
        # Column 0 is the point itself (duplicates aside); beyond `far` is another bag.
        distance, other = tree.query(tree.data[rows], k=ask, distance_upper_bound=far)
        kth = distance[:, n_neighbors, None]
        near = np.isfinite(distance) & (distance <= kth * (1 + ROUNDING))
        done = ~near[:, -1]
        source = np.broadcast_to(rows[:, None], other.shape)
        keep = near & done[:, None] & (other != source)
        found.append(np.column_stack([source[keep], other[keep]]))
        ask, rows = 2 * ask, rows[~done]
    return _unique(np.concatenate(found), len(points)) if found else NO_EDGES


def chain_edges(
    coords: Coords | None, bag: BagIndex, longest: Float[np.ndarray, " bags"] | None = None
) -> Edges:
    """Consecutive instances of a bag along the first coordinate, or in row order without any.

    `longest` (one a bag) breaks the chain where the first coordinate jumps by more.
    """
    # Equal first coordinates are ordered by the others, not by the order of the rows.
    order = np.arange(len(bag)) if coords is None else np.lexsort((*coords.T[::-1], bag))
    linked = bag[order[1:]] == bag[order[:-1]]
    if coords is not None and longest is not None:
        gap = np.diff(coords[order, 0])
        linked &= gap <= longest[bag[order[1:]]] * (1 + ROUNDING)
    return np.sort(np.column_stack([order[:-1], order[1:]])[linked], axis=1)


# ------------------------------------------------------------------ the step, when not given


def infer_step(coords: Coords, offsets: Offsets) -> Float[np.ndarray, "bags k"]:
    """The usual distance of neighbours in a line, per bag and axis, (B, k).

    Neighbours in a line along an axis are consecutive patches whose other coordinates agree.
    The most frequent distance counts, or a smaller one seen at least half as often.
    A bag in which no distance occurs four times takes its other axes' step in the cohort's
    proportions or, with none on any axis, the cohort's most frequent step.  All NaN if the
    patches of the cohort are not in lines.

    Examples
    --------
    >>> coords = np.array([[x, y] for x in range(0, 90, 30) for y in range(0, 80, 20)], float)
    >>> infer_step(coords, np.array([0, 12]))
    array([[30., 20.]])
    """
    bag, n_bags = bag_index(offsets), len(offsets) - 1
    scale = _typical_distance(coords, bag, n_bags)
    if np.isnan(scale).all():
        return np.full((n_bags, coords.shape[1]), np.nan)
    own, cohort = [], []
    for axis in range(coords.shape[1]):
        distance, of = _aligned_offsets(coords, bag, axis, scale)
        own.append(_mode(distance, of, scale, _convincing(of, np.diff(offsets), MIN_ALIGNED)))
        cohort.append(_cohort_step(own[-1], distance, scale, len(coords)))
    return _fill_steps(np.column_stack(own), np.array(cohort))


def _convincing(
    group: Int[np.ndarray, " p"], sizes: Int[np.ndarray, " g"], least: int
) -> Int[np.ndarray, " g"]:
    """How often a distance must be seen, per group of `sizes` patches, to be its step.

    A quarter of the pairs in a line, where at least a fifth of the patches are in one: scattered
    points, which no lattice made, are in a line by chance.
    """
    pairs = np.bincount(group, minlength=len(sizes))
    needed = np.maximum(least, (pairs + 3) // 4)
    return np.where(5 * pairs >= sizes, needed, pairs + 1)


def _cohort_step(
    own: Float[np.ndarray, " bags"],
    distance: Float[np.ndarray, " p"],
    scale: Float[np.ndarray, " bags"],
    n: int,
) -> float:
    """The most frequent step of the bags or, if none shows one, of all pairs together."""
    typical = np.array([np.nanmedian(scale)])
    known = own[np.isfinite(own)]
    if len(known):
        group = np.zeros(len(known), dtype=int)
        return float(_mode(known, group, typical, np.array([1]), share=1.0)[0])
    group = np.zeros(len(distance), dtype=int)
    return float(_mode(distance, group, typical, _convincing(group, np.array([n]), 1))[0])


def _typical_distance(coords: Coords, bag: BagIndex, n_bags: int) -> Float[np.ndarray, " bags"]:
    """Median distance to the nearest patch of the same bag (max norm), NaN for lone patches."""
    scale = np.full(n_bags, np.nan)
    if len(coords) < 2:
        return scale
    tree, far = _tree_far_apart(coords, bag)
    nearest = tree.query(tree.data, k=[2], p=np.inf, distance_upper_bound=far)[0][:, 0]
    keep = np.flatnonzero(np.isfinite(nearest) & (nearest > 0))
    keep = keep[np.lexsort((nearest[keep], bag[keep]))]
    bags, first, count = np.unique(bag[keep], return_index=True, return_counts=True)
    scale[bags] = nearest[keep[first + (count - 1) // 2]]
    return scale


def _aligned_offsets(
    coords: Coords, bag: BagIndex, axis: int, scale: Float[np.ndarray, " bags"]
) -> tuple[Float[np.ndarray, " p"], Int[np.ndarray, " p"]]:
    """Distances along `axis` of consecutive patches in a line, and the bags they are from."""
    tolerance = 0.03 * np.nan_to_num(scale)[bag]
    others = [a for a in range(coords.shape[1]) if a != axis]
    line = np.zeros_like(bag) if others else bag
    for other in others:
        line = line * len(bag) + _runs(coords[:, other], bag, tolerance)
    order = np.lexsort((coords[:, axis], line))
    distance = np.diff(coords[order, axis])
    # Pieces that overlap give tiny offsets: those are not steps.
    keep = (np.diff(line[order]) == 0) & (distance > tolerance[order[1:]])
    return distance[keep], bag[order[1:]][keep]


def _runs(
    values: Float[np.ndarray, " n"], bag: BagIndex, gap: Float[np.ndarray, " n"]
) -> Int[np.ndarray, " n"]:
    """Number the runs of sorted values that neither a jump over `gap` nor a new bag ends."""
    order = np.lexsort((values, bag))
    ends = (np.diff(values[order]) > gap[order[1:]]) | (np.diff(bag[order]) != 0)
    number = np.empty(len(values), dtype=np.int64)
    number[order] = np.concatenate([[0], np.cumsum(ends)])
    return number


def _mode(
    distance: Float[np.ndarray, " p"],
    group: Int[np.ndarray, " p"],
    scale: Float[np.ndarray, " g"],
    at_least: Int[np.ndarray, " g"],
    share: float = 0.5,
) -> Float[np.ndarray, " g"]:
    """Most frequent distance of each group, within 4 % of `scale`; NaN if seen too rarely.

    A smaller distance seen half (`share`) as often is preferred: holes make steps look longer.
    """
    mode = np.full(len(scale), np.nan)
    order = np.lexsort((distance, group))
    distance, group = distance[order], group[order]
    # Lay the groups end to end, then count what lies in the window that each distance opens.
    line = distance + group * (2 * (distance.max(initial=0.0) + np.nanmax(scale)))
    end = np.searchsorted(line, line + 0.04 * scale[group], side="right")
    count = end - np.arange(len(line))
    peak = np.zeros(len(scale), dtype=np.int64)
    np.maximum.at(peak, group, count)
    often = np.flatnonzero((count >= at_least[group]) & (count >= share * peak[group]))
    # Written backwards, the smallest distance stays.
    best = often[::-1]
    mode[group[best]] = distance[best + (count[best] - 1) // 2]
    return mode


def _fill_steps(
    own: Float[np.ndarray, "bags k"], pooled: Float[np.ndarray, " k"]
) -> Float[np.ndarray, "bags k"]:
    """Fill what a bag does not show: its other axes in the cohort's proportions, or the cohort."""
    if np.isnan(pooled).all():
        return own
    pooled = np.where(np.isnan(pooled), np.nanmin(pooled), pooled)
    known = np.isfinite(own)
    # step_ba = cohort_a x (how much larger this bag's known steps are than the cohort's)
    ratio = np.where(known, own / pooled, 0.0).sum(axis=1) / np.maximum(known.sum(axis=1), 1)
    ratio[~known.any(axis=1)] = 1.0
    return np.where(known, own, ratio[:, None] * pooled)


# ------------------------------------------------------------------ pieces


def _per_bag(value: Any, name: str, offsets: Offsets, k: int) -> Float[np.ndarray, "bags k"]:
    """A number, one a bag or (B, k) as (B, k), checked to be positive."""
    value = np.asarray(value, dtype=np.float64)
    n_bags = len(offsets) - 1
    if value.ndim == 1:
        value = value[:, None]
    if value.ndim > 2 or (value.ndim == 2 and not _fits(value.shape, (n_bags, k))):
        raise ValueError(
            f"{name}: expected a number, one a bag ({n_bags},) or ({n_bags}, {k}), "
            f"found an array of shape {value.shape}"
        )
    value = np.broadcast_to(value, (n_bags, k))
    if not (np.isfinite(value) & (value > 0)).all():
        bad = np.flatnonzero(~(np.isfinite(value) & (value > 0)).all(axis=1))[0]
        raise ValueError(f"{name} must be positive, found {value[bad].tolist()} for bag {bad}")
    return value


def _fits(shape: tuple[int, ...], target: tuple[int, ...]) -> bool:
    return all(a in (1, b) for a, b in zip(shape, target))


def _longest_link(step: Any, offsets: Offsets) -> Float[np.ndarray, " bags"] | None:
    """Longest link of a chain, one a bag: 1.5 steps along the first axis."""
    if step is None:
        return None
    step = np.asarray(step, dtype=np.float64)
    along = step[:, :1] if step.ndim == 2 else step
    return DEFAULT_RADIUS * _per_bag(along, "step", offsets, 1)[:, 0]


def _reach(step: Any, radius: Any, offsets: Offsets, k: int) -> Float[np.ndarray, "bags k"]:
    """The unit of the radius graph, one a bag and axis: the radius, or 1.5 steps."""
    if radius is not None:
        return _per_bag(radius, "radius", offsets, k)
    if step is None:
        raise ValueError('graph="radius" needs radius= or step=')
    return DEFAULT_RADIUS * _per_bag(step, "step", offsets, k)


def _centred(points: Coords, bag: BagIndex) -> Coords:
    """Points relative to the first of their bag: large origins cost digits."""
    if len(points) == 0:
        return points
    first = np.concatenate([[True], bag[1:] != bag[:-1]])
    return points - points[np.flatnonzero(first)[np.cumsum(first) - 1]]


def _pairs_within(points: Coords, bag: BagIndex, reach: float, norm: float) -> Edges:
    """All pairs i < j of a bag no farther apart than `reach`."""
    points = _centred(points, bag)
    _refuse_crowds(points, bag, reach)
    # Bags lie in parallel planes farther apart than the reach: one tree serves them all.
    tree = cKDTree(np.column_stack([points, bag * (2 * reach)]))
    pairs = tree.query_pairs(reach, p=norm, output_type="ndarray")
    return pairs.astype(np.int64, copy=False)


def _refuse_crowds(points: Coords, bag: BagIndex, reach: float) -> None:
    """Refuse, before the memory is gone, a step or radius that makes everyone neighbours."""
    if len(points) == 0:
        return
    starts = np.flatnonzero(np.concatenate([[True], bag[1:] != bag[:-1]]))
    extent = np.maximum.reduceat(points, starts) - np.minimum.reduceat(points, starts)
    n = np.diff(np.append(starts, len(points)))
    # Expected pairs of n patches spread evenly over the extent.
    share = np.prod(np.minimum(1, 2 * reach / np.maximum(extent, reach)), axis=1)
    pairs = n * (n - 1.0) / 2 * share
    if pairs.sum() > MAX_PAIRS:
        worst = int(np.argmax(pairs))
        size = " x ".join(f"{e:.3g}" for e in extent[worst])
        raise ValueError(
            f"about {pairs.sum():.1e} pairs of instances would be compared: the {n[worst]} "
            f"instances of bag {bag[starts[worst]]} lie within {size} steps (or radii). "
            "The step or radius is probably in other units than the coordinates."
        )


def _tree_far_apart(points: Coords, bag: BagIndex) -> tuple[cKDTree, float]:
    """A tree with the bags far apart, and a distance that tells: own bag below, others above."""
    points = _centred(points, bag)
    # No two points of a bag are farther apart than this.
    widest = 2 * np.sqrt(points.shape[1]) * np.abs(points).max(initial=0.0)
    far = 1 + 2 * widest
    return cKDTree(np.column_stack([points, bag * (2 * far)])), float(far)


def _unique(pairs: Edges, n: int) -> Int[np.ndarray, "u 2"]:
    """Each undirected pair once, smaller index first."""
    key = np.sort(pairs.min(axis=1) * n + pairs.max(axis=1))
    key = key[np.diff(key, prepend=-1) > 0]
    return np.column_stack([key // n, key % n])


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
