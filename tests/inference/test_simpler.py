"""A setting that is not needed ends at 0: the comparison, and what it costs."""

import logging

import numpy as np
import pytest
import torch
from oracles.tuning import standard_cohort
from synthetic import pri, some_inducing

from gpmil import Bags
from gpmil.inference import objective, simpler, tuning
from gpmil.inference.at_settings import Settings
from gpmil.inference.folded_cohort import Cohort, SlidesInContext
from gpmil.inference.tuning import Search, Space, Trial
from gpmil.models import learning

BEST = Settings(9.0, 4.0, -3.0, 0.6, 0.7)
PATIENTS = np.array([0, 0, 0, 1, 1, 1, 2, 2, 3, 3])


@pytest.fixture(scope="module")
def bags():
    return standard_cohort(seed=5, n_bags=10, sizes=(4, 6))


def search_of(bags, groups=None, context=None):
    """A search that has ended at BEST."""
    x, Z = torch.from_numpy(bags.features.astype(float)), torch.zeros(3, 4).double()
    fold = np.arange(10) % 2
    made = Cohort(
        x, Z, bags.adjacency, bags.offsets, bags.labels == 1, "rbf", fold, groups=groups,
        context=context,
    )  # fmt: skip
    return Search(made, Space({}, 2.0, with_effect=True), 0, [Trial("rbf", BEST, -0.4, -0.4)])


def without_effect(bags, groups=None):
    """A search that has ended at BEST but for the effect."""
    found = search_of(bags, groups)
    best = BEST._replace(slide_effect=0.0)
    found.space = found.space.without("slide_effect")
    found.trace = [Trial("rbf", best, -0.4, -0.4)]
    return found


@pytest.fixture
def bowl(monkeypatch):
    """Best at variance 12, length 5, mean -3.2, whatever the other settings are."""

    def gradient(cohort, settings, start=None):
        off = np.array([np.log(settings[0] / 12), np.log(settings[1] / 5), settings[2] + 3.2])
        slope = -2 * off / np.array([settings[0], settings[1], 1.0])
        scores = torch.full((10,), -0.5 - float(off @ off)).double()
        return objective.Slopes(scores, Settings(*slope, 0.0, 0.0), None, None)

    monkeypatch.setattr(tuning, "gradient", gradient)
    monkeypatch.setattr(tuning, "left_out", lambda *a: (gradient(*a[:2]).scores, None))


def test_the_best_without_a_setting_is_looked_for_from_the_end(bags, bowl):
    found = simpler.without(search_of(bags), "coupling", 14)
    assert {trial.settings.coupling for trial in found.trace} == {0.0}
    assert 2 <= len(found.trace) <= 8  # 14 fits' worth: six with gradient, two without
    assert found.trace[0].settings == pytest.approx(BEST._replace(coupling=0.0))
    assert found.best.score > found.trace[0].score


def test_an_effect_is_added_at_the_end_of_a_search_without(bags, bowl):
    whole = Space({}, 2.0, with_effect=True)
    found = simpler.added(without_effect(bags), "slide_effect", 14, whole)
    assert found.trace[0].settings == pytest.approx(BEST._replace(slide_effect=simpler.BEGIN))
    assert all(trial.settings.slide_effect > 0 for trial in found.trace)


STEPS = np.array([0.2, 0.1, 0.3, -0.1, 0.0, -0.2, 0.1, 0.2, 0.0, 0.1])  # mean .07, error .0473


def ends(bags, name, gain, groups=None, context=None):
    """A search with a setting by which bags gain so much, and one without."""
    best = search_of(bags, groups, context)
    best.trace = [Trial("rbf", BEST, -0.4, -0.4, tuple(-0.5 + gain))]
    rival = search_of(bags, groups, context)
    rival.trace = [Trial("rbf", BEST._replace(**{name: 0.0}), -0.4, -0.4, (-0.5,) * 10)]
    return best, rival


def judged(bags, name, gain, groups=None):
    """What is kept where bags gain so much by a setting."""
    return getattr(simpler.needed(name, *ends(bags, name, gain, groups)).best.settings, name)


