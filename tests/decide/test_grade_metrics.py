"""Metrics of grades against scikit-learn and counting by hand."""

import itertools

import numpy as np
import pytest
from sklearn.metrics import (
    accuracy_score,
    balanced_accuracy_score,
    cohen_kappa_score,
    log_loss,
    roc_auc_score,
)

from gpmil.decide.grade_metrics import expected_kappa, most_kappa
from gpmil.metrics import calibration_error, class_metrics, confusion, grade_metrics


@pytest.fixture(scope="module")
def known():
    rng = np.random.default_rng(1)
    y = rng.integers(4, size=90)
    near = np.clip(y + rng.integers(-2, 3, size=90), 0, 3)
    p = rng.dirichlet(np.ones(4), 90) + 1.3 * np.eye(4)[near]
    return y, p / p.sum(1, keepdims=True)


def test_every_number_is_that_of_scikit_learn(known):
    y, p = known
    said = p.argmax(1)
    found = grade_metrics(y, p, decision=said, n_bootstrap=50)
    assert found["kappa"].value == pytest.approx(cohen_kappa_score(y, said, weights="quadratic"))
    assert found["accuracy"].value == pytest.approx(accuracy_score(y, said))
    assert found["within_one"].value == pytest.approx(np.mean(np.abs(y - said) <= 1))
    assert found["log_loss"].value == pytest.approx(log_loss(y, p))
    for k in (1, 2, 3):
        expected = calibration_error((y >= k).astype(int), p[:, k:].sum(1).clip(0, 1))
        assert found[f"calibration_error_{k}"].value == pytest.approx(expected)
    for name in ("kappa", "accuracy", "within_one"):
        assert found[name].low < found[name].value < found[name].high
    table = confusion(y, said, ["benign", "3", "4", "5"])
    assert table.to_numpy().sum() == 90 and table.loc["4", "3"] == ((y == 2) & (said == 1)).sum()


def test_types_are_judged_as_scikit_learn_does(known):
    y, p = known
    found = class_metrics(y, p, n_bootstrap=50)
    said = p.argmax(1)
    assert found["accuracy"].value == pytest.approx(accuracy_score(y, said))
    assert found["mean_recall"].value == pytest.approx(balanced_accuracy_score(y, said))
    assert found["log_loss"].value == pytest.approx(log_loss(y, p))
    for k in range(4):
        assert found[f"auc_{k}"].value == pytest.approx(roc_auc_score(y == k, p[:, k]))
        error = calibration_error((y == k).astype(int), p[:, k])
        assert found[f"calibration_error_{k}"].value == pytest.approx(error)


def test_patients_are_resampled_whole(known):
    y, p = known
    alone = grade_metrics(y, p, n_bootstrap=200)["kappa"]
    # every bag three times: as much is known as before
    thrice = np.tile(np.arange(90), 3)
    again = grade_metrics(y[thrice], p[thrice], groups=thrice, n_bootstrap=200)["kappa"]
    assert again.value == pytest.approx(alone.value) and again.n == 90
    assert (again.low, again.high) == pytest.approx((alone.low, alone.high))


def test_the_default_decision_costs_least(known):
    y, p = known
    cost = (p[:, None] * np.square(np.arange(4)[:, None] - np.arange(4))).sum(-1).argmin(1)
    ours, theirs = (grade_metrics(y, p, decision=d, n_bootstrap=10) for d in (None, cost))
    assert ours == theirs


def test_one_grade_has_no_kappa():
    found = grade_metrics([1, 1], [[0.1, 0.9], [0.2, 0.8]], n_bootstrap=10)
    assert np.isnan(found["kappa"].value) and found["accuracy"].value == 1


@pytest.mark.parametrize(
    ("y", "p", "words"),
    [
        ([0, 3], [[0.5, 0.5], [0.5, 0.5]], "y: expected grades as numbers 0 to 1"),
        ([0, 0.5], [[0.5, 0.5], [0.5, 0.5]], "y: expected grades as numbers"),
        ([0, 1], [0.5, 0.5], "p: expected \\(bags, grades\\)"),
        ([0, 1], [[0.5, 0.6], [0.5, 0.5]], "sum to 1"),
        ([0], [[0.5, 0.5], [0.5, 0.5]], "y"),
    ],
)
def test_bad_input_is_refused(y, p, words):
    with pytest.raises(ValueError, match=words):
        grade_metrics(y, p)


def test_no_calls_have_a_larger_expected_kappa():
    rng = np.random.default_rng(1)
    p, shares = rng.dirichlet(np.ones(3), 5), np.array([0.5, 0.2, 0.3])
    apart = np.square(np.subtract.outer(np.arange(3), np.arange(3)))

    def expected(said):
        said = np.array(said)
        return 1 - (p @ apart)[np.arange(5), said].sum() / (shares @ apart)[said].sum()

    best = max(map(expected, itertools.product(range(3), repeat=5)))
    kappa = expected_kappa(p, shares)
    assert kappa == pytest.approx(best, abs=1e-9)
    assert expected(most_kappa(p, shares, kappa)) == pytest.approx(best, abs=1e-9)
    # of slides that nobody can tell apart nothing is expected
    assert expected_kappa(np.tile(shares, (5, 1)), shares) == 0.05
