"""Annotations of QuPath: polygons with a class, from GeoJSON files.

QuPath writes them with File > Export objects as GeoJSON: a collection of features, a list of them
or one alone, in pixels of the full resolution. Annotations without a class, and points and lines,
which have no inside, are left out and counted.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from gpmil.data.checks import count
from gpmil.files.foreign import BadFile, read_json
from gpmil.io.polygons import Points, Ring, Shares, crossing, share_inside

ENDINGS = (".geojson", ".geojson.gz", ".json", ".json.gz")
FARTHEST = 1e10  # pixels: slides have some 1e5
AREAS = {"Polygon": 1, "MultiPolygon": 2}
WITHOUT_INSIDE = ("Point", "MultiPoint", "LineString", "MultiLineString")


class Annotation(NamedTuple):
    """An area with a class."""

    kind: str
    polygons: list[list[Ring]]

    def share(self, corners: Points, sides: np.ndarray) -> Shares:
        """Which part of every patch lies inside."""
        parts = [share_inside(polygon, corners, sides) for polygon in self.polygons]
        return np.sum(parts, axis=0)

    def moved(self, by: np.ndarray, scale: float) -> "Annotation":
        """At other coordinates: (x + by) * scale."""
        rings = [[(ring + by) * scale for ring in polygon] for polygon in self.polygons]
        return Annotation(self.kind, rings)


def is_annotation(path: Path) -> bool:
    """Whether the name is that of a file with annotations."""
    return path.name.casefold().endswith(ENDINGS)


def slide_of(path: Path) -> str:
    """The slide that a file is named after.

    >>> slide_of(Path("marks/TCGA-01.svs.geojson.gz"))
    'TCGA-01.svs'
    """
    ending = next(e for e in sorted(ENDINGS, key=len)[::-1] if path.name.casefold().endswith(e))
    return path.name[: -len(ending)]


def read(path: Path) -> tuple[list[Annotation], list[str]]:
    """The annotations of a file, and what was left out, in words."""
    found: list[Annotation] = []
    unnamed = flat = 0
    for k, feature in enumerate(_features(read_json(path), path)):
        where = f"{path}: annotation {k + 1}"
        geometry = _entry(feature, "geometry", where)
        kind = _kind(feature.get("properties"), where)
        if geometry.get("type") in WITHOUT_INSIDE:
            flat += 1
        elif kind is None:
            unnamed += 1
        else:
            found.append(Annotation(kind, _polygons(geometry, f"{where} ({kind!r:.60})")))
    notes = []
    if unnamed:
        notes.append(f"{path.name}: {count(unnamed, 'annotation')} without a class left out.")
    if flat:
        notes.append(f"{path.name}: {count(flat, 'annotation')} of points or lines left out.")
    return found, notes


def _features(content: Any, path: Path) -> Iterator[dict[str, Any]]:
    if isinstance(content, dict) and content.get("type") == "FeatureCollection":
        content = content.get("features")
    features = content if isinstance(content, list) else [content]
    for k, feature in enumerate(features):
        if not isinstance(feature, dict) or feature.get("type") != "Feature":
            raise BadFile(
                f"{path}: expected annotations as GeoJSON features, found {feature!r:.60} as "
                f"number {k + 1}. Export them from QuPath with File > Export objects as GeoJSON."
            )
        yield feature


def _entry(feature: dict[str, Any], name: str, where: str) -> dict[str, Any]:
    found = feature.get(name)
    if not isinstance(found, dict):
        raise BadFile(f"{where}: expected a {name}, found {found!r:.60}. Was it changed by hand?")
    return found


def _kind(properties: Any, where: str) -> str | None:
    """The class: {"name": "Tumor"}, or {"names": ["Tumor", "Positive"]} for a derived one."""
    given = properties.get("classification") if isinstance(properties, dict) else None
    if isinstance(given, dict):
        names = given.get("names")
        given = given.get("name") or (": ".join(map(str, names)) if isinstance(names, list) else "")
    if given is not None and not isinstance(given, str):
        raise BadFile(f"{where}: expected a class with a name, found {given!r:.60}.")
    return (given or "").strip() or None


def _polygons(geometry: dict[str, Any], where: str) -> list[list[Ring]]:
    depth = AREAS.get(str(geometry.get("type")))
    coordinates = geometry.get("coordinates")
    if depth is None or not isinstance(coordinates, list) or not coordinates:
        raise BadFile(
            f"{where}: expected a Polygon or a MultiPolygon with coordinates, found "
            f"{geometry.get('type')!r:.60}. Split groups of shapes in QuPath."
        )
    polygons = [coordinates] if depth == 1 else coordinates
    if not all(isinstance(polygon, list) and polygon for polygon in polygons):
        raise BadFile(f"{where}: expected lists of rings, found something else.")
    return [[_ring(points, where) for points in polygon] for polygon in polygons]


def _ring(points: Any, where: str) -> Ring:
    try:
        ring = np.array([[float(v) for v in point[:2]] for point in points], dtype=np.float64)
        good = ring.ndim == 2 and ring.shape[1] == 2 and len(ring) >= 3
    except (TypeError, ValueError, LookupError):
        good = False
    if not good or not (np.abs(ring) <= FARTHEST).all():
        raise BadFile(
            f"{where}: expected rings of at least three points [x, y], found {points!r:.60}."
        )
    if (ring[0] != ring[-1]).any():
        ring = np.vstack([ring, ring[:1]])
    at = crossing(ring)
    if at is not None:
        raise BadFile(
            f"{where}: its outline crosses itself near x {at[0]:g}, y {at[1]:g}, so that nobody "
            "knows what is inside. Draw it again, or repair it in QuPath (Edit shape, simplify)."
        )
    return ring
