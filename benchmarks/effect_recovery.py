"""Is the slide effect found again? Cohorts drawn from the model itself, tau known.

    python benchmarks/effect_recovery.py --tau 1 --cohorts 100 --jobs 16
    python benchmarks/effect_recovery.py --tau 0 --cohorts 100 --jobs 16 --fixed
    python benchmarks/effect_recovery.py --tau 0 --cohorts 16 --jobs 16 --slides 1000
    python benchmarks/effect_recovery.py --tau 0 --cohorts 40 --evidence [--sides 10 13]

    w ~ N(0, I),  f | w ~ N(c + W w, Kxx - W W'),  m_b = Sigma_b f_b + s_b 1 + noise,  noise ~
    N(0, Sigma_b),  s_b ~ N(0, tau^2),  y_b = 1 where any m > 0.

A cohort has 200 slides of 25 to 36 patches to learn from, and as many further ones of the same w.
Per cohort: the learned tau, and the expected calibration error (10 bins of equal mass) of the
further slides beside that of perfectly true probabilities of the same size: bins of 20 slides alone
make an error of some .05. Over all cohorts together chance is small: that error is the last line.

`--evidence` asks what so many labels can know of tau at best: all other settings at the truth, and
Laplace's evidence L(w) - log|J|/2 (J the Hessian of -L), which follows the labels themselves and
not what a fit predicts, over a grid of tau. `--real` asks the same of real slides, at settings near
the centre of the prior.
"""

import argparse
import logging
import os
import time
from concurrent.futures import ProcessPoolExecutor
from typing import Any, NamedTuple

import numpy as np
import torch
from real_data import DATA, SETS, read
from threadpoolctl import threadpool_limits

import gpmil
from gpmil.decide.metrics import calibration_error
from gpmil.inference.solvers import collapsed_bound
from gpmil.proof.from_the_model import Prior, cohort
from gpmil.proof.promises import chance
from gpmil.proof.tissue import D

COUPLING = 0.7
GRID = (0.0, 0.15, 0.3, 0.6, 1.0, 1.5, 2.2)


class Job(NamedTuple):
    """A cohort to draw, and what is asked of it."""

    tau: float
    seed: int
    fixed: bool  # all but tau at the truth
    slides: int
    sides: tuple[int, int]  # least and most patches a side of a slide
    moments: str


class Recovered(NamedTuple):
    """What one cohort says."""

    tau: float
    positive: float
    error: float  # calibration error of the further slides
    chance: float  # that of true probabilities
    y: np.ndarray
    p: np.ndarray
    seconds: float


def drawn(
    tau: float, seed: int, n_bags: int, sides: tuple[int, int]
) -> tuple[gpmil.Bags, dict[str, Any], dict[str, Any]]:
    """A cohort, what every model of it is given, and the settings it was drawn at."""
    logging.getLogger("gpmil").setLevel(logging.ERROR)
    prior = Prior(COUPLING, tau, sides, n_inducing=60)
    made = cohort(prior, n_bags, (seed, round(100 * tau), 17))
    given = {"inducing": made.Z, "standardize": False, "device": "cpu", "random_state": 0}
    length = prior.length * np.sqrt(D)
    known = {"variance": prior.variance, "lengthscale": length, "mean": made.c}
    return made.bags, given, known | {"coupling": COUPLING}


def real() -> None:
    """Laplace's evidence of real slides over the grid, from its largest value."""
    for name, root, coupling in (("sicapv2", np.sqrt(128), 0.5), ("colon", 8.0, 1.0)):
        given = {"variance": 100.0, "lengthscale": 3.5 * root, "mean": -0.5 * np.sqrt(101)}
        more = {key: value for key, value in SETS[name][2].items() if key == "n_components"}
        more |= given | {"coupling": coupling, "n_inducing": 100, "random_state": 0}
        bags = read(DATA, name)
        found = [WithEvidence(slide_effect=t, **more).fit(bags).evidence_ for t in GRID]
        words = ", ".join(f"{t:g}: {e - max(found):.2f}" for t, e in zip(GRID, found))
        print(f"{name}: {words}")


class WithEvidence(gpmil.VGPMILPRI):
    """Keeps Laplace's evidence, L(w) - log|J|/2."""

    def _kept(self, gp, problem, solution):
        bound, _, J = collapsed_bound(problem, solution.w)[:3]
        self.evidence_ = float(bound) - float(torch.linalg.slogdet((J + J.mT) / 2)[1]) / 2
        return super()._kept(gp, problem, solution)


