"""Novelty: against its naive twin; far slides are told, refused, and own ones are not."""

import copy

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from oracles import model as oracle
from oracles import novelty as naive
from synthetic import pri, small_cohort

import gpmil
from gpmil.decide.refer import ReferRule
from gpmil.files import persistence
from gpmil.models.with_novelty import SEEN
from gpmil.process import novelty, novelty_at_once
from gpmil.runs.predict import PredictionOptions, predict

VARIANCE, LENGTH = 2.3, 1.8


@pytest.fixture(scope="module")
def cohort():
    bags = small_cohort(seed=4, n_bags=24, sizes=(3, 9))
    rows = bags.split(bags.features)
    patients = [f"patient {b // 2}" for b in range(12)] + [f"other {b}" for b in range(12)]
    return gpmil.Bags.from_arrays(
        rows, bags.labels, coords=bags.split(bags.coords), step=7.0, groups=patients
    )


@pytest.fixture(scope="module")
def inducing(cohort):
    return np.random.default_rng(5).normal(size=(6, cohort.n_features))


@pytest.fixture(scope="module")
def model(cohort, inducing):
    numbers = {"variance": VARIANCE, "lengthscale": LENGTH, "mean": -0.4, "coupling": 0.7}
    return pri(**numbers, inducing=inducing, standardize=False, calibrated=True).fit(cohort)


@pytest.fixture(scope="module")
def far(cohort):
    """The same slides elsewhere: a shift, and (odd ones) a narrow cluster in the middle of all."""
    middle = cohort.features.mean(0)
    rows = [
        middle + 0.02 * x if b % 2 else x + np.array([9.0, -4.0, 3.0, 6.0])
        for b, x in enumerate(cohort.split(cohort.features))
    ]
    return gpmil.Bags.from_arrays(rows, coords=cohort.split(cohort.coords), step=7.0)


def whitened(x, inducing):
    Kzz = oracle.kernel(inducing, inducing, "rbf", VARIANCE, LENGTH)
    L = np.linalg.cholesky(Kzz + oracle.JITTER * VARIANCE * np.eye(len(inducing)))
    return np.linalg.solve(L, oracle.kernel(x, inducing, "rbf", VARIANCE, LENGTH).T).T


def test_training_slides_are_judged_without_their_patient(model, cohort, inducing):
    W = cohort.split(whitened(cohort.features, inducing))
    scores, v = naive.scores(W, VARIANCE, cohort.groups)
    np.testing.assert_allclose(model.novelty_scores_, scores, rtol=1e-6)
    np.testing.assert_allclose(model.novelty_patches_, np.quantile(v, np.linspace(0, 1, 101)))


@pytest.mark.parametrize("k", [3, 40])  # fewer rows left out than columns, and more
def test_patches_left_out_of_the_eigenbasis(k):
    rng = np.random.default_rng(k)
    W = rng.normal(size=(90, 8)) @ rng.normal(size=(8, 8)) + 0.3
    own, rest = W[:k], W[k:]
    every = novelty.Turned.of(novelty.sums(torch.from_numpy(W)))
    V = own @ every.Q
    others = every.without(float(k), V.sum(0), V)
    for rows in (V, V.copy()):  # as the rows that are left out, and as any others
        e = others.explained(np.ones(k), rows)
        np.testing.assert_allclose(e, naive.explained(1.0, own, rest), rtol=1e-9)
    Y = others.n**0.5 * np.hstack(others.metric.roots(W @ every.Q))
    np.testing.assert_allclose(Y @ Y.T, W @ naive.metric(rest) @ W.T, rtol=1e-8, atol=1e-8)
    Y = others.n**0.5 * np.hstack(others.metric.roots(V))
    np.testing.assert_allclose(Y @ Y.T, own @ naive.metric(rest) @ own.T, rtol=1e-8, atol=1e-8)


def test_new_slides_against_the_naive_twin(model, cohort, far, inducing):
    seen = whitened(cohort.features, inducing)
    scores, v = naive.scores(cohort.split(seen), VARIANCE, cohort.groups)
    others, A = cohort.split(seen), naive.metric(seen)
    spreads = [naive.spread(w, A) for w in others]
    limit, edges = np.quantile(v, 0.99), [naive.fence(a, c) for a, c in zip(scores.T, (1.5, 3))]
    found = model.predict_all(far)
    for b, W in enumerate(far.split(whitened(far.features, inducing))):
        e = naive.explained(VARIANCE, W, seen)
        own = found.instances.split()[b].novelty
        np.testing.assert_allclose(own, -np.log(e) / limit, rtol=1e-6)
        d = naive.distance(W, others, A, spreads)
        np.testing.assert_allclose(
            found.novelty[b], max(d / edges[0], -np.log(e.mean()) / edges[1]), rtol=1e-6
        )
    np.testing.assert_array_equal(model.predict_novelty(far), found.novelty)
    np.testing.assert_array_equal(model.predict_instances(far).novelty, found.instances.novelty)


