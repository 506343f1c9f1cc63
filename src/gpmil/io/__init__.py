"""Feature files that users already have, as `Bags`: one module a format.

`read` and `read_with_report` give one cohort, `read_splits` one a split. What had to be guessed
is logged once and stands in the report; what is wrong is a ValueError that says where.
A new format of slide files is a new module, and a line in ``gpmil.io.formats``.
"""

import logging
import os
from pathlib import Path
from typing import Any

import pandas as pd

from gpmil.data.bags import Bags
from gpmil.io import cohort, formats, npz, plain, sicapv2, tables
from gpmil.io.report import ReadReport

__all__ = [
    "ReadReport",
    "npz",
    "read",
    "read_splits",
    "read_with_report",
    "sicapv2",
    "tables",
]

logger = logging.getLogger("gpmil")

UNDERSTOOD = f"{formats.UNDERSTOOD}\n{plain.UNDERSTOOD}"


def read(
    path: str | os.PathLike,
    labels: str | os.PathLike | pd.DataFrame | None = None,
    *,
    slide: str | None = None,
    label: str | None = None,
    positive: Any = None,
    patient: str | bool | None = None,
    step: Any = None,
    graph: str | None = "grid4",
    format: str | None = None,
    skip_bad: bool = False,
    cache: str | os.PathLike | None = None,
    negative: Any = None,
    exclude: Any = None,
    slide_table: str | os.PathLike | pd.DataFrame | None = None,
) -> Bags:
    """A cohort from the feature files of a slide tool, a table or an .npz.

    Parameters
    ----------
    path
        A folder of .h5, .pt or .npy files, one a slide; a job folder of TRIDENT; a table with
        one row a patch; an .npz.
    labels : path of a csv, tsv or xlsx, or a DataFrame
        One row a slide. Slides without a row get -1. Without `labels` those of the files are
        taken, where the format has any.
    slide_table : path, or a DataFrame
        Patient and file name of every slide, where `labels` has one row per patient instead: the
        slide and clini tables of STAMP.
    slide, label, patient : column names of that table
        None: guessed among usual names, and that is said.
        Patients of TCGA slides are guessed from their barcodes, where no column has them;
        `patient=False` takes every slide as a patient of its own.
    positive, negative, exclude
        The labels that count as 1, as 0 and as unlabelled, where they are not 0 and 1 already: a
        class, several ("a,b" or a list), or a comparison such as ">=2". Of two classes one is
        enough, of more each must be said. Capitals and blanks do not matter.
    step : number or pair
        Distance of neighbouring patches, in units of the positions. None: as the files tell for
        every slide or, where they do not, as the positions show, which is said.
    graph
        As in `Bags`.
    format : "trident", "clam", "stamp", "huggingface", "slideflow", "torchmil", "npy",
            "table", "npz" or "sicapv2"
        None: what is there decides.
    skip_bad : bool
        Leave out files that are corrupt or hold NaN, and say so, rather than raise an error.
    cache : folder
        Where the features are kept as one file, to be mapped into memory. None: a folder
        ``.gpmil-cache`` with the feature files, or in the folder for temporary files.
    """
    bags, report = read_with_report(
        path,
        labels,
        slide=slide,
        label=label,
        positive=positive,
        patient=patient,
        step=step,
        graph=graph,
        format=format,
        skip_bad=skip_bad,
        cache=cache,
        negative=negative,
        exclude=exclude,
        slide_table=slide_table,
    )
    for line in (*report.notes, *report.warnings()):
        logger.warning("%s: %s", Path(path).name, line)
    return bags


def read_with_report(
    path: str | os.PathLike,
    labels: str | os.PathLike | pd.DataFrame | None = None,
    *,
    slide: str | None = None,
    label: str | None = None,
    positive: Any = None,
    patient: str | bool | None = None,
    step: Any = None,
    graph: str | None = "grid4",
    format: str | None = None,
    skip_bad: bool = False,
    cache: str | os.PathLike | None = None,
    negative: Any = None,
    exclude: Any = None,
    slide_table: str | os.PathLike | pd.DataFrame | None = None,
) -> tuple[Bags, ReadReport]:
    """As `read`, with what was found, guessed and left out."""
    path = Path(path)
    _require_path(path)
    said = {
        "slide": slide,
        "label": label,
        "patient": patient,
        "positive": positive,
        "negative": negative,
        "exclude": exclude,
        "slide_table": slide_table,
    }
    wanted = format not in plain.FORMATS
    listing = formats.find(path, format) if wanted else None
    if listing is not None:
        return cohort.read(listing, labels, said, step, graph, skip_bad, cache)
    if plain.reader(path) is None:
        raise ValueError(f"{path}: found nothing that can be read. Understood are\n{UNDERSTOOD}")
    return plain.read(path, labels, said, step, graph, format)


def read_splits(path: str | os.PathLike, **options: Any) -> dict[str, Bags]:
    """The cohorts of a table or .npz by split; what is there decides which reader reads it.

    `options` go to that reader: `gpmil.io.tables.read`, `gpmil.io.npz.read` or
    `gpmil.io.sicapv2.read`. {"all"} where there are no splits.
    """
    path = Path(path)
    _require_path(path)
    found = plain.reader(path)
    if found is None:
        where = (
            "no file that can be read"
            if path.is_file()
            else "a folder in which a table or .npz was looked for, and found none"
        )
        raise ValueError(f"{path} is {where}. Understood are\n{plain.UNDERSTOOD}")
    which, path = found
    taken = plain.options_of(which)
    unknown = [name for name in options if name not in taken]
    if unknown:
        raise ValueError(
            f"{which.__module__}.read, which reads {path}, takes no option {unknown[0]!r}; it "
            f"takes {taken}."
        )
    return which(path, **options)


def _require_path(path: Path) -> None:
    if not path.exists():
        raise ValueError(
            f"there is nothing at {path}. Check the path; understood are\n{UNDERSTOOD}"
        )
