"""`gpmil heatmap` and `gpmil qupath` on small run folders: files, words, and one line a mistake."""

import gzip
import json
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import writers
from PIL import Image
from typer.testing import CliRunner

import gpmil
from gpmil import extras
from gpmil.cli import app, heatmap
from gpmil.runs import maps_input, maps_output
from gpmil.runs.data_card import placement
from gpmil.runs.workspace import check_target
from gpmil.show import heatmaps


def invoke(*arguments):
    return CliRunner().invoke(app, [str(a) for a in arguments], prog_name="gpmil")


def table(n: int, seed: int, step: int = 32, columns: int = 5) -> pd.DataFrame:
    rng = np.random.default_rng(seed)
    row, column = np.divmod(np.arange(n), columns)
    p_value = rng.random(n)
    p_value[0] = np.nan
    return pd.DataFrame(
        {
            "x": column * step,
            "y": row * step,
            "probability": rng.random(n),
            "sd": rng.uniform(0.2, 1.4, n),
            "p_value": p_value,
            "flagged": (np.arange(n) % 4 == 1).astype(int),
        }
    )


def write_table(run: Path, name: str, frame: pd.DataFrame, under: str = "") -> Path:
    path = run / "patches" / under / f"{name}.csv.gz"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(gzip.compress(frame.to_csv(index=False).encode(), mtime=0))
    return path


def tables_of(run: Path, names=None) -> list[maps_input.PatchTable]:
    return maps_input.tables(maps_input.MapOptions(run, run / "out", names=names))


@pytest.fixture(autouse=True)
def small_pictures(monkeypatch):
    monkeypatch.setattr(heatmap, "BOX", (1.5, 1.6))


@pytest.fixture
def run(tmp_path) -> Path:
    """Slides a (20 patches, step noted) and b (12 patches, a pair of steps)."""
    folder = tmp_path / "run"
    write_table(folder, "a", table(20, 1))
    write_table(folder, "b", table(12, 2))
    (folder / "config.json").write_text(
        json.dumps({"format": "gpmil-run", "steps": {"a": 32, "b": [32, 32]}, "files": ["patches"]})
    )
    return folder


@pytest.fixture
def slide_folder(tmp_path) -> Path:
    pytest.importorskip("openslide")
    folder = tmp_path / "slides"
    folder.mkdir()
    noise = np.random.default_rng(0).integers(0, 256, (140, 170, 3), dtype=np.uint8)
    for name in "ab":
        Image.fromarray(noise).save(folder / f"{name}.png")
    return folder


def pictures(folder: Path) -> dict[str, tuple[int, int]]:
    return {p.name: Image.open(p).size for p in sorted(folder.glob("*.png"))}


# --- gpmil heatmap --------------------------------------------------------------------------------
def test_every_slide_gets_a_picture(run, tmp_path):
    result = invoke("heatmap", run, "--out", tmp_path / "maps")
    assert result.exit_code == 0, result.output
    assert result.stdout.split() == ["2", "heat", "maps", "in", str(tmp_path / "maps")]
    assert result.stderr == ""
    assert list(pictures(tmp_path / "maps")) == ["a.png", "b.png"]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["maps", "run"]


def test_the_same_run_has_the_same_pictures(run, tmp_path):
    for name in ("one", "two", "two"):  # the second time over a folder that gpmil wrote
        assert invoke("heatmap", run, "--slide", "a", "--out", tmp_path / name).exit_code == 0
    for file in (tmp_path / "one").iterdir():
        assert file.read_bytes() == (tmp_path / "two" / file.name).read_bytes()


def test_slides_are_chosen_and_uncertainty_is_drawn_as_asked(run, slide_folder, tmp_path):
    sizes = {}
    for how in ("panel", "opacity", "none"):
        out = tmp_path / how
        result = invoke(
            *("heatmap", run, "--slide", "b", "--out", out, "--uncertainty", how),
            *("--slides", slide_folder),
        )
        assert result.exit_code == 0, result.output
        assert list(pictures(out)) == ["b.png"]
        sizes[how] = pictures(out)["b.png"]
    assert sizes["panel"][0] > sizes["opacity"][0] == sizes["none"][0]  # one panel more
    assert sizes["opacity"][1] > sizes["none"][1]  # one scale more


