"""The step of the lattice that patches lie on, from their coordinates, where it was not given."""

import numpy as np
from jaxtyping import Float, Int

from gpmil.data.neighbours import BagIndex, Coords, Offsets, bag_index, tree_far_apart

MIN_ALIGNED = 4
"""A distance seen less often than this says nothing of a bag's own step."""


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
    tree, far = tree_far_apart(coords, bag)
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
