"""Heat maps: values of patches drawn where the patches lie.

Patches are rasterised on their own grid, one pixel a cell. Pieces of tissue that lie off a common
lattice are drawn where they are, on finer pixels; where patches overlap, values are averaged by
area. Probabilities always have the scale 0 to 1, so that two maps can be compared by eye.
Maps lie over the slide's thumbnail where there is one, see `gpmil.show.slides`.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any, Literal, NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Int, Shaped
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.collections import LineCollection
from matplotlib.colors import Colormap, ListedColormap, Normalize
from matplotlib.figure import Figure
from matplotlib.image import AxesImage
from matplotlib.lines import Line2D
from matplotlib.transforms import offset_copy
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components

from gpmil.data.graphs import grid_edges
from gpmil.show.plots import DPI, FONT, INK, MUTED, new_figure
from gpmil.show.slides import Extent, Thumbnail

__all__ = [
    "BENIGN",
    "FAINTEST",
    "FINE",
    "MALIGNANT",
    "MOST_PIXELS",
    "ON_LATTICE",
    "OUTLINE",
    "OVER_SLIDE",
    "PROBABILITY",
    "SLIVER",
    "UNCERTAINTY",
    "UNKNOWN",
    "Coords",
    "Layout",
    "SlideMaps",
    "Uncertainty",
    "Values",
    "comparison",
    "draw",
    "draw_slide",
    "draw_truth",
    "heatmap",
    "lay_out",
    "opacity",
    "outline",
    "outline_flags",
    "round_length",
    "sharp_dpi",
]

PROBABILITY = "viridis"
UNCERTAINTY = "cividis"
BENIGN, MALIGNANT, UNKNOWN = "#c9ccd1", "#b2182b", "#eef0f2"
OUTLINE = "#ff2e63"  # of the truth; flags have a white line with a dark edge, seen on any colour

OVER_SLIDE = 0.7  # opacity of a map over a thumbnail: the tissue shows through
FAINTEST = 0.12  # opacity of the least certain patch: it can still be seen

FINE = 8  # pixels a step where pieces lie off a common lattice
MOST_PIXELS = 4_000_000  # coarser pixels beyond this: a map is to be looked at
ON_LATTICE = 0.05  # steps by which pieces of one lattice may differ
SLIVER = 1e-6  # pixels: less is rounding, not tissue

Coords = Shaped[np.ndarray, "n k"]
Values = Shaped[np.ndarray, " n"]


# --- From patches to pixels -----------------------------------------------------------------------
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
                f"values: expected one a patch, {len(self.pixel)} in all, found {len(values)}."
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
    alpha: float | Float[np.ndarray, "h w"] | None = None,
) -> AxesImage:
    """Draw values (n,) on a scale with these limits; where no tissue is, nothing is drawn.

    `alpha` is the opacity, one number or one a pixel.
    """
    ax.set_axis_off()
    return ax.imshow(
        layout.paint(values),
        extent=layout.extent,
        cmap=colormaps[cmap] if isinstance(cmap, str) else cmap,
        vmin=limits[0],
        vmax=limits[1],
        interpolation="nearest",
        alpha=alpha,
    )


def draw_slide(ax: Axes, slide: Thumbnail, faint: bool = False) -> None:
    """Draw a thumbnail; `faint` in light greys, for a map to lie over it."""
    image = slide.image
    if faint:
        grey = image.mean(axis=2, keepdims=True)
        image = np.repeat(128 + grey / 2, 3, axis=2).astype(np.uint8)
    ax.set_axis_off()
    ax.imshow(image, extent=slide.extent)


def outline_flags(ax: Axes, layout: Layout, flagged: Bool[np.ndarray, " n"]) -> None:
    """Draw a white line with a dark edge round flagged patches (n,), thin where patches are small.

    To be called when the view of the axes is set: the width follows from the size of a patch.
    """
    width = float(np.clip(0.3 * _points_a_patch(ax, layout), 0.35, 1.0))
    for colour, times in ((INK, 2.4), ("white", 1.0)):
        outline(ax, layout, flagged, colour)
        ax.collections[-1].set(linewidth=times * width)


def _points_a_patch(ax: Axes, layout: Layout) -> float:
    """Width of a patch on paper, in points."""
    left, right, _, _ = layout.extent
    patch = (right - left) / layout.shape[0] * layout.cover[0]
    box, figure = ax.get_position(), ax.get_figure(root=True)
    assert figure is not None
    low, high = ax.get_xlim()
    return float(72 * box.width * figure.get_size_inches()[0] * patch / abs(high - low))


def opacity(layout: Layout, std: Values, limits: tuple[float, float]) -> Float[np.ndarray, "h w"]:
    """Opacity of each pixel: 1 at the lower limit of the uncertainty (n,), faint at the upper one.

    Patches of unknown uncertainty are as faint as the least certain ones.

    >>> layout = lay_out(np.array([[0], [1], [2]]), 1)
    >>> opacity(layout, np.array([0.0, 0.2, 0.4]), (0.0, 0.4))
    array([[1.  , 0.56, 0.12]])
    """
    low, high = limits
    doubt = (layout.paint(std) - low) / (high - low if high > low else 1.0)
    return 1 - (1 - FAINTEST) * np.clip(np.nan_to_num(doubt, nan=1.0), 0, 1)


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
_TITLE, _RULER, _SECOND_BAR = 0.42, 0.3, 0.46
Uncertainty = Literal["panel", "opacity"]


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
    flagged: Values | None = None,
    uncertainty: Uncertainty = "panel",
    slide: Thumbnail | None = None,
    mpp: float | None = None,
    title: str = "",
) -> Figure:
    """One slide: patch probabilities (n,) and, where given, their uncertainty and the truth.

    Parameters
    ----------
    coords, step, size
        as in `lay_out`.
    values
        (n,) probabilities; NaN is not drawn.
    std
        (n,) uncertainty of each patch, drawn as `uncertainty` says: "panel", a panel of its own,
        or "opacity", the less certain the fainter.
    std_limits
        its scale, the same for all slides that are to be compared; default from 0 to the largest
        value.
    truth
        (n,) true labels, -1 unknown: malignant patches are outlined. With `beside`, the truth is
        also a panel of its own, the first one.
    box
        largest width and height of a panel.
    flagged
        (n,) patches that are flagged: outlined in white with a dark edge.
    slide
        the slide's thumbnail: a panel of its own, and in grey beneath the maps. Coordinates are
        level-0 pixels then.
    mpp
        microns per unit of the coordinates, for a scale bar; default that of the slide, and
        without either there is no scale bar.
    title
        a line above, such as the slide's name.
    """
    layout = lay_out(coords, step, size)
    beside = beside and truth is not None
    limits = _std_limits(std, std_limits)
    faint = std is not None and uncertainty == "opacity"
    second = std is not None and not faint
    mpp = slide.mpp[0] if mpp is None and slide is not None and slide.mpp is not None else mpp
    view = layout.extent if slide is None else slide.extent
    figure, axes = _panels(
        1 + beside + second + (slide is not None),
        _panel_shape(view, box),
        _HEAD + (_TITLE if title else 0),
        _FOOT + (_RULER if mpp else 0) + (_SECOND_BAR if faint else 0),
    )
    panels = iter(axes)
    if beside and truth is not None:
        _draw_panel(ax := next(panels), "truth", slide)
        draw_truth(ax, layout, truth)
    if slide is not None:
        draw_slide(ax := next(panels), slide)
        _heading(ax, "slide")
    over = None if slide is None else OVER_SLIDE
    _draw_panel(ax := next(panels), "prediction", slide)
    veil = opacity(layout, std, limits) if faint and std is not None else over
    image = draw(ax, layout, values, alpha=veil)
    _scale_below(ax, image, "probability", _SECOND_BAR if faint else 0)
    if faint:
        _fading_below(ax, limits)
    if second and std is not None:
        _draw_panel(ax := next(panels), "uncertainty", slide)
        image = draw(ax, layout, std, UNCERTAINTY, limits, over)
        _scale_below(ax, image, "standard deviation")
    for ax in axes:
        ax.set(xlim=view[:2], ylim=view[2:])
    for ax in axes[int(beside) :]:
        if truth is not None:
            outline(ax, layout, truth == 1)
        if flagged is not None:
            outline_flags(ax, layout, np.asarray(flagged, dtype=bool))
    if mpp:
        _ruler(axes[0], view, mpp)
    if title:
        _title(figure, title, _counts(len(layout.pixel), flagged))
    return figure


def sharp_dpi(figure: Figure, least: float = DPI, most: float = 450.0) -> float:
    """Dots an inch at which every pixel of the figure's maps has a dot, within limits."""
    inches = figure.get_size_inches()
    needed = [least]
    for ax in figure.axes:
        place = ax.get_position(original=True)
        for image in ax.images:
            left, right, bottom, top = image.get_extent()
            view = abs(np.diff(ax.get_xlim())[0]), abs(np.diff(ax.get_ylim())[0])
            rows, columns = image.get_size()
            if len(image.get_array().shape) == 2:  # type: ignore[union-attr]  # not a photograph
                needed += [
                    columns * view[0] / abs(right - left) / (place.width * inches[0]),
                    rows * view[1] / abs(bottom - top) / (place.height * inches[1]),
                ]
    return float(min(max(needed), most))


