"""Every route of the viewer against the files of the run, digit by digit."""

import csv
import gzip
import io
import json
import logging
import shutil

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st
from oracles.viewer import decode, nearest, roc_points
from PIL import Image
from viewer_runs import NASTY, patches, with_grades, write_grades, write_run

from gpmil import __version__
from gpmil.files.whole import json_bytes
from gpmil.runs import files, judge
from gpmil.runs.files import LEVEL, METRICS, PREDICTIONS, patch_file, read_predictions
from gpmil.runs.judge import judge_run
from gpmil.show.layers import scale_top

pytest.importorskip("fastapi")
pytest.importorskip("httpx")
from fastapi.testclient import TestClient

from gpmil.viewer import cohort as cohorts
from gpmil.viewer import maps
from gpmil.viewer.app import build
from gpmil.viewer.security import door
from gpmil.viewer.store import Store

NAMES = ["a", "b/c", NASTY, "no patches", "../../etc/passwd"]


def client(*folders, slides=None) -> TestClient:
    app = build(cohorts.open_cohort(list(folders), slides), door("127.0.0.1"))
    return TestClient(app, base_url="http://127.0.0.1:8000")


def tables() -> dict:
    sizes = [30, 12, 7, None, 25]
    made = zip(NAMES, sizes, range(5))
    return {name: None if n is None else patches(n, seed) for name, n, seed in made}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("viewer") / "first"
    return write_run(folder, tables(), steps={"a": 256, "b/c": 256.0, NASTY: [256, 256]})


@pytest.fixture(scope="module")
def several(tmp_path_factory):
    own = dict(list(tables().items())[1:3]) | {"only here": None}
    folder = tmp_path_factory.mktemp("viewer") / "second"
    return write_run(folder, own, seed=8, couplings=("0", "0.7", "1.3"))


@pytest.fixture(scope="module")
def page(run, several):
    return client(run, several)


def texts(file) -> list[dict[str, str]]:
    """Rows of a table as they are written."""
    opened = gzip.open if file.suffix == ".gz" else open
    with opened(file, "rt", encoding="utf-8", newline="") as text:
        return list(csv.DictReader(text))


def numbers(values: list[str]) -> list[float | None]:
    return [float(v) if v else None for v in values]


# --- Cohort ---------------------------------------------------------------------------------------
def test_the_cohort_has_the_numbers_of_the_files(page, run, several):
    found = page.get("/api/cohort").json()
    columns = found["columns"]
    assert columns["name"] == [*NAMES, "only here"]
    assert columns["label"] == [0, 1, 0, 1, 0, 0]
    assert columns["patches"] == [30, 12, 7, None, 25, None]
    assert columns["image"] == [False] * 6
    rows = texts(run / PREDICTIONS)
    assert columns["patient"][:5] == [row["patient"] for row in rows]
    for name in ("probability", "low", "high", "log_odds"):
        assert columns["runs"][0][name] == [*numbers([row[name] for row in rows]), None]
    assert columns["runs"][0]["decision"] == [*(row["decision"] for row in rows), ""]
    assert found["version"] == __version__ and found["title"] == "first, second"
    assert found["positive_class"] == "cancer" and found["labels_known"] is True
    assert found["similar"] is False


def test_several_couplings_have_columns_of_their_own(page, several):
    found = page.get("/api/cohort").json()
    card, columns = found["runs"][1], found["columns"]["runs"][1]
    assert card["couplings"] == ["0", "0.7", "1.3"] and card["fitted_coupling"] == 0.7
    assert card["rate"] == 0.2 and card["level"] == LEVEL == cohorts.LEVEL
    assert card["has_patches"] and card["has_p_values"]
    rows = texts(several / PREDICTIONS)
    for coupling in card["couplings"]:
        own = {r["slide"]: float(r["probability"]) for r in rows if r["coupling"] == coupling}
        expected = [own.get(name) for name in found["columns"]["name"]]
        assert columns["couplings"][coupling]["probability"] == expected
    assert columns["probability"] == columns["couplings"]["0.7"]["probability"]


