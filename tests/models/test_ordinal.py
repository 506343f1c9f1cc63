"""OrdinalMIL against dense oracles and its limits: two grades are VGPMILPRI."""

import numpy as np
import pytest
from oracles import grades as oracle
from oracles import model as dense
from oracles import slide_effect as naive
from sklearn.base import clone
from sklearn.model_selection import StratifiedKFold, cross_val_predict

import gpmil
from gpmil import VGPMILPRI, OrdinalMIL
from gpmil.decide import cumulative
from gpmil.decide.calibration import SlideCalibrator
from gpmil.decide.grade_metrics import least_cost
from gpmil.models import learned_grades

VARIANCE, LENGTH, MEAN, COUPLING, TAU = 6.0, 2.0, -1.2, 0.7, 0.6
CUTS = (0.0, 1.1, 2.9)
NUMBERS = {
    "variance": VARIANCE,
    "lengthscale": LENGTH,
    "mean": MEAN,
    "coupling": COUPLING,
    "slide_effect": TAU,
    "standardize": False,
    "random_state": 0,
}
SIZES = (4, 1, 3, 5, 2, 4, 3, 1, 4, 3)
GRADES = np.array([0, 1, 2, 3, 1, 0, 2, 3, 1, 0])


@pytest.fixture(scope="module")
def bags():
    rng = np.random.default_rng(5)
    arrays = [rng.normal(0, 1.3, (n, 2)) + 0.6 * k for n, k in zip(SIZES, GRADES)]
    coords = [np.column_stack([np.arange(n) % 2, np.arange(n) // 2]) for n in SIZES]
    return gpmil.Bags.from_arrays(arrays, coords=coords, step=1)


@pytest.fixture(scope="module")
def inducing(bags):
    return bags.features[::5].copy()


@pytest.fixture(scope="module")
def model(bags, inducing):
    return OrdinalMIL(**NUMBERS, cut_points=CUTS, inducing=inducing).fit(bags, GRADES)


def parts(bags, Z):
    Kzz = dense.kernel(Z, Z, "rbf", VARIANCE, LENGTH)
    L = np.linalg.cholesky(Kzz + dense.JITTER * VARIANCE * np.eye(len(Z)))
    for bag in bags:
        K = dense.kernel(bag.features, bag.features, "rbf", VARIANCE, LENGTH)
        W = np.linalg.solve(L, dense.kernel(bag.features, Z, "rbf", VARIANCE, LENGTH).T).T
        yield K, W, dense.coupling_matrix(bag.adjacency.toarray(), COUPLING)


def test_the_posterior_is_that_of_dense_matrices(model, bags, inducing):
    _, W, Sigma = zip(*parts(bags, inducing))
    R = naive.precision(W, Sigma, TAU)
    np.testing.assert_allclose(model.whitened_precision_, R, rtol=1e-9, atol=1e-9)
    known = [(S @ w, np.sqrt(np.diag(S)), k) for w, S, k in zip(W, Sigma, GRADES)]
    slope = oracle.condition(model.whitened_mean_, known, MEAN, CUTS, TAU)
    # minus the Hessian is I or more: w is nearer to the maximum than the slope is long
    assert np.linalg.norm(slope) < 1e-6


def test_probabilities_are_those_of_explicit_orthants(model, bags, inducing):
    R_inverse, w = np.linalg.inv(model.whitened_precision_), model.whitened_mean_
    found = model.predict_proba(bags)
    assert found.shape == (len(bags), 4)
    np.testing.assert_allclose(found.sum(1), 1, atol=1e-12)
    some = [b for b, n in enumerate(SIZES) if n <= 3]
    for p, (K, W, S) in zip(found[some], parts(bags[some], inducing)):
        V = K - W @ W.T + W @ R_inverse @ W.T
        mu, cov = MEAN + S @ W @ w, S + S @ V @ S + TAU**2
        np.testing.assert_allclose(p, oracle.probabilities(mu, cov, CUTS), atol=1e-6)


def test_instances_have_a_probability_per_grade(model, bags):
    found = model.predict_instances(bags)
    alone = np.flatnonzero(np.array(SIZES) == 1)
    rows = bags.offsets[alone]
    p = model.predict_proba(bags)
    # of a slide with one patch, slide and patch have the same grade
    np.testing.assert_allclose(found.grade_probability[rows], p[alone], atol=1e-9)
    np.testing.assert_allclose(found.probability, 1 - found.grade_probability[:, 0], atol=1e-12)
    both = model.predict_all(bags)
    np.testing.assert_array_equal(both.class_proba, p)
    np.testing.assert_allclose(both.proba[:, 1], p[:, 1:].sum(1), atol=1e-12)
    np.testing.assert_allclose(both.instances.expected_grade, found.expected_grade)
    table = found.to_frame()
    assert list(table.columns[-5:]) == ["P(0)", "P(1)", "P(2)", "P(3)", "expected_grade"]
    last = found.split()[3]
    own = slice(bags.offsets[3], bags.offsets[4])
    np.testing.assert_array_equal(last.grade_probability, found.grade_probability[own])
    np.testing.assert_allclose(last.expected_grade, table["expected_grade"][own])


@pytest.mark.parametrize("tau", [0.0, TAU])
def test_two_grades_are_the_binary_model(bags, inducing, tau):
    given, y = NUMBERS | {"slide_effect": tau, "inducing": inducing}, (GRADES > 0).astype(int)
    binary = VGPMILPRI(**given).fit(bags, y)
    for cuts in ("auto", [0]):
        ordinal = OrdinalMIL(**given, cut_points=cuts).fit(bags, y)
        for name in ("posterior_mean_", "posterior_covariance_"):
            ours, theirs = getattr(ordinal, name), getattr(binary, name)
            np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-10)
        ours, theirs = ordinal.predict_proba(bags), binary.predict_proba(bags)
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-10)
        ours, theirs = (m.leave_one_bag_out(bags, y) for m in (ordinal, binary))
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-10)
        np.testing.assert_array_equal(ordinal.predict(bags), binary.predict(bags))


