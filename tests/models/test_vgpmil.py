"""VGPMIL equals its formulas, its bound never falls, and it behaves like the other models."""

import copy
import logging
import pickle
import warnings
from dataclasses import replace
from itertools import pairwise

import gpytorch
import jaxtyping
import numpy as np
import pytest
import scipy.sparse as sp
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles import vgpmil as oracles
from oracles.model import kernel
from scipy.special import expit
from sklearn.base import clone
from sklearn.exceptions import ConvergenceWarning, NotFittedError
from sklearn.metrics import roc_auc_score
from sklearn.model_selection import StratifiedKFold, cross_val_predict
from synthetic import small_cohort, some_inducing, standardised

import gpmil
from gpmil import VGPMIL, Bags
from gpmil.inference import logistic as inference
from gpmil.inference import pieces, solvers, stores
from gpmil.models.base import resolve_device
from gpmil.moments import logistic
from gpmil.moments.likelihood import Group
from gpmil.process.kernels import Kernel
from gpmil.process.sparse_gp import Posterior, SparseGP

LENGTH = 1.3
WHEREVER = [{}, {"expected_max": "largest"}, {"slide_effect": 0.9, "mean": -0.4}]


@pytest.fixture(autouse=True)
def without_gradients():
    """As inside a fit."""
    with torch.no_grad():
        yield


@pytest.fixture
def as_users_run_it():
    """Without the type checker of the tests, which would speak before the library does."""
    before = jaxtyping.config.jaxtyping_disable
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", before)


def small(**given):
    return VGPMIL(**({"n_inducing": 12, "random_state": 3, "max_iter": 30} | given))


def start(n, seed):
    """What the documentation says of the start."""
    rng = np.random.default_rng(seed)
    return rng.uniform(1e-12, 0.1, n), rng.standard_normal(n)


def pca_scores(bags, k):
    """Scores on k components over their overall deviation, of the instances and of others."""
    mean = bags.features.mean(0)
    axes = np.linalg.svd(bags.features - mean, full_matrices=False)[2][:k]
    scale = ((bags.features - mean) @ axes.T).std()
    return lambda x: (x - mean) @ axes.T / scale


def twin(bags, z, **given):
    """The oracle's cohort in the space of standardised features."""
    x = bags.features
    return oracles.Cohort(
        standardised(bags), bags.labels, (z - x.mean(0)) / x.std(0), given.pop("c", 0.0), **given
    )


def following(H, expected_max="product"):
    """The likelihood of bags that follow their instances so firmly."""
    return logistic.Logistic(float(np.log(H)), expected_max)


def random_problem(
    seed, rule, variance=1.4, c=0.3, n_bags=6, sizes=(1, 6), M=5, dtype=torch.float64
):
    """Inference's own view of a cohort, its Gaussian process, and the oracle's view."""
    bags = small_cohort(seed, n_bags=n_bags, sizes=sizes)
    dense = twin(bags, some_inducing(bags, M), c=c, variance=variance, lengthscale=LENGTH)
    gp = SparseGP.build(Kernel("rbf", variance, LENGTH), torch.from_numpy(dense.z))
    x = torch.from_numpy(np.concatenate(dense.bags))
    return problem_of(bags, gp, x, c, rule, dtype), gp, dense


def problem_of(bags, gp, x, c, rule, dtype=torch.float64):
    """Pieces as a fit makes them, of bags with kernel inputs x."""
    none = sp.csr_array((len(x), len(x)))
    source = stores.Source(
        gp, lambda rows: x[rows], none, bags.offsets, bags.labels == 1, 0.0, dtype, rule,
        residual=True,
    )  # fmt: skip
    return solvers.assemble(*stores.gather(source, "memory"), c, len(x))


# --- The fit is the oracle's ------------------------------------------------------------------


