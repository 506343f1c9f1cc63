"""H of a cohort at a few more inducing points, or others: the columns of the first ones are kept.

A model that is taught gets an inducing point with every label, and the others stay. The factor L at
all points has that of the first m in its corner, so that W and H = Sigma W keep their first m
columns, and with W_1 those and 2 the other points

    W_2 = (K_x2 - W_1 L_21') L_22^-T,    H_2 = Sigma W_2

of which there are few. R - I = W'Q W, Q = Sigma - k 11' (stores.py), gets the columns W'Q W_2.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import scipy.sparse as sp
import torch
from jaxtyping import Float
from torch import Tensor

from gpmil.coupling.operator import Coupling
from gpmil.fast.memory import free_memory
from gpmil.inference.pieces import Chunk, Piece
from gpmil.inference.stores import Gathered, Source
from gpmil.moments.likelihood import Group, downdate
from gpmil.process.sparse_gp import SparseGP

SHARE = 0.25  # of the free memory that W and H may take beyond a fit
SAME = 1e-9  # of the largest entry: corners of L that differ by rounding alone


@dataclass(frozen=True)
class Kept:
    """W, H and R - I of a cohort at some inducing points, for the same cohort at others."""

    gp: SparseGP
    adjacency: sp.csr_array
    strength: float
    groups: Sequence[Group]
    W: Float[Tensor, "N M"]
    H: Float[Tensor, "N M"]
    gathered: Gathered

    @classmethod
    def of(cls, source: Source, pieces: Sequence[Piece], gathered: Gathered) -> "Kept | None":
        """From a first pass over the cohort; None where H is not in memory, or there is no room."""
        chunks = [piece for piece in pieces if isinstance(piece, Chunk)]
        free, (N, M) = free_memory(source.device), source.shape
        if len(chunks) < len(pieces) or source.dtype != torch.float64:
            return None
        if free is not None and 2 * N * M * source.dtype.itemsize > SHARE * free:
            return None
        H = torch.cat([chunk.H for chunk in chunks])
        # W = Sigma^-1 H
        W = torch.cat([c.H if (P := c.group.precision) is None else P.apply(c.H) for c in chunks])
        groups = [chunk.group for chunk in chunks]
        return cls(source.gp, source.adjacency, source.strength, groups, W, H, gathered)

    @functools.cached_property
    def coupling(self) -> Coupling:
        """Sigma, factored once for all points that come."""
        offsets = [np.zeros(1, dtype=np.int64)]
        offsets += [g.rows.start + g.offsets[1:].cpu().numpy() for g in self.groups]
        device = self.H.device
        return Coupling(self.adjacency, np.concatenate(offsets), self.strength, device)

    def in_common(self, source: Source) -> int:
        """How many of the first points are the same; 0 where anything else is not."""
        known, now = self.gp, source.gp
        m = min(len(known.inducing), len(now.inducing))
        same = (known.inducing[:m] == now.inducing[:m]).all(1)
        m = m if bool(same.all()) else int((~same).nonzero()[0, 0])
        apart = (known.L[:m, :m] - now.L[:m, :m]).abs().max() if m else 0.0
        positive = torch.cat([group.positive for group in self.groups]).cpu().numpy()
        alike = self.strength == source.strength and known.effect == now.effect
        alike = alike and np.array_equal(positive, source.positive)
        one, other = self.adjacency, source.adjacency
        alike = alike and all(
            np.array_equal(getattr(one, a), getattr(other, a)) for a in ("indptr", "indices")
        )
        return m if alike and float(apart) <= SAME * float(known.L.abs().max()) else 0

    def at(self, source: Source) -> "Kept | None":
        """The same at the points of `source`, whose cohort is this one; None if none is known."""
        m, gp = self.in_common(source), source.gp
        if m == 0:
            return None
        x = source.inputs(torch.arange(len(self.H), device=self.H.device))
        W, H = self._fresh(gp, x, m)
        # Q W_2 = H_2 - k 1 1'W_2
        QW, row, sizes = H, torch.cat([g.row + n for g, n in self._numbered()]), self._sizes
        if gp.effect:
            totals = W.new_zeros(len(sizes), W.shape[1]).index_add_(0, row, W)
            QW = H - (downdate(gp.effect, sizes)[:, None] * totals)[row]
        cross, own = self.W[:, :m].mT @ QW, W.mT @ QW
        corner = self.gathered.gram[:m, :m]
        gram = torch.cat([torch.cat([corner, cross], 1), torch.cat([cross.mT, own], 1)])
        W, H = torch.cat([self.W[:, :m], W], 1), torch.cat([self.H[:, :m], H], 1)
        found = replace(
            self, gp=gp, W=W, H=H, gathered=Gathered((gram + gram.mT) / 2, self.gathered.trace)
        )
        found.__dict__["coupling"] = self.coupling
        return found

    def _fresh(
        self, gp: SparseGP, x: Float[Tensor, "N d"], m: int
    ) -> tuple[Float[Tensor, "N k"], Float[Tensor, "N k"]]:
        """W and H at the points after the first m, and the columns of the slide context."""
        K = gp.kernel(gp.inducing[m:], x) - gp.L[m:, :m] @ self.W[:, :m].mT
        W = torch.linalg.solve_triangular(gp.L[m:, m:], K, upper=False).mT
        H = self.coupling.apply(W)
        if gp.context is None:
            return W, H
        v = gp.context.columns(x, self._sizes)  # Sigma 1 v' = 1 v'
        return torch.cat([W, v], 1), torch.cat([H, v], 1)

    @property
    def _sizes(self) -> Tensor:
        return torch.cat([group.offsets.diff() for group in self.groups])

    def _numbered(self) -> list[tuple[Group, int]]:
        """Groups, each with the number of bags before it."""
        before = np.cumsum([0, *(len(group.positive) for group in self.groups)])
        return list(zip(self.groups, before.tolist()))

    def pieces(self, source: Source) -> list[Piece]:
        """The cohort as inference takes it, with the labels of patches as `source` has them."""
        known = None if source.known is None else torch.tensor(source.known, device=self.H.device)
        groups = [
            replace(group, known=None if known is None else known[group.rows])
            for group in self.groups
        ]
        return [Chunk(self.H[group.rows], source.likelihood(group)) for group in groups]
