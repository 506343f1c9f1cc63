"""The campaign: damaged files by the thousand, under limits of time and memory.

python -m fuzz.campaign --cases 10000                       every target, one worker per core
python -m fuzz.campaign --target trident --case 123         one case again, with its traceback

Case k of a target is a function of the two alone. A case ends

right        accepted, and what was read is what was written, or says what is missing
refused      a ValueError of gpmil's own that names the file, or an OSError
traceback    any other exception, a RuntimeWarning, the end of the process
accepted     read though wrong: the target's `judge` objects
hung         no answer within the limit
memory       more of it than the limit
left behind  refused, and files are there that were not there before

and all but the first two are failures.
"""

import argparse
import json
import logging
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import warnings
import zlib
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import numpy as np

SECONDS = 20.0
MEGABYTES = 2_000
WORKERS = os.cpu_count() or 1
MODULES = ("fuzz.targets", "fuzz.targets_models")
BROKEN = 70  # exit code of a worker whose target cannot make its sample
FINE = ("right", "refused")


@dataclass(frozen=True)
class Target:
    """Something that reads files, and how to damage them."""

    name: str
    make: Callable[[Path, np.random.Generator], None]  # a valid sample, damaged
    attempt: Callable[[Path], object]  # what a user does; ValueError/OSError is a clear refusal
    judge: Callable[[Path, object], None] = lambda folder, result: None  # AssertionError: wrong


@dataclass(frozen=True)
class Outcome:
    """How a case ended, at which place in gpmil, and what was said."""

    kind: str
    place: str = ""
    said: str = ""


def targets() -> dict[str, Target]:
    """Every target there is, by name."""
    there = [import_module(name) for name in MODULES if find_spec(name) is not None]
    return {target.name: target for module in there for target in module.TARGETS}


# ------------------------------------------------------------------ one case


def rng_of(target: Target, case: int) -> np.random.Generator:
    """The only source of chance of a case."""
    return np.random.default_rng([zlib.crc32(target.name.encode()), case])


def run_case(target: Target, case: int, folder: Path) -> Outcome:
    """Damage a sample in `folder`, which is made anew, and read it."""
    shutil.rmtree(folder, ignore_errors=True)
    place, temporary = folder / "data", folder / "tmp"
    place.mkdir(parents=True)
    temporary.mkdir()
    with _quiet(temporary):
        target.make(place, rng_of(target, case))
    before = _files(folder)
    with _quiet(temporary):
        outcome = _attempt(target, place)
    more = _files(folder) - before
    if outcome.kind == "refused" and more:
        return Outcome("left behind", said=f"{sorted(more)[0]} after {outcome.said}")
    return outcome


def _attempt(target: Target, place: Path) -> Outcome:
    try:
        result = target.attempt(place)
    except Exception as error:
        return _refused(error, place) or Outcome("traceback", where(error), said(error))
    try:
        target.judge(place, result)
    except AssertionError as error:
        return Outcome("accepted", place=target.name, said=said(error))
    except Exception as error:
        return Outcome("traceback", where(error), said(error))
    return Outcome("right")


def _refused(error: Exception, place: Path) -> Outcome | None:
    """A clear refusal: raised by gpmil itself, about a file of this case; or an OSError."""
    if isinstance(error, OSError):
        return Outcome("refused", where(error), said(error))
    own = type(error) is ValueError or type(error).__module__.startswith("gpmil")
    names = {"data", *(p.name for p in place.rglob("*"))}
    named = any(name in str(error) for name in names)
    if isinstance(error, ValueError) and own and named and _raised_in_gpmil(error):
        return Outcome("refused", where(error), said(error))
    return None


def _raised_in_gpmil(error: BaseException) -> bool:
    frames = traceback.extract_tb(error.__traceback__)
    return f"{os.sep}gpmil{os.sep}" in frames[-1].filename


def where(error: BaseException) -> str:
    """The innermost line of gpmil that an error came through."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [f for f in frames if f"{os.sep}gpmil{os.sep}" in f.filename]
    if not own:
        return "not in gpmil"
    return f"{own[-1].filename.rpartition('gpmil' + os.sep)[2]}:{own[-1].lineno}"


def said(error: BaseException) -> str:
    """The kind of an error and its words, in one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:300]


def _files(folder: Path) -> set[str]:
    return {str(p.relative_to(folder)) for p in folder.rglob("*")}


class _quiet:
    """Temporary files in one folder, numerical warnings as errors, nothing logged."""

    def __init__(self, temporary: Path) -> None:
        self.temporary = temporary

    def __enter__(self) -> None:
        self.before = tempfile.tempdir
        tempfile.tempdir = str(self.temporary)
        logging.disable(logging.CRITICAL)
        self.warnings = warnings.catch_warnings()
        self.warnings.__enter__()
        warnings.simplefilter("ignore")
        warnings.simplefilter("error", RuntimeWarning)

    def __exit__(self, *of: object) -> None:
        self.warnings.__exit__(None, None, None)
        logging.disable(logging.NOTSET)
        tempfile.tempdir = self.before


# ------------------------------------------------------------------ a worker


def work(target: Target, cases: range, scratch: Path) -> None:
    """Run cases one after the other; a line of JSON before each, and one after it."""
    out = os.fdopen(os.dup(1), "w")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # whatever a reader prints is nobody's answer
    for case in cases:
        print(json.dumps({"begin": case}), file=out, flush=True)
        try:
            outcome = run_case(target, case, scratch)
        except Exception:
            traceback.print_exc()
            sys.exit(BROKEN)
        print(json.dumps({"end": case, **asdict(outcome)}), file=out, flush=True)


