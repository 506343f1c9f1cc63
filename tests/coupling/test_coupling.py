import itertools

import numpy as np
import pytest
import scipy.sparse as sp
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles.model import coupling_matrix, kernel

from gpmil.coupling import dense, envelope
from gpmil.coupling import operator as coupling
from gpmil.coupling.operator import (
    Banded,
    Coupling,
    Dense,
    Factored,
    Identity,
    sparse_precision,
)
from gpmil.process.kernels import Kernel


def grid(height, width):
    index = np.arange(height * width).reshape(height, width)
    pairs = np.concatenate(
        [
            np.stack([index[:, :-1].ravel(), index[:, 1:].ravel()], axis=1),
            np.stack([index[:-1].ravel(), index[1:].ravel()], axis=1),
        ]
    )
    a = sp.coo_array((np.ones(len(pairs)), pairs.T), shape=(index.size, index.size))
    return sp.csr_array(a + a.T)


def random_graph(n, p, seed):
    rng = np.random.default_rng(seed)
    a = np.triu(rng.uniform(0.2, 2.0, (n, n)) * (rng.uniform(size=(n, n)) < p), 1)
    return sp.csr_array(a + a.T)


def cohort(graphs):
    offsets = np.concatenate([[0], np.cumsum([g.shape[0] for g in graphs])])
    return sp.csr_array(sp.block_diag(graphs)), offsets


GRAPHS = [
    grid(3, 4),
    grid(1, 1),
    grid(20, 35),
    random_graph(7, 0.4, 1),
    sp.csr_array((5, 5)),
    grid(1, 2),
]


@pytest.mark.parametrize("strength", [0.0, 0.3, 10.0])
def test_operator_equals_explicit_inverses(strength):
    adjacency, offsets = cohort(GRAPHS)
    op = Coupling(adjacency, offsets, strength)
    x = np.random.default_rng(0).normal(size=(offsets[-1], 3))
    sigma = [coupling_matrix(g.toarray(), strength) for g in GRAPHS]
    expected = np.concatenate([s @ x[a:b] for s, a, b in zip(sigma, offsets, offsets[1:])])
    assert np.allclose(op.apply(torch.from_numpy(x)), expected, rtol=0, atol=1e-13)
    assert np.allclose(op.apply(torch.from_numpy(x[:, 1])), expected[:, 1], rtol=0, atol=1e-13)
    assert np.allclose(op.diagonal(), np.concatenate([np.diag(s) for s in sigma]), atol=1e-13)
    assert np.allclose(op.logdet(), [np.linalg.slogdet(s)[1] for s in sigma], atol=1e-10)
    back = sparse_precision(adjacency, strength) @ op.apply(torch.from_numpy(x)).numpy()
    assert np.allclose(back, x, atol=1e-12)


@pytest.mark.parametrize("order", ["by lines", "shuffled"])
@pytest.mark.parametrize("strength", [0.3, 40.0])
def test_compiled_inverses_are_those_of_lapack(strength, order, monkeypatch):
    """Bags side by side, padded; where rows reach far LAPACK is taken (WIDEST)."""
    graphs = [grid(9, 12), random_graph(7, 0.4, 1), sp.csr_array((5, 5)), grid(1, 90)]
    if order == "shuffled":
        mixed = np.random.default_rng(1).permutation(108)
        graphs[0] = sp.csr_array(graphs[0][mixed][:, mixed])
        monkeypatch.setattr(dense, "WIDEST", 12)
    adjacency, offsets = cohort(graphs)
    edges, bags = coupling.Edges.of(adjacency, "cpu"), np.array([0, 1, 2, 3])
    compiled = Dense.of(edges, offsets, bags, strength)
    places = dense.Places.of(edges, offsets, bags)
    sigma, logdet = dense.inverted(places.precision(edges, strength))
    assert np.allclose(compiled.sigma, sigma, rtol=0, atol=1e-14)
    assert np.allclose(compiled.logdet(), logdet, rtol=1e-13, atol=1e-12)
    reach = envelope.entries(*(x.numpy() for x in (*edges[:2], *places[:2])))
    assert (reach > 12 * offsets[-1]) == (order == "shuffled")
    # Sigma x by the envelope, and V with V'V = x'Sigma x; as many columns as a bag has rows, too
    for columns in (8, 90, 108):
        x = torch.from_numpy(np.random.default_rng(2).normal(size=(offsets[-1], columns)))
        expected = (sigma @ compiled.pad(x))[compiled.mask]
        assert np.allclose(compiled.apply(x), expected, rtol=0, atol=1e-13)
        halved = compiled.halved(x)
        assert (halved is None) == (order == "shuffled")
        if halved is not None:
            assert np.allclose(halved[0].mT @ halved[0], x.mT @ expected, rtol=1e-11, atol=1e-11)


def test_the_choice_is_by_size_and_edges():
    adjacency, offsets = cohort(GRAPHS)
    kinds = {int(b): type(p) for p in Coupling(adjacency, offsets, 0.7).parts for b in p.bags}
    assert kinds == {0: Dense, 1: Identity, 2: Banded, 3: Dense, 4: Identity, 5: Dense}
    assert {type(p) for p in Coupling(adjacency, offsets, 0.0).parts} == {Identity}


