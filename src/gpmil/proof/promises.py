"""The error rates that are promised, on cohorts with known truth: one fit, judged by fresh slides.

* Marks: the realised false discovery rate of marked patches at nominal 5, 10 and 20 %. Where the
  assumptions hold (patches independent, benign ones alike in all slides, no coupling), it should be
  the share of negatives x the nominal rate. Then one assumption after the other is broken.
* Refer: how often the true error among accepted slides exceeds alpha, which is promised to happen
  in at most delta = 10 % of cohorts.
* Slides: the calibration error of slide probabilities, calibrated and not, next to that of
  perfectly true probabilities of the same size (labels drawn from them). Calibration learns from
  labels that are right, of slides like those that come: each of the three can be broken.
"""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from jaxtyping import Bool, Float, Int
from sklearn.isotonic import IsotonicRegression

from gpmil.data.bags import Bags
from gpmil.decide.calibration import SlideCalibrator, platt_targets
from gpmil.decide.marks import ConformalReference, benjamini_hochberg, p_values
from gpmil.decide.metrics import calibration_error
from gpmil.models import VGPMILPRI
from gpmil.models.base import log_odds
from gpmil.models.cross_fit import suspicion
from gpmil.proof.tissue import D, Tissue, biopsies, draw, without_groups

RATES = (0.05, 0.1, 0.2)
LEVELS = (0.01, 0.05, 0.1)
DELTA = 0.1
SETTINGS: dict[str, Any] = {
    "variance": 9.0,
    "lengthscale": 2 * np.sqrt(D),
    "mean": -4.0,
    "n_inducing": 50,
    "random_state": 0,
    "device": "cpu",
}
AUTO = dict.fromkeys(("coupling", "variance", "lengthscale", "mean"), "auto")
PAPER = {"coupling": 0.5, "variance": 1.0, "lengthscale": "sqrt_dim", "mean": 0.0}


def model(coupling: float, **changed: Any) -> VGPMILPRI:
    """Given settings that suit these slides."""
    return VGPMILPRI(**SETTINGS | {"coupling": coupling} | changed)


# --- Marks ----------------------------------------------------------------------------------------
INDEPENDENT = Tissue()


@dataclass(frozen=True)
class Flags:
    """One line of the study: what is drawn, and how it is marked."""

    name: str
    tissue: Tissue | None = INDEPENDENT  # None: biopsies
    coupling: float = 0.0
    weights: str = "patch"
    n_bags: int = 80
    n_fresh: int = 200

    def draw(self, n_bags: int, seed: tuple[int, int]) -> Bags:
        """Slides of this case."""
        return (
            biopsies(n_bags, seed, 0.0) if self.tissue is None else draw(n_bags, seed, self.tissue)
        )


HOLD = Flags("assumptions hold")
FLAGS = (
    HOLD,
    replace(HOLD, name="hold; small and weak", n_bags=40, tissue=Tissue(6, 2.0, 0.03, 0.3)),
    replace(HOLD, name="hold; 16 slides, weaker", n_bags=16, tissue=Tissue(6, 1.0, 0.3, 0.4)),
    replace(HOLD, name="coupling 1", coupling=1.0),
    replace(HOLD, name="field effect .5", tissue=Tissue(field_effect=0.5)),
    replace(HOLD, name="field .5, coupling 1", tissue=Tissue(field_effect=0.5), coupling=1.0),
    replace(HOLD, name="correlation .3", tissue=Tissue(correlation=0.3)),
    replace(HOLD, name="correlation .3, by bag", tissue=Tissue(correlation=0.3), weights="bag"),
    replace(HOLD, name="biopsies, coupling 0", tissue=None, n_fresh=100),
    replace(HOLD, name="biopsies, coupling 1", tissue=None, n_fresh=100, coupling=1.0),
)


