"""The ragged cohort: what it keeps, what it refuses, and that a subset equals a rebuild."""

import copy
import logging
import pickle
import warnings

import joblib
import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles import graphs as oracles
from scipy.sparse import csr_array, csr_matrix
from sklearn.model_selection import GroupKFold, StratifiedKFold, train_test_split
from sklearn.utils import _safe_indexing
from sklearn.utils.validation import _num_samples, check_consistent_length, indexable

from gpmil.data.bags import Bags
from gpmil.warn import warn_caller

SIZES = [4, 1, 6, 3, 2]
LABELS = [1, 0, 1, -1, 0]


def make_arrays(sizes=SIZES, width=3, dtype=np.float64, seed=0):
    rng = np.random.default_rng(seed)
    return [rng.normal(size=(n, width)).astype(dtype) for n in sizes]


def make_coords(sizes=SIZES, step=256, seed=1):
    rng = np.random.default_rng(seed)
    cells = [rng.choice(16, size=n, replace=False) for n in sizes]
    return [np.stack([c % 4, c // 4], axis=1) * step + rng.integers(0, 9999, 2) for c in cells]


def make_bags(**keywords):
    defaults = {
        "labels": LABELS,
        "coords": make_coords(),
        "step": 256,
        "names": list("abcde"),
        "groups": ["p1", "p2", "p2", "p3", "p1"],
        "instance_labels": [[0, 1, -1, 0], None, [1] * 6, [-1, 0, 0], [0, 0]],
        "metadata": {"encoder": "resnet50"},
    }
    return Bags.from_arrays(make_arrays(), **(defaults | keywords))


def said(caplog):
    return [record.getMessage() for record in caplog.records if record.name == "gpmil"]


def assert_same(found, expected):
    """Every attribute equal."""
    assert len(found) == len(expected)
    for name in ("features", "offsets", "sizes", "labels", "names", "instance_labels"):
        np.testing.assert_array_equal(getattr(found, name), getattr(expected, name), name)
    for name in ("groups", "coords", "step"):
        mine, theirs = getattr(found, name), getattr(expected, name)
        assert (mine is None) == (theirs is None), name
        if mine is not None:
            np.testing.assert_array_equal(mine, theirs, name)
    np.testing.assert_array_equal(found.adjacency.toarray(), expected.adjacency.toarray())
    assert found.adjacency.has_canonical_format
    assert (found.graph, found.class_names) == (expected.graph, expected.class_names)
    assert found.metadata == expected.metadata


# ---------------------------------------------------------------- what it holds


def test_attributes():
    arrays, coords = make_arrays(), make_coords()
    bags = make_bags()
    assert len(bags) == 5 and bags.shape == (5,)
    assert (bags.n_instances, bags.n_features) == (16, 3)
    np.testing.assert_array_equal(bags.features, np.concatenate(arrays))
    assert bags.offsets.tolist() == [0, 4, 5, 11, 14, 16] and bags.offsets.dtype == np.int64
    assert bags.sizes.tolist() == SIZES
    assert bags.labels.tolist() == LABELS and bags.labels.dtype == np.int64
    assert bags.names.tolist() == list("abcde") and bags.names.dtype.kind == "U"
    assert bags.groups.tolist() == ["p1", "p2", "p2", "p3", "p1"]
    np.testing.assert_array_equal(bags.coords, np.concatenate(coords))
    assert bags.coords.dtype == np.float64
    known = [0, 1, -1, 0, -1, 1, 1, 1, 1, 1, 1, -1, 0, 0, 0, 0]
    assert bags.instance_labels.tolist() == known and bags.instance_labels.dtype == np.int64
    assert bags.bag_index.tolist() == [0] * 4 + [1] + [2] * 6 + [3] * 3 + [4] * 2
    assert bags.step.tolist() == [[256, 256]] * 5
    assert bags.graph == "grid4" and bags.has_geometry
    expected = oracles.block_diagonal([oracles.grid(c.astype(float), 256, False) for c in coords])
    assert expected.sum() > 0
    np.testing.assert_array_equal(bags.adjacency.toarray(), expected)
    assert bags.class_names is None
    assert bags.metadata == {"encoder": "resnet50"}


def test_defaults_without_labels_and_geometry():
    bags = Bags.from_arrays(make_arrays())
    assert bags.labels.tolist() == [-1] * 5
    assert bags.instance_labels.tolist() == [-1] * 16
    assert bags.names.tolist() == ["bag0", "bag1", "bag2", "bag3", "bag4"]
    assert bags.groups is None and bags.coords is None and bags.step is None
    assert bags.graph is None and not bags.has_geometry
    assert bags.adjacency.shape == (16, 16) and bags.adjacency.nnz == 0
    assert bags.metadata == {}


def test_the_constructor_takes_what_a_subset_holds():
    twice = make_bags()[[2, 0, 2]]
    again = Bags(
        twice.features,
        twice.offsets,
        labels=twice.labels,
        names=twice.names,
        groups=twice.groups,
        coords=twice.coords,
        instance_labels=twice.instance_labels,
        adjacency=twice.adjacency,
        step=twice.step,
        graph=twice.graph,
        metadata=twice.metadata,
    )
    assert_same(again, twice)


def test_default_names_sort_as_they_count():
    names = Bags.from_arrays(make_arrays([1] * 11)).names
    assert names[0] == "bag00" and names[10] == "bag10" and sorted(names) == names.tolist()


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_float_types_are_kept(dtype):
    bags = Bags.from_arrays(make_arrays(dtype=dtype))
    assert bags.features.dtype == dtype and bags[[3, 1]].features.dtype == dtype


@pytest.mark.parametrize("dtype", [bool, np.int8, np.uint16, np.int64])
def test_whole_numbers_become_float64(dtype):
    features = np.array([[0, 1], [1, 0], [1, 1]], dtype=dtype)
    bags = Bags(features, [0, 2, 3])
    assert bags.features.dtype == np.float64
    np.testing.assert_array_equal(bags.features, features)


def test_foreign_byte_order_becomes_native():
    features = np.arange(6.0).reshape(3, 2)
    bags = Bags(features.astype(">f4"), [0, 3])
    assert bags.features.dtype.isnative and bags.features.dtype == np.float32
    np.testing.assert_array_equal(bags.features, features)


def test_constructor_does_not_copy():
    features = np.arange(12.0).reshape(6, 2)
    bags = Bags(features, [0, 4, 6])
    assert np.shares_memory(bags.features, features)
    assert Bags.from_arrays([features]).features.base is not None
    assert np.shares_memory(Bags.from_arrays([features]).features, features)


def test_split():
    bags = make_bags()
    parts = bags.split(np.arange(16) * 10)
    assert [p.tolist() for p in parts[:2]] == [[0, 10, 20, 30], [40]]
    assert [len(p) for p in parts] == SIZES
    assert bags.split(np.ones((16, 2)))[2].shape == (6, 2)
    with pytest.raises(ValueError, match="16 in all, found 15"):
        bags.split(np.ones(15))


def test_repr_tells():
    text = repr(make_bags())
    assert len(text.splitlines()) == 5
    for fact in (
        "5 bags (2 positive, 2 negative, 1 unlabelled)",
        "16 instances x 3 features, float64",
        "1 to 6, median 3",
        "graph: grid4",
        "groups: 3",
        "instance labels: 13 known, 7 of them positive",
    ):
        assert fact in text
    edges = make_bags().adjacency.nnz // 2
    isolated = int((make_bags().adjacency.sum(axis=1) == 0).sum())
    assert f"{edges} edges" in text and f"{isolated} instances without" in text
    assert "graph: none" in repr(Bags.from_arrays(make_arrays()))
    assert "0 bags" in repr(make_bags()[[]])


# ---------------------------------------------------------------- immutable, picklable


def test_attributes_cannot_be_set():
    bags = make_bags()
    for name in ("labels", "features", "anything", "sizes"):
        with pytest.raises(AttributeError, match="immutable"):
            setattr(bags, name, 1)
    with pytest.raises(AttributeError):
        del bags.labels


ARRAYS = ("features", "offsets", "labels", "names", "groups", "coords", "instance_labels", "step")


@pytest.mark.parametrize(
    "variant",
    [lambda b: b, lambda b: b[1:3], lambda b: b[[3, 0]], lambda b: pickle.loads(pickle.dumps(b))],
)
def test_arrays_are_read_only(variant):
    bags = variant(make_bags())
    for name in ARRAYS:
        with pytest.raises(ValueError, match="read-only"):
            getattr(bags, name)[0] = getattr(bags, name)[0]
    for part in (bags.adjacency.data, bags.adjacency.indices, bags.adjacency.indptr):
        assert not part.flags.writeable


def test_callers_arrays_stay_writeable():
    features, labels = np.ones((3, 2)), np.array([0, 1])
    coords = np.array([[0.0, 0], [0, 1], [0, 2]])
    graph = csr_array(([1.0, 1.0], ([0, 1], [1, 0])), shape=(3, 3))
    Bags(features, [0, 2, 3], labels=labels, coords=coords, adjacency=graph)
    for array in (features, labels, coords, graph.data, graph.indices):
        assert array.flags.writeable


def test_metadata_cannot_be_changed_from_outside():
    mine = {"encoder": "a"}
    bags = make_bags(metadata=mine)
    mine["encoder"] = "b"
    bags.metadata["encoder"] = "c"
    assert bags.metadata == bags[[1, 2]].metadata == {"encoder": "a"}


def test_pickle_joblib_and_copy(tmp_path):
    bags = make_bags()
    assert_same(pickle.loads(pickle.dumps(bags)), bags)
    assert_same(copy.deepcopy(bags), bags)
    joblib.dump(bags, tmp_path / "bags")
    assert_same(joblib.load(tmp_path / "bags"), bags)


def test_to_and_from_another_process():
    bags = make_bags()
    halves = joblib.Parallel(n_jobs=2, max_nbytes=1)(
        joblib.delayed(Bags.__getitem__)(bags, part) for part in ([0, 4], slice(1, 4))
    )
    assert_same(halves[0], bags[[0, 4]])
    assert_same(halves[1], bags[1:4])


def test_equality_is_identity():
    bags = make_bags()
    assert bags == bags and bags != make_bags()
    assert len({bags, make_bags()}) == 2


# ---------------------------------------------------------------- memory maps


@pytest.fixture
def mapped(tmp_path):
    features = np.memmap(tmp_path / "features", dtype=np.float16, mode="w+", shape=(16, 3))
    features[:] = np.concatenate(make_arrays())
    return features


def test_memmap_is_kept(mapped):
    bags = Bags(mapped, [0, 4, 5, 11, 14, 16])
    assert isinstance(bags.features, np.memmap) and "on disk" in repr(bags)
    assert isinstance(bags[1:3].features, np.memmap)
    assert np.shares_memory(bags[1:3].features, mapped)
    assert not isinstance(bags[[3, 1]].features, np.memmap)
    np.testing.assert_array_equal(bags[[3, 1]].features, mapped[[11, 12, 13, 4]])
    with pytest.raises(ValueError, match="read-only"):
        bags.features[0, 0] = 1
    mapped[0, 0] = 5
    assert bags.features[0, 0] == 5
    np.testing.assert_array_equal(pickle.loads(pickle.dumps(bags)).features, mapped)


def test_memmap_is_checked_when_asked(mapped, monkeypatch):
    monkeypatch.setattr("gpmil.data.rows.CHUNK", 6)
    mapped[6, 1] = mapped[15, 0] = np.nan
    mapped[15, 2] = np.inf
    bags = Bags(mapped, [0, 4, 5, 11, 14, 16], names=list("abcde"))
    with pytest.raises(ValueError, match=r"3 values .* in 2 of 5 bags: 'c', 'e'"):
        bags.check_finite()
    bags[[0, 1, 3]].check_finite()


# ---------------------------------------------------------------- subsets


def naive_subset(arrays, coords, chosen, **keywords):
    return Bags.from_arrays(
        [arrays[b] for b in chosen], coords=[coords[b] for b in chosen], **keywords
    )


@settings(max_examples=40, deadline=None)
@given(data=st.data(), seed=st.integers(0, 10**6), graph=st.sampled_from(["grid4", "knn", "chain"]))
def test_subset_equals_rebuild(data, seed, graph):
    rng = np.random.default_rng(seed)
    sizes = rng.integers(1, 9, rng.integers(1, 7)).tolist()
    arrays, coords = make_arrays(sizes, seed=seed), make_coords(sizes, seed=seed)
    bags = Bags.from_arrays(arrays, coords=coords, step=256, graph=graph, n_neighbors=2)
    n = len(sizes)
    key = data.draw(
        st.one_of(
            st.lists(st.integers(-n, n - 1), min_size=1, max_size=8),
            st.lists(st.booleans(), min_size=n, max_size=n),
            st.slices(n),
            st.integers(-n, n - 1),
        )
    )
    chosen = np.atleast_1d(np.arange(n)[key])
    found = bags[key]
    if len(chosen) == 0:
        assert len(found) == found.n_instances == 0 and found.adjacency.shape == (0, 0)
        return
    expected = naive_subset(arrays, coords, chosen, step=256, graph=graph, n_neighbors=2)
    np.testing.assert_array_equal(found.features, expected.features)
    np.testing.assert_array_equal(found.coords, expected.coords)
    np.testing.assert_array_equal(found.offsets, expected.offsets)
    np.testing.assert_array_equal(found.adjacency.toarray(), expected.adjacency.toarray())
    assert found.names.tolist() == [bags.names[b] for b in chosen]


def test_subset_carries_everything():
    arrays, coords = make_arrays(), make_coords()
    bags = make_bags(step=[256, 256, 256, 128, 64], labels=["t", "n", "t", None, "n"], positive="t")
    chosen = [4, 0, 2]
    expected = Bags.from_arrays(
        [arrays[b] for b in chosen],
        labels=["n", "t", "t"],
        positive="t",
        coords=[coords[b] for b in chosen],
        step=[[64, 64], [256, 256], [256, 256]],
        names=["e", "a", "c"],
        groups=["p1", "p1", "p2"],
        instance_labels=[[0, 0], [0, 1, -1, 0], [1] * 6],
        metadata={"encoder": "resnet50"},
    )
    assert_same(bags[chosen], expected)
    assert_same(bags[[2, 4, 0]][[1, 2, 0]], expected)


@pytest.mark.parametrize(
    ("key", "names"),
    [
        (2, "c"),
        (-1, "e"),
        (np.int64(3), "d"),
        (slice(1, 3), "bc"),
        (slice(None, None, -2), "eca"),
        ([3, 3, 0], "dda"),
        (np.array([4, -5], dtype=np.int32), "ea"),
        (np.array([True, False, False, True, False]), "ad"),
        (pd.Series([False, True, True, False, False]), "bc"),
        (([2, 1], Ellipsis), "cb"),
        ((np.array([True] * 5), ...), "abcde"),
        (range(1, 4), "bcd"),
        ([], ""),
        (np.array([], dtype=float), ""),
    ],
)
def test_indices(key, names):
    found = make_bags()[key]
    assert isinstance(found, Bags) and found.names.tolist() == list(names)


@pytest.mark.parametrize(
    "key",
    [
        *[5, -6, [0, 5], [True, False], np.ones(6, dtype=bool), np.ones((5, 1), dtype=bool)],
        np.array([], dtype=bool),
        *["a", ["a"], 1.0, [0.5], None, True, (0, 1), (0, 1, 2), [[0, 1]], ...],
    ],
)
def test_bad_indices(key):
    with pytest.raises(IndexError):
        make_bags()[key]


def test_contiguous_subsets_are_views():
    bags = make_bags()
    for key in (slice(1, 4), [1, 2, 3], 2, np.array([False, True, True, False, False])):
        assert np.shares_memory(bags[key].features, bags.features)
    assert not np.shares_memory(bags[[1, 3]].features, bags.features)


def test_iteration_ends_and_yields_bags():
    bags = make_bags()
    names = [one.names.tolist() for one in bags]
    assert names == [["a"], ["b"], ["c"], ["d"], ["e"]]
    assert all(isinstance(one, Bags) and len(one) == 1 for one in bags)


# ---------------------------------------------------------------- scikit-learn


def test_not_an_array():
    with pytest.raises(TypeError, match=r"bags\.features"):
        np.asarray(make_bags())
    assert not hasattr(make_bags(), "iloc") and not hasattr(make_bags(), "fit")


def test_sklearn_indexing():
    bags = make_bags()
    assert _num_samples(bags) == 5
    check_consistent_length(bags, LABELS)
    assert indexable(bags, LABELS)[0] is bags
    for key in (
        [3, 1],
        np.array([3, 1]),
        (3, 1),
        slice(1, 3),
        np.array([False, True] * 2 + [True]),
    ):
        found = _safe_indexing(bags, key)
        expected = bags[list(key)] if isinstance(key, tuple) else bags[key]
        assert isinstance(found, Bags)
        assert_same(found, expected)


def test_sklearn_splits():
    bags = Bags.from_arrays(make_arrays([2] * 12), labels=[0, 1] * 6, groups=[0, 1, 2] * 4)
    train, test = train_test_split(bags, test_size=4, stratify=bags.labels, random_state=0)
    assert isinstance(train, Bags) and (len(train), len(test)) == (8, 4)
    assert test.labels.sum() == 2
    assert set(train.names) | set(test.names) == set(bags.names)
    for left, right in StratifiedKFold(3).split(bags, bags.labels):
        assert len(bags[left]) == 8 and len(bags[right]) == 4
    for left, right in GroupKFold(3).split(bags, groups=bags.groups):
        assert not set(bags[left].groups) & set(bags[right].groups)


# ---------------------------------------------------------------- labels


@pytest.mark.parametrize(
    "labels",
    [
        [1, 0, 1, -1, 0],
        [True, False, True, None, False],
        [1.0, 0.0, 1.0, np.nan, 0.0],
        np.array([1, 0, 1, -1, 0], dtype=np.int8),
        np.array([1, 0, 1, np.nan, 0], dtype=np.float32),
        pd.Series([1, 0, 1, pd.NA, 0], dtype="Int64", index=list("vwxyz")),
        (x for x in [1, 0, 1, None, 0]),
    ],
)
def test_labels_as_numbers(labels):
    bags = Bags.from_arrays(make_arrays(), labels=labels)
    assert bags.labels.tolist() == [1, 0, 1, -1, 0] and bags.labels.dtype == np.int64


@pytest.mark.parametrize(
    ("labels", "positive", "names"),
    [
        (["tumour", "benign", "tumour", None, "benign"], "tumour", ("benign", "tumour")),
        (np.array(["g", "b", "g", "g", "b"]), "b", ("g", "b")),
        (pd.Categorical(["x", "y", "x", np.nan, "y"]), "x", ("y", "x")),
        ([2, 3, 2, np.nan, 3], 2, ("3", "2")),
        ([5, None, 5, 5, None], 5, ("not 5", "5")),
    ],
)
def test_labels_by_name(labels, positive, names):
    bags = Bags.from_arrays(make_arrays(), labels=labels, positive=positive)
    values = [None if pd.isna(v) else v == positive for v in labels]
    assert bags.labels.tolist() == [-1 if v is None else int(v) for v in values]
    assert bags.class_names == names == bags[[1, 0]].class_names


def test_minus_one_is_the_negative_class_where_it_is_said():
    labels = {"labels": [1, -1, 1, -1, -1], "positive": 1}
    with pytest.raises(ValueError, match=r"-1 means unlabelled here.*negative='-1'"):
        Bags.from_arrays(make_arrays(), **labels)
    bags = Bags.from_arrays(make_arrays(), **labels, negative=-1)
    assert bags.labels.tolist() == [1, 0, 1, 0, 0] and bags.class_names == ("-1", "1")
    bags = Bags.from_arrays(make_arrays(), **labels, exclude="-1")
    assert bags.labels.tolist() == [1, -1, 1, -1, -1]


def test_words_for_labels_that_are_numbers_and_the_other_way_round(caplog):
    for labels in (
        [1, 0, 1, 0, None],
        ["1", "0", "1.0", "0", ""],
        [True, False, True, False, None],
    ):
        for positive in (1, "1", 1.0, True, ["1"]):
            bags = Bags.from_arrays(make_arrays(), labels=labels, positive=positive)
            assert bags.labels.tolist() == [1, 0, 1, 0, -1] and bags.class_names == ("0", "1")
    assert not said(caplog)
    words = ["Tumour", "tumour ", "Tumour", "benign", "?"]
    bags = Bags.from_arrays(make_arrays(), labels=words, positive="TUMOUR", exclude="?")
    assert bags.labels.tolist() == [1, 1, 1, 0, -1] and bags.class_names == ("benign", "Tumour")
    assert said(caplog) == [
        "labels: 'Tumour' (2) and 'tumour' (1) are taken as one class, 'Tumour'."
    ]


@pytest.mark.parametrize(
    ("labels", "positive", "message"),
    [
        (["a", "b", "a", "b", "a"], None, r"found 'a', 'b'\. .*positive="),
        ([0, 1, 2, 1, 0], None, "found 0, 1, 2"),
        ([0, 1, 0.5, 1, 0], None, "found 0, 1, 0.5"),
        (["a", "b", "c", "b", None], "a", r"3 classes: 'b' \(2\), 'a' \(1\), 'c' \(1\)"),
        (["a", "b", "a", "b", "a"], "z", r"positive='z' is not among the classes found, 'a' \(3\)"),
        (["a"] * 5, "z", r"positive='z' is not among the classes found, 'a' \(5\)"),
        ([0, 1, 0], None, "labels: expected one value per bag, 5 in all, found 3"),
        (np.zeros((5, 1)), None, r"labels: .*found shape \(5, 1\)"),
        ([[0], [1], [0], [1], [0]], None, "labels: expected 0, 1 or -1"),
        ([[0], "b", "a", "b", "a"], "a", "labels: expected text or numbers.* 'list', 'str'"),
        ([np.ones(2)] * 5, "a", "labels: expected text or numbers.* 'ndarray'"),
        (1, None, "labels: expected one value per bag, found 1"),
        (np.array(1), None, r"labels: .*5 in all, found shape \(\)"),
        ("01010", None, "labels: expected one value per bag"),
    ],
)
def test_bad_labels(labels, positive, message):
    with pytest.raises(ValueError, match=message):
        Bags.from_arrays(make_arrays(), labels=labels, positive=positive)


def test_instance_labels_in_many_forms():
    labels = [[True, False, None, 1.0], np.array([-1]), np.ones(6, bool), [np.nan, 0, 1], [0, 0]]
    bags = Bags.from_arrays(make_arrays(), instance_labels=labels)
    assert bags.instance_labels.tolist() == [1, 0, -1, 1, -1] + [1] * 6 + [-1, 0, 1, 0, 0]
    flat = Bags(bags.features, bags.offsets, instance_labels=bags.instance_labels)
    np.testing.assert_array_equal(flat.instance_labels, bags.instance_labels)


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        ([[0] * 4, [0], [2] * 6, [0] * 3, [0] * 2], "instance_labels: expected 0, 1 or -1.*0, 2"),
        ([[0] * 4, ["x"], [0] * 6, [0] * 3, [0] * 2], "instance_labels: .*found 0, 'x'"),
        ([[0] * 4, [0], [0] * 5, [0] * 3, [0] * 2], "bag 'bag2': .* 6 in all, found 5"),
        ([[0] * 4], "instance_labels: expected one array per bag, 5 in all, found 1"),
    ],
)
def test_bad_instance_labels(labels, message):
    with pytest.raises(ValueError, match=message):
        Bags.from_arrays(make_arrays(), instance_labels=labels)


def test_positive_instance_in_negative_bag_is_only_said(caplog):
    make_bags(instance_labels=[[1] * 4, [1], [0] * 6, [1] * 3, [0] * 2])
    assert said(caplog) == ["1 bag labelled negative with instances labelled positive: 'b'"]


# ---------------------------------------------------------------- bad input


def with_bad(bag, value):
    arrays = make_arrays()
    arrays[bag][0, 1] = value
    return arrays


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        (with_bad(2, np.nan), r"1 values .* in 1 of 5 bags: 'bag2'"),
        (with_bad(4, -np.inf), r"in 1 of 5 bags: 'bag4'"),
        (make_arrays([4, 0, 6, 0]), "2 bags without an instance: 'bag1', 'bag3'"),
        ([np.ones((2, 3)), np.ones((4, 2))], "bag 'bag0' has 3 features, bag 'bag1' has 2"),
        ([np.ones((2, 3)), np.ones(3)], r"bag 'bag1': expected two axes.*found shape \(3,\)"),
        (np.ones((4, 3)), r"bag 'bag0': expected two axes"),
        ([np.ones((2, 3)), np.ones((2, 0))], "bag 'bag1': expected two axes"),
        ([np.array([["a", "b"]])], "expected float16, 32 or 64, found type <U1"),
        ([np.array([[1j, 2]])], "found type complex128"),
        ([np.array([[1, None]], dtype=object)], "found type object"),
        ([[[1, 2], [3]]], "bag 'bag0': cannot be read as an array"),
        ([csr_matrix(np.eye(2))], "bag 'bag0': expected a dense array"),
        ([], "expected one array per bag, found none"),
        (7, "expected one array per bag, found int"),
        ({"a": np.ones((2, 3))}, "expected one array per bag, found dict"),
    ],
)
def test_bad_features(arrays, message):
    with pytest.raises(ValueError, match=message):
        Bags.from_arrays(arrays)


