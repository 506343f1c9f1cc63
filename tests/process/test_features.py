import logging

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.cluster import KMeans
from sklearn.decomposition import PCA
from sklearn.preprocessing import StandardScaler

from gpmil.fast import compiled
from gpmil.process import features, inducing
from gpmil.process.inducing import kmeans_by_class


def draw(n=60, d=5, seed=0, dtype=np.float64):
    rng = np.random.default_rng(seed)
    return (rng.normal(size=(n, d)) * np.arange(1, d + 1) + np.arange(d) * 3).astype(dtype)


@pytest.mark.parametrize(("dtype", "atol"), [(np.float64, 1e-12), (np.float32, 1e-5)])
def test_standardizer_equals_scikit_learn(dtype, atol, monkeypatch):
    monkeypatch.setattr(features, "ROWS", 17)  # several chunks
    x = draw(dtype=dtype)
    found = features.standardizer(x)(x).numpy()
    assert found.dtype == np.float64
    assert np.allclose(found, StandardScaler().fit_transform(x), atol=atol)


def test_float16_sums_do_not_overflow():
    x = (np.random.default_rng(1).normal(size=(5000, 3)) * 30 + 1000).astype(np.float16)
    found = features.standardizer(x)
    assert np.allclose(found.mean, x.astype(float).mean(0))
    assert np.allclose(found.scale, x.astype(float).std(0))


def test_pca_scores_divided_by_one_number():
    x = draw()
    found = features.pca(x, 3)(x).numpy()
    scores = PCA(3).fit_transform(x)
    scores /= scores.std()
    signs = np.sign((found * scores).sum(0))
    assert np.allclose(found, scores * signs, atol=1e-10)
    assert len(features.pca(x, 3).scale) == 1


@given(k=st.integers(1, 5), seed=st.integers(0, 50))
@settings(max_examples=20, deadline=None)
def test_inverse_maps_back(k, seed):
    x = draw(n=12, seed=seed)
    z = np.random.default_rng(seed).normal(size=(4, k))
    for found in (features.pca(x, k),) + ((features.standardizer(x),) if k == 5 else ()):
        assert np.allclose(found(found.inverse(z)).numpy(), z, atol=1e-10)


def test_a_constant_column_keeps_scale_one_and_is_said_once(caplog):
    x = draw()
    x[:, 2] = 7.3
    with caplog.at_level(logging.WARNING, logger="gpmil"):
        found = features.standardizer(x)
    assert found.scale[2] == 1 and np.abs(found(x).numpy()[:, 2]).max() < 1e-12
    assert [r.message for r in caplog.records if "column 2" in r.message]
    assert len(caplog.records) == 1


@pytest.mark.parametrize("k", [0, 6, 61])
def test_pca_of_too_many_components(k):
    with pytest.raises(ValueError, match="between 1 and 5"):
        features.pca(draw(), k)


def test_half_of_the_inducing_points_from_each_class():
    rng = np.random.default_rng(0)
    x = np.concatenate([rng.normal(size=(300, 2)), rng.normal(size=(200, 2)) + 50])
    positive = np.arange(500) >= 300
    z = kmeans_by_class(x, positive, features.standardizer(x), 21, seed=4)
    assert z.shape == (21, 2)
    assert (z[:, 0] > 25).sum() == 11  # the odd one goes to the positive bags
    again = kmeans_by_class(x, positive, features.standardizer(x), 21, seed=4)
    assert np.array_equal(z, again)
    other = kmeans_by_class(x, positive, features.standardizer(x), 21, seed=5)
    assert not np.array_equal(z, other)


def test_settled_kmeans_centres_are_centres(monkeypatch):
    """Each centre is the mean of the points nearest to it (in the space of the kernel)."""
    monkeypatch.setattr(inducing, "SETTLED", 0.0)
    rng = np.random.default_rng(3)
    x = rng.normal(size=(400, 2)) * [1, 20]
    found = features.standardizer(x)
    z = found(kmeans_by_class(x, np.arange(400) % 2 == 0, found, 16, seed=0)).numpy()
    for points, centres in ((found(x[::2]).numpy(), z[:8]), (found(x[1::2]).numpy(), z[8:])):
        nearest = np.linalg.norm(points[:, None] - centres, axis=2).argmin(1)
        means = np.array([points[nearest == k].mean(0) for k in range(8)])
        assert np.allclose(means, centres, atol=1e-6)


def test_large_classes_are_subsampled(monkeypatch):
    monkeypatch.setattr(inducing, "POINTS_PER_CENTRE", 10)
    sample = inducing.sample(1000, 3, seed=1)
    assert len(np.unique(sample)) == 30 and (np.diff(sample) > 0).all()


