"""Labels of patches from tables and from annotations, and all that can be wrong with them."""

import gzip
import json
import logging
import re

import numpy as np
import pandas as pd
import pytest
from oracles.polygons import share_by_points

from gpmil.data.bags import Bags
from gpmil.io import annotations, polygons, with_patch_labels
from gpmil.show import qupath

STEP = 256
CELLS = np.array([[c, r] for r in range(3) for c in range(4)]) * STEP
HOOK = np.array([[10, 20], [900, 80], [870, 640], [500, 700], [560, 300], [90, 330]], float)


@pytest.fixture(scope="module")
def bags():
    rng = np.random.default_rng(4)
    arrays = [rng.normal(size=(12, 3)), rng.normal(size=(12, 3))]
    return Bags.from_arrays(
        arrays,
        ["tumour", "benign"],
        coords=[CELLS, CELLS + 1000],
        step=STEP,
        names=["s1", "s2"],
        positive="tumour",
    )


def table(path, rows, columns=("slide", "x", "y", "label"), **options):
    pd.DataFrame(rows, columns=list(columns)).to_csv(path, index=False, **options)
    return path


def feature(kind, *rings, geometry="Polygon", **properties):
    named = {} if kind is None else {"classification": {"name": kind, "color": [200, 0, 0]}}
    coordinates = [[[float(v) for v in p] for p in ring] for ring in rings]
    coordinates = coordinates if geometry == "Polygon" else [[ring] for ring in coordinates]
    shape = {"type": geometry, "coordinates": coordinates}
    return {"type": "Feature", "geometry": shape, "properties": named | properties}


def box(left, top, right, bottom):
    return [[left, top], [right, top], [right, bottom], [left, bottom], [left, top]]


def drawn(path, *features):
    path.write_text(json.dumps({"type": "FeatureCollection", "features": list(features)}))
    return path


# --- How much of a patch is inside ----------------------------------------------------------------
def test_shares_are_those_of_many_points():
    ring = np.vstack([HOOK, HOOK[:1]])
    hole = np.array([[600, 150], [820, 170], [700, 420], [600, 150]], float)
    sides = np.array([211.0, 173.0])
    corners = np.random.default_rng(1).uniform(-150, 900, size=(40, 2))
    for polygon in ([ring], [ring[::-1], hole], [ring, hole]):
        exact = polygons.share_inside(polygon, corners, sides)
        points = [share_by_points(polygon, corner, sides, 60) for corner in corners]
        np.testing.assert_allclose(exact, points, atol=1.5e-2)
    assert 5 < (exact > 0).sum() < 40


def test_whole_patches_are_inside_to_the_last_digit():
    ring = np.array(box(256.0, 0, 1024, 512))
    share = polygons.share_inside([ring], CELLS.astype(float), np.array([256.0, 256]))
    np.testing.assert_array_equal(share, np.tile([0, 1, 1, 1], 3) * (CELLS[:, 1] < 512))


# --- Tables ---------------------------------------------------------------------------------------
def test_a_table_labels_patches_by_position(bags, tmp_path, caplog):
    rows = [("s1.svs", 256, 0, "Tumour"), ("s1", 512.0, 256, "stroma"), ("x/s2", 1000, 1256, "")]
    columns = ("Slide ID", "X", "Y", "patch_label")
    found = with_patch_labels(bags, table(tmp_path / "l.tsv", rows, columns, sep="\t"))
    assert found.instance_labels[[1, 6]].tolist() == [1, 0]
    assert (found.instance_labels >= 0).sum() == 2
    assert found.features is bags.features or (found.features == bags.features).all()
    plain = [("s1", 0, 0, 1), ("s2", 1000, 1000, 0), ("s2", 1256, 1000, -1)]
    found = with_patch_labels(found, table(tmp_path / "p.csv", plain))
    assert found.instance_labels[[0, 12, 13]].tolist() == [1, 0, -1]
    assert (found.instance_labels >= 0).sum() == 2  # those of before are replaced, and it is said
    assert "2 patch labels that the data had are replaced" in caplog.text


def test_what_fits_no_slide_and_no_patch_is_counted_and_named(bags, tmp_path, caplog):
    rows = [("s1", 0, 0, 1), ("s1", 100, 0, 1), ("s1", 4096, 0, 0), ("other", 0, 0, 1)]
    with_patch_labels(bags, table(tmp_path / "l.csv", rows))
    assert "2 labels where no patch is: s1 (100, 0), s1 (4096, 0)" in caplog.text
    assert "labels of 1 slide that were not read: 'other'" in caplog.text