def test_far_slides_are_beyond_and_own_ones_are_not(model, cohort, far):
    assert (model.predict_novelty(cohort) > 1).mean() <= 0.1
    assert (model.predict_novelty(far)[::2] > 1).all()  # the shifted ones


def test_vgpmil_knows_what_it_has_seen(model, cohort, far, inducing, tmp_path, monkeypatch):
    """By the same kernel and points the same numbers: the likelihood does not matter."""
    settings = {"variance": VARIANCE, "lengthscale": LENGTH, "inducing": inducing}
    other = gpmil.VGPMIL(**settings, standardize=False, max_iter=3, random_state=0).fit(cohort)
    looks, plain = [], gpmil.VGPMIL._novelty
    monkeypatch.setattr(
        gpmil.VGPMIL, "_novelty", lambda m, bags: looks.append(bags) or plain(m, bags)
    )
    found = other.predict_all(far)
    assert len(looks) == 1
    np.testing.assert_allclose(found.novelty, model.predict_novelty(far), rtol=1e-6)
    own = model.predict_instances(far).novelty
    np.testing.assert_allclose(found.instances.novelty, own, rtol=1e-6)
    other.save(tmp_path / "vgpmil")
    again = gpmil.load(tmp_path / "vgpmil").predict_novelty(far)
    np.testing.assert_array_equal(again, found.novelty)


def test_what_slides_are_not_judged_by(model, cohort):
    """Neither the order of the patches nor the other slides matter; a large slide is sampled."""
    one = cohort[3]
    turned = gpmil.Bags.from_arrays([one.features[::-1].copy()])
    assert model.predict_novelty(turned) == pytest.approx(model.predict_novelty(cohort)[3])
    assert len(novelty.evenly(1000, novelty.MOST_PATCHES)) == novelty.MOST_PATCHES


def test_a_slide_beyond_is_never_accepted():
    rule = ReferRule(0.1, 0.1, threshold=0.8, accepted=30, errors=0, total=40)
    p, far = np.array([0.003, 0.003, 0.99, 0.6, 0.97]), np.array([0.4, 1.7, np.nan, 0.2, 1.0])
    assert rule.decide(p).tolist() == [True, True, True, False, True]
    assert rule.decide(p, far).tolist() == [True, False, True, False, True]


def test_tables_of_a_run_have_it(model, far):
    rule = ReferRule(0.1, 0.1, threshold=0.5, accepted=30, errors=0, total=40)
    rows, patches = predict(model, far, PredictionOptions(), rule)
    beyond = rows["novelty"] > 1
    assert beyond.any() and (rows["decision"] == np.where(beyond, "refer", "accept")).all()
    assert all("novelty" in table for table in patches)


def test_saved_and_loaded(model, far, tmp_path):
    model.save(tmp_path / "model")
    again = gpmil.load(tmp_path / "model")
    np.testing.assert_array_equal(again.predict_novelty(far), model.predict_novelty(far))
    assert model.cross_fit_.models[0].novelty_slides_ is None  # nobody asks them


def test_a_model_of_an_earlier_version_says_that_it_is_not_known(model, far, tmp_path, caplog):
    arrays, card = model._saved()
    persistence.write(tmp_path / "old", {k: a for k, a in arrays.items() if k not in SEEN}, card)
    old = gpmil.load(tmp_path / "old")
    found = old.predict_all(far)
    assert np.isnan(found.novelty).all() and found.instances.novelty is None
    assert "novelty is not known" in caplog.text
    np.testing.assert_array_equal(found.proba, model.predict_proba(far))


def test_a_part_of_it_is_damage(model, tmp_path):
    arrays, card = model._saved()
    del arrays["novelty_slides_"]
    persistence.write(tmp_path / "odd", arrays, card)
    with pytest.raises(ValueError, match="novelty_slides_"):
        gpmil.load(tmp_path / "odd")


def test_too_few_slides_or_patients_tell_nothing(cohort, model):
    assert not novelty.enough(np.arange(9))
    assert not novelty.enough(np.arange(12) % 2)
    assert novelty.enough(np.arange(12) % 3)
    few = model.with_settings_fixed().set_params(calibrated=False).fit(cohort[:9])
    assert np.isnan(few.predict_novelty(cohort)).all()


