"""Whether a setting is needed: the best without it (lambda = 0, tau = 0), and the standard error.

The prior of tuning.py is over log lambda and log tau: neither can end at 0 by itself. So the best
settings with the one in question and without it are compared, by what they say of every bag left
out, in standard errors of the mean difference. Without lambda they are looked for from the end of
the search with it; with tau from the end of one without it, whose optimum is easier to find.
"""

import logging

import numpy as np

from gpmil.inference import leave_groups, tuning
from gpmil.inference.at_settings import Settings
from gpmil.inference.tuning import GRADIENT_COST, Search, Space, climb

logger = logging.getLogger("gpmil")

PART = 0.35  # of the budget: at 40 seven values with gradient
FIRST = 0.3  # how far the first step goes: the end of the search is not far
BEGIN = 1.0  # the value of a setting that is added
LEAST = 2 * GRADIENT_COST  # one step at least

# Standard errors by which bags left out must gain for a setting to stay. Inside one the simpler
# model is taken. But slides' labels say little of what maps need: SICAPv2's are indifferent to
# lambda, and 0 instead of .5 costs malignant patches (AUC .985 -> .955). So inside one, lambda
# stays; it goes where bags are better off without it, as slides with tiny lesions are. A slide
# context tells patches of positive slides from others by itself (SICAPv2: AUC .991 and .993):
# with it lambda has no such bonus.
NEEDED = {"slide_effect": 1.0, "coupling": -1.0}
NEEDED_IN_CONTEXT = NEEDED | {"coupling": 0.0}
CLOSE = 2.0  # standard errors within which neither end is clear before its last steps


def part_of(budget: int) -> int:
    """What is set apart of a budget for the comparison; 0 where it would be too little.

    >>> part_of(40), part_of(9)
    (14, 0)
    """
    part = round(PART * budget)
    return part if part >= LEAST else 0


def without(found: Search, name: str, budget: int) -> Search:
    """The best without a setting, looked for from the end of a search with it."""
    return _climbed(found, found.space.without(name), found.best.settings, budget)


def added(found: Search, name: str, budget: int, space: Space) -> Search:
    """The best of `space`, which has a setting more than the search that it begins with."""
    return _climbed(found, space, found.best.settings._replace(**{name: BEGIN}), budget)


def _climbed(found: Search, space: Space, settings: Settings, budget: int) -> Search:
    """The best in another space, from some settings."""
    other = Search(found.cohort, space, budget, fits=found.fits, enough=found.enough)
    climb(other, space.place(settings), first=FIRST)
    return other


def _gain(best: Search, rival: Search) -> tuple[float, float]:
    """What bags left out gain by a setting, on average, and its standard error."""
    gain = np.array(best.best.by_bag) - np.array(rival.best.by_bag)
    return float(gain.mean()), leave_groups.standard_error(gain, best.cohort.groups)


def is_close(best: Search, rival: Search) -> bool:
    """Whether a few more steps of either could decide."""
    gain, error = _gain(best, rival)
    return abs(gain) < CLOSE * error


def needed(name: str, best: Search, rival: Search) -> Search:
    """A search with `name`, or its rival without: whose best says more of the bags."""
    gain, error = _gain(best, rival)
    errors = NEEDED if best.cohort.context is None else NEEDED_IN_CONTEXT
    kept = rival if gain <= errors[name] * error else best
    logger.info(
        "%s %.3g against 0: %.4f and %.4f per bag left out, a difference of %.4f with a standard "
        "error of %.4f: %s",
        name.replace("_", " "), getattr(best.best.settings, name), best.best.score,
        rival.best.score, gain, error,
        "0 is kept" if kept is rival else "it is kept",
    )  # fmt: skip
    return kept


def decided(spare: str, best: Search, rival: Search, begun: bool) -> Search:
    """With the setting or without; where the last steps are to come, both take them if close."""
    close = begun and is_close(best, rival)
    for end in (best, rival) if close else ():
        tuning.finished(end)
    winner = needed(spare, best, rival)
    if begun and not close:
        tuning.finished(winner)
    return winner
