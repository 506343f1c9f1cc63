import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles import interval as interval_twin
from scipy.stats import chi2, norm

from gpmil.moments.quadratic import quadratic_quantile


@settings(max_examples=10, deadline=None)
@given(
    k=st.integers(1, 7),
    seed=st.integers(0, 500),
    bent=st.sampled_from([0.0, 0.03, 0.4]),
    p=st.sampled_from([0.01, 0.07, 0.47, 0.9]),
)
def test_quantiles_of_a_quadratic_form_against_draws(k, seed, bent, p):
    rng = np.random.default_rng(seed)
    b, B = rng.standard_normal(k), bent * rng.standard_normal((k, k))
    B = B + B.T
    found = quadratic_quantile(-1.3, b, B, p)
    draws = interval_twin.quadratic_draws(-1.3, b, B)
    # error of the draws 0.001 at most, the rest is the saddlepoint's: a fifth where two or three
    # numbers are bent so much that the density is far from smooth
    share = 0.2 if bent == 0.4 else 0.05
    assert (draws < found).mean() == pytest.approx(p, abs=0.004 + share * min(p, 1 - p))


def test_quantiles_of_a_quadratic_form_in_its_limits():
    b = np.array([0.6, -1.1, 0.2])
    flat = quadratic_quantile(2.0, b, np.zeros((3, 3)), 0.83)
    assert flat == pytest.approx(2 + norm.ppf(0.83) * np.sqrt((b**2).sum()), abs=1e-9)
    assert quadratic_quantile(2.0, 0 * b, np.zeros((3, 3)), 0.83) == 2.0
    # no slope: half of a chi-squared, and its mirror image
    for p in (0.06, 0.5, 0.94):
        above = quadratic_quantile(0.0, np.zeros(9), np.eye(9), p)
        assert 2 * above == pytest.approx(chi2(9).ppf(p), rel=0.01)
        below = quadratic_quantile(0.0, np.zeros(9), -np.eye(9), p)
        assert 2 * below == pytest.approx(-chi2(9).ppf(1 - p), rel=0.01)
    # no jump where t = 0
    near = [quadratic_quantile(0.0, b, np.diag(b), p) for p in np.linspace(0.4, 0.6, 401)]
    steps = np.diff(near)
    assert (steps > 0).all() and steps.max() < 2 * steps.min()
