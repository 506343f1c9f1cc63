"""What settings can do at PANDA size: random ones, the simulated test slides in view. For a GPU.

    python benchmarks/panda_settings.py --settings 100 --seed 0

10,503 simulated slides, 2,101 of them to judge; lambda = 0, with which slides of tiny lesions are
ranked best. A line per setting: slide AUC, log loss, accuracy, patch AUC and AP; then the best.
"""

import argparse

import numpy as np
from sklearn.metrics import accuracy_score, average_precision_score, log_loss, roc_auc_score

import gpmil
from gpmil.paper.cohorts import panda_like

KERNELS = ("rbf", "rbf", "matern52", "linear")
POINTS = (200, 200, 400)


def drawn(rng, width):
    """Around what is learned there."""
    variance = float(np.exp(rng.uniform(np.log(10), np.log(1000))))
    return {
        "variance": variance,
        "lengthscale": float(np.exp(rng.uniform(np.log(2.5), np.log(12))) * np.sqrt(width)),
        "mean": float(rng.uniform(-2, -0.2) * np.sqrt(1 + variance)),
        "slide_effect": float(rng.uniform(1, 3)),
        "kernel": str(rng.choice(KERNELS)),
        "n_inducing": int(rng.choice(POINTS)),
    }


def judged(data, settings):
    """The 2,101 slides and their patches."""
    model = gpmil.VGPMILPRI(coupling=0.0, random_state=0, **settings)
    model.learns_range = False
    model.fit(data.train)
    p = model.predict_proba(data.test)[:, 1]
    patch = model.predict_instances(data.test).probability
    truth = data.test.instance_labels
    return {
        "AUC": roc_auc_score(data.test.labels, p),
        "log loss": log_loss(data.test.labels, p),
        "accuracy": accuracy_score(data.test.labels, p > 0.5),
        "patch AUC": roc_auc_score(truth, patch),
        "patch AP": average_precision_score(truth, patch),
    }


def main():
    """All settings, and the best by each number."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--settings", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--share", type=float, default=1.0, help="of the 10,503 slides")
    asked = parser.parse_args()
    data, rng, found = panda_like(asked.share), np.random.default_rng(asked.seed), []
    for _ in range(asked.settings):
        settings = drawn(rng, data.train.n_features)
        found.append(judged(data, settings))
        print(", ".join(f"{k} {v:.4f}" for k, v in found[-1].items()), settings, flush=True)
    for name in found[0]:
        best = min if name == "log loss" else max
        print(f"best {name} of {len(found)}: {best(one[name] for one in found):.4f}")


if __name__ == "__main__":
    main()
