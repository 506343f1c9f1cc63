"""Seconds, threads, and the peak memory of one piece of work in a process of its own."""

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from threadpoolctl import threadpool_limits

LONG = 20.0  # seconds: work that takes longer is not repeated
SLOW = 8.0  # and a naive twin not if it takes longer than this
SAMPLE_EVERY = 0.005  # seconds between looks at the memory in use
CHILD = "bench.child"


@dataclass(frozen=True)
class Conditions:
    """Under which conditions a case is run; whole numbers and words, so that it travels as JSON."""

    size: str
    threads: int
    device: str = "cpu"
    repeats: int = 3
    folder: str | None = None  # where the file of the case `disk` is kept


class Spent(NamedTuple):
    """Seconds on the clock, and of processor time in all threads of this process."""

    seconds: float
    processor: float


@dataclass(frozen=True)
class Timing:
    """The median of the repeats, and the run before them that warmed up."""

    seconds: float
    first: float
    repeats: int
    processor: float | None = None  # of the median run


@contextmanager
def threads(count: int) -> Iterator[None]:
    """So many threads for NumPy's BLAS and for torch, whatever the environment says."""
    before = torch.get_num_threads()
    with threadpool_limits(count):
        torch.set_num_threads(count)
        try:
            yield
        finally:
            torch.set_num_threads(before)


def timed(work: Callable[[], Any], repeats: int) -> Timing:
    """Median of `repeats` runs after one to warm up; of long work the first run counts."""
    first = spent(work)
    runs = [first] if first.seconds > LONG else [spent(work) for _ in range(repeats)]
    return timing(runs, first)


def in_turn(work: Callable[[], Any], twin: Callable[[], Any], repeats: int) -> tuple[Timing, Spent]:
    """Medians of both, run by turns: a machine that slows down for a while slows down both.

    A twin that takes seconds is run once.
    """
    first = spent(work)
    runs: list[Spent] = []
    twins: list[Spent] = []
    for _ in range(1 if first.seconds > LONG else repeats):
        runs.append(spent(work))
        if not twins or twins[0].seconds < SLOW:
            twins.append(spent(twin))
    return timing(runs, first), middle(twins)


def timing(runs: list[Spent], first: Spent) -> Timing:
    """The run with the median time."""
    found = middle(runs)
    return Timing(found.seconds, first.seconds, len(runs), found.processor)


def middle(runs: list[Spent]) -> Spent:
    """The one with the median time."""
    return sorted(runs)[(len(runs) - 1) // 2]


def spent(work: Callable[[], Any]) -> Spent:
    """The time of one run, a GPU's work included."""
    wait()
    start, processor = time.perf_counter(), time.process_time()
    work()
    wait()
    return Spent(time.perf_counter() - start, time.process_time() - processor)


def once(work: Callable[[], Any]) -> float:
    """Seconds of one run."""
    return spent(work).seconds


def wait() -> None:
    """Until a GPU has done what it was given."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


# --- Memory ---------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Memory:
    """Bytes beyond what was held before the work began.

    `peak` is the high-water mark of all resident pages, those of a memory-mapped file included,
    which the system takes back when it needs them; `own` counts only the process's own pages
    (None where the system does not tell). `exact` is false where the mark from before the work
    could not be reset: then `peak` is a lower bound.
    """

    peak: int
    own: int | None
    exact: bool


def in_child(case: str, conditions: Conditions) -> Memory:
    """Run a case's work once in a fresh process, its data loaded before, and watch its memory."""
    question = json.dumps({"case": case, **asdict(conditions)})
    places = [str(Path(__file__).parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])]
    run = subprocess.run(
        [sys.executable, "-m", CHILD, question],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(places)},
        capture_output=True,
        text=True,
        check=False,
    )
    if run.returncode:
        reason = (run.stderr.strip().splitlines() or ["no message"])[-1]
        raise ValueError(
            f"the memory of case {case} could not be measured: the process ended with "
            f"{run.returncode} ({reason}). Too little memory for this size?"
        )
    return Memory(**json.loads(run.stdout.splitlines()[-1]))


def watch(work: Callable[[], Any]) -> Memory:
    """The memory that `work` takes at its peak, in this process."""
    exact, own_before = _reset_mark(), _own()
    before = _mark()
    with _sampled() as samples:
        work()
    own = max(samples) - own_before if samples and own_before is not None else None
    return Memory(max(0, _mark() - before), own, exact)


def _mark() -> int:
    """Bytes: the most this process ever held.

    Not ru_maxrss where it can be avoided: a child inherits its parent's.
    """
    found = _status("VmHWM")
    if found is not None:
        return found
    import resource  # not there on every system

    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def _own() -> int | None:
    return _status("RssAnon")


def _status(field: str) -> int | None:
    try:
        lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    except OSError:
        return None
    return next((1024 * int(line.split()[1]) for line in lines if line.startswith(field)), None)


def _reset_mark() -> bool:
    """Let the high-water mark begin at what is held now (Linux)."""
    try:
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    except OSError:
        return False
    return True


@contextmanager
def _sampled() -> Iterator[list[int]]:
    """A list that fills with the process's own bytes while the block runs."""
    found: list[int] = []
    done = threading.Event()

    def look() -> None:
        while (now := _own()) is not None:
            found.append(now)
            if done.wait(SAMPLE_EVERY):
                return

    watcher = threading.Thread(target=look, daemon=True)
    watcher.start()
    try:
        yield found
    finally:
        done.set()
        watcher.join()
