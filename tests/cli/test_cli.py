"""The command line: the demonstration from end to end, and one line for every mistake."""

import gzip
import inspect
import io
import json
import shlex
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated

import numpy as np
import pandas as pd
import pytest
import typer
from typer.testing import CliRunner

import gpmil
from gpmil import extras
from gpmil.cli import app, demo, doctor, options
from gpmil.models.base import log_odds

RUN = [sys.executable, "-c", "from gpmil.cli import main; main()"]
SMALL = ["--bags", "10", "--seed", "3"]


def invoke(*arguments: str):
    return CliRunner().invoke(app, list(arguments), prog_name="gpmil")


def contents(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


@pytest.fixture(scope="module")
def ran(tmp_path_factory) -> tuple[Path, str]:
    """A small demonstration: its folder, and what it said."""
    out = tmp_path_factory.mktemp("cli") / "demo"
    result = invoke("demo", "--out", str(out), *SMALL)
    assert result.exit_code == 0, result.output
    return out, result.stdout


# --- gpmil demo -----------------------------------------------------------------------------------
def test_demo_says_what_it_found_and_where(ran):
    out, said = ran
    words = ("Held-out slides", "log loss", "avg. precision", "F1 at 0.5", "not a medical")
    words += ("slide effect", "patches are marked", "Calibration", "Learning is behind in")
    for text in words:
        assert text in " ".join(said.split())
    assert str(out / "report.html") in said.replace("\n", "")


def test_demo_writes_every_file(ran):
    out, _ = ran
    assert sorted(p.name for p in out.iterdir()) == [
        "config.json",
        "heatmaps",
        "metrics.json",
        "model",
        "overview.png",
        "patches",
        "pictures",
        "predictions.csv",
        "report.html",
        "splits.csv",
    ]
    assert [p.name for p in out.parent.iterdir()] == ["demo"]


def test_predictions_are_those_of_the_model(ran):
    out, _ = ran
    table = pd.read_csv(out / "predictions.csv")
    assert set(table) > {"slide", "patient", "probability", "low", "log_odds", "decision", "label"}
    test = gpmil.simulate.cohort(3, seed=3, part=1, **gpmil.simulate.DISTINCT)
    model = gpmil.load(out / "model")
    assert model.slide_effect_ > 0 and model.cross_fit_.calibrator is not None
    assert table["slide"].tolist() == test.names.tolist()
    assert table["label"].tolist() == test.labels.tolist()
    np.testing.assert_allclose(table["probability"], model.predict_proba(test)[:, 1], rtol=1e-8)
    np.testing.assert_allclose(table["log_odds"], model.decision_function(test), rtol=1e-8)
    patches = model.predict_instances(test).split()
    for bag, expected in zip(test, patches):
        frame = pd.read_csv(out / "patches" / f"{bag.names[0]}.csv.gz")
        np.testing.assert_array_equal(frame[["x", "y"]], bag.coords)
        np.testing.assert_array_equal(frame["label"], bag.instance_labels)
        np.testing.assert_allclose(frame["probability"], expected.probability, rtol=1e-8)
        np.testing.assert_allclose(frame["sd"], expected.std, rtol=1e-8)
        np.testing.assert_allclose(frame["p_value"], expected.p_value, rtol=1e-8)
        np.testing.assert_array_equal(frame["flagged"], expected.flagged)
    card = json.loads((out / "config.json").read_text())
    assert card["model"]["settings"]["slide_effect"] == "auto" and card["hard"] is False
    tau = [row["slide_effect"] for row in card["models"]]
    assert tau[0] == "auto" and tau[1] == model.slide_effect_ and tau[2:] == [0, 0]
    assert card["steps"] == dict.fromkeys(test.names.tolist(), 1024.0)


def test_the_model_of_the_demo_is_that_of_the_python_call(ran):
    """At what it learned: the search itself is tested elsewhere."""
    train = gpmil.simulate.cohort(10, seed=3, part=0, **gpmil.simulate.DISTINCT)
    saved = gpmil.load(ran[0] / "model")
    again = saved.with_settings_fixed().fit(train)
    np.testing.assert_allclose(saved.posterior_mean_, again.posterior_mean_, rtol=1e-6, atol=1e-9)


def test_the_cohorts_of_the_demo_are_hard_or_distinct():
    """The yardstick alone says which: slides by their highest patch."""
    auc = {}
    for name, settings in (("hard", {}), ("distinct", gpmil.simulate.DISTINCT)):
        parts = [gpmil.simulate.cohort(60, seed=5, part=k, **settings) for k in (0, 1)]
        auc[name] = demo.measure_yardstick(*parts)["slide_auc"]
    assert auc["distinct"] > 0.93 > auc["hard"]


def test_the_demo_is_a_run_that_other_commands_take(ran, tmp_path):
    out, _ = ran
    slide = pd.read_csv(out / "predictions.csv")["slide"][0]
    maps = invoke("heatmap", str(out), "--slide", slide, "--out", str(tmp_path / "maps"))
    assert maps.exit_code == 0, maps.output
    assert (tmp_path / "maps" / f"{slide}.png").exists()
    model = gpmil.load(out / "model")
    assert model.predict_proba(gpmil.simulate.cohort(3, seed=3, part=1)).shape == (3, 2)


def test_metrics_hold_all_models(ran):
    found = json.loads((ran[0] / "metrics.json").read_text())["models"]
    assert [(m["model"], m["settings"]) for m in found] == [
        ("VGPMIL-PR-I", "learned settings"),
        ("VGPMIL-PR", "learned settings"),
        ("VGPMIL-PR-I", "paper's settings"),
        ("VGPMIL-PR", "paper's settings"),
    ]
    assert all(0 <= m["patch_auc"] <= 1 and m["slide_log_loss"] > 0 for m in found)
    assert len({m["patch_auc"] for m in found}) == 4


def test_the_page_shows_every_held_out_slide(ran):
    html = (ran[0] / "report.html").read_text(encoding="utf-8")
    for i in range(3):
        assert f"Heat maps of slide-1-0000{i}" in html
    assert "For research, not a medical device." in html
    assert "http" not in html


def test_the_same_seed_gives_the_same_bytes(ran, tmp_path):
    """In another process, replacing an older folder, with a line for every step."""
    out = tmp_path / "demo"
    out.mkdir()
    (out / "config.json").write_text('{"format": "gpmil-run", "files": ["old.txt"]}')
    (out / "old.txt").write_text("")
    done = subprocess.run(
        [*RUN, "demo", "--out", str(out), *SMALL], capture_output=True, text=True, check=True
    )
    assert contents(out) == contents(ran[0])
    lines = done.stderr.splitlines()
    assert lines[0].startswith("simulating 10 slides") and lines[-1] == "pictures and the page"


def test_compressed_tables_carry_no_time(ran):
    for path in (ran[0] / "patches").iterdir():
        raw = path.read_bytes()
        assert raw[4:8] == b"\0\0\0\0"
        assert raw == gzip.compress(gzip.decompress(raw), mtime=0)
        assert len(pd.read_csv(io.BytesIO(gzip.decompress(raw)))) > 10


def test_log_odds_hold_in_both_tails():
    log_p = np.array([-1e-13, -0.3, -1.0, -7.0, -900.0])
    expected = [np.log(1e-13), np.log(np.expm1(0.3)), np.log(np.expm1(1)), np.log(np.expm1(7)), 900]
    np.testing.assert_allclose(log_odds(log_p), expected, rtol=1e-12)


# --- Mistakes -------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["demo", "--bags", "9"], "--bags must be at least 10 slides, got 9"),
        (["demo", "--bags", "many"], "Invalid value for '--bags'"),
        (["demo", "--seed", "-1"], "--seed must lie between 0 and 4294967295, got -1"),
        (["demo", "--colour", "red"], "No such option"),
        (["demo", "--out"], "'--out' requires an argument"),
        (["demo", "surprise"], "unexpected extra argument"),
        (["dem"], "No such command 'dem'"),
        (["--nonsense"], "No such option"),
    ],
)
def test_bad_options_get_one_line(arguments, said):
    result = invoke(*arguments)
    assert result.exit_code == 2
    assert result.stdout == ""
    assert result.stderr.count("\n") == 1 and result.stderr.startswith("gpmil: ")
    assert said in result.stderr


