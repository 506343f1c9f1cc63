"""Cohorts to measure on: `gpmil.simulate` where it is quick enough, else strips of tissue.

A bag of `draw` is a strip of patches a few wide that winds along its slide (a section about as
wide as long where asked for), drawn for all bags at once: a million patches in seconds. Features
are a dozen latent directions with noise, cut at zero as after a ReLU; positive bags hold one run
of patches moved along a common direction.
"""

import math
import os
import shutil
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Bool, Float, Int

from gpmil import simulate
from gpmil.data.bags import Bags

STEP = 1024
LATENT = 12
ROWS = 65_536  # patches drawn at a time


@dataclass(frozen=True)
class Shape:
    """How many bags of how many patches of how many features."""

    n_bags: int
    mean_size: float
    n_features: int
    same_size: bool = False  # else gamma distributed, like the slides of `simulate`
    section: bool = False  # about as wide as long, in place of a strip
    positive: float = 0.72
    dtype: str = "float32"


PANDA = Shape(10_503, 105.5, 128)
DISK = Shape(500, 3_000, 1_024, same_size=True, section=True, positive=0.5, dtype="float16")
TINY = Shape(16, 18.0, 16, positive=0.5)
INDUCING = {"tiny": 16, "sicapv2": 200, "panda": 200}
SIZES = tuple(INDUCING)
TENTH = 0.1


def training(size: str, seed: int = 0) -> Bags:
    """The cohort to fit."""
    if size == "sicapv2":
        return simulate.sicapv2_like(seed=seed)[0]
    return draw(PANDA if size == "panda" else TINY, seed)


def held_out(size: str, seed: int = 0) -> Bags:
    """The cohort to predict: at PANDA size a tenth of it."""
    if size == "sicapv2":
        return simulate.sicapv2_like(seed=seed)[1]
    large = replace(PANDA, n_bags=round(TENTH * PANDA.n_bags))
    return draw(large if size == "panda" else TINY, seed, part=1)


def on_disk(size: str) -> Shape:
    """The cohort that is read from a file."""
    if size == "panda":
        return DISK
    small = {"sicapv2": (50, 300, 1_024), "tiny": (6, 40, 16)}[size]
    return replace(DISK, n_bags=small[0], mean_size=small[1], n_features=small[2])


def draw(shape: Shape, seed: int, part: int = 0, file: Path | None = None) -> Bags:
    """A cohort of this shape; with `file` its features are a memory-mapped .npy file there.

    The same seed gives the same bits. Another part of the same seed has other bags with the same
    appearance. A file that is there already is taken as it is, if its header fits.
    """
    rng = np.random.default_rng((seed, part))
    sizes = _sizes(rng, shape)
    offsets = np.concatenate([[0], np.cumsum(sizes)])
    labels = np.zeros(shape.n_bags, dtype=np.int64)
    labels[rng.permutation(shape.n_bags)[: max(1, round(shape.positive * shape.n_bags))]] = 1
    cells = _cells(rng, sizes, shape.section)
    lesion = _lesions(rng, sizes, labels)
    total = int(offsets[-1]), shape.n_features
    if file is None:
        features = np.empty(total, shape.dtype)
        _fill(features, np.random.default_rng(seed), rng, cells, lesion)
    else:
        if not file.exists():
            _write(file, total, shape.dtype, seed, rng, cells, lesion)
        features = _mapped(file, total, shape.dtype)
    return Bags(features, offsets, labels=labels, coords=cells * STEP, step=STEP, graph="grid4")


def _write(file: Path, total: tuple[int, int], dtype: str, seed: int, *drawn: Any) -> None:
    """Beside and renamed: the file is there whole or not at all."""
    needed, free = math.prod(total) * np.dtype(dtype).itemsize, shutil.disk_usage(file.parent).free
    if needed > free:
        raise ValueError(
            f"{file.name} takes {needed / 1e9:.1f} GB, and {free / 1e9:.1f} GB are free there: "
            "name a folder on another disk."
        )
    fresh = file.with_name(f".{file.name}.new")
    try:
        features = np.lib.format.open_memmap(fresh, "w+", np.dtype(dtype), total)
        _fill(features, np.random.default_rng(seed), *drawn)
        features.flush()
        del features
        os.replace(fresh, file)
    finally:
        fresh.unlink(missing_ok=True)


