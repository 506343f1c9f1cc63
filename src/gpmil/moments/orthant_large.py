"""log P(all m < 0) for one slide of thousands of patches on the CPU, without dense EP.

The covariance is S = Sigma + Sigma V Sigma with Sigma^-1 = P = I + lambda C sparse and
V = F F' + E the covariance of f: F of low rank, E what the inducing points leave unexplained.
EP runs on a simpler V, U U' + D with U = [F, leading part of E] and D diagonal, for which every
step is sparse plus low rank. Its log P is stationary in the sites, so it is enough to keep them
and to compute the Gaussian integral once more with the exact S. With T the precisions of the sites

    (T^-1 + S)^-1 = P (P T^-1 P + P + V)^-1 P,
    log|I + T^.5 S T^.5| = sum log tau - 2 log|P| + log|P T^-1 P + P + V|:

one dense Cholesky factorisation and no solve with Sigma. Dense EP (`orthant.log_orthant`)
is simpler, and faster below some 1,500 patches or on a GPU.
"""

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
from gpmil.moments.orthant import Expansion, LogProbability, settle
from gpmil.moments.sampling import log_union, relevant
from gpmil.moments.sites import (
    Gauss,
    Sites,
    cavities,
    cumulants,
    first_sites,
    fixed_point,
    site_terms,
)
from gpmil.warn import warn_caller

Rows = Callable[[Int[Tensor, " k"]], Float[Tensor, "k n"]]

FLOOR = 1e-6  # least tau S_ii: a site of zero precision has no inverse
TOLERANCE = 1e-3  # sites enter log P to second order
MAX_ITER = 60
CHUNK = 512
CUT = 1e-5  # of a column of V: what is smaller is taken for zero in the corrections
# Share of the change of log P from the simpler to the exact V that is counted as error; measured on
# slides of 126 to 2,000 patches against dense EP, the error was 0.03 of it at most from rank 10 on.
SHARE_OF_CHANGE = 0.03


def log_orthant_large(
    mu: Float[Tensor, " n"],
    variance: Float[Tensor, " n"],
    precision: sp.csr_array | sp.csr_matrix,
    factor: Float[Tensor, "n m"],
    residual: Rows,
    residual_diagonal: Float[Tensor, " n"],
    *,
    rank: int = 128,
    seed: int = 0,
) -> LogProbability:
    """log P(all m < 0) of one bag, m ~ N(mu, Sigma + Sigma (F F' + E) Sigma).

    Parameters
    ----------
    mu, variance
        Mean of m and the exact diagonal of its covariance.
    precision
        P = Sigma^-1 = I + lambda C, sparse (n, n).
    factor
        F = W chol(R^-1), (n, m): the part of V that the inducing points explain.
    residual, residual_diagonal
        `residual(i)` gives the rows i of E = K - W W', (k, n); and the diagonal of E.
    rank
        How many columns of a pivoted Cholesky factor of E join F while EP runs.
    seed
        Fixes the draws used in the right tail.
    """
    slide = LargeSlide(precision, factor, residual, residual_diagonal, rank)
    return slide.log_orthant(mu, variance, seed=seed)


