"""Types and shapes are checked while the tests run: from the beginning of each, up to a number."""

import jaxtyping
import pytest
import torch
import typecheck

from gpmil.moments.truncated import expectations


def of_one_bag(sigma):
    """E[m] and log Z of two patches."""
    mu, row = torch.tensor([0.1, -0.4]).double(), torch.tensor([0, 0])
    positive, offsets = torch.tensor([True]), torch.tensor([0, 2])
    return expectations(mu, torch.tensor(sigma).double(), positive, offsets, row)


@pytest.mark.parametrize("again", range(2))  # a test does not notice what those before it used up
def test_shapes_are_checked_until_enough_were(again):
    with pytest.raises(jaxtyping.TypeCheckError, match="sigma"):
        of_one_bag([1.0, 0.7, 2.0])
    typecheck.checks.made = typecheck.MOST - 1
    of_one_bag([1.0, 0.7])
    assert jaxtyping.config.jaxtyping_disable
