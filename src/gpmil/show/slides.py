"""Slide files: size, microns per pixel, bounds and a thumbnail, through OpenSlide.

Positions are level-0 pixels of the whole canvas, as patch extractors write them. OpenSlide is an
optional extra; without it these functions say how to install it.
"""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import UInt8
from PIL import Image

from gpmil import extras

__all__ = [
    "BLOCK",
    "EXTENSIONS",
    "LONGEST",
    "Extent",
    "SlideInfo",
    "Thumbnail",
    "describe",
    "find",
    "thumbnail",
]

EXTENSIONS = (
    *(".svs", ".tif", ".tiff", ".ndpi", ".mrxs", ".scn", ".bif", ".vms", ".vmu", ".svslide"),
    *(".czi", ".dcm", ".zvi", ".png", ".jpg", ".jpeg"),
)
LONGEST = 1600  # pixels of a thumbnail's longer side
BLOCK = 4096  # pixels per side that are read at once: a slide without small levels fits too

Extent = tuple[float, float, float, float]  # left, right, bottom, top; y downwards
Box = tuple[int, int, int, int]  # left, top, right, bottom in pixels


@dataclass(frozen=True)
class SlideInfo:
    """What a slide file says of itself, in level-0 pixels."""

    size: tuple[int, int]  # width and height
    mpp: tuple[float, float] | None  # microns per pixel, None where the file does not say
    bounds: tuple[int, int, int, int]  # left, top, width, height of the scanned area

    @property
    def offset(self) -> tuple[int, int]:
        """Corner of the scanned area, which is the origin in QuPath."""
        return self.bounds[:2]


class Thumbnail(NamedTuple):
    """A small picture of a slide, or of a part of it, and where it lies in level-0 pixels."""

    image: UInt8[np.ndarray, "h w 3"]
    extent: Extent
    mpp: tuple[float, float] | None = None


def describe(path: str | os.PathLike) -> SlideInfo:
    """Size, microns per pixel and bounds of a slide file."""
    with _opened(path) as slide:
        return info_of(slide)


def thumbnail(
    path: str | os.PathLike, extent: Extent | None = None, longest: int = LONGEST
) -> Thumbnail:
    """A picture of a slide whose longer side has at most `longest` pixels.

    `extent` (left, right, bottom, top) is the part wanted, cut at the slide's border; default the
    scanned area.
    """
    if longest < 1:
        raise ValueError(f"longest: expected at least 1 pixel, found {longest}.")
    with _opened(path) as slide:
        info = info_of(slide)
        region = _region(info, extent, Path(path))
        image = read_region(slide, region, shrunk(region, longest))
        left, top, right, bottom = region
        return Thumbnail(image, (float(left), float(right), float(bottom), float(top)), info.mpp)


