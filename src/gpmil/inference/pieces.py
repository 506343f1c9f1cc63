"""The training cohort in pieces, and what each adds to the sums of one pass.

With W the whitened features, H = Sigma W and P = Sigma^-1 = I + lambda C (sparse), a pass needs
H alone: W'x = H'(P x). A piece is some whole bags. Its H lies in memory (`Chunk`), in a file
(`Spilled`), or is computed again for every pass (`Recomputed`); or the piece lies on other
machines altogether (distributed.py).

With H in float32 the sweeps and the second derivatives multiply in float32, chunk by chunk, and
add the chunks in float64; what decides convergence, the gradient, multiplies in float64 as well.
"""

import errno
import functools
import itertools
import logging
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from threading import Lock
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np
import scipy.sparse as sp
import torch
from jaxtyping import Float, Int
from torch import Tensor

from gpmil.coupling import operator as coupling
from gpmil.fast import compiled
from gpmil.fast.lanes import in_lanes
from gpmil.fast.memory import free_memory
from gpmil.moments.coupled import CoupledMoments
from gpmil.moments.truncated import expectations, gradient, moments
from gpmil.process.sparse_gp import SparseGP

logger = logging.getLogger("gpmil")
CHUNK_ROWS = 16384  # rows of H at a time: its vectors are long enough, and H is still in a cache
GPU_CHUNK_ROWS = 2**21  # and on a GPU, which wants more to do at a time
BLOCK_ROWS = 512  # rows of H turned into float64 at a time
SUM_ROWS = 128  # of products added up in float32: more would lose digits
TRACE_PAIRS = 20_000_000  # pairs of instances whose kernel is evaluated for the bound's constant
STORES = ("auto", "memory", "disk", "recompute")
ROOM = 0.7  # of the free memory that H may take


@runtime_checkable
class Piece(Protocol):
    """Some of the cohort, here or elsewhere: what it adds to the sums of one pass."""

    def pull(self, w: Tensor, c: float) -> tuple[float | Tensor, Tensor]:
        """sum_b log Z_b and W'(E - c)."""

    def fixed_point(self, w: Tensor, c: float) -> tuple[float, Tensor, Tensor]:
        """sum_b log Z_b, W'(E - c) and W'D H."""

    def rise(self, w: Tensor, c: float) -> tuple[float, Tensor]:
        """sum_b log Z_b and its gradient."""

    def bound(self, w: Tensor, c: float) -> tuple[float, Tensor, Tensor]:
        """sum_b log Z_b, its gradient and minus its Hessian."""

    def weigh(self, expectation: Tensor, c: float) -> tuple[Tensor]:
        """W'(E - c) for a given E[m] of the whole cohort."""

    def weigh_signs(self, c: float) -> tuple[Tensor]:
        """W'(E - c) for E[m] = 1 in positive bags, -1 in negative ones."""

    def gamma(self, w: Tensor, c: float) -> Tensor:
        """d log Z_b / d mu of every instance."""


