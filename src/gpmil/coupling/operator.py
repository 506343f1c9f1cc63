"""The coupling Sigma_b = (I + lambda C_b)^-1 of neighbouring patches, as an operator.

C_b is the Laplacian of bag b's neighbour graph, so P_b = I + lambda C_b is sparse, positive
definite and has P_b 1 = 1. Three ways to invert it, chosen by the size of the bag:

* `Identity`: no edge, or lambda = 0;
* `Dense`: many small bags at once, padded to one length;
* `Banded`: one large bag, ordered to a narrow band and factored once as a block-tridiagonal
  matrix (`Factored`, SuperLU, where no narrow band exists).

Every part knows the rows of the cohort that it covers and offers the same five methods, so that
callers loop over `parts(...)` holding one factorisation at a time; `Coupling` keeps them all.
"""

import warnings
from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np
import scipy.sparse as sp
import torch
from jaxtyping import Bool, Float, Int
from scipy.sparse.csgraph import reverse_cuthill_mckee
from scipy.sparse.linalg import splu
from torch import Tensor

DENSE_LIMIT = 256  # patches a bag: above it a banded solve is cheaper than a dense inverse
GPU_DENSE_LIMIT = 2048  # and on a GPU, where many small steps cost more than much arithmetic
BATCH_ELEMENTS = 2**17  # entries of one padded batch of Sigma on a CPU: some caches full
GPU_BATCH_ELEMENTS = 2**24  # and on a GPU, which wants more to do at a time
SIMILAR = 0.75  # of the largest bag in a batch: padding more would cost more than another batch
BAND_BYTES = 600e6  # a factor larger than this goes to SuperLU
STRONGEST = 1e12  # lambda beyond which I + lambda C has no digits left for the I
COLUMNS = 512  # columns of Sigma formed at a time


@runtime_checkable
class Kernel(Protocol):
    """What is asked of a kernel here: matrices, and their diagonal."""

    def __call__(self, x: Tensor, z: Tensor, /) -> Tensor:
        """k(x_i, z_j), (..., n, m)."""

    def diagonal(self, x: Tensor, /) -> Tensor:
        """k(x_i, x_i), (..., n)."""


@runtime_checkable
class Part(Protocol):
    """Sigma for some of the bags; `rows` are their instances, in the order `apply` expects."""

    bags: Int[np.ndarray, " b"]
    rows: Int[Tensor, " n"]

    def apply(self, x: Tensor) -> Tensor:
        """Sigma x for a block of vectors x (n, k)."""

    def diagonal(self) -> Tensor:
        """The exact diagonal of Sigma, (n,)."""

    def logdet(self) -> Tensor:
        """log|Sigma_b| of each bag, (b,)."""

    def congruence_diagonal(self, x: Tensor, kernel: Kernel) -> Tensor:
        """diag(Sigma K Sigma) with K = kernel(x, x) bag by bag, x (n, d); (n,)."""

    def trace(self, x: Tensor, kernel: Kernel, every: int = 1) -> Tensor:
        """tr(Sigma K), summed over the bags; from every so many columns, scaled up."""


class Identity:
    """Sigma = I: bags without an edge, or lambda = 0."""

    def __init__(self, bags: Int[np.ndarray, " b"], rows: Int[Tensor, " n"]):
        self.bags, self.rows = bags, rows

    def apply(self, x: Float[Tensor, "n k"]) -> Float[Tensor, "n k"]:
        """Sigma x = x."""
        return x

    def diagonal(self) -> Float[Tensor, " n"]:
        """Ones."""
        return torch.ones(len(self.rows), dtype=torch.float64, device=self.rows.device)

    def logdet(self) -> Float[Tensor, " b"]:
        """Zeros."""
        return torch.zeros(len(self.bags), dtype=torch.float64, device=self.rows.device)

    def congruence_diagonal(self, x: Float[Tensor, "n d"], kernel: Kernel) -> Float[Tensor, " n"]:
        """The kernel's own diagonal."""
        return kernel.diagonal(x)

    def trace(self, x: Float[Tensor, "n d"], kernel: Kernel, every: int = 1) -> Float[Tensor, ""]:
        """The sum of the kernel's diagonal, which is cheap: no column is left out."""
        return self.congruence_diagonal(x, kernel).sum()


