"""The samplers, and Genz's estimate that they are checked against."""

import numpy as np
import pytest
import torch
from oracles import genz as oracle
from oracles.genz import genz, genz_loop
from oracles.orthant import (
    batch,
    equicorrelated,
    random_problem,
    slide,
    tensors,
    tilted_loop,
    union_equicorrelated,
)
from scipy.special import log_ndtr
from scipy.special import ndtri_exp as scipy_ndtri_exp
from scipy.stats import multivariate_normal

from gpmil.moments import sampling
from gpmil.moments.ep import ep
from gpmil.moments.sampling import log_union, ndtri_exp, tilted

# --- Genz's estimate ---------------------------------------------------------------------------


@pytest.mark.parametrize("n", [2, 5, 10])
@pytest.mark.parametrize("shift", [-1.5, 0.4])
def test_genz_agrees_with_scipy(n, shift):
    mu, cov = random_problem(n, seed=n, shift=shift)
    value, error = genz(mu, cov)
    reference = multivariate_normal(mu, cov).logcdf(np.zeros(n), rng=np.random.default_rng(1))
    assert error < 2e-3
    assert abs(value - reference) < 4 * error + 2e-4


def test_genz_equals_the_loop_on_the_same_points():
    mu, cov = random_problem(7, seed=3)
    points = sampling.points(7, 32, 1, seed=5)[0]
    value, _ = genz(mu, cov, n_points=32, n_replicates=1, seed=5)
    assert value == pytest.approx(genz_loop(mu, cov, points), rel=1e-12)


@pytest.mark.parametrize("n", [1, 2, 150])
def test_genz_is_exact_for_independent_coordinates(n):
    rng = np.random.default_rng(n)
    mu, variance = 3 * rng.standard_normal(n), rng.uniform(0.2, 4, n)
    value, error = genz(mu, np.diag(variance))
    assert value == pytest.approx(log_ndtr(-mu / np.sqrt(variance)).sum(), rel=1e-12)
    assert error < 1e-12


@pytest.mark.parametrize("rho", [0.1, 0.7])
@pytest.mark.parametrize("n", [2, 60])
def test_genz_agrees_with_quadrature_when_equicorrelated(n, rho):
    mu = np.linspace(-2.0, 0.7, n)
    cov = rho + (1 - rho) * np.eye(n)
    value, error = genz(mu, cov)
    assert error < 0.03
    assert abs(value - equicorrelated(mu, rho)) < 4 * error + 1e-6


def test_genz_far_in_the_left_tail():
    mu = np.linspace(4.0, 12.0, 80)
    cov = 0.02 + 0.98 * np.eye(80)
    value, error = genz(mu, cov)
    reference = equicorrelated(mu, 0.02)
    assert reference < -1000
    assert abs(value - reference) < 4 * error + 1e-4
    deeper, _ = genz(mu + 40, cov)
    assert -1e6 < deeper < -10_000


@pytest.mark.parametrize("shift", [-7.0, -9.0])
def test_genz_keeps_its_digits_near_one(shift):
    mu = np.linspace(shift, shift - 2, 12)
    value, error = genz(mu, 0.3 + 0.7 * np.eye(12))
    reference = -np.exp(union_equicorrelated(mu, 0.3))
    assert -1e-10 < reference < 0
    assert value == pytest.approx(reference, rel=0.05)
    assert 0 < error < 0.05 * abs(value)


def test_genz_never_rounds_to_certainty():
    value, _ = genz(np.full(3, -35.0), np.eye(3) + 0.2)
    assert -1e-100 < value < 0


def test_same_seed_same_bits_whatever_came_before():
    mu, cov = random_problem(20, seed=8)
    first = genz(mu, cov, seed=3)
    genz(*random_problem(9, seed=1), seed=3)
    sampling._net.cache_clear()
    assert genz(mu, cov, seed=3) == first
    assert genz(mu, cov, seed=4) != first


def test_order_of_the_coordinates_does_not_matter():
    mu, cov = random_problem(15, seed=2)
    shuffle = np.random.default_rng(0).permutation(15)
    assert genz(mu[shuffle], cov[np.ix_(shuffle, shuffle)])[0] == pytest.approx(
        genz(mu, cov)[0], rel=1e-10
    )


def test_standard_error_of_genz_is_honest():
    mu, cov = random_problem(12, seed=4)
    reference, _ = genz(mu, cov, n_points=8192)
    runs = np.array([genz(mu, cov, n_points=64, seed=s) for s in range(1, 101)])
    inside = np.abs(runs[:, 0] - reference) < 3 * runs[:, 1]
    assert inside.mean() >= 0.95


def test_a_singular_covariance_gets_a_jitter():
    mu = np.array([0.2, 0.2, -0.5])
    cov = np.array([[1.0, 1.0, 0.3], [1.0, 1.0, 0.3], [0.3, 0.3, 1.0]])
    value, error = genz(mu, cov)
    reference, _ = genz(mu[1:], cov[1:, 1:])
    assert abs(value - reference) < 4 * error + 1e-3


