"""What commands print: progress, lines, and the metrics of a run."""

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any


@contextmanager
def progress(total: int) -> Iterator[Callable[[str], None]]:
    """A function that announces the next step: a bar on a terminal, else one line per step."""
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
    )

    console = Console(stderr=True, highlight=False)
    if not console.is_terminal:
        yield lambda text: print_line(text, sys.stderr)
        return
    columns = (
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.description}", markup=False),
    )
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("", total=total)
        begun: list[str] = []

        def step(text: str) -> None:
            bar.update(task, description=text, completed=len(begun))
            begun.append(text)

        yield step


def print_line(text: str, file: Any = None) -> None:
    """A plain line, to standard output unless said otherwise."""
    (file or sys.stdout).write(text + "\n")


def show_metrics(found: Mapping[str, Any]) -> None:
    """The main metrics with their intervals, a line each."""
    from gpmil.runs.judge import NO_PATIENT, estimate_of

    for coupling, part in found.get("couplings", {}).items():
        print_line(f"coupling {coupling}:")
        show_metrics(part)
    for what, names in SHOWN.items():
        known = found.get(what, {}).get("metrics", {})
        for name in (name for name in names if name in known):
            estimate = estimate_of(known[name])
            print_line(f"{what} {name.replace('_', ' ')}: {estimate}")
        for name, rate in found.get(what, {}).get("operating", {}).items():
            ends = f"{rate['value']:.3f} ({rate['low']:.3f} to {rate['high']:.3f})"
            print_line(f"{what} {name}: {ends}, of {rate['slides']:.0f}")
    if "slides" in found:
        patients = found["slides"]["patients"]
        known = f"Slides of one patient stay together; intervals by patient, of {patients}."
        print_line(NO_PATIENT if patients is None else known)


SHOWN = {
    "slides": ("auc", "average_precision", "accuracy", "log_loss", "calibration_error"),
    "patients": ("auc", "accuracy", "log_loss"),
    "grades": ("kappa", "accuracy", "within_one", "log_loss"),
    "classes": ("accuracy", "mean_recall", "log_loss"),
    "patches": (
        *("auc", "average_precision", "within_bag_auc", "froc"),
        *("false_discovery_rate", "power"),
    ),
}
