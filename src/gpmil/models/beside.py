"""Doubt and novelty beside predictions, from the kernel that these have evaluated anyway."""

from dataclasses import replace

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from gpmil.data.bags import Bags
from gpmil.process.novelty import Seen
from gpmil.process.sparse_gp import Predictor, doubt

ROWS = 8192  # patches at a time whose novelty is judged


class Beside:
    """Doubt of every patch, and the novelty of patches and slides where it is known."""

    def __init__(self, predictor: Predictor, bags: Bags, seen: Seen | None):
        self.predictor, self.sizes, self.seen = predictor, bags.sizes, seen
        self.doubt = np.empty(bags.n_instances)
        self._patches = None if seen is None else np.empty(bags.n_instances)
        self._slides = np.full(len(bags), np.nan)
        self._rows: list[Int[np.ndarray, " n"]] = []  # not judged yet, as are those below
        self._bags: list[Int[np.ndarray, " b"]] = []
        self._kernel: list[tuple[Float[Tensor, "n m"], Float[Tensor, " n"]]] = []

    def unsmoothed(
        self, x: Float[Tensor, "n d"], rows: Int[np.ndarray, " n"], bags: Int[np.ndarray, " b"]
    ) -> Float[Tensor, "n r1"]:
        """predictor.unsmoothed(x) of whole bags, one after the other, looked at in passing."""
        gp = self.predictor.gp
        K = gp.kernel(x, gp.inducing)
        out = self.predictor.of_kernel(K)
        self.doubt[rows] = doubt(self.predictor, x, out).cpu().numpy()
        if self.seen is not None:
            order = np.argsort(rows, kind="stable")
            own = K[:, : len(self.seen.mean)], gp.kernel.diagonal(x)
            if (order[1:] < order[:-1]).any():  # a large bag, in the order of its band
                at = torch.from_numpy(order).to(K.device)
                own = own[0][at], own[1][at]
            self._rows.append(rows[order])
            self._bags.append(bags)
            self._kernel.append(own)
            if sum(map(len, self._rows)) >= ROWS:
                self._judge(self.seen)
        return out

    @property
    def novelty(self) -> tuple[Float[np.ndarray, " N"] | None, Float[np.ndarray, " B"]]:
        """Of patches (None where it is not known) and of slides."""
        if self.seen is not None and self._rows:
            self._judge(self.seen)
        return self._patches, self._slides

    def _judge(self, seen: Seen) -> None:
        assert self._patches is not None
        gp, m = self.predictor.gp, len(seen.mean)
        first = replace(gp, inducing=gp.inducing[:m], L=gp.L[:m, :m], context=None)
        rows, bags = np.concatenate(self._rows), np.concatenate(self._bags)
        K, own = map(torch.cat, zip(*self._kernel))
        with torch.no_grad():
            found = seen.of(first, K, own, self.sizes[bags])
        self._patches[rows], self._slides[bags] = found
        self._rows, self._bags, self._kernel = [], [], []
