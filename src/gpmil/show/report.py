"""Results for people: one self-contained HTML page, and folders that are complete or not there.

A page is a list of sections with text, tables and pictures, filled into templates/page.html;
pictures are embedded, so that the file can be sent around. `run_folder` writes beside its target
and renames at the end: an interrupted run leaves nothing half-written.
"""

import base64
import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from gpmil.files.persistence import swap, written_by_someone

RESEARCH = "For research, not a medical device."
CARD, FORMAT = "config.json", "gpmil-run"
PARTIAL, MADE = ".partial", ".made"
ADDED = ("heatmaps", "qupath")
"""Folders that later commands add to a finished run."""


# --- Pages ----------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Table:
    """A table of finished strings: which columns are words, which rows are emphasised."""

    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    caption: str = ""
    text: Sequence[str] = ()  # names of columns, aligned left
    strong: Sequence[int] = ()  # numbers of rows
    sentences: Sequence[str] = ()  # names of columns whose cells may run over several lines


@dataclass(frozen=True)
class Picture:
    """A PNG with its caption; `width` in CSS pixels. `alt` says what it shows."""

    png: bytes
    alt: str
    width: int
    title: str = ""
    caption: str = ""

    @property
    def uri(self) -> str:
        """The picture as a data address, to be embedded."""
        return "data:image/png;base64," + base64.b64encode(self.png).decode("ascii")


@dataclass(frozen=True)
class Section:
    """A heading, paragraphs, tables and pictures, in this order."""

    title: str
    paragraphs: Sequence[str] = ()
    tables: Sequence[Table] = ()
    pictures: Sequence[Picture] = ()


def page(title: str, lead: str, sections: Sequence[Section], contents: bool = False) -> str:
    """The whole page as HTML; all text is escaped. `contents` lists the sections at the top.

    >>> html = page("A & B", "first line", [Section("Results", ["5 < 6"])])
    >>> "A &amp; B" in html, "5 &lt; 6" in html, RESEARCH in html
    (True, True, True)
    """
    environment = Environment(
        loader=PackageLoader("gpmil"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    template = environment.get_template("page.html")
    return template.render(
        title=title, lead=lead, sections=sections, contents=contents, research=RESEARCH
    )


# --- Folders --------------------------------------------------------------------------------------
@contextmanager
def run_folder(path: str | os.PathLike, config: Mapping[str, Any]) -> Iterator[Path]:
    """A folder to write into; it becomes `path` when the block ends, and vanishes if it fails.

    `config` is written to config.json with the names of everything else in the folder: a later
    run knows what it may replace. A folder that gpmil did not write, or that holds other files
    too, is refused (ValueError) before the block begins.
    """
    path = check_target(Path(path))
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = Path(tempfile.mkdtemp(prefix=f".{path.name}.", dir=path.parent))
    try:
        yield fresh
        names = sorted(item.name for item in fresh.iterdir())
        card = {"format": FORMAT, **config, "files": names}
        write_json(fresh / CARD, card)
        fresh.chmod(0o755)
        swap(fresh, path)
    finally:
        shutil.rmtree(fresh, ignore_errors=True)


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write readable JSON, the same bytes for the same content."""
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8", newline="\n")


def check_target(path: Path) -> Path:
    """A folder that may be written: new, empty, or of an earlier run of gpmil alone."""
    path = path.resolve()
    if path == Path.cwd():
        raise ValueError("the current folder cannot be replaced: name a folder to be made in it.")
    if path.exists() and not path.is_dir():
        raise ValueError(f"{path} is a file: name a folder.")
    if not path.exists() or not any(path.iterdir()):
        return path
    others = sorted(_not_ours(path))
    if others:
        found = ", ".join(others[:3]) + (", ..." if len(others) > 3 else "")
        raise ValueError(
            f"{path} holds files that gpmil did not write ({found}): name a new or empty folder."
        )
    return path


def _not_ours(path: Path) -> set[str]:
    """Names in a folder that no run of gpmil wrote; hidden ones and a desktop's do not count.

    Maps that were added to a run later are not on its list, and ours.
    """
    names = {name for name in written_by_someone(path) if not name.startswith(".")}
    try:
        card = json.loads((path / CARD).read_text(encoding="utf-8"))
        written = {*card["files"], CARD} if card["format"] == FORMAT else set()
    except (OSError, ValueError, KeyError, TypeError):
        written = set()
    added = {name for name in names - written if name.removesuffix(PARTIAL) in ADDED}
    return names - written - {name for name in added if _only_maps(path / name)}


def _only_maps(path: Path) -> bool:
    """Whether a folder holds what gpmil added to a run, or a folder of it for each coupling."""
    if not path.is_dir():
        return False
    if (path / MADE).is_file():  # it is still being filled
        return True
    return all(_only_maps(path / name) for name in _not_ours(path))
