"""The same fit on CPU and on an NVIDIA GPU."""

import numpy as np
import pytest
import torch
from oracles.model import relative_error
from scipy.special import erfcx
from sklearn.base import clone
from synthetic import pri

import gpmil
from gpmil.distributed import WholeCohort
from gpmil.fast import fused_pass, ring
from gpmil.inference import fused, objective, tuning
from gpmil.inference import solvers as inference
from gpmil.inference.at_settings import Settings
from gpmil.inference.folded_cohort import folded
from gpmil.inference.pieces import Chunk
from gpmil.models import smoothing
from gpmil.models.batches import BatchSource
from gpmil.models.with_novelty import SEEN
from gpmil.moments import effect_sums, slide_effect, truncated
from gpmil.moments.given_effect import Patches, all_below, some_above
from gpmil.moments.likelihood import Group
from gpmil.moments.taught import patches
from gpmil.process import features, inducing

GPU = torch.device("cuda")

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device"),
]


@pytest.mark.parametrize("solver", ["direct", "newton", "sweeps"])
@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("strength", [0.0, 0.7])
def test_cpu_and_gpu_agree(solver, dtype, strength):
    bags = gpmil.simulate.cohort(n_bags=24, n_features=32, seed=3)
    settings = {
        "coupling": strength, "solver": solver, "dtype": dtype, "n_inducing": 60, "random_state": 1,
        "variance": 4.0, "mean": -1.0,
    }  # fmt: skip
    cpu, gpu = (pri(**settings, device=d).fit(bags) for d in ("cpu", "cuda"))
    # sweeps multiply in the storage dtype, each in its own order
    most = 1e-4 if (solver, dtype) == ("sweeps", "float32") else 1e-6
    assert relative_error(gpu.posterior_mean_, cpu.posterior_mean_) < most
    assert relative_error(gpu.posterior_covariance_, cpu.posterior_covariance_) < 1e-6
    a, b = cpu.predict_instances(bags), gpu.predict_instances(bags)
    assert relative_error(b.probability, a.probability) < most
    assert relative_error(b.std, a.std) < 1e-6
    assert relative_error(gpu.decision_function(bags), cpu.decision_function(bags)) < 10 * most


@pytest.mark.parametrize("solver", ["direct", "newton", "sweeps"])
def test_coupled_moments_agree(solver):
    bags = gpmil.simulate.cohort(n_bags=14, n_features=16, seed=3)
    settings = {
        "coupling": 0.9, "solver": solver, "moments": "coupled", "n_inducing": 40,
        "random_state": 1, "max_iter": 60,
    }  # fmt: skip
    cpu, gpu = (pri(**settings, device=d).fit(bags) for d in ("cpu", "cuda"))
    assert relative_error(gpu.posterior_mean_, cpu.posterior_mean_) < 1e-6
    assert relative_error(gpu.elbo_trace_, cpu.elbo_trace_) < 1e-6


def test_a_large_bag_on_the_gpu():
    bags = gpmil.simulate.cohort(n_bags=6, n_features=16, seed=5, mean_size=700)
    assert bags.sizes.max() > 256  # the banded factorisation
    settings = {"coupling": 1.3, "n_inducing": 40, "random_state": 0}
    cpu, gpu = (pri(**settings, device=d).fit(bags) for d in ("cpu", "cuda"))
    assert relative_error(gpu.posterior_mean_, cpu.posterior_mean_) < 1e-6
    a, b = cpu.predict_instances(bags), gpu.predict_instances(bags)
    assert relative_error(b.std, a.std) < 1e-6
    value, error = cpu.log_proba_negative(bags)
    assert np.all(np.abs(gpu.log_proba_negative(bags)[0] - value) <= np.maximum(0.01, 2 * error))


