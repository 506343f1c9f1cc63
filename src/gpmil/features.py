"""From raw features to the space the kernel sees: standardised columns, or PCA scores.

`variance`, `lengthscale` and `mean` of a model live in that space. Statistics are float64 sums
over chunks of rows, so float16 features and memory-mapped files need no copy.
"""

import functools
import logging
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float, Num
from torch import Tensor

logger = logging.getLogger("gpmil")
ROWS = 8192  # rows converted to float64 at a time


@dataclass(frozen=True)
class FeatureMap:
    """x -> (x - mean) / scale, or (x - mean) components' / scale."""

    mean: Float[np.ndarray, " D"]
    scale: Float[np.ndarray, " s"]
    components: Float[np.ndarray, "d D"] | None = None

    def __call__(
        self, x: Num[np.ndarray, "n D"], device: str | torch.device = "cpu"
    ) -> Float[Tensor, "n d"]:
        """Rows of raw features as float64 kernel inputs."""
        z = torch.from_numpy(np.array(x, dtype=np.float64)).to(device)
        mean, scale = (torch.from_numpy(a).to(device) for a in (self.mean, self.scale))
        if self.components is None:
            return (z - mean) / scale
        return (z - mean) @ torch.from_numpy(self.components).to(device).mT / scale

    def inverse(self, z: Float[np.ndarray, "n d"]) -> Float[np.ndarray, "n D"]:
        """Raw features that map to z (for PCA the one in the plane of the components)."""
        scores = z * self.scale
        return self.mean + (scores if self.components is None else scores @ self.components)


def fitted(
    features: Num[np.ndarray, "N D"], n_components: int | None, standardize: bool
) -> FeatureMap:
    """What the settings of a model ask for: PCA scores, standardised columns, or neither."""
    if n_components is not None:
        return pca(features, n_components)
    return standardizer(features) if standardize else identity(features.shape[1])


def identity(n_features: int) -> FeatureMap:
    """Features as they are."""
    return FeatureMap(np.zeros(n_features), np.ones(n_features))


def standardizer(features: Num[np.ndarray, "N D"]) -> FeatureMap:
    """Zero mean and unit variance column by column; a constant column keeps scale 1."""
    mean = _mean(features)
    square = _total((x - mean).square().sum(0) for x in _chunks(features))
    scale = (square / len(features)).sqrt()
    if not torch.isfinite(scale).all():
        raise ValueError(
            "features are too large to standardise: their squares overflow (values beyond 1e150). "
            "Divide them by a constant first."
        )
    # a column is constant when its spread is rounding of its level
    constant = scale <= 1e-12 * mean.abs().clamp(min=torch.finfo(torch.float64).tiny)
    if constant.any():
        logger.warning(
            "%d of %d feature columns are constant (the first is column %d): they keep scale 1 "
            "and carry no information.",
            int(constant.sum()),
            len(constant),
            int(constant.nonzero()[0]),
        )
    return FeatureMap(mean.numpy(), torch.where(constant, 1.0, scale).numpy())


def pca(features: Num[np.ndarray, "N D"], n_components: int) -> FeatureMap:
    """Scores on the leading components, divided by one number: their overall deviation.

    Scaling the scores column by column would blow up the noise of the last ones.
    """
    largest = min(features.shape)
    if not 1 <= n_components <= largest:
        raise ValueError(
            f"n_components must be between 1 and {largest} (the smaller of {features.shape[0]} "
            f"instances and {features.shape[1]} features), got {n_components}."
        )
    mean = _mean(features)
    scatter = _total((x - mean).mT @ (x - mean) for x in _chunks(features))
    values, vectors = torch.linalg.eigh(scatter / len(features))
    leading = values.flip(0)[:n_components].clamp(min=0)
    scale = leading.mean().sqrt()
    if not scale > 0:
        raise ValueError("PCA of constant features: all instances are equal.")
    components = vectors.flip(1)[:, :n_components].mT.contiguous()
    return FeatureMap(mean.numpy(), scale.reshape(1).numpy(), components.numpy())


def _mean(features: np.ndarray) -> Tensor:
    return _total(x.sum(0) for x in _chunks(features)) / len(features)


def _total(pieces: Iterator[Tensor]) -> Tensor:
    return functools.reduce(torch.add, pieces)


def _chunks(features: np.ndarray) -> Iterator[Tensor]:
    for start in range(0, len(features), ROWS):
        yield torch.from_numpy(features[start : start + ROWS].astype(np.float64))
