"""Doubt and novelty beside predictions, from the kernel that these have evaluated anyway."""

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from gpmil.data.bags import Bags
from gpmil.process.novelty import Ruler
from gpmil.process.sparse_gp import Predictor, doubt


class Beside:
    """Doubt of every patch, and the novelty of patches and slides where it is known."""

    def __init__(self, predictor: Predictor, bags: Bags, ruler: Ruler | None):
        self.predictor, self.sizes, self.ruler = predictor, bags.sizes, ruler
        self.doubt = np.empty(bags.n_instances)
        self.novelty = None if ruler is None else np.empty(bags.n_instances)
        self.slides = np.full(len(bags), np.nan)

    def unsmoothed(
        self, x: Float[Tensor, "n d"], rows: Int[np.ndarray, " n"], bags: Int[np.ndarray, " b"]
    ) -> Float[Tensor, "n r1"]:
        """predictor.unsmoothed(x) of whole bags, one after the other, looked at in passing."""
        gp = self.predictor.gp
        K = gp.kernel(x, gp.inducing)
        out = self.predictor.of_kernel(K)
        self.doubt[rows] = doubt(self.predictor, x, out).cpu().numpy()
        if self.ruler is not None and self.novelty is not None:
            own = gp.kernel.diagonal(x)
            order = np.argsort(rows, kind="stable")
            if (order[1:] < order[:-1]).any():  # a large bag, in the order of its band
                K, own = (a[torch.from_numpy(order).to(a.device)] for a in (K, own))
            found = self.ruler.of(K[:, : len(self.ruler.L)], own, self.sizes[bags])
            self.novelty[rows[order]], self.slides[bags] = found
        return out
