"""Small systems and inverses of triangles against NumPy's general ones."""

import numpy as np
import pytest

from gpmil.fast import triangles


def positive(n, dtype=float):
    rng = np.random.default_rng(n)
    X = rng.normal(size=(n, n + 3))
    return (X @ X.T / n + np.diag(rng.uniform(1, 2, n))).astype(dtype)


@pytest.mark.parametrize(("dtype", "tolerance"), [(np.float64, 1e-12), (np.float32, 1e-4)])
@pytest.mark.parametrize("n", [1, 7, 48, 131])
def test_inverses(n, dtype, tolerance):
    L = np.linalg.cholesky(positive(n, dtype))
    inverse = np.tril(triangles.inverse(L))
    assert inverse.dtype == dtype
    np.testing.assert_allclose(inverse @ L, np.eye(n), rtol=0, atol=tolerance)


@pytest.mark.parametrize("n", [1, 7, 70])
def test_solutions(n):
    A, b = positive(n), np.random.default_rng(3).normal(size=n)
    for given in (A, np.asfortranarray(A)):
        np.testing.assert_allclose(A @ triangles.solution(given.copy(), b), b, atol=1e-12)


def test_a_matrix_that_is_not_positive_has_none():
    assert triangles.solution(np.array([[1.0, 2.0], [2.0, 1.0]]), np.ones(2)) is None
