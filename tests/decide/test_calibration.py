import json
import logging
import math
import time
import warnings
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from oracles import calibration as naive
from oracles import interval as interval_twin
from scipy.special import expit, logit
from scipy.stats import chi2, false_discovery_control, norm

import gpmil
from gpmil import simulate
from gpmil.decide.calibration import (
    ConformalReference,
    ReferRule,
    SlideCalibrator,
    benjamini_hochberg,
    confidence,
    folds,
    interval,
    p_values,
    quadratic_quantile,
    slides_needed,
)
from gpmil.models import fitted

# ------------------------------------------------------------------ folds


def some_labels(n0, n1, seed=0):
    return np.random.default_rng(seed).permutation(np.repeat([0, 1], [n0, n1]))


def test_plain_folds_are_stratified_and_repeatable():
    labels = some_labels(23, 31)
    fold = folds(labels, seed=4)
    assert set(np.bincount(fold[labels == 0])) <= {4, 5}
    assert set(np.bincount(fold[labels == 1])) <= {6, 7}
    assert np.array_equal(fold, folds(labels, seed=4))
    assert not np.array_equal(fold, folds(labels, seed=5))


@given(
    labels=st.lists(st.integers(0, 1), min_size=4, max_size=25),
    patients=st.integers(2, 12),
    n_folds=st.integers(2, 6),
    seed=st.integers(0, 99),
)
@settings(max_examples=150, deadline=None)
def test_folds_are_fair_and_keep_patients_together(labels, patients, n_folds, seed):
    labels = np.array(labels)
    groups = np.random.default_rng(seed).integers(patients, size=len(labels))
    possible = all(len(set(groups[labels == y])) > 1 for y in (0, 1))
    if not possible:
        with pytest.raises(ValueError, match=r"at least (2|two)"):
            folds(labels, groups, n_folds, seed)
        return
    for given_groups in (groups, None):
        fold = folds(labels, given_groups, n_folds, seed)
        assert 2 <= fold.max() + 1 <= n_folds
        assert naive.is_fair(fold, labels, fold.max() + 1)
    grouped = folds(labels, groups, n_folds, seed)
    assert all(len(set(grouped[groups == g])) == 1 for g in groups)


def test_two_fair_folds_are_found_where_the_greedy_splitter_misses_them():
    # a: 10 + 10, b: 10 negative, c: 1 positive. Only {a} against {b, c} is fair.
    labels = np.repeat([0, 1, 0, 1], [10, 10, 10, 1])
    groups = np.repeat(["a", "b", "c"], [20, 10, 1])
    fold = folds(labels, groups)
    assert naive.is_fair(fold, labels, 2)


def test_fewer_folds_are_said(caplog):
    labels = some_labels(3, 20)
    with caplog.at_level(logging.WARNING, logger="gpmil"):
        assert folds(labels).max() == 2
    assert "3 folds instead of 5: there are 3 negative bags" in caplog.text


def test_few_positive_bags_do_not_cost_folds():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert folds(some_labels(20, 3)).max() == 4


@pytest.mark.parametrize(
    ("labels", "groups", "message"),
    [
        ([1, 1, 1], None, "at least 2 negative bags .* found 0 among 3 bags"),
        ([0, 1, 1, 1], None, "at least 2 negative bags .* found 1 among 4"),
        ([0, 0, 0], None, "at least 2 positive bags .* found 0"),
        (
            [0, 0, 1, 1],
            ["patient 7", "patient 7", "a", "b"],
            "negative bags of at least two .* found 1: 'patient 7' has all 2 .*groups=None",
        ),
        ([0, 0, 1, 1], [4, 5, 6, 6], "positive bags of at least two patients .* found 1: '6'"),
        ([0, 0, 1, 1], [4, 5, 6], "groups: expected one a bag, 4 in all, found 3"),
        ([0, 0, 1, -1], None, "labels: expected 0 or 1, found -1"),
    ],
)
def test_impossible_folds(labels, groups, message):
    with pytest.raises(ValueError, match=message):
        # not through the shape checks of the tests: users have none
        unchecked(folds)(np.array(labels), None if groups is None else np.array(groups))


