"""Two and three coordinates against SciPy's integrals, and in both tails."""

import numpy as np
import pytest
import torch
from scipy.integrate import quad
from scipy.special import log_ndtr, ndtr
from scipy.stats import multivariate_normal, norm

from gpmil.moments.orthant import log_orthant
from gpmil.moments.tiny import log_tiny


def drawn(n, seed):
    rng = np.random.default_rng(seed)
    A = rng.normal(size=(n, n))
    return rng.normal(0, 1.5, n), A @ A.T + 0.4 * np.eye(n) + rng.uniform(0, 2)


def oracle(mu, S):
    """P(all m < 0), of three by an adaptive integral over the first."""
    if len(mu) == 2:
        return multivariate_normal.cdf(np.zeros(2), mu, S)
    slope, rest = S[1:, 0] / S[0, 0], S[1:, 1:] - np.outer(S[1:, 0], S[1:, 0]) / S[0, 0]

    def inner(x):
        of_two = multivariate_normal.cdf(np.zeros(2), mu[1:] + slope * (x - mu[0]), rest)
        return norm.pdf(x, mu[0], np.sqrt(S[0, 0])) * of_two

    return quad(inner, mu[0] - 9 * np.sqrt(S[0, 0]), 0, epsabs=1e-10, limit=200)[0]


def of(mu, S):
    return [float(x) for x in log_tiny(torch.tensor(mu)[None], torch.tensor(S)[None])[:2]]


@pytest.mark.parametrize(("n", "seed"), [(2, 0), (2, 1), (2, 2), (3, 3), (3, 4)])
def test_equal_to_scipy(n, seed):
    mu, S = drawn(n, seed)
    log_p, log_1mp = of(mu, S)
    assert np.exp(log_p) == pytest.approx(oracle(mu, S), abs=1e-8)
    assert np.exp(log_p) + np.exp(log_1mp) == pytest.approx(1, abs=1e-10)


@pytest.mark.parametrize("n", [2, 3])
def test_both_tails_keep_their_digits(n):
    S = np.diag(np.linspace(0.7, 1.6, n))
    mu = np.linspace(4, 5, n)
    t = mu / np.sqrt(np.diag(S))
    # independent coordinates: log P = sum log Phi(-t), and 1 - P at the other end
    assert of(mu, S)[0] == pytest.approx(log_ndtr(-t).sum(), rel=1e-9)
    rare = of(-1.6 * mu, S)[1]
    assert rare == pytest.approx(np.log(-np.expm1(np.log1p(-ndtr(-1.6 * t)).sum())), rel=1e-6)


def test_the_engine_uses_them_whatever_the_padding():
    (mu2, S2), (mu3, S3) = drawn(2, 5), drawn(3, 6)
    mu, S = torch.zeros(2, 4).double(), torch.eye(4).double().repeat(2, 1, 1)
    mask = torch.tensor([[False, True, True, False], [True, True, False, True]])
    mu[0, 1:3], S[0, 1:3, 1:3] = torch.tensor(mu2), torch.tensor(S2)
    at = torch.tensor([0, 1, 3])
    mu[1, at] = torch.tensor(mu3)
    S[1, at[:, None], at] = torch.tensor(S3)
    found = log_orthant(mu, S, mask)
    np.testing.assert_allclose(found.log_p, [of(mu2, S2)[0], of(mu3, S3)[0]], rtol=1e-12)
    assert float(found.error.max()) < 1e-8


def test_what_nodes_do_not_resolve_is_said():
    S = np.array([[1.0, 0.999], [0.999, 1.0]])
    assert not bool(log_tiny(torch.zeros(1, 2).double(), torch.tensor(S)[None])[2])
    far = torch.full((1, 2), 12.0).double()
    assert not bool(log_tiny(far, torch.eye(2).double()[None])[2])
