"""Grades and types in the viewer: what a run says of the class of each slide, and their colours."""

import logging
from collections.abc import Sequence
from typing import Any

import numpy as np

from gpmil.files.foreign import BadFile
from gpmil.runs.class_table import TRUTH, ClassTable
from gpmil.show.classes import ClassLayer, class_colours
from gpmil.viewer.cohort import Missing, ShownRun

logger = logging.getLogger("gpmil")


def slide_classes(run: ShownRun, names: Sequence[str]) -> dict[str, Any] | None:
    """Call, probabilities and truth of every slide, classes by their number; None without any."""
    try:
        there = [run.file(name) for name in TRUTH]
        table = ClassTable.read(run.folder) if any(there) else None
    except (Missing, BadFile) as error:
        logger.warning("%s", error)
        return None
    if table is None:
        return None
    first = ~table.rows.duplicated("slide").to_numpy()
    place = {slide: k for k, slide in enumerate(table.rows["slide"][first])}
    calls, p, known = table.codes("call")[first], table.p[first], table.known()
    truth = dict(zip(known.rows["slide"], known.codes(table.truth).tolist()))
    own = [place.get(name) for name in names]
    return {
        **class_card(table.names, table.ordered),
        "call": [None if k is None else int(calls[k]) for k in own],
        "p": [None if k is None else p[k].tolist() for k in own],
        "truth": [truth.get(name) for name in names],
    }


def class_card(names: Sequence[str], ordered: bool) -> dict[str, Any]:
    """What classes are called, and their colours."""
    word = "grade" if ordered else "type"
    return {"word": word, "names": list(names), "colours": class_colours(len(names), ordered)}


def layer_card(layer: ClassLayer | None) -> dict[str, Any] | None:
    """The same of the patches of a slide."""
    return None if layer is None else class_card(layer.names, layer.ordered)


def layer_arrays(layer: ClassLayer | None) -> dict[str, np.ndarray]:
    """A probability per class of every patch, and its class; -1 unknown."""
    if layer is None:
        return {}
    found: dict[str, np.ndarray] = {f"class{k}": p for k, p in enumerate(layer.probability.T)}
    return found | {"class_code": layer.codes.astype(np.int8)}