@pytest.mark.parametrize("store", ["memory", "disk"])
@pytest.mark.parametrize("expected_max", ["product", "largest"])
def test_vgpmil_agrees(expected_max, store):
    bags = gpmil.simulate.cohort(n_bags=16, n_features=16, seed=3)
    settings = {"expected_max": expected_max, "n_inducing": 40, "random_state": 1, "max_iter": 60}
    cpu = gpmil.VGPMIL(**settings, device="cpu").fit(bags)
    gpu = gpmil.VGPMIL(**settings, device="cuda", store=store).fit(bags)
    assert relative_error(gpu.posterior_mean_, cpu.posterior_mean_) < 1e-6
    assert relative_error(gpu.elbo_trace_, cpu.elbo_trace_) < 1e-8
    a, b = cpu.predict_instances(bags), gpu.predict_instances(bags)
    assert relative_error(b.probability, a.probability) < 1e-6


@pytest.mark.parametrize(
    "model",
    [
        gpmil.AttentionMIL(),
        gpmil.AttentionMIL(gated=True, smooth=0.7),
        gpmil.AttentionMIL(smooth="learn", smoothing="approximate"),
        gpmil.MeanPoolMIL(),
        gpmil.MaxPoolMIL(),
    ],
    ids=repr,
)
def test_networks_agree(model):
    bags = gpmil.simulate.cohort(n_bags=16, n_features=16, seed=3)
    model.set_params(max_epochs=5, dtype="float64", random_state=1)
    if "dropout" in model.get_params():
        model.set_params(dropout=0.0)  # the random streams of the two differ
    cpu, gpu = (clone(model).set_params(device=d).fit(bags) for d in ("cpu", "cuda"))
    assert relative_error(gpu.decision_function(bags), cpu.decision_function(bags)) < 1e-6


def test_smoothing_of_bags_too_large_to_be_padded_agrees():
    bags = gpmil.simulate.cohort(n_bags=6, n_features=16, seed=5, mean_size=1300)
    assert bags.sizes.max() ** 2 > smoothing.PADDED
    model = gpmil.AttentionMIL(smooth="learn", smoothing="approximate", batch_size=2)
    model.set_params(max_epochs=3, dtype="float64", random_state=1)
    cpu, gpu = (clone(model).set_params(device=d).fit(bags) for d in ("cpu", "cuda"))
    assert gpu.smooth_ == pytest.approx(cpu.smooth_, rel=1e-5)
    assert relative_error(gpu.attention(bags), cpu.attention(bags)) < 1e-5


@pytest.mark.parametrize(
    "model",
    [
        gpmil.AttentionMIL(gated=True, dropout=0.1),
        gpmil.AttentionMIL(smooth=0.7, smoothing="approximate"),
        gpmil.MeanPoolMIL(),
        gpmil.MaxPoolMIL(),
    ],
    ids=repr,
)
def test_a_training_step_does_not_wait_for_the_gpu(model, monkeypatch):
    bags = gpmil.simulate.cohort(n_bags=16, n_features=16, seed=3)
    batches = BatchSource.batches

    def watched(self, parts):
        for batch in batches(self, parts):
            torch.cuda.set_sync_debug_mode("error")
            try:
                yield batch
            finally:
                torch.cuda.set_sync_debug_mode("default")

    monkeypatch.setattr(BatchSource, "batches", watched)
    assert (
        len(model.set_params(max_epochs=2, random_state=0, device="cuda").fit(bags).history_) == 2
    )


# --- The fused sweep ------------------------------------------------------------------------------


