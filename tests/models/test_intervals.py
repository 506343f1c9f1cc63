import numpy as np
import pytest
from oracles import interval as interval_twin
from scipy.special import logit
from scipy.stats import norm

import gpmil
from gpmil import simulate
from gpmil.models import fitted

D = 12


def a_model(coupling, wide, n_bags=14, **changed):
    """A model of few slides, so that much is left to know."""
    chosen = (
        {"variance": 20.0, "lengthscale": 3 * np.sqrt(D), "mean": -4.0}
        if wide
        else {"variance": 1.0, "lengthscale": "sqrt_dim", "mean": 0.0}
    )
    train = simulate.cohort(n_bags, n_features=D, seed=4, mean_size=25, max_lesion=0.6)
    return gpmil.VGPMILPRI(
        coupling=coupling, n_inducing=12, random_state=1, device="cpu", **chosen, **changed
    ).fit(train)


@pytest.fixture(scope="module")
def new_slides():
    bags = simulate.cohort(12, n_features=D, seed=4, part=1, mean_size=35, max_lesion=0.6)
    return bags[bags.sizes <= 60]


@pytest.mark.parametrize("wide", [False, True], ids=["paper", "wide"])
@pytest.mark.parametrize("coupling", [0.5, 10.0])
def test_ends_are_quantiles_of_many_draws(coupling, wide, new_slides):
    model = a_model(coupling, wide)
    low, high = model.predict_interval(new_slides[:3], level=0.9)
    for b in range(3):
        draws = interval_twin.drawn(model, new_slides[b])
        # 2,000 draws have an error of 0.005, 64 of them 0.027
        assert (draws < low[b]).mean() == pytest.approx(0.05, abs=0.02)
        assert (draws < high[b]).mean() == pytest.approx(0.95, abs=0.02)
        q = np.quantile(draws, [0.05, 0.95])
        assert np.abs(np.array([low[b], high[b]]) - q).max() < 0.15 * (q[1] - q[0])


@pytest.mark.parametrize("effect", [0.7, 3.0])
def test_ends_with_a_slide_effect_are_quantiles_of_draws(effect, new_slides, monkeypatch):
    model = a_model(1.0, True, slide_effect=effect)
    few = gpmil.Bags.from_arrays(
        [new_slides[b].features[:12] for b in range(2)],
        coords=[np.stack(np.divmod(np.arange(12), 4), 1)] * 2,
        step=1,
    )
    ends = np.stack(model.predict_interval(few, level=0.8))
    for b in range(2):
        draws = interval_twin.drawn_with_effect(model, few[b])
        # 500 draws have an error of 0.013
        assert (draws < ends[0, b]).mean() == pytest.approx(0.1, abs=0.04)
        assert (draws < ends[1, b]).mean() == pytest.approx(0.9, abs=0.04)
    monkeypatch.setattr(fitted, "LARGE", 3)
    assert np.abs(np.stack(model.predict_interval(few, level=0.8)) - ends).max() < 0.01


def test_ends_without_ep(new_slides):
    model = a_model(2.0, True)
    few = gpmil.Bags.from_arrays(
        [new_slides[b].features[:2] for b in range(3)],
        coords=[np.array([[0, 0], [0, 1]])] * 3,
        step=1,
    )
    low, high = model.predict_interval(few, level=0.8)
    for b in range(3):
        draws = interval_twin.drawn_pair(model, few[b])
        assert (draws < low[b]).mean() == pytest.approx(0.1, abs=0.025)
        assert (draws < high[b]).mean() == pytest.approx(0.9, abs=0.025)


def test_one_patch_has_an_exact_interval(new_slides):
    model = a_model(1.0, True)
    single = gpmil.Bags.from_arrays([new_slides[b].features[:1] for b in range(4)])
    low, high = model.predict_interval(single, level=0.9)
    for b in range(4):
        means, S = interval_twin.given_u(model, single[b], 40_000, 3)
        ends = means.mean() + np.array([-1, 1]) * norm.ppf(0.95) * means.std()
        # P(y = 1 | u) = Phi(E[m | u] / sd) rises with u: quantiles map to quantiles
        exact = norm.cdf(ends / np.sqrt(S[0, 0]))
        assert np.allclose([low[b], high[b]], exact, atol=0.012)


@pytest.mark.parametrize("coupling", [0.0, 1.0, 10.0])
def test_large_slides_have_the_same_interval(coupling, new_slides, monkeypatch):
    model = a_model(coupling, True)
    dense = np.stack(model.predict_interval(new_slides[:3]))
    monkeypatch.setattr(fitted, "LARGE", 3)
    large = np.stack(model.predict_interval(new_slides[:3]))
    assert np.abs(large - dense).max() < 0.01
    # one expansion at the mean of q(u), for the largest
    monkeypatch.setattr(fitted, "HUGE", 3)
    once = np.stack(model.predict_interval(new_slides[:3]))
    assert np.abs(once - dense).max() < 0.05
    assert not np.array_equal(once, large)


def test_intervals_hold_the_probability_and_repeat(new_slides):
    model = a_model(1.0, True)
    low, high = model.predict_interval(new_slides)
    p = model.predict_proba(new_slides)[:, 1]
    assert ((low > 0) & (low < p) & (p < high) & (high < 1)).all()
    again = model.predict_interval(new_slides)
    assert np.array_equal(again, (low, high))
    alone = np.array([model.predict_interval(new_slides[b]) for b in range(len(new_slides))])
    assert np.allclose(alone[..., 0].T, (low, high), rtol=1e-6)
    narrow = model.predict_interval(new_slides, level=0.5)
    assert (low < narrow[0]).all() and (narrow[1] < high).all()


def test_intervals_of_a_calibrated_model_are_mapped(new_slides):
    model = a_model(1.0, True, n_bags=30, calibrated=True, n_folds=2)
    ends = model.predict_interval(new_slides)
    calibrator = model.cross_fit_.calibrator
    model.cross_fit_ = None
    for mapped, plain in zip(ends, model.predict_interval(new_slides)):
        assert np.allclose(mapped, calibrator.predict(logit(plain)), rtol=1e-6)


@pytest.mark.parametrize("mean", [-25.0, 25.0])
def test_intervals_in_both_tails(mean, new_slides):
    model = a_model(2.0, True)
    model.mean_ = mean
    low, high = model.predict_interval(new_slides[:3])
    assert ((low >= 0) & (low <= high) & (high <= 1)).all()
    p = model.predict_proba(new_slides[:3])[:, 1]
    assert (p < 1e-4).all() if mean < 0 else (p > 0.999).all()
    assert (high < 1e-3).all() if mean < 0 else (low > 0.99).all()
