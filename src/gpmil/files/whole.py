"""Files and folders that are there whole or not at all, and one writer per folder.

What is written is made beside its place and renamed: whoever is killed, or finds a full disk,
leaves what was there before.
"""

import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

LOCK = ".lock"
PARTIAL = ".partial"  # behind the name of a folder that is being filled
DESKTOP = (".DS_Store", "Thumbs.db", "desktop.ini")  # of macOS, whose others begin with ._; Windows


def write_whole(path: Path, content: bytes) -> None:
    """Write beside and rename: the file is there whole, or as it was before."""
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = path.with_name(f".{path.name}.new")
    try:
        fresh.write_bytes(content)
        os.replace(fresh, path)
    finally:
        fresh.unlink(missing_ok=True)


def json_bytes(content: Mapping[str, Any]) -> bytes:
    """Readable JSON, the same bytes for the same content."""
    return (json.dumps(content, indent=2) + "\n").encode()


@contextmanager
def fresh_folder(path: Path) -> Iterator[Path]:
    """A folder to write into; it becomes `path` when the block ends, and vanishes if it fails."""
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = Path(tempfile.mkdtemp(prefix=f".{path.name}.", dir=path.parent))
    try:
        yield fresh
        fresh.chmod(0o755)
        swap(fresh, path)
    finally:
        shutil.rmtree(fresh, ignore_errors=True)


def swap(fresh: Path, path: Path) -> None:
    """Put `fresh` in the place of `path`; if that fails, what was there is there again."""
    if not path.exists():
        os.replace(fresh, path)
        return
    aside = Path(tempfile.mkdtemp(prefix=f".{path.name}.old.", dir=path.parent))
    try:
        os.replace(path, aside / path.name)
        try:
            os.replace(fresh, path)
        except BaseException:
            os.replace(aside / path.name, path)
            raise
    finally:
        if path.exists():
            shutil.rmtree(aside)


def written_by_someone(folder: Path) -> list[str]:
    """Names in a folder but for those that a desktop leaves behind by itself."""
    names = sorted(item.name for item in folder.iterdir())
    return [name for name in names if name not in DESKTOP and not name.startswith("._")]


@contextmanager
def locked(folder: Path) -> Iterator[Callable[[], None]]:
    """Two processes must not fill the same folder; the lock ends with the process, however it ends.

    What is given to the block ends it earlier, and leaves no trace: before the folder is renamed.
    """
    lock = FileLock(folder / LOCK, timeout=0)
    try:
        lock.acquire()
    except Timeout as error:
        raise ValueError(
            f"{folder} is being written by another gpmil: wait for it, or name another folder "
            "with --out."
        ) from error

    def unlock() -> None:
        if lock.is_locked:
            with suppress(OSError):  # Windows keeps an open file; filelock deletes it there
                (folder / LOCK).unlink()
            lock.release()

    try:
        yield unlock
    finally:
        unlock()
