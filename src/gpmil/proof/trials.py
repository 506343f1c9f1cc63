"""Cohorts that are drawn, fitted and judged one by one: parts of a study, some cohorts in each."""

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from threadpoolctl import threadpool_limits

from gpmil.paper.parts import Packed, sealed

Measured = dict[str, np.ndarray]  # of every cohort: a number, or an array
OneCohort = Callable[[Any, int], dict[str, Any]]


@dataclass(frozen=True)
class Trials:
    """Some cohorts of one case: `measure(case, seed)` gives the same names for every seed."""

    study: str
    case: Any  # a dataclass with a name; its repr says all about it
    measure: OneCohort
    seeds: tuple[int, ...]
    cost: float = 1.0  # of one cohort

    @property
    def title(self) -> str:
        """In words."""
        return f"{self.study}: {self.case.name}, cohorts {self.seeds[0]} to {self.seeds[-1]}"

    @property
    def table(self) -> str:
        """All cases of a study."""
        return self.study

    @property
    def turn(self) -> int:
        """The first cohorts first."""
        return self.seeds[0]

    @property
    def effort(self) -> float:
        """Rough cost."""
        return self.cost * len(self.seeds)

    def name(self) -> str:
        """The stem of its file."""
        slug = "".join(c if c.isalnum() else "-" for c in self.case.name.lower())
        stem = f"{self.study}-{slug}-{self.seeds[0]}"
        return sealed(stem, f"{self.study} {self.case!r} {self.seeds}")

    def compute(self) -> Measured:
        """Every cohort, one after the other on one thread; arrays stand side by side."""
        with threadpool_limits(1):
            rows = [quietly(self.measure, self.case, seed) for seed in self.seeds]
        return {key: np.stack([np.asarray(row[key]) for row in rows]) for key in rows[0]}

    def pack(self, result: Measured) -> Packed:
        """As it is."""
        return result, {}

    def unpack(self, packed: Packed) -> Measured:
        """As it is."""
        return packed[0]


def in_parts(
    study: str, cases: Sequence[Any], measure: OneCohort, n_cohorts: int, each: int, cost: float
) -> Iterator[Trials]:
    """`n_cohorts` of every case, `each` of them in a part."""
    for case in cases:
        for start in range(0, n_cohorts, each):
            seeds = tuple(range(start, min(start + each, n_cohorts)))
            yield Trials(study, case, measure, seeds, cost)


def gathered(found: Sequence[tuple[Any, Any]], study: str) -> dict[str, Measured]:
    """By the name of the case: what was measured in all cohorts of a study, in their order."""
    own = [(p, r) for p, r in found if isinstance(p, Trials) and p.study == study]
    together: dict[str, list[Measured]] = {}
    for part, result in sorted(own, key=lambda pair: pair[0].seeds):
        together.setdefault(part.case.name, []).append(result)
    return {
        name: {key: np.concatenate([piece[key] for piece in pieces]) for key in pieces[0]}
        for name, pieces in together.items()
    }


def quietly(measure: OneCohort, case: Any, seed: int) -> dict[str, Any]:
    """Without the library's advice about single cohorts."""
    logger = logging.getLogger("gpmil")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        return measure(case, seed)
    finally:
        logger.setLevel(before)


def mean_and_error(values: np.ndarray) -> tuple[float, float]:
    """Mean over the cohorts where it is defined, and its standard error; nan from fewer than two.

    >>> mean_and_error(np.array([1.0, 3.0, np.nan]))
    (2.0, 1.0)
    """
    values = values[np.isfinite(values)]
    if len(values) < 2:
        return float("nan"), float("nan")
    return float(values.mean()), float(values.std(ddof=1) / np.sqrt(len(values)))
