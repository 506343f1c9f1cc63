"""Patches for QuPath: GeoJSON tiles with class, suspicion, probability, doubt and p-value.

QuPath reads the file with File > Import objects from file, compressed too. Polygons are level-0
pixels. QuPath crops slides that have an empty margin to the scanned area; `offset`, the corner of
that area (`gpmil.show.slides.describe(file).offset`), is subtracted. The same patches give the same
bytes.
"""

import gzip as gz
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from jaxtyping import Float, Int
from matplotlib.colors import to_rgb

from gpmil.files.whole import write_whole
from gpmil.show.classes import ClassLayer
from gpmil.show.layers import suspicion
from gpmil.show.raster import pair

__all__ = [
    "DIGITS",
    "FLAGGED",
    "FLAG_COLOURS",
    "NOT_FLAGGED",
    "SCALE",
    "Patches",
    "patches_of",
    "to_bytes",
    "to_geojson",
    "write",
]

if TYPE_CHECKING:  # torch is not needed to write a file
    from gpmil.models.base import InstancePredictions

FLAGGED, NOT_FLAGGED = "flagged", "not flagged"
FLAG_COLOURS = {FLAGGED: [213, 94, 0], NOT_FLAGGED: [160, 160, 160]}
# From low to high probability, as in the heat maps.
SCALE = np.array([[68, 1, 84], [59, 82, 139], [33, 145, 140], [94, 201, 98], [253, 231, 37]])
DIGITS = 6  # of measurements


@dataclass(frozen=True)
class Patches:
    """The patches of one slide: upper left corners in level-0 pixels, and what is said of them."""

    # Shapes are checked where patches are written, with a message for people.
    coords: np.ndarray  # (n, 2)
    probability: np.ndarray  # (n,), as are the others
    std: np.ndarray | None = None
    p_value: np.ndarray | None = None
    flagged: np.ndarray | None = None
    doubt: np.ndarray | None = None
    unlike: np.ndarray | None = None
    classes: ClassLayer | None = None  # grades or types

    def __len__(self) -> int:
        return len(self.coords)

    def part(self, chosen: Any) -> "Patches":
        """Some of the patches, by a slice or a mask."""
        columns: Any = (
            v.part(chosen) if isinstance(v, ClassLayer) else None if v is None else v[chosen]
            for v in vars(self).values()
        )
        return Patches(*columns)


def patches_of(predictions: "InstancePredictions") -> Patches:
    """The patches of a model's predictions for one slide, an element of `predictions.split()`."""
    bags = predictions.bags
    if len(bags) != 1:
        raise ValueError(
            f"expected the predictions of one slide, found {len(bags)}. Take them one by one: "
            "for predictions in model.predict_instances(bags).split()."
        )
    if bags.coords is None or bags.coords.shape[1] != 2:
        raise ValueError(
            f"slide {bags.names[0]!r}: its patches have no positions x, y. Give coords= when "
            "building the bags."
        )
    names = ("std", "p_value", "flagged", "doubt", "unlike")
    said = {name: getattr(predictions, name) for name in names}
    p, classes = (getattr(predictions, k, None) for k in ("class_probability", "classes"))
    if p is not None and classes is not None:
        ordered = hasattr(predictions, "expected_grade")
        said["classes"] = ClassLayer(tuple(str(c) for c in classes), p, ordered)
    return Patches(bags.coords, predictions.probability, **said)


