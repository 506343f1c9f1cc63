"""Patients, where no column names them: guessed from TCGA barcodes, or suspected by names.

Slides of one patient are alike. Where they are taken for different patients, some are trained on
while others are tested, and intervals are too narrow.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from gpmil.data.checks import count

BARCODE = re.compile(r"TCGA-[A-Z0-9]{2}-[A-Z0-9]{4}(?![A-Z0-9])", re.IGNORECASE)
MOST = 0.5  # a smaller share of barcodes among the names is chance, or another cohort's
# What tells the slides of a patient apart: 1, 02, A, B3, 2a; of more digits it is a number of its
# own (S19-1234).
NUMBERED = re.compile(r"(.*\d.*?)[-_. ]+(0?\d{1,2}|[A-Z]\d{0,2}|\d[A-Z])", re.IGNORECASE)
LETTERED = re.compile(r"(.*\d)([A-Z])", re.IGNORECASE)
FEWEST_PATIENTS = 3
MOST_SLIDES = 10  # on average; more begin alike for another reason, such as a year or a batch


@dataclass(frozen=True)
class Guess:
    """The patient of every slide, or None where nobody knows; what is to be noted, or feared."""

    patients: list[str] | None = None
    note: str = ""
    warning: str = ""


def guess(names: Sequence[str]) -> Guess:
    """What the names of slides tell of their patients, where nothing else does."""
    found = from_barcodes(names)
    if found is None:
        return Guess(warning=warning(names))
    slide, patient = next((n, p) for n, p in zip(names, found) if n != p or BARCODE.match(n))
    alone = sum(not BARCODE.match(name) for name in names)
    rest = f" {count(alone, 'slide')} without a barcode: each is one of its own." if alone else ""
    note = (
        f"patients are guessed from TCGA barcodes, {patient!r} from {slide!r}: "
        f"{count(len(set(found)), 'patient')} with {count(len(names), 'slide')}.{rest} "
        "--patient none (in Python patient=False) takes every slide as one of its own."
    )
    return Guess(found, note)


def from_barcodes(names: Sequence[str]) -> list[str] | None:
    """The patient of each TCGA barcode, its first 12 characters; None unless most names are such.

    >>> from_barcodes(["TCGA-A1-A0SB-01Z-00-DX1", "TCGA-A1-A0SB-01A-01-TS1", "tcga-b2-00X1"])
    ['TCGA-A1-A0SB', 'TCGA-A1-A0SB', 'TCGA-B2-00X1']
    >>> from_barcodes(["slide_1", "slide_2"]) is None
    True
    """
    found = [BARCODE.match(name) for name in names]
    if not names or sum(match is not None for match in found) < MOST * len(names):
        return None
    return [match[0].upper() if match else name for name, match in zip(names, found)]


def beginning(name: str) -> str | None:
    """What the slides of a patient would have in common; None where the name has no such part.

    It must hold a digit: "slide" of slide_1 and "tumor" of tumor_7 are no patients.

    >>> [beginning(name) for name in ("P012_1", "12-A", "case7 slide 2", "18B0003894A")]
    ['P012', '12', 'case7 slide', '18B0003894']
    >>> [beginning(name) for name in ("slide_001", "tumor_7", "S19-1234", "a")]
    [None, None, None, None]
    """
    match = NUMBERED.fullmatch(name) or LETTERED.fullmatch(name)
    return match[1] if match else None


def shared(names: Sequence[str]) -> dict[str, list[str]]:
    """Slides that begin alike as those of a patient do, by their beginning; else empty.

    >>> shared(["P1_1", "P1_2", "P2_1", "P3_1"])
    {'P1': ['P1_1', 'P1_2']}
    >>> shared(["scan1_1", "scan1_2", "scan1_3"])
    {}
    """
    found: dict[str, list[str]] = {}
    for name in dict.fromkeys(names):
        begin = beginning(name)
        if begin is not None:
            found.setdefault(begin, []).append(name)
    slides = sum(map(len, found.values()))
    if len(found) < FEWEST_PATIENTS or slides > MOST_SLIDES * len(found):
        return {}
    return {begin: own for begin, own in found.items() if len(own) > 1}


def warning(names: Sequence[str]) -> str:
    """What to say where slides may be of the same patients; empty where nothing suggests it.

    >>> print(warning(["P1_1", "P1_2", "P2_1", "P3_1"]))
    2 of 4 slides may share a patient with another: 'P1_1' and 'P1_2' begin alike (1 ...
    >>> warning(["slide_1", "slide_2", "slide_3"])
    ''
    """
    found = shared(names)
    if not found:
        return ""
    one, other, *_ = next(iter(found.values()))
    return (
        f"{sum(map(len, found.values()))} of {count(len(names), 'slide')} may share a patient with "
        f"another: {one!r} and {other!r} begin alike ({count(len(found), 'such beginning')}), and "
        "no patient is known. Every slide is taken as a patient of its own: folds leak and "
        "intervals are too narrow if that is wrong. Name the column with --patient COLUMN."
    )
