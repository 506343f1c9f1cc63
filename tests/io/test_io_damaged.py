"""Damaged feature files and tables: one readable line, at once, and nothing left behind."""

import gzip
import json
import os
import time
import zipfile

import h5py
import numpy as np
import pandas as pd
import pytest
import torch
import writers
from fuzz import mutate

import gpmil
from gpmil.files.foreign import BadFile, reading
from gpmil.io import h5_look, sicapv2, slides, steps
from gpmil.runs.maps_input import PatchTable

CELLS = np.argwhere(np.ones((2, 3), dtype=bool)) * 256
X = writers.vectors(6, 4)
LONG = "9" * 400


@pytest.fixture
def job(tmp_path):
    """Two whole slides of TRIDENT; the tests damage s0."""
    for name in ("s0", "s1"):
        writers.trident(tmp_path / "f", name, X, CELLS, patch_size_level0=256)
    return tmp_path / "f"


def refused(path, match, *args, **options):
    """The one line that a read ends with; nothing stays behind."""
    before = sorted(path.parent.rglob("*"))
    with pytest.raises(ValueError, match=match) as caught:
        gpmil.read(path, *args, **options)
    assert sorted(path.parent.rglob("*")) == before
    return str(caught.value)


# ------------------------------------------------------------------ the guard


def test_the_projects_errors_are_of_one_kind():
    assert issubclass(slides.BadSlide, BadFile) and issubclass(slides.SlideLevel, BadFile)
    assert issubclass(BadFile, ValueError)


@pytest.mark.parametrize("error", [KeyError("x"), MemoryError(), RecursionError(), OverflowError()])
def test_whatever_a_library_raises_names_the_file(tmp_path, error):
    (tmp_path / "a.bin").write_bytes(b"")
    with (
        pytest.raises(BadFile, match=r"a\.bin cannot be read as x"),
        reading(tmp_path / "a.bin", "x"),
    ):
        raise error


# ------------------------------------------------------------------ HDF5


def zeroed(path):
    """The header of an object in the global heap gone: libhdf5 walks on by nothing, for ever."""
    data = bytearray(path.read_bytes())
    start = data.index(b"GCOL") + 16
    data[start : start + 16] = bytes(16)
    path.write_bytes(data)


def test_a_zeroed_block_does_not_hang(job, monkeypatch):
    monkeypatch.setattr(h5_look, "SECONDS", 1.0)
    zeroed(job / "s0.h5")
    begin = time.process_time()
    refused(job, r"s0\.h5: cannot be read as HDF5")
    assert time.process_time() - begin < 5.0
    with pytest.raises(ValueError, match="cannot be read as HDF5"):
        gpmil.read(job / "s0.h5")
    assert len(gpmil.read(job, skip_bad=True)) == 1  # the helper lives again
    assert h5_look.fault(job / "s1.h5") is None


def test_the_look_is_given_up_when_nobody_answers(job, monkeypatch):
    monkeypatch.setattr(h5_look, "WAITING", 0.5)
    monkeypatch.setattr(h5_look, "SECONDS", 600.0)
    zeroed(job / "s0.h5")
    assert "for ever" in h5_look.fault(job / "s0.h5")


@pytest.mark.parametrize("rows", [7, 10**6, 2**40])
@pytest.mark.parametrize("name", ["features", "coords"])
def test_rows_that_are_claimed_and_not_there(job, name, rows):
    with h5py.File(job / "s0.h5", "r+") as f:
        old = f[name][()]
        del f[name]
        new = f.create_dataset(name, data=old, maxshape=(None, *old.shape[1:]), chunks=(2, 2))
        new.resize(rows, axis=0)
    refused(job, r"s0\.h5: cannot be read as HDF5: .*(claims shape|pieces of)")


def test_a_dataset_without_values(job):
    with h5py.File(job / "s0.h5", "r+") as f:
        del f["features"]
        f.create_dataset("features", (6, 4), "f4")
    refused(job, "claims shape")


def test_values_in_other_files_are_not_followed(job):
    with h5py.File(job / "s0.h5", "r+") as f:
        del f["features"]
        layout = h5py.VirtualLayout((6, 4), "f4")
        layout[:] = h5py.VirtualSource(str(job / "s1.h5"), "features", (6, 4))
        f.create_virtual_dataset("features", layout)
    refused(job, "in other files")


