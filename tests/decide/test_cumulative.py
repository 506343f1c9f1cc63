"""Calibrated grades: against a regression written out, and what area is good for."""

import numpy as np
import pytest
from oracles import calibration as naive
from scipy.special import expit

from gpmil.decide import cumulative
from gpmil.decide.calibration import SlideCalibrator


def said(n=600, area=0.0, seed=0, n_cuts=3):
    """Odds, areas, grades and folds; grades follow the odds, and from 2 on the area, too."""
    rng = np.random.default_rng(seed)
    odds = rng.normal(0.4, 1.7, (n, 1)) - 1.3 * np.arange(n_cuts) + rng.normal(0, 0.3, (n, n_cuts))
    above = np.exp(rng.normal(1, 1, (n, 1)) - np.arange(n_cuts))
    steps = rng.logistic(size=(n, n_cuts)) < odds * [1, *(0.8,) * (n_cuts - 1)] - area * (
        np.log1p(above[:, :1]) - 1
    ) * (np.arange(n_cuts) > 0)
    return odds, above, np.cumprod(steps, axis=1).sum(1), np.arange(n) % 5


def test_steps_are_a_ridge_regression_of_the_bags_that_reach_them():
    odds, above, y, _ = said(250, area=1.5)
    found = cumulative.by_area(odds, above, y)
    assert found.shape == (3, 5)
    first = SlideCalibrator.fit(odds[:, 0], (y > 0).astype(int))
    np.testing.assert_allclose(found[0], [first.slope, 0, 0, 0, first.intercept])
    for k in (1, 2):
        columns = [[odds[b, k], *np.log(1 + above[b])] for b in range(len(y)) if y[b] >= k]
        passed = [int(grade > k) for grade in y if grade >= k]
        expected = naive.ridge(np.array(columns), passed, width=2.0)
        np.testing.assert_allclose(found[k], expected, rtol=2e-3, atol=2e-3)


def test_probabilities_by_hand_and_in_order():
    odds, above, y, _ = said(area=1.5)
    numbers = cumulative.by_area(odds, above, y)
    log_p = cumulative.calibrated(odds, above, numbers)
    p, expected = 1 - np.exp(log_p), np.ones(len(y))
    for k, (slope, *weights, intercept) in enumerate(numbers):
        expected = expected * expit(slope * odds[:, k] + np.log1p(above) @ weights + intercept)
        np.testing.assert_allclose(p[:, k], expected, atol=1e-12)
    assert (np.diff(log_p, axis=1) > 0).all()
    # every threshold holds on average
    np.testing.assert_allclose(p.mean(0), [(y > k).mean() for k in range(3)], atol=0.02)
    far = np.array([[1e308, 1e308, -1e308], [-np.inf, np.inf, 5.0]])
    log_p = cumulative.calibrated(far, np.zeros((2, 3)), numbers)
    assert np.isfinite(log_p).all() and (log_p <= 0).all() and (np.diff(log_p, axis=1) >= 0).all()


def test_area_is_taken_where_it_tells_grades_out_of_fold():
    odds, above, y, fold = said(area=1.5)
    assert cumulative.chosen(odds, above, y, fold).shape == (3, 5)
    gain = cumulative.left_out(odds, above, y, fold, area=True)
    assert gain.mean() > cumulative.left_out(odds, above, y, fold).mean() + 0.02
    # noise beside odds that say all there is to say
    for seed in (1, 2, 3):
        rng = np.random.default_rng(seed)
        y = (rng.logistic(size=600)[:, None] < odds[:, :1] - [0.0, 1.3, 2.6]).sum(1)
        exact = odds[:, :1] - [0.0, 1.3, 2.6]
        found = cumulative.chosen(exact, rng.exponential(1, (600, 3)), y, fold)
        np.testing.assert_array_equal(found, cumulative.by_odds(exact, y))


def test_left_out_is_by_the_other_folds():
    odds, above, y, fold = said(area=1.0)
    for area in (True, False):
        found = cumulative.left_out(odds, above, y, fold, area=area)
        rest, own = fold != 2, fold == 2
        fit = cumulative.by_area(odds[rest], above[rest], y[rest])
        fit = fit if area else cumulative.by_odds(odds[rest], y[rest])
        log_p = cumulative.calibrated(odds[own], above[own], fit)
        at_most = np.column_stack([np.zeros(own.sum()), np.exp(log_p), np.ones(own.sum())])
        expected = [np.log(max(p[k + 1] - p[k], 1 / 600)) for p, k in zip(at_most, y[own])]
        np.testing.assert_allclose(found[own], expected)


@pytest.mark.parametrize(
    "few", [{"n_cuts": 1}, {"n": 40}], ids=["two grades", "five bags outside a fold"]
)
def test_the_odds_alone_where_there_is_no_more(few):
    odds, above, y, fold = said(area=2.0, **few)
    y[:6], fold = odds.shape[1], np.where(y == odds.shape[1], 0, fold)  # the highest: one fold
    found = cumulative.chosen(odds, above, y, fold)
    for k, row in enumerate(found):
        one = SlideCalibrator.fit(odds[:, k], (y > k).astype(int))
        np.testing.assert_array_equal(row, [one.slope, one.intercept])