@pytest.mark.parametrize(("dtype", "tolerance"), [("float64", 1e-9), ("float32", 1e-4)])
@pytest.mark.parametrize("strength", [0.0, 0.9])
@pytest.mark.parametrize("n_inducing", [37, 40])  # rows of 40 columns go through the ring
def test_the_fused_sweep_equals_its_plain_twin(dtype, tolerance, strength, n_inducing):
    pytest.importorskip("triton")
    bags = gpmil.simulate.cohort(n_bags=30, n_features=12, seed=3)
    model = gpmil.VGPMILPRI(
        coupling=strength, variance=3.0, lengthscale=3.0, mean=-0.4, n_inducing=n_inducing,
        random_state=0, device="cuda", dtype=dtype, solver="sweeps", max_iter=1,
    ).fit(bags)  # fmt: skip
    with torch.no_grad():
        problem = model._problem(model._gp(GPU), WholeCohort(bags, GPU, bags.labels))
        w = inference.signed(problem)
        fast = fused.advance(problem.chunks, problem.chol_R, problem.c, w, 25)
        slow = inference._sweep(problem, w, 25)
    assert fast is not None
    assert float((fast[0] - slow[0]).norm() / slow[0].norm()) < tolerance
    assert np.allclose(fast[1], slow[1], rtol=tolerance)


def chunk_on_gpu(strength=0.9, dtype="float32", **changed):
    """One piece of a cohort on the GPU, and a place where to look at it."""
    bags = gpmil.simulate.cohort(n_bags=30, n_features=12, seed=3)
    model = gpmil.VGPMILPRI(**({
        "coupling": strength, "variance": 3.0, "lengthscale": 3.0, "mean": -0.4, "n_inducing": 37,
        "random_state": 0, "device": "cuda", "dtype": dtype, "max_iter": 60,
    } | changed)).fit(bags)  # fmt: skip
    problem = model._problem(model._gp(GPU), WholeCohort(bags, GPU, bags.labels))
    return problem.chunks[0], inference.signed(problem)


def apart(found, expected):
    """The relative error of what lies on the GPU."""
    return relative_error(found.cpu(), expected.cpu())


@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("scale", [0.3, 1.0, 30.0])
@pytest.mark.parametrize("n_inducing", [37, 40])
@torch.no_grad()
def test_fused_derivatives_equal_their_plain_twin(dtype, scale, n_inducing):
    pytest.importorskip("triton")
    chunk, w = chunk_on_gpu(dtype=dtype, n_inducing=n_inducing)
    w = scale * w  # far out, too, where tails are all that is left
    found = chunk.likelihood.bound(chunk.H, w, -0.4)
    gamma, log_z, A = chunk.likelihood.curvature(chunk.H.double() @ w - 0.4)
    assert found[0] == pytest.approx(float(log_z), rel=1e-12)
    assert apart(found[1], chunk.H.double().mT @ gamma) < 1e-11
    H = chunk.H.double()
    assert apart(found[2], A(H, H)) < (1e-10 if dtype == "float64" else 1e-5)
    rise = chunk.likelihood.rise(chunk.H, w, -0.4)
    assert rise[0] == found[0] and torch.equal(rise[1], found[1])
    assert apart(chunk.times(w), H @ w) < 1e-14
    assert apart(chunk.against(gamma), H.mT @ gamma) < 1e-12


def bags_of(sizes, M, near):
    """H, sigma, P as `near` neighbours per row, offsets, labels, largest first: all random."""
    rng = np.random.default_rng(len(sizes))
    offsets, n = np.concatenate([[0], np.cumsum(sizes)]), int(np.sum(sizes))
    bag = np.repeat(np.arange(len(sizes)), sizes)
    other = offsets[bag][:, None] + (rng.random((n, near)) * sizes[bag][:, None]).astype(np.int64)
    P = fused.Neighbours(
        *(torch.from_numpy(x).to(GPU) for x in (1 + rng.random(n), other, rng.random((n, near))))
    )
    rest = (
        0.5 + rng.random(n), offsets, rng.random(len(sizes)) < 0.6, np.argsort(-sizes, stable=True)
    )  # fmt: skip
    H = torch.from_numpy(rng.normal(size=(n, M)) / M**0.5).float().to(GPU)
    return H, P, *(torch.from_numpy(x).to(GPU) for x in rest)


