"""Do suggested clicks tell more than random ones? Simulated slides, known truth.

    python benchmarks/suggested_clicks.py --seeds 6 --jobs 2

Forty slides with labels are learned from, forty others judge. A pathologist who always knows the
answer clicks four patches of positive slides at a time: suggested ones (`models.suggestions`, as in
the viewer), or random ones, from as many slides. After each four the model is updated
(`model.update`, settings as they are). Per number of clicks: the average precision (AP) of patches
of the slides that were not learned from, as the mean over cohorts. The last line is the question:
how many suggested clicks reach what random clicks reach.
"""

import argparse
import copy
import time
from concurrent.futures import ProcessPoolExecutor

import numpy as np
from sklearn.metrics import average_precision_score

import gpmil
from gpmil.models.suggestions import suggest

D, N_SLIDES, AT_ONCE = 32, 40, 4
SETTINGS = {
    "coupling": 0.5,
    "variance": 2.0,
    "lengthscale": float(np.sqrt(D)),
    "mean": -1.5,
    "slide_effect": 1.0,
    "n_inducing": 60,
    "random_state": 0,
}


def random_rows(bags: gpmil.Bags, rng: np.random.Generator) -> np.ndarray:
    """Patches without a label, of as many positive slides."""
    free = np.repeat(bags.labels == 1, bags.sizes) & (bags.instance_labels < 0)
    slides = rng.permutation(np.unique(bags.bag_index[free]))[:AT_ONCE]
    return np.array([rng.choice(np.flatnonzero(free & (bags.bag_index == b))) for b in slides])


def curve(job: tuple[int, str, int]) -> tuple[list[float], float]:
    """AP after 0, 4, 8, ... clicks, and the seconds of an update."""
    seed, how, clicks = job
    cohort = gpmil.simulate.cohort(2 * N_SLIDES, n_features=D, seed=seed, mean_size=60)
    train, test = cohort[:N_SLIDES], cohort[N_SLIDES:]
    known = np.full(train.n_instances, -1)
    taught = train.with_instance_labels(known)
    model = gpmil.VGPMILPRI(**SETTINGS).fit(taught)
    rng = np.random.default_rng((seed, 3))

    def judged() -> float:
        probability = model.predict_instances(test).probability
        return float(average_precision_score(test.instance_labels, probability))

    found, seconds = [judged()], []
    for _ in range(clicks // AT_ONCE):
        rows = suggest(model, taught, AT_ONCE) if how == "suggested" else random_rows(taught, rng)
        known[rows] = train.instance_labels[rows]
        taught = train.with_instance_labels(known)
        start = time.perf_counter()
        model = copy.copy(model).update(taught)
        seconds.append(time.perf_counter() - start)
        found.append(judged())
    return found, float(np.median(seconds))


def needed(suggested: np.ndarray, level: float) -> int | None:
    """The fewest clicks from which on the level is kept."""
    short = np.flatnonzero(suggested < level)
    first = 0 if not len(short) else int(short[-1]) + 1
    return None if first >= len(suggested) else first * AT_ONCE


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seeds", type=int, default=6)
    parser.add_argument("--clicks", type=int, default=40)
    parser.add_argument("--jobs", type=int, default=1)
    asked = parser.parse_args()
    jobs = [(s, how, asked.clicks) for how in ("random", "suggested") for s in range(asked.seeds)]
    with ProcessPoolExecutor(asked.jobs) as pool:
        found = list(pool.map(curve, jobs))
    random, suggested = (
        np.mean([ap for ap, _ in part], axis=0)
        for part in (found[: asked.seeds], found[asked.seeds :])
    )
    print("clicks  random  suggested   (patch AP of other slides, mean of cohorts)")
    for k, (one, other) in enumerate(zip(random, suggested)):
        print(f"{k * AT_ONCE:6d}  {one:6.3f}  {other:9.3f}")
    print(f"seconds of an update, median: {np.median([s for _, s in found]):.2f}")
    for at in (asked.clicks // 2, asked.clicks):
        level = random[at // AT_ONCE]
        print(f"AP {level:.3f}: random {at} clicks, suggested {needed(suggested, level)}")


if __name__ == "__main__":
    main()