def test_slides_are_not_called_with_another_coupling_than_that_of_the_fit(tmp_path):
    own = dict(list(tables().items())[1:3])
    own_model = {"class": "VGPMILPRI", "settings": {"coupling": 0.9}}
    folder = write_run(tmp_path / "run", own, couplings=("0", "0.7"), model=own_model)
    found = client(folder).get("/api/cohort").json()
    own = found["columns"]["runs"][0]
    assert set(own["probability"]) == {None} and set(own["decision"]) == {""}
    assert any(p is not None for p in own["couplings"]["0"]["probability"])  # there are maps


def test_evidence_is_there_where_a_model_has_a_slide_context(page, tmp_path):
    folder = write_run(tmp_path / "context", tables())
    split = pd.read_csv(folder / PREDICTIONS, keep_default_na=False)
    split = split.assign(evidence_patches=[0.5, -1, 2, 0, 1], evidence_slide=[1.25, 0, -3, 1, 2])
    split.to_csv(folder / PREDICTIONS, index=False)
    own = client(folder).get("/api/cohort").json()["columns"]["runs"][0]
    assert own["evidence_slide"] == [1.25, 0, -3, 1, 2]
    assert own["evidence_patches"] == [0.5, -1, 2, 0, 1]
    assert "evidence_slide" not in page.get("/api/cohort").json()["columns"]["runs"][0]


def test_of_repeats_the_first_is_shown(tmp_path):
    folder = write_run(tmp_path / "cv", tables(), repeats=3, command="cv")
    rows = texts(folder / PREDICTIONS)
    assert len(rows) == 15
    found = client(folder).get("/api/cohort").json()["columns"]["runs"][0]
    assert found["probability"] == [float(row["probability"]) for row in rows[:5]]
    assert client(folder).get("/api/curves/0").json()["confusion"]["tp"] <= 2


def test_a_run_without_patches_is_listed(tmp_path):
    folder = write_run(tmp_path / "pooling", dict.fromkeys("abc"), labels=False)
    own = client(folder)
    found = own.get("/api/cohort").json()
    assert found["runs"][0]["has_patches"] is False and found["labels_known"] is False
    assert found["columns"]["label"] == [None] * 3
    answer = own.get("/api/map/0/1")
    assert answer.status_code == 404 and "no table of patches for slide 'b'" in answer.text
    assert "no label" in own.get("/api/curves/0").json()["detail"]


def test_equal_names_of_runs_are_told_apart(tmp_path):
    folders = [tmp_path / a / "cv" for a in "pq"] + [tmp_path / "p" / "cv"]
    assert cohorts.unique_names(folders) == ["p/cv", "q/cv", "p/cv (2)"]


def test_grades_of_slides_and_patches_are_told(tmp_path):
    own = {name: None if t is None else with_grades(t, 5) for name, t in tables().items()}
    folder = write_run(tmp_path / "graded", own)
    table = write_grades(folder, NAMES[:4])
    page = client(folder)
    (found,) = page.get("/api/cohort").json()["classes"]
    assert found["word"] == "grade" and found["names"] == ["benign", "3", "4"]
    assert found["call"] == [0, 1, 2, 0, None]  # the last slide is not in the table
    assert found["truth"] == [0, 2, 2, None, None]
    assert found["p"][1] == pytest.approx([0.2, 0.6, 0.2])
    header, arrays = decode(page.get("/api/map/0/1").content)
    assert header["classes"]["colours"] == found["colours"]
    rows = texts(folder / "patches" / patch_file(NAMES[1]))
    assert arrays["class2"] == [float(row["P(4)"]) for row in rows]
    above = [[float(row["P(3)"]) + float(row["P(4)"]), float(row["P(4)"])] for row in rows]
    assert arrays["class_code"] == [sum(p > 0.5 for p in each) for each in above]
    features = page.get("/api/qupath/0/1.geojson").json()["features"]
    said = [f["properties"]["classification"]["name"] for f in features]
    assert said == [found["names"][k] for k in arrays["class_code"]]
    # a table that cannot be read is left out, and the rest is shown
    for odd in (
        "slide,call\na,7\n",
        "slide,call,P(7),P(8)\na,7,,\n",
        "slide,call,P(7),P(8)\na,7,0,0\n",
    ):
        (folder / "grades.csv").write_text(odd)
        assert client(folder).get("/api/cohort").json()["classes"] == [None]
    assert len(table) == 4


