"""The methods whose patches Figures 4 and 5 show, and how they are named there."""

from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Int

from gpmil.paper.methods import DEFAULT, Method, key_of
from gpmil.paper.results import Results, Run

COMPARED = ("vgpmil", "pr", key_of(DEFAULT), "tuned")
RIGHT, WRONG = "#009988", "#cc3311"  # told apart by colour-blind readers too


class Row(NamedTuple):
    """A method of the figure and its first run."""

    method: Method
    run: Run
    patches: Float[np.ndarray, " N"]

    def right(self, labels: Int[np.ndarray, " B"]) -> np.ndarray:
        """Whether each slide is classified correctly: positive where the log odds are."""
        return (self.run.log_odds > 0) == (labels == 1)


def patch_rows(results: Results) -> list[Row]:
    """The methods of Figures 4 and 5 that were run and have patch probabilities."""
    by_key = {method.key: method for method in results.methods}
    firsts = [(by_key[k], results.of(k)[0]) for k in COMPARED if k in by_key and results.of(k)]
    return [
        Row(method, run, run.patch_probability)
        for method, run in firsts
        if run.patch_probability is not None
    ]


def without_patches(results: Results) -> str:
    """A sentence about methods that were run and say nothing of patches; empty if there are none.

    Figures say what they leave out.
    """
    shown = {row.method.key for row in patch_rows(results)}
    silent = [
        method.label
        for method in results.methods
        if method.key in COMPARED and method.key not in shown and results.of(method.key)
    ]
    return f" Not shown, for want of patch probabilities: {'; '.join(silent)}." if silent else ""


def said(probability: float) -> str:
    """P in two digits; never a certainty, nor a tie, that rounding made.

    >>> said(0.4127), said(0.9996), said(0.001), said(0.504)
    ('P = 0.41', 'P > 0.99', 'P < 0.01', 'P = 0.504')
    """
    if probability > 0.995:
        return "P > 0.99"
    if probability < 0.005:
        return "P < 0.01"
    digits = 3 if f"{probability:.2f}" == "0.50" else 2
    return f"P = {probability:.{digits}f}"


def in_lines(label: str) -> str:
    """A label with lambda and settings on lines of their own.

    >>> in_lines("VGPMIL-PR-I, λ = 0.5 (searched)").split("\\n")
    ['VGPMIL-PR-I,', 'λ = 0.5', '(searched)']
    """
    return label.replace(", λ", ",\nλ").replace(" (", "\n(")


def short(name: str, most: int = 18) -> str:
    """Beginning and end of a long name.

    >>> short("TCGA-2A-A8VL-01Z-00-DX1")
    'TCGA-2A-…Z-00-DX1'
    """
    half = most // 2 - 1
    return name if len(name) <= most else f"{name[:half]}…{name[-half:]}"
