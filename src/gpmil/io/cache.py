"""The features of a cohort as one file, mapped into memory: made once, used as long as it fits.

A folder with ``index.json`` (slides, sizes, what their files say, sizes and times of the
sources), one raw file of features (N, D) as stored, and one .npz with positions. The index is
renamed into place last, so that an interrupted build leaves the cache as it was.
"""

import errno
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
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import IO, Any

import numpy as np
from jaxtyping import Float, Int

from gpmil.data import extraction
from gpmil.data.checks import count
from gpmil.files.foreign import reading
from gpmil.io.arrays import npz
from gpmil.io.formats import Listing, Opener, opener
from gpmil.io.slides import BadSlide, Slide, SlideLevel, Told

logger = logging.getLogger("gpmil")

VERSION = 3
FOLDER = ".gpmil-cache"
TEMPORARY = "gpmil-cache-"
OURS = re.compile(r"(features|arrays)-[0-9a-f]{8}\.(bin|npz)")
DAY = 86_400.0
FEATURES = "features of a slide"
SKIP = "Repair or remove the file, or leave it out with skip_bad=True."


@dataclass(frozen=True)
class Kept:
    """A slide in the cache: its name, its number of patches, and what its file says."""

    name: str
    n: int
    told: Told


@dataclass(frozen=True)
class Stored:
    """A cohort in the cache."""

    format: str
    folder: Path
    features: np.memmap
    slides: list[Kept]
    coords: Float[np.ndarray, "n k"] | None
    without_coords: list[str]
    instance_labels: Int[np.ndarray, " n"] | None
    empty: list[str]
    bad: list[tuple[str, str]]
    files: tuple[Path, ...] = ()  # those that were made just now


def stored(listing: Listing, cache: Any, skip_bad: bool) -> Stored:
    """The cohort from the cache, which is made where it is missing or older than the files."""
    found = valid(listing, cache)
    if found is None:
        folder = _first_writable(_places(listing, cache))
        with _no_empty_folders(folder):
            index = _build(folder, listing, skip_bad)
        made = (folder / "index.json", *(folder / index[part] for part in ("features", "arrays")))
        found = replace(_opened(folder, index), files=made)
    if found.bad and not skip_bad:
        name, reason = found.bad[0]
        raise ValueError(f"{listing.files[name]}: {reason}. {SKIP}")
    return found


def valid(listing: Listing, cache: Any) -> Stored | None:
    """What is kept of these files as they are now, its own files whole; None if nothing is."""
    found = (_valid_in(folder, listing) for folder in _places(listing, cache))
    return next((cohort for cohort in found if cohort is not None), None)


@contextmanager
def discarded_on_failure(found: Stored) -> Iterator[None]:
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
    found = {}
    for path in paths:
        try:
            stat = path.stat()
            size = [stat.st_size, stat.st_mtime_ns]
        except OSError:  # a link to nowhere: named when it cannot be opened
            size = [0, 0]
        found[os.path.relpath(path, listing.folder)] = size
    return found


def _valid_in(folder: Path, listing: Listing) -> Stored | None:
    """What is kept, if it is of these files as they are now and its own files are whole."""
    try:
        index = json.loads((folder / "index.json").read_text(encoding="utf-8"))
        digest = index.pop("digest")
        good = (
            digest == _digest(json.dumps(index))
            and index["version"] == VERSION
            and index["format"] in listing.formats
            and index["sources"] == _sources(listing)
            and (folder / index["features"]).stat().st_size == index["bytes"]
            and (folder / index["arrays"]).is_file()
        )
        return _opened(folder, index) if good else None
    except Exception:  # whatever somebody did to it: it is made again
        return None


