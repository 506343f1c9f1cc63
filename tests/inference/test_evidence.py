import numpy as np
import pytest
import torch
from sklearn.exceptions import ConvergenceWarning
from synthetic import pri, small_cohort, some_inducing

import gpmil
from gpmil.coupling import operator as coupling
from gpmil.inference import evidence
from gpmil.inference import solvers as inference
from gpmil.inference.pieces import LIKELIHOODS
from gpmil.process import sparse_gp

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def bags():
    return small_cohort(seed=5, n_bags=14, sizes=(2, 14))


def cohort_of(bags, strength, coupled, kernel="rbf", effect=0.0):
    model = pri(
        coupling=strength, kernel=kernel, inducing=some_inducing(bags, 6), device="cpu"
    ).fit(bags)
    cohort = evidence.Cohort(
        kernel, lambda rows: model._inputs(bags.features[rows], CPU), bags.adjacency, bags.offsets,
        bags.labels == 1, strength, LIKELIHOODS["coupled" if coupled else "diagonal"], 1e-11,
        effect,
    )  # fmt: skip
    return cohort, evidence.Theta(model._inputs(model.inducing_points_, CPU), 2.3, 1.7, -0.6)


@pytest.mark.parametrize("coupled", [False, True])
@pytest.mark.parametrize("strength", [0.0, 0.8])
@pytest.mark.parametrize("kernel", ["rbf", "matern52", "linear"])
def test_the_gradient_by_finite_differences(bags, strength, coupled, kernel):
    check_gradient(*cohort_of(bags, strength, coupled, kernel), 2e-5)


@pytest.mark.parametrize("coupled", [False, True])
def test_the_gradient_with_a_slide_effect(bags, coupled, monkeypatch):
    monkeypatch.setattr(coupling, "DENSE_LIMIT", 9)  # parts of every kind
    some = bags[:5]
    assert some.sizes.min() <= 9 < some.sizes.max()
    # the lattice of effects may change on the way: 1e-7 of log Z in every bag (with_effect.JUMP)
    made = cohort_of(some, 0.8, coupled, effect=1.3)
    check_gradient(*made, 1e-3, eps=1e-3, at=(5,) if coupled else (0, 5, 11, -3, -2, -1))


def check_gradient(cohort, theta, tolerance, eps=1e-5, at=(0, 5, 11, -3, -2, -1)):
    moving = ("inducing", "variance", "lengthscale", "mean")
    with torch.no_grad():
        _, gradient, w = evidence.bound(cohort, theta)
        packed, found = evidence.pack_theta(theta, moving), evidence.pack(gradient, moving)
        scale = np.abs(found).max()
        for j in at:
            step = eps * np.eye(len(packed))[j]
            up, down = (
                evidence.bound(cohort, evidence.unpack(packed + s, theta, moving), w)[0]
                for s in (step, -step)
            )
            assert (up - down) / (2 * eps) == pytest.approx(found[j], abs=tolerance * scale)


def plain_gradient(cohort, theta):
    """By autograd of the whole, everything but the kernel held still: one graph, no parts."""
    problem = cohort.problem(theta)
    w = inference.direct(problem, 200, cohort.tol).w
    gamma = torch.cat([chunk.gamma(w, theta.mean) for chunk in problem.chunks])
    rest = torch.linalg.inv(problem.R) - torch.eye(len(w), dtype=w.dtype)
    logs = [torch.tensor(np.log(v)).requires_grad_() for v in (theta.variance, theta.lengthscale)]
    inducing = theta.inducing.clone().requires_grad_()
    N = int(cohort.offsets[-1])
    x = cohort.inputs(torch.arange(N))
    sigma = torch.from_numpy(
        np.linalg.inv(coupling.sparse_precision(cohort.adjacency, cohort.strength).toarray())
    )
    with torch.enable_grad():
        gp = cohort.gp(*(v.exp() for v in logs), inducing)
        W = gp.whiten(x)
        spread = (sigma * gp.kernel(x, x)).sum() + 2 * ((sigma @ W.detach() @ rest) * W).sum()
        ((sigma @ gamma) @ (W @ w) - spread / 2).backward()
    return torch.cat([inducing.grad.flatten(), *(v.grad[None] for v in logs)]).numpy()


@pytest.mark.parametrize("strength", [0.0, 0.8])
@pytest.mark.parametrize("kernel", ["rbf", "matern52", "linear"])
def test_the_gradient_by_parts_is_that_of_the_whole(bags, strength, kernel):
    cohort, theta = cohort_of(bags, strength, False, kernel)
    with torch.no_grad():
        _, gradient, _ = evidence.bound(cohort, theta)
        expected = plain_gradient(cohort, theta)
    found = evidence.pack(gradient, ("inducing", "variance", "lengthscale"))
    assert np.abs(found - expected).max() < 1e-10 * np.abs(expected).max()


