"""The three algorithmic unit tests, for every model: who learned the multiple-instance rule?"""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from sklearn.metrics import roc_auc_score

from gpmil.data.bags import Bags
from gpmil.paper.cohorts import Drawn
from gpmil.paper.exhibit import Exhibit, panels
from gpmil.paper.scores import deviation
from gpmil.paper.study import Part
from gpmil.proof import algorithmic, dots, methods
from gpmil.proof.plan import Plan
from gpmil.show import plots
from gpmil.show.report import Table

NAME = "unit-tests"
SIZES = (300, 1000)
QUICK_SIZE = 60
TEST_BAGS = 300
PASSED = 0.95  # least test AUC with every seed
COLUMNS = ("train", "same", "moved")  # bags whose AUC is taken
WORDS = (
    "Raff and Holt (NeurIPS 2023) draw bags in which a shortcut separates the classes in training "
    "and misleads at test. Test 1: negative bags hold a “poison”, positive ones an outlier; at "
    "test the poison is in the positive bags. Test 2: the same with two kinds of positive "
    "instance. Test 3: a positive bag holds an A and a B, a negative one A or B; at test negative "
    "bags hold 37 of them. A model that learned “a bag is positive if one of its instances is” "
    "keeps its AUC in tests 1 and 2.",
    "Test 3 is not that rule: “A and B” cannot be said by any model in which one instance makes a "
    "bag positive, and VGPMIL-PR and VGPMIL fail it by construction. AllConceptsMIL is made for "
    "it: P(y = 1) is the product over concepts of P(some instance holds it).",
    "Bags without positions: VGPMIL-PR-I is VGPMIL-PR here. Passed: a test AUC of at least "
    f"{PASSED} with every seed.",
)
exhibit = partial(
    Exhibit,
    "A",
    "unit_tests",
    "Three tests of the multiple-instance rule",
    alt="AUC of every model and seed in training and at test, one panel per test",
    caption="Every fit: AUC of its training bags (open) and of bags in which the shortcut is "
    "turned round (filled). Left of the line is worse than guessing.",
)


def parts(plan: Plan) -> Iterator[Part]:
    """Every model, test, size and seed."""
    for n_bags in (QUICK_SIZE,) if plan.quick else SIZES:
        for test in algorithmic.TITLES:
            for seed in range(plan.seeds):
                cohort = drawn(test, n_bags, seed)
                for method in methods.without_positions(plan.quick):
                    if plan.wants(method.key):
                        yield Part(cohort, cohort.fingerprint(), method, seed, flags=False)


def drawn(test: int, n_bags: int, seed: int) -> Drawn:
    """Training bags; and those to predict: the training bags, fresh ones, and moved ones."""
    slug = f"{NAME}-{test}-{n_bags}-{seed}"
    # six instances per bag, which cost as much as twenty of large bags
    return Drawn(
        slug, f"test {test}, {n_bags:,} bags", partial(_pair, test, n_bags, seed), 20 * n_bags
    )


def _pair(test: int, n_bags: int, seed: int) -> tuple[Bags, Bags]:
    train = algorithmic.draw(test, n_bags, seed)
    same = algorithmic.draw(test, TEST_BAGS, 10_000 + seed)
    moved = algorithmic.draw(test, TEST_BAGS, seed, moved=True)
    arrays = [x for bags in (train, same, moved) for x in bags.split(bags.features)]
    labels = np.concatenate([bags.labels for bags in (train, same, moved)])
    return train, Bags.from_arrays(arrays, labels=labels)


def frame(found: Sequence[tuple[Any, Any]]) -> pd.DataFrame:
    """One row per fit: the AUC of training bags, of fresh ones like them, and of moved ones."""
    rows = []
    for part, run in found:
        test, n_bags = (int(word) for word in part.cohort.slug.split("-")[2:4])
        cuts = np.split(run.log_odds, [n_bags, n_bags + TEST_BAGS])
        aucs = [roc_auc_score(np.arange(len(odds)) % 2, odds) for odds in cuts]
        row = {"test": test, "bags": n_bags, "seed": part.seed, "key": part.method.key}
        row |= {"model": part.method.label} | dict(zip(COLUMNS, aucs))
        rows.append(row | {"fit seconds": run.fit_seconds})
    return pd.DataFrame(rows).sort_values(["bags", "test", "seed"], ignore_index=True)


def build(found: Sequence[tuple[Any, Any]]) -> Exhibit:
    """Tables and a picture: AUC at test, where the shortcut is turned round."""
    own = frame(found)
    tables = [_table(rows, int(n)) for n, rows in own.groupby("bags")]
    return exhibit(WORDS, own, tables, picture(own))


def _table(own: pd.DataFrame, n_bags: int) -> Table:
    tests = sorted(own["test"].unique())
    columns = ["model", "seeds"]
    for test in tests:
        columns += [f"{test}: train", "test", "worst"]
    rows, strong = [], []
    for k, (label, fits) in enumerate(own.groupby("model", sort=False)):
        moved = {test: fits[fits["test"] == test]["moved"].to_numpy() for test in tests}
        counts = [len(values) for values in moved.values()]
        cells = [label, str(max(counts)) if len(set(counts)) == 1 else f"≤ {max(counts)}"]
        for test in tests:
            train = fits[fits["test"] == test]["train"]
            least = f"{moved[test].min():.3f}" if len(train) else "–"
            cells += [f"{train.mean():.3f}" if len(train) else "–", _spread(moved[test]), least]
        rows.append(cells)
        known = [values for test, values in moved.items() if test != 3]
        strong += [k] if all(len(v) and v.min() >= PASSED for v in known) else []
    caption = (
        f"{n_bags:,} training bags: mean AUC of training and of test bags, ± deviation over seeds, "
        "and the worst seed. Highlighted: tests 1 and 2 passed."
    )
    return Table(columns, rows, caption, text=["model"], strong=strong)


def _spread(values: np.ndarray) -> str:
    if not len(values):
        return "–"
    sd = deviation(values)
    return f"{values.mean():.3f}" + ("" if np.isnan(sd) else f" ± {sd:.3f}")


def picture(own: pd.DataFrame) -> Figure:
    """One panel per test, one row per model, all seeds of the largest size."""
    own = own[own["bags"] == own["bags"].max()]
    labels = list(dict.fromkeys(own["model"]))[::-1]
    tests = sorted(own["test"].unique())
    figure, (axes,) = panels(10.2, dots.heights(labels), 1, len(tests), sharey=True)
    for ax, test in zip(axes, tests):
        of = own[own["test"] == test]
        y = of["model"].map({label: k for k, label in enumerate(labels)})
        ax.axvline(0.5, color=plots.MUTED, linewidth=0.8)
        ax.plot(of["train"], y + 0.15, "o", ms=5, mfc="none", mec=plots.NEGATIVE, label="training")
        ax.plot(of["moved"], y - 0.15, "o", ms=5, color=plots.POSITIVE, alpha=0.7, label="test")
        dots.rows_of_models(ax, labels, "AUC", f"{test}. {algorithmic.TITLES[int(test)]}")
        ax.set_xlim(-0.03, 1.03)
    dots.legend_below(figure, axes[0])
    return figure
