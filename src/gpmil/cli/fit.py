"""`gpmil fit`: a model from slides and their labels, as a folder."""

import math
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pandas as pd

from gpmil.cli.config import repeated, run_config
from gpmil.cli.grades import by_class, true_classes
from gpmil.cli.options import Source, labelled
from gpmil.cli.settings import model_card, model_from_card
from gpmil.cli.terminal import print_line, progress
from gpmil.data.bags import Bags
from gpmil.files.whole import json_bytes
from gpmil.models import BagClassifier, load
from gpmil.models.ordinal import OrdinalMIL
from gpmil.runs.data_card import placement
from gpmil.runs.files import METRICS, PREDICTIONS, read_predictions
from gpmil.runs.grades import write_classes
from gpmil.runs.judge import judge_run
from gpmil.runs.learned import LEARNED, in_words, learned
from gpmil.runs.page import write as write_report
from gpmil.runs.patients import write_patients
from gpmil.runs.predict import PredictionOptions, batches, predict_in_batches
from gpmil.runs.workspace import csv_bytes, workspace
from gpmil.show.report import RESEARCH

SEEN = "These are the slides the model was fitted on: judge it by gpmil cv, or by other slides."
CONTEXT = (
    "With a slide context the whole slide counts beside its patches: stain or site may, too, and a "
    "benign patch more may lower the probability. predictions.csv has evidence_patches and "
    "evidence_slide."
)
FACTS = (
    *LEARNED,
    *("loo_log_likelihood_", "inducing_from_lesions_", "n_iter_", "residual_", "converged_"),
    *("n_epochs_", "best_epoch_", "n_rounds_", "threshold_", "operating_point_"),
)


def repeat(file: Path, out: Path, cache: Path | None) -> None:
    """Fit again as a config.json says."""
    card, source, asked, _, cache = repeated(file, "fit", cache)
    run(source, asked, out, model_from_card(card["model"]), cache, before=card)


def run(
    source: Source,
    asked: PredictionOptions,
    out: Path,
    model: BagClassifier,
    cache: Path | None = None,
    before: dict[str, Any] | None = None,
) -> None:
    """Read, fit, predict what was fitted; `before` is the configuration of a run to repeat.

    The predictions are of the slides that the model has seen: to look at, not to judge it by.
    """
    asked.check()
    bags, lines = by_class(source, model).cohort(cache)
    bags = labelled(bags)
    y = true_classes(source, model, bags)
    card = model_card(model)
    options = {"source": source.card(), "asked": asdict(asked)}
    config = run_config("fit", options, card, bags, lines, cache, before)
    config |= {"note": SEEN, **placement(bags)}
    n_steps = 2 + len(list(batches(bags.sizes, asked.batch)))
    with workspace(out, config) as space, progress(n_steps) as step:
        step(f"fitting {card['class']} to {len(bags)} slides, {bags.n_instances:,} patches")
        if not space.done("model"):
            model.fit(bags, y).save(space.folder / "model")
            space.finish("model", pd.DataFrame({"model": [card["class"]]}))
        model = load(space.folder / "model")
        units = predict_in_batches(space, model, bags, asked, step)
        step("writing")
        write_classes(space, model, bags, y)
        space.write("splits.csv", csv_bytes(_trained_on(bags)))
        space.write(PREDICTIONS, csv_bytes(space.pooled(units)))
        write_patients(space, model, bags)
        judged = judge_run(space.folder, read_predictions(space.folder))
        found = {"training": _facts(model), "note": SEEN, **judged}
        space.write(METRICS, json_bytes(found))
        write_report(space.folder)
    _say(model, out)


def _trained_on(bags: Bags) -> pd.DataFrame:
    patients = "" if bags.groups is None else bags.groups.astype(str)
    rows = {"slide": bags.names.astype(str), "patient": patients}
    return pd.DataFrame(rows | {"label": bags.labels, "part": "train"})


def _facts(model: BagClassifier) -> dict[str, Any]:
    """What the fit found, as it is in the saved model."""
    found = {name.rstrip("_"): getattr(model, name, None) for name in FACTS}
    return {**model.cohort_, **{k: v for k, v in found.items() if _is_json(v)}}


def _is_json(value: Any) -> bool:
    return value is not None and not (isinstance(value, float) and not math.isfinite(value))


def _say(model: BagClassifier, out: Path) -> None:
    shown, score = in_words(learned(model)), getattr(model, "loo_log_likelihood_", None)
    print_line(f"{type(model).__name__}: {shown}" if shown else type(model).__name__)
    if isinstance(model, OrdinalMIL):
        cuts = ", ".join(f"{cut:.3g}" for cut in model.cut_points_)
        print_line(f"Cut points between {', '.join(map(str, model.classes_))}: {cuts}")
    if score is not None:
        print_line(f"Mean log likelihood of a slide left out of the fit: {score:.4g}")
    point = getattr(model, "operating_point_", None)
    if point is not None:
        reached = (f"{name} {rate[0]:.3f}" for name, rate in point["rates"].items())
        print_line(
            f"Called positive above {point['threshold']:.3g} (aim: {point['aim']}; by "
            f"{point['basis']}): {', '.join(reached)}"
        )
    if getattr(model, "slide_context_", 0) > 0:
        print_line(CONTEXT)
    if getattr(model, "converged_", True) is False:
        print_line("WARNING: the fit has not converged; a larger --max-iter may help.")
    print_line(f"Written to {out}. Predict with: gpmil predict {out} DATA --out NAME. {RESEARCH}")
