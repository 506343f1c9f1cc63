"""Heat maps: every patch at its place, averages where patches overlap, named layers."""

import time

import matplotlib.pyplot as plt
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles.maps import area_mean

from gpmil.show import heatmaps, raster
from gpmil.show.classes import ClassLayer
from gpmil.show.heatmaps import (
    MOST_PIXELS,
    Layout,
    SlideMaps,
    comparison,
    heatmap,
    lay_out,
    outline,
)
from gpmil.show.layers import suspicion_colours
from gpmil.show.plots import new_figure, png
from gpmil.show.slides import Thumbnail


def naive(cells: np.ndarray, values: np.ndarray, cover: int = 1) -> np.ndarray:
    """Mean of the values on each cell, by loops."""
    width, height = cells.max(axis=0) + cover
    image = np.full((height, width), np.nan)
    for row in range(height):
        for column in range(width):
            on = [
                v
                for (x, y), v in zip(cells, values)
                if x <= column < x + cover and y <= row < y + cover
            ]
            if on:
                image[row, column] = np.mean(on)
    return image


def a_slide(seed: int, n: int = 30) -> tuple[np.ndarray, np.ndarray]:
    """n cells of a 9 x 7 grid that touch both borders, and values."""
    rng = np.random.default_rng(seed)
    chosen = rng.permutation(np.arange(1, 62))[: n - 2]
    cells = np.stack(np.divmod(np.concatenate([[0, 62], chosen]), 7), axis=1)
    return cells, rng.random(n)


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 10_000), st.floats(0.3, 900.0), st.floats(-1e6, 1e6))
def test_a_grid_has_one_pixel_a_cell(seed, step, origin):
    cells, values = a_slide(seed)
    layout = lay_out(origin + cells * step, step)
    assert layout.cover == (1, 1)
    np.testing.assert_array_equal(layout.paint(values), naive(cells, values))
    expected = (origin, origin + 9 * step, origin + 7 * step, origin)
    np.testing.assert_allclose(layout.extent, expected, rtol=0, atol=1e-9 * (1e6 + step))


def test_steps_may_differ_between_the_axes():
    cells, values = a_slide(3)
    layout = lay_out(cells * [224, 448], (224, 448))
    np.testing.assert_array_equal(layout.paint(values), naive(cells, values))
    assert layout.extent == (0, 9 * 224, 7 * 448, 0)


def test_coordinates_rounded_to_pixels_leave_no_seam():
    # 40x scanned at 0.2201 microns and tiled at 20x: the step is no whole number.
    step = 465.27
    cells = np.stack(np.divmod(np.arange(60 * 40), 40), axis=1)
    image = lay_out(np.round(cells * step), step).paint(np.arange(2400.0))
    assert image.shape == (40, 60)
    np.testing.assert_array_equal(image, np.arange(2400.0).reshape(60, 40).T)


def test_a_piece_off_the_lattice_is_drawn_at_its_place():
    main = np.stack(np.divmod(np.arange(20), 4), axis=1) * 256.0  # 5 columns, 4 rows
    piece = np.array([[7, 1], [8, 1], [8, 2]]) * 256.0 + [96, 160]  # 3/8 and 5/8 of a step off
    layout = lay_out(np.concatenate([main, piece]), 256)
    image = layout.paint(np.concatenate([np.zeros(20), [0.2, 0.5, 0.7]]))
    assert layout.extent == (0, 9 * 256 + 96, 4 * 256, 0)  # row 2 of the piece ends inside row 3
    assert image.shape == (4 * 8, 9 * 8 + 3)
    at = {value: np.argwhere(image == value) for value in (0.2, 0.5, 0.7)}
    assert all(len(found) == 64 for found in at.values())
    assert at[0.2].min(0).tolist() == [8 + 5, 56 + 3]
    assert at[0.5].min(0).tolist() == [8 + 5, 64 + 3]
    assert at[0.7].min(0).tolist() == [16 + 5, 64 + 3]
    assert np.isnan(image[:, 40:59]).all()


