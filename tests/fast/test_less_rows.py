"""What is left without some rows, by tiles, against an explicit inverse."""

import numpy as np
import pytest

less_rows = pytest.importorskip("gpmil.fast.less_rows")


@pytest.mark.parametrize("n", [1, 3, 8, 9, 65, 131])
def test_roots_and_diagonals_of_inverses(n):
    U = np.random.default_rng(n).normal(size=(n, 70)) + 0.2
    U *= 0.97 / np.linalg.norm(U, 2)
    expected = np.linalg.inv(np.eye(n) - U @ U.T)
    root, diagonal = less_rows.inverse(U)
    assert (np.triu(root, 1) == 0).all()
    np.testing.assert_allclose(root.T @ root, expected, rtol=1e-11, atol=1e-12)
    np.testing.assert_allclose(diagonal, expected.diagonal(), rtol=1e-11)


def test_what_is_not_positive_is_no_number():
    assert not np.isfinite(less_rows.inverse(np.full((3, 4), 0.6))[1]).all()
