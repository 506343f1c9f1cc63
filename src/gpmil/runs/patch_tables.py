"""Tables of patches in a finished run: RUN/patches/<slide>.csv.gz, or one such file.

What `gpmil heatmap` and `gpmil qupath` share. Nothing here needs the model or torch.

They go into the run, or into the folder that `--out` names, and are added to what is there. Files
are assembled in `<out>.partial` and moved to `<out>` when all are made, each whole. What was made
from the same table with the same options, now or before, is not made again.
"""

import hashlib
import json
import os
import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TextIO
from urllib.parse import unquote

import numpy as np
import pandas as pd
import typer
from rich.console import Console
from rich.progress import track

from gpmil import __version__
from gpmil.data.graphs import infer_step
from gpmil.files.foreign import BadFile, reading
from gpmil.files.persistence import written_by_someone
from gpmil.runs import files as run_files
from gpmil.show import slides
from gpmil.show.qupath import Patches
from gpmil.show.report import CARD, FORMAT, MADE, PARTIAL, check_target, write_json
from gpmil.show.slides import SlideInfo

ENDING = ".csv.gz"
KINDS = ("coupling", "repeat")  # of folders in patches/
# What a run notes as "units" and "anchor" where positions are not level-0 pixels, top left.
MICRONS, CENTRE = "microns", "centre"
SHOWN = 3  # names in a message

Pair = tuple[float, float]


@dataclass(frozen=True)
class Wanted:
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
class Table:
    """The table of one slide's patches; `stem` is the name of its file, safe on any disk."""

    file: Path

    @property
    def stem(self) -> str:
        """Name of the file without its ending."""
        return self.file.name.removesuffix(ENDING)

    @property
    def slide(self) -> str:
        """Name of the slide; characters that a file name cannot have are written %2F."""
        return unquote(self.stem)

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
        frame = run_files.read_patches(self.file)
        missing = [c for c in ("x", "y", "probability") if c not in frame]
        if missing:
            raise ValueError(
                f"{self.file}: expected columns x, y, probability, found no {', '.join(missing)}. "
                "Patches without positions cannot be drawn."
            )
        given = {c: frame[c].to_numpy() for c in ("sd", "std", "p_value", "flagged") if c in frame}
        flagged = given.get("flagged")
        if flagged is not None:  # none where no patch was tested
            flagged = None if np.isnan(flagged).all() else np.nan_to_num(flagged) != 0
        return Patches(
            frame[["x", "y"]].to_numpy(),
            frame["probability"].to_numpy(),
            given.get("sd", given.get("std")),
            given.get("p_value"),
            flagged,
        )


def tables(wanted: Wanted) -> list[Table]:
    """The tables of a run, in order of name; only those of the slides wanted, where any are."""
    run = wanted.run
    if run.is_file():
        found = [_one(wanted)]
    elif not run.is_dir():
        raise ValueError(f"no run at {run}: name the folder that gpmil predict or gpmil cv wrote.")
    else:
        tested = _tested(wanted)
        found = [Table(file) for file in sorted(_folder(wanted).glob(f"*{ENDING}"))]
        found = [t for t in found if tested is None or t.slide in tested]
    if not found:
        raise ValueError(
            f"{run} holds no tables of patches (patches/<slide>{ENDING}): is the run finished, "
            "and does its model predict patches?"
        )
    if not wanted.names:
        return found
    known = {table.slide: table for table in found}
    unknown = [name for name in wanted.names if name not in known]
    if unknown:
        raise ValueError(
            f"{run} has no slide {listed(unknown)}; it has {len(known)}: {listed(list(known))}."
        )
    return [known[name] for name in dict.fromkeys(wanted.names)]


def _one(wanted: Wanted) -> Table:
    if not wanted.run.name.endswith(ENDING):
        raise ValueError(f"{wanted.run} is no table of patches: expected a file *{ENDING}.")
    if wanted.card:
        raise ValueError(f"{wanted.run} is one table: leave out --{next(iter(wanted.card))}.")
    return Table(wanted.run)


def _folder(wanted: Wanted) -> Path:
    """The folder with the tables of the coupling, or of the repeat, that is asked for."""
    place = wanted.run / "patches"
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


