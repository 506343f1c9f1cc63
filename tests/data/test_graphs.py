"""Neighbour graphs against double loops, and the cases that real slides bring."""

import itertools
import os
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles import graphs as oracles
from scipy.sparse import issparse

from gpmil.data import graphs, neighbours
from gpmil.data.graphs import adjacency_from_coords, adjacency_from_edges, infer_step, laplacian

DATA = Path(os.environ.get("GPMIL_DATA", Path(__file__).parents[3] / "shared" / "data"))

FIVE = np.array([[0, 0], [1, 0], [0, 1], [1, 1], [2, 1]], dtype=float)
FIVE_LAPLACIAN = [
    [2, -1, -1, 0, 0],
    [-1, 2, 0, -1, 0],
    [-1, 0, 2, -1, 0],
    [0, -1, -1, 3, -1],
    [0, 0, 0, -1, 1],
]


def one(coords):
    return np.array([0, len(coords)])


def offsets_of(bags):
    return np.concatenate([[0], np.cumsum([len(bag) for bag in bags])]).astype(np.int64)


def lattice(rng, n, k=2, width=6, step=1.0, jitter=0.0):
    """n distinct cells of a width^k lattice, in random order, off any common origin."""
    cells = rng.choice(width**k, size=n, replace=False)
    grid = np.stack(np.unravel_index(cells, (width,) * k), axis=1)
    origin = rng.uniform(-3, 1000, k)
    return origin + step * (grid + rng.uniform(-jitter, jitter, (n, k)))


def cohort(seed, k=2, step=1.0, jitter=0.0, largest=20):
    rng = np.random.default_rng(seed)
    width = {1: 40, 2: 6, 3: 4}[k]
    sizes = rng.integers(1, largest, rng.integers(1, 6))
    return [lattice(rng, n, k, width, step, jitter) for n in sizes]


def assert_proper(matrix, offsets):
    """Symmetric, zero diagonal, sorted, float64 CSR, and no edge leaves its bag."""
    assert issparse(matrix) and matrix.format == "csr" and matrix.dtype == np.float64
    assert matrix.shape == (offsets[-1], offsets[-1])
    assert (matrix != matrix.T).nnz == 0
    assert not matrix.diagonal().any()
    assert matrix.has_sorted_indices
    assert all((np.diff(row) > 0).all() for row in np.split(matrix.indices, matrix.indptr[1:-1]))
    bag = graphs.bag_index(offsets)
    rows, columns = matrix.nonzero()
    assert (bag[rows] == bag[columns]).all()


# ---------------------------------------------------------------- the paper's example


@pytest.mark.parametrize("step", [1, 50, 1024, 0.25])
@pytest.mark.parametrize("shift", [(0, 0), (17.3, -1234.5), (88403, 9548)])
@pytest.mark.parametrize("order", [[0, 1, 2, 3, 4], [3, 0, 4, 2, 1]])
def test_five_patches_of_the_paper(step, shift, order):
    coords = (FIVE * step + shift)[order]
    found = laplacian(adjacency_from_coords(coords, one(coords), step=step))
    np.testing.assert_array_equal(found.toarray(), np.array(FIVE_LAPLACIAN)[order][:, order])


# ---------------------------------------------------------------- against the double loops


@pytest.mark.parametrize("graph", ["grid4", "grid8"])
@pytest.mark.parametrize("k", [1, 2, 3])
@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 10**6), jitter=st.sampled_from([0.0, 0.08, 0.3]))
def test_grid_equals_double_loop(graph, k, seed, jitter):
    bags = cohort(seed, k, step=7.0, jitter=jitter)
    offsets = offsets_of(bags)
    found = adjacency_from_coords(np.concatenate(bags), offsets, graph, step=7.0)
    assert_proper(found, offsets)
    expected = oracles.block_diagonal([oracles.grid(b, 7.0, graph == "grid8") for b in bags])
    np.testing.assert_array_equal(found.toarray(), expected)


