"""Settings learned from folds left out: the objective, its gradient, the search, the models."""

import logging
import math
from dataclasses import replace

import gpytorch
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from oracles.model import relative_error
from oracles.tuning import Twin, derivative_free, difference, refitted_folds, standard_cohort
from scipy.special import log_ndtr, ndtr
from scipy.stats import norm
from synthetic import numbers_for, some_inducing

import gpmil
from gpmil import VGPMILPR, VGPMILPRI, Bags
from gpmil.data.folds import fair_folds
from gpmil.distributed import WholeCohort
from gpmil.fast import lanes
from gpmil.inference import at_settings, folded_cohort, leave_out, objective, tuning
from gpmil.inference import solvers as inference
from gpmil.inference.at_settings import Settings
from gpmil.inference.folded_cohort import Cohort, SlidesInContext
from gpmil.inference.tuning import CENTRE, EFFECT_CENTRE, HIGHEST, LOWEST, STARTS, Space
from gpmil.models import learning
from gpmil.process import features, kernels

KERNELS = ["rbf", "matern32", "matern52", "linear"]
POINTS = [Settings(3.0, 2.0, -1.0, 0.7), Settings(20.0, 3.0, -6.0, 1.3)]
LINEAR_POINT = Settings(3.0, 2.5, -0.8, 0.4)
POINT_OF = {"rbf": POINTS[0], "matern32": POINTS[1], "matern52": POINTS[0], "linear": LINEAR_POINT}
LOGGER = "gpmil"


@pytest.fixture(scope="module")
def bags():
    """Bags of four to six instances, five of each class: two batches, with padding."""
    return standard_cohort(seed=5, n_bags=10, sizes=(4, 6))


@pytest.fixture(scope="module")
def mixed():
    """Bags of one to nine instances: several batches."""
    return standard_cohort(seed=5, n_bags=12, sizes=(1, 9))


@pytest.fixture(scope="module")
def Z(bags):
    return some_inducing(bags, 6)


def cohort_of(bags, Z, kernel="rbf"):
    inputs = torch.from_numpy(bags.features.astype(float))
    positive = bags.labels == 1
    Z = torch.from_numpy(Z)
    return Cohort(inputs, Z, bags.adjacency, bags.offsets, positive, kernel, thirds(bags))


def thirds(bags):
    """Folds of two classes, of no common size."""
    return np.arange(len(bags)) * 2 % 5 % 3


@pytest.fixture(scope="module")
def cohort(bags, Z):
    return cohort_of(bags, Z)


def model_of(Z, numbers=None, cls=VGPMILPRI, **others):
    """A model on features that are standardised already."""
    fixed = {} if numbers is None else numbers._asdict()
    given = {"inducing": Z, "standardize": False, "device": "cpu", "random_state": 0}
    return cls(**(given | fixed | others))


def learner(Z, cls=VGPMILPRI, **others):
    """A model that learns with little work: three of the starts."""
    return model_of(Z, cls=cls, **({"tuning_budget": 3} | others))


# --- The objective ----------------------------------------------------------------------------


@pytest.mark.parametrize("kernel", KERNELS)
def test_kernels_equal_those_of_the_model(bags, Z, kernel):
    x, z = torch.from_numpy(bags.features.copy()), torch.from_numpy(Z)
    formula = kernels.formula_of(kernel)
    length = torch.tensor(1.7, dtype=torch.float64)
    model = kernels.Kernel(kernel, 2.3, 1.7)
    padded = torch.stack([x[:5], x[3:8], x[10:15]])
    for a, b in ((x, z), (z, z), (padded, padded)):
        assert relative_error(2.3 * formula.value(formula.pairs(a, b), length), model(a, b)) < 1e-12


def test_a_kernel_object_is_taken_as_it_is(bags, Z):
    kernel = kernel_object()
    formula = kernels.formula_of(kernel)
    x, z = torch.from_numpy(bags.features.copy()), torch.from_numpy(Z)
    expected = kernels.Kernel(kernel, 1.0, 1.0)(x, z)
    assert torch.equal(formula.value(formula.pairs(x, z), torch.tensor(7.0)), expected)


def kernel_object():
    kernel = gpytorch.kernels.ScaleKernel(gpytorch.kernels.RBFKernel()).double()
    kernel.outputscale = torch.tensor(8.0, dtype=torch.float64)
    kernel.base_kernel.lengthscale = torch.tensor(2.6, dtype=torch.float64)
    return kernel


@pytest.mark.parametrize("kernel", [*KERNELS, "object"])
def test_the_fit_is_that_of_the_model(bags, Z, kernel):
    own = kernel == "object"
    name = kernel_object() if own else kernel
    point = Settings(1.0, 1.0, -2.0, 0.8) if own else POINT_OF[kernel]
    cohort = cohort_of(bags, Z, name)
    model = model_of(Z, point, kernel=name).fit(bags[cohort.fold != 1])
    found = objective.fit(problems(cohort, point), prior_at(cohort, point), tolerance=1e-9)
    # a linear kernel has rank four here: the jitter carries the other two directions
    tolerance = 1e-5 if kernel == "linear" else 1e-8
    assert relative_error(found.w[1], model.whitened_mean_) < tolerance
    R = torch.linalg.inv(found.R_inverse[1])
    assert relative_error(R, model.whitened_precision_) < tolerance


@pytest.mark.parametrize("tau", [0.0, 0.9])
def test_folds_fitted_one_from_the_other_end_where_each_ends_from_zero(mixed, Z, tau):
    cohort, point = cohort_of(mixed, Z), POINTS[1]._replace(slide_effect=tau)
    posed = problems(cohort, point)
    found = objective.fit(posed, prior_at(cohort, point))
    assert len(posed) == 3
    for problem, w in zip(posed, found.w, strict=True):
        assert relative_error(w, inference.maximise(problem, 100, 1e-9).w) < 1e-5


def test_rows_are_those_of_their_folds(mixed, Z):
    """In any order, and in the one in which they are split; the adjoint is that of slices."""
    cohort = cohort_of(mixed, Z)
    x = torch.from_numpy(mixed.features.astype(float))
    for own, rows in ((cohort, x), (cohort.in_folds, cohort.in_folds.inputs)):
        split = rows.clone().requires_grad_()
        found = own.by_fold(split)
        for part, fold in zip(found, own.folds, strict=True):
            assert torch.equal(part, rows[fold.rows])
        own.placed([(k + 1.5) * part.sum(1) for k, part in enumerate(found)]).sum().backward()
        of_row = torch.from_numpy(own.fold)[own.row] + 1.5
        assert torch.equal(split.grad, of_row[:, None].expand_as(rows).double())


def test_each_start_begins_with_the_fits_of_the_nearest_before(cohort, monkeypatch):
    """In widths of the prior; a start without a number is nobody's neighbour."""
    _, fits = objective.value(cohort, POINTS[0])
    began = []

    def left_out(_cohort, _settings, start, _tolerance):
        began.append(None if start is None else int(start.w[0, 0]))
        if len(began) == 5:
            raise torch.linalg.LinAlgError
        return torch.zeros(cohort.n_bags), fits._replace(w=fits.w * 0 + len(began) - 1)

    monkeypatch.setattr(tuning, "left_out", left_out)
    found = tuning.Search(cohort, Space({}, 2.0), 40)
    places = np.array([0.0, 9.0, 2.0, 8.0, 2.5, 2.4, 0.4]) / 10
    scores = tuning._values(found, np.outer(places, found.space.widths))
    assert [score == tuning.FAILED for score in scores] == [False] * 4 + [True] + [False] * 2
    assert began == [None, 0, 0, 1, 2, 2, 0]


