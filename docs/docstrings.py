"""Docstrings of gpmil for Sphinx: plain text with numpy sections, not written as reStructuredText.

Formulas are indented blocks after a colon; `|x|` and `w_` are notation and no markup. Methods that
scikit-learn adds to every estimator for its metadata routing are left out.
"""

import re
from typing import Any

NAMED = re.compile(r"\s*[\w*, ]+( : .*)?$")  # "name : type", or a name alone
TRAILING = re.compile(r"(?<=\w)_(?!\w)")
ROUTING = re.compile(r"set_\w+_request|get_metadata_routing")


def indent(line: str) -> int:
    """How far a line is indented."""
    return len(line) - len(line.lstrip())


def as_literal(lines: list[str]) -> list[str]:
    """The lines, with indented blocks after a blank line marked as literal."""
    found: list[str] = []
    for k, line in enumerate(lines):
        found.append(line)
        if k + 2 >= len(lines) or not line.strip() or lines[k + 1].strip():
            continue
        if indent(lines[k + 2]) > indent(line) and lines[k + 2].strip():
            if line.rstrip().endswith(":"):
                found[-1] = line.rstrip().rstrip(":") + "::"
            else:
                found += ["", " " * indent(line) + "::"]
    return found


def escape(lines: list[str]) -> list[str]:
    """Bars and trailing underscores of notation, outside literal blocks, backticks and examples."""
    found, literal = [], -1  # how far the line is indented that began the literal block
    for line in lines:
        if literal >= 0 and line.strip() and indent(line) <= literal:
            literal = -1
        found.append(line if literal >= 0 or line.lstrip().startswith(">") else _escaped(line))
        if literal < 0 and line.rstrip().endswith("::"):
            literal = indent(line)
    return found


def _escaped(line: str) -> str:
    if NAMED.match(line):  # napoleon escapes names, not types
        name, colon, kind = line.partition(" : ")
        return name + colon + TRAILING.sub(r"\\_", kind)
    parts = re.split(r"(`+[^`]*`+)", line)  # code at odd places
    return "".join(
        part if k % 2 else TRAILING.sub(r"\\_", part.replace("|", r"\|"))
        for k, part in enumerate(parts)
    )


def process(app: Any, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    """Rewrite a docstring in place, before its sections are read."""
    lines[:] = escape(as_literal(lines))


def skip(app: Any, what: str, name: str, obj: Any, skip: bool, options: Any) -> bool | None:
    """True for what gpmil did not write, and for scikit-learn's routing; else None."""
    owner = getattr(obj, "__module__", None) or getattr(obj, "__objclass__", None)
    foreign = owner is not None and not str(getattr(owner, "__module__", owner)).startswith("gpmil")
    return True if foreign or ROUTING.fullmatch(name) else None


def setup(app: Any) -> dict[str, Any]:
    """Before napoleon, which has priority 500."""
    app.connect("autodoc-process-docstring", process, priority=400)
    app.connect("autodoc-skip-member", skip)
    return {"parallel_read_safe": True}
