"""Figures: the numbers that are drawn, and bytes that do not change."""

import matplotlib.pyplot as plt
import numpy as np
import pytest
from scipy.stats import binomtest
from sklearn.metrics import roc_auc_score

from gpmil import plots


@pytest.fixture
def cohort() -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(4)
    labels = (rng.random(61) < 0.4).astype(np.int64)
    return labels, np.clip(rng.normal(0.35 + 0.2 * labels, 0.2), 0, 1)


def test_roc_shows_the_auc_of_every_score(cohort):
    labels, score = cohort
    figure = plots.roc(labels, {"good": score, "bad": 1 - score, "long": score**3})
    texts = [text.get_text() for text in figure.axes[0].get_legend().get_texts()]
    auc = roc_auc_score(labels, score)
    assert texts == [f"good: {auc:.3f}", f"bad: {1 - auc:.3f}", f"long: {auc:.3f}"]


def test_successive_series_look_different():
    looks = plots._series(4)
    assert len(set(looks)) == 4


def test_histograms_count_every_known_label(cohort):
    labels, score = cohort
    labels = np.where(np.arange(61) < 5, -1, labels)
    figure = plots.score_histograms(labels, score, things="patches")
    texts = [text.get_text() for text in figure.axes[0].get_legend().get_texts()]
    negative, positive = (int((labels == value).sum()) for value in (0, 1))
    assert negative + positive == 56
    assert texts == [f"negative ({negative} patches)", f"positive ({positive} patches)"]


def test_reliability_groups_all_slides(cohort):
    labels, score = cohort
    (points,) = [
        line for line in plots.reliability(labels, score).axes[0].lines if line.get_marker() == "o"
    ]
    x, y = points.get_data()
    sizes = np.array([13, 12, 12, 12, 12])
    assert np.sum(x * sizes) == pytest.approx(score.sum())
    assert np.sum(y * sizes) == pytest.approx(labels.sum())
    assert (np.diff(x) > 0).all()


@pytest.mark.parametrize(("k", "n"), [(0, 7), (3, 8), (29, 40), (12, 12)])
def test_wilson_agrees_with_scipy(k, n):
    low, high = plots.wilson(np.array([k / n]), np.array([n]), z=1.959963984540054)
    expected = binomtest(k, n).proportion_ci(method="wilson")
    assert (low[0], high[0]) == pytest.approx((expected.low, expected.high), abs=1e-12)


def test_negative_slides_stand_apart_from_lesions_of_one_patch():
    figure = plots.lesion_sizes(np.array([0.2, 0.7, 0.9]), np.array([0, 1, 30]))
    ax = figure.axes[0]
    assert [label.get_text() for label in ax.get_xticklabels()] == ["0", "1", "2", "5", "10", "20"]
    negative, positive = (line.get_data() for line in ax.lines[1:])
    assert negative[0][0] < 1 and negative[1].tolist() == [0.2]
    assert positive[0].tolist() == [1, 30] and positive[1].tolist() == [0.7, 0.9]


def test_patches_are_sorted_in_rows_of_models():
    rng = np.random.default_rng(0)
    slides = [rng.random(9), rng.random(14), rng.random(5)]
    figure = plots.sorted_patches({"A": slides, "B": [s**2 for s in slides]}, ["x", "y", "z"])
    assert len(figure.axes) == 6
    assert [ax.get_title() for ax in figure.axes[:3]] == ["x", "y", "z"]
    assert [ax.get_ylabel() for ax in figure.axes[::3]] == ["A", "B"]
    (bars,) = figure.axes[4].collections
    heights = bars.get_paths()[0].vertices[:, 1]
    assert heights.max() == pytest.approx((slides[1] ** 2).max())


def test_given_axes_are_drawn_on(cohort):
    labels, score = cohort
    figure = plots.new_figure(4, 4)
    axes = figure.subplots(2, 2).ravel()
    assert plots.roc(labels, {"a": score}, ax=axes[0]) is figure
    assert plots.score_histograms(labels, score, ax=axes[1]) is figure
    assert plots.reliability(labels, score, ax=axes[2]) is figure
    assert plots.lesion_sizes(score, labels, ax=axes[3]) is figure
    assert all(ax.has_data() for ax in axes)


def test_the_same_figure_has_the_same_bytes_and_no_stamp(cohort):
    labels, score = cohort
    first, second = (plots.png(plots.roc(labels, {"a": score})) for _ in range(2))
    assert first == second
    assert b"tEXt" not in first and b"tIME" not in first and b"Matplotlib" not in first


def test_nothing_is_left_in_pyplot(cohort):
    before = plt.get_fignums()
    plots.reliability(*cohort)
    assert plt.get_fignums() == before
