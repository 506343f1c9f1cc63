"""Runs as folders: interrupted and continued, refused and replaced; tables and metrics."""

import gzip
import hashlib
import json
import logging
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import gpmil
from gpmil.decide import metrics
from gpmil.models.base import log_odds
from gpmil.runs import judge
from gpmil.runs.data_card import data_card, fingerprint, steps
from gpmil.runs.files import (
    PREDICTIONS,
    patch_file,
    read_metrics,
    read_patches,
    read_predictions,
    slide_name,
)
from gpmil.runs.judge import estimate_of, judge_run
from gpmil.runs.predict import (
    PredictionOptions,
    batches,
    predict,
    predict_in_batches,
    refer_rule,
    with_coupling,
)
from gpmil.runs.workspace import UNITS, csv_bytes, workspace

CONFIG = {"command": "cv", "options": {"folds": 3}}
FIXED = {"variance": 2.3, "lengthscale": 1.7, "mean": -1.1, "n_inducing": 12}
PLAIN = PredictionOptions(interval_patches=0)  # intervals take long
ROWS = pd.DataFrame({"slide": ["a"], "patient": [""], "probability": [0.25]})


def names(folder: Path) -> set[str]:
    return {p.name for p in folder.iterdir()}


@pytest.fixture(scope="module")
def model(cohort):
    return gpmil.VGPMILPRI(coupling=0.6, random_state=0, **FIXED).fit(cohort)


# --- The folder -----------------------------------------------------------------------------------
def test_a_run_gets_its_name_when_it_is_complete(tmp_path):
    out = tmp_path / "run"
    with workspace(out, CONFIG) as space:
        assert not out.exists() and names(tmp_path) == {"run.partial"}
        assert json.loads((space.folder / "config.json").read_text())["options"] == {"folds": 3}
        space.finish("one", ROWS)
        space.write("predictions.csv", b"x\n")
    assert names(tmp_path) == {"run"}
    assert names(out) == {"config.json", "log.txt", "predictions.csv"}
    card = json.loads((out / "config.json").read_text())
    assert card["files"] == ["config.json", "log.txt", "predictions.csv"]


def test_a_failure_without_a_finished_part_leaves_nothing(tmp_path):
    with pytest.raises(ZeroDivisionError), workspace(tmp_path / "run", CONFIG) as space:
        space.write("patches/a.csv.gz", b"")
        raise ZeroDivisionError
    assert names(tmp_path) == set()


def test_finished_parts_are_kept_and_found_again(tmp_path, caplog):
    out = tmp_path / "run"
    with pytest.raises(KeyboardInterrupt), workspace(out, CONFIG) as space:
        space.finish("one", ROWS)
        (space.folder / ".model.x1").mkdir()  # as a kill leaves it
        (space.folder / UNITS / ".two.csv.new").write_text("half")
        raise KeyboardInterrupt
    assert "the same command continues" in caplog.text
    with workspace(out, CONFIG) as space:
        assert space.done("one") and not space.done("two")
        assert names(space.folder / UNITS) == {"one.csv"}
        space.finish("two", ROWS.assign(slide="NA"))
        assert space.pooled(["two", "one"])["slide"].tolist() == ["NA", "a"]
    assert names(tmp_path) == {"run"} and names(out) == {"config.json", "log.txt"}


def test_numbers_are_pooled_as_they_were_written(tmp_path):
    with workspace(tmp_path / "run", CONFIG) as space:
        space.finish("one", ROWS.assign(probability=1 / 3))
        assert space.pooled(["one"])["probability"].tolist() == ["0.333333333"]


def leave_partial(out: Path, config=CONFIG) -> None:
    with pytest.raises(KeyboardInterrupt), workspace(out, config) as space:
        space.finish("one", ROWS)
        raise KeyboardInterrupt


def test_parts_of_another_configuration_are_refused(tmp_path):
    leave_partial(tmp_path / "run")
    other = {"command": "cv", "options": {"folds": 4}}
    found = pytest.raises(ValueError, match=r"folds: 3 there, 4 here.*delete or rename")
    with found, workspace(tmp_path / "run", other):
        pass
    assert (tmp_path / "run.partial" / UNITS / "one.csv").is_file()


