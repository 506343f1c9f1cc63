"""The real data sets that benchmarks use, where `../shared/data` or GPMIL_DATA has them."""

import os
from pathlib import Path

import numpy as np

import gpmil

DATA = Path(os.environ.get("GPMIL_DATA", Path(__file__).parents[1] / "../shared/data"))
SETS = {
    "colon": ("crchisto_colon/crchisto_colon_grid.npz", 50, {"n_components": 64}),
    "sicapv2": ("sicapv2_split3/sicapv2_split3.npz", 1024, {"flags": True}),
    "musk1": ("musk1/musk1.npz", None, {}),
    "elephant": ("elephant/elephant.npz", None, {}),
    "glas": ("glas/glas_grid.npz", 1, {"n_components": 64}),
}


def read(folder, name):
    """Bags sorted by name."""
    path, step, _ = SETS[name]
    with np.load(folder / path, allow_pickle=False) as d:
        order = np.argsort(d["bag_id"].astype(str))
        rows = [np.flatnonzero(d["bag"] == b) for b in order]
        place = {}
        if step is not None:
            x, y = ("x", "y") if "x" in d else ("col", "row")
            xy = np.stack([d[x], d[y]], axis=1).astype(float)
            place = {"coords": [xy[r] for r in rows], "step": step}
            place["instance_labels"] = [d["y_inst"][r] for r in rows]
        if "patient" in d:
            place["groups"] = d["patient"][order]
        return gpmil.Bags.from_arrays(
            [d["X"][r] for r in rows],
            labels=d["y_bag"][order],
            names=d["bag_id"][order].astype(str),
            **place,
        )
