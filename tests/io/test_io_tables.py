"""Readers of tables and .npz: what comes in, what is guessed and said, what is refused."""

import gzip
import logging

import numpy as np
import pandas as pd
import pytest
from command_line import write_table
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gpmil import Bags, io
from gpmil.io import npz, read_with_report, sicapv2, table_files, tables
from gpmil.io.labels import SLIDE_NAMES

FEATURES = [f"feature_{k}" for k in range(4)]


@pytest.fixture
def said(caplog):
    """What was logged at the level that users see."""
    caplog.set_level(logging.WARNING, "gpmil")
    return lambda: caplog.text


def refused(call, *telling):
    with pytest.raises(ValueError) as caught:
        call()
    for words in telling:
        assert words in str(caught.value), str(caught.value)


def same_bags(a: Bags, b: Bags, near=0.0):
    np.testing.assert_allclose(a.features, b.features, rtol=near)
    for name in ("offsets", "labels", "names", "instance_labels"):
        assert getattr(a, name).tolist() == getattr(b, name).tolist(), name
    for name in ("coords", "groups", "step"):
        one, two = getattr(a, name), getattr(b, name)
        assert (one is None) == (two is None) and (one is None or (one == two).all()), name
    assert (a.adjacency != b.adjacency).nnz == 0


# ------------------------------------------------------------------ a plain table


def frame(bags: Bags, **columns) -> pd.DataFrame:
    """One row per patch of a cohort with positions, instance labels and groups."""
    index = bags.bag_index
    df = pd.DataFrame(
        {
            "slide": bags.names[index],
            "label": bags.labels[index],
            "patient": bags.groups[index],
            "x": bags.coords[:, 0],
            "y": bags.coords[:, 1],
            "patch_label": bags.instance_labels,
        }
    )
    return df.assign(**columns, **dict(zip(FEATURES, bags.features.T)))


@pytest.fixture
def df(cohort):
    return frame(cohort)


def written(df, tmp_path, name="cohort.csv"):
    df.to_csv(tmp_path / name, index=False)
    return tmp_path / name


@pytest.mark.parametrize("name", ["cohort.csv", "cohort.csv.gz"])
def test_a_table_comes_back_as_it_was(name, cohort, df, tmp_path, said):
    found = tables.read(written(df, tmp_path, name))
    assert list(found) == ["all"]
    same_bags(found["all"], cohort)
    for words in (
        "'slide'",
        "'label'",
        "'patch_label'",
        "'feature_0' to 'feature_3'",
        "split none",
    ):
        assert words in said()
    assert "step not given; the coordinates show 256 x 256" in said()


def test_rows_in_any_order(cohort, df, tmp_path):
    mixed = df.sample(frac=1, random_state=7)
    found = tables.read(written(mixed, tmp_path), step=256)["all"]
    assert sorted(found.names) == sorted(cohort.names)
    assert found.adjacency.nnz == cohort.adjacency.nnz


def test_parquet(cohort, df, tmp_path):
    df.to_parquet(tmp_path / "cohort.parquet")
    same_bags(tables.read(tmp_path / "cohort.parquet")["all"], cohort)


def test_parquet_without_pyarrow(tmp_path, monkeypatch):
    (tmp_path / "cohort.parquet").write_bytes(b"PAR1")
    monkeypatch.setattr(table_files, "find_spec", lambda name: None)
    refused(lambda: tables.read(tmp_path / "cohort.parquet"), "needs pyarrow", "pip install")


def test_xlsx(cohort, df, tmp_path, said):
    pytest.importorskip("openpyxl")
    with pd.ExcelWriter(tmp_path / "cohort.xlsx") as book:
        df.to_excel(book, sheet_name="patches", index=False)
        df[:1].to_excel(book, sheet_name="notes", index=False)
    same_bags(tables.read(tmp_path / "cohort.xlsx")["all"], cohort, near=1e-12)  # its digits
    assert "of the sheets 'patches', 'notes' the first is read" in said()
    whole = (tmp_path / "cohort.xlsx").read_bytes()
    (tmp_path / "cohort.xlsx").write_bytes(whole[:-400])
    refused(lambda: tables.read(tmp_path / "cohort.xlsx"), "cannot be read as xlsx")