def unchecked(function):
    return getattr(function, "__wrapped__", function)


def test_one_fold_is_refused():
    with pytest.raises(ValueError, match="n_folds: expected at least 2, found 1"):
        folds(some_labels(4, 4), n_folds=1)


# ------------------------------------------------------------------ p-values


def a_reference(sizes, seed=0, ties=False):
    """sizes[k]: the sizes of fold k's bags. The reference, and the same as nested lists."""
    rng = np.random.default_rng(seed)
    draw = (lambda n: rng.integers(0, 5, n) / 4) if ties else rng.normal
    # every fold on its own scale: comparing across folds would show
    nested = [
        [(10.0**k * draw(n) if ties else draw(k, 10.0**k, n)) for n in bags]
        for k, bags in enumerate(sizes)
    ]
    flat = [(s, k, 100 * k + b) for k, f in enumerate(nested) for b, x in enumerate(f) for s in x]
    rng.shuffle(flat)
    scores, fold, bag = (np.array(column) for column in zip(*flat))
    reference = ConformalReference.build(scores, fold.astype(int), bag.astype(int), len(sizes))
    return reference, nested


SIZES = st.lists(st.lists(st.integers(1, 6), min_size=1, max_size=4), min_size=1, max_size=4)


@given(sizes=SIZES, seed=st.integers(0, 999), ties=st.booleans())
@settings(max_examples=60, deadline=None)
def test_p_values_equal_the_double_loop(sizes, seed, ties):
    reference, nested = a_reference(sizes, seed, ties)
    rng = np.random.default_rng(seed + 1)
    # half of the patches have scores that occur in the reference
    scores = np.array([np.r_[rng.choice(np.concatenate(f), 4), rng.normal(size=4)] for f in nested])
    by_patch = [naive.p_value(s, [np.concatenate(f) for f in nested]) for s in scores.T]
    assert np.allclose(p_values(reference, scores), by_patch, rtol=1e-14)
    by_bag = [naive.p_value_by_bag(s, nested) for s in scores.T]
    assert np.allclose(p_values(reference, scores, weights="bag"), by_bag, rtol=1e-13)


@given(sizes=SIZES, seed=st.integers(0, 999), ties=st.booleans())
@settings(max_examples=60, deadline=None)
def test_training_patches_see_their_own_fold_without_their_own_bag(sizes, seed, ties):
    reference, nested = a_reference(sizes, seed, ties)
    places = [(k, b) for k, f in enumerate(nested) for b in range(len(f)) for _ in range(2)]
    places += [(k, 77) for k in range(len(nested))]  # patches of positive bags
    rng = np.random.default_rng(seed + 1)
    own = np.array([rng.choice(np.concatenate(nested[k])) for k, _ in places])
    fold, bag = np.array([k for k, _ in places]), np.array([100 * k + b for k, b in places])
    scores = np.full((len(nested), len(own)), np.nan)  # no other row is read
    scores[fold, np.arange(len(own))] = own
    for weights, twin in (("patch", flat_p_value), ("bag", naive.p_value_by_bag)):
        found = p_values(reference, scores, weights=weights, own_fold=fold, own_bag=bag)
        others = [[x for c, x in enumerate(nested[k]) if c != b] for k, b in places]
        expected = [twin([s], [rest]) for s, rest in zip(own, others)]
        assert np.allclose(found, expected, rtol=1e-13)


def flat_p_value(scores, nested):
    return naive.p_value(scores, [[r for bag in fold for r in bag] for fold in nested])


@given(values=st.lists(st.integers(0, 12), min_size=2, max_size=30), a=st.floats(0.0, 1.0))
@settings(max_examples=80, deadline=None)
def test_exchangeable_patches_have_super_uniform_p_values(values, a):
    # each of the pool in turn is the test patch: the mean over turns is the exact probability
    pool = np.array(values) / 7
    p = [
        p_values(ConformalReference.build(rest, *np.zeros((2, len(rest)), int), 1), s[None, None])
        for s, rest in ((pool[i], np.delete(pool, i)) for i in range(len(pool)))
    ]
    assert np.mean(np.array(p) <= a) <= a + 1e-12
    if len(set(values)) == len(values):  # no ties: exactly uniform on 1/n, ..., 1
        assert np.allclose(np.sort(np.ravel(p)), np.arange(1, len(pool) + 1) / len(pool))


