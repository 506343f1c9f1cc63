"""STAMP: ``<slide>.h5`` with positions in microns.

feats (N, D) float16, coords (N, 2); attributes of the file: unit, tile_size_um, tile_size_px,
extractor, feat_type. Older files hold `patch_embeddings` and no positions.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from gpmil.io import h5
from gpmil.io.slides import MICRONS, SLIDE_LEVEL, Slide, SlideFacts, SlideLevel
from gpmil.io.steps import number


@contextmanager
def open_slide(path: Path, beside: Path | None = None) -> Iterator[Slide]:
    """One slide."""
    with h5.opened(path) as file:
        kind = h5.text(file.attrs, "feat_type") or "tile"
        if kind != "tile":
            raise SlideLevel(f"feat_type is {kind!r}: the file {SLIDE_LEVEL}")
        unit = h5.text(file.attrs, "unit")
        size = number(file.attrs, "tile_size_um") if unit in (None, "um") else None
        pixels = number(file.attrs, "tile_size_px")
        told = SlideFacts(
            units=MICRONS if unit in (None, "um") else unit,
            step=None if size is None else (size, size),
            step_from="" if size is None else "tile_size_um",
            size=None if size is None else (size, size),
            encoder=h5.text(file.attrs, "extractor"),
            mpp=None if size is None or pixels is None else size / pixels,
            patch_size=pixels,
            note="" if unit or "coords" not in file else "STAMP files without a unit: microns.",
        )
        yield h5.slide(file, h5.dataset(file, "feats", "patch_embeddings"), told)
