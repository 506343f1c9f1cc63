"""One bag taken out of a fit by a Newton step: against explicit inverses, and against refits."""

import subprocess
import sys

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles import tuning as naive
from oracles.model import coupling_matrix, relative_error
from oracles.tuning import Twin, jacobian, refitted, standard_cohort
from scipy.special import log_ndtr
from synthetic import dense_graphs, pri, some_inducing

import gpmil
from gpmil import Bags
from gpmil.coupling import operator as coupling
from gpmil.distributed import WholeCohort
from gpmil.inference import leave_out
from gpmil.inference import solvers as inference
from gpmil.inference.leave_out import Optimum
from gpmil.moments import coupled_bags as moments_of_bags
from gpmil.moments import orthant
from gpmil.moments.coupled import CoupledMoments, cut_slope

CPU = torch.device("cpu")
# variance, lengthscale, mean, coupling: the paper's, two stiffer ones, no coupling
SETTINGS = [
    (1.0, 2.0, 0.0, 0.5),
    (9.0, 4.0, -3.0, 1.0),
    (20.0, 6.0, -4.5, 2.0),
    (4.0, 2.0, -2.0, 0.0),
]
NAMES = ("variance", "lengthscale", "mean", "coupling")


@pytest.fixture(scope="module")
def bags():
    """Bags of one to twenty instances: fewer and more than the eight inducing points."""
    return standard_cohort(seed=5, n_bags=18, sizes=(1, 20))


@pytest.fixture(scope="module")
def Z(bags):
    return some_inducing(bags, 8)


def model_of(Z, numbers, **others):
    return pri(**dict(zip(NAMES, numbers)), inducing=Z, standardize=False, device="cpu", **others)


def problem_of(model, bags):
    gp = model._gp(CPU)
    return gp, model._problem(gp, WholeCohort(bags, CPU, bags.labels))


def padded_bags(model, bags):
    """The bags as `leave_out` takes them, with their numbers."""
    gp = model._gp(CPU)
    strength, everyone = model.coupling_, np.arange(len(bags))
    for part in coupling.dense_parts(bags.adjacency, bags.offsets, everyone, strength):
        x = torch.from_numpy(bags.features[part.rows.numpy()])
        yield (
            part.bags,
            leave_out.padded_bag(gp, part, x, torch.from_numpy(bags.labels[part.bags] == 1)),
        )


def optimum(twin, w, J):
    w, R_inverse, J_inverse = map(torch.from_numpy, (w, np.linalg.inv(twin.R), np.linalg.inv(J)))
    return Optimum(w, twin.c, R_inverse, J_inverse)


def each(batches, function):
    """function(bag) of padded bags, without the padding, by bag number."""
    out = {}
    for numbers, bag in batches:
        for number, rows, found in zip(numbers, bag.mask, function(bag)):
            found = found[rows] if found.ndim == 1 else found[rows][:, rows]
            out[int(number)] = found.numpy()
    return out


# --- The step itself --------------------------------------------------------------------------


@pytest.mark.parametrize("label", [0, 1])
@pytest.mark.parametrize("shift", [-3.0, -1.3, 0.6])
def test_the_twins_derivatives_are_those_of_log_z(label, shift):
    rng = np.random.default_rng(3)
    mu, sigma = rng.normal(size=5) + shift, rng.uniform(0.4, 1.0, size=5)
    gamma, A = naive.gradient_and_curvature(mu, sigma, label)
    E, D = naive.truncated_mean(mu, sigma, label)
    value = lambda m: naive.log_z(m, sigma, label)  # noqa: E731
    slope = lambda m: naive.gradient_and_curvature(m, sigma, label)[0]  # noqa: E731
    mean = lambda m: naive.truncated_mean(m, sigma, label)[0]  # noqa: E731
    assert np.allclose(gamma, jacobian(value, mu, 0.01), rtol=1e-6, atol=1e-10)
    assert np.allclose(A, -jacobian(slope, mu, 0.01), rtol=1e-6, atol=1e-8)
    assert np.allclose(D, jacobian(mean, mu, 0.01), rtol=1e-6, atol=1e-8)
    assert (np.sign(E - mu) == (1 if label else -1)).all()


