"""Do patch probabilities mean what they say? No patch label is used but to judge.

    python benchmarks/patch_calibration.py [--sets sicapv2 colon glas simulated] [--seeds 1]
        [--jobs 1] [--set slide_effect=0.78 ...]

Five folds per fold seed, patients together where they are known. Calibration error of patches in
ten bins, over the patches whose label is known, and what else is known of them, for

* model: the probability that the model states;
* unlike: that from slide labels alone (`gpmil.decide.unlike`), offered or not, with its share pi,
  its two checks and in how many folds it is offered.

Settings are learned in every fold unless `--set` gives them.
"""

import argparse
from pathlib import Path

import numpy as np
from joblib import Parallel, delayed
from real_data import DATA, SETS
from sklearn.metrics import average_precision_score, roc_auc_score
from threadpoolctl import threadpool_limits
from tuning_real_data import cohort, setting, splits

import gpmil
from gpmil.decide.metrics import calibration_error

NAMES = ("sicapv2", "colon", "glas", "simulated")
FIXED = {"slide_effect": "auto", "flags": True, "calibrated": True, "random_state": 0}


def fold(bags, settings, train, test):
    """Patch probabilities of one test fold by both ways, and what the second says of itself."""
    with threadpool_limits(1):
        model = gpmil.VGPMILPRI(**settings).fit(bags[train])
        found = model.predict_all(bags[test])
    known = model.cross_fit_.unlike
    within = known.probability(found.instances.p_value)
    unlike = within * found.proba[bags[test].bag_index, 1]
    facts = known.share, known.misfit, known.same_kind[0], known.supported
    return test, found.instances.probability, unlike, facts


def judge(truth, probability):
    """Figures of patches whose label is known."""
    above = probability > 0.5
    return {
        "calibration error": calibration_error(truth, probability),
        "AUC": roc_auc_score(truth, probability),
        "AP": average_precision_score(truth, probability),
        "malignant above .5": above[truth].mean(),
        "precision above .5": truth[above].mean() if above.any() else np.nan,
    }


def study(args, name):
    """One set: means over fold seeds, printed."""
    bags = cohort(args.data, name)
    settings = FIXED | (SETS[name][2] if name in SETS else {}) | dict(map(setting, args.set))
    work = [(s, *cut) for s in range(args.seeds) for cut in splits(name, bags, s)]
    done = Parallel(n_jobs=args.jobs)(delayed(fold)(bags, settings, *cut) for _, *cut in work)
    known = bags.instance_labels >= 0
    truth = bags.instance_labels[known] == 1
    tables = {"model": [], "unlike": []}
    for s in range(args.seeds):
        pooled = np.empty((2, bags.n_instances))
        for (seed, *_), (test, *both, _) in zip(work, done):
            if seed == s:
                # the bags of a fold are in the order of the cohort
                pooled[:, np.isin(bags.bag_index, test)] = both
        for kind, values in zip(tables, pooled):
            tables[kind].append(judge(truth, values[known]))
    share, misfit, same, offered = np.array([d[3] for d in done], dtype=float).T
    print(
        f"{name}: pi {share.mean():.2f}, flatness {misfit.mean():.3f} (largest "
        f"{misfit.max():.3f}), like in tissue of a kind {same.min():.2f} to {same.max():.2f}, "
        f"offered in {offered.sum():.0f} of {len(done)} folds"
    )
    for kind, table in tables.items():
        means = {k: np.mean([row[k] for row in table]) for k in table[0]}
        print(f"  {kind:7s}" + ", ".join(f"{k} {v:.3f}" for k, v in means.items()), flush=True)


def main():
    """Every set."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, default=DATA, help="where the data sets are")
    parser.add_argument("--sets", nargs="+", choices=NAMES, default=list(NAMES))
    parser.add_argument("--seeds", type=int, default=1, help="fold seeds")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--set", nargs="+", default=[], help="NAME=VALUE of the model")
    args = parser.parse_args()
    for name in args.sets:
        study(args, name)


if __name__ == "__main__":
    main()
