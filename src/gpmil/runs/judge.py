"""How good the predictions of a run are: metrics.json, from the files of the run alone."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from gpmil.decide import metrics
from gpmil.runs import operating
from gpmil.runs.class_table import ClassTable
from gpmil.runs.files import coupling_folder, patch_path, read_patches
from gpmil.runs.grades import class_estimates
from gpmil.runs.patient_table import read_patients, with_labels_of_slides

RESAMPLES = 1000
MANY_PATCHES, FEWER_RESAMPLES = 200_000, 200
CALLED = ("accuracy", "precision", "recall", "f1")  # metrics of calls
NO_PATIENT = (
    "No patient is known: every slide is taken as a patient of its own. If patients have several "
    "slides, folds leak and intervals are too narrow: give --patient."
)


def judge_run(
    folder: Path,
    predictions: pd.DataFrame,
    patch_labels: Any = None,
    classes: ClassTable | None = None,
) -> dict[str, Any]:
    """metrics.json from the files of a run; empty where no label is known.

    `predictions` is predictions.csv, maybe with other labels; `patch_labels(slide, table)` gives
    those of patches in place of the tables' own, `classes` grades or types in place of the run's.
    """
    if "coupling" not in predictions:
        found = _judge(predictions, folder, "", patch_labels)
        classes = ClassTable.read(folder) if classes is None else classes
        return found | _patient_metrics(folder, predictions) | _classes(classes, predictions)
    every = {
        str(c): _judge(rows, folder, coupling_folder(str(c)), patch_labels)
        for c, rows in predictions.groupby("coupling", sort=False)
    }
    return {"couplings": every} if any(every.values()) else {}


def _judge(rows: pd.DataFrame, folder: Path, under: str, patch_labels: Any) -> dict[str, Any]:
    """Of one coupling, whose tables of patches lie in patches/<under>."""
    patient = np.where(rows["patient"] == "", "slide " + rows["slide"], rows["patient"])
    rows = rows.assign(group=patient)
    known = rows[rows["label"].notna()]
    found = {"slides": _slide_metrics(known)} if len(known) else {}
    first = rows.drop_duplicates("slide")
    labelled = _labelled_patches(first["slide"], folder, under, patch_labels)
    if labelled:
        groups = first.set_index("slide")["group"].loc[list(labelled)]
        found["patches"] = _patch_metrics(list(labelled.values()), groups.to_numpy())
    return found


def _slide_metrics(known: pd.DataFrame) -> dict[str, Any]:
    groups = known["group"].to_numpy()
    labels = known["label"].to_numpy().astype(np.int64)
    probability = known["probability"].to_numpy()
    called = operating.calls(known)  # the likelier class where nothing is called
    estimates = metrics.bag_metrics(
        labels, probability, decision=called, groups=groups, n_bootstrap=RESAMPLES
    )
    by_patient = bool((known["patient"] != "").any())
    found: dict[str, Any] = {
        "predictions": len(known),
        "slides": int(known["slide"].nunique()),
        "patients": len(np.unique(groups)) if by_patient else None,
        "intervals_by": "patient" if by_patient else "slide",
        "positive": int(labels.sum()),
        "resamples": RESAMPLES,
    }
    if operating.uncalled(known):
        return found | {"metrics": _plain({k: e for k, e in estimates.items() if k not in CALLED})}
    found |= {"metrics": _plain(estimates), "operating": operating.judged(known, groups)}
    accepted = (known["decision"] == "accept").to_numpy()
    if (known["decision"] != "").any():
        wrong = accepted & (called != (labels == 1))
        found["decisions"] = {"accepted": int(accepted.sum()), "wrong": int(wrong.sum())}
    return found


def _patient_metrics(folder: Path, predictions: pd.DataFrame) -> dict[str, Any]:
    """Of patients.csv; empty where there is none, or no patient's label is known."""
    table = read_patients(folder)
    if table is None:
        return {}
    known = with_labels_of_slides(table, predictions).dropna(subset="label")
    if not len(known):
        return {}
    labels, patients = known["label"].to_numpy().astype(np.int64), known["patient"].to_numpy()
    estimates = metrics.bag_metrics(
        labels,
        known["probability"].to_numpy(),
        decision=operating.calls(known),
        groups=patients,
        n_bootstrap=RESAMPLES,
    )
    found = {
        "predictions": len(known),
        "patients": int(known["patient"].nunique()),
        "positive": int(labels.sum()),
        "resamples": RESAMPLES,
        "metrics": _plain(estimates),
        "operating": operating.judged(known, patients),
    }
    return {"patients": found}


def _classes(table: ClassTable | None, predictions: pd.DataFrame) -> dict[str, Any]:
    """Of grades.csv or classes.csv; empty where there is none, or no class is known."""
    found = {} if table is None else class_estimates(table, predictions)
    if table is None or not found:
        return {}
    kind = table.file.removesuffix(".csv")
    return {kind: {"resamples": RESAMPLES, "metrics": _plain(found)}}


def _labelled_patches(
    slides: Iterable[str], folder: Path, under: str, patch_labels: Any
) -> dict[str, pd.DataFrame]:
    """The tables of the slides that have any label of a patch."""
    found = {}
    for slide in slides:
        file = patch_path(folder, slide, under)
        if not file.is_file():
            continue
        table = read_patches(file, ["probability"])
        if patch_labels is not None:
            table["label"] = patch_labels(slide, table)
        if "label" in table and table["label"].notna().any():
            found[slide] = table
    return found


def _patch_metrics(tables: Sequence[pd.DataFrame], groups: np.ndarray) -> dict[str, Any]:
    bag = np.repeat(np.arange(len(tables)), [len(t) for t in tables])
    every = pd.concat(tables, ignore_index=True)
    labels = every["label"].fillna(-1).to_numpy().astype(np.int64)
    flagged = every["flagged"].to_numpy() if "flagged" in every else None
    resamples = RESAMPLES if len(every) <= MANY_PATCHES else FEWER_RESAMPLES
    estimates = metrics.patch_metrics(
        labels,
        every["probability"].to_numpy(),
        bag,
        decision=flagged,
        groups=groups,
        n_bootstrap=resamples,
    )
    return {
        "patches": int((labels >= 0).sum()),
        "slides": len(tables),
        "positive": int((labels == 1).sum()),
        "decided": "probability > 0.5" if flagged is None else "flagged",
        "resamples": resamples,
        "metrics": _plain(estimates),
    }


def _plain(estimates: Mapping[str, metrics.Estimate]) -> dict[str, dict[str, Any]]:
    """As JSON, which knows no nan."""
    return {
        name: {
            k: None if isinstance(v, float) and math.isnan(v) else v for k, v in asdict(e).items()
        }
        for name, e in estimates.items()
    }


def estimate_of(card: Mapping[str, Any]) -> metrics.Estimate:
    """An estimate as metrics.json has it."""
    names = metrics.Estimate.__dataclass_fields__
    known: dict[str, Any] = {k: math.nan if v is None else v for k, v in card.items() if k in names}
    return metrics.Estimate(**known)
