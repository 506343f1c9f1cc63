"""Work in parts, each computed once and kept in a file of its own.

An interrupted study goes on where it stopped, and a repeated one has nothing to do.
"""

import hashlib
import io
import json
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeVar, runtime_checkable

import joblib
import numpy as np

from gpmil import __version__
from gpmil.files.whole import write_whole

Packed = tuple[dict[str, np.ndarray], dict[str, Any]]  # arrays, and a card of plain values


@runtime_checkable
class Part(Protocol):
    """One piece of work: what it is called, what it costs, and how its result becomes a file."""

    @property
    def title(self) -> str:
        """In words."""
        ...

    @property
    def effort(self) -> float:
        """Rough cost, for the time left."""
        ...

    def name(self) -> str:
        """The stem of its file: changes with everything that the result depends on."""
        ...

    def compute(self) -> Any:
        """The result."""
        ...

    def pack(self, result: Any) -> Packed:
        """The result as arrays and a card."""
        ...

    def unpack(self, packed: Packed) -> Any:
        """The result again."""
        ...


AnyPart = TypeVar("AnyPart", bound=Part)


def sealed(stem: str, contents: str) -> str:
    """The stem of a file, with a seal of what is in it and of the version.

    >>> sealed("a", "x") == sealed("a", "x"), sealed("a", "x") == sealed("a", "y")
    (True, False)
    """
    key = hashlib.blake2b(f"{contents}, {__version__}".encode(), digest_size=6).hexdigest()
    return f"{stem}-{key}"


def carry_out(
    parts: Sequence[AnyPart], folder: Path, n_jobs: int = 1
) -> Iterator[tuple[AnyPart, Any, bool]]:
    """Every part with its result, and whether it was kept from before, as they become known."""
    files = {id(part): folder / f"{part.name()}.npz" for part in parts}
    waiting = []
    for part in parts:
        known = kept(part, files[id(part)])
        if known is None:
            waiting.append(part)
        else:
            yield part, known, True
    if n_jobs != 1:  # the longest first, or the last of them would run alone
        waiting.sort(key=lambda part: -part.effort)
    work = joblib.Parallel(n_jobs=n_jobs, return_as="generator_unordered")(
        joblib.delayed(_compute_and_keep)(k, part, files[id(part)])
        for k, part in enumerate(waiting)
    )
    for k, result in work:
        yield waiting[k], result, False


def _compute_and_keep(number: int, part: Part, file: Path) -> tuple[int, Any]:
    result = part.compute()
    keep(part, result, file)
    return number, result


def keep(part: Part, result: Any, file: Path) -> None:
    """Write a result, all or nothing."""
    arrays, card = part.pack(result)
    stream = io.BytesIO()
    np.savez_compressed(stream, card=np.array(json.dumps(card)), **arrays)  # type: ignore[arg-type]
    write_whole(file, stream.getvalue())


def kept(part: Part, file: Path) -> Any:
    """A result that was written; None where there is none, or an unreadable one."""
    try:
        with np.load(file, allow_pickle=False) as found:
            card = json.loads(str(found["card"]))
            return part.unpack(({k: found[k] for k in found.files if k != "card"}, card))
    except (OSError, ValueError, KeyError, TypeError, zipfile.BadZipFile):
        return None
