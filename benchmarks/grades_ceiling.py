"""How well simulated grades can be told by a model that is shown the grade of every patch.

python benchmarks/grades_ceiling.py --seeds 0,1,2

Multinomial regression on 32 components of all patches of 500 slides; of patches of other slides
the probabilities of their grades, out of fold for the 500. A slide is then called by its largest
expected grade, with cut points for which kappa of the 500 is largest, or by boosted trees on the
largest odds of each threshold, expected numbers of patches and the size of the slide.
"""

import argparse

import numpy as np
from sklearn.decomposition import PCA
from sklearn.ensemble import HistGradientBoostingRegressor
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import cohen_kappa_score
from sklearn.model_selection import GroupKFold

from gpmil.simulate import GradedCohort, graded_cohort

COMPONENTS, FOLDS, LARGEST = 32, 3, (0, 1, 2, 4, 8)


def kappa(y: np.ndarray, call: np.ndarray) -> float:
    """Quadratic weighted."""
    return float(cohen_kappa_score(y, call, weights="quadratic"))


def patch_probabilities(train: GradedCohort, test: GradedCohort) -> tuple[np.ndarray, np.ndarray]:
    """P(grade) of patches: of the training slides out of fold, and of the others."""
    components = PCA(COMPONENTS, whiten=True, random_state=0).fit(train.bags.features)
    x, other = (components.transform(part.bags.features) for part in (train, test))
    model, grades = LogisticRegression(max_iter=300), train.instance_grades
    own = np.empty((len(x), grades.max() + 1))
    for rest, fold in GroupKFold(FOLDS).split(x, groups=train.bags.bag_index):
        own[fold] = model.fit(x[rest], grades[rest]).predict_proba(x[fold])
    return own, model.fit(x, grades).predict_proba(other).astype(np.float64)


def largest(p: np.ndarray, cohort: GradedCohort) -> np.ndarray:
    """The largest expected grade of a slide's patches."""
    return np.maximum.reduceat(p @ np.arange(p.shape[1]), cohort.bags.offsets[:-1])


def cut_points(score: np.ndarray, y: np.ndarray) -> np.ndarray:
    """For which kappa is largest, one after the other."""
    cuts = np.quantile(score, [np.mean(y < k) for k in range(1, y.max() + 1)])
    places = np.quantile(score, np.linspace(0.02, 0.98, 97))
    for j in list(range(len(cuts))) * 3:
        tried = [np.sort([*np.delete(cuts, j), place]) for place in places]
        cuts = tried[int(np.argmax([kappa(y, np.digitize(score, one)) for one in tried]))]
    return cuts


def of_slides(p: np.ndarray, cohort: GradedCohort) -> np.ndarray:
    """What boosted trees are told of every slide."""
    rows = []
    for own in cohort.bags.split(p):
        above = own[:, ::-1].cumsum(1)[:, ::-1][:, 1:].clip(1e-9, 1 - 1e-9)
        odds = np.sort(np.log(above) - np.log1p(-above), axis=0)[::-1]
        told = [odds[list(LARGEST)].ravel(), np.log(above.sum(0)), [np.log(len(own))]]
        rows.append(np.concatenate(told))
    return np.array(rows)


def main() -> None:
    """Seed by seed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", default="0,1,2")
    for seed in (int(word) for word in parser.parse_args().seeds.split(",")):
        train, test = graded_cohort(500, seed=seed), graded_cohort(1200, seed=seed, part=2)
        own, other = patch_probabilities(train, test)
        cuts = cut_points(largest(own, train), train.grades)
        trees = HistGradientBoostingRegressor(
            max_iter=60, learning_rate=0.07, max_leaf_nodes=8, random_state=0
        ).fit(of_slides(own, train), train.grades)
        boosted = np.rint(trees.predict(of_slides(other, test))).clip(0, 3)
        by_patch = np.digitize(largest(other, test), cuts)
        found = kappa(test.grades, boosted), kappa(test.grades, by_patch)
        print("seed {}: kappa {:.3f} by trees, {:.3f} by the largest patch".format(seed, *found))


if __name__ == "__main__":
    main()
