"""Labels of patches from outside: tables of positions, and annotations drawn in QuPath.

    slide,x,y,label
    s1,512,256,tumour

A table names patches by their positions. An annotation (GeoJSON, one file per slide, named after
it) labels the patches of which more than half lies inside; areas of several annotations of one
class are added. What fits no slide or no patch is counted and named; a patch that is said to be
both is an error.
"""

import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from scipy.spatial import cKDTree

from gpmil.data import classes
from gpmil.data.bags import Bags
from gpmil.data.checks import SHOWN, all_columns, count, listed
from gpmil.data.classes import join_words
from gpmil.io import annotations
from gpmil.io.labels import SLIDE_NAMES, key
from gpmil.io.table_files import header_of, is_table, read_frame
from gpmil.io.tables import GUESSES, POSITIONS, like, numbers

logger = logging.getLogger("gpmil")

MOST = 0.5  # a patch counts when more of it lies inside
NEAR = 1e-3  # of a patch's side: positions that are the same
DIGITS = 1e-8  # of a position, where the side is not known: tables hold nine digits
CENTRE, MICRONS = "centre", "microns"

Pair = tuple[float, float]


@dataclass
class Found:
    """Classes of patches as files say them: the patch, its class, where that is said."""

    bags: Bags
    rows: list[int] = field(default_factory=list)
    kinds: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    strange: list[str] = field(default_factory=list)  # slides that are not in the cohort

    def __post_init__(self) -> None:
        self.coords = np.asarray(self.bags.coords, dtype=float)
        self.places = {key(name): b for b, name in reversed(list(enumerate(self.bags.names)))}

    def add(self, rows: list[int], kind: str) -> None:
        """Patches, by their rows in the cohort, of one class."""
        self.rows += rows
        self.kinds += [kind] * len(rows)


def with_patch_labels(
    bags: Bags,
    path: str | os.PathLike,
    positive: Any = None,
    negative: Any = None,
    exclude: Any = None,
    *,
    offsets: Mapping[str, Pair] | None = None,
    mpp: float | None = None,
) -> Bags:
    """The same bags with the patch labels of a file or a folder, and no others.

    Parameters
    ----------
    path : csv, tsv, xlsx or parquet with slide, x, y and label; GeoJSON; or a folder of them
        A GeoJSON file has the annotations of the slide that it is named after.
    positive, negative, exclude
        The classes that count as tumour, as not tumour, and not at all, where they are not 0 and
        1; as in `gpmil.read`. Default: the positive class of the bags' own labels.
    offsets : {slide: (x, y)}
        The corner of the scanned area where QuPath shows only that
        (`gpmil.slides.describe(file).offset`); it is added to annotations.
    mpp
        Microns per pixel, for annotations where the bags' positions are in microns.
    """
    path = Path(path)
    _require_positions(bags, path)
    found = Found(bags)
    for file in _files(path):
        if is_table(file):
            _add_table(file, found)
        else:
            _add_annotations(file, found, offsets or {}, mpp)
    if not found.rows:
        raise ValueError(_nothing(path, found))
    labels = _encoded(found, path, {"positive": positive, "negative": negative, "exclude": exclude})
    values = _per_patch(found, labels, path)
    _tell(path, found, labels, values)
    return bags.with_instance_labels(values)


def _require_positions(bags: Bags, path: Path) -> None:
    if bags.coords is None or bags.coords.shape[1] != 2:
        raise ValueError(
            f"{path}: patches are found by their positions x, y, and these bags have none. Give "
            "coords= when building them, or instance_labels= in place of a file."
        )


def _files(path: Path) -> list[Path]:
    """The files to read, in order of their names."""
    if path.is_dir():
        inside = sorted(p for p in path.iterdir() if p.is_file() and not p.name.startswith("."))
        files = [p for p in inside if is_table(p) or annotations.is_annotation(p)]
    else:
        files = [path] if is_table(path) or annotations.is_annotation(path) else []
    if not files:
        kind = "a folder without a file" if path.is_dir() else "no file"
        what = f"{kind} of patch labels" if path.exists() else "nothing"
        raise ValueError(
            f"{path} is {what}: expected a table (csv, tsv, xlsx, parquet) "
            "with slide, x, y and label, or annotations of QuPath (.geojson, named after the "
            "slide), or a folder of them."
        )
    return files


