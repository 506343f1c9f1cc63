"""Calibrated slides, the refer rule, intervals and patch flags, as a fitted model gives them."""

import json
import logging
from itertools import pairwise

import gpytorch
import numpy as np
import pytest
from oracles import calibration as naive
from scipy.special import logit
from sklearn.base import clone
from sklearn.model_selection import GridSearchCV, StratifiedGroupKFold, cross_val_predict

import gpmil
from gpmil import VGPMILPR, VGPMILPRI, Bags, simulate
from gpmil.decide.calibration import SlideCalibrator
from gpmil.decide.refer import ReferRule
from gpmil.models.base import log_odds

D = 12
SETTINGS = {
    "coupling": 1.0,
    "variance": 9.0,
    "lengthscale": 2 * np.sqrt(D),
    "mean": -4.0,
    "n_inducing": 25,
    "random_state": 3,
    "device": "cpu",
}
RATES = (0.05, 0.1, 0.2)


def drawn(n_bags, part=0, **settings):
    """Slides of about 20 patches with lesions that stand out."""
    easy = {"mean_size": 20, "separation": 8.0, "max_lesion": 0.6}
    return simulate.cohort(n_bags, n_features=D, seed=2, part=part, **(easy | settings))


def fitted(bags, **changed):
    return VGPMILPRI(**(SETTINGS | changed)).fit(bags)


def some(bags, n0, n1):
    """The first n0 negative and n1 positive bags."""
    return bags[
        np.concatenate([np.flatnonzero(bags.labels == y)[:n] for y, n in ((0, n0), (1, n1))])
    ]


def with_groups(bags, groups):
    return Bags.from_arrays(
        bags.split(bags.features), labels=bags.labels, groups=groups, names=bags.names
    )


def suspicion(model, bags):
    found = model.predict_instances(bags)
    return found.mean / found.std


@pytest.fixture(scope="module")
def train():
    """38 slides of about 30 patients."""
    return drawn(38)


@pytest.fixture(scope="module")
def new():
    """21 slides of other patients."""
    return drawn(21, part=1)


@pytest.fixture(scope="module")
def plain(train):
    return fitted(train)


@pytest.fixture(scope="module")
def model(train):
    return fitted(train, calibrated=True, flags=True, n_folds=4)


@pytest.fixture(scope="module")
def calibrated(train):
    return fitted(train, calibrated=True)


# ------------------------------------------------------------------ patches


def test_without_flags_there_are_no_p_values(plain, calibrated, new):
    for without in (plain, calibrated):
        found = without.predict_instances(new)
        assert found.p_value is None
        assert found.flagged is None
        assert not {"p_value", "flagged"} & set(found.to_frame())


def test_one_pass_gives_what_its_methods_give(model, new):
    both = model.predict_all(new, rate=0.2, within="cohort")
    apart = model.predict_instances(new, rate=0.2, within="cohort")
    raw, error = model.log_proba_negative(new)
    # calibrated probabilities beside the raw integral, each under its own name
    assert np.array_equal(both.log_proba_negative, raw) and np.array_equal(both.error, error)
    assert np.array_equal(both.proba, model.predict_proba(new))
    assert not np.allclose(both.proba[:, 0], np.exp(raw))
    assert np.array_equal(both.instances.p_value, apart.p_value)
    assert np.array_equal(both.instances.flagged, apart.flagged)
    with pytest.raises(ValueError, match="rate must be a number between 0 and 1"):
        model.predict_all(new, rate=10)


def test_flags_change_nothing_else(model, plain, new):
    found, bare = model.predict_instances(new), plain.predict_instances(new)
    for name in ("probability", "mean", "std"):
        assert np.array_equal(getattr(found, name), getattr(bare, name))
    only_flags = fitted(drawn(14), flags=True, n_folds=2)
    assert np.array_equal(only_flags.predict_proba(new), fitted(drawn(14)).predict_proba(new))
    with pytest.raises(ValueError, match="calibrated=True"):
        only_flags.refer_rule(0.1)


