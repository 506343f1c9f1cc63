"""EP's log probability and its derivatives, which learning climbs on."""

import math

import numpy as np
import pytest
import torch
from oracles import tuning as naive
from oracles.model import relative_error
from oracles.orthant import slide
from oracles.tuning import jacobian
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


@pytest.mark.parametrize("shift", [-3.0, -0.5, 1.5])
def test_the_gradient_of_the_smooth_log_probability(shift, monkeypatch):
    monkeypatch.setattr(smooth_orthant, "TOLERANCE", 1e-10)
    mu, cov, mask = gaussian_bags(shift=shift)
    mu.requires_grad_()
    cov.requires_grad_()
    weights = torch.tensor([0.7, -1.9], dtype=torch.float64)
    (weights * log_orthant_ep(mu, cov, mask)).sum().backward()
    assert not mu.grad[~mask].any()
    both = mask[:, :, None] & mask[:, None, :]
    assert not cov.grad[~both].any()

    def moved(x, like):
        """mu or cov moved; a covariance stays symmetric."""
        with torch.no_grad():
            a, b = (mu + x, cov) if like is mu else (mu, cov + x)
            return float((weights * log_orthant_ep(a, b, mask)).sum())

    rng = np.random.default_rng(5)
    for like in (mu, cov) * 4:
        along = torch.from_numpy(rng.normal(size=like.shape))
        along = along if like is mu else (along + along.mT) / 2
        found = float((like.grad * along).sum())
        expected = naive.difference(lambda s, x=along, y=like: moved(s * x, y), 0.0, 0.02)
        assert found == pytest.approx(expected, rel=1e-5)


def test_the_gradient_at_its_usual_tolerance():
    mu, cov, mask = gaussian_bags()
    mu.requires_grad_()
    log_orthant_ep(mu, cov, mask).sum().backward()
    f = lambda x: float(log_orthant_ep(torch.from_numpy(x)[None], cov[:1], mask[:1]))  # noqa: E731
    with torch.no_grad():
        expected = jacobian(f, mu[0].detach().numpy(), 0.05)
    assert relative_error(mu.grad[0], expected) < 1e-5


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


def test_the_bound_takes_over_with_its_own_gradient(monkeypatch):
    """log P never exceeds the smallest log P(m_i < 0), and then only that one m_i matters."""
    mu, cov, mask = gaussian_bags()
    monkeypatch.setattr(smooth_orthant._Plain, "apply", lambda mu, cov, mask: 0 * mu.sum(-1))
    mu.requires_grad_()
    cov.requires_grad_()
    found = log_orthant_ep(mu, cov, mask)
    t = (mu / cov.diagonal(dim1=-2, dim2=-1).sqrt()).detach()
    worst = torch.where(mask, t, -math.inf).argmax(-1)
    assert np.allclose(found.detach(), log_ndtr(-t[[0, 1], worst].numpy()), rtol=1e-12)
    found.sum().backward()
    for b in range(2):
        i = int(worst[b])
        others = np.arange(6) != i
        assert mu.grad[b, i] < 0 and not mu.grad[b, others].any()
        elsewhere = cov.grad[b].clone()
        elsewhere[i, i] = 0
        # d log Phi(-mu / s) / d s^2 = -t / (2 s^2) d/dt
        assert cov.grad[b, i, i] == pytest.approx(
            float((-mu.grad[b, i] * mu[b, i] / (2 * cov[b, i, i])).detach())
        )
        assert not elsewhere.any()


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


def test_the_gradient_with_an_effect(monkeypatch):
    monkeypatch.setattr(smooth_orthant, "TOLERANCE", 1e-10)
    monkeypatch.setattr(smooth_orthant, "NODES", 7)
    mu, cov, mask = gaussian_bags(shift=-0.7)
    point = [mu, cov, torch.tensor(1.4, dtype=torch.float64)]
    for x in point:
        x.requires_grad_()
    weights = torch.tensor([0.7, -1.9], dtype=torch.float64)

    def value(mu, cov, tau):
        return (weights * log_orthant_ep(mu, cov + tau**2, mask, tau)).sum()

    value(*point).backward()
    rng = np.random.default_rng(7)
    for k, like in enumerate(point):
        along = torch.from_numpy(rng.normal(size=like.shape)) if k < 2 else torch.tensor(1.0)
        along = (along + along.mT) / 2 if k == 1 else along

        def moved(x, k=k, along=along):
            with torch.no_grad():
                return float(value(*(y + x * along if j == k else y for j, y in enumerate(point))))

        # the nodes stand still in the gradient and move in the differences
        expected = naive.difference(moved, 0.0, 0.02)
        assert float((like.grad * along).sum()) == pytest.approx(expected, rel=1e-4, abs=3e-4)


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
