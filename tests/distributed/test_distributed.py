"""A fit over partitions is the fit of one process: in this one, over gloo, over Dask."""

import functools
import logging
import os
import re
import signal
import socket
import sys
from pathlib import Path

import gpytorch
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sklearn.base import clone
from synthetic import GIVEN, pr, pri, small_cohort

from gpmil import VGPMIL, VGPMILPRI, Bags, NominalMIL, OrdinalMIL, distributed, extras
from gpmil.distributed import DaskCluster, Local, cohort, dask_cluster
from gpmil.distributed.cluster import answer
from gpmil.models import learning

SMALL = {"n_inducing": 13, "random_state": 5, "device": "cpu"}
FITTED = (
    "inducing_points_", "posterior_mean_", "posterior_covariance_", "feature_mean_",
    "feature_scale_", "elbo_trace_",
)  # fmt: skip


@functools.cache
def bags():
    """20 slides, of which the first nine are cut where one class stands alone."""
    return small_cohort(seed=3, n_bags=20)


def part(first, last):
    """What a worker builds by itself."""
    return bags()[first:last]


def recipes(*ends):
    return [functools.partial(part, a, b) for a, b in zip((0, *ends), (*ends, 20))]


def cuts(*ends):
    return [bags()[a:b] for a, b in zip((0, *ends), (*ends, 20))]


def assert_same(apart, whole, rtol=1e-10):
    for name in FITTED:
        found, expected = getattr(apart, name), getattr(whole, name)
        assert np.allclose(found, expected, rtol=0, atol=rtol * np.abs(expected).max()), name
    for name in ("interval_mean_", "interval_precision_"):
        if hasattr(whole, name):  # from a Hessian multiplied in float32 in one of the two
            found, expected = getattr(apart, name), getattr(whole, name)
            assert np.allclose(found, expected, rtol=0, atol=1e-5 * np.abs(expected).max()), name
    assert apart.cohort_ == whole.cohort_
    assert apart.n_iter_ == whole.n_iter_
    assert apart.classes_.tolist() == whole.classes_.tolist()
    new = small_cohort(seed=8, n_bags=5)
    assert np.allclose(apart.predict_proba(new), whole.predict_proba(new), rtol=0, atol=rtol)
    novelty = whole.predict_novelty(new)
    assert np.isfinite(novelty).all()
    assert np.allclose(apart.predict_novelty(new), novelty, rtol=1e-5)


# --- In one process ---------------------------------------------------------------------------

CASES = {
    "direct": {},
    "newton": {"solver": "newton"},
    "sweeps": {"solver": "sweeps", "max_iter": 9},
    "coupled": {"moments": "coupled"},
    "coupled newton": {"moments": "coupled", "solver": "newton", "coupling": 1.7},
    "slide effect": {"slide_effect": 0.8},
    "slide effect, newton": {"slide_effect": 1.3, "solver": "newton", "tol": 1e-8},
    "slide context": {"slide_context": 1.4, "slide_context_lengthscale": 2.2, "slide_effect": 0.6},
    "coupled slide effect": {"moments": "coupled", "slide_effect": 0.9, "tol": 1e-8},
    "labelled patches": {"instance_labels": "use", "slide_effect": 0.7},
    "uncoupled": {"coupling": 0.0, "variance": 2.3},
    "pca": {"n_components": 3},
    "raw features": {"standardize": False, "mean": "balanced"},
    "one length per column": {"lengthscale": [1.1, 2.0, 0.7, 3.0]},
    "kernel object": {"kernel": gpytorch.kernels.MaternKernel(nu=2.5)},
    "all instances": {"n_inducing": 400},
    "given inducing points": {"inducing": np.arange(20.0).reshape(5, 4) / 9},
    "disk": {"store": "disk"},
    "recomputed": {"store": "recompute"},
    "VGPMIL": {"model": VGPMIL, "max_iter": 25},
    "VGPMIL, slide effect": {"model": VGPMIL, "max_iter": 9, "slide_effect": 0.9, "mean": -0.4},
    "VGPMIL, largest": {"model": VGPMIL, "max_iter": 9, "expected_max": "largest"},
    "a generator": {"random_state": 77, "solver": "sweeps", "max_iter": 3},
}


def made(case):
    """The model of a case, not fitted."""
    chosen = SMALL | CASES[case]
    if case == "a generator":
        chosen["random_state"] = np.random.default_rng(chosen["random_state"])
    return chosen.pop("model", pri)(**chosen)