@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 10**6), k=st.integers(1, 3), reach=st.sampled_from([None, 2.3, 11.0]))
def test_radius_equals_double_loop(seed, k, reach):
    bags = cohort(seed, k, step=2.0, jitter=0.3)
    offsets = offsets_of(bags)
    found = adjacency_from_coords(np.concatenate(bags), offsets, "radius", step=2.0, radius=reach)
    assert_proper(found, offsets)
    expected = oracles.block_diagonal([oracles.radius(b, reach or 3.0) for b in bags])
    np.testing.assert_array_equal(found.toarray(), expected)


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    k=st.integers(1, 3),
    jitter=st.sampled_from([0.0, 0.3]),
    n_neighbors=st.integers(1, 9),
)
def test_knn_equals_double_loop(seed, k, jitter, n_neighbors):
    bags = cohort(seed, k, jitter=jitter)
    offsets = offsets_of(bags)
    found = adjacency_from_coords(np.concatenate(bags), offsets, "knn", n_neighbors=n_neighbors)
    assert_proper(found, offsets)
    expected = oracles.block_diagonal([oracles.knn(b, n_neighbors) for b in bags])
    np.testing.assert_array_equal(found.toarray(), expected)


@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 10**6), k=st.integers(1, 3), step=st.sampled_from([None, 1.0]))
def test_chain_equals_loop(seed, k, step):
    bags = cohort(seed, k, jitter=0.2)
    offsets = offsets_of(bags)
    found = adjacency_from_coords(np.concatenate(bags), offsets, "chain", step=step)
    assert_proper(found, offsets)
    expected = oracles.block_diagonal([oracles.chain(b, step) for b in bags])
    np.testing.assert_array_equal(found.toarray(), expected)


@pytest.mark.parametrize("graph", graphs.GRAPHS)
@settings(max_examples=8, deadline=None)
@given(seed=st.integers(0, 10**6))
def test_order_and_origin_do_not_matter(graph, seed):
    bags = cohort(seed, step=50.0)
    offsets, coords = offsets_of(bags), np.concatenate(bags)
    rng = np.random.default_rng(seed)
    order = np.concatenate([a + rng.permutation(b - a) for a, b in itertools.pairwise(offsets)])
    shift = rng.uniform(-1e5, 1e5, (len(bags), 2))[graphs.bag_index(offsets)]
    plain = adjacency_from_coords(coords, offsets, graph, step=50.0).toarray()
    moved = adjacency_from_coords((coords + shift)[order], offsets, graph, step=50.0).toarray()
    np.testing.assert_array_equal(moved, plain[order][:, order])


@settings(max_examples=10, deadline=None)
@given(seed=st.integers(0, 10**6))
def test_laplacian_equals_loop(seed):
    rng = np.random.default_rng(seed)
    upper = np.triu(rng.uniform(0.1, 3, (7, 7)) * (rng.random((7, 7)) < 0.4), 1)
    edges = np.array([(i, j, upper[i, j]) for i, j in zip(*upper.nonzero(), strict=True)])
    found = laplacian(adjacency_from_edges([edges.reshape(-1, 3)], np.array([0, 7])))
    np.testing.assert_allclose(found.toarray(), oracles.laplacian(upper + upper.T), rtol=1e-15)
    assert found.format == "csr" and found.has_sorted_indices


# ---------------------------------------------------------------- what slides bring


def test_pieces_off_a_common_lattice():
    # Two pieces cut on lattices 37 and 61 pixels apart, far from each other.
    left = np.array([[0, 0], [256, 0], [0, 256]])
    right = np.array([[0, 0], [0, 256]]) + np.array([5 * 256 + 37, 3 * 256 + 61])
    coords = np.concatenate([left, right]).astype(float)
    found = adjacency_from_coords(coords, one(coords), step=256).toarray()
    assert {(i, j) for i, j in np.argwhere(np.triu(found))} == {(0, 1), (0, 2), (3, 4)}


