"""A sweep in one kernel, for GPUs: H comes from memory once.

The plain pass (pieces.Chunk.pull) reads H twice, for mu = c + H w and for H'P(E - c), and some
twenty vectors in between; fast/fused_pass.py says how a kernel goes about it. Of E - c = (mu - c) +
(E - mu) it sums the second part alone, since W'(mu - c) = W'H w = (R - I) w. With M columns of four
bytes the floor is 4 N M bytes over the bandwidth. The sweeps are captured as a CUDA graph, so that
nothing is launched from Python between them.

`advance` is the fast twin of the loop in solvers.sweeps; it returns None where it does not
apply: no Triton (it comes with torch's CUDA builds), a likelihood without compiled loops, instances
with many neighbours, numbers that leave its range.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from gpmil.coupling.operator import Precision
from gpmil.fast import ring
from gpmil.fast.fused_pass import ROWS, WARPS, available, power_of_two, programs
from gpmil.inference.pieces import Chunk, Piece

MOST_NEIGHBOURS = 8


class Neighbours(NamedTuple):
    """P as its diagonal, and of every instance the same number of weighted neighbours."""

    diagonal: Float[Tensor, " n"]
    other: Int[Tensor, "n k"]
    weight: Float[Tensor, "n k"]  # lambda A; zero where there are fewer

    def in_few_bytes(self) -> "Neighbours":
        """In 32 bits."""
        return Neighbours(self.diagonal.float(), self.other.int(), self.weight.float())


def neighbours(precision: Precision | None, like: Float[Tensor, " n"]) -> Neighbours | None:
    """The rows of P side by side; None where some row is too long."""
    n = len(like)
    own = torch.arange(n, device=like.device)
    if precision is None:
        return Neighbours(torch.ones_like(like), own[:, None], torch.zeros_like(like)[:, None])
    start, column = precision.neighbours.crow_indices(), precision.neighbours.col_indices()
    count = start.diff()
    k = int(count.max())
    if k > MOST_NEIGHBOURS:
        return None
    place = torch.arange(len(column), device=like.device)
    row = own.repeat_interleave(count)
    index = own[:, None].repeat(1, k)
    weight = torch.zeros(n, k, dtype=torch.float64, device=like.device)
    slot = place - start[:-1].repeat_interleave(count)
    index[row, slot], weight[row, slot] = column, precision.neighbours.values()
    return Neighbours(precision.diagonal, index, weight)


class _Launch(NamedTuple):
    """One chunk, ready for the kernel."""

    chunk: Chunk
    near: Neighbours
    positive: Tensor
    scratch: Float[Tensor, "two n"]
    partial: Float[Tensor, "programs M"]
    log_z: Float[Tensor, " programs"]
    kernel: ring.Kernel | None  # else Triton's

    def run(self, w: Tensor, c: Float[Tensor, " 1"]) -> None:
        """sum_b log Z_b and W'(E - mu), summed over the bags of every program."""
        from gpmil.fast import fused_kernel

        H, group, bags = self.chunk.H, self.chunk.group, len(self.positive)
        given = (
            H, group.sigma, w if self.kernel else w.to(H.dtype), *self.near, group.offsets,
            self.positive, group.largest_first, *self.scratch, self.partial, self.log_z, c, bags,
        )  # fmt: skip
        if self.kernel is None:
            M, near = H.shape[1], self.near.other.shape[1]
            fused_kernel.sweep[(len(self.partial),)](
                *given, M, power_of_two(M), ROWS, 32 * WARPS, near, num_warps=WARPS
            )
        else:
            self.kernel.launch(bags, *given)


def launched(piece: Chunk, near: Neighbours) -> _Launch:
    """Some bags with their P, and room for what the kernel leaves."""
    H, group = piece.H, piece.group
    bags, M = len(group.positive), H.shape[1]
    kernel = ring.serves(H, "sweep", near.other.shape[1])
    G = programs(bags, H.device) if kernel is None else kernel.parts(bags)
    scratch, partial, log_z = (
        group.sigma.new_empty(size) for size in ((2, len(group.sigma)), (G, M), (G,))
    )
    near = near if kernel is None else near.in_few_bytes()
    return _Launch(piece, near, group.positive.to(torch.int8), scratch, partial, log_z, kernel)


def _launches(pieces: Sequence[Piece]) -> list[_Launch] | None:
    made = []
    for piece in pieces:
        if not isinstance(piece, Chunk) or piece.loop is None or not piece.H.is_contiguous():
            return None
        near = neighbours(piece.group.precision, piece.group.sigma)
        if near is None:
            return None
        made.append(launched(piece, near))
    return made


def _joined(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)


class Sweeper:
    """w -> R^-1 W'(E(w) - c), everything in place."""

    def __init__(
        self, launches: list[_Launch], chol_R: Float[Tensor, "M M"], c: float, sweeps: int
    ):
        self.launches = launches
        self.c = torch.tensor([c], dtype=torch.float64, device=chol_R.device)
        self.inverse = torch.cholesky_inverse(chol_R)
        self.w = torch.zeros_like(chol_R[0])
        self.trace = self.w.new_zeros(sweeps)
        self.done = torch.zeros(1, dtype=torch.int64, device=self.w.device)
        self.beside = torch.cuda.Stream()

    def step(self) -> None:
        """One sweep; the bound at its start goes into the trace."""
        for launch in self.launches:
            launch.run(self.w, self.c)
        here = torch.cuda.current_stream()
        self.beside.wait_stream(here)
        with torch.cuda.stream(self.beside):  # no sum waits for the bound
            log_z = _joined([launch.log_z for launch in self.launches]).sum()
            self.trace.index_copy_(0, self.done, (log_z - self.w @ self.w / 2)[None])
            self.done += 1
        pulled = _joined([launch.partial for launch in self.launches]).sum(0) - self.w
        here.wait_stream(self.beside)
        # R^-1 ((R - I) w + W'(E - mu))
        self.w.addmv_(self.inverse, pulled)

    def reset(self, w: Float[Tensor, " M"]) -> None:
        """Start anew."""
        self.w.copy_(w)
        self.done.zero_()


def advance(
    pieces: Sequence[Piece],
    chol_R: Float[Tensor, "M M"],
    c: float,
    w: Float[Tensor, " M"],
    sweeps: int,
) -> tuple[Float[Tensor, " M"], list[float]] | None:
    """w after so many sweeps and the bound before each; None: take the plain way."""
    if chol_R.device.type != "cuda" or sweeps < 1 or not available():
        return None
    launches = _launches(pieces)
    if launches is None:
        return None
    sweeper = Sweeper(launches, chol_R, c, sweeps)
    replay = _captured(sweeper, w)
    sweeper.reset(w)
    for _ in range(sweeps):
        replay()
    if not torch.isfinite(sweeper.w).all():
        return None
    return sweeper.w.clone(), sweeper.trace.tolist()


def _captured(sweeper: Sweeper, w: Float[Tensor, " M"]) -> Callable[[], None]:
    """The step as a CUDA graph, after one to compile and warm up."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            sweeper.reset(w)
            sweeper.step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    sweeper.reset(w)
    with torch.cuda.graph(graph):
        sweeper.step()
    return graph.replay
