"""Models with a slide context, f + g(mean of the slide), against dense and joint twins."""

import copy
from dataclasses import replace

import gpytorch
import numpy as np
import pytest
import torch
from oracles import model as oracle
from oracles import slide_context as naive
from oracles import slide_effect as naive_effect
from scipy.special import ndtr
from scipy.stats import multivariate_normal
from synthetic import pr, pri, small_cohort

import gpmil
from gpmil.files import persistence
from gpmil.inference import at_settings, folded_cohort, objective
from gpmil.models import fitted, with_context
from gpmil.runs import predict
from gpmil.runs.files import EVIDENCE

COUPLING, MEAN, VARIANCE, LENGTH = 0.7, -0.4, 2.3, 1.8
TAU, GAMMA, SLIDE_LENGTH = 0.6, 1.9, 2.7
NUMBERS = {
    "variance": VARIANCE,
    "lengthscale": LENGTH,
    "mean": MEAN,
    "coupling": COUPLING,
    "slide_context": GAMMA,
    "slide_context_lengthscale": SLIDE_LENGTH,
    "standardize": False,
}


@pytest.fixture(scope="module")
def cohort():
    return small_cohort(seed=4, n_bags=10, sizes=(1, 9))


@pytest.fixture(scope="module")
def inducing(cohort):
    return np.random.default_rng(5).normal(size=(5, cohort.n_features))


@pytest.fixture(scope="module")
def model(cohort, inducing):
    return pri(**NUMBERS, inducing=inducing, slide_effect=TAU).fit(cohort)


@pytest.fixture(scope="module")
def dense(cohort, inducing):
    """[W_b, 1 v_b'] and Sigma_b of every bag, with explicit inverses."""
    Kzz = oracle.kernel(inducing, inducing, "rbf", VARIANCE, LENGTH)
    L = np.linalg.cholesky(Kzz + oracle.JITTER * VARIANCE * np.eye(len(inducing)))
    z = naive.places(cohort.split(cohort.features))
    v = naive.rows(z, z, GAMMA, SLIDE_LENGTH)
    W, Sigma = [], []
    for bag, own in zip(cohort, v):
        Kxz = oracle.kernel(bag.features, inducing, "rbf", VARIANCE, LENGTH)
        W.append(np.hstack([np.linalg.solve(L, Kxz.T).T, np.tile(own, (len(Kxz), 1))]))
        Sigma.append(oracle.coupling_matrix(bag.adjacency.toarray(), COUPLING))
    return W, Sigma


# --- The fit --------------------------------------------------------------------------------------


def test_the_posterior_is_that_of_dense_matrices(model, cohort, dense):
    W, Sigma = dense
    assert model.converged_ and model.slide_context_ == GAMMA
    R = naive_effect.precision(W, Sigma, TAU)
    np.testing.assert_allclose(model.whitened_precision_, R, rtol=1e-8, atol=1e-8)
    rows = [(S @ w, np.sqrt(np.diag(S)), y) for w, S, y in zip(W, Sigma, cohort.labels)]
    slope = naive_effect.collapsed_bound(model.whitened_mean_, rows, MEAN, TAU)[1]
    np.testing.assert_allclose(slope, 0, atol=5e-5)


def joint_twin(bags):
    """The same bags with their z as four more columns, and the sum of both kernels on them."""
    z = naive.places(bags.split(bags.features))
    x = np.hstack([bags.features, z[bags.bag_index]])
    twin = gpmil.Bags(x, bags.offsets, bags.labels, adjacency=bags.adjacency, graph=bags.graph)
    parts = []
    for columns, variance, length in (
        ((0, 1, 2, 3), VARIANCE, LENGTH),
        ((4, 5, 6, 7), GAMMA, SLIDE_LENGTH),
    ):
        part = gpytorch.kernels.ScaleKernel(gpytorch.kernels.RBFKernel(active_dims=columns))
        part.outputscale, part.base_kernel.lengthscale = variance, length
        parts.append(part.double())
    return twin, parts[0] + parts[1]


