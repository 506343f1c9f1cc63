"""gpmil proof: what it computes, keeps and puts on its page."""

import re
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

import numpy as np
import pandas as pd
import pytest
from typer.testing import CliRunner

from gpmil.cli import app
from gpmil.models import VGPMILPR
from gpmil.paper import parts
from gpmil.paper.methods import Method
from gpmil.paper.results import MethodRun
from gpmil.paper.study import Part
from gpmil.proof import (
    bayes_distance,
    error_rates,
    methods,
    posterior_ranks,
    promises,
    ranks,
    real_sets,
    torchmil_models,
    unit_tests,
)
from gpmil.proof.page import TESTS
from gpmil.proof.plan import Plan
from gpmil.proof.trials import Trials, gathered, in_parts


def invoke(*words):
    return CliRunner().invoke(app, ["proof", *map(str, words)])


def given(seed):
    settings = {"variance": 9.0, "lengthscale": 4.0, "mean": -3.0, "n_inducing": 20}
    return VGPMILPR(**settings, device="cpu", random_state=seed)


@pytest.fixture
def cheap(monkeypatch):
    """Models that are fitted in no time."""
    few = [Method("pr", "VGPMIL-PR", given), Method("mean", "Mean-Agg", given)]
    monkeypatch.setattr(methods, "without_positions", lambda quick: few)
    return few


def test_every_model_of_the_package_is_put_to_the_tests():
    keys = {method.key for method in methods.without_positions()}
    assert {"pr", "pr-paper", "vgpmil", "concepts", "attention", "gated", "mean", "max"} <= keys
    assert "pseudo" in keys and "smooth" not in keys
    assert ("torchmil-abmil" in keys) == torchmil_models.installed()
    chains = {method.key for method in methods.on_chains()}
    assert {"bayes", "pri", "pr", "ard", "screened", "smooth", "max"} <= chains
    assert {"pri-paper", "vgpmil", "gated", "pseudo"} <= chains


def test_a_full_plan_has_ten_seeds_and_both_sizes():
    found = list(unit_tests.parts(Plan()))
    assert {p.cohort.slug.split("-")[3] for p in found} == {"300", "1000"}
    assert {p.seed for p in found} == set(range(10))
    sizes = {tuple(p.cohort.slug.split("-")[2:4]) for p in bayes_distance.parts(Plan())}
    assert len(sizes) == 6 and ("768", "5000") in sizes
    assert sum(len(p.seeds) for p in posterior_ranks.parts(Plan())) == 500 * len(ranks.CASES)


def test_the_page_shows_what_was_computed_and_nothing_is_computed_twice(tmp_path, cheap):
    out = tmp_path / "proof"
    words = ("--quick", "--seeds", 1, "--only", "unit-tests", "--out", out)
    first = invoke(*words)
    assert first.exit_code == 0, first.output
    page = (out / "index.html").read_text(encoding="utf-8")
    assert "Three tests of the multiple-instance rule" in page and "VGPMIL-PR" in page
    assert "gpmil proof --quick --only unit-tests --seeds 1" in page
    table = pd.read_csv(out / "unit_tests.csv")
    assert len(table) == 6 and set(table["test"]) == {1, 2, 3}
    # test 3 is beyond the rule, test 2 is not
    of = table[table["key"] == "pr"].set_index("test")
    assert of.loc[2, "moved"] > 0.95 and of.loc[3, "moved"] < 0.9
    again = invoke(*words)
    assert again.exit_code == 0 and "6 of 6 parts were there from before" in again.output


def test_the_page_is_written_when_the_time_is_over(tmp_path, cheap):
    """One fit at a time: the first is begun in any case, and what is missing is said."""
    words = ("--quick", "--only", "unit-tests", "--only", "shifted-mean", "--out", tmp_path / "out")
    found = invoke(*words, "--seeds", 1, "--model", "pr", "--minutes", 1e-9)
    assert found.exit_code == 0, found.output
    page = (tmp_path / "out" / "index.html").read_text(encoding="utf-8")
    assert "5 of 5 parts were not finished" in found.output
    assert "test 1, 60 bags (1 of 1); test 2" in page and "8 features, 60 bags (2 of 2)" in page
    for name in ("unit-tests", "shifted-mean"):  # each part of the page has its command
        assert f"<p>Made by: gpmil proof --quick --only {name} --model pr --seeds 1 " in page