def _std_limits(std: Values | None, limits: tuple[float, float] | None) -> tuple[float, float]:
    if limits is not None:
        return limits
    known = np.zeros(0) if std is None else std[np.isfinite(std)]
    return 0.0, float(known.max()) if len(known) else 1.0


def _draw_panel(ax: Axes, heading: str, slide: Thumbnail | None) -> None:
    if slide is not None:
        draw_slide(ax, slide, faint=True)
    _heading(ax, heading)


def _counts(n: int, flagged: Values | None) -> str:
    """What the map shows, in words."""
    patches = f"{n:,} patch" + ("es" if n != 1 else "")
    if flagged is None:
        return patches
    marked = int(np.asarray(flagged, dtype=bool).sum())
    return f"{patches}, {marked:,} flagged" + (" (outlined)" if marked else "")


def _title(figure: Figure, title: str, below: str) -> None:
    width, height = figure.get_size_inches()
    # At most 0.6 of the font's size a letter: long names get a smaller font rather than be cut.
    size = min(FONT + 1, (width - 2 * _MARGIN) * 72 / (0.6 * len(title)))
    left = _MARGIN / width
    figure.text(left, 1 - 0.2 / height, title, fontsize=size, color=INK)
    figure.text(left, 1 - 0.38 / height, below, fontsize=FONT - 1.5, color=MUTED)


