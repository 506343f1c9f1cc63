"""Partitions on the workers of a Dask cluster.

A partition stays on its worker between rounds. Where a worker is lost, its partitions are built
again on others from their source, told again what they had been told, and the round is repeated
for them: the fit goes on, to the same result.
"""

import logging
import uuid
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import numpy as np

from gpmil import extras
from gpmil.data.bags import Bags
from gpmil.distributed.cluster import Call, Cluster, Reply, answer
from gpmil.distributed.facts import Facts
from gpmil.distributed.partition import BagSource, Partition

logger = logging.getLogger("gpmil")
POLL = 1.0  # seconds between looks at which workers are still there
PATIENCE = 60.0  # seconds to wait for a worker where there is none
MOST_LOSSES = 3  # of one partition in one round: then it is not the machines that fail

_HELD: dict[tuple[str, int], Partition] = {}  # on a worker: its partitions, by fit and number


def _build(
    fit: str, number: int, source: BagSource, device: str | None, told: Sequence[Call]
) -> Facts:
    """On a worker: build a partition and tell it what it had been told."""
    partition = Partition(source, device=device)
    facts = partition.facts()
    for call in told:
        answer(partition, call)
    _HELD[fit, number] = partition
    return facts


def _answer(fit: str, number: int, call: Call) -> Reply | None:
    """On a worker: the call; None where the partition is not here (a worker that was restarted)."""
    partition = _HELD.get((fit, number))
    return None if partition is None else answer(partition, call)


def _drop(fit: str) -> None:
    for key in [key for key in _HELD if key[0] == fit]:
        _HELD.pop(key, None)