@dataclass(frozen=True)
class Chunk:
    """Some whole bags in memory: all that one pass needs of them."""

    H: Float[Tensor, "n M"]  # in the storage dtype
    sigma: Float[Tensor, " n"]
    offsets: Int[Tensor, " b1"]
    positive: Tensor  # (b,) bool
    precision: coupling.Precision | None  # P; None where lambda = 0
    rows: slice
    coupled: CoupledMoments | None  # None: independent patches

    @functools.cached_property
    def row(self) -> Int[Tensor, " n"]:
        """The bag of every instance."""
        sizes = self.offsets.diff()
        return torch.arange(len(sizes), device=sizes.device).repeat_interleave(sizes)

    @property
    def loop(self) -> compiled.Loop | None:
        """The compiled pass over these bags; none where neighbours stay correlated."""
        if self.coupled is not None:
            return None
        return compiled.Loop(self.H, self.sigma, self.offsets, self.positive, self.precision)

    def unsmooth(self, x: Tensor) -> Tensor:
        """P x."""
        return x if self.precision is None else self.precision.apply(x)

    def per_bag(self, x: Float[Tensor, " n"], H: Float[Tensor, "n M"]) -> Float[Tensor, "b M"]:
        """H_b'x_b of every bag: the product of a sparse matrix, a row a bag, with H."""
        columns, x = torch.arange(len(x), device=x.device), stored_like(x, H)
        by_bag = coupling.sparse_rows(self.offsets, columns, x, (len(self.positive), len(x)))
        return (by_bag @ H).double()

    def times(self, w: Float[Tensor, " M"]) -> Float[Tensor, " n"]:
        """H w, in float64 whatever H is stored in."""
        if self.H.dtype == torch.float64 or self.H.is_cuda:
            return self.H.double() @ w
        return torch.cat([block.double() @ w for block in self.H.split(BLOCK_ROWS)])

    def against(self, x: Float[Tensor, " n"]) -> Float[Tensor, " M"]:
        """H'x, in float64 whatever H is stored in."""
        if self.H.dtype == torch.float64 or self.H.is_cuda:
            return self.H.double().mT @ x
        blocks = zip(self.H.split(BLOCK_ROWS), x.split(BLOCK_ROWS))
        return total(H.double().mT @ part for H, part in blocks)

    def against_in_blocks(self, x: Float[Tensor, " n"]) -> Float[Tensor, " M"]:
        """H'x, multiplied in H's own dtype and added up in float64 every few rows."""
        if self.H.dtype == torch.float64:
            return self.H.mT @ x
        even = len(x) - len(x) % SUM_ROWS
        by_block = x[:even].to(self.H.dtype).view(-1, 1, SUM_ROWS)
        out = (by_block @ self.H[:even].unflatten(0, (-1, SUM_ROWS))).double().sum((0, 1))
        return out + self.H[even:].double().mT @ x[even:]

    def gram(self, x: Float[Tensor, " n"]) -> Float[Tensor, "M M"]:
        """H' diag(x) H, multiplied in the storage dtype."""
        return (self.H.mT @ (stored_like(x, self.H)[:, None] * self.H)).double()

    def weigh(self, expectation: Float[Tensor, " N"], c: float) -> tuple[Float[Tensor, " M"]]:
        """W'(E - c) for a given E[m] of the whole cohort."""
        return (self.against(self.unsmooth(expectation[self.rows] - c)),)

    def weigh_signs(self, c: float) -> tuple[Float[Tensor, " M"]]:
        """W'(E - c) for E[m] = 1 in positive bags, -1 in negative ones."""
        signs = torch.where(self.positive, 1.0, -1.0).double().index_select(0, self.row)
        return (self.against(self.unsmooth(signs - c)),)

    def pull(self, w: Float[Tensor, " M"], c: float) -> tuple[float | Tensor, Float[Tensor, " M"]]:
        """sum_b log Z_b and W'(E - c) at mu = c + H w, on a CPU multiplied in H's own dtype."""
        found = None if self.loop is None else self.loop.pull(w, c)
        if found is not None:
            return found
        mu = self.times(w) if self.H.is_cuda else (self.H @ w.to(self.H.dtype)).double()
        mu += c
        log_z: float | Tensor
        if self.coupled is not None:
            E, log_z = self.coupled.expectations(mu)
        else:
            E, each = expectations(mu, self.sigma, self.positive, self.offsets, self.row)
            log_z = each.sum()
        x = self.unsmooth(E.sub_(c))
        return log_z, self.against(x) if self.H.is_cuda else self.against_in_blocks(x)

    def fixed_point(
        self, w: Float[Tensor, " M"], c: float
    ) -> tuple[float, Float[Tensor, " M"], Float[Tensor, "M M"]]:
        """sum_b log Z_b, W'(E - c) and W'D H, D = dE/dmu."""
        H = self.H.double()
        W = self.unsmooth(H)
        mu = c + H @ w
        if self.coupled is not None:
            E, log_z = self.coupled.expectations(mu)
            return log_z, W.mT @ (E - c), self.coupled.slope(W, H)
        m = moments(mu, self.sigma, self.positive, self.offsets, self.row)
        # W'D H = W' diag(slope) H - sum_b (W_b' left_b)(H_b' right_b)'
        slope = W.mT @ (m.slope[:, None] * H)
        slope -= self.per_bag(m.left, W).mT @ self.per_bag(m.right, H)
        return float(m.log_z.sum()), W.mT @ (m.mean - c), slope

    def gamma(self, w: Float[Tensor, " M"], c: float) -> Float[Tensor, " n"]:
        """d log Z_b / d mu at mu = c + H w."""
        mu = c + self.times(w)
        if self.coupled is not None:
            return self.unsmooth(self.coupled.expectations(mu)[0] - mu)  # P (E - mu)
        return moments(mu, self.sigma, self.positive, self.offsets, self.row).gamma

    def rise(self, w: Float[Tensor, " M"], c: float) -> tuple[float, Float[Tensor, " M"]]:
        """sum_b log Z_b and its gradient in w."""
        found = None if self.loop is None else self.loop.rise(w, c)
        if found is not None:
            return found
        mu = self.times(w).add_(c)
        if self.coupled is not None:
            # the gradient of log Z_b in mu is P (E - mu)
            E, log_z = self.coupled.expectations(mu)
            return log_z, self.against(self.unsmooth(E - mu))
        gamma, each = gradient(mu, self.sigma, self.positive, self.offsets, self.row)
        return float(each.sum()), self.against(gamma)

    def bound(
        self, w: Float[Tensor, " M"], c: float
    ) -> tuple[float, Float[Tensor, " M"], Float[Tensor, "M M"]]:
        """sum_b log Z_b, its gradient in w, and minus its Hessian."""
        if self.coupled is not None:
            # gradient of log Z_b in mu: P (E - mu), so that H'P (E - mu) = W'(E - c) - W'H w
            H = self.H.double()
            log_z, pulled, slope = self.fixed_point(w, c)
            WH = self.unsmooth(H).mT @ H
            return log_z, pulled - WH @ w, WH - slope
        m = moments(c + self.times(w), self.sigma, self.positive, self.offsets, self.row)
        # -d2 log Z_b / dw2 = -H_b' diag(curvature) H_b + (H_b' pull)(H_b' pull)'
        pulled = self.per_bag(m.pull, self.H)
        curvature = pulled.mT @ pulled - self.gram(m.curvature)
        return float(m.log_z.sum()), self.against(m.gamma), curvature