def _ruler(ax: Axes, view: Extent, mpp: float) -> None:
    """A scale bar below the axes, at most a third of the view."""
    left, right, _, _ = view
    microns = round_length((right - left) * mpp / 3)
    share = microns / mpp / (right - left)
    text = f"{microns / 1000:g} mm" if microns >= 1000 else f"{microns:g} µm"
    line = Line2D([0, share], [0, 0], color=INK, linewidth=2, solid_capstyle="butt")
    ax.add_artist(line)
    below = offset_copy(ax.transAxes, ax.get_figure(root=True), 0, -7, "points")
    line.set(transform=below, clip_on=False)
    ax.annotate(
        text,
        (share / 2, 0),
        (0, -10),
        xycoords="axes fraction",
        textcoords="offset points",
        ha="center",
        va="top",
        fontsize=FONT - 2,
        color=INK,
    )


def round_length(most: float) -> float:
    """The largest of 1, 2, 5, 10, 20, 50, ... that is at most `most`.

    >>> [round_length(most) for most in (0.7, 3.0, 49.9, 50.0, 812.0)]
    [0.5, 2.0, 20.0, 50.0, 500.0]
    """
    power = 10.0 ** np.floor(np.log10(most))
    return float(max(d * power for d in (1, 2, 5) if d * power <= most * (1 + 1e-9)))


class SlideMaps(NamedTuple):
    """A slide of `comparison`: its patches, the truth, one array of probabilities a model."""

    name: str
    coords: Coords
    step: Any
    truth: Values | None  # without any there is no panel for it
    maps: Sequence[Values]
    size: Any = None  # side of a patch where it differs from the step


def comparison(slides: Sequence[SlideMaps], models: Sequence[str], width: float = 10.6) -> Figure:
    """Slides side by side: the truth and the probabilities of several models for each.

    `width` is that of the figure. Slides that do not fit beside each other start a new line.
    """
    layouts = [lay_out(slide.coords, slide.step, slide.size) for slide in slides]
    told = any(slide.truth is not None for slide in slides)
    headings = [*(["truth"] if told else []), *models]
    height, lines = _arranged(layouts, len(headings), width)
    line_height = 2 * _HEAD + height + _MARGIN
    figure = new_figure(width, len(lines) * line_height + _FOOT)
    bottom = figure.get_size_inches()[1]
    which = iter(zip(slides, layouts))
    for line in lines:
        bottom -= line_height
        spare = (width - 2 * _MARGIN - sum(_group_width(wide, headings) for wide in line)) / len(
            line
        )
        left = _MARGIN + spare / 2
        for wide, (slide, layout) in zip(line, which):
            _draw_group(figure, slide, layout, headings, (left, bottom + _MARGIN, wide, height))
            left += _group_width(wide, headings) + spare
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
            wide, _ = _panel_shape(layout.extent, (most, height), narrowest=1.0)
            need = panels * wide + (panels - 1) * _MARGIN + _GAP
            if need > room:
                lines.append([])
                room = width - 2 * _MARGIN
            lines[-1].append(wide)
            room -= need
        if len(lines) == 1:
            break
    return height, lines


