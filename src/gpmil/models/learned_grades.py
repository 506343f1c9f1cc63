"""Cut points, and with them the settings that are "auto", from grades of bags left out.

Settings come from "above the lowest grade" first, as of any model (learning.py). Then cut points
are learned at these settings, and both together, by scoring (inference/scoring.py) over

    z = (log(b_2 - b_1), ..., log variance, log length, c / sqrt(1 + variance), log lambda,
         log tau).
"""

import copy
import logging
import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int

from gpmil.data.bags import Bags
from gpmil.distributed import WholeCohort
from gpmil.inference import leave_grades
from gpmil.inference import solvers as inference
from gpmil.inference.leave_grades import Grades
from gpmil.inference.scoring import Scoring
from gpmil.process.sparse_gp import SparseGP

logger = logging.getLogger("gpmil")

NAMES = ("variance", "lengthscale", "mean", "coupling", "slide_effect")
WIDTH = 1.0  # of the prior: gaps between cut points, and settings around those of the binary model
CLOSEST = 0.3  # cut points that the search starts with
TOLERANCE = 1e-6  # of the fits that are only judged
MOST_BAGS, FEWEST = 300, 10  # bags that are looked at, and of a grade at least
ROUNDS = 6  # steps at most for cut points alone


def sample(codes: Int[np.ndarray, " B"], seed: int) -> Int[np.ndarray, " b"]:
    """The bags to learn from: all, or 300, the grades in their proportion, ten of each at least.

    >>> chosen = sample(np.repeat([0, 1, 2], [900, 595, 5]), seed=0)
    >>> np.bincount(np.repeat([0, 1, 2], [900, 595, 5])[chosen])
    array([180, 119,   5])
    """
    if len(codes) <= MOST_BAGS:
        return np.arange(len(codes))
    logger.info("cut points are learned from about %d of %d bags", MOST_BAGS, len(codes))
    rng, chosen = np.random.default_rng(seed), []
    for grade in np.unique(codes):
        own = np.flatnonzero(codes == grade)
        wanted = max(round(MOST_BAGS * len(own) / len(codes)), FEWEST)
        chosen.append(rng.permutation(own)[:wanted])
    return np.sort(np.concatenate(chosen))


def thinned(bags: Bags, rows: Int[np.ndarray, " n"]) -> Bags:
    """The bags with some of their patches."""
    if len(rows) == bags.n_instances:
        return bags
    sizes = np.bincount(bags.bag_index[rows], minlength=len(bags))
    offsets = np.concatenate([[0], np.cumsum(sizes)])
    return Bags(bags.features[rows], offsets, adjacency=bags.adjacency[rows][:, rows])


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


@dataclass
class Search:
    """Fits of a model to some bags at cut points and settings, each judged by bags left out."""

    model: Any  # with the settings of "above the lowest grade"
    cohort: WholeCohort
    codes: Int[np.ndarray, " B"]
    device: torch.device
    w: torch.Tensor | None = None  # warms the next fit
    made: dict[tuple[float, ...], tuple[SparseGP, inference.Problem]] = field(default_factory=dict)

    def scores(self, model: Any) -> Float[np.ndarray, " B"]:
        """log P(Y_b) without bag b, of the fit at the model's numbers."""
        gp, binary = self._binary(model)
        known = Grades(self.codes, self.cohort.bags.offsets, model.cut_points_)
        problem = known.problem(binary)
        steps = int(model.max_iter)
        found = inference.direct(problem, steps, TOLERANCE, self._start(gp))
        self.w = found.w
        padded = self.cohort.partition.padded()
        return leave_grades.leave_one_bag_out(problem, padded, found.w, known)

    def _binary(self, model: Any) -> tuple[SparseGP, inference.Problem]:
        """H and R, which cut points leave alone: kept for the last settings."""
        key = tuple(getattr(model, f"{name}_") or 0.0 for name in NAMES)
        if key not in self.made:
            own = copy.copy(model)
            own.cut_points_ = np.zeros(1)
            gp = own._gp(self.device)
            self.made = {key: (gp, own._problem(gp, self.cohort))}
        return self.made[key]

    def _start(self, gp: SparseGP) -> torch.Tensor:
        return gp.L.new_zeros(gp.n_weights) if self.w is None else self.w

    def largest(self) -> Float[np.ndarray, " B"]:
        """Of every bag the largest mean of its patches, under the binary model."""
        gp, problem = self._binary(self.model)
        self.w = inference.direct(problem, int(self.model.max_iter), TOLERANCE, self._start(gp)).w
        out = np.empty(len(self.codes))
        for numbers, bag in self.cohort.partition.padded():
            mu = torch.where(bag.mask, problem.c + bag.H @ self.w, -math.inf)
            out[numbers] = mu.amax(1).cpu().numpy()
        return out


def moved(model: Any, z: Float[np.ndarray, " p"], names: list[str]) -> Any:
    """A copy of the model at z: gaps between cut points, then the settings that are named."""
    out, gaps = copy.copy(model), np.exp(z[: len(z) - len(names)])
    out.cut_points_ = np.concatenate([[0.0], np.cumsum(gaps)])
    own = dict(zip(names, z[len(z) - len(names) :].tolist()))
    for name in NAMES:
        if name in own and name != "mean":
            setattr(out, f"{name}_", math.exp(own[name]))
    if "mean" in own:
        out.mean_ = own["mean"] * math.sqrt(1 + (out.variance_ or 1.0))
    return out


def place(model: Any, cuts: Float[np.ndarray, " k"], names: list[str]) -> Float[np.ndarray, " p"]:
    """z of a model, and cut points."""
    level = model.mean_ / math.sqrt(1 + (model.variance_ or 1.0))
    known = [level if n == "mean" else math.log(getattr(model, f"{n}_")) for n in names]
    return np.concatenate([np.log(np.diff(cuts)), known])


def learn(search: Search, learned: list[str], n_grades: int, budget: int) -> tuple[Any, float]:
    """The model at cut points and settings that predict grades of bags left out; their score.

    `learned` are the settings that are "auto"; one that was found to be 0 stays 0.
    """
    model = search.model
    names = [n for n in NAMES if n in learned and (n == "mean" or getattr(model, f"{n}_"))]
    start = place(model, first_cuts(search.largest(), search.codes, n_grades), [])
    alone = Scoring(
        lambda z: search.scores(moved(model, z, [])), start, WIDTH, ROUNDS * (1 + len(start))
    )
    z = alone.climb(start)
    tried = alone.tried
    if names:
        start = place(model, moved(model, z, []).cut_points_, names)
        every = Scoring(lambda z: search.scores(moved(model, z, names)), start, WIDTH, budget)
        z = every.climb(start)
        tried = every.tried
    found = moved(model, z, names)
    score = next(value for at, value in reversed(tried) if np.array_equal(at, z))
    logger.info("cut points %s; log likelihood of a grade left out %.4f", found.cut_points_, score)
    return found, score