CASES = [
    {},
    {"seed": 1, "H": 1e12, "mean": -0.7},
    {"seed": 2, "expected_max": "largest", "mean": 0.4},
    {"seed": 3, "expected_max": "largest", "H": 1e12, "bag": "max"},
    {"seed": 8, "kernel": "matern32", "variance": 2.7},
    {"seed": 5, "kernel": "matern52", "mean": 1.1, "H": 3.5},
    {"seed": 9, "n_components": 2, "lengthscale": 0.8},
    {"seed": 7, "variance": 0.2, "lengthscale": "sqrt_dim", "bag": "max", "H": 7.0},
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_fit_and_predictions_equal_the_oracle(case):
    case = {"seed": 0, "H": 100.0, "mean": 0.0, "variance": 1.3, "lengthscale": LENGTH} | case
    seed = case.pop("seed")
    bags, n_iter = small_cohort(seed, n_bags=9, sizes=(1, 6)), 7
    assert 1 in bags.sizes
    z = some_inducing(bags, 6, seed)
    model = VGPMIL(inducing=z, max_iter=n_iter, random_state=seed, **case).fit(bags)

    k = case.get("n_components")
    x = bags.features
    space = pca_scores(bags, k) if k else lambda a: (a - x.mean(0)) / x.std(0)
    length = np.sqrt(4) if case["lengthscale"] == "sqrt_dim" else case["lengthscale"]
    named = case.get("kernel", "rbf")
    dense = oracles.Cohort(
        bags.split(space(x)), bags.labels, space(z), case["mean"], named, case["variance"], length
    )
    rule = case.get("expected_max", "product")
    _, m, S, trace = oracles.sweeps(dense, *start(len(x), seed), case["H"], n_iter, rule)
    near = {"rtol": 1e-8}
    np.testing.assert_allclose(model.posterior_mean_, m, atol=1e-8 * np.abs(m).max(), **near)
    np.testing.assert_allclose(model.posterior_covariance_, S, atol=1e-8 * np.abs(S).max(), **near)
    np.testing.assert_allclose(model.elbo_trace_, trace, **near)
    assert (model.n_iter_, model.variance_, model.mean_) == (n_iter, case["variance"], case["mean"])
    np.testing.assert_allclose(model.lengthscale_, length, rtol=1e-14)

    # bags the model has not seen: far, near, of one instance
    new = small_cohort(seed + 50, n_bags=4, sizes=(1, 4), shift=3.0)
    instances, (log_p, error) = model.predict_instances(new), model.log_proba_negative(new)
    expected = oracles.predict(dense, m, S, new.split(space(new.features)))
    np.testing.assert_allclose(instances.mean, np.concatenate([a for a, _ in expected]), rtol=1e-7)
    np.testing.assert_allclose(instances.std, np.concatenate([b for _, b in expected]), **near)
    each = [
        oracles.expected_sigmoid(a, b) for a, b in np.concatenate([*map(np.array, expected)], 1).T
    ]
    np.testing.assert_allclose(instances.probability, each, **near)
    bag_rule = case.get("bag", "noisy_or")
    np.testing.assert_allclose(
        log_p, [oracles.log_negative(a, b, bag_rule) for a, b in expected], **near
    )
    assert not error.any()
    found = model.predict_all(new)
    assert np.array_equal(found.log_proba_negative, log_p)
    assert np.array_equal(found.instances.probability, instances.probability)
    assert np.array_equal(found.proba, model.predict_proba(new))


def test_every_iteration_equals_the_oracle():
    problem, gp, dense = random_problem(8, following(40.0))
    pi, xi = start(len(dense.A), 8)
    for n_iter in (1, 2, 5):
        found = inference.sweeps(problem, pi, xi, n_iter, 0.0)
        expected, m, _, trace = oracles.sweeps(dense, pi, xi, 40.0, n_iter)
        np.testing.assert_allclose(expit(found.s), expected, rtol=1e-8)
        np.testing.assert_allclose(found.q.mean_u(gp), m, rtol=1e-8)
        np.testing.assert_allclose(found.trace, trace, rtol=1e-10)


def test_lengths_of_the_columns_are_weights_of_the_features(plain):
    lengths = np.array([0.7, 2.0, 1.1, 3.0])
    points = plain.features[2:60:5]
    many = small(lengthscale=lengths, inducing=points).fit(plain)
    scaled = Bags(
        (plain.features - plain.features.mean(0)) / plain.features.std(0) / lengths,
        plain.offsets,
        plain.labels,
    )
    z = (points - plain.features.mean(0)) / plain.features.std(0) / lengths
    one = small(lengthscale=1.0, standardize=False, inducing=z).fit(scaled)
    np.testing.assert_allclose(many.posterior_mean_, one.posterior_mean_, rtol=1e-7, atol=1e-8)
    np.testing.assert_allclose(
        many.predict_proba(plain), one.predict_proba(scaled), rtol=1e-7, atol=1e-9
    )


def test_start_is_as_documented(plain):
    # one iteration shows the start: pi and xi enter q(u) directly
    model = small(max_iter=1, random_state=11, lengthscale=LENGTH).fit(plain)
    dense = twin(plain, model.inducing_points_, lengthscale=LENGTH)
    m, S = oracles.update_u(dense, *start(plain.n_instances, 11))
    np.testing.assert_allclose(model.posterior_mean_, m, rtol=1e-6, atol=1e-7)
    np.testing.assert_allclose(model.posterior_covariance_, S, rtol=1e-6, atol=1e-7)


def test_labels_of_a_bag_are_summed_over_all_assignments():
    rng = np.random.default_rng(0)
    sizes = np.array([3, 1, 5, 1, 2])
    offsets, s = np.r_[0, sizes.cumsum()], rng.normal(size=sizes.sum()) * 2
    group = group_of(offsets, np.array([True, False, True, False, True]))
    expected = [oracles.expected_right(piece, 0) for piece in np.split(expit(s), offsets[1:-1])]
    found = logistic.log_no_label(torch.from_numpy(s), group)
    np.testing.assert_allclose(found.exp(), expected, rtol=1e-13)


def group_of(offsets, positive):
    """Bags as a likelihood is told of them."""
    n = int(offsets[-1])
    return Group(
        torch.ones(n, dtype=torch.float64), torch.from_numpy(offsets), torch.from_numpy(positive),
        None, slice(0, n),
    )  # fmt: skip


@given(sizes=st.lists(st.integers(1, 6), min_size=1, max_size=8), seed=st.integers(0, 999))
@settings(max_examples=40, deadline=None)
def test_columns_visit_every_instance_in_the_order_of_its_bag(sizes, seed):
    rng = np.random.default_rng(seed)
    offsets, positive = np.r_[0, np.cumsum(sizes)], rng.random(len(sizes)) < 0.6
    columns = logistic.Columns.of(group_of(offsets, positive))
    rows = [columns.first[:count] + k for k, count in enumerate(columns.reach)]
    visits = torch.cat(rows).numpy()
    assert sorted(visits) == list(range(offsets[-1]))
    for first, last in pairwise(offsets):
        mine = visits[(visits >= first) & (visits < last)]
        assert np.array_equal(mine, np.arange(first, last))
    order = columns.order.numpy()
    assert np.array_equal(columns.sign.numpy() > 0, positive[order])
    assert (np.diff(np.array(sizes)[order]) <= 0).all()


@pytest.mark.parametrize("rule", ["product", "largest"])
@given(
    sizes=st.lists(st.integers(1, 6), min_size=1, max_size=8),
    seed=st.integers(0, 999),
    log_H=st.floats(0.1, 28),
    ties=st.booleans(),
)
@settings(max_examples=40, deadline=None)
def test_label_updates_equal_the_loop(rule, sizes, seed, log_H, ties):
    rng = np.random.default_rng(seed)
    offsets, positive = np.r_[0, np.cumsum(sizes)], rng.random(len(sizes)) < 0.6
    s, Ef = rng.normal(size=offsets[-1]) * 3, rng.normal(size=offsets[-1]) * 2
    if ties:  # the largest of the others is then the largest
        s = np.round(s)
    before, group = s.copy(), group_of(offsets, positive)
    given = torch.from_numpy(s), torch.from_numpy(Ef), group, logistic.Columns.of(group)
    found = logistic.UPDATES[rule](*given, log_H)
    assert np.array_equal(s, before)
    rows = [range(a, b) for a, b in pairwise(offsets)]
    expected = oracles.update_h(rows, positive.astype(int), expit(s), Ef, np.exp(log_H), rule)
    np.testing.assert_allclose(expit(found.numpy()), expected, rtol=1e-10, atol=1e-14)


# --- The bound --------------------------------------------------------------------------------


def random_cohort(sizes, seed, spread):
    """Both classes, positive bags shifted."""
    rng = np.random.default_rng(seed)
    labels = np.r_[0, 1, rng.integers(0, 2, len(sizes) - 2)]
    return Bags.from_arrays(
        [rng.normal(size=(n, 3)) * spread + y for n, y in zip(sizes, labels)], labels=labels
    )


@given(
    sizes=st.lists(st.integers(1, 6), min_size=2, max_size=7),
    spread=st.sampled_from([0.3, 1.0, 4.0]),
    log_H=st.floats(np.log(2), np.log(1e12)),
    variance=st.floats(0.1, 50),
    c=st.floats(-3, 3),
    seed=st.integers(0, 9999),
)
@settings(max_examples=50, deadline=None)
def test_bound_never_falls(sizes, spread, log_H, variance, c, seed):
    bags = random_cohort(sizes, seed, spread)
    z = np.random.default_rng(seed).normal(size=(5, 3))
    model = VGPMIL(
        variance=variance, mean=c, H=np.exp(log_H), inducing=z, max_iter=25, random_state=seed
    )
    trace = model.fit(bags).elbo_trace_
    assert (np.diff(trace) >= -1e-10 * np.abs(trace[1:])).all()
    # a lower bound of log p(y) < 0
    assert (trace < 0).all()


@pytest.mark.parametrize(
    ("seed", "variance", "c", "H"),
    [(0, 0.3, 0.4, 2.5), (1, 1.4, -1.2, 100.0), (2, 30.0, 0.7, 1e12)],
)
def test_no_update_lowers_the_bound(seed, variance, c, H):
    problem, gp, dense = random_problem(seed, following(H), variance, c)
    chunk = problem.chunks[0]
    rng = np.random.default_rng(seed)
    N, M = dense.A.shape
    for _ in range(10):
        # from anywhere: q(u), xi and q(h) that have nothing to do with each other
        root = torch.from_numpy(np.eye(M) + 0.4 * rng.normal(size=(M, M)))
        q = Posterior.build(torch.from_numpy(rng.normal(size=M)), root @ root.mT)
        state = torch.from_numpy(np.stack([2 * rng.normal(size=N), np.exp(rng.normal(size=N))]))

        def bound(q, state):
            m, S = q.mean_u(gp).numpy(), q.covariance_u(gp).numpy()
            return oracles.bound(dense, m, S, state[1].numpy(), expit(state[0].numpy()), H)

        at = [bound(q, state)]
        _, b, R = chunk.turn(state.clone(), None, c)
        R = R + torch.eye(M, dtype=torch.float64)
        q = Posterior.build(torch.linalg.solve(R, b), R)
        at.append(bound(q, state))
        here = logistic.Process(q.w, torch.linalg.inv(R))
        after = state.clone()
        own = chunk.turn(after, here, c)[0] - inference._divergence(q, here)
        state[1] = after[1]
        at.append(bound(q, state))
        at.append(bound(q, after))
        np.testing.assert_allclose(own, at[-1], rtol=1e-9)
        assert (np.diff(at) >= -1e-10 * np.abs(at[1:])).all(), at


def test_labels_at_their_optimum_do_not_move():
    problem, _, dense = random_problem(4, following(20.0))
    mine = problem.chunks[0].likelihood
    s, Ef = (torch.from_numpy(np.random.default_rng(k).normal(size=len(dense.A))) for k in (1, 2))
    for _ in range(500):
        s = logistic.update_labels(s, Ef, mine.group, mine.columns, np.log(20.0))
    again = logistic.update_labels(s, Ef, mine.group, mine.columns, np.log(20.0))
    np.testing.assert_allclose(again, s, rtol=1e-10, atol=1e-12)


# --- Functions of one number ------------------------------------------------------------------


def test_curvature():
    xi = np.r_[0.0, np.logspace(-12, 3, 61), 1e-3 * (1 + np.r_[-1e-9, 0, 1e-9]), 1e3]
    xi = np.r_[xi, -xi[3:20]]
    found = logistic.curvature(torch.from_numpy(xi)).numpy()
    np.testing.assert_allclose(found, [oracles.curvature_mp(t) for t in xi], rtol=2e-14)


MEANS = np.array([-40.0, -23.3, -11.1, -4.7, -1.3, -0.2, 0.0, 0.4, 1.7, 6.3, 14.9, 40.0])


@pytest.mark.parametrize("std", [0.0, 0.3, 1.1, 1.49, 1.51, 2.0, 3.0, 4.6, 7.0, 12.0])
def test_log_expected_sigmoid(std):
    found = logistic.log_expected_sigmoid(MEANS, np.full(len(MEANS), std))
    exact = np.array([oracles.log_expected_sigmoid_mp(mean, std) for mean in MEANS])
    # near one the logarithm is small, and its own relative error is the wrong measure
    np.testing.assert_allclose(found, exact, rtol=0, atol=3e-13)


@pytest.mark.parametrize(("mean", "std"), [(-4.7, 1.1), (0.4, 2.6), (-23.3, 3.0), (6.3, 0.2)])
def test_the_two_oracles_of_the_expected_sigmoid_agree(mean, std):
    by_quad = np.log(oracles.expected_sigmoid(mean, std))
    np.testing.assert_allclose(
        by_quad, oracles.log_expected_sigmoid_mp(mean, std), rtol=1e-10, atol=1e-12
    )


@given(mean=st.floats(-40, 40), std=st.floats(0, 100))
def test_expected_sigmoid_and_its_mirror_add_to_one(mean, std):
    mean, std = np.array([mean]), np.array([std])
    both = np.logaddexp(
        logistic.log_expected_sigmoid(mean, std), logistic.log_expected_sigmoid(-mean, std)
    )
    assert abs(both[0]) < 1e-12


# --- Hard numbers -----------------------------------------------------------------------------


@pytest.mark.parametrize("expected_max", ["product", "largest"])
@pytest.mark.parametrize("bag", ["noisy_or", "max"])
def test_saturation(expected_max, bag, plain):
    with warnings.catch_warnings(), np.errstate(all="warn", under="ignore"):
        warnings.simplefilter("error")
        model = small(variance=1e4, H=1e12, mean=3.0, expected_max=expected_max, bag=bag)
        model.fit(plain)
        far = Bags(plain.features * 1e6, plain.offsets)
        for bags in (plain, far):
            patches, proba = model.predict_instances(bags), model.predict_proba(bags)
            log_odds, (log_p, _) = model.decision_function(bags), model.log_proba_negative(bags)
            for values in (patches.mean, patches.std, log_odds, log_p):
                assert np.isfinite(values).all()
            assert ((proba > 0) & (proba < 1)).all()
            # of one instance as of VGPMIL-PR: 1 - 1e-17 is 1
            assert ((patches.probability > 0) & (patches.probability <= 1)).all()
    for name in ("posterior_mean_", "posterior_covariance_", "elbo_trace_"):
        assert np.isfinite(getattr(model, name)).all()


def test_far_from_every_inducing_point_the_prior_remains(plain):
    model = small(mean=-1.1, variance=1.7).fit(plain)
    far = model.predict_instances(Bags(plain.features[:6] + 1e5, [0, 2, 6]))
    np.testing.assert_allclose(far.mean, -1.1, rtol=1e-12)
    np.testing.assert_allclose(far.std, np.sqrt(1.7), rtol=1e-12)
    np.testing.assert_allclose(far.probability, oracles.expected_sigmoid(-1.1, np.sqrt(1.7)))


def test_inducing_points_that_see_nothing_leave_the_prior(plain, tmp_path):
    model = small(inducing=plain.features[:5] + 1e5, tol=1e-4).fit(plain)
    assert not model.posterior_mean_.any()
    assert model.converged_ and model.residual_ == 0
    model.save(tmp_path / "model")
    again = gpmil.load(tmp_path / "model")
    assert np.array_equal(again.predict_proba(plain), model.predict_proba(plain))


def test_float32_storage_is_close():
    bags = small_cohort(3, n_bags=12)
    one, two = (
        small(dtype=dtype, lengthscale=LENGTH).fit(bags) for dtype in ("float64", "float32")
    )
    np.testing.assert_allclose(two.predict_proba(bags), one.predict_proba(bags), atol=1e-4)
    np.testing.assert_allclose(two.elbo_trace_, one.elbo_trace_, rtol=1e-4)
    assert not np.array_equal(two.posterior_mean_, one.posterior_mean_)
    scale = np.abs(one.posterior_mean_).max()
    np.testing.assert_allclose(two.posterior_mean_, one.posterior_mean_, atol=1e-4 * scale)


@pytest.mark.parametrize("case", WHEREVER, ids=str)
def test_where_W_lies_does_not_matter(case, monkeypatch):
    bags = small_cohort(5, n_bags=10)
    chosen = {"lengthscale": LENGTH} | case
    one = small(**chosen).fit(bags)
    monkeypatch.setattr(stores, "CHUNK_ROWS", 20)
    monkeypatch.setattr(logistic, "ROWS", 7)
    passes = []
    for store in ("memory", "disk", "recompute"):
        turn = counted(monkeypatch, passes)
        two = small(**chosen, store=store).fit(bags)
        monkeypatch.setattr(pieces.Chunk, "turn", turn)
        assert_same(two, one, bags)
    # the start, and one pass for each of the 30 iterations
    n_pieces = len({p for p, _ in passes})
    assert n_pieces > 2 and len(passes) == 3 * 31 * n_pieces


def counted(monkeypatch, passes):
    """Keep what passes are made over which rows; the method that was there."""
    plain = pieces.Chunk.turn

    def turn(chunk, state, at, c):
        passes.append((chunk.group.rows.start, at))
        return plain(chunk, state, at, c)

    monkeypatch.setattr(pieces.Chunk, "turn", turn)
    return plain


def assert_same(two, one, bags):
    scale = np.abs(one.posterior_mean_).max()
    np.testing.assert_allclose(two.posterior_mean_, one.posterior_mean_, atol=1e-10 * scale)
    np.testing.assert_allclose(two.elbo_trace_, one.elbo_trace_, rtol=1e-10)
    np.testing.assert_allclose(two.predict_proba(bags), one.predict_proba(bags), rtol=1e-10)


# --- Limits -----------------------------------------------------------------------------------


def test_one_instance_a_bag_is_gaussian_process_classification():
    rng = np.random.default_rng(4)
    x, c = rng.normal(size=(14, 3)) * 2, 0.35
    y = (x[:, 0] + 0.5 * rng.normal(size=14) > 0).astype(int)
    bags = Bags(x, np.arange(15), y)
    model = VGPMIL(
        variance=2.1,
        lengthscale=LENGTH,
        mean=c,
        H=1e12,
        inducing=x,
        standardize=False,
        max_iter=150,
        random_state=0,
    ).fit(bags)
    K = kernel(x, x, "rbf", 2.1, LENGTH)
    m, S = oracles.logistic_gp(K, y, c, np.ones(14), 150)
    # Kzz has its jitter, 1e-6 of the variance
    np.testing.assert_allclose(model.posterior_mean_, m, atol=2e-5)
    np.testing.assert_allclose(model.posterior_covariance_, S, atol=2e-5)
    found = model.predict_instances(bags)
    np.testing.assert_allclose(found.mean, c + m, atol=2e-5)
    np.testing.assert_allclose(found.std, np.sqrt(np.diag(S)), atol=2e-5)
    assert np.array_equal(model.predict(bags), (found.mean > 0).astype(int))


def test_inducing_points_at_the_instances_give_the_full_process():
    bags = small_cohort(9, n_bags=7, sizes=(1, 5))
    x, c, H = np.concatenate(standardised(bags)), -0.45, 60.0
    model = VGPMIL(
        variance=1.6,
        lengthscale=0.9,
        mean=c,
        H=H,
        inducing=bags.features,
        max_iter=20,
        random_state=2,
    ).fit(bags)
    rows = [range(a, b) for a, b in pairwise(bags.offsets)]
    K = kernel(x, x, "rbf", 1.6, 0.9)
    _, m, S = oracles.full_gp(K, rows, bags.labels, c, *start(len(x), 2), H, 20)
    np.testing.assert_allclose(model.posterior_mean_, m, atol=3e-5)
    np.testing.assert_allclose(model.posterior_covariance_, S, atol=3e-5)
    np.testing.assert_allclose(model.predict_instances(bags).mean, c + m, atol=3e-5)


def test_bags_of_one_instance_have_one_rule():
    bags = small_cohort(2, n_bags=10, sizes=(1, 1))
    models = [
        small(bag=bag, expected_max=rule).fit(bags)
        for bag, rule in (("noisy_or", "product"), ("max", "largest"))
    ]
    for model in models:
        np.testing.assert_allclose(
            model.predict_proba(bags)[:, 1], model.predict_instances(bags).probability, rtol=1e-12
        )
    np.testing.assert_allclose(models[0].posterior_mean_, models[1].posterior_mean_, rtol=1e-12)


@pytest.mark.parametrize("seed", range(4))
def test_noisy_or_is_never_below_the_largest(seed):
    bags = small_cohort(seed)
    model = small(random_state=seed, mean=-0.6).fit(bags)
    either = model.predict_proba(bags)[:, 1]
    largest = model.set_params(bag="max").predict_proba(bags)[:, 1]
    assert (either >= largest).all() and (either > largest).any()
    each = model.predict_instances(bags).split()
    np.testing.assert_allclose(largest, [p.probability.max() for p in each], rtol=1e-12)
    np.testing.assert_allclose(either, [1 - np.prod(1 - p.probability) for p in each], rtol=1e-12)


def test_labels_that_say_nothing_teach_nothing():
    # H = 1 gives both labels the same probability, whatever the instances
    bags = small_cohort(1)
    z = some_inducing(bags, 8)
    plus, minus = (
        small(H=1 + 1e-12, inducing=z).fit(bags, y) for y in (bags.labels, 1 - bags.labels)
    )
    np.testing.assert_allclose(plus.posterior_mean_, minus.posterior_mean_, rtol=1e-8, atol=1e-10)


# --- Order and seeds --------------------------------------------------------------------------


def shuffled(dense, rng):
    """Another order of the instances inside every bag."""
    return np.concatenate([rng.permutation(list(bag)) for bag in dense.rows])


def permuted_problem(problem, order):
    chunk = problem.chunks[0]
    group = replace(chunk.group, residual=chunk.group.residual[order])
    return replace(problem, chunks=[pieces.Chunk(chunk.H[order], chunk.likelihood.rule(group))])


def test_order_inside_a_bag_does_not_matter_to_parallel_updates():
    problem, _, dense = random_problem(6, following(30.0, "largest"))
    pi, xi = start(len(dense.A), 1)
    order = shuffled(dense, np.random.default_rng(5))
    one = inference.sweeps(problem, pi, xi, 9, 0.0)
    two = inference.sweeps(permuted_problem(problem, order), pi[order], xi[order], 9, 0.0)
    np.testing.assert_allclose(two.s, one.s[order], rtol=1e-10)
    np.testing.assert_allclose(two.q.w, one.q.w, rtol=1e-10)
    np.testing.assert_allclose(two.trace, one.trace, rtol=1e-10)


def test_order_inside_a_bag_does_not_matter_where_the_bound_is_largest():
    # updates one after the other pass other points on the way to the same place
    problem, _, dense = random_problem(6, following(30.0))
    pi, xi = start(len(dense.A), 1)
    order = shuffled(dense, np.random.default_rng(5))
    one = inference.sweeps(problem, pi, xi, 4000, 1e-13)
    two = inference.sweeps(permuted_problem(problem, order), pi[order], xi[order], 4000, 1e-13)
    assert one.converged and two.converged
    np.testing.assert_allclose(two.q.w, one.q.w, rtol=1e-6)
    np.testing.assert_allclose(two.trace[-1], one.trace[-1], rtol=1e-10)


@pytest.mark.parametrize("expected_max", ["product", "largest"])
def test_order_of_the_bags_does_not_matter(expected_max):
    bags = small_cohort(6, n_bags=8, sizes=(1, 6))
    order = np.random.default_rng(0).permutation(8)
    rows = np.concatenate([np.arange(*bags.offsets[[b, b + 1]]) for b in order])
    x, z = bags.features, torch.from_numpy(some_inducing(bags, 5))
    gp = SparseGP.build(Kernel("rbf", 1.2, LENGTH), z)
    pi, xi = start(len(x), 4)
    found = []
    for cohort, own in ((bags, np.arange(len(x))), (bags[order], rows)):
        inputs = torch.tensor(cohort.features)
        problem = problem_of(cohort, gp, inputs, 0.2, following(50.0, expected_max))
        found.append(inference.sweeps(problem, pi[own], xi[own], 8, 0.0))
    np.testing.assert_allclose(found[1].s, found[0].s[rows], rtol=1e-9)
    np.testing.assert_allclose(found[1].trace, found[0].trace, rtol=1e-10)


@pytest.mark.parametrize("expected_max", ["product", "largest"])
def test_same_seed_same_numbers(expected_max, plain):
    state = torch.random.get_rng_state()
    one, two, other = (
        small(random_state=seed, expected_max=expected_max).fit(plain) for seed in (5, 5, 6)
    )
    assert one.posterior_mean_.tobytes() == two.posterior_mean_.tobytes()
    assert one.elbo_trace_.tobytes() == two.elbo_trace_.tobytes()
    assert one.posterior_mean_.tobytes() != other.posterior_mean_.tobytes()
    assert torch.equal(torch.random.get_rng_state(), state)


def test_a_generator_moves_on(plain):
    rng = np.random.default_rng(7)
    one, two = (small(random_state=rng).fit(plain).elbo_trace_ for _ in range(2))
    assert not np.array_equal(one, two)
    again = small(random_state=np.random.default_rng(7)).fit(plain).elbo_trace_
    assert np.array_equal(one, again)


# --- Stopping ---------------------------------------------------------------------------------


def test_without_tolerance_every_iteration_is_made(plain):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model = small(max_iter=9).fit(plain)
    assert model.n_iter_ == len(model.elbo_trace_) == 9
    assert not model.converged_ and model.residual_ > 0


def test_tolerance_stops_early(plain):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model = small(max_iter=2000, tol=1e-3).fit(plain)
    assert model.n_iter_ == len(model.elbo_trace_) < 2000
    assert model.converged_ and model.residual_ <= 1e-3
    # the first of the iterations that move so little
    step = small(max_iter=model.n_iter_ - 1).fit(plain)
    assert step.residual_ > 1e-3


def test_tolerance_not_reached_is_said(plain):
    telling = "stopped after 4 iterations.*Raise max_iter"
    with pytest.warns(ConvergenceWarning, match=telling) as caught:
        model = small(max_iter=4, tol=1e-9).fit(plain)
    assert caught[0].filename == __file__
    assert not model.converged_ and model.n_iter_ == 4


def test_progress_is_shown(plain, caplog):
    with caplog.at_level(logging.INFO, logger="gpmil"):
        small(max_iter=3).fit(plain)
    said = [record.getMessage() for record in caplog.records]
    assert sum(line.startswith("iteration") for line in said) == 3


# --- The contract -----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def model(cohort):
    return small().fit(cohort)


def bits(model, bags):
    patches, (log_p, error) = model.predict_instances(bags), model.log_proba_negative(bags)
    arrays = patches.probability, patches.mean, patches.std, log_p, error, model.predict_proba(bags)
    return [a.tobytes() for a in arrays]


def test_learns(model, cohort):
    assert roc_auc_score(cohort.labels, model.decision_function(cohort)) > 0.9
    patches = model.predict_instances(cohort).probability
    assert roc_auc_score(cohort.instance_labels, patches) > 0.8


def test_get_params_round_trip():
    default = VGPMIL().get_params()
    assert set(default) == {
        *("kernel", "variance", "lengthscale", "mean", "H", "expected_max", "bag", "n_inducing"),
        *("inducing", "standardize", "n_components", "max_iter", "tol", "random_state", "device"),
        *("dtype", "store", "verbose", "slide_effect"),
    }
    marks = {name: object() for name in default}
    assert all(VGPMIL(**marks).get_params()[name] is mark for name, mark in marks.items())
    moved = VGPMIL().set_params(**marks)
    assert all(getattr(moved, name) is mark for name, mark in marks.items())


def test_clone(model, cohort):
    twin = clone(model)
    assert twin.get_params() == model.get_params()
    with pytest.raises(NotFittedError):
        twin.predict(cohort)
    assert bits(twin.fit(cohort), cohort) == bits(model, cohort)


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"H": 1e12, "bag": "max", "expected_max": "largest", "dtype": "float32"},
        {"n_components": 2, "kernel": "matern52", "max_iter": 1},
        {"lengthscale": [0.7, 2.0, 1.1, 3.0], "mean": -0.4, "tol": 0.1},
    ],
    ids=str,
)
def test_save_and_load(given, cohort, tmp_path):
    model = small(**given).fit(cohort)
    model.save(tmp_path / "model")
    again = gpmil.load(tmp_path / "model")
    assert type(again) is VGPMIL
    assert bits(again, cohort) == bits(model, cohort)
    assert again.get_params() == model.get_params()
    names = {*VGPMIL.ARRAYS, *VGPMIL.NUMBERS}
    assert all(np.array_equal(getattr(again, name), getattr(model, name)) for name in names)
    again.save(tmp_path / "again")
    assert bits(gpmil.load(tmp_path / "again"), cohort) == bits(model, cohort)


