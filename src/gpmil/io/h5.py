"""HDF5 feature files: what all tools that write them have in common.

Also the dumps published with UNI2-h and others: `features` (1, N, D) and `coords` (1, N, 2).
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import h5py
import numpy as np
from jaxtyping import Float

from gpmil.data.checks import listed
from gpmil.files.foreign import reading
from gpmil.io import h5_look
from gpmil.io.slides import (
    PIXELS,
    SLIDE_LEVEL,
    BadSlide,
    Slide,
    SlideFacts,
    SlideLevel,
    array_slide,
    positions,
)
from gpmil.io.steps import told_extraction, told_size, told_step

WHAT = "HDF5"
FEATURES = ("features", "feats", "patch_embeddings")


@contextmanager
def opened(path: Path) -> Iterator[h5py.File]:
    """The file, to be read; whatever HDF5 finds wrong in opening it is a `BadSlide`."""
    with reading(path, WHAT, BadSlide):
        fault = h5_look.fault(path)
        if fault is not None:
            raise BadSlide(f"{path} cannot be read as {WHAT}: {fault}")
        # No lock: many network disks have none to give, and a change is seen by size and time.
        file = h5py.File(path, "r", locking=False)
    with file:
        yield file


def dataset(file: h5py.File, *names: str) -> h5py.Dataset:
    """The first dataset of these names."""
    for name in names:
        found = file.get(name)
        if isinstance(found, h5py.Dataset):
            h5_look.require_whole(found)
            return found
        if found is not None:
            raise BadSlide(f"{name}: expected a dataset, found a {type(found).__name__.lower()}")
    raise BadSlide(f"expected a dataset {' or '.join(names)}, found {listed(file) or 'none'}")


def text(attrs: Mapping[str, Any], name: str) -> str | None:
    """An attribute as text; None where it is missing, which TRIDENT writes 'None'."""
    value = attrs.get(name)
    if isinstance(value, bytes):
        value = value.decode(errors="replace")
    return None if value is None or str(value) in ("", "None") else str(value)


def _positions(file: h5py.File, n: int) -> Float[np.ndarray, "n k"] | None:
    """`coords`, if the file has them."""
    return positions(dataset(file, "coords")[()], n) if "coords" in file and n else None


def attributes(path: Path | None) -> dict[str, Any] | None:
    """Attributes of `coords` in the file of the patches, if there is one that can be read."""
    if path is None:
        return None
    try:
        with opened(path) as file, reading(path, WHAT, BadSlide):
            return dict(dataset(file, "coords").attrs)
    except BadSlide:
        return None


def encoder(file: h5py.File, features: h5py.Dataset) -> str | None:
    """The encoder that made the features, if the file says it."""
    return text(features.attrs, "encoder") or text(file.attrs, "encoder")


def level0_facts(file: h5py.File, beside: Path | None, encoder: str | None = None) -> SlideFacts:
    """What a file with positions in level-0 pixels says, or the file of its patches `beside` it."""
    attrs = dict(file["coords"].attrs) if "coords" in file else {}
    patches = attributes(beside)
    step, where = told_step(attrs, patches)
    size, cut = told_size(attrs, patches), told_extraction(attrs, patches)
    return SlideFacts(PIXELS, step=step, step_from=where, size=size, encoder=encoder, **cut)


def slide(file: h5py.File, features: h5py.Dataset, told: SlideFacts) -> Slide:
    """A slide from an open file."""
    found = array_slide(features, features.name.strip("/"))
    n = found.shape[0]
    if n == 1 and "coords" not in file and features.name == "/features":
        raise SlideLevel(f"features of shape {features.shape} without coords {SLIDE_LEVEL}")
    return replace(found, coords=_positions(file, n), told=told)


@contextmanager
def open_slide(path: Path, beside: Path | None = None) -> Iterator[Slide]:
    """Features with positions and nothing else said, such as the dumps on Hugging Face."""
    with opened(path) as file:
        features = dataset(file, *FEATURES)
        yield slide(file, features, level0_facts(file, beside, encoder(file, features)))
