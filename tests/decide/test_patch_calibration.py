"""Patch probabilities by labelled patches: the numbers, what they are by limits, and in a model."""

import numpy as np
import pytest
from scipy.optimize import minimize
from scipy.special import ndtr
from scipy.stats import norm
from synthetic import numbers_for

import gpmil
from gpmil.decide.patch_calibration import INTERCEPT, NEEDED, SLOPE, PatchCalibrator, calibrated
from gpmil.metrics import calibration_error


def drawn(n, a, b, seed):
    """Scores, and labels with P(h = 1) = Phi(a + b s)."""
    rng = np.random.default_rng(seed)
    s = rng.normal(-1, 1.5, n)
    return s, (rng.random(n) < ndtr(a + b * s)).astype(int)


def test_the_numbers_are_the_likeliest():
    s, y = drawn(200, 0.8, 0.5, 3)
    w = np.random.default_rng(0).random(200)

    def loss(at):
        t = np.where(y == 1, 1, -1) * (at[0] + np.exp(at[1]) * s)
        prior = norm.logpdf(at[0], 0, INTERCEPT) + norm.logpdf(at[1], 0, SLOPE)
        return -(w * norm.logcdf(t)).sum() - prior

    best = minimize(loss, [0.0, 0.0], method="Nelder-Mead", options={"xatol": 1e-8, "fatol": 1e-12})
    found = PatchCalibrator.fit(s, y, w)
    np.testing.assert_allclose([found.intercept, np.log(found.slope)], best.x, atol=1e-4)


def test_many_labels_find_the_truth_and_few_leave_the_model_alone():
    found = PatchCalibrator.fit(*drawn(20_000, 0.8, 0.5, 1), np.ones(20_000))
    assert abs(found.intercept - 0.8) < 0.05 and abs(found.slope - 0.5) < 0.03
    s, y = drawn(4, 0.8, 0.5, 1)
    nothing = PatchCalibrator.fit(s, y, np.zeros(4))
    assert (nothing.intercept, nothing.slope) == (0, 1)
    assert calibrated(s, y, np.ones(4, dtype=bool)) is None and NEEDED > 4


def test_labelled_patches_stand_for_all_of_positive_slides():
    """The same as if all patches were labelled, in expectation: here by counting them twice."""
    s, y = drawn(4000, 0.3, 0.7, 5)
    positive = np.arange(4000) < 2000
    y[~positive] = 0
    every = calibrated(s, y, positive)
    some = np.where(np.random.default_rng(0).random(4000) < 0.25, y, -1)
    found = calibrated(s, some, positive)
    assert abs(found.intercept - every.intercept) < 0.15
    assert abs(found.slope - every.slope) < 0.15


def test_a_patch_is_never_likelier_than_its_slide():
    one = PatchCalibrator(0.0, 1.0)
    p = one.in_slides(np.array([3.0, 0.0, 0.0]), np.array([0.5, 0.8, 1.0]), np.array([0.4, 0.4, 1]))
    np.testing.assert_allclose(p, [0.4, 0.5 / 0.8 * 0.4, 0.5])


@pytest.fixture(scope="module")
def taught():
    rng = np.random.default_rng(5)
    truth = [np.arange(16) < 12 * (b % 2) for b in range(60)]
    bags = gpmil.Bags.from_arrays(
        [rng.normal(size=(16, 2)) + 1.5 * h[:, None] for h in truth],
        labels=np.arange(60) % 2,
        instance_labels=[h.astype(int) for h in truth],
    )
    clicks = rng.choice(np.flatnonzero(bags.labels[bags.bag_index] == 1), 60, replace=False)
    known = np.full(bags.n_instances, -1)
    known[clicks] = bags.instance_labels[clicks]
    numbers = numbers_for(gpmil.VGPMILPR)
    model = gpmil.VGPMILPR(
        **numbers, n_inducing=12, calibrated=True, instance_labels="use", random_state=0
    )
    return model.fit(bags.with_instance_labels(known)[:40]), bags[40:]


def test_a_calibrated_taught_model_has_patches_that_mean_what_they_say(taught, tmp_path):
    model, bags = taught
    found, known = model.predict_all(bags), model.cross_fit_.patches
    p, h = found.instances.probability, bags.instance_labels
    assert calibration_error(h, p) < calibration_error(
        h, ndtr(found.instances.mean / found.instances.std)
    )
    assert (p <= found.proba[bags.bag_index, 1] + 1e-12).all()
    implied = -np.expm1(model._slides(bags, model._posterior("cpu").w.device)[0])
    expected = known.in_slides(
        found.instances.mean / found.instances.std,
        implied[bags.bag_index],
        found.proba[bags.bag_index, 1],
    )
    np.testing.assert_allclose(p, expected, rtol=1e-9)
    np.testing.assert_allclose(model.predict_instances(bags).probability, p, rtol=1e-9)
    model.save(tmp_path / "model")
    again = gpmil.load(tmp_path / "model")
    assert np.array_equal(again.predict_all(bags).instances.probability, p)
    assert again.cross_fit_.patches == known


def test_without_calibration_probabilities_are_the_models_own(taught):
    model, bags = taught
    plain = model.with_settings_fixed().set_params(calibrated=False, flags=True)
    known = np.full(bags.n_instances, -1)
    row = int(np.flatnonzero(bags.labels[bags.bag_index] == 1)[0])
    known[row] = bags.instance_labels[row]
    plain.fit(bags.with_instance_labels(known))
    found = plain.predict_all(bags).instances
    assert plain.cross_fit_.patches is None
    np.testing.assert_allclose(found.probability, ndtr(found.mean / found.std), rtol=1e-12)
