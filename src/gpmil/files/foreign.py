"""Files that others wrote: whatever goes wrong in reading one is a single error that names it.

Libraries raise what they like about a damaged file (`KeyError`, `zlib.error`, `RecursionError`,
`tokenize.TokenError`, ...). Everything that reads a file from outside goes through `reading`.
"""

import gzip
import json
import math
import stat
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any


class BadFile(ValueError):
    """A file that cannot be used, and why."""


@contextmanager
def reading(path: Path, what: str, error: type[BadFile] = BadFile) -> Iterator[None]:
    """Read `path`, of the kind `what` names; any failure is an `error` with file and reason.

    >>> import json, tempfile
    >>> path = Path(tempfile.mkdtemp()) / "card.json"
    >>> _ = path.write_text("[" * 100_000)
    >>> with reading(path, "JSON"):
    ...     json.loads(path.read_text())
    Traceback (most recent call last):
    gpmil.files.foreign.BadFile: .../card.json cannot be read as JSON: ...
    """
    require_regular(path, error)
    try:
        yield
    except BadFile:
        raise
    except Exception as failure:
        raise error(f"{path} cannot be read as {what}: {reason(failure)}") from failure


def read_json(path: Path, error: type[BadFile] = BadFile, finite: bool = True) -> Any:
    """What a JSON file, compressed or not, says.

    It is refused where it says something twice, or in no text there is.
    With `finite` also where a number is NaN, infinite or too large for a float.
    """
    kinds = ("parse_float", "parse_int", "parse_constant")
    checks: dict[str, Any] = dict.fromkeys(kinds, _number)
    with reading(path, "JSON", error):
        packed = path.suffix == ".gz"
        text = (gzip.decompress if packed else bytes)(path.read_bytes()).decode("utf-8")
        found = json.loads(text, object_pairs_hook=_said_once, **(checks if finite else {}))
        if "\\ud" in text.lower():  # half of a character, which nothing can write again
            json.dumps(found, ensure_ascii=False).encode()
        return found


def _number(text: str) -> int | float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text[:40]} is no finite number")
    return value if any(c in text for c in ".eE") else int(text)


def _said_once(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"{twice[:60]!r} is there twice")
    return found


def require_regular(path: Path, error: type[BadFile] = BadFile) -> None:
    """Refuse what is no file with an end, such as a pipe, which would be waited for for ever."""
    try:
        mode = path.stat().st_mode
    except OSError as failure:
        raise error(f"{path} cannot be read: {reason(failure)}") from failure
    if not stat.S_ISREG(mode):
        raise error(f"{path} is no regular file, but a folder, a pipe or a device")


def reason(failure: BaseException) -> str:
    """What a library said, in one short line."""
    if isinstance(failure, OSError) and failure.strerror:
        return failure.strerror
    if isinstance(failure, MemoryError):
        return "it claims to be larger than the memory"
    said = " ".join(str(failure).split())[:300]
    return f"{said or 'no reason given'} ({type(failure).__name__})"
