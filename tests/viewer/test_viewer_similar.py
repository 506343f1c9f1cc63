"""Similar patches: found in the features of the run, by the model's distance, or said why not."""

import json

import numpy as np
import pandas as pd
import pytest
import writers
from oracles.viewer import nearest
from viewer_runs import patches, write_run

import gpmil
from gpmil.files import persistence
from gpmil.process.features import FeatureMap, fitted
from gpmil.viewer import cohort as cohorts
from gpmil.viewer.maps import Maps
from gpmil.viewer.similar import Similar, Space

SIZES = {"s0": 9, "s1": 6, "s2": 12, "s3": 4}
WIDTH = 5


def features(k: int) -> np.ndarray:
    rng = np.random.default_rng(70 + k)
    scale = np.array([1.0, 30.0, 0.02, 4.0, 1.0])
    return (rng.normal(size=(list(SIZES.values())[k], WIDTH)) * scale + 500).astype(np.float32)


def tables() -> dict:
    return {name: patches(n, k) for k, (name, n) in enumerate(SIZES.items())}


def write_features(folder, tables) -> None:
    for k, (name, table) in enumerate(tables.items()):
        coords = table[["x", "y"]].to_numpy().astype(np.int64)
        writers.trident(folder, name, features(k), coords, patch_size_level0=256)


def source(data, **more) -> dict:
    return {"options": {"source": {"data": str(data), "labels": None, "format": None, **more}}}


@pytest.fixture
def data(tmp_path):
    write_features(tmp_path / "data", tables())
    gpmil.read(tmp_path / "data", cache=tmp_path / "cache")  # as a run has done
    return tmp_path / "data"


@pytest.fixture
def run(tmp_path, data):
    given = source(data) | {"cache": str(tmp_path / "cache")}
    return write_run(tmp_path / "run", tables(), steps=dict.fromkeys(SIZES, 256), **given)


def opened(*folders) -> Similar:
    cohort = cohorts.open_cohort(list(folders))
    return Similar(cohort, Maps(cohort))


def save_model(folder, **settings) -> FeatureMap:
    """A model of the run's features in the run: what it sees of them."""
    rows = np.concatenate([features(k) for k in range(4)])
    seen = fitted(rows, settings.get("n_components"), settings.get("standardize", True))
    arrays = {"feature_mean_": seen.mean, "feature_scale_": seen.scale}
    arrays |= {} if seen.components is None else {"feature_components_": seen.components}
    persistence.write(folder / "model", arrays, {"class": "VGPMILPRI"})
    return seen


# --- Against loops --------------------------------------------------------------------------------
@pytest.mark.parametrize("settings", [None, {}, {"n_components": 3}, {"standardize": False}])
@pytest.mark.parametrize("same_slide", [True, False])
def test_the_nearest_patches_are_found(run, settings, same_slide):
    rows = np.concatenate([features(k) for k in range(4)]).astype(np.float64)
    z = rows
    if settings is not None:
        z = save_model(run, **settings)(rows).numpy()
    slide, index = 2, 5
    row = 9 + 6 + index
    allowed = [i for i in range(len(rows)) if same_slide or not 15 <= i < 27]
    expected = nearest(z, row, allowed, 8)
    found = opened(run).nearest(0, slide, index, 8, same_slide)
    starts = [0, 9, 15, 27]
    assert [starts[p["slide"]] + p["index"] for p in found] == [i for i, _ in expected]
    np.testing.assert_allclose([p["distance"] for p in found], [d for _, d in expected], rtol=1e-9)
    for patch in found:
        table = tables()[f"s{patch['slide']}"]
        assert patch["x"] == table["x"][patch["index"]]
        assert patch["y"] == table["y"][patch["index"]]


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_distances_in_pieces_are_those_at_once(monkeypatch, dtype):
    rng = np.random.default_rng(5)
    rows = rng.normal(3, 1, (50, 4)).astype(dtype)
    scale, components = rng.gamma(2, 1, 4), rng.normal(size=(2, 4))
    for space, z in (
        (Space(scale), rows / scale),
        (Space(np.array([0.7]), components), rows @ components.T / 0.7),
    ):
        expected = [np.linalg.norm(row - z[7]) for row in z]
        for pieces in (7, 50):
            monkeypatch.setattr("gpmil.viewer.similar.ROWS", pieces)
            np.testing.assert_allclose(space.distances(rows, rows[7]), expected, atol=1e-12)
            near = space.distances(rows, rows[7], np.float32)
            np.testing.assert_allclose(near, expected, rtol=1e-5, atol=1e-5)