@pytest.mark.parametrize(
    ("sizes", "M", "near"),
    [
        ([1, 700, 30, 15, 263, 264, 1, 2, 90, 400, 5], 200, 4),  # some larger than the ring
        (list(range(1, 60)) * 90, 36, 3),  # more bags than slots, many per program
        ([7] * 3000, 8, 2),
        (list(range(1, 300)), 400, 1),
    ],
    ids=str,
)
@torch.no_grad()
def test_the_ring_equals_tritons_kernels(sizes, M, near, monkeypatch):
    pytest.importorskip("triton")
    H, P, sigma, offsets, positive, order = bags_of(np.array(sizes), M, near)
    if ring.serves(H, "rise") is None:
        pytest.skip("needs a GPU from Hopper on, and cuda-bindings")
    w = torch.from_numpy(np.random.default_rng(5).normal(size=M)).to(GPU)

    group = Group(sigma, offsets, positive, None, slice(0, len(H)))
    assert torch.equal(group.largest_first, order)

    def both():
        made = fused_pass.Pass(H, sigma, offsets, positive, order)
        launch = fused.launched(Chunk(H, patches(group)), P)
        launch.run(w, w.new_tensor([-0.4]))
        return *made._run(w, -0.4), launch.log_z.sum(), launch.partial.sum(0)

    found = both()
    monkeypatch.setattr(ring, "serves", lambda *_: None)
    expected = both()
    assert found[0] == pytest.approx(expected[0], rel=1e-13)
    for a, b in zip(found[1:4], expected[1:4], strict=True):  # multiplied in float64
        assert apart(a, b) < 1e-13
    for a, b in zip(found[4:], expected[4:], strict=True):  # in float32
        assert apart(a, b) < 1e-6


@torch.no_grad()
def test_hessians_of_many_rows_are_those_of_whole_products(monkeypatch):
    pytest.importorskip("triton")
    sizes = np.full(2100, 70)  # 147,000 rows
    H, _, sigma, offsets, positive, order = bags_of(sizes, 40, 1)
    assert len(H) >= fused_pass.MANY_ROWS
    w = torch.from_numpy(np.random.default_rng(6).normal(size=40)).to(GPU)
    made = fused_pass.Pass(H, sigma, offsets, positive, order)
    short = made.bound(w, -0.4)[2]
    assert not torch.backends.cuda.matmul.allow_tf32
    monkeypatch.setattr(fused_pass, "MANY_ROWS", 10**9)
    assert apart(short, made.bound(w, -0.4)[2]) < 1e-4


@pytest.mark.parametrize("tau", [0.3, 1.0, 3.0])
@pytest.mark.parametrize("given", [all_below, some_above])
@torch.no_grad()
def test_fused_sums_over_the_effect_equal_their_plain_twin(tau, given):
    pytest.importorskip("triton")
    chunk, w = chunk_on_gpu()
    group, tau = chunk.group, torch.tensor(tau, dtype=torch.float64, device=GPU)
    for shift in (-3.0, 0.0, 2.0):
        mu = chunk.times(w) + shift
        patches = Patches.of(mu, group.sigma, group.offsets, group.row)
        assert effect_sums.compiled_sums(patches, tau, given, True, len(mu)).served.all()
        fast, plain = (f(patches, tau, given) for f in (over_effect, slide_effect._plain_sums))
        for name, a, b in zip(fast._fields, fast, plain):
            assert apart(a, b) < 1e-6, name
    if given is all_below:
        log_q, slope = slide_effect._below_alone(patches, tau)
        assert apart(log_q, plain.log_z) < 1e-7
        assert apart(slope, plain.gamma) < 1e-6


def over_effect(patches, tau, given):
    return slide_effect._over_effect(patches, tau, given, len(patches.mu))


@pytest.mark.parametrize("solver", ["direct", "newton"])
def test_a_slide_effect_agrees(solver):
    bags = gpmil.simulate.cohort(n_bags=24, n_features=32, seed=3)
    settings = {
        "coupling": 0.7, "solver": solver, "n_inducing": 40, "random_state": 1, "slide_effect": 1.1,
        "variance": 4.0, "mean": -1.0, "tol": 1e-8,
    }  # fmt: skip
    cpu, gpu = (pri(**settings, device=d).fit(bags) for d in ("cpu", "cuda"))
    assert relative_error(gpu.posterior_mean_, cpu.posterior_mean_) < 1e-5
    assert relative_error(gpu.elbo_trace_[-1], cpu.elbo_trace_[-1]) < 1e-8