@pytest.mark.parametrize(("offset", "joined"), [(0.84, 0), (0.85, 1), (1.15, 1), (1.16, 0)])
@pytest.mark.parametrize("origin", [0.0, 88403.0])
def test_tolerance_on_a_grid(offset, joined, origin):
    along = np.array([[0, 0], [offset, 0]]) * 50 + origin
    assert adjacency_from_coords(along, one(along), step=50).nnz == 2 * joined
    aside = np.array([[0, 0], [1, offset - 1 if offset > 1 else 1 - offset]]) * 50 + origin
    assert adjacency_from_coords(aside, one(aside), step=50).nnz == 2 * joined


def test_grid_neighbours_in_each_dimension():
    for k, faces, all_of_them in [(1, 2, 2), (2, 4, 8), (3, 6, 26)]:
        cube = np.stack(np.meshgrid(*[np.arange(3.0)] * k), axis=-1).reshape(-1, k)
        centre = int(np.flatnonzero((cube == 1).all(axis=1))[0])
        for graph, count in [("grid4", faces), ("grid8", all_of_them)]:
            degree = adjacency_from_coords(cube, one(cube), graph, step=1).sum(axis=1)
            assert degree[centre] == count


def test_two_short_steps_are_no_face_neighbours():
    corner = np.array([[0, 0, 0], [0.85, 0.85, 0]])
    assert adjacency_from_coords(corner, one(corner), "grid4", step=1).nnz == 0
    assert adjacency_from_coords(corner, one(corner), "grid8", step=1).nnz == 2


def test_step_by_bag_and_by_axis():
    small, large = FIVE * [30, 20], FIVE * [60, 45] + 7
    coords, offsets = np.concatenate([small, large]), np.array([0, 5, 10])
    step = np.array([[30, 20], [60, 45]])
    found = laplacian(adjacency_from_coords(coords, offsets, step=step)).toarray()
    np.testing.assert_array_equal(found, oracles.block_diagonal([np.array(FIVE_LAPLACIAN)] * 2))
    square = np.concatenate([FIVE * 30, FIVE * 70])
    assert adjacency_from_coords(square, offsets, step=[30, 70]).nnz == 20
    assert adjacency_from_coords(square, offsets, step=30).nnz == 10


def test_bags_at_the_same_place_stay_apart():
    coords = np.concatenate([FIVE] * 3)
    for graph in graphs.GRAPHS:
        found = adjacency_from_coords(coords, np.array([0, 5, 10, 15]), graph, step=1, radius=9)
        assert_proper(found, np.array([0, 5, 10, 15]))
        assert found.nnz > 0


def test_radius_by_bag():
    coords = np.concatenate([FIVE, FIVE * 10])
    found = adjacency_from_coords(coords, np.array([0, 5, 10]), "radius", radius=[1.1, 14.5])
    degrees = found.sum(axis=1)
    assert degrees[:5].tolist() == [2, 2, 2, 3, 1]
    assert degrees[5:].tolist() == [3, 4, 3, 4, 2]


def test_knn_takes_a_whole_small_bag():
    coords = np.concatenate([FIVE, 100 * FIVE[:3]])
    found = adjacency_from_coords(coords, np.array([0, 5, 8]), "knn", n_neighbors=4)
    np.testing.assert_array_equal(
        found.toarray(), oracles.block_diagonal([1 - np.eye(5), 1 - np.eye(3)])
    )


def test_knn_with_more_ties_than_neighbours():
    angle = np.arange(40) * 2 * np.pi / 40
    wheel = np.concatenate([[[0, 0]], 10 * np.stack([np.cos(angle), np.sin(angle)], axis=1)])
    found = adjacency_from_coords(wheel, one(wheel), "knn", n_neighbors=2)
    np.testing.assert_array_equal(found.toarray(), oracles.knn(wheel, 2))
    assert found.sum(axis=1)[0] == 40