def test_the_picture_shows_the_table(run, slide_folder, tmp_path):
    found = tables_of(run)
    overview = maps_input.look(found, maps_input.config(run))
    assert overview.steps == {"a": (32, 32), "b": (32, 32)}
    figure = heatmap.draw(found[0], slide_folder / "a.png", overview, "panel")
    frame = table(20, 1)
    panels = {ax.get_title(): ax for ax in figure.axes}
    shown = panels["probability"].images[1]
    np.testing.assert_allclose(shown.get_array(), frame["probability"].to_numpy().reshape(4, 5))
    assert tuple(shown.get_extent()) == (0, 160, 128, 0)
    largest = max(frame["sd"].max(), table(12, 2)["sd"].max())
    assert panels["uncertainty"].images[1].get_clim() == pytest.approx((0, largest))
    # A little of the slide around the tissue, no further than its border.
    assert tuple(figure.axes[0].images[0].get_extent()) == (0, 168, 136, 0)
    assert "20 patches, 5 marked" in [t.get_text() for t in figure.texts]


def test_a_single_table_is_a_run(run, tmp_path):
    result = invoke("heatmap", run / "patches" / "a.csv.gz", "--out", tmp_path / "maps")
    assert result.exit_code == 0 and result.stderr == ""  # the step is noted beside
    alone = tmp_path / "alone.csv.gz"
    alone.write_bytes((run / "patches" / "a.csv.gz").read_bytes())
    result = invoke("heatmap", alone, "--out", tmp_path / "maps")
    assert result.exit_code == 0
    assert "step not noted" in result.stderr and "32 x 32 (1 slide)" in result.stderr
    assert list(pictures(tmp_path / "maps")) == ["a.png", "alone.png"]
    assert invoke("heatmap", run / "patches" / "a.csv.gz").exit_code == 0  # in its run
    assert list(pictures(run / "heatmaps")) == ["a.png"]
    assert invoke("heatmap", alone).exit_code == 0  # beside it
    assert list(pictures(tmp_path / "heatmaps")) == ["alone.png"]


def test_names_that_files_cannot_have(run, tmp_path):
    write_table(run, "ward%2F7", table(9, 3))
    result = invoke("heatmap", run, "--slide", "ward/7", "--out", tmp_path / "maps")
    assert result.exit_code == 0
    assert list(pictures(tmp_path / "maps")) == ["ward%2F7.png"]


def test_a_slide_of_one_patch_takes_the_step_of_the_others(run, tmp_path):
    write_table(run, "lone", table(1, 3))
    result = invoke("heatmap", run, "--out", tmp_path / "maps")
    assert result.exit_code == 0
    assert "the positions show 32 x 32 (1 slide)" in result.stderr
    assert len(pictures(tmp_path / "maps")) == 3


def test_empty_slides_are_left_out_and_named(run, tmp_path):
    write_table(run, "empty", table(1, 3).iloc[:0])
    result = invoke("heatmap", run, "--out", tmp_path / "maps")
    assert result.exit_code == 0
    assert "no patches, left out: empty" in result.stderr
    assert list(pictures(tmp_path / "maps")) == ["a.png", "b.png"]


def test_tables_of_the_demonstration_are_read(run, tmp_path):
    """Other columns: std for sd, no p-values, no flags."""
    frame = table(20, 1).rename(columns={"sd": "std"}).drop(columns=["p_value", "flagged"])
    write_table(run, "a", frame)
    patches = tables_of(run, ["a"])[0].read()
    np.testing.assert_array_equal(patches.std, frame["std"])
    assert patches.flagged is None and patches.p_value is None
    assert invoke("heatmap", run, "--out", tmp_path / "maps").exit_code == 0


@pytest.mark.parametrize(
    ("column", "expected"),
    [
        (["True", "False", ""], [True, False, False]),
        ([1, 0, 1], [True, False, True]),
        ([1.0, np.nan, 0.0], [True, False, False]),
        ([np.nan] * 3, None),
    ],
)
def test_flags_are_read_however_written(run, column, expected):
    write_table(run, "a", table(3, 1).assign(flagged=column))
    found = tables_of(run, ["a"])[0].read().flagged
    assert (None if found is None else found.tolist()) == expected