def flags_cohort(case: Flags, seed: int) -> dict[str, float]:
    """Fit, mark fresh slides, and look at the truth."""
    train, fresh = (
        case.draw(n, (seed, part)) for part, n in enumerate((case.n_bags, case.n_fresh))
    )
    fitted = model(case.coupling, flags=True).fit(train)
    p: Any = fitted.predict_instances(fresh, weights=case.weights).p_value
    benign = fresh.instance_labels == 0
    found = {"share": float(benign.mean())}
    for rate in RATES:
        for within, slides in (("cohort", None), ("bag", fresh.bag_index)):
            flagged = benjamini_hochberg(p, rate, slides)
            found[f"fdr {within} {rate}"] = false_share(flagged, benign, slides)
            found[f"power {within} {rate}"] = float(flagged[~benign].mean())
            if within == "cohort":
                found[f"beside {rate}"] = beside(flagged & benign, fresh)
    own: Any = fitted.predict_instances(train, weights=case.weights).p_value
    return found | null_levels(fitted, fresh, p, own[train.instance_labels == 0])


def false_share(
    flagged: Bool[np.ndarray, " N"],
    benign: Bool[np.ndarray, " N"],
    slides: Int[np.ndarray, " N"] | None,
) -> float:
    """Benign marks / marks (0 without marks), of the cohort, or of each slide and then averaged."""
    slides = np.zeros(len(flagged), dtype=int) if slides is None else slides
    wrong, marks = np.bincount(slides, flagged & benign), np.bincount(slides, flagged)
    return float(np.mean(wrong / np.maximum(marks, 1)))


def beside(wrong: Bool[np.ndarray, " N"], bags: Bags) -> float:
    """The share of the wrongly marked patches that touch a lesion; nan without any."""
    touches = bags.adjacency @ (bags.instance_labels == 1) > 0
    return float(touches[wrong].mean()) if wrong.any() else np.nan


def null_levels(
    fitted: VGPMILPRI,
    fresh: Bags,
    p: Float[np.ndarray, " N"],
    own: Float[np.ndarray, " n"],
) -> dict[str, float]:
    """P(p <= a) of benign patches: pooled over models, by one model alone, of training slides."""
    cross: Any = fitted.cross_fit_
    benign = fresh.instance_labels == 0
    scores = np.stack([suspicion(m.predict_instances(fresh)) for m in cross.models])[:, benign]
    first = slice(0, cross.reference.offsets[1])
    alone = ConformalReference(
        cross.reference.scores[first], cross.reference.offsets[:2], cross.reference.bag[first]
    )
    each = {"pooled": p[benign], "alone": p_values(alone, scores[:1]), "training": own}
    found = {f"{k} <= {a}": float((v <= a).mean()) for k, v in each.items() for a in LEVELS}
    K = len(scores)
    agreement = (np.corrcoef(scores).sum() - K) / (K * (K - 1))
    return found | {"agreement": float(agreement)}


# --- Refer or accept ------------------------------------------------------------------------------
@dataclass(frozen=True)
class Refer:
    """One line of the study."""

    name: str
    tissue: Tissue
    n_bags: int = 150
    n_fresh: int = 2000
    groups: bool = True


HARD = Tissue(side=5, shift=2.5, smallest=0.04, largest=0.5)
PATIENTS = replace(HARD, shift=3.0, per_patient=3, correlation=0.15)
REFER = (
    Refer("independent slides", HARD),
    Refer("3 slides per patient", PATIENTS, n_bags=240),
    Refer("the same, not told", PATIENTS, n_bags=240, groups=False),
)
ALPHAS = (0.05, 0.1, 0.2)


def refer_cohort(case: Refer, seed: int) -> dict[str, float]:
    """The rules of one training cohort, on many fresh slides."""
    train, fresh = (
        draw(n, (seed, part), case.tissue) for part, n in enumerate((case.n_bags, case.n_fresh))
    )
    if not case.groups:
        train = without_groups(train)
    fitted = model(1.0, calibrated=True).fit(train)
    p = fitted.predict_proba(fresh)[:, 1]
    wrong = (p > 0.5) != (fresh.labels == 1)
    found = {"error": float(wrong.mean())}
    # what the rule is about: patients where it knows them, slides otherwise
    unit = np.arange(len(p)) // (case.tissue.per_patient if case.groups else 1)
    for alpha in ALPHAS:
        rule = fitted.refer_rule(alpha, DELTA)
        accepted = rule.decide(p)
        found |= {
            f"accepted {alpha}": float(accepted.mean()),
            f"slides {alpha}": error_among(accepted, wrong, np.arange(len(p))),
            f"exceeds {alpha}": float(error_among(accepted, wrong, unit) > alpha),
            f"some {alpha}": float(accepted.any()),
        }
    return found


