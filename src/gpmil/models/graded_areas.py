"""Grades by area: which share of a slide's patches has which grade, and patterns by a rule on top.

Shares are averages over draws of all m of a slide together, so that their intervals know that
neighbours are alike: patches one by one would promise far too narrow ones.
"""

from dataclasses import dataclass

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float, Int
from torch import Tensor

from gpmil.data.bags import Bags

LEAST = 0.05  # of the area above the lowest grade that makes a second pattern
# Gleason patterns, first and second, to ISUP grade groups (Epstein et al. 2016)
GROUPS = {(3, 3): 1, (3, 4): 2, (4, 3): 3, (4, 4): 4, (3, 5): 4, (5, 3): 4, (4, 5): 5, (5, 4): 5,
          (5, 5): 5}  # fmt: skip


def isup(first: str, second: str) -> int | None:
    """The ISUP grade group of two Gleason patterns; 0 of two that are none, None where unknown.

    >>> isup("3", "4"), isup("4", "3"), isup("benign", "benign"), isup("low", "low")
    (2, 3, 0, None)
    """
    if first == second == "benign":
        return 0
    known = first.isdecimal() and second.isdecimal()
    return GROUPS.get((int(first), int(second))) if known else None


@dataclass(frozen=True)
class GradeAreas:
    """Of every bag the expected share of its patches of each grade, with an interval."""

    share: Float[np.ndarray, "B K"]
    low: Float[np.ndarray, "B K"]
    high: Float[np.ndarray, "B K"]
    level: float
    grades: np.ndarray  # (K,), the lowest first
    bags: Bags

    def patterns(self) -> tuple[np.ndarray, np.ndarray]:
        """First and second pattern, (B,) names: the two grades of most area above the lowest.

        A second one counts from 5 % of the area above the lowest grade on, else it is the first
        again; both are the lowest grade where less than half a patch is expected above it.
        """
        above = self.share[:, 1:]
        order = np.argsort(-above, axis=1, kind="stable") + 1
        first, total = order[:, 0], above.sum(1)
        second = first
        if above.shape[1] > 1:
            seen = np.take_along_axis(self.share, order[:, 1:2], 1)[:, 0] >= LEAST * total
            second = np.where(seen, order[:, 1], first)
        none = total * self.bags.sizes < 0.5
        return self.grades[np.where(none, 0, first)], self.grades[np.where(none, 0, second)]

    def to_frame(self) -> pd.DataFrame:
        """One row per bag: share, low and high of every grade, first and second pattern."""
        columns: dict[str, np.ndarray] = {"bag": self.bags.names}
        for k, name in enumerate(self.grades):
            values = (self.share, self.low, self.high)
            columns |= {f"{w}({name})": v[:, k] for w, v in zip(("share", "low", "high"), values)}
        first, second = self.patterns()
        return pd.DataFrame(columns | {"first": first, "second": second})


def drawn_shares(
    mu: Float[Tensor, " n"],
    S: Float[Tensor, "n n"],
    cuts: Float[Tensor, " k"],
    noise: Float[Tensor, "n d"],
) -> Float[Tensor, "d K"]:
    """Share of patches of each grade in draws of m ~ N(mu, S), noise standard normal."""
    m = mu[:, None] + torch.linalg.cholesky(S) @ noise
    # the share above each cut point falls from one to the next
    above = torch.stack([(m > cut).double().mean(0) for cut in cuts], 1)
    ones = torch.ones_like(above[:, :1])
    return torch.cat([ones, above], 1) - torch.cat([above, 0 * ones], 1)


def summary(
    shares: list[Float[np.ndarray, "d K"]], level: float
) -> tuple[Float[np.ndarray, "B K"], Float[np.ndarray, "B K"], Float[np.ndarray, "B K"]]:
    """Mean and both ends of an interval, of every bag."""
    ends = [np.quantile(s, [(1 - level) / 2, (1 + level) / 2], axis=0) for s in shares]
    low, high = np.stack([e[0] for e in ends]), np.stack([e[1] for e in ends])
    return np.stack([s.mean(0) for s in shares]), low, high


def standard_normal(n: int, draws: int, bag: int) -> Float[np.ndarray, "n d"]:
    """The noise of a bag: the same for the same number, in pairs of opposite sign."""
    half = np.random.default_rng(bag).standard_normal((n, draws // 2))
    return np.hstack([half, -half])


def refuse_large(sizes: Int[np.ndarray, " B"], most: int) -> None:
    """Refuse slides whose matrices do not fit."""
    large = int(sizes.max())
    if large > most:
        raise ValueError(
            f"areas are drawn for slides of up to {most:,} patches, one has {large:,}: predict its "
            "parts, or every second patch of it."
        )
