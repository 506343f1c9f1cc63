import logging
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles import calibration as naive
from scipy.special import expit

from gpmil.decide.refer import ReferRule, confidence, slides_needed


@pytest.mark.parametrize("alpha", ["0.01", "0.05", "0.1", "0.5", "0.7"])
@pytest.mark.parametrize("delta", ["0.01", "0.1", "0.25", "0.5"])
def test_slides_needed_by_counting(alpha, delta):
    assert slides_needed(float(alpha), float(delta)) == naive.slides_needed(alpha, delta)


def slides(n, deviation, seed, n_patients=None):
    """Calibrated probabilities, labels drawn from them, and patients."""
    rng = np.random.default_rng(seed)
    p = expit(rng.normal(0, deviation, n))
    y = (rng.random(n) < p).astype(int)
    return p, y, None if n_patients is None else rng.integers(n_patients, size=n)


@given(
    n=st.integers(1, 120),
    deviation=st.sampled_from([0.5, 3.0, 8.0]),
    seed=st.integers(0, 999),
    alpha=st.sampled_from([0.05, 0.1, 0.3]),
    delta=st.sampled_from([0.05, 0.1, 0.4]),
    n_patients=st.sampled_from([None, 3, 40]),
    coarse=st.booleans(),
)
@settings(max_examples=60, deadline=None)
def test_the_threshold_equals_the_naive_walk(n, deviation, seed, alpha, delta, n_patients, coarse):
    p, y, groups = slides(n, deviation, seed, n_patients)
    p = np.round(p, 1) if coarse else p
    found = ReferRule.fit(p, y, alpha, delta, groups)
    expected = naive.refer_threshold(p, y, alpha, delta, groups)
    assert (found.threshold, found.accepted, found.errors) == expected
    accept = found.decide(p)
    units = np.arange(n) if groups is None else groups
    assert len(set(units[accept])) == found.accepted
    assert found.bound == pytest.approx(
        naive.upper_limit(found.errors, found.accepted, delta), abs=1e-9
    )
    assert found.accepted == 0 or (found.bound <= alpha + 1e-9 and found.accepted >= found.needed)


@pytest.mark.parametrize(("n", "deviation", "alpha"), [(150, 3.0, 0.1), (300, 2.0, 0.1)])
def test_the_true_error_exceeds_alpha_as_rarely_as_promised(n, deviation, alpha):
    delta, cohorts = 0.1, 200
    rules = [ReferRule.fit(*slides(n, deviation, s)[:2], alpha, delta) for s in range(cohorts)]
    accepting = [rule.threshold for rule in rules if rule.threshold is not None]
    errors = [naive.mean_error_of_the_surest(t, deviation) for t in accepting]
    # binomial slack: two standard deviations
    assert np.mean(np.array(errors) > alpha) * len(errors) / cohorts <= delta + 2 * math.sqrt(
        delta * (1 - delta) / cohorts
    )
    # and it is of use
    assert len(accepting) > cohorts / 2


def patients(n, seed):
    """Three slides a patient; what the model cannot see is the same for all three."""
    rng = np.random.default_rng(seed)
    x = rng.normal(0, 4, (n, 1)) + rng.normal(0, 1, (n, 3))
    y = x + rng.logistic(size=(n, 1)) > 0
    return expit(x).ravel(), y.ravel().astype(int), np.repeat(np.arange(n), 3)


def test_patients_with_a_wrong_slide_are_as_rare_as_promised():
    alpha, delta, cohorts = 0.1, 0.1, 100
    p, y, group = patients(30_000, seed=1_000)
    wrong = (p > 0.5) != y
    exceeded = 0
    for seed in range(cohorts):
        accept = ReferRule.fit(*patients(80, seed)[:2], alpha, delta, patients(80, seed)[2]).decide(
            p
        )
        units, errors = (len(np.unique(group[rows])) for rows in (accept, accept & wrong))
        exceeded += errors > alpha * units
    assert exceeded / cohorts <= delta + 2 * math.sqrt(delta * (1 - delta) / cohorts)


def test_slides_of_one_patient_are_not_independent_evidence():
    # 30 slides, all right: enough for alpha = .1 as slides, not as the slides of 6 patients
    p, y = np.full(30, 0.97), np.ones(30, int)
    assert ReferRule.fit(p, y, 0.1).accepted == 30
    few = ReferRule.fit(p, y, 0.1, groups=np.arange(30) % 6)
    assert few.threshold is None and "22 patients that are all right, found 6 patients" in str(few)


def test_a_patient_is_wrong_once_any_accepted_slide_is():
    p, y = np.tile([0.99, 0.8], 40), np.ones(80, int)
    y[1:20:2] = 0  # ten second slides are wrong
    patients = np.repeat(np.arange(40), 2)
    found = ReferRule.fit(p, y, 0.1, groups=patients)
    assert found.threshold == 0.99 and (found.accepted, found.errors) == (40, 0)


def test_nothing_is_accepted_where_nothing_can_be(caplog):
    p, y, _ = slides(200, 0.3, 1)
    with caplog.at_level(logging.WARNING, logger="gpmil"):
        found = ReferRule.fit(p, y, 0.05)
    assert not found.decide(p).any() and found.threshold is None and found.bound == 1
    assert "takes 45 slides that are all right, found 200 slides (among the surest" in caplog.text
    assert "found 3 slides (there are fewer)" in str(ReferRule.fit(p[:3], y[:3], 0.05))


def test_everything_is_accepted_where_everything_can_be():
    p, y = np.linspace(0.6, 0.9, 50), np.ones(50, int)
    found = ReferRule.fit(p, y, 0.1)
    assert found.decide(p).all() and found.threshold == 0.6
    assert "50 of 50 slides, 0 wrong; error at most 0.045 <= 0.1" in str(found)
    assert np.array_equal(found.decide(np.array([0.59, 0.2, 0.41])), [False, True, False])


def test_both_classes_count_by_their_confidence():
    assert np.allclose(confidence(np.array([0.1, 0.7, 0.5])), [0.9, 0.7, 0.5])
    with pytest.raises(ValueError, match=r"probability: expected numbers from 0 to 1, found 1.4"):
        confidence(np.array([0.2, 1.4]))
