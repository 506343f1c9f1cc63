"""What a run remembers of its data: numbers, classes, a fingerprint, and what maps need."""

import hashlib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float

from gpmil.data import classes
from gpmil.data.bags import Bags

KIND = "slides-"  # before fingerprints that are made of digests of slides


def cache_of(card: Mapping[str, Any]) -> Path | None:
    """Where a run kept the features, as it was said; None: where `gpmil.read` keeps them anyway."""
    given = card.get("cache")
    return None if given is None else Path(given)


def data_card(bags: Bags, before: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """What a run remembers of its data; the fingerprint changes when they do.

    `before` is the configuration of a run to be repeated, whose fingerprint may be of a kind that
    earlier versions made.
    """
    known = bags.metadata.get("classes") or classes.of_codes(bags.labels, bags.class_names)
    noted = str((before or {}).get("data", {}).get("fingerprint", KIND))
    made = fingerprint(bags) if noted.startswith(KIND) else _earlier_fingerprint(bags)
    return {
        "slides": len(bags),
        "patches": bags.n_instances,
        "features": bags.n_features,
        "fingerprint": made,
        "classes": {name: list(facts) for name, facts in known.items()},
    }


def fingerprint(bags: Bags) -> str:
    """A digest of everything that a result can depend on; features are known by their digests."""
    return KIND + _digest(bags, [bags.digests().tobytes()])


def _earlier_fingerprint(bags: Bags) -> str:
    """The same from the features themselves, which have to be read for it."""
    rows = bags.split(bags.features)
    return _digest(bags, (np.ascontiguousarray(one).data for one in rows))


def _digest(bags: Bags, features: Iterable[bytes | memoryview]) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for part in features:
        digest.update(part)
    groups = [] if bags.groups is None else bags.groups.tolist()
    for words in (bags.names.tolist(), groups):
        digest.update(json.dumps([str(w) for w in words]).encode())
    arrays = [bags.offsets, bags.labels, bags.instance_labels, bags.coords, bags.step]
    graph = bags.adjacency
    for array in (*arrays, graph.indptr, graph.indices, graph.data):
        digest.update(b"-" if array is None else np.ascontiguousarray(array).tobytes())
    return digest.hexdigest()


def placement(bags: Bags) -> dict[str, Any]:
    """What maps need besides positions: spacing, side, units, whether positions are centres.

    Beside it, how the features were extracted and which classes the labels have, where known.
    """
    known = {key: bags.metadata[key] for key in ("units", "anchor") if bags.metadata.get(key)}
    classes = None if bags.class_names is None else list(bags.class_names)
    told = {"sizes": sizes(bags), "extraction": dict(bags.facts), "classes": classes}
    return {"steps": steps(bags), **{k: v for k, v in told.items() if v}, **known}


def steps(bags: Bags) -> dict[str, float | list[float]]:
    """The spacing of every slide's grid, where it is known."""
    if bags.step is None:
        return {}
    found = {}
    for name, step in zip(bags.names, np.asarray(bags.step, dtype=float).reshape(len(bags), -1)):
        if np.isfinite(step).all():
            found[str(name)] = _side(step)
    return found


def sizes(bags: Bags) -> dict[str, float | list[float]]:
    """The side of every slide's patches, where files tell it; overlapping ones exceed the step."""
    told = bags.metadata.get("sizes", {})
    names = [str(name) for name in bags.names]
    return {name: _side(np.asarray(told[name], dtype=float)) for name in names if name in told}


def _side(lengths: Float[np.ndarray, " k"]) -> float | list[float]:
    """One number where all axes have the same."""
    return float(lengths[0]) if (lengths == lengths[0]).all() else lengths.tolist()
