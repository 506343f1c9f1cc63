"""The likelihood of bags whose patches are independent given mu (truncated.py), as in the paper."""

from jaxtyping import Float
from torch import Tensor

from gpmil.fast import compiled
from gpmil.moments import truncated
from gpmil.moments.likelihood import Group, Likelihood, LogZ, LowRank
from gpmil.moments.truncated import Moments


class IndependentPatches(Likelihood):
    """Z_b = P(all m < 0) of a negative bag, 1 - P of a positive one, Sigma_b by its diagonal."""

    leaves_out = True

    def __init__(self, group: Group):
        self.group = group

    def moments(self, mu: Float[Tensor, " n"]) -> Moments:
        """Everything at once."""
        return truncated.moments(mu, *self._bags())

    def gradient(self, mu: Float[Tensor, " n"]) -> tuple[Float[Tensor, " n"], LogZ]:
        """gamma and log Z."""
        gamma, log_z = truncated.gradient(mu, *self._bags())
        return gamma, log_z.sum()

    def curvature(self, mu: Float[Tensor, " n"]) -> tuple[Float[Tensor, " n"], LogZ, LowRank]:
        """gamma, log Z, and A: one column per bag."""
        m = self.moments(mu)
        pull = m.pull[:, None]
        return m.gamma, m.log_z.sum(), LowRank(-m.curvature, pull, pull, self.group.offsets)

    def expectations(self, mu: Float[Tensor, " n"]) -> tuple[Float[Tensor, " n"], LogZ]:
        """E[m] and log Z."""
        E, log_z = truncated.expectations(mu, *self._bags())
        return E, log_z.sum()

    def jacobian(self, mu: Float[Tensor, " n"]) -> tuple[Float[Tensor, " n"], LogZ, LowRank]:
        """E[m], log Z, and D = diag(slope) - left right'."""
        m = self.moments(mu)
        D = LowRank(m.slope, -m.left[:, None], m.right[:, None], self.group.offsets)
        return m.mean, m.log_z.sum(), D

    def loop(self, H: Float[Tensor, "n M"]) -> compiled.Loop:
        """The compiled pass."""
        g = self.group
        order = g.largest_first if H.is_cuda else None
        return compiled.Loop(H, g.sigma, g.offsets, g.positive, g.precision, order)

    def _bags(self) -> tuple[Tensor, ...]:
        g = self.group
        return g.sigma, g.positive, g.offsets, g.row
