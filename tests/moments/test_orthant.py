import functools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles.orthant import (
    batch,
    ep_loop,
    equicorrelated,
    random_problem,
    slide,
    tensors,
    union_equicorrelated,
)
from scipy.special import log_ndtr

from gpmil.moments import orthant, sampling
from gpmil.moments.ep import ep
from gpmil.moments.orthant import expand, log_orthant, slope
from gpmil.moments.sampling import log_union, tilted

PAPER = {"variance": 1.0, "length": 1.0, "mean": 0.0}
WIDE = {"variance": 50.0, "length": 4.0, "mean": -4.0}


# --- EP ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("shift", [-1.2, 0.3, 4.0])
def test_ep_equals_the_loop(shift):
    mu, cov = random_problem(5, seed=11, shift=shift)
    tau, nu, mean, v, log_p, c3, c4 = ep_loop(mu, cov, sweeps=40)
    result = ep(*batch(mu, cov), tol=1e-13)
    for got, want in zip(
        (result.tau, result.nu, result.mean, result.cov, result.log_p, result.c3, result.c4),
        (tau, nu, mean, v, log_p, c3, c4),
        strict=True,
    ):
        np.testing.assert_allclose(got[0].numpy(), want, rtol=1e-8, atol=1e-12)


@pytest.mark.parametrize("setting", [PAPER, WIDE], ids=["paper", "wide"])
@pytest.mark.parametrize("coupling", [0.0, 1.0, 10.0])
def test_ep_converges_in_a_few_iterations(setting, coupling):
    result = ep(*batch(*slide(9, 13, coupling, **setting, seed=1)))
    assert result.converged.all()
    assert int(result.n_iter) <= 15


def test_padding_adds_exactly_nothing():
    bags = [slide(3, 4, 1.0, seed=1), slide(2, 7, 5.0, seed=2), slide(1, 3, 0.5, seed=3)]
    n = 16
    mu, cov = torch.full((3, n), torch.nan).double(), torch.full((3, n, n), torch.inf).double()
    mask = torch.zeros(3, n, dtype=torch.bool)
    for b, (m, s) in enumerate(bags):
        rows = torch.arange(len(m)) + b  # the padding need not be at the end
        mask[b, rows] = True
        mu[b, rows] = torch.from_numpy(m)
        cov[b, rows[:, None], rows] = torch.from_numpy(s)
    together, values = ep(mu, cov, mask), log_orthant(mu, cov, mask)
    assert torch.all(together.tau[~mask] == 0) and torch.all(together.nu[~mask] == 0)
    for b, bag in enumerate(bags):
        alone = ep(*batch(*bag))
        for name in ("log_p", "c3", "c4", "error"):
            assert float(getattr(together, name)[b]) == pytest.approx(
                float(getattr(alone, name)[0]), rel=1e-9, abs=1e-13
            )
        assert float(values.log_p[b]) == pytest.approx(
            float(log_orthant(*batch(*bag)).log_p[0]), rel=1e-9
        )


def test_gradient_of_plain_ep_in_the_mean():
    mu, cov = slide(3, 4, 2.0, seed=5)
    result = ep(*batch(mu, cov), tol=1e-12)
    gradient = (result.nu - result.tau * result.mean)[0].numpy()
    for i in (0, 7):
        step = np.zeros(len(mu))
        step[i] = 1e-5
        up, down = (ep(*batch(mu + d, cov), tol=1e-12).log_p[0] for d in (step, -step))
        assert gradient[i] == pytest.approx(float(up - down) / 2e-5, rel=1e-6)


# --- the engine --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("coupling", "bar"), [(0.0, 0.005), (0.5, 0.01), (1.0, 0.01), (10.0, 0.05)]
)
@pytest.mark.parametrize("setting", [PAPER, WIDE], ids=["paper", "wide"])
@pytest.mark.parametrize("shape", [(2, 5), (10, 19)])
def test_engine_agrees_with_the_tilted_sampler(coupling, bar, setting, shape):
    mu, cov = slide(*shape, coupling, **setting, seed=3)
    result = log_orthant(*batch(mu, cov))
    reference, error = tilted(*tensors(mu, cov), n_points=4096)
    off = abs(float(result.log_p) - reference)
    assert off <= bar + 3 * error
    assert off <= max(0.01, 2 * float(result.error)) + 3 * error


def test_error_estimate_covers_random_bags():
    rng = np.random.default_rng(0)
    exceeded = []
    for seed in range(100):
        coupling, setting = rng.choice([0, 0.5, 1, 5, 10]), (PAPER, WIDE)[seed % 2]
        mu, cov = slide(int(rng.integers(1, 6)), int(rng.integers(3, 12)), coupling, seed=seed,
                        **setting)  # fmt: skip
        result = log_orthant(*batch(mu, cov))
        reference, spread = tilted(*tensors(mu, cov), n_points=512)
        off = abs(float(result.log_p) - reference) - 3 * spread
        exceeded.append(off > 2 * float(result.error) + 0.002)
    assert np.mean(exceeded) <= 0.05


