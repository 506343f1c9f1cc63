"""Cut points and settings under which grades of bags left out are likeliest.

Folds are left out and really refitted (inference/graded_folds.py). The best of a few starts, with
and without coupling, is climbed from by scoring (inference/scoring.py) over

    z = (log(b_2 - b_1), ..., log variance, log(length / sqrt d), c / sqrt(1 + variance),
         log lambda, log tau),

so far as they are "auto". Not from "above the lowest grade" alone: grades tell settings apart that
this one question does not, coupling above all.
"""

import logging
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Int

from gpmil.inference import leave_groups, tuning
from gpmil.inference.at_settings import Settings
from gpmil.inference.graded_folds import GradedFolds
from gpmil.inference.scoring import Scoring
from gpmil.inference.simpler import NEEDED
from gpmil.inference.tuning import Space

logger = logging.getLogger("gpmil")

# variance, length / sqrt d, c / sqrt(1 + variance), lambda, tau
STARTS = (
    tuning.EFFECT_CENTRE,
    (20.0, 3.0, -1.5, 0.5, 1.0),
)
GAP, GAP_WIDTH = 1.5, 1.0  # between cut points before any bag is seen, and the width of its prior
CLOSEST = 0.3  # cut points that the search starts with
LOWEST = -50.0  # of the log likelihood of a bag: one does not decide
MOST_BAGS, FEWEST = 200, 10  # bags that are looked at, and of a grade at least
MOST_FOR_CUTS = 300  # where settings are given


def sample(codes: Int[np.ndarray, " B"], seed: int, most: int) -> Int[np.ndarray, " b"]:
    """The bags to learn from: all, or `most`, the grades in their proportion, ten of each at least.

    >>> chosen = sample(np.repeat([0, 1, 2], [900, 595, 5]), seed=0, most=200)
    >>> np.bincount(np.repeat([0, 1, 2], [900, 595, 5])[chosen])
    array([120,  79,   5])
    """
    if len(codes) <= most:
        return np.arange(len(codes))
    logger.info("cut points are learned from about %d of %d bags", most, len(codes))
    rng, chosen = np.random.default_rng(seed), []
    for grade in np.unique(codes):
        own = np.flatnonzero(codes == grade)
        wanted = max(round(most * len(own) / len(codes)), FEWEST)
        chosen.append(rng.permutation(own)[:wanted])
    return np.sort(np.concatenate(chosen))


def first_cuts(
    largest: Float[np.ndarray, " B"], codes: Int[np.ndarray, " B"], n_grades: int
) -> Float[np.ndarray, " k"]:
    """Cut points at which the largest means of as many bags lie as have the grade, b_1 = 0.

    >>> codes, largest = np.array([0, 0, 1, 1, 2, 2]), np.array([-2.0, -1, 1, 2, 4, 5])
    >>> first_cuts(largest, codes, 3).round(2)
    array([0.  , 2.33])
    """
    shares = [np.mean(codes < k) for k in range(1, n_grades)]
    cuts = np.quantile(largest, shares)
    gaps = np.maximum(np.diff(cuts), CLOSEST)
    return np.concatenate([[0.0], np.cumsum(gaps)])


class Found(NamedTuple):
    """Settings, cut points, the mean log likelihood of a grade left out, and what was tried."""

    settings: Settings
    cuts: Float[np.ndarray, " k"]
    score: float
    trace: list[dict[str, Any]]


class Tried(NamedTuple):
    """A place of the search: its space, z, the scores of the bags, and the objective."""

    space: Space
    z: Float[np.ndarray, " p"]
    scores: Float[np.ndarray, " B"]
    objective: float


