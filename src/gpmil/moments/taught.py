"""The likelihood of positive bags in which the labels of some patches are known.

Given the slide effect s patches are independent, t_i = (mu_i + s) / sigma_i. With L+ and L- the
patches of a positive bag that are known to be positive and negative,

    L+ not empty   z(s) = prod_{L+} Phi(t_i) prod_{L-} Phi(-t_i)            the rest is free
    else           z(s) = prod_{L-} Phi(-t_i) (1 - prod_{rest} Phi(-t_i))

A negative bag says all of its patches' labels itself. Z is the integral of N(s; 0, tau^2) z(s), a
sum over the lattice of effect_nodes.py, and z(0) without an effect. With g, diag(c) - p p' the
first two derivatives of log z(s) in mu (p the pull of truncated.py, on the rest alone), and pi(s)
the share of s in Z,

    d log Z = E_pi[g],    d2 log Z = diag(E_pi[c]) - E_pi[p p'] + Cov_pi[g]

Both averages of squares are sums over polynomials in s that are orthonormal under pi: the first one
is constant, and drops out of the covariance.

Without a known positive patch Z = Q_L - Q, the chances that all of L- and that all patches lie
below zero, which slide_effect.py has; with r = Q / Z

    d log Z = (1 + r) d log Q_L - r d log Q,    d2 Z / Z = (1 + r) d2 Q_L / Q_L - r d2 Q / Q

and only where digits would cancel, Q being nearly Q_L, z(s) is summed itself.
"""

from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from gpmil.fast import compiled
from gpmil.moments import effect_nodes, slide_effect, truncated, with_effect
from gpmil.moments.given_effect import Patches
from gpmil.moments.independent import IndependentPatches
from gpmil.moments.likelihood import Group, Likelihood, LogZ, LowRank, has_effect
from gpmil.moments.slide_effect import NEAR_ONE, log_total
from gpmil.moments.truncated import excess, log_not, upper_tail
from gpmil.moments.with_effect import PatchesWithEffect

RANK = 8  # polynomials in s of degree below it
AT_ONCE = 2**21  # numbers at a time, in sums over the effect


def patches(group: Group) -> "IndependentPatches | PatchesWithEffect | TaughtPatches":
    """Independent patches, with the effect of their slide and known labels where there are any."""
    if group.known is None or not bool(teaches(group).any()):
        return with_effect.patches(group)
    return TaughtPatches(group)


def teaches(group: Group) -> Bool[Tensor, " b"]:
    """Positive bags with known patches; in negative ones every label is known anyway."""
    assert group.known is not None
    some = torch.zeros_like(group.positive)
    return some.index_put((group.row[group.known >= 0],), torch.tensor(True)) & group.positive


# --- Bags at given values of their effect ---------------------------------------------------------


class AtEffect(NamedTuple):
    """k values of s for each of b bags with n patches: log z(s) and its derivatives."""

    log_z: Float[Tensor, "*k b"]
    slope: Float[Tensor, "*k b"]  # d log z / ds
    bend: Float[Tensor, "*k b"]  # d2 log z / ds2
    gamma: Float[Tensor, "*k n"]  # d log z / dmu
    curvature: Float[Tensor, "*k n"]  # diagonal part of d2 log z / dmu2
    pull: Float[Tensor, "*k n"]  # and its rank-one part, -pull pull'


