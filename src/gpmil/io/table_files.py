"""Files csv, tsv, xlsx and parquet as data frames, with numbers to the last digit."""

import gzip
import logging
import re
import warnings
import zlib
from collections.abc import Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pandas as pd
from packaging.version import Version

from gpmil import extras
from gpmil.data.checks import listed
from gpmil.files.foreign import BadFile, reading, reason

logger = logging.getLogger("gpmil")

# Numbers to the last digit, which pandas promises by itself since 3.1.
EXACT: dict[str, Any] = (
    {} if Version(pd.__version__) >= Version("3.1") else {"float_precision": "round_trip"}
)
ENDINGS = (".csv", ".csv.gz", ".tsv", ".tsv.gz", ".xlsx", ".parquet")
SEPARATORS = (",", ";", "\t", "|")
LONGEST_HEADER = 1 << 24


def is_table(path: Path) -> bool:
    """Whether the name is that of a table."""
    return path.name.endswith(ENDINGS)


def header_of(path: Path) -> list[str]:
    """Names of the columns, each of them once."""
    _require_file(path)
    if path.suffix == ".parquet":
        return _parquet(path, header_only=True).columns.tolist()
    read = _xlsx if path.suffix == ".xlsx" else _csv
    first = read(path, header=None, nrows=1, dtype=str, keep_default_na=False)
    names = first.iloc[0][first.iloc[0] != ""]  # the numbers of the rows have no name
    twice = names[names.duplicated()]
    if len(twice):
        raise ValueError(f"{path}: columns that share a name: {listed(twice)}.")
    return [str(name) for name in names]


def _require_file(path: Path) -> None:
    if not path.is_file():
        raise ValueError(f"{path} is no file: expected a table {', '.join(ENDINGS)}.")
    if not is_table(path):
        raise ValueError(f"{path}: expected a table, one of {', '.join(ENDINGS)}.")


def read_frame(
    path: Path, text: Sequence[str] = (), rows: str = "patch", dtype: type | None = None
) -> pd.DataFrame:
    """The table; the columns in `text` as they are written, so that slide 007 stays 007.

    `dtype` str: all columns as they are written.
    """
    _require_file(path)
    if path.suffix == ".parquet":
        df = _parquet(path)
        own = {c: df[c].astype("str").where(df[c].notna()) for c in text if c in df}
        df = df.assign(**own)
    elif path.suffix == ".xlsx":
        df = _xlsx(path, dtype=dtype or dict.fromkeys(text, str))
    else:
        df = _csv(path, dtype=dtype or dict.fromkeys(text, str), low_memory=False)
    df.columns = [str(c) for c in df.columns]
    if not len(df):
        raise ValueError(f"{path}: expected one row per {rows}, found no rows.")
    return df


def _csv(path: Path, **options: Any) -> pd.DataFrame:
    try:
        with reading(path, "a table of separated values"), warnings.catch_warnings():
            # Without index_col=False a first row longer than the header would shift the columns.
            warnings.simplefilter("error", pd.errors.ParserWarning)
            return pd.read_csv(path, sep=_separator(path), index_col=False, **EXACT, **options)
    except BadFile as error:
        if isinstance(error.__cause__, pd.errors.ParserWarning):
            raise BadFile(
                f"{path}: the row below the header has more values than the header has names. "
                "Give every column a name, also one of row names."
            ) from error
        if isinstance(error.__cause__, UnicodeDecodeError):
            raise BadFile(
                f"{path} cannot be read as UTF-8: {reason(error.__cause__)}. Probably a "
                "spreadsheet wrote it in another encoding: save it as “CSV UTF-8”, or as xlsx."
            ) from error
        if path.suffix == ".gz" and isinstance(error.__cause__, (OSError, EOFError, zlib.error)):
            raise BadFile(
                f"{path} is no whole gzip file: {reason(error.__cause__)}. Copy it again."
            ) from error
        raise


def _separator(path: Path) -> str:
    """What the header has most of: the name alone does not tell, as Excel writes semicolons."""
    usual = "\t" if ".tsv" in path.suffixes else ","
    opened = gzip.open if path.suffix == ".gz" else open
    with opened(path, "rt", encoding="utf-8", errors="replace") as file:
        header = re.sub(r'"[^"]*"', "", file.readline(LONGEST_HEADER))
    return max((usual, *SEPARATORS), key=header.count)


def _xlsx(path: Path, **options: Any) -> pd.DataFrame:
    """The first sheet."""
    if find_spec("openpyxl") is None:
        raise ValueError(
            f"{path}: reading xlsx needs openpyxl, which is not installed: pip install "
            "'gpmil[xlsx]', or save the table as csv."
        )
    with reading(path, "xlsx"), pd.ExcelFile(path, engine="openpyxl") as book:
        if len(book.sheet_names) > 1 and "nrows" not in options:
            names = listed(book.sheet_names)
            logger.warning("%s: of the sheets %s the first is read.", path.name, names)
        df = pd.read_excel(book, sheet_name=0, **options)
    return df.dropna(how="all")  # rows that were formatted, but never filled


def _parquet(path: Path, header_only: bool = False) -> pd.DataFrame:
    if find_spec("pyarrow") is None:
        raise ValueError(
            f"{path}: reading parquet needs pyarrow, which is not installed: "
            f"{extras.install('parquet')}, or save the table as csv."
        )
    parquet = import_module("pyarrow.parquet")
    with reading(path, "parquet"):
        if header_only:
            return parquet.read_schema(path).empty_table().to_pandas()
        return pd.read_parquet(path, engine="pyarrow")
