"""Slide files as Deep Zoom tiles: OpenSlide for slides, Pillow for plain pictures.

Open files are kept and shared by all threads. One that is no longer kept is closed when the last
thread has let go of it.
"""

import io
import math
import threading
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from PIL import Image, JpegImagePlugin, PngImagePlugin, UnidentifiedImageError

from gpmil.show import slides
from gpmil.show.slides import Box, SlideInfo, shrunk
from gpmil.viewer.cohort import Missing, ShownCohort
from gpmil.viewer.maps import Pair, stamp
from gpmil.viewer.store import Store

TILE, OVERLAP, QUALITY = 254, 1, 80
MOST_PIXELS = 400_000_000  # of a plain picture, which must fit into memory
OVERVIEW = 2048  # pixels of the longer side of a slide's overview
LARGE, HUGE = 2_000_000, 16_000_000  # pixels to be read for one tile
OPEN_BYTES, TILE_BYTES, CACHE_BYTES = 200_000_000, 40_000_000, 48_000_000
SLIDE_BYTES = 25_000_000  # what an open slide is taken to need
PICTURES: dict[str, Any] = {
    ".png": PngImagePlugin.PngImageFile,
    ".jpg": JpegImagePlugin.JpegImageFile,
    ".jpeg": JpegImagePlugin.JpegImageFile,
}


class Tiles:
    """The slide files of a cohort."""

    def __init__(self, cohort: ShownCohort) -> None:
        self.cohort = cohort
        self._open: Store[Scan] = Store(OPEN_BYTES, lambda scan: scan.nbytes)
        self._tiles: Store[bytes] = Store(TILE_BYTES, len)

    def scan(self, slide: int) -> "Scan":
        """The open file of a slide."""
        file = self.cohort.slide_file(slide)
        return self._open.get((str(file), stamp(file)), lambda: open_scan(file))

    def dzi(self, slide: int) -> bytes:
        """The description of the tiles."""
        width, height = self.scan(slide).info.size
        return (
            '<?xml version="1.0" encoding="UTF-8"?>'
            '<Image xmlns="http://schemas.microsoft.com/deepzoom/2008" Format="jpeg" '
            f'Overlap="{OVERLAP}" TileSize="{TILE}">'
            f'<Size Width="{width}" Height="{height}"/></Image>'
        ).encode()

    def tile(self, slide: int, level: int, column: int, row: int) -> bytes:
        """A tile as jpeg."""
        file = self.cohort.slide_file(slide)
        key = (str(file), stamp(file), level, column, row)
        return self._tiles.get(key, lambda: jpeg(self.scan(slide).tile(level, column, row)))

    def patch(self, slide: int, corner: Pair, sides: Pair, longest: int) -> bytes:
        """The part of a slide that a patch covers, in level-0 pixels, as jpeg."""
        scan = self.scan(slide)
        width, height = scan.info.size
        left, top = (math.floor(c) for c in corner)
        right, bottom = (math.ceil(c + s) for c, s in zip(corner, sides))
        box = max(left, 0), max(top, 0), min(right, width), min(bottom, height)
        if box[0] >= box[2] or box[1] >= box[3]:
            raise Missing(
                f"the patch lies outside the slide file of {width} x {height} pixels: does the "
                "file belong to another slide?"
            )
        return jpeg(scan.part(box, longest))


def jpeg(image: Image.Image) -> bytes:
    """The picture as jpeg."""
    out = io.BytesIO()
    image.convert("RGB").save(out, "JPEG", quality=QUALITY)
    return out.getvalue()


def open_scan(file: Path) -> "Scan":
    """Open a slide file; Missing where it cannot be read."""
    if file.suffix.lower() in PICTURES:
        return PictureScan(file)
    try:
        return OpenSlideScan(file)
    except ValueError as error:  # without OpenSlide, its message says what to install
        raise Missing(str(error)) from error


