import logging
import warnings

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles import calibration as naive

from gpmil.data.folds import folds


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
        ([0, 0, 1, 1], [4, 5, 6], "groups: expected one per bag, 4 in all, found 3"),
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
