"""Heat maps: values of patches drawn where the patches lie.

Patches are rasterised on their own grid, one pixel a cell. Pieces of tissue that lie off a common
lattice are drawn where they are, on finer pixels; where patches overlap, values are averaged.
Probabilities always have the scale 0 to 1, so that two maps can be compared by eye.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Int, Shaped
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.collections import LineCollection
from matplotlib.colors import Colormap, ListedColormap, Normalize
from matplotlib.figure import Figure
from matplotlib.image import AxesImage
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components

from gpmil.graphs import grid_edges
from gpmil.plots import FONT, INK, MUTED, new_figure

PROBABILITY = "viridis"
UNCERTAINTY = "cividis"
BENIGN, MALIGNANT, UNKNOWN = "#c9ccd1", "#b2182b", "#eef0f2"
OUTLINE = "#ff2e63"

FINE = 8  # pixels a step where pieces lie off a common lattice
MOST_PIXELS = 4_000_000  # coarser pixels beyond this: a map is to be looked at
ON_LATTICE = 0.05  # steps by which pieces of one lattice may differ

Coords = Shaped[np.ndarray, "n k"]
Values = Shaped[np.ndarray, " n"]


# --- From patches to pixels -----------------------------------------------------------------------
@dataclass(frozen=True)
class Layout:
    """Where the patches of a slide lie on a canvas of pixels; `lay_out` makes one.

    extent is (left, right, bottom, top) in the unit of the coordinates, y downwards.
    """

    pixel: Int[np.ndarray, "n 2"]  # column and row of the patch's upper left pixel
    cover: tuple[int, int]  # columns and rows that a patch covers
    extent: tuple[float, float, float, float]

    def paint(self, values: Values) -> Float[np.ndarray, "h w"]:
        """Mean of the values (n,) of the patches that cover each pixel; NaN where there is none.

        A patch whose value is NaN is left out.
        """
        if len(values) != len(self.pixel):
            raise ValueError(
                f"values: expected one a patch, {len(self.pixel)} in all, found {len(values)}."
            )
        known = np.isfinite(values)
        (x, y), given = self.pixel[known].T, np.asarray(values, dtype=np.float64)[known]
        width, height = self.pixel.max(axis=0) + self.cover
        total, count = np.zeros((height, width)), np.zeros((height, width), dtype=np.int64)
        for dx, dy in product(*map(range, self.cover)):
            np.add.at(total, (y + dy, x + dx), given)
            np.add.at(count, (y + dy, x + dx), 1)
        return np.where(count > 0, total / np.maximum(count, 1), np.nan)


def lay_out(coords: Coords, step: Any, size: Any = None) -> Layout:
    """Place patches on pixels.

    Parameters
    ----------
    coords
        (n, 2) upper left corners, or (n, 1) for a chain, which becomes a strip.
    step
        distance of neighbouring patches, one number or one an axis.
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
    side = np.ones(2) if size is None else _pair(size, "size") / step
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
    room = float(np.prod(np.ptp(away[piece] + cell, axis=0) + side))
    fine = _resolution(room, 1 if np.abs(off).max() <= ON_LATTICE else FINE)
    if fine >= 1:
        pixel = np.floor(away * fine + 0.5)[piece] + cell * fine
    else:
        pixel = np.floor((away[piece] + cell) * fine)
    cover = np.maximum(np.round(side * fine), 1)
    first, last = pixel.min(axis=0), pixel.max(axis=0) + cover
    (left, top), (right, bottom) = (base + first / fine) * step, (base + last / fine) * step
    return Layout(
        (pixel - first).astype(np.int64),
        (int(cover[0]), int(cover[1])),
        (float(left), float(right), float(bottom), float(top)),
    )


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
    step = _pair(step, "step")
    if coords.shape[1] == 1:
        return np.column_stack([coords, np.zeros(len(coords))]), step[[0, 0]]
    return coords, step


def _pair(value: Any, name: str) -> Float[np.ndarray, " 2"]:
    given = np.asarray(value, dtype=np.float64).ravel()
    if given.size not in (1, 2) or not (np.isfinite(given) & (given > 0)).all():
        raise ValueError(f"{name}: expected a positive number, or one an axis, found {value!r}.")
    return np.broadcast_to(given, (2,)).copy()


# --- Drawing on axes ------------------------------------------------------------------------------
def draw(
    ax: Axes,
    layout: Layout,
    values: Values,
    cmap: str | Colormap = PROBABILITY,
    limits: tuple[float, float] = (0.0, 1.0),
) -> AxesImage:
    """Draw values (n,) on a scale with these limits; where no tissue is, nothing is drawn."""
    ax.set_axis_off()
    return ax.imshow(
        layout.paint(values),
        extent=layout.extent,
        cmap=colormaps[cmap] if isinstance(cmap, str) else cmap,
        vmin=limits[0],
        vmax=limits[1],
        interpolation="nearest",
    )


