import functools

import numpy as np
import pytest
import torch
from oracles.coupled import below, exact, gibbs
from oracles.model import Oracle, coupling_matrix, laplacian, relative_error
from scipy.stats import multivariate_normal
from sklearn.exceptions import ConvergenceWarning
from synthetic import dense_graphs, pri, slide_coords, small_cohort, some_inducing, standardised

from gpmil.coupling import operator as coupling
from gpmil.data import graphs
from gpmil.inference import solvers as inference
from gpmil.moments import coupled, coupled_bags, sampling
from gpmil.moments.coupled import CoupledMoments
from gpmil.moments.independent import IndependentPatches

CPU = torch.device("cpu")


def one_bag(n, strength, positive, seed=0):
    coords = slide_coords(np.random.default_rng(seed), n, 1.0)
    offsets = np.array([0, n])
    adjacency = graphs.adjacency_from_coords(coords, offsets, step=1.0)
    return CoupledMoments(adjacency, offsets, np.array([positive]), strength), adjacency


def expectations(moments, mu):
    E, log_z = moments.expectations(torch.from_numpy(mu))
    return E.numpy(), log_z


# --- The integrals ----------------------------------------------------------------------------


@pytest.mark.parametrize(("strength", "bar"), [(0.5, 0.005), (1.0, 0.005), (10.0, 0.03)])
@pytest.mark.parametrize("shift", [-0.6, 0.8])
def test_means_against_long_sampling(strength, bar, shift):
    n = 40
    rng = np.random.default_rng(3)
    moments, adjacency = one_bag(n, strength, False, seed=4)
    mu = rng.normal(size=n) + shift
    precision = np.eye(n) + strength * laplacian(adjacency.toarray())
    sigma = np.sqrt(np.diag(np.linalg.inv(precision)))
    expected, error = gibbs(mu, precision)
    E, _ = expectations(moments, mu)
    assert np.all(np.abs(E - expected) / sigma <= bar + 4 * error / sigma)
    # a positive bag: E = mu + P / (1 - P) (mu - E_neg), P from the sampler
    covariance = torch.from_numpy(np.linalg.inv(precision))
    log_p, _ = sampling.tilted(torch.from_numpy(mu), covariance)
    r = np.exp(log_p) / -np.expm1(log_p)
    above, _ = expectations(one_bag(n, strength, True, seed=4)[0], mu)
    assert np.all(np.abs(above - mu - r * (mu - expected)) / sigma <= bar + 4 * r * error / sigma)


@pytest.mark.parametrize("label", [0, 1])
@pytest.mark.parametrize("n", [1, 2, 3])
def test_means_against_exact_integrals(n, label):
    rng = np.random.default_rng(n)
    moments, adjacency = one_bag(n, 0.8, bool(label))
    for shift in (-2.0, 0.3, 1.5):
        mu = rng.normal(size=n) + shift
        expected, log_z = exact(mu, coupling_matrix(adjacency.toarray(), 0.8), label)
        E, found = expectations(moments, mu)
        assert np.abs(E - expected).max() < 0.01
        assert abs(found - log_z) < 0.02


def test_the_exact_integrals_are_exact():
    rng = np.random.default_rng(0)
    for n in (2, 3):
        root = rng.normal(size=(n, n))
        cov, mean = root @ root.T + 0.3 * np.eye(n), rng.normal(size=n)
        expected = multivariate_normal.cdf(np.zeros(n), mean, cov, abseps=1e-9, releps=1e-9)
        assert below(mean, cov) == pytest.approx(expected, abs=1e-6)
        eps = 1e-6
        E, _ = exact(mean, cov, 0)
        slope = [
            (np.log(below(mean + d, cov)) - np.log(below(mean - d, cov))) / (2 * eps)
            for d in eps * np.eye(n)
        ]
        assert np.allclose(E, mean + cov @ slope, atol=1e-7)


