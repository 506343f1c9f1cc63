"""Which patches become inducing points on lesions, against the dense residual kernel."""

import numpy as np
import pytest
import torch
from oracles import lesion_points as naive

from gpmil.process import lesion_points
from gpmil.process.kernels import Kernel
from gpmil.process.lesion_points import LEAST, foremost, pivots, suspects
from gpmil.process.sparse_gp import SparseGP

VARIANCE, LENGTH = 2.3, 1.4


def made(name="rbf", n=60, seed=3):
    rng = np.random.default_rng(seed)
    x, Z = rng.normal(size=(n, 3)) * [1.0, 2.0, 0.6], rng.normal(size=(5, 3))
    gp = SparseGP.build(Kernel(name, VARIANCE, LENGTH), torch.from_numpy(Z))
    return x, rng.uniform(0.02, 0.9, n), Z, gp


def found_in(gp, x, p):
    return suspects(gp, torch.from_numpy(x), torch.from_numpy(p))


@pytest.mark.parametrize("name", ["rbf", "matern32"])
def test_the_choice_is_that_of_the_dense_residual_kernel(name):
    x, p, Z, gp = made(name)
    found = found_in(gp, x, p)
    left = naive.residual(x, Z, name, VARIANCE, LENGTH)
    np.testing.assert_allclose(found.v, np.diag(left).clip(min=0), atol=1e-9)
    expected = naive.pivots(x, p, Z, 12, name, VARIANCE, LENGTH, LEAST)
    assert pivots(gp, found, 12).tolist() == expected
    assert len(expected) == 12


def test_a_patch_and_its_copy_get_one_point():
    x, p, _, gp = made(n=9)
    twice = np.concatenate([x, x, x[:4]])
    chosen = twice[pivots(gp, found_in(gp, twice, np.concatenate([p, p, p[:4]])), 22).numpy()]
    assert len(chosen) == len(np.unique(chosen, axis=0)) <= 9


def test_nothing_is_chosen_where_the_points_lie_already():
    x, p, _, gp = made()
    at_patches = SparseGP.build(gp.kernel, torch.from_numpy(x))
    assert not len(pivots(at_patches, found_in(at_patches, x, p), 5))


def test_a_linear_kernel_needs_no_more_points_than_columns():
    x, p, _, gp = made("linear")
    assert not len(pivots(gp, found_in(gp, x, p), 5))


def test_patches_that_cannot_be_positive_get_no_point():
    x, p, _, gp = made()
    p[7:] = 0.0
    assert set(pivots(gp, found_in(gp, x, p), 30).tolist()) <= set(range(7))


def test_of_parts_the_foremost_of_all_remain(monkeypatch):
    monkeypatch.setattr(lesion_points, "MOST", 11)
    x, p, _, gp = made()
    whole = found_in(gp, x, p)
    parts = [found_in(gp, x[a:b], p[a:b]) for a, b in ((0, 0), (0, 23), (23, 60))]
    best = np.argsort(-(whole.p * whole.v).numpy())[:11]
    for found in (foremost([whole]), foremost(parts), foremost([foremost(parts[:2]), parts[2]])):
        np.testing.assert_array_equal(found.x, x[best])
        np.testing.assert_array_equal(found.p, p[best])
