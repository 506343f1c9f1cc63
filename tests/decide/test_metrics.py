"""Measures against scikit-learn and copied rows; what is undefined; what the intervals promise."""

import math
import warnings
from dataclasses import FrozenInstanceError, astuple

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles import metrics as oracles
from scipy.stats import beta, binomtest, norm
from sklearn.metrics import log_loss, roc_auc_score

from gpmil.decide import intervals
from gpmil.decide.metrics import (
    Estimate,
    bag_metrics,
    calibration_error,
    false_discovery_rate,
    froc,
    patch_metrics,
    reliability_curve,
    table,
    within_bag_auc,
)

BAG_KEYS = [
    "accuracy",
    "precision",
    "recall",
    "f1",
    "auc",
    "average_precision",
    "calibration_error",
    "log_loss",
    "brier",
]
PATCH_KEYS = [*BAG_KEYS, "within_bag_auc", "false_discovery_rate", "power", "froc"]

Y = np.array([0, 1, 1, 0, 1, 0, 0])
P = np.array([0.2, 0.9, 0.4, 0.7, 0.8, 0.1, 0.35])


@pytest.fixture(autouse=True)
def no_warnings():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


def cohort(seed, n, n_bags, digits=None, share=0.4):
    """Labels, probabilities (with ties when rounded to `digits`) and bags in no order."""
    rng = np.random.default_rng(seed)
    y = (rng.random(n) < share).astype(int)
    p = 1 / (1 + np.exp(-rng.normal(1.5 * y - 1, 1)))
    p = p if digits is None else p.round(digits)
    return y, p, rng.integers(n_bags, size=n)


def values(found):
    return {name: estimate.value for name, estimate in found.items()}


def close(found, expected, rel=1e-10):
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert found[name] == pytest.approx(value, rel=rel, abs=1e-12, nan_ok=True), name


def spread(found):
    return {name: (e.low, e.high, e.n_undefined) for name, e in found.items()}


def agree(found, y, p, patient, level, resampled):
    """Exact intervals where there are any, the bootstrap's else; averages of 0 or 1 apart."""
    exact = oracles.exact_intervals(y, p, p > 0.5, patient, level)
    for name, estimate in found.items():
        expected = resampled[name]
        if name in exact and not math.isnan(estimate.value):
            expected = (*exact[name], 0)
        if name in exact or estimate.value not in (0, 1):
            got = (estimate.low, estimate.high, estimate.n_undefined)
            # Newcombe's equation is solved to 1e-12 or so, by other means in the twin.
            assert got == pytest.approx(expected, rel=1e-8, abs=1e-10, nan_ok=True), name


def bits(found):
    """Everything in the estimates; repr tells -0.0 from 0.0 and holds every digit."""
    return {name: repr(astuple(estimate)) for name, estimate in found.items()}


# --- The numbers ----------------------------------------------------------------------------------
@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    n=st.integers(1, 60),
    digits=st.sampled_from([None, 2, 1, 0]),
    n_bins=st.integers(1, 12),
    binning=st.sampled_from(["mass", "width"]),
)
def test_bags_agree_with_the_naive_twin(seed, n, digits, n_bins, binning):
    y, p, _ = cohort(seed, n, 1, digits)
    found = bag_metrics(y, p, threshold=0.3, n_bootstrap=1, n_bins=n_bins, binning=binning)
    close(values(found), oracles.row_measures(y, p, p > 0.3, n_bins, binning))
    assert list(found) == BAG_KEYS


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    n=st.integers(1, 60),
    n_bags=st.integers(1, 9),
    digits=st.sampled_from([None, 2, 1, 0]),
    share=st.sampled_from([0.0, 0.1, 0.6, 1.0]),
)
def test_patches_agree_with_the_naive_twin(seed, n, n_bags, digits, share):
    y, p, bag = cohort(seed, n, n_bags, digits, share)
    flagged = np.random.default_rng([seed, 1]).random(n) < 0.3
    found = patch_metrics(y, p, bag, decision=flagged, n_bootstrap=1)
    close(values(found), oracles.patch_measures(y, p, flagged, bag))
    assert list(found) == PATCH_KEYS