def test_a_foreign_folder_gets_one_line_and_stays(tmp_path):
    (tmp_path / "thesis.tex").write_text("years of work")
    result = invoke("demo", "--out", str(tmp_path))
    assert result.exit_code == 2
    assert result.stdout == ""
    assert result.stderr.count("\n") == 1
    assert "thesis.tex" in result.stderr and "name a new or empty folder" in result.stderr
    assert [p.name for p in tmp_path.iterdir()] == ["thesis.tex"]


def test_a_place_that_cannot_be_written_gets_one_line(tmp_path):
    (tmp_path / "file").write_text("")
    result = invoke("demo", "--out", str(tmp_path / "file" / "demo"))
    assert result.exit_code == 2
    assert result.stderr.count("\n") == 1 and result.stderr.startswith("gpmil: ")


def test_an_interruption_leaves_nothing(tmp_path, monkeypatch):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(demo, "measure_yardstick", interrupted)
    result = invoke("demo", "--out", str(tmp_path / "demo"), *SMALL)
    assert result.exit_code == 130
    assert result.stderr.endswith("gpmil: interrupted, no folder was written\n")
    assert list(tmp_path.iterdir()) == []


def test_a_bug_is_not_dressed_up_as_a_mistake(tmp_path, monkeypatch):
    def broken(*_):
        raise ZeroDivisionError

    monkeypatch.setattr(demo, "measure_yardstick", broken)
    result = invoke("demo", "--out", str(tmp_path / "demo"), *SMALL)
    assert isinstance(result.exception, ZeroDivisionError)
    assert list(tmp_path.iterdir()) == []


