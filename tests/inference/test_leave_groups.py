"""All bags of a patient left out together: against twins, finite differences and refits."""

import logging

import numpy as np
import pytest
import torch
from oracles.tuning import Twin, refitted_folds, standard_cohort
from synthetic import pri, some_inducing

from gpmil.data.folds import fair_folds
from gpmil.distributed import Local, WholeCohort, cohort
from gpmil.inference import folded_cohort, leave_groups, leave_out, leave_patients, solvers
from gpmil.models import learning

NUMBERS = 3.0, 2.0, -1.0, 0.7  # variance, length, mean, lambda
PATIENTS = np.array([0, 1, 0, 2, 3, 1, 1, 4, 5, 5])  # three bags, two, and one


@pytest.fixture(scope="module")
def bags():
    """Bags of four to six instances: two batches, with padding."""
    return standard_cohort(seed=5, n_bags=10, sizes=(4, 6)).with_groups(PATIENTS)


@pytest.fixture(scope="module")
def Z(bags):
    return some_inducing(bags, 6)


def model_of(Z, **settings):
    return pri(
        variance=3.0, lengthscale=2.0, mean=-1.0, coupling=0.7, inducing=Z, standardize=False,
        **settings,
    )  # fmt: skip


def test_groups_left_out_equal_the_twin(bags, Z, monkeypatch):
    """By one step, and by plain EP."""
    monkeypatch.setattr(leave_groups, "SMALL", np.inf)
    monkeypatch.setattr("gpmil.moments.smooth_orthant.TOLERANCE", 1e-10)
    cohort, problem, w = model_of(Z).fit(bags)._fitted_problem(bags, None)

    def left_out(groups):
        return cohort.leave_one_group_out(problem, w, True, groups, leave_out.smooth_scores)

    found, alone = left_out(PATIENTS), left_out(np.arange(10))
    expected = Twin(bags, Z, *NUMBERS).left_out_with_group(PATIENTS)
    assert np.allclose(found, expected, rtol=1e-6)
    assert np.allclose(alone, Twin(bags, Z, *NUMBERS).left_out(), rtol=1e-6)
    lonely = np.isin(PATIENTS, [2, 3, 4])
    assert np.allclose(found[lonely], alone[lonely], rtol=1e-10)
    assert (np.abs(found - alone)[~lonely] > 1e-3).all()


def test_bags_kept_between_sums_and_scores_are_those_made_again(bags, Z, monkeypatch):
    """Every number, whether all bags of a parcel find room, some or none; made once, or twice."""
    cohort, problem, w = model_of(Z).fit(bags)._fitted_problem(bags, None)
    made, plain = [], leave_groups._batches

    def counted(*args):
        made.append(1)
        return plain(*args)

    monkeypatch.setattr(leave_groups, "_batches", counted)
    kept = cohort.leave_one_group_out(problem, w, True, PATIENTS)
    assert len(made) == 1
    for room in (0, 300):
        monkeypatch.setattr(leave_groups, "KEPT", room)
        made.clear()
        assert np.array_equal(cohort.leave_one_group_out(problem, w, True, PATIENTS), kept)
        assert len(made) == 2


# --- The public method ------------------------------------------------------------------------


SHARED = {"slide_effect": 0.6, "slide_context": 1.3, "slide_context_lengthscale": 2.0}


@pytest.mark.parametrize("settings", [{}, {"solver": "newton"}, SHARED])
def test_leaving_a_patient_out_is_refitting_without_it(settings, monkeypatch):
    bags = standard_cohort(seed=2, n_bags=20, sizes=(4, 6))
    bags = bags.with_groups(np.repeat(np.arange(6), [6, 5, 4, 2, 2, 1]))
    Z = some_inducing(bags, 6)
    model = model_of(Z, **settings).fit(bags)
    quick, slow = model.leave_one_patient_out(bags), np.empty(20)
    for patient in np.unique(bags.groups):
        own = bags.groups == patient
        again = model_of(Z, **settings)
        again._context = model._context  # where slides lie, and the points, stay
        p = again.fit(bags[~own]).predict_proba(bags[own])
        slow[own] = np.log(p[np.arange(own.sum()), bags.labels[own]])
    assert abs(quick.mean() - slow.mean()) < 0.002
    assert np.corrcoef(quick, slow)[0, 1] > 0.9995
    assert np.corrcoef(model.leave_one_bag_out(bags), slow)[0, 1] < 0.99
    monkeypatch.setattr(leave_groups, "SMALL", np.inf)
    assert np.abs(model.leave_one_patient_out(bags) - slow)[:-1].max() > 0.003  # one step is short
    monkeypatch.setattr(leave_groups, "SMALL", 0.0)
    assert np.allclose(model.leave_one_patient_out(bags)[:-1], slow[:-1], atol=1e-4)
    monkeypatch.setattr(leave_patients, "TOLERANCE", 1e-8)
    assert np.allclose(model.leave_one_patient_out(bags)[:-1], slow[:-1], atol=1e-7)


