"""From raw features to the space the kernel sees: standardised columns, or PCA scores.

`variance`, `lengthscale` and `mean` of a model live in that space. Statistics are float64 sums
over chunks of rows, so float16 features and memory-mapped files need no copy; they are taken
about the first chunk's mean, so that one pass is enough and little cancels.
"""

import functools
import logging
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Int, Num
from torch import Tensor

from gpmil.fast import compiled
from gpmil.fast.lanes import in_lanes
from gpmil.fast.memory import free_memory

logger = logging.getLogger("gpmil")
ROWS = 1024  # rows converted to float64 at a time: they are still in the cache for the next step
GPU_ROWS = 2**18  # and on a GPU
GPU_SHARE = 0.4  # of its free memory that features may take to stay there
LOADED = 2**29  # bytes of features in a file up to which a fit loads them, and reads them once
LOADED_SHARE = 0.1  # of the free memory that they may take then

Rows = np.ndarray | Tensor  # (N, D) features where they lie: in memory, in a file, on a GPU


@dataclass(frozen=True)
class FeatureMap:
    """x -> (x - mean) / scale, or (x - mean) components' / scale."""

    mean: Float[np.ndarray, " D"]
    scale: Float[np.ndarray, " s"]
    components: Float[np.ndarray, "d D"] | None = None

    def __call__(self, x: Rows, device: str | torch.device = "cpu") -> Float[Tensor, "n d"]:
        """Rows of raw features as float64 kernel inputs."""
        return self.on(device)(x)

    def on(self, device: str | torch.device) -> "PlacedMap":
        """The same for many rows that come one after the other."""
        mean, scale = (torch.from_numpy(a).to(device) for a in (self.mean, self.scale))
        if self.components is None:
            return PlacedMap(mean, scale)
        return PlacedMap(mean, scale, torch.from_numpy(self.components).to(device))

    def inverse(self, z: Float[np.ndarray, "n d"]) -> Float[np.ndarray, "n D"]:
        """Raw features that map to z (for PCA the one in the plane of the components)."""
        scores = z * self.scale
        return self.mean + (scores if self.components is None else scores @ self.components)


class PlacedMap(NamedTuple):
    """A feature map on a device."""

    mean: Float[Tensor, " D"]
    scale: Float[Tensor, " s"]
    components: Float[Tensor, "d D"] | None = None

    def __call__(self, x: Rows) -> Float[Tensor, "n d"]:
        """Rows of raw features as float64 kernel inputs."""
        if isinstance(x, np.ndarray):
            x = torch.from_numpy(np.ascontiguousarray(x) if x.flags.writeable else np.array(x))
        if self.components is not None:
            z = x.to(self.mean.device, torch.float64, copy=True).sub_(self.mean)
            return (z @ self.components.mT).div_(self.scale)
        out = torch.empty(x.shape, dtype=torch.float64, device=self.mean.device)
        some = ROWS if not out.is_cuda else max(len(x), 1)
        for rows, own in zip(x.split(some), out.split(some)):
            own.copy_(rows).sub_(self.mean).div_(self.scale)
        return out


def on_device(features: Num[np.ndarray, "N D"], device: torch.device) -> Rows:
    """The features themselves, or a copy of them in their own dtype on the GPU if there is room.

    A small file is loaded: a fit goes through its features four times (statistics, k-means, the
    first pass, novelty), of a large file twice and through two samples.
    """
    if device.type != "cuda" and isinstance(features, np.memmap):
        room = free_memory(device)
        most = LOADED if room is None else min(LOADED, LOADED_SHARE * room)
        return np.array(features) if features.nbytes <= most else features
    if device.type != "cuda" or features.nbytes > GPU_SHARE * torch.cuda.mem_get_info(device)[0]:
        return features
    with warnings.catch_warnings():  # the array may be read-only; nothing writes to it here
        warnings.filterwarnings("ignore", message="The given NumPy array is not writ")
        return torch.cat(
            [
                torch.from_numpy(np.ascontiguousarray(features[s : s + GPU_ROWS])).to(device)
                for s in range(0, len(features), GPU_ROWS)
            ]
        )


def take(features: Rows, rows: Int[Tensor, " n"]) -> Rows:
    """Some of the rows, from where they lie."""
    if isinstance(features, np.ndarray):
        return features[rows.cpu().numpy()]
    return features[rows]