@pytest.mark.parametrize(
    ("mu", "cov", "message"),
    [
        ([0.0, np.nan], np.eye(2), "NaN or infinite"),
        ([0.0, 1.0], [[1.0, np.inf], [np.inf, 1.0]], "NaN or infinite"),
        ([0.0, 1.0], [[1.0, 0.0], [0.0, 0.0]], "coordinate 1"),
        ([0.0, 1.0], [[1.0, 2.0], [2.0, 1.0]], "positive definite"),
        ([], np.zeros((0, 0)), "at least one"),
    ],
)
def test_bad_input_is_explained(mu, cov, message):
    with pytest.raises(ValueError, match=message):
        genz(np.array(mu, dtype=float), np.array(cov, dtype=float))


def test_genz_warns_above_its_limit(monkeypatch):
    monkeypatch.setattr(oracle, "GENZ_LIMIT", 4)
    with pytest.warns(UserWarning, match="5") as caught:
        genz(*random_problem(5, seed=0), n_points=8, n_replicates=2)
    assert caught[0].filename == __file__


# --- the samplers ------------------------------------------------------------------------------


def test_tilted_agrees_with_genz_and_scipy():
    mu, cov = slide(2, 6, 1.0, seed=7)
    value, error = tilted(*tensors(mu, cov), n_points=2048)
    plain, plain_error = genz(mu, cov, n_points=2048)
    distribution = multivariate_normal(mu, cov, abseps=1e-8, maxpts=500_000)
    reference = distribution.logcdf(np.zeros(12), rng=np.random.default_rng(2))
    assert error < plain_error
    assert abs(value - plain) < 4 * plain_error
    assert abs(value - reference) < 4 * error + 5e-4


def test_tilted_equals_the_loop_on_the_same_points():
    mu, cov = slide(2, 4, 2.0, seed=8)
    found = ep(*batch(mu, cov))
    points = sampling.points(8, 16, 2, seed=5).reshape(-1, 8)
    value, _ = tilted(*tensors(mu, cov), n_points=16, n_replicates=2, seed=5)
    state = (x[0].numpy() for x in (found.tau, found.nu, found.mean, found.cov, found.log_gauss))
    assert value == pytest.approx(tilted_loop(*state, points), rel=1e-11)


def test_resampling_keeps_the_estimate_right(monkeypatch):
    # Without sites the weights of correlated coordinates degenerate: several resamplings.
    mu, rho = np.linspace(-2.0, 0.5, 200), 0.1
    cov = rho + (1 - rho) * np.eye(200)
    found = ep(*batch(mu, cov))
    bare = found._replace(
        tau=0 * found.tau, nu=0 * found.nu, mean=batch(mu, cov)[0], cov=batch(mu, cov)[1],
        log_gauss=0 * found.log_gauss,
    )  # fmt: skip
    calls = []
    monkeypatch.setattr(
        torch, "searchsorted", lambda *a, f=torch.searchsorted: calls.append(1) or f(*a)
    )
    runs = np.array([tilted(*tensors(mu, cov), sites=bare, seed=s) for s in range(8)])
    assert len(calls) >= 8 * 8
    # unbiased in P, not in log P
    value = np.log(np.mean(np.exp(runs[:, 0])))
    assert abs(value - equicorrelated(mu, rho)) < 3 * runs[:, 1].mean() / np.sqrt(8)
    assert tilted(*tensors(mu, cov))[1] < 0.1 * runs[:, 1].mean()


def test_standard_error_of_the_tilted_sampler_is_honest():
    mu, cov = slide(3, 5, 5.0, seed=4)
    reference, _ = tilted(*tensors(mu, cov), n_points=8192, seed=12345)
    runs = np.array([tilted(*tensors(mu, cov), n_points=64, seed=s) for s in range(200)])
    assert np.mean(np.abs(runs[:, 0] - reference) < 3 * runs[:, 1]) >= 0.95


@pytest.mark.parametrize("sampler", [tilted, log_union])
def test_samplers_repeat_bit_for_bit(sampler):
    mu, cov = slide(3, 5, 1.0, seed=4)
    first = sampler(*tensors(mu - 3, cov), seed=3)
    sampler(*tensors(*slide(2, 3, 1.0)), seed=3)
    sampling._net.cache_clear()
    sampling._normals.cache_clear()
    assert sampler(*tensors(mu - 3, cov), seed=3) == first
    assert sampler(*tensors(mu - 3, cov), seed=4) != first


def test_standard_error_of_the_union_is_honest():
    mu, rho = np.linspace(-2.5, -4.5, 30), 0.8
    reference = union_equicorrelated(mu, rho)
    problem = tensors(mu, rho + (1 - rho) * np.eye(30))
    runs = np.array([log_union(*problem, seed=s) for s in range(60)])
    assert np.mean(np.abs(runs[:, 0] - reference) < 3 * runs[:, 1]) >= 0.95


def test_ndtri_exp_agrees_with_scipy():
    y = -np.logspace(-300, 8, 500)
    np.testing.assert_allclose(
        ndtri_exp(torch.from_numpy(y)).numpy(), scipy_ndtri_exp(y), rtol=1e-11, atol=1e-14
    )
