"""A plain table, csv, xlsx or parquet, with one row per patch.

    slide,label,patient,split,x,y,feature_0,feature_1,...
    s1,1,p1,train,0,0,0.31,1.70,...

Columns are known by their names where they are not given, and what was guessed is logged.
"""

import logging
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from gpmil.data import classes
from gpmil.data.bags import Bags
from gpmil.data.checks import all_columns, count, listed
from gpmil.data.frames import Table
from gpmil.io.table_files import header_of, read_frame

logger = logging.getLogger("gpmil")

# Names that a column may have, likeliest first, as `folded` leaves them.
GUESSES = {
    "slide": ("slide", "slideid", "slidename", "wsi", "wsiid", "bag", "bagid", "bagname", "image"),
    "label": ("label", "slidelabel", "baglabel", "ybag", "target", "class", "ytrue"),
    "patient": (
        "patient",
        "patientid",
        "patientname",
        "patientbarcode",
        "bcrpatientbarcode",
        "case",
        "caseid",
        "casesubmitterid",
        "subject",
        "subjectid",
        "group",
    ),
    "instance_label": ("instancelabel", "patchlabel", "tilelabel", "yinst"),
}
POSITIONS = (("x", "y"), ("coord_x", "coord_y"), ("x_coord", "y_coord"), ("xini", "yini"))

LARGEST = 2**64  # whole numbers from here on are read as Python's, not as a column of numbers
LONG = 40  # characters of a value in a message

ColumnName = str | bool | None


def read(
    path: str | os.PathLike,
    slide: str | None = None,
    label: ColumnName = None,
    features: str | Sequence[str] | None = None,
    coords: str | Sequence[str] | None = ("x", "y"),
    split: str | None = "split",
    patient: ColumnName = None,
    instance_label: ColumnName = None,
    step: Any = None,
    graph: str | None = "grid4",
    positive: Any = None,
    negative: Any = None,
    exclude: Any = None,
) -> dict[str, Bags]:
    """Cohorts from a table with one row per patch: one per value of its split column, else {"all"}.

    Parameters
    ----------
    path : csv, tsv (gzipped or not), xlsx (which needs openpyxl) or parquet (pyarrow)
    slide, label, patient, instance_label : column names
        None: guessed by name. False: there is none (of all but `slide`). Label, patient and
        split must be constant in a slide. A missing label is an unlabelled slide, a missing
        instance label an unknown one; anything else missing is an error.
    features : list of columns, or the beginning of their names
        None: the most columns numbered alike (feature_0, feature_1, ...); without such, all
        columns of numbers not named otherwise.
    coords : column names, or None
        The default pair may be absent or have another usual name.
    split : column name, or None
        The default may be absent.
    step, graph, positive, negative, exclude
        As in `Bags.from_frame`.
    """
    names = {"slide": slide, "label": label, "patient": patient, "instance_label": instance_label}
    said = {"positive": positive, "negative": negative, "exclude": exclude}
    found = whole(Path(path), names, said, step, graph, features, coords, split)
    return by_split(Path(path), found)


class WholeCohort(NamedTuple):
    """What one file holds: all slides, the split of each if the file says it, notes on labels."""

    bags: Bags
    split: np.ndarray | None
    notes: tuple[str, ...]


def by_split(path: Path, found: WholeCohort) -> dict[str, Bags]:
    """The cohorts by split, {"all"} where there is none; the notes are logged."""
    for note in found.notes:
        logger.warning("%s: %s", path.name, note)
    if found.split is None:
        return {"all": found.bags}
    split = np.array([str(value) for value in found.split])
    return {value: found.bags[split == value] for value in dict.fromkeys(split.tolist())}


