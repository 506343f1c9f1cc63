"""From a cohort to the settings that "auto" stands for (tuning.py does the work)."""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from gpytorch.kernels import Kernel as GPyTorchKernel
from jaxtyping import Float, Int
from scipy.special import ndtri
from torch import Tensor

from gpmil.data.bags import Bags
from gpmil.inference import tuning
from gpmil.inference.objective import Cohort, Settings, StoredRows
from gpmil.inference.tuning import Space

logger = logging.getLogger("gpmil")

MOST_BAGS = 500  # bags that tuning looks at
MOST_INSTANCES = 1_000  # instances a bag that tuning looks at
CONVERTED = 2**24  # numbers converted to float64 at once: 128 MB
AUTO_KERNELS = ("rbf", "matern52", "linear")


@dataclass(frozen=True)
class Learned:
    """What was chosen, how well it scored, and everything that was tried."""

    kernel: str | GPyTorchKernel
    settings: Settings
    score: float
    trace: list[dict[str, Any]]


def balanced_level(sizes: Int[np.ndarray, " B"]) -> float:
    """u with Phi(-u)^n = 1/2, n the median bag: a typical bag is positive with probability 1/2.

    The prior mean is then c = u sqrt(1 + variance), the deviation of a patch variable.

    >>> round(balanced_level(np.array([50, 100, 400])), 3)
    -2.462
    """
    return -float(ndtri(0.5 ** (1 / np.median(sizes))))


def is_small(bags: Bags) -> bool:
    """Whether tuning looks at the whole cohort."""
    return len(bags) <= MOST_BAGS and int(bags.sizes.max()) <= MOST_INSTANCES


def subsample(labels: Int[np.ndarray, " B"], seed: int) -> Int[np.ndarray, " b"]:
    """The bags to tune on: all, or 500 with the classes in their proportion."""
    if len(labels) <= MOST_BAGS:
        return np.arange(len(labels))
    logger.info("tuning on a stratified subsample of %d of %d bags", MOST_BAGS, len(labels))
    rng = np.random.default_rng(seed)
    positive, negative = np.flatnonzero(labels == 1), np.flatnonzero(labels == 0)
    # a rare class keeps two bags at least, or all it has
    share = round(MOST_BAGS * len(positive) / len(labels))
    n_positive = int(np.clip(share, min(2, len(positive)), MOST_BAGS - min(2, len(negative))))
    chosen = np.concatenate(
        [
            rng.choice(positive, min(n_positive, len(positive)), replace=False),
            rng.choice(negative, min(MOST_BAGS - n_positive, len(negative)), replace=False),
        ]
    )
    return np.sort(chosen)


def thinned_rows(
    bags: Bags, score: Callable[[Bags], Float[np.ndarray, " N"]]
) -> Int[np.ndarray, " n"]:
    """Rows to tune on: of a bag above the limit those that a first model finds most suspicious.

    They all but decide the bag's probability, in negative bags as in positive ones.
    """
    large = bags.sizes > MOST_INSTANCES
    if not large.any():
        return np.arange(bags.n_instances)
    logger.info(
        "tuning looks at the %d most suspicious instances of %d bags that have more",
        MOST_INSTANCES,
        int(large.sum()),
    )
    suspicion = score(bags)
    kept = [
        np.arange(start, stop)
        if stop - start <= MOST_INSTANCES
        else start + np.sort(np.argsort(-suspicion[start:stop], kind="stable")[:MOST_INSTANCES])
        for start, stop in zip(bags.offsets[:-1], bags.offsets[1:], strict=True)
    ]
    return np.concatenate(kept)


def cohort(
    bags: Bags,
    rows: Int[np.ndarray, " n"],
    positive: np.ndarray,
    inputs: Callable[[np.ndarray], Tensor],
    inducing: Float[Tensor, "M d"],
    kernel: str | GPyTorchKernel,
) -> Cohort:
    """The chosen rows of the bags as tuning takes them; many are converted batch by batch."""
    sizes = np.bincount(bags.bag_index[rows], minlength=len(bags))
    offsets = np.concatenate([[0], np.cumsum(sizes)])
    adjacency = bags.adjacency[rows][:, rows]
    shape = (len(rows), inducing.shape[1])
    made: Tensor | StoredRows
    if shape[0] * shape[1] <= CONVERTED:
        made = inputs(bags.features[rows])
    else:
        made = StoredRows(bags.features, rows, inputs, shape, inducing.device)
    return Cohort(made, inducing, adjacency, offsets, positive, kernel)


def learn(
    made: Cohort, kernels: tuple[str | GPyTorchKernel, ...], space: Space, budget: int
) -> Learned:
    """Search under every kernel; the best objective wins."""
    searches = [tuning.search(made.with_kernel(kernel), space, budget) for kernel in kernels]
    best = max(searches, key=lambda s: s.best.objective)
    trace = [
        {"kernel": t.kernel, **t.settings._asdict(), "score": t.score, "objective": t.objective}
        for s in searches
        for t in s.trace
    ]
    return Learned(best.cohort.kernel, best.best.settings, best.best.score, trace)