def prior_at(cohort, point):
    return objective.prior_of(cohort, at_settings.theta_of(point, "cpu"))


def problems(cohort, point):
    cohort, theta = cohort.in_folds, at_settings.theta_of(point, "cpu")
    return objective.problems(cohort, theta, at_settings.features(cohort, theta))


@pytest.mark.parametrize("strength", [0.0, 0.8])
def test_every_sum_without_a_fold_is_that_of_the_model(mixed, Z, strength):
    point, made = POINTS[0]._replace(coupling=strength), cohort_of(mixed, Z)
    rest, cpu = mixed[made.fold != 2], torch.device("cpu")
    model = model_of(Z, point).fit(rest)
    expected = model._problem(model._gp(cpu), WholeCohort(rest, cpu, rest.labels))
    found = problems(made, point)[2]
    assert found.n_instances == expected.n_instances
    assert relative_error(found.R, expected.R) < 1e-12
    w = 0.7 * torch.from_numpy(model.whitened_mean_)
    for terms in (inference.rise, inference.collapsed_bound):
        for a, b in zip(terms(found, w), terms(expected, w), strict=True):
            assert relative_error(torch.as_tensor(a), torch.as_tensor(b)) < 1e-9


@pytest.mark.parametrize("kernel", ["rbf", "matern32"])
def test_the_value_equals_the_naive_twin(mixed, Z, kernel):
    cohort, point = cohort_of(mixed, Z, kernel), POINT_OF[kernel]
    found, _ = objective.left_out(cohort, point)
    expected = Twin(mixed, Z, *point[:4], name=kernel).left_out_of_folds(cohort.fold)
    assert np.allclose(found.numpy(), expected, atol=1e-5)
    assert objective.value(cohort, point)[0] == pytest.approx(expected.mean(), abs=1e-5)


@pytest.mark.parametrize("kernel", KERNELS)
def test_the_value_is_near_that_of_refits(bags, Z, kernel):
    """One factor here, EP with its correction and the sampled tail there."""
    many = some_inducing(bags, 40)  # explain nearly all: the residual counts by its diagonal
    found, _ = objective.value(cohort_of(bags, many, kernel), POINT_OF[kernel])
    model = model_of(many, POINT_OF[kernel], kernel=kernel)
    assert abs(found - refitted_folds(model, bags, thirds(bags)).mean()) < 0.03


def test_folds_side_by_side_end_where_one_after_the_other_does(mixed, Z, monkeypatch):
    cohort, point = cohort_of(mixed, Z), Settings(9.0, 3.0, -2.0, 0.8, 1.0)
    alone = objective.gradient(cohort, point)
    monkeypatch.setattr(lanes, "_asked_for", lambda: 3)
    found = objective.gradient(cohort, point)
    assert torch.equal(found.fits.w, alone.fits.w) and torch.equal(found.scores, alone.scores)
    assert found.settings == alone.settings


@pytest.mark.parametrize("kernel", ["rbf", "object"])
def test_a_value_leaves_what_is_kept_as_it_is(bags, Z, kernel):
    cohort = cohort_of(bags, Z, kernel_object() if kernel == "object" else kernel).in_folds
    kept, point = cohort.pairs.clone(), Settings(1.0, 1.0, -2.0, 0.8)
    found = objective.left_out(cohort, point)[0]
    assert torch.equal(cohort.pairs, kept)
    assert torch.allclose(found, objective.gradient(cohort, point).scores, rtol=1e-9)


def test_a_warm_start_changes_the_way_and_not_the_end(cohort):
    _, fits = objective.value(cohort, POINTS[1])
    cold, warm = objective.value(cohort, POINTS[0]), objective.value(cohort, POINTS[0], fits)
    assert warm[0] == pytest.approx(cold[0], abs=1e-6)
    assert relative_error(warm[1].w, cold[1].w) < 1e-5


@pytest.mark.parametrize("residual", [objective.LOST, 0.5 * objective.LOST])
def test_a_start_that_leads_nowhere_is_given_up(cohort, recwarn, monkeypatch, residual):
    """Fits that are lost are begun again from zero, others are taken as they are; not a word."""
    cold = objective.value(cohort, POINTS[0])
    _, fits = objective.value(cohort, POINTS[1])
    ends = inference.Solution(cold[1].w[0] + 1.0, 9, False, residual, [0.0], fits.J[0])
    monkeypatch.setattr(objective.nearby, "maximum", lambda *_: ends)
    found = objective.value(cohort, POINTS[0], fits)
    if residual >= objective.LOST:
        assert found[0] == pytest.approx(cold[0], abs=1e-6)
    else:
        assert torch.equal(found[1].w, ends.w.expand_as(found[1].w))
    assert not recwarn.list


def test_fits_are_carried_to_other_inducing_points(bags, Z, cohort):
    """The first to itself as it is; to points that have the old ones among them, to rounding."""
    _, fits = objective.value(cohort, POINTS[0])
    same = objective.carried(fits, cohort, cohort_of(bags, Z), POINTS[0])
    assert relative_error(same.w, fits.w[:1]) < 1e-4  # the jitter
    more = cohort_of(bags, np.concatenate([Z, bags.features[3:5] + 0.1]))
    found = objective.carried(fits, cohort, more, POINTS[0])
    mu = [at_settings.features(c, at_settings.theta_of(POINTS[0], "cpu")).H for c in (cohort, more)]
    assert relative_error(mu[1] @ found.w[0], mu[0] @ fits.w[0]) < 0.05
    assert objective.value(more, POINTS[0], found)[0] == pytest.approx(
        objective.value(more, POINTS[0])[0], abs=1e-6
    )


def test_some_bags_keep_their_folds(mixed, Z):
    cohort = cohort_of(mixed, Z)
    some = cohort.some(np.array([1, 4, 5, 7, 8, 10]), np.array([0, 2, 5]))
    again = cohort_of(mixed[[1, 4, 5, 7, 8, 10]], Z[[0, 2, 5]])
    again = replace(again, fold=np.unique(cohort.fold[[1, 4, 5, 7, 8, 10]], return_inverse=True)[1])
    assert objective.value(some, POINTS[0])[0] == objective.value(again, POINTS[0])[0]


