"""Is leaving out patients from one fit right, and does it choose well where images are near copies?

    python benchmarks/leave_patients_out.py --data FOLDER [--jobs 2] [--json FILE] [--inducing 60]
        [--studies grid glas simulated]

GlaS (114 images of 11 patients), PCA scores, given settings:

* grid: leave-one-patient-out and leave-one-bag-out against the log loss of five folds that keep
  patients together, over a grid of settings: rank correlations, and the five-fold loss of each
  one's pick;
* glas: leave-one-patient-out of one fit against really refitting without each patient, inducing
  points and features fixed; simulated: the same for 20 patients of three simulated slides.

"One step" is leave-one-patient-out as learning has it: every patient by a single Newton step.
"""

import argparse
import itertools
import json
import math
from pathlib import Path
from unittest import mock

import numpy as np
import torch
from joblib import Parallel, delayed
from real_data import DATA
from scipy.stats import spearmanr
from sklearn.metrics import log_loss

import gpmil
from gpmil.data.folds import folds
from gpmil.inference import leave_groups

COMPONENTS = 64
# variance, length / sqrt d, c / sqrt(1 + variance), lambda, tau
FIVE = (
    (1, 1, -1.5, 0.5, 0.0),
    (9, 2, -1.0, 0.5, 1.0),
    (9, 4, -1.5, 0.0, 1.0),
    (20, 3, -1.5, 1.0, 1.0),
    (50, 4, -0.5, 0.5, 2.0),
)
STUDIES = ("grid", "glas", "simulated")
CRITERIA = ("leave-one-patient-out", "the same, one step", "leave-one-bag-out")
GRID = [
    (variance, length, level, strength, tau)
    for variance, length, level, (strength, tau) in itertools.product(
        (0.3, 4, 50), (1, 3), (-2.5, -0.5), ((0.5, 0.0), (0.5, 1.0), (0.0, 2.0))
    )
]


def glas(folder: Path) -> gpmil.Bags:
    """The images, with their patients."""
    with np.load(folder / "glas" / "glas_grid.npz", allow_pickle=False) as d:
        rows = [np.flatnonzero(d["bag"] == b) for b in range(len(d["y_bag"]))]
        xy = np.stack([d["col"], d["row"]], axis=1)
        return gpmil.Bags.from_arrays(
            [d["X"][r].astype(np.float32) for r in rows],
            labels=d["y_bag"],
            coords=[xy[r] for r in rows],
            step=1,
            names=d["bag_id"].astype(str),
            groups=d["patient"],
        )


def of_three() -> gpmil.Bags:
    """Simulated slides, three of each patient."""
    return gpmil.simulate.cohort(60, seed=1).with_groups(np.arange(60) // 3)


def model_at(values: tuple, n_inducing: int, **others) -> gpmil.VGPMILPRI:
    """A model at given settings."""
    variance, length, level, strength, tau = values
    return gpmil.VGPMILPRI(
        variance=float(variance),
        lengthscale=float(length * np.sqrt(COMPONENTS)),
        mean=float(level * np.sqrt(1 + variance)),
        coupling=float(strength),
        slide_effect=float(tau),
        n_inducing=n_inducing,
        random_state=0,
        **{"n_components": COMPONENTS} | others,
    )


def in_model_space(bags: gpmil.Bags, n_inducing: int) -> tuple[gpmil.Bags, np.ndarray]:
    """The bags with features as the kernel sees them, and inducing points there."""
    first, cpu = model_at(FIVE[0], n_inducing).fit(bags), torch.device("cpu")
    moved = gpmil.Bags(
        first._inputs(bags.features, cpu).numpy(), bags.offsets, labels=bags.labels,
        names=bags.names, groups=bags.groups, adjacency=bags.adjacency,
    )  # fmt: skip
    return moved, first._inputs(first.inducing_points_, cpu).numpy()


def one_step(model: gpmil.VGPMILPRI, bags: gpmil.Bags) -> np.ndarray:
    """Leave-one-patient-out as learning has it."""
    with mock.patch.object(leave_groups, "SMALL", math.inf):
        return model.leave_one_patient_out(bags)


def refits(bags: gpmil.Bags, values: tuple, Z: np.ndarray) -> dict:
    """One fit and its leave-one-patient-out scores, against a fit without each patient."""
    torch.set_num_threads(1)
    fixed = {"inducing": Z, "standardize": False, "n_components": None}
    model = model_at(values, len(Z), **fixed).fit(bags)
    found = {"one fit": model.leave_one_patient_out(bags), "one step": one_step(model, bags)}
    slow = np.empty(len(bags))
    for patient in np.unique(bags.groups):
        own = bags.groups == patient
        again = model_at(values, len(Z), **fixed).fit(bags[~own])
        log_p = again.log_proba_negative(bags[own])[0]
        slow[own] = np.where(bags.labels[own] == 1, np.log(-np.expm1(log_p)), log_p)
    return {"setting": values, "refits": float(slow.mean())} | {
        case: {
            "mean": float(quick.mean()),
            "correlation": float(np.corrcoef(quick, slow)[0, 1]),
            "largest": float(np.abs(quick - slow).max()),
        }
        for case, quick in found.items()
    }


def grid_point(bags: gpmil.Bags, values: tuple, n_inducing: int) -> tuple[float, ...]:
    """What each of `CRITERIA` says, and minus the five-fold log loss."""
    torch.set_num_threads(1)
    model = model_at(values, n_inducing).fit(bags)
    fold, p = folds(bags.labels, bags.groups, 5, 0), np.empty(len(bags))
    for k in range(fold.max() + 1):
        held_out = fold == k
        again = model_at(values, n_inducing).fit(bags[~held_out])
        p[held_out] = again.predict_proba(bags[held_out])[:, 1]
    loss = float(log_loss(bags.labels, np.clip(p, 1e-15, 1 - 1e-15)))
    patients, images = model.leave_one_patient_out(bags), model.leave_one_bag_out(bags)
    return *(float(x.mean()) for x in (patients, one_step(model, bags), images)), -loss


def ranks(found: np.ndarray) -> dict:
    """Of (settings, 4): how the criteria order the settings."""
    *criteria, cv = found.T
    said = dict(zip(CRITERIA, criteria, strict=True))
    picks = {name: float(-cv[scores.argmax()]) for name, scores in said.items()}
    return {
        "settings": len(found),
        "rank correlation with five folds": {
            name: float(spearmanr(scores, cv)[0]) for name, scores in said.items()
        },
        "five-fold loss of the pick": picks | {"best of the grid": float(-cv.max())},
        "points": found.tolist(),
    }


def main() -> None:
    """Print the studies, a line per result."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, default=DATA, help="where the data sets are")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--inducing", type=int, default=60)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--studies", nargs="+", default=STUDIES, choices=STUDIES)
    args = parser.parse_args()
    workers, results = Parallel(n_jobs=args.jobs), {}
    if "grid" in args.studies:
        bags = glas(args.data)
        points = workers(delayed(grid_point)(bags, v, args.inducing) for v in GRID)
        results["ranks"] = ranks(np.array(points))
        print({k: v for k, v in results["ranks"].items() if k != "points"}, flush=True)
    for name in (study for study in args.studies if study != "grid"):
        bags = glas(args.data) if name == "glas" else of_three()
        moved, Z = in_model_space(bags, args.inducing)
        results[name] = workers(delayed(refits)(moved, v, Z) for v in FIVE)
        print(name, *results[name], sep="\n", flush=True)
    if args.json:
        args.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
