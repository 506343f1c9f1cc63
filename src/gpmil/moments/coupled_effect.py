"""Coupled patches that share an effect: averages over its values of what coupled.py has at each.

Given the effect s ~ N(0, tau^2) of a bag its patches are N(mu + s, Sigma), cut by EP as without an
effect. EP on Sigma + tau^2 11' itself would be quicker, but a site is a Gaussian, and knows little
of patches that pass zero together or not at all: at tau = 2 log Z of a positive bag is off by up to
1. So Z is a sum over a lattice of s, as in slide_effect.py. With z_k, gamma_k and A_k at s_k,

    Z = sum_k w_k z_k,  pi_k = w_k z_k / Z          weights of N(s; 0, tau^2)
    gamma = sum_k pi_k gamma_k                      d log Z / dmu
    A = sum_k pi_k (A_k - gamma_k gamma_k') + gamma gamma'

A positive bag whose Q = P(all m < 0) is well below one has Z = 1 - Q, and -r pi_k, r = Q / (1 - Q),
in place of pi_k. With delta_k = Sigma gamma_k = E_k - mu - s_k, which is what EP gives,

    E = mu + (Sigma + tau^2 11') gamma = mu + delta + tau^2 1 1'delta,  delta = sum_k pi_k delta_k

because Sigma 1 = 1. The lattice stays where it is while mu moves, so that gamma is the gradient of
the sum itself, and the paper's fixed point still the maximum of the bound.
"""

import math
from collections.abc import Callable, Iterator
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from gpmil.coupling import operator as coupling
from gpmil.moments import effect_nodes
from gpmil.moments.effect_nodes import DROP
from gpmil.moments.given_effect import Patches, all_below, some_above
from gpmil.moments.likelihood import Group, downdate
from gpmil.moments.sites import Sites
from gpmil.moments.slide_effect import NEAR_ONE, log_total, weight_before
from gpmil.moments.taught import patches
from gpmil.moments.truncated import log_not, segment_sum

NODES = 16  # values of the effect at a time, where bags are small
ENOUGH = DROP - 3  # the sum ends with terms below e^-15 of the largest
COUNTS = 1e-3  # share of Z from which it matters whether EP has converged


@runtime_checkable
class Part(Protocol):
    """Some bags of one label without an effect, one bag after the other."""

    converged: Bool[Tensor, " b"]  # EP, at the last mu
    sites: Sites | None  # with which the next EP begins

    def expectations(self, mu: Tensor) -> tuple[Tensor, Tensor]:
        """E (n,) and log Z (b,) at mu (n,)."""

    def slope(self, W: Tensor, H: Tensor) -> Tensor:
        """W' (dE/dmu) H at the last mu, where W = Sigma^-1 H."""


# Bags by number, a bag as often as it is wanted, of this label
Make = Callable[[Int[Tensor, " b"], bool], Part]
# E of padded bags at some mu, and dE/dmu Sigma X
Cut = Callable[[Float[Tensor, "b p"]], tuple[Float[Tensor, "b p"], Float[Tensor, "b p k"]]]


