"""Slides of a patient: the joint probability against the dense integral, its limits, and labels."""

import numpy as np
import pytest
from oracles import model as oracle
from oracles import patients as naive
from synthetic import pri, small_cohort

import gpmil
from gpmil.models import with_patients
from gpmil.moments import orthant_joint

VARIANCE, LENGTH, MEAN, COUPLING, TAU = 2.3, 1.8, -1.1, 0.7, 0.8


@pytest.fixture(scope="module")
def train():
    return small_cohort(seed=4, n_bags=16, sizes=(2, 7))


@pytest.fixture(scope="module")
def model(train):
    points = np.random.default_rng(5).normal(size=(6, train.n_features))
    settings = {"variance": VARIANCE, "lengthscale": LENGTH, "mean": MEAN, "coupling": COUPLING}
    return pri(**settings, slide_effect=TAU, inducing=points, standardize=False).fit(train)


@pytest.fixture(scope="module")
def slides(train):
    """Slides of 2 and 3 patches of one patient, one of 4 of another, 1 and 2 of a third."""
    sizes, rows, coords = (2, 3, 4, 1, 2), [], []
    for b, n in enumerate(sizes):
        one = train[[3, 5, 6, 8, 9][b]]
        rows.append(np.resize(one.features, (n, train.n_features)) + 0.1 * b)
        coords.append(np.stack([np.arange(n), np.zeros(n)], axis=1))
    groups = ["b", "b", "a", "c", "c"]
    return gpmil.Bags.from_arrays(rows, [0, 1, 0, 0, -1], coords=coords, step=1, groups=groups)


def dense(model, bags):
    return naive.gaussian(
        bags,
        model.inducing_points_,
        model.whitened_mean_,
        model.whitened_precision_,
        lambda x, y: oracle.kernel(x, y, "rbf", VARIANCE, LENGTH),
        COUPLING,
        MEAN,
        TAU,
    )


def test_the_joint_probability_is_the_dense_integral(model, slides):
    found = model.predict_patients(slides)
    assert found.patients.tolist() == ["a", "b", "c"] and found.slides.tolist() == [1, 2, 2]
    for p, own in ((1, [0, 1]), (2, [3, 4])):
        expected = naive.negative(*dense(model, slides[own]))
        assert found.proba[p, 0] == pytest.approx(expected, abs=1e-6)
        # they share the process: no product of the two
        apart = model.predict_proba(slides[own])[:, 0].prod()
        assert abs(expected - apart) > 1e-3
    assert found.proba[0] == pytest.approx(model.predict_proba(slides)[2])


def test_more_patches_by_points_by_ep_and_by_expansion(model, slides, monkeypatch):
    exact = model.predict_patients(slides).log_proba_negative
    monkeypatch.setattr(orthant_joint, "NODES", ())
    by_points = model.predict_patients(slides).log_proba_negative
    np.testing.assert_allclose(by_points, exact, atol=2e-4)
    monkeypatch.setattr(orthant_joint, "FEW", 2)
    by_ep = model.predict_patients(slides).log_proba_negative
    np.testing.assert_allclose(by_ep, exact, atol=0.01)
    # too many for one matrix: slides independent given u, to second order
    monkeypatch.setattr(with_patients, "LARGE", 4)
    by_expansion = model.predict_patients(slides).log_proba_negative
    np.testing.assert_allclose(by_expansion, exact, atol=0.04)


def test_slides_far_apart_multiply(model, slides):
    """Where the kernel between two slides and what is known of u vanish, P is a product."""
    far = gpmil.Bags.from_arrays(
        [slides[0].features + 60, slides[1].features - 60],
        coords=[slides[0].coords, slides[1].coords],
        step=1,
        groups=["p", "p"],
    )
    apart = model.predict_proba(far)[:, 0].prod()
    assert model.predict_patients(far).proba[0, 0] == pytest.approx(apart, rel=2e-3)


def test_with_a_slide_context(train, slides):
    settings = {"slide_context": 1.9, "slide_context_lengthscale": 2.7, "random_state": 1}
    model = pri(**settings, n_inducing=6, slide_effect=TAU).fit(train)
    twice = slides[[1, 1]]
    same = gpmil.Bags.from_arrays(
        twice.split(twice.features), coords=twice.split(twice.coords), step=1, groups=["p", "p"]
    )
    found, one = model.predict_patients(same), model.predict_proba(same)[0]
    # a copy shares f and g, and has an effect and noise of its own: between P and P squared
    assert one[0] ** 2 < found.proba[0, 0] < one[0]


def test_labels_and_tables(model, slides):
    found = model.predict_patients(slides)
    assert found.labels.tolist() == [0, 1, -1]
    assert found.to_frame()["probability"].tolist() == found.proba[:, 1].tolist()
    assert (found.proba[:, 1] >= 0).all() and np.isfinite(found.log_odds).all()


def test_patients_must_be_known(model, train):
    with pytest.raises(ValueError, match="groups="):
        model.predict_patients(train)