@given(
    bags=st.lists(st.lists(st.integers(0, 9), min_size=1, max_size=5), min_size=2, max_size=6),
    a=st.floats(0.0, 1.0),
)
@settings(max_examples=80, deadline=None)
def test_exchangeable_bags_have_super_uniform_p_values_by_bag(bags, a):
    # each bag in turn is the test bag, one of its patches drawn at random
    chance = 0.0
    for b, bag in enumerate(bags):
        rest = [(s / 3, 0, c) for c, other in enumerate(bags) if c != b for s in other]
        scores, fold, which = (np.array(column) for column in zip(*rest))
        reference = ConformalReference.build(scores, fold, which, 1)
        p = p_values(reference, np.array([bag]) / 3, weights="bag")
        chance += np.mean(p <= a) / len(bags)
    assert chance <= a + 1e-9


def test_patches_that_move_together_exceed_by_one_over_the_bags():
    # all patches of a bag equal: P(p <= a) -> a + (1 - a) / (B + 1) at a -> 0
    levels = np.array([0.3, 1.7, -0.4, 2.2])
    low = []
    for b in range(4):
        rest = np.repeat(np.delete(levels, b), 50)
        bag = np.repeat(np.arange(3), 50)
        reference = ConformalReference.build(rest, np.zeros(150, int), bag, 1)
        s = levels[b].reshape(1, 1)
        low.append((p_values(reference, s)[0], p_values(reference, s, weights="bag")[0]))
    by_patch, by_bag = np.array(low).T
    assert np.mean(by_patch <= 0.01) == 1 / 4
    assert np.mean(by_bag <= 0.01) == 0 and by_bag.min() == pytest.approx(1 / 4)


def test_scores_of_different_models_are_never_compared():
    reference, _ = a_reference([[5, 3], [4], [2, 6]])
    scores = np.random.default_rng(3).normal(size=(3, 20))
    # a rising map of model 1's scores, another of model 2's: nothing changes
    maps = [lambda x: x, lambda x: 5e3 + np.arctan(x), lambda x: np.exp(x / 100) - 70]
    mapped = np.concatenate([m(s) for m, s in zip(maps, np.split(reference.scores, [8, 12]))])
    other = ConformalReference(mapped, reference.offsets, reference.bag)
    found = p_values(other, np.stack([m(s) for m, s in zip(maps, scores)]))
    assert np.array_equal(found, p_values(reference, scores))


def test_smallest_and_largest():
    reference, _ = a_reference([[5, 3], [4]])
    ends = np.array([[np.inf, -np.inf]] * 2)
    for weights, n in (("patch", 12), ("bag", 3)):
        assert reference.smallest(weights) == 1 / (1 + n)
        assert np.allclose(p_values(reference, ends, weights=weights), [1 / (1 + n), 1])
    # the only negative bag of its fold has nothing to be compared with
    alone = p_values(reference, ends, own_fold=np.array([1, 1]), own_bag=np.array([100, 100]))
    assert np.array_equal(alone, [1, 1])


def test_a_reference_survives_a_file(tmp_path):
    reference, _ = a_reference([[5, 3], [4]])
    np.savez(tmp_path / "reference.npz", **vars(reference))
    with np.load(tmp_path / "reference.npz") as arrays:
        again = ConformalReference(**arrays)
    scores = np.random.default_rng(1).normal(size=(2, 9))
    assert np.array_equal(p_values(again, scores), p_values(reference, scores))


