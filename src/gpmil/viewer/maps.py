"""Tables of patches as arrays for the browser, as small pictures, and as GeoJSON.

The body of a map is little endian: the four bytes GPM1, the length of a JSON header (uint32), the
header padded with spaces to a multiple of eight, and the arrays in the order of the header, the
widest types first, so that a browser can use them in place.
"""

import io
import json
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Bool, Float, Int, Num, UInt16
from matplotlib import colormaps
from matplotlib.colors import to_rgb
from PIL import Image
from scipy.spatial import cKDTree

from gpmil.data.graphs import infer_step
from gpmil.files.foreign import BadFile
from gpmil.runs.class_table import class_layer
from gpmil.runs.files import read_patches
from gpmil.runs.maps_input import CENTRE, MICRONS
from gpmil.show import qupath
from gpmil.show.classes import ClassLayer
from gpmil.show.layers import SMALLEST_P, TISSUE, scale_top, suspicion, suspicion_colours
from gpmil.show.raster import ON_LATTICE
from gpmil.show.slides import SlideInfo
from gpmil.viewer.classes import layer_arrays, layer_card
from gpmil.viewer.cohort import Missing, ShownCohort, ShownRun, as_dict
from gpmil.viewer.store import Store

MAGIC = b"GPM1"
MOST_BYTES = 100_000_000  # of maps that are kept
MOST_CELLS, LONGEST_SIDE = 64_000_000, 16_384  # of a grid that a browser can draw; uint16 holds it
THUMBNAIL = 160  # pixels of the longer side
PIECE = 2_000  # patches of a GeoJSON file that are made at once
EMPTY: dict[str, Any] = {"type": "FeatureCollection", "features": []}

Column = Float[np.ndarray, " n"]
Pair = tuple[float, float]


@dataclass(frozen=True)
class Grid:
    """A lattice that holds every patch in a cell of its own."""

    column: UInt16[np.ndarray, " n"]
    row: UInt16[np.ndarray, " n"]
    shape: tuple[int, int]  # columns and rows
    origin: Pair  # x and y of patches in the first column and row


@dataclass(frozen=True)
class PatchMap:
    """The patches of a slide as the table has them, and how they lie."""

    x: Column
    y: Column
    probability: Column
    sd: Column | None
    p_value: Column | None
    doubt: Column | None
    unlike: Column | None
    novelty: Column | None
    flagged: Bool[np.ndarray, " n"] | None
    label: Int[np.ndarray, " n"] | None  # -1 unknown
    sides: Pair  # of a patch
    step: Pair | None
    grid: Grid | None
    centres: bool  # whether x and y are centres of patches, not upper left corners
    microns: bool
    tag: str  # changes when the file does
    classes: ClassLayer | None = None  # grades or types

    def __len__(self) -> int:
        return len(self.x)

    @property
    def nbytes(self) -> int:
        """Memory of all arrays."""
        values = [getattr(self, f.name) for f in fields(self)]
        values += [] if self.grid is None else [self.grid.column, self.grid.row]
        values += [] if self.classes is None else [self.classes.probability]
        return sum(v.nbytes for v in values if isinstance(v, np.ndarray))

    @property
    def corners(self) -> Float[np.ndarray, "n 2"]:
        """Upper left corners of the patches."""
        points = np.column_stack([self.x, self.y])
        return points - np.array(self.sides) / 2 if self.centres else points


class Maps:
    """Maps of all runs, read when they are asked for; the latest are kept."""

    def __init__(self, cohort: ShownCohort) -> None:
        self.cohort = cohort
        self._kept: Store[PatchMap] = Store(MOST_BYTES, lambda found: found.nbytes)

    def get(self, run: int, slide: int, coupling: str | None = None) -> PatchMap:
        """The map of a slide in a run."""
        of, name = self.cohort.run(run), self.cohort.slide(slide)
        file = of.patch_table(name, of.coupling(coupling))
        tag = stamp(file)
        return self._kept.get((str(file), tag), lambda: read_map(file, of, name, tag))


def stamp(file: Path) -> str:
    """A word that changes when the file does."""
    try:
        stat = file.stat()
    except OSError as error:
        raise Missing(f"{file.name} is no longer there.") from error
    return f"{zlib.crc32(str(file).encode()):x}-{stat.st_mtime_ns:x}-{stat.st_size:x}"