def test_only_patients_that_say_much_are_left_out_to_the_end(bags, Z, monkeypatch):
    model, seen, settled = model_of(Z).fit(bags), [], leave_groups.settled
    monkeypatch.setattr(
        leave_groups, "settled", lambda *given: seen.append(given[:2]) or settled(*given)
    )

    def left_out(small):
        monkeypatch.setattr(leave_groups, "SMALL", small)
        return model.leave_one_patient_out(bags)

    every, none = left_out(0.0), left_out(np.inf)
    parcel, promised = seen[-1]
    between = float(promised.sort().values[:2].mean())
    large = np.zeros(len(bags), dtype=bool)
    large[parcel.bags] = promised.numpy()[parcel.group] > between
    assert 0 < large.sum() < len(parcel.bags)
    assert np.array_equal(left_out(between), np.where(large, every, none))


def test_sweeps_that_have_not_converged_stay_at_one_step(bags, Z, monkeypatch):
    """They end at no optimum: without a patient there is none to go to."""
    model = model_of(Z, solver="sweeps", max_iter=9).fit(bags)
    expected = model.leave_one_patient_out(bags)
    monkeypatch.setattr(leave_groups, "SMALL", 0.0)
    assert not model.converged_
    assert np.array_equal(model.leave_one_patient_out(bags), expected)


@pytest.mark.parametrize("settings", [{"slide_effect": 0.6}, {"moments": "coupled"}])
def test_the_problem_less_a_patient_is_that_of_the_others(bags, Z, settings):
    model, cpu, own = model_of(Z, **settings).fit(bags), torch.device("cpu"), PATIENTS == 1
    whole, taken, rest = (
        model._problem(model._gp(cpu), WholeCohort(some, cpu, some.labels))
        for some in (bags, bags[own], bags[~own])
    )
    found, w = leave_patients.less(whole, taken), torch.linspace(-1.0, 0.7, 6, dtype=torch.float64)
    assert torch.allclose(found.R, rest.R, rtol=0, atol=1e-10)
    for sums in (solvers.collapsed_bound, solvers.fixed_point):
        pairs = zip(sums(found, w), sums(rest, w))
        assert all(np.allclose(a, b, rtol=1e-7, atol=1e-7) for a, b in pairs)


def test_every_solver_takes_patients_out(bags, Z, monkeypatch):
    direct = model_of(Z).fit(bags).leave_one_patient_out(bags)
    coupled = model_of(Z, moments="coupled").fit(bags)
    found = coupled.leave_one_patient_out(bags)
    assert np.abs(found - direct).max() < 0.2 and not np.allclose(found, direct, atol=1e-6)
    monkeypatch.setattr(leave_groups, "SMALL", np.inf)
    one_step = coupled.leave_one_patient_out(bags)
    assert 0.001 < np.abs(one_step - found).max() < 0.5
    monkeypatch.setattr(leave_groups, "ELEMENTS", 2 * 6**2)
    assert np.allclose(coupled.leave_one_patient_out(bags), one_step)
    alone = bags.with_groups(np.arange(10))
    assert np.allclose(coupled.leave_one_patient_out(alone), coupled.leave_one_bag_out(bags))


