"""`gpmil demo`: simulated slides from beginning to end, with nothing to download.

Slides are simulated, models are fitted to slide labels alone and judged on slides of other
patients. What is found is printed and written as it is.
"""

import gzip
from collections.abc import Callable, Sequence
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table as TerminalTable
from threadpoolctl import threadpool_limits

from gpmil import simulate
from gpmil.cli import view as viewer
from gpmil.cli.demo_models import (
    SUITED,
    JudgedModel,
    compared,
    findings,
    judge,
    lesion_sizes,
    measure_yardstick,
    settings_card,
    uncoupled,
)
from gpmil.cli.settings import model_card
from gpmil.cli.terminal import progress
from gpmil.data.bags import Bags
from gpmil.decide.calibration import NEEDED
from gpmil.files.whole import json_bytes, write_whole
from gpmil.models import VGPMILPR
from gpmil.models.base import package_versions
from gpmil.runs.data_card import placement
from gpmil.runs.files import METRICS, PATCHES, PREDICTIONS, patch_path
from gpmil.runs.learned import learned
from gpmil.runs.naming import shown
from gpmil.runs.predict import PredictionOptions, predict, refer_rule
from gpmil.runs.workspace import csv_bytes, run_folder
from gpmil.show import heatmaps, plots
from gpmil.show.report import RESEARCH, Picture, Section, Table, page
from gpmil.viewer import serve

FEWEST = 2 * NEEDED  # slides to train on, half of them positive
ASKED = PredictionOptions()
SHOWN_LARGEST = 3  # slides of the overview
SHOWN_NEGATIVE = 6  # negative slides whose patches are drawn sorted
MAP_DPI = 144
DIGITS = "%.9g"  # of numbers in tables: what does not depend on the number of threads