@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        ({"names": list("abcda")}, "names: every bag needs its own, found more than once: 'a'"),
        ({"names": list("abcd")}, "names: expected one value per bag, 5 in all, found 4"),
        ({"names": ["a", None, "c", "d", "e"]}, "names: missing for bag 1"),
        ({"groups": [1, 2, 3]}, "groups: expected one value per bag, 5 in all, found 3"),
        ({"groups": ["a", None, "b", "b", np.nan]}, "groups: missing for 'b', 'e'"),
        ({"step": 0}, "step: expected positive numbers, found .0.0, 0.0. for 'a', 'b'"),
        ({"step": -3}, "step: expected positive"),
        ({"step": np.nan}, "step: expected positive"),
        ({"step": [1, 2, 3, np.inf, 5]}, "step: expected positive.* for 'd'"),
        ({"step": [1, 2, 3]}, r"step: expected one number, 2 .*5 .*found shape \(3,\)"),
        ({"step": np.ones((2, 5))}, "step: expected one number"),
        ({"step": "50"}, "step: expected numbers"),
        ({"graph": "grid6"}, "graph: expected grid4, grid8, radius, knn, chain or None"),
        ({"coords": make_coords()[:3]}, "coords: expected one array per bag, 5 in all, found 3"),
        ({"coords": make_coords([4, 1, 5, 3, 2])}, "coords of bag 'c': expected 6 rows, found 5"),
        ({"coords": [None, *make_coords()[1:]]}, "coords of bag 'a': missing"),
        ({"coords": [np.ones((n, 4)) for n in SIZES]}, r"coords of bag 'a': .*\(4, 4\)"),
        ({"coords": [["x"] * n for n in SIZES]}, "coords of bag 'a': expected numbers"),
        ({"edges": [[], [], [[0, 6]], [], []]}, "edges of bag 'c': index 6 is out of range"),
        ({"edges": [[[0, 1]]]}, "edges: expected one array per bag, 5 in all, found 1"),
        ({"graph": "knn", "n_neighbors": 0}, "n_neighbors"),
        ({"graph": "radius", "radius": 0}, "radius must be positive"),
    ],
)
def test_bad_arguments(keywords, message):
    with pytest.raises(ValueError, match=message):
        make_bags(**keywords)