# --- gpmil qupath ---------------------------------------------------------------------------------
@pytest.mark.parametrize("compressed", [False, True])
def test_every_slide_gets_a_file(run, tmp_path, compressed):
    out = tmp_path / "qupath"
    result = invoke("qupath", run, "--out", out, *(["--gzip"] if compressed else []))
    assert result.exit_code == 0 and result.stderr == "", result.output
    ending = ".geojson.gz" if compressed else ".geojson"
    names = sorted(p.name for p in out.iterdir() if p.name != "config.json")
    assert names == [f"a{ending}", f"b{ending}"]
    raw = (out / f"a{ending}").read_bytes()
    features = json.loads(gzip.decompress(raw) if compressed else raw)["features"]
    frame = table(20, 1)
    corners = [f["geometry"]["coordinates"][0][0] for f in features]
    assert corners == frame[["x", "y"]].to_numpy().tolist()
    said = [f["properties"]["measurements"] for f in features]
    np.testing.assert_allclose([s["probability"] for s in said], frame["probability"], rtol=1e-5)
    assert "p-value" not in said[0] and "p-value" in said[1]
    flagged = [f["properties"]["classification"]["name"] == "flagged" for f in features]
    assert flagged == (frame["flagged"] == 1).tolist()


def test_the_margin_of_a_slide_is_subtracted(run, slide_folder, tmp_path, monkeypatch):
    from gpmil.show import slides

    info = slides.SlideInfo((170, 140), None, (30, 20, 100, 100))
    monkeypatch.setattr(slides, "describe", lambda _: info)
    result = invoke("qupath", run, "--slides", slide_folder, "--out", tmp_path / "out")
    assert result.exit_code == 0, result.output
    features = json.loads((tmp_path / "out" / "a.geojson").read_text())["features"]
    assert features[0]["geometry"]["coordinates"][0][0] == [-30, -20]


def test_microns_become_pixels(run, slide_folder, tmp_path, monkeypatch):
    from gpmil.show import slides

    (run / "config.json").write_text(json.dumps({"steps": {"a": 32, "b": 32}, "units": "microns"}))
    with_file = ("--slides", slide_folder, "--out", tmp_path / "out")
    refused(invoke("qupath", run, "--out", tmp_path / "out"), "in microns", "--slides")
    refused(invoke("qupath", run, *with_file), "how many microns a pixel has")
    info = slides.SlideInfo((400, 500), (0.5, 0.25), (0, 0, 400, 500))
    monkeypatch.setattr(slides, "describe", lambda _: info)
    assert invoke("qupath", run, *with_file).exit_code == 0
    features = json.loads((tmp_path / "out" / "a.geojson").read_text())["features"]
    assert features[6]["geometry"]["coordinates"][0][::2] == [[64, 128], [128, 256], [64, 128]]
    overview = maps_input.look(tables_of(run), maps_input.config(run))
    figure = heatmap.draw(overview.filled[0], None, overview, "none")
    assert [t.get_text() for t in figure.axes[0].texts] == ["50 µm"]  # of 160


def test_centres_become_corners(run, tmp_path):
    (run / "config.json").write_text(json.dumps({"steps": {"a": 32, "b": 24}, "anchor": "centre"}))
    assert invoke("qupath", run, "--out", tmp_path / "out").exit_code == 0
    for name, half in (("a", 16), ("b", 12)):
        first = json.loads((tmp_path / "out" / f"{name}.geojson").read_text())["features"][0]
        assert first["geometry"]["coordinates"][0][::2] == [[-half] * 2, [half] * 2, [-half] * 2]


def test_sizes_of_overlapping_patches_are_taken_where_noted(run, tmp_path):
    card = {"steps": {"a": 32, "b": 32}, "sizes": {"a": 48}}
    (run / "config.json").write_text(json.dumps(card))
    assert invoke("qupath", run, "--out", tmp_path / "out").exit_code == 0
    for name, side in (("a", 48), ("b", 32)):
        first = json.loads((tmp_path / "out" / f"{name}.geojson").read_text())["features"][0]
        assert first["geometry"]["coordinates"][0][2] == [side, side]