@pytest.mark.parametrize("label", [False, True])
def test_far_tails_stay_finite_and_join(label):
    moments, adjacency = one_bag(12, 1.0, label)
    mu = np.random.default_rng(1).normal(size=12)
    values = []
    for shift in (-40.0, -12.0, -6.5, -5.5, -5.4, 6.0):
        E, log_z = expectations(moments, mu + shift)
        assert np.isfinite(E).all() and np.isfinite(log_z)
        values.append((E - mu - shift).max() if label else log_z)
    if label:  # only the likeliest patch is pulled, about to zero
        E, _ = expectations(moments, mu - 40.0)
        assert (
            E.argmax()
            == (mu / np.sqrt(np.diag(coupling_matrix(adjacency.toarray(), 1.0)))).argmax()
        )


def test_the_union_takes_over_smoothly():
    """Both forms of a positive bag agree where one hands over to the other."""
    _, adjacency = one_bag(12, 1.0, True)
    mu = np.random.default_rng(1).normal(size=12) - 6.5
    results = []
    for limit in (-1e9, 0.0):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(coupled_bags, "RARE", limit)
            moments = CoupledMoments(adjacency, np.array([0, 12]), np.array([True]), 1.0)
            E, log_z = expectations(moments, mu)
            W = torch.from_numpy(np.random.default_rng(0).normal(size=(12, 3)))
            H = torch.from_numpy(coupling_matrix(adjacency.toarray(), 1.0)) @ W
            results.append((E - mu, log_z, moments.slope(W, H).numpy()))
    (a, p, s), (b, q, t) = results
    assert relative_error(a, b) < 0.02 and abs(p - q) < 0.02 and relative_error(s, t) < 0.02


# --- Sparse and dense -------------------------------------------------------------------------


@pytest.mark.parametrize("label", [False, True])
@pytest.mark.parametrize("shift", [-9.0, -2.0, 0.4])
def test_sparse_equals_dense(label, shift, monkeypatch):
    n = 90
    mu = np.random.default_rng(5).normal(size=n) + shift
    dense, adjacency = one_bag(n, 2.0, label)
    monkeypatch.setattr(coupling, "DENSE_LIMIT", 10)
    sparse, _ = one_bag(n, 2.0, label)
    assert (
        type(dense.parts[0][1]) is coupled_bags.Small
        and type(sparse.parts[0][1]) is coupled_bags.Large
    )
    (E, log_z), (F, other) = expectations(dense, mu), expectations(sparse, mu)
    assert relative_error(F, E) < 1e-8 and other == pytest.approx(log_z, rel=1e-8)
    W = torch.from_numpy(np.random.default_rng(6).normal(size=(n, 4)))
    H = torch.from_numpy(coupling_matrix(adjacency.toarray(), 2.0)) @ W
    assert relative_error(sparse.slope(W, H), dense.slope(W, H)) < 1e-8


@pytest.mark.parametrize("label", [False, True])
def test_the_slope_is_near_the_derivative(label):
    n = 25
    moments, adjacency = one_bag(n, 1.0, label)
    mu = np.random.default_rng(5).normal(size=n) - 1.0
    W = torch.from_numpy(np.random.default_rng(6).normal(size=(n, 3)))
    H = torch.from_numpy(coupling_matrix(adjacency.toarray(), 1.0)) @ W
    expectations(moments, mu)
    slope = moments.slope(W, H).numpy()
    eps = 1e-5
    for j in range(3):
        step = eps * H[:, j].numpy()
        up, down = expectations(moments, mu + step)[0], expectations(moments, mu - step)[0]
        assert relative_error(slope[:, j], W.mT.numpy() @ (up - down) / (2 * eps)) < 0.05


def test_kept_sites_change_nothing():
    moments, _ = one_bag(30, 1.5, True)
    mu = np.random.default_rng(7).normal(size=30)
    first = expectations(moments, mu)
    expectations(moments, mu * 3 - 1)
    again = expectations(moments, mu)
    assert relative_error(again[0], first[0]) < 1e-9 and again[1] == pytest.approx(
        first[1], rel=1e-9
    )


# --- In training ------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def bags():
    return small_cohort(seed=5, n_bags=16, sizes=(1, 20))


