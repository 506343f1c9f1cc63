"""Teaching in the viewer: marks by its routes, who may send them, what the model makes of them."""

import json
import shutil

import numpy as np
import pandas as pd
import pytest
from command_line import ran, write_table
from oracles.viewer import decode
from viewer_runs import patches, write_run

pytest.importorskip("fastapi")
pytest.importorskip("httpx")
from fastapi.testclient import TestClient

import gpmil
from gpmil.io import with_patch_labels
from gpmil.runs import judge
from gpmil.runs.files import MARKS, read_predictions
from gpmil.viewer import cohort as cohorts
from gpmil.viewer.app import build
from gpmil.viewer.security import LARGEST_BODY, door

HOST = "127.0.0.1:8000"
OURS = {"origin": f"http://{HOST}"}
FIXED = ["--variance", "2.3", "--lengthscale", "1.9", "--mean", "-1.7", "--n-inducing", "12"]


def client(*folders, token=None) -> TestClient:
    app = build(cohorts.open_cohort(list(folders)), door("127.0.0.1", token, 8000))
    return TestClient(app, base_url=f"http://{HOST}")


def marked(page, slide, indices, label, window="w", run=0, **said):
    body = {"slide": slide, "indices": indices, "label": label, "who": "mk", "window": window}
    return page.post(f"/api/marks/{run}", json=body | said, headers=OURS)


def arrays(answer) -> dict[str, np.ndarray]:
    assert answer.status_code == 200, answer.text
    return {name: np.array(values) for name, values in decode(answer.content)[1].items()}


@pytest.fixture
def plain(tmp_path):
    """A run of gpmil predict: marks are kept, and nothing learns."""
    return write_run(tmp_path / "run", {"s": patches(9, 1), "t": patches(4, 2)})


@pytest.fixture(scope="module")
def fitted(tmp_path_factory):
    """A run of gpmil fit, and the table it was fitted to."""
    place = tmp_path_factory.mktemp("teach")
    data = write_table(place / "own.csv")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(judge, "RESAMPLES", 20)
        patch.setattr("gpmil.cli.fit.write_report", lambda folder: None)
        ran("fit", data, "--out", place / "fit", *FIXED, "--coupling", "0.6", "--slide-effect",
            "0.8", "--flags", "--n-folds", "2", "--interval-patches", "0")  # fmt: skip
    return place / "fit"


@pytest.fixture
def run(fitted, tmp_path):
    """A copy of the run; its data are found by the path as it was given."""
    return shutil.copytree(fitted, tmp_path / "fit")


# --- Marks ----------------------------------------------------------------------------------------
def test_marks_are_kept_undone_and_redone(plain):
    page = client(plain)
    empty = page.get("/api/marks/0").json()
    assert empty["marks"] == [] and not empty["can_undo"] and not empty["learns"]
    assert "gpmil predict uses a model that was fitted to other slides" in empty["why"]
    said = marked(page, 0, [4, 5, 4], 0).json()
    assert [(m["slide"], m["index"], m["label"]) for m in said["marks"]] == [(0, 4, 0), (0, 5, 0)]
    assert said["marks"][0]["who"] == "mk" and said["marks"][0]["when"].endswith("Z")
    other = marked(page, 1, [2], 1, "another").json()  # slide t is positive
    assert len(other["marks"]) == 3 and not other["can_redo"]
    back = page.post("/api/marks/0/undo", json={"window": "w"}, headers=OURS).json()
    assert [m["slide"] for m in back["marks"]] == [1] and back["can_redo"]
    again = client(plain).get("/api/marks/0?window=w").json()  # another server, as after a crash
    assert again["marks"] == back["marks"] and again["can_redo"]
    page.post("/api/marks/0/redo", json={"window": "w"}, headers=OURS)
    text = page.get("/api/marks/0/patch_labels.csv").text
    rows = text.splitlines()
    assert rows[0] == "slide,x,y,label,who,when" and len(rows) == 4
    assert page.get("/api/taught/0/0").status_code == 404
    saved = page.post("/api/marks/0/save", json={}, headers=OURS).json()
    assert saved["model"] is None
    assert (plain / "taught" / "patch_labels.csv").read_text() == text


