"""Work in parts, each computed once and kept in a file of its own.

An interrupted study goes on where it stopped, and a repeated one has nothing to do. Where time is
short, every table of a study gets its share of it.
"""

import hashlib
import io
import json
import logging
import math
import time
import zipfile
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, Protocol, TypeVar, runtime_checkable

import numpy as np
from joblib.executor import get_memmapping_executor

from gpmil import __version__
from gpmil.files.whole import write_whole

logger = logging.getLogger("gpmil")

Packed = tuple[dict[str, np.ndarray], dict[str, Any]]  # arrays, and a card of plain values
ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")


@runtime_checkable
class Part(Protocol):
    """One piece of work: what it is called, what it costs, and how its result becomes a file."""

    @property
    def title(self) -> str:
        """In words."""
        ...

    @property
    def table(self) -> str:
        """What it is compared in: parts of one table and turn belong together."""
        ...

    @property
    def turn(self) -> int:
        """Which repeat of its table this is."""
        ...

    @property
    def effort(self) -> float:
        """Rough cost, for the time left."""
        ...

    def name(self) -> str:
        """The stem of its file: changes with everything that the result depends on."""
        ...

    def compute(self) -> Any:
        """The result."""
        ...

    def pack(self, result: Any) -> Packed:
        """The result as arrays and a card."""
        ...

    def unpack(self, packed: Packed) -> Any:
        """The result again."""
        ...


AnyPart = TypeVar("AnyPart", bound=Part)


def sealed(stem: str, contents: str) -> str:
    """The stem of a file, with a seal of what is in it and of the version.

    >>> sealed("a", "x") == sealed("a", "x"), sealed("a", "x") == sealed("a", "y")
    (True, False)
    """
    key = hashlib.blake2b(f"{contents}, {__version__}".encode(), digest_size=6).hexdigest()
    return f"{stem}-{key}"


def carry_out(
    parts: Sequence[AnyPart], folder: Path, n_jobs: int = 1, seconds: float = math.inf
) -> Iterator[tuple[AnyPart, Any, bool]]:
    """Every part with its result, and whether it was kept from before, as they become known.

    What is not finished after `seconds` is given up; of several jobs, also what was begun. A part
    that fails ends the study; under a limit of time it is logged, and left out.
    """
    deadline = time.monotonic() + seconds
    files = {id(part): folder / f"{part.name()}.npz" for part in parts}
    waiting = []
    for part in parts if seconds == math.inf else in_fair_order(parts):
        known = kept(part, files[id(part)])
        if known is None:
            waiting.append(part)
        else:
            yield part, known, True
    if seconds == math.inf and n_jobs != 1:
        # the longest first, or the last of them would run alone
        waiting.sort(key=lambda part: -part.effort)
    work = _one_by_one if n_jobs == 1 else partial(_side_by_side, n_jobs=n_jobs)
    for part, result in work(waiting, files, deadline):
        try:
            found = result()
        except Exception as error:
            if seconds == math.inf:
                raise
            logger.error("%s failed: %s: %s", part.title, type(error).__name__, error)
            continue
        yield part, found, False


def in_fair_order(parts: Sequence[AnyPart]) -> list[AnyPart]:
    """Turn by turn, such that at any moment about as much was spent on every table.

    A turn of a table comes when its cost, with that of the turns before it, is the least of those
    that wait. Within a turn the cheap parts are first.
    """
    cost: dict[tuple[str, int], float] = defaultdict(float)
    for part in parts:
        cost[part.table, part.turn] += part.effort
    spent: dict[str, float] = defaultdict(float)
    place = {}
    for table, turn in sorted(cost):
        spent[table] += cost[table, turn]
        place[table, turn] = (spent[table], table, turn)
    return sorted(parts, key=lambda part: (place[part.table, part.turn], part.effort))


def _one_by_one(
    waiting: Sequence[AnyPart], files: Mapping[int, Path], deadline: float
) -> Iterator[tuple[AnyPart, Callable[[], Any]]]:
    """Here, as long as there is time; what is begun is finished."""
    for part in waiting:
        if time.monotonic() >= deadline:
            return
        yield part, partial(_compute_and_keep, part, files[id(part)])


def _side_by_side(
    waiting: Sequence[AnyPart], files: Mapping[int, Path], deadline: float, n_jobs: int
) -> Iterator[tuple[AnyPart, Callable[[], Any]]]:
    """In processes of one thread each; those that run at the deadline are ended."""
    pool = get_memmapping_executor(n_jobs, env=ONE_THREAD)  # large arrays are shared
    still = iter(waiting)
    running: dict[Future[Any], AnyPart] = {}
    try:
        while True:
            for part in islice(still, n_jobs - len(running)):
                running[pool.submit(_compute_and_keep, part, files[id(part)])] = part
            left = None if deadline == math.inf else max(0.0, deadline - time.monotonic())
            done, _ = wait(running, left, FIRST_COMPLETED)
            if not done:
                return
            for job in done:
                yield running.pop(job), job.result
    finally:
        pool.terminate(kill_workers=True)


def _compute_and_keep(part: Part, file: Path) -> Any:
    result = part.compute()
    keep(part, result, file)
    return result


def keep(part: Part, result: Any, file: Path) -> None:
    """Write a result, all or nothing."""
    arrays, card = part.pack(result)
    stream = io.BytesIO()
    np.savez_compressed(stream, card=np.array(json.dumps(card)), **arrays)  # type: ignore[arg-type]
    write_whole(file, stream.getvalue())


def kept(part: Part, file: Path) -> Any:
    """A result that was written; None where there is none, or an unreadable one."""
    try:
        with np.load(file, allow_pickle=False) as found:
            card = json.loads(str(found["card"]))
            return part.unpack(({k: found[k] for k in found.files if k != "card"}, card))
    except (OSError, ValueError, KeyError, TypeError, zipfile.BadZipFile):
        return None
