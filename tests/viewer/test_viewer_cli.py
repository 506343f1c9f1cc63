"""`gpmil view` from the command line: what it prints, refuses, and how it ends."""

import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import numpy as np
import pytest
from oracles.viewer import decode
from typer.testing import CliRunner
from viewer_runs import patches, write_run

pytest.importorskip("fastapi")
pytest.importorskip("httpx")
pytest.importorskip("uvicorn")
from fastapi.testclient import TestClient

from gpmil import extras, load, simulate
from gpmil.cli import app
from gpmil.viewer import serve
from gpmil.viewer.app import build
from gpmil.viewer.cohort import as_json, open_cohort
from gpmil.viewer.security import door


@pytest.fixture
def folder(tmp_path) -> Path:
    return write_run(tmp_path / "run", {"s": patches(9, 1)})


def refused(*arguments) -> str:
    result = CliRunner().invoke(app, ["view", *map(str, arguments)], prog_name="gpmil")
    assert result.exit_code == 2, result.output
    lines = result.output.strip().splitlines()
    assert len(lines) == 1 and lines[0].startswith("gpmil: ")
    return lines[0]


# --- What cannot be shown -------------------------------------------------------------------------
def test_bad_folders_are_said_in_a_line(tmp_path, folder):
    assert "nowhere is no run of gpmil" in refused(tmp_path / "nowhere")
    (tmp_path / "plain").mkdir()
    assert "there is no config.json" in refused(tmp_path / "plain")
    assert "there is no config.json" in refused(folder, tmp_path / "plain")
    (tmp_path / "plain" / "config.json").write_text("{")
    assert "cannot be read as JSON" in refused(tmp_path / "plain")
    (tmp_path / "plain" / "config.json").write_text("[1]")
    assert "does not describe a run" in refused(tmp_path / "plain")
    (tmp_path / "plain" / "config.json").write_text((folder / "config.json").read_text())
    assert "no predictions.csv" in refused(tmp_path / "plain")
    for text, words in (
        ("", "as a whole table"),
        ("slide,other\na,1\n", "no column 'probability'"),
        ("slide,probability\na,many\n", "column 'probability'"),
        ("slide,probability\n", "has no slide"),
    ):
        (tmp_path / "plain" / "predictions.csv").write_text(text)
        assert words in refused(tmp_path / "plain")
    assert "no folder with slides" in refused(folder, "--slides", tmp_path / "nowhere")


def test_bad_options_are_said_in_a_line(folder):
    assert "--port" in refused(folder, "--port", 70000)
    for token in ("a b", "x;y", "é", "a" * 201, "line\nbreak"):
        assert "--token: expected letters" in refused(folder, "--token", token)
    assert "cannot listen on" in refused(folder, "--host", "no.such.host.invalid")
    served = serve.prepare([folder])
    with served.listening:
        port = served.listening.getsockname()[1]
        assert "cannot listen on 127.0.0.1" in refused(folder, "--port", port)


@pytest.mark.parametrize("missing", ["fastapi", "uvicorn"])
def test_a_missing_extra_is_named(folder, monkeypatch, missing):
    real = serve.find_spec
    monkeypatch.setattr(serve, "find_spec", lambda n: None if n == missing else real(n))
    said = refused(folder)
    assert missing in said and extras.install("viewer") in said
    result = CliRunner().invoke(app, ["demo", "--view"], prog_name="gpmil")
    assert (
        result.exit_code == 2 and extras.install("viewer") in result.output
    )  # before anything is computed


