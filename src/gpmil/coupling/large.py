"""One large bag: P factored once, block by block in a narrow band, or by SuperLU without one.

Neither holds an n x n matrix: columns of Sigma are formed some at a time.
"""

from collections.abc import Iterator

import numpy as np
import scipy.sparse as sp
import torch
from jaxtyping import Float, Int
from scipy.sparse.linalg import splu
from torch import Tensor

from gpmil.coupling.part import Kernel

COLUMNS = 512  # columns of Sigma formed at a time


class _OneBag:
    """What the two factorisations of a single large bag share."""

    bags: Int[np.ndarray, " b"]
    rows: Int[Tensor, " n"]

    def apply(self, x: Float[Tensor, "n k"]) -> Float[Tensor, "n k"]:
        """Sigma x."""
        raise NotImplementedError

    def halved(self, x: Float[Tensor, "n k"]) -> None:
        """Not at hand."""

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
