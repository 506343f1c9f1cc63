"""The coupling Sigma_b = (I + lambda C_b)^-1 of neighbouring patches, as an operator.

Which of three ways inverts P_b = I + lambda C_b depends on the edges and on the size of the bag:

* `Identity`: no edge, or lambda = 0;
* `Dense`: many small bags at once, padded to one length;
* `Banded`: one large bag, ordered to a narrow band and factored once as a block-tridiagonal
  matrix (`Factored`, SuperLU, where no narrow band exists).

Every part knows the rows of the cohort that it covers and offers the methods of `Part`, so that
callers loop over `parts(...)` holding one factorisation at a time; `Coupling` keeps them all.
This module is the door of the room: other rooms import from here.
"""

from collections.abc import Callable, Iterator
from functools import partial

import numpy as np
import scipy.sparse as sp
import torch
from jaxtyping import Float, Int
from scipy.sparse.csgraph import reverse_cuthill_mckee
from torch import Tensor

from gpmil.coupling.dense import Dense, inverted, padded_precision
from gpmil.coupling.large import Banded, Factored, tridiagonal
from gpmil.coupling.part import Identity, Part
from gpmil.coupling.precision import (
    Device,
    Edges,
    Offsets,
    Precision,
    bags_block,
    block,
    check_strength,
    instance_rows,
    sent,
    sparse_precision,
    sparse_rows,
)

__all__ = [
    "Banded",
    "Coupling",
    "Dense",
    "Edges",
    "Factored",
    "Identity",
    "Part",
    "Precision",
    "bags_block",
    "batches",
    "block",
    "check_strength",
    "dense_parts",
    "instance_rows",
    "padded_precision",
    "parts",
    "plan",
    "runs",
    "sent",
    "sparse_precision",
    "sparse_rows",
    "tridiagonal",
]

DENSE_LIMIT = 640  # patches per bag: above it a banded solve is cheaper than a dense inverse
DENSE_WITHOUT_BAND = 4096  # and above this SuperLU where there is no narrow band
GPU_DENSE_LIMIT = 2048  # and on a GPU, where many small steps cost more than much arithmetic
BATCH_ELEMENTS = 2**18  # entries of one padded batch of Sigma on a CPU: some caches full
GPU_BATCH_ELEMENTS = 2**24  # and on a GPU, which wants more to do at a time
ALONE, GPU_ALONE = 2**13, 2**17  # rows of a part without coupling, likewise
SIMILAR = 0.75  # of the largest bag in a batch: padding more would cost more than another batch
BAND_BYTES = 600e6  # a factor larger than this goes to SuperLU


class Coupling:
    """Sigma of a whole cohort: block-diagonal (I + lambda C)^-1, factored once.

    >>> import scipy.sparse as sp
    >>> pair = sp.csr_array([[0., 1.], [1., 0.]])
    >>> Coupling(pair, np.array([0, 2]), strength=3.0).diagonal()
    tensor([0.5714, 0.5714], dtype=torch.float64)
    """

    def __init__(
        self, adjacency: sp.csr_array, offsets: Offsets, strength: float, device: Device = "cpu"
    ):
        self.n_bags = len(offsets) - 1
        self.parts = list(parts(adjacency, offsets, strength, device))

    def apply(self, x: Tensor) -> Tensor:
        """Sigma x, for a vector (N,) or a block of vectors (N, k)."""
        block = x[:, None] if x.ndim == 1 else x
        out = torch.empty_like(block)
        for part in self.parts:
            out[part.rows] = part.apply(block[part.rows])
        return out.view_as(x)

    def diagonal(self) -> Float[Tensor, " N"]:
        """The exact diagonal of Sigma: the variances sigma_i^2 of eq. (qmi_0)."""
        out = torch.empty(sum(len(p.rows) for p in self.parts), dtype=torch.float64)
        for part in self.parts:
            out[part.rows.cpu()] = part.diagonal().cpu()
        return out.to(self.parts[0].rows.device)

    def logdet(self) -> Float[Tensor, " B"]:
        """log|Sigma_b| of every bag."""
        out = torch.empty(self.n_bags, dtype=torch.float64)
        for part in self.parts:
            out[torch.from_numpy(part.bags)] = part.logdet().cpu()
        return out


def parts(
    adjacency: sp.csr_array, offsets: Offsets, strength: float, device: Device = "cpu"
) -> Iterator[Part]:
    """Sigma of the cohort, part by part; each is factored when its turn comes."""
    return (part() for part in plan(adjacency, offsets, strength, device))