# --- Overlapping patches --------------------------------------------------------------------------
def test_the_side_of_overlapping_patches_comes_from_the_files(tmp_path):
    """From TRIDENT's attributes through config.json to squares and maps."""
    cells = writers.tissue()
    n = len(cells)
    folder = tmp_path / "job" / "20x_256px_64px_overlap" / "features_uni_v1"
    attrs = {"patch_size": 256, "level0_magnification": 40, "target_magnification": 20}
    for k, (side, overlap) in enumerate(((512, 64), (512, 0))):
        told = attrs | {"patch_size_level0": side, "overlap": overlap}
        places = cells * (side - 2 * overlap)
        writers.trident(folder, f"s{k}", writers.vectors(n, seed=k), places, **told)
    bags = gpmil.read(tmp_path / "job", cache=tmp_path / "cache")
    assert gpmil.read(tmp_path / "job", cache=tmp_path / "cache").metadata == bags.metadata
    run = tmp_path / "run"
    probability = np.random.default_rng(0).random(n)
    for bag in bags:
        frame = pd.DataFrame(bag.coords, columns=["x", "y"]).assign(probability=probability)
        write_table(run, str(bag.names[0]), frame)
    card = placement(bags[::-1])
    assert card["steps"] == {"s0": 384, "s1": 512} and card["sizes"] == {"s0": 512, "s1": 512}
    (run / "config.json").write_text(json.dumps(card))
    assert invoke("qupath", run, "--out", tmp_path / "q").exit_code == 0
    for name in ("s0", "s1"):
        features = json.loads((tmp_path / "q" / f"{name}.geojson").read_text())["features"]
        rings = np.array([f["geometry"]["coordinates"][0] for f in features])
        assert (np.ptp(rings, axis=1) == 512).all()
    found = tables_of(run)
    figure = heatmap.draw(found[0], None, maps_input.look(found, card), "none")
    shown = figure.axes[0].images[0]
    layout = heatmaps.lay_out(bags[0].coords, 384, 512)
    np.testing.assert_array_equal(shown.get_array(), layout.paint(probability))
    right = bags[0].coords[:, 0].max() + 512
    assert right <= shown.get_extent()[1] < right + 384 / heatmaps.FINE  # less than a pixel more


# --- Couplings and repeats ------------------------------------------------------------------------
def drawn(folder: Path, name: str) -> list[float]:
    features = json.loads((folder / f"{name}.geojson").read_text())["features"]
    return [f["properties"]["measurements"]["probability"] for f in features]


def given(frame: pd.DataFrame) -> list[float]:
    return [float(f"{p:.6g}") for p in frame["probability"]]


def test_one_of_several_couplings_is_drawn(tmp_path):
    run, out = tmp_path / "run", tmp_path / "out"
    for k, coupling in enumerate(("0.5", "10", "0")):
        write_table(run, "a", table(20, k), f"coupling-{coupling}")
    (run / "config.json").write_text(json.dumps({"steps": {"a": 32}}))
    result = invoke("qupath", run, "--out", out)
    assert result.exit_code == 0
    assert result.stderr == "coupling 0 of 0, 0.5, 10: --coupling chooses another\n"
    assert drawn(out, "a") == given(table(20, 2))
    for k, coupling in enumerate(("0.50", "10")):
        before = files_of(out)
        result = invoke("qupath", run, "--out", out, "--coupling", coupling)
        refused(result, "holds files of coupling-0", f"coupling-{float(coupling):g}", "--out")
        assert files_of(out) == before
        result = invoke("qupath", run, "--coupling", coupling)
        assert result.exit_code == 0 and result.stderr == ""
        folder = run / "qupath" / f"coupling-{float(coupling):g}"
        assert drawn(folder, "a") == given(table(20, k))
    assert json.loads((folder / "config.json").read_text())["coupling"] == 10
    assert tables_of(run)[0].title == "a, coupling 0"
    refused(invoke("qupath", run, "--out", out, "--coupling", 3), "has couplings 0, 0.5, 10.")
    refused(invoke("heatmap", run, "--out", out, "--repeat", 0), "has no repeats: leave it out")
    one = run / "patches" / "coupling-10" / "a.csv.gz"
    result = invoke("qupath", one, "--out", tmp_path / "one")
    assert result.exit_code == 0 and result.stderr == ""  # the step is noted two folders above