def test_chain_in_row_order_and_by_coordinate():
    rows = adjacency_from_coords(None, np.array([0, 3, 5]), "chain").toarray()
    assert {(i, j) for i, j in np.argwhere(np.triu(rows))} == {(0, 1), (1, 2), (3, 4)}
    slices = np.array([[9.0], [1.0], [5.0], [30.0]])
    whole = adjacency_from_coords(slices, one(slices), "chain").toarray()
    assert {(i, j) for i, j in np.argwhere(np.triu(whole))} == {(1, 2), (0, 2), (0, 3)}
    broken = adjacency_from_coords(slices, one(slices), "chain", step=4).toarray()
    assert {(i, j) for i, j in np.argwhere(np.triu(broken))} == {(1, 2), (0, 2)}


def test_no_graph_and_single_instances():
    assert adjacency_from_coords(None, np.array([0, 4, 9]), None).shape == (9, 9)
    assert adjacency_from_coords(None, np.array([0, 4, 9]), None).nnz == 0
    for graph in graphs.GRAPHS:
        lone = adjacency_from_coords(FIVE[:2], np.array([0, 1, 2]), graph, step=1)
        assert lone.shape == (2, 2) and lone.nnz == 0


# ---------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"graph": "grid5"}, "grid4, grid8, radius, knn, chain or None, found 'grid5'"),
        ({"graph": "grid4"}, "needs step="),
        ({"graph": "radius"}, "needs radius= or step="),
        ({"graph": "grid4", "step": 0}, "step must be positive"),
        ({"graph": "grid4", "step": [1.0, np.nan]}, "step must be positive.*bag 1"),
        ({"graph": "grid4", "step": [1.0, 1.0, 1.0]}, r"one per bag \(2,\)"),
        ({"graph": "radius", "radius": -1}, "radius must be positive"),
        ({"graph": "chain", "step": -2}, "step must be positive"),
        ({"graph": "knn", "n_neighbors": 0}, "n_neighbors must be at least 1"),
    ],
)
def test_bad_arguments(arguments, message):
    with pytest.raises(ValueError, match=message):
        adjacency_from_coords(FIVE, np.array([0, 2, 5]), **arguments)


def test_coordinates_are_needed():
    with pytest.raises(ValueError, match="needs coordinates"):
        adjacency_from_coords(None, np.array([0, 2]), "grid4", step=1)


def test_a_step_in_other_units_is_refused_before_memory_is_gone():
    coords = np.random.default_rng(0).uniform(0, 1, (20_000, 2))
    for graph in ("grid4", "radius"):
        with pytest.raises(ValueError, match=r"20000 instances of bag 0 .*other units"):
            adjacency_from_coords(coords, one(coords), graph, step=1024)


# ---------------------------------------------------------------- given edges


def test_edges_in_one_direction_or_both():
    once = [[[0, 1], [2, 1]], [[0, 2]]]
    both = [[[0, 1], [1, 0], [1, 2], [2, 1]], [[2, 0]]]
    offsets = np.array([0, 3, 6])
    found = adjacency_from_edges(once, offsets)
    assert_proper(found, offsets)
    np.testing.assert_array_equal(found.toarray(), adjacency_from_edges(both, offsets).toarray())
    assert {(i, j) for i, j in np.argwhere(np.triu(found.toarray()))} == {(0, 1), (1, 2), (3, 5)}


def test_edges_with_weights():
    offsets = np.array([0, 2, 5])
    found = adjacency_from_edges([None, np.array([[0, 2, 0.5], [2, 0, 0.5], [1, 2, 3]])], offsets)
    assert_proper(found, offsets)
    assert found[2, 4] == 0.5 and found[4, 3] == 3 and found.nnz == 4
    assert adjacency_from_edges([np.empty((0, 2)), []], offsets).nnz == 0


