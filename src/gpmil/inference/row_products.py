"""Products of every row of H with itself and with its bag, and their adjoints by hand.

Automatic differentiation keeps, and fills, several matrices as large as H where one will do, which
is most of what a gradient of the settings costs. With Q a symmetric matrix per fold:

    v_i = h_i'Q h_i                        h_i' = 2 v_i' Q h_i,   Q' = sum_i v_i' h_i h_i'
    s_i = h_i'Q p_b,  p_b = sum_j g_j h_j  h_i' = s_i' Q p_b + g_i Q t_b,  g_i' = h_i'Q t_b,
                                           Q' = sum_b p_b t_b',   t_b = sum_i s_i' h_i

(a prime on the left of = is an adjoint).
"""

from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from gpmil.fast import products


def triangular(K: Float[Tensor, "n M"], B: Float[Tensor, "M M"]) -> Float[Tensor, "n M"]:
    """K B, B zero below its diagonal."""
    return _Triangular.apply(K, B)


def squares(W: Float[Tensor, "n M"]) -> Float[Tensor, " n"]:
    """w_i'w_i of every row."""
    return _Squares.apply(W)


def forms(H: Float[Tensor, "n M"], Q: Float[Tensor, "M M"]) -> Float[Tensor, " n"]:
    """h_i'Q h_i of every row, Q symmetric."""
    return _Forms.apply(H, Q)


def with_bags(
    H: Float[Tensor, "n M"],
    Q: Float[Tensor, "M M"],
    g: Float[Tensor, " n"],
    offsets: Int[Tensor, " b1"],
) -> Float[Tensor, " n"]:
    """h_i'Q sum_j g_j h_j of every row, j over the rows of its bag, Q symmetric."""
    return _WithBags.apply(H, Q, g, offsets)


def totals(
    g: Float[Tensor, " n"], H: Float[Tensor, "n M"], offsets: Int[Tensor, " b1"]
) -> Float[Tensor, "b M"]:
    """sum_i g_i h_i over the rows of every bag, not to be differentiated."""
    n, b = len(g), len(offsets) - 1
    row = torch.arange(b, device=g.device).repeat_interleave(offsets.diff())
    at = torch.stack([row, torch.arange(n, device=g.device)])
    return torch.sparse_coo_tensor(at, g, (b, n), is_coalesced=True, check_invariants=False) @ H


class _Triangular(torch.autograd.Function):
    """W = K B; of the adjoint of B what is on and above its diagonal."""

    @staticmethod
    def forward(ctx: Any, K: Tensor, B: Tensor) -> Tensor:
        ctx.save_for_backward(K, B)
        return products.matmul(K.detach(), B.detach(), triangle=1)

    @staticmethod
    def backward(ctx: Any, by: Tensor) -> tuple[Tensor | None, ...]:
        K, B = (x.detach() for x in ctx.saved_tensors)
        by_K = by_B = None
        if ctx.needs_input_grad[0]:
            by_K = products.matmul(by, B.mT, triangle=-1)
        if ctx.needs_input_grad[1]:
            by_B = products.half_gram(by, K).triu()  # (by'K)' = K'by
        return by_K, by_B


class _Squares(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, W: Tensor) -> Tensor:
        ctx.save_for_backward(W)
        W = W.detach()
        return products.dots(W, W)

    @staticmethod
    def backward(ctx: Any, by: Tensor) -> Tensor:
        return (2 * by)[:, None] * ctx.saved_tensors[0]


class _Forms(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, H: Tensor, Q: Tensor) -> Tensor:
        HQ = products.matmul(H.detach(), Q.detach())
        ctx.save_for_backward(H, HQ)
        return products.dots(HQ, H.detach())

    @staticmethod
    def backward(ctx: Any, by: Tensor) -> tuple[Tensor | None, ...]:
        H, HQ = ctx.saved_tensors
        by_H = (2 * by)[:, None] * HQ if ctx.needs_input_grad[0] else None
        by_Q = products.weighted_gram(H.detach(), by) if ctx.needs_input_grad[1] else None
        return by_H, by_Q


class _WithBags(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, H: Tensor, Q: Tensor, g: Tensor, offsets: Tensor) -> Tensor:
        p = totals(g, H, offsets)
        row = torch.arange(len(p), device=g.device).repeat_interleave(offsets.diff())
        Qp = (p @ Q)[row]
        ctx.save_for_backward(H, Q, g, offsets, p, Qp, row)
        return products.dots(H.detach(), Qp.detach())

    @staticmethod
    def backward(ctx: Any, by: Tensor) -> tuple[Tensor | None, ...]:
        H, Q, g, offsets, p, Qp, row = ctx.saved_tensors
        t = totals(by, H, offsets)
        Qt = (t @ Q)[row]
        by_g, by_Q = products.dots(H.detach(), Qt), p.mT @ t
        by_H = Qt.mul_(g[:, None]).addcmul_(Qp, by[:, None])
        return by_H, (by_Q + by_Q.mT) / 2, by_g, None
