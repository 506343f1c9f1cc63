"""Compiled sums over a slide effect: those of the plain path, also at the ends of their range."""

import math

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from scipy.special import erfc

from gpmil.fast import compiled
from gpmil.moments import effect_nodes, slide_effect

pytest.importorskip("numba", reason="pip install 'gpmil[fast]'")
tails = pytest.importorskip("gpmil.fast.tails")
kernel = pytest.importorskip("gpmil.fast.effect")

SIZES = (1, 1, 7, 2500, 30, 3, 129, 128, 640, 1, 1100, 12)


def bags_at(shift, sizes=SIZES, spread=0.8, seed=0, dtype=torch.float64):
    """mu, sigma, labels and offsets of some bags, and the bag of every instance."""
    rng = np.random.default_rng([seed, len(sizes)])
    n = sum(sizes)
    mu = torch.from_numpy(rng.normal(size=n) * spread + shift).to(dtype)
    sigma = torch.from_numpy(rng.uniform(0.4, 1.1, n)).to(dtype)
    positive = torch.arange(len(sizes)) % 2 == 1
    offsets = torch.from_numpy(np.concatenate([[0], np.cumsum(sizes)]))
    return mu, sigma, positive, offsets, torch.from_numpy(np.repeat(np.arange(len(sizes)), sizes))


def twin_bags(shift):
    """Few patches in deep tails, where the plain path is slow."""
    return bags_at(shift, SIZES if shift > -20 else (1, 1, 3, 30, 40))


def both(what, bags, tau):
    """What the plain and the compiled path find."""
    mu, sigma, positive, offsets, row = bags
    found = []
    for worth in (math.inf, 0):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(compiled, "WORTH_PATCHES", worth)
            found.append(what(mu, sigma, positive, offsets, tau, row))
    return found


def served(bags, tau, rare=False):
    """Which bags are within the range of the compiled sums."""
    mu, sigma, _, offsets, _ = bags
    rule = tuple(float(x) for x in effect_nodes.RULE)
    arrays = (x.numpy() for x in (mu.double(), sigma.double(), offsets))
    return kernel.sums(*arrays, tau, rule, rare, False)[3]


def assert_alike(plain, fast, tau, tolerance):
    """Every number to so many of its digits, or of what it is measured by."""
    unit = {"mean": 1 + tau, "effect": tau, "effect_variance": tau**2}
    for name in plain._fields:
        a, b = getattr(plain, name), getattr(fast, name)
        assert a.dtype == b.dtype and torch.isfinite(b).all(), name
        # in a bag of one patch with mean zero tau does not matter: terms of order one cancel
        least = 1e-8 if name == "by_log_tau" else 1e-12
        size = unit.get(name, 1.0 if name == "log_z" else least + float(a.abs().max()))
        assert torch.allclose(a, b, rtol=tolerance, atol=tolerance * size), name


# --- The same numbers -----------------------------------------------------------------------------
@pytest.mark.parametrize("tau", [1e-3, 0.05, 0.5, 2.0, 10.0])
@pytest.mark.parametrize("shift", [-60.0, -25.0, -9.0, -6.0, -3.5, -2.0, 0.5, 9.0, 60.0, 2000.0])
def test_the_same_moments_as_the_plain_sums(shift, tau):
    plain, fast = both(slide_effect.moments, twin_bags(shift), tau)
    assert_alike(plain, fast, tau, 1e-7)


@pytest.mark.parametrize("tau", [1e-3, 0.05, 0.5, 2.0, 10.0])
@pytest.mark.parametrize("shift", [-60.0, -9.0, -6.0, -2.0, 0.5, 9.0, 60.0, 2000.0])
def test_the_same_gradient_as_the_plain_sums(shift, tau):
    plain, fast = both(slide_effect.gradient, twin_bags(shift), tau)
    for a, b in zip(plain, fast):
        assert torch.allclose(a, b, rtol=1e-7, atol=1e-9)


@settings(max_examples=60, deadline=None)
@given(
    sizes=st.lists(st.integers(1, 300), min_size=1, max_size=8),
    shift=st.floats(-12, 12),
    spread=st.floats(0, 4),
    tau=st.floats(1e-3, 10),
    seed=st.integers(0, 10**6),
)
@example([1], 0.0, 0.0, 1.0, 0)
@example([1], 0.0, 0.0, 1.0, 1)
def test_random_bags(sizes, shift, spread, tau, seed):
    bags = bags_at(shift, sizes, spread, seed)
    plain, fast = both(slide_effect.moments, bags, tau)
    # a step that rounding makes another power of 2^(1/4) changes the last digits of the integral
    assert_alike(plain, fast, tau, 3e-5)
    gamma, log_z = both(slide_effect.gradient, bags, tau)[1]
    assert torch.allclose(gamma, fast.gamma, rtol=1e-8, atol=1e-12)
    assert torch.allclose(log_z, fast.log_z, rtol=1e-8, atol=1e-12)


