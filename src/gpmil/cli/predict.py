"""`gpmil predict`: slides and patches of new data by a model that was fitted before."""

import logging
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from gpmil.cli.config import repeated, run_config
from gpmil.cli.evaluate import classes_of
from gpmil.cli.grades import by_class, true_classes
from gpmil.cli.options import Source
from gpmil.cli.terminal import print_line, progress, show_metrics
from gpmil.data.bags import Bags
from gpmil.data.checks import listed
from gpmil.files import persistence
from gpmil.files.whole import json_bytes
from gpmil.models import BagClassifier, load
from gpmil.models.fitted import FittedGP
from gpmil.runs.data_card import placement
from gpmil.runs.files import CARD, METRICS, PREDICTIONS, read_config, read_predictions, read_table
from gpmil.runs.grades import write_classes
from gpmil.runs.judge import judge_run
from gpmil.runs.naming import NO_CALLS
from gpmil.runs.page import write as write_report
from gpmil.runs.patients import write_patients
from gpmil.runs.predict import PredictionOptions, batches, predict_in_batches, with_coupling
from gpmil.runs.workspace import csv_bytes, workspace
from gpmil.show.report import RESEARCH

logger = logging.getLogger("gpmil")


@dataclass(frozen=True)
class ModelUse:
    """The model, and how it is used."""

    model: str
    coupling: str | None = None  # in place of the fitted one; several with commas between
    device: str | None = None
    allow_mismatch: bool = False  # of magnification, patch size, overlap, encoder, classes

    def load(self, place: Path) -> BagClassifier:
        """The model, as it is to be used."""
        self.couplings()  # what is wrong with them is said before a large model is read
        model = load(place)
        if self.device is not None:
            model.set_params(device=self.device)
        model.allow_mismatch = self.allow_mismatch
        return model

    def coupled(self, model: BagClassifier) -> dict[str, BagClassifier]:
        """The model with each of the strengths asked for, by name."""
        found = {_name(c): with_coupling(model, c) for c in self.couplings()}
        # Other couplings have a column and folders of their own, that of the fit needs none.
        return {"": model} if self.couplings() in ([], [_fitted(model)]) else found

    def couplings(self) -> list[float]:
        """The strengths asked for, each once; none: that of the fit."""
        if self.coupling is None:
            return []
        try:
            found = [float(piece) + 0.0 for piece in self.coupling.split(",")]
        except ValueError as error:
            raise ValueError(
                f"--coupling must be a number, or several as in 0,0.5,1; got {self.coupling!r}."
            ) from error
        return list(dict.fromkeys(found))


def _name(coupling: float) -> str:
    """A short name that reads as the number.

    >>> _name(0.5), _name(2.0), _name(0.1 + 0.2)
    ('0.5', '2', '0.30000000000000004')
    """
    short = f"{coupling:.12g}"
    return short if float(short) == coupling else repr(coupling)


def _fitted(model: BagClassifier) -> float | None:
    """The coupling that slides are called with; None for models without."""
    return model.coupling_ if isinstance(model, FittedGP) else None


def model_folder(path: Path) -> Path:
    """Where the model is: the folder itself, or model/ of a run."""
    if (path / persistence.CARD).is_file():
        return path
    if (path / "model" / persistence.CARD).is_file():
        return path / "model"
    if not path.exists():
        raise ValueError(f"there is no model at {path}. Name a run of gpmil fit, or a saved model.")
    if path.is_dir() and (path / CARD).is_file():
        command = read_config(path)["command"]
        raise ValueError(
            f"{path} is a run of gpmil {command} and holds no model: gpmil fit makes one to "
            "predict with."
        )
    raise ValueError(f"{path} is neither a run of gpmil fit nor a saved model.")


def repeat(file: Path, out: Path, cache: Path | None) -> None:
    """Predict again as a config.json says."""
    card, source, asked, options, cache = repeated(file, "predict", cache)
    run(source, ModelUse(**options), asked, out, cache, before=card)


