"""Which slides of a run are called positive, how often that is right, and its part of the page."""

from typing import Any

import numpy as np
import pandas as pd
from jaxtyping import Bool

from gpmil.decide.operating import rates
from gpmil.runs.contents import RunContents
from gpmil.runs.files import RATE
from gpmil.show.report import Section, Table

CALLED = (
    "A slide is called positive above a threshold on its probability, which the model has from its "
    "training slides, for the aim {!r}. It is frozen with the model."
)


def calls(slides: pd.DataFrame) -> Bool[np.ndarray, " B"]:
    """What was called positive; runs of earlier versions called the likelier class."""
    if "call" in slides and slides["call"].notna().all():
        return slides["call"].to_numpy() == 1
    score, middle = ("log_odds", 0.0) if "log_odds" in slides else ("probability", 0.5)
    return slides[score].to_numpy() > middle


def uncalled(slides: pd.DataFrame) -> bool:
    """Whether no slide is called: with a coupling other than that of the fit."""
    return "call" in slides and bool(slides["call"].isna().all())


def judged(known: pd.DataFrame, groups: np.ndarray) -> dict[str, dict[str, float]]:
    """Sensitivity, specificity and predictive values of slides whose label is known, as JSON."""
    found = rates(calls(known), known["label"].to_numpy().astype(np.int64), groups)
    return {name: dict(zip(RATE, numbers)) for name, numbers in found.items()}


def section(run: RunContents) -> Section | None:
    """What the threshold reaches: on training slides left out, and on the slides of this run."""
    point: dict[str, Any] = getattr(run.model, "operating_point_", None) or {}
    reached = run.judged().get("slides", {}).get("operating")
    own = {} if reached is None else {"slides of this run": texts(reached)}
    if not point and not own:
        return None
    words, columns = [], own
    aim = run.config.get("model", {}).get("settings", {}).get("aim")
    if aim:
        words.append(CALLED.format(aim))
    if point:
        words.append(f"Threshold: {point['threshold']:.3g}, chosen on {point['basis']}.")
        columns = {
            "training slides left out": {
                n: f"{_text(*v)} slides" for n, v in point["rates"].items()
            }
        }
        columns |= {} if run.config.get("command") == "fit" else own
    names = list(dict.fromkeys(name for column in columns.values() for name in column))
    rows = [[name, *(column.get(name, "") for column in columns.values())] for name in names]
    table = Table(["rate", *columns], rows, "With exact 95 % intervals.", text=["rate"])
    return Section("Operating point", words, [table])


def texts(rates: dict[str, dict[str, float]], of: str = "slides") -> dict[str, str]:
    """Rates as metrics.json has them, in words; of slides or of patients."""
    return {name: f"{_text(*rate.values())} {of}" for name, rate in rates.items()}


def _text(value: float, low: float, high: float, n: float) -> str:
    return f"{value:.3f} ({low:.3f} to {high:.3f}), {n:,.0f}"
