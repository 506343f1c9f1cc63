"""How much of a patch lies inside a polygon, exactly; and whether a polygon crosses itself."""

from typing import Any

import numpy as np
from jaxtyping import Bool, Float

Ring = Float[np.ndarray, "_ 2"]  # closed: the last point is the first
Points = Float[np.ndarray, "n 2"]
Pair = Float[np.ndarray, " 2"]
Shares = Float[np.ndarray, " n"]

STEEP = 1e-9  # of a patch's width: an edge that moves less is upright


def share_inside(polygon: list[Ring], corners: Points, sides: Pair) -> Shares:
    """Which part of every patch lies inside a polygon: its first ring, but not the others.

    >>> ring = np.array([[0.0, 0], [3, 0], [3, 4], [0, 4], [0, 0]])
    >>> hole = np.array([[0.0, 0], [1, 0], [1, 2], [0, 2], [0, 0]])
    >>> share_inside([ring, hole], np.array([[0.0, 0], [2, 0], [9, 9]]), np.array([2.0, 4]))
    array([0.75, 0.5 , 0.  ])
    """
    outer, *holes = [_share_of_ring(ring, corners, sides) for ring in polygon]
    return np.clip(outer - sum(holes, np.zeros(len(corners))), 0, 1)


def _share_of_ring(ring: Ring, corners: Points, sides: Pair) -> Shares:
    """Row by row of patches, as only the edges at its height matter to a row."""
    share = np.zeros(len(corners))
    low, high = ring.min(axis=0), ring.max(axis=0)
    near = np.flatnonzero(((corners < high) & (corners + sides > low)).all(axis=1))
    near = near[np.argsort(corners[near, 1], kind="stable")]
    heights, start = np.unique(corners[near, 1], return_index=True)
    for y, row in zip(heights, np.split(near, start[1:])):
        share[row] = _share_of_row(ring, corners[row, 0], y, sides)
    return share


def _share_of_row(
    ring: Ring, left: Float[np.ndarray, " n"], top: float, sides: Pair
) -> Float[np.ndarray, " n"]:
    """Shares of patches at one height, in units of their sides.

    area(P and patch) = sum over edges of int_{0 <= y <= 1} clip(x(y), 0, 1) dy, with the edge's
    direction as its sign: at each y the edges in turn enter and leave the polygon.
    """
    y = (ring[:, 1] - top) / sides[1]
    ya, yb = y[:-1].clip(0, 1), y[1:].clip(0, 1)
    here = ya != yb
    start, run, rise = ring[:-1, 0][here], np.diff(ring[:, 0])[here], np.diff(y)[here]
    first, last = ((end[here] - y[:-1][here]) / rise for end in (ya, yb))
    xa, xb = ((start + part * run - left[:, None]) / sides[0] for part in (first, last))
    return np.abs((_mean_clipped(xa, xb) * (yb - ya)[here]).sum(axis=1))


def _mean_clipped(a: Float[np.ndarray, "n e"], b: Float[np.ndarray, "n e"]) -> np.ndarray:
    """The mean of clip(x, 0, 1) for x from a to b: (G(b) - G(a)) / (b - a), G its integral."""
    upright = np.abs(b - a) < STEEP
    apart = np.where(upright, 1.0, b - a)
    return np.where(upright, a.clip(0, 1), (_integral(b) - _integral(a)) / apart)


def _integral(x: Float[np.ndarray, "n e"]) -> Float[np.ndarray, "n e"]:
    """G(x) = int_0^x clip(t, 0, 1) dt."""
    return x.clip(0, 1) ** 2 / 2 + (x - 1).clip(0)


def crossing(ring: Ring) -> tuple[float, float] | None:
    """Where two edges of a ring cross, None if none do; rings may touch themselves.

    >>> crossing(np.array([[0.0, 0], [4, 4], [4, 0], [0, 4], [0, 0]]))
    (2.0, 2.0)
    >>> crossing(np.array([[0.0, 0], [4, 0], [4, 4], [0, 4], [0, 0]]))
    """
    a, b = ring[:-1], ring[1:]
    order = np.argsort(np.minimum(a[:, 0], b[:, 0]), kind="stable")
    a, b = a[order], b[order]
    begin, end = np.minimum(a[:, 0], b[:, 0]), np.maximum(a[:, 0], b[:, 0])
    last = np.searchsorted(begin, end, side="right")
    for i in range(len(a)):
        others = slice(i + 1, last[i])
        hit = np.flatnonzero(_cross(a[i], b[i], a[others], b[others]))
        if len(hit):
            c, d = a[others][hit[0]], b[others][hit[0]]
            along = _turn(c, d, a[i]) / (_turn(c, d, a[i]) - _turn(c, d, b[i]))
            x, y = a[i] + along * (b[i] - a[i])
            return float(x), float(y)
    return None


def _turn(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> Any:
    """Positive where a, b, c turn to one side, negative where to the other."""
    ab, ac = b - a, c - a
    return ab[..., 0] * ac[..., 1] - ab[..., 1] * ac[..., 0]


def _cross(a: Pair, b: Pair, c: Points, d: Points) -> Bool[np.ndarray, " n"]:
    """Whether a-b and c-d cross inside both: the ends of each on two sides of the other."""
    apart = np.sign(_turn(a, b, c)) * np.sign(_turn(a, b, d)) < 0
    return apart & (np.sign(_turn(c, d, a)) * np.sign(_turn(c, d, b)) < 0)
