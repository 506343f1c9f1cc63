"""The compiled pass over the bags: the sums of the plain pass, also at the ends of its range."""

import math
import sys

import numpy as np
import pytest
import scipy.sparse as sp
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles.model import Oracle, relative_error
from scipy.special import erfcx
from synthetic import dense_graphs, pri, small_cohort, some_inducing, standardised

import gpmil.fast
from gpmil import extras
from gpmil.coupling import operator as coupling
from gpmil.fast import compiled
from gpmil.inference import pieces, stores
from gpmil.moments.independent import IndependentPatches
from gpmil.moments.likelihood import Group

pytest.importorskip("numba", reason="pip install 'gpmil[fast]'")
tails = pytest.importorskip("gpmil.fast.tails")

CPU = torch.device("cpu")


def chunk_of(sizes, M, strength, dtype, seed, spread=1.0, positive=None):
    """Random bags, each a chain with unequal weights; `spread` is the size of H w."""
    rng = np.random.default_rng(seed)
    offsets = np.concatenate([[0], np.cumsum(sizes)])
    n = offsets[-1]
    weights = rng.uniform(0.3, 1.7, n - 1)
    weights[offsets[1:-1] - 1] = 0.0
    adjacency = sp.csr_array(sp.diags_array([weights, weights], offsets=[1, -1], shape=(n, n)))
    adjacency.eliminate_zeros()
    edges = coupling.Edges.of(adjacency, CPU)
    rows = slice(0, int(n))
    H = torch.from_numpy(spread / math.sqrt(M) * rng.standard_normal((n, M))).to(dtype)
    group = Group(
        torch.from_numpy(rng.uniform(0.4, 1.1, n)),
        torch.from_numpy(offsets),
        torch.from_numpy(rng.random(len(sizes)) < 0.6 if positive is None else positive),
        coupling.Precision.of(edges, rows, strength) if strength else None,
        rows,
    )
    return pieces.Chunk(H, IndependentPatches(group))


def both(chunk, term, w, c, monkeypatch):
    """The plain and the compiled sums; None where the compiled pass does not apply."""
    with monkeypatch.context() as patch:
        patch.setattr(compiled, "WORTH", math.inf)
        plain = getattr(chunk, term)(w, c)
    with monkeypatch.context() as patch:
        patch.setattr(compiled, "WORTH", 0)
        return plain, getattr(chunk.loop, term)(w, c)


def outside(chunk, w, c):
    """Whether some bag is beyond the ends of the compiled pass."""
    t = (c + chunk.H.double() @ w) / chunk.group.sigma
    largest = torch.segment_reduce(t, "max", offsets=chunk.group.offsets)
    return bool(((largest > 50) | ((largest < -29) & chunk.group.positive)).any())


@pytest.fixture(scope="module")
def patching():
    with pytest.MonkeyPatch.context() as patch:
        yield patch


# --- Functions ------------------------------------------------------------------------------------
def test_erfcx_and_exp_keep_their_digits():
    z = np.concatenate([np.linspace(0, 8, 4001), np.linspace(8, tails.LARGEST, 700)])
    found = np.array([tails._erfcx(x) for x in z])
    # 4e-15 is that of P / Q; nine roundings each, fused or not, and scipy's come on top
    assert np.abs(found / erfcx(z) - 1).max() < 4e-14
    x = np.concatenate([[-0.0], -np.geomspace(1e-9, 700, 4001)])
    found = np.array([tails.exp(value) for value in x])
    assert np.abs(found / np.exp(x) - 1).max() < 2e-15


# --- The same sums --------------------------------------------------------------------------------
@settings(max_examples=60, deadline=None)
@given(
    sizes=st.lists(st.integers(1, 150), min_size=1, max_size=9),
    M=st.integers(1, 23),
    strength=st.sampled_from([0.0, 0.37, 8.3]),
    spread=st.sampled_from([0.2, 1.3, 6.1]),
    c=st.sampled_from([0.0, -1.7, 0.6]),
    seed=st.integers(0, 10**6),
    dtype=st.sampled_from([torch.float64, torch.float32]),
)
def test_the_same_sums_as_the_plain_pass(patching, sizes, M, strength, spread, c, seed, dtype):
    chunk = chunk_of(sizes, M, strength, dtype, seed, spread)
    w = torch.from_numpy(np.random.default_rng(seed + 1).standard_normal(M))
    for term in ("pull", "rise"):
        (log_z, sums), found = both(chunk, term, w, c, patching)
        if found is None:
            assert outside(chunk, w, c)
            continue
        # a gradient is multiplied in float64 whatever H is stored in
        exact = dtype == torch.float64 or term == "rise"
        tolerance = 1e-11 if exact else 3e-5
        assert found[0] == pytest.approx(float(log_z), rel=tolerance, abs=tolerance)
        # sums may cancel: what counts is their size against that of their terms
        terms = chunk.H.double().abs().mT @ torch.ones(len(chunk.group.sigma), dtype=torch.float64)
        bound = tolerance * (1 + terms.max()) * (1 + abs(c) + spread) * (1 + strength)
        assert float((found[1] - sums).abs().max()) < bound


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_four_gradients_with_one_look(dtype, monkeypatch):
    chunk = chunk_of([1, 5, 40, 7], 30, 0.7, dtype, seed=3)
    w = torch.from_numpy(np.random.default_rng(4).normal(size=(4, 30)))
    plain = sum(chunk.rise(one, -0.3)[1] for one in w)  # too small to be compiled
    monkeypatch.setattr(compiled, "WORTH", 0)
    for found in (chunk.loop.four_slopes(w, -0.3), *chunk.four_slopes(w, -0.3)):
        torch.testing.assert_close(found, plain, rtol=1e-11, atol=1e-11)
    assert chunk.loop.four_slopes(1e6 * w, 0.0) is None
    (far,) = chunk.four_slopes(1e6 * w, 0.0)  # beyond the range of the loop
    torch.testing.assert_close(far, sum(chunk.rise(1e6 * one, 0.0)[1] for one in w))


