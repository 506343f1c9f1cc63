"""Grades from the command line to the files."""

import json

import numpy as np
import pandas as pd
import pytest
from command_line import invoke, ran, write_table
from sklearn.metrics import cohen_kappa_score

import gpmil
from gpmil.runs.page import write as write_page

GIVEN = ["--variance", "2.3", "--lengthscale", "1.9", "--mean", "-1.7", "--coupling", "0.6"]
GIVEN += ["--n-inducing", "12", "--interval-patches", "0"]
ORDINAL = ["--task", "ordinal", "--grades", "benign,3,4"]
NOMINAL = ["--task", "nominal", "--classes", "benign,3,4"]


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    place = tmp_path_factory.mktemp("cli-grades")
    data = write_table(place / "own.csv")
    words = ["benign", "3", "Benign", "4"] * 5
    table = pd.DataFrame({"slide": [f"s{b:02d}" for b in range(18)], "label": words[:18]})
    table.to_csv(place / "labels.csv", index=False)
    source = [data, "--labels", place / "labels.csv", *GIVEN]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("gpmil.cli.fit.write_report", lambda folder: None)
        patch.setattr("gpmil.cli.predict.write_report", lambda folder: None)
        patch.setattr("gpmil.cli.cv.write_report", lambda folder: None)
        ran("fit", *source, "--out", place / "fit", *ORDINAL, "--cut-points", "0,1.5")
        ran("predict", place / "fit", data, "--out", place / "new", "--interval-patches", "0")
        ran("cv", *source, "--out", place / "types", "--folds", "2", *NOMINAL)
    held_out = ["--out", place / "cv", "--folds", "2", "--cut-points", "0,1.5"]
    ran("cv", *source, *held_out, *ORDINAL)
    return place


def test_every_slide_has_a_probability_per_grade(place):
    table = pd.read_csv(place / "fit" / "grades.csv", dtype={"call": str, "grade": str})
    model, bags = gpmil.load(place / "fit" / "model"), gpmil.read(place / "own.csv")
    assert model.classes_.tolist() == ["benign", "3", "4"]
    p = model.predict_proba(bags)
    np.testing.assert_allclose(table[["P(benign)", "P(3)", "P(4)"]], p, rtol=1e-6)
    assert table["call"].tolist() == model.predict(bags).tolist()
    assert table["grade"].str.lower().tolist() == (["benign", "3", "benign", "4"] * 5)[:18]
    # the probability of a run is that of any grade above the lowest
    run = pd.read_csv(place / "fit" / "predictions.csv")
    np.testing.assert_allclose(run["probability"], p[:, 1:].sum(1), rtol=1e-6)
    new = pd.read_csv(place / "new" / "grades.csv")
    np.testing.assert_allclose(new["P(4)"], p[:, 2], rtol=1e-6)
    patches = pd.read_csv(next((place / "new" / "patches").iterdir()))
    assert {"P(benign)", "P(3)", "P(4)", "expected_grade"} <= set(patches)


def test_areas_patterns_and_isup_are_beside_them(place):
    table = pd.read_csv(place / "fit" / "grades.csv", dtype=str)
    shares = table[["share(benign)", "share(3)", "share(4)"]].astype(float)
    np.testing.assert_allclose(shares.sum(axis=1), 1, atol=1e-5)
    rule = {("benign", "benign"): "0", ("3", "3"): "1", ("3", "4"): "2", ("4", "3"): "3"}
    for _, row in table.iterrows():
        assert row["isup"] == rule.get((row["first"], row["second"]), "4")


def test_slides_held_out_have_grades_that_are_judged(place):
    table = pd.read_csv(place / "cv" / "grades.csv", dtype={"call": str, "grade": str})
    assert len(table) == 18 and set(table["fold"]) == {0, 1}
    run = pd.read_csv(place / "cv" / "predictions.csv").set_index("slide")
    above = table[["P(3)", "P(4)"]].sum(axis=1).to_numpy()
    np.testing.assert_allclose(run.loc[table["slide"], "probability"], above, rtol=1e-5)
    names = ["benign", "3", "4"]
    y, said = ([names.index(g) for g in table[name]] for name in ("grade", "call"))
    expected = cohen_kappa_score(y, said, weights="quadratic")
    found = json.loads((place / "cv" / "metrics.json").read_text())["grades"]["metrics"]
    assert found["kappa"]["value"] == pytest.approx(expected, abs=1e-6)
    page = (place / "cv" / "report.html").read_text()
    assert "quadratic weighted kappa" in page and "called benign" in page


