"""The settings that a fit finds: the one list of them, and their words on pages and in lines."""

import sys
from collections.abc import Mapping
from typing import Any

# The attribute of a fitted model, under which its card has it too, and what people call it.
LEARNED = {
    "variance_": "variance",
    "lengthscale_": "length scale",
    "mean_": "prior mean",
    "coupling_": "coupling",
    "slide_effect_": "slide effect",
    "slide_context_": "slide context",
    "slide_context_lengthscale_": "length scale of the slide context",
}
MEANINGS = {
    "slide_effect_": "the deviation of what all patches of a slide share beyond their features "
    "(stain, scanner); at 0 they share nothing, as in the paper",
    "slide_context_": "the variance of what the slide as a whole adds to its patches "
    "(it may learn stain or site)",
}


def learned(model: Any) -> dict[str, float]:
    """The settings of a fitted model as numbers; those it lacks are left out."""
    return numbers({name: getattr(model, name, None) for name in LEARNED})


def numbers(found: Mapping[str, Any]) -> dict[str, float]:
    """The settings among what a model's card says, where they are numbers; no context is none.

    >>> numbers({"mean_": -2, "coupling_": None, "slide_effect_": 0.5, "n_iter_": 8})
    {'mean_': -2.0, 'slide_effect_': 0.5}
    """
    known: dict[str, Any] = {name: found.get(name) for name in LEARNED}
    if known["slide_context_"] == 0:
        del known["slide_context_"]
    return {name: float(value) for name, value in known.items() if is_finite(value)}


def is_finite(value: Any) -> bool:
    """Whether this is a number that can be shown; whole numbers may have any number of digits."""
    known = isinstance(value, int | float) and not isinstance(value, bool)
    return known and abs(value) <= sys.float_info.max


def in_words(settings: Mapping[str, float]) -> str:
    """For a line of text.

    >>> in_words({"variance_": 61.08, "slide_effect_": 0.8351})
    'variance 61.08, slide effect 0.8351'
    """
    return ", ".join(f"{LEARNED[name]} {value:.4g}" for name, value in settings.items())