def test_one_of_several_repeats_is_drawn(run, tmp_path):
    """Slide c is tested in the second repeat alone, as given splits may say."""
    out = tmp_path / "out"
    write_table(run, "c", table(9, 3))
    for k, name in enumerate("ac"):
        write_table(run, name, table(9, 4 + k), "repeat-1")
    rows = [("a", 0), ("b", 0), ("a", 1), ("c", 1), ("b", 2)]
    pd.DataFrame(rows, columns=["slide", "repeat"]).to_csv(run / "predictions.csv", index=False)
    names = ("--step", 32, "--out", out)

    def files() -> list[str]:
        return sorted(p.stem for p in out.glob("*.geojson"))

    assert invoke("qupath", run, *names).exit_code == 0 and files() == ["a", "b", "c"]
    assert drawn(out, "a") == given(table(20, 1))
    result = invoke("qupath", run, *names, "--repeat", 0)
    assert result.exit_code == 0 and "2 of 2 were there already" in result.stderr
    assert files() == ["a", "b", "c"]
    refused(invoke("qupath", run, *names, "--repeat", 1), "those of repeat-1 are not added")
    assert invoke("qupath", run, "--step", 32, "--repeat", 1).exit_code == 0
    second = run / "qupath" / "repeat-1"
    assert sorted(p.stem for p in second.glob("*.geojson")) == ["a", "c"]
    assert drawn(second, "a") == given(table(9, 4))
    refused(invoke("qupath", run, *names, "--repeat", 5), "has repeats 0, 1, 2.")
    refused(invoke("qupath", run, *names, "--repeat", 2), "kept no patches of this repeat")
    refused(invoke("qupath", run, *names, "--coupling", 1), "one coupling alone: leave it out")
    refused(
        invoke("qupath", run / "patches" / "a.csv.gz", "--repeat", 1, "--out", out), "is one table"
    )


# --- Interrupted and continued --------------------------------------------------------------------
class Counted:
    """A drawing function that notes the slides, and fails before the n-th."""

    def __init__(self, fail_at: int = 99, error: type[BaseException] = KeyboardInterrupt):
        self.real, self.slides, self.fail_at, self.error = heatmap.draw, [], fail_at, error

    def __call__(self, table, *rest):
        if len(self.slides) == self.fail_at:
            raise self.error("stopped")
        self.slides.append(table.slide)
        return self.real(table, *rest)


def drawing(*arguments, **how) -> tuple[list[str], object]:
    """The slides that a call of gpmil heatmap drew, and its result."""
    with pytest.MonkeyPatch.context() as patch:
        counted = Counted(**how)
        patch.setattr(heatmap, "draw", counted)
        return counted.slides, invoke("heatmap", *arguments)


def files_of(folder: Path) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in folder.iterdir()}


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError])
def test_maps_go_on_where_they_were_stopped(run, tmp_path, error):
    whole, out, partial = (tmp_path / name for name in ("whole", "out", "out.partial"))
    assert invoke("heatmap", run, "--out", whole).exit_code == 0
    drawn, result = drawing(run, "--out", out, fail_at=1, error=error)
    assert drawn == ["a"] and not out.exists()
    assert result.exit_code == (130 if error is KeyboardInterrupt else 2)
    assert f"kept in {partial}: the same command continues" in result.stderr
    (partial / ".b.png.new").write_bytes(b"half")  # as SIGKILL would leave it
    with (partial / ".made").open("a") as log:
        log.write("cut o")
    drawn, result = drawing(run, "--out", out)
    assert drawn == ["b"] and result.exit_code == 0
    assert "1 of 2 were there already" in result.stderr
    assert files_of(out) == files_of(whole) and not partial.exists()


