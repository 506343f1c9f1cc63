"""Partitions as the processes of a torch.distributed group, one per process (torchrun, SLURM).

Rank 0 runs the fit and asks; the others answer until it says that it is done, and get its result.
Only one process decides anything: machines that round differently cannot drift apart and wait
for each other for ever. An error on one rank is raised on all.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from gpmil.distributed.cluster import Call, Cluster, Reply, answer
from gpmil.distributed.partition import Partition

Group = Any  # torch.distributed.ProcessGroup, where torch was built with it


@dataclass(frozen=True)
class Failure:
    """An error on one of the ranks, in words that can travel."""

    is_value_error: bool
    text: str

    def error(self) -> Exception:
        """The error again: bad input stays a ValueError."""
        return (ValueError if self.is_value_error else RuntimeError)(self.text)


@dataclass(frozen=True)
class Outcome:
    """The last message: what every rank returns, or why none does."""

    result: Any = None
    failure: Failure | None = None


class TorchGroup(Cluster):
    """The group as rank 0 sees it."""

    def __init__(self, partition: Partition, group: Group = None):
        super().__init__()
        self.partition, self.group = partition, group
        self.size = dist.get_world_size(group)

    def _ask(self, calls: list[Call]) -> list[Reply]:
        _broadcast(calls, self.group)
        replies: list[Any] = [None] * self.size
        own = _attempt(self.partition, calls[0], 0)
        dist.gather_object(own, replies, dst=_first(self.group), group=self.group)
        for reply in replies:
            if isinstance(reply, Failure):
                raise reply.error()
        return replies


def together(work: Callable[[Cluster], Any], partition: Partition, group: Group = None) -> Any:
    """work(cluster) on rank 0 while the other ranks answer; its result on all of them."""
    if dist.get_rank(group):
        return _serve(partition, group)
    cluster = TorchGroup(partition, group)
    try:
        result = work(cluster)
    except BaseException as error:
        text = str(error) or type(error).__name__
        _broadcast(Outcome(failure=Failure(isinstance(error, ValueError), text)), group)
        raise
    _broadcast(Outcome(result), group)
    cluster.traffic.log(cluster.size)
    return result


def _serve(partition: Partition, group: Group) -> Any:
    rank = dist.get_rank(group)
    while True:
        message = _receive(group)
        if isinstance(message, Outcome):
            if message.failure is not None:
                raise message.failure.error()
            return message.result
        reply = _attempt(partition, message[rank], rank)
        dist.gather_object(reply, None, dst=_first(group), group=group)


def _attempt(partition: Partition, call: Call, rank: int) -> Reply | Failure:
    """The answer, or the error: a rank that just stopped would leave the others waiting."""
    try:
        return answer(partition, call)
    except Exception as error:
        named = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
        return Failure(isinstance(error, ValueError), f"rank {rank}: {named}{error}")


def _broadcast(message: Any, group: Group) -> None:
    dist.broadcast_object_list([message], src=_first(group), group=group)


def _receive(group: Group) -> Any:
    received = [None]
    dist.broadcast_object_list(received, src=_first(group), group=group)
    return received[0]


def _first(group: Group) -> int:
    return 0 if group is None else dist.get_global_rank(group, 0)


def default_group() -> Group:
    """The group of all processes, made from torchrun's environment where there is none yet."""
    if not dist.is_available():
        raise ValueError(
            "this torch was built without torch.distributed: install another build, or fit with "
            "client= and Dask."
        )
    if not dist.is_initialized():
        if "RANK" not in os.environ:
            raise ValueError(
                "no process group: start this program with torchrun (torchrun --nproc-per-node 2 "
                "program.py), or call torch.distributed.init_process_group before."
            )
        if torch.cuda.is_available():
            torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
        dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    return dist.group.WORLD
