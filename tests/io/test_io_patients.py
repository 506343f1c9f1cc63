"""Patients that no column names: TCGA barcodes, and slides that begin alike."""

import pandas as pd
import pytest
import writers
from command_line import ran, write_table
from hypothesis import given, settings
from hypothesis import strategies as st
from synthetic import small_cohort

from gpmil import io
from gpmil.io import patients

TCGA = ["TCGA-A1-A0SB-01Z-00-DX1", "TCGA-A1-A0SB-01A-01-TS1", "TCGA-B2-00X1-01Z-00-DX1"]
WORDS = st.text("abcdefgh", min_size=1, max_size=6)


# --- Names ----------------------------------------------------------------------------------------
@settings(max_examples=100, deadline=None)
@given(ids=st.lists(st.integers(0, 9999), min_size=3, max_size=20, unique=True), data=st.data())
def test_slides_of_patients_are_suspected(ids, data):
    """Any separator, numbers or letters: every patient of several slides is found, no other."""
    word, separator = data.draw(WORDS), data.draw(st.sampled_from("_-. "))
    slides = {i: data.draw(st.integers(1, 5)) for i in ids}
    parts = data.draw(st.sampled_from(["12345", "ABCDE", ["01", "02", "03", "04", "05"]]))
    names = [f"{word}{i:04d}{separator}{parts[k]}" for i, n in slides.items() for k in range(n)]
    found = patients.shared(names)
    assert set(found) == {f"{word}{i:04d}" for i, n in slides.items() if n > 1}
    assert {len(own) for own in found.values()} == {n for n in slides.values() if n > 1}
    assert bool(patients.warning(names)) == bool(found)


@settings(max_examples=100, deadline=None)
@given(
    words=st.lists(WORDS, min_size=1, max_size=4, unique=True),
    separator=st.sampled_from(["_", "-", ".", " ", ""]),
    n=st.integers(1, 200),
    digits=st.integers(1, 5),
)
def test_numbered_slides_are_not_suspected(words, separator, n, digits):
    """slide_001, tumor_17, normal7: what they begin with are no patients."""
    names = [f"{word}{separator}{k:0{digits}d}" for word in words for k in range(n)]
    assert patients.warning(names) == ""


@pytest.mark.parametrize(
    "names",
    [
        [],
        ["a"],
        [f"P{k:03d}" for k in range(40)],
        [f"P{k:03d}_1" for k in range(40)],  # one slide per patient
        [f"S19-{k}" for k in range(1000, 1040)],  # accession numbers
        [f"{year}_{k:02d}" for year in (2019, 2020, 2021) for k in range(40)],
        [f"scan1_{k}" for k in range(9)],  # one beginning for all
        [f"{k:032x}" for k in range(10**30, 10**30 + 16)],
    ],
)
def test_other_names_are_not_suspected(names):
    assert patients.guess(names) == patients.Guess()


def test_the_warning_names_a_pair_and_the_way_out():
    said = patients.warning(["P1_1", "P1_2", "P2_1", "P2_2", "P3_1"])
    assert said.startswith("4 of 5 slides may share a patient with another: 'P1_1' and 'P1_2'")
    assert "2 such beginnings" in said and said.endswith("--patient COLUMN.")


def test_barcodes_are_patients():
    assert patients.guess(TCGA).patients == ["TCGA-A1-A0SB", "TCGA-A1-A0SB", "TCGA-B2-00X1"]
    note = patients.guess([*TCGA, "own 1"]).note
    assert "'TCGA-A1-A0SB' from 'TCGA-A1-A0SB-01Z-00-DX1': 3 patients with 4 slides" in note
    assert "1 slide without a barcode" in note and "--patient none" in note
    assert patients.from_barcodes([*TCGA, "a", "b", "c", "d"]) is None
    assert patients.from_barcodes(["TCGA-A1-A0SBX", "TCGA-A1"]) is None


# --- Cohorts --------------------------------------------------------------------------------------
def trident_job(folder, names):
    bags = small_cohort(n_bags=len(names))
    for name, bag in zip(names, bags):
        writers.trident(folder, name, bag.features.astype("f4"), bag.coords * 32)
    return folder


def test_barcodes_of_feature_files(tmp_path):
    job = trident_job(tmp_path / "job", TCGA)
    labels = pd.DataFrame({"slide": TCGA, "label": [0, 0, 1]})
    bags, report = io.read_with_report(job, labels)
    assert bags.groups.tolist() == ["TCGA-A1-A0SB", "TCGA-A1-A0SB", "TCGA-B2-00X1"]
    assert report.n_patients == 2 and any("barcodes" in note for note in report.notes)
    bags, report = io.read_with_report(job, labels, patient=False)
    assert bags.groups is None and not any("barcodes" in note for note in report.notes)
    assert "patients: not known, every slide is taken as one of its own" in report.lines()
    given = labels.assign(case=["a", "b", "c"])
    assert sorted(io.read(job, given).groups) == ["a", "b", "c"]
    assert io.read(job, given, patient=False).groups is None
    with pytest.raises(ValueError, match="patient must be the name of a column"):
        io.read(job, given, patient=True)


def test_barcodes_of_a_table_keep_its_classes(tmp_path):
    table = write_table(tmp_path / "own.csv", n_slides=4)
    frame = pd.read_csv(table).drop(columns="patient")
    frame["slide"] = frame["slide"].map(lambda s: f"TCGA-A1-A0S{int(s[1:]) // 2}-DX{s[1:]}")
    frame["label"] = frame["label"].map({0: "benign", 1: "cancer"})
    frame.to_csv(table, index=False)
    bags = io.read(table, positive="cancer")
    assert bags.groups.tolist() == ["TCGA-A1-A0S0"] * 2 + ["TCGA-A1-A0S1"] * 2
    assert bags.labels.tolist() == [0, 1, 0, 1] and bags.class_names == ("benign", "cancer")
    assert io.read(table, positive="cancer", patient=False).groups is None


def test_inspect_warns_of_slides_that_begin_alike(tmp_path):
    names = [f"P{k // 2:03d}_{k % 2 + 1}" for k in range(8)]
    job, labels = trident_job(tmp_path / "job", names), tmp_path / "labels.csv"
    frame = pd.DataFrame({"slide": names, "label": [0, 1] * 4, "who": [n[:4] for n in names]})
    frame.to_csv(labels, index=False)
    said = ran("inspect", job, "--labels", labels)
    assert "WARNING: 8 of 8 slides may share a patient with another: 'P000_1'" in said
    assert "patients: not known" in said
    for known in (["--patient", "who"], ["--patient", "none"]):
        assert "may share" not in ran("inspect", job, "--labels", labels, *known)
    assert "may share" not in ran("inspect", job)  # no label: nothing to judge by
