"""Figure 6: how much the patch probabilities vary inside a slide, against the coupling."""

from functools import partial

import numpy as np
import pandas as pd
from jaxtyping import Float
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from gpmil.data.bags import Bags
from gpmil.paper import reported
from gpmil.paper.exhibit import Exhibit, panels
from gpmil.paper.results import Results
from gpmil.show.plots import FONT, INK, MUTED, NEGATIVE, POSITIVE, style

REPORTED_VGPMIL = reported.numbers()["figure6"]["vgpmil"]  # its figure has no other number
OFF_AXIS = 1.5  # times the largest of the others: VGPMIL becomes a note
exhibit = partial(
    Exhibit,
    "Figure 6",
    "figure6_variability",
    "Variability inside slides against the coupling",
)
MEASURES = (
    ("variability", "standard deviation inside a slide"),
    ("relative", "standard deviation / mean inside a slide"),
)


def variability(bags: Bags, probability: Float[np.ndarray, " N"]) -> float:
    """Mean over slides of the standard deviation of the probabilities inside a slide."""
    return float(np.mean([np.std(inside) for inside in bags.split(probability)]))


def relative_variability(bags: Bags, probability: Float[np.ndarray, " N"]) -> float:
    """The same, each standard deviation divided by the slide's mean probability."""
    tiny = np.finfo(np.float64).tiny  # probabilities that are all zero do not vary
    inside = bags.split(probability)
    return float(np.mean([np.std(values) / max(values.mean(), tiny) for values in inside]))


def build(results: Results) -> Exhibit:
    """Both measures of every run of VGPMIL, VGPMIL-PR and VGPMIL-PR-I, and their curves."""
    frame = _frame(results)
    if not (frame["coupling"] > 0).any():
        reason = "VGPMIL-PR-I was not run with given couplings: nothing to draw."
        return exhibit(missing=reason)
    return exhibit(
        frame=frame,
        figure=_figure(frame),
        alt="Two panels: the standard deviation of patch probabilities inside a slide, and the "
        "same divided by the mean, against lambda, with VGPMIL-PR as a horizontal line.",
        caption=_caption(frame),
    )


def _frame(results: Results) -> pd.DataFrame:
    rows = []
    for method, runs in results.were_run():
        # VGPMIL-PR is VGPMIL-PR-I with lambda = 0; VGPMIL has no lambda.
        coupling = {"vgpmil": np.nan, "pr": 0.0}.get(method.key, method.coupling)
        for k, run in enumerate(runs if coupling is not None else ()):
            if run.patch_probability is not None:
                measures = (
                    variability(results.test, run.patch_probability),
                    relative_variability(results.test, run.patch_probability),
                )
                rows.append((method.key, coupling, k, *measures))
    columns = ["method", "coupling", "run", *(name for name, _ in MEASURES)]
    return pd.DataFrame(rows, columns=columns).astype({"coupling": float})


def _summary(frame: pd.DataFrame, measure: str) -> pd.DataFrame:
    """Mean and standard deviation over runs for each lambda, in increasing order."""
    groups = frame[frame["coupling"] > 0].groupby("coupling")[measure]
    return pd.DataFrame({"mean": groups.mean(), "std": groups.std(ddof=0)})


def _caption(frame: pd.DataFrame) -> str:
    runs = int(frame[frame["coupling"] > 0]["run"].max()) + 1
    points = (
        f"Points: mean over {runs} runs; band: standard deviation over them, thinner than the "
        "line where they agree. "
        if runs > 1
        else "One run. "
    )
    return (
        "Standard deviation of the patch probabilities inside a slide, mean over the test slides, "
        "as the paper defines it (left), and divided by the slide's mean probability (right), "
        "which tells less contrast from probabilities that are lower altogether. "
        f"{points}{_course(frame)} Paper: it falls as λ grows, VGPMIL-PR lies higher, and VGPMIL, "
        f"at {REPORTED_VGPMIL:.2f}, is off its figure."
    )


def _course(frame: pd.DataFrame) -> str:
    """How the variability goes with lambda, in words."""
    mean = _summary(frame, "variability")["mean"]
    first, last = (f"{mean.iloc[k]:.3g} at λ = {mean.index[k]:g}" for k in (0, -1))
    base = frame.loc[frame["coupling"] == 0, "variability"].mean()
    without = "" if np.isnan(base) else f"; VGPMIL-PR: {base:.3g}"
    if len(mean) == 1:
        return f"VGPMIL-PR-I: {first}{without}."
    falls = (np.diff(mean.to_numpy()) < 0).all()
    words = "falls steadily" if falls else "goes, not always downwards,"
    return f"As λ grows the variability of VGPMIL-PR-I {words} from {first} to {last}{without}."


# --- Drawing --------------------------------------------------------------------------------------
def _figure(frame: pd.DataFrame) -> Figure:
    figure, (axes,) = panels(8.2, 3.2, 1, len(MEASURES))
    for ax, (measure, words) in zip(axes, MEASURES):
        _curve(ax, _summary(frame, measure))
        style(ax, "coupling λ (log scale)", words)
        _levels(ax, frame, measure)
        ax.legend(fontsize=FONT - 1, frameon=False, labelcolor=INK, loc="lower left")
    return figure


def _curve(ax: Axes, summary: pd.DataFrame) -> None:
    x, mean, std = (v.to_numpy(float) for v in (summary.index, summary["mean"], summary["std"]))
    ax.fill_between(x, mean - std, mean + std, color=NEGATIVE, alpha=0.2, linewidth=0)
    ax.plot(x, mean, "o-", color=NEGATIVE, markersize=5, linewidth=1.6, label="VGPMIL-PR-I")
    ax.set_xscale("log")
    ax.set_xticks(x, labels=[f"{value:g}" for value in x])
    ax.minorticks_off()


def _levels(ax: Axes, frame: pd.DataFrame, measure: str) -> None:
    """VGPMIL-PR and VGPMIL as horizontal lines; far from the others, VGPMIL is a note."""
    means = frame.groupby("method")[measure].mean()
    top = means.drop("vgpmil", errors="ignore").max()
    if "pr" in means:
        ax.axhline(means["pr"], color=POSITIVE, linewidth=1.4, ls="--", label="VGPMIL-PR (λ = 0)")
    ax.set_ylim(0, 1.2 * top)
    if "vgpmil" not in means:
        return
    paper = f" (paper: {REPORTED_VGPMIL:.2f})" if measure == "variability" else ""
    if means["vgpmil"] <= OFF_AXIS * top:
        label = f"VGPMIL: {means['vgpmil']:.2f}{paper}"
        ax.axhline(means["vgpmil"], color=MUTED, linewidth=1.4, ls=":", label=label)
        ax.set_ylim(0, 1.2 * max(top, means["vgpmil"]))
    else:
        note = f"↑ VGPMIL: {means['vgpmil']:.2f}{paper}"
        ax.text(0.02, 0.98, note, transform=ax.transAxes, va="top", fontsize=FONT - 1, color=MUTED)
