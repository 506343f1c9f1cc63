"""The figures of the paper: what their frames hold, what is drawn, and why not."""

from dataclasses import replace

import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.colors import to_hex
from matplotlib.patches import Circle, FancyArrowPatch, FancyBboxPatch
from matplotlib.text import Text
from PIL import Image
from synthetic import pr, pri

from gpmil import VGPMIL, Bags, simulate
from gpmil.paper import figure1_graphical_models as figure1
from gpmil.paper import figure2_five_patches as figure2
from gpmil.paper import figure3_example_patches as figure3
from gpmil.paper import figure4_negative_slides as figure4
from gpmil.paper import figure5_heat_maps as figure5
from gpmil.paper import figure6_variability as figure6
from gpmil.paper import patch_rows
from gpmil.paper.methods import Method
from gpmil.paper.results import MethodRun, Results

# eq. (Cb_example), typed from the paper
PAPER = np.array(
    [
        [2, -1, -1, 0, 0],
        [-1, 2, 0, -1, 0],
        [-1, 0, 2, -1, 0],
        [0, -1, -1, 3, -1],
        [0, 0, 0, -1, 1],
    ]
)
SMALL = {"n_inducing": 20, "max_iter": 30}


def method(key, name, coupling=None, settings=""):
    return Method(key, name, lambda seed: None, coupling=coupling, settings=settings)


METHODS = [
    method("vgpmil", "VGPMIL"),
    method("pr", "VGPMIL-PR"),
    *(method(f"pri-{c:g}", "VGPMIL-PR-I", c) for c in (0.1, 0.5, 10.0)),
    method("tuned", "VGPMIL-PR-I", settings="learned settings"),
]


def run_of(model, train, test):
    model.fit(train)
    return MethodRun(
        log_odds=model.decision_function(test),
        probability=model.predict_proba(test)[:, 1],
        patch_probability=model.predict_instances(test).probability,
        flagged=None,
        fit_seconds=1.0,
        predict_seconds=1.0,
        notes={},
    )


@pytest.fixture(scope="module")
def results():
    """Fitted models on a small simulated cohort."""
    settings = {"n_features": 16, "seed": 4, "mean_size": 40}
    train = simulate.cohort(20, 12, part=0, **settings)
    test = simulate.cohort(12, 8, part=1, **settings)

    def runs(make, seeds=(0,)):
        return [run_of(make(random_state=seed, **SMALL), train, test) for seed in seeds]

    found = {
        "vgpmil": runs(VGPMIL),
        "pr": runs(pr, (0, 1)),
        "tuned": runs(lambda **s: pri(coupling=1.7, mean=-1.5, **s)),
    }
    for c in (0.1, 0.5, 10.0):
        found[f"pri-{c:g}"] = runs(lambda c=c, **s: pri(coupling=c, **s), (0, 1))
    return Results("simulated cohort", "simulated", train, test, METHODS, found)


@pytest.fixture(scope="module")
def exhibits(results):
    """Figures 4 to 6 of these results, built once."""
    return {k: m.build(results) for k, m in ((4, figure4), (5, figure5), (6, figure6))}


def made_up(test, seed=0, keys=("vgpmil", "pr", "pri-0.5", "tuned")):
    """Runs with random numbers, for what does not depend on models."""
    rng = np.random.default_rng(seed)

    def one():
        odds = rng.normal(size=len(test))
        patches = rng.uniform(0.01, 0.6, size=test.n_instances)
        return MethodRun(odds, 1 / (1 + np.exp(-odds)), patches, None, 1.0, 1.0, {})

    return Results("made up", "made up", test, test, METHODS, {key: [one()] for key in keys})


def silenced(results, key):
    """The same, and one method says nothing of patches."""
    quiet = [replace(run, patch_probability=None) for run in results.of(key)]
    return replace(results, runs={**results.runs, key: quiet})


def lattice(labels, seed=1, shape=(4, 3), step=5, offset=2, known=True, coords=True, sizes=None):
    """Slides of one small lattice each, the first third of a positive one cancerous."""
    rng = np.random.default_rng(seed)
    cells = np.stack(np.meshgrid(*map(np.arange, shape)), -1).reshape(-1, 2)
    counts = [len(cells)] * len(labels) if sizes is None else sizes
    truth = [
        np.where(np.arange(n) < n / 3, y, 0) if known else None for n, y in zip(counts, labels)
    ]
    return Bags.from_arrays(
        [rng.normal(size=(n, 3)) for n in counts],
        labels=labels,
        coords=[cells[:n] * float(step) + offset for n in counts] if coords else None,
        step=step if coords else None,
        graph="grid4" if coords else None,
        names=[f"slide{b}" for b in range(len(labels))],
        instance_labels=truth,
    )


