"""The table of kernels: every entry against loops (and gpytorch's), with its derivatives."""

import gpytorch
import numpy as np
import pytest
import torch
from oracles.model import kernel, relative_error

from gpmil.fast import compiled
from gpmil.process.kernels import KERNELS, Kernel, rbf

UNIT = {
    "rbf": gpytorch.kernels.RBFKernel(),
    "matern32": gpytorch.kernels.MaternKernel(nu=1.5),
    "matern52": gpytorch.kernels.MaternKernel(nu=2.5),
    "linear": gpytorch.kernels.LinearKernel(),
}
NAMES = list(KERNELS)
ONE = torch.ones((), dtype=torch.float64)


def draw(n, d=3, seed=0):
    return np.random.default_rng(seed).normal(size=(n, d))


def unit_of_gpytorch(name):
    unit = UNIT[name].double().requires_grad_(False)
    setattr(unit, "variance" if name == "linear" else "lengthscale", ONE)
    return unit


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("with_grad", [True, False])
def test_kernels_equal_their_formulas(name, with_grad):
    x, z = draw(7), draw(5, seed=1)
    with torch.set_grad_enabled(with_grad):
        found = Kernel(name, 2.7, 1.9)(torch.from_numpy(x), torch.from_numpy(z))
    assert relative_error(found, kernel(x, z, name, 2.7, 1.9)) < 1e-14


@pytest.mark.parametrize("name", UNIT)
def test_kernels_equal_those_of_gpytorch(name):
    x, z = torch.from_numpy(draw(9)), torch.from_numpy(draw(5, seed=1))
    expected = 2.7 * unit_of_gpytorch(name)(x / 1.9, z / 1.9).to_dense()
    assert relative_error(Kernel(name, 2.7, 1.9)(x, z), expected) < 1e-14


@pytest.mark.parametrize("name", NAMES)
def test_the_diagonal_is_that_of_the_matrix(name):
    x = torch.from_numpy(draw(12).reshape(2, 6, 3))
    k = Kernel(name, 0.6, 2.1)
    expected = k(x, x).diagonal(dim1=-2, dim2=-1)
    torch.testing.assert_close(k.diagonal(x), expected, rtol=1e-14, atol=0)


@pytest.mark.parametrize("name", NAMES)
def test_first_and_second_derivatives_in_the_settings_and_the_inputs(name):
    x = torch.from_numpy(draw(4)).requires_grad_()
    z = torch.from_numpy(draw(3, seed=1)).requires_grad_()
    settings = (torch.tensor(v, dtype=torch.float64, requires_grad=True) for v in (2.7, 1.9))

    def matrix_and_diagonal(variance, length, x, z):
        k = Kernel(name, variance, length)
        return k(x, z), k.diagonal(x)

    with torch.enable_grad():
        at = (*settings, x, z)
        assert torch.autograd.gradcheck(matrix_and_diagonal, at)
        assert torch.autograd.gradgradcheck(matrix_and_diagonal, at)


@pytest.mark.parametrize("name", NAMES)
def test_kernels_take_batches(name):
    x = torch.from_numpy(draw(12).reshape(2, 6, 3))
    k = Kernel(name, 0.6, 2.1)
    for b in range(2):
        assert torch.allclose(k(x, x)[b], k(x[b], x[b]), atol=1e-14)


@pytest.mark.parametrize("shift", [0.0, 3e3])
def test_rbf_in_place_equals_the_formula_and_gpytorch(shift):
    rng = np.random.default_rng(4)
    x, z = (torch.from_numpy(rng.normal(size=(2, n, 7)) + shift) for n in (9, 5))
    kept = x.clone()
    unit = Kernel("rbf", 1.0, 1.0)
    with torch.no_grad():
        fast = unit(x, z)
    with torch.enable_grad():
        formula = unit(x, z)
    assert torch.equal(fast, rbf(x, z, 1.0, 1.0)) and torch.equal(x, kept)
    for twin in (formula, unit_of_gpytorch("rbf")(x, z).to_dense()):
        torch.testing.assert_close(fast, twin, rtol=1e-12 * (1 + shift), atol=1e-15)


def test_rbf_without_numba_far_apart_and_of_no_number(monkeypatch):
    x, z = (torch.from_numpy(draw(n, seed=n)) for n in (6, 4))
    x[1], x[2, 0], x[3] = 1e3, torch.nan, z[2]
    found = rbf(x, z, 1.7, 0.9)
    monkeypatch.setattr(compiled, "pairs", lambda: None)
    plain = rbf(x, z, 1.7, 0.9)
    torch.testing.assert_close(found, plain, rtol=1e-14, atol=1e-300, equal_nan=True)
    assert found[2].isnan().all() and not found[1].any() and found[3, 2] == 1.7
    assert rbf(x[:0], z, 1.7, 0.9).shape == (0, 4)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("n", [0, 5, 64, 131])  # of 64 rows at a time
