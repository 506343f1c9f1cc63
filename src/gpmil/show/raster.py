"""From patches to pixels: values of patches on a canvas of their own grid.

One pixel per cell. Pieces of tissue that lie off a common lattice are where they are, on finer
pixels; where patches overlap, values are averaged by area.
"""

from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import numpy as np
from jaxtyping import Bool, Float, Int, Shaped
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components

from gpmil.data.graphs import grid_edges
from gpmil.show.slides import Extent

FINE = 8  # pixels per step where pieces lie off a common lattice
MOST_PIXELS = 4_000_000  # coarser pixels beyond this: a map is to be looked at
ON_LATTICE = 0.05  # steps by which patches of one lattice may lie beside it
SLIVER = 1e-6  # pixels: less is rounding, not tissue
SHORTEST, TOLERATED = 4, 0.1  # steps, and share of the tissue, that stay of an empty stretch

Coords = Shaped[np.ndarray, "n k"]
Values = Shaped[np.ndarray, " n"]


@dataclass(frozen=True)
class Layout:
    """Where the patches of a slide lie on a canvas of pixels; `lay_out` makes one.

    extent is (left, right, bottom, top) in the unit of the coordinates, y downwards.
    """

    pixel: Float[np.ndarray, "n 2"]  # column and row of the patch's upper left corner
    cover: tuple[float, float]  # columns and rows that a patch covers
    extent: Extent

    def paint(self, values: Values) -> Float[np.ndarray, "h w"]:
        """Mean of the values (n,) of the patches on each pixel, by area; NaN where there is none.

        A patch whose value is NaN is left out.
        """
        if len(values) != len(self.pixel):
            raise ValueError(
                f"values: expected one per patch, {len(self.pixel)} in all, found {len(values)}."
            )
        known = np.isfinite(values)
        given = np.asarray(values, dtype=np.float64)[known]
        width, height = self.shape
        total, area = np.zeros(height * width), np.zeros(height * width)
        columns, rows = (self._shares(axis, known) for axis in (0, 1))
        for (column, wide), (row, high) in product(columns, rows):
            share = wide * high
            on = np.flatnonzero(share)
            cell = row[on] * width + column[on]
            # v = sum_i a_i v_i / sum_i a_i, a_i the area of patch i on the pixel
            np.add.at(total, cell, share[on] * given[on])
            np.add.at(area, cell, share[on])
        mean = np.divide(total, area, out=np.full_like(total, np.nan), where=area > 0)
        return mean.reshape(height, width)

    @property
    def shape(self) -> tuple[int, int]:
        """Columns and rows of the canvas."""
        width, height = np.ceil(self.pixel.max(axis=0) + self.cover - SLIVER)
        return int(width), int(height)

    def _shares(
        self, axis: int, known: Bool[np.ndarray, " n"]
    ) -> list[tuple[Int[np.ndarray, " k"], Float[np.ndarray, " k"]]]:
        """Columns (rows) that the known patches touch, and how much of each they cover."""
        start = self.pixel[known, axis]
        end, first = start + self.cover[axis], np.floor(start + SLIVER)
        found = []
        for k in range(int(np.ceil(self.cover[axis] - SLIVER)) + 1):
            share = np.minimum(end, first + k + 1) - np.maximum(start, first + k)
            share = np.where(share > SLIVER, np.minimum(share, 1.0), 0.0)
            if share.any():
                found.append(((first + k).astype(np.int64), share))
        return found


def lay_out(coords: Coords, step: Any, size: Any = None) -> Layout:
    """Place patches on pixels.

    Parameters
    ----------
    coords
        (n, 2) upper left corners, or (n, 1) for a chain, which becomes a strip.
    step
        distance of neighbouring patches, one number or one per axis.
    size
        side of a patch where it differs from the step (overlapping patches); default the step.

    Examples
    --------
    >>> layout = lay_out(np.array([[0, 0], [256, 0], [256, 256]]), step=256)
    >>> layout.paint(np.array([0.1, 0.5, 0.9]))
    array([[0.1, 0.5],
           [nan, 0.9]])
    """
    coords, step = _checked(coords, step)
    side = np.ones(2) if size is None else pair(size, "size", positive=True) / step
    points = coords / step
    piece = _pieces(points)
    corner = np.full((piece.max() + 1, 2), np.inf)
    np.minimum.at(corner, piece, points)
    # Whole cells within a piece: pixels leave no seams between its patches.
    cell = np.round(points - corner[piece])
    # The largest piece sets the lattice; the others are whole cells away from it, or off it.
    base = corner[np.bincount(piece).argmax()]
    away = corner - base
    off = np.concatenate([away - np.round(away), (side - np.round(side))[None]])
    whole = bool(np.abs(off).max() <= ON_LATTICE)
    room = float(np.prod(np.ptp(away[piece] + cell, axis=0) + side))
    fine = _resolution(room, 1 if whole else FINE)
    if fine >= 1:
        pixel = np.floor(away * fine + 0.5)[piece] + cell * fine
    else:
        pixel = (away[piece] + cell) * fine
    cover = np.maximum(np.round(side), 1) if fine == 1 and whole else side * fine
    first = np.floor(pixel.min(axis=0))
    layout = Layout(pixel - first, (float(cover[0]), float(cover[1])), (0.0, 0.0, 0.0, 0.0))
    last = first + layout.shape
    (left, top), (right, bottom) = (base + first / fine) * step, (base + last / fine) * step
    return replace(layout, extent=(float(left), float(right), float(bottom), float(top)))