def stored_like(x: Float[Tensor, " n"], H: Float[Tensor, "n M"]) -> Float[Tensor, " n"]:
    """Weights of the rows of H in its dtype; what float32 could not add up anyway becomes zero.

    Products with numbers near the smallest of float32 take a CPU ten times as long.
    """
    if H.dtype == torch.float64:
        return x
    return torch.where(x.abs() > 1e-12 * x.abs().max(), x, 0.0).to(H.dtype)


def total(pieces: Iterable[Tensor]) -> Tensor:
    """The sum of some tensors, in order."""
    return functools.reduce(torch.add, pieces)


# --- H, once or again -------------------------------------------------------------------------


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
    coupled: bool

    @property
    def shape(self) -> tuple[int, int]:
        """N and M."""
        return int(self.offsets[-1]), len(self.gp.L)

    @property
    def device(self) -> torch.device:
        """Where the arithmetic is done."""
        return self.gp.L.device

    def smoothed(
        self, part: coupling.Part, x: Float[Tensor, "n d"]
    ) -> tuple[Float[Tensor, "n M"], Float[Tensor, "n M"]]:
        """W and H = Sigma W of one part of the coupling."""
        W = self.gp.whiten(x)
        return W, part.apply(W)


class Gathered(NamedTuple):
    """What the first pass over a cohort leaves, besides H."""

    gram: Float[Tensor, "M M"]  # W' Sigma W = R - I
    trace: float  # sum_b tr(Sigma_b K_bb), or an estimate of it


def gather(source: Source, store: str, every: int | None = None) -> tuple[list[Piece], Gathered]:
    """The pieces of a cohort and the sums of the first pass; `store` says where H is kept.

    `every`: from which columns the trace is taken, see `trace_columns`.
    """
    keep = _KEEPERS[resolve_store(store, source)](source)
    sigma = torch.empty(source.shape[0], dtype=torch.float64, device=source.device)
    every = trace_columns(np.diff(source.offsets)) if every is None else every

    def one_lane(parts: Sequence[Callable[[], coupling.Part]]) -> Gathered:
        gram = torch.zeros_like(source.gp.L)
        trace = gram.new_zeros(())
        for make in parts:
            part = make()
            x = source.inputs(part.rows)
            W, H = source.smoothed(part, x)
            gram += W.mT @ H
            sigma[part.rows] = part.diagonal().sqrt()
            trace += part.trace(x, source.gp.kernel, every)
            keep.put(part.rows, H.to(source.dtype))
        return Gathered(gram, float(trace))

    def add(a: Gathered, b: Gathered) -> Gathered:
        return Gathered(a.gram + b.gram, a.trace + b.trace)

    edges = coupling.Edges.of(source.adjacency, source.device)
    parts = coupling.plan(source.adjacency, source.offsets, source.strength, source.device, edges)
    found = in_lanes(parts, one_lane, add, side_by_side=source.device.type == "cpu")
    pieces = [keep.piece(frame) for frame in _frames(source, sigma, edges)]
    return pieces, Gathered((found.gram + found.gram.mT) / 2, found.trace)


def trace_columns(sizes: Int[np.ndarray, " b"]) -> int:
    """From which columns of K the trace is taken: all, or every so many in a large cohort.

    The trace enters a constant of the bound alone, and would cost more than all the rest.
    """
    pairs = float((sizes.astype(float) ** 2).sum())
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


@dataclass(frozen=True)
class Frame:
    """A chunk but for its H."""

    sigma: Float[Tensor, " n"]
    offsets: Int[Tensor, " b1"]
    positive: Tensor
    precision: coupling.Precision | None
    rows: slice
    coupled: CoupledMoments | None

    def chunk(self, H: Float[Tensor, "n M"]) -> Chunk:
        """With its H."""
        return Chunk(
            H, self.sigma, self.offsets, self.positive, self.precision, self.rows, self.coupled
        )


