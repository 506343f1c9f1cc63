"""The command `gpmil bench`: its options, and the cases run one after another."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from bench import bandwidth, cases, cohorts, machine, page
from bench.measure import Conditions
from bench.results import Result
from gpmil.cli.terminal import print_line, progress
from gpmil.files.whole import write_whole
from gpmil.models.base import resolve_device
from gpmil.show.plots import png


@dataclass(frozen=True)
class Request:
    """What to measure; None leaves it to the case."""

    cases: Sequence[str] = ()
    size: str | None = None
    threads: int | None = None
    device: str = "cpu"
    repeats: int = 3
    folder: Path | None = None


@dataclass(frozen=True)
class Files:
    """What to write; None: nothing."""

    json: Path | None = None
    markdown: Path | None = None
    plot: Path | None = None


app = typer.Typer(add_completion=False)


def main(arguments: list[str]) -> int:
    """Do what the words behind `gpmil bench` say; errors rise to the command line of gpmil."""
    command = typer.main.get_command(app)
    return command.main(arguments, prog_name="gpmil bench", standalone_mode=False) or 0


@app.command()
def bench(
    names: Annotated[
        list[str] | None,
        typer.Argument(metavar="[CASE]...", help="What to measure; default: all of --list."),
    ] = None,
    size: Annotated[
        str | None,
        typer.Option(help="tiny, sicapv2 or panda, for every case; default: each its own."),
    ] = None,
    threads: Annotated[
        int | None, typer.Option(help="For the package; the naive twin has one. Default: by case.")
    ] = None,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    repeats: Annotated[int, typer.Option(help="Runs after one to warm up; medians.")] = 3,
    folder: Annotated[
        Path | None,
        typer.Option(help="Where the file of the case disk is kept; default: removed after it."),
    ] = None,
    json: Annotated[Path | None, typer.Option(help="File for all numbers.")] = None,
    markdown: Annotated[Path | None, typer.Option(help="File for a table.")] = None,
    plot: Annotated[Path | None, typer.Option(help="PNG file for the case scaling.")] = None,
    show: Annotated[bool, typer.Option("--list", help="Only list the cases.")] = False,
    strict: Annotated[
        bool, typer.Option("--strict", help="Exit code 1 where a bar is missed.")
    ] = False,
) -> None:
    """Measure this machine: seconds, memory and ratios to a naive twin, against bars."""
    if show:
        return list_cases()
    request = Request(tuple(names or ()), size, threads, device, repeats, folder)
    if not run(request, Files(json, markdown, plot)) and strict:
        raise typer.Exit(1)
    return None


def list_cases() -> None:
    """Print the cases, a line each."""
    for case in cases.ALL:
        threads = "1 thread" if case.threads == 1 else f"up to {case.threads} threads"
        print_line(f"{case.name:10} {case.title} (size {case.size}, {threads})")


def run(request: Request, files: Files) -> bool:
    """Measure, print and write; whether no bar was missed."""
    names = _check(request, files)
    facts = machine.facts()
    print_line(
        f"{facts['cpu']}, {facts['cores']} cores, {facts['memory_gb']:g} GB, "
        f"GPU: {facts['gpu'] or 'none'}; torch {facts['torch']}, gpmil {facts['gpmil']}"
    )
    results: list[Result] = []
    with progress(len(names)) as step:
        for name in names:
            conditions = _conditions(cases.CASES[name], request)
            step(f"measuring {name} at size {conditions.size}")
            found = cases.run(name, conditions)
            for result in found:
                print_line("\n".join(page.lines(result)))
            results += found
    read = bandwidth.measured()
    for rate in read:
        print_line(page.bandwidth_line(rate))
    _write(files, results, facts, read)
    return not any(result.missed for result in results)


def _conditions(case: cases.Case, request: Request) -> Conditions:
    return Conditions(
        request.size or case.size,
        request.threads or min(case.threads, machine.cores()),
        request.device,
        request.repeats,
        None if request.folder is None else str(request.folder.resolve()),
    )


def _write(
    files: Files,
    results: Sequence[Result],
    facts: dict,
    read: Sequence[bandwidth.Bandwidth],
) -> None:
    if files.json is not None:
        write_whole(files.json, page.to_json(results, facts, read))
    if files.markdown is not None:
        write_whole(files.markdown, page.to_markdown(results, facts, read))
    if files.plot is not None:
        curved = next(result for result in results if result.curves)
        write_whole(files.plot, png(page.picture(curved)))


def _check(request: Request, files: Files) -> list[str]:
    """The cases to run; what cannot work is refused before the work."""
    names = list(dict.fromkeys(request.cases)) or list(cases.CASES)
    unknown = [name for name in names if name not in cases.CASES]
    if unknown:
        raise ValueError(f"no such case: {unknown[0]!r}; cases are {', '.join(cases.CASES)}.")
    if request.size is not None and request.size not in cohorts.SIZES:
        raise ValueError(f"--size must be one of {', '.join(cohorts.SIZES)}, got {request.size!r}.")
    for option, value in (("--threads", request.threads), ("--repeats", request.repeats)):
        if value is not None and value < 1:
            raise ValueError(f"{option} must be at least 1, got {value}.")
    resolve_device(request.device)
    if files.plot is not None and "scaling" not in names:
        raise ValueError("--plot draws the case scaling: name it too, or leave out --plot.")
    for path in (files.json, files.markdown, files.plot):
        if path is not None and path.is_dir():
            raise ValueError(f"{path} is a folder: name a file to write.")
    if request.folder is not None and request.folder.exists() and not request.folder.is_dir():
        raise ValueError(f"--folder {request.folder} is a file: name a folder.")
    return names
