"""Simulated grades: exact in their counts, true to what is said of them."""

import numpy as np
import pytest
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import roc_auc_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from gpmil.simulate import cohort, graded_cohort


@pytest.fixture(scope="module")
def drawn():
    return graded_cohort(80, n_grades=4, n_features=32, seed=2)


def test_a_slide_has_the_grade_of_its_worst_patch(drawn):
    bags, grades, patches = drawn
    assert np.bincount(grades).tolist() == [20, 20, 20, 20]
    np.testing.assert_array_equal(np.maximum.reduceat(patches, bags.offsets[:-1]), grades)
    np.testing.assert_array_equal(bags.labels, grades > 0)
    np.testing.assert_array_equal(bags.instance_labels, patches > 0)
    kinds = [set(p[p > 0]) for p in np.split(patches, bags.offsets[1:-1])]
    two = [len(k) == 2 for k, g in zip(kinds, grades) if g > 1]
    assert max(map(len, kinds)) == 2 and 0.1 < np.mean(two) < 0.6


def test_the_same_seed_draws_the_same_slides(drawn):
    again = graded_cohort(80, n_grades=4, n_features=32, seed=2)
    np.testing.assert_array_equal(again.bags.features, drawn.bags.features)
    np.testing.assert_array_equal(again.instance_grades, drawn.instance_grades)
    other = graded_cohort(80, n_grades=4, n_features=32, seed=2, part=1)
    assert not set(other.bags.groups) & set(drawn.bags.groups)
    # benign slides are those of a cohort without grades
    plain = cohort(80, n_positive=60, n_features=32, seed=2)
    b = int(np.flatnonzero(drawn.grades == 0)[0])
    assert plain.labels[b] == 0
    np.testing.assert_array_equal(plain[b].features, drawn.bags[b].features)


def test_grades_can_be_told_apart_but_not_easily(drawn):
    other = graded_cohort(80, n_grades=4, n_features=32, seed=2, part=1)
    model = make_pipeline(StandardScaler(), LogisticRegression(max_iter=200, C=0.1))
    for low in (1, 2):
        ours, theirs = (np.isin(d.instance_grades, (low, low + 1)) for d in (drawn, other))
        model.fit(drawn.bags.features[ours], drawn.instance_grades[ours] > low)
        score = model.decision_function(other.bags.features[theirs])
        assert 0.7 < roc_auc_score(other.instance_grades[theirs] > low, score) < 0.97


def test_what_cannot_be_drawn_is_refused():
    with pytest.raises(ValueError, match="2 to 8 grades"):
        graded_cohort(20, n_grades=9)
    with pytest.raises(ValueError, match="as many bags at least"):
        graded_cohort(3, n_grades=4)
    with pytest.raises(ValueError, match="second_grade"):
        graded_cohort(20, second_grade=1.5)
