"""Patients of a run that have several slides: patients.csv, and how good it is."""

from typing import Any

import numpy as np
import pandas as pd

from gpmil.data.bags import Bags
from gpmil.decide import metrics
from gpmil.models import BagClassifier
from gpmil.models.with_patients import PatientGP
from gpmil.runs.contents import RunContents
from gpmil.runs.files import read_table
from gpmil.runs.workspace import Workspace, csv_bytes
from gpmil.show.report import Section, Table

PATIENTS = "patients.csv"
MOST = 20_000  # patches of a patient: slides of more are predicted one by one alone


def write_patients(space: Workspace, model: BagClassifier, bags: Bags) -> None:
    """patients.csv, where any patient has several slides.

    P(patient positive) is that of any slide being so, jointly (`predict_patients`).
    """
    if bags.groups is None or not isinstance(model, PatientGP):
        return
    names, number, counts = np.unique(bags.groups, return_inverse=True, return_counts=True)
    small = np.bincount(number, bags.sizes) <= MOST
    if counts.max() < 2 or not small.all():
        return
    rows = [
        model.predict_patients(bags[number == p].in_memory()).to_frame() for p in range(len(names))
    ]
    table = pd.concat(rows, ignore_index=True)
    space.write(PATIENTS, csv_bytes(table.assign(label=table["label"].replace(-1, ""))))


def _judged(known: pd.DataFrame) -> dict[str, Any]:
    """The metrics of patients as text; nothing where one class is missing."""
    if known["label"].nunique() < 2:
        return {"patients": len(known)}
    labels, p = known["label"].to_numpy(), known["probability"].to_numpy()
    found = metrics.bag_metrics(labels, p)
    shown = {name: str(found[name]) for name in ("accuracy", "auc", "log_loss")}
    return {"patients": len(known), "positive": int(labels.sum()), **shown}


def section(run: RunContents) -> Section | None:
    """Patients on the page, where any has several slides."""
    file = run.folder / PATIENTS
    if not file.is_file():
        return None
    table = read_table(file, "a table of patients", ["probability", "label"])
    numbers = table[["probability", "label"]].apply(pd.to_numeric, errors="coerce")
    known = numbers[numbers["label"].isin([0, 1]) & numbers["probability"].between(0, 1)]
    found = _judged(known.astype({"label": int}))
    words = [
        "A patient is positive where any slide is. All slides of a patient are taken together, as "
        f"they share what the model has learned; {PATIENTS} has every patient."
    ]
    rows = [[str(name).replace("_", " "), str(value)] for name, value in found.items()]
    return Section("Patients", words, [Table(["", "value"], rows, text=["", "value"])])
