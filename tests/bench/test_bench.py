"""`gpmil bench`: the naive twin is right, numbers are what they say, bars are judged."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from oracles.model import relative_error
from typer.testing import CliRunner

import gpmil
from gpmil.cli import app, bench

sys.path.append(str(bench.CLONE / "benchmarks"))
from bench import bandwidth, cases, cohorts, engine, measure, naive, page, results, scaling

SETTING = {"coupling": 0.37, "variance": 1.7, "lengthscale": 1.9, "mean": -0.3}
LINUX = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


def twin_setting() -> naive.Setting:
    return naive.Setting(
        SETTING["coupling"], SETTING["variance"], SETTING["lengthscale"], SETTING["mean"]
    )


def invoke(*arguments: str):
    return CliRunner().invoke(app, ["bench", *arguments], prog_name="gpmil")


def in_this_process(name: str, conditions: measure.Conditions) -> measure.Memory:
    work = cases.CASES[name].work
    assert work is not None
    return measure.watch(work(conditions))


@pytest.fixture(scope="module")
def quick():
    """Memory is watched in this process: a new one would spend seconds on imports."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cases, "in_child", in_this_process)
        patch.setattr(cases, "SMALL_ARRAY", 2**20)
        patch.setattr(engine, "SWEEPS", 21)
        patch.setattr(engine, "LEARNED", {"random_state": 0, "tuning_budget": 1, "coupling": 0.4})
        yield


# --- The naive twin -------------------------------------------------------------------------------
@pytest.mark.parametrize("sweeps", [1, 2, 23])
def test_twin_has_the_same_posterior(cohort, sweeps):
    Z = cohort.features[::9]
    model = gpmil.VGPMILPRI(
        **SETTING, inducing=Z, solver="sweeps", max_iter=sweeps, random_state=5, device="cpu"
    ).fit(cohort)
    mean, scale = cohort.features.mean(0), cohort.features.std(0)
    twin = naive.Training(
        naive.standardised(cohort.features), cohort, (Z - mean) / scale, twin_setting()
    )
    found = twin.sweeps(cohorts.start(cohort, seed=5), sweeps)
    assert relative_error(model.posterior_mean_, found) < 1e-8
    assert relative_error(model.posterior_covariance_, twin.Sigma_u) < 1e-8


def test_twin_predicts_the_same(cohort):
    model = gpmil.VGPMILPRI(**SETTING, n_inducing=12, random_state=0, device="cpu").fit(cohort)
    before = np.random.get_state()[1].copy()  # noqa: NPY002
    p, q = naive.Predicting(model, twin_setting(), seed=3).predict(cohort)
    ours = model.predict_all(cohort)
    assert relative_error(q, ours.instances.probability) < 1e-8
    # five standard errors of 5,000 draws, and what the package's own integral is off by
    error = np.sqrt(ours.proba.prod(1) / naive.DRAWS)
    assert (np.abs(p - ours.proba[:, 1]) < 5 * error + 2e-3).all()
    assert (np.random.get_state()[1] == before).all()  # noqa: NPY002


def test_twin_has_the_kmeans_of_plain_distances():
    """Ten iterations from ten starts: of each the centres by definition, and the best is taken."""
    x = np.random.default_rng(2).normal(size=(90, 3)) * [1, 4, 0.3]
    starts = np.random.default_rng(7)
    runs = []
    for _ in range(naive.STARTS):
        z = x[starts.choice(len(x), 5, replace=False)]
        for _ in range(naive.ITERATIONS):
            nearest = np.linalg.norm(x[:, None] - z, axis=2).argmin(1)
            z = np.array([x[nearest == k].mean(0) for k in range(5)])
        runs.append((float(np.linalg.norm(x[:, None] - z, axis=2).min(1) @ np.ones(90)), z))
    found = naive.kmeans(x, 5, np.random.default_rng(7))
    assert any(np.allclose(found, z, rtol=1e-12) for _, z in runs)
    inertia = [float(naive.assigned(x, z)[1].sum()) for _, z in runs]
    assert naive.assigned(x, found)[1].sum() == pytest.approx(min(inertia))
    # a centre without points stays
    kept = naive.means(x, np.zeros(90, dtype=int), x[:2])
    assert np.allclose(kept, [x.mean(0), x[1]])


