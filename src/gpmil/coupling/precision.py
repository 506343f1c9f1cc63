"""P = I + lambda C, the precision of the patches: sparse, for the whole cohort or for some bags.

C = diag(A 1) - A is the Laplacian of the neighbour graph A, so P is positive definite and has
P 1 = 1. Sigma = P^-1. A graph comes as a scipy matrix, or as `Edges` where torch computes.
"""

import warnings
from typing import NamedTuple

import numpy as np
import scipy.sparse as sp
import torch
from jaxtyping import Float, Int
from torch import Tensor

Device = str | torch.device
Offsets = Int[np.ndarray, " bags_and_one"]

STRONGEST = 1e12  # lambda beyond which I + lambda C has no digits left for the I


def check_strength(strength: float) -> float:
    """lambda as a finite, non-negative float."""
    value = float(strength)
    if not 0 <= value <= STRONGEST:
        raise ValueError(
            f"coupling (lambda) must be a finite number >= 0 (and at most {STRONGEST:g}), got "
            f"{strength!r}. 0 uncouples the patches; the paper uses 0.1 to 10."
        )
    return value


def sparse_precision(adjacency: sp.csr_array, strength: float) -> sp.csr_array:
    """P = I + lambda (diag(A 1) - A)."""
    degree = np.asarray(adjacency.sum(axis=1)).ravel()
    p = sp.csr_array(sp.diags_array(1 + strength * degree) - strength * adjacency)
    p.sort_indices()
    return p


def sent(array: np.ndarray, device: Device) -> Tensor:
    """A copy of an array on a device; a GPU need not have done its work before it comes."""
    on_gpu = torch.device(device).type == "cuda"
    kind = torch.from_numpy(np.empty(0, array.dtype)).dtype
    found = torch.empty(array.shape, dtype=kind, pin_memory=on_gpu)
    np.copyto(found.numpy(), array)
    return found.to(device, non_blocking=True)


class Edges(NamedTuple):
    """The neighbour graph as compressed rows, where the arithmetic is done."""

    start: Int[Tensor, " N1"]
    column: Int[Tensor, " E"]
    weight: Float[Tensor, " E"]
    degree: Float[Tensor, " N"]

    @classmethod
    def of(cls, adjacency: sp.csr_array, device: Device) -> "Edges":
        """From the adjacency of a cohort."""
        # as they are, and half as many bytes travel to a GPU; ones need not
        start, column = (sent(a, device).long() for a in (adjacency.indptr, adjacency.indices))
        if (adjacency.data == 1).all():
            weight = torch.ones(len(column), dtype=torch.float64, device=device)
            degree = start.diff().double()
        else:
            weight = sent(adjacency.data, device).double()
            degree = torch.segment_reduce(weight, "sum", offsets=start, initial=0.0)
        return cls(start, column, weight, degree)


class Precision(NamedTuple):
    """P = I + lambda (diag(A 1) - A), as its diagonal and the weighted neighbours."""

    diagonal: Float[Tensor, " n"]
    neighbours: Tensor  # lambda A, sparse CSR

    @classmethod
    def of(cls, edges: Edges, rows: slice, strength: float) -> "Precision":
        """Of consecutive whole bags."""
        n, start = rows.stop - rows.start, edges.start[rows.start : rows.stop + 1]
        here = slice(int(start[0]), int(start[-1]))
        column, weight = edges.column[here] - rows.start, strength * edges.weight[here]
        neighbours = sparse_rows(start - start[0], column, weight, (n, n))
        return cls(1 + strength * edges.degree[rows], neighbours)

    def apply(self, x: Tensor) -> Tensor:
        """P x, for a vector (n,) or a block of vectors (n, k)."""
        if x.ndim == 1:
            return torch.addmv(self.diagonal * x, self.neighbours, x, alpha=-1)
        return self.diagonal[:, None] * x - self.neighbours @ x


def sparse_rows(start: Tensor, column: Tensor, weight: Tensor, shape: tuple[int, int]) -> Tensor:
    """A torch CSR matrix that is built right, so that nothing is checked."""
    return torch.sparse_csr_tensor(start, column, weight, size=shape, check_invariants=False)


# torch says once per process that such matrices are in "beta state". It does so here, unheard: the
# filters of warnings belong to the process, and lanes that change them side by side spoil them.
with warnings.catch_warnings():
    warnings.filterwarnings("ignore", message="Sparse")
    sparse_rows(torch.arange(2), torch.arange(1), torch.ones(1), (1, 1))


# ------------------------------------------------------------------ some of the bags


def instance_rows(offsets: Offsets, bags: Int[np.ndarray, " k"]) -> Int[np.ndarray, " n"]:
    """The rows of some bags, one bag after the other."""
    sizes = offsets[bags + 1] - offsets[bags]
    within = np.arange(sizes.sum()) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    return np.repeat(offsets[bags], sizes) + within


def block(adjacency: sp.csr_array, rows: slice) -> sp.csr_array:
    """The adjacency of consecutive whole bags, without a copy of its weights."""
    start, stop = adjacency.indptr[rows.start], adjacency.indptr[rows.stop]
    n = rows.stop - rows.start
    parts = (
        adjacency.data[start:stop],
        adjacency.indices[start:stop] - rows.start,
        adjacency.indptr[rows.start : rows.stop + 1] - start,
    )
    return sp.csr_array(parts, shape=(n, n))


def bags_block(
    adjacency: sp.csr_array, offsets: Offsets, bags: np.ndarray, rows: np.ndarray
) -> sp.csr_array:
    """The adjacency of some bags alone: their rows, columns moved along with them."""
    sub = sp.csr_array(adjacency[rows])
    sizes = offsets[bags + 1] - offsets[bags]
    shift = np.repeat(np.cumsum(sizes) - sizes - offsets[bags], sizes)
    columns = sub.indices + np.repeat(shift, np.diff(sub.indptr))
    return sp.csr_array((sub.data, columns, sub.indptr), shape=(len(rows), len(rows)))
