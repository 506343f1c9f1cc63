"""Tables of patches in a finished run: RUN/patches/<slide>.csv.gz, or one such file.

What `gpmil heatmap` and `gpmil qupath` read. Nothing here needs the model or torch.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from functools import reduce
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import typer
from rich.console import Console
from rich.progress import track

from gpmil.data.graphs import infer_step
from gpmil.files.foreign import BadFile, reading
from gpmil.runs.class_table import class_layer
from gpmil.runs.files import (
    ATTENTION,
    CARD,
    ENDING,
    PATCH_COLUMNS,
    PATCHES,
    PREDICTIONS,
    read_card,
    read_patches,
    read_predictions,
    repeat_folder,
    slide_name,
)
from gpmil.show import slides
from gpmil.show.qupath import Patches
from gpmil.show.slides import SlideInfo

KINDS = ("coupling", "repeat")  # of folders in patches/
# What a run notes as "units" and "anchor" where positions are not level-0 pixels, top left.
MICRONS, CENTRE = "microns", "centre"
SHOWN = 3  # names in a message

Pair = tuple[float, float]


@dataclass(frozen=True)
class MapOptions:
    """What was asked for on the command line, of both commands."""

    run: Path  # a finished run, or one table
    out: Path | None = None  # in the run
    slides: Path | None = None  # folder of slide files
    names: Sequence[str] | None = None  # only these slides
    step: float | None = None
    coupling: float | None = None  # one of several; the smallest
    repeat: int | None = None  # of a cross-validation; where a slide is tested first
    overwrite: bool = False  # make everything again

    @property
    def card(self) -> dict[str, Any]:
        """What config.json says of it."""
        which = {"coupling": self.coupling, "repeat": self.repeat}
        return {name: value for name, value in which.items() if value is not None}


@dataclass(frozen=True)
class PatchTable:
    """The table of one slide's patches; `stem` is the name of its file, safe on any disk."""

    file: Path

    @property
    def stem(self) -> str:
        """Name of the file without its ending."""
        return self.file.name.removesuffix(ENDING)

    @property
    def slide(self) -> str:
        """Name of the slide."""
        return slide_name(self.file)

    @property
    def title(self) -> str:
        """Name of the slide, and the coupling or repeat if the run has several."""
        kind, _, which = self.file.parent.name.partition("-")
        return f"{self.slide}, {kind} {which}" if kind in KINDS else self.slide

    @property
    def part(self) -> str:
        """The folder of its coupling or repeat, such as "coupling-0.5"; "" if there is one only."""
        name = self.file.absolute().parent.name
        return name if name.partition("-")[0] in KINDS else ""

    def read(self) -> Patches:
        """Positions and predictions; a ValueError names the file and what is wrong with it."""
        frame = read_patches(self.file)
        missing = [c for c in ("x", "y", "probability") if c not in frame]
        if missing:
            raise ValueError(
                f"{self.file}: expected columns x, y, probability, found no {', '.join(missing)}. "
                "Patches without positions cannot be drawn."
            )
        names = ("sd", "std", "p_value", "flagged", "doubt", "unlike")
        given = {c: frame[c].to_numpy() for c in names if c in frame}
        flagged = given.get("flagged")
        if flagged is not None:  # none where no patch was tested
            flagged = None if np.isnan(flagged).all() else np.nan_to_num(flagged) != 0
        return Patches(
            frame[["x", "y"]].to_numpy(),
            frame["probability"].to_numpy(),
            given.get("sd", given.get("std")),
            given.get("p_value"),
            flagged,
            given.get("doubt"),
            given.get("unlike"),
            class_layer(frame),
        )


def tables(wanted: MapOptions) -> list[PatchTable]:
    """The tables of a run, in order of name; only those of the slides wanted, where any are."""
    run = wanted.run
    if run.is_file():
        found = [_one(wanted)]
    elif not run.is_dir():
        raise ValueError(f"no run at {run}: name the folder that gpmil predict or gpmil cv wrote.")
    else:
        tested = _tested(wanted)
        found = [PatchTable(file) for file in sorted(_folder(wanted).glob(f"*{ENDING}"))]
        found = [t for t in found if tested is None or t.slide in tested]
    if not found:
        why = "is the run finished, and does its model predict patches?"
        if (run / ATTENTION).is_dir():
            why = (
                f"its model says what it looks at ({ATTENTION}/), not which patches are positive. "
                "Python draws that (docs, “Maps of attention”)."
            )
        raise ValueError(f"{run} holds no tables of patches (patches/<slide>{ENDING}): {why}")
    if not wanted.names:
        return found
    known = {table.slide: table for table in found}
    unknown = [name for name in wanted.names if name not in known]
    if unknown:
        raise ValueError(
            f"{run} has no slide {listed(unknown)}; it has {len(known)}: {listed(list(known))}."
        )
    return [known[name] for name in dict.fromkeys(wanted.names)]


