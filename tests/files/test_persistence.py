"""Saved models: the same bits come back, damage is noticed, nothing is half-written or executed."""

import copy
import errno
import hashlib
import json
import os
import pickle
from importlib.metadata import version
from pathlib import Path

import gpytorch
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file
from synthetic import numbers_for

import gpmil
from gpmil import VGPMILPR, VGPMILPRI, Bags
from gpmil.files import persistence

ARRAYS, CARD = "model.safetensors", "model.json"

quick = settings(
    max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


def small(model_class=VGPMILPRI, **settings):
    return model_class(
        **(numbers_for(model_class) | {"n_inducing": 12, "random_state": 3} | settings)
    )


@pytest.fixture(scope="module")
def model(cohort):
    return small().fit(cohort)


@pytest.fixture
def folder(model, tmp_path) -> Path:
    model.save(tmp_path / "model")
    return tmp_path / "model"


def read_card(folder: Path) -> dict:
    return json.loads((folder / CARD).read_text(encoding="utf-8"))


def write_card(folder: Path, card) -> None:
    (folder / CARD).write_text(json.dumps(card), encoding="utf-8")


def rewrite(folder: Path, without: str = "", **changes) -> None:
    """The model again, by the writer itself, with an odd card or without one of the arrays."""
    arrays, card = persistence.read(folder)
    card = {k: v for k, v in card.items() if k not in ("format", "version", "sha256", without)}
    arrays.pop(without, None)
    persistence.write(folder, arrays, card | changes)


def replace_arrays(folder: Path, payload: bytes) -> None:
    """Other bytes, with a checksum that fits: what a clumsy or hostile writer could leave."""
    (folder / ARRAYS).write_bytes(payload)
    write_card(folder, read_card(folder) | {"sha256": hashlib.sha256(payload).hexdigest()})


def refused(folder: Path, *telling, **options) -> None:
    with pytest.raises(ValueError) as caught:
        gpmil.load(folder, **options)
    for part in telling:
        assert part in str(caught.value)


def bits(model, bags) -> dict[str, bytes]:
    """Every prediction there is, as bytes."""
    patches = model.predict_instances(bags)
    log_p, error = model.log_proba_negative(bags[:3])
    arrays = {
        "proba": model.predict_proba(bags[:2]),
        "class": model.predict(bags[:2]),
        "log_p": log_p,
        "error": error,
        "probability": patches.probability,
        "mean": patches.mean,
        "std": patches.std,
    }
    return {name: a.tobytes() for name, a in arrays.items()}


def same(a, b) -> bool:
    if isinstance(a, np.ndarray) or isinstance(b, np.ndarray):
        return np.array_equal(a, b) and np.asarray(a).dtype == np.asarray(b).dtype
    return type(a) is type(b) and a == b


# --- Round trip -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model_class", "options"),
    [
        (VGPMILPRI, {}),
        (VGPMILPR, {}),
        (VGPMILPRI, {"kernel": "matern32", "coupling": 2.0, "mean": -0.7}),
        (VGPMILPRI, {"kernel": "matern52", "variance": 3.3, "lengthscale": 1.7}),
        (VGPMILPR, {"kernel": "linear"}),
        (VGPMILPRI, {"n_components": 2}),
        (VGPMILPR, {"standardize": False}),
        (VGPMILPRI, {"dtype": "float32"}),
        (VGPMILPRI, {"solver": "newton", "tol": 1e-9}),
        (VGPMILPR, {"solver": "sweeps", "max_iter": 7}),
    ],
)
def test_round_trip(model_class, options, cohort, tmp_path):
    model = small(model_class, **options).fit(cohort)
    assert model.save(tmp_path / "model") is None
    loaded = gpmil.load(tmp_path / "model")
    assert type(loaded) is model_class
    assert bits(loaded, cohort) == bits(model, cohort)
    assert loaded.get_params() == model.get_params()
    fitted = {k: v for k, v in vars(model).items() if k.endswith("_")}
    assert {"inducing_points_", "posterior_mean_", "coupling_", "classes_"} <= fitted.keys()
    assert fitted.keys() == {k for k in vars(loaded) if k.endswith("_")}
    assert all(same(value, getattr(loaded, name)) for name, value in fitted.items())


