"""How features were made travels from the files through bags and models, and is compared."""

import json
import logging
import pickle

import numpy as np
import pytest
import writers
from typer.testing import CliRunner

import gpmil
from gpmil import Bags, io
from gpmil.cli import app
from gpmil.distributed import Facts
from gpmil.distributed.cohort import joined

CELLS = writers.tissue()
N = len(CELLS)
TOLD = {"patch_size": 256, "target_magnification": 20, "overlap": 0, "level0_magnification": 40}
FACTS = {"encoder": "uni_v1", "magnification": 20, "patch_size": 256, "overlap": 0}
OTHERS = {
    "encoder": ("virchow", "'uni_v1'", "'virchow'"),
    "magnification": (10, "magnification 20x", "10x"),
    "patch_size": (512, "patch size 256 px", "512 px"),
    "overlap": (64, "overlap 0 px", "64 px"),
}


def trident(folder, name="s", encoder="uni_v1", **attrs):
    return writers.trident(
        folder, name, writers.vectors(N), CELLS * 512, encoder=encoder, **TOLD | attrs
    )


# --- What files say -------------------------------------------------------------------------------
def test_trident_tells_everything(tmp_path):
    trident(tmp_path)
    first, report = io.read_with_report(tmp_path)
    again = gpmil.read(tmp_path)  # from the cache
    assert dict(first.facts) == dict(again.facts) == FACTS
    assert "patches: magnification 20x, patch size 256 px and overlap 0 px" in report.lines()


def test_the_folder_of_a_job_says_what_attributes_do_not(tmp_path):
    folder = tmp_path / "10x_512px_64px_overlap" / "features_conch"
    writers.trident(
        folder, "s", writers.vectors(N), CELLS * 512, encoder="None", target_magnification="None"
    )
    told = {"encoder": "conch", "magnification": 10, "patch_size": 512, "overlap": 64}
    assert dict(gpmil.read(folder).facts) == told
    writers.trident(folder, "s", writers.vectors(N), CELLS * 512, **TOLD)  # the attributes win
    assert dict(gpmil.read(folder).facts) == FACTS


def test_stamp_tells_microns_per_pixel(tmp_path):
    told = {"unit": "um", "tile_size_um": 256.0, "tile_size_px": 224, "extractor": "chief"}
    writers.stamp(tmp_path, "s", writers.vectors(N), CELLS * 256.0, **told)
    found = gpmil.read(tmp_path).facts
    assert found["mpp"] == pytest.approx(256 / 224)
    assert (found["patch_size"], found["encoder"], len(found)) == (224, "chief", 3)


@pytest.mark.parametrize(
    ("tile_um", "told"),
    [(112, {"mpp": 0.5}), ("20x", {"magnification": 20}), (None, {}), (10**400, {})],
)
def test_slideflow_tells_a_scale(tmp_path, tile_um, told):
    writers.slideflow(tmp_path, "s", writers.vectors(N), CELLS * 224)
    config = {"extractor": "ctranspath", "tile_px": 224, "tile_um": tile_um}
    (tmp_path / "bags_config.json").write_text(json.dumps(config))
    expected = {"encoder": "ctranspath", "patch_size": 224} | told
    assert dict(gpmil.read(tmp_path).facts) == expected


def test_clam_tells_size_and_downsample(tmp_path):
    writers.clam(tmp_path, "s", writers.vectors(N), CELLS * 512, downsample=2.0)
    assert dict(gpmil.read(tmp_path).facts) == {"patch_size": 256, "downsample": 2}


# --- One cohort -----------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("attribute", "other", "words"),
    [
        ("target_magnification", 10, "two magnifications, 20 (a.h5) and 10 (b.h5)"),
        ("patch_size", 512, "two patch sizes, 256 (a.h5) and 512 (b.h5)"),
        ("encoder", "virchow", "two encoders, 'uni_v1' (a.h5) and 'virchow' (b.h5)"),
    ],
)
def test_slides_of_a_cohort_must_agree(tmp_path, attribute, other, words):
    trident(tmp_path, "a")
    trident(tmp_path, "b", **{attribute: other})
    with pytest.raises(ValueError) as error:
        gpmil.read(tmp_path)
    assert words in str(error.value)


def test_two_scales_of_stamp_are_named(tmp_path):
    for name, microns in (("a", 256.0), ("b", 512.0)):
        told = {"unit": "um", "tile_size_um": microns, "tile_size_px": 224}
        writers.stamp(tmp_path, name, writers.vectors(N), CELLS * microns, **told)
    with pytest.raises(ValueError, match="two microns-per-pixel values"):
        gpmil.read(tmp_path)