def test_marks_that_cannot_be(plain):
    page = client(plain)
    for answer, words in (
        (marked(page, 0, [1], 1), "slide s is labelled negative"),
        (marked(page, 0, [9], 0), "there is no patch 9"),
        (marked(page, 0, [-1], 0), "there is no patch -1"),
        (marked(page, 0, [], 0), "there is no patch"),
        (marked(page, 0, [1.5], 0), "expected indices"),
        (marked(page, 0, "1", 0), "expected indices"),
        (marked(page, 0, [1], True), "expected a number as label"),
        (marked(page, 0, [1], 2), "expected a label"),
        (marked(page, "0", [1], 0), "expected a number as slide"),
        (marked(page, 0, [1], 0, "w" * 41), "expected a short text"),
        (marked(page, 0, [1], 0, who=7), "expected a short text"),
    ):
        assert answer.status_code == 409 and words in answer.json()["detail"]
    assert marked(page, 7, [1], 0).status_code == 404
    assert marked(page, 0, [1], 0, run=7).status_code == 404
    assert page.post("/api/marks/0", content=b"[1", headers=OURS | {"content-type":
                     "application/json"}).status_code == 404  # fmt: skip
    assert not (plain / MARKS).exists()


def test_marks_of_patches_that_are_gone_are_counted(plain):
    marked(client(plain), 0, [1], 0)
    lines = (plain / MARKS).read_text()
    gone = lines.replace('"s"', '"gone"').replace('{"id":"', '{"id":"0')
    (plain / MARKS).write_text(gone + lines + lines + "{")
    said = client(plain).get("/api/marks/0").json()
    assert [m["index"] for m in said["marks"]] == [1]
    assert "1 marks are of patches that the run has not: 'gone'" in said["note"]
    assert "2 lines of marks.jsonl cannot be read" in said["note"]


# --- Who may write --------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 403),
        ({"origin": "http://evil.example"}, 403),
        ({"origin": "null"}, 403),
        ({"origin": "http://127.0.0.1:9000"}, 403),
        ({"origin": f"http://{HOST}.evil.example"}, 403),
        (OURS | {"sec-fetch-site": "cross-site"}, 403),
        (OURS | {"sec-fetch-site": "same-site"}, 403),
        (OURS | {"content-type": "text/plain"}, 415),
        (OURS | {"content-type": "application/x-www-form-urlencoded"}, 415),
        (OURS | {"host": "evil.example"}, 400),
        ({"origin": "http://evil.example", "host": "evil.example"}, 400),
    ],
)
def test_only_our_page_may_write(plain, headers, status):
    body = json.dumps({"slide": 0, "indices": [1], "label": 0, "who": "", "window": ""})
    sent = {"content-type": "application/json"} | headers
    for path in ("", "/undo", "/redo", "/save"):
        answer = client(plain).post(f"/api/marks/0{path}", content=body, headers=sent)
        assert answer.status_code == status and set(answer.json()) == {"detail"}
        assert "content-security-policy" in answer.headers
    assert not (plain / MARKS).exists() and not (plain / "taught").exists()


def test_writing_needs_the_token_and_an_end(plain):
    page = client(plain, token="right")
    assert marked(page, 0, [1], 0).status_code == 401
    page.get("/?token=right")
    assert marked(page, 0, [1], 0).status_code == 200
    large = b'{"who": "' + b"a" * LARGEST_BODY + b'"}'
    head = OURS | {"content-type": "application/json"}
    assert page.post("/api/marks/0", content=large, headers=head).status_code == 413
    pieces = iter([b"{", b"}"])  # without a stated length
    assert page.post("/api/marks/0", content=pieces, headers=head).status_code == 413
    for method in ("PUT", "DELETE", "PATCH"):
        assert page.request(method, "/api/marks/0", headers=OURS).status_code == 405
    assert page.post("/api/marks/0/other", json={}, headers=OURS).status_code == 405


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("cv", "gpmil cv fits a model for every fold and keeps none"),
        ("predict", "Open the run of its gpmil fit"),
        ("demo", "does not say which slides were simulated"),
        ("evaluate", "a run of gpmil evaluate, without a model"),
    ],
)
def test_runs_that_cannot_be_taught_say_why(tmp_path, command, words):
    folder = write_run(tmp_path / "run", {"s": patches(9, 1)}, command=command)
    card = {"class": "VGPMILPRI", "fitted": {}}
    (folder / "model").mkdir()
    (folder / "model" / "model.json").write_text(json.dumps(card))
    said = client(folder).get("/api/marks/0").json()
    assert not said["learns"] and words in said["why"]


