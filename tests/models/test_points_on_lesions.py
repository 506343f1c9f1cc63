"""inducing="lesions": points on lesions after a first fit, kept if bags left out gain by them."""

import numpy as np
import pytest
import torch
from oracles import lesion_points as naive
from synthetic import pri, small_cohort

import gpmil
from gpmil.distributed import Local, WholeCohort
from gpmil.files import persistence
from gpmil.models import learning, on_lesions

CPU = torch.device("cpu")
RARE = np.array([7.5, 2.0, 0.0])
LESIONS = {
    "variance": 9.0, "lengthscale": 2.0, "mean": -6.0, "coupling": 0.0, "standardize": False,
    "n_inducing": 4, "inducing": "lesions", "random_state": 1,
}  # fmt: skip


def two_in_sixty(seed, n_bags=40):
    """Bags of 60 patches, every other one with a lesion of two."""
    x = np.random.default_rng(seed).normal(size=(n_bags, 60, 3)) * [1.0, 1.4, 0.8]
    x[: n_bags // 2, 3:5] += [3.0, -2.5, 2.5]
    return gpmil.Bags.from_arrays(list(x), labels=np.arange(n_bags) < n_bags // 2)


def five_in_five_thousand():
    """100 bags of 50 patches, 20 with a large lesion; bag 20 has five patches of another one."""
    rng = np.random.default_rng(1)
    x = rng.normal(size=(100, 50, 3)) * [1.0, 1.4, 0.8]
    x[:20, :8] += [4.0, 0.0, 0.0]
    x[20, 11:16] = RARE + 0.2 * rng.normal(size=(5, 3))
    return gpmil.Bags.from_arrays(list(x), labels=np.arange(100) < 21)


@pytest.fixture(scope="module")
def bags():
    return two_in_sixty(3)


@pytest.fixture(scope="module")
def model(bags):
    return pri(**LESIONS).fit(bags)


@pytest.fixture(scope="module")
def plain(bags):
    return pri(**LESIONS | {"inducing": "kmeans"}).fit(bags)


def added(model):
    return model.inducing_points_[len(model.inducing_points_) - model.inducing_from_lesions_ :]


def chosen_points(first, bags):
    cohort = WholeCohort(bags, CPU, bags.labels)
    with torch.no_grad():
        first._problem(first._gp(CPU), cohort)
        return first._points_on_lesions(first._posterior(CPU), cohort, CPU)


def test_a_lesion_of_five_patches_in_five_thousand_gets_a_point():
    bags = five_in_five_thousand()
    given = {"variance": 30.0, "lengthscale": 4.0, "mean": -10.0, "n_inducing": 20}
    first = pri(**LESIONS | given | {"inducing": "kmeans"}).fit(bags)
    points = chosen_points(first, bags)
    assert np.linalg.norm(first.inducing_points_ - RARE, axis=1).min() > 2
    assert (np.linalg.norm(points - RARE, axis=1) < 1).sum() == 1
    assert len(points) == 4 == len(np.unique(points, axis=0))
    patches = bags.features[(bags.labels == 1)[bags.bag_index]]
    assert np.abs(points[:, None] - patches).max(2).min(1).max() < 1e-12


def test_points_that_help_are_kept(model, plain, bags):
    assert model.inducing_from_lesions_ == 1 and plain.inducing_from_lesions_ == 0
    np.testing.assert_array_equal(model.inducing_points_[:4], plain.inducing_points_)
    np.testing.assert_allclose(added(model), chosen_points(plain, bags), rtol=1e-12)
    gain = model.leave_one_bag_out(bags) - plain.leave_one_bag_out(bags)
    assert gain.mean() > 0.01 and on_lesions.rises(gain)
    assert model.loo_log_likelihood_ == pytest.approx(model.leave_one_bag_out(bags).mean())
    new = two_in_sixty(203)
    loss = [-np.log(m.predict_proba(new)[np.arange(40), new.labels]).mean() for m in (model, plain)]
    assert loss[0] < loss[1]


@pytest.mark.parametrize("settings", [{}, {"slide_effect": 0.8}, {"n_components": 3}])
def test_suspects_are_what_the_first_fit_says_of_positive_bags(settings):
    bags = small_cohort(seed=6, n_bags=9)
    first = pri(n_inducing=6, random_state=0, **settings).fit(bags)
    cohort = WholeCohort(bags, CPU, bags.labels)
    with torch.no_grad():
        first._problem(first._gp(CPU), cohort)
        found = cohort.suspects(first._posterior(CPU), first.mean_)
    rows = np.flatnonzero((bags.labels == 1)[bags.bag_index])
    x = first._inputs(bags.features[rows], CPU).numpy()
    Z = first._inputs(first.inducing_points_, CPU).numpy()
    v = np.diag(naive.residual(x, Z, "rbf", first.variance_, first.lengthscale_))
    p = first.predict_instances(bags).probability[rows]
    order = np.argsort(-p * v)
    np.testing.assert_allclose(found.x, x[order])
    np.testing.assert_allclose(found.p, p[order], rtol=1e-9)
    np.testing.assert_allclose(found.v, v[order], atol=1e-9)


def test_points_that_do_not_help_are_not_kept(caplog):
    """Labels that have nothing to do with the patches."""
    rng = np.random.default_rng(0)
    x = list(rng.normal(size=(40, 25, 3)))
    bags = gpmil.Bags.from_arrays(x, labels=rng.permutation(40) % 2)
    given = LESIONS | {"n_inducing": 6}
    caplog.set_level("INFO", "gpmil")
    model, plain = (pri(**given | {"inducing": w}).fit(bags) for w in ("lesions", "kmeans"))
    assert "not kept" in caplog.text and model.inducing_from_lesions_ == 0
    np.testing.assert_array_equal(model.inducing_points_, plain.inducing_points_)
    np.testing.assert_array_equal(model.predict_proba(bags), plain.predict_proba(bags))
    assert model.loo_log_likelihood_ == pytest.approx(model.leave_one_bag_out(bags).mean())
    assert plain.inducing_from_lesions_ == 0 and plain.loo_log_likelihood_ is None


def test_where_every_patch_is_a_point_none_is_added(caplog):
    caplog.set_level("INFO", "gpmil")
    bags = small_cohort(seed=1, n_bags=4, sizes=(2, 5))
    model = pri(n_inducing=60, inducing="lesions", random_state=0).fit(bags)
    assert model.inducing_from_lesions_ == 0 and "none is added" in caplog.text


@pytest.mark.parametrize(
    "settings",
    [
        {"slide_effect": 0.7},
        {"solver": "newton"},
        {"moments": "coupled", "coupling": 0.4},
        {"n_components": 2},
        {"store": "recompute"},
    ],
    ids=str,
)
def test_it_goes_with_what_else_can_be_set(settings, bags):
    bags = bags[::3]
    model = pri(**LESIONS | settings).fit(bags)
    again = pri(**LESIONS | settings).fit(bags)
    assert len(model.inducing_points_) == 4 + model.inducing_from_lesions_
    np.testing.assert_array_equal(model.inducing_points_, again.inducing_points_)
    np.testing.assert_array_equal(model.whitened_mean_, again.whitened_mean_)


def test_partitions_choose_the_same_points(model, bags):
    parts = [bags[:3], bags[3:25], bags[25:]]  # the last has no positive bag
    apart = pri(**LESIONS).fit(parts, client=Local)
    assert apart.inducing_from_lesions_ == model.inducing_from_lesions_
    np.testing.assert_allclose(apart.inducing_points_, model.inducing_points_, atol=1e-9)
    np.testing.assert_allclose(apart.predict_proba(bags), model.predict_proba(bags), atol=1e-8)


def test_of_large_bags_a_sample_decides(monkeypatch, model, bags):
    monkeypatch.setattr(learning, "MOST_INSTANCES", 30)
    found = pri(**LESIONS).fit(bags)
    np.testing.assert_array_equal(found.inducing_points_, model.inducing_points_)
    assert found.inducing_from_lesions_ > 0 and found.loo_log_likelihood_ is None


def test_settings_are_learned_before_the_points_are_added(bags):
    auto = {"mean": "auto", "tuning_budget": 2}
    found = pri(**LESIONS | auto).fit(bags[14:26])
    plain = pri(**LESIONS | auto | {"inducing": "kmeans"}).fit(bags[14:26])
    assert found.mean_ == plain.mean_
    assert found.loo_log_likelihood_ >= plain.loo_log_likelihood_


def test_folds_place_their_own_points(bags):
    found = pri(**LESIONS | {"flags": True, "n_folds": 2}).fit(bags[10:30])
    assert all(m.inducing == "lesions" for m in found.cross_fit_.models)


def test_saved_and_loaded(model, bags, tmp_path):
    model.save(tmp_path / "model")
    loaded = gpmil.load(tmp_path / "model")
    assert loaded.inducing == "lesions"
    assert loaded.inducing_from_lesions_ == model.inducing_from_lesions_
    np.testing.assert_array_equal(loaded.predict_proba(bags), model.predict_proba(bags))


@pytest.mark.parametrize("points", [None, 1, 6, -1, 0.5])
def test_of_earlier_versions_and_damaged(points, model, tmp_path):
    model.save(tmp_path / "model")
    arrays, card = persistence.read(tmp_path / "model")
    fitted = {k: v for k, v in card["fitted"].items() if k != "inducing_from_lesions_"}
    fitted |= {} if points is None else {"inducing_from_lesions_": points}
    settings = dict(card["settings"])
    if points is None:  # an earlier version had no slide context either
        for name in ("slide_context", "slide_context_lengthscale"):
            del settings[name]
    changed = {"fitted": fitted, "settings": settings}
    persistence.write(tmp_path / "again", arrays, card | changed)
    if points in (None, 1):
        assert gpmil.load(tmp_path / "again").inducing_from_lesions_ == (points or 0)
    else:
        with pytest.raises(ValueError, match="inducing_from_lesions_"):
            gpmil.load(tmp_path / "again")


def test_vgpmil_cannot_leave_bags_out_and_says_so(bags):
    with pytest.raises(ValueError, match=r"inducing.*kmeans.*lesions"):
        gpmil.VGPMIL(inducing="lesions").fit(bags)