# --- Maps -----------------------------------------------------------------------------------------
@pytest.mark.parametrize("slide", [0, 1, 2, 4])
def test_a_map_has_the_numbers_of_the_table(page, run, slide):
    header, arrays = decode(page.get(f"/api/map/0/{slide}").content)
    rows = texts(run / "patches" / patch_file(NAMES[slide]))
    assert header["n"] == len(rows)
    for name in ("x", "y", "probability", "sd", "p_value"):
        assert arrays[name] == [float(row[name]) for row in rows]
    assert arrays["flagged"] == [int(row["flagged"]) for row in rows]
    assert arrays["label"] == [int(row["label"] or -1) for row in rows]
    grid = header["grid"]
    assert header["step"] == [256, 256] and header["side"] == 256
    assert header["anchor"] == "corner"
    for x, column in zip(arrays["x"], arrays["column"]):
        assert x == grid["x0"] + 256 * column
    for y, row in zip(arrays["y"], arrays["row"]):
        assert y == grid["y0"] + 256 * row
    assert grid["columns"] == max(arrays["column"]) + 1
    right, bottom = max(arrays["x"]) + 256, max(arrays["y"]) + 256
    assert header["bounds"] == [grid["x0"], grid["y0"], right, bottom]


def test_a_map_of_another_coupling(page, several):
    shown, first, last = (
        decode(page.get(f"/api/map/1/1{asked}").content)[1]["probability"]
        for asked in ("", "?coupling=0", "?coupling=1.3")
    )
    for c, found in (("0.7", shown), ("0", first), ("1.3", last)):
        file = several / "patches" / f"coupling-{c}" / patch_file("b/c")
        assert found == [float(row["probability"]) for row in texts(file)]
    answer = page.get("/api/map/1/1?coupling=0.5")
    assert answer.status_code == 404
    assert "no coupling '0.5'; it has 0, 0.7, 1.3" in answer.json()["detail"]
    assert page.get("/api/map/0/1?coupling=../..").status_code == 404


@given(
    st.lists(
        st.tuples(*[st.floats(allow_infinity=False, width=64)] * 2, st.sampled_from(["", "0"])),
        min_size=1,
        max_size=20,
    )
)
def test_every_number_is_read_as_python_reads_it(rows):
    cells = [(repr(a), f"{b:.9g}", c) for a, b, c in rows]
    columns = pd.DataFrame(cells, dtype=str).items()
    found = [files._numbers(column, files.Range(), files.Path("s")) for _, column in columns]
    naive = [[float(cell) if cell else float("nan") for cell in row] for row in cells]
    np.testing.assert_array_equal(np.transpose(found), np.array(naive))


@pytest.mark.parametrize(
    ("move", "why"),
    [(100, "one lies off the lattice"), (-256, "two share a cell")],
)
def test_off_the_lattice_there_is_no_grid(tmp_path, move, why):
    table = patches(20, 1)
    table.loc[7, "x"] += move
    folder = write_run(tmp_path / "run", {"s": table}, steps={"s": 256})
    header, arrays = decode(client(folder).get("/api/map/0/0").content)
    assert header["grid"] is None and "column" not in arrays, why
    assert client(folder).get("/api/thumbnail/0/0.png").status_code == 200


def test_steps_sides_and_anchors_of_the_run_count(tmp_path):
    table = patches(30, 2, step=200.0)
    told = {"steps": {"s": [200, 200]}, "sizes": {"s": 260}, "anchor": "centre"}
    folder = write_run(tmp_path / "run", {"s": table}, **told)
    header, _ = decode(client(folder).get("/api/map/0/0").content)
    assert (header["side"], header["step"], header["anchor"]) == (260, [200, 200], "centre")
    assert header["bounds"][:2] == [1000 - 130, 700 - 130]
    shown = write_run(tmp_path / "other", {"s": table})  # nothing is noted: positions show it
    assert decode(client(shown).get("/api/map/0/0").content)[0]["step"] == [200, 200]


