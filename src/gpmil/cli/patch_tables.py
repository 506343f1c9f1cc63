"""Tables of patches in a finished run: RUN/patches/<slide>.csv.gz, or one such file.

What `gpmil heatmap` and `gpmil qupath` share. Nothing here needs the model or torch.
"""

import json
import zlib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import numpy as np
import pandas as pd
import typer
from rich.console import Console
from rich.progress import track

from gpmil import slides
from gpmil.graphs import infer_step
from gpmil.qupath import Patches
from gpmil.slides import SlideInfo

ENDING, CARD = ".csv.gz", "config.json"
# What a run notes as "units" and "anchor" where positions are not level-0 pixels, top left.
MICRONS, CENTRE = "microns", "centre"
SHOWN = 3  # names in a message
TRUE, FALSE = {"1", "1.0", "true"}, {"0", "0.0", "false"}

Pair = tuple[float, float]


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

    def read(self) -> Patches:
        """Positions and predictions; a ValueError names the file and what is wrong with it."""
        try:
            frame = pd.read_csv(self.file)
        except (OSError, EOFError, ValueError, zlib.error) as error:  # pandas' are ValueErrors
            raise ValueError(f"{self.file} is no whole table of patches: {error}.") from error
        missing = [c for c in ("x", "y", "probability") if c not in frame]
        if missing:
            raise ValueError(
                f"{self.file}: expected columns x, y, probability, found no {', '.join(missing)}. "
                "Patches without positions cannot be drawn."
            )
        std = "sd" if "sd" in frame else "std"
        coords = np.column_stack([self._numbers(frame, c) for c in "xy"])
        if not np.isfinite(coords).all():
            raise ValueError(f"{self.file}: found patches without a position x, y. Remove them.")
        return Patches(
            coords,
            self._numbers(frame, "probability"),
            self._numbers(frame, std) if std in frame else None,
            self._numbers(frame, "p_value") if "p_value" in frame else None,
            self._flags(frame["flagged"]) if "flagged" in frame else None,
        )

    def _numbers(self, frame: pd.DataFrame, column: str) -> np.ndarray:
        try:
            return frame[column].to_numpy(dtype=np.float64)
        except (TypeError, ValueError) as error:
            raise ValueError(
                f"{self.file}: expected numbers in column {column}: {error}."
            ) from error

    def _flags(self, column: pd.Series) -> np.ndarray | None:
        """True and False, or 1 and 0; None where no patch was tested."""
        if column.isna().all():
            return None
        words = column.fillna(0).astype(str).str.lower()
        other = sorted(set(words) - TRUE - FALSE)
        if other:
            raise ValueError(f"{self.file}: expected flagged to be 0 or 1, found {other[0]!r}.")
        return words.isin(TRUE).to_numpy(dtype=bool)


def tables(run: Path, wanted: Sequence[str] | None = None) -> list[Table]:
    """The tables of a run, in order of name; only those of the slides wanted, where any are."""
    if run.is_file():
        if not run.name.endswith(ENDING):
            raise ValueError(f"{run} is no table of patches: expected a file *{ENDING}.")
        found = [Table(run)]
    elif not run.is_dir():
        raise ValueError(f"no run at {run}: name the folder that gpmil predict or gpmil cv wrote.")
    else:
        found = [Table(file) for file in sorted((run / "patches").glob(f"*{ENDING}"))]
    if not found:
        raise ValueError(
            f"{run} holds no tables of patches (patches/<slide>{ENDING}): is the run finished, "
            "and does its model predict patches?"
        )
    if not wanted:
        return found
    known = {table.slide: table for table in found}
    unknown = [name for name in wanted if name not in known]
    if unknown:
        raise ValueError(
            f"{run} has no slide {listed(unknown)}; it has {len(known)}: {listed(list(known))}."
        )
    return [known[name] for name in dict.fromkeys(wanted)]


def config(run: Path) -> dict[str, Any]:
    """config.json of the run; empty where there is none."""
    file = (run.parent.parent if run.is_file() else run) / CARD
    if not file.is_file():
        return {}
    try:
        card = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{file} is no readable JSON: {error}.") from error
    return card if isinstance(card, dict) else {}


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
    """Read every table once. What had to be inferred or left out is said, in a line each."""
    noted = known_sides(card, "steps")
    steps: dict[str, Pair | None] = {}
    inferred, empty, filled, largest = [], [], [], 0.0
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


def say_done(count: int, thing: str, out: Path) -> None:
    """How much was written, and where."""
    typer.echo(f"{count} {thing}{'s' if count != 1 else ''} in {out}")


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
