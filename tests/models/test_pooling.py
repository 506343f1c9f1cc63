"""Mean and maximum pooling, and the contract that they share with attention."""

import copy
import json
import logging
import pickle

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles import attention as oracle
from scipy.special import expit
from sklearn.base import clone, is_classifier
from sklearn.exceptions import NotFittedError
from sklearn.metrics import roc_auc_score
from sklearn.model_selection import GridSearchCV, StratifiedKFold, cross_val_predict
from synthetic import small_cohort, standardised

from gpmil import Bags
from gpmil.files import persistence
from gpmil.models import batches, deep
from gpmil.models.attention import AttentionMIL
from gpmil.models.batches import BatchSource, Inputs
from gpmil.models.pooling import MaxPoolMIL, MeanPoolMIL
from gpmil.models.training import Training, hold_out
from gpmil.process.features import standardizer

CPU = torch.device("cpu")
MODELS = [AttentionMIL, MeanPoolMIL, MaxPoolMIL]
LOGITS = {MeanPoolMIL: oracle.mean_logit, MaxPoolMIL: oracle.max_logit}

each = pytest.mark.parametrize("model_class", MODELS)
pooling = pytest.mark.parametrize("model_class", LOGITS)
METHODS = ("predict", "predict_proba", "decision_function", "log_proba_negative", "score")


def small(model_class=MeanPoolMIL, **given):
    return model_class(**({"hidden_dim": 6, "max_epochs": 4, "random_state": 3} | given))


def same_weights(a, b) -> bool:
    return a.weights_.keys() == b.weights_.keys() and all(
        np.array_equal(v, b.weights_[k]) for k, v in a.weights_.items()
    )


@pytest.fixture
def said(caplog):
    caplog.set_level("WARNING", logger="gpmil")
    return lambda: [record.getMessage() for record in caplog.records]


# --- The forward pass -------------------------------------------------------------------------


@pooling
@pytest.mark.parametrize(("dtype", "tolerance"), [("float64", 1e-12), ("float32", 1e-5)])
def test_forward_pass_is_the_loop(model_class, dtype, tolerance):
    bags = small_cohort(seed=5)
    model = small(model_class, dtype=dtype).fit(bags)
    weights = {k: v.astype(float) for k, v in model.weights_.items()}
    expected = [LOGITS[model_class](x, weights) for x in standardised(bags)]
    found = model.decision_function(bags)
    np.testing.assert_allclose(found, expected, rtol=tolerance, atol=tolerance)
    np.testing.assert_allclose(model.predict_proba(bags)[:, 1], expit(expected), atol=tolerance)
    value, error = model.log_proba_negative(bags)
    np.testing.assert_allclose(value, -np.logaddexp(0, expected), atol=tolerance)
    np.testing.assert_array_equal(error, 0)


@each
@pytest.mark.parametrize("rows", [1, 20, 10_000])
def test_predictions_do_not_depend_on_the_batch(model_class, rows, monkeypatch):
    bags = small_cohort(seed=5)
    model = small(model_class, dtype="float64").fit(bags)
    whole = model.decision_function(bags)
    monkeypatch.setattr(BatchSource.runs, "__defaults__", (rows,))
    np.testing.assert_allclose(model.decision_function(bags), whole, rtol=1e-12)
    alone = np.concatenate([model.decision_function(bag) for bag in bags])
    np.testing.assert_allclose(alone, whole, rtol=1e-12)


@pooling
def test_order_within_a_bag_does_not_matter(model_class):
    bags = small_cohort(seed=8)
    model = small(model_class, dtype="float64").fit(bags)
    rng = np.random.default_rng(0)
    shuffled = Bags.from_arrays([rng.permutation(x) for x in bags.split(bags.features)])
    np.testing.assert_allclose(
        model.decision_function(shuffled), model.decision_function(bags), rtol=1e-11
    )


def test_one_instance_a_bag_makes_the_poolings_one():
    """Mean and maximum of one instance are that instance."""
    rng = np.random.default_rng(1)
    bags = Bags.from_arrays([rng.normal(size=(1, 3)) for _ in range(12)], [0, 1] * 6)
    mean, most = small(MeanPoolMIL, dtype="float64").fit(bags), small(MaxPoolMIL, dtype="float64")
    most.fit(bags)
    np.testing.assert_allclose(
        mean.decision_function(bags), most.decision_function(bags), rtol=1e-10
    )