def test_bad_references_and_scores():
    reference, _ = a_reference([[5, 3], [4]])
    with pytest.raises(ValueError, match=r"each of 3 folds, found \[1, 0, 1\]"):
        ConformalReference.build(np.array([0.1, 0.2]), np.array([0, 2]), np.array([5, 6]), 3)
    with pytest.raises(ValueError, match=r"each of 2 folds, found \[1, 0, 1\]"):
        ConformalReference.build(np.array([0.1, 0.2]), np.array([0, 2]), np.array([5, 6]), 2)
    with pytest.raises(ValueError, match=r"scores of negative bags: .* NaN in 1 of 2"):
        ConformalReference.build(np.array([0.1, np.nan]), np.array([0, 1]), np.array([5, 6]), 2)
    with pytest.raises(ValueError, match=r"each of 2 models, found shape \(3, 4\)"):
        p_values(reference, np.zeros((3, 4)))
    with pytest.raises(ValueError, match="NaN in 8 of 8"):  # would have the smallest p-value
        p_values(reference, np.full((2, 4), np.nan))
    with pytest.raises(ValueError, match="own_bag: expected with own_fold"):
        p_values(reference, np.zeros((2, 4)), own_fold=np.zeros(4, int))
    with pytest.raises(ValueError, match="'patch' or 'bag', found 'slide'"):
        p_values(reference, np.zeros((2, 4)), weights="slide")


# ------------------------------------------------------------------ flags


@given(
    ranks=st.lists(st.integers(1, 40), min_size=1, max_size=30),
    rate=st.sampled_from(["0.05", "0.1", "0.2", "0.3"]),
)
@settings(max_examples=200, deadline=None)
def test_benjamini_hochberg_is_the_textbook_on_fractions(ranks, rate):
    exact = naive.benjamini_hochberg([Fraction(r, 40) for r in ranks], Fraction(rate))
    assert benjamini_hochberg(np.array(ranks) / 40, float(rate)).tolist() == exact


def test_rounding_does_not_decide_where_a_p_value_meets_its_limit():
    # 4/40 = .3 x 1/3 exactly, but not in floating point
    assert 4 / 40 > 0.3 * 1 / 3
    assert benjamini_hochberg(np.array([4, 30, 40]) / 40, 0.3).tolist() == [True, False, False]


@given(
    n=st.integers(0, 60), n_groups=st.integers(1, 8), rate=st.floats(0.01, 0.9), seed=st.integers()
)
@settings(max_examples=80, deadline=None)
def test_within_groups_it_is_one_group_after_the_other(n, n_groups, rate, seed):
    rng = np.random.default_rng(abs(seed))
    p, groups = rng.beta(0.4, 1, n), 3 * rng.integers(n_groups, size=n)
    found = benjamini_hochberg(p, rate, groups)
    for g in np.unique(groups):
        assert np.array_equal(found[groups == g], false_discovery_control(p[groups == g]) <= rate)
    assert np.array_equal(benjamini_hochberg(p, rate), _scipy(p, rate))


def _scipy(p, rate):
    return false_discovery_control(p) <= rate if len(p) else np.zeros(0, bool)


def test_a_cohort_takes_seconds():
    rng = np.random.default_rng(0)
    bag = np.repeat(np.arange(10_000), 110)
    reference = ConformalReference.build(
        rng.normal(size=100_000), np.arange(100_000) % 5, np.arange(100_000) // 100 * 5, 5
    )
    start = time.process_time()
    scores = rng.normal(size=(5, len(bag)))
    p = p_values(reference, scores)
    own = p_values(reference, scores, own_fold=bag % 5, own_bag=bag)
    assert benjamini_hochberg(p, 0.1, bag).sum() < benjamini_hochberg(own, 0.9, bag).sum()
    assert time.process_time() - start < 15  # of the CPU: others may keep it busy


@pytest.mark.parametrize("rate", [0.0, 1.0, -0.1, 10.0, math.nan])
def test_rates_outside_zero_and_one(rate):
    with pytest.raises(ValueError, match="rate: expected a number between 0 and 1"):
        benjamini_hochberg(np.array([0.3]), rate)
    for alpha, delta in ((rate, 0.1), (0.1, rate)):
        with pytest.raises(ValueError, match="expected a number between 0 and 1"):
            slides_needed(alpha, delta)
        with pytest.raises(ValueError, match="expected a number between 0 and 1"):
            ReferRule.fit(np.array([0.3]), np.array([0]), alpha, delta)