def part_of(kind, graph, strength, monkeypatch):
    monkeypatch.setattr(coupling, "DENSE_LIMIT", graph.shape[0] if kind is Dense else 1)
    monkeypatch.setattr(coupling, "BAND_BYTES", 0 if kind is Factored else 1e9)
    (part,) = coupling.parts(graph, np.array([0, graph.shape[0]]), strength)
    assert type(part) is kind
    return part


@pytest.mark.parametrize("kind", [Dense, Banded, Factored])
def test_every_way_to_invert_agrees(kind, monkeypatch):
    graph = sp.csr_array(sp.block_diag([grid(9, 13), grid(4, 3), random_graph(6, 0.5, 2)]))
    n = graph.shape[0]
    sigma = coupling_matrix(graph.toarray(), 2.3)
    part = part_of(kind, graph, 2.3, monkeypatch)
    rows = part.rows.numpy()
    assert sorted(rows) == list(range(n))
    x = np.random.default_rng(4).normal(size=(n, 2))
    apply = part.apply(torch.from_numpy(x[rows]))
    assert np.allclose(apply, (sigma @ x)[rows], atol=1e-13)
    assert np.allclose(part.diagonal(), np.diag(sigma)[rows], atol=1e-13)
    assert np.allclose(part.logdet(), np.linalg.slogdet(sigma)[1], atol=1e-10)

    K = kernel(x, x, lengthscale=np.sqrt(1 / 0.7))
    expected = np.diag(sigma @ K @ sigma)[rows]
    rbf = Kernel("rbf", 1.0, np.sqrt(1 / 0.7))
    assert np.allclose(
        part.congruence_diagonal(torch.from_numpy(x[rows]), rbf), expected, atol=1e-12
    )


def test_padding_does_not_leak_between_bags():
    adjacency, offsets = cohort([grid(4, 4), grid(5, 4), grid(3, 5)])
    (part,) = coupling.parts(adjacency, offsets, 1.7)
    x = np.random.default_rng(5).normal(size=(offsets[-1], 2))
    rbf = Kernel("rbf", 1.0, 1.0)
    found = part.congruence_diagonal(torch.from_numpy(x[part.rows.numpy()]), rbf)
    for a, b in itertools.pairwise(offsets):
        sigma = coupling_matrix(adjacency[a:b, a:b].toarray(), 1.7)
        expected = np.diag(sigma @ kernel(x[a:b], x[a:b]) @ sigma)
        assert np.allclose(found[(part.rows >= a) & (part.rows < b)], expected, atol=1e-12)


@given(
    n=st.integers(2, 40),
    p=st.floats(0.05, 0.9),
    strength=st.floats(1e-3, 50),
    seed=st.integers(0, 99),
)
@settings(max_examples=30, deadline=None)
def test_sigma_keeps_constants_and_shrinks(n, p, strength, seed):
    graph = random_graph(n, p, seed)
    op = Coupling(graph, np.array([0, n]), strength)
    ones = torch.ones(n, dtype=torch.float64)
    # C 1 = 0, so Sigma 1 = 1; 0 < diag Sigma <= 1
    assert torch.allclose(op.apply(ones), ones, atol=1e-12)
    assert ((op.diagonal() > 0) & (op.diagonal() <= 1 + 1e-12)).all()


def test_bags_of_other_sizes_go_to_other_batches():
    sizes = np.array([3, 100, 80, 74, 20, 16, 4])
    found = list(coupling.batches(np.arange(7), sizes, "cpu"))
    assert [b.tolist() for b in found] == [[1, 2], [3], [4, 5], [0, 6]]


def test_a_wide_graph_of_moderate_size_is_dense(monkeypatch):
    monkeypatch.setattr(coupling, "DENSE_LIMIT", 50)
    graph = random_graph(120, 0.5, 3)
    (part,) = coupling.parts(graph, np.array([0, 120]), 0.4)
    assert type(part) is Dense


def test_twenty_thousand_patches_within_a_gigabyte():
    graph = grid(141, 142)
    n = graph.shape[0]
    op = Coupling(graph, np.array([0, n]), 1.0)
    (part,) = op.parts
    assert type(part) is Banded
    held = 8 * (part.inverse.numel() + part.below.numel())
    assert held < 100e6
    x = torch.from_numpy(np.random.default_rng(6).normal(size=(n, 5)))
    back = sparse_precision(graph, 1.0) @ op.apply(x).numpy()
    assert np.allclose(back, x, atol=1e-11)
    # the diagonal against single columns of Sigma
    for i in (0, 777, n - 1):
        unit = torch.zeros(n, dtype=torch.float64)
        unit[i] = 1
        assert abs(op.apply(unit)[i] - op.diagonal()[i]) < 1e-13


@pytest.mark.parametrize("strength", [-0.1, float("nan"), float("inf")])
def test_bad_strength(strength):
    with pytest.raises(ValueError, match="finite number >= 0"):
        Coupling(grid(2, 2), np.array([0, 4]), strength)