@pytest.mark.parametrize(
    ("rows", "columns", "words"),
    [
        ([("a", 0, 0, 1)], None, r"no label is of a slide .* of 'a', the slides are called 's1'"),
        ([("s1", 9, 0, 1)], None, r"no patch is labelled.* 1 label where no patch is: s1 \(9, 0\)"),
        (
            [("s1", 0, 0, "a"), ("s1", 0, 0, "Tumour")],
            None,
            r"1 patch labelled both .* s1 \(0, 0\)",
        ),
        ([("s1", 0, 0, "a"), ("s1", 256, 0, "b")], None, "positive='tumour' is not among"),
        ([("s1", 0, 0, 2), ("s1", 256, 0, 0)], None, "patch labels: .*not among the classes"),
        ([("s1", "here", 0, 1)], None, "expected a number, found 'here'"),
        ([("s1", 0, 0, 1)], ("slide", "x", "why", "label"), "none for x and y"),
        ([("s1", 0, 0, 1)], ("slide", "a", "b", "label"), "found 'slide', 'a', 'b', 'label'"),
        ([("s1", 0, 0, 1)], ("slide", "x", "y", "note"), "There is none for label"),
        ([("s1", 0, 0, 1)], ("who", "x", "y", "label"), "There is none for slide"),
    ],
)
def test_bad_tables(bags, tmp_path, rows, columns, words):
    file = table(tmp_path / "l.csv", rows, columns or ("slide", "x", "y", "label"))
    with pytest.raises(ValueError, match=words):
        with_patch_labels(bags, file)


def test_a_positive_patch_of_a_negative_slide_is_said(bags, tmp_path, caplog):
    with_patch_labels(bags, table(tmp_path / "l.csv", [("s2", 1000, 1000, 1)]))
    assert "labelled negative with instances labelled positive: 's2'" in caplog.text


def test_without_positions_there_is_nothing_to_find(tmp_path):
    without = Bags.from_arrays([np.ones((3, 2))], [1])
    with pytest.raises(ValueError, match="positions x, y, and these bags have none"):
        with_patch_labels(without, table(tmp_path / "l.csv", [("bag0", 0, 0, 1)]))


# --- Annotations ----------------------------------------------------------------------------------
def test_annotations_label_patches_of_which_most_is_inside(bags, tmp_path):
    tumour = box(0, 0, 2.6 * STEP, 1.4 * STEP)  # 2.6 columns, 1.4 rows: 3 x 1 patches
    stroma = box(3 * STEP, 0, 4 * STEP, 3 * STEP)
    hole = box(10, 10, 240, 240)  # most of the first patch
    features = [feature("Tumour", tumour, hole), feature("Stroma", stroma)]
    found = with_patch_labels(bags, drawn(tmp_path / "s1.svs.geojson", *features))
    expected = np.full(12, -1)
    expected[[1, 2]], expected[[3, 7, 11]] = 1, 0
    assert found.instance_labels[:12].tolist() == expected.tolist()
    assert (found.instance_labels[12:] == -1).all()


def test_parts_of_an_area_and_areas_of_a_class_are_added(bags, tmp_path):
    halves = [box(0, 0, 100, 256), box(130, 0, 256, 256)]
    (tmp_path / "folder").mkdir()
    drawn(tmp_path / "folder" / "s1.geojson", feature("tumour", *halves, geometry="MultiPolygon"))
    two = [
        feature("tumour", box(1000, 1000, 1100, 1256)),
        feature("x", box(1100, 1000, 1256, 1256)),
    ]
    packed = gzip.compress(json.dumps(two).encode())
    (tmp_path / "folder" / "s2.geojson.gz").write_bytes(packed)
    found = with_patch_labels(bags, tmp_path / "folder", positive="tumour")
    assert found.instance_labels[[0, 12]].tolist() == [1, 0]
    two[1]["properties"]["classification"] = {"names": ["tumour"]}
    (tmp_path / "folder" / "s2.geojson.gz").write_bytes(gzip.compress(json.dumps(two).encode()))
    assert with_patch_labels(bags, tmp_path / "folder").instance_labels[12] == 1


