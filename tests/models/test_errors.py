"""Bad input gets a clear error: what was expected, what was found, where, and what to do.

What is no error but worth knowing is said once a fit, through the log.
"""

import logging

import gpytorch
import jaxtyping
import numpy as np
import pandas as pd
import pytest
import torch
from sklearn.exceptions import ConvergenceWarning, NotFittedError
from synthetic import numbers_for

import gpmil
from gpmil import VGPMILPR, VGPMILPRI, Bags
from gpmil.models.progress import progress_shown

PREDICTIONS = (
    "predict",
    "predict_proba",
    "decision_function",
    "predict_instances",
    "log_proba_negative",
    "score",
)


@pytest.fixture(autouse=True)
def as_users_run_it():
    """Without the type checker of the tests, which would speak before the library does."""
    before = jaxtyping.config.jaxtyping_disable
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", before)


def small(model_class=VGPMILPRI, **settings):
    return model_class(
        **(numbers_for(model_class) | {"n_inducing": 12, "random_state": 3} | settings)
    )


def refused(call, *telling, error=ValueError):
    """`call` raises, and the message holds every telling part."""
    with pytest.raises(error) as caught:
        call()
    for part in telling:
        assert part in str(caught.value)
    return caught.value


@pytest.fixture(scope="module")
def model(cohort):
    return small().fit(cohort)


def changed(slides, **parts):
    """Another cohort: `slides` with parts replaced, the lists copied."""
    return Bags.from_arrays(**({k: list(v) for k, v in slides.items()} | parts), step=256)


def with_values(slides, places: dict[tuple[int, int, int], float]):
    """Features with some values replaced: (bag, instance, column) -> value."""
    arrays = [x.copy() for x in slides["arrays"]]
    for (bag, row, column), value in places.items():
        arrays[bag][row, column] = value
    return arrays


# --- Features ---------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_features_that_are_no_numbers(value, slides):
    arrays = with_values(slides, {(3, 0, 1): value, (3, 2, 0): value, (7, 1, 3): value})
    message = refused(lambda: changed(slides, arrays=arrays), "3 values", "NaN or infinite")
    assert "slide03" in str(message) and "slide07" in str(message)
    assert "slide04" not in str(message)


@pytest.fixture
def on_disk(slides, tmp_path):
    """A cohort in a memory-mapped file, with two NaN in bag 3 that nobody has looked at yet."""
    arrays = with_values(slides, {(3, 0, 1): np.nan, (3, 1, 1): np.nan})
    np.save(tmp_path / "features.npy", np.concatenate(arrays))
    features = np.load(tmp_path / "features.npy", mmap_mode="r")
    offsets = np.cumsum([0, *(len(x) for x in arrays)])
    return Bags(features, offsets, slides["labels"], slides["names"])


def test_nan_in_a_file_is_found_by_fit(on_disk):
    refused(lambda: small().fit(on_disk), "2 values", "NaN", "slide03")


def test_nan_in_a_file_is_found_after_splitting(on_disk):
    split = on_disk[[9, 3, 0, 1, 2, 5, 12, 7]]
    refused(lambda: small().fit(split), "2 values", "NaN", "slide03")


@pytest.mark.parametrize("method", ["predict_proba", "predict_instances"])
def test_nan_in_a_file_is_found_by_predictions(method, model, on_disk):
    refused(lambda: getattr(model, method)(on_disk), "2 values", "NaN", "slide03")
    refused(lambda: getattr(model, method)(on_disk[[5, 3]]), "2 values", "NaN", "slide03")


def test_a_bag_without_an_instance(slides):
    arrays = list(slides["arrays"])
    arrays[5] = arrays[5][:0]
    refused(
        lambda: Bags.from_arrays(arrays, slides["labels"], names=slides["names"]),
        "without an instance",
        "slide05",
    )


@pytest.mark.parametrize(
    ("array", "telling"),
    [
        (np.zeros(4), "(4,)"),
        (np.zeros((3, 4, 2)), "(3, 4, 2)"),
        (np.array([["a", "b", "c", "d"]]), "<U1"),
        (np.zeros((3, 4), dtype=complex), "complex128"),
        ([[1.0, 2.0, 3.0, 4.0], [1.0]], "array"),
    ],
)
def test_a_bag_that_is_no_table_of_numbers(array, telling, slides):
    arrays = [*slides["arrays"][:2], array]
    refused(lambda: Bags.from_arrays(arrays, [0, 1, 0], names=["a", "b", "odd"]), "odd", telling)


