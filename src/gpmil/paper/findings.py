"""What the paper concludes from its experiments, checked on the data at hand.

A finding that does not hold here is said not to hold; one that cannot be judged says why.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd
from sklearn.metrics import roc_auc_score

from gpmil.paper import scores
from gpmil.paper.exhibit import Exhibit
from gpmil.paper.figure6_variability import variability
from gpmil.paper.methods import COUPLINGS, DEFAULT, key_of
from gpmil.paper.results import MethodRun, Results
from gpmil.show.report import Table

PRI = tuple(map(key_of, COUPLINGS))
MAIN = key_of(DEFAULT)
SAME_COST = 1.25  # largest mean training time over smallest that counts as the same
LITTLE = 1.0  # points of accuracy: a deviation over runs that counts as little

Judged = tuple[bool | None, str]


@dataclass(frozen=True)
class Finding:
    """A sentence of the paper, whether it holds here (None: cannot be judged), the numbers."""

    claim: str
    holds: bool | None
    evidence: str

    @property
    def verdict(self) -> str:
        """In words."""
        return {True: "holds", False: "does not hold", None: "cannot be judged"}[self.holds]


def build(results: Results, panda: Results | None = None) -> Exhibit:
    """All findings as one exhibit."""
    found = check(results, panda)
    rows = [[f.claim, f.verdict, f.evidence] for f in found]
    columns = ["the paper finds", "here", "evidence"]
    strong = [k for k, f in enumerate(found) if f.holds]
    judged = sum(f.holds is not None for f in found)
    return Exhibit(
        "Findings",
        "findings",
        "What the paper concludes, checked here",
        [f"{len(strong)} of {judged} findings hold on the {results.name}.", results.source],
        pd.DataFrame(rows, columns=columns),
        [Table(columns, rows, text=columns[1:2], strong=strong, sentences=columns[::2])],
    )


def check(results: Results, panda: Results | None = None) -> list[Finding]:
    """Every finding; those about patches need known patch labels."""
    found = [_judge(claim, judge, results) for claim, judge in CLAIMS]
    if panda is not None:
        claim = "On the large cohort VGPMIL-PR-I has the highest slide accuracy of all models."
        found.append(_judge(claim, _panda, panda))
    return found


class _CannotJudge(Exception):
    """The runs or labels that a finding needs are not there."""


def _judge(claim: str, judge: Callable[[Results], Judged], results: Results) -> Finding:
    try:
        return Finding(claim, *judge(results))
    except _CannotJudge as reason:
        return Finding(claim, None, str(reason))


def _runs(results: Results, key: str) -> list[MethodRun]:
    runs = results.of(key)
    if not runs:
        raise _CannotJudge(f"{key} was not run.")
    return runs


def _patches(results: Results, key: str) -> list[np.ndarray]:
    """The patch probabilities of every run that has them."""
    every = [run.patch_probability for run in _runs(results, key)]
    return [p for p in every if p is not None]


def _require_patch_labels(results: Results) -> None:
    if not results.knows_patches:
        raise _CannotJudge("no test patches of both classes with known labels.")


def _mean(values: Iterable[float]) -> float:
    return float(np.mean(list(values)))


def _along_lambda(before: str, after: Sequence[float], unit: str = "", digits: int = 2) -> str:
    """VGPMIL-PR, and VGPMIL-PR-I at every lambda, in words."""
    return f"VGPMIL-PR {before}; VGPMIL-PR-I {_listed(after, digits)}{unit} for λ = {_lambdas()}"


def _lambdas() -> str:
    return ", ".join(f"{c:g}" for c in COUPLINGS)


def _listed(values: Sequence[float], digits: int = 2) -> str:
    return ", ".join(f"{value:.{digits}f}".rstrip("0").rstrip(".") for value in values)


# --- Patches --------------------------------------------------------------------------------------
def _patch(results: Results, key: str) -> float:
    """Mean accuracy over runs."""
    _require_patch_labels(results)
    return _mean(scores.of_patches(results, r)["accuracy"] for r in _runs(results, key))


def _patch_auc(results: Results, key: str) -> float:
    _require_patch_labels(results)
    known, truth = results.known, results.patch_truth
    return _mean(roc_auc_score(truth, p[known]) for p in _patches(results, key))


def _coupling_and_accuracy(results: Results) -> Judged:
    before, after = _patch(results, "pr"), [_patch(results, key) for key in PRI]
    words = _along_lambda(f"{before:.2f} %", after, " %")
    if max(p.max() for key in ("pr", *PRI) for p in _patches(results, key)) <= 0.5:
        return False, words + ". No patch passes 0.5 under any of them: nothing can differ."
    return after[PRI.index(MAIN)] > before, words


def _coupling_and_auc(results: Results) -> Judged:
    before, after = _patch_auc(results, "pr"), [_patch_auc(results, key) for key in PRI]
    words = "AUC: " + _along_lambda(f"{before:.3f}", after, digits=3)
    return all(value > before for value in after), words


def _coupling_and_marks(results: Results) -> Judged:
    _require_patch_labels(results)
    found = {}
    for key in ("pr", MAIN):
        flagged = _runs(results, key)[0].flagged
        if flagged is None:
            raise _CannotJudge("patches were not marked.")
        found[key] = scores.four(results.patch_truth, flagged[results.known])["accuracy"]
    words = f"VGPMIL-PR {found['pr']:.2f} %, VGPMIL-PR-I (λ = {DEFAULT:g}) {found[MAIN]:.2f} %"
    return found[MAIN] > found["pr"], words


def _pr_beats_vgpmil_patches(results: Results) -> Judged:
    first, second = _patch(results, "vgpmil"), _patch(results, "pr")
    a, b = _patch_auc(results, "vgpmil"), _patch_auc(results, "pr")
    return second > first, f"accuracy {first:.2f} % and {second:.2f} % (AUC {a:.3f} and {b:.3f})"


def _pri_beats_pseudo(results: Results) -> Judged:
    best = max(_patch(results, key) for key in PRI)
    other, auc = _patch(results, "pseudo"), _patch_auc(results, "pseudo")
    ours = max(_patch_auc(results, key) for key in PRI)
    words = (
        f"accuracy: best VGPMIL-PR-I {best:.2f} %, PS-MIL {other:.2f} % (AUC {ours:.3f}, {auc:.3f})"
    )
    return best > other, words


def _variability(results: Results) -> Judged:
    before, *after = (
        _mean(variability(results.test, p) for p in _patches(results, key)) for key in ("pr", *PRI)
    )
    falls = (np.diff([before, *after]) < 0).all()
    return bool(falls), _along_lambda(f"{before:.4f}", after, digits=4)


# --- Slides ---------------------------------------------------------------------------------------
def _right(results: Results, label: int) -> tuple[list[float], str]:
    """Slides of a class that are right, under VGPMIL-PR and at every lambda; in words, too."""
    truth = results.test.labels
    of_class = truth == label
    found = [
        _mean(((r.log_odds > 0) == label)[of_class].sum() for r in _runs(results, key))
        for key in ("pr", *PRI)
    ]
    return found, _along_lambda(f"{found[0]:g} of {of_class.sum()}", found[1:])


def _negatives(results: Results) -> Judged:
    found, words = _right(results, 0)
    return bool((np.diff(found) >= 0).all() and found[-1] > found[0]), words


def _positives(results: Results) -> Judged:
    found, words = _right(results, 1)
    return found[-1] < found[0], words


def _slide(results: Results, key: str) -> float:
    """Mean accuracy over runs."""
    return _mean(scores.of_slides(results, r)["accuracy"] for r in _runs(results, key))


def _pr_beats_vgpmil_slides(results: Results) -> Judged:
    first, second = _slide(results, "vgpmil"), _slide(results, "pr")
    return second > first, f"accuracy {first:.2f} % and {second:.2f} %"


def _attention_first(results: Results) -> Judged:
    attention = max(_slide(results, key) for key in ("attention", "gated"))
    ours, tuned = _slide(results, MAIN), _slide(results, "tuned")
    others = max(_slide(results, key) for key in ("mean", "pseudo"))
    words = (
        f"accuracy: attention {attention:.2f} %, VGPMIL-PR-I {ours:.2f} % (learned settings "
        f"{tuned:.2f} %), the better of mean and pseudo labels {others:.2f} %"
    )
    return attention > ours > others, words


def _panda(results: Results) -> Judged:
    ours, tuned = _slide(results, MAIN), _slide(results, "tuned")
    keys = ("vgpmil", "pr", "attention", "gated", "mean", "pseudo")
    others = {key: _slide(results, key) for key in keys}
    best = max(others, key=lambda key: others[key])
    words = (
        f"VGPMIL-PR-I {ours:.2f} % (learned settings {tuned:.2f} %); the best other is "
        f"{results.method(best).name}, {others[best]:.2f} %"
    )
    return ours > others[best], words


# --- Cost and steadiness --------------------------------------------------------------------------
def _fit_time(results: Results, key: str) -> float:
    return _mean(run.fit_seconds for run in _runs(results, key))


def _cost_of_lambda(results: Results) -> Judged:
    found = [_fit_time(results, key) for key in PRI]
    ratio = max(found) / min(found)
    words = f"{_listed(found)} s for λ = {_lambdas()}: largest over smallest {ratio:.2f}"
    return ratio < SAME_COST, f"{words} (same: below {SAME_COST:g})"


def _vgpmil_slower(results: Results) -> Judged:
    first, second = _fit_time(results, "vgpmil"), _fit_time(results, MAIN)
    return first > second, f"{first:.1f} s and {second:.1f} s: {first / second:.1f} times"


def _steady(results: Results) -> Judged:
    if min(len(_runs(results, key)) for key in PRI) < 2:
        raise _CannotJudge("one run only.")
    widest = [_widest(results, scores.of_slides)]
    words = f"largest deviation over runs: {widest[0]:.2f} points of slide accuracy"
    if results.knows_patches:
        widest.append(_widest(results, scores.of_patches))
        words += f", {widest[1]:.2f} points of patch accuracy"
    holds = max(widest) <= max(LITTLE, 100 / len(results.test))
    return bool(holds), f"{words} (little: {LITTLE:g} point, or one slide)"


def _widest(results: Results, measure: Callable[[Results, MethodRun], dict[str, float]]) -> float:
    """The largest deviation of accuracy over the runs of one lambda."""
    every = [[measure(results, r)["accuracy"] for r in results.of(key)] for key in PRI]
    return max(float(np.std(values, ddof=1)) for values in every)


CLAIMS: Sequence[tuple[str, Callable[[Results], Judged]]] = (
    (
        "Coupling raises patch accuracy over VGPMIL-PR (λ = 0.5, threshold 0.5).",
        _coupling_and_accuracy,
    ),
    ("... judged by the ranking of patches, for all five λ.", _coupling_and_auc),
    ("... judged by patches marked at a false discovery rate of 10 %.", _coupling_and_marks),
    ("Variability inside slides falls as λ grows.", _variability),
    ("More negative slides are right as λ grows.", _negatives),
    ("Positive slides suffer at strong λ.", _positives),
    ("VGPMIL-PR beats VGPMIL, patches (threshold 0.5).", _pr_beats_vgpmil_patches),
    ("VGPMIL-PR beats VGPMIL, slides.", _pr_beats_vgpmil_slides),
    ("VGPMIL-PR-I beats PS-MIL at patches (threshold 0.5).", _pri_beats_pseudo),
    ("Slides: attention is best, VGPMIL-PR-I next.", _attention_first),
    ("The cost of training does not depend on λ.", _cost_of_lambda),
    ("VGPMIL is slower to train than VGPMIL-PR-I.", _vgpmil_slower),
    ("Results of VGPMIL-PR-I vary little over runs.", _steady),
)
