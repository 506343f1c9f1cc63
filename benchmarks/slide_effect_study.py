"""Slides and maps with and without a slide effect: out-of-fold figures, every setting learned.

    python benchmarks/slide_effect_study.py --data ../shared/data --seeds 0 1 2 3 4 --jobs 2

Five folds per fold seed, everything learned inside the folds. Per cohort and effect, the mean over
fold seeds of: slide AUC and log loss, patch AUC, share of malignant patches above .5 and precision
there, and the tau of the folds.
"""

import argparse
import os
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import numpy as np
from sklearn.metrics import log_loss, roc_auc_score
from sklearn.model_selection import StratifiedKFold
from threadpoolctl import threadpool_limits

import gpmil

EFFECTS = (0.0, "auto")


def sicapv2(data: Path) -> gpmil.Bags:
    """The subset of SICAPv2."""
    return from_npz(data / "sicapv2_split3" / "sicapv2_split3.npz", 1024)


def colon(data: Path) -> gpmil.Bags:
    """Colon images cut into tiles."""
    return from_npz(data / "crchisto_colon" / "crchisto_colon_grid.npz", 50)


def simulated(data: Path) -> gpmil.Bags:
    """120 simulated slides."""
    return gpmil.simulate.cohort(n_bags=120, seed=0)


def from_npz(path: Path, step: float) -> gpmil.Bags:
    """Bags of the arrays bag, bag_id, X, x, y, y_bag, y_inst."""
    with np.load(path, allow_pickle=False) as d:
        rows = [np.flatnonzero(d["bag"] == b) for b in range(len(d["bag_id"]))]
        xy = np.stack([d["x"], d["y"]], axis=1)
        return gpmil.Bags.from_arrays(
            [d["X"][r] for r in rows],
            labels=d["y_bag"],
            coords=[xy[r] for r in rows],
            step=step,
            names=d["bag_id"].astype(str),
            instance_labels=[d["y_inst"][r] for r in rows],
        )


COHORTS = {
    "sicapv2": (sicapv2, {}),
    "colon": (colon, {"n_components": 64}),
    "simulated": (simulated, {}),
}


def one_fold(job: tuple) -> tuple:
    """Predictions of the bags of one fold by a model that has not seen them."""
    name, data, effect, seed, fold = job
    make, settings = COHORTS[name]
    bags = make(data)
    split = StratifiedKFold(5, shuffle=True, random_state=seed).split(bags.labels, bags.labels)
    train, test = list(split)[fold]
    with threadpool_limits(1):
        model = gpmil.VGPMILPRI(slide_effect=effect, random_state=0, **settings).fit(bags[train])
        found = model.predict_all(bags[test])
    return job, test, found.proba[:, 1], found.instances.probability, model.slide_effect_


def figures(bags: gpmil.Bags, parts: list[tuple]) -> list[float]:
    """Of the folds of one seed, pooled."""
    p, patches = np.empty(len(bags)), np.empty(bags.n_instances)
    for _, test, proba, instances, _ in parts:
        p[test] = proba
        patches[np.isin(bags.bag_index, test)] = instances
    truth, known = bags.instance_labels == 1, bags.instance_labels >= 0
    above = patches > 0.5
    return [
        roc_auc_score(bags.labels, p),
        log_loss(bags.labels, p),
        roc_auc_score(truth[known], patches[known]),
        above[truth].mean(),
        truth[above & known].mean() if (above & known).any() else np.nan,
        np.mean([part[-1] for part in parts]),
    ]


def main() -> None:
    """Run the study and print one row per cohort and effect."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, default=Path("../shared/data"))
    parser.add_argument("--cohorts", nargs="+", default=list(COHORTS), choices=list(COHORTS))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    args = parser.parse_args()
    jobs = [
        (name, args.data, effect, seed, fold)
        for name in args.cohorts
        for effect in EFFECTS
        for seed in args.seeds
        for fold in range(5)
    ]
    with ProcessPoolExecutor(args.jobs) as pool:
        parts = list(pool.map(one_fold, jobs))
    print("cohort      effect  slide AUC  log loss  patch AUC  above .5  precision   tau")
    for name in args.cohorts:
        bags = COHORTS[name][0](args.data)
        for effect in EFFECTS:
            rows = [
                figures(bags, [p for p in parts if p[0][:4] == (name, args.data, effect, seed)])
                for seed in args.seeds
            ]
            cells = "  ".join(f"{x:9.3f}" for x in np.mean(rows, axis=0))
            print(f"{name:10}  {effect!s:6}{cells}", flush=True)


if __name__ == "__main__":
    main()
