"""Attention: equal to plain loops and to torchmil, smoothing right in value and slope."""

import numpy as np
import pytest
import scipy.sparse as sp
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles import attention as oracle
from sklearn.metrics import roc_auc_score
from synthetic import dense_graphs, slide_coords, small_cohort, standardised

from gpmil import Bags
from gpmil.data.graphs import laplacian
from gpmil.files import persistence
from gpmil.models import smoothing
from gpmil.models.attention import AttentionMIL
from gpmil.models.networks import segment_softmax
from gpmil.models.smoothing import TOLERANCE, Graphs, chebyshev, squared

CPU = torch.device("cpu")
ALPHAS = (0.1, 0.3, 2.0, 7.0)  # not one half: there alpha and 1 - alpha cannot be told apart
KINDS = {"exact": (True, False), "kept": (True, True), "approximate": (False, False)}
WAYS = [*KINDS, "padded"]  # as on a GPU

gates = pytest.mark.parametrize("gated", [False, True], ids=["plain", "gated"])
alphas = pytest.mark.parametrize("alpha", ALPHAS)
kinds = pytest.mark.parametrize("kind", WAYS)


def small(**given):
    return AttentionMIL(
        **({"hidden_dim": 7, "attention_dim": 5, "max_epochs": 4, "random_state": 3} | given)
    )


def double(weights):
    return {k: v.astype(float) for k, v in weights.items()}


@pytest.fixture
def said(caplog):
    caplog.set_level("WARNING", logger="gpmil")
    return lambda: [record.getMessage() for record in caplog.records]


# --- The forward pass -------------------------------------------------------------------------


@gates
@pytest.mark.parametrize("smooth", [0.0, 0.3, 7.0])
@pytest.mark.parametrize(("dtype", "tolerance"), [("float64", 1e-12), ("float32", 1e-5)])
def test_forward_pass_is_the_loop(gated, smooth, dtype, tolerance):
    bags = small_cohort(seed=5)
    model = small(gated=gated, smooth=smooth, dtype=dtype).fit(bags)
    assert {v.dtype for v in model.weights_.values()} == {np.dtype(dtype)}
    weights, inputs, graphs = double(model.weights_), standardised(bags), dense_graphs(bags)
    logit = [oracle.attention_logit(x, weights, A, smooth) for x, A in zip(inputs, graphs)]
    found = np.concatenate(
        [oracle.attention(x, weights, A, smooth) for x, A in zip(inputs, graphs)]
    )
    np.testing.assert_allclose(model.decision_function(bags), logit, rtol=tolerance, atol=tolerance)
    np.testing.assert_allclose(model.attention(bags), found, rtol=tolerance, atol=tolerance)


@gates
def test_torchmil_agrees(gated):
    abmil = pytest.importorskip("torchmil.models").ABMIL
    bags = small_cohort(seed=2)
    model = small(gated=gated, dtype="float64").fit(bags)
    own = {k: torch.from_numpy(v) for k, v in model.weights_.items()}
    embed = torch.nn.Sequential(torch.nn.Linear(bags.n_features, 7), torch.nn.ReLU()).double()
    embed[0].load_state_dict({"weight": own["embed.weight"], "bias": own["embed.bias"]})
    names = {"pool.fc1.module": "attend", "pool.fc_gated.module": "gate"}
    names |= {"pool.fc2": "score", "classifier.module": "classify"}
    theirs = abmil((7,), att_dim=5, gated=gated).double()
    theirs.load_state_dict(
        {
            f"{name}.{part}": own[f"{mine}.{part}"]
            for name, mine in names.items()
            for part in ("weight", "bias")
            if f"{mine}.{part}" in own
        }
    )
    with torch.no_grad():
        for bag, x in zip(bags, standardised(bags)):
            logit, score = theirs(embed(torch.from_numpy(x))[None], return_att=True)
            np.testing.assert_allclose(model.decision_function(bag), logit, rtol=1e-10, atol=1e-12)
            np.testing.assert_allclose(model.attention(bag), score[0].softmax(0), rtol=1e-10)


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.lists(st.floats(-800, 800), min_size=1, max_size=6), min_size=1, max_size=5),
)
def test_softmax_over_bags(bags):
    segment = torch.tensor(np.repeat(np.arange(len(bags)), [len(bag) for bag in bags]))
    values = torch.tensor(np.concatenate(bags))
    found = segment_softmax(values, segment, len(bags)).numpy()
    np.testing.assert_allclose(found, np.concatenate([oracle.softmax(b) for b in bags]), atol=1e-15)