def test_overlapping_patches_are_averaged():
    cells, values = a_slide(5)
    image = lay_out(cells * 128, step=128, size=256).paint(values)
    np.testing.assert_allclose(image, naive(cells, values, cover=2), rtol=1e-14)


@settings(max_examples=25, deadline=None)
@given(
    st.integers(0, 10_000),
    st.floats(0.3, 3.7),
    st.floats(0.3, 3.7),
    st.sampled_from([200.0, 3_000.0, MOST_PIXELS]),  # pixels allowed: coarse, medium, fine
)
def test_overlaps_are_averaged_by_area(seed, wide, high, room):
    """The fast painting against loops, for patches of any size on coarse and on fine pixels."""
    cells, values = a_slide(seed, 14)
    values[3] = np.nan
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(raster, "MOST_PIXELS", room)
        layout = lay_out(cells * [30.0, 20.0], (30, 20), (wide * 30, high * 20))
    image = layout.paint(values)
    assert image.shape == layout.shape[::-1] and image.size < 1.7 * room + 100
    expected = area_mean(layout.pixel, np.array(layout.cover), values, layout.shape)
    np.testing.assert_allclose(image, expected, rtol=1e-12)
    # Pixels lie where the patches do.
    left, right, bottom, top = layout.extent
    unit = np.array([(right - left) / image.shape[1], (bottom - top) / image.shape[0]])
    np.testing.assert_allclose(layout.pixel * unit + [left, top], cells * [30, 20], atol=1e-6)


def test_half_a_patch_counts_half():
    # Patches of 1.5 steps: the second pixel of a step is half covered by the one before.
    layout = Layout(np.array([[0.0, 0.0], [1.0, 0.0]]), (1.5, 1.0), (0.0, 3.0, 1.0, 0.0))
    expected = [[0.2, (0.5 * 0.2 + 0.8) / 1.5, 0.8]]
    np.testing.assert_allclose(layout.paint(np.array([0.2, 0.8])), expected)


def test_patches_on_the_same_place_are_averaged():
    image = lay_out(np.array([[0, 0], [0, 0], [10, 0]]), 10).paint(np.array([0.2, 0.7, 0.9]))
    np.testing.assert_allclose(image, [[0.45, 0.9]])


def test_a_patch_without_value_keeps_its_place():
    layout = lay_out(np.array([[0, 0], [10, 0], [20, 0]]), 10)
    values = np.array([np.nan, 0.3, np.nan])
    np.testing.assert_array_equal(layout.paint(values), [[np.nan, 0.3, np.nan]])


def test_a_chain_is_a_strip():
    image = lay_out(np.array([[0.0], [5.0], [15.0]]), 5).paint(np.array([0.1, 0.2, 0.3]))
    np.testing.assert_array_equal(image, [[0.1, 0.2, np.nan, 0.3]])


def test_a_hundred_thousand_patches_take_seconds():
    rng = np.random.default_rng(0)
    cells = np.stack(np.divmod(rng.permutation(400 * 350)[:100_000], 350), axis=1)
    coords = cells * 256.0 + np.where(cells[:, :1] > 300, 100, 0) * (cells[:, :1] > 302)
    kept = (cells[:, 0] <= 300) | (cells[:, 0] > 302)
    start = time.process_time()
    layout = lay_out(coords[kept], 256)
    image = layout.paint(rng.random(kept.sum()))
    assert time.process_time() - start < 10
    assert image.size <= 1.1 * MOST_PIXELS


def test_pieces_far_apart_do_not_fill_the_memory():
    coords = np.array([[0, 0], [1, 0], [1_000_000, 900_000]])
    layout = lay_out(coords, 1)
    image = layout.paint(np.array([0.1, 0.3, 0.8]))
    assert image.size <= 1.1 * MOST_PIXELS
    assert image[0, 0] == pytest.approx(0.2) and image[-1, -1] == 0.8