def _mapped(file: Path, total: tuple[int, int], dtype: str) -> np.ndarray:
    found: Any = np.load(file, mmap_mode="r")
    if found.shape != total or found.dtype != np.dtype(dtype):
        raise ValueError(
            f"{file.name} holds {found.shape} values of {found.dtype}, expected {total} of "
            f"{dtype}: it belongs to another size. Name another folder, or remove the file."
        )
    return found


def _sizes(rng: np.random.Generator, shape: Shape) -> Int[np.ndarray, " B"]:
    if shape.same_size:
        return np.full(shape.n_bags, round(shape.mean_size))
    # the spread of SICAPv2: standard deviation = mean / sqrt(4.4)
    drawn = rng.gamma(4.4, shape.mean_size / 4.4, shape.n_bags).round().astype(np.int64)
    return np.maximum(drawn, min(15, round(shape.mean_size)))


def _cells(
    rng: np.random.Generator, sizes: Int[np.ndarray, " B"], section: bool
) -> Int[np.ndarray, "N 2"]:
    """Column and row of every patch: rows of a few patches, each shifted a little."""
    B, bag = len(sizes), np.repeat(np.arange(len(sizes)), sizes)
    width = np.sqrt(0.8 * sizes).astype(int) if section else rng.integers(2, 6, B)
    within = np.arange(len(bag)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    row, col = within // width[bag], within % width[bag]
    turn, phase = rng.uniform(0.05, 0.3, B)[bag], rng.uniform(0, 6.3, B)[bag]
    bend = np.round(3 * np.sin(turn * row + phase)).astype(np.int64) + 3
    return np.stack([col + bend, row], axis=1)


def _lesions(
    rng: np.random.Generator, sizes: Int[np.ndarray, " B"], labels: Int[np.ndarray, " B"]
) -> Bool[np.ndarray, " N"]:
    """A run of patches in every positive bag, from one of them to half, log-uniform."""
    length = np.exp(rng.uniform(0, np.log(np.maximum(sizes // 2, 2)))).astype(int) * labels
    start = np.floor(rng.random(len(sizes)) * (sizes - length)).astype(int)
    within = np.arange(sizes.sum()) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    first = np.repeat(start, sizes)
    return (within >= first) & (within < first + np.repeat(length, sizes))


def _fill(
    out: np.ndarray,
    shared: np.random.Generator,
    rng: np.random.Generator,
    cells: Int[np.ndarray, "N 2"],
    lesion: Bool[np.ndarray, " N"],
) -> None:
    """relu((waves over the slide + lesion + grain) E + noise), some rows at a time."""
    D = out.shape[1]
    embedding = shared.standard_normal((LATENT, D), dtype=np.float32) / np.float32(LATENT) ** 0.5
    lesion_shift = np.float32(1.5) * shared.choice([-1, 1], LATENT).astype(np.float32)
    frequency = shared.standard_normal((2, LATENT)).astype(np.float32) / 2
    for start in range(0, len(out), ROWS):
        rows = slice(start, min(start + ROWS, len(out)))
        waves = np.sin(cells[rows].astype(np.float32) @ frequency)
        z = waves + rng.standard_normal(waves.shape, dtype=np.float32)
        z += lesion[rows, None] * lesion_shift
        x = z @ embedding
        x += np.float32(0.3) * rng.standard_normal(x.shape, dtype=np.float32)
        np.maximum(x, 0, out=x)
        out[rows] = x


def inducing(bags: Bags, count: int) -> Float[np.ndarray, "M D"]:
    """Inducing points without k-means: instances, evenly spread."""
    return bags.features[:: max(1, bags.n_instances // count)][:count].astype(float)


def start(bags: Bags, seed: int = 0) -> Float[np.ndarray, " N"]:
    """The E[m] that sweeps start from, as the package draws it."""
    return np.random.default_rng(seed).standard_normal(bags.n_instances)
