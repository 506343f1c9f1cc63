"""What is measured. A case returns results; its `work` is run once more to see its memory."""

import functools
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bench import bandwidth, cohorts, engine, machine, naive, scaling
from bench.measure import (
    Conditions,
    Memory,
    Timing,
    in_child,
    in_turn,
    spent,
    threads,
    timed,
)
from bench.results import Result
from gpmil.data.bags import Bags

HUNDREDTH = 0.01  # of a large cohort, on which the naive twin is run
LARGEST_NAIVE = 50_000  # patches: above, the naive twin's time is extrapolated
PLAIN = 20  # sweeps timed together to know one
PLAIN_GPU = 400  # and on a GPU, where they are short
SMALL_ARRAY = 2**26  # bytes over which the bandwidth is taken where all is tiny
FILE = "gpmil-bench-{}-{}.npy"

Work = Callable[[], Any]


@dataclass(frozen=True)
class Case:
    """A name, what it means, and at which size and with how many threads it is run if not said."""

    name: str
    title: str
    run: Callable[["Case", Conditions], list[Result]]
    work: Callable[[Conditions], Work] | None = None
    size: str = "sicapv2"
    threads: int = 1

    def result(self, conditions: Conditions, dtype: str = "float64") -> Result:
        """A result to be filled."""
        c = conditions
        return Result(
            self.name, self.title, c.size, dtype=dtype, device=c.device, threads=c.threads
        )  # fmt: skip


def run(name: str, conditions: Conditions) -> list[Result]:
    """Run a case and judge it."""
    case = CASES[name]
    with threads(conditions.threads):
        return [result.judged() for result in case.run(case, conditions)]


# --- What cases share -----------------------------------------------------------------------------
def _bandwidth(conditions: Conditions) -> bandwidth.Bandwidth:
    small = SMALL_ARRAY if conditions.size == "tiny" else None
    return bandwidth.read(conditions.device, conditions.threads, small)


def _for_twin(bags: Bags) -> tuple[Bags, float]:
    """The bags that the naive twin is run on, and their share of the patches."""
    if bags.n_instances <= LARGEST_NAIVE:
        return bags, 1.0
    some = bags[: max(2, round(HUNDREDTH * len(bags)))]
    return some, some.n_instances / bags.n_instances


def _item(dtype: str) -> int:
    return np.dtype(dtype).itemsize


def _feature_bytes(bags: Bags) -> int:
    return bags.n_instances * bags.n_features * bags.features.dtype.itemsize


@functools.lru_cache(maxsize=1)
def _training(size: str) -> Bags:
    return cohorts.training(size)


def _with_own_threads(work: Work) -> str:
    """What users get who say nothing of threads: as many as NumPy and torch start by themselves."""
    count = machine.cores()
    with threads(count):
        took = timed(work, 3)
    return f"with {count} threads, as the libraries have by themselves: {took.seconds:.3g} s"


# --- fit ------------------------------------------------------------------------------------------
def _fit_work(conditions: Conditions) -> Work:
    bags = _training(conditions.size)
    M = cohorts.INDUCING[conditions.size]
    return lambda: engine.model(M, conditions.device, dtype="float64").fit(bags)


def _fit(case: Case, conditions: Conditions) -> list[Result]:
    bags, M = _training(conditions.size), cohorts.INDUCING[conditions.size]
    result = case.result(conditions).of(bags, M)
    result.took(timed(_fit_work(conditions), conditions.repeats))
    result.parts = engine.by_parts(bags, M, conditions.device, dtype="float64")
    result.reads(_feature_bytes(bags) + 2 * result.four_nm, _bandwidth(conditions))
    _twin_fit(result, bags, M)
    beyond = sum(result.parts[name] for name in engine.BEYOND_THE_TWIN)
    both = result.parts["all"] / (result.parts["all"] - beyond) * (result.ratio or 0.0)
    result.notes.append(_with_own_threads(_fit_work(conditions)))
    result.notes.append(
        f"{' and '.join(engine.BEYOND_THE_TWIN)}, which the twin has none of, take {beyond:.3f} s; "
        f"without them {both:.1f} times as fast"
    )
    return [result.held(in_child(case.name, conditions))]


def _twin_fit(result: Result, bags: Bags, M: int) -> None:
    some, share = _for_twin(bags)
    setting = engine.twin(bags.n_features)
    with threads(1):
        took = spent(lambda: naive.fit(some, setting, M, engine.SWEEPS, seed=0))
    result.against(took, share)


