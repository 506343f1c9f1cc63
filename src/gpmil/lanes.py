"""Work on pieces of a cohort side by side, with the same sums whatever the number of threads.

Pieces go to a fixed number of lanes in turn; a lane works through its own in order, and the sums
of the lanes are added in order. One BLAS thread a lane: inside small products more threads only
wait for each other.
"""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TypeVar

import torch

LANES = 4  # more threads than this find nothing to do

Piece = TypeVar("Piece")
Sum = TypeVar("Sum")


@contextmanager
def one_thread_each() -> Iterator[int]:
    """One thread inside every product; gives the number of threads that were allowed."""
    allowed = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield allowed
    finally:
        torch.set_num_threads(allowed)


def in_lanes(
    pieces: Sequence[Piece],
    work: Callable[[Sequence[Piece]], Sum],
    add: Callable[[Sum, Sum], Sum],
    side_by_side: bool = True,
) -> Sum:
    """`work` on the pieces of every lane, the results added in order of the lanes.

    >>> in_lanes(range(10), sum, lambda a, b: a + b)
    45
    """
    lanes = [pieces[k::LANES] for k in range(min(LANES, max(len(pieces), 1)))]
    if not side_by_side or len(lanes) == 1:
        return _added([work(lane) for lane in lanes], add)
    with one_thread_each() as allowed:
        if allowed == 1:
            return _added([work(lane) for lane in lanes], add)
        with ThreadPoolExecutor(min(allowed, len(lanes))) as pool:
            grad = torch.is_grad_enabled()  # every thread starts with its own switch

            def quietly(lane: Sequence[Piece]) -> Sum:
                with torch.set_grad_enabled(grad):
                    return work(lane)

            return _added(list(pool.map(quietly, lanes)), add)


def _added(sums: list[Sum], add: Callable[[Sum, Sum], Sum]) -> Sum:
    total = sums[0]
    for one in sums[1:]:
        total = add(total, one)
    return total