def test_slides_in_several_places_tell_the_same(model, cohort):
    """Also of patients whose slides lie apart, and where a place has none of those looked at."""
    gp = model._gp(torch.device("cpu"))
    slides = [torch.tensor(x) for x in cohort.split(cohort.features)]
    patient = np.unique(cohort.groups, return_inverse=True)[1]
    places = [
        novelty.Looked.at(a, gp, torch.cat([gp.inducing[:0], *slides[a:b]]), cohort.sizes[a:b])
        for a, b in ((0, 3), (3, 3), (3, 10), (10, 24))
    ]

    def ask(what, *arguments):
        return [getattr(place, what)(*arguments) for place in places]

    seen = novelty.Seen.learn(ask, patient)
    for name, part in SEEN.items():
        np.testing.assert_allclose(np.asarray(getattr(seen, part)), getattr(model, name), rtol=1e-7)


def test_labels_of_patches_do_not_change_what_was_seen(model, cohort, far):
    """Labelled patches become inducing points; novelty is measured by those that stay."""
    known = np.full(cohort.n_instances, -1)
    first = cohort.offsets[np.flatnonzero(cohort.labels == 1)[:3]]
    known[first] = 1
    taught = copy.deepcopy(model).update(cohort.with_instance_labels(known), cross_fit=False)
    assert len(taught.inducing_points_) == len(model.inducing_points_) + 3
    np.testing.assert_allclose(
        taught.predict_all(far).novelty, model.predict_novelty(far), rtol=1e-9
    )


def test_a_negative_spread_is_damage(model, tmp_path):
    arrays, card = model._saved()
    arrays["novelty_spreads_"] = -arrays["novelty_spreads_"]
    persistence.write(tmp_path / "odd", arrays, card)
    with pytest.raises(ValueError, match="novelty_"):
        gpmil.load(tmp_path / "odd")


def test_means_beyond_the_covariance_are_damage(model, tmp_path):
    arrays, card = model._saved()
    arrays["novelty_mean_"] = 1e6 * (1 + np.arange(len(arrays["novelty_mean_"])))
    persistence.write(tmp_path / "odd", arrays, card)
    with pytest.raises(ValueError, match="novelty_mean_"):
        gpmil.load(tmp_path / "odd")


def test_more_of_it_than_inducing_points_is_damage(model, tmp_path):
    arrays, card = model._saved()
    many = len(model.inducing_points_) + 1
    arrays["novelty_precision_"] = np.eye(many)
    arrays["novelty_mean_"] = np.zeros(many)
    arrays["novelty_slides_"] = np.zeros((len(arrays["novelty_slides_"]), many))
    persistence.write(tmp_path / "odd", arrays, card)
    with pytest.raises(ValueError, match="novelty_mean_: expected at most 6"):
        gpmil.load(tmp_path / "odd")


def test_all_patients_at_once_as_one_after_the_other():
    rng = np.random.default_rng(8)
    patient = np.array([0, 0, 1, 2, 3, 3, 4, 5, 6, 7, 8, 3])  # one has slides that lie apart
    sizes = rng.integers(3, 9, len(patient))
    W = torch.from_numpy(rng.normal(size=(sizes.sum(), 40)) * np.linspace(1.3, 0.05, 40) + 0.2)
    own = W.square().sum(1) * torch.from_numpy(rng.uniform(1.05, 1.6, len(W)))
    looked = novelty.Looked.seen(0, W, own, sizes)
    one_by_one = novelty.Seen.learn(lambda name, *args: [getattr(looked, name)(*args)], patient)
    at_once = novelty_at_once.learned(looked, patient)
    for name in SEEN.values():
        a, b = (np.asarray(getattr(seen, name)) for seen in (one_by_one, at_once))
        np.testing.assert_allclose(b, a, rtol=1e-10, atol=1e-12 * np.abs(a).max())
    assert not novelty_at_once.serves(looked, patient)  # on a CPU one after the other is quicker


@given(sizes=st.lists(st.integers(1, 700), max_size=6), most=st.integers(2, 90))
def test_patches_of_all_slides_at_once_are_those_of_each(sizes, most):
    starts = 3 + np.concatenate([[0], np.cumsum(sizes)[:-1]]) if sizes else np.zeros(0)
    own = [start + novelty.evenly(n, most) for start, n in zip(starts, sizes)]
    rows, counts = novelty.evenly_of_each(starts.astype(int), np.array(sizes, int), most)
    assert counts.tolist() == [len(one) for one in own]
    assert rows.tolist() == [int(i) for one in own for i in one]
