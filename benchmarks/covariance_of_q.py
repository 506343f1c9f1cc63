"""What can settings do on a cohort, and should q(u) be wider? Slides out of fold, random settings.

    python benchmarks/covariance_of_q.py --sets sicapv2 colon simulated --settings 60 --jobs 16
    python benchmarks/covariance_of_q.py --context --seeds 5 --settings 40

The covariance of q(u) is R^-1 = (I + W'Sigma W)^-1, as if all patch variables had been seen. With
the Hessian J of the labels' likelihood at the same w it is Laplace's J^-1, several times as wide,
and about right where cohorts are drawn from the model itself (docs/explanation/proof.md);
intervals of slides have it. Here both are asked about real slides that the fit has not seen: five
folds, the same w, the same settings.

With `--context` settings have a slide context as well, and R alone is asked. The best of all
settings, picked with the answer in view, is what no way to learn them need hope to pass; `left out`
is what the objective of learning, which sees the training folds alone, says of the same settings.
With several fold seeds all settings are judged by the first, and the best quarter by all of them.
"""

import argparse
import json
from functools import partial
from pathlib import Path

import numpy as np
from joblib import Parallel, delayed
from real_data import DATA
from scipy.stats import spearmanr
from sklearn.metrics import average_precision_score, log_loss, roc_auc_score
from threadpoolctl import threadpool_limits
from tuning_real_data import cohort, splits

import gpmil
from gpmil.decide.metrics import within_bag_auc
from gpmil.inference.objective import ROUGH, left_out
from gpmil.models.learning import CPU

BETWEEN = {"variance": (1.0, 300.0), "length": (0.8, 8.0), "coupling": (0.1, 3.0)}
LEVELS = (-2.6, 0.0)
EFFECTS = (0.0, 0.3, 0.7, 1.2, 2.0)
# with a context, around what is learned then; a quarter of the draws without coupling
IN_CONTEXT = {
    "variance": (20.0, 1000.0),
    "length": (1.5, 8.0),
    "coupling": (0.1, 3.0),
    "context": (1.0, 100.0),
    "context_length": (0.7, 8.0),
}
LEVELS_IN_CONTEXT = (-1.6, 0.0)
UNCOUPLED = 0.25


def drawn(rng, context):
    """Settings on a logarithmic scale, the mean in units of a patch's deviation."""
    ends, levels = (IN_CONTEXT, LEVELS_IN_CONTEXT) if context else (BETWEEN, LEVELS)
    found = {k: float(np.exp(rng.uniform(*np.log(end)))) for k, end in ends.items()}
    found |= {"level": float(rng.uniform(*levels)), "effect": float(rng.choice(EFFECTS))}
    if context and rng.random() < UNCOUPLED:
        found["coupling"] = 0.0
    return found


def model_at(bags, name, at):
    """The model with these settings."""
    root = np.sqrt(64 if name == "colon" else bags.features.shape[1])
    given = {"n_components": 64} if name == "colon" else {}
    if "context" in at:
        given |= {
            "slide_context": at["context"],
            "slide_context_lengthscale": at["context_length"] * root,
        }
    return gpmil.VGPMILPRI(
        variance=at["variance"],
        lengthscale=at["length"] * root,
        mean=at["level"] * np.sqrt(1 + at["variance"]),
        coupling=at["coupling"],
        slide_effect=at["effect"],
        n_inducing=100,
        random_state=0,
        **given,
    )


def asked_of(side_by_side, bags, name, kinds, work):
    """The figures of some settings, each with its fold seed."""
    return side_by_side(delayed(one_seed)(bags, name, at, kinds, seed) for at, seed in work)


