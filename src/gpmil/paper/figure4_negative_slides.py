"""Figure 4: the patch probabilities inside each negative test slide, sorted."""

from functools import partial

import numpy as np
import pandas as pd
from jaxtyping import Float, Int
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from gpmil.paper.exhibit import Exhibit, panels
from gpmil.paper.patch_rows import (
    Row,
    in_lines,
    patch_rows,
    said,
    short,
    verdict,
    without_patches,
)
from gpmil.paper.results import Results
from gpmil.show import plots

MOST = 6  # slides, as many as the paper has
TICKS = (0.0, 0.1, 0.5, 1.0)
HEADROOM = 1.5  # end of the axis: above 1 stands whether the slide is right
exhibit = partial(
    Exhibit,
    "Figure 4",
    "figure4_negative_slides",
    "Patch probabilities inside negative slides",
)


def build(results: Results) -> Exhibit:
    """Sorted patch probabilities: one row per method, one column per negative slide."""
    rows, slides = patch_rows(results), _slides(results)
    if not len(slides):
        return exhibit(missing="There is no negative slide in the test set: nothing to draw.")
    if not rows:
        reason = "None of the methods that were run gives patch probabilities: nothing to draw."
        return exhibit(missing=reason)
    return exhibit(
        frame=_frame(results, rows, slides),
        figure=_figure(results, rows, slides),
        alt="A panel for each method and negative slide with the sorted probabilities of its "
        "patches, marked right or wrong with the probability of the slide.",
        caption=_caption(results, rows, slides),
    )


def _slides(results: Results) -> Int[np.ndarray, " shown"]:
    """The negative slides, or the largest of them, in the order of the test set."""
    negative = np.flatnonzero(results.test.labels == 0)
    largest = np.argsort(-results.test.sizes[negative], kind="stable")[:MOST]
    return np.sort(negative[largest])


def _frame(results: Results, rows: list[Row], slides: np.ndarray) -> pd.DataFrame:
    parts = []
    for row in rows:
        values, right = results.test.split(row.patches), row.right(results.test.labels)
        for b in slides:
            part = {
                "slide": str(results.test.names[b]),
                "method": row.method.key,
                "rank": np.arange(1, len(values[b]) + 1),
                "probability": np.sort(values[b]),
                "slide_probability": row.run.probability[b],
                "slide_correct": right[b],
            }
            parts.append(pd.DataFrame(part))
    return pd.concat(parts, ignore_index=True)


def _caption(results: Results, rows: list[Row], slides: np.ndarray) -> str:
    negative = int((results.test.labels == 0).sum())
    chosen = f" The {MOST} largest of {negative} negative slides." if negative > MOST else ""
    score = "; ".join(
        f"{row.method.label}: {row.right(results.test.labels)[slides].sum()} of {len(slides)}"
        for row in rows
    )
    return (
        "Every bar is a patch of a slide without cancer, in increasing order, with a dot on the "
        "highest; the first run of each method. The scale is that of the square root and the same "
        "in all panels, so that small probabilities are seen; the dotted line is at 0.5. Green "
        "axes and “right”: the slide is classified correctly; red and “wrong”: it is not; P is "
        f"the probability of the slide.{chosen} Slides that are right: {score}."
        + without_patches(results)
    )


# --- Drawing --------------------------------------------------------------------------------------
def _figure(results: Results, rows: list[Row], slides: np.ndarray) -> Figure:
    test = results.test
    size = 1.55 * len(slides) + 0.8, 1.3 * len(rows) + 0.5
    figure, axes = panels(*size, len(rows), len(slides), sharey=True)
    for row, line in zip(rows, axes):
        patches, right = test.split(row.patches), row.right(test.labels)
        for b, ax in zip(slides, line):
            _bars(ax, np.sort(patches[b]))
            _mark(ax, bool(right[b]), float(row.run.probability[b]))
        line[0].set_ylabel(in_lines(row.method.label), fontsize=plots.FONT, color=plots.INK)
    for b, top, bottom in zip(slides, axes[0], axes[-1]):
        top.set_title(short(str(test.names[b])), fontsize=plots.FONT - 1, color=plots.INK)
        n = test.sizes[b]
        words = f"{n} patch{'es' if n > 1 else ''}"
        bottom.set_xlabel(words, fontsize=plots.FONT - 1, color=plots.MUTED)
    return figure


def _bars(ax: Axes, values: Float[np.ndarray, " n"]) -> None:
    """One bar per patch, on the square-root scale."""
    plots.style(ax)
    ax.set_yscale("function", functions=(_signed_root, _signed_square))
    ax.stairs(values, np.arange(len(values) + 1), fill=True, color=plots.NEGATIVE, linewidth=0)
    # A single bar among hundreds is thinner than a pixel, and the highest decides the slide.
    ax.plot(len(values) - 0.5, values[-1], "o", color=plots.NEGATIVE, markersize=3)
    ax.axhline(0.5, color=plots.MUTED, linewidth=0.8, linestyle=":")
    room = 0.04 * len(values)
    ax.set(xlim=(-room, len(values) + room), ylim=(0, HEADROOM), xticks=[])
    ax.set_yticks(TICKS, labels=[f"{tick:g}" for tick in TICKS])
    ax.minorticks_off()


def _mark(ax: Axes, right: bool, probability: float) -> None:
    """Whether the slide is classified correctly, in words and in the colour of the axes."""
    word, colour = verdict(right)
    for spine in ax.spines.values():
        spine.set(visible=True, color=colour, linewidth=1.6)
    ax.tick_params(axis="y", color=colour, width=1.2)
    ax.text(
        0.04, 0.96, f"{word}, {said(probability)}", transform=ax.transAxes, va="top", color=colour
    )
    ax.texts[-1].set_fontsize(plots.FONT - 1)


def _signed_root(x: np.ndarray) -> np.ndarray:
    return np.sign(x) * np.sqrt(np.abs(x))


def _signed_square(x: np.ndarray) -> np.ndarray:
    return np.sign(x) * np.square(x)