def test_axes_must_agree():
    coords = make_coords()
    coords[3] = coords[3][:, :1]
    with pytest.raises(ValueError, match="bag 'a' has 2 axes, bag 'd' has 1"):
        make_bags(coords=coords)


def test_duplicate_coordinates_are_named():
    coords = make_coords()
    coords[2][[1, 4]] = coords[2][3] = [1280, 4096]
    coords[4][1] = coords[4][0]
    with pytest.raises(
        ValueError, match=r"bag 'c' has 3 instances at \(1280, 4096\); 3 dup.*2 bags"
    ):
        make_bags(coords=coords)


def test_missing_coordinates_are_named():
    coords = [c.astype(float) for c in make_coords()]
    coords[2][1, 0] = coords[3][0, 1] = np.nan
    with pytest.raises(ValueError, match="2 positions NaN or infinite, in 'c', 'd'"):
        make_bags(coords=coords)


@pytest.mark.parametrize(
    ("offsets", "message"),
    [
        ([0, 4], "expected to rise from 0 to 6"),
        ([1, 6], "expected to rise from 0 to 6"),
        ([0, 4, 3, 6], "expected to rise"),
        ([0, 3, 3, 6], "1 bag without an instance: 'bag1'"),
        ([0.0, 6.0], "expected B \\+ 1 integers"),
        ([0], "expected B \\+ 1 integers"),
    ],
)
def test_bad_offsets(offsets, message):
    with pytest.raises(ValueError, match=message):
        Bags(np.ones((6, 2)), offsets)


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ([(0, 1, 1.0)], "symmetric"),
        ([(0, 1, 1.0), (1, 0, 2.0)], "symmetric"),
        ([(1, 1, 1.0)], "zero diagonal"),
        ([(1, 2, 1.0), (2, 1, 1.0)], "between two bags"),
        ([(0, 1, -1.0), (1, 0, -1.0)], "positive, finite"),
        ([(0, 1, np.nan), (1, 0, np.nan)], "positive, finite"),
    ],
)
def test_bad_adjacency(entries, message):
    i, j, weight = zip(*entries, strict=True)
    with pytest.raises(ValueError, match=message):
        Bags(np.ones((3, 2)), [0, 2, 3], adjacency=csr_array((weight, (i, j)), shape=(3, 3)))


