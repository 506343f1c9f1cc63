"""How often intervals hold the truth: of slide probabilities, and of the metrics of a cohort."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Float
from scipy.stats import norm

from gpmil.data.bags import Bags
from gpmil.decide import intervals
from gpmil.models import VGPMILPRI
from gpmil.proof.from_the_model import Prior, Truth, cohort
from gpmil.proof.tissue import D

LEVEL, METRIC_LEVEL = 0.9, 0.95
DRAWS = 2000  # of m, for the true probability of a slide


# --- Slide probabilities --------------------------------------------------------------------------
@dataclass(frozen=True)
class SlideIntervals:
    """One line: what is drawn, and what the fit is told."""

    name: str
    prior: Prior
    n_bags: int = 100
    n_fresh: int = 60
    variance: float | None = None  # that the fit is given in place of the truth
    effect: float | None = None


PLAIN = Prior(0.5, 0.0, (4, 6), n_inducing=40)
SHARED = Prior(0.5, 1.0, (4, 6), n_inducing=40)
SLIDES = (
    SlideIntervals("true settings", PLAIN),
    SlideIntervals("true settings, slide effect 1", SHARED),
    SlideIntervals("variance 1 in place of 9", PLAIN, variance=1.0),
    SlideIntervals("slide effect 1, not told", SHARED, effect=0.0),
)


def slides_cohort(case: SlideIntervals, seed: int) -> dict[str, Any]:
    """The share of fresh slides whose true probability lies in its interval, and the widths."""
    model, fresh, p = fitted_cohort(case, seed)
    low, high = model.predict_interval(fresh, level=LEVEL)
    alone = model.predict_interval(fresh, level=LEVEL, base_rate=False)
    return {
        "held": ((low <= p) & (p <= high)).mean(),
        "held, process alone": ((alone[0] <= p) & (p <= alone[1])).mean(),
        "width": (high - low).mean(),
        "width, process alone": (alone[1] - alone[0]).mean(),
    }


def fitted_cohort(
    case: SlideIntervals, seed: int
) -> tuple[VGPMILPRI, Bags, Float[np.ndarray, " B"]]:
    """A model, slides that it has not seen, and their true probabilities."""
    prior = case.prior
    truth = cohort(prior, case.n_bags + case.n_fresh, (seed, 16, round(100 * prior.effect)))
    model = VGPMILPRI(
        variance=prior.variance if case.variance is None else case.variance,
        lengthscale=prior.length * np.sqrt(D),
        mean=truth.c,
        coupling=prior.coupling,
        slide_effect=prior.effect if case.effect is None else case.effect,
        inducing=truth.Z,
        standardize=False,
        device="cpu",
        random_state=0,
    ).fit(truth.bags[: case.n_bags])
    fresh = np.arange(case.n_bags, case.n_bags + case.n_fresh)
    rng = np.random.default_rng((seed, 17))
    p = np.array([true_probability(truth, prior, b, rng) for b in fresh.tolist()])
    return model, truth.bags[fresh], p


def true_probability(truth: Truth, prior: Prior, bag: int, rng: np.random.Generator) -> float:
    """P(y_b = 1 | w), by draws of m ~ N(H w + c, Sigma + Sigma (Kxx - W W') Sigma + tau^2 11')."""
    slide = truth.slides[bag]
    n = len(slide.x)
    f = slide.W @ truth.w + rng.standard_normal((DRAWS, n)) @ slide.root_f.T
    m = f @ slide.Sigma + rng.standard_normal((DRAWS, n)) @ slide.root_m.T + truth.c
    m += prior.effect * rng.standard_normal((DRAWS, 1))
    return float((m.max(axis=1) > 0).mean())


# --- Metrics of a cohort --------------------------------------------------------------------------
@dataclass(frozen=True)
class MetricIntervals:
    """Slides that are right with probability `accuracy`, and rank with this AUC."""

    name: str
    n_slides: int = 60
    per_patient: int = 1
    told: bool = True  # whether patients are known
    accuracy: float = 0.85
    auc: float = 0.9
    repeats: int = 50  # cohorts of one seed: each costs next to nothing


METRICS = (
    MetricIntervals("60 slides"),
    MetricIntervals("16 slides", 16),
    MetricIntervals("3 slides per patient, alike", 60, 3),
    MetricIntervals("the same, patients not told", 60, 3, told=False),
)


def metrics_cohort(case: MetricIntervals, seed: int) -> dict[str, Any]:
    """How often 95 % intervals of accuracy and AUC hold the truth."""
    rng = np.random.default_rng((seed, 18))
    patient = np.arange(case.n_slides) // case.per_patient
    y = (patient % 2).astype(np.float64)
    unit = patient if case.told else np.arange(case.n_slides)
    held = np.zeros(2)
    for _ in range(case.repeats):
        right = (rng.random(case.n_slides)[patient] < case.accuracy).astype(np.float64)
        score = rng.standard_normal(case.n_slides)[patient] + np.sqrt(2) * norm.ppf(case.auc) * y
        found = intervals.share(
            np.bincount(unit, right), np.bincount(unit).astype(np.float64), METRIC_LEVEL
        )
        ranked = intervals.auc(y, score, unit, METRIC_LEVEL)
        held += [_inside(case.accuracy, found), _inside(case.auc, ranked)]
    return dict(zip(("accuracy", "auc"), held / case.repeats))


def _inside(truth: float, ends: tuple[float, float] | Float[np.ndarray, " 2"]) -> bool:
    return bool(ends[0] - 1e-12 <= truth <= ends[1] + 1e-12)
