"""Kernel, prior mean, coupling, slide effect and slide context, from bags' labels alone.

What is maximised is the mean log likelihood of bags in folds left out (objective.py) over

    z = (log variance, log(length / sqrt d), c / sqrt(1 + variance), log lambda, log tau,
         log gamma_s, log(length_s / sqrt d)),

by quasi-Newton steps from the best of a few starts (quasi_newton.py). Most of them are taken on a
pilot, some of the bags: it is the same hill seen from afar, and what is learned of its shape serves
the last steps with all bags. Of the inducing points some do, until the last steps or for good.
"""

import contextlib
import logging
import math
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Float
from scipy.optimize import minimize
from torch import Tensor

from gpmil.inference.at_settings import Settings
from gpmil.inference.folded_cohort import Cohort
from gpmil.inference.objective import (
    ROUGH,
    Fits,
    carried,
    collected,
    gradient,
    left_out,
)
from gpmil.inference.quasi_newton import Hill

logger = logging.getLogger("gpmil")

NAMES = Settings._fields
# variance, length / sqrt d, c / sqrt(1 + variance), lambda, tau: the centre and the width (of z) of
# the weak prior, what is tried first, and how far the search may go. The centre and the starts are
# settings that work on features of deep networks; the widths span a factor of four to twenty. That
# of tau is narrower: slides' labels alone say little of it, and maps are dark where it is small.
CENTRE = (20.0, 3.0, -1.5, 1.0, 1.0)
WIDTH = (1.5, 0.7, 1.0, 1.0, 0.8)
STARTS = (
    CENTRE,
    (9.0, 2.0, -1.3, 1.0, 0.5),
    (50.0, 4.0, -0.6, 0.5, 1.0),
    (4.0, 4.0, -2.0, 1.0, 0.2),
    (30.0, 2.0, -1.4, 5.0, 1.0),
    (1.0, 1.0, -1.5, 0.5, 0.2),
)
# A slide effect leaves less to each patch, and wants a process that varies more around a higher
# mean: on SICAPv2's slides these settings are ahead of the centre above in slides and in maps.
EFFECT_CENTRE = (100.0, 3.5, -0.5, 0.7, 1.3)
# A slide context explains a part of what slides share: with it, SICAPv2's are predicted better so.
# Labels of few slides then have seven numbers to tell: those of the kernel, the mean and lambda are
# held more closely, by a third of their widths.
WITH_CONTEXT_CENTRE = (100.0, 3.5, -0.5, 0.5, 0.7)
WITH_CONTEXT_WIDTH = (0.5, 0.23, 0.33, 0.33, 0.8)
EFFECT_STARTS = (
    EFFECT_CENTRE,
    (150.0, 5.0, -0.6, 0.5, 2.0),
    (100.0, 3.5, -0.5, 2.0, 0.5),
    (20.0, 3.0, -1.5, 1.0, 1.0),
    (9.0, 2.0, -1.3, 1.0, 0.5),
)
LOWEST = (0.05, 0.2, -4.0, 0.01, 0.01)
HIGHEST = (5000.0, 50.0, 2.0, 100.0, 10.0)
# The same of gamma_s and length_s / sqrt d, the slide context; starts of five numbers take its
# centre, and one more has a smaller one of shorter reach.
CONTEXT_CENTRE, CONTEXT_WIDTH = (10.0, 2.0), (1.5, 0.7)
CONTEXT_STARTS = (
    (*WITH_CONTEXT_CENTRE, *CONTEXT_CENTRE),
    (20.0, 3.0, -1.5, 1.0, 1.0, 2.0, 1.0),
)
CONTEXT_LOWEST, CONTEXT_HIGHEST = (0.01, 0.2), (1000.0, 50.0)
WEIGHT_WIDTH = 0.5  # of the logarithms of the columns' weights
FAILED = -1e6  # the objective where it is not a number: a step to be shortened
GRADIENT_COST = 2  # fits' worth of work in one value with its gradient
BEND = 0.05  # of the score, at most, per unit of z squared: before anything is known of it
ENOUGH = 2e-4  # of the score, per number that is learned: a step that promises less is noise
ON_A_PILOT = 5e-4  # the same where steps with all bags follow
PILOT_ROWS, PILOT_BAGS = 4_000, 30  # instances of a pilot; bags at least, if there are as many
CONTEXT_BAGS = 100  # the same where a slide context is learned: a bag says one thing of it
POINTS = 100  # inducing points of a cohort that is not small
SMALL = 2**19  # numbers in H up to which a cohort keeps its points, and is its own pilot
LARGE = 2**21  # and up to which all points come back for the last steps
# values with gradient on all bags: as many as go through so many numbers of H
LAST, LEAST_LAST, MOST_LAST = 2**23, 2, 3
FIRST_ON_ALL = 0.5  # the longest first step there