def fit(bags, **settings):
    return pri(inducing=some_inducing(bags, 15), moments="coupled", **settings).fit(bags)


def test_without_coupling_it_is_the_diagonal(bags):
    for solver in ("direct", "newton", "sweeps"):
        settings = {"coupling": 0.0, "solver": solver, "random_state": 1, "mean": -1.0}
        a = fit(bags, **settings)
        b = pri(inducing=some_inducing(bags, 15), **settings).fit(bags)
        assert relative_error(a.posterior_mean_, b.posterior_mean_) < 1e-10


def test_ep_of_independent_patches_is_exact():
    """The same, with EP itself at work: an edge of vanishing weight keeps Sigma = I."""
    n = 9
    offsets = np.array([0, n])
    edges = graphs.adjacency_from_edges([np.array([[0, 1, 1e-14]])], offsets)
    mu = np.random.default_rng(2).normal(size=n)
    for label in (False, True):
        moments = CoupledMoments(edges, offsets, np.array([label]), 1.0)
        assert type(moments.parts[0][1]) is coupled_bags.Small
        alone = coupled_bags.Alone(torch.tensor([n]), torch.tensor([label]))
        E, log_z = alone.expectations(torch.from_numpy(mu))
        found, value = expectations(moments, mu)
        assert relative_error(found, E) < 1e-10 and value == pytest.approx(float(log_z), rel=1e-10)


@pytest.mark.parametrize("strength", [0.5, 10.0])
@pytest.mark.parametrize(("variance", "mean"), [(1.0, 0.0), (50.0, -4.0)])
def test_the_fixed_point_is_the_maximum_of_the_bound(bags, strength, variance, mean):
    settings = {"coupling": strength, "variance": variance, "mean": mean, "lengthscale": 4.0}
    direct, newton = (fit(bags, solver=s, **settings) for s in ("direct", "newton"))
    assert direct.converged_ and newton.converged_
    assert relative_error(direct.posterior_mean_, newton.posterior_mean_) < 1e-8
    assert direct.elbo_trace_[-1] == pytest.approx(newton.elbo_trace_[-1], rel=1e-10)


@pytest.mark.parametrize("strength", [0.5, 5.0])
def test_sweeps_do_not_lower_the_bound(bags, strength):
    trace = fit(bags, coupling=strength, solver="sweeps", max_iter=30, random_state=0).elbo_trace_
    assert len(trace) == 30
    drops = np.maximum.accumulate(trace) - trace
    assert drops.max() < 1e-6 * abs(trace[-1])
    assert trace[-1] > trace[0]


def test_coordinate_ascent_with_exact_integrals_never_lowers_the_bound():
    cohort = small_cohort(seed=8, n_bags=8, sizes=(2, 3))
    x, adjacency = standardised(cohort), dense_graphs(cohort)
    z = np.concatenate(x)[[0, 3, 7, 11, 15]]
    oracle = Oracle(x, adjacency, cohort.labels, z, 0.9, -0.4, variance=2.0, lengthscale=1.7)
    E = [np.zeros(len(a)) for a in x]
    bounds = []
    for _ in range(25):
        mu_u = oracle.mean_u(E)
        parts = [
            exact(m, S, y) for m, S, y in zip(oracle.mean_m(mu_u), oracle.Sigma, cohort.labels)
        ]
        E = [p[0] for p in parts]
        bounds.append(sum(p[1] for p in parts) - 0.5 * mu_u @ oracle.Kzz_inv @ mu_u)
    assert np.diff(bounds).min() > -1e-12
    assert bounds[-1] > bounds[0] + 1e-3


