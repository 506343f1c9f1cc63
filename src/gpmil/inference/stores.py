"""Where H lies: in memory, in a temporary file, or nowhere and computed again for every pass.

`gather` makes the first pass over a cohort. It computes H = Sigma W part by part of the coupling,
puts it where `store` says, and leaves the pieces that find it there again.
"""

import errno
import itertools
import logging
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from threading import Lock
from typing import Any, NamedTuple

import numpy as np
import scipy.sparse as sp
import torch
from jaxtyping import Float, Int
from torch import Tensor

from gpmil.coupling import operator as coupling
from gpmil.fast import compiled, products
from gpmil.fast.lanes import in_lanes
from gpmil.fast.memory import free_memory, in_lines
from gpmil.inference.pieces import Chunk, Deferred, Piece
from gpmil.moments.likelihood import Family, Group, Likelihood, downdate
from gpmil.process.novelty import Watched
from gpmil.process.sparse_gp import SparseGP

logger = logging.getLogger("gpmil")
CHUNK_ROWS = 16384  # rows of H at a time: its vectors are long enough, and H is still in a cache
GPU_CHUNK_ROWS = 2**21  # and on a GPU, which wants more to do at a time
TRACE_PAIRS = 20_000_000  # pairs of instances whose kernel is evaluated for the bound's constant
OF_LARGE = 5  # times as much for a pair in a large bag, where columns of Sigma are formed for it
STORES = ("auto", "memory", "disk", "recompute")
ROOM = 0.7  # of the free memory that H may take


@dataclass(frozen=True)
class Source:
    """Everything H is computed from; `inputs(rows)` gives the kernel's inputs."""

    gp: SparseGP
    inputs: Callable[[Int[Tensor, " n"]], Float[Tensor, "n d"]]
    adjacency: sp.csr_array
    offsets: Int[np.ndarray, " b1"]
    positive: np.ndarray
    strength: float
    dtype: torch.dtype
    likelihood: Family
    known: Int[np.ndarray, " N"] | None = None  # labels of instances, -1 where unknown
    residual: bool = False  # whether the likelihood asks for diag(Kxx - W W')
    watched: Watched | None = None  # rows of W that are kept for novelty

    @property
    def shape(self) -> tuple[int, int]:
        """N and M."""
        return int(self.offsets[-1]), self.gp.n_weights

    @property
    def device(self) -> torch.device:
        """Where the arithmetic is done."""
        return self.gp.L.device

    def smoothed(
        self,
        part: coupling.Part,
        x: Float[Tensor, "n d"],
        sizes: Int[Tensor, " b"],
        place: Float[Tensor, "N M"] | None = None,
    ) -> tuple[Float[Tensor, "n M"], Float[Tensor, "n M"] | None, Float[Tensor, "M M"]]:
        """W, H = Sigma W (None: it lies in its place) and W'H of a part; `sizes` of its bags."""
        W, alone = self.gp.whiten(x), self.gp.context is None
        gram = smoothed_into(part, W, sizes, place) if alone and place is not None else None
        if gram is not None:
            return W, None, gram
        halved = part.halved(W) if alone else None
        if halved is not None:
            return W, halved[1], products.gram(halved[0])
        H = part.apply(W)
        if self.gp.context is not None:
            v = self.gp.context.columns(x, sizes)  # Sigma 1 v' = 1 v'
            W, H = torch.cat([W, v], 1), torch.cat([H, v], 1)
        return W, H, W.mT @ H


def smoothed_into(
    part: coupling.Part, W: Float[Tensor, "n m"], sizes: Int[Tensor, " b"], H: Float[Tensor, "N M"]
) -> Float[Tensor, "M M"] | None:
    """W'Sigma W of a part of the coupling, Sigma W in its rows of H; None where not compiled."""
    loop = compiled.smoothed()
    factor = part.factor_for(W) if isinstance(part, coupling.Dense) else None
    if loop is None or factor is None:
        return None
    first = part.rows[sizes.cumsum(0) - sizes]
    gram = W.new_zeros(W.shape[1], W.shape[1])
    loop.smooth(*factor, W.numpy(), first.numpy(), H.numpy(), gram.numpy())
    return gram


