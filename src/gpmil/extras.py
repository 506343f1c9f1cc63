"""How to install what is optional: from the folder that gpmil itself was installed from.

No package index has gpmil: `pip install 'gpmil[viewer]'` would find nothing, or a stranger.
"""

import json
import shlex
from importlib import metadata
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from urllib.request import url2pathname

CONSTRAINTS = "constraints.txt"


def install(extra: str) -> str:
    """The command that adds an extra such as "viewer" to this installation."""
    origin = _origin()
    folder = _folder(origin)
    if folder is None:
        return f"pip install -c {CONSTRAINTS} '.[{extra}]' in the folder of the clone"
    words = ["pip", "install", "-c", str(folder / CONSTRAINTS)]
    words += ["-e"] if origin.get("dir_info", {}).get("editable") else []
    return shlex.join([*words, f"{folder}[{extra}]"])


def _origin() -> dict[str, Any]:
    """What pip has noted of where this gpmil came from; {} if nothing."""
    try:
        found = json.loads(metadata.distribution("gpmil").read_text("direct_url.json") or "{}")
    except (metadata.PackageNotFoundError, OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _folder(origin: dict[str, Any]) -> Path | None:
    """The clone, if it is still there."""
    url = urlsplit(str(origin.get("url", "")))
    folder = Path(url2pathname(url.path))
    return folder if url.scheme == "file" and (folder / CONSTRAINTS).is_file() else None
