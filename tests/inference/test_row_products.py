"""Products of rows with hand-made adjoints: the same as plain torch and its derivatives."""

import pytest
import torch
from oracles.model import relative_error

from gpmil.inference import row_products

OFFSETS = torch.tensor([0, 3, 4, 9])


def drawn():
    torch.manual_seed(4)
    H, A, g = (torch.randn(*shape, dtype=torch.float64) for shape in ((9, 4), (4, 4), (9,)))
    return H, A + A.mT, g


def plain_with_bags(H, Q, g, offsets):
    row = torch.arange(len(offsets) - 1).repeat_interleave(offsets.diff())
    p = torch.zeros(len(offsets) - 1, H.shape[1]).double().index_add(0, row, g[:, None] * H)
    return (H * (p @ Q)[row]).sum(1)


CASES = {
    "triangular": (
        lambda H, Q, g: row_products.triangular(H, Q.triu()).sum(1),
        lambda H, Q, g: (H @ Q.triu()).sum(1),
    ),
    "squares": (lambda H, Q, g: row_products.squares(H), lambda H, Q, g: H.square().sum(1)),
    "forms": (lambda H, Q, g: row_products.forms(H, Q), lambda H, Q, g: ((H @ Q) * H).sum(1)),
    "with_bags": (
        lambda H, Q, g: row_products.with_bags(H, Q, g, OFFSETS),
        lambda H, Q, g: plain_with_bags(H, Q, g, OFFSETS),
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_values_and_derivatives(case):
    weights, found = torch.linspace(-1, 2, 9).double(), []
    for own in CASES[case]:
        leaves = [x.requires_grad_() for x in drawn()]
        value = own(*leaves)
        (value * weights).sum().backward()
        H, Q, g = (torch.zeros_like(x) if x.grad is None else x.grad for x in leaves)
        found.append((value.detach(), H, (Q + Q.mT) / 2, g))  # Q is symmetric
    for ours, expected in zip(*found, strict=True):
        assert relative_error(ours, expected) < 1e-12 if expected.any() else not ours.any()