class LargeSlide:
    """One bag of many instances, made ready for several means of m."""

    def __init__(
        self,
        precision: sp.csr_array | sp.csr_matrix,
        factor: Float[Tensor, "n m"],
        residual: Rows,
        residual_diagonal: Float[Tensor, " n"],
        rank: int = 128,
    ) -> None:
        """Arguments as those of `log_orthant_large`; the factor may have no column at all."""
        self.factor, self.residual = factor.double(), residual
        self.problem = _Problem(precision, self.factor, residual, residual_diagonal.double(), rank)

    def log_orthant(
        self, mu: Float[Tensor, " n"], variance: Float[Tensor, " n"], *, seed: int = 0
    ) -> LogProbability:
        """log P(all m < 0)."""
        none = self.factor.new_zeros(len(mu), 0)
        return self.expand(mu, variance, none, seed=seed).value

    def slope(
        self, mu: Float[Tensor, " n"], variance: Float[Tensor, " n"], G: Float[Tensor, "n k"]
    ) -> Float[Tensor, " k"]:
        """d log P / dx at mu + G x with the simpler V: no dense matrix."""
        sites, gauss, _ = _iterate(self.problem, mu.double(), variance.double())
        # d log P / d mu = nu - tau mhat
        return G.mT @ (sites.nu - sites.tau * gauss.mean)[0]

    def expand(
        self,
        mu: Float[Tensor, " n"],
        variance: Float[Tensor, " n"],
        PG: Float[Tensor, "n k"],
        *,
        seed: int = 0,
    ) -> Expansion:
        """log P(all m < 0), and how it changes as mu moves along G; P G is given."""
        mu, variance = mu.double(), variance.double()
        sites, gauss, converged = _iterate(self.problem, mu, variance)
        if not converged:
            warn_caller(
                f"EP has not converged in {MAX_ITER} iterations on a bag of {len(mu)} instances: "
                "its probability may be off by more than its error says",
            )
        exact, slope, bend = _exact_gauss(self.problem, mu, sites, self.factor, self.residual, PG)
        terms = site_terms(gauss, sites, torch.ones_like(sites.tau, dtype=torch.bool))
        c3, error = _corrections(self.problem, sites, gauss)
        error = error + SHARE_OF_CHANGE * (exact - gauss.log_gauss).abs()
        t = mu / variance.sqrt()

        def union(_: int) -> tuple[float, float]:
            rows = torch.nonzero(relevant(torch.special.log_ndtr(t))).flatten()
            cov = _covariance(self.problem, rows, self.factor, self.residual)
            return log_union(mu[rows], cov, seed=seed)

        value = settle(exact + terms.sum(-1) + c3, error, t[None], union)
        return Expansion(value, slope[None], bend[None])


class _Problem:
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
        self.band = _Band(self.p)
        self.log_det_p = -float(self.band.factor(self.p).logdet())
        # V = U U' + D + rest
        pivoted, left = pivoted_cholesky(residual, residual_diagonal, rank)
        self.u = torch.cat([factor, pivoted], dim=1)[self.order]
        self.d = left[self.order]

    def q(self, tau: Float[Tensor, " n"]) -> sp.csr_array:
        """Q = P T^-1 P + P + D, so that (T^-1 + S)^-1 = P (Q + U U')^-1 P."""
        inverse = sp.diags_array(1 / tau.numpy())
        return sp.csr_array(self.p @ inverse @ self.p + self.p + sp.diags_array(self.d.numpy()))

    def step(self, mu: Float[Tensor, " n"], sites: Sites) -> "_Step":
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
        kept = self.band.congruence_diagonal(self.p, banded) - _times(self.p, g).square().sum(1)
        left = kept / tau
        # y = T^-1 nu - mu, z = (T^-1 + S)^-1 y: mhat = mu + y - z / tau
        y = nu / tau - mu
        py = _times(self.p, y[:, None])
        z = _times(self.p, banded.apply(py) - g @ (g.mT @ py))[:, 0]
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
        return _Step(gauss, banded, g)


class _Step(NamedTuple):
    gauss: Gauss
    banded: Banded
    g: Float[Tensor, "n r"]


class _Band:
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


def _iterate(
    problem: _Problem, mu: Float[Tensor, " n"], variance: Float[Tensor, " n"]
) -> tuple[Sites, Gauss, bool]:
    """EP on the simpler V; sites and Gaussian in the caller's order of instances."""
    mu, variance = mu[problem.order], variance[problem.order][None]
    inside = torch.ones_like(variance, dtype=torch.bool)
    _, sites, gauss, converged = fixed_point(
        lambda sites: problem.step(mu, sites).gauss,
        first_sites(mu[None], variance, inside),
        variance,
        inside,
        tol=TOLERANCE,
        max_iter=MAX_ITER,
        floor=FLOOR,
    )
    back = torch.argsort(problem.order)
    mean, var, left = (field[:, back] for field in (gauss.mean, gauss.var, gauss.left))
    return (
        Sites(sites.tau[:, back], sites.nu[:, back]),
        Gauss(mean, var, left, gauss.log_gauss),
        bool(converged),
    )