# --- Learning -------------------------------------------------------------------------------------
def test_the_map_answers_as_an_update_in_python_does(run):
    page = client(run)
    table = read_predictions(run)
    names = page.get("/api/cohort").json()["columns"]["name"]
    slide = names.index(table["slide"][table["label"] == 1].iloc[0])
    start = page.get("/api/marks/0").json()
    assert start["learns"], start["why"]
    before = arrays(page.get(f"/api/map/0/{slide}"))
    order = np.argsort(before["probability"])
    highest, negative = int(order[-1]), [int(order[0]), int(order[1])]
    marked(page, slide, [highest], 1)
    marked(page, slide, negative, 0)
    answer = page.get(f"/api/taught/0/{slide}")
    after = arrays(answer)
    assert after["probability"][highest] > before["probability"][highest]
    assert "p_value" not in after and answer.headers["x-gpmil-version"] == "2"
    card = json.loads((run / "config.json").read_text())
    bags = gpmil.read(card["options"]["source"]["data"])
    saved = page.post("/api/marks/0/save", json={}, headers=OURS).json()
    taught = with_patch_labels(bags, saved["labels"])
    model = gpmil.load(run / "model").update(taught)
    own = bags.names.tolist().index(names[slide])
    expected = model.predict_instances(bags[own]).probability
    np.testing.assert_allclose(after["probability"], expected, atol=1e-6)
    loaded = gpmil.load(saved["model"])
    assert loaded.predict_instances(bags[own]).p_value is not None  # cross-fitted again
    np.testing.assert_allclose(loaded.predict_instances(bags[own]).probability, expected, atol=1e-6)
    asked = page.get("/api/suggest/0").json()["patches"]
    assert 2 <= len(asked) <= 6 and len({s["slide"] for s in asked}) == len(asked)
    positive = set(table["slide"][table["label"] == 1])
    assert all(names[s["slide"]] in positive for s in asked)
    shown = float(answer.headers["x-gpmil-probability"])
    np.testing.assert_allclose(shown, loaded.predict_proba(bags[own])[0, 1], atol=1e-6)
    for _ in range(2):
        page.post("/api/marks/0/undo", json={"window": "w"}, headers=OURS)
    back = arrays(page.get(f"/api/taught/0/{slide}"))
    np.testing.assert_allclose(back["probability"], before["probability"], atol=1e-6)


def test_data_that_have_changed_are_not_learned_from(run, tmp_path):
    card = json.loads((run / "config.json").read_text())
    moved = tmp_path / "moved.csv"
    frame = pd.read_csv(card["options"]["source"]["data"])
    frame.iloc[0, frame.columns.get_loc(frame.columns[-1])] += 1.0
    frame.to_csv(moved, index=False)
    card["options"]["source"]["data"] = str(moved)
    (run / "config.json").write_text(json.dumps(card))
    page = client(run)
    assert page.get("/api/marks/0").json()["learns"]
    answer = page.get("/api/taught/0/0")
    assert answer.status_code == 404 and "has changed since the fit" in answer.json()["detail"]
    said = page.get("/api/marks/0").json()
    assert not said["learns"] and "Fit again" in said["why"]
    moved.unlink()
    assert "nothing at" in client(run).get("/api/marks/0").json()["why"]