@pytest.mark.parametrize("moments", ["diagonal", "coupled"])
def test_with_all_patches_and_slides_it_is_one_process_with_the_summed_kernel(moments, cohort):
    bags = cohort
    found = pri(**NUMBERS, inducing=bags.features, moments=moments).fit(bags)
    twin, kernel = joint_twin(bags)
    whole = pri(
        kernel=kernel, mean=MEAN, coupling=COUPLING, standardize=False, inducing=twin.features,
        moments=moments,
    ).fit(twin)  # fmt: skip
    # both are the full process, but for their jitters
    np.testing.assert_allclose(found.predict_proba(bags), whole.predict_proba(twin), atol=2e-4)
    one, other = found.predict_instances(bags), whole.predict_instances(twin)
    np.testing.assert_allclose(one.mean, other.mean, atol=1e-3)
    np.testing.assert_allclose(one.std, other.std, atol=1e-3)


def test_no_context_is_the_model_without_to_the_last_digit(cohort, inducing):
    fixed = {k: v for k, v in NUMBERS.items() if not k.startswith("slide_context")}
    without = pri(**fixed, inducing=inducing).fit(cohort)
    zero = pri(**NUMBERS | {"slide_context": 0}, inducing=inducing).fit(cohort)
    tiny = pri(**NUMBERS | {"slide_context": 1e-10}, inducing=inducing).fit(cohort)
    np.testing.assert_array_equal(without.whitened_mean_, zero.whitened_mean_)
    np.testing.assert_array_equal(without.predict_proba(cohort), zero.predict_proba(cohort))
    assert zero.slide_context_points_ is None and zero.slide_context_lengthscale_ is None
    np.testing.assert_allclose(tiny.predict_proba(cohort), zero.predict_proba(cohort), atol=1e-7)


@pytest.mark.parametrize("more", [{"store": "disk"}, {"store": "recompute"}, {"dtype": "float32"}])
def test_wherever_H_lies_the_fit_is_the_same(more, model, cohort, inducing):
    found = pri(**NUMBERS, inducing=inducing, slide_effect=TAU, tol=1e-7, **more).fit(cohort)
    atol = 1e-4 if "dtype" in more else 1e-7
    np.testing.assert_allclose(found.whitened_mean_, model.whitened_mean_, atol=atol)
    np.testing.assert_allclose(found.elbo_trace_[-1], model.elbo_trace_[-1], atol=10 * atol)


@pytest.mark.parametrize("solver", ["newton", "sweeps"])
def test_the_papers_solvers_find_their_fixed_point(solver, cohort, inducing, dense):
    more = {"max_iter": 400, "tol": 1e-4} if solver == "sweeps" else {"tol": 1e-9}
    found = pri(**NUMBERS, inducing=inducing, solver=solver, random_state=3, **more).fit(cohort)
    w, target = found.whitened_mean_, np.zeros(len(found.whitened_mean_))
    for W, S, y in zip(*dense, cohort.labels):
        E = oracle.expectation(MEAN + S @ W @ w, np.sqrt(np.diag(S)), y)
        target += W.T @ (E - MEAN)
    again = np.linalg.solve(found.whitened_precision_, target)
    np.testing.assert_allclose(again, w, atol=2e-4 if solver == "sweeps" else 1e-6)


def test_the_bound_is_the_evidence_less_what_it_leaves_out(model, cohort, dense):
    W, Sigma = dense
    w, R = model.whitened_mean_, model.whitened_precision_
    rows = [(S @ a, np.sqrt(np.diag(S)), y) for a, S, y in zip(W, Sigma, cohort.labels)]
    value = naive_effect.collapsed_bound(w, rows, MEAN, TAU)[0]
    for bag, W_b, S in zip(cohort, W, Sigma):
        K = oracle.kernel(bag.features, bag.features, "rbf", VARIANCE, LENGTH) + GAMMA
        V = K - W_b @ W_b.T + W_b @ np.linalg.solve(R, W_b.T)
        value -= np.trace(S @ np.linalg.solve(S + TAU**2, S) @ V) / 2
    _, log_det = np.linalg.slogdet(R)
    value -= (np.trace(np.linalg.inv(R)) - len(R) + log_det) / 2
    np.testing.assert_allclose(model.elbo_trace_[-1], value, atol=1e-3)