def test_another_cache_continues_the_run(tmp_path):
    leave_partial(tmp_path / "run", CONFIG | {"cache": "here"})
    with workspace(tmp_path / "run", CONFIG | {"cache": "there"}) as space:
        assert space.done("one")
    assert json.loads((tmp_path / "run" / "config.json").read_text())["cache"] == "there"


@pytest.mark.parametrize("content", ["thesis.tex", "config.json"])
def test_a_foreign_partial_folder_is_refused_and_stays(tmp_path, content):
    (tmp_path / "run.partial").mkdir()
    (tmp_path / "run.partial" / content).write_text("{}")
    found = pytest.raises(ValueError, match=r"not written by gpmil|does not describe a run")
    with found, workspace(tmp_path / "run", CONFIG):
        pass
    assert names(tmp_path / "run.partial") == {content}


def test_an_earlier_run_of_the_same_command_is_replaced(tmp_path):
    out = tmp_path / "run"
    for folds in (3, 4):
        with workspace(out, {"command": "cv", "options": {"folds": folds}}) as space:
            space.write(f"{folds}.txt", b"")
    assert names(out) == {"config.json", "log.txt", "4.txt"} and names(tmp_path) == {"run"}


def test_a_run_of_another_command_is_not_replaced(tmp_path):
    with workspace(tmp_path / "run", CONFIG):
        pass
    found = pytest.raises(ValueError, match="holds a run of gpmil cv, which gpmil fit does not")
    with found, workspace(tmp_path / "run", {"command": "fit"}):
        pass


def test_files_that_gpmil_did_not_write_are_kept(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "thesis.tex").write_text("years of work")
    found = pytest.raises(ValueError, match=r"thesis\.tex")
    with found, workspace(tmp_path / "run", CONFIG):
        pass
    assert names(tmp_path) == {"run"}


def test_two_processes_do_not_assemble_the_same_run(tmp_path):
    with workspace(tmp_path / "run", CONFIG) as space:
        space.finish("one", ROWS)
        again = pytest.raises(ValueError, match="being written by another gpmil")
        with again, workspace(tmp_path / "run", CONFIG):
            pass
        assert space.done("one")
    assert names(tmp_path) == {"run"}


def test_a_full_disk_leaves_no_half_written_file(tmp_path, monkeypatch):
    def full(self, content):
        with self.open("wb") as file:
            file.write(content[: len(content) // 2])
        raise OSError(28, "No space left on device")

    out = tmp_path / "run"
    with pytest.raises(OSError, match="No space"), workspace(out, CONFIG) as space:
        space.finish("one", ROWS)
        monkeypatch.setattr(Path, "write_bytes", full)
        space.write("predictions.csv", b"0123456789")
    monkeypatch.undo()
    assert not out.exists()
    with workspace(out, CONFIG) as space:
        assert space.done("one") and not (space.folder / "predictions.csv").exists()


def test_the_log_is_the_place_for_messages(tmp_path, caplog):
    with workspace(tmp_path / "run", CONFIG):
        logging.getLogger("gpmil").info("said in passing")
    assert "said in passing" in (tmp_path / "run" / "log.txt").read_text()
    level = logging.getLogger("gpmil").level
    assert level in (logging.NOTSET, logging.WARNING)


# --- What a run was made of -----------------------------------------------------------------------
def test_the_fingerprint_sees_every_part(slides, cohort):
    def of(**changed):
        return fingerprint(gpmil.Bags.from_arrays(**{**slides, "step": 256, **changed}))

    same = of()
    assert same == fingerprint(cohort)
    moved = [np.add(c, (256, 0)) for c in slides["coords"]]
    others = [
        of(labels=[1 - y for y in slides["labels"]]),
        of(coords=moved),
        of(names=[f"x{n}" for n in slides["names"]]),
        of(groups=None),
        of(arrays=[a + 1e-9 for a in slides["arrays"]]),
        of(instance_labels=None),
    ]
    assert len({same, *others}) == 7


def test_a_run_of_an_earlier_version_is_known_by_its_own_fingerprint(cohort):
    parts = [cohort.features.tobytes()]
    parts += [json.dumps([str(w) for w in v]).encode() for v in (cohort.names, cohort.groups)]
    columns = ("offsets", "labels", "instance_labels", "coords", "step")
    parts += [getattr(cohort, name).tobytes() for name in columns]
    parts += [getattr(cohort.adjacency, name).tobytes() for name in ("indptr", "indices", "data")]
    noted = hashlib.blake2b(b"".join(parts), digest_size=16).hexdigest()
    before = {"data": {"fingerprint": noted}}
    assert data_card(cohort, before)["fingerprint"] == noted
    now = data_card(cohort)
    assert now["fingerprint"] == fingerprint(cohort) != noted
    assert data_card(cohort, {"data": now})["fingerprint"] == fingerprint(cohort)


def test_steps_are_numbers_or_pairs(slides):
    bags = gpmil.Bags.from_arrays(**slides, step=256)
    assert steps(bags) == dict.fromkeys(slides["names"], 256.0)
    oblong = gpmil.Bags.from_arrays(**slides, step=(256, 512))
    assert steps(oblong)["slide00"] == [256.0, 512.0]
    assert steps(gpmil.Bags.from_arrays(slides["arrays"])) == {}


@settings(max_examples=40, deadline=None)
@given(
    st.text(min_size=1, max_size=40).filter(lambda t: not any(0xD800 <= ord(c) < 0xE000 for c in t))
)
def test_any_slide_has_a_file_of_its_own(name):
    file = patch_file(name)
    assert "/" not in file and "\\" not in file and not file.startswith(".") and "\0" not in file
    assert slide_name(Path("patches") / file) == name


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(1, 50), max_size=30), st.integers(1, 60))
def test_batches_are_all_slides_in_order(sizes, most):
    found = list(batches(np.array(sizes, dtype=np.int64), most))
    assert [int(b) for part in found for b in part] == list(range(len(sizes)))
    for part in found:
        assert len(part) == 1 or sum(sizes[b] for b in part) <= most


