"""Results for people: one self-contained HTML page.

A page is a list of sections with text, tables and pictures, filled into templates/page.html;
pictures are embedded, so that the file can be sent around.
"""

import base64
from collections.abc import Sequence
from dataclasses import dataclass

from jinja2 import Environment, PackageLoader, StrictUndefined

RESEARCH = "For research, not a medical device."


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
        loader=PackageLoader("gpmil.show"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    template = environment.get_template("page.html")
    return template.render(
        title=title, lead=lead, sections=sections, contents=contents, research=RESEARCH
    )