@pytest.mark.parametrize(
    ("coords", "step", "message"),
    [
        (np.zeros((4, 3)), 1, "Draw a volume one plane at a time"),
        (np.zeros((0, 2)), 1, "at least one patch"),
        (np.array([[0.0, np.nan]]), 1, "NaN or infinite positions"),
        (np.zeros((1, 2)), 0, "step: expected a positive number"),
        (np.zeros((1, 2)), (1, 2, 3), "step: expected a positive number"),
    ],
)
def test_bad_geometry_is_refused(coords, step, message):
    with pytest.raises(ValueError, match=message):
        lay_out(coords, step)


def test_values_of_another_slide_are_refused():
    with pytest.raises(ValueError, match="one per patch, 2 in all, found 3"):
        lay_out(np.array([[0, 0], [1, 0]]), 1).paint(np.zeros(3))


# --- Figures --------------------------------------------------------------------------------------
def test_the_scale_of_probabilities_ends_above_the_largest_one():
    cells, values = a_slide(1)
    values = 0.9 * values / values.max()
    for factor, top in ((1.0, 1.0), (0.04, 0.05), (1e-7, 0.01)):
        image = heatmap(cells, factor * values, 1).axes[0].images[0]
        assert image.get_clim() == pytest.approx((0, top))
        np.testing.assert_array_equal(image.get_array(), factor * naive(cells, values))
    given = heatmap(cells, values, 1, limits=(0.0, 0.3)).axes[0].images[0]
    assert given.get_clim() == (0, 0.3)


def test_panels_are_the_named_layers():
    cells, values = a_slide(2)
    truth = (values > 0.6).astype(int)
    given = {"p_value": values, "doubt": values / 2, "unlike": values**2, "std": 2 + values}
    figure = heatmap(cells, values, 1, truth=truth, beside=True, **given)
    assert panel_titles(figure) == ["truth", "suspicion", "probability", "unlike", "doubt"]
    suspicion = figure.axes[1].images[1].get_array()  # grey tissue is beneath
    np.testing.assert_allclose(suspicion, naive(cells, -np.log10(np.maximum(values, 1e-3))))
    np.testing.assert_array_equal(figure.axes[4].images[0].get_array(), naive(cells, values / 2))
    assert [len(ax.collections) > 0 for ax in figure.axes[:5]] == [False] + 4 * [True]
    said = " ".join(words(figure))
    for name in ("suspicion:", "probability:", "unlike:", "doubt:"):
        assert name in said
    older = heatmap(cells, values, 1, std=2 + values)  # of a run without doubt and p-values
    assert panel_titles(older) == ["probability", "uncertainty"]
    assert "no p-values" in " ".join(words(older)) and "neighbours" in " ".join(words(older))


def test_grades_have_a_colour_each_and_a_panel_where_asked():
    cells, values = a_slide(2)
    p = np.column_stack([1 - values, 0.3 * values, 0.7 * values])
    layer = ClassLayer(("benign", "3", "4"), p, ordered=True)
    figure = heatmap(cells, values, 1, classes=layer)
    assert panel_titles(figure) == ["grade", "probability"]
    shown = figure.axes[0].images[2].get_array()  # one picture per grade
    expected = naive(cells, np.where(0.7 * values > 0.5, 1.0, np.nan))
    np.testing.assert_array_equal(np.isnan(shown.filled(np.nan)), np.isnan(expected))
    assert legend_of(figure).startswith("grade benign; grade 3; grade 4")
    every = heatmap(cells, values, 1, classes=layer, per_class=True)
    assert panel_titles(every) == ["grade", "probability", "P(3)", "P(4)"]
    own = every.axes[3].images[0]
    np.testing.assert_array_equal(own.get_array(), naive(cells, p[:, 2]))
    assert own.get_clim() == every.axes[1].images[0].get_clim()
    types = heatmap(cells, values, 1, classes=layer._replace(ordered=False))
    assert panel_titles(types) == ["type", "probability"]


def test_patches_like_negative_slides_are_transparent():
    shades = suspicion_colours()(np.linspace(0, 1, 7))
    assert shades[0, 3] == 0 and 0 < shades[1, 3] < 1 and (shades[3:, 3] == 1).all()