# --- Instances --------------------------------------------------------------------------------


def test_instances_of_maximum_pooling():
    bags = small_cohort(seed=5)
    model = small(MaxPoolMIL, dtype="float64").fit(bags)
    found = model.predict_instances(bags)
    inputs = standardised(bags)
    expected = np.concatenate([oracle.instance_logits(x, model.weights_) for x in inputs])
    np.testing.assert_allclose(found.mean, expected, atol=1e-12)
    np.testing.assert_allclose(found.probability, expit(expected), atol=1e-12)
    np.testing.assert_allclose(found.std, np.sqrt(np.pi**2 / 3))
    largest = [part.mean.max() for part in found.split()]
    np.testing.assert_allclose(model.decision_function(bags), largest, rtol=1e-10)
    assert len(found.to_frame()) == bags.n_instances


def test_the_spread_is_that_of_the_logistic():
    """P(m > 0) = sigmoid(logit) for m logistic about the logit; its deviation is pi / sqrt 3."""
    uniform = (np.arange(200_000) + 0.5) / 200_000
    m = 0.7 + np.log(uniform / (1 - uniform))
    assert (m > 0).mean() == pytest.approx(expit(0.7), abs=1e-5)
    assert m.std() == pytest.approx(np.pi / np.sqrt(3), rel=1e-3)


def test_mean_pooling_has_no_instances(cohort):
    with pytest.raises(ValueError, match=r"no probability for an instance.*VGPMILPRI"):
        small().fit(cohort).predict_instances(cohort)


# --- The scikit-learn contract ----------------------------------------------------------------


@each
def test_clone_set_params_and_tags(model_class, cohort):
    model = small(model_class, dropout=0.3, learning_rate=2e-3).fit(cohort)
    twin = clone(model)
    assert twin.get_params() == model.get_params()
    assert is_classifier(twin)
    with pytest.raises(NotFittedError):
        twin.predict(cohort)
    assert twin.set_params(hidden_dim=5).hidden_dim == 5
    assert same_weights(twin.set_params(hidden_dim=6).fit(cohort), model)


@each
def test_settings_changed_after_fit_wait_for_the_next(model_class, cohort):
    model = small(model_class).fit(cohort)
    before = model.predict_proba(cohort)
    model.set_params(hidden_dim=11, dtype="float64", n_components=2, standardize=False)
    np.testing.assert_array_equal(model.predict_proba(cohort), before)


@each
def test_search_and_cross_validation(model_class, cohort):
    folds = StratifiedKFold(3, shuffle=True, random_state=4)
    search = GridSearchCV(small(model_class), {"learning_rate": [1e-4, 1e-2]}, cv=folds)
    search.fit(cohort, cohort.labels)
    assert set(search.predict(cohort)) <= {0, 1}
    p = cross_val_predict(
        small(model_class), cohort, cohort.labels, cv=folds, method="predict_proba"
    )
    assert p.shape == (len(cohort), 2)
    np.testing.assert_allclose(p.sum(1), 1)


@each
def test_pickle_and_copy(model_class, cohort):
    model = small(model_class).fit(cohort)
    for twin in (pickle.loads(pickle.dumps(model)), copy.deepcopy(model)):
        np.testing.assert_array_equal(twin.predict_proba(cohort), model.predict_proba(cohort))


@each
def test_labels_given_win_and_come_back(model_class, cohort):
    y = (1 - cohort.labels).astype(bool)
    model = small(model_class, max_epochs=30, learning_rate=1e-2).fit(cohort, y)
    assert set(model.predict(cohort)) <= {True, False}
    assert model.score(cohort, y) > 0.7
    np.testing.assert_array_equal(model.classes_, [False, True])


# --- Seeds ------------------------------------------------------------------------------------


@each
def test_same_seed_same_numbers(model_class, cohort):
    given = {"dropout": 0.4, "validation": 0.2, "batch_size": 3}
    first, again = (small(model_class, **given).fit(cohort) for _ in range(2))
    assert same_weights(first, again)
    assert first.history_ == again.history_
    assert not same_weights(first, small(model_class, **given, random_state=4).fit(cohort))


