"""`gpmil inspect`: what would be read, before anything is computed."""

from pathlib import Path

from gpmil.cli.options import Source, print_line


def run(source: Source, cache: Path | None = None) -> None:
    """Print the report of the reader, and what is alarming."""
    bags, report = source.read(cache)
    for line in report.lines():
        print_line(line)
    if (bags.labels >= 0).any():
        positive, negative = int((bags.labels == 1).sum()), int((bags.labels == 0).sum())
        print_line(f"classes: {positive} positive, {negative} negative")
    for line in report.warnings():
        print_line(f"WARNING: {line}")
