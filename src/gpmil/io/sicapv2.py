"""The SICAPv2 feature tables that Schmidt et al. publish (attention_gp).

    Train.csv, Val.csv, Test.csv   one row per patch: feature_0, ..., instance_name, instance_label,
                                   bag_name, bag_label_primary, bag_label_secondary
    wsi_labels.csv                 slide_id, patient_id, Gleason_primary, Gleason_secondary

A patch is named <slide>_Block_Region_<region>_<row>_<col>_xini_<x>_yini_<y>.jpg. Positions are
pixels of the whole slide with a stride of 1024 inside a region; the lattices of two regions of a
slide are shifted against each other and may overlap, so that neighbours are sought inside a
region only. Some tables list malignant patches twice, labelled and unlabelled.
"""

import logging
import os
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pandas as pd

from gpmil.data import graphs
from gpmil.data.bags import Bags
from gpmil.data.checks import UNKNOWN, count, listed, offsets_of
from gpmil.io.table_files import read_frame
from gpmil.io.tables import numbers

logger = logging.getLogger("gpmil")

FILES = {"train": "Train.csv", "val": "Val.csv", "test": "Test.csv"}
SLIDES = "wsi_labels.csv"
STEP = 1024.0
NAME = (
    r"(?:^|[/\\])(?P<slide>[^/\\]+?)_Block_Region_(?P<region>\d+)_(?P<row>\d+)_(?P<col>\d+)"
    r"_xini_(?P<x>-?\d+)_yini_(?P<y>-?\d+)\.\w+$"
)
# Patch labels: non-cancerous, Gleason 3, 4, 5, unlabelled.
PATCH_LABELS = {0: 0, 1: 1, 2: 1, 3: 1, 4: UNKNOWN}


def read(folder: str | os.PathLike) -> dict[str, Bags]:
    """The cohorts "train", "val" and "test" of a folder, those that are there.

    A slide is positive if it has a Gleason grade; groups are patients. Where Val.csv holds the
    slides of Test.csv, as in the published folds, "val" is left out: nothing may be tuned on it.
    """
    patches, slides = _tables(Path(folder))
    return {split: _cohort(table, slides, Path(folder)) for split, table in patches.items()}


def whole(folder: str | os.PathLike) -> Bags:
    """The slides of all splits as one cohort."""
    patches, slides = _tables(Path(folder))
    return _cohort(pd.concat(patches.values(), ignore_index=True), slides, Path(folder))


def _tables(folder: Path) -> tuple[dict[str, pd.DataFrame], pd.DataFrame]:
    """Patches by split, and the slides of all."""
    there = {split: folder / name for split, name in FILES.items() if (folder / name).is_file()}
    if not there:
        raise ValueError(
            f"{folder}: expected {', '.join(FILES.values())} (at least one), found none of them."
        )
    patches = _without_repeated_slides({k: _patches(path) for k, path in there.items()}, folder)
    _require_same_features(patches, folder)
    slides = _slides(folder, patches)
    _mention_shared_patients(patches, slides, folder)
    return patches, slides


# ------------------------------------------------------------------ patches


def _patches(path: Path) -> pd.DataFrame:
    """One row per patch: slide, region, x, y, label, and the features in one column of rows."""
    df = read_frame(path, ("instance_name", "bag_name"))
    features = sorted(
        (c for c in df.columns if c.startswith("feature_") and c[8:].isdigit()),
        key=lambda c: int(c[8:]),
    )
    if "instance_name" not in df or not features:
        raise ValueError(
            f"{path}: expected columns instance_name and feature_0, feature_1, ...; found "
            f"{listed(df.columns)}."
        )
    table = _places(df, path)
    table["label"] = _patch_labels(df, path)
    table["grade"] = _grades(df, path, "bag_label_primary", "bag_label_secondary")
    with np.errstate(over="ignore"):
        x = numbers(df, features, path).astype(np.float32)
    if not np.isfinite(x).all():
        raise ValueError(f"{path}: features: found values too large for float32, beyond 3e38.")
    return pd.concat([_once(table, path), pd.DataFrame(x, columns=features)], axis=1, join="inner")


