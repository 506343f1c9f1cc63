"""How good could maps and slides be? A classifier that is shown every patch label; simulated.

    python benchmarks/patch_yardstick.py --cohorts 3

The cohorts are those of `tuning_real_data.py --sets simulated1800`: 1,000 slides to learn from, 800
others to judge. Logistic regression on standardised features; of three penalties the one with the
best AP of the 800 is shown, which flatters it. A slide has the score of its largest patch.
"""

import argparse

import numpy as np
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import average_precision_score, log_loss, roc_auc_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from threadpoolctl import threadpool_limits
from tuning_real_data import TRAINED_ON, cohort

PENALTIES = (1e-3, 1e-2, 1e-1)


def largest(model, bags):
    """The largest score of every slide, as a column."""
    score = model.decision_function(bags.features)
    return np.maximum.reduceat(score, bags.offsets[:-1])[:, None]


def judged(train, test, penalty):
    """Patches and slides."""
    model = make_pipeline(StandardScaler(), LogisticRegression(C=penalty, max_iter=300))
    model.fit(train.features, train.instance_labels)
    patch = model.predict_proba(test.features)[:, 1]
    of_slides = LogisticRegression().fit(largest(model, train), train.labels)
    p = of_slides.predict_proba(largest(model, test))[:, 1]
    return {
        "patch AP": average_precision_score(test.instance_labels, patch),
        "patch AUC": roc_auc_score(test.instance_labels, patch),
        "slide AUC": roc_auc_score(test.labels, p),
        "log loss": log_loss(test.labels, p),
    }


def main():
    """A line per cohort, and the mean."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cohorts", type=int, default=3)
    rows = []
    for seed in range(parser.parse_args().cohorts):
        bags = cohort(None, "simulated1800", seed)
        train, test = bags[:TRAINED_ON], bags[TRAINED_ON:]
        with threadpool_limits(1):
            every = [judged(train, test, penalty) for penalty in PENALTIES]
        rows.append(max(every, key=lambda found: found["patch AP"]))
        print(f"cohort {seed}:", ", ".join(f"{k} {v:.3f}" for k, v in rows[-1].items()), flush=True)
    print("mean:", ", ".join(f"{k} {np.mean([r[k] for r in rows]):.3f}" for k in rows[0]))


if __name__ == "__main__":
    main()