def to_geojson(
    predictions: "InstancePredictions | Patches",
    size: Any = None,
    *,
    offset: Sequence[float] = (0, 0),
    threshold: float | Sequence[float] = 0.5,
    only_flagged: bool = False,
) -> dict[str, Any]:
    """The patches of one slide as a FeatureCollection of tiles.

    Parameters
    ----------
    predictions
        of one slide; `Patches` where they do not come from a model.
    size
        side of a patch in level-0 pixels, one number or one per axis; default as the feature
        file tells it, else the bags' step.
    offset
        corner of the scanned area, (openslide.bounds-x, openslide.bounds-y).
    threshold
        of the classes where no patch was tested: one probability, or several in rising order.
    only_flagged
        leave the other patches out.

    Measurements are the layers of the heat maps, p-value and sd, where they are finite numbers.
    A patch without a probability has no class unless it was tested. Grades or types are classes
    where a model knows them, their probabilities and flags are measurements then.

    Examples
    --------
    >>> patches = Patches(np.array([[512, 256]]), np.array([0.91]), flagged=np.array([True]))
    >>> tile = to_geojson(patches, size=256, offset=(512, 0))["features"][0]
    >>> tile["geometry"]["coordinates"]
    [[[0, 256], [256, 256], [256, 512], [0, 512], [0, 256]]]
    >>> tile["properties"]["classification"]["name"], tile["properties"]["measurements"]
    ('flagged', {'probability': 0.91})
    """
    patches, size = _checked(predictions, size)
    if only_flagged:
        patches = _flagged_only(patches)
    classes, kind = _classes(patches, threshold)
    corners = np.asarray(patches.coords, dtype=np.float64) - pair(offset, "offset")
    tiles = zip(_rings(corners, size), kind.tolist(), _measurements(patches))
    features = [_tile(ring, classes[k] if k >= 0 else None, found) for ring, k, found in tiles]
    return {"type": "FeatureCollection", "features": features}


def write(
    path: str | os.PathLike,
    predictions: "InstancePredictions | Patches",
    size: Any = None,
    *,
    gzip: bool = False,
    **options: Any,
) -> Path:
    """Write a GeoJSON file, whole or not at all; `options` are those of `to_geojson`.

    With `gzip` the file is compressed and its name ends in .gz. Returns the path written.
    """
    content = to_bytes(to_geojson(predictions, size, **options), gzip)
    path = Path(path)
    if gzip and path.suffix != ".gz":
        path = path.with_name(path.name + ".gz")
    if path.is_dir():
        raise ValueError(f"{path} is a folder: name a file to write, such as slide.geojson.")
    write_whole(path, content)
    return path


def to_bytes(collection: dict[str, Any], gzip: bool = False) -> bytes:
    """The collection as JSON text, the same for the same content; gzip without a time stamp."""
    text = json.dumps(collection, separators=(",", ":"), allow_nan=False).encode()
    return gz.compress(text, compresslevel=6, mtime=0) if gzip else text


# --- Parts ----------------------------------------------------------------------------------------
def _checked(
    predictions: "InstancePredictions | Patches", size: Any
) -> tuple[Patches, Float[np.ndarray, " 2"]]:
    if isinstance(predictions, Patches):
        patches = predictions
    else:
        patches = patches_of(predictions)
        size = _told_side(predictions.bags) if size is None else size
    if size is None:
        raise ValueError("size: the side of a patch is not known. Give it in level-0 pixels.")
    sides = pair(size, "size", positive=True)
    _check_arrays(patches)
    return patches, sides


def _told_side(bags: Any) -> Any:
    """The side of a slide's patches as its file tells it, else the step, if either is known."""
    told = bags.metadata.get("sizes", {}).get(str(bags.names[0]))
    return bags.step[0] if told is None and bags.step is not None else told


def _check_arrays(patches: Patches) -> None:
    coords = np.asarray(patches.coords)
    if coords.ndim != 2 or coords.shape[1] != 2 or not np.isfinite(coords).all():
        raise ValueError(
            "coords: expected finite (n, 2) positions x, y in level-0 pixels, found shape "
            f"{coords.shape}. Leave out patches without a position."
        )
    for name in ("probability", "std", "p_value", "flagged", "doubt", "unlike"):
        values = getattr(patches, name)
        if values is not None and np.shape(values) != (len(coords),):
            raise ValueError(
                f"{name}: expected one value per patch, {len(coords)} in all, found shape "
                f"{np.shape(values)}. Does it belong to another slide?"
            )


def _flagged_only(patches: Patches) -> Patches:
    if patches.flagged is None:
        raise ValueError(
            "only_flagged: these predictions have no flags. Export all patches, or predict with "
            "a model that flags."
        )
    return patches.part(np.asarray(patches.flagged, dtype=bool))


