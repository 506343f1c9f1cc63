"""Models that know the labels of some patches: the fit, `update`, limits and errors."""

import copy
from dataclasses import replace

import numpy as np
import pytest
import torch
from oracles import model as oracle
from oracles import slide_effect as naive
from oracles import taught
from scipy.special import expit
from scipy.stats import multivariate_normal
from synthetic import pr, pri, small_cohort

import gpmil
from gpmil.distributed import WholeCohort
from gpmil.files import persistence
from gpmil.inference import at_settings, leave_out, objective

TAU, COUPLING, MEAN, VARIANCE, LENGTH = 0.9, 0.7, -0.4, 2.3, 1.8
NUMBERS = {
    "variance": VARIANCE,
    "lengthscale": LENGTH,
    "mean": MEAN,
    "coupling": COUPLING,
    "slide_effect": TAU,
    "standardize": False,
    "random_state": 3,
}


@pytest.fixture(scope="module")
def truth():
    """Bags whose patches are all labelled."""
    return small_cohort(seed=4, n_bags=10, sizes=(3, 7))


def labelled(bags, share=0.4, seed=1, also=()):
    """The same bags with the labels of some patches."""
    known = np.random.default_rng(seed).random(bags.n_instances) < share
    known[list(also)] = True
    return bags.with_instance_labels(np.where(known, bags.instance_labels, -1))


@pytest.fixture(scope="module")
def bags(truth):
    positive = np.flatnonzero(truth.instance_labels == 1)
    return labelled(truth, also=positive[[0, 3]])


@pytest.fixture(scope="module")
def inducing(truth):
    return np.random.default_rng(5).normal(size=(6, truth.n_features))


@pytest.fixture(scope="module")
def model(bags, inducing):
    return pri(**NUMBERS, inducing=inducing, instance_labels="use").fit(bags)


def test_the_posterior_is_that_of_dense_matrices(model, bags, inducing):
    Z = model.inducing_points_
    told = (bags.instance_labels >= 0) & (bags.labels == 1)[bags.bag_index]
    assert model.inducing_from_labels_ == told.sum() == len(Z) - len(inducing)
    np.testing.assert_array_equal(Z[: len(inducing)], inducing)
    np.testing.assert_array_equal(Z[len(inducing) :], bags.features[told])
    Kzz = oracle.kernel(Z, Z, "rbf", VARIANCE, LENGTH)
    L = np.linalg.cholesky(Kzz + oracle.JITTER * VARIANCE * np.eye(len(Z)))
    W, Sigma, parts = [], [], []
    for bag in bags:
        W.append(np.linalg.solve(L, oracle.kernel(bag.features, Z, "rbf", VARIANCE, LENGTH).T).T)
        S = oracle.coupling_matrix(bag.adjacency.toarray(), COUPLING)
        known = bag.instance_labels.tolist() if bag.labels[0] else [-1] * bag.n_instances
        parts.append((S @ W[-1], np.sqrt(np.diag(S)), int(bag.labels[0]), known))
        Sigma.append(S)
    R = naive.precision(W, Sigma, TAU)
    np.testing.assert_allclose(model.whitened_precision_, R, rtol=1e-9, atol=1e-9)
    w = taught.collapsed_optimum(parts, MEAN, TAU)
    np.testing.assert_allclose(model.whitened_mean_, w, rtol=0, atol=5e-5)


def test_labels_are_ignored_unless_they_are_asked_for(truth, bags, inducing):
    plain, silent = (pri(**NUMBERS, inducing=inducing).fit(b) for b in (bags, labelled(truth, 0)))
    use = pri(**NUMBERS, inducing=inducing, instance_labels="use").fit(labelled(truth, 0))
    for other in (silent, use):
        np.testing.assert_array_equal(plain.whitened_mean_, other.whitened_mean_)


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"slide_effect": 0.0},
        {"slide_context": 1.3},
        {"slide_effect": 0.0, "moments": "coupled"},
    ],
)
def test_an_update_is_a_refit(more, truth, bags):
    settings = NUMBERS | {"n_inducing": 8, "instance_labels": "use"} | more
    if "slide_context" in more:
        settings["slide_context_lengthscale"] = 1.7
    taught_twice = pri(**settings).fit(labelled(truth, 0.0))
    assert taught_twice.update(labelled(truth, 0.7, seed=8)) is taught_twice  # some go again
    taught_twice.update(bags)
    fresh = pri(**settings).fit(bags)
    np.testing.assert_array_equal(taught_twice.inducing_points_, fresh.inducing_points_)
    for name in ("posterior_mean_", "posterior_covariance_", "slide_context_level_"):
        np.testing.assert_allclose(getattr(taught_twice, name), getattr(fresh, name), atol=1e-8)
    np.testing.assert_allclose(
        taught_twice.predict_proba(truth), fresh.predict_proba(truth), atol=1e-8
    )


