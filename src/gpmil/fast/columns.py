"""Sums over the rows of features, column by column. Imported only with Numba."""

from typing import no_type_check

import numpy as np
from numba import njit

from gpmil.fast.tails import DOOR, INNER

RUN = 32  # rows added up at a time: sums of sums lose as little as torch's


@njit(**DOOR)
@no_type_check
def sums(x, about):
    """Sums of x - about and of its squares, in float64."""
    d = x.shape[1]
    first, second, run, run_of_squares = np.zeros(d), np.zeros(d), np.empty(d), np.empty(d)
    for start in range(0, len(x), RUN):
        run[:] = 0
        run_of_squares[:] = 0
        _add(x[start : start + RUN], about, run, run_of_squares)
        for k in range(d):
            first[k] += run[k]
            second[k] += run_of_squares[k]
    return first, second


@njit(**INNER)
@no_type_check
def _add(x, about, first, second):
    """One row after the other, all columns of it side by side; nothing is left to the compiler.

    The same numbers in another type of array have the same sums, to the last digit.
    """
    for i in range(len(x)):
        row = x[i]
        for k in range(len(row)):
            apart = row[k] - about[k]
            first[k] += apart
            second[k] += apart * apart
