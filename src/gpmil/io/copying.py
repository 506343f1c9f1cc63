"""Feature files copied into one file, in one pass: their features, and what they say besides."""

import errno
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import IO, Any

import numpy as np

from gpmil.data import extraction
from gpmil.data.checks import count
from gpmil.data.digests import FeatureDigest
from gpmil.files.foreign import reading
from gpmil.io.formats import Listing, Opener
from gpmil.io.slides import BadSlide, Slide, SlideFacts, SlideLevel

FEATURES = "features of a slide"
SKIP = "Repair or remove the file, or leave it out with skip_bad=True."


@dataclass(frozen=True)
class CopiedSlide:
    """A slide whose features are in the copy: its number of patches, and what its file says."""

    name: str
    n: int
    told: SlideFacts
    digest: int  # of its features as they are in the copy


class _WiderType(Exception):
    """A file with a wider type of numbers than those before it: begin again with that type."""

    def __init__(self, dtype: np.dtype) -> None:
        self.dtype = dtype


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


def copied(listing: Listing, open_slide: Opener, file: Path, skip_bad: bool) -> "CohortCopy":
    """All features in `file`, in the widest of their types, and what was read beside them."""
    dtype: np.dtype | None = None
    while True:
        copy = CohortCopy(listing, open_slide, dtype, skip_bad)
        try:
            with file.open("wb") as out:
                copy.run(out)
            return copy
        except _WiderType as wider:
            dtype = wider.dtype


class CohortCopy:
    """One pass over the files: features into one file, the rest into lists."""

    def __init__(
        self, listing: Listing, open_slide: Opener, dtype: np.dtype | None, skip_bad: bool
    ) -> None:
        self.listing, self.open_slide = listing, open_slide
        self.dtype, self.skip_bad = dtype, skip_bad
        self.n_features: int | None = None
        self.said: dict[str, tuple[Any, str]] = {}  # a fact, and the slide that says so
        self.slides: list[CopiedSlide] = []
        self.coords: list[np.ndarray] = []
        self.without_coords: list[str] = []
        self.instance_labels: list[np.ndarray | None] = []
        self.empty: list[str] = []
        self.bad: list[tuple[str, str]] = []

    def run(self, out: IO[bytes]) -> None:
        """Copy slide by slide; of one that cannot be used nothing stays."""
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
        wrong, digest = 0, FeatureDigest()
        for block in slide.blocks():
            block = np.ascontiguousarray(block, dtype=self.dtype)
            wrong += block.size - int(np.isfinite(block).sum())
            digest.add(block)
            _write(block, out)
        if wrong:
            raise BadSlide(
                f"features: {wrong:,} of {n * d:,} values are NaN or infinite; compute them again"
            )
        self.n_features = d
        self.slides.append(CopiedSlide(name, n, slide.told, digest.number))
        if slide.coords is None:
            self.without_coords.append(name)
        else:
            self.coords.append(slide.coords)
        self.instance_labels.append(slide.instance_labels)

    def _require_same(self, name: str, d: int, told: SlideFacts) -> None:
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
            raise _WiderType(wider)

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
            "slides": [asdict(s) for s in self.slides],
            "without_coords": self.without_coords,
            "empty": self.empty,
            "bad": self.bad,
        }


def _write(block: np.ndarray, out: IO[bytes]) -> None:
    try:
        out.write(block.data)
    except OSError as error:
        # Said here: around this the file of a slide is open, and would be thought damaged.
        raise cannot_write(error, Path(out.name).parent) from error


def cannot_write(error: OSError, folder: Path) -> ValueError:
    """What to say of a folder that takes no more."""
    reason = "the disk is full" if error.errno == errno.ENOSPC else f"cannot be written to: {error}"
    return ValueError(f"{folder}: {reason}. Name another folder with cache=.")
