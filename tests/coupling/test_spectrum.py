"""Sigma from the spectra of the graphs: the same operator for every lambda, and its derivatives."""

import numpy as np
import pytest
import torch
from oracles.model import coupling_matrix, relative_error
from oracles.tuning import difference
from synthetic import dense_graphs, small_cohort

from gpmil import Bags
from gpmil.coupling.operator import Coupling
from gpmil.coupling.spectrum import Spectra

STRENGTH = 0.7


@pytest.fixture(scope="module")
def bags():
    return small_cohort(3, 9, sizes=(1, 8))


@pytest.fixture(scope="module")
def spectra(bags):
    return Spectra(bags.adjacency, bags.offsets)


def tensor(x):
    return torch.tensor(x, dtype=torch.float64)


@pytest.mark.parametrize("strength", [0.0, 0.04, 1.3, 60.0])
def test_the_operator_is_that_of_one_strength(bags, spectra, strength):
    x = torch.randn(bags.n_instances, 3, dtype=torch.float64)
    expected = Coupling(bags.adjacency, bags.offsets, strength)
    assert relative_error(spectra.apply(x, strength), expected.apply(x)) < 1e-12
    assert relative_error(spectra.apply(x, tensor(strength)), expected.apply(x)) < 1e-12
    assert relative_error(spectra.diagonals(strength, x[:, 0])[0], expected.diagonal()) < 1e-12


def test_the_diagonal_of_the_square(bags, spectra):
    _, found = spectra.diagonals(STRENGTH, torch.zeros(bags.n_instances).double())
    dense = [coupling_matrix(graph, STRENGTH) for graph in dense_graphs(bags)]
    expected = np.concatenate([np.diag(S @ S) for S in dense])
    assert relative_error(found, torch.from_numpy(expected)) < 1e-12


def test_derivatives_in_the_strength(bags, spectra):
    x = torch.randn(bags.n_instances, 2, dtype=torch.float64)

    def summed(strength):
        first, second = spectra.diagonals(strength, x[:, 0])
        return (spectra.apply(x, strength) * x).sum() + (first * x[:, 0] + second * x[:, 1]).sum()

    strength = tensor(STRENGTH).requires_grad_()
    summed(strength).backward()
    expected = difference(lambda s: float(summed(tensor(s))), STRENGTH, 0.02)
    assert float(strength.grad) == pytest.approx(float(expected), rel=1e-7)


def test_bags_without_edges_are_left_alone(bags):
    bare = Bags.from_arrays(bags.split(bags.features), labels=bags.labels)
    spectra, x = Spectra(bare.adjacency, bare.offsets), torch.ones(bare.n_instances, 1).double()
    assert torch.equal(spectra.apply(x, tensor(5.0)), x)
    assert all(torch.equal(d, x[:, 0]) for d in spectra.diagonals(5.0, x[:, 0]))