class Gathered(NamedTuple):
    """What the first pass over a cohort leaves, besides H."""

    gram: Float[Tensor, "M M"]  # sum_b W_b'Q_b W_b = R - I, Q = Sigma (Sigma + tau^2 11')^-1 Sigma
    trace: float  # sum_b tr(Q_b K_bb), or an estimate of it


Sums = tuple[Float[Tensor, "M M"], Float[Tensor, ""]]  # both, on the way


def gather(source: Source, store: str, every: int | None = None) -> tuple[list[Piece], Gathered]:
    """The pieces of a cohort and the sums of the first pass; `store` says where H is kept.

    `every`: from which columns the trace is taken, see `trace_columns`.
    """
    keep = _KEEPERS[resolve_store(store, source)](source)
    sigma = torch.empty(source.shape[0], dtype=torch.float64, device=source.device)
    residual = torch.empty_like(sigma) if source.residual else None
    every = trace_columns(np.diff(source.offsets)) if every is None else every

    def one_lane(parts: Sequence[Callable[[], coupling.Part]]) -> Sums:
        gram = source.gp.L.new_zeros(source.gp.n_weights, source.gp.n_weights)
        trace = gram.new_zeros(())
        for make in parts:
            part = make()
            x = source.inputs(part.rows)
            sizes = coupling.sent(np.diff(source.offsets)[part.bags], source.device)
            W, H, own = source.smoothed(part, x, sizes, keep.place)
            gram += own
            if source.watched is not None:
                source.watched.see(part.rows, x, W)
            sigma[part.rows] = part.diagonal().sqrt()
            if residual is not None:
                left = source.gp.kernel.diagonal(x) - W.square().sum(1)
                residual[part.rows] = left.clamp(min=0)
            trace += part.trace(x, source.gp.kernel, every)
            if source.gp.context is not None:  # tr(Sigma 11') = n
                trace += source.gp.context.variance * len(x)
            if source.gp.effect:
                less = _shared(source.gp, x, W, sizes, every)
                gram, trace = gram - less[0], trace - less[1]
            if H is not None:
                keep.put(part.rows, H.to(source.dtype))
        return gram, trace

    def add(a: Sums, b: Sums) -> Sums:
        return a[0] + b[0], a[1] + b[1]

    edges = coupling.Edges.of(source.adjacency, source.device)
    parts = coupling.plan(source.adjacency, source.offsets, source.strength, source.device, edges)
    gram, trace = in_lanes(parts, one_lane, add, side_by_side=source.device.type == "cpu")
    groups = _groups(source, sigma, residual, edges)
    pieces = [keep.piece(source.likelihood(group)) for group in groups]
    # a number at the very end: a GPU would be waited for
    return pieces, Gathered((gram + gram.mT) / 2, float(trace))


def _shared(
    gp: SparseGP,
    x: Float[Tensor, "n d"],
    W: Float[Tensor, "n M"],
    sizes: Int[Tensor, " b"],
    every: int,
) -> Sums:
    """What the slide effect takes from both sums: Q = Sigma - k 11' (Sherman-Morrison)."""
    share = downdate(gp.effect, sizes)
    own = torch.arange(len(sizes), device=W.device).repeat_interleave(sizes)
    totals = W.new_zeros(len(sizes), W.shape[1]).index_add_(0, own, W)  # W_b'1
    trace = share.new_zeros(())
    counts = sizes.cpu().numpy()
    for some in coupling.batches(np.arange(len(counts)), counts, W.device):
        bags = torch.from_numpy(some).to(W.device)
        trace += share[bags] @ _sums_of_kernel(gp, x, sizes, bags, int(counts[some].max()), every)
    if gp.context is not None:
        trace += gp.context.variance * (share @ sizes.square().double())
    return totals.mT @ (share[:, None] * totals), trace