@pytest.mark.parametrize("moments", ["diagonal", "coupled"])
@pytest.mark.parametrize("effect", [0.0, 0.6])
def test_what_groups_add_is_the_whole_condition(bags, Z, moments, effect, monkeypatch):
    """At the optimum w = sum_b H_b'gamma_b: no group's share is one of another model."""
    monkeypatch.setattr(leave_groups, "SMALL", np.inf)
    seen, without = [], leave_groups.without
    monkeypatch.setattr(
        leave_groups, "without", lambda sums, at: seen.append((sums, at)) or without(sums, at)
    )
    pairs = bags.with_groups(np.arange(10) // 2)
    model_of(Z, moments=moments, slide_effect=effect).fit(pairs).leave_one_patient_out(pairs)
    (sums, at) = seen[-1]
    assert torch.allclose(sums.n.sum(0), at.w, rtol=0, atol=1e-5)


# --- Learning ---------------------------------------------------------------------------------


def learner(Z):
    return pri(variance="auto", mean=-1.0, lengthscale=2.0, coupling=0.7, inducing=Z,
               standardize=False, tuning_budget=7, random_state=0)  # fmt: skip


def test_learning_leaves_out_patients(bags, Z, caplog):
    caplog.set_level(logging.INFO, logger="gpmil")
    model = learner(Z).fit(bags)
    assert model.loo_log_likelihood_ == pytest.approx(model.leave_one_patient_out(bags).mean())
    assert "folds left out, patients whole" in caplog.text
    best = max(model.tuning_trace_, key=lambda row: row["objective"])
    fold = fair_folds(bags.labels, PATIENTS, folded_cohort.FOLDS, 0)
    assert all(len(set(fold[p == PATIENTS])) == 1 for p in PATIENTS)
    slow = refitted_folds(model.with_settings_fixed(), bags, fold)
    # one factor there, EP here; six inducing points leave much of the process unexplained
    assert best["score"] == pytest.approx(slow.mean(), abs=0.06)
    plain = learner(Z).fit(bags.with_groups(np.arange(10)))
    assert plain.loo_log_likelihood_ == pytest.approx(plain.leave_one_bag_out(bags).mean())
    assert plain.tuning_trace_[0]["score"] != model.tuning_trace_[0]["score"]


def test_a_class_of_one_patient_is_said(bags, Z, caplog):
    one = bags.with_groups(np.where(bags.labels == 1, -1, np.arange(10)))
    model = learner(Z).fit(one)
    assert "of one patient (group): learning leaves out bags" in caplog.text
    assert model.loo_log_likelihood_ == pytest.approx(model.leave_one_bag_out(one).mean())


def test_a_subsample_has_whole_patients(monkeypatch):
    monkeypatch.setattr(learning, "MOST_BAGS", 40)
    rng = np.random.default_rng(3)
    groups = np.sort(rng.integers(0, 60, 150))
    labels = (rng.random(60) < 0.3)[groups].astype(int)
    chosen = learning.subsample(labels, 0, groups)
    inside = np.isin(groups, groups[chosen])
    assert inside.sum() == len(chosen) and 36 <= len(chosen) <= 40
    assert abs(labels[chosen].mean() - labels.mean()) < 0.06
    assert np.array_equal(chosen, learning.subsample(labels, 0, groups))
    # a patient with half of the bags does not fit: bags are drawn one by one
    giant = np.arange(150) % 2
    assert len(learning.subsample(labels, 0, giant)) == 40


def test_patients_arrive_over_partitions(bags, Z):
    parts = [bags[:4], bags[4:]]
    met = cohort.Cohort.meet(Local(parts))
    assert met.whole.groups.tolist() == [str(p) for p in PATIENTS]
    apart = learner(Z)
    one, far = learner(Z).fit(bags), apart._fit_to(met, None, torch.device("cpu"))
    assert far is None and apart.variance_ == pytest.approx(one.variance_, rel=1e-6)
    assert apart.tuning_trace_[0]["score"] == pytest.approx(one.tuning_trace_[0]["score"])
    best = max(apart.tuning_trace_, key=lambda row: row["objective"])
    assert apart.loo_log_likelihood_ == best["score"]  # that of the search


def test_some_partitions_without_patients(bags, caplog):
    parts = [bags[:4], bags[4:].with_groups(None)]
    met = cohort.Cohort.meet(Local(parts))
    assert met.whole.groups is None
    assert "1 of 2 partitions name the patients" in caplog.text


def test_the_standard_error_counts_patients():
    x = np.array([0.3, -0.1, 0.5, 0.8, 0.0])
    assert leave_groups.standard_error(x) == pytest.approx(x.std(ddof=1) / np.sqrt(5))
    assert leave_groups.standard_error(x, np.zeros(5)) == np.inf
    copies = leave_groups.standard_error(np.repeat(x, 3), np.repeat(np.arange(5), 3))
    assert copies == pytest.approx(leave_groups.standard_error(x))