def test_many_slides_have_a_few_inducing_points(cohort, monkeypatch):
    monkeypatch.setattr(with_context, "MOST_POINTS", 5)
    found = pr(slide_context=1.0, slide_context_lengthscale=2.0, n_inducing=6, random_state=0)
    found.fit(cohort)
    assert found.slide_context_points_.shape == (5, cohort.n_features)
    assert len(found.whitened_mean_) == 11


# --- Predictions ----------------------------------------------------------------------------------


def test_slides_and_patches_know_their_context(model, cohort, dense):
    log_p, _ = model.log_proba_negative(cohort)
    patches = cohort.split(model.predict_instances(cohort).probability)
    joint = cohort.split(model.predict_all(cohort).instances.probability)
    for b, (bag, W, S) in enumerate(zip(cohort, *dense)):
        K = oracle.kernel(bag.features, bag.features, "rbf", VARIANCE, LENGTH) + GAMMA
        V = K - W @ W.T + W @ np.linalg.solve(model.whitened_precision_, W.T)
        mu = MEAN + S @ W @ model.whitened_mean_
        C = S + S @ V @ S + TAU**2
        expected = ndtr(mu / np.sqrt(np.diag(C)))
        np.testing.assert_allclose(patches[b], expected, atol=1e-7)
        np.testing.assert_allclose(joint[b], expected, atol=1e-7)
        if b < 4:
            exact = multivariate_normal(np.zeros(len(mu)), C, allow_singular=True).cdf(-mu)
            assert abs(np.exp(log_p[b]) - exact) < 2e-3


def test_large_slides_know_their_context(model, cohort, monkeypatch):
    expected = model.predict_all(cohort, level=0.9)
    monkeypatch.setattr(fitted, "LARGE", 0)
    found = model.predict_all(cohort, level=0.9)
    np.testing.assert_allclose(found.log_proba_negative, expected.log_proba_negative, atol=5e-3)
    np.testing.assert_allclose(found.instances.std, expected.instances.std, rtol=1e-7)
    np.testing.assert_allclose(found.interval, expected.interval, atol=0.03)


def test_draws_of_u_and_their_expansion_agree(model, cohort):
    few = cohort[:2]
    low, high = model.predict_interval(few, level=0.8)
    drawn_low, drawn_high = model.predict_interval(few, level=0.8, n_draws=100)
    np.testing.assert_allclose(low, drawn_low, atol=0.1)
    np.testing.assert_allclose(high, drawn_high, atol=0.1)


def test_a_slide_alone_is_what_it_is_among_others(model, cohort):
    together = model.predict_proba(cohort)
    alone = np.concatenate([model.predict_proba(cohort[b]) for b in range(3)])
    np.testing.assert_allclose(alone, together[:3], atol=1e-10)


# --- Leaving bags out (refits: inference/test_leave_groups.py), and learning ----------------------


def tuning_cohort(cohort, inducing):
    made = folded_cohort.folded(
        cohort,
        np.arange(cohort.n_instances),
        cohort.labels == 1,
        lambda x: torch.from_numpy(np.asarray(x, dtype=float)),
        torch.from_numpy(inducing),
        "rbf",
    )
    z = torch.from_numpy(naive.places(cohort.split(cohort.features)))
    return replace(made, context=folded_cohort.SlidesInContext(z, z))


