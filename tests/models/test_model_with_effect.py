"""Models with a slide effect, m_b ~ N(Sigma_b f_b, Sigma_b + tau^2 11'), against dense twins."""

import numpy as np
import pytest
import torch
from oracles import model as oracle
from oracles import slide_effect as naive
from oracles.tuning import refitted
from scipy.special import log_ndtr, ndtr
from scipy.stats import multivariate_normal
from synthetic import pr, pri

import gpmil
from gpmil.files import persistence
from gpmil.inference import at_settings, folded_cohort, objective
from gpmil.models import fitted

TAU, COUPLING, MEAN, VARIANCE, LENGTH = 0.9, 0.7, -0.4, 2.3, 1.8
NUMBERS = {
    "variance": VARIANCE,
    "lengthscale": LENGTH,
    "mean": MEAN,
    "coupling": COUPLING,
    "slide_effect": TAU,
    "standardize": False,
}


@pytest.fixture(scope="module")
def inducing(cohort):
    return np.random.default_rng(5).normal(size=(7, cohort.n_features))


def dense_bags(bags, inducing, coupling=COUPLING):
    """W_b and Sigma_b of every bag, with explicit inverses."""
    Kzz = oracle.kernel(inducing, inducing, "rbf", VARIANCE, LENGTH)
    L = np.linalg.cholesky(Kzz + oracle.JITTER * VARIANCE * np.eye(len(inducing)))
    W, Sigma = [], []
    for bag in bags:
        Kxz = oracle.kernel(bag.features, inducing, "rbf", VARIANCE, LENGTH)
        W.append(np.linalg.solve(L, Kxz.T).T)
        Sigma.append(oracle.coupling_matrix(bag.adjacency.toarray(), coupling))
    return W, Sigma


@pytest.fixture(scope="module")
def dense(cohort, inducing):
    return dense_bags(cohort, inducing)


@pytest.fixture(scope="module")
def model(cohort, inducing):
    return pri(**NUMBERS, inducing=inducing).fit(cohort)


def likelihoods(W, Sigma, labels):
    return [(S @ w, np.sqrt(np.diag(S)), y) for w, S, y in zip(W, Sigma, labels)]


# --- The fit --------------------------------------------------------------------------------------


def test_the_posterior_is_that_of_dense_matrices(model, cohort, dense):
    W, Sigma = dense
    assert model.converged_ and model.slide_effect_ == TAU
    np.testing.assert_allclose(
        model.whitened_precision_, naive.precision(W, Sigma, TAU), rtol=1e-10, atol=1e-10
    )
    w = naive.collapsed_optimum(likelihoods(W, Sigma, cohort.labels), MEAN, TAU)
    # the sum over effects is right to some 1e-6, and so is its optimum
    np.testing.assert_allclose(model.whitened_mean_, w, rtol=0, atol=2e-5)


@pytest.mark.parametrize("solver", ["newton", "sweeps"])
def test_the_papers_solvers_find_their_fixed_point(solver, cohort, inducing, dense):
    more = {"max_iter": 300, "tol": 1e-4} if solver == "sweeps" else {"tol": 1e-8}
    found = pri(**NUMBERS, inducing=inducing, solver=solver, random_state=3, **more).fit(cohort)
    W, Sigma = dense
    w, target = found.whitened_mean_, np.zeros(len(inducing))
    for (H, sigma, y), S in zip(likelihoods(W, Sigma, cohort.labels), Sigma):
        E = naive.bag(MEAN + H @ w, sigma, y, TAU)["mean"]
        target += H.T @ np.linalg.solve(S + TAU**2, E - MEAN)
    again = np.linalg.solve(found.whitened_precision_, target)
    np.testing.assert_allclose(again, w, atol=2e-5)


def test_no_effect_is_the_model_without_to_the_last_digit(cohort, inducing):
    fixed = {k: v for k, v in NUMBERS.items() if k != "slide_effect"}
    without = pri(**fixed, inducing=inducing).fit(cohort)
    zero = pri(**fixed, inducing=inducing, slide_effect=0.0).fit(cohort)
    tiny = pri(**fixed, inducing=inducing, slide_effect=1e-5).fit(cohort)
    np.testing.assert_array_equal(without.whitened_mean_, zero.whitened_mean_)
    np.testing.assert_array_equal(without.predict_proba(cohort), zero.predict_proba(cohort))
    np.testing.assert_allclose(tiny.whitened_mean_, zero.whitened_mean_, atol=1e-6)
    # EP stops at 3e-3 of the sites, and the sum over the effect takes one more step from there
    np.testing.assert_allclose(tiny.predict_proba(cohort), zero.predict_proba(cohort), atol=3e-5)


