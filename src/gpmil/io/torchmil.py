"""torchmil: folders ``features``, ``labels``, ``inst_labels``, ``coords`` of .npy or .h5 files.

One file per bag in each of them, all but the first optional. A folder of .npy files alone is read
as features.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from gpmil.data.checks import encode_instance_labels, listed
from gpmil.io import h5
from gpmil.io.arrays import npy
from gpmil.io.slides import BadSlide, Slide, SlideFacts, array_slide, positions

FOLDERS = ("coords", "labels", "inst_labels")


@contextmanager
def open_slide(path: Path, beside: Path | None = None) -> Iterator[Slide]:
    """One bag: its file in ``features``, and those of the same name in the other folders."""
    with ExitStack() as stack:
        slide = array_slide(_array(path, stack), "features")
        n = slide.shape[0]
        parts = {name: path.parent.parent / name / path.name for name in FOLDERS}
        if path.parent.name != "features":
            parts = {}
        found = {k: _values(_array(p, stack), k) for k, p in parts.items() if p.is_file()}
        yield replace(
            slide,
            coords=positions(found["coords"], n) if "coords" in found else None,
            instance_labels=_instance_labels(found.get("inst_labels"), n),
            told=SlideFacts(label=_label(found.get("labels"))),
        )


def _array(path: Path, stack: ExitStack) -> Any:
    """An array on disk: a memory map, or the one dataset of an HDF5 file."""
    if path.suffix != ".npy":
        file = stack.enter_context(h5.opened(path))
        if len(file) != 1:
            raise BadSlide(f"{path.name}: expected one dataset, found {listed(file) or 'none'}")
        return h5.dataset(file, *file)
    return npy(path, BadSlide)


def _values(array: Any, what: str) -> np.ndarray:
    if array.dtype.kind not in "biuf":
        raise BadSlide(f"{what}: expected numbers, found type {array.dtype}")
    return np.asarray(array[()])


def _label(values: np.ndarray | None) -> int | None:
    if values is None:
        return None
    kinds = np.unique(values)
    if len(kinds) != 1 or kinds[0] not in (-1, 0, 1):
        raise BadSlide(f"labels: expected one label, 0 or 1, found {listed(kinds.tolist())}")
    return int(kinds[0])


def _instance_labels(values: np.ndarray | None, n: int) -> np.ndarray | None:
    if values is None:
        return None
    try:
        return encode_instance_labels(values.reshape(-1), n)
    except ValueError as error:
        raise BadSlide(str(error)) from error
