"""Symmetric products against the plain ones."""

from concurrent.futures import ThreadPoolExecutor
from threading import Barrier, Event

import numpy as np
import pytest
import torch
from synthetic import pri
from threadpoolctl import threadpool_info, threadpool_limits

from gpmil.fast import lanes, products


def draw(n, M, dtype):
    generator = torch.Generator().manual_seed(n)
    H = torch.randn(n, M, dtype=torch.float64, generator=generator)
    return H.to(dtype), torch.randn(n, dtype=torch.float64, generator=generator)


@pytest.fixture(params=[True, False], ids=["tiles", "BLAS"])
def tiles(request, monkeypatch):
    """With tiles, where they are a gain, and without."""
    if not request.param:
        monkeypatch.setattr(products, "tiled", lambda: None)


@pytest.mark.usefixtures("tiles")
@pytest.mark.parametrize("n", [0, 1, 7, 2500])  # none, and more than go at a time
@pytest.mark.parametrize("M", [5, 33, 48])  # less than a vector, some with a rest, whole tiles
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-4)])
def test_products_are_the_plain_ones(n, M, dtype, tolerance):
    H, weights = draw(n, M, dtype)
    weights[::3] = 0
    expected = H.double().mT @ (weights[:, None] * H.double())
    found = products.weighted_gram(H, weights.to(dtype))
    assert found.dtype == torch.float64
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance * max(n, 1))
    plain = H.double().mT @ H.double()
    torch.testing.assert_close(
        products.gram(H).double(), plain, rtol=tolerance, atol=tolerance * max(n, 1)
    )
    other = draw(n, M, dtype)[0].roll(1, 1)
    half = products.half_gram(H, other).double()
    plain = (H.double().mT @ other.double()).tril()
    torch.testing.assert_close(half.tril(), plain, rtol=tolerance, atol=tolerance * max(n, 1))
    assert torch.equal(half, half.mT)


@pytest.mark.usefixtures("tiles")
@pytest.mark.parametrize(
    "shape", [(0, 3, 4), (1, 1, 1), (9, 5, 0), (5, 0, 3), (70, 9, 33), (131, 48, 40)]
)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-13), (torch.float32, 1e-5)])
@pytest.mark.parametrize("triangle", [0, 1, -1])
def test_one_matrix_times_another(shape, dtype, tolerance, triangle):
    n, k, m = shape
    A, B = draw(n, k, dtype)[0], draw(k, m, dtype)[0]
    B = B.triu() if triangle > 0 else B.tril() if triangle < 0 else B
    found = products.matmul(A, B, triangle)
    assert found.dtype == dtype
    expected = A.double() @ B.double()
    torch.testing.assert_close(found.double(), expected, rtol=0, atol=tolerance * max(k, 1))


def test_rows_of_a_product_do_not_hang_on_those_beside_them(monkeypatch):
    A, B = draw(300, 37, torch.float64)[0].numpy(), draw(37, 29, torch.float64)[0].numpy()
    whole = products.times(A, B)
    monkeypatch.setattr(products, "SIDE_BY_SIDE", 0)  # in lanes
    np.testing.assert_array_equal(products.times(A, B), whole)
    apart = np.concatenate([products.times(A[s : s + 7], B) for s in range(0, 300, 7)])
    if products.tiled() is not None:
        np.testing.assert_array_equal(apart, whole)
    np.testing.assert_allclose(apart, whole, rtol=1e-12)


def test_columns_of_a_transposed_matrix_and_gradients():
    H, weights = draw(9, 4, torch.float64)
    torch.testing.assert_close(products.gram(H.mT.contiguous().mT), H.mT @ H)
    torch.testing.assert_close(products.matmul(H.mT.contiguous().mT, H.mT), H @ H.mT)
    H.requires_grad_()
    products.weighted_gram(H, weights).sum().backward()
    assert H.grad.isfinite().all()


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-14), (torch.float32, 1e-5)])
@pytest.mark.parametrize("known", [True, False])  # whether oneDNN is there
def test_affine_rows(dtype, tolerance, known, monkeypatch):
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: known)
    x, bias = draw(7, 5, dtype)
    z, bias = draw(3, 5, dtype)[0], bias[:3].to(dtype)
    expected = x.double() @ z.double().mT + bias.double()
    found = products.affine(x, z, bias)
    assert found.dtype == dtype and found.layout == torch.strided
    torch.testing.assert_close(found.double(), expected, rtol=tolerance, atol=tolerance)


