"""Expectation propagation for a Gaussian bag cut to all m < 0, m ~ N(mu, S), many bags at a time.

The sites (`moments.sites`) give log P(all m < 0), the mean and the covariance of m given all m < 0,
and corrections of log P from the third and fourth cumulants that a Gaussian site cannot match.

Bags are padded to one length: a padded coordinate has a site of exactly zero and adds nothing.
"""

from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from gpmil.moments.sites import (
    MAX_ITER,
    Cavity,
    Gauss,
    Reached,
    Sites,
    cavities,
    cumulants,
    first_sites,
    fixed_point,
    matvec,
    pick,
    site_terms,
)

TOLERANCE = 1e-6
EPS = 2**-52
DEEP = 1e3  # tau S_ii above which 1 - tau v is no longer formed as a difference
# What c3 leaves out is about this share of it where the fourth cumulants happen to vanish.
SHARE_OF_C3 = 0.03
# Of a lone coordinate's site, to start with: correlated neighbours share the work. On slides with
# coupling 1 the sites end at 0.7 of it on average, and this share saves one step in six.
FIRST_SHARE = 0.8


class EP(NamedTuple):
    """Sites and what follows from them, for b bags padded to n coordinates."""

    tau: Float[Tensor, "b n"]  # precisions of the sites, >= 0
    nu: Float[Tensor, "b n"]  # precision-weighted means of the sites
    mean: Float[Tensor, "b n"]  # E[m | all m < 0]
    cov: Float[Tensor, "b n n"]  # Cov[m | all m < 0] = (S^-1 + T)^-1
    log_gauss: Float[Tensor, " b"]  # log integral of N(m | mu, S) prod_i exp(nu m - tau m^2 / 2)
    log_p: Float[Tensor, " b"]  # log P(all m < 0) of plain EP
    c3: Float[Tensor, " b"]  # correction from third cumulants: log P = log_p + c3
    c4: Float[Tensor, " b"]  # the same from fourth cumulants: tells the error, is not added
    error: Float[Tensor, " b"]  # estimated error of log_p + c3
    n_iter: Int[Tensor, " b"]
    converged: Bool[Tensor, " b"]


def ep(
    mu: Float[Tensor, "b n"],
    cov: Float[Tensor, "b n n"],
    mask: Bool[Tensor, "b n"] | None = None,
    *,
    tol: float = TOLERANCE,
    max_iter: int = MAX_ITER,
    start: Sites | None = None,
) -> EP:
    """Run EP to a relative change of the sites below `tol`, on the device of `mu`, in float64.

    `mask` is False where a bag is padded; mu and cov may hold anything there. `start` are sites
    to begin with, those of a similar mu say; they change the way, not where it leads.

    >>> mu, cov = torch.tensor([[0.3, -1.0]]).double(), torch.tensor([[[1.0, 0.6], [0.6, 2.0]]])
    >>> result = ep(mu, cov.double())
    >>> round(float(result.log_p + result.c3), 3)
    -1.082
    """
    mu, cov, mask = padded(mu.double(), cov.double(), mask)
    variance = cov.diagonal(dim1=-2, dim2=-1)
    if start is None:
        tau, nu = first_sites(mu, variance, mask)
        start = Sites(FIRST_SHARE * tau, FIRST_SHARE * nu)
    batch = _Batch(mu, cov, mask)
    last = fixed_point(
        batch.step, start, variance, mask, tol=tol, max_iter=max_iter, leave=batch.leave
    )
    return batch.result(last)


def padded(
    mu: Float[Tensor, "b n"], cov: Float[Tensor, "b n n"], mask: Bool[Tensor, "b n"] | None
) -> tuple[Float[Tensor, "b n"], Float[Tensor, "b n n"], Bool[Tensor, "b n"]]:
    """Replace padding by independent standard normals, which no site touches."""
    if mask is None or bool(mask.all()):
        return mu, cov, torch.ones_like(mu, dtype=torch.bool)
    eye = torch.eye(mu.shape[-1], dtype=mu.dtype, device=mu.device)
    both = mask[:, :, None] & mask[:, None, :]
    return torch.where(mask, mu, 0.0), torch.where(both, cov, eye), mask