@dataclass(frozen=True)
class Space:
    """Which settings are learned, and what the others are: z <-> settings."""

    fixed: dict[str, float]  # the settings that are not learned
    root_dim: float  # sqrt d
    level: float | None = None  # c / sqrt(1 + variance), where the mean follows the variance
    with_effect: bool = False  # whether tau is learned; else it is fixed, or 0
    with_context: bool = False  # the same of gamma_s and its length

    @property
    def learned(self) -> tuple[str, ...]:
        """The names in the order of z."""
        given = {*self.fixed, *(() if self.level is None else ("mean",))}
        return tuple(name for name in NAMES if name not in given | self.absent.keys())

    @property
    def absent(self) -> dict[str, float]:
        """What is neither learned nor, it may be, given: no effect, no context."""
        none = Settings._field_defaults
        effect = () if self.with_effect else ("slide_effect",)
        context = () if self.with_context else ("slide_context", "slide_context_lengthscale")
        return {name: none[name] for name in (*effect, *context)}

    def settings(self, z: Float[Tensor, " k"]) -> Float[Tensor, " 7"]:
        """variance, length, mean, lambda, tau, gamma_s and its length at z."""
        free = dict(zip(self.learned, z, strict=True))
        given = self.absent | self.fixed
        known = {k: torch.tensor(v, dtype=torch.float64) for k, v in given.items()}
        if self.level is not None:
            free["mean"] = torch.tensor(self.level, dtype=torch.float64)
        variance = known["variance"] if "variance" in known else free["variance"].exp()
        moved = {
            "variance": lambda: variance,
            "lengthscale": lambda: self.root_dim * free["lengthscale"].exp(),
            # c = u sqrt(1 + variance): u alone says how likely a patch is positive a priori
            "mean": lambda: free["mean"] * (1 + variance).sqrt(),
            "coupling": lambda: free["coupling"].exp(),
            "slide_effect": lambda: free["slide_effect"].exp(),
            "slide_context": lambda: free["slide_context"].exp(),
            "slide_context_lengthscale": lambda: (
                self.root_dim * free["slide_context_lengthscale"].exp()
            ),
        }
        return torch.stack([known[n] if n in known else moved[n]() for n in NAMES])

    def z(self, start: tuple[float, ...]) -> Float[np.ndarray, " k"]:
        """From variance, length / sqrt d, c / sqrt(1 + variance), lambda, tau (and the context)."""
        given = dict(zip(NAMES, (*start, *CONTEXT_CENTRE)))  # what is too many is left out
        return np.array([given[n] if n == "mean" else math.log(given[n]) for n in self.learned])

    @property
    def bounds(self) -> list[tuple[float, float]]:
        """How far z may go."""
        ends = (*LOWEST, *CONTEXT_LOWEST), (*HIGHEST, *CONTEXT_HIGHEST)
        return list(zip(*(self.z(end) for end in ends), strict=True))

    def place(self, settings: Settings) -> Float[np.ndarray, " k"]:
        """z of some settings."""
        lengths = {n: getattr(settings, n) / self.root_dim for n in NAMES if "length" in n}
        level = settings.mean / math.sqrt(1 + settings.variance)
        return self.z(tuple(settings._replace(**lengths, mean=level)))

    def without(self, name: str) -> "Space":
        """The same with a setting fixed at 0."""
        return replace(self, fixed=self.fixed | {name: 0.0})

    @property
    def has_effect(self) -> bool:
        """Whether tau is learned or given."""
        return self.fixed["slide_effect"] > 0 if "slide_effect" in self.fixed else self.with_effect

    @property
    def centre(self) -> tuple[float, ...]:
        """Where the prior is largest."""
        if not self.has_effect:
            return CENTRE
        return WITH_CONTEXT_CENTRE if self.with_context else EFFECT_CENTRE

    @property
    def widths(self) -> Float[np.ndarray, " k"]:
        """Standard deviations of the prior."""
        own = WITH_CONTEXT_WIDTH if self.has_effect and self.with_context else WIDTH
        widths = dict(zip(NAMES, (*own, *CONTEXT_WIDTH), strict=True))
        return np.array([widths[name] for name in self.learned])

    @property
    def precision(self) -> Float[np.ndarray, "k k"]:
        """Minus the Hessian of the prior."""
        return np.diag(self.widths**-2.0)

    def log_prior(self, z: Float[Tensor, " k"]) -> Float[Tensor, ""]:
        """A weak prior: what few bags leave open stays where models of this kind work."""
        width = torch.from_numpy(self.widths)
        return -((z - torch.from_numpy(self.z(self.centre))) / width).square().sum() / 2