def _sums_of_kernel(
    gp: SparseGP,
    x: Float[Tensor, "n d"],
    sizes: Int[Tensor, " b"],
    bags: Int[Tensor, " k"],
    largest: int,
    every: int,
) -> Float[Tensor, " k"]:
    """1'K_b 1 of some bags, side by side; from every so many columns, scaled up."""
    within = torch.arange(largest, device=x.device)
    mask, first = within < sizes[bags, None], (sizes.cumsum(0) - sizes)[bags]
    padded = x[torch.where(mask, first[:, None] + within, 0)]
    K = gp.kernel(padded[:, ::every], padded)
    taken = mask[:, ::every]
    found = torch.where(taken[:, :, None] & mask[:, None], K, 0.0).sum((1, 2))
    return found * sizes[bags] / taken.sum(1)


def trace_columns(sizes: Int[np.ndarray, " b"]) -> int:
    """From which columns of K the trace is taken: all, or every so many in a large cohort.

    The trace enters a constant of the bound alone, and would cost more than all the rest.
    """
    cost = np.where(sizes > coupling.DENSE_LIMIT, OF_LARGE, 1.0)
    pairs = float(cost @ sizes.astype(float) ** 2)
    every = max(1, round(pairs / TRACE_PAIRS))
    if every > 1:
        logger.info("the constant of the bound is estimated from one instance in %d", every)
    return every


def resolve_store(store: str, source: Source) -> str:
    """Where H goes; "auto" keeps it in memory if it fits."""
    if store != "auto":
        return store
    N, M = source.shape
    needed = N * M * source.dtype.itemsize
    free = free_memory(source.device)
    if free is None or needed <= ROOM * free:
        return "memory"
    logger.info(
        "H takes %.1f GB and %.1f GB are free: it is computed again in every pass "
        "(store='disk' keeps it in a file)", needed / 1e9, free / 1e9,
    )  # fmt: skip
    return "recompute"


def _groups(
    source: Source, sigma: Tensor, residual: Tensor | None, edges: coupling.Edges
) -> Iterator[Group]:
    """Whole bags, about CHUNK_ROWS rows together, in the order of the cohort."""
    offsets, device, graph = source.offsets, source.device, source.adjacency
    known = None if source.known is None else torch.tensor(source.known, device=device)
    group = offsets[:-1] // (CHUNK_ROWS if device.type == "cpu" else GPU_CHUNK_ROWS)
    starts = np.concatenate([[0], np.flatnonzero(np.diff(group)) + 1, [len(group)]])
    for first, last in itertools.pairwise(starts):
        rows = slice(int(offsets[first]), int(offsets[last]))
        joined = source.strength > 0 and graph.indptr[rows.stop] > graph.indptr[rows.start]
        yield Group(
            sigma[rows],
            torch.from_numpy(offsets[first : last + 1] - offsets[first]).to(device),
            torch.from_numpy(source.positive[first:last]).to(device),
            coupling.Precision.of(edges, rows, source.strength) if joined else None,
            rows,
            source.strength,
            graph,
            source.gp.effect,
            None if known is None else known[rows],
            None if residual is None else residual[rows],
        )


class _Keeper:
    """Where H goes as it is computed, and the pieces that find it there again."""

    place: Tensor | None = None  # H itself, where a loop can write to it: in float64 on a CPU

    def __init__(self, source: Source):
        raise NotImplementedError

    def put(self, rows: Tensor, H: Tensor) -> None:
        raise NotImplementedError

    def piece(self, likelihood: Likelihood) -> Piece:
        raise NotImplementedError


class _Memory(_Keeper):
    def __init__(self, source: Source):
        if source.device.type == "cpu":
            self.H = in_lines(source.shape, source.dtype)
            self.place = self.H if source.dtype == torch.float64 else None
        else:
            self.H = torch.empty(source.shape, dtype=source.dtype, device=source.device)

    def put(self, rows: Tensor, H: Tensor) -> None:
        self.H[rows] = H

    def piece(self, likelihood: Likelihood) -> Piece:
        return Chunk(self.H[likelihood.group.rows], likelihood)