def test_more_than_there_are(run):
    found = opened(run).nearest(0, 0, 0, 1000, True)
    assert len(found) == sum(SIZES.values()) - 1
    assert (0, 0) not in {(p["slide"], p["index"]) for p in found}


def test_a_table_of_patches_serves_as_well(tmp_path):
    frames = []
    for k, (name, table) in enumerate(tables().items()):
        part = table[["x", "y"]].assign(slide=name, label=k % 2)
        frames.append(part.assign(**{f"f{d}": features(k)[:, d] for d in range(WIDTH)}))
    data = tmp_path / "own.csv"
    pd.concat(frames).to_csv(data, index=False)
    folder = write_run(tmp_path / "run", tables(), **source(data))
    found = opened(folder).nearest(0, 1, 2, 5)
    rows = np.concatenate([features(k) for k in range(4)]).astype(np.float64)
    expected = nearest(rows, 9 + 2, list(range(len(rows))), 5)
    np.testing.assert_allclose([p["distance"] for p in found], [d for _, d in expected], rtol=1e-5)


# --- Where features are not found, or not those ---------------------------------------------------
def test_a_path_is_found_again_beside_the_run(tmp_path, data):
    given = source("data") | {"cache": "cache"}
    folder = write_run(tmp_path / "runs" / "one", tables(), **given)
    assert opened(folder).possible  # relative to the folder the run was made from


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda place: None, "does not say where"),
        (lambda place: source(place / "nowhere"), "nothing at .*nowhere any more"),
        (lambda place: source(place / "data"), "not found, or older"),
        (lambda place: source(place / "empty"), "too much|found nothing|no similar"),
    ],
)
def test_without_features_it_is_said(tmp_path, change, words):
    write_features(tmp_path / "data", tables())  # but no cache of it
    (tmp_path / "empty").mkdir()
    folder = write_run(tmp_path / "run", tables(), **(change(tmp_path) or {}))
    found = opened(folder)
    with pytest.raises(cohorts.Missing, match=words):
        found.nearest(0, 0, 0, 3)
    assert not (tmp_path / "data" / ".gpmil-cache").exists()  # nothing is copied for it


def test_files_that_changed_since_are_not_used(tmp_path, run, data):
    writers.trident(data, "s4", features(0), np.zeros((9, 2), dtype=int), patch_size_level0=256)
    found = opened(run)
    assert not found.possible
    with pytest.raises(cohorts.Missing, match="older than its files"):
        found.nearest(0, 0, 0, 3)


def test_patches_in_another_order_are_not_used(tmp_path, data, caplog):
    other = tables()
    other["s1"] = other["s1"].iloc[::-1].reset_index(drop=True)
    other["s3"] = patches(5, 9)  # one more
    given = source(data) | {"cache": str(tmp_path / "cache")}
    found = opened(write_run(tmp_path / "run", other, **given))
    for slide in (1, 3):
        with pytest.raises(cohorts.Missing, match="other names, numbers or positions"):
            found.nearest(0, slide, 0, 3)
    near = found.nearest(0, 0, 0, 100)
    assert {p["slide"] for p in near} == {0, 2} and len(near) == 9 + 12 - 1
    assert "features of s1 are not of the run's patches" in caplog.text


def test_slides_of_other_runs_are_left_out(tmp_path, data):
    given = source(data) | {"cache": str(tmp_path / "cache")}
    two = {name: table for name, table in tables().items() if name in ("s0", "s2")}
    first = write_run(tmp_path / "a", two, **given)
    second = write_run(tmp_path / "b", {"s1": tables()["s1"]})
    found = opened(first, second)
    near = found.nearest(0, 1, 0, 100)
    names = {found.cohort.names[p["slide"]] for p in near}
    assert names == {"s0", "s2"} and found.possible
    with pytest.raises(cohorts.Missing):
        found.nearest(1, 2, 0, 3)


def test_a_model_of_other_features_is_not_used(run):
    save_model(run)
    file = run / "model" / "model.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"sha256": {}}))
    rows = np.concatenate([features(k) for k in range(4)]).astype(np.float64)
    found = opened(run).nearest(0, 0, 1, 4)
    expected = nearest(rows, 1, list(range(len(rows))), 4)
    np.testing.assert_allclose([p["distance"] for p in found], [d for _, d in expected], rtol=1e-9)
