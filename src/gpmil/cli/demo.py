"""`gpmil demo`: simulated slides from beginning to end, with nothing to download.

Slides are simulated, models are fitted to slide labels alone and judged on slides of other
patients, where the truth is known for every patch. What is found is printed and written as it
is, with a yardstick beside it: how far a classifier gets that was shown the patch labels.
"""

import gzip
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from jaxtyping import Float, Int
from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table as TerminalTable
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import (
    accuracy_score,
    average_precision_score,
    f1_score,
    log_loss,
    roc_auc_score,
)
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from threadpoolctl import threadpool_limits

from gpmil import simulate
from gpmil.cli import view as viewer
from gpmil.cli.options import progress
from gpmil.data.bags import Bags
from gpmil.files.whole import json_bytes, write_whole
from gpmil.models import VGPMILPR, VGPMILPRI, InstancePredictions, paper_settings
from gpmil.models.base import log_odds, package_versions
from gpmil.runs.files import LEVEL, METRICS, PATCHES, PREDICTIONS, patch_path
from gpmil.runs.predict import patch_table
from gpmil.runs.workspace import csv_bytes, run_folder
from gpmil.show import heatmaps, plots
from gpmil.show.report import RESEARCH, Picture, Section, Table, page
from gpmil.viewer import serve

FEWEST = 8  # slides to train on
BUDGET = 22  # fits' worth of tuning: the demo is to be over soon, and more changes little here
SMALL = 5  # malignant patches; a smaller lesion is easily missed
SHOWN_LARGEST = 3  # slides of the overview
SHOWN_NEGATIVE = 6  # negative slides whose patches are drawn sorted
MAP_DPI = 144
DIGITS = "%.9g"  # of numbers in tables: what does not depend on the number of threads

PAPER, SUITED = "paper's settings", "learned settings"


@dataclass(frozen=True)
class Judged:
    """A fitted model and what it says of the held-out slides."""

    name: str
    settings: str
    model: VGPMILPR
    log_odds: Float[np.ndarray, " B"]
    probability: Float[np.ndarray, " B"]
    error: Float[np.ndarray, " B"]  # standard error of the probability as a computed number
    patches: InstancePredictions
    metrics: dict[str, float]

    @property
    def title(self) -> str:
        """Model and settings in words."""
        return f"{self.name}, {self.settings}"


