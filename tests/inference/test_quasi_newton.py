"""Climbing with few values: known hills, bounds, values that are no numbers."""

import numpy as np
import pytest

from gpmil.inference.quasi_newton import Hill

CURVED = np.array([[3.0, 0.8, 0.1], [0.8, 2.0, -0.4], [0.1, -0.4, 0.3]])
TOP = np.array([0.7, -1.2, 0.4])
WIDE = [(-9.0, 9.0)] * 3


class Counted:
    """-(z - top)'C(z - top)/2, and how often it was asked."""

    def __init__(self, fails=None):
        self.asked, self.fails = [], fails

    def __call__(self, z):
        self.asked.append(z)
        if self.fails is not None and self.fails(z):
            return -1e6, np.full(3, np.nan)
        off = z - TOP
        return -off @ CURVED @ off / 2, -CURVED @ off


def test_with_the_right_curvature_one_step_is_enough():
    hill = Counted()
    found = Hill(hill, WIDE, CURVED.copy(), radius=5.0).climb(np.zeros(3), 1e-9)
    np.testing.assert_allclose(found, TOP, atol=1e-12)
    assert len(hill.asked) == 2


def test_without_it_the_top_is_found_in_a_few():
    hill = Counted()
    found = Hill(hill, WIDE, np.eye(3), 1.0).climb(np.array([3.0, 2.0, -2.0]), 1e-7)
    np.testing.assert_allclose(found, TOP, atol=1e-3)
    assert len(hill.asked) < 25


def test_the_curvature_is_learned_on_the_way():
    climb = Hill(Counted(), WIDE, np.eye(3), 1.0)
    climb.climb(np.array([3.0, 2.0, -2.0]), 1e-10)
    np.testing.assert_allclose(climb.B, CURVED, atol=0.3)


def test_bounds_hold():
    hill = Counted()
    bounds = [(-9.0, 0.2), (-0.5, 9.0), (-9.0, 9.0)]
    found = Hill(hill, bounds, np.eye(3), 1.0).climb(np.array([-3.0, 3.0, 3.0]), 1e-9)
    low, high = np.array(bounds).T
    assert all((low <= z).all() and (z <= high).all() for z in hill.asked)
    assert found[0] == pytest.approx(0.2) and found[1] == pytest.approx(-0.5)
    # what is free is at its best given the others
    assert (CURVED @ (found - TOP))[2] == pytest.approx(0, abs=1e-3)


def test_a_step_without_a_number_is_shortened():
    hill = Counted(fails=lambda z: z[0] > 0.9)
    found = Hill(hill, WIDE, 0.05 * np.eye(3), 2.0).climb(np.array([-2.0, 0.0, 0.0]), 1e-8)
    np.testing.assert_allclose(found, TOP, atol=0.02)


def test_a_hill_that_bends_upwards_keeps_a_positive_curvature():
    climb = Hill(lambda z: (float(np.cosh(z[0])), np.sinh(z)), [(-2.0, 2.0)], np.eye(1), 1.0)
    found = climb.climb(np.array([0.3]), 1e-9)
    assert found[0] == 2.0 and climb.B[0, 0] > 0


def test_no_step_is_longer_than_is_trusted():
    hill = Counted()
    Hill(hill, WIDE, 1e-3 * np.eye(3), 0.4).climb(np.array([-5.0, 5.0, 5.0]), 1e-6)
    assert np.linalg.norm(hill.asked[1] - hill.asked[0]) == pytest.approx(0.4, rel=1e-6)