def _group_width(wide: float, headings: Sequence[str]) -> float:
    return len(headings) * wide + (len(headings) - 1) * _MARGIN


def _draw_group(
    figure: Figure,
    slide: SlideMaps,
    layout: Layout,
    headings: Sequence[str],
    place: tuple[float, float, float, float],
) -> None:
    """Draw the panels of one slide; `place` is left, bottom, width, height of the first."""
    left, bottom, wide, height = place
    axes = [
        _axes_at(figure, left + c * (wide + _MARGIN), bottom, wide, height)
        for c in range(len(headings))
    ]
    for ax, heading in zip(axes, headings):
        figure.text(*_point(figure, ax, 0.08), heading, ha="center", fontsize=FONT, color=INK)
    middle = _point(figure, axes[len(axes) // 2], 0.08 + _HEAD)
    figure.text(*middle, slide.name, ha="center", fontsize=FONT, color=MUTED)
    truth = np.full(len(slide.coords), -1) if slide.truth is None else slide.truth
    if len(headings) > len(slide.maps):
        draw_truth(axes[0], layout, truth)
    for ax, values in zip(axes[-len(slide.maps) :], slide.maps):
        draw(ax, layout, values)
        outline(ax, layout, truth == 1)


def _point(figure: Figure, ax: Axes, above: float) -> tuple[float, float]:
    """The middle of the upper side of the axes' place, moved up by some inches."""
    box = ax.get_position(original=True)
    return box.x0 + box.width / 2, box.y1 + above / figure.get_size_inches()[1]


def _panel_shape(
    extent: Extent, box: tuple[float, float], narrowest: float = 1.5
) -> tuple[float, float]:
    """Width and height of a panel: the slide's own proportions within the box.

    Headings and colour bars need some width even where the slide is a thin line.
    """
    left, right, bottom, top = extent
    scale = min(box[0] / (right - left), box[1] / (bottom - top))
    return max(scale * (right - left), narrowest), max(scale * (bottom - top), 0.6)


def _panels(
    count: int, shape: tuple[float, float], head: float = _HEAD, foot: float = _FOOT
) -> tuple[Figure, list[Axes]]:
    width, height = shape
    foot += _MARGIN
    figure = new_figure(2 * _MARGIN + count * (width + _GAP) - _GAP, head + height + foot)
    lefts = [_MARGIN + i * (width + _GAP) for i in range(count)]
    return figure, [_axes_at(figure, left, foot, width, height) for left in lefts]


def _axes_at(figure: Figure, left: float, bottom: float, width: float, height: float) -> Axes:
    w, h = figure.get_size_inches()
    ax = figure.add_axes((left / w, bottom / h, width / w, height / h))
    ax.set_axis_off()
    return ax


def _heading(ax: Axes, text: str) -> None:
    ax.set_title(text, fontsize=FONT, color=INK, pad=4)


def _scale_below(ax: Axes, image: AxesImage, label: str, up: float = 0.0) -> None:
    figure, bar = _bar_below(ax, up)
    _colour_bar(figure, bar, image, label)


def _bar_below(ax: Axes, up: float) -> tuple[Figure, Axes]:
    """Axes for a bar below the panel, `up` inches above the lowest place."""
    figure = ax.get_figure(root=True)
    assert figure is not None
    inches = figure.get_size_inches()[0]
    box = ax.get_position(original=True)
    wide = min(box.width * inches, 1.9)
    left = (box.x0 + box.width / 2) * inches - wide / 2
    return figure, _axes_at(figure, left, _FOOT - 0.06 + up, wide, 0.08)


def _fading_below(ax: Axes, limits: tuple[float, float]) -> None:
    """The scale of an uncertainty that is drawn as opacity."""
    figure, bar = _bar_below(ax, 0.0)
    shades = ListedColormap([(0.2, 0.2, 0.2, a) for a in np.linspace(1, FAINTEST, 64)])
    scale = ScalarMappable(Normalize(*limits), shades)
    _colour_bar(figure, bar, scale, "standard deviation, as opacity")


def _colour_bar(figure: Figure, ax: Axes, image: ScalarMappable, label: str) -> None:
    ax.set_axis_on()
    bar = figure.colorbar(image, cax=ax, orientation="horizontal")
    bar.outline.set_visible(False)
    ax.tick_params(labelsize=FONT - 2, colors=MUTED, length=2, width=0.6)
    ax.set_xlabel(label, fontsize=FONT - 1.5, color=MUTED, labelpad=1)