@pytest.mark.parametrize("strength", [0.0, 0.9])
def test_no_sum_depends_on_the_bags_beside_it(strength, monkeypatch):
    monkeypatch.setattr(compiled, "WORTH", 0)
    sizes = [3, 130, 1, 17]
    chunk = chunk_of(sizes, 7, strength, torch.float64, 5)
    w = torch.linspace(-1, 2, 7, dtype=torch.float64)
    whole = chunk.pull(w, -0.4)
    offsets = chunk.group.offsets
    parts = []
    for b in range(len(sizes)):
        rows = slice(int(offsets[b]), int(offsets[b + 1]))
        block = None
        if strength:
            dense = chunk.group.precision.neighbours.to_dense()[rows, rows].to_sparse_csr()
            block = coupling.Precision(chunk.group.precision.diagonal[rows].contiguous(), dense)
        group = Group(
            chunk.group.sigma[rows].contiguous(), torch.tensor([0, sizes[b]]),
            chunk.group.positive[b : b + 1], block, rows,
        )  # fmt: skip
        one = pieces.Chunk(chunk.H[rows].contiguous(), IndependentPatches(group))
        parts.append(one.pull(w, -0.4))
    assert whole[0] == pytest.approx(sum(part[0] for part in parts), rel=1e-14)
    assert relative_error(sum(part[1] for part in parts), whole[1]) < 1e-13


# --- The ends of its range ------------------------------------------------------------------------
@pytest.mark.parametrize("term", ["pull", "rise"])
@pytest.mark.parametrize("label", [False, True])
@pytest.mark.parametrize("t", [-36.0, -27.0, -11.0, -4.0, 0.0, 5.0, 12.0, 40.0, 49.0, 60.0, 1e4])
def test_far_from_zero(term, label, t, monkeypatch):
    chunk = chunk_of([1, 6], 3, 0.0, torch.float64, 2, positive=np.array([label, label]))
    chunk.H[:, 0] = t * chunk.group.sigma
    w = torch.tensor([1.0, 1e-3, -2e-3], dtype=torch.float64)
    (log_z, sums), found = both(chunk, term, w, 0.0, monkeypatch)
    inside = t <= 49 if not label else -29 < t <= 49
    assert (found is not None) == inside
    if inside:
        assert found[0] == pytest.approx(float(log_z), rel=1e-11)
        scale = float(sums.abs().max())
        assert float((found[1] - sums).abs().max()) <= 1e-9 * max(1, abs(t)) * scale


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_numbers_that_are_none_go_the_plain_way(bad, monkeypatch):
    chunk = chunk_of([4, 6], 3, 0.4, torch.float64, 2)
    w = torch.tensor([bad, 1.0, 0.5], dtype=torch.float64)
    for term in ("pull", "rise"):
        assert both(chunk, term, w, 0.0, monkeypatch)[1] is None


def test_little_work_goes_the_plain_way():
    chunk = chunk_of([4, 6], 3, 0.4, torch.float64, 2)
    w = torch.ones(3, dtype=torch.float64)
    assert chunk.loop.rise(w, 0.0) is None


def test_without_numba_the_plain_way(monkeypatch, caplog):
    monkeypatch.setattr(compiled, "WORTH", 0)
    compiled.kernels.cache_clear()
    try:
        monkeypatch.setitem(sys.modules, "gpmil.fast.passes", None)
        monkeypatch.delattr(gpmil.fast, "passes", raising=False)
        with caplog.at_level("INFO", logger="gpmil"):
            chunk = chunk_of([4, 6], 3, 0.4, torch.float64, 2)
            w = torch.ones(3, dtype=torch.float64)
            assert chunk.loop.pull(w, 0.0) is None
            assert torch.isfinite(chunk.pull(w, 0.0)[1]).all()
        assert caplog.text.count(extras.install("fast")) == 1
    finally:
        compiled.kernels.cache_clear()


