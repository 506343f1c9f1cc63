"""`gpmil bench`: the door to the benchmarks of a clone, which are no part of the package."""

import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path

CLONE = Path(__file__).parents[3]


def run(arguments: Sequence[str]) -> int:
    """Hand the words behind `gpmil bench` to benchmarks/bench; its exit code."""
    place = CLONE / "benchmarks"
    if not (place / "bench" / "command.py").is_file():
        raise ValueError(
            "the benchmarks are not installed with gpmil: they are the folder benchmarks/ of its "
            "repository. Clone it, and run make bench there."
        )
    if str(place) not in sys.path:
        sys.path.append(str(place))
    return import_module("bench.command").main(list(arguments))