# --- Reading --------------------------------------------------------------------------------------
def read_map(file: Path, run: ShownRun, slide: str, tag: str = "") -> PatchMap:
    """The map in a file; Missing where it cannot be drawn."""
    try:
        frame = read_patches(file)
    except BadFile as error:
        raise Missing(str(error)) from error
    table = {name: column.to_numpy() for name, column in frame.items()}
    missing = [c for c in ("x", "probability") if c not in table]
    if missing:
        raise Missing(f"the patches of {slide!r} in run {run.name} have no {missing[0]}: no map.")
    x = table["x"]
    y = table.get("y", np.zeros_like(x))
    step = _step(run, slide, x, y)
    return PatchMap(
        x,
        y,
        table["probability"],
        table.get("sd"),
        table.get("p_value"),
        table.get("doubt"),
        table.get("unlike"),
        table.get("novelty"),
        None if (flags := table.get("flagged")) is None else np.nan_to_num(flags) != 0,
        None if (label := table.get("label")) is None else _labels(label),
        _sides(run, slide, x, y, step),
        step,
        None if step is None else find_grid(x, y, step),
        run.config.get("anchor") == CENTRE,
        run.config.get("units") == MICRONS,
        tag,
        class_layer(frame),
    )


def _labels(label: Column) -> Int[np.ndarray, " n"]:
    return np.where(np.isfinite(label), label, -1).astype(np.int8)


def _step(run: ShownRun, slide: str, x: Column, y: Column) -> Pair | None:
    """The distance of neighbours: as noted, as positions show, or as most slides have it."""
    noted = as_dict(run.config.get("steps"))
    if known := _pair(noted.get(slide)):
        return known
    if len(x):
        coords = np.column_stack([x, y])
        shown = _pair(infer_step(coords, np.array([0, len(x)]))[0].tolist())
        if shown:
            return shown
    usual = Counter(p for v in noted.values() if (p := _pair(v))).most_common(1)
    return usual[0][0] if usual else None


def _sides(run: ShownRun, slide: str, x: Column, y: Column, step: Pair | None) -> Pair:
    """Width and height of a patch: as noted, else the step, else what keeps patches apart."""
    noted = as_dict(run.config.get("sizes")).get(slide)
    known = _pair(noted) or step
    if known:
        return known
    nearest = np.zeros(0)
    if len(x) > 1:
        points = np.column_stack([x, y])
        nearest = cKDTree(points).query(points, k=2)[0][:, 1]
        nearest = nearest[nearest > 0]
    side = float(np.median(nearest)) if len(nearest) else 1.0
    return side, side


def _pair(value: Any) -> Pair | None:
    """A positive number, or one per axis, as two; None for anything else."""
    try:
        given = np.asarray(value, dtype=np.float64).ravel()
    except (TypeError, ValueError):
        return None
    good = 1 <= given.size <= 3 and bool((np.isfinite(given) & (given > 0)).all())
    return (float(given[0]), float(given[min(1, given.size - 1)])) if good else None


def find_grid(x: Column, y: Column, step: Pair) -> Grid | None:
    """The lattice of the patches; None where some lie off it or share a cell."""
    if not len(x):
        return None
    cells = [(v - v.min()) / s for v, s in zip((x, y), step)]
    column, row = (np.rint(c) for c in cells)
    shape = int(column.max()) + 1, int(row.max()) + 1
    off = max(np.abs(c - whole).max() for c, whole in zip(cells, (column, row)))
    if off > ON_LATTICE or max(shape) > LONGEST_SIDE or shape[0] * shape[1] > MOST_CELLS:
        return None
    if len(np.unique(row * shape[0] + column)) < len(x):
        return None
    origin = float(x.min()), float(y.min())
    return Grid(column.astype(np.uint16), row.astype(np.uint16), shape, origin)


# --- For the browser ------------------------------------------------------------------------------
def encode(found: PatchMap) -> bytes:
    """The body of a map."""
    arrays = dict(_arrays(found))
    card = json.dumps(
        {
            "n": len(found),
            "arrays": [{"name": k, "dtype": v.dtype.name} for k, v in arrays.items()],
            "side": min(found.sides),
            "sides": list(found.sides),
            "step": None if found.step is None else list(found.step),
            "grid": None if found.grid is None else _grid_card(found.grid),
            "anchor": "centre" if found.centres else "corner",
            "bounds": bounds(found),
            "classes": layer_card(found.classes),
        }
    ).encode()
    card += b" " * (-(len(MAGIC) + 4 + len(card)) % 8)
    parts = [v.astype(v.dtype.newbyteorder("<")).tobytes() for v in arrays.values()]
    return b"".join([MAGIC, len(card).to_bytes(4, "little"), card, *parts])


def _arrays(found: PatchMap) -> Iterator[tuple[str, Num[np.ndarray, " n"]]]:
    for name in ("x", "y", "probability", "sd", "p_value", "doubt", "unlike", "novelty"):
        if getattr(found, name) is not None:
            yield name, getattr(found, name)
    classes = layer_arrays(found.classes)
    yield from ((name, p) for name, p in classes.items() if p.dtype == np.float64)
    if found.grid is not None:
        yield "column", found.grid.column
        yield "row", found.grid.row
    if found.flagged is not None:
        yield "flagged", found.flagged.astype(np.uint8)
    if found.label is not None:
        yield "label", found.label
    yield from ((name, code) for name, code in classes.items() if code.dtype == np.int8)