def in_words(settings: Settings) -> str:
    """For a line of progress."""
    words = {"lengthscale": "length", "slide_context_lengthscale": "its length"}
    absent = {"slide_effect"} if not settings.slide_effect else set()
    absent |= (
        {"slide_context", "slide_context_lengthscale"} if not settings.slide_context else set()
    )
    return ", ".join(
        f"{words.get(name, name).replace('_', ' ')} {value:.3g}"
        for name, value in settings._asdict().items()
        if name not in absent
    )


class Spent(Exception):
    """The budget is used up."""


class Trial(NamedTuple):
    """Settings that were tried: the score of bags left out, and the same with the prior."""

    kernel: str
    settings: Settings
    score: float
    objective: float
    by_bag: tuple[float, ...] = ()  # of which `score` is the mean

    def in_table(self) -> dict[str, Any]:
        """As a row of `tuning_trace_`."""
        row = {"kernel": self.kernel, **self.settings._asdict()}
        return row | {"score": self.score, "objective": self.objective}


@dataclass
class Search:
    """Everything tried so far, and the fits that warm the next ones."""

    cohort: Cohort
    space: Space
    budget: int
    trace: list[Trial] = field(default_factory=list)
    fits: Fits | None = None  # of the best trial
    latest: Fits | None = None  # of the last one that has a number
    bend: Float[np.ndarray, "k k"] | None = None  # minus the Hessian of the score, about
    climbing: bool = False  # whether a gradient is known that a step can follow
    enough: float = ENOUGH

    def value(self, z: Float[np.ndarray, " k"], start: Fits | None = None) -> float:
        """The objective at z, from a cold start if none is given."""
        self._spend(1)
        point = torch.from_numpy(z)
        settings = Settings(*self.space.settings(point).tolist())
        try:
            scores, fits = left_out(self.cohort, settings, start, ROUGH)
        except torch.linalg.LinAlgError:  # no number
            return FAILED
        return self._note(settings, scores, self.space.log_prior(point), fits)

    def slopes(self, z: Float[np.ndarray, " k"]) -> tuple[float, Float[np.ndarray, " k"]]:
        """The objective and its gradient at z, not a number where no step can follow."""
        if self.climbing and self.budget <= GRADIENT_COST:
            return self.value(z, self.fits), np.full_like(z, np.nan)
        self._spend(GRADIENT_COST)
        self.climbing = True
        point = torch.tensor(z, requires_grad=True)
        with torch.enable_grad():
            moved = self.space.settings(point)
            prior = self.space.log_prior(point)
            settings = Settings(*moved.tolist())
            try:
                scores, by_setting, fits, _ = gradient(self.cohort, settings, self.fits)
            except torch.linalg.LinAlgError:  # no number
                return FAILED, np.full_like(z, np.nan)
            slope = moved @ torch.tensor(by_setting, dtype=torch.float64)
            (slope + prior / len(self.cohort.positive)).backward()
        slopes = collected(point).numpy()
        if not np.isfinite(slopes).all():
            return FAILED, np.full_like(slopes, np.nan)
        return self._note(settings, scores, prior, fits), slopes

    def _spend(self, cost: int) -> None:
        if self.trace and cost > self.budget:
            raise Spent
        self.budget -= cost

    def _note(
        self, settings: Settings, scores: Tensor, log_prior: Tensor, fits: Fits | None
    ) -> float:
        score = float(scores.mean())
        objective = score + float(log_prior.detach()) / len(self.cohort.positive)
        if not math.isfinite(objective):
            return FAILED
        self.latest = fits
        if not self.trace or objective > self.best.objective:
            self.fits = fits
        kernel = self.cohort.kernel
        name = kernel if isinstance(kernel, str) else type(kernel).__name__
        self.trace.append(Trial(name, settings, score, objective, tuple(scores.tolist())))
        logger.info("tuning %d: %s, %s: %.4f", len(self.trace), name, in_words(settings), score)
        return objective

    @property
    def best(self) -> Trial:
        """The best so far; of equals the first."""
        return max(self.trace, key=lambda trial: trial.objective)


