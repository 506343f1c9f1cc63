"""EP of one bag at a time on a CPU against EP of batches, its twin in torch."""

import mpmath as mp
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gpmil.fast import compiled
from gpmil.moments import ep, ep_bag, orthant, sampling
from gpmil.moments import sites as plain_sites

pytest.importorskip("numba", reason="pip install 'gpmil[fast]'")
sites = pytest.importorskip("gpmil.fast.sites")


def bag(n, seed, spread=1.0, shift=-1.2, reach=1.3):
    """Patches at random places whose covariance falls with their distance."""
    rng = np.random.default_rng(seed)
    place = torch.from_numpy(rng.uniform(0, n**0.5, (n, 2)))
    scale = torch.from_numpy(rng.uniform(0.6, 1.7, n))
    cov = torch.exp(-torch.cdist(place, place) / reach) + 0.2 * torch.eye(n).double()
    cov = scale[:, None] * cov * scale
    return torch.from_numpy(shift + spread * rng.standard_normal(n)), cov


def twin(mu, cov, tol):
    return ep.ep(mu[None], cov[None], tol=tol)


# --- The same numbers -----------------------------------------------------------------------------
@settings(max_examples=40, deadline=None)
@given(
    n=st.integers(1, 70),
    seed=st.integers(0, 10**6),
    spread=st.sampled_from([0.0, 0.7, 2.9]),
    shift=st.sampled_from([-6.3, -1.2, 0.4, 7.1]),
    reach=st.sampled_from([0.01, 1.3, 9.7]),
)
def test_equals_the_batch_at_a_tight_tolerance(n, seed, spread, shift, reach):
    mu, cov = bag(n, seed, spread, shift, reach)
    found, expected = ep_bag.log_p(mu, cov, 1e-9), twin(mu, cov, 1e-9)
    if found is None:  # deep in the tail, on the way or at the end
        assert float((mu / cov.diagonal().sqrt()).max()) > 5
        return
    assert found.converged and bool(expected.converged)
    for name in ("log_p", "c3", "c4", "error"):
        value = float(getattr(expected, name)[0])
        assert getattr(found, name) == pytest.approx(value, rel=2e-7, abs=1e-9), name


def test_the_tolerance_in_use_is_near_the_fixed_point():
    for seed in range(5):
        mu, cov = bag(140, seed)
        found, expected = ep_bag.log_p(mu, cov, orthant.TOLERANCE), twin(mu, cov, 1e-10)
        off = abs(found.log_p + found.c3 - float(expected.log_p + expected.c3))
        assert off < 6e-4
        assert found.n_iter <= 5


def test_a_bag_does_not_depend_on_its_batch(monkeypatch):
    monkeypatch.setattr(orthant, "LARGE", 0)
    bags = [bag(n, n) for n in (3, 41, 17)]
    n = 41
    mu, cov = torch.full((3, n), 9.0).double(), torch.full((3, n, n), 4.0).double()
    mask = torch.zeros(3, n, dtype=torch.bool)
    for b, (m, S) in enumerate(bags):
        mu[b, : len(m)], cov[b, : len(m), : len(m)], mask[b, : len(m)] = m, S, True
    together = orthant.log_orthant(mu, cov, mask)
    for b, (m, S) in enumerate(bags):
        alone = orthant.log_orthant(m[None], S[None])
        assert float(alone.log_p) == float(together.log_p[b])
        assert float(alone.error) == float(together.error[b])


def test_padding_may_stand_anywhere(monkeypatch):
    monkeypatch.setattr(orthant, "LARGE", 0)
    m, S = bag(9, 3)
    order = torch.tensor([0, 9, 1, 2, 3, 10, 4, 5, 6, 7, 8])
    mu, cov = torch.full((11,), 5.0).double(), torch.full((11, 11), 2.0).double()
    mu[:9], cov[:9, :9] = m, S
    mask = torch.arange(11) < 9
    moved = orthant.log_orthant(mu[order][None], cov[order][:, order][None], mask[order][None])
    assert float(moved.log_p) == pytest.approx(float(orthant.log_orthant(m[None], S[None]).log_p))


def test_small_and_large_bags_together(monkeypatch):
    mixed = [bag(n, 7 * n) for n in (12, 30)]
    mu, cov = torch.zeros(2, 30).double(), torch.eye(30).double().repeat(2, 1, 1)
    mask = torch.arange(30) < torch.tensor([[12], [30]])
    for b, (m, S) in enumerate(mixed):
        mu[b, : len(m)], cov[b, : len(m), : len(m)] = m, S
    plain = orthant.log_orthant(mu, cov, mask)
    monkeypatch.setattr(orthant, "LARGE", 20)
    split = orthant.log_orthant(mu, cov, mask)
    assert float(split.log_p[0]) == pytest.approx(float(plain.log_p[0]), abs=1e-12)
    assert float(split.log_p[1]) == pytest.approx(float(plain.log_p[1]), abs=2e-4)


