"""The models of `gpmil demo`, and how well they do on slides of other patients.

The truth is known for every patch. Beside the models stands a yardstick: how far a classifier gets
that was shown the patch labels.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Float, Int
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
from gpmil.models.base import log_odds

BUDGET = 22  # fits' worth of tuning: the demo is to be over soon, and more changes little here
SMALL = 5  # malignant patches; a smaller lesion is easily missed
PAPER, SUITED = "paper's settings", "learned settings"


@dataclass(frozen=True)
class JudgedModel:
    """A fitted model and what it says of the held-out slides."""

    name: str
    settings: str
    model: VGPMILPR
    log_odds: Float[np.ndarray, " B"]
    probability: Float[np.ndarray, " B"]
    error: Float[np.ndarray, " B"]  # standard error of the probability as a computed number
    patches: InstancePredictions
    metrics: dict[str, float]

    @property
    def title(self) -> str:
        """Model and settings in words."""
        return f"{self.name}, {self.settings}"


def compared(seed: int) -> list[tuple[str, str, VGPMILPR]]:
    """The models that are compared, the one to look at first."""
    kernel = ("variance", "lengthscale", "mean")
    paper = {k: v for k, v in paper_settings().items() if k in kernel}
    return [
        ("VGPMIL-PR-I", SUITED, VGPMILPRI(tuning_budget=BUDGET, random_state=seed)),
        ("VGPMIL-PR", SUITED, VGPMILPR(tuning_budget=BUDGET, random_state=seed)),
        (
            "VGPMIL-PR-I",
            PAPER,
            VGPMILPRI(coupling=paper_settings()["coupling"], random_state=seed, **paper),
        ),
        ("VGPMIL-PR", PAPER, VGPMILPR(random_state=seed, **paper)),
    ]


def judge(name: str, settings: str, model: VGPMILPR, test: Bags) -> JudgedModel:
    """What a fitted model says of the held-out slides."""
    # One estimate of log P(all patches negative) serves all three numbers of a slide.
    found = model.predict_all(test)
    log_negative, patches = found.log_proba_negative, found.instances
    assert patches is not None  # every model here predicts patches
    odds, probability = log_odds(log_negative), -np.expm1(log_negative)
    error = np.exp(log_negative) * found.error
    metrics = _slide_metrics(test.labels, odds, probability)
    metrics |= _patch_metrics(test.instance_labels, patches.probability)
    return JudgedModel(name, settings, model, odds, probability, error, patches, metrics)


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
    malignant = int(test.instance_labels.sum())
    benign = 1 - malignant / test.n_instances
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
        f"The threshold 0.5 says little about patches. With the {PAPER}, VGPMIL-PR-I puts "
        f"{_count(paper['malignant_patches_above_half'])} of {malignant} malignant patches above "
        f"it (largest probability {paper['largest_patch_probability']:.2f}), and with the "
        f"{SUITED} {_count(best['malignant_patches_above_half'])}. A few slightly suspicious "
        "patches already explain a positive slide, so probabilities stay low; their order is what "
        f"informs (AUC, average precision). Calling every patch benign has accuracy {benign:.3f}.",
        f"The {SUITED} come from the labels of the training slides alone: they make every slide's "
        f"label likeliest under the fit without that slide. {_learned(judged[0].model)} Against "
        f"the {PAPER} (VGPMIL-PR-I): {_changes(paper, best)}.",
        f"Coupling neighbours ({SUITED}, VGPMIL-PR against VGPMIL-PR-I): "
        f"{_changes(plain, best)}. Coupling steadies patches through their neighbours; a lesion of "
        "one or two patches can be smoothed away by it.",
    ]


def _learned(model: VGPMILPR) -> str:
    return (
        f"Found: variance {model.variance_:.3g}, length {model.lengthscale_:.3g}, prior mean "
        f"{model.mean_:.3g}, coupling {model.coupling_:.3g}, after "
        f"{len(model.tuning_trace_ or [])} trials (mean log likelihood of a slide left out: "
        f"{model.loo_log_likelihood_:.3f}; {-np.log(2):.3f} is a coin)."
    )


def _changes(before: dict[str, float], after: dict[str, float]) -> str:
    shown = {
        "patch average precision": "patch_average_precision",
        "patch AUC": "patch_auc",
        "slide AUC": "slide_auc",
        "slide log loss": "slide_log_loss",
    }
    return ", ".join(f"{name} {before[k]:.3f} → {after[k]:.3f}" for name, k in shown.items())


def _count(n: float) -> str:
    return "none" if n == 0 else f"{n:.0f}"


def settings_card(name: str, settings: str, model: VGPMILPR) -> dict[str, Any]:
    """A model's settings as they are written to config.json and shown."""
    keys = ("coupling", "variance", "lengthscale", "mean", "kernel", "n_inducing", "solver")
    given = {key: getattr(model, key, 0.0) for key in keys}
    return {"model": name, "settings": settings, **given}