@pytest.mark.parametrize("dtype", [np.float64, np.float32])
def test_round_trip_with_given_inducing_points(dtype, cohort, slides, tmp_path):
    points = np.concatenate(slides["arrays"])[2:40:3].astype(dtype)
    model = small(inducing=points).fit(cohort)
    model.save(tmp_path / "model")
    loaded = gpmil.load(tmp_path / "model")
    assert bits(loaded, cohort) == bits(model, cohort)
    assert same(loaded.inducing, points)
    assert loaded.fit(cohort).posterior_mean_.tobytes() == model.posterior_mean_.tobytes()


@pytest.mark.parametrize("convert", [np.bool_, np.float32, np.uint8])
def test_round_trip_of_classes(convert, cohort, tmp_path):
    model = small().fit(cohort, cohort.labels.astype(convert))
    model.save(tmp_path / "model")
    assert same(gpmil.load(tmp_path / "model").predict(cohort[:4]), model.predict(cohort[:4]))


def test_round_trip_without_geometry(plain, tmp_path):
    model = small(coupling=2.0).fit(plain)
    model.save(tmp_path / "model")
    loaded = gpmil.load(tmp_path / "model")
    assert (loaded.coupling, loaded.coupling_) == (2.0, 0.0)
    assert bits(loaded, plain) == bits(model, plain)


def test_a_loaded_model_can_be_fitted_again(model, folder, cohort):
    loaded = gpmil.load(folder).fit(cohort)
    assert loaded.posterior_mean_.tobytes() == model.posterior_mean_.tobytes()


def test_a_loaded_model_saves_the_same_files(folder, tmp_path):
    gpmil.load(folder).save(tmp_path / "again")
    for name in (ARRAYS, CARD):
        assert (tmp_path / "again" / name).read_bytes() == (folder / name).read_bytes()


def test_saving_changes_nothing_in_the_model(model, tmp_path):
    before = pickle.dumps(model)
    model.save(tmp_path / "model")
    assert pickle.dumps(model) == before


def test_a_loaded_model_refuses_what_the_saved_one_would(folder, slides):
    loaded = gpmil.load(folder)
    narrow = Bags.from_arrays([x[:, :3] for x in slides["arrays"]])
    with pytest.raises(ValueError, match="4 features"):
        loaded.predict(narrow)
    other = Bags.from_arrays(slides["arrays"], metadata={"encoder": "toy-v2"})
    with pytest.raises(ValueError, match="toy-v1"):
        loaded.predict(other)


