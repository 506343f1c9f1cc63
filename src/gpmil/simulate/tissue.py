"""The tissue of a slide: curved cores of patches on a lattice, and lesions that grow in them."""

import math

import numpy as np
from jaxtyping import Bool, Float, Int
from numpy.random import Generator
from scipy.sparse import csr_matrix
from scipy.sparse.csgraph import connected_components, dijkstra
from scipy.spatial import KDTree

from gpmil.simulate.settings import Settings

Cells = Int[np.ndarray, "n 2"]  # row and column of every patch on the lattice

_SMALLEST_CORE = 5  # patches; fewer would be a crumb, not a core
_LONGEST_CORE = 70  # patches of 256 microns: a biopsy core is not longer than about 18 mm
_GAP = 2  # free lattice rows between two cores: no contact, even with a core off the lattice


def smooth_fields(
    rng: Generator, at: np.ndarray, length: float, count: int
) -> Float[np.ndarray, "n count"]:
    """Independent smooth Gaussian fields of unit variance at the given positions (n, 2).

    Covariance exp(-r^2 / 2 length^2), by 64 random frequencies: no canvas, hence no borders.
    """
    frequencies = rng.standard_normal((2, 64)) / length
    phase = at @ frequencies
    waves = np.concatenate([np.cos(phase), np.sin(phase)], axis=1)
    return waves @ rng.standard_normal((128, count)) / 8.0


def _centreline(rng: Generator, length: float) -> Float[np.ndarray, "points 2"]:
    """A gently bending line of the given length, in patches, with a point every half patch."""
    along = np.arange(0.0, max(length, 0.5), 0.5)
    turns = rng.uniform(0.3, 1.0) * along / along.size * 2 + rng.random()
    heading = rng.uniform(0, np.pi) + 0.7 * rng.standard_normal() * np.sin(2 * np.pi * turns)
    return 0.5 * np.cumsum(np.stack([np.sin(heading), np.cos(heading)], axis=1), axis=0)


def _carve_hole(
    rng: Generator,
    cells: Float[np.ndarray, "cells 2"],
    line: Float[np.ndarray, "points 2"],
    cost: Float[np.ndarray, " cells"],
) -> None:
    """Change `cost` for a hole of one to nine cells on the line, with a wall of tissue round it."""
    centre = np.round(line[rng.integers(len(line) // 4, 3 * len(line) // 4 + 1)])
    reach = np.linalg.norm(cells - centre, axis=1) - rng.choice([0.0, 1.0, 1.5])
    cost[reach < 1.5] = -np.inf
    cost[reach <= 0.0] = np.inf


def _core(rng: Generator, n: int, settings: Settings) -> Int[np.ndarray, "n 2"]:
    """The n lattice cells (row, col) of one core: the cheapest by distance to a line + noise."""
    width = settings.core_width * np.exp(0.15 * rng.standard_normal())
    line = _centreline(rng, n / width - 1)
    # Twice the width leaves room for every outline; farther cells are not looked at.
    reach = width + 1
    low, high = np.floor(line.min(0) - reach), np.ceil(line.max(0) + reach)
    cells = np.indices((high - low + 1).astype(int)).reshape(2, -1).T + low
    cost, _ = KDTree(line).query(cells, distance_upper_bound=reach)
    cells, cost = cells[cost < np.inf], cost[cost < np.inf]
    cost += settings.ragged * smooth_fields(rng, cells, 1.5, 1)[:, 0]
    if rng.random() < settings.holes and n >= 8 * _SMALLEST_CORE:
        _carve_hole(rng, cells, line, cost)
    chosen = np.sort(np.argpartition(cost, n - 1)[:n])
    return (cells[chosen] - cells[chosen].min(0)).astype(np.int64)


def _core_sizes(rng: Generator, settings: Settings) -> Int[np.ndarray, " cores"]:
    """Patches of every core of a slide; their sum is the slide's size."""
    scale = settings.mean_size / settings.size_shape
    n = max(settings.min_size, round(rng.gamma(settings.size_shape, scale)))
    cores = 1 + int(rng.choice(len(settings.core_counts), p=settings.core_counts))
    cores = max(cores, math.ceil(n / (_LONGEST_CORE * settings.core_width)))
    cores = max(1, min(cores, n // (2 * _SMALLEST_CORE)))
    least = min(n // cores, _SMALLEST_CORE)
    return least + rng.multinomial(n - cores * least, rng.dirichlet(np.full(cores, 3.0)))


def lay_tissue(rng: Generator, settings: Settings) -> tuple[Cells, Int[np.ndarray, "n 2"]]:
    """Lattice cells (row, col) of a slide and the patches' corners (x, y) in pixels."""
    cores = [_core(rng, int(n), settings) for n in _core_sizes(rng, settings)]
    stack, top = int(rng.integers(2)), 0  # the cores lie below or beside one another
    for core in cores:
        core[:, stack] += top
        core[:, 1 - stack] += rng.integers(12)
        top = core[:, stack].max() + 1 + _GAP + rng.integers(8)
    cells = np.concatenate(cores)
    corners = cells[:, ::-1] * settings.step + rng.integers(0, 100 * settings.step, 2)
    if len(cores) > 1 and rng.random() < settings.off_lattice:
        # Between a quarter and three quarters of a step: no patch overlaps, none is contiguous.
        shift = rng.integers(settings.step // 4, 3 * settings.step // 4 + 1, 2)
        corners[-len(cores[-1]) :] += shift
    return cells, corners


def neighbours(cells: Cells) -> Int[np.ndarray, "edges 2"]:
    """Pairs of cells that share a side, each pair once."""
    index = np.full(cells.max(0) + 2, -1)
    index[tuple(cells.T)] = np.arange(len(cells))
    below, beside = (index[tuple((cells + offset).T)] for offset in ([1, 0], [0, 1]))
    pairs = np.stack([np.tile(np.arange(len(cells)), 2), np.concatenate([below, beside])], axis=1)
    return pairs[pairs[:, 1] >= 0]


def _grow(
    rng: Generator, edges: Int[np.ndarray, "edges 2"], n: int, size: int
) -> Bool[np.ndarray, " n"]:
    """A connected region of `size` of the n cells (fewer where no piece holds so many).

    Growth from a random cell with exponential waiting times across every side: the cells that
    are reached first. Each is reached through an earlier one, so the region is connected.
    """
    waiting = rng.exponential(size=len(edges))
    graph = csr_matrix((waiting, edges.T), shape=(n, n))
    piece = connected_components(graph, directed=False)[1]
    room = np.minimum(np.bincount(piece)[piece], size)
    start = rng.choice(np.flatnonzero(room == room.max()))
    reached = dijkstra(graph, directed=False, indices=start)
    region = np.zeros(n, dtype=bool)
    region[np.argsort(reached)[: room.max()]] = True
    return region


def grow_lesions(rng: Generator, cells: Cells, settings: Settings) -> Bool[np.ndarray, " n"]:
    """Which cells are malignant: one or two lesions, log-uniform size, `min_lesion` at least."""
    n, edges = len(cells), neighbours(cells)
    largest = max(1, int(settings.max_lesion * n))
    smallest = min(settings.min_lesion, largest)
    size = min(largest, int(np.exp(rng.uniform(np.log(smallest), np.log(largest + 1)))))
    if size == 1 or rng.random() >= settings.second_lesion:
        return _grow(rng, edges, n, size)
    first = int(rng.integers(1, size))
    return _grow(rng, edges, n, first) | _grow(rng, edges, n, size - first)