def test_adjacency_of_another_shape():
    with pytest.raises(ValueError, match="expected a sparse 3 x 3 matrix"):
        Bags(np.ones((3, 2)), [0, 2, 3], adjacency=csr_array((2, 2)))
    with pytest.raises(ValueError, match="expected a sparse 3 x 3 matrix, found ndarray"):
        Bags(np.ones((3, 2)), [0, 2, 3], adjacency=np.zeros((3, 3)))


def test_given_adjacency_is_used():
    graph = csr_matrix(([2.0, 2.0, 0.0], ([0, 1, 2], [1, 0, 1])), shape=(3, 3))
    bags = Bags(np.ones((3, 2)), [0, 2, 3], adjacency=graph)
    assert bags.has_geometry and bags.graph == "edges" and bags.adjacency.nnz == 2
    assert bags[0].adjacency.toarray().tolist() == [[0, 2], [2, 0]]


# ---------------------------------------------------------------- groups, step and graph


@pytest.mark.parametrize(
    ("groups", "kept"),
    [
        ([3, 1, 3, 2, 1], [3, 1, 3, 2, 1]),
        ([3.0, 1.0, 3.0, 2.0, 1.0], [3, 1, 3, 2, 1]),
        (["p", "q", "p", "r", "q"], ["p", "q", "p", "r", "q"]),
        ([1, "q", 1, 2, "q"], ["1", "q", "1", "2", "q"]),
    ],
)
def test_groups(groups, kept):
    assert make_bags(groups=groups).groups.tolist() == kept


