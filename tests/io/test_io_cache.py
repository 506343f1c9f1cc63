"""The features on disk: used again, made again, never left half done."""

import errno
import io
import os

import h5py
import numpy as np
import pytest
import writers
from writers import tissue, vectors

import gpmil
from gpmil import Bags
from gpmil.io import cache, copying, formats, read_with_report, slides

CELLS = tissue()
N = len(CELLS)


def written(folder, k, dtype="f2", seed=0):
    cells = CELLS[: N - k]
    features = vectors(len(cells), seed=seed + k, dtype=dtype)
    return writers.trident(folder, f"s{k}", features, cells * 256, patch_size_level0=256)


@pytest.fixture
def folder(tmp_path):
    for k in range(4):
        written(tmp_path / "f", k)
    return tmp_path / "f"


@pytest.fixture
def no_h5(monkeypatch):
    def refuse(*args, **options):
        raise AssertionError("an HDF5 file was opened")

    return lambda: monkeypatch.setattr(h5py, "File", refuse)


def files_in(folder):
    return sorted(p.name for p in folder.rglob("*") if p.is_file())


def same(a: Bags, b: Bags):
    for name in ("features", "offsets", "labels", "names", "coords", "instance_labels", "step"):
        one, two = np.asarray(getattr(a, name)), np.asarray(getattr(b, name))
        assert one.dtype == two.dtype and one.tobytes() == two.tobytes(), name
    assert (a.adjacency != b.adjacency).nnz == 0 and a.graph == b.graph


def in_memory(folder) -> Bags:
    """The same cohort the naive way: everything read, nothing kept."""
    arrays, coords, names = [], [], []
    for path in sorted(folder.glob("*.h5")):
        with h5py.File(path) as f:
            arrays.append(f["features"][()])
            coords.append(f["coords"][()])
            names.append(path.stem)
    return Bags.from_arrays(arrays, names=names, coords=coords, step=256)


@pytest.mark.parametrize("block", [1, 200, 1 << 25])
def test_a_cohort_on_disk_is_the_one_in_memory(folder, block, monkeypatch):
    monkeypatch.setattr(slides, "BLOCK", block)
    bags = gpmil.read(folder)
    assert isinstance(bags.features, np.memmap) and bags.features.dtype == np.float16
    same(bags, in_memory(folder))
    same(bags[1:3], in_memory(folder)[1:3])
    same(bags[[3, 0]], in_memory(folder)[[3, 0]])
    assert isinstance(bags[1:3].features, np.memmap)


def test_the_second_time_no_file_is_opened(folder, no_h5):
    first, before = read_with_report(folder)
    no_h5()
    second, after = read_with_report(folder)
    same(first, second)
    assert before == after and str(folder / ".gpmil-cache") in before.cache


CHANGES = ["changed", "touched", "added", "removed", "truncated", "overwritten", "index"]


@pytest.mark.parametrize("change", CHANGES)
def test_it_is_made_again_when_something_changed(folder, change):
    old = gpmil.read(folder)
    place = next((folder / ".gpmil-cache").iterdir())
    if change == "changed":
        written(folder, 2, seed=9)
    elif change == "touched":
        os.utime(folder / "s1.h5", ns=(1, 1))
    elif change == "added":
        written(folder, 4)
    elif change == "removed":
        (folder / "s0.h5").unlink()
    elif change in ("truncated", "overwritten"):
        data = next(place.glob("features-*.bin"))
        kept = data.read_bytes()
        data.unlink()  # a mapped file must not shrink under its reader
        data.write_bytes(kept[:-2] + (b"" if change == "truncated" else b"\xff\xff"))
    else:
        (place / "index.json").write_text("{")
    new = gpmil.read(folder)
    same(new, in_memory(folder))
    assert len(old) == 4 and old.features[0, 0] == vectors(N, dtype="f2")[0, 0]
    orphans = 2 if change == "index" else 0  # nobody knows of them; gone after a day
    assert len(files_in(place)) == 3 + orphans


def test_what_is_kept_is_known_without_reading_it(folder, monkeypatch):
    expected = in_memory(folder)[[2, 0, 3]].digests()
    assert len(set(expected)) == 3
    for _ in range(2):  # when it is made, and from the cache
        bags = gpmil.read(folder)[[2, 0, 3]]
        with monkeypatch.context() as patch:
            patch.setattr(np, "isfinite", None)
            patch.setattr("gpmil.data.bags.digest", None)
            bags.check_finite()
            found = bags.digests()
        np.testing.assert_array_equal(found, expected)


def test_leftovers_of_a_killed_process_go_after_a_day(folder):
    gpmil.read(folder)
    place = next((folder / ".gpmil-cache").iterdir())
    for name, age in (("features-deadbeef.bin", 2 * cache.DAY), ("features-abad1dea.bin", 5.0)):
        (place / name).write_bytes(b"x")
        stamp = (place / name).stat().st_mtime - age
        os.utime(place / name, (stamp, stamp))
    written(folder, 1, seed=5)
    gpmil.read(folder)
    assert [n for n in files_in(place) if "dea" in n] == ["features-abad1dea.bin"]


