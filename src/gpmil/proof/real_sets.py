"""Every model on real data: each .npz of a folder is a set, cross-validated."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from gpmil.paper import all_models
from gpmil.paper import methods as of_the_paper
from gpmil.paper.cohorts import StudyData, from_files
from gpmil.paper.exhibit import Exhibit, panels
from gpmil.paper.methods import DEFAULT, Method, key_of
from gpmil.paper.results import Results
from gpmil.paper.study import Part, collect, planned
from gpmil.proof import dots, methods
from gpmil.proof.plan import Plan
from gpmil.show import plots
from gpmil.show.report import Table

FOLDS, QUICK_FOLDS = 5, 2
MOST_SEEDS = 3
WIDE, COMPONENTS = 256, 64  # features from which they are reduced, and to how many
METRICS = {"slides: AUC": "AUC of slides", "patches: AUC": "AUC of patches"}
exhibit = partial(Exhibit, "E", "real_sets", "Real sets")


def cohorts(plan: Plan) -> Iterator[StudyData]:
    """The sets, in the order of their names."""
    assert plan.data is not None
    files = sorted(Path(plan.data).rglob("*.npz"))
    if not files:
        raise ValueError(
            f"--data {plan.data}: expected a folder with .npz files, one per set (X, bag, y_bag, "
            "bag_id), found none. Leave --data out to do without real sets."
        )
    for file in files:
        yield from_files(file, QUICK_FOLDS if plan.quick else FOLDS)


def compared(cohort: StudyData, plan: Plan) -> list[Method]:
    """Every model of the package, and torchmil's; features above 256 as 64 PCA scores."""
    width = cohort.train.n_features
    n_components = COMPONENTS if width >= WIDE else None
    common: dict[str, Any] = {"n_components": n_components, "device": "cpu"}
    kept = {"vgpmil", "pr", key_of(DEFAULT), *of_the_paper.TUNED}
    own = [m for m in of_the_paper.compared(common, plan.quick) if not m.coupling or m.key in kept]
    others = [m for m in methods.networks(plan.quick) if m.key.startswith("torchmil")]
    reduced = [_with_components(m, n_components) for m in others]
    return [m for m in (*own, *reduced) if plan.wants(m.key)]


def _with_components(method: Method, n_components: int | None) -> Method:
    def make(seed: int) -> Any:
        return method.make(seed).set_params(n_components=n_components)

    return Method(method.key, method.name, make, effort=method.effort)


def parts(plan: Plan) -> Iterator[Part]:
    """Every set, model and seed; none without a folder."""
    if plan.data is None:
        return
    for cohort in cohorts(plan):
        seeds = min(plan.seeds, MOST_SEEDS)
        yield from planned(cohort, compared(cohort, plan), seeds, flags=False)


def results(found: Sequence[tuple[Any, Any]]) -> list[Results]:
    """By set."""
    sets: dict[int, Any] = {id(part.cohort): part.cohort for part, _ in found}
    gathered = []
    for cohort in sets.values():
        known = {p.method.key: p.method for p, _ in found if p.cohort is cohort}
        gathered.append(collect(cohort, list(known.values()), found))
    return gathered


def build(found: Sequence[tuple[Any, Any]]) -> Exhibit:
    """A table per set, and one picture of them all."""
    every = results(found)
    frames = [all_models.frame(one).assign(set=one.name) for one in every]
    own = pd.concat(frames, ignore_index=True)
    tables = [t for one, rows in zip(every, frames) for t in _tables(one, rows)]
    words = [
        "Every slide is predicted by a model that has not seen it, nor its patient where patients "
        "are known. Patch metrics where labels of patches are; FROC is the mean share of positive "
        "patches found at 1/4, 1/2, 1, 2, 4 and 8 false ones per slide. Models of bags alone say "
        "nothing of patches.",
    ]
    return exhibit(
        words,
        own,
        tables,
        picture(own),
        "Slide and patch AUC of every model on every set",
        "Dots: means over seeds; bars: 95 % intervals over slides, or over patients where known.",
    )


def _tables(one: Results, own: pd.DataFrame) -> Iterator[Table]:
    """Slides, with what a run costs; and patches, where their labels are known."""
    every = all_models.known_names(own)
    of_slides = [name for name in every if name.startswith("slides")]
    counts = (
        f"{len(one.test)} bags ({one.test.labels.sum()} positive), {one.test.n_instances:,} "
        "instances. Seconds: all fits and predictions of a run."
    )
    table = all_models.table(one, own, of_slides, f"{all_models.caption(one)} {counts}")
    spent = {
        method.label: np.mean([run.fit_seconds + run.predict_seconds for run in runs])
        for method, runs in one.were_run()
    }
    rows = [[*cells, f"{spent[cells[0]]:.0f}"] for cells in table.rows]
    yield replace(table, columns=[*table.columns, "seconds"], rows=rows)
    if len(every) > len(of_slides):
        of_patches = [name for name in every if name not in of_slides]
        yield all_models.table(one, own, of_patches, f"{one.name}: patches whose label is known.")


def picture(own: pd.DataFrame) -> Figure:
    """One row of panels per metric, one panel per set."""
    labels = list(dict.fromkeys(own["method"]))[::-1]
    # sets with labels of patches first: the names of the models stand beside the first panel
    of_patches = set(own["set"][own["metric"] == "patches: AUC"])
    sets = sorted(dict.fromkeys(own["set"]), key=lambda one: one not in of_patches)
    shown = [name for name in METRICS if (own["metric"] == name).any()]
    size = (2.3 + 1.9 * len(sets), dots.heights(labels) * len(shown))
    figure, axes = panels(*size, len(shown), len(sets), sharey=True)
    for row, name in zip(axes, shown):
        for ax, one in zip(row, sets):
            of = own[(own["set"] == one) & (own["metric"] == name)]
            if not len(of):  # no patch has a label
                ax.set_axis_off()
                continue
            y = of["method"].map({label: k for k, label in enumerate(labels)}).to_numpy()
            ax.hlines(y, of["low"], of["high"], color=plots.MUTED, linewidth=1.4)
            ax.plot(of["mean"], y, "o", ms=4, color=plots.POSITIVE)
            dots.rows_of_models(ax, labels, METRICS[name], one)
    return figure