def test_a_pilot_has_both_classes_and_a_large_cohort_fewer_points(bags, Z, monkeypatch):
    every = cohort_of(bags, Z)
    assert tuning.fewer_points(every, 0) is every and tuning.pilot(every, 0) is every
    monkeypatch.setattr(tuning, "SMALL", 0)
    monkeypatch.setattr(tuning, "PILOT_BAGS", 4)
    monkeypatch.setattr(tuning, "PILOT_ROWS", 20)
    monkeypatch.setattr(tuning, "POINTS", 3)
    cohort = tuning.fewer_points(every, 0)
    assert len(cohort.inducing) == 3 and cohort.n_bags == len(bags)
    small = tuning.pilot(cohort, 0)
    assert len(small.inducing) == 3 and 4 <= small.n_bags < len(bags)
    assert 0 < small.positive.sum() < small.n_bags
    found = tuning.search(small, Space({}, 2.0), 10)
    whole = tuning.on_all(found, cohort)
    assert whole.cohort is cohort and len(whole.trace) == 1
    assert whole.trace[0].settings == pytest.approx(found.best.settings)
    judged = whole.best.objective
    tuning.finished(whole)
    assert 2 <= len(whole.trace) <= 2 + tuning.MOST_LAST and whole.best.objective >= judged


def test_a_pilot_with_a_context_has_more_bags_and_its_end_is_judged_where_it_is(monkeypatch):
    bags = standard_cohort(seed=5, n_bags=30, sizes=(2, 4))
    slides = torch.from_numpy(np.random.default_rng(8).normal(size=(len(bags), 4)))
    every = cohort_of(bags, some_inducing(bags, 6))
    every = replace(every, context=SlidesInContext(slides, slides[[0, 3, 7]]))
    monkeypatch.setattr(tuning, "SMALL", 0)
    monkeypatch.setattr(tuning, "PILOT_BAGS", 2)
    monkeypatch.setattr(tuning, "PILOT_ROWS", 5)
    monkeypatch.setattr(tuning, "CONTEXT_BAGS", 12)
    small = tuning.pilot(every, 0)
    assert tuning.pilot(replace(every, context=None), 0).n_bags < 12 <= small.n_bags < len(bags)
    found = tuning.search(small, Space({}, 2.0, with_effect=True, with_context=True), 12)
    whole = tuning.on_all(found, every)
    assert whole.trace[0].settings == pytest.approx(found.best.settings)


def test_the_last_value_of_a_budget_comes_without_its_gradient(bags, Z, monkeypatch):
    asked = []
    whole = objective.gradient
    monkeypatch.setattr(tuning, "gradient", lambda *a: asked.append(a[1]) or whole(*a))
    for budget, gradients in ((8, 1), (10, 1)):  # six starts; two follow a gradient in the second
        asked.clear()
        found = tuning.search(cohort_of(bags, Z), Space({}, 2.0), budget)
        assert len(asked) == gradients and len(found.trace) <= 6 + gradients + budget - 8


def test_another_kernel_keeps_nothing_of_the_first(bags, Z):
    first = cohort_of(bags, Z, "linear")
    objective.value(first, LINEAR_POINT)
    moved = objective.value(first.with_kernel("rbf"), POINTS[0])[0]
    assert moved == objective.value(cohort_of(bags, Z), POINTS[0])[0]


# --- The gradient -----------------------------------------------------------------------------


def slopes(cohort, point, share=0.02, which=range(4)):
    """The derivatives in the settings by differences of the value."""
    out = []
    for i in which:

        def moved(x, i=i):
            return objective.value(cohort, Settings(*(*point[:i], float(x), *point[i + 1 :])))[0]

        out.append(difference(moved, point[i], share * max(abs(point[i]), 0.2)))
    return np.array(out)


@pytest.mark.parametrize("kernel", KERNELS)
def test_the_gradient_equals_finite_differences(bags, Z, kernel, monkeypatch):
    monkeypatch.setattr(objective, "TOLERANCE", 1e-10)
    cohort, point = cohort_of(bags, Z, kernel), POINT_OF[kernel]
    scores, found, fits, _ = objective.gradient(cohort, point)
    expected = slopes(cohort, point)
    assert scores.numpy() == pytest.approx(objective.left_out(cohort, point)[0].numpy(), abs=1e-9)
    assert relative_error(fits.w, objective.value(cohort, point)[1].w) < 1e-9
    assert np.abs(expected).min() > 0
    assert np.allclose(found[:4], expected, rtol=1e-6, atol=1e-6 * np.abs(expected).max())


def test_the_gradient_at_the_usual_tolerance(mixed, Z):
    """With bags of one instance among them."""
    cohort = cohort_of(mixed, Z)
    found = objective.gradient(cohort, POINTS[0])[1]
    assert relative_error(found[3:4], slopes(cohort, POINTS[0], which=(3,))) < 1e-4


@pytest.mark.parametrize("label", [0, 1])
def test_the_gradient_where_all_bags_are_of_one_class(bags, Z, label):
    one_class = cohort_of(bags[bags.labels == label], Z)
    found = objective.gradient(one_class, POINTS[0])[1]
    assert relative_error(found[2:4], slopes(one_class, POINTS[0], 0.05, which=(2, 3))) < 1e-5


def test_the_gradient_in_a_kernel_object_moves_mean_and_coupling_alone(bags, Z):
    cohort, point = cohort_of(bags, Z, kernel_object()), Settings(1.0, 1.0, -2.0, 0.8)
    found = objective.gradient(cohort, point)[1]
    assert found.lengthscale == 0
    assert relative_error(found[2:4], slopes(cohort, point, 0.05, which=(2, 3))) < 1e-5


def test_the_gradient_under_no_grad(cohort):
    """A fit runs under torch.no_grad."""
    with torch.no_grad():
        assert objective.gradient(cohort, POINTS[0])[1] == objective.gradient(cohort, POINTS[0])[1]
    assert objective.gradient(cohort, POINTS[0])[1].coupling != 0


# --- A weight for every column ----------------------------------------------------------------

WEIGHTS = np.array([0.6, 1.9, 1.1, 0.8])


def weighted(bags, Z, weights):
    """The same model with the weights in the features."""
    moved = Bags.from_arrays(
        bags.split(bags.features * weights),
        labels=bags.labels,
        coords=bags.split(bags.coords),
        step=7.0,
    )
    return cohort_of(moved, Z * weights)


@pytest.mark.parametrize("kernel", ["rbf", "matern32"])
def test_weights_are_a_scale_of_the_columns(bags, Z, kernel):
    point = POINT_OF[kernel]
    inside = cohort_of(bags, Z, kernel)
    found = objective.gradient(inside, point, weights=WEIGHTS)
    expected = objective.gradient(weighted(bags, Z, WEIGHTS).with_kernel(kernel), point)
    assert found.score == pytest.approx(expected.score, abs=1e-9)
    assert relative_error(found.settings, expected.settings) < 1e-7


def test_the_gradient_in_the_weights(bags, Z, monkeypatch):
    monkeypatch.setattr(objective, "TOLERANCE", 1e-10)
    inside = cohort_of(bags, Z)
    found = objective.gradient(inside, POINTS[0], weights=WEIGHTS).weights
    for i in (0, 2):

        def moved(x, i=i):
            weights = np.where(np.arange(4) == i, float(x), WEIGHTS)
            return objective.value(weighted(bags, Z, weights), POINTS[0])[0]

        assert found[i] == pytest.approx(difference(moved, WEIGHTS[i], 0.02), rel=1e-6)


def test_relevance_climbs_and_keeps_the_common_length(cohort):
    weights, score = tuning.relevance(cohort, POINTS[0], 12)
    assert np.log(weights).sum() == pytest.approx(0, abs=1e-9) and weights.min() > 0
    assert score > objective.value(cohort, POINTS[0])[0]