def test_the_tuned_score_is_that_of_the_model(model, cohort, inducing):
    at = at_settings.Settings(VARIANCE, LENGTH, MEAN, COUPLING, TAU, GAMMA, SLIDE_LENGTH)
    made = tuning_cohort(cohort, inducing)
    found, fits = objective.left_out(made, at)
    again = copy.deepcopy(model)
    again._context = model._context  # where slides lie, and the points, stay
    own = made.fold == 0
    again.fit(cohort[~own])
    np.testing.assert_allclose(fits.w[0], again.whitened_mean_, atol=1e-6)
    p = again.predict_proba(cohort[own])[np.arange(own.sum()), cohort.labels[own]]
    # one factor there, EP with its correction here
    np.testing.assert_allclose(found[own], np.log(p), atol=0.05)


@pytest.mark.parametrize("tau", [0.0, TAU])
def test_the_gradient_of_the_score_is_that_of_its_values(tau, cohort, inducing):
    made = tuning_cohort(cohort, inducing)
    at = at_settings.Settings(VARIANCE, LENGTH, MEAN, COUPLING, tau, GAMMA, SLIDE_LENGTH)
    found = objective.gradient(made, at).settings
    for name in at._fields if not tau else ("slide_effect", *at._fields[5:]):
        if name == "slide_effect" and not tau:
            continue
        h = 1e-3 * max(1.0, abs(getattr(at, name)))
        up, down = (
            objective.value(made, at._replace(**{name: getattr(at, name) + s * h}))[0]
            for s in (1, -1)
        )
        assert getattr(found, name) == pytest.approx((up - down) / (2 * h), rel=0.03, abs=2e-4)


def test_a_learned_context_is_kept(cohort):
    model = gpmil.VGPMILPRI(
        slide_context="auto", n_inducing=6, tuning_budget=8, random_state=0
    ).fit(cohort)
    assert 0.01 <= model.slide_context_ <= 1000
    names = {"slide_context", "slide_context_lengthscale"}
    assert names <= set(model.tuning_trace_[0])
    assert all(len({trial[name] for trial in model.tuning_trace_}) > 1 for name in names)
    fixed = model.with_settings_fixed()
    assert fixed.slide_context == model.slide_context_
    assert fixed.slide_context_lengthscale == model.slide_context_lengthscale_
    again = fixed.set_params(inducing=model.inducing_points_).fit(cohort)
    np.testing.assert_allclose(again.predict_proba(cohort), model.predict_proba(cohort), atol=1e-8)
    assert gpmil.paper_settings()["slide_context"] == 0.0


@pytest.mark.parametrize(
    ("given", "moved"),
    [
        ({"slide_context": 1.3}, ["slide_context_lengthscale"]),
        ({"slide_context": "auto", "slide_context_lengthscale": 2.0}, ["slide_context"]),
        ({"slide_context": 1.3, "slide_context_lengthscale": 2.0}, []),
        ({"slide_context": 0.0}, []),
    ],
)
def test_what_is_given_stays(given, moved, cohort):
    fixed = {"variance": 2.0, "lengthscale": 2.0, "coupling": 0.5}
    found = gpmil.VGPMILPRI(**fixed, **given, n_inducing=8, tuning_budget=9, random_state=0)
    found.fit(cohort)
    for name in ("slide_context", "slide_context_lengthscale"):
        tried = {trial[name] for trial in found.tuning_trace_}
        assert (len(tried) > 1) == (name in moved)
        if isinstance(given.get(name), float) and found.slide_context_:
            assert getattr(found, name + "_") == given[name]


def test_one_length_per_column_leaves_the_context_alone(cohort):
    one = pr(slide_context=1.0, slide_context_lengthscale=2.0, n_inducing=6, random_state=0)
    lengths = np.array([0.5, 2.0, 1.0, 3.0])
    two = one.set_params(lengthscale=lengths).fit(cohort)
    plain = pr(slide_context=1.0, slide_context_lengthscale=2.0, n_inducing=6, random_state=0)
    plain.fit(cohort)
    np.testing.assert_allclose(two.slide_context_points_, plain.slide_context_points_, atol=1e-12)
    contexts = [m._context(torch.device("cpu")) for m in (two, plain)]
    rows = [
        c.columns(m._inputs(cohort.features, torch.device("cpu")), torch.from_numpy(cohort.sizes))
        for c, m in zip(contexts, (two, plain))
    ]
    np.testing.assert_allclose(*rows, atol=1e-10)