def _opened(folder: Path, index: dict[str, Any]) -> Stored:
    slides = [Kept(s["name"], s["n"], _told(s["told"])) for s in index["slides"]]
    shape = (sum(s.n for s in slides), index["n_features"])
    parts = npz(folder / index["arrays"])
    return Stored(
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


def _told(fields: dict[str, Any]) -> Told:
    sides = {name: fields[name] and tuple(fields[name]) for name in ("step", "size")}
    return Told(**{**fields, **sides})


# ------------------------------------------------------------------ building


class _Wider(Exception):
    """A file with a wider type of numbers than those before it: begin again with that type."""

    def __init__(self, dtype: np.dtype) -> None:
        self.dtype = dtype


def _build(folder: Path, listing: Listing, skip_bad: bool) -> dict[str, Any]:
    """Write the cache; on any failure nothing of it stays."""
    sources = _sources(listing)
    total = sum(size for size, _ in sources.values())
    _require_room(folder, total)
    logger.warning("features, %.3g GB, are copied once to %s", total / 1e9, folder)
    _remove_leftovers(folder)
    token = secrets.token_hex(4)
    parts = {
        what: f"{what}-{token}.{end}" for what, end in (("features", "bin"), ("arrays", "npz"))
    }
    draft = folder / f"index-{token}.json"
    name, open_slide = opener(listing)
    dtype: np.dtype | None = None
    with _removed_on_failure([draft, *(folder / part for part in parts.values())]):
        while True:
            try:
                copy = _Copy(listing, open_slide, dtype, skip_bad)
                with (folder / parts["features"]).open("wb") as out:
                    copy.run(out)
                break
            except _Wider as wider:
                dtype = wider.dtype
        np.savez(folder / parts["arrays"], **copy.arrays())
        index = copy.index() | parts | {"version": VERSION, "format": name, "sources": sources}
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
            raise _cannot_write(error, paths[0].parent) from error
        raise


def _write(block: np.ndarray, out: IO[bytes]) -> None:
    try:
        out.write(block.data)
    except OSError as error:
        # Said here: around this the file of a slide is open, and would be thought damaged.
        raise _cannot_write(error, Path(out.name).parent) from error


def _cannot_write(error: OSError, folder: Path) -> ValueError:
    reason = "the disk is full" if error.errno == errno.ENOSPC else f"cannot be written to: {error}"
    return ValueError(f"{folder}: {reason}. Name another folder with cache=.")


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
        names = [index[part] for part in ("features", "arrays")]
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


@contextmanager
def _guarded(open_slide: Opener, path: Path, beside: Path | None) -> Iterator[Slide]:
    """A slide, opened; whatever its file does then, or when rows are read, is a `BadSlide`."""
    with ExitStack() as stack:
        with reading(path, FEATURES, BadSlide):
            slide = stack.enter_context(open_slide(path, beside))

        def rows(a: int, b: int) -> np.ndarray:
            with reading(path, FEATURES, BadSlide):
                return slide.rows(a, b)

        yield replace(slide, rows=rows)


class _Copy:
    """One pass over the files: features into one file, the rest into lists."""

    def __init__(
        self, listing: Listing, open_slide: Opener, dtype: np.dtype | None, skip_bad: bool
    ) -> None:
        self.listing, self.open_slide = listing, open_slide
        self.dtype, self.skip_bad = dtype, skip_bad
        self.n_features: int | None = None
        self.said: dict[str, tuple[Any, str]] = {}  # a fact, and the slide that says so
        self.slides: list[Kept] = []
        self.coords: list[np.ndarray] = []
        self.without_coords: list[str] = []
        self.instance_labels: list[np.ndarray | None] = []
        self.empty: list[str] = []
        self.bad: list[tuple[str, str]] = []

    def run(self, out: IO[bytes]) -> None:
        for name, path in self.listing.files.items():
            start = out.tell()
            try:
                with _guarded(self.open_slide, path, self.listing.beside.get(name)) as slide:
                    self._add(name, slide, out)
            except BadSlide as error:
                reason = str(error).removeprefix(str(path)).lstrip(": ")
                if not self.skip_bad:
                    raise ValueError(f"{path}: {reason}. {SKIP}") from error
                self.bad.append((name, reason))
                out.seek(start)
                out.truncate()
            except SlideLevel as error:
                raise ValueError(f"{path}: {error}") from error
        if not self.slides:
            raise ValueError(
                f"{self.listing.folder}: no slide with a patch in "
                f"{count(len(self.listing.files), 'file')}: {len(self.empty)} empty, "
                f"{len(self.bad)} that cannot be read"
                + (f"; {self.bad[0][0]}: {self.bad[0][1]}" if self.bad else "")
                + "."
            )

    def _add(self, name: str, slide: Slide, out: IO[bytes]) -> None:
        n, d = slide.shape
        if n == 0:
            self.empty.append(name)
            return
        self._require_same(name, d, slide.told)
        self._require_type(slide.dtype)
        wrong = 0
        for block in slide.blocks():
            block = np.ascontiguousarray(block, dtype=self.dtype)
            wrong += block.size - int(np.isfinite(block).sum())
            _write(block, out)
        if wrong:
            raise BadSlide(
                f"features: {wrong:,} of {n * d:,} values are NaN or infinite; compute them again"
            )
        self.n_features = d
        self.slides.append(Kept(name, n, slide.told))
        if slide.coords is None:
            self.without_coords.append(name)
        else:
            self.coords.append(slide.coords)
        self.instance_labels.append(slide.instance_labels)

    def _require_same(self, name: str, d: int, told: Told) -> None:
        """One encoder, magnification, patch size and number of features in a cohort."""
        facts = extraction.known(asdict(told))
        for fact, title in extraction.ONE_PER_COHORT.items():
            if fact not in facts or not extraction.decisive(fact, facts):
                continue
            first, who = self.said.setdefault(fact, (facts[fact], name))
            if not extraction.same(fact, first, facts[fact]):
                raise ValueError(
                    f"{self.listing.folder}: features of two {title}s, {first!r} "
                    f"({self._file(who)}) and {facts[fact]!r} ({self._file(name)}). "
                    f"Keep those of one {title} in a folder."
                )
        if self.n_features not in (None, d):
            raise ValueError(
                f"{self.listing.folder}: {self.n_features} features in "
                f"{self._file(self.slides[0].name)}, {d} in {self._file(name)}. Keep those of one "
                "encoder in a folder."
            )

    def _file(self, name: str) -> str:
        return self.listing.files[name].name

    def _require_type(self, dtype: np.dtype) -> None:
        if dtype.kind not in "fiub" or dtype.itemsize > 8:
            raise BadSlide(f"features: expected float16, 32 or 64, found type {dtype}")
        own = dtype.newbyteorder("=") if dtype.kind == "f" else np.dtype(np.float64)
        if self.dtype is None:
            self.dtype = own
        wider = np.result_type(self.dtype, own)
        if wider != self.dtype:
            raise _Wider(wider)

    def arrays(self) -> dict[str, Any]:
        """Positions and instance labels, slide after slide."""
        found: dict[str, Any] = {}
        if self.coords and not self.without_coords:
            axes = {c.shape[1] for c in self.coords}
            if len(axes) > 1:
                raise ValueError(
                    f"{self.listing.folder}: positions with {sorted(axes)} axes; expected the same "
                    "number in all files."
                )
            found["coords"] = np.concatenate(self.coords)
        if any(labels is not None for labels in self.instance_labels):
            found["instance_labels"] = np.concatenate(
                [
                    np.full(slide.n, -1) if labels is None else labels
                    for slide, labels in zip(self.slides, self.instance_labels)
                ]
            )
        return found

    def index(self) -> dict[str, Any]:
        """What goes into the index of the cache."""
        assert self.dtype is not None and self.n_features is not None
        return {
            "n_features": self.n_features,
            "dtype": self.dtype.str,
            "bytes": sum(s.n for s in self.slides) * self.n_features * self.dtype.itemsize,
            "slides": [asdict(s) for s in self.slides],
            "without_coords": self.without_coords,
            "empty": self.empty,
            "bad": self.bad,
        }