def check_gaussians(mu: Tensor, cov: Tensor, mask: Tensor) -> None:
    """Raise ValueError, naming the bag, for what is not a mean and a covariance."""
    empty = ~mask.any(-1)
    if empty.any():
        raise ValueError(f"expected at least one coordinate, found none in bag {_first(empty)}")
    bad = (mask & ~mu.isfinite()).any(-1)
    if not bool(cov.sum().isfinite()):  # padding may hold anything
        both = mask[:, :, None] & mask[:, None, :]
        bad |= (both & ~cov.isfinite()).any(-1).any(-1)
    if bad.any():
        raise ValueError(
            "expected a finite mean and covariance, found entries that are NaN or infinite in bag "
            f"{_first(bad)}: check the features and the kernel settings"
        )
    flat = mask & (cov.diagonal(dim1=-2, dim2=-1) <= 0)
    if flat.any():
        bag = _first(flat.any(-1))
        raise ValueError(
            f"expected positive variances, found a variance that is not at coordinate "
            f"{_first(flat[bag])} of bag {bag}"
        )


def _first(flags: Bool[Tensor, " k"]) -> int:
    return int(torch.nonzero(flags)[0])


class Factors(NamedTuple):
    """B = I + T^.5 S T^.5 = L L', and what follows from it."""

    lower: Float[Tensor, "b n n"]  # L
    half: Float[Tensor, "b n n"]  # L^-1 T^.5 S, so that V = S - half' half


def gaussian_step(
    mu: Float[Tensor, "b n"], cov: Float[Tensor, "b n n"], sites: Sites
) -> tuple[Gauss, Factors]:
    """Marginals of N(mu, S) times the sites; no inverse of S."""
    tau, nu = sites
    root = tau.sqrt()
    n = root.shape[-1]
    # s = T^-.5 nu; s - T^.5 mu rides along with T^.5 S as one more column
    s = torch.where(tau > 0, nu / root, 0.0)
    right = torch.empty((*root.shape, n + 1), dtype=root.dtype, device=root.device)
    scaled = torch.mul(root[:, :, None], cov, out=right[..., :n])
    right[..., n] = s - root * mu
    b = scaled * root[:, None, :]
    b.diagonal(dim1=-2, dim2=-1).add_(1.0)
    lower = torch.linalg.cholesky(b)
    solved = torch.linalg.solve_triangular(lower, right, upper=False)
    half, white = solved[..., :n], solved[..., n]
    prior = cov.diagonal(dim1=-2, dim2=-1)
    var = (prior - half.square().sum(-2)).clamp(min=1e-300)
    left = 1 - tau * var
    # with x = B^-1 (s - T^.5 mu): mhat = mu + S T^.5 x = mu + (L^-1 T^.5 S)' L'x
    mean = mu + matvec(half.mT, white)
    weight = tau * prior
    if float(weight.max()) > DEEP:
        # Both differences cancel: v p = diag B^-1, v = (1 - v p) / tau, mhat = T^-.5 (s - x)
        left = _inverse(lower).square().sum(-2)
        var = torch.where(weight > 1, (1 - left) / tau, var)
        x = _solve(lower.mT, white, upper=True)
        mean = torch.where(weight > 1, (s - x) / root, mean)
    # s and x are of the order of the result in the deepest tail:
    # lZG = -log|B|/2 + s's/2 - (s - T^.5 mu)'x/2
    log_gauss = (s * s - white * white).sum(-1) / 2 - _log_diagonal(lower)
    return Gauss(mean, var, left.clamp(min=1e-15), log_gauss), Factors(lower, half)


def covariance(
    cov: Float[Tensor, "b n n"], tau: Float[Tensor, "b n"], factors: Factors
) -> Float[Tensor, "b n n"]:
    """V = (S^-1 + T)^-1."""
    v = torch.baddbmm(cov, factors.half.mT, factors.half, alpha=-1)
    weight = tau * cov.diagonal(dim1=-2, dim2=-1)
    if float(weight.max()) > DEEP:
        # V = T^-.5 (I - B^-1) T^-.5 between sites that outweigh the prior
        inverse = _inverse(factors.lower)
        rest = torch.eye(tau.shape[-1], dtype=tau.dtype, device=tau.device) - inverse.mT @ inverse
        scale = tau.clamp(min=1e-300).rsqrt()
        both = (weight > 1)[:, :, None] & (weight > 1)[:, None, :]
        v = torch.where(both, scale[:, :, None] * rest * scale[:, None, :], v)
    return v


def _inverse(factor: Float[Tensor, "b n n"]) -> Float[Tensor, "b n n"]:
    eye = torch.eye(factor.shape[-1], dtype=factor.dtype, device=factor.device)
    return torch.linalg.solve_triangular(factor, eye.expand_as(factor), upper=False)


def _log_diagonal(lower: Float[Tensor, "b n n"]) -> Float[Tensor, " b"]:
    return lower.diagonal(dim1=-2, dim2=-1).log().sum(-1)


