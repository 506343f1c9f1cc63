"""The models of `gpmil demo`, and how well they do on slides of other patients.

The truth is known for every patch. Beside the models stands a yardstick: how far a classifier gets
that was shown the patch labels. It alone decided what the cohort is like, before any model here was
run: lesions large and distinct enough that its slide AUC is .95 or more (.94 to .99 over six seeds,
mean .97). `--hard` has the lesions of `gpmil.simulate`, from one patch on (.79 to .94, mean .85).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Bool, Float, Int
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import (
    accuracy_score,
    average_precision_score,
    f1_score,
    log_loss,
    roc_auc_score,
)
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from gpmil.data.bags import Bags
from gpmil.models import VGPMILPR, VGPMILPRI, InstancePredictions, paper_settings
from gpmil.runs.learned import LEARNED, MEANINGS, in_words, learned
from gpmil.runs.predict import PredictionOptions

BUDGET = 15  # fits' worth of tuning: the demo is to be over soon, and more changes little here
RATE = PredictionOptions().rate  # of false marks
SMALL = 5  # malignant patches; a smaller lesion is easily missed
PAPER, SUITED = "paper's settings", "learned settings"


@dataclass(frozen=True)
class JudgedModel:
    """A fitted model and what it says of the held-out slides."""

    name: str
    settings: str
    model: VGPMILPR
    log_odds: Float[np.ndarray, " B"]
    probability: Float[np.ndarray, " B"]  # calibrated, where the model is
    patches: InstancePredictions
    metrics: dict[str, float]

    @property
    def title(self) -> str:
        """Model and settings in words."""
        return f"{self.name}, {self.settings}"


def compared(seed: int) -> list[tuple[str, str, VGPMILPR]]:
    """The models to fit, the one to look at first; `uncoupled` makes one more of it."""
    kernel = ("variance", "lengthscale", "mean", "slide_effect")
    paper = {k: v for k, v in paper_settings().items() if k in kernel}
    main = VGPMILPRI(
        slide_effect="auto", flags=True, calibrated=True, tuning_budget=BUDGET, random_state=seed
    )
    coupled = VGPMILPRI(coupling=paper_settings()["coupling"], random_state=seed, **paper)
    return [
        ("VGPMIL-PR-I", SUITED, main),
        ("VGPMIL-PR-I", PAPER, coupled),
        ("VGPMIL-PR", PAPER, VGPMILPR(random_state=seed, **paper)),
    ]


def uncoupled(main: VGPMILPR, seed: int) -> tuple[str, str, VGPMILPR]:
    """VGPMIL-PR at what the main model learned: what the coupling alone does."""
    found = {name.rstrip("_"): v for name, v in learned(main).items() if name != "coupling_"}
    return "VGPMIL-PR", SUITED, VGPMILPR(random_state=seed, **found)


def judge(name: str, settings: str, model: VGPMILPR, test: Bags) -> JudgedModel:
    """What a fitted model says of the held-out slides."""
    found = model.predict_all(test)
    patches, probability = found.instances, found.proba[:, 1]
    assert patches is not None  # every model here predicts patches
    metrics = _slide_metrics(test.labels, found.log_odds, probability)
    raw = log_loss(test.labels, -np.expm1(found.log_proba_negative), labels=[0, 1])
    metrics["slide_log_loss_uncalibrated"] = float(raw)
    metrics |= _patch_metrics(test.instance_labels, patches.probability)
    if patches.flagged is not None:
        metrics |= _mark_metrics(test, patches.flagged)
    return JudgedModel(name, settings, model, found.log_odds, probability, patches, metrics)


def _slide_metrics(
    labels: Int[np.ndarray, " B"],
    log_odds: Float[np.ndarray, " B"],
    probability: Float[np.ndarray, " B"],
) -> dict[str, float]:
    return {
        "slide_accuracy": float(accuracy_score(labels, log_odds > 0)),
        "slide_auc": float(roc_auc_score(labels, log_odds)),
        "slide_log_loss": float(log_loss(labels, probability, labels=[0, 1])),
    }


def _patch_metrics(
    labels: Int[np.ndarray, " N"], probability: Float[np.ndarray, " N"]
) -> dict[str, float]:
    marked = probability > 0.5
    return {
        "patch_auc": float(roc_auc_score(labels, probability)),
        "patch_average_precision": float(average_precision_score(labels, probability)),
        "patch_accuracy_at_half": float(accuracy_score(labels, marked)),
        "patch_f1_at_half": float(f1_score(labels, marked, zero_division=0)),
        "patches_above_half": int(marked.sum()),
        "malignant_patches_above_half": int(marked[labels == 1].sum()),
        "largest_patch_probability": float(probability.max()),
    }


def _mark_metrics(test: Bags, flagged: Bool[np.ndarray, " N"]) -> dict[str, float]:
    hits = flagged & (test.instance_labels == 1)
    marked, right = (np.add.reduceat(a, test.offsets[:-1], dtype=int) for a in (flagged, hits))
    false = (marked - right) / np.maximum(marked, 1)  # of a slide's marks; 0 without any
    return {
        "patches_marked": int(flagged.sum()),
        "malignant_patches_marked": int(hits.sum()),
        "false_share_of_marks": float(false.mean()),
    }


def measure_yardstick(train: Bags, test: Bags) -> dict[str, float]:
    """Logistic regression on the true patch labels; a slide scores as its highest patch."""
    model = make_pipeline(StandardScaler(), LogisticRegression(C=0.01, max_iter=500))
    score = model.fit(train.features, train.instance_labels).decision_function(test.features)
    highest = [piece.max() for piece in test.split(score)]
    return {
        "slide_auc": float(roc_auc_score(test.labels, highest)),
        "patch_auc": float(roc_auc_score(test.instance_labels, score)),
        "patch_average_precision": float(average_precision_score(test.instance_labels, score)),
    }


def lesion_sizes(bags: Bags) -> Int[np.ndarray, " B"]:
    """Number of malignant patches of each slide."""
    return np.add.reduceat(bags.instance_labels, bags.offsets[:-1])


def findings(test: Bags, judged: Sequence[JudgedModel], yardstick: dict[str, float]) -> list[str]:
    """What was found, in sentences that hold whatever the numbers are."""
    best, plain, paper = (j.metrics for j in judged[:3])
    lesion = lesion_sizes(test)[test.labels == 1]
    return [
        f"How hard this cohort is: {(lesion < SMALL).sum()} of the {len(lesion)} "
        f"positive held-out slides have fewer than {SMALL} malignant patches, in slides of "
        f"{np.median(test.sizes):.0f} patches (median). For scale, a logistic regression trained "
        "on the true patch labels, which the models here never see, reaches AUC "
        f"{yardstick['slide_auc']:.3f} for slides (by their highest patch) and "
        f"{yardstick['patch_auc']:.3f} for patches (average precision "
        f"{yardstick['patch_average_precision']:.3f}).",
        f"With {len(test)} held-out slides an accuracy has a standard error of about "
        f"{0.5 / np.sqrt(len(test)):.2f}, and another seed can change the order of the rows: do "
        "not rank models by one run of this demo.",
        f"The {SUITED} come from the labels of the training slides alone: they make every slide's "
        f"label likeliest under a fit without its fold. {_learned(judged[0].model)} Against "
        f"the {PAPER} (VGPMIL-PR-I): {_changes(paper, best)}. {_verdict(paper, best)}",
        f"Calibration, by five more fits that each leave out a fifth of the training slides: log "
        f"loss of VGPMIL-PR-I with the {SUITED} {best['slide_log_loss_uncalibrated']:.3f} → "
        f"{best['slide_log_loss']:.3f}. The other rows are not calibrated.",
        *_patch_findings(test, paper, best),
        f"Coupling neighbours (VGPMIL-PR at what VGPMIL-PR-I learned, against VGPMIL-PR-I): "
        f"{_changes(plain, best)}. Coupling steadies patches through their neighbours; a lesion of "
        "one or two patches can be smoothed away by it.",
    ]


def _patch_findings(test: Bags, paper: dict[str, float], best: dict[str, float]) -> list[str]:
    malignant = int(test.instance_labels.sum())
    benign = 1 - malignant / test.n_instances
    marked, found = best["patches_marked"], best["malignant_patches_marked"]
    return [
        f"Of {malignant} malignant patches VGPMIL-PR-I puts above 0.5 {_above_half(paper)} with "
        f"the {PAPER}, and {_above_half(best)} with the {SUITED}. Without a slide effect a few "
        "slightly suspicious patches already explain a positive slide, so probabilities stay low. "
        f"Calling every patch benign has accuracy {benign:.3f}.",
        f"Marks need no threshold: at a false discovery rate of {100 * RATE:g} % inside every "
        f"slide {marked} patches are marked, {found} of them malignant. Over slides the share of "
        f"false marks is {100 * best['false_share_of_marks']:.1f} % on average, which is what the "
        "rate is about; on a single slide it can be far more. The p-value of a patch compares it "
        "with patches of negative training slides that the model has not seen.",
    ]


def _above_half(metrics: dict[str, float]) -> str:
    hits = metrics["malignant_patches_above_half"]
    return f"{hits} (and {metrics['patches_above_half'] - hits} benign ones)"


def _learned(model: VGPMILPR) -> str:
    return (
        f"Found: {in_words(learned(model))}, after {len(model.tuning_trace_ or [])} trials (mean "
        f"log likelihood of a slide left out: {model.loo_log_likelihood_:.3f}; {-np.log(2):.3f} "
        f"is a coin). The slide effect is {MEANINGS['slide_effect_']}."
    )


def _verdict(paper: dict[str, float], best: dict[str, float]) -> str:
    """Where the learned settings are not ahead, and what that may mean."""
    gains = {
        "slide AUC": best["slide_auc"] - paper["slide_auc"],
        "slide log loss": paper["slide_log_loss"] - best["slide_log_loss"],
        "patch AUC": best["patch_auc"] - paper["patch_auc"],
    }
    behind = [name for name, gain in gains.items() if gain < 0]
    if not behind:
        return f"Learning is behind in none of {', '.join(gains)}."
    return (
        f"Learning is behind in {', '.join(behind)}: it sees one label per training slide and "
        "nothing else, which few slides or tiny lesions make a poor guide."
    )


def _changes(before: dict[str, float], after: dict[str, float]) -> str:
    shown = {
        "patch average precision": "patch_average_precision",
        "patch AUC": "patch_auc",
        "slide AUC": "slide_auc",
        "slide log loss": "slide_log_loss",
    }
    return ", ".join(f"{name} {before[k]:.3f} → {after[k]:.3f}" for name, k in shown.items())


def settings_card(name: str, settings: str, model: VGPMILPR) -> dict[str, Any]:
    """A model's settings as they are written to config.json and shown."""
    names = [name.rstrip("_") for name in LEARNED]
    given = {key: getattr(model, key, 0.0) for key in (*names, "kernel", "n_inducing", "solver")}
    return {"model": name, "settings": settings, **given}