def test_paths_as_text_and_new_folders(model, cohort, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    model.save("runs/first/model")
    loaded = gpmil.load("runs/first/model")
    assert loaded.predict_proba(cohort[:2]).tobytes() == model.predict_proba(cohort[:2]).tobytes()


def test_settings_that_are_numpy_numbers(cohort, tmp_path):
    given = {
        "coupling": np.float32(0.75),
        "n_inducing": np.int64(9),
        "n_components": np.int32(3),
        "max_iter": np.int64(150),
        "tol": np.float64(1e-9),
        "variance": np.float32(1.5),
        "random_state": np.int64(6),
    }
    model = small(**given).fit(cohort)
    model.save(tmp_path / "model")
    loaded = gpmil.load(tmp_path / "model")
    assert {k: getattr(loaded, k) for k in given} == given
    assert bits(loaded, cohort) == bits(model, cohort)


def test_a_generator_is_not_saved(cohort, tmp_path):
    model = small(random_state=np.random.default_rng(5)).fit(cohort)
    model.save(tmp_path / "model")
    loaded = gpmil.load(tmp_path / "model")
    assert loaded.random_state is None
    assert bits(loaded, cohort) == bits(model, cohort)


# --- The card ---------------------------------------------------------------------------------


def test_card(folder, cohort):
    card = read_card(folder)
    assert card["format"] == "gpmil-model" and card["version"] == persistence.VERSION == 1
    assert card["class"] == "VGPMILPRI"
    for package in ("gpmil", "torch", "gpytorch", "numpy", "scipy", "scikit-learn"):
        assert card["versions"][package] == version(package)
    assert card["versions"]["python"].startswith("3.")
    assert card["settings"]["coupling"] == 0.5 and card["settings"]["n_inducing"] == 12
    assert card["settings"]["solver"] == "direct" and card["settings"]["random_state"] == 3
    assert card["fitted"]["converged_"] is True
    assert card["fitted"]["cohort_"] == {
        "bags": 22,
        "positive": 11,
        "instances": cohort.n_instances,
        "features": 4,
        "graph": "grid4",
        "edges": cohort.adjacency.nnz // 2,
        "encoder": "toy-v1",
    }


def test_card_counts_the_labels_of_the_fit(cohort, tmp_path):
    y = np.arange(len(cohort)) < 5
    small().fit(cohort, y).save(tmp_path / "model")
    assert read_card(tmp_path / "model")["fitted"]["cohort_"]["positive"] == 5


def test_card_without_an_encoder(plain, tmp_path):
    small(VGPMILPR).fit(plain).save(tmp_path / "model")
    assert "encoder" not in read_card(tmp_path / "model")["fitted"]["cohort_"]
    gpmil.load(tmp_path / "model")


LITTER = [".DS_Store", "._model.json", "Thumbs.db", "desktop.ini"]


@pytest.mark.parametrize("name", LITTER)
def test_what_a_desktop_leaves_behind_does_not_count(name, model, folder, cohort, tmp_path):
    (folder / name).write_bytes(b"left by a file manager")
    assert bits(gpmil.load(folder), cohort) == bits(model, cohort)
    model.save(folder)
    assert sorted(p.name for p in folder.iterdir()) == [CARD, ARRAYS]
    empty = tmp_path / "opened once"
    empty.mkdir()
    (empty / name).write_bytes(b"left by a file manager")
    model.save(empty)
    assert bits(gpmil.load(empty), cohort) == bits(model, cohort)


def test_the_device_is_not_saved(folder):
    assert "device" not in read_card(folder)["settings"]
    assert gpmil.load(folder).device is None


# --- Damage -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def files(model, tmp_path_factory) -> dict[str, bytes]:
    folder = tmp_path_factory.mktemp("saved") / "model"
    model.save(folder)
    return {name: (folder / name).read_bytes() for name in (ARRAYS, CARD)}


@quick
@given(data=st.data())
def test_a_flipped_bit_in_the_arrays(data, files, tmp_path):
    payload = bytearray(files[ARRAYS])
    place = data.draw(st.integers(0, len(payload) - 1))
    payload[place] ^= 1 << data.draw(st.integers(0, 7))
    (tmp_path / ARRAYS).write_bytes(payload)
    (tmp_path / CARD).write_bytes(files[CARD])
    refused(tmp_path, ARRAYS, "corrupted")


@quick
@given(data=st.data())
def test_truncated_arrays(data, files, tmp_path):
    length = data.draw(st.integers(0, len(files[ARRAYS]) - 1))
    (tmp_path / ARRAYS).write_bytes(files[ARRAYS][:length])
    (tmp_path / CARD).write_bytes(files[CARD])
    refused(tmp_path, ARRAYS, "corrupted")


@quick
@given(data=st.data())
def test_truncated_card(data, files, tmp_path):
    text = files[CARD].rstrip()
    (tmp_path / ARRAYS).write_bytes(files[ARRAYS])
    (tmp_path / CARD).write_bytes(text[: data.draw(st.integers(0, len(text) - 1))])
    refused(tmp_path, CARD, "corrupted")


@pytest.mark.parametrize("text", [b"", b"not json", b"\xff\xfe\x00", b'{"format": }'])
def test_a_card_that_is_no_json(text, folder):
    (folder / CARD).write_bytes(text)
    refused(folder, CARD, "corrupted", "JSON")


@pytest.mark.parametrize("card", [[], {}, 7, None, {"format": "other"}, {"version": 1}])
def test_a_card_of_something_else(card, folder):
    write_card(folder, card)
    refused(folder, CARD, "gpmil")


def test_a_changed_number_in_the_card(folder):
    text = (folder / CARD).read_text()
    (folder / CARD).write_text(text.replace('"coupling_": 0.5', '"coupling_": 0.7'))
    assert '"coupling_": 0.7' in (folder / CARD).read_text()
    refused(folder, CARD, "corrupted")


def test_arrays_of_another_model(folder, cohort, tmp_path):
    small(VGPMILPRI, random_state=4).fit(cohort).save(tmp_path / "other")
    (folder / ARRAYS).write_bytes((tmp_path / "other" / ARRAYS).read_bytes())
    refused(folder, ARRAYS, "another model")


@pytest.mark.parametrize("number", [persistence.VERSION + 1, 99])
def test_a_newer_version(number, folder):
    write_card(folder, read_card(folder) | {"version": number})
    refused(folder, str(number), "newer", "upgrade")


@pytest.mark.parametrize("number", ["1", None, 1.5, -1, 0])
def test_a_version_that_never_was(number, folder):
    write_card(folder, read_card(folder) | {"version": number})
    refused(folder, "version", str(number))


@pytest.mark.parametrize("name", ["DeepSetsMIL", "object", None, ["VGPMILPRI"]])
def test_another_class(name, folder):
    rewrite(folder, **{"class": name})
    refused(folder, str(name), "VGPMILPRI", "VGPMILPR")


@pytest.mark.parametrize("part", ["settings", "fitted", "kernel_object"])
def test_a_part_of_the_card_is_missing(part, folder):
    rewrite(folder, without=part)
    refused(folder, str(folder), "corrupted", part)


@pytest.mark.parametrize("part", ["settings", "fitted"])
@pytest.mark.parametrize("value", [None, "text", [1, 2], 7])
def test_a_part_of_the_card_is_something_else(part, value, folder):
    rewrite(folder, **{part: value})
    refused(folder, str(folder), "corrupted")


def test_a_setting_nobody_knows(folder):
    rewrite(folder, settings=read_card(folder)["settings"] | {"strength": 3})
    refused(folder, "corrupted", "strength")


@pytest.mark.parametrize(
    "name",
    ["inducing_points_", "posterior_mean_", "whitened_mean_", "feature_scale_", "classes_"],
)
def test_an_array_is_missing(name, folder):
    rewrite(folder, without=name)
    refused(folder, str(folder), name)


@pytest.mark.parametrize("name", [ARRAYS, CARD])
def test_a_missing_file(name, folder):
    (folder / name).unlink()
    refused(folder, name, "missing", str(folder))


def test_no_model_there(tmp_path):
    refused(tmp_path / "nothing", "no gpmil model", "nothing")
    (tmp_path / "file").write_text("text")
    refused(tmp_path / "file", "no gpmil model", "file")


# --- Damage that a checksum does not tell ------------------------------------------------------


def with_arrays(folder: Path, **changed) -> None:
    """Other arrays, with the checksum of the writer itself."""
    arrays, card = persistence.read(folder)
    card = {k: v for k, v in card.items() if k not in ("format", "version", "sha256")}
    persistence.write(folder, arrays | changed, card)


def with_fitted(folder: Path, **changed) -> None:
    rewrite(folder, fitted=read_card(folder)["fitted"] | changed)


@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize(
    "name",
    ["inducing_points_", "posterior_mean_", "posterior_covariance_", "whitened_mean_",
     "whitened_precision_", "feature_mean_", "feature_scale_"],
)  # fmt: skip
def test_numbers_that_are_none_are_refused_by_name(name, value, folder):
    array = persistence.read(folder)[0][name].copy()
    array.flat[1] = value
    with_arrays(folder, **{name: array})
    refused(folder, str(folder), ARRAYS, name, "1 of them NaN or infinite", "fit and save anew")


@pytest.mark.parametrize(
    ("name", "change", "telling"),
    [
        ("whitened_mean_", lambda a: a[:-1], "shape (M,) with M = 12, found (11,)"),
        ("inducing_points_", lambda a: a[:, :3], "shape (M, D) with M = 12, D = 4, found (12, 3)"),
        ("inducing_points_", lambda a: a[:0], "found (0, 4)"),
        ("feature_mean_", lambda a: a[None], "shape (D,) with D = 4, found (1, 4)"),
        ("feature_scale_", lambda a: a[:1], "feature_scale_: expected 4 numbers, found 1"),
        ("feature_scale_", lambda a: -a, "numbers > 0"),
        ("feature_scale_", lambda a: 0 * a, "numbers > 0"),
        ("whitened_mean_", lambda a: a.astype("f4"), "float64 numbers, found float32"),
        ("whitened_precision_", lambda a: 0.1 * a, "I + W'W"),
        ("whitened_precision_", lambda a: a + np.triu(np.ones_like(a)), "I + W'W"),
        ("posterior_covariance_", lambda a: -a, "positive definite"),
        ("posterior_mean_", lambda a: a[::-1].copy(), "does not follow"),
        ("inducing_points_", lambda a: a + np.arange(12.0)[:, None], "does not follow"),
        ("classes_", lambda a: a[::-1].copy(), "the smaller first"),
        ("classes_", lambda a: 0 * a, "the smaller first"),
        ("classes_", lambda a: np.arange(3), "shape (2,), found (3,)"),
    ],
)
def test_arrays_that_no_fit_leaves_are_refused(name, change, telling, folder):
    with_arrays(folder, **{name: np.ascontiguousarray(change(persistence.read(folder)[0][name]))})
    refused(folder, ARRAYS, name, telling)


@pytest.mark.parametrize(
    "changed",
    [
        {"variance_": -1.0}, {"variance_": None}, {"lengthscale_": 0}, {"lengthscale_": "long"},
        {"variance_": 10**400}, {"mean_": float("nan")}, {"mean_": None}, {"coupling_": -0.5},
        {"coupling_": 1e300}, {"n_iter_": 2.5}, {"converged_": "yes"}, {"residual_": -1},
        {"n_features_in_": 5}, {"n_features_in_": True}, {"cohort_": []}, {"cohort_": {"bags": -1}},
        {"cohort_": {"encoder": 3}}, {"tuning_trace_": [{}]}, {"loo_log_likelihood_": "x"},
    ],
    ids=str,
)  # fmt: skip
def test_fitted_numbers_that_cannot_be_are_refused(changed, folder):
    with_fitted(folder, **changed)
    refused(folder, "corrupted", next(iter(changed)).replace("n_features_in_", "feature"))


@pytest.mark.parametrize(
    "changed",
    [
        {"n_inducing": 1}, {"n_inducing": "many"}, {"solver": "magic"}, {"tol": 0},
        {"tol": "small"},
        {"lengthscale": [1.0, 2.0]}, {"lengthscale": [[1.0], [2.0]]}, {"variance": 10**400},
        {"optimize": 3}, {"optimize": ["everything"]}, {"random_state": {"a": 1}}, {"flags": None},
        {"inducing": 7}, {"n_components": 2}, {"calibrated": True}, {"coupling": "strong"},
    ],
    ids=str,
)  # fmt: skip
def test_settings_that_fit_refuses_are_refused(changed, folder):
    rewrite(folder, settings=read_card(folder)["settings"] | changed)
    (name,) = changed
    refused(folder, "corrupted", {"calibrated": "folds"}.get(name, name))


def test_a_setting_of_a_newer_version_says_so(folder):
    rewrite(folder, settings=read_card(folder)["settings"] | {"wisdom": 3})
    refused(folder, "'wisdom' is no setting of VGPMILPRI", "newer gpmil", "upgrade")


def test_an_error_of_our_own_is_not_called_damage(folder, monkeypatch):
    def broken(*_):
        raise KeyError("a mistake in gpmil")

    monkeypatch.setattr(VGPMILPRI, "_restore_folds", broken)
    with pytest.raises(KeyError, match="a mistake in gpmil"):
        gpmil.load(folder)


@pytest.mark.parametrize("size", [1.0, 1e40])
def test_features_out_of_range_predict_no_nan(size, cohort, folder):
    far = Bags.from_arrays([size * x for x in cohort.split(cohort.features)])
    for loaded in (gpmil.load(folder), gpmil.MeanPoolMIL(max_epochs=1, random_state=0).fit(cohort)):
        far_too_far = size > 1 and isinstance(loaded, gpmil.MeanPoolMIL)
        if far_too_far:
            with pytest.raises(ValueError, match="predicts NaN or infinite"):
                loaded.predict_proba(far)
        else:
            assert np.isfinite(loaded.predict_proba(far)).all()


@pytest.mark.parametrize(
    ("old", "new", "telling"),
    [
        (b'"class"', b'"class": "VGPMIL", "class"', "twice"),
        (b'"VGPMILPRI"', b"[" * 100_000, "RecursionError"),
        (b'"VGPMILPRI"', b'"\\ud800"', "surrogates"),
        (b'"VGPMILPRI"', b"9" * 5000, "digits"),
        (b'"VGPMILPRI"', b'"\xff"', "UnicodeDecodeError"),
    ],
    ids=["twice", "deep", "half a character", "digits", "bytes"],
)
def test_a_card_that_json_alone_would_let_through(old, new, telling, folder):
    text = (folder / CARD).read_bytes()
    (folder / CARD).write_bytes(text.replace(old, new, 1))
    refused(folder, CARD, "JSON", telling, "corrupted")


@pytest.mark.parametrize("name", [ARRAYS, CARD])
@pytest.mark.parametrize("make", [os.mkdir, os.mkfifo], ids=["folder", "pipe"])
def test_what_is_no_file_is_not_waited_for(make, name, folder):
    (folder / name).unlink()
    make(folder / name)
    refused(folder, name, "no regular file")


@pytest.fixture(scope="module")
def flagged(cohort, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("flagged") / "model"
    small(calibrated=True, flags=True, n_folds=2).fit(cohort).save(folder)
    return folder


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("cross_fit.labels", lambda a: 2 * a),
        ("cross_fit.groups", lambda a: a[:-1]),
        ("cross_fit.fold", lambda a: a + 1),
        ("cross_fit.log_odds", lambda a: a * np.nan),
        ("reference.scores", lambda a: a[::-1].copy()),
        ("reference.offsets", lambda a: a[:-1]),
        ("reference.offsets", lambda a: a - 1),
        ("reference.bag", lambda a: a.astype("f8")),
        ("fold1.whitened_precision_", lambda a: -a),
    ],
)
def test_a_damaged_cross_fit(name, change, flagged, tmp_path):
    arrays, card = persistence.read(flagged)
    persistence.write(tmp_path / "model", arrays | {name: change(arrays[name])}, card)
    card = read_card(tmp_path / "model")
    refused(tmp_path / "model", *(["fold 1"] if "fold1" in name else []), name.split(".")[-1])