def evidence(job: Job) -> np.ndarray:
    """Over the grid of tau, all else at the truth."""
    bags, given, known = drawn(job.tau, job.seed, job.slides, job.sides)
    given["moments"] = job.moments
    with threadpool_limits(1):
        models = [WithEvidence(slide_effect=t, **given, **known).fit(bags) for t in GRID]
    return np.array([model.evidence_ for model in models])


def one_cohort(job: Job) -> Recovered:
    """Learn tau, and all the rest unless it is fixed at the truth."""
    begin = time.perf_counter()
    bags, given, known = drawn(job.tau, job.seed, 2 * job.slides, job.sides)
    with threadpool_limits(1):
        model = gpmil.VGPMILPRI(slide_effect="auto", **given, **(known if job.fixed else {}))
        model.fit(bags[: job.slides])
        further = bags[job.slides :]
        p = model.predict_proba(further)[:, 1]
    return Recovered(
        float(model.slide_effect_),
        float(bags.labels.mean()),
        calibration_error(further.labels, p),
        chance(np.random.default_rng(job.seed), p),
        further.labels,
        p,
        time.perf_counter() - begin,
    )


def main() -> None:
    """A line per cohort, then all of them together."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tau", type=float, default=1.0)
    parser.add_argument("--cohorts", type=int, default=100)
    parser.add_argument("--first", type=int, default=0, help="seed of the first cohort")
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    parser.add_argument("--slides", type=int, default=200, help="to learn from")
    parser.add_argument("--fixed", action="store_true", help="all but tau fixed at the truth")
    parser.add_argument("--evidence", action="store_true", help="Laplace's, over a grid of tau")
    parser.add_argument("--sides", type=int, nargs=2, default=(5, 6), help="of a slide, in patches")
    parser.add_argument("--moments", default="diagonal", help="of the evidence; coupled: slow")
    parser.add_argument("--real", action="store_true", help="the evidence of real slides")
    args = parser.parse_args()
    if args.real:
        real()
        return
    seeds = range(args.first, args.first + args.cohorts)
    asked = args.fixed, args.slides, tuple(args.sides), args.moments
    jobs = [Job(args.tau, seed, *asked) for seed in seeds]
    if args.evidence:
        by_evidence(args.tau, args.jobs, jobs)
        return
    found = []
    with ProcessPoolExecutor(args.jobs) as pool:
        for k, one in enumerate(pool.map(one_cohort, jobs)):
            found.append(one)
            print(
                f"cohort {args.first + k}: tau {one.tau:.3f}, positive {one.positive:.2f}, "
                f"calibration error {one.error:.3f} (chance {one.chance:.3f}), {one.seconds:.0f} s",
                flush=True,
            )
    learned = np.array([one.tau for one in found])
    low, high = (args.tau / 2, 2 * args.tau) if args.tau else (0.0, 0.3)
    inside = float(((learned >= low) & (learned <= high)).mean())
    quantiles = ", ".join(f"{q:.2f}" for q in np.quantile(learned, (0.1, 0.5, 0.9)))
    y, p = (np.concatenate([getattr(one, name) for one in found]) for name in ("y", "p"))
    print(
        f"tau = {args.tau:g}, {'the rest fixed' if args.fixed else 'everything learned'}, "
        f"{len(found)} cohorts of {args.slides} slides: learned tau {quantiles} "
        f"(quantiles 10, 50, 90 %), {inside:.0%} in [{low:g}, {high:g}]"
    )
    print(
        f"calibration error per cohort {np.mean([one.error for one in found]):.3f} (chance "
        f"{np.mean([one.chance for one in found]):.3f}); of all {len(y):,} slides together "
        f"{calibration_error(y, p):.3f}"
    )


def by_evidence(tau: float, workers: int, jobs: list) -> None:
    """Where the evidence is largest, and how much more of it there is than at 0."""
    with ProcessPoolExecutor(workers) as pool:
        found = np.array(list(pool.map(evidence, jobs)))
    best, gain = np.array(GRID)[found.argmax(1)], found.max(1) - found[:, 0]
    shares = ", ".join(f"{t:g}: {np.mean(best == t):.0%}" for t in GRID)
    print(f"tau = {tau:g}, {len(jobs)} cohorts: largest evidence at {shares}")
    quantiles = ", ".join(f"{q:.1f}" for q in np.quantile(gain, (0.1, 0.5, 0.9)))
    print(f"nats above the evidence at 0: {quantiles} (quantiles 10, 50, 90 %)")
    ahead = found[:, GRID.index(1.0)] - found[:, 0]
    shares = ", ".join(f"{t:g}: {np.mean(ahead < t):.0%}" for t in (-0.5, -0.1, 0.0, 1.0, 2.0, 3.0))
    print(f"0 where tau = 1 has not so many nats more than 0: {shares}")


if __name__ == "__main__":
    main()
