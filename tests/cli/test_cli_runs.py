"""inspect, fit, cv, predict, evaluate and doctor, from the command line to the files."""

import json
import os
import re
import signal
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import writers
from command_line import invoke, ran, write_table
from packaging.specifiers import SpecifierSet

import gpmil
from gpmil.cli import cv, doctor, options, settings
from gpmil.runs import judge
from gpmil.runs.data_card import cache_of, data_card, fingerprint
from gpmil.runs.files import read_patches, read_predictions
from gpmil.runs.judge import NO_PATIENT
from gpmil.runs.page import write as report
from gpmil.runs.patient_table import read_patients
from gpmil.runs.workspace import UNITS

FIXED = ["--variance", "2.3", "--lengthscale", "1.9", "--mean", "-1.7", "--n-inducing", "12"]
QUICK = ["--interval-patches", "0"]
COUPLED = ["--coupling", "0.6", *FIXED, *QUICK]


def contents(folder: Path) -> dict[str, bytes]:
    """All files but the log, which has the times."""
    found = {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}
    assert b"complete" in found.pop("log.txt")
    return found


@pytest.fixture(autouse=True, scope="module")
def _quick():
    """Few resamples, and a page for cv alone: what takes long."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(judge, "RESAMPLES", 20)
        for command in ("fit", "predict"):
            patch.setattr(f"gpmil.cli.{command}.write_report", lambda folder: None)
        yield


@pytest.fixture
def _no_report(monkeypatch):
    monkeypatch.setattr("gpmil.cli.cv.write_report", lambda folder: None)


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    """A folder with a cohort, and a run of every kind."""
    place = tmp_path_factory.mktemp("cli-runs")
    data = write_table(place / "own.csv")
    ran("fit", data, "--out", place / "fit", *COUPLED)
    ran("cv", data, "--out", place / "cv", "--folds", 3, *COUPLED)
    ran("predict", place / "fit", data, "--out", place / "new", "--batch", 40, *QUICK)
    return place


# --- What the commands write ----------------------------------------------------------------------
def test_a_run_is_a_folder(place):
    common = {"config.json", "log.txt", "metrics.json", "patches", "predictions.csv"}
    reported = {"report.html"}
    found = {name: {p.name for p in (place / name).iterdir()} for name in ("fit", "cv", "new")}
    assert found == {
        "fit": common | {"model", "splits.csv", "patients.csv"},
        "cv": common | reported | {"splits.csv", "patients.csv"},
        "new": common | {"patients.csv"},
    }
    assert {p.name for p in place.iterdir()} == {"own.csv", "fit", "cv", "new"}


def test_config_holds_every_option(place):
    card = json.loads((place / "cv" / "config.json").read_text())
    assert card["command"] == "cv" and card["options"]["folds"] == 3
    assert card["options"]["source"]["data"] == str(place / "own.csv")
    settings = card["model"]["settings"]
    assert settings.keys() == gpmil.VGPMILPRI().get_params(deep=False).keys()
    assert settings["coupling"] == 0.6 and settings["random_state"] == 0
    assert card["steps"]["s00"] == 10 and card["data"]["slides"] == 18
    assert str(card["versions"]["gpmil"]) == gpmil.__version__
    assert not re.search(r"\d\d:\d\d:\d\d", (place / "cv" / "config.json").read_text())


def test_fit_saves_the_model_of_the_python_call(place):
    bags = gpmil.read(place / "own.csv")
    expected = gpmil.VGPMILPRI(
        coupling=0.6, variance=2.3, lengthscale=1.9, mean=-1.7, n_inducing=12, random_state=0
    ).fit(bags)
    loaded = gpmil.load(place / "fit" / "model")
    np.testing.assert_allclose(loaded.posterior_mean_, expected.posterior_mean_, rtol=1e-10)
    assert loaded.get_params() == expected.get_params()
    for run in ("fit", "new"):
        table = read_predictions(place / run)
        probability = expected.predict_proba(bags)[:, 1]
        np.testing.assert_allclose(table["probability"], probability, rtol=1e-8)
    assert "fitted on" in json.loads((place / "fit" / "metrics.json").read_text())["note"]


def test_fit_says_every_setting_that_it_found(place, capsys):
    from gpmil.cli import fit

    model = gpmil.load(place / "fit" / "model")
    model.slide_effect_, model.loo_log_likelihood_ = 0.83512, -0.27499
    fit._say(model, place)
    said = " ".join(capsys.readouterr().out.split())
    every = "variance 2.3, length scale 1.9, prior mean -1.7, coupling 0.6, slide effect 0.8351"
    assert f"VGPMILPRI: {every}" in said and "left out of the fit: -0.275" in said
    facts = json.loads((place / "fit" / "metrics.json").read_text())["training"]
    assert facts["slide_effect"] == 0 and facts["coupling"] == 0.6


def test_cv_predicts_every_slide_by_a_model_that_has_not_seen_its_patient(place):
    splits = pd.read_csv(place / "cv" / "splits.csv", dtype=str)
    table = read_predictions(place / "cv")
    assert sorted(table["slide"]) == [f"s{b:02d}" for b in range(18)]
    bags = gpmil.read(place / "own.csv")
    for fold, rows in splits.groupby("fold"):
        train, test = (set(rows["slide"][rows["part"] == part]) for part in ("train", "test"))
        assert len(train | test) == 18 and not train & test
        patients = rows.groupby("part")["patient"].apply(set)
        assert not patients["train"] & patients["test"]
        model = gpmil.load(place / "fit" / "model").with_settings_fixed()
        model.fit(bags[np.isin(bags.names, list(train))])
        held_out = bags[np.isin(bags.names, list(test))]
        own = table[table["fold"] == fold].set_index("slide").loc[held_out.names.tolist()]
        expected = model.predict_proba(held_out)[:, 1]
        np.testing.assert_allclose(own["probability"], expected, rtol=1e-7)
        jointly, said = model.predict_patients(held_out), read_patients(place / "cv")
        said = said[said["fold"] == fold].set_index("patient").loc[jointly.patients.tolist()]
        np.testing.assert_allclose(said["probability"], jointly.proba[:, 1], rtol=1e-7)
    judged = json.loads((place / "cv" / "metrics.json").read_text())["patients"]
    assert judged["patients"] == judged["positive"] == 9  # every patient has a positive slide
    assert ">Patients</h2>" in (place / "cv" / "report.html").read_text()


def test_splits_csv_is_read_back(place, tmp_path, _no_report):
    given = ["--splits", place / "cv" / "splits.csv"]
    ran("cv", place / "own.csv", "--out", tmp_path / "again", *given, *COUPLED)
    for name in ("predictions.csv", "splits.csv", "metrics.json"):
        assert (tmp_path / "again" / name).read_bytes() == (place / "cv" / name).read_bytes()


def test_a_run_is_repeated_from_its_config(place, tmp_path):
    for command, name in (("fit", "fit"), ("cv", "cv"), ("predict", "new")):
        ran(command, "--config", place / name / "config.json", "--out", tmp_path / name)
        assert contents(tmp_path / name) == contents(place / name)


def test_a_run_on_other_data_is_not_a_repetition(place, tmp_path):
    card = json.loads((place / "fit" / "config.json").read_text())
    card["options"]["source"]["data"] = str(write_table(tmp_path / "other.csv", seed=6))
    (tmp_path / "config.json").write_text(json.dumps(card))
    result = invoke("fit", "--config", tmp_path / "config.json", "--out", tmp_path / "run")
    assert result.exit_code == 2 and "another fingerprint" in result.stderr
    assert not (tmp_path / "run").exists()


def test_a_run_of_an_earlier_version_is_repeated(place, tmp_path):
    """Its fingerprint was made of the features themselves."""
    card = json.loads((place / "new" / "config.json").read_text())
    earlier = {"data": {"fingerprint": "5e0"}}
    card["data"] = data_card(gpmil.read(place / "own.csv"), earlier)
    (tmp_path / "config.json").write_text(json.dumps(card))
    ran("predict", "--config", tmp_path / "config.json", "--out", tmp_path / "run")
    assert json.loads((tmp_path / "run" / "config.json").read_text())["data"] == card["data"]


@pytest.fixture(scope="module")
def job(tmp_path_factory) -> Path:
    """A TRIDENT folder of overlapping patches, and labels.csv beside it."""
    place = tmp_path_factory.mktemp("job")
    cells, rows = writers.tissue(), []
    told = {"patch_size": 256, "patch_size_level0": 512, "overlap": 64}
    for b in range(12):
        malignant = (np.arange(len(cells)) < 4 * (b % 2))[:, None]
        features = writers.vectors(len(cells), 4, seed=b) + 3 * malignant.astype("f4")
        folder = place / "job" / "20x_256px_64px_overlap" / "features_uni_v1"
        writers.trident(folder, f"s{b:02d}", features, cells * 384, **told)
        rows.append((f"s{b:02d}.svs", f"p{b // 2}", ("benign", "cancer")[b % 2]))
    frame = pd.DataFrame(rows, columns=["slide_id", "case_id", "label"])
    frame.to_csv(place / "labels.csv", index=False)
    return place


def test_config_says_where_features_and_labels_are(job, tmp_path, monkeypatch, _no_report):
    """Paths as they were given: relative ones stay relative."""
    monkeypatch.chdir(job)
    source = ["job", "--labels", "labels.csv", "--positive", "cancer"]
    kept = ["--cache", "kept"]
    fit, new, folds = (tmp_path / name for name in ("fit", "new", "cv"))
    ran("fit", *source, "--out", fit, *kept, *COUPLED)
    ran("predict", fit, *source, "--out", new, *kept, *QUICK)
    ran("cv", *source, "--out", folds, "--folds", 2, *kept, *COUPLED)
    for run in (fit, new, folds):
        card = json.loads((run / "config.json").read_text())
        assert card["cache"] == "kept"
        assert card["options"]["source"]["data"] == "job"
        assert card["options"]["source"]["labels"] == "labels.csv"
        assert set(card["steps"].values()) == {384} and set(card["sizes"].values()) == {512}
        found = gpmil.read("job", "labels.csv", positive="cancer", cache=cache_of(card))
        assert fingerprint(found) == card["data"]["fingerprint"]
    assert [p.name for p in Path("job").rglob(".gpmil-cache")] == []
    ran("fit", "--config", fit / "config.json", "--out", tmp_path / "again")
    assert contents(tmp_path / "again") == contents(fit)
    assert [p.name for p in Path("job").rglob(".gpmil-cache")] == []


def test_config_without_a_cache_says_so(place):
    for run in ("fit", "cv", "new"):
        assert json.loads((place / run / "config.json").read_text())["cache"] is None


# --- Killed and continued -------------------------------------------------------------------------
KILLED = """
import json, os, signal, sys
from gpmil.cli import cv, main, predict
from gpmil.runs import judge, workspace