@dataclass(frozen=True)
class Sleeper:
    """A part that lasts."""

    table: str
    effort: float  # in seconds
    turn: int = 0
    title: str = ""

    def name(self):
        return self.table

    def compute(self):
        time.sleep(self.effort)
        return self.table

    def pack(self, result):
        return {}, {"result": result}

    def unpack(self, packed):
        return packed[1]["result"]


def test_tables_get_the_same_share_of_the_time():
    """Cheap tables are repeated before a dear one has its first turn; cheap parts come first."""
    dear = [Sleeper("dear", 5.0), Sleeper("dear", 1.0), Sleeper("dear", 6.0, 1)]
    cheap = [Sleeper("cheap", 2.0, turn) for turn in range(5)]
    order = parts.in_fair_order([*dear, *cheap])
    assert order == [*cheap[:3], dear[1], dear[0], *cheap[3:], dear[2]]


def test_one_part_that_fails_does_not_cost_the_page_under_a_limit(tmp_path, monkeypatch, caplog):
    plans = [Sleeper("good", 0.0), Sleeper("bad", 1.0)]
    monkeypatch.setattr(time, "sleep", lambda seconds: 1 / 0 if seconds else None)
    found = [result for _, result, _ in parts.carry_out(plans, tmp_path, seconds=60)]
    assert found == ["good"] and "failed: ZeroDivisionError" in caplog.text
    with pytest.raises(ZeroDivisionError):
        list(parts.carry_out(plans, tmp_path))


def test_what_runs_at_the_end_of_the_time_is_given_up(tmp_path, monkeypatch):
    ended = threading.Event()

    class Pool(ThreadPoolExecutor):
        def terminate(self, kill_workers):
            assert kill_workers
            ended.set()

    monkeypatch.setattr(parts, "get_memmapping_executor", lambda n, env: Pool(n))
    monkeypatch.setattr(time, "sleep", lambda seconds: seconds and ended.wait(60))
    plans = [Sleeper("long", 1.0), Sleeper("short", 0.0), Sleeper("shorter", 0.0)]
    found = [result for _, result, _ in parts.carry_out(plans, tmp_path, n_jobs=2, seconds=3)]
    assert sorted(found) == ["short", "shorter"] and ended.is_set()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--only", "everything"), "unit-tests"),
        (("--seeds", 0), "--seeds must be at least 1"),
        (("--minutes", 0), "--minutes must be above 0"),
        (("--data", "nowhere"), "is no folder"),
        (("--only", "unit-tests", "--model", "nobody"), "no such model"),
    ],
)
def test_bad_options_are_one_line(tmp_path, words, message):
    found = invoke("--quick", "--out", tmp_path / "proof", *words)
    assert found.exit_code == 2 and message in found.output
    assert not (tmp_path / "proof").exists()


def odds(auc_like, n):
    rng = np.random.default_rng(0)
    return np.where(np.arange(n) % 2, 1.0, -1.0) * auc_like + rng.normal(0, 0.01, n)


def run_of(log_odds):
    return MethodRun(log_odds, 1 / (1 + np.exp(-log_odds)), None, None, 1.0, 0.1, {})


def test_dots_of_a_single_model_are_whole():
    cohort = unit_tests.drawn(1, unit_tests.QUICK_SIZE, 0)
    part = Part(cohort, cohort.fingerprint(), Method("a", "keeps", given), 0, flags=False)
    figure = unit_tests.build([(part, run_of(odds(1.0, unit_tests.QUICK_SIZE + 600)))]).figure
    low, high = figure.axes[0].get_ylim()
    assert low <= -0.5 and high >= 0.5


