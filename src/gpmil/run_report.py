"""report.html of a finished run: everything it holds, on one page that can be sent around.

Reads nothing but the run folder, so that the page and the files agree to the last digit:
config.json, predictions.csv, patches/<slide>.csv.gz, splits.csv and model/, those that there are.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from gpmil import heatmaps, plots, runs
from gpmil.metrics import Estimate, bag_metrics, patch_metrics
from gpmil.models import BagClassifier, load
from gpmil.report import Picture, Section, Table, page

SHOWN_ERRORS = 6  # slides with heat maps
SHOWN_SLIDES = 200  # rows of the slide table; all of them are in predictions.csv
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
    "false_discovery_rate": "false marks",
    "power": "malignant patches marked",
}


@dataclass(frozen=True)
class Run:
    """What a run folder holds."""

    folder: Path
    config: dict[str, Any]
    slides: pd.DataFrame  # predictions.csv
    model: BagClassifier | None

    @classmethod
    def read(cls, folder: Path) -> "Run":
        """Open a finished run, or one about to be finished."""
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        found = folder / "predictions.csv"
        slides = runs.read_predictions(folder) if found.exists() else pd.DataFrame()
        model = load(folder / "model") if (folder / "model").is_dir() else None
        return cls(folder, config, slides, model)

    @property
    def known(self) -> pd.DataFrame:
        """Slides whose label is known."""
        if "label" not in self.slides:
            return self.slides.iloc[:0]
        return self.slides[self.slides["label"].isin([0, 1])]

    def patches(self, slide: str) -> pd.DataFrame | None:
        """The patches of a slide."""
        file = self.folder / "patches" / runs.patch_file(slide)
        return pd.read_csv(file) if file.exists() else None

    def step(self, slide: str) -> Any:
        """The distance of neighbouring patches, where the run knows it."""
        return self.config.get("steps", {}).get(slide)


def write(folder: Path) -> None:
    """Make report.html of what is in the folder."""
    run = Run.read(Path(folder))
    sections = [
        section
        for section in (_read(run), _settings(run), _quality(run), _errors(run), _slides(run))
        if section is not None
    ]
    name = run.config.get("model", {}).get("class", "") or "gpmil"
    title = f"{run.config.get('command', 'run')}: {name}"
    text = page(title, _lead(run), [*sections, _versions(run)], contents=True)
    (run.folder / "report.html").write_text(text, encoding="utf-8", newline="\n")


def _lead(run: Run) -> str:
    if not len(run.slides):
        return "A model was fitted; nothing was predicted in this run."
    known = run.known
    words = f"{len(run.slides):,} slides were predicted"
    if len(known):
        wrong = int(((known["log_odds"] > 0) != (known["label"] == 1)).sum())
        words += f"; the label of {len(known):,} is known, and {wrong} of them are called wrongly"
    if (run.slides["decision"] != "").any():
        referred = int((run.slides["decision"] == "refer").sum())
        words += f"; {referred} are to be looked at by a person"
    return words + "."


# --- What was read, what was learned --------------------------------------------------------------
def _read(run: Run) -> Section | None:
    lines = run.config.get("read", [])
    return Section("What was read", [str(line) for line in lines]) if lines else None


def _settings(run: Run) -> Section | None:
    if run.model is None:
        return None
    given = run.model.get_params(deep=False)
    rows = [[name, _text(value), _text(_fitted(run.model, name))] for name, value in given.items()]
    table = Table(["setting", "given", "fitted"], rows, text=["setting", "given", "fitted"])
    trace = getattr(run.model, "tuning_trace_", None)
    pictures: list[Picture] = []
    words: list[str] = []
    if trace:
        words = [
            f"Settings given as “auto” were learned from the labels of the slides in {len(trace)} "
            "trials: they make the label of every slide likeliest under the fit without it."
        ]
        pictures = [_picture(plots.tuning(trace), "What was tried, and how well it did", "Tuning")]
    return Section("Settings", words, [table], pictures)


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
def _quality(run: Run) -> Section | None:
    known = run.known
    if known["label"].nunique() < 2 if len(known) else True:
        return None
    labels = known["label"].to_numpy().astype(int)
    groups = known["patient"].to_numpy() if _patients(known) else None
    p = known["probability"].to_numpy()
    decision = known["log_odds"].to_numpy() > 0
    found = bag_metrics(labels, p, decision=decision, groups=groups)
    tables = [_metric_table(found, SLIDE_METRICS, "Slides, with 95 % intervals by patient.")]
    patches = _patch_table(run, known)
    tables += [patches] if patches else []
    tables.append(_confusion(labels, decision))
    pictures = [
        _picture(plots.roc(labels, {"slides": known["log_odds"].to_numpy()}), "ROC curve", "ROC"),
        _picture(
            plots.reliability(labels, p),
            "Share of positive slides against their predicted probability, with intervals",
            "Reliability",
        ),
        _picture(
            plots.score_histograms(labels, p), "Probabilities of slides by label", "Probabilities"
        ),
    ]
    return Section("How good it is", _independence(run), tables, pictures)


def _independence(run: Run) -> list[str]:
    if run.config.get("command") == "cv":
        return ["Every slide was predicted by a model that has not seen it, nor its patient."]
    return [str(run.config["note"])] if run.config.get("note") else []


def _patients(known: pd.DataFrame) -> bool:
    return bool((known["patient"] != "").all())


def _metric_table(found: dict[str, Estimate], names: dict[str, str], caption: str) -> Table:
    rows = [[name, str(found[key])] for key, name in names.items() if key in found]
    return Table(["metric", "value"], rows, caption, text=["metric"])


def _patch_table(run: Run, known: pd.DataFrame) -> Table | None:
    pieces = [(k, run.patches(slide)) for k, slide in enumerate(known["slide"])]
    labelled = [(k, piece) for k, piece in pieces if piece is not None and "label" in piece]
    if not labelled:
        return None
    labels = np.concatenate([piece["label"].fillna(-1) for _, piece in labelled]).astype(int)
    if not {0, 1} <= set(labels):
        return None
    bag = np.repeat(range(len(labelled)), [len(piece) for _, piece in labelled])
    p = np.concatenate([piece["probability"] for _, piece in labelled])
    flagged = None
    if all("flagged" in piece for _, piece in labelled):
        flagged = np.concatenate([piece["flagged"] for _, piece in labelled]).astype(bool)
    found = patch_metrics(labels, p, bag, decision=flagged, n_bootstrap=300)
    names = PATCH_METRICS if flagged is not None else dict(list(PATCH_METRICS.items())[:3])
    return _metric_table(found, names, "Patches whose label is known, intervals over slides.")


def _confusion(labels: np.ndarray, called: np.ndarray) -> Table:
    rows = [
        [f"is {name}", *(str(int(((labels == y) & (called == c)).sum())) for c in (False, True))]
        for y, name in ((0, "negative"), (1, "positive"))
    ]
    return Table(["", "called negative", "called positive"], rows, "Slides.", text=[""])


# --- Slides ---------------------------------------------------------------------------------------
def _errors(run: Run) -> Section | None:
    """The worst errors with their maps: where did the model look?"""
    known = run.known
    if not len(known):
        return None
    wrong = known[(known["log_odds"] > 0) != (known["label"] == 1)]
    worst = wrong.reindex(wrong["log_odds"].abs().sort_values(ascending=False).index)
    pictures = [
        picture
        for _, row in worst.head(SHOWN_ERRORS).iterrows()
        if (picture := _map(run, row)) is not None
    ]
    if not len(wrong):
        return None
    words = [f"{len(wrong)} slides are called wrongly; the surest of them first."]
    return Section("Worst errors", words, [_slide_table(worst.head(20))], pictures)


def _map(run: Run, row: pd.Series) -> Picture | None:
    patches = run.patches(row["slide"])
    if patches is None or not {"x", "y"} <= set(patches.columns) or run.step(row["slide"]) is None:
        return None
    truth = patches["label"].fillna(-1).to_numpy() if "label" in patches else None
    figure = heatmaps.heatmap(
        patches[["x", "y"]].to_numpy(float),
        patches["probability"].to_numpy(),
        run.step(row["slide"]),
        std=patches["sd"].to_numpy() if "sd" in patches else None,
        truth=truth,
        flagged=patches["flagged"].to_numpy(bool) if "flagged" in patches else None,
    )
    called = "positive" if row["log_odds"] > 0 else "negative"
    caption = f"called {called}, probability {row['probability']:.3f}"
    return _picture(figure, f"Heat map of {row['slide']}", str(row["slide"]), caption)


def _slides(run: Run) -> Section | None:
    if not len(run.slides):
        return None
    order = run.slides["log_odds"].abs().sort_values(kind="stable").index
    table = _slide_table(run.slides.loc[order].head(SHOWN_SLIDES))
    more = len(run.slides) - SHOWN_SLIDES
    words = ["The least certain first."]
    if more > 0:
        words.append(f"{more:,} more are in predictions.csv.")
    return Section("Slides", words, [table])


def _slide_table(slides: pd.DataFrame) -> Table:
    shown = ["slide", *(c for c in ("patient", "label", "decision") if _said(slides[c]))]
    columns = [*shown, "probability", "interval"]
    rows = [
        [*(_plain(row[c]) for c in shown), f"{row['probability']:.3f}", _interval(row)]
        for _, row in slides.iterrows()
    ]
    strong = [k for k, (_, row) in enumerate(slides.iterrows()) if row.get("decision") == "refer"]
    return Table(columns, rows, text=shown, strong=strong)


def _said(column: pd.Series) -> bool:
    """Whether a column holds anything."""
    return bool((column.notna() & (column.astype(str) != "")).any())


def _plain(value: Any) -> str:
    if pd.isna(value):
        return ""
    return f"{value:g}" if isinstance(value, float) else str(value)


def _interval(row: pd.Series) -> str:
    if pd.isna(row.get("low", np.nan)):
        return ""
    return f"{row['low']:.2f} to {row['high']:.2f}"


def _versions(run: Run) -> Section:
    rows = [[name, str(value)] for name, value in run.config.get("versions", {}).items()]
    return Section("Versions", [], [Table(["package", "version"], rows, text=["package"])])


def _picture(figure: Any, alt: str, title: str, caption: str = "") -> Picture:
    width = round(figure.get_size_inches()[0] * 96)
    return Picture(plots.png(figure), alt, width, title, caption)