def test_a_bag_is_left_out_by_one_newton_step(model, bags, inducing):
    K, W, S = zip(*parts(bags, inducing))
    H, sigma = [s @ w for s, w in zip(S, W)], [np.sqrt(np.diag(s)) for s in S]
    w, J = model.whitened_mean_, np.eye(len(inducing))
    at = [(MEAN + h @ w, s, k, CUTS, TAU) for h, s, k in zip(H, sigma, GRADES)]
    bent = [h.T @ -oracle.hessian(*bag) @ h for h, bag in zip(H, at)]
    J = J + sum(bent)
    found = model.leave_one_bag_out(bags, GRADES)
    for b in (0, 4, 7):
        rest = [k for k in range(len(bags)) if k != b]
        step = np.linalg.solve(J - bent[b], H[b].T @ oracle.gamma(*at[b]))
        R = naive.precision([W[k] for k in rest], [S[k] for k in rest], TAU)
        V = K[b] - W[b] @ W[b].T + W[b] @ np.linalg.solve(R, W[b].T)
        p = oracle.probabilities(MEAN + H[b] @ (w - step), S[b] + S[b] @ V @ S[b] + TAU**2, CUTS)[
            GRADES[b]
        ]
        assert found[b] == pytest.approx(np.log(p), abs=5e-3)
    with pytest.raises(ValueError, match="not those the model was fitted with"):
        model.leave_one_bag_out(bags, GRADES[::-1])


def test_names_costs_and_a_folder(model, bags, inducing, tmp_path):
    names = ["benign", "3", "4", "5"]
    given = NUMBERS | {"cut_points": CUTS, "inducing": inducing, "cost": "mode"}
    words = np.array(names)[GRADES]
    named = OrdinalMIL(**given, grades=names).fit(bags, words)
    p = named.predict_proba(bags)
    np.testing.assert_array_equal(p, model.predict_proba(bags))
    assert named.predict(bags).tolist() == [names[k] for k in p.argmax(1)]
    assert named.score(bags, words) == np.mean(p.argmax(1) == GRADES)
    # least expected quadratic cost: the grade nearest to the mean
    mean = p @ np.arange(4)
    np.testing.assert_array_equal(model.predict(bags), np.abs(mean[:, None] - range(4)).argmin(1))
    named.save(tmp_path / "model")
    again = gpmil.load(tmp_path / "model")
    assert again.classes_.tolist() == names and again.grades == names
    np.testing.assert_array_equal(again.predict_proba(bags), p)
    np.testing.assert_array_equal(again.class_counts_, [3, 3, 2, 2])