@functools.cache
def whole(case):
    """The fit of one process."""
    return made(case).fit(bags())


@pytest.mark.parametrize("case", CASES)
def test_partitions_fit_what_one_process_fits(case):
    assert_same(made(case).fit(cuts(1, 14), client=Local), whole(case))


@pytest.mark.parametrize("case", ["direct", "newton", "sweeps", "pca"])
@pytest.mark.parametrize("ends", [(), (7,), (2, 3, 4, 18)], ids=["one", "two", "five"])
def test_the_number_of_partitions_does_not_matter(case, ends):
    assert_same(made(case).fit(cuts(*ends), client=Local), whole(case))


class Forgetful(Local):
    """Loses a partition in every third round, and builds it again as a real backend would."""

    def __init__(self, sources, device=None):
        super().__init__(sources, device)
        self.sources = sources

    def _ask(self, calls):
        if self.traffic.rounds % 3 == 2:
            k = self.traffic.rounds % self.size
            self.partitions[k] = distributed.Partition(self.sources[k], device="cpu")
            for told in self.told.values():
                answer(self.partitions[k], told[k])
        return super()._ask(calls)


@pytest.mark.parametrize("case", ["direct", "newton", "sweeps", "VGPMIL"])
def test_partitions_that_are_built_again_do_not_change_the_fit(case):
    assert_same(made(case).fit(cuts(4, 11), client=Forgetful), whole(case))


def test_coupled_moments_that_begin_anew():
    """Expectation propagation ends within its tolerance of where it was."""
    apart, one = made("coupled").fit(cuts(4, 11), client=Forgetful), whole("coupled")
    assert np.allclose(apart.posterior_mean_, one.posterior_mean_, atol=1e-8)
    assert np.allclose(apart.predict_proba(bags()), one.predict_proba(bags()), atol=1e-8)


def test_columns_that_are_zero_nearly_everywhere():
    """Sums of equal numbers differ by rounding: what is predicted must not."""
    x = np.maximum(bags().features, 0.4) - 0.4
    x[:, 0] = 0.1 * (np.arange(len(x)) % 50 == 0)
    sparse = Bags.from_arrays(bags().split(x), labels=bags().labels)
    one = pri(**SMALL).fit(sparse)
    apart = pri(**SMALL).fit([sparse[:5], sparse[5:]], client=Local)
    assert np.allclose(apart.predict_proba(sparse), one.predict_proba(sparse), atol=1e-10)


@settings(max_examples=8, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.sets(st.integers(1, 19), max_size=6), st.integers(0, 5))
def test_any_cut_fits_the_same(ends, seed):
    model = pri(**(SMALL | {"random_state": seed, "coupling": 0.8}))
    apart = clone(model).fit(cuts(*sorted(ends)), client=Local)
    assert_same(apart, model.fit(bags()))


def test_float32_agrees_to_its_precision():
    model = pri(**SMALL, dtype="float32", tol=1e-6)
    apart = clone(model).fit(cuts(3, 9), client=Local)
    assert np.allclose(apart.posterior_mean_, model.fit(bags()).posterior_mean_, atol=1e-4)


def test_labels_of_patches_reach_the_search():
    """Settings are learned from some bags that travel, with what is known of their patches."""
    told = cohort.Cohort.meet(Local(cuts(3, 11))).some_bags(np.array([1, 4, 15]))
    np.testing.assert_array_equal(told.instance_labels, bags()[[1, 4, 15]].instance_labels)
    wrong = bags().with_instance_labels(np.ones(bags().n_instances, dtype=int))
    with pytest.raises(ValueError, match="positive patch in a negative bag"):
        pri(**SMALL, instance_labels="use").fit([wrong[:9], wrong[9:]], client=Local)


def test_labels_given_beside_the_bags_win():
    y = 1 - bags().labels
    apart = pri(**SMALL).fit(cuts(6), y, client=Local)
    assert_same(apart, pri(**SMALL).fit(bags(), y))


