import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles import slide_effect as oracle
from scipy.special import log_ndtr
from scipy.stats import norm
from synthetic import dense_graphs, small_cohort

from gpmil.fast import compiled
from gpmil.moments import effect_nodes, truncated
from gpmil.moments.slide_effect import gradient, moments


def one_bag(mu, sigma, label, tau, dtype=torch.float64):
    return moments(
        torch.as_tensor(mu, dtype=dtype),
        torch.as_tensor(sigma, dtype=dtype),
        torch.tensor([bool(label)]),
        torch.tensor([0, len(mu)]),
        tau,
    )


def hessian(m):
    """The second derivative of one bag's log Z as a matrix."""
    gamma, F = m.gamma.numpy(), m.factors.numpy()
    return np.diag(m.curvature) - np.outer(gamma, gamma) + float(m.sign[0]) * F @ F.T


def several(seed=0, sizes=(1, 7, 30, 2, 110, 12), spread=0.8, shift=-2.0):
    """mu, sigma, labels and offsets of some bags, and the bag of every instance."""
    rng = np.random.default_rng(seed)
    n = sum(sizes)
    mu = torch.from_numpy(rng.normal(size=n) * spread + shift)
    sigma = torch.from_numpy(rng.uniform(0.5, 1, n))
    positive = torch.arange(len(sizes)) % 2 == 1
    offsets = torch.from_numpy(np.concatenate([[0], np.cumsum(sizes)]))
    return mu, sigma, positive, offsets, torch.from_numpy(np.repeat(np.arange(len(sizes)), sizes))


# --- Against dense quadrature ---------------------------------------------------------------------


