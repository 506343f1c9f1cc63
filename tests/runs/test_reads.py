"""How often `gpmil predict` reads every feature of a cohort, from the files to the tables."""

from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
import writers
from synthetic import small_slides
from typer.testing import CliRunner

import gpmil
from gpmil.cli import app
from gpmil.io.slides import Slide
from gpmil.models import with_novelty
from gpmil.process import features, inducing

FITTED = ["--coupling", "0.6", "--variance", "2.3", "--lengthscale", "1.7", "--mean", "-1.1"]
FITTED += ["--n-inducing", "12", "--flags", "--calibrated", "--n-folds", "5"]
N_SLIDES = 24


class Reads:
    """How often the rows of mapped files, and of feature files, were read."""

    def __init__(self) -> None:
        self.mapped: dict[str, np.ndarray] = {}
        self.slides = 0  # feature files read

    def of(self, features: "CountedMap", rows=slice(None)) -> None:
        self.mapped[str(features.filename)][features.numbers[rows]] += 1

    def per_feature(self) -> np.ndarray:
        """Of every row the number of times that it was read, files and maps together."""
        (mapped,) = self.mapped.values()
        return mapped + self.slides / N_SLIDES


READS = Reads()


class CountedMap(np.memmap):
    """A mapped file that counts whatever takes values from it; a slice is no read."""

    def __new__(cls, filename, *args, **options):
        found = super().__new__(cls, filename, *args, **options)
        found.numbers = np.arange(len(found))
        READS.mapped.setdefault(str(filename), np.zeros(len(found), dtype=int))
        return found

    def __array_finalize__(self, base) -> None:
        super().__array_finalize__(base)
        self.numbers = getattr(base, "numbers", None)

    def __getitem__(self, key):
        if isinstance(key, slice):
            part = super().__getitem__(key)
            part.numbers = self.numbers[key]
            return part
        READS.of(self, key[0] if isinstance(key, tuple) else key)
        return self.view(np.ndarray)[key]

    def __array_ufunc__(self, ufunc, method, *inputs, **options):
        return getattr(ufunc, method)(*map(plain, inputs), **options)

    def astype(self, *args, **options):
        return plain(self).astype(*args, **options)

    def copy(self, *args):
        return plain(self).copy(*args)

    def tobytes(self, *args):
        return plain(self).tobytes(*args)


def plain(values):
    """What a function takes in, counted where it is of a mapped file."""
    if isinstance(values, CountedMap):
        READS.of(values)
        return values.view(np.ndarray)
    return values


@pytest.fixture
def reads(monkeypatch) -> Reads:
    """Counts from here on. Functions that take an array as it is count what they take."""
    READS.__init__()
    monkeypatch.setattr(np, "memmap", CountedMap)
    for module, name in (
        (np, "array"),
        (np, "asarray"),
        (np, "ascontiguousarray"),
        (torch, "as_tensor"),
        (torch, "from_numpy"),
    ):
        own = getattr(module, name)
        monkeypatch.setattr(module, name, lambda x, *a, own=own, **o: own(plain(x), *a, **o))
    blocks = Slide.blocks

    def counted(slide):
        READS.slides += 1
        return blocks(slide)

    monkeypatch.setattr(Slide, "blocks", counted)
    return READS


def write_slides(folder: Path, seed: int) -> Path:
    """Feature files of a small cohort, and the table of its labels."""
    made = small_slides(n_bags=N_SLIDES, n_features=4, seed=seed)
    for name, values, coords in zip(made["names"], made["arrays"], made["coords"]):
        writers.trident(
            folder / "features", name, values.astype("f4"), coords, patch_size_level0=256
        )
    table = {k: made[k] for k in ("names", "labels", "groups")}
    pd.DataFrame(table).set_axis(["slide", "label", "patient"], axis=1).to_csv(
        folder / "labels.csv", index=False
    )
    return folder


def run(command: str, *arguments) -> None:
    result = CliRunner().invoke(app, [command, *(str(a) for a in arguments)], prog_name="gpmil")
    assert result.exit_code == 0, result.output + repr(result.exception)


def data_of(folder: Path) -> list:
    return [folder / "features", "--labels", folder / "labels.csv"]


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    """A model with flags and calibration, and other slides than its own."""
    place = tmp_path_factory.mktemp("reads")
    with pytest.MonkeyPatch.context() as patch:
        for command in ("fit", "predict"):
            patch.setattr(f"gpmil.cli.{command}.write_report", lambda folder: None)
        patch.setattr("gpmil.runs.judge.RESAMPLES", 20)
        run("fit", *data_of(write_slides(place / "own", 14)), "--out", place / "fit", *FITTED)
        write_slides(place / "other", 15)
        yield place


