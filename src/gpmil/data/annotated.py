"""Tables of AnnData with one row per patch, as LazySlide and SpatialData have them.

Features are `X`, positions `obsm["spatial"]`; the slide of a row is a column of `obs`, or there is
one table per slide. `uns["tile_spec"]` is what wsidata notes of the patches of a slide.
"""

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import pandas as pd
from scipy.sparse import issparse

from gpmil import extras
from gpmil.data.checks import all_columns, listed
from gpmil.data.frames import Table

logger = logging.getLogger("gpmil")

# Columns of `obs` that name the slide, the first that is there; library_id is SpatialData's habit.
SLIDE_COLUMNS = ("slide", "slide_name", "slide_id", "library_id", "sample_id", "sample")
# What `to_anndata` calls patients and labels of patches, and a habit of others.
PATIENT_COLUMNS, PATCH_LABEL_COLUMNS = ("patient", "patient_id"), ("instance_label",)
SPATIAL, TILES, PREFIX, FACTS = "spatial", "tile_spec", "gpmil_", "gpmil"


@dataclass(frozen=True)
class Tables:
    """One AnnData, or several that are one slide each, as a single table of rows."""

    parts: list[Any]
    obs: pd.DataFrame
    slide: str  # its column with the name of the slide
    alone: bool  # whether every part is a slide

    def stacked(self, of: Any) -> np.ndarray:
        """What `of` takes from every part, (N, k)."""
        return np.concatenate([_dense(of(part)) for part in self.parts])


def _dense(values: Any) -> np.ndarray:
    return values.toarray() if issparse(values) else np.asarray(values)


def gather(data: Any, slide: str | None) -> Tables:
    """The rows of an AnnData, or of a mapping from names of slides to AnnData."""
    if isinstance(data, Mapping):
        if not data:
            raise ValueError("data: expected an AnnData per slide, found an empty mapping")
        for part in data.values():
            _require_table(part)
        rows = [part.obs.assign(slide=str(name)) for name, part in data.items()]
        return Tables(list(data.values()), pd.concat(rows), "slide", True)
    _require_table(data)
    column = slide if slide is not None else _slide_column(data)
    return Tables([data], data.obs, column, False)


def _require_table(data: Any) -> None:
    if not all(hasattr(data, name) for name in ("X", "obs", "obsm", "uns")):
        raise ValueError(
            f"data: expected an AnnData (or a mapping from slides to AnnData), found "
            f"{type(data).__name__}. Of a SpatialData object give a table: sdata.tables[name]."
        )


def _slide_column(data: Any) -> str:
    """The column of `obs` that names the slides, which is said."""
    noted = data.uns.get("spatialdata_attrs", {}).get("region_key")
    for name in (*SLIDE_COLUMNS, noted):
        if name in data.obs:
            logger.warning("slide: obs column '%s', %d slides", name, data.obs[name].nunique())
            return str(name)
    raise ValueError(
        f"slide: no column of obs names the slide of a row; the columns are "
        f"{all_columns(data.obs.columns)}. Name one, or give a mapping from slides to AnnData."
    )


def read(
    data: Any,
    slide: str | None,
    label: str | None,
    features: str | None,
    coords: str | None,
    group: str | Literal[False] | None,
    instance_label: str | Literal[False] | None,
) -> dict[str, Any]:
    """What tables are to `Bags`, by the names of its arguments; step and metadata where noted."""
    tables = gather(data, slide)
    rows = Table(tables.obs, tables.slide)
    where = _positions(tables, coords)
    patient = _guessed(tables, group, "group", PATIENT_COLUMNS)
    of_patches = _guessed(tables, instance_label, "instance_label", PATCH_LABEL_COLUMNS)
    return {
        "features": tables.stacked(lambda part: _features(part, features))[rows.order],
        "offsets": rows.offsets,
        "labels": rows.constant(rows.label_column(label), "label"),
        "names": rows.names,
        "groups": rows.constant(patient, "group"),
        "coords": None if where is None else where[rows.order],
        "instance_labels": rows.column(of_patches, "instance_label"),
        **_tiles(tables, len(rows.names)),
    }


def _guessed(
    tables: Tables, name: str | Literal[False] | None, argument: str, usual: tuple[str, ...]
) -> str | None:
    """The column that was named; the first with a usual name, which is said; None if False."""
    if name is not None:
        return name or None
    for column in usual:
        if column in tables.obs:
            logger.warning("%s: obs column '%s' (%s=False: none)", argument, column, argument)
            return column
    return None


def _features(part: Any, name: str | None) -> Any:
    if name is None:
        return part.X
    for place in (part.obsm, part.layers):
        if name in place:
            return place[name]
    have = [*part.obsm, *part.layers]
    raise ValueError(f"features: neither obsm nor layers has {name!r}; they have {listed(have)}")


def _positions(tables: Tables, name: str | None) -> np.ndarray | None:
    """Positions of all rows; the default ones may be absent, and that is said."""
    if name is None:
        return None
    missing = [k for k, part in enumerate(tables.parts) if name not in part.obsm]
    if missing and (name != SPATIAL or len(missing) < len(tables.parts)):
        have = listed(sorted({key for part in tables.parts for key in part.obsm}))
        raise ValueError(f"coords: no obsm {name!r} in {len(missing)} tables; they have {have}")
    if missing:
        logger.warning('no obsm "spatial": the instances have no positions')
        return None
    return tables.stacked(lambda part: part.obsm[name])


