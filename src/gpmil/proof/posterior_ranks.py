"""The picture of simulation-based calibration: ranks of the truth in the posterior."""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from scipy.stats import binom

from gpmil.paper.exhibit import Exhibit, panels
from gpmil.proof import ranks
from gpmil.proof.plan import Plan
from gpmil.proof.trials import Measured, Trials, gathered, in_parts
from gpmil.show import plots
from gpmil.show.report import Table

NAME = "posterior"
DRAWS_PER_COHORT = 5  # as many draws of the posterior study for one cohort of a promise
BINS = 20
LEVEL = 0.99  # of the band in which a bin of uniform ranks lies
exhibit = partial(Exhibit, "C", "posterior", "Is the truth where the posterior says it is?")


def parts(plan: Plan) -> Iterator[Trials]:
    """500 draws of both cases; quick: 30."""
    n = 30 if plan.quick else DRAWS_PER_COHORT * plan.cohorts
    return in_parts(NAME, ranks.CASES, ranks.one_cohort, n, 25, cost=8_000.0)


def frame(found: Sequence[tuple[Any, Any]]) -> pd.DataFrame:
    """One row per case and quantity."""
    rows = []
    for case, measured in gathered(found, NAME).items():
        for kind, words in ranks.KINDS.items():
            own = _known(measured, kind)
            if len(own):
                row = {"case": case, "kind": kind, "quantity": words, "draws": len(own)}
                rows.append(row | ranks.summary(own))
    return pd.DataFrame(rows)


def _known(measured: Measured, kind: str) -> np.ndarray:
    return measured[kind][np.isfinite(measured[kind])]


def build(found: Sequence[tuple[Any, Any]]) -> Exhibit:
    """How often intervals hold the truth, and the histograms."""
    own = frame(found)
    columns = ["drawn with", "rank of", "draws", "50 % holds", "90 % holds", "mean rank", "p"]
    rows = [
        [
            r["case"],
            r["quantity"],
            str(r["draws"]),
            *(f"{r[k]:.2f}" for k in list(own)[4:7]),
            _p(r["p"]),
        ]
        for _, r in own.iterrows()
    ]
    words = [
        "Simulation-based calibration: f and s are drawn from the model, labels from them; the "
        "model is fitted at the true settings, and the rank of the truth in its posterior is "
        "noted. Of a right posterior ranks are uniform, and half of them lie in the middle half.",
        _verdict(own),
    ]
    caption = (
        "Share of draws in which the central interval holds the truth, mean rank (.5 where nothing "
        "leans), and the p-value of Kolmogorov and Smirnov against uniform ranks."
    )
    return exhibit(
        words,
        own,
        [Table(columns, rows, caption, text=columns[:2])],
        picture(gathered(found, NAME)),
        "Histograms of ranks for every quantity",
        f"Ranks in {BINS} bins. Grey: where {LEVEL:.0%} of the bins of uniform ranks lie. Heaped "
        "at both ends: the posterior is too narrow.",
    )


def _p(value: float) -> str:
    return f"{value:.3f}" if value >= 0.001 else "< .001"


def _verdict(own: pd.DataFrame) -> str:
    paper, laplace, effect = (
        own[own["kind"].isin(kinds)]["held by 90 %"]
        for kinds in (("seen", "new"), ("seen, Laplace", "new, Laplace"), ("effect",))
    )
    words = (
        f"The paper's q(u) holds the true f in {paper.min():.0%} to {paper.max():.0%} of its 90 % "
        "intervals"
    )
    verdict = "too narrow by far" if paper.max() < 0.8 else "about as promised"
    words += f": {verdict}. Its covariance is that of a process whose m were all seen. "
    words += (
        f"Laplace's covariance at the same mode holds it in {laplace.min():.0%} to "
        f"{laplace.max():.0%}."
    )
    if len(effect):
        words += f" The slide effect s: {effect.min():.0%}."
    return words


def picture(results: dict[str, Measured]) -> Figure:
    """One row per case, one panel per quantity."""
    figure, axes = panels(
        11.0, 2.3 * len(results) + 0.3, len(results), len(ranks.KINDS), sharey=True
    )
    for row, (case, measured) in zip(axes, results.items()):
        for ax, kind in zip(row, ranks.KINDS):
            own = _known(measured, kind)
            ax.set_title(kind if len(own) else "", fontsize=plots.FONT, color=plots.INK, loc="left")
            if not len(own):
                ax.set_axis_off()
                continue
            low, high = binom.ppf([(1 - LEVEL) / 2, (1 + LEVEL) / 2], len(own), 1 / BINS)
            ax.axhspan(low, high, color=plots.GRID)
            ax.hist(own, BINS, range=(0, 1), color=plots.NEGATIVE)
            plots.style(ax, "rank", "draws" if ax is row[0] else "", kind)
            ax.set_xlim(0, 1)
        row[0].annotate(
            case, (0, 1), (0, 22), "axes fraction", textcoords="offset points", weight="bold",
            fontsize=plots.FONT,
        )  # fmt: skip
    return figure
