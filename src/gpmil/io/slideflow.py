"""slideflow: ``<slide>.pt`` with ``<slide>.index.npz``, the centres of the tiles.

``bags_config.json`` beside them says tile_px, tile_um and the extractor, but not how many
level-0 pixels a tile covers, so that the step is inferred.
"""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from gpmil.data.checks import listed
from gpmil.files.foreign import BadFile, reading
from gpmil.io.arrays import npz
from gpmil.io.slides import PIXELS, BadSlide, Slide, SlideFacts, positions
from gpmil.io.steps import number
from gpmil.io.torch_files import tensor_slide

CONFIG = "bags_config.json"
INDEX = ".index.npz"


@contextmanager
def open_slide(path: Path, beside: Path | None = None) -> Iterator[Slide]:
    """One slide; `beside` is its index."""
    config = _config(path.parent / CONFIG)
    size = {name: config[name] for name in ("tile_px", "tile_um") if name in config}
    words = ", ".join(f"{name} {value}" for name, value in size.items())
    told = SlideFacts(
        PIXELS,
        anchor="centre",
        encoder=_encoder(config),
        **_extraction(config),
        note=f"{CONFIG} says {words}, which is no number of level-0 pixels." if words else "",
    )
    slide = tensor_slide(path, told=told)
    if beside is not None and slide.shape[0]:
        slide = replace(slide, coords=positions(_index(beside), slide.shape[0]))
    yield slide


def _index(path: Path) -> np.ndarray:
    found = npz(path, error=BadSlide)
    if list(found) != ["arr_0"]:
        raise BadSlide(f"{path}: expected one array, arr_0, found {listed(found) or 'none'}")
    return found["arr_0"]


def _config(path: Path) -> dict[str, Any]:
    """What is written once for all slides: a damaged one is no matter of a single slide."""
    if not path.exists():
        return {}
    with reading(path, "JSON"):
        found = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(found, dict):
        raise BadFile(f"{path}: expected an object of JSON, found a {type(found).__name__}.")
    return found


def _extraction(config: dict[str, Any]) -> dict[str, Any]:
    """Scale and size of the tiles; tile_um is a number, or a magnification such as "20x"."""
    pixels, microns = number(config, "tile_px"), number(config, "tile_um")
    power = str(config.get("tile_um")).strip().lower()
    return {
        "patch_size": pixels,
        "mpp": microns / pixels if microns and pixels else None,
        "magnification": number({"x": power[:-1]}, "x") if power.endswith("x") else None,
    }


def _encoder(config: dict[str, Any]) -> str | None:
    """The extractor, given by name or as {"class": name}."""
    found = config.get("extractor")
    name = found.get("class") if isinstance(found, dict) else found
    return str(name) if name else None