judge.RESAMPLES, predict.write_report = 20, lambda folder: None

def die_at(where, count):
    real, left = getattr(workspace, where), [count]

    def killing(*given, **named):
        left[0] -= 1
        if left[0] < 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return real(*given, **named)

    setattr(workspace, where, killing)

for where, count, arguments in json.loads(sys.argv[1]):
    child = os.fork()
    if not child:
        die_at(where, count)
        sys.argv = ["gpmil", *arguments]
        main()
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


def kill(*commands: tuple[str, int, list]) -> list[int]:
    """Run commands, each killed (SIGKILL) at the n-th call of a function; exit codes."""
    given = json.dumps([(where, n, [str(a) for a in words]) for where, n, words in commands])
    done = subprocess.run(
        [sys.executable, "-c", KILLED, given],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=True,
    )
    return [int(code) for code in done.stdout.split()]


@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="needs SIGKILL and fork")
def test_killed_runs_continue_to_the_same_bytes(place, tmp_path):
    """Killed while writing patches of the second fold or batch, or at the very end."""
    data, fit = place / "own.csv", place / "fit"
    commands = {
        "cv": ["cv", data, "--folds", 3, *COUPLED],
        "new": ["predict", fit, data, "--batch", 40, *QUICK],
    }
    killed = [("cv", "write_whole", 12), ("new", "write_whole", 9), ("new", "swap", 0)]
    outs = [tmp_path / f"{where}-{name}" for name, where, _ in killed]
    codes = kill(
        *((at, n, [*commands[name], "--out", o]) for (name, at, n), o in zip(killed, outs))
    )
    assert codes == [-signal.SIGKILL] * 3
    for (name, where, _), out in zip(killed, outs):
        partial = out.with_name(out.name + ".partial")
        done = len(list((partial / UNITS).glob("[!.]*.csv")))
        assert not out.exists() and (1 <= done <= 2 if where == "write_whole" else done > 2)
        before = (partial / "log.txt").read_text()
        ran(*commands[name], "--out", out)
        log = (out / "log.txt").read_text()
        assert log.startswith(before)  # continued, and nothing was computed twice
        finished = re.findall(r"finished (\S+)", log)
        assert len(finished) == len(set(finished)) > 2
        assert contents(out) == contents(place / name)
        assert not partial.exists()