def test_float32_comes_back_as_float32():
    bags = bags_at(-2.0, dtype=torch.float32)
    plain, fast = both(slide_effect.moments, bags, 0.7)
    assert_alike(plain, fast, 0.7, 2e-6)
    for a, b in zip(*both(slide_effect.gradient, bags, 0.7)):
        assert b.dtype == torch.float32 and torch.allclose(a, b, rtol=2e-6, atol=1e-7)


@pytest.mark.parametrize("shift", [-7.0, -2.0])
def test_no_bag_depends_on_those_beside_it(shift, monkeypatch):
    monkeypatch.setattr(compiled, "WORTH_PATCHES", 0)
    mu, sigma, positive, offsets, row = bags_at(shift)
    whole = slide_effect.moments(mu, sigma, positive, offsets, 0.8, row)
    for b in (2, 5, 7, 11):
        i, j = int(offsets[b]), int(offsets[b + 1])
        alone = slide_effect.moments(
            mu[i:j], sigma[i:j], positive[b : b + 1], torch.tensor([0, j - i]), 0.8
        )
        assert torch.allclose(alone.gamma, whole.gamma[i:j], rtol=1e-13)
        assert torch.allclose(alone.log_z[0], whole.log_z[b], rtol=1e-13)


def test_the_lower_tail_keeps_its_digits():
    z = -np.concatenate([np.linspace(0, 6, 3001), np.linspace(6, 26, 500)])
    found = np.array([tails.below(x) for x in z])
    # z^2 is rounded before its exponential is taken: 26^2 x 2e-16
    assert np.abs(2 * found / erfc(-z) - 1).max() < 5e-13


# --- Their derivatives ----------------------------------------------------------------------------
def slopes(what, bags, tau):
    """Derivatives in mu, sigma and tau of a mixture of all that is found; plain and compiled."""

    def derived(mu, sigma, positive, offsets, tau, row):
        rng = np.random.default_rng(3)
        effect = torch.tensor(tau, dtype=torch.float64)
        leaves = [x.clone().requires_grad_() for x in (mu, sigma, effect)]
        found = what(*leaves[:2], positive, offsets, leaves[2], row)
        weighed = ((x * torch.from_numpy(rng.normal(size=x.shape))).sum() for x in found)
        return torch.autograd.grad(sum(weighed), leaves)

    return both(derived, bags, tau)


def all_but_the_variance(*bags):
    """What does not come from a difference of large numbers."""
    m = slide_effect.moments(*bags)
    return m.mean, m.gamma, m.curvature, m.factors, m.log_z, m.effect, m.by_log_tau


@pytest.mark.parametrize("tau", [0.05, 0.5, 2.0, 10.0])
@pytest.mark.parametrize("shift", [-9.0, -6.0, -3.5, -2.0, 0.5, 9.0, 24.0])
def test_the_same_derivatives_as_autograds(shift, tau):
    bags = bags_at(shift, sizes=(1, 1, 7, 250, 30, 3, 129, 128, 1, 12))
    for a, b in zip(*slopes(all_but_the_variance, bags, tau)):
        assert torch.allclose(a, b, rtol=1e-6, atol=1e-6 * float(a.abs().max()))


@pytest.mark.parametrize("shift", [-6.0, -2.0])
def test_the_same_derivatives_of_the_gradient_alone(shift):
    bags = bags_at(shift, sizes=(1, 5, 70, 3))
    for a, b in zip(*slopes(slide_effect.gradient, bags, 0.6)):
        assert torch.allclose(a, b, rtol=1e-6, atol=1e-7 * float(a.abs().max()))


def test_derivatives_in_one_direction_are_differences(monkeypatch):
    """Not through the plain path: central differences of the compiled sums themselves."""
    monkeypatch.setattr(compiled, "WORTH_PATCHES", 0)
    mu, sigma, positive, offsets, _ = bags_at(-2.0, sizes=(4, 70, 31, 2))
    rng = np.random.default_rng(8)
    d_mu, d_sigma = (torch.from_numpy(rng.normal(size=len(mu))) for _ in range(2))

    def value(x):
        tau = torch.as_tensor(0.8).double() + 0.3 * x
        m = slide_effect.moments(mu + x * d_mu, sigma + 0.1 * x * d_sigma, positive, offsets, tau)
        return (m.curvature * d_sigma).sum() + (m.factors[:, 0] * m.gamma).sum()

    x = torch.zeros((), dtype=torch.float64, requires_grad=True)
    (slope,) = torch.autograd.grad(value(x), x)
    eps = 1e-4
    assert float(value(torch.tensor(eps)) - value(torch.tensor(-eps))) / (2 * eps) == (
        pytest.approx(float(slope), rel=1e-5)
    )


