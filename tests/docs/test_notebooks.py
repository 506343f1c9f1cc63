"""The tutorials run from beginning to end, show their pictures, and say what is true."""

import json
from pathlib import Path

import notebooks
import numpy as np
import pytest
from sklearn.metrics import roc_auc_score

ROOT = Path(__file__).parents[2]
TUTORIALS = ROOT / "docs" / "tutorials"
PNG = b"\x89PNG\r\n"


def ran(name: str, n_pictures: int) -> dict:
    """The names that a tutorial defines, once it ran and showed so many pictures."""
    cells, names = notebooks.run(TUTORIALS / f"{name}.ipynb")
    pictures = [picture for cell in cells for picture in cell.pictures]
    assert len(pictures) == n_pictures and all(one.startswith(PNG) for one in pictures)
    return names


def test_pathology():
    names = ran("pathology", 2)
    assert names["report"].warnings() == []
    assert names["bags"].adjacency.nnz > 2 * names["bags"].n_instances
    expected = {"encoder": "uni", "magnification": 20, "patch_size": 256, "overlap": 0}
    assert dict(names["bags"].facts) == expected
    assert "magnification 20x" in str(names["refused"]) and "10x" in str(names["refused"])
    assert len(names["collection"]["features"]) == len(names["one"])
    assert roc_auc_score(names["test"].labels, names["p"]) > 0.9


def test_chains_gain_by_coupling():
    names = ran("chains", 2)
    truth, slices = names["test"].instance_labels, names["slices"]
    auc = {kind: roc_auc_score(truth, values) for kind, values in slices.items()}
    assert auc["coupled"] > auc["not coupled"] + 0.05
    assert names["coupled"].score(names["test"]) >= 0.8
    bags = names["bags"]  # a chain of n slices has n - 1 links
    assert bags.adjacency.nnz // 2 == bags.n_instances - len(bags)


def test_molecules_need_no_geometry():
    names = ran("molecules", 1)
    assert not names["bags"].has_geometry
    assert names["model"].score(names["test"]) >= 0.9 and names["right"] >= 0.9


def test_grid_search():
    names = ran("grid_search", 1)
    assert sorted(names["search"].best_params_) == ["coupling", "mean"]
    assert names["search"].predict_proba(names["bags"]).shape == (40, 2)
    assert names["found"]["test_roc_auc"].shape == (3,)


def test_clicks_teach_maps_of_new_slides():
    names = ran("teaching", 2)
    truth = names["truth"][16:].instance_labels
    before, after = (roc_auc_score(truth, names[key]) for key in ("before", "after"))
    assert after > before + 0.1
    assert len(np.unique(names["known"][names["clicks"]])) == 2  # the truth said both yes and no


def test_grades():
    names = ran("grades", 1)
    assert names["p"].shape == (16, 3) and np.allclose(names["p"].sum(axis=1), 1)
    assert float(names["judged"]["kappa"]) > 0.3


@pytest.mark.parametrize("path", sorted(TUTORIALS.glob("*.ipynb")), ids=lambda path: path.stem)
def test_kept_without_outputs(path):
    """Outputs are made by tests and site; in the repository they would only grow old."""
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    assert cells[0]["cell_type"] == "markdown" and cells[0]["source"][0].startswith("# ")
    code = [cell for cell in cells if cell["cell_type"] == "code"]
    assert all(cell["outputs"] == [] and cell["execution_count"] is None for cell in code)


def test_every_tutorial_is_tested():
    source = (ROOT / "tests" / "docs" / "test_notebooks.py").read_text(encoding="utf-8")
    assert all(f'ran("{path.stem}"' in source for path in TUTORIALS.glob("*.ipynb"))


def test_a_cell_shows_what_it_prints_and_its_last_value():
    cell = notebooks.Cell("code", "x = 2\nprint('two')\nx + 1")
    notebooks.execute(cell, names := {}, "here")
    assert cell.text == "two\n3\n" and names["x"] == 2 and cell.pictures == []


def test_an_error_names_the_cell(tmp_path):
    cells = [{"cell_type": "code", "source": ["1 / 0"]}]
    (tmp_path / "bad.ipynb").write_text(json.dumps({"cells": cells}))
    with pytest.raises(ZeroDivisionError) as error:
        notebooks.run(tmp_path / "bad.ipynb")
    assert any("bad.ipynb, cell 0" in str(entry.path) for entry in error.traceback)