def texts(figure):
    """All that can be read: tick labels outside the axes' limits exist and are not drawn."""
    unseen = set()
    for axis in (axis for ax in figure.findobj(Axes) for axis in (ax.xaxis, ax.yaxis)):
        low, high = sorted(axis.get_view_interval())
        off = not axis.axes.axison
        for tick in axis.get_major_ticks():
            if off or not low <= tick.get_loc() <= high:
                unseen |= {tick.label1, tick.label2}
    every = [t for t in figure.findobj(Text) if t.get_visible() and t.get_text().strip()]
    return [t for t in every if t not in unseen]


def words(figure):
    return [t.get_text() for t in texts(figure)]


def assert_nothing_clipped(figure):
    figure.canvas.draw()
    width, height = figure.canvas.get_width_height()
    renderer = figure.canvas.get_renderer()
    for text in texts(figure):
        box = text.get_window_extent(renderer)
        assert box.x0 > -1 and box.y0 > -1, text.get_text()
        assert box.x1 < width + 1 and box.y1 < height + 1, text.get_text()


# --- All of them ----------------------------------------------------------------------------------
@pytest.mark.parametrize("module", [figure1, figure2])
def test_drawn_figures_are_the_same_each_time(module):
    first, second = module.build(), module.build()
    assert first.png() == second.png()
    assert first.alt and first.caption and not first.missing
    assert_nothing_clipped(first.figure)


@pytest.mark.parametrize("number, module", [(4, figure4), (5, figure5), (6, figure6)])
def test_figures_of_results_are_the_same_each_time(number, module, exhibits, results, tmp_path):
    first, second = exhibits[number], module.build(results)
    first.write(tmp_path)
    assert first.number == f"Figure {number}"
    found = {path.suffix for path in tmp_path.glob(f"figure{number}_*.*")}
    assert found == {".csv", ".md", ".png"}
    assert next(tmp_path.glob(f"figure{number}_*.png")).read_bytes() == second.png()
    assert first.frame.equals(second.frame)
    assert first.alt and first.caption and not first.missing
    assert_nothing_clipped(first.figure)


# --- Figure 1 -------------------------------------------------------------------------------------
def borders(ax):
    """x of the left and right borders of all nodes and plates."""
    sides = []
    for patch in ax.patches:
        if isinstance(patch, Circle):
            sides += [patch.center[0] - patch.radius, patch.center[0] + patch.radius]
        elif isinstance(patch, FancyBboxPatch):
            sides += [patch.get_x(), patch.get_x() + patch.get_width()]
    return np.array(sides)


def test_arrows_begin_and_end_at_borders():
    ax = figure1.build().figure.axes[0]
    arrows = [patch for patch in ax.patches if isinstance(patch, FancyArrowPatch)]
    assert len(arrows) == 9
    for arrow in arrows:
        (x0, y0), (x1, y1) = arrow._posA_posB
        assert x0 < x1 and y0 == y1
        for x in (x0, x1):
            assert np.abs(borders(ax) - x).min() < 1e-12


def test_no_two_texts_of_the_graphical_models_overlap():
    figure = figure1.build().figure
    figure.canvas.draw()
    boxes = [t.get_window_extent(figure.canvas.get_renderer()) for t in texts(figure)]
    for i, one in enumerate(boxes):
        assert not any(one.overlaps(other) for other in boxes[:i])


def test_observed_nodes_are_grey_and_coupled_plates_are_joined():
    ax = figure1.build().figure.axes[0]
    grey = [p for p in ax.patches if isinstance(p, Circle) and p.get_facecolor()[0] < 0.9]
    assert len(grey) == 3
    uncoupled, coupled, logistic = figure1.MODELS
    assert coupled.arrows[1] == ("if", "im") and {"if", "im"} <= set(coupled.plates)
    assert uncoupled.arrows[1] == ("f", "m") and logistic.arrows[1] == ("f", "h")


