"""Classes of bags without an order: a negative one, and types of what is positive."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from gpmil.data.checks import listed
from gpmil.data.classes import fold, text
from gpmil.data.grades import FEWEST, Graded, words_of

MOST = 20  # classes


def check_names(classes: Any) -> None:
    """Insist on different names, the negative class first."""
    good = isinstance(classes, list | tuple | np.ndarray) and FEWEST <= len(classes) <= MOST
    words = [text(name) for name in classes] if good else []
    if not good or None in words or len({fold(str(word)) for word in words}) < len(words):
        raise ValueError(
            f"classes must be a list of {FEWEST} to {MOST} different names, the negative class "
            f"first, or None for 0 (negative), 1, ...; got {classes!r:.80}."
        )


def encode(values: Any, classes: Sequence[Any] | None, names: np.ndarray) -> Graded:
    """One class per bag, as numbers; `classes` are their names, the negative one first.

    >>> names = np.array(["a", "b", "c"])
    >>> encode(["lobular", "none", "ductal"], ["none", "ductal", "lobular"], names).codes
    array([2, 0, 1])
    """
    words = words_of(values, names, "class")
    asked = _numbers(words) if classes is None else [text(name) for name in classes]
    order = {fold(str(name)): k for k, name in enumerate(asked)}
    unknown = sorted({word for word in words if fold(word) not in order})
    if unknown:
        raise ValueError(
            f"{listed(unknown)} {'is' if len(unknown) == 1 else 'are'} not among classes={asked}. "
            "Name all classes, the negative one first, or correct the label."
        )
    found = Graded(
        np.array([order[fold(word)] for word in words]),
        np.arange(len(asked)) if classes is None else np.array(asked),
    )
    if (found.counts == 0).any():
        empty = found.classes[found.counts == 0]
        raise ValueError(
            f"no bag is of class {listed(str(name) for name in empty)}: nothing says what it looks "
            "like. Leave it out of classes, or add bags of it."
        )
    return found


def _numbers(words: list[str]) -> list[str]:
    """The classes 0, 1, ..., K - 1, all of them there."""
    there = set(words)
    if not FEWEST <= len(there) <= MOST or there != {str(k) for k in range(len(there))}:
        raise ValueError(
            f"classes must be the numbers 0 (negative), 1, ..., {FEWEST} to {MOST} of them, found "
            f"{listed(sorted(there))}. Name them, the negative one first: "
            "classes=['benign', 'ductal', 'lobular']."
        )
    return [str(k) for k in range(len(there))]
