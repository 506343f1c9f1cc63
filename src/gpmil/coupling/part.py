"""What every part of Sigma offers, and the simplest part: bags without coupling."""

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

Halved = tuple[Float[Tensor, "n k"], Float[Tensor, "n k"]]  # V with V'V = x'Sigma x, and Sigma x


@runtime_checkable
class Kernel(Protocol):
    """What is asked of a kernel here: matrices, and their diagonal."""

    def __call__(self, x: Tensor, z: Tensor, /) -> Tensor:
        """k(x_i, z_j), (..., n, m)."""

    def diagonal(self, x: Tensor, /) -> Tensor:
        """k(x_i, x_i), (..., n)."""

    def against(self, x: Tensor, sizes: Sequence[int], S: Tensor, /) -> float | Tensor:
        """sum_bij S_bij k(x_i, x_j) over the rows of every bag; S symmetric, padded to one size."""


@runtime_checkable
class Part(Protocol):
    """Sigma for some of the bags; `rows` are their instances, in the order `apply` expects."""

    bags: Int[np.ndarray, " b"]
    rows: Int[Tensor, " n"]

    def apply(self, x: Tensor) -> Tensor:
        """Sigma x for a block of vectors x (n, k)."""

    def halved(self, x: Tensor) -> Halved | None:
        """V with V'V = x'Sigma x, and Sigma x; None where V is not at hand."""

    def diagonal(self) -> Tensor:
        """The exact diagonal of Sigma, (n,)."""

    def logdet(self) -> Tensor:
        """log|Sigma_b| of each bag, (b,)."""

    def congruence_diagonal(self, x: Tensor, kernel: Kernel) -> Tensor:
        """diag(Sigma K Sigma) with K = kernel(x, x) bag by bag, x (n, d); (n,)."""

    def trace(self, x: Tensor, kernel: Kernel, every: int = 1) -> Tensor:
        """tr(Sigma K), summed over the bags; from every so many columns, scaled up."""


class Identity:
    """Sigma = I: bags without an edge, or lambda = 0."""

    def __init__(self, bags: Int[np.ndarray, " b"], rows: Int[Tensor, " n"]):
        self.bags, self.rows = bags, rows

    def apply(self, x: Float[Tensor, "n k"]) -> Float[Tensor, "n k"]:
        """Sigma x = x."""
        return x

    def halved(self, x: Float[Tensor, "n k"]) -> Halved:
        """V = x."""
        return x, x

    def diagonal(self) -> Float[Tensor, " n"]:
        """Ones."""
        return torch.ones(len(self.rows), dtype=torch.float64, device=self.rows.device)

    def logdet(self) -> Float[Tensor, " b"]:
        """Zeros."""
        return torch.zeros(len(self.bags), dtype=torch.float64, device=self.rows.device)

    def congruence_diagonal(self, x: Float[Tensor, "n d"], kernel: Kernel) -> Float[Tensor, " n"]:
        """The kernel's own diagonal."""
        return kernel.diagonal(x)

    def trace(self, x: Float[Tensor, "n d"], kernel: Kernel, every: int = 1) -> Float[Tensor, ""]:
        """The sum of the kernel's diagonal, which is cheap: no column is left out."""
        return self.congruence_diagonal(x, kernel).sum()
