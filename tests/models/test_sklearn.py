"""The scikit-learn contract: a cohort is split, searched, stacked and calibrated like an array."""

import copy
import os
import pickle

import gpytorch
import numpy as np
import pytest
import torch
from joblib import Parallel, delayed, parallel_config
from sklearn import config_context
from sklearn.base import clone, is_classifier
from sklearn.calibration import CalibratedClassifierCV
from sklearn.ensemble import BaggingClassifier, StackingClassifier
from sklearn.exceptions import NotFittedError
from sklearn.frozen import FrozenEstimator
from sklearn.metrics import accuracy_score, get_scorer, roc_auc_score
from sklearn.model_selection import (
    GridSearchCV,
    StratifiedGroupKFold,
    StratifiedKFold,
    TunedThresholdClassifierCV,
    cross_val_predict,
    cross_validate,
    learning_curve,
    train_test_split,
)
from sklearn.pipeline import Pipeline, make_pipeline
from sklearn.preprocessing import FunctionTransformer
from sklearn.utils import get_tags
from sklearn.utils.validation import has_fit_parameter
from synthetic import numbers_for
from threadpoolctl import threadpool_limits

from gpmil import VGPMIL, VGPMILPR, VGPMILPRI, Bags

FOLDS = StratifiedKFold(3, shuffle=True, random_state=4)
FITTED = (
    "inducing_points_",
    "posterior_mean_",
    "posterior_covariance_",
    "coupling_",
    "variance_",
    "lengthscale_",
    "mean_",
    "n_iter_",
    "converged_",
    "residual_",
    "loo_log_likelihood_",
    "classes_",
    "feature_mean_",
    "feature_scale_",
)

PROBIT_ONLY = {"coupling_", "loo_log_likelihood_"}  # what VGPMIL has no use for

every = pytest.mark.parametrize("model_class", [VGPMIL, VGPMILPR, VGPMILPRI])
every_inference = pytest.mark.parametrize(
    ("model_class", "inference"),
    [
        (VGPMIL, {"expected_max": "product"}),
        (VGPMIL, {"expected_max": "largest"}),
        (VGPMILPR, {"solver": "direct"}),
        (VGPMILPR, {"solver": "newton"}),
        (VGPMILPR, {"solver": "sweeps"}),
        (VGPMILPRI, {"solver": "direct"}),
        (VGPMILPRI, {"solver": "newton"}),
        (VGPMILPRI, {"solver": "sweeps"}),
    ],
)


def small(model_class=VGPMILPRI, **settings):
    numbers = numbers_for(model_class) | {"n_inducing": 20, "random_state": 3}
    if model_class is VGPMIL:  # at variance 1 a noisy-or of doubtful instances is mostly positive
        numbers |= {"variance": 4.0, "max_iter": 20}
    return model_class(**(numbers | settings))


def same(a, b) -> bool:
    """Equal to the last bit, whatever kind of parameter it is."""
    if isinstance(a, gpytorch.kernels.Kernel):
        states = a.state_dict(), b.state_dict()
        return states[0].keys() == states[1].keys() and all(
            torch.equal(v, states[1][k]) and v.dtype == states[1][k].dtype
            for k, v in states[0].items()
        )
    if isinstance(a, np.ndarray):
        return isinstance(b, np.ndarray) and a.dtype == b.dtype and np.array_equal(a, b)
    return type(a) is type(b) and a == b


def fitted_bits(model) -> dict[str, bytes | object]:
    names = set(FITTED) - (PROBIT_ONLY if isinstance(model, VGPMIL) else set())
    values = {name: getattr(model, name) for name in names}
    return {k: v.tobytes() if isinstance(v, np.ndarray) else v for k, v in values.items()}


