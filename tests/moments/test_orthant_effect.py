"""P(all m < 0) of patches that share an effect, against dense sums over its values."""

import numpy as np
import pytest
import torch
from oracles.orthant import batch, equicorrelated, slide
from scipy.interpolate import CubicSpline
from scipy.special import log_ndtr, logsumexp

from gpmil.moments import effect_terms, ep_bag, orthant, orthant_effect
from gpmil.moments.ep import ep
from gpmil.moments.orthant import expand, log_orthant, slope

# mean, variance and length as in test_orthant.py; none symmetric about zero
SETTINGS = [
    {"variance": 1.0, "length": 1.0, "mean": -0.9},
    {"variance": 6.0, "length": 3.0, "mean": -2.1},
]


def summed(mu, cov, effect, nodes=120):
    """log of the sum of N(s; 0, tau^2) P(all m + s < 0), EP to its end at every s."""
    # in the left tail patches pull it far down, though its deviation is small
    s = np.linspace(-8 * effect - 6 / (1 + effect), 6.5 * effect, nodes)
    at = ep(
        torch.from_numpy(mu + s[:, None]), torch.from_numpy(cov).expand(nodes, -1, -1), tol=1e-9
    )
    f = (at.log_p + at.c3).numpy()
    dense = np.linspace(s[0], s[-1], 4001)
    # log P falls from zero like an exponential, then like a parabola: smooth enough to go between
    f = CubicSpline(s, f)(dense)
    log_n = -((dense / effect) ** 2) / 2 - np.log(effect * np.sqrt(2 * np.pi))
    return logsumexp(f + log_n) + np.log(dense[1] - dense[0])


def with_effect(mu, cov, effect):
    return log_orthant(*batch(mu, cov + effect**2), effect=effect)


@pytest.mark.parametrize("setting", SETTINGS, ids=["paper", "wide"])
@pytest.mark.parametrize("effect", [0.3, 1.1, 4.0])
@pytest.mark.parametrize("shape", [(1, 2), (3, 7), (6, 11)])
def test_equals_the_sum_over_the_effect(shape, effect, setting):
    mu, cov = slide(*shape, 1.0, **setting, seed=4)
    found, exact = with_effect(mu, cov, effect), summed(mu, cov, effect)
    off = abs(float(found.log_p) - exact)
    assert abs(np.exp(float(found.log_p)) - np.exp(exact)) < 4e-4
    # in the far left tail s* lies away from the mode: log P = -70.7 is off by .04 there
    assert off < 2 * float(found.error) + (1e-4 if exact > -20 else 0.06)
    assert float(found.error) < 0.02


@pytest.mark.parametrize("effect", [0.7, 3.0])
def test_one_by_one_and_together_are_one(effect, monkeypatch):
    # what a CPU does with large bags, and what a GPU does with all of them
    mu, cov = slide(8, 13, 1.0, **SETTINGS[1], seed=2)
    one = with_effect(mu, cov, effect)
    monkeypatch.setattr(orthant, "LARGE", 10**6)
    many = with_effect(mu, cov, effect)
    assert float(one.log_p) == pytest.approx(float(many.log_p), abs=2e-4)
    assert float(one.error) == pytest.approx(float(many.error), rel=0.05)


def test_the_compiled_sum_is_the_plain_one():
    pytest.importorskip("numba", reason="pip install 'gpmil[fast]'")
    mu, cov = slide(5, 9, 1.0, **SETTINGS[0], seed=6)
    mu, cov, s = torch.from_numpy(mu - 1.3)[None], torch.from_numpy(cov)[None], torch.tensor([-1.3])
    bag, own = ep_bag.settled(mu[0], cov[0], tol=1e-8)
    quick, found = orthant_effect.quick(bag, own, float(s), 1.7), bag.as_batch(own)
    at = effect_terms.at_one(found, mu, cov, torch.ones_like(mu, dtype=torch.bool), s.double())
    plain = orthant_effect.integrate(orthant_effect.Profile(at, effect_terms.dense(found.cov)), 1.7)
    assert quick.log_p == pytest.approx(float(plain.log_p), rel=1e-9)
    assert quick.error == pytest.approx(float(plain.error), rel=1e-6)
    assert float(plain.weight.sum()) == pytest.approx(1)


def test_independent_patches_have_one_integral():
    rng = np.random.default_rng(3)
    mu, variance = rng.normal(-1.4, 0.8, 40), rng.uniform(0.5, 2.0, 40)
    s = np.linspace(-60, 40, 40001)
    for effect in (0.02, 0.9, 6.0):
        q = sum(log_ndtr(-(m + s) / np.sqrt(v)) for m, v in zip(mu, variance))
        log_n = -((s / effect) ** 2) / 2 - np.log(effect * np.sqrt(2 * np.pi))
        exact = logsumexp(q + log_n) + np.log(s[1] - s[0])
        found = with_effect(mu, np.diag(variance), effect)
        assert float(found.log_p) == pytest.approx(exact, abs=2e-5)


@pytest.mark.parametrize("effect", [1e-3, 0.1, 10.0])
@pytest.mark.parametrize("shift", [-30.0, -4.0, 3.0, 40.0])
def test_far_tails_keep_their_limits(effect, shift):
    mu, cov = slide(4, 5, 1.0, **SETTINGS[0], seed=1)
    found = with_effect(mu + shift, cov, effect)
    assert all(bool(x.isfinite().all()) for x in (found.log_p, found.log_1mp, found.error))
    worst = (mu + shift) / np.sqrt(np.diag(cov) + effect**2)
    assert float(found.log_p) <= log_ndtr(-worst).min() + 1e-9
    assert float(found.log_1mp) <= min(0, logsumexp(log_ndtr(worst))) + 0.02
    if effect == 1e-3:
        without = log_orthant(*batch(mu + shift, cov))
        assert float(found.log_p) == pytest.approx(float(without.log_p), rel=1e-3, abs=1e-3)


