"""Saved models and run folders, damaged: bytes, entries and arrays, with checksums that fit.

The samples are made once per process, tiny. A case damages a copy of their files.
"""

import gzip
import io
import json
import math
import os
import tempfile
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pandas as pd

import gpmil
from fuzz.campaign import Target
from gpmil.cli import evaluate, heatmap, qupath
from gpmil.cli.options import LabelTable
from gpmil.files import persistence
from gpmil.files.foreign import require_regular
from gpmil.models.base import InstancePredictions
from gpmil.runs import judge
from gpmil.runs import page as run_report
from gpmil.runs.files import (
    METRICS,
    PATCHES,
    PREDICTIONS,
    read_config,
    read_patches,
    read_predictions,
)
from gpmil.runs.maps_input import MapOptions
from gpmil.runs.workspace import UNITS, csv_bytes, workspace
from gpmil.show.report import Picture

Files = dict[str, bytes]
FIXED = {"variance": 2.3, "lengthscale": 1.9, "mean": -1.1, "n_inducing": 6, "random_state": 0}
SHORT = {"max_epochs": 2, "hidden_dim": 4, "random_state": 0}

# ------------------------------------------------------------------ damage

ODD = [
    None, True, False, 0, 1, -1, 2, 7, 0.5, -0.5, 1e-320, 1e300, -1e300, 10**400, -(10**30),
    math.nan, math.inf, -math.inf, "", "auto", "rbf", "nan", "../../x", "é\ud83d", "x" * 5000,
    [], {}, [1], [[1, 2], [3]], {"a": 1}, [None] * 3, "VGPMIL", "learn", 3.0, 4, "0", "1_0",
]  # fmt: skip
LITERALS = [b"NaN", b"-Infinity", b"1e999", b"9" * 400, b"9" * 5000, b"[" * 100_000, b'"\\ud800"']


def bytes_changed(content: bytes, rng: np.random.Generator) -> bytes:
    """A file as disks, transfers and editors leave it."""
    raw = bytearray(content)
    at = int(rng.integers(len(raw) + 1))
    n = int(rng.integers(1, 40))
    kind = int(rng.integers(8))
    if kind == 0:
        for place in rng.integers(len(raw), size=rng.integers(1, 9)) if raw else ():
            raw[place] ^= 1 << int(rng.integers(8))
    elif kind == 1:
        del raw[at:]
    elif kind == 2:
        del raw[at : at + n]
    elif kind == 3:
        raw[at:at] = rng.bytes(n)
    elif kind == 4:
        raw[at : at + 4096] = bytes(len(raw[at : at + 4096]))
    elif kind == 5:
        raw[at:at] = raw[at : at + 10 * n]
    elif kind == 6:
        raw[at : at + n] = LITERALS[rng.integers(len(LITERALS))]
    else:
        raw = bytearray([b"", b"\xff\xfe\x00", rng.bytes(300), b"\n", b"\x1f\x8b"][rng.integers(5)])
    return bytes(raw)


def value_changed(value, rng: np.random.Generator):
    """Something else in one place of what JSON holds."""
    if isinstance(value, dict) and value and rng.random() < 0.93:
        name = list(value)[rng.integers(len(value))]
        changed = dict(value)
        kind = rng.random()
        if kind < 0.08:
            del changed[name]
        elif kind < 0.12:
            changed[f"{name}x"] = changed.pop(name)
        else:
            changed[name] = value_changed(value[name], rng)
        return changed
    if isinstance(value, list) and value and rng.random() < 0.9:
        k = int(rng.integers(len(value)))
        new = [] if rng.random() < 0.1 else [value_changed(value[k], rng)] * int(rng.integers(1, 3))
        return [*value[:k], *new, *value[k + 1 :]]
    if isinstance(value, int | float) and not isinstance(value, bool) and rng.random() < 0.4:
        return [value + 1, -value, value * 1e9, float(value), value / 1e200][rng.integers(5)]
    return ODD[rng.integers(len(ODD))]