def at_a_time(mask: Bool[Tensor, "b p"]) -> int:
    """As many values of the effect of padded bags as make a batch worth its calls."""
    return max(1, min(NODES, coupling.BATCH_ELEMENTS // (mask.numel() * mask.shape[1])))


class Average:
    """Z = sum_k w_k z_k of bags of one label, and the shares pi_k; some nodes at a time."""

    def __init__(
        self,
        make: Make,
        bags: Int[Tensor, " b"],
        positive: bool,
        at_a_time: int,
        rule: effect_nodes.Slopes | None = None,
    ):
        self.part, self.bags = make(bags.repeat(at_a_time), positive), bags
        plain: effect_nodes.Slopes = some_above if positive else all_below
        self.rule, self.at_a_time = rule or plain, at_a_time
        self.sites: list[Sites | None] = []  # of the mu before, at every step along the nodes
        self.unsettled = 0

    def over(self, patches: Patches, tau: Float[Tensor, ""]) -> None:
        """Log Z, delta, and what `again` goes through, at one mu.

        Which nodes count is found as if patches were independent, which makes z steeper than it
        is; on the right the sum goes on for as long as there is something to add.
        """
        self.patches, nodes = patches, effect_nodes.find(patches, tau, self.rule)
        last, top = nodes.many - 1, torch.full_like(nodes.step, -math.inf)
        effects: list[Tensor] = []
        logs, moved, converged = [], [], []
        next_ = torch.arange(self.at_a_time, device=tau.device)[:, None]
        while bool((next_[0] <= last).any()):
            s = (nodes.first + torch.minimum(next_, last)) * nodes.step
            delta, log_z = self._at(len(effects), s)
            log_f = log_z - s.square() / (2 * tau.square())
            log_f = torch.where(next_ <= last, log_f, -math.inf)
            top = torch.maximum(top, log_f.amax(0))
            end = torch.where(next_ == last, log_f, -math.inf).amax(0)
            last = torch.where(end > top - ENOUGH, last + self.at_a_time, last)
            next_ = next_ + self.at_a_time
            effects.append(s)
            logs.append(log_f)
            moved.append(delta)
            converged.append(self.part.converged.view_as(s))
        self.effects, nodes = torch.cat(effects), nodes._replace(top=top)
        weight = torch.exp(torch.cat(logs) - top)
        total = weight.sum(0) + weight_before(tau, nodes)
        self.log_z, self.pi = log_total(tau, nodes, total), weight / total
        self.delta = (self.pi[:, patches.row] * torch.cat(moved)).sum(0)
        rough = (~torch.cat(converged) & (self.pi > COUNTS)).any(0)
        self.unsettled = int(rough.sum())

    def again(self) -> Iterator[tuple[Float[Tensor, "k b"], Float[Tensor, "k n"]]]:
        """pi_k and delta_k of all nodes, the part being there: sites are kept, V is not."""
        several = zip(self.effects.split(self.at_a_time), self.pi.split(self.at_a_time))
        for step, (s, pi) in enumerate(several):
            yield pi, self._at(step, s)[0]

    def _at(self, step: int, s: Float[Tensor, "k b"]) -> tuple[Tensor, Tensor]:
        """delta_k and log z_k; EP begins with the sites of the mu before."""
        self.part.sites = self.sites[step] if step < len(self.sites) else None
        mu = self.patches.mu + s[:, self.patches.row]
        E, log_z = self.part.expectations(mu.view(-1))
        self.sites[step : step + 1] = [self.part.sites]
        return E.view_as(mu) - mu, log_z.view_as(s)


def labelled(
    log_q: Float[Tensor, " b"], positive: Bool[Tensor, " b"]
) -> tuple[Float[Tensor, " b"], Float[Tensor, " b"], Bool[Tensor, " b"]]:
    """Log Z from log Q, what pi_k is multiplied by, and where 1 - Q must be summed itself."""
    rare = positive & (log_q > NEAR_ONE)
    log_p = log_not(torch.where(positive, log_q.clamp(max=NEAR_ONE), -1.0))
    # dZ / Z = -r dQ / Q,  r = Q / (1 - Q)
    factor = torch.where(positive, -torch.exp(log_q - log_p), 1.0)
    return torch.where(positive, log_p, log_q), torch.where(rare, 0.0, factor), rare


class Shared:
    """Bags of one label with an effect each; `make` gives them without.

    `rule` is z(s) of independent patches where it is not the chance that all or that some of them
    have this sign; z is summed itself then, and `positive` false.
    """

    def __init__(
        self,
        make: Make,
        sigma: Float[Tensor, " n"],
        offsets: Int[Tensor, " b1"],
        positive: bool,
        tau: float,
        at_a_time: int = 1,
        rule: effect_nodes.Slopes | None = None,
    ):
        self.rule = rule
        self.make, self.sigma, self.offsets, self.positive = make, sigma, offsets, positive
        self.tau = torch.as_tensor(tau, dtype=torch.float64, device=sigma.device)
        self.at_a_time = at_a_time
        self.all = torch.ones(len(offsets) - 1, dtype=torch.bool, device=sigma.device)
        self.below = self._average(self.all, False)
        self.above: Average | None = None
        self.rare = ~self.all

    def _average(self, keep: Bool[Tensor, " b"], positive: bool) -> Average:
        return Average(self.make, keep.nonzero()[:, 0], positive, self.at_a_time, self.rule)

    @property
    def unsettled(self) -> int:
        """Bags whose EP has not converged at the last mu."""
        return self.below.unsettled + (0 if self.above is None else self.above.unsettled)

    def expectations(self, mu: Float[Tensor, " n"]) -> tuple[Tensor, Tensor]:
        """E and log Z."""
        self.patches = patches = Patches.of(mu, self.sigma, self.offsets, None)
        self.below.over(patches, self.tau)
        log_z, self.factor, rare = labelled(self.below.log_z, self.all & self.positive)
        delta = self.factor[patches.row] * self.below.delta
        if bool(rare.any()):
            if self.above is None or not torch.equal(rare, self.rare):
                self.above = self._average(rare, True)
            some, self.rows = patches.some(rare)
            self.above.over(some, self.tau)
            delta = delta.index_copy(0, self.rows, self.above.delta)
            log_z = log_z.masked_scatter(rare, self.above.log_z)
        else:
            self.above = None
        self.rare, self.delta = rare, delta
        # E = mu + delta + tau^2 1 1'delta
        shared = self.tau.square() * segment_sum(delta, self.offsets)
        return mu + delta + shared[patches.row], log_z

    def slope(self, W: Float[Tensor, "n M"], H: Float[Tensor, "n M"]) -> Float[Tensor, "M M"]:
        """W' (dE/dmu) H = W'H - H'A H, W = (Sigma + tau^2 11')^-1 H."""
        # U = Sigma^-1 H = W + k 1 1'H, and H'gamma = U'delta
        share = downdate(float(self.tau), self.offsets.diff())
        U = W + (share[:, None] * _per_bag(H, self.patches))[self.patches.row]
        pulled = _per_bag(self.delta[:, None] * U, self.patches)
        bent = _curved(self.below, self.factor.abs(), U, H)
        A = (-bent if self.positive else bent) + pulled.mT @ pulled
        if self.above is not None:
            one = torch.ones_like(self.above.log_z)
            A = A + _curved(self.above, one, U[self.rows], H[self.rows])
        return W.mT @ H - A


def _curved(
    average: Average, factor: Float[Tensor, " b"], U: Float[Tensor, "n M"], H: Float[Tensor, "n M"]
) -> Float[Tensor, "M M"]:
    """sum_k f pi_k H'(A_k - gamma_k gamma_k') H, f >= 0."""
    total, patches = U.new_zeros(U.shape[1], U.shape[1]), average.patches
    for pi, delta in average.again():
        root = (factor * pi).sqrt()[:, patches.row, None]
        U_k, H_k = ((root * x).flatten(0, 1) for x in (U, H))
        pulled = _per_bag(delta[..., None] * root * U, patches).flatten(0, 1)
        # H'A_k H = U'H - U' (dE_k/dmu) H
        total += U_k.mT @ H_k - average.part.slope(U_k, H_k) - pulled.mT @ pulled
    return total


def _per_bag(x: Float[Tensor, "*k n M"], patches: Patches) -> Float[Tensor, "*k b M"]:
    """Sums of the rows of every bag."""
    out = x.new_zeros(*x.shape[:-2], len(patches.offsets) - 1, x.shape[-1])
    return out.index_add_(-2, patches.row, x)


def shared_by(
    mask: Bool[Tensor, "b p"], tau: float, x: Float[Tensor, "b p k"]
) -> Float[Tensor, "b p k"]:
    """(I + tau^2 11') x of padded bags."""
    return x + tau**2 * mask[..., None] * x.sum(1, keepdim=True)


def averaged(
    average: Average, mu: Float[Tensor, "b p"], sigma: Float[Tensor, "b p p"],
    mask: Bool[Tensor, "b p"], X: Float[Tensor, "b p k"], tau: float, cut: Cut,
) -> tuple[Float[Tensor, " b"], Float[Tensor, "b p"], Float[Tensor, "b p k"]]:  # fmt: skip
    """Log Z, delta and sum_k pi_k Sigma (A_k - gamma_k gamma_k') Sigma X of padded bags."""
    sizes = mask.sum(-1)
    offsets = torch.cat([sizes.new_zeros(1), sizes.cumsum(0)])
    deviation = sigma.diagonal(dim1=-2, dim2=-1).sqrt()
    rows = Patches.of(mu[mask], deviation[mask], offsets, None)
    average.over(rows, torch.as_tensor(tau, dtype=mu.dtype, device=mu.device))
    delta, bent = torch.zeros_like(mu).masked_scatter(mask, average.delta), torch.zeros_like(X)
    for s, pi in zip(average.effects, average.pi):
        E, slope = cut(mu + s[:, None])
        own = torch.where(mask, E - mu - s[:, None], 0.0)[..., None]
        bent += pi[:, None, None] * (sigma @ X - slope - own * (own.mT @ X))
    return average.log_z, delta, bent


class AloneWithEffect:
    """Bags without an edge that share an effect, or teach: a sum over its values is exact."""

    unsettled = 0

    def __init__(self, group: Group):
        self.likelihood = patches(group)

    def expectations(self, mu: Float[Tensor, " n"]) -> tuple[Tensor, Tensor]:
        """E and the sum of log Z."""
        self.mu, group = mu, self.likelihood.group
        gamma, log_z = self.likelihood.gradient(mu)
        totals = gamma.new_zeros(len(group.positive)).index_add_(0, group.row, gamma)
        # E = mu + (I + tau^2 11') gamma
        return mu + gamma + group.effect**2 * totals[group.row], torch.as_tensor(log_z)

    def slope(self, W: Float[Tensor, "n M"], H: Float[Tensor, "n M"]) -> Float[Tensor, "M M"]:
        """W' (dE/dmu) H = W'H - H'A H."""
        return W.mT @ H - self.likelihood.curvature(self.mu)[2](H, H)
