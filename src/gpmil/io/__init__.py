"""Feature files that users already have, as `Bags`: one module a format.

Every module has `read(path, ...) -> dict[str, Bags]`, one cohort a split ("all" where there are
no splits). What had to be guessed is logged once; what is wrong is a ValueError that says where.
A new format is a new module, and a line in `_reader`.
"""

import inspect
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from gpmil.bags import Bags
from gpmil.io import npz, sicapv2, tables

__all__ = ["npz", "read", "sicapv2", "tables"]

UNDERSTOOD = """\
  a folder with Train.csv and Test.csv (and Val.csv, wsi_labels.csv): the SICAPv2 feature tables
  a file .npz: arrays X, bag, y_bag, bag_id (and y_inst, x, y, split, group)
  a file .csv, .csv.gz or .parquet: one row a patch: slide, label, features (and x, y, split)
  a folder that holds exactly one such file"""


def read(path: str | os.PathLike, **options: Any) -> dict[str, Bags]:
    """The cohorts at a path, by split; what is there decides which reader reads it.

    `options` go to that reader: `gpmil.io.tables.read`, `gpmil.io.npz.read` or
    `gpmil.io.sicapv2.read`.
    """
    path = Path(path)
    if not path.exists():
        raise ValueError(
            f"there is nothing at {path}. Check the path; understood are\n{UNDERSTOOD}"
        )
    reader, path = _reader(path)
    taken = list(inspect.signature(reader).parameters)[1:]
    unknown = [name for name in options if name not in taken]
    if unknown:
        module = reader.__module__
        raise ValueError(
            f"{module}.read, which reads {path}, takes no option {unknown[0]!r}; it takes {taken}."
        )
    return reader(path, **options)


def _reader(path: Path) -> tuple[Callable[..., dict[str, Bags]], Path]:
    """Who reads what is at the path, and the file or folder to be read."""
    if path.is_file():
        if path.suffix == ".npz":
            return npz.read, path
        if tables.is_table(path):
            return tables.read, path
        raise ValueError(f"{path} is no file that can be read. Understood are\n{UNDERSTOOD}")
    if all((path / name).is_file() for name in ("Train.csv", "Test.csv")):
        return sicapv2.read, path
    files = sorted(f for f in path.iterdir() if f.suffix == ".npz" or tables.is_table(f))
    if len(files) != 1:
        found = ", ".join(f.name for f in files[:5]) or "none"
        raise ValueError(
            f"{path}: expected Train.csv and Test.csv, or exactly one table or .npz; found "
            f"{found}{', ...' if len(files) > 5 else ''}. Name the file itself. Understood are\n"
            f"{UNDERSTOOD}"
        )
    return _reader(files[0])