def test_gradient_of_softmax_over_bags():
    values = torch.randn(7, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    segment = torch.tensor([0, 0, 0, 1, 2, 2, 2])
    torch.autograd.gradcheck(lambda s: segment_softmax(s, segment, 3), values.requires_grad_())


# --- Attention weights ------------------------------------------------------------------------


@pytest.mark.parametrize("smooth", [0.0, 2.0])
@gates
def test_attention_sums_to_one(gated, smooth, cohort):
    a = small(gated=gated, smooth=smooth).fit(cohort).attention(cohort)
    assert (a > 0).all()
    np.testing.assert_allclose([piece.sum() for piece in cohort.split(a)], 1, atol=1e-6)


@pytest.mark.parametrize("smooth", [0.0, 0.3, "learn"])
def test_one_instance_a_bag_has_all_the_attention(smooth):
    rng = np.random.default_rng(1)
    arrays = [rng.normal(size=(1, 3)) + b % 2 for b in range(14)]
    coords = [np.zeros((1, 2))] * 14
    bags = Bags.from_arrays(arrays, [b % 2 for b in range(14)], coords=coords, step=1)
    np.testing.assert_array_equal(small(smooth=smooth).fit(bags).attention(bags), 1)


@pytest.mark.parametrize("smooth", [0.0, 0.3])
def test_order_within_a_bag_does_not_matter(smooth):
    bags = small_cohort(seed=8)
    model = small(smooth=smooth, dtype="float64").fit(bags)
    rng = np.random.default_rng(0)
    order = [rng.permutation(n) for n in bags.sizes]
    shuffled = Bags.from_arrays(
        [x[o] for x, o in zip(bags.split(bags.features), order)],
        coords=[c[o] for c, o in zip(bags.split(bags.coords), order)],
        step=7.0,
    )
    np.testing.assert_allclose(
        model.decision_function(shuffled), model.decision_function(bags), rtol=1e-10
    )
    expected = np.concatenate([a[o] for a, o in zip(bags.split(model.attention(bags)), order)])
    np.testing.assert_allclose(model.attention(shuffled), expected, rtol=1e-10)


def test_attention_is_no_probability(cohort):
    model = small().fit(cohort)
    with pytest.raises(ValueError, match=r"no label probability.*attention\(bags\).*VGPMILPRI"):
        model.predict_instances(cohort)


# --- Smoothing --------------------------------------------------------------------------------


def slides_graph(kind, sizes=(9, 1, 31, 14)):
    """Graphs of a few irregular slides, the second without an edge, and their dense adjacency."""
    rng = np.random.default_rng(4)
    arrays = [np.zeros((n, 1)) for n in sizes]
    bags = Bags.from_arrays(arrays, coords=[slide_coords(rng, n) for n in sizes], step=7.0)
    return made(bags, kind), dense_graphs(bags)


def made(bags, kind):
    """Graphs that smooth in one of the four ways."""
    found = Graphs(bags.adjacency, bags.offsets, CPU, *KINDS.get(kind, (False, False)))
    found.C = laplacian(bags.adjacency) if kind == "padded" else None
    return found


@kinds
@alphas
def test_smoothing_is_the_dense_solve(kind, alpha):
    graphs, dense = slides_graph(kind)
    chosen = np.array([2, 1, 3])  # an order of their own
    s = [np.random.default_rng(b).normal(size=len(dense[b])) for b in chosen]
    expected = [oracle.smoothed(x, dense[b], alpha) for x, b in zip(s, chosen)]
    both = torch.from_numpy(np.concatenate(s)), torch.tensor(alpha, dtype=torch.float64)
    found = graphs.smooth(*both, chosen).numpy()
    error = np.linalg.norm(found - np.concatenate(expected))
    limit = 1e-12 if graphs.exact else TOLERANCE
    assert error <= limit * np.linalg.norm(np.concatenate(expected))


@alphas
def test_approximate_and_exact_smoothing_agree(alpha):
    s = torch.from_numpy(np.random.default_rng(2).normal(size=54))
    strength = torch.tensor(alpha, dtype=torch.float64)
    chosen = np.arange(3)[::-1].copy()
    found = [slides_graph(kind)[0].smooth(s[:41], strength, chosen) for kind in WAYS]
    torch.testing.assert_close(found[0], found[1], rtol=0, atol=1e-13)
    torch.testing.assert_close(found[0], found[2], rtol=0, atol=TOLERANCE * 7)
    torch.testing.assert_close(found[0], found[3], rtol=0, atol=TOLERANCE * 7)
    unsmoothed = (found[0] - s[:41]).abs().max()
    assert unsmoothed > 0.05  # they agree on something


@pytest.mark.parametrize("kind", ["exact", "approximate", "padded"])
@alphas
def test_slopes_of_smoothing(kind, alpha):
    graphs, dense = slides_graph(kind)
    chosen = np.array([3, 0])
    s = torch.from_numpy(np.random.default_rng(6).normal(size=23)).requires_grad_()
    strength = torch.tensor(alpha, dtype=torch.float64, requires_grad=True)
    # differences see the error of 1e-6 change with alpha, by its k steps: d log error = k / alpha
    limit = 1e-5 if graphs.exact else 3e-4
    assert torch.autograd.gradcheck(
        lambda s, strength: graphs.smooth(s, strength, chosen),
        (s, strength),
        atol=limit,
        rtol=limit,
    )
    weights = torch.from_numpy(np.random.default_rng(7).normal(size=23))
    (weights @ graphs.smooth(s, strength, chosen)).backward()
    pieces = zip((3, 0), np.split(s.detach().numpy(), [14]), strict=True)
    slope = np.concatenate([oracle.smoothed_slope(x, dense[b], alpha) for b, x in pieces])
    pieces = zip((3, 0), np.split(weights.numpy(), [14]), strict=True)
    back = np.concatenate([oracle.smoothed(x, dense[b], alpha) for b, x in pieces])
    np.testing.assert_allclose(strength.grad, weights.numpy() @ slope, rtol=1e-5)
    np.testing.assert_allclose(s.grad, back, atol=1e-5)


def test_kept_factors_have_the_same_slope():
    graphs, _ = slides_graph("kept")
    s = torch.from_numpy(np.random.default_rng(6).normal(size=45)).requires_grad_()
    alpha = torch.tensor(0.3, dtype=torch.float64)
    assert torch.autograd.gradcheck(lambda s: graphs.smooth(s, alpha, np.array([2, 3])), (s,))


def test_factors_are_kept_while_there_is_room():
    graphs, _ = slides_graph("kept")
    graphs.room = 9 * 9 + 1
    s, alpha = torch.ones(54, dtype=torch.float64), torch.tensor(2.0).double()
    graphs.smooth(s[:40], alpha, np.array([0, 2]))
    assert list(graphs.kept) == [0]
    torch.testing.assert_close(graphs.smooth(s, alpha, np.array([0, 2, 3])), s)  # Sigma 1 = 1


@pytest.mark.parametrize("alpha", [0.3, 30.0])
def test_large_bags_smooth_alike(alpha):
    side = np.argwhere(np.ones((60, 50)))
    bags = Bags.from_arrays([np.zeros((len(side), 1))], coords=[side * 3], step=3)
    s = torch.from_numpy(np.random.default_rng(0).normal(size=len(side)))
    strength = torch.tensor(alpha, dtype=torch.float64)
    found = [made(bags, kind).smooth(s, strength, np.array([0])) for kind in KINDS]
    P = sp.eye_array(len(side)) + alpha * sp.csgraph.laplacian(bags.adjacency)
    np.testing.assert_allclose(P @ found[0].numpy(), s, atol=1e-10)
    np.testing.assert_array_equal(found[0], found[1])
    assert torch.linalg.norm(found[2] - found[0]) <= TOLERANCE * torch.linalg.norm(found[0])


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 12), st.floats(1e-3, 300), st.floats(1e-9, 0.1), st.integers(0, 99))
def test_chebyshev_keeps_its_word(n, alpha, tolerance, seed):
    rng = np.random.default_rng(seed)
    A = np.triu(rng.random((n, n)) * (rng.random((n, n)) < 0.4), 1)  # weighted, perhaps no edge
    A, s = A + A.T, rng.normal(size=n)
    C = torch.from_numpy(oracle.laplacian(A))
    largest = 2 * float(A.sum(1).max())
    found = chebyshev(alpha, lambda x: C @ x, largest, torch.from_numpy(s), tolerance).numpy()
    expected = oracle.smoothed(s, A, alpha)
    assert np.linalg.norm(found - expected) <= (tolerance + 1e-12) * np.linalg.norm(expected)


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 12), st.floats(1e-3, 300), st.floats(1e-9, 0.1), st.integers(0, 99))
def test_repeated_squaring_keeps_its_word(n, alpha, tolerance, seed):
    rng = np.random.default_rng(seed)
    A = np.triu(rng.random((3, n, n)) * (rng.random((3, n, n)) < 0.4), 1)
    A = A + A.transpose(0, 2, 1)
    C = np.array([oracle.laplacian(own) for own in A])
    found = squared(alpha, torch.from_numpy(C), 2 * float(A.sum(2).max()), tolerance).numpy()
    for own, sigma in zip(C, found):
        expected = np.linalg.inv(np.eye(n) + alpha * own)
        error = np.linalg.norm(sigma - expected, 2)
        assert error <= (tolerance + 1e-12) * np.linalg.norm(expected, 2)


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(1, 17), min_size=3, max_size=9), st.data())
def test_the_graphs_of_a_batch_are_cut_out_of_the_cohort(sizes, data):
    """From where edges lie together, against indexing rows and columns of the whole."""
    rng = np.random.default_rng(sum(sizes))
    coords = [slide_coords(rng, n) for n in sizes]
    bags = Bags.from_arrays([np.zeros((n, 1)) for n in sizes], coords=coords, step=7.0)
    order = data.draw(st.permutations(range(len(sizes))))
    parts = [np.array(order[:1]), np.array(order[1:])]
    graphs, dense = made(bags, "padded"), dense_graphs(bags)
    for part, padded in zip(parts, graphs._side_by_side(parts), strict=True):
        rows = np.concatenate([np.arange(*bags.offsets[b : b + 2]) for b in part])
        expected = bags.adjacency[rows][:, rows].toarray()
        np.testing.assert_array_equal(graphs._block(part).toarray(), expected)
        for b, C in zip(part, padded.laplacians(), strict=True):
            n = sizes[b]
            np.testing.assert_array_equal(C[:n, :n], oracle.laplacian(dense[b]))
            assert not C[n:].any() and not C[:, n:].any()