def test_only_what_changed_is_drawn_again(run, tmp_path):
    out = tmp_path / "out"
    words = (run, "--out", out, "--uncertainty", "none")
    assert drawing(*words)[0] == ["a", "b"]
    before = files_of(out)
    drawn, result = drawing(*words)
    assert drawn == [] and "2 of 2 were there already: --overwrite" in result.stderr
    assert files_of(out) == before
    assert drawing(*words, "--overwrite")[0] == ["a", "b"] and files_of(out) == before
    write_table(run, "b", table(12, 7))
    assert drawing(*words)[0] == ["b"] and files_of(out)["a.png"] == before["a.png"]
    (out / "a.png").unlink()
    assert drawing(*words)[0] == ["a"]
    assert drawing(*words, "--slide", "a")[0] == []
    assert sorted(files_of(out)) == ["a.png", "b.png", "config.json"]
    assert drawing(*words, "--step", 16)[0] == ["a", "b"]
    assert drawing(run, "--out", out)[0] == ["a", "b"]
    # Uncertainties have one scale: a slide with a larger one changes the maps of all.
    write_table(run, "b", table(12, 7).assign(sd=2.5))
    assert drawing(run, "--out", out)[0] == ["a", "b"]


def test_maps_are_added_to_the_run(run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert invoke("heatmap", run, "--slide", "b").exit_code == 0
    first = files_of(run / "heatmaps")
    result = invoke("heatmap", run, "--slide", "a")
    assert result.stdout == f"1 heat map in {run / 'heatmaps'}, which has 2 in all\n"
    both = files_of(run / "heatmaps")
    assert sorted(both) == ["a.png", "b.png", "config.json"] and both["b.png"] == first["b.png"]
    card = json.loads(both["config.json"])
    assert card["slides"] == ["a", "b"] and card["files"] == ["a.png", "b.png"]
    drawn, result = drawing(run)  # uncertainties have one scale, however the maps came
    assert drawn == [] and "2 of 2 were there already" in result.stderr
    assert files_of(run / "heatmaps") == both
    assert invoke("qupath", run, "--slide", "a").exit_code == 0
    assert invoke("qupath", run, "--slide", "b", "--gzip").exit_code == 0
    names = ["a.geojson", "b.geojson.gz", "config.json"]
    assert sorted(p.name for p in (run / "qupath").iterdir()) == names
    assert sorted(p.name for p in tmp_path.iterdir()) == ["run"]


def test_a_stopped_addition_leaves_what_was_there(run):
    out, words = run / "heatmaps", (run, "--step", 32, "--uncertainty", "none")
    assert drawing(*words, "--slide", "a")[0] == ["a"]
    before = files_of(out)
    write_table(run, "c", table(9, 3))
    drawn, result = drawing(*words, fail_at=1)
    assert result.exit_code == 130 and drawn == ["b"] and files_of(out) == before
    assert check_target(run) == run.resolve()  # maps, finished or not, are no strangers in a run
    assert drawing(*words)[0] == ["c"] and sorted(pictures(out)) == ["a.png", "b.png", "c.png"]
    assert not (run / "heatmaps.partial").exists()


def test_maps_do_not_make_a_run_foreign(run):
    assert invoke("heatmap", run).exit_code == 0 and invoke("qupath", run).exit_code == 0
    assert check_target(run) == run.resolve()
    (run / "qupath" / "thesis.txt").write_text("")
    with pytest.raises(ValueError, match="did not write"):
        check_target(run)


def test_maps_that_a_run_has_drawn_itself_stay(run):
    """As gpmil demo does, without a list of them."""
    (run / "heatmaps").mkdir()
    (run / "heatmaps" / "a.png").write_bytes(b"of the demonstration")
    refused(invoke("heatmap", run), "holds files that gpmil did not write")
    card = json.loads((run / "config.json").read_text())
    (run / "config.json").write_text(json.dumps(card | {"files": ["heatmaps", "patches"]}))
    assert drawing(run)[0] == ["b"]
    assert (run / "heatmaps" / "a.png").read_bytes() == b"of the demonstration"
    assert drawing(run, "--overwrite")[0] == ["a", "b"]
    assert list(pictures(run / "heatmaps")) == ["a.png", "b.png"]


def test_another_slide_file_is_another_map(run, slide_folder, tmp_path):
    words = (run, "--out", tmp_path / "out", "--slide", "a")
    assert drawing(*words)[0] == ["a"]
    assert drawing(*words, "--slides", slide_folder)[0] == ["a"]
    assert drawing(*words, "--slides", slide_folder)[0] == []
    Image.new("RGB", (170, 140)).save(slide_folder / "a.png")
    assert drawing(*words, "--slides", slide_folder)[0] == ["a"]


def test_qupath_files_are_not_written_twice(run, tmp_path, monkeypatch):
    out = tmp_path / "out"
    assert invoke("qupath", run, "--out", out).exit_code == 0
    before = files_of(out)
    monkeypatch.setattr(
        "gpmil.show.qupath.to_geojson", lambda *_, **__: pytest.fail("written again")
    )
    result = invoke("qupath", run, "--out", out)
    assert result.exit_code == 0 and files_of(out) == before


def test_a_foreign_partial_folder_is_refused_and_stays(run, tmp_path):
    partial = tmp_path / "out.partial"
    partial.mkdir()
    (partial / "thesis.txt").write_text("")
    refused(invoke("heatmap", run, "--out", tmp_path / "out"), "was not written by gpmil")
    assert (partial / "thesis.txt").exists()


def test_two_processes_do_not_fill_the_same_folder(run, tmp_path):
    pytest.importorskip("fcntl")
    wanted = maps_input.MapOptions(run, tmp_path / "out")
    with maps_output.making(wanted, {"command": "heatmap"}):
        refused(invoke("heatmap", run, "--out", tmp_path / "out"), "written by another gpmil")
    assert invoke("heatmap", run, "--out", tmp_path / "out").exit_code == 0


# --- Mistakes -------------------------------------------------------------------------------------
def refused(result, *words: str) -> None:
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    assert result.stderr.count("\n") == 1 and result.stderr.startswith("gpmil: "), result.stderr
    for word in words:
        assert word in result.stderr


@pytest.mark.parametrize("command", ["heatmap", "qupath"])
def test_bad_input_gets_one_line_and_leaves_nothing(command, run, tmp_path):
    out = tmp_path / "out"

    def call(*arguments):
        return invoke(command, *arguments, "--out", out)

    refused(call(tmp_path / "nowhere"), "no run at", "nowhere")
    (tmp_path / "bare").mkdir()
    refused(call(tmp_path / "bare"), "holds no tables of patches")
    (tmp_path / "weights" / "attention").mkdir(parents=True)
    refused(call(tmp_path / "weights"), "holds no tables of patches", "Maps of attention")
    (tmp_path / "notes.txt").write_text("")
    refused(call(tmp_path / "notes.txt"), "no table of patches")
    refused(call(run, "--slide", "c"), "no slide c; it has 2: a, b")
    refused(call(run, "--slides", tmp_path / "nowhere"), "no folder with slides")
    refused(call(run, "--slides", tmp_path / "bare"), "none of the 2 slides", "no slide files")
    refused(call(run, "--step", "-3"), "--step: expected a positive number")
    (run / "config.json").write_text("{")
    refused(call(run), "config.json cannot be read as JSON")
    (run / "config.json").write_text('{"steps": {"a": "wide"}}')
    refused(call(run), "steps of a in config.json: expected a positive number")
    (run / "config.json").write_text('{"steps": [32, 32]}')
    refused(call(run), 'expected "steps" to be {slide: number}')
    assert not out.exists()


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"no gzip", "cannot be read as a whole table of patches"),
        (
            gzip.compress(table(20, 1).to_csv().encode(), mtime=0)[:-30],
            "cannot be read as a whole table of patches",
        ),
        (gzip.compress(b"", mtime=0), "cannot be read as a whole table of patches"),
        (gzip.compress(b"probability\n0.5\n", mtime=0), "found no x, y"),
        (gzip.compress(b"x,y,probability\n1,,0.5\n", mtime=0), "without a position"),
        (
            gzip.compress(b"x,y,probability\n1,2,high\n", mtime=0),
            "expected numbers from 0 to 1 in column 'probability'",
        ),
        (
            gzip.compress(b"x,y,probability,flagged\n1,2,0.5,maybe\n", mtime=0),
            "expected numbers among 0, 1 in column 'flagged'",
        ),
    ],
    ids=["no gzip", "cut", "empty", "no x", "no y", "a word", "maybe"],
)
def test_a_broken_table_is_named(run, tmp_path, content, words):
    (run / "patches" / "b.csv.gz").write_bytes(content)
    for command in ("heatmap", "qupath"):
        refused(invoke(command, run, "--out", tmp_path / "out"), "b.csv.gz", words)
    assert not (tmp_path / "out").exists()


