"""Networks of grades: cumulative logits, and two grades as the binary networks."""

import numpy as np
import pytest
import torch
from scipy.special import expit

import gpmil
from gpmil import AttentionMIL, MeanPoolMIL
from gpmil.models import OrdinalAttentionMIL, OrdinalMeanPoolMIL
from gpmil.models.ordinal_networks import log_probability

SHORT = {"hidden_dim": 8, "learning_rate": 1e-2, "max_epochs": 20, "random_state": 0}
BOTH = [(OrdinalAttentionMIL, AttentionMIL), (OrdinalMeanPoolMIL, MeanPoolMIL)]
each = pytest.mark.parametrize(("ordinal", "binary"), BOTH, ids=lambda c: c.__name__)


@pytest.fixture(scope="module")
def known():
    rng = np.random.default_rng(1)
    y = np.arange(36) % 3
    x = [rng.normal(size=(5, 3)) + 2 * k for k in y]
    return gpmil.Bags.from_arrays(x, graph=None), y


@pytest.mark.parametrize("eta", [-60.0, -1.3, 0.4, 55.0])
def test_cumulative_logits(eta):
    theta = torch.tensor([0.0, 0.7, 2.9], dtype=torch.float64, requires_grad=True)
    at = torch.full((4,), eta, dtype=torch.float64)
    found = log_probability(at, theta, torch.arange(4))
    assert float(found.detach().exp().sum()) == pytest.approx(1.0)
    found.sum().backward()
    assert torch.isfinite(found).all() and torch.isfinite(theta.grad).all()
    above = np.array([1.0, *expit(eta - theta.detach().numpy()), 0.0])
    if abs(eta) < 10:
        np.testing.assert_allclose(found.detach().exp(), -np.diff(above), rtol=1e-10)


@each
def test_grades_are_learned_predicted_and_saved(ordinal, binary, known, tmp_path):
    bags, y = known
    names = ["benign", "low", "high"]
    model = ordinal(**SHORT, grades=names).fit(bags, np.array(names)[y])
    p = model.predict_proba(bags)
    assert p.shape == (36, 3) and model.score(bags, np.array(names)[y]) > 0.8
    np.testing.assert_allclose(p.sum(1), 1, atol=1e-6)
    np.testing.assert_allclose(p[:, 0], np.exp(model.log_proba_negative(bags)[0]), rtol=1e-6)
    np.testing.assert_array_equal(model.predict_all(bags).class_proba, p)
    model.save(tmp_path / "model")
    again = gpmil.load(tmp_path / "model")
    assert again.classes_.tolist() == names
    np.testing.assert_array_equal(again.predict_proba(bags), p)


@each
def test_two_grades_are_the_binary_network(ordinal, binary, known):
    bags, y = known
    labels = (y > 0).astype(int)
    ours, theirs = (c(**SHORT, dtype="float64").fit(bags, labels) for c in (ordinal, binary))
    np.testing.assert_allclose(ours.predict_proba(bags), theirs.predict_proba(bags), rtol=1e-8)


def test_what_is_wrong_is_said(known):
    bags, y = known
    with pytest.raises(ValueError, match="without a gap"):
        OrdinalMeanPoolMIL(**SHORT).fit(bags, 2 * y)
    with pytest.raises(ValueError, match="cost must be one of"):
        OrdinalMeanPoolMIL(**SHORT, cost="linear").fit(bags, y)