def _corrections(
    problem: _Problem, sites: Sites, gauss: Gauss
) -> tuple[Float[Tensor, " 1"], Float[Tensor, " 1"]]:
    """c3 and the error estimate of `gpmil.moments.ep.corrections`, some columns of V at a time.

    Columns are solved for in float32: corrections need three digits.
    """
    order = problem.order
    tau = sites.tau[0, order]
    step = problem.step(torch.zeros_like(tau), Sites(tau[None], 0 * tau[None]))
    banded, g = step.banded, step.g.float()
    banded.inverse, banded.below = (_single(a) for a in (banded.inverse, banded.below))
    k3, k4 = (k[0, order].float() for k in cumulants(cavities(gauss, sites).t))
    scale = gauss.var[0, order].rsqrt().float() / tau.float()
    p = problem.p.astype(np.float32)
    sums = torch.zeros(3, dtype=torch.float64)
    skewed = torch.nonzero(k3.abs() + k4.abs() > 1e-4).flatten()
    for cols in skewed.split(CHUNK) if len(skewed) else ():
        # V = T^-1 - T^-1 P (Q + U U')^-1 P T^-1
        right = torch.from_numpy(p[:, cols.numpy()].toarray()) * scale[cols]
        solved = local_solve(banded, right, cols) - g @ (g.mT @ right)
        corr = (-scale[:, None] * _times(p, solved)).clamp(-1, 1)
        corr[cols, torch.arange(len(cols))] = 0.0
        square = corr * corr
        cube = square * corr
        sums[0] += k3 @ (cube @ k3[cols])
        sums[1] += k3.abs() @ (cube.abs() @ k3[cols].abs())
        sums[2] += k4.abs() @ ((square * square) @ k4[cols].abs())
    return sums[:1] / 12, sums[2:] / 48 + SHARE_OF_C3 * sums[1:2] / 12


def _exact_gauss(
    problem: _Problem,
    mu: Float[Tensor, " n"],
    sites: Sites,
    factor: Float[Tensor, "n m"],
    residual: Rows,
    PG: Float[Tensor, "n k"],
) -> tuple[Float[Tensor, " 1"], Float[Tensor, " k"], Float[Tensor, "k k"]]:
    """lZG with the exact covariance: one dense Cholesky factorisation of P T^-1 P + P + V = L L'.

    And its first and minus its second derivative in x at mu + G x. With y = T^-1 nu - mu those in
    mu are (T^-1 + S)^-1 y and (T^-1 + S)^-1 = P (L L')^-1 P.
    """
    tau, nu = sites.tau[0], sites.nu[0]
    back = torch.argsort(problem.order).numpy()
    p = sp.csr_array(problem.p[back][:, back])
    dense = torch.empty(len(mu), len(mu), dtype=torch.float64)
    for rows in torch.arange(len(mu)).split(CHUNK):
        dense[rows[0] : rows[-1] + 1] = residual(rows)
        dense[rows[0] : rows[-1] + 1].addmm_(factor[rows], factor.mT)
    sparse = sp.coo_array(p @ sp.diags_array(1 / tau.numpy()) @ p + p)
    row, col = (torch.from_numpy(i.astype(np.int64)) for i in sparse.coords)
    dense.view(-1)[row * len(mu) + col] += torch.from_numpy(sparse.data)
    lower, failed = torch.linalg.cholesky_ex(dense)
    if int(failed):
        raise ValueError(
            "expected F F' + E to be positive semi-definite, found that it is not: "
            "was the residual kernel computed from rounded terms?"
        )
    del dense
    y = nu / tau - mu
    right = torch.cat([PG, _times(p, y[:, None])], dim=1)
    solved = torch.linalg.solve_triangular(lower, right, upper=False)
    X, white = solved[:, :-1], solved[:, -1]
    log_det = tau.log().sum() - 2 * problem.log_det_p + 2 * lower.diagonal().log().sum()
    log_gauss = ((-log_det + (nu * nu / tau).sum() - white.square().sum()) / 2)[None]
    return log_gauss, X.mT @ white, X.mT @ X


def _covariance(
    problem: _Problem, rows: Int[Tensor, " k"], factor: Float[Tensor, "n m"], residual: Rows
) -> Float[Tensor, "k k"]:
    """S = Sigma + Sigma V Sigma for some instances, exactly."""
    banded = problem.band.factor(problem.p)
    where = torch.argsort(problem.order)
    unit = torch.zeros(len(where), len(rows), dtype=torch.float64)
    unit[where[rows], torch.arange(len(rows))] = 1.0
    sigma = banded.apply(unit)[where]
    out = sigma[rows] + (sigma.mT @ factor) @ (factor.mT @ sigma)
    for some in torch.arange(len(where)).split(CHUNK):
        out += sigma[some].mT @ (residual(some).double() @ sigma)
    return (out + out.mT) / 2


def _times(p: sp.csr_array, x: Tensor) -> Tensor:
    return torch.from_numpy(p @ x.numpy())