def test_few_notes_are_enough(tmp_path):
    own = client(write_run(tmp_path / "run", {"s": patches(30, 2)}, options={}, model={}))
    card = own.get("/api/cohort").json()["runs"][0]
    assert card["fitted_coupling"] is None and card["learned"] is None
    assert decode(own.get("/api/map/0/0").content)[0]["sides"] == [256, 256]
    assert own.get("/api/similar/0/0/0").status_code == 404


@pytest.mark.parametrize(
    "odd",
    [
        {"steps": [256]},
        {"sizes": {"s": "large"}},
        {"sizes": {"s": 1e-300}},
        {"options": None},
        {"options": {"asked": {"rate": "high"}}},
        {"model": "x"},
        {"cache": 3},
        {"command": 7},
    ],
)
def test_odd_notes_are_refused_by_name(odd, tmp_path):
    with pytest.raises(ValueError, match=r"config\.json"):
        client(write_run(tmp_path / "run", {"s": patches(30, 2)}, **odd))


def test_odd_tables_have_maps(tmp_path):
    one = patches(1, 0)
    scattered = patches(9, 1).assign(x=[0, 31, 47, 5, 88, 61, 13, 99, 70.5], y=np.arange(9) * 17)
    chain = patches(5, 2).drop(columns="y")
    empty = patches(3, 3).iloc[:0]
    plain = patches(4, 4, label=False)[["x", "y", "probability"]]
    given = {"one": one, "scattered": scattered, "chain": chain, "empty": empty, "plain": plain}
    own = client(write_run(tmp_path / "run", given))
    for k, table in enumerate(given.values()):
        header, arrays = decode(own.get(f"/api/map/0/{k}").content)
        assert header["n"] == len(table) and header["side"] > 0
        assert arrays["x"] == table["x"].tolist()
        assert own.get(f"/api/thumbnail/0/{k}.png").status_code == 200
    assert set(arrays) == {"x", "y", "probability", "column", "row"}
    unplaced = client(write_run(tmp_path / "2", {"s": plain[["probability"]]}))
    assert "have no x: no map" in unplaced.get("/api/map/0/0").json()["detail"]


def test_a_thumbnail_is_the_map_and_keeps_small_lesions(tmp_path):
    table = patches(200 * 170, 5, side=200, step=10.0).assign(probability=0.02)
    table.loc[200 * 151 + 103, "probability"] = 0.97
    table, small = (t.drop(columns="p_value") for t in (table, patches(6, 6, side=3)))
    own = client(write_run(tmp_path / "run", {"large": table, "small": small}, steps={"large": 10}))
    large, little = (
        np.asarray(Image.open(io.BytesIO(own.get(f"/api/thumbnail/0/{k}.png").content)))
        for k in (0, 1)
    )
    assert max(large.shape) <= 160 and large.shape[2] == 4
    assert (large[..., 0] > 200).sum() == 1  # yellow
    assert little.shape == (2, 3, 4) and (little[..., 3] == 255).all()
    from matplotlib import colormaps

    top = scale_top(small["probability"].to_numpy())
    expected = colormaps["viridis"](small["probability"].to_numpy() / top, bytes=True)
    assert np.abs(little.reshape(6, 4).astype(int) - expected).max() <= 1


def test_a_thumbnail_shows_suspicion_where_there_are_p_values(tmp_path):
    small = patches(6, 6, side=3).assign(p_value=[1.0, 0.5, 0.1, 0.01, 0.001, 0.0001])
    own = client(write_run(tmp_path / "run", {"small": small}))
    content = own.get("/api/thumbnail/0/0.png").content
    red, green, blue, opaque = np.asarray(Image.open(io.BytesIO(content))).reshape(6, 4).T
    assert (opaque == 255).all()
    assert [red[0], green[0], blue[0]] == [230, 232, 235]  # like negative slides: tissue
    assert (np.diff(green[1:].astype(int)) <= 0).all() and green[5] < 10 < red[5]


def test_a_browser_need_not_load_the_same_map_twice(page, run):
    for path in ("/api/map/0/0", "/api/thumbnail/0/0.png"):
        first = page.get(path)
        again = page.get(path, headers={"if-none-match": first.headers["etag"]})
        assert again.status_code == 304 and not again.content
        assert "no-cache" in first.headers["cache-control"]