# --- Predictions ----------------------------------------------------------------------------------
def test_rows_are_what_the_model_says(model, cohort):
    cohort = cohort[:9]
    rows, tables = predict(model, cohort, PredictionOptions(), None)
    assert list(rows) == [
        "slide",
        "patient",
        "probability",
        "low",
        "high",
        "log_odds",
        "novelty",
        "call",
        "decision",
        "label",
    ]
    np.testing.assert_allclose(rows["probability"], model.predict_proba(cohort)[:, 1], rtol=1e-9)
    np.testing.assert_allclose(rows["log_odds"], model.decision_function(cohort), rtol=1e-9)
    low, high = model.predict_interval(cohort, level=0.9)
    np.testing.assert_allclose(rows[["low", "high"]], np.c_[low, high], rtol=1e-6)
    assert rows["label"].tolist() == [str(y) for y in cohort.labels]
    assert rows["patient"].tolist() == cohort.groups.tolist()
    whole = pd.concat(tables)
    expected = model.predict_instances(cohort)
    assert list(whole) == ["x", "y", "probability", "sd", "doubt", "novelty", "label"]
    np.testing.assert_allclose(whole["probability"], expected.probability, rtol=1e-9)
    np.testing.assert_allclose(whole["sd"], expected.std, rtol=1e-9)
    np.testing.assert_array_equal(whole[["x", "y"]], cohort.coords)


def test_larger_slides_than_asked_get_no_interval(model, cohort):
    cohort = cohort[:6]
    rows, _ = predict(model, cohort, PredictionOptions(interval_patches=6), None)
    assert (rows["low"].isna() == (cohort.sizes > 6)).all() and (cohort.sizes > 6).any()
    rows, _ = predict(model, cohort, PredictionOptions(), None)
    assert rows[["low", "high"]].notna().all().all()