def _one(wanted: MapOptions) -> PatchTable:
    if not wanted.run.name.endswith(ENDING):
        raise ValueError(f"{wanted.run} is no table of patches: expected a file *{ENDING}.")
    if wanted.card:
        raise ValueError(f"{wanted.run} is one table: leave out --{next(iter(wanted.card))}.")
    return PatchTable(wanted.run)


def _folder(wanted: MapOptions) -> Path:
    """The folder with the tables of the coupling, or of the repeat, that is asked for."""
    place = wanted.run / PATCHES
    couplings = _numbered(place, "coupling")
    if wanted.coupling is not None and wanted.coupling not in couplings:
        has = f"couplings {_words(couplings)}" if couplings else "one coupling alone: leave it out"
        raise ValueError(f"--coupling {wanted.coupling:g}: {wanted.run} has {has}.")
    if couplings:
        chosen = min(couplings) if wanted.coupling is None else wanted.coupling
        if wanted.coupling is None and len(couplings) > 1:
            say(f"coupling {chosen:g} of {_words(couplings)}: --coupling chooses another")
        return couplings[chosen]
    return place if wanted.repeat is None else _numbered(place, "repeat").get(wanted.repeat, place)


def _numbered(place: Path, kind: str) -> dict[float, Path]:
    """Folders such as coupling-0.5, by their number in rising order."""
    found = {}
    for folder in place.glob(f"{kind}-*"):
        try:
            found[float(folder.name.removeprefix(f"{kind}-"))] = folder
        except ValueError:
            continue
    return dict(sorted(found.items()))


def _words(numbers: dict[float, Path]) -> str:
    return ", ".join(f"{number:.12g}" for number in numbers)


def _tested(wanted: MapOptions) -> set[str] | None:
    """The slides that the repeat asked for tests, as predictions.csv says; None: all."""
    if wanted.repeat is None:
        return None
    tested = _by_repeat(wanted.run)
    asked = str(wanted.repeat)
    if asked not in tested:
        has = f"repeats {', '.join(tested)}" if tested else "no repeats: leave it out"
        raise ValueError(f"--repeat {asked}: {wanted.run} has {has}.")
    kept = wanted.run / PATCHES / repeat_folder(asked)
    if asked != next(iter(tested)) and not kept.is_dir():
        raise ValueError(
            f"--repeat {asked}: {wanted.run} kept no patches of this repeat. Repeat it with this "
            "version: gpmil cv --config."
        )
    return tested[asked]


def _by_repeat(run: Path) -> dict[str, set[str]]:
    """The slides that each repeat tests; none where the run is no cross-validation."""
    if not (run / PREDICTIONS).exists():
        return {}
    frame = read_predictions(run, ["slide"])
    if "repeat" not in frame:
        return {}
    return {str(k): set(own["slide"]) for k, own in frame.groupby("repeat", sort=False)}


def config(run: Path) -> dict[str, Any]:
    """config.json of the run; empty where there is none."""
    place = run_of(run)
    return {} if place is None else read_card(place / CARD)


def run_of(run: Path) -> Path | None:
    """The folder of the run that a table belongs to; None where it lies alone."""
    # A table lies in patches/, or in a folder of its coupling or repeat there.
    places = list(run.absolute().parents)[1:3] if run.is_file() else [run]
    return next((place for place in places if (place / CARD).is_file()), None)


def known_sides(card: dict[str, Any], key: str) -> dict[str, Pair]:
    """Steps (or sizes) that a run has noted: {slide: number or [x, y]}, as `read_card` checks."""
    noted = card.get(key) or {}
    return {slide: pair(side, f"{key} of {slide} in {CARD}") for slide, side in noted.items()}


def pair(value: float | list[float], name: str) -> Pair:
    """A positive number, or one per axis, as two."""
    given = np.asarray(value, dtype=np.float64).ravel()
    if given.size not in (1, 2) or not (np.isfinite(given) & (given > 0)).all():
        raise ValueError(f"{name}: expected a positive number, or two, found {value!r}.")
    return float(given[0]), float(given[-1])


