"""`gpmil inspect`: what would be read, before anything is computed."""

from pathlib import Path

from gpmil.cli.options import Source, report_lines
from gpmil.cli.terminal import print_line


def run(source: Source, cache: Path | None = None) -> None:
    """Print the report of the reader, and what is alarming."""
    _, report = source.read(cache)
    lines, warnings = report_lines(report)
    for line in lines:
        print_line(line)
    for line in warnings:
        print_line(f"WARNING: {line}")