def test_paper_measures_by_hand():
    # flagged at 0.5: rows 1, 3, 4, of which 1 and 4 are positive; row 2 is missed
    found = values(bag_metrics(Y, P, n_bootstrap=1))
    assert found["accuracy"] == 5 / 7
    assert found["precision"] == found["recall"] == found["f1"] == 2 / 3
    # of 12 pairs only (0.4, 0.7) is the wrong way round
    assert found["auc"] == 11 / 12


def test_a_probability_at_the_threshold_is_not_flagged():
    assert values(bag_metrics([1, 0], [0.5, 0.2], n_bootstrap=1))["recall"] == 0
    assert values(bag_metrics([1, 0], [0.5, 0.2], threshold=0.4, n_bootstrap=1))["recall"] == 1


def test_decisions_replace_the_threshold():
    decision = np.array([True, True, False, False, False, False, False])
    found = bag_metrics(Y, P, decision=decision, threshold=0.05, n_bootstrap=1)
    assert values(found)["precision"] == 1 / 2
    assert values(found)["recall"] == 1 / 3


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_certain_and_wrong_costs_as_in_scikit_learn(dtype):
    p = np.array([0.0, 1.0, 0.25], dtype=dtype)
    found = bag_metrics([1, 1, 0], p, n_bootstrap=1)["log_loss"].value
    assert found == pytest.approx(log_loss([1, 1, 0], p), rel=1e-6)


def test_unknown_patches_are_left_out():
    y, p, bag = cohort(3, 80, 6, digits=1)
    labels = np.where(np.random.default_rng(33).random(80) < 0.4, -1, y)
    known = labels >= 0
    full = patch_metrics(labels, p, bag, n_bootstrap=20)
    kept = patch_metrics(labels[known], p[known], bag[known], n_bootstrap=20)
    assert bits(full) == bits(kept)
    assert within_bag_auc(labels, p, bag) == full["within_bag_auc"].value
    assert false_discovery_rate(labels, p > 0.5) == full["false_discovery_rate"].value


def test_missing_patch_labels_are_unknown():
    found = patch_metrics([1, None, 0], [0.9, 0.1, 0.2], [0, 0, 1], n_bootstrap=1)
    assert found["accuracy"].value == 1


# --- The bootstrap --------------------------------------------------------------------------------
@settings(max_examples=15, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    n=st.integers(2, 40),
    n_patients=st.integers(2, 8),
    digits=st.sampled_from([None, 1]),
    binning=st.sampled_from(["mass", "width"]),
    level=st.sampled_from([0.5, 0.9]),
)
def test_bag_intervals_agree_with_copied_rows(seed, n, n_patients, digits, binning, level):
    y, p, patient = cohort(seed, n, n_patients, digits)
    patient = np.array([f"p{k}" for k in patient])
    if len(set(patient)) < 2:
        return
    chosen = {"n_bootstrap": 7, "level": level, "seed": seed}
    bins = {"n_bins": 4, "binning": binning}
    found = bag_metrics(y, p, groups=patient, **chosen, **bins)
    agree(
        found, y, p, patient, level, oracles.bag_bootstrap(y, p, p > 0.5, patient, **chosen, **bins)
    )
    assert {e.n for e in found.values()} == {len(set(patient))}
    assert {e.level for e in found.values()} == {level}


