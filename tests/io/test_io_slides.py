"""Feature files of slide tools: the graph each format makes, and what is refused."""

import logging

import h5py
import numpy as np
import pandas as pd
import pytest
import torch
import writers
from hypothesis import given, settings
from hypothesis import strategies as st
from writers import grid_edges, tissue, vectors

import gpmil
from gpmil import Bags
from gpmil.data import graphs
from gpmil.io import formats, read_with_report, steps

CELLS = tissue()
EDGES = grid_edges(CELLS)
N = len(CELLS)


def n_edges(bags: Bags) -> list[int]:
    return [bag.adjacency.nnz // 2 for bag in bags]


def refused(call, *telling):
    with pytest.raises(ValueError) as caught:
        call()
    for words in telling:
        assert words in str(caught.value), str(caught.value)


@pytest.fixture
def job(tmp_path):
    """A TRIDENT folder of three slides of one piece of tissue, at 40x, 20x and 40x."""
    folder = tmp_path / "job" / writers.TRIDENT_JOB / "features_uni_v1"
    for k, native in enumerate((40, 20, 40)):
        writers.trident(
            folder,
            f"s{k}",
            vectors(N, seed=k),
            CELLS * 256 * native // 20 + 1_000,
            patch_size=256,
            patch_size_level0=256.0 * native / 20,
            level0_magnification=native,
            target_magnification=20,
            overlap=0,
        )
    return tmp_path / "job"


def features_of(job):
    return job / writers.TRIDENT_JOB / "features_uni_v1"


# ------------------------------------------------------------------ one format after the other


def test_slides_of_two_native_magnifications_have_one_graph(job):
    bags, report = read_with_report(job)
    assert n_edges(bags) == [EDGES] * 3
    assert (bags[0].adjacency != bags[1].adjacency).nnz == 0
    assert bags.step.tolist() == [[512, 512], [256, 256], [512, 512]]
    assert (report.format, report.encoder, report.n_slides) == ("trident", "uni_v1", 3)
    assert report.step == "512 (2 slides), 256 (1 slide), patch_size_level0 less the overlap"
    assert report.units == "level-0 pixels" and bags.metadata["encoder"] == "uni_v1"
    assert report.edges_per_patch == EDGES / N
    assert report.isolated == int((np.diff(bags.adjacency.indptr) == 0).sum())


@pytest.mark.parametrize(
    "part", ["", writers.TRIDENT_JOB, f"{writers.TRIDENT_JOB}/features_uni_v1"]
)
def test_trident_is_found_from_any_of_its_folders(job, part):
    assert gpmil.read(job / part).names.tolist() == ["s0", "s1", "s2"]


def test_one_file_is_a_cohort_of_one(job):
    path = features_of(job) / "s1.h5"
    assert gpmil.read(path).names.tolist() == ["s1"]
    assert gpmil.read(features_of(job) / "s2.h5").names.tolist() == ["s2"]
    assert len(gpmil.read(job)) == 3


def test_half_overlapping_patches_are_neighbours_at_the_stride(tmp_path):
    attrs = {"patch_size": 256, "patch_size_level0": 512, "overlap": 128}
    writers.trident(tmp_path, "a", vectors(N), CELLS * 256, **attrs)
    bags, report = read_with_report(tmp_path)
    assert n_edges(bags) == [EDGES] and bags.step.tolist() == [[256, 256]]
    assert "less the overlap" in report.step


def test_a_step_that_is_no_whole_number(tmp_path):
    # 256 px at 20x of a slide scanned at 37.3x; positions are rounded, as tools do
    size = 256 * 37.3 / 20
    attrs = {"patch_size": 256, "patch_size_level0": size, "overlap": 0}
    writers.trident(tmp_path, "a", vectors(N), np.rint(CELLS * size).astype(int), **attrs)
    bags = gpmil.read(tmp_path)
    assert n_edges(bags) == [EDGES] and bags.step[0, 0] == pytest.approx(477.44)


def test_missing_attributes_are_the_word_none(tmp_path):
    attrs = {
        "patch_size": 256,
        "patch_size_level0": "None",
        "level0_magnification": 40,
        "target_magnification": 10,
        "overlap": 64,
    }
    writers.trident(tmp_path, "a", vectors(N), CELLS * 768, **attrs)
    assert gpmil.read(tmp_path).step.tolist() == [[768, 768]]
    writers.trident(tmp_path, "a", vectors(N), CELLS * 768, **attrs | {"overlap": "None"})
    with pytest.warns(UserWarning, match="not one edge"):
        assert gpmil.read(tmp_path).step.tolist() == [[1024, 1024]]


def test_trident_files_without_attributes_ask_the_patches(tmp_path):
    job = tmp_path / writers.TRIDENT_JOB
    writers.trident(job / "features_uni_v1", "a", vectors(N), CELLS * 448)
    attrs = {"patch_size": 256, "patch_size_level0": 512, "overlap": 32}
    writers.trident(job / "patches", "a_patches", vectors(N), CELLS * 448, **attrs)
    bags, report = read_with_report(tmp_path)
    assert n_edges(bags) == [EDGES] and report.encoder == "uni_v1"
    assert report.step == "448, patch_size_level0 less the overlap of the patches file"


def test_clam_takes_the_step_from_the_patches(tmp_path):
    for k, downsample in enumerate((4.0006, 1.0)):
        writers.clam(
            tmp_path, f"s{k}", vectors(N, seed=k), CELLS * 256 * int(downsample), 256, downsample
        )
    bags, report = read_with_report(tmp_path)
    assert report.format == "clam" and n_edges(bags) == [EDGES] * 2
    assert bags.step.tolist() == [[1024, 1024], [256, 256]]
    assert report.step.endswith("patch_size x downsample of the patches file")


def test_pieces_of_tissue_with_grids_of_their_own(tmp_path):
    """CLAM starts a grid at each contour: 97 and 61 pixels off the first one's lattice."""
    second = CELLS * 256 + np.array([256 * 9 + 97, 61])
    coords = np.concatenate([CELLS * 256, second])
    writers.clam(tmp_path, "a", vectors(2 * N), coords)
    assert n_edges(gpmil.read(tmp_path)) == [2 * EDGES]


def test_clam_without_patches_infers_the_step_and_says_so(tmp_path, caplog):
    writers.clam(tmp_path, "a", vectors(N), CELLS * 300, patch_size=None)
    bags, report = read_with_report(tmp_path)
    assert n_edges(bags) == [EDGES] and report.step == "300, inferred from the positions"
    assert any("inferred" in note and "300" in note for note in report.notes)
    with caplog.at_level(logging.WARNING, "gpmil"):
        gpmil.read(tmp_path)
    assert "inferred from the positions: 300" in caplog.text


def test_tensors_have_no_positions(tmp_path):
    writers.clam(tmp_path, "a", vectors(N), CELLS * 256)
    bags, report = read_with_report(tmp_path / "pt_files")
    assert bags.coords is None and bags.adjacency.nnz == 0
    np.testing.assert_array_equal(bags.features, vectors(N))
    assert report.units == "none" and any("uncoupled" in w for w in report.warnings())


def test_bfloat16_tensors_become_float32(tmp_path):
    torch.save(torch.from_numpy(vectors(N)).bfloat16(), tmp_path / "a.pt")
    bags = gpmil.read(tmp_path)
    assert bags.features.dtype == np.float32
    np.testing.assert_allclose(bags.features, vectors(N), rtol=2**-8)


def test_stamp_is_in_microns_and_half_precision(tmp_path):
    attrs = {"unit": "um", "tile_size_um": 256.0, "tile_size_px": 224, "extractor": "chief"}
    writers.stamp(tmp_path, "a", vectors(N), CELLS * 256.0 + 13.7, feat_type="tile", **attrs)
    bags, report = read_with_report(tmp_path)
    assert n_edges(bags) == [EDGES] and report.units == "microns"
    assert (report.format, report.dtype, report.encoder) == ("stamp", "float16", "chief")
    assert report.step == "256, tile_size_um"


def test_older_stamp_files_have_no_positions(tmp_path):
    writers.stamp(tmp_path, "a", vectors(N))
    bags, report = read_with_report(tmp_path)
    assert report.format == "stamp" and bags.coords is None


def test_stamp_in_the_folder_of_its_extractor(tmp_path):
    writers.stamp(tmp_path / "uni-1a2b", "a", vectors(N), CELLS * 256.0, tile_size_um=256.0)
    bags, report = read_with_report(tmp_path)
    assert n_edges(bags) == [EDGES] and any("without a unit" in note for note in report.notes)


def test_a_leading_axis_of_one(tmp_path):
    writers.huggingface(tmp_path, "a", vectors(N), CELLS * 512)
    bags, report = read_with_report(tmp_path)
    np.testing.assert_array_equal(bags.features, vectors(N))
    assert n_edges(bags) == [EDGES] and report.format == "huggingface"


def test_slideflow_has_centres(tmp_path):
    writers.slideflow(tmp_path, "a", vectors(N), CELLS * 448 + 224)
    bags, report = read_with_report(tmp_path)
    assert n_edges(bags) == [EDGES] and report.units == "level-0 pixels, tile centres"
    assert bags.metadata["anchor"] == "centre" and report.encoder == "ctranspath"
    assert any("tile_um 112" in note for note in report.notes)


@pytest.mark.parametrize("ending", [".npy", ".h5"])
def test_torchmil_brings_its_labels(tmp_path, ending):
    inst = np.arange(N) % 3 == 0
    for k, label in enumerate((1, 0)):
        truth = inst.astype(int) * label
        writers.torchmil(tmp_path, f"b{k}", vectors(N, seed=k), CELLS, label, truth, ending)
    bags, report = read_with_report(tmp_path)
    assert report.format == "torchmil" and bags.labels.tolist() == [1, 0]
    assert bags.instance_labels.tolist() == [*inst.astype(int).tolist(), *[0] * N]
    assert n_edges(bags) == [EDGES] * 2 and report.matched == 2


def test_a_folder_of_npy_is_features(tmp_path):
    np.save(tmp_path / "a.npy", vectors(N))
    np.save(tmp_path / "b.npy", vectors(1))
    bags, report = read_with_report(tmp_path)
    assert report.format == "npy" and bags.sizes.tolist() == [N, 1]


@given(
    size=st.floats(40, 3000),
    overlap=st.floats(0, 0.9),
    native=st.sampled_from([10, 20, 37.3, 40, 80]),
    seed=st.integers(0, 9),
)
@settings(max_examples=40, deadline=None)
def test_any_told_step_finds_the_lattice(size, overlap, native, seed):
    attrs = {
        "patch_size": size,
        "patch_size_level0": size * native / 20,
        "overlap": overlap * size,
    }
    step, _ = steps.told_step(attrs, None)
    cells = tissue(seed=seed)
    stride = size * native / 20 - overlap * size * native / 20
    coords = np.rint(cells * stride)
    made = graphs.adjacency_from_coords(coords, np.array([0, len(cells)]), "grid4", step[0])
    # rounding to pixels stays within the tolerance where the stride is 7 pixels and more
    assert stride < 7 or made.nnz // 2 == grid_edges(cells)


def test_steps_have_an_order():
    own = {"patch_size_level0": 512, "patch_size": 256, "overlap": 64, "downsample": 8}
    beside = {"patch_size_level0": 999}
    assert steps.told_step(own, beside)[0] == (384, 384)
    assert steps.told_step({"patch_size": 256, "downsample": [4.9, 2.0]}, beside)[0] == (1024, 512)
    assert steps.told_step({"patch_size": 256}, beside)[0] == (999, 999)
    assert steps.told_step({"patch_size": 256, "overlap": 256, "patch_size_level0": 256}, None) == (
        None,
        "",
    )


def test_a_given_step_wins(job):
    with pytest.warns(UserWarning, match="not one edge"):
        bags, report = read_with_report(job, step=256)
    assert n_edges(bags) == [0, EDGES, 0] and report.step == "256, given"
    assert report.without_edges == ("s0", "s2") and "'s0', 's2'" in report.warnings()[0]


def test_an_empty_graph_is_loud(tmp_path):
    writers.trident(tmp_path, "a", vectors(N), CELLS * 256, patch_size_level0=31)
    with pytest.warns(UserWarning, match="not one edge"):
        _, report = read_with_report(tmp_path)
    assert "THE GRAPH IS EMPTY" in report.warnings()[0] and report.isolated == N


def test_slides_with_and_without_a_step(tmp_path):
    writers.trident(tmp_path, "a", vectors(N), CELLS * 256, patch_size_level0=256)
    writers.trident(tmp_path, "b", vectors(N), CELLS * 512)
    bags, report = read_with_report(tmp_path)
    assert bags.step.tolist() == [[256, 256], [512, 512]] and n_edges(bags) == [EDGES] * 2
    assert report.step.endswith("patch_size_level0 less the overlap, inferred from the positions")
    # what a file tells is not replaced by what the positions show
    writers.trident(tmp_path, "a", vectors(N), CELLS * 256, patch_size_level0=512)
    assert gpmil.read(tmp_path).step.tolist() == [[512, 512], [512, 512]]


# ------------------------------------------------------------------ which format


def test_two_encoders_in_a_job_are_listed(job):
    other = job / writers.TRIDENT_JOB / "features_virchow"
    writers.trident(other, "s0", vectors(N, 5), CELLS * 256, encoder="virchow")
    refused(lambda: gpmil.read(job), "features_uni_v1", "features_virchow", "Name one")
    assert gpmil.read(other).n_features == 5


def test_two_kinds_of_files_in_a_folder_need_a_format(tmp_path):
    writers.trident(tmp_path, "a", vectors(N), CELLS * 256, patch_size_level0=256)
    torch.save(torch.from_numpy(vectors(N, 3)), tmp_path / "a.pt")
    np.save(tmp_path / "a.npy", vectors(N, 2))
    refused(lambda: gpmil.read(tmp_path), "trident or clam", "npy", "format=")
    assert gpmil.read(tmp_path, format="trident").n_features == 7
    assert gpmil.read(tmp_path, format="npy").n_features == 2
    refused(lambda: gpmil.read(tmp_path, format="zarr"), "'zarr'", "trident")
    refused(lambda: gpmil.read(tmp_path, format="slideflow"), "'slideflow'", "npy")


def test_nothing_to_read(tmp_path):
    refused(lambda: gpmil.read(tmp_path), "found nothing", "TRIDENT", ".npz")
    refused(lambda: gpmil.read(tmp_path / "x"), "nothing at")
    (tmp_path / "a.txt").write_text("a")
    refused(lambda: gpmil.read(tmp_path / "a.txt"), "found nothing")


def test_features_of_whole_slides_are_refused(tmp_path):
    job = tmp_path / writers.TRIDENT_JOB / "slide_features_titan"
    job.mkdir(parents=True)
    with h5py.File(job / "a.h5", "w") as f:
        f["features"] = np.ones(768, "f4")
    for path in (tmp_path, job.parent, job):
        refused(lambda path=path: gpmil.read(path), "slide-level", "one per patch")
    moved = job.rename(tmp_path / "elsewhere")
    refused(lambda: gpmil.read(moved), "a.h5", "slide-level")
    with h5py.File(moved / "a.h5", "w") as f:
        f["features"] = np.ones((1, 768), "f4")
    refused(lambda: gpmil.read(moved, skip_bad=True), "a.h5", "slide-level")
    for kind in ("slide", "patient"):
        writers.stamp(tmp_path / kind, "a", vectors(1), [[0, 0]], feat_type=kind)
        refused(lambda kind=kind: gpmil.read(tmp_path / kind), "slide-level", kind)


# ------------------------------------------------------------------ bad files


def test_empty_slides_and_slides_of_one_patch(job):
    folder = features_of(job)
    writers.trident(folder, "e1", np.empty((0, 7), "f4"), np.empty((0, 2)))
    writers.trident(folder, "e2", np.empty(0, "f4"), np.empty(0))
    writers.trident(folder, "one", vectors(1), [[0, 0]], patch_size_level0=256)
    bags, report = read_with_report(job)
    assert bags.names.tolist() == ["one", "s0", "s1", "s2"]
    assert report.skipped == (("e1", "no patch"), ("e2", "no patch"))
    assert report.n_files == 6 and "left out" in " ".join(report.warnings())


def test_a_corrupt_file_is_named(job):
    folder = features_of(job)
    whole = (folder / "s0.h5").read_bytes()
    (folder / "s0.h5").write_bytes(whole[: len(whole) // 2])
    (folder / "s1.h5").write_bytes(b"no HDF5")
    refused(lambda: gpmil.read(job), "s0.h5", "HDF5", "skip_bad")
    bags, report = read_with_report(job, skip_bad=True)
    assert bags.names.tolist() == ["s2"] and [name for name, _ in report.skipped] == ["s0", "s1"]
    refused(lambda: gpmil.read(job), "s0.h5", "HDF5", "skip_bad")  # from the cache


def test_a_link_to_nowhere_is_named(job):
    (features_of(job) / "s9.h5").symlink_to(job / "gone.h5")
    refused(lambda: gpmil.read(job), "s9.h5")
    assert [name for name, _ in read_with_report(job, skip_bad=True)[1].skipped] == ["s9"]


def test_the_labels_are_looked_at_before_the_slides(job):
    refused(lambda: gpmil.read(job, pd.DataFrame({"a": ["s0"], "b": [1]})), "slide=")
    assert not (features_of(job) / ".gpmil-cache").exists()


def test_nan_is_named(job):
    bad = vectors(N)
    bad[3, 2] = np.nan
    writers.trident(features_of(job), "s1", bad, CELLS * 256, patch_size_level0=256)
    refused(lambda: gpmil.read(job), "s1.h5", "1 of", "NaN")
    bags, report = read_with_report(job, skip_bad=True)
    assert bags.names.tolist() == ["s0", "s2"] and "NaN" in report.skipped[0][1]
    np.testing.assert_array_equal(bags[1].features, vectors(N, seed=2))


def test_nothing_but_bad_files(job):
    for path in features_of(job).glob("*.h5"):
        path.write_bytes(b"")
    refused(lambda: gpmil.read(job, skip_bad=True), "no slide with a patch", "3 that cannot")


@pytest.mark.parametrize(
    ("coords", "words"),
    [
        (CELLS[1:] * 256, "not of the same run"),
        (np.zeros((N, 2)), "another one"),
        (np.full((N, 2), np.nan), "finite"),
    ],
)
def test_positions_that_do_not_fit(tmp_path, coords, words):
    writers.trident(tmp_path, "a", vectors(N), coords)
    refused(lambda: gpmil.read(tmp_path), "a.h5", words)


def test_files_of_something_else(tmp_path):
    with h5py.File(tmp_path / "a.h5", "w") as f:
        f["embeddings"] = vectors(N)
    refused(lambda: gpmil.read(tmp_path), "a.h5", "features", "'embeddings'")
    torch.save({"x": torch.ones(3, 2)}, tmp_path / "b.pt")
    refused(lambda: gpmil.read(tmp_path, format="clam", skip_bad=True), "more than once")
    refused(lambda: gpmil.read(tmp_path / "b.pt"), "b.pt", "dict")


def test_a_pickle_is_not_executed(tmp_path):
    class Evil:
        def __reduce__(self):
            return (tmp_path.joinpath("done").touch, ())

    torch.save(Evil(), tmp_path / "a.pt")
    refused(lambda: gpmil.read(tmp_path / "a.pt"), "a.pt", "weights_only")
    assert not (tmp_path / "done").exists()


def test_two_encoders_or_sizes_are_named(job):
    folder = features_of(job)
    path = writers.trident(folder, "t", vectors(N), CELLS * 256, encoder="virchow")
    refused(lambda: gpmil.read(job), "'uni_v1' (s0.h5)", "'virchow' (t.h5)")
    path.unlink()
    writers.trident(folder, "t", vectors(N, 9), CELLS * 256)
    refused(lambda: gpmil.read(job), "7 features in s0.h5", "9 in t.h5")


def test_two_files_of_one_slide(tmp_path):
    for name in ("a", "a.svs"):
        writers.trident(tmp_path, name, vectors(N), CELLS * 256)
    refused(lambda: gpmil.read(tmp_path), "two files of one slide", "a.svs.h5")


def test_some_slides_without_positions(tmp_path):
    writers.stamp(tmp_path, "a", vectors(N), CELLS * 256.0, tile_size_um=256, unit="um")
    writers.stamp(tmp_path, "b", vectors(N))
    refused(lambda: gpmil.read(tmp_path), "1 slide without positions: 'b'", "graph=None")
    assert gpmil.read(tmp_path, graph=None).coords is None


def test_a_graph_that_needs_no_step(tmp_path):
    rng = np.random.default_rng(5)
    writers.huggingface(tmp_path, "a", vectors(N), rng.normal(size=(N, 2)))
    bags, report = read_with_report(tmp_path, graph="knn")
    assert bags.graph == "knn" and report.step == "not known" and report.edges_per_patch > 2


def test_every_format_has_an_opener():
    assert set(formats.H5) < set(formats.OPEN)


# ------------------------------------------------------------------ real features


def test_the_real_slide(data_dir, tmp_path):
    path = data_dir / "slides" / "CMU-1-Small-Region_features.h5"
    if not path.is_file():
        pytest.skip("no features of CMU-1-Small-Region")
    bags, report = read_with_report(path, cache=tmp_path)
    assert (len(bags), bags.n_instances, bags.n_features) == (1, 39, 1280)
    assert report.step == "256, patch_size_level0 less the overlap"
    with h5py.File(path) as f:
        assert n_edges(bags) == [grid_edges(f["coords"][()] // 256)]
        np.testing.assert_array_equal(bags.features, f["features"][()])


# ------------------------------------------------------------------ labels


@pytest.fixture
def five(tmp_path):
    for k in range(5):
        writers.trident(
            tmp_path / "f", f"s{k}", vectors(N, seed=k), CELLS * 256, patch_size_level0=256
        )
    return tmp_path / "f"


def table(**columns) -> pd.DataFrame:
    return pd.DataFrame({"slide_id": [f"s{k}" for k in range(5)], **columns})


def test_labels_join_by_stem_and_say_what_is_left(five, tmp_path):
    df = pd.DataFrame(
        {
            "slide_id": ["x/s1.svs", "s0.ndpi", "s3", "other", "s1"],
            "case_id": ["p1", "p0", "p0", "p9", "p1"],
            "label": [1, 0, None, 1, 1],
        }
    )
    df.to_csv(tmp_path / "labels.csv", index=False)
    bags, report = read_with_report(five, tmp_path / "labels.csv")
    assert bags.labels.tolist() == [0, 1, -1, -1, -1]
    assert bags.groups.tolist() == ["p0", "p1", "s2", "p0", "s4"]
    assert report.matched == 2 and report.labels_without_slide == ("other",)
    assert report.slides_without_label == ("s2", "s3", "s4") and report.duplicates == ("s1",)
    assert any("'slide_id'" in n and "'case_id'" in n and "'label'" in n for n in report.notes)
    assert any("2 slides without a patient" in n for n in report.notes)
    assert len(report.warnings()) == 3
    df.to_csv(tmp_path / "labels.tsv", index=False, sep="\t")
    assert gpmil.read(five, tmp_path / "labels.tsv").labels.tolist() == bags.labels.tolist()
    assert gpmil.read(five, df).labels.tolist() == bags.labels.tolist()


def test_words_need_a_positive_one(five):
    words = table(label=["tumour", "normal", "tumour", None, "normal"])
    refused(
        lambda: gpmil.read(five, words),
        "2 classes: 'normal' (2), 'tumour' (2)",
        "positive='tumour'",
    )
    bags = gpmil.read(five, words, positive="tumour")
    assert bags.labels.tolist() == [1, 0, 1, -1, 0] and bags.class_names == ("normal", "tumour")
    refused(lambda: gpmil.read(five, words, positive="cancer"), "'cancer'", "'normal'")


@pytest.mark.parametrize("kinds", [["a", "b", "c", "a", "c"], [0, 1, 2, 0, 2]])
def test_three_classes(five, kinds):
    refused(lambda: gpmil.read(five, table(label=kinds)), "3 classes", "positive=")
    a, b, c = kinds[:3]
    both = f"Say what '{a}' and '{b}' are, as in positive='{c}', negative='{a},{b}'"
    refused(lambda: gpmil.read(five, table(label=kinds), positive=c), f"'{c}' (2)", both)
    bags = gpmil.read(five, table(label=kinds), positive=c, negative=[a, b])
    assert bags.labels.tolist() == [0, 0, 1, 0, 1] and bags.class_names == (f"{a},{b}", str(c))
    bags = gpmil.read(five, table(label=kinds), positive=c, exclude=b)
    assert bags.labels.tolist() == [0, -1, 1, 0, 1] and bags.class_names == (str(a), str(c))


def test_labels_that_are_numbers_in_disguise(five):
    for kinds in ([1.0, 0.0, np.nan, 1.0, -1.0], ["1", "0", "", "1.0", "-1"]):
        assert gpmil.read(five, table(label=kinds)).labels.tolist() == [1, 0, -1, 1, -1]
    assert gpmil.read(five, table(label=[True, False] * 2 + [True])).labels[:2].tolist() == [1, 0]


def test_minus_one_beside_two_classes_is_unlabelled(five):
    three = table(label=[1, -1, 0, 1, 0])
    assert gpmil.read(five, three, positive=1).labels.tolist() == [1, -1, 0, 1, 0]
    assert gpmil.read(five, three, positive="0").labels.tolist() == [0, -1, 1, 0, 1]
    two = table(label=[1, -1, -1, 1, None])
    refused(lambda: gpmil.read(five, two, positive=1), "-1 means unlabelled", "negative='-1'")
    assert gpmil.read(five, two, positive=1, negative=-1).labels.tolist() == [1, 0, 0, 1, -1]
    assert gpmil.read(five, two, positive=1, exclude=-1).labels.tolist() == [1, -1, -1, 1, -1]


def test_rows_that_contradict_each_other(five):
    df = pd.DataFrame({"slide": ["s0", "s1", "s0.svs"], "label": [1, 0, 0], "patient": [1, 2, 1]})
    refused(lambda: gpmil.read(five, df), "'s0'", "'label'", "one row per slide")
    df = df.assign(label=[1, 0, 1], patient=[1, 2, 3])
    refused(lambda: gpmil.read(five, df), "'s0'", "'patient'")


def test_columns_are_named_or_missed(five, tmp_path):
    df = pd.DataFrame({"id": ["s0", "s1"], "grade": [1, 0], "label": [0, 1], "who": ["p", "q"]})
    refused(lambda: gpmil.read(five, df), "with the slide", "slide=", "'grade'")
    bags, report = read_with_report(five, df, slide="id", label="grade", patient="who")
    assert bags.labels[:2].tolist() == [1, 0] and bags.groups[:2].tolist() == ["p", "q"]
    assert not any("guessed" in n for n in report.notes)
    refused(lambda: gpmil.read(five, df, slide="nr"), "slide", "'nr'")
    refused(lambda: gpmil.read(five, df.drop(columns=["grade", "label"]), slide="id"), "label=")
    refused(lambda: gpmil.read(five, label="grade"), "labels=")
    refused(lambda: gpmil.read(five, positive="grade"), "labels=")
    refused(lambda: gpmil.read(five, graph="grid"), "'grid'", "grid4")
    refused(lambda: gpmil.read(five, df.assign(id=["x", "y"]), slide="id"), "no slide has a label")
    refused(lambda: gpmil.read(five, tmp_path / "none.csv"), "no file")


def test_names_with_leading_zeros_and_dots(tmp_path):
    for name in ("007", "TCGA-A1.B34C"):
        writers.trident(tmp_path / "f", name, vectors(N), CELLS * 256, patch_size_level0=256)
    (tmp_path / "l.csv").write_text("slide,label\n007,1\nTCGA-A1.B34C.svs,0\n")
    assert gpmil.read(tmp_path / "f", tmp_path / "l.csv").labels.tolist() == [1, 0]


def test_the_report_in_words(five):
    _, report = read_with_report(five, table(label=[1, 0, 1, 0, 1]))
    text = "\n".join(report.lines())
    for words in ("trident, 5 files", "5 slides", "uni_v1", "256", "5 slides with a label"):
        assert words in text
    assert report.warnings() == []


# ------------------------------------------------------------------ tables and .npz the same way


def test_a_table_with_labels_of_its_own_or_another(tmp_path):
    rows = pd.DataFrame(vectors(2 * N), columns=[f"f{k}" for k in range(7)])
    rows = rows.assign(slide=np.repeat(["a", "b"], N), x=np.tile(CELLS[:, 0], 2))
    rows = rows.assign(y=np.tile(CELLS[:, 1], 2), label=np.repeat(["t", "n"], N), split="train")
    rows.to_csv(tmp_path / "rows.csv", index=False)
    bags, report = read_with_report(tmp_path / "rows.csv", positive="t")
    assert report.format == "table" and bags.labels.tolist() == [1, 0]
    assert n_edges(bags) == [EDGES] * 2 and "from the positions" in report.step
    other = pd.DataFrame({"slide": ["b", "a", "c"], "label": [1, 0, 1]})
    bags, report = read_with_report(tmp_path / "rows.csv", other)
    assert bags.labels.tolist() == [0, 1] and report.labels_without_slide == ("c",)
    rows.assign(label=np.arange(2 * N) // N * 2).to_csv(tmp_path / "rows.csv", index=False)
    assert gpmil.read(tmp_path / "rows.csv", positive=2).labels.tolist() == [0, 1]


def test_npz_parts_are_read_as_one(tmp_path):
    np.savez(
        tmp_path / "a.npz",
        X=vectors(2 * N),
        bag=np.repeat([0, 1], N),
        y_bag=[0, 1],
        bag_id=["a", "b"],
        x=np.tile(CELLS[:, 0], 2),
        y=np.tile(CELLS[:, 1], 2),
        split=["train", "test"],
    )
    bags, report = read_with_report(tmp_path / "a.npz")
    assert len(bags) == 2 and n_edges(bags) == [EDGES] * 2
    assert any("read_splits" in note for note in report.notes)
    assert list(gpmil.io.read_splits(tmp_path / "a.npz")) == ["train", "test"]
    refused(lambda: gpmil.read(tmp_path / "a.npz", positive="x"), "positive")
    refused(lambda: gpmil.read(tmp_path / "a.npz", format="table"), "'table'", "'npz'")
    assert len(gpmil.read(tmp_path, format="npz")) == 2


# ------------------------------------------------------------------ the side of a patch


@pytest.mark.parametrize(
    ("attrs", "beside", "size"),
    [
        ({"patch_size": 256, "patch_size_level0": 512, "overlap": 64}, None, (512, 512)),
        ({"patch_size_level0": 512, "overlap": 64}, None, (512, 512)),  # the step is not told
        (
            {"patch_size": 224, "level0_magnification": 40, "target_magnification": 10},
            None,
            (896, 896),
        ),
        ({"patch_size": 256, "downsample": [4.9, 2.0]}, None, (1024, 512)),
        ({}, {"patch_size_level0": 300}, (300, 300)),
        ({"patch_size_level0": "None"}, {}, None),
    ],
)
def test_the_side_of_a_patch_does_not_depend_on_the_overlap(attrs, beside, size):
    assert steps.told_size(attrs, beside) == size


def test_every_format_that_tells_a_side_says_so(tmp_path):
    writers.clam(tmp_path / "clam", "s", vectors(N), CELLS * 512, 256, 2.0)
    writers.stamp(tmp_path / "stamp", "s", vectors(N), CELLS * 256.0, unit="um", tile_size_um=256.0)
    writers.slideflow(tmp_path / "slideflow", "s", vectors(N), CELLS * 400 + 200)
    found = {
        name: gpmil.read(tmp_path / name).metadata["sizes"]
        for name in ("clam", "stamp", "slideflow")
    }
    assert found == {"clam": {"s": (512, 512)}, "stamp": {"s": (256, 256)}, "slideflow": {}}


def test_sides_survive_the_cache_and_a_choice_of_slides(job):
    first, again = gpmil.read(job), gpmil.read(job)
    assert first.metadata["sizes"] == {"s0": (512, 512), "s1": (256, 256), "s2": (512, 512)}
    assert again.metadata == first.metadata == again[[2, 0]].metadata