def test_twin_fits_from_features_to_posterior(cohort):
    mean, covariance = naive.fit(cohort, twin_setting(), 11, sweeps=3, seed=0)
    assert mean.shape == (11,)
    assert np.linalg.eigvalsh(covariance).min() > 0


def test_sweeper_is_the_sweeps_solver(cohort):
    Z = cohort.features[::9]
    made = engine.Sweeper(cohort, Z, "cpu", "float64", **SETTING)
    model = gpmil.VGPMILPRI(
        **SETTING, inducing=Z, solver="sweeps", max_iter=8, random_state=0, device="cpu"
    ).fit(cohort)
    assert relative_error(made.sweeps(cohorts.start(cohort), 8), model.posterior_mean_) < 1e-12


def test_a_fit_by_parts_is_the_fit(cohort):
    made, parts = engine.fit_with_clock(cohort, 10, "cpu", None, SETTING)
    same = engine.model(10, "cpu", **SETTING).fit(cohort)
    np.testing.assert_array_equal(made.posterior_mean_, same.posterior_mean_)
    # a part that is never reached would say that the package's fit has changed its shape
    assert all(parts[name] > 0 for name in engine.PARTS)
    assert sum(parts.values()) == pytest.approx(2 * parts["all"])


def test_the_case_gpu_works_on_whatever_device_it_is_given(quick):
    conditions = measure.Conditions("tiny", 1, repeats=1)
    fit, sweep = cases.fit_resident(cases.CASES["gpu"], conditions)
    assert fit.seconds == pytest.approx(sum(fit.parts[name] for name in engine.PARTS))
    assert (fit.case, sweep.case) == ("gpu", "gpu-sweep")
    assert fit.parts["21 plain sweeps"] > 0
    assert sweep.bytes_read == 4 * sweep.patches * sweep.inducing


# --- Cohorts --------------------------------------------------------------------------------------
def test_cohorts_repeat_and_look_like_slides():
    shape = cohorts.Shape(40, 60.0, 12)
    one, same = cohorts.draw(shape, 3), cohorts.draw(shape, 3)
    np.testing.assert_array_equal(one.features, same.features)
    assert not np.array_equal(one.features[:9], cohorts.draw(shape, 3, part=1).features[:9])
    assert one.labels.sum() == round(0.72 * 40)
    assert 45 < one.sizes.mean() < 75 and one.sizes.std() > 10
    assert 2.5 < one.adjacency.nnz / one.n_instances < 3.7
    assert one.features.dtype == np.float32


def test_large_sections_are_as_wide_as_long():
    bags = cohorts.draw(cohorts.Shape(2, 2_000, 4, same_size=True, section=True, positive=0.5), 0)
    assert bags.sizes.tolist() == [2_000, 2_000]
    assert bags.adjacency.nnz / bags.n_instances > 3.7
    assert sorted(bags.labels) == [0, 1]


def test_a_cohort_in_a_file_is_the_one_in_memory(tmp_path):
    shape, file = cohorts.on_disk("tiny"), tmp_path / "features.npy"
    mapped, again = (cohorts.draw(shape, 0, file=file) for _ in range(2))
    assert isinstance(mapped.features, np.memmap)
    np.testing.assert_array_equal(mapped.features, cohorts.draw(shape, 0).features)
    np.testing.assert_array_equal(mapped.features, again.features)
    assert [p.name for p in tmp_path.iterdir()] == ["features.npy"]
    with pytest.raises(ValueError, match="belongs to another size"):
        cohorts.draw(cohorts.Shape(3, 9.0, 2), 0, file=file)


def test_a_full_disk_is_said_before_anything_is_written(tmp_path):
    endless = cohorts.Shape(4, 20.0, 10**15)
    with pytest.raises(ValueError, match="name a folder on another disk"):
        cohorts.draw(endless, 0, file=tmp_path / "features.npy")
    assert list(tmp_path.iterdir()) == []


