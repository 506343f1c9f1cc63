"""Coupled patches of bags in which some labels are known, against exact integrals, and limits."""

import itertools

import numpy as np
import pytest
import torch
from oracles import taught as oracle
from oracles.model import coupling_matrix, relative_error
from synthetic import slide_coords

from gpmil.coupling import operator as coupling
from gpmil.data import graphs
from gpmil.moments import coupled_taught
from gpmil.moments.coupled import CoupledMoments, cut_slope
from gpmil.moments.coupled_effect import Shared
from gpmil.moments.coupled_taught import Told
from gpmil.moments.likelihood import Group
from gpmil.moments.taught import TaughtPatches

STRENGTH = 0.8
NEGATIVE = {2: 0, 5: 0}  # labels of patches of a bag of 12: still to be explained
BOTH = {1: 0, 4: 1, 7: 0, 10: 1}


def adjacency_of(sizes, seed=0):
    rng = np.random.default_rng(seed)
    coords = np.concatenate([slide_coords(rng, n, 1.0) for n in sizes])
    offsets = np.concatenate([[0], np.cumsum(sizes)])
    return graphs.adjacency_from_coords(coords, offsets, step=1.0), offsets


def moments_of(sizes, known, tau, labels=None):
    """Positive bags with these labels of patches, and Sigma of each."""
    adjacency, offsets = adjacency_of(sizes)
    labels = np.ones(len(sizes), bool) if labels is None else np.array(labels, bool)
    told = None if known is None else torch.tensor(known)
    found = CoupledMoments(adjacency, offsets, labels, STRENGTH, effect=tau, known=told)
    blocks = [adjacency[i:j, i:j].toarray() for i, j in itertools.pairwise(offsets)]
    return found, [coupling_matrix(block, STRENGTH) for block in blocks]


def labels_of(n, told):
    return [told.get(i, -1) for i in range(n)]


def expectations(moments, mu):
    E, log_z = moments.expectations(torch.from_numpy(mu))
    return E.numpy(), log_z


def columns(S, k=3, seed=6):
    """H, and W = S^-1 H as a fit has it."""
    H = np.random.default_rng(seed).normal(size=(len(S), k))
    return torch.from_numpy(np.linalg.solve(S, H)), torch.from_numpy(H)


# --- Against exact integrals ----------------------------------------------------------------------


@pytest.mark.parametrize(
    "known", [(0, -1), (1, 0), (-1, 0, -1), (0, -1, 1), (1, 1, 0), (-1, 1, -1)]
)
@pytest.mark.parametrize(("tau", "shift"), [(0.0, -0.4), (1.3, 0.6), (0.7, -2.1)])
def test_up_to_three_patches_are_exact_integrals(known, tau, shift):
    n = len(known)
    moments, (Sigma,) = moments_of([n], list(known), tau)
    assert isinstance(moments.parts[0][1], Shared if tau else Told)
    mu = np.random.default_rng(n).normal(size=n) + shift
    E, log_z = expectations(moments, mu)
    # as near as EP is where no label is known (test_coupled.py); a difference of two EPs less so
    bar = 0.02 if 1 in known else 0.07
    assert abs(log_z - oracle.coupled_log_z(mu, Sigma + tau**2, known)) < bar
    assert np.abs(E - oracle.coupled_mean(mu, Sigma + tau**2, known)).max() < bar


@pytest.mark.parametrize("told", [NEGATIVE, BOTH])
@pytest.mark.parametrize(("tau", "shift"), [(0.0, -1.2), (0.9, -3.0)])
def test_moments_are_the_gradient_and_slopes_their_own(told, tau, shift, monkeypatch):
    """E - mu = S gamma, W'(dE/dmu) H by differences; the same on the sparse P of a large bag."""
    n = 8
    moments, (Sigma,) = moments_of([n], labels_of(n, told), tau)
    mu = np.random.default_rng(5).normal(size=n) + shift
    E, log_z = expectations(moments, mu)
    S = Sigma + tau**2
    W, H = columns(S)
    found = moments.slope(W, H).numpy()
    # along one column of H: both at once
    along = H.numpy()[:, 0] / np.linalg.norm(H[:, 0])
    moved = [expectations(moments, mu + t * along) for t in (0.03, -0.03, 0.06, -0.06)]
    E_slope, z_slope = ((8 * (a - b) - (c - d)) / 0.36 for a, b, c, d in zip(*moved))
    assert z_slope == pytest.approx(along @ np.linalg.solve(S, E - mu), rel=2e-4)
    expected = W.numpy().T @ E_slope * np.linalg.norm(H[:, 0])
    assert relative_error(found[:, 0], expected) < 8e-3  # sites held still, as in test_coupled.py
    monkeypatch.setattr(coupling, "DENSE_LIMIT", 5)
    sparse, _ = moments_of([n], labels_of(n, told), tau)
    F, other = expectations(sparse, mu)
    assert relative_error(F, E) < 1e-6 and other == pytest.approx(log_z, abs=1e-6)
    assert relative_error(sparse.slope(W, H).numpy(), found) < 1e-5


