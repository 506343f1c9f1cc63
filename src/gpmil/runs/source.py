"""Where the data of a run are, as its config.json says it, and how they are read again."""

from collections.abc import Mapping
from typing import Any

WORDS = ("positive", "negative", "exclude")  # that name classes
# what is no argument of `gpmil.read`
ELSEWHERE = ("data", "patch_labels", *(f"patch_{word}" for word in WORDS))


def arguments(card: Mapping[str, Any]) -> dict[str, Any]:
    """What `gpmil.read` takes besides the path, in its own types.

    >>> card = {"data": "f", "graph": "None", "step": "256,512", "patient": "none"}
    >>> arguments(card)
    {'graph': None, 'step': (256.0, 512.0), 'patient': False}
    """
    said = {name: value for name, value in card.items() if name not in ELSEWHERE}
    if str(said.get("patient")).casefold() == "none" and said.get("patient") is not None:
        said["patient"] = False
    if said.get("step") is not None:
        said["step"] = step(str(said["step"]))
    if str(said.get("graph")).lower() == "none":
        said["graph"] = None
    return said


def patch_words(card: Mapping[str, Any]) -> dict[str, Any]:
    """Which classes of patch labels are positive and so on: their own words, else those of slides.

    >>> patch_words({"positive": "cancer", "patch_positive": "Tumor", "patch_exclude": None})
    {'positive': 'Tumor', 'negative': None, 'exclude': None}
    """
    own = {word: card.get(f"patch_{word}") for word in WORDS}
    return own if any(own.values()) else {word: card.get(word) for word in WORDS}


def step(text: str) -> float | tuple[float, ...]:
    """A spacing of patches, or one per axis."""
    try:
        numbers = tuple(float(piece) for piece in text.split(","))
    except ValueError as error:
        raise ValueError(
            f"--step must be a number or a pair such as 256,512, got {text!r}."
        ) from error
    return numbers[0] if len(numbers) == 1 else numbers
