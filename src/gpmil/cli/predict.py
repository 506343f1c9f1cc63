"""`gpmil predict`: slides and patches of new data by a model that was fitted before."""

import logging
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from gpmil.cli.evaluate import classes_of
from gpmil.cli.options import (
    Source,
    check_repeated,
    print_line,
    progress,
    repeated,
    show_metrics,
    write_report,
)
from gpmil.data.bags import Bags
from gpmil.data.checks import listed
from gpmil.files import persistence
from gpmil.files.whole import json_bytes
from gpmil.models import BagClassifier, load
from gpmil.models.base import package_versions, warning
from gpmil.runs.data_card import cache_of, data_card, placement
from gpmil.runs.files import CARD, METRICS, PREDICTIONS, read_config, read_predictions, read_table
from gpmil.runs.judge import judge_run
from gpmil.runs.predict import Asked, batches, predict_in_batches, with_coupling
from gpmil.runs.workspace import csv_bytes, workspace
from gpmil.show.report import RESEARCH

logger = logging.getLogger("gpmil")


@dataclass(frozen=True)
class Wanted:
    """The model, and how it is used."""

    model: str
    coupling: str | None = None  # in place of the fitted one; several with commas between
    device: str | None = None
    allow_mismatch: bool = False  # of magnification, patch size, overlap, encoder, classes

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
    card = repeated(file, "predict")
    options = dict(card["options"])
    source, asked = Source(**options.pop("source")), Asked(**options.pop("asked"))
    cache = cache or cache_of(card)
    run(source, Wanted(**options), asked, out, cache, before=card)


def run(
    source: Source,
    wanted: Wanted,
    asked: Asked,
    out: Path,
    cache: Path | None = None,
    before: dict[str, Any] | None = None,
) -> None:
    """Predict batch by batch; finished ones are not computed again."""
    asked.check()
    couplings = wanted.couplings()
    place = model_folder(Path(wanted.model))
    model = load(place)
    if wanted.device is not None:
        model.set_params(device=wanted.device)
    model.allow_mismatch = wanted.allow_mismatch
    models = _coupled(model, couplings) if couplings else {"": model}
    bags, lines = source.cohort(cache)
    wrong = _check_agreement(model, bags)
    config: dict[str, Any] = {
        "command": "predict",
        "options": {"source": asdict(source), **asdict(wanted), "asked": asdict(asked)},
        "model": {"class": type(model).__name__, **_card(place), **_classes(place)},
        "versions": package_versions(),
        "data": data_card(bags, before),
        "cache": None if cache is None else str(cache),
        "read": lines,
    }
    if before is not None:
        check_repeated(before, config)
        # Earlier versions noted less of the model.
        if any(config["model"].get(name) != value for name, value in before["model"].items()):
            raise ValueError(f"{place} is not the model of the run to be repeated: it has changed.")
    seen = _seen(place, bags)
    if seen:
        logger.warning("%s", seen)
    note = " ".join(line for line in (wrong, seen) if line)
    if note:
        config["note"] = note
    config |= placement(bags)
    if model.cohort_.get("classes"):  # of the probabilities, however these labels are called
        config["classes"] = model.cohort_["classes"]
    n_steps = len(models) * len(list(batches(bags.sizes, asked.batch))) + 1
    with workspace(out, config) as space, progress(n_steps) as step:
        units: list[str] = []
        for coupling, own in models.items():
            # Several couplings have a column and folders of their own, a single one needs none.
            name = coupling if len(models) > 1 else ""
            units += predict_in_batches(space, own, bags, asked, step, name)
        step("writing")
        space.write(PREDICTIONS, csv_bytes(space.pooled(units)))
        table = read_predictions(space.folder)
        found = judge_run(space.folder, table)
        if found:
            noted = {"note": note} if note else {}
            space.write(METRICS, json_bytes(noted | found))
        write_report(space.folder)
    _say(table, found, out)


def _check_agreement(model: BagClassifier, bags: Bags) -> str:
    """A ValueError where features were made otherwise than those of the fit.

    Where that is allowed it is logged and returned; what could not be compared is logged, too.
    """
    wrong = model._mismatch(bags)
    if wrong and not model.allow_mismatch:
        raise ValueError(f"{wrong} To go on all the same: --allow-mismatch.")
    model._check_predictable(bags)
    return warning(wrong) if wrong else ""


def _seen(place: Path, bags: Bags) -> str:
    """What to say where slides have names of those that the model was fitted on."""
    file = place.parent / "splits.csv"
    if not file.exists():
        return ""
    trained = set(read_table(file, "a table of splits", ["slide"])["slide"])
    known = [name for name in bags.names if str(name) in trained]
    if not known:
        return ""
    return (
        f"{len(known)} of {len(bags)} slides have the names of slides that the model was fitted on "
        f"({listed(known)}): metrics over them flatter it."
    )


def _coupled(model: BagClassifier, couplings: list[float]) -> dict[str, BagClassifier]:
    return {f"{c:.12g}": with_coupling(model, c) for c in couplings}


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
    positive = int((table["probability"] > 0.5).sum())
    rows = f"{len(table)} predictions" if "coupling" in table else f"{len(table)} slides"
    print_line(f"{rows}, {positive} of them with a probability above one half")
    referred = table["decision"].value_counts()
    if np.isin(["accept", "refer"], referred.index).any():
        print_line(f"{referred.get('accept', 0)} accepted, {referred.get('refer', 0)} referred")
    show_metrics(found)
    print_line(f"Written to {out}. {RESEARCH}")
