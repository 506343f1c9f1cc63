"""GeoJSON for QuPath: a closed square a patch, finite numbers only, the same bytes each time."""

import gzip
import json
import math
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from synthetic import pri

import gpmil
from gpmil.models import InstancePredictions
from gpmil.show import qupath
from gpmil.show.classes import ClassLayer, class_colours
from gpmil.show.qupath import Patches, to_geojson, write


def some_patches(n: int = 7, seed: int = 0, **changes) -> Patches:
    rng = np.random.default_rng(seed)
    values = {
        "coords": np.stack(np.divmod(rng.permutation(40)[:n], 5), axis=1) * 224,
        "probability": rng.random(n),
        "std": rng.uniform(0.1, 2, n),
        "p_value": rng.random(n),
        "flagged": np.arange(n) % 3 == 1,
        "doubt": rng.random(n),
        "unlike": rng.random(n),
    }
    return Patches(**(values | changes))


def check_valid(collection: dict) -> None:
    """What GeoJSON and QuPath demand of a file, by the letter."""
    assert set(collection) == {"type", "features"}
    assert collection["type"] == "FeatureCollection"
    for feature in collection["features"]:
        assert set(feature) == {"type", "geometry", "properties"}
        assert feature["type"] == "Feature" and feature["geometry"]["type"] == "Polygon"
        (ring,) = feature["geometry"]["coordinates"]
        assert len(ring) == 5 and ring[0] == ring[-1]
        assert all(len(point) == 2 and all(map(math.isfinite, point)) for point in ring)
        # The outer ring of a square with y downwards: right, down, left, up.
        (x0, y0), (x1, _), (_, y2) = ring[:3]
        assert ring == [[x0, y0], [x1, y0], [x1, y2], [x0, y2], [x0, y0]] and x1 > x0 and y2 > y0
        properties = feature["properties"]
        assert properties["objectType"] == "tile" and properties["isLocked"] is True
        assert all(map(math.isfinite, properties["measurements"].values()))
        if "classification" in properties:
            assert set(properties["classification"]) == {"name", "color"}
            rgb = properties["classification"]["color"]
            assert len(rgb) == 3 and all(isinstance(c, int) and 0 <= c < 256 for c in rgb)


def read_back(path) -> dict:
    raw = path.read_bytes()

    def refuse(text):
        raise AssertionError(f"{text} is no JSON number")

    return json.loads(gzip.decompress(raw) if path.suffix == ".gz" else raw, parse_constant=refuse)


@settings(max_examples=25, deadline=None)
@given(
    st.lists(
        st.tuples(*[st.floats(-1e5, 1e6)] * 2, *[st.floats(allow_nan=True)] * 3, st.booleans()),
        max_size=12,
    ),
    st.floats(0.5, 4000),
    st.booleans(),
)
def test_any_numbers_give_a_valid_file(rows, size, tested):
    table = np.array([row[:5] for row in rows], dtype=float).reshape(-1, 5)
    flags = np.array([row[5] for row in rows], dtype=bool)
    patches = Patches(table[:, :2], *table.T[2:], flagged=flags if tested else None)
    collection = json.loads(qupath.to_bytes(to_geojson(patches, size)))
    check_valid(collection)
    assert len(collection["features"]) == len(rows)
    for row, feature in zip(rows, collection["features"]):
        x, y = feature["geometry"]["coordinates"][0][0]
        assert (x, y) == pytest.approx(row[:2], abs=0.006)
        kept = {"probability": row[2], "sd": row[3], "p-value": row[4]}
        if math.isfinite(row[4]):
            kept["suspicion"] = -math.log10(min(max(row[4], 1e-3), 1.0))
        kept = {name: value for name, value in kept.items() if math.isfinite(value)}
        assert feature["properties"]["measurements"] == pytest.approx(kept, rel=1e-5)


def test_tiles_lie_where_the_patches_do():
    patches = some_patches()
    found = to_geojson(patches, (224, 100), offset=(1000, 30))["features"]
    for (x, y), feature in zip(patches.coords.tolist(), found):
        (ring,) = feature["geometry"]["coordinates"]
        x, y = x - 1000, y - 30
        assert ring == [[x, y], [x + 224, y], [x + 224, y + 100], [x, y + 100], [x, y]]
        assert all(isinstance(c, int) for point in ring for c in point)