def test_a_loaded_model_is_updated(truth, bags, tmp_path):
    settings = NUMBERS | {"n_inducing": 8}
    kept = pri(**settings).fit(truth)  # its labels are not looked at
    kept.save(tmp_path / "model")
    loaded = gpmil.load(tmp_path / "model").update(bags)
    assert loaded.instance_labels == "use" and loaded.converged_
    fresh = pri(**settings, instance_labels="use").fit(bags)
    np.testing.assert_allclose(loaded.posterior_mean_, fresh.posterior_mean_, atol=1e-8)
    loaded.save(tmp_path / "taught")
    again = gpmil.load(tmp_path / "taught")
    assert again.inducing_from_labels_ == fresh.inducing_from_labels_ > 0
    np.testing.assert_array_equal(again.predict_proba(truth), loaded.predict_proba(truth))


def test_the_cross_fit_is_taught_too(truth, bags):
    settings = NUMBERS | {"n_inducing": 8, "flags": True, "n_folds": 2}
    model = pri(**settings).fit(labelled(truth, 0.0))
    before = model.cross_fit_
    assert model.update(bags, cross_fit=False).cross_fit_ is before
    model.update(bags)
    fresh = pri(**settings, instance_labels="use").fit(bags)
    np.testing.assert_allclose(
        model.predict_instances(truth).p_value, fresh.predict_instances(truth).p_value, atol=1e-12
    )
    with pytest.raises(ValueError, match="cross_fit"):
        model.update(bags, cross_fit="no")


def test_newton_and_the_direct_solver_agree_without_coupling(bags, inducing):
    numbers = {k: v for k, v in NUMBERS.items() if k != "coupling"} | {"inducing": inducing}
    found = [pr(**numbers, solver=s, instance_labels="use").fit(bags) for s in ("direct", "newton")]
    np.testing.assert_allclose(found[0].whitened_mean_, found[1].whitened_mean_, atol=2e-4)


def test_all_patches_labelled_is_probit_classification():
    """Bags do not matter then: the same as one bag per patch, with its label."""
    truth = small_cohort(seed=6, n_bags=9, sizes=(2, 6))
    numbers = {"variance": VARIANCE, "lengthscale": LENGTH, "mean": MEAN, "standardize": False}
    Z = truth.features[::2].copy()
    told = pr(**numbers, inducing=Z, instance_labels="use").fit(truth)
    apart = gpmil.Bags.from_arrays(list(truth.features[:, None]), truth.instance_labels)
    probit = pr(**numbers, inducing=told.inducing_points_).fit(apart)
    np.testing.assert_allclose(told.whitened_mean_, probit.whitened_mean_, atol=1e-9)
    np.testing.assert_allclose(told.whitened_precision_, probit.whitened_precision_, atol=1e-9)


