"""Learned settings on real data: bags and patches out of fold, no patch label used.

    python benchmarks/tuning_real_data.py --data FOLDER [--sets colon sicapv2 musk1 elephant]
        [--models pri pr] [--seeds 5] [--jobs 2] [--json FILE] [--width 1.0] [--set NAME=VALUE ...]

* colon, sicapv2: five folds for every fold seed, everything learned inside the training folds,
  predictions pooled within a fold seed, means over fold seeds. Patch F1 also with the patches
  flagged at a false discovery rate of 10 %.
* musk1, elephant: ten ten-fold cross-validations; accuracy, with an interval over them.
"""

import argparse
import json
import time
from pathlib import Path

import numpy as np
import torch
from joblib import Parallel, delayed
from real_data import DATA, SETS, read
from sklearn.metrics import accuracy_score, f1_score, log_loss, roc_auc_score
from sklearn.model_selection import StratifiedKFold

import gpmil
from gpmil.decide.metrics import false_discovery_rate, within_bag_auc
from gpmil.inference import tuning

CLASSES = {"pri": gpmil.VGPMILPRI, "pr": gpmil.VGPMILPR}


def fold(bags, model, train, test, width):
    """Predictions of one test fold, and what was learned."""
    torch.set_num_threads(1)
    tuning.WIDTH = tuple(width * w for w in (1.5, 0.7, 1.0, 1.0))
    start = time.perf_counter()
    model.fit(bags[train])
    took = time.perf_counter() - start
    held_out = bags[test]
    found = model.predict_instances(held_out)
    learned = {
        "variance": model.variance_,
        "lengthscale": model.lengthscale_,
        "mean": model.mean_,
        "coupling": model.coupling_,
        "kernel": str(model.kernel_),
        "loo": model.loo_log_likelihood_,
        "seconds": took,
    }
    p = model.predict_proba(held_out)[:, 1]
    flagged = np.zeros(len(found), bool) if found.flagged is None else found.flagged
    return test, p, found.mean / found.std, flagged, learned


def pooled(bags, folds):
    """Predictions of all folds of one seed in the order of the cohort."""
    p, score = np.empty(len(bags)), np.empty(bags.n_instances)
    flagged = np.zeros(bags.n_instances, dtype=bool)
    for test, p_fold, score_fold, flag_fold, _ in folds:
        rows = np.isin(bags.bag_index, test)
        p[test], score[rows], flagged[rows] = p_fold, score_fold, flag_fold
    return p, score, flagged


def judge(bags, p, score, flagged):
    found = {
        "bag accuracy": accuracy_score(bags.labels, p > 0.5),
        "bag AUC": roc_auc_score(bags.labels, p),
        "bag log loss": log_loss(bags.labels, p),
    }
    labels = bags.instance_labels
    known = labels >= 0
    if not known.any():
        return found
    return found | {
        "patch AUC": roc_auc_score(labels[known], score[known]),
        "within-bag AUC": within_bag_auc(labels, score, bags.bag_index),
        "patch F1, flags": f1_score(labels[known], flagged[known], zero_division=0),
        "FDR": false_discovery_rate(labels, flagged),
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, default=DATA, help="where the data sets are")
    parser.add_argument("--sets", nargs="*", default=list(SETS))
    parser.add_argument("--models", nargs="*", default=["pri", "pr"])
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--width", type=float, default=1.0, help="of the prior, times the default")
    parser.add_argument("--set", nargs="*", default=[], help="settings of the model, NAME=VALUE")
    args = parser.parse_args()
    extra = {k: json.loads(v) for k, v in (item.split("=", 1) for item in args.set)}
    results = []
    for name in args.sets:
        bags = read(args.data, name)
        small = not bags.has_geometry
        seeds, n_folds = (10, 10) if small else (args.seeds, 5)
        for kind in args.models:
            if small and kind == "pri":
                continue  # no geometry: the same model
            start = time.perf_counter()
            work = [
                (seed, CLASSES[kind](random_state=0, **(SETS[name][2] | extra)), train, test)
                for seed in range(seeds)
                for train, test in StratifiedKFold(n_folds, shuffle=True, random_state=seed).split(
                    np.zeros(len(bags)), bags.labels
                )
            ]
            done = Parallel(n_jobs=args.jobs)(
                delayed(fold)(bags, model, train, test, args.width)
                for _, model, train, test in work
            )
            by_seed = [
                judge(bags, *pooled(bags, done[s * n_folds : (s + 1) * n_folds]))
                for s in range(seeds)
            ]
            means = {k: float(np.mean([m[k] for m in by_seed])) for k in by_seed[0]}
            spread = {k: float(np.std([m[k] for m in by_seed], ddof=1)) for k in by_seed[0]}
            learned = [d[4] for d in done]
            print(f"{name} {kind} {extra} width {args.width}: {time.perf_counter() - start:.0f} s")
            for k in means:
                print(f"  {k:16s} {means[k]:.4f} (sd over seeds {spread[k]:.4f})")
            middle = {
                k: np.round(np.quantile([x[k] for x in learned], [0.1, 0.5, 0.9]), 3).tolist()
                for k in ("variance", "lengthscale", "mean", "coupling", "loo", "seconds")
            }
            print(f"  learned (10, 50, 90 %): {middle}", flush=True)
            results.append({"set": name, "model": kind, "width": args.width, "settings": extra,
                            "means": means, "sd": spread, "learned": learned})  # fmt: skip
            if args.json:
                args.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
