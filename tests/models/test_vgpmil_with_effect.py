"""VGPMIL with a slide effect: f_i + e_b in place of f_i, e_b ~ N(0, tau^2)."""

import numpy as np
import pytest
import torch
from scipy.integrate import quad
from scipy.special import log_expit
from synthetic import small_cohort

import gpmil
from gpmil.files import persistence
from gpmil.inference import logistic as inference
from gpmil.inference import solvers
from gpmil.inference.pieces import Chunk
from gpmil.moments import logistic
from gpmil.moments.likelihood import Group

TAU = 1.3


@pytest.fixture(scope="module")
def bags():
    return small_cohort(seed=3, n_bags=8, sizes=(1, 6))


def small(**given):
    return gpmil.VGPMIL(**({"n_inducing": 5, "random_state": 3, "max_iter": 15} | given))


def test_the_effect_is_one_more_column_for_every_bag():
    """With tau 1[i in b] as columns of W the model without an effect is the same model."""
    rng, sizes = np.random.default_rng(0), np.array([3, 1, 5, 2])
    offsets, N = np.concatenate([[0], np.cumsum(sizes)]), sizes.sum()
    W, residual = torch.from_numpy(rng.normal(size=(N, 4))), torch.from_numpy(rng.uniform(size=N))
    own = torch.from_numpy(TAU * np.repeat(np.eye(4), sizes, axis=0))
    positive = torch.tensor([True, False, True, False])

    def piece(W, first, last, effect):
        rows, start = slice(int(offsets[first]), int(offsets[last])), torch.from_numpy(offsets)
        group = Group(
            torch.ones_like(residual[rows]), start[first : last + 1] - start[first],
            positive[first:last], None, rows, residual=residual[rows],
        )  # fmt: skip
        return Chunk(W[rows], logistic.Logistic(float(np.log(100.0)), effect=effect)(group))

    problems = [
        solvers.Problem(chunks, *2 * [torch.eye(chunks[0].H.shape[1]).double()], -0.3, int(N), 0.0)
        for chunks in (
            [piece(W, 0, 2, TAU), piece(W, 2, 4, TAU)],
            [piece(torch.cat([W, own], 1), 0, 4, 0.0)],
        )
    ]
    start = (rng.uniform(0, 0.1, N), rng.standard_normal(N), 20, 0.0)
    found, expected = (inference.sweeps(p, *start) for p in problems)
    np.testing.assert_allclose(found.trace, expected.trace, rtol=1e-12)
    np.testing.assert_allclose(found.q.w, expected.q.w[:4], rtol=1e-10)
    np.testing.assert_allclose(found.s, expected.s, rtol=1e-10)
    inverse = torch.cholesky_inverse(expected.q.chol_R)[:4, :4]
    np.testing.assert_allclose(torch.linalg.inv(found.q.R), inverse, rtol=1e-10)
    assert np.diff(found.trace).min() > -1e-10


@pytest.mark.parametrize("tau", [0.05, 1.0, 6.0])
@pytest.mark.parametrize(("n", "shift"), [(1, 0.4), (30, -4.0), (30, 1.5)])
def test_bags_are_integrals_over_the_effect(n, shift, tau):
    rng = np.random.default_rng(n)
    mean = rng.normal(size=n) + shift
    found = logistic.log_none_shared(mean, np.zeros(n), tau)

    def log_f(e):
        return log_expit(-(mean + e)).sum() - (e / tau) ** 2 / 2

    grid = np.linspace(-tau * (9 + n * tau), 9 * tau, 20_001)
    values = np.array([log_f(e) for e in grid])
    mode, top = grid[values.argmax()], values.max()
    area = quad(lambda e: np.exp(log_f(e) - top), mode - 9 * tau, mode + 9 * tau, points=[mode],
                limit=200)[0]  # fmt: skip
    assert found == pytest.approx(top + np.log(area / (tau * np.sqrt(2 * np.pi))), abs=1e-5)


def test_a_vanishing_effect_is_none(bags):
    none, tiny = small().fit(bags), small(slide_effect=1e-4).fit(bags)
    np.testing.assert_allclose(tiny.whitened_mean_, none.whitened_mean_, atol=1e-6)
    np.testing.assert_allclose(tiny.predict_proba(bags), none.predict_proba(bags), atol=1e-6)


def test_patches_and_slides_know_the_effect_and_files_keep_it(bags, tmp_path):
    model = small(slide_effect=TAU).fit(bags)
    assert np.diff(model.elbo_trace_).min() > -1e-8
    found = model.predict_instances(bags)
    assert (found.std >= TAU).all()
    # what patches share makes them agree: a slide is negative more often than their product says
    alone = np.add.reduceat(
        logistic.log_expected_sigmoid(-found.mean, found.std), bags.offsets[:-1]
    )
    log_p, _ = model.log_proba_negative(bags)
    assert (log_p > alone - 1e-6)[bags.sizes == 1].all() and (log_p > alone)[bags.sizes > 1].all()
    model.save(tmp_path / "m")
    again = gpmil.load(tmp_path / "m")
    assert again.slide_effect_ == TAU
    np.testing.assert_array_equal(again.predict_proba(bags), model.predict_proba(bags))
    arrays, card = small().fit(bags)._saved()
    del card["settings"]["slide_effect"], card["fitted"]["slide_effect_"]
    persistence.write(tmp_path / "old", arrays, card)
    assert gpmil.load(tmp_path / "old").slide_effect_ == 0


@pytest.mark.parametrize("bad", [-1.0, float("nan"), "auto", None])
def test_effects_that_cannot_be_are_refused(bad, bags):
    with pytest.raises(ValueError, match="slide_effect"):
        small(slide_effect=bad).fit(bags)