@pytest.fixture
def workers():
    """Two processes; numerics on one thread here as there, as sums depend on their number."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with threadpool_limits(1), parallel_config("loky", n_jobs=2, inner_max_num_threads=1):
        yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def model(cohort):
    return small().fit(cohort)


# --- Parameters -------------------------------------------------------------------------------


@every
def test_clone_has_the_parameters_and_nothing_fitted(model_class, cohort, slides):
    points = slides["arrays"][0][:4]
    model = small(model_class, inducing=points, variance=2.5, lengthscale=3.0).fit(cohort)
    twin = clone(model)
    assert type(twin) is model_class
    assert all(same(value, twin.get_params()[name]) for name, value in model.get_params().items())
    assert twin.inducing is not points
    with pytest.raises(NotFittedError):
        twin.predict(cohort)


@every
def test_every_constructor_argument_is_a_parameter(model_class):
    default = model_class().get_params()
    shared = {
        *("kernel", "variance", "lengthscale", "mean", "n_inducing", "inducing", "standardize"),
        *("n_components", "max_iter", "tol", "random_state", "device", "dtype", "store", "verbose"),
    }
    probit = {
        *("solver", "moments", "optimize", "tuning_budget", "calibrated", "flags", "n_folds"),
        *("slide_effect", "slide_context", "slide_context_lengthscale"),
        *("instance_labels", "aim"),
    }
    own = {
        VGPMIL: {"H", "expected_max", "bag", "slide_effect"},
        VGPMILPR: probit,
        VGPMILPRI: probit | {"coupling"},
    }
    assert set(default) == shared | own[model_class]
    # distinct values, so that a swapped assignment in __init__ shows
    marks = {name: object() for name in default}
    made = model_class(**marks)
    assert all(made.get_params()[name] is mark for name, mark in marks.items())
    moved = model_class().set_params(**marks)
    assert all(getattr(moved, name) is mark for name, mark in marks.items())


def test_settings_are_learned_by_default():
    model = VGPMILPRI()
    settings = model.coupling, model.variance, model.lengthscale, model.mean
    assert settings == ("auto",) * 4
    assert (model.solver, model.moments, model.n_inducing) == ("direct", "diagonal", 200)
    assert (model.max_iter, model.tol, model.dtype, model.store) == (200, 1e-10, "auto", "auto")


def test_set_params_reaches_the_fit(cohort):
    fitted = small().set_params(coupling=2.5, mean=-1.25, lengthscale=3.5, variance=1.5).fit(cohort)
    found = fitted.coupling_, fitted.mean_, fitted.lengthscale_, fitted.variance_
    assert found == (2.5, -1.25, 3.5, 1.5)
    with pytest.raises(ValueError, match="Invalid parameter 'strength'"):
        small().set_params(strength=1.0)


def test_constructor_validates_nothing():
    VGPMILPRI(coupling=-1, kernel=17, solver="none of them", n_inducing=-3)


def given_array(slides):
    points = np.concatenate(slides["arrays"])[3:60:4].copy()
    points.flags.writeable = False  # a fit that writes into it fails at once
    return {"inducing": points}


def kernel_object(slides):
    kernel = gpytorch.kernels.ScaleKernel(gpytorch.kernels.RBFKernel())
    kernel.outputscale, kernel.base_kernel.lengthscale = 1.7, 2.2
    return {"kernel": kernel}


@pytest.mark.parametrize(
    ("model_class", "inference", "settings"),
    [
        (VGPMILPRI, {"solver": "direct"}, given_array),
        (VGPMILPRI, {"solver": "newton"}, given_array),
        (VGPMILPRI, {"solver": "sweeps"}, given_array),
        (VGPMILPRI, {"solver": "direct"}, kernel_object),
        (VGPMILPR, {"solver": "direct"}, given_array),
        (VGPMILPR, {"solver": "sweeps"}, kernel_object),
        (VGPMILPR, {"solver": "newton"}, lambda slides: {}),
        (VGPMIL, {}, given_array),
        (VGPMIL, {"expected_max": "largest"}, kernel_object),
    ],
)
def test_fit_leaves_the_parameters_alone(model_class, inference, settings, cohort, slides):
    model = small(model_class, max_iter=40, **inference, **settings(slides))
    objects = model.get_params()
    copies = copy.deepcopy(objects)
    model.fit(cohort)
    model.predict_instances(cohort)
    after = model.get_params()
    assert all(after[name] is value for name, value in objects.items())
    assert all(same(after[name], value) for name, value in copies.items())


def test_fitted_model_does_not_share_the_given_inducing_points(cohort, slides):
    points = np.concatenate(slides["arrays"])[3:60:4].copy()
    model = small(inducing=points).fit(cohort)
    before = model.predict_instances(cohort).mean
    points += 1.0
    assert np.array_equal(model.predict_instances(cohort).mean, before)


def test_fitted_model_does_not_share_the_kernel_object(cohort, slides):
    kernel = kernel_object(slides)["kernel"]
    model = small(kernel=kernel).fit(cohort)
    before = model.predict_instances(cohort).mean
    kernel.outputscale = 9.0
    assert np.array_equal(model.predict_instances(cohort).mean, before)


def test_parameters_set_after_a_fit_wait_for_the_next_one(cohort):
    model = small().fit(cohort)
    before = model.predict_instances(cohort).mean
    model.set_params(kernel="matern32", coupling=5.0, mean=1.0, variance=3.0, dtype="float32")
    assert np.array_equal(model.predict_instances(cohort).mean, before)


# --- Bits -------------------------------------------------------------------------------------


@every_inference
def test_refit_gives_the_same_bits(model_class, inference, cohort):
    model = small(model_class, max_iter=30, **inference).fit(cohort)
    first, proba = fitted_bits(model), model.predict_proba(cohort[:5]).tobytes()
    assert model.fit(cohort) is model
    assert fitted_bits(model) == first
    assert model.predict_proba(cohort[:5]).tobytes() == proba


@every
def test_refit_forgets_the_fit_before(model_class, cohort, plain):
    fresh = small(model_class).fit(cohort)
    used = small(model_class, n_components=2, kernel="linear").fit(plain[::2])
    used.set_params(n_components=None, kernel="rbf").fit(cohort)
    assert vars(used).keys() == vars(fresh).keys()
    assert fitted_bits(used) == fitted_bits(fresh)
    assert used.predict_proba(cohort[:5]).tobytes() == fresh.predict_proba(cohort[:5]).tobytes()


@every_inference
def test_same_seed_same_bits(model_class, inference, cohort):
    one, two, other = (
        small(model_class, max_iter=30, random_state=seed, **inference).fit(cohort)
        for seed in (5, 5, 6)
    )
    assert fitted_bits(one) == fitted_bits(two)
    assert one.predict_proba(cohort[:5]).tobytes() == two.predict_proba(cohort[:5]).tobytes()
    assert one.posterior_mean_.tobytes() != other.posterior_mean_.tobytes()


def test_same_seed_same_bits_in_another_process(workers, cohort):
    settings = [{}, {"solver": "sweeps", "max_iter": 30}, {"dtype": "float32", "coupling": 2.0}]
    models = [*(small(**s) for s in settings), small(VGPMIL)]
    there = Parallel()(delayed(clone(m).fit)(cohort) for m in models)
    probas = Parallel()(delayed(m.predict_proba)(cohort[:5]) for m in there)
    for here, away, proba in zip(models, there, probas):
        here.fit(cohort)
        assert fitted_bits(here) == fitted_bits(away)
        assert here.predict_proba(cohort[:5]).tobytes() == proba.tobytes()


def test_predictions_leave_the_model_alone(cohort):
    model = small().fit(cohort)
    before = pickle.dumps(model)
    model.predict_proba(cohort[:3])
    model.predict_instances(cohort[5])
    model.score(cohort[:4])
    assert pickle.dumps(model) == before


def test_pickle(model, cohort):
    twin = pickle.loads(pickle.dumps(model))
    assert fitted_bits(twin) == fitted_bits(model)
    assert twin.predict_proba(cohort[:5]).tobytes() == model.predict_proba(cohort[:5]).tobytes()
    assert clone(twin).get_params() == model.get_params()


def test_pickle_with_a_kernel_object(cohort, slides):
    model = small(**kernel_object(slides)).fit(cohort)
    twin = pickle.loads(pickle.dumps(model))
    assert same(twin.kernel, model.kernel)
    assert twin.predict_proba(cohort[:4]).tobytes() == model.predict_proba(cohort[:4]).tobytes()


# --- Labels and classes -----------------------------------------------------------------------


@every
def test_y_wins_over_the_labels_of_the_bags(model_class, cohort, slides):
    flipped = 1 - cohort.labels
    model = small(model_class).fit(cohort, flipped)
    relabelled = Bags.from_arrays(**(slides | {"labels": flipped}), step=256)
    assert fitted_bits(model) == fitted_bits(small(model_class).fit(relabelled))
    assert fitted_bits(model) != fitted_bits(small(model_class).fit(cohort))
    assert model.score(cohort, flipped) > 0.7 > 0.3 > model.score(cohort)


def test_y_labels_unlabelled_bags(cohort, slides):
    unlabelled = Bags.from_arrays(**(slides | {"labels": None}), step=256)
    model = small().fit(unlabelled, cohort.labels)
    assert fitted_bits(model) == fitted_bits(small().fit(cohort))


@pytest.mark.parametrize(
    ("convert", "classes"),
    [
        (lambda y: y, np.array([0, 1])),
        (lambda y: y.tolist(), np.array([0, 1])),
        (lambda y: y == 1, np.array([False, True])),
        (lambda y: y.astype(np.uint8), np.array([0, 1], dtype=np.uint8)),
        (lambda y: y.astype(float), np.array([0.0, 1.0])),
    ],
)
def test_classes_are_the_values_of_y(convert, classes, cohort):
    model = small(VGPMILPR).fit(cohort, convert(cohort.labels))
    assert same(model.classes_, classes)
    few = cohort[:8]
    predicted = model.predict(few)
    assert predicted.dtype == classes.dtype
    assert set(predicted.tolist()) == set(classes.tolist())
    assert np.array_equal(predicted == classes[1], model.predict_proba(few)[:, 1] > 0.5)


def test_classes_without_y(model):
    assert same(model.classes_, np.array([0, 1]))


def test_classes_of_named_labels_are_zero_and_one(slides):
    words = np.where(np.array(slides["labels"]) == 1, "cancer", "benign")
    named = Bags.from_arrays(**(slides | {"labels": words, "positive": "cancer"}), step=256)
    model = small().fit(named)
    assert same(model.classes_, np.array([0, 1]))
    assert model.score(named) > 0.7


def test_score_with_and_without_y(model, cohort):
    predicted = model.predict(cohort)
    assert 0.7 < model.score(cohort) < 1
    assert model.score(cohort) == accuracy_score(cohort.labels, predicted)
    assert model.score(cohort[:4], 1 - predicted[:4]) == 0.0
    assert model.score(cohort[:4], predicted[:4]) == 1.0


def test_probabilities_log_odds_and_decisions_agree(model, cohort):
    proba, log_odds = model.predict_proba(cohort), model.decision_function(cohort)
    log_p, error = model.log_proba_negative(cohort)
    assert proba.shape == (22, 2)
    assert log_odds.shape == log_p.shape == error.shape == (22,)
    np.testing.assert_allclose(proba.sum(1), 1.0, rtol=1e-14)
    np.testing.assert_allclose(proba[:, 0], np.exp(log_p), rtol=1e-13)
    np.testing.assert_allclose(log_odds, np.log(proba[:, 1] / proba[:, 0]), rtol=1e-10)
    assert np.array_equal(model.predict(cohort), (log_odds > 0).astype(int))
    assert roc_auc_score(cohort.labels, log_odds) > 0.85


# --- Feature types ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dtype", "settings"),
    [
        (np.float16, {}),
        (np.float16, {"n_components": 3}),
        (np.float32, {}),
        (np.float32, {"standardize": False}),
        (np.float64, {"n_components": 3}),
    ],
)
def test_feature_types(dtype, settings, slides):
    arrays = [x.astype(dtype) for x in slides["arrays"]]
    bags = Bags.from_arrays(**(slides | {"arrays": arrays}), step=256)
    # the same numbers in float64: what is lost by rounding is lost before the model
    exact = Bags.from_arrays(
        **(slides | {"arrays": [x.astype(np.float64) for x in arrays]}), step=256
    )
    assert bags.features.dtype == dtype
    model = small(**settings).fit(bags)
    assert fitted_bits(model) == fitted_bits(small(**settings).fit(exact))
    assert model.posterior_mean_.dtype == np.float64
    assert np.array_equal(model.predict_proba(bags[:4]), model.predict_proba(exact[:4]))


# --- What scikit-learn asks -------------------------------------------------------------------


@every
def test_tags(model_class):
    tags = get_tags(model_class())
    assert is_classifier(model_class())
    assert tags.estimator_type == "classifier"
    assert tags.input_tags.two_d_array is False
    assert tags.input_tags.allow_nan is False
    assert tags.classifier_tags.multi_class is False
    assert not has_fit_parameter(model_class(), "sample_weight")


@every
def test_shown_in_a_notebook(model_class, slides):
    model = model_class(coupling=1.5) if model_class is VGPMILPRI else model_class(mean=-1.5)
    assert "1.5" in repr(model)
    assert model_class.__name__ in model._repr_html_()
    assert "array" in repr(model_class(inducing=slides["arrays"][0]))


@every
def test_train_test_split(model_class, cohort):
    train, test, y_train, y_test = train_test_split(
        cohort, cohort.labels, test_size=8, stratify=cohort.labels, random_state=1
    )
    assert isinstance(train, Bags) and isinstance(test, Bags)
    assert (len(train), len(test)) == (14, 8)
    assert np.array_equal(test.labels, y_test)
    assert set(train.names) | set(test.names) == set(cohort.names)
    assert small(model_class).fit(train, y_train).score(test, y_test) > 0.5


def test_grid_search_in_two_processes(workers, cohort):
    grid = {"coupling": [0.0, 2.0], "n_components": [None, 3]}
    search = GridSearchCV(small(), grid, scoring="neg_log_loss", cv=FOLDS, n_jobs=2)
    search.fit(cohort, cohort.labels)
    scores = search.cv_results_["mean_test_score"]
    assert scores.shape == (4,)
    assert len(set(scores)) == 4 and np.isfinite(scores).all()
    best = small(**search.best_params_)
    # one fold by hand
    train, test = next(FOLDS.split(np.zeros(len(cohort)), cohort.labels))
    by_hand = clone(best).fit(cohort[train])
    # the scorer sees P(y = 1) alone, and so rounds P(y = 0) by itself
    expected = get_scorer("neg_log_loss")(by_hand, cohort[test], cohort.labels[test])
    assert search.cv_results_["split0_test_score"][search.best_index_] == expected
    assert fitted_bits(search.best_estimator_) == fitted_bits(best.fit(cohort))
    assert np.array_equal(search.predict(cohort), search.best_estimator_.predict(cohort))


def test_grid_search_keeps_patients_together(workers, cohort):
    folds = StratifiedGroupKFold(3)
    search = GridSearchCV(small(VGPMILPR), {"variance": [0.5, 4.0]}, cv=folds, n_jobs=2)
    search.fit(cohort, cohort.labels, groups=cohort.groups)
    for train, test in folds.split(cohort, cohort.labels, cohort.groups):
        assert not set(cohort[train].groups) & set(cohort[test].groups)
    assert search.cv_results_["mean_test_score"].min() > 0.5


def test_grid_search_over_the_bag_rules(cohort):
    grid = {"bag": ["noisy_or", "max"], "H": [5.0, 1e12]}
    search = GridSearchCV(small(VGPMIL), grid, scoring="neg_log_loss", cv=FOLDS)
    search.fit(cohort, cohort.labels)
    assert len(set(search.cv_results_["mean_test_score"])) == 4
    best = small(VGPMIL, **search.best_params_).fit(cohort)
    assert fitted_bits(search.best_estimator_) == fitted_bits(best)


@pytest.mark.parametrize(
    ("model_class", "method", "shape"),
    [
        (VGPMILPRI, "predict_proba", (22, 2)),
        (VGPMILPR, "decision_function", (22,)),
        (VGPMIL, "predict_proba", (22, 2)),
    ],
)
def test_cross_val_predict(model_class, method, shape, cohort):
    found = cross_val_predict(small(model_class), cohort, cohort.labels, cv=FOLDS, method=method)
    assert found.shape == shape
    train, test = next(FOLDS.split(np.zeros(len(cohort)), cohort.labels))
    by_hand = getattr(small(model_class).fit(cohort[train]), method)(cohort[test])
    assert np.array_equal(found[test], by_hand)


def test_cross_validate(cohort):
    result = cross_validate(
        small(),
        cohort,
        cohort.labels,
        cv=FOLDS,
        scoring=["accuracy", "roc_auc", "neg_log_loss"],
        return_estimator=True,
        error_score="raise",
    )
    assert result["test_roc_auc"].min() > 0.6
    assert (result["test_neg_log_loss"] < 0).all()
    for model, (_, test), accuracy in zip(
        result["estimator"], FOLDS.split(cohort, cohort.labels), result["test_accuracy"]
    ):
        assert accuracy == model.score(cohort[test])


def test_cross_validate_without_y(cohort):
    folds = list(FOLDS.split(cohort, cohort.labels))
    with_y = cross_validate(small(VGPMILPR), cohort, cohort.labels, cv=folds, error_score="raise")
    without = cross_validate(small(VGPMILPR), cohort, cv=folds, error_score="raise")
    assert np.array_equal(without["test_score"], with_y["test_score"])


def test_learning_curve(cohort):
    sizes, train, test = learning_curve(
        small(VGPMILPR),
        cohort,
        cohort.labels,
        train_sizes=[9, 14],
        cv=FOLDS,
        shuffle=True,
        random_state=0,
        error_score="raise",
    )
    assert sizes.tolist() == [9, 14]
    assert train.shape == test.shape == (2, 3)
    assert train.mean() > 0.7 and test[1].mean() > 0.5


@pytest.mark.parametrize(
    ("model_class", "ensemble"), [(VGPMILPRI, True), (VGPMILPR, False), (VGPMIL, True)]
)
def test_calibrated(model_class, ensemble, cohort):
    calibrated = CalibratedClassifierCV(small(model_class), cv=3, ensemble=ensemble)
    proba = calibrated.fit(cohort, cohort.labels).predict_proba(cohort)
    assert proba.shape == (22, 2)
    np.testing.assert_allclose(proba.sum(1), 1.0)
    assert roc_auc_score(cohort.labels, proba[:, 1]) > 0.85
    assert set(calibrated.predict(cohort)) == {0, 1}


def test_calibrated_on_other_bags(cohort):
    train, other = cohort[:12], cohort[12:]
    model = small().fit(train)
    calibrated = CalibratedClassifierCV(FrozenEstimator(model), cv=3).fit(other, other.labels)
    # a sigmoid of the log odds keeps their order
    order = np.argsort(model.decision_function(other))
    assert (np.diff(calibrated.predict_proba(other)[order, 1]) >= 0).all()


def test_tuned_threshold(cohort):
    tuned = TunedThresholdClassifierCV(small(), scoring="balanced_accuracy", cv=FOLDS)
    tuned.fit(cohort, cohort.labels)
    assert 0 < tuned.best_threshold_ < 1
    positive = tuned.estimator_.predict_proba(cohort)[:, 1] >= tuned.best_threshold_
    assert np.array_equal(tuned.predict(cohort), positive.astype(int))


def test_stacking(cohort):
    stack = StackingClassifier(
        [("coupled", small(coupling=2.0)), ("uncoupled", small(VGPMILPR, kernel="linear"))], cv=3
    )
    stack.fit(cohort, cohort.labels)
    assert stack.transform(cohort).shape == (22, 2)
    np.testing.assert_array_equal(
        stack.transform(cohort)[:, 0], stack.estimators_[0].predict_proba(cohort)[:, 1]
    )
    assert stack.score(cohort, cohort.labels) > 0.7


def halved(bags):
    """A step that makes other bags of bags."""
    return Bags(bags.features / 2, bags.offsets, bags.labels, bags.names, adjacency=bags.adjacency)


@every
def test_pipeline(model_class, cohort):
    pipeline = make_pipeline(FunctionTransformer(), small(model_class)).fit(cohort, cohort.labels)
    alone, few = small(model_class).fit(cohort), cohort[:6]
    assert np.array_equal(pipeline.predict_proba(few), alone.predict_proba(few))
    assert pipeline.score(few, few.labels) == alone.score(few)
    assert pipeline.classes_.tolist() == [0, 1]


def test_pipeline_that_changes_bags_in_a_search(cohort):
    pipeline = Pipeline(
        [("halve", FunctionTransformer(halved)), ("model", small(standardize=False))]
    )
    grid = {"halve": [FunctionTransformer(halved), "passthrough"], "model__coupling": [0.5]}
    search = GridSearchCV(pipeline, grid, scoring="neg_log_loss", cv=FOLDS, error_score="raise")
    search.fit(cohort, cohort.labels)
    by_hand = cross_validate(
        small(standardize=False),
        halved(cohort),
        cohort.labels,
        cv=FOLDS,
        scoring="neg_log_loss",
    )
    np.testing.assert_allclose(
        search.cv_results_["mean_test_score"][0], by_hand["test_score"].mean(), rtol=1e-12
    )
    assert search.cv_results_["mean_test_score"][1] != search.cv_results_["mean_test_score"][0]


# --- What cannot work -------------------------------------------------------------------------


def test_bagging_cannot_work(cohort):
    # it insists on one array of numbers, and says what a cohort is instead
    with pytest.raises(TypeError, match="Bags are ragged"):
        BaggingClassifier(small(), n_estimators=2).fit(cohort, cohort.labels)


@pytest.mark.skipif(
    os.environ.get("SCIPY_ARRAY_API") != "1", reason="scikit-learn asks for SCIPY_ARRAY_API=1"
)
def test_array_api_dispatch_cannot_work(cohort):
    with config_context(array_api_dispatch=True), pytest.raises(TypeError, match="Bags is not"):
        cross_validate(small(), cohort, cohort.labels, cv=FOLDS, error_score="raise")
