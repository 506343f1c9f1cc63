"""What networks of bags are made of: sums over bags, linear layers, the embedding of instances.

A network maps a `Batch` to one logit per bag, log P(y = 1) - log P(y = 0). The bags of a batch lie
one after the other, and sums over a bag are segment sums.
"""

from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from gpmil.models.batches import Batch


def segment_sum(x: Float[Tensor, "n *d"], segment: Int[Tensor, " n"], b: int) -> Tensor:  # noqa: F821
    """The sum over each bag, (b, ...)."""
    return x.new_zeros(b, *x.shape[1:]).index_add_(0, segment, x)


def segment_mean(x: Float[Tensor, "n d"], segment: Int[Tensor, " n"], b: int) -> Tensor:
    """The mean over each bag, (b, d)."""
    # not by bincount, which makes the CPU wait for a GPU
    sizes = segment_sum(torch.ones_like(x[:, 0]), segment, b)
    return segment_sum(x, segment, b) / sizes[:, None]


def segment_max(x: Float[Tensor, " n"], segment: Int[Tensor, " n"], b: int) -> Float[Tensor, " b"]:
    """The maximum over each bag."""
    return x.new_full((b,), -torch.inf).scatter_reduce_(0, segment, x, "amax")


def segment_softmax(
    x: Float[Tensor, " n"], segment: Int[Tensor, " n"], b: int
) -> Float[Tensor, " n"]:
    """exp(x_i) / sum_j exp(x_j) over each bag; the largest is taken off, so none overflows."""
    # index_select, not [segment]: its gradient adds up where the other first sorts
    e = (x - segment_max(x.detach(), segment, b).index_select(0, segment)).exp()
    return e / segment_sum(e, segment, b).index_select(0, segment)


def linear(n_in: int, n_out: int, random: torch.Generator, bias: bool = True) -> nn.Linear:
    """A linear layer, uniform in +-1/sqrt(n_in), by a generator of its own."""
    layer = nn.utils.skip_init(nn.Linear, n_in, n_out, bias=bias, dtype=torch.float64)
    bound = n_in**-0.5
    for weight in layer.parameters():
        nn.init.uniform_(weight, -bound, bound, generator=random)
    return layer


class Network(nn.Module):
    """h_i = ReLU(W x_i + b) for every instance; subclasses make one logit per bag of them."""

    def __init__(self, n_inputs: int, hidden_dim: int, dropout: float, random: torch.Generator):
        super().__init__()
        self.embed = linear(n_inputs, hidden_dim, random)
        self.dropout = dropout
        self.random: torch.Generator | None = None  # of dropout, while training

    def embedding(self, x: Float[Tensor, "n d"]) -> Float[Tensor, "n h"]:
        """h, some of it dropped while training."""
        h = self.embed(x).relu()
        if not self.training or not self.dropout:
            return h
        kept = torch.empty_like(h).bernoulli_(1 - self.dropout, generator=self.random)
        return h * kept / (1 - self.dropout)

    def forward(self, batch: Batch) -> Float[Tensor, " b"]:
        """One logit per bag."""
        raise NotImplementedError

    def groups(self, learning_rate: float, weight_decay: float) -> list[dict[str, Any]]:
        """The parameters as the optimiser wants them."""
        decay = {"lr": learning_rate, "weight_decay": weight_decay}
        return [{"params": list(self.parameters()), **decay}]