def test_the_factor_is_differentiated_once(bags, monkeypatch):
    cohort, theta = cohort_of(bags, 0.8, False)
    n_parts = len(list(coupling.parts(bags.adjacency, bags.offsets, 0.8)))
    calls, backwards, plain = [], [], sparse_gp.psd_safe_cholesky

    def counted(A):
        L = plain(A)
        calls.append(len(A))
        if L.requires_grad:
            L.register_hook(backwards.append)
        return L

    monkeypatch.setattr(sparse_gp, "psd_safe_cholesky", counted)
    with torch.no_grad():
        evidence.bound(cohort, theta)
    # one for the problem, without a gradient, and one to differentiate
    assert n_parts > 1 and len(calls) == 2 and len(backwards) == 1


def test_packing_is_invertible(bags):
    _, theta = cohort_of(bags, 0.0, False)
    moving = ("mean", "inducing", "variance")
    again = evidence.unpack(evidence.pack_theta(theta, moving), theta, moving)
    assert torch.allclose(again.inducing, theta.inducing)
    assert again.variance == pytest.approx(2.3) and again.mean == -0.6
    assert again.lengthscale == 1.7


def test_the_bound_rises(bags):
    settings = {"coupling": 0.7, "inducing": some_inducing(bags, 6), "lengthscale": 1.2}
    before = pri(**settings).fit(bags)
    for what in (("inducing",), ("variance", "lengthscale", "mean"), evidence.SETTINGS):
        after = pri(**settings, optimize=what).fit(bags)
        assert after.elbo_trace_[-1] > before.elbo_trace_[-1] + 1e-3
        assert after.elbo_trace_[-1] == pytest.approx(max(after.evidence_trace_), abs=1e-6)
        moved = not np.allclose(after.inducing_points_, before.inducing_points_)
        assert moved == ("inducing" in what)
        assert (after.variance_ != before.variance_) == ("variance" in what)
        assert (after.mean_ != before.mean_) == ("mean" in what)
    assert np.array_equal(settings["inducing"], some_inducing(bags, 6))


def test_an_optimised_model_is_saved_whole(bags, tmp_path):
    model = pri(n_inducing=8, random_state=0, optimize=("inducing", "mean")).fit(bags)
    model.save(tmp_path / "model")
    loaded = gpmil.load(tmp_path / "model")
    assert loaded.optimize == ("inducing", "mean")
    assert np.array_equal(loaded.predict_proba(bags), model.predict_proba(bags))


@pytest.mark.parametrize(
    ("settings", "telling"),
    [
        ({"optimize": "inducing"}, "tuple of different names"),
        ({"optimize": ("Z",)}, "tuple of different names"),
        ({"optimize": None}, "tuple of different names"),
        ({"optimize": ("inducing", "inducing")}, "tuple of different names"),
        ({"optimize": ("inducing",), "solver": "newton"}, "solver='direct'"),
    ],
)
def test_what_cannot_be_optimised(bags, settings, telling):
    with pytest.raises(ValueError, match=telling):
        pri(**settings).fit(bags)


def test_a_kernel_object_keeps_its_settings(bags):
    import gpytorch

    kernel = gpytorch.kernels.RBFKernel()
    with pytest.raises(ValueError, match="kernel by name"):
        pri(kernel=kernel, optimize=("variance",)).fit(bags)
    model = pri(kernel=kernel, n_inducing=6, optimize=("inducing",)).fit(bags)
    assert model.evidence_trace_[-1] > model.evidence_trace_[0]


def test_a_collapse_is_said_and_a_later_fit_forgets_the_climb(bags):
    model = pri(n_inducing=6, random_state=0, variance=50.0, optimize=("variance",))
    with pytest.warns(UserWarning, match="explains nothing") as caught:
        evidence._warn_of_collapse(
            evidence.Theta(torch.zeros(1, 1), 9.0, 2.0, 0.0),
            evidence.Theta(torch.zeros(1, 1), 9e-7, 2.0, 0.0),
        )
    assert caught[0].filename == __file__
    model.fit(bags)
    assert len(model.evidence_trace_) > 1
    assert model.set_params(optimize=()).fit(bags).evidence_trace_ is None


def test_warnings_through_the_optimiser_point_at_the_caller(bags, monkeypatch):
    # the solver warns inside scipy's minimize, which calls back into gpmil
    direct = inference.direct
    monkeypatch.setattr(inference, "direct", lambda p, n, tol, start=None: direct(p, 1, tol, start))
    model = pri(n_inducing=6, random_state=0, optimize=("mean",))
    with pytest.warns(ConvergenceWarning) as caught:
        model.fit(bags)
    assert {w.filename for w in caught if w.category is ConvergenceWarning} == {__file__}
