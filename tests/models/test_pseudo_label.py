"""PS-MIL: the pseudo labels against loops, limits, seeds, files, errors."""

import copy
import itertools
import json
import logging
import pickle

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles.pseudo_label import balanced_by_loop, labels_by_loop, lesson_by_loop
from scipy.special import expit
from sklearn.base import clone
from sklearn.calibration import CalibratedClassifierCV
from sklearn.ensemble import RandomForestClassifier
from sklearn.exceptions import NotFittedError
from sklearn.linear_model import LogisticRegression, SGDClassifier
from sklearn.model_selection import GridSearchCV, cross_val_predict
from sklearn.naive_bayes import GaussianNB
from sklearn.neighbors import KNeighborsClassifier
from sklearn.neural_network import MLPClassifier
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import MinMaxScaler
from sklearn.svm import SVC
from sklearn.utils.class_weight import compute_sample_weight
from synthetic import small_cohort

from gpmil import Bags, models
from gpmil.files import persistence
from gpmil.models.cross_fit import suspicion
from gpmil.models.instance_classifier import Layers
from gpmil.models.lessons import LEFT_OUT, Lesson, pseudo_labels
from gpmil.models.pseudo_label import PseudoLabelMIL

quick = settings(max_examples=60, deadline=None)


def small(**options):
    return PseudoLabelMIL(**({"hidden": 9, "n_rounds": 4, "random_state": 3} | options))


@pytest.fixture(scope="module")
def model(cohort):
    return small().fit(cohort)


# ------------------------------------------------------------------ pseudo labels

SHARES = st.integers(0, 100).map(lambda k: k / 100)


@st.composite
def scored_bags(draw):
    """Scores with ties, bags of any size, shares that fit into a bag."""
    sizes = draw(st.lists(st.integers(1, 12) | st.just(100), min_size=1, max_size=6))
    offsets = np.concatenate([[0], np.cumsum(sizes)])
    positive = draw(st.lists(st.booleans(), min_size=len(sizes), max_size=len(sizes)))
    seed = draw(st.integers(0, 2**20))
    scores = np.random.default_rng(seed).integers(-3, 4, offsets[-1]) / 1.7
    top = draw(SHARES)
    low = draw(st.integers(0, 100 - round(100 * top)).map(lambda k: k / 100))
    return scores, np.array(positive), offsets, top, low


@quick
@given(scored_bags())
def test_labels_equal_the_loop(case):
    assert pseudo_labels(*case).tolist() == labels_by_loop(*case)


@quick
@given(scored_bags())
def test_labels_keep_their_promises(case):
    scores, positive, offsets, top, low = case
    labels = pseudo_labels(*case)
    for b, (a, z) in enumerate(itertools.pairwise(offsets)):
        own, score, n = labels[a:z], scores[a:z], z - a
        if not positive[b]:
            assert (own == 0).all()
            continue
        n_top, n_low = (own == 1).sum(), (own == 0).sum()
        assert n_top >= 1
        assert n_top == 1 or n_top <= top * n + 1e-9
        assert n_top > top * n - 1
        assert n_low <= low * n + 1e-9
        between = score[own == LEFT_OUT]
        assert between.size == 0 or score[own == 1].min() >= between.max()
        if n_low:
            assert score[own == 0].max() <= score[own != 0].min()


@quick
@given(scored_bags(), st.floats(0.1, 50), st.floats(-9, 9))
def test_only_the_order_of_the_scores_counts(case, scale, shift):
    scores, *others = case
    # An increasing map of the seven values, so that ties stay ties.
    moved = {v: k * scale + shift for k, v in enumerate(np.unique(scores))}
    again = np.array([moved[v] for v in scores])
    assert (pseudo_labels(scores, *others) == pseudo_labels(again, *others)).all()


def test_of_equal_scores_the_earlier_instance_ranks_higher():
    labels = pseudo_labels(np.zeros(7), np.array([True]), np.array([0, 7]), 0.3, 0.45)
    assert labels.tolist() == [1, 1, -1, -1, 0, 0, 0]


def test_a_share_is_not_lost_to_rounding():
    # 0.29 * 100 is 28.999999999999996
    labels = pseudo_labels(np.arange(100.0), np.array([True]), np.array([0, 100]), 0.29, 0.57)
    assert [(labels == k).sum() for k in (1, 0, LEFT_OUT)] == [29, 57, 14]