def test_bags_too_large_to_be_padded_are_not(monkeypatch):
    monkeypatch.setattr(smoothing, "PADDED", 2 * 14**2)
    graphs, dense = slides_graph("padded")
    parts = [np.array([0, 3]), np.array([2]), np.array([0, 1, 3])]
    assert [p is None for p in graphs._side_by_side(parts)] == [False, True, True]
    s, strength = torch.from_numpy(np.arange(31.0) % 7), torch.tensor(0.3, dtype=torch.float64)
    expected = oracle.smoothed(s.numpy(), dense[2], 0.3)
    np.testing.assert_allclose(graphs.smooth(s, strength, parts[1]), expected, atol=1e-5)


def test_training_with_padded_graphs_is_the_same(cohort, monkeypatch):
    def trained():
        return small(smooth="learn", smoothing="approximate", dtype="float64").fit(cohort)

    sparse = trained()
    monkeypatch.setattr(
        AttentionMIL, "_graphs", lambda self, bags, *others, **more: made(bags, "padded")
    )
    padded = trained()
    assert padded.smooth_ == pytest.approx(sparse.smooth_, rel=1e-5)
    np.testing.assert_allclose(
        padded.decision_function(cohort), sparse.decision_function(cohort), atol=1e-5
    )


@gates
def test_no_smoothing_is_the_limit(gated, cohort):
    nearly, none = (small(gated=gated, smooth=a, dtype="float64").fit(cohort) for a in (1e-9, 0.0))
    np.testing.assert_allclose(
        nearly.decision_function(cohort), none.decision_function(cohort), rtol=1e-5
    )