def test_p_values_that_are_none():
    with pytest.raises(ValueError, match=r"p: expected p-values between 0 and 1, found 1.2, nan"):
        benjamini_hochberg(np.array([0.3, 1.2, np.nan]), 0.1)


def realised_rates(rate, share, *, correlation=0.0, disagreement=0.0, within=False, seed=0):
    """False discovery rates of 60 cohorts: K = 3 models, lesions 4 standard deviations higher.

    correlation: of the patches of a bag; disagreement: deviation of a model's own noise.
    """
    rng = np.random.default_rng(seed)
    n_folds, n_reference, n_bags, size = 3, 36, 20, 40
    bag, slide = (np.repeat(np.arange(n), size) for n in (n_reference, n_bags))

    def patches(bags):
        shared, own = rng.normal(size=(bags, 1)), rng.normal(size=(bags, size))
        return math.sqrt(correlation) * shared + math.sqrt(1 - correlation) * own

    def by_each_model(x):
        return (x + disagreement * rng.normal(size=(n_folds, *x.shape))).reshape(n_folds, -1)

    found = []
    for _ in range(60):
        held_out = by_each_model(patches(n_reference))[bag % n_folds, np.arange(len(bag))]
        reference = ConformalReference.build(held_out, bag % n_folds, bag, n_folds)
        lesion = rng.random((n_bags, size)) > share
        p = p_values(reference, by_each_model(patches(n_bags) + 4 * lesion))
        flagged = benjamini_hochberg(p, rate, slide if within else None)
        # the rate is promised of all patches together, or of each slide
        unit = slide if within else np.zeros_like(slide)
        wrong = np.bincount(unit, flagged & ~lesion.ravel())
        found.append(np.mean(wrong / np.maximum(np.bincount(unit, flagged), 1)))
    return np.array(found)


@pytest.mark.parametrize("within", [False, True])
@pytest.mark.parametrize(("rate", "share"), [(0.05, 0.8), (0.1, 0.6), (0.2, 0.9)])
def test_the_false_discovery_rate_is_share_of_negatives_times_rate(rate, share, within):
    found = realised_rates(rate, share, within=within, disagreement=0.05)
    error = found.std() / math.sqrt(len(found))
    assert abs(found.mean() - share * rate) < 0.02
    assert found.mean() <= share * rate + 3 * error


def test_models_that_disagree_mark_less():
    agreeing, disagreeing = (realised_rates(0.2, 0.9, disagreement=d) for d in (0.0, 0.6))
    assert disagreeing.mean() < 0.7 * agreeing.mean()


def test_correlation_within_bags_widens_the_realised_rate():
    loose, tight = (realised_rates(0.1, 0.8, correlation=c) for c in (0.0, 0.7))
    assert tight.std() > 2 * loose.std()
    assert abs(tight.mean() - 0.08) < 0.03


# ------------------------------------------------------------------ calibrated slides


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
    method=st.sampled_from(["sigmoid", "isotonic"]),
    slope=st.sampled_from([-0.3, 0.0, 0.4, 50.0]),  # backwards, useless, fair, separated
)
@settings(max_examples=60, deadline=None)
def test_probabilities_never_fall_and_are_never_certain(seed, method, slope):
    x, y = a_cohort(60, seed, slope)
    assume(min(y.sum(), 60 - y.sum()) >= 5)
    found = SlideCalibrator.fit(x, y, method)
    ends = np.array([-np.inf, -1e308, -1e5, 1e5, 1e308, np.inf])
    p = found.predict(np.sort(np.concatenate([x, ends, np.linspace(-30, 30, 50)])))
    assert (np.diff(p) >= 0).all() and p.min() > 0 and p.max() < 1
    again = SlideCalibrator.from_dict(json.loads(json.dumps(found.to_dict())))
    assert again == found and np.array_equal(again.predict(x), found.predict(x))