@dataclass(frozen=True)
class Lesson:
    """What is known of some positive bags: `side` of a patch is 1, -1, or 0 for the rest.

    The rest is what may still explain the bag's label; patches that are free are not here.
    """

    patches: Patches
    side: Float[Tensor, " n"]

    def some(self, bags: Bool[Tensor, " b"]) -> tuple["Lesson", Int[Tensor, " k"]]:
        """Some of the bags, and where their rows are."""
        own, rows = self.patches.some(bags)
        return Lesson(own, self.side[rows]), rows

    @cached_property
    def told(self) -> Int[Tensor, " j"]:
        """Patches with a known label."""
        return self.side.nonzero()[:, 0]

    @cached_property
    def rest(self) -> Int[Tensor, " r"]:
        """The others."""
        return (self.side == 0).nonzero()[:, 0]

    @cached_property
    def unexplained(self) -> Int[Tensor, " u"]:
        """Bags without a known positive patch."""
        return self.patches.row[self.rest].unique_consecutive()

    @cached_property
    def rest_sizes(self) -> Int[Tensor, " u"]:
        """How many patches are left in each of them."""
        return self.patches.row[self.rest].unique_consecutive(return_counts=True)[1]

    def at(self, s: Float[Tensor, "k b"]) -> AtEffect:
        """All bags at k values of their effects."""
        k, (mu, sigma, _, row) = len(s), self.patches
        moved = mu + s[:, row]
        n, bags = mu.new_zeros(k, len(mu)), torch.zeros_like(s)
        own, side = self.told, self.side[self.told]
        # Phi(side t) = 1 - Phi(x)
        x = -side * moved[:, own] / sigma[own]
        log_upper, h = upper_tail(x)
        gamma = n.index_copy(1, own, side * h / sigma[own])
        curvature = n.index_copy(1, own, -h * excess(x) / sigma[own].square())
        log_z, pull = bags.index_add(1, row[own], log_upper), n
        if len(self.rest):
            m = self._some_above(moved[:, self.rest], sigma[self.rest])
            gamma, curvature, pull = (
                x.index_copy(1, self.rest, y.view(k, -1))
                for x, y in ((gamma, m.gamma), (curvature, m.curvature), (pull, m.pull))
            )
            log_z = log_z.index_add(1, self.unexplained, m.log_z.view(k, -1))
        slope, curved, pulls = (bags.index_add(1, row, x) for x in (gamma, curvature, pull))
        return AtEffect(log_z, slope, curved - pulls.square(), gamma, curvature, pull)

    def _some_above(
        self, mu: Float[Tensor, "k r"], sigma: Float[Tensor, " r"]
    ) -> truncated.Moments:
        """1 - prod Phi(-t) of the rest."""
        sizes = self.rest_sizes.repeat(len(mu))
        offsets = torch.cat([sizes.new_zeros(1), sizes.cumsum(0)])
        positive = torch.ones_like(sizes, dtype=torch.bool)
        return truncated.moments(mu.flatten(), sigma.repeat(len(mu)), positive, offsets)


# --- The sum over the effect ----------------------------------------------------------------------


class Taught(NamedTuple):
    """log Z and its derivatives in mu: d2 log Z = diag(curvature) + up up' - down down'."""

    log_z: Float[Tensor, " b"]
    gamma: Float[Tensor, " n"]
    curvature: Float[Tensor, " n"]
    up: Float[Tensor, "n j"]
    down: Float[Tensor, "n i"]

    def joined(self, other: "Taught", rows: Int[Tensor, " k"], bags: Int[Tensor, " u"]) -> "Taught":
        """With what another has for some of the bags."""
        where, out = (bags, rows, rows, rows, rows), []
        for mine, theirs, at in zip(self, other, where):
            x, y = mine, theirs
            if x.dim() == 2:
                most = max(x.shape[1], y.shape[1])
                x, y = (torch.nn.functional.pad(a, (0, most - a.shape[1])) for a in (x, y))
            out.append(x.index_copy(0, at, y))
        return Taught(*out)


def evaluated(lesson: Lesson, tau: Float[Tensor, ""], full: bool = True) -> Taught:
    """Bags with a known positive patch, and those without; `full`: with second derivatives."""
    unexplained = torch.zeros_like(lesson.patches.offsets[1:], dtype=torch.bool)
    unexplained[lesson.unexplained] = True
    if not len(lesson.rest) or float(tau.detach()) == 0:
        return summed(lesson, tau, full)
    some, rows = lesson.some(unexplained)
    found, close = by_difference(some, tau, full)
    direct = ~unexplained
    direct[unexplained] = close
    n, b = lesson.side.new_zeros(len(lesson.side)), lesson.side.new_zeros(len(direct))
    empty = Taught(b, n, n, n[:, None][:, :0], n[:, None][:, :0])
    out = empty.joined(found, rows, unexplained.nonzero()[:, 0])
    if bool(direct.any()):
        rest, rows = lesson.some(direct)
        out = out.joined(summed(rest, tau, full), rows, direct.nonzero()[:, 0])
    return out