def test_the_help_needs_neither_server_nor_torch():
    code = (
        "import sys\nfrom gpmil.cli import app\n"
        "try: app(['view', '--help'], prog_name='gpmil')\nexcept SystemExit: pass\n"
        "bad = {'fastapi', 'uvicorn', 'torch', 'pandas'} & set(sys.modules)\nassert not bad, bad"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


def test_the_viewer_needs_no_torch(folder):
    code = (
        "import sys\nfrom pathlib import Path\nfrom gpmil.viewer import serve\n"
        f"serve.prepare([Path({str(folder)!r})])\nassert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


# --- What is printed and opened -------------------------------------------------------------------
def test_the_browser_is_opened_unless_told_otherwise(folder, monkeypatch):
    opened = []
    monkeypatch.setattr(serve, "open_browser", opened.append)
    monkeypatch.setattr(serve, "run", lambda served, ready: (ready(), served.listening.close()))
    plain = CliRunner().invoke(app, ["view", str(folder)], prog_name="gpmil")
    assert re.match(r"http://127\.0\.0\.1:\d+/  \(Ctrl-C", plain.output)
    assert opened == [plain.output.split()[0]]
    CliRunner().invoke(app, ["view", str(folder), "--no-browser"], prog_name="gpmil")
    assert len(opened) == 1
    asked = ["view", str(folder), "--no-browser", "--host", "0.0.0.0"]
    outside = CliRunner().invoke(app, asked, prog_name="gpmil")
    assert re.match(r"http://\S+:\d+/\?token=[\w-]{24,}  ", outside.stdout)
    given = CliRunner().invoke(app, [*asked, "--token", "abc"], prog_name="gpmil")
    assert "/?token=abc " in given.stdout


def test_demo_can_end_in_the_viewer(monkeypatch, tmp_path):
    from gpmil.cli import demo

    shown, how = [], {}

    def seen(folders, **options):
        shown.extend(folders)
        how.update(options)

    monkeypatch.setattr(demo.viewer, "run", seen)
    for slow, instead in (("_write_maps", []), ("_write_pictures", {}), ("_page", "page")):
        monkeypatch.setattr(demo, slow, lambda *_, instead=instead: instead)
    monkeypatch.setattr("gpmil.cli.demo_models.BUDGET", 3)
    arguments = ["demo", "--view", "--hard", "--bags", "10", "--out", str(tmp_path / "demo")]
    arguments += ["--port", "8123", "--no-browser"]
    result = CliRunner().invoke(app, arguments, prog_name="gpmil")
    assert result.exit_code == 0, result.output
    assert shown == [tmp_path / "demo"] and how == {"port": 8123, "browser": False}
    found = as_json(open_cohort(shown), similar=False)
    assert found["runs"][0]["model"] == "VGPMILPRI" and found["runs"][0]["has_patches"]
    card = found["runs"][0]
    assert card["fitted_coupling"] > 0 and "slide effect" in card["learned"]
    assert card["has_p_values"] and card["rate"] == 0.1
    assert json.loads((tmp_path / "demo" / "config.json").read_text())["hard"] is True
    _is_taught(tmp_path / "demo")


def _is_taught(run):
    """A held-out slide that is marked joins the fit of the demo, and only then."""
    app = build(open_cohort([run]), door("127.0.0.1", None, 8000))
    page = TestClient(app, base_url="http://127.0.0.1:8000")
    state = page.get("/api/marks/0").json()
    assert state["learns"], state["why"]
    found = page.get("/api/cohort").json()["columns"]
    slide = found["label"].index(1)
    before = decode(page.get(f"/api/map/0/{slide}").content)[1]["probability"]
    told = {"slide": slide, "indices": [before.index(max(before))], "label": 1, "window": "w"}
    ours = {"origin": "http://127.0.0.1:8000"}
    assert page.post("/api/marks/0", json=told, headers=ours).status_code == 200
    after = decode(page.get(f"/api/taught/0/{slide}").content)[1]["probability"]
    assert after[told["indices"][0]] > max(before)
    asked = page.get("/api/suggest/0").json()["patches"]
    assert asked and {s["slide"] for s in asked} <= {k for k, y in enumerate(found["label"]) if y}
    saved = page.post("/api/marks/0/save", json={}, headers=ours).json()
    model = load(saved["model"])
    train, test = simulate.demonstration(0, 10, 3, hard=True)
    assert model.cohort_["bags"] == len(model.cross_fit_.labels) == len(train) + 1
    again = model.predict_instances(test[slide]).probability
    np.testing.assert_allclose(again, after, atol=1e-6)
    page.post("/api/marks/0/undo", json={"window": "w"}, headers=ours)
    back = decode(page.get(f"/api/taught/0/{slide}").content)[1]["probability"]
    np.testing.assert_allclose(back, before, atol=1e-5)


# --- A real server --------------------------------------------------------------------------------
@pytest.fixture
def started(folder):
    start = "from gpmil.cli import main; main()"
    command = [sys.executable, "-c", start, "view", str(folder), "--no-browser"]
    quiet = {**os.environ, "PYTHONUNBUFFERED": "1"}
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=quiet
    )
    yield process, process.stdout.readline().split()[0]
    if process.poll() is None:
        process.kill()
    process.communicate()


def test_ctrl_c_ends_it_cleanly(started):
    process, url = started
    for path, status in (("api/health", 200), ("api/map/0/5", 404), ("api/map/0/0", 200)):
        assert _status(url + path) == status
    with urllib.request.urlopen(url + "api/cohort") as answer:
        assert json.load(answer)["columns"]["name"] == ["s"]
        assert "server" not in {k.lower() for k in answer.headers}
    begun = time.monotonic()
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 0 and not err and not out
    assert time.monotonic() - begun < 20  # two seconds for open connections, and a busy machine


def _status(url: str) -> int:
    try:
        with urllib.request.urlopen(url) as answer:
            return answer.status
    except urllib.error.HTTPError as error:
        return error.code
