"""The Gaussian step of EP where S is sparse plus low rank, for slides of thousands of patches.

S = Sigma + Sigma (U U' + D) Sigma with Sigma^-1 = P sparse and D diagonal; see orthant_large.py.
Patches are in an order in which P has a narrow band.
"""

import copy
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import scipy.sparse as sp
import torch
from jaxtyping import Float, Int
from scipy.sparse.csgraph import reverse_cuthill_mckee
from torch import Tensor

from gpmil.coupling.operator import Banded
from gpmil.moments.ep import SHARE_OF_C3
from gpmil.moments.sites import Gauss, Sites, cavities, cumulants

Rows = Callable[[Int[Tensor, " k"]], Float[Tensor, "k n"]]

CUT = 1e-5  # of a column of V: what is smaller is taken for zero in the corrections
CHUNK = 512  # columns of V at a time
NOTHING = 1e-4  # of a factor in a sum over pairs that need not be known to more than three digits


class Problem:
    """What stays the same while the sites move; instances in an order of narrow band.

    `order` lists the instances; everything else is in that order.
    """

    def __init__(
        self,
        precision: sp.csr_array | sp.csr_matrix,
        factor: Float[Tensor, "n m"],
        residual: Rows,
        residual_diagonal: Float[Tensor, " n"],
        rank: int,
    ) -> None:
        given = sp.csr_array(precision)
        order = reverse_cuthill_mckee(given, symmetric_mode=True).astype(np.int64)
        self.order = torch.from_numpy(order)
        self.p = sp.csr_array(given[order][:, order])
        self.band = Band(self.p)
        self.log_det_p = -float(self.band.factor(self.p).logdet())
        # V = U U' + D + rest
        pivoted, left = pivoted_cholesky(residual, residual_diagonal, rank)
        self.u = torch.cat([factor, pivoted], dim=1)[self.order]
        self.d = left[self.order]

    def smooth(self, x: Float[Tensor, "n k"]) -> Float[Tensor, "n k"]:
        """Sigma x."""
        return self.band.factor(self.p).apply(x)

    def q(self, tau: Float[Tensor, " n"]) -> sp.csr_array:
        """Q = P T^-1 P + P + D, so that (T^-1 + S)^-1 = P (Q + U U')^-1 P."""
        inverse = sp.diags_array(1 / tau.numpy())
        return sp.csr_array(self.p @ inverse @ self.p + self.p + sp.diags_array(self.d.numpy()))

    def step(self, mu: Float[Tensor, " n"], sites: Sites) -> "Step":
        """The Gaussian step of EP on S = Sigma (P + U U' + D) Sigma."""
        tau, nu = sites.tau[0], sites.nu[0]
        banded = self.band.factor(self.q(tau))
        # (Q + U U')^-1 = Q^-1 - G G',  G = Q^-1 U C^-T,  C C' = I + U' Q^-1 U
        solved = banded.apply(self.u)
        inner = self.u.mT @ solved
        inner.diagonal().add_(1.0)
        c = torch.linalg.cholesky(inner)
        g = torch.linalg.solve_triangular(c, solved.mT, upper=False).mT
        # v p = diag((T^-1 + S)^-1) / tau,  v = (1 - v p) / tau
        kept = self.band.congruence_diagonal(self.p, banded) - times(self.p, g).square().sum(1)
        left = kept / tau
        # y = T^-1 nu - mu, z = (T^-1 + S)^-1 y: mhat = mu + y - z / tau
        y = nu / tau - mu
        py = times(self.p, y[:, None])
        z = times(self.p, banded.apply(py) - g @ (g.mT @ py))[:, 0]
        log_det = tau.log().sum() - 2 * self.log_det_p - banded.logdet()[0]
        log_det = log_det + 2 * c.diagonal().log().sum()
        # lZG = -log|I + T^.5 S T^.5|/2 + nu'T^-1 nu/2 - y'z/2
        log_gauss = (-log_det + (nu * nu / tau).sum() - y @ z) / 2
        gauss = Gauss(
            (mu + y - z / tau)[None],
            ((1 - left) / tau).clamp(min=1e-300)[None],
            left.clamp(min=1e-15)[None],
            log_gauss[None],
        )
        return Step(gauss, banded, g)


class Step(NamedTuple):
    """The Gaussian, and (Q + U U')^-1 = Q^-1 - G G' as the factor of Q and G."""

    gauss: Gauss
    banded: Banded
    g: Float[Tensor, "n r"]