# --- The parts ------------------------------------------------------------------------------------
def test_cumulants_of_both_twins_against_sixty_digits():
    t = np.concatenate([np.linspace(-30, 8, 77), np.linspace(8, 30, 23)])
    expected = np.array([cumulants_mp(x) for x in t]).T
    # both cancel as t^6: here is the room that the fourth needs, the third loses less
    tolerance = 1e-11 + 4e-12 * t.clip(min=0) ** 6
    for found in (sites.cumulants(t), plain_sites.cumulants(torch.from_numpy(t)[None])):
        for k, value in zip(found, expected):
            assert (np.abs(np.ravel(k) - value) <= tolerance * np.abs(value) + 1e-12).all()


def cumulants_mp(t, digits=60):
    """Third and fourth cumulant of N(t, 1) given m < 0, over its standard deviation^3 and ^4."""
    with mp.workdps(digits):
        x = mp.mpf(float(t))
        h = mp.exp(-x * x / 2) / mp.sqrt(2 * mp.pi) / (mp.erfc(x / mp.sqrt(2)) / 2)
        r1 = h * (h - x)
        r2 = r1 * (2 * h - x) - h
        r3 = r2 * (2 * h - x) + r1 * (2 * r1 - 2)
        return float(-r2 / (1 - r1) ** mp.mpf(1.5)), float(-r3 / (1 - r1) ** 2)


def test_sums_over_pairs_equal_the_twins():
    n = 23
    rng = np.random.default_rng(4)
    a = rng.standard_normal((n, 2 * n))
    v = torch.from_numpy(a @ a.T)
    t = torch.from_numpy(rng.normal(-0.5, 1.5, n))
    cavity = plain_sites.Cavity(t[None], torch.ones(1, n).double())
    expected = ep.corrections(v[None], cavity, torch.ones(1, n, dtype=torch.bool))
    c3, size3, c4, size4 = sites.paired(v.numpy(), *sites.cumulants(t.numpy()))
    found = c3 / 12, c4 / 48, size4 / 48 + ep.SHARE_OF_C3 * size3 / 12
    assert found == pytest.approx([float(x) for x in expected], rel=1e-10)


@pytest.mark.parametrize("jolt", [0.0, 40.0])
def test_acceleration_equals_the_twins(jolt):
    n = 6
    rng = np.random.default_rng(2)
    A = 0.4 * rng.standard_normal((2 * n, 2 * n)) / n**0.5
    goal = rng.uniform(1.0, 2.0, 2 * n)
    unit = rng.uniform(0.5, 2.0, 2 * n)
    ours = ep_bag.Anderson(unit, sites)
    x = goal + 0.3
    y = torch.from_numpy(x * unit)[None]
    twins = plain_sites.Anderson(y)
    for k in range(9):
        # a jump makes a precision negative, and both start afresh
        f = A @ (x - goal) - (x - goal) + (jolt if k == 4 else 0.0)
        x = ours.step(x, f)
        y = twins.step(y, torch.from_numpy(f * unit)[None], n)
        assert np.allclose(x * unit, y[0].numpy(), rtol=1e-8, atol=1e-9)


# --- Where it does not apply ----------------------------------------------------------------------
def test_the_deep_tail_goes_to_the_batch(monkeypatch):
    monkeypatch.setattr(orthant, "LARGE", 0)
    mu, cov = bag(8, 1, shift=90.0)
    assert ep_bag.log_p(mu, cov, 1e-6) is None
    found = orthant.log_orthant(mu[None], cov[None])
    assert float(found.log_p) < -1000
    value, error = sampling.tilted(mu, cov)
    assert float(found.log_p) == pytest.approx(value, abs=0.02 + 3 * error)


def test_without_numba_the_batch(monkeypatch):
    mu, cov = bag(120, 5)
    fast = orthant.log_orthant(mu[None], cov[None])
    monkeypatch.setattr(compiled, "sites", lambda: None)
    assert ep_bag.log_p(mu, cov, 1e-6) is None
    plain = orthant.log_orthant(mu[None], cov[None])
    assert float(fast.log_p) == pytest.approx(float(plain.log_p), abs=2e-4)


def test_no_covariance_is_said(monkeypatch):
    monkeypatch.setattr(orthant, "LARGE", 0)
    cov = torch.eye(4).double()
    cov[0, 1] = cov[1, 0] = 3.0
    with pytest.raises(ValueError, match="positive semi-definite"):
        orthant.log_orthant(torch.full((1, 4), 1.0).double(), cov[None])


def test_iterations_that_run_out_are_told():
    mu, cov = bag(30, 8)
    found = ep_bag.log_p(mu, cov, 1e-12, max_iter=2)
    assert found.n_iter == 2 and not found.converged
