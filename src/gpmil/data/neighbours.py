"""Pairs of neighbouring instances, one function per kind of graph, all bags at once.

An extra axis keeps the bags apart in one k-d tree: no pair leaves a bag, and nothing loops over
bags.
"""

import numpy as np
from jaxtyping import Float, Int
from scipy.spatial import cKDTree

GRID_TOLERANCE = 0.15
"""How far from one step (or from zero) an offset on a grid may be, in steps."""

MAX_PAIRS = 5e7
"""More candidate pairs than this (2 GB) are refused: a step or radius in the wrong units."""

# Distances are compared with this relative slack, so that shifting coordinates changes no edge.
ROUNDING = 1e-9

Coords = Float[np.ndarray, "n k"]
Offsets = Int[np.ndarray, " bags_and_one"]
BagIndex = Int[np.ndarray, " n"]
Edges = Int[np.ndarray, "e 2"]

NO_EDGES = np.empty((0, 2), dtype=np.int64)


def bag_index(offsets: Offsets) -> BagIndex:
    """Number of the bag each instance belongs to, (N,)."""
    return np.repeat(np.arange(len(offsets) - 1), np.diff(offsets))


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
    tree, far = tree_far_apart(points, bag)
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

    `longest` (one per bag) breaks the chain where the first coordinate jumps by more.
    """
    # Equal first coordinates are ordered by the others, not by the order of the rows.
    order = np.arange(len(bag)) if coords is None else np.lexsort((*coords.T[::-1], bag))
    linked = bag[order[1:]] == bag[order[:-1]]
    if coords is not None and longest is not None:
        gap = np.diff(coords[order, 0])
        linked &= gap <= longest[bag[order[1:]]] * (1 + ROUNDING)
    return np.sort(np.column_stack([order[:-1], order[1:]])[linked], axis=1)


# ------------------------------------------------------------------ one tree for all bags


def _centred(points: Coords, bag: BagIndex) -> Coords:
    """Points relative to the first of their bag: large origins cost digits."""
    starts = _starts(bag)
    return points - np.repeat(points[starts], np.diff(starts, append=len(bag)), axis=0)


def _starts(bag: BagIndex) -> Int[np.ndarray, " some"]:
    """The first row of every bag that has one."""
    return np.flatnonzero(np.diff(bag, prepend=-1))


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
    starts = _starts(bag)
    extent = np.maximum.reduceat(points, starts) - np.minimum.reduceat(points, starts)
    n = np.diff(starts, append=len(points))
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


def tree_far_apart(points: Coords, bag: BagIndex) -> tuple[cKDTree, float]:
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