@pytest.mark.parametrize("rho", [0.1, 0.5])
@pytest.mark.parametrize("n", [2, 15, 60])
def test_engine_agrees_with_quadrature(n, rho):
    mu = np.linspace(-2.0, 1.5, n)
    result = log_orthant(*batch(mu, rho + (1 - rho) * np.eye(n)))
    off = abs(float(result.log_p) - equicorrelated(mu, rho))
    assert off <= 2 * float(result.error) + 0.002


@pytest.mark.parametrize("n", [1, 2, 90])
@pytest.mark.parametrize("scale", [1.0, 40.0, 1e6])
@pytest.mark.parametrize("centre", [-1.3, 0.4])
def test_engine_is_exact_for_independent_coordinates(n, scale, centre):
    rng = np.random.default_rng(n)
    mu, variance = scale * (rng.standard_normal(n) + centre), rng.uniform(0.2, 4, n)
    want = log_ndtr(-mu / np.sqrt(variance)).sum()
    result = log_orthant(*batch(mu, np.diag(variance)))
    assert float(result.log_p) == pytest.approx(want, rel=1e-10)
    # EP itself is exact there too
    assert float(ep(*batch(mu, np.diag(variance))).log_p) == pytest.approx(
        want, rel=1e-10, abs=1e-10
    )


def test_left_tail():
    mu = np.linspace(4.0, 12.0, 80)
    for rho in (0.02, 0.3):
        result = log_orthant(*batch(3 * mu, rho + (1 - rho) * np.eye(80)))
        reference = equicorrelated(3 * mu, rho)
        assert reference < -1000
        assert abs(float(result.log_p) - reference) < 0.02
    slide_mu, cov = slide(8, 9, 5.0, seed=4)
    deep = log_orthant(*batch(slide_mu + 25, cov))
    reference, error = tilted(*tensors(slide_mu + 25, cov))
    assert reference < -1000
    assert abs(float(deep.log_p) - reference) < 0.02 + 3 * error
    assert float(deep.log_1mp) < 0
    assert log_orthant(*batch(1e6 + slide_mu, cov)).log_p.isfinite()


@pytest.mark.parametrize("rho", [0.1, 0.5, 0.9])
@pytest.mark.parametrize("first", [-2.5, -4.0, -6.0, -9.0, -30.0])
def test_right_tail(rho, first):
    mu = np.linspace(first, first - 2, 40)
    result = log_orthant(*batch(mu, rho + (1 - rho) * np.eye(40)))
    reference = union_equicorrelated(mu, rho)
    assert abs(float(result.log_1mp) - reference) < 0.02
    assert abs(float(result.log_1mp) - reference) < 4 * float(result.error_1mp) + 1e-6
    assert float(result.log_p) == pytest.approx(np.log1p(-np.exp(reference)), rel=0.02)
    assert float(result.log_p) < 0


def test_right_tail_of_a_slide():
    mu, cov = slide(6, 7, 5.0, **WIDE, seed=6)
    mu = mu - 12
    value, error = log_union(*tensors(mu, cov))
    longer = np.mean([np.exp(log_union(*tensors(mu, cov), seed=s)[0]) for s in range(1, 9)])
    assert value < -9
    assert value == pytest.approx(np.log(longer), abs=4 * error)
    assert float(log_orthant(*batch(mu, cov)).log_1mp) == value


@settings(max_examples=25, deadline=None)
@given(
    n=st.integers(1, 9),
    seed=st.integers(0, 10_000),
    shift=st.floats(-45, 45),
    scale=st.floats(0.01, 100),
)
def test_probabilities_stay_inside_zero_and_one(n, seed, shift, scale):
    mu, cov = random_problem(n, seed, shift)
    result = log_orthant(*batch(scale * mu, scale**2 * cov))
    assert result.log_p.isfinite() and result.log_1mp.isfinite() and result.error.isfinite()
    assert float(result.log_1mp) < 0 or float(result.log_p) < -700
    assert float(result.log_p) < 0 or float(result.log_1mp) < -700
    total = torch.logaddexp(result.log_p, result.log_1mp)
    assert float(total) == pytest.approx(0, abs=1e-9)
    # scale-free: only m < 0 matters
    plain = log_orthant(*batch(mu, cov))
    assert float(result.log_p) == pytest.approx(float(plain.log_p), rel=1e-5, abs=1e-6)


def test_adding_a_coordinate_lowers_the_probability():
    mu, cov = slide(4, 8, 1.0, seed=9)
    values = [float(log_orthant(*batch(mu[:n], cov[:n, :n])).log_p) for n in range(1, 33)]
    assert np.all(np.diff(values) < 0)


