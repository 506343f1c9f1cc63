"""The layers of a heat map, each drawn on axes: values, the slide beneath, marks and lines above.

Three layers have names, the same in pictures, on pages, in the viewer and in QuPath:

* suspicion: how unlike the tissue of negative slides a patch is. It is -log10 of the p-value, and
  transparent where a patch is like that tissue;
* probability: as the model states it, on the scale that the values need;
* doubt: how unsure the model is of the process at a patch, as a share of what it was before any
  slide was seen. The number of neighbours is no part of it.
"""

import numpy as np
from jaxtyping import Bool, Float
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.collections import LineCollection
from matplotlib.colors import Colormap, LinearSegmentedColormap, ListedColormap
from matplotlib.image import AxesImage

from gpmil.show.classes import ClassLayer
from gpmil.show.plots import INK
from gpmil.show.raster import Layout, Values, borders
from gpmil.show.slides import Thumbnail

PROBABILITY = "viridis"
UNCERTAINTY = "cividis"
LEAST_TOP = 0.01  # of a scale of probabilities
SMALLEST_P = 1e-3  # p-values are looked at by their order of magnitude; smaller ones look the same
# From pale yellow to dark red, as in the viewer; up to p = 0.1 more and more opaque.
FLAME = ("#ffffcc", "#ffeda0", "#fed976", "#feb24c", "#fd8d3c", "#fc4e2a", "#e31a1c", "#bd0026",
         "#800026")  # fmt: skip
EXPLAINED = {
    "suspicion": "suspicion: how unlike tissue of negative slides, as a p-value; transparent: like",
    "probability": "probability: that a patch is positive, as the model states it",
    "grade": "grade: the highest one that a patch reaches with a probability of more than a half",
    "type": "type: the likeliest one of every patch",
    "unlike": "unlike: probability, from slide labels alone, that a patch is unlike tissue of "
    "negative slides; that is not the same as tumour",
    "doubt": "doubt: how unsure the model is here; 1 is as unsure as before any slide was seen, "
    "the number of neighbours is no part of it",
    "uncertainty": "uncertainty: standard deviation of the score, mostly how many neighbours a "
    "patch has; runs of this version have doubt in its place",
}
TISSUE = "#e6e8eb"  # under colours that are transparent
BENIGN, MALIGNANT, UNKNOWN = "#c9ccd1", "#b2182b", "#eef0f2"
OUTLINE = "#ff2e63"  # of the truth; marks are hatched, white with a dark edge, seen on any colour
OVER_SLIDE = 0.7  # opacity of a map over a thumbnail: the tissue shows through
FAINTEST = 0.12  # opacity of the least certain patch: it can still be seen


def draw(
    ax: Axes,
    layout: Layout,
    values: Values,
    cmap: str | Colormap = PROBABILITY,
    limits: tuple[float, float] = (0.0, 1.0),
    alpha: float | Float[np.ndarray, "h w"] | None = None,
) -> AxesImage:
    """Draw values (n,) on a scale with these limits; where no tissue is, nothing is drawn.

    `alpha` is the opacity, one number or one per pixel.
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


def suspicion(p_value: Values) -> Float[np.ndarray, " n"]:
    """-log10 p, at most 3: each unit is ten times as rare among patches of negative slides.

    >>> suspicion(np.array([1.0, 0.1, 0.001, 0.0]))
    array([0., 1., 3., 3.])
    """
    p = np.where(np.isfinite(p_value), p_value, np.nan)
    return -np.log10(np.clip(p, SMALLEST_P, 1.0)) + 0.0  # no minus zero


def suspicion_colours() -> Colormap:
    """From transparent to dark red."""
    shades = LinearSegmentedColormap.from_list("flame", FLAME)(np.linspace(0, 1, 256))
    shades[:, 3] = np.clip(np.linspace(0, 3, 256), 0, 1)  # opaque from p = 0.1 on
    return ListedColormap(shades)


def draw_suspicion(
    ax: Axes, layout: Layout, p_value: Values, over: float | None = None
) -> AxesImage:
    """Draw p-values (n,) on a log scale; without a slide beneath (`over`), tissue is grey."""
    if over is None:
        known = np.where(np.isfinite(p_value), 1.0, np.nan)
        draw(ax, layout, known, ListedColormap([TISSUE]))
    limits = (0.0, float(-np.log10(SMALLEST_P)))
    # averages of overlapping patches are of the logarithms
    return draw(ax, layout, suspicion(p_value), suspicion_colours(), limits)


def draw_classes(ax: Axes, layout: Layout, classes: ClassLayer, alpha: float | None = None) -> None:
    """Draw the grade or type of every patch in its colour."""
    codes = classes.codes
    for k, colour in enumerate(classes.colours):
        draw(ax, layout, np.where(codes == k, 1.0, np.nan), ListedColormap([colour]), alpha=alpha)


def scale_top(*values: np.ndarray) -> float:
    """The upper end of a scale of probabilities: 1, 2 or 5 times a power of ten, from 0.01 to 1.

    >>> scale_top(np.array([0.003, np.nan]), np.array([0.034])), scale_top(np.array([0.6]))
    (0.05, 1.0)
    >>> scale_top(np.array([1e-6]))  # next to nothing is to look like it
    0.01
    """
    most = max((float(np.max(v[np.isfinite(v)], initial=0.0)) for v in values), default=0.0)
    most = max(most, LEAST_TOP)
    power = 10.0 ** np.floor(np.log10(most))
    return float(min(next(k * power for k in (1, 2, 5, 10) if k * power >= most * (1 - 1e-9)), 1.0))


def doubt_limits(*values: np.ndarray) -> tuple[float, float]:
    """Ends of a scale of doubts: 0, known, to the largest value, rounded up to twentieths.

    >>> doubt_limits(np.array([0.62, 0.71]), np.array([0.66, np.nan]))
    (0.0, 0.75)
    >>> doubt_limits(np.ones(3))  # nothing is known, and looks like it
    (0.0, 1.0)
    """
    known = np.concatenate([v[np.isfinite(v)] for v in values] or [np.zeros(0)])
    if not len(known):
        return 0.0, 1.0
    return 0.0, float(np.clip(np.ceil(known.max() * 20 - 1e-9) / 20, 0.05, 1.0))


def hatch(ax: Axes, layout: Layout, marked: Bool[np.ndarray, " n"]) -> None:
    """Strike marked patches (n,) through, white with a dark edge, thin where patches are small.

    To be called when the view of the axes is set: the width follows from the size of a patch.
    """
    left, right, bottom, top = layout.extent
    pixel = np.array([(right - left) / layout.shape[0], (bottom - top) / layout.shape[1]])
    corner = layout.pixel[marked] * pixel + np.array([left, top])
    # from the lower left corner to the upper right one
    foot, tip = (corner + np.array(layout.cover) * pixel * side for side in ([0, 1], [1, 0]))
    lines = np.stack([foot, tip], axis=1)
    width = float(np.clip(0.09 * _points_a_patch(ax, layout), 0.25, 0.8))
    for colour, times in ((INK, 2.4), ("white", 1.0)):
        ax.add_collection(
            LineCollection(list(lines), colors=colour, linewidths=times * width, capstyle="butt")
        )


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

    >>> from gpmil.show.raster import lay_out
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
    lines = borders(layout.paint(inside) >= 0.5, layout.extent)
    ax.add_collection(
        LineCollection(list(lines), colors=colour, linewidths=1.0, capstyle="projecting")
    )