@settings(max_examples=15, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    n=st.integers(2, 60),
    n_bags=st.integers(2, 9),
    grouped=st.booleans(),
    digits=st.sampled_from([None, 1]),
)
def test_patch_intervals_agree_with_copied_rows(seed, n, n_bags, grouped, digits):
    y, p, bag = cohort(seed, n, n_bags, digits)
    rng = np.random.default_rng([seed, 1])
    labels = np.where(rng.random(n) < 0.2, -1, y)
    groups = rng.integers(5, size=bag.max() + 1) if grouped else None
    patient = groups[bag] if grouped else bag
    known = labels >= 0
    if len(set(patient[known])) < 2:
        return
    chosen = {"n_bootstrap": 7, "level": 0.8, "seed": seed}
    found = patch_metrics(labels, p, bag, groups=groups, **chosen)
    y, p, bag, patient = y[known], p[known], bag[known], patient[known]
    agree(found, y, p, patient, 0.8, oracles.patch_bootstrap(y, p, p > 0.5, bag, patient, **chosen))
    assert {e.n for e in found.values()} == {len(set(patient))}


def test_same_seed_same_bits():
    y, p, bag = cohort(5, 90, 12)
    once, again = (patch_metrics(y, p, bag, n_bootstrap=30, seed=4) for _ in range(2))
    assert bits(once) == bits(again)
    assert bits(once) != bits(patch_metrics(y, p, bag, n_bootstrap=30, seed=5))
    assert bits(bag_metrics(Y, P, n_bootstrap=30)) == bits(bag_metrics(Y, P, n_bootstrap=30))


def test_order_of_rows_does_not_matter():
    y, p, patient = cohort(6, 50, 9, digits=1)
    mixed = np.random.default_rng(6).permutation(50)
    found = bag_metrics(y, p, groups=patient, n_bootstrap=30)
    other = bag_metrics(y[mixed], p[mixed], groups=patient[mixed], n_bootstrap=30)
    close(spread(other), spread(found))


def test_copies_of_a_patients_bags_add_no_certainty():
    """Five equal bags a patient: with groups nothing changes, without it the interval shrinks."""
    y, p, _ = cohort(7, 30, 1)
    patient = np.repeat(np.arange(30), 5)
    single = bag_metrics(y, p, n_bootstrap=200)
    grouped = bag_metrics(y.repeat(5), p.repeat(5), groups=patient, n_bootstrap=200)
    close(values(grouped), values(single))
    close(spread(grouped), spread(single))
    naive = bag_metrics(y.repeat(5), p.repeat(5), n_bootstrap=200)["auc"]
    assert naive.high - naive.low < 0.7 * (single["auc"].high - single["auc"].low)


def test_one_patch_a_bag_is_a_bag():
    y, p, patient = cohort(8, 40, 11)
    patches = patch_metrics(y, p, np.arange(40), groups=patient, n_bootstrap=30)
    bags = bag_metrics(y, p, groups=patient, n_bootstrap=30)
    assert {k: v for k, v in bits(patches).items() if k in bags} == bits(bags)
    assert math.isnan(patches["within_bag_auc"].value)


def test_one_bag_has_its_auc_within():
    y, p, _ = cohort(9, 40, 1, digits=1)
    assert within_bag_auc(y, p, np.zeros(40, int)) == pytest.approx(roc_auc_score(y, p), rel=1e-14)


def test_within_bag_auc_ignores_what_differs_between_bags():
    y, p, bag = cohort(10, 200, 7)
    assert within_bag_auc(y, p - 5.0 * bag, bag) == pytest.approx(within_bag_auc(y, p, bag))


def test_froc_by_hand():
    # two bags; from the highest score down: hit, miss, hit, miss, miss, hit
    labels, score = [1, 0, 1, 0, 0, 1], [0.9, 0.8, 0.7, 0.6, 0.5, 0.4]
    bag = [0, 0, 0, 1, 1, 1]
    found = [froc(labels, score, bag, [rate]) for rate in (0, 0.25, 0.5, 1, 2)]
    np.testing.assert_allclose(found, [1 / 3, 1 / 3, 2 / 3, 2 / 3, 1])
    assert froc(labels, score, bag) == pytest.approx((1 / 3 + 2 / 3 + 2 / 3 + 1 + 1 + 1) / 6)


