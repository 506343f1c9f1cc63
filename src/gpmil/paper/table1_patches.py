"""Table 1: predictions of patches, at the plain threshold 0.5 and beyond it."""

import math
from collections.abc import Sequence
from functools import partial

import numpy as np
import pandas as pd
from sklearn.metrics import average_precision_score, roc_auc_score

from gpmil.decide.metrics import false_discovery_rate, within_bag_auc
from gpmil.paper import scores
from gpmil.paper.exhibit import Exhibit
from gpmil.paper.methods import COUPLINGS, TUNED, key_of
from gpmil.paper.results import MethodRun, Results
from gpmil.paper.study import RATE
from gpmil.show.report import Table

KEYS = ("vgpmil", "pr", *map(key_of, COUPLINGS), *TUNED, "max", "pseudo")
SCORES = {  # column: digits
    "AUC": 3,
    "average precision": 3,
    "AUC within slides": 3,
    "patches above 0.5": 0,
    "largest probability": 2,
    "accuracy of marks (%)": 1,
    "F1 of marks (%)": 1,
    "false marks (%)": 1,
}
exhibit = partial(
    Exhibit, "Table 1", "table1_patches", "Predictive performance at the level of patches"
)


def build(results: Results) -> Exhibit:
    """The paper's four metrics, and what does not depend on the threshold 0.5."""
    if not results.knows_patches:
        missing = "Needs test patches of both classes with known labels: these data have none."
        return exhibit(missing=missing)
    alt = "patches for every method, with the paper's values"
    shown = scores.shown(results, KEYS, "table1", "patch", scores.OF_THE_PAPER, alt)
    beyond = beyond_threshold(results)
    shown["frame"] = pd.concat([shown["frame"], _long(beyond)], ignore_index=True)
    shown["tables"].append(_second(beyond))
    return exhibit(_words(results, beyond), **shown)


def beyond_threshold(results: Results) -> pd.DataFrame:
    """Ranking and marks of every method that scores patches; means over runs."""
    rows = []
    for method, runs in results.were_run(KEYS):
        if runs[0].patch_probability is not None:
            each = pd.DataFrame([_measures(results, run) for run in runs])
            rows.append({"key": method.key, "method": method.label, **each.mean()})
    return pd.DataFrame(rows)


def _measures(results: Results, run: MethodRun) -> dict[str, float]:
    assert run.patch_probability is not None
    known, truth = results.known, results.patch_truth
    p, bag = run.patch_probability[known], results.test.bag_index[known]
    found = {
        "AUC": roc_auc_score(truth, p),
        "average precision": average_precision_score(truth, p),
        "AUC within slides": within_bag_auc(truth, p, bag),
        "patches above 0.5": float((p > 0.5).sum()),
        "largest probability": float(p.max()),
    }
    if run.flagged is None:
        return found | dict.fromkeys(list(SCORES)[5:], math.nan)
    marks = scores.four(truth, run.flagged[known])
    false = 100 * false_discovery_rate(truth, run.flagged[known])
    return found | dict(zip(list(SCORES)[5:], (marks["accuracy"], marks["f1"], false)))


def _second(beyond: pd.DataFrame) -> Table:
    rows = [
        [row["method"], *(_number(row[name], digits) for name, digits in SCORES.items())]
        for _, row in beyond.iterrows()
    ]
    caption = (
        f"Beyond the threshold: how well patches are ranked, and patches marked at a false "
        f"discovery rate of {RATE:.0%} inside every slide (conformal p-values against held-out "
        "patches of negative training slides; first run). Marks need no patch label and no "
        "threshold; the promise is about tissue like that of negative slides."
    )
    return Table(["method", *SCORES], rows, caption, text=["method"])


def _number(value: float, digits: int) -> str:
    return "" if np.isnan(value) else f"{value:,.{digits}f}"


def _long(beyond: pd.DataFrame) -> pd.DataFrame:
    return beyond.melt(id_vars=["key", "method"], var_name="metric", value_name="mean")


def _words(results: Results, beyond: pd.DataFrame) -> Sequence[str]:
    truth = results.patch_truth
    benign = float((truth == 0).mean())
    words = [
        f"{len(truth):,} test patches have a known label, {1 - benign:.1%} of them malignant: "
        f"calling every patch benign has accuracy {benign:.1%}."
    ]
    paper = beyond[beyond["key"].isin(["pr", *map(key_of, COUPLINGS)])]
    if len(paper) and (paper["patches above 0.5"] < 0.5).all():
        words.append(
            "At the paper's settings no patch passes 0.5 under VGPMIL-PR or VGPMIL-PR-I: a few "
            "slightly suspicious patches already explain a positive slide, so probabilities stay "
            "low. The four metrics at that threshold say nothing then; the second table does."
        )
    return words
