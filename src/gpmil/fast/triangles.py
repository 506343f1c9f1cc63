"""Systems and inverses of small matrices on a CPU, by SciPy's LAPACK.

torch calls MKL, which takes one and a half to three times as long on AMD processors, and spends
more on the call than a matrix of fifty rows is worth.
"""

from typing import Any

import numpy as np
from jaxtyping import Float
from scipy.linalg import lapack

Matrix = Float[np.ndarray, "n n"]
_INVERT: dict[str, Any] = {"d": lapack.dtrtri, "f": lapack.strtri}


def solution(A: Matrix, b: Float[np.ndarray, " n"]) -> Float[np.ndarray, " n"] | None:
    """A^-1 b of a symmetric A in float64; None where it is not positive definite."""
    # a matrix and its transpose are the same one: of rows that LAPACK reads as columns no copy
    _, x, info = lapack.dposv(A if A.flags.f_contiguous else A.T, b, lower=1)
    return None if info else x


def inverse(L: Matrix) -> Matrix:
    """L^-1, in column order."""
    return _INVERT[L.dtype.char](L, lower=1)[0]
