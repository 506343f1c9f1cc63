"""What is asked of a proof: how large, how often, and which real data."""

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Plan:
    """`quick` makes everything small; `seeds` of models and cohorts; `cohorts` that are drawn."""

    quick: bool = False
    seeds: int = 10
    cohorts: int = 100  # of every promise; of the posterior five times as many
    data: Path | None = None  # folder of the real sets
    only: tuple[str, ...] = ()  # keys of methods; empty: all

    def wants(self, key: str) -> bool:
        """Whether a method takes part."""
        return not self.only or key in self.only
