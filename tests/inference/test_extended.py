"""W, H and R at more inducing points, or others, from those that are kept."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from synthetic import small_cohort, some_inducing

from gpmil.inference.extended import Kept
from gpmil.inference.stores import Source, gather
from gpmil.moments.taught import patches
from gpmil.process.kernels import Kernel
from gpmil.process.slide_context import Frame, SlideContext
from gpmil.process.sparse_gp import SparseGP

BAGS = small_cohort(seed=9, n_bags=9, sizes=(2, 9))
X = torch.tensor(BAGS.features, dtype=torch.float64)
POINTS = torch.tensor(some_inducing(BAGS, 9), dtype=torch.float64)


def source_at(points, effect=0.8, context=False, strength=0.6, seed=1):
    g = None
    if context:
        frame = Frame(
            torch.full((X.shape[1],), 0.3).double(), torch.full((X.shape[1],), 1.7).double()
        )
        g = SlideContext.build(frame, POINTS[:3] / 2, 1.4, 2.2)
    gp = SparseGP.build(Kernel("rbf", 2.3, 1.8), points, effect, g)
    known = np.where(np.random.default_rng(seed).random(len(X)) < 0.3, BAGS.instance_labels, -1)
    positive = BAGS.labels == 1
    made = (BAGS.adjacency, BAGS.offsets, positive, strength, torch.float64, patches, known)
    return Source(gp, lambda rows: X[rows], *made)


def kept_at(source):
    return Kept.of(source, *gather(source, "memory"))


@pytest.mark.parametrize("effect, context", [(0.0, False), (0.8, False), (0.8, True)])
def test_kept_columns_are_those_of_a_new_pass(effect, context):
    kept = kept_at(source_at(POINTS[:5], effect, context))
    # one more, one in the middle, fewer and another
    for chosen in ([0, 1, 2, 3, 4, 5], [0, 1, 2, 6, 3, 4, 5], [0, 1, 2, 8]):
        source = source_at(POINTS[chosen], effect, context, seed=len(chosen))
        pieces, expected = gather(source, "memory")
        kept = kept.at(source)
        np.testing.assert_allclose(kept.gathered.gram, expected.gram, atol=1e-11)
        assert kept.gathered.trace == pytest.approx(expected.trace, rel=1e-12)
        w = torch.linspace(-1, 1, source.gp.n_weights).double()
        for mine, theirs in zip(kept.pieces(source), pieces, strict=True):
            np.testing.assert_allclose(mine.H, theirs.H, atol=1e-11)
            for one, other in zip(mine.bound(w, -0.4), theirs.bound(w, -0.4)):
                np.testing.assert_allclose(one, other, rtol=1e-10, atol=1e-10)


def test_nothing_is_kept_for_another_problem():
    kept, source = kept_at(source_at(POINTS[:5])), source_at(POINTS[:6])
    assert kept.at(source) is not None
    assert kept.at(source_at(POINTS[1:6])) is None
    assert kept.at(source_at(POINTS[:6], effect=0.7)) is None
    assert kept.at(source_at(POINTS[:6], strength=0.5)) is None
    assert kept.at(replace(source, positive=~source.positive)) is None
    fewer = source.adjacency.tolil()
    fewer[0, :], fewer[:, 0] = 0, 0
    assert kept.at(replace(source, adjacency=fewer.tocsr())) is None
    longer = SparseGP.build(Kernel("rbf", 2.3, 1.9), POINTS[:6], 0.8)
    assert kept.at(replace(source, gp=longer)) is None


def test_only_what_lies_in_memory_is_kept(monkeypatch):
    source = source_at(POINTS[:5])
    assert Kept.of(source, *gather(source, "recompute")) is None
    rough = replace(source, dtype=torch.float32)
    assert Kept.of(rough, *gather(rough, "memory")) is None
    monkeypatch.setattr("gpmil.inference.extended.free_memory", lambda device: 1000)
    assert kept_at(source) is None