# --- Figure 2 -------------------------------------------------------------------------------------
def test_the_coupling_matrix_is_the_papers():
    np.testing.assert_array_equal(figure2.coupling_matrix(), PAPER)
    frame = figure2.build().frame
    np.testing.assert_array_equal(frame.drop(columns="patch"), PAPER)
    assert list(frame["patch"]) == ["P1", "P2", "P3", "P4", "P5"]


def test_the_coupling_matrix_is_the_sum_of_squares():
    m = np.random.default_rng(2).normal(size=5)
    pairs = [(1, 2), (1, 3), (2, 4), (3, 4), (4, 5)]
    squares = sum((m[i - 1] - m[j - 1]) ** 2 for i, j in pairs)
    assert m @ figure2.coupling_matrix() @ m == pytest.approx(squares, rel=1e-13)


@pytest.mark.parametrize("strength", [0.3, 0.5, 10.0])
def test_the_covariance_is_the_inverse_and_its_rows_sum_to_one(strength):
    found = figure2.covariance(strength)
    np.testing.assert_allclose(found, np.linalg.inv(np.eye(5) + strength * PAPER), atol=1e-13)
    np.testing.assert_allclose(found.sum(axis=1), 1.0, atol=1e-13)


def test_the_matrices_are_written_out():
    shown = words(figure2.build().figure)
    for strength in figure2.STRENGTHS:
        inverse = np.linalg.inv(np.eye(5) + strength * PAPER)
        assert f"{inverse[1, 2]:.2f}" in shown and f"{inverse[4, 4]:.2f}" in shown
    assert "−1" in shown and "3" in shown


