"""Heat maps: values of patches drawn where the patches lie.

Patches are rasterised on their own grid (`gpmil.show.raster`). Suspicion has one scale everywhere;
that of probabilities ends at a round number above the largest value, or where `limits` say, so that
maps can be compared by eye. Maps lie over the slide's thumbnail where there is one, see
`gpmil.show.slides`. Elsewhere sections that lie far apart are moved together.
"""

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, TypedDict, Unpack

import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import ListedColormap, Normalize
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from gpmil.show.classes import ClassLayer
from gpmil.show.comparison import SlideMaps, comparison
from gpmil.show.layers import (
    BENIGN,
    EXPLAINED,
    FAINTEST,
    MALIGNANT,
    OUTLINE,
    OVER_SLIDE,
    PROBABILITY,
    TISSUE,
    UNCERTAINTY,
    UNKNOWN,
    doubt_limits,
    draw,
    draw_classes,
    draw_slide,
    draw_suspicion,
    draw_truth,
    hatch,
    opacity,
    outline,
    scale_top,
    suspicion,
)
from gpmil.show.panels import (
    FOOT,
    RULER,
    SECOND_BAR,
    Words,
    arrange,
    bar_below,
    round_length,
    ruler,
)
from gpmil.show.plots import DPI, FONT, INK, MUTED
from gpmil.show.raster import (
    FINE,
    MOST_PIXELS,
    ON_LATTICE,
    SLIVER,
    Coords,
    Layout,
    Values,
    close_gaps,
    lay_out,
)
from gpmil.show.slides import Thumbnail

__all__ = [
    "BENIGN",
    "EXPLAINED",
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
    "ClassLayer",
    "Coords",
    "Layers",
    "Layout",
    "SlideMaps",
    "Uncertainty",
    "Values",
    "close_gaps",
    "comparison",
    "doubt_limits",
    "draw",
    "draw_slide",
    "draw_suspicion",
    "draw_truth",
    "hatch",
    "heatmap",
    "lay_out",
    "opacity",
    "outline",
    "round_length",
    "scale_top",
    "sharp_dpi",
    "suspicion",
]

Uncertainty = Literal["panel", "opacity"]
TICKS = ((0.0, "1"), (1.0, "0.1"), (2.0, "0.01"), (3.0, "0.001"))  # of suspicion
MARKED = ("suspicion", "grade", "type", "probability", "unlike")  # panels with marks on them
NO_P_VALUES = (
    "no suspicion: there are no p-values (the model was fitted without flags, or another coupling "
    "was asked for)"
)


class _Patches(NamedTuple):
    """The patches of one slide, what is known of them, and the scales it is drawn on."""

    layout: Layout
    values: Values
    limits: tuple[float, float]
    p_value: Values | None
    unlike: Values | None
    doubt: Values | None  # or a standard deviation, where there is no doubt
    doubt_limits: tuple[float, float]
    doubt_name: str
    truth: Values | None
    flagged: Values | None
    classes: ClassLayer | None
    cuts: Sequence[tuple[int, float]]


class Layers(TypedDict, total=False):
    """What is known of the patches of a slide, (n,) each."""

    p_value: Values | None  # the panel "suspicion"; where there are none, a note says so
    unlike: Values | None  # probabilities from slide labels alone, see `gpmil.decide.unlike`
    doubt: Values | None
    std: Values | None  # standard deviations, drawn where there is no doubt
    truth: Values | None  # labels, -1 unknown: malignant patches are outlined
    flagged: Values | None  # marked patches: hatched
    classes: ClassLayer | None  # grades or types: the panel "grade" or "type", a colour each