# --- The rest -------------------------------------------------------------------------------------
def test_version_is_the_package_version():
    assert invoke("--version").stdout == f"{gpmil.__version__}\n"


def test_version_needs_no_plotting():
    """In a fresh process: what `gpmil demo` imports is imported by `gpmil demo` alone."""
    code = (
        "import sys\n"
        "from gpmil.cli import main\n"
        "try:\n    main()\n"
        "finally:\n    print(*{'matplotlib', 'jinja2', 'gpmil.show.plots'} & set(sys.modules))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, "--version"], capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == [gpmil.__version__]


def test_without_a_command_there_is_help():
    result = invoke()
    assert result.exit_code == 0
    assert "demo" in result.stdout and "not a medical device" in result.stdout.replace("\n", " ")


def test_the_package_is_a_command():
    said = subprocess.run(
        [sys.executable, "-m", "gpmil", "--version"], capture_output=True, text=True, check=True
    )
    assert said.stdout.strip() == gpmil.__version__
    wrong = subprocess.run([sys.executable, "-m", "gpmil", "fits"], capture_output=True, text=True)
    assert wrong.returncode == 2 and wrong.stderr.startswith("gpmil: No such command 'fits'")


# --- gpmil demo --view ----------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--port", "8123"], "add --view"),
        (["--no-browser"], "add --view"),
        (["--view", "--port", "70000"], "--port: expected a number"),
    ],
)
def test_options_of_the_viewer_are_checked_first(tmp_path, words, said):
    result = invoke("demo", "--out", str(tmp_path / "demo"), *SMALL, *words)
    assert result.exit_code == 2 and said in result.output and not list(tmp_path.iterdir())


# --- What is optional -----------------------------------------------------------------------------
@pytest.mark.parametrize("editable", [False, True])
def test_extras_are_installed_from_the_clone(tmp_path, monkeypatch, editable):
    clone = tmp_path / "my clone"
    clone.mkdir()
    (clone / "constraints.txt").write_text("")
    origin = {"url": clone.as_uri(), "dir_info": {"editable": editable}}
    told = SimpleNamespace(read_text=lambda name: json.dumps(origin))
    monkeypatch.setattr(extras.metadata, "distribution", lambda name: told)
    words = shlex.split(extras.install("viewer"))
    given = ["-e"] if editable else []
    assert words[2:] == ["-c", str(clone / "constraints.txt"), *given, f"{clone}[viewer]"]
    (clone / "constraints.txt").unlink()
    assert extras.install("viewer").startswith("pip install -c constraints.txt '.[viewer]' in")


def test_the_doctor_knows_no_index_with_gpmil(monkeypatch):
    monkeypatch.setattr(doctor, "find_spec", lambda name: None)
    fixes = [finding.fix for finding in doctor._optional()]
    assert fixes and all(fix.startswith("pip install -c ") for fix in fixes)
    assert not any("'gpmil[" in fix for fix in fixes)


@pytest.mark.parametrize("name", ["inspect", "fit", "cv", "predict", "paper", "evaluate"])
def test_commands_share_the_options_of_the_reader(name):
    command = typer.main.get_command(app).commands[name]
    found = [option for parameter in command.params for option in parameter.opts]
    table = ["labels", "slide-table", "slide", "label", "positive", "negative", "exclude"]
    files = ["step", "graph", "format", "skip-bad", "cache"] if name != "evaluate" else []
    expected = [f"--{word}" for word in (*table, "patient", *files)]
    assert [option for option in found if option in expected] == expected


def test_a_group_in_a_group_is_spread_in_its_place():
    @dataclass(frozen=True)
    class Inner:
        kept: int = 7  # no option
        depth: Annotated[int, typer.Option()] = 1

    @dataclass(frozen=True)
    class Outer:
        inner: Inner = Inner()
        wide: Annotated[bool, typer.Option("--wide")] = False

    seen = []

    @options.spread
    def command(*, first: Annotated[str, typer.Argument()], outer: Outer, last: int = 3) -> None:
        seen.append((first, outer, last))

    assert list(inspect.signature(command).parameters) == ["first", "depth", "wide", "last"]
    command(first="a", depth=2, wide=True, last=4)
    assert seen == [("a", Outer(Inner(depth=2), wide=True), 4)]
