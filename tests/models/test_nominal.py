"""NominalMIL: types in no order, by their definition from binary models; one type is VGPMILPRI."""

import numpy as np
import pytest
from scipy.special import ndtr

import gpmil
from gpmil import VGPMILPRI, NominalMIL

NUMBERS = {
    "variance": 9.0,
    "lengthscale": 2.0,
    "mean": -2.2,
    "coupling": 0.4,
    "slide_effect": 0.5,
    "standardize": False,
    "random_state": 0,
}
NAMES = ["none", "ductal", "lobular"]
CODES = np.arange(18) % 3


@pytest.fixture(scope="module")
def bags():
    rng = np.random.default_rng(4)
    place = np.array([[0.0, 0.0], [2.5, 0.3], [-0.4, 2.2]])
    arrays = [rng.normal(0, 0.8, (5, 2)) + place[k] * (np.arange(5) < 2)[:, None] for k in CODES]
    coords = [np.column_stack([np.arange(5), np.zeros(5)]) for _ in CODES]
    return gpmil.Bags.from_arrays(arrays, coords=coords, step=1)


@pytest.fixture(scope="module")
def model(bags):
    points = bags.features[::4].copy()
    return NominalMIL(**NUMBERS, classes=NAMES, inducing=points).fit(bags, np.array(NAMES)[CODES])


def alone(bags, y):
    return VGPMILPRI(**NUMBERS, inducing=bags.features[::4].copy()).fit(bags, y.astype(int))


def test_slides_are_normalised_jointly(model, bags):
    p = model.predict_proba(bags)
    positive = alone(bags, CODES > 0).predict_proba(bags)[:, 1]
    occurs = [alone(bags, k == CODES).predict_proba(bags)[:, 1] for k in (1, 2)]
    # exactly one of two independent types
    one = [occurs[0] * (1 - occurs[1]), occurs[1] * (1 - occurs[0])]
    expected = np.stack([1 - positive, *(positive * x / sum(one) for x in one)], axis=1)
    np.testing.assert_allclose(p, expected, rtol=1e-8, atol=1e-12)
    np.testing.assert_allclose(p.sum(1), 1, atol=1e-12)
    both = model.predict_all(bags)
    np.testing.assert_array_equal(both.class_proba, p)
    assert model.predict(bags).tolist() == [NAMES[k] for k in p.argmax(1)]
    assert model.score(bags, np.array(NAMES)[CODES]) == np.mean(p.argmax(1) == CODES) > 0.8


def test_instances_have_a_probability_per_class(model, bags):
    found = model.predict_instances(bags)
    p = found.class_probability
    np.testing.assert_allclose(p.sum(1), 1, atol=1e-12)
    np.testing.assert_allclose(p[:, 0], 1 - found.probability, atol=1e-12)
    each = [alone(bags, k == CODES).predict_instances(bags) for k in (1, 2)]
    odds = [ndtr(x.mean / x.std) / ndtr(-x.mean / x.std) for x in each]
    np.testing.assert_allclose(p[:, 1] / p[:, 2], odds[0] / odds[1], rtol=1e-7)
    table = found.to_frame()
    assert list(table.columns[-3:]) == ["P(none)", "P(ductal)", "P(lobular)"]
    own = slice(bags.offsets[3], bags.offsets[4])
    np.testing.assert_array_equal(found.split()[3].class_probability, p[own])


def test_one_type_is_the_binary_model(bags):
    y = (CODES > 0).astype(int)
    given = NUMBERS | {"inducing": bags.features[::4].copy()}
    binary, nominal = VGPMILPRI(**given).fit(bags, y), NominalMIL(**given).fit(bags, y)
    np.testing.assert_array_equal(nominal.predict_proba(bags), binary.predict_proba(bags))
    np.testing.assert_array_equal(nominal.predict(bags), binary.predict(bags))


def test_a_folder_keeps_every_process(model, bags, tmp_path):
    model.save(tmp_path / "model")
    again = gpmil.load(tmp_path / "model")
    assert again.classes_.tolist() == NAMES
    np.testing.assert_array_equal(again.predict_proba(bags), model.predict_proba(bags))
    np.testing.assert_array_equal(again.class_counts_, [6, 6, 6])
    left = model.leave_one_bag_out(bags, np.array(NAMES)[CODES])
    assert left.shape == (18,) and (left < 0).all()


@pytest.mark.parametrize(
    ("settings", "y", "words"),
    [
        ({}, np.array(["a", "b", "c"])[CODES], "the negative one first: classes="),
        ({}, CODES * 2, "classes must be the numbers 0 \\(negative\\), 1"),
        ({}, CODES[:4], "one class per bag, 18 in all"),
        ({}, np.where(CODES == 2, -1, CODES), "6 of 18 bags have no class"),
        ({"classes": NAMES}, CODES, "'0', '1' and '2' are not among|not among classes="),
        ({"classes": [0, 1, 2, 3]}, CODES, "no bag is of class '3'"),
        ({"classes": ["a", "A"]}, CODES, "different names"),
        ({"instance_labels": "use"}, CODES, "instance_labels='ignore' alone"),
    ],
)
def test_bad_input_is_refused_in_words(bags, settings, y, words):
    with pytest.raises(ValueError, match=words):
        NominalMIL(**NUMBERS, n_inducing=4, **settings).fit(bags, y)


def test_what_needs_two_classes_is_refused(model, bags):
    with pytest.raises(ValueError, match="instance_labels"):
        model.update(bags, CODES)