def test_models_that_are_not_finished_are_blanks():
    n = unit_tests.QUICK_SIZE
    found = [
        (
            Part(cohort, cohort.slug, Method(key, key, given), 0, flags=False),
            run_of(odds(1.0, n + 600)),
        )
        for key, tests in (("a", (1, 2, 3)), ("b", (1,)))
        for cohort in (unit_tests.drawn(test, n, 0) for test in tests)
    ]
    exhibit = unit_tests.build(found)
    assert exhibit.tables[0].rows[1][1:] == ["≤ 1", "1.000", "1.000", "1.000", *["–"] * 6]
    assert list(exhibit.tables[0].strong) == [0] and exhibit.png().startswith(b"\x89PNG")


def test_a_model_that_turns_round_is_not_highlighted():
    n = unit_tests.QUICK_SIZE
    found = []
    for test in (1, 2, 3):
        cohort = unit_tests.drawn(test, n, 0)
        for method, moved in (
            (Method("a", "keeps", given), 1.0),
            (Method("b", "turns", given), -1.0),
        ):
            pieces = [odds(1.0, n), odds(1.0, 300), odds(moved, 300)]
            part = Part(cohort, cohort.fingerprint(), method, 0, flags=False)
            found.append((part, run_of(np.concatenate(pieces))))
    exhibit = unit_tests.build(found)
    (table,) = exhibit.tables
    assert [table.rows[k][0] for k in table.strong] == ["keeps"]
    assert table.rows[1][2:5] == ["1.000", "0.000", "0.000"]
    assert exhibit.png().startswith(b"\x89PNG")


def test_distances_are_to_bayes_on_the_same_bags():
    cohort = bayes_distance.drawn(8, 60, 200, 0)
    method = Method("bayes", "Bayes", lambda seed: methods.BayesOfShiftedMean())
    part = Part(cohort, cohort.fingerprint(), method, 0, flags=False)
    best = part.compute()
    worse = run_of(best.log_odds + np.random.default_rng(0).normal(0, 3, 200))
    other = replace(part, method=Method("pri", "VGPMIL-PR-I", given))
    own = bayes_distance.frame([(part, best), (other, worse)]).set_index("key")
    assert own.loc["bayes", "auc"] == own.loc["pri", "bayes auc"] > own.loc["pri", "auc"]
    exhibit = bayes_distance.build([(part, best), (other, worse)])
    assert exhibit.tables[0].rows[0][2] == "+0.000" and exhibit.tables[0].rows[1][2].startswith("-")
    assert exhibit.png().startswith(b"\x89PNG")


def test_narrow_posteriors_are_called_narrow():
    rng = np.random.default_rng(0)
    uniform, ends = rng.random(60), rng.beta(0.2, 0.2, 60)
    one = {"seen": ends, "new": ends, "seen, Laplace": uniform, "new, Laplace": uniform}
    found = [
        (Trials("posterior", case, ranks.one_cohort, tuple(range(60))), one | {"effect": effect})
        for case, effect in zip(ranks.CASES, (np.full(60, np.nan), uniform))
    ]
    exhibit = posterior_ranks.build(found)
    assert "too narrow by far" in exhibit.paragraphs[1] and len(exhibit.tables[0].rows) == 9
    assert exhibit.png().startswith(b"\x89PNG")


def test_promises_that_are_not_kept_stand_out():
    found = []
    for study in error_rates.STUDIES:
        for k, case in enumerate(study.cases[:2]):
            good = {"most": 0.0, "least": 1.0}
            measured = {
                key: np.full(4, good[bound] if k == 0 else 1.0 - good[bound])
                for key, (_, _, bound) in study.shown.items()
            }
            found.append((Trials(study.name, case, study.measure, (0, 1, 2, 3)), measured))
    exhibit = error_rates.build(found)
    assert len(exhibit.tables) == 5 and all(list(t.strong) == [1] for t in exhibit.tables)
    assert exhibit.png().startswith(b"\x89PNG")