@pytest.mark.parametrize(
    "changed",
    [
        {"slope": -1.0}, {"slope": None}, {"intercept": float("inf")}, {"method": "magic"},
        {"method": "isotonic"}, {"method": "sigmoid", "knots": [0.0], "values": [2.0]},
        {"more": 1},
    ],
    ids=str,
)  # fmt: skip
def test_a_damaged_calibrator(changed, flagged, tmp_path):
    arrays, card = persistence.read(flagged)
    card["calibrator"] |= changed
    persistence.write(tmp_path / "model", arrays, card)
    refused(tmp_path / "model", "calibrator")
    persistence.write(tmp_path / "model", arrays, card | {"calibrator": None})
    refused(tmp_path / "model", "calibrator", "as settings say")


def test_a_calibrator_of_an_earlier_version(flagged, tmp_path):
    arrays, card = persistence.read(flagged)
    card["calibrator"] |= {"method": "sigmoid", "knots": [], "values": []}
    persistence.write(tmp_path / "old", arrays, card)
    expected = gpmil.load(flagged).cross_fit_.calibrator
    assert gpmil.load(tmp_path / "old").cross_fit_.calibrator == expected


@pytest.mark.parametrize(
    ("make", "name", "change"),
    [
        (gpmil.MeanPoolMIL, "weights.embed.weight", lambda a: a * np.nan),
        (gpmil.MeanPoolMIL, "weights.embed.weight", lambda a: a.astype("f8")),
        (gpmil.MaxPoolMIL, "weights.classify.weight", lambda a: a.T.copy()),
        (gpmil.AttentionMIL, "weights.attend.bias", lambda a: a[:-1]),
        (gpmil.AttentionMIL, "weights.attend.bias", lambda a: a / 0),
    ],
)
def test_damaged_weights(make, name, change, cohort, tmp_path):
    model = make(max_epochs=1, hidden_dim=5, random_state=0).fit(cohort)
    model.save(tmp_path / "model")
    arrays, card = persistence.read(tmp_path / "model")
    with np.errstate(all="ignore"):
        persistence.write(tmp_path / "model", arrays | {name: change(arrays[name])}, card)
    refused(tmp_path / "model", ARRAYS, name)
    architecture = card["fitted"]["architecture_"] | {"hidden_dim": 10**12}
    fitted = card["fitted"] | {"architecture_": architecture}
    persistence.write(tmp_path / "model", arrays, card | {"fitted": fitted})
    refused(tmp_path / "model", CARD, "architecture_", "as settings say")


