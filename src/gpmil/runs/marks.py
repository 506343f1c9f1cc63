"""Marks that people put on patches in the viewer: marks.jsonl in the run folder, only added to.

    {"id": "9f2c", "when": "2026-03-01T10:02:11Z", "who": "mk", "window": "a1", "slide": "s1",
     "label": 1, "patches": [[512, 256], [768, 256]]}
    {"undo": "9f2c", "when": ..., "who": ..., "window": ...}

A line is a stroke (one click, or patches that were drawn over; label 1 tumour, 0 not, -1 taken
back), or the undoing or redoing of one. It is on the disk before anybody is told so. Several
windows, and several servers, take turns by a lock; a line that a crash has cut off is left out.
Undo and redo are about the strokes of one window.
"""

import json
import os
import secrets
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from gpmil.data.checks import count
from gpmil.runs.files import FARTHEST, MARKS

LOCK = ".marks.lock"
SECONDS = 10.0  # that another window may take
LONGEST_NAME, MOST_PATCHES = 80, 100_000
LABELS = (1, 0, -1)

Place = tuple[float, float]


@dataclass(frozen=True)
class Stroke:
    """Patches of one slide that were marked at once."""

    id: str
    when: str
    who: str
    window: str
    slide: str
    label: int
    patches: tuple[Place, ...]

    def line(self) -> dict[str, Any]:
        """As the file has it."""
        return vars(self) | {"patches": [list(place) for place in self.patches]}


@dataclass(frozen=True)
class Mark:
    """What is said of one patch now, by whom and when."""

    slide: str
    place: Place
    label: int
    who: str
    when: str
    stroke: str


@dataclass
class History:
    """All strokes in order, and which of them hold; `lines` grows with every change."""

    strokes: dict[str, Stroke] = field(default_factory=dict)
    holds: set[str] = field(default_factory=set)
    done: dict[str, list[str]] = field(default_factory=dict)  # by window, the latest last
    undone: dict[str, list[str]] = field(default_factory=dict)
    lines: int = 0
    damaged: int = 0

    def marks(self) -> list[Mark]:
        """The marks that hold, later ones in place of earlier ones, the latest last."""
        found: dict[tuple[str, Place], Mark] = {}
        for stroke in self.strokes.values():
            if stroke.id not in self.holds:
                continue
            for place in stroke.patches:
                found.pop((stroke.slide, place), None)
                found[stroke.slide, place] = Mark(
                    stroke.slide, place, stroke.label, stroke.who, stroke.when, stroke.id
                )
        return [mark for mark in found.values() if mark.label >= 0]

    def take(self, line: Mapping[str, Any]) -> None:
        """One more line; a ValueError where it cannot be meant."""
        window = _text(line, "window")
        done, undone = self.done.setdefault(window, []), self.undone.setdefault(window, [])
        if "undo" in line or "redo" in line:
            back = "undo" in line
            known = _text(line, "undo" if back else "redo")
            here, there = (done, undone) if back else (undone, done)
            if known not in here:
                raise ValueError(f"there is no stroke {known!r:.40} of this window")
            here.remove(known)
            there.append(known)
            (self.holds.discard if back else self.holds.add)(known)
        else:
            stroke = _stroke(line)
            if stroke.id in self.strokes:
                raise ValueError(f"stroke {stroke.id!r:.40} is there twice")
            self.strokes[stroke.id] = stroke
            self.holds.add(stroke.id)
            done.append(stroke.id)
            undone.clear()
        self.lines += 1


def _stroke(line: Mapping[str, Any]) -> Stroke:
    places = line.get("patches")
    if line.get("label") not in LABELS or isinstance(line["label"], bool):
        raise ValueError(f"expected a label 1, 0 or -1, found {line.get('label')!r:.40}")
    if not isinstance(places, list) or not 0 < len(places) <= MOST_PATCHES:
        raise ValueError(f"expected the positions of 1 to {MOST_PATCHES:,} patches")
    words = {name: _text(line, name) for name in ("id", "when", "who", "window", "slide")}
    return Stroke(**words, label=int(line["label"]), patches=tuple(_place(p) for p in places))


def _text(line: Mapping[str, Any], name: str) -> str:
    found = line.get(name)
    if not isinstance(found, str):
        raise ValueError(f"expected a text as {name!r}, found {found!r:.40}")
    return found