def test_froc_takes_any_scale_and_leaves_unknown_patches_out():
    y, p, bag = cohort(5, 60, 4, digits=1)
    logit = np.log(p + 0.01)
    assert froc(y, logit, bag) == froc(y, p, bag) == pytest.approx(oracles.froc(y, p, bag))
    some = np.where(np.arange(60) % 3 == 0, -1, y)
    # a bag without a known patch is none
    more = np.append(some, -1), np.append(p, 0.99), np.append(bag, 9)
    assert froc(*more) == pytest.approx(oracles.froc(some, p, bag))
    assert math.isnan(froc(np.zeros(60), p, bag))
    with pytest.raises(ValueError, match="false_per_bag"):
        froc(y, p, bag, [-1])


def test_intervals_cover_the_truth():
    """90 % intervals of accuracy .8, bags of a patient all right or all wrong: 40 patients."""
    rng = np.random.default_rng(11)
    patient = np.repeat(np.arange(40), 3)
    covered = {"by patient": 0, "by bag": 0}
    for _ in range(60):
        right = (rng.random(40) < 0.8)[patient]
        y = rng.integers(0, 2, 120)
        p = np.where(right, y, 1 - y) * 0.8 + 0.1
        for name, groups in (("by patient", patient), ("by bag", None)):
            found = bag_metrics(y, p, groups=groups, n_bootstrap=1, level=0.9)  # exact
            covered[name] += found["accuracy"].low <= 0.8 <= found["accuracy"].high
    # About 54 of 60; drawn bag by bag the interval is sqrt(3) times too narrow: about 40 of 60.
    assert covered["by patient"] >= 48 > covered["by bag"]


# --- Exact intervals ------------------------------------------------------------------------------
def test_all_right_is_not_certain():
    """16 of 16 right was 1.000 (1.000 to 1.000), and so was their AUC."""
    y = np.arange(16) % 2
    found = bag_metrics(y, 0.1 + 0.8 * y, n_bootstrap=50)
    assert str(found["accuracy"]) == "1.000 (0.79 to 1.00)"
    assert str(found["recall"]) == str(found["precision"]) == "1.000 (0.63 to 1.00)"
    assert str(found["auc"]) == "1.000 (0.76 to 1.00)"
    assert str(found["average_precision"]) == "1.000 (0.63 to 1.00)"
    assert found["f1"].low < 0.9 and found["f1"].high == 1


def test_patches_all_right_are_not_certain():
    y, bag = np.tile([0, 1, 1], 6), np.repeat(np.arange(6), 3)
    found = patch_metrics(y, 0.1 + 0.8 * y, bag, n_bootstrap=50)
    for name in ("auc", "within_bag_auc", "power", "accuracy"):
        # of 6 slides, not of 18 patches: 0.025^(1/6) = 0.54
        assert 0.5 < found[name].low < 0.75 and found[name].high == 1, name
    assert 0.4 < found["false_discovery_rate"].high < 0.5


def test_repeats_of_a_slide_add_no_certainty():
    """A slide that every repeat of a cross-validation predicts is one slide."""
    once = bag_metrics([0, 1] * 8, [0.1, 0.9] * 8, n_bootstrap=5)
    slides = np.tile(np.arange(16), 5)
    often = bag_metrics([0, 1] * 40, [0.1, 0.9] * 40, groups=slides, n_bootstrap=5)
    for name in ("accuracy", "auc", "recall", "f1", "average_precision"):
        assert often[name].low == pytest.approx(once[name].low, rel=1e-9), name