def test_an_interrupted_run_of_another_kind_is_refused(place, tmp_path, caplog, _no_report):
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    data, out = place / "own.csv", tmp_path / "run"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("gpmil.cli.cv.judge_run", interrupted)
        result = invoke("cv", data, "--out", out, "--folds", 2, *COUPLED)
    assert result.exit_code == 130 and "the same command continues" in caplog.text
    result = invoke("cv", data, "--out", out, "--folds", 2, *COUPLED, "--max-iter", 99)
    assert result.exit_code == 2
    assert "max_iter: 200 there, 99 here" in result.stderr.splitlines()[-1]
    result = invoke("fit", data, "--out", out, *COUPLED)
    assert result.exit_code == 2 and "command: 'cv' there, 'fit' here" in result.stderr
    assert not out.exists()


def test_a_full_disk_gets_one_line(place, tmp_path, monkeypatch, _no_report):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("gpmil.runs.workspace.write_whole", full)
    result = invoke("predict", place / "fit", place / "own.csv", "--out", tmp_path / "run", *QUICK)
    assert result.exit_code == 2 and "No space left" in result.stderr.splitlines()[-1]
    assert list(tmp_path.iterdir()) == []


# --- cv -------------------------------------------------------------------------------------------
def test_clam_splits_train_on_val_and_pool_the_tests(place, tmp_path, _no_report):
    names = [f"s{b:02d}" for b in range(18)]
    folder = tmp_path / "splits"
    folder.mkdir()
    for i, test in enumerate((names[:4], names[2:6], names[10:12])):
        rest = [n for n in names if n not in test]
        columns = {"train": rest[4:], "val": rest[:4], "test": [f"{n}.svs" for n in test]}
        frame = pd.DataFrame({k: pd.Series(v) for k, v in columns.items()})
        frame.to_csv(folder / f"splits_{i}.csv")
        frame.notna().to_csv(folder / f"splits_{i}_bool.csv")
    run = tmp_path / "run"
    ran("cv", place / "own.csv", "--splits", folder, "--out", run, *COUPLED)
    table = read_predictions(run)
    assert table.groupby("fold")["slide"].apply(list).to_dict() == {
        "0": names[:4],
        "1": names[2:6],
        "2": names[10:12],
    }
    assert {p.name for p in (run / "patches").iterdir()} == {
        f"{n}.csv.gz" for n in {*names[:6], *names[10:12]}
    }
    splits = pd.read_csv(run / "splits.csv")
    assert (splits[splits["fold"] == 0]["part"] == "train").sum() == 14


def bags_of(place: Path) -> gpmil.Bags:
    return gpmil.read(place / "own.csv")