# --- Deep Zoom ------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Pyramid:
    """Sizes of the levels: the last is the whole slide, each before it half as large."""

    size: tuple[int, int]

    @property
    def last(self) -> int:
        """The number of the largest level.

        >>> Pyramid((2220, 2967)).last, Pyramid((1, 1)).last
        (12, 0)
        """
        return math.ceil(math.log2(max(*self.size, 1)))

    def level_size(self, level: int) -> tuple[int, int]:
        """Width and height of a level."""
        width, height = self.size
        shrink = 2 ** (self.last - level)
        return max(-(-width // shrink), 1), max(-(-height // shrink), 1)

    def box(self, level: int, column: int, row: int) -> Box:
        """Where a tile lies in its level, with the overlap; Missing where there is none."""
        if not 0 <= level <= self.last:
            raise Missing(f"there is no level {level}: levels are 0 to {self.last}.")
        wide, high = self.level_size(level)
        left, top = column * TILE, row * TILE
        if not (0 <= left < wide and 0 <= top < high):
            raise Missing(f"there is no tile {column}_{row} at level {level}.")
        return (
            *(max(left - OVERLAP, 0), max(top - OVERLAP, 0)),
            *(min(left + TILE + OVERLAP, wide), min(top + TILE + OVERLAP, high)),
        )


class Shrunk:
    """A picture with its smaller copies, all in memory."""

    def __init__(self, image: Image.Image) -> None:
        levels = [image]
        self.pyramid = Pyramid(image.size)
        for _ in range(self.pyramid.last):
            levels.append(levels[-1].reduce(2))
        self.levels = levels[::-1]

    def tile(self, level: int, column: int, row: int) -> Image.Image:
        """A Deep Zoom tile; Missing where there is none."""
        box = self.pyramid.box(level, column, row)  # says what is wrong with a level
        return self.levels[level].crop(box)


class OpenSlideScan:
    """A slide read through OpenSlide, whose handles may be shared by threads.

    The smallest levels of Deep Zoom come from an overview that is made once: each of their tiles
    would take a large part of the slide otherwise, or all of it where it has but one level.
    """

    nbytes = SLIDE_BYTES

    def __init__(self, file: Path) -> None:
        openslide = slides.require_openslide()
        from openslide.deepzoom import DeepZoomGenerator

        try:
            self.slide = openslide.open_slide(file)
        except (openslide.OpenSlideError, OSError, Image.DecompressionBombError) as error:
            reason = str(error) or type(error).__name__
            raise ValueError(f"slide file {file.name} cannot be read ({reason}).") from error
        self.slide.set_cache(_cache())
        self.errors: tuple[type[Exception], ...] = (openslide.OpenSlideError, OSError)
        self.name = file.name
        self.info = slides.info_of(self.slide)
        self.pyramid = Pyramid(self.info.size)
        self.zoom = DeepZoomGenerator(self.slide, TILE, OVERLAP, limit_bounds=False)
        self._overview: Shrunk | None = None
        self._lock = threading.Lock()

    def tile(self, level: int, column: int, row: int) -> Image.Image:
        """A Deep Zoom tile; Missing where there is none."""
        box = self.pyramid.box(level, column, row)
        shape = box[2] - box[0], box[3] - box[1]
        try:
            _, _, (wide, high) = self.zoom.get_tile_coordinates(level, (column, row))
            if wide * high > LARGE and level <= self._overview_level:
                return self.overview().tile(level, column, row)
            if wide * high > HUGE:
                return self._read(self._region(level, box), shape)
            # OpenSlide keeps the proportions, and the smallest levels miss a pixel then.
            tile = self.zoom.get_tile(level, (column, row))
            return tile if tile.size == shape else tile.resize(shape)
        except self.errors as error:
            raise Missing(f"slide file {self.name} cannot be read here ({error}).") from error

    def part(self, box: Box, longest: int) -> Image.Image:
        """A part of level 0, shrunk to at most `longest` pixels per side."""
        try:
            return self._read(box, shrunk(box, longest))
        except self.errors as error:
            raise Missing(f"slide file {self.name} cannot be read here ({error}).") from error

    def overview(self) -> Shrunk:
        """A level of Deep Zoom as one picture, with all below it."""
        with self._lock:
            if self._overview is None:
                size = self.pyramid.level_size(self._overview_level)
                self._overview = Shrunk(self._read((0, 0, *self.info.size), size))
            return self._overview

    @property
    def _overview_level(self) -> int:
        return min(self.pyramid.last, OVERVIEW.bit_length() - 1)

    def _region(self, level: int, box: Box) -> Box:
        """What a part of a level is in level-0 pixels."""
        shrink = 2 ** (self.pyramid.last - level)
        left, top, right, bottom = (c * shrink for c in box)
        return left, top, min(right, self.info.size[0]), min(bottom, self.info.size[1])

    def _read(self, region: Box, shape: tuple[int, int]) -> Image.Image:
        """In blocks: a slide whose only level is the full one need not fit into memory."""
        return Image.fromarray(slides.read_region(self.slide, region, shape))


@lru_cache(maxsize=1)
def _cache() -> Any:
    """What OpenSlide keeps of decoded tiles, for all slides together."""
    return slides.require_openslide().OpenSlideCache(CACHE_BYTES)


class PictureScan:
    """A plain picture, whole in memory."""

    def __init__(self, file: Path) -> None:
        try:
            # The classes themselves: Image.open refuses pictures that still fit here.
            with PICTURES[file.suffix.lower()](file) as image:
                if image.width * image.height > MOST_PIXELS:
                    raise Missing(
                        f"{file.name} has {image.width} x {image.height} pixels, more than fit "
                        "into memory: make it a tiled tiff, such as with vips tiffsave --pyramid."
                    )
                image.load()
                whole = image if image.mode == "RGB" else image.convert("RGB")
        except (OSError, SyntaxError, ValueError, UnidentifiedImageError) as error:
            raise Missing(f"picture {file.name} cannot be read: {error}.") from error
        self._levels = Shrunk(whole)
        self.info = SlideInfo(whole.size, None, (0, 0, *whole.size))
        self.nbytes = 4 * whole.width * whole.height

    def tile(self, level: int, column: int, row: int) -> Image.Image:
        """A Deep Zoom tile; Missing where there is none."""
        return self._levels.tile(level, column, row)

    def part(self, box: Box, longest: int) -> Image.Image:
        """A part of the picture, shrunk to at most `longest` pixels per side."""
        whole = self._levels.levels[-1]
        return whole.resize(shrunk(box, longest), Image.Resampling.BOX, box=box)


Scan = OpenSlideScan | PictureScan  # an open slide file