@pytest.mark.parametrize("kernel", ["matern32", "matern52"])
def test_weights_of_a_matern_kernel_have_a_gradient(bags, Z, kernel):
    inside = cohort_of(bags, Z, kernel)
    found = objective.gradient(inside, POINT_OF[kernel], weights=WEIGHTS).weights

    def moved(x):
        weights = np.array([float(x), *WEIGHTS[1:]])
        return objective.value(weighted(bags, Z, weights).with_kernel(kernel), POINT_OF[kernel])[0]

    assert found[0] == pytest.approx(difference(moved, WEIGHTS[0], 0.02), rel=1e-4)


# --- Far tails --------------------------------------------------------------------------------


def test_the_gradient_where_every_patch_is_far_below_zero(mixed, Z):
    cohort = cohort_of(mixed, Z)
    point = Settings(400.0, 3.0, -40.0, 2.0)  # c / sqrt(1 + variance) = -2
    found = objective.gradient(cohort, point)[1]
    assert np.isfinite(found).all()
    assert relative_error(found[2:4], slopes(cohort, point, 0.001, which=(2, 3))) < 1e-5


@pytest.mark.parametrize("shift", [-90.0, -12.0, 60.0])
def test_the_curvature_has_derivatives_in_both_tails(shift):
    for positive in (False, True):
        mu = torch.tensor([[0.3, -0.6, 0.1]], dtype=torch.float64) + shift
        mu.requires_grad_()
        eye = torch.eye(3, dtype=torch.float64)[None]
        mask = torch.ones(1, 3, dtype=torch.bool)
        bag = leave_out.Bag(mask, torch.tensor([positive]), eye, eye, 0.7 * eye, eye)
        bent = leave_out.curvature(bag, mu)
        (bent.gamma.sum() + bent.times(eye).sum()).backward()
        assert bool(torch.isfinite(mu.grad).all())


# --- Limits -----------------------------------------------------------------------------------


def without_edges(bags):
    return Bags.from_arrays(bags.split(bags.features), labels=bags.labels)


def test_no_coupling_is_no_edges(bags, Z, cohort):
    bare, point = cohort_of(without_edges(bags), Z), POINTS[0]
    expected = objective.value(cohort, point._replace(coupling=0.0))[0]
    for coupling in (0.0, 0.7, 40.0):
        found = objective.gradient(bare, point._replace(coupling=coupling))
        assert found.score == pytest.approx(expected, abs=1e-9) and found.settings.coupling == 0


def test_without_variance_only_the_sizes_count(bags, Z):
    bare, c = cohort_of(without_edges(bags), Z), -0.8
    log_q = bags.sizes * log_ndtr(-c)
    expected = np.where(bags.labels == 1, np.log(-np.expm1(log_q)), log_q).mean()
    found = objective.gradient(bare, Settings(1e-8, 2.0, c, 0.0))
    assert found.score == pytest.approx(expected, abs=1e-3)  # the least of loadings
    # d/dc: each patch adds -phi(c) / Phi(-c), a positive bag -q / (1 - q) times that
    odds = np.where(bags.labels == 1, -np.exp(log_q) / -np.expm1(log_q), 1.0)
    expected = (-odds * bags.sizes * norm.pdf(c) / norm.cdf(-c)).mean()
    assert found.settings.mean == pytest.approx(expected, rel=1e-3)


def test_one_instance_a_bag_is_exact(Z):
    one = standard_cohort(seed=3, n_bags=14, sizes=(1, 1))
    value, _ = objective.value(cohort_of(one, Z), POINTS[0])
    slow = refitted_folds(model_of(Z, POINTS[0]), one, thirds(one))
    assert value == pytest.approx(slow.mean(), abs=1e-8)


def test_inputs_and_length_scale_together(bags, Z, cohort):
    """Twice the inputs and twice the length scale are the same model."""
    twice = cohort_of(Bags.from_arrays(
        bags.split(2 * bags.features), labels=bags.labels, coords=bags.split(bags.coords), step=7.0
    ), 2 * Z)  # fmt: skip
    point = POINTS[0]
    found = objective.gradient(twice, point._replace(lengthscale=2 * point.lengthscale))
    expected = objective.gradient(cohort, point)
    assert found.score == pytest.approx(expected.score, abs=1e-7)
    slopes = (found.settings.lengthscale, expected.settings.lengthscale)
    assert 2 * slopes[0] == pytest.approx(slopes[1], rel=1e-4)


# --- The space --------------------------------------------------------------------------------


def inside(k):
    return st.floats(LOWEST[k], HIGHEST[k])


@given(start=st.tuples(*map(inside, range(4))), root=st.floats(1.0, 30.0))
@hypothesis_settings(max_examples=40, deadline=None)
def test_from_z_to_settings_and_back(start, root):
    space = Space({}, root)
    assert space.learned == ("variance", "lengthscale", "mean", "coupling")
    variance, length, level, strength = start
    found = Settings(*space.settings(torch.from_numpy(space.z(start))).tolist())
    expected = Settings(variance, root * length, level * math.sqrt(1 + variance), strength)
    assert np.allclose(found, expected, rtol=1e-12)
    back = (
        found.variance,
        found.lengthscale / root,
        found.mean / math.sqrt(1 + found.variance),
        found.coupling,
    )
    assert np.allclose(space.z(back), space.z(start), rtol=1e-9, atol=1e-12)


PLACED = Settings(30.0, 20.0, -3.0, 0.7, 0.9, 5.0, 12.0)


@pytest.mark.parametrize("fixed", [{}, {"coupling": 0.0}, {"slide_context_lengthscale": 7.0}])
def test_the_place_of_settings_with_an_effect_and_a_context(fixed):
    """A climb that goes on from the end of another begins there, the context's length included."""
    space = Space(fixed, 8.0, with_effect=True, with_context=True)
    found = Settings(*space.settings(torch.from_numpy(space.place(PLACED))).tolist())
    assert np.allclose(found, PLACED._replace(**fixed), rtol=1e-12)


FIXED = [
    {"variance": 5.0},
    {"mean": -2.2},
    {"coupling": 0.0},
    {"lengthscale": 3.3, "mean": 0.4},
    {"variance": 2.0, "lengthscale": 3.3, "coupling": 0.0},
]


@pytest.mark.parametrize("fixed", FIXED)
def test_what_is_fixed_stays(fixed):
    space = Space(fixed, 2.0)
    assert set(space.learned) == {"variance", "lengthscale", "mean", "coupling"} - set(fixed)
    for start in STARTS:
        found = Settings(*space.settings(torch.from_numpy(space.z(start))).tolist())
        for name, value in fixed.items():
            assert getattr(found, name) == value
        if "mean" not in fixed:
            assert found.mean == pytest.approx(start[2] * math.sqrt(1 + found.variance))


def test_everything_fixed_leaves_nothing():
    space = Space({"variance": 5.0, "lengthscale": 2.0, "mean": -1.0, "coupling": 0.3}, 2.0)
    assert space.learned == () and len(space.z(CENTRE)) == 0
    empty = torch.from_numpy(space.z(CENTRE))
    assert space.settings(empty).tolist() == [5.0, 2.0, -1.0, 0.3, 0.0, 0.0, 1.0]
    assert float(space.log_prior(empty)) == 0


