"""`gpmil view`: finished runs in the browser, until Ctrl-C."""

from collections.abc import Sequence
from pathlib import Path

import typer

from gpmil.viewer import serve


def check_port(port: int) -> None:
    """Insist on a number that a port can have."""
    if not 0 <= port <= 65535:
        raise ValueError(f"--port: expected a number from 0 (any free one) to 65535, found {port}.")


def run(
    folders: Sequence[Path],
    slides: Path | None = None,
    host: str = "127.0.0.1",
    port: int = 0,
    browser: bool = True,
    token: str | None = None,
) -> None:
    """Serve the runs; a ValueError before anything is served where one cannot be shown."""
    check_port(port)
    served = serve.prepare(list(folders), slides, host, port, token)

    def ready() -> None:
        typer.echo(f"{served.url}  (Ctrl-C ends the viewer)")
        if served.entrance.token:
            typer.echo("Whoever has this address sees the runs: send it to nobody else.", err=True)
        if browser:
            serve.open_browser(served.url)

    serve.run(served, ready)
