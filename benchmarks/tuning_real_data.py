"""Learned settings out of fold: slides and patches, no patch label used.

    python benchmarks/tuning_real_data.py [--sets colon sicapv2 ...] [--models pri pr]
        [--seeds 5] [--jobs 2] [--json FILE] [--set slide_effect=0 "slide_context='auto'" ...]

* colon, sicapv2, glas, simulated (120 slides): five folds per fold seed, patients together where
  they are known, everything learned inside the training folds, predictions pooled within a fold
  seed, means over fold seeds.
* musk1, elephant: ten-fold cross-validations with ten seeds.
* simulated1800: 1,000 simulated slides to train on, 800 others to judge, another cohort per seed.
"""

import argparse
import ast
import json
import time
from pathlib import Path

import numpy as np
from joblib import Parallel, delayed
from real_data import DATA, SETS, read
from sklearn.metrics import accuracy_score, average_precision_score, log_loss, roc_auc_score
from sklearn.model_selection import StratifiedGroupKFold, StratifiedKFold
from threadpoolctl import threadpool_limits

import gpmil
from gpmil.decide.metrics import false_discovery_rate, within_bag_auc

CLASSES = {"pri": gpmil.VGPMILPRI, "pr": gpmil.VGPMILPR}
SIMULATED = {"simulated": 120, "simulated1800": 1800}
TRAINED_ON = 1000  # of the 1,800
LEARNED = ("variance", "lengthscale", "mean", "coupling", "slide_effect", "slide_context")


def cohort(folder, name, seed=0):
    """The bags of a set; of the large simulated one another cohort for every seed."""
    if name in SIMULATED:
        own = seed if name == "simulated1800" else 0
        return gpmil.simulate.cohort(n_bags=SIMULATED[name], seed=own)
    return read(folder, name)


def splits(name, bags, seed):
    """Training and test bags of every fold."""
    if name == "simulated1800":
        return [(np.arange(TRAINED_ON), np.arange(TRAINED_ON, len(bags)))]
    n_folds = 5 if bags.has_geometry else 10
    kind = StratifiedKFold if bags.groups is None else StratifiedGroupKFold
    cut = kind(n_folds, shuffle=True, random_state=seed)
    return list(cut.split(np.zeros(len(bags)), bags.labels, bags.groups))


def fold(bags, model, train, test):
    """Predictions of one test fold, and what was learned."""
    start = time.perf_counter()
    with threadpool_limits(1):
        model.fit(bags[train])
        took = time.perf_counter() - start
        found = model.predict_all(bags[test])
    learned = {n: float(getattr(model, f"{n}_", None) or 0) for n in LEARNED}
    learned |= {"loo": model.loo_log_likelihood_ or np.nan, "seconds": took}
    patches = found.instances
    flagged = np.zeros(len(patches), bool) if patches.flagged is None else patches.flagged
    return test, found.proba[:, 1], patches.probability, flagged, learned


def pooled(bags, folds):
    """The test bags of all folds of one seed, and their predictions in the order of the cohort."""
    p, patch = np.full(len(bags), np.nan), np.full(bags.n_instances, np.nan)
    flagged = np.zeros(bags.n_instances, dtype=bool)
    for test, p_fold, patch_fold, flag_fold, _ in folds:
        rows = np.isin(bags.bag_index, test)
        p[test], patch[rows], flagged[rows] = p_fold, patch_fold, flag_fold
    seen = np.isfinite(patch)
    return bags[np.flatnonzero(np.isfinite(p))], p[np.isfinite(p)], patch[seen], flagged[seen]


def judge(bags, p, patch, flagged):
    """Figures of bags, and of patches where their labels are known."""
    found = {
        "bag accuracy": accuracy_score(bags.labels, p > 0.5),
        "bag AUC": roc_auc_score(bags.labels, p),
        "bag log loss": log_loss(bags.labels, p),
    }
    known = bags.instance_labels >= 0
    if not known.any():
        return found
    truth, score = bags.instance_labels[known] == 1, patch[known]
    above = score > 0.5
    found |= {
        "patch AUC": roc_auc_score(truth, score),
        "patch AP": average_precision_score(truth, score),
        "within-bag AUC": within_bag_auc(bags.instance_labels, patch, bags.bag_index),
        "malignant above .5": above[truth].mean(),
        "precision above .5": truth[above].mean() if above.any() else np.nan,
    }
    if flagged.any():
        found["flagged, recall"] = flagged[known][truth].mean()
        found["flagged, FDR"] = false_discovery_rate(bags.instance_labels, flagged)
    return found


def setting(item):
    """NAME=VALUE; a bare word is a string."""
    name, value = item.split("=", 1)
    try:
        return name, ast.literal_eval(value)
    except (ValueError, SyntaxError):
        return name, value


def study(args, name, kind, extra):
    """One set, one model: means and spreads over seeds, printed and returned."""
    start = time.perf_counter()
    settings = (SETS[name][2] if name in SETS else {}) | extra
    seeds = args.seeds if cohort(args.data, name).has_geometry else 10
    bags = [cohort(args.data, name, s) for s in range(seeds)]
    work = [(s, *cut) for s in range(seeds) for cut in splits(name, bags[s], s)]
    done = Parallel(n_jobs=args.jobs)(
        delayed(fold)(bags[s], CLASSES[kind](random_state=0, **settings), train, test)
        for s, train, test in work
    )
    by_seed = [
        judge(*pooled(bags[s], [d for d, (seed, *_) in zip(done, work) if seed == s]))
        for s in range(seeds)
    ]
    table = {k: np.array([m.get(k, np.nan) for m in by_seed]) for k in by_seed[0]}
    print(f"{name} {kind} {extra}: {time.perf_counter() - start:.0f} s")
    for k, values in table.items():
        spread = values.std(ddof=1) if seeds > 1 else 0.0
        print(f"  {k:20s} {values.mean():.4f} (sd over seeds {spread:.4f})")
    learned = {k: [d[4][k] for d in done] for k in done[0][4]}
    middle = {k: np.quantile(v, [0.1, 0.5, 0.9]).round(3).tolist() for k, v in learned.items()}
    print(f"  learned (10, 50, 90 %): {middle}", flush=True)
    figures = {k: v.tolist() for k, v in table.items()}
    return {"set": name, "model": kind, "settings": extra, "by seed": figures, "learned": learned}


def main():
    """Every set with every model."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, default=DATA, help="where the data sets are")
    parser.add_argument("--sets", nargs="*", default=list(SETS), choices=[*SETS, *SIMULATED])
    parser.add_argument("--models", nargs="*", default=["pri"], choices=list(CLASSES))
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--set", nargs="*", default=[], help="settings of the model, NAME=VALUE")
    args = parser.parse_args()
    extra = dict(setting(item) for item in args.set)
    results = []
    for name in args.sets:
        for kind in args.models:
            results.append(study(args, name, kind, extra))
            if args.json:
                args.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
