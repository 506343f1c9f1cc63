"""What reads feature files and tables: small samples, damaged, read and looked at."""

import gzip
import io
import json
from collections.abc import Callable
from contextlib import redirect_stdout
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory

import h5py
import numpy as np
import pandas as pd
import writers

from fuzz import mutate
from fuzz.campaign import Target
from gpmil.cli import inspect
from gpmil.cli.options import Source
from gpmil.data.bags import Bags
from gpmil.io import h5_look, read_with_report, with_patch_labels
from gpmil.runs.files import MARKS
from gpmil.runs.maps_input import PatchTable
from gpmil.runs.marks import MarksFile
from gpmil.show import qupath

h5_look.SECONDS = 1.0  # so many seconds per file that libhdf5 would never be done with

NAMES = ("s0", "s1", "s2")
LABELS = {"s0": 1, "s1": 0, "s2": 1}
N, D = 6, 4
CELLS = np.argwhere(np.ones((2, 3), dtype=bool)) * 256
PATIENTS = {"s0": "p0", "s1": "p1", "s2": "p1"}

Write = Callable[[Path], None]
Mutate = Callable[[Path, np.random.Generator], None]


def features(name: str) -> np.ndarray:
    return writers.vectors(N, D, seed=NAMES.index(name))


# ------------------------------------------------------------------ samples


def _trident(folder: Path) -> None:
    for name in NAMES:
        writers.trident(
            folder, name, features(name), CELLS, patch_size=256, patch_size_level0=256,
            level0_magnification=20, target_magnification=20, overlap=0,
        )  # fmt: skip


def _trident_packed(folder: Path) -> None:
    """As TRIDENT appends: pieces that grow, and packed ones."""
    for name in NAMES:
        with h5py.File(folder / f"{name}.h5", "w") as f:
            f.create_dataset("features", data=features(name), chunks=(2, D), maxshape=(None, D),
                             compression="gzip")  # fmt: skip
            f.create_dataset("coords", data=CELLS, chunks=(2, 2), maxshape=(None, 2))
            f["features"].attrs["encoder"] = "uni_v1"
            f["coords"].attrs.update({"patch_size_level0": 256, "patch_size": 256, "overlap": 0})


def _clam(folder: Path) -> None:
    for name in NAMES:
        writers.clam(folder, name, features(name), CELLS)


def _clam_tensors(folder: Path) -> None:
    import torch

    for name in NAMES:
        torch.save(torch.from_numpy(features(name)), folder / f"{name}.pt")


def _stamp(folder: Path) -> None:
    for name in NAMES:
        writers.stamp(folder, name, features(name), CELLS, unit="um", tile_size_um=256.0,
                      extractor="uni", feat_type="tile")  # fmt: skip


def _huggingface(folder: Path) -> None:
    for name in NAMES:
        writers.huggingface(folder, name, features(name), CELLS)


def _slideflow(folder: Path) -> None:
    for name in NAMES:
        writers.slideflow(folder, name, features(name), CELLS)


def _torchmil(folder: Path) -> None:
    for name in NAMES:
        writers.torchmil(folder, name, features(name), CELLS, LABELS[name], np.zeros(N, int))


def _torchmil_h5(folder: Path) -> None:
    for name in NAMES:
        writers.torchmil(folder, name, features(name), CELLS, LABELS[name], np.zeros(N, int), ".h5")


def _npy(folder: Path) -> None:
    for name in NAMES:
        np.save(folder / f"{name}.npy", features(name))


def _frame() -> pd.DataFrame:
    parts = []
    for name in NAMES:
        part = pd.DataFrame(features(name), columns=[f"feature_{k}" for k in range(D)])
        part.insert(0, "slide", name)
        part.insert(1, "label", LABELS[name])
        part.insert(2, "patient", PATIENTS[name])
        part.insert(3, "x", CELLS[:, 0])
        part.insert(4, "y", CELLS[:, 1])
        parts.append(part)
    return pd.concat(parts, ignore_index=True)


def _csv(folder: Path) -> None:
    (folder / "t.csv").write_text(_frame().to_csv(index=False))


