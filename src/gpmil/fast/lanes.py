"""Work on pieces of a cohort side by side, with the same sums whatever the number of threads.

Pieces go to a fixed number of lanes in turn; a lane works through its own in order, and the sums
of the lanes are added in order. One BLAS thread per lane: inside small products more threads only
wait for each other.
"""

import functools
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import ExitStack, contextmanager
from threading import Barrier, Lock, local
from typing import TypeVar

import torch
from threadpoolctl import ThreadpoolController

LANES = 4  # of sums: their number decides the order in which is added
THREADS = 8  # more than this find nothing to do

Piece = TypeVar("Piece")
Sum = TypeVar("Sum")


def in_lanes(
    pieces: Sequence[Piece],
    work: Callable[[Sequence[Piece]], Sum],
    add: Callable[[Sum, Sum], Sum],
    side_by_side: bool = True,
    most: int = LANES,
) -> Sum:
    """`work` on the pieces of every lane, the results added in order of the lanes.

    >>> in_lanes(range(10), sum, lambda a, b: a + b)
    45
    """
    lanes = [pieces[k::most] for k in range(min(most, max(len(pieces), 1)))]
    count = min(_asked_for(), len(lanes), THREADS) if side_by_side else 1
    if count == 1:
        return functools.reduce(add, [work(lane) for lane in lanes])
    grad = torch.is_grad_enabled()  # every thread has its own switch

    def share(first: int) -> list[Sum]:
        with torch.set_grad_enabled(grad):
            return [work(lane) for lane in lanes[first::count]]

    with _STARTING:
        threads = _threads(os.getpid())
    shares = [threads.submit(share, first) for first in range(count)]
    wait(shares)
    done = [one.result() for one in shares]
    return functools.reduce(add, [done[k % count][k // count] for k in range(len(lanes))])


def _asked_for() -> int:
    """How many threads may work here: those that torch has, or had before `few_threads`."""
    return _FEW.asked_for if getattr(_FEW.here, "inside", False) else torch.get_num_threads()


_STARTING = Lock()


@functools.cache
def _threads(process: int) -> ThreadPoolExecutor:
    """The threads of the lanes, one thread inside each of their products, for good.

    torch keeps a number of threads per thread, and one of the process that new threads take over.
    Whoever changed the latter for the time of a pass would change it for every other fit of the
    program, or restore what another had changed. So it is touched once, and not in the thread of
    the caller. A forked process has none of these threads and starts its own.
    """
    started = Barrier(THREADS + 1)

    def begin() -> None:
        torch.get_num_threads()  # torch's first call in a thread takes over that of the process
        torch.set_num_threads(1)
        started.wait()

    with ThreadPoolExecutor(1) as new:
        asked_for = new.submit(torch.get_num_threads).result()
        threads = ThreadPoolExecutor(THREADS, "gpmil-lane", begin)
        for _ in range(THREADS):  # a thread starts when there is work that none is idle for
            threads.submit(lambda: None)
        started.wait()
        new.submit(torch.set_num_threads, asked_for).result()
    return threads


class _Few:
    """Who wants few threads at this time."""

    def __init__(self) -> None:
        self.lock, self.here = Lock(), local()  # here: whether this thread does
        self.inside, self.undo = 0, ExitStack()
        self.single, self.asked_for = 0, 1  # threads that do, and torch's number before the first


_FEW = _Few()


@functools.cache
def _libraries() -> ThreadpoolController:
    """The libraries with threads of their own, which take three milliseconds to look for."""
    return ThreadpoolController()


@contextmanager
def one_blas_thread() -> Iterator[None]:
    """One thread inside products of NumPy and SciPy, whose limit is the process's.

    Lanes work side by side, and call them for small matrices: with two threads in each a fit at
    PANDA size took twice as long. Whoever leaves last lifts the limit.
    """
    with _FEW.lock:
        if not _FEW.inside:
            _FEW.undo.enter_context(_libraries().limit(limits=1, user_api="blas"))
        _FEW.inside += 1
    try:
        yield
    finally:
        with _FEW.lock:
            _FEW.inside -= 1
            if not _FEW.inside:
                _FEW.undo.close()


@contextmanager
def few_threads(most: int = 1) -> Iterator[None]:
    """So many threads at most inside all products, for work that is thousands of small ones.

    Two would wait for each other at each of them, and on a busy machine for a processor as well:
    learning took ten times as long. Of torch every thread has its own limit.
    """
    if getattr(_FEW.here, "inside", False):
        yield
        return
    with _FEW.lock:
        here = torch.get_num_threads()  # the first call in a thread takes over that of the process
        _FEW.asked_for = _FEW.asked_for if _FEW.single else here
        _FEW.single += 1
        torch.set_num_threads(min(most, here))
    _FEW.here.inside = True
    try:
        with one_blas_thread():
            yield
    finally:
        _FEW.here.inside = False
        with _FEW.lock:
            _FEW.single -= 1
            torch.set_num_threads(_FEW.asked_for)