def test_a_step_that_cannot_be_known_is_asked_for(tmp_path):
    run = tmp_path / "run"
    write_table(run, "lone", table(1, 3))
    refused(invoke("heatmap", run, "--out", tmp_path / "out"), "Give --step")
    result = invoke("heatmap", run, "--out", tmp_path / "out", "--step", 32)
    assert result.exit_code == 0 and result.stderr == ""


def test_a_run_is_not_replaced_by_its_maps(run):
    before = sorted(run.rglob("*"))
    for out in (run, run.parent):
        refused(invoke("heatmap", run, "--out", out), "would replace the run itself")
    assert sorted(run.rglob("*")) == before


def test_bad_slide_files_get_one_line(run, slide_folder, tmp_path):
    def call(command):
        return invoke(command, run, "--slides", slide_folder, "--out", tmp_path / "out")

    Image.new("RGB", (60, 50)).save(slide_folder / "b.png")
    for command in ("heatmap", "qupath"):
        refused(call(command), "slide b", "outside the slide file of 60 x 50 pixels", "microns")
    (slide_folder / "b.png").write_bytes(b"broken")
    for command in ("heatmap", "qupath"):
        refused(call(command), "b.png cannot be read")
    assert not (tmp_path / "out").exists()
    (slide_folder / "b.png").unlink()
    result = call("heatmap")
    assert result.exit_code == 0 and "for 1 of 2: b" in result.stderr


