"""Table 3: confusion matrices of slides."""

from functools import partial

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from gpmil.paper import reported
from gpmil.paper.exhibit import Exhibit, panels
from gpmil.paper.results import Results
from gpmil.paper.table2_slides import KEYS
from gpmil.show import plots
from gpmil.show.report import Table

CELLS = ("true negative", "false positive", "false negative", "true positive")
exhibit = partial(
    Exhibit, "Table 3", "table3_confusion", "Confusion matrices at the level of images"
)


def counts(truth: np.ndarray, positive: np.ndarray) -> tuple[int, int, int, int]:
    """Of negative slides called negative, negative called positive, and so on, as in CELLS."""
    t, p = truth == 1, np.asarray(positive, dtype=bool)
    return tuple(int(cell.sum()) for cell in (~t & ~p, ~t & p, t & ~p, t & p))  # type: ignore


def build(results: Results) -> Exhibit:
    """Right and wrong slides by class; means over runs where they differ."""
    found = frame(results)
    negative, positive = int((results.test.labels == 0).sum()), int(results.test.labels.sum())
    caption = (
        f"Test slides of the {results.name}: {negative} negative, {positive} positive; means over "
        "runs. In brackets the paper's, of 6 negative and 25 positive slides. " + results.source
    )
    rows = [[row["method"], *(_cell(row, name) for name in CELLS)] for _, row in found.iterrows()]
    return exhibit(
        frame=found,
        tables=[Table(["method", *CELLS], rows, caption, text=["method"])],
        figure=picture(found),
        alt="One two by two matrix of slide counts per method",
        caption="Rows: what a slide is; columns: what it is called. Counts, means over runs.",
    )


def frame(results: Results) -> pd.DataFrame:
    """Counts of every method, and the paper's."""
    rows = []
    for method, runs in results.were_run(KEYS):
        every = [counts(results.test.labels, run.log_odds > 0) for run in runs]
        paper = reported.numbers()["table3"].get(method.key, [None] * 4)
        row = {"key": method.key, "method": method.label, "runs": len(runs)}
        row |= dict(zip(CELLS, np.mean(every, axis=0)))
        rows.append(row | {f"paper {name}": n for name, n in zip(CELLS, paper)})
    return pd.DataFrame(rows)


def _cell(row: pd.Series, name: str) -> str:
    own, paper = f"{row[name]:g}", row[f"paper {name}"]
    return own if pd.isna(paper) else f"{own} ({paper:g})"


def picture(found: pd.DataFrame) -> Figure:
    """The matrices side by side."""
    columns = min(4, max(len(found), 1))
    rows = -(-max(len(found), 1) // columns)
    figure, grid = panels(2.2 * columns, 2.1 * rows, rows, columns)
    axes = list(grid.ravel())
    for ax in axes[len(found) :]:
        ax.set_axis_off()
    for k, (ax, (_, row)) in enumerate(zip(axes, found.iterrows())):
        _draw(ax, row, first=k % columns == 0)
    return figure


def _draw(ax: Axes, row: pd.Series, first: bool) -> None:
    matrix = np.array([row[name] for name in CELLS]).reshape(2, 2)
    share = matrix / np.maximum(matrix.sum(axis=1, keepdims=True), 1)
    ax.imshow(share, cmap="Blues", vmin=0, vmax=1.4)
    for (i, j), value in np.ndenumerate(matrix):
        right = "bold" if i == j else "normal"
        ax.text(j, i, f"{value:g}", ha="center", va="center", fontsize=13, fontweight=right)
    ax.set_xticks([0, 1], ["called neg.", "called pos."], fontsize=plots.FONT - 1)
    ax.set_yticks([0, 1], ["is neg.", "is pos."] if first else ["", ""], fontsize=plots.FONT - 1)
    ax.tick_params(length=0)
    ax.set_title(row["method"].replace(" (", "\n("), fontsize=plots.FONT, color=plots.INK)
