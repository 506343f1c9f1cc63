"""Forms with a diagonal matrix less a few rows, or many, against an explicit inverse."""

import numpy as np
import pytest

from gpmil.fast import compiled
from gpmil.process.others import DiagonalLess


@pytest.mark.parametrize("loops", [True, False], ids=["compiled", "NumPy"])
@pytest.mark.parametrize("more", [0, 1])
@pytest.mark.parametrize("rows", [2, 9, 30])  # fewer than columns, about as many, more
def test_forms_equal_those_of_the_inverse(rows, more, loops, monkeypatch):
    if not loops:
        monkeypatch.setattr(compiled, "less_rows", lambda: None)
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