def _tiles(tables: Tables, n_slides: int) -> dict[str, Any]:
    """Step and facts, where every table notes how its slide was cut into patches."""
    specs = [dict(part.uns.get(TILES, {})) for part in tables.parts]
    if not all({"width", "stride_width", "stride_height"} <= set(spec) for spec in specs):
        own = [dict(part.uns.get(FACTS, {})) for part in tables.parts]  # of to_anndata
        return {"metadata": own[0]} if all(facts == own[0] for facts in own) else {}
    # positions are level-0 pixels: stride at the patches' level times its downsample
    step = [
        [spec[f"stride_{side}"] * spec.get("base_downsample", 1) for side in ("width", "height")]
        for spec in specs
    ]
    facts = {
        "mpp": {spec.get("mpp") for spec in specs},
        "patch_size": {spec["width"] for spec in specs},
        "overlap": {spec["width"] - spec["stride_width"] for spec in specs},
    }
    one = {name: min(values) for name, values in facts.items() if len(values) == 1}
    return {"step": np.broadcast_to(step, (n_slides, 2)), "metadata": one}


def write(bags: Any, predictions: Any = None, into: Any = None) -> Any:
    """An AnnData of all patches, or `into`, with columns of predictions."""
    if into is not None:
        _add(bags, predictions, into)
        return into
    made = _new(bags)
    _add_columns(bags, predictions, made.obs, np.arange(bags.n_instances))
    return made


def _new(bags: Any) -> Any:
    """An AnnData of all patches, bag after bag."""
    try:
        import anndata
    except ImportError:
        raise ValueError(
            f"to_anndata needs anndata, which is not installed: {extras.install('anndata')}"
        ) from None
    row = np.arange(bags.n_instances) - bags.offsets[:-1][bags.bag_index]
    slide = bags.names[bags.bag_index]
    obs: dict[str, Any] = {"slide": _category(slide), "label": bags.labels[bags.bag_index]}
    if bags.groups is not None:
        obs["patient"] = _category(bags.groups[bags.bag_index].astype(str))
    obs["instance_label"] = bags.instance_labels
    # plain objects: anndata writes no strings of Arrow, which pandas 3 would make of them
    index = pd.Index([f"{name}-{k}" for name, k in zip(slide, row)], dtype=object)
    columns = pd.Index([f"feature_{k}" for k in range(bags.n_features)], dtype=object)
    made = anndata.AnnData(
        np.asarray(bags.features), pd.DataFrame(obs, index), pd.DataFrame(index=columns)
    )
    if bags.coords is not None:
        made.obsm[SPATIAL] = np.asarray(bags.coords)
    if bags.adjacency.nnz:
        made.obsp["spatial_connectivities"] = bags.adjacency
    if bags.facts:
        made.uns[FACTS] = dict(bags.facts)
    return made


def _category(words: np.ndarray) -> pd.Categorical:
    names, codes = np.unique(words.astype(str), return_inverse=True)
    return pd.Categorical.from_codes(codes, pd.Index(names.astype(object), dtype=object))


def _add(bags: Any, predictions: Any, into: Any) -> None:
    """Predictions in the obs of the tables that the bags were made of."""
    tables = gather(into, None if isinstance(into, Mapping) else _naming(bags, into))
    rows = Table(tables.obs, tables.slide)
    if rows.names.tolist() != bags.names.tolist() or (rows.offsets != bags.offsets).any():
        raise ValueError(
            f"into: expected the {len(bags)} slides and {bags.n_instances} rows that the bags were "
            f"made of, found {len(rows.names)} and {len(rows.order)}, or others"
        )
    if not tables.alone:
        _add_columns(bags, predictions, into.obs, rows.order)
        return
    found = pd.DataFrame(index=np.arange(bags.n_instances))
    _add_columns(bags, predictions, found, rows.order)
    for part, own in zip(tables.parts, bags.split(found)):
        for name in own:
            part.obs[name] = own[name].to_numpy()


def _naming(bags: Any, into: Any) -> str | None:
    """The column of `obs` whose values are the names of the bags; None where there is none."""
    _require_table(into)
    names = set(bags.names.tolist())
    return next((str(c) for c in into.obs if set(into.obs[c].astype(str)) == names), None)


def _add_columns(bags: Any, predictions: Any, obs: pd.DataFrame, order: np.ndarray) -> None:
    """Predictions of patches, and of their slide, as columns; row `order[i]` is patch i of bags."""
    if predictions is None:
        return
    found = {}
    patches = getattr(predictions, "instances", predictions)
    if patches is not None:
        frame = patches if isinstance(patches, pd.DataFrame) else patches.to_frame()
        found = {name: frame[name].to_numpy() for name in frame if name not in ("bag", *"xyz")}
    if hasattr(predictions, "proba"):
        found["slide_probability"] = predictions.proba[:, 1][bags.bag_index]
    for name, values in found.items():
        if len(values) != len(order):
            raise ValueError(
                f"predictions: expected one per patch, {len(order)}, found {len(values)}"
            )
        placed = np.empty(len(order), dtype=values.dtype)
        placed[order] = values
        obs[PREFIX + name] = placed
