"""Every promised error rate beside the realised one, under the assumptions and without them."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from gpmil.paper.exhibit import Exhibit
from gpmil.proof import intervals, promises
from gpmil.proof.plan import Plan
from gpmil.proof.trials import OneCohort, Trials, gathered, in_parts, mean_and_error
from gpmil.show import plots
from gpmil.show.report import Table

exhibit = partial(Exhibit, "D", "error_rates", "Every promise, kept and broken")
# names of the cases in which what is promised may fail, and does
VIOLATIONS = (
    *("coupling 1", "field effect .5", "field .5, coupling 1", "correlation .3"),
    "correlation .3, by bag",
    *("biopsies, coupling 0", "biopsies, coupling 1", "the same, not told"),
    *("1 of 5 labels wrong", "1 of 5 fresh slides positive", "another stain"),
    *("variance 1 in place of 9", "slide effect 1, not told", "the same, patients not told"),
)


class Study(NamedTuple):
    """One kind of promise: what is measured, and what was promised of which number."""

    name: str
    title: str
    cases: Sequence[Any]
    measure: OneCohort
    shown: dict[str, tuple[str, float | None, str]]  # name -> words, promised, "most" or "least"
    cost: float  # of a cohort, in the units of a fit: some 20,000 per second
    divided: int = 1  # fewer cohorts by this factor, where a cohort costs much


MARKS = Study(
    "marks",
    "marked patches",
    promises.FLAGS,
    promises.flags_cohort,
    {f"fdr cohort {r}": (f"false marks at {r:.0%}", r, "most") for r in promises.RATES}
    | {"power cohort 0.1": ("power at 10%", None, "least")},
    9_000.0,
)
REFER = Study(
    "refer",
    "accepted slides",
    promises.REFER,
    promises.refer_cohort,
    {
        f"exceeds {a}": (f"cohorts above alpha = {a:g}", promises.DELTA, "most")
        for a in promises.ALPHAS
    }
    | {"accepted 0.1": ("accepted at .1", None, "least")},
    28_000.0,
)
SLIDES = Study(
    "slides",
    "calibrated slides",
    promises.SLIDES,
    promises.slides_cohort,
    {
        "raw, many": ("calibration error, raw", None, "most"),
        "sigmoid, many": ("calibrated", 0.05, "most"),
        "sigmoid, chance": ("of 300 true ones, by chance", None, "most"),
    },
    86_000.0,
    divided=10,
)
INTERVALS = Study(
    "intervals",
    "intervals of slide probabilities",
    intervals.SLIDES,
    intervals.slides_cohort,
    {
        "held": ("90% interval holds the truth", intervals.LEVEL, "least"),
        "held, process alone": ("without the level", None, "least"),
        "width": ("mean width", None, "most"),
    },
    10_000.0,
)
METRICS = Study(
    "metrics",
    "intervals of metrics",
    intervals.METRICS,
    intervals.metrics_cohort,
    {
        "accuracy": ("95% of accuracy holds it", intervals.METRIC_LEVEL, "least"),
        "auc": ("95% of AUC holds it", intervals.METRIC_LEVEL, "least"),
    },
    200.0,
)
STUDIES = (MARKS, REFER, SLIDES, INTERVALS, METRICS)


def parts(plan: Plan) -> Iterator[Trials]:
    """All promises; quick: three cohorts of smaller ones."""
    for study in STUDIES:
        n = 3 if plan.quick else max(2, plan.cohorts // study.divided)
        cases = [_small(case) for case in study.cases] if plan.quick else study.cases
        if plan.quick:
            cases = [case for case in cases if not _learns(case)]
        yield from in_parts(study.name, cases, study.measure, n, max(1, n // 20), study.cost)


def _small(case: Any) -> Any:
    sizes = {"n_bags": 40, "n_fresh": 60}
    return replace(case, **{k: v for k, v in sizes.items() if hasattr(case, k)})


def _learns(case: Any) -> bool:
    return "auto" in getattr(case, "settings", {}).values()


def frame(found: Sequence[tuple[Any, Any]]) -> pd.DataFrame:
    """One row per study, case and number."""
    rows = []
    for study in STUDIES:
        for case, measured in gathered(found, study.name).items():
            for key, (words, promised, bound) in study.shown.items():
                mean, error = mean_and_error(measured[key])
                row = {"study": study.name, "case": case, "what": words, "realised": mean}
                row |= {"error": error, "promised": promised, "bound": bound}
                row["cohorts"] = int(np.isfinite(measured[key]).sum())
                rows.append(row | {"kept": _kept(mean, error, promised, bound)})
    return pd.DataFrame(rows)


def _kept(mean: float, error: float, promised: float | None, bound: str) -> str:
    """Whether a promise is kept, two standard errors allowed; "" where nothing is promised."""
    if promised is None or not np.isfinite(mean):
        return ""
    above = mean - promised if bound == "most" else promised - mean
    return "yes" if above <= 2 * error + 1e-12 else "no"


def build(found: Sequence[tuple[Any, Any]]) -> Exhibit:
    """A table per kind of promise."""
    own = frame(found)
    tables = [_table(study, own[own["study"] == study.name]) for study in STUDIES]
    words = [
        "Cohorts with a known truth, drawn again and again: what was promised, and what came true. "
        "Lines with a ✗ break an assumption that the promise is made under, and say which: "
        "neighbours that are coupled or look like the lesion beside them, patches or slides that "
        "are alike without being said to be, settings or labels that are wrong, fresh slides "
        "unlike those of the training. Bold: not kept.",
        "In brackets the standard error over cohorts; a rate counts as kept within two of them.",
    ]
    return exhibit(
        words,
        own,
        [table for table in tables if table.rows],
        picture(own[own["promised"].notna() & own["realised"].notna()]),
        "Realised against promised rates",
        "Realised rates with two standard errors; lines: what was promised. Orange: not kept.",
    )


def _table(study: Study, own: pd.DataFrame) -> Table:
    columns = ["case", "cohorts"]
    for words, promised, bound in study.shown.values():
        sign = "≤" if bound == "most" else "≥"
        columns.append(words if promised is None else f"{words} ({sign} {promised:g})")
    rows, strong = [], []
    for k, (case, of) in enumerate(own.groupby("case", sort=False)):
        name = f"✗ {case}" if case in VIOLATIONS else str(case)
        rows.append([name, str(of["cohorts"].max()), *map(_cell, of["realised"], of["error"])])
        strong += [k] if (of["kept"] == "no").any() else []
    caption = f"Promises about {study.title}."
    return Table(columns, rows, caption, text=["case"], strong=strong)


def _cell(mean: float, error: float) -> str:
    return "–" if not np.isfinite(mean) else f"{mean:.3f} ({error:.3f})"


def picture(own: pd.DataFrame) -> Figure:
    """One panel per kind of promise, one below the other."""
    shown = [study for study in STUDIES if (own["study"] == study.name).any()]
    rows = [int((own["study"] == study.name).sum()) for study in shown]
    figure = plots.new_figure(8.6, 0.19 * sum(rows) + 0.75 * len(rows), "constrained")
    axes = figure.subplots(len(shown), 1, squeeze=False, height_ratios=[n + 2 for n in rows])
    for ax, study in zip(axes[:, 0], shown):
        of = own[own["study"] == study.name].iloc[::-1]
        y = np.arange(len(of))
        colour = [plots.POSITIVE if kept == "no" else plots.NEGATIVE for kept in of["kept"]]
        ends = [np.clip(of["realised"] + k * of["error"], 0, 1) for k in (-2, 2)]
        ax.hlines(y, *ends, colour)
        ax.scatter(of["realised"], y, s=20, c=colour)
        ax.scatter(of["promised"], y, s=60, c=plots.INK, marker="|")
        plots.style(ax, title=study.title)
        ax.set_yticks(y, [f"{case}: {what}" for case, what in zip(of["case"], of["what"])])
        ax.tick_params(axis="y", labelsize=plots.FONT - 2)
        ax.set_ylim(-0.7, len(of) - 0.3)
    return figure