# --- Slides ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("context", [0.0, 1.3])
def test_a_slide_has_the_average_of_with_and_without_labels(context, bags, inducing):
    bags = gpmil.Bags.from_arrays(
        bags.split(bags.features), labels=bags.labels, coords=bags.split(bags.coords), step=7.0,
        instance_labels=bags.split(bags.instance_labels), groups=np.arange(len(bags)) // 2,
    )  # fmt: skip
    more = {"slide_context": context, "slide_context_lengthscale": 1.7, "inducing": inducing}
    plain = pri(**NUMBERS, **more).fit(bags)
    model = copy.copy(plain).update(bags)
    alone = copy.copy(model)  # labels alone
    alone.untaught_mean_ = None
    fresh = pri(**NUMBERS, **more, instance_labels="use").fit(bags)
    for name in ("untaught_mean_", "untaught_precision_"):
        expected = getattr(plain, name.replace("untaught", "whitened"))
        np.testing.assert_array_equal(getattr(model, name), expected)
        np.testing.assert_allclose(getattr(fresh, name), expected, atol=1e-8)
    found = [m.predict_all(bags, level=0.8) for m in (model, alone, plain)]
    ways = [one.proba for one in found]
    np.testing.assert_allclose(ways[0], (ways[1] + ways[2]) / 2, rtol=1e-12)
    assert np.abs(ways[1] - ways[2]).max() > 0.05
    np.testing.assert_allclose(np.exp(model.log_proba_negative(bags)[0]), ways[0][:, 0], rtol=1e-12)
    low, high = found[0].interval.T
    assert (low < ways[0][:, 1]).all() and (high > ways[0][:, 1]).all()
    ends = [
        np.stack(m.predict_interval(bags, base_rate=False), axis=1) for m in (model, alone, plain)
    ]
    np.testing.assert_allclose(ends[0], (ends[1] + ends[2]) / 2, rtol=1e-9)
    # patches are as taught
    np.testing.assert_array_equal(found[0].instances.mean, found[1].instances.mean)
    told = [m.predict_evidence(bags) for m in (model, alone, plain)]
    np.testing.assert_allclose(expit(told[0].total), ways[0][:, 1], rtol=1e-9)
    parts = [expit(-one.patches) for one in told]
    np.testing.assert_allclose(parts[0], (parts[1] + parts[2]) / 2, rtol=1e-9)
    said = [m.predict_patients(bags).proba for m in (model, alone, plain)]
    np.testing.assert_allclose(said[0], (said[1] + said[2]) / 2, rtol=1e-9)


@pytest.mark.parametrize(
    "change, match",
    [
        (lambda a: a | {"untaught_mean_": a["untaught_mean_"][1:]}, "untaught"),
        (lambda a: {k: v for k, v in a.items() if k != "untaught_level_"}, "and the others"),
        (lambda a: a | {"untaught_precision_": -a["untaught_precision_"]}, "untaught_precision_"),
    ],
)
def test_damage_to_what_is_known_without_labels(change, match, model, tmp_path):
    arrays, card = model._saved()
    persistence.write(tmp_path / "model", change(arrays), card)
    with pytest.raises(ValueError, match=match):
        gpmil.load(tmp_path / "model")


def test_a_taught_model_of_an_earlier_version_learns_it_at_the_next_update(model, bags):
    earlier = copy.copy(model)
    earlier.__dict__.update(dict.fromkeys(k for k in vars(model) if k.startswith("untaught_")))
    earlier.update(bags)
    np.testing.assert_allclose(earlier.untaught_mean_, model.untaught_mean_, atol=1e-8)


# --- Errors ---------------------------------------------------------------------------------------


def changed(bags, row, label):
    known = np.where(np.arange(bags.n_instances) == row, label, bags.instance_labels)
    return bags.with_instance_labels(known)


def test_a_positive_patch_in_a_negative_bag_is_named(truth, model):
    bags = labelled(truth, 0.0)
    row = int(np.flatnonzero((bags.labels == 0)[bags.bag_index])[4])
    wrong, bag = changed(bags, row, 1), int(bags.bag_index[row])
    place = f"patch {row - bags.offsets[bag]} .*of bag '{bags.names[bag]}'"
    for act in (pri(**NUMBERS, instance_labels="use").fit, model.update):
        with pytest.raises(ValueError, match=place):
            act(wrong)


def test_a_positive_bag_without_a_patch_that_may_be_positive_is_named(truth):
    bag = int(np.flatnonzero(truth.labels == 1)[1])
    none = np.where(truth.bag_index == bag, 0, -1)
    with pytest.raises(ValueError, match=f"positive bag '{truth.names[bag]}' that may be positive"):
        pri(**NUMBERS, instance_labels="use").fit(truth.with_instance_labels(none))


