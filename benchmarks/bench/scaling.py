"""Cost against one number at a time, all others fixed, with the slope in logarithms."""

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from bench import cohorts, engine
from bench.measure import Conditions

PLAIN = 5  # sweeps timed together
Values = tuple[float, ...]
# patches in all, inducing points, patches per bag, coupling
FULL: tuple[Values, ...] = (
    (1_000, 2_000, 4_000, 8_000, 16_000, 32_000, 64_000),
    (25, 50, 100, 200, 400),
    (50, 100, 200, 500, 1_000, 2_000, 5_000, 10_000, 20_000),
    (0.01, 0.1, 0.5, 1.0, 5.0, 20.0, 100.0),
)
TINY: tuple[Values, ...] = ((120, 240), (5, 10), (20, 60), (0.3, 3.0))
COSTS = ("prepare", "solve", "sweep")
PATCHES = "patches N"
LEARNED = "default fit"  # against the number of patches alone: it takes longer than all the rest


@dataclass(frozen=True)
class Axis:
    """What varies, at which values, and the cohort, M and coupling at a value."""

    name: str
    values: Values
    at: Callable[[float], tuple[cohorts.Shape, int, float]]


def axes(tiny: bool) -> tuple[Axis, ...]:
    """N, M, bag size at a fixed N, and lambda."""
    D, n, M, N = (8, 12, 10, 240) if tiny else (32, 100, 100, 8_000)

    def shape(patches: float, size: float, section: bool = False) -> cohorts.Shape:
        count = max(2, round(patches / size))
        return cohorts.Shape(count, size, D, same_size=True, section=section, positive=0.5)

    patches, inducing, sizes, strengths = TINY if tiny else FULL
    together = 2 * sizes[-1]  # one bag of each class at least
    return (
        Axis(PATCHES, patches, lambda v: (shape(v, n), M, 0.5)),
        Axis("inducing points M", inducing, lambda v: (shape(N, n), int(v), 0.5)),
        Axis("patches per bag, N fixed", sizes, lambda v: (shape(together, v, True), M, 0.5)),
        Axis("coupling", strengths, lambda v: (shape(N, n), M, float(v))),
    )


def measured(conditions: Conditions) -> dict[str, Any]:
    """By axis: the values, and by part of a fit its seconds and their slope."""
    found: dict[str, Any] = {}
    for axis in axes(conditions.size == "tiny"):
        points = [_point(*axis.at(value), conditions) for value in axis.values]
        costs = {cost: [point[cost] for point in points] for cost in COSTS}
        if axis.name == PATCHES:
            costs[LEARNED] = [_learned(*axis.at(value), conditions) for value in axis.values]
        found[axis.name] = {
            "values": list(axis.values),
            "costs": {
                name: {"seconds": took, "slope": slope(axis.values, took)}
                for name, took in costs.items()
            },
        }
    return found


def _learned(shape: cohorts.Shape, M: int, strength: float, conditions: Conditions) -> float:
    """Seconds of the fit as it comes, once; `strength` is among what is learned."""
    return engine.learned_by_parts(cohorts.draw(shape, seed=0), M, conditions.device)[1]["all"]


def _point(
    shape: cohorts.Shape, M: int, strength: float, conditions: Conditions
) -> dict[str, float]:
    bags = cohorts.draw(shape, seed=0)
    Z = cohorts.inducing(bags, M)
    fits = [
        engine.by_parts(bags, M, conditions.device, inducing=Z, coupling=strength)
        for _ in range(1 + conditions.repeats)
    ][1:]
    made = engine.Sweeper(bags, Z, conditions.device, "float64", coupling=strength)
    return {
        "prepare": statistics.median(parts["prepare"] for parts in fits),
        "solve": statistics.median(parts["solve"] for parts in fits),
        "sweep": made.time_one(cohorts.start(bags), conditions.repeats, PLAIN).seconds,
    }


def slope(values: Values, seconds: list[float]) -> float:
    """p in seconds ~ value^p, by least squares in logarithms.

    >>> round(slope((1.0, 2.0, 4.0), [3.0, 12.0, 48.0]), 6)
    2.0
    """
    return float(np.polyfit(np.log(values), np.log(seconds), 1)[0])