def test_calibrated_models_decide_and_flag(cohort):
    model = gpmil.VGPMILPRI(
        coupling=0.6, calibrated=True, flags=True, n_folds=2, random_state=0, **FIXED
    ).fit(cohort)
    rule = refer_rule(model, 0.3)
    asked = PredictionOptions(rate=0.23, interval_patches=0)
    rows, tables = predict(model, cohort, asked, rule)
    accepted = rule.decide(model.predict_proba(cohort)[:, 1], model.predict_novelty(cohort))
    assert (rows["decision"] == np.where(accepted, "accept", "refer")).all()
    np.testing.assert_allclose(rows["log_odds"], model.decision_function(cohort), rtol=1e-8)
    expected = model.predict_instances(cohort, rate=0.23)
    whole = pd.concat(tables)
    names = ["x", "y", "probability", "sd", "p_value", "flagged", "doubt", "novelty", "label"]
    assert list(whole) == names
    np.testing.assert_allclose(whole["p_value"], expected.p_value)
    np.testing.assert_array_equal(whole["flagged"], expected.flagged.astype(int))
    # What was calibrated at one coupling does not hold at another.
    other = with_coupling(model, 2.5)
    assert other.cross_fit_ is None and model.cross_fit_ is not None
    assert refer_rule(other, 0.3) is None
    assert with_coupling(model, 0.6).cross_fit_ is model.cross_fit_


def test_another_coupling_is_that_of_the_copy_alone(model, cohort):
    before = model.predict_proba(cohort)
    other = with_coupling(model, 3.7)
    by_hand = gpmil.VGPMILPRI()
    by_hand.__dict__.update(model.__dict__ | {"coupling_": 3.7})
    np.testing.assert_array_equal(other.predict_proba(cohort), by_hand.predict_proba(cohort))
    np.testing.assert_array_equal(model.predict_proba(cohort), before)
    for bad in (-1.0, np.nan, np.inf):
        with pytest.raises(ValueError, match="coupling must be"):
            with_coupling(model, bad)
    with pytest.raises(ValueError, match="has no coupling"):
        with_coupling(gpmil.MeanPoolMIL(), 1.0)


def test_a_model_without_patches_has_slides_only(cohort):
    model = gpmil.MeanPoolMIL(max_epochs=1, random_state=0).fit(cohort)
    rows, tables = predict(model, cohort, PredictionOptions(), None)
    assert tables == [] and rows["low"].isna().all()
    np.testing.assert_allclose(rows["probability"], model.predict_proba(cohort)[:, 1], rtol=1e-9)


def test_every_other_model_has_patches(cohort):
    models = [
        gpmil.MaxPoolMIL(max_epochs=1, random_state=0),
        gpmil.PseudoLabelMIL(n_rounds=1, random_state=0),
        gpmil.VGPMIL(n_inducing=8, max_iter=3, random_state=0),
    ]
    for model in models:
        rows, tables = predict(model.fit(cohort), cohort, PredictionOptions(), None)
        np.testing.assert_allclose(rows["log_odds"], model.decision_function(cohort), rtol=1e-6)
        assert len(tables) == len(cohort)


def test_unlabelled_slides_and_patches_have_empty_cells(model, slides):
    truth = [None, *slides["instance_labels"][1:]]
    labels = [-1, *slides["labels"][1:]]
    changed = slides | {"labels": labels, "instance_labels": truth, "groups": None}
    rows, tables = predict(model, gpmil.Bags.from_arrays(**changed), PLAIN, None)
    assert rows["label"][0] == "" and (rows["patient"] == "").all()
    assert "label" not in tables[0] and "label" in tables[1]


# --- Metrics --------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def written(tmp_path_factory, model, cohort):
    """A finished run of a cohort that the model was fitted on."""
    out = tmp_path_factory.mktemp("runs") / "run"
    with workspace(out, {"command": "predict"}) as space:
        units = predict_in_batches(
            space, model, cohort, PredictionOptions(batch=40, interval_patches=0), print
        )
        assert len(units) > 2
        space.write(PREDICTIONS, csv_bytes(space.pooled(units)))
    return out


def test_batches_say_what_the_whole_cohort_does(written, model, cohort):
    table = read_predictions(written)
    assert table["slide"].tolist() == cohort.names.tolist()
    np.testing.assert_allclose(table["probability"], model.predict_proba(cohort)[:, 1], rtol=1e-8)
    np.testing.assert_allclose(table["log_odds"], log_odds(model.log_proba_negative(cohort)[0]))


