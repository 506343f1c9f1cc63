"""Inducing points on lesions: suspicious patches that the points of a first fit do not explain.

k-means puts no centre on a lesion of five patches. After a first fit patch i of a positive bag has
a probability p_i of being positive and an unexplained variance

    v_i = k(x_i, x_i) - |w_i|^2,    w_i its row of W = Kxz L^-T.

Patches are taken one after the other, the largest p v first; what a patch explains of the others
is taken off them, so that none is nearly the copy of another:

    r = (K - W W')_.i - C C_i',    c = r / sqrt(v_i),    v <- v - c^2,    C <- [C, c],

a partial Cholesky factorisation of K - W W' whose pivots are weighted by p.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from gpmil.process.sparse_gp import SparseGP

MOST = 2_048  # patches that are looked at more closely: all sums over them fit anywhere
LEAST = 1e-3  # of k(x, x): a patch of which less is unexplained needs no point


class Suspects(NamedTuple):
    """Some patches of positive bags after a first fit."""

    x: Float[Tensor, "n d"]  # kernel inputs
    p: Float[Tensor, " n"]  # P(h = 1)
    v: Float[Tensor, " n"]  # k(x, x) - |w|^2


def suspects(gp: SparseGP, x: Float[Tensor, "n d"], p: Float[Tensor, " n"]) -> Suspects:
    """What the inducing points leave unexplained of some patches."""
    v = gp.kernel.diagonal(x) - gp.whiten(x).square().sum(1)
    return Suspects(x, p, v.clamp(min=0))


def foremost(parts: Sequence[Suspects]) -> Suspects:
    """Of all of them the MOST with the largest p v; of equals the earlier."""
    x, p, v = (torch.cat(columns) for columns in zip(*parts, strict=True))
    first = torch.argsort(p * v, descending=True, stable=True)[:MOST]
    return Suspects(x[first], p[first], v[first])


def pivots(gp: SparseGP, found: Suspects, count: int) -> Int[Tensor, " m"]:
    """Which of the patches become inducing points, at most `count`."""
    x, p, v = found
    own, W, C = gp.kernel.diagonal(x), gp.whiten(x), x.new_zeros(len(x), 0)
    chosen: list[int] = []
    for _ in range(min(count, len(x))):
        worth = torch.where(v > LEAST * own, p * v, 0.0)
        i = int(worth.argmax())
        if not worth[i] > 0:
            break
        chosen.append(i)
        # r = (K - W W')_.i - C C_i'
        r = gp.kernel(x, x[i : i + 1])[:, 0] - W @ W[i] - C @ C[i]
        c = r / v[i].sqrt()
        v = (v - c.square()).clamp(min=0)
        v[i] = 0.0
        C = torch.cat([C, c[:, None]], dim=1)
    return torch.tensor(chosen, dtype=torch.int64, device=x.device)
