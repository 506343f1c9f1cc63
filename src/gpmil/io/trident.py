"""TRIDENT: ``<job>/<mag>x_<size>px_<overlap>px_overlap/features_<encoder>/<slide>.h5``.

features (N, D)   attributes encoder, name
coords (N, 2)     level-0 pixels, top left; attributes patch_size, patch_size_level0,
                  level0_magnification, target_magnification, overlap; 'None' where unknown

The folder above says what the attributes do not.
"""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from gpmil.io import h5
from gpmil.io.slides import PIXELS, Slide, Told
from gpmil.io.steps import told_extraction, told_size, told_step

FOLDER = "features_"
PATCHING = re.compile(
    r"(?P<magnification>\d+(\.\d+)?)x_(?P<patch_size>\d+)px_(?P<overlap>\d+)px_overlap"
)


@contextmanager
def open_slide(path: Path, beside: Path | None = None) -> Iterator[Slide]:
    """One slide; `beside` is the file of its patches."""
    with h5.opened(path) as file:
        features = h5.dataset(file, "features")
        attrs = dict(file["coords"].attrs) if "coords" in file else {}
        patches = h5.attributes(beside)
        step, where = told_step(attrs, patches)
        encoder = h5.text(features.attrs, "encoder") or h5.text(file.attrs, "encoder")
        if encoder is None and path.parent.name.startswith(FOLDER):
            encoder = path.parent.name.removeprefix(FOLDER)
        size = told_size(attrs, patches)
        told = Told(
            PIXELS,
            step=step,
            step_from=where,
            size=size,
            encoder=encoder,
            **_extraction(path, told_extraction(attrs, patches)),
        )
        yield h5.slide(file, features, told)


def _extraction(path: Path, told: dict[str, Any]) -> dict[str, Any]:
    """What the attributes say, else the name of the folder that the patches were cut for."""
    named = PATCHING.fullmatch(path.absolute().parent.parent.name)
    if named is None:
        return told
    folder = {name: float(named[name]) for name in ("magnification", "patch_size", "overlap")}
    return told | {name: value for name, value in folder.items() if told[name] is None}