def plan(
    adjacency: sp.csr_array,
    offsets: Offsets,
    strength: float,
    device: Device = "cpu",
    edges: Edges | None = None,
    max_rows: int | None = None,
) -> list[Callable[[], Part]]:
    """How the cohort is cut into parts; each is made, and factored, when it is called.

    `edges` are those of the adjacency, where they are known already.
    """
    strength = check_strength(strength)
    sizes = np.diff(offsets)
    n_edges = np.diff(adjacency.indptr[offsets])
    coupled = (n_edges > 0) & (strength > 0)
    on_gpu = torch.device(device).type == "cuda"
    small = coupled & (sizes <= (GPU_DENSE_LIMIT if on_gpu else DENSE_LIMIT))
    edges = Edges.of(adjacency, device) if edges is None else edges
    max_rows = max_rows or (GPU_ALONE if on_gpu else ALONE)
    alone = [
        partial(_identity, offsets, bags, device)
        for bags in runs(np.flatnonzero(~coupled), sizes, max_rows)
    ]
    dense = [
        partial(Dense.of, edges, offsets, bags, strength, int(n_edges[bags].sum()))
        for bags in batches(np.flatnonzero(small), sizes, device)
    ]
    large = [
        partial(_large, adjacency, offsets, int(bag), strength, device)
        for bag in np.flatnonzero(coupled & ~small)
    ]
    return [*alone, *dense, *large]


def _identity(offsets: Offsets, bags: np.ndarray, device: Device) -> Identity:
    return Identity(bags, torch.from_numpy(instance_rows(offsets, bags)).to(device))


def dense_parts(
    adjacency: sp.csr_array,
    offsets: Offsets,
    bags: Int[np.ndarray, " k"],
    strength: float,
    device: Device = "cpu",
) -> Iterator[Dense]:
    """Some bags with Sigma as padded matrices, whatever their size or edges."""
    edges = Edges.of(adjacency, device)
    for batch in batches(bags, np.diff(offsets), device):
        yield Dense.of(edges, offsets, batch, strength)


def runs(bags: np.ndarray, sizes: np.ndarray, max_rows: int = 8192) -> Iterator[np.ndarray]:
    """Consecutive bags of about `max_rows` rows together."""
    if len(bags):
        group = (np.cumsum(sizes[bags]) - sizes[bags]) // max_rows
        yield from np.split(bags, np.flatnonzero(np.diff(group)) + 1)


def batches(bags: np.ndarray, sizes: np.ndarray, device: Device) -> Iterator[np.ndarray]:
    """Bags of similar size, as many as fit a padded batch."""
    on_gpu = torch.device(device).type == "cuda"
    elements = GPU_BATCH_ELEMENTS if on_gpu else BATCH_ELEMENTS
    bags = bags[np.argsort(sizes[bags], kind="stable")[::-1]]
    start = 0
    while start < len(bags):
        largest = sizes[bags[start]]
        count = max(1, int(elements // largest**2))
        similar = start + int((sizes[bags[start:]] >= SIMILAR * largest).sum())
        stop = min(start + count, similar)
        yield np.sort(bags[start:stop])
        start = stop


def _large(
    adjacency: sp.csr_array, offsets: Offsets, bag: int, strength: float, device: Device
) -> Part:
    """One large bag: banded if an order with a narrow band is found, else dense or sparse."""
    bags = np.array([bag])
    rows = instance_rows(offsets, bags)
    p = sparse_precision(bags_block(adjacency, offsets, bags, rows), strength)
    order = reverse_cuthill_mckee(p, symmetric_mode=True).astype(np.int64)
    banded = p[order][:, order].tocoo()
    width = int(np.abs(banded.row - banded.col).max())
    if width > len(rows) // 2 and len(rows) <= DENSE_WITHOUT_BAND:
        rows, mask, blocks = padded_precision(adjacency, offsets, bags, strength)
        at = torch.from_numpy(rows).to(device), mask.to(device)
        return Dense(bags, *at, *inverted(blocks.to(device)))
    if 16 * len(rows) * width > BAND_BYTES:
        return Factored(bag, torch.from_numpy(rows).to(device), p.tocsc())
    ordered = torch.from_numpy(rows[order]).to(device)
    return Banded(bag, ordered, *(b.to(device) for b in tridiagonal(banded, max(width, 32))))