class Dense:
    """Small bags at once: Sigma as an explicit inverse, padded with unit rows to one length.

    P has its eigenvalues in [1, 1 + 2 lambda max degree], so the explicit inverse is as accurate
    as a solve, and applying it is one batched product.
    """

    def __init__(
        self,
        bags: Int[np.ndarray, " b"],
        rows: Int[Tensor, " n"],
        mask: Bool[Tensor, "b p"],
        precision: Float[Tensor, "b p p"],
    ):
        self.bags, self.rows, self.mask = bags, rows, mask
        factor = torch.linalg.cholesky(precision)
        self.sigma = torch.cholesky_inverse(factor)
        # log|Sigma_b| = -log|P_b|
        self._logdet = -2 * factor.diagonal(dim1=-2, dim2=-1).log().sum(-1)

    def pad(self, x: Float[Tensor, "n k"]) -> Float[Tensor, "b p k"]:
        """The bags side by side, zeros where a bag is shorter."""
        out = x.new_zeros(*self.mask.shape, x.shape[1])
        out[self.mask] = x
        return out

    def apply(self, x: Float[Tensor, "n k"]) -> Float[Tensor, "n k"]:
        """Sigma x, one batched product."""
        return (self.sigma @ self.pad(x))[self.mask]

    def diagonal(self) -> Float[Tensor, " n"]:
        """diag Sigma."""
        return self.sigma.diagonal(dim1=-2, dim2=-1)[self.mask]

    def logdet(self) -> Float[Tensor, " b"]:
        """log|Sigma_b|."""
        return self._logdet

    def congruence_diagonal(self, x: Float[Tensor, "n d"], kernel: Kernel) -> Float[Tensor, " n"]:
        """(Sigma K Sigma)_ii = sum_j (Sigma K)_ij Sigma_ij; padding has Sigma_ij = 0."""
        padded = self.pad(x)
        return ((self.sigma @ kernel(padded, padded)) * self.sigma).sum(-1)[self.mask]

    def trace(self, x: Float[Tensor, "n d"], kernel: Kernel, every: int = 1) -> Float[Tensor, ""]:
        """tr(Sigma K) = sum_ij Sigma_ij K_ij, padding left out."""
        padded, taken = self.pad(x), self.mask[:, ::every]
        column = (self.sigma[..., ::every] * kernel(padded, padded[:, ::every])).sum(-2)
        # Sigma_ij = 0 for i in the padding and j not
        total = torch.where(taken, column, 0.0).sum(1)
        return (total * self.mask.sum(1) / taken.sum(1)).sum()


class _OneBag:
    """What the two factorisations of a single large bag share."""

    bags: Int[np.ndarray, " b"]
    rows: Int[Tensor, " n"]

    def apply(self, x: Float[Tensor, "n k"]) -> Float[Tensor, "n k"]:
        """Sigma x."""
        raise NotImplementedError

    def columns(self, every: int = 1) -> Iterator[tuple[slice, Float[Tensor, "n k"]]]:
        """Sigma, some columns at a time: n x n is never held."""
        n = len(self.rows)
        for start in range(0, n, COLUMNS * every):
            cols = slice(start, min(start + COLUMNS * every, n), every)
            k = len(range(*cols.indices(n)))
            unit = torch.zeros(n, k, dtype=torch.float64, device=self.rows.device)
            unit[cols] = torch.eye(k, dtype=torch.float64, device=self.rows.device)
            yield cols, self.apply(unit)

    def congruence_diagonal(self, x: Float[Tensor, "n d"], kernel: Kernel) -> Float[Tensor, " n"]:
        """(Sigma K Sigma)_ii = sum_j Sigma_ij (Sigma K)_ij, some columns j at a time."""
        out = x.new_zeros(len(x))
        for cols, s in self.columns():
            out += (s * self.apply(kernel(x, x[cols]))).sum(1)
        return out

    def trace(self, x: Float[Tensor, "n d"], kernel: Kernel, every: int = 1) -> Float[Tensor, ""]:
        """tr(Sigma K), some columns at a time."""
        pieces = [(s * kernel(x, x[cols])).sum() for cols, s in self.columns(every)]
        return torch.stack(pieces).sum() * len(x) / len(range(0, len(x), every))