def test_the_bound_is_the_evidence_bound(bags):
    """The constant too: against the definition, term by term, with dense matrices."""
    Z = some_inducing(bags, 15)
    model = pri(
        coupling=0.7, inducing=Z, mean=-0.4, variance=2.0, lengthscale=1.7, solver="direct"
    ).fit(bags)
    x = bags.features
    z = (Z - x.mean(0)) / x.std(0)
    oracle = Oracle(
        standardised(bags), dense_graphs(bags), bags.labels, z, 0.7, -0.4,
        variance=2.0, lengthscale=1.7,
    )  # fmt: skip
    mu_u, S = model.posterior_mean_, oracle.Sigma_u
    # the factorised log Z, and the KL divergence of q(u) from p(u)
    value = oracle.bound(mu_u) + 0.5 * mu_u @ oracle.Kzz_inv @ mu_u
    for xb, A, Sigma in zip(oracle.x, oracle.A, oracle.Sigma):
        V = oracle.kernel(xb, xb) - A @ (oracle.Kzz - S) @ A.T
        value -= np.trace(Sigma @ V) / 2
    kl = np.trace(oracle.Kzz_inv @ S) + mu_u @ oracle.Kzz_inv @ mu_u - len(z)
    kl += np.linalg.slogdet(oracle.Kzz)[1] - np.linalg.slogdet(S)[1]
    assert model.elbo_trace_[-1] == pytest.approx(value - kl / 2, rel=1e-8)


def test_float32_and_large_bags_in_training(bags, monkeypatch):
    reference = fit(bags, coupling=0.8)
    assert (
        relative_error(
            fit(bags, coupling=0.8, dtype="float32").posterior_mean_, reference.posterior_mean_
        )
        < 1e-4
    )
    monkeypatch.setattr(coupling, "DENSE_LIMIT", 8)
    assert relative_error(fit(bags, coupling=0.8).posterior_mean_, reference.posterior_mean_) < 1e-8


def test_a_graph_without_a_band_is_refused(monkeypatch):
    monkeypatch.setattr(coupling, "DENSE_LIMIT", 1)
    monkeypatch.setattr(coupling, "BAND_BYTES", 0)
    with pytest.raises(ValueError, match="narrow band"):
        one_bag(60, 1.0, False)


def test_a_problem_without_edges_needs_no_ep():
    cohort = small_cohort(n_bags=4, sizes=(1, 1))
    model = pri(inducing=cohort.features, coupling=1.0).fit(cohort)
    problem = inference.prepare(
        model._gp(CPU), lambda rows: model._inputs(cohort.features[rows], CPU), cohort.adjacency,
        cohort.offsets, cohort.labels == 1, 1.0, 0.0, likelihood=coupled.coupled_patches,
    )  # fmt: skip
    assert all(type(chunk.likelihood) is IndependentPatches for chunk in problem.chunks)


def test_rounding_ends_the_climb_early_and_says_so(bags):
    settings = {"coupling": 1.0, "variance": 1e6, "max_iter": 200}
    with pytest.warns(ConvergenceWarning, match="rounding may end it"):
        model = fit(bags, tol=1e-30, **settings)
    assert model.n_iter_ < 100
    # where it ends is rounding: the bound stands still, the residual is anything below 1e-5
    assert np.ptp(model.elbo_trace_[-8:]) <= 1e-11 * abs(model.elbo_trace_[-1])
    assert model.residual_ < 1e-3


def test_ep_that_has_not_converged_is_said(bags, monkeypatch):
    monkeypatch.setattr(coupled_bags, "ep", functools.partial(coupled_bags.ep, max_iter=1))
    monkeypatch.setattr(coupled_bags, "TOLERANCE", 0.0)
    telling = "expectation propagation has not converged in"
    with pytest.warns(ConvergenceWarning, match=telling) as caught:
        fit(bags, coupling=1.0, tol=1e-3, max_iter=2)
    assert {w.filename for w in caught if w.category is ConvergenceWarning} == {__file__}


def test_infinite_trials_are_shortened():
    eye = torch.eye(1).double()
    problem = inference.Problem([], eye, eye, 0.0, 0, 0.0)
    values = iter([(float("nan"), torch.tensor([float("nan")])), (2.0, torch.tensor([1.0]))])
    start, one = torch.zeros(1), torch.ones(1)
    w, value, _ = inference.climb(problem, start, 1.0, one, one, lambda *_: next(values))
    assert value == 2.0 and w.item() == 0.5
