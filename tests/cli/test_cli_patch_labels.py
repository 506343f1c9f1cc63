"""--patch-labels: what fit and cv learn from, and what repeats it."""

import json

import numpy as np
import pandas as pd
import pytest
from command_line import invoke, ran, write_table

import gpmil
from gpmil.runs import judge

FIXED = ["--variance", "2.3", "--lengthscale", "1.9", "--mean", "-1.7", "--n-inducing", "12",
         "--coupling", "0.6", "--slide-effect", "0.8", "--interval-patches", "0"]  # fmt: skip


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A table of slides, and labels of six of their patches."""
    place = tmp_path_factory.mktemp("patch-labels")
    write_table(place / "own.csv")
    rows = [(f"s{b:02d}", x, 0, x == 0) for b in (1, 3, 5) for x in (0, 20)]
    table = pd.DataFrame(rows, columns=["slide", "x", "y", "label"])
    table["label"] = table["label"].map({True: "tumour", False: "stroma"})
    table.to_csv(place / "marks.csv", index=False)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(judge, "RESAMPLES", 20)
        for command in ("fit", "cv"):
            patch.setattr(f"gpmil.cli.{command}.write_report", lambda folder: None)
        yield place


def test_fit_learns_from_them_and_can_be_repeated(place):
    said = ["--patch-labels", place / "marks.csv", "--patch-positive", "tumour"]
    ran("fit", place / "own.csv", "--out", place / "taught", *said, *FIXED)
    model = gpmil.load(place / "taught" / "model")
    assert model.instance_labels == "use"
    table = pd.read_csv(place / "taught" / "patches" / "s01.csv.gz")
    assert table["label"].tolist()[:3] == pytest.approx([1, np.nan, 0], nan_ok=True)
    ran("fit", "--config", place / "taught" / "config.json", "--out", place / "again")
    one, other = ((place / run / "predictions.csv").read_bytes() for run in ("taught", "again"))
    assert one == other
    card = json.loads((place / "taught" / "config.json").read_text())
    assert card["options"]["source"]["patch_labels"] == str(place / "marks.csv")
    ran("cv", place / "own.csv", "--out", place / "cv", "--folds", 2, *said, *FIXED)
    card = json.loads((place / "cv" / "config.json").read_text())
    assert card["model"]["settings"]["instance_labels"] == "use"


@pytest.mark.parametrize(
    ("command", "said", "words"),
    [
        ("fit", ["--model", "MaxPoolMIL"], "a MaxPoolMIL cannot learn from labels of patches"),
        ("fit", [], "patch labels: .*found 2 classes: 'stroma' (3), 'tumour' (3)"),
        ("fit", [], "patch labels: .*as in --patch-positive"),
        (
            "fit",
            ["--patch-positive", "x"],
            "--patch-positive x is not .*'stroma' (3), 'tumour' (3)",
        ),
        ("fit", ["--positive", "tumour"], "--positive tumour is not among the classes"),
        ("paper", [], "--patch-labels: the models of the paper learn from labels of slides"),
    ],
)
def test_what_cannot_be_learned_from_is_said(place, command, said, words):
    data = ["--data"] if command == "paper" else []
    arguments = [command, *data, place / "own.csv", "--out", place / "none"]
    result = invoke(*arguments, "--patch-labels", place / "marks.csv", *said)
    assert result.exit_code == 2, result.output
    shown = " ".join((result.output + result.stderr).split())
    first, _, last = words.partition(".*")
    assert first in shown and last in shown
    assert not (place / "none").exists()
