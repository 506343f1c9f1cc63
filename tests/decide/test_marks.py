import math
import time
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles import calibration as naive
from scipy.stats import false_discovery_control

from gpmil.decide.marks import ConformalReference, benjamini_hochberg, p_values
from gpmil.decide.refer import ReferRule, slides_needed

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
        assert found[groups == g].tolist() == naive.benjamini_hochberg(p[groups == g], rate)
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