@pytest.mark.parametrize("most", [500, 14], ids=["all bags", "a subsample"])
@pytest.mark.parametrize("mean", ["auto", "balanced"])
def test_settings_are_learned_the_same(monkeypatch, most, mean, caplog):
    monkeypatch.setattr(learning, "MOST_BAGS", most)
    model = VGPMILPRI(**SMALL, tuning_budget=2, mean=mean)
    one = clone(model).fit(bags())
    with caplog.at_level(logging.INFO, "gpmil"):
        apart = model.fit(cuts(2, 11), client=Local)
    assert f"{min(most, 20)} of 20 bags came with their features" in caplog.text
    for name in ("variance_", "lengthscale_", "mean_", "coupling_", "loo_log_likelihood_"):
        assert getattr(apart, name) == pytest.approx(getattr(one, name), rel=1e-6), name
    assert len(apart.tuning_trace_) == len(one.tuning_trace_)


@pytest.mark.parametrize("moments", ["diagonal", "coupled"])
@pytest.mark.parametrize("solver", ["direct", "newton"])
def test_leaving_bags_out_of_all_partitions(monkeypatch, moments, solver):
    seen = []
    real = cohort.Cohort.leave_one_bag_out

    def watched(*args):
        seen.append(real(*args))
        return seen[-1]

    monkeypatch.setattr(cohort.Cohort, "leave_one_bag_out", watched)
    model = VGPMILPRI(
        **(SMALL | GIVEN), coupling="auto", tuning_budget=1, moments=moments, solver=solver
    ).fit(cuts(5, 6), client=Local)
    assert np.allclose(seen[0], model.leave_one_bag_out(bags()), rtol=1e-7)


GRADES = np.arange(20) % 3  # in no relation to the bags: the fit is asked, not whether it is good
SEVERAL = {
    "grades": OrdinalMIL(
        **(SMALL | GIVEN), coupling=0.5, slide_effect=0.6, cut_points=[0, 0.7], store="recompute"
    ),
    "types": NominalMIL(**(SMALL | GIVEN), coupling=0.5, slide_effect=0.6),
}


@pytest.mark.parametrize("name", SEVERAL)
def test_partitions_of_several_classes(name):
    one = clone(SEVERAL[name]).fit(bags(), GRADES)
    for cluster in (Local, Forgetful):
        assert_same(clone(SEVERAL[name]).fit(cuts(1, 14), GRADES, client=cluster), one)
    found = distributed.predict(one, cuts(3, 4), client=Local)
    expected = one.predict_all(bags())
    assert np.allclose(found.class_proba, expected.class_proba, rtol=1e-8)
    assert np.allclose(found.class_probability, expected.instances.class_probability, rtol=1e-8)


def test_grades_are_learned_and_left_out_over_partitions():
    model = OrdinalMIL(**(SMALL | GIVEN), coupling=0.5, slide_effect="auto", tuning_budget=6)
    apart = clone(model).fit(cuts(5, 6), GRADES, client=Local)
    one = model.fit(bags(), GRADES)
    assert np.allclose(apart.cut_points_, one.cut_points_, rtol=1e-6)
    assert apart.slide_effect_ == pytest.approx(one.slide_effect_, rel=1e-6)
    # that of the fit itself, every bag taken out where it lies
    left_out = one.leave_one_bag_out(bags(), GRADES).mean()
    assert apart.loo_log_likelihood_ == pytest.approx(left_out, rel=1e-6)


def test_without_geometry():
    plain = Bags.from_arrays(bags().split(bags().features), labels=bags().labels)
    apart = pri(**SMALL).fit([plain[:5], plain[5:]], client=Local)
    assert_same(apart, pri(**SMALL).fit(plain))
    learned = VGPMILPRI(**SMALL, tuning_budget=1).fit([plain[:5], plain[5:]], client=Local)
    assert learned.coupling_ == 0


def test_predictions_in_order():
    model = whole("direct")
    found = distributed.predict(model, cuts(3, 4), client=Local)
    expected = model.predict_all(bags())
    assert found.names.tolist() == bags().names.tolist()
    assert found.sizes.tolist() == bags().sizes.tolist()
    assert np.allclose(found.proba, expected.proba, rtol=1e-10)
    assert np.allclose(found.probability, expected.instances.probability, rtol=1e-10)
    assert found.p_value is None and found.flagged is None


def test_one_line_says_what_it_cost(caplog):
    with caplog.at_level(logging.INFO, "gpmil"):
        pr(**SMALL).fit(cuts(3), client=Local)
    lines = [r.getMessage() for r in caplog.records if "rounds" in r.getMessage()]
    assert len(lines) == 1 and lines[0].startswith("2 partitions, ") and "overhead" in lines[0]