@pytest.mark.parametrize(
    ("m", "k", "triangle"), [(16, 16, 1), (13, 13, 1), (13, 13, -1), (7, 30, 0)]
)
def test_products_with_a_kernel(name, n, m, k, triangle):
    x, z, B = draw(n, 11) + 3.0, draw(m, 11, seed=1) + 3.0, draw(m, k, seed=2)
    B = np.triu(B) if triangle > 0 else np.tril(B) if triangle < 0 else B
    x, z, B = (torch.from_numpy(a) for a in (x, z, B))
    made = Kernel(name, 0.8, 3.1)
    with torch.no_grad():
        found = made.times(x, z, B, triangle)
        torch.testing.assert_close(found, made(x, z) @ B, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(made.times(x, z, B, triangle), found, rtol=1e-12, atol=1e-12)


def test_products_with_rbf_far_apart_of_no_number_and_of_lengths_by_column():
    x, z, B = (torch.from_numpy(draw(n, seed=n)) for n in (6, 4, 3))
    x[1], x[2, 0] = 1e3, torch.nan
    B = torch.cat([B, B[:1]])
    lengths = torch.tensor([0.7, 2.0, 1.3], dtype=torch.float64, requires_grad=True)
    with torch.no_grad():
        made = Kernel("rbf", torch.tensor(1.7), lengths)
        found, plain = made.times(x, z, B), made(x, z) @ B
    torch.testing.assert_close(found, plain, rtol=1e-13, atol=1e-14, equal_nan=True)
    assert found[2].isnan().all() and not found[1].any()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("with_grad", [True, False])
def test_sums_against_symmetric_matrices(name, with_grad):
    x, S = draw(10) + 2.0, draw(2 * 8, 8, seed=3).reshape(2, 8, 8)  # bags of 4 and of 6
    S = S + S.swapaxes(1, 2)
    with torch.set_grad_enabled(with_grad):
        found = Kernel(name, 0.8, 1.3).against(torch.from_numpy(x), [4, 6], torch.from_numpy(S))
    expected = sum(
        (own[: len(rows), : len(rows)] * kernel(rows, rows, name, 0.8, 1.3)).sum()
        for own, rows in zip(S, (x[:4], x[4:]))
    )
    assert float(found) == pytest.approx(expected, rel=1e-12)


def test_pairs_far_apart_do_not_count():
    x, sizes = draw(64, 7), [41, 23]
    S = np.zeros((2, 41, 41))
    for own, n in zip(S, sizes):  # (I + .5 C)^-1 of a chain that is cut in two
        C = np.diag([*np.ones(12), 0.0, *np.ones(n - 14)], 1)
        C = np.diag((C + C.T).sum(1)) - C - C.T
        own[:n, :n] = np.linalg.inv(np.eye(n) + 0.5 * C)
    assert (S[0] < 1e-17).mean() > 0.3
    with torch.no_grad():
        found = Kernel("rbf", 0.8, 1.3).against(torch.from_numpy(x), sizes, torch.from_numpy(S))
    expected = sum(
        (own[: len(rows), : len(rows)] * kernel(rows, rows, "rbf", 0.8, 1.3)).sum()
        for own, rows in zip(S, (x[:41], x[41:]))
    )
    assert float(found) == pytest.approx(expected, rel=1e-14)


def test_a_kernel_object_is_taken_as_it_is():
    given = gpytorch.kernels.ScaleKernel(gpytorch.kernels.RBFKernel()).double()
    given.outputscale = torch.tensor(3.1, dtype=torch.float64)
    given.base_kernel.lengthscale = torch.tensor(0.8, dtype=torch.float64)
    x, z = draw(6), draw(4, seed=1)
    found = Kernel(given, 99.0, 99.0)(torch.from_numpy(x), torch.from_numpy(z))
    assert relative_error(found, kernel(x, z, "rbf", 3.1, 0.8)) < 1e-13


@pytest.mark.parametrize("name", UNIT)
def test_a_kernel_object_has_its_own_diagonal(name):
    x = torch.from_numpy(draw(12).reshape(2, 6, 3))
    k = Kernel(unit_of_gpytorch(name), 9.0, 9.0)
    expected = k(x, x).diagonal(dim1=-2, dim2=-1)
    torch.testing.assert_close(k.diagonal(x), expected, rtol=1e-14, atol=0)


def test_an_unknown_kernel_lists_the_known():
    with pytest.raises(ValueError, match="matern32"):
        Kernel("rbfx", 1.0, 1.0)