def heatmap(
    coords: Coords,
    values: Values,
    step: Any,
    *,
    beside: bool = False,
    size: Any = None,
    limits: tuple[float, float] | None = None,
    std_limits: tuple[float, float] | None = None,
    box: tuple[float, float] = (1.95, 2.2),
    rate: float | None = None,
    uncertainty: Uncertainty = "panel",
    per_class: bool = False,
    slide: Thumbnail | None = None,
    mpp: float | None = None,
    title: str = "",
    about: Sequence[str] = (),
    **known: Unpack[Layers],
) -> Figure:
    """One slide: probabilities (n,) of its patches, and what else is `known`, as in `Layers`.

    Parameters
    ----------
    coords, step, size : positions (n, 2), distance and side of patches
        As `lay_out` takes them.
    beside : bool
        Whether the truth is also a panel of its own, the first one.
    limits, std_limits : pairs
        The scales of probabilities, and of doubt (or of `std`), the same for all slides that are
        to be compared; default what the values of this slide need.
    box : largest width and height of a panel, in inches
    rate : at which patches were marked
    uncertainty : "panel" or "opacity"
        Doubt has a panel of its own, or the less certain is the fainter.
    per_class : whether every grade or type but the first has a panel with its probability
    slide : Thumbnail
        A panel, and in grey beneath the maps; coordinates are level-0 pixels then.
    mpp : microns per unit of the coordinates
        For a scale bar; default that of the slide.
    title, about : the slide's name, and lines on it below
    """
    patches = _placed((coords, step, size), slide is None, values, known, (limits, std_limits))
    counts = [_counts(len(values), patches.flagged, rate)] if title or about else []
    words, wishes = (title, [*about, *counts]), (beside, uncertainty == "opacity", per_class)
    return _slide_figure(patches, slide, _microns(mpp, slide), box, words, wishes)


def _microns(mpp: float | None, slide: Thumbnail | None) -> float | None:
    """As given, or as the slide has it."""
    return slide.mpp[0] if mpp is None and slide is not None and slide.mpp is not None else mpp


def _placed(
    place: tuple[Coords, Any, Any],
    closed: bool,
    values: Values,
    known: Layers,
    limits: Sequence[tuple[float, float] | None],
) -> _Patches:
    """The patches on their canvas (gaps `closed`), with the scales that they need."""
    if unknown := set(known) - set(Layers.__annotations__):
        raise TypeError(f"heatmap: expected {', '.join(Layers.__annotations__)}, found {unknown}.")
    coords, step, size = place
    cuts: Sequence[tuple[int, float]] = ()
    if closed:
        coords, cuts = close_gaps(coords, step, size)
    doubt, unlike = known.get("doubt"), known.get("unlike")
    name, unsure = ("uncertainty", known.get("std")) if doubt is None else ("doubt", doubt)
    stated = [np.asarray(v) for v in (values, unlike) if v is not None]
    return _Patches(
        lay_out(coords, step, size),
        values,
        limits[0] or (0.0, scale_top(*stated)),
        known.get("p_value"),
        unlike,
        unsure,
        limits[1] or _unsure_limits(name, unsure),
        name,
        known.get("truth"),
        known.get("flagged"),
        known.get("classes"),
        cuts,
    )


def _slide_figure(
    patches: _Patches,
    slide: Thumbnail | None,
    mpp: float | None,
    box: tuple[float, float],
    words: tuple[str, Sequence[str]],
    wishes: tuple[bool, bool, bool],
) -> Figure:
    """The panels of one slide; wished are truth beside, doubt as opacity, a panel per class."""
    beside, fading, per_class = wishes
    fading = fading and patches.doubt is not None
    classes = patches.classes
    there = {
        "truth": beside and patches.truth is not None,
        "slide": slide is not None,
        "suspicion": patches.p_value is not None,
        "grade": classes is not None and classes.ordered,
        "type": classes is not None and not classes.ordered,
        "probability": True,
        **({f"P({name})": per_class for name in classes.names[1:]} if classes else {}),
        "unlike": patches.unlike is not None,
        patches.doubt_name: patches.doubt is not None and not fading,
    }
    panels = [name for name, wanted in there.items() if wanted]
    view = patches.layout.extent if slide is None else slide.extent
    foot = FOOT + (RULER if mpp else 0) + (SECOND_BAR if fading else 0)
    notes = [EXPLAINED[name] for name in panels if name in EXPLAINED]
    notes += [] if there["suspicion"] else [NO_P_VALUES]
    around = Words(*words, _handles(patches), notes)
    figure, axes = arrange(len(panels), view, box, foot, around)
    for ax, name in zip(axes, panels):
        _draw_panel(ax, name, patches, slide, fading, foot)
        ax.set(xlim=view[:2], ylim=view[2:])
        _draw_lines(ax, patches, name)
    if mpp:
        ruler(axes[0], view, mpp)
    return figure