# --- default --------------------------------------------------------------------------------------
def _default(case: Case, conditions: Conditions) -> list[Result]:
    """The fit that people get, by turns with the twin's single fit at given settings."""
    bags, M = _training(conditions.size), cohorts.INDUCING[conditions.size]
    result = case.result(conditions, "auto").of(bags, M)
    runs: list[tuple[Any, dict[str, float]]] = []
    setting = engine.twin(bags.n_features)

    def work() -> None:
        runs.append(engine.learned_by_parts(bags, M, conditions.device))

    def twin() -> None:
        with threads(1):
            naive.fit(bags, setting, M, engine.SWEEPS, seed=0)

    took, took_twin = in_turn(work, twin, conditions.repeats)
    result.took(took).against(took_twin)
    made, result.parts = min(runs, key=lambda run: abs(run[1]["all"] - took.seconds))
    trials = 0 if made.tuning_trace_ is None else len(made.tuning_trace_)
    result.notes.append(f"{trials} settings were tried; seconds on the clock by part")
    result.notes.append(_with_own_threads(work))
    return [result]


# --- sweeps, sweep --------------------------------------------------------------------------------
def _sweeps_work(conditions: Conditions) -> Work:
    bags = _training(conditions.size)
    Z = cohorts.inducing(bags, cohorts.INDUCING[conditions.size])
    E = cohorts.start(bags)

    def work() -> None:
        engine.Sweeper(bags, Z, conditions.device, "float64").sweeps(E, engine.SWEEPS)

    return work


def _sweeps(case: Case, conditions: Conditions) -> list[Result]:
    bags = _training(conditions.size)
    Z, E = cohorts.inducing(bags, cohorts.INDUCING[conditions.size]), cohorts.start(bags)
    some, share = _for_twin(bags)
    twin, found = _twin_sweeps(bags, some, Z, E)
    results = []
    for dtype in ("float64", "float32"):
        made = engine.Sweeper(bags, Z, conditions.device, dtype)
        result = case.result(conditions, dtype).of(bags, len(Z))
        work = functools.partial(made.sweeps, E, engine.SWEEPS)
        took, took_twin = in_turn(work, twin, conditions.repeats)
        result.took(took)
        h_bytes = _item(dtype) * bags.n_instances * len(Z)
        result.reads(engine.SWEEPS * h_bytes, _bandwidth(conditions), h_bytes)
        if share == 1:
            ours = made.sweeps(E, engine.SWEEPS)
            expected = found[0]
            result.difference = float(np.abs(ours - expected).max() / np.abs(expected).max())
        results.append(result.against(took_twin, share))
    results[0].held(in_child(case.name, conditions))
    return results


def _twin_sweeps(
    bags: Bags, some: Bags, Z: np.ndarray, E: np.ndarray
) -> tuple[Work, list[np.ndarray]]:
    """The naive twin's sweeps over some of the bags, and where every run leaves its mu^u."""
    center, scale = bags.features.mean(0, dtype=float), bags.features.std(0, dtype=float)
    scale = np.where(scale > 0, scale, 1.0)
    found: list[np.ndarray] = []
    with threads(1):
        twin = naive.Training(
            (some.features - center) / scale, some, (Z - center) / scale,
            engine.twin(bags.n_features),
        )  # fmt: skip
    start = E[: some.n_instances]

    def work() -> None:
        with threads(1):
            found.append(twin.sweeps(start, engine.SWEEPS))

    return work, found


def _sweep(case: Case, conditions: Conditions) -> list[Result]:
    bags = _training(conditions.size)
    Z, E = cohorts.inducing(bags, cohorts.INDUCING[conditions.size]), cohorts.start(bags)
    results = []
    for dtype in ("float64", "float32"):
        made = engine.Sweeper(bags, Z, conditions.device, dtype)
        result = case.result(conditions, dtype).of(bags, len(Z))
        result.took(made.time_one(E, conditions.repeats, PLAIN))
        n_bytes = _item(dtype) * bags.n_instances * len(Z)
        results.append(result.reads(n_bytes, _bandwidth(conditions)))
        del made
    return results