def test_bags_of_different_width(slides):
    arrays = [*slides["arrays"][:2], np.zeros((5, 7))]
    refused(lambda: Bags.from_arrays(arrays, names=["a", "b", "wide"]), "4 features", "wide", "7")


@pytest.mark.parametrize("given", [np.zeros((6, 4)), [np.zeros((2, 4))], None, "slides"])
@pytest.mark.parametrize("method", ["fit", *PREDICTIONS])
def test_not_a_cohort(given, method, model):
    target = small() if method == "fit" else model
    refused(
        lambda: getattr(target, method)(given),
        "gpmil.Bags",
        type(given).__name__,
        "from_arrays",
    )


# --- Labels -----------------------------------------------------------------------------------


@pytest.mark.parametrize("label", [0, 1])
def test_a_single_class(label, cohort):
    same = cohort[cohort.labels == label]
    refused(lambda: small().fit(same), f"all {len(same)} bags", f"label {label}", "both classes")
    refused(lambda: small().fit(cohort, np.full(len(cohort), label)), f"label {label}")


def test_no_bags_at_all(cohort):
    refused(lambda: small().fit(cohort[:0]), "bags")


def test_string_labels_without_positive(slides):
    words = np.where(np.array(slides["labels"]) == 1, "cancer", "benign")
    refused(lambda: changed(slides, labels=words), "'cancer'", "'benign'", "positive=")
    refused(lambda: changed(slides, labels=words.tolist()), "'cancer'", "'benign'", "positive=")


def test_string_labels_in_fit(cohort):
    words = np.where(cohort.labels == 1, "cancer", "benign")
    refused(lambda: small().fit(cohort, words), "cancer", "benign", "positive=")


def test_positive_that_no_bag_has(slides):
    words = np.where(np.array(slides["labels"]) == 1, "cancer", "benign")
    refused(lambda: changed(slides, labels=words, positive="tumor"), "'tumor'", "benign", "cancer")


def test_three_labels(slides):
    words = ["benign", "cancer", "borderline"] * 7 + ["benign"]
    refused(
        lambda: changed(slides, labels=words, positive="cancer"), "3 classes", "'borderline' (7)"
    )
    refused(lambda: changed(slides, labels=[0, 1, 2] * 7 + [0]), "0, 1 or -1", "2")


@pytest.mark.parametrize("unknown", [-1, np.nan])
def test_unlabelled_bags_in_fit(unknown, cohort, slides):
    labels = np.array(slides["labels"], dtype=float)
    labels[[2, 6]] = unknown
    telling = "2 of 22 bags", "slide02", "slide06", "bags.labels >= 0"
    refused(lambda: small().fit(changed(slides, labels=labels)), *telling)
    refused(lambda: small().fit(cohort, labels), *telling)


def test_a_cohort_without_labels_in_fit(slides):
    refused(lambda: small().fit(changed(slides, labels=None)), "22 of 22 bags", "no label")


def test_unlabelled_bags_in_score(model, slides):
    labels = list(slides["labels"])
    labels[4] = -1
    refused(lambda: model.score(changed(slides, labels=labels)), "1 of 22 bags", "slide04")


def test_unlabelled_bags_can_be_predicted(model, slides, cohort):
    unlabelled = changed(slides, labels=None)
    assert np.array_equal(model.predict_proba(unlabelled[:4]), model.predict_proba(cohort[:4]))


@pytest.mark.parametrize("shape", [(21,), (23,), (22, 1), (22, 2), ()])
def test_labels_of_another_length(shape, cohort):
    y = np.resize([0, 1, 1], shape)
    refused(lambda: small().fit(cohort, y), "one label per bag", "22", str(shape))


@pytest.mark.parametrize("y", [[0, 1, 2], [1, 2, 2], [0.5, 1.0, 0.0], [0, 1, np.inf]])
def test_labels_that_are_not_zero_or_one(y, cohort):
    wrong = np.resize(y, len(cohort))
    refused(lambda: small().fit(cohort, wrong), "0 or 1", str(np.unique(wrong).tolist()))