# --- In a fit -------------------------------------------------------------------------------------
@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("solver", ["sweeps", "newton", "direct"])
def test_a_fit_does_not_notice(solver, dtype, monkeypatch):
    bags = small_cohort(seed=4, n_bags=14, sizes=(1, 30))
    monkeypatch.setattr(stores, "CHUNK_ROWS", 60)
    given = {
        "coupling": 1.3, "variance": 3.0, "lengthscale": 1.5, "mean": -0.6, "solver": solver,
        "dtype": dtype, "inducing": some_inducing(bags, 11), "random_state": 2,
    }  # fmt: skip
    plain = pri(**given).fit(bags)
    calls = []
    inner = compiled.Loop._one_pass

    def counted(*args, **named):
        calls.append(inner(*args, **named))
        return calls[-1]

    monkeypatch.setattr(compiled.Loop, "_one_pass", counted)
    monkeypatch.setattr(compiled, "WORTH", 0)
    fast = pri(**given).fit(bags)
    assert calls and all(found is not None for found in calls)
    tolerance = 1e-9 if dtype == "float64" else 1e-4
    assert relative_error(fast.posterior_mean_, plain.posterior_mean_) < tolerance
    assert fast.elbo_trace_[-1] == pytest.approx(plain.elbo_trace_[-1], rel=tolerance)


def test_lanes_do_not_change_the_sums(monkeypatch):
    bags = small_cohort(seed=4, n_bags=40, sizes=(1, 30))
    monkeypatch.setattr(stores, "CHUNK_ROWS", 40)
    monkeypatch.setattr(compiled, "WORTH", 0)
    given = {"coupling": 0.8, "inducing": some_inducing(bags, 9), "solver": "sweeps"}
    found = []
    before = torch.get_num_threads()
    try:
        for count in (1, 2):
            torch.set_num_threads(count)
            model = pri(**given, random_state=3).fit(bags)
            found.append(model.posterior_mean_)
    finally:
        torch.set_num_threads(before)
    assert np.array_equal(*found)


@pytest.mark.parametrize("strength", [0, 0.4, 7])
@pytest.mark.parametrize(("dtype", "tolerance"), [("float64", 1e-8), ("float32", 1e-4)])
def test_two_hundred_sweeps_equal_the_dense_oracle(strength, dtype, tolerance, monkeypatch):
    monkeypatch.setattr(compiled, "WORTH", 0)
    bags = small_cohort(seed=5, n_bags=16, sizes=(1, 20))
    Z = some_inducing(bags, 12)
    settings = gpmil.paper_settings() | {"coupling": strength, "dtype": dtype}
    model = pri(**settings, inducing=Z, random_state=11).fit(bags)
    x = bags.features.astype(float)
    z = (Z - x.mean(0)) / x.std(0)
    oracle = Oracle(
        standardised(bags), dense_graphs(bags), bags.labels, z, strength, 0.0, lengthscale=2.0
    )
    E = bags.split(np.random.default_rng(11).standard_normal(bags.n_instances))
    assert relative_error(model.posterior_mean_, oracle.sweeps(E, 200)) < tolerance


@pytest.mark.parametrize("strength", [0.0, 0.9])
@pytest.mark.parametrize(("dtype", "tolerance"), [("float64", 1e-10), ("float32", 1e-4)])
def test_all_sweeps_in_one_loop_are_the_sweeps(strength, dtype, tolerance, monkeypatch):
    bags = small_cohort(seed=6, n_bags=11, sizes=(1, 30))
    given = {
        "coupling": strength, "variance": 2.0, "mean": -0.3, "dtype": dtype, "solver": "sweeps",
        "max_iter": 37, "inducing": some_inducing(bags, 9), "random_state": 4,
    }  # fmt: skip
    plain = pri(**given).fit(bags)
    monkeypatch.setattr(compiled, "WORTH", 0)
    found, inner = [], compiled.Loop.sweeps
    monkeypatch.setattr(compiled.Loop, "sweeps", lambda *a: found.append(inner(*a)) or found[-1])
    fast = pri(**given).fit(bags)
    assert len(found) == 1 and found[0] is not None
    assert relative_error(fast.posterior_mean_, plain.posterior_mean_) < tolerance
    assert len(fast.elbo_trace_) == len(plain.elbo_trace_)
    assert np.allclose(fast.elbo_trace_, plain.elbo_trace_, rtol=min(tolerance, 1e-5))


def test_sweeps_beyond_the_range_go_the_plain_way(monkeypatch):
    monkeypatch.setattr(compiled, "WORTH", 0)
    chunk = chunk_of([4, 6], 3, 0.4, torch.float64, 2)
    w, L = torch.full((3,), 500.0).double(), torch.eye(3).double()
    assert chunk.loop.sweeps(L, w, 0.0, 5) is None
