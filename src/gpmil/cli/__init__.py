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
            typer.echo("gpmil: interrupted, nothing was written", err=True)
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


def main() -> None:
    """Entry point of the command `gpmil`."""
    app(prog_name="gpmil")