def _grid_card(grid: Grid) -> dict[str, Any]:
    (columns, rows), (x0, y0) = grid.shape, grid.origin
    return {"columns": columns, "rows": rows, "x0": x0, "y0": y0}


def bounds(found: PatchMap) -> list[float]:
    """Left, top, right, bottom of all patches."""
    if not len(found):
        return [0.0, 0.0, *found.sides]
    low = found.corners.min(axis=0)
    high = found.corners.max(axis=0) + found.sides
    return [*low.tolist(), *high.tolist()]


def thumbnail(found: PatchMap) -> bytes:
    """A png with one pixel per cell, or the highest of several cells: small lesions stay seen.

    It shows suspicion, and probability where there are no p-values, as the maps do.
    """
    width, height, column, row = _pixels(found)
    canvas = np.full((height, width), -1.0)
    if found.p_value is None:
        values, shades = found.probability / scale_top(found.probability), colormaps["viridis"]
    else:
        most = -np.log10(SMALLEST_P)
        values, shades = suspicion(found.p_value) / most, suspicion_colours()
    known = np.isfinite(values)
    np.maximum.at(canvas, (row[known], column[known]), values[known])
    shade = shades(np.clip(canvas, 0, 1), bytes=True).astype(float)
    # what is transparent shows tissue; there is nothing where there is no patch
    part = shade[..., 3:] / 255
    shade[..., :3] = part * shade[..., :3] + (1 - part) * 255 * np.array(to_rgb(TISSUE))
    shade[..., 3] = np.where(canvas < 0, 0, 255)
    out = io.BytesIO()
    Image.fromarray(np.where(canvas[..., None] < 0, 0, shade).astype(np.uint8), "RGBA").save(
        out, "PNG"
    )
    return out.getvalue()


def _pixels(
    found: PatchMap,
) -> tuple[int, int, Int[np.ndarray, " n"], Int[np.ndarray, " n"]]:
    """Width, height, and the pixel of every patch, at most THUMBNAIL a side."""
    if not len(found):
        none = np.zeros(0, dtype=np.int64)
        return 1, 1, none, none
    if found.grid is not None:
        cells = [found.grid.column.astype(np.int64), found.grid.row.astype(np.int64)]
    else:
        apart = found.step or found.sides
        cells = [
            np.floor((v - v.min()) / s).astype(np.int64) for v, s in zip((found.x, found.y), apart)
        ]
    shrink = -(-(max(int(c.max()) for c in cells) + 1) // THUMBNAIL)  # rounded up
    column, row = (c // shrink for c in cells)
    return int(column.max()) + 1, int(row.max()) + 1, column, row


# --- On the slide, and for QuPath -----------------------------------------------------------------
def scales(found: PatchMap, info: SlideInfo | None) -> Pair:
    """What positions are multiplied by to be level-0 pixels."""
    if not found.microns:
        return 1.0, 1.0
    if info is None or info.mpp is None:
        raise Missing(
            "positions are in microns, and no slide file says how many microns a pixel has."
        )
    return 1 / info.mpp[0], 1 / info.mpp[1]


def geojson(found: PatchMap, info: SlideInfo | None, only_flagged: bool) -> Iterator[bytes]:
    """The patches as `gpmil qupath` writes them, in pieces: whole, they need much memory."""
    scale = np.array(scales(found, info))
    if only_flagged and found.flagged is None:
        raise Missing("no patch of this run was tested: there are no flags. Ask for layer=all.")
    coords, size = found.corners * scale, np.array(found.sides) * scale
    offset = (0, 0) if info is None else info.offset
    said = (found.probability, found.sd, found.p_value, found.flagged, found.doubt, found.unlike)
    patches = qupath.Patches(coords, *said, classes=found.classes)

    def piece(start: int) -> bytes:
        part = patches.part(slice(start, start + PIECE))
        tiles = qupath.to_geojson(part, size, offset=offset, only_flagged=only_flagged)
        return qupath.to_bytes(tiles)

    return _joined(piece(start) for start in range(0, len(found), PIECE))


def _joined(pieces: Iterable[bytes]) -> Iterator[bytes]:
    """Collections of features as one."""
    head, tail = qupath.to_bytes(EMPTY).split(b"[]")
    yield head + b"["
    comma = b""
    for piece in pieces:
        features = piece.removeprefix(head + b"[").removesuffix(b"]" + tail)
        if features:
            yield comma + features
            comma = b","
    yield b"]" + tail
