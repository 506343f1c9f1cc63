"""Are the error rates kept? Simulated cohorts with known truth.

    python benchmarks/calibration_simulation.py [--cohorts 100] [--jobs 2] [--json FILE]
        [--studies flags refer slides coupling settings]

* flags: the realised false discovery rate of marked patches at nominal 5, 10 and 20 %. Where the
  assumptions hold (patches independent, benign ones alike in all slides, no coupling), it should
  be the share of negatives x the nominal rate. Then one assumption after the other is broken. And
  what pooling the ranks of K models costs: P(p <= a) of benign patches, next to one model alone.
* refer: how often the true error among accepted slides exceeds alpha, which is promised to happen
  in at most delta = 10 % of cohorts. The true error is that of fresh slides.
* slides: the calibration error of slide probabilities, calibrated and not, on fresh slides, next
  to that of perfectly true probabilities of the same size (labels drawn from them).
* coupling: lambda learned on cohorts drawn from the model itself, all else known; settings: all
  of it learned. A weak prior pulls lambda towards 1 (`gpmil.inference.tuning`).

Numbers are means over cohorts, in brackets their Monte Carlo standard error. Every cohort has its
own seed, so results do not depend on the number of jobs.
"""

import argparse
import json
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import joblib
import numpy as np
from jaxtyping import Bool, Float, Int
from scipy.spatial.distance import cdist
from sklearn.isotonic import IsotonicRegression

from gpmil import VGPMILPRI, Bags, simulate
from gpmil.decide.calibration import SlideCalibrator, platt_targets
from gpmil.decide.marks import ConformalReference, benjamini_hochberg, p_values
from gpmil.decide.metrics import calibration_error
from gpmil.models.base import log_odds
from gpmil.models.cross_fit import suspicion

Results = dict[str, dict[str, np.ndarray]]
RATES = (0.05, 0.1, 0.2)
LEVELS = (0.01, 0.05, 0.1)
DELTA = 0.1
D = 8
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

# ------------------------------------------------------------------ slides with known truth


@dataclass(frozen=True)
class Tissue:
    """Square slides; every second one holds a round lesion."""

    side: int = 6  # patches
    shift: float = 3.0  # of lesion patches, in standard deviations of a patch
    smallest: float = 0.3  # share of a positive slide that is lesion
    largest: float = 0.9
    field_effect: float = 0.0  # share of the shift that benign patches beside a lesion get
    correlation: float = 0.0  # of the patches of a slide, or of a patient
    per_patient: int = 1  # slides, all of one label


def draw(n_bags: int, seed: tuple[int, ...], tissue: Tissue) -> Bags:
    """Features N(0, I), correlated within slides or patients, + shift where there is a lesion."""
    rng, t = np.random.default_rng(seed), tissue
    cells = np.argwhere(np.ones((t.side, t.side), dtype=bool))
    patient = np.arange(n_bags) // t.per_patient
    labels = patient % 2
    common = rng.standard_normal((patient[-1] + 1, D))[patient]
    truth = [lesion(rng, cells, t) & (y == 1) for y in labels]
    arrays = []
    for h, z in zip(truth, common):
        own = rng.standard_normal((len(cells), D))
        moved = t.shift * (h + t.field_effect * touching(cells, h))
        x = np.sqrt(t.correlation) * z + np.sqrt(1 - t.correlation) * own
        arrays.append(x + moved[:, None] / np.sqrt(D))
    return Bags.from_arrays(
        arrays,
        labels=labels,
        coords=[cells] * n_bags,
        step=1,
        graph="grid4",
        groups=[str(p) for p in patient] if t.per_patient > 1 else None,
        instance_labels=[h.astype(int) for h in truth],
    )


def lesion(
    rng: np.random.Generator, cells: Int[np.ndarray, "n 2"], tissue: Tissue
) -> Bool[np.ndarray, " n"]:
    """The cells nearest to a random point."""
    size = max(1, round(rng.uniform(tissue.smallest, tissue.largest) * len(cells)))
    distance = np.linalg.norm(cells - rng.uniform(0, tissue.side - 1, 2), axis=1)
    return np.argsort(np.argsort(distance, kind="stable"), kind="stable") < size


def touching(cells: Int[np.ndarray, "n 2"], h: Bool[np.ndarray, " n"]) -> Bool[np.ndarray, " n"]:
    """Benign cells that share a side with a lesion."""
    return ~h & (cdist(cells, cells[h], "cityblock") == 1).any(1)


