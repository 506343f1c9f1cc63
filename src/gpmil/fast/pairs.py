"""The RBF kernel from inner products, in one pass over the matrix. Imported only with Numba."""

from typing import no_type_check

from numba import njit

from gpmil.fast.tails import ANY_ORDER, DOOR, FUSED, INNER, exp

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


@njit(fastmath=FUSED, **DOOR)
@no_type_check
def rbf_against(products, half, weights):
    """sum_ij weights_ij exp(x_i'x_j - |x_i|^2 / 2 - |x_j|^2 / 2), both symmetric."""
    total = 0.0
    for i in range(len(products)):
        total += 2 * _before(products[i, :i], half[i], half, weights[i]) + weights[i, i]
    return total


@njit(fastmath=ANY_ORDER, **INNER)
@no_type_check
def _before(row, own, half, weights):
    total = 0.0
    for j in range(len(row)):
        s = row[j] - own - half[j]
        s = 0.0 if s > 0 else s
        e = exp(LOWEST if s < LOWEST else s)
        total += weights[j] * (0.0 if s < LOWEST else e)
    return total
