"""Tiles: where their memory begins, and elimination against NumPy."""

import numpy as np
import pytest

numba = pytest.importorskip("numba")
tiles = pytest.importorskip("gpmil.fast.tiles")


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_room_for_tiles_begins_with_a_line_of_memory(dtype):
    @numba.njit
    def beginnings(like, count):
        kept = [tiles.in_lines(3 + k, 5, like) for k in range(count)]
        return [(room.ctypes.data, room.shape, room.sum()) for room in kept]

    found = beginnings(np.empty(0, dtype), 9)
    assert [start % 64 for start, _, _ in found] == [0] * 9
    assert [shape for _, shape, _ in found] == [(3 + k, 5) for k in range(9)]
    assert sum(total for *_, total in found) == 0


@numba.njit
def eliminated(A, rows):
    n = len(A)
    Z, minus = tiles.room(n, len(rows), A)
    Z[:n, :n] = A
    Z[len(minus) : len(minus) + len(rows), :n] = rows
    tiles.eliminate(Z, minus)
    return Z, len(minus)


@pytest.mark.parametrize(("dtype", "tolerance"), [(np.float64, 1e-12), (np.float32, 1e-4)])
@pytest.mark.parametrize("n", [1, 7, 8, 23, 48, 70, 131])  # parts of a tile, whole ones, and both
def test_elimination(n, dtype, tolerance):
    rng = np.random.default_rng(n)
    X = rng.normal(size=(n, n + 3))
    A = (X @ X.T / n + np.diag(rng.uniform(1, 2, n))).astype(dtype)
    rows = rng.normal(size=(11, n)).astype(dtype)
    Z, first = eliminated(A, rows)
    L = np.linalg.cholesky(A.astype(float))
    np.testing.assert_allclose(np.tril(Z[:n, :n]), L, rtol=tolerance, atol=tolerance)
    expected = np.linalg.solve(L, rows.T).T
    np.testing.assert_allclose(Z[first : first + 11, :n], expected, rtol=0, atol=tolerance)
    assert (Z[first : first + 11, n:] == 0).all()  # what fills up a tile stays apart


@pytest.mark.parametrize("at", [0, 3, 9])
def test_elimination_of_what_is_not_positive_is_no_number(at):
    A = np.eye(10)
    A[at, at] = -0.5
    Z, first = eliminated(A, np.ones((2, 10)))
    assert np.isnan(Z[first : first + 2, at]).all()
