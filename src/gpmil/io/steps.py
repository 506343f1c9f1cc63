"""The distance of neighbouring patches, and their side: what files tell, else what positions show.

In this order: the step given, `patch_size_level0` less the overlap, `patch_size` times the
downsampling, the same from the file of the patches, the positions. Positions are never divided
into cells: ``gpmil.data.graphs`` connects what lies one step apart, within a tolerance.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Float, Int

from gpmil.data import graphs
from gpmil.data.checks import SHOWN, count
from gpmil.io.slides import SlideFacts

SMALLEST, LARGEST = 1e-6, 1e9
INFERRED = "inferred from the positions"

Step = tuple[float, ...]
Attributes = Mapping[str, Any]


def number(attrs: Attributes, name: str, zero: bool = False) -> float | None:
    """A positive attribute as a number; None where it is missing, which TRIDENT writes 'None'.

    So is what no step, size or magnification can be, such as 1e300. `zero` allows that, too.
    """
    try:
        value = float(np.ravel(attrs[name])[0])
    except (KeyError, ValueError, TypeError, IndexError, OverflowError):
        return None
    return value if SMALLEST <= value <= LARGEST or (zero and value == 0) else None


def _level0(attrs: Attributes) -> tuple[float | None, float | None]:
    """TRIDENT: side of a patch in level-0 pixels, and how many of them a pixel of the patch has."""
    size0, size = number(attrs, "patch_size_level0"), number(attrs, "patch_size")
    native, target = number(attrs, "level0_magnification"), number(attrs, "target_magnification")
    scale = native / target if native and target else None
    if size0 and size:
        scale = size0 / size
    if size0 is None and size and scale:
        size0 = size * scale
    return size0, scale


def level0_step(attrs: Attributes) -> Step | None:
    """TRIDENT: the patch in level-0 pixels less the overlap, given at the target magnification."""
    size0, scale = _level0(attrs)
    overlap = number(attrs, "overlap") or 0.0
    if size0 is None or (overlap and scale is None):
        return None
    # step = patch_size_level0 - overlap x (level-0 pixels per pixel of the patch)
    step = size0 - overlap * (scale or 1.0)
    return (step, step) if step > 0 else None


def level0_size(attrs: Attributes) -> Step | None:
    """TRIDENT: the patch in level-0 pixels, whatever the overlap."""
    size0, _ = _level0(attrs)
    return None if size0 is None else (size0, size0)


def downsampled_step(attrs: Attributes) -> Step | None:
    """CLAM: patch_size x int(downsample), axis by axis; it truncates the downsampling too."""
    size = number(attrs, "patch_size")
    if size is None or "downsample" not in attrs:
        return None
    try:
        factors = [int(f) for f in np.ravel(attrs["downsample"])]
    except (ValueError, TypeError, OverflowError):  # text, NaN or infinite
        return None
    pair = factors if len(factors) == 2 else factors[:1] * 2
    if len(pair) != 2 or min(pair) <= 0 or size * max(pair) > LARGEST:
        return None
    return size * pair[0], size * pair[1]


def told_step(attrs: Attributes, beside: Attributes | None) -> tuple[Step | None, str]:
    """The step that a file tells, or the one of the patches `beside` it, and from what."""
    for source, where in ((attrs, ""), (beside or {}, " of the patches file")):
        for formula, words in (
            (level0_step, "patch_size_level0 less the overlap"),
            (downsampled_step, "patch_size x downsample"),
        ):
            step = formula(source)
            if step is not None:
                return step, words + where
    return None, ""


def told_size(attrs: Attributes, beside: Attributes | None) -> Step | None:
    """The side of a patch that a file tells, or the file of the patches `beside` it.

    >>> told_size({"patch_size": 256, "patch_size_level0": 512, "overlap": 64}, None)
    (512.0, 512.0)
    """
    for source in (attrs, beside or {}):
        # CLAM notes the side alone, and its step is taken to be the same.
        size = level0_size(source) or downsampled_step(source)
        if size is not None:
            return size
    return None


def told_extraction(attrs: Attributes, beside: Attributes | None = None) -> dict[str, Any]:
    """What files of TRIDENT and CLAM say of how patches were cut, as fields of `SlideFacts`.

    >>> told_extraction({"target_magnification": 20, "patch_size": 256, "overlap": 0})
    {'magnification': 20.0, 'patch_size': 256.0, 'overlap': 0.0, 'downsample': None}
    """
    both = (attrs, beside or {})

    def first(name: str, zero: bool = False) -> float | None:
        said = (number(source, name, zero) for source in both)
        return next((value for value in said if value is not None), None)

    magnification = first("target_magnification")
    return {
        "magnification": magnification,
        "patch_size": first("patch_size"),
        "overlap": first("overlap", zero=True),
        "downsample": first("downsample") if magnification is None else None,
    }


def resolve(
    given: Any,
    told: Sequence[SlideFacts],
    coords: Float[np.ndarray, "n k"] | None,
    offsets: Int[np.ndarray, " bags_and_one"],
    needed: bool,
) -> tuple[Any, str, list[str]]:
    """The step for `Bags`, what it is and where it comes from, and notes on what was guessed."""
    if coords is None:
        return None, "none", []
    if given is not None:
        step = tuple(given) if isinstance(given, list) else given
        return step, f"{given}, given", []
    k = coords.shape[1]
    steps = np.array([_spread(t.step, k) for t in told])
    origin = np.array([t.step_from for t in told], dtype=object)
    unknown = np.isnan(steps).any(axis=1)
    if unknown.any() and needed:
        steps[unknown] = graphs.infer_step(coords, offsets)[unknown]
        origin[unknown] = INFERRED
    missing = np.isnan(steps).any(axis=1)
    if missing.all():
        return None, "not known", []
    if missing.any():
        # Bags want all or none; a graph that needs no step does not look at these.
        steps[missing] = steps[~missing][_most_frequent(steps[~missing])]
        origin[missing] = "taken from the other slides"
    notes = [
        f"The step of {count(int((origin == word).sum()), 'slide')} is not in the files and was "
        f"{word}: {describe(steps[origin == word])}. Check it, or give step=."
        for word in (INFERRED, "taken from the other slides")
        if (origin == word).any()
    ]
    return steps, f"{describe(steps)}, {', '.join(Counter(origin.tolist()))}", notes


def describe(steps: Float[np.ndarray, "bags k"]) -> str:
    """Such as "512 (3 slides), 1024 x 512 (2 slides)"; the number alone if there is one only."""
    rows, times = np.unique(steps.round(6), axis=0, return_counts=True)
    words = [
        f"{row[0]:.10g}" if (row == row[0]).all() else " x ".join(f"{s:.10g}" for s in row)
        for row in rows
    ]
    if len(words) == 1:
        return words[0]
    order = np.argsort(-times, kind="stable")[:SHOWN]
    shown = ", ".join(f"{words[i]} ({count(int(times[i]), 'slide')})" for i in order)
    return shown + (", ..." if len(words) > SHOWN else "")


def _spread(step: Step | None, k: int) -> list[float]:
    if step is None:
        return [np.nan] * k
    return list(step) if len(step) == k else [step[0]] * k


def _most_frequent(steps: Float[np.ndarray, "bags k"]) -> int:
    _, first, times = np.unique(steps.round(6), axis=0, return_index=True, return_counts=True)
    return int(first[np.argmax(times)])