@quick
@given(scored_bags(), st.booleans())
def test_lesson_equals_the_loop(case, soft):
    labels = pseudo_labels(*case)
    p = expit(case[0]) if soft else None
    lesson = Lesson.of(labels, p)
    expected = lesson_by_loop(labels.tolist(), p)
    assert list(zip(lesson.rows, lesson.labels, lesson.weights)) == expected
    if len(set(lesson.labels)) == 2:
        weights = lesson.balanced()
        np.testing.assert_allclose(
            weights, balanced_by_loop(lesson.labels, lesson.weights), rtol=1e-12
        )
        one = weights[lesson.labels == 1].sum()
        np.testing.assert_allclose([one, weights.mean()], [weights.sum() / 2, 1], rtol=1e-12)


# ------------------------------------------------------------------ limits


def single_instances(seed=5, n=60, d=3):
    rng = np.random.default_rng(seed)
    y = (rng.random(n) < 0.3).astype(int)
    x = rng.normal(size=(n, d)) + 1.3 * y[:, None]
    return x, y, Bags.from_arrays(list(x[:, None]), y)


@pytest.mark.parametrize("rest", ["left_out", "soft"])
def test_one_instance_a_bag_is_plain_classification(rest):
    x, y, bags = single_instances()
    plain = LogisticRegression(C=0.7, tol=1e-10, max_iter=500)
    model = small(classifier=plain, rest=rest, standardize=False).fit(bags)
    plain.fit(x, y, sample_weight=compute_sample_weight("balanced", y))
    assert model.n_rounds_ == 1 and model.converged_
    np.testing.assert_allclose(
        model.predict_proba(bags)[:, 1], plain.predict_proba(x)[:, 1], rtol=1e-12
    )
    np.testing.assert_allclose(model.decision_function(bags), plain.decision_function(x), rtol=1e-9)


def test_the_whole_bag_positive_is_one_round():
    bags = small_cohort()
    model = small(top=1.0, low=0.0).fit(bags)
    assert model.n_rounds_ == 1 and model.converged_
    assert model.history_[0]["between"] == 0


@pytest.mark.filterwarnings("ignore::sklearn.exceptions.ConvergenceWarning")
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_matrices_equal_the_classifier(dtype, slides):
    parts = [a.astype(dtype) for a in slides["arrays"]]
    bags = Bags.from_arrays(parts, slides["labels"])
    near = {"rtol": 1e-9, "atol": 1e-12} if dtype == np.float64 else {"rtol": 1e-3, "atol": 1e-5}
    for classifier in (None, LogisticRegression(), SGDClassifier(loss="log_loss"),
                       MLPClassifier((5, 4), activation="tanh", max_iter=20)):  # fmt: skip
        model = small(classifier=classifier).fit(bags)
        p = model.predict_instances(bags).probability
        x = np.concatenate(list(model._inputs(bags))).astype(dtype)
        np.testing.assert_allclose(p, model.classifier_.predict_proba(x)[:, 1], **near)


def test_pieces_change_nothing(cohort, monkeypatch):
    whole = small().fit(cohort).predict_instances(cohort).mean
    monkeypatch.setattr("gpmil.models.pseudo_label.ROWS", 13)
    np.testing.assert_allclose(small().fit(cohort).predict_instances(cohort).mean, whole, rtol=1e-6)


# ------------------------------------------------------------------ the contract


def test_bags_take_their_largest_probability(model, cohort):
    found = model.predict_instances(cohort)
    largest = [p.max() for p in cohort.split(found.probability)]
    np.testing.assert_allclose(model.predict_proba(cohort)[:, 1], largest, rtol=1e-12)
    log_p, error = model.log_proba_negative(cohort)
    np.testing.assert_allclose(log_p, np.log1p(-np.array(largest)), rtol=1e-9)
    assert (error == 0).all()
    highest = [m.max() for m in cohort.split(found.mean)]
    np.testing.assert_allclose(model.decision_function(cohort), highest, rtol=1e-6, atol=1e-9)
    assert (model.predict(cohort) == (np.array(highest) > 0)).all()


def test_instances(model, cohort):
    found = model.predict_instances(cohort)
    np.testing.assert_allclose(found.probability, expit(found.mean))
    assert (suspicion(found) == found.mean).all()
    assert len(found.split()) == len(cohort)
    assert found.to_frame().shape == (cohort.n_instances, 6)


