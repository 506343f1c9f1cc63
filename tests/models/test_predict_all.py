"""`predict_all` of every model: what the methods say one by one, bit for bit."""

import numpy as np
import pytest
from synthetic import numbers_for

import gpmil
from gpmil import VGPMILPRI
from gpmil.coupling import operator as coupling
from gpmil.models import MODELS
from gpmil.models import fitted as fitted_models
from gpmil.models.base import BagClassifier

NETWORK = {"hidden_dim": 6, "max_epochs": 3}
SETTINGS = {
    "VGPMIL": {"n_inducing": 12, "max_iter": 10},
    "VGPMILPR": {"n_inducing": 12},
    "VGPMILPRI": {"n_inducing": 12},
    "AttentionMIL": NETWORK,
    "MeanPoolMIL": NETWORK,
    "MaxPoolMIL": NETWORK,
    "PseudoLabelMIL": {},
    "OrdinalMIL": {"n_inducing": 12, "coupling": 0.5},
    "NominalMIL": {"n_inducing": 12, "coupling": 0.5},
    "OrdinalAttentionMIL": NETWORK,
    "OrdinalMeanPoolMIL": NETWORK,
}
SILENT = (
    "AttentionMIL",
    "MeanPoolMIL",
    "OrdinalAttentionMIL",
    "OrdinalMeanPoolMIL",
)  # of instances
each = pytest.mark.parametrize("model_class", MODELS, ids=lambda cls: cls.__name__)


def fitted(model_class, bags, **changed):
    known = numbers_for(model_class) if issubclass(model_class, gpmil.VGPMILPR) else {}
    own = SETTINGS[model_class.__name__] | changed
    return model_class(**(known | own), random_state=3).fit(bags)


@each
def test_all_is_what_the_methods_say(model_class, cohort):
    model = fitted(model_class, cohort)
    found = model.predict_all(cohort)
    log_p, error = model.log_proba_negative(cohort)
    assert np.array_equal(found.log_proba_negative, log_p)
    assert np.array_equal(found.error, error)
    assert np.array_equal(found.proba, model.predict_proba(cohort))
    assert np.array_equal(found.log_odds, model.decision_function(cohort))
    assert found.interval.shape == (len(cohort), 2) and np.isnan(found.interval).all()


@each
def test_instances_where_a_model_has_them(model_class, cohort):
    model = fitted(model_class, cohort)
    found = model.predict_all(cohort).instances
    if model_class.__name__ in SILENT:
        assert found is None
        return
    alone = model.predict_instances(cohort)
    if model_class.__name__.startswith("VGPMIL"):
        np.testing.assert_allclose(found.doubt, alone.doubt, rtol=1e-10)
        assert (found.doubt > 0).all()
    for name in ("probability", "mean", "std"):
        np.testing.assert_allclose(getattr(found, name), getattr(alone, name), rtol=1e-10)


@each
def test_every_model_takes_the_same_options(model_class, cohort):
    model = fitted(model_class, cohort)
    found = model.predict_all(cohort, rate=0.2, level=0.8, interval_size=10_000)
    known = not np.isnan(found.interval).any()
    assert known == issubclass(model_class, gpmil.VGPMILPR)


def test_an_interval_of_bags_that_are_small_enough(cohort):
    model = fitted(VGPMILPRI, cohort)
    low, high = model.predict_interval(cohort, level=0.8)
    limit = int(np.median(cohort.sizes))
    small = cohort.sizes <= limit
    assert 0 < small.sum() < len(cohort)
    found = model.predict_all(cohort, level=0.8, interval_size=limit).interval
    assert np.isnan(found[~small]).all()
    np.testing.assert_allclose(found[small], np.stack([low, high], 1)[small], rtol=1e-9)
    assert np.isnan(model.predict_all(cohort, level=0.8, interval_size=0).interval).all()


def test_a_level_that_is_none(cohort):
    model = fitted(VGPMILPRI, cohort)
    with pytest.raises(ValueError, match="level"):
        model.predict_all(cohort, level=90)


class HalfMIL(BagClassifier):
    """The least that a model must have."""

    verbose = False

    def _fit(self, bags, y):
        self._remember_cohort(bags, y)

    def log_proba_negative(self, bags):
        return np.full(len(bags), np.log(0.3)), np.zeros(len(bags))


def test_a_model_of_two_methods_has_it(cohort):
    found = HalfMIL().fit(cohort).predict_all(cohort)
    np.testing.assert_allclose(found.proba, [[0.3, 0.7]] * len(cohort))
    assert found.instances is None


def test_the_reason_is_said(cohort, caplog):
    model = fitted(MODELS[3], cohort)
    with caplog.at_level("INFO", "gpmil"):
        model.predict_all(cohort)
    assert "AttentionMIL has no probability for an instance" in caplog.text


def test_doubt_is_not_about_the_number_of_neighbours(cohort):
    model = fitted(VGPMILPRI, cohort)
    alone = gpmil.Bags.from_arrays([bag.features for bag in cohort])  # no neighbours at all
    coupled, free = model.predict_instances(cohort), model.predict_instances(alone)
    np.testing.assert_allclose(coupled.doubt, free.doubt, rtol=1e-9)
    assert np.abs(coupled.std - free.std).max() > 0.1


def test_doubt_and_novelty_are_those_of_passes_of_their_own(monkeypatch):
    """Bags as matrices and on their sparse P: large ones come in the order of their band."""
    bags = gpmil.simulate.cohort(12, seed=2, n_features=12)
    below = int(np.sort(bags.sizes)[-2])
    monkeypatch.setattr(coupling, "DENSE_LIMIT", below)
    monkeypatch.setattr(fitted_models, "LARGE", below)
    settings = {"variance": 2.0, "lengthscale": 3.0, "mean": -1.0, "slide_effect": 0.6}
    model = VGPMILPRI(**settings, coupling=0.7, n_inducing=15, random_state=0).fit(bags)
    patches, slides = model._novelty(bags)
    found = model.predict_all(bags)
    np.testing.assert_allclose(found.novelty, slides, rtol=1e-9)
    for instances in (found.instances, model.predict_instances(bags)):
        np.testing.assert_allclose(instances.novelty, patches, rtol=1e-9)
        np.testing.assert_allclose(instances.doubt, model._doubt(bags), rtol=1e-9)
