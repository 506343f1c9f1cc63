"""patients.csv of a run, read and checked, with the labels that its slides have now."""

import math
from pathlib import Path

import pandas as pd

from gpmil.files.foreign import BadFile
from gpmil.runs.files import FARTHEST, SLIDE_COLUMNS, Range, read_table, with_numbers

PATIENTS = "patients.csv"  # where any patient has several slides
COLUMNS = {
    "slides": Range(1, FARTHEST, missing=False),
    **{name: SLIDE_COLUMNS[name] for name in ("probability", "log_odds", "call", "label")},
}
KEYS = ("patient", "repeat", "fold")


def read_patients(folder: Path) -> pd.DataFrame | None:
    """One row per patient (and repeat); None where no patient has several slides."""
    file = folder / PATIENTS
    if not file.is_file():
        return None
    frame = read_table(file, "a whole table of patients", ["patient", "slides", "probability"])
    frame = with_numbers(frame, COLUMNS, file)
    twice = frame[frame.duplicated([name for name in KEYS if name in frame])]["patient"]
    if len(twice):
        raise BadFile(
            f"{file}: patient {twice.iloc[0]!r:.60} is in several rows: keep one row per patient."
        )
    if (frame["patient"] == "").any():
        raise BadFile(f"{file}: a row names no patient. Changed by hand?")
    for name in ("log_odds", "call", "label"):
        frame[name] = frame.get(name, math.nan)
    return frame


def with_labels_of_slides(patients: pd.DataFrame, slides: pd.DataFrame) -> pd.DataFrame:
    """A patient is positive where any slide is, negative where all are known to be.

    Nothing is known where the slides of a patient are others now than were predicted together.

    >>> slides = pd.DataFrame({"patient": list("aabbc"), "label": [0, 1, 0, math.nan, 0]})
    >>> patients = pd.DataFrame({"patient": list("abcd"), "slides": [2, 2, 2, 1]})
    >>> with_labels_of_slides(patients, slides)["label"].tolist()
    [1.0, nan, nan, nan]
    """
    keys = [k for k in KEYS if k in patients and k in slides]
    own = slides.groupby(keys)["label"].agg(["size", "count", "max"])
    own = own.reindex(patients.set_index(keys).index)
    told = (own["max"] == 1) | (own["count"] == own["size"])
    same = (own["size"] == patients["slides"].to_numpy()).to_numpy()
    return patients.assign(label=own["max"].where(told & same).to_numpy(dtype=float))