def test_step_in_its_forms():
    expected = [[256, 128]] * 5
    for step in ((256, 128), [256, 128], np.array([[256, 128]]), np.array(expected)):
        assert make_bags(step=step).step.tolist() == expected
    by_bag = [256, 128, 64, 32, 16]
    for step in (by_bag, tuple(by_bag), np.array(by_bag)[:, None]):
        assert make_bags(step=step).step.tolist() == [[s, s] for s in by_bag]


@pytest.mark.parametrize(
    ("step", "expected", "read_as"),
    [
        ((256, 128), [[256, 128], [256, 128]], "one per axis"),
        ([256, 128], [[256, 256], [128, 128]], "one per bag"),
        (np.array([256, 128]), [[256, 256], [128, 128]], "one per bag"),
        ([256, 256], [[256, 256], [256, 256]], None),
    ],
)
def test_two_steps_for_two_bags_in_the_plane(step, expected, read_as, caplog):
    bags = Bags.from_arrays(make_arrays([4, 3]), coords=make_coords([4, 3]), step=step)
    assert bags.step.tolist() == expected
    assert len(said(caplog)) == (read_as is not None)
    assert read_as is None or read_as in said(caplog)[0]


def test_step_is_inferred_and_said_once(caplog):
    sizes = [14, 12, 13]
    coords = make_coords(sizes)
    coords[1] = coords[1] * 2
    bags = Bags.from_arrays(make_arrays(sizes), coords=coords)
    assert bags.step.tolist() == [[256, 256], [512, 512], [256, 256]]
    assert said(caplog) == [
        "step not given; the coordinates show 256 x 256 (2 bags), 512 x 512 (1 bag)"
    ]
    given_steps = Bags.from_arrays(make_arrays(sizes), coords=coords, step=bags.step)
    np.testing.assert_array_equal(given_steps.adjacency.toarray(), bags.adjacency.toarray())
    assert bags.adjacency.nnz > 20
    assert len(said(caplog)) == 1


