"""Figures about a cohort's predictions, and the one place for colours and fonts.

Every function takes plain arrays and returns a matplotlib Figure, or draws on the axes it is given.
Figures are made without pyplot: no window opens, no global state is touched, and a notebook shows
them. `png` turns one into bytes that depend on what is drawn alone (no date, no software stamp).
"""

import io
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Float, Int
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_rgba
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, MaxNLocator
from sklearn.metrics import roc_auc_score, roc_curve

from gpmil.decide.metrics import reliability_curve

__all__ = [
    "CLASSES",
    "DPI",
    "FONT",
    "GRID",
    "INK",
    "MUTED",
    "NEGATIVE",
    "POSITIVE",
    "SERIES",
    "SETTINGS",
    "Drawing",
    "Labels",
    "Scores",
    "lesion_sizes",
    "new_figure",
    "png",
    "reliability",
    "roc",
    "score_histograms",
    "sorted_patches",
    "style",
    "tuning",
]

# --- Colours (Okabe and Ito: told apart by colour-blind readers too) and sizes --------------------
INK = "#222222"
MUTED = "#6b6b6b"
GRID = "#e3e3e3"
NEGATIVE = "#0072b2"
POSITIVE = "#d55e00"
CLASSES = ((0, "negative", NEGATIVE), (1, "positive", POSITIVE))
# Colour and line of successive series: the colour tells two models apart, the line two settings.
SERIES = (("#009e73", "-"), ("#cc79a7", "-"), ("#009e73", "--"), ("#cc79a7", "--"))
FONT = 9.0
DPI = 150

Labels = Int[np.ndarray, " n"]
Scores = Float[np.ndarray, " n"]


class Drawing(Figure):
    """A figure that a notebook shows; of those without pyplot it prints the size alone."""

    def _repr_png_(self) -> bytes:
        return png(self)


def new_figure(width: float, height: float, layout: Any = None) -> Figure:
    """An empty white figure of this size in inches, ready to be saved; `layout` as matplotlib's."""
    figure = Drawing(figsize=(width, height), facecolor="white", layout=layout)
    FigureCanvasAgg(figure)
    return figure