def _classes(
    patches: Patches, threshold: float | Sequence[float]
) -> tuple[list[dict[str, Any]], Int[np.ndarray, " n"]]:
    """The classes with their colours, and the number of each patch's class, -1 for none."""
    if patches.classes is not None:
        named = zip(patches.classes.names, patches.classes.colours)
        found = [{"name": name, "color": _rgb(colour)} for name, colour in named]
        return found, patches.classes.codes
    if patches.flagged is not None:
        kind = np.where(np.asarray(patches.flagged, dtype=bool), 0, 1)
        return [{"name": name, "color": rgb} for name, rgb in FLAG_COLOURS.items()], kind
    cuts = np.atleast_1d(np.asarray(threshold, dtype=np.float64))
    if cuts.ndim != 1 or not len(cuts) or not ((cuts > 0) & (cuts < 1)).all():
        raise ValueError(f"threshold: expected probabilities between 0 and 1, found {threshold!r}.")
    if (np.diff(cuts) <= 0).any():
        raise ValueError(f"threshold: expected rising probabilities, found {threshold!r}.")
    known = np.isfinite(patches.probability)
    kind = np.where(known, np.searchsorted(cuts, patches.probability, side="right"), -1)
    at = np.linspace(0, len(SCALE) - 1, len(cuts) + 1)
    rgb = [np.interp(at, np.arange(len(SCALE)), channel).round().astype(int) for channel in SCALE.T]
    colours = np.stack(rgb, axis=1).tolist()
    return [{"name": n, "color": c} for n, c in zip(_ranges(cuts), colours)], kind


def _rgb(colour: str) -> list[int]:
    """As QuPath writes it.

    >>> _rgb("#0072b2")
    [0, 114, 178]
    """
    return [round(255 * part) for part in to_rgb(colour)]


def _ranges(cuts: Float[np.ndarray, " k"]) -> list[str]:
    """Names of the classes between thresholds.

    >>> _ranges(np.array([0.3, 0.8]))
    ['p < 0.3', '0.3 <= p < 0.8', 'p >= 0.8']
    """
    words = [f"{cut:g}" for cut in cuts]
    middle = [f"{low} <= p < {high}" for low, high in pairwise(words)]
    return [f"p < {words[0]}", *middle, f"p >= {words[-1]}"]


def _rings(
    corners: Float[np.ndarray, "n 2"], size: Float[np.ndarray, " 2"]
) -> list[list[list[float]]]:
    """Closed rings round the patches, five points each; whole numbers where all are whole."""
    round_trip = np.array([[0, 0], [1, 0], [1, 1], [0, 1], [0, 0]])
    points = (corners[:, None, :] + round_trip * size).round(2)
    whole = bool((points == np.rint(points)).all())
    return (points.astype(np.int64) if whole else points).tolist()


def _measurements(patches: Patches) -> list[dict[str, float]]:
    """The layers of every patch by their names; what is not a finite number is left out."""
    found: list[dict[str, float]] = [{} for _ in range(len(patches))]
    columns = {
        "suspicion": None if patches.p_value is None else suspicion(patches.p_value),
        "probability": patches.probability,
        "unlike": patches.unlike,
        "doubt": patches.doubt,
        "p-value": patches.p_value,
        "sd": patches.std,
    }
    if patches.classes is not None:
        each = patches.classes.probability.T
        columns |= {f"P({name})": p for name, p in zip(patches.classes.names, each)}
        columns["flagged"] = patches.flagged
    for name, values in columns.items():
        if values is None:
            continue
        numbers = np.asarray(values, dtype=np.float64)
        for i in np.flatnonzero(np.isfinite(numbers)).tolist():
            found[i][name] = float(f"{numbers[i]:.{DIGITS}g}")
    return found


def _tile(
    ring: list[list[float]], kind: dict[str, Any] | None, measurements: dict[str, float]
) -> dict[str, Any]:
    properties: dict[str, Any] = {"objectType": "tile", "isLocked": True}
    if kind is not None:
        properties["classification"] = kind
    return {
        "type": "Feature",
        "geometry": {"type": "Polygon", "coordinates": [ring]},
        "properties": properties | {"measurements": measurements},
    }
