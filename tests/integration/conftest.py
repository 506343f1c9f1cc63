"""The two image cohorts, read once; tests that use them skip where the data is absent."""

import numpy as np
import pytest

import gpmil


def read_npz(path, step):
    """Bags sorted by name, positions x, y."""
    with np.load(path, allow_pickle=False) as d:
        order = np.argsort(d["bag_id"].astype(str))
        rows = [np.flatnonzero(d["bag"] == b) for b in order]
        xy = np.stack([d["x"], d["y"]], axis=1)
        return gpmil.Bags.from_arrays(
            [d["X"][r] for r in rows],
            labels=d["y_bag"][order],
            coords=[xy[r] for r in rows],
            step=step,
            names=d["bag_id"][order].astype(str),
            instance_labels=[d["y_inst"][r] for r in rows],
        )


@pytest.fixture(scope="session")
def sicapv2(data_dir):
    return read_npz(data_dir / "sicapv2_split3" / "sicapv2_split3.npz", 1024)


@pytest.fixture(scope="session")
def colon(data_dir):
    return read_npz(data_dir / "crchisto_colon" / "crchisto_colon_grid.npz", 50)
