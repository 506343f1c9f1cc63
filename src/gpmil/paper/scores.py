"""The paper's four metrics of every run, in per cent, beside the paper's numbers.

Tables 1, 2, 5 and 6 have the same form: one row per method, accuracy, precision, recall and F1 as
mean and deviation over runs; what the paper reports and the difference stand beside.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from sklearn.metrics import accuracy_score, f1_score, precision_score, recall_score

from gpmil.paper import reported
from gpmil.paper.exhibit import panels
from gpmil.paper.methods import Method
from gpmil.paper.results import MethodRun, Results
from gpmil.show import plots
from gpmil.show.report import Table

METRICS = {"accuracy": "accuracy", "precision": "precision", "recall": "recall", "f1": "F1"}
BASELINES = ("vgpmil", "pr")
LEVELS = {"patch": ("patches", "threshold 0.5"), "slide": ("slides", "even odds")}
OURS, PAPERS = plots.POSITIVE, plots.NEGATIVE


def four(truth: np.ndarray, positive: np.ndarray) -> dict[str, float]:
    """Accuracy, precision, recall and F1 in per cent."""
    return {
        "accuracy": 100 * accuracy_score(truth, positive),
        "precision": 100 * precision_score(truth, positive, zero_division=0),
        "recall": 100 * recall_score(truth, positive, zero_division=0),
        "f1": 100 * f1_score(truth, positive, zero_division=0),
    }


def of_patches(results: Results, run: MethodRun) -> dict[str, float]:
    """At the plain threshold 0.5, over test patches of known label."""
    assert run.patch_probability is not None
    return four(results.patch_truth, run.patch_probability[results.known] > 0.5)


def of_slides(results: Results, run: MethodRun) -> dict[str, float]:
    """At even odds, over test slides."""
    return four(results.test.labels, run.log_odds > 0)


def frame(results: Results, keys: Sequence[str], table: str, level: str) -> pd.DataFrame:
    """One row per method and metric: mean and deviation over runs, the paper's, the difference."""
    measure = of_patches if level == "patch" else of_slides
    rows = []
    for method, runs in results.were_run(keys):
        if level == "patch" and runs[0].patch_probability is None:
            continue
        found = [measure(results, run) for run in runs]
        for metric in METRICS:
            rows.append(_row(method, metric, np.array([f[metric] for f in found]), table))
    return pd.DataFrame(rows)


def _row(method: Method, metric: str, values: np.ndarray, table: str) -> dict[str, Any]:
    paper = reported.value(table, method.key, metric) or (math.nan, math.nan)
    return {
        "key": method.key,
        "method": method.label,
        "metric": metric,
        "runs": len(values),
        "mean": values.mean(),
        "sd": deviation(values),
        "paper": paper[0],
        "paper_sd": paper[1],
        "difference": values.mean() - paper[0],
    }


def deviation(values: np.ndarray) -> float:
    """Over runs; not a number for a single one."""
    return values.std(ddof=1) if len(values) > 1 else math.nan


# --- Which rows stand out -------------------------------------------------------------------------
def better_than_baselines(found: pd.DataFrame) -> list[str]:
    """The paper's rule for bold: at least as good as both baselines in all four metrics."""
    means = found.pivot(index="key", columns="metric", values="mean")
    baselines = [key for key in BASELINES if key in means.index]
    if not baselines:
        return []
    bar = means.loc[baselines].max()
    return [
        key for key in means.index if key not in BASELINES and (means.loc[key] >= bar - 1e-9).all()
    ]


def most_accurate(found: pd.DataFrame) -> list[str]:
    """Who has the highest accuracy."""
    own = found[found["metric"] == "accuracy"]
    return list(own.loc[own["mean"] >= own["mean"].max() - 1e-9, "key"])


@dataclass(frozen=True)
class Rule:
    """Which rows of a table are highlighted, and how its caption goes on to say so."""

    words: str
    keys: Callable[[pd.DataFrame], list[str]]


OF_THE_PAPER = Rule(
    ". Highlighted (the paper's rule): at least as good as VGPMIL and VGPMIL-PR in all four.",
    better_than_baselines,
)
ACCURACY = Rule(
    " (PS-MIL once, as in the paper). Highlighted: the highest accuracy.", most_accurate
)


# --- Table and picture ----------------------------------------------------------------------------
def shown(
    results: Results, keys: Sequence[str], paper: str, level: str, rule: Rule, alt: str
) -> dict[str, Any]:
    """The numbers, a table and a picture of them: what an Exhibit takes."""
    found = frame(results, keys, paper, level)
    things, threshold = LEVELS[level]
    caption = (
        f"Test {things} of the {results.name}, {threshold}, per cent, mean ± deviation over runs"
        f"{rule.words} {results.source}"
    )
    return {
        "frame": found,
        "tables": [table(found, caption, rule.keys(found))],
        "figure": picture(found, f"{things.capitalize()} of the {results.name}"),
        "alt": f"Accuracy, precision, recall and F1 of {alt}",
        "caption": "The table as a picture. Circles: here, with the deviation over runs; "
        "diamonds: the paper.",
    }


def table(found: pd.DataFrame, caption: str, bold: Sequence[str] = ()) -> Table:
    """Ours, the paper's, the difference, for each metric."""
    columns = ["method", "runs"]
    for name in METRICS.values():
        columns += [name, "paper", "diff."]
    keys = list(dict.fromkeys(found["key"]))
    rows = []
    for key in keys:
        own = found[found["key"] == key].set_index("metric")
        cells = [own["method"].iloc[0], str(own["runs"].iloc[0])]
        for metric in METRICS:
            cells += list(_cells(own.loc[metric]))
        rows.append(cells)
    strong = [keys.index(key) for key in bold if key in keys]
    return Table(columns, rows, caption, text=["method"], strong=strong)


def _cells(row: pd.Series) -> tuple[str, str, str]:
    ours = with_deviation(row["mean"], row["sd"])
    if math.isnan(row["paper"]):
        return ours, "", ""
    return ours, with_deviation(row["paper"], row["paper_sd"]), f"{row['difference']:+.1f}"


def with_deviation(mean: float, sd: float, digits: int = 1) -> str:
    """Mean and deviation; the mean alone of a single run."""
    return f"{mean:.{digits}f}" if math.isnan(sd) else f"{mean:.{digits}f} ± {sd:.{digits}f}"


def picture(found: pd.DataFrame, title: str) -> Figure:
    """One dot per method and metric, ours and the paper's."""
    labels = list(dict.fromkeys(found["method"]))[::-1]
    figure, (axes,) = panels(9.6, 0.9 + 0.27 * len(labels), 1, len(METRICS), sharey=True)
    for ax, (metric, name) in zip(axes, METRICS.items()):
        own = found[found["metric"] == metric].set_index("method").loc[labels]
        y = np.arange(len(labels))
        ax.hlines(y, 0, 100, color=plots.GRID, linewidth=0.8, zorder=0)
        ax.plot(own["paper"], y, "D", ms=5, mfc="none", mec=PAPERS, label="paper")
        ax.errorbar(
            own["mean"], y, xerr=own["sd"].fillna(0), fmt="o", ms=5, color=OURS, label="here"
        )
        plots.style(ax, f"{name} (%)")
        ax.set(xlim=(-3, 103), yticks=y, yticklabels=labels, ylim=(-0.6, len(labels) - 0.4))
    if found["paper"].notna().any():
        axes[0].legend(fontsize=plots.FONT - 1.5, frameon=False, loc="lower left")
    figure.suptitle(title, fontsize=plots.FONT + 1, color=plots.INK, x=0.01, ha="left")
    return figure
