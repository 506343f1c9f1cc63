"""What one feature file says of its slide, whatever tool wrote it."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from jaxtyping import Float, Int, Num

from gpmil.data.positions import FARTHEST
from gpmil.files.foreign import BadFile

BLOCK = 1 << 25
"""Bytes of features read at a time: a cohort never lies in memory."""

PIXELS = "level-0 pixels"
MICRONS = "microns"
UNKNOWN_UNITS = "units not said in the files"
SLIDE_LEVEL = (
    "holds one vector for the whole slide (slide-level features), where gpmil needs one per patch. "
    "Name the folder with the patch features."
)


class BadSlide(BadFile):
    """A file that cannot be used, and why; `skip_bad` leaves it out."""


class SlideLevel(BadFile):
    """Features of slides, not of patches: nothing to be skipped, another folder is meant."""


@dataclass(frozen=True)
class SlideFacts:
    """What the file says beside the features; kept in the cache as it is."""

    units: str = UNKNOWN_UNITS
    anchor: str = "top left"
    step: tuple[float, ...] | None = None
    step_from: str = ""
    size: tuple[float, ...] | None = None  # side of a patch, larger than the step if they overlap
    encoder: str | None = None
    magnification: float | None = None  # at which patches were cut, not that of the scanner
    mpp: float | None = None  # microns per pixel of the patch
    patch_size: float | None = None  # pixels at that magnification
    overlap: float | None = None
    downsample: float | None = None  # where the magnification is not known
    label: int | None = None
    note: str = ""


@dataclass(frozen=True)
class Slide:
    """A slide whose features are still on disk: `rows(a, b)` reads those of patches a to b."""

    shape: tuple[int, int]
    dtype: np.dtype
    rows: Callable[[int, int], np.ndarray]
    coords: Float[np.ndarray, "n k"] | None = None
    instance_labels: Int[np.ndarray, " n"] | None = None
    told: SlideFacts = field(default_factory=SlideFacts)

    def blocks(self) -> Iterator[Num[np.ndarray, "rows d"]]:
        """The features, a bounded number of rows at a time."""
        n, d = self.shape
        size = max(1, BLOCK // (8 * max(1, d)))
        for start in range(0, n, size):
            yield self.rows(start, min(n, start + size))


def patch_shape(shape: tuple[int, ...], what: str) -> tuple[int, int]:
    """(n, D) of features stored as (n, D), as (1, n, D), or as nothing at all."""
    if 0 in shape:
        return (0, shape[-1] if len(shape) > 1 else 0)
    if len(shape) == 3 and shape[0] == 1:
        return shape[1], shape[2]
    if len(shape) == 1:
        raise SlideLevel(f"{what} of shape {shape} {SLIDE_LEVEL}")
    if len(shape) != 2:
        raise BadSlide(f"{what}: expected (patches, features), found shape {shape}")
    return shape[0], shape[1]


def array_slide(features: Any, what: str) -> Slide:
    """A slide from an array on disk and nothing else; `what` names it in messages."""
    folded = len(features.shape) == 3
    return Slide(
        shape=patch_shape(features.shape, what),
        dtype=features.dtype,
        rows=lambda a, b: features[0, a:b] if folded else features[a:b],
    )


def positions(values: np.ndarray, n: int) -> Float[np.ndarray, "n k"]:
    """Positions of n patches, checked: one row per patch, finite, no place twice."""
    array = values[0] if values.ndim == 3 and values.shape[0] == 1 else values
    if array.ndim != 2 or len(array) != n or array.shape[1] not in (1, 2, 3):
        raise BadSlide(
            f"coords: expected one row per patch, ({n}, 2), found shape {values.shape}. The "
            "features and the positions are not of the same run"
        )
    if array.dtype.kind not in "iuf" or not np.isfinite(array).all():
        raise BadSlide(f"coords: expected finite numbers, found type {array.dtype}, or NaN")
    array = array.astype(np.float64)
    if np.abs(array).max(initial=0.0) > FARTHEST:
        raise BadSlide(f"coords: found {np.abs(array).max():g}; no slide is so large")
    again = n - len(np.unique(array, axis=0))
    if again:
        raise BadSlide(f"coords: {again} of {n} patches lie where another one does")
    return array
