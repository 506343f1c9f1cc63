"""The RBF kernel from inner products, in one pass over the matrix. Imported only with Numba."""

from typing import no_type_check

from numba import njit

from gpmil.fast.tails import DOOR, FUSED, INNER, exp

LOWEST = -700.0  # below, exp is zero


@njit(fastmath=FUSED, **DOOR)
@no_type_check
def rbf(products, half_x, half_z, variance):
    """x_i'z_j becomes variance exp(x_i'z_j - |x_i|^2 / 2 - |z_j|^2 / 2); nan stays nan."""
    for i in range(len(products)):
        _row(products[i], half_x[i], half_z, variance)


@njit(fastmath=FUSED, **INNER)
@no_type_check
def _row(row, half, half_z, variance):
    for j in range(len(row)):
        s = row[j] - half - half_z[j]
        s = 0.0 if s > 0 else s
        e = exp(LOWEST if s < LOWEST else s)
        row[j] = variance * (0.0 if s < LOWEST else e)
