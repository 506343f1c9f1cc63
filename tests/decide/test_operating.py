"""Operating points: the threshold of every aim against all thresholds, and their exact rates."""

import numpy as np
import pytest
from scipy.stats import binom
from sklearn.metrics import confusion_matrix
from synthetic import pri

import gpmil
from gpmil.decide.operating import Aim, OperatingPoint, rates
from gpmil.files import persistence
from gpmil.runs import operating
from gpmil.runs.predict import PredictionOptions, predict


@pytest.fixture(scope="module")
def scored():
    """Probabilities that tell the labels somewhat, ties among them."""
    rng = np.random.default_rng(8)
    labels = (rng.random(60) < 0.4).astype(int)
    p = 1 / (1 + np.exp(-(rng.normal(size=60) + 1.3 * labels - 0.9)))
    p[5] = p[17]
    return p, labels


@pytest.fixture(scope="module")
def model(cohort):
    return pri(n_inducing=12, aim="sensitivity=0.9", random_state=2).fit(cohort)


def reached(p, y, t):
    (tn, fp), (fn, tp) = confusion_matrix(y, p > t, labels=[0, 1])
    return tp / (tp + fn), tn / (tn + fp), fn, fp


@pytest.mark.parametrize("wanted", [0.7, 0.93, 1.0])
def test_a_sensitivity_costs_as_little_specificity_as_it_must(scored, wanted):
    t = Aim.read(f"sensitivity={wanted}").threshold(*scored)
    sensitivity, specificity, *_ = reached(*scored, t)
    every = [reached(*scored, s)[:2] for s in (-1, *scored[0])]
    assert sensitivity >= wanted
    assert specificity == max(b for a, b in every if a >= wanted)


def test_a_specificity_likewise(scored):
    sensitivity, specificity, *_ = reached(*scored, Aim.read("specificity=0.8").threshold(*scored))
    every = [reached(*scored, s)[:2] for s in scored[0]]
    assert specificity >= 0.8 and sensitivity == max(a for a, b in every if b >= 0.8)


def test_costs_are_least(scored):
    *_, fn, fp = reached(*scored, Aim.read("cost=3:2").threshold(*scored))
    assert 3 * fn + 2 * fp == min(
        3 * a + 2 * b for *_, a, b in (reached(*scored, s) for s in (-1, *scored[0]))
    )


def test_equal_odds_call_the_likelier_class(scored):
    assert Aim.read("equal odds").threshold(*scored) == 0.5


@pytest.mark.parametrize(
    "words", ["sensitivity", "sensitivity=2", "cost=3", "cost=0:1", "auc=0.9", 0.9, None]
)
def test_aims_that_are_none(words):
    with pytest.raises(ValueError, match="aim: expected"):
        Aim.read(words)


def test_rates_have_exact_intervals(scored):
    p, y = scored
    value, low, high, n = rates(p > 0.4, y)["specificity"]
    hits = round(value * n)
    assert n == (y == 0).sum() and hits == ((p <= 0.4) & (y == 0)).sum()
    # Clopper and Pearson: each end is the share at which what was seen has probability 2.5 %
    assert binom.sf(hits - 1, n, low) == pytest.approx(0.025)
    assert binom.cdf(hits, n, high) == pytest.approx(0.025)
    twice = rates(np.repeat(p > 0.4, 2), np.repeat(y, 2), np.repeat(np.arange(60), 2))[
        "specificity"
    ]
    assert twice[:3] == pytest.approx([value, low, high])  # copies tell nothing new
    assert "positive predictive value" not in rates(p > 1, y)


def test_a_fit_freezes_its_threshold(model, cohort, tmp_path):
    p = model.predict_proba(cohort)[:, 1]
    assert 0 < model.threshold_ < 1 and model.operating_point_["rates"]["sensitivity"][0] >= 0.9
    assert (model.predict(cohort) == (p > model.threshold_)).all()
    model.save(tmp_path / "model")
    again = gpmil.load(tmp_path / "model")
    assert again.threshold_ == model.threshold_
    assert again.operating_point_ == model.operating_point_
    plain = pri(n_inducing=12, random_state=2).fit(cohort)
    assert plain.threshold_ == 0.5 and plain.operating_point_ is None


def test_left_out_probabilities_choose_it(model, cohort):
    lp = model.leave_one_patient_out(cohort)
    p = np.where(cohort.labels == 1, np.exp(lp), -np.expm1(lp))
    point = OperatingPoint.choose("sensitivity=0.9", p, cohort.labels, "", cohort.groups)
    assert point.threshold == pytest.approx(model.threshold_, rel=1e-6)
    assert point.rates == model.operating_point_["rates"]


def test_models_of_earlier_versions_call_the_likelier_class(model, tmp_path):
    arrays, card = model._saved()
    card["settings"].pop("aim")
    for name in ("threshold_", "operating_point_"):
        card["fitted"].pop(name)
    persistence.write(tmp_path / "old", arrays, card)
    assert gpmil.load(tmp_path / "old").threshold_ == 0.5


def test_cross_fitted_probabilities_come_first(cohort):
    fitted = pri(n_inducing=12, aim="cost=2:1", flags=True, n_folds=3, random_state=2).fit(cohort)
    p = 1 / (1 + np.exp(-fitted.cross_fit_.log_odds))
    expected = Aim.read("cost=2:1").threshold(p, cohort.labels)
    assert fitted.threshold_ == pytest.approx(expected)


def test_a_run_says_what_was_called(model, cohort):
    rows, _ = predict(model, cohort, PredictionOptions(), None)
    assert (rows["call"] == (rows["probability"] > model.threshold_)).all()
    rows["label"] = rows["label"].astype(float)
    found = operating.judged(rows, cohort.groups)
    assert found["sensitivity"]["slides"] == cohort.labels.sum()
    old = rows.drop(columns="call")
    assert (operating.calls(old) == (old["log_odds"] > 0)).all()
