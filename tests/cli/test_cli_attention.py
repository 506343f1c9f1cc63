"""Runs of AttentionMIL keep its weights as tables of patches, apart from probabilities."""

import numpy as np
import pandas as pd
import pytest
from command_line import ran, write_table

import gpmil

QUICK = ["--model", "AttentionMIL", "--max-epochs", 2, "--random-state", 0]


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    place = tmp_path_factory.mktemp("attention")
    data = write_table(place / "own.csv", n_slides=8)
    ran("fit", data, "--out", place / "fit", *QUICK)
    ran("predict", place / "fit", data, "--out", place / "new", "--batch", 30)
    ran("cv", data, "--out", place / "cv", "--folds", 2, *QUICK)
    return place


def test_predict_writes_the_weights_of_the_model(place):
    bags = gpmil.read(place / "own.csv")
    weights = bags.split(gpmil.load(place / "fit" / "model").attention(bags))
    for name, own, at in zip(bags.names, weights, bags.split(bags.coords)):
        table = pd.read_csv(place / "new" / "attention" / f"{name}.csv.gz")
        assert table.columns.tolist() == ["x", "y", "attention", "times_even"]
        assert np.allclose(table["attention"], own, rtol=1e-5)
        assert np.allclose(table["times_even"], 9 * own, rtol=1e-5)
        assert np.array_equal(table[["x", "y"]], at)


def test_every_run_has_them_and_no_probabilities_of_patches(place):
    for run in ("fit", "new", "cv"):
        assert len(list((place / run / "attention").glob("*.csv.gz"))) == 8
        assert not (place / run / "patches").exists()
    for file in (place / "cv" / "attention").glob("*.csv.gz"):
        assert np.isclose(pd.read_csv(file)["attention"].sum(), 1)
