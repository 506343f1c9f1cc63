"""The features of a cohort as one file, mapped into memory: made once, used as long as it fits.

A folder with ``index.json``, one raw file of features (N, D) as stored, one .npz with positions.
The index has the slides, what their files say, digests of their features, and sizes and times of
all files. As long as those are the same, values are known to be finite and to have these digests:
nobody reads them for that again. The index is renamed into place last, so that an interrupted build
leaves the cache as it was.
"""

import getpass
import hashlib
import json
import logging
import os
import re
import secrets
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float, Int

from gpmil.io.arrays import npz
from gpmil.io.copying import SKIP, CopiedSlide, cannot_write, copied
from gpmil.io.formats import Listing, opener
from gpmil.io.slides import SlideFacts

logger = logging.getLogger("gpmil")

VERSION = 4
FOLDER = ".gpmil-cache"
TEMPORARY = "gpmil-cache-"
OURS = re.compile(r"(features|arrays)-[0-9a-f]{8}\.(bin|npz)")
DAY = 86_400.0
PARTS = {"features": "bin", "arrays": "npz"}


@dataclass(frozen=True)
class CachedCohort:
    """A cohort in the cache, its features finite."""

    format: str
    folder: Path
    features: np.memmap
    slides: list[CopiedSlide]
    coords: Float[np.ndarray, "n k"] | None
    without_coords: list[str]
    instance_labels: Int[np.ndarray, " n"] | None
    empty: list[str]
    bad: list[tuple[str, str]]
    files: tuple[Path, ...] = ()  # those that were made just now

    @property
    def digests(self) -> Int[np.ndarray, " B"]:
        """Of the features of every slide."""
        return np.array([slide.digest for slide in self.slides])


def cached(listing: Listing, cache: Any, skip_bad: bool) -> CachedCohort:
    """The cohort from the cache, which is made where it is missing or older than the files."""
    found = kept(listing, cache)
    if found is None:
        folder = _first_writable(_places(listing, cache))
        with _no_empty_folders(folder):
            index = _build(folder, listing, skip_bad)
        made = (folder / "index.json", *(folder / index[part] for part in PARTS))
        found = replace(_opened(folder, index), files=made)
    if found.bad and not skip_bad:
        name, reason = found.bad[0]
        raise ValueError(f"{listing.files[name]}: {reason}. {SKIP}")
    return found


def kept(listing: Listing, cache: Any = None) -> CachedCohort | None:
    """What the first place holds that fits the files as they are now, its own files whole."""
    places = (_kept_in(folder, listing) for folder in _places(listing, cache))
    return next((found for found in places if found is not None), None)


@contextmanager
def discarded_on_failure(found: CachedCohort) -> Iterator[None]:
    """Remove what was made just now if slides do not fit together: their files have to change."""
    with _no_empty_folders(found.folder):
        try:
            yield
        except ValueError:
            for path in found.files:
                with suppress(OSError):  # Windows keeps a file that is still mapped
                    path.unlink()
            raise


# ------------------------------------------------------------------ where


def _places(listing: Listing, cache: Any) -> list[Path]:
    """Folders that may hold the cache of this cohort, best first."""
    kind = "-".join(sorted({p.suffix.lstrip(".") for p in listing.files.values()}))
    if len(listing.files) == 1:  # one file of a folder, it may be
        kind += "-" + _digest(next(iter(listing.files)))
    own = f"{listing.folder.name}-{_digest(str(listing.folder.resolve()))}-{kind}"
    if cache is not None:
        return [Path(cache) / own]
    return [listing.folder / FOLDER / kind, _temporary() / own]


def _digest(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=6).hexdigest()


def _temporary() -> Path:
    """A folder of this user among the temporary files, where anybody may write."""
    user = str(os.getuid()) if hasattr(os, "getuid") else getpass.getuser()
    folder = Path(tempfile.gettempdir()) / f"{TEMPORARY}{user}"
    if hasattr(os, "getuid") and folder.exists() and folder.stat().st_uid != os.getuid():
        return Path(tempfile.mkdtemp(prefix=TEMPORARY))
    return folder


def _first_writable(places: list[Path]) -> Path:
    for folder in places:
        if _writable(folder):
            return folder
    raise ValueError(
        "there is no place to keep the features, cannot write to "
        f"{' or '.join(str(p) for p in places)}. Name another folder with cache=."
    )


def _writable(folder: Path) -> bool:
    private = folder.is_relative_to(tempfile.gettempdir())
    try:
        folder.mkdir(mode=0o700 if private else 0o777, parents=True, exist_ok=True)
    except OSError:
        return False
    return os.access(folder, os.W_OK | os.X_OK)


# ------------------------------------------------------------------ is it still right


