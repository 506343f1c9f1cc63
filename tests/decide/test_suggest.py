"""Which patches to ask about: the information of a label, what is alike, one patch per slide."""

import numpy as np
from oracles import suggest as oracle

from gpmil.decide import suggest


def test_information_is_that_of_the_integral():
    mean = np.array([0.0, -0.7, 1.3, -2.5, 4.0])
    std = np.array([1.4, 1.9, 1.25, 2.2, 3.0])
    noise = np.array([0.8, 1.0, 1.3, 0.6, 1.0])
    exact = [oracle.information(*row) for row in zip(mean, std, noise)]
    np.testing.assert_allclose(suggest.information(mean, std, noise), exact, atol=4e-3)


def test_information_is_largest_near_the_boundary_and_where_little_is_known():
    mean = np.linspace(-3, 3, 31)
    known = suggest.information(mean, np.full(31, 1.2))
    unknown = suggest.information(mean, np.full(31, 1.7))
    assert known.argmax() == unknown.argmax() == 15 and (unknown >= known).all()
    assert suggest.information(np.array([0.3]), np.array([1.0])).max() < 1e-12  # nothing but noise
    assert np.isfinite(suggest.information(np.array([-60.0]), np.array([1.5]))).all()


def test_alike_is_the_mean_of_the_kernel(monkeypatch):
    monkeypatch.setattr(suggest, "ROWS", 3)
    rng = np.random.default_rng(2)
    z, others = rng.normal(size=(7, 3)), rng.normal(size=(4, 3))
    np.testing.assert_allclose(suggest.alike(z, others, 1.7), oracle.alike(z, others, 1.7))


def test_patches_are_spread_over_slides():
    score = np.array([0.5, 0.9, 0.0, 0.8, 0.7, 0.1])
    slide = np.array([0, 0, 1, 0, 2, 2])
    assert suggest.spread(score, slide, 9).tolist() == [1, 4]
    assert suggest.spread(score, slide, 9, per_slide=2).tolist() == [1, 3, 4, 5]
    assert suggest.spread(score, slide, 1).tolist() == [1]
