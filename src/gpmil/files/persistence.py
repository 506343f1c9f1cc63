"""A model on disk: arrays in safetensors, everything else in JSON, one folder.

    model.safetensors   named arrays
    model.json          format, version, class, settings, fitted numbers, card, checksum

Reading executes nothing. Writing is all or nothing: the folder is made beside and renamed.
"""

import hashlib
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load as load_arrays
from safetensors.numpy import save as dump_arrays

from gpmil.files.foreign import BadFile, read_json, reading, require_regular
from gpmil.files.whole import fresh_folder, written_by_someone

FORMAT = "gpmil-model"
VERSION = 1
ARRAYS, CARD = "model.safetensors", "model.json"
ADVICE = "Copy the folder again, or fit and save anew."


def write(path: str | os.PathLike, arrays: dict[str, np.ndarray], card: dict[str, Any]) -> None:
    """Write a folder; one that already holds a gpmil model is replaced, any other refused."""
    path = Path(path)
    _check_target(path)
    payload = dump_arrays({name: np.ascontiguousarray(a) for name, a in arrays.items()})
    card = {"format": FORMAT, "version": VERSION} | card
    text = json.dumps(card | {"sha256": _checksums(payload, card)}, indent=2) + "\n"
    with fresh_folder(path) as fresh:
        (fresh / ARRAYS).write_bytes(payload)
        (fresh / CARD).write_text(text, encoding="utf-8")


def _checksums(payload: bytes, card: dict[str, Any]) -> dict[str, str]:
    rest = {k: v for k, v in card.items() if k != "sha256"}
    text = json.dumps(rest, sort_keys=True).encode()
    return {"arrays": hashlib.sha256(payload).hexdigest(), "card": hashlib.sha256(text).hexdigest()}


def _check_target(path: Path) -> None:
    if path.exists() and not path.is_dir():
        raise ValueError(f"cannot save to {path}: it is a file. Name a folder for the model.")
    others = written_by_someone(path) if path.is_dir() else []
    if not others:
        return
    if set(others) == {ARRAYS, CARD}:
        _read_card(path / CARD)  # refuses what is not ours
        return
    raise ValueError(
        f"cannot save to {path}: the folder holds other things than a gpmil model "
        f"({', '.join(others[:3])}). Name a new or empty folder."
    )


def read(path: str | os.PathLike) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """Arrays and card of a folder that `write` made; a ValueError says what is wrong otherwise."""
    path = Path(path)
    for name in (CARD, ARRAYS):
        if not (path / name).exists():
            raise ValueError(f"no gpmil model at {path}: {name} is missing. Was it saved there?")
        require_regular(path / name)
    card = _read_card(path / CARD)
    with reading(path / ARRAYS, "bytes"):
        payload = (path / ARRAYS).read_bytes()
    expected = card.get("sha256")
    for name, found in _checksums(payload, card).items():
        if not isinstance(expected, dict) or found != expected.get(name):
            file = path / (ARRAYS if name == "arrays" else CARD)
            raise ValueError(
                f"{file} is corrupted or belongs to another model (its checksum differs from the "
                f"one noted in {CARD}). {ADVICE}"
            )
    with reading(path / ARRAYS, "safetensors"):
        return load_arrays(payload), card


def _read_card(file: Path) -> dict[str, Any]:
    try:
        card = read_json(file, finite=False)  # a residual may be infinite
    except BadFile as error:
        raise ValueError(f"{error}. The file is corrupted. {ADVICE}") from error
    if not isinstance(card, dict) or card.get("format") != FORMAT:
        raise ValueError(f"{file} does not describe a gpmil model (format {FORMAT!r} expected).")
    number = card.get("version")
    if not isinstance(number, int) or isinstance(number, bool) or number < 1:
        raise ValueError(f"{file} is corrupted: {number!r} is no format version.")
    if number > VERSION:
        raise ValueError(
            f"{file} has format version {number}; this gpmil reads up to {VERSION}. "
            "It was written by a newer gpmil: upgrade to load it."
        )
    return card
