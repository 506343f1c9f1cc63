"""Heat maps: values of patches drawn where the patches lie.

Patches are rasterised on their own grid (`gpmil.show.raster`). Probabilities always have the scale
0 to 1, so that two maps can be compared by eye. Maps lie over the slide's thumbnail where there is
one, see `gpmil.show.slides`.
"""

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import ListedColormap, Normalize
from matplotlib.figure import Figure
from matplotlib.image import AxesImage
from matplotlib.lines import Line2D
from matplotlib.transforms import offset_copy

from gpmil.show.layers import (
    BENIGN,
    FAINTEST,
    MALIGNANT,
    OUTLINE,
    OVER_SLIDE,
    PROBABILITY,
    UNCERTAINTY,
    UNKNOWN,
    draw,
    draw_slide,
    draw_truth,
    opacity,
    outline,
    outline_flags,
)
from gpmil.show.plots import DPI, FONT, INK, MUTED, new_figure
from gpmil.show.raster import (
    FINE,
    MOST_PIXELS,
    ON_LATTICE,
    SLIVER,
    Coords,
    Layout,
    Values,
    lay_out,
)
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

# --- Figures (lengths in inches) ------------------------------------------------------------------
_GAP, _MARGIN, _HEAD, _FOOT = 0.25, 0.1, 0.3, 0.5
_TITLE, _RULER, _SECOND_BAR = 0.42, 0.3, 0.46
Uncertainty = Literal["panel", "opacity"]


class _Patches(NamedTuple):
    """The patches of one slide, and what is known of them."""

    layout: Layout
    values: Values
    std: Values | None
    std_limits: tuple[float, float]
    truth: Values | None
    flagged: Values | None


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
    coords, step, size : as in `lay_out`
    values : (n,) probabilities; NaN is not drawn
    std : (n,) uncertainty of each patch, drawn as `uncertainty` says: "panel", a panel of its own,
        or "opacity", the less certain the fainter
    std_limits : its scale, the same for all slides that are to be compared; default from 0 to the
        largest value
    truth : (n,) true labels, -1 unknown: malignant patches are outlined. With `beside`, the truth
        is also a panel of its own, the first one
    box : largest width and height of a panel
    flagged : (n,) patches that are flagged: outlined in white with a dark edge
    slide : the slide's thumbnail: a panel of its own, and in grey beneath the maps. Coordinates are
        level-0 pixels then
    mpp : microns per unit of the coordinates, for a scale bar; default that of the slide, and
        without either there is no scale bar
    title : a line above, such as the slide's name
    """
    layout, limits = lay_out(coords, step, size), _std_limits(std, std_limits)
    patches = _Patches(layout, values, std, limits, truth, flagged)
    if mpp is None and slide is not None and slide.mpp is not None:
        mpp = slide.mpp[0]
    return _slide_figure(patches, slide, mpp, box, title, beside, uncertainty == "opacity")


def _slide_figure(
    patches: _Patches,
    slide: Thumbnail | None,
    mpp: float | None,
    box: tuple[float, float],
    title: str,
    beside: bool,
    fading: bool,
) -> Figure:
    """The panels of one slide side by side; `fading`: uncertainty is drawn as opacity."""
    fading = fading and patches.std is not None
    there = {
        "truth": beside and patches.truth is not None,
        "slide": slide is not None,
        "prediction": True,
        "uncertainty": patches.std is not None and not fading,
    }
    panels = [name for name, wanted in there.items() if wanted]
    view = patches.layout.extent if slide is None else slide.extent
    head = _HEAD + (_TITLE if title else 0)
    foot = _FOOT + (_RULER if mpp else 0) + (_SECOND_BAR if fading else 0)
    figure, axes = _panels(len(panels), _panel_shape(view, box), head, foot)
    for ax, name in zip(axes, panels):
        _draw_panel(ax, name, patches, slide, fading)
        ax.set(xlim=view[:2], ylim=view[2:])
    for ax in axes[int(there["truth"]) :]:
        _draw_outlines(ax, patches)
    if mpp:
        _ruler(axes[0], view, mpp)
    if title:
        _title(figure, title, _counts(len(patches.layout.pixel), patches.flagged))
    return figure


def _draw_panel(
    ax: Axes, name: str, patches: _Patches, slide: Thumbnail | None, fading: bool
) -> None:
    if slide is not None:
        draw_slide(ax, slide, faint=name != "slide")
    ax.set_title(name, fontsize=FONT, color=INK, pad=4)
    over = None if slide is None else OVER_SLIDE
    if name == "truth" and patches.truth is not None:
        draw_truth(ax, patches.layout, patches.truth)
    elif name == "prediction":
        _draw_prediction(ax, patches, over, fading)
    elif name == "uncertainty" and patches.std is not None:
        image = draw(ax, patches.layout, patches.std, UNCERTAINTY, patches.std_limits, over)
        _scale_below(ax, image, "standard deviation")


def _draw_prediction(ax: Axes, patches: _Patches, over: float | None, fading: bool) -> None:
    if not fading or patches.std is None:
        _scale_below(ax, draw(ax, patches.layout, patches.values, alpha=over), "probability")
        return
    veil = opacity(patches.layout, patches.std, patches.std_limits)
    image = draw(ax, patches.layout, patches.values, alpha=veil)
    _scale_below(ax, image, "probability", _SECOND_BAR)
    _fading_below(ax, patches.std_limits)


def _draw_outlines(ax: Axes, patches: _Patches) -> None:
    if patches.truth is not None:
        outline(ax, patches.layout, patches.truth == 1)
    if patches.flagged is not None:
        outline_flags(ax, patches.layout, np.asarray(patches.flagged, dtype=bool))


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
