"""What constraints add to EP's log P away from the effect at which their sites were found.

With m ~ N(M, V), the Gaussian that the sites T, nu make there, and r_i(m) = 1(m < 0) exp(tau_i
m^2/2 - nu_i m) a constraint over its site, log E[prod_i r_i(m_i)] is expanded in the correlations.
With C = V without its diagonal and lambda_i(x) = log E[r_i] at m_i ~ N(x, V_ii),

    trees   sum_i lambda_i(x_i) - a'C a/2,  x = M(s) + C a,  a = lambda'(x): all that pulls do
    rings   sum_k tr(C B)^k / 2k,  B = diag lambda''(x), k >= 2
    c3      1/12 sum_ij C_ij^3 lambda'''_i lambda'''_j, as in ep.py

Rings are summed for k = 2. At s = -inf no constraint is left, f = 0 and all of them are known:
-log|I - C B|/2 = (log|I + S T| + sum_i log(1 - tau_i V_ii)) / 2. What k > 2 adds there is brought
to other s as if C B had m equal eigenvalues e, in proportion to how much of B there is.
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from gpmil.fast import compiled
from gpmil.moments.ep import EP
from gpmil.moments.sites import Cavity, Gauss, Sites, cumulants, new_sites
from gpmil.moments.truncated import upper_tail, variance_ratio

PASSES = 4  # to the pulls a; the sum of the trees is stationary in them
CLOSE, MOST_STEPS = 1e-4, 60  # of the conjugate gradients

Columns = Float[Tensor, "b n k"]


class AtOne(NamedTuple):
    """EP of b bags at one s each: N(mu + s, S) times the sites."""

    s: Float[Tensor, " b"]
    mu: Float[Tensor, "b n"]  # with s
    variance: Float[Tensor, "b n"]  # diagonal of S
    sites: Sites
    gauss: Gauss
    error: Float[Tensor, " b"]  # of log P
    mask: Bool[Tensor, "b n"]


def at_one(found: EP, mu: Tensor, cov: Tensor, mask: Tensor, s: Float[Tensor, " b"]) -> AtOne:
    """From EP on padded matrices; mu with s."""
    var = found.cov.diagonal(dim1=-2, dim2=-1)
    left = (1 - found.tau * var).clamp(min=1e-15)
    return AtOne(
        s,
        torch.where(mask, mu, 0.0),
        torch.where(mask, cov.diagonal(dim1=-2, dim2=-1), 1.0),
        Sites(found.tau, found.nu),
        Gauss(found.mean, var, left, found.log_gauss),
        found.error,
        mask,
    )


class Correlations(NamedTuple):
    """What must be known of C, V without its diagonal."""

    times: Callable[[Columns], Columns]  # C x
    powers: Callable[[Columns, Tensor], tuple[Columns, Tensor]]  # C o C x and C o C o C y


def dense(V: Float[Tensor, "b n n"]) -> Correlations:
    """From the matrix itself."""
    C = V.clone()
    C.diagonal(dim1=-2, dim2=-1).zero_()

    def powers(x: Columns, y: Tensor) -> tuple[Columns, Tensor]:
        square = C * C
        first = square @ x
        return first, square.mul_(C) @ y

    return Correlations(lambda x: C @ x, powers)


class Terms:
    """The terms of log E[prod_i r_i(m_i)], m ~ N(M, V), for every column of M."""

    def __init__(self, at: AtOne, correlations: Correlations, M: Columns) -> None:
        self.at, self.correlations, self.M = at, correlations, M
        self.tau, self.nu = (x[..., None] for x in at.sites)
        self.var, self.left = at.gauss.var[..., None], at.gauss.left[..., None]
        self.scale = (self.left * self.var).rsqrt()  # 1 / sd of the cavity
        self.mask = at.mask[..., None]
        self.kernel = None if M.is_cuda else compiled.sites()
        self._solve()
        self._pairs()

    def _solve(self) -> None:
        """a = lambda'(M + C a), by Anderson's rule with a memory of one step."""
        a, u = torch.zeros_like(self.M), torch.zeros_like(self.M)
        last: tuple[Tensor, Tensor] | None = None
        for _ in range(PASSES - 1):
            pull = self._pulls(self.M + u)
            f, new = pull - a, pull
            if last is not None:
                da, df = a - last[0], f - last[1]
                # argmin_g |f - g df|
                size = df.square().sum(1, keepdim=True).clamp(min=1e-300)
                new = pull - (df * f).sum(1, keepdim=True) / size * (da + df)
            last, a = (a, f), new
            u = self.correlations.times(a)
        self.x = self.M + u
        value, self.a, self.B, self.third = self._derivatives(self.x)
        self.trees = (value - a * u / 2).sum(1)

    def _cavities(self, x: Columns) -> tuple[Columns, Columns, Columns]:
        """Means of the cavities in standard deviations, with log(1 - Phi(t)) and h(t)."""
        t = (x - self.nu * self.var) * self.scale
        return t, *upper_tail(t)

    def _pulls(self, x: Columns) -> Columns:
        """lambda'(x)."""
        if self.kernel is not None:
            pull = torch.empty_like(x)
            largest = self.kernel.pulls(_flat(x), *self._rows(), _flat(pull))
            if largest < self.kernel.FURTHEST:
                return pull
            self.kernel = None
        t, _, h = self._cavities(x)
        return torch.where(self.mask, (t - h) * self.scale - x / self.var, 0.0)

    def _derivatives(self, x: Columns) -> tuple[Columns, Columns, Columns, Columns]:
        """lambda and its first three derivatives."""
        if self.kernel is not None:
            value, pull, second, third = torch.empty(4, *x.shape, dtype=x.dtype)
            out = (_flat(y) for y in (value, pull, second, third))
            self.kernel.bends(_flat(x), *self._rows(), *out)
            return value, pull, second, third
        t, log_upper, h = self._cavities(x)
        z = x * self.var.rsqrt()
        kept, k3 = variance_ratio(t), cumulants(t.flatten(1))[0].view_as(t)
        # -log(v p)/2 + h^2/(2p) - x^2/(2v) + log Phi(-h/sqrt p), as in sites.site_terms
        value = -self.left.log() / 2 + (t - z) * (t + z) / 2 + log_upper
        pull, second = (t - h) * self.scale - x / self.var, (kept / self.left - 1) / self.var
        third = k3 * (kept.sqrt() * self.scale) ** 3
        value, pull, second, third = (
            torch.where(self.mask, y, 0.0) for y in (value, pull, second, third)
        )
        return value, pull, second, third

    def _rows(self) -> tuple[np.ndarray, ...]:
        """What the compiled loops must know of every row."""
        at = self.at
        numbers = (at.sites.nu, at.gauss.var, at.gauss.left, at.mask)
        # in one layout: loops are compiled for each
        return tuple(y.reshape(-1).contiguous().numpy() for y in numbers)

    def _pairs(self) -> None:
        """Sums over pairs of patches."""
        # lambda'' without constraints: r is exp(tau m^2/2 - nu m)
        free = torch.where(self.mask, self.tau / self.left, 0.0)
        pairs, cubes = self.correlations.powers(torch.cat([self.B, free], -1), self.third)
        self.c3 = (self.third * cubes).sum(1) / 12
        self.second = (self.B * pairs[..., :-1]).sum(1) / 4
        self.second_free = (free * pairs[..., -1:]).sum(1) / 4
        # how much of B there is at s: none at s*, all of it at -inf
        shared = (self.B * pairs[..., -1:]).sum(1) / 4
        self.much = shared / self.second_free.clamp(min=1e-300)
        # d / dx of the rings of two
        self.ring_pull = self.third * pairs[..., :-1] / 2

    def rings(self) -> tuple[Float[Tensor, "b k"], Float[Tensor, "b k"]]:
        """All rings, and those of more than two."""
        at, (tau, nu) = self.at, self.at.sites
        mean = at.gauss.mean
        # log|I + S T| / 2 = -lZG + (nu'mhat + mu'(nu - T mhat)) / 2
        whole = (nu * mean + at.mu * (nu - tau * mean)).sum(-1) / 2 - at.gauss.log_gauss
        whole = whole + torch.where(at.mask, at.gauss.left.log(), 0.0).sum(-1) / 2
        # the eigenvalue e, m e^2 / 4 being the ring of two: q = 2e/3 + e^2/2 + ..., solved nearly
        q = (whole[:, None] / self.second_free.clamp(min=1e-300) - 1).clamp(-0.8, 20.0)
        e = 1.5 * q / (1 + 1.13 * q)
        more = _more_than_two((e * self.much).clamp(max=0.99), e, self.much)
        more = q * self.second_free * more
        more = torch.where((self.second_free > 1e-12) & more.isfinite(), more, 0.0)
        return self.second + more, more

    def sites(self) -> Sites:
        """The sites that EP would have at these values, (b, n, k), nearly.

        Cavities at x with their constraints; and the pull of the rings, which by the site has
        become p/h' times what it was, h' = 1 + lambda'' v.
        """
        t = self._cavities(self.x)[0]
        rows, var, mask = (x.expand_as(t).flatten(1) for x in (t, self.var / self.left, self.mask))
        tau, nu = (x.view_as(t) for x in new_sites(Cavity(rows, var), mask))
        return Sites(tau, nu + self.ring_pull * self.left / variance_ratio(t))

    def pulls(self) -> Columns:
        """d f / d mu = nu - T E[m], E[m] = M + V a: to some per cent."""
        return self.nu + self.a - self.tau * (self.M + self._times_V(self.a))

    def means(self, sites: Sites, M: Columns) -> Columns:
        """E[m] with these sites (b, n, k) where it is M with those at s*.

        With D = T_k - T, e = nu_k - nu: (V^-1 + D) (E[m] - M) = e - D M, by conjugate gradients
        on all columns together, preconditioned by V, which is all that they use.
        """
        D = sites.tau - self.tau
        left = sites.nu - self.nu - D * M
        p = self._times_V(left)
        q, out = left, torch.zeros_like(M)  # q = V^-1 p
        size = _dots(left, p).clamp(min=1e-300)
        least = CLOSE**2 * size
        for _ in range(MOST_STEPS):
            Ap = q + D * p
            step = size / _dots(p, Ap).clamp(min=1e-300)
            out, left = out + step * p, left - step * Ap
            z = self._times_V(left)
            new = _dots(left, z)
            if bool((new <= least).all()):
                break
            p, q, size = z + new / size * p, left + new / size * q, new.clamp(min=1e-300)
        return M + out

    def _times_V(self, x: Columns) -> Columns:
        return self.var * x + self.correlations.times(x)


def _dots(x: Columns, y: Columns) -> Float[Tensor, "b 1 k"]:
    return (x * y).sum(1, keepdim=True)


def _flat(x: Columns) -> np.ndarray:
    """The rows of all bags, one after the other."""
    return x.reshape(-1, x.shape[-1]).numpy()


def _more_than_two(x: Tensor, e: Tensor, much: Tensor) -> Tensor:
    """Rings of three and more at x = e much, over those at e: -log(1 - x)/2 - x/2 - x^2/4."""
    small = e.abs() < 1e-3
    e = torch.where(small, 0.5, e)
    at_s, free = (-torch.log1p(-z) / 2 - z / 2 - z.square() / 4 for z in (x, e))
    return torch.where(small, much**3, at_s / free)