def by_difference(
    lesson: Lesson, tau: Float[Tensor, ""], full: bool
) -> tuple[Taught, Bool[Tensor, " b"]]:
    """Z = Q_L - Q of bags without a known positive patch, and where that loses digits."""
    (mu, sigma, offsets, row), own = lesson.patches, lesson.told
    sizes = torch.bincount(row[own], minlength=len(offsets) - 1)
    starts = torch.cat([sizes.new_zeros(1), sizes.cumsum(0)])
    told = summed(
        Lesson(Patches(mu[own], sigma[own], starts, row[own]), lesson.side[own]), tau, full
    )
    every = (mu, sigma, torch.zeros_like(sizes, dtype=torch.bool), offsets, tau, row)
    if full:
        n = slide_effect.moments(*every)
        g, log_q = n.gamma, n.log_z
    else:
        g, log_q = slide_effect.gradient(*every)
    log_ratio = log_q - told.log_z
    log_z = told.log_z + log_not(log_ratio.clamp(max=NEAR_ONE))
    more, less = torch.exp(told.log_z - log_z)[row[own]], torch.exp(log_q - log_z)[row]  # 1 + r, r
    gamma = (-less * g).index_add(0, own, more * told.gamma)
    none = gamma[:, None][:, :0]
    if not full:
        return Taught(log_z, gamma, gamma, none, none), log_ratio > NEAR_ONE
    curvature = (-less * n.curvature).index_add(0, own, more * told.curvature)
    # d2 Q_L / Q_L = diag(c) + Cov[g] + E[g] E[g]'
    squares = torch.cat([told.up, told.gamma[:, None]], 1)
    up = gamma.new_zeros(len(gamma), squares.shape[1])
    up = up.index_copy(0, own, more.sqrt()[:, None] * squares)
    down = torch.cat([less.sqrt()[:, None] * n.factors, gamma[:, None]], 1)
    return Taught(log_z, gamma, curvature, up, down), log_ratio > NEAR_ONE