def test_damaged_layers(cohort, tmp_path):
    gpmil.PseudoLabelMIL(hidden=3, n_rounds=1, random_state=0).fit(cohort).save(tmp_path / "model")
    arrays, card = persistence.read(tmp_path / "model")
    for name in ("layer0.weight", "layer1.bias"):
        persistence.write(tmp_path / "model", arrays | {name: arrays[name] * np.nan}, card)
        refused(tmp_path / "model", name)
        persistence.write(tmp_path / "model", {k: v for k, v in arrays.items() if k != name}, card)
        refused(tmp_path / "model", name, "missing")
    odd = {"name": "LogisticRegression", "settings": {"C": -1.0}}
    persistence.write(tmp_path / "model", arrays, card | {"classifier": odd})
    refused(tmp_path / "model", "classifier", "C")


# --- Nothing is executed ----------------------------------------------------------------------


class Bomb:
    """Unpickled, it makes a folder."""

    def __init__(self, mark: Path):
        self.mark = mark

    def __reduce__(self):
        return os.mkdir, (str(self.mark),)


@pytest.mark.parametrize("writer", [pickle.dump, torch.save])
def test_pickled_bytes_are_not_opened(writer, folder, tmp_path):
    bomb, mark = tmp_path / "bomb", tmp_path / "exploded"
    with bomb.open("wb") as file:
        writer(Bomb(mark), file)
    replace_arrays(folder, bomb.read_bytes())
    refused(folder, ARRAYS)
    assert not mark.exists()
    # and without a checksum that fits
    write_card(folder, read_card(folder) | {"sha256": "0" * 64})
    refused(folder, ARRAYS)
    assert not mark.exists()