@each
def test_no_global_random_state_is_touched(model_class, cohort):
    torch_state, numpy_state = torch.get_rng_state(), np.random.get_state()  # noqa: NPY002
    small(model_class, dropout=0.4, validation=0.2).fit(cohort).predict(cohort)
    assert torch.equal(torch.get_rng_state(), torch_state)
    assert np.array_equal(np.random.get_state()[1], numpy_state[1])  # noqa: NPY002


def test_a_generator_moves_on(cohort):
    rng = np.random.default_rng(0)
    first, second = (small(random_state=rng).fit(cohort) for _ in range(2))
    assert not same_weights(first, second)


# --- Files ------------------------------------------------------------------------------------


@each
@pytest.mark.parametrize("extra", [{}, {"n_components": 3, "dtype": "float64"}], ids=str)
def test_saved_and_loaded(model_class, extra, cohort, tmp_path):
    model = small(model_class, validation=0.2, **extra).fit(cohort)
    model.save(tmp_path / "model")
    arrays, card = persistence.read(tmp_path / "model")
    assert card["class"] == model_class.__name__
    loaded = model_class._from_saved(arrays, card)
    np.testing.assert_array_equal(loaded.predict_proba(cohort), model.predict_proba(cohort))
    assert loaded.get_params() == model.get_params()
    for name in ("cohort_", "history_", "n_epochs_", "best_epoch_", "converged_", "n_features_in_"):
        assert getattr(loaded, name) == getattr(model, name)


def test_a_loaded_model_has_no_kernel(cohort, tmp_path):
    small().fit(cohort).save(tmp_path / "model")
    with pytest.raises(ValueError, match="has no kernel"):
        MeanPoolMIL._from_saved(*persistence.read(tmp_path / "model"), kernel="rbf")


@pytest.mark.parametrize("damage", ["missing", "shape", "surplus"])
def test_weights_that_do_not_fit(damage, cohort, tmp_path):
    small().fit(cohort).save(tmp_path / "model")
    arrays, card = persistence.read(tmp_path / "model")
    if damage == "missing":
        del arrays["weights.embed.bias"]
    else:
        arrays["weights.embed.bias" if damage == "shape" else "weights.x"] = np.zeros(99)
    with pytest.raises(ValueError, match=r"weights\.(embed\.bias|x)"):
        MeanPoolMIL._from_saved(arrays, card)


def test_an_unfitted_model_cannot_be_saved(tmp_path):
    with pytest.raises(NotFittedError):
        small().save(tmp_path / "model")
    assert not (tmp_path / "model").exists()


def test_the_card_is_plain_json(cohort, tmp_path):
    small(random_state=np.random.default_rng(0)).fit(cohort).save(tmp_path / "model")
    card = json.loads((tmp_path / "model" / "model.json").read_text())
    assert card["settings"]["random_state"] is None
    assert "device" not in card["settings"]


# --- What is refused --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("setting", "telling"),
    [
        ({"hidden_dim": 0}, "hidden_dim must be a whole number >= 1, got 0"),
        ({"hidden_dim": 2.5}, "hidden_dim must be a whole number"),
        ({"dropout": 1.0}, "dropout must be below 1"),
        ({"dropout": -0.1}, "dropout must be a finite number >= 0"),
        ({"learning_rate": 0}, "learning_rate must be a finite number > 0"),
        ({"learning_rate": "fast"}, "learning_rate must be"),
        ({"weight_decay": -1}, "weight_decay must be a finite number >= 0"),
        ({"max_epochs": 0}, "max_epochs must be a whole number >= 1"),
        ({"batch_size": None}, "batch_size must be a whole number"),
        ({"patience": 0}, "patience must be a whole number"),
        ({"validation": 0.7}, "validation must be None or a share of the bags up to 0.5"),
        ({"validation": 0}, "validation must be a finite number > 0"),
        ({"class_weight": "even"}, r"class_weight must be one of \['balanced'\], got 'even'"),
        ({"standardize": "no"}, "standardize must be True or False"),
        ({"verbose": 1}, "verbose must be True or False"),
        ({"n_components": 5}, "n_components must be between 1 and 4"),
        ({"n_components": 0}, "n_components must be a whole number >= 1"),
        ({"random_state": "x"}, "random_state must be a whole number"),
        ({"device": "tpu"}, "device must be 'cpu', 'cuda' or None"),
        ({"dtype": "float16"}, "dtype must be one of"),
    ],
    ids=str,
)
@each
def test_settings(model_class, setting, telling, cohort):
    with pytest.raises(ValueError, match=telling):
        small(model_class, **setting).fit(cohort)