def test_predict_all_is_what_the_methods_say(model, cohort):
    found = model.predict_all(cohort)
    assert (found.proba == model.predict_proba(cohort)).all()
    assert (found.log_proba_negative == model.log_proba_negative(cohort)[0]).all()
    assert (found.instances.mean == model.predict_instances(cohort).mean).all()


def test_it_learns():
    bags, other = small_cohort(1, 40, shift=2.5), small_cohort(2, 40, shift=2.5)
    model = PseudoLabelMIL(random_state=0, top=0.3).fit(bags)
    p = model.predict_instances(other).probability
    truth = other.instance_labels == 1
    # Share of pairs in the right order, by instances and by bags.
    assert (p[truth][:, None] > p[~truth]).mean() > 0.9
    score = model.decision_function(other)
    assert (score[other.labels == 1][:, None] > score[other.labels == 0]).mean() > 0.9


def test_far_out_probabilities_are_neither_zero_nor_one(cohort, slides):
    far = Bags.from_arrays([1e4 * a for a in slides["arrays"]], slides["labels"])
    model = small().fit(cohort)
    p = model.predict_proba(far)
    assert (p > 0).all() and (p < 1).all()
    assert np.isfinite(model.decision_function(far)).all()


def test_no_bags_to_predict(model, cohort):
    nobody = cohort[np.zeros(len(cohort), dtype=bool)]
    assert model.predict_proba(nobody).shape == (0, 2)
    assert len(model.predict_instances(nobody)) == 0


def test_y_wins_and_is_given_back(cohort):
    y = np.where(cohort.labels == 1, 0.0, 1.0)
    model = small().fit(cohort, y)
    assert model.classes_.tolist() == [0.0, 1.0]
    assert set(model.predict(cohort)) <= {0.0, 1.0}
    assert model.cohort_["positive"] == int(y.sum())
    assert model.score(cohort, y) == (model.predict(cohort) == y).mean()


def test_history(model, cohort):
    assert model.n_rounds_ == len(model.history_) <= 4
    first = model.history_[0]
    in_positive = int(cohort.sizes[cohort.labels == 1].sum())
    assert (first["positive"], first["between"]) == (in_positive, 0)
    for entry in model.history_:
        assert entry["positive"] + entry["negative"] + entry["between"] == cohort.n_instances
    assert model.converged_ == (model.history_[-1]["changed"] == 0)


CLASSIFIERS = [
    None,
    LogisticRegression(),
    LogisticRegression(class_weight="balanced"),
    SGDClassifier(loss="log_loss"),
    MLPClassifier((7,), max_iter=15),
    RandomForestClassifier(5),
    make_pipeline(MinMaxScaler(), RandomForestClassifier(3)),
    GaussianNB(),
    KNeighborsClassifier(3),
]


def global_state():
    return np.random.get_state()[1].copy()  # noqa: NPY002 (that it is not touched)


@pytest.mark.filterwarnings("ignore::sklearn.exceptions.ConvergenceWarning")
@pytest.mark.parametrize("classifier", CLASSIFIERS, ids=lambda c: type(c).__name__)
def test_same_seed_same_bits(classifier, cohort):
    before = global_state()
    one, two = (small(classifier=classifier).fit(cohort) for _ in range(2))
    assert (one.predict_instances(cohort).mean == two.predict_instances(cohort).mean).all()
    assert one.history_ == two.history_
    assert (global_state() == before).all()


def test_another_seed_other_numbers(model, cohort):
    other = small(random_state=4).fit(cohort)
    assert (other.predict_proba(cohort) != model.predict_proba(cohort)).any()


def test_a_given_random_state_is_kept(cohort):
    model = small(classifier=RandomForestClassifier(3, random_state=11)).fit(cohort)
    assert model.classifier_.random_state == 11


def test_refit_gives_the_same_bits_and_leaves_settings_alone(cohort):
    forest = RandomForestClassifier(3)
    model = small(classifier=forest).fit(cohort)
    first = model.predict_proba(cohort)
    assert (model.fit(cohort).predict_proba(cohort) == first).all()
    assert model.classifier is forest and forest.random_state is None
    assert not hasattr(forest, "estimators_")
    network = small().fit(cohort)
    first = network.predict_proba(cohort)
    assert (network.fit(cohort).predict_proba(cohort) == first).all()