def whole(
    path: Path,
    names: Mapping[str, ColumnName],
    said: Mapping[str, Any],
    step: Any,
    graph: str | None,
    features: str | Sequence[str] | None = None,
    coords: str | Sequence[str] | None = ("x", "y"),
    split: str | None = None,
) -> WholeCohort:
    """All slides as one cohort; `said` are options of `classes.encode`."""
    header = header_of(path)
    slide, known = _known_columns(names, header, path)
    axes = _axes(coords, header, path)
    parts = _split_column(split, header, path)
    text = [c for c in (slide, known["patient"], parts) if c is not None]
    df = read_frame(path, text)
    _require_values(df, text, path)
    used = [c for c in (*known.values(), parts, *axes) if c is not None]
    columns = _feature_columns(df, features, used, path)
    _mention(path, known | {"split": parts}, axes, columns, set(df) - {*used, *columns})
    numbers(df, [*axes, *columns], path)
    try:
        bags = Bags.from_frame(
            df,
            bag=slide,
            label=None,
            features=columns,
            coords=axes or None,
            group=known["patient"],
            instance_label=known["instance_label"],
            step=step,
            graph=graph,
        )
        table = Table(df, slide)
        of = table.constant(parts, "split")
        values = table.constant(known["label"], "label")
        found = None if values is None else classes.encode(values, **said)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    if found is None:
        return WholeCohort(bags, of, ())
    return WholeCohort(bags.with_labels(found), of, found.notes)


# ------------------------------------------------------------------ columns


def _known_columns(
    names: Mapping[str, ColumnName], header: list[str], path: Path
) -> tuple[str, dict[str, str | None]]:
    """The column of the slide, which must be there, and all of `GUESSES`, given or guessed."""
    found = {
        what: find_column(what, names.get(what), header, path, usual)
        for what, usual in GUESSES.items()
    }
    slide = found["slide"]
    if slide is None:
        raise ValueError(
            f"{path}: expected a column that names the slide, such as 'slide'; found "
            f"{all_columns(header)}. Say which one with slide=."
        )
    return slide, found


def find_column(
    what: str, given: ColumnName, header: list[str], where: Path | str, usual: Sequence[str]
) -> str | None:
    """The column that is meant: the one given, else the first with a usual name; False: none."""
    if isinstance(given, str):
        return require([given], header, where, what)[0]
    if given is not None and given is not False:
        raise ValueError(f"{what} must be the name of a column, None or False, got {given!r}.")
    return None if given is False else like(usual, header)


def folded(column: str) -> str:
    """A column's name without capitals, blanks, underscores, hyphens and dots.

    >>> folded("Slide Filename"), folded("case.submitter_id"), folded("PatientID")
    ('slidefilename', 'casesubmitterid', 'patientid')
    """
    return re.sub(r"[\s_.\-]+", "", column).casefold()


def like(guesses: Sequence[str], header: list[str]) -> str | None:
    """The first column with one of the names, as `folded` has them."""
    there = {folded(column): column for column in reversed(header)}
    return next((there[folded(g)] for g in guesses if folded(g) in there), None)


def require(columns: Sequence[str], header: list[str], path: Path | str, what: str) -> list[str]:
    """The columns, if the header has them; else a ValueError says which it has."""
    missing = [c for c in columns if c not in header]
    if missing:
        raise ValueError(
            f"{path}: {what}: there is no column {listed(missing)}; the columns are "
            f"{all_columns(header)}."
        )
    return list(columns)


def _axes(coords: str | Sequence[str] | None, header: list[str], path: Path) -> list[str]:
    if coords is None:
        return []
    axes = [coords] if isinstance(coords, str) else list(coords)
    if axes != ["x", "y"]:
        return require(axes, header, path, "coords")
    for pair in POSITIONS:
        found = [like([axis], header) for axis in pair]
        there = [axis for axis in found if axis is not None]
        if len(there) == 1:
            raise ValueError(
                f"{path}: column {there[0]!r} has no partner: expected {pair}. Name the columns "
                "of the positions with coords=, or say coords=None."
            )
        if there:
            return there
    return []


def _split_column(split: str | None, header: list[str], path: Path) -> str | None:
    if split == "split":
        return like([split], header)
    return None if split is None else require([split], header, path, "split")[0]