def _csv_gz(folder: Path) -> None:
    (folder / "t.csv.gz").write_bytes(gzip.compress(_frame().to_csv(index=False).encode()))


def _parquet(folder: Path) -> None:
    _frame().to_parquet(folder / "t.parquet")


def _npz(folder: Path) -> None:
    np.savez(
        folder / "c.npz",
        X=np.concatenate([features(name) for name in NAMES]),
        bag=np.repeat(np.arange(3), N),
        y_bag=np.array(list(LABELS.values())),
        bag_id=np.array(NAMES),
        y_inst=np.zeros(3 * N, int),
        x=np.tile(CELLS[:, 0], 3),
        y=np.tile(CELLS[:, 1], 3),
        patient=np.array(list(PATIENTS.values())),
    )


def _sicapv2(folder: Path) -> None:
    grades = {"s0": 3, "s1": 0, "s2": 4}
    for file, names in (("Train.csv", ("s0", "s1")), ("Test.csv", ("s2",))):
        parts = []
        for name in names:
            part = pd.DataFrame(features(name), columns=[f"feature_{k}" for k in range(D)])
            part["instance_name"] = [
                f"{name}_Block_Region_0_{y // 256}_{x // 256}_xini_{4 * x}_yini_{4 * y}.jpg"
                for x, y in CELLS
            ]
            part["instance_label"] = 4 if grades[name] else 0
            part["bag_name"] = name
            part["bag_label_primary"] = part["bag_label_secondary"] = grades[name]
            parts.append(part)
        pd.concat(parts).to_csv(folder / file, index=False)
    slides = pd.DataFrame({"slide_id": NAMES, "patient_id": list(PATIENTS.values())})
    slides["Gleason_primary"] = slides["Gleason_secondary"] = list(grades.values())
    slides.to_csv(folder / "wsi_labels.csv", index=False)


def _labels(folder: Path) -> None:
    (folder / "f").mkdir()
    _npy(folder / "f")
    rows = pd.DataFrame(
        {"slide": NAMES, "patient": list(PATIENTS.values()), "label": list(LABELS.values())}
    )
    rows.to_csv(folder / "labels.csv", index=False)


def _patches(folder: Path) -> None:
    rows = pd.DataFrame({"x": CELLS[:, 0], "y": CELLS[:, 1], "probability": np.linspace(0, 1, N)})
    rows["sd"], rows["p_value"], rows["flagged"] = 0.1, 0.5, 0
    (folder / "s0.csv.gz").write_bytes(gzip.compress(rows.to_csv(index=False).encode()))


def _patch_labels(folder: Path) -> None:
    rows = [("s0", 0, 0, 1), ("s0", 256, 256, 0), ("s2", 512, 0, 1)]
    pd.DataFrame(rows, columns=["slide", "x", "y", "label"]).to_csv(folder / "l.csv", index=False)


def _annotations(folder: Path) -> None:
    flagged = np.arange(N) % 2 == 0
    patches = qupath.Patches(CELLS, np.linspace(0.1, 0.9, N), flagged=flagged)
    qupath.write(folder / "s1.geojson", patches, 256)
    qupath.write(folder / "s2.geojson", patches, 256, gzip=True)


def _marks(folder: Path) -> None:
    said = {"when": "2026-01-02T03:04:05Z", "who": "a", "window": "w"}
    strokes = [{"id": f"{k}", "slide": name, "label": k % 2} for k, name in enumerate(NAMES)]
    lines = [said | stroke | {"patches": CELLS.tolist()} for stroke in strokes]
    lines.append(said | {"undo": "2"})
    (folder / MARKS).write_text("".join(json.dumps(line) + "\n" for line in lines))


# ------------------------------------------------------------------ damage


@cache
def _sample(write: Write) -> tuple[tuple[str, bytes], ...]:
    """The files of a sample, written once a process."""
    with TemporaryDirectory() as held:
        write(Path(held))
        files = sorted(p for p in Path(held).rglob("*") if p.is_file())
        return tuple((str(p.relative_to(held)), p.read_bytes()) for p in files)