@pytest.mark.parametrize("numbers", SETTINGS)
def test_curvature_and_slope_of_padded_bags(bags, Z, numbers):
    model = model_of(Z, numbers).fit(bags)
    twin = Twin(bags, Z, *numbers)
    w = np.random.default_rng(0).normal(size=8)
    at = torch.from_numpy(w)
    batches = list(padded_bags(model, bags))
    bent = lambda b: leave_out.curvature(b, model.mean_ + b.H @ at)  # noqa: E731
    one = lambda b: torch.eye(b.mask.shape[1]).double().expand_as(b.sigma)  # noqa: E731
    gamma = each(batches, lambda b: bent(b).gamma)
    A = each(batches, lambda b: bent(b).times(one(b)))
    E = each(batches, lambda b: leave_out.diagonal_slope(b, model.mean_ + b.H @ at, one(b))[0])
    D = each(batches, lambda b: leave_out.diagonal_slope(b, model.mean_ + b.H @ at, one(b))[1])
    for b in range(len(bags)):
        assert np.allclose(gamma[b], twin.derivatives(b, w)[0], rtol=1e-9, atol=1e-12)
        assert np.allclose(A[b], twin.derivatives(b, w)[1], rtol=1e-9, atol=1e-12)
        assert np.allclose(E[b], twin.moments(b, w)[0], rtol=1e-9, atol=1e-12)
        assert np.allclose(D[b], twin.moments(b, w)[1], rtol=1e-9, atol=1e-12)


def test_padding_has_no_part_in_it(bags, Z):
    model = model_of(Z, SETTINGS[1]).fit(bags)
    w = torch.from_numpy(model.whitened_mean_)
    some = [bag for _, bag in padded_bags(model, bags) if not bool(bag.mask.all())]
    assert some
    for bag in some:
        bent = leave_out.curvature(bag, model.mean_ + bag.H @ w)
        assert not any(part[~bag.mask].any() for part in bent)
        rows, offsets = leave_out.flat(
            bag, torch.arange(bag.mask.numel()).view_as(bag.mask).double()
        )
        assert len(rows) == int(bag.mask.sum()) == int(offsets[-1])
        assert torch.equal(leave_out.spread(bag, rows)[bag.mask], rows)
        assert not leave_out.spread(bag, rows)[~bag.mask].any()


@given(seed=st.integers(0, 10**6), numbers=st.sampled_from(SETTINGS))
@settings(max_examples=8, deadline=None)
def test_the_step_equals_the_one_in_all_m_directions(seed, numbers):
    """At any w, not at the optimum alone."""
    bags = standard_cohort(seed=seed % 7, n_bags=6, sizes=(1, 12))
    Z = some_inducing(bags, 5)
    w = 0.7 * np.random.default_rng(seed).normal(size=5)
    model = model_of(Z, numbers).fit(bags)
    twin, batches = Twin(bags, Z, *numbers), list(padded_bags(model, bags))
    J = twin.fixed_point_jacobian(w)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(leave_out, "LONGEST", np.inf)  # far from the optimum steps may be long
        at = optimum(twin, w, twin.hessian(w))
        direct = each(batches, lambda b: leave_out.mean_direct(b, at))
        fixed = each(batches, lambda b: leave_out.mean_fixed_point(b, optimum(twin, w, J), False))
    for b in range(len(bags)):
        assert relative_error(direct[b], twin.direct_mean_without(b, w)) < 1e-9
        assert relative_error(fixed[b], twin.fixed_point_mean_without(b, w)) < 1e-9


def test_a_step_into_nowhere_is_shortened():
    plain = torch.tensor([[3.0, -4.0], [3.0, -4.0]]).double()
    step = torch.tensor([[30.0, 20.0], [-3e6, 4e6]]).double()
    found = leave_out.shortened(step, plain)
    assert torch.equal(found[0], step[0])
    torch.testing.assert_close(found[1], step[1] * 1e-5)


@pytest.mark.parametrize("numbers", SETTINGS)
def test_the_covariance_equals_the_one_with_the_bag_taken_out_of_r(bags, Z, numbers):
    model = model_of(Z, numbers).fit(bags)
    twin = Twin(bags, Z, *numbers)
    at = optimum(twin, model.whitened_mean_, np.eye(8))
    found = each(padded_bags(model, bags), lambda b: leave_out.covariance(b, at))
    for b in range(len(bags)):
        assert np.array_equal(found[b], found[b].T)
        assert relative_error(found[b], twin.covariance_without(b)) < 1e-9