@pytest.mark.parametrize("study", error_rates.STUDIES, ids=lambda study: study.name)
def test_every_promise_is_tried_with_its_assumptions_and_without(study):
    broken = {case.name in error_rates.VIOLATIONS for case in study.cases}
    assert broken == {True, False}
    every = {case.name for one in error_rates.STUDIES for case in one.cases}
    assert set(error_rates.VIOLATIONS) <= every


def test_what_calibration_relies_on_is_broken_as_the_names_say():
    of = {case.name: replace(case, n_bags=100, n_fresh=400) for case in promises.SLIDES}
    train, told, fresh = of["fixed settings"].draw(0)
    assert (told == train.labels).all() and fresh.labels.mean() == 0.5
    _, told, _ = of["1 of 5 labels wrong"].draw(0)
    assert (told != train.labels).mean() == pytest.approx(0.2, abs=0.1)
    _, told, rare = of["1 of 5 fresh slides positive"].draw(0)
    assert (told == train.labels).all() and rare.labels.mean() == pytest.approx(0.2, abs=0.01)
    _, told, moved = of["another stain"].draw(0)
    assert (told == train.labels).all()
    np.testing.assert_allclose((moved.features - fresh.features).mean(0), np.eye(1, 8)[0])


def test_trials_are_kept_in_parts_and_gathered_in_order(tmp_path):
    def measure(case, seed):
        return {"seed": seed, "two": np.array([seed, 2.0])}

    plans = list(in_parts("marks", [promises.HOLD], measure, 5, 2, 1.0))
    assert [plan.seeds for plan in plans] == [(0, 1), (2, 3), (4,)]
    for old in (False, True):
        found = [(p, r) for p, r, kept in parts.carry_out(plans, tmp_path) if kept == old]
        own = gathered(found[::-1], "marks")[promises.HOLD.name]
        assert own["seed"].tolist() == [0, 1, 2, 3, 4] and own["two"].shape == (5, 2)


def test_real_sets_are_every_npz_of_the_folder(tmp_path, monkeypatch):
    rng = np.random.default_rng(0)
    for name, positions in (("grid", True), ("plain", False)):
        bag = np.repeat(np.arange(12), 9)
        y = np.arange(12) % 2
        h = y[bag] * (np.tile(np.arange(9), 12) < 3)
        x = rng.normal(size=(108, 4)) + 3 * h[:, None]
        more = {"row": np.tile(np.arange(9) // 3, 12), "col": np.tile(np.arange(9) % 3, 12)}
        (tmp_path / name).mkdir()
        np.savez(
            tmp_path / name / f"{name}.npz", X=x, bag=bag, y_bag=y, bag_id=np.arange(12),
            **(more | {"y_inst": h} if positions else {}),
        )  # fmt: skip
    few = [Method("pr", "VGPMIL-PR", given), Method("mean", "Mean-Agg", given)]
    monkeypatch.setattr(real_sets, "compared", lambda cohort, plan: few)
    plans = list(real_sets.parts(Plan(quick=True, seeds=1, data=tmp_path)))
    assert [p.cohort.name for p in plans] == ["grid", "grid", "plain", "plain"]
    assert plans[0].cohort.test.has_geometry and not plans[2].cohort.test.has_geometry
    found = [(plan, plan.compute()) for plan in plans]
    exhibit = real_sets.build(found)
    assert [len(t.rows) for t in exhibit.tables] == [2, 2, 2]  # the second set has no patch labels
    assert "patches: FROC" in exhibit.tables[1].columns
    assert exhibit.tables[0].columns[-1] == exhibit.tables[2].columns[-1] == "seconds"
    assert re.fullmatch(r"\d+", exhibit.tables[0].rows[0][-1])
    assert exhibit.png().startswith(b"\x89PNG")
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(ValueError, match="found none"):
        list(real_sets.parts(Plan(data=empty)))


def test_without_a_folder_the_page_says_that_there_are_no_real_sets():
    assert "--data FOLDER" in TESTS["real-sets"].exhibit([], []).missing
    assert list(real_sets.parts(Plan())) == []
    assert set(TESTS) == {"unit-tests", "shifted-mean", "posterior", "promises", "real-sets"}
