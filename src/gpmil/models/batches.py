"""Bags of a cohort in batches for a network: whole bags, one after the other, nothing padded."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import repeat
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int, Num
from torch import Tensor

from gpmil.coupling.operator import instance_rows
from gpmil.process import features
from gpmil.process.features import FeatureMap

ROWS = 2**15  # instances predicted at a time, unless one bag has more
MOVED = 2**20  # instances whose numbers go to the device at a time


@dataclass(frozen=True)
class Batch:
    """Some bags, one after the other."""

    x: Float[Tensor, "n d"]
    segment: Int[Tensor, " n"]  # the place in the batch of each instance's bag
    bags: Int[np.ndarray, " b"]  # their numbers in the cohort
    chosen: Int[Tensor, " b"]  # the same, where x is
    smooth: Callable[[Tensor, Tensor], Tensor] | None = None  # scores over neighbours, where asked

    def __len__(self) -> int:
        return len(self.bags)


class Inputs:
    """Rows of features as the network sees them.

    Mapped once and kept where they fit, else row by row when asked for (a memory-mapped file).
    """

    def __init__(
        self,
        raw: Num[np.ndarray, "N D"],
        feature_map: FeatureMap,
        dtype: torch.dtype,
        device: torch.device,
        room: float = 0,
    ):
        self.raw, self.feature_map, self.dtype, self.device = raw, feature_map, dtype, device
        self.kept: Tensor | None = None
        width = raw.shape[1] if feature_map.components is None else len(feature_map.components)
        if len(raw) * width * dtype.itemsize <= room:
            self.kept = torch.empty(len(raw), width, dtype=dtype, device=device)
            for start in range(0, len(raw), features.ROWS):
                rows = slice(start, start + features.ROWS)
                self.kept[rows] = feature_map(raw[rows], device).to(dtype)

    def index(self, rows: Int[np.ndarray, " n"]) -> Int[Tensor, " n"]:
        """Numbers of instances, where they are looked up."""
        return torch.from_numpy(rows).to("cpu" if self.kept is None else self.device)

    def take(self, rows: Int[Tensor, " n"]) -> Float[Tensor, "n d"]:
        """The inputs of some instances, by their `index`."""
        if self.kept is not None:
            return self.kept.index_select(0, rows)
        return self.feature_map(self.raw[rows.numpy()], self.device).to(self.dtype)


@dataclass(frozen=True)
class BatchSource:
    """The bags of a cohort, to be taken in batches."""

    inputs: Inputs
    offsets: Int[np.ndarray, " edges"]
    graphs: Any = None  # of neighbours, for a network that uses them

    def batches(self, parts: Sequence[np.ndarray]) -> Iterator[Batch]:
        """A batch of each part, its bags in the order given.

        What batches are made of goes to the device for many of them at a time: one copy per batch
        would take longer than a step of a small network.
        """
        rows = np.array([bag_sizes(self.offsets, part).sum() for part in parts], dtype=np.int64)
        for few in _cut(rows, MOVED):
            yield from self._moved([parts[k] for k in few])

    def runs(self, bags: Int[np.ndarray, " b"], rows: int = ROWS) -> Iterator[Batch]:
        """Those bags in batches of about `rows` instances."""
        return self.batches([bags[few] for few in _cut(bag_sizes(self.offsets, bags), rows)])

    def _moved(self, parts: Sequence[np.ndarray]) -> Iterator[Batch]:
        bags, counts = np.concatenate(parts), [len(part) for part in parts]
        sizes = bag_sizes(self.offsets, bags)
        place = np.concatenate([np.arange(n) for n in counts])
        rows = [int(bag_sizes(self.offsets, part).sum()) for part in parts]
        device = self.inputs.device
        pieces = zip(
            parts,
            torch.from_numpy(bags).to(device).split(counts),
            torch.from_numpy(np.repeat(place, sizes)).to(device).split(rows),
            self.inputs.index(instance_rows(self.offsets, bags)).split(rows),
            repeat(None, len(parts)) if self.graphs is None else self.graphs.batches(parts),
            strict=True,
        )
        for part, chosen, segment, index, smooth in pieces:
            yield Batch(self.inputs.take(index), segment, part, chosen, smooth)


def bag_sizes(
    offsets: Int[np.ndarray, " edges"], bags: Int[np.ndarray, " b"]
) -> Int[np.ndarray, " b"]:
    """The number of instances of some bags."""
    return offsets[bags + 1] - offsets[bags]


def _cut(sizes: Int[np.ndarray, " k"], rows: int) -> list[np.ndarray]:
    """0, 1, ..., k - 1 in runs of about `rows` together; none where there is nothing."""
    if not len(sizes):
        return []
    ends = np.flatnonzero(np.diff((np.cumsum(sizes) - 1) // rows)) + 1
    return np.split(np.arange(len(sizes)), ends)