def test_without_convergence_the_sampler_answers(monkeypatch):
    mu, cov = slide(5, 8, 10.0, seed=2)
    monkeypatch.setattr(orthant, "LARGE", 100)  # in a batch, by ep
    good = log_orthant(*batch(mu, cov))
    for module in (orthant, sampling):
        monkeypatch.setattr(module, "ep", functools.partial(ep, max_iter=1))
    result = log_orthant(*batch(mu, cov))
    assert float(result.error) != float(good.error)
    assert abs(float(result.log_p - good.log_p)) < 4 * float(result.error) + 0.03


def test_engine_names_the_bag_that_is_bad():
    mu, cov = torch.zeros(3, 2).double(), torch.eye(2).double().repeat(3, 1, 1)
    mu[2, 1] = torch.nan
    with pytest.raises(ValueError, match="bag 2"):
        log_orthant(mu, cov)
    mask = torch.tensor([[True, True], [False, False], [True, False]])
    with pytest.raises(ValueError, match="bag 1"):
        log_orthant(mu, cov, mask)
    cov[1, 0, 0] = -0.5
    with pytest.raises(ValueError, match="coordinate 0 of bag 1"):
        log_orthant(torch.zeros(3, 2).double(), cov)
    cov[1] = torch.tensor([[1.0, 3.0], [3.0, 1.0]])
    with pytest.raises(ValueError, match="bag 1"):
        log_orthant(torch.zeros(3, 2).double(), cov)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_gpu_agrees_with_cpu():
    for shift in (-6.0, 0.0, 30.0):
        mu, cov = slide(8, 9, 5.0, seed=4)
        here = log_orthant(*batch(mu + shift, cov))
        there = log_orthant(*(x.cuda() for x in batch(mu + shift, cov)))
        assert float(there.log_p.cpu()) == pytest.approx(float(here.log_p), rel=1e-6)
        assert float(there.log_1mp.cpu()) == pytest.approx(float(here.log_1mp), rel=1e-4)
        sample = tilted(*(x.cuda() for x in tensors(mu + shift, cov)))
        assert sample[0] == pytest.approx(tilted(*tensors(mu + shift, cov))[0], rel=1e-6)


# --- How log P changes with the mean --------------------------------------------------------------


def test_expansion_of_independent_patches_is_exact():
    mu = torch.tensor([[0.4, -1.3, -60.0]]).double()
    variance = torch.tensor([1.7, 0.6, 2.0]).double()
    G = torch.tensor([[0.3, -0.2], [1.1, 0.5], [0.1, 0.9]]).double()[None]
    found = expand(mu, torch.diag(variance)[None], torch.ones(1, 3, dtype=torch.bool), G)

    sd = variance.sqrt()
    t = mu[0] / sd
    # d log Phi(-t) / dt = -h, d2 = -h (h - t), h = phi / Phi(-t)
    h = torch.exp(-t * t / 2 - np.log(2 * np.pi) / 2 - torch.special.log_ndtr(-t))
    assert float(found.value.log_p) == pytest.approx(float(torch.special.log_ndtr(-t).sum()))
    np.testing.assert_allclose(found.slope[0], G[0].mT @ (-h / sd), rtol=1e-9)
    bent = G[0].mT @ torch.diag(h * (h - t) / variance) @ G[0]
    np.testing.assert_allclose(found.bend[0], bent, rtol=1e-9)


@pytest.mark.parametrize("coupling", [0.5, 10.0])
def test_expansion_against_differences(coupling):
    mu, cov = (torch.from_numpy(a)[None] for a in slide(5, 6, coupling))
    mask = torch.ones(1, 33, dtype=torch.bool)
    mask[:, 30:] = False
    mu = torch.nn.functional.pad(mu + 0.7, (0, 3), value=np.nan)
    cov = torch.nn.functional.pad(cov, (0, 3, 0, 3), value=np.nan)
    G = torch.from_numpy(np.random.default_rng(0).normal(size=(1, 33, 2)))
    G[:, 30:] = 0.0
    found = expand(mu, cov, mask, G)
    assert torch.equal(found.value.log_p, log_orthant(mu, cov, mask).log_p)
    np.testing.assert_allclose(slope(mu, cov, mask, G), found.slope, rtol=1e-12)
    h, values = 0.02, {}
    for x in ((0, 0), (1, 0), (-1, 0), (0, 1), (0, -1)):
        moved = (mu + h * (G @ torch.tensor(x).double()))[0, :30]
        values[x] = float(ep(moved[None], cov[:, :30, :30], tol=1e-9).log_p)
    for k, (up, down) in enumerate((((1, 0), (-1, 0)), ((0, 1), (0, -1)))):
        first = (values[up] - values[down]) / (2 * h)
        # EP's own second derivative also sees the sites move
        second = -(values[up] + values[down] - 2 * values[0, 0]) / h**2
        assert float(found.slope[0, k]) == pytest.approx(first, rel=0.01)
        assert float(found.bend[0, k, k]) == pytest.approx(second, rel=0.15)
