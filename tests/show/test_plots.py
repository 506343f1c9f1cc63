"""Figures: the numbers that are drawn, and bytes that do not change."""

import matplotlib.pyplot as plt
import numpy as np
import pytest
from matplotlib.figure import Figure
from scipy.stats import binomtest
from sklearn.metrics import roc_auc_score

from gpmil import VGPMILPR, Bags
from gpmil.decide.metrics import reliability_curve
from gpmil.show import heatmaps, plots


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


def test_reliability_draws_the_curve_of_the_metrics(cohort):
    labels, score = cohort
    ax = plots.reliability(labels, score).axes[0]
    (points,) = [line for line in ax.lines if line.get_marker() == "o"]
    curve = reliability_curve(labels, score, n_bins=5)
    assert np.array_equal(points.get_data(), [curve.predicted, curve.observed])
    bars = np.array(ax.collections[0].get_segments())
    expected = np.stack([[curve.predicted] * 2, [curve.low, curve.high]])
    assert np.array_equal(bars.T, expected)


def test_reliability_groups_all_slides(cohort):
    labels, score = cohort
    ax = plots.reliability(labels, score).axes[0]
    (points,) = [line for line in ax.lines if line.get_marker() == "o"]
    x, y = points.get_data()
    sizes = np.array([13, 12, 12, 12, 12])
    assert np.sum(x * sizes) == pytest.approx(score.sum())
    assert np.sum(y * sizes) == pytest.approx(labels.sum())
    assert (np.diff(x) > 0).all()


@pytest.mark.parametrize(("k", "n"), [(0, 7), (3, 8), (29, 40), (12, 12)])
def test_reliability_bars_agree_with_scipy(k, n):
    labels = (np.arange(n) < k).astype(np.int64)
    ax = plots.reliability(labels, np.full(n, 0.3), bins=3).axes[0]
    (bar,) = ax.collections[0].get_segments()
    expected = binomtest(k, n).proportion_ci(method="exact")
    assert bar[:, 1] == pytest.approx([expected.low, expected.high], abs=1e-12)


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
    (bars,) = figure.axes[4].patches
    heights, edges, _ = bars.get_data()
    assert heights == pytest.approx(np.sort(slides[1] ** 2))
    assert np.diff(edges) == pytest.approx(np.ones(14))  # whole bars, the first and the last too


def trial(objective: float, kernel: str = "rbf", **settings: float) -> dict:
    given = {"variance": 9.0, "lengthscale": 16.0, "mean": -4.0, "coupling": 1.0} | settings
    return {"kernel": kernel, **given, "score": objective + 0.1, "objective": objective}


TRIALS = [
    trial(-0.41),
    trial(-0.33, variance=30.0, lengthscale=22.0, coupling=0.4),
    trial(-0.28, variance=18.0, lengthscale=19.0, coupling=0.7),
    trial(-0.31, variance=14.0, lengthscale=18.0, coupling=0.9),
]


def drawn(ax) -> np.ndarray:
    """Where the trials are, in order."""
    return np.concatenate([points.get_offsets() for points in ax.collections])


def ring(ax) -> list[float]:
    (line,) = [line for line in ax.lines if line.get_markerfacecolor() == "none"]
    return [float(v[0]) for v in line.get_data()]


def test_tuning_has_a_panel_for_every_learned_setting():
    figure = plots.tuning(TRIALS)
    first, *others = figure.axes
    assert [ax.get_xlabel() for ax in others] == ["variance", "length scale", "coupling λ"]
    assert all(ax.get_xscale() == "log" for ax in others)
    assert drawn(first).tolist() == [[i + 1, t["objective"]] for i, t in enumerate(TRIALS)]
    labels = [tick.get_text() for tick in others[2].get_xticklabels()]
    assert "0.5" in labels and "1" in labels  # plain numbers
    for ax, key in zip(others, ["variance", "lengthscale", "coupling"]):
        assert drawn(ax).tolist() == [[t[key], t["objective"]] for t in TRIALS]


def test_tuning_rings_the_best_objective_not_the_best_score():
    trials = [*TRIALS, trial(-0.5, mean=-7.0) | {"score": 0.0}]
    first, *others = plots.tuning(trials).axes
    assert [ring(ax)[0] for ax in others] == [18.0, 19.0, -4.0, 0.7]
    assert [ring(ax)[1] for ax in (first, *others)] == [-0.28] * 5
    assert first.get_title(loc="left") == "best: trial 3 of 5"
    assert [ax.get_title(loc="left") for ax in others] == [
        f"best: {value}" for value in ("18", "19", "-4", "0.7")
    ]
    assert others[2].get_xlabel() == "prior mean" and others[2].get_xscale() == "linear"


def test_tuning_of_kernels_alone_has_one_panel():
    trials = [trial(-0.4, "rbf"), trial(-0.3, "matern52"), trial(-0.6, "linear")]
    (ax,) = plots.tuning(trials).axes
    texts = [text.get_text() for text in ax.get_legend().get_texts()]
    assert texts == ["rbf", "matern52", "linear"]
    assert ring(ax) == [2, -0.3]


def test_tuning_draws_what_a_model_recorded():
    rng = np.random.default_rng(2)
    x = [rng.normal(size=(4, 2)) + 2 * (b % 2) * (np.arange(4) < 2)[:, None] for b in range(10)]
    bags = Bags.from_arrays(x, labels=[b % 2 for b in range(10)])
    model = VGPMILPR(lengthscale=2.0, n_inducing=6, tuning_budget=8, random_state=0).fit(bags)
    first, *others = plots.tuning(model.tuning_trace_).axes
    assert [ax.get_xlabel() for ax in others] == ["variance", "prior mean"]
    assert [ring(ax)[0] for ax in others] == [model.variance_, model.mean_]
    assert len(drawn(first)) == len(model.tuning_trace_)


@pytest.mark.parametrize("trace", [None, []])
def test_tuning_without_trials_says_why(trace):
    with pytest.raises(ValueError, match=r"nothing was learned.*\"auto\""):
        plots.tuning(trace)


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


def test_a_notebook_shows_the_figure(cohort):
    labels, score = cohort
    places = np.array([[0.0, 0.0], [0.0, 1.0]])
    heat = heatmaps.heatmap(places, np.array([0.1, 0.9]), 1.0)
    for figure in (plots.roc(labels, {"a": score}), heat):
        assert isinstance(figure, Figure)
        assert figure._repr_png_().startswith(b"\x89PNG") and not plt.get_fignums()