def test_grades_that_are_told_later_are_judged(place):
    """By evaluate, and by predict: the same words, the same metrics as at once."""
    said = ran("evaluate", place / "new", "--labels", place / "labels.csv")
    assert "grades kappa" in said
    told = pd.read_csv(place / "new" / "grades.csv", dtype=str)
    assert told["grade"].tolist() == (["benign", "3", "benign", "4"] * 5)[:18]
    later = json.loads((place / "new" / "metrics.json").read_text())["grades"]
    source = [place / "own.csv", "--labels", place / "labels.csv", "--interval-patches", "0"]
    ran("predict", place / "fit", *source, "--out", place / "told")
    at_once = json.loads((place / "told" / "metrics.json").read_text())
    # the labels of evaluate come without patients
    assert at_once["grades"]["metrics"]["kappa"]["value"] == later["metrics"]["kappa"]["value"]
    assert at_once["slides"]["positive"] == 9
    found = invoke("evaluate", place / "new", "--labels", place / "labels.csv", "--positive", "4")
    assert found.exit_code == 2 and "the model has 3: benign, 3, 4" in found.output


def test_types_have_a_table_and_metrics_of_their_own(place):
    table = pd.read_csv(place / "types" / "classes.csv", dtype={"call": str, "class": str})
    assert len(table) == 18 and not (place / "types" / "grades.csv").exists()
    p = table[["P(benign)", "P(3)", "P(4)"]].to_numpy()
    np.testing.assert_allclose(p.sum(1), 1, atol=1e-5)
    assert table["call"].tolist() == np.array(["benign", "3", "4"])[p.argmax(1)].tolist()
    found = json.loads((place / "types" / "metrics.json").read_text())["classes"]["metrics"]
    right = (table["call"] == table["class"]).mean()
    assert found["accuracy"]["value"] == pytest.approx(right)
    assert {"mean_recall", "auc_0", "auc_2", "calibration_error_1"} <= set(found)
    write_page(place / "types")
    page = (place / "types" / "report.html").read_text()
    assert "AUC of 3 against the rest" in page and "true class" in page


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--task", "ordinal"], "grades have an order, which nobody said: --grades"),
        ([*ORDINAL, "--positive", "4"], "--positive and --negative are for two classes"),
        (["--task", "ordinal", "--grades", "benign,3"], "'4' (4) are not among --grades benign,3"),
        (["--task", "ordinal", "--model", "VGPMIL"], "--task ordinal is for OrdinalMIL"),
        (["--task", "nominal"], "types have names, which nobody said: --classes"),
        (
            ["--task", "nominal", "--classes", "3,4"],
            "the labels 'benign' (5), 'Benign' (4) are not",
        ),
        (["--task", "ordinal", "--grades", "benign"], "grades must be a list of names"),
        (["--task", "ordinal", "--grades", "1,2,3,4,5,6,7,8,9"], "expected 2 to 8, got 9"),
        (["--task", "ranked"], "--task must be one of binary, ordinal, nominal"),
    ],
)
def test_what_is_wrong_is_said(place, options, words):
    source = [place / "own.csv", "--labels", place / "labels.csv", *GIVEN]
    found = invoke("fit", *source, "--out", place / "no", *options)
    assert found.exit_code == 2 and not (place / "no").exists()
    assert words in " ".join(found.output.split())


def test_grades_need_a_table_of_labels(place):
    found = invoke("fit", place / "own.csv", *GIVEN, "--out", place / "no", *ORDINAL)
    assert found.exit_code == 2 and not (place / "no").exists()