def test_step_that_cannot_be_inferred_warns():
    coords = [np.arange(n)[:, None] * [1, 1] for n in SIZES]
    with pytest.warns(UserWarning, match="not to be inferred") as caught:
        bags = make_bags(coords=coords, step=None)
    assert len(caught) == 1
    assert bags.adjacency.nnz == 0 and bags.step is None and bags.has_geometry


def test_single_instances_need_no_step():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        bags = Bags.from_arrays(make_arrays([1, 1]), coords=[[(5, 5)], [(9, 1)]])
    assert bags.adjacency.nnz == 0 and bags.step is None


@pytest.mark.parametrize("graph", ["knn", "chain", None, "radius"])
def test_other_graphs_infer_no_step(graph, caplog):
    bags = make_bags(step=None, graph=graph, radius=300)
    assert bags.step is None and bags.graph == graph and not said(caplog)
    assert (bags.adjacency.nnz > 0) == (graph is not None)


def test_graph_options_arrive():
    coords = [c.astype(float) for c in make_coords()]
    near = make_bags(graph="radius", radius=600)
    expected = oracles.block_diagonal([oracles.radius(c, 600) for c in coords])
    np.testing.assert_array_equal(near.adjacency.toarray(), expected)
    two = make_bags(graph="knn", n_neighbors=2)
    expected = oracles.block_diagonal([oracles.knn(c, 2) for c in coords])
    np.testing.assert_array_equal(two.adjacency.toarray(), expected)


def test_chain_without_coordinates_follows_the_rows():
    bags = Bags.from_arrays(make_arrays(), graph="chain")
    assert bags.has_geometry and bags.graph == "chain"
    assert bags.adjacency.nnz // 2 == sum(n - 1 for n in SIZES)


def test_slices_given_as_plain_positions():
    bags = Bags.from_arrays(make_arrays([3]), coords=[[10, 0, 5]], graph="chain")
    assert bags.coords.shape == (3, 1)
    assert bags.adjacency.toarray().tolist() == [[0, 0, 1], [0, 0, 1], [1, 1, 0]]


