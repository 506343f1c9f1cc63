"""patients.csv of a run, and what is said of novelty, calls and patients on its page."""

import numpy as np
import pandas as pd
import pytest
from synthetic import pri

from gpmil.runs import operating, patients
from gpmil.runs.contents import RunContents
from gpmil.runs.files import read_predictions
from gpmil.runs.judge import judge_run
from gpmil.runs.patient_table import PATIENTS, read_patients, with_labels_of_slides
from gpmil.runs.predict import PredictionOptions, predict
from gpmil.runs.workspace import Workspace, csv_bytes


class Folder(Workspace):
    """Of a workspace what is needed to write."""

    def __init__(self, place):
        self.place = place

    def write(self, name, data):
        (self.place / name).write_bytes(data)


@pytest.fixture(scope="module")
def model(cohort):
    return pri(n_inducing=12, aim="specificity=0.8", random_state=2).fit(cohort)


def test_patients_of_several_slides(model, cohort, tmp_path):
    patients.write_patients(Folder(tmp_path), model, cohort)
    table = pd.read_csv(tmp_path / PATIENTS, dtype={"patient": str})
    whole = model.predict_patients(cohort)
    assert table["patient"].tolist() == whole.patients.tolist()
    assert table["probability"].to_numpy() == pytest.approx(whole.proba[:, 1], rel=1e-6)
    assert table["call"].tolist() == (whole.proba[:, 1] > model.threshold_).astype(int).tolist()
    assert set(table["call"]) == {0, 1}  # and a patient of a slide called positive is positive
    rows, _ = predict(model, cohort, PredictionOptions(interval_patches=0), None)
    (tmp_path / "predictions.csv").write_bytes(csv_bytes(rows))
    slides = read_predictions(tmp_path)
    call = slides.groupby("patient")["call"].max()
    assert (table["call"].to_numpy() >= call.loc[table["patient"]].to_numpy()).all()

    found = judge_run(tmp_path, slides)["patients"]
    assert found["patients"] == 15 and found["positive"] == (whole.labels == 1).sum()
    right = np.mean((whole.proba[:, 1] > model.threshold_) == whole.labels)
    assert found["metrics"]["accuracy"]["value"] == pytest.approx(right)
    section = patients.section(RunContents(tmp_path, {}, slides, model, {"patients": found}))
    assert "patients.csv" in section.paragraphs[0]
    judged, listed = section.tables
    assert "15 patients" in judged.caption and judged.rows[-1][1].endswith("patients")
    assert [row[0] for row in listed.rows] == _least_certain(table) and len(listed.rows) == 15


def _least_certain(table) -> list[str]:
    return table.sort_values("log_odds", key=abs, kind="stable")["patient"].tolist()


@pytest.fixture(scope="module")
def written(model, cohort, tmp_path_factory) -> bytes:
    """patients.csv."""
    place = tmp_path_factory.mktemp("patients")
    patients.write_patients(Folder(place), model, cohort)
    return (place / PATIENTS).read_bytes()


def test_patients_that_are_others_now_are_not_judged(written, cohort, tmp_path):
    """gpmil evaluate may be given other labels, and other patients."""
    (tmp_path / PATIENTS).write_bytes(written)
    slides = pd.DataFrame({"slide": cohort.names, "patient": cohort.groups, "label": 0.0})
    slides["probability"], slides["log_odds"], slides["decision"] = 0.5, 0.1, ""
    table = read_patients(tmp_path)
    assert (with_labels_of_slides(table, slides)["label"] == 0).all()
    one = slides["patient"] == "patient4"
    assert one.sum() == 2
    slides.loc[one.idxmax(), ["patient", "label"]] = "patient5", 1.0
    label = with_labels_of_slides(table, slides).set_index("patient")["label"]
    assert label[label.isna()].index.tolist() == ["patient4", "patient5"]
    slides.loc[~one, "patient"], slides["label"] = "", np.nan
    assert "patients" not in judge_run(tmp_path, slides)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda t: t.assign(probability=1.5), "numbers from 0 to 1 in column 'probability'"),
        (lambda t: t.assign(slides=0), "numbers from 1"),
        (lambda t: pd.concat([t, t[2:3]]), "patient 'patient10' is in several rows"),
        (lambda t: t.assign(patient=""), "is in several rows"),
        (lambda t: t.drop(columns="slides"), "no column 'slides'"),
    ],
)
def test_a_table_of_patients_changed_by_hand(written, tmp_path, change, words):
    (tmp_path / PATIENTS).write_bytes(written)
    table = pd.read_csv(tmp_path / PATIENTS, dtype=str)
    (tmp_path / PATIENTS).write_bytes(csv_bytes(change(table)))
    with pytest.raises(ValueError, match=words):
        read_patients(tmp_path)


def test_single_slides_need_no_table(model, plain, tmp_path):
    patients.write_patients(Folder(tmp_path), model, plain)
    assert not list(tmp_path.iterdir())


def test_sections_of_the_page(model, tmp_path):
    rate = dict(zip(("value", "low", "high", "slides"), (0.9, 0.7, 0.98, 11.0)))
    metrics = {"slides": {"operating": {"sensitivity": rate}}}
    config = {"command": "predict", "model": {"settings": {"aim": "specificity=0.8"}}}
    run = RunContents(tmp_path, config, pd.DataFrame(), model, metrics)
    section = operating.section(run)
    assert "specificity=0.8" in section.paragraphs[0]
    (table,) = section.tables
    assert len(table.columns) == 3 and table.rows[0][2] == "0.900 (0.700 to 0.980), 11 slides"
    assert patients.section(run) is None
