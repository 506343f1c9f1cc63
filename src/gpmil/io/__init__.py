"""Feature files that users already have, as `Bags`: one module per format.

`read` and `read_with_report` give one cohort, `read_splits` one per split. What had to be guessed
is logged once and stands in the report; what is wrong is a ValueError that says where.
A new format of slide files is a new module, and a line in ``gpmil.io.formats``.
"""

import logging
import os
from pathlib import Path
from typing import Any

from gpmil.data.bags import Bags
from gpmil.io import cohort, formats, npz, plain, sicapv2, tables
from gpmil.io.labels import LABEL_OPTIONS, TableLike
from gpmil.io.patch_labels import with_patch_labels
from gpmil.io.report import ReadReport

__all__ = [
    "ReadReport",
    "npz",
    "read",
    "read_splits",
    "read_with_report",
    "sicapv2",
    "tables",
    "with_patch_labels",
]

logger = logging.getLogger("gpmil")

UNDERSTOOD = f"{formats.UNDERSTOOD}\n{plain.UNDERSTOOD}"


def read(
    path: str | os.PathLike,
    labels: TableLike | None = None,
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
    slide_table: TableLike | None = None,
) -> Bags:
    """A cohort from the feature files of a slide tool, a table or an .npz.

    `path` is a folder of .h5, .pt or .npy files, one per slide; a job folder of TRIDENT; a table
    with one row per patch; an .npz. What is there decides, or `format` does: "trident", "clam",
    "stamp", "huggingface", "slideflow", "torchmil", "npy", "table", "npz" or "sicapv2".

    `labels` (csv, tsv, xlsx or a DataFrame) has one row per slide; slides without a row get -1.
    Without it those of the files are taken, where the format has any. With `slide_table`, which
    has patient and file name of every slide, it has one row per patient (the tables of STAMP).
    `slide`, `label` and `patient` are its columns: guessed among usual names, and that is said.
    Patients of TCGA slides are guessed from barcodes; with `patient=False` there are none.
    `positive`, `negative` and `exclude` are the labels that count as 1, as 0 and as unlabelled,
    where they are not 0 and 1: a class, several ("a,b" or a list), or a comparison (">=2"). Of
    two classes one is enough, of more each must be said. Capitals and blanks do not matter.

    `step` is the distance of neighbouring patches, a number or a pair in units of the positions:
    as the files tell, else as the positions show, which is said. `graph` is that of `Bags`.
    `skip_bad` leaves out files that are corrupt or hold NaN, and says so. `cache` is the folder
    where the features are kept as one file: ``.gpmil-cache`` beside them, or a temporary one.
    """
    said = slide, label, patient, positive, negative, exclude, slide_table
    how = step, graph, format, skip_bad, cache
    bags, report = _read(path, labels, dict(zip(LABEL_OPTIONS, said, strict=True)), *how)
    for line in (*report.notes, *report.warnings()):
        logger.warning("%s: %s", Path(path).name, line)
    return bags


def read_with_report(
    path: str | os.PathLike,
    labels: TableLike | None = None,
    *,
    step: Any = None,
    graph: str | None = "grid4",
    format: str | None = None,
    skip_bad: bool = False,
    cache: str | os.PathLike | None = None,
    **said: Any,
) -> tuple[Bags, ReadReport]:
    """As `read`, with what was found, guessed and left out; `said` is the rest of its options."""
    unknown = [name for name in said if name not in LABEL_OPTIONS]
    if unknown:
        raise TypeError(f"read_with_report takes no option {unknown[0]!r}; see gpmil.read.")
    said = dict.fromkeys(LABEL_OPTIONS) | said
    return _read(path, labels, said, step, graph, format, skip_bad, cache)


def _read(
    path: str | os.PathLike,
    labels: TableLike | None,
    said: dict[str, Any],
    step: Any,
    graph: str | None,
    format: str | None,
    skip_bad: bool,
    cache: str | os.PathLike | None,
) -> tuple[Bags, ReadReport]:
    path = Path(path)
    _require_path(path)
    listing = None if format in plain.FORMATS else formats.find(path, format)
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