class Band:
    """Block-tridiagonal storage for matrices with the pattern of P^2."""

    def __init__(self, p: sp.csr_array) -> None:
        pattern = sp.coo_array(abs(p) @ abs(p))
        self.row, self.col = pattern.coords
        self.n = p.shape[0]
        self.size = max(32, int(np.abs(self.row - self.col).max()))
        self.count = -(-self.n // self.size)

    def _where(self, row: np.ndarray, col: np.ndarray) -> Int[Tensor, " k"]:
        """Flat position in a stack of (size x size) blocks, the block given by the column."""
        flat = (col // self.size * self.size + row % self.size) * self.size + col % self.size
        return torch.from_numpy(flat)

    def factor(self, matrix: sp.csr_array) -> Banded:
        """Block Cholesky factor."""
        coo = matrix.tocoo()
        row, col = coo.coords
        data = torch.from_numpy(coo.data)
        diagonal = torch.eye(self.size, dtype=torch.float64).repeat(self.count, 1, 1)
        lower = torch.zeros_like(diagonal)
        here, below = (row // self.size - col // self.size == k for k in (0, 1))
        diagonal.view(-1)[self._where(row[here], col[here])] = data[here]
        lower.view(-1)[self._where(row[below], col[below])] = data[below]
        return Banded(0, torch.arange(self.n), diagonal, lower)

    def congruence_diagonal(self, p: sp.csr_array, banded: Banded) -> Float[Tensor, " n"]:
        """diag(P Q^-1 P): only entries of Q^-1 on the pattern of P^2 are needed."""
        diagonal, lower = selected_inverse(banded)
        step = self.row // self.size - self.col // self.size
        data = np.empty(len(self.row))
        # the inverse is symmetric: what lies above the diagonal is read below it
        for k, blocks in ((0, diagonal), (1, lower)):
            here, mirrored = step == k, step == -k
            data[here] = blocks.view(-1)[self._where(self.row[here], self.col[here])]
            data[mirrored] = blocks.view(-1)[self._where(self.col[mirrored], self.row[mirrored])]
        inverse = sp.csr_array((data, (self.row, self.col)), shape=p.shape)
        return torch.from_numpy(np.asarray((p @ inverse).multiply(p).sum(axis=1)).ravel())


class Pairs:
    """Sums over pairs of patches, C being V = (S^-1 + T)^-1 without its diagonal.

    For its powers columns of V are solved for in float32, some at a time: three digits do.
    """

    def __init__(self, problem: Problem, sites: Sites, step: Step) -> None:
        self.problem, self.tau, self.step = problem, sites.tau[0], step
        self.var = step.gauss.var[0]
        self.k3, self.k4 = (k[0].float() for k in cumulants(cavities(step.gauss, sites).t))
        self.error = torch.zeros(1, dtype=torch.float64)  # of log P + c3, once c3 is known
        self.single, self.p = copy.copy(step.banded), problem.p.astype(np.float32)
        self.single.inverse, self.single.below = (
            _single(a) for a in (step.banded.inverse, step.banded.below)
        )
        self.g = step.g.float()
        self.scale = (self.var.rsqrt() / self.tau).float()

    def times(self, x: Float[Tensor, "1 n k"]) -> Float[Tensor, "1 n k"]:
        """C x, V = T^-1 - T^-1 P (Q + U U')^-1 P T^-1."""
        right = x[0] / self.tau[:, None]
        px, g = times(self.problem.p, right), self.step.g
        solved = self.step.banded.apply(px) - g @ (g.mT @ px)
        Vx = right - times(self.problem.p, solved) / self.tau[:, None]
        return (Vx - self.var[:, None] * x[0])[None]

    def powers(
        self, x: Float[Tensor, "1 n j"], y: Float[Tensor, "1 n k"]
    ) -> tuple[Float[Tensor, "1 n j"], Float[Tensor, "1 n k"]]:
        """C o C x and C o C o C y; and the error as `gpmil.moments.ep.corrections` has it."""
        v, sd3 = self.var[:, None], self.var[:, None] ** 1.5
        x, y, k3, k4 = (v * x[0]).float(), (sd3 * y[0]).float(), self.k3.abs(), self.k4.abs()
        largest = torch.cat([x, y, k3[:, None], k4[:, None]], 1).abs().amax(1)
        squares, cubes, sums = torch.zeros_like(x), torch.zeros_like(y), torch.zeros(2)
        some = torch.nonzero(largest > NOTHING).flatten()
        for cols in some.split(CHUNK) if len(some) else ():
            corr = self._correlations(cols)
            square = corr * corr
            squares += square @ x[cols]
            sums[0] += k4 @ ((square * square) @ k4[cols])
            cube = square.mul_(corr)
            cubes += cube @ y[cols]
            sums[1] += k3 @ (cube.abs_() @ k3[cols])
        self.error = (sums[:1] / 48 + SHARE_OF_C3 * sums[1:] / 12).double()
        return (v * squares)[None], (sd3 * cubes)[None]

    def c3(self) -> Float[Tensor, " 1"]:
        """sum_ij k3_i k3_j corr_ij^3 / 12."""
        third = (self.k3 / self.var**1.5)[None, :, None]
        _, cubes = self.powers(third[..., :0], third)
        return (third * cubes).sum(1)[:, 0] / 12

    def _correlations(self, cols: Int[Tensor, " k"]) -> Float[Tensor, "n k"]:
        """Columns of V without its diagonal, over the standard deviations."""
        right = torch.from_numpy(self.p[:, cols.numpy()].toarray()) * self.scale[cols]
        solved = local_solve(self.single, right, cols) - self.g @ (self.g.mT @ right)
        corr = (-self.scale[:, None] * times(self.p, solved)).clamp_(-1, 1)
        corr[cols, torch.arange(len(cols))] = 0.0
        return corr


def selected_inverse(
    banded: Banded,
) -> tuple[Float[Tensor, "k s s"], Float[Tensor, "k s s"]]:
    """Blocks of the inverse on the diagonal, and below it (the last of those is unused)."""
    diagonal, lower = torch.empty_like(banded.inverse), torch.zeros_like(banded.inverse)
    diagonal[-1] = banded.inverse[-1].mT @ banded.inverse[-1]
    for k in range(len(diagonal) - 2, -1, -1):
        # Z_{k+1,k} = -Z_{k+1} J, Z_k = (L_k L_k')^-1 + J' Z_{k+1} J, J = G_k L_k^-1
        j = banded.below[k] @ banded.inverse[k]
        lower[k] = -diagonal[k + 1] @ j
        diagonal[k] = banded.inverse[k].mT @ banded.inverse[k] - j.mT @ lower[k]
    return diagonal, lower


def local_solve(
    banded: Banded, right: Float[Tensor, "n k"], columns: Int[Tensor, " k"]
) -> Float[Tensor, "n k"]:
    """Q^-1 right for columns of a banded matrix, cut where it has decayed to CUT of its largest."""
    inverse, below, size = banded.inverse, banded.below, banded.size
    z = right.new_zeros(len(inverse), size, right.shape[1])
    z.view(-1, right.shape[1])[: len(right)] = right
    start = max(0, int(columns[0]) // size - 1)
    stop = min(len(inverse) - 1, int(columns[-1]) // size + 1)

    # forward: z = L^-1 right is zero before the first block that right touches
    z[start] = inverse[start] @ z[start]
    top, end = z[start].abs().amax(0), start
    for k in range(start + 1, len(inverse)):
        z[k] = _flushed(inverse[k] @ (z[k] - below[k - 1] @ z[k - 1]))
        size_k, end = z[k].abs().amax(0), k
        top = torch.maximum(top, size_k)
        if k > stop and bool((size_k <= CUT * top).all()):
            break
    # back: L'^-1 z
    z[end] = inverse[end].mT @ z[end]
    top = z[end].abs().amax(0)
    for k in range(end - 1, -1, -1):
        z[k] = _flushed(inverse[k].mT @ (z[k] - below[k].mT @ z[k + 1]))
        size_k = z[k].abs().amax(0)
        top = torch.maximum(top, size_k)
        if k < start and bool((size_k <= CUT * top).all()):
            break
    return z.view(-1, right.shape[1])[: len(right)]


def _flushed(x: Tensor) -> Tensor:
    """Zero for what would lead to denormal numbers, on which processors are very slow."""
    return torch.nn.functional.hardshrink(x, 1e-18)


def _single(x: Tensor) -> Tensor:
    return _flushed(x).float()


def pivoted_cholesky(
    rows: Rows, diagonal: Float[Tensor, " n"], rank: int
) -> tuple[Float[Tensor, "n r"], Float[Tensor, " n"]]:
    """L (n, r) with E - L L' >= 0, r <= rank, taking the largest remaining diagonal each time.

    The second result is the diagonal of E - L L'.

    >>> e = torch.tensor([[2.0, 1.0], [1.0, 0.5]]).double()
    >>> pivoted_cholesky(lambda i: e[i], e.diagonal(), rank=2)[0]
    tensor([[1.4142],
            [0.7071]], dtype=torch.float64)
    """
    left = diagonal.clone()
    out = diagonal.new_zeros(min(rank, len(diagonal)), len(diagonal))
    for k in range(len(out)):
        pivot = int(left.argmax())
        if left[pivot] <= 1e-10 * diagonal.max():
            return out[:k].mT, left
        row = rows(torch.tensor([pivot]))[0].double() - out[:k, pivot] @ out[:k]
        out[k] = row / left[pivot].sqrt()
        left = (left - out[k] ** 2).clamp(min=0)
    return out.mT, left


def times(p: sp.csr_array, x: Tensor) -> Tensor:
    """P x."""
    return torch.from_numpy(p @ x.numpy())
