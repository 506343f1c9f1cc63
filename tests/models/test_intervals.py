import numpy as np
import pytest
from oracles import interval as interval_twin
from scipy.special import logit
from scipy.stats import norm

import gpmil
from gpmil import simulate
from gpmil.decide import calibration
from gpmil.files import persistence
from gpmil.models import fitted, with_intervals

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
    low, high = model.predict_interval(new_slides[:3], level=0.9, base_rate=False)
    for b in range(3):
        draws = interval_twin.drawn(model, new_slides[b])
        ends, wanted = np.array([low[b], high[b]]), np.array([0.05, 0.95])
        q = np.quantile(draws, wanted)
        # 2,000 draws have an error of 0.005, 64 of them 0.027
        off = np.abs((draws[:, None] < ends).mean(0) - wanted)
        assert ((off < 0.02) | (np.abs(ends - q) < 0.01)).all()
        assert np.abs(ends - q).max() < 0.15 * (q[1] - q[0])


@pytest.mark.parametrize("effect", [0.7, 3.0])
def test_ends_with_a_slide_effect_are_quantiles_of_draws(effect, new_slides, monkeypatch):
    model = a_model(1.0, True, slide_effect=effect)
    few = gpmil.Bags.from_arrays(
        [new_slides[b].features[:12] for b in range(2)],
        coords=[np.stack(np.divmod(np.arange(12), 4), 1)] * 2,
        step=1,
    )
    ends = np.stack(model.predict_interval(few, level=0.8, base_rate=False))
    for b in range(2):
        draws = interval_twin.drawn_with_effect(model, few[b])
        # 500 draws have an error of 0.013
        assert (draws < ends[0, b]).mean() == pytest.approx(0.1, abs=0.04)
        assert (draws < ends[1, b]).mean() == pytest.approx(0.9, abs=0.04)
    monkeypatch.setattr(fitted, "LARGE", 3)
    assert (
        np.abs(np.stack(model.predict_interval(few, level=0.8, base_rate=False)) - ends).max()
        < 0.01
    )


def test_ends_without_ep(new_slides):
    model = a_model(2.0, True)
    few = gpmil.Bags.from_arrays(
        [new_slides[b].features[:2] for b in range(3)],
        coords=[np.array([[0, 0], [0, 1]])] * 3,
        step=1,
    )
    low, high = model.predict_interval(few, level=0.8, base_rate=False)
    for b in range(3):
        draws = interval_twin.drawn_pair(model, few[b])
        assert (draws < low[b]).mean() == pytest.approx(0.1, abs=0.025)
        assert (draws < high[b]).mean() == pytest.approx(0.9, abs=0.025)


def test_one_patch_has_an_exact_interval(new_slides):
    model = a_model(1.0, True)
    single = gpmil.Bags.from_arrays([new_slides[b].features[:1] for b in range(4)])
    low, high = model.predict_interval(single, level=0.9, base_rate=False)
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
    # one expansion at the mean of u, for the largest
    monkeypatch.setattr(with_intervals, "HUGE", 3)
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
    ends = model.predict_interval(new_slides, base_rate=False)
    calibrator = model.cross_fit_.calibrator
    model.cross_fit_ = None
    for mapped, plain in zip(ends, model.predict_interval(new_slides, base_rate=False)):
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


# --- Every kind of fit, and files ----------------------------------------------------------------

KINDS = {
    "sweeps": {"solver": "sweeps", "max_iter": 40},
    "newton": {"solver": "newton"},
    "coupled moments": {"moments": "coupled"},
    "effect": {"slide_effect": 0.8},
    "context": {"slide_context": 0.7, "slide_context_lengthscale": 2.0},
    "labels": {"instance_labels": "use", "slide_effect": 0.5},
    "calibrated": {"calibrated": True, "n_folds": 2},
    "no memory": {"store": "recompute"},
}


@pytest.mark.parametrize("kind", KINDS)
def test_every_fit_has_intervals_about_its_prediction(kind, new_slides, tmp_path):
    model = a_model(1.0, True, n_bags=22, **KINDS[kind])
    few = new_slides[:4]
    p = model.predict_proba(few)[:, 1]
    assert np.linalg.eigvalsh(model.interval_precision_).min() > 1 - 1e-8
    before = (p, p)
    for level in (0.2, 0.5, 0.8, 0.95):
        low, high = model.predict_interval(few, level=level)
        assert (low < before[0]).all() and (before[1] < high).all()
        alone = model.predict_interval(few, level=level, base_rate=False)
        assert (low <= alone[0]).all() and (alone[0] <= p).all()
        assert (p <= alone[1]).all() and (alone[1] <= high).all()
        before = low, high
    model.save(tmp_path / "model")
    again = gpmil.load(tmp_path / "model").predict_interval(few, level=0.95)
    np.testing.assert_array_equal(again, before)


