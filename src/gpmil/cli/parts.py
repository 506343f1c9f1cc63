"""Parts of a study carried out before the user's eyes: a bar with the time left, or lines."""

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from gpmil.paper.parts import AnyPart, Part, carry_out


def carried_out(
    plans: Sequence[AnyPart],
    folder: Path,
    jobs: int,
    console: Console,
    minutes: float | None = None,
) -> list[tuple[AnyPart, Any]]:
    """Every part with its result, those of so many minutes; old ones are taken from the folder."""
    found = []
    seconds = math.inf if minutes is None else 60 * minutes
    with _progress(plans, console) as report:
        for part, result, old in carry_out(plans, folder, jobs, seconds):
            found.append((part, result))
            report(part, old)
    return found


@contextmanager
def _progress(plans: Sequence[Part], console: Console) -> Iterator[Callable[[Part, bool], None]]:
    """A function that is told of every finished part: a bar with the time left, or lines."""
    start, effort = time.monotonic(), {"left": sum(p.effort for p in plans), "done": 0.0}
    count = {"all": len(plans), "done": 0, "kept": 0}

    def left() -> str:
        if not effort["done"]:
            return "time left unknown"
        return (
            f"about {_minutes((time.monotonic() - start) * effort['left'] / effort['done'])} left"
        )

    def note(part: Part, old: bool) -> str:
        effort["left"] -= part.effort
        effort["done"] += 0.0 if old else part.effort
        count["done"] += 1
        count["kept"] += old
        return f"{count['done']}/{count['all']} {part.title}" + (" (from before)" if old else "")

    if not console.is_terminal:
        console.print(f"{len(plans)} parts; finished ones are kept and not computed again.")

        def line(part: Part, old: bool) -> None:
            words = note(part, old)
            if not old:
                console.print(f"{words}, {left()}", soft_wrap=True)

        yield line
        console.print(f"{count['kept']} of {count['all']} parts were there from before.")
        return
    columns = (BarColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("starting", total=sum(p.effort for p in plans))

        def report(part: Part, old: bool) -> None:
            words = note(part, old)
            bar.update(task, advance=part.effort, description=f"{words}, {left()}")

        yield report


def _minutes(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 90 else f"{seconds / 60:.0f} min"