def test_columns_with_learned_weights(cohort):
    found = gpmil.VGPMILPR(
        lengthscale="ard", slide_context="auto", n_inducing=8, tuning_budget=9, random_state=0
    ).fit(cohort)
    assert found.relevance_ is not None and found.slide_context_ > 0
    again = found.with_settings_fixed().set_params(inducing=found.inducing_points_).fit(cohort)
    np.testing.assert_allclose(again.predict_proba(cohort), found.predict_proba(cohort), atol=1e-6)


def test_folds_have_contexts_of_their_own(tmp_path):
    bags = small_cohort(seed=2, n_bags=16, sizes=(1, 6))
    found = pri(**NUMBERS, n_inducing=6, flags=True, n_folds=2, random_state=0).fit(bags)
    assert np.isfinite(found.predict_instances(bags).p_value).all()
    centers = [m.slide_context_center_ for m in (found, *found.cross_fit_.models)]
    assert len({tuple(c) for c in centers}) == 3
    found.save(tmp_path / "m")
    again = gpmil.load(tmp_path / "m")
    p = [m.predict_instances(bags).p_value for m in (found, again)]
    np.testing.assert_array_equal(*p)


# --- Files and bad input --------------------------------------------------------------------------


def test_saved_and_loaded(model, cohort, tmp_path):
    model.save(tmp_path / "m")
    again = gpmil.load(tmp_path / "m")
    assert again.slide_context_ == GAMMA and again.slide_context_lengthscale_ == SLIDE_LENGTH
    np.testing.assert_array_equal(again.predict_proba(cohort), model.predict_proba(cohort))


def test_a_model_of_an_earlier_version_has_no_context(cohort, inducing, tmp_path):
    model = pri(**NUMBERS | {"slide_context": 0.0}, inducing=inducing).fit(cohort)
    arrays, card = model._saved()
    for name in ("slide_context", "slide_context_lengthscale"):
        del card["settings"][name]
    for name in with_context.WITHOUT:
        del card["fitted"][name]
    persistence.write(tmp_path / "old", arrays, card)
    again = gpmil.load(tmp_path / "old")
    assert again.slide_context_ == 0
    np.testing.assert_array_equal(again.predict_proba(cohort), model.predict_proba(cohort))


@pytest.mark.parametrize("name", list(with_context.WITHOUT))
@pytest.mark.parametrize("bad", ["gone", -0.5, "1", float("nan")])
def test_a_card_without_its_context_is_damaged(name, bad, model, tmp_path):
    arrays, card = model._saved()
    if bad == "gone":
        del card["fitted"][name]
    elif name == "slide_context_level_" and bad == -0.5:
        return  # a level may be below zero
    else:
        card["fitted"][name] = bad
    persistence.write(tmp_path / "m", arrays, card)
    with pytest.raises(ValueError, match=name):
        gpmil.load(tmp_path / "m")


@pytest.mark.parametrize(
    ("name", "damage", "said"),
    [
        ("slide_context_points_", None, "slide_context|whitened|posterior"),
        ("slide_context_center_", None, "slide_context_center_"),
        ("slide_context_points_", lambda a: a[:-1], "whitened_mean_: expected 14 numbers"),
        ("slide_context_points_", lambda a: a[:, :-1], "slide_context_points_"),
        ("slide_context_center_", lambda a: a[:-1], "slide_context_center_"),
        ("slide_context_points_", lambda a: 0.3 * a, "does not follow"),
        ("whitened_mean_", lambda a: a[:-1], "shape"),
    ],
)
def test_arrays_that_do_not_fit_the_context_are_damage(name, damage, said, model, tmp_path):
    arrays, card = model._saved()
    arrays = {k: v for k, v in arrays.items() if k != name or damage}
    if damage:
        arrays[name] = np.ascontiguousarray(damage(arrays[name]))
    persistence.write(tmp_path / "m", arrays, card)
    with pytest.raises(ValueError, match=said):
        gpmil.load(tmp_path / "m")