# ------------------------------------------------------------------ tables


def _add_table(path: Path, found: Found) -> None:
    slide, label, axes = _columns(header_of(path), path)
    df = read_frame(path, [slide, label], rows="labelled patch")
    xy = numbers(df, axes, path).astype(float)
    kinds = df[label].map(classes.text)
    known = df[slide].notna() & kinds.notna()
    nowhere: list[str] = []
    for name, rows in df.index[known].groupby(df[slide][known].map(key)).items():
        b = found.places.get(str(name))
        if b is None:
            found.strange.append(str(name))
            continue
        at = df.index.get_indexer(rows)
        nowhere += _add_positions(found, b, xy[at], kinds.iloc[at].tolist())
    if nowhere:
        found.notes.append(
            f"{path.name}: {count(len(nowhere), 'label')} where no patch is: "
            f"{', '.join(nowhere[:SHOWN])}{', ...' * (len(nowhere) > SHOWN)}. Positions are those "
            "of the feature files; patches without features cannot be labelled."
        )


def _columns(header: list[str], path: Path) -> tuple[str, str, list[str]]:
    """The columns of the slide and of the label, and those of the position, by their names."""
    pairs = ([like([axis], header) for axis in pair] for pair in POSITIONS)
    x, y = next((pair for pair in pairs if None not in pair), (None, None))
    usual = {"slide": SLIDE_NAMES, "label": (*GUESSES["instance_label"], *GUESSES["label"])}
    found = {what: like(names, header) for what, names in usual.items()} | {"x": x, "y": y}
    missing = [what for what, column in found.items() if column is None]
    if missing:
        raise ValueError(
            f"{path}: expected columns slide, x, y and label, found {all_columns(header)}. There "
            f"is none for {join_words(missing)}: give it such a name."
        )
    slide, label, *axes = (str(column) for column in found.values())
    return slide, label, axes


def _add_positions(found: Found, b: int, xy: np.ndarray, kinds: Sequence[str]) -> list[str]:
    """Label the patches at positions of slide b; the positions without a patch, in words."""
    start, end = found.bags.offsets[b : b + 2]
    coords = found.coords[start:end]
    side = _sides(found.bags, b)
    near = DIGITS * np.abs(coords).max() if side is None else NEAR * side.min()
    hits = cKDTree(coords).query_ball_point(xy, max(near, DIGITS))
    for at, kind in zip(hits, kinds):
        found.add([int(start) + i for i in at], kind)
    name = found.bags.names[b]
    return [f"{name} ({x:g}, {y:g})" for (x, y), at in zip(xy, hits) if not at]


def _sides(bags: Bags, b: int) -> np.ndarray | None:
    """Width and height of a slide's patches: as files tell it, else the step."""
    told = bags.metadata.get("sizes", {}).get(str(bags.names[b]))
    if told is None and bags.step is not None and np.isfinite(bags.step[b]).all():
        told = bags.step[b]
    return None if told is None else np.broadcast_to(np.asarray(told, dtype=float), (2,))


# ------------------------------------------------------------------ annotations


def _add_annotations(
    path: Path, found: Found, offsets: Mapping[str, Pair], mpp: float | None
) -> None:
    name = key(annotations.slide_of(path))
    areas, notes = annotations.read(path)
    found.notes += notes
    b = found.places.get(name)
    if b is None:
        found.strange.append(name)
        return
    by = np.asarray(offsets.get(str(found.bags.names[b]), (0, 0)), dtype=float)
    scale = _scale(found.bags, path, mpp)
    corners, sides = _patches(found, b, path)
    outside = 0
    inside = {area.kind: np.zeros(len(corners)) for area in areas}
    for area in areas:
        share = area.moved(by, scale).share(corners, sides)
        inside[area.kind] += share
        outside += not share.any()
    for kind, share in inside.items():
        rows = found.bags.offsets[b] + np.flatnonzero(share > MOST)
        found.add(rows.tolist(), kind)
    if outside:
        low, high = corners.min(axis=0), corners.max(axis=0) + sides
        found.notes.append(
            f"{path.name}: {outside} of {count(len(areas), 'annotation')} touch no patch; patches "
            f"lie at x {low[0]:g} to {high[0]:g}, y {low[1]:g} to {high[1]:g}: another slide, or "
            "other units?"
        )