def test_the_smallest_p_value_is_said_and_reached(train, new, caplog):
    with caplog.at_level(logging.INFO, logger="gpmil"):
        model = fitted(train, flags=True)
    smallest = model.cross_fit_.reference.smallest()
    negative_patches = int((train.labels[train.bag_index] == 0).sum())
    assert smallest == 1 / (1 + negative_patches)
    assert f"smallest possible p-value of a patch: {smallest:.2g}" in caplog.text
    p = model.predict_instances(new).p_value
    assert p.min() == smallest
    assert p.max() <= 1
    by_bag = model.predict_instances(new, weights="bag").p_value
    # slides of one patient count once
    patients = len(np.unique(train.groups[train.labels == 0]))
    assert np.isclose(by_bag.min(), 1 / (1 + patients))
    assert by_bag.max() <= 1


@pytest.mark.parametrize("weights", ["patch", "bag"])
def test_p_values_of_new_slides_by_hand(model, train, new, weights):
    cross = model.cross_fit_
    scores = np.stack([suspicion(m, new) for m in cross.models])
    # the held-out negative bags of fold k, scored by model k
    reference = [
        [
            np.concatenate([suspicion(m, train[int(b)]) for b in np.flatnonzero(mine)])
            for mine in (
                (cross.fold == k) & (train.labels == 0) & (train.groups == g)
                for g in np.unique(train.groups)
            )
            if mine.any()
        ]
        for k, m in enumerate(cross.models)
    ]
    p = model.predict_instances(new, weights=weights).p_value
    rows = np.random.default_rng(5).choice(len(p), 40, replace=False)
    for i in rows:
        if weights == "bag":
            expected = naive.p_value_by_bag(scores[:, i], reference)
        else:
            expected = naive.p_value(scores[:, i], [np.concatenate(fold) for fold in reference])
        assert np.isclose(p[i], expected, rtol=1e-9)


def own_p_value(model, train, b):
    """Of every patch of training bag b, from the one model that has not seen it."""
    k = model.cross_fit_.fold[b]
    judge = model.cross_fit_.models[k]
    others = [
        suspicion(judge, train[int(a)])
        for a in np.flatnonzero((model.cross_fit_.fold == k) & (train.labels == 0))
        if train.groups[a] != train.groups[b]
    ]
    own = suspicion(judge, train[int(b)])
    return [naive.p_value([s], [np.concatenate(others)]) for s in own]


def test_p_values_of_training_slides_come_from_the_model_without_them(model, train):
    p = np.split(model.predict_instances(train).p_value, train.offsets[1:-1])
    for b in (*np.flatnonzero(train.labels == 0)[:4], *np.flatnonzero(train.labels == 1)[:4]):
        assert np.allclose(p[b], own_p_value(model, train, int(b)), rtol=1e-9)


def test_training_slides_are_recognised_in_any_company(model, train, new):
    whole = np.split(model.predict_instances(train).p_value, train.offsets[1:-1])
    order = np.random.default_rng(0).permutation(len(train))[:17]
    shuffled = model.predict_instances(train[order])
    for b, piece in zip(order, shuffled.split()):
        assert np.array_equal(piece.p_value, whole[b])
    # other names, no labels, and new slides between them
    arrays = [train[3].features, new[0].features, train[11].features]
    coords = [train[3].coords, new[0].coords, train[11].coords]
    mixed = model.predict_instances(Bags.from_arrays(arrays, coords=coords, step=1024)).split()
    assert np.array_equal(mixed[0].p_value, whole[3])
    assert np.array_equal(mixed[1].p_value, model.predict_instances(new[0]).p_value)
    assert np.array_equal(mixed[2].p_value, whole[11])


def test_a_slide_that_lost_a_patch_is_a_new_slide(model, train):
    b = int(np.flatnonzero(train.labels == 1)[0])
    bag = train[b]
    less = Bags.from_arrays([bag.features[1:]], coords=[bag.coords[1:]], step=1024)
    smallest = model.cross_fit_.reference.smallest()
    own_smallest = model.predict_instances(bag).p_value.min()
    pooled = model.predict_instances(less).p_value
    assert own_smallest > smallest  # one fold is a smaller reference than all
    ranks = pooled / smallest
    assert np.allclose(ranks, np.round(ranks))


def test_flags_are_nested_in_their_rate_and_are_benjamini_hochberg(model, new):
    for within in ("bag", "cohort"):
        found = [model.predict_instances(new, rate=r, within=within) for r in RATES]
        assert all((low.flagged <= high.flagged).all() for low, high in pairwise(found))
        assert found[0].flagged.any()
        assert not found[-1].flagged.all()
    for rate, one in zip(RATES, found):
        assert np.array_equal(one.flagged, by_textbook(one.p_value, rate))
    for piece in model.predict_instances(new, rate=0.2).split():
        assert np.array_equal(piece.flagged, by_textbook(piece.p_value, 0.2))


