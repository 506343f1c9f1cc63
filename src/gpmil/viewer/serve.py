"""A server for the viewer, from the first request to Ctrl-C."""

import os
import socket
import threading
import webbrowser
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from gpmil import extras
from gpmil.viewer.cohort import open_cohort
from gpmil.viewer.security import EVERYWHERE, Door, door


@dataclass(frozen=True)
class Served:
    """A viewer that is ready to run: its socket is bound, nothing is answered yet."""

    app: Any
    listening: socket.socket
    host: str
    entrance: Door

    @property
    def url(self) -> str:
        """The address to open, with the token where there is one."""
        host = socket.gethostname() if self.host in EVERYWHERE else self.host
        name = f"[{host}]" if ":" in host else host
        port = self.listening.getsockname()[1]
        token = f"?token={self.entrance.token}" if self.entrance.token else ""
        return f"http://{name}:{port}/{token}"


def require_packages() -> None:
    """A ValueError that says what to install, where something is missing."""
    missing = [name for name in ("fastapi", "uvicorn") if find_spec(name) is None]
    if missing:
        raise ValueError(f"the viewer needs {' and '.join(missing)}: {extras.install('viewer')}")


def prepare(
    folders: list[Path],
    slides: Path | None = None,
    host: str = "127.0.0.1",
    port: int = 0,
    token: str | None = None,
) -> Served:
    """Read the runs and take a port; a ValueError says what is wrong."""
    require_packages()
    from gpmil.viewer.app import build

    cohort = open_cohort(folders, slides)
    listening = _listen(host, port)
    try:
        entrance = door(host, token, listening.getsockname()[1])
        return Served(build(cohort, entrance), listening, host, entrance)
    except BaseException:
        listening.close()
        raise


def _listen(host: str, port: int) -> socket.socket:
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listening = socket.socket(family, kind)
        try:
            if os.name == "posix":  # elsewhere it would let another program take the port
                listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listening.bind(address)
            listening.listen(128)
        except BaseException:
            listening.close()
            raise
    except (OSError, OverflowError) as error:
        raise ValueError(
            f"cannot listen on {host}, port {port}: {error}. Choose another with --port, or leave "
            "it out for a free one."
        ) from error
    return listening


def run(served: Served, ready: Callable[[], None] = lambda: None) -> None:
    """Answer until Ctrl-C; `ready` is called when requests can come."""
    import uvicorn

    config = uvicorn.Config(
        served.app,
        log_level="warning",
        access_log=False,  # it would show the token
        server_header=False,
        lifespan="on",
        timeout_graceful_shutdown=2,
    )
    ready()
    try:
        uvicorn.Server(config).run(sockets=[served.listening])
    except KeyboardInterrupt:
        pass
    finally:
        served.listening.close()


def open_browser(url: str) -> None:
    """In a thread of its own: some browsers do not come back before they are closed."""
    threading.Thread(target=webbrowser.open, args=(url,), daemon=True).start()