def png(figure: Figure, dpi: float = DPI) -> bytes:
    """The figure as a PNG file; the same drawing gives the same bytes."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=dpi, metadata={"Date": None, "Software": None})
    return buffer.getvalue()


def style(ax: Axes, xlabel: str = "", ylabel: str = "", title: str = "") -> None:
    """Plain axes: no box, small grey ticks, a title on the left."""
    for side in ("top", "right"):
        ax.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        ax.spines[side].set_color(MUTED)
    ax.tick_params(colors=MUTED, labelsize=FONT - 1, width=0.8)
    ax.set_xlabel(xlabel, fontsize=FONT, color=INK)
    ax.set_ylabel(ylabel, fontsize=FONT, color=INK)
    ax.set_title(title, fontsize=FONT + 1, color=INK, loc="left")


def _axes(ax: Axes | None, width: float = 3.25, height: float = 3.2) -> tuple[Figure, Axes]:
    if ax is not None:
        return ax.get_figure(root=True), ax  # type: ignore[return-value]
    figure = new_figure(width, height, "constrained")
    return figure, figure.add_subplot()


# --- Slides and patches alike ---------------------------------------------------------------------
def roc(
    labels: Labels, scores: Mapping[str, Scores], ax: Axes | None = None, title: str = ""
) -> Figure:
    """ROC curves of several scores (n,) of the same labels 0/1 (n,), their AUC in the legend."""
    figure, ax = _axes(ax)
    ax.plot([0, 1], [0, 1], color=GRID, linewidth=1, zorder=0)
    for (name, score), (colour, line) in zip(scores.items(), _series(len(scores))):
        false, true, _ = roc_curve(labels, score)
        auc = roc_auc_score(labels, score)
        ax.plot(false, true, line, color=colour, linewidth=1.6, label=f"{name}: {auc:.3f}")
    style(ax, "false positive rate", "true positive rate", title)
    ax.set(xlim=(-0.01, 1.01), ylim=(-0.01, 1.01), aspect="equal")
    ax.legend(
        loc="lower right",
        fontsize=FONT - 2,
        title="AUC",
        title_fontsize=FONT - 2,
        framealpha=0.85,
        edgecolor="none",
        alignment="left",
        labelcolor=INK,
    )
    return figure


def _series(count: int) -> list[tuple[str, str]]:
    return [SERIES[i % len(SERIES)] for i in range(count)]


def score_histograms(
    labels: Labels,
    probability: Scores,
    ax: Axes | None = None,
    title: str = "",
    things: str = "slides",
    log: bool = False,
    bins: int = 10,
) -> Figure:
    """Histogram of probabilities (n,) for each true label (n,); unknown labels are left out."""
    figure, ax = _axes(ax)
    edges = np.linspace(0, 1, bins + 1).tolist()
    for value, name, colour in CLASSES:
        chosen = probability[labels == value]
        label = f"{name} ({len(chosen):,} {things})"
        ax.hist(chosen, edges, histtype="stepfilled", log=log, color=colour, alpha=0.35, lw=0)
        ax.hist(chosen, edges, histtype="step", log=log, color=colour, lw=1.4, label=label)
    style(ax, "probability", f"{things} (log scale)" if log else things, title)
    if log:
        ax.set_ylim(bottom=0.7)
        ax.yaxis.set_major_formatter(lambda count, _: f"{count:,.0f}")
    else:
        ax.yaxis.set_major_locator(MaxNLocator(integer=True))
    ax.set_xlim(0, 1)
    ax.legend(fontsize=FONT - 1, frameon=False, labelcolor=INK)
    return figure


def reliability(
    labels: Labels, probability: Scores, ax: Axes | None = None, title: str = "", bins: int = 5
) -> Figure:
    """Share of positives against mean probability, in bins of `metrics.reliability_curve`.

    Bars are 95 % intervals of the share: bins of few slides say little, and the plot shows it.
    """
    figure, ax = _axes(ax)
    curve = reliability_curve(labels, probability, bins)
    ax.plot([0, 1], [0, 1], color=GRID, linewidth=1, zorder=0)
    ax.vlines(curve.predicted, curve.low, curve.high, color=MUTED, linewidth=1.2)
    ax.plot(curve.predicted, curve.observed, "o", color=INK, markersize=5)
    style(ax, "mean predicted probability", "share of positive slides", title)
    ax.set(xlim=(-0.02, 1.02), ylim=(-0.02, 1.02), aspect="equal")
    return figure


# --- Slides ---------------------------------------------------------------------------------------
def lesion_sizes(
    probability: Scores,
    lesion: Int[np.ndarray, " n"],
    ax: Axes | None = None,
    title: str = "",
) -> Figure:
    """Probability of every slide (n,) against its number of positive patches (n,), log scale."""
    figure, ax = _axes(ax)
    # Negative slides stand in a column of their own, left of one patch.
    x = np.where(lesion > 0, lesion, 0.4)
    ax.axhline(0.5, color=GRID, linewidth=1, zorder=0)
    for value, _, colour in CLASSES:
        chosen = (lesion > 0) == value
        ax.plot(x[chosen], probability[chosen], "o", color=colour, alpha=0.65, markersize=5)
    ax.set_xscale("log")
    most = int(lesion.max()) if len(lesion) else 1
    ticks = [t for t in (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000) if t <= max(most, 1)]
    ax.set_xticks([0.4, *ticks], labels=["0", *map(str, ticks)])
    ax.minorticks_off()
    ax.set_ylim(-0.02, 1.02)
    style(ax, "malignant patches in the slide", "predicted probability", title)
    return figure


# --- Patches --------------------------------------------------------------------------------------
def sorted_patches(
    patches: Mapping[str, Sequence[Float[np.ndarray, " _"]]],
    names: Sequence[str],
    title: str = "",
) -> Figure:
    """Patch probabilities inside single slides, sorted: one row per model, one column per slide.

    `patches` has one array per slide for each model. In a negative slide every high bar is wrong.
    """
    rows, columns = max(len(patches), 1), max(len(names), 1)
    figure = new_figure(1.55 * columns + 0.6, 1.25 * rows + 0.7, "constrained")
    axes = figure.subplots(rows, columns, sharey=True, squeeze=False)
    for row, (model, slides) in zip(axes, patches.items()):
        for ax, values in zip(row, slides):
            edges = np.arange(len(values) + 1) - 0.5  # whole bars: the highest patch is the last
            ax.stairs(np.sort(values), edges, fill=True, color=NEGATIVE, linewidth=0)
            style(ax)
            ax.axhline(0.5, color=MUTED, linewidth=0.8, linestyle=":")
            ax.set(ylim=(0, 1), xticks=[], xlim=(-0.5, len(values) - 0.5))
        row[0].set_ylabel(model, fontsize=FONT, color=INK)
    for ax, name in zip(axes[0], names):
        ax.set_title(name, fontsize=FONT - 1, color=INK)
    for ax, values in zip(axes[-1], next(iter(patches.values()), ())):
        ax.set_xlabel(f"{len(values)} patches", fontsize=FONT - 1, color=MUTED)
    if title:
        figure.suptitle(title, fontsize=FONT + 1, color=INK, x=0.01, ha="left")
    return figure


# --- Settings -------------------------------------------------------------------------------------
# What a model can learn: its name in the trace, in the figure, and whether its axis is logarithmic.
SETTINGS = (
    ("variance", "variance", True),
    ("lengthscale", "length scale", True),
    ("mean", "prior mean", False),
    ("coupling", "coupling λ", True),
)


def tuning(trace: Sequence[Mapping[str, Any]] | None, title: str = "") -> Figure:
    """What was tried to learn the settings: the objective in order, and against each setting.

    `trace` is `model.tuning_trace_`. One panel for each setting that was learned, trials joined in
    order, the best one ringed and its value in the heading. Several kernels have colours of their
    own. The first panel numbers the trials.
    """
    if not trace:
        raise ValueError(
            f"trace: expected the trials of model.tuning_trace_, found {trace!r}: nothing was "
            'learned. Fit a model with variance, lengthscale, mean or coupling "auto".'
        )
    learned = [s for s in SETTINGS if len({trial[s[0]] for trial in trace}) > 1]
    figure = new_figure(2.4 * (1 + len(learned)) + 0.4, 2.7, "constrained")
    first, *others = figure.subplots(1, 1 + len(learned), sharey=True, squeeze=False)[0]
    best = max(range(len(trace)), key=lambda i: trace[i]["objective"])
    _trials(first, trace, np.arange(1.0, 1 + len(trace)), best)
    style(first, "trial", "objective", f"best: trial {best + 1} of {len(trace)}")
    first.xaxis.set_major_locator(MaxNLocator(integer=True))
    for ax, (key, name, log) in zip(others, learned):
        _trials(ax, trace, np.array([float(trial[key]) for trial in trace]), best)
        style(ax, name, title=f"best: {trace[best][key]:.3g}")
        if log:
            _log_ticks(ax)
    if len({trial["kernel"] for trial in trace}) > 1:
        first.legend(fontsize=FONT - 1, frameon=False, labelcolor=INK)
    if title:
        figure.suptitle(title, fontsize=FONT + 1, color=INK, x=0.01, ha="left")
    return figure


def _trials(
    ax: Axes, trace: Sequence[Mapping[str, Any]], x: Float[np.ndarray, " trials"], best: int
) -> None:
    """The objective at x, each kernel's trials joined in order, later ones darker."""
    kernel = np.array([trial["kernel"] for trial in trace])
    objective = np.array([trial["objective"] for trial in trace], dtype=np.float64)
    names = list(dict.fromkeys(kernel.tolist()))
    for name, (colour, line) in zip(names, _series(len(names))):
        own = np.flatnonzero(kernel == name)
        shades = [to_rgba(colour, alpha) for alpha in np.linspace(0.3, 1, len(own))]
        ax.plot(x[own], objective[own], line, color=colour, linewidth=0.6, alpha=0.35)
        ax.scatter(x[own], objective[own], s=16, color=shades)
        ax.plot([], [], "o", color=colour, markersize=4, label=name)
    ax.plot(x[best], objective[best], "o", mfc="none", mec=POSITIVE, markersize=9, mew=1.5)


def _log_ticks(ax: Axes) -> None:
    """A logarithmic axis with plain numbers: 1, 2, 5, or tens alone over two decades or more."""
    ax.set_xscale("log")
    low, high = ax.get_xlim()
    ax.xaxis.set_major_locator(LogLocator(subs=(1.0,) if high / low > 100 else (1.0, 2.0, 5.0)))
    ax.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    ax.minorticks_off()
