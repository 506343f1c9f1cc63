"""The picture of docs/explanation/tuning.md: leave-one-bag-out and evidence bound at 36 settings.

    python benchmarks/tuning_picture.py STUDY.json [--out docs/images/tuning.png]

STUDY.json is what benchmarks/leave_one_out_study.py wrote with --json. One row per cohort; left the
leave-one-bag-out log loss from one fit, right the evidence bound of the same fit, both against the
log loss of five-fold cross-validation. Each point is a setting; the ring is the one that would be
chosen.
"""

import argparse
import json
from pathlib import Path

import numpy as np
from leave_one_out_study import GRID
from matplotlib.ticker import FixedLocator, NullLocator

from gpmil.show import plots

TITLES = {"sicapv2": "SICAPv2 subset, 30 slides", "colon": "colon, 70 images"}
# variance of the kernel: colour, marker
VARIANCES = {1: (plots.NEGATIVE, "o"), 9: ("#009e73", "^"), 50: ("#cc79a7", "s")}


def panel(ax, loss, value, best, correlation):
    """One criterion against the five-fold log loss; `best` is the setting it prefers."""
    variance = np.array([setting[0] for setting in GRID])
    for v, (colour, marker) in VARIANCES.items():
        own = variance == v
        ax.plot(loss[own], value[own], marker, color=colour, markersize=4.5, alpha=0.75,
                markeredgewidth=0, label=f"variance {v}")  # fmt: skip
    ax.plot(loss[best], value[best], "o", mfc="none", mec=plots.POSITIVE, markersize=10, mew=1.5,
            label="its choice")  # fmt: skip
    ax.annotate(f"rank correlation {correlation:.2f}", (0.03, 0.93), xycoords="axes fraction",
                fontsize=plots.FONT - 1, color=plots.MUTED)  # fmt: skip


def loss_scale(axis):
    """Plain numbers on a logarithmic axis: a few bad settings lie far from the others."""
    axis.set_major_locator(FixedLocator((0.15, 0.2, 0.3, 0.5, 1.0)))
    axis.set_major_formatter(lambda value, _: f"{value:g}")
    axis.set_minor_locator(NullLocator())


def draw(studies):
    figure = plots.new_figure(8.2, 3.1 * len(studies) + 0.4)
    axes = figure.subplots(len(studies), 2, squeeze=False)
    for (left, right), study in zip(axes, studies):
        loo, cv, bound = np.array(study["points"]).T
        ends = [0.95 * min(-cv.max(), -loo.max()), 1.05 * max(-cv.min(), -loo.min())]
        left.plot(ends, ends, color=plots.GRID, linewidth=1, zorder=0)
        panel(left, -cv, -loo, loo.argmax(), study["leave-one-out"])
        panel(right, -cv, -bound, bound.argmax(), study["evidence bound"])
        left.set(xscale="log", yscale="log")
        right.set(xscale="log", yscale="log")
        for axis in (left.xaxis, left.yaxis, right.xaxis):
            loss_scale(axis)
        name = TITLES[study["set"]]
        plots.style(left, "", "leave-one-bag-out log loss", name)
        plots.style(right, "", "− evidence bound")
    for ax in axes[-1]:
        ax.set_xlabel("log loss of five-fold cross-validation", fontsize=plots.FONT)
    handles, labels = axes[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="lower center", ncols=4, frameon=False, fontsize=plots.FONT)
    figure.tight_layout(rect=(0, 0.05, 1, 1))
    return figure


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    images = Path(__file__).parents[1] / "docs" / "images"
    parser.add_argument("study", type=Path)
    parser.add_argument("--out", type=Path, default=images / "tuning.png")
    args = parser.parse_args()
    studies = json.loads(args.study.read_text())["ranks"]
    args.out.write_bytes(plots.png(draw(studies), dpi=110))


if __name__ == "__main__":
    main()