def test_save_and_load_given_inducing_points(cohort, tmp_path):
    model = small(inducing=cohort.features[:7]).fit(cohort)
    model.save(tmp_path / "model")
    again = gpmil.load(tmp_path / "model")
    assert np.array_equal(again.inducing, cohort.features[:7])
    assert bits(again, cohort) == bits(model, cohort)


def test_pickle(model, cohort):
    assert bits(pickle.loads(pickle.dumps(model)), cohort) == bits(model, cohort)


def test_kernel_object(cohort, tmp_path):
    kernel = gpytorch.kernels.RBFKernel()
    kernel.lengthscale = 1.7
    before = copy.deepcopy(kernel.state_dict())
    model = small(kernel=kernel).fit(cohort)
    assert all(torch.equal(v, before[k]) for k, v in kernel.state_dict().items())
    # the object's length is a float32
    named = small(lengthscale=float(kernel.lengthscale)).fit(cohort)
    assert (model.variance_, model.lengthscale_) == (None, None)
    np.testing.assert_allclose(model.predict_proba(cohort), named.predict_proba(cohort), atol=1e-5)
    model.save(tmp_path / "model")
    again = gpmil.load(tmp_path / "model", kernel=gpytorch.kernels.RBFKernel())
    assert bits(again, cohort) == bits(model, cohort)
    with pytest.raises(ValueError, match="RBFKernel"):
        gpmil.load(tmp_path / "model")


