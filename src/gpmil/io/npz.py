"""One .npz with the arrays of a cohort.

    X (N, D)     features                    y_inst (N,)       0, 1 or -1 unknown; optional
    bag (N,)     index into the bag arrays   x, y, z (N,)      positions; optional
    y_bag (B,)   0, 1 or -1 unlabelled       split (B,)        optional
    bag_id (B,)  names                       group or patient (B,)  optional

Without x and y, row and col (N,) are positions on a grid. Other arrays are not looked at.
Positions are those of the whole slide: regions with positions of their own are to be shifted apart
first.
"""

import logging
import os
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Int

from gpmil.data import classes
from gpmil.data.bags import Bags
from gpmil.data.checks import count, listed
from gpmil.io.arrays import npz
from gpmil.io.tables import WholeCohort, by_split

logger = logging.getLogger("gpmil")

NEEDED = ("X", "bag", "y_bag", "bag_id")
PER_BAG = ("y_bag", "bag_id", "split", "group", "patient")
PER_INSTANCE = ("X", "bag", "y_inst", "x", "y", "z", "row", "col")


def read(
    path: str | os.PathLike,
    step: Any = None,
    graph: str | None = "grid4",
    positive: Any = None,
    negative: Any = None,
    exclude: Any = None,
) -> dict[str, Bags]:
    """Cohorts from an .npz: one per value of `split`, else {"all"}.

    A `step` that is not given is inferred from the positions, and that is said. Bags without an
    instance are left out, and that is said too. Other labels than 0 and 1 need `positive`, as in
    `Bags`.
    """
    said = {"positive": positive, "negative": negative, "exclude": exclude}
    return by_split(Path(path), whole(Path(path), said, step, graph))


def whole(path: Path, said: Mapping[str, Any], step: Any, graph: str | None) -> WholeCohort:
    """All bags as one cohort; `said` are options of `classes.encode`."""
    arrays = _load(path)
    _check_lengths(arrays, path)
    bag = _bag_numbers(arrays, path)
    order = np.argsort(bag, kind="stable")
    sizes = np.bincount(bag, minlength=len(arrays["bag_id"]))
    names = np.array([str(name) for name in arrays["bag_id"]])
    kept = sizes > 0
    if not kept.all():
        logger.warning(
            "%s: %s without an instance left out: %s",
            path.name, count(int((~kept).sum()), "bag"), listed(names[~kept]),
        )  # fmt: skip
    axes = [arrays[axis][order] for axis in ("x", "y", "z") if axis in arrays]
    group = arrays.get("group", arrays.get("patient"))
    try:
        found = classes.encode(arrays["y_bag"][kept], **said)
        bags = Bags.from_arrays(
            _by_bag(arrays["X"][order], sizes[kept]),
            coords=_by_bag(np.stack(axes, axis=1), sizes[kept]) if axes else None,
            step=step,
            graph=graph,
            names=names[kept],
            groups=None if group is None else group[kept],
            instance_labels=(
                _by_bag(arrays["y_inst"][order], sizes[kept]) if "y_inst" in arrays else None
            ),
        )
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    bags = bags.with_labels(found)
    split = arrays["split"][kept] if "split" in arrays else None
    return WholeCohort(bags, split, found.notes)


def _load(path: Path) -> dict[str, np.ndarray]:
    """The arrays that are looked at; nothing in the file is executed."""
    if not path.is_file():
        raise ValueError(f"{path} is no file: expected an .npz.")
    if not zipfile.is_zipfile(path):
        raise ValueError(f"{path} is no .npz file, or not all of it is there. Copy it again.")
    found = npz(path, dict.fromkeys((*PER_INSTANCE, *PER_BAG)))
    missing = [name for name in NEEDED if name not in found]
    if missing:
        raise ValueError(
            f"{path}: expected arrays {', '.join(NEEDED)}, no {listed(missing)} among "
            f"{listed(found)}."
        )
    if "x" not in found and "y" not in found and {"row", "col"} <= set(found):
        found |= {"x": found["col"], "y": found["row"]}
    return found


def _check_lengths(arrays: dict[str, np.ndarray], path: Path) -> None:
    for names, first in ((PER_INSTANCE, "X"), (PER_BAG, "bag_id")):
        if arrays[first].ndim == 0:
            raise ValueError(f"{path}: {first}: expected an array, found a single value.")
        for name in (name for name in names if name in arrays):
            shape, axes = arrays[name].shape, 2 if name == "X" else 1
            if len(shape) != axes or shape[0] != len(arrays[first]):
                raise ValueError(
                    f"{path}: {name}: expected {'rows and columns' if axes == 2 else 'one axis'}, "
                    f"as long as {first} ({len(arrays[first])}); found shape {shape}."
                )
    given = [axis in arrays for axis in ("x", "y", "z")]
    if given != sorted(given, reverse=True):
        raise ValueError(f"{path}: positions are x, or x and y, or x, y and z; one is missing.")


def _bag_numbers(arrays: dict[str, np.ndarray], path: Path) -> Int[np.ndarray, " N"]:
    bag, n_bags = arrays["bag"], len(arrays["bag_id"])
    if bag.dtype.kind not in "iu" or not len(bag) or bag.min() < 0 or bag.max() >= n_bags:
        raise ValueError(
            f"{path}: bag: expected whole numbers from 0 to {n_bags - 1}, the index of every "
            f"instance's bag; found {listed(bag[:50].tolist())} of type {bag.dtype}."
        )
    return bag.astype(np.int64)


def _by_bag(values: np.ndarray, sizes: Int[np.ndarray, " B"]) -> list[np.ndarray]:
    return np.split(values, np.cumsum(sizes)[:-1])