def test_loading_unpickles_nothing(folder, monkeypatch):
    def never(*_, **__):
        raise AssertionError("a pickle was opened")

    for module, name in [(pickle, "load"), (pickle, "loads"), (pickle, "Unpickler")]:
        monkeypatch.setattr(module, name, never)
    monkeypatch.setattr(torch, "load", never)
    monkeypatch.setattr(np, "load", never)
    gpmil.load(folder)


def test_files_are_safetensors_and_json_only(folder, model):
    assert sorted(p.name for p in folder.iterdir()) == [CARD, ARRAYS]
    arrays = load_file(folder / ARRAYS)
    assert same(arrays["posterior_mean_"], model.posterior_mean_)
    assert not any(a.dtype == object for a in arrays.values())


# --- Writing ----------------------------------------------------------------------------------


def tree(root: Path) -> dict[str, bytes | None]:
    """Everything below a folder, hidden things too."""
    return {
        str(p.relative_to(root)): p.read_bytes() if p.is_file() else None
        for p in sorted(root.rglob("*"))
    }


def test_saving_over_a_model(folder, cohort, tmp_path):
    other = small(VGPMILPR, random_state=4).fit(cohort)
    other.save(folder)
    assert bits(gpmil.load(folder), cohort) == bits(other, cohort)
    assert tree(tmp_path).keys() == {"model", f"model/{ARRAYS}", f"model/{CARD}"}


