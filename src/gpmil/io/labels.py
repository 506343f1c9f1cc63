"""Labels of slides from a table of their own, joined to feature files by name.

    slide_id,case_id,label
    s1.svs,p1,tumour

The names are compared without folders and without the endings of slide and feature files.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, TypeAlias

import pandas as pd

from gpmil.data import classes
from gpmil.data.checks import all_columns, count, listed
from gpmil.data.classes import Labels
from gpmil.io.table_files import read_frame
from gpmil.io.tables import GUESSES, find_column, like

SLIDE_NAMES = (
    *GUESSES["slide"],
    *("slidefilename", "slidefile", "slidepath", "wsiname", "wsifilename"),
    *("filename", "file", "imageid", "imagename", "imagefilename", "filepath"),
)
TableLike: TypeAlias = str | os.PathLike | pd.DataFrame
# What may be said of a table of labels: parameters of `join`.
LABEL_OPTIONS = ("slide", "label", "patient", "positive", "negative", "exclude", "slide_table")
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
class JoinedLabels:
    """Labels and patients in the order of the slides, and what did not fit together."""

    labels: Labels
    groups: list[str] | None = None
    matched: int = 0
    labels_without_slide: tuple[str, ...] = ()
    slides_without_label: tuple[str, ...] = ()
    duplicates: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


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
    labels: TableLike,
    slide: str | None = None,
    label: str | None = None,
    patient: str | bool | None = None,
    slide_table: TableLike | None = None,
    **words: Any,
) -> JoinedLabels:
    """The label and the patient of every slide in `names`; -1 for those the table has not.

    With `slide_table`, which has the patient of every slide, `labels` has one row per patient.
    `words` say which classes are positive, negative and excluded.
    """
    where, df, of_pair = read_table(labels, slide_table, slide, patient)
    columns = _columns(df, where, slide, label, patient, of_pair)
    rows, duplicates = _one_row_per_slide(df, columns, where)
    keys = [key(name) for name in names]
    there = set(keys)
    values = rows["label"].reindex(keys)
    unlabelled = [name for name, missing in zip(names, values.isna()) if missing]
    if len(unlabelled) == len(names):
        raise ValueError(
            f"{where}: no slide has a label. The slides are called {listed(names)}, column "
            f"{columns['slide']!r} has {listed(rows.index)}. Name another column with slide=."
        )
    try:
        found = classes.encode(values, **words)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from error
    return JoinedLabels(
        labels=found,
        groups=_groups(rows, keys, names),
        matched=len(names) - len(unlabelled),
        labels_without_slide=tuple(k for k in rows.index if k not in there),
        slides_without_label=tuple(unlabelled),
        duplicates=duplicates,
        notes=(*_notes(where, columns, (slide, label, patient), rows, keys), *found.notes),
    )


def written(
    names: Sequence[str] | None,
    labels: TableLike,
    slide: str | None = None,
    label: str | None = None,
    patient: str | bool | None = None,
    slide_table: TableLike | None = None,
) -> list[str | None]:
    """The label of every slide in `names` (of all without them) as it is written in the table."""
    where, df, of_pair = read_table(labels, slide_table, slide, patient)
    columns = _columns(df, where, slide, label, patient, of_pair)
    rows, _ = _one_row_per_slide(df, columns, where)
    values = rows["label"]
    if names is not None:
        values = values.reindex([key(name) for name in names])
    return [None if pd.isna(value) else str(value) for value in values]


# ------------------------------------------------------------------ the table


def read_table(
    labels: TableLike,
    slide_table: TableLike | None = None,
    slide: str | None = None,
    patient: str | bool | None = None,
) -> tuple[str, pd.DataFrame, bool]:
    """What to call it in messages, a table with one row per slide, and whether it was a pair."""
    where, df = _frame(labels, "labels")
    if slide_table is None:
        return where, df, False
    beside, slides = _frame(slide_table, "slide_table")
    own = column_of("slide", slide, slides, beside)
    theirs = column_of("patient", patient if patient in slides else None, slides, beside)
    who = column_of("patient", patient, df, where)
    kept = [column for column in df if column == who or column not in (own, theirs)]
    patients = _one_row_per_patient(df[kept], who, where)
    joined = slides[[own, theirs]].rename(columns={theirs: who})
    joined = joined.assign(**{who: joined[who].map(classes.text)})
    if not joined[who].isin(patients[who]).any():
        raise ValueError(
            f"{where} and {beside} have no patient in common: {listed(patients[who])} in the "
            f"first, column {who!r}; {listed(joined[who])} in the second, column {theirs!r}. Name "
            "the column of both with patient=."
        )
    return where, joined.merge(patients, on=who, how="left"), True


def _frame(table: TableLike, what: str) -> tuple[str, pd.DataFrame]:
    if isinstance(table, pd.DataFrame):
        return what, table.set_axis([str(c) for c in table.columns], axis=1)
    if isinstance(table, (str, os.PathLike)):
        path = Path(table)
        return str(path), read_frame(path, rows="slide", dtype=str)
    raise ValueError(
        f"{what}: expected the path of a table or a pandas DataFrame, found {type(table).__name__}."
    )


def _one_row_per_patient(df: pd.DataFrame, who: str, where: str) -> pd.DataFrame:
    known = df.assign(**{who: df[who].map(classes.text)}).drop_duplicates()
    known = known[known[who].notna()]
    twice = known[who][known[who].duplicated()]
    if len(twice):
        raise ValueError(
            f"{where}: {count(twice.nunique(), 'patient')} in several rows that differ: "
            f"{listed(twice)}. With slide_table= keep one row per patient."
        )
    return known


def _columns(
    df: pd.DataFrame,
    where: str,
    slide: str | None,
    label: str | None,
    patient: str | bool | None,
    of_pair: bool,
) -> dict[str, str | None]:
    """The columns of slide, label and patient; None without, or where `patient` is False."""
    header = list(df)
    no_patient = patient is None and like(GUESSES["patient"], header) is None
    by_patient = like(GUESSES["patient"], header) is not None and slide is None and not of_pair
    pair = (
        " If it has one row per patient, name the table with patient and file name of every slide "
        "with slide_table=."
    )
    return {
        "slide": column_of("slide", slide, df, where, pair if by_patient else ""),
        "label": column_of("label", label, df, where),
        "patient": None
        if patient is False or no_patient
        else column_of("patient", patient, df, where),
    }


def column_of(
    what: str, given: str | bool | None, df: pd.DataFrame, where: str, hint: str = ""
) -> str:
    """The column that is meant: the one given, else one with a usual name."""
    usual = SLIDE_NAMES if what == "slide" else GUESSES[what]
    found = find_column(what, None if given is False else given, list(df), where, usual)
    if found is None:
        raise ValueError(
            f"{where}: expected a column with the {what}, such as {usual[0]!r}; found "
            f"{all_columns(df)}. Say which one with {what}=.{hint}"
        )
    return found


def _one_row_per_slide(
    df: pd.DataFrame, columns: dict[str, str | None], where: str
) -> tuple[pd.DataFrame, tuple[str, ...]]:
    """Label and patient by slide, and the slides with several rows; rows must agree."""
    slides = df[columns["slide"]]
    named = df[slides.map(classes.text).notna()]
    # Names keep their blanks, numbers lose the .0 of a column with gaps.
    names = [v if isinstance(v, str) else classes.text(v) for v in named[columns["slide"]]]
    rows = pd.DataFrame(
        {what: named[c].map(classes.text) for what, c in columns.items() if c and what != "slide"}
    ).set_axis([key(name) for name in names])
    # A row without a value does not contradict one with it.
    for what in rows:
        kinds = rows[what].dropna().map(classes.fold).groupby(level=0).nunique()
        torn = kinds.index[kinds > 1]
        if len(torn):
            raise ValueError(
                f"{where}: {count(len(torn), 'slide')} with different values in column "
                f"{columns[what]!r}: {listed(torn)}, the first with "
                f"{listed(rows[what][torn[0]].dropna())}. Keep one row per slide."
            )
    duplicates = tuple(rows.index[rows.index.duplicated()].unique())
    return rows.groupby(level=0, sort=False).first(), duplicates


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
