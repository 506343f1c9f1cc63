"""The likelihood of graded bags: a patch has the grade #{k : m_i > b_k}, a bag its largest.

With cut points b_1 = 0 < b_2 < ... < b_K-1 and Q(b) = P(all m_i < b), m_b ~ N(mu_b, diag(sigma^2) +
tau^2 11') as in slide_effect.py,

    Y = 0        Z = Q(b_1)                 a negative bag at mu - b_1
    Y = K - 1    Z = 1 - Q(b_K-1)           a positive bag at mu - b_K-1
    between      Z = Q(b_Y+1) - Q(b_Y)      all below the one, not all below the other

The ends are binary bags at moved means. Between them, with Q+ = Q(b_Y+1), Q- = Q(b_Y), r = Q- / Z,

    d log Z = (1 + r) d log Q+ - r d log Q-,    d2 Z / Z = (1 + r) d2 Q+ / Q+ - r d2 Q- / Q-

Where digits would cancel, Q- being nearly Q+, the complements take their place, Z = (1 - Q-) -
(1 - Q+): two positive bags. Where these are alike as well, z(s) = q+(s) - q-(s) is summed over the
effect itself. Given s, with D = log q- - log q+, r = e^D / (1 - e^D) and e = d log q+ - d log q-,

    d log z = d log q+ + r e,    d2 log z = diag(c+ + r (c+ - c-)) - r (1 + r) e e'

c the second derivatives of log q: a rank-one part, as that of a bag whose patches are partly known,
so that the sum of taught.py serves.
"""

import math
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from gpmil.moments import slide_effect, taught, with_effect
from gpmil.moments.given_effect import Patches
from gpmil.moments.independent import IndependentPatches
from gpmil.moments.likelihood import Group, Likelihood, LogZ, LowRank, has_effect
from gpmil.moments.taught import AtEffect, Both, Lesson, Taught
from gpmil.moments.truncated import excess, log_not, upper_tail
from gpmil.moments.with_effect import PatchesWithEffect

CLOSE = -0.03  # log of the smaller less that of the larger one, above which digits are lost
FAR = -8.0  # t below which log(1 - Phi) is minus Phi to the last digit
TINY = -30.0  # log(-D) below which 1 - e^D = -D
HALF_LOG_2PI = 0.5 * math.log(2 * math.pi)


def graded(
    group: Group, grade: Int[Tensor, " b"], cuts: Float[Tensor, " k"]
) -> "IndependentPatches | PatchesWithEffect | GradedPatches":
    """Bags with a grade each; of two grades, the binary likelihood itself."""
    return GradedPatches(group, grade, cuts) if len(cuts) > 1 else with_effect.patches(group)


# --- Bags between two cut points ------------------------------------------------------------------


@dataclass(frozen=True)
class Between(Lesson):
    """Bags with all patches below zero and not all below -width: mu is less the upper cut point."""

    width: Float[Tensor, " b"]

    def some(self, bags: Bool[Tensor, " b"]) -> tuple["Between", Int[Tensor, " k"]]:
        """Some of the bags, and where their rows are."""
        own, rows = self.patches.some(bags)
        return Between(own, self.side[rows], self.width[bags]), rows

    def at(self, s: Float[Tensor, "k b"]) -> AtEffect:
        """All bags at k values of their effects, right in both tails."""
        mu, sigma, _, row = self.patches
        none = torch.zeros_like(s)
        t = (mu + s[:, row]) / sigma
        lower = t + self.width[row] / sigma
        (log_up, h), log_low = upper_tail(t), upper_tail(lower)[0]
        log_d = _log_total(_log_difference(t, lower, log_up, log_low), row, none)
        D = -torch.exp(log_d)
        log_rest = torch.where(log_d < TINY, log_d, log_not(D.clamp(max=-math.exp(TINY))))
        # r h in logs: r may overflow where h underflows
        log_h, log_h_low = (-x.square() / 2 - HALF_LOG_2PI - y
                            for x, y in ((t, log_up), (lower, log_low)))  # fmt: skip
        r, root = (D - log_rest)[:, row], (D / 2 - log_rest)[:, row]
        rh, rh_low = torch.exp(r + log_h), torch.exp(r + log_h_low)
        gamma = (rh_low - rh - h) / sigma
        bent, bent_low = excess(t), excess(lower)
        curvature = (rh_low * bent_low - (rh + h) * bent) / sigma.square()
        pull = (torch.exp(root + log_h_low) - torch.exp(root + log_h)) / sigma
        log_z = none.index_add(1, row, log_up) + log_rest
        slope, curved, pulls = (none.index_add(1, row, x) for x in (gamma, curvature, pull))
        # concave but for bags whose patches differ widely in sigma: nodes need no more than that
        bend = (curved - pulls.square()).clamp(max=0.0)
        return AtEffect(log_z, slope, bend, gamma, curvature, pull)