def test_scikit_learn_splits_grades(bags, inducing):
    given = NUMBERS | {"cut_points": (0.0, 1.1), "inducing": inducing}
    found = cross_val_predict(
        clone(OrdinalMIL(**given)), bags, np.minimum(GRADES, 2), cv=StratifiedKFold(3),
        method="predict_proba",
    )  # fmt: skip
    assert found.shape == (len(bags), 3)


def test_areas_are_averages_over_all_patches_of_a_slide(model, bags):
    found, patches = model.predict_areas(bags, n_draws=4000), model.predict_instances(bags)
    expected = np.add.reduceat(patches.grade_probability, bags.offsets[:-1]) / bags.sizes[:, None]
    np.testing.assert_allclose(found.share, expected, atol=0.03)
    np.testing.assert_allclose(found.share.sum(1), 1)
    assert ((found.low <= found.high) & (found.low >= 0)).all()
    # one patch has one grade
    alone = found.low[np.array(SIZES) == 1]
    assert np.isin(alone, (0, 1)).all()
    first, second = found.patterns()
    table = found.to_frame()
    assert table["first"].tolist() == first.tolist() and len(table) == len(bags)
    above = found.share[:, 1:]
    sure = above.sum(1) * bags.sizes > 0.5
    np.testing.assert_array_equal(first[sure], above[sure].argmax(1) + 1)
    assert (second[first == 0] == 0).all()
    with pytest.raises(ValueError, match="level must be a number between 0 and 1"):
        model.predict_areas(bags, level=90)


def test_marks_are_against_slides_of_the_lowest_grade(bags, inducing, tmp_path):
    given = NUMBERS | {"cut_points": CUTS, "inducing": inducing, "flags": True, "n_folds": 2}
    flagged = OrdinalMIL(**given).fit(bags, GRADES)
    found = flagged.predict_instances(bags)
    assert ((found.p_value > 0) & (found.p_value <= 1)).all()
    assert found.grade_probability.shape == (30, 4)
    flagged.save(tmp_path / "model")
    again = gpmil.load(tmp_path / "model").predict_instances(bags)
    np.testing.assert_array_equal(again.p_value, found.p_value)


# --- Cut points that are learned ------------------------------------------------------------------


@pytest.fixture(scope="module")
def drawn():
    """Slides of one patch: ordinal regression, m = 2 x - 1 + noise."""
    rng = np.random.default_rng(3)
    x = rng.normal(0, 1, (150, 1))
    m = 2 * x[:, 0] - 1 + rng.normal(size=150)
    bags = gpmil.Bags.from_arrays([row[None] for row in x], graph=None)
    return bags, (m[:, None] > [0.0, 1.0, 2.5]).sum(1)


LINEAR = {"kernel": "linear", "lengthscale": 1.0, "standardize": False, "random_state": 0}


def test_cut_points_are_found_again(drawn, monkeypatch):
    bags, y = drawn
    points = np.array([[1.0], [-1.5]])
    given = LINEAR | {"variance": 4.0, "mean": -1.0, "inducing": points}
    model = OrdinalMIL(**given).fit(bags, y)
    assert model.cut_points_[0] == 0
    np.testing.assert_allclose(model.cut_points_[1:], [1.0, 2.5], rtol=0.25)
    # no cut points near these predict grades left out better
    best = model.leave_one_bag_out(bags, y).mean()
    assert best == pytest.approx(model.loo_log_likelihood_, abs=5e-3)
    for factor in (0.8, 1.25):
        other = OrdinalMIL(**given, cut_points=factor * model.cut_points_).fit(bags, y)
        assert other.leave_one_bag_out(bags, y).mean() < best
    # from some of the bags
    monkeypatch.setattr(learned_grades, "MOST_FOR_CUTS", 60)
    few = OrdinalMIL(**given).fit(bags, y)
    assert not np.array_equal(few.cut_points_, model.cut_points_)
    np.testing.assert_allclose(few.cut_points_[1:], model.cut_points_[1:], rtol=0.5)


