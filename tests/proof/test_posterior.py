"""What the posterior is held against: cohorts drawn from the model, and the ranks of the truth."""

import numpy as np
import pytest
from scipy.integrate import quad
from scipy.stats import kstest, norm

import gpmil
from gpmil.proof import intervals, ranks
from gpmil.proof.from_the_model import Prior, SlideOfTheModel, cohort
from gpmil.proof.tissue import D

PRIOR = Prior(0.7, 1.0, (3, 4), n_inducing=12)


@pytest.fixture(scope="module")
def drawn():
    return cohort(PRIOR, 20, (0, 1))


@pytest.fixture(scope="module")
def fitted(drawn):
    return gpmil.VGPMILPRI(
        variance=PRIOR.variance,
        lengthscale=PRIOR.length * np.sqrt(D),
        mean=drawn.c,
        coupling=0.0,
        slide_effect=0.0,
        inducing=drawn.Z,
        standardize=False,
        device="cpu",
    ).fit(drawn.bags)


def test_cohorts_of_the_model_have_its_moments():
    rng = np.random.default_rng(0)
    Z = rng.standard_normal((12, D))
    one = SlideOfTheModel.draw(rng, Z, Prior(0.7, sides=(3, 3)))
    # over w and f: Cov(f) = Kxx; over the noise too: Cov(m) = Sigma + Sigma Kxx Sigma
    A = np.abs(one.cells[:, None] - one.cells).sum(-1) == 1
    Sigma = np.linalg.inv(np.eye(9) + 0.7 * (np.diag(A.sum(1)) - A))
    Kxx = 9.0 * np.exp(-((one.x[:, None] - one.x) ** 2).sum(-1) / (2 * 4 * D))
    cov_f = one.W @ one.W.T + one.root_f @ one.root_f.T
    np.testing.assert_allclose(cov_f, Kxx, rtol=1e-4, atol=1e-4)
    cov_m = Sigma @ cov_f @ Sigma + one.root_m @ one.root_m.T
    np.testing.assert_allclose(cov_m, Sigma + Sigma @ Kxx @ Sigma, rtol=1e-4, atol=1e-4)


def test_labels_are_those_of_the_largest_score(drawn):
    assert 0.35 <= drawn.bags.labels.mean() <= 0.65
    some = [own.any() for own in drawn.bags.split(drawn.bags.instance_labels)]
    assert (np.array(some) == (drawn.bags.labels == 1)).all()
    again = cohort(PRIOR, 20, (0, 1))
    assert all((a == b).all() for a, b in zip(drawn.f, again.f)) and (drawn.s == again.s).all()


def test_moments_of_f_are_those_of_the_predictions(drawn, fitted):
    # uncoupled: m = f + noise of variance 1
    found = fitted.predict_instances(drawn.bags[:3])
    x = drawn.bags[:3].features
    mean, variance = ranks.moments_of_f(fitted, x, drawn, PRIOR)
    np.testing.assert_allclose(found.mean, mean, rtol=0, atol=1e-9)
    np.testing.assert_allclose(found.std**2, 1 + variance, rtol=0, atol=1e-9)


@pytest.mark.parametrize("positive", [False, True])
@pytest.mark.parametrize("tau", [0.0, 1.5])
def test_curvature_is_that_of_the_bag_likelihood(positive, tau):
    mu, sigma = np.array([-1.0, 0.4, -2.0]), np.array([1.0, 0.8, 0.9])

    def log_z(mean):
        def q(s):
            return np.exp(norm.logcdf(-(mean + s) / sigma).sum())

        none = q(0.0) if not tau else quad(lambda s: q(s) * norm.pdf(s, 0, tau), -12, 12)[0]
        return np.log(1 - none if positive else none)

    step, I = 1e-3, np.eye(3)
    expected = [
        [
            sum(
                a * b * log_z(mu + step * (a * I[i] + b * I[j])) / (4 * step**2)
                for a in (-1, 1)
                for b in (-1, 1)
            )
            for j in range(3)
        ]
        for i in range(3)
    ]
    found = ranks.curvature(mu, sigma, tau, positive)
    np.testing.assert_allclose(found, expected, rtol=0, atol=2e-5)


@pytest.mark.parametrize("positive", [False, True])
def test_ranks_of_the_effect_are_uniform_where_the_posterior_is_right(positive):
    # mu is known here: s and the labels are drawn, and draws with this label kept
    rng = np.random.default_rng(4)
    mu, sigma, tau = rng.normal(-1.5, 0.5, 4), np.full(4, 0.9), 1.2
    s = tau * rng.standard_normal(3000)
    m = mu + s[:, None] + sigma * rng.standard_normal((3000, 4))
    kept = s[(m > 0).any(axis=1) == positive][:600]
    found = [ranks.rank_of_s(one, mu, sigma, tau, positive) for one in kept]
    assert kstest(found, "uniform").pvalue > 0.01
    # forgetting what the label says is noticed
    assert kstest(norm.cdf(kept / tau), "uniform").pvalue < 1e-6


def test_one_cohort_gives_every_rank():
    case = ranks.RankCase("small", PRIOR, n_bags=20)
    found = ranks.one_cohort(case, 0)
    assert set(found) == set(ranks.KINDS)
    assert all(0 <= value <= 1 for value in found.values())
    plain = ranks.RankCase("small", Prior(0.0, 0.0, (3, 4), n_inducing=12), n_bags=20)
    assert np.isnan(ranks.one_cohort(plain, 0)["effect"])


def test_summary_of_uniform_and_of_narrow_ranks():
    rng = np.random.default_rng(0)
    right = ranks.summary(rng.random(2000))
    assert right["held by 90 %"] == pytest.approx(0.9, abs=0.02) and right["p"] > 0.01
    narrow = ranks.summary(norm.cdf(3 * rng.standard_normal(2000)))
    assert narrow["held by 90 %"] < 0.5 and narrow["p"] < 1e-6


def test_the_true_probability_of_a_slide_is_the_share_of_its_draws(drawn):
    rng = np.random.default_rng(1)
    p = np.array([intervals.true_probability(drawn, PRIOR, b, rng) for b in range(20)])
    assert p[drawn.bags.labels == 1].mean() > p[drawn.bags.labels == 0].mean()
    # without the process and the effect: independent patches at c
    flat = Prior(0.0, 0.0, (3, 3), variance=1e-8, n_inducing=3)
    known = cohort(flat, 6, (3, 3))
    expected = 1 - norm.cdf(-known.c) ** 9
    found = np.mean([intervals.true_probability(known, flat, b, rng) for b in range(6)])
    assert found == pytest.approx(expected, abs=0.02)


def test_intervals_of_metrics_hold_the_truth_unless_patients_are_hidden():
    plain, _, alike, hidden = (
        np.mean([[*intervals.metrics_cohort(case, seed).values()] for seed in range(3)], axis=0)
        for case in intervals.METRICS
    )
    assert plain.min() > 0.9 and alike.min() > 0.85
    assert hidden.max() < 0.85