@pytest.mark.parametrize("name", ["features", "coords"])
@pytest.mark.parametrize("kind", ["group", "null", "dangling"])
def test_objects_of_another_kind(job, name, kind):
    with h5py.File(job / "s0.h5", "r+") as f:
        del f[name]
        if kind == "group":
            f.create_group(name)
        elif kind == "null":
            f[name] = h5py.Empty("f4")
        else:
            f[name] = h5py.SoftLink("/nowhere")
    refused(job, r"s0\.h5: ")


@pytest.mark.parametrize("value", [np.nan, np.inf, -5.0, 1e300, 1e-300, h5py.Empty("f4"), "x"])
@pytest.mark.parametrize("name", ["patch_size_level0", "patch_size", "overlap", "downsample"])
def test_odd_attributes_tell_no_step(name, value):
    attrs = {"patch_size": 256, "downsample": [2.0, 2.0], name: value}
    step, _ = steps.told_step(attrs, None)
    assert step is None or (np.isfinite(step).all() and 0 < min(step) <= 1e9)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no pipes here")
def test_a_pipe_in_the_folder_is_not_waited_for(job):
    os.mkfifo(job / "s2.h5")
    refused(job, r"s2\.h5: is no regular file")
    assert len(gpmil.read(job, skip_bad=True)) == 2


def test_slides_that_do_not_fit_together_leave_no_cache(job):
    with h5py.File(job / "s0.h5", "r+") as f:
        del f["coords"]
    refused(job, "1 slide without positions")


@pytest.mark.parametrize("part", ["index", "arrays"])
def test_a_damaged_cache_is_made_again(job, part):
    whole = gpmil.read(job)
    kept = next((job / ".gpmil-cache").rglob(f"{part}*"))
    data = kept.read_bytes()
    changed = data.replace(b"256.0", b"512.0") if part == "index" else data[:80] + b"x" + data[81:]
    assert changed != data
    kept.write_bytes(changed)
    again = gpmil.read(job)
    np.testing.assert_array_equal(again.step, whole.step)
    np.testing.assert_array_equal(again.coords, whole.coords)


# ------------------------------------------------------------------ numpy


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("header", mutate.NPY_HEADERS, ids=lambda text: text[:60])
def test_headers_of_npy(tmp_path, header):
    np.save(tmp_path / "s0.npy", X)
    whole = (tmp_path / "s0.npy").read_bytes()
    text = header.encode() + b"\n"
    start = b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little")
    (tmp_path / "s0.npy").write_bytes(start + text + whole[128:])
    if "True, 'shape': (6" in header or "6L" in header:  # column by column; Python 2
        assert gpmil.read(tmp_path).features.shape == (6, 4)
    else:
        refused(tmp_path / "s0.npy", r"s0\.npy: ")


def test_an_npz_named_npy(tmp_path):
    np.savez(tmp_path / "a.npz", X)
    (tmp_path / "a.npz").rename(tmp_path / "a.npy")
    refused(tmp_path / "a.npy", "no .npy file")


def test_more_bytes_than_the_header_says(tmp_path):
    np.save(tmp_path / "a.npy", X)
    with (tmp_path / "a.npy").open("ab") as f:
        f.write(b"1234")
    refused(tmp_path / "a.npy", "224 bytes, and has 228")


def written_npz(path, **changed):
    arrays = {"X": X, "bag": np.zeros(6, int), "y_bag": np.array([1]), "bag_id": np.array(["a"])}
    np.savez(path, **(arrays | changed))
    return path


@pytest.mark.parametrize("name", ["X", "bag", "y_bag", "bag_id"])
@pytest.mark.parametrize("value", [np.float64(3.0), np.zeros((2, 2), "M8[s]"), np.zeros(6, "V8")])
def test_members_of_other_kinds(tmp_path, name, value):
    refused(written_npz(tmp_path / "a.npz", **{name: value}), r"a\.npz")


@pytest.mark.parametrize(("offset", "value"), [(8, 1), (10, 99), (6, 99)])
def test_zip_files_that_nobody_can_unpack(tmp_path, offset, value):
    path = written_npz(tmp_path / "a.npz")
    data = bytearray(path.read_bytes())
    data[data.index(b"PK\x01\x02") + offset] = value
    data[offset - 2] = value
    path.write_bytes(data)
    refused(path, r"a\.npz cannot be read as \.npz")