@pytest.mark.parametrize("tau", [0.0, 1.3])
def test_tiles_find_what_torch_does(tau, monkeypatch):
    bags = standard_cohort(seed=11, n_bags=14, sizes=(1, 37))
    Z = some_inducing(bags, 19)
    model = model_of(Z, SETTINGS[1], slide_effect=tau).fit(bags)
    problem = problem_of(model, bags)[1]
    at, _ = inference.without_each_bag(problem, torch.tensor(model.whitened_mean_), True)

    def found(what):
        return each(padded_bags(model, bags), lambda bag: what(bag, at))

    looks = leave_out.covariance, leave_out.mean_direct
    quick = [found(look) for look in looks]
    monkeypatch.setattr(leave_out.compiled, "less_bag", lambda: None)
    for look, one in zip(looks, quick):
        plain = found(look)
        assert all(relative_error(one[b], plain[b]) < 1e-10 for b in range(len(bags)))


@pytest.mark.parametrize("solver", ["direct", "newton"])
@pytest.mark.parametrize("numbers", SETTINGS)
def test_from_a_fit_to_the_scores(bags, Z, numbers, solver):
    """All of it: the Jacobian of the right condition, all bags in their own order."""
    model = model_of(Z, numbers, solver=solver).fit(bags)
    found = model.leave_one_bag_out(bags)
    twin, w = Twin(bags, Z, *numbers), model.whitened_mean_
    for b in range(len(bags)):
        mean = twin.direct_mean_without if solver == "direct" else twin.fixed_point_mean_without
        mu, S = (torch.from_numpy(a)[None] for a in (mean(b, w), twin.covariance_without(b)))
        p = orthant.log_orthant(mu, S)
        expected = float(p.log_1mp if bags.labels[b] else p.log_p)
        assert found[b] == pytest.approx(expected, abs=1e-5)


def test_coupled_moments_have_a_jacobian_of_their_own(bags, Z):
    numbers = SETTINGS[1]
    model = model_of(Z, numbers, moments="coupled").fit(bags)
    twin, w = Twin(bags, Z, *numbers), model.whitened_mean_
    E, D = [], []
    for b, graph in enumerate(dense_graphs(bags)):
        S, y = torch.from_numpy(twin.Sigma[b])[None], torch.tensor([bool(bags.labels[b])])
        P = torch.from_numpy(np.linalg.inv(coupling_matrix(graph, numbers[3])))[None]
        mu = torch.from_numpy(twin.mu(b, w))[None]
        # D = dE/dmu Sigma X with X = Sigma^-1
        mean, slope = cut_slope(mu, S, y, torch.ones_like(mu, dtype=torch.bool), P)
        E.append(mean[0].numpy())
        D.append(slope[0].numpy())
    J = twin.R - sum(W.T @ d @ H for W, d, H in zip(twin.W, D, twin.H))
    at = optimum(twin, w, J)
    found = each(padded_bags(model, bags), lambda b: leave_out.mean_fixed_point(b, at, True))
    for b in range(len(bags)):
        expected = twin.fixed_point_mean_without(b, w, J, E[b], D[b])
        assert relative_error(found[b], expected) < 1e-7
    _, problem = problem_of(model, bags)
    slope = inference.fixed_point(problem, torch.from_numpy(w))[1]
    assert relative_error(problem.R - slope, J) < 1e-7


# --- Against refits ---------------------------------------------------------------------------


@pytest.fixture(scope="module")
def cohort():
    """Enough bags that no single one decides where the others go."""
    return standard_cohort(seed=8, n_bags=26, sizes=(1, 20), shift=2.0)


