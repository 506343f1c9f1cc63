"""Pieces of a cohort: the same sums wherever H lies and however many threads there are."""

import contextlib
import logging
import os
import shutil
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier, Event

import numpy as np
import pytest
import torch
from oracles.model import relative_error
from synthetic import pri, small_cohort, some_inducing

from gpmil.coupling import operator as coupling
from gpmil.fast import compiled, lanes, memory
from gpmil.inference import laplace, pieces, stores
from gpmil.inference import solvers as inference
from gpmil.process.kernels import Kernel

CPU = torch.device("cpu")
STRENGTH, C = 0.7, -0.3


@pytest.fixture(scope="module")
def bags():
    return small_cohort(seed=11, n_bags=18, sizes=(1, 25))


@pytest.fixture(autouse=True)
def several_chunks(monkeypatch):
    monkeypatch.setattr(stores, "CHUNK_ROWS", 50)


def problem_of(
    bags, store="memory", dtype=torch.float64, coupled=False, strength=STRENGTH, points=10
):
    model = pri(
        coupling=strength, variance=2.0, lengthscale=1.5, mean=C,
        inducing=some_inducing(bags, points), solver="sweeps", max_iter=1,
    ).fit(bags)  # fmt: skip
    return inference.prepare(
        model._gp(CPU), lambda rows: model._inputs(bags.features[rows], CPU), bags.adjacency,
        bags.offsets, bags.labels == 1, strength, C, dtype,
        pieces.LIKELIHOODS["coupled" if coupled else "diagonal"], store,
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


@pytest.mark.parametrize("points", [5, 8, 13])  # too few for the loops, whole tiles, and parts
def test_H_is_smoothed_where_it_stays_as_it_is_in_steps(bags, points, monkeypatch):
    called, smoothed_into = [], stores.smoothed_into

    def counted(*given):
        found = smoothed_into(*given)
        called.append(found is not None)
        return found

    monkeypatch.setattr(stores, "smoothed_into", counted)
    at_once = problem_of(bags, points=points)
    assert any(called) == (points >= 8 and compiled.smoothed() is not None)
    monkeypatch.setattr(stores, "smoothed_into", lambda *_: None)
    in_steps = problem_of(bags, points=points)
    assert torch.equal(at_once.R, in_steps.R)
    for here, there in zip(at_once.chunks, in_steps.chunks, strict=True):
        assert torch.equal(here.H, there.H)


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


def test_what_is_computed_anew_is_asked_for_all_that_it_can_tell(bags, monkeypatch):
    """No pass for a gradient alone, and so fewer passes than with H in memory."""
    asked = {name: [] for name in ("memory", "recompute")}
    found = {}
    for store, calls in asked.items():
        problem = problem_of(bags, store)
        for name in ("rise", "bound"):
            plain = getattr(pieces.Chunk, name)

            def counted(chunk, w, c, name=name, plain=plain, calls=calls):
                calls.append(name)
                return plain(chunk, w, c)

            monkeypatch.setattr(pieces.Chunk, name, counted)
        found[store] = inference.direct(problem, 60, 1e-10)
        monkeypatch.undo()
        monkeypatch.setattr(stores, "CHUNK_ROWS", 50)
    assert relative_error(found["recompute"].w, found["memory"].w) < 1e-10
    assert set(asked["recompute"]) == {"bound"}
    assert len(asked["recompute"]) <= 14 * len(problem.chunks)
    assert asked["memory"].count("bound") < asked["memory"].count("rise")
    assert len(asked["recompute"]) < len(asked["memory"])


def test_intervals_compute_H_once_for_four_gradients(bags, monkeypatch):
    problem, anew = problem_of(bags), problem_of(bags, "recompute")
    found = inference.direct(problem, 60, 1e-10)
    expected = laplace.laplace(problem, found.w, found.curvature)
    made = []
    plain = stores.Recomputed.chunk
    monkeypatch.setattr(stores.Recomputed, "chunk", lambda p: made.append(p) or plain(p))
    wide = laplace.laplace(anew, found.w, found.curvature)
    assert len(made) == len(anew.chunks) * (1 + laplace.STEPS)  # the gradient at w, and averages
    assert relative_error(wide.w, expected.w) < 1e-10


@pytest.mark.parametrize("solver", ["direct", "newton"])
def test_a_fit_leaves_the_filters_of_warnings_alone(bags, solver, monkeypatch):
    """They belong to the process: two threads that change them side by side spoil them."""

    def touched(*_, **__):
        raise AssertionError("the filters of the process are changed")

    monkeypatch.setattr(inference, "FEWEST", 1)  # begin with a sample
    monkeypatch.setattr("warnings.catch_warnings", touched)
    pri(coupling=0.7, inducing=some_inducing(bags, 9), solver=solver).fit(bags)


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
    monkeypatch.setattr(stores, "free_memory", lambda device: 1000.0)
    with caplog.at_level(logging.INFO, logger="gpmil"):
        problem = problem_of(bags, "auto")
    assert all(isinstance(piece, stores.Recomputed) for piece in problem.chunks)
    assert "computed again in every pass" in caplog.text
    monkeypatch.setattr(stores, "free_memory", lambda device: None)
    assert all(isinstance(piece, pieces.Chunk) for piece in problem_of(bags, "auto").chunks)


def test_free_memory_is_known_here():
    found = stores.free_memory(CPU)
    assert found is None or found > 1e6


GB = 2**30


def control_group(folder, limit, used, cache, names=memory.V2):
    folder.mkdir(parents=True, exist_ok=True)
    for name, value in zip(names, (limit, used)):
        (folder / name).write_text(f"{value}\n")
    (folder / "memory.stat").write_text(f"anon 17\n{names[2]} {cache}\nfile 3\n")


@pytest.mark.parametrize("version", [1, 2])
def test_the_limit_of_a_container_counts(tmp_path, monkeypatch, version):
    names = memory.V2 if version == 2 else memory.V1
    root = tmp_path / "cgroup" if version == 2 else tmp_path / "cgroup" / "memory"
    without = "max" if version == 2 else 2**63 - 4096
    control_group(root / "pod", 4 * GB, 3 * GB, GB // 2, names)  # 1.5 GB left
    control_group(root / "pod" / "box", without, 2 * GB, 0, names)
    own = tmp_path / "own"
    line = "0::/pod/box" if version == 2 else "4:cpuset:/other\n3:cpu,memory:/pod/box"
    own.write_text(f"{line}\n")
    monkeypatch.setattr(memory, "CGROUPS", tmp_path / "cgroup")
    monkeypatch.setattr(memory, "OWN_CGROUP", own)
    monkeypatch.setattr("psutil.virtual_memory", lambda: Available(64 * GB))
    assert memory.free_memory(CPU) == 1.5 * GB
    control_group(root / "pod" / "box", 3 * GB, 4 * GB, 0, names)  # over its limit already
    assert memory.free_memory(CPU) == 0
    # a path of the host, as some containers show: the limit is in the root
    own.write_text(f"{line}/gone/away\n".replace("/pod/box", "/docker"))
    control_group(root, 8 * GB, 2 * GB, 0, names)
    assert memory.free_memory(CPU) == 6 * GB
    monkeypatch.setattr("psutil.virtual_memory", lambda: Available(5 * GB))
    assert memory.free_memory(CPU) == 5 * GB


def test_memory_without_control_groups(tmp_path, monkeypatch):
    monkeypatch.setattr("psutil.virtual_memory", lambda: Available(5 * GB))
    monkeypatch.setattr(memory, "OWN_CGROUP", tmp_path / "none")
    assert memory.free_memory(CPU) == 5 * GB


class Available:
    def __init__(self, available):
        self.available = available


def test_auto_minds_the_container(bags, tmp_path, monkeypatch):
    (tmp_path / "own").write_text("0::/\n")
    control_group(tmp_path, 4096, 96, 0)
    monkeypatch.setattr(memory, "CGROUPS", tmp_path)
    monkeypatch.setattr(memory, "OWN_CGROUP", tmp_path / "own")
    assert all(isinstance(p, stores.Recomputed) for p in problem_of(bags, "auto").chunks)


# What the systems lack: macOS, Windows.
LACKING = [("posix_fallocate",), ("posix_fallocate", "preadv", "pwrite")]


@pytest.mark.parametrize("lacking", LACKING)
def test_H_on_disk_without_the_calls_of_linux(bags, monkeypatch, lacking):
    monkeypatch.setattr(inference, "SIDE_BY_SIDE", 2)
    expected = problem_of(bags, "disk")
    for name in lacking:
        monkeypatch.delattr(os, name)
    found, w = problem_of(bags, "disk"), inference.signed(expected)
    assert len(found.chunks) > 2 and torch.equal(found.R, expected.R)
    with several_threads(4):
        for _ in range(20):  # lanes that read side by side share one position in the file
            for a, b in zip(inference.pull(found, w), inference.pull(expected, w)):
                assert torch.equal(torch.as_tensor(a), torch.as_tensor(b))


def test_a_full_disk_is_said_without_posix_fallocate_too(bags, monkeypatch):
    monkeypatch.delattr(os, "posix_fallocate")
    full = shutil.disk_usage("/")._replace(free=10)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: full)
    with pytest.raises(ValueError, match=r"No space left on device\. Set TMPDIR"):
        problem_of(bags, "disk")


def test_a_disk_that_fills_on_the_way_is_said(bags, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(ValueError, match=r"No space left on device\. Set TMPDIR"):
        problem_of(bags, "disk")


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
    from gpmil.models import learning

    Z = some_inducing(bags, 9)
    exact = pri(coupling=0.8, inducing=Z).fit(bags)
    monkeypatch.setattr(learning, "LARGE_H", 100.0)
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
    rbf, sums = Kernel("rbf", 1.0, 2.0), []
    for every in (1, 7):
        parts = coupling.parts(large.adjacency, large.offsets, strength)
        sums.append(sum(float(p.trace(x[p.rows], rbf, every)) for p in parts))
    assert sums[1] == pytest.approx(sums[0], rel=0.05)
    assert strength == 0 or sums[1] != sums[0]


def test_when_columns_are_left_out(caplog):
    assert stores.trace_columns(np.array([100, 200])) == 1
    with caplog.at_level(logging.INFO, logger="gpmil"):
        assert stores.trace_columns(np.full(1000, 600)) == 18
        assert stores.trace_columns(np.full(100, 2000)) == 100  # a pair costs five times as much
    assert "estimated from one instance in 100" in caplog.text


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


@contextlib.contextmanager
def several_threads(count):
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def as_a_new_thread_sees_it():
    with ThreadPoolExecutor(1) as new:
        return new.submit(torch.get_num_threads).result()


@pytest.mark.parametrize("first_out", [0, 1])
def test_overlapping_lanes_leave_the_number_of_threads_alone(first_out):
    fits = [ThreadPoolExecutor(1), ThreadPoolExecutor(1)]
    inside, leave = [Barrier(3), Barrier(3)], [Event(), Event()]
    seen = []

    def fit(k):
        def work(lane):
            seen.append(torch.get_num_threads())
            if 0 in lane or 1 in lane:  # the lanes that run at once
                inside[k].wait(60)
                leave[k].wait(60)
            return sum(lane)

        torch.eye(2)  # the second fit meets torch while the first is in its lanes
        return lanes.in_lanes(range(8), work, lambda a, b: a + b)

    with several_threads(2):
        running = []
        for k in (0, 1):
            running.append(fits[k].submit(fit, k))
            inside[k].wait(60)
        for k in (first_out, 1 - first_out):
            leave[k].set()
            assert running[k].result(60) == 28
        assert set(seen) == {1}
        assert torch.get_num_threads() == as_a_new_thread_sees_it() == 2
        assert [fit.submit(torch.get_num_threads).result() for fit in fits] == [2, 2]
    for fit in fits:
        fit.shutdown()


def test_a_limit_of_the_calling_thread_is_kept():
    with several_threads(3), ThreadPoolExecutor(1, initializer=torch.eye, initargs=(2,)) as other:
        other.submit(torch.set_num_threads, 1).result()
        torch.set_num_threads(3)
        names = set()

        def work(lane):
            names.add(threading.current_thread().name)
            return 0

        other.submit(lanes.in_lanes, range(8), work, lambda a, b: 0).result()
        assert len(names) == 1 and not any("lane" in name for name in names)
        assert other.submit(torch.get_num_threads).result() == 1 and torch.get_num_threads() == 3


def test_a_forked_process_has_lanes_of_its_own():
    code = """
import os, torch
from gpmil.fast.lanes import in_lanes
torch.set_num_threads(2)
add = lambda a, b: a + b
assert in_lanes(range(9), sum, add) == 36
child = os.fork()
if not child:
    os._exit(0 if in_lanes(range(9), sum, add) == 36 else 1)
print(os.waitpid(child, 0)[1])
"""
    if not hasattr(os, "fork"):
        pytest.skip("no fork on this system")
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=120)
    assert found.stdout.split() == [b"0"], found.stderr


def test_an_error_in_a_lane_is_raised_and_threads_restored():
    threads = torch.get_num_threads()

    def fail(lane):
        raise RuntimeError("in a lane")

    with pytest.raises(RuntimeError, match="in a lane"):
        lanes.in_lanes(range(9), fail, lambda a, b: a)
    assert torch.get_num_threads() == threads