class Banded(_OneBag):
    """One large bag: P is block tridiagonal in an order of narrow band, and factored once.

    P = L L' with diagonal blocks L_k and blocks G_k below them:
    L_k L_k' = A_k - G_{k-1} G_{k-1}',  G_k = B_k L_k^-T.
    Cost n w^2 and storage n w for a band of width w (about sqrt(n) on a slide).
    """

    def __init__(
        self,
        bag: int,
        rows: Int[Tensor, " n"],
        diagonal_blocks: Float[Tensor, "k s s"],
        lower_blocks: Float[Tensor, "k s s"],
    ):
        self.bags, self.rows = np.array([bag]), rows
        self.size = diagonal_blocks.shape[1]
        self.inverse = torch.empty_like(diagonal_blocks)  # L_k^-1
        self.below = torch.empty_like(lower_blocks)  # G_k
        eye = torch.eye(self.size, dtype=torch.float64, device=rows.device)
        log_diagonal = torch.zeros((), dtype=torch.float64, device=rows.device)
        schur = diagonal_blocks[0]
        for k in range(len(diagonal_blocks)):
            factor = torch.linalg.cholesky(schur)
            log_diagonal += factor.diagonal().log().sum()
            self.inverse[k] = torch.linalg.solve_triangular(factor, eye, upper=False)
            self.below[k] = lower_blocks[k] @ self.inverse[k].mT
            if k + 1 < len(diagonal_blocks):
                schur = diagonal_blocks[k + 1] - self.below[k] @ self.below[k].mT
        self._logdet = -2 * log_diagonal[None]

    def apply(self, x: Float[Tensor, "n k"]) -> Float[Tensor, "n k"]:
        """Sigma x = L'^-1 L^-1 x by blocks, forward and back."""
        blocks = len(self.inverse)
        z = x.new_zeros(blocks, self.size, x.shape[1])
        z.view(-1, x.shape[1])[: len(x)] = x
        z[0] = self.inverse[0] @ z[0]
        for k in range(1, blocks):
            z[k] = self.inverse[k] @ (z[k] - self.below[k - 1] @ z[k - 1])
        z[-1] = self.inverse[-1].mT @ z[-1]
        for k in range(blocks - 2, -1, -1):
            z[k] = self.inverse[k].mT @ (z[k] - self.below[k].mT @ z[k + 1])
        return z.view(-1, x.shape[1])[: len(x)]

    def diagonal(self) -> Float[Tensor, " n"]:
        """Selected inversion: S_k = L_k^-T (I + G_k' S_{k+1} G_k) L_k^-1, from the last block."""
        out = self.inverse.new_empty(self.inverse.shape[:2])
        block = self.inverse[-1].mT @ self.inverse[-1]
        out[-1] = block.diagonal()
        for k in range(len(out) - 2, -1, -1):
            inner = self.below[k].mT @ block @ self.below[k]
            inner.diagonal().add_(1)
            block = self.inverse[k].mT @ inner @ self.inverse[k]
            out[k] = block.diagonal()
        return out.view(-1)[: len(self.rows)]

    def logdet(self) -> Float[Tensor, " b"]:
        """log|Sigma_b| = -2 sum log diag L."""
        return self._logdet


class Factored(_OneBag):
    """One large bag whose graph has no narrow band: SuperLU, exact but slower."""

    def __init__(self, bag: int, rows: Int[Tensor, " n"], precision: sp.csc_array):
        self.bags, self.rows = np.array([bag]), rows
        self.lu = splu(precision, permc_spec="MMD_AT_PLUS_A", options={"SymmetricMode": True})

    def apply(self, x: Float[Tensor, "n k"]) -> Float[Tensor, "n k"]:
        """Sigma x by two sparse triangular solves."""
        return torch.from_numpy(self.lu.solve(x.cpu().numpy())).to(x)

    def diagonal(self) -> Float[Tensor, " n"]:
        """Read off the columns of Sigma."""
        return torch.cat([s[cols].diagonal() for cols, s in self.columns()])

    def logdet(self) -> Float[Tensor, " b"]:
        """log|Sigma_b| = -sum log|diag U| (the diagonal of L is one)."""
        value = -np.log(np.abs(self.lu.U.diagonal())).sum()
        return torch.tensor([value], dtype=torch.float64, device=self.rows.device)


