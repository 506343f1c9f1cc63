"""Shifted means: how far every model is from the best classifier that there is."""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from sklearn.metrics import log_loss, roc_auc_score

from gpmil.data.bags import Bags
from gpmil.paper.cohorts import Drawn
from gpmil.paper.exhibit import Exhibit, panels
from gpmil.paper.study import Part
from gpmil.proof import dots, methods, shifted_mean
from gpmil.proof.plan import Plan
from gpmil.show import plots
from gpmil.show.report import Table

NAME = "shifted-mean"
BAYES = "bayes"  # key of the best classifier; all others are measured by it
FEATURES = (16, 768)
SIZES = (200, 1000, 5000)
TEST_BAGS = {16: 4000, 768: 1000}
QUICK = (8, 60, 200)  # features, training and test bags
FILL = {"o": "none", "s": "#f0b48a", "D": plots.POSITIVE}  # the more bags, the fuller the mark
MOST_SEEDS = {200: 10, 1000: 3, 5000: 1}  # of large cohorts one says enough
WORDS = (
    "A bag is a chain of 15 to 45 instances N(0, I); in a positive one three neighbours are "
    "shifted by 2 in one feature (Harvey et al., 2025). The best classifier is known in closed "
    "form: AUC .949, log loss .287 for any number of features. Aims: within .01 and .03 of it with "
    "16 features from 1,000 bags, within .05 of its AUC with 768.",
    "Screened: before the fit, columns whose bag means or spreads differ between the classes are "
    "kept (ScreenedMIL; bags' labels alone, false discovery rate 5 %); “with neighbours”: the mean "
    "of every column over an instance's neighbours is offered as well. A length per column "
    "(“ard”) is learned with the other settings.",
)
exhibit = partial(
    Exhibit,
    "B",
    "shifted_mean",
    "Shifted means: the distance to Bayes",
    alt="Distance to the Bayes classifier in AUC against the number of training bags",
    caption="AUC below that of Bayes on the same test bags; means over seeds.",
)


def parts(plan: Plan) -> Iterator[Part]:
    """Every model, number of features, size and seed."""
    for n_features, n_bags, n_test in _sizes(plan.quick):
        for seed in range(min(plan.seeds, MOST_SEEDS.get(n_bags, 1))):
            cohort = drawn(n_features, n_bags, n_test, seed)
            for method in methods.on_chains(plan.quick):
                if plan.wants(method.key) or method.key == BAYES:
                    yield Part(cohort, cohort.fingerprint(), method, seed, flags=False)


def _sizes(quick: bool) -> list[tuple[int, int, int]]:
    return [QUICK] if quick else [(d, n, TEST_BAGS[d]) for d in FEATURES for n in SIZES]


def drawn(n_features: int, n_bags: int, n_test: int, seed: int) -> Drawn:
    """Training bags, and others to predict."""
    slug = f"{NAME}-{n_features}-{n_bags}-{n_test}-{seed}"
    draw = partial(_pair, n_features, n_bags, n_test, seed)
    # networks of 768 columns cost some three times those of 16
    n_instances = 30 * n_bags * (1 + n_features / 400)
    return Drawn(slug, f"{n_features} features, {n_bags:,} bags", draw, n_instances)


def _pair(n_features: int, n_bags: int, n_test: int, seed: int) -> tuple[Bags, Bags]:
    return tuple(
        shifted_mean.draw(n, n_features, (seed, n_features, n, part))
        for part, n in enumerate((n_bags, n_test))
    )  # type: ignore[return-value]


def frame(found: Sequence[tuple[Any, Any]]) -> pd.DataFrame:
    """One row per fit: AUC and log loss, and what Bayes has on the same bags."""
    rows = []
    for part, run in found:
        n_features, n_bags = (int(word) for word in part.cohort.slug.split("-")[2:4])
        y = np.arange(len(run.log_odds)) % 2
        row = {"features": n_features, "bags": n_bags, "seed": part.seed, "key": part.method.key}
        row |= {"model": part.method.label, "auc": roc_auc_score(y, run.log_odds)}
        p = np.clip(run.probability, 1e-12, 1 - 1e-12)
        rows.append(row | {"log loss": log_loss(y, p), "fit seconds": run.fit_seconds})
    own = pd.DataFrame(rows)
    on = ["features", "bags", "seed"]
    best = own[own["key"] == BAYES].set_index(on)[["auc", "log loss"]]
    return own.join(best.rename(columns=lambda name: f"bayes {name}"), on=on).sort_values(on)


def build(found: Sequence[tuple[Any, Any]]) -> Exhibit:
    """A table per number of features."""
    own = frame(found)
    tables = [_table(rows, int(d)) for d, rows in own.groupby("features")]
    return exhibit(WORDS, own, tables, picture(own))


def _table(own: pd.DataFrame, n_features: int) -> Table:
    sizes = sorted(own["bags"].unique())
    columns = ["model"]
    for n in sizes:
        columns += [f"{n:,} bags: AUC", "to Bayes", "log loss", "to Bayes"]
    rows = []
    for label, fits in own.groupby("model", sort=False):
        cells = [label]
        for n in sizes:
            of = fits[fits["bags"] == n]
            if not len(of):
                cells += ["–"] * 4
                continue
            auc, loss = of["auc"].mean(), of["log loss"].mean()
            away = [(of[f"bayes {k}"] - of[k]).mean() for k in ("auc", "log loss")]
            # never -0.000
            below, above = (
                f"{value:+.3f}".replace("-0.000", "+0.000") for value in (-away[0], -away[1])
            )
            cells += [f"{auc:.3f}", below, f"{loss:.3f}", above]
        rows.append(cells)
    seeds = ", ".join(f"{own[own['bags'] == n]['seed'].nunique()} with {n:,} bags" for n in sizes)
    caption = f"{n_features} features; test bags that no model has seen, means over seeds: {seeds}."
    return Table(columns, rows, caption, text=["model"])


def picture(own: pd.DataFrame) -> Figure:
    """One panel per number of features, one row per model, a mark per number of bags."""
    own = own[own["key"] != BAYES]
    own = own.assign(below=own["bayes auc"] - own["auc"])
    features, labels = sorted(own["features"].unique()), list(dict.fromkeys(own["model"]))[::-1]
    place = {label: k for k, label in enumerate(labels)}
    size = (4.2 * len(features) + 2.2, dots.heights(labels))
    figure, (axes,) = panels(*size, 1, len(features), sharey=True)
    for ax, d in zip(axes, features):
        for n, mark in zip(sorted(own["bags"].unique()), FILL):
            of = own[(own["features"] == d) & (own["bags"] == n)]
            means = of.groupby("model")["below"].mean()
            y = [place[label] for label in means.index]
            ax.plot(means, y, mark, ms=5, mfc=FILL[mark], mec=plots.POSITIVE, label=f"{n:,} bags")
        ax.axvline(0, color=plots.INK, linewidth=0.8)
        dots.rows_of_models(ax, labels, "AUC below Bayes", f"{d} features")
    dots.legend_below(figure, axes[0])
    return figure
