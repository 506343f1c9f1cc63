import functools
from dataclasses import replace

import numpy as np
import pytest
import torch
from oracles.model import Oracle, collapsed_optimum, relative_error
from sklearn.exceptions import ConvergenceWarning
from synthetic import (
    dense_graphs,
    dense_pieces,
    pri,
    problem_of,
    small_cohort,
    some_inducing,
    standardised,
)

import gpmil
from gpmil.inference import solvers as inference
from gpmil.inference import stores

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def bags():
    return small_cohort(seed=5, n_bags=16, sizes=(1, 20))


def oracle_of(bags, Z, strength, **settings):
    x = bags.features.astype(float)
    c = settings.pop("c", 0.0)
    z = (Z - x.mean(0)) / x.std(0)
    return Oracle(standardised(bags), dense_graphs(bags), bags.labels, z, strength, c, **settings)


# --- Algorithm 1 ------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def after_two_hundred_sweeps(bags):
    """The oracle's mean and covariance of u and its probabilities, once per strength."""

    @functools.cache
    def run(strength):
        oracle = oracle_of(bags, some_inducing(bags, 12), strength, lengthscale=2.0)  # sqrt(4)
        E = bags.split(np.random.default_rng(11).standard_normal(bags.n_instances))
        mu_u = oracle.sweeps(E, 200)
        slides = zip(standardised(bags), dense_graphs(bags))
        probabilities = np.concatenate([oracle.probabilities(mu_u, x, a) for x, a in slides])
        return mu_u, oracle.Sigma_u, probabilities

    return run


@pytest.mark.parametrize("strength", [0, 0.1, 0.5, 1, 5, 10])
@pytest.mark.parametrize(("dtype", "tolerance"), [("float64", 1e-8), ("float32", 1e-4)])
def test_two_hundred_sweeps_equal_the_dense_oracle(
    bags, after_two_hundred_sweeps, strength, dtype, tolerance
):
    Z = some_inducing(bags, 12)
    settings = gpmil.paper_settings() | {"coupling": strength, "dtype": dtype}
    model = pri(**settings, inducing=Z, random_state=11).fit(bags)
    mu_u, Sigma_u, expected = after_two_hundred_sweeps(strength)
    assert relative_error(model.posterior_mean_, mu_u) < tolerance
    assert relative_error(model.posterior_covariance_, Sigma_u) < tolerance
    assert relative_error(model.predict_instances(bags).probability, expected) < tolerance
    assert model.n_iter_ == 200


@pytest.mark.parametrize("kernel", ["matern32", "matern52", "linear"])
def test_sweeps_with_other_kernels_and_a_prior_mean(bags, kernel):
    Z = some_inducing(bags, 9)
    model = pri(
        coupling=0.7,
        kernel=kernel,
        variance=2.3,
        lengthscale=1.7,
        mean=-0.8,
        inducing=Z,
        solver="sweeps",
        max_iter=30,
        random_state=2,
    ).fit(bags)
    oracle = oracle_of(bags, Z, 0.7, c=-0.8, name=kernel, variance=2.3, lengthscale=1.7)
    E = bags.split(np.random.default_rng(2).standard_normal(bags.n_instances))
    mu_u = oracle.sweeps(E, 30)
    # nine inducing points and a linear kernel of rank four: the jitter carries Kzz
    tolerance = 1e-6 if kernel == "linear" else 1e-9
    expected = [
        oracle.probabilities(mu_u, x, a) for x, a in zip(standardised(bags), dense_graphs(bags))
    ]
    assert (
        relative_error(model.predict_instances(bags).probability, np.concatenate(expected))
        < tolerance
    )


@pytest.mark.parametrize("chunk_rows", [1, 40])
def test_chunks_do_not_change_the_numbers(bags, chunk_rows, monkeypatch):
    Z = some_inducing(bags, 12)
    make = lambda: pri(coupling=0.8, inducing=Z, solver="newton").fit(bags)  # noqa: E731
    whole = make()
    monkeypatch.setattr(stores, "CHUNK_ROWS", chunk_rows)
    assert relative_error(make().posterior_mean_, whole.posterior_mean_) < 1e-12


# --- Newton -----------------------------------------------------------------------------------

SETTINGS = [(1.0, 2.0, 0.0), (50.0, 8.0, -4.0)]