def close_gaps(
    coords: Coords, step: Any, size: Any = None
) -> tuple[Coords, list[tuple[int, float]]]:
    """Sections far apart moved together: long empty stretches between them become short.

    All patches move along an axis, by whole steps, so that sections keep their order and shape.
    Beside the positions, where stretches were cut: axis, and place in the new positions.

    >>> close_gaps(np.array([[0, 0], [10, 0], [400, 10]]), 10)
    (array([[ 0.,  0.],
           [10.,  0.],
           [60., 10.]]), [(0, 40.0)])
    """
    coords, step = _checked(coords, step)
    side = step if size is None else pair(size, "size", positive=True)
    moved, cuts = coords.copy(), []
    for axis in range(2):
        at = np.unique(coords[:, axis])
        gap = np.diff(at) - side[axis]
        tissue = np.minimum(np.diff(at), step[axis]).sum() + side[axis]
        kept = max(SHORTEST * step[axis], TOLERATED * tissue)
        long = gap > 2 * kept
        # by whole steps, or a section would leave the lattice of the others
        away = np.where(long, np.floor((gap - kept) / step[axis]) * step[axis], 0.0)
        shift = np.concatenate([[0.0], np.cumsum(away)])
        moved[:, axis] -= shift[np.searchsorted(at, coords[:, axis])]
        cuts += [
            (axis, float(at[k] - shift[k] + side[axis] + (gap[k] - away[k]) / 2))
            for k in np.flatnonzero(long)
        ]
    return moved, cuts


def _resolution(room: float, wanted: int) -> float:
    """Pixels a step for a map of `room` cells: `wanted`, or fewer where it would be too large.

    >>> _resolution(1e4, 8), _resolution(5e5, 8), _resolution(1.6e7, 1)
    (8.0, 2.0, 0.5)
    """
    while wanted > 1 and room * wanted**2 > MOST_PIXELS:
        wanted //= 2
    return min(float(wanted), float(np.sqrt(MOST_PIXELS / room))) if wanted == 1 else float(wanted)


def _pieces(points: Float[np.ndarray, "n 2"]) -> Int[np.ndarray, " n"]:
    """Number of the connected piece each patch belongs to; patches that touch are connected."""
    n = len(points)
    i, j = grid_edges(points, np.zeros(n, dtype=np.int64), diagonal=True).T
    graph = coo_array((np.ones(len(i), dtype=bool), (i, j)), shape=(n, n))
    return connected_components(graph, directed=False)[1].astype(np.int64)


def _checked(
    coords: np.ndarray, step: Any
) -> tuple[Float[np.ndarray, "n 2"], Float[np.ndarray, " 2"]]:
    coords = np.asarray(coords, dtype=np.float64)
    if coords.ndim != 2 or coords.shape[1] not in (1, 2) or not len(coords):
        raise ValueError(
            "coords: expected (n, 2) positions, or (n, 1) for a chain, of at least one patch; "
            f"found shape {coords.shape}. Draw a volume one plane at a time."
        )
    if not np.isfinite(coords).all():
        raise ValueError("coords: found NaN or infinite positions. Leave those patches out.")
    step = pair(step, "step", positive=True)
    if coords.shape[1] == 1:
        return np.column_stack([coords, np.zeros(len(coords))]), step[[0, 0]]
    return coords, step


def pair(value: Any, name: str, positive: bool = False) -> Float[np.ndarray, " 2"]:
    """A number, or one per axis, as two."""
    given = np.asarray(value, dtype=np.float64).ravel()
    if given.size not in (1, 2) or not np.isfinite(given).all() or (positive and given.min() <= 0):
        what = "a positive number" if positive else "a number"
        raise ValueError(f"{name}: expected {what}, or one per axis, found {value!r}.")
    return np.broadcast_to(given, (2,)).copy()


# --- Borders of what is on a canvas ---------------------------------------------------------------
def borders(
    mask: Bool[np.ndarray, "h w"], extent: tuple[float, float, float, float]
) -> Float[np.ndarray, "s 2 2"]:
    """Sides between inside and outside, as line segments ((x, y), (x, y)).

    >>> borders(np.array([[True, True]]), (0.0, 4.0, 3.0, 0.0)).tolist()  # a rectangle of 4 x 3
    [[[0.0, 0.0], [4.0, 0.0]], [[0.0, 3.0], [4.0, 3.0]],
     [[0.0, 0.0], [0.0, 3.0]], [[4.0, 0.0], [4.0, 3.0]]]
    """
    padded = np.pad(mask, 1)
    lying = _runs(padded[1:, 1:-1] != padded[:-1, 1:-1])
    upright = _runs((padded[1:-1, 1:] != padded[1:-1, :-1]).T)[..., ::-1]
    left, right, bottom, top = extent
    pixel = np.array([(right - left) / mask.shape[1], (bottom - top) / mask.shape[0]])
    return np.concatenate([lying, upright]) * pixel + np.array([left, top])


def _runs(side: Bool[np.ndarray, "lines cells"]) -> Int[np.ndarray, "s 2 2"]:
    """Unbroken runs along the lines, as ((first cell, line), (cell past the last, line))."""
    change = np.diff(np.pad(side, ((0, 0), (1, 1))).astype(np.int8), axis=1)
    ends = [np.stack([cell, line], 1) for line, cell in map(np.nonzero, (change > 0, change < 0))]
    return np.stack(ends, axis=1)