# --- Measuring ------------------------------------------------------------------------------------
def test_bandwidth_is_measured_once():
    first = bandwidth.read("cpu", 1, 2**20)
    assert first is bandwidth.read("cpu", 1, 2**20) and first in bandwidth.measured()
    assert first.bytes_per_second > 1e8
    assert first.seconds(2 * first.bytes_per_second) == 2


@LINUX
def test_memory_is_that_of_the_work():
    found = measure.watch(lambda: np.ones(25_000_000).sum())
    assert 190e6 < found.peak < 260e6
    assert found.own is None or found.own < 260e6


@LINUX
def test_memory_of_a_child_does_not_count_the_parent():
    held = np.ones(40_000_000)  # 320 MB
    found = measure.in_child("predict", measure.Conditions("tiny", 1))
    assert 0 < found.peak < 150e6 and held[-1] == 1


def test_pages_of_a_mapped_file_are_not_counted():
    found = results.Result("disk", "", "tiny", patches=1_000, inducing=10)
    found.held(measure.Memory(peak=900_000, own=80_000, exact=True), mapped=True)
    assert (found.peak_bytes, found.peak_per_4nm) == (80_000, 2.0)
    assert "0.001 GB with pages of files" in found.notes[0]
    found.held(measure.Memory(peak=900_000, own=80_000, exact=False))
    assert found.peak_bytes == 900_000 and "lower bound" in found.notes[-1]


def test_a_child_that_fails_says_why(monkeypatch):
    monkeypatch.setattr(measure, "CHILD", "json.nonsense")
    with pytest.raises(ValueError, match=r"of case fit could not be measured.*json.nonsense"):
        measure.in_child("fit", measure.Conditions("tiny", 1))


def test_threads_are_put_back():
    before = torch.get_num_threads()
    with measure.threads(1):
        assert torch.get_num_threads() == 1
    assert torch.get_num_threads() == before


def test_the_median_run_is_taken():
    runs = [measure.Spent(3.0, 1.0), measure.Spent(1.0, 2.0), measure.Spent(2.0, 3.0)]
    found = measure.timing(runs, measure.Spent(9.0, 9.0))
    assert (found.seconds, found.processor, found.first, found.repeats) == (2.0, 3.0, 9.0, 3)


def test_slopes_are_powers():
    assert scaling.slope((1.0, 3.0, 9.0), [2.0, 2.0 * 3**1.5, 2.0 * 9**1.5]) == pytest.approx(1.5)


# --- Every case, tiny -----------------------------------------------------------------------------
@pytest.fixture(scope="module")
def everything(quick, tmp_path_factory):
    """All cases at once: what was said, and the files."""
    place = tmp_path_factory.mktemp("bench")
    files = {name: str(place / f"out.{name}") for name in ("json", "markdown", "plot")}
    options = [text for name, path in files.items() for text in (f"--{name}", path)]
    result = invoke("--size", "tiny", "--threads", "1", "--repeats", "1", *options)
    assert result.exit_code == 0, result.output
    return result.output, place


def test_every_case_is_reported(everything):
    said, place = everything
    found = json.loads((place / "out.json").read_text())
    assert (found["format"], found["version"]) == ("gpmil-bench", 1)
    assert {r["case"] for r in found["results"]} == set(cases.CASES)
    for name in cases.CASES:
        assert f"\n{name}: " in said


