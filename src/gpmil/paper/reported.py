"""The paper's own numbers, read from reported.toml."""

import functools
import tomllib
from importlib.resources import files
from typing import Any


@functools.cache
def numbers() -> dict[str, Any]:
    """All of them, by table."""
    return tomllib.loads(files("gpmil.paper").joinpath("reported.toml").read_text("utf-8"))


def value(table: str, method: str, metric: str) -> tuple[float, float] | None:
    """Mean and deviation that the paper reports; None where it reports none.

    >>> value("table1", "pri-0.5", "accuracy")
    (93.85, 0.04)
    >>> value("table5", "max", "accuracy") is None
    True
    """
    found = numbers()[table].get(method, {}).get(metric)
    return None if found is None else (found[0], found[1])
