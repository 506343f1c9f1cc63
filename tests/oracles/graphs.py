"""Naive twins of gpmil.data.graphs: one bag, double loops, nothing clever."""

import itertools
import math

import numpy as np


def grid(coords, step, diagonal, tolerance=0.15):
    """Adjacency of one bag: offsets of one step along one axis, or any axes with `diagonal`."""
    n, k = coords.shape
    step = np.broadcast_to(step, k)
    adjacency = np.zeros((n, n))
    for i, j in itertools.permutations(range(n), 2):
        steps = 0
        for axis in range(k):
            offset = abs(coords[i, axis] - coords[j, axis]) / step[axis]
            if abs(offset - 1) <= tolerance + 1e-9:
                steps += 1
            elif offset > tolerance + 1e-9:
                steps = math.inf
        adjacency[i, j] = 1 <= steps <= k if diagonal else steps == 1
    return adjacency


def radius(coords, radius):
    """Adjacency of one bag: no farther apart than the radius."""
    n = len(coords)
    adjacency = np.zeros((n, n))
    for i, j in itertools.permutations(range(n), 2):
        adjacency[i, j] = math.dist(coords[i], coords[j]) <= radius * (1 + 1e-9)
    return adjacency


def knn(coords, n_neighbors):
    """Adjacency of one bag: as near as the k-th nearest, for either of the two."""
    n = len(coords)
    adjacency = np.zeros((n, n))
    for i in range(n):
        distance = {j: math.dist(coords[i], coords[j]) for j in range(n) if j != i}
        ranked = sorted(distance.values())
        if not ranked:
            continue
        kth = ranked[min(n_neighbors, len(ranked)) - 1]
        for j, d in distance.items():
            if d <= kth * (1 + 1e-9):
                adjacency[i, j] = adjacency[j, i] = 1
    return adjacency


def chain(coords, step=None):
    """Adjacency of one bag: consecutive along the first coordinate, no gap over 1.5 steps."""
    n = len(coords)
    adjacency = np.zeros((n, n))
    ranked = sorted(range(n), key=lambda i: tuple(coords[i]))
    for a, b in itertools.pairwise(ranked):
        if step is None or coords[b][0] - coords[a][0] <= 1.5 * step * (1 + 1e-9):
            adjacency[a, b] = adjacency[b, a] = 1
    return adjacency


def laplacian(adjacency):
    """C_ii = sum of the weights at i, C_ij = minus the weight between i and j."""
    n = len(adjacency)
    result = np.zeros((n, n))
    for i in range(n):
        for j in range(n):
            result[i, j] = adjacency[i].sum() if i == j else -adjacency[i, j]
    return result


def block_diagonal(blocks):
    """One N x N matrix with a bag's block after the other."""
    n = sum(len(block) for block in blocks)
    result = np.zeros((n, n))
    start = 0
    for block in blocks:
        end = start + len(block)
        result[start:end, start:end] = block
        start = end
    return result