def by_textbook(p, rate):
    """A hair of room: p-values often meet their limit exactly."""
    return naive.benjamini_hochberg(p.tolist(), rate * (1 + 1e-9))


def test_within_bags_a_slide_does_not_depend_on_its_company(model, new):
    alone = np.concatenate([model.predict_instances(bag).flagged for bag in new])
    assert np.array_equal(model.predict_instances(new, within="bag").flagged, alone)
    one = np.concatenate([model.predict_instances(bag, within="cohort").flagged for bag in new])
    assert np.array_equal(one, alone)
    assert not np.array_equal(model.predict_instances(new, within="cohort").flagged, alone)


def test_marked_patches_are_mostly_lesions(model, new):
    truth = new.instance_labels == 1
    flagged = model.predict_instances(new, rate=0.1).flagged
    assert truth[flagged].mean() > 0.8
    assert flagged[truth].mean() > 0.4
    assert flagged.mean() < 0.3


def test_tables_and_pieces_carry_p_values(model, new):
    found = model.predict_instances(new)
    frame = found.to_frame()
    assert np.array_equal(frame["p_value"], found.p_value)
    assert np.array_equal(frame["flagged"], found.flagged)
    assert np.array_equal(np.concatenate([f.p_value for f in found.split()]), found.p_value)


@pytest.mark.parametrize("rate", [0.0, 1.0, -0.1, 10, float("nan")])
def test_a_rate_outside_0_and_1_is_refused(model, new, rate):
    with pytest.raises(ValueError, match=r"rate must be a number between 0 and 1.*got"):
        model.predict_instances(new[:2], rate=rate)


def test_other_words_are_refused(model, new):
    with pytest.raises(ValueError, match=r"within must be one of \['bag', 'cohort'\]"):
        model.predict_instances(new[:2], within="slide")
    with pytest.raises(ValueError, match=r"weights must be one of .*got 'patient'"):
        model.predict_instances(new[:2], weights="patient")


# ------------------------------------------------------------------ folds


def test_patients_stay_together_and_every_fold_is_fair(model, train):
    fold = model.cross_fit_.fold
    assert len(np.unique(train.groups)) < len(train)
    for patient in np.unique(train.groups):
        assert len(set(fold[train.groups == patient])) == 1
    assert len(model.cross_fit_.models) == fold.max() + 1 == 4
    assert naive.is_fair(fold, train.labels, 4)


def test_the_models_are_fits_without_their_fold(model, train, new):
    cross = model.cross_fit_
    for k in (0, 2):
        again = fitted(train[cross.fold != k])
        assert np.array_equal(again.predict_proba(new), cross.models[k].predict_proba(new))
        odds = again.decision_function(train[cross.fold == k])
        assert np.allclose(cross.log_odds[cross.fold == k], odds, rtol=1e-9)
        assert cross.models[k].cross_fit_ is None


def test_the_models_take_what_was_learned(train):
    learned = fitted(
        train, coupling="auto", variance="auto", lengthscale="auto", mean="auto",
        tuning_budget=4, flags=True, n_folds=2,
    )  # fmt: skip
    for one in learned.cross_fit_.models:
        for name in ("coupling_", "variance_", "lengthscale_", "mean_"):
            assert getattr(one, name) == getattr(learned, name)
        assert one.tuning_trace_ is None


def test_fewer_patients_than_folds_are_said(train, caplog):
    few = some(train, 3, 8)
    with caplog.at_level(logging.WARNING, logger="gpmil"):
        found = fitted(with_groups(few, list("abcdefghijk")), flags=True)
    assert len(found.cross_fit_.models) == 3
    assert "3 folds instead of 5: there are 3 patients with a negative bag" in caplog.text


# ------------------------------------------------------------------ slides


def test_calibrated_probabilities_by_hand(calibrated, plain, train, new):
    cross = calibrated.cross_fit_
    by_hand = SlideCalibrator.fit(cross.log_odds, train.labels)
    raw = log_odds(plain.log_proba_negative(new)[0])
    p = calibrated.predict_proba(new)
    assert np.allclose(p[:, 1], by_hand.predict(raw), rtol=1e-9)
    assert np.allclose(p.sum(1), 1)


