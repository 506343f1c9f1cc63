"""Simulated grades: OrdinalMIL on slides of other patients, kappa, calibration per threshold, maps.

python benchmarks/grades_simulated.py --train 500 --test 300 --more 1200

`--components 32` are PCA scores, of all models; `--context` a slide context, of OrdinalMIL alone.
`--more` slides of still other patients are judged, too: 300 tell no calibration error below .05.
"""

import argparse
import logging
import time

import numpy as np
from sklearn.metrics import roc_auc_score

import gpmil
from gpmil.metrics import confusion, grade_metrics
from gpmil.models import OrdinalAttentionMIL, OrdinalMeanPoolMIL
from gpmil.simulate import GradedCohort, graded_cohort


def main() -> None:
    """Fit to one part of a population, judge on another."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--train", type=int, default=500)
    parser.add_argument("--test", type=int, default=300)
    parser.add_argument("--grades", type=int, default=4)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--budget", type=int, default=40)
    parser.add_argument("--components", type=int, default=None)
    parser.add_argument("--context", action="store_true")
    parser.add_argument("--more", type=int, default=0)
    asked = parser.parse_args()
    logging.getLogger("gpmil").setLevel(logging.ERROR)
    train = graded_cohort(asked.train, asked.grades, seed=asked.seed, part=0)
    test = graded_cohort(asked.test, asked.grades, seed=asked.seed, part=1)
    start = time.perf_counter()
    shared = {"n_components": asked.components, "random_state": 0}
    own = shared | {"slide_context": "auto" if asked.context else 0.0}
    model = gpmil.OrdinalMIL(calibrated=True, tuning_budget=asked.budget, **own)
    model.fit(train.bags, train.grades)
    fitted = time.perf_counter() - start
    p = model.predict_proba(test.bags)
    took = time.perf_counter() - start - fitted
    for name, estimate in grade_metrics(test.grades, p, groups=test.bags.groups).items():
        print(f"{name}: {estimate}")
    for cost in ("kappa", "mode"):
        model.cost = cost
        other = grade_metrics(
            test.grades, p, decision=model.decided(p), groups=test.bags.groups, n_bootstrap=200
        )
        print(f"called for {cost}: kappa {other['kappa']}")
    model.cost = "quadratic"
    print(confusion(test.grades, model.predict(test.bags), model.classes_))
    found = model.predict_instances(test.bags)
    for k in range(1, asked.grades):
        area = roc_auc_score(test.instance_grades >= k, found.grade_probability[:, k:].sum(1))
        print(f"patches, grade {k} or more: AUC {area:.3f}")
    print(
        f"cut points {model.cut_points_.round(2)}, variance {model.variance_:.3g}, effect "
        f"{model.slide_effect_:.2g}, coupling {model.coupling_:.2g}; left out "
        f"{model.loo_log_likelihood_:.4f}; fit {fitted:.0f} s, predict {took:.0f} s"
    )
    print(f"guessing: log loss {np.log(asked.grades):.3f}")
    if asked.more:
        more = graded_cohort(asked.more, asked.grades, seed=asked.seed, part=2)
        print(f"{asked.more} more:", asked_of(more, model.predict_proba(more.bags)))
    for network in (OrdinalAttentionMIL, OrdinalMeanPoolMIL):
        other = network(**shared).fit(train.bags, train.grades)
        print(network.__name__, asked_of(test, other.predict_proba(test.bags)))
        if asked.more:
            more = graded_cohort(asked.more, asked.grades, seed=asked.seed, part=2)
            print(f"  {asked.more} more:", asked_of(more, other.predict_proba(more.bags)))


def asked_of(test: GradedCohort, p: np.ndarray) -> str:
    """What is compared."""
    found = grade_metrics(test.grades, p, groups=test.bags.groups)
    return ", ".join(f"{name} {estimate}" for name, estimate in found.items())


if __name__ == "__main__":
    main()