def draw_truth(ax: Axes, layout: Layout, truth: Values) -> None:
    """Draw the true labels (n,): 1 malignant, 0 benign, anything else unknown."""
    benign, malignant = truth == 0, truth == 1
    for chosen, colour in (
        (~benign & ~malignant, UNKNOWN),
        (benign, BENIGN),
        (malignant, MALIGNANT),
    ):
        draw(ax, layout, np.where(chosen, 1.0, np.nan), ListedColormap([colour]))


def outline(
    ax: Axes, layout: Layout, inside: Bool[np.ndarray, " n"], colour: str = OUTLINE
) -> None:
    """Draw a line round the patches for which `inside` (n,) holds."""
    lines = _borders(layout.paint(inside) >= 0.5, layout.extent)
    ax.add_collection(
        LineCollection(list(lines), colors=colour, linewidths=1.0, capstyle="projecting")
    )


def _borders(
    mask: Bool[np.ndarray, "h w"], extent: tuple[float, float, float, float]
) -> Float[np.ndarray, "s 2 2"]:
    """Sides between inside and outside, as line segments ((x, y), (x, y)).

    >>> _borders(np.array([[True, True]]), (0.0, 4.0, 3.0, 0.0)).tolist()  # a rectangle of 4 x 3
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


# --- Figures (lengths in inches) ------------------------------------------------------------------
_GAP, _MARGIN, _HEAD, _FOOT = 0.25, 0.1, 0.3, 0.5


def heatmap(
    coords: Coords,
    values: Values,
    step: Any,
    *,
    std: Values | None = None,
    truth: Values | None = None,
    beside: bool = False,
    size: Any = None,
    std_limits: tuple[float, float] | None = None,
    box: tuple[float, float] = (1.95, 2.2),
) -> Figure:
    """One slide: patch probabilities (n,) and, where given, their uncertainty and the truth.

    Parameters
    ----------
    coords, step, size
        as in `lay_out`.
    values
        (n,) probabilities; NaN is not drawn.
    std
        (n,) uncertainty of each patch, drawn as a panel of its own.
    std_limits
        its colour scale, the same for all slides that are to be compared; default from 0 to the
        largest value.
    truth
        (n,) true labels, -1 unknown: malignant patches are outlined. With `beside`, the truth is
        also a panel of its own, the first one.
    box
        largest width and height of a panel.
    """
    layout = lay_out(coords, step, size)
    beside = beside and truth is not None
    figure, axes = _panels(1 + beside + (std is not None), _panel_shape(layout, box))
    if beside and truth is not None:
        draw_truth(axes[0], layout, truth)
        _heading(axes[0], "truth")
    shown = axes[int(beside) :]
    image = draw(shown[0], layout, values)
    _heading(shown[0], "prediction")
    _scale_below(shown[0], image, "probability")
    if std is not None:
        limits = (0.0, float(np.nanmax(std))) if std_limits is None else std_limits
        image = draw(shown[1], layout, std, UNCERTAINTY, limits)
        _heading(shown[1], "uncertainty")
        _scale_below(shown[1], image, "standard deviation")
    if truth is not None:
        for ax in shown:
            outline(ax, layout, truth == 1)
    return figure


class SlideMaps(NamedTuple):
    """A slide of `comparison`: its patches, the truth, one array of probabilities a model."""

    name: str
    coords: Coords
    step: Any
    truth: Values
    maps: Sequence[Values]


def comparison(slides: Sequence[SlideMaps], models: Sequence[str], width: float = 10.6) -> Figure:
    """Slides side by side: the truth and the probabilities of several models for each.

    `width` is that of the figure. Slides that do not fit beside each other start a new line.
    """
    layouts = [lay_out(slide.coords, slide.step) for slide in slides]
    height, lines = _arranged(layouts, 1 + len(models), width)
    line_height = 2 * _HEAD + height + _MARGIN
    figure = new_figure(width, len(lines) * line_height + _FOOT)
    bottom = figure.get_size_inches()[1]
    which = iter(zip(slides, layouts))
    for line in lines:
        bottom -= line_height
        spare = (width - 2 * _MARGIN - sum(_group_width(wide, models) for wide in line)) / len(line)
        left = _MARGIN + spare / 2
        for wide, (slide, layout) in zip(line, which):
            _draw_group(figure, slide, layout, models, (left, bottom + _MARGIN, wide, height))
            left += _group_width(wide, models) + spare
    bar = _axes_at(figure, width / 2 - 1.5, _FOOT - 0.12, 3.0, 0.09)
    scale = ScalarMappable(Normalize(0, 1), colormaps[PROBABILITY])
    _colour_bar(figure, bar, scale, "probability that a patch is malignant")
    return figure


def _arranged(
    layouts: Sequence[Layout], panels: int, width: float
) -> tuple[float, list[list[float]]]:
    """Height of a panel, and the widths of one panel of each slide, line by line.

    The largest height at which all slides stand in one line; where none is, several lines.
    """
    for height in (3.0, 2.7, 2.4, 2.1, 1.8):
        lines: list[list[float]] = []
        room = 0.0
        for layout in layouts:
            most = (width - 2 * _MARGIN - (panels + 1) * _GAP) / panels
            wide, _ = _panel_shape(layout, (most, height), narrowest=1.0)
            need = panels * wide + (panels - 1) * _MARGIN + _GAP
            if need > room:
                lines.append([])
                room = width - 2 * _MARGIN
            lines[-1].append(wide)
            room -= need
        if len(lines) == 1:
            break
    return height, lines


def _group_width(wide: float, models: Sequence[str]) -> float:
    return (1 + len(models)) * wide + len(models) * _MARGIN


def _draw_group(
    figure: Figure,
    slide: SlideMaps,
    layout: Layout,
    models: Sequence[str],
    place: tuple[float, float, float, float],
) -> None:
    """Draw the panels of one slide; `place` is left, bottom, width, height of the first."""
    left, bottom, wide, height = place
    axes = [
        _axes_at(figure, left + c * (wide + _MARGIN), bottom, wide, height)
        for c in range(1 + len(models))
    ]
    for ax, heading in zip(axes, ["truth", *models]):
        figure.text(*_point(figure, ax, 0.08), heading, ha="center", fontsize=FONT, color=INK)
    middle = _point(figure, axes[len(axes) // 2], 0.08 + _HEAD)
    figure.text(*middle, slide.name, ha="center", fontsize=FONT, color=MUTED)
    draw_truth(axes[0], layout, slide.truth)
    for ax, values in zip(axes[1:], slide.maps):
        draw(ax, layout, values)
        outline(ax, layout, slide.truth == 1)


def _point(figure: Figure, ax: Axes, above: float) -> tuple[float, float]:
    """The middle of the upper side of the axes' place, moved up by some inches."""
    box = ax.get_position(original=True)
    return box.x0 + box.width / 2, box.y1 + above / figure.get_size_inches()[1]