def test_kmeans_is_as_good_as_that_of_scikit_learn():
    x = torch.from_numpy(np.random.default_rng(2).normal(size=(6000, 7)) ** 3)
    ours, theirs = [], []
    for seed in range(5):  # where one run ends is luck, and rounding may turn it
        centres = torch.from_numpy(inducing.kmeans(x, 40, seed=seed))
        found = inducing.tally_all(inducing.in_blocks(x), centres)
        ours.append(float(x.square().sum() + found.distance))
        theirs.append(KMeans(40, n_init=1, random_state=seed).fit(x.numpy()).inertia_)
    assert np.mean(ours) < 1.05 * np.mean(theirs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_seeds_of_the_loop_are_those_of_torch(dtype, monkeypatch):
    if compiled.centres() is None:
        pytest.skip("not compiled here")
    x = torch.from_numpy(draw(n=333, d=11, seed=4)).to(dtype)
    for k in (2, 7, 60):  # two points for a centre, and more
        found = inducing.spread(x, k, seed=k)
        with monkeypatch.context() as patch:
            patch.setattr(compiled, "centres", lambda: None)
            torch.testing.assert_close(found, inducing.spread(x, k, seed=k), rtol=0, atol=0)
    one = x[:1].expand(40, -1).contiguous()  # all points in one place
    torch.testing.assert_close(inducing.spread(one, 5, seed=0), one[:5], rtol=0, atol=0)


@pytest.mark.parametrize("is_compiled", [True, False])
def test_tally_against_loops(is_compiled, monkeypatch):
    if not is_compiled:
        monkeypatch.setattr(compiled, "centres", lambda: None)
    x, centres = (torch.from_numpy(draw(n, seed=n)).float() for n in (50, 4))
    centres[3] = 1e3  # no point is near to it
    sums, counts, total = np.zeros((4, 5)), np.zeros(4), 0.0
    for row in x.double().numpy():
        apart = np.square(row - centres.double().numpy()).sum(1)
        sums[apart.argmin()] += row
        counts[apart.argmin()] += 1
        total += apart.min() - row @ row
    found = inducing.tally(*inducing.in_blocks(x)[0], centres)
    np.testing.assert_allclose(found.sums, sums, rtol=1e-14)
    np.testing.assert_array_equal(found.counts, counts)
    assert all(part.dtype == torch.float64 for part in found) and not counts[3]
    assert float(found.distance) == pytest.approx(total, rel=1e-6)


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_sums_in_one_pass_equal_two_passes(dtype, monkeypatch):
    monkeypatch.setattr(features, "ROWS", 37)
    x = (draw(n=500) * [1, 3, 0.1, 2, 5] + [1e2, 0, -7, 1, 3]).astype(dtype)
    found = features.standardizer(x)
    exact = x.astype(np.float64)
    assert np.allclose(found.mean, exact.mean(0), rtol=1e-12)
    assert np.allclose(found.scale, exact.std(0), rtol=1e-11)


@pytest.mark.parametrize("n", [1, 33, 5000])  # less than a run of rows, more, and several lanes
@pytest.mark.parametrize("order", ["C", "F"])
@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_sums_of_the_loop_are_those_of_torch(n, order, dtype, monkeypatch):
    if compiled.columns() is None:
        pytest.skip("not compiled here")
    x = np.asarray(draw(n=n, d=7, dtype=np.float16), dtype, order=order)
    about = torch.linspace(0, 20, 7, dtype=torch.float64)
    found = features.sums(x, about, outer=False)
    again = features.sums(x.astype(np.float64), about, outer=False)
    assert torch.equal(found.first, again.first) and torch.equal(found.second, again.second)
    monkeypatch.setattr(compiled, "columns", lambda: None)
    plain = features.sums(x, about, outer=False)
    assert found.size == plain.size == n
    torch.testing.assert_close(found.first, plain.first, rtol=1e-14, atol=1e-12)
    torch.testing.assert_close(found.second, plain.second, rtol=1e-14, atol=0)


@pytest.mark.parametrize("n", [0, 1, 48, 131])
def test_points_in_one_look_are_those_in_two(n, monkeypatch):
    """Not a digit is another, so that where centres end does not hang on the way to them."""
    if compiled.centres() is None:
        pytest.skip("not compiled here")
    monkeypatch.setattr(inducing, "BLOCK", 50)
    x, rows = draw(n=200, seed=n, dtype=np.float32), np.arange(200)[200 - n :]
    x.flags.writeable = False
    to = features.standardizer(x)
    origin = torch.linspace(-1, 1, 5, dtype=torch.float64)
    in_one = inducing.in_blocks(inducing.Inputs(x, rows, to.on("cpu")), origin)
    in_two = inducing.in_blocks(inducing.inputs(x, rows, to, "cpu"), origin)
    assert len(in_one) == len(in_two) == max(-(-n // 50), 1)
    for (one, its_panels), (two, panels) in zip(in_one, in_two):
        assert one.dtype == two.dtype == torch.float32 and torch.equal(one, two)
        np.testing.assert_array_equal(its_panels, panels)


def test_which_points_are_not_looked_at_once():
    x, rows, origin = draw(), np.arange(20), torch.zeros(5, dtype=torch.float64)
    for of, to in ((x, features.standardizer(x)), (x.astype(np.float32), features.pca(x, 5))):
        points = inducing.Inputs(of, rows, to.on("cpu"))
        assert points.about(slice(None), origin) is None
        found = torch.cat([part for part, _ in inducing.in_blocks(points, origin)])
        torch.testing.assert_close(found, to(of[rows]).float(), rtol=0, atol=0)


def test_repeated_points_give_fewer_centres():
    x = np.repeat(np.array([[0.0, 1.0], [4.0, 2.0], [9.0, 5.0]]), 20, axis=0)
    z = kmeans_by_class(x, np.arange(60) % 2 == 0, features.identity(2), 10, seed=0)
    assert len(z) == 6