def test_labels_as_python_objects(cohort):
    y = pd.Series(cohort.labels.tolist(), dtype=object)
    assert small().fit(cohort, y).classes_.tolist() == [0, 1]
    y[5] = None
    refused(lambda: small().fit(cohort, y), "1 of 22 bags", "slide05")


# --- Lengths and positions --------------------------------------------------------------------


@pytest.mark.parametrize("part", ["labels", "names", "groups", "coords", "instance_labels"])
@pytest.mark.parametrize("count", [21, 23])
def test_one_entry_a_bag(part, count, slides):
    given = (slides[part] * 2)[:count]
    refused(lambda: changed(slides, **{part: given}), part, "22", str(count))


def test_edges_and_steps_for_other_bags(slides):
    arrays = slides["arrays"]
    refused(lambda: Bags.from_arrays(arrays, edges=[[(0, 1)]] * 3), "edges", "22", "3")
    refused(lambda: Bags.from_arrays(arrays, coords=slides["coords"], step=[5.0] * 9), "step", "9")


@pytest.mark.parametrize("part", ["coords", "instance_labels"])
def test_one_row_an_instance(part, slides):
    rows = list(slides[part])
    rows[9] = rows[9][:-1]
    n = len(slides["arrays"][9])
    refused(lambda: changed(slides, **{part: rows}), part, "slide09", str(n), str(n - 1))


def test_duplicate_coordinates(slides):
    coords = [c.copy() for c in slides["coords"]]
    coords[6][3] = coords[6][1]
    place = ", ".join(str(v) for v in coords[6][1])
    refused(lambda: changed(slides, coords=coords), "slide06", "2 instances", place, "uplicate")


def test_same_coordinates_in_two_bags_are_fine(slides):
    coords = [c - c.min(0) for c in slides["coords"]]
    assert changed(slides, coords=coords).adjacency.nnz > 0


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_coordinates_that_are_no_numbers(value, slides):
    coords = [c.astype(float) for c in slides["coords"]]
    coords[8][2, 1] = value
    refused(lambda: changed(slides, coords=coords), "coords", "1 position", "slide08")


def test_a_graph_nobody_knows(slides):
    refused(lambda: changed(slides, graph="grid6"), "'grid6'", "grid4", "knn", "chain")


def test_names_that_are_not_unique(slides):
    names = list(slides["names"])
    names[3] = names[8]
    refused(lambda: changed(slides, names=names), "names", "slide08")


# --- Settings ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("setting", "value", "telling"),
    [
        ("coupling", -0.5, [">= 0", "-0.5"]),
        ("coupling", np.nan, [">= 0", "nan"]),
        ("coupling", np.inf, ["finite", "inf"]),
        ("coupling", None, ["None"]),
        ("coupling", "strong", ["'strong'"]),
        ("variance", 0, ["> 0", "0"]),
        ("variance", -1.0, ["> 0", "-1.0"]),
        ("variance", np.nan, ["nan"]),
        ("lengthscale", 0, ["> 0", "0"]),
        ("lengthscale", -2.0, ["> 0", "-2.0"]),
        ("lengthscale", "long", ["sqrt_dim", "'long'"]),
        ("lengthscale", [1.0, 2.0], ["4 positive numbers", "(2,)"]),
        ("mean", np.inf, ["finite", "inf"]),
        ("mean", "zero", ["'zero'"]),
        ("n_inducing", 0, ["whole number", "0"]),
        ("n_inducing", -4, ["whole number", "-4"]),
        ("n_inducing", 12.0, ["whole number", "12.0"]),
        ("n_inducing", True, ["whole number", "True"]),
        ("max_iter", 0, ["whole number", "0"]),
        ("tol", 0.0, ["> 0", "0.0"]),
        ("tol", np.nan, ["nan"]),
        ("n_components", 0, ["whole number", "0"]),
        ("n_components", 5, ["between 1 and 4", "124 instances", "4 features", "5"]),
        ("n_components", 2.5, ["whole number", "2.5"]),
        ("solver", "lbfgs", ["direct", "newton", "sweeps", "'lbfgs'"]),
        ("moments", "exact", ["diagonal", "'exact'"]),
        ("dtype", "float16", ["float64", "float32", "'float16'"]),
        ("dtype", np.dtype("float32"), ["float64", "float32"]),
        ("dtype", torch.float32, ["float64", "float32"]),
        ("kernel", "RBF", ["rbf", "matern32", "matern52", "linear", "'RBF'"]),
        ("kernel", gpytorch.kernels.RBFKernel, ["gpytorch kernel"]),
        ("kernel", None, ["NoneType"]),
        ("inducing", "grid", ["kmeans", "'grid'"]),
        ("inducing", np.zeros((7, 3)), ["(M, 4)", "(7, 3)"]),
        ("inducing", np.zeros(4), ["(M, 4)", "(4,)"]),
        ("inducing", np.zeros((0, 4)), ["(M, 4)", "(0, 4)"]),
        ("inducing", np.full((7, 4), np.nan), ["NaN"]),
        ("inducing", [["a", "b", "c", "d"]], ["(M, 4)"]),
        ("random_state", "seven", ["'seven'"]),
        ("random_state", 1.5, ["1.5"]),
        ("random_state", -1, ["-1"]),
        ("device", "gpu", ["'gpu'", "cpu", "cuda"]),
        ("device", "mps", ["mps"]),
        ("device", "meta", ["meta"]),
        ("device", 1.5, ["1.5"]),
    ],
)
def test_settings(setting, value, telling, cohort):
    message = refused(lambda: small(**{setting: value}).fit(cohort), setting, *telling)
    assert len(str(message)) < 400 and "\n" not in str(message)