@dataclass
class Search:
    """Fits without each fold at cut points and settings; `cuts` where they are given."""

    folds: GradedFolds
    n_grades: int
    budget: int
    cuts: Float[np.ndarray, " k"] | None = None
    trace: list[dict[str, Any]] = field(default_factory=list)
    last: Float[np.ndarray, " p"] | None = None

    @property
    def n_gaps(self) -> int:
        """Numbers of z that are cut points."""
        return self.n_grades - 2 if self.cuts is None else 0

    def numbers(self, space: Space, z: np.ndarray) -> tuple[Settings, Float[np.ndarray, " k"]]:
        """Settings and cut points at z."""
        settings = Settings(*space.settings(torch.from_numpy(z[self.n_gaps :])).tolist())
        if self.cuts is not None:
            return settings, self.cuts
        return settings, np.concatenate([[0.0], np.cumsum(np.exp(z[: self.n_gaps]))])

    def scores(self, space: Space, z: Float[np.ndarray, " p"]) -> Float[np.ndarray, " B"]:
        """log P(Y_b) without the fold of bag b."""
        self.budget, self.last = self.budget - 1, z
        settings, cuts = self.numbers(space, z)
        found = np.maximum(self.folds.scores(settings, cuts), LOWEST)
        objective = float(found.mean()) + self.log_prior(space, z) / len(found)
        trial = {"kernel": _name(self.folds.cohort.kernel), **settings._asdict()}
        self.trace.append(trial | {"score": float(found.mean()), "objective": objective})
        logger.info(
            "tuning %d: %s, cut points %s: %.4f",
            len(self.trace), tuning.in_words(settings), cuts.round(2), found.mean(),
        )  # fmt: skip
        return found

    def nearby(self, space: Space, z: Float[np.ndarray, " p"]) -> Float[np.ndarray, " B"]:
        """The same close to the last place, to first order."""
        return np.maximum(self.folds.nearby(*self.numbers(space, z)), LOWEST)

    def centre(self, space: Space) -> Float[np.ndarray, " p"]:
        """Where the prior of z is largest."""
        return np.concatenate([np.full(self.n_gaps, np.log(GAP)), space.z(space.centre)])

    def width(self, space: Space) -> Float[np.ndarray, " p"]:
        """How wide it is."""
        widths = dict(zip(tuning.NAMES, (*tuning.WIDTH, *tuning.CONTEXT_WIDTH), strict=True))
        return np.array([GAP_WIDTH] * self.n_gaps + [widths[name] for name in space.learned])

    def log_prior(self, space: Space, z: Float[np.ndarray, " p"]) -> float:
        """A weak prior, as of two classes."""
        return -float((((z - self.centre(space)) / self.width(space)) ** 2).sum()) / 2

    def tried(self, space: Space, own: Float[np.ndarray, " s"]) -> Tried:
        """A start: settings, and cut points where the largest patches of bags left out lie."""
        gaps = np.full(self.n_gaps, np.log(GAP))
        if self.n_gaps:
            at = self.numbers(space, np.concatenate([gaps, own]))
            cuts = first_cuts(self.folds.largest(*at), self.folds.codes, self.n_grades)
            gaps = np.log(np.diff(cuts))
        return self.at(space, np.concatenate([gaps, own]))

    def at(self, space: Space, z: Float[np.ndarray, " p"]) -> Tried:
        """A place, judged."""
        scores = self.scores(space, z)
        return Tried(space, z, scores, float(scores.sum()) + self.log_prior(space, z))

    def climbed(self, start: Tried) -> Tried:
        """The likeliest place that the rest of the budget reaches."""
        space, n = start.space, len(start.z)
        if not n or self.budget <= n:
            return start
        if self.last is None or not np.array_equal(self.last, start.z):
            self.scores(space, start.z)  # differences are from here
        prior = self.centre(space), self.width(space)
        climb = Scoring(
            lambda z: self.scores(space, z), lambda z: self.nearby(space, z), *prior, self.budget
        )
        z, scores = climb.climb(start.z, start.scores)
        return Tried(space, z, scores, float(scores.sum()) + self.log_prior(space, z))


def _name(kernel: Any) -> str:
    return kernel if isinstance(kernel, str) else type(kernel).__name__


def learn(search: Search, space: Space, from_here: Settings | None = None) -> Found:
    """Cut points and settings, from `from_here` or the best of the starts."""
    if from_here is not None:
        begin = search.tried(space, space.place(from_here))
    else:
        begin = started(search, space)
    best = search.climbed(begin)
    settings, cuts = search.numbers(best.space, best.z)
    logger.info("cut points %s; log likelihood of a grade left out %.4f", cuts, best.scores.mean())
    return Found(settings, cuts, float(best.scores.mean()), search.trace)


def started(search: Search, space: Space) -> Tried:
    """The best start; without coupling where bags left out are better off so."""
    spaces = [space]
    if "coupling" in space.learned:
        spaces.append(space.without("coupling"))
    found = []
    for one in spaces:
        starts = list(dict.fromkeys(tuple(one.z(start)) for start in STARTS))
        tried = [search.tried(one, np.array(starts[0]))]
        tried += [search.tried(one, np.array(z)) for z in starts[1:] if search.budget > 2]
        found.append(max(tried, key=lambda place: place.objective))
    if len(found) == 1:
        return found[0]
    gain = found[0].scores - found[1].scores
    error = leave_groups.standard_error(gain, search.folds.cohort.groups)
    without = gain.mean() <= NEEDED["coupling"] * error
    logger.info(
        "coupling against 0: a difference of %.4f per bag left out with a standard error of %.4f: "
        "%s", gain.mean(), error, "0 is kept" if without else "it is kept",
    )  # fmt: skip
    return found[1] if without else found[0]
