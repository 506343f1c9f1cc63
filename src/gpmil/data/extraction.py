"""How the features of a cohort were extracted, and whether two cohorts agree.

A reader puts encoder, magnification, patch size and overlap into the metadata of `Bags`, a fitted
model keeps them, and a prediction compares the two: features of another magnification have the
same shape and are no error to anybody else.
"""

import math
import re
from collections.abc import Iterable, Mapping
from typing import Any

from gpmil.data.classes import join_words

Facts = dict[str, Any]

WORDS = {
    "encoder": "encoder {!r}",
    "magnification": "magnification {}x",
    "mpp": "mpp {}",  # microns per pixel of the patch
    "patch_size": "patch size {} px",  # as the encoder's patch was cut, before it is resized
    "overlap": "overlap {} px",
    "downsample": "downsample {}",  # of CLAM's files, which know no magnification
}
NAMES = tuple(WORDS)
ONE_PER_COHORT = {
    "encoder": "encoder",
    "magnification": "magnification",
    "mpp": "microns-per-pixel value",
    "patch_size": "patch size",
}
MUST_AGREE = (*ONE_PER_COHORT, "overlap")
"""A model refuses other values than its own; another downsample may be the same magnification."""

MPP_TOLERANCE = 0.02  # scanners of one magnification differ by less
NUMBER = re.compile(r"\s*(\d+(?:\.\d+)?)\s*(?:x|px)?\s*")


def known(said: Mapping[str, Any]) -> Facts:
    """The facts among `said` that are known; numbers as numbers, whoever wrote them.

    >>> known({"encoder": "uni_v1", "magnification": "20x", "overlap": 0.0, "patch_size": None})
    {'encoder': 'uni_v1', 'magnification': 20, 'overlap': 0}
    """
    found = {name: _plain(name, said.get(name)) for name in NAMES}
    return {name: value for name, value in found.items() if value is not None}


def _plain(name: str, value: Any) -> Any:
    if value is None or str(value) == "":
        return None
    number = None if name == "encoder" else NUMBER.fullmatch(str(value))
    if number is None:
        return str(value)
    found = float(number[1])
    return int(found) if found.is_integer() else found


def decisive(name: str, facts: Facts) -> bool:
    """Whether another value of a fact means other features.

    CLAM's files say no magnification, and users cut 512 px at 40x and 256 px at 20x on purpose.

    >>> decisive("patch_size", {"patch_size": 256}), decisive("patch_size", {"magnification": 20})
    (False, True)
    """
    return name != "patch_size" or not facts.keys().isdisjoint(("magnification", "mpp"))


def same(name: str, a: Any, b: Any) -> bool:
    """Whether two values of a fact agree."""
    if isinstance(a, str) or isinstance(b, str):
        return str(a) == str(b)
    return math.isclose(a, b, rel_tol=MPP_TOLERANCE if name == "mpp" else 1e-6)


def words(facts: Mapping[str, Any], names: Iterable[str] = NAMES) -> str:
    """Such as "magnification 20x and patch size 256 px".

    >>> words({"magnification": 20, "overlap": 0, "encoder": "uni_v1"})
    "encoder 'uni_v1', magnification 20x and overlap 0 px"
    >>> words({"mpp": 256 / 224})
    'mpp 1.143'
    """
    return join_words([_said(name, facts[name]) for name in names if name in facts])


def _said(name: str, value: Any) -> str:
    return WORDS[name].format(f"{value:.4g}" if isinstance(value, float) else value)


def mismatch(trained: Facts, given: Facts) -> str:
    """What a model and some bags say differently, with the two values; "" where they agree.

    >>> mismatch({"magnification": 20, "overlap": 0}, {"magnification": 10, "overlap": 0})
    'the model was fitted on features of magnification 20x, these bags come from 10x. ...'
    """
    differ = _differing(trained, given, MUST_AGREE)
    if not differ:
        return ""
    here = [_said(name, given[name]).removeprefix(_title(name)) for name in differ]
    return (
        f"the model was fitted on features of {words(trained, differ)}, these bags come from "
        f"{join_words(here)}. Extract features as those of the model were, or fit a model on "
        "features like these."
    )


def notes(trained: Facts, given: Facts) -> list[str]:
    """What could not be compared, because one side alone says it; nothing where neither does."""
    found = []
    for ours, theirs, who, other in (
        (trained, given, "the model", "these bags do"),
        (given, trained, "these bags", "the model does"),
    ):
        alone = [name for name in ours if name not in theirs]
        if alone:
            found.append(
                f"{who} come{'s' * (who == 'the model')} from features of {words(ours, alone)}; "
                f"{other} not say it, so that it was not compared. Check that it is the same."
            )
    for name in _differing(trained, given, ["downsample"]):
        found.append(
            f"the model was fitted on patches of {words(trained, [name])}, these have "
            f"{given[name]}, and the files do not say the magnification. Check that it is the same."
        )
    return found


def _differing(a: Facts, b: Facts, names: Iterable[str]) -> list[str]:
    return [name for name in names if name in a and name in b and not same(name, a[name], b[name])]


def _title(name: str) -> str:
    return WORDS[name].partition("{")[0]


# --- Classes --------------------------------------------------------------------------------------


def class_mismatch(trained: Any, given: Any) -> str:
    """What to say where the labels of some bags have the model's classes the other way round.

    >>> class_mismatch(["benign", "tumour"], ("Tumour", "benign"))
    "the model's positive class is 'tumour', that of these labels is 'benign'. ..."
    """
    ours, theirs = _folded(trained), _folded(given)
    if not ours or not theirs or (ours[1] != theirs[0] and ours[0] != theirs[1]):
        return ""
    return f"{_classes_said(trained, given)} Name {trained[1]!r} as the positive class here, too."


def class_notes(trained: Any, given: Any) -> list[str]:
    """A line where positive classes have different names, which may mean the same."""
    ours, theirs = _folded(trained), _folded(given)
    if not ours or not theirs or ours[1] == theirs[1]:
        return []
    return [_classes_said(trained, given)]


def _folded(classes: Any) -> list[str]:
    pair = list(classes) if isinstance(classes, list | tuple) else []
    return [" ".join(str(name).casefold().split()) for name in pair] if len(pair) == 2 else []


def _classes_said(trained: Any, given: Any) -> str:
    return f"the model's positive class is {trained[1]!r}, that of these labels is {given[1]!r}."