def run(
    out: Path,
    seed: int,
    n_train: int,
    view: bool = False,
    port: int = 0,
    browser: bool = True,
) -> None:
    """The whole demonstration; nothing is left in `out` unless it ran to the end.

    With `view` the held-out slides are then shown in the browser, until Ctrl-C.
    """
    _check(seed, n_train)
    if view:
        serve.require_packages()
        viewer.check_port(port)
    elif port or not browser:
        raise ValueError("--port and --no-browser are about the viewer: add --view.")
    n_test = max(2, n_train // 3)
    models = _models(seed)
    config = {"command": "demo", "seed": seed, "bags": n_train, "held_out": n_test}
    config |= {"models": [_settings(*entry) for entry in models], "versions": _versions()}
    with (
        run_folder(out, config) as folder,
        progress(4 + len(models)) as step,
        # Matrices this small gain nothing from more threads, and lose much on a busy machine.
        threadpool_limits(limits=1),
    ):
        step(f"simulating {n_train} slides to train on and {n_test} held-out ones")
        train = simulate.cohort(n_train, seed=seed, part=0)
        test = simulate.cohort(n_test, seed=seed, part=1)
        step("yardstick: a classifier trained on the patch labels")
        yardstick = _yardstick(train, test)
        judged = []
        for name, settings, model in models:
            step(f"fitting and predicting: {name}, {settings}")
            judged.append(_judge(name, settings, model.fit(train), test))
        facts = _facts(test, judged, yardstick)
        _write_tables(folder, judged, train, test, yardstick)
        step(f"heat maps of {n_test} slides")
        maps = _write_maps(folder, judged[0], test)
        step("pictures and the page")
        pictures = _write_pictures(folder, judged, test)
        html = _page(seed, train, test, judged, facts, pictures, maps)
        (folder / "report.html").write_text(html, encoding="utf-8", newline="\n")
    _print(judged, facts, out)
    if view:
        viewer.run([out], port=port, browser=browser)


def _check(seed: int, n_train: int) -> None:
    if n_train < FEWEST:
        raise ValueError(f"--bags must be at least {FEWEST} slides, got {n_train}.")
    if not 0 <= seed < 2**32:
        raise ValueError(f"--seed must lie between 0 and {2**32 - 1}, got {seed}.")


# --- Models and metrics ---------------------------------------------------------------------------
def _models(seed: int) -> list[tuple[str, str, VGPMILPR]]:
    """The models that are compared, the one to look at first."""
    kernel = ("variance", "lengthscale", "mean")
    paper = {k: v for k, v in paper_settings().items() if k in kernel}
    return [
        ("VGPMIL-PR-I", SUITED, VGPMILPRI(tuning_budget=BUDGET, random_state=seed)),
        ("VGPMIL-PR", SUITED, VGPMILPR(tuning_budget=BUDGET, random_state=seed)),
        (
            "VGPMIL-PR-I",
            PAPER,
            VGPMILPRI(coupling=paper_settings()["coupling"], random_state=seed, **paper),
        ),
        ("VGPMIL-PR", PAPER, VGPMILPR(random_state=seed, **paper)),
    ]


def _judge(name: str, settings: str, model: VGPMILPR, test: Bags) -> Judged:
    # One estimate of log P(all patches negative) serves all three numbers of a slide.
    found = model.predict_all(test)
    log_negative, patches = found.log_proba_negative, found.instances
    assert patches is not None  # every model here predicts patches
    odds, probability = log_odds(log_negative), -np.expm1(log_negative)
    error = np.exp(log_negative) * found.error
    metrics = _slide_metrics(test.labels, odds, probability)
    metrics |= _patch_metrics(test.instance_labels, patches.probability)
    return Judged(name, settings, model, odds, probability, error, patches, metrics)


def _slide_metrics(
    labels: Int[np.ndarray, " B"],
    log_odds: Float[np.ndarray, " B"],
    probability: Float[np.ndarray, " B"],
) -> dict[str, float]:
    return {
        "slide_accuracy": float(accuracy_score(labels, log_odds > 0)),
        "slide_auc": float(roc_auc_score(labels, log_odds)),
        "slide_log_loss": float(log_loss(labels, probability, labels=[0, 1])),
    }


def _patch_metrics(
    labels: Int[np.ndarray, " N"], probability: Float[np.ndarray, " N"]
) -> dict[str, float]:
    marked = probability > 0.5
    return {
        "patch_auc": float(roc_auc_score(labels, probability)),
        "patch_average_precision": float(average_precision_score(labels, probability)),
        "patch_accuracy_at_half": float(accuracy_score(labels, marked)),
        "patch_f1_at_half": float(f1_score(labels, marked, zero_division=0)),
        "patches_above_half": int(marked.sum()),
        "malignant_patches_above_half": int(marked[labels == 1].sum()),
        "largest_patch_probability": float(probability.max()),
    }


def _yardstick(train: Bags, test: Bags) -> dict[str, float]:
    """Logistic regression on the true patch labels; a slide scores as its highest patch."""
    model = make_pipeline(StandardScaler(), LogisticRegression(C=0.01, max_iter=500))
    score = model.fit(train.features, train.instance_labels).decision_function(test.features)
    highest = [piece.max() for piece in test.split(score)]
    return {
        "slide_auc": float(roc_auc_score(test.labels, highest)),
        "patch_auc": float(roc_auc_score(test.instance_labels, score)),
        "patch_average_precision": float(average_precision_score(test.instance_labels, score)),
    }


def _lesion(bags: Bags) -> Int[np.ndarray, " B"]:
    """Number of malignant patches of each slide."""
    return np.add.reduceat(bags.instance_labels, bags.offsets[:-1])


def _facts(test: Bags, judged: Sequence[Judged], yardstick: dict[str, float]) -> list[str]:
    """What was found, in sentences that hold whatever the numbers are."""
    best, plain, paper = (j.metrics for j in judged[:3])
    lesion = _lesion(test)[test.labels == 1]
    malignant = int(test.instance_labels.sum())
    benign = 1 - malignant / test.n_instances
    return [
        f"How hard this cohort is: {(lesion < SMALL).sum()} of the {len(lesion)} "
        f"positive held-out slides have fewer than {SMALL} malignant patches, in slides of "
        f"{np.median(test.sizes):.0f} patches (median). For scale, a logistic regression trained "
        "on the true patch labels, which the models here never see, reaches AUC "
        f"{yardstick['slide_auc']:.3f} for slides (by their highest patch) and "
        f"{yardstick['patch_auc']:.3f} for patches (average precision "
        f"{yardstick['patch_average_precision']:.3f}).",
        f"With {len(test)} held-out slides an accuracy has a standard error of about "
        f"{0.5 / np.sqrt(len(test)):.2f}, and another seed can change the order of the rows: do "
        "not rank models by one run of this demo.",
        f"The threshold 0.5 says little about patches. With the {PAPER}, VGPMIL-PR-I puts "
        f"{_count(paper['malignant_patches_above_half'])} of {malignant} malignant patches above "
        f"it (largest probability {paper['largest_patch_probability']:.2f}), and with the "
        f"{SUITED} {_count(best['malignant_patches_above_half'])}. A few slightly suspicious "
        "patches already explain a positive slide, so probabilities stay low; their order is what "
        f"informs (AUC, average precision). Calling every patch benign has accuracy {benign:.3f}.",
        f"The {SUITED} come from the labels of the training slides alone: they make every slide's "
        f"label likeliest under the fit without that slide. {_learned(judged[0].model)} Against "
        f"the {PAPER} (VGPMIL-PR-I): {_changes(paper, best)}.",
        f"Coupling neighbours ({SUITED}, VGPMIL-PR against VGPMIL-PR-I): "
        f"{_changes(plain, best)}. Coupling steadies patches through their neighbours; a lesion of "
        "one or two patches can be smoothed away by it.",
    ]


def _learned(model: VGPMILPR) -> str:
    return (
        f"Found: variance {model.variance_:.3g}, length {model.lengthscale_:.3g}, prior mean "
        f"{model.mean_:.3g}, coupling {model.coupling_:.3g}, after "
        f"{len(model.tuning_trace_ or [])} trials (mean log likelihood of a slide left out: "
        f"{model.loo_log_likelihood_:.3f}; {-np.log(2):.3f} is a coin)."
    )


def _changes(before: dict[str, float], after: dict[str, float]) -> str:
    shown = {
        "patch average precision": "patch_average_precision",
        "patch AUC": "patch_auc",
        "slide AUC": "slide_auc",
        "slide log loss": "slide_log_loss",
    }
    return ", ".join(f"{name} {before[k]:.3f} → {after[k]:.3f}" for name, k in shown.items())


def _count(n: float) -> str:
    return "none" if n == 0 else f"{n:.0f}"


def _settings(name: str, settings: str, model: VGPMILPR) -> dict[str, Any]:
    """A model's settings as they are written to config.json and shown."""
    keys = ("coupling", "variance", "lengthscale", "mean", "kernel", "n_inducing", "solver")
    given = {key: getattr(model, key, 0.0) for key in keys}
    return {"model": name, "settings": settings, **given}


def _versions() -> dict[str, str]:
    return package_versions() | {"matplotlib": version("matplotlib")}


# --- Files ----------------------------------------------------------------------------------------
def _write_tables(
    folder: Path, judged: Sequence[Judged], train: Bags, test: Bags, yardstick: dict[str, float]
) -> None:
    """What every run of gpmil has, of the model to look at first."""
    main = judged[0]
    main.model.save(folder / "model")
    low, high = main.model.predict_interval(test, level=LEVEL)
    predictions = pd.DataFrame(
        {
            "slide": test.names,
            "patient": test.groups,
            "probability": main.probability,
            "low": low,
            "high": high,
            "log_odds": main.log_odds,
            "error": main.error,
            "decision": "",
            "label": test.labels,
        }
    )
    (folder / PREDICTIONS).write_bytes(csv_bytes(predictions))
    (folder / PATCHES).mkdir()
    for slide, found in zip(test.names, main.patches.split()):
        path = patch_path(folder, str(slide))
        path.write_bytes(gzip.compress(csv_bytes(patch_table(found)), mtime=0))
    splits = [
        pd.DataFrame({"slide": bags.names, "patient": bags.groups, "part": part})
        for part, bags in (("train", train), ("test", test))
    ]
    (folder / "splits.csv").write_bytes(csv_bytes(pd.concat(splits)))
    every = [{"model": j.name, "settings": j.settings, **_rounded(j.metrics)} for j in judged]
    numbers = {"models": every, "yardstick": _rounded(yardstick)}
    write_whole(folder / METRICS, json_bytes(numbers))


def _rounded(metrics: dict[str, float]) -> dict[str, float]:
    return {k: v if isinstance(v, int) else float(DIGITS % v) for k, v in metrics.items()}


def _write_maps(folder: Path, main: Judged, test: Bags) -> list[Picture]:
    """A heat map of every held-out slide, the worst predicted first."""
    (folder / "heatmaps").mkdir()
    limits = (float(main.patches.std.min()), float(main.patches.std.max()))
    patches, lesion = main.patches.split(), _lesion(test)
    # The loss of a slide, -log p(y): log(1 + exp(-+ log odds)).
    loss = np.logaddexp(0, np.where(test.labels == 1, -main.log_odds, main.log_odds))
    pictures = []
    for b in np.argsort(-loss, kind="stable"):
        bag, name = test[int(b)], str(test.names[b])
        figure = heatmaps.heatmap(
            *_places(bag, patches[b].probability),
            std=patches[b].std,
            truth=bag.instance_labels,
            beside=True,
            std_limits=limits,
        )
        png = plots.png(figure, MAP_DPI)
        (folder / "heatmaps" / f"{name}.png").write_bytes(png)
        lesions = _plural(int(lesion[b]), "malignant patch", "malignant patches")
        probability = _shown(float(main.probability[b]))
        caption = f"{lesions} of {bag.n_instances}; predicted probability {probability}"
        alt = f"Heat maps of {name}: truth, prediction, uncertainty"
        title = f"{name}, {'positive' if test.labels[b] else 'negative'}"
        pictures.append(Picture(png, alt, _css_width(figure), title, caption))
    return pictures


def _shown(probability: float) -> str:
    """Three digits, but never a certainty.

    >>> _shown(0.12345), _shown(0.99999), _shown(1e-9)
    ('0.123', '> 0.999', '< 0.001')
    """
    if probability > 0.999:
        return "> 0.999"
    return f"{probability:.3f}" if probability >= 0.001 else "< 0.001"


def _plural(n: int, one: str, many: str) -> str:
    return f"{n} {one if n == 1 else many}"


def _css_width(figure: Figure) -> int:
    return round(float(figure.get_size_inches()[0]) * 96)


def _write_pictures(folder: Path, judged: Sequence[Judged], test: Bags) -> dict[str, Picture]:
    """The figures of the page by name; each is also written as a file."""
    main, plain = judged[:2]
    truth, lesion = test.instance_labels, _lesion(test)
    figures = {
        "overview": _overview(plain, main, test),
        "slides-roc": plots.roc(test.labels, {j.title: j.log_odds for j in judged}),
        "slides-histogram": plots.score_histograms(test.labels, main.probability),
        "slides-reliability": plots.reliability(test.labels, main.probability),
        "slides-lesion-size": plots.lesion_sizes(main.probability, lesion),
        "patches-roc": plots.roc(truth, {j.title: j.patches.probability for j in judged}),
        "patches-histogram": plots.score_histograms(
            truth, main.patches.probability, things="patches", log=True, bins=20
        ),
        "patches-negative-slides": _negative_slides(plain, main, test),
    }
    (folder / "pictures").mkdir()
    pictures = {}
    for name, figure in figures.items():
        title, caption = CAPTIONS[name]
        png = plots.png(figure)
        path = folder if name == "overview" else folder / "pictures"
        (path / f"{name}.png").write_bytes(png)
        pictures[name] = Picture(png, title, _css_width(figure), title, caption)
    return pictures


CAPTIONS = {
    "overview": (
        "Truth and prediction side by side",
        f"The held-out slides with the largest lesions; {SUITED}. The lesions are outlined.",
    ),
    "slides-roc": ("ROC of slides", "Area under the curve (AUC) in the legend."),
    "slides-histogram": ("Probabilities of slides", "By true label."),
    "slides-reliability": (
        "Reliability of slides",
        "Five groups of slides by predicted probability, with 95 % intervals. On the line, "
        "probabilities are as good as frequencies.",
    ),
    "slides-lesion-size": (
        "Probability and lesion size",
        "Each dot is a slide; negative ones have no malignant patch.",
    ),
    "patches-roc": ("ROC of patches", "Learned from slide labels alone."),
    "patches-histogram": ("Probabilities of patches", "By true label, counts on a log scale."),
    "patches-negative-slides": (
        "Patches of negative slides, sorted by probability",
        f"The negative slides with the highest probability; {SUITED}. None of their patches is "
        "malignant.",
    ),
}


def _overview(plain: Judged, main: Judged, test: Bags) -> Figure:
    """The slides with the largest lesions, where there is most to see."""
    chosen = np.argsort(-_lesion(test), kind="stable")[:SHOWN_LARGEST]
    plain_maps, main_maps = (test.split(j.patches.probability) for j in (plain, main))
    slides = []
    for b in chosen[test.labels[chosen] == 1]:
        bag = test[int(b)]
        coords, values, step = _places(bag, plain_maps[b])
        maps = [values, main_maps[b]]
        slides.append(
            heatmaps.SlideMaps(str(test.names[b]), coords, step, bag.instance_labels, maps)
        )
    return heatmaps.comparison(slides, [plain.name, main.name])


def _places(bag: Bags, values: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Coordinates, values and step of a slide with known geometry, as heat maps take them."""
    assert bag.coords is not None and bag.step is not None
    return bag.coords, values, bag.step[0]


def _negative_slides(plain: Judged, main: Judged, test: Bags) -> Figure:
    negative = np.flatnonzero(test.labels == 0)
    order = np.argsort(-main.log_odds[negative], kind="stable")
    shown = negative[order][:SHOWN_NEGATIVE]
    rows = {}
    for judged in (plain, main):
        pieces = test.split(judged.patches.probability)
        rows[judged.name] = [pieces[b] for b in shown]
    return plots.sorted_patches(rows, [str(test.names[b]) for b in shown])


# --- The page -------------------------------------------------------------------------------------
SLIDE_COLUMNS = {
    "accuracy": "slide_accuracy",
    "AUC": "slide_auc",
    "log loss": "slide_log_loss",
}
PATCH_COLUMNS = {
    "AUC": "patch_auc",
    "avg. precision": "patch_average_precision",
    "accuracy at 0.5": "patch_accuracy_at_half",
    "F1 at 0.5": "patch_f1_at_half",
}


def _rows(judged: Sequence[Judged], columns: dict[str, str]) -> list[list[str]]:
    return [
        [j.name, j.settings, *(f"{j.metrics[key]:.3f}" for key in columns.values())] for j in judged
    ]


def _metric_table(judged: Sequence[Judged], columns: dict[str, str], caption: str) -> Table:
    words = ["model", "settings"]
    return Table([*words, *columns], _rows(judged, columns), caption, words, strong=[0])


def _page(
    seed: int,
    train: Bags,
    test: Bags,
    judged: Sequence[Judged],
    facts: Sequence[str],
    pictures: dict[str, Picture],
    maps: Sequence[Picture],
) -> str:
    slides = [p for name, p in pictures.items() if name.startswith("slides-")]
    patches = [p for name, p in pictures.items() if name.startswith("patches-")]
    metrics = (
        _metric_table(judged, SLIDE_COLUMNS, f"{len(test)} held-out slides"),
        _metric_table(judged, PATCH_COLUMNS, f"{test.n_instances:,} patches of these slides"),
    )
    sections = [
        Section("At a glance", pictures=[pictures["overview"]]),
        Section("What was simulated", SIMULATED, [_cohort_table(train, test)]),
        Section("What was found", facts, metrics),
        Section("Slides", [MAIN], pictures=slides),
        Section("Patches", [MAIN], pictures=patches),
        Section("Held-out slides, worst predicted first", [GALLERY], pictures=maps),
        Section("Files", tables=[FILES]),
        Section("Settings and versions", SETTINGS, [_settings_table(judged), _version_table()]),
    ]
    return page(f"gpmil demo, seed {seed}", LEAD, sections)


LEAD = (
    "Gaussian-process multiple instance learning on simulated slides: the models saw one label a "
    "slide and the positions of its patches; they return probabilities for slides and patches."
)
SIMULATED = (
    "Slides in the shape of prostate biopsies: one to three curved cores of tissue on a grid of "
    "patches. A positive slide holds one or two connected lesions, from a single patch to half "
    "the slide. Features overlap between the classes, shift from slide to slide and are "
    "correlated between neighbours. The held-out slides are of other patients.",
)
MAIN = f"Single-model figures show VGPMIL-PR-I with the {SUITED}."
GALLERY = (
    f"VGPMIL-PR-I with the {SUITED}. Left the truth (red: malignant), then the probability of "
    "every patch on the fixed scale 0 to 1, then the standard deviation of its latent variable. "
    "True lesions are outlined. A slide's probability is that of at least one malignant patch: "
    "many patches with a small probability each add up. The slides are sorted by how much "
    "probability the model gave to the wrong label."
)
SETTINGS = (
    "All models are solved by direct maximisation of the collapsed bound (solver direct); the "
    "paper's own solver is sweeps. Variance, length scale and mean apply to standardised features.",
)
FILES = Table(
    ["file", "content"],
    [
        ["predictions.csv", "a row a held-out slide: probability, log odds, error, label"],
        ["patches/<slide>.csv.gz", "a row a patch: position, probability, sd, true label"],
        ["model/, splits.csv", "the fitted model; which slides it has seen"],
        ["heatmaps/<slide>.png", "the heat maps above, as files"],
        ["pictures/, overview.png", "the other figures"],
        ["metrics.json, config.json", "metrics of all models; settings and versions"],
    ],
    "VGPMIL-PR-I with the " + SUITED + ". error: standard error of the probability, which is "
    "computed from quasi-random points.",
    text=["file", "content"],
)


def _cohort_table(train: Bags, test: Bags) -> Table:
    rows = []
    for name, bags in (("training", train), ("held out", test)):
        lesion = _lesion(bags)[bags.labels == 1]
        counts = [len(bags), bags.labels.sum(), bags.n_instances, bags.instance_labels.sum()]
        rows.append([name, *(f"{n:,}" for n in counts), f"{np.median(lesion):g}"])
    columns = ["cohort", "slides", "positive", "patches", "malignant", "median lesion (patches)"]
    return Table(columns, rows, text=["cohort"])


def _settings_table(judged: Sequence[Judged]) -> Table:
    rows = []
    for j in judged:
        resolved = {"lengthscale": j.model.lengthscale_}
        rows.append(_settings(j.name, j.settings, j.model) | resolved)
    cells = [[f"{v:.4g}" if isinstance(v, float) else str(v) for v in row.values()] for row in rows]
    words = ["model", "settings", "kernel", "solver"]
    return Table(list(rows[0]), cells, text=words, strong=[0])


def _version_table() -> Table:
    return Table(["package", "version"], list(_versions().items()), text=["package"])


# --- The terminal ---------------------------------------------------------------------------------
def _print(judged: Sequence[Judged], facts: Sequence[str], out: Path) -> None:
    console = Console(highlight=False)
    for title, columns in (
        ("Held-out slides", SLIDE_COLUMNS),
        ("Patches of held-out slides", PATCH_COLUMNS),
    ):
        table = TerminalTable(title=title, title_justify="left", title_style="bold", box=None)
        for name in ("model", "settings"):
            table.add_column(name)
        for name in columns:
            table.add_column(name, justify="right")
        for model, settings, *numbers in _rows(judged, columns):
            table.add_row(model, settings.replace("settings", "").strip(), *numbers)
        console.print(table)
        console.print()
    for fact in facts:
        console.print(f"- {fact}", markup=False)
    console.print(f"\nWritten to {out}: open {out / 'report.html'}. {RESEARCH}", markup=False)