def search(cohort: Cohort, space: Space, budget: int, enough: float = ENOUGH) -> Search:
    """Climb the likelihood of bags left out with about `budget` fits' worth of work."""
    found, begin = started(cohort, space, budget)
    found.enough = enough
    climb(found, begin)
    return found


def climb(found: Search, begin: Float[np.ndarray, " k"], first: float = 1.0) -> None:
    """Quasi-Newton steps from a point, as far as the budget goes; the first at most `first`."""
    prior = found.space.precision / len(found.cohort.positive)
    bend = BEND * np.eye(len(begin)) if found.bend is None else found.bend
    found.climbing = False
    hill = Hill(found.slopes, found.space.bounds, bend + prior, first)
    with contextlib.suppress(Spent):
        if found.space.learned:
            hill.climb(begin, found.enough * len(begin))
    found.bend = hill.B - prior


def on_all(found: Search, cohort: Cohort, nearby: Fits | None = None) -> Search:
    """What a pilot ended at, judged by all bags; from fits to them at other settings, if any."""
    settings = found.best.settings
    assert found.fits is not None
    fits = carried(found.fits, found.cohort, cohort, settings) if nearby is None else nearby
    size = int(cohort.offsets[-1]) * len(cohort.inducing)
    steps = min(max(LAST // size, LEAST_LAST), MOST_LAST)
    whole = Search(cohort, found.space, 1 + steps * GRADIENT_COST, fits=fits, bend=found.bend)
    whole.value(found.space.place(settings), fits)
    return whole


def judged(ends: list[Search], cohort: Cohort) -> list[Search]:
    """The ends of searches judged by all bags, each from the fits of the one before."""
    found: list[Search] = []
    for end in ends:
        whole = on_all(end, cohort, found[-1].fits if found else None)
        found += [whole] if whole.trace else []
    return found


def finished(found: Search) -> Search:
    """The last steps, of a search that has judged its pilot's end by all bags."""
    climb(found, found.space.place(found.best.settings), FIRST_ON_ALL)
    return found


def is_large(cohort: Cohort) -> bool:
    """Whether the last steps are taken with fewer inducing points, too."""
    return int(cohort.offsets[-1]) * len(cohort.inducing) > LARGE


def fewer_points(cohort: Cohort, seed: int) -> Cohort:
    """All bags with some of the inducing points; a small cohort keeps all of them."""
    N, M = cohort.offsets[-1], len(cohort.inducing)
    if N * M <= SMALL or M <= POINTS:
        return cohort
    points = np.sort(np.random.default_rng(seed).permutation(M)[:POINTS])
    return replace(cohort, inducing=cohort.inducing[torch.from_numpy(points).to(cohort.device)])


def pilot(cohort: Cohort, seed: int) -> Cohort:
    """Some of the bags, of every fold and class their share; a small cohort is its own pilot."""
    N, M = cohort.offsets[-1], len(cohort.inducing)
    least = PILOT_BAGS if cohort.context is None else CONTEXT_BAGS
    share = min(1.0, max(PILOT_ROWS / N, least / cohort.n_bags))
    if N * M <= SMALL or share == 1:
        return cohort
    rng = np.random.default_rng(seed)
    kinds = 2 * cohort.fold + cohort.positive
    alike = [rng.permutation(np.flatnonzero(kinds == kind)) for kind in np.unique(kinds)]
    bags = [bags[: math.ceil(share * len(bags))] for bags in alike]
    return cohort.some(np.sort(np.concatenate(bags)), np.arange(M))


def started(cohort: Cohort, space: Space, budget: int) -> tuple[Search, Float[np.ndarray, " k"]]:
    """A search that has tried its starts, and the best of them."""
    found = Search(cohort, space, budget)
    tried: list[tuple[float, ...]] = [*(EFFECT_STARTS if space.has_effect else STARTS)]
    tried += CONTEXT_STARTS if space.with_context else ()
    starts = list(dict.fromkeys(tuple(space.z(s)) for s in tried))[: max(1, budget)]
    scores = _values(found, np.array(starts))
    if not found.trace:
        raise ValueError(
            "the likelihood of bags left out is not a number at any of the starting settings: "
            "features far from unit scale? Standardise them, or give the settings as numbers."
        )
    return found, np.array(starts[int(np.argmax(scores))])


def _values(found: Search, starts: Float[np.ndarray, "n k"]) -> list[float]:
    """The objective at every start, each from the fits of the nearest before it."""
    scores: list[float] = []
    seen: list[tuple[Float[np.ndarray, " k"], Fits | None]] = []
    for z in starts:
        distances = [np.linalg.norm((z - at) / found.space.widths) for at, _ in seen]
        scores.append(found.value(z, seen[int(np.argmin(distances))][1] if seen else None))
        if scores[-1] > FAILED:
            seen.append((z, found.latest))
    return scores


# --- A weight for every column ----------------------------------------------------------------


def relevance(
    cohort: Cohort, settings: Settings, budget: int
) -> tuple[Float[np.ndarray, " d"], float]:
    """Weights of the columns (geometric mean one) at given settings, and their score.

    L-BFGS over the logarithms of the weights, which a normal prior of width WEIGHT_WIDTH ties to
    zero: with few bags most columns keep about the common length.
    """
    d, B = cohort.inputs.shape[1], len(cohort.positive)
    last: dict[str, Fits] = {}
    tried: list[tuple[float, float, np.ndarray]] = []

    def objective(a: np.ndarray) -> tuple[float, np.ndarray]:
        if tried and GRADIENT_COST * (1 + len(tried)) > budget:
            raise Spent
        # weights exp(a - mean a): the common length stays what it was
        weights = np.exp(a - a.mean())
        found = gradient(cohort, settings, last.get("fits"), weights)
        score, last["fits"], slope = found.score, found.fits, found.weights
        assert slope is not None
        by_log = slope * weights
        value = score - (a**2).sum() / (2 * WEIGHT_WIDTH**2 * B)
        tried.append((value, score, weights))
        logger.info("relevance %d: %.4f", len(tried), score)
        return -value, -(by_log - by_log.mean() - a / (WEIGHT_WIDTH**2 * B))

    with contextlib.suppress(Spent):
        minimize(objective, np.zeros(d), jac=True, method="L-BFGS-B", options={"ftol": 1e-5})
    _, score, weights = max(tried, key=lambda t: t[0])
    return weights, score
