import logging

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from oracles import calibration as naive
from scipy.special import expit

from gpmil.decide.calibration import SlideCalibrator, interval


def a_cohort(n=60, seed=0, slope=0.4, intercept=0.8):
    """Log odds that are too sure of themselves: the true ones are slope x + intercept."""
    rng = np.random.default_rng(seed)
    x = rng.normal(1.0, 5.0, n)
    return x, (rng.random(n) < expit(slope * x + intercept)).astype(int)


@given(n=st.integers(30, 80), seed=st.integers(0, 500), scale=st.sampled_from([0.01, 1.0, 300.0]))
@settings(max_examples=15, deadline=None)
def test_the_sigmoid_is_platts(n, seed, scale):
    x, y = a_cohort(n, seed)
    assume(min(y.sum(), n - y.sum()) >= 5)
    found = SlideCalibrator.fit(scale * x, y)
    slope, intercept = naive.platt(x, y)
    assert found.slope * scale == pytest.approx(slope, rel=1e-4)
    assert found.intercept == pytest.approx(intercept, rel=1e-4, abs=1e-4)


def test_the_sigmoid_finds_the_truth():
    found = SlideCalibrator.fit(*a_cohort(40_000))
    assert found.slope == pytest.approx(0.4, rel=0.05)
    assert found.intercept == pytest.approx(0.8, rel=0.05)


@given(
    seed=st.integers(0, 500),
    slope=st.sampled_from([-0.3, 0.0, 0.4, 50.0]),  # backwards, useless, fair, separated
)
@settings(max_examples=60, deadline=None)
def test_probabilities_never_fall_and_are_never_certain(seed, slope):
    x, y = a_cohort(60, seed, slope)
    assume(min(y.sum(), 60 - y.sum()) >= 5)
    found = SlideCalibrator.fit(x, y)
    ends = np.array([-np.inf, -1e308, -1e5, 1e5, 1e308, np.inf])
    p = found.predict(np.sort(np.concatenate([x, ends, np.linspace(-30, 30, 50)])))
    assert (np.diff(p) >= 0).all() and p.min() > 0 and p.max() < 1


def test_calibrated_in_the_large_and_better_than_before():
    x, y = a_cohort(2_000)
    found = SlideCalibrator.fit(x, y)
    assert found.predict(x).mean() == pytest.approx(y.mean(), abs=2e-3)
    x, y = a_cohort(2_000, seed=1)

    def log_loss(p):
        return -np.mean(np.where(y == 1, np.log(p), np.log1p(-p)))

    assert log_loss(found.predict(x)) < log_loss(expit(0.4 * x + 0.8)) + 0.01
    assert log_loss(found.predict(x)) < log_loss(expit(x)) - 0.05


@pytest.mark.parametrize("values", ["backwards", "constant"])
def test_log_odds_that_do_not_rank_give_the_base_rate_and_say_so(values, caplog):
    x, y = a_cohort()
    x = -x if values == "backwards" else np.full(60, 2.5)
    with caplog.at_level(logging.WARNING, logger="gpmil"):
        found = SlideCalibrator.fit(x, y)
    assert "does not rank" in caplog.text
    n1, n0 = y.sum(), (1 - y).sum()
    base = (n1 * (n1 + 1) / (n1 + 2) + n0 / (n0 + 2)) / 60
    assert np.allclose(found.predict(x), base)


def test_separated_classes_keep_finite_odds():
    x = np.concatenate([np.linspace(-9, -4, 12), np.linspace(3, 8, 15)])
    y = np.repeat([0, 1], [12, 15])
    p = SlideCalibrator.fit(x, y).predict(x)
    assert p[:12].mean() == pytest.approx(1 / 14, abs=0.02)
    assert p[12:].mean() == pytest.approx(16 / 17, abs=0.02)


def test_what_cannot_be_calibrated():
    x, y = a_cohort()
    few = np.concatenate([np.flatnonzero(y == 0)[:4], np.flatnonzero(y == 1)])
    with pytest.raises(ValueError, match=r"at least 5 negative and 5 positive .* found 4 and \d+"):
        SlideCalibrator.fit(x[few], y[few])
    with pytest.raises(ValueError, match="log_odds: expected finite numbers, found inf"):
        SlideCalibrator.fit(np.where(x > 9, np.inf, x), y)
    with pytest.raises(ValueError, match="NaN in 1 of 1"):
        SlideCalibrator.fit(x, y).predict(np.array([np.nan]))


def test_interval():
    draws = np.random.default_rng(0).beta([2.0, 7.0, 1.0], [5.0, 1.0, 1.0], size=(4_000, 3))
    low, high = interval(draws)
    inside = ((draws >= low) & (draws <= high)).mean(0)
    assert np.allclose(inside, 0.9, atol=1e-3)
    assert np.allclose((draws < low).mean(0), 0.05, atol=1e-3)
    assert low[2] == pytest.approx(0.05, abs=0.01) and high[2] == pytest.approx(0.95, abs=0.01)
