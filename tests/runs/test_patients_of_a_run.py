"""patients.csv of a run, and what is said of novelty, calls and patients on its page."""

import pandas as pd
import pytest
from synthetic import pri

from gpmil.runs import operating, patients
from gpmil.runs.contents import RunContents
from gpmil.runs.workspace import Workspace


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
    table = pd.read_csv(tmp_path / patients.PATIENTS, dtype={"patient": str})
    whole = model.predict_patients(cohort)
    assert table["patient"].tolist() == whole.patients.tolist()
    assert table["probability"].to_numpy() == pytest.approx(whole.proba[:, 1], rel=1e-6)
    run = RunContents(tmp_path, {}, pd.DataFrame(), model, {})
    section = patients.section(run)
    assert "patients.csv" in section.paragraphs[0]
    assert dict(section.tables[0].rows)["patients"] == "15"


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
