"""The compiled pass over bags with a slide effect: the same sums as by the plain one."""

import math

import numpy as np
import pytest
import torch

from gpmil.fast import compiled
from gpmil.inference.pieces import Chunk
from gpmil.moments.likelihood import Group
from gpmil.moments.taught import TaughtPatches, patches

pytest.importorskip("numba", reason="pip install 'gpmil[fast]'")

SIZES = (3, 140, 1, 6, 33, 9, 5, 1)
POSITIVE = (True, False, True, True, True, True, False, True)
M = 5


def chunk_of(tau, told, spread=1.0, dtype=torch.float64):
    """Bags without labels of patches, with both kinds, with one kind, and lone patches."""
    rng = np.random.default_rng(7)
    offsets = np.concatenate([[0], np.cumsum(SIZES)])
    known = np.full(offsets[-1], -1)
    known[offsets[3] : offsets[3] + 3] = (0, 1, 0)
    known[offsets[4] : offsets[4] + 4] = (-1, 0, 0, -1)
    known[offsets[5] + 2], known[offsets[7]] = 1, 1
    group = Group(
        torch.from_numpy(rng.uniform(0.4, 1.1, offsets[-1])),
        torch.from_numpy(offsets),
        torch.tensor(POSITIVE),
        None,
        slice(0, int(offsets[-1])),
        effect=tau,
        known=torch.from_numpy(known) if told else None,
    )
    H = torch.from_numpy(spread * rng.standard_normal((offsets[-1], M)))
    return Chunk(H.to(dtype), patches(group)), torch.from_numpy(rng.standard_normal(M))


def both(chunk, w, c):
    found = []
    for worth in (math.inf, 0):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(compiled, "WORTH", worth)
            found.append(chunk.rise(w, c))
    return found


@pytest.mark.parametrize("told", [False, True])
@pytest.mark.parametrize(
    ("tau", "c"), [(0.03, -2.5), (0.8, -3.1), (0.8, 1.2), (2.5, -6.3), (5.0, -0.4), (1.1, -26.0)]
)
def test_the_same_sums_as_the_plain_pass(told, tau, c):
    chunk, w = chunk_of(tau, told)
    assert isinstance(chunk.likelihood, TaughtPatches) == told
    (log_z, gradient), (fast_log_z, fast) = both(chunk, w, c)
    # torch's lattice of known patches is another one where all of them are negative
    assert abs(log_z - fast_log_z) < 1e-6 * (1 + abs(log_z))
    np.testing.assert_allclose(fast, gradient, rtol=0, atol=1e-6 * float(gradient.abs().max()))


def test_bags_beyond_its_range_go_the_plain_way():
    """Some 800 standard deviations above zero in a negative bag; H in float32."""
    chunk, w = chunk_of(0.7, True, spread=170.0, dtype=torch.float32)
    (log_z, gradient), (fast_log_z, fast) = both(chunk, w, 0.0)
    assert abs(log_z - fast_log_z) < 1e-9 * abs(log_z)
    np.testing.assert_allclose(fast, gradient, rtol=0, atol=1e-9 * float(gradient.abs().max()))


def test_a_small_cohort_goes_the_plain_way():
    chunk, w = chunk_of(0.7, True)
    assert chunk.likelihood.rise(chunk.H, w, 0.0) is None


@pytest.mark.parametrize("told", [False, True])
def test_runs_of_bags_side_by_side_add_up_to_all(told, monkeypatch):
    chunk, w = chunk_of(0.8, told)
    monkeypatch.setattr(compiled, "WORTH", 0)
    log_z, gradient = chunk.rise(w, -1.3)
    monkeypatch.setattr(compiled, "SIDE_BY_SIDE", 0)
    before, found = torch.get_num_threads(), []
    try:
        for threads in (1, 3):
            torch.set_num_threads(threads)
            found.append(chunk.rise(w, -1.3))
    finally:
        torch.set_num_threads(before)
    assert found[0][0] == found[1][0] and torch.equal(found[0][1], found[1][1])
    assert found[0][0] == pytest.approx(log_z, rel=1e-14)
    torch.testing.assert_close(found[0][1], gradient, rtol=1e-13, atol=1e-13)