def fitted(features: Rows, n_components: int | None, standardize: bool) -> FeatureMap:
    """What the settings of a model ask for: PCA scores, standardised columns, or neither."""
    if n_components is not None:
        return pca(features, n_components)
    return standardizer(features) if standardize else identity(features.shape[1])


def identity(n_features: int) -> FeatureMap:
    """Features as they are."""
    return FeatureMap(np.zeros(n_features), np.ones(n_features))


class Sums(NamedTuple):
    """Sums over rows x, about a given point: what partitions of a cohort add up."""

    size: float
    first: Float[Tensor, " D"]  # sum of (x - about)
    second: Tensor  # sum of (x - about)^2, (D,), or of the outer products, (D, D)


def sums(features: Rows, about: Float[Tensor, " D"], outer: bool) -> Sums:
    """The sums of all rows, chunk by chunk."""

    def one_lane(starts: Sequence[int]) -> Sums:
        return functools.reduce(add, (_sums(features, s, about, outer) for s in starts))

    starts = range(0, len(features), _block(features))
    return in_lanes(starts, one_lane, add, isinstance(features, np.ndarray) and len(starts) > 4)


def _sums(features: Rows, start: int, about: Tensor, outer: bool) -> Sums:
    loop = None if outer else compiled.columns()
    if loop is not None and isinstance(features, np.ndarray):
        kind = np.float64 if features.itemsize > 4 else np.float32  # half as wide: not compiled
        rows = np.ascontiguousarray(features[start : start + ROWS], kind).view()
        rows.flags.writeable = False  # those of bags are: one type of array, compiled once
        return Sums(len(rows), *(torch.from_numpy(x) for x in loop.sums(rows, about.numpy())))
    x = _rows(features, start) - about  # in torch's own memory: BLAS rounds by how it is aligned
    return Sums(len(x), x.sum(0), x.mT @ x if outer else x.square_().sum(0))


def add(a: Sums, b: Sums) -> Sums:
    """The sums of both."""
    return Sums(a.size + b.size, a.first + b.first, a.second + b.second)


def start(features: Rows) -> Float[Tensor, " D"]:
    """A point about which sums lose little: the mean of the first rows."""
    return _rows(features, 0)[:ROWS].mean(0)


def standardizer(features: Rows) -> FeatureMap:
    """Zero mean and unit variance column by column; a constant column keeps scale 1."""
    about = start(features)
    return standardizer_from(sums(features, about, outer=False), about)


def standardizer_from(found: Sums, about: Float[Tensor, " D"]) -> FeatureMap:
    """The same from sums about a point."""
    shift = found.first / found.size
    mean = (about + shift).cpu()
    # var = E (x - a)^2 - (mean - a)^2
    scale = (found.second / found.size - shift.square()).clamp(min=0).sqrt().cpu()
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


def pca(features: Rows, n_components: int) -> FeatureMap:
    """Scores on the leading components, divided by one number: their overall deviation.

    Scaling the scores column by column would blow up the noise of the last ones.
    """
    largest = min(features.shape)
    if not 1 <= n_components <= largest:
        raise ValueError(
            f"n_components must be between 1 and {largest} (the smaller of {features.shape[0]} "
            f"instances and {features.shape[1]} features), got {n_components}."
        )
    about = start(features)
    return pca_from(sums(features, about, outer=True), about, n_components)


def pca_from(found: Sums, about: Float[Tensor, " D"], n_components: int) -> FeatureMap:
    """The same from sums about a point."""
    shift = found.first / found.size
    # cov = E (x - a)(x - a)' - (mean - a)(mean - a)'
    covariance = (found.second / found.size - torch.outer(shift, shift)).cpu()
    values, vectors = torch.linalg.eigh(covariance)
    leading = values.flip(0)[:n_components].clamp(min=0)
    scale = leading.mean().sqrt()
    if not scale > 0:
        raise ValueError("PCA of constant features: all instances are equal.")
    components = vectors.flip(1)[:, :n_components].mT.contiguous()
    mean = (about + shift).cpu()
    return FeatureMap(mean.numpy(), scale.reshape(1).numpy(), components.numpy())


def _block(features: Rows) -> int:
    return ROWS if isinstance(features, np.ndarray) else GPU_ROWS


def _rows(features: Rows, start: int) -> Float[Tensor, "n D"]:
    """Some rows as a float64 tensor of their own."""
    rows = features[start : start + _block(features)]
    if isinstance(rows, np.ndarray):
        return torch.from_numpy(rows.astype(np.float64))
    return rows.to(torch.float64, copy=True)
