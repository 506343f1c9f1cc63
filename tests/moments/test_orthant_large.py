import numpy as np
import pytest
import scipy.sparse as sp
import torch
from oracles.orthant import slide, slide_parts

from gpmil.coupling.operator import Banded
from gpmil.moments.low_rank import Band, local_solve, pivoted_cholesky, selected_inverse
from gpmil.moments.orthant import expand, log_orthant
from gpmil.moments.orthant_large import LargeSlide, log_orthant_large

PAPER = {"variance": 1.0, "length": 1.0, "mean": 0.0}
WIDE = {"variance": 50.0, "length": 4.0, "mean": -4.0}


def both(shape, coupling, rank, shift=0.0, shuffle=None, effect=0.0, **setting):
    """The result for large slides, and that of dense EP, on the same slide."""
    mu, precision, factor, residual = slide_parts(*shape, coupling, **setting)
    _, cov = slide(*shape, coupling, **setting)
    order = np.arange(len(mu)) if shuffle is None else shuffle.permutation(len(mu))
    precision, residual = (a[np.ix_(order, order)] for a in (precision, residual))
    rows, cov = torch.from_numpy(residual + effect**2), cov + effect**2
    large = log_orthant_large(
        torch.from_numpy(mu[order] + shift),
        torch.from_numpy(np.diag(cov)[order].copy()),
        sp.csr_array(precision),
        torch.from_numpy(factor[order]),
        lambda i: rows[i],
        rows.diagonal(),
        rank=rank,
        effect=effect,
    )
    dense = log_orthant(
        torch.from_numpy(mu + shift)[None], torch.from_numpy(cov)[None], effect=effect
    )
    return large, dense


@pytest.mark.parametrize("setting", [PAPER, WIDE], ids=["paper", "wide"])
@pytest.mark.parametrize("coupling", [0.5, 10.0])
def test_equals_dense_ep_when_nothing_is_left_out(setting, coupling):
    large, dense = both((9, 14), coupling, rank=126, **setting)
    assert float(large.log_p) == pytest.approx(float(dense.log_p), abs=1e-3)
    assert float(large.error) == pytest.approx(float(dense.error), rel=0.01)


@pytest.mark.parametrize("setting", [PAPER, WIDE], ids=["paper", "wide"])
@pytest.mark.parametrize("coupling", [0.5, 10.0])
@pytest.mark.parametrize("rank", [10, 20])
def test_sites_of_a_simpler_covariance_are_good_enough(setting, coupling, rank):
    large, dense = both((9, 14), coupling, rank=rank, **setting)
    off = abs(float(large.log_p - dense.log_p))
    assert off < float(large.error) + 0.002
    assert off < (0.12 if rank == 10 else 0.04)


@pytest.mark.parametrize("setting", [PAPER, WIDE], ids=["paper", "wide"])
@pytest.mark.parametrize("effect", [0.3, 1.1, 3.0])
@pytest.mark.parametrize("rank", [20, 126])
def test_an_effect_is_summed_over_as_in_dense_ep(setting, effect, rank):
    large, dense = both((9, 14), 1.0, rank=rank, effect=effect, shift=-1.2, **setting)
    off = abs(float(large.log_p - dense.log_p))
    assert off < (3e-4 if rank == 126 else 2e-3)
    assert float(large.error) == pytest.approx(float(dense.error), rel=0.3)


def test_no_effect_is_the_limit():
    tiny, _ = both((9, 14), 1.0, rank=126, effect=1e-4, **WIDE)
    none, _ = both((9, 14), 1.0, rank=126, **WIDE)
    assert float(tiny.log_p) == pytest.approx(float(none.log_p), abs=2e-3)


def test_both_tails_with_an_effect():
    large, dense = both((9, 14), 5.0, rank=20, shift=-8.0, effect=0.7)
    assert float(dense.log_1mp) < -9
    assert abs(float(large.log_1mp - dense.log_1mp)) < 0.03
    large, dense = both((9, 14), 5.0, rank=20, shift=20.0, effect=0.7)
    assert abs(float(large.log_p - dense.log_p)) < 0.01 * abs(float(dense.log_p))


def test_order_of_the_instances_does_not_matter():
    straight, _ = both((9, 14), 2.0, rank=10)
    shuffled, _ = both((9, 14), 2.0, rank=10, shuffle=np.random.default_rng(5))
    assert float(straight.log_p) == pytest.approx(float(shuffled.log_p), abs=1e-3)