def error_among(
    accepted: Bool[np.ndarray, " B"], wrong: Bool[np.ndarray, " B"], unit: Int[np.ndarray, " B"]
) -> float:
    """Of the units with an accepted slide the share with one that is wrong; 0 without any."""
    among = np.unique(unit[accepted])
    return float(np.isin(among, unit[accepted & wrong]).mean()) if len(among) else 0.0


# --- Slide probabilities --------------------------------------------------------------------------
@dataclass(frozen=True)
class Slides:
    """One line of the study."""

    name: str
    settings: dict[str, Any]
    tissue: Tissue = HARD
    n_bags: int = 300
    n_fresh: int = 1500
    turned: float = 0.0  # share of the training labels that are wrong
    rarer: int = 1  # one of so many positive slides is among the fresh ones
    stain: float = 0.0  # added to the first feature of fresh slides, in deviations of a patch

    def draw(self, seed: int) -> tuple[Bags, Int[np.ndarray, " B"], Bags]:
        """Slides to train on, the labels that are told of them, and fresh slides."""
        train, fresh = (
            draw(n, (seed, part), self.tissue) for part, n in enumerate((self.n_bags, self.n_fresh))
        )
        wrong = np.random.default_rng((seed, 3)).random(len(train)) < self.turned
        kept = (fresh.labels == 0) | (np.cumsum(fresh.labels) % self.rarer == 0)
        told = np.where(wrong, 1 - train.labels, train.labels)
        stain = self.stain * np.eye(1, D)[0]
        return train, told, fresh.with_features(fresh.features + stain)[kept]


FIXED = {"coupling": 1.0}
SLIDES = (
    Slides("the paper's settings", PAPER),
    Slides("fixed settings", FIXED),
    Slides("learned settings", AUTO),
    Slides("learned, faint lesions", AUTO, tissue=replace(HARD, shift=1.5)),
    Slides("1 of 5 labels wrong", FIXED, turned=0.2),
    Slides("1 of 5 fresh slides positive", FIXED, rarer=4),
    Slides("another stain", FIXED, stain=1.0),
)


def slides_cohort(case: Slides, seed: int) -> dict[str, float]:
    """Calibration error on as many fresh slides as were trained on, and on many."""
    train, told, fresh = case.draw(seed)
    fitted = VGPMILPRI(**SETTINGS | case.settings | {"calibrated": True}).fit(train, told)
    odds = log_odds(fitted.log_proba_negative(fresh)[0])
    cross: Any = fitted.cross_fit_
    steps = IsotonicRegression(out_of_bounds="clip").fit(
        cross.log_odds, platt_targets(cross.labels)
    )
    each = {
        "raw": SlideCalibrator().predict(odds),  # slope 1, intercept 0
        "sigmoid": cross.calibrator.predict(odds),
        "isotonic": steps.predict(odds),
    }
    found = {"error": float(((each["sigmoid"] > 0.5) != fresh.labels).mean())}
    rng, few = np.random.default_rng((seed, 2)), case.n_bags
    for name, p in each.items():
        y = fresh.labels
        found |= {
            name: calibration_error(y[:few], p[:few]),
            f"{name}, chance": chance(rng, p[:few]),
            f"{name}, many": calibration_error(y, p),
            f"{name}, log loss": float(-np.log(np.where(y == 1, p, 1 - p)).mean()),
        }
    return found


def chance(rng: np.random.Generator, p: Float[np.ndarray, " B"], repeats: int = 20) -> float:
    """The mean calibration error of p if every p were the truth."""
    return float(np.mean([calibration_error(rng.random(len(p)) < p, p) for _ in range(repeats)]))