def _tested(wanted: Wanted) -> set[str] | None:
    """The slides that the repeat asked for tests, as predictions.csv says; None: all."""
    if wanted.repeat is None:
        return None
    tested = _by_repeat(wanted.run)
    asked = str(wanted.repeat)
    if asked not in tested:
        has = f"repeats {', '.join(tested)}" if tested else "no repeats: leave it out"
        raise ValueError(f"--repeat {asked}: {wanted.run} has {has}.")
    kept = wanted.run / "patches" / f"repeat-{asked}"
    if asked != next(iter(tested)) and not kept.is_dir():
        raise ValueError(
            f"--repeat {asked}: {wanted.run} kept no patches of this repeat. Repeat it with this "
            "version: gpmil cv --config."
        )
    return tested[asked]


def _by_repeat(run: Path) -> dict[str, set[str]]:
    """The slides that each repeat tests; none where the run is no cross-validation."""
    file = run / "predictions.csv"
    if not file.exists():
        return {}
    frame = run_files.read_predictions(file, ["slide"])
    if not {"slide", "repeat"} <= set(frame):
        return {}
    return {str(k): set(own["slide"]) for k, own in frame.groupby("repeat", sort=False)}


def config(run: Path) -> dict[str, Any]:
    """config.json of the run; empty where there is none."""
    place = _run_of(run)
    return {} if place is None else run_files.read_config(place / CARD)


def _run_of(run: Path) -> Path | None:
    """The folder of the run that a table belongs to; None where it lies alone."""
    # A table lies in patches/, or in a folder of its coupling or repeat there.
    places = list(run.absolute().parents)[1:3] if run.is_file() else [run]
    return next((place for place in places if (place / CARD).is_file()), None)


def with_place(wanted: Wanted, kind: str, found: Sequence[Table]) -> Wanted:
    """Where files go: the folder asked for, else one in the run, or beside a table on its own."""
    if wanted.out is not None:
        check_out(wanted.out, wanted.run)
        return wanted
    beside = wanted.run.parent if wanted.run.is_file() else wanted.run
    return replace(wanted, out=(_run_of(wanted.run) or beside) / kind / found[0].part)


def part_of(found: Sequence[Table]) -> dict[str, str]:
    """What config.json says of the coupling or repeat that the tables are of."""
    return {"part": found[0].part} if found[0].part else {}


def known_sides(card: dict[str, Any], key: str) -> dict[str, Pair]:
    """Steps (or sizes) that a run has noted: {slide: number or [x, y]}."""
    noted = card.get(key) or {}
    if not isinstance(noted, dict):
        raise ValueError(f'{CARD}: expected "{key}" to be {{slide: number}}, found {noted!r}.')
    return {str(slide): pair(side, f"{key} of {slide} in {CARD}") for slide, side in noted.items()}


def pair(value: Any, name: str) -> Pair:
    """A positive number, or one an axis, as two."""
    try:
        given = np.asarray(value, dtype=np.float64).ravel()
    except (TypeError, ValueError):
        given = np.zeros(0)
    if given.size not in (1, 2) or not (np.isfinite(given) & (given > 0)).all():
        raise ValueError(f"{name}: expected a positive number, or two, found {value!r}.")
    return float(given[0]), float(given[-1])


# --- Steps that are not noted ---------------------------------------------------------------------
@dataclass(frozen=True)
class Overview:
    """What the run has noted, and what a first look at all its tables shows."""

    steps: dict[str, Pair]
    sizes: dict[str, Pair]
    microns: bool  # whether positions, steps and sizes are microns
    centres: bool  # whether positions are centres of patches, not upper left corners
    largest_std: float
    filled: list[Table]  # the tables that have patches

    def facts(self, table: Table, file: Path | None) -> list[Any]:
        """What a file made of the table depends on beside the table itself."""
        step = self.steps[table.slide]
        slide = None
        if file is not None:  # gigabytes: told by size and time
            slide = [file.name, file.stat().st_size, file.stat().st_mtime_ns]
        size = self.sizes.get(table.slide, step)
        return [table.title, step, size, self.microns, self.centres, slide]

    def placed(self, table: Table, info: SlideInfo | None) -> tuple[Patches, Pair, Pair]:
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