def find(folder: str | os.PathLike) -> dict[str, Path]:
    """Slide files of a folder and its subfolders by name, without ending.

    Of two files with one name, the first in the order of `EXTENSIONS` counts, then the first by
    path.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise ValueError(f"no folder with slides at {folder}: name the folder of the slide files.")
    files = (f for f in folder.rglob("*") if f.suffix.lower() in EXTENSIONS and f.is_file())
    found: dict[str, Path] = {}
    for file in sorted(files, key=lambda f: (EXTENSIONS.index(f.suffix.lower()), f)):
        found.setdefault(file.stem, file)
    return found


# --- Reading --------------------------------------------------------------------------------------
@contextmanager
def _opened(path: str | os.PathLike) -> Iterator[Any]:
    """An open slide; whatever goes wrong with the file is a ValueError that names it."""
    openslide = require_openslide()
    path = Path(path)
    if not path.is_file():
        raise ValueError(f"no slide file at {path}.")
    try:
        with openslide.open_slide(path) as slide:
            yield slide
    except (openslide.OpenSlideError, OSError, Image.DecompressionBombError) as error:
        reason = str(error) or type(error).__name__
        raise ValueError(
            f"slide file {path} cannot be read ({reason}). Is it complete, and a format that "
            "OpenSlide reads? Copy it again, or leave it out."
        ) from error


def require_openslide() -> Any:
    """The library; a ValueError says how to install it."""
    try:
        import openslide
    except (ImportError, OSError) as error:
        raise ValueError(
            "slide files are read with OpenSlide, which is not installed here: "
            f"{extras.install('slides')}. Without slide files, leave them out."
        ) from error
    return openslide


def info_of(slide: Any) -> SlideInfo:
    """What an open slide says of itself."""
    size = int(slide.dimensions[0]), int(slide.dimensions[1])
    return SlideInfo(size, _mpp(slide.properties), _bounds(slide.properties, size))


def _mpp(properties: Mapping[str, str]) -> tuple[float, float] | None:
    """Microns per pixel on both axes, or None: a scale that is not stated is not guessed.

    >>> _mpp({"openslide.mpp-x": "0.499", "openslide.mpp-y": "0.25"}), _mpp({})
    ((0.499, 0.25), None)
    """
    found = [_number(properties.get(f"openslide.mpp-{axis}")) for axis in "xy"]
    return (found[0], found[1]) if min(found) > 0 else None


def _bounds(properties: Mapping[str, str], size: tuple[int, int]) -> tuple[int, int, int, int]:
    """Left, top, width and height of the scanned area; all of it where nothing is said.

    >>> _bounds({"openslide.bounds-x": "30", "openslide.bounds-width": "50"}, (90, 70))
    (30, 0, 50, 70)
    """
    left, top, width, height = (
        int(_number(properties.get(f"openslide.bounds-{name}")))
        for name in ("x", "y", "width", "height")
    )
    return left, top, width or size[0] - left, height or size[1] - top


def _number(text: str | None) -> float:
    """A finite number, 0 for anything else."""
    try:
        value = float(text or 0)
    except ValueError:
        return 0.0
    return value if np.isfinite(value) else 0.0


def _region(info: SlideInfo, extent: Extent | None, path: Path) -> Box:
    """Left, top, right, bottom in whole pixels, inside the slide."""
    width, height = info.size
    if extent is None:
        x, y, wide, high = info.bounds
        extent = (float(x), float(x + wide), float(y + high), float(y))
    left, right, bottom, top = extent
    inside = (
        *(int(max(np.floor(left), 0)), int(max(np.floor(top), 0))),
        *(int(min(np.ceil(right), width)), int(min(np.ceil(bottom), height))),
    )
    if inside[0] >= inside[2] or inside[1] >= inside[3]:
        raise ValueError(
            f"the part wanted of {path.name}, x {left:g} to {right:g} and y {top:g} to {bottom:g}, "
            f"lies outside the slide of {width} x {height} pixels. Do the positions belong to "
            "another slide, or are they in other units than level-0 pixels?"
        )
    return inside


def shrunk(region: Box, longest: int) -> tuple[int, int]:
    """Width and height of a part that is not enlarged, and no longer than asked.

    >>> shrunk((0, 0, 512, 128), 256), shrunk((3, 0, 67, 64), 256)
    ((256, 64), (64, 64))
    """
    wide, high = region[2] - region[0], region[3] - region[1]
    by = max(wide / longest, high / longest, 1.0)
    return max(round(wide / by), 1), max(round(high / by), 1)


def read_region(slide: Any, region: Box, shape: tuple[int, int]) -> UInt8[np.ndarray, "h w 3"]:
    """The region shrunk to `shape` (width, height), from the smallest level that is sharp enough.

    Read in blocks: a slide whose only level is the full one need not fit into memory.
    """
    left, top, right, bottom = region
    shrink = (right - left) / shape[0], (bottom - top) / shape[1]
    level = slide.get_best_level_for_downsample(min(shrink))
    canvas = Image.new("RGB", shape, _paper(slide.properties))
    side = [max(int(BLOCK * slide.level_downsamples[level] / s), 1) for s in shrink]
    for y in range(0, shape[1], side[1]):
        for x in range(0, shape[0], side[0]):
            end = min(x + side[0], shape[0]), min(y + side[1], shape[1])
            corners = (x * shrink[0], y * shrink[1], end[0] * shrink[0], end[1] * shrink[1])
            part = tuple(c + o for c, o in zip(corners, (left, top, left, top)))
            block = _block(slide, level, part, (end[0] - x, end[1] - y))
            canvas.paste(block, (x, y), block)
    return np.asarray(canvas)


def _block(slide: Any, level: int, part: tuple[float, ...], shape: tuple[int, int]) -> Image.Image:
    """A part (left, top, right, bottom) of level 0, read at a level and shrunk to `shape`."""
    scale = slide.level_downsamples[level]
    first = [int(np.floor(c / scale)) for c in part[:2]]
    last = [int(np.ceil(c / scale)) for c in part[2:]]
    # Positions are asked for in level-0 pixels whatever the level.
    corner = (round(first[0] * scale), round(first[1] * scale))
    size = (max(last[0] - first[0], 1), max(last[1] - first[1], 1))
    box = [c / scale - f for c, f in zip(part, [*first, *first])]
    box = [min(max(b, 0.0), float(most)) for b, most in zip(box, [*size, *size])]
    image = slide.read_region(corner, level, size).convert("RGBA")
    return image.resize(shape, Image.Resampling.BOX, box=tuple(box))


def _paper(properties: Mapping[str, str]) -> str:
    """Colour of what was not scanned."""
    return "#" + properties.get("openslide.background-color", "ffffff").lstrip("#")