@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError, OSError])
def test_an_interrupted_build_leaves_nothing(folder, tmp_path, monkeypatch, error):
    place = tmp_path / "c"
    whole = slides.Slide.blocks

    def stop(self):
        yield from whole(self)
        if self.shape[0] == N - 2:
            raise error

    monkeypatch.setattr(slides.Slide, "blocks", stop)
    with pytest.raises((KeyboardInterrupt, MemoryError, ValueError)):
        gpmil.read(folder, cache=place)
    assert files_in(place) == []
    monkeypatch.undo()
    same(gpmil.read(folder, cache=place), in_memory(folder))


def test_a_full_disk_is_no_damaged_slide(folder):
    class Full(io.BytesIO):
        name, mode = str(folder / "x"), "wb"

        def write(self, data):
            raise OSError(errno.ENOSPC, "no space")

    listing = formats.find(folder)
    copy = copying.CohortCopy(listing, formats.opener(listing)[1], None, skip_bad=True)
    with pytest.raises(ValueError, match="the disk is full"):
        copy.run(Full())
    assert copy.bad == []


def test_a_failed_build_keeps_the_old_one(folder, no_h5):
    gpmil.read(folder)
    before = files_in(folder)
    (folder / "zz.h5").write_bytes(b"not HDF5")
    with pytest.raises(ValueError, match=r"zz\.h5"):
        gpmil.read(folder)
    (folder / "zz.h5").unlink()
    assert files_in(folder) == before
    no_h5()
    assert len(gpmil.read(folder)) == 4


def test_a_bad_last_slide_leaves_a_whole_cache(folder, no_h5):
    bad = vectors(N)
    bad[-1, -1] = np.inf
    writers.trident(folder, "zz", bad.astype("f2"), CELLS * 256, patch_size_level0=256)
    first = gpmil.read(folder, skip_bad=True)
    no_h5()
    same(gpmil.read(folder, skip_bad=True), first)
    with pytest.raises(ValueError, match=r"zz\.h5: features: 1 of"):
        gpmil.read(folder)


def test_one_cache_for_several_folders(folder, tmp_path, no_h5):
    other = tmp_path / "g" / "f"
    written(other, 1, seed=4)
    written(other, 2, seed=4)
    place = tmp_path / "c"
    first, second = (gpmil.read(p, cache=place) for p in (folder, other))
    assert not (folder / ".gpmil-cache").exists()
    no_h5()
    same(gpmil.read(folder, cache=place), first)
    same(gpmil.read(other, cache=place), second)


def test_where_nothing_can_be_written(folder, tmp_path, monkeypatch, caplog):
    real = cache._writable
    monkeypatch.setattr(cache, "_writable", lambda p: ".gpmil-cache" not in str(p) and real(p))
    monkeypatch.setattr(cache.tempfile, "gettempdir", lambda: str(tmp_path / "tmp"))
    _, report = read_with_report(folder)
    assert str(tmp_path / "tmp") in report.cache and report.cache in caplog.text
    assert report.cache in "\n".join(report.lines())
    written(folder, 1, seed=3)
    monkeypatch.setattr(cache, "_writable", lambda p: False)
    for options in ({}, {"cache": tmp_path / "c"}):
        with pytest.raises(ValueError, match="cache="):
            gpmil.read(folder, **options)


def test_a_colleagues_cache_is_used_though_not_written(folder, no_h5, monkeypatch):
    gpmil.read(folder)
    monkeypatch.setattr(cache, "_writable", lambda p: False)
    no_h5()
    assert len(gpmil.read(folder)) == 4


def test_a_temporary_folder_of_somebody_else_is_not_trusted(tmp_path, monkeypatch):
    monkeypatch.setattr(cache.tempfile, "gettempdir", lambda: str(tmp_path))
    monkeypatch.setattr(cache.tempfile, "tempdir", str(tmp_path))
    own = cache._temporary()
    assert not own.exists()
    assert cache._writable(own) and own.stat().st_mode & 0o077 == 0 and cache._temporary() == own
    monkeypatch.setattr(os, "getuid", lambda: int(own.name.rpartition("-")[2]) + 1)
    own.rename(tmp_path / f"gpmil-cache-{os.getuid()}")
    assert cache._temporary().name != f"gpmil-cache-{os.getuid()}"


def test_too_little_room_is_said_before(folder, monkeypatch):
    usage = type("Usage", (), {"free": 10})
    monkeypatch.setattr(cache.shutil, "disk_usage", lambda p: usage)
    with pytest.raises(ValueError, match="cache="):
        gpmil.read(folder)
    assert [n for n in files_in(folder) if not n.endswith(".h5")] == []


def test_types_are_widened_together(folder):
    written(folder, 2, dtype="f4")
    bags = gpmil.read(folder)
    assert bags.features.dtype == np.float32
    np.testing.assert_array_equal(bags[2].features, vectors(N - 2, seed=2, dtype="f4"))
    np.testing.assert_array_equal(bags[0].features, vectors(N, dtype="f2").astype("f4"))


def test_big_endian_features(tmp_path):
    writers.trident(tmp_path, "a", vectors(N).astype(">f4"), CELLS * 256, patch_size_level0=256)
    bags = gpmil.read(tmp_path)
    assert bags.features.dtype == np.dtype("=f4")
    np.testing.assert_array_equal(bags.features, vectors(N))