def test_cross_val_predict(cohort):
    folds = StratifiedKFold(3, shuffle=True, random_state=4)
    found = cross_val_predict(small(), cohort, cohort.labels, cv=folds, method="predict_proba")
    assert found.shape == (22, 2)
    train, test = next(folds.split(np.zeros(len(cohort)), cohort.labels))
    assert np.array_equal(found[test], small().fit(cohort[train]).predict_proba(cohort[test]))


def test_paper_settings(plain):
    found = gpmil.paper_settings("VGPMIL")
    assert found == {
        "variance": 1.0,
        "lengthscale": "sqrt_dim",
        "mean": 0.0,
        "slide_effect": 0.0,
        "n_inducing": 200,
        "max_iter": 200,
        "H": 100.0,
        "expected_max": "largest",
    }
    model = VGPMIL(**(found | {"n_inducing": 10}), random_state=0).fit(plain)
    assert 1 < model.n_iter_ <= 200 and model.lengthscale_ == 2.0


@pytest.mark.parametrize("chosen", [[], [3], [5, 5]])
def test_any_number_of_bags(chosen, model, cohort):
    few = cohort[chosen]
    proba, (log_p, _) = model.predict_proba(few), model.log_proba_negative(few)
    assert proba.shape == (len(chosen), 2) and log_p.shape == (len(chosen),)
    assert len(model.predict_instances(few)) == few.n_instances
    assert len(model.predict(few)) == len(model.predict_all(few).proba) == len(chosen)
    np.testing.assert_allclose(proba, model.predict_proba(cohort)[chosen], rtol=1e-12)


