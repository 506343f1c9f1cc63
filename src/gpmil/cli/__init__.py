"""The command line, `gpmil`: one module a command, imported when it is called.

Bad options and bad input end with exit code 2 and one readable line, never a traceback.
"""

import logging
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from gpmil import __version__

logger = logging.getLogger("gpmil")
INTERRUPTED = 130

# Typer may carry its own copy of click: the class of its errors is found through one of them.
ClickException: Any = typer.BadParameter.__mro__[2]


class OneLineErrors(TyperGroup):
    """A group of commands that says what is wrong in one line."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Take the arguments; without any, show the help."""
        return super().parse_args(ctx, args or ["--help"])

    def main(self, *args: Any, **kwargs: Any) -> Any:
        """Run a command; the exit code is 2 for bad options or input, 130 when interrupted."""
        try:
            code = super().main(*args, **{**kwargs, "standalone_mode": False})
        except ClickException as error:
            code = _complain(error.format_message())
        except (ValueError, OSError) as error:
            logger.debug("where it happened:", exc_info=True)
            code = _complain(str(error))
        if code == INTERRUPTED:
            typer.echo("gpmil: interrupted, no folder was written", err=True)
        sys.exit(code)


def _complain(message: str) -> int:
    typer.echo(f"gpmil: {' '.join(message.split())}", err=True)
    return 2


app = typer.Typer(
    cls=OneLineErrors,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Gaussian-process multiple instance learning with coupled neighbours. "
    "For research, not a medical device.",
)


def _show_version(wanted: bool) -> bool:
    if wanted:
        typer.echo(__version__)
        raise typer.Exit
    return wanted


@app.callback()
def _gpmil(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version."),
    ] = False,
) -> None:
    """Options that come before the command."""


@app.command("demo")
def _demo(
    out: Annotated[
        Path, typer.Option(help="Folder to write; one that gpmil wrote is replaced.")
    ] = Path("demo"),
    seed: Annotated[int, typer.Option(help="Another seed, another cohort.")] = 0,
    bags: Annotated[
        int, typer.Option(help="Slides to train on, at least 8; a third as many are held out.")
    ] = 120,
) -> None:
    """Simulate slides, fit, predict held-out slides, write a page with heat maps."""
    from gpmil.cli import demo

    demo.run(out, seed, bags)


@app.command("paper")
def _paper(
    out: Annotated[
        Path, typer.Option(help="Folder to write; one that gpmil wrote is replaced.")
    ] = Path("paper"),
    quick: Annotated[
        bool, typer.Option("--quick", help="A small version of everything, in two minutes.")
    ] = False,
    data: Annotated[
        Path | None,
        typer.Option(
            help="Own cohort in place of the simulated one: a folder with SICAPv2 tables "
            "(Train.csv, Test.csv), a table or an npz file; with parts 'train' and 'test', or "
            "cross-validated."
        ),
    ] = None,
    images: Annotated[
        Path | None, typer.Option(help="Folder with one image a slide, named like the slide.")
    ] = None,
    panda: Annotated[
        str | None,
        typer.Option(
            help="The large simulated cohort: tenth, full (10,503 slides) or none. Default: tenth, "
            "or none with --data."
        ),
    ] = None,
    runs: Annotated[
        int | None, typer.Option(help="Runs of every method; default 5, with --quick 2.")
    ] = None,
    folds: Annotated[int, typer.Option(help="Folds for a cohort without a split.")] = 5,
    components: Annotated[
        int | None, typer.Option(help="Reduce features to this many PCA scores.")
    ] = None,
    search: Annotated[
        bool,
        typer.Option(
            "--search", help="Networks choose learning rate, decay and epochs by cross-validation."
        ),
    ] = False,
    seed: Annotated[int, typer.Option(help="Of the simulated cohorts.")] = 0,
    jobs: Annotated[
        int, typer.Option(help="Parts computed at once; more than one blurs the times.")
    ] = 1,
    device: Annotated[str | None, typer.Option(help="cpu or cuda; default: a GPU if any.")] = None,
) -> None:
    """Every table and figure of the paper's experiments, beside its own numbers."""
    from gpmil.cli import paper

    paper.run(
        paper.Options(
            out, quick, data, images, panda, runs, folds, components, search, seed, jobs, device
        )
    )


def main() -> None:
    """Entry point of the command `gpmil`."""
    app(prog_name="gpmil")
