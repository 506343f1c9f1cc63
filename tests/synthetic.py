"""Small cohorts for tests: irregular slides on a lattice with known labels."""

import numpy as np
import torch

from gpmil.data.bags import Bags
from gpmil.inference import solvers as inference
from gpmil.models import VGPMILPR, VGPMILPRI

CPU = torch.device("cpu")

# Settings that are not learned, for tests of what does not depend on them.
GIVEN = {"variance": 1.0, "lengthscale": "sqrt_dim", "mean": 0.0}


def numbers_for(model_class):
    """A number for every setting of the model that would be learned otherwise."""
    return GIVEN | ({"coupling": 0.5} if model_class is VGPMILPRI else {})


def pri(**settings):
    """VGPMIL-PR-I with every setting a number."""
    return VGPMILPRI(**(GIVEN | {"coupling": 0.5} | settings))


def pr(**settings):
    """VGPMIL-PR with every setting a number."""
    return VGPMILPR(**(GIVEN | settings))


def slide_coords(rng, n, step=7.0):
    """n cells of a random walk's neighbourhood: connected, irregular, with holes."""
    cells, at = [(0, 0)], (0, 0)
    while len(cells) < n:
        dx, dy = [(1, 0), (-1, 0), (0, 1), (0, -1)][rng.integers(4)]
        at = (at[0] + dx, at[1] + dy)
        if at not in cells:
            cells.append(at)
    return np.array(cells, dtype=float) * step + rng.integers(50, size=2)


def small_cohort(seed=0, n_bags=14, n_features=4, sizes=(1, 18), shift=1.5, step=7.0):
    """Bags with geometry; in odd bags some connected patches are shifted."""
    rng = np.random.default_rng(seed)
    arrays, coords, labels, truth = [], [], [], []
    for b in range(n_bags):
        n = int(rng.integers(*sizes, endpoint=True))
        xy = slide_coords(rng, n, step)
        h = np.zeros(n, dtype=int)
        if b % 2:
            h[: max(1, n // 3)] = 1
        arrays.append(
            rng.normal(size=(n, n_features)) * [1, 2, 0.5, 1.3][:n_features] + shift * h[:, None]
        )
        coords.append(xy)
        labels.append(b % 2)
        truth.append(h)
    return Bags.from_arrays(arrays, labels=labels, coords=coords, step=step, instance_labels=truth)


def standardised(bags):
    """Features as a model with standardize=True sees them, bag by bag."""
    x = bags.features.astype(float)
    return bags.split((x - x.mean(0)) / x.std(0))


def dense_graphs(bags):
    """Adjacency of each bag as a dense array."""
    return [np.asarray(bag.adjacency.todense()) for bag in bags]


def some_inducing(bags, m, seed=3):
    """m perturbed instances, in raw feature space."""
    rng = np.random.default_rng(seed)
    rows = rng.choice(bags.n_instances, m, replace=False)
    return bags.features[rows] + 0.1 * rng.normal(size=(m, bags.n_features))


def small_slides(n_bags: int, n_features: int, seed: int) -> dict[str, list]:
    """Arguments of `Bags.from_arrays`: irregular tissue on a grid, connected lesions, patients."""
    rng = np.random.default_rng(seed)
    lattice = np.argwhere(np.ones((4, 3), dtype=bool))
    arrays, coords, truth, labels = [], [], [], []
    for b in range(n_bags):
        label = int(rng.random() < 0.5) if b > 1 else b
        n = int(rng.integers(4, 9))
        cells = np.delete(lattice, rng.choice(12, 12 - n, replace=False), axis=0)
        # the upper rows: a lesion whose cells lie together
        lesion = label * (np.arange(n) < rng.integers(2, n))
        shift = np.linspace(2.1, -0.8, n_features)
        arrays.append(rng.normal(size=(n, n_features)) + lesion[:, None] * shift)
        coords.append(cells * 256 + rng.integers(0, 9_000, 2))
        truth.append(lesion)
        labels.append(label)
    return {
        "arrays": arrays,
        "labels": labels,
        "coords": coords,
        "instance_labels": truth,
        "names": [f"slide{b:02d}" for b in range(n_bags)],
        "groups": [f"patient{(2 * b) // 3}" for b in range(n_bags)],
    }


def problem_of(bags, Z, strength, variance=1.0, lengthscale=2.0, c=0.0, dtype=torch.float64):
    """The cohort as solvers see it, its kernel inputs standardised."""
    model = pri(
        coupling=strength,
        variance=variance,
        lengthscale=lengthscale,
        mean=c,
        inducing=Z,
        solver="sweeps",
        max_iter=1,
    ).fit(bags)
    return inference.prepare(
        model._gp(CPU),
        lambda rows: model._inputs(bags.features[rows], CPU),
        bags.adjacency,
        bags.offsets,
        bags.labels == 1,
        strength,
        c,
        dtype,
    )


def dense_pieces(problem):
    """H, sigma and label of every bag of a problem that is one piece."""
    (piece,) = problem.chunks
    cuts = piece.group.offsets[1:-1].tolist()
    H, sigma = (np.split(x.numpy(), cuts) for x in (piece.H, piece.group.sigma))
    return list(zip(H, sigma, piece.group.positive.tolist()))