# --- Steps that are not noted ---------------------------------------------------------------------
@dataclass(frozen=True)
class Scales:
    """Ends of the scales that all maps of a run share."""

    probability: float = 0.0  # the largest, as are the others
    std: float = 0.0
    doubt: Pair = (1.0, 0.0)  # smallest and largest

    @classmethod
    def of(cls, patches: Patches) -> "Scales":
        """Of one slide."""
        doubt = _known(patches.doubt)
        odd, own = _known(patches.unlike), _known(patches.probability)
        ends = (float(doubt.min(initial=1.0)), float(doubt.max(initial=0.0)))
        largest = float(max(own.max(initial=0.0), odd.max(initial=0.0)))
        return cls(largest, float(_known(patches.std).max(initial=0.0)), ends)

    def __or__(self, other: "Scales") -> "Scales":
        """Of both."""
        doubt = min(self.doubt[0], other.doubt[0]), max(self.doubt[1], other.doubt[1])
        probability = max(self.probability, other.probability)
        return Scales(probability, max(self.std, other.std), doubt)


def _known(values: np.ndarray | None) -> np.ndarray:
    return np.zeros(0) if values is None else values[np.isfinite(values)]


@dataclass(frozen=True)
class Overview:
    """What the run has noted, and what a first look at all its tables shows."""

    steps: dict[str, Pair]
    sizes: dict[str, Pair]
    microns: bool  # whether positions, steps and sizes are microns
    centres: bool  # whether positions are centres of patches, not upper left corners
    scales: "Scales"
    filled: list[PatchTable]  # the tables that have patches

    def facts(self, table: PatchTable, file: Path | None) -> list[Any]:
        """What a file made of the table depends on beside the table itself."""
        step = self.steps[table.slide]
        slide = None
        if file is not None:  # gigabytes: told by size and time
            slide = [file.name, file.stat().st_size, file.stat().st_mtime_ns]
        size = self.sizes.get(table.slide, step)
        return [table.title, step, size, self.microns, self.centres, slide]

    def placed(self, table: PatchTable, info: SlideInfo | None) -> tuple[Patches, Pair, Pair]:
        """Patches, step and size of a slide; in level-0 pixels where its file is known."""
        patches, step = table.read(), self.steps[table.slide]
        size = self.sizes.get(table.slide, step)
        if self.centres:
            patches = replace(patches, coords=patches.coords - np.array(size) / 2)
        if info is None:
            return patches, step, size
        if self.microns:
            if info.mpp is None:
                raise ValueError(
                    f"slide {table.slide}: positions are in microns, and its file does not say how "
                    "many microns a pixel has. Leave this slide file out."
                )
            x, y = info.mpp
            patches = replace(patches, coords=patches.coords / [x, y])
            step, size = (step[0] / x, step[1] / y), (size[0] / x, size[1] / y)
        check_inside(patches, step, info, table.slide)
        return patches, step, size


def look(found: Sequence[PatchTable], card: dict[str, Any], step: float | None = None) -> Overview:
    """Read every table once. What had to be inferred or left out is said, in a line each.

    Scales are those of all slides of the run: maps that are added later compare.
    """
    noted = known_sides(card, "steps")
    steps: dict[str, Pair | None] = {}
    inferred, empty, filled = [], [], []
    scales = reduce(Scales.__or__, (_scales(table) for table in _others(found)), Scales())
    for table in found:
        patches = table.read()
        if not len(patches):
            empty.append(table.slide)
            continue
        filled.append(table)
        scales |= Scales.of(patches)
        if step is not None:
            steps[table.slide] = pair(step, "--step")
        elif table.slide in noted:
            steps[table.slide] = noted[table.slide]
        else:
            inferred.append(table.slide)
            steps[table.slide] = _shown_step(patches)
    if empty:
        say(f"no patches, left out: {listed(empty)}")
    if not filled:
        raise ValueError(
            f"{found[0].file}: no slide has a patch in its table: there is nothing to draw."
        )
    return Overview(
        _fill(steps, inferred),
        known_sides(card, "sizes"),
        card.get("units") == MICRONS,
        card.get("anchor") == CENTRE,
        scales,
        filled,
    )