def test_strong_smoothing_is_even_attention(cohort):
    """On a connected bag (I + alpha C)^-1 s tends to the mean of s."""
    chain = Bags.from_arrays(
        cohort.split(cohort.features),
        cohort.labels,
        coords=[np.arange(n)[:, None] for n in cohort.sizes],
        graph="chain",
        step=1,
    )
    a = small(smooth=1e8).fit(chain).attention(chain)
    np.testing.assert_allclose(a, 1 / chain.sizes[chain.bag_index], rtol=1e-4)


def test_both_ways_of_smoothing_train_alike(cohort):
    exact, rough = (
        small(smooth=2.0, smoothing=word, dtype="float64").fit(cohort)
        for word in ("exact", "approximate")
    )
    assert exact.smooth_ == rough.smooth_ == 2.0
    np.testing.assert_allclose(
        exact.decision_function(cohort), rough.decision_function(cohort), atol=1e-4
    )


@pytest.mark.parametrize("smoothing", ["exact", "approximate"])
def test_alpha_is_learned(smoothing, cohort, tmp_path):
    model = small(smooth="learn", smoothing=smoothing, dtype="float64").fit(cohort)
    assert 1e-3 <= model.smooth_ <= 1e3
    assert model.smooth_ != 1.0
    assert model.smooth_ == pytest.approx(np.exp(model.weights_["log_alpha"]))
    fixed = AttentionMIL._from_saved(*_saved(model, tmp_path))
    assert fixed.smooth_ == model.smooth_
    np.testing.assert_array_equal(fixed.attention(cohort), model.attention(cohort))