def run(
    source: Source,
    use: ModelUse,
    asked: PredictionOptions,
    out: Path,
    cache: Path | None = None,
    before: dict[str, Any] | None = None,
) -> None:
    """Predict batch by batch; finished ones are not computed again."""
    asked.check()
    place = model_folder(Path(use.model))
    model = use.load(place)
    models = use.coupled(model)
    bags, lines = _two_classes(source, model).cohort(cache)
    wrong = model.check_agreement(bags, "--allow-mismatch")
    model.check_features(bags)
    options = {"source": source.card(), **asdict(use), "asked": asdict(asked)}
    card = {"class": type(model).__name__, **_card(place), **_classes(place)}
    config = run_config("predict", options, card, bags, lines, cache, before)
    if before is not None:
        _require_same_model(before["model"], card, place)
    noted = _noted(wrong, _seen(place, bags))
    config |= noted | placement(bags)
    if model.cohort_.get("classes"):  # of the probabilities, however these labels are called
        config["classes"] = model.cohort_["classes"]
    if isinstance(model, FittedGP):
        config["fitted_coupling"] = _fitted(model)
    n_steps = len(models) * len(list(batches(bags.sizes, asked.batch))) + 1
    with workspace(out, config) as space, progress(n_steps) as step:
        units: list[str] = []
        for name, own in models.items():
            calls = _fitted(own) == _fitted(model)
            units += predict_in_batches(space, own, bags, asked, step, name, calls)
        step("writing")
        write_classes(space, model, bags, _words(source, model, bags))
        space.write(PREDICTIONS, csv_bytes(space.pooled(units)))
        table = read_predictions(space.folder)
        if list(models) == [""]:
            write_patients(space, model, bags)
        found = judge_run(space.folder, table)
        if found:
            space.write(METRICS, json_bytes(noted | found))
        write_report(space.folder)
    _say(table, found, out)


def _two_classes(source: Source, model: BagClassifier) -> Source:
    """Grades or types of a table of labels, where one is given, as 0 and 1."""
    return source if source.labels is None else by_class(source, model)


def _words(source: Source, model: BagClassifier, bags: Bags) -> list[str | None] | None:
    """The same word for word."""
    return None if source.labels is None else true_classes(source, model, bags)


def _require_same_model(before: Mapping[str, Any], now: Mapping[str, Any], place: Path) -> None:
    # Earlier versions noted less of the model.
    if any(now.get(name) != value for name, value in before.items()):
        raise ValueError(f"{place} is not the model of the run to be repeated: it has changed.")


def _noted(*words: str) -> dict[str, str]:
    note = " ".join(filter(None, words))
    return {"note": note} if note else {}


def _seen(place: Path, bags: Bags) -> str:
    """What is said where slides have names of those that the model was fitted on; else ""."""
    file = place.parent / "splits.csv"
    if not file.exists():
        return ""
    trained = set(read_table(file, "a table of splits", ["slide"])["slide"])
    known = [name for name in bags.names if str(name) in trained]
    if not known:
        return ""
    said = (
        f"{len(known)} of {len(bags)} slides have the names of slides that the model was fitted on "
        f"({listed(known)}): metrics over them flatter it."
    )
    logger.warning("%s", said)
    return said


def _card(place: Path) -> dict[str, Any]:
    """Which model it was: settings and checksums of its files."""
    _, card = persistence.read(place)
    return {name: card[name] for name in ("settings", "versions", "sha256") if name in card}


def _classes(place: Path) -> dict[str, Any]:
    """The classes that the model was fitted to, if the run it lies in tells."""
    run = place.parent
    known = classes_of(read_config(run)) if (run / CARD).is_file() else {}
    return {"classes": known} if known else {}


def _say(table: pd.DataFrame, found: dict[str, Any], out: Path) -> None:
    if "coupling" in table:
        print_line(f"{len(table)} maps. {NO_CALLS}")
    else:
        print_line(f"{len(table)} slides, {int((table['call'] == 1).sum())} called positive")
    referred = table["decision"].value_counts()
    if np.isin(["accept", "refer"], referred.index).any():
        print_line(f"{referred.get('accept', 0)} accepted, {referred.get('refer', 0)} referred")
    beyond = table.loc[table["novelty"] > 1, "slide"].nunique() if "novelty" in table else 0
    if beyond:
        print_line(f"{beyond} beyond the training range (novelty above 1): their calls are guesses")
    show_metrics(found)
    print_line(f"Written to {out}. {RESEARCH}")