@pytest.mark.parametrize(
    ("numbers", "solver"),
    [*((s, "direct") for s in SETTINGS), *((s, "newton") for s in SETTINGS[:2])],
)
def test_leaving_out_is_refitting(cohort, numbers, solver):
    model = model_of(some_inducing(cohort, 8), numbers, solver=solver).fit(cohort)
    assert (cohort.sizes == 1).any() and (cohort.sizes > 8).any()
    found, expected = model.leave_one_bag_out(cohort), refitted(model, cohort, range(len(cohort)))
    assert found.shape == (len(cohort),) and (found < 0).all()
    assert abs(found.mean() - expected.mean()) < 0.01
    assert np.corrcoef(found, expected)[0, 1] > 0.999
    # a real step: with the bag still in, the scores are far off
    kept = model.decision_function(cohort)
    kept = -np.logaddexp(0, np.where(cohort.labels == 1, -kept, kept))
    assert np.abs(found - expected).mean() < 0.2 * np.abs(kept - expected).mean()


def test_leaving_out_is_refitting_with_coupled_moments(cohort):
    Z = some_inducing(cohort, 8)
    model = model_of(Z, SETTINGS[1], moments="coupled").fit(cohort)
    found = model.leave_one_bag_out(cohort)
    chosen = np.arange(1, len(cohort), 6)
    expected = refitted(model, cohort, chosen)
    assert abs(found[chosen].mean() - expected.mean()) < 0.01
    assert np.corrcoef(found[chosen], expected)[0, 1] > 0.999
    # the maximum of the bound and the fixed point are one
    newton = model_of(Z, SETTINGS[1], moments="coupled", solver="newton").fit(cohort)
    assert np.allclose(newton.leave_one_bag_out(cohort), found, atol=1e-4)


@pytest.mark.parametrize("solver", ["direct", "newton"])
def test_one_instance_a_bag(solver):
    rng = np.random.default_rng(4)
    x = rng.normal(size=(40, 2))
    y = (x[:, 0] + 0.5 * x[:, 1] ** 2 + 0.4 * rng.normal(size=40) > 0.3).astype(int)
    cohort = Bags.from_arrays(list(x[:, None, :]), labels=y)
    model = model_of(x[::4], (2.0, 1.3, -0.4, 0.0), solver=solver).fit(cohort)
    found, expected = model.leave_one_bag_out(cohort)[::2], refitted(model, cohort, range(0, 40, 2))
    assert abs(found.mean() - expected.mean()) < 0.01
    assert np.corrcoef(found, expected)[0, 1] > 0.999


def test_every_bag_larger_than_the_number_of_inducing_points(cohort):
    large = cohort[cohort.sizes > 4]
    model = model_of(some_inducing(large, 4), SETTINGS[1]).fit(large)
    found, expected = model.leave_one_bag_out(large), refitted(model, large, range(len(large)))
    assert abs(found.mean() - expected.mean()) < 0.01
    assert np.corrcoef(found, expected)[0, 1] > 0.999


# --- Limits -----------------------------------------------------------------------------------


def test_the_order_of_the_bags_does_not_matter(bags, Z):
    order = np.random.default_rng(1).permutation(len(bags))
    model = model_of(Z, SETTINGS[1]).fit(bags)
    found = model.leave_one_bag_out(bags)
    again = model_of(Z, SETTINGS[1]).fit(bags[order]).leave_one_bag_out(bags[order])
    assert np.allclose(again, found[order], atol=1e-6)
    assert np.allclose(model.leave_one_bag_out(bags[order]), found[order], atol=1e-6)
    assert np.array_equal(model.leave_one_bag_out(bags), found)


def test_labels_given_apart(bags, Z):
    bare = Bags.from_arrays(bags.split(bags.features), coords=bags.split(bags.coords), step=7.0)
    model = model_of(Z, SETTINGS[1]).fit(bare, bags.labels)
    expected = model_of(Z, SETTINGS[1]).fit(bags).leave_one_bag_out(bags)
    assert np.array_equal(model.leave_one_bag_out(bare, bags.labels), expected)
    with pytest.raises(ValueError, match="no label"):
        model.leave_one_bag_out(bare)


@pytest.mark.parametrize("solver", ["direct", "newton"])
def test_without_variance_a_bag_says_nothing_of_another(bags, Z, solver):
    """Patches are independent of mean c: log P = n log Phi(-c), whatever was left out."""
    model = model_of(Z, (1e-10, 2.0, -0.8, 0.0), solver=solver).fit(bags)
    log_q = bags.sizes * log_ndtr(0.8)
    expected = np.where(bags.labels == 1, np.log(-np.expm1(log_q)), log_q)
    assert np.allclose(model.leave_one_bag_out(bags), expected, atol=1e-3)