def test_sections_far_apart_are_moved_together_by_whole_steps():
    cells, values = a_slide(1)
    away = np.array([[0, 0], [900, 0.25], [0, 300]])
    far = np.concatenate([cells + by for by in away]) * 10.0
    moved, cuts = heatmaps.close_gaps(far, 10)
    assert [axis for axis, _ in cuts] == [0, 1]
    for k in range(3):  # sections keep their shape, and their place on the lattice
        own = slice(30 * k, 30 * k + 30)
        away = (far[own] - moved[own]) / 10
        np.testing.assert_allclose(away - away[0], 0, atol=1e-9)
        np.testing.assert_allclose(away, np.round(away), atol=1e-9)
    assert np.ptp(moved, axis=0).max() < 300
    figure = heatmap(far, np.tile(values, 3), 10)
    assert len(figure.axes[0].lines) == 2 and "empty glass" in legend_of(figure)
    near, cuts = heatmaps.close_gaps(cells * 10.0, 10)
    assert not cuts and np.array_equal(near, cells * 10.0)


def test_panels_of_wide_slides_are_stacked():
    cells, values = a_slide(1)
    wide = heatmap(cells * [4, 1], values, [4, 1], std=values)
    tops = [ax.get_position(original=True).y1 for ax in wide.axes if ax.images]
    assert tops[0] > tops[1]
    beside = heatmap(cells, values, 1, std=values)
    assert len({ax.get_position(original=True).y1 for ax in beside.axes if ax.images}) == 1


def test_the_uncertainty_can_share_a_scale():
    cells, values = a_slide(2)
    figure = heatmap(cells, values, 1, std=values, std_limits=(0.1, 4.0))
    assert figure.axes[1].images[0].get_clim() == (0.1, 4.0)


def test_unknown_truth_is_neither_outlined_nor_benign():
    cells, values = a_slide(4)
    truth = np.full(30, -1)
    figure = heatmap(cells, values, 1, truth=truth, beside=True)
    shown = [np.isfinite(layer.get_array().filled(np.nan)).sum() for layer in figure.axes[0].images]
    assert shown == [30, 0, 0]  # unknown, benign, malignant
    assert len(figure.axes[1].collections[0].get_segments()) == 0


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 10_000))
def test_the_outline_is_as_long_as_the_border(seed):
    cells, values = a_slide(seed)
    inside = values < 0.4
    ax = new_figure(1, 1).add_subplot()
    outline(ax, lay_out(cells * 3.0, 3), inside)
    drawn = ax.collections[0].get_segments()
    taken = {tuple(cell) for cell in cells[inside]}
    sides = sum(
        (x + dx, y + dy) not in taken
        for x, y in taken
        for dx, dy in ((1, 0), (-1, 0), (0, 1), (0, -1))
    )
    assert sum(np.linalg.norm(b - a) for a, b in drawn) == pytest.approx(3 * sides)


def test_the_same_map_has_the_same_bytes():
    cells, values = a_slide(6)
    truth = (values > 0.5).astype(int)
    first, second = (png(heatmap(cells, values, 1, std=values, truth=truth)) for _ in range(2))
    assert first == second
    assert first != png(heatmap(cells, values, 1, std=values, truth=1 - truth))


def test_slides_are_compared_in_one_line_where_they_fit():
    tall = np.stack(np.divmod(np.arange(120), 30), axis=1)  # 4 columns, 30 rows
    values = np.linspace(0, 1, 120)
    truth = (values > 0.8).astype(int)

    def lines(coords: np.ndarray) -> int:
        slide = SlideMaps("one", coords, 1, truth, [values, values**2])
        figure = comparison([slide, slide, slide], ["A", "B"])
        panels = [ax for ax in figure.axes if ax.images]
        assert len(panels) == 9
        np.testing.assert_array_equal(
            panels[2].images[0].get_array(), lay_out(coords, 1).paint(values**2)
        )
        return len({round(ax.get_position(original=True).y0, 6) for ax in panels})

    assert lines(tall) == 1
    assert lines(tall[:, ::-1]) == 3


