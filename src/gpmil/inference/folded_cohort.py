"""The cohort that settings are learned from: bags in folds, made ready for many settings.

What does not depend on the settings is computed once and kept: distances between instances and
inducing points. With the bags in the order of their folds (`in_folds`) the rows of a fold lie side
by side, and those of all others do in two copies of the cohort, one behind the other: no fold needs
a copy of its own.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import scipy.sparse as sp
import torch
from gpytorch.kernels import Kernel as GPyTorchKernel
from jaxtyping import Bool, Float, Int, Num, Shaped
from torch import Tensor

from gpmil.coupling.operator import instance_rows
from gpmil.coupling.strengths import Smoothing
from gpmil.data.bags import Bags
from gpmil.data.folds import fair_folds
from gpmil.process.kernels import Formula, formula_of

FOLDS = 5
CONVERTED = 2**24  # numbers converted to float64 at once: 128 MB
BLOCK = 8192  # rows whose distances are computed at once


@dataclass(frozen=True)
class StoredRows:
    """Kernel inputs that are made from stored features when they are asked for.

    Features stay where they are, in their own dtype: float64 copies of a whole cohort would take
    four times the room of float16 ones.
    """

    features: Num[np.ndarray, "F D"]
    rows: Int[np.ndarray, " N"]
    inputs: Callable[[np.ndarray], Tensor]
    shape: tuple[int, int]  # N, d
    device: torch.device

    def __getitem__(self, i: Int[Tensor, " n"]) -> Float[Tensor, "n d"]:
        """Some of the rows."""
        return self.inputs(self.features[self.rows[i.cpu().numpy()]]).to(self.device)

    def __len__(self) -> int:
        return self.shape[0]


class SlidesInContext(NamedTuple):
    """What the slide context sees of the bags, and its inducing points."""

    z: Float[Tensor, "B d"]
    points: Float[Tensor, "m d"]


class Fold(NamedTuple):
    """The bags of one fold, the rows of one bag after the other."""

    rows: Int[Tensor, " n"] | slice  # of the cohort, or of two copies of it
    offsets: Int[Tensor, " b1"]
    positive: Bool[Tensor, " b"]
    known: Int[Tensor, " n"] | None = None  # labels of instances, -1 where unknown


@dataclass(frozen=True)
class Cohort:
    """A labelled cohort made ready for many settings; `inputs` are what the kernel sees."""

    inputs: Float[Tensor, "N d"] | StoredRows
    inducing: Float[Tensor, "M d"]
    adjacency: sp.csr_array
    offsets: Int[np.ndarray, " b1"]
    positive: Bool[np.ndarray, " B"]
    kernel: str | GPyTorchKernel
    fold: Int[np.ndarray, " B"]  # 0, 1, ...: the bags of a fold are left out together
    context: SlidesInContext | None = None  # None where gamma_s is 0
    groups: Shaped[np.ndarray, " B"] | None = None  # whose bags go together: patients
    known: Int[np.ndarray, " N"] | None = None  # labels of instances, -1 where unknown

    @property
    def device(self) -> torch.device:
        """Where everything is computed."""
        return self.inducing.device

    @property
    def n_bags(self) -> int:
        """B."""
        return len(self.positive)

    @property
    def n_folds(self) -> int:
        """How many fits there are."""
        return 1 + int(self.fold.max())

    @cached_property
    def formula(self) -> Formula:
        """The kernel as a function of what can be kept."""
        return formula_of(self.kernel, self.device)

    @cached_property
    def pairs(self) -> Float[Tensor, "N M"]:
        """What instances have to do with inducing points, distances for most kernels."""
        return torch.cat([self.formula.pairs(x, self.inducing) for x in self.blocks()])

    @cached_property
    def own(self) -> Float[Tensor, " N"]:
        """The same of every instance with itself."""
        return torch.cat([self.formula.own(x) for x in self.blocks()])

    def blocks(self) -> Iterator[Float[Tensor, "n d"]]:
        """The inputs, some thousand rows at a time."""
        for i in torch.arange(len(self.inputs), device=self.device).split(BLOCK):
            yield self.inputs[i]

    @cached_property
    def smoothing(self) -> Smoothing:
        """The coupling of all bags, for any strength."""
        return Smoothing(self.adjacency, self.offsets, self.device)

    @cached_property
    def row(self) -> Int[Tensor, " N"]:
        """The bag of every instance."""
        sizes = torch.from_numpy(np.diff(self.offsets)).to(self.device)
        return torch.arange(self.n_bags, device=self.device).repeat_interleave(sizes)

    @cached_property
    def starts(self) -> Int[Tensor, " b1"]:
        """`offsets` where everything is computed."""
        return torch.tensor(self.offsets, device=self.device)

    @cached_property
    def labels(self) -> Bool[Tensor, " B"]:
        """`positive` where everything is computed."""
        return torch.tensor(self.positive, device=self.device)

    @cached_property
    def told(self) -> Int[Tensor, " N"] | None:
        """`known` where everything is computed."""
        return None if self.known is None else torch.tensor(self.known, device=self.device)

    @cached_property
    def folds(self) -> list[Fold]:
        """The bags fold by fold."""
        found = [self._bags(np.flatnonzero(self.fold == k)) for k in range(self.n_folds)]
        if not self.is_in_folds:
            return found
        return [fold._replace(rows=span) for fold, span in zip(found, self.spans, strict=True)]

    @cached_property
    def others(self) -> list[Fold]:
        """All bags but those of a fold, for every fold."""
        return [self._bags(np.flatnonzero(self.fold != k)) for k in range(self.n_folds)]

    def _bags(self, bags: Int[np.ndarray, " b"]) -> Fold:
        rows = torch.from_numpy(instance_rows(self.offsets, bags)).to(self.device)
        sizes = np.diff(self.offsets)[bags]
        offsets = torch.from_numpy(np.concatenate([[0], np.cumsum(sizes)])).to(self.device)
        known = None if self.told is None else self.told[rows]
        return Fold(rows, offsets, self.labels[torch.from_numpy(bags).to(self.device)], known)

    @cached_property
    def in_folds(self) -> "Cohort":
        """The same with the bags of a fold side by side."""
        if self.is_in_folds:
            return self
        return self.some(np.argsort(self.fold, kind="stable"))

    def as_given(self, by_bag: Shaped[Tensor, " B"]) -> Shaped[Tensor, " B"]:
        """Values of the bags `in_folds` in the order of this cohort."""
        if self.is_in_folds:
            return by_bag
        order = torch.from_numpy(np.argsort(self.fold, kind="stable")).to(self.device)
        return torch.empty_like(by_bag).index_copy(0, order, by_bag)

    def by_fold(self, x: Shaped[Tensor, "N ..."]) -> list[Shaped[Tensor, "n ..."]]:
        """Values of all rows, as those of every fold.

        Bags in the order of their folds are split at once: the adjoint of a slice fills, and adds,
        a matrix as large as x for each of them.
        """
        if not self.is_in_folds:
            return [x[fold.rows] for fold in self.folds]
        return list(x.split([span.stop - span.start for span in self.spans]))

    def placed(self, parts: list[Tensor]) -> Shaped[Tensor, " N"]:
        """Values of the rows of every fold, as those of all rows."""
        found = torch.cat(parts)
        if self.is_in_folds:
            return found
        rows = torch.cat([torch.as_tensor(fold.rows) for fold in self.folds])
        return torch.zeros_like(found).index_copy(0, rows, found)

    @property
    def is_in_folds(self) -> bool:
        """Whether the bags come fold by fold."""
        return bool((np.diff(self.fold) >= 0).all())

    @cached_property
    def spans(self) -> list[slice]:
        """The rows of every fold, bags in the order of their folds."""
        assert self.is_in_folds
        ends = self.offsets[np.searchsorted(self.fold, np.arange(self.n_folds + 1))]
        return [slice(int(a), int(b)) for a, b in pairwise(ends)]

    @cached_property
    def around(self) -> list[Fold]:
        """All bags but those of a fold, from the next one on: rows of the cohort twice over."""
        N, found = int(self.offsets[-1]), []
        for k, own in enumerate(self.spans):
            bags = np.concatenate([np.flatnonzero(self.fold > k), np.flatnonzero(self.fold < k)])
            rest = slice(own.stop % N, own.stop % N + N - (own.stop - own.start))
            found.append(self._bags(bags)._replace(rows=rest))
        return found

    def twice(self, x: Shaped[Tensor, "N ..."]) -> Shaped[Tensor, "n ..."]:
        """Some values of all rows, and behind them those that `around` still asks for."""
        return torch.cat([x, x[: self.spans[-1].start]])

    def once(self, x: Shaped[Tensor, "n ..."]) -> Shaped[Tensor, "N ..."]:
        """The adjoint of `twice`: both copies of a row added up."""
        N = int(self.offsets[-1])
        out = x[:N].clone()
        out[: len(x) - N] += x[N:]
        return out

    def on(self, device: torch.device) -> "Cohort":
        """The same, computed elsewhere."""
        if device.type == self.device.type:
            return self
        stored, context = self.inputs, self.context
        if isinstance(stored, StoredRows):
            inputs: Tensor | StoredRows = replace(stored, device=device)
        else:
            inputs = stored.to(device)
        if context is not None:
            context = SlidesInContext(*(x.to(device) for x in context))
        return replace(self, inputs=inputs, inducing=self.inducing.to(device), context=context)

    def with_kernel(self, kernel: str | GPyTorchKernel) -> "Cohort":
        """The same bags under another kernel."""
        if kernel is self.kernel:
            return self
        return replace(self, kernel=kernel)

    def some(
        self, bags: Int[np.ndarray, " b"], points: Int[np.ndarray, " m"] | None = None
    ) -> "Cohort":
        """Some bags, in their folds, with some of the inducing points or all."""
        rows = instance_rows(self.offsets, bags)
        points = np.arange(len(self.inducing)) if points is None else points
        context = self.context
        if context is not None:
            context = context._replace(z=context.z[torch.from_numpy(bags).to(self.device)])
        return Cohort(
            self._inputs(rows),
            self.inducing[torch.from_numpy(points).to(self.device)],
            self.adjacency[rows][:, rows],
            np.concatenate([[0], np.cumsum(np.diff(self.offsets)[bags])]),
            self.positive[bags],
            self.kernel,
            np.unique(self.fold[bags], return_inverse=True)[1],
            context,
            None if self.groups is None else self.groups[bags],
            None if self.known is None else self.known[rows],
        )

    def _inputs(self, rows: Int[np.ndarray, " n"]) -> Float[Tensor, "n d"] | StoredRows:
        """Those of some rows; many are converted when they are asked for, as before."""
        stored, d = self.inputs, self.inducing.shape[1]
        if isinstance(stored, StoredRows) and len(rows) * d > CONVERTED:
            return replace(stored, rows=stored.rows[rows], shape=(len(rows), d))
        return stored[torch.from_numpy(rows).to(self.device)]


def folded(
    bags: Bags,
    rows: Int[np.ndarray, " n"],
    positive: np.ndarray,
    inputs: Callable[[np.ndarray], Tensor],
    inducing: Float[Tensor, "M d"],
    kernel: str | GPyTorchKernel,
    groups: Shaped[np.ndarray, " B"] | None = None,
    seed: int = 0,
) -> Cohort:
    """The chosen rows of the bags; many are converted when they are asked for."""
    fold = fair_folds(positive.astype(np.int64), groups, FOLDS, seed)
    sizes = np.bincount(bags.bag_index[rows], minlength=len(bags))
    offsets = np.concatenate([[0], np.cumsum(sizes)])
    adjacency = bags.adjacency[rows][:, rows]
    shape = (len(rows), inducing.shape[1])
    made: Tensor | StoredRows
    if shape[0] * shape[1] <= CONVERTED:
        made = inputs(bags.features[rows])
    else:
        made = StoredRows(bags.features, rows, inputs, shape, inducing.device)
    return Cohort(made, inducing, adjacency, offsets, positive, kernel, fold, groups=groups)
