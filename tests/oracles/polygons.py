"""The share of a patch inside a polygon, by counting points: even-odd rule, one ray per point."""

from itertools import pairwise

import numpy as np


def share_by_points(polygon, corner, sides, fine: int) -> float:
    """Of fine x fine points in the patch, those inside the first ring and in no other."""
    at = (np.arange(fine) + 0.5) / fine
    points = [(corner[0] + sides[0] * u, corner[1] + sides[1] * v) for u in at for v in at]
    xy = np.array(points)
    outer, *holes = [_inside(ring, xy) for ring in polygon]
    for hole in holes:
        outer = outer & ~hole
    return float(outer.mean())


def _inside(ring, xy):
    inside = np.zeros(len(xy), dtype=bool)
    for (x0, y0), (x1, y1) in pairwise(ring):
        crosses = (y0 > xy[:, 1]) != (y1 > xy[:, 1])
        if y0 != y1:
            x = x0 + (xy[:, 1] - y0) / (y1 - y0) * (x1 - x0)
            inside ^= crosses & (xy[:, 0] < x)
    return inside
