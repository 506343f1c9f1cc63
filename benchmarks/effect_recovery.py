"""Is the slide effect found again? Cohorts drawn from the model itself, tau known.

    python benchmarks/effect_recovery.py --tau 1 --cohorts 100 --jobs 16
    python benchmarks/effect_recovery.py --tau 0 --cohorts 100 --jobs 16 --fixed
    python benchmarks/effect_recovery.py --tau 0 --cohorts 16 --jobs 16 --slides 1000

    w ~ N(0, I),  f | w ~ N(c + W w, Kxx - W W'),  m_b = Sigma_b f_b + s_b 1 + noise,  noise ~
    N(0, Sigma_b),  s_b ~ N(0, tau^2),  y_b = 1 where any m > 0.

A cohort has 200 slides of 25 to 36 patches to learn from, and as many further ones of the same w.
Per cohort: the learned tau, and the expected calibration error (10 bins of equal mass) of the
further slides beside that of perfectly true probabilities of the same size: bins of 20 slides alone
make an error of some .05. Over all cohorts together chance is small: that error is the last line.
"""

import argparse
import logging
import os
import time
from concurrent.futures import ProcessPoolExecutor
from typing import Any, NamedTuple

import numpy as np
from threadpoolctl import threadpool_limits

import gpmil
from gpmil.decide.metrics import calibration_error
from gpmil.proof.from_the_model import Prior, cohort
from gpmil.proof.promises import chance
from gpmil.proof.tissue import D

COUPLING = 0.7


class Recovered(NamedTuple):
    """What one cohort says."""

    tau: float
    positive: float
    error: float  # calibration error of the further slides
    chance: float  # that of true probabilities
    y: np.ndarray
    p: np.ndarray
    seconds: float


def one_cohort(job: tuple[float, int, bool, int]) -> Recovered:
    """Learn tau, and all the rest unless it is fixed at the truth."""
    tau, seed, fixed, n_bags = job
    logging.getLogger("gpmil").setLevel(logging.ERROR)
    begin = time.perf_counter()
    prior = Prior(COUPLING, tau, (5, 6), n_inducing=60)
    drawn = cohort(prior, 2 * n_bags, (seed, round(100 * tau), 17))
    bags, Z, c = drawn.bags, drawn.Z, drawn.c
    known: dict[str, Any] = {
        "variance": prior.variance,
        "lengthscale": prior.length * np.sqrt(D),
        "mean": c,
        "coupling": COUPLING,
    }
    with threadpool_limits(1):
        model = gpmil.VGPMILPRI(
            slide_effect="auto", inducing=Z, standardize=False, device="cpu", random_state=0,
            **(known if fixed else {}),
        ).fit(bags[:n_bags])  # fmt: skip
        further = bags[n_bags:]
        p = model.predict_proba(further)[:, 1]
    return Recovered(
        float(model.slide_effect_),
        float(bags.labels.mean()),
        calibration_error(further.labels, p),
        chance(np.random.default_rng(seed), p),
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
    args = parser.parse_args()
    jobs = [(args.tau, args.first + k, args.fixed, args.slides) for k in range(args.cohorts)]
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


if __name__ == "__main__":
    main()