def test_scanners_of_two_magnifications_are_one_cohort(tmp_path):
    trident(tmp_path, "a", patch_size_level0=512)
    trident(tmp_path, "b", level0_magnification=20, patch_size_level0=256)
    bags = gpmil.read(tmp_path)
    assert len(bags) == 2 and dict(bags.facts) == FACTS


def test_what_only_some_slides_say_is_noted(tmp_path):
    trident(tmp_path, "a")
    trident(tmp_path, "b", target_magnification="None", overlap=64)
    bags, report = io.read_with_report(tmp_path)
    assert dict(bags.facts) == {k: v for k, v in FACTS.items() if k != "overlap"}
    notes = " ".join(report.notes)
    assert "1 slide without magnification 20x: 'b'." in notes
    assert "Slides differ in their overlap: 0 (1 slide), 64 (1 slide)." in notes


# --- Bags -----------------------------------------------------------------------------------------
def bags_of(facts=FACTS, positive=None, seed=0, n=8):
    rng = np.random.default_rng(seed)
    labels = np.arange(n) % 2
    arrays = [rng.normal(size=(5, 3)) + label for label in labels]
    if positive is not None:
        labels = np.where(labels == 1, "tumour", "benign")
    return Bags.from_arrays(arrays, labels, positive=positive, metadata=facts)


def test_facts_travel_with_bags():
    bags = bags_of({**FACTS, "magnification": "20x", "units": "microns"})
    for same in (bags, bags[::2], bags[3], pickle.loads(pickle.dumps(bags))):
        assert dict(same.facts) == FACTS
    with pytest.raises(TypeError):
        bags.facts["magnification"] = 10
    assert dict(bags_of(None).facts) == {}


def test_partitions_keep_what_they_agree_on():
    parts = [Facts.of(bags_of(f)) for f in (FACTS, {**FACTS, "overlap": 64}, {"encoder": "uni_v1"})]
    assert joined(parts).extraction == {k: v for k, v in FACTS.items() if k != "overlap"}
    parts[2] = Facts.of(bags_of({"magnification": 10}))
    with pytest.raises(ValueError, match="partition 1 has 20 as magnification, partition 3 has 10"):
        joined(parts)


# --- Models ---------------------------------------------------------------------------------------
def fitted(bags, cls=gpmil.VGPMILPR):
    settings = {"random_state": 0}
    if cls is gpmil.VGPMILPR:
        settings |= {"n_inducing": 5, "variance": 1.0, "lengthscale": 2.0, "mean": 0.0}
    return cls(**settings).fit(bags)


@pytest.fixture(scope="module")
def model():
    return fitted(bags_of(positive="tumour"))


@pytest.mark.parametrize("name", OTHERS)
def test_a_mismatch_is_refused_with_both_values(model, tmp_path, name):
    other, ours, theirs = OTHERS[name]
    model.save(tmp_path / "model")
    loaded = gpmil.load(tmp_path / "model")
    assert loaded.facts_ == FACTS and loaded.cohort_["classes"] == ["benign", "tumour"]
    given = bags_of({**FACTS, name: other}, seed=1)
    for own in (model, loaded):
        for method in ("predict_proba", "predict", "predict_instances"):
            with pytest.raises(ValueError) as error:
                getattr(own, method)(given)
            assert f"{ours}, these bags come from {theirs}." in str(error.value)
            assert "model.allow_mismatch = True" in str(error.value)
    assert loaded.predict(bags_of(seed=1)).shape == (8,)


@pytest.mark.parametrize(
    "cls",
    [gpmil.MeanPoolMIL, gpmil.MaxPoolMIL, gpmil.AttentionMIL, gpmil.PseudoLabelMIL, gpmil.VGPMIL],
)
def test_every_model_compares(cls):
    model = fitted(bags_of(), cls)
    with pytest.raises(ValueError, match="magnification 20x, these bags come from 10x"):
        model.predict_proba(bags_of({**FACTS, "magnification": 10}))


def test_a_mismatch_can_be_allowed_and_is_said_once(caplog):
    bags = bags_of()
    model = fitted(bags)
    model.allow_mismatch = True
    other = bags_of({**FACTS, "magnification": 10, "patch_size": 512})
    for _ in range(2):
        assert np.array_equal(model.predict_proba(other), model.predict_proba(bags))
    said = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert said == [
        "MISMATCH: the model was fitted on features of magnification 20x and patch size 256 px, "
        "these bags come from 10x and 512 px. Extract features as those of the model were, or fit "
        "a model on features like these. Predictions may be wrong."
    ]
    model.fit(bags)
    assert "allow_mismatch" not in model.get_params()