def test_metrics_are_those_of_the_files(written, cohort, monkeypatch):
    monkeypatch.setattr(judge, "RESAMPLES", 30)
    table = read_predictions(written)
    found = judge_run(written, table)
    p = table["probability"].to_numpy()
    expected = metrics.bag_metrics(cohort.labels, p, groups=cohort.groups, n_bootstrap=30)
    assert found["slides"]["metrics"].keys() == expected.keys()
    for name, estimate in expected.items():
        assert str(estimate_of(found["slides"]["metrics"][name])) == str(estimate)
        assert found["slides"]["metrics"][name]["value"] == estimate.value
    scores = [read_patches(written / "patches" / f"{n}.csv.gz") for n in cohort.names]
    score = pd.concat(scores)["probability"].to_numpy()
    truth = cohort.instance_labels, score, cohort.bag_index
    patches = metrics.patch_metrics(*truth, groups=cohort.groups, n_bootstrap=30)
    for name, estimate in patches.items():
        assert found["patches"]["metrics"][name]["value"] == estimate.value
        assert found["patches"]["metrics"][name]["low"] == estimate.low
    assert found["slides"]["patients"] == len(set(cohort.groups))
    assert found["slides"]["intervals_by"] == "patient"
    json.dumps(found, allow_nan=False)


def test_without_labels_there_are_no_metrics(written):
    table = read_predictions(written)
    unknown = lambda slide, patches: np.full(len(patches), np.nan)  # noqa: E731
    assert judge_run(written, table.assign(label=np.nan), unknown) == {}


def test_slides_without_a_patient_are_resampled_on_their_own(written, monkeypatch):
    monkeypatch.setattr(judge, "RESAMPLES", 10)
    table = read_predictions(written).assign(patient="")
    found = judge_run(written, table)["slides"]
    assert (found["patients"], found["intervals_by"]) == (None, "slide")
    assert found["metrics"]["brier"]["n"] == len(table)


def test_undefined_metrics_are_null(written, monkeypatch):
    monkeypatch.setattr(judge, "RESAMPLES", 10)
    table = read_predictions(written)
    found = judge_run(written, table[table["label"] == 1])
    assert found["slides"]["metrics"]["auc"]["value"] is None
    json.dumps(found, allow_nan=False)


def test_compressed_tables_carry_no_time(written):
    for path in (written / "patches").iterdir():
        raw = path.read_bytes()
        assert raw[4:8] == b"\0\0\0\0" and raw == gzip.compress(gzip.decompress(raw), mtime=0)


def test_a_broken_table_is_named(written, tmp_path):
    whole = next((written / "patches").iterdir()).read_bytes()
    broken = tmp_path / "s.csv.gz"
    broken.write_bytes(whole[:-20])
    with pytest.raises(ValueError, match=r"s\.csv\.gz cannot be read as a whole table"):
        read_patches(broken)
    with pytest.raises(ValueError, match=r"has no predictions\.csv"):
        read_predictions(tmp_path)


# --- Damaged files of a run -----------------------------------------------------------------------
HEAD = "slide,patient,probability,low,high,log_odds,decision,label"
GOOD = "a,p,0.25,0.1,0.4,-1.1,,0"


@pytest.mark.parametrize(
    ("text", "telling"),
    [
        (f"{HEAD}\n{GOOD},9\n", "row 2 has 9 cells, the header 8"),
        (f"{HEAD}\n{GOOD}\na,p\n", "row 3 has 2 cells"),
        (f"{HEAD},slide\n{GOOD},b\n", "several columns 'slide'"),
        (f"{HEAD}\n{GOOD}\n{GOOD}\n", "slide 'a' is in several rows"),
        (f"{HEAD}\n,{GOOD[2:]}\n", "row 2 names no slide"),
        (
            f"{HEAD}\n{GOOD}".replace("0.25", "nan"),
            "from 0 to 1 in column 'probability', found none",
        ),
        (f"{HEAD}\n{GOOD}".replace("0.25", "1.5"), "column 'probability', found 1.5 in row 2"),
        (f"{HEAD}\n{GOOD}".replace("0.25", "9" * 400), "column 'probability', found inf"),
        (f"{HEAD}\n{GOOD}".replace("0.4,", "-inf,"), "column 'high'"),
        (f"{HEAD}\n{GOOD[:-1]}2", "expected numbers among 0, 1 in column 'label', found 2"),
        (f"{HEAD}\n{GOOD}".replace(",,", ",maybe,"), "accept, refer or nothing"),
        (f"{HEAD},repeat\n{GOOD},../../x\n", "column 'repeat', found '../../x'"),
        (f"{HEAD},coupling\n{GOOD},nan\n", "column 'coupling', found 'nan'"),
        (
            f"{HEAD},coupling\n{GOOD},0\n{GOOD},1\nb{GOOD[1:]},1\n",
            "every slide with every coupling, found 1 with fewer, 'b' first",
        ),
        (HEAD.replace("high", "top") + f"\n{GOOD}", "'low' and 'high' alone"),
        (HEAD.replace("decision", "d") + f"\n{GOOD}", "no column 'decision'"),
    ],
)
def test_predictions_that_cannot_be_are_refused(text, telling, tmp_path):
    (tmp_path / "predictions.csv").write_text(text)
    with pytest.raises(ValueError, match=r"predictions\.csv") as caught:
        read_predictions(tmp_path)
    assert telling in str(caught.value)


