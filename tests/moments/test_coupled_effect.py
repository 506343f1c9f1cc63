"""Coupled patches that share an effect: m_b ~ N(mu_b, Sigma_b + tau^2 11') cut by the label."""

import itertools

import numpy as np
import pytest
import torch
from oracles import slide_effect as independent
from oracles.coupled import exact, over_effect
from oracles.model import coupling_matrix, relative_error
from synthetic import slide_coords

from gpmil.coupling import operator as coupling
from gpmil.data import graphs
from gpmil.inference.leave_out import Bag, less_shared
from gpmil.moments import coupled_bags
from gpmil.moments.coupled import CoupledMoments, CoupledPatches, coupled_patches, cut_slope
from gpmil.moments.coupled_effect import AloneWithEffect, Shared
from gpmil.moments.likelihood import Group
from gpmil.moments.with_effect import PatchesWithEffect

STRENGTH = 0.8


def adjacency_of(sizes, seed=0):
    rng = np.random.default_rng(seed)
    coords = np.concatenate([slide_coords(rng, n, 1.0) for n in sizes])
    offsets = np.concatenate([[0], np.cumsum(sizes)])
    return graphs.adjacency_from_coords(coords, offsets, step=1.0), offsets


def moments_of(sizes, labels, tau, strength=STRENGTH):
    adjacency, offsets = adjacency_of(sizes)
    found = CoupledMoments(adjacency, offsets, np.array(labels, bool), strength, effect=tau)
    blocks = [adjacency[i:j, i:j].toarray() for i, j in itertools.pairwise(offsets)]
    return found, [coupling_matrix(block, strength) for block in blocks]


def expectations(moments, mu):
    E, log_z = moments.expectations(torch.from_numpy(mu))
    return E.numpy(), log_z


def columns(S, k=3, seed=6):
    """H, and W = S^-1 H as a fit has it."""
    H = np.random.default_rng(seed).normal(size=(len(S), k))
    return torch.from_numpy(np.linalg.solve(S, H)), torch.from_numpy(H)


# --- Against exact integrals and dense twins ------------------------------------------------------


@pytest.mark.parametrize("label", [0, 1])
@pytest.mark.parametrize("tau", [0.3, 2.0])
@pytest.mark.parametrize("shift", [-2.0, 0.4])
def test_up_to_three_patches_are_exact_integrals(shift, tau, label):
    rng = np.random.default_rng([label, int(10 * tau)])
    for n in (1, 2, 3):
        moments, (Sigma,) = moments_of([n], [label], tau)
        mu = rng.normal(size=n) + shift
        E, log_z = expectations(moments, mu)
        expected, value = exact(mu, Sigma + tau**2, label)
        # as near as EP is without an effect (test_coupled.py)
        assert np.abs(E - expected).max() < 0.01
        assert abs(log_z - value) < 0.01


@pytest.mark.parametrize("label", [0, 1])
@pytest.mark.parametrize(("tau", "shift"), [(0.4, -1.0), (1.5, -6.0), (1.5, 0.5)])
def test_a_dense_sum_over_the_effect_of_bags_without(label, tau, shift):
    n = 14
    moments, (Sigma,) = moments_of([n], [label], tau)
    mu = np.random.default_rng(2).normal(size=n) + shift
    E, log_z = expectations(moments, mu)
    W, H = columns(Sigma + tau**2)
    plain, _ = moments_of([n], [label], 0.0)
    below, _ = moments_of([n], [0], 0.0)
    expected = over_effect(mu, Sigma, label, tau, plain, below)
    assert log_z == pytest.approx(expected["log_z"], rel=1e-6, abs=1e-6)
    np.testing.assert_allclose(E, expected["mean"], atol=1e-5)
    slope = W.numpy().T @ expected["slope"] @ H.numpy()
    assert relative_error(moments.slope(W, H).numpy(), slope) < 1e-3


@pytest.mark.parametrize("label", [False, True])
@pytest.mark.parametrize("tau", [0.3, 1.8])
@pytest.mark.parametrize("shift", [-9.0, -1.5, 1.0])
def test_without_coupling_it_is_the_sum_over_independent_patches(shift, tau, label):
    """EP itself at work: an edge of vanishing weight keeps Sigma = I."""
    n = 11
    edges = graphs.adjacency_from_edges([np.array([[0, 1, 1e-14]])], np.array([0, n]))
    moments = CoupledMoments(edges, np.array([0, n]), np.array([label]), 1.0, effect=tau)
    assert type(moments.parts[0][1]) is Shared
    mu = np.random.default_rng(3).normal(size=n) + shift
    E, log_z = expectations(moments, mu)
    expected = independent.bag(mu, np.ones(n), label, tau)
    assert log_z == pytest.approx(expected["log_z"], rel=1e-6, abs=1e-6)
    np.testing.assert_allclose(E, expected["mean"], atol=2e-5)
    W, H = columns(np.eye(n) + tau**2)
    D = np.eye(n) + (np.eye(n) + tau**2) @ expected["hessian"]
    assert relative_error(moments.slope(W, H).numpy(), W.numpy().T @ D @ H.numpy()) < 1e-3


# --- Limits ---------------------------------------------------------------------------------------


def test_a_vanishing_effect_is_none():
    sizes, labels = [9, 1, 14, 6], [0, 1, 1, 0]
    mu = np.random.default_rng(4).normal(size=30) - 1.0
    (none, _), (tiny, _) = (moments_of(sizes, labels, tau) for tau in (0.0, 1e-5))
    kinds = {type(part) for _, part in none.parts}
    assert kinds == {
        coupled_bags.Alone,
        coupled_bags.Small,
    }  # as without effects
    assert {type(part) for _, part in tiny.parts} == {AloneWithEffect, Shared}
    (E, log_z), (F, other) = expectations(none, mu), expectations(tiny, mu)
    np.testing.assert_allclose(F, E, atol=1e-7)
    assert other == pytest.approx(log_z, abs=1e-7)