def _sources(listing: Listing) -> dict[str, list[int]]:
    """Size and time of every file that is read, by its path from the folder."""
    paths = [*listing.files.values(), *listing.beside.values(), *listing.others]
    return {os.path.relpath(path, listing.folder): _size_and_time(path) for path in paths}


def _size_and_time(path: Path) -> list[int]:
    try:
        stat = path.stat()
    except OSError:  # a link to nowhere: named when it cannot be opened
        return [0, 0]
    return [stat.st_size, stat.st_mtime_ns]


def _kept_in(folder: Path, listing: Listing) -> CachedCohort | None:
    try:
        index = json.loads((folder / "index.json").read_text(encoding="utf-8"))
        digest = index.pop("digest")
        good = (
            digest == _digest(json.dumps(index))
            and index["version"] == VERSION
            and index["format"] in listing.formats
            and index["sources"] == _sources(listing)
            and index["made"] == [_size_and_time(folder / index[part]) for part in PARTS]
        )
        return _opened(folder, index) if good else None
    except Exception:  # whatever somebody did to it: it is made again
        return None


def _opened(folder: Path, index: dict[str, Any]) -> CachedCohort:
    slides = [CopiedSlide(**{**s, "told": _told(s["told"])}) for s in index["slides"]]
    shape = (sum(s.n for s in slides), index["n_features"])
    parts = npz(folder / index["arrays"])
    return CachedCohort(
        format=index["format"],
        folder=folder,
        features=np.memmap(folder / index["features"], index["dtype"], mode="r", shape=shape),
        slides=slides,
        coords=parts.get("coords"),
        without_coords=index["without_coords"],
        instance_labels=parts.get("instance_labels"),
        empty=index["empty"],
        bad=[(name, reason) for name, reason in index["bad"]],
    )


def _told(fields: dict[str, Any]) -> SlideFacts:
    sides = {name: fields[name] and tuple(fields[name]) for name in ("step", "size")}
    return SlideFacts(**{**fields, **sides})


# ------------------------------------------------------------------ building


def _build(folder: Path, listing: Listing, skip_bad: bool) -> dict[str, Any]:
    """Write the cache; on any failure nothing of it stays."""
    sources = _sources(listing)
    total = sum(size for size, _ in sources.values())
    _require_room(folder, total)
    logger.warning("features, %.3g GB, are copied once to %s", total / 1e9, folder)
    _remove_leftovers(folder)
    token = secrets.token_hex(4)
    parts = {what: f"{what}-{token}.{end}" for what, end in PARTS.items()}
    paths = [folder / name for name in parts.values()]
    draft = folder / f"index-{token}.json"
    name, open_slide = opener(listing)
    with _removed_on_failure([draft, *paths]):
        copy = copied(listing, open_slide, paths[0], skip_bad)
        np.savez(paths[1], **copy.arrays())
        index = copy.index() | parts | {"version": VERSION, "format": name, "sources": sources}
        index["made"] = [_size_and_time(path) for path in paths]
        index["digest"] = _digest(json.dumps(index))
        draft.write_text(json.dumps(index), encoding="utf-8")
        old = _names_in_index(folder)
        os.replace(draft, folder / "index.json")
    for path in old:
        with suppress(OSError):  # Windows keeps a file that is still mapped
            path.unlink()
    return index


@contextmanager
def _no_empty_folders(folder: Path) -> Iterator[None]:
    """On a failure, remove the folders that were made for the cache and hold nothing."""
    try:
        yield
    except BaseException:
        ours = folder.parent.name.startswith((FOLDER, TEMPORARY))
        for place in [folder, folder.parent] if ours else [folder]:
            with suppress(OSError):  # not empty
                place.rmdir()
        raise


@contextmanager
def _removed_on_failure(paths: list[Path]) -> Iterator[None]:
    try:
        yield
    except BaseException as error:
        for path in paths:
            path.unlink(missing_ok=True)
        if isinstance(error, OSError):
            raise cannot_write(error, paths[0].parent) from error
        raise


def _require_room(folder: Path, needed: int) -> None:
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise ValueError(
            f"{folder}: about {needed / 1e9:.1f} GB are needed to keep the features, "
            f"{free / 1e9:.1f} GB are free. Name a folder with more room with cache=."
        )


def _names_in_index(folder: Path) -> list[Path]:
    try:
        index = json.loads((folder / "index.json").read_text(encoding="utf-8"))
        names = [index[part] for part in PARTS]
        return [folder / name for name in names if OURS.fullmatch(name)]
    except Exception:  # whatever somebody did to it
        return []


def _remove_leftovers(folder: Path) -> None:
    """What a process that was killed left behind; a day old, so that nobody still writes it."""
    used = {folder / "index.json", *_names_in_index(folder)}
    for path in set(folder.glob("*-????????.*")) - used:
        with suppress(OSError):
            if time.time() - path.stat().st_mtime > DAY:
                path.unlink()