def _place(given: Any) -> Place:
    if not isinstance(given, list) or len(given) != 2:
        raise ValueError(f"expected a position [x, y], found {given!r:.40}")
    x, y = (float(v) for v in given)
    if not (abs(x) <= FARTHEST and abs(y) <= FARTHEST):
        raise ValueError(f"expected a position [x, y], found {given!r:.40}")
    return x, y


# --- The file -------------------------------------------------------------------------------------
class MarksFile:
    """The marks of a run, on the disk."""

    def __init__(self, folder: Path) -> None:
        self.path, self.lock = folder / MARKS, folder / LOCK

    def read(self) -> History:
        """All that was marked; what cannot be read is counted."""
        history = History()
        for line in self._lines():
            try:
                found = json.loads(line)
                if not isinstance(found, dict):
                    raise ValueError("expected names with values")
                history.take(found)
            except (ValueError, TypeError, RecursionError):
                history.damaged += 1
        return history

    def _lines(self) -> Iterator[bytes]:
        self._refuse_link()
        if self.path.exists():
            yield from (line for line in self.path.read_bytes().split(b"\n") if line.strip())

    def _refuse_link(self) -> None:
        if self.path.is_symlink() or (self.path.exists() and not self.path.is_file()):
            raise ValueError(f"{self.path.name} of this run is a link or no file: it is not used.")

    def add(
        self, slide: str, label: int, patches: Sequence[Place], who: str, window: str
    ) -> History:
        """One more stroke; what was marked by then, when it is on the disk."""
        with self._alone():
            history = self.read()
            stroke = Stroke(
                secrets.token_hex(6), now(), named(who), window, slide, label, tuple(patches)
            )
            return self._write(history, stroke.line())

    def turn(self, what: str, who: str, window: str) -> History:
        """Undo the latest stroke of a window, or redo the one undone last; nothing without one."""
        with self._alone():
            history = self.read()
            stack = (history.done if what == "undo" else history.undone).get(window)
            if not stack:
                return history
            said = {what: stack[-1], "when": now(), "who": named(who), "window": window}
            return self._write(history, said)

    def _write(self, history: History, line: dict[str, Any]) -> History:
        """Append one line, whole and flushed to the disk; a torn one before it is closed first."""
        history.take(json.loads(json.dumps(line)))
        self._refuse_link()
        new = not self.path.exists()
        with self.path.open("ab+") as file:
            if file.tell() and not self._ends():
                file.write(b"\n")
            file.write(json.dumps(line, separators=(",", ":"), allow_nan=False).encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())
        if new and os.name == "posix":
            _sync_folder(self.path.parent)
        return history

    def _ends(self) -> bool:
        with self.path.open("rb") as file:
            file.seek(-1, os.SEEK_END)
            return file.read(1) == b"\n"

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """No other window reads or writes meanwhile."""
        if not self.path.parent.is_dir():
            raise ValueError("the run folder is no longer there: marks cannot be kept.")
        try:
            with FileLock(self.lock, timeout=SECONDS):
                yield
        except Timeout as error:
            raise ValueError(
                "another window has been writing marks for long: try again, or close it."
            ) from error
        except OSError as error:
            raise ValueError(
                f"marks cannot be kept in the run folder: {error.strerror or error}."
            ) from error


def _sync_folder(folder: Path) -> None:
    """A new name is on the disk once its folder is."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def now() -> str:
    """The time, to the second, of Greenwich."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def named(who: str) -> str:
    """A name as it is kept: one line of moderate length.

    >>> named("  M. K. \\n ")
    'M. K.'
    """
    return " ".join("".join(c if c.isprintable() else " " for c in who).split())[:LONGEST_NAME]


def table_rows(marks: Sequence[Mark]) -> list[dict[str, Any]]:
    """The marks as a file of patch labels, which `gpmil fit --patch-labels` reads."""
    return [
        {"slide": m.slide, "x": m.place[0], "y": m.place[1], "label": m.label, "who": m.who}
        | {"when": m.when}
        for m in marks
    ]


def described(history: History) -> str:
    """A warning where lines cannot be read; else nothing."""
    if not history.damaged:
        return ""
    return f"{count(history.damaged, 'line')} of {MARKS} cannot be read and is left out."