@pytest.mark.parametrize("tau", [0.0, TAU])
def test_coupled_moments_of_a_model(tau, truth, bags, inducing, tmp_path):
    """No labels: the untaught model; with labels: another one, saved with them, groups left out."""
    numbers = NUMBERS | {"moments": "coupled", "slide_effect": tau, "inducing": inducing}
    numbers["tol"] = 1e-7
    few, none = bags[:4], labelled(truth, 0.0)[:4]
    plain = pri(**numbers).fit(few)
    silent, model = (pri(**numbers, instance_labels="use").fit(b) for b in (none, few))
    np.testing.assert_array_equal(silent.whitened_mean_, plain.whitened_mean_)
    assert model.converged_ and model.inducing_from_labels_ > 0
    moved = (model.predict_instances(few).probability - plain.predict_instances(few).probability)[
        (few.instance_labels == 1)
    ]
    assert len(moved) and (moved > 0).all()
    model.save(tmp_path / "model")
    loaded = gpmil.load(tmp_path / "model")
    np.testing.assert_array_equal(loaded.predict_proba(few), model.predict_proba(few))
    by_bag = model.leave_one_bag_out(few)
    cohort, problem, w = model._fitted_problem(few, None)
    by_group = cohort.leave_one_group_out(problem, w, True, np.arange(4), leave_out.label_scores)
    np.testing.assert_allclose(by_group, by_bag, atol=0.05)


@pytest.mark.parametrize(
    ("more", "match"),
    [
        ({"solver": "sweeps"}, "not for solver='sweeps'"),
        ({"optimize": ("mean",)}, "knows no labels of patches"),
        ({"instance_labels": "yes"}, "instance_labels"),
        (
            {"slide_effect": "none"},
            r"slide_effect must be a finite number >= 0 or one of \['auto', None\]",
        ),
    ],
)
def test_what_cannot_be_taught(more, match, bags):
    with pytest.raises(ValueError, match=match):
        pri(**NUMBERS | {"instance_labels": "use"} | more).fit(bags)


def test_coupled_moments_with_an_effect_and_labels_are_refused_for_many_patches(
    truth, bags, monkeypatch, caplog
):
    numbers = NUMBERS | {"moments": "coupled", "instance_labels": "use"}
    monkeypatch.setattr("gpmil.models.teaching.MANY_COUPLED", 3)
    monkeypatch.setattr("gpmil.models.teaching.MOST_COUPLED", bags.n_instances - 1)
    for effect in (TAU, "auto"):
        with pytest.raises(ValueError, match="Use moments='diagonal'"):
            pri(**numbers | {"slide_effect": effect}).fit(bags)
    pri(**numbers | {"slide_effect": 0.0, "n_inducing": 4, "tol": 1e-3}).fit(bags[:4])
    assert not caplog.records
    pri(**numbers | {"n_inducing": 4, "max_iter": 1, "tol": 1e9}).fit(bags[:4])
    assert "may take minutes" in caplog.text


def test_an_update_takes_the_bags_of_the_fit_and_fails_without_a_trace(model, bags):
    before = model.whitened_mean_.copy()
    with pytest.raises(ValueError, match="the bags of the fit"):
        model.update(bags[:-1])
    sweeps = pri(**NUMBERS, solver="sweeps", max_iter=3).fit(bags)
    with pytest.raises(ValueError, match="sweeps"):
        sweeps.update(bags)
    assert sweeps.instance_labels == "ignore"
    np.testing.assert_array_equal(model.whitened_mean_, before)


# --- Bags and labels left out ---------------------------------------------------------------------


def predicted(model, bag, tau=TAU):
    """mu and S of m_b under the model, with explicit inverses."""
    Z, x = model.inducing_points_, bag.features
    Kzz = oracle.kernel(Z, Z, "rbf", VARIANCE, LENGTH)
    L = np.linalg.cholesky(Kzz + oracle.JITTER * VARIANCE * np.eye(len(Z)))
    W = np.linalg.solve(L, oracle.kernel(x, Z, "rbf", VARIANCE, LENGTH).T).T
    S = oracle.coupling_matrix(bag.adjacency.toarray(), COUPLING)
    V = oracle.kernel(x, x, "rbf", VARIANCE, LENGTH) - W @ W.T
    V += W @ np.linalg.inv(model.whitened_precision_) @ W.T
    return MEAN + S @ W @ model.whitened_mean_, S + S @ V @ S + tau**2


def chance(mu, S, known, label):
    """P(the known patches have their labels, and the bag has its own)."""

    def below(mask, side):
        if not mask.any():
            return 1.0
        D = side[mask]
        normal = multivariate_normal(D * mu[mask], np.outer(D, D) * S[np.ix_(mask, mask)])
        return normal.cdf(np.zeros(mask.sum()))

    side, told = np.where(known == 1, -1.0, 1.0), known >= 0
    if not label:
        return below(np.ones_like(told), np.ones(len(mu)))
    if (known == 1).any():
        return below(told, side)
    return below(told, side) - below(np.ones_like(told), np.ones(len(mu)))


