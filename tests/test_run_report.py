"""report.html says what the files of the run say."""

import json

import numpy as np
import pandas as pd
import pytest
from synthetic import pri
from typer.testing import CliRunner

import gpmil
from gpmil import run_report, runs
from gpmil.cli import app


@pytest.fixture(scope="module")
def table(tmp_path_factory):
    """A cohort as a plain table, with patch labels, patients and positions."""
    bags = gpmil.simulate.cohort(16, 9, n_features=12, seed=2)
    frame = pd.DataFrame(bags.features, columns=[f"f{k}" for k in range(12)])
    frame["slide"] = bags.names[bags.bag_index]
    frame["patient"] = bags.groups[bags.bag_index]
    frame["label"] = bags.labels[bags.bag_index]
    frame["patch_label"] = bags.instance_labels
    frame[["x", "y"]] = bags.coords
    path = tmp_path_factory.mktemp("data") / "slides.csv"
    frame.to_csv(path, index=False)
    return path


SETTINGS = {"variance": 9, "lengthscale": 6, "mean": -3, "coupling": 1, "n-inducing": 20}


@pytest.fixture(scope="module")
def cv(table, tmp_path_factory):
    out = tmp_path_factory.mktemp("runs") / "cv"
    line = ["cv", str(table), "--out", str(out), "--folds", "2", "--interval-patches", "0"]
    settings = [word for name, v in SETTINGS.items() for word in (f"--{name}", str(v))]
    result = CliRunner().invoke(app, [*line, *settings])
    assert result.exit_code == 0, result.output
    return out


def test_the_page_of_a_cross_validation(cv):
    html = (cv / "report.html").read_text(encoding="utf-8")
    for words in ("What was read", "How good it is", "ROC", "Reliability", "Slides", "Versions"):
        assert words in html
    assert "has not seen it" in html
    assert 'src="http' not in html
    slides = runs.read_predictions(cv)
    assert all(name in html for name in slides["slide"])


def test_the_numbers_are_those_of_the_files(cv):
    html = (cv / "report.html").read_text(encoding="utf-8")
    slides = runs.read_predictions(cv)
    called = slides["log_odds"] > 0
    wrong = int((called != (slides["label"] == 1)).sum())
    assert f"{wrong} of them are called wrongly" in html
    found = json.loads((cv / "metrics.json").read_text())["slides"]["metrics"]["auc"]
    assert f"{found['value']:.3f} ({found['low']:.2f} to {found['high']:.2f})" in html


def test_the_same_folder_gives_the_same_page(cv):
    before = (cv / "report.html").read_bytes()
    run_report.write(cv)
    assert (cv / "report.html").read_bytes() == before


def test_the_least_certain_slide_comes_first(cv):
    run = run_report.Run.read(cv)
    section = run_report._slides(run)
    p = [float(row[-2]) for row in section.tables[0].rows]
    distance = np.abs(np.log(np.array(p) / (1 - np.array(p))))
    assert (np.diff(distance) > -0.02).all()  # three digits are shown


def test_a_run_without_predictions_has_a_page(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"command": "fit", "versions": {"a": "1"}}))
    bags = gpmil.simulate.cohort(8, n_features=12, seed=1)
    pri(n_inducing=10, random_state=0).fit(bags).save(tmp_path / "model")
    run_report.write(tmp_path)
    html = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert "nothing was predicted" in html
    assert "n_inducing" in html


def test_slides_without_labels_have_no_quality(cv, tmp_path):
    frame = pd.read_csv(cv / "predictions.csv").assign(label="")
    frame.to_csv(tmp_path / "predictions.csv", index=False)
    (tmp_path / "config.json").write_text(json.dumps({"command": "predict", "versions": {}}))
    run_report.write(tmp_path)
    html = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert "How good it is" not in html and "Worst errors" not in html
    assert "least certain first" in html
