"""Figure 5: heat maps of the compared methods for a negative and a positive test slide."""

from dataclasses import dataclass
from functools import partial

import numpy as np
import pandas as pd
from jaxtyping import Float, Int
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import ListedColormap, PowerNorm
from matplotlib.figure import Figure
from PIL import Image

from gpmil.paper.exhibit import Exhibit
from gpmil.paper.figure3_example_patches import slide_image
from gpmil.paper.methods import DEFAULT, key_of
from gpmil.paper.patch_rows import (
    Row,
    in_lines,
    lower_median,
    patch_rows,
    said,
    verdict,
    without_patches,
)
from gpmil.paper.results import Results
from gpmil.show import heatmaps
from gpmil.show.plots import FONT, INK, MUTED, new_figure

exhibit = partial(Exhibit, "Figure 5", "figure5_heat_maps", "Where cancer is predicted: heat maps")
PANEL = 1.95  # width in inches
SHORTEST, TALLEST = 1.2, 2.8  # heights of a panel
HEAD, FOOT, SIDE = 0.68, 0.32, 0.75  # inches above and below a panel, and for the colour bar
LARGEST_IMAGE = 1200  # pixels per side; more is not seen
LETTERS = "abcdefgh"


@dataclass(frozen=True)
class ShownSlide:
    """A slide of the figure: its number in the test set, and why it was chosen."""

    index: int
    chosen: str
    layout: heatmaps.Layout
    truth: Int[np.ndarray, " n"]
    image: Image.Image | None
    no_image: str  # the reason, where there is none

    @property
    def labelled(self) -> bool:
        """Whether the labels of some of its patches are known."""
        return bool((self.truth >= 0).any())

    @property
    def heading(self) -> str:
        """Of its first panel."""
        if self.image is not None:
            return "image"
        return "true labels" if self.labelled else "tissue"

    @property
    def height(self) -> float:
        """Of its panels, in inches: the proportions of the slide where they allow it."""
        left, right, bottom, top = self.layout.extent
        return float(np.clip(PANEL * (bottom - top) / (right - left), SHORTEST, TALLEST))


def build(results: Results) -> Exhibit:
    """One line of maps for a negative slide, one for a positive one, those that there are."""
    rows = patch_rows(results)
    reason = _why_not(results, rows)
    if reason:
        return exhibit(missing=f"There are no heat maps: {reason}")
    chosen = [pick for pick in (negative_slide(results), positive_slide(results)) if pick]
    slides = [_slide(results, index, words) for index, words in chosen]
    return exhibit(
        frame=_frame(results, rows, slides),
        figure=_figure(results, rows, slides),
        alt="Lines of maps of one slide each: the image or the true labels, then the patch "
        "probabilities of each method.",
        caption=_caption(results, slides),
    )


def _why_not(results: Results, rows: list[Row]) -> str:
    test = results.test
    if test.coords is None or test.coords.shape[1] > 2:
        return "the patches have no positions on a plane."
    if test.step is None:
        return "the distance of neighbouring patches (step) is not known."
    if not rows:
        return "none of the methods that were run gives patch probabilities."
    if not np.isin(test.labels, (0, 1)).any():
        return "no test slide has a label."
    return ""


# --- Which slides ---------------------------------------------------------------------------------
def negative_slide(results: Results) -> tuple[int, str] | None:
    """The negative slide on which the coupling lowers the highest probability most."""
    test = results.test
    negative = np.flatnonzero(test.labels == 0)
    if not len(negative):
        return None
    by_key = {row.method.key: row.patches for row in patch_rows(results)}
    if "pr" not in by_key or key_of(DEFAULT) not in by_key:
        largest = negative[np.argmax(test.sizes[negative])]
        return int(largest), "the largest negative slide"
    before, after = (_highest(results, by_key[key]) for key in ("pr", key_of(DEFAULT)))
    return int(negative[np.argmax((before - after)[negative])]), (
        "the negative slide whose highest patch probability falls most from VGPMIL-PR to "
        "VGPMIL-PR-I"
    )