@pytest.mark.parametrize(
    ("edges", "message"),
    [
        ([[0, 0]], "bag 'b': instance 0 is joined to itself"),
        ([[0, 3]], "bag 'b': index 3 is out of range.*0 to 2"),
        ([[-1, 2]], "bag 'b': index -1 is out of range"),
        ([[0.5, 2]], "bag 'b': indices must be whole"),
        ([[0, 1, 0.0]], "bag 'b': weights must be positive"),
        ([[0, 1, np.nan]], "bag 'b': weights must be positive"),
        ([[0, 1, np.inf]], "bag 'b': weights must be positive"),
        ([[0, 1, 2.0], [1, 2, 1.0], [1, 0, 3.0]], "bag 'b': .*two weights, 2.0 and 3.0"),
        ([[0, 1, 2, 3]], r"bag 'b': expected an \(E, 2\)"),
        ([0, 1], r"bag 'b': expected an \(E, 2\)"),
        ([["x", "y"]], "bag 'b': .*found shape"),
    ],
)
def test_bad_edges_name_the_bag(edges, message):
    with pytest.raises(ValueError, match=message):
        adjacency_from_edges([[[0, 1]], edges], np.array([0, 2, 5]), ["a", "b"])


def test_edges_one_array_a_bag():
    with pytest.raises(ValueError, match="2 in all, found 1"):
        adjacency_from_edges([[[0, 1]]], np.array([0, 2, 5]))


# ---------------------------------------------------------------- the step inferred


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 10**6), step=st.sampled_from([1.0, 0.2525, 50.0, 1024.0]))
def test_step_is_found_on_lattices(seed, step):
    rng = np.random.default_rng(seed)
    bags = [lattice(rng, n, 2, 8, step) for n in rng.integers(40, 60, 4)]
    found = infer_step(np.concatenate(bags), offsets_of(bags))
    np.testing.assert_allclose(found, step, rtol=1e-9)


def test_step_by_bag_and_axis():
    rng = np.random.default_rng(3)
    steps = np.array([[256, 256, 40], [512, 512, 90], [128, 300, 7]])
    bags = [lattice(rng, 50, 3, 4) - 500 for _ in steps]
    bags = [bag * step for bag, step in zip(bags, steps, strict=True)]
    np.testing.assert_allclose(infer_step(np.concatenate(bags), offsets_of(bags)), steps)


def test_step_of_rounded_coordinates():
    rng = np.random.default_rng(4)
    bag = np.rint(lattice(rng, 120, 2, 12, 113.78))
    assert np.abs(infer_step(bag, one(bag)) - 113.78).max() <= 1


def test_step_of_pieces_off_a_common_lattice():
    rng = np.random.default_rng(5)
    pieces = [lattice(rng, 12, 2, 4, 256) + np.array([931, 17]) * i for i in range(6)]
    bag = np.rint(np.concatenate(pieces))
    assert np.abs(infer_step(bag, one(bag)) - 256).max() <= 1


def test_small_bags_take_the_step_of_the_cohort():
    rng = np.random.default_rng(6)
    bags = [lattice(rng, 40, 2, 8, 512), lattice(rng, 40, 2, 8, 512), FIVE * 100, FIVE[:1]]
    found = infer_step(np.concatenate(bags), offsets_of(bags))
    np.testing.assert_allclose(found, 512)


def test_a_column_takes_the_proportions_of_the_cohort():
    rng = np.random.default_rng(7)
    big = [lattice(rng, 60, 2, 9) * [300, 200] for _ in range(2)]
    column = np.arange(9.0)[:, None] * [0, 100]
    found = infer_step(np.concatenate([*big, column]), offsets_of([*big, column]))
    np.testing.assert_allclose(found[2], [150, 100])


def test_only_small_bags_pool_what_they_have():
    np.testing.assert_array_equal(infer_step(FIVE * 50, one(FIVE)), [[50, 50]])
    line = np.array([[0.0, 3.0], [20.0, 3.0]])
    np.testing.assert_array_equal(infer_step(line, one(line)), [[20, 20]])