# --- QuPath, curves -------------------------------------------------------------------------------
@pytest.mark.parametrize("layer", ["all", "flagged"])
def test_geojson_is_what_gpmil_qupath_writes(page, run, tmp_path, monkeypatch, layer):
    from typer.testing import CliRunner

    from gpmil.cli import app

    arguments = ["qupath", str(run), "--slide", NASTY, "--step", "256", "--out"]
    result = CliRunner().invoke(app, [*arguments, str(tmp_path / "out")])
    assert result.exit_code == 0, result.output
    written = next((tmp_path / "out").glob("*.geojson")).read_bytes()
    theirs = json.loads(written)
    monkeypatch.setattr(maps, "PIECE", 3)
    answer = page.get(f"/api/qupath/0/2.geojson?layer={layer}")
    ours = answer.json()
    assert layer == "flagged" or answer.content == written
    if layer == "flagged":
        kept = [f for f in theirs["features"] if _class(f) == "flagged"]
        theirs = theirs | {"features": kept}
    assert ours == theirs and ours["features"]
    said = answer.headers["content-disposition"]
    assert said.startswith("attachment") and "<" not in said and '"' not in said


def _class(feature: dict) -> str:
    return feature["properties"]["classification"]["name"]


def test_layers_that_are_not_there(page, tmp_path):
    assert "no layer 'x'" in page.get("/api/qupath/0/0.geojson?layer=x").json()["detail"]
    plain = {"s": patches(4, 1)[["x", "y", "probability"]]}
    own = client(write_run(tmp_path / "run", plain, units="microns"))
    assert (
        "no flags"
        in client(write_run(tmp_path / "2", plain))
        .get("/api/qupath/0/0.geojson?layer=flagged")
        .json()["detail"]
    )
    assert "microns" in own.get("/api/qupath/0/0.geojson").json()["detail"]


def test_curves_are_of_the_rows_listed(tmp_path):
    folder = write_run(tmp_path / "run", dict.fromkeys(f"s{k}" for k in range(40)))
    found = client(folder).get("/api/curves/0").json()
    rows = texts(folder / PREDICTIONS)
    y, p = [int(r["label"]) for r in rows], [float(r["probability"]) for r in rows]
    roc = found["roc"]
    assert set(zip(roc["fpr"], roc["tpr"])) <= roc_points(y, p)
    assert roc["threshold"][0] is None and set(roc["threshold"][1:]) <= set(p)
    pairs = [(a > b) + (a == b) / 2 for a, u in zip(p, y) if u for b, v in zip(p, y) if not v]
    assert roc["auc"]["value"] == pytest.approx(np.mean(pairs), abs=1e-12)
    assert roc["auc"]["low"] < roc["auc"]["value"] < roc["auc"]["high"]
    for part in found["reliability"]:
        held = [u for u, v in zip(y, p) if part["low"] <= v <= part["high"]]
        assert part["n"] == len(held) and part["share"] == pytest.approx(np.mean(held))
    assert sum(part["n"] for part in found["reliability"]) == 40
    called = [v > 0.5 for v in p]
    assert found["confusion"] == {
        "tp": sum(c and u for c, u in zip(called, y)),
        "fp": sum(c and not u for c, u in zip(called, y)),
        "fn": sum(not c and u for c, u in zip(called, y)),
        "tn": sum(not c and not u for c, u in zip(called, y)),
    }
    assert found["metrics"] is None


def test_labels_given_to_evaluate_are_shown(tmp_path):
    """The viewer said that no slide has a label after gpmil evaluate."""
    folder = write_run(tmp_path / "run", dict.fromkeys(f"s{k}" for k in range(6)), labels=False)
    assert client(folder).get("/api/cohort").json()["labels_known"] is False
    assert client(folder).get("/api/curves/0").status_code == 404
    table = "slide,label,patient\ns0,1,\ns1,0,\ns2,1,\ns3,0,\ns4,,\nother,1,p\n"
    (folder / "labels.csv").write_text(table)
    shown = client(folder).get("/api/cohort").json()
    assert shown["columns"]["label"] == [1, 0, 1, 0, None, None] and shown["labels_known"]
    found = client(folder).get("/api/curves/0").json()
    assert sum(found["confusion"][cell] for cell in ("tp", "fp", "fn", "tn")) == 4
    assert found["patients_known"] is False