def _draw_panel(
    ax: Axes, name: str, patches: _Patches, slide: Thumbnail | None, fading: bool, foot: float
) -> None:
    if slide is not None:
        draw_slide(ax, slide, faint=name != "slide")
    ax.set_title(name, fontsize=FONT, color=INK, pad=4)
    over = None if slide is None else OVER_SLIDE
    if name == "truth" and patches.truth is not None:
        draw_truth(ax, patches.layout, patches.truth)
    elif name == "suspicion" and patches.p_value is not None:
        image = draw_suspicion(ax, patches.layout, patches.p_value, over)
        bar_below(ax, image, "p-value", foot, ticks=TICKS)
    elif name in ("grade", "type") and patches.classes is not None:
        draw_classes(ax, patches.layout, patches.classes, over)
    elif name.startswith("P(") and patches.classes is not None:
        own = patches.classes.probability[:, patches.classes.names.index(name[2:-1])]
        image = draw(ax, patches.layout, own, limits=patches.limits, alpha=over)
        bar_below(ax, image, f"probability of {patches.classes.word} {name[2:-1]}", foot)
    elif name == "probability":
        _draw_probability(ax, patches, over, fading, foot)
    elif name == "unlike" and patches.unlike is not None:
        image = draw(ax, patches.layout, patches.unlike, PROBABILITY, patches.limits, over)
        bar_below(ax, image, "unlike negative slides", foot)
    elif name == patches.doubt_name and patches.doubt is not None:
        shades = patches.doubt_limits
        image = draw(ax, patches.layout, patches.doubt, UNCERTAINTY, shades, over)
        bar_below(ax, image, _unit(patches), foot)


def _draw_probability(
    ax: Axes, patches: _Patches, over: float | None, fading: bool, foot: float
) -> None:
    layout, values, limits = patches.layout, patches.values, patches.limits
    if not fading or patches.doubt is None:
        image = draw(ax, layout, values, limits=limits, alpha=over)
        bar_below(ax, image, "probability", foot)
        return
    veil = opacity(layout, patches.doubt, patches.doubt_limits)
    image = draw(ax, layout, values, limits=limits, alpha=veil)
    bar_below(ax, image, "probability", foot, SECOND_BAR)
    shades = ListedColormap([(0.2, 0.2, 0.2, a) for a in np.linspace(1, FAINTEST, 64)])
    scale = ScalarMappable(Normalize(*patches.doubt_limits), shades)
    bar_below(ax, scale, f"{_unit(patches)}, as opacity", foot)


def _unit(patches: _Patches) -> str:
    return "doubt left" if patches.doubt_name == "doubt" else "standard deviation"


# --- Lines, and what they mean --------------------------------------------------------------------
def _draw_lines(ax: Axes, patches: _Patches, panel: str) -> None:
    for axis, at in patches.cuts:
        line = ax.axvline if axis == 0 else ax.axhline
        line(at, color=MUTED, linewidth=0.8, linestyle=":")
    if panel == "truth":
        return
    if patches.flagged is not None and panel in MARKED:
        hatch(ax, patches.layout, np.asarray(patches.flagged, dtype=bool))
    if patches.truth is not None:
        outline(ax, patches.layout, patches.truth == 1)


def _handles(patches: _Patches) -> list[Sequence[Artist]]:
    """A legend entry for every kind of line that is drawn, and one line for all classes."""
    found: list[Sequence[Artist]] = []
    if patches.classes is not None:
        layer = patches.classes
        named = zip(layer.names, layer.colours)
        found.append([Patch(facecolor=c, label=f"{layer.word} {name}") for name, c in named])
    if patches.flagged is not None and np.asarray(patches.flagged, dtype=bool).any():
        struck = Patch(facecolor=TISSUE, edgecolor=INK, hatch="////", linewidth=0.0)
        struck.set_label("hatched: marked patches")
        found.append([struck])
    if patches.truth is not None and (patches.truth == 1).any():
        found.append([Line2D([], [], color=OUTLINE, linewidth=1.2, label="labelled positive")])
    if patches.cuts:
        dots = Line2D([], [], color=MUTED, linewidth=0.8, linestyle=":")
        dots.set_label("empty glass left out")
        found.append([dots])
    return found


def _counts(n: int, flagged: Values | None, rate: float | None) -> str:
    """What the map shows, in words."""
    patches = f"{n:,} patch" + ("es" if n != 1 else "")
    if flagged is None:
        return f"{patches}, none tested"
    marked = int(np.asarray(flagged, dtype=bool).sum())
    at = "" if rate is None else f" at a false discovery rate of {rate:.3g}"
    return f"{patches}, {marked:,} marked{at}"


def _unsure_limits(name: str, values: Values | None) -> tuple[float, float]:
    if values is None:
        return 0.0, 1.0
    if name == "doubt":
        return doubt_limits(values)
    known = values[np.isfinite(values)]
    return 0.0, float(known.max()) if len(known) else 1.0


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