def damaged(write: Write, kinds: dict[str, Mutate], only: str = "*") -> Mutate:
    """A sample with a file that bytes, or a mutator of its ending, have damaged."""

    def make(folder: Path, rng: np.random.Generator) -> None:
        for name, data in _sample(write):
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
        files = sorted(p for p in folder.rglob(only) if p.is_file())
        path = files[rng.integers(len(files))]
        structure = next((m for end, m in kinds.items() if path.name.endswith(end)), None)
        chance = rng.random()
        if chance < 0.02:
            mutate.other_file(path, rng)
        elif structure is not None and chance < 0.5:
            try:
                structure(path, rng)
            except Exception:  # what no library can write is nothing to be read
                mutate.some_bytes(path, rng)
        else:
            mutate.some_bytes(path, rng)

    return make


def damaged_cache(folder: Path, rng: np.random.Generator) -> None:
    """Whole files, and what is kept of them damaged; the features have no checksum."""
    _npy(folder)
    read(folder)
    kept = sorted(p for p in (folder / ".gpmil-cache").rglob("*") if p.suffix in (".json", ".npz"))
    path = kept[rng.integers(len(kept))]
    if path.suffix == ".json" and rng.random() < 0.7:
        mutate.json_values(path, rng)
    else:
        mutate.some_bytes(path, rng)


# ------------------------------------------------------------------ reading


def read(folder: Path) -> object:
    """As a user does, with a look at all that is said of it."""
    bags, report = read_with_report(folder)
    return bags, report, [*report.lines(), *report.warnings()]


def read_with_labels(folder: Path) -> object:
    bags, report = read_with_report(folder / "f", folder / "labels.csv", cache=folder / "cache")
    return bags, report, [*report.lines(), *report.warnings()]


def read_table(folder: Path) -> object:
    return read(next(p for p in sorted(folder.iterdir()) if p.is_file() or p.is_symlink()))


def run_inspect(folder: Path) -> object:
    with redirect_stdout(io.StringIO()) as said:
        inspect.run(Source(str(folder), skip_bad=True))
    return said.getvalue()


def read_patch_labels(folder: Path) -> object:
    plain = [features(name) for name in NAMES]
    bags = Bags.from_arrays(plain, coords=[CELLS] * 3, step=256, names=NAMES)
    file = next((p for p in folder.iterdir() if p.name == "l.csv"), folder)
    positive = None if file.is_file() else qupath.FLAGGED
    return with_patch_labels(bags, file, positive)


def read_marks(folder: Path) -> object:
    return MarksFile(folder).read()


def read_patches(folder: Path) -> object:
    return PatchTable(folder / "s0.csv.gz").read()


# ------------------------------------------------------------------ judging


def judge(folder: Path, result: object) -> None:
    """What was read is finite, of one shape, and of the slides that were written."""
    bags, _, _ = result
    assert np.isfinite(np.asarray(bags.features, dtype="f8")).all(), "values that are not finite"
    assert bags.offsets[-1] == len(bags.features), "offsets"
    assert bags.coords is None or np.isfinite(bags.coords).all(), "positions"
    assert bags.coords is None or len(bags.coords) == len(bags.features), "positions"
    assert set(bags.labels.tolist()) <= {-1, 0, 1}, "labels"
    assert bags.step is None or (np.isfinite(bags.step).all() and (bags.step > 0).all()), "step"
    assert len(set(bags.names.tolist())) == len(bags), "names"


def judge_files(folder: Path, result: object) -> None:
    """In addition: slides are named as their files are."""
    judge(folder, result)
    bags, _, _ = result
    assert set(bags.names.tolist()) <= set(NAMES), f"slides {bags.names.tolist()}"
    assert bags.n_features <= 10**4 and len(bags.features) <= 10**4, f"shape {bags.features.shape}"


