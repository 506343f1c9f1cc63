"""Checks of what decisions are made from: error rates, and numbers that may be missing."""

import numpy as np

from gpmil.data.checks import listed

ROUNDING = 1e-9  # relative: p-values are fractions and often meet their limit exactly


def check_share(value: float, name: str) -> None:
    """An error rate or a level."""
    if not 0 < value < 1:
        raise ValueError(
            f"{name}: expected a number between 0 and 1, both excluded, found {value}. Ten percent "
            "is 0.1."
        )


def check_within(values: np.ndarray, expected: str) -> None:
    """Numbers from 0 to 1; `expected` says what they are."""
    outside = ~((values >= 0) & (values <= 1))
    if outside.any():
        raise ValueError(f"{expected}, found {listed(values[outside])}.")


def refuse_nan(values: np.ndarray, name: str) -> None:
    """A score that is missing cannot be ranked."""
    missing = np.isnan(values)
    if missing.any():
        raise ValueError(
            f"{name}: expected numbers, found NaN in {missing.sum():,} of {values.size:,} places. "
            "Were features missing?"
        )