def _others(found: Sequence[PatchTable]) -> list[PatchTable]:
    """The tables of the run's other slides."""
    asked, places = {table.file for table in found}, {table.file.parent for table in found}
    files = (f for p in places if PATCHES in (p.name, p.parent.name) for f in p.glob(f"*{ENDING}"))
    return [PatchTable(file) for file in files if file not in asked]


def _scales(table: PatchTable) -> Scales:
    """Nothing where a table is broken: who asks for its slide is told."""
    wanted = [field.name for field in fields(Patches) if field.name in PATCH_COLUMNS]
    try:
        with reading(table.file, "a table of patches"):
            frame = pd.read_csv(table.file, usecols=lambda name: name in ("sd", *wanted))
            given = {c: frame[c].to_numpy(float) for c in frame}
    except BadFile:
        return Scales()
    good: dict[str, Any] = {
        c: np.where(PATCH_COLUMNS[c].good(v), v, np.nan) for c, v in given.items()
    }
    std = good.pop("sd", good.pop("std", None))
    nowhere = np.full(len(frame), np.nan)
    return Scales.of(Patches(nowhere, good.pop("probability", nowhere), std, **good))


def _shown_step(patches: Patches) -> Pair | None:
    """The step that a slide's coordinates show."""
    found = infer_step(np.asarray(patches.coords, float), np.array([0, len(patches)]))[0]
    return (float(found[0]), float(found[1])) if np.isfinite(found).all() else None


def _fill(steps: dict[str, Pair | None], inferred: Sequence[str]) -> dict[str, Pair]:
    """Slides that show no step have the most frequent one of the others."""
    usual = Counter(step for step in steps.values() if step is not None).most_common(1)
    if not usual:
        raise ValueError(
            f"the distance of neighbouring patches is not noted in {CARD}, and the positions do "
            "not show it (patches not in lines, or only one). Give --step."
        )
    filled = {slide: step or usual[0][0] for slide, step in steps.items()}
    if inferred:
        times = Counter(filled[slide] for slide in inferred).most_common(SHOWN)
        shown = ", ".join(f"{x:g} x {y:g} ({n} slide{'s'[: n > 1]})" for (x, y), n in times)
        say(f"step not noted in {CARD}; the positions show {shown}. --step gives another")
    return filled


# --- Slide files ----------------------------------------------------------------------------------
def slide_files(folder: Path | None, found: Sequence[PatchTable]) -> dict[str, Path]:
    """The slide file of each table's slide; slides without one are named, once."""
    if folder is None:
        return {}
    files = slides.find(folder)
    matched = {t.slide: files[t.slide] for t in found if t.slide in files}
    if not matched:
        raise ValueError(
            f"none of the {len(found)} slides ({listed([t.slide for t in found])}) has a file in "
            f"{folder}: expected <slide>.svs or the like, found "
            f"{listed(sorted(files)) if files else 'no slide files'}."
        )
    without = [t.slide for t in found if t.slide not in matched]
    if without:
        say(f"no slide file in {folder} for {len(without)} of {len(found)}: {listed(without)}")
    return matched


def check_inside(patches: Patches, step: Pair, info: SlideInfo, slide: str) -> None:
    """Refuse positions that cannot be level-0 pixels of this slide."""
    low, high = patches.coords.min(axis=0), patches.coords.max(axis=0)
    if (low + step > 0).all() and (high < info.size).all():
        return
    raise ValueError(
        f"slide {slide}: its patches lie at x {low[0]:g} to {high[0]:g}, y {low[1]:g} to "
        f"{high[1]:g}, outside the slide file of {info.size[0]} x {info.size[1]} pixels. Is the "
        "file another slide, or are the positions in microns or cells and not level-0 pixels?"
    )


# --- Words ----------------------------------------------------------------------------------------
def listed(names: Sequence[str]) -> str:
    """The first few names.

    >>> listed(["a", "b"]), listed(list("abcdef"))
    ('a, b', 'a, b, c, ...')
    """
    return ", ".join(names[:SHOWN]) + (", ..." if len(names) > SHOWN else "")


def say(text: str) -> None:
    """A line beside the results."""
    typer.echo(text, err=True)


def counted(found: Sequence[PatchTable], what: str) -> Iterator[PatchTable]:
    """The tables one by one, with a bar on a terminal."""
    console = Console(stderr=True)
    hidden = not console.is_terminal
    yield from track(found, what, console=console, transient=True, disable=hidden)
