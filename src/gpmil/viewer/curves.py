"""How good the slides of a run are predicted, as numbers for the page's pictures.

They are of the rows that the page lists (the first repeat of a run), so that a point of a curve
can be clicked and the slides behind it shown.
"""

import math
from typing import Any

import numpy as np
import pandas as pd
from jaxtyping import Bool, Float, Int
from sklearn.metrics import roc_auc_score, roc_curve

from gpmil.decide import metrics
from gpmil.files.foreign import BadFile
from gpmil.runs.files import METRICS, read_metrics
from gpmil.runs.naming import NO_CALLS
from gpmil.viewer.cohort import Missing, ShownRun

RESAMPLES = 300  # where metrics.json does not have the interval: it is waited for


def curves(run: ShownRun, asked: str | None = None) -> dict[str, Any]:
    """ROC curve, reliability and confusion; Missing where no label is known."""
    coupling = run.coupling(asked)
    if not run.calls(coupling):
        raise Missing(f"coupling {coupling} is not that of the fit. {NO_CALLS}")
    table = run.tables[coupling]
    known = table[table["label"].isin([0.0, 1.0]) & table["probability"].notna()]
    if not len(known):
        raise Missing(f"run {run.name} knows no label of a slide: there is nothing to judge by.")
    y = known["label"].to_numpy().astype(np.int64)
    p = known["probability"].to_numpy(dtype=np.float64)
    found = _judged(run, coupling)
    judged = found.get("slides", {}).get("metrics")
    return {
        "roc": None if len(np.unique(y)) < 2 else _roc(known, y, p, judged),
        "reliability": _reliability(y, p),
        "confusion": _confusion(y, known["call"].to_numpy() == 1),
        "metrics": judged,
        "patient_metrics": found.get("patients", {}).get("metrics"),
        "class_metrics": (found.get("grades") or found.get("classes") or {}).get("metrics"),
        "patients_known": bool((known["patient"] != "").any()),
    }


def _judged(run: ShownRun, coupling: str) -> dict[str, Any]:
    """metrics.json, of a coupling; empty where there is none."""
    file = run.file(METRICS)
    try:
        found = {} if file is None else read_metrics(file)
    except BadFile as error:
        raise Missing(str(error)) from error
    return found.get("couplings", {}).get(coupling, {}) if coupling else found


def _roc(
    known: pd.DataFrame,
    y: Int[np.ndarray, " n"],
    p: Float[np.ndarray, " n"],
    judged: dict[str, Any] | None,
) -> dict[str, Any]:
    fpr, tpr, threshold = roc_curve(y, p)
    return {
        "fpr": fpr.tolist(),
        "tpr": tpr.tolist(),
        # The first point calls no slide positive: its threshold is infinite, which JSON lacks.
        "threshold": [t if math.isfinite(t) else None for t in threshold.tolist()],
        "auc": _auc(known, y, p, judged),
    }


def _auc(
    known: pd.DataFrame,
    y: Int[np.ndarray, " n"],
    p: Float[np.ndarray, " n"],
    judged: dict[str, Any] | None,
) -> dict[str, float | None]:
    """From metrics.json where it is of these rows, else made anew: repeats, other labels."""
    own = (judged or {}).get("auc") or {}
    if math.isclose(own.get("value") or math.nan, roc_auc_score(y, p), abs_tol=1e-9):
        return {k: own.get(k) for k in ("value", "low", "high")}
    patient = np.where(known["patient"] == "", "slide " + known.index, known["patient"])
    found = metrics.bag_metrics(y, p, groups=patient, n_bootstrap=RESAMPLES)["auc"]
    values = {"value": found.value, "low": found.low, "high": found.high}
    return {k: None if math.isnan(v) else v for k, v in values.items()}


def _reliability(y: Int[np.ndarray, " n"], p: Float[np.ndarray, " n"]) -> list[dict[str, Any]]:
    """Bins of equally many slides, with the range of their probabilities."""
    found = metrics.reliability_curve(y, p)
    end = np.cumsum(found.count)
    start, rising = end - found.count, np.sort(p)
    columns = {
        "low": rising[start],
        "high": rising[end - 1],
        "mean": found.predicted,
        "share": found.observed,
        "n": found.count,
        "share_low": found.low,
        "share_high": found.high,
    }
    rows = zip(*(column.tolist() for column in columns.values()))
    return [dict(zip(columns, row)) for row in rows]


def _confusion(y: Int[np.ndarray, " n"], called: Bool[np.ndarray, " n"]) -> dict[str, int]:
    return {
        "tp": int((called & (y == 1)).sum()),
        "fp": int((called & (y == 0)).sum()),
        "fn": int((~called & (y == 1)).sum()),
        "tn": int((~called & (y == 0)).sum()),
    }
