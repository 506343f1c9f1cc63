"""Diagonal against coupled truncated moments on real data: metrics, and who changes side.

    python benchmarks/coupled_moments.py [--data FOLDER] [--json FILE]

Data as in real_data.py. Five folds stratified by label, predictions pooled; everything fitted in
the training folds.
"""

import argparse
import json
import time
from pathlib import Path

import numpy as np
import torch
from real_data import DATA, read
from sklearn.metrics import accuracy_score, log_loss, roc_auc_score
from sklearn.model_selection import StratifiedKFold

import gpmil

# its name in real_data.py, components of its PCA, columns that the kernel sees
SETS = {"SICAPv2 subset": ("sicapv2", None, 128), "colon": ("colon", 64, 64)}
SETTINGS = {"1, 1 sqrt(D), 0": (1.0, 1.0, 0.0), "9, 2 sqrt(D), -4": (9.0, 2.0, -4.0)}
STRENGTHS = (0.5, 1.0, 5.0, 10.0)


def out_of_fold(bags, model):
    p, patch = np.empty(len(bags)), np.empty(bags.n_instances)
    folds = StratifiedKFold(5, shuffle=True, random_state=0)
    for train, test in folds.split(np.zeros(len(bags)), bags.labels):
        model.fit(bags[train])
        p[test] = model.predict_proba(bags[test])[:, 1]
        patch[np.isin(bags.bag_index, test)] = model.predict_instances(bags[test]).probability
    return p, patch


def metrics(bags, p, patch):
    known = bags.instance_labels >= 0
    return {
        "bag accuracy": accuracy_score(bags.labels, p > 0.5),
        "bag AUC": roc_auc_score(bags.labels, p),
        "bag log loss": log_loss(bags.labels, p),
        "patch AUC": roc_auc_score(bags.instance_labels[known], patch[known]),
        "patches above .5": int((patch > 0.5).sum()),
    }


def compare(bags, n_components, dim, variance, length, mean, strength):
    found = {}
    for moments in ("diagonal", "coupled"):
        model = gpmil.VGPMILPRI(
            coupling=strength,
            variance=variance,
            lengthscale=length * np.sqrt(dim),
            mean=mean,
            n_components=n_components,
            moments=moments,
            random_state=0,
        )
        start = time.perf_counter()
        found[moments] = out_of_fold(bags, model)
        yield {"moments": moments, "seconds": time.perf_counter() - start} | metrics(
            bags, *found[moments]
        )
    (p, patch), (q, other) = found["diagonal"], found["coupled"]
    yield {
        "slides that change side": int(((p > 0.5) != (q > 0.5)).sum()),
        "patches that change side": int(((patch > 0.5) != (other > 0.5)).sum()),
    }


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--data", type=Path, default=DATA, help="where the data sets are")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    results = []
    for name, (key, n_components, dim) in SETS.items():
        bags = read(args.data, key)
        for label, (variance, length, mean) in SETTINGS.items():
            for strength in STRENGTHS:
                case = {"data": name, "settings": label, "lambda": strength}
                diagonal, coupled, change = compare(
                    bags, n_components, dim, variance, length, mean, strength
                )
                results += [case | diagonal, case | coupled | change]
                for row in results[-2:]:
                    print(
                        " | ".join(
                            f"{v:.3f}" if isinstance(v, float) else str(v) for v in row.values()
                        ),
                        flush=True,
                    )
    if args.json:
        args.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
