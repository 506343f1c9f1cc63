"""Sites of expectation propagation, and the one loop that brings them to their fixed point.

A bag m ~ N(mu, S) is cut to all m < 0. Every constraint m_i < 0 is replaced by a Gaussian site
exp(nu_i m_i - tau_i m_i^2 / 2) whose moments match those of the constraint in the presence of all
other sites (its cavity). How N(mu, S) times the sites is computed depends on the form of S: dense
batches in ep.py, sparse precisions in coupled.py, sparse plus low rank in orthant_large.py. All
the rest is here. fast/sites.py is its compiled twin for a single bag.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from gpmil.moments.truncated import SERIES, excess, hazard, variance_ratio

MAX_ITER = 200
DEPTH = 4
WEAK = 1e-8  # tau S_ii below which a site is not extrapolated


class Sites(NamedTuple):
    """tau and nu of every coordinate."""

    tau: Float[Tensor, "b n"]
    nu: Float[Tensor, "b n"]


class Gauss(NamedTuple):
    """N(mu, S) times all sites: its marginals, and the log of its integral."""

    mean: Float[Tensor, "b n"]
    var: Float[Tensor, "b n"]  # v, the diagonal of V = (S^-1 + T)^-1
    left: Float[Tensor, "b n"]  # v p = 1 - tau v, the share of the precision that is not the site
    log_gauss: Float[Tensor, " b"]


class Cavity(NamedTuple):
    """N(mu, S) times all sites but one: the mean in standard deviations, and the variance."""

    t: Float[Tensor, "b n"]
    var: Float[Tensor, "b n"]


def cavities(gauss: Gauss, sites: Sites) -> Cavity:
    """Take every site out in turn: p = 1/v - tau, h = mhat/v - nu."""
    h = gauss.mean - sites.nu * gauss.var
    return Cavity(h * (gauss.left * gauss.var).rsqrt(), gauss.var / gauss.left)


def new_sites(cavity: Cavity, mask: Bool[Tensor, "b n"]) -> Sites:
    """Sites whose moments are those of the cavity cut to m < 0."""
    t, var = cavity
    h = hazard(t)
    # delta = h (h - t) and 1 - delta; in the far tail each from a series where it cancels
    delta = h * (h - t)
    kept, gap = 1 - delta, h - t
    if float(t.max()) > SERIES:
        kept, gap = variance_ratio(t), excess(t)
        delta = torch.where(t > SERIES, 1 - kept, delta)
    # tau = delta / ((1 - delta) v),  nu = (t delta - h) / ((1 - delta) sqrt v)
    pull = torch.where(t > 0, -(gap + t * kept), t * delta - h)
    scale = mask / kept
    return Sites(scale * delta / var, scale * pull * var.rsqrt())


def first_sites(
    mu: Float[Tensor, "b n"], variance: Float[Tensor, "b n"], mask: Bool[Tensor, "b n"]
) -> Sites:
    """With no site at all the cavity is the prior: this sweep costs no factorisation."""
    return new_sites(Cavity(mu * variance.rsqrt(), variance), mask)


def site_terms(gauss: Gauss, sites: Sites, mask: Bool[Tensor, "b n"]) -> Float[Tensor, "b n"]:
    """What each constraint adds to log P beyond the Gaussian integral; zero for padding."""
    t = cavities(gauss, sites).t
    # -log(v p)/2 + h^2/(2p) - mhat^2/(2v) + log Phi(-h/sqrt p)
    s = gauss.mean * gauss.var.rsqrt()
    terms = -gauss.left.log() / 2 + (t - s) * (t + s) / 2 + torch.special.log_ndtr(-t)
    return torch.where(mask, terms, 0.0)


def cumulants(t: Float[Tensor, "b n"]) -> tuple[Float[Tensor, "b n"], Float[Tensor, "b n"]]:
    """Third and fourth cumulants of N(t, 1) given m < 0, over its standard deviation^3 and ^4."""
    h, kept = hazard(t), variance_ratio(t)
    # cumulants are derivatives in t: with r = h(t), r' = h (h - t), k3 = -r'', k4 = -r'''
    r1 = h * (h - t)
    r2 = r1 * (2 * h - t) - h
    r3 = r2 * (2 * h - t) + r1 * (2 * r1 - 2)
    s2 = t.clamp(min=SERIES) ** -2
    series3 = s2.sqrt() * s2 * (-2 + s2 * (24 + s2 * (-300 + s2 * 4144)))
    series4 = s2 * s2 * (6 + s2 * (-120 + s2 * (2100 - s2 * 37296)))
    k3 = torch.where(t > SERIES, series3, -r2)
    k4 = torch.where(t > SERIES, series4, -r3)
    return k3 / kept**1.5, k4 / kept**2


class Reached(NamedTuple):
    """Where the loop has come to, for b bags."""

    n_iter: int
    sites: Sites
    gauss: Gauss
    converged: Bool[Tensor, " b"]


def fixed_point(
    step: Callable[[Sites], Gauss],
    start: Sites,
    variance: Float[Tensor, "b n"],
    mask: Bool[Tensor, "b n"],
    *,
    tol: float,
    max_iter: int = MAX_ITER,
    floor: float = 0.0,
    leave: Callable[[Reached], None] | None = None,
) -> Reached:
    """Sites that change by less than `tol` of the largest one, by Anderson acceleration.

    `step` gives N(mu, S) times the sites. `variance` is the diagonal of S: sites are measured
    against it, so that one tolerance fits all of them, and `floor` is the least tau S_ii. `leave`
    is called when some bags have converged and others have not; `step` goes on without the former.
    """
    n = variance.shape[-1]
    unit = torch.cat([variance, variance.sqrt()], dim=-1)
    x = _floored(torch.cat(start, dim=-1) * unit, floor)
    anderson = Anderson(x)
    for i in range(1, max_iter + 1):
        sites = Sites(*(x / unit).split(n, dim=-1))
        gauss = step(sites)
        new = torch.cat(new_sites(cavities(gauss, sites), mask), dim=-1) * unit
        f = _floored(new, floor) - x
        done = f.abs().amax(-1) <= tol * x.abs().amax(-1)
        reached = Reached(i, sites, gauss, done)
        if i == max_iter or bool(done.all()):
            break
        if leave is not None and bool(done.any()):
            leave(reached)
            unit, mask, x, f = pick(~done, (unit, mask, x, f))
            anderson.keep(~done)
        x = _floored(anderson.step(x, f, n), floor)
    return reached


def _floored(x: Float[Tensor, "b k"], floor: float) -> Float[Tensor, "b k"]:
    x[:, : x.shape[-1] // 2].clamp_(min=floor)
    return x


def pick(rows: Bool[Tensor, " b"], things: Any) -> Any:
    """Some bags of every tensor in tuples and named tuples; what is no tensor stays as it is."""
    if isinstance(things, tuple):
        picked = [pick(rows, thing) for thing in things]
        return type(things)(*picked) if hasattr(things, "_fields") else tuple(picked)
    return things[rows] if isinstance(things, Tensor) else things


class Anderson:
    """Anderson acceleration of b fixed points x of length k at a time (type II, depth 4).

    x holds n precisions tau first, then n values of nu.
    """

    def __init__(self, x: Float[Tensor, "b k"]) -> None:
        self.dx = x.new_zeros(x.shape[0], DEPTH, x.shape[1])
        self.df = self.dx.clone()
        self.last: tuple[Tensor, Tensor] | None = None
        self.slot = 0

    def keep(self, rows: Bool[Tensor, " b"]) -> None:
        """Forget the bags that are done."""
        self.dx, self.df = self.dx[rows], self.df[rows]
        if self.last is not None:
            self.last = (self.last[0][rows], self.last[1][rows])

    def step(
        self, x: Float[Tensor, "b k"], f: Float[Tensor, "b k"], n: int
    ) -> Float[Tensor, "b k"]:
        """Next iterate from x and f = G(x) - x."""
        plain = x + f
        if self.last is None:
            self.last = (x, f)
            return plain
        self.dx[:, self.slot], self.df[:, self.slot] = x - self.last[0], f - self.last[1]
        self.slot = (self.slot + 1) % DEPTH
        self.last = (x, f)
        # gamma = argmin |f - gamma df|; the ridge keeps empty slots at zero
        gram = self.df @ self.df.mT
        diagonal = gram.diagonal(dim1=-2, dim2=-1)
        diagonal.add_((1e-12 * diagonal.amax(-1) + 1e-300)[:, None])
        gamma = torch.linalg.solve(gram, matvec(self.df, f))
        new = plain - matvec((self.dx + self.df).mT, gamma)
        # a step that leads to a negative precision starts afresh
        bad = (new[:, :n].amin(-1) < 0) | ~new.sum(-1).isfinite()
        if bool(bad.any()):
            self.dx[bad], self.df[bad] = 0.0, 0.0
            new = torch.where(bad[:, None], plain, new)
        # tau and nu that all but vanish must come from one cavity: nu / sqrt tau is used
        weak = (new[:, :n] < WEAK).repeat(1, 2)
        return torch.where(weak, plain, new)


def matvec(a: Float[Tensor, "b m n"], x: Float[Tensor, "b n"]) -> Float[Tensor, "b m"]:
    """A x, bag by bag."""
    return (a @ x[:, :, None])[:, :, 0]