def _log_difference(t: Tensor, lower: Tensor, log_up: Tensor, log_low: Tensor) -> Tensor:
    """log of log(1 - Phi(t)) - log(1 - Phi(lower)) > 0, for t < lower."""
    # far on the left both are minus Phi, of which the logarithms keep their digits
    log_phi, log_phi_low = torch.special.log_ndtr(t), torch.special.log_ndtr(lower)
    far = log_phi_low + log_not((log_phi - log_phi_low).clamp(max=-1e-300))
    return torch.where(lower < FAR, far, (log_up - log_low).clamp(min=1e-300).log())


def _log_total(x: Float[Tensor, "k n"], row: Tensor, like: Float[Tensor, "k b"]) -> Tensor:
    """log sum exp of every bag."""
    index = row.expand_as(x)
    top = torch.full_like(like, -math.inf).scatter_reduce(1, index, x, "amax")
    return top + torch.zeros_like(like).index_add(1, row, torch.exp(x - top[:, row])).log()


def evaluated(bags: Between, tau: Float[Tensor, ""], full: bool = True) -> Taught:
    """log Z and its derivatives; `full`: with second ones."""
    if float(tau.detach()) == 0:
        return taught.summed(bags, tau, full)
    found, close = by_difference(bags, tau, full, above=False)
    if not bool(close.any()):
        return found
    some, rows = bags.some(close)
    return found.joined(_far_below(some, tau, full), rows, close.nonzero()[:, 0])


def _far_below(bags: Between, tau: Float[Tensor, ""], full: bool) -> Taught:
    """Bags that pass neither cut point, as a rule: their complements differ."""
    found, close = by_difference(bags, tau, full, above=True)
    if not bool(close.any()):
        return found
    some, rows = bags.some(close)
    return found.joined(taught.summed(some, tau, full), rows, close.nonzero()[:, 0])


def by_difference(
    bags: Between, tau: Float[Tensor, ""], full: bool, above: bool
) -> tuple[Taught, Bool[Tensor, " b"]]:
    """Z = Q+ - Q-, or with `above` (1 - Q-) - (1 - Q+); and where that loses digits."""
    (mu, sigma, offsets, row), n = bags.patches, len(bags.side)
    # the larger one and the smaller one as one cohort of twice as many bags
    lower = mu + bags.width[row]
    both = torch.cat([lower, mu] if above else [mu, lower]), sigma.repeat(2)
    starts = torch.cat([offsets, n + offsets[1:]])
    rows = torch.cat([row, row + len(bags.width)])
    positive = torch.full_like(starts[1:], above, dtype=torch.bool)
    if full:
        m = slide_effect.moments(*both, positive, starts, tau, rows)
        slope, log_p = m.gamma, m.log_z
    else:
        slope, log_p = slide_effect.gradient(*both, positive, starts, tau, rows)
    (g, g_less), (log_more, log_less) = slope.split(n), log_p.split(len(bags.width))
    ratio = log_less - log_more
    log_z = log_more + log_not(ratio.clamp(max=CLOSE))
    more, less = torch.exp(log_more - log_z)[row], torch.exp(log_less - log_z)[row]  # 1 + r, r
    gamma = more * g - less * g_less
    none = gamma[:, None][:, :0]
    if not full:
        return Taught(log_z, gamma, gamma, none, none), ratio > CLOSE
    c, c_less = m.curvature.split(n)
    # d2 Q / Q = diag(c) + F F', of 1 - Q it is diag(c) - F F'
    F, F_less = m.factors.split(n)
    up, down = more.sqrt()[:, None] * F, less.sqrt()[:, None] * F_less
    up, down = (down, up) if above else (up, down)
    found = Taught(log_z, gamma, more * c - less * c_less, up, torch.cat([down, gamma[:, None]], 1))
    return found, ratio > CLOSE


