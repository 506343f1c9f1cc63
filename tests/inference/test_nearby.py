"""The maximum near a known one: the one that the direct solver finds, with fewer passes."""

import numpy as np
import pytest
import torch
from synthetic import pri, small_cohort

from gpmil.inference import nearby, solvers


@pytest.fixture(scope="module")
def problem():
    """Some bags with a slide effect and known patches, as a model has them."""
    bags = small_cohort(seed=9, n_bags=12, sizes=(3, 8))
    labels = bags.instance_labels.copy()
    labels[::3] = -1
    settings = {"variance": 2.1, "mean": -0.6, "lengthscale": 1.4, "coupling": 0.4}
    more = {"slide_effect": 0.8, "instance_labels": "use", "n_inducing": 9, "random_state": 0}
    model = pri(**settings, **more).fit(bags.with_instance_labels(labels))
    with torch.no_grad():
        return model._fitted_problem(bags.with_instance_labels(labels), None)[1]


@pytest.fixture(scope="module")
def expected(problem):
    return solvers.direct(problem, 200, 1e-11)


def test_a_mended_hessian_is_right_along_the_step():
    rng = np.random.default_rng(3)
    A, B = (torch.from_numpy(x @ x.T + np.eye(4)) for x in rng.normal(size=(2, 4, 4)))
    s = torch.from_numpy(rng.normal(size=4))
    J = nearby.mended(A, s, B @ s)
    torch.testing.assert_close(J @ s, B @ s)
    torch.testing.assert_close(J, J.mT)
    assert torch.linalg.eigvalsh(J).min() > 0
    assert nearby.mended(A, s, -B @ s) is A  # not convex along s


@pytest.mark.parametrize("scale", [1.0, 0.6, 3.0, 1e-2, 1e5])
def test_it_is_the_maximum_whatever_hessian_it_begins_with(problem, expected, scale):
    w = expected.w + 0.2 * torch.cos(torch.arange(len(expected.w)))
    J = scale * solvers.collapsed_bound(problem, torch.zeros_like(w))[2]
    found = nearby.maximum(problem, 200, 1e-10, w, J)
    assert found.converged and len(found.trace) == found.n_iter < 40
    np.testing.assert_allclose(found.w, expected.w, rtol=0, atol=1e-9)


def test_a_good_hessian_is_used_as_it_is(problem, expected, monkeypatch):
    def none(*_):
        raise AssertionError("a Hessian was asked for")

    J = solvers.collapsed_bound(problem, expected.w)[2]
    monkeypatch.setattr(nearby, "collapsed_bound", none)
    found = nearby.maximum(problem, 200, 1e-10, expected.w + 0.01, J)
    np.testing.assert_allclose(found.w, expected.w, rtol=0, atol=1e-9)
    assert found.n_iter <= 6


def test_steps_that_do_not_suffice_are_said(problem, expected):
    J = solvers.collapsed_bound(problem, expected.w)[2]
    found = nearby.maximum(problem, 1, 1e-10, expected.w + 1, J)
    assert not found.converged
    with pytest.warns(match="No convergence in 1 steps"):
        solvers.said(found, 1e-10)
