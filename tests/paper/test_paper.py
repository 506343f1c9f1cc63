"""The paper's experiments: what is counted, what is kept, what is concluded."""

import json
import math
import re
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import writers
from synthetic import pr
from typer.testing import CliRunner

import gpmil
from gpmil.cli import app, paper
from gpmil.cli.options import PaperOptions, Source
from gpmil.paper import (
    all_models,
    cohorts,
    exhibit,
    findings,
    methods,
    parts,
    reported,
    scores,
    study,
    table1_patches,
    table2_slides,
    table3_confusion,
    table4_times,
    table5_other_models,
    table6_panda,
)
from gpmil.paper.methods import COUPLINGS, Method, key_of
from gpmil.paper.results import MethodRun, Results

PRI = [key_of(c) for c in COUPLINGS]


@pytest.fixture(scope="module", autouse=True)
def few_resamples():
    """Intervals are judged in tests/decide: here they only have to be there."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(all_models, "N_BOOTSTRAP", 10)
        yield


# --- Made-up results ------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def bags():
    return gpmil.simulate.cohort(14, 8, n_features=16, seed=3)


def run_of(bags, seed, shift=0.0, spread=1.0, seconds=2.0, patches=True):
    rng = np.random.default_rng(seed)
    odds = rng.normal(size=len(bags)) + bags.labels + shift
    p = 1 / (1 + np.exp(-(spread * rng.normal(size=bags.n_instances) + 2 * bags.instance_labels)))
    flagged = p > 0.7
    found = (p, flagged) if patches else (None, None)
    return MethodRun(odds, 1 / (1 + np.exp(-odds)), *found, seconds, 0.5, {"variance_": 2.0})


@pytest.fixture(scope="module")
def results(bags):
    every = methods.compared({})
    quiet = ("attention", "gated", "smooth", "mean")
    runs = {
        m.key: [
            run_of(bags, 10 * k + s, patches=m.key not in quiet)
            for s in range(1 if m.runs_once else 3)
        ]
        for k, m in enumerate(every)
    }
    return Results("made-up cohort", "Made up.", bags, bags, every, runs)


# --- The paper's numbers --------------------------------------------------------------------------
def test_the_numbers_of_the_confusion_matrices_are_those_of_table_2():
    for key, cells in reported.numbers()["table3"].items():
        tn, fp, fn, tp = cells
        assert (tn + fp, fn + tp) == (6, 25)
        derived = {
            "accuracy": (tn + tp) / 31,
            "precision": tp / (tp + fp),
            "recall": tp / (tp + fn),
            "f1": 2 * tp / (2 * tp + fp + fn),
        }
        for metric, value in derived.items():
            assert reported.value("table2", key, metric)[0] == pytest.approx(100 * value, abs=0.006)


def test_every_number_of_the_text_is_there():
    assert reported.value("table1", "pseudo", "accuracy")[0] == 85.01
    assert reported.value("table1", "pseudo", "f1")[0] == 88.05
    assert reported.numbers()["figure6"]["vgpmil"] == 0.30
    assert math.isnan(reported.value("table5", "pseudo", "accuracy")[1])
    assert reported.value("table1", "pseudo", "recall") is None


def test_every_method_with_a_number_is_compared():
    keys = {m.key for m in methods.compared({})}
    for table, rows in reported.numbers().items():
        if table != "data":
            assert set(rows) <= keys


def test_learned_settings_are_shown_with_slide_effect_and_context_and_without(results):
    made = {m.key: m for m in methods.compared({}) if m.key in methods.TUNED}
    assert [m.make(0).slide_effect for m in made.values()] == [0.0, "auto", "auto"]
    assert [m.make(0).slide_context for m in made.values()] == [0.0, 0.0, "auto"]
    assert made["effect"].label == "VGPMIL-PR-I, slide effect (learned settings)"
    for table in (table1_patches, table2_slides, table5_other_models):
        found = table.build(results).frame
        keys = found["key"].drop_duplicates().tolist()
        assert keys.index("effect") == keys.index("tuned") + 1
        assert keys.index("context") == keys.index("effect") + 1


# --- Metrics --------------------------------------------------------------------------------------
def test_the_four_metrics_are_counted(bags):
    rng = np.random.default_rng(0)
    truth, called = rng.integers(0, 2, 40), rng.random(40) < 0.4
    tn, fp, fn, tp = table3_confusion.counts(truth, called)
    naive = [0, 0, 0, 0]
    for t, c in zip(truth, called):
        naive[2 * int(t) + int(c)] += 1
    assert [tn, fp, fn, tp] == naive
    found = scores.four(truth, called)
    assert found["accuracy"] == pytest.approx(100 * (tn + tp) / 40)
    assert found["precision"] == pytest.approx(100 * tp / (tp + fp))
    assert found["recall"] == pytest.approx(100 * tp / (tp + fn))
    assert found["f1"] == pytest.approx(200 * tp / (2 * tp + fp + fn))


def test_nothing_called_positive_is_zero_not_a_warning():
    found = scores.four(np.array([0, 1]), np.array([False, False]))
    assert (found["precision"], found["recall"], found["f1"]) == (0, 0, 0)


def test_patches_of_unknown_label_do_not_count(results, bags):
    labels = bags.instance_labels.copy()
    labels[::3] = -1
    hidden = replace(results, test=_with_patch_labels(bags, labels))
    run = results.of("pr")[0]
    known = labels >= 0
    expected = scores.four(labels[known], run.patch_probability[known] > 0.5)
    assert scores.of_patches(hidden, run) == expected


def _with_patch_labels(bags, labels):
    return gpmil.Bags.from_arrays(
        bags.split(bags.features),
        labels=bags.labels,
        coords=bags.split(bags.coords),
        names=bags.names,
        step=bags.step,
        instance_labels=bags.split(labels),
    )


def test_bold_is_at_least_both_baselines_in_every_metric():
    def rows(key, values):
        return [{"key": key, "metric": m, "mean": v} for m, v in zip(scores.METRICS, values)]

    found = pd.DataFrame(
        rows("vgpmil", (80, 70, 60, 50))
        + rows("pr", (70, 80, 60, 40))
        + rows("pri-0.5", (80, 80, 60, 50))
        + rows("pri-1", (99, 79.9, 99, 99))
    )
    assert scores.better_than_baselines(found) == ["pri-0.5"]


def test_a_row_has_mean_deviation_and_difference(results):
    found = scores.frame(results, ("pr", "pseudo", "attention"), "table2", "slide")
    own = found[(found["key"] == "pr") & (found["metric"] == "accuracy")].iloc[0]
    values = [scores.of_slides(results, run)["accuracy"] for run in results.of("pr")]
    assert own["mean"] == pytest.approx(np.mean(values))
    assert own["sd"] == pytest.approx(np.std(values, ddof=1))
    assert own["difference"] == pytest.approx(np.mean(values) - 90.32)
    once = found[found["key"] == "pseudo"].iloc[0]
    assert math.isnan(once["sd"]) and math.isnan(once["paper"])


def test_a_method_without_patches_has_no_row_of_patches(results):
    found = scores.frame(results, ("pr", "attention"), "table1", "patch")
    assert set(found["key"]) == {"pr"}


# --- Tables ---------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "module",
    [
        table1_patches,
        table2_slides,
        table3_confusion,
        table4_times,
        table5_other_models,
        table6_panda,
        all_models,
        findings,
    ],
    ids=lambda module: module.__name__.rpartition(".")[2],
)
def test_every_table_is_written_as_csv_markdown_and_picture(module, results, tmp_path):
    found = module.build(results)
    found.write(tmp_path)
    names = {file.suffix for file in tmp_path.iterdir()}
    assert {".csv", ".md"} <= names
    assert (".png" in names) == (module is not findings)
    text = (tmp_path / f"{found.slug}.md").read_text()
    assert text.startswith(f"## {found.number}. ")
    for table in found.tables:
        assert all(len(row) == len(table.columns) for row in table.rows)
    frame = pd.read_csv(tmp_path / f"{found.slug}.csv")
    assert len(frame) == len(found.frame)


@pytest.mark.parametrize(
    "module", [table1_patches, table2_slides, table3_confusion, table5_other_models, table6_panda]
)
def test_captions_say_what_the_data_are(module, results):
    assert any(results.source in table.caption for table in module.build(results).tables)


def test_tables_without_their_data_say_why(results, bags):
    unknown = replace(results, test=_with_patch_labels(bags, np.full(bags.n_instances, -1)))
    assert "known labels" in table1_patches.build(unknown).missing
    assert "--panda" in table6_panda.build(None).missing
    assert "–" in str(all_models.build(results).tables[0].rows)  # attention: no patches


def test_no_patch_above_half_is_said(results):
    runs = {
        key: [
            replace(run, patch_probability=run.patch_probability * 0.4) for run in results.of(key)
        ]
        for key in ("pr", *PRI)
    }
    low = replace(results, runs=results.runs | runs)
    assert "no patch passes 0.5" in " ".join(table1_patches.build(low).paragraphs)
    assert "no patch passes 0.5" not in " ".join(table1_patches.build(results).paragraphs)


def test_marks_are_judged_over_known_patches(results, bags):
    row = table1_patches.beyond_threshold(results).set_index("key").loc["pr"]
    run = results.of("pr")[0]
    marked = [r.flagged for r in results.of("pr")]
    false = [(m & (bags.instance_labels == 0)).sum() / m.sum() for m in marked]
    assert row["false marks (%)"] == pytest.approx(100 * np.mean(false))
    assert row["patches above 0.5"] == pytest.approx(
        np.mean([(r.patch_probability > 0.5).sum() for r in results.of("pr")])
    )
    assert run.flagged is not None


# --- Findings -------------------------------------------------------------------------------------
def test_findings_follow_the_numbers(results, bags):
    def smoothed(run, share):
        means = np.concatenate(
            [np.full(len(p), p.mean()) for p in bags.split(run.patch_probability)]
        )
        return replace(run, patch_probability=share * means + (1 - share) * run.patch_probability)

    base = results.of("pr")
    shares = (0.1, 0.3, 0.5, 0.7, 0.9)
    runs = {key: [smoothed(r, s) for r in base] for key, s in zip(PRI, shares)}
    falling = replace(results, runs=results.runs | runs)
    claim = "Variability inside slides falls as λ grows."
    assert _verdict(falling, claim) == "holds"
    turned = {key: runs[other] for key, other in zip(PRI, PRI[::-1])}
    assert _verdict(replace(results, runs=results.runs | turned), claim) == "does not hold"


def _verdict(results, claim):
    return next(f.verdict for f in findings.check(results) if f.claim == claim)


def test_more_negatives_and_fewer_positives_at_strong_coupling(results, bags):
    base = run_of(bags, 1)
    runs = {"pr": [replace(base, log_odds=np.ones(len(bags)))]}
    for k, key in enumerate(PRI):
        odds = np.ones(len(bags))
        odds[np.flatnonzero(bags.labels == 0)[: k + 1]] = -1
        runs[key] = [replace(base, log_odds=odds)]
    grown = replace(results, runs=results.runs | runs)
    assert _verdict(grown, "More negative slides are right as λ grows.") == "holds"
    assert _verdict(grown, "Positive slides suffer at strong λ.") == "does not hold"


def test_times_are_compared(results, bags):
    slow = {"vgpmil": [run_of(bags, 1, seconds=9.0)], "pri-10": [run_of(bags, 2, seconds=3.0)]}
    changed = replace(results, runs=results.runs | slow)
    assert _verdict(changed, "VGPMIL is slower to train than VGPMIL-PR-I.") == "holds"
    assert _verdict(changed, "The cost of training does not depend on λ.") == "does not hold"
    assert _verdict(results, "The cost of training does not depend on λ.") == "holds"


def test_what_was_not_run_cannot_be_judged(results):
    few = replace(results, runs={k: v for k, v in results.runs.items() if k != "vgpmil"})
    assert _verdict(few, "VGPMIL-PR beats VGPMIL, slides.") == "cannot be judged"


# --- Cohorts --------------------------------------------------------------------------------------
def test_the_simulated_cohort_has_the_numbers_of_the_paper():
    cohort = cohorts.sicapv2_like(0)
    data = reported.numbers()["data"]
    assert (len(cohort.train), len(cohort.test)) == (data["train_slides"], data["test_slides"])
    assert cohort.train.labels.sum() == data["train_positive"]
    assert cohort.test.labels.sum() == data["test_positive"]
    assert cohort.train.n_instances == pytest.approx(data["train_patches"], rel=0.15)
    assert "simulated" in cohort.source


def test_the_large_cohort_is_mostly_positive_and_of_other_slides():
    cohort = cohorts.panda_like(0.01, quick=True)
    assert cohort.train.labels.mean() == pytest.approx(0.72, abs=0.01)
    assert len(cohort.train) + len(cohort.test) == 105
    assert not set(cohort.train.names) & set(cohort.test.names)


def write_table(path, n_slides=24, split=True, seed=0):
    rng = np.random.default_rng(seed)
    rows = []
    for b in range(n_slides):
        for k in range(9):
            malignant = int(b % 2 and k in (0, 1, 3))
            row = {"slide": f"s{b:02d}", "label": b % 2, "patch_label": malignant}
            row |= {"x": 10 * (k % 3), "y": 10 * (k // 3)}
            row |= {f"f{d}": v for d, v in enumerate(rng.normal(3 * malignant, 1, 5))}
            rows.append(row | ({"split": "train" if b < 16 else "test"} if split else {}))
    pd.DataFrame(rows).to_csv(path, index=False)
    return path


def test_a_table_with_a_split_is_one_pair(tmp_path):
    cohort = cohorts.from_files(write_table(tmp_path / "own.csv"))
    assert [(len(a), len(b)) for a, b in cohort.pairs] == [(16, 8)]
    assert cohort.test.adjacency.nnz


def test_without_a_split_every_slide_is_tested_once(tmp_path):
    cohort = cohorts.from_files(write_table(tmp_path / "own.csv", split=False), n_folds=3)
    assert len(cohort.pairs) == 3
    assert sorted(cohort.test.names) == [f"s{b:02d}" for b in range(24)]
    for train, test in cohort.pairs:
        assert not set(train.names) & set(test.names)
    names = np.concatenate([test.names for _, test in cohort.pairs])
    assert (names == cohort.test.names).all()


def test_too_many_folds_are_refused(tmp_path):
    path = write_table(tmp_path / "own.csv", split=False)
    with pytest.raises(ValueError, match="--folds"):
        cohorts.from_files(path, n_folds=13)


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    """A TRIDENT folder of 24 slides of 12 patients, and tables of labels with and without split."""
    place = tmp_path_factory.mktemp("slide-files")
    cells = writers.tissue()
    rows = []
    for b in range(24):
        malignant = (np.arange(len(cells)) < 4 * (b % 2))[:, None]
        features = writers.vectors(len(cells), 5, seed=b) + 3 * malignant.astype("f4")
        told = {"patch_size": 256, "patch_size_level0": 512, "overlap": 0}
        writers.trident(
            place / "job" / "features_uni_v1", f"s{b:02d}", features, cells * 512, **told
        )
        word = ("benign", "cancer")[b % 2]
        rows.append((f"s{b:02d}.svs", f"p{b // 2}", word, "train" if b < 16 else "test"))
    frame = pd.DataFrame(rows, columns=["slide_id", "case_id", "diagnosis", "split"])
    frame.to_csv(place / "split.csv", index=False)
    frame.drop(columns="split").to_csv(place / "labels.csv", index=False)
    frame.assign(case_id="p0").to_csv(place / "leak.csv", index=False)
    return place


WORDS = ["--data", "job", "--labels", "labels.csv", "--label", "diagnosis"]
READING = {"label": "diagnosis", "positive": "cancer"}


def test_slide_files_are_cross_validated_by_patient(job):
    cohort = cohorts.from_files(job / "job", n_folds=3, labels=job / "labels.csv", **READING)
    assert len(cohort.pairs) == 3 and cohort.test.step.tolist() == [[512, 512]] * 24
    assert sorted(cohort.test.names) == [f"s{b:02d}" for b in range(24)]
    for train, test in cohort.pairs:
        assert not set(train.groups) & set(test.groups)
        assert set(train.labels) == set(test.labels) == {0, 1}
    assert cohort.test.labels.tolist() == [int(name[1:]) % 2 for name in cohort.test.names]
    assert "nor its patient" in cohort.source and cohort.slug == "job"


def test_a_split_in_the_label_table_is_followed(job):
    cohort = cohorts.from_files(job / "job", labels=job / "split.csv", **READING)
    ((train, test),) = cohort.pairs
    assert train.names.tolist() == [f"s{b:02d}" for b in range(16)] and len(test) == 8
    with pytest.raises(ValueError, match="1 patients are both in train and in test: 'p0'"):
        cohorts.from_files(job / "job", labels=job / "leak.csv", **READING)


def test_a_table_takes_the_options_of_its_reader(tmp_path):
    table = write_table(tmp_path / "own.csv")
    frame = pd.read_csv(table).assign(grade=lambda t: np.where(t["label"] == 1, "high", "low"))
    frame.drop(columns="label").to_csv(table, index=False)
    cohort = cohorts.from_files(table, label="grade", positive="low", cache=tmp_path)
    assert [(len(a), len(b)) for a, b in cohort.pairs] == [(16, 8)]
    assert cohort.test.labels.tolist() == [1, 0] * 4
    with pytest.raises(ValueError, match=r"--format npz.*leave it out"):
        cohorts.from_files(table, format="npz")


def test_the_command_reads_slide_files(job, tmp_path):
    """Everything up to the fits: the same words as gpmil cv."""
    said = Source(labels=job / "labels.csv", **READING, step="512", graph="grid8")
    options = PaperOptions(tmp_path / "out", True, job / "job", folds=2, source=said)
    main, panda = paper._studies(options)
    assert panda is None and len(main.cohort.pairs) == 2
    assert main.cohort.test.graph == "grid8"
    card = {k: paper._text(v) for k, v in vars(options).items()}
    assert json.loads(json.dumps(card))["source"]["positive"] == "cancer"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--labels", "labels.csv"], "say how --data is read"),
        (["--data", "job"], "no slide labels"),
        (["--data", "job", "--labels", "none.csv"], "none.csv"),
        (["--data", "job", "--labels", "labels.csv"], "a column with the label"),
        (WORDS, "'benign'"),
        (
            [*WORDS, "--positive", "cancer", "--folds", "12", "--patient", "diagnosis"],
            "12 folds need as many patients",
        ),
        (["--data", "job", "--positive", "cancer"], "none is given"),
        (["--data", "job", "--format", "slideflow"], "expected files of format 'slideflow'"),
        (["--data", "labels.csv"], "labels.csv"),
    ],
)
def test_slide_files_that_cannot_be_read_end_in_one_line(job, words, said, tmp_path, monkeypatch):
    monkeypatch.chdir(job)
    result = CliRunner().invoke(app, ["paper", *words, "--out", str(tmp_path / "out")])
    assert result.exit_code == 2 and "Traceback" not in result.output
    last = result.stderr.splitlines()[-1]
    assert last.startswith("gpmil: ") and said in last, result.stderr
    assert not list(tmp_path.iterdir())


def test_the_fingerprint_changes_with_the_data():
    first, other = (cohorts.sicapv2_like(seed, quick=True).fingerprint() for seed in (0, 1))
    assert first != other
    assert first == cohorts.sicapv2_like(0, quick=True).fingerprint()


# --- Parts ----------------------------------------------------------------------------------------
def small_method(key="pr", **settings):
    return Method(key, "VGPMIL-PR", lambda seed: pr(n_inducing=10, random_state=seed, **settings))


@pytest.fixture(scope="module")
def small():
    return cohorts.sicapv2_like(4, quick=True)


def test_a_part_predicts_what_the_model_predicts(small):
    (part,) = study.planned(small, [small_method()], 1, flags=False)
    run = study.compute(part)
    model = part.method.make(0).fit(small.train)
    assert np.allclose(run.probability, model.predict_proba(small.test)[:, 1], rtol=1e-9)
    expected = model.predict_instances(small.test).probability
    assert np.allclose(run.patch_probability, expected, rtol=1e-9)
    assert run.flagged is None


def test_marks_are_those_of_the_model_itself(small):
    model = pr(n_inducing=10, random_state=0, flags=True, n_folds=study.FLAG_FOLDS)
    own = model.fit(small.train).predict_instances(small.test, rate=study.RATE)
    found = study.marked(model, small.train, small.test, seed=0)
    assert found.sum() > 0
    assert (found == own.flagged).all()


def test_a_finished_part_is_not_computed_again(small, tmp_path, monkeypatch):
    plans = study.planned(small, [small_method()], 2, flags=False)
    first = list(parts.carry_out(plans, tmp_path))
    assert [old for _, _, old in first] == [False, False]
    monkeypatch.setattr(study, "compute", lambda part: pytest.fail("computed again"))
    again = list(parts.carry_out(plans, tmp_path))
    assert [old for _, _, old in again] == [True, True]
    for (_, a, _), (_, b, _) in zip(first, again):
        assert (a.probability == b.probability).all()
        assert (a.patch_probability == b.patch_probability).all()
        assert (a.flagged, a.fit_seconds, a.notes) == (b.flagged, b.fit_seconds, b.notes)


def test_several_jobs_start_with_the_longest_parts(small, tmp_path, monkeypatch):
    both, started = threading.Barrier(2, timeout=120), []

    def compute(part):
        started.append(part.method.effort)
        if len(started) <= 2:
            both.wait()  # neither ends before the other starts
        odds = np.full(len(small.test), part.method.effort)
        return MethodRun(odds, odds, None, None, 0.0, 0.0, {})

    monkeypatch.setattr(study, "compute", compute)
    few = [replace(small_method(f"pr{k}"), effort=k) for k in (2.0, 1.0, 7.0, 3.0)]
    plans = study.planned(small, few, 1, flags=False)
    monkeypatch.setattr(ThreadPoolExecutor, "terminate", lambda *_, **__: None, raising=False)
    monkeypatch.setattr(parts, "get_memmapping_executor", lambda n, env: ThreadPoolExecutor(n))
    found = list(parts.carry_out(plans, tmp_path, n_jobs=2))
    assert sorted(started[:2]) == [3.0, 7.0]
    assert {id(part) for part, _, _ in found} == {id(part) for part in plans}
    assert all((run.log_odds == part.method.effort).all() for part, run, _ in found)


def test_other_settings_and_broken_files_are_computed(small, tmp_path):
    (plan,) = study.planned(small, [small_method()], 1, flags=False)
    list(parts.carry_out([plan], tmp_path))
    (other,) = study.planned(small, [small_method(variance=3.5)], 1, flags=False)
    assert [old for _, _, old in parts.carry_out([other], tmp_path)] == [False]
    file = tmp_path / f"{plan.name()}.npz"
    file.write_bytes(file.read_bytes()[:100])
    assert [old for _, _, old in parts.carry_out([plan], tmp_path)] == [False]
    assert not list(tmp_path.glob("*.new"))


def test_folds_are_pooled_in_the_order_of_the_test_slides(tmp_path):
    cohort = cohorts.from_files(write_table(tmp_path / "own.csv", split=False), n_folds=3)
    (part,) = study.planned(cohort, [small_method()], 1, flags=False)
    run = study.compute(part)
    model = part.method.make(0).fit(cohort.pairs[1][0])
    begin = len(cohort.pairs[0][1])
    own = model.predict_proba(cohort.pairs[1][1])[:, 1]
    assert np.allclose(run.probability[begin : begin + len(own)], own)


def test_pseudo_labels_run_once_and_flags_come_with_the_first_run(small):
    plans = study.planned(small, methods.compared({}, quick=True), 3)
    seeds = {key: [p.seed for p in plans if p.method.key == key] for key in ("pr", "pseudo")}
    assert seeds == {"pr": [0, 1, 2], "pseudo": [0]}
    assert all(part.flags == (part.seed == 0) for part in plans)


# --- Exhibits and the command ---------------------------------------------------------------------
def test_a_markdown_table_marks_rows_and_escapes_bars():
    table = exhibit.Table(["a", "b"], [["x|y", "1"], ["z", "2"]], text=["a"], strong=[1])
    text = exhibit._markdown_table(table)
    assert text.splitlines() == ["| a | b |", "| :-- | --: |", "| x\\|y | 1 |", "| **z** | **2** |"]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    folder = tmp_path_factory.mktemp("paper")
    table = write_table(folder / "own.csv")
    out = folder / "out"
    line = ["paper", "--quick", "--data", str(table), "--runs", "1", "--out", str(out)]
    return CliRunner().invoke(app, line), out, line


def test_the_command_writes_every_table_and_figure(whole):
    result, out, _ = whole
    assert result.exit_code == 0, result.output
    html = (out / "index.html").read_text(encoding="utf-8")
    for number in [f"Table {k}." for k in range(1, 7)] + [f"Figure {k}." for k in range(1, 7)]:
        assert html.count(number) >= 2  # in the contents and as a heading
    for number in (1, 2, 4, 5, 6):
        assert list(out.glob(f"figure{number}*.png"))
    for number in range(1, 6):
        assert list(out.glob(f"table{number}*.csv"))
    assert 'src="http' not in html
    said = " ".join(result.output.split())
    for claim, _ in findings.CLAIMS:
        assert re.search(r"(holds|does not hold|cannot be judged): " + re.escape(claim), said)


def test_a_second_run_computes_nothing(whole, monkeypatch):
    _, out, line = whole
    before = (out / "index.html").read_bytes()
    monkeypatch.setattr(study, "compute", lambda part: pytest.fail("computed again"))
    result = CliRunner().invoke(app, line)
    assert result.exit_code == 0, result.output
    assert (out / "index.html").read_bytes() == before


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--panda", "half"], "--panda must be one of"),
        (["--runs", "0"], "--runs must be at least 1"),
        (["--data", "nowhere"], "nothing at nowhere"),
        (["--images", "nowhere"], "no folder"),
        (["--seed", "-1"], "--seed must be at least 0"),
    ],
)
def test_wrong_options_end_in_one_line(options, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(app, ["paper", *options])
    assert result.exit_code == 2
    assert message in result.output
    assert not list(Path().iterdir())