def test_bags_predicted_together_or_alone(model, cohort):
    together = model.predict_all(cohort)
    alone = np.concatenate([model.log_proba_negative(bag)[0] for bag in cohort])
    np.testing.assert_allclose(together.log_proba_negative, alone, rtol=1e-11)


def test_rows_predicted_in_pieces(model, cohort, monkeypatch):
    whole = model.predict_all(cohort)
    monkeypatch.setattr("gpmil.models.vgpmil.ROWS", 7)
    pieces = model.predict_all(cohort)
    np.testing.assert_allclose(pieces.instances.std, whole.instances.std, rtol=1e-11)
    np.testing.assert_allclose(pieces.log_proba_negative, whole.log_proba_negative, rtol=1e-11)


BAD = [
    ({"H": 1}, "H must be a finite number > 1, got 1"),
    ({"H": 0.5}, "H must be a finite number > 1, got 0.5"),
    ({"H": "a"}, "H must be a finite number > 1, got 'a'"),
    ({"H": np.inf}, "H must be a finite number > 1, got inf"),
    ({"bag": "mean"}, r"bag must be one of \['noisy_or', 'max'\], got 'mean'"),
    ({"bag": None}, "bag must be one of"),
    ({"expected_max": "x"}, r"expected_max must be one of \['product', 'largest'\], got 'x'"),
    (
        {"lengthscale": "auto"},
        r"lengthscale must be a finite number > 0 or one of \['sqrt_dim'\], got 'auto'",
    ),
    ({"lengthscale": 0.0}, "lengthscale must be a finite number > 0"),
    ({"lengthscale": [1.0, 2.0]}, "lengthscale must be a number, a word, or 4 positive numbers"),
    ({"variance": 0}, "variance must be a finite number > 0, got 0"),
    ({"variance": "auto"}, "variance must be a finite number > 0, got 'auto'"),
    ({"mean": np.nan}, "mean must be a finite number, got nan"),
    ({"mean": "auto"}, "mean must be a finite number, got 'auto'"),
    ({"tol": -1e-3}, "tol must be a finite number >= 0"),
    ({"max_iter": 0}, "max_iter must be a whole number >= 1, got 0"),
    ({"max_iter": 2.5}, "max_iter must be a whole number >= 1, got 2.5"),
    ({"n_inducing": 1}, "n_inducing must be a whole number >= 2, got 1"),
    ({"inducing": "grid"}, r"inducing must be one of \['kmeans'\], got 'grid'"),
    ({"inducing": np.zeros((3, 2))}, r"inducing must be an \(M, 4\) array"),
    ({"n_components": 0}, "n_components must be a whole number >= 1"),
    ({"n_components": 9}, "n_components must be between 1 and 4"),
    ({"standardize": "yes"}, "standardize must be True or False, got 'yes'"),
    ({"verbose": 2}, "verbose must be True or False, got 2"),
    ({"dtype": "float16"}, r"dtype must be one of \['float64', 'float32'\], got 'float16'"),
    ({"kernel": "cubic"}, "kernel must be one of .*'rbf'.* got 'cubic'"),
    ({"kernel": "auto"}, "kernel must be one of (?!.*'auto' or).*got 'auto'"),
    ({"kernel": 17}, "kernel must be a name or a gpytorch kernel, got int"),
    ({"random_state": -1}, "random_state must be a whole number >= 0"),
    ({"device": "tpu"}, "device must be 'cpu', 'cuda' or None, got 'tpu'"),
]


