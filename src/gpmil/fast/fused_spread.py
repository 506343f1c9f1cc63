"""k-means++ in one kernel, for GPUs: its steps are too small to be launched one by one."""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from gpmil.fast import fused_pass

MOST_POINTS = 8192  # whose distances to each other are kept: 256 MB
WARPS = 16


def chosen(
    x: Float[Tensor, "n d"], first: int, u: Float[Tensor, "k1 t"]
) -> Int[Tensor, " k"] | None:
    """The points that inducing.spread chooses; None: take the plain way."""
    n, (steps, draws) = len(x), u.shape
    if not x.is_cuda or n > MOST_POINTS or not fused_pass.available():
        return None
    from gpmil.fast import fused_kernel

    square = x.square().sum(1)
    # |x - z|^2 = |x|^2 - 2 x'z + |z|^2
    distances = torch.addmm(square[:, None] + square, x, x.mT, alpha=-2).clamp_(min=0)
    found = torch.full((steps + 1,), first, device=x.device)
    fused_kernel.spread[(1,)](
        distances, u.double(), found, n, steps + 1, fused_pass.power_of_two(n), draws,
        num_warps=WARPS,
    )  # fmt: skip
    return found
