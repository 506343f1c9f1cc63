"""Pictures in which every model is a row of dots."""

from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from gpmil.show import plots


def heights(labels: Sequence[str]) -> float:
    """Inches that so many rows need, with title and axis."""
    return 1.2 + 0.27 * len(labels)


def rows_of_models(ax: Axes, labels: Sequence[str], xlabel: str, title: str) -> None:
    """One line per model, whole dots also in the first and last row."""
    plots.style(ax, xlabel, title=title)
    ax.set(yticks=range(len(labels)), yticklabels=labels, ylim=(-0.7, len(labels) - 0.3))
    ax.grid(axis="y", color=plots.GRID, linewidth=0.8)
    ax.set_axisbelow(True)


def legend_below(figure: Figure, ax: Axes) -> None:
    """The legend of one panel, for all of them."""
    handles, names = ax.get_legend_handles_labels()
    figure.legend(
        handles, names, loc="outside lower center", ncols=3, frameon=False, fontsize=plots.FONT
    )