# --- predict --------------------------------------------------------------------------------------
def _fitted(conditions: Conditions) -> tuple[Any, Bags]:
    """A model to predict with, and what to predict; a large model is fitted to a part."""
    train, test = _training(conditions.size), cohorts.held_out(conditions.size)
    model = engine.model(cohorts.INDUCING[conditions.size], conditions.device)
    return model.fit(_for_twin(train)[0]), test


def _predict_work(conditions: Conditions) -> Work:
    model, test = _fitted(conditions)
    return lambda: model.predict_all(test)


def _predict(case: Case, conditions: Conditions) -> list[Result]:
    model, test = _fitted(conditions)
    result = case.result(conditions).of(test, len(model.inducing_points_))
    some, share = _for_twin(test)
    twin = naive.Predicting(model, engine.twin(test.n_features))
    found: list[tuple[np.ndarray, np.ndarray]] = []

    def naively() -> None:
        with threads(1):
            found.append(twin.predict(some))

    took, took_twin = in_turn(lambda: model.predict_all(test), naively, conditions.repeats)
    result.took(took).reads(_feature_bytes(test), _bandwidth(conditions))
    result.notes.append(f"model fitted to {model.cohort_['bags']:,} bags")
    result.notes.append(_with_own_threads(lambda: model.predict_all(test)))
    ours = model.predict_all(some).instances.probability
    result.difference = float(np.abs(ours - found[0][1]).max() / np.abs(ours).max())
    return [result.against(took_twin, share).held(in_child(case.name, conditions))]


# --- A large cohort -------------------------------------------------------------------------------
def _panda_work(conditions: Conditions) -> Work:
    bags = _training(conditions.size)
    M = cohorts.INDUCING[conditions.size]
    return lambda: engine.by_parts(bags, M, conditions.device, dtype="float32")


def _panda_fit(case: Case, conditions: Conditions) -> list[Result]:
    bags, M = _training(conditions.size), cohorts.INDUCING[conditions.size]
    result = case.result(conditions, "float32").of(bags, M)
    _by_parts(result, bags, conditions)
    _twin_fit(result, bags, M)
    return [result.held(in_child(case.name, conditions))]


def _by_parts(result: Result, bags: Bags, conditions: Conditions) -> None:
    """Seconds by part, of the run with the median total; features and H are read at least once."""
    by_time: dict[float, dict[str, float]] = {}

    def work() -> None:
        parts = engine.by_parts(bags, result.inducing, conditions.device, dtype="float32")
        by_time[parts["all"]] = parts

    result.took(timed(work, conditions.repeats))
    middle = min(by_time, key=lambda total: abs(total - (result.seconds or 0.0)))
    result.parts = by_time[middle]
    result.reads(_feature_bytes(bags) + result.four_nm, _bandwidth(conditions))


# --- A cohort in a file ---------------------------------------------------------------------------
@contextmanager
def _file(conditions: Conditions) -> Iterator[Path]:
    """Where the features are: kept in the folder given, or in a temporary place."""
    shape = cohorts.on_disk(conditions.size)
    name = FILE.format(conditions.size, shape.dtype)
    if conditions.folder is not None:
        folder = Path(conditions.folder)
        folder.mkdir(parents=True, exist_ok=True)
        yield folder / name
        return
    with tempfile.TemporaryDirectory(prefix="gpmil-bench-") as place:
        yield Path(place) / name


def _disk_work(conditions: Conditions) -> Work:
    assert conditions.folder is not None
    with _file(conditions) as file:
        bags = cohorts.draw(cohorts.on_disk(conditions.size), 0, file=file)
    M = cohorts.INDUCING[conditions.size]
    return lambda: engine.by_parts(bags, M, conditions.device, dtype="float32")


def _disk(case: Case, conditions: Conditions) -> list[Result]:
    with _file(conditions) as file:
        bags = cohorts.draw(cohorts.on_disk(conditions.size), 0, file=file)
        result = case.result(conditions, "float32").of(bags, cohorts.INDUCING[conditions.size])
        _by_parts(result, bags, conditions)
        result.notes.append(f"{_feature_bytes(bags) / 1e9:.3f} GB of features in a file")
        kept = replace(conditions, folder=str(file.parent))
        return [result.held(in_child(case.name, kept), mapped=True)]


