"""Limits: where two models must become one, and what must not matter."""

import numpy as np
import pytest
from oracles.model import (
    JITTER,
    Oracle,
    expectation,
    full_gp_mean,
    kernel,
    probit_gp,
    relative_error,
)
from scipy.linalg import block_diag
from synthetic import dense_graphs, pr, pri, small_cohort, some_inducing, standardised

import gpmil
from gpmil import Bags
from gpmil.models import BagClassifier

SOLVERS = ["direct", "newton"]


@pytest.fixture(scope="module")
def bags():
    return small_cohort(seed=9, n_bags=14, sizes=(2, 16))


def numbers(model, bags):
    return np.concatenate([model.predict_instances(bags).mean, model.decision_function(bags)])


@pytest.mark.parametrize("solver", SOLVERS)
def test_coupling_to_zero_is_vgpmil_pr(bags, solver):
    Z = some_inducing(bags, 12)
    settings = {"inducing": Z, "solver": solver, "variance": 3.0, "mean": -1.0}
    plain = pr(**settings).fit(bags)
    zero = pri(coupling=0.0, **settings).fit(bags)
    assert np.array_equal(zero.posterior_mean_, plain.posterior_mean_)
    assert np.array_equal(numbers(zero, bags), numbers(plain, bags))
    gaps = [
        relative_error(pri(coupling=c, **settings).fit(bags).posterior_mean_, plain.posterior_mean_)
        for c in (1e-2, 1e-4, 1e-6)
    ]
    # the distance vanishes in proportion to lambda
    assert gaps[2] < 1e-5 and np.allclose(np.array(gaps[:-1]) / gaps[1:], 100, rtol=0.1)


@pytest.mark.parametrize("solver", SOLVERS)
def test_one_instance_a_bag_is_probit_gp_classification(solver):
    rng = np.random.default_rng(4)
    x = rng.normal(size=(40, 2))
    y = (x[:, 0] + 0.5 * x[:, 1] ** 2 + 0.4 * rng.normal(size=40) > 0.3).astype(int)
    cohort = Bags.from_arrays(list(x[:, None, :]), labels=y)
    model = pr(inducing=x, standardize=False, variance=2.0, lengthscale=1.3, solver=solver).fit(
        cohort
    )
    new = rng.normal(size=(9, 2))
    K = kernel(x, x, "rbf", 2.0, 1.3)
    f, f_new = probit_gp(K, K + 2 * JITTER * np.eye(40), y, kernel(new, x, "rbf", 2.0, 1.3), 5000)
    assert relative_error(model.predict_instances(cohort).mean, f) < 1e-8
    test = Bags.from_arrays(list(new[:, None, :]))
    assert relative_error(model.predict_instances(test).mean, f_new) < 1e-8
    # a bag of one is its instance
    p = model.predict_instances(test).probability
    assert relative_error(model.predict_proba(test)[:, 1], p) < 1e-10


@pytest.mark.parametrize("strength", [0.0, 0.8])
def test_inducing_points_at_the_data_is_the_full_gp(bags, strength):
    x = np.concatenate(standardised(bags))
    model = pri(
        coupling=strength, inducing=bags.features, lengthscale=1.5, variance=2.0, mean=-0.5,
        solver="newton",
    ).fit(bags)  # fmt: skip
    K = kernel(x, x, "rbf", 2.0, 1.5)
    Kzz = K + 2.0 * JITTER * np.eye(len(K))
    graphs = dense_graphs(bags)
    oracle = Oracle(
        standardised(bags), graphs, bags.labels, x, strength, -0.5, variance=2.0, lengthscale=1.5
    )
    Sigma = block_diag(*oracle.Sigma)
    # E[m] at the model's own mean; the full GP's regression on it must give that mean back
    mean_m = model.predict_instances(bags).mean
    E = np.concatenate(
        [
            expectation(m, np.sqrt(np.diag(S)), y)
            for m, S, y in zip(bags.split(mean_m), oracle.Sigma, bags.labels)
        ]
    )
    f = full_gp_mean(K, Kzz, Sigma, E, -0.5)
    assert relative_error(mean_m, Sigma @ f) < 1e-8


def shuffled(bags, rng):
    """The same cohort with bags and patches in another order, renamed and moved."""
    order = rng.permutation(len(bags))
    arrays, coords, rows = [], [], []
    for b in order:
        within = rng.permutation(bags.sizes[b])
        rows.append(bags.offsets[b] + within)
        arrays.append(bags.features[rows[-1]])
        coords.append(bags.coords[rows[-1]] + rng.integers(-999, 999, size=2))
    other = Bags.from_arrays(
        arrays, labels=bags.labels[order], coords=coords, step=7.0,
        names=[f"renamed {b}" for b in order],
    )  # fmt: skip
    return other, order, np.concatenate(rows)