def test_settings_are_learned_with_them(drawn):
    bags, y = drawn
    bags, y = bags[:50], np.minimum(y[:50], 2)
    given = LINEAR | {"mean": -1.0, "coupling": 0, "slide_effect": 0, "n_inducing": 2}
    learned = OrdinalMIL(**given, tuning_budget=6).fit(bags, y)
    assert len(learned.cut_points_) == 2 and learned.tuning_trace_
    guess = np.bincount(y) / len(y)
    assert learned.loo_log_likelihood_ > (guess * np.log(guess)).sum() + 0.2


# --- Bad input ------------------------------------------------------------------------------------

FOUR = ["benign", "3", "4", "5"]


@pytest.mark.parametrize(
    ("settings", "y", "words"),
    [
        ({}, np.ones(10, int), "all 10 bags have grade '1'|without a gap"),
        ({}, [0, 2, 5, 0, 2, 5, 0, 2, 5, 0], "without a gap, found 0, 2 and 5. Give the grades"),
        ({}, ["a", "b"] * 5, "grades=\\['benign', '3', '4', '5'\\]"),
        ({}, [0, -1] * 5, "5 of 10 bags have no grade \\('bag1', 'bag3'"),
        ({}, [0, 1, 2], "one grade per bag, 10 in all"),
        ({}, None, "10 of 10 bags have no grade"),
        ({"grades": FOUR}, ["benign", "6"] * 5, "'6' is not among grades="),
        ({"grades": FOUR}, ["benign", "3"] * 5, "no bag has the highest grade '5'"),
        ({"grades": FOUR}, ["4", "5"] * 5, "no bag has the lowest grade 'benign'"),
        ({"grades": ["a"]}, ["a"] * 10, "expected 2 to 8, got 1"),
        ({"grades": ["a", "A "]}, ["a"] * 10, "different names"),
        ({"grades": "abc"}, GRADES, "a list of names, the lowest first"),
        ({}, np.arange(10), "expected 2 to 8 grades, found 10. Join some"),
        ({}, GRADES, "needs 3 bags of every grade, 12 in all; found {0: 3, 1: 3, 2: 2, 3: 2}"),
        ({"cut_points": [0, 2]}, GRADES, "4 grades need 3 cut points, got 2"),
        ({"cut_points": [1, 2, 3]}, GRADES, "rising numbers, the first one 0"),
        ({"cut_points": [0, 2, 2]}, GRADES, "rising numbers"),
        ({"cut_points": "three"}, GRADES, "rising numbers"),
        ({"cost": "linear"}, GRADES, "cost must be one of"),
        ({"solver": "newton"}, GRADES, "knows solver='direct' alone"),
        ({"cost": "kappa"}, GRADES, "OrdinalMIL with calibrated=True"),
        ({"inducing": "lesions"}, GRADES, "inducing must be one of"),
    ],
)
def test_bad_input_is_refused_in_words(bags, settings, y, words):
    with pytest.raises(ValueError, match=words):
        OrdinalMIL(**(NUMBERS | {"n_inducing": 4} | settings)).fit(bags, y)


def test_a_grade_between_others_may_be_missing(bags, inducing):
    y = np.where(GRADES == 2, 3, GRADES)
    model = OrdinalMIL(**NUMBERS, grades=range(4), cut_points=CUTS, inducing=inducing)
    with pytest.raises(ValueError, match="a list of names"):
        model.fit(bags, y)
    with pytest.warns(UserWarning, match="no bag has grade '2', which lies between others"):
        found = model.set_params(grades=[0, 1, 2, 3]).fit(bags, y)
    assert found.predict_proba(bags).shape == (10, 4)


def test_what_needs_two_classes_is_refused(model, bags):
    with pytest.raises(ValueError, match="left out bag by bag"):
        model.leave_one_patient_out(bags, GRADES)
    with pytest.raises(ValueError, match="instance_labels"):
        model.update(bags, GRADES)


# --- Calibrated grades ----------------------------------------------------------------------------


