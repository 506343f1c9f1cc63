"""Sigma at many values of lambda: the same operator as at one, and its derivatives."""

import numpy as np
import pytest
import scipy.sparse as sp
import torch
from oracles.model import coupling_matrix, relative_error
from oracles.tuning import difference
from synthetic import dense_graphs, small_cohort

from gpmil import Bags
from gpmil.coupling.operator import Coupling
from gpmil.coupling.strengths import Smoothing

STRENGTH = 0.7


@pytest.fixture(scope="module")
def bags():
    return small_cohort(3, 9, sizes=(1, 8))


@pytest.fixture(scope="module")
def smoothing(bags):
    return Smoothing(bags.adjacency, bags.offsets)


def tensor(x):
    return torch.tensor(x, dtype=torch.float64)


@pytest.mark.parametrize("strength", [0.0, 0.04, 1.3, 60.0])
def test_the_operator_is_that_of_one_strength(bags, smoothing, strength):
    x = torch.randn(bags.n_instances, 9, dtype=torch.float64)
    expected = Coupling(bags.adjacency, bags.offsets, strength)
    for given in (strength, tensor(strength)):
        found = smoothing.at(given)
        assert relative_error(found.apply(x, given), expected.apply(x)) < 1e-12
        assert relative_error(found.diagonals(x[:, 0], given)[0], expected.diagonal()) < 1e-12


def test_the_variance_that_smoothing_leaves(bags, smoothing):
    r = torch.rand(bags.n_instances, dtype=torch.float64)
    _, found = smoothing.at(STRENGTH).diagonals(r, STRENGTH)
    dense = [coupling_matrix(graph, STRENGTH) for graph in dense_graphs(bags)]
    parts = zip(dense, bags.split(r.numpy()), strict=True)
    expected = np.concatenate([np.diag(S @ np.diag(own) @ S) for S, own in parts])
    assert relative_error(found, torch.from_numpy(expected)) < 1e-12


def test_derivatives_in_the_strength_and_in_what_is_smoothed(bags, smoothing):
    x, y = (torch.randn(bags.n_instances, 2, dtype=torch.float64) for _ in range(2))
    r = torch.rand(bags.n_instances, dtype=torch.float64)

    def summed(strength, x, r):
        sigma = smoothing.at(strength)
        noise, spread = sigma.diagonals(r, strength)
        smooth = sigma.apply(x, strength)
        return (smooth.square() * y).sum() + (noise * y[:, 0] + spread.square() * y[:, 1]).sum()

    leaves = [a.requires_grad_() for a in (tensor(STRENGTH), x.clone(), r.clone())]
    summed(*leaves).backward()
    moves = [tensor(1.0), torch.randn_like(x), torch.randn_like(r)]
    for k, (leaf, move) in enumerate(zip(leaves, moves, strict=True)):

        def along(step, k=k, move=move):
            points = [tensor(STRENGTH), x, r]
            points[k] = points[k] + step * move
            return float(summed(*points))

        expected = float(difference(along, 0.0, 0.02))
        assert float((leaf.grad * move).sum()) == pytest.approx(expected, rel=1e-7)


def test_bags_without_edges_are_left_alone(bags):
    bare = Bags.from_arrays(bags.split(bags.features), labels=bags.labels)
    found = Smoothing(bare.adjacency, bare.offsets).at(tensor(5.0))
    x = torch.rand(bare.n_instances, 1).double()
    assert torch.equal(found.apply(x, tensor(5.0)), x)
    noise, spread = found.diagonals(x[:, 0], 5.0)
    assert torch.equal(noise, torch.ones_like(noise)) and torch.equal(spread, x[:, 0])


def test_some_bags_coupled_and_others_not(bags):
    graph = bags.adjacency.tolil()
    for b in (0, 4):
        graph[bags.offsets[b] : bags.offsets[b + 1]] = 0
        graph[:, bags.offsets[b] : bags.offsets[b + 1]] = 0
    graph = sp.csr_array(graph)
    graph.eliminate_zeros()
    x = torch.randn(bags.n_instances, 3, dtype=torch.float64)
    found = Smoothing(graph, bags.offsets).at(STRENGTH).apply(x, STRENGTH)
    expected = Coupling(graph, bags.offsets, STRENGTH).apply(x)
    assert relative_error(found, expected) < 1e-12
