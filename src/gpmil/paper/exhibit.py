"""A table or figure of the paper, made anew: the numbers, the words and the picture."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from gpmil.show import plots
from gpmil.show.report import Picture, Section, Table

DIGITS = "%.6g"  # of numbers in csv files


@dataclass(frozen=True)
class Exhibit:
    """One result: `number` as in the paper ("Table 1"), `slug` the name of its files.

    `frame` holds the numbers (csv), `tables` the same for people, `figure` the picture. What is
    not there (example patches without images) says why in `missing`.
    """

    number: str
    slug: str
    title: str
    paragraphs: Sequence[str] = ()
    frame: pd.DataFrame | None = None
    tables: Sequence[Table] = ()
    figure: Figure | None = None
    alt: str = ""  # what the picture shows, for those who do not see it
    caption: str = ""  # of the picture
    missing: str = ""
    _png: list[bytes] = field(default_factory=list, compare=False, repr=False)

    def png(self) -> bytes:
        """The picture, drawn once."""
        if not self._png:
            assert self.figure is not None
            self._png.append(plots.png(self.figure))
        return self._png[0]

    @property
    def words(self) -> list[str]:
        """The paragraphs, and why something is missing."""
        return [*self.paragraphs, *([self.missing] if self.missing else [])]

    def write(self, folder: Path) -> None:
        """slug.csv, slug.png and slug.md, those that there are."""
        if self.frame is not None:
            text = self.frame.to_csv(index=False, float_format=DIGITS, lineterminator="\n")
            (folder / f"{self.slug}.csv").write_text(text, encoding="utf-8", newline="\n")
        if self.figure is not None:
            (folder / f"{self.slug}.png").write_bytes(self.png())
        (folder / f"{self.slug}.md").write_text(self.markdown(), encoding="utf-8", newline="\n")

    def markdown(self) -> str:
        """Heading, words, tables, and a link to the picture."""
        pieces = [f"## {self.number}. {self.title}", *self.words]
        for table in self.tables:
            pieces.append(_markdown_table(table))
            pieces += [f"*{table.caption}*"] if table.caption else []
        if self.figure is not None:
            pieces.append(f"![{self.alt}]({self.slug}.png)")
            pieces += [f"*{self.caption}*"] if self.caption else []
        return "\n\n".join(pieces) + "\n"

    def section(self) -> Section:
        """The same for the page."""
        pictures = []
        if self.figure is not None:
            width = round(self.figure.get_size_inches()[0] * 96)
            pictures = [Picture(self.png(), self.alt, width, caption=self.caption)]
        return Section(f"{self.number}. {self.title}", self.words, self.tables, pictures)


def panels(
    width: float, height: float, rows: int = 1, columns: int = 1, sharey: bool = False
) -> tuple[Figure, np.ndarray]:
    """A figure of this size in inches, and its axes (rows, columns)."""
    figure = plots.new_figure(width, height)
    figure.set_layout_engine("constrained")
    return figure, figure.subplots(rows, columns, sharey=sharey, squeeze=False)


def _markdown_table(table: Table) -> str:
    def row(cells: Sequence[str]) -> str:
        return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"

    rule = [":--" if name in (*table.text, *table.sentences) else "--:" for name in table.columns]
    rows = [
        [f"**{cell}**" if k in table.strong and cell else cell for cell in cells]
        for k, cells in enumerate(table.rows)
    ]
    return "\n".join([row(table.columns), row(rule), *(row(cells) for cells in rows)])
