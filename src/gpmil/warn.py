"""Warnings that point at the line that called gpmil, whatever lies between."""

import sys
import warnings
from types import FrameType

OURS = ("gpmil", "jaxtyping", "beartype")  # where shapes are checked, theirs lie around ours


def warn_caller(message: str, category: type[Warning] = UserWarning) -> None:
    """Warn at the line that called the outermost function of the package.

    warnings.warn(skip_file_prefixes=...), from Python 3.12 on, would stop at frames of others in
    between: an optimiser of scipy that calls our objective.
    """
    frame: FrameType | None = sys._getframe()
    depth = level = 1
    while frame is not None:
        depth += 1
        if frame.f_globals.get("__name__", "").split(".")[0] in OURS:
            level = depth  # that of its caller
        frame = frame.f_back
    warnings.warn(message, category, stacklevel=level)