def _patches(found: Found, b: int, path: Path) -> tuple[np.ndarray, np.ndarray]:
    """Upper left corners and sides of a slide's patches."""
    bags = found.bags
    sides = _sides(bags, b)
    if sides is None:
        raise ValueError(
            f"{path}: the side of the patches of {str(bags.names[b])!r} is not known. Give the "
            "bags' step=."
        )
    coords = found.coords[bags.offsets[b] : bags.offsets[b + 1]]
    return (coords - sides / 2 if bags.metadata.get("anchor") == CENTRE else coords), sides


def _scale(bags: Bags, path: Path, mpp: float | None) -> float:
    if bags.metadata.get("units") != MICRONS:
        return 1.0
    if mpp is None or not (np.isfinite(mpp) and mpp > 0):
        raise ValueError(
            f"{path}: annotations are in pixels, and the positions of these patches in microns. "
            "Say how many microns a pixel has: gpmil.io.with_patch_labels takes mpp= in Python."
        )
    return float(mpp)


# ------------------------------------------------------------------ together


def _encoded(found: Found, path: Path, said: dict[str, Any]) -> classes.Labels:
    """0, 1 and -1 by the words given, else by the positive class of the slides' labels."""
    kinds = {classes.fold(kind) for kind in found.kinds}
    plain = kinds <= {classes.fold(word) for word in classes.PLAIN}
    own = found.bags.class_names
    if plain:
        said = {}
    elif not any(said.values()) and own is not None:
        said = {"positive": own[1]}
        if classes.fold(own[0]) in kinds:
            said["negative"] = own[0]
    try:
        return classes.encode(found.kinds, **said)
    except ValueError as error:
        raise ValueError(f"{path}: patch {error}") from error


def _per_patch(found: Found, labels: classes.Labels, path: Path) -> np.ndarray:
    """One label per patch of the cohort; a patch of both classes is an error that names it."""
    values = np.full(found.bags.n_instances, -1)
    rows = np.array(found.rows)
    negative, positive = (np.unique(rows[labels.values == code]) for code in (0, 1))
    torn = np.intersect1d(negative, positive)
    if len(torn):
        raise ValueError(
            f"{path}: {count(len(torn), 'patch')} labelled both "
            f"positive and negative: {_named(found, torn)}. Keep one label per patch, or "
            "draw annotations that do not overlap."
        )
    values[negative], values[positive] = 0, 1
    return values


def _named(found: Found, rows: np.ndarray) -> str:
    first = rows[:SHOWN]
    slides = found.bags.names[found.bags.bag_index[first]]
    words = [f"{slide} ({x:g}, {y:g})" for slide, (x, y) in zip(slides, found.coords[first])]
    return ", ".join(words) + (", ..." if len(rows) > SHOWN else "")


def _nothing(path: Path, found: Found) -> str:
    if found.strange:
        return (
            f"{path}: no label is of a slide that was read. They are of {listed(found.strange)}, "
            f"the slides are called {listed(found.bags.names)}. {' '.join(found.notes)}"
        ).strip()
    said = " ".join(found.notes) or "There are no labels, or no annotations with a class, in it."
    return f"{path}: no patch is labelled. {said}"


def _tell(path: Path, found: Found, labels: classes.Labels, values: np.ndarray) -> None:
    notes = [*found.notes, *labels.notes]
    if found.strange:
        notes.append(
            f"labels of {count(len(set(found.strange)), 'slide')} that were not read: "
            f"{listed(found.strange)}."
        )
    before = int((found.bags.instance_labels >= 0).sum())
    if before:
        notes.append(f"{before:,} patch labels that the data had are replaced.")
    for note in notes:  # a file of a folder has its own name in the note
        named = note.startswith(f"{path.name}: ")
        logger.warning("%s%s", "" if named else f"{path.name}: ", note)
    logger.info(
        "%s: %d patches labelled positive, %d negative, in %d slides.",
        path.name,
        *((values == code).sum() for code in (1, 0)),
        len(np.unique(found.bags.bag_index[values >= 0])),
    )