def test_missing_facts_are_a_note(caplog):
    bags, bare = bags_of(), bags_of(None)
    fitted(bare).predict(bare)
    assert not caplog.records
    fitted(bare).predict(bags)  # as a model that was saved before facts were kept
    assert "the model does not say it" in caplog.text and "magnification 20x" in caplog.text
    caplog.clear()
    fitted(bags).predict(bags_of({"encoder": "uni_v1"}))
    assert "these bags do not say it" in caplog.text and "uni_v1" not in caplog.text


def test_another_downsample_is_a_note(caplog):
    model = fitted(bags_of({"patch_size": 256, "downsample": 1}))
    model.predict(bags_of({"patch_size": 256, "downsample": 4}))
    assert "downsample 1, these have 4" in caplog.text


def test_scanners_of_nearly_one_scale_agree(caplog):
    fitted(bags_of({"mpp": 0.5})).predict(bags_of({"mpp": 0.5045}))
    assert not caplog.records
    with pytest.raises(ValueError, match=r"mpp 0\.5, these bags come from 0\.25"):
        fitted(bags_of({"mpp": 0.5})).predict(bags_of({"mpp": 0.25}))


def test_classes_the_other_way_round_are_refused(model):
    with pytest.raises(ValueError, match="'tumour', that of these labels is 'benign'"):
        model.predict(bags_of(positive="benign"))
    assert model.predict(bags_of(positive="tumour")).shape == (8,)


# --- The command line -----------------------------------------------------------------------------
def invoke(*arguments):
    return CliRunner().invoke(app, [str(a) for a in arguments], prog_name="gpmil")


@pytest.fixture(scope="module")
def lab(tmp_path_factory):
    """A run of gpmil fit at 20x, and a job at 10x; slides in equal numbers of two classes."""
    folder = tmp_path_factory.mktemp("lab")
    rows = ["slide,label"]
    for job, attrs in (("a", {}), ("b", {"target_magnification": 10, "patch_size": 512})):
        for k in range(6):
            trident(folder / job, f"{job}{k}", **attrs)
            rows.append(f"{job}{k},{'tumour' if k % 2 else 'benign'}")
    (folder / "labels.csv").write_text("\n".join(rows) + "\n")
    settings = [
        "--model",
        "VGPMILPR",
        "--n-inducing",
        "5",
        "--variance",
        "1",
        "--lengthscale",
        "2",
        "--mean",
        "0",
    ]
    labels = ("--labels", folder / "labels.csv", "--positive", "tumour")
    result = invoke("fit", folder / "a", *labels, "--out", folder / "run", *settings)
    assert result.exit_code == 0, result.output
    return folder


def test_a_run_notes_facts_and_classes(lab):
    card = json.loads((lab / "run" / "config.json").read_text())
    assert card["extraction"] == FACTS and card["classes"] == ["benign", "tumour"]


def test_predict_refuses_another_magnification(lab, tmp_path, caplog):
    words = ("predict", lab / "run", lab / "b", "--out", tmp_path / "out")
    result = invoke(*words)
    assert result.exit_code == 2 and not (tmp_path / "out").exists()
    said = "of magnification 20x and patch size 256 px, these bags come from 10x and 512 px."
    assert said in result.stderr and "--allow-mismatch" in result.stderr
    assert "allow_mismatch" not in result.stderr
    caplog.clear()
    assert invoke(*words, "--allow-mismatch").exit_code == 0
    assert caplog.text.count("MISMATCH") == 1
    card = json.loads((tmp_path / "out" / "config.json").read_text())
    assert said in card["note"] and card["classes"] == ["benign", "tumour"]
    config = tmp_path / "out" / "config.json"
    again = invoke("predict", "--config", config, "--out", tmp_path / "again")
    assert again.exit_code == 0, again.output


def test_predict_refuses_the_other_class_as_positive(lab, tmp_path):
    labels = ("--labels", lab / "labels.csv", "--positive", "benign")
    result = invoke("predict", lab / "run", lab / "a", *labels, "--out", tmp_path / "out")
    assert result.exit_code == 2 and "'tumour', that of these labels is 'benign'" in result.stderr


def test_clam_may_cut_two_sizes_at_two_magnifications(tmp_path):
    """Its files say no magnification: 512 px at 40x and 256 px at 20x show the same."""
    rng = np.random.default_rng(5)
    cells = np.stack(np.meshgrid(np.arange(3), np.arange(2)), -1).reshape(-1, 2)
    for name, size in (("a", 512), ("b", 256)):
        x = rng.standard_normal((6, 3)).astype("f4")
        writers.clam(tmp_path, name, x, cells * size, patch_size=size)
    bags, report = gpmil.io.read_with_report(tmp_path)
    assert "patch_size" not in bags.facts
    assert any("differ in their patch size: 512 (1 slide), 256" in note for note in report.notes)