def test_slides_without_truth_and_with_overlap_are_compared():
    cells, values = a_slide(6)
    slide = SlideMaps("one", cells * 2.0, 2, None, [values, values**2], 3)
    figure = comparison([slide], ["A", "B"], width=5.0)
    panels = [ax for ax in figure.axes if ax.images]
    assert len(panels) == 2 and not any(t.get_text() == "truth" for t in figure.texts)
    layout = lay_out(cells * 2.0, 2, 3)
    for ax, expected in zip(panels, (values, values**2)):
        np.testing.assert_array_equal(ax.images[0].get_array(), layout.paint(expected))


def test_what_is_no_probability_is_not_called_one():
    cells, values = a_slide(6)
    slide = SlideMaps("one", cells, 1, None, [values])
    words = [
        [ax.get_xlabel() for ax in comparison([slide], ["A"], **shown).axes]
        for shown in ({}, {"shown": "attention"})
    ]
    assert "probability that a patch is positive" in words[0]
    assert "attention" in words[1] and "probability that a patch is positive" not in words[1]


# --- Over the slide, flags, uncertainty as opacity, scale bar -------------------------------------
def a_thumbnail(mpp: tuple[float, float] | None = (0.5, 0.5)) -> Thumbnail:
    """60 x 50 pixels of noise over a region of 12 x 10 units that begins at (-1, -2)."""
    noise = np.random.default_rng(0).integers(0, 256, (50, 60, 3), dtype=np.uint8)
    return Thumbnail(noise, (-1.0, 11.0, 8.0, -2.0), mpp)


def panel_titles(figure) -> list[str]:
    return [ax.get_title() for ax in figure.axes if ax.get_title()]


def words(figure) -> list[str]:
    return [t.get_text() for ax in figure.axes for t in ax.texts] + [
        t.get_text() for t in figure.texts
    ]


def legend_of(figure) -> str:
    return "; ".join(t.get_text() for legend in figure.legends for t in legend.get_texts())


def test_a_map_lies_over_the_slide_at_its_place():
    cells, values = a_slide(7)
    slide = a_thumbnail()
    figure = heatmap(cells, values, 1, std=values, slide=slide)
    assert panel_titles(figure) == ["slide", "probability", "uncertainty"]
    np.testing.assert_array_equal(figure.axes[0].images[0].get_array(), slide.image)
    for ax in figure.axes[:3]:
        assert ax.get_xlim() == (-1, 11) and ax.get_ylim() == (8, -2)
        assert tuple(ax.images[0].get_extent()) == slide.extent
    beneath, above = figure.axes[1].images
    assert beneath.get_array().min() >= 128  # greys so light that colours stay what they are
    assert above.get_clim()[0] == 0 and tuple(above.get_extent()) == (0, 9, 7, 0)
    np.testing.assert_array_equal(above.get_array(), naive(cells, values))


def test_opacity_follows_certainty():
    cells, values = a_slide(8)
    std = np.random.default_rng(1).uniform(0.2, 0.9, 30)
    std[4] = np.nan
    figure = heatmap(cells, values, 1, std=std, std_limits=(0.1, 0.8), uncertainty="opacity")
    assert panel_titles(figure) == ["probability"]
    image = figure.axes[0].images[0]
    doubt = np.clip((naive(cells, np.nan_to_num(std, nan=0.8)) - 0.1) / 0.7, 0, 1)
    expected = 1 - (1 - heatmaps.FAINTEST) * doubt
    tissue = np.isfinite(expected)
    np.testing.assert_allclose(image.get_alpha()[tissue], expected[tissue], rtol=1e-12)
    assert [ax.get_xlabel() for ax in figure.axes[1:]] == [
        "probability",
        "standard deviation, as opacity",
    ]