def test_nothing_to_infer_is_nan():
    diagonal = np.arange(12.0)[:, None] * [1, 1]
    assert np.isnan(infer_step(diagonal, one(diagonal))).all()
    assert np.isnan(infer_step(FIVE, np.arange(6))).all()
    assert infer_step(FIVE, np.arange(6)).shape == (5, 2)


@pytest.mark.parametrize("n", [12, 60, 900])
@pytest.mark.parametrize("k", [1, 2, 3])
def test_scattered_points_have_no_step(n, k):
    points = np.random.default_rng(n).normal(size=(2 * n, k))
    assert np.isnan(infer_step(points, np.array([0, n, 2 * n]))).all()


def test_every_bag_may_have_a_step_of_its_own():
    rng = np.random.default_rng(8)
    steps = rng.uniform(200, 900, 30)
    bags = [lattice(rng, 40, 2, 8, step) for step in steps]
    found = infer_step(np.concatenate(bags), offsets_of(bags))
    np.testing.assert_allclose(found, steps[:, None] * [1, 1])


def test_holes_do_not_make_the_step_longer():
    gaps = np.array([1, 2, 2, 1, 2, 1, 2, 3, 2, 1, 2, 1, 2])
    row = np.concatenate([[0], np.cumsum(gaps)])[:, None] * 7.0
    np.testing.assert_array_equal(infer_step(row, one(row)), [[7]])


def test_step_of_slices():
    slices = np.array([0, 5, 10, 15, 25, 30, 2, 4, 6, 8, 10.0])[:, None]
    np.testing.assert_array_equal(infer_step(slices, np.array([0, 6, 11])), [[5], [2]])


# ---------------------------------------------------------------- size, and real slides


def test_many_bags_are_not_looped_over(monkeypatch):
    # One tree for the whole cohort, however many bags it has.
    trees = []
    plain = neighbours.cKDTree

    def counted(*arguments, **keywords):
        trees.append(1)
        return plain(*arguments, **keywords)

    monkeypatch.setattr(neighbours, "cKDTree", counted)
    offsets = np.arange(0, 5 * 2001, 5)
    found = adjacency_from_coords(np.tile(FIVE, (2000, 1)), offsets, step=1)
    assert len(trees) == 1
    assert found.nnz == 2000 * 10
    assert found.indices.dtype == found.indptr.dtype == np.int32


def load(name, file):
    path = DATA / name / file
    if not path.exists():
        pytest.skip(f"no real data at {path}")
    with np.load(path) as stored:
        arrays = dict(stored)
    arrays["offsets"] = np.concatenate([[0], np.cumsum(np.bincount(arrays["bag"]))])
    arrays["coords"] = np.stack([arrays["x"], arrays["y"]], axis=1).astype(float)
    return arrays


@pytest.mark.data
@pytest.mark.parametrize(("graph", "edges"), [("grid4", 4085), ("grid8", 7537)])
def test_sicap_slides(graph, edges):
    slides = load("sicapv2_split3", "sicapv2_split3.npz")
    found = adjacency_from_coords(slides["coords"], slides["offsets"], graph, step=1024).tocoo()
    assert found.nnz == 2 * edges
    # Where two regions of one slide meet, patches (859, 204) pixels apart are no neighbours.
    np.testing.assert_array_equal(slides["region"][found.row], slides["region"][found.col])
    np.testing.assert_array_equal(infer_step(slides["coords"], slides["offsets"]), 1024)


@pytest.mark.data
def test_colon_images():
    images = load("crchisto_colon", "crchisto_colon_grid.npz")
    found = adjacency_from_coords(images["coords"], images["offsets"], step=50)
    assert (np.diff(found.indptr[images["offsets"]]) == 2 * 180).all()
    np.testing.assert_array_equal(infer_step(images["coords"], images["offsets"]), 50)
