"""log P(all m < 0) of two or three coordinates, to ten digits: sums over all but the last of them.

With S = L L' and m = mu + L z, z_i ~ N(0, 1), m_i < 0 says z_i < t_i(z_1, ..., z_i-1), so that

    P = int_{z_1 < t_1} phi(z_1) int_{z_2 < t_2} phi(z_2) Phi(t_3) dz_2 dz_1,
    1 - P = Phi(-t_1) + int_{z_1 < t_1} phi(z_1) [Phi(-t_2) + int_{z_2 < t_2} phi(z_2) Phi(-t_3)],

every integral by Gauss-Legendre nodes on an interval outside which nothing is left, in logarithms:
neither P nor 1 - P loses digits. EP is 2e-3 off for so few coordinates.
"""

import functools
import math

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor

WIDE = 9.0  # deviations from the peak of phi on an interval: 1e-19 lies beyond
NODES = {2: 400, 3: 160}  # in each sum, by the number of coordinates
SHARPEST = {2: 0.08, 3: 0.2}  # L_ii / sqrt(S_ii) that these nodes resolve
SMALLEST = -30.0  # log P below which the peak may lie elsewhere
HALF_LOG_2PI = 0.5 * math.log(2 * math.pi)


@functools.cache
def _rule(count: int) -> tuple[np.ndarray, np.ndarray]:
    return np.polynomial.legendre.leggauss(count)


def log_tiny(
    mu: Float[Tensor, "b n"], cov: Float[Tensor, "b n n"]
) -> tuple[Float[Tensor, " b"], Float[Tensor, " b"], Bool[Tensor, " b"]]:
    """log P(all m < 0) and log P(any m > 0) of bags of two or of three, and where they are exact.

    >>> mu, cov = torch.tensor([[0.3, -1.0]]).double(), torch.tensor([[[1.0, 0.6], [0.6, 2.0]]])
    >>> log_p, log_1mp, exact = log_tiny(mu, cov.double())
    >>> log_p, bool(exact), round(float(log_p.exp() + log_1mp.exp()), 12)
    (tensor([-1.0820], dtype=torch.float64), True, 1.0)
    """
    n = mu.shape[1]
    L, failed = torch.linalg.cholesky_ex(cov)
    sharp = L.diagonal(dim1=-2, dim2=-1) / cov.diagonal(dim1=-2, dim2=-1).sqrt()
    x, weight = (torch.from_numpy(a).to(mu) for a in _rule(NODES[n]))
    log_w = mu.new_zeros(len(mu), 1)
    centre = mu[:, None]  # of m given z so far, at every node
    rest = []
    for i in range(n):
        t = -centre[..., i] / L[:, None, i, i]
        rest.append(torch.logsumexp(log_w + torch.special.log_ndtr(-t), -1))
        if i == n - 1:
            break
        low, high = t.clamp(max=0.0) - WIDE, t.clamp(max=WIDE)
        half = (high - low)[..., None] / 2
        z = low[..., None] + half * (x + 1)
        log_phi = -z.square() / 2 - HALF_LOG_2PI + (half * weight).log()
        log_w = (log_w[..., None] + log_phi).flatten(1)
        centre = (centre[:, :, None] + z[..., None] * L[:, None, None, :, i]).flatten(1, 2)
    log_p = torch.logsumexp(log_w + torch.special.log_ndtr(t), -1)
    log_1mp = torch.logsumexp(torch.stack(rest), 0)
    exact = (failed == 0) & (sharp > SHARPEST[n]).all(-1) & (log_p > SMALLEST)
    return log_p, log_1mp, exact