@pytest.mark.parametrize("fixed", [{}, {"variance": 7.0}])
def test_a_balanced_mean_follows_the_variance(fixed):
    space = Space(fixed, 2.0, level=-1.7)
    assert "mean" not in space.learned
    for start in STARTS:
        found = Settings(*space.settings(torch.from_numpy(space.z(start))).tolist())
        assert found.mean == pytest.approx(-1.7 * math.sqrt(1 + found.variance))


def test_the_prior_is_highest_at_its_centre():
    space = Space({"coupling": 1.0}, 2.0)
    assert float(space.log_prior(torch.from_numpy(space.z(CENTRE)))) == 0
    one_width = (CENTRE[0] * math.exp(tuning.WIDTH[0]), *CENTRE[1:])
    assert float(space.log_prior(torch.from_numpy(space.z(one_width)))) == pytest.approx(-0.5)
    for start in STARTS[1:]:
        assert float(space.log_prior(torch.from_numpy(space.z(start)))) < 0


def test_with_a_context_the_other_settings_are_held_more_closely():
    plain = Space({}, 2.0, with_effect=True)
    both = Space({}, 2.0, with_effect=True, with_context=True)
    assert (both.widths[:4] < plain.widths[:4]).all()
    assert both.widths[4] == plain.widths[4] and len(both.widths) == 7
    # a context whose bags have no effect has the wide prior around the old centre
    alone = Space({"slide_effect": 0.0}, 2.0, with_effect=True, with_context=True)
    assert alone.centre == CENTRE and (alone.widths[:4] == plain.widths[:4]).all()
    step = np.array([1.0, 0, 0, 0, 0, 0, 0]) * both.widths[0]
    z = torch.from_numpy(both.z(tuning.WITH_CONTEXT_CENTRE) + step)
    assert float(both.log_prior(z)) == pytest.approx(-0.5)


def test_every_start_is_within_the_bounds():
    for start in STARTS:
        assert all(low < s < high for low, s, high in zip(LOWEST, start, HIGHEST))


@pytest.mark.parametrize(
    ("fixed", "level"),
    [({}, None), ({"lengthscale": 5.0, "coupling": 0.4}, -1.2)],
)
def test_the_gradient_in_z(cohort, fixed, level, monkeypatch):
    """Through the settings, the mean that moves with the variance, and the prior."""
    monkeypatch.setattr(objective, "TOLERANCE", 1e-10)
    monkeypatch.setattr(tuning, "ROUGH", 1e-10)
    space = Space(fixed, 2.0, level)
    search = tuning.Search(cohort, space, budget=1000)
    z = space.z((6.0, 1.4, -0.9, 0.6))
    value, found = search.slopes(z)
    assert value == pytest.approx(search.value(z), abs=1e-8)
    expected = [
        difference(lambda s, e=e: search.value(z + s * e), 0.0, 0.05) for e in np.eye(len(z))
    ]
    assert relative_error(found, np.array(expected)) < 1e-6
    trial = search.trace[0]
    prior = float(space.log_prior(torch.from_numpy(z))) / len(cohort.positive)
    assert prior < 0 and trial.objective == pytest.approx(trial.score + prior, abs=1e-12)


# --- The search -------------------------------------------------------------------------------

METHODS = [tuning.search, derivative_free]


@pytest.fixture(scope="module", params=METHODS)
def searched(request, bags, Z):
    """All four learned, by either method."""
    return request.param(cohort_of(bags, Z), Space({}, 2.0), 20)


def coordinates(trial):
    """What the bounds are about: variance, length / sqrt d, c / sqrt(1 + variance), lambda."""
    s = trial.settings
    return np.array(
        [s.variance, s.lengthscale / 2.0, s.mean / math.sqrt(1 + s.variance), s.coupling]
    )


def within(trials, lowest, highest):
    found = np.array([coordinates(trial) for trial in trials])
    return (found >= np.array(lowest[:4]) - 1e-9).all() and (
        found <= np.array(highest[:4]) + 1e-9
    ).all()


def test_the_search_climbs(searched):
    starts = [trial.objective for trial in searched.trace[: len(STARTS)]]
    assert searched.best.objective == max(trial.objective for trial in searched.trace)
    assert searched.best.objective > max(starts) + 0.002
    space = searched.space
    expected = [space.settings(torch.from_numpy(space.z(s))).tolist() for s in STARTS]
    assert np.allclose([t.settings for t in searched.trace[: len(STARTS)]], expected)
    assert within(searched.trace, LOWEST, HIGHEST)


def test_the_search_says_what_it_tried(searched):
    for trial in searched.trace:
        assert trial.kernel == "rbf" and np.isfinite(trial.objective)
        assert trial.objective <= trial.score <= 0
    value, _ = objective.value(searched.cohort, searched.best.settings)
    assert value == pytest.approx(searched.best.score, abs=1e-7)


def test_the_search_is_deterministic(bags, Z):
    space = Space({"lengthscale": 5.0, "mean": -3.0, "variance": 9.0}, 2.0)
    first, second = (tuning.search(cohort_of(bags, Z), space, 11) for _ in range(2))
    assert len(first.trace) > 3
    assert first.trace == second.trace and first.best == second.best


@pytest.fixture
def bowl(monkeypatch):
    """A cheap objective in place of the likelihood: a curved valley in the logs, no fit."""

    def of(settings):
        v, length, mean, strength, *_ = settings
        return (
            -((v.log() - 4.5) ** 2)
            - (length.log() - v.log() / 3) ** 2
            - (0.3 * (mean + 2) ** 4 + (strength.log() + 1.5) ** 2)
        )

    def left_out(cohort, settings, start=None, tolerance=None):
        return of(torch.tensor(settings, dtype=torch.float64))[None], None

    def gradient(cohort, settings, start=None):
        x = torch.tensor(settings, dtype=torch.float64, requires_grad=True)
        with torch.enable_grad():
            of(x).backward()
        found, fits = left_out(cohort, settings)
        return objective.Slopes(found, Settings(*x.grad.tolist()), fits, None)

    monkeypatch.setattr(tuning, "left_out", left_out)
    monkeypatch.setattr(tuning, "gradient", gradient)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("budget", [1, 4, 6, 9, 10, 17, 26, 40, 90])
def test_the_budget_is_kept(cohort, bowl, budget, method):
    """A value is one fit's worth of work, a gradient two; the last two come without."""
    found = method(cohort, Space({}, 2.0), budget)
    starts = min(budget, len(STARTS))
    rest = len(found.trace) - starts
    most = budget - starts
    if method is tuning.search and most > tuning.GRADIENT_COST:
        most = 1 + most // tuning.GRADIENT_COST
    assert rest <= most
    again = method(cohort, Space({}, 2.0), budget)
    assert again.trace == found.trace


@pytest.mark.parametrize("method", METHODS)
def test_more_work_gets_nearer(cohort, bowl, method):
    best = [method(cohort, Space({}, 2.0), budget).best.objective for budget in (6, 26, 120)]
    assert best[0] < best[1] < best[2] < 0


