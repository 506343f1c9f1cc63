"""Cut points recovered from cohorts drawn from the model of grades: 300 slides, ten cohorts.

Features are N(0, 1) with a part that slides share, f is a draw of an rbf process (random Fourier
features), m of the model with its coupling and slide effect, the grade of a slide that of its
largest m. A cohort in which a grade has fewer than ten slides is drawn again.

    python benchmarks/grades_cut_points.py                 # settings given, cut points learned
    python benchmarks/grades_cut_points.py --learn         # settings, too, but the slide effect
    python benchmarks/grades_cut_points.py --learn --effect    # that, too

Cut points are in units of the noise. Grades of slides hardly tell noise that patches of a slide
share (tau) from noise of their own (sigma): with tau learned, look at the last columns, cut points
over sqrt(sigma^2 + tau^2).
"""

import argparse
import logging
import time

import numpy as np

import gpmil

CUTS = np.array([0.0, 1.2, 2.6])
VARIANCE, LENGTH, MEAN, COUPLING, EFFECT = 16.0, 2.0, -3.0, 0.5, 0.5
SLIDES, SIDE, FEATURES, FEWEST = 300, 4, 3, 10


def draw(rng: np.random.Generator) -> tuple[gpmil.Bags, np.ndarray]:
    """A cohort and its grades."""
    n = SIDE * SIDE
    own, shared = rng.normal(size=(SLIDES, n, FEATURES)), rng.normal(size=(SLIDES, 1, FEATURES))
    x = 0.8 * own + 0.6 * shared
    omega = rng.normal(size=(FEATURES, 2000)) / LENGTH
    phase = rng.uniform(0, 2 * np.pi, 2000)
    f = np.sqrt(2 * VARIANCE / 2000) * np.cos(x @ omega + phase) @ rng.normal(size=2000) + MEAN
    grid = np.stack(np.divmod(np.arange(n), SIDE), axis=1)
    bags = gpmil.Bags.from_arrays(list(x), coords=[grid] * SLIDES, step=1)
    near = bags.adjacency[:n, :n].toarray()
    sigma = np.linalg.inv(np.eye(n) + COUPLING * (np.diag(near.sum(1)) - near))
    noise = rng.normal(size=(SLIDES, n)) @ np.linalg.cholesky(sigma).T
    m = f @ sigma + noise + EFFECT * rng.normal(size=(SLIDES, 1))
    return bags, (m.max(1)[:, None] > CUTS).sum(1)


def cohort(seed: int) -> tuple[gpmil.Bags, np.ndarray]:
    """The first cohort of a seed with enough slides of every grade."""
    rng = np.random.default_rng(seed)
    while True:
        bags, y = draw(rng)
        if np.bincount(y, minlength=len(CUTS) + 1).min() >= FEWEST:
            return bags, y


def noise(coupling: float, effect: float) -> float:
    """sqrt(sigma^2 + tau^2), sigma^2 the mean diagonal of Sigma on the square of a slide."""
    path = np.diag(np.ones(SIDE - 1), 1)
    near = np.kron(path + path.T, np.eye(SIDE)) + np.kron(np.eye(SIDE), path + path.T)
    sigma = np.linalg.inv(np.eye(SIDE**2) + coupling * (np.diag(near.sum(1)) - near))
    return float(np.sqrt(np.diag(sigma).mean() + effect**2))


def main() -> None:
    """Ten cohorts, a line each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--learn", action="store_true", help="learn the settings, too")
    parser.add_argument("--effect", action="store_true", help="and the slide effect")
    parser.add_argument("--seeds", type=int, default=10)
    asked = parser.parse_args()
    logging.getLogger("gpmil").setLevel(logging.ERROR)
    given = {
        "variance": VARIANCE,
        "lengthscale": LENGTH,
        "mean": MEAN,
        "coupling": COUPLING,
        "slide_effect": EFFECT,
    }
    if asked.learn:
        given = {"slide_effect": "auto" if asked.effect else EFFECT}
    true = CUTS[1:] / noise(COUPLING, EFFECT)
    near = 0
    for seed in range(asked.seeds):
        bags, y = cohort(seed)
        start = time.perf_counter()
        model = gpmil.OrdinalMIL(**given, standardize=False, n_inducing=100, random_state=0)
        cuts = model.fit(bags, y).cut_points_
        took, off = time.perf_counter() - start, np.abs(cuts[1:] / CUTS[1:] - 1).max()
        near += off <= 0.2
        scaled = cuts[1:] / noise(model.coupling_, model.slide_effect_)
        print(
            f"cohort {seed}: slides {np.bincount(y)}, cut points {cuts.round(2)}, largest error "
            f"{off:.0%}, over the noise {scaled.round(2)} ({true.round(2)}), left out "
            f"{model.loo_log_likelihood_:.4f}, {took:.0f} s",
            flush=True,
        )
    print(f"true {CUTS}: all cut points within 20 % in {near} of {asked.seeds} cohorts")


if __name__ == "__main__":
    main()