def test_a_bag_that_does_not_pull_leaves_nothing_behind(bags, Z):
    """A positive bag that is surely positive has E = mu: w_-b = w, in the mean."""
    model = model_of(Z, (0.5, 2.0, 9.0, 0.5)).fit(bags)
    twin, w = Twin(bags, Z, 0.5, 2.0, 9.0, 0.5), np.zeros(8)
    at = optimum(twin, w, twin.hessian(w)), optimum(twin, w, twin.fixed_point_jacobian(w))
    batches = list(padded_bags(model, bags))
    direct = each(batches, lambda b: leave_out.mean_direct(b, at[0]))
    fixed = each(batches, lambda b: leave_out.mean_fixed_point(b, at[1], False))
    for b, y in enumerate(bags.labels):
        assert np.allclose(direct[b], 9.0, rtol=1e-12) == (y == 1)
        assert np.allclose(fixed[b], 9.0, rtol=1e-12) == (y == 1)


def test_a_zero_coupling_is_no_edges(bags, Z):
    bare = Bags.from_arrays(bags.split(bags.features), labels=bags.labels)
    numbers = (9.0, 4.0, -3.0, 0.0)
    coupled_bags = model_of(Z, numbers).fit(bags).leave_one_bag_out(bags)
    assert np.allclose(model_of(Z, numbers).fit(bare).leave_one_bag_out(bare), coupled_bags)
    plain = gpmil.VGPMILPR(
        variance=9.0, lengthscale=4.0, mean=-3.0, inducing=Z, standardize=False, device="cpu"
    )
    assert np.allclose(plain.fit(bags).leave_one_bag_out(bags), coupled_bags)


def test_float32_storage_is_close(bags, Z):
    a, b = (
        model_of(Z, SETTINGS[1], dtype=d).fit(bags).leave_one_bag_out(bags)
        for d in ("float64", "float32")
    )
    assert np.abs(a - b).max() < 1e-2


# --- Wrong use --------------------------------------------------------------------------------


def test_other_bags_are_refused(bags, Z):
    model = model_of(Z, SETTINGS[1]).fit(bags)
    for other in (standard_cohort(seed=6, n_bags=18, sizes=(1, 20)), bags[:-1]):
        with pytest.raises(ValueError, match="not the bags the model was fitted on"):
            model.leave_one_bag_out(other)
    with pytest.raises(ValueError, match="Bags"):
        model.leave_one_bag_out([np.zeros((3, 4))])


def test_other_labels_are_refused(bags, Z):
    model = model_of(Z, SETTINGS[1]).fit(bags)
    with pytest.raises(ValueError, match="labels are not those"):
        model.leave_one_bag_out(bags, 1 - bags.labels)


# --- Truncated moments of coupled patches and their slope ------------------------------------


STRENGTH = 1.2


def coupled_bags(seed=2):
    """Three padded bags with their Sigma and P: mu, sigma, P, mask, adjacency, offsets."""
    bags = standard_cohort(seed=seed, n_bags=3, sizes=(5, 9))
    rows, mask, P = coupling.padded_precision(bags.adjacency, bags.offsets, np.arange(3), STRENGTH)
    assert not bool(mask.all())
    mu = torch.zeros(mask.shape, dtype=torch.float64)
    mu[mask] = torch.from_numpy(np.random.default_rng(seed).normal(size=len(rows)))
    return bags, mu, torch.linalg.inv(P), P, mask


KINDS = {  # shift of mu, positive, how near EP's V P is to the true derivative
    "negative": (-0.5, False, 0.03),
    "deep": (4.0, False, 0.03),
    "positive": (-1.0, True, 0.03),
    "sure": (2.0, True, 0.03),
    "rare": (-9.0, True, 1e-6),
}