def corrections(
    v: Float[Tensor, "b n n"], cavity: Cavity, mask: Bool[Tensor, "b n"]
) -> tuple[Float[Tensor, " b"], Float[Tensor, " b"], Float[Tensor, " b"]]:
    """c3 and c4: pairs of coordinates interact through the cumulants their sites leave out.

    The third result estimates the error of log P_EP + c3: c4 with every term taken as positive,
    plus a share of c3 taken likewise. Both were set on slides of 10 to 600 patches with real
    features, coupling 0 to 10, two settings of the kernel, means shifted by -2 to 12, and on
    random covariances: the error (against the tilted sampler) stayed below the estimate in six
    bags of seven, and below twice the estimate plus 0.002 in all 670; so it did in 200 bags of a
    data set that had no part in this. Where sum_i P(m_i > 0) < 0.001 the estimate means nothing.
    """
    k3, k4 = (torch.where(mask, k, 0.0) for k in cumulants(cavity.t))
    scale = v.diagonal(dim1=-2, dim2=-1).rsqrt()
    corr = (scale[:, :, None] * v).mul_(scale[:, None, :])
    corr.diagonal(dim1=-2, dim2=-1).zero_()
    power = corr * corr
    cube = corr.mul_(power)
    # c3 = 1/12 sum_{i!=j} k3_i k3_j corr_ij^3,  c4 = 1/48 sum_{i!=j} k4_i k4_j corr_ij^4
    c3 = _quadratic(cube, k3) / 12
    size3 = _quadratic(cube.abs_(), k3.abs()) / 12
    fourth = power.square_()
    c4, size4 = _quadratic(fourth, k4) / 48, _quadratic(fourth, k4.abs()) / 48
    return c3, c4, size4 + SHARE_OF_C3 * size3


def _quadratic(a: Float[Tensor, "b n n"], x: Float[Tensor, "b n"]) -> Float[Tensor, " b"]:
    return (x * matvec(a, x)).sum(-1)


def _solve(
    factor: Float[Tensor, "b n n"], x: Float[Tensor, "b n"], upper: bool = False
) -> Float[Tensor, "b n"]:
    return torch.linalg.solve_triangular(factor, x[:, :, None], upper=upper)[:, :, 0]


class _Batch:
    """Padded bags on their way; they leave as they converge."""

    def __init__(self, mu: Tensor, cov: Tensor, mask: Tensor) -> None:
        self.mu, self.cov, self.mask = mu, cov, mask
        self.rows = torch.arange(len(mu), device=mu.device)
        self.finished: list[tuple[Tensor, EP]] = []

    def step(self, sites: Sites) -> Gauss:
        gauss, self.factors = gaussian_step(self.mu, self.cov, sites)
        return gauss

    def leave(self, reached: Reached) -> None:
        """Finish the bags that have converged, go on with the others."""
        done = reached.converged
        result = _finish(*pick(done, (reached, self.cov, self.mask, self.factors)))
        self.finished.append((self.rows[done], result))
        kept = pick(~done, (self.mu, self.cov, self.mask, self.rows))
        self.mu, self.cov, self.mask, self.rows = kept

    def result(self, last: Reached) -> EP:
        """All bags in the order in which they came."""
        rest = _finish(last, self.cov, self.mask, self.factors)
        if not self.finished:
            return rest
        rows, results = zip(*self.finished, (self.rows, rest), strict=True)
        order = torch.argsort(torch.cat(rows))
        return EP(*(torch.cat(parts)[order] for parts in zip(*results, strict=True)))


def _finish(reached: Reached, cov: Tensor, mask: Tensor, factors: Factors) -> EP:
    """log P, its corrections and its error from the sites and the Gaussian they make."""
    n_iter, sites, gauss, converged = reached
    v = covariance(cov, sites.tau, factors)
    terms = site_terms(gauss, sites, mask)
    c3, c4, error = corrections(v, cavities(gauss, sites), mask)
    rounding = EPS * (gauss.log_gauss.abs() + terms.abs().sum(-1) + mask.sum(-1))
    log_p = gauss.log_gauss + terms.sum(-1)
    return EP(
        tau=sites.tau,
        nu=sites.nu,
        mean=gauss.mean,
        cov=v,
        log_gauss=gauss.log_gauss,
        log_p=log_p,
        c3=c3,
        c4=c4,
        error=error + rounding,
        n_iter=torch.full_like(converged, n_iter, dtype=torch.int64),
        converged=converged,
    )
