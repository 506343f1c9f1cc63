"""Files made of tables of patches, each made once: what `gpmil heatmap` and `gpmil qupath` write.

They go into the run, or into the folder that `--out` names, and are added to what is there. Files
are assembled in `<out>.partial` and moved to `<out>` when all are made, each whole. What was made
from the same table with the same options, now or before, is not made again.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TextIO
from urllib.parse import unquote

import typer

from gpmil import __version__
from gpmil.files.whole import LOCK, PARTIAL, json_bytes, locked, write_whole, written_by_someone
from gpmil.runs.files import CARD, FORMAT
from gpmil.runs.maps_input import MapOptions, PatchTable, config, run_of, say
from gpmil.runs.workspace import MADE, check_target


# --- Where they go --------------------------------------------------------------------------------
def with_place(wanted: MapOptions, kind: str, found: Sequence[PatchTable]) -> MapOptions:
    """Where files go: the folder asked for, else one in the run, or beside a table on its own."""
    if wanted.out is not None:
        check_out(wanted.out, wanted.run)
        return wanted
    beside = wanted.run.parent if wanted.run.is_file() else wanted.run
    return replace(wanted, out=(run_of(wanted.run) or beside) / kind / found[0].part)


def check_out(out: Path, run: Path) -> None:
    """Refuse a folder whose replacement would delete the run."""
    place = out.resolve()
    if place == run.resolve() or place in run.resolve().parents:
        raise ValueError(f"--out {out} would replace the run itself: name another folder.")


def part_of(found: Sequence[PatchTable]) -> dict[str, str]:
    """What config.json says of the coupling or repeat that the tables are of."""
    return {"part": found[0].part} if found[0].part else {}


# --- Making them ----------------------------------------------------------------------------------
class MapFolder:
    """A folder that is being filled: files that are there already are not made again."""

    def __init__(self, folder: Path, log: TextIO, here: dict[str, str], kept: "EarlierFiles"):
        self.folder, self.log, self.kept = folder, log, kept
        self.here = here  # digests of the files in the folder, by name
        self.now: dict[str, str] = {}  # digests of the files of this call
        self.found = 0

    def make(
        self, name: str, facts: list[Any], table: PatchTable, content: Callable[[], bytes]
    ) -> None:
        """A file of the folder, from what its content depends on."""
        digest = _digest(facts, table)
        there = self.folder / name
        if self.kept.has(name, digest) or (self.here.get(name) == digest and there.is_file()):
            self.found += 1
        else:
            write_whole(there, content())
            self.log.write(f"{digest} {name}\n")
            self.log.flush()
        self.here[name] = self.now[name] = digest

    def finish(self, card: dict[str, Any]) -> None:
        """Nothing but the files of this call, and config.json with the digests of all."""
        for path in self.folder.iterdir():
            if path.name not in self.now:
                path.unlink()
        made = self.kept.made | self.now
        slides = sorted({unquote(_stem(name)) for name in made})
        about = {"slides": slides, "made": dict(sorted(made.items())), "files": sorted(made)}
        write_whole(self.folder / CARD, json_bytes({"format": FORMAT, **card, **about}))


@dataclass(frozen=True)
class EarlierFiles:
    """What earlier calls have put into the folder: digests by name, and the part of the run."""

    made: dict[str, str]
    part: str = ""
    again: bool = False  # nothing of it is good enough

    @classmethod
    def of(cls, out: Path, again: bool) -> "EarlierFiles":
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


def _digest(facts: list[Any], table: PatchTable) -> str:
    text = json.dumps([__version__, *facts]).encode()
    return hashlib.blake2b(text + table.file.read_bytes(), digest_size=16).hexdigest()


@contextmanager
def making(wanted: MapOptions, card: dict[str, Any]) -> Iterator[MapFolder]:
    """A folder whose files are added to `wanted.out` when the block ends.

    Where that fails, finished files stay in `<out>.partial` for the same command to continue.
    """
    assert wanted.out is not None
    out = _check_place(wanted.out)
    kept, part = EarlierFiles.of(out, wanted.overwrite), card.get("part", "")
    if kept.made and kept.part != part:
        raise ValueError(
            f"{wanted.out} holds files of {kept.part or 'the run as a whole'}, to which those of "
            f"{part or 'the run as a whole'} are not added: name another folder with --out."
        )
    partial = out.with_name(out.name + PARTIAL)
    _check_partial(partial)
    partial.mkdir(parents=True, exist_ok=True)
    with locked(partial) as unlock, (partial / MADE).open("a+", encoding="utf-8") as log:
        work = MapFolder(partial, log, {} if wanted.overwrite else _noted(log), kept)
        try:
            yield work
            log.close()  # an open file would keep its folder from being renamed on Windows
            unlock()
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


def _keep(partial: Path, work: MapFolder) -> str:
    """Away with a folder without a finished file; else what to say of it."""
    if work.here:
        return f"What is finished is kept in {partial}: the same command continues from there."
    work.log.close()
    shutil.rmtree(partial, ignore_errors=True)
    return ""


def _check_partial(partial: Path) -> None:
    empty = not partial.exists() or (partial.is_dir() and not written_by_someone(partial))
    if not empty and not any((partial / name).is_file() for name in (MADE, CARD, LOCK)):
        raise ValueError(f"{partial} was not written by gpmil: delete or rename it.")


def _noted(log: TextIO) -> dict[str, str]:
    """Digests of finished files by name; the last line may be cut off."""
    log.seek(0)
    lines = log.read().split("\n")
    if lines[-1]:
        log.write("\n")
    pairs = (line.partition(" ") for line in lines[:-1])
    return {name: digest for digest, _, name in pairs}


def say_done(work: MapFolder, thing: str, out: Path | None) -> None:
    """How much was asked for and where it is, with how much else."""
    count, all_there = len(work.now), len(work.kept.made | work.now)
    more = f", which has {all_there} in all" if all_there > count else ""
    typer.echo(f"{count} {thing}{'s' if count != 1 else ''} in {out}{more}")