def test_centres_offsets_and_microns(tmp_path):
    moved = Bags.from_arrays(
        [np.ones((12, 2))], [1], coords=[CELLS * 0.5], step=STEP * 0.5, names=["s"],
        metadata={"units": "microns", "anchor": "centre"},
    )  # fmt: skip
    # In pixels patch 5 reaches from 128 to 384, seen by QuPath without the first (30, 40).
    area = feature("1", box(128 - 30, 128 - 40, 384 - 30, 384 - 40))
    file = drawn(tmp_path / "s.geojson", area)
    found = with_patch_labels(moved, file, offsets={"s": (30, 40)}, mpp=0.5)
    assert np.flatnonzero(found.instance_labels == 1).tolist() == [5]
    with pytest.raises(ValueError, match=r"annotations are in pixels.*microns.*mpp="):
        with_patch_labels(moved, file)


def test_our_own_export_comes_back(bags, tmp_path):
    rng = np.random.default_rng(7)
    flagged = rng.random(12) < 0.4
    patches = qupath.Patches(CELLS, rng.random(12), flagged=flagged)
    file = qupath.write(tmp_path / "s1.geojson", patches, STEP, gzip=True)
    found = with_patch_labels(bags, file, positive=qupath.FLAGGED)
    assert found.instance_labels[:12].tolist() == flagged.astype(int).tolist()
    file = qupath.write(tmp_path / "s1.geojson", qupath.Patches(CELLS, patches.probability), STEP)
    found = with_patch_labels(bags, file, positive="p >= 0.5")
    assert found.instance_labels[:12].tolist() == (patches.probability >= 0.5).astype(int).tolist()


def test_annotations_that_do_not_count_are_counted(bags, tmp_path, caplog):
    point = feature("tumour")
    point["geometry"] = {"type": "Point", "coordinates": [1, 2]}
    areas = [feature("tumour", box(0, 0, 256, 256)), feature(None, box(0, 0, 9, 9)), point]
    areas.append(feature("tumour", box(90000, 0, 90300, 300)))
    drawn(tmp_path / "s1.geojson", *areas)
    with_patch_labels(bags, tmp_path / "s1.geojson")
    assert "1 annotation without a class" in caplog.text
    assert "1 annotation of points or lines" in caplog.text
    assert "1 of 2 annotations touch no patch; patches lie at x 0 to 1024" in caplog.text


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("s1.geojson", "{", "cannot be read as JSON"),
        ("s1.geojson", "[" * 100_000, "cannot be read as JSON"),
        ("s1.geojson", "[1]", "expected annotations as GeoJSON features, found 1 as number 1"),
        ("s1.geojson", '{"type": "Feature"}', "annotation 1: expected a geometry, found None"),
        ("s1.geojson", [feature("t", [[0, 0], [9, 9]])], "at least three points"),
        ("s1.geojson", [feature("t", [[0, 0], [9, 9], [1e12, 3]])], "at least three points"),
        ("s1.geojson", [feature("t", [[0, 0], [8, 8], [8, 0], [0, 8]])],
         r"annotation 1 \('t'\): its outline crosses itself near x 4, y 4"),
        ("s1.geojson", [feature("t", box(0, 0, 256, 256)), feature("n", box(0, 0, 256, 256))],
         r"1 patch labelled both .*: s1 \(0, 0\)\. .*do not overlap"),
        ("s1.geojson", [feature("t", box(9000, 0, 9300, 300))], "touch no patch.*another slide"),
        ("other.geojson", [feature("t", box(0, 0, 256, 256))], "no label is of a slide.*'other'"),
        ("s1.geojson", [], "no patch is labelled. There are no labels"),
        ("s1.txt", None, "is nothing: expected a table"),
        ("s1.txt", "", "is no file of patch labels: expected a table"),
    ],
)  # fmt: skip
def test_bad_annotations(bags, tmp_path, name, content, words):
    if content is not None:
        (tmp_path / name).write_text(content if isinstance(content, str) else json.dumps(content))
    with pytest.raises(ValueError, match=words):
        with_patch_labels(bags, tmp_path / name, positive="t")


def test_geometry_that_is_none(tmp_path):
    for shape in ({"type": "GeometryCollection", "geometries": []}, {"type": "Polygon"}):
        file = tmp_path / "s.geojson"
        named = {"classification": {"name": "t"}}
        file.write_text(json.dumps({"type": "Feature", "geometry": shape, "properties": named}))
        with pytest.raises(ValueError, match=re.escape("expected a Polygon or a MultiPolygon")):
            annotations.read(file)


def test_labels_are_counted_in_the_log(bags, tmp_path, caplog):
    caplog.set_level(logging.INFO, logger="gpmil")
    with_patch_labels(bags, table(tmp_path / "l.csv", [("s1", 0, 0, 1), ("s1", 256, 0, 0)]))
    assert "1 patches labelled positive, 1 negative, in 1 slides" in caplog.text