# --- Figure 3 -------------------------------------------------------------------------------------
def test_without_images_there_is_no_figure(results, tmp_path):
    exhibit = figure3.build(results)
    assert exhibit.figure is None and "no images of the slides were given" in exhibit.missing
    exhibit.write(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["figure3_example_patches.md"]


@pytest.fixture
def pictured(tmp_path):
    """Slides with images of random pixels, in several formats; positions are pixels."""
    test = lattice([1, 0, 1, 0])
    rng = np.random.default_rng(7)
    pixels = {}
    for name, suffix in zip(test.names, (".png", ".tif", ".png", ".tiff")):
        pixels[str(name)] = rng.integers(0, 256, size=(18, 23, 3), dtype=np.uint8)
        Image.fromarray(pixels[str(name)]).save(tmp_path / f"{name}{suffix}")
    return replace(made_up(test), images=tmp_path), pixels


def test_example_patches_are_cut_where_they_lie(pictured):
    results, pixels = pictured
    exhibit = figure3.build(results)
    assert list(exhibit.frame["patch_label"]) == [1, 1, 0, 0]
    for row, ax in zip(exhibit.frame.itertuples(), exhibit.figure.axes):
        cut = pixels[row.slide][row.y : row.y + 5, row.x : row.x + 5]
        np.testing.assert_array_equal(ax.images[0].get_array(), cut)
        assert (row.width, row.height) == (5, 5)
        assert set(words(ax)) == {["non-cancerous", "cancerous"][row.patch_label], row.slide}
    assert_nothing_clipped(exhibit.figure)
    assert figure3.build(results).png() == exhibit.png()


def test_example_patches_are_of_median_probability(pictured):
    results, _ = pictured
    frame = figure3.build(results).frame
    given = results.of("tuned")[0].patch_probability  # the last of the compared methods
    inside = results.test.split(given)[0][results.test.split(results.test.instance_labels)[0] == 1]
    assert frame["probability"][0] == np.sort(inside)[(len(inside) - 1) // 2]
    assert list(frame["slide"]) == ["slide0", "slide2", "slide1", "slide3"]


def test_example_patches_without_any_model(pictured):
    exhibit = figure3.build(replace(pictured[0], runs={}))
    assert exhibit.frame["probability"].isna().all()
    assert "middle of the list" in exhibit.caption


def test_unreadable_and_wrong_images_are_said(pictured):
    results, _ = pictured
    (results.images / "slide0.png").write_bytes(b"not an image")
    exhibit = figure3.build(results)
    assert "slide0.png could not be read" in exhibit.caption
    assert list(exhibit.frame["slide"]) == ["slide2", "slide1", "slide3"]
    Image.fromarray(np.zeros((4, 4, 3), np.uint8)).save(results.images / "slide2.png")
    exhibit = figure3.build(results)
    assert set(exhibit.frame["patch_label"]) == {0}
    image, reason = figure3.slide_image(results, 2)
    assert image is None and "another resolution" in reason


def test_patches_over_the_edge_of_an_image_are_not_shown(pictured):
    results, _ = pictured
    for name, suffix in (("slide0", ".png"), ("slide1", ".tif")):
        # The last column of patches begins inside and ends outside.
        Image.fromarray(np.zeros((18, 20, 3), np.uint8)).save(results.images / f"{name}{suffix}")
    frame = figure3.build(results).frame
    assert (frame["x"] + frame["width"])[frame["slide"].isin(["slide0", "slide1"])].max() <= 20


@pytest.mark.parametrize(
    "change, said",
    [
        ({"known": False}, "no patch has a known label"),
        ({"coords": False}, "no positions"),
        ({"labels": [0, 0]}, "there is no image slide0.jpg"),
    ],
)
def test_why_there_are_no_example_patches(change, said, tmp_path):
    test = lattice(**({"labels": [1, 0]} | change))
    exhibit = figure3.build(replace(made_up(test), images=tmp_path))
    assert said in exhibit.missing and exhibit.figure is None and exhibit.frame is None


# --- Figure 4 -------------------------------------------------------------------------------------
def naive_rows(results, keys, slides):
    """slide, method, rank, probability and whether the slide is right, patch by patch."""
    found = []
    for key in keys:
        run = results.of(key)[0]
        for b in slides:
            first, last = results.test.offsets[b], results.test.offsets[b + 1]
            for rank, p in enumerate(sorted(run.patch_probability[first:last]), start=1):
                name = results.test.names[b]
                found.append((name, key, rank, p, run.probability[b], run.log_odds[b] <= 0))
    return found


def test_negative_slides_hold_sorted_probabilities(exhibits, results):
    frame = exhibits[4].frame
    negative = [b for b in range(len(results.test)) if results.test.labels[b] == 0]
    keys = ["vgpmil", "pr", "pri-0.5", "tuned"]
    assert list(frame.itertuples(index=False, name=None)) == naive_rows(results, keys, negative)


def test_the_bars_are_those_of_the_frame(exhibits):
    exhibit = exhibits[4]
    panels = exhibit.frame.groupby(["method", "slide"], sort=False)
    assert len(exhibit.figure.axes) == panels.ngroups
    for ax, (_, panel) in zip(exhibit.figure.axes, panels):
        bars = next(patch for patch in ax.patches if hasattr(patch, "get_data")).get_data()
        np.testing.assert_array_equal(bars.values, panel["probability"])
        right = bool(panel["slide_correct"].iloc[0])
        assert ax.texts[0].get_text().startswith("right" if right else "wrong")
        assert ax.texts[0].get_color() == (patch_rows.RIGHT if right else patch_rows.WRONG)
        assert to_hex(ax.spines["left"].get_edgecolor()) == ax.texts[0].get_color()


def test_a_single_negative_slide_is_drawn():
    exhibit = figure4.build(made_up(lattice([1, 0, 1], sizes=[6, 1, 5])))
    assert set(exhibit.frame["slide"]) == {"slide1"}
    assert "1 patch" in words(exhibit.figure)
    assert_nothing_clipped(exhibit.figure)


def test_the_largest_of_many_negative_slides_are_drawn():
    sizes = [3, 9, 2, 8, 7, 2, 5, 6, 4]
    exhibit = figure4.build(made_up(lattice([0] * 8 + [1], sizes=sizes)))
    assert list(dict.fromkeys(exhibit.frame["slide"])) == [f"slide{b}" for b in (0, 1, 3, 4, 6, 7)]
    assert "6 largest of 8" in exhibit.caption


def test_long_names_are_shortened_in_headings_alone():
    test = lattice([0, 1])
    long = "TCGA-2A-A8VL-01Z-00-DX1.2C2BA3B1"
    names = np.array([long, "other"])
    test = Bags(test.features, test.offsets, test.labels, names)
    exhibit = figure4.build(made_up(test))
    assert set(exhibit.frame["slide"]) == {long}
    assert long not in words(exhibit.figure)
    assert_nothing_clipped(exhibit.figure)


def test_there_is_no_negative_slide():
    results = made_up(lattice([1, 1]))
    exhibit = figure4.build(results)
    assert "no negative slide" in exhibit.missing and exhibit.figure is None
    assert set(figure5.build(results).frame["slide_label"]) == {1}


def test_a_method_without_patch_probabilities_is_left_out_and_named(results):
    quiet = silenced(results, "vgpmil")
    for module in (figure4, figure5):
        exhibit = module.build(quiet)
        assert set(exhibit.frame["method"]) == {"pr", "pri-0.5", "tuned"}
        assert "for want of patch probabilities: VGPMIL." in exhibit.caption
    assert "vgpmil" not in set(figure6.build(quiet).frame["method"])


def test_methods_that_were_not_run_are_left_out(results):
    fewer = replace(results, runs={"pr": results.of("pr")})
    exhibit = figure4.build(fewer)
    assert set(exhibit.frame["method"]) == {"pr"} and "want of" not in exhibit.caption
    assert "largest negative slide" in figure5.build(fewer).caption
    nothing = replace(results, runs={})
    for module in (figure4, figure5, figure6):
        assert module.build(nothing).missing and module.build(nothing).figure is None


# --- Figure 5 -------------------------------------------------------------------------------------
def test_the_negative_slide_is_the_one_that_the_coupling_calms_most(results):
    test = results.test
    before, after = (results.of(key)[0].patch_probability for key in ("pr", "pri-0.5"))
    falls = {}
    for b, (first, last) in enumerate(zip(test.offsets[:-1], test.offsets[1:])):
        if test.labels[b] == 0:
            falls[b] = before[first:last].max() - after[first:last].max()
    assert figure5.negative_slide(results)[0] == max(falls, key=falls.get)


def test_the_positive_slide_has_the_median_lesion(results):
    test = results.test
    sizes = sorted(
        (int((bag.instance_labels == 1).sum()), b)
        for b, bag in enumerate(test)
        if bag.labels[0] == 1 and set(bag.instance_labels.tolist()) >= {0, 1}
    )
    assert figure5.positive_slide(results)[0] == sizes[(len(sizes) - 1) // 2][1]


def test_heat_maps_hold_what_was_predicted(exhibits, results):
    exhibit = exhibits[5]
    test = results.test
    chosen = [figure5.negative_slide(results)[0], figure5.positive_slide(results)[0]]
    assert list(dict.fromkeys(exhibit.frame["slide"])) == [test.names[b] for b in chosen]
    for (name, key), part in exhibit.frame.groupby(["slide", "method"]):
        b = test.names.tolist().index(name)
        bag = slice(test.offsets[b], test.offsets[b + 1])
        run = results.of(key)[0]
        np.testing.assert_array_equal(part["probability"], run.patch_probability[bag])
        np.testing.assert_array_equal(part[["x", "y"]], test.coords[bag])
        np.testing.assert_array_equal(part["patch_label"], test.instance_labels[bag])


def test_maps_of_a_line_share_one_scale(exhibits):
    exhibit = exhibits[5]
    images = [ax.images[-1] for ax in exhibit.figure.axes if ax.images]
    maps = [image for image in images if type(image.norm).__name__ == "PowerNorm"]
    assert len(maps) == 8
    tops = exhibit.frame.groupby("slide", sort=False)["probability"].max()
    for line, top in zip((maps[:4], maps[4:]), tops):
        assert {(image.norm.vmin, image.norm.vmax) for image in line} == {(0.0, top)}


def test_the_image_stands_beside_the_maps(pictured):
    results, pixels = pictured
    exhibit = figure5.build(results)
    first = exhibit.figure.axes[0].images[0]
    name = exhibit.frame["slide"].iloc[0]
    # Patches cover pixels 2 to 21 across and 2 to 16 down.
    np.testing.assert_array_equal(first.get_array(), pixels[name][2:17, 2:22])
    assert "(a) image" in words(exhibit.figure)
    (results.images / f"{name}.tif").unlink(missing_ok=True)
    (results.images / f"{name}.tiff").unlink(missing_ok=True)
    exhibit = figure5.build(results)
    assert f"there is no image {name}.jpg" in exhibit.caption
    assert "(a) true labels" in words(exhibit.figure)


def test_heat_maps_need_positions():
    exhibit = figure5.build(made_up(lattice([1, 0], coords=False)))
    assert "no positions" in exhibit.missing and exhibit.figure is None


def test_heat_maps_without_patch_labels_say_so():
    exhibit = figure5.build(made_up(lattice([1, 0], known=False)))
    assert {"(a) tissue", "patch labels are not known"} <= set(words(exhibit.figure))
    assert_nothing_clipped(exhibit.figure)


def test_heat_maps_of_a_chain_are_strips():
    test = lattice([1, 0])
    line = [np.arange(12.0)[:, None]] * 2
    chain = Bags.from_arrays(test.split(test.features), test.labels, coords=line, step=1)
    exhibit = figure5.build(made_up(chain))
    assert "y" not in exhibit.frame and not exhibit.missing
    volume = [np.arange(12.0)[:, None] * [1, 0, 0]] * 2
    cloud = Bags.from_arrays(test.split(test.features), test.labels, coords=volume, step=1)
    assert "on a plane" in figure5.build(made_up(cloud)).missing


# --- Figure 6 -------------------------------------------------------------------------------------
def test_variability_is_the_mean_standard_deviation_inside_slides(exhibits, results):
    frame = exhibits[6].frame
    assert list(frame["method"]) == [
        "vgpmil", "pr", "pr", *(k for k in ("pri-0.1", "pri-0.5", "pri-10") for _ in range(2))
    ]  # fmt: skip
    for row in frame.itertuples():
        patches = results.of(row.method)[row.run].patch_probability
        deviations, ratios = [], []
        for first, last in zip(results.test.offsets[:-1], results.test.offsets[1:]):
            inside = patches[first:last]
            mean = sum(inside) / len(inside)
            deviations.append((sum((p - mean) ** 2 for p in inside) / len(inside)) ** 0.5)
            ratios.append(deviations[-1] / mean)
        assert row.variability == pytest.approx(np.mean(deviations), rel=1e-12)
        assert row.relative == pytest.approx(np.mean(ratios), rel=1e-12)
    couplings = dict(zip(frame["method"], frame["coupling"]))
    assert couplings.pop("vgpmil") != couplings["pr"] == 0.0
    assert (couplings["pri-0.1"], couplings["pri-10"]) == (0.1, 10.0)


def test_the_curve_is_the_mean_over_runs(exhibits):
    exhibit = exhibits[6]
    frame, ax = exhibit.frame, exhibit.figure.axes[0]
    curve = next(line for line in ax.lines if line.get_label() == "VGPMIL-PR-I")
    np.testing.assert_array_equal(curve.get_xdata(), [0.1, 0.5, 10.0])
    for x, y in zip(*curve.get_data()):
        assert y == pytest.approx(frame.loc[frame["coupling"] == x, "variability"].mean())
    assert "paper: 0.30" in " ".join(words(ax))


def scaled(results, spread):
    """Patch probabilities that alternate round 0.3 by a spread a method."""
    sign = np.resize([1.0, -1.0], results.test.n_instances)
    runs = {
        key: [replace(results.of("pr")[0], patch_probability=0.3 + width * sign)]
        for key, width in spread.items()
    }
    return replace(results, runs=runs)


@pytest.mark.parametrize(
    "spread, said",
    [
        ({"pri-0.1": 0.2, "pri-0.5": 0.1, "pri-10": 0.05}, "falls steadily from 0.2 at λ = 0.1"),
        ({"pri-0.1": 0.1, "pri-0.5": 0.2, "pri-10": 0.05}, "not always downwards, from 0.1"),
        ({"pri-0.5": 0.1, "pr": 0.25}, "VGPMIL-PR-I: 0.1 at λ = 0.5; VGPMIL-PR: 0.25."),
    ],
)
def test_the_caption_says_how_the_variability_goes(spread, said):
    results = scaled(made_up(lattice([1, 0])), spread)
    exhibit = figure6.build(results)
    assert said in exhibit.caption
    assert_nothing_clipped(exhibit.figure)


@pytest.mark.parametrize("width, note", [(0.12, "VGPMIL: 0.12 (paper"), (0.29, "↑ VGPMIL: 0.29")])
def test_vgpmil_is_a_line_where_it_fits_and_a_note_elsewhere(width, note):
    results = scaled(made_up(lattice([1, 0])), {"vgpmil": width, "pri-0.5": 0.1})
    shown = words(figure6.build(results).figure.axes[0])
    assert any(text.startswith(note) for text in shown)


def test_probabilities_of_zero_do_not_vary():
    test = lattice([1, 0])
    assert figure6.relative_variability(test, np.zeros(test.n_instances)) == 0.0
