"""EP's log probability, with a slide effect and without."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from oracles.orthant import slide
from scipy.special import log_ndtr

from gpmil.moments import smooth_orthant
from gpmil.moments.ep import ep
from gpmil.moments.smooth_orthant import gauss_rule, log_orthant_ep


def gaussian_bags(n=6, seed=0, shift=-0.5):
    """Two bags, the second one padded."""
    rng = np.random.default_rng(seed)
    root = rng.normal(size=(2, n, n))
    cov = torch.from_numpy(root @ np.swapaxes(root, 1, 2) / n + 0.4 * np.eye(n))
    mask = torch.ones(2, n, dtype=torch.bool)
    mask[1, n - 2 :] = False
    return torch.from_numpy(rng.normal(size=(2, n)) + shift), cov, mask


def test_what_stands_in_the_padding_does_not_matter():
    mu, cov, mask = gaussian_bags()
    value = log_orthant_ep(mu, cov, mask)
    other_mu, other_cov = mu.clone(), cov.clone()
    other_mu[1, 4:] = 50.0
    other_cov[1, 4:] *= -3.0
    other_cov[1, :, 4:] = 7.0
    assert torch.allclose(log_orthant_ep(other_mu, other_cov, mask), value, atol=1e-12)
    alone = log_orthant_ep(mu[1:, :4], cov[1:, :4, :4], mask[1:, :4])
    assert torch.allclose(alone, value[1:], atol=1e-9)


def test_one_coordinate_and_independent_ones_are_exact():
    mu = torch.tensor([[0.4, -1.1, 2.0]], dtype=torch.float64)
    cov = torch.diag_embed(torch.tensor([[1.0, 0.3, 2.0]], dtype=torch.float64))
    mask = torch.ones(1, 3, dtype=torch.bool)
    expected = log_ndtr(-mu.numpy() / np.sqrt([1.0, 0.3, 2.0]))
    assert log_orthant_ep(mu, cov, mask)[0] == pytest.approx(expected.sum(), rel=1e-9)
    for i in range(3):
        one = log_orthant_ep(mu[:, i : i + 1], cov[:, i : i + 1, i : i + 1], mask[:, :1])
        assert one[0] == pytest.approx(expected[0, i], rel=1e-9)


def test_the_bound_takes_over(monkeypatch):
    """log P never exceeds the smallest log P(m_i < 0)."""
    mu, cov, mask = gaussian_bags()
    nothing = SimpleNamespace(log_p=torch.zeros(2).double())
    monkeypatch.setattr(smooth_orthant, "ep", lambda *args, **kwargs: nothing)
    t = mu / cov.diagonal(dim1=-2, dim2=-1).sqrt()
    worst = torch.where(mask, t, -math.inf).amax(-1)
    assert np.allclose(log_orthant_ep(mu, cov, mask), log_ndtr(-worst.numpy()), rtol=1e-12)


# --- With a slide effect ----------------------------------------------------------------------


def summed(mu, cov, effect):
    """log of the sum of N(s; 0, tau^2) P(all m + s < 0) over 150 s, plain EP to its end at each."""
    s = torch.linspace(-9 * effect - 4, 6.5 * effect, 150, dtype=torch.float64)
    f = ep(mu + s[:, None], cov.expand(len(s), -1, -1), tol=1e-9).log_p
    log_n = -((s / effect) ** 2) / 2 - math.log(effect * math.sqrt(2 * math.pi))
    return float(torch.logsumexp(f + log_n, 0) + (s[1] - s[0]).log())


@pytest.mark.parametrize(("shift", "effect"), [(-1.2, 0.4), (0.7, 1.3), (-1.2, 4.0)])
def test_equals_the_sum_over_the_effect(shift, effect):
    mu, cov = (torch.from_numpy(x) for x in slide(4, 7, 1.0, variance=6.0, length=3.0, seed=4))
    mu = mu + shift
    mask = torch.ones(1, len(mu), dtype=torch.bool)
    found = float(log_orthant_ep(mu[None], cov[None] + effect**2, mask, effect))
    assert found == pytest.approx(summed(mu, cov, effect), abs=1e-3)


def test_a_small_effect_is_none():
    mu, cov, mask = gaussian_bags()
    without, found = log_orthant_ep(mu, cov, mask), log_orthant_ep(mu, cov + 1e-8, mask, 1e-4)
    assert torch.allclose(found, without, atol=1e-5)


def test_one_patch_has_the_variance_of_both():
    mu = torch.tensor([[0.4]], dtype=torch.float64)
    mask = torch.ones(1, 1, dtype=torch.bool)
    found = log_orthant_ep(mu, torch.tensor([[[0.8 + 2.25]]]).double(), mask, 1.5)
    assert float(found) == pytest.approx(log_ndtr(-0.4 / math.sqrt(3.05)), abs=1e-5)


def test_gauss_rule_integrates_polynomials():
    rng = np.random.default_rng(2)
    s = torch.from_numpy(np.sort(rng.normal(3.0, 2.0, (2, 17)), -1))
    w = torch.from_numpy(rng.dirichlet(np.ones(17), 2))
    rule = gauss_rule(s, w, 3)
    for power in range(6):
        expected = (w * s**power).sum(-1)
        assert torch.allclose((rule.weight * rule.s**power).sum(-1), expected, rtol=1e-10)
