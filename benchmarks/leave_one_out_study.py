"""Is the leave-one-bag-out likelihood of one fit right, and does it choose well? On real data.

    python benchmarks/leave_one_out_study.py --data FOLDER [--jobs 2] [--json FILE]

* against really refitting without each bag, inducing points fixed: five settings, sicapv2;
* against five-fold log loss over a grid of settings: rank correlation, next to that of the
  collapsed evidence bound, on sicapv2 and colon;
* what the search costs and reaches: gradient against derivative-free, same budget;
* cost at SICAPv2 size (95 slides, 15 thousand patches, simulated), in fits.
"""

import argparse
import itertools
import json
import sys
import time
from pathlib import Path

import numpy as np
import torch
from joblib import Parallel, delayed
from real_data import DATA, SETS, read
from scipy.stats import spearmanr
from sklearn.metrics import log_loss
from sklearn.model_selection import StratifiedKFold

import gpmil
from gpmil.inference import folded_cohort, tuning

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from oracles.tuning import derivative_free

FIVE = ((1, 1, 0, 0.5), (9, 2, -4, 0.5), (9, 2, -4, 5), (50, 4, -4, 1), (30, 2, -8, 0.1))
GRID = list(itertools.product((1, 9, 50), (1, 2, 4), (-4, 0), (0.3, 3)))


def settings(values, n_inputs):
    variance, length, mean, coupling = values
    return {
        "variance": float(variance),
        "lengthscale": float(length * np.sqrt(n_inputs)),
        "mean": float(mean),
        "coupling": float(coupling),
    }


def n_inputs(bags, extra):
    return extra.get("n_components", bags.n_features)


def refit(bags, model, b):
    """log p(y_b) under a real fit to all other bags; features and inducing points stay."""
    torch.set_num_threads(1)
    others = np.arange(len(bags)) != b
    twin = model.with_settings_fixed().set_params(
        inducing=model.inducing_points_, standardize=False, n_components=None
    )
    log_p = twin.fit(bags[others]).log_proba_negative(bags[[b]])[0][0]
    return float(np.log(-np.expm1(log_p)) if bags.labels[b] else log_p)


def in_model_space(bags, model):
    """The bags with the features as the kernel sees them, and the model with inducing there."""
    x = model._inputs(bags.features, torch.device("cpu")).numpy()
    z = model._inputs(model.inducing_points_, torch.device("cpu")).numpy()
    moved = gpmil.Bags(
        x, bags.offsets, labels=bags.labels, names=bags.names, adjacency=bags.adjacency
    )
    plain = model.with_settings_fixed().set_params(inducing=z, standardize=False, n_components=None)
    return moved, plain.fit(moved)


def refits(data, jobs):
    bags = read(data, "sicapv2")
    found = []
    for values in FIVE:
        chosen = settings(values, bags.n_features)
        first = gpmil.VGPMILPRI(**chosen, random_state=0).fit(bags)
        moved, model = in_model_space(bags, first)
        quick = model.leave_one_bag_out(moved)
        slow = Parallel(n_jobs=jobs)(delayed(refit)(moved, model, b) for b in range(len(moved)))
        slow = np.array(slow)
        found.append({
            "setting": values,
            "one fit": float(quick.mean()),
            "refits": float(slow.mean()),
            "correlation": float(np.corrcoef(quick, slow)[0, 1]),
            "largest": float(np.abs(quick - slow).max()),
        })  # fmt: skip
        print(found[-1], flush=True)
    return found


def grid_point(bags, extra, chosen):
    torch.set_num_threads(1)
    model = gpmil.VGPMILPRI(**chosen, **extra, random_state=0).fit(bags)
    p = np.empty(len(bags))
    for train, test in StratifiedKFold(5, shuffle=True, random_state=0).split(p, bags.labels):
        fold_model = gpmil.VGPMILPRI(**chosen, **extra, random_state=0).fit(bags[train])
        p[test] = fold_model.predict_proba(bags[test])[:, 1]
    loo = float(model.leave_one_bag_out(bags).mean())
    return loo, -float(log_loss(bags.labels, p)), float(model.elbo_trace_[-1])


def ranks(data, name, jobs):
    bags = read(data, name)
    extra = {k: v for k, v in SETS[name][2].items() if k == "n_components"}
    points = [settings(v, n_inputs(bags, extra)) for v in GRID]
    found = np.array(Parallel(n_jobs=jobs)(delayed(grid_point)(bags, extra, c) for c in points))
    loo, cv, bound = found.T
    result = {
        "set": name,
        "settings": len(GRID),
        "leave-one-out": float(spearmanr(loo, cv)[0]),
        "evidence bound": float(spearmanr(bound, cv)[0]),
        "five-fold loss of the pick": {
            "leave-one-out": float(-cv[loo.argmax()]),
            "evidence bound": float(-cv[bound.argmax()]),
            "best of the grid": float(-cv.max()),
        },
        "points": found.tolist(),
    }
    print({k: v for k, v in result.items() if k != "points"}, flush=True)
    return result


def searches(data, name):
    torch.set_num_threads(1)
    bags = read(data, name)
    extra = {k: v for k, v in SETS[name][2].items() if k == "n_components"}
    model = gpmil.VGPMILPRI(**settings(FIVE[1], n_inputs(bags, extra)), **extra, random_state=0)
    model.fit(bags)
    cpu = torch.device("cpu")
    made = folded_cohort.folded(
        bags, np.arange(bags.n_instances), bags.labels == 1, lambda x: model._inputs(x, cpu),
        model._inputs(model.inducing_points_, cpu), "rbf",
    )  # fmt: skip
    space = tuning.Space({}, float(np.sqrt(n_inputs(bags, extra))))
    found = []
    methods = {"gradient": tuning.search, "derivative_free": derivative_free}
    for method, budget in itertools.product(methods, (40, 80)):
        start = time.perf_counter()
        done = methods[method](made, space, budget)
        found.append({
            "set": name, "method": method, "budget": budget, "trials": len(done.trace),
            "seconds": time.perf_counter() - start, "objective": done.best.objective,
        })  # fmt: skip
        print(found[-1], flush=True)
    return found


def cost():
    """Tuning all four at SICAPv2 size, in fits of the same cohort at given settings."""
    torch.set_num_threads(1)
    train, _ = gpmil.simulate.sicapv2_like(seed=0)
    took = {}
    given = settings(FIVE[1], train.n_features)
    for name, model in (
        ("fit", gpmil.VGPMILPRI(**given, random_state=0)),
        ("learned", gpmil.VGPMILPRI(random_state=0)),
    ):
        start = time.perf_counter()
        model.fit(train)
        took[name] = time.perf_counter() - start
    took["fits"] = took["learned"] / took["fit"]
    print({"slides": len(train), "patches": train.n_instances} | took, flush=True)
    return took


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, default=DATA, help="where the data sets are")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    results = {"cost": cost(), "refits": refits(args.data, args.jobs)}
    results["ranks"] = [ranks(args.data, name, args.jobs) for name in ("sicapv2", "colon")]
    results["searches"] = [searches(args.data, name) for name in ("sicapv2", "colon")]
    if args.json:
        args.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