@each
def test_bags_that_cannot_be_fitted(model_class, cohort, slides):
    model = small(model_class)
    with pytest.raises(ValueError, match="have no label"):
        model.fit(Bags.from_arrays(slides["arrays"]))
    with pytest.raises(ValueError, match=r"all .* bags have label 1"):
        model.fit(cohort[cohort.labels == 1])
    with pytest.raises(ValueError, match="no bags to fit"):
        model.fit(cohort[[]])
    with pytest.raises(ValueError, match=r"expected gpmil\.Bags, got list"):
        model.fit(slides["arrays"], slides["labels"])
    with pytest.raises(ValueError, match="one label per bag"):
        model.fit(cohort, cohort.labels[:-1])
    assert not hasattr(model, "weights_")


@each
def test_bags_that_cannot_be_predicted(model_class, cohort, slides):
    model = small(model_class).fit(cohort)
    wide = Bags.from_arrays([np.hstack([x, x]) for x in slides["arrays"]], slides["labels"])
    for method in METHODS:
        with pytest.raises(ValueError, match="fitted on 4 features"):
            getattr(model, method)(wide)
        with pytest.raises(NotFittedError):
            getattr(small(model_class), method)(cohort)


@each
def test_unlabelled_bags_and_no_bags_can_be_predicted(model_class, cohort, slides):
    model = small(model_class).fit(cohort)
    unlabelled = Bags.from_arrays(slides["arrays"], coords=slides["coords"], step=256)
    np.testing.assert_array_equal(model.predict_proba(unlabelled), model.predict_proba(cohort))
    assert model.predict_proba(cohort[[]]).shape == (0, 2)
    assert model.predict(cohort[[]]).shape == (0,)


@each
def test_a_failed_fit_leaves_the_model_as_it_was(model_class, cohort):
    model = small(model_class).fit(cohort)
    before, p = dict(model.__dict__), model.predict_proba(cohort)
    model.set_params(learning_rate=1e30, max_epochs=9)
    with pytest.raises(ValueError, match=r"training diverged in epoch .* Lower learning_rate"):
        model.fit(cohort)
    assert model.__dict__ == before | {"learning_rate": 1e30, "max_epochs": 9}
    np.testing.assert_array_equal(model.predict_proba(cohort), p)


# --- Inputs -----------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_kept_inputs_are_those_made_when_asked(dtype, monkeypatch):
    raw = small_cohort(seed=3).features.astype(np.float32)
    monkeypatch.setattr(batches.features, "ROWS", 7)
    feature_map = standardizer(raw)
    kept = Inputs(raw, feature_map, dtype, CPU, room=1e9)
    asked = Inputs(raw, feature_map, dtype, CPU, room=10)
    assert kept.kept is not None and asked.kept is None
    rows = np.array([5, 2, 2, 11])
    assert torch.equal(kept.take(kept.index(rows)), asked.take(asked.index(rows)))


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(1, 9), min_size=1, max_size=12), st.data())
def test_batches_are_the_bags_one_by_one(sizes, data):
    """However many go to the device at a time, and wherever the inputs are."""
    offsets = np.concatenate([[0], np.cumsum(sizes)])
    raw = np.arange(3.0 * offsets[-1]).reshape(-1, 3)
    order = np.array(data.draw(st.permutations(range(len(sizes)))))
    cuts = data.draw(st.sets(st.integers(1, len(sizes))))
    parts = [part for part in np.split(order, sorted(cuts)) if len(part)]
    room, moved = data.draw(st.sampled_from([0, 1e9])), data.draw(st.integers(1, 30))
    inputs = Inputs(raw, standardizer(raw), torch.float64, CPU, room)
    x = standardizer(raw)(raw, CPU).numpy()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(batches, "MOVED", moved)
        made = list(BatchSource(inputs, offsets).batches(parts))
    for part, batch in zip(parts, made, strict=True):
        expected = np.concatenate([x[offsets[b] : offsets[b + 1]] for b in part])
        segment = np.concatenate([np.full(sizes[b], k) for k, b in enumerate(part)])
        np.testing.assert_array_equal(batch.x, expected)
        np.testing.assert_array_equal(batch.segment, segment)
        np.testing.assert_array_equal(batch.bags, part)
        np.testing.assert_array_equal(batch.chosen, part)
        assert batch.smooth is None and len(batch) == len(part)