def test_saving_into_an_empty_folder(model, tmp_path):
    (tmp_path / "model").mkdir()
    model.save(tmp_path / "model")
    gpmil.load(tmp_path / "model")


@pytest.mark.parametrize(
    "files",
    [
        {"patients.csv": "name,label"},
        {"patients.csv": "name,label", "model.json": "{}"},
        {"model.json": '{"format": "layers-model"}', "weights.bin": "0101"},
        {ARRAYS: "weights of something else"},
    ],
)
def test_a_folder_of_something_else_is_left_alone(files, model, tmp_path):
    foreign = tmp_path / "foreign"
    foreign.mkdir()
    for name, text in files.items():
        (foreign / name).write_text(text)
    before = tree(tmp_path)
    with pytest.raises(ValueError, match="foreign"):
        model.save(foreign)
    assert tree(tmp_path) == before


def test_what_lies_beside_a_saved_model_is_not_lost(model, folder):
    (folder / "notes.txt").write_text("the model of the second submission")
    try:
        model.save(folder)
    except ValueError as error:
        assert "notes.txt" in str(error) or str(folder) in str(error)
    assert (folder / "notes.txt").exists()


def test_a_file_is_left_alone(model, tmp_path):
    (tmp_path / "results").write_text("text")
    with pytest.raises(ValueError, match=r"results.*file"):
        model.save(tmp_path / "results")
    assert tree(tmp_path) == {"results": b"text"}


