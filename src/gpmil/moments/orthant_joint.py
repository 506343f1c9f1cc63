"""log P(all m < 0) of several slides together, as one Gaussian: the slides of a patient.

The slides share the process, so that their probabilities do not multiply: one that is negative
makes the others likelier to be. Few patches are integrated as they are. Of more, each slide keeps
its own log P, with whatever was done there for its effect, and gains what EP says of all together,

    log P = sum_b log P_b + (EP of all - sum_b EP of slide b);

errors of EP inside a slide are on both sides. Where all together are too many for one matrix, the
slides are independent given w = E[w] + chol(R)^-T x, x ~ N(0, I), and their log P expanded to
second order at x = 0 leave a Gaussian integral.
"""

from collections.abc import Sequence

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from gpmil.moments.orthant import Expansion, log_orthant
from gpmil.moments.sampling import jittered_cholesky, ndtri_exp, tilted

NODES = (3, 96, 64, 36, 18)  # per dimension, for 1 to 5 patches: errors of 1e-7 and less
FEW = 16  # patches up to which points are drawn
POINTS = 2**13  # eight times so many, which leaves 1e-5 to 5e-5


def log_together(
    mu: Float[Tensor, " n"],
    cov: Float[Tensor, "n n"],
    sizes: Sequence[int],
    each: Float[Tensor, " b"],
    seed: int = 0,
) -> tuple[float, float]:
    """log P(all m < 0) of all slides, and its error; `each` is log P_b of every slide alone.

    >>> mu, cov = torch.tensor([0.3, -1.0]).double(), torch.tensor([[1.0, 0.6], [0.6, 2.0]])
    >>> value, error = log_together(mu, cov.double(), [1, 1], torch.special.log_ndtr(-mu))
    >>> round(value, 5), error < 1e-5
    (-1.08204, True)
    """
    if len(mu) <= len(NODES):
        fewer, value = (product_rule(mu, cov, NODES[len(mu) - 1] - k) for k in (2, 0))
        return value, abs(value - fewer)
    if len(mu) <= FEW:
        return tilted(mu, cov, n_points=POINTS, seed=seed)
    found, ends = [log_orthant(mu[None], cov[None])], torch.tensor(sizes).cumsum(0).tolist()
    for start, end in zip([0, *ends], ends):
        own = slice(start, end)
        found.append(log_orthant(mu[None, own], cov[None, own, own]))
    alone = sum(float(one.log_p[0]) for one in found[1:])
    error = sum(float(one.error[0]) for one in found)
    return float(each.sum()) + float(found[0].log_p[0]) - alone, error


def product_rule(mu: Float[Tensor, " n"], cov: Float[Tensor, "n n"], nodes: int) -> float:
    """log P(all m < 0) by separation of variables on a product of Gauss-Legendre rules.

    m = mu + L y: y_1, y_2, ... one after the other, each given m_i < 0 at a share u_i of what is
    left of its distribution; P = int prod_i Phi(-c_i / L_ii) du, c_i = mu_i + sum_{j<i} L_ij y_j.
    """
    order = torch.argsort(mu * cov.diagonal().rsqrt(), descending=True, stable=True)
    mu, L = mu[order], jittered_cholesky(cov[order][:, order])
    t, weight = (torch.from_numpy(a).to(mu) for a in np.polynomial.legendre.leggauss(nodes))
    t = (t + 1) / 2
    # u = t^2 (3 - 2 t) makes the ends smooth, where y goes to infinity
    u, log_du = t.square() * (3 - 2 * t), (3 * weight * t * (1 - t)).log()
    log_w, y = mu.new_zeros(1), mu.new_zeros(1, 0)
    for i in range(len(mu)):
        log_phi = torch.special.log_ndtr(-(mu[i] + y @ L[i, :i]) / L[i, i])
        log_w = log_w + log_phi
        if i + 1 < len(mu):
            new = ndtri_exp(u.log() + log_phi[:, None])
            y = torch.cat([y.repeat_interleave(nodes, 0), new.reshape(-1, 1)], dim=1)
            log_w = (log_w[:, None] + log_du).reshape(-1)
    return float(torch.logsumexp(log_w, 0))


def gain(slides: Sequence[Expansion]) -> float:
    """log E[prod_b P_b(x)] - sum_b log E[P_b(x)], x ~ N(0, I), from log P_b to second order."""
    slope, bend = (sum(getattr(one, name)[0] for one in slides) for name in ("slope", "bend"))
    return _log_mean(slope, bend) - sum(_log_mean(one.slope[0], one.bend[0]) for one in slides)


def _log_mean(slope: Float[Tensor, " k"], bend: Float[Tensor, "k k"]) -> float:
    """log E[exp(slope'x - x'bend x / 2)] = (slope'(I + bend)^-1 slope - log|I + bend|) / 2."""
    chol = torch.linalg.cholesky(torch.eye(len(slope)).to(bend) + bend)
    z = torch.linalg.solve_triangular(chol, slope[:, None], upper=False)
    return float(z.square().sum() / 2 - chol.diagonal().log().sum())