@settings(max_examples=60, deadline=None)
@given(
    k=st.integers(0, 40),
    more=st.integers(0, 40),
    level=st.sampled_from([0.5, 0.8, 0.95, 0.99]),
)
def test_shares_have_the_binomial_interval(k, more, level):
    n = k + more
    if not n:
        return
    hits = np.repeat([1.0, 0.0], [k, more])
    found = intervals.share(hits, np.ones(n), level)
    assert found == pytest.approx(oracles.clopper_pearson(k, n, level), abs=1e-9)
    low, high = binomtest(k, n).proportion_ci(level, method="exact")
    assert found == pytest.approx((low, high), abs=1e-9)


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    n=st.integers(2, 60),
    n_patients=st.integers(2, 60),
    digits=st.sampled_from([None, 1, 0]),
    share=st.sampled_from([0.05, 0.5, 0.95]),
)
def test_exact_intervals_hold_the_value_and_have_a_width(seed, n, n_patients, digits, share):
    y, p, patient = cohort(seed, n, n_patients, digits, share)
    if len(set(patient)) < 2:
        return
    for name, e in bag_metrics(y, p, groups=patient, n_bootstrap=1).items():
        if name in ("accuracy", "precision", "recall", "f1", "auc") and not math.isnan(e.low):
            assert 0 <= e.low <= e.value + 1e-12 and e.value - 1e-12 <= e.high <= 1, name
            # of a few patients DeLong's variance may be next to nothing by chance
            assert e.high - e.low > (1e-3 if name != "auc" or len(set(patient)) > 4 else 0), name


def test_nothing_to_count_has_no_interval():
    found = bag_metrics(Y, P * 0.5, n_bootstrap=5)["precision"]
    assert str(found) == "0.000 (no interval)"


@pytest.mark.parametrize("n", [24, 60, 300])
def test_the_interval_of_a_calibration_error_holds_it(n):
    rng = np.random.default_rng(n)
    p = rng.random(n)
    found = bag_metrics((rng.random(n) < p).astype(int), p, n_bootstrap=200)["calibration_error"]
    assert 0 <= found.low < found.value < found.high


def test_the_auc_of_many_bags_has_delongs_interval():
    """Beside the bootstrap of the same cohort, which is right with so many."""
    y, p, _ = cohort(16, 2000, 1)
    found = bag_metrics(y, p, n_bootstrap=1)["auc"]
    resampled = np.random.default_rng(0).integers(0, 2000, (300, 2000))
    drawn = [roc_auc_score(y[rows], p[rows]) for rows in resampled]
    low, high = np.quantile(drawn, [0.025, 0.975])
    assert found.low == pytest.approx(low, abs=0.003)
    assert found.high == pytest.approx(high, abs=0.003)


def test_exact_intervals_cover_the_truth():
    """95 % intervals of 16 bags, accuracy .9 and AUC .9: at least 93 % of 400 cohorts."""
    rng = np.random.default_rng(17)
    one, y = np.arange(16), np.arange(16) % 2.0
    shift = math.sqrt(2) * norm.ppf(0.9)
    held = {"share": 0, "auc": 0}
    for _ in range(400):
        right = (rng.random(16) < 0.9).astype(float)
        low, high = intervals.share(right, np.ones(16), 0.95)
        held["share"] += low <= 0.9 <= high
        low, high = intervals.auc(y, rng.normal(shift * y), one, 0.95)
        held["auc"] += low <= 0.9 <= high
    assert min(held.values()) >= 0.93 * 400


def test_a_wider_level_gives_a_wider_interval():
    narrow, wide = (bag_metrics(Y, P, level=level, n_bootstrap=100) for level in (0.5, 0.9))
    assert wide["brier"].low < narrow["brier"].low < narrow["brier"].high < wide["brier"].high


def test_a_million_patches():
    y, p, bag = cohort(12, 1_000_000, 800)
    found = patch_metrics(y, p, bag, n_bootstrap=3)
    assert found["auc"].value == pytest.approx(roc_auc_score(y, p), rel=1e-12)
    assert found["auc"].n == 800


# --- What is not defined --------------------------------------------------------------------------
def test_without_a_positive():
    found = patch_metrics([0, 0, 0], [0.1, 0.7, 0.3], [0, 1, 1], n_bootstrap=10)
    undefined = {"recall", "f1", "auc", "average_precision", "within_bag_auc", "power", "froc"}
    assert {name for name, e in found.items() if math.isnan(e.value)} == undefined
    assert found["precision"].value == 0
    assert found["false_discovery_rate"].value == 1
    assert {found[name].n_undefined for name in undefined} == {10}
    assert all(math.isnan(found[name].low) for name in undefined)