def foremost(found):
    """Which settings are among the best eighth by log loss of slides, or by their AUC."""
    n = -(-len(found) // 8)
    losses, areas = (np.array([one["R"][k] for one in found]) for k in ("log loss", "AUC"))
    return sorted({*losses.argsort()[:n].tolist(), *(-areas).argsort()[:n].tolist()})


def means(by_seed):
    """Of every figure over the fold seeds."""
    first = by_seed[0]
    return {
        kind: {k: float(np.mean([one[kind][k] for one in by_seed])) for k in first[kind]}
        for kind in first
    }


def one_seed(bags, name, at, kinds, seed):
    """Five folds, pooled."""
    slides = {kind: np.zeros(len(bags)) for kind in kinds}
    patches = {kind: np.zeros(bags.n_instances) for kind in kinds}
    model, believed = model_at(bags, name, at), []
    with threadpool_limits(1):
        for train, test in splits(name, bags, seed):
            model.fit(bags[train])
            believed.append(objective(model, bags[train]))
            rows = np.isin(bags.bag_index, test)
            for kind in kinds:
                if kind == "J":
                    model.whitened_precision_ = model.interval_precision_
                slides[kind][test] = model.predict_proba(bags[test])[:, 1]
                patches[kind][rows] = model.predict_instances(bags[test]).probability
    left = {"left out": float(np.mean(believed))}
    return {kind: measured(bags, slides[kind], patches[kind]) | left for kind in kinds}


def objective(model, bags):
    """What learning would say of these settings: log loss of the training bags in inner folds."""
    made = model._tuning_cohort(bags, bags.labels, CPU, None)
    return -float(left_out(made, model._settings(), tolerance=ROUGH)[0].mean())


def measured(bags, p, patch):
    """Slides, and patches where their labels are known."""
    p = np.clip(p, 1e-12, 1 - 1e-12)
    known = bags.instance_labels >= 0
    truth = bags.instance_labels[known]
    return {
        "AUC": roc_auc_score(bags.labels, p),
        "log loss": log_loss(bags.labels, p),
        "patch AUC": roc_auc_score(truth, patch[known]),
        "patch AP": average_precision_score(truth, patch[known]),
        "within": within_bag_auc(bags.instance_labels, patch, bags.bag_index),
        "above .5": float((patch[known][truth == 1] > 0.5).mean()),
    }


def in_words(found):
    """The figures of one setting."""
    return ", ".join(f"{k} {v:.3f}" for k, v in found.items())


def report(name, points, found, kinds):
    """The best of all settings, how the objective orders them, and which covariance is better."""
    column = {kind: {k: np.array([one[kind][k] for one in found]) for k in found[0][kind]}
              for kind in kinds}  # fmt: skip
    for kind in kinds:
        numbers = column[kind]
        for by in ("log loss", "AUC", "left out"):
            best = int((-numbers[by] if by == "AUC" else numbers[by]).argmin())
            print(f"{name}, {kind}, best {by} of {len(points)}: {in_words(found[best][kind])}")
            print(f"    at {points[best]}")
        rank = spearmanr(numbers["left out"], numbers["log loss"]).statistic
        print(f"{name}, {kind}: rank correlation of log loss and the objective {rank:.2f}")
    if "J" in kinds:
        wider = (column["J"]["log loss"] < column["R"]["log loss"]).mean()
        print(f"{name}: Laplace's has the smaller log loss at {wider:.0%} of the settings")


def main():
    """Random settings for every set."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sets", nargs="+", default=["sicapv2", "colon", "simulated"])
    parser.add_argument("--settings", type=int, default=60)
    parser.add_argument("--seeds", type=int, default=1, help="fold seeds to take means over")
    parser.add_argument("--context", action="store_true", help="settings with a slide context")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    kinds = ("R",) if asked.context else ("R", "J")
    everything = {}
    for name in asked.sets:
        bags, rng = cohort(DATA, name), np.random.default_rng(0)
        points = [drawn(rng, asked.context) for _ in range(asked.settings)]
        ask = partial(asked_of, Parallel(asked.jobs), bags, name, kinds)
        found = ask([(at, 0) for at in points])
        report(f"{name}, fold seed 0", points, found, kinds)
        everything[name] = [at | one for at, one in zip(points, found, strict=True)]
        if asked.seeds > 1:
            kept = [points[i] for i in foremost(found)]
            every = ask([(at, seed) for at in kept for seed in range(asked.seeds)])
            by_seed = np.array(every, dtype=object).reshape(len(kept), asked.seeds)
            over_seeds = [means(ones) for ones in by_seed]
            report(f"{name}, {asked.seeds} fold seeds", kept, over_seeds, kinds)
        if asked.json:
            asked.json.write_text(json.dumps(everything))


if __name__ == "__main__":
    main()