@pytest.mark.parametrize("method", METHODS)
def test_bounds_hold_where_the_best_is_beyond_them(cohort, bowl, method, monkeypatch):
    lowest, highest = (10.0, 2.5, -1.6, 0.9), (25.0, 3.5, -1.4, 1.1)
    monkeypatch.setattr(tuning, "STARTS", (CENTRE,))
    monkeypatch.setattr(tuning, "LOWEST", lowest)
    monkeypatch.setattr(tuning, "HIGHEST", highest)
    found = method(cohort, Space({}, 2.0), 60)
    assert within(found.trace, lowest, highest)
    # less coupling would be better still
    assert coordinates(found.best)[3] == pytest.approx(0.9, rel=1e-2)


def test_starts_that_fall_together_are_tried_once(cohort, bowl):
    fixed = {"variance": 9.0, "lengthscale": 5.0, "mean": -3.0}
    found = tuning.search(cohort, Space(fixed, 2.0), 3)
    assert [trial.settings.coupling for trial in found.trace] == pytest.approx([1.0, 0.5, 5.0])


def test_the_best_of_equals_is_the_first(cohort):
    search = tuning.Search(cohort, Space({}, 2.0), budget=1000)
    search.trace = [tuning.Trial("rbf", p, -0.5, -0.6) for p in POINTS]
    assert search.best.settings == POINTS[0]


@pytest.mark.parametrize("method", METHODS)
def test_nothing_to_learn_is_one_trial(cohort, method):
    found = method(cohort, Space(POINTS[0]._asdict(), 2.0), 40)
    assert [trial.settings for trial in found.trace] == [POINTS[0]]
    assert found.best.score == found.best.objective
    # by fits that are near enough
    assert found.best.score == pytest.approx(objective.value(cohort, POINTS[0])[0], abs=1e-4)


def test_progress_lines(cohort, bowl, caplog):
    with caplog.at_level(logging.INFO, LOGGER):
        found = tuning.search(cohort, Space({}, 2.0), 3)
    lines = [r.getMessage() for r in caplog.records if r.getMessage().startswith("tuning")]
    assert len(lines) == len(found.trace) == 3
    assert lines[0].startswith("tuning 1: rbf, variance 20, length 6, mean -6.87, coupling 1: -")


# --- The models -------------------------------------------------------------------------------

LEARNED = ("variance_", "lengthscale_", "mean_", "coupling_", "slide_effect_")


def numbers_of(model):
    return Settings(*(getattr(model, name) for name in LEARNED))


@pytest.fixture(scope="module")
def learned(bags, Z):
    return learner(Z, tuning_budget=20).fit(bags)


def test_by_default_all_five_are_learned(bags, Z, learned):
    params = VGPMILPRI().get_params()
    assert {params[n] for n in ("variance", "lengthscale", "mean", "coupling")} == {"auto"}
    assert params["slide_effect"] is None and learned.slide_effect_ > 0  # with the others
    first = Settings(*(learned.tuning_trace_[0][n] for n in Settings._fields))
    assert all(a != b for a, b in zip(numbers_of(learned)[:5], first[:5]))
    best = max(learned.tuning_trace_, key=lambda row: row["objective"])
    assert numbers_of(learned) == tuple(best[n] for n in Settings._fields)
    assert learned.kernel_ == "rbf" and learned.converged_
    assert learned.get_params()["variance"] == "auto"  # what was asked for is not overwritten


def test_the_trace_has_a_row_a_trial(learned):
    rows = learned.tuning_trace_
    assert len(rows) >= len(STARTS)
    for row in rows:
        assert list(row) == ["kernel", *Settings._fields, "score", "objective"]
        assert row["kernel"] == "rbf" and row["objective"] <= row["score"] < 0
        assert all(isinstance(row[name], float) for name in list(row)[1:])


@pytest.mark.parametrize(
    "changed", [{}, {"solver": "newton"}, {"moments": "coupled"}, {"kernel": "matern52"}]
)
def test_the_score_is_that_of_the_fit(bags, Z, changed):
    model = learner(Z, **changed).fit(bags)
    assert model.loo_log_likelihood_ == pytest.approx(model.leave_one_bag_out(bags).mean())


def test_what_was_tried_has_the_score_of_refits(bags, Z):
    model = learner(Z).fit(bags)
    best = max(model.tuning_trace_, key=lambda row: row["objective"])
    fold = fair_folds(bags.labels, None, folded_cohort.FOLDS, 0)
    slow = refitted_folds(model.with_settings_fixed(), bags, fold)
    assert best["score"] == pytest.approx(slow.mean(), abs=0.02)


def test_with_numbers_nothing_is_learned(bags, Z):
    model = model_of(Z, POINTS[0]).fit(bags)
    assert model.loo_log_likelihood_ is None and model.tuning_trace_ is None
    assert numbers_of(model) == POINTS[0]
    plain = model_of(Z, cls=VGPMILPR, **numbers_for(VGPMILPR)).fit(bags)
    assert plain.loo_log_likelihood_ is None and plain.tuning_trace_ is None


@pytest.mark.parametrize(
    "fixed",
    [
        {"variance": 7.0},
        {"lengthscale": 4.4},
        {"mean": -2.1},
        {"coupling": 0.3},
        {"coupling": 0.0},
        {"variance": 7.0, "mean": -2.1, "coupling": 0.3},
        {"lengthscale": "sqrt_dim"},
    ],
)
def test_what_is_given_keeps_its_value(bags, Z, fixed):
    model = learner(Z, **fixed).fit(bags)
    for name, value in fixed.items():
        expected = 2.0 if value == "sqrt_dim" else value
        assert getattr(model, f"{name}_") == expected
        assert {row[name] for row in model.tuning_trace_} == {expected}
    for name in {"variance", "lengthscale", "mean", "coupling"} - fixed.keys():
        assert len({row[name] for row in model.tuning_trace_}) > 1
    assert model.loo_log_likelihood_ is not None


def test_without_coupling_three_are_learned(bags, Z):
    model = learner(Z, cls=VGPMILPR).fit(bags)
    assert model.coupling_ == 0 and {row["coupling"] for row in model.tuning_trace_} == {0.0}
    for name in ("variance", "lengthscale", "mean"):
        assert len({row[name] for row in model.tuning_trace_}) > 1
    same = learner(Z, coupling=0.0).fit(bags)
    assert numbers_of(same) == numbers_of(model)
    assert same.loo_log_likelihood_ == model.loo_log_likelihood_


def test_without_geometry_the_coupling_is_zero_and_that_is_said_once(bags, Z, caplog):
    with caplog.at_level(logging.INFO, LOGGER):
        model = learner(Z).fit(without_edges(bags))
    said = [r for r in caplog.records if "uncoupled" in r.getMessage()]
    assert len(said) == 1 and said[0].levelno == logging.WARNING
    assert model.coupling_ == 0 and {row["coupling"] for row in model.tuning_trace_} == {0.0}
    plain = learner(Z, cls=VGPMILPR).fit(bags)
    assert numbers_of(plain) == numbers_of(model)