def learned(case: Case, conditions: Conditions) -> list[Result]:
    """The fit of a large cohort that people get, by parts; no twin, which learns nothing."""
    bags, M = _training(conditions.size), cohorts.INDUCING[conditions.size]
    result = case.result(conditions, "auto").of(bags, M)
    by_time: dict[float, dict[str, float]] = {}

    def work() -> None:
        parts = engine.learned_by_parts(bags, M, conditions.device)[1]
        by_time[parts["all"]] = parts

    result.took(timed(work, conditions.repeats))
    result.parts = by_time[min(by_time, key=lambda t: abs(t - (result.seconds or 0.0)))]
    return [result]


# --- A GPU ----------------------------------------------------------------------------------------
def _on_gpu(
    run: Callable[[Case, Conditions], list[Result]],
) -> Callable[[Case, Conditions], list[Result]]:
    def work(case: Case, conditions: Conditions) -> list[Result]:
        conditions = replace(conditions, device="cuda")
        if torch.cuda.is_available():
            return run(case, conditions)
        result = case.result(conditions, "float32")
        result.skipped = "torch sees no GPU here"
        return [result]

    return work


def fit_resident(case: Case, conditions: Conditions) -> list[Result]:
    """The parts of a fit, all of which find the features on the device; then sweeps."""
    bags, M = _training(conditions.size), cohorts.INDUCING[conditions.size]
    result = case.result(conditions, "float32").of(bags, M)
    before = _gpu_bytes()
    _by_parts(result, bags, conditions)
    _gpu_memory(result, before + _feature_bytes(bags))
    resident = sum(result.parts[name] for name in engine.PARTS)
    result.took(Timing(resident, result.first_seconds or resident, result.repeats))
    result.reads(_feature_bytes(bags) + result.four_nm, _bandwidth(conditions))
    result.notes.append("seconds: without rest, in which the features travel to the device")
    made = engine.Sweeper(bags, cohorts.inducing(bags, M), conditions.device, "float32")
    E = cohorts.start(bags)
    many = timed(lambda: made.sweeps(E, engine.SWEEPS), conditions.repeats)
    result.parts[f"{engine.SWEEPS} plain sweeps"] = many.seconds
    one = case.result(conditions, "float32").of(bags, M)
    one.case, one.title = "gpu-sweep", "one plain sweep, H resident"
    one.took(made.time_one(E, conditions.repeats, PLAIN_GPU))
    return [result, one.reads(one.four_nm, _bandwidth(conditions))]


def _gpu_bytes() -> int:
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    return torch.cuda.memory_allocated()


def _gpu_memory(result: Result, before: int) -> None:
    if result.device == "cuda":
        peak = max(0, torch.cuda.max_memory_allocated() - before)
        result.held(Memory(peak, None, exact=True))
        result.notes.append("peak memory is that of the GPU")


# --- Scaling --------------------------------------------------------------------------------------
def _scaling(case: Case, conditions: Conditions) -> list[Result]:
    result = case.result(conditions)
    result.curves = scaling.measured(conditions)
    result.seconds = sum(
        sum(curve["seconds"]) for axis in result.curves.values() for curve in axis["costs"].values()
    )
    result.notes.append("seconds: of all points together")
    return [result]


ALL = (
    Case(
        "fit",
        "k-means, the default solver and novelty; twin: ten k-means starts and 200 sweeps",
        _fit,
        _fit_work,
    ),
    Case("default", "the fit as it comes, all settings learned; twin: its single fit", _default),
    Case("sweeps", "200 plain sweeps from a given H", _sweeps, _sweeps_work),
    Case("sweep", "one plain sweep, against one read of H", _sweep),
    Case(
        "predict",
        "bags and patches predicted in one pass; twin: 5,000 draws per bag",
        _predict,
        _predict_work,
    ),
    Case("panda-fit", "fit of a large cohort, by parts", _panda_fit, _panda_work, "panda", 2),
    Case("panda-default", "the same as it comes, all settings learned", learned, None, "panda", 2),
    Case("disk", "fit of a cohort in a memory-mapped file", _disk, _disk_work, "panda", 2),
    Case("gpu", "fit on a GPU, features resident", _on_gpu(fit_resident), None, "panda"),
    Case(
        "gpu-default",
        "the same as it comes, all settings learned",
        _on_gpu(learned),
        None,
        "panda",
        8,
    ),
    Case("scaling", "cost against N, M, bag size and coupling", _scaling),
)
CASES = {case.name: case for case in ALL}