def _frames(source: Source, sigma: Tensor, edges: coupling.Edges) -> list[Frame]:
    """Whole bags, about CHUNK_ROWS rows together, in the order of the cohort."""
    offsets, device = source.offsets, source.device
    group = offsets[:-1] // (CHUNK_ROWS if device.type == "cpu" else GPU_CHUNK_ROWS)
    starts = np.concatenate([[0], np.flatnonzero(np.diff(group)) + 1, [len(group)]])
    frames = []
    for first, last in itertools.pairwise(starts):
        rows = slice(int(offsets[first]), int(offsets[last]))
        joined = source.strength > 0 and (
            source.adjacency.indptr[rows.stop] > source.adjacency.indptr[rows.start]
        )
        starts_here = offsets[first : last + 1] - offsets[first]
        labels = source.positive[first:last]
        frames.append(
            Frame(
                sigma[rows],
                torch.from_numpy(starts_here).to(device),
                torch.from_numpy(labels).to(device),
                coupling.Precision.of(edges, rows, source.strength) if joined else None,
                rows,
                CoupledMoments(
                    coupling.block(source.adjacency, rows),
                    starts_here,
                    labels,
                    source.strength,
                    device,
                )
                if source.coupled and joined
                else None,
            )
        )
    return frames


class _Keeper:
    """Where H goes as it is computed, and the pieces that find it there again."""

    def __init__(self, source: Source):
        raise NotImplementedError

    def put(self, rows: Tensor, H: Tensor) -> None:
        raise NotImplementedError

    def piece(self, frame: Frame) -> Piece:
        raise NotImplementedError


class _Memory(_Keeper):
    def __init__(self, source: Source):
        self.H = torch.empty(source.shape, dtype=source.dtype, device=source.device)

    def put(self, rows: Tensor, H: Tensor) -> None:
        self.H[rows] = H

    def piece(self, frame: Frame) -> Piece:
        return frame.chunk(self.H[frame.rows])


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

    def piece(self, frame: Frame) -> Piece:
        return Spilled(frame, self)

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

    def piece(self, frame: Frame) -> Piece:
        return Recomputed(frame, self.source)


_KEEPERS: dict[str, type[_Keeper]] = {
    "memory": _Memory,
    "disk": _File,
    "recompute": _Nowhere,
}


class _Deferred:
    """A piece whose chunk is made for the pass and let go."""

    frame: Frame

    @property
    def coupled(self) -> CoupledMoments | None:
        """The truncated moments, where neighbours stay correlated."""
        return self.frame.coupled

    def chunk(self) -> Chunk:
        """The chunk, H and all."""
        raise NotImplementedError

    def pull(self, w: Tensor, c: float) -> tuple[float | Tensor, Tensor]:
        """As `Chunk.pull`."""
        return self.chunk().pull(w, c)

    def fixed_point(self, w: Tensor, c: float) -> tuple[float, Tensor, Tensor]:
        """As `Chunk.fixed_point`."""
        return self.chunk().fixed_point(w, c)

    def rise(self, w: Tensor, c: float) -> tuple[float, Tensor]:
        """As `Chunk.rise`."""
        return self.chunk().rise(w, c)

    def bound(self, w: Tensor, c: float) -> tuple[float, Tensor, Tensor]:
        """As `Chunk.bound`."""
        return self.chunk().bound(w, c)

    def weigh(self, expectation: Tensor, c: float) -> tuple[Tensor]:
        """As `Chunk.weigh`."""
        return self.chunk().weigh(expectation, c)

    def weigh_signs(self, c: float) -> tuple[Tensor]:
        """As `Chunk.weigh_signs`."""
        return self.chunk().weigh_signs(c)

    def gamma(self, w: Tensor, c: float) -> Tensor:
        """As `Chunk.gamma`."""
        return self.chunk().gamma(w, c)


@dataclass(frozen=True)
class Spilled(_Deferred):
    """A piece whose H lies in a file."""

    frame: Frame
    file: _File

    def chunk(self) -> Chunk:
        """H as it is in the file."""
        return self.frame.chunk(self.file.read(self.frame.rows))


@dataclass(frozen=True)
class Recomputed(_Deferred):
    """A piece whose H is computed for every pass."""

    frame: Frame
    source: Source

    def chunk(self) -> Chunk:
        """H computed anew from the features."""
        source, frame = self.source, self.frame
        H = torch.empty(len(frame.sigma), source.shape[1], dtype=source.dtype, device=source.device)
        local, offsets = coupling.block(source.adjacency, frame.rows), frame.offsets.cpu().numpy()
        for part in coupling.parts(local, offsets, source.strength, source.device):
            x = source.inputs(part.rows + frame.rows.start)
            H[part.rows] = source.smoothed(part, x)[1].to(source.dtype)
        return frame.chunk(H)