@pytest.mark.parametrize(
    ("name", "gain", "kept"),
    [
        ("coupling", STEPS - 0.03, 0.6),  # and what maps need
        ("coupling", 0.03 - STEPS, 0.6),
        ("coupling", 0.02 - STEPS, 0.0),  # better without it by more than one
        ("coupling", -STEPS, 0.0),
        ("slide_effect", STEPS, 0.7),
        ("slide_effect", STEPS - 0.03, 0.0),
        ("slide_effect", -STEPS, 0.0),
    ],
)
def test_what_is_kept_inside_the_standard_error(bags, name, gain, kept, caplog):
    caplog.set_level(logging.INFO, logger="gpmil")
    assert judged(bags, name, gain) == kept
    assert ("0 is kept" if kept == 0 else "it is kept") in caplog.text
    assert f"a difference of {gain.mean():.4f} with a standard error of 0.0473" in caplog.text


@pytest.mark.parametrize(("gain", "kept"), [(STEPS, 0.6), (0.03 - STEPS, 0.0)])
def test_a_context_leaves_no_bonus_to_the_coupling(bags, gain, kept):
    slides = torch.from_numpy(np.random.default_rng(2).normal(size=(10, 4)))
    pair = ends(bags, "coupling", gain, context=SlidesInContext(slides, slides[:3]))
    assert simpler.needed("coupling", *pair).best.settings.coupling == kept


@pytest.mark.parametrize(
    ("gain", "both"), [(STEPS, True), (0.03 - STEPS, True), (STEPS + 0.03, False)]
)
def test_the_last_steps_of_both_decide_where_they_are_close(bags, gain, both, monkeypatch):
    best, rival = ends(bags, "coupling", gain)
    taken = []
    monkeypatch.setattr(tuning, "finished", taken.append)
    winner = simpler.decided("coupling", best, rival, begun=True)
    assert taken == ([best, rival] if both else [winner])
    taken.clear()
    assert simpler.decided("coupling", best, rival, begun=False) is winner
    assert taken == []  # a cohort that was its own pilot has no steps left


def test_patients_are_the_units_of_the_error(bags):
    # three slides of a patient say the same: the difference is less certain
    gain = np.array([0.2, 0.2, 0.2, -0.1, -0.1, -0.1, 0.1, 0.1, 0.05, 0.05])
    for patients, kept in ((None, 0.7), (PATIENTS, 0.0)):
        assert judged(bags, "slide_effect", gain, patients) == kept


def test_without_an_effect_the_prior_is_that_of_models_without(bags):
    whole = Space({}, 2.0, with_effect=True)
    assert whole.centre == tuning.EFFECT_CENTRE
    assert whole.without("slide_effect").centre == tuning.CENTRE


def test_settings_have_a_place(bags):
    for space in (
        Space({}, 2.0, with_effect=True),
        Space({"variance": 9.0}, 2.0, with_effect=True),
        Space({}, 2.0, with_effect=True).without("coupling"),
    ):
        fixed = space.fixed.get("coupling", BEST.coupling)
        moved = space.settings(torch.from_numpy(space.place(BEST)))
        assert moved.tolist() == pytest.approx(list(BEST._replace(coupling=fixed)))


def test_which_setting_may_be_spared():
    assert learning.spared(["variance", "coupling", "slide_effect"], True) == "coupling"
    assert learning.spared(["variance", "slide_effect"], True) is None  # it makes the map
    assert learning.spared(["variance", "slide_effect"], False) == "slide_effect"
    assert learning.spared(["variance"], False) is None
    assert simpler.part_of(9) == 0 and simpler.part_of(28) == 10


@pytest.mark.parametrize("name", ["coupling", "slide_effect"])
def test_a_fit_ends_with_or_without(bags, name):
    given = {"variance": "auto", "lengthscale": 2.0, "mean": -1.0, "coupling": 0.0}
    if name == "slide_effect":  # without positions
        bags = Bags.from_arrays(bags.split(bags.features), labels=bags.labels)
    model = pri(
        **given | {name: "auto"}, inducing=some_inducing(bags, 4), standardize=False,
        tuning_budget=28,
    ).fit(bags)  # fmt: skip
    rows = model.tuning_trace_
    without = [row for row in rows if row[name] == 0]
    compared = len(without) if name == "coupling" else len(rows) - len(without)
    assert 1 <= compared <= 5  # a third of the budget
    best = max((row for row in rows if row[name] > 0), key=lambda row: row["objective"])
    simple = max(without, key=lambda row: row["objective"])
    assert getattr(model, f"{name}_") in (best[name], 0.0)
    chosen = best if getattr(model, f"{name}_") else simple
    assert model.variance_ == chosen["variance"]