@pytest.mark.parametrize("tau", [0.0, 1.1])
def test_leave_one_out_has_the_slope_of_inference(tau):
    """Bags of all kinds, padded: as CoupledMoments has them one after the other."""
    sizes, labels = (12, 7, 9, 5), (True, True, True, False)
    known = [*labels_of(12, NEGATIVE), *[-1] * 7, *labels_of(9, BOTH), 0, -1, 0, -1, -1]
    moments, Sigmas = moments_of(sizes, known, tau, labels)
    n, p = sum(sizes), max(sizes)
    mask = torch.arange(p) < torch.tensor(sizes)[:, None]
    mu = torch.from_numpy(np.random.default_rng(8).normal(size=n) - 1.5)
    sigma = torch.eye(p).double().repeat(4, 1, 1)
    for b, S in enumerate(Sigmas):
        sigma[b, : len(S), : len(S)] = torch.from_numpy(S)
    padded = torch.zeros(4, p).double().masked_scatter(mask, mu)
    told = torch.full((4, p), -1).masked_scatter(mask, torch.tensor(known))
    X = torch.from_numpy(np.random.default_rng(9).normal(size=(4, p, 3))) * mask[..., None]
    E, DSX = cut_slope(padded, sigma, torch.tensor(labels), mask, X, tau, told)
    expected, _ = moments.expectations(mu)
    np.testing.assert_allclose(E[mask], expected, atol=1e-7)
    H = sigma @ X + tau**2 * mask[..., None] * X.sum(1, keepdim=True)  # S X
    slope = moments.slope(X[mask], H[mask])
    assert relative_error((X.mT @ DSX).sum(0), slope) < 1e-6


# --- Limits ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("told", [NEGATIVE, BOTH])
@pytest.mark.parametrize(("tau", "shift"), [(0.0, -1.0), (1.4, -2.0), (0.6, -7.0)])
def test_without_coupling_patches_are_independent(told, tau, shift):
    """EP itself at work: an edge of vanishing weight keeps Sigma = I."""
    n = 12
    offsets, known = np.array([0, n]), torch.tensor(labels_of(n, told))
    edges = graphs.adjacency_from_edges([np.array([[0, 1, 1e-14]])], offsets)
    moments = CoupledMoments(edges, offsets, np.array([True]), 1.0, effect=tau, known=known)
    one = torch.ones(n, dtype=torch.float64)
    positive = torch.ones(1, dtype=torch.bool)
    group = Group(
        one, torch.from_numpy(offsets), positive, None, slice(0, n), 0.0, None, tau, known
    )
    twin = TaughtPatches(group)
    mu = np.random.default_rng(3).normal(size=n) + shift
    E, log_z = expectations(moments, mu)
    expected, value, D = twin.jacobian(torch.from_numpy(mu))
    assert log_z == pytest.approx(float(value), abs=1e-5)
    np.testing.assert_allclose(E, expected, atol=3e-5)
    W, H = columns(np.eye(n) + tau**2)
    assert relative_error(moments.slope(W, H), D(W, H)) < 2e-3


def test_labels_that_tell_nothing_change_nothing():
    """None known, or those of a negative bag; and a bag of one patch with its own."""
    sizes, labels = (9, 6, 1), (True, False, True)
    mu = np.random.default_rng(2).normal(size=16) - 0.8
    known = [*[-1] * 9, 0, -1, -1, 0, 0, -1, -1]
    plain, silent, lone = (
        moments_of(sizes, k, 0.9, labels)[0] for k in (None, known, [*known[:-1], 1])
    )
    E, log_z = expectations(plain, mu)
    F, other = expectations(silent, mu)
    np.testing.assert_array_equal(F, E)
    assert other == log_z
    F, other = expectations(lone, mu)
    np.testing.assert_allclose(F, E, atol=1e-6)
    assert other == pytest.approx(log_z, abs=1e-6)


def test_both_forms_of_a_bag_to_be_explained_meet(monkeypatch):
    n = 12
    mu = np.random.default_rng(7).normal(size=n) * 0.5 - 4.2
    found = []
    for limit in (-1e-12, -1e9):
        monkeypatch.setattr(coupled_taught, "NEARLY", limit)
        moments, (Sigma,) = moments_of([n], labels_of(n, NEGATIVE), 0.0)
        E, log_z = expectations(moments, mu)
        found.append((E - mu, log_z, moments.slope(*columns(Sigma)).numpy()))
    (near, log_z, slope), (few, other, bent) = found
    assert -14 < log_z < -4 and other == pytest.approx(log_z, abs=1e-2)
    assert relative_error(few, near) < 0.02 and relative_error(bent, slope) < 0.05


@pytest.mark.parametrize("told", [NEGATIVE, BOTH])
@pytest.mark.parametrize("shift", [-30.0, 15.0])
def test_far_tails_are_numbers(told, shift):
    n = 12
    for tau in (0.0, 1.0):
        moments, (Sigma,) = moments_of([n], labels_of(n, told), tau)
        E, log_z = expectations(moments, np.random.default_rng(1).normal(size=n) + shift)
        assert np.isfinite(E).all() and np.isfinite(log_z) and log_z <= 0
        assert torch.isfinite(moments.slope(*columns(Sigma + tau**2))).all()
