"""Compiled sums over the slide effect (fast/effect.py), which autograd can go through."""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from gpmil.fast import compiled
from gpmil.moments.effect_nodes import RULE, At, Nodes
from gpmil.moments.given_effect import Patches, some_above


class Sums(NamedTuple):
    """Over the nodes of every bag, as slide_effect.py has them, for the bags that are served."""

    nodes: Nodes
    by_bag: list[Tensor]
    by_row: list[Tensor]
    served: Tensor


def compiled_sums(patches: Patches, tau: Tensor, given: At, full: bool, among: int) -> Sums | None:
    """The sums of bags out of `among` patches; None where torch's are to be used."""
    if not compiled.sums_effects(among, patches.mu.device):
        return None
    rare = given is some_above
    mu, sigma, offsets, row = patches
    nodes, by_bag, by_row, served = _Summed.apply(mu, sigma, tau, offsets, rare, full)
    rows = list(by_row)
    if rare and full:
        # E[m] = mu + sigma^2 gamma + E[s]
        weight, effect = (by_bag[k].index_select(0, row) for k in (0, 1))
        rows[2] = mu * weight + sigma.square() * rows[0] + effect
    found = Nodes._make((*nodes[:-1], nodes[-1] > 0))
    return Sums(found, list(by_bag), rows, served)


class _Summed(torch.autograd.Function):
    """mu, sigma and tau to the sums; nodes stay where they are."""

    @staticmethod
    def forward(
        ctx: Any, mu: Tensor, sigma: Tensor, tau: Tensor, offsets: Tensor, rare: bool, full: bool
    ) -> tuple[Tensor, ...]:
        nodes, by_bag, by_row, served = compiled.effect_sums(
            mu, sigma, offsets, tau, RULE, rare, full
        )
        ctx.save_for_backward(mu, sigma, offsets, tau, nodes, served)
        ctx.rare = rare
        ctx.mark_non_differentiable(nodes, served)
        return nodes, by_bag, by_row, served

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, _nodes: Tensor, by_bag: Tensor, by_row: Tensor, _served: Tensor) -> Any:
        # where only the gradient was summed the other adjoints are zero
        by_row = torch.nn.functional.pad(by_row, (0, 0, 0, 5 - len(by_row)))
        mu, sigma, offsets, tau, nodes, served = ctx.saved_tensors
        found = compiled.effect_adjoints(
            mu, sigma, offsets, tau, nodes, served, ctx.rare, by_bag, by_row
        )
        return *found, None, None, None
