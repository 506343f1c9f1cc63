"""Novelty on real features: does a model of one cohort refuse the slides of another?

    python benchmarks/novelty.py [seeds]

SICAPv2 (30 slides), colon (70 images), GlaS (114 images) and simulated slides, all cut to their
first 128 columns. A model is fitted to two thirds of a cohort (patients kept together); the rest
and all slides of the others are judged. Per pair: AUC of the novelty of slides, and the share
refused (novelty above 1); of patches the AUC alone. `held out` is the share refused of the third
that was kept, which should be small.
"""

import sys

import numpy as np
import real_data
from sklearn.metrics import roc_auc_score

import gpmil
from gpmil.data.folds import folds

WIDTH = 128
NUMBERS = {"variance": 4.0, "lengthscale": 1.5 * WIDTH**0.5, "mean": -2.5, "coupling": 0.5}


def cohorts():
    """Four cohorts of the same width."""
    found = {n: real_data.read(real_data.DATA, n) for n in ("sicapv2", "colon", "glas")}
    found["simulated"] = gpmil.simulate.cohort(n_bags=60, n_features=WIDTH, seed=3)
    return {name: narrow(bags) for name, bags in found.items()}


def narrow(bags):
    """The first columns."""
    rows = [np.asarray(x[:, :WIDTH], dtype=float) for x in bags.split(bags.features)]
    given = {} if bags.groups is None else {"groups": bags.groups}
    return gpmil.Bags.from_arrays(
        rows, labels=bags.labels, coords=bags.split(bags.coords), step=bags.step, **given
    )


def auc(own, other):
    """That of the others above the own."""
    return roc_auc_score(np.repeat([0, 1], [len(own), len(other)]), np.concatenate([own, other]))


def thirds(bags, seed):
    """Training slides and those kept, by patient."""
    fold = folds(bags.labels, bags.groups, 3, seed)
    return bags[fold != 0], bags[fold == 0]


def main(seeds):
    known = cohorts()
    print("model of     slides of    AUC     refused  patch AUC")
    for name, bags in known.items():
        held, table = [], {other: [] for other in known if other != name}
        for seed in range(seeds):
            train, kept = thirds(bags, seed)
            model = gpmil.VGPMILPRI(**NUMBERS, random_state=seed).fit(train)
            own = model.predict_all(kept)
            held.append(np.mean(own.novelty > 1))
            for other in table:
                far = model.predict_all(known[other])
                patches = auc(own.instances.novelty, far.instances.novelty)
                table[other].append(
                    (auc(own.novelty, far.novelty), np.mean(far.novelty > 1), patches)
                )
        print(f"{name:12s} held out     -       {np.mean(held):.3f}")
        for other, rows in table.items():
            print(f"{name:12s} {other:12s} %.3f   %.3f    %.3f" % tuple(np.mean(rows, 0)))


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 1)