def test_the_loss_of_an_epoch_is_the_mean_of_its_bags():
    """A last batch that is smaller does not count for more; nothing is learned on the way."""
    bags = small_cohort(seed=5)
    assert len(bags) % 4
    model = small(dtype="float64", learning_rate=1e-300, weight_decay=0.0, max_epochs=1).fit(bags)
    logit = [oracle.mean_logit(x, model.weights_) for x in standardised(bags)]
    weights = len(bags) / (2 * np.bincount(bags.labels))[bags.labels]
    expected = weights * np.logaddexp(0, np.where(bags.labels, -1, 1) * logit)
    assert model.history_[0]["train_loss"] == pytest.approx(expected.mean(), rel=1e-12)


@each
def test_a_file_on_disk_gives_the_same_model(model_class, cohort, tmp_path, monkeypatch):
    np.save(tmp_path / "x.npy", cohort.features.astype(np.float16))
    disk = np.load(tmp_path / "x.npy", mmap_mode="r")
    bags = [
        Bags(x, cohort.offsets, cohort.labels, adjacency=cohort.adjacency)
        for x in (disk, np.array(disk))
    ]
    inside = small(model_class).fit(bags[1])
    monkeypatch.setattr(deep, "ROOM", 0)
    assert same_weights(small(model_class).fit(bags[0]), inside)


# --- Training ---------------------------------------------------------------------------------


def easy(n_bags, seed, share=0.5, shift=5.0):
    """Bags of 5 to 12 instances; positive ones hold a few obvious instances."""
    rng = np.random.default_rng(seed)
    labels = (np.arange(n_bags) < share * n_bags).astype(int)
    arrays = [rng.normal(size=(rng.integers(5, 13), 4)) for _ in labels]
    for x, y in zip(arrays, labels):
        x[:2] += shift * y * np.array([1, -0.5, 0, 0])
    return Bags.from_arrays(arrays, labels)


@pooling
def test_learns_an_easy_problem(model_class):
    model = small(model_class, hidden_dim=16, max_epochs=25, learning_rate=1e-2).fit(easy(50, 0))
    test = easy(40, 1)
    assert roc_auc_score(test.labels, model.predict_proba(test)[:, 1]) > 0.95
    losses = [entry["train_loss"] for entry in model.history_]
    assert losses[-1] < 0.5 * losses[0]


@each
def test_the_best_epoch_comes_back(model_class):
    """The held-out loss of the fitted model is the lowest of its history."""
    bags = easy(40, 2, shift=1.0)
    model = small(
        model_class, max_epochs=60, learning_rate=0.05, validation=0.25, patience=5, dropout=0.3
    ).fit(bags)
    losses = [entry["validation_loss"] for entry in model.history_]
    assert model.best_epoch_ == 1 + int(np.argmin(losses))
    assert model.n_epochs_ == len(losses) == model.best_epoch_ + 5
    assert model.converged_ is True
    seed = int(np.random.default_rng(3).integers(2**31, size=3)[0])
    held = hold_out(bags.labels, None, 0.25, seed)
    training = np.setdiff1d(np.arange(40), held)
    weight = len(training) / (2 * np.bincount(bags.labels[training]))
    log_p, y = model.predict_proba(bags)[held], bags.labels[held]
    loss = -(weight[y] * np.log(log_p[np.arange(len(y)), y])).mean()
    assert loss == pytest.approx(min(losses), rel=1e-4)  # nothing dropped in validation


def test_epochs_without_early_stopping(cohort):
    model = small(max_epochs=6).fit(cohort)
    assert (model.n_epochs_, model.best_epoch_, model.converged_) == (6, 6, None)
    assert [entry["epoch"] for entry in model.history_] == [1, 2, 3, 4, 5, 6]
    assert {entry["validation_loss"] for entry in model.history_} == {None}


def test_training_cut_short_has_not_converged():
    model = small(max_epochs=2, validation=0.25, patience=5).fit(easy(40, 2))
    assert model.converged_ is False
    assert model.n_epochs_ == 2