def test_xlsx_without_openpyxl(tmp_path, monkeypatch):
    (tmp_path / "cohort.xlsx").write_bytes(b"PK")
    monkeypatch.setattr(table_files, "find_spec", lambda name: None)
    refused(lambda: tables.read(tmp_path / "cohort.xlsx"), "gpmil[xlsx]", "save the table as csv")


@pytest.mark.parametrize("separator", [";", "\t", "|"])
def test_separators_are_told_by_the_header(separator, cohort, df, tmp_path):
    renamed = df.rename(columns={"slide": "Slide ID", "patient": "bcr_patient_barcode"})
    renamed = renamed.assign(**{"a, b, c": 1}) if separator == ";" else renamed
    renamed.to_csv(tmp_path / "cohort.csv", sep=separator, index=False)
    features = [f"feature_{k}" for k in range(4)]
    same_bags(tables.read(tmp_path / "cohort.csv", features=features)["all"], cohort)


def test_columns_are_guessed_generously():
    for name in ("Slide Filename", "Slide ID", "slideName", "File Name", "FILENAME", "slide.path"):
        assert tables.like(SLIDE_NAMES, ["note", name]) == name
    names = ["Case ID", "PatientID", "patient_id", "PATIENT", "case_submitter_id"]
    for name in [*names, "bcr_patient_barcode"]:
        assert tables.like(tables.GUESSES["patient"], ["note", name]) == name
    assert tables.like(SLIDE_NAMES, ["slides", "note"]) is None


def test_classes_of_a_table_of_patches(df, tmp_path):
    """Counted by slide, not by patch."""
    slides = df["slide"].unique()
    kind = dict(zip(slides, ["Tumour"] * 10 + ["tumour"] * 4 + ["benign"] * 5 + ["?"] * 3))
    path = written(df.assign(label=df["slide"].map(kind)), tmp_path)
    refused(lambda: tables.read(path, positive="tumour"), "'Tumour' (14), 'benign' (5), '?' (3)")
    bags, report = read_with_report(path, positive="tumour", exclude="?")
    assert report.classes == {
        "Tumour": (14, "positive"),
        "benign": (5, "negative"),
        "?": (3, "left out"),
    }
    assert (report.positive, report.negative) == ("Tumour", "benign")
    assert bags.class_names == ("benign", "Tumour")
    assert np.bincount(bags.labels + 1).tolist() == [3, 5, 14]
    assert any("taken as one class" in note for note in report.notes)


def test_npz_classes(cohort, tmp_path):
    path = packed(tmp_path, arrays(cohort, y_bag=2 + cohort.labels))
    found = npz.read(path, step=256, positive=3)["all"]
    assert found.labels.tolist() == cohort.labels.tolist() and found.class_names == ("2", "3")


def test_splits(cohort, df, tmp_path):
    part = np.where(np.arange(len(cohort)) % 3 == 0, "test", "train")
    df["split"] = part[cohort.bag_index]
    path = written(df, tmp_path)
    found = tables.read(path, step=256)
    assert list(found) == ["test", "train"]
    for value, bags in found.items():
        same_bags(bags, cohort[part == value])
    assert list(tables.read(path, split=None, step=256)) == ["all"]


def test_a_split_of_one_class_keeps_the_names_of_both(cohort, df, tmp_path):
    df["split"] = np.where(df["label"] == 1, "a", "b")
    df["label"] = np.where(df["label"] == 1, "tumour", "benign")
    found = tables.read(written(df, tmp_path), positive="tumour")
    assert {k: set(v.labels) for k, v in found.items()} == {"a": {1}, "b": {0}}
    assert found["b"].class_names == ("benign", "tumour")


def test_names_of_slides_stay_as_they_are_written(df, tmp_path):
    number = {name: f"{k:03d}" for k, name in enumerate(df["slide"].unique())}
    df["slide"] = df["slide"].map(number)
    found = tables.read(written(df, tmp_path))["all"]
    assert found.names[:3].tolist() == ["000", "001", "002"]