def _panel_shape(
    layout: Layout, box: tuple[float, float], narrowest: float = 1.5
) -> tuple[float, float]:
    """Width and height of a panel: the slide's own proportions within the box.

    Headings and colour bars need some width even where the slide is a thin line.
    """
    left, right, bottom, top = layout.extent
    scale = min(box[0] / (right - left), box[1] / (bottom - top))
    return max(scale * (right - left), narrowest), max(scale * (bottom - top), 0.6)


def _panels(count: int, shape: tuple[float, float]) -> tuple[Figure, list[Axes]]:
    width, height = shape
    foot = _FOOT + _MARGIN
    figure = new_figure(2 * _MARGIN + count * (width + _GAP) - _GAP, _HEAD + height + foot)
    lefts = [_MARGIN + i * (width + _GAP) for i in range(count)]
    return figure, [_axes_at(figure, left, foot, width, height) for left in lefts]


def _axes_at(figure: Figure, left: float, bottom: float, width: float, height: float) -> Axes:
    w, h = figure.get_size_inches()
    ax = figure.add_axes((left / w, bottom / h, width / w, height / h))
    ax.set_axis_off()
    return ax


def _heading(ax: Axes, text: str) -> None:
    ax.set_title(text, fontsize=FONT, color=INK, pad=4)


def _scale_below(ax: Axes, image: AxesImage, label: str) -> None:
    figure = image.get_figure(root=True)
    assert figure is not None
    inches = figure.get_size_inches()[0]
    box = ax.get_position(original=True)
    wide = min(box.width * inches, 1.9)
    left = (box.x0 + box.width / 2) * inches - wide / 2
    _colour_bar(figure, _axes_at(figure, left, _FOOT - 0.06, wide, 0.08), image, label)


def _colour_bar(figure: Figure, ax: Axes, image: ScalarMappable, label: str) -> None:
    ax.set_axis_on()
    bar = figure.colorbar(image, cax=ax, orientation="horizontal")
    bar.outline.set_visible(False)
    ax.tick_params(labelsize=FONT - 2, colors=MUTED, length=2, width=0.6)
    ax.set_xlabel(label, fontsize=FONT - 1.5, color=MUTED, labelpad=1)
