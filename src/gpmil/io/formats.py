"""Which tool wrote what is at a path, told by names of folders and files, and by one look inside.

A new format is a module with `open_slide(path, beside)`, a line in `OPEN` and one in `_candidates`.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from pathlib import Path

import h5py

from gpmil.data.checks import listed
from gpmil.files.foreign import reading
from gpmil.io import clam, h5, slideflow, stamp, torchmil, trident
from gpmil.io.labels import key
from gpmil.io.slides import SLIDE_LEVEL, BadSlide, Slide

Opener = Callable[[Path, Path | None], AbstractContextManager[Slide]]

OPEN: dict[str, Opener] = {
    "trident": trident.open_slide,
    "clam": clam.open_slide,
    "stamp": stamp.open_slide,
    "huggingface": h5.open_slide,
    "slideflow": slideflow.open_slide,
    "torchmil": torchmil.open_slide,
    "npy": torchmil.open_slide,
}
H5 = ("trident", "clam", "stamp", "huggingface")
H5_ENDINGS = (".h5", ".hdf5")
SLIDE_FOLDER = "slide_features_"
NOT_FEATURES = ("patches", "masks", "stitches", "contours", "thumbnails", "visualization")

UNDERSTOOD = """\
  a job folder of TRIDENT, or its folder features_<encoder>
  a folder of CLAM with h5_files or pt_files, or one of these
  a folder of STAMP with one .h5 per slide, or any folder with features and coords in .h5
  a folder of slideflow: .pt with .index.npz
  a folder of torchmil: features, coords, labels, inst_labels
  a folder of .npy, one per slide"""


@dataclass(frozen=True)
class Listing:
    """Files of a cohort, not yet opened; one of `formats` wrote them."""

    formats: tuple[str, ...]
    folder: Path
    files: dict[str, Path]  # by the name of the slide
    beside: dict[str, Path] = field(default_factory=dict)  # patches, or index, of the slide
    others: tuple[Path, ...] = ()  # whatever else is read


def find(path: Path, format: str | None = None) -> Listing | None:
    """The feature files at a path; None where there are none. Nothing is opened."""
    if format is not None and format not in OPEN:
        raise ValueError(f"format: expected one of {', '.join(OPEN)}, found {format!r}.")
    if path.is_file():
        found = list(_flat(path.parent, [path]))
    else:
        found = list(_candidates(path)) or list(_below(path))
    fitting = [one for one in found if format is None or format in one.formats]
    if not fitting and (found or format is not None):
        what = listed(" or ".join(one.formats) for one in found) or "no feature files"
        raise ValueError(
            f"{path}: expected files of format {format!r}, found {what}. "
            f"Understood are\n{UNDERSTOOD}"
        )
    if len(fitting) > 1:
        choice = "\n".join(f"  {one.folder} ({' or '.join(one.formats)})" for one in fitting)
        raise ValueError(
            f"{path}: found features more than once. Name one of these folders, or its format "
            f"with format=:\n{choice}"
        )
    if not fitting:
        _refuse_slide_level(path)
        return None
    only = fitting[0]
    return only if format is None else _only(only, format)


def _only(listing: Listing, format: str) -> Listing:
    return replace(listing, formats=(format,))


def opener(listing: Listing) -> tuple[str, Opener]:
    """The format of the files, by the first of them that can be opened, and what opens them."""
    if len(listing.formats) == 1:
        return listing.formats[0], OPEN[listing.formats[0]]
    for path in listing.files.values():
        try:
            with h5.opened(path) as file, reading(path, h5.WHAT, BadSlide):
                name = _recognise(file)
        except BadSlide:
            continue
        return name, OPEN[name]
    return "huggingface", h5.open_slide


def _recognise(file: h5py.File) -> str:
    """Which tool wrote an HDF5 file."""
    if "feats" in file or "patch_embeddings" in file:
        return "stamp"
    features = h5.dataset(file, "features")
    if len(features.shape) == 3:
        return "huggingface"
    said = {*features.attrs, *(file["coords"].attrs if "coords" in file else ())}
    if said & {"patch_size_level0", "target_magnification", "encoder"}:
        return "trident"
    return "clam"


# ------------------------------------------------------------------ what is there


def _candidates(folder: Path) -> Iterator[Listing]:
    """Every set of feature files in a folder, as its tool lays it out."""
    if (folder / "features").is_dir():
        yield from _torchmil(folder)
    for name in ("h5_files", "pt_files"):
        if (folder / name).is_dir():
            listing = next(_flat(folder / name, _visible(folder / name)), None)
            if listing is not None:
                yield _only(listing, "clam")
                break  # both hold the same features, and only the first has positions
    patchings = [p for p in _visible(folder) if p.is_dir() and trident.PATCHING.match(p.name)]
    for place in [folder, *patchings]:
        for inner in _visible(place):
            if inner.is_dir() and inner.name.startswith(trident.FOLDER):
                for listing in _flat(inner, _visible(inner)):
                    yield _only(listing, "trident")
    if not folder.name.startswith(SLIDE_FOLDER):
        cut = trident.PATCHING.match(folder.parent.name)
        inside_job = folder.name.startswith(trident.FOLDER) and cut
        for listing in _flat(folder, _visible(folder)):
            yield _only(listing, "trident") if inside_job else listing


def _below(folder: Path) -> Iterator[Listing]:
    """Feature files one folder down, such as STAMP's folder of an extractor."""
    for inner in _visible(folder):
        features = not inner.name.startswith((*NOT_FEATURES, SLIDE_FOLDER))
        if inner.is_dir() and features:
            yield from _flat(inner, _visible(inner))