@pytest.mark.parametrize("setting", ["variance", "lengthscale", "n_inducing", "solver", "tol"])
def test_settings_of_the_uncoupled_model(setting, cohort):
    refused(lambda: small(VGPMILPR, **{setting: -1}).fit(cohort), setting, "-1")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("device", ["cuda", "cuda:1"])
def test_a_device_that_is_not_there(device, cohort, model):
    refused(lambda: small(device=device).fit(cohort), device, "no GPU", "device='cpu'")
    elsewhere = small().fit(cohort).set_params(device=device)
    refused(lambda: elsewhere.predict_proba(cohort), device, "no GPU")


def test_seed_of_the_sweeps(cohort, slides):
    model = small(solver="sweeps", inducing=slides["arrays"][0], random_state=-1)
    refused(lambda: model.fit(cohort), "random_state", "-1")


def test_settings_of_a_model_nobody_knows():
    refused(lambda: gpmil.paper_settings("VGPMIL-X"), "'VGPMIL-X'", "VGPMILPRI")


# --- Prediction -------------------------------------------------------------------------------


@pytest.mark.parametrize("method", PREDICTIONS)
@pytest.mark.parametrize("model_class", [VGPMILPR, VGPMILPRI])
def test_an_unfitted_model(model_class, method, cohort):
    call = getattr(small(model_class), method)
    refused(lambda: call(cohort), "not fitted", model_class.__name__, error=NotFittedError)


def test_an_unfitted_model_cannot_be_saved(tmp_path):
    refused(lambda: small().save(tmp_path / "model"), "not fitted")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("settings", [{"inducing": np.zeros((7, 3))}, {"kernel": "RBF"}])
def test_a_failed_fit_leaves_no_half_fitted_model(settings, cohort, tmp_path):
    model = small(**settings)
    refused(lambda: model.fit(cohort))
    refused(lambda: model.predict(cohort), "not fitted", error=NotFittedError)
    refused(lambda: model.save(tmp_path / "model"), "not fitted")


def test_a_failed_refit_leaves_the_whole_model_or_none(cohort, slides):
    model = small().fit(cohort)
    before = model.predict_proba(cohort[:4])
    narrow = Bags.from_arrays([x[:, :3] for x in slides["arrays"]], slides["labels"])
    refused(lambda: model.set_params(inducing=np.zeros((7, 2))).fit(narrow))
    try:
        after = model.predict_proba(cohort[:4])
    except NotFittedError:
        return
    assert np.array_equal(after, before)


@pytest.mark.parametrize("method", PREDICTIONS)
@pytest.mark.parametrize("width", [3, 6])
def test_another_number_of_features(method, width, model, slides):
    arrays = [np.resize(x, (len(x), width)) for x in slides["arrays"]]
    other = changed(slides, arrays=arrays)
    refused(lambda: getattr(model, method)(other), "4 features", f"have {width}")


@pytest.mark.parametrize("method", PREDICTIONS)
def test_features_of_another_encoder(method, model, slides):
    other = changed(slides, metadata={"encoder": "toy-v2"})
    refused(lambda: getattr(model, method)(other), "'toy-v1'", "'toy-v2'")


