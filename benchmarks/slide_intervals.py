"""How often 90 % intervals of slide probabilities hold the true one, from three posteriors of w.

    python benchmarks/slide_intervals.py --cohorts 100

Cohorts are those of `gpmil proof --only promises`: drawn from the model, fitted at the true
settings or at wrong ones, and asked about slides that were not seen. Intervals are made of q(u), as
predictions are; of Laplace's covariance at the mode; and of the same at the mean, which is what
`predict_interval` has. Below and above: shares of slides whose truth lies there.
"""

import argparse

import numpy as np
from threadpoolctl import threadpool_limits

from gpmil.proof.intervals import LEVEL, SLIDES, fitted_cohort

KINDS = ("q(u)", "Laplace at the mode", "Laplace at the mean")


def judged(case, seed):
    """Held, below, above and width for every posterior, without the level and with it."""
    model, fresh, p = fitted_cohort(case, seed)
    v, J = model.interval_mean_, model.interval_precision_
    w, R = model.whitened_mean_, model.whitened_precision_
    found = []
    for model.interval_mean_, model.interval_precision_ in ((w, R), (w, J), (v, J)):
        for base_rate in (False, True):
            low, high = model.predict_interval(fresh, level=LEVEL, base_rate=base_rate)
            below, above = (p < low).mean(), (p > high).mean()
            found.append([1 - below - above, below, above, (high - low).mean()])
    return np.array(found).reshape(len(KINDS), 2, 4)


def main():
    """One row per case and posterior."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cohorts", type=int, default=100)
    asked = parser.parse_args()
    print("| drawn, fitted | posterior | held | error | below | above | width | of u alone |")
    print("|---|---|--:|--:|--:|--:|--:|--:|")
    for case in SLIDES:
        with threadpool_limits(1):
            found = np.array([judged(case, seed) for seed in range(asked.cohorts)])
        mean, error = found.mean(0), found[..., 0].std(0) / np.sqrt(asked.cohorts)
        for k, kind in enumerate(KINDS):
            held, below, above, width = mean[k, 1]
            alone = f"{mean[k, 0, 0]:.3f}, {mean[k, 0, 3]:.3f}"
            print(
                f"| {case.name} | {kind} | {held:.3f} | {error[k, 1]:.3f} | {below:.3f} | "
                f"{above:.3f} | {width:.3f} | {alone} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