def test_edges_win_over_coordinates():
    edges = [[[0, 3], [1, 2]], None, [[5, 0]], [], [[0, 1, 2.5]]]
    bags = make_bags(edges=edges)
    assert bags.graph == "edges" and bags.coords is not None and bags.has_geometry
    upper = np.argwhere(np.triu(bags.adjacency.toarray()))
    assert upper.tolist() == [[0, 3], [1, 2], [5, 10], [14, 15]]
    assert bags[4].adjacency.toarray().tolist() == [[0, 2.5], [2.5, 0]]
    assert not Bags.from_arrays(make_arrays()).has_geometry
    assert Bags.from_arrays(make_arrays(), edges=edges).has_geometry


def test_many_instances_without_an_edge_warn():
    sizes = [12, 9, 13]
    coords = make_coords(sizes)
    with pytest.warns(UserWarning) as caught:
        bags = Bags.from_arrays(
            make_arrays(sizes), coords=coords, step=1024, names=["slide7", "small", "slide9"]
        )
    assert bags.adjacency.nnz == 0 and len(caught) == 1
    message = str(caught[0].message)
    assert "'slide7', 'slide9'" in message and "small" not in message
    assert "The step is 1024 x 1024 (2 bags)" in message
    assert "The coordinates show 256 x 256 (2 bags)" in message
    assert "other units" in message
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Bags.from_arrays(make_arrays(sizes), coords=coords, step=256)
        Bags.from_arrays(make_arrays(sizes), coords=coords, graph=None)
        bags[[0, 2]]


def test_warnings_point_at_the_line_that_called_gpmil():
    foreign = {"__name__": "scipy.optimize"}
    exec("def minimise(f): return f()", foreign)
    inside = {
        "__name__": "gpmil.inside", "warn": warn_caller, "minimise": foreign["minimise"],
    }  # fmt: skip
    exec("def deep(): warn('odd')\ndef public(): deep()", inside)
    exec("def between(): minimise(deep)", inside)
    for call in ("public", "deep", "between"):
        with pytest.warns(UserWarning, match="odd") as caught:
            inside[call]()
        assert caught[0].filename == __file__


# ---------------------------------------------------------------- tables


def make_frame():
    """Rows of three slides, shuffled: t2 first, then n1, then u3."""
    return pd.DataFrame(
        {
            "slide": ["t2", "n1", "t2", "u3", "n1", "t2"],
            "label": [1, 0, 1, np.nan, 0, 1],
            "patient": ["p", "q", "p", "q", "q", "p"],
            "x": [0, 50, 50, 0, 0, 100],
            "y": [0, 0, 0, 0, 0, 0],
            "tissue": [1, 0, -1, np.nan, 0, 0],
            "feature_0": np.arange(6, dtype=np.float32),
            "feature_1": np.arange(6, dtype=np.float32) ** 2,
            "note": list("uvwxyz"),
        }
    )


def test_frame():
    bags = Bags.from_frame(
        make_frame(), features="feature_", group="patient", instance_label="tissue", step=50
    )
    assert bags.names.tolist() == ["t2", "n1", "u3"]
    assert bags.labels.tolist() == [1, 0, -1]
    assert bags.groups.tolist() == ["p", "q", "q"]
    rows = [0, 2, 5, 1, 4, 3]
    np.testing.assert_array_equal(bags.features, [[r, r**2] for r in rows])
    assert bags.features.dtype == np.float32 and bags.features.flags.c_contiguous
    np.testing.assert_array_equal(bags.coords[:, 0], [0, 50, 100, 50, 0, 0])
    assert bags.instance_labels.tolist() == [1, -1, 0, 0, 0, -1]
    assert bags.adjacency.nnz // 2 == 3


def test_frame_takes_numeric_columns_and_says_so(caplog):
    bags = Bags.from_frame(make_frame(), instance_label="tissue", step=50)
    assert bags.n_features == 2
    assert said(caplog) == [
        "features: 2 numeric columns not named otherwise, 'feature_0' to 'feature_1'"
    ]
    caplog.clear()
    assert Bags.from_frame(make_frame(), features=["feature_1"], step=50).n_features == 1
    assert not said(caplog)


def test_frame_without_label_and_positions_says_so(caplog):
    frame = make_frame().drop(columns=["label", "x", "y"])
    bags = Bags.from_frame(frame, features="feature_")
    assert bags.labels.tolist() == [-1] * 3 and not bags.has_geometry
    assert said(caplog) == [
        'no column "label": the bags are unlabelled',
        'no columns "x" and "y": the instances have no positions',
    ]
    caplog.clear()
    assert not Bags.from_frame(frame, label=None, coords=None, features="feature_").has_geometry
    assert not said(caplog)


def test_frame_options_arrive():
    frame = make_frame().assign(label=["yes", "no", "yes", None, "no", "yes"])
    keywords = {"features": "feature_", "positive": "yes", "coords": "x", "metadata": {"a": 1}}
    bags = Bags.from_frame(frame, graph="radius", radius=100, **keywords)
    assert bags.class_names == ("no", "yes") and bags.labels.tolist() == [1, 0, -1]
    assert bags.coords.shape == (6, 1) and bags.metadata == {"a": 1}
    assert bags.adjacency.nnz // 2 == 4
    chain = Bags.from_frame(frame, graph="knn", n_neighbors=1, **keywords)
    assert chain.adjacency.nnz // 2 == 3


def test_frame_of_nullable_and_categorical_columns():
    frame = make_frame().convert_dtypes().astype({"slide": "category"})
    bags = Bags.from_frame(
        frame, features="feature_", instance_label="tissue", group="patient", step=50
    )
    assert bags.names.tolist() == ["t2", "n1", "u3"] and bags.labels.tolist() == [1, 0, -1]
    np.testing.assert_array_equal(bags.features[:, 0], [0, 2, 5, 1, 4, 3])