@pytest.mark.parametrize("method", ["sigmoid", "isotonic"])
def test_calibrated_in_the_large_and_better_than_before(method):
    x, y = a_cohort(2_000)
    found = SlideCalibrator.fit(x, y, method)
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
    with pytest.raises(ValueError, match="'sigmoid' or 'isotonic', found 'platt'"):
        SlideCalibrator.fit(x, y, "platt")
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


@settings(max_examples=10, deadline=None)
@given(
    k=st.integers(1, 7),
    seed=st.integers(0, 500),
    bent=st.sampled_from([0.0, 0.03, 0.4]),
    p=st.sampled_from([0.01, 0.07, 0.47, 0.9]),
)
def test_quantiles_of_a_quadratic_form_against_draws(k, seed, bent, p):
    rng = np.random.default_rng(seed)
    b, B = rng.standard_normal(k), bent * rng.standard_normal((k, k))
    B = B + B.T
    found = quadratic_quantile(-1.3, b, B, p)
    draws = interval_twin.quadratic_draws(-1.3, b, B)
    # error of the draws 0.001 at most, the rest is the saddlepoint's
    assert (draws < found).mean() == pytest.approx(p, abs=0.004 + 0.08 * min(p, 1 - p))


def test_quantiles_of_a_quadratic_form_in_its_limits():
    b = np.array([0.6, -1.1, 0.2])
    flat = quadratic_quantile(2.0, b, np.zeros((3, 3)), 0.83)
    assert flat == pytest.approx(2 + norm.ppf(0.83) * np.sqrt((b**2).sum()), abs=1e-9)
    assert quadratic_quantile(2.0, 0 * b, np.zeros((3, 3)), 0.83) == 2.0
    # no slope: half of a chi-squared, and its mirror image
    for p in (0.06, 0.5, 0.94):
        above = quadratic_quantile(0.0, np.zeros(9), np.eye(9), p)
        assert 2 * above == pytest.approx(chi2(9).ppf(p), rel=0.01)
        below = quadratic_quantile(0.0, np.zeros(9), -np.eye(9), p)
        assert 2 * below == pytest.approx(-chi2(9).ppf(1 - p), rel=0.01)
    # no jump where t = 0
    near = [quadratic_quantile(0.0, b, np.diag(b), p) for p in np.linspace(0.4, 0.6, 401)]
    steps = np.diff(near)
    assert (steps > 0).all() and steps.max() < 2 * steps.min()


# ------------------------------------------------------------------ intervals of a model

D = 12


def a_model(coupling, wide, n_bags=14, **changed):
    """A model of few slides, so that much is left to know."""
    chosen = (
        {"variance": 20.0, "lengthscale": 3 * np.sqrt(D), "mean": -4.0}
        if wide
        else {"variance": 1.0, "lengthscale": "sqrt_dim", "mean": 0.0}
    )
    train = simulate.cohort(n_bags, n_features=D, seed=4, mean_size=25, max_lesion=0.6)
    return gpmil.VGPMILPRI(
        coupling=coupling, n_inducing=12, random_state=1, device="cpu", **chosen, **changed
    ).fit(train)


@pytest.fixture(scope="module")
def new_slides():
    bags = simulate.cohort(12, n_features=D, seed=4, part=1, mean_size=35, max_lesion=0.6)
    return bags[bags.sizes <= 60]


@pytest.mark.parametrize("wide", [False, True], ids=["paper", "wide"])
@pytest.mark.parametrize("coupling", [0.5, 10.0])
def test_ends_are_quantiles_of_many_draws(coupling, wide, new_slides):
    model = a_model(coupling, wide)
    low, high = model.predict_interval(new_slides[:3], level=0.9)
    for b in range(3):
        draws = interval_twin.drawn(model, new_slides[b])
        # 2,000 draws have an error of 0.005, 64 of them 0.027
        assert (draws < low[b]).mean() == pytest.approx(0.05, abs=0.02)
        assert (draws < high[b]).mean() == pytest.approx(0.95, abs=0.02)
        q = np.quantile(draws, [0.05, 0.95])
        assert np.abs(np.array([low[b], high[b]]) - q).max() < 0.15 * (q[1] - q[0])