@pytest.mark.parametrize("label", [False, True])
@pytest.mark.parametrize("shift", [-9.0, -2.0, 0.4])
def test_sparse_equals_dense(label, shift, monkeypatch):
    n, tau = 45, 0.9
    mu = np.random.default_rng(5).normal(size=n) + shift
    dense, (Sigma,) = moments_of([n], [label], tau, 2.0)
    monkeypatch.setattr(coupling, "DENSE_LIMIT", 10)
    sparse, _ = moments_of([n], [label], tau, 2.0)
    assert type(dense.parts[0][1].below.part) is coupled_bags.Small
    assert type(sparse.parts[0][1].below.part) is coupled_bags.Large
    (E, log_z), (F, other) = expectations(dense, mu), expectations(sparse, mu)
    assert relative_error(F, E) < 1e-7 and other == pytest.approx(log_z, rel=1e-7)
    W, H = columns(Sigma + tau**2)
    assert relative_error(sparse.slope(W, H), dense.slope(W, H)) < 1e-6


# --- What the solvers rely on ---------------------------------------------------------------------


def test_moments_are_the_gradient_of_the_sum():
    sizes, labels, tau = [9, 1, 14, 6, 3], [0, 1, 1, 0, 1], 1.2
    moments, Sigma = moments_of(sizes, labels, tau)
    rng = np.random.default_rng(7)
    # the last bag is rare: 1 - Q is summed itself
    mu = rng.normal(size=33) - np.repeat([1.0, 1.0, 1.0, -0.5, 7.0], sizes)
    along = rng.normal(size=33)
    E, _ = expectations(moments, mu)
    cuts = np.cumsum(sizes)[:-1]
    slope = sum(
        d @ np.linalg.solve(S + tau**2, e - m)
        for S, e, m, d in zip(Sigma, *(np.split(x, cuts) for x in (E, mu, along)))
    )
    eps = 1e-4
    up, down = (expectations(moments, mu + s * eps * along)[1] for s in (1, -1))
    assert slope == pytest.approx((up - down) / (2 * eps), rel=1e-5)


def test_a_group_with_an_effect_never_loses_it():
    adjacency, offsets = adjacency_of([5, 4])
    edges = coupling.Edges.of(adjacency, "cpu")
    P = coupling.Precision.of(edges, slice(0, 9), STRENGTH)
    sigma = coupling.Coupling(adjacency, offsets, STRENGTH).diagonal().sqrt()
    bags = (sigma, torch.from_numpy(offsets), torch.tensor([False, True]))
    joined = coupled_patches(Group(*bags, P, slice(0, 9), STRENGTH, adjacency, 0.7))
    assert type(joined) is CoupledPatches and joined.moments_are_gradient
    assert all(type(part) is Shared for _, part in joined.moments.parts)
    assert joined.roughness > 0
    alone = coupled_patches(Group(*bags, None, slice(0, 9), effect=0.7))
    assert type(alone) is PatchesWithEffect
    mu = torch.from_numpy(np.random.default_rng(0).normal(size=9))
    gamma, log_z = joined.gradient(mu)
    E, again = joined.expectations(mu)
    S = torch.block_diag(*(torch.linalg.inv(coupling_block(adjacency, i, j)) + 0.49
                           for i, j in itertools.pairwise(offsets)))  # fmt: skip
    np.testing.assert_allclose(mu + S @ gamma, E, atol=1e-10)
    assert log_z == pytest.approx(again)


def coupling_block(adjacency, i, j):
    return torch.from_numpy(np.linalg.inv(coupling_matrix(adjacency[i:j, i:j].toarray(), STRENGTH)))


@pytest.mark.parametrize("shift", [-7.0, -1.0, 0.5])
def test_cut_slope_is_what_inference_uses(shift):
    sizes, labels, tau = [7, 12, 5], [True, False, True], 1.1
    moments, Sigma = moments_of(sizes, labels, tau)
    mask = torch.arange(12) < torch.tensor(sizes)[:, None]
    mu = torch.zeros(3, 12, dtype=torch.float64)
    mu[mask] = torch.from_numpy(np.random.default_rng(8).normal(size=24) + shift)
    sigma = torch.eye(12, dtype=torch.float64).repeat(3, 1, 1)
    for b, S in enumerate(Sigma):
        sigma[b, : len(S), : len(S)] = torch.from_numpy(S)
    plain = torch.from_numpy(np.random.default_rng(0).normal(size=(3, 12, 4))) * mask[..., None]
    bag = Bag(mask, torch.tensor(labels), less_shared(plain, mask, tau), sigma @ plain, sigma,
              sigma, tau)  # fmt: skip
    assert relative_error(bag.given_f @ bag.W, bag.H) < 1e-7
    E, _ = moments.expectations(mu[mask])
    F, DH = cut_slope(mu, sigma, bag.positive, mask, bag.W, tau)
    assert relative_error(F[mask], E) < 1e-7
    expected = moments.slope(bag.W[mask], bag.H[mask])
    assert relative_error((bag.W.mT @ DH).sum(0), expected) < 1e-6


def test_kept_sites_change_nothing():
    moments, _ = moments_of([12, 9], [True, False], 1.4)
    mu = np.random.default_rng(7).normal(size=21)
    first = expectations(moments, mu)
    expectations(moments, mu * 3 - 6)
    again = expectations(moments, mu)
    assert relative_error(again[0], first[0]) < 1e-8
    assert again[1] == pytest.approx(first[1], rel=1e-8)
