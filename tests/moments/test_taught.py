"""Known patch labels in the likelihood, against dense quadrature, and their limits."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles import taught as oracle
from scipy.linalg import block_diag
from scipy.special import log_ndtr

from gpmil.moments import with_effect
from gpmil.moments.likelihood import Group
from gpmil.moments.taught import TaughtPatches, patches

# free bag, all kinds of known labels, a bag that is still to be explained, a negative one
SIZES = (3, 5, 4, 3, 1)
POSITIVE = (True, True, True, False, True)
KNOWN = (-1, -1, -1, 1, -1, 0, -1, 1, 0, -1, -1, 0, -1, 0, -1, 1)


def some_bags(tau, known=KNOWN, shift=-0.7, seed=2):
    rng = np.random.default_rng(seed)
    n = sum(SIZES)
    group = Group(
        torch.from_numpy(rng.uniform(0.5, 1, n)),
        torch.from_numpy(np.concatenate([[0], np.cumsum(SIZES)])),
        torch.tensor(POSITIVE),
        None,
        slice(0, n),
        effect=tau,
        known=None if known is None else torch.tensor(known),
    )
    return group, torch.from_numpy(rng.normal(shift, 1.2, n))


def by_bag(group, mu, known=KNOWN):
    """What the oracle takes, bag by bag."""
    cuts = np.cumsum(SIZES)[:-1]
    parts = (np.split(np.asarray(x), cuts) for x in (mu, group.sigma, known))
    return [(m, s, int(y), k.tolist()) for m, s, k, y in zip(*parts, POSITIVE)]


def by_differences(group, mu, tau):
    """log Z, gamma and minus its derivative of all bags, from the oracle."""
    expected = [
        (oracle.log_z(*b, tau), oracle.gamma(*b, tau), oracle.hessian(*b, tau))
        for b in by_bag(group, mu)
    ]
    log_z, gamma, hessian = zip(*expected)
    return sum(log_z), np.concatenate(gamma), -block_diag(*hessian)


@pytest.mark.parametrize(
    ("tau", "shift", "second"),
    [(0.0, -0.7, 1e-6), (0.4, -3.5, 2e-4), (1.1, -0.7, 3e-4), (4.0, -0.7, 5e-3)],
)
def test_every_number_equals_dense_quadrature(tau, shift, second):
    group, mu = some_bags(tau, shift=shift)
    likelihood = patches(group)
    assert isinstance(likelihood, TaughtPatches)
    gamma, log_z, A = likelihood.curvature(mu)
    expected = by_differences(group, mu, tau)
    assert abs(float(log_z) - expected[0]) < 1e-5
    np.testing.assert_allclose(gamma, expected[1], atol=2e-5)
    eye = torch.eye(len(mu), dtype=mu.dtype)
    np.testing.assert_allclose(A(eye, eye), expected[2], atol=second)
    # the same as one matrix, which leave_out.py takes
    inside = block_diag(*(np.ones((n, n)) for n in SIZES))
    joined = torch.diag(A.diagonal) + A.left @ A.right.mT * torch.from_numpy(inside)
    np.testing.assert_allclose(joined, A(eye, eye), atol=1e-12)
    alone, log_z_alone = likelihood.gradient(mu)
    np.testing.assert_allclose(alone, gamma, atol=1e-6)
    assert abs(float(log_z_alone - log_z)) < 1e-6


@pytest.mark.parametrize("tau", [0.0, 0.9])
def test_moments_and_their_slopes(tau):
    group, mu = some_bags(tau)
    likelihood = patches(group)
    E, log_z, D = likelihood.jacobian(mu)
    again, log_z_again = likelihood.expectations(mu)
    gamma = torch.from_numpy(by_differences(group, mu, tau)[1])
    # E = mu + (diag(sigma^2) + tau^2 11') gamma
    shared = torch.zeros(len(SIZES), dtype=mu.dtype).index_add(0, group.row, gamma)
    expected = mu + group.sigma**2 * gamma + tau**2 * shared[group.row]
    np.testing.assert_allclose(E, expected, atol=1e-4)
    np.testing.assert_allclose(E, again, atol=1e-6)
    assert abs(float(log_z - log_z_again)) < 1e-6
    eye = torch.eye(len(mu), dtype=mu.dtype)
    slope = oracle.differences(
        lambda x: likelihood.expectations(torch.from_numpy(x))[0].numpy(), mu.numpy(), 3e-2
    )
    np.testing.assert_allclose(D(eye, eye), slope.T, atol=3e-3)


@pytest.mark.parametrize("shift", [-1.0, -9.0, -30.0, 12.0])
@pytest.mark.parametrize("tau", [0.0, 0.02, 1.0, 6.0])
def test_both_tails(shift, tau):
    """A bag that nothing explains, and one that everything does: numbers, and the right ones."""
    known = torch.tensor(KNOWN)
    group, mu = some_bags(tau, shift=shift)
    gamma, log_z, A = patches(group).curvature(mu)
    assert torch.isfinite(gamma).all() and torch.isfinite(A.diagonal).all()
    assert bool((gamma[known == 1] >= 0).all() and (gamma[known == 0] <= 0).all())
    assert float(log_z) <= 0
    step = 1e-4 * torch.sin(torch.arange(len(mu), dtype=mu.dtype))
    up, down = (float(patches(group).gradient(mu + e)[1]) for e in (step, -step))
    assert abs((up - down) / 2 - float(gamma @ step)) < 1e-6 * (1 + abs(float(gamma @ step)) * 1e4)


def test_without_labels_that_tell_something_it_is_todays_likelihood():
    redundant = [0 if k == 0 and 12 <= i < 15 else -1 for i, k in enumerate(KNOWN)]  # negative bag
    for known in (None, [-1] * len(KNOWN), redundant):
        group, mu = some_bags(0.8, known)
        found, plain = patches(group), with_effect.patches(group)
        assert type(found) is type(plain)
        assert torch.equal(found.gradient(mu)[0], plain.gradient(mu)[0])


@pytest.mark.parametrize("tau", [0.0, 0.8])
def test_the_label_of_a_lone_patch_is_that_of_its_bag(tau):
    told, mu = some_bags(tau, [-1] * 15 + [1])
    silent, _ = some_bags(tau, None)
    (g, a, A), (h, b, B) = patches(told).curvature(mu), patches(silent).curvature(mu)
    np.testing.assert_allclose(g, h, atol=1e-6)
    assert abs(float(a - b)) < 1e-6
    eye = torch.eye(len(mu), dtype=mu.dtype)
    np.testing.assert_allclose(A(eye, eye), B(eye, eye), atol=1e-4)


def test_all_patches_known_are_probit_terms():
    known = np.array(KNOWN)
    known[:8] = [1, 0, 1, 0, 0, 1, 0, 0]
    known[8:12], known[15] = [1, 1, 0, 0], 1
    group, mu = some_bags(0.0, known.tolist())
    log_z = float(patches(group).gradient(mu)[1])
    side = np.where(known == 1, 1, -1)
    expected = log_ndtr(side * mu.numpy() / group.sigma.numpy()).sum()
    np.testing.assert_allclose(log_z, expected, rtol=1e-12)


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 10_000), st.sampled_from([0.0, 0.3, 1.5]))
def test_one_more_label_never_makes_the_known_more_likely(seed, tau):
    """P(A and B) <= P(A), and the chances of a patch's two labels add up."""
    rng = np.random.default_rng(seed)
    known = np.where(rng.random(16) < 0.4, rng.integers(0, 2, 16), -1)
    known[12:15] = -1
    known[[0, 3, 8]] = -1  # something is left that may be positive
    known[15] = 1
    free = int(rng.choice(np.flatnonzero(known[:12] < 0)))
    group, mu = some_bags(tau, known.tolist(), seed=seed)
    both = []
    for label in (0, 1):
        told = known.copy()
        told[free] = label
        own = slice(*{0: (0, 3), 1: (3, 8), 2: (8, 12)}[int(group.row[free])])
        if label == 0 and (told[own] == 0).all():
            both.append(-np.inf)
            continue
        both.append(float(patches(replace(group, known=torch.tensor(told))).gradient(mu)[1]))
    before = float(patches(group).gradient(mu)[1])
    assert np.logaddexp(*both) == pytest.approx(before, abs=1e-5)