def test_an_unnamed_encoder_passes(model, cohort, slides):
    unnamed = changed(slides)
    assert np.array_equal(model.predict(unnamed[:3]), model.predict(cohort[:3]))
    anything = small().fit(unnamed)
    assert anything.predict(cohort[:3]).shape == (3,)


def test_no_bags_to_predict(model, cohort):
    none = cohort[:0]
    assert len(model.predict_instances(none)) == 0
    assert model.predict_proba(none).shape == (0, 2)
    assert model.predict(none).shape == (0,)


def test_score_with_labels_of_another_length(model, cohort):
    refused(lambda: model.score(cohort, cohort.labels[:-1]), "22", "21")


@pytest.mark.parametrize("model_class", [VGPMILPR, VGPMILPRI])
def test_what_instances_cannot_have_yet(model_class, cohort):
    found = small(model_class).fit(cohort).predict_instances(cohort[:3])
    assert found.p_value is None and found.flagged is None
    assert all(part.p_value is None and part.flagged is None for part in found.split())
    named = ["bag", "x", "y", "probability", "mean", "std", "doubt", "novelty"]
    assert list(found.to_frame()) == named


# --- No error, said once ----------------------------------------------------------------------


@pytest.fixture
def said(caplog):
    """What the library has said since the last call: the messages, warnings and above."""
    caplog.set_level(logging.INFO, logger="gpmil")

    def read() -> list[str]:
        found = [r for r in caplog.records if r.name == "gpmil" and r.levelno >= logging.WARNING]
        caplog.clear()
        return [r.getMessage() for r in found]

    return read


@pytest.mark.parametrize("model_class", [VGPMILPR, VGPMILPRI])
def test_an_ordinary_fit_says_nothing(model_class, said, cohort, capsys, recwarn):
    model = small(model_class).fit(cohort)
    model.predict_proba(cohort[:3])
    model.predict_instances(cohort[:3])
    assert said() == []
    assert capsys.readouterr() == ("", "")
    assert [w for w in recwarn if "gpmil" in w.filename] == []


@pytest.mark.parametrize("level", [0.0, -7.25, 1e6])
def test_constant_columns(level, said, slides):
    constant = [np.full((len(x), 2), level) for x in slides["arrays"]]
    wider = [np.insert(x, [1], c, axis=1) for x, c in zip(slides["arrays"], constant)]
    bags = changed(slides, arrays=wider)
    said()
    model = small(lengthscale=2.0).fit(bags)
    (message,) = said()
    assert "2 of 6" in message and "constant" in message and "column 1" in message
    assert model.feature_scale_[1:3].tolist() == [1.0, 1.0]
    # they carry no information
    without = small(lengthscale=2.0).fit(changed(slides))
    np.testing.assert_allclose(model.posterior_mean_, without.posterior_mean_, rtol=1e-7)


def test_missing_coordinates(said, plain):
    said()
    model = small(coupling=2.0).fit(plain)
    (message,) = said()
    assert "neither coordinates nor edges" in message and "uncoupled" in message
    assert model.coupling_ == 0.0
    uncoupled = small(VGPMILPR).fit(plain)
    assert np.array_equal(model.posterior_mean_, uncoupled.posterior_mean_)
    model.predict_proba(plain[:3])
    assert said() == []


@pytest.mark.parametrize("settings", [{"model_class": VGPMILPR}, {"coupling": 0.0}])
def test_missing_coordinates_matter_to_coupled_models_only(settings, said, plain):
    small(**settings).fit(plain)
    assert said() == []


@pytest.mark.parametrize("method", ["predict_proba", "predict_instances"])
def test_missing_coordinates_in_prediction(method, said, model, plain):
    said()
    getattr(model, method)(plain[:5])
    # that these bags name no encoder is said once per model, here or in a test before
    (message,) = [line for line in said() if "encoder" not in line]
    assert "uncoupled" in message and "0.5" in message


@pytest.mark.parametrize("model_class", [VGPMILPR, VGPMILPRI])
def test_more_inducing_points_than_instances(model_class, said, cohort):
    model = small(model_class, n_inducing=1000).fit(cohort)
    (message,) = said()
    assert "1000" in message or "500" in message
    assert "inducing points" in message
    assert model.inducing_points_.shape == cohort.features.shape
    assert model.predict_proba(cohort[:2]).shape == (2, 2)


