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
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import joblib
import numpy as np

from gpmil import VGPMILPRI
from gpmil.proof.from_the_model import Prior, cohort
from gpmil.proof.promises import (
    ALPHAS,
    DELTA,
    FLAGS,
    LEVELS,
    RATES,
    REFER,
    SLIDES,
    flags_cohort,
    refer_cohort,
    slides_cohort,
)
from gpmil.proof.tissue import D
from gpmil.proof.trials import quietly

Results = dict[str, dict[str, np.ndarray]]


# ------------------------------------------------------------------ flags


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

    @property
    def prior(self) -> Prior:
        """The settings that cohorts are drawn with."""
        return Prior(self.truth, 0.0, self.sides, self.variance, self.length, self.n_inducing)


COUPLED = tuple(Coupled(truth, "coupling") for truth in (0.3, 1.0, 3.0))
ALL_LEARNED = tuple(replace(case, learned="all") for case in COUPLED)


def coupled_cohort(case: Coupled, seed: int) -> dict[str, float]:
    """Learned settings over true ones."""
    drawn = cohort(case.prior, case.n_bags, (seed, round(100 * case.truth)))
    bags, Z, c = drawn.bags, drawn.Z, drawn.c
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