def test_metrics_are_those_of_the_run(tmp_path):
    folder = write_run(tmp_path / "run", dict.fromkeys(f"s{k}" for k in range(30)))
    judged = judge_run(folder, read_predictions(folder))
    (folder / METRICS).write_bytes(json_bytes(judged))
    found = client(folder).get("/api/curves/0").json()
    assert found["metrics"] == judged["slides"]["metrics"] and found["patients_known"] is True
    expected = {k: judged["slides"]["metrics"]["auc"][k] for k in ("value", "low", "high")}
    assert found["roc"]["auc"] == expected


# --- What is not there ----------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("/api/map/0/77", "no slide 77: there are 6"),
        ("/api/map/9/0", "no run 9: there are 2"),
        ("/api/map/-1/0", "no run -1"),
        ("/api/map/0/x", "slide: "),
        ("/api/map/0/3", "no table of patches"),
        ("/api/thumbnail/0/3.png", "no table of patches"),
        ("/api/slide/0", "--slides"),
        ("/api/tiles/0.dzi", "no slide file"),
        ("/api/tiles/0_files/3/0_0.jpeg", "no slide file"),
        ("/api/patch/0/0/1.jpg", "no slide file"),
        ("/api/similar/0/0/1", "does not say where its features are"),
        ("/api/similar/0/0/30", "no patch 30: there are 30"),
        ("/api/nothing", "no such page"),
        ("/docs", "no such page"),
        ("/openapi.json", "no such page"),
        ("/redoc", "no such page"),
    ],
)
def test_what_is_not_there_is_said_in_a_line(page, path, words):
    answer = page.get(path)
    assert answer.status_code == 404
    detail = answer.json()["detail"]
    assert words in detail and "\n" not in detail


def test_a_table_that_vanishes_or_is_cut_is_said(tmp_path):
    folder = write_run(tmp_path / "run", {"gone": patches(9, 1), "cut": patches(9, 2)})
    own = client(folder)
    assert own.get("/api/map/0/0").status_code == own.get("/api/map/0/1").status_code == 200
    (folder / "patches" / "gone.csv.gz").unlink()
    cut = folder / "patches" / "cut.csv.gz"
    cut.write_bytes(cut.read_bytes()[:60])
    for k, words in ((0, "no table of patches for slide 'gone'"), (1, "cut.csv.gz cannot be read")):
        for path in (f"map/0/{k}", f"thumbnail/0/{k}.png", f"qupath/0/{k}.geojson"):
            answer = own.get(f"/api/{path}")
            assert answer.status_code == 404 and words in answer.json()["detail"]
    cut.write_bytes(gzip.compress(b"x,y,probability\n1,2\n"))
    assert "as a whole table" in own.get("/api/map/0/1").json()["detail"]
    cut.write_bytes(gzip.compress(b"x,y,probability\n1,2,many\n"))
    assert "in column 'probability': could not convert" in own.get("/api/map/0/1").json()["detail"]


def test_a_run_is_never_written(page, run):
    before = {p: p.stat().st_mtime_ns for p in [run, *run.rglob("*")]}
    for path in ("cohort", "map/0/0", "thumbnail/0/0.png", "qupath/0/0.geojson", "curves/0"):
        assert page.get(f"/api/{path}").status_code == 200
    assert {p: p.stat().st_mtime_ns for p in [run, *run.rglob("*")]} == before


def test_a_fault_of_the_server_is_no_traceback_in_the_browser(run, monkeypatch, caplog):
    app = build(cohorts.open_cohort([run]), door("127.0.0.1"))
    own = TestClient(app, base_url="http://127.0.0.1", raise_server_exceptions=False)

    def broken(*_):
        raise RuntimeError("secret details")

    monkeypatch.setattr(maps, "encode", broken)
    with caplog.at_level(logging.ERROR):
        answer = own.get("/api/map/0/0")
    assert answer.status_code == 500 and "secret" not in answer.text
    assert "content-security-policy" in answer.headers
    assert "could not answer /api/map/0/0" in caplog.text


