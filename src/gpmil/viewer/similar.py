"""The most similar patches of a cohort: nearest in the feature space of the model.

Features are found again through config.json: the kept copy of slide files, mapped into memory, or
a table that is not too large. Nothing is copied or written for it. Where features are not found,
or are not in the order of the run's tables, there are no similar patches, and the log says why.
"""

import logging
import mmap
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Bool, Float, Int, Num

from gpmil.data.checks import offsets_of
from gpmil.files import persistence
from gpmil.viewer.cohort import Missing, ShownCohort, ShownRun, as_dict, found_again, model_folder
from gpmil.viewer.maps import Maps, PatchMap

logger = logging.getLogger("gpmil")

ROWS = 2048  # of features at a time
MOST_BYTES = 100_000_000  # of a table that is read whole
SPARE = 32  # more candidates than wanted: float32 may confuse the last ones
DIGITS = 1e-8  # positions are written with nine digits


@dataclass(frozen=True)
class Features:
    """The features of a cohort, slide after slide."""

    rows: Num[np.ndarray, "N D"]
    offsets: Int[np.ndarray, " b1"]
    names: list[str]
    coords: Num[np.ndarray, "N k"] | None

    def place(self, row: int) -> tuple[int, int]:
        """The slide of a row, and the number of the patch in it."""
        b = int(np.searchsorted(self.offsets, row, side="right")) - 1
        return b, row - int(self.offsets[b])


@dataclass(frozen=True)
class Space:
    """x -> (x - mean) / scale, or (x - mean) components' / scale: what the kernel sees.

    Distances do not depend on the mean, which is left out.
    """

    scale: Float[np.ndarray, " s"]
    components: Float[np.ndarray, "d D"] | None = None

    def distances(
        self, rows: Num[np.ndarray, "n D"], to: Num[np.ndarray, " D"], dtype: Any = np.float64
    ) -> Float[np.ndarray, " n"]:
        """|z_i - z|, the difference taken first: no digits are lost to a large mean."""
        found = np.empty(len(rows))
        scale, point = self.scale.astype(dtype), np.asarray(to, dtype=dtype)
        for start in range(0, len(rows), ROWS):
            apart = np.asarray(rows[start : start + ROWS], dtype=dtype) - point
            if self.components is not None:
                apart = apart @ self.components.T.astype(dtype)
            apart /= scale
            found[start : start + ROWS] = np.sqrt(np.einsum("ij,ij->i", apart, apart))
        return found


class Similar:
    """Similar patches in all runs; features of several runs on the same data are shared."""

    def __init__(self, cohort: ShownCohort, maps: Maps) -> None:
        self.cohort, self.maps = cohort, maps
        self._index = {name: k for k, name in enumerate(cohort.names)}
        self._lock = threading.Lock()
        self._opened: dict[str, Features] = {}
        self._spaces: dict[int, Space] = {}
        self._in_order: dict[tuple[int, int], bool] = {}
        self._sources: list[tuple[str, Callable[[], Features]] | None] = []
        self._reasons: list[str] = []
        for run in cohort.runs:
            source, reason = _looked_for(run)
            self._sources.append(source)
            self._reasons.append(reason)
            if source is None:
                logger.info("no similar patches for run %s: %s", run.name, reason)

    @property
    def possible(self) -> bool:
        """Whether features of any run were found."""
        return any(source is not None for source in self._sources)

    def nearest(
        self, run: int, slide: int, index: int, count: int, same_slide: bool = True
    ) -> list[dict[str, Any]]:
        """The patches nearest to one, itself left out, the nearest first."""
        known, space = self._features(run), self._space(run)
        places = {name: b for b, name in enumerate(known.names)}
        own = places.get(self.cohort.slide(slide))
        if own is None or not self._fits(run, known, own):
            raise Missing(
                f"the features found for run {self.cohort.run(run).name} are not those of slide "
                f"{self.cohort.slide(slide)!r}: other names, numbers or positions of patches."
            )
        row = int(known.offsets[own]) + index
        allowed = self._candidates(run, known, own if not same_slide else None)
        allowed[row] = False
        distance = space.distances(known.rows, known.rows[row], np.float32)
        distance[~allowed] = np.inf
        _release(known.rows)
        return self._first(run, known, space, distance, row, count)

    def _first(
        self,
        run: int,
        known: Features,
        space: Space,
        distance: Float[np.ndarray, " N"],
        row: int,
        count: int,
    ) -> list[dict[str, Any]]:
        while True:
            most = min(count + SPARE, len(distance))
            chosen = np.sort(np.argpartition(distance, most - 1)[:most])
            chosen = chosen[np.isfinite(distance[chosen])]
            exact = space.distances(known.rows[chosen], known.rows[row])
            order = np.lexsort((chosen, exact))[:count]
            wrong = {
                b for i in chosen[order] if not self._fits(run, known, b := known.place(int(i))[0])
            }
            if not wrong:
                return [self._card(run, known, int(chosen[i]), float(exact[i])) for i in order]
            for b in wrong:
                distance[known.offsets[b] : known.offsets[b + 1]] = np.inf

    def _card(self, run: int, known: Features, row: int, distance: float) -> dict[str, Any]:
        b, index = known.place(row)
        slide = self._index[known.names[b]]
        own = self.maps.get(run, slide)
        where = {"x": float(own.x[index]), "y": float(own.y[index])}
        return {"slide": slide, "index": index, **where, "distance": distance}

    def _candidates(self, run: int, known: Features, without: int | None) -> Bool[np.ndarray, " N"]:
        """Patches of slides that the run has."""
        table = self.cohort.run(run).tables[self.cohort.run(run).shown]
        there = set(table.index)
        slides = np.array([name in there for name in known.names])
        if without is not None:
            slides[without] = False
        return np.repeat(slides, np.diff(known.offsets))

    def _fits(self, run: int, known: Features, b: int) -> bool:
        """Whether the run's table of a slide has the same patches in the same order."""
        if (run, b) not in self._in_order:
            try:
                own = self.maps.get(run, self._index[known.names[b]])
                fits = _same_patches(known, b, own)
            except (Missing, KeyError):
                fits = False
            if not fits:
                logger.warning("features of %s are not of the run's patches.", known.names[b])
            self._in_order[run, b] = fits
        return self._in_order[run, b]

    def _features(self, run: int) -> Features:
        source = self._sources[run]
        if source is None:
            raise Missing(f"no similar patches: {self._reasons[run]}")
        name, opened = source
        with self._lock:
            if name not in self._opened:
                try:
                    self._opened[name] = opened()
                except (ValueError, OSError) as error:
                    raise Missing(f"no similar patches: {error}") from error
            return self._opened[name]

    def _space(self, run: int) -> Space:
        if run not in self._spaces:
            self._spaces[run] = _space(self.cohort.run(run), self._features(run).rows.shape[1])
        return self._spaces[run]


