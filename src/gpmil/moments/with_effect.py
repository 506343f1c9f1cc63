"""The likelihood of bags whose patches share an effect s_b ~ N(0, tau^2), else independent."""

import torch
from jaxtyping import Float
from torch import Tensor

from gpmil.fast import compiled
from gpmil.moments import effect_nodes, slide_effect
from gpmil.moments.independent import IndependentPatches
from gpmil.moments.likelihood import Family, Group, Likelihood, LogZ, LowRank, has_effect
from gpmil.moments.slide_effect import EffectMoments

JUMP = 1e-7  # of log Z of one bag, where another lattice of effects serves than before


def patches(group: Group) -> "IndependentPatches | PatchesWithEffect":
    """Independent patches, with the effect of their slide where there is one."""
    return PatchesWithEffect(group) if has_effect(group.effect) else IndependentPatches(group)


class PatchesWithEffect(Likelihood):
    """Z_b as for independent patches, m_b ~ N(mu_b, diag(sigma_b^2) + tau^2 11')."""

    leaves_out = True

    def __init__(self, group: Group):
        self.group, self.roughness = group, JUMP * len(group.positive)

    def moments(self, mu: Float[Tensor, " n"]) -> EffectMoments:
        """Everything at once."""
        g = self.group
        return slide_effect.moments(mu, g.sigma, g.positive, g.offsets, g.effect, g.row)

    def gradient(self, mu: Float[Tensor, " n"]) -> tuple[Float[Tensor, " n"], LogZ]:
        """gamma and log Z."""
        g = self.group
        gamma, log_z = slide_effect.gradient(mu, g.sigma, g.positive, g.offsets, g.effect, g.row)
        return gamma, log_z.sum()

    def rise(
        self, H: Float[Tensor, "n M"], w: Float[Tensor, " M"], c: float
    ) -> compiled.Sums | None:
        """sum_b log Z_b at mu = c + H w and its gradient in w, bag by bag."""
        return in_one_pass(self.group, H, w, c, PatchesWithEffect)

    def curvature(self, mu: Float[Tensor, " n"]) -> tuple[Float[Tensor, " n"], LogZ, LowRank]:
        """gamma, log Z, and A = -diag(curvature) + gamma gamma' - sign F F'."""
        m = self.moments(mu)
        right = torch.cat([m.gamma[:, None], m.factors], 1)
        signs = -m.sign[:, None].expand(-1, right.shape[1]).to(right.dtype)
        signs = torch.cat([torch.ones_like(signs[:, :1]), signs[:, 1:]], 1)
        left = signs.index_select(0, self.group.row) * right
        A = LowRank(-m.curvature, left, right, self.group.offsets, signs)
        return m.gamma, m.log_z.sum(), A

    def expectations(self, mu: Float[Tensor, " n"]) -> tuple[Float[Tensor, " n"], LogZ]:
        """E[m] and log Z."""
        m = self.moments(mu)
        return m.mean, m.log_z.sum()

    def jacobian(self, mu: Float[Tensor, " n"]) -> tuple[Float[Tensor, " n"], LogZ, LowRank]:
        """E[m], log Z, and D = I - (diag(sigma^2) + tau^2 11') A."""
        g, m = self.group, self.moments(mu)
        variance, tau2 = g.sigma.double().square(), g.effect**2
        sign = m.sign.index_select(0, g.row)[:, None]
        right = torch.cat([m.gamma[:, None], m.factors], 1)
        weighted = torch.cat([-m.gamma[:, None], sign * m.factors], 1)
        totals = weighted.new_zeros(len(g.positive), weighted.shape[1])
        totals = totals.index_add(0, g.row, weighted)
        left = variance[:, None] * weighted + tau2 * totals.index_select(0, g.row)
        # and tau^2 1 curvature'
        left = torch.cat([left, torch.full_like(left[:, :1], float(tau2))], 1)
        right = torch.cat([right, m.curvature[:, None]], 1)
        return m.mean, m.log_z.sum(), LowRank(1 + variance * m.curvature, left, right, g.offsets)


def in_one_pass(
    group: Group, H: Float[Tensor, "n M"], w: Float[Tensor, " M"], c: float, plain: Family
) -> compiled.Sums | None:
    """sum_b log Z_b and its gradient in w, compiled; bags beyond its range by their `plain` way."""
    if not compiled.passes_over(H):
        return None
    g = group
    bags = (H, g.sigma, g.offsets, g.positive, g.known)
    rule = (float(g.effect), effect_nodes.RULE, slide_effect.NEAR_ONE)
    log_z, gradient, mu, served = compiled.rise_with_effect(*bags, w, c, *rule)
    if not bool(served.all()):
        some, rows = g.some(~served)
        gamma, more = plain(some).gradient(mu[rows])
        log_z, gradient = log_z + float(more), gradient + H[rows].double().mT @ gamma
    return log_z, gradient
