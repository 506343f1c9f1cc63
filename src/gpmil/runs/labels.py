"""labels.csv of a run: the labels and patients that `gpmil evaluate` was given for its slides.

    slide,label,patient
    s1,1,p1

predictions.csv keeps what the run itself has read; whoever shows or judges the run takes these in
place of those, as long as the file is there.
"""

from pathlib import Path

import pandas as pd

from gpmil.data.checks import listed
from gpmil.files.foreign import reading

LABELS = "labels.csv"
COLUMNS = ["slide", "label", "patient"]


def rows(predictions: pd.DataFrame) -> pd.DataFrame:
    """What is to be kept of predictions that were given other labels: one row per slide."""
    found = predictions[COLUMNS].drop_duplicates("slide")
    return found.assign(label=["" if pd.isna(y) else str(int(y)) for y in found["label"]])


def are_given(folder: Path) -> bool:
    """Whether a run has labels from `gpmil evaluate`."""
    return (folder / LABELS).is_file()


def overlaid(predictions: pd.DataFrame, folder: Path) -> pd.DataFrame:
    """The predictions of a run with the labels and patients that it was given, where it was."""
    if not are_given(folder):
        return predictions
    given = _read(folder / LABELS).reindex(predictions["slide"])
    label = pd.to_numeric(given["label"]).to_numpy(dtype=float)
    return predictions.assign(label=label, patient=given["patient"].fillna("").to_numpy())


def _read(file: Path) -> pd.DataFrame:
    """Labels and patients by slide."""
    with reading(file, "a table of labels"):
        frame = pd.read_csv(file, dtype=str, keep_default_na=False)  # a slide may be called NA
    if list(frame) != COLUMNS:
        raise ValueError(f"{file}: expected the columns {listed(COLUMNS)}, found {listed(frame)}.")
    wrong = frame[~frame["label"].isin(["0", "1", ""])]["label"]
    if len(wrong) or frame["slide"].duplicated().any():
        what = f"labels {listed(wrong)}" if len(wrong) else "slides in several rows"
        raise ValueError(
            f"{file}: {what}; expected 0, 1 or nothing, once per slide. Was it changed by hand? "
            "gpmil evaluate RUN --labels TABLE writes it anew."
        )
    return frame.set_index("slide")
