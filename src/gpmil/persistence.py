"""A model on disk: arrays in safetensors, everything else in JSON, one folder.

    model.safetensors   named arrays
    model.json          format, version, class, settings, fitted numbers, card, checksum

Reading executes nothing. Writing is all or nothing: the folder is made beside and renamed.
"""

import hashlib
import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load as load_arrays
from safetensors.numpy import save as dump_arrays

FORMAT = "gpmil-model"
VERSION = 1
ARRAYS, CARD = "model.safetensors", "model.json"


def write(path: str | os.PathLike, arrays: dict[str, np.ndarray], card: dict[str, Any]) -> None:
    """Write a folder; one that already holds a gpmil model is replaced, any other refused."""
    path = Path(path)
    _check_target(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    payload = dump_arrays({name: np.ascontiguousarray(a) for name, a in arrays.items()})
    head = {"format": FORMAT, "version": VERSION, "sha256": hashlib.sha256(payload).hexdigest()}
    text = json.dumps(head | card, indent=2, allow_nan=True) + "\n"
    fresh = Path(tempfile.mkdtemp(prefix=f".{path.name}.", dir=path.parent))
    try:
        (fresh / ARRAYS).write_bytes(payload)
        (fresh / CARD).write_text(text, encoding="utf-8")
        fresh.chmod(0o755)
        _swap(fresh, path)
    finally:
        shutil.rmtree(fresh, ignore_errors=True)


def _check_target(path: Path) -> None:
    if path.exists() and not path.is_dir():
        raise ValueError(f"cannot save to {path}: it is a file. Name a folder for the model.")
    if path.is_dir() and any(path.iterdir()) and not (path / CARD).exists():
        raise ValueError(
            f"cannot save to {path}: the folder holds something else than a gpmil model. "
            "Name a new or empty folder."
        )


def _swap(fresh: Path, path: Path) -> None:
    if not path.exists():
        os.replace(fresh, path)
        return
    old = Path(tempfile.mkdtemp(prefix=f".{path.name}.old.", dir=path.parent))
    os.replace(path, old / path.name)
    os.replace(fresh, path)
    shutil.rmtree(old)


def read(path: str | os.PathLike) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """Arrays and card of a folder that `write` made; a ValueError says what is wrong otherwise."""
    path = Path(path)
    for name in (CARD, ARRAYS):
        if not (path / name).is_file():
            raise ValueError(f"no gpmil model at {path}: {name} is missing. Was it saved there?")
    card = _read_card(path / CARD)
    payload = (path / ARRAYS).read_bytes()
    if hashlib.sha256(payload).hexdigest() != card.get("sha256"):
        raise ValueError(
            f"{path / ARRAYS} is corrupted or belongs to another model (its checksum differs from "
            f"the one in {CARD}). Copy the folder again, or fit and save anew."
        )
    try:
        return load_arrays(payload), card
    except SafetensorError as error:
        raise ValueError(f"{path / ARRAYS} is no readable safetensors file: {error}.") from error


def _read_card(file: Path) -> dict[str, Any]:
    try:
        card = json.loads(file.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(
            f"{file} is corrupted: not readable as JSON ({error}). "
            "Copy the folder again, or fit and save anew."
        ) from error
    if not isinstance(card, dict) or card.get("format") != FORMAT:
        raise ValueError(f"{file} does not describe a gpmil model (format {FORMAT!r} expected).")
    if not isinstance(card.get("version"), int) or card["version"] > VERSION:
        raise ValueError(
            f"{file} has format version {card.get('version')!r}; this gpmil reads up to {VERSION}. "
            "It was written by a newer gpmil: upgrade to load it."
        )
    return card
