"""report.html of a finished run: everything it holds, on one page that can be sent around.

Reads nothing but the run folder, so that the page and the files agree to the last digit:
config.json, predictions.csv, labels.csv, metrics.json, patches/, splits.csv and model/, those that
there are. `gpmil evaluate` judges by other labels, and gives them with the metrics they make.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from gpmil.data.checks import count
from gpmil.decide.unlike import ANSWERS
from gpmil.files.whole import write_whole
from gpmil.models import BagClassifier
from gpmil.runs import grades, operating, patients
from gpmil.runs.class_table import ClassTable, class_layer
from gpmil.runs.contents import PatchLabels, RunContents, has_patients
from gpmil.runs.files import EVIDENCE, LABELS
from gpmil.runs.judge import NO_PATIENT, estimate_of
from gpmil.runs.learned import MEANINGS, learned
from gpmil.runs.naming import NO_CALLS, called, decided, heading, interval, rate_of, shown
from gpmil.show import heatmaps, plots
from gpmil.show.report import Picture, Section, Table, page

REPORT = "report.html"
SHOWN_ERRORS = 6  # slides with heat maps
SHOWN_UNCERTAIN = 3  # slides with heat maps beside those
PANEL = 2.3  # inches, of maps side by side
SHOWN_SLIDES = 200  # rows of the slide table; all of them are in predictions.csv
CONTEXT = (
    "The model has a slide context: what a slide shows as a whole counts beside its patches. "
    "Evidence is in log odds, patches and slide add up to those of the model before calibration. "
    "A large part of the slide may be stain or site as well as disease, and one more benign patch "
    "may lower a slide's probability."
)
NOVELTY = (
    "Novelty says how unlike the training slides a slide is, by features alone: above 1 it lies "
    "beyond their range. {} of {} slides do: what the model says of them is a guess, and none of "
    "them is accepted."
)
SLIDE_METRICS = {
    "accuracy": "accuracy",
    "precision": "precision",
    "recall": "recall",
    "f1": "F1",
    "auc": "AUC",
    "log_loss": "log loss",
    "calibration_error": "calibration error",
}
PATCH_METRICS = {
    "auc": "AUC",
    "average_precision": "average precision",
    "within_bag_auc": "AUC within slides",
    "froc": "FROC (share found at 1/4 to 8 false ones per slide)",
}
MARK_METRICS = {
    "false_discovery_rate": "false marks",
    "power": "malignant patches marked",
}


def write(
    folder: Path,
    slides: pd.DataFrame | None = None,
    metrics: dict[str, Any] | None = None,
    patch_labels: PatchLabels | None = None,
    given: bool | None = None,
) -> None:
    """Make report.html of what is in the folder, whole or not at all.

    Predictions with other labels (`given`), the metrics they make and `patch_labels(slide, table)`
    take the place of what is in the files.
    """
    run = RunContents.read(Path(folder), slides, metrics, patch_labels, given)
    sections = [
        section
        for section in (
            *(_read(run), _settings(run), grades.section(run.folder, _of_classes(run))),
            *(_quality(run), operating.section(run)),
            *(patients.section(run), _errors(run), _slides(run)),
        )
        if section is not None
    ]
    name = run.config.get("model", {}).get("class", "") or "gpmil"
    title = f"{run.config.get('command', 'run')}: {name}"
    text = page(title, _lead(run), [*sections, _versions(run)], contents=True)
    write_whole(run.folder / REPORT, text.encode())


def _of_classes(run: RunContents) -> dict[str, str]:
    """Metrics of grades or types as metrics.json has them."""
    judged = run.judged()
    cards = (judged.get("grades") or judged.get("classes") or {}).get("metrics", {})
    return {name: str(estimate_of(card)) for name, card in cards.items()}


def _lead(run: RunContents) -> str:
    if not len(run.slides):
        return "A model was fitted; nothing was predicted in this run."
    known, n = run.known, run.slides["slide"].nunique()
    words = f"{n:,} slides were predicted"
    if run.couplings:
        each = f"each of {len(run.couplings)} couplings"
        one = f"coupling {run.couplings[0]}"
        words += f" with {each if len(run.couplings) > 1 else one}, for maps to compare"
    elif "repeat" in run.slides:
        words += f" in each of {run.slides['repeat'].nunique()} repeats"
    if len(known):
        words += f"; the label of {known['slide'].nunique():,} is known, and {_wrong_words(run)}"
        words += grades.in_words(run.folder)
    if (run.called["decision"] != "").any():
        referred = run.called[run.called["decision"] == "refer"]["slide"].nunique()
        words += f"; {referred} are to be looked at by a person"
    return f"{words}. {NO_CALLS}" if run.couplings else words + "."


def _wrong_words(run: RunContents) -> str:
    """How many are called wrongly."""
    whom = "of their predictions" if "repeat" in run.slides else "of them"
    return f"{_wrong(run.known).sum()} {whom} are called wrongly"


def _wrong(known: pd.DataFrame) -> pd.Series:
    return operating.calls(known) != (known["label"] == 1)


# --- What was read, what was learned --------------------------------------------------------------
def _read(run: RunContents) -> Section | None:
    lines = [str(line) for line in run.config.get("read", [])]
    if run.given:
        known, n = run.known["slide"].nunique(), run.slides["slide"].nunique()
        told = f"labels: {count(known, 'slide')} with a label, {n - known:,} without, as given to "
        lines = [line for line in lines if not line.startswith(("labels: ", "patients: "))]
        lines.append(told + f"gpmil evaluate ({LABELS})")
    return Section("What was read", lines) if lines else None


def _settings(run: RunContents) -> Section | None:
    if run.model is None:
        return None
    given = run.model.get_params(deep=False)
    rows = [[name, _text(value), _text(_fitted(run.model, name))] for name, value in given.items()]
    table = Table(["setting", "given", "fitted"], rows, text=["setting", "given", "fitted"])
    trace = getattr(run.model, "tuning_trace_", None)
    pictures: list[Picture] = []
    words = [
        f"{name.rstrip('_')}: {meaning}."
        for name, meaning in MEANINGS.items()
        if name in learned(run.model)
    ]
    words += _of_patches(run.model)
    if trace:
        words = [
            f"Settings given as “auto” were learned from the labels of the slides in {len(trace)} "
            "trials: they make the label of every slide likeliest under the fit without it.",
            *words,
        ]
        pictures = [_picture(plots.tuning(trace), "What was tried, and how well it did", "Tuning")]
    return Section("Settings", words, [table], pictures)


def _of_patches(model: BagClassifier) -> list[str]:
    """What is said of patch probabilities, by labelled patches and from slide labels alone."""
    fitted = getattr(model, "cross_fit_", None)
    known, patches = getattr(fitted, "unlike", None), getattr(fitted, "patches", None)
    words = [] if patches is None else [f"probability: {patches}."]
    return words + ([] if known is None else [f"unlike: {ANSWERS}.", f"Its own check: {known}."])


def _fitted(model: BagClassifier, name: str) -> Any:
    value = getattr(model, f"{name}_", None)
    return value if isinstance(value, str | int | float) else None


def _text(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, np.ndarray | list):
        return f"array of shape {np.shape(value)}"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


# --- How good it is -------------------------------------------------------------------------------
def _quality(run: RunContents) -> Section | None:
    known, judged = run.known, run.judged()
    if not len(known) or known["label"].nunique() < 2 or "slides" not in judged:
        return None
    by = _by(run)
    caption = f"Slides, with 95 % intervals {by}."
    tables = [_metric_table(judged["slides"]["metrics"], SLIDE_METRICS, caption)]
    if "patches" in judged:
        tables.append(_patch_table(judged["patches"], by, rate_of(run.config)))
    tables.append(_confusion(known, run.words))
    curve = plots.roc(_labels(known), {"slides": known["log_odds"].to_numpy()})
    pictures = [_picture(curve, "ROC curve", "ROC")]
    pictures += _calibration(known)
    return Section("How good it is", [*_independence(run), *_accepted(run)], tables, pictures)


def _accepted(run: RunContents) -> list[str]:
    """What was accepted without a second look: how much of it is wrong, and what was allowed."""
    found = run.judged().get("slides", {}).get("decisions")
    if not found:
        return []
    accepted, wrong = found["accepted"], found["wrong"]
    allowed = run.config.get("options", {}).get("asked", {}).get("alpha")
    nominal = "" if allowed is None else f"; at most {allowed:.3g} was asked for"
    realised = f" ({wrong / accepted:.3g}{nominal})" if accepted else ""
    return [f"{accepted:,} slides are accepted, {wrong:,} of them wrongly{realised}."]


def _labels(known: pd.DataFrame) -> np.ndarray:
    return known["label"].to_numpy().astype(int)


def _calibration(known: pd.DataFrame) -> list[Picture]:
    labels, p = _labels(known), known["probability"].to_numpy()
    return [
        _picture(
            plots.reliability(labels, p),
            "Share of positive slides against their predicted probability, with intervals",
            "Reliability",
        ),
        _picture(
            plots.score_histograms(labels, p),
            "Probabilities of slides by label",
            "Probabilities",
        ),
    ]


def _independence(run: RunContents) -> list[str]:
    """What the numbers may be trusted for."""
    words = [str(run.config["note"])] if run.config.get("note") else []
    if run.config.get("command") == "cv":
        nor = ", nor its patient: slides of one patient stay together" if run.patients_known else ""
        words = [f"Every slide was predicted by a model that has not seen it{nor}."]
        if not run.patients_known:
            words.append(NO_PATIENT)
    if not has_patients(run.slides) and NO_PATIENT not in words:
        words.append(NO_PATIENT)
    return words


def _by(run: RunContents) -> str:
    return "by patient" if has_patients(run.slides) else "by slide"


def _metric_table(found: dict[str, Any], names: dict[str, str], caption: str) -> Table:
    """One row per metric, as metrics.json has it."""
    rows = [[name, str(estimate_of(found[key]))] for key, name in names.items() if key in found]
    return Table(["metric", "value"], rows, caption, text=["metric"])


def _patch_table(found: dict[str, Any], by: str, rate: float | None) -> Table:
    """Marks are judged where there are any, the rate that was asked for beside the realised one."""
    marked = found["decided"] == "flagged"
    names = PATCH_METRICS | (MARK_METRICS if marked else {})
    caption = f"Patches whose label is known, with 95 % intervals {by}."
    if rate is not None and marked:
        names = names | {"false_discovery_rate": f"false marks (asked for: at most {rate:.3g})"}
    return _metric_table(found["metrics"], names, caption)


def _confusion(known: pd.DataFrame, words: tuple[str, str]) -> Table:
    wrong = pd.crosstab(known["label"] == 1, operating.calls(known) == 1)
    counts = wrong.reindex(index=[False, True], columns=[False, True], fill_value=0).to_numpy()
    rows = [[f"is {word}", *map(str, own)] for word, own in zip(words, counts.tolist())]
    return Table(["", *(f"called {word}" for word in words)], rows, "Slides.", text=[""])


# --- Slides ---------------------------------------------------------------------------------------
def _errors(run: RunContents) -> Section | None:
    """The worst errors with their maps: where did the model look?"""
    worst = _worst(run)
    if not len(worst):
        return None
    pictures = _maps(run, worst, SHOWN_ERRORS)
    n, every = worst["slide"].nunique(), "repeat" in run.slides
    words = [f"{n} slides are called wrongly{' at least once' if every else ''}; the surest first."]
    return Section("Worst errors", words, [_slide_table(worst.head(20), run.words)], pictures)


def _worst(run: RunContents) -> pd.DataFrame:
    """What is called wrongly, the surest first."""
    known = run.known
    if not len(known):
        return known
    wrong = known[_wrong(known)]
    order = wrong["log_odds"].abs().sort_values(ascending=False, kind="stable").index
    return wrong.loc[order]


def _maps(run: RunContents, rows: pd.DataFrame, most: int) -> list[Picture]:
    """The maps of the first slides that have any."""
    draw = _maps_by_coupling if run.couplings else _map
    first = rows.drop_duplicates("slide").head(most)
    drawn = (draw(run, row) for _, row in first.iterrows())
    return [picture for picture in drawn if picture is not None]


def _map(run: RunContents, row: pd.Series) -> Picture | None:
    patches = _placed(run, row, run.patches(row))
    if patches is None:
        return None
    figure = heatmaps.heatmap(
        patches[["x", "y"]].to_numpy(float),
        patches["probability"].to_numpy(),
        run.side("steps", row["slide"]),
        size=run.side("sizes", row["slide"]),
        p_value=_column(patches, "p_value"),
        unlike=_column(patches, "unlike"),
        doubt=_column(patches, "doubt"),
        std=_column(patches, "sd"),
        truth=_truth(patches),
        flagged=patches["flagged"].to_numpy(bool) if "flagged" in patches else None,
        classes=class_layer(patches),
        rate=rate_of(run.config),
        about=[*_class_lines(run, row), *heading(row, run.config)],
    )
    caption = f"{called(row, run.words)}, probability {shown(row['probability'])}"
    return _picture(figure, f"Heat map of {row['slide']}", str(row["slide"]), caption)


def _class_lines(run: RunContents, row: pd.Series) -> list[str]:
    """The grade or type that a slide is called, where the run has them."""
    table = ClassTable.read(run.folder)
    return [] if table is None else [*filter(None, [table.in_words(row["slide"])])]


def _column(patches: pd.DataFrame, name: str) -> np.ndarray | None:
    return patches[name].to_numpy() if name in patches else None


def _maps_by_coupling(run: RunContents, row: pd.Series) -> Picture | None:
    """The maps of one slide side by side, one per coupling: the weaker, the rougher."""
    tables = [_placed(run, row, run.patches(row, c)) for c in run.couplings]
    found = {c: t for c, t in zip(run.couplings, tables) if t is not None}
    if not found:
        return None
    one = next(iter(found.values()))
    truth = _truth(one)
    slide = heatmaps.SlideMaps(
        str(row["slide"]),
        one[["x", "y"]].to_numpy(float),
        run.side("steps", row["slide"]),
        truth,
        [table["probability"].to_numpy() for table in found.values()],
        run.side("sizes", row["slide"]),
    )
    width = max(4.0, PANEL * (len(found) + (truth is not None)) + 0.5)
    figure = heatmaps.comparison([slide], [f"coupling {c}" for c in found], width)
    alt = f"Heat maps of {row['slide']} with coupling {', '.join(found)}"
    return _picture(figure, alt, str(row["slide"]), "probabilities of patches; no call")


def _placed(run: RunContents, row: pd.Series, patches: pd.DataFrame | None) -> pd.DataFrame | None:
    """The patches, if it is known where they lie."""
    if patches is None or not {"x", "y"} <= set(patches.columns):
        return None
    return None if run.side("steps", row["slide"]) is None else patches


def _truth(patches: pd.DataFrame) -> np.ndarray | None:
    return patches["label"].fillna(-1).to_numpy() if "label" in patches else None


def _slides(run: RunContents) -> Section | None:
    if not len(run.slides):
        return None
    order = run.slides["log_odds"].abs().sort_values(kind="stable").index
    least = run.slides.loc[order]
    listed = least[least.index.isin(run.called.index)]
    more = len(listed) - SHOWN_SLIDES
    words = ["The least certain first."]
    if set(EVIDENCE) <= set(run.slides):
        words.append(CONTEXT)
    if "novelty" in run.slides and run.slides["novelty"].notna().any():
        beyond = run.slides[run.slides["novelty"] > 1]["slide"].nunique()
        words.append(NOVELTY.format(beyond, run.slides["slide"].nunique()))
    if more > 0:
        words.append(f"{more:,} more are in predictions.csv.")
    drawn = _worst(run)["slide"].unique()[:SHOWN_ERRORS] if len(run.known) else []
    pictures = _maps(run, least[~least["slide"].isin(drawn)], SHOWN_UNCERTAIN)
    tables = [_slide_table(listed.head(SHOWN_SLIDES), run.words)] if len(listed) else []
    return Section("Slides", words, tables, pictures)


def _slide_table(slides: pd.DataFrame, names: tuple[str, str]) -> Table:
    optional = ("coupling", "repeat", "patient", "label", "decision")
    shown_columns = ["slide", *(c for c in optional if c in slides and _said(slides[c]))]
    split = [c for c in EVIDENCE if c in slides]
    far = ["novelty"] if "novelty" in slides and _said(slides["novelty"]) else []
    evidence = (c.replace("_", ": ") for c in split)
    columns = [*shown_columns, "probability", "interval", *evidence, *far]
    rows = [
        [
            *(_cell(row, c, names) for c in shown_columns),
            shown(row["probability"]),
            interval(row),
            *(f"{row[c]:+.2f}" for c in split),
            *("" if pd.isna(row[c]) else f"{row[c]:.2f}" for c in far),
        ]
        for _, row in slides.iterrows()
    ]
    strong = [k for k, (_, row) in enumerate(slides.iterrows()) if row.get("decision") == "refer"]
    return Table(columns, rows, text=shown_columns, strong=strong)


def _cell(row: pd.Series, column: str, names: tuple[str, str]) -> str:
    """A cell in words: classes by their names, what was accepted with its class."""
    if column == "decision":
        return decided(row, names)
    if pd.isna(row[column]):
        return ""
    return names[int(row[column])] if column == "label" else str(row[column])


def _said(column: pd.Series) -> bool:
    """Whether a column holds anything."""
    return bool((column.notna() & (column.astype(str) != "")).any())


def _versions(run: RunContents) -> Section:
    rows = [[name, str(value)] for name, value in run.config.get("versions", {}).items()]
    return Section("Versions", [], [Table(["package", "version"], rows, text=["package"])])


def _picture(figure: Any, alt: str, title: str, caption: str = "") -> Picture:
    width = round(figure.get_size_inches()[0] * 96)
    return Picture(plots.png(figure), alt, width, title, caption)
