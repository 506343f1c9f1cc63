"""Graded bags against dense quadrature, a closed form in the tails, and their limits."""

import numpy as np
import pytest
import torch
from oracles import grades as oracle
from scipy.linalg import block_diag
from scipy.special import log_ndtr

from gpmil.moments import taught, with_effect
from gpmil.moments.given_effect import Patches
from gpmil.moments.grades import Between, GradedPatches, by_difference, graded
from gpmil.moments.likelihood import Group

SIZES, GRADES = (3, 5, 4, 1, 3), (2, 0, 1, 3, 1)
CUTS = (0.0, 0.9, 2.3)


def some_bags(tau, sizes=SIZES, grades=GRADES, seed=2):
    rng, n = np.random.default_rng(seed), sum(sizes)
    group = Group(
        torch.from_numpy(rng.uniform(0.5, 1, n)),
        torch.from_numpy(np.concatenate([[0], np.cumsum(sizes)])),
        torch.tensor(grades) > 0,
        None,
        slice(0, n),
        effect=tau,
    )
    return group, torch.from_numpy(rng.normal(0, 1.2, n))


def by_differences(group, mu, grades, cuts, tau):
    cut = group.offsets.numpy()[1:-1]
    bags = zip(*(np.split(np.asarray(x), cut) for x in (mu, group.sigma)), grades)
    given = [(m, s, k, cuts, tau) for m, s, k in bags]
    log_z = [oracle.log_z(*bag) for bag in given]
    gamma = np.concatenate([oracle.gamma(*bag) for bag in given])
    return sum(log_z), gamma, -block_diag(*(oracle.hessian(*bag) for bag in given))


@pytest.mark.parametrize(
    ("tau", "shift", "second"), [(0.0, 0.4, 2e-6), (0.5, -3.5, 1e-4), (1.3, 0.4, 2e-3)]
)
def test_every_number_equals_dense_quadrature(tau, shift, second):
    group, mu = some_bags(tau)
    mu = mu + shift
    likelihood = graded(group, torch.tensor(GRADES), torch.tensor(CUTS).double())
    assert isinstance(likelihood, GradedPatches)
    gamma, log_z, A = likelihood.curvature(mu)
    expected = by_differences(group, mu, GRADES, CUTS, tau)
    assert abs(float(log_z) - expected[0]) < 1e-6
    np.testing.assert_allclose(gamma, expected[1], atol=2e-6)
    eye = torch.eye(len(mu), dtype=mu.dtype)
    np.testing.assert_allclose(A(eye, eye), expected[2], atol=second)
    alone, log_z_alone = likelihood.gradient(mu)
    np.testing.assert_allclose(alone, gamma, atol=1e-6)
    assert abs(float(log_z_alone - log_z)) < 1e-6


@pytest.mark.parametrize("above", [False, True])
def test_a_difference_is_the_sum_itself(above):
    """Q+ - Q- and (1 - Q-) - (1 - Q+), in the middle, where all ways keep their digits."""
    group, mu = some_bags(0.9, grades=(1,) * 5)
    patches = Patches(mu - 0.9, group.sigma, group.offsets, group.row)
    bags = Between(patches, torch.zeros_like(mu), torch.linspace(0.9, 2.0, 5).double())
    tau = torch.tensor(0.9).double()
    found, close = by_difference(bags, tau, True, above)
    assert not close.any()
    naive = taught.summed(bags, tau, True)
    np.testing.assert_allclose(found.log_z, naive.log_z, atol=1e-6)
    np.testing.assert_allclose(found.gamma, naive.gamma, atol=2e-6)
    same = group.row[:, None] == group.row

    def second(m):
        return torch.diag(m.curvature) + (m.up @ m.up.T - m.down @ m.down.T) * same

    # patches share an effect: the low-rank part has its two largest terms
    np.testing.assert_allclose(second(found), second(naive), atol=2e-3)
    alone = by_difference(bags, tau, False, above)[0]
    np.testing.assert_allclose(alone.gamma, found.gamma, atol=1e-6)


@pytest.mark.parametrize("tau", [0.0, 0.8])
@pytest.mark.parametrize("mu", [-30.0, -6.0, 0.5, 7.0, 40.0])
def test_one_patch_has_a_closed_form_far_from_its_cut_points(tau, mu):
    # m ~ N(mu, sigma^2 + tau^2): P(Y = 1) = Phi((b_2 - mu) / sd) - Phi((b_1 - mu) / sd)
    group, _ = some_bags(tau, sizes=(1,), grades=(1,))
    sd = np.hypot(float(group.sigma[0]), tau)
    ends = np.array([CUTS[0] - mu, CUTS[1] - mu]) / sd
    low, high = log_ndtr(ends if ends.sum() < 0 else -ends[::-1])
    expected = high + np.log(-np.expm1(low - high))
    # d log P = -(phi(high) - phi(low)) / (sd P)
    density = np.exp(-(ends**2) / 2 - np.log(2 * np.pi) / 2 - expected)
    likelihood = graded(group, torch.tensor([1]), torch.tensor(CUTS).double())
    gamma, log_z, A = likelihood.curvature(torch.tensor([mu]).double())
    assert float(log_z) == pytest.approx(expected, rel=1e-6, abs=1e-6)
    assert float(gamma[0]) == pytest.approx((density[0] - density[1]) / sd, rel=2e-5)
    assert float(A(torch.eye(1).double(), torch.eye(1).double())) > 0


@pytest.mark.parametrize("tau", [0.0, 0.7])
def test_probabilities_of_all_grades_sum_to_one(tau):
    n_grades = len(CUTS) + 1
    total = 0.0
    for k in range(n_grades):
        group, mu = some_bags(tau, sizes=(4,), grades=(k,))
        likelihood = graded(group, torch.tensor([k]), torch.tensor(CUTS).double())
        total += float(torch.as_tensor(likelihood.gradient(mu)[1]).exp())
    assert total == pytest.approx(1.0, abs=1e-6)


@pytest.mark.parametrize("tau", [0.0, 0.7])
def test_a_last_cut_point_at_infinity_leaves_binary_bags(tau):
    # grade 1 of three, the second cut point far away: a positive bag
    group, mu = some_bags(tau, grades=(1, 0, 1, 1, 0))
    far = graded(group, group.positive.long(), torch.tensor([0.0, 60.0]).double())
    binary = with_effect.patches(group)
    eye = torch.eye(len(mu), dtype=mu.dtype)
    for ours, theirs in zip(far.curvature(mu)[:2], binary.curvature(mu)[:2]):
        np.testing.assert_allclose(ours, theirs, atol=2e-6)
    ours, theirs = (x.curvature(mu)[2](eye, eye) for x in (far, binary))
    np.testing.assert_allclose(ours, theirs, atol=2e-3)


def test_two_grades_are_the_binary_likelihood_itself():
    group, _ = some_bags(0.6)
    cuts = torch.zeros(1).double()
    assert type(graded(group, group.positive.long(), cuts)) is type(with_effect.patches(group))