def test_calibration_keeps_the_order_of_the_slides(calibrated, plain, new):
    raw = plain.decision_function(new)
    p = calibrated.predict_proba(new)[:, 1]
    order = np.argsort(raw)
    assert (np.diff(p[order]) > 0).all()
    assert not np.allclose(p, plain.predict_proba(new)[:, 1], atol=0.01)


def test_odds_classes_and_probabilities_agree(calibrated, new):
    p = calibrated.predict_proba(new)[:, 1]
    assert np.allclose(calibrated.decision_function(new), logit(p), rtol=1e-6)
    assert np.array_equal(calibrated.predict(new), (p > 0.5).astype(int))
    assert np.allclose(calibrated.predict_all(new).proba[:, 1], p, rtol=1e-12)


def test_log_proba_negative_stays_the_models_own(calibrated, plain, new):
    for ours, bare in zip(calibrated.log_proba_negative(new), plain.log_proba_negative(new)):
        assert np.array_equal(ours, bare)


def test_out_of_fold_probabilities_have_not_seen_the_fold(calibrated, train):
    cross = calibrated.cross_fit_
    p = cross.probability()
    for k in (1, 3):
        rest = cross.fold != k
        others = SlideCalibrator.fit(cross.log_odds[rest], train.labels[rest])
        assert np.allclose(p[~rest], others.predict(cross.log_odds[~rest]), rtol=1e-12)


def test_the_refer_rule_counts_patients_where_there_are_any(calibrated, train):
    cross = calibrated.cross_fit_
    rule = calibrated.refer_rule(0.3, delta=0.2)
    expected = ReferRule.fit(cross.probability(), train.labels, 0.3, 0.2, train.groups)
    assert rule == expected
    assert rule.unit == "patient"
    assert rule.total == len(np.unique(train.groups))
    assert (rule.alpha, rule.delta) == (0.3, 0.2)
    assert calibrated.refer_rule(0.3).delta == 0.1
    single = fitted(with_groups(train, None), coupling=0.0, calibrated=True, n_folds=3)
    assert single.refer_rule(0.3).unit == "slide"
    assert single.refer_rule(0.3).total == len(train)


def test_the_refer_rule_decides_about_new_slides(calibrated, new):
    rule = calibrated.refer_rule(0.4, delta=0.3)
    p = calibrated.predict_proba(new)[:, 1]
    assert rule.threshold is not None
    assert np.array_equal(rule.decide(p), np.maximum(p, 1 - p) >= rule.threshold)


def test_too_few_patients_to_accept_say_how_many_are_needed(calibrated, new, caplog):
    with caplog.at_level(logging.WARNING, logger="gpmil"):
        rule = calibrated.refer_rule(0.01)
    assert rule.threshold is None
    assert not rule.decide(calibrated.predict_proba(new)[:, 1]).any()
    assert rule.needed == 230  # .99^230 <= .1
    assert "takes 230 patients that are all right" in caplog.text


@pytest.mark.parametrize("share", [0.0, 1.0, 5, -0.2, float("nan")])
def test_error_rates_outside_0_and_1_are_refused(calibrated, share):
    with pytest.raises(ValueError, match="alpha must be a number between 0 and 1"):
        calibrated.refer_rule(share)
    with pytest.raises(ValueError, match="delta must be a number between 0 and 1"):
        calibrated.refer_rule(0.1, delta=share)


def test_the_refer_rule_needs_calibration(plain):
    with pytest.raises(ValueError, match="fit the model with calibrated=True"):
        plain.refer_rule(0.1)


# ------------------------------------------------------------------ intervals


@pytest.mark.parametrize("name", ["plain", "calibrated"])
def test_intervals_hold_the_probability(name, new, request):
    found = request.getfixturevalue(name)
    few = new[:5]
    low, high = found.predict_interval(few, level=0.999, n_draws=30)
    p = found.predict_proba(few)[:, 1]
    assert ((low >= 0) & (low <= high) & (high <= 1)).all()
    # P is the mean over u: between the lowest and the highest draw, up to the error of EP
    assert ((low - 0.01 <= p) & (p <= high + 0.01)).all()