def _saved(model, folder):
    model.save(folder / "model")
    return persistence.read(folder / "model")


def noisy_lesions(seed, n_bags=40):
    """Slides whose patches are too noisy to be judged one by one; lesions are whole regions."""
    rng = np.random.default_rng(seed)
    cells = np.argwhere(np.ones((7, 6)))
    arrays = []
    for b in range(n_bags):
        x = rng.normal(size=(len(cells), 3))
        x[cells[:, 0] < 3, 0] += 1.0 * (b % 2)
        x[rng.permutation(len(cells))[:18], 0] += 1.0 * (1 - b % 2)  # as many, but scattered
        arrays.append(x)
    labels = [b % 2 for b in range(n_bags)]
    return Bags.from_arrays(arrays, labels, coords=[cells] * n_bags, step=1)


def test_learning_moves_alpha_down_the_loss():
    """A step of training along the slope of alpha lowers the loss of that step."""
    bags = noisy_lesions(0)
    model = small(smooth="learn", max_epochs=1, batch_size=40, dtype="float64")
    start = model.fit(bags)
    losses = []
    for alpha in (1.0, start.smooth_):
        given = small(smooth=alpha, max_epochs=1, batch_size=40, dtype="float64").fit(bags)
        losses.append(given.history_[0]["train_loss"])
    assert losses[1] < losses[0]


def test_bags_without_geometry_run_unsmoothed(plain, said):
    models = [small(smooth=a).fit(plain) for a in (0.0, 0.7, "learn")]
    assert [m.smooth_ for m in models] == [0, 0, 0]
    for model in models[1:]:
        np.testing.assert_array_equal(model.attention(plain), models[0].attention(plain))
    messages = [m for m in said() if "unsmoothed" in m]
    assert len(messages) == 2
    assert "0.7" in messages[0] and "learned" in messages[1]


def test_bags_without_an_edge_run_unsmoothed(said, slides):
    apart = [np.arange(2 * len(x)).reshape(-1, 2) * 50 for x in slides["arrays"]]
    bags = Bags.from_arrays(slides["arrays"], slides["labels"], coords=apart, step=1)
    assert small(smooth="learn").fit(bags).smooth_ == 0
    assert any("no two instances are neighbours" in m for m in said())


def test_prediction_without_geometry_is_said(cohort, plain, said):
    model = small(smooth=0.7).fit(cohort)
    assert not said()
    unsmoothed = model.attention(plain)
    assert any("not smoothed" in m and "0.7" in m for m in said())
    assert abs(unsmoothed - model.attention(cohort)).max() > 1e-6


# --- Training ---------------------------------------------------------------------------------


@gates
@pytest.mark.parametrize("smooth", [0.0, 0.3])
def test_learns_which_bags_hold_the_odd_instance(gated, smooth):
    rng = np.random.default_rng(0)

    def draw(n):
        sizes = rng.integers(5, 15, n)
        x = [rng.normal(size=(m, 4)) for m in sizes]
        for b in range(1, n, 2):
            x[b][rng.integers(len(x[b]))] += [6, 0, 0, 0]
        coords = [np.arange(m)[:, None] for m in sizes]
        labels = [b % 2 for b in range(n)]
        return Bags.from_arrays(x, labels, coords=coords, graph="chain", step=1)

    train, test = draw(60), draw(40)
    model = small(gated=gated, smooth=smooth, hidden_dim=16, max_epochs=25, learning_rate=2e-2)
    model.fit(train)
    assert roc_auc_score(test.labels, model.predict_proba(test)[:, 1]) > 0.95
    assert model.score(test) > 0.85
    if not smooth:
        odd = [x[:, 0].argmax() for x in test.split(test.features)]
        top = [a.argmax() for a in test.split(model.attention(test))]
        assert np.mean(np.equal(odd, top)[1::2]) > 0.8


@pytest.mark.parametrize(
    ("setting", "telling"),
    [
        ({"gated": "yes"}, "gated must be True or False"),
        ({"smooth": -0.1}, "smooth must be a finite number >= 0"),
        ({"smooth": "auto"}, "smooth must be a finite number >= 0 or one of"),
        ({"smooth": np.nan}, "smooth must be a finite number"),
        ({"smooth": None}, "smooth must be"),
        ({"smooth": 1e13}, "at most 1e"),
        ({"smoothing": "fast"}, "smoothing must be one of"),
        ({"attention_dim": 0}, "attention_dim must be a whole number >= 1"),
    ],
    ids=str,
)
def test_settings_of_attention(setting, telling, cohort):
    with pytest.raises(ValueError, match=telling):
        small(**setting).fit(cohort)
