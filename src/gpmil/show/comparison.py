"""Slides side by side: the truth and the probabilities of several models for each."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import Normalize
from matplotlib.figure import Figure

from gpmil.show.layers import PROBABILITY, draw, draw_truth, outline, scale_top
from gpmil.show.panels import FOOT, GAP, HEAD, MARGIN, axes_at, colour_bar, panel_shape
from gpmil.show.plots import FONT, INK, MUTED, new_figure
from gpmil.show.raster import Coords, Layout, Values, lay_out


class SlideMaps(NamedTuple):
    """A slide of `comparison`: its patches, the truth, one array of probabilities per model."""

    name: str
    coords: Coords
    step: Any
    truth: Values | None  # without any there is no panel for it
    maps: Sequence[Values]
    size: Any = None  # side of a patch where it differs from the step


def comparison(
    slides: Sequence[SlideMaps],
    models: Sequence[str],
    width: float = 10.6,
    shown: str = "probability that a patch is positive",
) -> Figure:
    """Slides side by side: the truth and the probabilities of several models for each.

    `width` is that of the figure. Slides that do not fit beside each other start a new line. All
    have one scale, from 0 to a round number above the largest value; `shown` stands below it.
    """
    layouts = [lay_out(slide.coords, slide.step, slide.size) for slide in slides]
    told = any(slide.truth is not None for slide in slides)
    headings = [*(["truth"] if told else []), *models]
    height, lines = _arranged(layouts, len(headings), width)
    line_height = 2 * HEAD + height + MARGIN
    figure = new_figure(width, len(lines) * line_height + FOOT)
    bottom = figure.get_size_inches()[1]
    which, top = iter(zip(slides, layouts)), scale_top(*(v for s in slides for v in s.maps))
    for line in lines:
        bottom -= line_height
        spare = (width - 2 * MARGIN - sum(_group_width(wide, headings) for wide in line)) / len(
            line
        )
        left = MARGIN + spare / 2
        for wide, (slide, layout) in zip(line, which):
            place = (left, bottom + MARGIN, wide, height)
            _draw_group(figure, slide, layout, headings, place, top)
            left += _group_width(wide, headings) + spare
    bar = axes_at(figure, width / 2 - 1.5, FOOT - 0.12, 3.0, 0.09)
    scale = ScalarMappable(Normalize(0, top), colormaps[PROBABILITY])
    colour_bar(figure, bar, scale, shown)
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
            most = (width - 2 * MARGIN - (panels + 1) * GAP) / panels
            wide, _ = panel_shape(layout.extent, (most, height), narrowest=1.0)
            need = panels * wide + (panels - 1) * MARGIN + GAP
            if need > room:
                lines.append([])
                room = width - 2 * MARGIN
            lines[-1].append(wide)
            room -= need
        if len(lines) == 1:
            break
    return height, lines


def _group_width(wide: float, headings: Sequence[str]) -> float:
    return len(headings) * wide + (len(headings) - 1) * MARGIN


def _draw_group(
    figure: Figure,
    slide: SlideMaps,
    layout: Layout,
    headings: Sequence[str],
    place: tuple[float, float, float, float],
    top: float,
) -> None:
    """Draw the panels of one slide; `place` is left, bottom, width, height of the first."""
    left, bottom, wide, height = place
    axes = [
        axes_at(figure, left + c * (wide + MARGIN), bottom, wide, height)
        for c in range(len(headings))
    ]
    for ax, heading in zip(axes, headings):
        figure.text(*_point(figure, ax, 0.08), heading, ha="center", fontsize=FONT, color=INK)
    middle = _point(figure, axes[len(axes) // 2], 0.08 + HEAD)
    figure.text(*middle, slide.name, ha="center", fontsize=FONT, color=MUTED)
    truth = np.full(len(slide.coords), -1) if slide.truth is None else slide.truth
    if len(headings) > len(slide.maps):
        draw_truth(axes[0], layout, truth)
    for ax, values in zip(axes[-len(slide.maps) :], slide.maps):
        draw(ax, layout, values, limits=(0.0, top))
        outline(ax, layout, truth == 1)


def _point(figure: Figure, ax: Axes, above: float) -> tuple[float, float]:
    """The middle of the upper side of the axes' place, moved up by some inches."""
    box = ax.get_position(original=True)
    return box.x0 + box.width / 2, box.y1 + above / figure.get_size_inches()[1]
