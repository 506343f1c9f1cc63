"""Patch probabilities from slide labels alone: their density, what is offered and what is kept."""

import numpy as np
import pytest
from oracles.unlike import falling_density
from synthetic import numbers_for

import gpmil
from gpmil.decide.unlike import LIKE, TOLERATED, Unlike, like_in_kinds


def mixture(n, share, seed, alike=lambda u: u):
    """p-values of positive slides: `share` of them small, the others as `alike` has them."""
    rng = np.random.default_rng(seed)
    odd = rng.random(n) < share
    return np.where(odd, rng.beta(0.2, 9, n), alike(rng.random(n))), odd


def test_the_density_is_the_least_concave_majorants_slope():
    p = np.round(mixture(140, 0.4, 3)[0], 2) + 0.01
    p = np.minimum(p, 1.0)
    found = Unlike.fit(p)
    at = np.array([0.004, 0.01, 0.013, 0.2, 0.37, 0.5, 0.81, 1.0])
    g = falling_density(p, at)
    place = np.searchsorted(found.edges, at) - 1
    np.testing.assert_allclose(found.density[place], g, atol=1e-12)
    assert np.diff(found.density).max() < 0
    assert np.sum(found.density * np.diff(found.edges)) == pytest.approx(1)


@pytest.mark.parametrize("share", [0.1, 0.6])
def test_it_is_calibrated_where_like_patches_are_like(share):
    p, odd = mixture(20_000, share, 7)
    found = Unlike.fit(p)
    assert found.supported and abs(found.share - share) < 0.03
    q = found.probability(p)
    for low, high in ((0, 0.3), (0.3, 0.8), (0.8, 1.01)):
        inside = (q >= low) & (q < high)
        assert abs(q[inside].mean() - odd[inside].mean()) < 0.05
    order = np.argsort(p)
    assert np.diff(q[order]).max() <= 0  # monotone
    assert found.probability(np.array([1.0]))[0] == 0


def test_it_is_not_offered_where_benign_tissue_of_positive_slides_is_unlike_too():
    found = Unlike.fit(mixture(5000, 0.3, 9, alike=lambda u: 1 - np.sqrt(u))[0])
    assert found.misfit > TOLERATED and not found.supported
    assert "no patch probabilities" in str(found)
    same = Unlike.fit(np.arange(1, 501) / 501)  # positive slides look like negative ones
    assert same.share < 0.01 and same.probability(np.array([0.001, 0.7])).max() < 0.01
    with pytest.raises(ValueError, match="at least 100 patches"):
        Unlike.fit(np.full(99, 0.2))


@pytest.mark.parametrize("shift, supported", [(0.0, True), (1.5, False)])
def test_it_is_not_offered_where_every_kind_of_tissue_differs_between_slides(shift, supported):
    """Three kinds; lesions are a kind of their own, or all of a positive slide scores higher."""
    rng = np.random.default_rng(4)
    n = 6000
    positive, kind = np.arange(n) % 2 == 1, rng.integers(0, 3, n)
    lesion = positive & (rng.random(n) < 0.5)
    kind[lesion] = np.where(rng.random(lesion.sum()) < 0.9, 0, kind[lesion])
    score = rng.normal(size=n) + 0.3 * kind + 4 * lesion + shift * positive
    p = np.array([(score[~positive] >= s).mean() for s in score])
    p = (1 + 3000 * p) / 3001
    same = like_in_kinds(p, positive, kind)
    assert (same >= LIKE) == supported
    found = Unlike.fit(p[positive], same)
    assert found.supported == supported
    assert f"{same:.2g} of them score as in negative slides" in str(found)
    assert like_in_kinds(p, positive, np.arange(n)) == 1  # no kind has enough patches


@pytest.fixture(scope="module")
def model_and_slides():
    rng = np.random.default_rng(5)
    truth = [np.arange(16) < 8 * (b % 2) for b in range(40)]
    bags = gpmil.Bags.from_arrays(
        [rng.normal(size=(16, 2)) + 3 * h[:, None] for h in truth], labels=np.arange(40) % 2
    )
    model = gpmil.VGPMILPR(**numbers_for(gpmil.VGPMILPR), n_inducing=15, flags=True, random_state=0)
    return model.fit(bags[:30]), bags[30:], np.concatenate(truth[30:])


def test_a_model_gives_it_times_the_probability_of_the_slide(model_and_slides, tmp_path):
    model, bags, odd = model_and_slides
    known, found = model.cross_fit_.unlike, model.predict_all(bags)
    assert known.supported and abs(known.share - 0.5) < 0.15
    alone = known.probability(found.instances.p_value)
    expected = alone * found.proba[bags.bag_index, 1]
    np.testing.assert_allclose(found.instances.unlike, expected, rtol=1e-12)
    assert found.instances.unlike[odd].mean() > 0.8 > 0.2 > found.instances.unlike[~odd].mean()
    assert model.predict_instances(bags).unlike is None  # it takes the slides as well
    model.save(tmp_path / "model")
    again = gpmil.load(tmp_path / "model")
    assert np.array_equal(again.predict_all(bags).instances.unlike, found.instances.unlike)