# --- Who is served --------------------------------------------------------------------------------
@pytest.mark.parametrize("tau", [1e-3, 0.5, 10.0])
def test_usual_bags_are_served(tau):
    for shift in (-60.0, -6.0, -2.0, 1.0, 9.0, 200.0):
        assert served(bags_at(shift), tau).all()
    for shift in (-12.0, -6.0, -4.0):
        assert served(bags_at(shift), tau, rare=True).all()


def test_a_bag_beyond_the_range_alone_goes_the_plain_way():
    mu, sigma, positive, offsets, row = bags_at(-2.0)
    mu[offsets[3] + 17] = 2000.0  # h - t would lose its digits
    mu[offsets[9]] = -90.0  # a positive bag of one patch, which underflows
    bags = mu, sigma, positive, offsets, row
    assert np.flatnonzero(~served(bags, 0.5)).tolist() == [3]
    assert 9 in np.flatnonzero(~served(bags, 0.5, rare=True))
    plain, fast = both(slide_effect.moments, bags, 0.5)
    assert_alike(plain, fast, 0.5, 1e-7)
    for a, b in zip(*both(slide_effect.gradient, bags, 0.5)):
        assert torch.allclose(a, b, rtol=1e-7, atol=1e-9)


@pytest.fixture
def calls(monkeypatch):
    """How often the compiled sums are asked for from now on."""
    found, inner = [], kernel.sums
    monkeypatch.setattr(kernel, "sums", lambda *a: found.append(1) or inner(*a))
    return found


def test_few_patches_go_the_plain_way(calls):
    mu, sigma, positive, offsets, row = bags_at(-2.0, sizes=(3, 1, 2))
    assert len(mu) < compiled.WORTH_PATCHES
    for what in (slide_effect.moments, slide_effect.gradient):
        what(mu, sigma, positive, offsets, 0.7, row)
    assert not calls


def test_loops_that_ask_for_them_take_the_widest_vectors():
    """In words that LLVM understands: it asks no processor here."""
    numba = pytest.importorskip("numba")

    @numba.njit
    def hazards(z):
        tails.widest()
        for i in range(len(z)):
            z[i] = tails.tail(z[i])[1]

    hazards(np.zeros(64))
    assert '"prefer-vector-width"="512"' in hazards.inspect_llvm(hazards.signatures[0])


def test_without_numba_torch_does_it(calls, monkeypatch):
    monkeypatch.setattr(compiled, "WORTH_PATCHES", 0)
    monkeypatch.setattr(compiled, "kernels", lambda: None)
    mu, sigma, positive, offsets, row = bags_at(-2.0, sizes=(3, 40, 9))
    found = slide_effect.moments(mu, sigma, positive, offsets, 0.7, row)
    assert not calls and torch.isfinite(found.gamma).all()


def test_large_cohorts_are_compiled(calls):
    bags = bags_at(-2.0)
    assert len(bags[0]) >= compiled.WORTH_PATCHES
    mu, sigma, positive, offsets, row = bags
    slide_effect.gradient(mu, sigma, positive, offsets, 0.7, row)
    assert calls


def test_a_few_bags_near_one_go_the_way_of_all(calls):
    mu, sigma, positive, offsets, row = bags_at(-2.0)
    mu[offsets[1]] = -7.0  # a positive bag of one patch: log Q is nearly 0
    for what in (slide_effect.gradient, slide_effect.moments):
        what(mu, sigma, positive, offsets, 0.7, row)
        assert len(calls) == 2
        calls.clear()


def test_the_same_sums_wherever_the_arrays_lie():
    """Loops run in one of two ways, by where memory is: scratch arrays must keep their places."""
    rng = np.random.default_rng(4)
    mu, sigma = (torch.from_numpy(x) for x in (rng.normal(-3, 2, 900), rng.uniform(0.5, 1, 900)))
    offsets, tau = torch.tensor([0, 130, 477, 900]), torch.tensor(0.8, dtype=torch.float64)

    def found(room):
        kept = [np.empty(k) for k in room]  # moves what is allocated next
        x = mu.clone().requires_grad_()
        positive = torch.tensor([True, False, True])
        made = slide_effect.moments(x, sigma.clone(), positive, offsets, tau)
        (made.log_z.sum() + made.curvature.sum()).backward()
        assert len(kept) == len(room)
        return torch.cat([made.log_z.detach(), made.gamma.detach(), x.grad])

    first = found([])
    for _ in range(60):
        assert torch.equal(found(rng.integers(1, 400, 5)), first)