def test_without_a_negative():
    found = bag_metrics([1, 1, 1], [0.1, 0.7, 0.3], n_bootstrap=10)
    assert {name for name, e in found.items() if math.isnan(e.value)} == {"auc"}


def test_with_nothing_flagged():
    found = values(patch_metrics([0, 1, 1], [0.1, 0.4, 0.3], [0, 0, 1], n_bootstrap=10))
    names = ("precision", "recall", "f1", "false_discovery_rate", "power")
    assert [found[name] for name in names] == [0, 0, 0, 0, 0]
    assert false_discovery_rate([0, 1, -1], [0, 0, 1]) == 0


def test_undefined_resamples_are_counted_and_left_out():
    """One positive in four: (3/4)^4 = 32 % of the resamples have none, and no precision."""
    found = bag_metrics([1, 0, 0, 0], [0.5, 0.7, 0.3, 0.2], n_bootstrap=400)
    precision = found["average_precision"]
    assert 90 < precision.n_undefined < 160
    assert 0 <= precision.low <= precision.value <= precision.high == 1
    assert found["auc"].n_undefined == 0


def test_one_patient_has_no_interval():
    found = bag_metrics(Y, P, groups=["a"] * 7, n_bootstrap=10)
    assert all(math.isnan(e.low) and math.isnan(e.high) for e in found.values())
    assert found["auc"].value == 11 / 12
    assert (found["auc"].n, found["auc"].n_undefined) == (1, 0)


def test_one_annotated_bag_has_no_interval():
    found = patch_metrics([0, 1, -1, -1], [0.2, 0.6, 0.5, 0.1], [0, 0, 1, 2], n_bootstrap=10)
    assert found["auc"].n == 1
    assert math.isnan(found["auc"].low)


# --- Calibration ----------------------------------------------------------------------------------
def test_calibration_error_of_a_constant_is_its_distance_from_the_share():
    y = np.array([1, 0, 0, 0, 1])
    for binning in ("mass", "width"):
        assert calibration_error(y, np.full(5, 0.9), binning=binning) == pytest.approx(0.5)


def test_one_bin_compares_the_means():
    expected = abs(Y.mean() - P.mean())
    assert calibration_error(Y, P, 1) == pytest.approx(expected)


def test_probability_one_lies_in_the_last_bin():
    assert calibration_error([1, 0], [1.0, 0.95], 10, binning="width") == pytest.approx(0.475)


def test_calibrated_probabilities_have_a_small_calibration_error():
    rng = np.random.default_rng(13)
    p = rng.beta(0.4, 1.1, 40_000)
    y = rng.random(40_000) < p
    for binning in ("mass", "width"):
        assert calibration_error(y, p, binning=binning) < 0.01
        assert calibration_error(y, p**2, binning=binning) > 0.05


def test_reliability_curve_has_bins_of_equal_mass():
    y, p, _ = cohort(14, 57, 1)
    curve = reliability_curve(y, p, n_bins=5)
    assert curve.count.sum() == 57
    assert set(curve.count) <= {11, 12}
    assert (np.diff(curve.predicted) > 0).all()
    assert curve.predicted @ curve.count == pytest.approx(p.sum())
    assert curve.observed @ curve.count == pytest.approx(y.sum())
    gap = np.abs(curve.observed - curve.predicted) @ curve.count / 57
    assert gap == pytest.approx(calibration_error(y, p, 5))


def test_reliability_intervals_are_clopper_pearson():
    y, p, _ = cohort(15, 43, 1)
    curve = reliability_curve(y, p, n_bins=3, level=0.9)
    positive = curve.observed * curve.count
    inside = (positive > 0) & (positive < curve.count)
    assert inside.any()
    low = beta.ppf(0.05, positive, curve.count - positive + 1)
    high = beta.ppf(0.95, positive + 1, curve.count - positive)
    np.testing.assert_allclose(curve.low[inside], low[inside], rtol=1e-9)
    np.testing.assert_allclose(curve.high[inside], high[inside], rtol=1e-9)


