"""Beyond the paper: every model side by side, slides and patches, with intervals."""

from collections.abc import Sequence
from functools import partial

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from gpmil.decide.metrics import Estimate, bag_metrics, patch_metrics
from gpmil.paper.exhibit import Exhibit, panels
from gpmil.paper.results import MethodRun, Results
from gpmil.paper.scores import deviation
from gpmil.show import plots
from gpmil.show.report import Table

SLIDE = {
    "accuracy": "accuracy",
    "auc": "AUC",
    "log_loss": "log loss",
    "calibration_error": "calibration error",
}
PATCH = {
    "auc": "AUC",
    "average_precision": "average precision",
    "within_bag_auc": "AUC in slides",
    "froc": "FROC",
}
N_BOOTSTRAP = 400  # of every run
exhibit = partial(Exhibit, "Beyond the paper", "all_models", "All models, with intervals")


def build(results: Results) -> Exhibit:
    """Metrics that need no threshold, with intervals over slides (or patients)."""
    found = frame(results)
    names = known_names(found)
    return exhibit(
        _words(results, found),
        found,
        [table(results, found, names, f"{caption(results)} {results.source}")],
        picture(found, names),
        "Slide and patch metrics of every model with intervals",
        "Dots: means over runs; bars: 95 % intervals. Log loss: small is good.",
    )


def known_names(found: pd.DataFrame) -> list[str]:
    """The metrics that these data can tell, in the order of the table."""
    names = [f"slides: {name}" for name in SLIDE.values()]
    names += [f"patches: {name}" for name in PATCH.values()]
    known = found.groupby("metric")["mean"].count()
    return [name for name in names if known.get(name, 0)]


def caption(results: Results) -> str:
    """What the numbers are."""
    runs = max(len(results.of(method.key)) for method in results.methods)
    unit = "slides" if results.test.groups is None else "patients"
    means = "one run" if runs == 1 else f"means over up to {runs} runs"
    return (
        f"{results.name}: {means}, with the 95 % interval over {unit} (DeLong's of the AUC, else "
        f"{N_BOOTSTRAP} resamples per run; ends averaged over runs)."
    )


def table(results: Results, found: pd.DataFrame, names: Sequence[str], caption: str) -> Table:
    """One row per method that has any of these numbers."""
    rows = []
    for method, _ in results.were_run():
        own = found[found["key"] == method.key]
        if own["metric"].isin(names).any():
            rows.append([method.label, *(_cell(own, name) for name in names)])
    return Table(["method", *names], rows, caption, text=["method"])


def frame(results: Results) -> pd.DataFrame:
    """One row per method and metric."""
    rows = []
    for method, runs in results.were_run():
        every = [_estimates(results, run) for run in runs]
        for name in every[0]:
            own = np.array([[e[name].value, e[name].low, e[name].high] for e in every])
            row = {"key": method.key, "method": method.label, "metric": name, "runs": len(runs)}
            row |= dict(zip(("mean", "low", "high"), own.mean(axis=0)))
            rows.append(row | {"sd": deviation(own[:, 0])})
    return pd.DataFrame(rows)


def _estimates(results: Results, run: MethodRun) -> dict[str, Estimate]:
    test = results.test
    p = np.clip(run.probability, 1e-12, 1 - 1e-12)
    slides = bag_metrics(
        test.labels, p, decision=run.log_odds > 0, groups=test.groups, n_bootstrap=N_BOOTSTRAP
    )
    found = {f"slides: {name}": slides[key] for key, name in SLIDE.items()}
    if run.patch_probability is None or not results.knows_patches:
        return found
    patches = patch_metrics(
        test.instance_labels,
        run.patch_probability,
        test.bag_index,
        groups=test.groups,
        n_bootstrap=N_BOOTSTRAP,
    )
    return found | {f"patches: {name}": patches[key] for key, name in PATCH.items()}


def _cell(own: pd.DataFrame, name: str) -> str:
    row = own[own["metric"] == name]
    if not len(row):
        return "–"
    mean, low, high = row[["mean", "low", "high"]].iloc[0]
    if np.isnan(mean):  # no slide with known patches of both classes
        return "–"
    return f"{mean:.3f} ({low:.2f} to {high:.2f})"


def _words(results: Results, found: pd.DataFrame) -> Sequence[str]:
    """Whether attention is ahead at the level of slides, the paper's third limitation."""
    auc = found[found["metric"] == "slides: AUC"].set_index("key")["mean"]
    loss = found[found["metric"] == "slides: log loss"].set_index("key")["mean"]
    attention = [key for key in ("attention", "gated", "smooth") if key in auc.index]
    if not attention or "tuned" not in auc.index:
        return []
    best = max(attention, key=lambda key: auc[key])
    verdict = "ahead of" if auc[best] > auc["tuned"] else "not ahead of"
    return [
        f"Slides: attention is {verdict} VGPMIL-PR-I with learned settings on these data by AUC "
        f"({results.method(best).name} {auc[best]:.3f} against {auc['tuned']:.3f}); log loss "
        f"{loss[attention].min():.3f} (the best attention model) against {loss['tuned']:.3f}. "
        "Attention and mean aggregation say nothing of patches: attention weights are not label "
        "probabilities."
    ]


def picture(found: pd.DataFrame, names: Sequence[str]) -> Figure:
    """One panel per metric, one row per model."""
    labels = list(dict.fromkeys(found["method"]))[::-1]
    figure, (axes,) = panels(10.6, 0.9 + 0.27 * len(labels), 1, len(names), sharey=True)
    place = {label: k for k, label in enumerate(labels)}
    for ax, name in zip(axes, names):
        own = found[found["metric"] == name]
        y = own["method"].map(place)
        ax.hlines(y, own["low"], own["high"], color=plots.MUTED, linewidth=1.4)
        ax.plot(own["mean"], y, "o", ms=5, color=plots.POSITIVE)
        plots.style(ax, name.replace(": ", ":\n"))
        if "log loss" in name:
            _logarithmic(ax)  # one model that is sure and wrong would hide the others
        ax.set(yticks=range(len(labels)), yticklabels=labels, ylim=(-0.6, len(labels) - 0.4))
        ax.grid(axis="y", color=plots.GRID, linewidth=0.8)
        ax.set_axisbelow(True)
    return figure


def _logarithmic(ax: Axes) -> None:
    ax.set_xscale("log")
    low, high = ax.get_xlim()
    ax.minorticks_off()
    shown = [tick for tick in (0.01, 0.1, 1, 10) if low <= tick <= high]
    ax.set_xticks(shown, [f"{tick:g}" for tick in shown])
    ax.set_xlim(low, high)
