"""Models with a slide effect and moments="coupled" or optimize=, which know of it too."""

import numpy as np
import pytest
from oracles.model import relative_error
from synthetic import pri, small_cohort, some_inducing

import gpmil
from gpmil.coupling import operator as coupling

TAU = 0.9
NUMBERS = {"variance": 2.3, "lengthscale": 1.8, "mean": -0.4, "coupling": 0.7, "slide_effect": TAU}


@pytest.fixture(scope="module")
def bags():
    return small_cohort(seed=5, n_bags=9, sizes=(1, 9))


def fit(bags, **changed):
    settings = {**NUMBERS, "moments": "coupled", "tol": 1e-8} | changed
    return pri(inducing=some_inducing(bags, 6), **settings).fit(bags)


@pytest.fixture(scope="module")
def model(bags):
    return fit(bags)


def test_the_fixed_point_is_the_maximum_of_the_bound(model, bags):
    newton = fit(bags, solver="newton")
    assert model.converged_ and newton.converged_ and model.slide_effect_ == TAU
    assert relative_error(newton.whitened_mean_, model.whitened_mean_) < 1e-6
    assert newton.elbo_trace_[-1] == pytest.approx(model.elbo_trace_[-1], abs=1e-6)


def test_sweeps_do_not_lower_the_bound(model, bags):
    trace = fit(bags, solver="sweeps", max_iter=12, random_state=0).elbo_trace_
    assert len(trace) == 12 and trace[-1] > trace[0]
    drops = np.maximum.accumulate(trace) - trace
    assert drops.max() < 1e-6 * abs(trace[-1])
    assert trace[-1] < model.elbo_trace_[-1] + 1e-6


def test_without_coupling_it_is_the_diagonal(bags):
    found, plain = fit(bags, coupling=0.0), fit(bags, coupling=0.0, moments="diagonal")
    np.testing.assert_array_equal(found.whitened_mean_, plain.whitened_mean_)


def test_a_vanishing_effect_is_none(bags):
    tiny, none = (fit(bags, slide_effect=tau) for tau in (1e-5, 0.0))
    np.testing.assert_allclose(tiny.whitened_mean_, none.whitened_mean_, atol=1e-6)


def test_it_is_neither_the_diagonal_nor_the_model_without(model, bags):
    for other in ({"moments": "diagonal"}, {"slide_effect": 0.0}):
        assert relative_error(fit(bags, **other).whitened_mean_, model.whitened_mean_) > 0.01


def test_large_bags_and_recomputed_rows(bags, monkeypatch):
    few = bags[:4]
    assert (np.diff(few.offsets) > 5).any() and (np.diff(few.offsets) <= 5).any()
    dense = fit(few)
    monkeypatch.setattr(coupling, "DENSE_LIMIT", 5)
    found = fit(few, store="recompute")
    assert relative_error(found.whitened_mean_, dense.whitened_mean_) < 1e-6


def test_leaving_a_bag_out_is_refitting_without_it():
    bags = small_cohort(seed=8, n_bags=22, sizes=(1, 8), shift=2.0)  # none decides for the others
    # means are compared to .01
    model = fit(bags, coupling=0.4, standardize=False, tol=1e-5)
    chosen = np.arange(1, 22, 8)
    found, expected = model.leave_one_bag_out(bags)[chosen], []
    again = model.with_settings_fixed().set_params(inducing=model.inducing_points_)
    for b in chosen:
        p = again.fit(bags[np.arange(len(bags)) != b]).predict_proba(bags[b])[0]
        expected.append(np.log(p[bags.labels[b]]))
    assert abs(found.mean() - np.mean(expected)) < 0.01
    assert np.corrcoef(found, expected)[0, 1] > 0.999


def test_saved_and_loaded(model, bags, tmp_path):
    model.save(tmp_path / "m")
    again = gpmil.load(tmp_path / "m")
    assert again.slide_effect_ == TAU and again.moments == "coupled"
    np.testing.assert_array_equal(again.predict_proba(bags), model.predict_proba(bags))


@pytest.mark.parametrize("moments", ["diagonal", "coupled"])
def test_the_evidence_rises_with_an_effect_too(moments, bags):
    moving = ("mean",) if moments == "coupled" else ("mean", "variance")
    moved = fit(bags, optimize=moving, moments=moments, tol=1e-6)
    trace = moved.evidence_trace_
    assert trace[-1] > trace[0] + 1e-3 and moved.slide_effect_ == TAU
    # the bound is the one that a fit at these settings has
    fixed = fit(bags, moments=moments, mean=moved.mean_, variance=moved.variance_, tol=1e-6)
    assert fixed.elbo_trace_[-1] == pytest.approx(max(trace), abs=1e-3)