@pytest.mark.parametrize("solver", SOLVERS)
def test_order_names_and_position_do_not_matter(bags, solver):
    Z = some_inducing(bags, 12)
    other, order, rows = shuffled(bags, np.random.default_rng(0))
    settings = {"coupling": 0.9, "inducing": Z, "solver": solver}
    a, b = pri(**settings).fit(bags), pri(**settings).fit(other)
    assert relative_error(b.posterior_mean_, a.posterior_mean_) < 1e-9
    assert relative_error(b.posterior_covariance_, a.posterior_covariance_) < 1e-9
    pa, pb = a.predict_instances(bags), b.predict_instances(other)
    for name in ("mean", "std", "probability"):
        assert relative_error(getattr(pb, name), getattr(pa, name)[rows]) < 1e-9
    # bags: the quasi-random integral meets the patches in the order of their marginals
    assert relative_error(b.decision_function(other), a.decision_function(bags)[order]) < 1e-6


def test_a_bag_is_predicted_alike_alone_and_among_others(bags):
    model = pri(coupling=0.9, inducing=some_inducing(bags, 12)).fit(bags)
    together = model.predict_instances(bags).split()
    log_p, _ = model.log_proba_negative(bags)
    for b in (0, 3, 8):
        alone = model.predict_instances(bags[b])
        assert relative_error(alone.mean, together[b].mean) < 1e-12
        assert relative_error(alone.std, together[b].std) < 1e-12
        value, _ = model.log_proba_negative(bags[b])
        assert abs(value[0] - log_p[b]) < 1e-12


def test_one_pass_gives_what_two_give(bags, monkeypatch):
    model = pri(coupling=0.9, inducing=some_inducing(bags, 12)).fit(bags)
    for large in (1500, 7):  # some bags by the sparse way
        monkeypatch.setattr("gpmil.models.fitted.LARGE", large)
        both, apart = model.predict_all(bags), model.predict_instances(bags)
        assert np.array_equal(both.log_proba_negative, model.log_proba_negative(bags)[0])
        assert np.array_equal(both.error, model.log_proba_negative(bags)[1])
        assert np.array_equal(both.proba, model.predict_proba(bags))
        for name in ("probability", "mean", "std"):
            assert relative_error(getattr(both.instances, name), getattr(apart, name)) < 1e-10


def test_strong_coupling_levels_a_bag(bags):
    Z = some_inducing(bags, 12)
    spread = [
        np.mean([p.mean.std() for p in model.predict_instances(bags).split()])
        for model in (pri(coupling=c, inducing=Z).fit(bags) for c in (0.0, 1.0, 100.0))
    ]
    assert spread[0] > spread[1] > spread[2]


def test_bag_probability_equals_the_integral_for_two_and_three_patches(bags):
    from scipy.stats import multivariate_normal

    model = pri(coupling=0.7, inducing=some_inducing(bags, 10), mean=-0.3).fit(bags)
    z = (model.inducing_points_ - bags.features.mean(0)) / bags.features.std(0)
    oracle = Oracle(
        standardised(bags), dense_graphs(bags), bags.labels, z, 0.7, -0.3, lengthscale=2.0
    )
    small = [b for b in range(len(bags)) if bags.sizes[b] <= 4]
    assert small
    value, error = model.log_proba_negative(bags[small])
    for b, v, e in zip(small, value, error):
        mean, cov = oracle.joint(
            model.posterior_mean_, standardised(bags)[b], dense_graphs(bags)[b]
        )
        exact = multivariate_normal.cdf(np.zeros(len(mean)), mean, cov, abseps=1e-10, releps=1e-10)
        assert abs(v - np.log(exact)) < 1e-3 and e < 1e-3


def test_probabilities_are_never_exactly_zero_or_one():
    class Extreme(BagClassifier):
        def log_proba_negative(self, bags):
            log_p = np.array([0.0, -5e-324, -1e-300, -1e-17, -0.7, -40.0, -800.0, -1e6])
            return log_p, np.zeros(8)

    p, log_odds = Extreme().predict_proba(None), Extreme().decision_function(None)
    assert ((p > 0) & (p < 1)).all() and np.isfinite(log_odds).all()
    assert np.allclose(p.sum(1), 1)
    assert (np.diff(log_odds) >= 0).all()
    assert np.allclose(log_odds[2:], [-690.7755, -39.1439, 0.0137, 40, 800, 1e6], rtol=5e-3)


@pytest.mark.parametrize("strength", [0.0, 0.9])
def test_large_bags_take_the_sparse_way_to_the_same_probability(strength, monkeypatch):
    cohort = gpmil.simulate.cohort(n_bags=8, n_features=16, seed=2)
    model = pri(
        coupling=strength, n_inducing=30, random_state=0, variance=4.0, mean=-2.0, device="cpu"
    ).fit(cohort)
    dense, error = model.log_proba_negative(cohort)
    monkeypatch.setattr("gpmil.models.fitted.LARGE", 20)
    sparse, _ = model.log_proba_negative(cohort)
    assert not np.array_equal(sparse, dense)
    assert (np.abs(sparse - dense) <= np.maximum(0.01, 2 * error)).all()
