"""Grades of bags: labels in an order, 0 < 1 < ... < K - 1 or by their names from the lowest on."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Int

from gpmil.data.checks import listed
from gpmil.data.classes import fold, join_words, text
from gpmil.warn import warn_caller

FEWEST, MOST = 2, 8  # grades


class Graded(NamedTuple):
    """The grade of every bag as a number, and the grades as they were given."""

    codes: Int[np.ndarray, " B"]
    classes: np.ndarray  # (K,), numbers 0, 1, ... or names

    @property
    def counts(self) -> Int[np.ndarray, " K"]:
        """Bags of every grade."""
        return np.bincount(self.codes, minlength=len(self.classes))


def classes_of(grades: Sequence[Any] | None, n_grades: int) -> np.ndarray:
    """What `predict` answers with: the names, or 0, 1, ..."""
    return np.arange(n_grades) if grades is None else np.array([text(g) for g in grades])


def words_of(values: Any, names: np.ndarray, what: str) -> list[str]:
    """What is said of every bag, as text; `what` it is, for messages."""
    column = np.asarray(values)
    if column.shape != (len(names),):
        raise ValueError(
            f"expected one {what} per bag, {len(names)} in all; got an array of shape "
            f"{column.shape}."
        )
    said = [text(value) for value in column.tolist()]
    missing = [b for b, word in enumerate(said) if word is None or word == "-1"]
    if missing:
        raise ValueError(
            f"{len(missing)} of {len(names)} bags have no {what} ({listed(names[missing])}): fit "
            "needs one for every bag. Leave them out; they can be predicted."
        )
    return [str(word) for word in said]


def encode(values: Any, grades: Sequence[Any] | None, names: np.ndarray) -> Graded:
    """One grade per bag; `grades` are their names, the lowest first, `names` those of the bags.

    >>> encode(["4", "benign", 3.0], ["benign", "3", "4"], np.array(["a", "b", "c"])).codes
    array([2, 0, 1])
    """
    words = words_of(values, names, "grade")
    found = Graded(_numbers(words), np.arange(0)) if grades is None else _named(words, grades)
    n_grades = int(found.codes.max()) + 1 if grades is None else len(found.classes)
    found = Graded(found.codes, classes_of(grades, n_grades))
    _check_counts(found, given=grades is not None)
    return found


def _numbers(words: list[str]) -> Int[np.ndarray, " B"]:
    """Codes 0, 1, ..., K - 1, all of them there."""
    there = sorted(set(words), key=lambda word: (not word.isdecimal(), word.zfill(20)))
    if not all(word.isdecimal() for word in there):
        raise ValueError(
            f"grades must be the numbers 0, 1, ..., found {listed(there)}. Name them in their "
            "order, the lowest first: grades=['benign', '3', '4', '5']."
        )
    codes = [int(word) for word in there]
    if codes != list(range(len(codes))) and len(codes) > 1:
        raise ValueError(
            f"grades must be the numbers 0, 1, ..., K - 1 without a gap, found "
            f"{join_words(there)}. Give the grades in their order with grades={there}, or all that "
            "there may be."
        )
    return np.array([int(word) for word in words])


def check_names(grades: Any) -> None:
    """Insist on names of two to eight grades."""
    good = isinstance(grades, list | tuple | np.ndarray) and len(grades) > 0
    words = [text(g) for g in grades] if good else []
    if not good or None in words:
        raise ValueError(
            f"grades must be a list of names, the lowest first, or None for 0, 1, ...; got "
            f"{grades!r:.80}."
        )
    if len({fold(word) for word in words if word is not None}) < len(words):
        raise ValueError(f"grades must be different names, got {listed(words)}.")
    if not FEWEST <= len(words) <= MOST:
        raise ValueError(f"grades: expected {FEWEST} to {MOST}, got {len(words)}. Join some.")


def _named(words: list[str], grades: Sequence[Any]) -> Graded:
    check_names(grades)
    order = {fold(str(text(name))): k for k, name in enumerate(grades)}
    unknown = sorted({word for word in words if fold(word) not in order})
    if unknown:
        raise ValueError(
            f"{listed(unknown)} {'is' if len(unknown) == 1 else 'are'} not among grades="
            f"{[text(g) for g in grades]}. Name all grades, the lowest first, or correct the label."
        )
    return Graded(np.array([order[fold(word)] for word in words]), classes_of(grades, len(grades)))


def _check_counts(found: Graded, given: bool) -> None:
    counts, names = found.counts, found.classes
    if (counts > 0).sum() < FEWEST:
        raise ValueError(
            f"all {len(found.codes)} bags have grade '{names[int(found.codes[0])]}': a model needs "
            "two grades at least. Check the label column, or the split."
        )
    if len(names) > MOST:
        raise ValueError(f"expected {FEWEST} to {MOST} grades, found {len(names)}. Join some.")
    for end, word in ((0, "lowest"), (-1, "highest")):
        if given and not counts[end]:
            raise ValueError(
                f"no bag has the {word} grade '{names[end]}': nothing says where it begins. Leave "
                "it out of grades, or add bags that have it."
            )
    empty = names[counts == 0]
    if len(empty):
        warn_caller(
            f"no bag has grade {listed(str(g) for g in empty)}, which lies between others: how "
            "wide it is comes from the prior alone.",
            UserWarning,
        )