def test_a_card_that_denies_its_context_is_damaged(model, tmp_path):
    arrays, card = model._saved()
    card["fitted"]["slide_context_"] = 0.0
    persistence.write(tmp_path / "m", arrays, card)
    with pytest.raises(ValueError, match="slide_context"):
        gpmil.load(tmp_path / "m")


@pytest.mark.parametrize("name", ["slide_context", "slide_context_lengthscale"])
@pytest.mark.parametrize("bad", [-1.0, float("nan"), float("inf"), "much", None])
def test_contexts_that_cannot_be_are_refused(name, bad, cohort):
    with pytest.raises(ValueError, match=name):
        pri(**{"slide_context": 1.0, name: bad}).fit(cohort)


def test_what_knows_no_context_says_so(cohort):
    with pytest.raises(ValueError, match="slide_context"):
        pri(slide_context=0.5, optimize=("mean",)).fit(cohort)


# --- Evidence of patches and of the slide ---------------------------------------------------------


def test_evidence_adds_up_to_the_log_odds(model, cohort):
    found = model.predict_evidence(cohort)
    np.testing.assert_allclose(found.total, model.decision_function(cohort), rtol=0, atol=1e-9)
    known = model.predict_evidence(cohort, log_proba_negative=model.log_proba_negative(cohort)[0])
    np.testing.assert_array_equal(known.slide, found.slide)
    assert np.abs(found.slide).max() > 0.1


def test_evidence_of_patches_is_that_at_the_average_slide(model, cohort, dense):
    found = model.predict_evidence(cohort)
    w, M = model.whitened_mean_, len(model.inducing_points_)
    g = np.array([W[0, M:] @ w[M:] for W in dense[0]])
    assert model.slide_context_level_ == pytest.approx(g.mean(), abs=1e-6)
    for b in range(3):
        W, S = dense[0][b], dense[1][b]
        K = oracle.kernel(cohort[b].features, cohort[b].features, "rbf", VARIANCE, LENGTH) + GAMMA
        V = K - W @ W.T + W @ np.linalg.solve(model.whitened_precision_, W.T)
        mu = MEAN + S @ W @ w - g[b] + g.mean()
        C = S + S @ V @ S + TAU**2
        p = multivariate_normal(np.zeros(len(mu)), C, allow_singular=True).cdf(-mu)
        assert found.patches[b] == pytest.approx(np.log1p(-p) - np.log(p), abs=0.02)


def test_large_slides_have_the_same_evidence(model, cohort, monkeypatch):
    expected = model.predict_evidence(cohort)
    monkeypatch.setattr(fitted, "LARGE", 0)
    np.testing.assert_allclose(model.predict_evidence(cohort).slide, expected.slide, atol=0.02)


def test_without_a_context_all_evidence_is_of_patches(cohort, inducing):
    model = pri(**NUMBERS | {"slide_context": 0.0}, inducing=inducing).fit(cohort)
    found = model.predict_evidence(cohort)
    np.testing.assert_array_equal(found.slide, 0)
    np.testing.assert_array_equal(found.patches, model.decision_function(cohort))


def test_tables_of_runs_say_where_the_evidence_comes_from(model, cohort, inducing):
    asked = predict.PredictionOptions()
    rows, _ = predict.predict(model, cohort, asked, None)
    split = model.predict_evidence(cohort)
    np.testing.assert_allclose(rows["evidence_patches"], split.patches, atol=1e-12)
    np.testing.assert_allclose(rows["evidence_slide"], split.slide, atol=1e-12)
    plain = pri(**NUMBERS | {"slide_context": 0.0}, inducing=inducing).fit(cohort)
    assert not set(EVIDENCE) & set(predict.predict(plain, cohort, asked, None)[0])