@pytest.mark.parametrize("strength", [0.0, 0.5, 10.0])
@pytest.mark.parametrize(("variance", "lengthscale", "c"), SETTINGS)
def test_newton_converges_from_everywhere_to_one_point(bags, strength, variance, lengthscale, c):
    problem = problem_of(bags, some_inducing(bags, 20), strength, variance, lengthscale, c)
    default = inference.newton(problem, 200, 1e-10)
    assert default.converged and default.residual < 1e-10 and default.n_iter <= 15
    for seed in range(4):
        for scale in (0.1, 1, 10):
            E = scale * np.random.default_rng(seed).standard_normal(problem.n_instances)
            found = inference.newton(problem, 200, 1e-10, torch.from_numpy(E))
            assert found.converged and found.n_iter <= 15
            assert relative_error(found.w, default.w) < 1e-8
    for scale in (1e3, 1e6):
        E = scale * np.random.default_rng(3).standard_normal(problem.n_instances)
        found = inference.newton(problem, 200, 1e-10, torch.from_numpy(E))
        assert found.converged
        assert relative_error(found.w, default.w) < 1e-8


@pytest.mark.parametrize("strength", [0.0, 0.5, 5.0])
def test_newton_equals_twenty_thousand_sweeps(bags, strength):
    Z = some_inducing(bags, 15)
    model = pri(coupling=strength, solver="newton", inducing=Z).fit(bags)
    expected = oracle_of(bags, Z, strength, lengthscale=2.0).many_sweeps(20_000)
    assert relative_error(model.posterior_mean_, expected) < 1e-8


def test_many_sweeps_are_sweeps(bags):
    oracle = oracle_of(bags, some_inducing(bags, 15), 0.5, c=-0.3, lengthscale=2.0)
    zeros = bags.split(np.zeros(bags.n_instances))
    assert relative_error(oracle.many_sweeps(7), oracle.sweeps(zeros, 7)) < 1e-10


def test_the_jacobian_by_finite_differences(bags):
    problem = problem_of(bags, some_inducing(bags, 10), 1.3, variance=4.0, c=-1.0)
    w = torch.from_numpy(np.random.default_rng(0).normal(size=10))
    _, slope, _ = inference.fixed_point(problem, w)
    eps = 1e-6
    for j in range(10):
        step = torch.zeros(10, dtype=torch.float64)
        step[j] = eps
        up, down = (inference.fixed_point(problem, w + s)[0] for s in (step, -step))
        column = (slope - problem.R)[:, j]
        assert torch.allclose((up - down) / (2 * eps), column, atol=1e-6 * column.abs().max())


def test_a_step_that_does_not_help_falls_back_to_sweeps(bags):
    problem = problem_of(bags, some_inducing(bags, 10), 0.5)
    w = inference.signed(problem)
    F, *_ = inference.fixed_point(problem, w)
    wrong = -1e3 * problem.solve_R(F)
    found, *_ = inference._shorten(problem, w, F, wrong, 1e-10)
    assert torch.equal(found, inference._plain(problem, w))
    nan = torch.full_like(w, float("nan"))
    assert torch.equal(inference._shorten(problem, w, F, nan, 1e-10)[0], found)


# --- Direct -----------------------------------------------------------------------------------


@pytest.mark.parametrize("strength", [0.0, 0.5, 10.0])
@pytest.mark.parametrize(("variance", "lengthscale", "c"), SETTINGS)
def test_direct_equals_lbfgs(bags, strength, variance, lengthscale, c):
    problem = problem_of(bags, some_inducing(bags, 20), strength, variance, lengthscale, c)
    found = inference.direct(problem, 200, 1e-10)
    assert found.converged and found.residual < 1e-10

    w = collapsed_optimum(dense_pieces(problem), c)
    assert relative_error(found.w, w) < 1e-9


def test_the_bound_equals_the_oracles_and_its_derivatives_hold(bags):
    Z = some_inducing(bags, 10)
    problem = problem_of(bags, Z, 1.3, variance=4.0, c=-1.0)
    oracle = oracle_of(bags, Z, 1.3, c=-1.0, variance=4.0, lengthscale=2.0)
    L = np.linalg.cholesky(oracle.Kzz)
    w = np.random.default_rng(1).normal(size=10)
    value, gradient, curvature = inference.collapsed_bound(problem, torch.from_numpy(w))
    assert value == pytest.approx(oracle.bound(L @ w), rel=1e-10)
    eps = 1e-5
    for j in range(10):
        step = eps * np.eye(10)[j]
        up, down = (
            inference.collapsed_bound(problem, torch.from_numpy(w + s)) for s in (step, -step)
        )
        assert (up[0] - down[0]) / (2 * eps) == pytest.approx(
            float(gradient[j]), rel=1e-6, abs=1e-6
        )
        assert torch.allclose((up[1] - down[1]) / (2 * eps), -curvature[:, j], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("variance", "lengthscale", "c"), SETTINGS)