@pytest.mark.parametrize("label", [0, 1])
@pytest.mark.parametrize("tau", [1e-3, 0.3, 1.0, 4.0, 10.0])
@pytest.mark.parametrize(("n", "shift"), [(1, -2.0), (1, 3.0), (7, -9.0), (40, -2.5), (40, 0.7)])
def test_every_number_equals_dense_quadrature(n, shift, tau, label):
    rng = np.random.default_rng([n, label, int(10 * tau)])
    sigma = rng.uniform(0.5, 1, n)
    mu = rng.normal(size=n) * 0.7 + shift
    expected, found = oracle.bag(mu, sigma, label, tau), one_bag(mu, sigma, label, tau)
    log_z = expected["log_z"]
    # 1e-5 of log Z, and of Z itself where Z is nearly one
    assert abs(float(found.log_z[0]) - log_z) <= 1e-5 * min(1, abs(log_z)) + 1e-6 * abs(log_z) + (
        0 if label else 1e-6
    )
    scale = np.abs(expected["gamma"]).max()
    assert np.allclose(found.gamma, expected["gamma"], rtol=0, atol=1e-4 * scale + 1e-7)
    scale = np.abs(expected["hessian"]).max()
    assert np.allclose(hessian(found), expected["hessian"], rtol=0, atol=1e-2 * scale + 1e-7)
    assert np.allclose(found.mean, expected["mean"], rtol=1e-4, atol=1e-5 * (1 + tau))
    assert np.isclose(float(found.effect[0]), expected["effect"], rtol=1e-4, atol=1e-6 * tau)
    variance = expected["effect_variance"]
    assert np.isclose(float(found.effect_variance[0]), variance, rtol=1e-3, atol=1e-6 * tau**2)
    slope = expected["by_log_tau"]
    assert np.isclose(float(found.by_log_tau[0]), slope, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("label", [0, 1])
@pytest.mark.parametrize("tau", [0.1, 1.0, 3.0])
@pytest.mark.parametrize("level", [-6.0, -4.2, -1.0])
def test_a_hundred_thousand_patches(level, tau, label):
    n = 100_000
    expected = oracle.bag(np.array([level]), np.array([0.8]), label, tau, copies=n)["log_z"]
    found = one_bag(np.full(n, level), np.full(n, 0.8), label, tau)
    assert abs(float(found.log_z[0]) - expected) < 5e-5 * max(abs(expected), 1 - label)
    assert all(torch.isfinite(x).all() for x in found)


@pytest.mark.parametrize("tau", [1e-3, 0.5, 5.0])
def test_a_positive_bag_far_below_zero(tau):
    mu, sigma = np.array([-60.0, -45.0, -52.0]), np.array([1.0, 0.7, 0.9])
    expected, found = oracle.bag(mu, sigma, 1, tau), one_bag(mu, sigma, 1, tau)
    assert expected["log_z"] < -30
    assert np.isclose(float(found.log_z[0]), expected["log_z"], rtol=1e-6)
    assert np.allclose(found.gamma, expected["gamma"], rtol=1e-4)


@pytest.mark.parametrize("tau", [1e-3, 1.0, 10.0])
def test_a_negative_bag_far_above_zero(tau):
    mu, sigma = np.array([300.0, 90.0, -4.0]), np.array([1.0, 0.7, 0.9])
    expected, found = oracle.bag(mu, sigma, 0, tau), one_bag(mu, sigma, 0, tau)
    assert np.isclose(float(found.log_z[0]), expected["log_z"], rtol=1e-7)
    assert np.allclose(found.gamma, expected["gamma"], rtol=1e-4)


# --- Limits ---------------------------------------------------------------------------------------


def test_no_effect_is_the_model_without_it_to_the_last_digit():
    mu, sigma, positive, offsets, row = several()
    found = moments(mu, sigma, positive, offsets, 0.0, row)
    plain = truncated.moments(mu, sigma, positive, offsets, row)
    for name in ("mean", "gamma", "curvature", "log_z"):
        assert torch.equal(getattr(found, name), getattr(plain, name))
    assert not found.effect.any() and not found.by_log_tau.any()
    for x, y in zip(
        gradient(mu, sigma, positive, offsets, 0.0, row),
        truncated.gradient(mu, sigma, positive, offsets, row),
    ):
        assert torch.equal(x, y)
    for b, (i, j) in enumerate(itertools.pairwise(offsets.tolist())):
        alone = one_bag(mu[i:j], sigma[i:j], bool(positive[b]), 0.0)
        pull = plain.pull[i:j].numpy()
        expected = np.diag(plain.curvature[i:j]) - np.outer(pull, pull)
        assert np.allclose(hessian(alone), expected, rtol=1e-12, atol=1e-14)


def test_a_small_effect_is_nearly_none():
    mu, sigma, positive, offsets, row = several()
    plain = truncated.moments(mu, sigma, positive, offsets, row)
    for tau in (1e-2, 1e-3):
        found = moments(mu, sigma, positive, offsets, tau, row)
        for name in ("mean", "gamma", "log_z", "curvature"):
            gap = (getattr(found, name) - getattr(plain, name)).abs().max()
            assert gap < 50 * tau**2, name


@given(st.floats(-30, 30), st.floats(0.3, 3), st.floats(1e-3, 10))
@settings(max_examples=40, deadline=None)
def test_one_patch_is_probit_with_both_variances(mu, sigma, tau):
    t = mu / np.hypot(sigma, tau)
    for label in (0, 1):
        found = one_bag([mu], [sigma], label, tau)
        expected = log_ndtr(t if label else -t)
        assert abs(float(found.log_z[0]) - expected) <= 1e-5 * max(abs(expected), 1 - label)
        sign = 1 if label else -1
        ratio = sign * np.exp(norm.logpdf(t) - expected) / np.hypot(sigma, tau)
        assert np.isclose(float(found.gamma[0]), ratio, rtol=1e-4, atol=1e-6)


def test_the_order_of_patches_does_not_matter():
    mu, sigma, *_ = several(sizes=(40,))
    order = torch.from_numpy(np.random.default_rng(1).permutation(40))
    for label in (0, 1):
        a, b = one_bag(mu, sigma, label, 0.8), one_bag(mu[order], sigma[order], label, 0.8)
        assert torch.allclose(a.gamma[order], b.gamma, rtol=1e-10)
        assert torch.allclose(a.log_z, b.log_z, rtol=1e-12)
        assert np.allclose(hessian(a)[np.ix_(order, order)], hessian(b), rtol=1e-8, atol=1e-12)


@pytest.mark.parametrize("shift", [-2.0, -6.5])
@pytest.mark.parametrize("tau", [0.05, 0.8, 4.0])
def test_bags_do_not_touch_each_other(tau, shift):
    mu, sigma, positive, offsets, row = several(shift=shift)
    together = moments(mu, sigma, positive, offsets, tau, row)
    for b, (i, j) in enumerate(itertools.pairwise(offsets.tolist())):
        alone = one_bag(mu[i:j], sigma[i:j], bool(positive[b]), tau)
        for name in ("mean", "gamma", "curvature", "factors"):
            whole = getattr(together, name)[i:j]
            assert torch.allclose(whole, getattr(alone, name), rtol=1e-7, atol=1e-12), name
        for name in ("log_z", "effect", "effect_variance", "by_log_tau"):
            assert torch.allclose(
                getattr(together, name)[b], getattr(alone, name)[0], rtol=1e-7, atol=1e-12
            )


@pytest.mark.parametrize("shift", [-6.5, -2.0, 9.0])
@pytest.mark.parametrize("tau", [0.05, 0.8, 3.0])
def test_nodes_side_by_side_add_what_they_add_one_by_one(tau, shift, monkeypatch):
    monkeypatch.setattr(compiled, "WORTH_PATCHES", math.inf)
    bags = several(shift=shift, sizes=(1, 7, 30, 2, 50, 12))
    found = []
    for few in (effect_nodes.FEW, 0):
        monkeypatch.setattr(effect_nodes, "FEW", few)
        mu, sigma, positive, offsets, row = bags
        at = mu.clone().requires_grad_(True)
        m = moments(at, sigma, positive, offsets, tau, row)
        (slope,) = torch.autograd.grad((m.curvature * mu).sum() + m.gamma.sum(), at)
        found.append((*m, *gradient(mu, sigma, positive, offsets, tau, row), slope))
    for a, b in zip(*found):
        assert torch.allclose(a, b, rtol=1e-9, atol=1e-9 * float(b.abs().max()))


@pytest.mark.parametrize("shift", [9.0, 24.0])
def test_derivatives_in_a_small_tau_are_numbers_far_from_zero(shift):
    mu, sigma, positive, offsets, row = several(shift=shift, sizes=(1, 7, 30, 2))
    tau = torch.tensor(0.05, dtype=torch.float64, requires_grad=True)
    for what in (moments, gradient):
        found = what(mu, sigma, positive, offsets, tau, row)
        gamma = found.gamma if what is moments else found[0]
        (slope,) = torch.autograd.grad(gamma.sum(), tau)
        assert torch.isfinite(slope)


# --- Derivatives ----------------------------------------------------------------------------------


@pytest.mark.parametrize("shift", [-6.0, -2.0, 0.5])
@pytest.mark.parametrize("tau", [0.1, 1.0, 3.0])
def test_the_gradient_is_that_of_the_sum_itself(tau, shift):
    mu, sigma, positive, offsets, row = several(shift=shift)
    value = mu.clone().requires_grad_(True)
    found = moments(value, sigma, positive, offsets, tau, row)
    by_autograd = torch.autograd.grad(found.log_z.sum(), value)[0]
    gamma = found.gamma.detach()
    assert torch.allclose(by_autograd, gamma, rtol=1e-8, atol=1e-10 * float(gamma.abs().max()))


@pytest.mark.parametrize("label", [0, 1])
@pytest.mark.parametrize("tau", [0.3, 1.0, 3.0])
def test_derivatives_in_tau_and_sigma(tau, label):
    mu, sigma, *_ = several(sizes=(25,))
    s, v = sigma.clone().requires_grad_(True), torch.tensor(tau).double().requires_grad_(True)
    found = moments(mu, s, torch.tensor([bool(label)]), torch.tensor([0, 25]), v)
    by_sigma, by_tau = torch.autograd.grad(found.log_z.sum(), [s, v])
    assert torch.isclose(tau * by_tau, found.by_log_tau[0], rtol=1e-3, atol=1e-6)
    step = 1e-4 * np.eye(25)[3]
    up, down = (oracle.bag(mu.numpy(), sigma.numpy() + d, label, tau) for d in (step, -step))
    expected = (up["log_z"] - down["log_z"]) / 2e-4
    assert np.isclose(float(by_sigma[3]), expected, rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("shift", [-6.0, -1.5])
def test_second_derivatives_can_be_differentiated(shift):
    """What leave-one-bag-out scores need to be climbed: gamma and A gamma, in mu and in tau."""
    mu, sigma, positive, offsets, row = several(sizes=(3, 9, 1, 20), shift=shift)

    def some_number(values, tau):
        m = moments(values, sigma, positive, offsets, tau, row)
        inner = truncated.segment_sum((m.factors * m.gamma[:, None]).sum(1), offsets)
        return (m.curvature * m.gamma.square()).sum() + inner.square().sum() + m.mean.sum()

    at, tau = mu.clone().requires_grad_(True), torch.tensor(0.9).double().requires_grad_(True)
    by_mu, by_tau = torch.autograd.grad(some_number(at, tau), [at, tau])
    step = 1e-5 * torch.from_numpy(np.random.default_rng(2).normal(size=len(mu)))
    rise = some_number(mu + step, 0.9) - some_number(mu - step, 0.9)
    assert torch.isclose(by_mu @ step, rise / 2, rtol=1e-5)
    rise = some_number(mu, 0.9 + 1e-5) - some_number(mu, 0.9 - 1e-5)
    assert torch.isclose(by_tau * 1e-5, rise / 2, rtol=1e-4)


@pytest.mark.parametrize("tau", [0.0, 0.05, 0.8, 3.0])
@pytest.mark.parametrize("shift", [-7.0, -2.0, 1.0, 9.0])
def test_the_gradient_alone_equals_the_moments(shift, tau):
    mu, sigma, positive, offsets, row = several(shift=shift)
    gamma, log_z = gradient(mu, sigma, positive, offsets, tau, row)
    full = moments(mu, sigma, positive, offsets, tau, row)
    assert torch.allclose(gamma, full.gamma, rtol=1e-8, atol=1e-12)
    assert torch.allclose(log_z, full.log_z, rtol=1e-8, atol=1e-12)


@given(
    st.lists(st.floats(-40, 40), min_size=1, max_size=6),
    st.booleans(),
    st.floats(1e-3, 10),
    st.integers(0, 9),
)
@settings(max_examples=30, deadline=None)
def test_always_finite_and_on_the_right_side(t, label, tau, seed):
    sigma = np.random.default_rng(seed).uniform(0.2, 3, len(t))
    found = one_bag(np.array(t) * sigma, sigma, label, tau)
    assert all(torch.isfinite(x).all() for x in found)
    assert float(found.log_z[0]) <= 0
    sign = 1 if label else -1
    assert (sign * found.gamma >= 0).all() and sign * float(found.effect[0]) >= -1e-6 * tau
    if not label:
        # log Z is concave, and what is left out of its second derivative makes it more so
        values = np.linalg.eigvalsh(hessian(found))
        assert values.max() <= 1e-8 * np.abs(values).max()
        assert float(found.effect_variance[0]) <= tau**2 * (1 + 1e-6)


def test_float32_comes_back_as_float32():
    mu, sigma, positive, offsets, row = several()
    found = moments(mu.float(), sigma.float(), positive, offsets, 0.7, row)
    full = moments(mu.float().double(), sigma.float().double(), positive, offsets, 0.7, row)
    assert all(x.dtype == torch.float32 for x in found)
    assert torch.allclose(found.gamma, full.gamma.float(), rtol=1e-6)


# --- The whole posterior --------------------------------------------------------------------------


def dense_cohort(strength=0.7, M=5):
    """W_b and Sigma_b of a small cohort, and its labels."""
    bags = small_cohort(seed=8, n_bags=10, sizes=(1, 9))
    rng = np.random.default_rng(4)
    W = [rng.normal(size=(n, M)) * 0.9 for n in bags.sizes]
    C = [np.diag(a.sum(0)) - a for a in dense_graphs(bags)]
    return W, [np.linalg.inv(np.eye(len(c)) + strength * c) for c in C], bags.labels


@pytest.mark.parametrize("tau", [0.0, 0.6, 4.0])
def test_the_precision_of_u_loses_one_rank_per_bag(tau):
    W, Sigma, _ = dense_cohort()
    a, b = (f(W, Sigma, tau) for f in (oracle.precision, oracle.precision_by_downdates))
    assert np.allclose(a, b, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("tau", [0.4, 1.5])
def test_newtons_steps_find_the_dense_optimum(tau):
    W, Sigma, labels = dense_cohort()
    c = -0.8
    bags = [(S @ w, np.sqrt(np.diag(S)), y) for w, S, y in zip(W, Sigma, labels)]
    expected = oracle.collapsed_optimum(bags, c, tau)
    H, sigma = (torch.from_numpy(np.concatenate(x)) for x in list(zip(*bags))[:2])
    sizes = [len(w) for w in W]
    offsets = torch.from_numpy(np.concatenate([[0], np.cumsum(sizes)]))
    w = torch.zeros(H.shape[1], dtype=torch.float64)
    for _ in range(12):
        m = moments(c + H @ w, sigma, torch.from_numpy(labels == 1), offsets, tau)
        slope = H.T @ m.gamma - w
        if slope.norm() < 1e-11 * w.norm():
            break
        curvature = torch.eye(len(w)) - H.T @ (m.curvature[:, None] * H)
        for b, (i, j) in enumerate(itertools.pairwise(offsets.tolist())):
            pulled, low = H[i:j].T @ m.gamma[i:j], H[i:j].T @ m.factors[i:j]
            curvature += torch.outer(pulled, pulled) - m.sign[b] * low @ low.T
        w = w + torch.linalg.solve(curvature, slope)
    assert slope.norm() < 1e-10 * w.norm()
    assert np.allclose(w, expected, rtol=0, atol=2e-5 * np.abs(expected).max())


def test_patches_of_very_different_noise_far_below_zero():
    """log(1 - q) is not concave there: the width of the integrand was not a number."""
    mu = torch.tensor([-55.7, -5.2, -4.3, -443.6]).double()
    sigma = torch.tensor([14.5, 1.2, 0.86, 100.0]).double()
    found = moments(mu, sigma, torch.tensor([True]), torch.tensor([0, 4]), 1.0)
    s = np.linspace(-12, 12, 4001)[:, None]
    log_q = log_ndtr(-(mu.numpy() + s) / sigma.numpy()).sum(1)
    density = np.exp(-(s[:, 0] ** 2) / 2) / np.sqrt(2 * np.pi) * (s[1] - s[0])
    expected = np.log(-(np.expm1(log_q) * density).sum())
    assert float(found.log_z[0]) == pytest.approx(expected, abs=1e-6)