def test_a_wider_level_holds_the_narrower_one(plain, new):
    wide = plain.predict_interval(new[:3], level=0.95, n_draws=20)
    narrow = plain.predict_interval(new[:3], level=0.5, n_draws=20)
    assert (wide[0] <= narrow[0]).all()
    assert (narrow[1] <= wide[1]).all()
    assert (wide[1] - wide[0] > narrow[1] - narrow[0]).all()


def test_more_training_slides_narrow_the_interval(train, new):
    # the same inducing points and scaling, so that nothing but the number of bags differs
    points = train.features[::29]
    common = {"inducing": points, "standardize": False, "coupling": 0.0, "lengthscale": 5.0}
    width = []
    for bags in (some(train, 4, 4), drawn(120)):
        low, high = fitted(bags, **common).predict_interval(new[:5], n_draws=30)
        width.append((high - low).mean())
    assert width[0] > 1.2 * width[1] > 0


def test_without_variance_the_interval_is_the_probability(train, new):
    # u is then known: all that is left is the noise of the patches, independent at coupling 0
    certain = fitted(train, variance=1e-10, mean=-1.7, coupling=0.0)
    low, high = certain.predict_interval(new, n_draws=5, base_rate=False)
    p = certain.predict_proba(new)[:, 1]
    assert np.allclose(high - low, 0, atol=1e-4)
    assert np.allclose(low, p, atol=1e-4)


@pytest.mark.parametrize(
    ("bad", "telling"),
    [({"level": 90}, "level: expected"), ({"n_draws": 1}, "n_draws must be a whole number >= 2")],
)
def test_odd_intervals_are_refused(plain, new, bad, telling):
    with pytest.raises(ValueError, match=telling):
        plain.predict_interval(new[:1], **bad)


# ------------------------------------------------------------------ bad cohorts


def test_too_few_bags_to_calibrate(train):
    with pytest.raises(ValueError, match=r"at least 5 negative and 5 positive.*found 4 and 9"):
        fitted(some(train, 4, 9), calibrated=True)


@pytest.mark.parametrize("asked", ["calibrated", "flags"])
def test_one_negative_bag(train, asked):
    with pytest.raises(ValueError, match=r"at least 2 negative bags.*found 1 among 10"):
        fitted(some(train, 1, 9), **{asked: True})


def test_no_negative_bag(train):
    with pytest.raises(ValueError, match="all 9 bags have label 1"):
        fitted(some(train, 0, 9), flags=True)


@pytest.mark.parametrize(("one", "name"), [(0, "negative"), (1, "positive")])
def test_all_bags_of_one_class_in_one_patient(train, one, name):
    few = some(train, 8, 8)
    groups = ["p7" if y == one else f"q{b}" for b, y in enumerate(few.labels)]
    telling = rf"{name} bags of at least two patients.*found 1: 'p7' has all 8 {name} bags"
    with pytest.raises(ValueError, match=telling):
        fitted(with_groups(few, groups), coupling=0.0, flags=True)
    fitted(with_groups(few, None), coupling=0.0, flags=True, n_folds=2)


@pytest.mark.parametrize(
    "bad", [{"flags": "yes"}, {"calibrated": 1}, {"n_folds": 1}, {"n_folds": 2.5}]
)
def test_odd_settings_are_refused(train, bad):
    with pytest.raises(ValueError, match=f"{next(iter(bad))} must be"):
        fitted(train, **bad)


def test_a_failed_fit_leaves_the_model_as_it_was(train, new):
    once = fitted(some(train, 8, 8), calibrated=True, n_folds=2)
    before = once.predict_proba(new)
    with pytest.raises(ValueError, match="at least 5"):
        once.fit(some(train, 4, 9))
    assert np.array_equal(once.predict_proba(new), before)


# ------------------------------------------------------------------ save and load


def everything(model, train, new):
    """Every number that calibration and flags add, as bytes."""
    found = {
        "proba": model.predict_proba(new),
        "odds": model.decision_function(new),
        "interval": np.stack(model.predict_interval(new[:2], n_draws=8)),
        "out of fold": model.cross_fit_.probability(),
    }
    for bags in (train[::3], new[:7]):
        for options in ({}, {"within": "cohort", "rate": 0.2}, {"weights": "bag"}):
            patches = model.predict_instances(bags, **options)
            key = f"{len(bags)} {options}"
            found |= {f"p {key}": patches.p_value, f"flagged {key}": patches.flagged}
    return {k: v.tobytes() for k, v in found.items()}