def test_a_packed_array_with_a_damaged_stream(tmp_path):
    path = written_npz(tmp_path / "a.npz")
    with np.load(path) as found:
        np.savez_compressed(path, **found)
    data = bytearray(path.read_bytes())
    data[60:70] = b"\xff" * 10
    path.write_bytes(data)
    refused(path, r"a\.npz cannot be read as \.npz")


# ------------------------------------------------------------------ torch

KINDS = {
    "meta": lambda: torch.zeros(6, 4, device="meta"),
    "sparse": lambda: torch.eye(4).to_sparse(),
    "csr": lambda: torch.eye(4).to_sparse_csr(),
    "nested": lambda: torch.nested.nested_tensor([torch.ones(2, 4), torch.ones(3, 4)]),
    "conjugate": lambda: torch.zeros(6, 4, dtype=torch.complex64).conj(),
    "float8": lambda: torch.zeros(6, 4).to(torch.float8_e4m3fn),
    "quantized": lambda: torch.quantize_per_tensor(torch.zeros(6, 4), 0.1, 0, torch.qint8),
    "endless": lambda: torch.zeros(1, 4).expand(2**40, 4),
}


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")
@pytest.mark.parametrize("kind", KINDS)
def test_tensors_that_hold_no_features(tmp_path, kind):
    torch.save(KINDS[kind](), tmp_path / "s0.pt")
    refused(tmp_path / "s0.pt", r"s0\.pt: ")


def test_a_changed_byte_of_a_tensor_is_seen(tmp_path):
    """torch.load itself looks at no checksum."""
    torch.save(torch.from_numpy(X), tmp_path / "s0.pt")
    data = bytearray((tmp_path / "s0.pt").read_bytes())
    data[data.index(X.tobytes()) + 3] ^= 1
    (tmp_path / "s0.pt").write_bytes(data)
    assert torch.load(tmp_path / "s0.pt", weights_only=True).shape == (6, 4)
    refused(tmp_path / "s0.pt", "data/0 is damaged")


def test_a_file_that_was_packed_again_is_not_mapped(tmp_path):
    """torch.load(mmap=True) takes packed bytes for values."""
    torch.save(torch.from_numpy(X), tmp_path / "s0.pt")
    with zipfile.ZipFile(tmp_path / "s0.pt") as old:
        records = {name: old.read(name) for name in old.namelist()}
    with zipfile.ZipFile(tmp_path / "s0.pt", "w", zipfile.ZIP_DEFLATED) as new:
        for name, data in records.items():
            new.writestr(name, data)
    refused(tmp_path / "s0.pt", "packed again")


def test_old_files_and_those_without_checksums_are_read(tmp_path):
    options = {"old": {"_use_new_zipfile_serialization": False}, "new": {}}
    torch.serialization.set_crc32_options(False)
    try:
        for name, how in options.items():
            torch.save(torch.from_numpy(X), tmp_path / f"{name}.pt", **how)
    finally:
        torch.serialization.set_crc32_options(True)
    np.testing.assert_array_equal(gpmil.read(tmp_path).features, np.concatenate([X, X]))


def test_json_without_end(tmp_path):
    writers.slideflow(tmp_path, "s0", X, CELLS)
    (tmp_path / "bags_config.json").write_text("[" * 100_000)
    refused(tmp_path, r"bags_config\.json cannot be read as JSON")


# ------------------------------------------------------------------ tables

TABLE = "slide,label,feature_0,feature_1\na,1,0.5,2\na,1,0.5,3\nb,0,0.1,4\n"


def table(path, text):
    data = text.encode()
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return path


def test_rows_longer_than_the_header(tmp_path):
    lines = TABLE.splitlines()
    numbered = "\n".join([lines[0], *(f"{k},{line}" for k, line in enumerate(lines[1:]))])
    refused(table(tmp_path / "t.csv", numbered), "more values than the header has names")
    one = "\n".join([*lines[:2], "7," + lines[2], *lines[3:]])
    refused(table(tmp_path / "t.csv", one), "Expected 4 fields in line 3, saw 5")