@given(st.lists(st.integers(1, 30), min_size=1, max_size=25), st.integers(1, 8))
def test_a_cut_keeps_every_bag_in_order(sizes, n):
    whole = Bags.from_arrays([np.zeros((k, 1)) for k in sizes])
    parts = distributed.cut(whole, n)
    assert len(parts) == min(n, len(sizes))
    assert [name for part in parts for name in part.names] == whole.names.tolist()
    assert all(len(part) for part in parts)
    # no partition is off by more than its bags at both ends, unless others need them
    if len(sizes) > 4 * n:
        share = whole.n_instances / n
        assert max(part.n_instances for part in parts) <= share + 2 * max(sizes)


def test_what_crosses_does_not_grow_with_the_instances():
    """The features stay: a cohort of five times the instances sends no more a round."""
    sent = []
    for size in (6, 30):
        many = small_cohort(seed=2, n_bags=20, sizes=(size, size))
        model = pri(**SMALL, inducing=many.features[:9])
        distributed.run(
            lambda cluster, y, model=model: (
                model._fit_to(cohort.Cohort.meet(cluster), y, torch.device("cpu")),
                sent.append(cluster.traffic.nbytes / cluster.traffic.rounds),
            ),
            [many[:8], many[8:]],
            client=Local,
        )
    assert sent[1] < 1.3 * sent[0]  # rounds with and without a Hessian differ


# --- What is refused --------------------------------------------------------------------------


def with_encoder(name):
    x = bags().split(bags().features)
    return Bags.from_arrays(x, labels=bags().labels, metadata={"encoder": name})


