"""Sums over the values of a slide effect in one kernel, for GPUs (effect_kernel.py)."""

import torch
from jaxtyping import Float, Int
from torch import Tensor

THREADS = 32  # one warp per bag, which finds its nodes and goes through them


def sums(
    mu: Float[Tensor, " n"],
    sigma: Float[Tensor, " n"],
    offsets: Int[Tensor, " b1"],
    tau: Float[Tensor, ""],
    rule: tuple[float, ...],
    rare: bool,
    full: bool,
) -> list[Tensor]:
    """Nodes, sums per bag and per patch, and which bags are served: as effect.sums has them."""
    from gpmil.fast import effect_kernel

    n, bags = len(mu), len(offsets) - 1
    nodes, by_bag = mu.new_empty(2, 7, bags)
    by_row, scratch = mu.new_zeros(5 if full else 1, n), mu.new_empty(2, n)
    served = torch.empty(bags, dtype=torch.bool, device=mu.device)
    order = offsets.diff().argsort(descending=True)  # no program shall end long after the others
    effect_kernel.sums[(bags,)](
        mu.contiguous(), sigma.contiguous(), offsets, order, tau.double(), nodes, by_bag, by_row,
        served, *scratch, n, bags, rare, full, rule, THREADS, num_warps=THREADS // 32,
    )  # fmt: skip
    return [nodes, by_bag, by_row, served]
