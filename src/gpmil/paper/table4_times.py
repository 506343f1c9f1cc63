"""Table 4: what training and testing cost."""

import math
from functools import partial

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from gpmil.paper import reported, scores
from gpmil.paper.exhibit import Exhibit, panels
from gpmil.paper.results import Results
from gpmil.show import plots
from gpmil.show.report import Table

exhibit = partial(Exhibit, "Table 4", "table4_times", "Computational cost of training and testing")


def build(results: Results) -> Exhibit:
    """Seconds of every method, one thread, on the machine that ran this."""
    found = frame(results)
    caption = (
        f"Seconds on one thread of this machine, {results.name}: {results.train.n_instances:,} "
        f"patches to train on, {results.test.n_instances:,} to test; mean ± deviation over runs. "
        "VGPMIL, VGPMIL-PR and VGPMIL-PR-I at the paper's settings make 200 iterations each (fewer "
        "with --quick). Learned settings: the search is in the training time. Testing is slides "
        "and patches together, with the exact integral where the authors draw samples. The "
        "paper's times come from another machine and other code."
    )
    rows = [_row(row) for _, row in found.iterrows()]
    columns = ["method", "training", "paper", "testing", "paper", "training, relative to VGPMIL-PR"]
    return exhibit(
        frame=found,
        tables=[Table(columns, rows, caption, text=["method"])],
        figure=picture(found),
        alt="Training and testing seconds of every method, on a logarithmic axis",
        caption="Circles: training; squares: testing. Logarithmic axis.",
    )


def frame(results: Results) -> pd.DataFrame:
    """Mean and deviation of both times, with the paper's."""
    rows = []
    for method, runs in results.were_run():
        row: dict[str, object] = {"key": method.key, "method": method.label, "runs": len(runs)}
        for name, field in (("train", "fit_seconds"), ("test", "predict_seconds")):
            values = np.array([getattr(run, field) for run in runs])
            row[name] = values.mean()
            row[f"{name}_sd"] = scores.deviation(values)
            row[f"paper_{name}"] = (reported.value("table4", method.key, name) or [math.nan])[0]
        rows.append(row)
    found = pd.DataFrame(rows)
    base = found.loc[found["key"] == "pr", "train"]
    found["relative"] = found["train"] / base.iloc[0] if len(base) else math.nan
    return found


def _row(row: pd.Series) -> list[str]:
    cells = [row["method"]]
    for name in ("train", "test"):
        paper = row[f"paper_{name}"]
        cells.append(scores.with_deviation(row[name], row[f"{name}_sd"], digits=2))
        cells.append("" if math.isnan(paper) else f"{paper:.2f}")
    return [*cells, "" if math.isnan(row["relative"]) else f"{row['relative']:.1f}"]


def picture(found: pd.DataFrame) -> Figure:
    """Both times of every method."""
    figure, ((ax,),) = panels(6.4, 0.9 + 0.27 * len(found))
    y = np.arange(len(found))[::-1]
    ax.hlines(y, found["test"], found["train"], color=plots.GRID, linewidth=2, zorder=0)
    ax.plot(found["train"], y, "o", color=plots.POSITIVE, label="training")
    ax.plot(found["test"], y, "s", color=plots.NEGATIVE, label="testing")
    plots.style(ax, "seconds")
    ax.set(xscale="log", yticks=y, yticklabels=found["method"])
    ax.legend(fontsize=plots.FONT - 1, frameon=False)
    return figure