@pytest.mark.parametrize(("given", "message"), BAD, ids=[str(given) for given, _ in BAD])
def test_bad_settings_are_refused_and_the_model_stays(
    given, message, model, cohort, as_users_run_it
):
    model = copy.copy(model)
    fitted = {k: v for k, v in vars(model).items() if k.endswith("_")}
    model.set_params(**given)
    with pytest.raises(ValueError, match=message):
        model.fit(cohort)
    after = {k: v for k, v in vars(model).items() if k.endswith("_")}
    assert after.keys() == fitted.keys()
    assert all(after[k] is v for k, v in fitted.items())


@pytest.mark.parametrize(
    ("bags", "message"),
    [
        (lambda cohort: cohort[cohort.labels == 1], "needs bags of both classes"),
        (lambda cohort: cohort[[]], "no bags to fit"),
        (lambda cohort: cohort.features, "expected gpmil.Bags, got ndarray"),
        (lambda cohort: Bags(cohort.features, cohort.offsets), "have no label"),
    ],
)
def test_failing_fit_leaves_the_model_as_it_was(bags, message, cohort):
    model = small().fit(cohort)
    before, predicted = pickle.dumps(model), bits(model, cohort)
    with pytest.raises(ValueError, match=message):
        model.fit(bags(cohort))
    assert pickle.dumps(model) == before
    assert bits(model, cohort) == predicted


def test_other_features_are_refused(model, cohort):
    narrow = Bags(cohort.features[:, :3], cohort.offsets)
    with pytest.raises(ValueError, match="fitted on 4 features per instance, these bags have 3"):
        model.predict_proba(narrow)
    other = Bags(cohort.features, cohort.offsets, metadata={"encoder": "toy-v2"})
    with pytest.raises(ValueError, match="encoder 'toy-v1', these bags come from 'toy-v2'"):
        model.predict_instances(other)


@pytest.mark.parametrize("method", ["predict", "predict_instances", "predict_all", "save"])
def test_unfitted_model_says_so(method, cohort, tmp_path):
    given = tmp_path / "model" if method == "save" else cohort
    with pytest.raises(NotFittedError):
        getattr(small(), method)(given)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_device_that_is_not_there(cohort):
    assert resolve_device(None).type == "cpu"
    with pytest.raises(ValueError, match="torch sees no GPU here"):
        small(device="cuda").fit(cohort)