REFUSED = {
    "other features": (
        lambda: [bags(), small_cohort(n_features=3)],
        "partition 1 has 4 features .* partition 2 has 3",
    ),
    "other encoders": (
        lambda: [with_encoder("uni"), with_encoder("conch")],
        "'uni' as encoder, partition 2 has 'conch'",
    ),
    "other graphs": (lambda: [bags(), with_encoder("")], "'grid4' as graph, partition 2 has None"),
    "no bags": (lambda: [bags(), bags()[:0]], "partition 2 of 2 has no bags"),
    "one class": (
        lambda: [bags()[bags().labels == 1], bags()[bags().labels == 1]],
        "all 20 bags have label 1",
    ),
    "no list": (lambda: "files", "list of partitions, got str"),
    "no partitions": (list, "list of partitions, got list"),
    "no bags in the list": (lambda: [bags(), 3], "partition 2 of 2 is a int"),
    "a function of other things": (lambda: [lambda: [1, 2]], "it returned list"),
    "an empty cohort": (lambda: bags()[:0], "no bags"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_partitions_that_make_no_cohort(case):
    given, message = REFUSED[case]
    model = pri(**SMALL)
    with pytest.raises(ValueError, match=message):
        model.fit(given(), client=Local)
    assert not [name for name in vars(model) if name.endswith("_")]


def test_one_class_in_one_partition_is_fine():
    order = np.argsort(bags().labels, kind="stable")
    sorted_bags = bags()[order]
    apart = pri(**SMALL).fit([sorted_bags[:10], sorted_bags[10:]], client=Local)
    assert_same(apart, pri(**SMALL).fit(sorted_bags))


@pytest.mark.parametrize(
    "setting", [{"calibrated": True}, {"flags": True}, {"optimize": ("mean",)}], ids=str
)
def test_what_needs_all_bags_in_one_place(setting):
    with pytest.raises(ValueError, match="cannot be had over partitions"):
        pri(**SMALL, **setting).fit(cuts(3), client=Local)


def test_missing_values_are_found_where_they_are(tmp_path):
    x = np.memmap(tmp_path / "x", dtype="float64", mode="w+", shape=(3, 4))
    x[:] = [[1, 2, 3, 4], [np.nan, 1, 2, 3], [0, 1, 0, 1]]
    unread = Bags(x, [0, 2, 3], labels=[1, 0], names=["a", "b"])
    with pytest.raises(ValueError, match=r"NaN or infinite, in 1 of 2 bags"):
        pri(**SMALL).fit([unread, unread], client=Local)


def test_a_failed_fit_leaves_the_model_as_it_was():
    model = pri(**SMALL).fit(bags())
    before = model.posterior_mean_
    with pytest.raises(ValueError, match="n_components must be between 1 and 4"):
        model.set_params(n_components=9).fit(cuts(3), client=Local)
    assert model.posterior_mean_ is before


def test_dask_is_named_where_it_is_missing(monkeypatch):
    monkeypatch.setitem(sys.modules, "dask.distributed", None)
    with pytest.raises(ValueError, match=re.escape(extras.install("dask"))):
        pri(**SMALL).fit(bags(), client=object())


def test_a_client_that_is_none():
    pytest.importorskip("dask.distributed")
    with pytest.raises(ValueError, match=r"dask\.distributed\.Client, got int"):
        pri(**SMALL).fit(bags(), client=3)


def test_client_or_group():
    with pytest.raises(ValueError, match="not both"):
        pri(**SMALL).fit(bags(), client=Local, group=object())


def test_no_group_without_torchrun(monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(ValueError, match="torchrun"):
        distributed.fit(pri(**SMALL), bags())


def test_predict_needs_predict_all():
    with pytest.raises(ValueError, match="object has no predict_all"):
        distributed.predict(object(), bags(), client=Local)


# --- torch.distributed ------------------------------------------------------------------------


def on_a_rank(rank, port, folder):
    """What every process of a torchrun job would do."""
    torch.set_num_threads(1)
    os.environ |= {
        "RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
    }  # fmt: skip
    mine = cuts(8)[rank]
    for name in ("direct", "VGPMIL", "sweeps"):
        model = distributed.fit(made(name), mine)
        arrays = {a: getattr(model, a) for a in FITTED}
        np.savez(f"{folder}/{name}{rank}.npz", **arrays)
    found = distributed.predict(model, mine)
    np.savez(f"{folder}/predicted{rank}.npz", proba=found.proba, mean=found.mean)
    words = np.array(["benign", "3", "4"])[np.split(GRADES, [8])[rank]]
    graded = clone(SEVERAL["grades"]).set_params(grades=["benign", "3", "4"])
    graded = distributed.fit(graded, mine, words)
    np.savez(f"{folder}/graded{rank}.npz", posterior_mean_=graded.posterior_mean_)
    flipped = distributed.fit(pri(**SMALL), lambda: mine, 1 - mine.labels)
    np.savez(f"{folder}/flipped{rank}.npz", posterior_mean_=flipped.posterior_mean_)
    said = []
    for wrong in (lambda: mine if rank == 0 else 3, lambda: mine[[1, 3]]):
        try:
            distributed.fit(pri(**SMALL), wrong)
        except ValueError as error:
            said.append(str(error))
    Path(f"{folder}/said{rank}.txt").write_text("\n".join(said))
    torch.distributed.destroy_process_group()


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    """The files that two processes wrote."""
    if not torch.distributed.is_available() or not torch.distributed.is_gloo_available():
        pytest.skip("this torch was built without torch.distributed and gloo")
    folder = tmp_path_factory.mktemp("ranks")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    torch.multiprocessing.spawn(on_a_rank, args=(port, str(folder)), nprocs=2)
    return folder


@pytest.mark.parametrize("name", ["direct", "VGPMIL", "sweeps"])
def test_two_processes_fit_what_one_fits(ranks, name):
    first, second = (np.load(ranks / f"{name}{rank}.npz") for rank in (0, 1))
    for key in FITTED:
        expected = getattr(whole(name), key)
        assert np.array_equal(first[key], second[key])
        assert np.allclose(first[key], expected, rtol=0, atol=1e-10 * np.abs(expected).max()), key


def test_two_processes_predict_all(ranks):
    expected = whole("sweeps").predict_all(bags())
    for rank in (0, 1):
        found = np.load(ranks / f"predicted{rank}.npz")
        assert np.allclose(found["proba"], expected.proba, atol=1e-10)
        assert np.allclose(found["mean"], expected.instances.mean, atol=1e-10)


def test_two_processes_take_labels_beside_the_bags(ranks):
    expected = pri(**SMALL).fit(bags(), 1 - bags().labels).posterior_mean_
    for rank in (0, 1):
        found = np.load(ranks / f"flipped{rank}.npz")["posterior_mean_"]
        assert np.allclose(found, expected, rtol=0, atol=1e-10 * np.abs(expected).max())


def test_two_processes_fit_grades_by_their_names(ranks):
    expected = clone(SEVERAL["grades"]).fit(bags(), GRADES).posterior_mean_
    for rank in (0, 1):
        found = np.load(ranks / f"graded{rank}.npz")["posterior_mean_"]
        assert np.allclose(found, expected, rtol=0, atol=1e-10 * np.abs(expected).max())


def test_an_error_on_one_process_is_raised_on_all(ranks):
    for rank in (0, 1):
        said = (ranks / f"said{rank}.txt").read_text().splitlines()
        assert len(said) == 2
        assert said[0].startswith("rank 1: expected gpmil.Bags")
        assert said[1].startswith("all 4 bags have label 1")


# --- Dask -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def client():
    dask = pytest.importorskip("dask.distributed", reason="gpmil[dask] is not installed")
    with (
        dask.LocalCluster(
            n_workers=2, threads_per_worker=1, processes=True, dashboard_address=None
        ) as workers,
        dask.Client(workers) as client,
    ):
        yield client


@pytest.mark.parametrize("case", ["direct", "VGPMIL"])
def test_dask_fits_bags_of_the_caller(client, case):
    assert_same(made(case).fit(bags(), client=client), whole(case))


def test_dask_fits_bags_that_workers_build(client):
    model = pri(**SMALL, solver="newton", n_components=3)
    apart = clone(model).fit(recipes(4, 5), client=client)
    assert_same(apart, model.fit(bags()))


def test_dask_predicts_in_order(client):
    model = whole("direct")
    expected = model.predict_all(bags())
    for source in (bags(), recipes(4, 5)):
        found = distributed.predict(model, source, client=client)
        assert found.names.tolist() == bags().names.tolist()
        assert np.allclose(found.proba, expected.proba, rtol=1e-10)
        assert np.allclose(found.mean, expected.instances.mean, rtol=1e-9)


def test_dask_says_which_partition_is_wrong(client):
    with pytest.raises(ValueError, match=r"partition 2: expected gpmil\.Bags"):
        pri(**SMALL).fit([recipes()[0], functools.partial(int, 3)], client=client)


def test_workers_forget_a_fit(client):
    pri(**SMALL).fit(bags(), client=client)
    held = client.run(lambda: len(__import__("gpmil").distributed.dask_cluster._HELD))
    assert set(held.values()) == {0}


class Deadly(DaskCluster):
    """Kills the worker of the last partition twice without warning: in k-means, in the solver."""

    killed = 0

    def _ask(self, calls):
        moments = ("tally", "sums")
        if self.killed < 2 and calls[0].method == moments[self.killed]:
            home = self._homes[self.size - 1]
            pid = self.client.run(os.getpid, workers=[home])[home]
            os.kill(pid, signal.SIGKILL)
            self.killed += 1
        return super()._ask(calls)


@pytest.mark.parametrize("source", [bags, lambda: recipes(9)], ids=["bags", "recipes"])
def test_a_worker_that_dies_does_not_change_the_fit(client, source, caplog):
    backends = []

    def backend(sources, device):
        sources = distributed.cut(bags(), 2) if source is bags else sources
        backends.append(Deadly(client, sources, device))
        return backends[0]

    with caplog.at_level(logging.WARNING, "gpmil"):
        apart = pri(**SMALL).fit(source(), client=backend)
    assert backends[0].killed == 2
    assert caplog.text.count("was lost with its worker; it is built again") >= 2
    assert_same(apart, whole("direct"))


def dies_once(flag, first, last):
    if not flag.exists():
        flag.touch()
        os._exit(1)
    return part(first, last)


def test_a_worker_that_dies_while_it_builds(client, tmp_path):
    model = whole("direct")
    sources = [functools.partial(dies_once, tmp_path / "died", 0, 6), *recipes(6)[1:]]
    found = distributed.predict(model, sources, client=client)
    assert (tmp_path / "died").exists()
    assert np.allclose(found.proba, model.predict_proba(bags()), rtol=1e-10)


def test_a_partition_that_kills_every_worker(client):
    backend = DaskCluster(client, [bags()])
    with pytest.raises(ValueError, match="too little memory"):
        for _ in range(dask_cluster.MOST_LOSSES + 1):
            backend._homes[0] = "gone"
            backend._note_lost([0])


def test_a_recipe_must_give_the_same_bags_again(client):
    backend = DaskCluster(client, recipes())
    backend._check_same(0, distributed.Facts.of(bags()))
    with pytest.raises(ValueError, match="the second time it had other bags"):
        backend._check_same(0, distributed.Facts.of(bags()[:3]))
