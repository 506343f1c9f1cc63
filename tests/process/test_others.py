"""Forms with a diagonal matrix less a few rows, or many, against an explicit inverse."""

import numpy as np
import pytest

from gpmil.fast import compiled
from gpmil.process.others import DiagonalLess, Others, Turned


@pytest.fixture(params=[True, False], ids=["compiled", "NumPy"])
def either_way(request, monkeypatch):
    """With the compiled loops, and without."""
    if not request.param:
        monkeypatch.setattr(compiled, "less_rows", lambda: None)


@pytest.mark.usefixtures("either_way")
@pytest.mark.parametrize("more", [0, 1])
@pytest.mark.parametrize("rows", [2, 9, 30])  # fewer than columns, about as many, more
def test_forms_equal_those_of_the_inverse(rows, more):
    rng = np.random.default_rng(rows)
    U, extra = rng.normal(size=(rows, 11)), 0.3 * rng.normal(size=(more, 11))
    every = np.concatenate([U, extra])
    b = np.linalg.eigvalsh(every.T @ every).max() + rng.uniform(0.4, 2.0, 11)
    X, inverse = rng.normal(size=(5, 11)), np.linalg.inv(np.diag(b) - every.T @ every)
    less = DiagonalLess(b, U, extra)
    for given in (X, U):
        expected = np.einsum("ij,jk,ik->i", given, inverse, given)
        np.testing.assert_allclose(less.powers(given), expected, rtol=1e-10)
    apart = less.scaled(X) - less.scaled(X[:1])  # as slides are compared
    found = (apart**2).sum(1) + (less.beyond(apart) ** 2).sum(1)
    expected = np.einsum("ij,jk,ik->i", X - X[0], inverse, X - X[0])
    np.testing.assert_allclose(found, expected, rtol=1e-10, atol=1e-13)


@pytest.mark.usefixtures("either_way")
@pytest.mark.parametrize("rows", [7, 30])  # of the patient: fewer than columns, more
def test_the_nearest_of_the_slides_that_count(rows):
    rng = np.random.default_rng(rows)
    V, bag = rng.normal(size=(rows, 11)), np.repeat([0, 1], [3, rows - 3])
    mine = np.stack([V[bag == b].mean(0) for b in (0, 1)])
    phi, spreads = rng.normal(size=(20, 11)), rng.uniform(0.2, 3.0, 20)
    b = 3 * np.linalg.eigvalsh(V.T @ V).max() * rng.uniform(1.0, 2.0, 11)
    others = Others(5.5, DiagonalLess(2 * b, V, V[:0]), DiagonalLess(b, V, phi[:1]))
    A = 5.5 * np.linalg.inv(np.diag(b) - V.T @ V - phi[:1].T @ phi[:1])
    counts = rng.random(20) < 0.7

    def distance(k, j):
        y = mine[k] - phi[j]
        own = np.trace(A @ np.cov(V[bag == k].T, bias=True))
        return y @ A @ y / (own + spreads[j])

    expected = [min(distance(k, j) for j in np.flatnonzero(counts)) for k in (0, 1)]
    found = others.nearest(V, bag, mine, phi, spreads, counts)
    np.testing.assert_allclose(found, expected, rtol=1e-10)


@pytest.mark.usefixtures("either_way")
def test_spreads_are_traces_of_covariances():
    rng = np.random.default_rng(4)
    V, bag, s = rng.normal(size=(12, 6)), np.repeat([0, 1, 2], [5, 1, 6]), rng.uniform(1, 9, 6)
    every = Turned(40.0, 0.1 * rng.normal(size=6), s, np.eye(6))
    phi = np.stack([V[bag == b].mean(0) for b in range(3)])
    r = 0.01 * (s.sum() / 40 - every.mean @ every.mean) / 6
    A = np.linalg.inv(np.diag(s / 40 + r) - np.outer(every.mean, every.mean))
    expected = [np.trace(A @ np.cov(V[bag == b].T, bias=True)) for b in range(3)]
    np.testing.assert_allclose(every.spreads(V, phi, bag), expected, rtol=1e-8, atol=1e-12)
