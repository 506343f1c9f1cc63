"""Quantiles of a slide's log odds where w is normal: no draws.

With w = E[w] + chol(J)^-T x, x ~ N(0, I), the slide given w is m ~ N(mu + G x, S0),
G = H chol(J)^-T, S0 = Sigma + Sigma (K - W W') Sigma. The log odds Y(x) are expanded to second
order; a quadratic form in normals has known quantiles. The centre x = 0 is far from where a
quantile is decided: as in structural reliability (second-order methods), the expansion is made
at the likeliest x with a linear Y at that quantile, z along the slope.
"""

from collections.abc import Callable

import numpy as np
import torch
from jaxtyping import Float
from scipy.special import ndtri

from gpmil.inference import leave_out
from gpmil.moments import orthant
from gpmil.moments.orthant import Expansion
from gpmil.moments.quadratic import quadratic_quantile
from gpmil.process.sparse_gp import Posterior


def _odds_quantile(
    found: Expansion, at: Float[torch.Tensor, "b k"], p: float
) -> Float[np.ndarray, " b"]:
    """The p-quantile of the log odds of each bag, x ~ N(0, I), from the expansion at `at`."""
    value, x = found.value, at.cpu().numpy()
    log_p, log_1mp, slope, bend = (
        a.cpu().numpy() for a in (value.log_p, value.log_1mp, found.slope, found.bend)
    )
    out = np.empty(len(x))
    for i in range(len(x)):
        # Y = log(1 - P) - log P: dY = -d log P / (1 - P), d2Y = -P / (1 - P)^2 (d log P)^2 - ...
        b = -slope[i] * np.exp(-log_1mp[i])
        B = bend[i] * np.exp(-log_1mp[i]) - np.exp(log_p[i]) * np.outer(b, b)
        a = log_1mp[i] - log_p[i] - b @ x[i] + x[i] @ B @ x[i] / 2
        out[i] = quadratic_quantile(a, b - B @ x[i], B, p)
    return out


def ends_from_centre(found: Expansion, below: float) -> tuple[np.ndarray, np.ndarray]:
    """Both quantiles from one expansion at x = 0."""
    at = torch.zeros_like(found.slope)
    return _odds_quantile(found, at, below), _odds_quantile(found, at, 1 - below)


def ends_from_tails(
    expand: Callable[[torch.Tensor], Expansion],
    slope: Float[torch.Tensor, "b k"],
    below: float,
) -> tuple[np.ndarray, np.ndarray]:
    """Each quantile from an expansion of its own; slope is d log P / dx at x = 0."""
    # in the right tail the slope is so small that its square is zero
    size = slope.abs().amax(-1, keepdim=True)
    slope = torch.where(size > 0, slope / size, 0.0)
    # the odds rise as log P falls
    far = ndtri(below) * slope / slope.norm(dim=-1, keepdim=True).clamp(min=1.0)
    low = _odds_quantile(expand(-far), -far, below)
    high = _odds_quantile(expand(far), far, 1 - below)
    return np.minimum(low, high), np.maximum(low, high)


def dense_ends(
    bag: leave_out.Bag, q: Posterior, c: float, below: float
) -> tuple[np.ndarray, np.ndarray]:
    """Both quantiles of some bags as padded matrices."""
    G = q.shrink(bag.H).mT
    if G.shape[1] < G.shape[2]:
        # any root of G G' will do: the smaller, the cheaper
        G = torch.linalg.qr(G.mT, mode="r").R.mT
    S = bag.sigma + bag.sigma @ bag.K @ bag.sigma - bag.H @ bag.H.mT
    S, mu, effect = (S + S.mT) / 2, c + bag.H @ q.w, float(bag.effect)

    def expand(at: torch.Tensor) -> Expansion:
        moved = mu + (G @ at[:, :, None])[..., 0]
        return orthant.expand(moved, S, bag.mask, G, effect=effect)

    return ends_from_tails(expand, orthant.slope(mu, S, bag.mask, G, effect=effect), below)
