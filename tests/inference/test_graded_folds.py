"""Grades left out in folds: what models fitted to the other folds say, and steps close by."""

import numpy as np
import pytest
import torch

import gpmil
from gpmil.inference.at_settings import Settings
from gpmil.inference.graded_folds import GradedFolds

CUTS = np.array([0.0, 1.3])
SETTINGS = Settings(5.0, 1.8, -1.1, 0.4, 0.6)
GRADES = np.arange(15) % 3
CODES = [0, 1, 2]


def model(bags, settings, cuts):
    numbers = dict(zip(("variance", "lengthscale", "mean", "coupling", "slide_effect"), settings))
    return gpmil.OrdinalMIL(
        **numbers, cut_points=tuple(cuts), grades=CODES, inducing=bags.features[::4].copy(),
        standardize=False,
    )  # fmt: skip


@pytest.fixture(scope="module")
def bags():
    rng = np.random.default_rng(8)
    arrays = [rng.normal(0, 1, (3, 2)) + 0.7 * k for k in GRADES]
    coords = [np.column_stack([np.arange(3), np.zeros(3)]) for _ in GRADES]
    return gpmil.Bags.from_arrays(arrays, coords=coords, step=1)


@pytest.fixture(scope="module")
def folds(bags):
    fitted = model(bags, SETTINGS, CUTS).fit(bags, GRADES)
    made = fitted._tuning_cohort(bags, (GRADES > 0).astype(int), torch.device("cpu"), None)
    return GradedFolds(made, GRADES)


def test_scores_are_those_of_models_without_the_fold(folds, bags):
    found = folds.scores(SETTINGS, CUTS)
    fold = folds.cohort.fold
    for k in range(folds.cohort.n_folds):
        own = model(bags, SETTINGS, CUTS).fit(bags[fold != k], GRADES[fold != k])
        p = own.predict_proba(bags[fold == k])
        expected = np.log(p[np.arange(len(p)), GRADES[fold == k]])
        # what patches share is one factor there, and all of it here
        np.testing.assert_allclose(found[fold == k], expected, atol=0.1)
        assert abs((found[fold == k] - expected).mean()) < 0.03
    largest = folds.largest(SETTINGS, CUTS)
    means = own.predict_instances(bags[fold == k]).split()
    np.testing.assert_allclose(largest[fold == k], [m.mean.max() for m in means], atol=1e-5)


def test_a_step_close_by_is_right_to_first_order(folds):
    folds.scores(SETTINGS, CUTS)
    errors = []
    for h in (0.04, 0.02):
        moved = SETTINGS._replace(variance=SETTINGS.variance * np.exp(h)), CUTS * np.exp(-h)
        quick = folds.nearby(*moved)
        again = GradedFolds(folds.cohort, GRADES)
        errors.append(np.abs(quick - again.scores(*moved)).max())
    assert errors[0] < 6e-3
    assert errors[1] < 0.4 * errors[0]
