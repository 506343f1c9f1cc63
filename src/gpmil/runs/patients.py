"""Patients of a run that have several slides: patients.csv, and its part of the page."""

import numpy as np
import pandas as pd

from gpmil.data.bags import Bags
from gpmil.models import BagClassifier
from gpmil.models.with_patients import PatientGP
from gpmil.runs import operating
from gpmil.runs.contents import RunContents
from gpmil.runs.judge import estimate_of
from gpmil.runs.naming import called, shown
from gpmil.runs.patient_table import PATIENTS, read_patients, with_labels_of_slides
from gpmil.runs.workspace import Workspace, csv_bytes
from gpmil.show.report import Section, Table

MOST = 20_000  # patches of a patient: slides of more are predicted one by one alone
LISTED = 100  # rows on the page
SHOWN = {"accuracy": "accuracy", "auc": "AUC", "log_loss": "log loss"}
WHAT = (
    "A patient is positive where any slide is. All slides of a patient are taken together, as "
    "they share what the model has learned, and a patient is called as a slide of this probability "
    f"would be; {PATIENTS} has every patient."
)


def asks_for_patients(model: BagClassifier, bags: Bags) -> bool:
    """Whether any patient has several slides, and the model can take them together."""
    if bags.groups is None or not isinstance(model, PatientGP):
        return False
    number = np.unique(bags.groups, return_inverse=True)[1]
    return bool(np.bincount(number).max() > 1 and np.bincount(number, bags.sizes).max() <= MOST)


def patient_rows(model: BagClassifier, bags: Bags) -> pd.DataFrame:
    """Rows of patients.csv: P(patient positive), that of any slide being so, jointly.

    The call is that of a slide with this probability: a patient of one slide is called as it is,
    and one with a slide that is called positive is positive.
    """
    assert isinstance(model, PatientGP) and bags.groups is not None
    names, number = np.unique(bags.groups, return_inverse=True)
    rows = [
        model.predict_patients(bags[number == p].in_memory()).to_frame() for p in range(len(names))
    ]
    table = pd.concat(rows, ignore_index=True)
    called = table["probability"] > getattr(model, "threshold_", 0.5)
    table.insert(4, "call", called.astype(int))
    return table.assign(label=table["label"].replace(-1, ""))


def write_patients(space: Workspace, model: BagClassifier, bags: Bags) -> None:
    """patients.csv, where any patient has several slides."""
    if asks_for_patients(model, bags):
        space.write(PATIENTS, csv_bytes(patient_rows(model, bags)))


# --- On the page ----------------------------------------------------------------------------------
def section(run: RunContents) -> Section | None:
    """Patients on the page, where any has several slides."""
    table = read_patients(run.folder)
    if table is None:
        return None
    table = with_labels_of_slides(table, run.slides)
    known = table.dropna(subset="label")
    tables = [_judged(run, known), _listed(table, run.words)]
    words = [WHAT, f"{table['patient'].nunique():,} patients, the least certain first."]
    if len(table) > LISTED:
        words.append(f"{len(table) - LISTED:,} more rows are in {PATIENTS}.")
    return Section("Patients", words, [one for one in tables if one is not None])


def _judged(run: RunContents, known: pd.DataFrame) -> Table | None:
    """Metrics and rates as metrics.json has them."""
    found = run.judged().get("patients")
    if found is None:
        return None
    of = {name: found["metrics"][key] for key, name in SHOWN.items() if key in found["metrics"]}
    rows = [[name, str(estimate_of(card))] for name, card in of.items()]
    unit = "patients" if known["patient"].is_unique else "predictions"  # of several repeats
    rows += map(list, operating.texts(found.get("operating", {}), unit).items())
    n, positive = (rows["patient"].nunique() for rows in (known, known[known["label"] == 1]))
    caption = f"{n:,} patients whose label is known, {positive:,} of them {run.words[1]}."
    return Table(["", "value, with 95 % interval"], rows, caption, text=[""])


def _listed(table: pd.DataFrame, words: tuple[str, str]) -> Table:
    order = table["log_odds"].abs().sort_values(kind="stable").index
    repeat = ["repeat"] if table.get("repeat", pd.Series(dtype=str)).nunique() > 1 else []
    text = ["patient", *repeat, "called", "label"]
    rows = [
        [
            row["patient"],
            *(row[name] for name in repeat),
            called(row, words).removeprefix("called "),
            "" if pd.isna(row["label"]) else words[int(row["label"])],
            f"{row['slides']:.0f}",
            shown(row["probability"]),
        ]
        for _, row in table.loc[order].head(LISTED).iterrows()
    ]
    return Table([*text, "slides", "probability"], rows, text=text)
