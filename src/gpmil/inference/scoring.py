"""Numbers under which bags left out are likeliest, by scoring: few of them, and no derivatives.

With s_b(z) the log likelihood of bag b left out and G = ds/dz from differences, the sum of the
outer products of the bags' own slopes stands for the Hessian (Berndt, Hall, Hall and Hausman 1974),
as the information of independent bags does:

    (G'G + P) step = G'1 - P (z - z_0),

P the precision of a weak prior around z_0. What is noise in s, errors of an orthant say, is
averaged over bags; steps of a tenth make differences that rise above it.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float

logger = logging.getLogger("gpmil")

APART = 0.1  # of the differences
LONGEST = 1.0  # of a step, in any coordinate
SHORTEST = 0.25  # of a step that does not rise: then it is given up
ENOUGH = 0.05  # of the log likelihood of all bags: a smaller rise ends the search

Scores = Callable[[Float[np.ndarray, " p"]], Float[np.ndarray, " B"]]


@dataclass
class Scoring:
    """The search: where it is, and what it may still cost."""

    scores: Scores
    nearby: Scores  # the same, quicker, close to where `scores` was asked last
    centre: Float[np.ndarray, " p"]
    width: float | Float[np.ndarray, " p"]  # of the prior, in every coordinate
    budget: int  # evaluations of all scores

    def climb(
        self, start: Float[np.ndarray, " p"], known: Float[np.ndarray, " B"] | None = None
    ) -> tuple[Float[np.ndarray, " p"], Float[np.ndarray, " B"]]:
        """The likeliest z that the budget reaches, and the scores there; `known`: of the start."""
        z, own = start, self._scores(start) if known is None else known
        while self.budget > len(z):
            step = self._step(z, own)
            found = self._risen(z, own, step)
            if found is None:
                break
            rise = self._objective(*found) - self._objective(z, own)
            z, own = found
            if rise < ENOUGH:
                break
        return z, own

    def _step(self, z: np.ndarray, own: np.ndarray) -> Float[np.ndarray, " p"]:
        moved = APART * np.eye(len(z))
        self.budget -= len(z)
        G = np.stack([(self.nearby(z + e) - own) / APART for e in moved], axis=1)
        precision = np.diag(np.broadcast_to(self.width, z.shape) ** -2.0)
        slope = G.sum(0) - precision @ (z - self.centre)
        # differences forward of a function that bends down are low by half of the bend
        information = G.T @ G + precision
        slope = slope + APART / 2 * np.diag(information)
        step = np.linalg.solve(information, slope)
        return step / max(1.0, np.abs(step).max() / LONGEST)

    def _risen(
        self, z: np.ndarray, own: np.ndarray, step: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray] | None:
        """The step, or a half or a quarter of it, if bags left out become likelier."""
        length = 1.0
        while length >= SHORTEST and self.budget > 0:
            new = z + length * step
            scores = self._scores(new)
            if self._objective(new, scores) > self._objective(z, own):
                return new, scores
            length /= 2
        return None

    def _objective(self, z: np.ndarray, scores: np.ndarray) -> float:
        return float(scores.sum() - (((z - self.centre) / self.width) ** 2).sum() / 2)

    def _scores(self, z: Float[np.ndarray, " p"]) -> Float[np.ndarray, " B"]:
        self.budget -= 1
        return self.scores(z)