def _visible(folder: Path) -> list[Path]:
    try:
        return sorted(p for p in folder.iterdir() if not p.name.startswith("."))
    except OSError as error:
        raise ValueError(f"{folder} cannot be listed: {error}.") from error


def _flat(folder: Path, inside: Iterable[Path]) -> Iterator[Listing]:
    """The files right in a folder, one listing a kind."""
    files = [p for p in inside if not p.is_dir()]  # a link to nowhere is a file that is missing
    tables = [p for p in files if p.suffix.lower() in H5_ENDINGS]
    tensors = [p for p in files if p.suffix == ".pt"]
    arrays = [p for p in files if p.suffix == ".npy"]
    if tables:
        named = _by_name(tables)
        yield Listing(H5, folder, named, _patches(folder, named))
    if tensors:
        named = _by_name(tensors)
        indices = {n: p.with_name(n + slideflow.INDEX) for n, p in named.items()}
        indices = {n: p for n, p in indices.items() if p.is_file()}
        config = folder / slideflow.CONFIG
        if indices or config.is_file():
            others = (config,) if config.is_file() else ()
            yield Listing(("slideflow",), folder, named, indices, others)
        else:
            yield Listing(("clam",), folder, named)
    if arrays:
        yield Listing(("npy",), folder, _by_name(arrays))


def _torchmil(folder: Path) -> Iterator[Listing]:
    files = [p for p in _visible(folder / "features") if p.suffix in (".npy", *H5_ENDINGS)]
    # A folder called "features" alone may be anybody's.
    if files and any((folder / name).is_dir() for name in torchmil.FOLDERS):
        parts = [folder / name / p.name for name in torchmil.FOLDERS for p in files]
        others = tuple(p for p in parts if p.is_file())
        yield Listing(("torchmil",), folder / "features", _by_name(files), others=others)


def _by_name(files: Iterable[Path]) -> dict[str, Path]:
    """Files by the name of their slide; two of one slide are an error."""
    named: dict[str, Path] = {}
    seen: dict[str, Path] = {}
    for path in files:
        other = seen.setdefault(key(path.name), path)
        if other is not path:
            raise ValueError(
                f"{path.parent}: two files of one slide, {other.name} and {path.name}. Keep one."
            )
        named[path.stem] = path
    return named


def _patches(folder: Path, named: dict[str, Path]) -> dict[str, Path]:
    """The files of the patches, looked for in ``patches`` here and up to two folders above."""
    there: dict[str, Path] = {}
    for place in (folder.parent.parent, folder.parent, folder):
        if (place / "patches").is_dir():
            there |= {p.stem: p for p in _visible(place / "patches") if p.suffix in H5_ENDINGS}
    found = {n: there.get(n, there.get(f"{n}_patches")) for n in named}
    return {n: p for n, p in found.items() if p is not None}


def _refuse_slide_level(path: Path) -> None:
    """A folder with features of whole slides only."""
    if not path.is_dir():
        return
    places = [
        path,
        *_visible(path),
        *(q for p in _visible(path) if p.is_dir() for q in _visible(p)),
    ]
    slide_level = [p for p in places if p.is_dir() and p.name.startswith(SLIDE_FOLDER)]
    if slide_level:
        raise ValueError(f"{slide_level[0]} {SLIDE_LEVEL}")