def biopsies(n_bags: int, seed: tuple[int, ...], field_effect: float) -> Bags:
    """Needle cores of `gpmil.simulate`: types of tissue, stain, texture, ragged outlines."""
    return simulate.cohort(
        n_bags,
        n_features=D,
        n_latent=D,
        seed=seed[0],
        part=seed[1],
        mean_size=36,
        separation=6.0,
        field_effect=field_effect,
    )


def model(coupling: float, **changed: Any) -> VGPMILPRI:
    return VGPMILPRI(**SETTINGS | {"coupling": coupling} | changed)


# ------------------------------------------------------------------ flags


@dataclass(frozen=True)
class Flags:
    """One line of the study: what is drawn, and how it is marked."""

    name: str
    tissue: Tissue | None = Tissue()  # None: biopsies
    coupling: float = 0.0
    weights: str = "patch"
    n_bags: int = 80
    n_fresh: int = 200

    def draw(self, n_bags: int, seed: tuple[int, int]) -> Bags:
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


def flags_tables(results: Results) -> Iterator[str]:
    for within in ("cohort", "bag"):
        yield f"\nfalse discovery rate, %, controlled within the {within}: nominal 5, 10, 20"
        yield f"{'':24}{'realised':^36}{'share x nominal':^22}{'power at 10':^14}"
        for name, found in results.items():
            rates = "".join(f"{percent(found[f'fdr {within} {r}']):>12}" for r in RATES)
            due = "".join(f"{100 * r * found['share'].mean():7.1f}" for r in RATES)
            yield f"{name:24}{rates} {due} {percent(found[f'power {within} 0.1']):>14}"
    yield "\nof the wrong marks (cohort, 10 %) beside a lesion, %; P(p <= a) of benign patches, %"
    yield (
        f"{'':24}{'beside':>12}  "
        + "".join(f"{f'{k} {a}':>15}" for k in ("pooled", "alone", "training") for a in LEVELS[:2])
        + "  correlation of models"
    )
    for name, found in results.items():
        levels = "".join(
            f"{percent(found[f'{k} <= {a}'], 2):>15}"
            for k in ("pooled", "alone", "training")
            for a in LEVELS[:2]
        )
        near, agreement = percent(found["beside 0.1"]), found["agreement"].mean()
        yield f"{name:24}{near:>12}  {levels}  {agreement:.3f}"


# ------------------------------------------------------------------ refer or accept


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


def without_groups(bags: Bags) -> Bags:
    return Bags.from_arrays(
        bags.split(bags.features),
        labels=bags.labels,
        coords=bags.split(bags.coords),
        step=1,
        graph="grid4",
    )


def refer_table(results: Results) -> Iterator[str]:
    yield f"\naccepted slides err more than alpha, % of cohorts; promised: at most {DELTA:.0%}"
    heads = ("exceeded", "their error", "accepted", "rule found")
    yield f"{'':24}{'error, all':>12}{'alpha':>8}" + "".join(f"{h:>14}" for h in heads)
    for name, found in results.items():
        for a in ALPHAS:
            columns = [
                percent(found[f"{k} {a}"]) for k in ("exceeds", "slides", "accepted", "some")
            ]
            yield (
                f"{name:24}{percent(found['error']):>12}{a:8.2f}"
                + "".join(f"{c:>14}" for c in columns)
            )


# ------------------------------------------------------------------ slide probabilities


@dataclass(frozen=True)
class Slides:
    """One line of the study."""

    name: str
    settings: dict[str, Any]
    tissue: Tissue = HARD
    n_bags: int = 300
    n_fresh: int = 1500


SLIDES = (
    Slides("the paper's settings", PAPER),
    Slides("fixed settings", {"coupling": 1.0}),
    Slides("learned settings", AUTO),
    Slides("learned, 1 of 5 wrong", AUTO, tissue=replace(HARD, shift=1.5)),
)


def slides_cohort(case: Slides, seed: int) -> dict[str, float]:
    """Calibration error on as many fresh slides as were trained on, and on many."""
    train, fresh = (
        draw(n, (seed, part), case.tissue) for part, n in enumerate((case.n_bags, case.n_fresh))
    )
    fitted = VGPMILPRI(**SETTINGS | case.settings | {"calibrated": True}).fit(train)
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


