"""`gpmil evaluate`: the predictions of a run against labels, with intervals."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from gpmil import run_files, run_report, runs
from gpmil.bag_checks import listed
from gpmil.cli.options import patient_column, print_line, show_metrics
from gpmil.io import tables
from gpmil.io.labels import SLIDE_NAMES, join, key
from gpmil.report import CARD
from gpmil.run_labels import LABELS, overlaid, rows


@dataclass(frozen=True)
class Truth:
    """Where the labels are; without a table those of the run itself are taken."""

    labels: Path | None = None
    slide: str | None = None
    label: str | None = None
    positive: str | None = None
    patient: str | None = None
    patch_labels: Path | None = None


def run(folder: Path, truth: Truth, out: Path | None = None) -> None:
    """Write metrics.json, labels and page into the run (or metrics to `out`), and print them."""
    config = runs.read_config(folder)
    own = runs.read_predictions(folder)
    predictions = _labelled(own, truth, folder)
    if not predictions["label"].notna().any():
        raise ValueError(
            f"{folder}: its predictions have no labels: name a table with a row a slide with "
            "--labels."
        )
    patch_labels = None if truth.patch_labels is None else _patch_labels(truth.patch_labels)
    noted = {"note": config["note"]} if "note" in config else {}
    judged = runs.judge(folder, predictions, patch_labels)
    found = _facts_of_fit(folder) | noted | judged
    if out is not None:
        runs.write_whole(out, runs.json_bytes(found))
    else:
        given = predictions is not own
        run_report.write(folder, predictions, found, patch_labels, given)
        _keep_labels(folder, predictions if given else None)
        runs.write_whole(folder / runs.METRICS, runs.json_bytes(found))
        files = {*config.get("files", []), runs.METRICS, run_report.REPORT} - {LABELS}
        files |= {LABELS} if given else set()
        runs.write_whole(folder / CARD, runs.json_bytes(config | {"files": sorted(files)}))
    show_metrics(found)
    print_line(f"Written to {out or folder / runs.METRICS}.")


def _labelled(own: pd.DataFrame, truth: Truth, folder: Path) -> pd.DataFrame:
    """With the labels given now; else those of the run, else those it was given before."""
    if truth.labels is not None:
        return _relabelled(own, truth)
    return own if own["label"].notna().any() else overlaid(own, folder)


def _keep_labels(folder: Path, predictions: pd.DataFrame | None) -> None:
    """labels.csv, for the page and the viewer; away with it where the run's own labels count."""
    if predictions is None:
        (folder / LABELS).unlink(missing_ok=True)
    else:
        runs.write_whole(folder / LABELS, runs.csv_bytes(rows(predictions)))


def _facts_of_fit(folder: Path) -> dict[str, Any]:
    """What metrics.json of gpmil fit says of the fit itself, to be kept."""
    before = run_files.read_metrics(folder / runs.METRICS)
    return {"training": before["training"]} if "training" in before else {}


def _relabelled(predictions: pd.DataFrame, truth: Truth) -> pd.DataFrame:
    """The predictions with the labels (and patients) of a table; slides without are not judged."""
    assert truth.labels is not None
    slides = predictions["slide"].tolist()
    patient = patient_column(truth.patient)
    joined = join(slides, truth.labels, truth.slide, truth.label, patient, truth.positive)
    labels = [_zero_one(value, joined.positive) for value in joined.labels]
    patients = predictions["patient"] if joined.groups is None else joined.groups
    if patient is False:
        patients = ""
    missing = len(set(joined.slides_without_label))
    if missing:
        print_line(f"{missing} slides without a label are not judged.")
    return predictions.assign(label=labels, patient=patients)


def _zero_one(value: Any, positive: str | None) -> float:
    if value is None or value == -1:
        return np.nan
    return float(value) if positive is None else float(value == positive)


def _patch_labels(path: Path) -> Callable[[str, pd.DataFrame], np.ndarray]:
    """A function that finds the labels of a slide's patches in a table slide, x, y, label."""
    frame = tables.read_frame(path, rows="patch")
    header = list(frame)
    slide = tables.like(SLIDE_NAMES, header)
    label = tables.like((*tables.GUESSES["instance_label"], "label"), header)
    axes = [axis for axis in "xyz" if axis in header]
    if slide is None or label is None or not axes:
        raise ValueError(
            f"{path}: expected the columns slide, x, y and label, found {listed(header)}."
        )
    values = pd.to_numeric(frame[label], errors="coerce")
    if not values.dropna().isin([-1, 0, 1]).all() or (values.isna() & frame[label].notna()).any():
        raise ValueError(f"{path}: column {label!r}: expected 0, 1 or -1, empty where unknown.")
    frame = frame.assign(truth=values.where(values >= 0), key=frame[slide].astype(str).map(key))
    if frame.duplicated(["key", *axes]).any():
        raise ValueError(f"{path}: some patches are in several rows: keep one row a patch.")
    known = dict(iter(frame.groupby("key")))

    def labels(name: str, patches: pd.DataFrame) -> np.ndarray:
        own = known.get(key(name))
        if own is None or not set(axes) <= set(patches):
            return np.full(len(patches), np.nan)
        return patches[axes].merge(own[[*axes, "truth"]], on=axes, how="left")["truth"].to_numpy()

    return labels
