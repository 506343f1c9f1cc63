"""Fixtures shared by the tests: two small cohorts, and the real data where there is any.

gpmil is imported where it is used: the process that hands out the tests to others needs none of it.
"""

import os
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import typecheck

if TYPE_CHECKING:
    from gpmil import Bags

ROOT = Path(__file__).parents[1]


def pytest_configure(config) -> None:
    """Examples in src, docs and README count as tests, too."""
    config.pluginmanager.register(typecheck.checks)


@pytest.fixture(scope="session")
def slides() -> dict[str, list]:
    """What `cohort` was built from; copy before changing a part of it."""
    from synthetic import small_slides

    return small_slides(n_bags=22, n_features=4, seed=14)


@pytest.fixture(scope="session")
def cohort(slides) -> "Bags":
    """22 slides of 4 to 8 patches with 4 features, on a grid of step 256; 15 patients."""
    from gpmil import Bags

    return Bags.from_arrays(**slides, step=256, metadata={"encoder": "toy-v1"})


@pytest.fixture(scope="session")
def plain(slides) -> "Bags":
    """The bags of `cohort` without positions or edges."""
    from gpmil import Bags

    return Bags.from_arrays(slides["arrays"], slides["labels"], names=slides["names"])


@pytest.fixture(scope="session")
def data_dir() -> Path:
    """The folder with the real data; skips where there is none."""
    places = [Path(os.environ["GPMIL_DATA"])] if os.environ.get("GPMIL_DATA") else []
    for place in [*places, ROOT.parent / "shared" / "data"]:
        if place.is_dir():
            return place
    pytest.skip("no real data: neither GPMIL_DATA nor ../shared/data is a folder")