def test_every_guess_can_be_overridden(cohort, df, tmp_path):
    odd = df.rename(columns={"slide": "S", "label": "L", "patient": "P", "x": "a", "y": "b"})
    odd = odd.rename(columns={"patch_label": "H"}).assign(slide="all", label=0, fold=1)
    path = written(odd, tmp_path)
    found = tables.read(
        path, slide="S", label="L", patient="P", coords=("a", "b"), instance_label="H",
        features="feature_", split="fold", step=256,
    )  # fmt: skip
    same_bags(found["1"], cohort)
    bare = tables.read(
        path, slide="S", label=False, patient=False, instance_label=False, coords=None,
        features=["feature_2", "H"],
    )["all"]  # fmt: skip
    assert bare.coords is None and bare.groups is None and bare.n_features == 2
    assert (bare.labels == -1).all() and (bare.instance_labels == -1).all()


def test_usual_names_in_any_capitals(cohort, df, tmp_path):
    renamed = {"slide": "Slide_ID", "label": "TARGET", "patient": "Case_ID", "x": "coord_x",
               "y": "Coord_Y", "patch_label": "Tile_Label"}  # fmt: skip
    found = tables.read(written(df.rename(columns=renamed), tmp_path), step=256)["all"]
    same_bags(found, cohort)


def test_features_in_the_order_of_their_numbers(tmp_path):
    columns = [f"f{k}" for k in (10, 9, 2, 1)]
    df = pd.DataFrame([[1.0, 2, 3, 4]], columns=columns).assign(slide="s", label=1, area=3.5)
    assert tables.read(written(df, tmp_path))["all"].features.tolist() == [[4, 3, 2, 1]]


def test_features_without_numbers(tmp_path, said):
    df = pd.DataFrame({"slide": ["s"], "label": [1], "red": [0.5], "blue": [2.0], "note": ["a"]})
    df.to_csv(tmp_path / "t.csv")  # with the numbers of the rows as a nameless column
    assert tables.read(tmp_path / "t.csv")["all"].features.tolist() == [[0.5, 2.0]]
    assert "'red' to 'blue' (2 columns)" in said()


def test_no_positions_and_no_labels(df, tmp_path, said):
    found = tables.read(written(df.drop(columns=["x", "y", "label"]), tmp_path))["all"]
    assert found.coords is None and (found.labels == -1).all()
    assert "label none" in said() and "positions none" in said()


def test_missing_labels_are_unlabelled_slides(df, tmp_path):
    df.loc[df["slide"] == "slide03", "label"] = np.nan
    df.loc[0, "patch_label"] = np.nan
    found = tables.read(written(df, tmp_path), step=256)["all"]
    assert found.labels[3] == -1 and found.instance_labels[0] == -1


@pytest.mark.parametrize(
    ("column", "value", "telling"),
    [
        ("feature_2", np.nan, "1 value missing or infinite"),
        ("feature_0", np.inf, "missing or infinite"),
        ("feature_1", "n/k", "expected a number, found 'n/k'"),
        ("y", np.nan, "missing or infinite"),
        ("slide", None, "1 value missing"),
        ("patient", None, "Every row needs one"),
    ],
)
def test_a_bad_value_is_found(column, value, telling, df, tmp_path):
    df[column] = df[column].astype(object)
    df.loc[17, column] = value
    path = written(df, tmp_path)
    refused(lambda: tables.read(path), str(path), telling, "row 18", repr(column))


def test_labels_that_differ_in_a_slide(df, tmp_path):
    df.loc[df.index[df["slide"] == "slide05"][0], "label"] = (
        1 - df["label"][df["slide"] == "slide05"].iloc[0]
    )
    refused(lambda: tables.read(written(df, tmp_path)), "label", "slide05", "1 such bag")


def test_a_slide_in_two_splits(df, tmp_path):
    df["split"] = np.where(df.index == df.index[df["slide"] == "slide02"][0], "test", "train")
    refused(lambda: tables.read(written(df, tmp_path)), "split", "slide02")


def test_words_as_labels_need_the_positive_one(df, tmp_path):
    df["label"] = np.where(df["label"] == 1, "tumour", "benign")
    refused(lambda: tables.read(written(df, tmp_path)), "positive=", "benign")


def test_one_patch_twice(df, tmp_path):
    refused(
        lambda: tables.read(written(pd.concat([df, df.iloc[[2]]]), tmp_path)),
        "slide00",
        "cohort.csv",
    )