def judge_labels(folder: Path, result: object) -> None:
    """In addition: rows that still stand in the table are obeyed, and nothing else is."""
    judge_files(folder, result)
    bags, report, _ = result
    text = (folder / "labels.csv").read_bytes().decode("utf-8", errors="replace")
    lines = text.split("\n")  # splitlines would end a line at characters that tables do not
    header, plain = lines[0].strip().split(","), [line.strip() for line in lines]
    for name, label in zip(bags.names.tolist(), bags.labels.tolist()):
        own = f"{name},{PATIENTS[name]},{LABELS[name]}"
        if header == ["slide", "patient", "label"] and plain.count(own) == 1:
            assert label == LABELS[name], f"label {label} of {name}"
        if label == -1:
            assert name in report.slides_without_label or ",-1" in text, f"{name} without a word"


def judge_rows(folder: Path, result: object) -> None:
    """Slides of a table are words of its column."""
    judge(folder, result)
    bags, _, _ = result
    odd = [name for name in bags.names.tolist() if name.isdigit() and len(name) == 1]
    # a row number in place of a name: only if the table says so in its own column
    path = next(p for p in sorted(folder.iterdir()) if p.is_file())
    raw = path.read_bytes()
    text = (gzip.decompress(raw) if path.suffix == ".gz" else raw).decode(errors="replace")
    lines = [line.split(",") for line in text.splitlines()]
    assert all(any(line[0] == name for line in lines) for name in odd), f"slides {odd}"
    if odd:
        assert all(len(line) <= len(lines[0]) for line in lines), "columns are shifted"


def judge_patches(folder: Path, result: object) -> None:
    assert np.isfinite(result.coords).all() and len(result.coords) == len(result.probability)


def judge_patch_labels(folder: Path, result: object) -> None:
    assert len(result.instance_labels) == 3 * N
    assert (
        set(result.instance_labels.tolist()) <= {-1, 0, 1} and (result.instance_labels >= 0).any()
    )


def judge_marks(folder: Path, result: object) -> None:
    assert all(m.label in (0, 1) and np.isfinite(m.place).all() for m in result.marks())


H5 = {".h5": mutate.h5}
CSV: dict[str, Mutate] = {".csv": mutate.cells, ".csv.gz": mutate.cells}
TENSORS: dict[str, Mutate] = {".pt": mutate.tensor, ".npz": mutate.npz, ".json": mutate.json_values}
ARRAYS: dict[str, Mutate] = {".npy": mutate.npy}

TARGETS: list[Target] = [
    Target("trident", damaged(_trident, H5), read, judge_files),
    Target("trident-packed", damaged(_trident_packed, H5), read, judge_files),
    Target("clam", damaged(_clam, H5, "*.h5"), read, judge_files),
    Target("clam-tensors", damaged(_clam_tensors, TENSORS), read, judge_files),
    Target("stamp", damaged(_stamp, H5), read, judge_files),
    Target("huggingface", damaged(_huggingface, H5), read, judge_files),
    Target("slideflow", damaged(_slideflow, TENSORS), read, judge_files),
    Target("torchmil", damaged(_torchmil, ARRAYS), read, judge_files),
    Target("torchmil-h5", damaged(_torchmil_h5, H5), read, judge_files),
    Target("npy", damaged(_npy, ARRAYS), read, judge_files),
    Target("cache", damaged_cache, read, judge_files),
    Target("csv", damaged(_csv, CSV), read_table, judge_rows),
    Target("csv-gz", damaged(_csv_gz, CSV), read_table, judge_rows),
    Target("npz", damaged(_npz, {".npz": mutate.npz}), read_table, judge),
    Target("sicapv2", damaged(_sicapv2, CSV), read, judge),
    Target("labels", damaged(_labels, CSV, "*.csv"), read_with_labels, judge_labels),
    Target("inspect-skip-bad", damaged(_trident, H5), run_inspect),
    Target("patch-labels", damaged(_patch_labels, CSV), read_patch_labels, judge_patch_labels),
    Target(
        "annotations",
        damaged(_annotations, {".geojson": mutate.json_values}),
        read_patch_labels,
        judge_patch_labels,
    ),
    Target("marks", damaged(_marks, {}, MARKS), read_marks, judge_marks),
    Target("patch-table", damaged(_patches, CSV), read_patches, judge_patches),
]
if find_spec("pyarrow") is not None:
    TARGETS.append(Target("parquet", damaged(_parquet, {}), read_table, judge))