def test_without_one_edge_there_is_no_coupling_to_learn(bags, Z):
    apart = [100.0 * np.stack([np.arange(n), np.arange(n)], axis=1) for n in bags.sizes]
    lonely = Bags.from_arrays(bags.split(bags.features), bags.labels, coords=apart, step=7.0)
    assert not lonely.adjacency.nnz
    assert learner(Z, tuning_budget=1).fit(lonely).coupling_ == 0


def test_the_kernel_is_one_of_three(bags, Z):
    model = learner(Z, kernel="auto").fit(bags)
    tried = [row["kernel"] for row in model.tuning_trace_]
    assert list(dict.fromkeys(tried)) == ["rbf", "matern52", "linear"]
    best = max(model.tuning_trace_, key=lambda row: row["objective"])
    assert model.kernel_ == best["kernel"] and model.variance_ == best["variance"]
    assert model.predict_proba(bags).shape == (10, 2)
    again = model.with_settings_fixed()
    assert again.kernel == model.kernel_ and again.coupling == model.coupling_


def test_only_the_kernel_is_learned(bags, Z):
    model = model_of(Z, POINTS[0], kernel="auto").fit(bags)
    assert len(model.tuning_trace_) == 3 and numbers_of(model) == POINTS[0]
    fold = fair_folds(bags.labels, None, folded_cohort.FOLDS, 0)
    values = {
        k: objective.value(replace(cohort_of(bags, Z, k), fold=fold), POINTS[0])[0]
        for k in learning.AUTO_KERNELS
    }
    assert model.kernel_ == max(values, key=lambda k: values[k])


def test_a_linear_kernel_on_bags_that_are_easily_told_apart():
    easy = standard_cohort(seed=0, n_bags=30, sizes=(1, 3), shift=3.0)
    model = learner(some_inducing(easy, 12), kernel="linear", tuning_budget=20).fit(easy)
    assert np.isfinite(numbers_of(model)).all() and model.loo_log_likelihood_ > -0.2


def test_of_a_kernel_object_mean_and_coupling_are_learned(bags, Z):
    model = learner(Z, kernel=kernel_object()).fit(bags)
    assert model.variance_ is None and model.lengthscale_ is None
    for name, many in (("variance", False), ("lengthscale", False), ("mean", True)):
        assert (len({row[name] for row in model.tuning_trace_}) > 1) == many
    assert len({row["coupling"] for row in model.tuning_trace_}) > 1
    assert {row["kernel"] for row in model.tuning_trace_} == {"ScaleKernel"}
    assert model.loo_log_likelihood_ == pytest.approx(model.leave_one_bag_out(bags).mean())
    assert isinstance(model.kernel_, gpytorch.kernels.ScaleKernel)


# --- A balanced mean --------------------------------------------------------------------------


@given(sizes=st.lists(st.integers(1, 5000), min_size=1, max_size=9))
@hypothesis_settings(max_examples=40, deadline=None)
def test_a_balanced_bag_is_positive_half_the_time(sizes):
    level = learning.balanced_level(np.array(sizes))
    assert ndtr(-level) ** np.median(sizes) == pytest.approx(0.5, rel=1e-9)


def half(model, bags):
    """P(a bag of median size is negative), patches as the prior has them."""
    deviation = math.sqrt(1 + model.variance_)
    return ndtr(-model.mean_ / deviation) ** np.median(bags.sizes)


def test_a_balanced_mean(bags, Z):
    given = model_of(Z, POINTS[0], mean="balanced").fit(bags)
    assert half(given, bags) == pytest.approx(0.5) and given.tuning_trace_ is None
    with_others = learner(Z, mean="balanced").fit(bags)
    assert half(with_others, bags) == pytest.approx(0.5)
    assert len({row["mean"] for row in with_others.tuning_trace_}) > 1
    assert with_others.variance_ != 1
    fixed_variance = learner(Z, mean="balanced", variance=7.0).fit(bags)
    assert half(fixed_variance, bags) == pytest.approx(0.5)
    assert len({row["mean"] for row in fixed_variance.tuning_trace_}) == 1


def test_a_balanced_mean_under_a_kernel_object(bags, Z):
    model = model_of(Z, POINTS[0], kernel=kernel_object(), mean="balanced").fit(bags)
    # its diagonal is 8
    assert ndtr(-model.mean_ / 3.0) ** np.median(bags.sizes) == pytest.approx(0.5, abs=1e-6)


def test_a_balanced_mean_under_a_kernel_object_survives_the_search(bags, Z):
    model = model_of(Z, POINTS[0], kernel=kernel_object(), mean="balanced", tuning_budget=1)
    model.set_params(coupling="auto").fit(bags)
    assert ndtr(-model.mean_ / 3.0) ** np.median(bags.sizes) == pytest.approx(0.5, abs=1e-6)


def test_a_kernel_object_has_its_own_lengths(bags, Z):
    model = model_of(Z, POINTS[0], kernel=kernel_object(), lengthscale="ard", mean="auto")
    model.set_params(tuning_budget=1).fit(bags)
    assert model.relevance_ is None and model.lengthscale_ is None


def test_lengths_of_columns_are_not_climbed_as_well(bags, Z):
    model = model_of(Z, POINTS[0], lengthscale="ard", optimize=("lengthscale",))
    with pytest.raises(ValueError, match=r"lengthscale.*cannot be both"):
        model.fit(bags)


# --- Large cohorts ----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def many():
    return standard_cohort(seed=2, n_bags=30, sizes=(2, 9))


def messages(caplog, word):
    return [r.getMessage() for r in caplog.records if word in r.getMessage()]


def test_many_bags_are_subsampled(many, caplog, monkeypatch):
    monkeypatch.setattr(learning, "MOST_BAGS", 12)
    with caplog.at_level(logging.INFO, LOGGER):
        model = learner(some_inducing(many, 6)).fit(many)
    assert messages(caplog, "subsample") == ["tuning on a stratified subsample of 12 of 30 bags"]
    assert messages(caplog, "learned from 12 bags")
    assert messages(caplog, "fit: 30 bags") and model.cohort_["bags"] == 30
    chosen = learning.subsample(many.labels, 0)
    assert len(chosen) == 12 and many.labels[chosen].sum() == 6
    alone = learner(some_inducing(many, 6)).fit(many[chosen])
    assert np.allclose(numbers_of(alone), numbers_of(model))
    best = max(model.tuning_trace_, key=lambda row: row["objective"])
    assert model.loo_log_likelihood_ == best["score"]


def test_the_subsample_keeps_the_classes_and_the_seed(monkeypatch):
    labels = np.array([0] * 45 + [1] * 15)
    assert np.array_equal(learning.subsample(labels, 3), np.arange(60))
    monkeypatch.setattr(learning, "MOST_BAGS", 20)
    found = learning.subsample(labels, 3)
    assert labels[found].sum() == 5 and (np.diff(found) > 0).all()
    assert np.array_equal(found, learning.subsample(labels, 3))
    assert not np.array_equal(found, learning.subsample(labels, 4))


def test_all_bags_but_one(monkeypatch):
    monkeypatch.setattr(learning, "MOST_BAGS", 20)
    assert len(learning.subsample(np.array([0, 1, 1] * 7), 0)) == 20


