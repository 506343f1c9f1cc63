"""Notebooks without Jupyter: run one here, and show it as a page of the site with its pictures.

The tutorials are .ipynb files without outputs. `run` executes the cells of one, in this process and
in order; the tests call it, and so does the site (`setup`, a Sphinx extension), which turns cells
and outputs into a Markdown page. What a cell shows is what it prints, and its last expression: as a
picture if that can draw itself (`_repr_png_`), as words otherwise.
"""

import ast
import contextlib
import io
import json
import logging
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass
class Cell:
    """A cell, and after a run what it showed."""

    kind: str  # "markdown" or "code"
    source: str
    text: str = ""
    pictures: list[bytes] = field(default_factory=list)


def read(path: Path) -> list[Cell]:
    """The cells of a notebook."""
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    return [Cell(cell["cell_type"], "".join(cell["source"])) for cell in cells]


def run(path: Path) -> tuple[list[Cell], dict[str, Any]]:
    """The cells with what they showed, and the names that they defined."""
    cells, names = read(path), {"__name__": "__main__"}
    for number, cell in enumerate(cells):
        if cell.kind == "code":
            execute(cell, names, f"{path.name}, cell {number}")
    return cells, names


def execute(cell: Cell, names: dict[str, Any], where: str) -> None:
    """Run one code cell; keep what it prints and the value of its last expression."""
    tree = ast.parse(cell.source, where)
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(tree, where, "exec"), names)
        value = None
        if last is not None:
            value = eval(compile(ast.Expression(last.value), where, "eval"), names)
    cell.text = printed.getvalue()
    if hasattr(value, "_repr_png_"):
        cell.pictures.append(value._repr_png_())
    elif value is not None:
        cell.text += f"{value!r}\n"


# ------------------------------------------------------------------ pages of the site


def to_markdown(cells: list[Cell], name: str, images: Path, from_page: str) -> str:
    """The page: code, what it printed, pictures written to the folder `images`."""
    parts = []
    for number, cell in enumerate(cells):
        if cell.kind == "markdown":
            parts.append(cell.source)
            continue
        parts.append(f"```python\n{cell.source}\n```")
        if cell.text:
            parts.append(f"```text\n{cell.text.rstrip()}\n```")
        for k, picture in enumerate(cell.pictures):
            file = f"{name}-{number}-{k}.png"
            images.mkdir(parents=True, exist_ok=True)
            (images / file).write_bytes(picture)
            parts.append(f"![What the code above draws]({from_page}{file})")
    return "\n\n".join(parts)


def setup(app: Any) -> dict[str, Any]:
    """Let Sphinx read .ipynb as Markdown, after running it."""
    from myst_parser.parsers.sphinx_ import MystParser

    logging.getLogger("gpmil").setLevel(logging.WARNING)  # what fits note is no part of the page

    class NotebookParser(MystParser):
        """Runs the notebook, then reads cells and outputs as a Markdown page."""

        supported = ("notebook",)

        def parse(self, inputstring: str, document: Any) -> None:
            """`inputstring` is JSON; what MyST sees is the page made of it."""
            path, root = Path(document["source"]), Path(app.srcdir)
            made = root / "_made"
            up = "../" * (len(path.relative_to(root).parts) - 1)
            page = to_markdown(run(path)[0], path.stem, made, f"{up}_made/")
            download = f"[This page as a notebook](path:{path.name})"
            title, _, rest = page.partition("\n")
            super().parse(f"{title}\n\n{download}\n{rest}", document)

    app.add_source_suffix(".ipynb", "notebook")
    app.add_source_parser(NotebookParser)
    return {"parallel_read_safe": False}