def slides_table(results: Results) -> Iterator[str]:
    yield "\ncalibration error of slide probabilities, fresh slides; 300 for training"
    yield f"{'':24}{'':10}{'300 slides':>16}{'if true':>16}{'1500 slides':>16}{'log loss':>16}"
    for name, found in results.items():
        for how in ("raw", "sigmoid", "isotonic"):
            keys = (how, f"{how}, chance", f"{how}, many", f"{how}, log loss")
            yield f"{name:24}{how:10}" + "".join(f"{plus_minus(found[k]):>16}" for k in keys)


# ------------------------------------------------------------------ the coupling


@dataclass(frozen=True)
class Coupled:
    """One line of the study: a cohort drawn from the model, and what is learned of it."""

    truth: float  # lambda
    learned: str  # "coupling", or "all": variance, length and mean, too
    n_bags: int = 200
    sides: tuple[int, int] = (5, 8)  # least and most patches a side
    variance: float = 9.0
    length: float = 2.0  # / sqrt D
    n_inducing: int = 50

    @property
    def name(self) -> str:
        return f"{self.learned}, truth {self.truth:g}"


COUPLED = tuple(Coupled(truth, "coupling") for truth in (0.3, 1.0, 3.0))
ALL_LEARNED = tuple(replace(case, learned="all") for case in COUPLED)


def from_the_model(case: Coupled, seed: int) -> tuple[Bags, Float[np.ndarray, "M d"], float]:
    """Bags drawn from the model, its inducing points Z and its mean c.

        w ~ N(0, I),  f | w ~ N(c + W w, Kxx - W W') bag by bag,  m | f ~ N(Sigma f, Sigma).

    c is such that half of the bags are positive on average over w; w is drawn until .35 to .65
    of them are: a cohort of nearly one class says nothing about any setting.
    """
    rng = np.random.default_rng((seed, round(100 * case.truth)))
    Z = rng.standard_normal((case.n_inducing, D))
    bags = [slide_of_the_model(rng, Z, case) for _ in range(case.n_bags)]

    def scores() -> list[Float[np.ndarray, " n"]]:
        w = rng.standard_normal(len(Z))
        return [H @ w + root @ rng.standard_normal(len(root)) for *_, H, root in bags]

    c = -float(np.median([np.median([m.max() for m in scores()]) for _ in range(40)]))
    while True:
        h = [m + c > 0 for m in scores()]
        y = np.array([one.any() for one in h])
        if 0.35 <= y.mean() <= 0.65:
            break
    cohort = Bags.from_arrays(
        [x for x, *_ in bags],
        labels=y.astype(int),
        coords=[cells for _, cells, *_ in bags],
        step=1,
        graph="grid4",
        instance_labels=[one.astype(int) for one in h],
    )
    return cohort, Z, c


def slide_of_the_model(
    rng: np.random.Generator, Z: Float[np.ndarray, "M d"], case: Coupled
) -> tuple[np.ndarray, ...]:
    """Features, cells, H = Sigma W, and a root of the covariance of m given w."""
    cells = np.argwhere(np.ones(rng.integers(*case.sides, 2, endpoint=True), dtype=bool))
    x = rng.standard_normal((len(cells), D))
    A = cdist(cells, cells, "cityblock") == 1
    # Sigma = (I + lambda C)^-1
    C = np.diag(A.sum(1)) - A.astype(float)
    Sigma = np.linalg.inv(np.eye(len(x)) + case.truth * C)
    Kzz = kernel(Z, Z, case) + 1e-6 * case.variance * np.eye(len(Z))
    W = np.linalg.solve(np.linalg.cholesky(Kzz), kernel(Z, x, case)).T
    # Cov(m | w) = Sigma + Sigma (Kxx - W W') Sigma
    S = Sigma + Sigma @ (kernel(x, x, case) - W @ W.T) @ Sigma
    return x, cells, Sigma @ W, np.linalg.cholesky((S + S.T) / 2)


def kernel(x: np.ndarray, z: np.ndarray, case: Coupled) -> Float[np.ndarray, "n m"]:
    s = cdist(x, z, "sqeuclidean")
    return case.variance * np.exp(-s / (2 * D * case.length**2))