def test_soft_labels_differ_from_left_out(model, cohort):
    soft = small(rest="soft").fit(cohort)
    assert (soft.predict_proba(cohort) != model.predict_proba(cohort)).any()


def test_pca_and_raw_features(cohort):
    assert small(n_components=2).fit(cohort).feature_components_.shape == (2, 4)
    assert (small(standardize=False).fit(cohort).feature_scale_ == 1).all()


# ------------------------------------------------------------------ scikit-learn


def test_clone_and_pickle(model, cohort):
    fresh = clone(model)
    assert fresh.get_params() == model.get_params() and not hasattr(fresh, "layers_")
    again = pickle.loads(pickle.dumps(model))
    assert (again.predict_proba(cohort) == model.predict_proba(cohort)).all()
    forest = small(classifier=RandomForestClassifier(3)).fit(cohort)
    again = pickle.loads(pickle.dumps(forest))
    assert (again.predict_proba(cohort) == forest.predict_proba(cohort)).all()


def test_grid_search_reaches_the_classifier(cohort):
    search = GridSearchCV(
        small(classifier=LogisticRegression()),
        {"top": [0.2, 0.45], "classifier__C": [0.1, 3.0]},
        cv=3,
        scoring="roc_auc",
        error_score="raise",
    ).fit(cohort, cohort.labels)
    assert search.best_score_ > 0.5
    assert search.best_estimator_.classifier.C in (0.1, 3.0)


def test_cross_val_predict_and_calibration(cohort):
    found = cross_val_predict(small(), cohort, cohort.labels, cv=3, method="predict_proba")
    assert found.shape == (len(cohort), 2)
    calibrated = CalibratedClassifierCV(small(), cv=3).fit(cohort, cohort.labels)
    np.testing.assert_allclose(calibrated.predict_proba(cohort).sum(1), 1)


# ------------------------------------------------------------------ files


def loaded(path):
    return PseudoLabelMIL._from_saved(*persistence.read(path))


@pytest.mark.filterwarnings("ignore::sklearn.exceptions.ConvergenceWarning")
@pytest.mark.parametrize("options", [{}, {"n_components": 3}, {"standardize": False}])
@pytest.mark.parametrize("classifier", CLASSIFIERS[:5], ids=lambda c: type(c).__name__)
def test_round_trip(classifier, options, cohort, tmp_path):
    model = small(classifier=classifier, **options).fit(cohort)
    model.save(tmp_path / "model")
    again = loaded(tmp_path / "model")
    for method in ("predict_proba", "decision_function", "predict"):
        assert (getattr(again, method)(cohort) == getattr(model, method)(cohort)).all()
    assert repr(again) == repr(model)
    assert again.history_ == model.history_
    again.save(tmp_path / "again")
    for name in ("model.json", "model.safetensors"):
        one, two = ((tmp_path / k / name).read_bytes() for k in ("model", "again"))
        assert one == two
    assert (again.fit(cohort).predict_proba(cohort) == model.predict_proba(cohort)).all()


@pytest.mark.parametrize(
    ("classifier", "telling"),
    [
        (RandomForestClassifier(3), "RandomForestClassifier"),
        (SGDClassifier(loss="modified_huber"), "joblib"),
        (LogisticRegression(class_weight={0: 1.0, 1: 3.0}), "class_weight"),
    ],
)
def test_what_is_no_matrix_is_not_saved(classifier, telling, cohort, tmp_path):
    model = small(classifier=classifier).fit(cohort)
    with pytest.raises(ValueError, match=telling):
        model.save(tmp_path / "model")
    assert list(tmp_path.iterdir()) == []


def test_the_card_is_plain(model, tmp_path):
    model.save(tmp_path / "model")
    card = json.loads((tmp_path / "model" / "model.json").read_text(encoding="utf-8"))
    assert card["class"] == "PseudoLabelMIL" and card["settings"]["hidden"] == 9
    assert card["fitted"]["n_rounds_"] == model.n_rounds_


def test_load_knows_it(model, cohort, tmp_path, monkeypatch):
    monkeypatch.setitem(models.CLASSES, "PseudoLabelMIL", PseudoLabelMIL)
    model.save(tmp_path / "model")
    assert (models.load(tmp_path / "model").predict(cohort) == model.predict(cohort)).all()
    arrays, card = model._saved()
    persistence.write(tmp_path / "model", arrays, card | {"activation": "eval"})
    with pytest.raises(ValueError, match="corrupted"):
        models.load(tmp_path / "model")


