"""AnnData to bags and back, as LazySlide and SpatialData have it."""

import numpy as np
import pandas as pd
import pytest

from gpmil import VGPMILPRI, AttentionMIL, Bags

anndata = pytest.importorskip("anndata")
TILES = {"height": 224, "width": 224, "stride_width": 200, "stride_height": 190}
TILES |= {"mpp": 0.5, "base_downsample": 2.0}


def slide_table(rng, n=5, n_features=3, label=1):
    """One slide as `wsi.fetch.features_anndata` of wsidata gives it, with a label."""
    cells = np.array([(400 * (k % 3), 380 * (k // 3)) for k in range(n)])
    obs = pd.DataFrame({"tile_id": np.arange(n), "tissue_id": 0, "label": label})
    obs.index = obs.index.astype(str)
    table = anndata.AnnData(rng.normal(size=(n, n_features)).astype("f4"), obs=obs)
    table.obsm["spatial"], table.uns["tile_spec"] = cells, dict(TILES)
    return table


@pytest.fixture
def tables():
    rng = np.random.default_rng(3)
    return {name: slide_table(rng, n, label=y) for name, n, y in (("b", 5, 1), ("a", 4, 0))}


def test_a_mapping_is_one_slide_each(tables):
    bags = Bags.from_anndata(tables)
    assert bags.names.tolist() == ["b", "a"] and bags.labels.tolist() == [1, 0]
    assert np.array_equal(bags[1].features, tables["a"].X)
    # level-0 pixels: stride 200 x 190 at a downsample of 2
    assert bags.step.tolist() == [[400, 380], [400, 380]]
    assert bags.adjacency.nnz // 2 == (2 + 1 + 2) + (2 + 1)
    assert dict(bags.facts) == {"mpp": 0.5, "patch_size": 224, "overlap": 24}


def test_one_table_with_rows_in_any_order(tables, caplog):
    both = anndata.concat(tables, label="slide_name", index_unique="-")
    shuffled = both[np.array([8, 0, 4, 2, 5, 3, 7, 1, 6])].copy()
    bags = Bags.from_anndata(shuffled, step=(400, 380))
    assert "slide_name" in caplog.text  # the guess is said
    assert bags.names.tolist() == ["a", "b"] and bags.sizes.tolist() == [4, 5]
    assert np.array_equal(bags[1].features, tables["b"].X[[0, 4, 2, 3, 1]])
    assert bags.adjacency.nnz == Bags.from_anndata(tables).adjacency.nnz


def test_predictions_go_into_the_rows_they_are_of(tables):
    both = anndata.concat(tables, label="my_slides", index_unique="-")
    shuffled = both[np.array([8, 0, 4, 2, 5, 3, 7, 1, 6])].copy()
    bags = Bags.from_anndata(shuffled, slide="my_slides", step=(400, 380))
    settings = {"variance": 1.0, "lengthscale": 2.0, "mean": -1.0, "coupling": 0.5, "n_inducing": 4}
    model = VGPMILPRI(**settings, random_state=0).fit(bags)
    found = model.predict_all(bags)
    assert bags.to_anndata(found, into=shuffled) is shuffled
    for name, own in zip(bags.names, found.instances.split()):
        here = shuffled.obs[shuffled.obs["my_slides"] == name]
        assert np.array_equal(here["gpmil_probability"], own.probability)
    of = dict(zip(bags.names, found.proba[:, 1]))
    expected = [of[name] for name in shuffled.obs["my_slides"]]
    assert np.array_equal(shuffled.obs["gpmil_slide_probability"], expected)


def test_predictions_go_into_a_mapping_and_attention_too(tables):
    bags = Bags.from_anndata(tables)
    model = AttentionMIL(max_epochs=2, random_state=0).fit(bags)
    table = model.attention_table(bags)
    bags.to_anndata(table, into=tables)
    assert np.array_equal(tables["a"].obs["gpmil_attention"], bags.split(model.attention(bags))[1])
    assert np.allclose(table["times_even"], table["attention"] * bags.sizes[bags.bag_index])


def test_there_and_back(cohort, tmp_path):
    made = cohort.to_anndata()
    made.write_h5ad(tmp_path / "cohort.h5ad")
    read = anndata.read_h5ad(tmp_path / "cohort.h5ad")
    again = Bags.from_anndata(read, step=256)  # patients and facts come back without being named
    for name in ("features", "offsets", "labels", "names", "coords", "instance_labels", "step"):
        assert np.array_equal(getattr(again, name), getattr(cohort, name)), name
    assert again.groups.tolist() == [str(group) for group in cohort.groups]
    assert (again.adjacency != cohort.adjacency).nnz == 0 and again.facts == cohort.facts
    assert (made.obsp["spatial_connectivities"] != cohort.adjacency).nnz == 0


def test_patients_are_found_and_that_is_said(tables, caplog):
    for name, table in tables.items():
        table.obs["patient_id"] = f"of {name}"
    assert Bags.from_anndata(tables).groups.tolist() == ["of b", "of a"]
    assert "group: obs column 'patient_id' (group=False: none)" in caplog.text
    assert Bags.from_anndata(tables, group=False).groups is None
    assert Bags.from_anndata(tables, group="tissue_id").groups.tolist() == [0, 0]


def test_mistakes_say_what_to_do(tables, cohort):
    one = tables["a"]
    cases = [
        (lambda: Bags.from_anndata({}), "empty mapping"),
        (lambda: Bags.from_anndata(np.ones((3, 2))), "expected an AnnData.*found ndarray"),
        (lambda: Bags.from_anndata(one), "no column of obs names the slide"),
        (lambda: Bags.from_anndata(tables, features="uni"), "neither obsm nor layers has 'uni'"),
        (lambda: Bags.from_anndata(tables, coords="places"), "no obsm 'places' in 2 tables"),
        (lambda: cohort.to_anndata(into=tables), "expected the 22 slides"),
        (lambda: cohort.to_anndata(pd.DataFrame({"p": [1.0]})), "one per patch"),
    ]
    for call, words in cases:
        with pytest.raises(ValueError, match=words):
            call()


def test_without_positions(tables):
    for table in tables.values():
        del table.obsm["spatial"]
    assert not Bags.from_anndata(tables).has_geometry