class Coupling:
    """Sigma of a whole cohort: block-diagonal (I + lambda C)^-1, factored once.

    >>> import scipy.sparse as sp
    >>> pair = sp.csr_array([[0., 1.], [1., 0.]])
    >>> Coupling(pair, np.array([0, 2]), strength=3.0).diagonal()
    tensor([0.5714, 0.5714], dtype=torch.float64)
    """

    def __init__(
        self,
        adjacency: sp.csr_array,
        offsets: Int[np.ndarray, " b"],
        strength: float,
        device: str | torch.device = "cpu",
    ):
        self.n_bags = len(offsets) - 1
        self.parts = list(parts(adjacency, offsets, strength, device))
        self._precision = precision_matrix(adjacency, strength, device)

    def apply(self, x: Tensor) -> Tensor:
        """Sigma x, for a vector (N,) or a block of vectors (N, k)."""
        block = x[:, None] if x.ndim == 1 else x
        out = torch.empty_like(block)
        for part in self.parts:
            out[part.rows] = part.apply(block[part.rows])
        return out.view_as(x)

    def precision(self, x: Tensor) -> Tensor:
        """P x = x + lambda C x: the sparse inverse of `apply`."""
        return self._precision @ x

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


def check_strength(strength: float) -> float:
    """lambda as a finite, non-negative float."""
    value = float(strength)
    if not 0 <= value <= STRONGEST:
        raise ValueError(
            f"coupling (lambda) must be a finite number >= 0 (and at most {STRONGEST:g}), got "
            f"{strength!r}. 0 uncouples the patches; the paper uses 0.1 to 10."
        )
    return value


class Precision(NamedTuple):
    """P = I + lambda (diag(A 1) - A), as its diagonal and the weighted neighbours."""

    diagonal: Float[Tensor, " n"]
    neighbours: Tensor  # lambda A, sparse CSR

    @classmethod
    def of(cls, edges: "Edges", rows: slice, strength: float) -> "Precision":
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


def sparse_rows(start: Tensor, column: Tensor, weight: Tensor, shape: tuple[int, int]) -> Tensor:
    """A torch CSR matrix that is built right, so that nothing is checked."""
    return torch.sparse_csr_tensor(start, column, weight, size=shape, check_invariants=False)


# torch says once per process that such matrices are in "beta state". It does so here, unheard: the
# filters of warnings belong to the process, and lanes that change them side by side spoil them.
with warnings.catch_warnings():
    warnings.filterwarnings("ignore", message="Sparse")
    sparse_rows(torch.arange(2), torch.arange(1), torch.ones(1), (1, 1))


def precision_matrix(
    adjacency: sp.csr_array, strength: float, device: str | torch.device = "cpu"
) -> Tensor:
    """P = I + lambda C as a torch CSR matrix."""
    p = sparse_precision(adjacency, strength)
    start, column = (torch.from_numpy(i.astype(np.int64)) for i in (p.indptr, p.indices))
    return sparse_rows(start, column, torch.from_numpy(p.data), p.shape).to(device)


def parts(
    adjacency: sp.csr_array,
    offsets: Int[np.ndarray, " b"],
    strength: float,
    device: str | torch.device = "cpu",
) -> Iterator[Part]:
    """Sigma of the cohort, part by part; each is factored when its turn comes."""
    return (part() for part in plan(adjacency, offsets, strength, device))