def _places(df: pd.DataFrame, path: Path) -> pd.DataFrame:
    """Slide, region and position that the names of the patches tell."""
    found = df["instance_name"].fillna("").str.extract(NAME)
    bad = np.flatnonzero(found["slide"].isna())
    if len(bad):
        raise ValueError(
            f"{path}: {count(len(bad), 'patch name')} not of the form <slide>_Block_Region_<region>"
            f"_<row>_<col>_xini_<x>_yini_<y>.jpg, the first in row {bad[0] + 1}: "
            f"{df['instance_name'].iloc[bad[0]]!r}."
        )
    if "bag_name" in df:
        odd = np.flatnonzero((df["bag_name"] != found["slide"]).to_numpy())
        if len(odd):
            raise ValueError(
                f"{path}: row {odd[0] + 1} is of slide {df['bag_name'].iloc[odd[0]]!r} by bag_name "
                f"and of {found['slide'].iloc[odd[0]]!r} by instance_name."
            )
    try:
        return found.astype({"region": int, "row": int, "col": int, "x": float, "y": float})
    except (ValueError, OverflowError) as error:
        raise ValueError(
            f"{path}: the name of a patch has a number that is too long: {str(error)[:100]}."
        ) from error


def _patch_labels(df: pd.DataFrame, path: Path) -> np.ndarray:
    if "instance_label" not in df:
        logger.warning("%s: no column instance_label, patch labels are unknown", path.name)
        return np.full(len(df), UNKNOWN)
    raw = numbers(df, ["instance_label"], path)[:, 0]
    if not np.isin(raw, list(PATCH_LABELS)).all():
        raise ValueError(
            f"{path}: instance_label: expected 0 (non-cancerous), 1, 2, 3 (Gleason 3, 4, 5) or 4 "
            f"(unlabelled), found {listed(np.unique(raw).tolist())}."
        )
    return np.array([PATCH_LABELS[int(v)] for v in raw])


def _grades(df: pd.DataFrame, path: Path, *columns: str) -> np.ndarray:
    """1 where one of the Gleason columns is not zero, 0 where none is; -1 without the columns."""
    there = [c for c in columns if c in df]
    if not there:
        return np.full(len(df), UNKNOWN)
    return (numbers(df, there, path) > 0).any(axis=1).astype(int)


def _once(table: pd.DataFrame, path: Path) -> pd.DataFrame:
    """Each patch once, with its label where one of its rows has it; the index is the row."""
    place = ["slide", "region", "x", "y"]
    known = table[table["label"] != UNKNOWN]
    torn = known.groupby(place)["label"].nunique() > 1
    if torn.any():
        slide, region, x, y = torn.index[int(np.argmax(torn))]
        raise ValueError(
            f"{path}: {count(int(torn.sum()), 'patch')} labelled both benign and malignant, the "
            f"first of slide {slide!r}, region {region}, at ({x:g}, {y:g})."
        )
    # Labelled rows first; the sort is stable.
    by_label = table.sort_values("label", key=lambda v: v == UNKNOWN, kind="stable")
    kept = by_label.drop_duplicates(place).sort_index()
    if len(kept) < len(table):
        logger.warning(
            "%s: %s listed again left out of %s (labelled rows are kept)",
            path.name, count(len(table) - len(kept), "patch"), count(len(table), "row"),
        )  # fmt: skip
    return kept


# ------------------------------------------------------------------ slides


def _without_repeated_slides(
    patches: dict[str, pd.DataFrame], folder: Path
) -> dict[str, pd.DataFrame]:
    own = {split: set(table["slide"]) for split, table in patches.items()}
    if "test" in own and own.get("val") == own["test"]:
        logger.warning(
            "%s: Val.csv holds the slides of Test.csv and is left out", folder.name or folder
        )
        del patches["val"], own["val"]
    splits = list(own)
    for k, a in enumerate(splits):
        for b in splits[k + 1 :]:
            both = sorted(own[a] & own[b])
            if both:
                raise ValueError(
                    f"{folder}: {count(len(both), 'slide')} in both {FILES[a]} and {FILES[b]}: "
                    f"{listed(both)}. A slide belongs to one split."
                )
    return patches


def _require_same_features(patches: Mapping[str, pd.DataFrame], folder: Path) -> None:
    own = {FILES[split]: _features(table) for split, table in patches.items()}
    (first, columns), *others = own.items()
    for file, found in others:
        if found != columns:
            odd = sorted(set(columns) ^ set(found))
            raise ValueError(
                f"{folder}: {count(len(columns), 'feature')} in {first}, {len(found)} in {file}; "
                f"only one of them has {listed(odd)}."
            )


def _features(table: pd.DataFrame) -> list[str]:
    return [c for c in table.columns if c.startswith("feature_")]


