"""Labels of slides from a table of their own, joined to feature files by name.

    slide_id,case_id,label
    s1.svs,p1,tumour

The names are compared without folders and without the endings of slide and feature files.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
import pandas as pd

from gpmil.bag_checks import count, listed
from gpmil.io.tables import GUESSES, like, read_frame, require

SLIDE_NAMES = (*GUESSES["slide"], "filename", "file", "file_name", "image_id", "slide_path")
SLIDES = (".svs", ".ndpi", ".tif", ".tiff", ".ome", ".mrxs", ".scn", ".vms", ".vmu", ".bif")
ENDINGS = (
    *SLIDES,
    ".czi",
    ".dcm",
    ".qptiff",
    ".isyntax",
    ".svslide",
    ".h5",
    ".hdf5",
    ".pt",
    ".npy",
)


@dataclass(frozen=True)
class Joined:
    """Labels and patients in the order of the slides, and what did not fit together."""

    labels: list[Any]  # 0, 1, -1; or words, with `positive`
    positive: str | None
    groups: list[str] | None
    matched: int
    labels_without_slide: tuple[str, ...]
    slides_without_label: tuple[str, ...]
    duplicates: tuple[str, ...]
    notes: tuple[str, ...]


def key(name: Any) -> str:
    """A name as it is compared: the last part of a path, without known endings.

    >>> key("slides/TCGA-A1.B34C.svs"), key("a.ome.tiff"), key("s1.h5")
    ('TCGA-A1.B34C', 'a', 's1')
    """
    stem = PurePosixPath(str(name).strip().replace("\\", "/")).name
    while stem.casefold().endswith(ENDINGS):
        stem = stem[: stem.rindex(".")]
    return stem


def join(
    names: Sequence[str],
    labels: str | os.PathLike | pd.DataFrame,
    slide: str | None = None,
    label: str | None = None,
    patient: str | bool | None = None,
    positive: Any = None,
) -> Joined:
    """The label and the patient of every slide in `names`; -1 for those the table has not."""
    where, df, columns = _table(labels, slide, label, patient)
    rows, duplicates = _one_row_a_slide(df, columns, where)
    keys = [key(name) for name in names]
    there = set(keys)
    classes = rows["label"].reindex(keys)
    values, positive = encode(classes, positive, where)
    unlabelled = [name for name, value in zip(names, classes.isna()) if value]
    if len(unlabelled) == len(names):
        raise ValueError(
            f"{where}: no slide has a label. The slides are called {listed(names)}, column "
            f"{columns['slide']!r} has {listed(rows.index)}. Name another column with slide=."
        )
    return Joined(
        labels=values,
        positive=positive,
        groups=_groups(rows, keys, names),
        matched=len(names) - len(unlabelled),
        labels_without_slide=tuple(k for k in rows.index if k not in there),
        slides_without_label=tuple(unlabelled),
        duplicates=duplicates,
        notes=_notes(where, columns, (slide, label, patient), rows, keys),
    )


# ------------------------------------------------------------------ the table


def _table(
    labels: str | os.PathLike | pd.DataFrame,
    slide: str | None,
    label: str | None,
    patient: str | bool | None,
) -> tuple[str, pd.DataFrame, dict[str, str | None]]:
    """What to call it in messages, the table, and its columns."""
    if isinstance(labels, pd.DataFrame):
        where, df = "labels", labels
    elif isinstance(labels, (str, os.PathLike)):
        path = Path(labels)
        where = str(path)
        df = read_frame(path, rows="slide", dtype=str)
    else:
        raise ValueError(
            "labels: expected the path of a table or a pandas DataFrame, found "
            f"{type(labels).__name__}."
        )
    header = [str(c) for c in df.columns]
    found = {
        "slide": _column(slide, SLIDE_NAMES, header, where, "slide"),
        "label": _column(label, GUESSES["label"], header, where, "label"),
        "patient": _column(patient, GUESSES["patient"], header, where, "patient"),
    }
    for what in ("slide", "label"):
        if found[what] is None:
            raise ValueError(
                f"{where}: expected a column with the {what}, such as {GUESSES[what][0]!r}; found "
                f"{listed(header)}. Say which one with {what}=."
            )
    df = df.set_axis(header, axis=1)
    return where, df, found


def _column(
    given: str | bool | None, usual: Sequence[str], header: list[str], where: str, what: str
) -> str | None:
    """The column given, or guessed by its name; False: there is none."""
    if isinstance(given, str):
        return require([given], header, where, what)[0]
    if given is not None and given is not False:
        raise ValueError(f"{what} must be the name of a column, None or False, got {given!r}.")
    return None if given is False else like(usual, header)


def _one_row_a_slide(
    df: pd.DataFrame, columns: dict[str, str | None], where: str
) -> tuple[pd.DataFrame, tuple[str, ...]]:
    """Label and patient by slide, and the slides with several rows; rows must agree."""
    named = df[df[columns["slide"]].notna()]
    rows = pd.DataFrame(
        {what: named[c].map(_text) for what, c in columns.items() if c and what != "slide"}
    ).set_axis([key(name) for name in named[columns["slide"]].map(_text)])
    # A row without a value does not contradict one with it.
    for what in rows:
        kinds = rows[what].dropna().groupby(level=0).nunique()
        torn = kinds.index[kinds > 1]
        if len(torn):
            raise ValueError(
                f"{where}: {count(len(torn), 'slide')} with different values in column "
                f"{columns[what]!r}: {listed(torn)}, the first with "
                f"{listed(rows[what][torn[0]].dropna())}. Keep one row a slide."
            )
    duplicates = tuple(rows.index[rows.index.duplicated()].unique())
    return rows.groupby(level=0, sort=False).first(), duplicates


def _text(value: Any) -> str | None:
    """A value as text, 1.0 and True as "1"; None where it is missing."""
    if pd.isna(value) or str(value).strip() == "":
        return None
    if isinstance(value, (bool, np.bool_)):
        return str(int(value))
    if isinstance(value, (float, np.floating)) and float(value).is_integer():
        return str(int(value))
    text = str(value).strip()
    return {"1.0": "1", "0.0": "0", "-1.0": "-1"}.get(text, text)


def _groups(rows: pd.DataFrame, keys: list[str], names: Sequence[str]) -> list[str] | None:
    """The patients; a slide without one is a patient of its own."""
    if "patient" not in rows:
        return None
    own = rows["patient"].reindex(keys)
    return [name if pd.isna(p) else str(p) for p, name in zip(own, names)]


def _notes(
    where: str,
    columns: dict[str, str | None],
    given: tuple[str | bool | None, ...],
    rows: pd.DataFrame,
    keys: list[str],
) -> tuple[str, ...]:
    guessed = [
        f"{what} is column {column!r}"
        for (what, column), said in zip(columns.items(), given)
        if said is None and column is not None
    ]
    notes = [f"{Path(where).name}: guessed by name that {', '.join(guessed)}."] if guessed else []
    if "patient" in rows:
        alone = int(rows["patient"].reindex(keys).isna().sum())
        if alone:
            notes.append(
                f"{count(alone, 'slide')} without a patient: each is taken as one of its own."
            )
    return tuple(notes)


# ------------------------------------------------------------------ the classes


def encode(values: pd.Series, positive: Any, where: str) -> tuple[list[Any], str | None]:
    """Labels as `Bags` takes them: 0, 1 and -1, or two words and None with the positive one."""
    texts = [_text(value) for value in values]
    classes = sorted({text for text in texts if text is not None})
    if positive is None:
        if not set(classes) <= {"0", "1", "-1"}:
            raise ValueError(
                f"{where}: labels: expected 0 and 1 (-1 or empty: unlabelled), found "
                f"{count(len(classes), 'class').replace('classs', 'classes')}: {listed(classes)}. "
                f"Say which one is positive, as in positive={classes[-1]!r}; all others are then "
                "negative."
            )
        return [-1 if text is None else int(text) for text in texts], None
    word = str(_text(positive))
    if classes and word not in classes:
        raise ValueError(
            f"{where}: labels: positive={positive!r} is not among the classes found, "
            f"{listed(classes)}."
        )
    if set(classes) == {"-1", "0", "1"}:
        texts = [None if text == "-1" else text for text in texts]
        classes.remove("-1")
    others = [c for c in classes if c != word]
    rest = others[0] if len(others) == 1 else f"not {word}"
    return [None if t is None else word if t == word else rest for t in texts], word
