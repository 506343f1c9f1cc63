"""Inducing points by k-means alone, and with more of them on lesions: slides and patches unseen.

    python benchmarks/inducing_on_lesions.py --cohorts tiny --inducing 50 --seeds 0 1 2 --jobs 2

Settings are given (COHORTS below, slide effect 1), so that only the points differ.
Rows: M centres of k-means; as many more centres as there would be points on lesions; the points on
lesions added; the same in place of the centres that are nearest to another one; and
`inducing="lesions"`, which keeps what it added if bags left out are predicted better. Means over
seeds (SICAPv2: over the folds that the seeds number).
"""

import argparse
import math
import os
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import numpy as np
import real_data
import torch
from sklearn.metrics import average_precision_score, log_loss, roc_auc_score
from sklearn.model_selection import StratifiedKFold
from threadpoolctl import threadpool_limits

import gpmil
from gpmil.models import on_lesions

CPU = torch.device("cpu")
Pair = tuple[gpmil.Bags, gpmil.Bags]


def simulated(seed: int, **settings: float) -> Pair:
    """150 simulated slides of 60 patches to train on, 150 of other patients."""
    train, test = (
        gpmil.simulate.cohort(150, seed=seed, part=part, mean_size=60.0, **settings)
        for part in (0, 1)
    )
    return train, test


def default(seed: int, data: Path) -> Pair:
    """Lesions from one patch to half of the slide."""
    return simulated(seed)


def tiny(seed: int, data: Path) -> Pair:
    """Lesions of at most 8 % of the patches, plainer to see one by one."""
    return simulated(seed, max_lesion=0.08, separation=6.0)


def kinds(seed: int, data: Path) -> Pair:
    """Three patches in a hundred, of one of twelve kinds of lesion that have little in common."""
    rng = np.random.default_rng(seed)
    centres = 3.0 * rng.normal(size=(12, 16))
    made = []
    for _ in range(2):
        x, h = rng.normal(size=(200, 100, 16)), np.zeros((200, 100), dtype=int)
        h[::2, :3] = 1
        x[::2, :3] += centres[rng.integers(12, size=100)][:, None]
        y = h.max(1)
        made.append(gpmil.Bags.from_arrays(list(x), labels=y, instance_labels=list(h)))
    return made[0], made[1]


def sicap_fold(seed: int, data: Path) -> Pair:
    """A fold of the subset of SICAPv2."""
    bags = real_data.read(data, "sicapv2")
    split = StratifiedKFold(5, shuffle=True, random_state=0).split(bags.labels, bags.labels)
    train, test = list(split)[seed % 5]
    return bags[train], bags[test]


# cohort, variance, length / sqrt d, mean, coupling
COHORTS = {
    "default": (default, 100.0, 4.0, -10.0, 0.0),
    "tiny": (tiny, 100.0, 4.0, -10.0, 0.0),
    "kinds": (kinds, 30.0, 1.0, -15.0, 0.0),
    "sicapv2": (sicap_fold, 100.0, 4.0, -10.0, 0.5),
}


def crowded(model: gpmil.VGPMILPRI, n: int) -> np.ndarray:
    """Which inducing points to give up: n times the one that is nearest to another."""
    Z = model._inputs(model.inducing_points_, CPU)
    distance = torch.cdist(Z, Z).fill_diagonal_(torch.inf)
    given_up = []
    for _ in range(n):
        i = int(distance.min(1).values.argmin())
        given_up.append(i)
        distance[i] = distance[:, i] = torch.inf
    return np.array(given_up)


def figures(model: gpmil.VGPMILPRI, test: gpmil.Bags) -> list[float]:
    """Slide AUC and log loss, patch AUC and average precision of slides that were not seen."""
    found = model.predict_all(test)
    known = test.instance_labels >= 0
    truth, patches = test.instance_labels[known] == 1, found.instances.probability[known]
    return [
        float(roc_auc_score(test.labels, found.proba[:, 1])),
        float(log_loss(test.labels, found.proba[:, 1])),
        float(roc_auc_score(truth, patches)),
        float(average_precision_score(truth, patches)),
    ]


def one(job: tuple[str, Path, int, int]) -> dict[str, list[float]]:
    """All placements of one cohort and seed."""
    name, data, n_inducing, seed = job
    make, variance, length, mean, coupling = COHORTS[name]
    train, test = make(seed, data)
    given = {
        "variance": variance, "lengthscale": length * math.sqrt(train.n_features), "mean": mean,
        "coupling": coupling, "slide_effect": 1.0, "random_state": 0, "device": "cpu",
    }  # fmt: skip

    def fitted(**settings) -> gpmil.VGPMILPRI:
        return gpmil.VGPMILPRI(**given, **settings).fit(train)

    with threadpool_limits(1):
        first = fitted(n_inducing=n_inducing)
        Z = first.inducing_points_
        added = points_on_lesions(first, train)
        more = len(added)
        swapped = np.concatenate([np.delete(Z, crowded(first, more), axis=0), added])
        models = {
            "k-means": first,
            "k-means, more": fitted(n_inducing=n_inducing + more),
            "added": fitted(inducing=np.concatenate([Z, added])),
            "swapped": fitted(inducing=swapped),
        }
        left_out = {k: m.leave_one_bag_out(train) for k, m in models.items()}
        out = {k: [left_out[k].mean(), *figures(m, test), 0.0] for k, m in models.items()}
    kept = on_lesions.rises(left_out["added"] - left_out["k-means"])
    distance = np.abs(added[:, None] - positive_patches(train)[None]).max(2).min(1)
    out["added"][-1] = float((distance < 1e-4).mean())
    out['inducing="lesions"'] = [*out["added" if kept else "k-means"][:-1], float(kept)]
    return out


def points_on_lesions(model: gpmil.VGPMILPRI, bags: gpmil.Bags) -> np.ndarray:
    """What `inducing="lesions"` would add to this fit."""
    cohort = gpmil.distributed.WholeCohort(bags, CPU, bags.labels)
    with torch.no_grad():
        model._problem(model._gp(CPU), cohort)
        return model._points_on_lesions(model._posterior(CPU), cohort, CPU)


def positive_patches(bags: gpmil.Bags) -> np.ndarray:
    """The features of patches known to be malignant."""
    return bags.features[bags.instance_labels == 1].astype(np.float64)


def main() -> None:
    """Print a table per cohort and number of points."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, default=real_data.DATA)
    parser.add_argument("--cohorts", nargs="+", default=list(COHORTS), choices=list(COHORTS))
    parser.add_argument("--inducing", nargs="+", type=int, default=[50, 100, 200])
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    parser.add_argument("--share", type=float, default=on_lesions.SHARE)
    args = parser.parse_args()
    on_lesions.SHARE = args.share
    print("| cohort | M | points | left out | slide AUC | log loss | patch AUC | AP | |")
    print("|---|---|---|---|---|---|---|---|---|")
    for name in args.cohorts:
        for n in args.inducing:
            jobs = [(name, args.data, n, seed) for seed in args.seeds]
            with ProcessPoolExecutor(args.jobs) as pool:
                found = list(pool.map(one, jobs))
            for row in found[0]:
                *mean, last = np.mean([f[row] for f in found], axis=0)
                cells = " | ".join(f"{x:.3f}" for x in mean)
                note = {"added": f"{last:.0%} on malignant patches"}.get(row, "")
                note = f"kept in {last:.0%}" if row.startswith("inducing") else note
                print(f"| {name} | {n} | {row} | {cells} | {note} |", flush=True)


if __name__ == "__main__":
    main()
