"""Panels of a figure of maps: where they stand, and what is written above and below them.

Lengths are inches. Panels stand side by side, those of wide slides one above the other.
"""

import textwrap
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.transforms import offset_copy

from gpmil.show.plots import FONT, INK, MUTED, new_figure
from gpmil.show.slides import Extent

GAP, MARGIN, HEAD, FOOT = 0.25, 0.1, 0.3, 0.5
TITLE, RULER, SECOND_BAR, LINE = 0.26, 0.3, 0.46, 0.145
WIDE = 2.2  # width by height from which on panels are stacked
SMALL = FONT - 1.5  # size of words beside the panels
Ticks = Sequence[tuple[float, str]]  # places on a scale, and what stands there


class Words(NamedTuple):
    """What is written around the panels: above, and below them with what each line means."""

    title: str = ""
    about: Sequence[str] = ()
    handles: Sequence[Sequence[Artist]] = ()  # of the legend line by line, with their labels
    notes: Sequence[str] = ()


def arrange(
    count: int, view: Extent, box: tuple[float, float], foot: float, words: Words
) -> tuple[Figure, list[Axes]]:
    """A figure with `count` equal panels; below each there is room for `foot`."""
    shape = panel_shape(view, box)
    stacked = count > 1 and (view[1] - view[0]) > WIDE * abs(view[3] - view[2])
    if stacked:
        shape = panel_shape(view, (2 * box[0], box[1]))
    wide, high = shape[0], HEAD + shape[1] + foot + MARGIN
    columns, rows = (1, count) if stacked else (count, 1)
    width = 2 * MARGIN + columns * (wide + GAP) - GAP
    about, notes = (_wrapped(lines, width) for lines in (words.about, words.notes))
    head = (TITLE if words.title else 0) + len(about) * LINE
    below = (len(words.handles) + len(notes)) * LINE * 1.1
    figure = new_figure(width, head + rows * high + below)
    places = [(k % columns, rows - 1 - k // columns) for k in range(count)]
    axes = [
        axes_at(figure, MARGIN + c * (wide + GAP), below + r * high + foot + MARGIN, wide, shape[1])
        for c, r in places
    ]
    _write_above(figure, words.title, about)
    _write_below(figure, words.handles, notes)
    return figure, axes


def _wrapped(lines: Sequence[str], width: float) -> list[str]:
    """Lines no longer than the figure, half the font's size a letter."""
    letters = max(20, int((width - 2 * MARGIN) * 72 / (0.5 * SMALL)))
    return [part for line in lines for part in textwrap.wrap(line, letters)]


def _write_above(figure: Figure, title: str, about: Sequence[str]) -> None:
    width, height = figure.get_size_inches()
    left, top = MARGIN / width, height
    if title:
        # At most 0.6 of the font's size a letter: long names get a smaller font than be cut.
        size = min(FONT + 1, (width - 2 * MARGIN) * 72 / (0.6 * len(title)))
        figure.text(left, 1 - 0.2 / height, title, fontsize=size, color=INK)
        top -= TITLE
    for k, line in enumerate(about):
        y = (top - (k + 0.75) * LINE) / height
        figure.text(left, y, line, fontsize=SMALL, color=MUTED)


def _write_below(figure: Figure, handles: Sequence[Sequence[Artist]], notes: Sequence[str]) -> None:
    width, height = figure.get_size_inches()
    for k, note in enumerate(reversed(notes)):
        y = (k * 1.1 + 0.35) * LINE / height
        figure.text(MARGIN / width, y, note, fontsize=SMALL - 0.5, color=MUTED)
    for k, line in enumerate(reversed(handles)):
        figure.legend(
            handles=list(line),
            ncols=len(line),
            columnspacing=1.2,
            loc="lower left",
            bbox_to_anchor=(0, (len(notes) + k) * 1.1 * LINE / height),
            borderpad=0,
            borderaxespad=0.4,
            frameon=False,
            fontsize=SMALL - 0.5,
            labelcolor=MUTED,
        )


def panel_shape(
    extent: Extent, box: tuple[float, float], narrowest: float = 1.5
) -> tuple[float, float]:
    """Width and height of a panel: the slide's own proportions within the box.

    Headings and colour bars need some width even where the slide is a thin line.
    """
    left, right, bottom, top = extent
    scale = min(box[0] / (right - left), box[1] / (bottom - top))
    return max(scale * (right - left), narrowest), max(scale * (bottom - top), 0.6)


def axes_at(figure: Figure, left: float, bottom: float, width: float, height: float) -> Axes:
    """Axes without lines at a place."""
    w, h = figure.get_size_inches()
    ax = figure.add_axes((left / w, bottom / h, width / w, height / h))
    ax.set_axis_off()
    return ax


# --- Bars below a panel ---------------------------------------------------------------------------
def bar_below(
    ax: Axes, scale: ScalarMappable, label: str, foot: float, up: float = 0.0, ticks: Ticks = ()
) -> ScalarMappable:
    """The scale of a map below its panel, `up` above the lowest place of its foot."""
    figure = ax.get_figure(root=True)
    assert figure is not None
    inches = figure.get_size_inches()
    box = ax.get_position(original=True)
    wide = min(0.82 * box.width * inches[0], 1.9)  # the numbers at its ends need room
    left = (box.x0 + box.width / 2) * inches[0] - wide / 2
    bottom = box.y0 * inches[1] - foot + FOOT - 0.16 + up
    colour_bar(figure, axes_at(figure, left, bottom, wide, 0.08), scale, label, ticks)
    return scale


def colour_bar(
    figure: Figure, ax: Axes, image: ScalarMappable, label: str, ticks: Ticks = ()
) -> None:
    """A horizontal colour bar that fills the axes, with its ends and the middle as numbers."""
    ax.set_axis_on()
    bar = figure.colorbar(image, cax=ax, orientation="horizontal")
    bar.outline.set_visible(False)
    low, high = image.get_clim()
    if not ticks and low is not None and high is not None:
        # few numbers: narrow panels have no room for more
        ticks = [(at, f"{at:.3g}") for at in (low, (low + high) / 2, high)]
    if ticks:
        bar.set_ticks([at for at, _ in ticks], labels=[word for _, word in ticks])
        words = ax.get_xticklabels()
        words[0].set_horizontalalignment("left")  # not into the bar of the next panel
        words[-1].set_horizontalalignment("right")
    ax.tick_params(labelsize=FONT - 2, colors=MUTED, length=2, width=0.6)
    ax.set_xlabel(label, fontsize=SMALL, color=MUTED, labelpad=1)


def ruler(ax: Axes, view: Extent, mpp: float) -> None:
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
