"""Small bags: P and Sigma as dense matrices side by side, padded with unit rows to one length."""

import numpy as np
import scipy.sparse as sp
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from gpmil.coupling.part import Kernel
from gpmil.coupling.precision import Edges, Offsets, bags_block, instance_rows


class Dense:
    """Small bags at once: Sigma as an explicit inverse, padded with unit rows to one length.

    P has its eigenvalues in [1, 1 + 2 lambda max degree], so the explicit inverse is as accurate
    as a solve, and applying it is one batched product.
    """

    def __init__(
        self,
        bags: Int[np.ndarray, " b"],
        rows: Int[Tensor, " n"],
        mask: Bool[Tensor, "b p"],
        precision: Float[Tensor, "b p p"],
    ):
        self.bags, self.rows, self.mask = bags, rows, mask
        factor = torch.linalg.cholesky(precision)
        self.sigma = torch.cholesky_inverse(factor)
        # log|Sigma_b| = -log|P_b|
        self._logdet = -2 * factor.diagonal(dim1=-2, dim2=-1).log().sum(-1)

    @classmethod
    def of(
        cls, edges: Edges, offsets: Offsets, bags: Int[np.ndarray, " b"], strength: float
    ) -> "Dense":
        """Of some bags of a cohort, where its edges are."""
        return cls(bags, *_side_by_side(edges, offsets, bags, strength))

    def pad(self, x: Float[Tensor, "n k"]) -> Float[Tensor, "b p k"]:
        """The bags side by side, zeros where a bag is shorter."""
        out = x.new_zeros(*self.mask.shape, x.shape[1])
        out[self.mask] = x
        return out

    def apply(self, x: Float[Tensor, "n k"]) -> Float[Tensor, "n k"]:
        """Sigma x, one batched product."""
        return (self.sigma @ self.pad(x))[self.mask]

    def diagonal(self) -> Float[Tensor, " n"]:
        """diag Sigma."""
        return self.sigma.diagonal(dim1=-2, dim2=-1)[self.mask]

    def logdet(self) -> Float[Tensor, " b"]:
        """log|Sigma_b|."""
        return self._logdet

    def congruence_diagonal(self, x: Float[Tensor, "n d"], kernel: Kernel) -> Float[Tensor, " n"]:
        """(Sigma K Sigma)_ii = sum_j (Sigma K)_ij Sigma_ij; padding has Sigma_ij = 0."""
        padded = self.pad(x)
        return ((self.sigma @ kernel(padded, padded)) * self.sigma).sum(-1)[self.mask]

    def trace(self, x: Float[Tensor, "n d"], kernel: Kernel, every: int = 1) -> Float[Tensor, ""]:
        """tr(Sigma K) = sum_ij Sigma_ij K_ij, padding left out."""
        padded, taken = self.pad(x), self.mask[:, ::every]
        column = (self.sigma[..., ::every] * kernel(padded, padded[:, ::every])).sum(-2)
        # Sigma_ij = 0 for i in the padding and j not
        total = torch.where(taken, column, 0.0).sum(1)
        return (total * self.mask.sum(1) / taken.sum(1)).sum()


def padded_precision(
    adjacency: sp.csr_array, offsets: Offsets, bags: Int[np.ndarray, " b"], strength: float
) -> tuple[Int[np.ndarray, " n"], Bool[Tensor, "b p"], Float[Tensor, "b p p"]]:
    """Rows of some bags, which of the padded places they fill, and P with unit rows elsewhere."""
    rows = instance_rows(offsets, bags)
    # their edges alone: those of the whole cohort would be gone through again for every batch
    own = Edges.of(bags_block(adjacency, offsets, bags, rows), "cpu")
    starts = np.concatenate([[0], np.cumsum(offsets[bags + 1] - offsets[bags])])
    _, mask, P = _side_by_side(own, starts, np.arange(len(bags)), strength)
    return rows, mask, P


def _side_by_side(
    edges: Edges, offsets: Offsets, bags: Int[np.ndarray, " b"], strength: float
) -> tuple[Int[Tensor, " n"], Bool[Tensor, "b p"], Float[Tensor, "b p p"]]:
    """Rows, places and P as `padded_precision` gives them, on the device that has the edges."""
    device = edges.start.device
    first, size = (
        torch.from_numpy(a).to(device) for a in (offsets[bags], offsets[bags + 1] - offsets[bags])
    )
    b, p = len(bags), int((offsets[bags + 1] - offsets[bags]).max())
    mask = torch.arange(p, device=device) < size[:, None]
    place = mask.view(-1).nonzero()[:, 0]  # of every row among the b x p padded ones
    rows = first[place // p] + place % p
    P = torch.zeros(b * p, p, dtype=torch.float64, device=device)
    # P = I + lambda (diag(A 1) - A), the padding with unit rows
    count = edges.start[rows + 1] - edges.start[rows]
    edge = torch.arange(int(count.sum()), device=device)
    edge += (edges.start[rows] - (count.cumsum(0) - count)).repeat_interleave(count)
    of = place.repeat_interleave(count)
    P[of, edges.column[edge] - first[of // p]] = -strength * edges.weight[edge]
    P = P.view(b, p, p)
    diagonal = torch.ones(b, p, dtype=torch.float64, device=device)
    diagonal[mask] += strength * edges.degree[rows]
    P.diagonal(dim1=-2, dim2=-1).add_(diagonal)
    return rows, mask, P