def test_frame_equals_arrays():
    frame = make_frame()
    parts = [frame[frame.slide == name] for name in ("t2", "n1", "u3")]
    expected = Bags.from_arrays(
        [part[["feature_0", "feature_1"]] for part in parts],
        labels=[1, 0, None],
        coords=[part[["x", "y"]] for part in parts],
        names=["t2", "n1", "u3"],
        groups=["p", "q", "q"],
        step=50,
        instance_labels=[part.tissue for part in parts],
    )
    found = Bags.from_frame(
        frame, features="feature_", group="patient", instance_label="tissue", step=50
    )
    assert_same(found, expected)


@pytest.mark.parametrize(
    ("change", "keywords", "message"),
    [
        (
            {},
            {"bag": "image"},
            "bag: no column 'image'; the columns are 'slide', 'label', 'patient'",
        ),
        ({}, {"label": "cancer"}, "label: no column 'cancer'"),
        ({}, {"group": "who"}, "group: no column 'who'"),
        ({}, {"instance_label": "t"}, "instance_label: no column 't'"),
        ({}, {"coords": ("x", "z")}, "coords: no column 'z'"),
        ({}, {"coords": ("u", "v")}, "coords: no column 'u', 'v'"),
        ({}, {"coords": ("x", "note")}, "coords: columns that are not numbers: 'note'"),
        ({}, {"features": "deep_"}, "features: expected columns 'deep_'"),
        ({}, {"features": ["feature_0", "gone"]}, "features: no column 'gone'"),
        ({}, {"features": ["feature_0", "note"]}, "features: columns that are not .* 'note'"),
        ({}, {"features": []}, "features: expected"),
        (
            {"label": [1, 0, 0, 0, 0, 1]},
            {},
            "label: expected one 'label' per bag, bag 't2' has 1, 0",
        ),
        ({"label": [1, 0, np.nan, 0, 0, 1]}, {}, "bag 't2' has 1.0, nan"),
        ({"patient": list("pqpqqr")}, {"group": "patient"}, "group: .*bag 't2' has 'p', 'r'"),
        ({"label": [[1]] * 6}, {"positive": 1}, "label: expected text or numbers.* 'list'"),
        ({"slide": [["a"]] * 6}, {}, "bag: expected text or numbers.* 'list'"),
        ({"slide": ["a", None, "a", "a", "b", None]}, {}, "bag: 2 rows without 'slide'"),
        ({"feature_0": [1, 2, np.nan, 4, 5, 6]}, {}, "1 values are NaN or infinite.*'t2'"),
        ({"x": [0, 50, 50, 0, 0, 50]}, {}, r"bag 't2' has 2 instances at \(50, 0\)"),
    ],
)
def test_bad_frames(change, keywords, message):
    frame = make_frame().assign(**change)
    with pytest.raises(ValueError, match=message):
        Bags.from_frame(frame, **({"features": "feature_", "step": 50} | keywords))


@pytest.mark.parametrize("keyword", ["adjacency", "edges", "metadat"])
def test_frame_takes_no_finished_graph_and_no_unknown_keyword(keyword):
    # Rows of a table change places: a graph given for them would join other instances.
    with pytest.raises(TypeError, match=keyword):
        Bags.from_frame(make_frame(), **{keyword: None})


@pytest.mark.parametrize("keyword", ["adjacency", "metadat"])
def test_arrays_take_edges_bag_by_bag_and_no_unknown_keyword(keyword):
    with pytest.raises(TypeError, match=keyword):
        Bags.from_arrays([np.ones((2, 3))], **{keyword: None})


def test_frames_of_another_kind():
    with pytest.raises(ValueError, match="coords: no column 'y'"):
        Bags.from_frame(make_frame().drop(columns="y"), features="feature_")
    with pytest.raises(ValueError, match="expected a pandas DataFrame, found dict"):
        Bags.from_frame({"slide": [1]})
    with pytest.raises(ValueError, match="found no rows"):
        Bags.from_frame(make_frame().iloc[:0])
    with pytest.raises(ValueError, match="found more than once: '1'"):
        Bags.from_frame(make_frame().assign(slide=[1, "1", 1, 2, "1", 1]), features="feature_")
    twice = pd.concat([make_frame(), make_frame()[["x"]]], axis=1)
    with pytest.raises(ValueError, match="share a name: 'x'"):
        Bags.from_frame(twice)


def test_nothing_is_printed(capsys, caplog):
    with caplog.at_level(logging.DEBUG):
        Bags.from_frame(make_frame(), instance_label="tissue")
    assert len(said(caplog)) == 2
    assert capsys.readouterr().out == ""


def test_a_large_subset_of_a_file_stays_on_disk(tmp_path, monkeypatch):
    rng = np.random.default_rng(4)
    features = np.memmap(tmp_path / "x", dtype="f2", mode="w+", shape=(60, 7))
    features[:] = rng.normal(size=(60, 7))
    bags = Bags(features, np.array([0, 9, 21, 40, 52, 60]), labels=[0, 1, 0, 1, 1])
    inside = bags[[4, 0, 2]]
    assert not isinstance(inside.features, np.memmap)
    monkeypatch.setattr("gpmil.data.rows.ROOM", 100)
    monkeypatch.setattr("gpmil.data.rows.CHUNK", 35)  # five rows at a time
    outside = bags[[4, 0, 2]]
    assert isinstance(outside.features, np.memmap)
    assert outside.features.dtype == np.float16
    np.testing.assert_array_equal(outside.features, inside.features)
    again = outside[np.array([True, False, True])]  # and of that one, again
    np.testing.assert_array_equal(again.features, inside.features[[*range(8), *range(17, 36)]])
    twin = pickle.loads(pickle.dumps(outside))  # to other processes it goes as an array
    np.testing.assert_array_equal(twin.features, inside.features)
    assert isinstance(bags[1:3].features, np.memmap)  # a slice is a view


@pytest.mark.parametrize("groups", [[10**400, 1], np.array([1 + 2j, 2 + 0j]), [1e300, 2.0]])
def test_groups_that_fit_no_integer_are_words(groups):
    bags = Bags.from_arrays([np.ones((1, 2)), np.zeros((2, 2))], groups=groups)
    assert bags.groups.tolist() == [str(g) for g in groups]