# --- The likelihood -------------------------------------------------------------------------------


class GradedPatches(Likelihood):
    """Bags of the lowest and of the highest grade as binary ones, and those between."""

    leaves_out = True  # by leave_grades.py

    def __init__(self, group: Group, grade: Int[Tensor, " b"], cuts: Float[Tensor, " k"]):
        self.group, between = group, (grade > 0) & (grade < len(cuts))
        self.tau = torch.as_tensor(group.effect, dtype=torch.float64, device=cuts.device)
        jump = with_effect.JUMP if has_effect(group.effect) else 0.0
        self.roughness = jump * len(group.positive)
        # of every bag the cut point above it, or the last one
        above = cuts[grade.clamp(max=len(cuts) - 1)]
        self.shift = above[group.row]
        (ends, end_rows), (self.middle, middle_rows) = group.some(~between), group.some(between)
        self.rows = end_rows, middle_rows
        self.ends = with_effect.patches(ends) if len(end_rows) else None
        self.width = above[between] - cuts[grade[between] - 1]

    def _between(self, mu: Float[Tensor, " n"], full: bool) -> Taught:
        g = self.middle
        own = Patches(mu.double(), g.sigma.double(), g.offsets, g.row)
        return evaluated(Between(own, torch.zeros_like(own.mu), self.width), self.tau, full)

    def gradient(self, mu: Float[Tensor, " n"]) -> tuple[Float[Tensor, " n"], LogZ]:
        """gamma and log Z."""
        end_rows, rows = self.rows
        log_z: LogZ = 0.0
        mu, gamma = mu - self.shift, torch.zeros_like(mu)
        if self.ends is not None:
            own, log_z = self.ends.gradient(mu[end_rows])
            gamma = gamma.index_copy(0, end_rows, own)
        if len(rows):
            found = self._between(mu[rows], full=False)
            gamma, log_z = gamma.index_copy(0, rows, found.gamma), log_z + found.log_z.sum()
        return gamma, log_z

    def curvature(
        self, mu: Float[Tensor, " n"]
    ) -> tuple[Float[Tensor, " n"], LogZ, Both | LowRank]:
        """gamma, log Z, and A, of low rank in every bag."""
        end_rows, rows = self.rows
        log_z: LogZ = 0.0
        mu, gamma, A = mu - self.shift, torch.zeros_like(mu), None
        if self.ends is not None:
            own, log_z, A = self.ends.curvature(mu[end_rows])
            gamma = gamma.index_copy(0, end_rows, own)
        if not len(rows):
            assert A is not None
            return gamma, log_z, A
        found = self._between(mu[rows], full=True)
        gamma, log_z = gamma.index_copy(0, rows, found.gamma), log_z + found.log_z.sum()
        return gamma, log_z, Both(self.rows, (A, self._curved(found)))

    def _curved(self, found: Taught) -> LowRank:
        """A = -diag(curvature) - up up' + down down'."""
        right = torch.cat([found.up, found.down], 1)
        sign = torch.ones_like(right[0])
        sign[: found.up.shape[1]] = -1.0
        signs = sign.expand(len(self.width), -1)
        return LowRank(-found.curvature, sign * right, right, self.middle.offsets, signs)