def test_one_patch_per_bag_is_probit_with_a_larger_variance(inducing):
    rng = np.random.default_rng(8)
    x = rng.normal(size=(40, 4))
    y = (x @ [1.0, -0.5, 0.3, 0.2] + 0.5 * rng.normal(size=40) > 0).astype(int)
    bags = gpmil.Bags.from_arrays(list(x[:, None]), y)
    settings = {k: v for k, v in NUMBERS.items() if k != "coupling"}
    found = pr(**settings, inducing=inducing).fit(bags)
    W = np.concatenate(dense_bags(bags, inducing, 0.0)[0])
    t = (2 * y - 1) * (MEAN + W @ found.whitened_mean_) / np.sqrt(1 + TAU**2)
    hazard = np.exp(-(t**2) / 2 - np.log(2 * np.pi) / 2 - log_ndtr(t))
    slope = W.T @ ((2 * y - 1) * hazard) / np.sqrt(1 + TAU**2)
    np.testing.assert_allclose(slope, found.whitened_mean_, atol=2e-5)
    R = np.eye(len(inducing)) + W.T @ W / (1 + TAU**2)
    np.testing.assert_allclose(found.whitened_precision_, R, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("store", ["disk", "recompute"])
@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_wherever_H_lies_the_fit_is_the_same(store, dtype, model, cohort, inducing):
    found = pri(**NUMBERS, inducing=inducing, store=store, dtype=dtype, tol=1e-7).fit(cohort)
    atol = 1e-7 if dtype == "float64" else 1e-4
    np.testing.assert_allclose(found.whitened_mean_, model.whitened_mean_, atol=atol)
    np.testing.assert_allclose(found.elbo_trace_[-1], model.elbo_trace_[-1], atol=10 * atol)


def test_the_bound_is_the_evidence_less_what_it_leaves_out(model, cohort, dense, inducing):
    W, Sigma = dense
    w, R = model.whitened_mean_, model.whitened_precision_
    value = naive.collapsed_bound(w, likelihoods(W, Sigma, cohort.labels), MEAN, TAU)[0]
    for bag, W_b, S in zip(cohort, W, Sigma):
        K = oracle.kernel(bag.features, bag.features, "rbf", VARIANCE, LENGTH)
        V = K - W_b @ W_b.T + W_b @ np.linalg.solve(R, W_b.T)
        value -= np.trace(S @ np.linalg.solve(S + TAU**2, S) @ V) / 2
    _, log_det = np.linalg.slogdet(R)
    value -= (np.trace(np.linalg.inv(R)) - len(R) + log_det) / 2
    np.testing.assert_allclose(model.elbo_trace_[-1], value, atol=1e-4)


# --- Predictions ----------------------------------------------------------------------------------


def covariance(model, bag, W, S):
    K = oracle.kernel(bag.features, bag.features, "rbf", VARIANCE, LENGTH)
    V = K - W @ W.T + W @ np.linalg.solve(model.whitened_precision_, W.T)
    return S + S @ V @ S + TAU**2


def test_slides_and_patches_know_the_effect(model, cohort, dense):
    log_p, _ = model.log_proba_negative(cohort)
    patches = cohort.split(model.predict_instances(cohort).probability)
    for b, (bag, W, S) in enumerate(zip(cohort, *dense)):
        mu, C = MEAN + S @ W @ model.whitened_mean_, covariance(model, bag, W, S)
        np.testing.assert_allclose(patches[b], ndtr(mu / np.sqrt(np.diag(C))), atol=1e-9)
        exact = multivariate_normal(np.zeros(len(mu)), C, allow_singular=True).cdf(-mu)
        assert abs(np.exp(log_p[b]) - exact) < 5e-4


def test_large_slides_know_the_effect(model, cohort, monkeypatch):
    expected = model.predict_all(cohort, level=0.9)
    monkeypatch.setattr(fitted, "LARGE", 0)
    found = model.predict_all(cohort, level=0.9)
    np.testing.assert_allclose(found.log_proba_negative, expected.log_proba_negative, atol=5e-3)
    np.testing.assert_allclose(found.instances.std, expected.instances.std, rtol=1e-8)
    np.testing.assert_allclose(found.interval, expected.interval, atol=0.02)


def test_the_effect_is_no_part_of_what_more_bags_could_tell(model, cohort):
    # P(y = 1 | u) averages over the effect: draws of u and their expansion agree
    few = cohort[:3]
    low, high = model.predict_interval(few, level=0.8)
    drawn_low, drawn_high = model.predict_interval(few, level=0.8, n_draws=150)
    np.testing.assert_allclose(low, drawn_low, atol=0.08)
    np.testing.assert_allclose(high, drawn_high, atol=0.08)


# --- Leaving bags out, and learning ---------------------------------------------------------------


def test_leaving_a_bag_out_is_refitting_without_it(model, cohort):
    quick, slow = model.leave_one_bag_out(cohort), refitted(model, cohort, range(len(cohort)))
    assert abs(quick.mean() - slow.mean()) < 0.01
    assert np.corrcoef(quick, slow)[0, 1] > 0.999


def test_the_gradient_of_the_score_is_that_of_its_values(cohort, inducing):
    rows = np.arange(cohort.n_instances)
    made = folded_cohort.folded(
        cohort,
        rows,
        cohort.labels == 1,
        lambda x: torch.from_numpy(np.asarray(x, dtype=float)),
        torch.from_numpy(inducing),
        "rbf",
    )
    at = at_settings.Settings(VARIANCE, LENGTH, MEAN, COUPLING, TAU)
    found = objective.gradient(made, at).settings
    for name in at._fields:
        h = 1e-3 * max(1.0, abs(getattr(at, name)))
        up, down = (
            objective.value(made, at._replace(**{name: getattr(at, name) + s * h}))[0]
            for s in (1, -1)
        )
        # second derivatives of log Z are right to half a percent (slide_effect.RANK)
        assert getattr(found, name) == pytest.approx((up - down) / (2 * h), rel=0.03, abs=2e-4)


def test_a_learned_effect_is_kept(cohort):
    model = gpmil.VGPMILPRI(
        slide_effect="auto", n_inducing=12, tuning_budget=8, random_state=0
    ).fit(cohort)
    assert 0.01 <= model.slide_effect_ <= 10
    assert {"slide_effect", "score"} <= set(model.tuning_trace_[0])
    assert len({trial["slide_effect"] for trial in model.tuning_trace_}) > 1
    fixed = model.with_settings_fixed()
    assert fixed.slide_effect == model.slide_effect_
    assert gpmil.paper_settings()["slide_effect"] == 0.0


# --- Files and bad input --------------------------------------------------------------------------


def test_saved_and_loaded(model, cohort, tmp_path):
    model.save(tmp_path / "m")
    again = gpmil.load(tmp_path / "m")
    assert again.slide_effect_ == TAU
    np.testing.assert_array_equal(again.predict_proba(cohort), model.predict_proba(cohort))


def test_a_model_of_an_earlier_version_has_no_effect(cohort, inducing, tmp_path):
    model = pri(**NUMBERS | {"slide_effect": 0.0}, inducing=inducing).fit(cohort)
    arrays, card = model._saved()
    del card["settings"]["slide_effect"], card["fitted"]["slide_effect_"]
    persistence.write(tmp_path / "old", arrays, card)
    again = gpmil.load(tmp_path / "old")
    assert again.slide_effect_ == 0
    np.testing.assert_array_equal(again.predict_proba(cohort), model.predict_proba(cohort))


@pytest.mark.parametrize("bad", [None, -0.5, "1", float("nan")])
def test_a_card_without_its_effect_is_damaged(bad, model, tmp_path):
    arrays, card = model._saved()
    if bad is None:
        del card["fitted"]["slide_effect_"]
    else:
        card["fitted"]["slide_effect_"] = bad
    persistence.write(tmp_path / "m", arrays, card)
    with pytest.raises(ValueError, match="slide_effect_"):
        gpmil.load(tmp_path / "m")


@pytest.mark.parametrize("model_class", [gpmil.VGPMIL, gpmil.VGPMILPR])
def test_a_number_of_many_digits_in_a_card_is_a_float(model_class, cohort, tmp_path):
    fixed = {"variance": 1.0, "lengthscale": 2.0, "mean": 0.0}
    arrays, card = model_class(**fixed, n_inducing=5, random_state=0).fit(cohort)._saved()
    card["fitted"]["mean_"] = -(10**30)
    persistence.write(tmp_path / "m", arrays, card)
    assert gpmil.load(tmp_path / "m").predict_proba(cohort)[:, 1].max() < 1e-6


def test_a_length_whose_square_is_no_number_is_damage(cohort, tmp_path):
    fixed = {"kernel": "linear", "variance": 1.0, "mean": 0.0}
    arrays, card = gpmil.VGPMIL(**fixed, n_inducing=5, random_state=0).fit(cohort)._saved()
    card["fitted"]["lengthscale_"] = 1e200
    persistence.write(tmp_path / "m", arrays, card)
    with pytest.raises(ValueError, match="lengthscale_: expected numbers up to 1e"):
        gpmil.load(tmp_path / "m")


@pytest.mark.parametrize("bad", [-1.0, float("nan"), "much", [0.5]])
def test_effects_that_cannot_be_are_refused(bad, cohort):
    with pytest.raises(ValueError, match="slide_effect"):
        pri(slide_effect=bad).fit(cohort)


def test_the_effect_is_learned_where_another_setting_is(cohort):
    """None, the default, spares those who give every setting a search."""
    given = {"variance": 1.7, "lengthscale": 2.1, "mean": -0.6, "coupling": 0.4, "n_inducing": 5}
    alone = gpmil.VGPMILPRI(**given, random_state=0).fit(cohort)
    assert alone.slide_effect_ == 0 and alone.tuning_trace_ is None
    learned = gpmil.VGPMILPRI(**given | {"mean": "auto"}, tuning_budget=3, random_state=0)
    assert learned.fit(cohort).slide_effect_ > 0
    coupled = {"mean": "auto", "moments": "coupled", "tuning_budget": 1}
    assert gpmil.VGPMILPRI(**given | coupled, random_state=0).fit(cohort).slide_effect_ == 0