def test_json_has_the_numbers_and_the_machine(everything):
    found = json.loads((everything[1] / "out.json").read_text())
    assert {"cpu", "cores", "memory_gb", "torch", "gpmil", "gpu"} <= set(found["machine"])
    assert found["bandwidth"][0]["bytes_per_second"] > 0
    by_case = {r["case"]: r for r in found["results"]}
    for name in ("fit", "sweeps", "predict", "panda-fit"):
        r = by_case[name]
        assert r["ratio"] == pytest.approx(r["naive_seconds"] / r["seconds"])
        assert r["read_share"] == pytest.approx(r["read_seconds"] / r["seconds"])
        assert r["threads"] == 1 and r["extrapolated"] is None
        assert r["dtype"] == "float32" or r["peak_bytes"] >= 0
    for r in found["results"]:
        if r["case"] in ("sweeps", "predict"):
            assert r["difference"] < (1e-8 if r["dtype"] == "float64" else 1e-4)
    for name in ("fit", "panda-fit", "disk"):
        assert set(engine.PARTS) < set(by_case[name]["parts"])
    sweeps = [r for r in found["results"] if r["case"] == "sweep"]
    sizes = {r["dtype"]: r["bytes_read"] / (r["patches"] * r["inducing"]) for r in sweeps}
    assert sizes == {"float64": 8, "float32": 4}
    assert len(by_case["scaling"]["curves"]) == 4
    assert "default fit" in by_case["scaling"]["curves"]["patches N"]["costs"]
    learned = by_case["default"]
    assert learned["ratio"] == pytest.approx(learned["naive_seconds"] / learned["seconds"])
    assert learned["parts"]["pilot"] > learned["parts"]["solve"] > 0
    assert learned["parts"]["confirm"] >= 0  # a tiny cohort is its own pilot
    assert not learned["notes"][0].startswith("0 settings")


def strings(value) -> list[str]:
    if isinstance(value, dict):
        return [s for item in value.items() for s in strings(list(item))]
    if isinstance(value, list):
        return [s for item in value for s in strings(item)]
    return [value] if isinstance(value, str) else []


def test_json_names_no_place(everything):
    place = everything[1]
    found = json.loads((place / "out.json").read_text())
    assert not [s for s in strings(found) if "/" in s and Path(s.split()[0]).is_absolute()]
    assert str(place) not in json.dumps(found) and str(Path.home()) not in json.dumps(found)


def test_markdown_and_picture(everything):
    table = (everything[1] / "out.markdown").read_text()
    rows = [line for line in table.splitlines() if line.startswith("|")]
    assert {line.count("|") for line in rows} == {len(page.COLUMNS) + 1}
    assert (everything[1] / "out.plot").read_bytes().startswith(b"\x89PNG")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_its_case_is_skipped(everything):
    assert "gpu: fit on a GPU, features resident\n  skipped: torch sees no GPU" in everything[0]


def test_a_large_cohort_is_extrapolated_and_said(quick, monkeypatch):
    monkeypatch.setattr(cases, "LARGEST_NAIVE", 100)
    monkeypatch.setattr(cases, "HUNDREDTH", 0.5)
    (found,) = cases.run("panda-fit", measure.Conditions("tiny", 1, repeats=1))
    assert found.extrapolated is not None and "extrapolated from" in found.extrapolated
    assert "extrapolated from" in "\n".join(page.lines(found))
    assert "(extrapolated)" in page.to_markdown([found], gpmil_machine(), []).decode()


def gpmil_machine() -> dict:
    return {"cpu": "x", "cores": 1, "memory_gb": 1.0, "gpu": None, "torch": "2", "gpmil": "0"}


def test_the_file_of_disk_is_kept_where_asked(quick, tmp_path):
    folder = tmp_path / "kept"
    result = invoke(
        "disk", "--size", "tiny", "--threads", "1", "--repeats", "1", "--folder", str(folder)
    )
    assert result.exit_code == 0, result.output
    assert [p.suffix for p in folder.iterdir()] == [".npy"]


# --- Bars -----------------------------------------------------------------------------------------
def test_bars_are_judged(quick, monkeypatch):
    bars = (results.seconds(1e6, 1e5), results.ratio(1e6, 1e7))
    monkeypatch.setitem(results.BARS, ("predict", "tiny"), bars)
    arguments = ("predict", "--size", "tiny", "--threads", "1", "--repeats", "1")
    relaxed, strict = invoke(*arguments), invoke(*arguments, "--strict")
    assert (relaxed.exit_code, strict.exit_code) == (0, 1)
    said = " ".join(relaxed.output.split())  # lines are wrapped
    assert "at most 1e+06 s, aim 100000 s, reached: met" in said
    assert "at least 1e+06 times the naive twin, aim 1e+07: missed" in said