@dataclass
class Worker:
    """A process at work on some cases of a target, watched."""

    target: str
    cases: list[int]
    seconds: float
    megabytes: float
    found: dict[int, Outcome] = field(default_factory=dict)

    def run(self) -> None:
        """All cases, with a new process after each that had to be stopped."""
        while left := [case for case in self.cases if case not in self.found]:
            self._run(left)

    def _run(self, left: list[int]) -> None:
        step = left[1] - left[0] if len(left) > 1 else 1
        with tempfile.TemporaryDirectory(prefix="fuzz-") as scratch:
            command = [
                sys.executable, "-m", "fuzz.campaign", "--target", self.target,
                "--work", f"{left[0]},{left[-1] + 1},{step}", "--scratch", scratch,
            ]  # fmt: skip
            process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
            self.now, self.since, self.stopped = left[0], time.monotonic() + 60.0, ""
            watch = threading.Thread(target=self._watch, args=(process,), daemon=True)
            watch.start()
            for line in process.stdout:
                self._hear(json.loads(line))
            code = process.wait()
            watch.join()
        if code == BROKEN:
            raise RuntimeError(f"{self.target}, case {self.now}: no sample could be damaged")
        if code != 0:
            kind = self.stopped or "traceback"
            self.found.setdefault(self.now, Outcome(kind, "the process", f"ended with {code}"))

    def _hear(self, line: dict) -> None:
        if "begin" in line:
            self.now, self.since = line["begin"], time.monotonic()
        else:
            case = line.pop("end")
            self.found[case] = Outcome(**line)

    def _watch(self, process: subprocess.Popen) -> None:
        while process.poll() is None:
            if time.monotonic() - self.since > self.seconds:
                self.stopped = "hung"
            elif _megabytes(process.pid) > self.megabytes:
                self.stopped = "memory"
            if self.stopped:
                process.send_signal(signal.SIGKILL)
                return
            time.sleep(0.05)


def _megabytes(pid: int) -> float:
    """Memory of a process; 0 where the system does not tell."""
    try:
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    except (OSError, IndexError, ValueError):
        return 0.0
    return pages * os.sysconf("SC_PAGE_SIZE") / 1e6


# ------------------------------------------------------------------ the campaign


def campaign(names: list[str], cases: int, first: int, seconds: float, megabytes: float) -> int:
    """Every target in turn, a table of what was found, and the number of failures."""
    failures = total = 0
    begin = time.monotonic()
    print(f"{'target':22}{'cases':>8}{'right':>8}{'refused':>9}{'failures':>10}{'seconds':>9}")
    for name in names:
        began = time.monotonic()
        found = _spread(name, range(first, first + cases), seconds, megabytes)
        kinds = Counter(outcome.kind for outcome in found.values())
        bad = sum(n for kind, n in kinds.items() if kind not in FINE)
        print(
            f"{name:22}{len(found):8,}{kinds['right']:8,}{kinds['refused']:9,}{bad:10,}"
            f"{time.monotonic() - began:9.0f}",
            flush=True,
        )
        for line in _failures(name, found):
            print(line, flush=True)
        failures, total = failures + bad, total + len(found)
    print(f"{total:,} cases: {failures:,} failures, {time.monotonic() - begin:.0f} s")
    return failures


def _spread(name: str, cases: range, seconds: float, megabytes: float) -> dict[int, Outcome]:
    workers = [Worker(name, list(cases[k::WORKERS]), seconds, megabytes) for k in range(WORKERS)]
    with ThreadPoolExecutor(WORKERS) as pool:
        list(pool.map(Worker.run, workers))  # a worker that breaks is an error here
    return {case: outcome for worker in workers for case, outcome in worker.found.items()}


def _failures(name: str, found: dict[int, Outcome]) -> Iterator[str]:
    """One line per place, with the command that shows the first case there."""
    places: dict[tuple[str, str], list[int]] = defaultdict(list)
    for case, outcome in sorted(found.items()):
        if outcome.kind not in FINE:
            places[outcome.kind, outcome.place].append(case)
    for (kind, place), cases in sorted(places.items(), key=lambda item: -len(item[1])):
        yield (
            f"    {len(cases):6,} x {kind} at {place}: {found[cases[0]].said}\n"
            f"             python -m fuzz.campaign --target {name} --case {cases[0]}"
        )


def show(target: Target, case: int, scratch: Path) -> int:
    """One case in this process, with the whole traceback; its files stay."""
    outcome = run_case(target, case, scratch)
    print(f"{target.name} {case}: {outcome.kind} {outcome.place} {outcome.said}\n{scratch}")
    if outcome.kind == "traceback":
        result = target.attempt(scratch / "data")
        target.judge(scratch / "data", result)
    return int(outcome.kind not in FINE)


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m fuzz.campaign", description=__doc__)
    parser.add_argument("--target", action="append", help="only this one; may be repeated")
    parser.add_argument("--cases", type=int, default=300, help="per target")
    parser.add_argument("--first", type=int, default=0, help="number of the first case")
    parser.add_argument("--case", type=int, help="one case, shown")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="limit per case")
    parser.add_argument("--megabytes", type=float, default=MEGABYTES, help="limit per worker")
    parser.add_argument("--work", help=argparse.SUPPRESS)
    parser.add_argument("--scratch", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    known = targets()
    unknown = set(given.target or ()) - set(known)
    if unknown:
        parser.error(f"no target {', '.join(unknown)}; there are {', '.join(known)}")
    names = given.target or list(known)
    if given.work is not None:
        work(known[names[0]], range(*map(int, given.work.split(","))), given.scratch / "case")
        return 0
    if given.case is not None:
        return show(known[names[0]], given.case, Path(tempfile.mkdtemp(prefix="fuzz-")) / "case")
    return int(campaign(names, given.cases, given.first, given.seconds, given.megabytes) > 0)


if __name__ == "__main__":
    sys.exit(main())