@pytest.mark.parametrize("loaded", [True, False])
def test_a_fit_reads_features_in_a_file_at_most_twice(place, tmp_path, reads, monkeypatch, loaded):
    """Once where they are loaded; else twice, but for the samples of k-means and novelty."""
    own = place / "own"
    bags = gpmil.read(own / "features", labels=own / "labels.csv", cache=tmp_path / "cache")
    (counts,) = reads.mapped.values()
    before = counts.copy()
    if not loaded:
        monkeypatch.setattr(features, "LOADED", 0)
        monkeypatch.setattr(features, "ROWS", 16)
        monkeypatch.setattr(inducing, "POINTS_PER_CENTRE", 3)
        monkeypatch.setattr(with_novelty, "MOST_PATCHES", 1)
    settings = {"coupling": 0.6, "variance": 2.3, "lengthscale": 1.7, "mean": -1.1}
    gpmil.VGPMILPRI(**settings, n_inducing=4, random_state=0, device="cpu").fit(bags)
    found = counts - before
    if loaded:
        assert set(found) == {1}
    else:
        # 16 rows that sums are taken about, 3 per centre, one of every slide
        assert found.min() == 2 and (found - 2).sum() <= 16 + 3 * 4 + N_SLIDES


@pytest.mark.parametrize("model", [gpmil.VGPMIL, gpmil.VGPMILPR])
def test_a_fit_reads_a_mapped_file_twice(tmp_path, reads, monkeypatch, model):
    """No pass of its own looks for missing values, but for samples as above; they are found."""
    monkeypatch.setattr(features, "LOADED", 0)
    monkeypatch.setattr(features, "ROWS", 16)
    monkeypatch.setattr(inducing, "POINTS_PER_CENTRE", 3)
    monkeypatch.setattr(with_novelty, "MOST_PATCHES", 1)
    x = np.random.default_rng(0).normal(size=(120, 4))
    np.save(tmp_path / "x.npy", x)
    given = {"variance": 1.0, "lengthscale": 2.0, "n_inducing": 4, "mean": 0.0, "device": "cpu"}
    offsets, labels = np.arange(0, 121, 5), np.arange(24) % 2
    bags = gpmil.Bags(np.load(tmp_path / "x.npy", mmap_mode="r"), offsets, labels)
    model(**given, random_state=0).fit(bags)
    (found,) = reads.mapped.values()
    assert found.min() == 2 and (found - 2).sum() <= 16 + 3 * 4 + len(bags)
    x[77, 2] = np.nan
    np.save(tmp_path / "y.npy", x)
    bags = gpmil.Bags(np.load(tmp_path / "y.npy", mmap_mode="r"), offsets, labels)
    for changed in ({}, {"n_components": 2}, {"standardize": False}):
        with pytest.raises(ValueError, match=r"1 values are NaN or infinite, in 1 of 24 bags"):
            model(**given, **changed).fit(bags)


@pytest.mark.parametrize("batch", [20_000, 40])
def test_a_prediction_reads_every_feature_once_and_once_for_patients(place, tmp_path, reads, batch):
    data = [*data_of(place / "other"), "--cache", tmp_path / "cache", "--batch", batch]
    run("predict", place / "fit", *data, "--out", tmp_path / "first")
    # Once from the feature files into the cache, once from there, and once more for patients with
    # several slides, as all are here, whose slides are looked at together.
    assert set(reads.per_feature()) == {3}
    reads.__init__()
    run("predict", place / "fit", *data, "--out", tmp_path / "again")
    assert set(reads.per_feature()) == {2}
    tables = pd.read_csv(next((tmp_path / "again" / "patches").iterdir()))
    assert {"p_value", "flagged"} <= set(tables)
    rows = pd.read_csv(tmp_path / "again" / "predictions.csv")
    assert rows[["low", "high"]].notna().all().all()


def test_a_fit_reads_no_more_than_it_must(place, tmp_path, reads):
    data = [*data_of(place / "own"), "--cache", tmp_path / "cache"]
    run("fit", *data, "--out", tmp_path / "fit", *FITTED)
    # Once into the cache, four times to fit, five to cross-fit, once to predict; and some patches
    # of every slide, here all of them, once more for what is novel, and once for patients.
    assert reads.per_feature().max() <= 13
