"""log P(label) by one factor: exact where there is one, near where there are more."""

import numpy as np
import pytest
import torch
from oracles.tuning import difference
from oracles.tuning import one_factor as oracle
from scipy.special import log_ndtr

from gpmil.moments import one_factor
from gpmil.moments.ep import ep

OFFSETS = torch.tensor([0, 4, 5, 11])
LABELS = torch.tensor([True, False, True])
RNG = np.random.default_rng(7)
MU = torch.from_numpy(RNG.normal(-1.1, 0.8, 11))
VARIANCE = torch.from_numpy(RNG.uniform(0.7, 3.0, 11))
U = torch.from_numpy(RNG.uniform(0.2, 0.9, 11)) * VARIANCE.sqrt()
ROW = torch.tensor([0] * 4 + [1] + [2] * 6)


def bag(b):
    return slice(int(OFFSETS[b]), int(OFFSETS[b + 1]))


def test_a_bag_with_one_factor_is_exact():
    found = one_factor.log_labels(MU, VARIANCE, U, OFFSETS, LABELS)
    for b, positive in enumerate(LABELS.tolist()):
        mu, v, u = (x[bag(b)].numpy() for x in (MU, VARIANCE, U))
        z = np.linspace(-12, 12, 4001)
        log_q = log_ndtr(-(mu + u * z[:, None]) / np.sqrt(v - u**2)).sum(1)
        q = (np.exp(log_q - z**2 / 2) / np.sqrt(2 * np.pi)).sum() * (z[1] - z[0])
        assert float(found[b]) == pytest.approx(np.log1p(-q) if positive else np.log(q), abs=1e-6)


def test_loadings_are_those_of_the_factor_where_there_is_one():
    g = one_factor.weights(MU, VARIANCE)
    for b in range(3):
        own = slice(None), bag(b)
        shared = torch.outer(U[own[1]], U[own[1]]) @ g[own[1]]
        row = torch.zeros(len(shared), dtype=torch.long)
        found = one_factor.loadings(shared, g[own[1]], VARIANCE[own[1]], row, 1)
        assert torch.allclose(found, U[own[1]], rtol=1e-10)


def test_the_naive_twin_and_expectation_propagation():
    """A smooth covariance with several factors: the twin exactly, EP nearly."""
    x = np.linspace(0, 3, 9)
    shared = 1.7 * np.exp(-((x[:, None] - x) ** 2) / 8)
    variance = np.diag(shared) + 0.9
    mu = -1.5 + np.sin(2 * x)
    g = one_factor.weights(*map(torch.from_numpy, (mu, variance)))
    u = one_factor.loadings(
        torch.from_numpy(shared) @ g, g, torch.from_numpy(variance), torch.zeros(9).long(), 1
    )
    bags = (torch.tensor([0, 9]), torch.tensor([False]))
    found = float(one_factor.log_labels(*map(torch.from_numpy, (mu, variance)), u, *bags)[0])
    assert found == pytest.approx(oracle(mu, shared, variance), abs=1e-5)
    S = torch.from_numpy(shared + 0.9 * np.eye(9))
    assert found == pytest.approx(float(ep(torch.from_numpy(mu)[None], S[None]).log_p[0]), abs=0.03)


def test_derivatives():
    leaves = [x.clone().requires_grad_() for x in (MU, VARIANCE, U)]
    one_factor.log_labels(*leaves, OFFSETS, LABELS).sum().backward()
    for k, leaf in enumerate(leaves):
        for i in (1, 4, 7):

            def moved(x, k=k, i=i):
                point = [y.clone() for y in (MU, VARIANCE, U)]
                point[k][i] = x
                return float(one_factor.log_labels(*point, OFFSETS, LABELS).sum())

            expected = difference(moved, float((MU, VARIANCE, U)[k][i]), 0.01)
            assert float(leaf.grad[i]) == pytest.approx(float(expected), rel=1e-4, abs=1e-6)


def test_known_labels_of_patches():
    """A known positive patch explains its bag: the others are free."""
    known = torch.full((11,), -1)
    known[1], known[6] = 1, 0
    found = one_factor.log_labels(MU, VARIANCE, U, OFFSETS, LABELS, known)
    alone = log_ndtr(float(MU[1] / VARIANCE[1].sqrt()))
    assert float(found[0]) == pytest.approx(alone, abs=1e-6)
    plain = one_factor.log_labels(MU, VARIANCE, U, OFFSETS, LABELS)
    assert float(found[1]) == pytest.approx(float(plain[1]), abs=1e-12)
    assert float(found[2]) < float(plain[2])  # one patch fewer may explain it


def test_one_patch_per_bag_knows_no_factor():
    offsets, labels = torch.arange(12), torch.arange(11) % 2 == 0
    found = one_factor.log_labels(MU, VARIANCE, U, offsets, labels)
    t = (MU * VARIANCE.rsqrt()).numpy()
    np.testing.assert_allclose(found, log_ndtr(np.where(labels, t, -t)), atol=1e-6)
    assert one_factor.loadings(0 * MU, one_factor.weights(MU, VARIANCE), VARIANCE, ROW, 3).min() > 0
