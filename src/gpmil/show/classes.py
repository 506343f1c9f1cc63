"""Grades and types on maps: a colour per class, and the class of every patch."""

from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float, Int
from matplotlib import colormaps
from matplotlib.colors import to_hex

LIKE_TISSUE = "#d5d8dc"  # of the first class: nothing to see
GRADE_SHADES = "RdPu"  # darker with the grade, and no scale of another layer
# Okabe and Ito: types that people with any colour vision tell apart
TYPE_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#f0e442")


def class_colours(n: int, ordered: bool) -> list[str]:
    """Colours of n classes, the first one pale: grades darken, types differ.

    >>> class_colours(3, ordered=True), class_colours(2, ordered=False)
    (['#d5d8dc', '#f994b1', '#49006a'], ['#d5d8dc', '#0072b2'])
    """
    if ordered:
        shades = colormaps[GRADE_SHADES](np.linspace(0.4, 1.0, n - 1) if n > 2 else [0.8])
        return [LIKE_TISSUE, *(to_hex(shade) for shade in shades)]
    return [LIKE_TISSUE, *(TYPE_COLOURS[k % len(TYPE_COLOURS)] for k in range(n - 1))]


class ClassLayer(NamedTuple):
    """What is said of the class of every patch of a slide."""

    names: tuple[str, ...]
    probability: Float[np.ndarray, "n K"]
    ordered: bool  # grades, the lowest first

    @property
    def word(self) -> str:
        """What a class is called."""
        return "grade" if self.ordered else "type"

    @property
    def colours(self) -> list[str]:
        """One per class."""
        return class_colours(len(self.names), self.ordered)

    @property
    def codes(self) -> Int[np.ndarray, " n"]:
        """The class of every patch: of grades the median one, of types the likeliest; -1 unknown.

        >>> p = np.array([[0.4, 0.3, 0.3], [np.nan] * 3])
        >>> ClassLayer(("a", "b", "c"), p, True).codes, ClassLayer(("a", "b", "c"), p, False).codes
        (array([ 1, -1]), array([ 0, -1]))
        """
        known = np.isfinite(self.probability).all(1)
        p = np.where(known[:, None], self.probability, 0.0)
        # as many grades are passed as P(grade >= k) > 1/2
        above = p[:, ::-1].cumsum(1)[:, ::-1][:, 1:]
        found = (above > 0.5).sum(1) if self.ordered else p.argmax(1)
        return np.where(known, found, -1)

    def part(self, chosen: Any) -> "ClassLayer":
        """Of some of the patches, by a slice or a mask."""
        return self._replace(probability=self.probability[chosen])
