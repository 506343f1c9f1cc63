"""GlaS, five grades, patients kept together: OrdinalMIL, with slide context, and two networks.

    python benchmarks/grades_glas.py FOLDER/glas_grid.npz --seeds 5

The npz holds X, bag, grade, patient, row, col, y_inst. Quadratic weighted kappa with its interval
over patients, AUC of malignant against benign images, AUC of tiles inside malignant ones. With 11
patients, and grades that go with patients, every figure is rough.
"""

import argparse
import logging
import time
import warnings
from pathlib import Path

import numpy as np
from sklearn.metrics import roc_auc_score
from sklearn.model_selection import StratifiedGroupKFold

import gpmil
from gpmil.metrics import grade_metrics, within_bag_auc
from gpmil.models import OrdinalAttentionMIL, OrdinalMeanPoolMIL

MALIGNANT = 2  # grades from here on


def cohort(path: Path) -> tuple[gpmil.Bags, np.ndarray, np.ndarray]:
    """The bags, the grades and the labels of tiles."""
    z = np.load(path)
    bag = z["bag"]
    offsets = np.concatenate([[0], np.cumsum(np.bincount(bag))])
    coords = np.stack([z["col"], z["row"]], axis=1)
    bags = gpmil.Bags(
        z["X"].astype(np.float32), offsets, coords=coords, step=1, graph="grid4",
        groups=z["patient"].astype(str),
    )  # fmt: skip
    return bags, z["grade"].astype(int), z["y_inst"]


def out_of_fold(make, bags, grades, seed):
    """P(Y = k) of every bag by a model that has not seen its patient; of tiles P(malignant)."""
    p = np.zeros((len(bags), 5))
    tiles = np.full(bags.n_instances, np.nan)
    folds = StratifiedGroupKFold(5, shuffle=True, random_state=seed)
    for train, test in folds.split(grades, grades, bags.groups):
        model = make(seed).fit(bags[train], grades[train])
        p[test] = model.predict_proba(bags[test])
        if isinstance(model, gpmil.OrdinalMIL):
            found = model.predict_instances(bags[test]).grade_probability[:, MALIGNANT:].sum(1)
            tiles[np.isin(bags.bag_index, test)] = found
    return p, tiles


def main() -> None:
    """Every model, every seed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("data", type=Path)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--budget", type=int, default=40)
    parser.add_argument("--models", nargs="+", default=None, help="by default all")
    asked = parser.parse_args()
    logging.getLogger("gpmil").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    bags, grades, known = cohort(asked.data)
    shared = {"grades": [0, 1, 2, 3, 4], "n_components": 64}
    gp = shared | {"tuning_budget": asked.budget}
    models = {
        "OrdinalAttentionMIL": lambda s: OrdinalAttentionMIL(**shared, random_state=s),
        "OrdinalMeanPoolMIL": lambda s: OrdinalMeanPoolMIL(**shared, random_state=s),
        "OrdinalMIL": lambda s: gpmil.OrdinalMIL(**gp, random_state=s),
        "with-context": lambda s: gpmil.OrdinalMIL(**gp, slide_context="auto", random_state=s),
    }
    models = {name: make for name, make in models.items() if name in (asked.models or models)}
    inside = (grades >= MALIGNANT)[bags.bag_index]
    for name, make in models.items():
        for seed in range(asked.seeds):
            start = time.perf_counter()
            p, tiles = out_of_fold(make, bags, grades, seed)
            found = grade_metrics(grades, p, groups=bags.groups)
            words = [f"kappa {found['kappa']}", f"within one {found['within_one']}"]
            errors = [f"{found[f'calibration_error_{k}'].value:.3f}" for k in range(1, 5)]
            words.append(f"calibration {', '.join(errors)}")
            auc = roc_auc_score(grades >= MALIGNANT, p[:, MALIGNANT:].sum(1))
            words += [f"malignant AUC {auc:.3f}", f"log loss {found['log_loss'].value:.3f}"]
            if not np.isnan(tiles).any():
                own = within_bag_auc(known[inside], tiles[inside], bags.bag_index[inside])
                words.append(f"tiles within malignant images AUC {own:.3f}")
            took = time.perf_counter() - start
            print(f"{name}, seed {seed}: {', '.join(words)}; {took:.0f} s", flush=True)


if __name__ == "__main__":
    main()