@pytest.mark.parametrize("kind", KINDS)
def test_cut_slope_is_the_derivative_of_the_coupled_mean(kind):
    shift, label, tolerance = KINDS[kind]
    bags, mu, sigma, P, mask = coupled_bags()
    mu, positive = mu + shift, torch.full((3,), label)
    moments = CoupledMoments(bags.adjacency, bags.offsets, positive.numpy(), STRENGTH)
    mean = lambda x: moments.expectations(x[mask])[0].numpy()  # noqa: E731
    # along some directions x: dE/dmu x = dE/dmu Sigma (P x)
    along = torch.from_numpy(np.random.default_rng(1).normal(size=(*mask.shape, 3)))
    along = along * mask[..., None]
    E, found = cut_slope(mu, sigma, positive, mask, P @ along)
    assert relative_error(E[mask].numpy(), mean(mu)) < 1e-8
    expected = jacobian(lambda s: mean(mu + along @ torch.from_numpy(s)), np.zeros(3), 0.01)
    assert relative_error(found[mask].numpy(), expected) < tolerance


@pytest.mark.parametrize("kind", KINDS)
def test_cut_slope_is_symmetric_once_p_is_taken_off(kind):
    shift, label, _ = KINDS[kind]
    _, mu, sigma, _, mask = coupled_bags()
    eye = torch.eye(mask.shape[1]).double().expand_as(sigma)
    _, slope = cut_slope(mu + shift, sigma, torch.full((3,), label), mask, eye)
    assert relative_error(slope, slope.mT) < 1e-9


@pytest.mark.parametrize("shift", [-9.0, -3.0, 0.5])
def test_cut_slope_is_what_inference_uses(shift):
    bags, mu, sigma, _, mask = coupled_bags()
    mu, positive = mu + shift, torch.tensor([True, False, True])
    moments = CoupledMoments(bags.adjacency, bags.offsets, positive.numpy(), STRENGTH)
    moments.expectations(mu[mask])
    W = torch.from_numpy(np.random.default_rng(0).normal(size=(*mask.shape, 4))) * mask[..., None]
    H = sigma @ W
    _, DH = cut_slope(mu, sigma, positive, mask, W)
    expected = moments.slope(W[mask], H[mask])
    assert relative_error((W.mT @ DH).sum(0), expected) < 1e-7


def test_both_forms_of_a_positive_bag_meet(monkeypatch):
    _, mu, sigma, P, mask = coupled_bags()
    forms = []
    for limit in (-1e9, 0.0):
        monkeypatch.setattr(moments_of_bags, "RARE", limit)
        forms.append(cut_slope(mu - 5.0, sigma, torch.ones(3, dtype=torch.bool), mask, P))
    (E, D), (F, G) = forms
    assert relative_error(E[mask] - mu[mask], F[mask] - mu[mask]) < 0.02
    assert relative_error(D, G) < 0.02


def test_the_smooth_scores_follow_the_engine(bags, Z):
    model = model_of(Z, SETTINGS[1]).fit(bags)
    _, problem = problem_of(model, bags)
    w = torch.from_numpy(model.whitened_mean_)
    J = inference.collapsed_bound(problem, w)[2]
    at = Optimum(w, model.mean_, torch.linalg.inv(problem.R), torch.linalg.inv(J))
    smooth = np.empty(len(bags))
    for numbers, bag in padded_bags(model, bags):
        mu, S = leave_out.mean_direct(bag, at), leave_out.covariance(bag, at)
        smooth[numbers] = leave_out.smooth_scores(bag, mu, S).numpy()
    engine = model.leave_one_bag_out(bags)
    assert abs(smooth.mean() - engine.mean()) < 0.02
    assert np.corrcoef(smooth, engine)[0, 1] > 0.999


# --- Several threads --------------------------------------------------------------------------
HANGS = """
import torch
from gpmil.inference.leave_out import solve
torch.set_num_threads(2)
random = torch.Generator().manual_seed(0)
A = torch.randn(3, 230, 230, generator=random).double() / 15 + 3 * torch.eye(230).double()
A.requires_grad_()
for shape in ((3, 230), (3, 230, 4)):
    x = torch.randn(*shape, generator=random).double()
    found = solve(A, x)
    found.sum().backward()
    back = (A @ found.reshape(3, 230, -1)).reshape(shape)
    assert float((back - x).abs().max()) < 1e-10
print("came back")
"""


def test_many_large_bags_are_solved_with_several_threads():
    # torch.linalg.solve of the batch never returned here, hence the process of its own
    run = subprocess.run(
        [sys.executable, "-c", HANGS], capture_output=True, text=True, timeout=120, check=False
    )
    assert run.stdout.strip() == "came back", run.stderr[-500:]