def full_disk(*_, **__):
    raise OSError(errno.ENOSPC, "No space left on device")


def fail_at(number: int, call):
    """`call`, but the given one of its calls fails."""
    count = iter(range(1, 100))
    return lambda *a, **k: full_disk() if next(count) == number else call(*a, **k)


@pytest.mark.parametrize("method", ["write_bytes", "write_text"])
@pytest.mark.parametrize("over", [False, True])
def test_nothing_is_left_of_a_failed_write(method, over, cohort, model, tmp_path, monkeypatch):
    if over:
        model.save(tmp_path / "model")
    before = tree(tmp_path)
    other = small(random_state=4).fit(cohort)
    with monkeypatch.context() as patch:
        patch.setattr(Path, method, full_disk)
        with pytest.raises(OSError, match="No space left"):
            other.save(tmp_path / "model")
    assert tree(tmp_path) == before


@pytest.mark.parametrize(("over", "number"), [(False, 1), (True, 1), (True, 2)])
def test_nothing_is_lost_in_a_failed_rename(over, number, cohort, model, tmp_path, monkeypatch):
    if over:
        model.save(tmp_path / "model")
    before = tree(tmp_path)
    other = small(random_state=4).fit(cohort)
    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", fail_at(number, os.replace))
        with pytest.raises(OSError, match="No space left"):
            other.save(tmp_path / "model")
    assert tree(tmp_path) == before


def test_what_cannot_be_written_leaves_nothing(slides, tmp_path):
    model = small(VGPMILPR).fit(Bags.from_arrays(slides["arrays"], slides["labels"]))
    model.cohort_["encoder"] = {1, 2}
    with pytest.raises((TypeError, ValueError)):
        model.save(tmp_path / "model")
    assert tree(tmp_path) == {}


# --- Kernel objects ---------------------------------------------------------------------------


def product(nu: float = 1.5, n: int | None = 4) -> gpytorch.kernels.Kernel:
    return gpytorch.kernels.ScaleKernel(gpytorch.kernels.MaternKernel(nu=nu, ard_num_dims=n))


@pytest.fixture(scope="module")
def kernel():
    made = product()
    made.outputscale = 1.9
    made.base_kernel.lengthscale = torch.tensor([1.1, 2.3, 0.7, 3.1])
    return made


@pytest.fixture
def kernel_folder(kernel, cohort, tmp_path) -> Path:
    small(kernel=kernel).fit(cohort).save(tmp_path / "model")
    return tmp_path / "model"


def test_kernel_object(kernel, kernel_folder, cohort):
    model = small(kernel=kernel).fit(cohort)
    loaded = gpmil.load(kernel_folder, kernel=product())
    assert bits(loaded, cohort) == bits(model, cohort)
    assert loaded.kernel.outputscale.item() == kernel.outputscale.item()
    assert torch.equal(loaded.kernel.base_kernel.lengthscale, kernel.base_kernel.lengthscale)
    assert read_card(kernel_folder)["kernel_object"] == "ScaleKernel"


def test_kernel_object_in_double_precision(kernel, cohort, tmp_path):
    double = copy.deepcopy(kernel).double()
    double.outputscale = 1.0 + 1e-12
    model = small(kernel=double).fit(cohort)
    model.save(tmp_path / "model")
    loaded = gpmil.load(tmp_path / "model", kernel=product().double())
    assert bits(loaded, cohort) == bits(model, cohort)


def test_a_kernel_object_is_needed(kernel_folder):
    refused(kernel_folder, "ScaleKernel", "kernel=")


def test_another_kernel_object(kernel_folder):
    refused(kernel_folder, "ScaleKernel", kernel=gpytorch.kernels.RBFKernel())
    refused(kernel_folder, "ScaleKernel", kernel="rbf")


def test_a_kernel_object_of_another_shape(kernel_folder):
    refused(kernel_folder, "kernel", kernel=product(n=None))
    refused(kernel_folder, "kernel", kernel=product(n=7))


def test_a_kernel_object_of_another_kind_inside(kernel_folder):
    # nothing in the parameters tells a Matern kernel of another order; its values do
    refused(kernel_folder, "kernel", kernel=product(nu=2.5))


def test_a_kernel_object_for_a_model_with_a_named_kernel(folder):
    refused(folder, "kernel", "'rbf'", kernel=product())