def expansions(coupling, effect=0.0, rank=126):
    """The expansion of a large slide, the dense one, and the slope that is found without it."""
    mu, precision, factor, residual = slide_parts(9, 14, coupling, **WIDE)
    sigma, rows = np.linalg.inv(precision), torch.from_numpy(residual + effect**2)
    cov = torch.from_numpy(sigma + sigma @ residual @ sigma + effect**2)
    mu, PG = torch.from_numpy(mu), torch.from_numpy(factor)
    G = torch.from_numpy(sigma) @ PG
    bag = LargeSlide(
        sp.csr_array(precision), PG[:, :0], lambda i: rows[i], rows.diagonal(), rank, effect
    )
    mask = torch.ones(1, len(mu), dtype=torch.bool)
    dense = expand(mu[None], cov[None], mask, G[None], effect=effect)
    return bag.expand(mu, cov.diagonal(), PG), dense, bag.slope(mu, cov.diagonal(), G)


@pytest.mark.parametrize("coupling", [0.5, 10.0])
def test_expansion_equals_the_dense_one(coupling):
    large, dense, rough = expansions(coupling)
    assert float(large.value.log_p) == pytest.approx(float(dense.value.log_p), abs=1e-3)
    for a, b in zip(large[1:], dense[1:]):
        assert (a - b).abs().max() < 5e-3 * b.abs().max()
    assert (rough - dense.slope[0]).abs().max() < 5e-3 * dense.slope.abs().max()


@pytest.mark.parametrize("effect", [0.3, 1.1, 3.0])
@pytest.mark.parametrize("rank", [20, 126])
def test_expansion_over_an_effect_is_near_the_dense_one(effect, rank):
    large, dense, rough = expansions(1.0, effect, rank)
    size = dense.slope.abs().max()
    assert (large.slope - dense.slope).abs().max() < 0.02 * size
    assert (rough - dense.slope[0]).abs().max() < 0.02 * size
    # three factorisations in place of one at each value
    assert (large.bend - dense.bend).abs().max() < 0.1 * dense.bend.abs().max()


def test_no_coupling_at_all():
    large, dense = both((6, 7), 0.0, rank=42)
    assert float(large.log_p) == pytest.approx(float(dense.log_p), abs=1e-3)


def test_both_tails():
    large, dense = both((9, 14), 5.0, rank=20, shift=-8.0)
    assert float(dense.log_1mp) < -9
    assert abs(float(large.log_1mp - dense.log_1mp)) < 0.02
    large, dense = both((9, 14), 5.0, rank=20, shift=20.0)
    assert float(dense.log_p) < -1000
    assert abs(float(large.log_p - dense.log_p)) < min(float(large.error), 2.0)


def test_selected_inverse():
    _, precision, _, _ = slide_parts(7, 15, 3.0)
    q = precision @ np.diag(np.linspace(0.5, 30, 105)) @ precision + precision
    band = Band(sp.csr_array(precision))
    factor = band.factor(sp.csr_array(q))
    assert isinstance(factor, Banded) and band.count > 2
    want, s = np.linalg.inv(q), band.size
    diagonal, lower = (b.numpy() for b in selected_inverse(factor))
    np.testing.assert_allclose(diagonal[1], want[s : 2 * s, s : 2 * s], rtol=1e-9, atol=1e-13)
    np.testing.assert_allclose(lower[0], want[s : 2 * s, :s], rtol=1e-9, atol=1e-13)
    np.testing.assert_allclose(
        band.congruence_diagonal(sp.csr_array(precision), factor).numpy(),
        np.diag(precision @ want @ precision),
        rtol=1e-8,
    )


def test_local_solve_cuts_what_has_decayed():
    _, precision, _, _ = slide_parts(60, 8, 0.5)
    sparse = sp.csr_array(precision)
    band = Band(sparse)
    factor = band.factor(sparse)
    for cols in (torch.arange(5), torch.arange(200, 230), torch.arange(470, 480)):
        right = torch.from_numpy(precision[:, cols.numpy()] @ np.diag(np.linspace(1, 9, len(cols))))
        want, got = factor.apply(right), local_solve(factor, right, cols)
        assert (got - want).abs().max() < 1e-4 * want.abs().max()
        assert (got == 0).any()


def test_pivoted_cholesky_leaves_a_diagonal():
    _, _, _, residual = slide_parts(5, 6, 1.0)
    rows = torch.from_numpy(residual)
    factor, left = pivoted_cholesky(lambda i: rows[i], rows.diagonal(), rank=12)
    rest = rows - factor @ factor.mT
    np.testing.assert_allclose(rest.diagonal().numpy(), left.numpy(), atol=1e-12)
    assert torch.linalg.eigvalsh(rest).min() > -1e-9
    assert left.sum() < 0.7 * rows.diagonal().sum()


def test_a_covariance_that_is_none():
    mu, precision, factor, residual = slide_parts(5, 6, 1.0)
    rows = torch.from_numpy(residual - 40 * np.ones_like(residual))
    with pytest.raises(ValueError, match="positive semi-definite"):
        log_orthant_large(
            torch.from_numpy(mu), torch.ones(30).double(), sp.csr_array(precision),
            torch.from_numpy(factor), lambda i: rows[i], rows.diagonal().clamp(min=0),
        )  # fmt: skip