def test_measurements_have_the_names_of_the_layers():
    patches = some_patches()
    found = to_geojson(patches, 9)["features"][3]["properties"]["measurements"]
    assert set(found) == {"suspicion", "probability", "unlike", "doubt", "p-value", "sd"}
    for name in ("probability", "unlike", "doubt"):
        assert found[name] == pytest.approx(getattr(patches, name)[3], rel=1e-5)


def test_flags_make_the_classes():
    patches = some_patches()
    names = [f["properties"]["classification"]["name"] for f in to_geojson(patches, 9)["features"]]
    assert names == ["flagged" if f else "not flagged" for f in patches.flagged]
    only = to_geojson(patches, 224, only_flagged=True)["features"]
    every = to_geojson(patches, 224)["features"]
    assert only == [f for f, kept in zip(every, patches.flagged) if kept]


def test_probabilities_make_the_classes_where_nothing_was_tested():
    p = np.array([0.0, 0.29, 0.3, 0.8, 1.0, np.nan])
    patches = Patches(np.zeros((6, 2)), p)
    found = to_geojson(patches, 1, threshold=(0.3, 0.8))["features"]
    names = [f["properties"].get("classification", {}).get("name") for f in found]
    low, middle, high = "p < 0.3", "0.3 <= p < 0.8", "p >= 0.8"
    assert names == [low, low, middle, high, high, None]
    assert found[5]["properties"]["measurements"] == {}
    colours = [tuple(f["properties"]["classification"]["color"]) for f in found[1:4]]
    assert len(set(colours)) == 3


def test_predictions_of_a_model_are_taken(cohort):
    model = pri(coupling=0.3, n_inducing=20, random_state=0)
    predictions = model.fit(cohort).predict_instances(cohort)
    with pytest.raises(ValueError, match=r"one slide, found 22"):
        to_geojson(predictions)
    one = predictions.split()[3]
    collection = to_geojson(one)  # the step of the bags is the size
    check_valid(collection)
    assert len(collection["features"]) == len(one)
    first = collection["features"][0]
    assert first["properties"]["measurements"]["probability"] == pytest.approx(
        one.probability[0], rel=1e-5
    )
    x, y = one.bags.coords[0]
    assert first["geometry"]["coordinates"][0][2] == [x + 256, y + 256]


def test_the_side_that_the_files_tell_is_taken():
    """Patches of 48 that lie 32 apart; a size that is given goes before."""
    coords = np.array([[0.0, 0.0], [32.0, 0.0]])
    bags = gpmil.Bags(
        np.ones((2, 3)), [0, 2], names=["s"], coords=coords, step=32,
        metadata={"sizes": {"s": (48.0, 48.0)}},
    )  # fmt: skip
    one = InstancePredictions(*[np.array([0.2, 0.7])] * 3, bags)
    for options, side in (({}, 48), ({"size": 40}, 40)):
        tile = to_geojson(one, **options)["features"][1]
        assert tile["geometry"]["coordinates"][0][::2] == [[32, 0], [32 + side, side], [32, 0]]


def test_predictions_without_positions_are_refused(plain):
    instances = InstancePredictions(*[np.zeros(plain[2].n_instances)] * 3, plain[2])
    with pytest.raises(ValueError, match="no positions x, y"):
        to_geojson(instances, 256)


@pytest.mark.parametrize(
    ("changes", "options", "message"),
    [
        ({}, {"size": None}, "side of a patch is not known"),
        ({}, {"size": 0}, "size: expected a positive number"),
        ({}, {"size": (1, 2, 3)}, "size: expected a positive number, or one per axis"),
        ({}, {"size": 9, "offset": (np.nan, 0)}, "offset: expected a number"),
        ({"std": np.ones(3)}, {"size": 9}, r"std: expected one value per patch, 7 in all"),
        ({"coords": np.full((7, 2), np.nan)}, {"size": 9}, "coords: expected finite"),
        ({"flagged": None}, {"size": 9, "only_flagged": True}, "have no flags"),
        ({"flagged": None}, {"size": 9, "threshold": (0.8, 0.3)}, "expected rising"),
        ({"flagged": None}, {"size": 9, "threshold": 1.5}, "between 0 and 1"),
    ],
)
def test_bad_input_is_refused(changes, options, message):
    with pytest.raises(ValueError, match=message):
        to_geojson(some_patches(**changes), **options)


