"""Kinds of tissue in negative bags, and whether positive bags score alike in tissue of a kind."""

from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float

from gpmil.data.bags import Bags
from gpmil.decide.unlike import like_in_kinds
from gpmil.process.inducing import kmeans

KINDS = 6
MOST = 5000  # patches of positive bags, and of negative ones, that are compared
CPU = torch.device("cpu")


def same_kind(
    model: Any,
    bags: Bags,
    p: Float[np.ndarray, " N"],
    positive: Bool[np.ndarray, " N"],
) -> float:
    """`like_in_kinds` of a cohort, from its p-values: kinds are clusters of negative bags."""
    rng = np.random.default_rng(0)
    chosen = [rng.permutation(np.flatnonzero(of))[:MOST] for of in (positive, ~positive)]
    rows = np.sort(np.concatenate(chosen))
    x = model._inputs(bags.features[rows], CPU)
    centres = torch.from_numpy(kmeans(x[torch.from_numpy(~positive[rows])], KINDS, 0)).to(x)
    kind = torch.cdist(x, centres).argmin(1).numpy()
    return like_in_kinds(p[rows], positive[rows], kind)
