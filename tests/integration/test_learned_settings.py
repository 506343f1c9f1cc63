"""Learned settings, flags and leave-one-bag-out on real data (skips where the data is absent)."""

from itertools import islice

import numpy as np
import pytest
from sklearn.metrics import accuracy_score, f1_score, log_loss, roc_auc_score
from sklearn.model_selection import StratifiedKFold

import gpmil
from gpmil.decide.metrics import within_bag_auc

pytestmark = pytest.mark.data


def out_of_fold(bags, n_folds, seed=0, most=None, **settings):
    """P(y = 1), patch scores and flags from the first `most` of some folds; nan of the others."""
    p, score = np.full(len(bags), np.nan), np.full(bags.n_instances, np.nan)
    flagged = np.zeros(bags.n_instances, dtype=bool)
    folds = StratifiedKFold(n_folds, shuffle=True, random_state=seed)
    for train, test in islice(folds.split(p, bags.labels), most):
        model = gpmil.VGPMILPRI(random_state=0, **settings).fit(bags[train])
        found, rows = model.predict_instances(bags[test]), np.isin(bags.bag_index, test)
        p[test] = model.predict_proba(bags[test])[:, 1]
        score[rows] = found.mean / found.std
        if found.flagged is not None:
            flagged[rows] = found.flagged
    return p, score, flagged


def test_sicapv2_with_nothing_set_by_hand(sicapv2):
    p, score, flagged = out_of_fold(sicapv2, 3, most=1, flags=True)
    seen, labels = ~np.isnan(p), sicapv2.instance_labels
    known = (labels >= 0) & ~np.isnan(score)
    assert accuracy_score(sicapv2.labels[seen], p[seen] > 0.5) >= 0.9  # one of ten may be wrong
    assert roc_auc_score(labels[known], score[known]) >= 0.97
    assert f1_score(labels[known], flagged[known]) >= 0.90


def test_colon_with_nothing_set_by_hand(colon):
    p, score, _ = out_of_fold(colon, 5, seed=1, most=1, n_components=64)
    seen, rows = ~np.isnan(p), ~np.isnan(score)
    assert roc_auc_score(colon.labels[seen], p[seen]) >= 0.93  # three of 49 pairs may be wrong
    assert log_loss(colon.labels[seen], p[seen]) <= 0.3  # of 14 images
    truth, score = colon.instance_labels[rows], score[rows]
    assert roc_auc_score(truth, score) >= 0.885
    assert within_bag_auc(truth, score, colon.bag_index[rows]) >= 0.74


def test_flags_refuse_negatives_of_one_patient(sicapv2):
    """All nine negative slides of the subset are of one patient."""
    groups = np.where(sicapv2.labels == 1, sicapv2.names, "the one negative patient")
    grouped = gpmil.Bags(
        sicapv2.features,
        sicapv2.offsets,
        labels=sicapv2.labels,
        names=sicapv2.names,
        adjacency=sicapv2.adjacency,
        groups=groups,
    )
    model = gpmil.VGPMILPRI(**gpmil.paper_settings(), flags=True, random_state=0)
    with pytest.raises(ValueError, match="the one negative patient"):
        model.fit(grouped)


@pytest.mark.parametrize(
    ("variance", "length", "mean", "coupling"),
    [(1, 1, 0, 0.5), (9, 2, -4, 0.5), (9, 2, -4, 5), (50, 4, -4, 1), (20, 3, -7, 1)],
)
def test_leave_one_bag_out_against_refits(sicapv2, variance, length, mean, coupling):
    x = sicapv2.features.astype(np.float64)
    x = (x - x.mean(0)) / x.std(0)
    bags = gpmil.Bags(x, sicapv2.offsets, labels=sicapv2.labels, adjacency=sicapv2.adjacency)
    settings = {
        "variance": variance,
        "lengthscale": length * np.sqrt(x.shape[1]),
        "mean": mean,
        "coupling": coupling,
        "standardize": False,
        "n_inducing": 80,  # 150 refits: their time grows with the square
    }
    model = gpmil.VGPMILPRI(**settings, random_state=0).fit(bags)
    quick, slow = model.leave_one_bag_out(bags), np.empty(len(bags))
    for b in range(len(bags)):
        others = np.arange(len(bags)) != b
        twin = gpmil.VGPMILPRI(**settings, inducing=model.inducing_points_).fit(bags[others])
        log_p = twin.log_proba_negative(bags[[b]])[0][0]
        slow[b] = np.log(-np.expm1(log_p)) if bags.labels[b] else log_p
    assert abs(quick.mean() - slow.mean()) < 0.01
    assert np.corrcoef(quick, slow)[0, 1] > 0.999
