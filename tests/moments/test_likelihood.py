"""Bag likelihoods, over the table: their derivatives, and what they leave out."""

import itertools

import numpy as np
import pytest
import torch
from synthetic import pri, small_cohort, some_inducing

from gpmil.coupling import operator as coupling
from gpmil.inference.pieces import LIKELIHOODS
from gpmil.moments import likelihood
from gpmil.moments.independent import IndependentPatches
from gpmil.moments.likelihood import Group, Likelihood, LowRank

STRENGTH = 0.8
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def group():
    """Bags with edges and labels of both kinds, not at the beginning of their cohort."""
    bags = small_cohort(seed=3, n_bags=7, sizes=(2, 6))
    rows = slice(int(bags.offsets[2]), int(bags.offsets[7]))
    graph = bags.adjacency
    edges = coupling.Edges.of(graph, CPU)
    return Group(
        coupling.Coupling(graph, bags.offsets, STRENGTH).diagonal().sqrt()[rows],
        torch.from_numpy(bags.offsets[2:8] - bags.offsets[2]),
        torch.tensor([True, False, True, False, True]),
        coupling.Precision.of(edges, rows, STRENGTH),
        rows,
        STRENGTH,
        graph,
    )


@pytest.fixture
def mu(group):
    return torch.from_numpy(np.random.default_rng(1).normal(-0.4, 1.1, len(group.sigma)))


def differences(f, mu, step=1e-4):
    """The derivatives of f, one row per coordinate of mu."""
    steps = step * torch.eye(len(mu), dtype=mu.dtype)
    found = [torch.as_tensor(f(mu + e) - f(mu - e), dtype=mu.dtype) for e in steps]
    return torch.stack(found) / (2 * step)


def second(likelihood):
    """How far second derivatives may be off: those of EP take its sites as they are."""
    return 0.05 if likelihood.moments_are_gradient else 1e-6


@pytest.mark.parametrize("name", LIKELIHOODS)
def test_derivatives_by_finite_differences(name, group, mu):
    likelihood = LIKELIHOODS[name](group)
    gamma, _, A = likelihood.curvature(mu)
    eye = torch.eye(len(mu), dtype=mu.dtype)
    curvature = A(eye, eye)  # before another mu moves what an EP keeps
    assert torch.allclose(gamma, differences(lambda x: likelihood.gradient(x)[1], mu), atol=1e-6)
    bend = -differences(lambda x: likelihood.gradient(x)[0], mu)
    assert torch.allclose(curvature, bend, atol=second(likelihood))


@pytest.mark.parametrize("name", LIKELIHOODS)
def test_the_slope_of_the_mean_by_finite_differences(name, group, mu):
    likelihood = LIKELIHOODS[name](group)
    E, _, D = likelihood.jacobian(mu)
    # W'D H with W = P H, as the fixed point has it; W = P is its own H = I
    eye = torch.eye(len(mu), dtype=mu.dtype)
    W = group.unsmooth(eye)
    found = D(W, eye)
    assert torch.allclose(E, likelihood.expectations(mu)[0], atol=1e-7)
    slope = differences(lambda x: likelihood.expectations(x)[0], mu)
    assert torch.allclose(found, W.mT @ slope.mT, atol=second(likelihood))


@pytest.mark.parametrize("name", LIKELIHOODS)
def test_moments_that_are_the_gradient(name, group, mu):
    likelihood = LIKELIHOODS[name](group)
    E, gamma = likelihood.expectations(mu)[0], likelihood.gradient(mu)[0]
    same = torch.allclose(group.unsmooth(E - mu), gamma, atol=1e-7)
    assert same == likelihood.moments_are_gradient


def test_low_rank_is_the_dense_matrix():
    rng = torch.Generator().manual_seed(0)
    W, H, left, right = (
        torch.randn(7, k, dtype=torch.float64, generator=rng) for k in (4, 4, 3, 3)
    )
    diagonal = torch.linspace(-1, 2, 7, dtype=torch.float64)
    offsets = torch.tensor([0, 3, 4, 7])
    X = diagonal.diag() + left @ right.mT * (
        torch.block_diag(*(torch.ones(n, n) for n in offsets.diff().tolist()))
    )
    assert torch.allclose(LowRank(diagonal, left, right, offsets)(W, H), W.mT @ X @ H)
    same = LowRank(diagonal, left, left, offsets)
    assert torch.allclose(same(H, H), same(H, H.clone()))
    signs = torch.tensor([[1.0, -1, 2], [0.5, 1, -1], [1, -3, 1]]).double()
    signed = left * signs.repeat_interleave(offsets.diff(), 0)
    plain, quick = (LowRank(diagonal, signed, left, offsets, x) for x in (None, signs))
    assert torch.allclose(plain(H, H), quick(H, H))
    assert torch.equal(plain(W, H), quick(W, H))


class WithoutMoments(Likelihood):
    """Independent patches, of which no more is known than the direct solver needs."""

    def __init__(self, group):
        self.group, self.whole = group, IndependentPatches(group)

    def curvature(self, mu):
        return self.whole.curvature(mu)


def test_a_likelihood_needs_no_more_than_its_curvature(monkeypatch):
    bags = small_cohort(seed=4, n_bags=12, sizes=(1, 12))
    given = {"coupling": 1.3, "variance": 3.0, "inducing": some_inducing(bags, 7)}
    expected = pri(**given).fit(bags).posterior_mean_
    monkeypatch.setitem(LIKELIHOODS, "bare", WithoutMoments)
    found = pri(**given, moments="bare").fit(bags)
    assert np.allclose(found.posterior_mean_, expected, rtol=1e-9)
    for solver in ("sweeps", "newton"):
        with pytest.raises(ValueError, match=r"WithoutMoments has no truncated moments.*'direct'"):
            pri(**given, moments="bare", solver=solver).fit(bags)
    with pytest.raises(ValueError, match="cannot be left out of a fit with WithoutMoments"):
        found.leave_one_bag_out(bags)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_products_of_bags_by_a_sparse_matrix_or_one_by_one(dtype, monkeypatch):
    rng = np.random.default_rng(3)
    offsets = torch.tensor([0, 4, 5, 11])
    diagonal, x = torch.from_numpy(rng.normal(size=11)), torch.from_numpy(rng.normal(size=(11, 2)))
    H = torch.from_numpy(rng.normal(size=(11, 3))).to(dtype)
    signs = torch.tensor([[1.0, -1], [1, 1], [-1, 1]]).double()
    left = signs.repeat_interleave(offsets.diff(), 0) * x
    dense = torch.diag(diagonal)
    for a, b in itertools.pairwise(offsets.tolist()):
        dense[a:b, a:b] += left[a:b] @ x[a:b].mT
    expected = H.double().mT @ dense @ H.double()
    for many in (1, 100):
        monkeypatch.setattr(likelihood, "MANY", many)
        found = likelihood.LowRank(diagonal, left, x, offsets, signs)(H, H)
        tolerance = 1e-12 if dtype == torch.float64 else 1e-4
        torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)