def test_a_table_of_folds_is_followed(place, tmp_path):
    bags = bags_of(place)
    fold = {f"s{b:02d}": "abc"[b // 2 % 3] for b in range(18)}
    table = tmp_path / "folds.csv"
    pd.DataFrame({"slide_id": list(fold), "fold": list(fold.values())}).to_csv(table, index=False)
    found = cv.planned(bags, cv.Folds(splits=str(table)), options.Source("own.csv"))
    assert [s.fold for s in found] == ["a", "b", "c"]
    for split in found:
        assert {fold[n] for n in bags.names[split.test]} == {split.fold}
        assert len(split.train) + len(split.test) == 18


def test_sites_stay_in_one_fold(tmp_path, caplog):
    data = write_table(tmp_path / "own.csv", hospital=lambda b: f"h{b // 4}")
    bags = gpmil.read(data)
    source = options.Source(str(data))
    site = np.arange(18) // 4
    for split in cv.planned(bags, cv.Folds(folds=3, repeats=2, site="hospital"), source):
        assert not set(site[split.train]) & set(site[split.test])
    torn = write_table(tmp_path / "torn.csv", hospital=lambda b: f"h{b % 4}")
    cv.planned(gpmil.read(torn), cv.Folds(folds=2, site="hospital"), options.Source(str(torn)))
    assert "4 sites make 2 groups" in caplog.text
    with pytest.raises(ValueError, match="there is no column 'clinic'"):
        cv.planned(bags, cv.Folds(site="clinic"), source)


def test_fewer_sites_than_folds_make_as_many_folds(tmp_path, caplog):
    data = write_table(tmp_path / "own.csv", centre=lambda b: "ABC"[b // 6])
    found = cv.planned(
        gpmil.read(data), cv.Folds(folds=5, site="centre"), options.Source(str(data))
    )
    assert len(found) == 3
    assert "3 folds instead of 5: there are 3 sites with a negative bag" in caplog.text


@pytest.mark.parametrize(
    ("centre", "message"),
    [
        (lambda b: "A", "all 9 negative slides are of one site, 'A': a model"),
        (lambda b: "AB"[b % 2], "all 9 negative slides are of the sites 'A', 'B', which share"),
        (lambda b: "A" if b % 2 else f"B{b}", "9 negative slides are of the sites 'A', 'B0', "),
    ],
)
def test_sites_that_cannot_be_held_out(tmp_path, centre, message):
    """It said that flags need patients, though nobody had asked for flags."""
    data = write_table(tmp_path / "own.csv", centre=centre)
    result = invoke("cv", data, "--out", tmp_path / "run", "--site", "centre", *COUPLED)
    last = result.stderr.splitlines()[-1]
    assert result.exit_code == 2 and last.startswith("gpmil: --site centre: all ")
    assert message in last and "leave out --site" in last and "flags" not in last
    assert [p.name for p in tmp_path.iterdir()] == ["own.csv"]


def test_a_class_of_one_patient_cannot_be_cross_validated(tmp_path):
    data = write_table(tmp_path / "own.csv", patient=lambda b: "p" if b % 2 else f"p{b}")
    last = invoke("cv", data, "--out", tmp_path / "run", *COUPLED).stderr.splitlines()[-1]
    assert "at least 2 positive slides of different patients; found 9 of 18, all of patient" in last
    assert "flags" not in last


def test_patients_of_two_sites_join_them():
    site = np.array(["a", "a", "b", "c", "c", "d"])
    patient = np.array([0, 1, 1, 2, 3, 4])
    found = cv.together(site, patient)
    assert found.tolist() == [0, 0, 0, 1, 1, 2]


def test_repeats_have_other_folds(place):
    found = cv.planned(bags_of(place), cv.Folds(folds=3, repeats=2), options.Source("own.csv"))
    assert [s.unit for s in found][2:4] == ["repeat-0-fold-2", "repeat-1-fold-0"]
    assert any(a.test.tolist() != b.test.tolist() for a, b in zip(found[:3], found[3:]))
    for r in (0, 1):
        assert sorted(b for s in found if s.repeat == r for b in s.test) == list(range(18))


def test_every_repeat_keeps_its_patches(place, tmp_path, _no_report):
    """The first in patches/, later ones in folders of their own, for gpmil heatmap --repeat."""
    run = tmp_path / "run"
    words = ["--folds", 2, "--repeats", 2, *COUPLED]
    ran("cv", place / "own.csv", "--out", run, *words)
    bags, splits = bags_of(place), pd.read_csv(run / "splits.csv")
    for repeat, under in ((0, ""), (1, "repeat-1")):
        own = splits[splits["repeat"] == repeat]
        fold = own["fold"][own["slide"].eq("s03") & own["part"].eq("test")].iloc[0]
        rows = own[own["fold"] == fold]
        train = rows["slide"][rows["part"] == "train"]
        model = gpmil.load(place / "fit" / "model").with_settings_fixed()
        model.fit(bags[np.isin(bags.names, train)])
        expected = model.predict_instances(bags[3]).probability
        file = run / "patches" / under / "s03.csv.gz"
        np.testing.assert_allclose(read_patches(file)["probability"], expected, rtol=1e-7)
        assert len(list(file.parent.glob("*.csv.gz"))) == 18
    ran("qupath", run, "--repeat", 1, "--slide", "s03", "--out", tmp_path / "q")
    features = json.loads((tmp_path / "q" / "s03.geojson").read_text())["features"]
    shown = [f["properties"]["measurements"]["probability"] for f in features]
    np.testing.assert_allclose(shown, expected, rtol=1e-5)


def write_folds(path: Path, rows: list[tuple]) -> Path:
    pd.DataFrame(rows, columns=["slide", "fold"]).to_csv(path, index=False)
    return path


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        ([("other", 0)], "none of its slides is in the data"),
        ([("s00", 0), ("s01", 1), ("s02", 1)], "patients are both trained on and tested"),
        ([("s00", 0), ("s02", 1), ("s04", 1)], "training slides are of one class"),
        ([("s00", 0), ("s00", 1)], "is in several rows"),
    ],
)
def test_splits_that_cannot_be_are_refused(place, tmp_path, rows, said):
    table = write_folds(tmp_path / "folds.csv", rows)
    with pytest.raises(ValueError, match=said):
        cv.planned(bags_of(place), cv.Folds(splits=str(table)), options.Source("own.csv"))


# --- predict --------------------------------------------------------------------------------------
def test_several_couplings_have_folders_of_their_own(place, tmp_path, _no_report):
    arguments = ["--coupling", "0,0.6,3.5", "--out", tmp_path / "run", *QUICK]
    said = ran("predict", place / "fit", place / "own.csv", *arguments)
    assert "coupling 3.5:" in said
    table = read_predictions(tmp_path / "run")
    bags, model = bags_of(place), gpmil.load(place / "fit" / "model")
    for coupling, rows in table.groupby("coupling"):
        model.coupling_ = float(coupling)
        expected = model.predict_proba(bags)[:, 1]
        np.testing.assert_allclose(rows["probability"], expected, rtol=1e-8)
        file = tmp_path / "run" / "patches" / f"coupling-{coupling}" / "s03.csv.gz"
        expected = model.predict_instances(bags[3]).probability
        np.testing.assert_allclose(read_patches(file)["probability"], expected, rtol=1e-8)
    found = json.loads((tmp_path / "run" / "metrics.json").read_text())
    assert list(found["couplings"]) == ["0", "0.6", "3.5"]
    # the threshold is that of the fit: with other couplings there are maps, and no calls
    assert table.groupby("coupling")["call"].count().to_dict() == {"0": 0, "0.6": 18, "3.5": 0}
    other, own = (found["couplings"][c]["slides"] for c in ("0", "0.6"))
    assert "operating" in own and "operating" not in other
    assert own["metrics"].keys() - other["metrics"].keys() == {
        *("accuracy", "precision", "recall", "f1")
    }
    assert said.count("slides accuracy") == 1 and said.count("slides auc") == 3


def test_one_other_coupling_calls_no_slide(place, tmp_path, _no_report):
    arguments = ["--coupling", "0.2", "--out", tmp_path / "run", *QUICK]
    said = ran("predict", place / "fit", place / "own.csv", *arguments)
    assert "called with the coupling of the fit alone" in said and "accuracy" not in said
    table = read_predictions(tmp_path / "run")
    assert set(table["coupling"]) == {"0.2"} and table["call"].isna().all()
    assert not (tmp_path / "run" / "patients.csv").exists()
    assert (tmp_path / "run" / "patches" / "coupling-0.2" / "s03.csv.gz").is_file()
    report(tmp_path / "run")
    html = (tmp_path / "run" / "report.html").read_text()
    assert "predicted with coupling 0.2, for maps to compare" in html
    assert "called positive" not in html and "How good it is" not in html


def test_the_coupling_of_the_fit_changes_nothing(place, tmp_path, _no_report):
    arguments = ["--coupling", "0.6", "--batch", 40, "--out", tmp_path / "run", *QUICK]
    ran("predict", place / "fit" / "model", place / "own.csv", *arguments)
    same = (tmp_path / "run" / "predictions.csv").read_bytes()
    assert same == (place / "new" / "predictions.csv").read_bytes()


def test_slides_of_the_fit_are_noted(place, tmp_path, caplog):
    found = json.loads((place / "new" / "metrics.json").read_text())
    assert found["note"].startswith("18 of 18 slides have the names of slides that the model")
    fresh = pd.read_csv(place / "own.csv").assign(slide=lambda t: "t" + t["slide"])
    fresh.to_csv(tmp_path / "fresh.csv", index=False)
    ran("predict", place / "fit", tmp_path / "fresh.csv", "--out", tmp_path / "run", *QUICK)
    assert "note" not in json.loads((tmp_path / "run" / "metrics.json").read_text())
    assert "flatter" not in caplog.text


def test_cv_says_whether_patients_are_known(place, tmp_path, _no_report):
    """Without a patient column it spoke of intervals by patient all the same."""
    alone = tmp_path / "alone.csv"
    pd.read_csv(place / "own.csv").drop(columns="patient").to_csv(alone, index=False)
    said = ran("cv", alone, "--out", tmp_path / "alone", "--folds", 2, *COUPLED)
    assert NO_PATIENT in said and "by patient" not in said
    found = json.loads((tmp_path / "alone" / "metrics.json").read_text())["slides"]
    assert (found["patients"], found["intervals_by"]) == (None, "slide")
    data = place / "own.csv"
    said = ran("cv", data, "--out", tmp_path / "cv", "--folds", 2, *COUPLED)
    assert "Slides of one patient stay together; intervals by patient, of 9." in said
    said = ran("cv", data, "--out", tmp_path / "no", "--folds", 2, "--patient", "none", *COUPLED)
    assert NO_PATIENT in said


# --- evaluate -------------------------------------------------------------------------------------
def test_evaluate_agrees_with_the_run_to_the_last_digit(place, tmp_path):
    for run in ("cv", "new"):
        out = tmp_path / f"{run}.json"
        ran("evaluate", place / run, "--out", out)
        assert out.read_bytes() == (place / run / "metrics.json").read_bytes()
        ran("evaluate", place / run, "--labels", place / "own.csv", "--out", out)
        assert out.read_bytes() == (place / run / "metrics.json").read_bytes()


def test_evaluate_against_other_labels(place, tmp_path, _no_report):
    run, words = tmp_path / "run", tmp_path / "labels.csv"
    blind = tmp_path / "blind.csv"
    pd.read_csv(place / "own.csv").drop(columns=["label", "patch_label"]).to_csv(blind, index=False)
    ran("predict", place / "fit", blind, "--out", run, *QUICK)
    assert not (run / "metrics.json").exists()
    assert invoke("evaluate", run).exit_code == 2
    rows = [(f"s{b:02d}.svs", "cancer" if b % 2 else "benign") for b in range(14)]
    pd.DataFrame(rows, columns=["slide_id", "diagnosis"]).to_csv(words, index=False)
    truth = ["--labels", words, "--label", "diagnosis", "--positive", "cancer"]
    patches = ["--patch-labels", place / "own.csv"]
    ran("evaluate", run, *truth, *patches)
    found = json.loads((run / "metrics.json").read_text())
    assert found["slides"]["slides"] == 14 and found["slides"]["positive"] == 7
    expected = json.loads((place / "new" / "metrics.json").read_text())
    assert found["patches"] == expected["patches"]
    files = json.loads((run / "config.json").read_text())["files"]
    assert "metrics.json" in files and "labels.csv" in files
    given = pd.read_csv(run / "labels.csv")
    assert given["label"].notna().sum() == 14 and list(given["slide"][:2]) == ["s00", "s01"]
    ran("predict", place / "fit", blind, "--out", run, *QUICK)  # ours, and replaced


# --- Settings -------------------------------------------------------------------------------------
def test_settings_may_stand_anywhere_and_have_hyphens_or_underscores():
    own = {"--out", "--labels"}
    words = ["--n_inducing=7", "data", "--tuning-budget", "9", "--out", "run", "--calibrated"]
    rest, found = settings.separate(words, own)
    assert rest == ["data", "--out", "run"]
    assert found == {"n_inducing": "7", "tuning_budget": "9", "calibrated": None}
    model = settings.build_model("vgpmil-pr-i", found)
    assert (model.n_inducing, model.tuning_budget, model.calibrated) == (7, 9, True)


@pytest.mark.parametrize("name", ["VGPMIL", "VGPMILPR", "AttentionMIL", "PseudoLabelMIL"])
def test_every_setting_of_a_model_survives_the_config(name):
    cls = getattr(gpmil, name)
    defaults = cls().get_params(deep=False)
    text = {k: ",".join(v) if isinstance(v, tuple) else str(v) for k, v in defaults.items()}
    model = settings.build_model(name, text)
    assert model.get_params(deep=False) == defaults
    again = settings.model_from_card(json.loads(json.dumps(settings.model_card(model))))
    assert again.get_params(deep=False) == defaults


def test_optimize_is_a_tuple():
    model = settings.build_model("VGPMILPR", {"optimize": "inducing,mean"})
    assert model.optimize == ("inducing", "mean")


# --- Mistakes -------------------------------------------------------------------------------------
def one_line(result) -> str:
    """What a mistake said: exit code 2, the last line is ours, no traceback."""
    assert result.exit_code == 2, result.output + repr(result.exception)
    assert "Traceback" not in result.stderr and result.stdout == ""
    last = result.stderr.splitlines()[-1]
    assert last.startswith("gpmil: ")
    return last


def test_bad_input_gets_one_line_and_leaves_nothing(place, tmp_path):
    data, wide = place / "own.csv", write_table(tmp_path / "wide.csv", n_features=6)
    three = write_table(tmp_path / "three.csv", label=lambda b: "abc"[b % 3])
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("")
    labels = tmp_path / "labels.csv"
    pd.DataFrame({"slide": ["x1"], "label": [1]}).to_csv(labels, index=False)
    new = ["--out", tmp_path / "run"]
    cases = [
        (["fit", tmp_path / "nowhere", *new], "there is nothing at"),
        (["fit", tmp_path / "empty", *new], str(tmp_path / "empty")),
        (["fit", data, "--labels", labels, *new], "no slide has a label"),
        (["fit", data, "--label", "grade", *new], "no column 'grade'"),
        (["fit", three, *new], "3 classes: 'a' (6), 'b' (6), 'c' (6)"),
        (["fit", data, "--colour", "red", *new], "no such option: --colour; settings of VGPMILPRI"),
        (["fit", data, "--coupling", *new], "--coupling requires an argument"),
        (["fit", data, "--coupling", "-1", *new], "coupling must be"),
        (["fit", data, "--model", "CLAM", *new], "--model must be one of VGPMIL,"),
        (["fit", data, "--step", "far", *new], "--step must be a number"),
        (["fit", *new], "Missing argument 'DATA'"),
        (["fit", data], "Missing option '--out'"),
        (["fit", "--config", tmp_path / "no.json", *new], "is no run of gpmil"),
        (["fit", "--config", place / "cv" / "config.json", *new], "repeat it with gpmil cv"),
        (["cv", "--config", place / "cv", data, *new], "leave out 'data'"),
        (["cv", "--config", place / "cv", "--coupling", "2", *new], "leave out 'coupling'"),
        (["cv", data, "--folds", "1", *new], "--folds must be"),
        (["cv", data, "--splits", tmp_path / "empty", *new], "expected files splits_0.csv"),
        (["cv", data, "--splits", labels, "--site", "x", *new], "leave out --site"),
        (["cv", data, "--site", "clinic", *new], "no column 'clinic'"),
        (["predict", place / "fit", wide, *new], "fitted on 4 features per instance"),
        (["predict", place / "cv", data, *new], "is a run of gpmil cv and holds no model"),
        (["predict", tmp_path / "empty", data, *new], "neither a run of gpmil fit"),
        (["predict", place / "fit", data, "--coupling", "strong", *new], "--coupling must be"),
        (["predict", place / "fit", data, "--rate", "10", *new], "--rate must be"),
        (["predict", place / "fit", data, "--out", tmp_path / "file" / "run"], "ot a directory"),
        (["predict", place / "fit", data, "--out", place / "cv"], "holds a run of gpmil cv"),
        (["predict", place / "fit", data, "--out", place], "holds files that gpmil did not write"),
        (["evaluate", tmp_path / "empty"], "is no run of gpmil"),
        (["evaluate", place / "new", "--labels", labels], "no slide has a label"),
        (["inspect", tmp_path / "nowhere"], "there is nothing at"),
    ]
    before = contents(place / "cv")
    for arguments, said in cases:
        assert said in one_line(invoke(*arguments)), arguments
    assert {p.name for p in tmp_path.iterdir()} == {
        "wide.csv",
        "three.csv",
        "empty",
        "file",
        "labels.csv",
    }
    assert contents(place / "cv") == before


def test_three_classes_with_a_positive_one(tmp_path):
    data = write_table(tmp_path / "three.csv", label=lambda b: "abc"[b % 3])
    unsaid = invoke("fit", data, "--positive", "b", "--out", tmp_path / "run", *COUPLED)
    assert unsaid.exit_code == 2 and "--positive b --negative a,c" in unsaid.stderr
    said = ["--positive", "b", "--negative", "a", "--exclude", "c"]
    result = invoke("fit", data, *said, "--out", tmp_path / "run", *COUPLED)
    assert "classes: b 6 (positive), a 6 (negative), c 6 (left out)" in result.stderr
    splits = pd.read_csv(tmp_path / "run" / "splits.csv")
    assert splits["label"].sum() == 6 and len(splits) == 12
    card = json.loads((tmp_path / "run" / "config.json").read_text())
    assert card["data"]["classes"] == {
        "b": [6, "positive"],
        "a": [6, "negative"],
        "c": [6, "left out"],
    }
    assert "classes: b 6 (positive), a 6 (negative), c 6 (left out)" in card["read"]


def test_a_word_for_a_column_of_numbers(place, tmp_path):
    """--positive is text, the labels of a table are numbers."""
    told = ran("inspect", place / "own.csv", "--positive", "1")
    assert "classes: '1' 9 (positive), '0' 9 (negative)" in told
    assert "classes: '0' 9 (positive)" in ran("inspect", place / "own.csv", "--positive", "0")
    grades = write_table(tmp_path / "grades.csv", label=lambda b: 2 + b % 3)
    asked = ["--positive", ">=3", "--negative", "<3"]
    told = ran("inspect", grades, *asked)
    assert "classes: '3' 6 (positive), '4' 6 (positive), '2' 6 (negative)" in told
    minus = write_table(tmp_path / "minus.csv", label=lambda b: 1 if b % 2 else -1)
    said = one_line(invoke("inspect", minus, "--positive", "1"))
    assert "-1 means unlabelled here. Say --negative -1" in said
    told = ran("inspect", minus, "--positive", "1", "--negative", "-1")
    assert "classes: '1' 9 (positive), '-1' 9 (negative)" in told


def test_evaluate_refuses_the_other_class(place, tmp_path):
    """A model of cancer is not judged as one of benign slides, and nothing is overwritten."""
    words = write_table(tmp_path / "words.csv", label=lambda b: ("benign", "cancer")[b % 2])
    ran("fit", words, "--positive", "cancer", "--out", tmp_path / "fit", *COUPLED)
    ran("predict", tmp_path / "fit", place / "own.csv", "--out", tmp_path / "new", *QUICK)
    card = json.loads((tmp_path / "new" / "config.json").read_text())
    assert card["model"]["classes"] == {"cancer": [9, "positive"], "benign": [9, "negative"]}
    labels = tmp_path / "labels.csv"
    rows = [(f"s{b:02d}", ("Benign", "Cancer")[b % 2]) for b in range(18)]
    pd.DataFrame(rows, columns=["slide", "label"]).to_csv(labels, index=False)
    for run in (tmp_path / "new", tmp_path / "fit"):
        before = contents(run)
        said = one_line(invoke("evaluate", run, "--labels", labels, "--positive", "Benign"))
        assert "'Benign' is positive here" in said and "is 'cancer'" in said
        assert contents(run) == before
        told = ran("evaluate", run, "--labels", labels, "--positive", "Cancer")
        assert "classes: Cancer 9 (positive), Benign 9 (negative)" in told
    for name in ("fit", "new"):  # as versions before this one wrote them
        card = json.loads((tmp_path / name / "config.json").read_text())
        card["data"].pop("classes")
        card["model"].pop("classes", None)
        for option in ("negative", "exclude", "slide_table"):
            card["options"]["source"].pop(option)
        (tmp_path / name / "config.json").write_text(json.dumps(card))
    said = one_line(
        invoke("evaluate", tmp_path / "new", "--labels", labels, "--positive", "Benign")
    )
    assert "the positive class of the model is 'cancer'" in said
    for command, name in (("fit", "fit"), ("predict", "new")):
        config = tmp_path / name / "config.json"
        ran(command, "--config", config, "--out", tmp_path / f"{name}-again")


def test_inspect_of_one_class_says_so(tmp_path):
    data = write_table(tmp_path / "one.csv", label=lambda b: "cancer")
    told = ran("inspect", data, "--positive", "cancer")
    assert "WARNING: all 18 labelled slides are positive: a model needs both classes." in told


# --- Tables as labs have them ---------------------------------------------------------------------
def test_label_tables_of_many_kinds(job, tmp_path):
    frame = pd.read_csv(job / "labels.csv").rename(
        columns={"slide_id": "Slide Filename", "case_id": "Case ID"}
    )
    frame.to_csv(tmp_path / "semicolons.csv", sep=";", index=False)
    frame.to_csv(tmp_path / "tabs.csv", sep="\t", index=False)
    frame.to_csv(tmp_path / "commas.tsv", index=False)
    tables = ["semicolons.csv", "tabs.csv", "commas.tsv"]
    if find_spec("openpyxl") is not None:
        frame.to_excel(tmp_path / "sheet.xlsx", index=False)
        tables.append("sheet.xlsx")
    for name in tables:
        source = [job / "job", "--labels", tmp_path / name, "--positive", "cancer"]
        told = ran("inspect", *source, "--cache", tmp_path / "kept")
        assert "classes: cancer 6 (positive), benign 6 (negative)" in told
        assert "slide is column 'Slide Filename'" in told and "column 'Case ID'" in told
        assert "patients: 6" in told


def test_a_pair_of_tables_as_stamp_has_them(job, tmp_path):
    frame = pd.read_csv(job / "labels.csv")
    patients = frame.drop_duplicates("case_id").assign(isCancer=["yes", "no"] * 3, site="A")
    patients = patients.rename(columns={"case_id": "PATIENT"})[["PATIENT", "isCancer", "site"]]
    patients.to_csv(tmp_path / "clini.csv", index=False)
    slides = frame.assign(FILENAME=frame["slide_id"].str.replace(".svs", ".h5"))
    slides = slides.rename(columns={"case_id": "PATIENT"})[["PATIENT", "FILENAME"]]
    slides.to_csv(tmp_path / "slide.csv", index=False)
    source = [job / "job", "--cache", tmp_path / "kept", "--labels", tmp_path / "clini.csv"]
    alone = one_line(invoke("inspect", *source))
    assert "'PATIENT', 'isCancer', 'site'" in alone and "with --slide-table" in alone
    pair = [*source, "--slide-table", tmp_path / "slide.csv"]
    assert "with --label." in one_line(invoke("inspect", *pair))
    told = ran("inspect", *pair, "--label", "isCancer", "--positive", "yes")
    assert "classes: yes 6 (positive), no 6 (negative)" in told and "patients: 6" in told
    slides.assign(PATIENT="x").to_csv(tmp_path / "slide.csv", index=False)
    said = one_line(invoke("inspect", *pair, "--label", "isCancer"))
    assert "have no patient in common: 'p0', 'p1'" in said
    twice = pd.concat([patients, patients.assign(isCancer="no")])
    twice.to_csv(tmp_path / "clini.csv", index=False)
    assert "one row per patient" in one_line(invoke("inspect", *pair, "--label", "isCancer"))


def test_a_table_that_is_not_understood_is_answered_in_options(job, tmp_path):
    columns = [f"column {letter}" for letter in "abcdefghij"]
    pd.DataFrame([range(10)], columns=columns).to_csv(tmp_path / "odd.csv", index=False)
    said = one_line(invoke("inspect", job / "job", "--labels", tmp_path / "odd.csv"))
    assert ", ".join(repr(c) for c in columns) in said
    assert "with --slide." in said and "slide=" not in said
    message = "a=1, label/positive=x, 'slide=', with positive='a b', exclude='?' or graph=None."
    assert options.in_options(message) == (
        "a=1, label/positive=x, 'slide=', with --positive 'a b' --exclude '?' or --graph none."
    )


def test_unlabelled_slides_are_left_out_of_the_fit(tmp_path, caplog):
    data = write_table(tmp_path / "own.csv", label=lambda b: b % 2 if b < 12 else None)
    result = invoke("fit", data, "--out", tmp_path / "run", *COUPLED)
    assert result.exit_code == 0
    assert "left out for want of a label: 6 slides" in caplog.text
    assert len(pd.read_csv(tmp_path / "run" / "splits.csv")) == 12


# --- The rest -------------------------------------------------------------------------------------
def test_inspect_says_what_would_be_read(place):
    said = ran("inspect", place / "own.csv")
    assert "18 slides, 162 patches x 4 features" in said
    assert "classes: '1' 9 (positive), '0' 9 (negative)" in said and "patients: 9" in said


def test_doctor_finds_this_installation_healthy():
    said = ran("doctor").splitlines()
    assert all(line.split()[0] in ("PASS", "WARN") for line in said[:-1])
    assert said[-1].endswith("0 FAIL")


def test_doctor_names_the_fix(monkeypatch, tmp_path):
    assert str(doctor.package("numpy", SpecifierSet("<1"))) == (
        f"FAIL numpy {np.__version__} (needs <1). Fix: pip install 'numpy<1'"
    )
    assert doctor.package("no-such-package", SpecifierSet()).grade == doctor.FAIL
    usage = type("Usage", (), {"free": 5})
    monkeypatch.setattr(doctor.shutil, "disk_usage", lambda place: usage)
    assert [f.grade for f in doctor.findings(tmp_path) if "free on the disk" in f.text] == ["WARN"]
    monkeypatch.setattr(doctor, "findings", lambda: [doctor.Finding(doctor.FAIL, "broken")])
    assert invoke("doctor").exit_code == 1


def test_help_lists_the_commands():
    said = ran("--help")
    for command in ("inspect", "fit", "cv", "predict", "evaluate", "doctor"):
        assert command in said