def test_without_coupling_direct_and_newton_are_one(bags, variance, lengthscale, c):
    problem = problem_of(bags, some_inducing(bags, 20), 0.0, variance, lengthscale, c)
    a, b = inference.direct(problem, 200, 1e-10), inference.newton(problem, 200, 1e-10)
    assert relative_error(a.w, b.w) < 1e-8


def test_with_coupling_they_differ(bags):
    problem = problem_of(bags, some_inducing(bags, 20), 1.0)
    a, b = inference.direct(problem, 200, 1e-10), inference.newton(problem, 200, 1e-10)
    assert relative_error(a.w, b.w) > 1e-3


def test_the_hessian_that_leads_the_way_is_in_float32(bags):
    problem = problem_of(bags, some_inducing(bags, 20), 0.7, c=-0.4)
    w = torch.from_numpy(np.random.default_rng(1).normal(size=20)) / 3
    _, gradient, exact = inference.collapsed_bound(problem, w)
    assert 1e-12 < relative_error(inference._curvature(problem, w), exact) < 1e-5
    step = inference.ascent(exact, gradient)
    assert torch.allclose(step, torch.linalg.solve(exact, gradient), rtol=1e-9)


def test_an_indefinite_curvature_still_climbs():
    curvature = torch.diag(torch.tensor([2.0, -0.5, 1e-9], dtype=torch.float64))
    gradient = torch.tensor([1.0, 1.0, 1.0], dtype=torch.float64)
    delta = inference.ascent(curvature, gradient)
    assert torch.isfinite(delta).all() and gradient @ delta > 0


# --- Reporting --------------------------------------------------------------------------------


@pytest.mark.parametrize("solver", ["newton", "direct"])
def test_no_convergence_is_said_with_advice(bags, solver):
    model = pri(inducing=some_inducing(bags, 10), solver=solver, max_iter=1)
    with pytest.warns(ConvergenceWarning, match="Raise max_iter"):
        model.fit(bags)
    assert not model.converged_ and model.n_iter_ == 1 and model.residual_ > 1e-10


def test_sweeps_report_their_residual(bags):
    Z = some_inducing(bags, 10)
    short, long = (
        pri(inducing=Z, solver="sweeps", max_iter=n, random_state=0).fit(bags) for n in (3, 300)
    )
    assert not short.converged_ and 1e-10 < short.residual_ < 1
    assert long.residual_ < short.residual_ / 10
    assert long.converged_ == (long.residual_ < 1e-10)


@pytest.mark.parametrize("solver", ["newton", "direct"])
def test_float32_storage_is_close(bags, solver):
    Z = some_inducing(bags, 15)
    a, b = (
        pri(coupling=0.7, inducing=Z, solver=solver, dtype=d).fit(bags)
        for d in ("float64", "float32")
    )
    assert b.converged_
    assert 0 < relative_error(b.posterior_mean_, a.posterior_mean_) < 1e-4


# --- A sample to start with -------------------------------------------------------------------


def test_the_share_of_a_cohort_weighs_the_prior(bags):
    problem = problem_of(bags, some_inducing(bags, 12), 0.7, variance=3.0)
    twice = replace(problem, chunks=[*problem.chunks, *problem.chunks], share=2.0)
    w, doubled = (inference.direct(p, 50, 1e-11).w for p in (problem, twice))
    assert relative_error(doubled, w) < 1e-9


def test_a_sample_only_changes_the_way(bags, monkeypatch):
    monkeypatch.setattr(stores, "CHUNK_ROWS", 1)
    monkeypatch.setattr(inference, "EVERY", 3)
    problem = problem_of(bags, some_inducing(bags, 12), 0.7, variance=3.0, c=-0.5)
    assert len(problem.chunks) >= 3 * inference.FEWEST
    start = inference._from_a_sample(problem, 50)
    assert float(start.norm()) > 0
    zero = torch.zeros_like(start)
    assert inference.rise(problem, start)[0] > inference.rise(problem, zero)[0]
    w, from_zero = inference.direct(problem, 50, 1e-11), inference.direct(problem, 50, 1e-11, zero)
    assert w.converged and relative_error(w.w, from_zero.w) < 1e-9


def test_few_pieces_start_at_zero(bags):
    problem = problem_of(bags, some_inducing(bags, 12), 0.7)
    assert not inference._from_a_sample(problem, 50).any()
