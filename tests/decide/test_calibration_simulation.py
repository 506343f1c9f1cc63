"""The promised error rates on simulated cohorts: a few here, a hundred in the benchmark."""

import sys
from dataclasses import replace
from importlib import import_module
from pathlib import Path

import numpy as np
import pytest

from gpmil.proof import promises, tissue

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
simulation = import_module("calibration_simulation")

RATES = promises.RATES


def flags(seeds=range(8), **changed):
    case = replace(promises.HOLD, **changed)
    return simulation.study(promises.flags_cohort, [case], seeds)[case.name]


@pytest.fixture(scope="module")
def hold():
    return flags()


@pytest.mark.parametrize("within", ["cohort", "bag"])
def test_the_false_discovery_rate_is_kept_where_the_assumptions_hold(hold, within):
    for rate in RATES:
        realised = hold[f"fdr {within} {rate}"]
        assert realised.mean() <= rate + 0.02
        # a mean over slides scatters too much for eight cohorts to settle two points
        unsettled = 0.0 if within == "cohort" else 2 * realised.std(ddof=1) / np.sqrt(len(realised))
        assert abs(realised.mean() - rate * hold["share"].mean()) <= 0.02 + unsettled
    assert hold[f"power {within} 0.1"].mean() > 0.8


def test_p_values_of_benign_patches_are_uniform_where_models_agree(hold):
    assert hold["agreement"].mean() > 0.98
    for level, off in ((0.01, 0.003), (0.05, 0.007), (0.1, 0.01)):
        for kind in ("pooled", "training"):
            assert abs(hold[f"{kind} <= {level}"].mean() - level) < off


def test_where_models_disagree_pooled_p_values_are_too_large_not_too_small():
    weak = tissue.Tissue(shift=1.0, smallest=0.3, largest=0.4)
    found = flags(range(6), n_bags=16, n_fresh=60, tissue=weak)
    assert found["agreement"].mean() < 0.95
    assert found["pooled <= 0.05"].mean() < 0.045
    assert max(found[f"fdr bag {rate}"].mean() - rate for rate in RATES) < 0


def test_the_rate_is_not_kept_beside_lesions():
    # what the documentation warns of; a change that brings this down is welcome
    coupled = flags(range(3), n_fresh=80, coupling=1.0)
    shifted = flags(range(3), n_fresh=80, tissue=tissue.Tissue(field_effect=0.5))
    for found in (coupled, shifted):
        assert 0.12 < found["fdr cohort 0.1"].mean() < 0.35
        assert found["beside 0.1"].mean() > 0.4


def test_patches_that_move_together_scatter_the_rate_but_keep_its_mean():
    found = flags(range(4), n_bags=60, n_fresh=100, tissue=tissue.Tissue(correlation=0.3))
    for rate in RATES:
        assert found[f"fdr cohort {rate}"].mean() <= rate + 0.02
        assert found[f"fdr bag {rate}"].mean() <= rate + 0.02


def test_accepted_slides_err_as_seldom_as_promised():
    case = promises.Refer("small", promises.HARD, n_bags=80, n_fresh=500)
    found = simulation.study(promises.refer_cohort, [case], range(6))["small"]
    for alpha in promises.ALPHAS:
        # each cohort exceeds with probability .1 at most: three of six have probability .016
        assert found[f"exceeds {alpha}"].sum() <= 2
    assert found["some 0.1"].mean() > 0.5
    assert found["accepted 0.2"].mean() > 0.8


def test_calibration_mends_settings_that_are_off():
    # 1,500 slides to judge by: of 300 true probabilities alone have an error of .03
    (case,) = (c for c in promises.SLIDES if c.settings is promises.PAPER)
    found = simulation.study(promises.slides_cohort, [case], range(3))[case.name]
    assert found["raw, many"].mean() > 0.05
    assert found["sigmoid, many"].mean() < 0.03
    assert found["sigmoid"].mean() <= 0.05
    assert found["sigmoid"].mean() <= found["sigmoid, chance"].mean() + 0.02
    assert found["sigmoid, log loss"].mean() < found["raw, log loss"].mean()


def test_learned_coupling_follows_the_truth():
    # neither truth is 1, where the search begins and its weak prior has its centre
    low, high = (simulation.Coupled(truth, "coupling", sides=(5, 6)) for truth in (0.3, 3.0))
    found = simulation.study(simulation.coupled_cohort, [low, high], range(2))
    ratios = np.concatenate([found[case.name]["ratio"] for case in (low, high)])
    assert (np.abs(np.log(ratios)) < np.log(5)).all()  # within 3 in most of a hundred: benchmark
    learned = [case.truth * np.median(found[case.name]["ratio"]) for case in (low, high)]
    assert learned[1] > 1.5 * learned[0]


def test_what_a_cohort_gives_does_not_depend_on_the_others():
    case = replace(promises.HOLD, n_bags=16, n_fresh=8)
    two, one = (simulation.study(promises.flags_cohort, [case], s) for s in (range(2), range(1, 2)))
    for name, values in one[case.name].items():
        assert np.array_equal(values, two[case.name][name][1:], equal_nan=True)