def look(found: Sequence[Table], card: dict[str, Any], step: float | None = None) -> Overview:
    """Read every table once. What had to be inferred or left out is said, in a line each.

    The largest uncertainty is that of all slides of the run: maps that are added later compare.
    """
    noted = known_sides(card, "steps")
    steps: dict[str, Pair | None] = {}
    inferred, empty, filled = [], [], []
    largest = max((_largest_std(table) for table in _others(found)), default=0.0)
    for table in found:
        patches = table.read()
        if not len(patches):
            empty.append(table.slide)
            continue
        filled.append(table)
        std = np.zeros(0) if patches.std is None else patches.std[np.isfinite(patches.std)]
        largest = max(largest, float(std.max(initial=0.0)))
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
        raise ValueError("no slide has a patch: there is nothing to draw.")
    return Overview(
        _fill(steps, inferred),
        known_sides(card, "sizes"),
        card.get("units") == MICRONS,
        card.get("anchor") == CENTRE,
        largest,
        filled,
    )


def _others(found: Sequence[Table]) -> list[Table]:
    """The tables of the run's other slides."""
    asked, places = {table.file for table in found}, {table.file.parent for table in found}
    files = (
        f for p in places if "patches" in (p.name, p.parent.name) for f in p.glob(f"*{ENDING}")
    )
    return [Table(file) for file in files if file not in asked]


def _largest_std(table: Table) -> float:
    """0 where a table has none, or is broken: who asks for its slide is told."""
    try:
        with reading(table.file, "a table of patches"):
            frame = pd.read_csv(table.file, usecols=lambda name: name in ("sd", "std"))
            values = np.asarray(frame, dtype=np.float64)
    except BadFile:
        return 0.0
    return float(values[np.isfinite(values)].max(initial=0.0))


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
def slide_files(folder: Path | None, found: Sequence[Table]) -> dict[str, Path]:
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


# --- Files that are made once ---------------------------------------------------------------------
class Making:
    """A folder that is being filled: files that are there already are not made again."""

    def __init__(self, folder: Path, log: TextIO, here: dict[str, str], kept: "Kept"):
        self.folder, self.log, self.kept = folder, log, kept
        self.here = here  # digests of the files in the folder, by name
        self.now: dict[str, str] = {}  # digests of the files of this call
        self.found = 0

    def make(self, name: str, facts: list[Any], table: Table, content: Callable[[], bytes]) -> None:
        """A file of the folder, from what its content depends on."""
        digest = _digest(facts, table)
        there = self.folder / name
        if self.kept.has(name, digest) or (self.here.get(name) == digest and there.is_file()):
            self.found += 1
        else:
            self._write(there, content())
            self.log.write(f"{digest} {name}\n")
            self.log.flush()
        self.here[name] = self.now[name] = digest

    def _write(self, path: Path, content: bytes) -> None:
        """Beside and renamed: the file is there whole, or not at all."""
        fresh = path.with_name(f".{path.name}.new")
        fresh.write_bytes(content)
        os.replace(fresh, path)

    def finish(self, card: dict[str, Any]) -> None:
        """Nothing but the files of this call, and config.json with the digests of all."""
        for path in self.folder.iterdir():
            if path.name not in self.now:
                path.unlink()
        made = self.kept.made | self.now
        slides = sorted({unquote(_stem(name)) for name in made})
        about = {"slides": slides, "made": dict(sorted(made.items())), "files": sorted(made)}
        write_json(self.folder / CARD, {"format": FORMAT, **card, **about})


@dataclass(frozen=True)
class Kept:
    """What earlier calls have put into the folder: digests by name, and the part of the run."""

    made: dict[str, str]
    part: str = ""
    again: bool = False  # nothing of it is good enough

    @classmethod
    def of(cls, out: Path, again: bool) -> "Kept":
        """What config.json there says, less files that were deleted; nothing where there is none.

        The maps that `gpmil demo` has drawn are not on a list: they have no digest.
        """
        try:
            card = json.loads((out / CARD).read_text(encoding="utf-8"))
            made = {str(name): str(digest) for name, digest in card["made"].items()}
            part = str(card.get("part", ""))
        except FileNotFoundError:
            made, part = {p.name: "" for p in out.glob("[!.]*")}, ""
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            made, part = {}, ""
        return cls({n: d for n, d in made.items() if (out / n).is_file()}, part, again)

    def has(self, name: str, digest: str) -> bool:
        """Whether a file is there as it would be made now."""
        return not self.again and self.made.get(name) in (digest, "")


def _stem(name: str) -> str:
    """Name of a table, from that of a file made of it."""
    for ending in (".png", ".gz", ".geojson"):
        name = name.removesuffix(ending)
    return name


def _digest(facts: list[Any], table: Table) -> str:
    text = json.dumps([__version__, *facts]).encode()
    return hashlib.blake2b(text + table.file.read_bytes(), digest_size=16).hexdigest()