def test_marks_are_hatched_and_counted():
    cells, values = a_slide(9)
    flagged = values > 0.7
    told = {"flagged": flagged, "rate": 0.1, "title": "slide A", "about": ["is positive"]}
    figure = heatmap(cells, values, 1, p_value=values, **told)
    expected = cells[flagged][:, None] + np.array([[0, 1], [1, 0]])  # a diagonal of each patch
    for ax in figure.axes[:2]:
        for lines in ax.collections:
            np.testing.assert_allclose(np.array(lines.get_segments()), expected)
    counted = f"30 patches, {flagged.sum()} marked at a false discovery rate of 0.1"
    assert words(figure)[:3] == ["slide A", "is positive", counted]
    assert "hatched: marked patches" in legend_of(figure)
    none = heatmap(cells, values, 1, flagged=np.zeros(30, dtype=bool), title="slide A")
    assert words(none)[1] == "30 patches, 0 marked" and not legend_of(none)


def test_flags_and_truth_have_lines_of_their_own():
    cells, values = a_slide(9)
    figure = heatmap(cells, values, 1, truth=(values > 0.4).astype(int), flagged=values > 0.7)
    colours = [tuple(lines.get_colors()[0]) for lines in figure.axes[0].collections]
    assert len(set(colours)) == 3  # the truth, and a white line on a dark one
    assert "labelled positive" in legend_of(figure)


@pytest.mark.parametrize(
    ("mpp", "text", "length"),
    [(0.5, "1 µm", 2), (37.0, "100 µm", 100 / 37), (810.0, "2 mm", 2 / 0.81)],
)
def test_the_scale_bar_is_as_long_as_it_says(mpp, text, length):
    cells, values = a_slide(3)
    figure = heatmap(cells, values, 1, mpp=mpp)
    assert words(figure)[0] == text
    figure.draw_without_rendering()
    (line,) = figure.axes[0].lines
    ends = line.get_transform().transform(line.get_xydata())[:, 0]
    left, right = figure.axes[0].transData.transform([(0, 0), (length, 0)])[:, 0]
    assert np.diff(ends)[0] == pytest.approx(right - left)


def test_the_slide_gives_the_scale_and_without_one_there_is_no_bar():
    cells, values = a_slide(3)
    assert words(heatmap(cells, values, 1, slide=a_thumbnail()))[0] == "2 µm"
    figure = heatmap(cells, values, 1, slide=a_thumbnail(None))
    assert "µm" not in " ".join(words(figure)) and not any(ax.lines for ax in figure.axes)


def test_every_patch_has_a_dot():
    cells, values = a_slide(3)
    assert heatmaps.sharp_dpi(heatmap(cells, values, 1)) == 150
    wide = np.stack(np.divmod(np.arange(500 * 400), 400), axis=1)
    figure = heatmap(wide, np.zeros(len(wide)), 1, box=(2.0, 2.0))
    assert heatmaps.sharp_dpi(figure) == pytest.approx(250)


def test_a_long_name_stays_on_the_figure():
    cells, values = a_slide(3)
    figure = heatmap(cells, values, 1, title="TCGA-" + "ABCDEF0123-" * 9)
    figure.draw_without_rendering()
    assert figure.texts[0].get_window_extent().x1 <= figure.bbox.x1


def test_a_hundred_thousand_patches_are_drawn_in_seconds():
    rng = np.random.default_rng(0)
    cells = np.stack(np.divmod(rng.permutation(400 * 350)[:100_000], 350), axis=1)
    values = rng.random(100_000)
    start = time.process_time()
    figure = heatmap(cells * 256, values, 256, std=values, flagged=values > 0.9, box=(4.2, 4.8))
    picture = png(figure, heatmaps.sharp_dpi(figure))
    assert time.process_time() - start < 20
    assert len(picture) < 8e6


def test_nothing_is_left_in_pyplot():
    cells, values = a_slide(0)
    before = plt.get_fignums()
    heatmap(cells, values, 1)
    assert plt.get_fignums() == before


def test_layouts_are_plain_data():
    layout = lay_out(np.array([[0, 0], [2, 0]]), 2)
    assert layout == Layout(layout.pixel, (1, 1), (0.0, 4.0, 2.0, 0.0))
    assert heatmaps.FINE > 1