@pytest.mark.parametrize("more", [{}, {"slide_effect": 0.0, "moments": "coupled", "tol": 1e-6}])
def test_bags_and_labels_left_out_are_those_of_refits(more, bags, inducing):
    numbers = NUMBERS | more
    model = pri(**numbers, inducing=inducing, instance_labels="use").fit(bags)
    found, by_patch = model.leave_one_bag_out(bags), model.leave_one_label_out(bags)
    cohort = WholeCohort(bags, torch.device("cpu"), bags.labels)
    problem = model._problem(model._gp(torch.device("cpu")), cohort)
    joint = cohort.leave_one_bag_out(problem, torch.from_numpy(model.whitened_mean_), True)
    settings = numbers | {"inducing": model.inducing_points_, "instance_labels": "use"}
    apart = {"bag": [], "joint": [], "patch": []}
    for b in (0, 1, 3, 5, 7) if more else range(len(bags)):
        bag = bags[b : b + 1]
        rest = pri(**settings).fit(bags[np.delete(np.arange(len(bags)), b)])
        mu, S = predicted(rest, bag, numbers["slide_effect"])
        known, label = bag.instance_labels, int(bag.labels[0])
        own = by_patch[bags.bag_index == b]
        assert np.array_equal(np.isnan(own), known < 0)
        whole = chance(mu, S, known, label)
        apart["joint"].append(joint[b] - np.log(whole))
        if not label:
            apart["bag"].append(found[b] - np.log(whole))
            assert (own[known >= 0] == 0).all()
            continue
        if (known == 1).any():
            assert found[b] == 0
        elif (known == 0).any():
            below = chance(mu[known == 0], S[np.ix_(known == 0, known == 0)], known[known == 0], 0)
            apart["bag"].append(found[b] - np.log(whole / below))
        for i in np.flatnonzero(known >= 0):
            less = known.copy()
            less[i] = -1
            apart["patch"].append(own[i] - np.log(whole / chance(mu, S, less, 1)))
    for name, values in apart.items():
        assert len(values) > 1, name
        assert np.abs(values).mean() < 0.02 and np.abs(values).max() < 0.1, (name, values)


def test_labels_need_a_model_that_knows_them(bags, inducing):
    with pytest.raises(ValueError, match="instance_labels='use'"):
        pri(**NUMBERS, inducing=inducing).fit(bags).leave_one_label_out(bags)


def test_the_gradient_of_the_tuning_objective_with_labels(model, bags):
    """Against differences of its value."""
    few = bags[:6]
    made = model._tuning_cohort(few, few.labels, torch.device("cpu"), None)
    assert (made.known >= 0).sum() == (few.instance_labels >= 0).sum() > 0
    settings = at_settings.Settings(VARIANCE, LENGTH, MEAN, COUPLING, TAU)
    slopes = objective.gradient(made, settings).settings
    for name, step in (("variance", 0.02), ("slide_effect", 0.01)):
        up, down = (
            objective.value(made, settings._replace(**{name: getattr(settings, name) + e}))[0]
            for e in (step, -step)
        )
        assert getattr(slopes, name) == pytest.approx((up - down) / (2 * step), abs=2e-3), name


def test_settings_are_learned_with_the_labels_in(truth, bags):
    settings = {"n_inducing": 8, "tuning_budget": 1, "random_state": 1, "slide_effect": "auto"}
    found = gpmil.VGPMILPRI(**settings, instance_labels="use").fit(bags)
    assert found.converged_ and found.loo_log_likelihood_ < 0
    made = found._tuning_cohort(bags, bags.labels, torch.device("cpu"), None)
    scores = [objective.value(m, found._settings())[0] for m in (made, replace(made, known=None))]
    best = max(found.tuning_trace_, key=lambda t: t["objective"])["score"]
    assert best == pytest.approx(scores[0], abs=1e-5) != scores[1]
    again = found.with_settings_fixed()
    assert again.instance_labels == "use"
    np.testing.assert_allclose(
        again.fit(bags).predict_proba(truth), found.predict_proba(truth), atol=1e-8
    )