def _feature_columns(
    df: pd.DataFrame, features: str | Sequence[str] | None, used: list[str], path: Path
) -> list[str]:
    free = [c for c in df.columns if c not in used and not c.startswith("Unnamed:")]
    if features is None:
        numeric = [c for c in free if pd.api.types.is_numeric_dtype(df[c])]
        columns = _numbered(free, set(numeric)) or numeric
    elif isinstance(features, str):
        columns = [c for c in free if c.startswith(features)]
    else:
        columns = require(features, list(df.columns), path, "features")
    if not columns:
        what = "columns of numbers" if features is None else f"columns {features!r}..."
        raise ValueError(
            f"{path}: features: expected {what}, found none among {all_columns(df.columns)}. Name "
            "them, or the beginning of their names, with features=."
        )
    return columns


def _numbered(columns: list[str], numeric: set[str]) -> list[str]:
    """The largest set of columns that differ by a number only, in its order; mostly numbers."""
    groups: dict[str, list[tuple[int, str]]] = {}
    for column in columns:
        found = re.fullmatch(r"(.*?)(\d+)", column)
        if found:
            groups.setdefault(found[1], []).append((int(found[2]), column))
    sets = [[c for _, c in sorted(group)] for group in groups.values() if len(group) > 1]
    # Not all of them: a single word in a column makes it one of text, and that is to be said.
    sets = [group for group in sets if 2 * len(numeric.intersection(group)) >= len(group)]
    return max(sets, key=len, default=[])


def _mention(
    path: Path, names: dict[str, str | None], axes: list[str], features: list[str], others: set[str]
) -> None:
    known = {what: "none" if c is None else repr(c) for what, c in names.items()}
    logger.warning(
        "%s: columns read as slide %s, label %s, patient %s, instance label %s, split %s, "
        "positions %s, features %s (%s), %d not used",
        path.name,
        *(known[k] for k in ("slide", "label", "patient", "instance_label", "split")),
        " and ".join(repr(a) for a in axes) or "none",
        repr(features[0]) if len(features) == 1 else f"{features[0]!r} to {features[-1]!r}",
        count(len(features), "column"),
        len(others),
    )


# ------------------------------------------------------------------ values


def numbers(df: pd.DataFrame, columns: Sequence[str], path: Path) -> np.ndarray:
    """Columns as an array of finite numbers; a ValueError says where something else stands."""
    for column in columns:
        if not pd.api.types.is_numeric_dtype(df[column]):
            row = next((k for k, value in enumerate(df[column]) if not _is_number(value)), 0)
            found = repr(df[column].iloc[row])
            raise ValueError(
                f"{path}: expected a number, found {found[:LONG]}{'...' * (len(found) > LONG)} "
                f"{_place(row, column)}."
            )
    part = df[list(columns)]
    with np.errstate(invalid="ignore"):  # of values that are no numbers, which are named below
        values = part.to_numpy(np.result_type(np.float32, *part.dtypes.map(_numpy_type)))
    bad = ~np.isfinite(values)
    if bad.any():
        row, k = (int(i) for i in np.argwhere(bad)[0])
        raise ValueError(
            f"{path}: {count(int(bad.sum()), 'value')} missing or infinite, the first "
            f"{_place(row, columns[k])}. Remove those rows, or compute their features again."
        )
    return values


def _is_number(value: Any) -> bool:
    """Whether a column of such values alone would have been read as one of numbers.

    >>> _is_number("0.5"), _is_number("5 cells"), _is_number("9" * 400)
    (True, False, False)
    """
    try:
        return bool(abs(pd.to_numeric(value)) < LARGEST)
    except (TypeError, ValueError, OverflowError):
        return False


def _numpy_type(dtype: Any) -> np.dtype:
    """The type of a column as numpy knows it; columns that may be missing are float64."""
    return dtype if isinstance(dtype, np.dtype) and dtype.kind == "f" else np.dtype(np.float64)


def _require_values(df: pd.DataFrame, columns: Sequence[str], path: Path) -> None:
    for column in columns:
        missing = np.flatnonzero(df[column].isna())
        if len(missing):
            raise ValueError(
                f"{path}: {count(len(missing), 'value')} missing, the first "
                f"{_place(int(missing[0]), column)}. Every row needs one."
            )


def _place(row: int, column: str) -> str:
    return f"in row {row + 1} (the first below the header is 1), column {column!r}"
