"""The methods whose patches Figures 3 to 5 show, and how they are named there."""

from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Int, Num

from gpmil.paper.methods import DEFAULT, Method, key_of
from gpmil.paper.results import MethodRun, Results

COMPARED = ("vgpmil", "pr", key_of(DEFAULT), "tuned")
RIGHT, WRONG = "#009988", "#cc3311"  # told apart by colour-blind readers too


class Row(NamedTuple):
    """A method of the figure and its first run."""

    method: Method
    run: MethodRun
    patches: Float[np.ndarray, " N"]

    def right(self, labels: Int[np.ndarray, " B"]) -> np.ndarray:
        """Whether each slide is classified correctly: positive where the log odds are."""
        return (self.run.log_odds > 0) == (labels == 1)


def patch_rows(results: Results) -> list[Row]:
    """The methods of Figures 4 and 5 that were run and have patch probabilities."""
    firsts = [(method, runs[0]) for method, runs in results.were_run(COMPARED)]
    return [
        Row(method, run, run.patch_probability)
        for method, run in firsts
        if run.patch_probability is not None
    ]


def without_patches(results: Results) -> str:
    """A sentence about methods that were run and say nothing of patches; empty if there are none.

    Figures say what they leave out.
    """
    silent = [
        method.label
        for method, runs in results.were_run(COMPARED)
        if runs[0].patch_probability is None
    ]
    return f" Not shown, for want of patch probabilities: {'; '.join(silent)}." if silent else ""


def verdict(right: bool) -> tuple[str, str]:
    """Whether a slide is classified correctly, as a word and as its colour."""
    return ("right", RIGHT) if right else ("wrong", WRONG)


def lower_median(chosen: Int[np.ndarray, " n"], value: Num[np.ndarray, " N"]) -> int:
    """The one of the chosen with the median value; of two in the middle the lower."""
    return int(chosen[np.argsort(value[chosen], kind="stable")][(len(chosen) - 1) // 2])


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