def run(
    out: Path,
    seed: int,
    n_train: int,
    hard: bool = False,
    view: bool = False,
    port: int = 0,
    browser: bool = True,
) -> None:
    """The whole demonstration; nothing is left in `out` unless it ran to the end.

    With `hard` lesions are as small and faint as `gpmil.simulate` has them by default. With `view`
    the held-out slides are then shown in the browser, until Ctrl-C.
    """
    _check(seed, n_train)
    _check_viewer(view, port, browser)
    n_test = max(2, n_train // 3)
    models = compared(seed)
    config: dict[str, Any] = {"command": "demo", "seed": seed, "hard": hard}
    config |= {"bags": n_train, "held_out": n_test}
    config |= {"model": model_card(models[0][-1]), "options": {"asked": asdict(ASKED)}}
    with (
        run_folder(out, config) as folder,
        progress(5 + len(models)) as step,
        # Matrices this small gain nothing from more threads, and lose much on a busy machine.
        threadpool_limits(limits=1),
    ):
        step(f"simulating {n_train} slides to train on and {n_test} held-out ones")
        train, test = simulate.demonstration(seed, n_train, n_test, hard)
        step("yardstick: a classifier trained on the patch labels")
        yardstick = measure_yardstick(train, test)
        judged = _fit_and_judge(models, train, test, seed, step)
        facts = findings(test, judged, yardstick)
        config |= {"models": [settings_card(j.name, j.settings, j.model) for j in judged]}
        config |= {"versions": _versions(), **placement(test)}
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


def _fit_and_judge(
    models: Sequence[tuple[str, str, VGPMILPR]],
    train: Bags,
    test: Bags,
    seed: int,
    step: Callable[[str], None],
) -> list[JudgedModel]:
    def judged(name: str, settings: str, model: VGPMILPR) -> JudgedModel:
        step(f"fitting and predicting: {name}, {settings}")
        return judge(name, settings, model.fit(train), test)

    main = judged(*models[0])
    plain = judged(*uncoupled(main.model, seed))
    return [main, plain, *(judged(*entry) for entry in models[1:])]


def _check(seed: int, n_train: int) -> None:
    if n_train < FEWEST:
        raise ValueError(
            f"--bags must be at least {FEWEST} slides, got {n_train}: calibration needs "
            f"{NEEDED} of each class."
        )
    if not 0 <= seed < 2**32:
        raise ValueError(f"--seed must lie between 0 and {2**32 - 1}, got {seed}.")


def _versions() -> dict[str, str]:
    return package_versions() | {"matplotlib": version("matplotlib")}


def _check_viewer(view: bool, port: int, browser: bool) -> None:
    if view:
        serve.require_packages()
        viewer.check_port(port)
    elif port or not browser:
        raise ValueError("--port and --no-browser are about the viewer: add --view.")


# --- Files ----------------------------------------------------------------------------------------
def _write_tables(
    folder: Path,
    judged: Sequence[JudgedModel],
    train: Bags,
    test: Bags,
    yardstick: dict[str, float],
) -> None:
    """What every run of gpmil has, of the model to look at first."""
    main = judged[0]
    main.model.save(folder / "model")
    rows, tables = predict(main.model, test, ASKED, refer_rule(main.model, ASKED.alpha))
    (folder / PREDICTIONS).write_bytes(csv_bytes(rows))
    (folder / PATCHES).mkdir()
    for slide, table in zip(test.names, tables):
        path = patch_path(folder, str(slide))
        path.write_bytes(gzip.compress(csv_bytes(table), mtime=0))
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


def _write_maps(folder: Path, main: JudgedModel, test: Bags) -> list[Picture]:
    """A heat map of every held-out slide, the worst predicted first."""
    (folder / "heatmaps").mkdir()
    doubts = main.patches.doubt
    limits = None if doubts is None else heatmaps.doubt_limits(doubts)
    top = heatmaps.scale_top(main.patches.probability)
    patches, lesion = main.patches.split(), lesion_sizes(test)
    # The loss of a slide, -log p(y): log(1 + exp(-+ log odds)).
    loss = np.logaddexp(0, np.where(test.labels == 1, -main.log_odds, main.log_odds))
    pictures = []
    for b in np.argsort(-loss, kind="stable"):
        bag, name = test[int(b)], str(test.names[b])
        figure = heatmaps.heatmap(
            *_places(bag, patches[b].probability),
            p_value=patches[b].p_value,
            doubt=patches[b].doubt,
            truth=bag.instance_labels,
            flagged=patches[b].flagged,
            beside=True,
            limits=(0.0, top),
            std_limits=limits,
        )
        png = plots.png(figure, MAP_DPI)
        (folder / "heatmaps" / f"{name}.png").write_bytes(png)
        lesions = _plural(int(lesion[b]), "malignant patch", "malignant patches")
        probability = shown(float(main.probability[b]))
        caption = f"{lesions} of {bag.n_instances}; predicted probability {probability}"
        alt = f"Heat maps of {name}: truth, suspicion, probability, doubt"
        title = f"{name}, {'positive' if test.labels[b] else 'negative'}"
        pictures.append(Picture(png, alt, _css_width(figure), title, caption))
    return pictures


def _plural(n: int, one: str, many: str) -> str:
    return f"{n} {one if n == 1 else many}"


def _css_width(figure: Figure) -> int:
    return round(float(figure.get_size_inches()[0]) * 96)


def _write_pictures(folder: Path, judged: Sequence[JudgedModel], test: Bags) -> dict[str, Picture]:
    """The figures of the page by name; each is also written as a file."""
    main, plain = judged[:2]
    truth, lesion = test.instance_labels, lesion_sizes(test)
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


def _overview(plain: JudgedModel, main: JudgedModel, test: Bags) -> Figure:
    """The slides with the largest lesions, where there is most to see."""
    chosen = np.argsort(-lesion_sizes(test), kind="stable")[:SHOWN_LARGEST]
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


def _negative_slides(plain: JudgedModel, main: JudgedModel, test: Bags) -> Figure:
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


def _rows(judged: Sequence[JudgedModel], columns: dict[str, str]) -> list[list[str]]:
    return [
        [j.name, j.settings, *(f"{j.metrics[key]:.3f}" for key in columns.values())] for j in judged
    ]


def _metric_table(judged: Sequence[JudgedModel], columns: dict[str, str], caption: str) -> Table:
    words = ["model", "settings"]
    return Table([*words, *columns], _rows(judged, columns), caption, words, strong=[0])


def _page(
    seed: int,
    train: Bags,
    test: Bags,
    judged: Sequence[JudgedModel],
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
    "Gaussian-process multiple instance learning on simulated slides: the models saw one label per "
    "slide and the positions of its patches; they return probabilities for slides and patches."
)
SIMULATED = (
    "Slides in the shape of prostate biopsies: one to three curved cores of tissue on a grid of "
    "patches. A positive slide holds one or two connected lesions, of up to half the slide. "
    "Features overlap between the classes, shift from slide to slide and are "
    "correlated between neighbours. The held-out slides are of other patients.",
)
MAIN = f"Single-model figures show VGPMIL-PR-I with the {SUITED}."
GALLERY = (
    f"VGPMIL-PR-I with the {SUITED}. Left the truth (red: malignant), then suspicion, "
    "probability and doubt, as the lines below each map explain them. True lesions are outlined in "
    "red, marked patches hatched. A slide's probability is that of "
    "at least one malignant patch: many patches with a small probability each add up. The slides "
    "are sorted by how much probability the model gave to the wrong label."
)
SETTINGS = (
    "All models are solved by direct maximisation of the collapsed bound (solver direct); the "
    "paper's own solver is sweeps. Variance, length scale and mean apply to standardised features.",
)
FILES = Table(
    ["file", "content"],
    [
        ["predictions.csv", "one row per held-out slide: probability, interval, decision, label"],
        ["patches/<slide>.csv.gz", "one row per patch: probability, p-value, mark, true label"],
        ["model/, splits.csv", "the fitted model; which slides it has seen"],
        ["heatmaps/<slide>.png", "the heat maps above, as files"],
        ["pictures/, overview.png", "the other figures"],
        ["metrics.json, config.json", "metrics of all models; settings and versions"],
    ],
    "VGPMIL-PR-I with the " + SUITED + ". decision: which slides may be accepted without a second "
    f"look, at an error of at most {100 * ASKED.alpha:g} % among them.",
    text=["file", "content"],
)


def _cohort_table(train: Bags, test: Bags) -> Table:
    rows = []
    for name, bags in (("training", train), ("held out", test)):
        lesion = lesion_sizes(bags)[bags.labels == 1]
        counts = [len(bags), bags.labels.sum(), bags.n_instances, bags.instance_labels.sum()]
        rows.append([name, *(f"{n:,}" for n in counts), f"{np.median(lesion):g}"])
    columns = ["cohort", "slides", "positive", "patches", "malignant", "median lesion (patches)"]
    return Table(columns, rows, text=["cohort"])


def _settings_table(judged: Sequence[JudgedModel]) -> Table:
    rows = []
    for j in judged:
        resolved = {name.rstrip("_"): value for name, value in learned(j.model).items()}
        rows.append(settings_card(j.name, j.settings, j.model) | resolved)
    cells = [[f"{v:.4g}" if isinstance(v, float) else str(v) for v in row.values()] for row in rows]
    words = ["model", "settings", "kernel", "solver"]
    return Table(list(rows[0]), cells, text=words, strong=[0])


def _version_table() -> Table:
    return Table(["package", "version"], list(_versions().items()), text=["package"])


# --- The terminal ---------------------------------------------------------------------------------
def _print(judged: Sequence[JudgedModel], facts: Sequence[str], out: Path) -> None:
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