class DaskCluster(Cluster):
    """The workers of a `dask.distributed.Client`; partitions go to them in turn."""

    def __init__(self, client: Any, sources: Sequence[BagSource], device: str | None = None):
        super().__init__()
        check_client(client)
        self.client, self.sources, self.device = client, list(sources), device
        self.size = len(self.sources)
        self.fit = uuid.uuid4().hex
        self.losses = 0
        self._homes: dict[int, str] = {}
        self._facts: dict[int, Facts] = {}
        self._lost: Counter[int] = Counter()

    def _ask(self, calls: list[Call]) -> list[Reply]:
        replies: dict[int, Reply] = {}
        while len(replies) < self.size:
            self._build_missing()
            asked = {
                k: self._submit(k, _answer, calls[k]) for k in range(self.size) if k not in replies
            }
            found = self._settled(asked)
            replies |= found
            for k in found:
                self._lost[k] = 0
            self._note_lost([k for k in asked if k not in found])
        return [replies[k] for k in range(self.size)]

    def _submit(self, number: int, function: Any, *args: Any) -> Any:
        return self.client.submit(
            function, self.fit, number, *args, workers=[self._homes[number]], pure=False
        )

    # --- Building, and building again ---------------------------------------------------------

    def _build_missing(self) -> None:
        """Build every partition that has no home, on the workers with the fewest."""
        while missing := [k for k in range(self.size) if k not in self._homes]:
            load = dict.fromkeys(self._workers(), 0)
            for home in self._homes.values():
                if home in load:
                    load[home] += 1
            asked = {}
            for k in missing:
                self._homes[k] = min(load, key=lambda worker: load[worker])
                load[self._homes[k]] += 1
                told = [calls[k] for calls in self.told.values()]
                with suppress(TimeoutError, OSError):  # a worker that has just gone
                    asked[k] = self._submit(k, _build, self._sent(k), self.device, told)
            found = self._settled(asked)
            for k, facts in found.items():
                self._check_same(k, facts)
            self._note_lost([k for k in missing if k not in found])

    def _sent(self, number: int) -> Any:
        """The source of a partition: a function as it is, bags by way of the worker's memory."""
        source = self.sources[number]
        if not isinstance(source, Bags):
            return source
        return self.client.scatter(source, workers=[self._homes[number]], hash=False)

    def _check_same(self, number: int, facts: Facts) -> None:
        known = self._facts.setdefault(number, facts)
        same = (np.array_equal(getattr(facts, a), getattr(known, a)) for a in ("names", "sizes"))
        if not all(same):
            raise ValueError(
                f"partition {number + 1} was built twice, because a worker was lost, and the "
                "second time it had other bags. The function that builds a partition must give "
                "the same bags every time."
            )

    def _note_lost(self, lost: Sequence[int]) -> None:
        """Partitions that went with their worker: they have no home."""
        for k in lost:
            del self._homes[k]
            self._lost[k] += 1
            self.losses += 1
            logger.warning("partition %d was lost with its worker; it is built again", k + 1)
            if self._lost[k] > MOST_LOSSES:
                raise ValueError(
                    f"partition {k + 1} of {self.size} was lost with its worker {self._lost[k]} "
                    "times: too little memory per worker? Use more partitions, store='disk' or "
                    "'recompute', or dtype='float32'."
                )

    def _workers(self) -> list[str]:
        """Workers that are there now; waits a while for the first."""
        while not (there := sorted(self.client.nthreads())):
            try:
                self.client.wait_for_workers(1, timeout=PATIENCE)
            except TimeoutError as error:
                raise ValueError(
                    f"the Dask cluster has no workers, and none came in {PATIENCE:.0f} s. Start "
                    "some (cluster.scale), and look at their logs."
                ) from error
        return there

    # --- Waiting ------------------------------------------------------------------------------

    def _settled(self, asked: Mapping[int, Any]) -> dict[int, Any]:
        """The results, of those partitions whose worker was not lost."""
        from dask.distributed import wait

        waiting = dict(asked)
        while waiting:
            try:
                wait(list(waiting.values()), timeout=POLL)
                break
            except TimeoutError:
                # a task that waits for a worker that is gone would wait for ever
                gone = {k: future for k, future in waiting.items() if not self._is_there(k)}
                self.client.cancel(list(gone.values()), force=True)
                waiting = {k: future for k, future in waiting.items() if k not in gone}
        found = {k: self._result(k, future) for k, future in waiting.items()}
        return {k: value for k, value in found.items() if value is not None}

    def _is_there(self, number: int) -> bool:
        return self._homes[number] in self.client.nthreads()

    def _result(self, number: int, future: Any) -> Any:
        """The result of a task that is done; None where it is lost. Its errors are raised."""
        if future.status == "error":
            _raise_own(number, future.exception())
        while future.status == "finished":
            try:
                return future.result(timeout=POLL)
            except TimeoutError:
                if not self._is_there(number):  # it died with the result
                    break
            except _losses():
                break
        return None

    def close(self) -> None:
        """Free the memory of the workers."""
        self.client.run(_drop, self.fit, on_error="ignore")


def _losses() -> tuple[type[BaseException], ...]:
    """The errors that tell of a worker that is gone, not of the task."""
    from dask.distributed import CancelledError, KilledWorker
    from distributed.comm import CommClosedError

    return CancelledError, KilledWorker, CommClosedError


def _raise_own(number: int, error: BaseException) -> None:
    """Raise what is the partition's own fault."""
    if isinstance(error, _losses()):
        return
    if isinstance(error, ValueError):
        raise ValueError(f"partition {number + 1}: {error}") from error
    raise error


def check_client(client: Any) -> None:
    """Insist on a synchronous Dask client."""
    try:
        from dask.distributed import Client
    except ImportError as error:
        raise ValueError(
            f"client= needs Dask, which is not installed: {extras.install('dask')}."
        ) from error
    if not isinstance(client, Client):
        raise ValueError(
            f"client must be a dask.distributed.Client, got {type(client).__name__}. "
            "For instance dask.distributed.Client(n_workers=2)."
        )
    if client.asynchronous:
        raise ValueError("client must not be asynchronous: use Client(...) outside of async code.")