def test_a_damaged_card(model):
    arrays, card = model._saved()
    for change in ({"activation": "eval"}, {"classifier": {"name": "Popen", "settings": {}}}):
        with pytest.raises(ValueError, match=next(iter(change))):
            PseudoLabelMIL._from_saved(arrays, copy.deepcopy(card) | change)
    with pytest.raises(ValueError, match="kernel"):
        PseudoLabelMIL._from_saved(arrays, card, kernel=object())


# ------------------------------------------------------------------ errors and what is said


@pytest.mark.parametrize(
    ("options", "telling"),
    [
        ({"top": 1.2}, "top must be a number from 0 to 1"),
        ({"top": "most"}, "top"),
        ({"top": True}, "top"),
        ({"low": -0.1}, "low must be"),
        ({"low": np.nan}, "low must be"),
        ({"top": 0.7, "low": 0.4}, "at most 1"),
        ({"rest": "ignored"}, "rest must be one of"),
        ({"hidden": 0}, "hidden must be a whole number >= 1"),
        ({"epochs": 2.5}, "epochs"),
        ({"n_rounds": 0}, "n_rounds"),
        ({"standardize": "yes"}, "standardize must be True or False"),
        ({"verbose": 1}, "verbose"),
        ({"n_components": 0}, "n_components"),
        ({"n_components": 99}, "n_components must be between 1 and 4"),
        ({"random_state": "seed"}, "random_state"),
        ({"classifier": "logistic"}, "classifier must be .* got str"),
        ({"classifier": LogisticRegression}, "got the class LogisticRegression. Pass an instance"),
        ({"classifier": SVC(probability=False)}, "SVC"),
        ({"classifier": KNeighborsClassifier(), "rest": "soft"}, "sample_weight, KNeighbors"),
        ({"classifier": KNeighborsClassifier(-2)}, "could not be trained on .* instances"),
    ],
)
def test_settings(options, telling, cohort):
    model = small().fit(cohort)
    before = model.predict_proba(cohort)
    with pytest.raises(ValueError, match=telling):
        model.set_params(**options).fit(cohort)
    assert (model.predict_proba(cohort) == before).all()
    with pytest.raises(ValueError, match=telling):
        clone(model).fit(cohort)


def test_no_model_yet(cohort, tmp_path):
    for call in (small().predict_proba, small().predict_instances):
        with pytest.raises(NotFittedError):
            call(cohort)
    with pytest.raises(NotFittedError):
        small().save(tmp_path / "model")


def test_other_bags(model, slides):
    with pytest.raises(ValueError, match="fitted on 4 features"):
        model.predict(Bags.from_arrays([a[:, :3] for a in slides["arrays"]], slides["labels"]))
    with pytest.raises(ValueError, match=r"expected gpmil.Bags"):
        model.fit(slides["arrays"], slides["labels"])
    with pytest.raises(ValueError, match="have no label"):
        model.fit(Bags.from_arrays(slides["arrays"]))
    with pytest.raises(ValueError, match="both classes"):
        model.fit(Bags.from_arrays(slides["arrays"]), np.ones(len(slides["labels"])))


class Odd(GaussianNB):
    def predict_proba(self, X):
        return np.full((len(X), 2), np.nan)


def test_a_classifier_that_returns_nan(cohort):
    with pytest.raises(ValueError, match="Odd returned"):
        small(classifier=Odd()).fit(cohort)


def test_missing_weights_are_said(cohort, caplog):
    with caplog.at_level(logging.WARNING, "gpmil"):
        small(classifier=KNeighborsClassifier(3)).fit(cohort)
    assert "takes no sample weights" in caplog.text


def test_verbose_speaks_while_fitting_only(cohort, capsys):
    model = small(verbose=True).fit(cohort)
    assert "round 1" in capsys.readouterr().err
    model.predict(cohort)
    assert capsys.readouterr().err == ""


def test_layers_by_hand():
    layers = Layers(
        [np.array([[1.0, -2.0]]), np.array([[3.0], [0.5]])],
        [np.array([0.1, 0.0]), np.array([-0.4])],
        "relu",
    )
    # relu(2 + 0.1) * 3 + relu(-4) * 0.5 - 0.4, and for -1: relu(-0.9), relu(2)
    np.testing.assert_allclose(layers.log_odds(np.array([[2.0], [-1.0]])), [5.9, 0.6])
