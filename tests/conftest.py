"""Fixtures shared by the tests: two small cohorts, and the real data where there is any."""

import os
from pathlib import Path

import numpy as np
import pytest

from gpmil import Bags

ROOT = Path(__file__).parents[1]


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


@pytest.fixture(scope="session")
def slides() -> dict[str, list]:
    """What `cohort` was built from; copy before changing a part of it."""
    return small_slides(n_bags=22, n_features=4, seed=14)


@pytest.fixture(scope="session")
def cohort(slides) -> Bags:
    """22 slides of 4 to 8 patches with 4 features, on a grid of step 256; 15 patients."""
    return Bags.from_arrays(**slides, step=256, metadata={"encoder": "toy-v1"})


@pytest.fixture(scope="session")
def plain(slides) -> Bags:
    """The bags of `cohort` without positions or edges."""
    return Bags.from_arrays(slides["arrays"], slides["labels"], names=slides["names"])


@pytest.fixture(scope="session")
def data_dir() -> Path:
    """The folder with the real data; skips where there is none."""
    places = [Path(os.environ["GPMIL_DATA"])] if os.environ.get("GPMIL_DATA") else []
    for place in [*places, ROOT.parent / "shared" / "data"]:
        if place.is_dir():
            return place
    pytest.skip("no real data: neither GPMIL_DATA nor ../shared/data is a folder")
