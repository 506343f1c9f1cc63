"""Calibrated grades: every P(Y >= k) by a calibrator of its own, and never in the wrong order."""

import numpy as np
from jaxtyping import Float, Int

from gpmil.decide.calibration import SlideCalibrator

Odds = Float[np.ndarray, "B k"]  # log odds of Y >= 1, ..., Y >= K - 1


def fitted(odds: Odds, codes: Int[np.ndarray, " B"]) -> Float[np.ndarray, "k 2"]:
    """Slope and intercept of every threshold, from what was said of bags out of fold.

    >>> rng = np.random.default_rng(0)
    >>> odds = rng.normal(0, 1, 500)[:, None] - [0.0, 1.0]  # said; true ones are twice as far off
    >>> y = (rng.logistic(size=500)[:, None] < 2 * odds).sum(1)
    >>> slope, intercept = fitted(odds, y).T
    >>> bool((np.abs(slope - 2) < 0.5).all() and (np.abs(intercept) < 0.5).all())
    True
    """
    each = (SlideCalibrator.fit(x, (codes > k).astype(np.int64)) for k, x in enumerate(odds.T))
    return np.array([(one.slope, one.intercept) for one in each])


def calibrated(odds: Odds, calibration: Float[np.ndarray, "k 2"]) -> Float[np.ndarray, "B k"]:
    """log P(Y <= 0), ..., log P(Y <= K - 2), calibrated, which never falls."""
    found = [
        SlideCalibrator(*numbers).predict(x) for x, numbers in zip(odds.T, calibration.tolist())
    ]
    return np.maximum.accumulate(np.log1p(-np.stack(found, axis=1)), axis=1)