@pytest.mark.parametrize(
    ("options", "telling"),
    [
        ({"slide": "SLIDE"}, "slide: there is no column 'SLIDE'"),
        ({"patient": True}, "patient must be the name of a column"),
        ({"split": "fold"}, "split: there is no column 'fold'"),
        ({"coords": ("x", "row")}, "coords: there is no column 'row'"),
        ({"features": "emb_"}, "expected columns 'emb_'..."),
        ({"features": ["feature_9"]}, "features: there is no column 'feature_9'"),
    ],
)
def test_columns_that_are_not_there(options, telling, df, tmp_path):
    refused(lambda: tables.read(written(df, tmp_path), **options), telling)


def test_tables_that_are_none(df, tmp_path):
    def file(name, content):
        (tmp_path / name).write_bytes(content)
        return tmp_path / name

    refused(lambda: tables.read(written(df.drop(columns="slide"), tmp_path)), "slide=", "'label'")
    refused(lambda: tables.read(written(df.drop(columns="y"), tmp_path)), "'x' has no partner")
    refused(lambda: tables.read(written(df[["slide", "label"]], tmp_path)), "columns of numbers")
    refused(lambda: tables.read(written(df[:0], tmp_path)), "no rows")
    refused(lambda: tables.read(tmp_path / "none.csv"), "is no file")
    refused(lambda: tables.read(file("t.txt", b"slide\n")), ".csv.gz")
    refused(lambda: tables.read(file("empty.csv", b"")), "cannot be read")
    refused(lambda: tables.read(file("odd.csv", b"slide,f1\na,1\nb,1,2,3\n")), "cannot be read")
    other = "präparat;f1\na;1\n".encode("latin-1")
    refused(lambda: tables.read(file("other.csv", other)), "save it as “CSV UTF-8”")
    refused(lambda: tables.read(file("odd.csv.gz", b"slide,f1\na,1\n")), "gzip")
    half = gzip.compress(written(df, tmp_path).read_bytes())[:-40]
    refused(lambda: tables.read(file("half.csv.gz", half)), "gzip")
    refused(lambda: tables.read(file("latin.csv", b"slide,f1\n\xff\xfe,1\n")), "cannot be read")
    twice = b"slide,label,f1,f1\na,1,2,3\n"
    refused(lambda: tables.read(file("twice.csv", twice)), "share a name: 'f1'")


# ------------------------------------------------------------------ npz


def arrays(bags: Bags, **others):
    return {
        "X": bags.features,
        "bag": bags.bag_index.astype(np.int32),
        "y_bag": bags.labels.astype(np.int8),
        "bag_id": bags.names,
        "y_inst": bags.instance_labels.astype(np.int8),
        "x": bags.coords[:, 0].astype(np.int32),
        "y": bags.coords[:, 1].astype(np.int32),
        "patient": bags.groups,
    } | others


def packed(tmp_path, content, without=()):
    path = tmp_path / "cohort.npz"
    np.savez(path, **{k: v for k, v in content.items() if k not in without})
    return path


def test_npz_comes_back_as_it_was(cohort, tmp_path, said):
    path = packed(tmp_path, arrays(cohort))
    same_bags(npz.read(path)["all"], cohort)
    assert "step not given; the coordinates show 256 x 256" in said()
    same_bags(npz.read(path, step=256)["all"], cohort)


def test_npz_with_the_least_there_can_be(cohort, tmp_path):
    content = arrays(cohort)
    content["bag_id"] = np.arange(len(cohort))
    found = npz.read(packed(tmp_path, content, ("y_inst", "x", "y", "patient")))["all"]
    assert found.coords is None and found.groups is None and found.graph is None
    assert found.names[3] == "3" and found.features.dtype == cohort.features.dtype