@pytest.mark.parametrize(
    ("body", "telling"),
    [
        ("x,y,probability\n1,2,0.5,7\n", "as a whole table of patches"),
        ("x,y,probability\n1,2,-0.1\n", "column 'probability', found -0.1"),
        ("x,y,probability\n1,2,\n", "column 'probability', found none"),
        ("x,y,probability\n1e300,2,0.5\n", "column 'x'"),
        ("x,y,probability,sd\n1,2,0.5,-1\n", "column 'sd'"),
        ("x,y,probability,p_value\n1,2,0.5,3\n", "column 'p_value'"),
        ("x,y,probability,label\n1,2,0.5,4\n", "column 'label'"),
    ],
)
def test_patches_that_cannot_be_are_refused(body, telling, tmp_path):
    file = tmp_path / "s.csv.gz"
    file.write_bytes(gzip.compress(body.encode()))
    with pytest.raises(ValueError, match=r"s\.csv\.gz") as caught:
        read_patches(file)
    assert telling in str(caught.value)


def test_bytes_that_only_zlib_knows_are_refused(tmp_path):
    raw = bytearray(gzip.compress(b"x,y,probability\n" + b"1,2,0.5\n" * 500))
    raw[30:40] = b"\xff" * 10
    (tmp_path / "s.csv.gz").write_bytes(raw)
    with pytest.raises(ValueError, match=r"s\.csv\.gz cannot be read as a whole table"):
        read_patches(tmp_path / "s.csv.gz")


@pytest.mark.parametrize(
    "text",
    ["[1]", '{"slides": 3}', '{"slides": {"metrics": {"auc": 1}}}', '{"couplings": {"0": 7}}',
     '{"slides": {"metrics": {"auc": {"value": NaN}}}}', '{"slides": {}, "slides": {}}', "{",
     '{"patches": {"metrics": {}}}', '{"training": 5}'],
)  # fmt: skip
def test_metrics_that_cannot_be_are_refused(text, tmp_path):
    (tmp_path / "metrics.json").write_text(text)
    with pytest.raises(ValueError, match=r"metrics\.json"):
        read_metrics(tmp_path / "metrics.json")


def test_a_finished_part_that_was_damaged_is_named(tmp_path):
    out = tmp_path / "run"
    leave_partial(out)
    (tmp_path / "run.partial" / UNITS / "one.csv").write_text("slide\na,b,c\n")
    with pytest.raises(ValueError, match=r"one\.csv"), workspace(out, CONFIG) as space:
        space.pooled(["one"])


def test_a_table_of_patches_without_probabilities_is_named(tmp_path):
    run = tmp_path / "run"
    (run / "patches").mkdir(parents=True)
    table = pd.DataFrame({"x": [0.0], "y": [0.0], "label": ["1"]})
    table.to_csv(run / "patches" / "s.csv.gz", index=False)
    rows = pd.DataFrame(
        {"slide": ["s"], "patient": [""], "probability": [0.5], "decision": [""], "label": [1.0]}
    )
    with pytest.raises(ValueError, match=r"s\.csv\.gz has no column 'probability'"):
        judge_run(run, rows)
