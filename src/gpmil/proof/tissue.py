"""Square slides with a known truth, in which one assumption after the other can be broken."""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Int
from scipy.spatial.distance import cdist

from gpmil import simulate
from gpmil.data.bags import Bags

D = 8  # features


@dataclass(frozen=True)
class Tissue:
    """Square slides; every second one holds a round lesion."""

    side: int = 6  # patches
    shift: float = 3.0  # of lesion patches, in standard deviations of a patch
    smallest: float = 0.3  # share of a positive slide that is lesion
    largest: float = 0.9
    field_effect: float = 0.0  # share of the shift that benign patches beside a lesion get
    correlation: float = 0.0  # of the patches of a slide, or of a patient
    per_patient: int = 1  # slides, all of one label


def draw(n_bags: int, seed: tuple[int, ...], tissue: Tissue) -> Bags:
    """Features N(0, I), correlated within slides or patients, + shift where there is a lesion."""
    rng, t = np.random.default_rng(seed), tissue
    cells = np.argwhere(np.ones((t.side, t.side), dtype=bool))
    patient = np.arange(n_bags) // t.per_patient
    labels = patient % 2
    common = rng.standard_normal((patient[-1] + 1, D))[patient]
    truth = [lesion(rng, cells, t) & (y == 1) for y in labels]
    arrays = []
    for h, z in zip(truth, common):
        own = rng.standard_normal((len(cells), D))
        moved = t.shift * (h + t.field_effect * touching(cells, h))
        x = np.sqrt(t.correlation) * z + np.sqrt(1 - t.correlation) * own
        arrays.append(x + moved[:, None] / np.sqrt(D))
    return Bags.from_arrays(
        arrays,
        labels=labels,
        coords=[cells] * n_bags,
        step=1,
        graph="grid4",
        groups=[str(p) for p in patient] if t.per_patient > 1 else None,
        instance_labels=[h.astype(int) for h in truth],
    )


def lesion(
    rng: np.random.Generator, cells: Int[np.ndarray, "n 2"], tissue: Tissue
) -> Bool[np.ndarray, " n"]:
    """The cells nearest to a random point."""
    size = max(1, round(rng.uniform(tissue.smallest, tissue.largest) * len(cells)))
    distance = np.linalg.norm(cells - rng.uniform(0, tissue.side - 1, 2), axis=1)
    return np.argsort(np.argsort(distance, kind="stable"), kind="stable") < size


def touching(cells: Int[np.ndarray, "n 2"], h: Bool[np.ndarray, " n"]) -> Bool[np.ndarray, " n"]:
    """Benign cells that share a side with a lesion."""
    return ~h & (cdist(cells, cells[h], "cityblock") == 1).any(1)


def biopsies(n_bags: int, seed: tuple[int, ...], field_effect: float) -> Bags:
    """Needle cores of `gpmil.simulate`: types of tissue, stain, texture, ragged outlines."""
    return simulate.cohort(
        n_bags,
        n_features=D,
        n_latent=D,
        seed=seed[0],
        part=seed[1],
        mean_size=36,
        separation=6.0,
        field_effect=field_effect,
    )


def without_groups(bags: Bags) -> Bags:
    """The same slides, patients not told."""
    return Bags.from_arrays(
        bags.split(bags.features),
        labels=bags.labels,
        coords=bags.split(bags.coords),
        step=1,
        graph="grid4",
    )