def test_one_thread_inside_one_thread():
    before = torch.get_num_threads()
    with lanes.few_threads():
        with lanes.few_threads():
            assert torch.get_num_threads() == 1
        assert torch.get_num_threads() == 1
    assert torch.get_num_threads() == before
    with pytest.raises(RuntimeError), lanes.few_threads():
        raise RuntimeError
    assert torch.get_num_threads() == before


def test_products_of_numpy_have_one_thread_inside():
    def threads():
        return [x["num_threads"] for x in threadpool_info() if x["user_api"] == "blas"]

    with threadpool_limits(2, user_api="blas"):
        before, torchs = threads(), torch.get_num_threads()
        with lanes.one_blas_thread():
            with lanes.few_threads():
                assert set(threads()) == {1}
            assert set(threads()) == {1} and torch.get_num_threads() == torchs
        assert threads() == before


def test_overlapping_work_with_one_thread_leaves_the_numbers_as_they_were():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    inside, leave = Barrier(3), [Event(), Event()]

    def work(k):
        with lanes.few_threads():
            inside.wait()
            leave[k].wait()
            seen = torch.get_num_threads()
        return seen, torch.get_num_threads()

    try:
        with ThreadPoolExecutor(2) as threads:
            done = [threads.submit(work, k) for k in range(2)]
            inside.wait()
            for k in range(2):
                leave[k].set()
                assert done[k].result() == (1, 2)
        assert torch.get_num_threads() == 2
        with ThreadPoolExecutor(1) as new:
            assert new.submit(torch.get_num_threads).result() == 2
    finally:
        torch.set_num_threads(before)


def test_lanes_work_side_by_side_inside_one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    meet = Barrier(2, timeout=20)  # broken if one of them worked alone

    def work(lane):
        meet.wait()
        return [(*lane, torch.get_num_threads())]

    try:
        with lanes.few_threads():
            assert lanes.in_lanes([5, 7], work, lambda a, b: a + b) == [(5, 1), (7, 1)]
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize(
    "method",
    ["predict_proba", "predict_instances", "predict_all", "predict_interval", "predict_evidence",
     "predict_patients", "predict_novelty", "leave_one_bag_out", "leave_one_patient_out", "update"],
)  # fmt: skip
def test_public_methods_have_one_thread_inside_products_of_numpy(cohort, monkeypatch, method):
    """With two, small factors wait for each other: predictions took ten times as long."""
    model = pri(n_inducing=12).fit(cohort)
    seen = []

    def watched(self, *args):
        seen.extend(x["num_threads"] for x in threadpool_info() if x["user_api"] == "blas")
        return inputs(self, *args)

    inputs = type(model)._inputs
    monkeypatch.setattr(type(model), "_inputs", watched)
    with threadpool_limits(2, user_api="blas"):
        getattr(model, method)(cohort)
    assert seen and set(seen) == {1}


@pytest.mark.parametrize("shape", [(7,), (0, 3), (9, 5), (3, 4, 6)])
def test_products_of_rows(shape):
    rng = np.random.default_rng(len(shape))
    A, B = (torch.from_numpy(rng.normal(size=shape)) for _ in range(2))
    expected = (A * B).sum(-1)
    torch.testing.assert_close(products.dots(A, B), expected, rtol=1e-12, atol=1e-13)
    found = products.dots(A.clone().requires_grad_(), B)
    torch.testing.assert_close(found.detach(), expected, rtol=1e-12, atol=1e-13)
    assert found.requires_grad
