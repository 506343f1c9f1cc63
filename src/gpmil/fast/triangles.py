"""Cholesky factors and triangular solves of small matrices on a CPU, by SciPy's LAPACK or tiles.

torch calls MKL, which takes one and a half to three times as long on AMD processors, and spends
more on the call than a matrix of fifty rows is worth. Many rows at once are solved by tiles.py, in
half of LAPACK's time.
"""

from typing import Any

import numpy as np
from jaxtyping import Float
from scipy.linalg import blas, lapack

from gpmil.fast import products

Matrix = Float[np.ndarray, "n n"]
MOST = 400  # rows of a factor, up to which tiles are quicker
_FACTOR: dict[str, Any] = {"d": lapack.dpotrf, "f": lapack.spotrf}
_SOLVE: dict[str, Any] = {"d": blas.dtrsm, "f": blas.strsm}
_INVERT: dict[str, Any] = {"d": lapack.dtrtri, "f": lapack.strtri}


def factor(A: Matrix) -> Matrix:
    """The lower L in A = L L', in column order; above its diagonal is what was in A."""
    # a matrix and its transpose are the same one: of rows that LAPACK reads as columns no copy
    L, info = _FACTOR[A.dtype.char](A if A.flags.f_contiguous else A.T, lower=1, clean=0)
    if info:
        raise np.linalg.LinAlgError(f"not positive definite: {info} of {len(A)} rows")
    return L


def solution(A: Matrix, b: Float[np.ndarray, " n"]) -> Float[np.ndarray, " n"] | None:
    """A^-1 b of a symmetric A in float64; None where it is not positive definite."""
    _, x, info = lapack.dposv(A if A.flags.f_contiguous else A.T, b, lower=1)
    return None if info else x


def solved(L: Matrix, rows: Float[np.ndarray, "k n"]) -> Float[np.ndarray, "k n"]:
    """L^-1 of every row; the rows themselves are lost."""
    loops = products.tiled() if len(L) <= MOST else None
    if loops is not None and rows.flags.c_contiguous:
        loops.solved(np.ascontiguousarray(L.T), rows, rows)
        return rows
    return _SOLVE[L.dtype.char](1.0, L, rows.T, lower=1, overwrite_b=1).T


def inverse(L: Matrix) -> Matrix:
    """L^-1, in column order."""
    return _INVERT[L.dtype.char](L, lower=1)[0]
