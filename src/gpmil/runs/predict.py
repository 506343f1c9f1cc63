"""Predictions of slides and patches, as tables of a run; some slides at a time."""

import copy
import gzip
import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd

from gpmil.data.bags import Bags
from gpmil.data.rows import batches
from gpmil.decide.refer import ReferRule
from gpmil.models import AttentionMIL, BagClassifier, InstancePredictions
from gpmil.models.base import Predictions
from gpmil.models.checks import count, share
from gpmil.models.fitted import FittedGP
from gpmil.runs.files import ATTENTION, EVIDENCE, LEVEL, PATCHES, coupling_folder, patch_path
from gpmil.runs.workspace import Workspace, csv_bytes

logger = logging.getLogger("gpmil")


@dataclass(frozen=True)
class PredictionOptions:
    """What predictions are to say besides probabilities."""

    rate: float = 0.1  # false discovery rate of flagged patches
    alpha: float = 0.1  # error among accepted slides
    interval_patches: int = 20_000  # slides of more get no interval: two matrices n x n
    batch: int = 20_000  # patches at a time

    def check(self) -> None:
        """Before any file is read."""
        share("--rate", self.rate)
        share("--alpha", self.alpha)
        count("--interval-patches", self.interval_patches, least=0)
        count("--batch", self.batch, least=1)


def refer_rule(model: BagClassifier, alpha: float) -> ReferRule | None:
    """When slides may be accepted, if the model was fitted with calibrated=True."""
    known = getattr(model, "cross_fit_", None)
    if known is None or known.calibrator is None or not isinstance(model, FittedGP):
        return None
    try:
        return model.refer_rule(alpha)
    except ValueError as error:
        logger.warning("slides are neither accepted nor referred: %s", error)
        return None


def with_coupling(model: BagClassifier, coupling: float) -> BagClassifier:
    """A copy of the model that couples neighbours by another strength when it predicts."""
    if not isinstance(model, FittedGP):
        raise ValueError(
            f"a {type(model).__name__} has no coupling to replace: only VGPMILPR and VGPMILPRI do."
        )
    if not (math.isfinite(coupling) and coupling >= 0):
        raise ValueError(f"coupling must be a finite number >= 0, got {coupling:g}.")
    other = copy.copy(model)
    if coupling != model.coupling_:
        other.coupling_ = float(coupling)
        if model.cross_fit_ is not None:
            logger.warning(
                "coupling %g is not that of the fit (%g): what was calibrated there does not hold, "
                "so there are no calibrated probabilities, p-values and flags for it.",
                coupling,
                model.coupling_,
            )
            other.cross_fit_ = None
    return other


def predict_in_batches(
    space: Workspace,
    model: BagClassifier,
    bags: Bags,
    asked: PredictionOptions,
    step: Callable[[str], None],
    coupling: str = "",
    calls: bool = True,
) -> list[str]:
    """Predict what was not predicted before, some slides at a time; the names of the parts."""
    rule = refer_rule(model, asked.alpha) if calls else None
    under = coupling_folder(coupling) if coupling else ""
    parts = list(batches(bags.sizes, asked.batch))
    units = [f"{under}-batch-{k}".lstrip("-") for k in range(len(parts))]
    for unit, part in zip(units, parts):
        if space.done(unit):
            step(f"{unit} of {len(parts)}: from before")
            continue
        step(f"{unit} of {len(parts)}: {len(part)} slides")
        here = bags[part].in_memory()
        rows, patches = predict(model, here, asked, rule)
        write_patches(space, here.names.tolist(), patches, under)
        write_patches(space, here.names.tolist(), attention(model, here), under, ATTENTION)
        if not calls:  # the threshold is of another coupling
            rows["call"] = ""
        if coupling:
            rows.insert(2, "coupling", coupling)
        space.finish(unit, rows)
    return units


def predict(
    model: BagClassifier, bags: Bags, asked: PredictionOptions, rule: ReferRule | None
) -> tuple[pd.DataFrame, list[pd.DataFrame]]:
    """Rows of predictions.csv, and one table of patches per slide (none from some models)."""
    found = model.predict_all(
        bags, rate=asked.rate, level=LEVEL, interval_size=asked.interval_patches
    )
    p, decision = found.proba[:, 1], np.full(len(bags), "", dtype=object)
    call = p > getattr(model, "threshold_", 0.5)
    if rule is not None:
        # the rule is about the likelier class: where another aim calls the other one, a person does
        accepted = rule.decide(p, found.novelty) & (call == (p > 0.5))
        decision[:] = np.where(accepted, "accept", "refer")
    rows = pd.DataFrame(
        {
            "slide": bags.names.astype(str),
            "patient": "" if bags.groups is None else bags.groups.astype(str),
            "probability": p,
            "low": found.interval[:, 0],
            "high": found.interval[:, 1],
            "log_odds": found.log_odds,
            **evidence(model, bags, found),
            **({} if found.novelty is None else {"novelty": found.novelty}),
            "call": call.astype(np.int64),
            "decision": decision,
            "label": [str(y) if y >= 0 else "" for y in bags.labels],
        }
    )
    patches = [] if found.instances is None else found.instances.split()
    return rows, [patch_table(each) for each in patches]


def evidence(model: BagClassifier, bags: Bags, found: Predictions) -> dict[str, np.ndarray]:
    """Log odds by patches and by the slide as a whole, of models with a slide context alone."""
    if not isinstance(model, FittedGP) or model.slide_context_ == 0:
        return {}
    split = model.predict_evidence(bags, log_proba_negative=found.log_proba_negative)
    return dict(zip(EVIDENCE, (split.patches, split.slide)))


def patch_table(found: InstancePredictions) -> pd.DataFrame:
    """The patches of a slide as patches/<slide>.csv.gz has them."""
    bag = found.bags
    frame = found.to_frame().drop(columns=["bag", "mean"]).rename(columns={"std": "sd"})
    if found.flagged is not None:
        frame["flagged"] = found.flagged.astype(np.int64)
    if (bag.instance_labels >= 0).any():
        frame["label"] = [str(y) if y >= 0 else "" for y in bag.instance_labels]
    return frame


def attention(model: BagClassifier, bags: Bags) -> list[pd.DataFrame]:
    """The weights of patches, one table per slide, of a model that has any."""
    if not isinstance(model, AttentionMIL):
        return []
    return bags.split(model.attention_table(bags).drop(columns="bag"))


def write_patches(
    space: Workspace,
    slides: Sequence[str],
    tables: Sequence[pd.DataFrame],
    under: str = "",
    kind: str = PATCHES,
) -> None:
    """patches/<slide>.csv.gz, or patches/<under>/<slide>.csv.gz; no time stamps inside."""
    for slide, frame in zip(slides, tables):
        name = patch_path(Path(), str(slide), under, kind)
        space.write(str(name), gzip.compress(csv_bytes(frame), mtime=0))