def test_ends_without_ep(new_slides):
    model = a_model(2.0, True)
    few = gpmil.Bags.from_arrays(
        [new_slides[b].features[:2] for b in range(3)],
        coords=[np.array([[0, 0], [0, 1]])] * 3,
        step=1,
    )
    low, high = model.predict_interval(few, level=0.8)
    for b in range(3):
        draws = interval_twin.drawn_pair(model, few[b])
        assert (draws < low[b]).mean() == pytest.approx(0.1, abs=0.025)
        assert (draws < high[b]).mean() == pytest.approx(0.9, abs=0.025)


def test_one_patch_has_an_exact_interval(new_slides):
    model = a_model(1.0, True)
    single = gpmil.Bags.from_arrays([new_slides[b].features[:1] for b in range(4)])
    low, high = model.predict_interval(single, level=0.9)
    for b in range(4):
        means, S = interval_twin.given_u(model, single[b], 40_000, 3)
        ends = means.mean() + np.array([-1, 1]) * norm.ppf(0.95) * means.std()
        # P(y = 1 | u) = Phi(E[m | u] / sd) rises with u: quantiles map to quantiles
        exact = norm.cdf(ends / np.sqrt(S[0, 0]))
        assert np.allclose([low[b], high[b]], exact, atol=0.012)


@pytest.mark.parametrize("coupling", [0.0, 1.0, 10.0])
def test_large_slides_have_the_same_interval(coupling, new_slides, monkeypatch):
    model = a_model(coupling, True)
    dense = np.stack(model.predict_interval(new_slides[:3]))
    monkeypatch.setattr(fitted, "LARGE", 3)
    large = np.stack(model.predict_interval(new_slides[:3]))
    assert np.abs(large - dense).max() < 0.01
    # one expansion at the mean of q(u), for the largest
    monkeypatch.setattr(fitted, "HUGE", 3)
    once = np.stack(model.predict_interval(new_slides[:3]))
    assert np.abs(once - dense).max() < 0.05
    assert not np.array_equal(once, large)


def test_intervals_hold_the_probability_and_repeat(new_slides):
    model = a_model(1.0, True)
    low, high = model.predict_interval(new_slides)
    p = model.predict_proba(new_slides)[:, 1]
    assert ((low > 0) & (low < p) & (p < high) & (high < 1)).all()
    again = model.predict_interval(new_slides)
    assert np.array_equal(again, (low, high))
    alone = np.array([model.predict_interval(new_slides[b]) for b in range(len(new_slides))])
    assert np.allclose(alone[..., 0].T, (low, high), rtol=1e-6)
    narrow = model.predict_interval(new_slides, level=0.5)
    assert (low < narrow[0]).all() and (narrow[1] < high).all()


def test_intervals_of_a_calibrated_model_are_mapped(new_slides):
    model = a_model(1.0, True, n_bags=30, calibrated=True, n_folds=2)
    ends = model.predict_interval(new_slides)
    calibrator = model.cross_fit_.calibrator
    model.cross_fit_ = None
    for mapped, plain in zip(ends, model.predict_interval(new_slides)):
        assert np.allclose(mapped, calibrator.predict(logit(plain)), rtol=1e-6)


@pytest.mark.parametrize("mean", [-25.0, 25.0])
def test_intervals_in_both_tails(mean, new_slides):
    model = a_model(2.0, True)
    model.mean_ = mean
    low, high = model.predict_interval(new_slides[:3])
    assert ((low >= 0) & (low <= high) & (high <= 1)).all()
    p = model.predict_proba(new_slides[:3])[:, 1]
    assert (p < 1e-4).all() if mean < 0 else (p > 0.999).all()
    assert (high < 1e-3).all() if mean < 0 else (low > 0.99).all()


# ------------------------------------------------------------------ refer or accept


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
