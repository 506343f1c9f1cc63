"""The cohort that settings are learned from: bags in folds, made ready for many settings.

Distances between instances and inducing points are kept, so that other settings cost no distances;
bags go in batches of similar size, one fold after the other.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np
import scipy.sparse as sp
import torch
from gpytorch.kernels import Kernel as GPyTorchKernel
from jaxtyping import Bool, Float, Int, Num, Shaped
from torch import Tensor

from gpmil.coupling.operator import batches, padded_precision
from gpmil.data.bags import Bags
from gpmil.data.folds import fair_folds
from gpmil.process.kernels import Formula, formula_of

FOLDS = 5
CONVERTED = 2**24  # numbers converted to float64 at once: 128 MB
KEPT_ELEMENTS = 2**27  # numbers of cached distances: one GB


@dataclass(frozen=True)
class StoredRows:
    """Kernel inputs that are made from stored features when a batch asks for them.

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
        return self.inputs(self.features[self.rows[i.cpu().numpy()]])


@dataclass(frozen=True)
class Batch:
    """Some bags of similar size; what does not depend on the settings."""

    mask: Bool[Tensor, "b p"]
    positive: Bool[Tensor, " b"]
    bags: Int[np.ndarray, " b"]
    C: Float[Tensor, "b p p"]  # Laplacians, zero in the padding
    to_inducing: Float[Tensor, "n j"]  # (n, M), or the inputs themselves, (n, d)
    within: Float[Tensor, "b p k"]  # (b, p, p), or (b, p, d)
    fold: int
    known: Int[Tensor, " n"] | None = None  # labels of instances


class SlidesInContext(NamedTuple):
    """What the slide context sees of the bags, and its inducing points."""

    z: Float[Tensor, "B d"]
    points: Float[Tensor, "m d"]


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
    kept: list[Batch] = field(default_factory=list)
    relevance: bool = False  # every column has a weight: batches then hold inputs, not distances
    context: SlidesInContext | None = None  # None where gamma_s is 0
    groups: Shaped[np.ndarray, " B"] | None = None  # whose bags go together: patients
    known: Int[np.ndarray, " N"] | None = None  # labels of instances, -1 where unknown

    @property
    def formula(self) -> Formula:
        """The kernel as a function of what can be kept."""
        return formula_of(self.kernel, self.inputs.device)

    @property
    def n_folds(self) -> int:
        """How many fits there are."""
        return 1 + int(self.fold.max())

    def batches(self) -> Iterator[Batch]:
        """All bags, fold by fold; kept where memory allows, otherwise made again every time."""
        sizes = np.diff(self.offsets)
        small = len(self.inducing) * sizes.sum() + 2 * (sizes**2).sum() <= KEPT_ELEMENTS
        if small and not self.kept:
            self.kept.extend(list(self._made()))
        yield from self.kept or self._made()

    def _made(self) -> Iterator[Batch]:
        sizes = np.diff(self.offsets)
        for k in range(self.n_folds):
            for bags in batches(np.flatnonzero(self.fold == k), sizes, self.inputs.device):
                yield self._batch(bags)

    def _batch(self, bags: np.ndarray) -> Batch:
        device = self.inputs.device
        pairs = _first if self.relevance else self.formula.pairs
        rows, mask, P = padded_precision(self.adjacency, self.offsets, bags, 1.0)
        x = self.inputs[torch.from_numpy(rows).to(device)]
        padded = x.new_zeros(*mask.shape, x.shape[1])
        padded[mask.to(device)] = x
        return Batch(
            mask.to(device),
            torch.from_numpy(self.positive[bags]).to(device),
            bags,
            (P - torch.eye(P.shape[-1], dtype=P.dtype)).to(device),
            pairs(x, self.inducing),
            pairs(padded, padded),
            int(self.fold[bags[0]]),
            None if self.known is None else torch.from_numpy(self.known[rows]).to(device),
        )

    def with_kernel(self, kernel: str | GPyTorchKernel) -> "Cohort":
        """The same bags under another kernel."""
        return replace(self, kernel=kernel, kept=[])


def _first(x: Tensor, z: Tensor) -> Tensor:
    return x


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
    """The chosen rows of the bags; many are converted batch by batch."""
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