@contextmanager
def making(wanted: Wanted, card: dict[str, Any]) -> Iterator[Making]:
    """A folder whose files are added to `wanted.out` when the block ends.

    Where that fails, finished files stay in `<out>.partial` for the same command to continue.
    """
    assert wanted.out is not None
    out = _check_place(wanted.out)
    kept, part = Kept.of(out, wanted.overwrite), card.get("part", "")
    if kept.made and kept.part != part:
        raise ValueError(
            f"{wanted.out} holds files of {kept.part or 'the run as a whole'}, to which those of "
            f"{part or 'the run as a whole'} are not added: name another folder with --out."
        )
    partial = out.with_name(out.name + PARTIAL)
    _check_partial(partial)
    partial.mkdir(parents=True, exist_ok=True)
    with (partial / MADE).open("a+", encoding="utf-8") as log:
        _lock(log, partial)
        work = Making(partial, log, {} if wanted.overwrite else _noted(log), kept)
        try:
            yield work
            log.close()  # an open file would keep its folder from being renamed on Windows
            work.finish(card | wanted.card)
            _add(partial, out)
        except BaseException as error:
            said = _keep(partial, work)
            if said and isinstance(error, ValueError | OSError):
                raise ValueError(f"{error} {said}") from error
            if said:
                say(said)
            raise
    if work.found:
        say(f"{work.found} of {len(work.now)} were there already: --overwrite makes them again")


def _check_place(place: Path) -> Path:
    """A folder that is new, empty, or holds files of gpmil alone."""
    out = place.resolve()
    if not (out / CARD).exists() and out.is_dir() and _listed_in_run(out):
        return out
    return check_target(place)


def _listed_in_run(out: Path) -> bool:
    """Whether the run has drawn these maps itself, as gpmil demo does."""
    if out.name != "heatmaps":
        return False
    card = config(out.parent)
    files = card.get("files") if card.get("format") == FORMAT else None
    return isinstance(files, list) and out.name in files


def _add(partial: Path, out: Path) -> None:
    """Move the files to their place, one by one, the list of them last."""
    if not out.exists():
        os.replace(partial, out)
        return
    files = sorted(partial.iterdir(), key=lambda path: path.name == CARD)
    for path in files:
        os.replace(path, out / path.name)
    partial.rmdir()


def _keep(partial: Path, work: Making) -> str:
    """Away with a folder without a finished file; else what to say of it."""
    if work.here:
        return f"What is finished is kept in {partial}: the same command continues from there."
    work.log.close()
    shutil.rmtree(partial, ignore_errors=True)
    return ""


def _check_partial(partial: Path) -> None:
    empty = not partial.exists() or (partial.is_dir() and not written_by_someone(partial))
    if not empty and not any((partial / name).is_file() for name in (MADE, CARD)):
        raise ValueError(f"{partial} was not written by gpmil: delete or rename it.")


def _lock(log: TextIO, partial: Path) -> None:
    """Two processes must not fill the same folder; the lock ends with the process."""
    if find_spec("fcntl"):
        fcntl = import_module("fcntl")
        try:
            fcntl.flock(log, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise ValueError(
                f"{partial} is being written by another gpmil: wait for it, or name another "
                "folder with --out."
            ) from error


def _noted(log: TextIO) -> dict[str, str]:
    """Digests of finished files by name; the last line may be cut off."""
    log.seek(0)
    lines = log.read().split("\n")
    if lines[-1]:
        log.write("\n")
    pairs = (line.partition(" ") for line in lines[:-1])
    return {name: digest for digest, _, name in pairs}


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


def say_done(work: Making, thing: str, out: Path | None) -> None:
    """How much was asked for and where it is, with how much else."""
    count, all_there = len(work.now), len(work.kept.made | work.now)
    more = f", which has {all_there} in all" if all_there > count else ""
    typer.echo(f"{count} {thing}{'s' if count != 1 else ''} in {out}{more}")


def counted(found: Sequence[Table], what: str) -> Iterator[Table]:
    """The tables one by one, with a bar on a terminal."""
    console = Console(stderr=True)
    hidden = not console.is_terminal
    yield from track(found, what, console=console, transient=True, disable=hidden)


def check_out(out: Path, run: Path) -> None:
    """Refuse a folder whose replacement would delete the run."""
    place = out.resolve()
    if place == run.resolve() or place in run.resolve().parents:
        raise ValueError(f"--out {out} would replace the run itself: name another folder.")
