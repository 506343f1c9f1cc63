"""Pieces of a cohort: the same sums wherever H lies and however many threads there are."""

import logging
import os

import numpy as np
import pytest
import torch
from oracles import relative_error
from synthetic import pri, small_cohort, some_inducing

from gpmil import coupling, inference, lanes, pieces

CPU = torch.device("cpu")
STRENGTH, C = 0.7, -0.3


@pytest.fixture(scope="module")
def bags():
    return small_cohort(seed=11, n_bags=18, sizes=(1, 25))


@pytest.fixture(autouse=True)
def several_chunks(monkeypatch):
    monkeypatch.setattr(pieces, "CHUNK_ROWS", 50)


def problem_of(bags, store="memory", dtype=torch.float64, coupled=False, strength=STRENGTH):
    model = pri(
        coupling=strength, variance=2.0, lengthscale=1.5, mean=C,
        inducing=some_inducing(bags, 10), solver="sweeps", max_iter=1,
    ).fit(bags)  # fmt: skip
    return inference.prepare(
        model._gp(CPU), lambda rows: model._inputs(bags.features[rows], CPU), bags.adjacency,
        bags.offsets, bags.labels == 1, strength, C, dtype, coupled, store,
    )  # fmt: skip


@pytest.mark.parametrize("store", ["disk", "recompute"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("coupled", [False, True])
def test_every_sum_is_the_same_wherever_H_lies(bags, store, dtype, coupled):
    here, there = (problem_of(bags, s, dtype, coupled) for s in ("memory", store))
    assert len(here.chunks) > 2 and torch.equal(here.R, there.R)
    tolerance = 1e-12 if dtype == torch.float64 else 1e-5
    w = inference.signed(here)
    assert relative_error(inference.signed(there), w) < tolerance
    for terms in (inference.pull, inference.fixed_point, inference.rise, inference.collapsed_bound):
        for a, b in zip(terms(here, w), terms(there, w)):
            assert relative_error(torch.as_tensor(b), torch.as_tensor(a)) < tolerance
    E = torch.from_numpy(np.random.default_rng(0).standard_normal(bags.n_instances))
    assert relative_error(inference.weights(there, E), inference.weights(here, E)) < tolerance
    gamma = [torch.cat([c.gamma(w, C) for c in p.chunks]) for p in (here, there)]
    assert relative_error(gamma[1], gamma[0]) < tolerance


@pytest.mark.parametrize("solver", ["direct", "newton", "sweeps"])
@pytest.mark.parametrize("store", ["disk", "recompute"])
def test_a_model_does_not_depend_on_where_H_lies(bags, solver, store):
    settings = {
        "coupling": 0.8, "inducing": some_inducing(bags, 9), "solver": solver, "random_state": 3,
        "max_iter": 40,
    }  # fmt: skip
    models = [pri(**settings, store=s).fit(bags) for s in ("memory", store)]
    means = [m.posterior_mean_ for m in models]
    assert relative_error(means[1], means[0]) < 1e-10


def test_rise_and_bound_agree(bags):
    problem = problem_of(bags)
    w = inference.signed(problem)
    value, gradient = inference.rise(problem, w)
    full = inference.collapsed_bound(problem, w)
    assert value == pytest.approx(full[0], rel=1e-13)
    assert relative_error(gradient, full[1]) < 1e-11


@pytest.mark.parametrize("coupled", [False, True])
def test_rise_is_the_gradient(bags, coupled):
    problem = problem_of(bags, coupled=coupled)
    w = 0.5 * inference.signed(problem)
    gradient = inference.rise(problem, w)[1]
    for j in (0, 4, 9):
        step = torch.zeros_like(w)
        step[j] = 1e-5
        up, down = (inference.rise(problem, w + s)[0] for s in (step, -step))
        assert float(gradient[j]) == pytest.approx((up - down) / 2e-5, rel=2e-5, abs=1e-6)


def test_memory_that_is_short_makes_H_be_computed_again(bags, monkeypatch, caplog):
    monkeypatch.setattr(pieces, "free_memory", lambda device: 1000.0)
    with caplog.at_level(logging.INFO, logger="gpmil"):
        problem = problem_of(bags, "auto")
    assert all(isinstance(piece, pieces.Recomputed) for piece in problem.chunks)
    assert "computed again in every pass" in caplog.text
    monkeypatch.setattr(pieces, "free_memory", lambda device: None)
    assert all(isinstance(piece, pieces.Chunk) for piece in problem_of(bags, "auto").chunks)


def test_free_memory_is_known_here():
    found = pieces.free_memory(CPU)
    assert found is None or found > 1e6


def test_a_full_disk_is_said_before_the_work(bags, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(ValueError, match=r"No space left on device\. Set TMPDIR"):
        problem_of(bags, "disk")


def test_bad_store(bags):
    with pytest.raises(ValueError, match="store must be one of"):
        pri(store="cloud").fit(bags)


def test_float32_is_taken_for_large_cohorts(bags, monkeypatch, caplog):
    from gpmil.models import vgpmil_pr

    Z = some_inducing(bags, 9)
    exact = pri(coupling=0.8, inducing=Z).fit(bags)
    monkeypatch.setattr(vgpmil_pr, "LARGE_H", 100.0)
    with caplog.at_level(logging.INFO, logger="gpmil"):
        rough = pri(coupling=0.8, inducing=Z).fit(bags)
    assert "H is stored in float32" in caplog.text
    error = relative_error(rough.posterior_mean_, exact.posterior_mean_)
    assert 0 < error < 1e-4


# --- The trace, from some of the columns ----------------------------------------------------------


@pytest.mark.parametrize("strength", [0.0, 0.7])
@pytest.mark.parametrize("limit", [4, 1000])
def test_the_trace_from_some_columns(strength, limit, monkeypatch):
    monkeypatch.setattr(coupling, "DENSE_LIMIT", limit)  # large bags banded, or all dense
    large = small_cohort(seed=3, n_bags=6, sizes=(60, 90))
    x = torch.from_numpy(large.features.astype(float))

    def rbf(a, b):
        return torch.exp(-torch.cdist(a, b).square() / 8)

    sums = []
    for every in (1, 7):
        parts = coupling.parts(large.adjacency, large.offsets, strength)
        sums.append(sum(float(p.trace(x[p.rows], rbf, every)) for p in parts))
    assert sums[1] == pytest.approx(sums[0], rel=0.05)
    assert strength == 0 or sums[1] != sums[0]


def test_when_columns_are_left_out(caplog):
    assert pieces.trace_columns(np.array([100, 200])) == 1
    with caplog.at_level(logging.INFO, logger="gpmil"):
        assert pieces.trace_columns(np.full(100, 2000)) == 20
    assert "estimated from one instance in 20" in caplog.text


# --- Lanes ----------------------------------------------------------------------------------------


def test_sums_do_not_depend_on_the_number_of_threads(bags, monkeypatch):
    monkeypatch.setattr(inference, "SIDE_BY_SIDE", 2)
    threads, found = torch.get_num_threads(), []
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            problem = problem_of(bags, dtype=torch.float32)
            found.append(inference.direct(problem, 50, 1e-10).w)
            assert torch.get_num_threads() == count
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])


def test_an_error_in_a_lane_is_raised_and_threads_restored():
    threads = torch.get_num_threads()

    def fail(lane):
        raise RuntimeError("in a lane")

    with pytest.raises(RuntimeError, match="in a lane"):
        lanes.in_lanes(range(9), fail, lambda a, b: a)
    assert torch.get_num_threads() == threads