def test_more_inducing_points_than_instances_of_one_class(said, cohort):
    positive = np.flatnonzero(cohort.labels == 1)[:2]
    few = cohort[np.concatenate([positive, np.flatnonzero(cohort.labels == 0)])]
    n = few[:2].n_instances
    model = small(n_inducing=2 * n + 10).fit(few)
    (message,) = said()
    assert "positive" in message and str(n) in message
    assert len(model.inducing_points_) == n + n + 5


def test_verbose_speaks_while_fitting_only(cohort, capsys):
    logger = logging.getLogger("gpmil")
    before = logger.level, list(logger.handlers)
    model = small(verbose=True).fit(cohort)
    out, err = capsys.readouterr()
    assert out == "" and "22 bags" in err and "124 instances" in err
    assert (logger.level, logger.handlers) == before
    model.predict_proba(cohort[:2])
    assert capsys.readouterr() == ("", "")


def test_verbose_says_every_line_once(cohort, capsys):
    logger = logging.getLogger("gpmil")
    before = logger.level, list(logger.handlers)
    small(verbose=True, flags=True, n_folds=2).fit(cohort)
    said = capsys.readouterr().err
    assert [said.count(f"cross-fitting: model {k} of 2") for k in (1, 2)] == [1, 1]
    assert said.count("fit: ") == 3  # the model, and one per fold
    assert (logger.level, logger.handlers) == before


@pytest.mark.parametrize("first_out", [0, 1])
def test_verbose_of_overlapping_fits_ends_with_the_last(first_out):
    logger = logging.getLogger("gpmil")
    before = logger.level, list(logger.handlers)
    fits = [progress_shown(True), progress_shown(True)]
    for fit in fits:
        fit.__enter__()
    fits[first_out].__exit__(None, None, None)
    assert logger.level == logging.INFO and len(logger.handlers) == len(before[1]) + 1
    fits[1 - first_out].__exit__(None, None, None)
    assert (logger.level, logger.handlers) == before


# --- Convergence ------------------------------------------------------------------------------


@pytest.mark.parametrize("solver", ["newton", "direct"])
def test_no_convergence_is_a_warning_with_advice(solver, cohort):
    with pytest.warns(ConvergenceWarning) as caught:
        model = small(solver=solver, max_iter=1).fit(cohort)
    (warned,) = [w for w in caught if w.category is ConvergenceWarning]
    message = str(warned.message)
    assert warned.filename == __file__
    assert "1 step" in message and "Raise max_iter" in message and "residual" in message
    assert model.converged_ is False and model.n_iter_ == 1
    assert model.residual_ >= model.tol
    assert f"{model.residual_:.1e}" in message


@pytest.mark.parametrize("solver", ["newton", "direct"])
def test_convergence_is_recorded(solver, cohort, recwarn):
    model = small(solver=solver).fit(cohort)
    assert model.converged_ is True and 1 < model.n_iter_ < 15
    assert model.residual_ < model.tol
    assert not [w for w in recwarn if w.category is ConvergenceWarning]


def test_sweeps_are_exactly_as_many_as_asked_for(cohort, recwarn):
    model = small(solver="sweeps", max_iter=3).fit(cohort)
    assert model.n_iter_ == 3 and model.converged_ is False and model.residual_ > 1e-6
    assert not [w for w in recwarn if w.category is ConvergenceWarning]


def test_labels_of_plus_and_minus_one(cohort):
    y = np.where(cohort.labels == 1, 1, -1)
    refused(lambda: small().fit(cohort, y), "0 or 1", "-1 means unknown", "(y > 0)")


def test_a_kernel_object_of_another_width(cohort):
    import gpytorch

    kernel = gpytorch.kernels.RBFKernel(ard_num_dims=3)
    refused(lambda: small(kernel=kernel).fit(cohort), "kernel", "4 columns")


def test_a_coupling_beyond_double_precision(cohort):
    refused(lambda: small(coupling=1e300).fit(cohort), "coupling", "at most")


def test_features_whose_squares_overflow(slides):
    huge = changed(slides, arrays=[1e200 * x for x in slides["arrays"]])
    refused(lambda: small().fit(huge), "too large", "Divide")