def test_padding_adds_nothing():
    bags = [slide(3, 4, 1.0, seed=1, mean=-1.0), slide(1, 3, 0.5, seed=3, mean=-0.4)]
    mu, cov = torch.full((2, 13), torch.nan).double(), torch.full((2, 13, 13), torch.nan).double()
    mask = torch.zeros(2, 13, dtype=torch.bool)
    for b, (m, S) in enumerate(bags):
        mask[b, : len(m)] = True
        mu[b, : len(m)], cov[b, : len(m), : len(m)] = (
            torch.from_numpy(m),
            torch.from_numpy(S + 1.7**2),
        )
    together = log_orthant(mu, cov, mask, effect=1.7)
    for b, bag in enumerate(bags):
        alone = with_effect(*bag, 1.7)
        assert float(together.log_p[b]) == pytest.approx(float(alone.log_p), rel=1e-8)
        assert float(together.error[b]) == pytest.approx(float(alone.error), rel=1e-6)


# --- How log P changes with the mean --------------------------------------------------------------


def differences(log_p, mu, G, h):
    """log P, its slope and minus its second derivatives at mu + G x, x = (0, 0)."""
    at = {(a, b): log_p(mu + h * G @ np.array([a, b])) for a in (-1, 0, 1) for b in (-1, 0, 1)}
    first = np.array([at[1, 0] - at[-1, 0], at[0, 1] - at[0, -1]]) / (2 * h)
    mixed = (at[1, 1] + at[-1, -1] - at[1, -1] - at[-1, 1]) / 4
    own = [at[1, 0] + at[-1, 0] - 2 * at[0, 0], at[0, 1] + at[0, -1] - 2 * at[0, 0]]
    return at[0, 0], first, -np.array([[own[0], mixed], [mixed, own[1]]]) / h**2


def expanded(mu, cov, G, effect):
    given = (*batch(mu, cov + effect**2), torch.ones(1, len(mu), dtype=torch.bool))
    found = expand(*given, torch.from_numpy(G)[None], effect=effect)
    assert torch.equal(found.value.log_p, log_orthant(*given, effect=effect).log_p)
    cheap = slope(*given, torch.from_numpy(G)[None], effect=effect)
    return (float(found.value.log_p), *(x[0].numpy() for x in (*found[1:], cheap)))


def assert_close(found, exact, first, second):
    _, slope, bend, cheap = found
    size = np.abs(exact[1]).max()
    assert np.abs(slope - exact[1]).max() < first * size
    assert np.abs(cheap - slope).max() < 1e-3 * size
    assert np.abs(bend - exact[2]).max() < second * np.abs(exact[2]).max()


@pytest.mark.parametrize("effect", [0.3, 1.1, 3.0])
@pytest.mark.parametrize("shift", [-3.1, 0.0])
def test_expansion_of_equally_correlated_patches_is_that_of_the_integral(effect, shift):
    rng, rho = np.random.default_rng(8), 0.4
    mu, G = rng.normal(-0.8 + shift, 0.5, 9), 0.4 * rng.normal(0.3, 1, (9, 2))
    sd = np.sqrt(1 + effect**2)
    exact = differences(lambda m: equicorrelated(m / sd, (rho + effect**2) / sd**2), mu, G, 0.05)
    found = expanded(mu, rho + (1 - rho) * np.eye(9), G, effect)
    assert np.exp(found[0]) == pytest.approx(np.exp(exact[0]), abs=2e-3)
    assert_close(found, exact, 0.03, 0.1)


@pytest.mark.parametrize("effect", [0.3, 3.0])
def test_expansion_of_coupled_patches_is_that_of_the_sum(effect):
    mu, cov = slide(3, 5, 1.0, **SETTINGS[1], seed=4)
    G = 0.3 * np.random.default_rng(1).normal(0.4, 1, (15, 2))
    exact = differences(lambda m: summed(m, cov, effect), mu, G, 0.1)
    assert_close(expanded(mu, cov, G, effect), exact, 0.03, 0.1)


def test_expansion_without_an_effect_is_the_limit():
    mu, cov = slide(3, 5, 1.0, **SETTINGS[0], seed=4)
    G = 0.3 * np.random.default_rng(1).normal(0.4, 1, (15, 2))
    found, none = expanded(mu, cov, G, 1e-4), expanded(mu, cov, G, 0.0)
    for a, b in zip(found, none):
        assert np.abs(a - b).max() < 6e-3 * np.abs(b).max()  # sites are found to 3e-3


def test_padding_adds_nothing_to_an_expansion():
    mu, cov = batch(*slide(2, 3, 1.0, seed=1, mean=-1.0))
    G = torch.from_numpy(np.random.default_rng(2).normal(size=(1, 6, 2)))
    alone = expand(mu, cov + 4, torch.ones(1, 6, dtype=torch.bool), G, effect=2.0)
    mask = torch.tensor([[True] * 6 + [False] * 2])
    mu = torch.nn.functional.pad(mu, (0, 2), value=np.nan)
    cov = torch.nn.functional.pad(cov, (0, 2, 0, 2), value=np.nan)
    G = torch.nn.functional.pad(G, (0, 0, 0, 2))
    together = expand(mu, cov + 4, mask, G, effect=2.0)
    for a, b in zip(together[1:], alone[1:]):
        np.testing.assert_allclose(a, b, rtol=1e-8)
    np.testing.assert_allclose(slope(mu, cov + 4, mask, G, effect=2.0), alone.slope, rtol=1e-3)