def test_too_few_bags_to_hold_out(said):
    bags = easy(9, 0)
    model = small(validation=0.2).fit(bags)
    assert model.n_epochs_ == 4 and model.converged_ is None
    (message,) = said()
    assert "no bags are held out" in message and "4 bags of the rarer class" in message
    assert same_weights(model, small(validation=None).fit(bags))


def test_too_few_patients_to_hold_out(said):
    labels = np.arange(30) % 2
    groups = np.array([f"p{b % 2}{(b // 2) % 4}" for b in range(30)])
    assert len(hold_out(labels, groups, 0.2, 0)) == 0
    assert "4 patients of the rarer class" in said()[0]


@pytest.mark.parametrize("share", [0.2, 0.34, 0.5])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_held_out_bags_have_both_classes_and_whole_patients(share, seed):
    rng = np.random.default_rng(seed)
    labels = (rng.random(60) < 0.4).astype(int)
    groups = rng.integers(25, size=60)
    held = hold_out(labels, groups, share, seed)
    rest = np.setdiff1d(np.arange(60), held)
    assert set(labels[held]) == set(labels[rest]) == {0, 1}
    assert not set(groups[held]) & set(groups[rest])
    assert abs(len(held) - share * 60) < 8


def test_class_weights_are_those_of_repeated_bags():
    """Twenty-four negative bags to six: balanced is as if a positive bag came four times."""
    bags = easy(30, 4, share=0.2, shift=0.0)
    weights = small()._bag_weights(bags.labels, np.arange(30))
    np.testing.assert_allclose(weights[bags.labels == 1], 4 * weights[bags.labels == 0][0])
    assert float(weights.mean()) == pytest.approx(1)
    given = {"max_epochs": 60, "learning_rate": 1e-2, "weight_decay": 0.0}
    balanced, plain = (
        small(class_weight=word, **given).fit(bags).predict_proba(bags)[:, 1].mean()
        for word in ("balanced", None)
    )
    assert plain == pytest.approx(0.2, abs=0.1)
    assert balanced > plain + 0.1


def test_the_loss_of_a_batch_is_the_weighted_cross_entropy():
    bags = small_cohort(seed=5)
    model = small(dtype="float64").fit(bags)
    weights = torch.linspace(0.3, 1.9, len(bags), dtype=torch.float64)
    inputs = Inputs(bags.features, model._feature_map(), torch.float64, CPU)
    network = model._network()
    network.load_state_dict({k: torch.from_numpy(v) for k, v in model.weights_.items()})
    run = Training(
        BatchSource(inputs, bags.offsets),
        torch.tensor(bags.labels).double(),
        weights,
        1e-3, 0.0, 1, 1, 1, np.random.default_rng(0),
    )  # fmt: skip
    chosen = np.array([3, 0, 7])
    x = standardised(bags)
    logit = [oracle.mean_logit(x[b], model.weights_) for b in chosen]
    y = bags.labels[chosen]
    expected = weights.numpy()[chosen] * np.where(
        y, np.logaddexp(0, np.negative(logit)), np.logaddexp(0, logit)
    )
    assert run.loss(network.double(), chosen) == pytest.approx(expected.mean(), rel=1e-12)


def test_dropout_acts_in_training_only(cohort):
    dropped, whole = (small(dropout=p, dtype="float64").fit(cohort) for p in (0.5, 0.0))
    assert not same_weights(dropped, whole)
    np.testing.assert_array_equal(dropped.predict_proba(cohort), dropped.predict_proba(cohort))
    network = dropped._network().train()
    network.random = torch.Generator().manual_seed(0)
    x = torch.ones(4000, 4, dtype=torch.float64)
    h = network.embedding(x)
    network.eval()
    torch.testing.assert_close(h.mean(0), network.embedding(x)[0], rtol=0.1, atol=0)


def test_progress_is_shown_when_asked(cohort, capsys):
    small(max_epochs=20).fit(cohort)
    assert capsys.readouterr().err == ""
    small(max_epochs=20, verbose=True).fit(cohort)
    shown = capsys.readouterr().err
    assert "epoch 20 of 20" in shown and "22 bags" in shown
    assert not logging.getLogger("gpmil").handlers