def test_one_patch_and_grades(new_slides):
    train = simulate.cohort(24, n_features=D, seed=4, mean_size=25, max_lesion=0.6)
    graded = gpmil.OrdinalMIL(
        grades=[0, 1, 2], cut_points=[0, 1.5], variance=9.0, lengthscale=6.0, mean=-3.0,
        coupling=0.5, n_inducing=12, random_state=1, device="cpu",
    ).fit(train, train.labels * (1 + np.arange(24) % 3 // 2))  # fmt: skip
    single = gpmil.Bags.from_arrays([new_slides[b].features[:1] for b in range(3)])
    for some in (new_slides[:3], single):
        low, high = graded.predict_interval(some)
        p = 1 - graded.predict_proba(some)[:, 0]
        assert ((low < p) & (p < high)).all()


def test_a_model_of_an_earlier_version_has_narrow_intervals_and_says_so(
    new_slides, tmp_path, caplog
):
    model = a_model(1.0, True)
    arrays, card = model._saved()
    kept = {k: a for k, a in arrays.items() if not k.startswith("interval_")}
    persistence.write(tmp_path / "old", kept, card)
    old = gpmil.load(tmp_path / "old")
    low, high = old.predict_interval(new_slides[:3])
    assert caplog.text.count("too narrow") == 1
    wide = model.predict_interval(new_slides[:3])
    assert (high - low < wide[1] - wide[0]).all()
    model.interval_mean_, model.interval_precision_ = (
        arrays["whitened_mean_"],
        old.whitened_precision_,
    )
    np.testing.assert_array_equal(model.predict_interval(new_slides[:3]), (low, high))
    np.testing.assert_array_equal(old.predict_proba(new_slides), model.predict_proba(new_slides))
    again = old.predict_interval(new_slides[:1])
    assert again[0] < again[1] and caplog.text.count("too narrow") == 1


@pytest.mark.parametrize("name", ["interval_mean_", "interval_precision_"])
def test_half_of_it_is_damage(name, tmp_path):
    arrays, card = a_model(1.0, True)._saved()
    kept = {k: a for k, a in arrays.items() if k != name}
    persistence.write(tmp_path / "odd", kept, card)
    with pytest.raises(ValueError, match="interval_mean_ and interval_precision_"):
        gpmil.load(tmp_path / "odd")


def test_folds_keep_no_intervals():
    model = a_model(1.0, True, n_bags=22, flags=True, n_folds=2)
    assert model.interval_mean_ is not None
    assert all(one.interval_mean_ is None for one in model.cross_fit_.models)


# --- What features do not tell: the level of all log odds -----------------------------------------


@pytest.fixture(scope="module")
def told_nothing():
    """A model of 40 slides that has found no use for the features; 16 of them are positive."""
    rng = np.random.default_rng(6)
    labels = np.arange(40) < 16
    bags = gpmil.Bags.from_arrays([rng.normal(size=(3, 2)) for _ in labels], labels=labels * 1)
    settings = {"variance": 1e-8, "lengthscale": 1.0, "mean": norm.ppf(1 - 0.6 ** (1 / 3))}
    return gpmil.VGPMILPR(**settings, n_inducing=5, aim="cost=1:1", random_state=0).fit(bags), bags


def test_where_nothing_is_known_the_interval_is_that_of_the_share(told_nothing):
    model, bags = told_nothing
    p = model.predict_proba(bags[:2])[:, 1]
    assert p == pytest.approx(0.4, abs=1e-3)
    low, high = model.predict_interval(bags[:2], level=0.9)
    deviation = 1 / np.sqrt(1 / 4 + 40 * 0.4 * 0.6)  # 1/4: the prior of the level
    ends = logit(0.4) + np.array([-1, 1]) * norm.ppf(0.95) * deviation
    np.testing.assert_allclose([low[0], high[0]], 1 / (1 + np.exp(-ends)), atol=2e-3)
    assert high[0] - low[0] > 0.2  # it was 1e-4
    process = np.stack(model.predict_interval(bags[:2], level=0.9, base_rate=False))
    assert (process[1] - process[0] < 1e-3).all()
    found = model.predict_all(bags[:2], level=0.9).interval
    np.testing.assert_allclose(found, np.stack([low, high], axis=1))


def test_the_level_is_known_from_the_slides_left_out(told_nothing):
    model, _ = told_nothing
    assert model.level_information_ == pytest.approx(40 * 0.4 * 0.6, rel=0.01)
    model.level_information_ = None  # of models of earlier versions: from the numbers of slides
    assert model._level_deviation() == pytest.approx((1 / 4 + 16 * 24 / 40) ** -0.5)
    model.level_information_ = 9.6


def test_intervals_of_a_share_hold_it_as_often_as_they_say():
    rng, held = np.random.default_rng(1), []
    for truth in (0.2, 0.5, 0.7):
        for _ in range(300):
            share = (rng.random(40) < truth).mean().clip(0.01, 0.99)
            known = calibration.level_information(np.full(40, share), np.ones(40))
            half = norm.ppf(0.95) * calibration.level_deviation(known)
            held.append(abs(logit(share) - logit(truth)) < half)
    assert np.mean(held) == pytest.approx(0.9, abs=0.04)


def test_copies_of_slides_tell_nothing_new():
    p = np.array([0.3, 0.8, 0.6, 0.1])
    once = calibration.level_information(p, np.ones(4))
    twice = calibration.level_information(np.repeat(p, 2), np.full(4, 2.0))
    assert twice == pytest.approx(once)