def test_reliability_intervals_end_at_certainty():
    curve = reliability_curve([0, 0, 1, 1], [0.1, 0.2, 0.8, 0.9], n_bins=2)
    assert (curve.low[0], curve.high[1]) == (0, 1)
    # (alpha / 2)^(1/n) for n of n
    assert curve.low[1] == pytest.approx(0.025**0.5)


def test_ties_share_a_bin():
    curve = reliability_curve([0, 1, 0, 1, 1, 0], [0.3] * 5 + [0.8], n_bins=4)
    assert curve.count.tolist() == [5, 1]


# --- How it is shown ------------------------------------------------------------------------------
def test_estimate_as_text_and_number():
    estimate = Estimate(0.9121, 0.8512, 0.9649, 0.95, 40, 0)
    assert str(estimate) == "0.912 (0.85 to 0.96)"
    assert float(estimate) == 0.9121
    assert str(Estimate(0.9121, 0.9092, 0.9149, 0.95, 40, 0)) == "0.912 (0.909 to 0.915)"
    assert str(Estimate(0.9121, math.nan, math.nan, 0.95, 1, 0)) == "0.912 (no interval)"
    assert str(Estimate(math.nan, math.nan, math.nan, 0.95, 40, 9)) == "undefined"
    with pytest.raises(FrozenInstanceError):
        estimate.value = 1.0


def test_table_has_a_row_a_model_and_a_column_a_metric():
    bags = bag_metrics(Y, P, n_bootstrap=5)
    patches = patch_metrics(Y, P, [0, 0, 0, 1, 1, 1, 2], n_bootstrap=5)
    found = table({"slides": bags, "patches": patches})
    assert list(found.index) == ["slides", "patches"]
    assert list(found.columns) == PATCH_KEYS
    assert found.loc["slides", "auc"] == str(bags["auc"])
    assert found.loc["slides", "power"] == ""
    assert table({}).empty


# --- What comes in --------------------------------------------------------------------------------
def test_series_lists_and_flags_are_taken():
    expected = bits(bag_metrics(Y, P, groups=[1, 1, 2, 2, 3, 4, 5], n_bootstrap=5))
    frame = pd.DataFrame({"y": Y == 1, "p": P, "patient": [1.0, 1, 2, 2, 3, 4, 5]})
    assert bits(bag_metrics(frame.y, frame.p, groups=frame.patient, n_bootstrap=5)) == expected
    y, p = pd.Series(Y, dtype=object), P.tolist()
    assert bits(bag_metrics(y, p, groups=[1, 1, 2, 2, 3, 4, 5], n_bootstrap=5)) == expected


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"y": []}, "y: expected one value per bag, found none: an empty cohort"),
        ({"y": Y[:, None]}, r"y: expected one value per bag, found shape \(7, 1\)"),
        ({"y": np.where(Y, 1, -1)}, r"y: expected 0 or 1, found -1 \(4 of 7\). Leave out bags"),
        ({"y": [0, 1, 1, 0, None, 0, 0]}, r"found nan \(1 of 7\). Leave out bags without"),
        ({"y": Y * 2}, "y: expected 0 or 1, found 2"),
        ({"y": Y.astype(str)}, "y: expected 0 or 1, found '0', '1'"),
        ({"y": list("abbabaa")}, r"found 'a', 'b' \(7 of 7\).*\(y == \"cancer\"\)"),
        ({"p": P[:5]}, r"p: expected one value per bag, 7 in all, found shape \(5,\)"),
        ({"p": np.stack([1 - P, P], axis=1)}, r"predict_proba\(bags\)\[:, 1\]"),
        ({"p": P - 0.15}, "probabilities between 0 and 1, found -0.05 to 0.75: log odds"),
        ({"p": P + 0.2}, "probabilities between 0 and 1, found 0.3 to 1.1"),
        ({"p": np.where(P > 0.8, np.nan, P)}, "finite numbers, found nan in row 1"),
        ({"p": P.astype(str)}, "p: expected numbers, found '0.2'"),
        ({"decision": P}, "decision: expected 0 or 1, found 0.2, .*Pass what was decided"),
        ({"decision": [True]}, "decision: expected one value per bag, 7 in all"),
        ({"threshold": 50}, "threshold: expected a probability between 0 and 1, found 50"),
        ({"threshold": math.nan}, "threshold: expected a probability"),
        ({"groups": [1, 2]}, r"groups: expected the patient of each bag, 7 in all, found shape"),
        ({"groups": ["a", None, *"bcdef"]}, "groups: missing for 'bag1'"),
        ({"n_bootstrap": 0}, "n_bootstrap: expected a whole number from 1, found 0"),
        ({"level": 95}, "level: expected a share between 0 and 1, such as 0.95, found 95"),
        ({"level": 0.0}, "level: expected a share"),
        ({"level": 1.0}, "level: expected a share"),
        ({"seed": -1}, "seed: expected a whole number from 0, found -1"),
        ({"n_bins": 0}, "n_bins: expected a whole number from 1, found 0"),
    ],
)
def test_bad_bags_are_refused(change, message):
    given = {"y": Y, "p": P} | change
    with pytest.raises(ValueError, match=message):
        bag_metrics(given.pop("y"), given.pop("p"), **given)