def positive_slide(results: Results) -> tuple[int, str] | None:
    """The positive slide with the median lesion, of those that hold both kinds of patches."""
    test = results.test
    lesion = np.array([(part == 1).sum() for part in test.split(test.instance_labels)])
    benign = np.array([(part == 0).sum() for part in test.split(test.instance_labels)])
    mixed = np.flatnonzero((test.labels == 1) & (lesion > 0) & (benign > 0))
    if len(mixed):
        words = "the positive slide with the median number of cancerous patches"
        return lower_median(mixed, lesion), words
    positive = np.flatnonzero(test.labels == 1)
    if not len(positive):
        return None
    return lower_median(positive, test.sizes), "the positive slide of median size"


def _highest(results: Results, values: Float[np.ndarray, " N"]) -> Float[np.ndarray, " B"]:
    return np.maximum.reduceat(values, results.test.offsets[:-1])


def _slide(results: Results, index: int, chosen: str) -> ShownSlide:
    test = results.test
    assert test.coords is not None and test.step is not None
    layout = heatmaps.lay_out(test.split(test.coords)[index], test.step[index])
    truth = test.split(test.instance_labels)[index]
    if test.coords.shape[1] == 2:
        image, reason = slide_image(results, index)
    else:
        image, reason = None, "the patches lie on a line."
    return ShownSlide(index, chosen, layout, truth, image, reason)


# --- Words and numbers ----------------------------------------------------------------------------
def _caption(results: Results, slides: list[ShownSlide]) -> str:
    lines = [
        f"{results.test.names[slide.index]} is {slide.chosen}"
        + (f"; for its image: {slide.no_image}" if slide.no_image and results.images else "")
        for slide in slides
    ]
    truth = any((slide.truth == 1).any() for slide in slides)
    layout = any(slide.image is None for slide in slides)
    return (
        "The brighter a patch, the likelier it is cancerous (first run of each method). The "
        "colours of a line have one scale, from 0 to the highest probability in that line, by its "
        "square root, so that small probabilities are seen. "
        + ("Pink lines surround the patches that are cancerous. " if truth else "")
        + ("Without an image (a) shows the tissue with its labels, if known. " if layout else "")
        + f"{'. '.join(lines)}."
        + without_patches(results)
    ).replace("..", ".")


def _frame(results: Results, rows: list[Row], slides: list[ShownSlide]) -> pd.DataFrame:
    test = results.test
    assert test.coords is not None
    parts = []
    for slide in slides:
        where = test.split(test.coords)[slide.index]
        axes = {name: where[:, k] for k, name in enumerate("xy"[: where.shape[1]])}
        for row in rows:
            part = {
                "slide": str(test.names[slide.index]),
                "slide_label": test.labels[slide.index],
                "method": row.method.key,
                **axes,
                "patch_label": slide.truth,
                "probability": test.split(row.patches)[slide.index],
            }
            parts.append(pd.DataFrame(part))
    return pd.concat(parts, ignore_index=True)


# --- Drawing (lengths in inches) ------------------------------------------------------------------
def _figure(results: Results, rows: list[Row], slides: list[ShownSlide]) -> Figure:
    wide = (1 + len(rows)) * (PANEL + 0.1) + SIDE
    figure = new_figure(wide, sum(HEAD + slide.height + FOOT for slide in slides))
    top = tall = figure.get_size_inches()[1]
    for slide in slides:
        bottom = top - HEAD - slide.height
        figure.text(0.05 / wide, (top - 0.2) / tall, _heading(results, slide))
        figure.texts[-1].set(fontsize=FONT + 1, color=INK, weight="bold")
        _draw_line(figure, results, rows, slide, bottom)
        top = bottom - FOOT
    return figure


def _heading(results: Results, slide: ShownSlide) -> str:
    kind = "cancerous" if results.test.labels[slide.index] == 1 else "non-cancerous"
    return f"{results.test.names[slide.index]}: {kind}"


