import itertools

import mpmath as mp
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles.model import expectation, expectation_mp

from gpmil.moments.truncated import (
    excess,
    expectations,
    hazard,
    log_not,
    moments,
    upper_tail,
    variance_ratio,
)


def one_bag(mu, sigma, label, dtype=torch.float64):
    return moments(
        torch.tensor(mu, dtype=dtype),
        torch.tensor(sigma, dtype=dtype),
        torch.tensor([bool(label)]),
        torch.tensor([0, len(mu)]),
    )


def errors(found, expected):
    return [float(abs((mp.mpf(float(a)) - b) / b)) for a, b in zip(found, expected)]


@pytest.mark.parametrize("label", [0, 1])
def test_moderate_values_equal_the_papers_formula(label):
    mu = np.array([0.3, -1.7, 2.2, -0.4])
    sigma = np.array([0.9, 1.3, 1.4, 2.0])  # t < 2: beyond, 1 - Phi(t) loses the paper's digits
    found, expected = one_bag(mu, sigma, label).mean, expectation(mu, sigma, label)
    assert np.allclose(found, expected, rtol=1e-13, atol=0)


# scale and shift of t: the middle, both tails to 1e6, and Z near 1e-300 (t about -37)
TAILS = [
    (1, 0),
    (5, -5),
    (3, -12),
    (0.5, -37),
    (40, 0),
    (1e3, 0),
    (1e6, 0),
    (1e5, -1e6),
    (1e4, 1e5),
]


@pytest.mark.parametrize("n", [1, 2, 5])
@pytest.mark.parametrize("label", [0, 1])
@pytest.mark.parametrize(("scale", "shift"), TAILS)
def test_every_tail_against_sixty_digits(scale, shift, label, n):
    rng = np.random.default_rng([n, label, int(scale), abs(int(shift))])
    sigma = rng.uniform(0.5, 2, n)
    mu = (rng.normal(size=n) * scale + shift) * sigma
    expected, log_z = expectation_mp(mu, sigma, label)
    found = one_bag(mu, sigma, label)
    # conditioning: t^2/2 in the exponent of a weight carries t^2 eps
    assert max(errors(found.mean, expected)) < max(
        1e-11, 1e-15 * np.max(np.abs(mu / sigma)) ** 2 * (n > 1)
    )
    # log Z: relative, or both zero to the last digit; at t = -37 one rounding of t^2/2 in the
    # exponent is 1e-13
    assert abs(float(found.log_z[0]) - float(log_z)) <= 2e-12 * abs(float(log_z)) + 1e-300


@pytest.mark.parametrize("label", [0, 1])
@pytest.mark.parametrize(("scale", "shift"), TAILS)
def test_float32_is_as_good_as_its_digits(scale, shift, label):
    rng = np.random.default_rng([label, int(scale), abs(int(shift))])
    sigma = rng.uniform(0.5, 2, 3).astype(np.float32)
    mu = (rng.normal(size=3) * scale + shift).astype(np.float32) * sigma
    expected, _ = expectation_mp(mu, sigma, label)
    found = one_bag(mu, sigma, label, torch.float32)
    assert found.mean.dtype == torch.float32
    t2 = np.max(np.abs(mu / sigma).astype(float)) ** 2
    assert max(errors(found.mean, expected)) < max(1e-6, 1e-15 * t2)


@given(
    t=st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=6),
    label=st.booleans(),
    seed=st.integers(0, 9),
)
@settings(max_examples=100, deadline=None)
def test_always_finite_and_on_the_right_side(t, label, seed):
    sigma = np.random.default_rng(seed).uniform(0.2, 3, len(t))
    mu = np.array(t) * sigma
    found = one_bag(mu, sigma, label)
    assert all(torch.isfinite(x).all() for x in found)
    mean = found.mean.numpy()
    if label:
        assert (mean >= mu - 1e-9 * np.abs(mu)).all()  # a positive bag only pulls upwards
        if len(t) == 1:
            assert (mean > 0).all()
    else:
        assert (mean < 0).all()
        assert (mean <= mu + 1e-9 * np.abs(mu)).all()


@pytest.mark.parametrize("label", [0, 1])
@pytest.mark.parametrize("shift", [0.0, -4.0, -9.5, 3.0])
def test_slopes_and_gradients_by_finite_differences(label, shift):
    rng = np.random.default_rng(8)
    sigma = rng.uniform(0.5, 1.5, 4)
    mu = rng.normal(size=4) + shift
    m = one_bag(mu, sigma, label)
    slope = np.diag(m.slope) - np.outer(m.left, m.right)
    hessian = np.diag(m.curvature) - np.outer(m.pull, m.pull)
    eps = 1e-5
    for j in range(4):
        step = eps * np.eye(4)[j]
        up, down = one_bag(mu + step, sigma, label), one_bag(mu - step, sigma, label)
        scale = max(1.0, float(np.abs(slope).max()))
        assert np.allclose((up.mean - down.mean) / (2 * eps), slope[:, j], atol=1e-6 * scale)
        assert np.allclose((up.log_z - down.log_z) / (2 * eps), m.gamma[j], atol=1e-6 * scale)
        assert np.allclose(
            (up.gamma - down.gamma) / (2 * eps), hessian[:, j], atol=1e-5 * np.abs(hessian).max()
        )