@settings(
    max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(seed=st.integers(0, 2**20))
def test_npz_rows_in_any_order(seed, cohort, tmp_path):
    """Rows of a bag keep their order, bags that of bag_id."""
    order = np.random.default_rng(seed).permutation(cohort.n_instances)
    content = arrays(cohort)
    for name in ("X", "bag", "y_inst", "x", "y"):
        content[name] = content[name][order]
    found = npz.read(packed(tmp_path, content), step=256)["all"]
    assert found.names.tolist() == cohort.names.tolist()
    back = np.concatenate([order[cohort.bag_index[order] == b] for b in range(len(cohort))])
    assert (found.features == cohort.features[back]).all()
    assert (found.coords == cohort.coords[back]).all()


def test_npz_splits(cohort, tmp_path):
    split = np.where(np.arange(len(cohort)) < 7, "test", "train")
    found = npz.read(packed(tmp_path, arrays(cohort, split=split)), step=256)
    assert {k: len(v) for k, v in found.items()} == {"test": 7, "train": len(cohort) - 7}
    same_bags(found["train"], cohort[7:])


def test_npz_bags_without_an_instance(cohort, tmp_path, said):
    content = arrays(cohort)
    for name in ("y_bag", "bag_id", "patient"):
        content[name] = np.concatenate([content[name], content[name][:1]])
    content["bag_id"] = content["bag_id"].astype("U16")
    content["bag_id"][-1] = "nobody"
    found = npz.read(packed(tmp_path, content), step=256)["all"]
    same_bags(found, cohort)
    assert "1 bag without an instance left out: 'nobody'" in said()


@pytest.mark.parametrize(
    ("change", "without", "telling"),
    [
        ({}, ("bag_id", "y_bag"), "no 'y_bag', 'bag_id'"),
        ({}, ("x",), "one is missing"),
        ({"z": np.zeros(3)}, (), "z: expected one axis"),
        ({"X": np.zeros(5)}, (), "X: expected rows and columns"),
        ({"y_bag": np.zeros(2)}, (), "y_bag"),
        ({"split": np.array(["a", "b"])}, (), "split"),
        ({"y_bag": np.full(22, 3)}, (), "expected 0 and 1 (-1 or empty: unlabelled)"),
        ({"bag_id": np.array([None] * 22)}, (), "cannot be read"),
    ],
)
def test_npz_with_something_wrong(change, without, telling, cohort, tmp_path):
    path = packed(tmp_path, arrays(cohort) | change, without)
    refused(lambda: npz.read(path), str(path), telling)


def test_npz_bag_numbers(cohort, tmp_path):
    for bag in (cohort.bag_index - 1, cohort.bag_index + 1, cohort.bag_index * 1.0):
        path = packed(tmp_path, arrays(cohort, bag=bag))
        refused(lambda path=path: npz.read(path), "whole numbers from 0 to 21")


def test_npz_nan(cohort, tmp_path):
    x = cohort.features.copy()
    x[3, 1] = np.nan
    refused(lambda: npz.read(packed(tmp_path, arrays(cohort, X=x))), "NaN", "slide00")


def test_files_that_are_no_npz(cohort, tmp_path):
    path = packed(tmp_path, arrays(cohort))
    half = tmp_path / "half.npz"
    half.write_bytes(path.read_bytes()[:-200])
    refused(lambda: npz.read(half), "no .npz file")
    refused(lambda: npz.read(tmp_path / "none.npz"), "is no file")
    flipped = bytearray(path.read_bytes())
    flipped[300] ^= 0xFF
    half.write_bytes(bytes(flipped))
    refused(lambda: npz.read(half), "cannot be read")


# ------------------------------------------------------------------ SICAPv2

# (slide, patient, primary, secondary), patches as (region, row, col)
SLIDES = [
    ("16B01", "7", 4, 5),
    ("16B02", "7", 0, 0),
    ("17B03H", "12", 3, 3),
    ("18B04", "900", 0, 0),
]
# The second region begins 100 px beside the first one's lattice, one step below it.
ORIGIN = {1: (5000, 70000), 2: (5100, 72048)}
PATCHES = [(1, 0, 0), (1, 0, 1), (1, 1, 0), (1, 1, 1), (2, 0, 0), (2, 0, 1)]


def sicap_frame(slides, seed=0):
    rng = np.random.default_rng(seed)
    rows = []
    for slide, _, primary, secondary in slides:
        for k, (region, row, col) in enumerate(PATCHES):
            x, y = ORIGIN[region][0] + 1024 * col, ORIGIN[region][1] + 1024 * row
            name = f"images/{slide}_Block_Region_{region}_{row}_{col}_xini_{x}_yini_{y}.jpg"
            label = 0 if primary == 0 else (primary - 2 if k % 2 else 4)
            grades = (max(0, primary - 2), max(0, secondary - 2))
            rows.append((1, *rng.random(12).round(5), name, label, slide, *grades))
    features = [f"feature_{k}" for k in range(12)]
    last = ["instance_name", "instance_label", "bag_name", "bag_label_primary"]
    columns = ["cnn_prediction", *features, *last, "bag_label_secondary"]
    return pd.DataFrame(rows, columns=columns)


@pytest.fixture
def folder(tmp_path):
    """A folder as it is published, much smaller; a function that writes parts of it anew."""

    def write(**files):
        for name, table in files.items():
            table.to_csv(tmp_path / f"{name}.csv", index=False)
        return tmp_path

    columns = ["slide_id", "patient_id", "Gleason_primary", "Gleason_secondary"]
    write(
        Train=sicap_frame(SLIDES[:2]),
        Val=sicap_frame(SLIDES[2:3], 1),
        Test=sicap_frame(SLIDES[3:], 2),
        wsi_labels=pd.DataFrame([*SLIDES, ("19B99", "3", 5, 5)], columns=columns),
    )
    return write


def test_sicapv2(folder):
    found = sicapv2.read(folder())
    assert {k: v.names.tolist() for k, v in found.items()} == {
        "train": ["16B01", "16B02"], "val": ["17B03H"], "test": ["18B04"]
    }  # fmt: skip
    train = found["train"]
    assert train.labels.tolist() == [1, 0] and train.groups.tolist() == ["7", "7"]
    assert train.features.shape == (12, 12) and train.features.dtype == np.float32
    assert train.instance_labels.tolist() == [-1, 1] * 3 + [0] * 6
    assert train.coords[:2].tolist() == [[5000, 70000], [6024, 70000]]
    assert (train.step == 1024).all() and train.graph == "grid4"
    expected = sicap_frame(SLIDES[:2])[[f"feature_{k}" for k in range(12)]].to_numpy()
    np.testing.assert_allclose(train.features, expected, rtol=1e-6)


def test_sicapv2_regions_have_no_edge_between_them(folder):
    bags = sicapv2.read(folder())["val"]
    region = np.array([r for r, _, _ in PATCHES])
    rows, columns = bags.adjacency.nonzero()
    assert (region[rows] == region[columns]).all()
    # A square of four and a pair; by position alone the lower row would join the pair.
    assert bags.adjacency.nnz // 2 == 4 + 1
    alone = Bags(bags.features, bags.offsets, coords=bags.coords, step=1024, graph="grid4")
    assert alone.adjacency.nnz // 2 == 4 + 1 + 2


def test_sicapv2_rows_in_any_order(folder):
    whole = sicapv2.read(folder())["train"]
    mixed = sicap_frame(SLIDES[:2]).sample(frac=1, random_state=3)
    found = sicapv2.read(folder(Train=mixed))["train"]
    assert sorted(found.names) == sorted(whole.names)
    for name in found.names:
        one, two = (b[np.flatnonzero(b.names == name)] for b in (found, whole))
        order = [one.coords.tolist().index(c) for c in two.coords.tolist()]
        assert (one.features[order] == two.features).all()
        assert (one.adjacency.toarray()[np.ix_(order, order)] == two.adjacency.toarray()).all()


def test_sicapv2_patches_listed_twice(folder, said):
    table = sicap_frame(SLIDES[:2])
    again = table[(table["instance_label"] > 0) & (table["instance_label"] < 4)]
    # Unlabelled before the labelled row, and after it.
    first = again.assign(instance_label=4)
    found = sicapv2.read(folder(Train=pd.concat([first, table, first])))["train"]
    once = sicapv2.read(folder(Train=table))["train"]
    assert sorted(found.instance_labels) == sorted(once.instance_labels)
    assert found.n_instances == once.n_instances and found.adjacency.nnz == once.adjacency.nnz
    assert f"Train.csv: {2 * len(again)} " in said() and "listed again" in said()


def test_sicapv2_a_patch_benign_and_malignant(folder):
    table = sicap_frame(SLIDES[:2])
    torn = table.iloc[[1]].assign(instance_label=0)
    refused(lambda: sicapv2.read(folder(Train=pd.concat([table, torn]))), "both benign", "16B01")


def test_sicapv2_val_that_is_test(folder, said):
    found = sicapv2.read(folder(Val=sicap_frame(SLIDES[3:], 2)))
    assert set(found) == {"train", "test"}
    assert "Val.csv holds the slides of Test.csv and is left out" in said()


def test_sicapv2_parts_may_be_missing(folder, said):
    path = folder()
    (path / "Val.csv").unlink()
    (path / "wsi_labels.csv").unlink()
    found = sicapv2.read(path)
    assert set(found) == {"train", "test"} and found["train"].groups is None
    assert found["train"].labels.tolist() == [1, 0]
    assert "patients are unknown" in said()
    bare = sicap_frame(SLIDES[:2]).drop(columns=["bag_label_primary", "bag_label_secondary"])
    refused(lambda: sicapv2.read(folder(Train=bare)), "wsi_labels.csv", "no labels")


def test_sicapv2_only_names_and_features(folder, said):
    least = ["instance_name", *(f"feature_{k}" for k in range(12))]
    slides = pd.DataFrame([(s, int(p > 0)) for s, _, p, _ in SLIDES], columns=["slide", "P"])
    found = sicapv2.read(folder(Train=sicap_frame(SLIDES[:2])[least], wsi_labels=slides))["train"]
    assert found.labels.tolist() == [1, 0] and (found.instance_labels == -1).all()
    assert "patch labels are unknown" in said()


def test_sicapv2_patients_in_two_splits(folder, said):
    sicapv2.read(folder(Train=sicap_frame(SLIDES[:1]), Val=sicap_frame(SLIDES[1:2])))
    assert "1 patient in more than one split: '7'" in said()


def changed(column, value, row=3):
    table = sicap_frame(SLIDES[:2])
    table[column] = table[column].astype(object)
    table.loc[row, column] = value
    return table


@pytest.mark.parametrize(
    ("column", "value", "telling"),
    [
        ("instance_name", "images/16B01_1_2.jpg", "row 4"),
        ("instance_name", None, "patch name"),
        ("bag_name", "16B02", "by instance_name"),
        ("instance_label", 7, "expected 0 (non-cancerous)"),
        ("feature_3", np.nan, "row 4"),
        ("feature_3", "x", "column 'feature_3'"),
        ("bag_label_primary", 0, "differ on the label"),
    ],
)
def test_sicapv2_with_something_wrong(column, value, telling, folder):
    table = changed(column, value)
    if column == "bag_label_primary":
        table[["bag_label_primary", "bag_label_secondary"]] = 0
    refused(lambda: sicapv2.read(folder(Train=table)), telling)


def test_sicapv2_slides(folder):
    refused(lambda: sicapv2.read(folder(Val=sicap_frame(SLIDES[1:3]))), "Train.csv and Val.csv")
    slides = pd.DataFrame(SLIDES[:2], columns=["slide_id", "patient_id", "a", "b"])
    refused(lambda: sicapv2.read(folder(wsi_labels=slides, Val=sicap_frame(SLIDES[2:3]))),
            "Gleason_primary")  # fmt: skip
    slides = slides.rename(columns={"a": "Gleason_primary", "b": "Gleason_secondary"})
    refused(lambda: sicapv2.read(folder(wsi_labels=slides)), "not listed: '17B03H', '18B04'")
    twice = pd.concat([slides, slides])
    refused(lambda: sicapv2.read(folder(wsi_labels=twice)), "every slide once", "16B01")


def test_sicapv2_columns_and_folders(folder, tmp_path):
    refused(lambda: sicapv2.read(folder(Train=pd.DataFrame({"a": [1]}))), "instance_name")
    refused(lambda: sicapv2.read(tmp_path / "none"), "Train.csv", "found none")


# ------------------------------------------------------------------ what is there decides


def test_read_by_what_is_there(cohort, df, folder, tmp_path):
    assert set(io.read_splits(folder())) == {"train", "val", "test"}
    one = tmp_path / "one"
    one.mkdir()
    path = packed(one, arrays(cohort))
    (one / "README.txt").write_text("notes", encoding="utf-8")
    same_bags(io.read_splits(one, step=256)["all"], cohort)
    same_bags(io.read_splits(str(path))["all"], cohort)
    other = tmp_path / "other"
    other.mkdir()
    same_bags(io.read_splits(written(df, other), step=256)["all"], cohort)
    same_bags(io.read_splits(other, step=256)["all"], cohort)


def test_read_what_nobody_understands(cohort, df, tmp_path):
    refused(lambda: io.read_splits(tmp_path / "none"), "nothing at", ".npz", "Train.csv")
    refused(lambda: io.read_splits(tmp_path), "found none", ".csv.gz")
    path = packed(tmp_path, arrays(cohort))
    refused(lambda: io.read_splits(path, slide="s"), "takes no option 'slide'", "'step'")
    written(df, tmp_path)
    refused(lambda: io.read_splits(tmp_path), "cohort.csv, cohort.npz", "Name the file")
    (tmp_path / "a.h5").write_bytes(b"")
    refused(lambda: io.read_splits(tmp_path / "a.h5"), "no file that can be read", ".parquet")


# ------------------------------------------------------------------ the real files


@pytest.mark.data
def test_real_sicapv2(data_dir, tmp_path):
    """The .npz as it is, and as the tables it was made of."""
    path = data_dir / "sicapv2_split3"
    found = io.read_splits(path)["all"]
    assert (len(found), found.n_instances, found.n_features) == (30, 2713, 128)
    assert found.labels.sum() == 21 and (found.step == 1024).all()
    assert found.adjacency.nnz // 2 == 4085
    with np.load(path / "sicapv2_split3.npz", allow_pickle=False) as d:
        table = pd.DataFrame(d["X"], columns=[f"feature_{k}" for k in range(128)])
        table["instance_name"], table["instance_label"] = d["name"], d["inst_label_raw"]
        table["bag_name"] = d["bag_id"][d["bag"]]
    table.to_csv(tmp_path / "Test.csv", index=False)
    layout = pd.read_csv(data_dir / "sicapv2_layout" / "sicapv2_layout.csv.gz")
    columns = ["slide", "patient_id", "Gleason_primary", "Gleason_secondary"]
    slides = layout[columns].drop_duplicates().rename(columns={"slide": "slide_id"})
    slides.to_csv(tmp_path / "wsi_labels.csv", index=False)
    bags = sicapv2.read(tmp_path)["test"]
    assert bags.names.tolist() == found.names.tolist()
    assert (bags.features == found.features).all() and (bags.coords == found.coords).all()
    assert (bags.labels == found.labels).all()
    assert (bags.instance_labels == found.instance_labels).all()
    assert (bags.adjacency != found.adjacency).nnz == 0


@pytest.mark.data
@pytest.mark.parametrize(
    ("name", "shape", "edges"),
    [
        ("crchisto_colon/crchisto_colon_grid.npz", (70, 7000, 1280), 70 * 180),
        ("musk1", (92, 476, 166), 0),
        ("elephant", (200, 1391, 230), 0),
    ],
)
def test_real_npz(name, shape, edges, data_dir):
    found = io.read_splits(data_dir / name)["all"]
    assert (len(found), found.n_instances, found.n_features) == shape
    assert found.adjacency.nnz // 2 == edges


# --- What is said of labels -----------------------------------------------------------------------
def test_zero_may_be_the_positive_class(tmp_path):
    path = write_table(tmp_path / "own.csv", n_slides=6)
    assert io.read(path).labels.tolist() == [0, 1] * 3
    assert io.read(path, positive=0).labels.tolist() == [1, 0] * 3


def test_labels_of_patients_may_be_two_frames(tmp_path):
    path = write_table(tmp_path / "own.csv", n_slides=6)
    labels = pd.DataFrame({"patient": ["p0", "p1", "p2"], "label": [0, 1, 1]})
    slides = pd.DataFrame(
        {"slide": [f"s{b:02d}" for b in range(6)], "patient": [f"p{b // 2}" for b in range(6)]}
    )
    assert io.read(path, labels, slide_table=slides).labels.tolist() == [0, 0, 1, 1, 1, 1]


def test_an_option_that_there_is_not_is_a_mistake_of_the_call(tmp_path):
    path = write_table(tmp_path / "own.csv", n_slides=6)
    with pytest.raises(TypeError, match="takes no option 'labell'"):
        read_with_report(path, labell="x")