class _File(_Keeper):
    """H in a temporary file that vanishes with the last piece; read and written, not mapped."""

    def __init__(self, source: Source):
        self.columns, self.dtype, self.device = source.shape[1], source.dtype, source.device
        self.width = self.columns * self.dtype.itemsize
        self.lock = Lock()
        self.bytes = source.shape[0] * self.width
        with self.room():
            file = tempfile.TemporaryFile(prefix="gpmil-", buffering=0)  # noqa: SIM115
            self.file = file  # lives with the pieces
            _reserve(file, max(1, self.bytes))

    @contextmanager
    def room(self) -> Iterator[None]:
        """A full disk is said in the words of the setting."""
        try:
            yield
        except OSError as error:
            raise ValueError(
                f"store='disk' needs {self.bytes / 1e9:.1f} GB in {tempfile.gettempdir()}: "
                f"{error.strerror}. Set TMPDIR to a larger disk, or use store='recompute'."
            ) from error

    def put(self, rows: Tensor, H: Tensor) -> None:
        order = rows.argsort()
        where, H = rows[order].cpu().numpy(), H[order].cpu()
        cuts = np.flatnonzero(np.diff(where) != 1) + 1
        with self.room():
            for run, block in zip(np.split(where, cuts), H.tensor_split(cuts.tolist())):
                view = block.contiguous().numpy().data.cast("B")
                self._all(self._write, view, int(run[0]) * self.width)

    def piece(self, likelihood: Likelihood) -> Piece:
        return Spilled(likelihood, self)

    def read(self, rows: slice) -> Float[Tensor, "n M"]:
        H = torch.empty(rows.stop - rows.start, self.columns, dtype=self.dtype)
        self._all(self._read, H.numpy().data.cast("B"), rows.start * self.width)
        return H.to(self.device)

    def _all(self, move: Callable[[memoryview, int], int], view: memoryview, start: int) -> None:
        done = 0
        while done < len(view):
            moved = move(view[done:], start + done)
            if not moved:
                raise OSError(errno.EIO, "the temporary file of store='disk' ends too early")
            done += moved

    def _read(self, view: memoryview, start: int) -> int:
        if hasattr(os, "preadv"):
            return os.preadv(self.file.fileno(), [view], start)
        with self.lock:  # one position per file, and lanes read side by side
            self.file.seek(start)
            return self.file.readinto(view)

    def _write(self, view: memoryview, start: int) -> int:
        if hasattr(os, "pwrite"):
            return os.pwrite(self.file.fileno(), view, start)
        with self.lock:
            self.file.seek(start)
            return self.file.write(view)


def _reserve(file: Any, size: int) -> None:
    """Claim the room before the work; where that cannot be done (macOS, Windows), look for it."""
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(file.fileno(), 0, size)
        return
    if shutil.disk_usage(tempfile.gettempdir()).free < size:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    file.truncate(size)


class _Nowhere(_Keeper):
    def __init__(self, source: Source):
        self.source = source

    def put(self, rows: Tensor, H: Tensor) -> None:
        pass

    def piece(self, likelihood: Likelihood) -> Piece:
        return Recomputed(likelihood, self.source)


_KEEPERS: dict[str, type[_Keeper]] = {
    "memory": _Memory,
    "disk": _File,
    "recompute": _Nowhere,
}


@dataclass(frozen=True)
class Spilled(Deferred):
    """A piece whose H lies in a file."""

    likelihood: Likelihood
    file: _File

    def chunk(self) -> Chunk:
        """H as it is in the file."""
        return Chunk(self.file.read(self.likelihood.group.rows), self.likelihood)


@dataclass(frozen=True)
class Recomputed(Deferred):
    """A piece whose H is computed for every pass."""

    likelihood: Likelihood
    source: Source
    anew = True

    def chunk(self) -> Chunk:
        """H computed anew from the features."""
        source, group = self.source, self.likelihood.group
        H = torch.empty(len(group.sigma), source.shape[1], dtype=source.dtype, device=source.device)
        local, offsets = coupling.block(source.adjacency, group.rows), group.offsets.cpu().numpy()
        sizes = group.offsets.diff()
        for part in coupling.parts(local, offsets, source.strength, source.device):
            x = source.inputs(part.rows + group.rows.start)
            _, own, _ = source.smoothed(part, x, sizes[part.bags])
            assert own is not None  # no place was given
            H[part.rows] = own.to(source.dtype)
        return Chunk(H, self.likelihood)