def test_without_openslide_the_extra_is_named(run, slide_folder, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "openslide", None)
    for command in ("heatmap", "qupath"):
        result = invoke(command, run, "--slides", slide_folder, "--out", tmp_path / "out")
        refused(result, extras.install("slides"))
        assert invoke(command, run, "--out", tmp_path / command).exit_code == 0
    assert not (tmp_path / "out").exists()


def test_an_unknown_way_of_uncertainty(run, tmp_path):
    result = invoke("heatmap", run, "--out", tmp_path / "out", "--uncertainty", "colour")
    refused(result, "expected one of panel, opacity, none, found 'colour'")


def test_an_interruption_leaves_nothing(run, tmp_path, monkeypatch):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(heatmap, "draw", interrupted)
    result = invoke("heatmap", run, "--out", tmp_path / "out")
    assert result.exit_code == 130
    assert sorted(p.name for p in tmp_path.iterdir()) == ["run"]


# --- Real slides ----------------------------------------------------------------------------------
@pytest.mark.data
def test_maps_over_real_slides(data_dir, tmp_path):
    """The real patches of one slide, and a grid over one whose scale is not known."""
    pytest.importorskip("openslide")
    h5py = pytest.importorskip("h5py")
    folder = data_dir / "slides"
    with h5py.File(folder / "CMU-1-Small-Region_features.h5") as file:
        coords = file["coords"][:]
    other = np.stack(np.divmod(np.arange(13 * 10), 10), axis=1) * 300 + 100
    run, names = tmp_path / "run", ("CMU-1-Small-Region", "tcga-cr-7395-01a-01-ts1")
    rng = np.random.default_rng(0)
    for name, places in zip(names, (coords, other)):
        far = np.linalg.norm(places - [1200, 1500], axis=1)
        said = {"probability": np.exp(-((far / 800) ** 2)), "sd": rng.uniform(0.3, 1, len(far))}
        frame = pd.DataFrame({"x": places[:, 0], "y": places[:, 1], **said, "flagged": far < 350})
        write_table(run, name, frame)
    steps = dict(zip(names, (256, 300)))
    (run / "config.json").write_text(json.dumps({"steps": steps}))
    result = invoke("heatmap", run, "--slides", folder, "--out", tmp_path / "maps")
    assert result.exit_code == 0 and result.stderr == "", result.output
    assert len(pictures(tmp_path / "maps")) == 2
    found = {t.slide: t for t in tables_of(run)}
    overview = maps_input.look(list(found.values()), maps_input.config(run))
    rulers = []
    for name in names:
        figure = heatmap.draw(found[name], folder / f"{name}.svs", overview, "opacity")
        rulers.append([t.get_text() for t in figure.axes[0].texts])
    assert rulers == [["200 µm"], []]
    assert invoke("qupath", run, "--slides", folder, "--out", tmp_path / "q").exit_code == 0