def test_a_rare_class_is_kept_in_the_subsample(monkeypatch):
    monkeypatch.setattr(learning, "MOST_BAGS", 12)
    labels = np.array([1, 1] + [0] * 48)
    assert labels[learning.subsample(labels, 0)].sum() == 2


def test_large_bags_are_thinned(many, caplog, monkeypatch):
    monkeypatch.setattr(learning, "MOST_INSTANCES", 5)
    with caplog.at_level(logging.INFO, LOGGER):
        model = learner(some_inducing(many, 6)).fit(many)
    large = int((many.sizes > 5).sum())
    assert messages(caplog, "suspicious") == [
        f"tuning looks at the 5 most suspicious instances of {large} bags that have more"
    ]
    best = max(model.tuning_trace_, key=lambda row: row["objective"])
    assert model.loo_log_likelihood_ == best["score"]
    assert model.leave_one_bag_out(many).shape == (30,)


def test_thinning_keeps_the_most_suspicious(many, monkeypatch):
    score = np.random.default_rng(0).normal(size=many.n_instances)
    everything = learning.thinned_rows(many, lambda bags: score)
    assert np.array_equal(everything, np.arange(many.n_instances))
    monkeypatch.setattr(learning, "MOST_INSTANCES", 5)
    rows = learning.thinned_rows(many, lambda bags: score)
    kept = np.bincount(many.bag_index[rows], minlength=30)
    assert np.array_equal(kept, np.minimum(many.sizes, 5)) and (np.diff(rows) > 0).all()
    for b in range(30):
        mine = np.arange(many.offsets[b], many.offsets[b + 1])
        assert np.isin(mine[np.argsort(-score[mine])[:5]], rows).all()
    made = folded_cohort.folded(
        many, rows, many.labels == 1, torch.from_numpy, torch.zeros(2, 4).double(), "rbf"
    )
    assert np.array_equal(np.diff(made.offsets), kept)
    assert torch.equal(made.inputs, torch.from_numpy(many.features[rows]))
    # edges among those that are left
    assert np.array_equal(made.adjacency.toarray(), many.adjacency[rows][:, rows].toarray())


def test_thinning_of_a_model_without_coupling(many, monkeypatch):
    monkeypatch.setattr(learning, "MOST_INSTANCES", 5)
    model = learner(some_inducing(many, 6), cls=VGPMILPR, tuning_budget=2).fit(many)
    assert model.coupling_ == 0 and len(model.tuning_trace_) == 2
    assert "coupling" not in model.get_params() and not hasattr(model, "coupling")


def test_the_first_look_is_one_fit(many, caplog, monkeypatch):
    monkeypatch.setattr(learning, "MOST_INSTANCES", 5)
    with caplog.at_level(logging.INFO, LOGGER):
        learner(some_inducing(many, 6), tuning_budget=1, flags=True, n_folds=2).fit(many)
    assert len(messages(caplog, "cross-fitting")) == 2


# --- What else a fit promises -----------------------------------------------------------------


def test_the_same_random_state_gives_the_same_numbers(bags):
    a, b = (
        VGPMILPRI(n_inducing=6, tuning_budget=3, random_state=7, device="cpu").fit(bags)
        for _ in range(2)
    )
    assert numbers_of(a) == numbers_of(b) and a.tuning_trace_ == b.tuning_trace_
    assert a.loo_log_likelihood_ == b.loo_log_likelihood_
    assert np.array_equal(a.posterior_mean_, b.posterior_mean_)


def test_length_scales_are_in_units_of_what_the_kernel_sees(bags):
    made = {"n_components": 3, "n_inducing": 6, "tuning_budget": 1, "random_state": 0}
    for effect, centre in ((0.0, CENTRE), ("auto", EFFECT_CENTRE)):
        row = VGPMILPRI(**made, slide_effect=effect, device="cpu").fit(bags).tuning_trace_[0]
        assert row["lengthscale"] == pytest.approx(centre[1] * math.sqrt(3))


def test_learned_settings_are_better_than_the_papers(bags, Z, learned):
    paper = model_of(Z, **(gpmil.paper_settings() | {"solver": "direct"})).fit(bags)
    assert learned.loo_log_likelihood_ > paper.leave_one_bag_out(bags).mean()


# --- Wrong use --------------------------------------------------------------------------------


def test_too_few_bags_of_a_class(bags, Z):
    few = bags[[0, 1, 2, 4, 6]]
    with pytest.raises(ValueError, match="two bags of each class, found 4 negative and 1 positive"):
        learner(Z).fit(few)
    with pytest.raises(ValueError, match=r"Give variance.*as numbers"):
        learner(Z).fit(few)
    assert model_of(Z, POINTS[0]).fit(few).tuning_trace_ is None


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("variance", "automatic"),
        ("variance", -1.0),
        ("variance", 0),
        ("variance", None),
        ("lengthscale", "Auto"),
        ("lengthscale", 0.0),
        ("mean", "equal"),
        ("mean", float("nan")),
        ("mean", True),
        ("coupling", "yes"),
        ("coupling", -0.1),
        ("coupling", float("inf")),
        ("tuning_budget", 0),
        ("tuning_budget", "many"),
        ("tuning_budget", 2.5),
        ("kernel", "Auto"),
        ("kernel", None),
    ],
)
def test_wrong_settings_are_named(bags, Z, name, value):
    with pytest.raises(ValueError, match=rf"{name} must be"):
        model_of(Z, **{name: value}).fit(bags)


def test_a_wrong_kernel_is_told_of_auto(bags, Z):
    with pytest.raises(ValueError, match="auto"):
        model_of(Z, kernel="best").fit(bags)


def test_learned_twice_over_is_refused(bags, Z):
    with pytest.raises(ValueError, match=r"cannot be both 'auto' and in optimize"):
        model_of(Z, optimize=("variance",)).fit(bags)


def test_a_fit_that_fails_leaves_the_model_as_it_was(bags, Z, learned):
    before = numbers_of(learned)
    with pytest.raises(ValueError, match="two bags"):
        learned.fit(bags[[0, 1, 2]])
    assert numbers_of(learned) == before and len(learned.tuning_trace_) >= len(STARTS)


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_rows_converted_batch_by_batch_give_the_same_score(dtype, monkeypatch):
    drawn = gpmil.simulate.cohort(14, n_features=12, seed=4, mean_size=25)
    arrays = [a.astype(dtype) for a in drawn.split(drawn.features)]
    bags = Bags.from_arrays(arrays, drawn.labels, coords=drawn.split(drawn.coords), step=1024)
    to = features.standardizer(bags.features)
    rows = np.arange(bags.n_instances)[::2]
    at = Settings(4.0, 7.0, -2.0, 1.0)
    found = []
    for most in (2**24, 0):
        monkeypatch.setattr(folded_cohort, "CONVERTED", most)
        made = folded_cohort.folded(bags, rows, bags.labels == 1, to, to(bags.features[:9]), "rbf")
        assert isinstance(made.inputs, folded_cohort.StoredRows) == (most == 0)
        slopes = objective.gradient(made, at)
        found.append([slopes.score, *slopes.settings, *tuning.relevance(made, at, 4)[0]])
    np.testing.assert_allclose(*found, rtol=1e-12)
