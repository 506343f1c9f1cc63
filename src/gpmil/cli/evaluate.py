"""`gpmil evaluate`: the predictions of a run against labels, with intervals."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from gpmil.cli.grades import two_sides, written
from gpmil.cli.options import LabelTable, in_options
from gpmil.cli.terminal import print_line, show_metrics
from gpmil.data import classes
from gpmil.data.checks import all_columns
from gpmil.files.whole import json_bytes, write_whole
from gpmil.io import tables
from gpmil.io.labels import SLIDE_NAMES, join, key
from gpmil.io.table_files import read_frame
from gpmil.runs import page
from gpmil.runs.class_table import ClassTable
from gpmil.runs.files import (
    CARD,
    LABELS,
    METRICS,
    label_rows,
    read_config,
    read_metrics,
    read_predictions,
    with_given_labels,
)
from gpmil.runs.judge import judge_run
from gpmil.runs.workspace import csv_bytes


def run(
    folder: Path, table: LabelTable, patch_table: Path | None = None, out: Path | None = None
) -> None:
    """Write metrics.json, labels and page into the run (or metrics to `out`), and print them.

    Without a table the labels of the run itself are taken.
    """
    config = read_config(folder)
    own = read_predictions(folder)
    graded = ClassTable.read(folder)
    if graded is not None and table.labels is not None:
        table = two_sides(table, graded.names, "the classes of the model,")
        slides = graded.rows["slide"].tolist()
        graded = graded.told(dict(zip(slides, written(table, slides))))
    predictions = _labelled(own, table, folder, classes_of(config))
    if not predictions["label"].notna().any():
        raise ValueError(
            f"{folder}: its predictions have no labels: name a table with one row per slide with "
            "--labels."
        )
    patch_labels = None if patch_table is None else _patch_labels(patch_table)
    noted = {"note": config["note"]} if "note" in config else {}
    judged = judge_run(folder, predictions, patch_labels, graded)
    found = _facts_of_fit(folder) | noted | judged
    if out is not None:
        write_whole(out, json_bytes(found))
    else:
        given = predictions is not own
        if graded is not None:
            write_whole(folder / graded.file, csv_bytes(graded.rows))
        page.write(folder, predictions, found, patch_labels, given)
        _keep_labels(folder, predictions if given else None)
        write_whole(folder / METRICS, json_bytes(found))
        files = {*config.get("files", []), METRICS, page.REPORT} - {LABELS}
        files |= {LABELS} if given else set()
        write_whole(folder / CARD, json_bytes(config | {"files": sorted(files)}))
    show_metrics(found)
    print_line(f"Written to {out or folder / METRICS}.")


def _labelled(
    own: pd.DataFrame, table: LabelTable, folder: Path, known: Mapping[str, Any]
) -> pd.DataFrame:
    """With the labels given now; else those of the run, else those it was given before."""
    if table.labels is not None:
        return _relabelled(own, table, known)
    return own if own["label"].notna().any() else with_given_labels(own, folder)


def _keep_labels(folder: Path, predictions: pd.DataFrame | None) -> None:
    """labels.csv, for the page and the viewer; away with it where the run's own labels count."""
    if predictions is None:
        (folder / LABELS).unlink(missing_ok=True)
    else:
        write_whole(folder / LABELS, csv_bytes(label_rows(predictions)))


def _facts_of_fit(folder: Path) -> dict[str, Any]:
    """What metrics.json of gpmil fit says of the fit itself, to be kept."""
    before = read_metrics(folder / METRICS)
    return {"training": before["training"]} if "training" in before else {}


def classes_of(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Classes that the model of a run was fitted to, {name: [count, role]}; empty if not known."""
    options = config.get("options", {})
    if isinstance(options.get("model"), str):
        # What was predicted may have other classes, or none: the run of the model knows.
        known = config.get("model", {}).get("classes")
        fitted = Path(options["model"])
        if known is None and (fitted / CARD).is_file():
            known = classes_of(read_config(fitted))
        return known or {}
    known = config.get("data", {}).get("classes")
    positive = options.get("source", {}).get("positive")
    # Runs of earlier versions noted what was asked for only.
    return known or ({} if positive is None else {str(positive): [0, classes.POSITIVE]})


def _relabelled(
    predictions: pd.DataFrame, table: LabelTable, known: Mapping[str, Any]
) -> pd.DataFrame:
    """The predictions with the labels (and patients) of a table; slides without are not judged."""
    place, slides = pd.factorize(predictions["slide"])  # several rows per slide with repeats
    arguments = table.arguments()
    joined = join(slides.tolist(), **arguments)
    labels = joined.labels
    note = classes.refuse_other_classes(known, labels.classes, "the model")
    print_line(f"classes: {classes.described(labels.classes)}")
    for line in filter(None, (note, *labels.notes, classes.of_one_class(labels.classes))):
        print_line(in_options(line))
    if joined.slides_without_label:
        print_line(f"{len(joined.slides_without_label)} slides without a label are not judged.")
    patients = predictions["patient"] if arguments["patient"] is not False else ""
    if joined.groups is not None:
        patients = np.array(joined.groups, dtype=object)[place]
    codes = np.where(labels.values < 0, np.nan, labels.values)
    return predictions.assign(label=codes[place], patient=patients)


def _patch_labels(path: Path) -> Callable[[str, pd.DataFrame], np.ndarray]:
    """A function that finds the labels of a slide's patches in a table slide, x, y, label."""
    frame = read_frame(path, rows="patch")
    header = list(frame)
    slide = tables.like(SLIDE_NAMES, header)
    label = tables.like((*tables.GUESSES["instance_label"], "label"), header)
    axes = [axis for axis in "xyz" if axis in header]
    if slide is None or label is None or not axes:
        raise ValueError(
            f"{path}: expected the columns slide, x, y and label, found {all_columns(header)}."
        )
    values = pd.to_numeric(frame[label], errors="coerce")
    if not values.dropna().isin([-1, 0, 1]).all() or (values.isna() & frame[label].notna()).any():
        raise ValueError(f"{path}: column {label!r}: expected 0, 1 or -1, empty where unknown.")
    frame = frame.assign(truth=values.where(values >= 0), key=frame[slide].astype(str).map(key))
    if frame.duplicated(["key", *axes]).any():
        raise ValueError(f"{path}: some patches are in several rows: keep one row per patch.")
    known = dict(iter(frame.groupby("key")))

    def labels(name: str, patches: pd.DataFrame) -> np.ndarray:
        own = known.get(key(name))
        if own is None or not set(axes) <= set(patches):
            return np.full(len(patches), np.nan)
        return patches[axes].merge(own[[*axes, "truth"]], on=axes, how="left")["truth"].to_numpy()

    return labels