def test_seeds_of_k_means_are_those_of_the_plain_way():
    pytest.importorskip("triton")
    x = torch.from_numpy(np.random.default_rng(0).normal(size=(700, 9))).float()
    assert torch.equal(inducing.spread(x.to(GPU), 24, 5).cpu(), inducing.spread(x, 24, 5))


def test_erfcx_is_accurate():
    x = np.concatenate([np.linspace(-20, 60, 4001), np.logspace(-9, 5, 100)])
    found = truncated._erfcx(torch.from_numpy(x).to(GPU)).cpu().numpy()
    np.testing.assert_allclose(found, erfcx(x), rtol=3e-13)


def test_where_the_fused_sweep_does_not_apply():
    bags = gpmil.simulate.cohort(n_bags=8, n_features=12, seed=1)
    settings = {"variance": 1.0, "lengthscale": 2.0, "mean": 0.0, "n_inducing": 9}
    for changed in ({"moments": "coupled"}, {"store": "recompute"}):
        model = gpmil.VGPMILPRI(
            coupling=0.5, solver="sweeps", max_iter=5, device="cuda", random_state=0,
            **settings, **changed,
        ).fit(bags)  # fmt: skip
        with torch.no_grad():
            problem = model._problem(model._gp(GPU), WholeCohort(bags, GPU, bags.labels))
            w = inference.signed(problem)
            assert fused.advance(problem.chunks, problem.chol_R, problem.c, w, 5) is None


@pytest.mark.parametrize("store", ["disk", "recompute"])
def test_H_elsewhere_than_on_the_gpu(store):
    bags = gpmil.simulate.cohort(n_bags=12, n_features=12, seed=2)
    settings = {
        "coupling": 0.5, "variance": 1.0, "lengthscale": 2.0, "mean": 0.0, "n_inducing": 15,
        "random_state": 0, "device": "cuda",
    }  # fmt: skip
    a, b = (gpmil.VGPMILPRI(**settings, store=s).fit(bags) for s in ("memory", store))
    assert np.allclose(a.posterior_mean_, b.posterior_mean_, rtol=1e-9)


def test_features_too_large_for_the_gpu_are_streamed(monkeypatch):
    bags = gpmil.simulate.cohort(n_bags=12, n_features=12, seed=2)
    settings = {
        "coupling": 0.5, "variance": 1.0, "lengthscale": 2.0, "mean": 0.0, "n_inducing": 15,
        "random_state": 0, "device": "cuda",
    }  # fmt: skip
    resident = gpmil.VGPMILPRI(**settings).fit(bags)
    monkeypatch.setattr(features, "GPU_SHARE", 0.0)
    streamed = gpmil.VGPMILPRI(**settings).fit(bags)
    assert np.allclose(resident.posterior_mean_, streamed.posterior_mean_, rtol=1e-7)