BAG = np.array([0, 0, 0, 1, 1, 2, 2])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"labels": np.full(7, -1)}, "labels: all 7 are unknown"),
        ({"labels": Y + 1}, r"expected 0, 1 or -1 \(unknown\), found 1, 2"),
        ({"labels": []}, "labels: expected one value per patch, found none"),
        ({"score": 4 * P}, "score: expected probabilities between 0 and 1"),
        ({"score": P[1:]}, "score: expected one value per patch, 7 in all"),
        ({"bag_index": BAG[1:]}, "bag_index: expected one value per patch, 7 in all"),
        ({"bag_index": BAG - 1}, "bag_index: expected the number of each patch's bag"),
        ({"bag_index": list("aaabbcc")}, r"found 'a', 'b', 'c'. Pass bags.bag_index"),
        ({"groups": np.arange(7)}, r"patient of each bag, 3 in all, found shape \(7,\)"),
        ({"groups": [1, np.nan, 2]}, "groups: missing for 'bag1'"),
        ({"decision": [2] * 7}, "decision: expected 0 or 1, found 2"),
        ({"n_bootstrap": -3}, "n_bootstrap: expected"),
    ],
)
def test_bad_patches_are_refused(change, message):
    given = {"labels": Y, "score": P, "bag_index": BAG} | change
    with pytest.raises(ValueError, match=message):
        patch_metrics(given.pop("labels"), given.pop("score"), given.pop("bag_index"), **given)


def test_bags_may_have_any_number():
    """Bags without a patch are no bags; large numbers cost no memory."""
    far = patch_metrics(Y, P, BAG * 10**12, n_bootstrap=10)
    assert bits(far) == bits(patch_metrics(Y, P, BAG, n_bootstrap=10))


def test_single_numbers_refuse_what_they_cannot_judge():
    with pytest.raises(ValueError, match="finite numbers, found inf"):
        within_bag_auc(Y, np.where(P > 0.8, np.inf, P), BAG)
    with pytest.raises(ValueError, match="flagged: expected 0 or 1"):
        false_discovery_rate(Y, P)
    with pytest.raises(ValueError, match="all 7 are unknown"):
        false_discovery_rate(np.full(7, -1), Y)
    with pytest.raises(ValueError, match="n_bins"):
        calibration_error(Y, P, 0)
    with pytest.raises(ValueError, match="level"):
        reliability_curve(Y, P, level=90)
