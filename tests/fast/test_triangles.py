"""Small factors and triangular solves against NumPy's general ones."""

import numpy as np
import pytest

from gpmil.fast import products, triangles


@pytest.fixture(params=[True, False], ids=["tiles", "LAPACK"])
def tiles(request, monkeypatch):
    """With tiles, where they are a gain, and without."""
    if not request.param:
        monkeypatch.setattr(products, "tiled", lambda: None)


@pytest.mark.usefixtures("tiles")
@pytest.mark.parametrize(("dtype", "tolerance"), [(np.float64, 1e-12), (np.float32, 1e-4)])
@pytest.mark.parametrize("n", [1, 7, 48, 70, 131, 403])
def test_factors_and_solves(n, dtype, tolerance):
    rng = np.random.default_rng(n)
    X = rng.normal(size=(n, n + 3))
    A = (X @ X.T / n + np.diag(rng.uniform(1, 2, n))).astype(dtype)
    rows = rng.normal(size=(11, n)).astype(dtype)
    L = np.linalg.cholesky(A.astype(float))
    for given in (A, np.asfortranarray(A)):
        found = triangles.factor(given)
        assert found.dtype == dtype
        np.testing.assert_allclose(np.tril(found), L, rtol=tolerance, atol=tolerance)
    solved = triangles.solved(found, rows.copy())
    assert solved.dtype == dtype and solved.flags.c_contiguous
    np.testing.assert_allclose(solved, np.linalg.solve(L, rows.T).T, rtol=0, atol=tolerance)
    columns = triangles.solved(found, np.asfortranarray(rows))
    np.testing.assert_allclose(columns, solved, rtol=0, atol=tolerance)
    inverse = np.tril(triangles.inverse(np.tril(found)))
    np.testing.assert_allclose(inverse @ L, np.eye(n), rtol=0, atol=tolerance)


def test_a_matrix_that_is_not_positive_is_refused():
    with pytest.raises(np.linalg.LinAlgError):
        triangles.factor(np.array([[1.0, 2.0], [2.0, 1.0]]))
