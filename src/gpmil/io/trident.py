"""TRIDENT: ``<job>/<mag>x_<size>px_<overlap>px_overlap/features_<encoder>/<slide>.h5``.

features (N, D)   attributes encoder, name
coords (N, 2)     level-0 pixels, top left; attributes patch_size, patch_size_level0,
                  level0_magnification, target_magnification, overlap; 'None' where unknown

The folder above says what the attributes do not.
"""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from gpmil.io import h5
from gpmil.io.slides import Slide, SlideFacts

FOLDER = "features_"
PATCHING = re.compile(
    r"(?P<magnification>\d+(\.\d+)?)x_(?P<patch_size>\d+)px_(?P<overlap>\d+)px_overlap"
)


@contextmanager
def open_slide(path: Path, beside: Path | None = None) -> Iterator[Slide]:
    """One slide; `beside` is the file of its patches."""
    with h5.opened(path) as file:
        features = h5.dataset(file, "features")
        told = h5.level0_facts(file, beside, h5.encoder(file, features))
        yield h5.slide(file, features, _with_folders(told, path))


def _with_folders(told: SlideFacts, path: Path) -> SlideFacts:
    """What the attributes say, else the names of the folders around."""
    said: dict[str, Any] = {}
    if path.parent.name.startswith(FOLDER):
        said["encoder"] = path.parent.name.removeprefix(FOLDER)
    named = PATCHING.fullmatch(path.absolute().parent.parent.name)
    if named is not None:
        said |= {name: float(value) for name, value in named.groupdict().items()}
    return replace(told, **{k: v for k, v in said.items() if getattr(told, k) is None})
