"""The layers of a heat map, each drawn on axes: values, the slide beneath, outlines above."""

import numpy as np
from jaxtyping import Bool, Float
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.collections import LineCollection
from matplotlib.colors import Colormap, ListedColormap
from matplotlib.image import AxesImage

from gpmil.show.plots import INK
from gpmil.show.raster import Layout, Values, borders
from gpmil.show.slides import Thumbnail

PROBABILITY = "viridis"
UNCERTAINTY = "cividis"
BENIGN, MALIGNANT, UNKNOWN = "#c9ccd1", "#b2182b", "#eef0f2"
OUTLINE = "#ff2e63"  # of the truth; flags have a white line with a dark edge, seen on any colour
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
