import numpy as np
import pytest
import torch
from synthetic import pri, small_cohort, some_inducing

import gpmil
from gpmil import evidence

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def bags():
    return small_cohort(seed=5, n_bags=14, sizes=(2, 14))


def cohort_of(bags, strength, coupled, kernel="rbf"):
    model = pri(
        coupling=strength, kernel=kernel, inducing=some_inducing(bags, 6), device="cpu"
    ).fit(bags)
    cohort = evidence.Cohort(
        kernel, lambda rows: model._inputs(bags.features[rows], CPU), bags.adjacency, bags.offsets,
        bags.labels == 1, strength, coupled, 1e-11,
    )  # fmt: skip
    return cohort, evidence.Theta(model._inputs(model.inducing_points_, CPU), 2.3, 1.7, -0.6)


@pytest.mark.parametrize("coupled", [False, True])
@pytest.mark.parametrize("strength", [0.0, 0.8])
@pytest.mark.parametrize("kernel", ["rbf", "matern52", "linear"])
def test_the_gradient_by_finite_differences(bags, strength, coupled, kernel):
    cohort, theta = cohort_of(bags, strength, coupled, kernel)
    moving = ("inducing", "variance", "lengthscale", "mean")
    with torch.no_grad():
        _, gradient, w = evidence.bound(cohort, theta)
        packed, found = evidence.pack_theta(theta, moving), evidence.pack(gradient, moving)
        scale = np.abs(found).max()
        eps = 1e-5
        for j in [0, 5, 11, len(packed) - 3, len(packed) - 2, len(packed) - 1]:
            step = eps * np.eye(len(packed))[j]
            up, down = (
                evidence.bound(cohort, evidence.unpack(packed + s, theta, moving), w)[0]
                for s in (step, -step)
            )
            assert (up - down) / (2 * eps) == pytest.approx(found[j], abs=2e-5 * scale)


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
    with pytest.warns(UserWarning, match="explains nothing"):
        evidence._warn_of_collapse(
            evidence.Theta(torch.zeros(1, 1), 9.0, 2.0, 0.0),
            evidence.Theta(torch.zeros(1, 1), 9e-7, 2.0, 0.0),
        )
    model.fit(bags)
    assert len(model.evidence_trace_) > 1
    assert model.set_params(optimize=()).fit(bags).evidence_trace_ is None