def test_labels_with_rows_longer_than_the_header(tmp_path):
    (tmp_path / "f").mkdir()
    for name in ("a", "b"):
        np.save(tmp_path / "f" / f"{name}.npy", X)
    labels = table(tmp_path / "labels.csv", "slide,label\n0,a,1\n1,b,0\n")
    refused(tmp_path / "f", "more values than the header", labels)
    labels = table(tmp_path / "labels.csv", "slide,label\nx,1\ny,0\n")
    refused(tmp_path / "f", "no slide has a label", labels)


def test_an_empty_last_column_without_a_name_is_no_damage(tmp_path):
    text = "\n".join([TABLE.splitlines()[0], *(line + "," for line in TABLE.splitlines()[1:])])
    assert gpmil.read(table(tmp_path / "t.csv", text)).names.tolist() == ["a", "b"]


def test_a_damaged_gzip_stream(tmp_path):
    path = table(tmp_path / "t.csv.gz", TABLE)
    data = bytearray(path.read_bytes())
    data[15:20] = b"\xff" * 5
    path.write_bytes(data)
    refused(path, "no whole gzip file")


@pytest.mark.parametrize("value", [LONG, "-" + LONG, "9" * 25, "1_000"])
def test_numbers_without_end(tmp_path, value):
    text = TABLE.replace("0.5,3", f"0.5,{value}")
    said = refused(table(tmp_path / "t.csv", text), "expected a number.* in row 2 .*'feature_1'")
    assert len(said) < 400


def test_numbers_without_end_in_the_name_of_a_patch(tmp_path):
    rows = pd.DataFrame(X, columns=[f"feature_{k}" for k in range(4)])
    rows["instance_name"] = f"s0_Block_Region_{LONG}_0_0_xini_0_yini_0.jpg"
    rows["bag_label_primary"] = 1
    rows.to_csv(tmp_path / "Train.csv", index=False)
    with pytest.raises(ValueError, match=r"Train\.csv: the name of a patch has a number"):
        sicapv2.read(tmp_path)


def test_a_slide_without_a_patient(tmp_path):
    rows = pd.DataFrame(X, columns=[f"feature_{k}" for k in range(4)])
    rows["instance_name"] = [f"s0_Block_Region_0_0_{k}_xini_{k}_yini_0.jpg" for k in range(6)]
    rows.to_csv(tmp_path / "Train.csv", index=False)
    (tmp_path / "wsi_labels.csv").write_text("slide_id,patient_id,Gleason_primary\ns0,,3\n")
    with pytest.raises(ValueError, match=r"wsi_labels\.csv: expected a patient_id"):
        sicapv2.read(tmp_path)


def test_numbers_without_end_in_a_table_of_patches(tmp_path):
    text = f"x,y,probability\n{LONG},0,0.5\n1,0,0.5\n"
    path = table(tmp_path / "s0.csv.gz", text)
    with pytest.raises(ValueError, match=r"s0\.csv\.gz: expected numbers .* in column 'x'"):
        PatchTable(path).read()


def test_positions_beyond_every_slide(tmp_path, job):
    text = "slide,label,x,y,f0,f1\na,1,0,0,1,2\na,1,1e300,0,3,4\nb,0,0,0,5,6\n"
    refused(table(tmp_path / "t.csv", text), "no slide is so large")
    with h5py.File(job / "s0.h5", "r+") as f:
        f["coords"][0] = 2**62
    refused(job, "no slide is so large")


def test_text_of_no_characters(tmp_path):
    names = np.array(["ab", "cd"], dtype="<U2")
    names.view(np.uint32)[1] = 0x7FFFFFFF
    np.savez(tmp_path / "c.npz", X=np.ones((2, 2)), bag=[0, 1], y_bag=[0, 1], bag_id=names)
    refused(tmp_path / "c.npz", "characters that there are not")


def test_a_cache_removes_only_what_it_wrote(job):
    """An index that was changed names other files; they stay."""
    gpmil.read(job)
    index = next((job / ".gpmil-cache").rglob("index.json"))
    kept = index.with_name("mine.txt")
    kept.write_text("mine")
    for name in ("mine.txt", "a\0b"):
        card = json.loads(index.read_text()) | {"features": name}
        index.write_text(json.dumps(card))
        gpmil.read(job)
    assert kept.read_text() == "mine"
