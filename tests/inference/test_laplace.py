"""The posterior that intervals are made of, against formulas, quadrature and long chains."""

import numpy as np
import pytest
import torch
from oracles import interval as interval_twin
from oracles.model import collapsed_bound, kernel
from scipy.integrate import quad
from scipy.optimize import brentq
from scipy.stats import norm
from synthetic import dense_pieces, pr, pri, problem_of, small_cohort, some_inducing

import gpmil
from gpmil.inference import laplace as wide
from gpmil.inference import solvers as inference
from gpmil.inference import stores

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def bags():
    return small_cohort(seed=5, n_bags=16, sizes=(1, 20))


@pytest.fixture(scope="module")
def problem(bags):
    return problem_of(bags, some_inducing(bags, 12), 0.7, variance=3.0, c=-0.8)


# --- The covariance -------------------------------------------------------------------------------


def test_the_precision_is_the_hessian_of_the_naive_bound(problem):
    w = inference.direct(problem, 100, 1e-11).w
    J = -collapsed_bound(w.numpy(), dense_pieces(problem), -0.8)[2]
    values, vectors = np.linalg.eigh(J)
    expected = (vectors * np.maximum(values, 1)) @ vectors.T
    np.testing.assert_allclose(wide.laplace(problem, w).R.numpy(), expected, atol=1e-9)


def test_the_hessian_that_led_to_the_optimum_will_do(problem):
    found = inference.direct(problem, 100, 1e-11)
    exact, near = wide.laplace(problem, found.w), wide.laplace(problem, *found[::5])
    ratio = torch.linalg.eigvals(torch.linalg.solve(exact.R, near.R)).real
    assert ratio.min() > 0.9 and ratio.max() < 1.1
    apart = near.w - exact.w
    assert (apart @ exact.R @ apart / len(apart)).sqrt() < 0.1


def test_a_guess_is_no_hessian(problem):
    assert inference.maximise(problem, 1, 1e-11).curvature is None


def test_one_patch_a_bag_is_probit_classification_by_laplace():
    rng = np.random.default_rng(8)
    x, y = rng.normal(size=(30, 2)), rng.random(30) < 0.4
    single = gpmil.Bags.from_arrays([row[None] for row in x], labels=y * 1)
    model = pr(variance=2.0, lengthscale=1.3, mean=0.3, inducing=x, standardize=False).fit(single)
    K = kernel(x, x, variance=2.0, lengthscale=1.3)
    W = np.linalg.solve(np.linalg.cholesky(K + 2e-6 * np.eye(30)), K).T
    t = np.where(y, 1.0, -1.0) * (0.3 + W @ model.whitened_mean_)
    r = norm.pdf(t) / norm.cdf(t)
    # Rasmussen and Williams (2006), eq. 3.16: -d2 log Phi(t) / df2 = r (r + t)
    J = np.eye(30) + W.T @ ((r * (r + t))[:, None] * W)
    np.testing.assert_allclose(model.interval_precision_, J, atol=0.02 * np.abs(J).max())


# --- The mean -------------------------------------------------------------------------------------


def test_one_weight_has_the_mean_of_its_twin_and_nearly_that_of_its_posterior():
    bags = small_cohort(seed=3, n_bags=12, sizes=(2, 9), shift=0.4)
    problem = problem_of(bags, bags.features[4:5], 0.6, variance=6.0, c=-1.1)
    w = inference.direct(problem, 100, 1e-12).w
    found = wide.laplace(problem, w)
    pieces, deviation = dense_pieces(problem), float(found.R) ** -0.5

    def slope(v):
        return collapsed_bound(np.array([v]), pieces, -1.1)[1][0]

    def average(v):  # over x = deviation and -deviation
        return slope(v + deviation) + slope(v - deviation)

    mode, top = float(w), collapsed_bound(w.numpy(), pieces, -1.1)[0]
    root = brentq(average, mode - 3, mode + 3)
    assert float(found.w) == pytest.approx(root, abs=0.02 * deviation)

    def moment(k):
        def weighed(v):
            return v**k * np.exp(collapsed_bound(np.array([v]), pieces, -1.1)[0] - top)

        return quad(weighed, mode - 8, mode + 8, limit=200)[0]

    mean = moment(1) / moment(0)
    assert abs(mode - mean) > 0.05 * deviation  # a mode is not a mean
    assert abs(float(found.w) - mean) < 0.4 * abs(mode - mean)