def array_changed(array: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Other numbers, another shape or another type."""
    changed = np.array(array)
    kind = int(rng.integers(9))
    if kind <= 3 and changed.size:
        odd = [np.nan, np.inf, -np.inf, 0.0, -1.0, 1e300, -1e300, 1e-300, 3.5, 1e18]
        where = rng.random(changed.shape) < [0.02, 0.3, 1.0][rng.integers(3)]
        where.flat[rng.integers(where.size)] = True
        with np.errstate(all="ignore"):
            changed[where] = np.array(odd[rng.integers(len(odd))]).astype(changed.dtype)
    elif kind == 4:
        changed = -changed if changed.dtype.kind in "if" else ~changed
    elif kind == 5:
        types = ["f4", "f8", "f2", "i8", "i4", "u1", "?"]
        with np.errstate(all="ignore"):
            changed = changed.astype(types[rng.integers(len(types))])
    elif kind == 6:
        shapes = [changed[:-1], changed[None], changed.T, changed.ravel(), changed[:0]]
        shapes += [np.concatenate([changed, changed])]
        changed = shapes[rng.integers(len(shapes))]
    elif kind == 7:
        with np.errstate(all="ignore"):
            changed = changed * 10.0 ** rng.integers(-300, 300)
    else:
        changed = rng.permutation(changed)
    return np.ascontiguousarray(changed)


# ------------------------------------------------------------------ saved models


@cache
def cohort() -> gpmil.Bags:
    """Slides of three to six patches on a grid."""
    rng = np.random.default_rng(0)
    sizes = [3, 4, 6, 5] * 5
    arrays = [
        rng.normal(size=(n, 5)) + 2 * (b % 2) * (np.arange(n) < 2)[:, None]
        for b, n in enumerate(sizes)
    ]
    coords = [np.column_stack([np.arange(n) % 2, np.arange(n) // 2]) * 8 for n in sizes]
    labels = [b % 2 for b in range(len(sizes))]
    return gpmil.Bags.from_arrays(arrays, labels=labels, coords=coords, step=8)


MODELS: dict[str, Callable[[], list[gpmil.models.BagClassifier]]] = {
    "VGPMIL": lambda: [
        gpmil.VGPMIL(**FIXED, max_iter=10),
        gpmil.VGPMIL(**FIXED, max_iter=5, bag="max", kernel="linear", n_components=3),
    ],
    "VGPMILPR": lambda: [
        gpmil.VGPMILPR(**FIXED),
        gpmil.VGPMILPR(**FIXED | {"lengthscale": [1.0, 2.0, 3.0], "n_components": 3}),
        gpmil.VGPMILPR(**FIXED, kernel="matern52", optimize=("mean",)),
    ],
    "VGPMILPRI": lambda: [
        gpmil.VGPMILPRI(**FIXED, coupling=0.7),
        gpmil.VGPMILPRI(**FIXED, coupling=0.7, calibrated=True, flags=True, n_folds=2),
        gpmil.VGPMILPRI(**FIXED | {"variance": "auto"}, coupling=0.7, tuning_budget=2),
        gpmil.VGPMILPRI(**FIXED, coupling=2.0, inducing=cohort().features[::9].copy()),
    ],
    "AttentionMIL": lambda: [
        gpmil.AttentionMIL(**SHORT, attention_dim=3, gated=True, smooth="learn"),
        gpmil.AttentionMIL(**SHORT, attention_dim=3, smooth=0.5, dtype="float64"),
        gpmil.AttentionMIL(**SHORT, attention_dim=3),
    ],
    "MeanPoolMIL": lambda: [gpmil.MeanPoolMIL(**SHORT), gpmil.MeanPoolMIL(**SHORT, n_components=2)],
    "MaxPoolMIL": lambda: [gpmil.MaxPoolMIL(**SHORT, dtype="float64"), gpmil.MaxPoolMIL(**SHORT)],
    "PseudoLabelMIL": lambda: [
        gpmil.PseudoLabelMIL(hidden=4, n_rounds=2, random_state=0),
        gpmil.PseudoLabelMIL(classifier=_logistic(), n_rounds=2, n_components=3, random_state=0),
    ],
}


def _logistic():
    from sklearn.linear_model import LogisticRegression

    return LogisticRegression()


@cache
def saved(name: str) -> list[Files]:
    """The files of fitted models of a class."""
    return [_files_of(model.fit(cohort())) for model in MODELS[name]()]


def _files_of(model: gpmil.models.BagClassifier) -> Files:
    with tempfile.TemporaryDirectory() as folder:
        model.save(Path(folder) / "model")
        return {p.name: p.read_bytes() for p in (Path(folder) / "model").iterdir()}


def damage_model(name: str, folder: Path, rng: np.random.Generator) -> None:
    """Bytes, an entry of the card or an array, the last two with checksums that fit."""
    files = saved(name)[rng.integers(len(saved(name)))]
    place = folder / "model"
    write_files(place, files)
    kind = rng.random()
    if kind < 0.15:
        damage_file(place / list(files)[rng.integers(2)], rng)
        return
    arrays, card = persistence.read(place)
    if kind < 0.55:
        card = value_changed(card, rng)
    else:
        for array in rng.choice(list(arrays), size=rng.integers(1, 3)):
            kind = rng.random()
            if kind < 0.05:
                del arrays[array]
                break
            arrays[array] = array_changed(arrays[array], rng)
    card = card if isinstance(card, dict) else {"format": persistence.FORMAT, "odd": card}
    payload = persistence.dump_arrays(arrays)
    with_sums = card | {"sha256": persistence._checksums(payload, card)}
    (place / persistence.ARRAYS).write_bytes(payload)
    (place / persistence.CARD).write_text(json.dumps(with_sums), encoding="utf-8")


def load_and_predict(folder: Path) -> tuple[np.ndarray, InstancePredictions | None]:
    """What a user does with a model."""
    model = gpmil.load(folder / "model")
    bags = cohort()[:6]
    try:
        return model.predict_proba(bags), _instances(model, bags)
    except ValueError as error:  # said while predicting, of the model: which, the caller knows
        error.args = (f"{folder / 'model'}: {error}",)
        raise


def _instances(model: gpmil.models.BagClassifier, bags: gpmil.Bags) -> InstancePredictions | None:
    if isinstance(model, gpmil.AttentionMIL):
        assert np.isfinite(model.attention(bags)).all(), "attention is not finite"
    if isinstance(model, gpmil.AttentionMIL | gpmil.MeanPoolMIL):
        return None
    return model.predict_instances(bags)


def judge_predictions(folder: Path, found: tuple[np.ndarray, InstancePredictions | None]) -> None:
    """Probabilities that are some."""
    proba, instances = found
    assert proba.shape == (6, 2), proba.shape
    assert np.isfinite(proba).all() and ((proba >= 0) & (proba <= 1)).all(), "no probabilities"
    assert np.allclose(proba.sum(axis=1), 1), "probabilities that do not sum to one"
    if instances is None:
        return
    for name in ("probability", "p_value"):
        p = getattr(instances, name)
        assert p is None or ((p >= 0) & (p <= 1)).all(), f"{name} of instances"
    assert np.isfinite(instances.mean).all() and (instances.std >= 0).all(), "mean or std"


# ------------------------------------------------------------------ run folders


@cache
def run_files() -> list[Files]:
    """A run of fit, one of predict with several couplings, and a cross-validation with repeats."""
    from typer.testing import CliRunner

    from gpmil.cli import app

    fixed = ["--variance", "2.3", "--lengthscale", "1.9", "--mean", "-1.7", "--n-inducing", "6"]
    fixed += ["--coupling", "0.6", "--interval-patches", "0"]
    with tempfile.TemporaryDirectory() as where:
        place = Path(where)
        table = place / "cohort.csv"
        _cohort_table().to_csv(table, index=False)
        for command in (
            ["fit", table, "--out", place / "fit", *fixed],
            ["predict", place / "fit", table, "--coupling", "0,0.5", "--out", place / "predict"],
            ["cv", table, "--folds", "2", "--repeats", "2", "--out", place / "cv", *fixed],
        ):
            result = CliRunner().invoke(app, [str(word) for word in command])
            assert result.exit_code == 0, result.output
        return [
            {str(p.relative_to(run)): p.read_bytes() for p in run.rglob("*") if p.is_file()}
            for run in (place / "fit", place / "predict", place / "cv")
        ]


def _cohort_table() -> pd.DataFrame:
    rng = np.random.default_rng(5)
    rows = []
    for b in range(8):
        for k in range(6):
            malignant = int(b % 2 and k in (0, 1, 3))
            row = {"slide": f"s{b}", "label": b % 2, "patient": f"p{b // 2}"}
            row |= {"patch_label": malignant, "x": 10 * (k % 3), "y": 10 * (k // 3)}
            rows.append(row | {f"f{d}": rng.normal(2.1 * malignant) for d in range(4)})
    return pd.DataFrame(rows)


def write_files(folder: Path, files: Files) -> None:
    """Files by name below a folder."""
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)


def damage_run(folder: Path, rng: np.random.Generator) -> None:
    """One file of a run, changed; files that matter more are chosen more often."""
    files = run_files()[rng.integers(len(run_files()))]
    write_files(folder / "run", files)
    names = [n for n in files if not n.endswith((".html", ".txt")) and not n.startswith("model")]
    tables = [n for n in names if n.startswith("patches")]
    first = [n for n in names if not n.startswith("patches")]
    model = [n for n in files if n.startswith("model")]
    group = [first, tables, model or tables][rng.choice(3, p=[0.6, 0.35, 0.05])]
    damage_file(folder / "run" / group[rng.integers(len(group))], rng)


def damage_file(file: Path, rng: np.random.Generator) -> None:
    """Its bytes, its content, or the file itself."""
    kind = rng.random()
    content = file.read_bytes()
    if kind < 0.04:
        file.unlink()
        if kind < 0.01:
            os.mkfifo(file)
        elif kind < 0.02:
            file.mkdir()
    elif kind < 0.35:
        file.write_bytes(bytes_changed(content, rng))
    elif file.suffix == ".json":
        file.write_text(json.dumps(value_changed(json.loads(content), rng)), encoding="utf-8")
    elif file.suffix == ".csv":
        file.write_bytes(table_changed(content, rng))
    elif file.suffix == ".gz":
        file.write_bytes(gzip.compress(table_changed(gzip.decompress(content), rng), mtime=0))
    else:
        file.write_bytes(bytes_changed(content, rng))


CELLS = [
    "", "nan", "inf", "-inf", "-0.1", "1.5", "2", "1e999", "9" * 400, "../../etc/passwd", "a/b",
    "x", "1_0", " 0.5 ", '"', "0x10", "é", "s0", "1e308", "-1e308", "0", "1", "a\x00b", "True",
]  # fmt: skip


def table_changed(content: bytes, rng: np.random.Generator) -> bytes:
    """A cell, a row, a column or the header of a table."""
    rows = [line.split(",") for line in content.decode().splitlines()]
    k = int(rng.integers(1, len(rows)))
    c = int(rng.integers(len(rows[0])))
    kind = int(rng.integers(9))
    if kind <= 2:
        rows[k][c] = CELLS[rng.integers(len(CELLS))]
    elif kind == 3:
        rows[k] = [*rows[k], *["1", "x", ""][: rng.integers(1, 4)]]
    elif kind == 4:
        rows = [rows[0], *([*row, "9"] for row in rows[1:])]  # every row longer than the header
    elif kind == 5:
        rows = [row[:c] + row[c + 1 :] for row in rows] if rng.random() < 0.5 else [
            rows[0], *rows[1:k], rows[k][:c], *rows[k + 1 :]
        ]  # fmt: skip
    elif kind == 6:
        rows[0][c] = ["x", "slide", "probability", "", rows[0][0]][rng.integers(5)]
    elif kind == 7:
        cell = CELLS[rng.integers(len(CELLS))]
        rows = [rows[0], *([*row[:c], cell, *row[c + 1 :]] for row in rows[1:])]
    else:
        rows = [rows[:1], rows[1:], rows + rows[1:], rows[:1] + rows[1:][::-1]][rng.integers(4)]
    out = io.StringIO()
    out.write("\n".join(",".join(row) for row in rows) + "\n")
    return out.getvalue().encode()


def read_and_evaluate(folder: Path) -> dict:
    """The readers of a run, its metrics by its own labels and its report."""
    run = folder / "run"
    none = _NoPictures()  # they take nearly all of the time
    with (
        patch.multiple(judge, RESAMPLES=5, FEWER_RESAMPLES=5),
        patch.multiple(run_report, plots=none, heatmaps=none, _picture=_no_picture),
    ):
        evaluate.run(run, LabelTable())
    for file in sorted((run / PATCHES).rglob("*.csv.gz")):
        read_patches(file)
    return json.loads((run / METRICS).read_text(encoding="utf-8"))


class _NoPictures:
    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *_, **__: None


def _no_picture(figure: object, alt: str, title: str, caption: str = "") -> Picture:
    return Picture(b"", alt, 1, title, caption)


def judge_metrics(folder: Path, found: dict) -> None:
    """Numbers within their ranges; predictions that are probabilities."""
    table = read_predictions(folder / "run")
    assert table["probability"].between(0, 1).all(), "probabilities of slides"
    assert table["label"].isin([0, 1]).any(), "labels"
    for part in found.get("couplings", {"": found}).values():
        for name, value in part.get("slides", {}).get("metrics", {}).items():
            assert value["value"] is None or math.isfinite(value["value"]), name
    assert (folder / "run" / run_report.REPORT).stat().st_size > 1000


def draw(folder: Path) -> list[str]:
    """A heat map of one slide."""
    heatmap.run(MapOptions(folder / "run", folder / "maps", names=["s1"]))
    return [p.name for p in (folder / "maps").iterdir()]


def export(folder: Path) -> list[str]:
    """All slides for QuPath."""
    qupath.run(MapOptions(folder / "run", folder / "qupath"))
    return [p.name for p in (folder / "qupath").iterdir()]


def judge_geojson(folder: Path, names: list[str]) -> None:
    """GeoJSON without NaN, probabilities between 0 and 1."""
    for name in names:
        if name.endswith(".geojson"):
            text = (folder / "qupath" / name).read_text(encoding="utf-8")
            assert "NaN" not in text and "Infinity" not in text, name
            for tile in json.loads(text)["features"]:
                assert 0 <= tile["properties"]["measurements"].get("p", 0) <= 1, name


def resume(folder: Path) -> pd.DataFrame:
    """What the commands that read an earlier run do: continue it, or know its training slides."""
    from gpmil.cli import predict

    run = folder / "run"
    card = read_config(run)
    require_regular(run / PREDICTIONS)  # the copy below would wait for a pipe
    predict._seen(run / "model", cohort())
    with workspace(folder / "new", card) as space:
        part = space.folder / UNITS / "one.csv"
        part.write_bytes((run / PREDICTIONS).read_bytes())
        try:
            space.write(PREDICTIONS, csv_bytes(space.pooled(["one"])))
            return read_predictions(space.folder)
        finally:
            part.unlink()  # a finished part would be kept, as it should


def judge_table(folder: Path, table: pd.DataFrame) -> None:
    """Predictions that are probabilities."""
    assert table["probability"].between(0, 1).all()


ROUTES = [
    "/", "/api/health", "/api/cohort", "/api/map/0/{k}", "/api/thumbnail/0/{k}.png",
    "/api/map/0/{k}?coupling=0.5", "/api/slide/{k}", "/api/tiles/{k}.dzi",
    "/api/tiles/{k}_files/0/0_0.jpeg", "/api/patch/{k}/0/1.jpg", "/api/similar/{k}/0/1",
    "/api/curves/0", "/api/curves/0?coupling=0.5", "/api/qupath/0/{k}.geojson",
    "/api/qupath/0/{k}.geojson?layer=flagged", "/api/map/1/0",
]  # fmt: skip


def view(folder: Path) -> list[tuple[str, int, bytes]]:
    """Every page of the viewer."""
    from fastapi.testclient import TestClient

    from gpmil.viewer import curves
    from gpmil.viewer.app import routes
    from gpmil.viewer.cohort import open_cohort

    curves.RESAMPLES = 5
    opened = open_cohort([folder / "run"])
    client = TestClient(routes(opened))
    paths = [path.format(k=k) for path in ROUTES for k in ((1, 2) if "{k}" in path else (0,))]
    answers = ((path, client.get(path)) for path in paths)
    return [(path, answer.status_code, answer.content) for path, answer in answers]


def judge_answers(folder: Path, answers: list[tuple[str, int, bytes]]) -> None:
    """No failure of the server; JSON that browsers read; probabilities that are some."""
    for path, status, content in answers:
        assert status < 500, path
        if path == "/api/cohort":
            found = json.loads(content, parse_constant=_refuse)
            for column in found["columns"]["runs"]:
                assert all(p is None or 0 <= p <= 1 for p in column["probability"]), path
        elif path.startswith("/api/curves"):
            json.loads(content, parse_constant=_refuse)


def _refuse(constant: str) -> None:
    raise AssertionError(f"{constant} in JSON")


TARGETS = [
    *(
        Target(f"model-{name}", partial(damage_model, name), load_and_predict, judge_predictions)
        for name in MODELS
    ),
    Target("run-evaluate", damage_run, read_and_evaluate, judge_metrics),
    Target("run-heatmap", damage_run, draw),
    Target("run-qupath", damage_run, export, judge_geojson),
    Target("run-resume", damage_run, resume, judge_table),
    Target("run-viewer", damage_run, view, judge_answers),
]