def summed(lesson: Lesson, tau: Float[Tensor, ""], full: bool = True) -> Taught:
    """The average over s ~ N(0, tau^2); can be differentiated in mu, sigma and tau."""
    if float(tau.detach()) == 0:
        at = lesson.at(lesson.patches.mu.new_zeros(1, len(lesson.patches.offsets) - 1))
        gamma, curvature, pull = (x[0] for x in at[3:])
        return Taught(at.log_z[0], gamma, curvature, gamma[:, None][:, :0], pull[:, None])
    with torch.no_grad():
        still = replace(lesson, patches=lesson.patches.detach())
        nodes = effect_nodes.find(
            still.patches, tau.detach(), lambda _, s: AtEffect(*(x[0] for x in still.at(s[None])))
        )
    number = torch.arange(int(nodes.many.max()), device=tau.device)[:, None]
    s = (nodes.first + torch.minimum(number, nodes.many - 1)) * nodes.step
    blocks = s.split(max(1, AT_ONCE // len(lesson.side)))
    found = AtEffect(*map(torch.cat, zip(*(lesson.at(block) for block in blocks))))
    log_f = found.log_z - s.square() / (2 * tau.square())
    weight = torch.where(number < nodes.many, torch.exp(log_f - nodes.top), 0.0)
    total = weight.sum(0)
    return _averages(lesson, s, weight / total, found, log_total(tau, nodes, total), full)


def _averages(
    lesson: Lesson, s: Tensor, pi: Tensor, at: AtEffect, log_z: Tensor, full: bool
) -> Taught:
    row = lesson.patches.row
    own = pi[:, row]
    gamma, curvature = (own * at.gamma).sum(0), (own * at.curvature).sum(0)
    if not full:
        none = gamma[:, None][:, :0]
        return Taught(log_z, gamma, curvature, none, none)
    # p_0 = 1, p_1, ... at every node, orthonormal under pi
    basis = _orthonormal(s.detach(), pi)[:, :, row]
    up, down = ((basis * (own * x)).sum(1).mT for x in (at.gamma, at.pull))
    return Taught(log_z, gamma, curvature, up[:, 1:], down)


def _orthonormal(s: Float[Tensor, "k b"], pi: Float[Tensor, "k b"]) -> Float[Tensor, "r k b"]:
    """Polynomials in s that are orthonormal under the weights pi of each bag."""
    centre = (pi * s).sum(0).detach()
    width = (pi * (s - centre).square()).sum(0).detach().sqrt()
    x = (s - centre) / width
    rank = min(RANK, len(s))
    powers = torch.stack([x**j for j in range(rank)])
    gram = torch.einsum("ikb,jkb,kb->bij", powers, powers, pi)
    eye = torch.eye(rank, dtype=s.dtype, device=s.device)
    L = torch.linalg.cholesky(gram + 1e-13 * eye)
    inverse = torch.linalg.solve_triangular(L, eye.expand_as(L), upper=False)
    return torch.einsum("bij,jkb->ikb", inverse, powers)


# --- The likelihood -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Both:
    """A = -d2 log Z / dmu2 of bags that teach and of the others, each with its own rows."""

    rows: tuple[Int[Tensor, " k"], Int[Tensor, " l"]]
    parts: tuple[LowRank | None, LowRank]

    def __call__(self, W: Float[Tensor, "n M"], H: Float[Tensor, "n M"]) -> Float[Tensor, "M M"]:
        """W'A H."""
        others, taught = self.parts
        if others is None:
            return taught(W, H)
        total = None
        for rows, A in zip(self.rows, (others, taught)):
            left = W[rows]
            found = A(left, left if W is H else H[rows])
            total = found if total is None else total + found
        assert total is not None
        return total

    @property
    def diagonal(self) -> Float[Tensor, " n"]:
        """As one matrix: its diagonal part."""
        return self._joined("diagonal")

    @property
    def left(self) -> Float[Tensor, "n r"]:
        """And its factors, with columns of zeros where a bag has fewer."""
        return self._joined("left")

    @property
    def right(self) -> Float[Tensor, "n r"]:
        """The other side."""
        return self._joined("right")

    def _joined(self, name: str) -> Tensor:
        found = [(rows, getattr(A, name)) for rows, A in zip(self.rows, self.parts) if A]
        shape = torch.Size([sum(len(rows) for rows in self.rows)])
        if name != "diagonal":
            shape += (max(x.shape[1] for _, x in found),)
        out = found[0][1].new_zeros(shape)
        for rows, x in found:
            wide = x if x.dim() == 1 else torch.nn.functional.pad(x, (0, shape[1] - x.shape[1]))
            out = out.index_copy(0, rows, wide)
        return out


class TaughtPatches(Likelihood):
    """Bags with known patches, and the others of the group as with_effect.py has them."""

    leaves_out = True

    def __init__(self, group: Group):
        assert group.known is not None
        own = teaches(group)
        self.group, (self.taught, taught_rows) = group, group.some(own)
        rest, other_rows = group.some(~own)
        self.others = with_effect.patches(rest) if len(other_rows) else None
        self.rows = other_rows, taught_rows
        jump = with_effect.JUMP if has_effect(group.effect) else 0.0
        self.roughness = jump * len(group.positive)
        self.used, self.side, self.offsets = lesson_rows(self.taught)

    def lesson(self, mu: Float[Tensor, " n"], full: bool = True) -> Taught:
        """The bags that teach, at mu of all rows of theirs."""
        g = self.taught
        own = Patches.of(mu[self.used], g.sigma[self.used], self.offsets, None)
        tau = torch.as_tensor(g.effect, dtype=torch.float64, device=mu.device)
        return evaluated(Lesson(own, self.side), tau, full)

    def gradient(self, mu: Float[Tensor, " n"]) -> tuple[Float[Tensor, " n"], LogZ]:
        """gamma and log Z."""
        other_rows, own_rows = self.rows
        found = self.lesson(mu[own_rows], full=False)
        others = None if self.others is None else self.others.gradient(mu[other_rows])
        return self._joined(mu, found, others)

    def rise(
        self, H: Float[Tensor, "n M"], w: Float[Tensor, " M"], c: float
    ) -> compiled.Sums | None:
        """sum_b log Z_b at mu = c + H w and its gradient in w, bag by bag."""
        if not has_effect(self.group.effect):
            return None
        return with_effect.in_one_pass(self.group, H, w, c, patches)

    def curvature(self, mu: Float[Tensor, " n"]) -> tuple[Float[Tensor, " n"], LogZ, Both]:
        """gamma, log Z, and A, of low rank in every bag."""
        other_rows, own_rows = self.rows
        found, others, A = self.lesson(mu[own_rows]), None, None
        if self.others is not None:
            gamma, log_z, A = self.others.curvature(mu[other_rows])
            others = (gamma, log_z)
        return *self._joined(mu, found, others), Both(self.rows, (A, self._curved(found)))

    def _joined(
        self, mu: Tensor, found: Taught, others: tuple[Tensor, LogZ] | None
    ) -> tuple[Float[Tensor, " n"], LogZ]:
        """gamma and log Z of the taught bags and of the others."""
        other_rows, own_rows = self.rows
        gamma = torch.zeros_like(mu).index_copy(0, own_rows[self.used], found.gamma)
        log_z = found.log_z.sum()
        if others is None:
            return gamma, log_z
        return gamma.index_copy(0, other_rows, others[0]), log_z + others[1]

    def expectations(self, mu: Float[Tensor, " n"]) -> tuple[Float[Tensor, " n"], LogZ]:
        """E[m] = mu + (diag(sigma^2) + tau^2 11') gamma, and log Z."""
        other_rows, own_rows = self.rows
        found, g = self.lesson(mu[own_rows], full=False), self.taught
        gamma = mu.new_zeros(len(own_rows)).index_copy(0, self.used, found.gamma)
        E, log_z = mu.index_add(0, own_rows, _spread(g, gamma[:, None])[:, 0]), found.log_z.sum()
        if self.others is not None:
            others, more = self.others.expectations(mu[other_rows])
            E, log_z = E.index_copy(0, other_rows, others), log_z + more
        return E, log_z

    def jacobian(self, mu: Float[Tensor, " n"]) -> tuple[Float[Tensor, " n"], LogZ, Both]:
        """E[m], log Z, and D = I - (diag(sigma^2) + tau^2 11') A."""
        other_rows, own_rows = self.rows
        (E, log_z), g = self.expectations(mu), self.taught
        A = self._curved(self.lesson(mu[own_rows]))
        # and tau^2 1 diag(A)'
        shared = torch.full_like(A.diagonal, -float(g.effect**2))[:, None]
        left = torch.cat([-_spread(g, A.left), shared], 1)
        right = torch.cat([A.right, A.diagonal[:, None]], 1)
        D = LowRank(1 - g.sigma.square() * A.diagonal, left, right, g.offsets)
        others = None if self.others is None else self.others.jacobian(mu[other_rows])[2]
        return E, log_z, Both(self.rows, (others, D))

    def _curved(self, found: Taught) -> LowRank:
        """A = -diag(curvature) - up up' + down down' on all rows of the bags that teach."""
        g, right = self.taught, torch.cat([found.up, found.down], 1)
        sign = right.new_ones(right.shape[1])
        sign[: found.up.shape[1]] = -1.0
        every = right.new_zeros(len(g.sigma), right.shape[1]).index_copy(0, self.used, right)
        diagonal = right.new_zeros(len(g.sigma)).index_copy(0, self.used, -found.curvature)
        return LowRank(diagonal, sign * every, every, g.offsets, sign.expand(len(g.positive), -1))


def _spread(group: Group, x: Float[Tensor, "n k"]) -> Float[Tensor, "n k"]:
    """(diag(sigma^2) + tau^2 11') x."""
    totals = x.new_zeros(len(group.positive), x.shape[1]).index_add(0, group.row, x)
    return group.sigma.square()[:, None] * x + group.effect**2 * totals[group.row]


def lesson_rows(group: Group) -> tuple[Int[Tensor, " k"], Float[Tensor, " k"], Int[Tensor, " b1"]]:
    """Rows that enter the likelihood of bags that teach, their sides, and where bags begin."""
    assert group.known is not None
    explained = torch.zeros_like(group.positive)
    explained = explained.index_put((group.row[group.known == 1],), torch.tensor(True))
    used = ((group.known >= 0) | ~explained[group.row]).nonzero()[:, 0]
    sizes = torch.bincount(group.row[used], minlength=len(group.positive))
    side = torch.where(group.known == 1, 1.0, torch.where(group.known == 0, -1.0, 0.0))
    offsets = torch.cat([sizes.new_zeros(1), sizes.cumsum(0)])
    return used, side[used].double(), offsets