def _draw_line(
    figure: Figure, results: Results, rows: list[Row], slide: ShownSlide, bottom: float
) -> None:
    values = [results.test.split(row.patches)[slide.index] for row in rows]
    highest = float(np.max(values))
    norm = PowerNorm(0.5, vmin=0.0, vmax=highest if highest > 0 else 1.0)
    places = [(0.05 + column * (PANEL + 0.1), bottom) for column in range(2 + len(rows))]
    axes = [_axes(figure, place, PANEL, slide.height) for place in places[:-1]]
    _draw_slide(axes[0], slide)
    for ax, row, patches in zip(axes[1:], rows, values):
        heatmaps.draw(ax, slide.layout, patches).set_norm(norm)
        heatmaps.outline(ax, slide.layout, slide.truth == 1)
        _below(ax, *_verdict(results, row, slide, patches))
    headings = [slide.heading, *(in_lines(row.method.label) for row in rows)]
    for ax, letter, heading in zip(axes, LETTERS, headings):
        ax.set_title(f"({letter}) {heading}", fontsize=FONT, color=INK, pad=4)
    left = places[-1][0] + 0.05
    _colour_bar(figure, norm, _axes(figure, (left, bottom), 0.1, slide.height))


def _axes(figure: Figure, place: tuple[float, float], width: float, height: float) -> Axes:
    """Axes with their lower left corner at a place."""
    wide, tall = figure.get_size_inches()
    return figure.add_axes((place[0] / wide, place[1] / tall, width / wide, height / tall))


def _draw_slide(ax: Axes, slide: ShownSlide) -> None:
    if slide.image is None:
        _draw_tissue(ax, slide)
        return
    left, right, bottom, top = slide.layout.extent
    picture = slide.image.crop((round(left), round(top), round(right), round(bottom)))
    picture.thumbnail((LARGEST_IMAGE, LARGEST_IMAGE))
    ax.imshow(np.asarray(picture), extent=slide.layout.extent)
    ax.set_axis_off()
    heatmaps.outline(ax, slide.layout, slide.truth == 1)


def _draw_tissue(ax: Axes, slide: ShownSlide) -> None:
    if slide.labelled:
        heatmaps.draw_truth(ax, slide.layout, slide.truth)
        _below(ax, "red: cancerous, grey: not", MUTED)
    else:
        grey = ListedColormap([heatmaps.BENIGN])
        heatmaps.draw(ax, slide.layout, np.ones(len(slide.truth)), grey)
        _below(ax, "patch labels are not known", MUTED)


def _verdict(
    results: Results, row: Row, slide: ShownSlide, patches: Float[np.ndarray, " n"]
) -> tuple[str, str]:
    """The highest patch, the slide, and whether that is right; and its colour."""
    word, colour = verdict(bool(row.right(results.test.labels)[slide.index]))
    slide_says = said(float(row.run.probability[slide.index]))
    return f"highest {patches.max():.2f}; slide {slide_says}, {word}", colour


def _below(ax: Axes, text: str, colour: str) -> None:
    """A line of text some points below the map, however flat that is."""
    ax.annotate(
        text,
        (0.5, 0),
        (0, -5),
        xycoords="axes fraction",
        textcoords="offset points",
        ha="center",
        va="top",
        color=colour,
        fontsize=FONT - 2,
    )


def _colour_bar(figure: Figure, norm: PowerNorm, ax: Axes) -> None:
    bar = figure.colorbar(ScalarMappable(norm, heatmaps.PROBABILITY), cax=ax)
    bar.outline.set_visible(False)
    bar.set_label("probability", fontsize=FONT - 1, color=INK)
    top = float(norm.vmax or 1.0)
    ticks = [0.0, *(top * np.array([1 / 16, 1 / 4, 9 / 16, 1.0])).tolist()]
    bar.set_ticks(ticks, labels=[f"{tick:.2g}" for tick in ticks])
    ax.tick_params(labelsize=FONT - 2, colors=MUTED, length=2, width=0.6)