def test_strict_is_content_where_all_bars_are_met(quick, monkeypatch):
    monkeypatch.setitem(results.BARS, ("predict", "tiny"), (results.seconds(1e6, 1e5),))
    arguments = ("predict", "--size", "tiny", "--threads", "1", "--repeats", "1", "--strict")
    assert invoke(*arguments).exit_code == 0


def test_the_bar_on_memory_follows_the_size():
    found = results.Result("panda-fit", "", "panda", patches=1_000_000, inducing=200)
    found.peak_bytes = int(2.5 * 8e8)
    assert results.MEMORY.judge(found)["verdict"] == "met"
    found.peak_bytes += 1
    assert results.MEMORY.judge(found)["verdict"] == "missed"


def test_bars_need_their_number_and_device():
    found = results.Result("gpu", "", "panda", seconds=0.1)
    assert found.judged().bars == []  # on a CPU
    found.device = "cuda"
    assert [bar["verdict"] for bar in found.judged().bars] == ["met"]


def test_a_twin_that_waited_for_a_core_does_not_meet_a_bar():
    found = results.Result("fit", "", "tiny", seconds=1.0, processor_seconds=1.0)
    found.against(measure.Spent(30.0, 10.0))
    assert (found.ratio, found.sure_ratio) == (30.0, 10.0)
    assert results.ratio(20, 40).judge(found)["verdict"] == "missed"
    found.threads = 2
    assert found.sure_ratio == 30.0


def test_a_busy_machine_is_mentioned():
    found = results.Result("fit", "", "tiny").took(measure.Timing(2.0, 3.0, 3, processor=1.0))
    assert "busy: 50%" in found.notes[0]


# --- Mistakes -------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["nonsense"], "no such case: 'nonsense'; cases are fit, default"),
        (["fit", "--size", "huge"], "--size must be one of tiny, sicapv2, panda"),
        (["fit", "--threads", "0"], "--threads must be at least 1, got 0"),
        (["fit", "--repeats", "-1"], "--repeats must be at least 1, got -1"),
        (["fit", "--device", "abacus"], "device must be 'cpu', 'cuda'"),
        (["fit", "--plot", "x.png"], "--plot draws the case scaling"),
        (["fit", "--json", "."], "is a folder: name a file"),
        (["disk", "--folder", "pyproject.toml"], "is a file: name a folder"),
    ],
)
def test_mistakes_are_said_in_a_line(arguments, reason, monkeypatch):
    monkeypatch.chdir(Path(__file__).parents[2])
    result = invoke(*arguments)
    assert result.exit_code == 2
    assert reason in " ".join(result.stderr.split())
    assert result.stderr.count("\n") == 1


def test_outside_a_clone_the_command_says_where_the_benchmarks_are(tmp_path, monkeypatch):
    monkeypatch.setattr(bench, "CLONE", tmp_path)
    for arguments in ([], ["--help"], ["fit", "--size", "tiny"]):
        result = invoke(*arguments)
        assert result.exit_code == 2
        assert "the folder benchmarks/ of its repository" in result.stderr
        assert result.stderr.count("\n") == 1


def test_list_names_every_case():
    said = invoke("--list").stdout
    assert [line.split()[0] for line in said.splitlines()] == list(cases.CASES)


def test_both_are_run_by_turns_and_a_slow_twin_once(monkeypatch):
    order = []
    work, twin = (lambda name=name: order.append(name) for name in ("ours", "twin"))
    took, took_twin = measure.in_turn(work, twin, 3)
    assert order == ["ours"] + 3 * ["ours", "twin"]
    assert took.repeats == 3 and took_twin.seconds >= 0
    monkeypatch.setattr(measure, "SLOW", -1.0)
    order.clear()
    measure.in_turn(work, twin, 3)
    assert order.count("twin") == 1
    monkeypatch.setattr(measure, "LONG", -1.0)
    order.clear()
    assert measure.in_turn(work, twin, 3)[0].repeats == 1