# --- Cache ----------------------------------------------------------------------------------------
def test_a_store_forgets_what_was_used_longest_ago():
    store: Store[bytes] = Store(10, len)
    made = []

    def make(key: str, size: int) -> bytes:
        return store.get(key, lambda: made.append(key) or bytes(size))

    make("a", 4), make("b", 4), make("a", 4), make("c", 4), make("a", 4), make("b", 4)
    assert made == ["a", "b", "c", "b"] and store.total == 8
    make("large", 50)
    assert store.total == 50 and make("large", 50) and made.count("large") == 1
    with pytest.raises(ZeroDivisionError):
        store.get("x", lambda: 1 // 0)
    assert make("x", 1) == b"\0"


# --- A run that gpmil wrote -----------------------------------------------------------------------
@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A cohort as a table, a fit, and a prediction with two couplings."""
    from typer.testing import CliRunner

    from gpmil.cli import app

    place = tmp_path_factory.mktemp("viewer-real")
    rng = np.random.default_rng(4)
    frames = []
    for b in range(10):
        table = patches(9, b)[["x", "y"]].assign(slide=f"s{b}", label=b % 2)
        shift = 2.3 * (b % 2) * (np.arange(9) < 3)
        columns = {f"f{d}": rng.normal(size=9) + shift for d in range(3)}
        frames.append(table.assign(patient=f"p{b // 2}", **columns))
    pd.concat(frames).to_csv(place / "own.csv", index=False)
    fixed = ["--coupling=0.6", "--variance=2.3", "--lengthscale=1.9", "--mean=-1.7"]
    fixed += ["--slide-effect=0.8"]
    few = ["--interval-patches", "0"]
    fit = ["fit", "own.csv", "--out", "fit", *fixed, "--n-inducing=9", "--flags", *few]
    predict = ["predict", "fit", "own.csv", "--out", "both", "--coupling", "0,0.6", *few]
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(place)
        patch.setattr(judge, "RESAMPLES", 20)
        for command in ("fit", "predict"):
            patch.setattr(f"gpmil.cli.{command}.write_report", lambda folder: None)
        for arguments in (fit, predict):
            result = CliRunner().invoke(app, arguments, prog_name="gpmil")
            assert result.exit_code == 0, result.output
    return place


def test_runs_that_gpmil_wrote_are_shown(place):
    own = client(place / "fit", place / "both")
    found = own.get("/api/cohort").json()
    fit, both = found["runs"]
    assert fit["model"] == both["model"] == "VGPMILPRI"
    assert fit["couplings"] is None and both["couplings"] == ["0", "0.6"]
    assert fit["fitted_coupling"] == both["fitted_coupling"] == 0.6
    every = "variance 2.3, length scale 1.9, prior mean -1.7, coupling 0.6, slide effect 0.8"
    assert fit["learned"] == both["learned"] == every
    assert fit["rate"] == 0.1 and fit["has_p_values"] and fit["has_patches"]
    assert found["columns"]["name"] == [f"s{b}" for b in range(10)]
    assert found["columns"]["patches"] == [9] * 10
    header, arrays = decode(own.get("/api/map/0/3").content)
    rows = texts(place / "fit" / "patches" / "s3.csv.gz")
    assert arrays["p_value"] == [float(row["p_value"]) for row in rows]
    assert header["grid"]["columns"] == 3 and header["step"] == [256, 256]
    metrics = json.loads((place / "fit" / METRICS).read_text())["slides"]["metrics"]
    assert own.get("/api/curves/0").json()["metrics"] == metrics
    patients = json.loads((place / "fit" / METRICS).read_text())["patients"]["metrics"]
    assert own.get("/api/curves/0").json()["patient_metrics"] == patients
    assert own.get("/api/curves/1").status_code == 200
    said = own.get("/api/curves/1?coupling=0")
    assert (
        said.status_code == 404 and "called with the coupling of the fit" in said.json()["detail"]
    )
    assert {None} == set(found["columns"]["runs"][1]["couplings"]["0"]["call"])
    assert {0, 1} == set(found["columns"]["runs"][1]["call"])


def test_patients_are_listed_with_their_slides(place, tmp_path, caplog):
    found = client(place / "fit", place / "both").get("/api/cohort").json()
    own, none = found["patients"]
    assert none is None  # several couplings: maps to compare
    rows = texts(place / "fit" / "patients.csv")
    assert own["name"] == [row["patient"] for row in rows] == [f"p{k}" for k in range(5)]
    assert own["slides"] == [[2 * k, 2 * k + 1] for k in range(5)]
    for name in ("probability", "call", "label"):
        assert own[name] == numbers([row[name] for row in rows])
    # other patients were given to gpmil evaluate: of those nothing was predicted together
    run = shutil.copytree(place / "fit", tmp_path / "fit")
    given = [f"s{b},{b % 2},{'p0' if b < 3 else f'p{b // 2}'}" for b in range(10)]
    (run / "labels.csv").write_text("\n".join(["slide,label,patient", *given]) + "\n")
    (own,) = client(run).get("/api/cohort").json()["patients"]
    assert own["name"] == ["p2", "p3", "p4"] and own["slides"][0] == [4, 5]
    (run / "patients.csv").write_text("patient,slides,probability\np0,2,1.7\n")
    assert client(run).get("/api/cohort").json()["patients"] == [None]
    assert "numbers from 0 to 1" in caplog.text


def test_slides_are_called_as_the_run_calls_them(tmp_path):
    """Not by a probability above one half: the model may have another threshold."""
    folder = write_run(tmp_path / "run", dict.fromkeys(f"s{k}" for k in range(6)))
    table = pd.read_csv(folder / PREDICTIONS, dtype=str, keep_default_na=False)
    table.assign(call=list("110100")).to_csv(folder / PREDICTIONS, index=False)
    page = client(folder)
    assert page.get("/api/cohort").json()["columns"]["runs"][0]["call"] == [1, 1, 0, 1, 0, 0]
    counts = page.get("/api/curves/0").json()["confusion"]  # labels are 0 1 0 1 0 1
    assert counts == {"tp": 2, "fp": 1, "fn": 1, "tn": 2}


def test_similar_patches_of_a_run_that_gpmil_wrote(place):
    own = client(place / "fit", place / "both")  # the data as named, beside the runs
    assert own.get("/api/cohort").json()["similar"] is True
    frame = pd.read_csv(place / "own.csv")
    raw = frame[["f0", "f1", "f2"]].to_numpy()
    z = (raw - raw.mean(axis=0)) / raw.std(axis=0)
    expected = nearest(z, 9 * 3 + 1, list(range(90)), 5)
    for run in (0, 1):  # the second has no model of its own but names the first
        found = own.get(f"/api/similar/3/{run}/1?count=5").json()["patches"]
        assert [9 * p["slide"] + p["index"] for p in found] == [i for i, _ in expected]
        distances = [p["distance"] for p in found]
        np.testing.assert_allclose(distances, [d for _, d in expected], rtol=1e-9)
    apart = own.get("/api/similar/3/0/1?count=80&same_slide=0").json()["patches"]
    assert len(apart) == 80 and all(p["slide"] != 3 for p in apart)


@pytest.mark.parametrize(
    "text",
    ["{", "[]", '{"slides": {"metrics": {"auc": 0.5}}}', '{"slides": {"metrics": [1]}}',
     '{"slides": {"metrics": {"auc": {"value": "high"}}}}', "[" * 100_000, '{"slides": null}',
     '{"slides": {"metrics": {"auc": {"value": 1e999}}}}'],
    ids=range(8),
)  # fmt: skip
def test_damaged_metrics_are_said_not_served(text, tmp_path):
    folder = write_run(tmp_path / "run", {"a": patches(9, 1), "b": patches(9, 2)})
    (folder / "metrics.json").write_text(text)
    answer = client(folder).get("/api/curves/0")
    assert answer.status_code == 404 and "metrics.json" in answer.json()["detail"]


def test_probabilities_out_of_range_are_said(tmp_path):
    odd = patches(9, 1).assign(probability=1.5)
    folder = write_run(tmp_path / "run", {"a": odd, "b": patches(9, 2)})
    answer = client(folder).get("/api/map/0/0")
    assert answer.status_code == 404
    assert "column 'probability', found 1.5" in answer.json()["detail"]