def test_far_tail_joins_the_formula_smoothly():
    sigma = np.array([1.0, 0.7])
    for label in (0, 1):
        a = one_bag(np.array([-8.0 + 1e-12, -8.3 * 0.7]), sigma, label)
        b = one_bag(np.array([-8.0 - 1e-12, -8.3 * 0.7]), sigma, label)
        for x, y in zip(a, b):
            assert torch.allclose(x, y, rtol=1e-9)


def test_bags_do_not_touch_each_other():
    rng = np.random.default_rng(2)
    sizes, labels = [3, 1, 5, 2], [1, 0, 1, 1]
    offsets = np.concatenate([[0], np.cumsum(sizes)])
    mu, sigma = rng.normal(size=11) * [30, 1, 1, 9, 9, 1, 1, 1, 1, 1, 40], rng.uniform(0.5, 2, 11)
    together = moments(
        torch.from_numpy(mu),
        torch.from_numpy(sigma),
        torch.tensor(labels) == 1,
        torch.from_numpy(offsets),
    )
    for b, (i, j) in enumerate(itertools.pairwise(offsets)):
        alone = one_bag(mu[i:j], sigma[i:j], labels[b])
        for whole, part in zip(together[:-1], alone[:-1]):
            assert torch.equal(whole[i:j], part)
        assert together.log_z[b] == alone.log_z[0]


def test_the_special_functions_in_both_tails():
    for t in (-30.0, -3.3, 0.0, 2.7, 49.9, 50.1, 3e3, 1e8):
        with mp.workdps(60):
            x = mp.mpf(t)
            h = mp.exp(-x * x / 2) / mp.sqrt(2 * mp.pi) / (mp.erfc(x / mp.sqrt(2)) / 2)
            # the exponent carries t^2 eps, as does h - t up to its series at 50; 1 - h (h - t)
            # loses t^4 eps
            lost = min(abs(t), 50) ** 2
            variance = 1 - h * (h - x)
            rows = [(hazard, h, lost), (excess, h - x, lost), (variance_ratio, variance, lost**2)]
        for function, expected, amplified in rows:
            found = float(function(torch.tensor([t], dtype=torch.float64))[0])
            tolerance = 1e-12 + 1e-15 * amplified
            assert abs(found - float(expected)) <= tolerance * abs(float(expected)) + 1e-300
    q = torch.tensor([-1e-20, -0.1, -0.7, -3.0, -800.0], dtype=torch.float64)
    expected = [float(mp.log(-mp.expm1(mp.mpf(float(x))))) for x in q]
    assert np.allclose(log_not(q), expected, rtol=1e-14)


@pytest.mark.parametrize(("scale", "shift"), TAILS)
@pytest.mark.parametrize("label", [0, 1])
def test_expectations_alone_equal_sixty_digits(scale, shift, label):
    rng = np.random.default_rng([label, int(scale), abs(int(shift)), 7])
    sigma = rng.uniform(0.5, 2, 3)
    mu = (rng.normal(size=3) * scale + shift) * sigma
    E, log_z = expectations(
        torch.tensor(mu), torch.tensor(sigma), torch.tensor([bool(label)]), torch.tensor([0, 3]),
        torch.zeros(3, dtype=torch.int64),
    )  # fmt: skip
    assert max(errors(E, expectation_mp(mu, sigma, label)[0])) < 1e-9
    assert torch.isclose(log_z[0], one_bag(mu, sigma, label).log_z[0], rtol=1e-11)


@given(st.integers(0, 10_000), st.floats(0.1, 30), st.floats(-9, 9))
@settings(max_examples=60, deadline=None)
def test_expectations_alone_equal_the_moments(seed, scale, shift):
    rng = np.random.default_rng(seed)
    sizes = rng.integers(1, 9, 6)
    offsets = torch.from_numpy(np.concatenate([[0], np.cumsum(sizes)]))
    row = torch.from_numpy(np.repeat(np.arange(6), sizes))
    sigma = torch.from_numpy(rng.uniform(0.3, 1, sizes.sum()))
    mu = torch.from_numpy(rng.normal(size=sizes.sum()) * scale + shift) * sigma
    positive = torch.from_numpy(rng.random(6) < 0.6)
    E, log_z = expectations(mu, sigma, positive, offsets, row)
    full = moments(mu, sigma, positive, offsets)
    assert torch.allclose(E, full.mean, rtol=1e-10, atol=1e-13)
    assert torch.allclose(log_z, full.log_z, rtol=1e-10, atol=1e-13)


def test_the_wide_functions_equal_the_narrow_ones():
    t = torch.linspace(-45, 60, 4001, dtype=torch.float64)
    log_upper, h = upper_tail(t)
    assert torch.allclose(log_upper, torch.special.log_ndtr(-t), rtol=1e-13, atol=1e-300)
    # at t = -45 one rounding of t^2/2 in the exponent is 1e-13
    assert torch.allclose(h, hazard(t), rtol=4e-12, atol=1e-300)