def coupled_cohort(case: Coupled, seed: int) -> dict[str, float]:
    """Learned settings over true ones."""
    bags, Z, c = from_the_model(case, seed)
    length = case.length * np.sqrt(D)
    known = {"variance": case.variance, "lengthscale": length, "mean": c}
    fitted: Any = VGPMILPRI(
        **{"coupling": "auto", "inducing": Z, "standardize": False, "device": "cpu"}
        | {"random_state": 0, "slide_effect": 0.0}  # none in the truth
        | (known if case.learned == "coupling" else {}),
    ).fit(bags)
    ratio = fitted.coupling_ / case.truth
    return {
        "ratio": ratio,
        "within three": float(1 / 3 <= ratio <= 3),
        "variance": fitted.variance_ / case.variance,
        "length": fitted.lengthscale_ / length,
        "mean": fitted.mean_ - c,
        "positive": float(bags.labels.mean()),
    }


def coupled_table(results: Results) -> Iterator[str]:
    yield "\nlearned / true, quantiles 10, 50, 90 %, on 200 slides drawn from the model"
    yield f"{'learned':24}{'lambda':^24}{'within a factor 3, %':>22}{'variance':^22}{'length':^22}"
    for name, found in results.items():
        spread = {
            k: np.quantile(found[k], (0.1, 0.5, 0.9)) for k in ("ratio", "variance", "length")
        }
        shown = {k: "".join(f"{q:7.2f}" for q in v) for k, v in spread.items()}
        yield (
            f"{name:24}{shown['ratio']:>24}{percent(found['within three']):>22}"
            f"{shown['variance']:>22}{shown['length']:>22}"
        )


# ------------------------------------------------------------------ running


def study(
    one_cohort: Callable[[Any, int], dict[str, float]],
    cases: Sequence[Any],
    seeds: range,
    jobs: int = 1,
) -> Results:
    """Every case on every seed: case -> what was measured -> one number per cohort."""
    tasks = [joblib.delayed(quietly)(one_cohort, case, seed) for case in cases for seed in seeds]
    with joblib.parallel_config("loky", inner_max_num_threads=1 if jobs > 1 else None):
        rows = joblib.Parallel(jobs)(tasks)
    found = {case.name: rows[k * len(seeds) :][: len(seeds)] for k, case in enumerate(cases)}
    return {
        name: {key: np.array([row[key] for row in of_case]) for key in of_case[0]}
        for name, of_case in found.items()
    }


def quietly(
    one_cohort: Callable[[Any, int], dict[str, float]], case: Any, seed: int
) -> dict[str, float]:
    """Without the library's advice about single cohorts."""
    logger = logging.getLogger("gpmil")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        return one_cohort(case, seed)
    finally:
        logger.setLevel(before)


def plus_minus(values: np.ndarray, digits: int = 4) -> str:
    """Mean (standard error), over the cohorts where it is defined."""
    values = values[np.isfinite(values)]
    if len(values) < 2:
        return "-"
    error = values.std(ddof=1) / np.sqrt(len(values))
    return f"{values.mean():.{digits}f} ({error:.{digits}f})"


def percent(values: np.ndarray, digits: int = 1) -> str:
    return plus_minus(100 * values, digits)


STUDIES: dict[str, tuple[Callable, tuple, Callable]] = {
    "flags": (flags_cohort, FLAGS, flags_tables),
    "refer": (refer_cohort, REFER, refer_table),
    "slides": (slides_cohort, SLIDES, slides_table),
    "coupling": (coupled_cohort, COUPLED, coupled_table),
    "settings": (coupled_cohort, ALL_LEARNED, coupled_table),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cohorts", type=int, default=100)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--studies", nargs="*", default=list(STUDIES), choices=list(STUDIES))
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    kept: dict[str, Any] = {}
    for name in args.studies:
        one_cohort, cases, table = STUDIES[name]
        start = time.perf_counter()
        found = study(one_cohort, cases, range(args.cohorts), args.jobs)
        print("\n".join(table(found)))
        print(f"[{name}: {args.cohorts} cohorts, {time.perf_counter() - start:.0f} s]", flush=True)
        kept[name] = {
            "cases": [asdict(case) for case in cases],
            "cohorts": {k: {n: v.tolist() for n, v in row.items()} for k, row in found.items()},
        }
        if args.json:
            args.json.write_text(json.dumps(kept, indent=1) + "\n")


if __name__ == "__main__":
    main()
