"""What the paper concludes from its experiments, checked on the data at hand.

A finding that does not hold here is said not to hold; one that cannot be judged says why.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd
from sklearn.metrics import roc_auc_score

from gpmil.paper import scores, table3_confusion
from gpmil.paper.exhibit import Exhibit
from gpmil.paper.figure6_variability import variability
from gpmil.paper.methods import COUPLINGS, DEFAULT, key_of
from gpmil.paper.results import Results, Run
from gpmil.show.report import Table

PRI = tuple(map(key_of, COUPLINGS))
MAIN = key_of(DEFAULT)
STRONGEST = PRI[-1]
SAME_COST = 1.25  # largest mean training time over smallest that counts as the same
LITTLE = 1.0  # points of accuracy: a deviation over runs that counts as little


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
    judged = [f for f in found if f.holds is not None]
    right = sum(bool(f.holds) for f in judged)
    lead = f"{right} of {len(judged)} findings hold on the {results.name}."
    return Exhibit(
        "Findings",
        "findings",
        "What the paper concludes, checked here",
        [lead, results.source],
        pd.DataFrame(rows, columns=columns),
        [
            Table(
                columns,
                rows,
                text=[columns[1]],
                strong=[k for k, f in enumerate(found) if f.holds],
                sentences=[columns[0], columns[2]],
            )
        ],
    )


def check(results: Results, panda: Results | None = None) -> list[Finding]:
    """Every finding; those about patches need known patch labels."""
    found: list[Finding] = []
    for claim, judge in CLAIMS:
        found += _judge(claim, judge, results)
    if panda is not None:
        claim = "On the large cohort VGPMIL-PR-I has the highest slide accuracy of all models."
        found += _judge(claim, _panda, panda)
    return found


Judged = tuple[bool | None, str]


class _CannotJudge(Exception):
    """The runs or labels that a finding needs are not there."""


def _judge(claim: str, judge: Callable[[Results], Judged], results: Results) -> list[Finding]:
    try:
        return [Finding(claim, *judge(results))]
    except _CannotJudge as reason:
        return [Finding(claim, None, str(reason))]


def _runs(results: Results, key: str) -> list[Run]:
    runs = results.of(key)
    if not runs:
        raise _CannotJudge(f"{key} was not run.")
    return runs


# --- Patches --------------------------------------------------------------------------------------
def _patch(results: Results, key: str, metric: str = "accuracy") -> float:
    if not results.knows_patches:
        raise _CannotJudge("no test patches of both classes with known labels.")
    runs = _runs(results, key)
    return float(np.mean([scores.of_patches(results, run)[metric] for run in runs]))


def _patch_auc(results: Results, key: str) -> float:
    if not results.knows_patches:
        raise _CannotJudge("no test patches of both classes with known labels.")
    labels = results.test.instance_labels
    assert labels is not None
    known = labels >= 0
    every = [run.patch_probability for run in _runs(results, key)]
    return float(np.mean([roc_auc_score(labels[known], p[known]) for p in every if p is not None]))


def _coupling_and_accuracy(results: Results) -> Judged:
    before, after = _patch(results, "pr"), [_patch(results, key) for key in PRI]
    words = f"VGPMIL-PR {before:.2f} %; VGPMIL-PR-I {_listed(after)} % for λ = {_lambdas()}"
    if max(_highest(results, key) for key in ("pr", *PRI)) <= 0.5:
        return False, words + ". No patch passes 0.5 under any of them: nothing can differ."
    return after[PRI.index(MAIN)] > before, words


def _highest(results: Results, key: str) -> float:
    every = [run.patch_probability for run in _runs(results, key)]
    return max(float(p.max()) for p in every if p is not None)


def _coupling_and_auc(results: Results) -> Judged:
    before, after = _patch_auc(results, "pr"), [_patch_auc(results, key) for key in PRI]
    words = f"AUC: VGPMIL-PR {before:.3f}; VGPMIL-PR-I {_listed(after, 3)} for λ = {_lambdas()}"
    return all(value > before for value in after), words


def _coupling_and_marks(results: Results) -> Judged:
    labels = results.test.instance_labels
    if not results.knows_patches or labels is None:
        raise _CannotJudge("no test patches of both classes with known labels.")
    known, found = labels >= 0, {}
    for key in ("pr", MAIN):
        flagged = _runs(results, key)[0].flagged
        if flagged is None:
            raise _CannotJudge("patches were not marked.")
        found[key] = scores.four(labels[known], flagged[known])["accuracy"]
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
    keys = ("pr", *PRI)
    every = [[run.patch_probability for run in _runs(results, key)] for key in keys]
    found = [
        float(np.mean([variability(results.test, p) for p in runs if p is not None]))
        for runs in every
    ]
    words = f"VGPMIL-PR {found[0]:.4f}; VGPMIL-PR-I {_listed(found[1:], 4)} for λ = {_lambdas()}"
    return bool((np.diff(found) < 0).all()), words


# --- Slides ---------------------------------------------------------------------------------------
def _cell(results: Results, key: str, cell: int) -> float:
    labels = results.test.labels
    every = [table3_confusion.counts(labels, run.log_odds > 0)[cell] for run in _runs(results, key)]
    return float(np.mean(every))


def _negatives(results: Results) -> Judged:
    found = [_cell(results, key, 0) for key in ("pr", *PRI)]
    total = int((results.test.labels == 0).sum())
    words = (
        f"VGPMIL-PR {found[0]:g} of {total}; VGPMIL-PR-I {_listed(found[1:])} for λ = {_lambdas()}"
    )
    return bool((np.diff(found) >= 0).all() and found[-1] > found[0]), words


def _positives(results: Results) -> Judged:
    found = [_cell(results, key, 3) for key in ("pr", *PRI)]
    total = int(results.test.labels.sum())
    words = (
        f"VGPMIL-PR {found[0]:g} of {total}; VGPMIL-PR-I {_listed(found[1:])} for λ = {_lambdas()}"
    )
    return found[-1] < found[0], words


def _slide(results: Results, key: str) -> float:
    return float(np.mean([scores.of_slides(results, r)["accuracy"] for r in _runs(results, key)]))


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
    return float(np.mean([run.fit_seconds for run in _runs(results, key)]))


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
    slide = [[scores.of_slides(results, r)["accuracy"] for r in results.of(k)] for k in PRI]
    widest = [max(np.std(values, ddof=1) for values in slide)]
    words = f"largest deviation over runs: {widest[0]:.2f} points of slide accuracy"
    if results.knows_patches:
        patch = [[scores.of_patches(results, r)["accuracy"] for r in results.of(k)] for k in PRI]
        widest.append(max(np.std(values, ddof=1) for values in patch))
        words += f", {widest[1]:.2f} points of patch accuracy"
    one = 100 / len(results.test)
    return bool(
        max(widest) <= max(LITTLE, one)
    ), f"{words} (little: {LITTLE:g} point, or one slide)"


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


def _lambdas() -> str:
    return ", ".join(f"{c:g}" for c in COUPLINGS)


def _listed(values: Sequence[float], digits: int = 2) -> str:
    return ", ".join(f"{value:.{digits}f}".rstrip("0").rstrip(".") for value in values)