def test_every_threshold_is_calibrated_by_models_that_have_not_seen_the_bag(drawn, tmp_path):
    bags, y = drawn[0][:70], drawn[1][:70]
    given = LINEAR | {"variance": 4.0, "mean": -1.0, "slide_effect": 0.0, "coupling": 0}
    given |= {"inducing": np.array([[1.0], [-1.5]]), "cut_points": (0.0, 1.0, 2.5)}
    kwargs = {"calibrated": True, "cost": "kappa", "n_folds": 2}
    model = OrdinalMIL(**given, **kwargs).fit(bags, y)
    assert model.calibration_.shape == (3, 2) and (model.calibration_[:, 0] > 0).all()
    assert 0.3 < model.expected_kappa_[0] < 1
    # the same by hand, from the models of the folds
    fold, log_p = model.cross_fit_.fold, np.empty((len(y), 3))
    for k in range(2):
        own = OrdinalMIL(**given, grades=[0, 1, 2, 3]).fit(bags[fold != k], y[fold != k])
        log_p[fold == k] = own.log_proba_at_most(bags[fold == k])[0]
    odds = np.log(np.maximum(-np.expm1(log_p), 1e-300)) - log_p
    plain = OrdinalMIL(**given).fit(bags, y).log_proba_at_most(bags)[0]
    for k in range(3):
        one = SlideCalibrator.fit(odds[:, k], (y > k).astype(int))
        np.testing.assert_allclose(model.calibration_[k], [one.slope, one.intercept], rtol=1e-6)
        if k == 0:
            expected = one.predict(np.log(np.maximum(-np.expm1(plain[:, 0]), 1e-300)) - plain[:, 0])
            found = 1 - model.predict_proba(bags)[:, 0]
            np.testing.assert_allclose(found, expected, rtol=1e-6)
    p = model.predict_proba(bags)
    np.testing.assert_allclose(p.sum(1), 1, atol=1e-9)
    # calls are spread further than those of least quadratic cost
    assert model.predict(bags).std() > least_cost(p).std()
    model.save(tmp_path / "model")
    again = gpmil.load(tmp_path / "model")
    np.testing.assert_array_equal(again.predict_proba(bags), p)
    np.testing.assert_array_equal(again.predict(bags), model.predict(bags))


def test_areas_are_expected_patches_and_are_kept(drawn, tmp_path):
    bags, y = drawn[0][:70], drawn[1][:70]
    given = LINEAR | {"variance": 4.0, "mean": -1.0, "slide_effect": 0.0, "coupling": 0}
    given |= {"inducing": np.array([[1.0], [-1.5]]), "cut_points": (0.0, 1.0, 2.5)}
    model = OrdinalMIL(**given, calibrated=True, n_folds=2).fit(bags, y)
    log_p, _, above = model._cut(bags)
    per_patch = model.predict_instances(bags).grade_probability
    for k in (1, 2, 3):
        own = [part[:, k:].sum() for part in bags.split(per_patch)]
        np.testing.assert_allclose(above[:, k - 1], own, rtol=1e-9)
    odds = np.log(-np.expm1(log_p)) - log_p
    model.calibration_ = cumulative.by_area(odds, above, y)
    expected = np.exp(cumulative.calibrated(odds, above, model.calibration_))
    p = model.predict_proba(bags)
    np.testing.assert_allclose(p[:, :3].cumsum(1), expected, atol=1e-9)
    model.save(tmp_path / "model")
    np.testing.assert_array_equal(gpmil.load(tmp_path / "model").predict_proba(bags), p)
    model.calibration_ = model.calibration_[:, :4]
    model.save(tmp_path / "odd")
    with pytest.raises(ValueError, match="calibration_: expected 2 or 5 columns"):
        gpmil.load(tmp_path / "odd")


def test_two_calibrated_grades_are_those_of_two_classes():
    bags = gpmil.simulate.cohort(30, n_features=12, mean_size=16, seed=3)
    given = NUMBERS | {"lengthscale": 5.0, "calibrated": True, "n_inducing": 20, "n_folds": 2}
    grades = OrdinalMIL(**given).fit(bags, bags.labels)
    two = VGPMILPRI(**given).fit(bags)
    np.testing.assert_allclose(grades.predict_proba(bags), two.predict_proba(bags), rtol=1e-10)
    assert grades.calibration_.shape == (1, 2)
