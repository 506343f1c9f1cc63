"""Feature files as the tools write them: one small function a format, for synthetic slides."""

import json
from pathlib import Path

import h5py
import numpy as np
import torch

TRIDENT_JOB = "20x_256px_0px_overlap"


def tissue(rows: int = 5, cols: int = 6, seed: int = 3) -> np.ndarray:
    """Cells (n, 2) of an irregular piece of tissue, column and row."""
    cells = np.argwhere(np.ones((rows, cols), dtype=bool))
    rng = np.random.default_rng(seed)
    return cells[np.sort(rng.permutation(len(cells))[: len(cells) - 4])]


def grid_edges(cells: np.ndarray) -> int:
    """Pairs of cells that share a side, counted one by one."""
    there = {tuple(c) for c in np.asarray(cells).tolist()}
    return sum((x + 1, y) in there for x, y in there) + sum((x, y + 1) in there for x, y in there)


def vectors(n: int, d: int = 7, seed: int = 0, dtype: str = "f4") -> np.ndarray:
    return np.random.default_rng([seed, n, d]).normal(size=(n, d)).astype(dtype)


def trident(
    folder: Path,
    name: str,
    features: np.ndarray,
    coords: np.ndarray,
    encoder: str = "uni_v1",
    **attrs,
) -> Path:
    """<folder>/<name>.h5; `attrs` of coords as they are given."""
    folder.mkdir(parents=True, exist_ok=True)
    with h5py.File(folder / f"{name}.h5", "w") as f:
        f["features"] = features
        f["features"].attrs.update({"encoder": encoder, "name": name})
        f["coords"] = np.asarray(coords)
        f["coords"].attrs.update(attrs)
    return folder / f"{name}.h5"


def clam(
    folder: Path,
    name: str,
    features: np.ndarray,
    coords: np.ndarray,
    patch_size: int | None = 256,
    downsample: float = 1.0,
) -> Path:
    """h5_files, pt_files and patches under the folder."""
    for part in ("h5_files", "pt_files", "patches"):
        (folder / part).mkdir(parents=True, exist_ok=True)
    path = folder / "h5_files" / f"{name}.h5"
    with h5py.File(path, "w") as f:
        f["features"], f["coords"] = features, np.asarray(coords, dtype="i4")
    torch.save(torch.from_numpy(features), folder / "pt_files" / f"{name}.pt")
    if patch_size is not None:
        with h5py.File(folder / "patches" / f"{name}.h5", "w") as f:
            f["coords"] = np.asarray(coords, dtype="i4")
            f["coords"].attrs.update(
                {
                    "patch_size": patch_size,
                    "patch_level": 1,
                    "downsample": np.array([downsample, downsample]),
                    "name": name,
                }
            )
    return path


def stamp(folder: Path, name: str, features: np.ndarray, coords=None, **attrs) -> Path:
    """<folder>/<name>.h5 in float16; without coords the older file."""
    folder.mkdir(parents=True, exist_ok=True)
    with h5py.File(folder / f"{name}.h5", "w") as f:
        if coords is None:
            f["patch_embeddings"] = features
        else:
            f["feats"], f["coords"] = features.astype("f2"), np.asarray(coords, dtype=float)
        f.attrs.update(attrs)
    return folder / f"{name}.h5"


def huggingface(folder: Path, name: str, features: np.ndarray, coords: np.ndarray) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    with h5py.File(folder / f"{name}.h5", "w") as f:
        f["features"], f["coords"] = features[None], np.asarray(coords)[None]
    return folder / f"{name}.h5"


def slideflow(folder: Path, name: str, features: np.ndarray, centres: np.ndarray) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    torch.save(torch.from_numpy(features), folder / f"{name}.pt")
    np.savez(folder / f"{name}.index.npz", np.asarray(centres))
    config = {"extractor": {"class": "ctranspath"}, "tile_px": 224, "tile_um": 112}
    (folder / "bags_config.json").write_text(json.dumps(config))
    return folder / f"{name}.pt"


def torchmil(
    folder: Path, name: str, features, coords, label: int, inst_labels, ending: str = ".npy"
) -> Path:
    parts = {"features": features, "coords": coords, "labels": [label], "inst_labels": inst_labels}
    for part, values in parts.items():
        (folder / part).mkdir(parents=True, exist_ok=True)
        path = folder / part / f"{name}{ending}"
        if ending == ".npy":
            np.save(path, np.asarray(values))
        else:
            with h5py.File(path, "w") as f:
                f[part] = np.asarray(values)
    return folder / "features" / f"{name}{ending}"
