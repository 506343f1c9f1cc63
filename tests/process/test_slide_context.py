"""The process on slides' means against its naive twin."""

import numpy as np
import torch
from oracles import slide_context as naive
from synthetic import small_cohort

from gpmil.process.slide_context import Frame, SlideContext, bag_means, whitened

GAMMA, LENGTH = 1.7, 2.6


def slides():
    bags = small_cohort(seed=3, n_bags=9)
    x = torch.tensor(bags.features)
    return bags, x, torch.from_numpy(bags.sizes)


def test_rows_are_those_of_the_naive_twin():
    bags, x, sizes = slides()
    means = bag_means(x, sizes)
    frame = Frame.of(means)
    context = SlideContext.build(frame, frame(means)[2:7], GAMMA, LENGTH)
    z = naive.places(bags.split(bags.features))
    expected = naive.rows(z, z[2:7], GAMMA, LENGTH)
    found = context.columns(x, sizes).numpy()
    np.testing.assert_allclose(found, np.repeat(expected, bags.sizes, 0), rtol=0, atol=1e-9)
    one = context.columns(x[: sizes[0]]).numpy()
    np.testing.assert_allclose(one, found[: bags.sizes[0]], rtol=0, atol=1e-12)


def test_slides_have_mean_zero_and_mean_square_one():
    _, x, sizes = slides()
    means = bag_means(x, sizes)
    z = Frame.of(means)(means)
    assert z.mean(0).abs().max() < 1e-14
    assert float(z.square().mean()) == 1.0 or abs(float(z.square().mean()) - 1) < 1e-14


def test_slides_that_are_all_the_same_keep_their_unit():
    means = torch.full((5, 3), 2.7, dtype=torch.float64)
    frame = Frame.of(means)
    assert frame(means).abs().max() < 1e-12 and float(frame.scale) == 1.0


def test_rows_can_be_differentiated_in_both_settings():
    _, x, sizes = slides()
    means = bag_means(x, sizes)
    z = Frame.of(means)(means)
    settings = [torch.tensor(v, dtype=torch.float64, requires_grad=True) for v in (GAMMA, LENGTH)]
    assert torch.autograd.gradcheck(lambda *s: whitened(z, z[:4], *s), settings)