def test_a_saved_model_says_the_same(model, train, new, tmp_path):
    model.save(tmp_path / "model")
    again = gpmil.load(tmp_path / "model")
    assert everything(again, train, new) == everything(model, train, new)
    assert again.refer_rule(0.3) == model.refer_rule(0.3)
    assert again.get_params() | {"device": None} == model.get_params() | {"device": None}


@pytest.mark.parametrize("asked", [{"calibrated": True}, {"flags": True}])
def test_one_of_the_two_is_saved_alone(train, new, tmp_path, asked):
    one = fitted(train, n_folds=2, **asked)
    one.save(tmp_path / "model")
    again = gpmil.load(tmp_path / "model")
    assert np.array_equal(again.predict_proba(new), one.predict_proba(new))
    ours, theirs = (m.predict_instances(new).p_value for m in (one, again))
    assert (ours is None and theirs is None) or np.array_equal(ours, theirs)


def test_a_plain_model_still_loads(plain, new, tmp_path):
    plain.save(tmp_path / "model")
    card = json.loads((tmp_path / "model" / "model.json").read_text())
    assert card["folds"] == []
    again = gpmil.load(tmp_path / "model")
    assert again.cross_fit_ is None
    assert np.array_equal(again.predict_proba(new), plain.predict_proba(new))


def test_kernel_objects_and_own_inducing_points_are_saved_too(train, new, tmp_path):
    def kernel():
        return gpytorch.kernels.ScaleKernel(gpytorch.kernels.MaternKernel(nu=1.5))

    own = fitted(
        train, kernel=kernel(), inducing=train.features[::37], mean=-1.0, flags=True, n_folds=2
    )
    own.save(tmp_path / "model")
    again = gpmil.load(tmp_path / "model", kernel=kernel())
    ours, theirs = (m.predict_instances(new).p_value for m in (own, again))
    assert np.array_equal(ours, theirs)


# ------------------------------------------------------------------ scikit-learn


def test_the_same_seed_gives_the_same_bits(model, train, new):
    again = fitted(train, calibrated=True, flags=True, n_folds=4)
    assert everything(again, train, new) == everything(model, train, new)
    other = fitted(train, flags=True, n_folds=4, random_state=8)
    assert not np.array_equal(other.cross_fit_.fold, model.cross_fit_.fold)


def test_the_settings_are_those_of_a_scikit_learn_model(model):
    twin = clone(model)
    assert twin.get_params() == model.get_params()
    assert not hasattr(twin, "cross_fit_")
    for model_class in (VGPMILPR, VGPMILPRI):
        settings = model_class().get_params()
        assert (settings["calibrated"], settings["flags"], settings["n_folds"]) == (False, False, 5)


def test_a_grid_search_may_ask_for_calibration(train):
    search = GridSearchCV(
        VGPMILPRI(**SETTINGS, n_folds=2),
        {"calibrated": [False, True], "flags": [True]},
        scoring="neg_log_loss",
        cv=StratifiedGroupKFold(2),
    ).fit(train, train.labels, groups=train.groups)
    assert np.isfinite(search.cv_results_["mean_test_score"]).all()
    assert search.best_estimator_.predict_instances(train).flagged is not None


def test_cross_val_predict_takes_calibrated_models(train):
    p = cross_val_predict(
        VGPMILPRI(**SETTINGS, calibrated=True, n_folds=2),
        train,
        train.labels,
        cv=2,
        method="predict_proba",
    )
    assert p.shape == (len(train), 2)
    assert np.allclose(p.sum(1), 1)


def test_labels_given_apart_win_here_too(train, new):
    flipped = 1 - train.labels
    apart = VGPMILPRI(**SETTINGS, calibrated=True, flags=True, n_folds=2).fit(train, flipped)
    cross = apart.cross_fit_
    assert np.array_equal(cross.labels, flipped)
    # the reference is that of the bags called negative now
    assert set(cross.reference.bag) == set(cross.groups[flipped == 0])
    assert apart.cross_fit_.calibrator.slope >= 0
    assert (apart.predict_instances(new).p_value > 0).all()