def _release(rows: Num[np.ndarray, "N D"]) -> None:
    """Let go of the pages of a mapped file, which would count as memory of this process."""
    if isinstance(rows, np.memmap) and hasattr(mmap, "MADV_DONTNEED"):
        rows._mmap.madvise(mmap.MADV_DONTNEED)  # type: ignore[attr-defined]


def _same_patches(known: Features, b: int, own: PatchMap) -> bool:
    start, end = known.offsets[b : b + 2]
    if end - start != len(own):
        return False
    if known.coords is None:
        return True
    columns = zip(known.coords[start:end].T, (own.x, own.y))
    return all(np.allclose(theirs, ours, rtol=DIGITS, atol=0) for theirs, ours in columns)


# --- Where the features are -----------------------------------------------------------------------
def _looked_for(run: ShownRun) -> tuple[tuple[str, Callable[[], Features]] | None, str]:
    """A name and a function that opens the features, or None and why there are none."""
    options = as_dict(run.config.get("options"))
    source = as_dict(options.get("source"))
    if not source.get("data"):
        return None, "the run does not say where its features are."
    kept = run.config.get("cache")
    caches = [] if kept is None else found_again(str(kept), run.folder)
    reason = f"there is nothing at {source['data']} any more."
    for path in found_again(str(source["data"]), run.folder):
        try:
            opened = _opener(path, source, caches)
        except (ValueError, OSError) as error:
            reason = str(error)
            continue
        return (str(path.resolve()), opened), ""
    return None, reason


def _opener(path: Path, source: Mapping[str, Any], caches: list[Path]) -> Callable[[], Features]:
    from gpmil.io import cache, formats, plain

    format = source.get("format")
    listing = None if format in plain.FORMATS else formats.find(path, format)
    if listing is None:
        return _table_opener(path, source)
    for given in (*caches, None):
        found = cache.kept(listing, given)
        if found is not None:
            offsets = offsets_of(np.array([s.n for s in found.slides]))
            names = [s.name for s in found.slides]
            known = Features(found.features, offsets, names, found.coords)
            return lambda: known
    raise ValueError(f"the kept features of {path} are not found, or older than its files.")


def _table_opener(path: Path, source: Mapping[str, Any]) -> Callable[[], Features]:
    from gpmil import io

    files = [path] if path.is_file() else [f for f in path.iterdir() if f.is_file()]
    size = sum(f.stat().st_size for f in files)
    if size > MOST_BYTES:
        raise ValueError(f"{path} has {size / 1e6:.0f} MB, too much to be read for this.")
    columns = ("slide", "label", "positive", "negative", "exclude", "format")
    given = {name: source[name] for name in columns if source.get(name) is not None}

    def opened() -> Features:
        # Labels of another table are not needed, and the columns named may be that table's.
        own = given if source.get("labels") is None else {}
        bags, _ = io.read_with_report(path, graph=None, **own)
        names = [str(name) for name in bags.names]
        return Features(np.asarray(bags.features), bags.offsets, names, bags.coords)

    return opened


def _space(run: ShownRun, n_features: int) -> Space:
    """The feature space of the run's model; plain features where there is none that fits."""
    place = model_folder(run.folder, run.config)
    if place is not None:
        from gpmil.models import saved_checks  # torch, for a page asked for later

        try:
            arrays, _ = persistence.read(place)
            sizes: saved_checks.Symbols = {}
            used = ("feature_components_", "feature_scale_")
            saved_checks.check_arrays(
                arrays, {name: saved_checks.FEATURES[name] for name in used}, sizes
            )
            scales = sizes["scales"]
            if sizes.get("D", scales) == n_features and scales in (1, sizes.get("d", n_features)):
                return Space(arrays["feature_scale_"], arrays.get("feature_components_"))
        except (ValueError, OSError) as error:
            logger.info("run %s: its model was not read (%s).", run.name, error)
    return Space(np.ones(1))