def test_grades_and_types_agree():
    bags, y, _ = gpmil.simulate.graded_cohort(18, n_grades=3, n_features=16, mean_size=20, seed=3)
    settings = {
        "variance": 20.0, "lengthscale": 8.0, "mean": -3.0, "coupling": 0.5, "slide_effect": 0.6,
        "n_inducing": 30, "random_state": 1,
    }  # fmt: skip
    ordinal = gpmil.OrdinalMIL(**settings, cut_points=[0, 2.5])
    for model in (ordinal, gpmil.NominalMIL(**settings)):
        cpu, gpu = (clone(model).set_params(device=d).fit(bags, y) for d in ("cpu", "cuda"))
        assert relative_error(gpu.posterior_mean_, cpu.posterior_mean_) < 1e-6
        assert np.allclose(gpu.predict_proba(bags), cpu.predict_proba(bags), atol=1e-4)
        a, b = (m.predict_instances(bags).class_probability for m in (cpu, gpu))
        assert np.allclose(a, b, atol=1e-6)
        a, b = (m.leave_one_bag_out(bags, y) for m in (cpu, gpu))
        assert np.allclose(a, b, atol=1e-3)
    cpu, gpu = (clone(ordinal).set_params(device=d).fit(bags, y) for d in ("cpu", "cuda"))
    assert np.allclose(gpu.predict_areas(bags).share, cpu.predict_areas(bags).share, atol=1e-2)
    learned = clone(ordinal).set_params(cut_points="auto", slide_effect="auto", tuning_budget=6)
    cpu, gpu = (clone(learned).set_params(device=d).fit(bags, y) for d in ("cpu", "cuda"))
    assert np.allclose(gpu.cut_points_, cpu.cut_points_, rtol=0.05)


@pytest.mark.parametrize("tau", [0.0, 0.8])
@pytest.mark.parametrize("strength", [0.0, 0.6])
def test_settings_are_judged_alike(tau, strength):
    bags = gpmil.simulate.cohort(n_bags=30, n_features=16, mean_size=25, seed=3)
    Z = torch.from_numpy(bags.features[5::40].astype(np.float64))
    rows, labels = np.arange(bags.n_instances), bags.labels == 1
    inputs = lambda x: torch.from_numpy(x.astype(np.float64))  # noqa: E731
    cohort = folded(bags, rows, labels, inputs, Z, "rbf")
    point = Settings(20.0, 9.0, -5.0, strength, tau)
    cpu, gpu = (objective.gradient(one, point) for one in (cohort, cohort.on(GPU)))
    assert np.allclose(gpu.scores, cpu.scores, atol=1e-6)
    assert np.allclose(gpu.settings, cpu.settings, rtol=1e-5, atol=1e-8)
    # fits of a CPU are a start on the GPU
    start = objective.carried(cpu.fits, cohort, cohort.on(GPU), point)
    assert relative_error(start.w[0].cpu().numpy(), cpu.fits.w[0].numpy()) < 1e-3
    near, _ = objective.value(cohort.on(GPU), point, start)
    assert abs(near - cpu.score) < 1e-6


def test_settings_learned_beside_a_gpu_are_those_of_a_cpu(monkeypatch):
    monkeypatch.setattr(tuning, "SMALL", 2**10)  # a pilot comes first
    monkeypatch.setattr(tuning, "PILOT_ROWS", 500)
    bags = gpmil.simulate.cohort(n_bags=40, n_features=16, mean_size=25, seed=4)
    model = gpmil.VGPMILPRI(n_inducing=40, random_state=0)
    cpu, gpu = (clone(model).set_params(device=d).fit(bags) for d in ("cpu", "cuda"))
    assert np.isclose(gpu.loo_log_likelihood_, cpu.loo_log_likelihood_, atol=1e-5)
    assert np.allclose(gpu.variance_, cpu.variance_, rtol=1e-3)
    assert np.allclose(gpu.slide_effect_, cpu.slide_effect_, rtol=1e-3)


def test_novelty_agrees():
    bags = gpmil.simulate.cohort(n_bags=24, n_features=16, seed=3)
    bags = bags.with_groups(np.arange(24) // 2)
    settings = {"coupling": 0.7, "n_inducing": 150, "random_state": 1, "slide_effect": 0.4}
    cpu, gpu = (pri(**settings, device=d).fit(bags) for d in ("cpu", "cuda"))
    for name in SEEN:
        a, b = (getattr(model, name) for model in (cpu, gpu))
        np.testing.assert_allclose(b, a, rtol=1e-6, atol=1e-8 * np.abs(a).max())
    a, b = (model.predict_novelty(bags) for model in (cpu, gpu))
    np.testing.assert_allclose(b, a, rtol=1e-6)
