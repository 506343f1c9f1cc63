"""Where partitions are, and how calls reach them: one small interface, and its plainest form.

A cluster sends a call to every partition and gives their answers in the order of the partitions,
so that sums do not depend on who was first. Backends: `Local` here, `TorchGroup` (torch_group.py)
and `DaskCluster` (dask_cluster.py).
"""

import dataclasses
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from gpmil.distributed.partition import BagSource, Partition

logger = logging.getLogger("gpmil")


class Call(NamedTuple):
    """A method of `Partition` with its arguments."""

    method: str
    args: tuple


class Reply(NamedTuple):
    """What a partition answered, and how long it worked."""

    value: Any
    seconds: float


def answer(partition: Partition, call: Call) -> Reply:
    """The call, made where the partition is."""
    begin = time.perf_counter()
    with torch.no_grad():
        value = getattr(partition, call.method)(*call.args)
    return Reply(value, time.perf_counter() - begin)


@dataclass
class Traffic:
    """Rounds so far: bytes both ways, wall time, and the work of the slowest partition."""

    rounds: int = 0
    nbytes: int = 0
    seconds: float = 0.0
    work: float = 0.0

    def log(self, n: int) -> None:
        """One line at the end."""
        if not self.rounds:
            return
        per = [x / self.rounds for x in (self.nbytes, self.seconds, self.seconds - self.work)]
        logger.info(
            "%d partitions, %d rounds; a round: %.2f MB sent and received, %.1f ms, %.1f ms of "
            "it overhead", n, self.rounds, 1e-6 * per[0], 1e3 * per[1], 1e3 * per[2],
        )  # fmt: skip


class Cluster:
    """Partitions of a cohort. A backend says in `_ask` how calls reach them."""

    size: int  # number of partitions

    def __init__(self) -> None:
        self.traffic = Traffic()
        self.told: dict[str, list[Call]] = {}  # what a partition has to be told if built again

    def map(self, method: str, *args: Any, each: Sequence[Any] | None = None) -> list[Any]:
        """The method of every partition, in order; `each` is a first argument for each one."""
        return self._round(self._calls(method, args, each))

    def tell(self, method: str, *args: Any, each: Sequence[Any] | None = None) -> list[Any]:
        """As `map`, for what partitions keep: repeated where one is lost and built again."""
        calls = self._calls(method, args, each)
        answers = self._round(calls)
        self.told[method] = calls
        return answers

    def untell(self, method: str) -> None:
        """What is no longer needed."""
        self.told.pop(method, None)

    def _calls(self, method: str, args: tuple, each: Sequence[Any] | None) -> list[Call]:
        own = [()] * self.size if each is None else [(value,) for value in each]
        return [Call(method, (*mine, *args)) for mine in own]

    def _round(self, calls: list[Call]) -> list[Any]:
        begin = time.perf_counter()
        replies = self._ask(calls)
        self.traffic.rounds += 1
        self.traffic.seconds += time.perf_counter() - begin
        self.traffic.work += max(reply.seconds for reply in replies)
        self.traffic.nbytes += sum(nbytes(call.args) for call in calls)
        self.traffic.nbytes += sum(nbytes(reply.value) for reply in replies)
        return [reply.value for reply in replies]

    def _ask(self, calls: list[Call]) -> list[Reply]:
        raise NotImplementedError

    def close(self) -> None:
        """Let go of what the partitions hold."""


class Local(Cluster):
    """All partitions in this process, one after the other: for tests, and to try things."""

    def __init__(self, sources: Sequence[BagSource], device: str | None = None):
        super().__init__()
        self.partitions = [Partition(source, device=device) for source in sources]
        self.size = len(self.partitions)

    def _ask(self, calls: list[Call]) -> list[Reply]:
        return [answer(partition, call) for partition, call in zip(self.partitions, calls)]


def nbytes(value: Any) -> int:
    """Bytes of the arrays in a call or an answer."""
    if isinstance(value, Tensor | np.ndarray):
        return int(value.nbytes)
    if isinstance(value, tuple | list):
        return sum(map(nbytes, value))
    if dataclasses.is_dataclass(value):
        return sum(map(nbytes, vars(value).values()))
    return 8
