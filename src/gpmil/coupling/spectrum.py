"""Sigma_b = (I + lambda C_b)^-1 for many values of lambda, differentiable in it.

    C_b = Q diag(e) Q',   Sigma_b = Q diag(1 / (1 + lambda e)) Q'

once per bag; what another lambda changes is then a vector. For learning, which asks for tens of
them: `operator.py` has the ways to one lambda.
"""

from typing import NamedTuple

import numpy as np
import scipy.sparse as sp
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from gpmil.coupling.operator import Device, Offsets, batches, padded_precision

Strength = float | Float[Tensor, ""]


class Spectrum(NamedTuple):
    """Q and e of some bags, padded to one length; the padding is coupled to nothing."""

    rows: Int[Tensor, " n"]  # of the cohort
    mask: Bool[Tensor, "b p"]
    Q: Float[Tensor, "b p p"]
    e: Float[Tensor, "b p"]

    def apply(self, x: Float[Tensor, "n k"], strength: Strength) -> Float[Tensor, "n k"]:
        """Sigma x."""
        padded = x.new_zeros(*self.mask.shape, x.shape[1])
        padded = padded.masked_scatter(self.mask[..., None], x)
        d = 1 / (1 + strength * self.e)
        return (self.Q @ (d[..., None] * (self.Q.mT @ padded)))[self.mask]

    def diagonals(self, strength: Strength) -> Float[Tensor, "2 n"]:
        """The diagonals of Sigma and of Sigma Sigma."""
        d = 1 / (1 + strength * self.e)
        both = self.Q.square() @ torch.stack([d, d.square()], -1)
        return both[self.mask].mT


class Spectra:
    """All bags of a cohort; those without an edge are left alone."""

    def __init__(self, adjacency: sp.csr_array, offsets: Offsets, device: Device = "cpu"):
        coupled = np.flatnonzero(np.diff(adjacency.indptr[offsets]) > 0)
        sizes = np.diff(offsets)
        self.bags = [
            _spectrum(adjacency, offsets, some, device) for some in batches(coupled, sizes, device)
        ]

    def apply(self, x: Float[Tensor, "N k"], strength: Strength) -> Float[Tensor, "N k"]:
        """Sigma x for the rows of all bags."""
        if not self.bags or _none(strength):
            return x
        return _placed(x, [(s.rows, s.apply(x[s.rows], strength)) for s in self.bags])

    def diagonals(
        self, strength: Strength, like: Float[Tensor, " N"]
    ) -> tuple[Float[Tensor, " N"], Float[Tensor, " N"]]:
        """The diagonals of Sigma and of Sigma Sigma."""
        one = torch.ones_like(like)
        if not self.bags or _none(strength):
            return one, one
        found = [s.diagonals(strength) for s in self.bags]
        first, second = (
            _placed(one, [(s.rows, d[k]) for s, d in zip(self.bags, found, strict=True)])
            for k in (0, 1)
        )
        return first, second


def _spectrum(
    adjacency: sp.csr_array, offsets: Offsets, bags: Int[np.ndarray, " b"], device: Device
) -> Spectrum:
    rows, mask, P = padded_precision(adjacency, offsets, bags, 1.0)
    C = P - torch.eye(P.shape[-1], dtype=P.dtype)
    e, Q = torch.linalg.eigh(C.to(device))
    return Spectrum(torch.from_numpy(rows).to(device), mask.to(device), Q, e.clamp(min=0))


def _none(strength: Strength) -> bool:
    """Whether lambda is the number 0; a tensor may be asked for its derivative."""
    return not isinstance(strength, Tensor) and strength == 0


def _placed(x: Tensor, parts: list[tuple[Tensor, Tensor]]) -> Tensor:
    """x with some of its rows replaced."""
    rows, values = zip(*parts, strict=True)
    return x.index_copy(0, torch.cat(rows), torch.cat(values))
