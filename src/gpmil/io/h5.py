"""HDF5 feature files: what all tools that write them have in common.

Also the dumps published with UNI2-h and others: `features` (1, N, D) and `coords` (1, N, 2).
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import h5py
import numpy as np
from jaxtyping import Float

from gpmil.data.checks import listed
from gpmil.files.foreign import reading
from gpmil.io import h5_look
from gpmil.io.slides import PIXELS, SLIDE_LEVEL, BadSlide, Slide, SlideLevel, Told, patch_shape
from gpmil.io.slides import positions as checked
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


def positions(file: h5py.File, n: int) -> Float[np.ndarray, "n k"] | None:
    """`coords`, if the file has them."""
    return checked(dataset(file, "coords")[()], n) if "coords" in file and n else None


def attributes(path: Path | None) -> dict[str, Any] | None:
    """Attributes of `coords` in the file of the patches, if there is one that can be read."""
    if path is None:
        return None
    try:
        with opened(path) as file, reading(path, WHAT, BadSlide):
            return dict(dataset(file, "coords").attrs)
    except BadSlide:
        return None


def slide(file: h5py.File, features: h5py.Dataset, told: Told, **parts: Any) -> Slide:
    """A slide from an open file."""
    shape = patch_shape(features.shape, features.name.strip("/"))
    if shape[0] == 1 and "coords" not in file and features.name == "/features":
        raise SlideLevel(f"features of shape {features.shape} without coords {SLIDE_LEVEL}")
    folded = len(features.shape) == 3
    return Slide(
        shape=shape,
        dtype=features.dtype,
        rows=lambda a, b: features[0, a:b] if folded else features[a:b],
        told=told,
        **({"coords": positions(file, shape[0])} | parts),
    )


@contextmanager
def open_slide(path: Path, beside: Path | None = None) -> Iterator[Slide]:
    """Features with positions and nothing else said, such as the dumps on Hugging Face."""
    with opened(path) as file:
        features = dataset(file, *FEATURES)
        attrs = dict(file["coords"].attrs) if "coords" in file else {}
        patches = attributes(beside)
        step, where = told_step(attrs, patches)
        encoder = text(features.attrs, "encoder") or text(file.attrs, "encoder")
        size = told_size(attrs, patches)
        cut = told_extraction(attrs, patches)
        told = Told(PIXELS, step=step, step_from=where, size=size, encoder=encoder, **cut)
        yield slide(file, features, told)