@pytest.mark.parametrize("compressed", [False, True])
def test_files_are_valid_and_always_the_same(tmp_path, compressed):
    patches = some_patches()
    first = write(tmp_path / "deep" / "a.geojson", patches, 224, gzip=compressed, offset=(5, 6))
    second = write(tmp_path / "b.geojson", patches, 224, gzip=compressed, offset=(5, 6))
    assert first.name == ("a.geojson.gz" if compressed else "a.geojson")
    assert first.read_bytes() == second.read_bytes()
    check_valid(read_back(first))
    assert read_back(first) == to_geojson(patches, 224, offset=(5, 6))
    if compressed:
        assert first.read_bytes()[4:8] == b"\0\0\0\0"  # no time inside


def test_a_failure_leaves_what_was_there(tmp_path):
    path = write(tmp_path / "a.geojson", some_patches(), 224)
    before = path.read_bytes()
    with pytest.raises(ValueError, match="size"):
        write(path, some_patches(), -1)
    with pytest.raises(ValueError, match="is a folder"):
        write(tmp_path, some_patches(), 224)
    assert path.read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["a.geojson"]


def test_a_slide_without_patches_is_an_empty_collection():
    empty = some_patches(0, flagged=np.zeros(0, dtype=bool))
    assert to_geojson(empty, 224) == {"type": "FeatureCollection", "features": []}


def test_a_hundred_thousand_patches_take_seconds(tmp_path):
    rng = np.random.default_rng(0)
    n = 100_000
    coords = np.stack(np.divmod(np.arange(n), 300), axis=1) * 256
    patches = Patches(coords, *rng.random((3, n)), flagged=rng.random(n) < 0.1)
    start = time.process_time()
    path = write(tmp_path / "large.geojson", patches, 256, gzip=True)
    assert time.process_time() - start < 15
    assert path.stat().st_size < 10e6
    assert gzip.decompress(path.read_bytes()).count(b'"type":"Feature"') == n


@pytest.mark.parametrize("ordered", [True, False])
def test_grades_and_types_are_classes(ordered):
    p = np.array([[0.4, 0.35, 0.25], [0.1, 0.2, 0.7], [0.8, 0.1, 0.1], [np.nan] * 3])
    layer = ClassLayer(("benign", "3", "4"), p, ordered)
    patches = some_patches(4, classes=layer)
    found = to_geojson(patches, 224)
    check_valid(found)
    own = [f["properties"] for f in found["features"]]
    # a grade is reached with more than a half, of types the likeliest is taken
    said = [properties.get("classification", {}).get("name") for properties in own]
    assert said == ["3" if ordered else "benign", "4", "benign", None]
    colour = tuple(own[1]["classification"]["color"])
    assert "#{:02x}{:02x}{:02x}".format(*colour) == class_colours(3, ordered)[2]
    assert own[1]["measurements"]["P(3)"] == 0.2 and own[1]["measurements"]["flagged"] == 1
    assert "P(3)" not in own[3]["measurements"]
    marked = to_geojson(patches, 224, only_flagged=True)["features"]
    assert [f["properties"]["classification"]["name"] for f in marked] == ["4"]


def test_a_model_of_grades_names_its_classes():
    y, coords = np.arange(9) % 3, [np.arange(8).reshape(4, 2)] * 9
    x = [np.random.default_rng(b).normal(k, 1, (4, 2)) for b, k in enumerate(y)]
    bags = gpmil.Bags.from_arrays(x, coords=coords, step=1, graph=None)
    given = {"variance": 9.0, "lengthscale": 3.0, "mean": -1.0, "coupling": 0, "n_inducing": 9}
    model = gpmil.OrdinalMIL(**given, cut_points=[0, 1], random_state=0).fit(bags, y)
    patches = qupath.patches_of(model.predict_instances(bags).split()[2])
    assert patches.classes.names == ("0", "1", "2") and patches.classes.ordered