def _slides(folder: Path, patches: Mapping[str, pd.DataFrame]) -> pd.DataFrame:
    """Label and patient of every slide, by its name."""
    rows = pd.concat([table[["slide", "grade"]] for table in patches.values()]).drop_duplicates()
    twice = rows["slide"][rows["slide"].duplicated()]
    if len(twice):
        raise ValueError(f"{folder}: slides with and without a Gleason grade: {listed(twice)}.")
    own = rows.set_index("slide")["grade"]
    path = folder / SLIDES
    if not path.is_file():
        if (own == UNKNOWN).any():
            raise ValueError(
                f"{folder}: expected {SLIDES} or columns bag_label_primary, bag_label_secondary; "
                "found neither: the slides have no labels."
            )
        logger.warning("%s: no %s, patients are unknown", folder.name or folder, SLIDES)
        return pd.DataFrame({"label": own})
    listed_slides = _slide_table(path)
    missing = sorted(set(own.index) - set(listed_slides.index))
    if missing:
        raise ValueError(
            f"{path}: {count(len(missing), 'slide')} of the feature tables not listed: "
            f"{listed(missing)}."
        )
    slides = listed_slides.loc[own.index]
    odd = own.index[(own != UNKNOWN) & (own != slides["label"])]
    if len(odd):
        raise ValueError(f"{path} and the feature tables differ on the label of {listed(odd)}.")
    return slides


def _slide_table(path: Path) -> pd.DataFrame:
    df = read_frame(path, ("slide_id", "slide", "patient_id"))
    name = next((c for c in ("slide_id", "slide") if c in df), None)
    label = _grades(df, path, "Gleason_primary", "Gleason_secondary")
    if (label == UNKNOWN).all():
        label = _grades(df, path, "P")  # the binary tables
    if name is None or (label == UNKNOWN).any():
        raise ValueError(
            f"{path}: expected columns slide_id and Gleason_primary, Gleason_secondary (or slide "
            f"and P); found {listed(df.columns)}."
        )
    if df[name].duplicated().any() or df[name].isna().any():
        raise ValueError(
            f"{path}: expected every slide once, found {listed(df[name][df[name].duplicated()])} "
            "again, or rows without a name."
        )
    slides = pd.DataFrame({"label": label}, index=df[name])
    if "patient_id" in df:
        if df["patient_id"].isna().any():
            raise ValueError(f"{path}: expected a patient_id in every row, found rows without one.")
        slides["patient"] = df["patient_id"].to_numpy()
    return slides


def _mention_shared_patients(
    patches: Mapping[str, pd.DataFrame], slides: pd.DataFrame, folder: Path
) -> None:
    if "patient" not in slides:
        return
    seen = pd.Series(
        {split: set(slides["patient"][table["slide"].unique()]) for split, table in patches.items()}
    )
    everyone = [patient for patients in seen for patient in patients]
    shared = sorted({str(p) for p in everyone if everyone.count(p) > 1})
    if shared:
        logger.warning(
            "%s: %s in more than one split: %s",
            folder.name or folder, count(len(shared), "patient"), listed(shared),
        )  # fmt: skip


def _cohort(table: pd.DataFrame, slides: pd.DataFrame, folder: Path) -> Bags:
    """Slides in the order of the table, their patches by region."""
    try:
        return _bags(table, slides)
    except ValueError as error:
        raise ValueError(f"{folder}: {error}") from error


def _bags(table: pd.DataFrame, slides: pd.DataFrame) -> Bags:
    code, names = pd.factorize(table["slide"])
    order = np.lexsort((table["region"], code))
    code, table = code[order], table.iloc[order]
    coords = table[["x", "y"]].to_numpy()
    # A region is to the graph what a bag is elsewhere: no edge leaves it.
    begins = np.diff(code, prepend=-1) | np.diff(table["region"], prepend=-1)
    regions = np.append(np.flatnonzero(begins), len(table))
    own = slides.loc[names]
    return Bags(
        table[_features(table)].to_numpy(),
        offsets_of(np.bincount(code)),
        labels=own["label"].to_numpy(),
        names=np.array(names, dtype=str),
        groups=own["patient"].to_numpy() if "patient" in own else None,
        coords=coords,
        instance_labels=table["label"].to_numpy(),
        adjacency=graphs.adjacency_from_coords(coords, regions, "grid4", STEP),
        step=STEP,
        graph="grid4",
    )