def test_where_w_is_not_the_optimum_its_slope_is_left_out(problem):
    w = inference.direct(problem, 100, 1e-11).w
    moved = wide.laplace(problem, w + 0.05, wide.laplace(problem, w).R)
    there = wide.laplace(problem, w)
    apart = moved.w - 0.05 - there.w
    assert (apart @ there.R @ apart / len(w)).sqrt() < 0.2


def test_no_direction_is_known_less_than_before():
    turned = np.linalg.qr(np.random.default_rng(4).normal(size=(5, 5)))[0]
    for values in ([1.2, 1.5, 2.0, 7.0, 9.0], [-3.0, 0.4, 1.0, 1.7, 20.0]):
        J = torch.from_numpy((turned * values) @ turned.T)
        expected = (turned * np.maximum(values, 1.0)) @ turned.T
        np.testing.assert_allclose(wide.at_least_one(J), expected, atol=1e-13)


def test_a_mean_is_not_far_from_the_mode():
    J = torch.tensor([[4.0, 0.5], [0.5, 2.0]]).double()
    near, far = torch.tensor([0.3, -0.2]).double(), torch.tensor([30.0, -7.0]).double()
    assert torch.equal(wide.within(near, J), near)
    cut = wide.within(far, J)
    assert float(cut @ J @ cut / 2) == pytest.approx(3)
    assert cut[0] / cut[1] == pytest.approx(30 / -7)
    assert not wide.within(far * float("nan"), J).any()


def test_a_sample_of_many_pieces_gives_about_the_same_mean(bags, problem, monkeypatch):
    whole = wide.laplace(problem, inference.direct(problem, 100, 1e-11).w)
    monkeypatch.setattr(stores, "CHUNK_ROWS", 1)
    many = problem_of(bags, some_inducing(bags, 12), 0.7, variance=3.0, c=-0.8)
    assert len(many.chunks) >= 2 * wide.PIECES
    some = wide.laplace(many, inference.direct(many, 100, 1e-11).w)
    np.testing.assert_allclose(some.R, whole.R, rtol=0.05, atol=0.05)
    apart = some.w - whole.w
    assert (apart @ whole.R @ apart / len(apart)).sqrt() < 0.3


# --- Against the exact posterior ------------------------------------------------------------------


def test_intervals_are_those_of_a_long_chain():
    rng = np.random.default_rng(2)
    x = rng.normal(size=(44, 2, 2))
    f = 2.5 * np.sin(1.3 * x[..., 0]) + x[..., 1] - 1.7
    y = (f + rng.normal(size=f.shape)).max(1) > 0
    bags = gpmil.Bags.from_arrays(
        list(x), labels=y * 1, coords=[np.array([[0, 0], [0, 1]])] * 44, step=1
    )
    train, new = bags[:30], bags[30:]
    model = pri(
        variance=6.0, lengthscale=1.5, mean=-1.2, coupling=0.8, inducing=rng.normal(size=(9, 2)),
        standardize=False, device="cpu",
    ).fit(train)  # fmt: skip
    chain = interval_twin.posterior_of_w(model, train, 4_000)
    parts = [interval_twin.geometry(model, bag) for bag in new]
    drawn = [1 - interval_twin.pair_below(model.mean_ + chain @ H.T, S, 201) for H, S in parts]
    exact = np.quantile(drawn, [0.05, 0.95], axis=1)

    def off():
        found = np.stack(model.predict_interval(new, base_rate=False))
        return np.sqrt(((found - exact) ** 2).mean())

    centred = off()
    assert centred < 0.05
    model.interval_mean_ = model.whitened_mean_
    assert off() > 1.5 * centred  # at the mode
    model.interval_mean_ = None
    assert off() > 3 * centred  # q(u)