def plan(
    adjacency: sp.csr_array,
    offsets: Int[np.ndarray, " b"],
    strength: float,
    device: str | torch.device = "cpu",
    edges: "Edges | None" = None,
    max_rows: int = 8192,
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
    alone = [
        partial(_identity, offsets, bags, device)
        for bags in _runs(np.flatnonzero(~coupled), sizes, max_rows)
    ]
    dense = [
        partial(_dense, edges, offsets, bags, strength)
        for bags in batches(np.flatnonzero(small), sizes, device)
    ]
    large = [
        partial(_large, adjacency, offsets, int(bag), strength, device)
        for bag in np.flatnonzero(coupled & ~small)
    ]
    return [*alone, *dense, *large]


def _identity(offsets: np.ndarray, bags: np.ndarray, device: str | torch.device) -> Identity:
    return Identity(bags, torch.from_numpy(instance_rows(offsets, bags)).to(device))


def dense_parts(
    adjacency: sp.csr_array,
    offsets: Int[np.ndarray, " b"],
    bags: Int[np.ndarray, " k"],
    strength: float,
    device: str | torch.device = "cpu",
) -> Iterator[Dense]:
    """Some bags with Sigma as padded matrices, whatever their size or edges."""
    edges = Edges.of(adjacency, device)
    for batch in batches(bags, np.diff(offsets), device):
        yield _dense(edges, offsets, batch, strength)


def instance_rows(
    offsets: Int[np.ndarray, " b"], bags: Int[np.ndarray, " k"]
) -> Int[np.ndarray, " n"]:
    """The rows of some bags, one bag after the other."""
    sizes = offsets[bags + 1] - offsets[bags]
    within = np.arange(sizes.sum()) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    return np.repeat(offsets[bags], sizes) + within


def sparse_precision(adjacency: sp.csr_array, strength: float) -> sp.csr_array:
    """P = I + lambda (diag(A 1) - A)."""
    degree = np.asarray(adjacency.sum(axis=1)).ravel()
    p = sp.csr_array(sp.diags_array(1 + strength * degree) - strength * adjacency)
    p.sort_indices()
    return p


def _runs(bags: np.ndarray, sizes: np.ndarray, max_rows: int) -> Iterator[np.ndarray]:
    """Consecutive bags of about `max_rows` rows together."""
    if len(bags):
        group = (np.cumsum(sizes[bags]) - sizes[bags]) // max_rows
        yield from np.split(bags, np.flatnonzero(np.diff(group)) + 1)


def batches(
    bags: np.ndarray, sizes: np.ndarray, device: str | torch.device
) -> Iterator[np.ndarray]:
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


class Edges(NamedTuple):
    """The neighbour graph as compressed rows, where the arithmetic is done."""

    start: Int[Tensor, " N1"]
    column: Int[Tensor, " E"]
    weight: Float[Tensor, " E"]
    degree: Float[Tensor, " N"]

    @classmethod
    def of(cls, adjacency: sp.csr_array, device: str | torch.device) -> "Edges":
        """From the adjacency of a cohort."""
        start, column = (i.astype(np.int64) for i in (adjacency.indptr, adjacency.indices))
        weight = adjacency.data.astype(np.float64)
        start, column, weight = (torch.from_numpy(a).to(device) for a in (start, column, weight))
        degree = torch.segment_reduce(weight, "sum", offsets=start, initial=0.0)
        return cls(start, column, weight, degree)


def _dense(
    edges: Edges, offsets: Int[np.ndarray, " b1"], bags: Int[np.ndarray, " b"], strength: float
) -> Dense:
    """Some bags side by side."""
    return Dense(bags, *_side_by_side(edges, offsets, bags, strength))


def padded_precision(
    adjacency: sp.csr_array,
    offsets: Int[np.ndarray, " b1"],
    bags: Int[np.ndarray, " b"],
    strength: float,
) -> tuple[Int[np.ndarray, " n"], Bool[Tensor, "b p"], Float[Tensor, "b p p"]]:
    """Rows of some bags, which of the padded places they fill, and P with unit rows elsewhere."""
    rows = instance_rows(offsets, bags)
    # their edges alone: those of the whole cohort would be gone through again for every batch
    own = Edges.of(bags_block(adjacency, offsets, bags, rows), "cpu")
    starts = np.concatenate([[0], np.cumsum(offsets[bags + 1] - offsets[bags])])
    _, mask, P = _side_by_side(own, starts, np.arange(len(bags)), strength)
    return rows, mask, P


def _side_by_side(
    edges: Edges, offsets: Int[np.ndarray, " b1"], bags: Int[np.ndarray, " b"], strength: float
) -> tuple[Int[Tensor, " n"], Bool[Tensor, "b p"], Float[Tensor, "b p p"]]:
    """The same without a loop over the bags, where the edges are."""
    device = edges.start.device
    first, size = (
        torch.from_numpy(a).to(device) for a in (offsets[bags], offsets[bags + 1] - offsets[bags])
    )
    b, p = len(bags), int((offsets[bags + 1] - offsets[bags]).max())
    mask = torch.arange(p, device=device) < size[:, None]
    place = mask.view(-1).nonzero()[:, 0]  # of every row among the b x p padded ones
    rows = first[place // p] + place % p
    P = torch.zeros(b * p, p, dtype=torch.float64, device=device)
    # P = I + lambda (diag(A 1) - A), the padding with unit rows
    count = edges.start[rows + 1] - edges.start[rows]
    edge = torch.arange(int(count.sum()), device=device)
    edge += (edges.start[rows] - (count.cumsum(0) - count)).repeat_interleave(count)
    of = place.repeat_interleave(count)
    P[of, edges.column[edge] - first[of // p]] = -strength * edges.weight[edge]
    P = P.view(b, p, p)
    diagonal = torch.ones(b, p, dtype=torch.float64, device=device)
    diagonal[mask] += strength * edges.degree[rows]
    P.diagonal(dim1=-2, dim2=-1).add_(diagonal)
    return rows, mask, P


def bags_block(
    adjacency: sp.csr_array, offsets: np.ndarray, bags: np.ndarray, rows: np.ndarray
) -> sp.csr_array:
    """The adjacency of some bags alone: their rows, columns moved along with them."""
    sub = sp.csr_array(adjacency[rows])
    sizes = offsets[bags + 1] - offsets[bags]
    shift = np.repeat(np.cumsum(sizes) - sizes - offsets[bags], sizes)
    columns = sub.indices + np.repeat(shift, np.diff(sub.indptr))
    return sp.csr_array((sub.data, columns, sub.indptr), shape=(len(rows), len(rows)))


def _large(
    adjacency: sp.csr_array,
    offsets: np.ndarray,
    bag: int,
    strength: float,
    device: str | torch.device,
) -> Part:
    bags = np.array([bag])
    rows = instance_rows(offsets, bags)
    p = sparse_precision(bags_block(adjacency, offsets, bags, rows), strength)
    order = reverse_cuthill_mckee(p, symmetric_mode=True).astype(np.int64)
    banded = p[order][:, order].tocoo()
    width = int(np.abs(banded.row - banded.col).max())
    if width > len(rows) // 2 and len(rows) <= 16 * DENSE_LIMIT:
        rows, mask, blocks = padded_precision(adjacency, offsets, bags, strength)
        return Dense(bags, torch.from_numpy(rows).to(device), mask.to(device), blocks.to(device))
    if 16 * len(rows) * width > BAND_BYTES:
        return Factored(bag, torch.from_numpy(rows).to(device), p.tocsc())
    ordered = torch.from_numpy(rows[order]).to(device)
    return Banded(bag, ordered, *(b.to(device) for b in tridiagonal(banded, max(width, 32))))


def tridiagonal(p: sp.coo_array, size: int) -> tuple[Tensor, Tensor]:
    """The diagonal blocks A_k and the blocks B_k below them of a matrix of bandwidth <= size."""
    count = -(-p.shape[0] // size)
    diagonal = torch.eye(size, dtype=torch.float64).repeat(count, 1, 1)
    lower = torch.zeros(count, size, size, dtype=torch.float64)
    row, col = p.row // size, p.col // size
    data = torch.from_numpy(p.data)
    here, below = row == col, row == col + 1
    diagonal[row[here], p.row[here] % size, p.col[here] % size] = data[here]
    lower[col[below], p.row[below] % size, p.col[below] % size] = data[below]
    return diagonal, lower
