"""report.html says what the files of the run say."""

import json
import re
import shutil

import numpy as np
import pandas as pd
import pytest
from synthetic import pri
from typer.testing import CliRunner

import gpmil
from gpmil.cli import app, predict
from gpmil.runs import judge, naming
from gpmil.runs import page as run_report
from gpmil.runs.contents import RunContents
from gpmil.runs.files import patch_file, read_patches, read_predictions
from gpmil.runs.judge import estimate_of
from gpmil.runs.workspace import csv_bytes


@pytest.fixture(autouse=True, scope="module")
def _quick():
    """Few resamples and few maps: what takes long."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(judge, "RESAMPLES", 20)
        patch.setattr(run_report, "SHOWN_ERRORS", 2)
        patch.setattr(run_report, "SHOWN_UNCERTAIN", 1)
        yield


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
    slides = read_predictions(cv)
    assert all(name in html for name in slides["slide"])


def test_the_numbers_are_those_of_the_files(cv):
    html = (cv / "report.html").read_text(encoding="utf-8")
    slides = read_predictions(cv)
    called = slides["log_odds"] > 0
    wrong = int((called != (slides["label"] == 1)).sum())
    assert f"{wrong} of them are called wrongly" in html
    found = json.loads((cv / "metrics.json").read_text())
    for what in ("slides", "patches"):
        assert str(estimate_of(found[what]["metrics"]["auc"])) in html


def test_the_same_folder_gives_the_same_page(cv):
    before = (cv / "report.html").read_bytes()
    run_report.write(cv)
    assert (cv / "report.html").read_bytes() == before


def test_the_least_certain_slide_comes_first(cv):
    run = RunContents.read(cv)
    section = run_report._slides(run)
    p = [float(row[-2].strip("<> ")) for row in section.tables[0].rows]
    distance = np.abs(np.log(np.array(p) / (1 - np.array(p))))
    assert (np.diff(distance) > -0.02).all()  # three digits are shown


def test_a_run_without_predictions_has_a_page(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"command": "fit", "versions": {"a": "1"}}))
    bags = gpmil.simulate.cohort(8, n_features=12, seed=1)
    pri(n_inducing=10, slide_effect=0.8, random_state=0).fit(bags).save(tmp_path / "model")
    run_report.write(tmp_path)
    html = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert "nothing was predicted" in html
    assert "n_inducing" in html
    assert re.search(r"slide_effect</td>\s*<td[^>]*>0.8</td>\s*<td[^>]*>0.8<", html)
    assert "what all patches of a slide share beyond their features" in html


def test_a_model_without_a_slide_effect_is_told_nothing_of_it(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"command": "fit", "versions": {}}))
    bags = gpmil.simulate.cohort(8, n_features=12, seed=1)
    gpmil.MeanPoolMIL(max_epochs=1, random_state=0).fit(bags).save(tmp_path / "model")
    run_report.write(tmp_path)
    assert "slide_effect" not in (tmp_path / "report.html").read_text(encoding="utf-8")


def test_slides_without_labels_have_no_quality(cv, tmp_path):
    frame = pd.read_csv(cv / "predictions.csv").assign(label="")
    frame.to_csv(tmp_path / "predictions.csv", index=False)
    (tmp_path / "config.json").write_text(json.dumps({"command": "predict", "versions": {}}))
    run_report.write(tmp_path)
    html = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert "How good it is" not in html and "Worst errors" not in html
    assert "least certain first" in html


def test_evidence_of_the_slide_is_shown_with_its_price(cv, tmp_path):
    frame = pd.read_csv(cv / "predictions.csv")
    frame = frame.assign(evidence_patches=frame["log_odds"] - 0.25, evidence_slide=0.25)
    frame.to_csv(tmp_path / "predictions.csv", index=False)
    (tmp_path / "config.json").write_text(json.dumps({"command": "predict", "versions": {}}))
    run_report.write(tmp_path)
    html = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert "evidence: slide" in html and "+0.25" in html and "stain or site" in html
    assert "stain or site" not in (cv / "report.html").read_text(encoding="utf-8")


def invoke(*words):
    result = CliRunner().invoke(app, [str(word) for word in words])
    assert result.exit_code == 0, result.output
    return result


def files(folder):
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


# --- Judged by other labels -----------------------------------------------------------------------
def test_evaluate_rewrites_the_page_with_the_metrics(cv, tmp_path):
    run, labels = tmp_path / "run", tmp_path / "labels.csv"
    shutil.copytree(cv, run)
    slides = read_predictions(cv)
    given = slides[["slide", "label"]].iloc[:13].copy()
    given.loc[given.index[::4], "label"] = 1 - given["label"]
    given.astype({"label": int}).to_csv(labels, index=False)
    before = files(run)
    invoke("evaluate", run, "--labels", labels)
    after = files(run)
    assert {name for name in after if after[name] != before.get(name)} == {
        "config.json",  # lists labels.csv
        "labels.csv",
        "metrics.json",
        "report.html",
    }
    html = after["report.html"].decode()
    found = json.loads(after["metrics.json"])
    for what in ("auc", "accuracy", "log_loss"):
        estimate = estimate_of(found["slides"]["metrics"][what])
        assert str(estimate) in html and str(estimate) not in before["report.html"].decode()
    called = slides["log_odds"].iloc[:13] > 0
    wrong = int((called != (given["label"] == 1)).sum())
    assert f"the label of 13 is known, and {wrong} of them are called wrongly" in html
    invoke("evaluate", run, "--labels", labels)
    assert files(run) == after
    run_report.write(run)  # reads labels.csv by itself
    assert files(run) == after
    invoke("evaluate", run)  # by its own labels again
    assert files(run) == before


def test_labels_given_later_reach_the_page(cv, tmp_path):
    """The page said "0 slides with a label" after gpmil evaluate."""
    run, labels = tmp_path / "run", tmp_path / "labels.csv"
    shutil.copytree(cv, run)
    own = read_predictions(cv)
    config = json.loads((run / "config.json").read_text())
    config["read"] = ["labels: 0 slides with a label, 14 without, 0 labels without a slide"]
    (run / "config.json").write_text(json.dumps(config))
    (run / "predictions.csv").write_bytes(csv_bytes(own.assign(label="")))
    known = own[["slide", "label"]].astype({"label": int})
    known.to_csv(labels, index=False)
    invoke("evaluate", run, "--labels", labels)
    html, first = (run / "report.html").read_text(), files(run)
    assert f"labels: {len(known)} slides with a label, 0 without, as given to gpmil" in html
    assert "0 slides with a label" not in html.replace(f"{len(known)} slides with", "")
    invoke("evaluate", run)  # it has none of its own: those given before
    assert files(run) == first
    known.assign(label=1 - known["label"]).to_csv(labels, index=False)
    invoke("evaluate", run, "--labels", labels)
    given = pd.read_csv(run / "labels.csv")
    assert given["label"].tolist() == [1 - y for y in known["label"]]


def test_labels_changed_by_hand_are_named(cv, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(cv, run)
    for text in ("slide,label,patient\na,2,\n", "slide,label,patient\na,1,\na,1,\n", "x\n"):
        (run / "labels.csv").write_text(text)
        with pytest.raises(ValueError, match=r"labels\.csv"):
            run_report.write(run)
    assert (run / "report.html").read_bytes() == (cv / "report.html").read_bytes()


def test_the_page_says_whether_patients_are_known(cv, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(cv, run)
    html = (cv / "report.html").read_text()
    assert "not seen it, nor its patient: slides of one patient stay together" in html
    assert "intervals by patient" in html and "No patient is known" not in html
    # where lesions are: patches whose label is known are judged by their place in the slide, too
    assert "AUC within slides" in html and "FROC (share found at 1/4 to 8 false ones" in html
    own = read_predictions(cv).assign(patient="")
    (run / "predictions.csv").write_bytes(csv_bytes(own))
    run_report.write(run)
    html = (run / "report.html").read_text()
    assert "by a model that has not seen it." in html and "nor its patient" not in html
    assert "No patient is known: every slide is taken as a patient of its own" in html
    assert "intervals by slide" in html and "intervals by patient" not in html


def test_evaluate_elsewhere_leaves_the_page(cv, tmp_path):
    before = files(cv)
    invoke("evaluate", cv, "--out", tmp_path / "other.json")
    assert files(cv) == before


def test_patch_labels_reach_the_maps(cv):
    """Outlines are of the labels that the metrics are of."""
    row = RunContents.read(cv).slides.iloc[0]
    ones = RunContents.read(cv, patch_labels=lambda slide, table: np.ones(len(table)))
    assert (run_report._truth(ones.patches(row)) == 1).all()
    assert not (run_report._truth(RunContents.read(cv).patches(row)) == 1).all()


def test_a_page_that_cannot_be_written_leaves_the_old_one(cv, tmp_path, monkeypatch):
    run = tmp_path / "run"
    shutil.copytree(cv, run)

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.replace", full)
    with pytest.raises(OSError, match="No space"):
        run_report.write(run)
    assert (run / "report.html").read_bytes() == (cv / "report.html").read_bytes()


# --- Several couplings, several repeats -----------------------------------------------------------
@pytest.fixture(scope="module")
def coupled(table, tmp_path_factory):
    place = tmp_path_factory.mktemp("coupled")
    settings = [word for name, v in SETTINGS.items() for word in (f"--{name}", str(v))]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("gpmil.cli.fit.write_report", lambda folder: None)
        invoke("fit", table, "--out", place / "fit", "--interval-patches", 0, *settings)
    few = ["--interval-patches", 0, "--coupling", "0,0.7,3"]
    invoke("predict", place / "fit", table, "--out", place / "run", *few)
    return place / "run"


def test_maps_of_every_coupling_stand_side_by_side(coupled):
    html = (coupled / "report.html").read_text(encoding="utf-8")
    maps = re.findall(r'alt="Heat maps of (\S+) with coupling 0, 0.7, 3"', html)
    assert len(maps) == len(set(maps)) >= run_report.SHOWN_UNCERTAIN
    slides = read_predictions(coupled)
    order = slides.loc[slides["log_odds"].abs().sort_values().index, "slide"].unique()
    assert maps == list(order[: run_report.SHOWN_UNCERTAIN])
    assert "no call" in html


def test_the_panels_are_the_tables_of_the_couplings(coupled, monkeypatch):
    drawn = []
    real = run_report.heatmaps.comparison

    def noted(slides, models, width):
        drawn.append((slides[0], list(models)))
        return real(slides, models, width)

    monkeypatch.setattr(run_report.heatmaps, "comparison", noted)
    run = RunContents.read(coupled)
    run_report._maps(run, run.slides, 1)
    ((slide, models),) = drawn
    assert models == ["coupling 0", "coupling 0.7", "coupling 3"]
    for coupling, values in zip(("0", "0.7", "3"), slide.maps):
        file = coupled / "patches" / f"coupling-{coupling}" / patch_file(slide.name)
        np.testing.assert_allclose(values, read_patches(file)["probability"], rtol=1e-12)
    assert len({values.tobytes() for values in slide.maps}) == 3


def test_slides_are_called_with_the_coupling_of_the_fit_alone(coupled, tmp_path):
    html = (coupled / "report.html").read_text(encoding="utf-8")
    n = read_predictions(coupled)["slide"].nunique()
    assert f"{n} slides were predicted with each of 3 couplings, for maps to compare" in html
    # fitted with 1, which is not among 0, 0.7 and 3
    assert "called with the coupling of the fit alone" in html
    for words in ("called wrongly", "called positive", "How good it is", "Worst errors"):
        assert words not in html
    run = tmp_path / "run"
    shutil.copytree(coupled, run)
    config = json.loads((run / "config.json").read_text())
    assert config["fitted_coupling"] == 1
    (run / "config.json").write_text(json.dumps(config | {"fitted_coupling": 0.7}))
    run_report.write(run)
    html = (run / "report.html").read_text(encoding="utf-8")
    found = json.loads((run / "metrics.json").read_text())["couplings"]
    for coupling, there in (("0.7", True), ("3", False)):
        log_loss = str(estimate_of(found[coupling]["slides"]["metrics"]["log_loss"]))
        assert (log_loss in html) == there
    assert "called wrongly" in html


def test_words_of_slides():
    row = {"log_odds": 1.2, "probability": 0.76849, "low": 0.5, "high": 0.99991, "label": 0.0}
    card = {"data": {"classes": {"benign": [3, "negative"], "Gleason": [2, "positive"]}}}
    (line,) = naming.heading(row | {"decision": "accept"}, card)
    assert line == (
        "is benign; called Gleason, probability 0.768 (90 % interval 0.5 to > 0.999); "
        "accept as Gleason"
    )
    unknown = row | {"label": np.nan, "low": np.nan, "log_odds": -1, "decision": "refer"}
    (line,) = naming.heading(unknown, {})
    assert line == "of unknown class; called negative, probability 0.768; refer"
    _, warning = naming.heading(unknown | {"novelty": 2.5}, {})
    assert warning.startswith("beyond the training range (novelty 2.5,")
    assert naming.rate_of({"options": {"asked": {"rate": 0.2}}}) == 0.2
    assert naming.rate_of({}) is None


def test_predict_counts_slides_beyond_the_training_range(tmp_path, capsys):
    """Once per slide, though a run may have several couplings."""
    slides = pd.DataFrame({"slide": ["a", "b"] * 2, "novelty": [0.4, 1.2, 0.4, 1.2]})
    predict._say(slides.assign(decision="refer", call=1), {}, tmp_path)
    assert "1 beyond the training range" in capsys.readouterr().out
    predict._say(slides[:1].assign(decision="refer", call=1), {}, tmp_path)
    assert "beyond" not in capsys.readouterr().out


def test_asked_rates_stand_beside_realised_ones():
    card = {"value": 0.2, "low": 0.1, "high": 0.3, "level": 0.95, "n": 9, "n_undefined": 0}
    found = {"decided": "flagged", "metrics": {"false_discovery_rate": card}}
    table = run_report._patch_table(found, "by slide", 0.1)
    assert table.rows[0][0] == "false marks (asked for: at most 0.1)"


def test_a_repeat_shows_its_own_patches(cv, tmp_path):
    slides = read_predictions(cv).drop(columns="repeat")
    twice = pd.concat([slides.assign(repeat="0"), slides.assign(repeat="1")])
    run = tmp_path / "run"
    shutil.copytree(cv, run)
    later = run / "patches" / "repeat-1"
    later.mkdir()
    for name in slides["slide"]:
        patches = pd.read_csv(cv / "patches" / patch_file(name)).assign(probability=0.25)
        patches.to_csv(later / patch_file(name), index=False)
    found = RunContents.read(run, slides=twice)
    assert set(found.patches(twice.iloc[-1])["probability"]) == {0.25}
    assert set(found.patches(twice.iloc[0])["probability"]) != {0.25}
    assert "in each of 2 repeats" in run_report._lead(found)
