"""What a slide effect adds to a pass over a cohort, to a fit, and to learning the settings.

    python benchmarks/slide_effect_speed.py [--repeats 9] [--device cuda] [--patches N] [--bags B]

One thread. Ratios are to the same work without an effect, run by turns.

- passes (CPU): 20,000 patches in 120 bags, M = 200, float64. A gradient pass is mu = c + H w, the
  gradient of log Z and its product with H; a Hessian pass has the Gram matrix of H as well;
  compiled, and in torch.
- fit: a cohort drawn as in bench/cohorts.py, 128 features, M = 200, all settings given; PANDA's
  size is --patches 1108000 --bags 10503. Without --device cuda processor time, else the clock.
- learning: the score of bags left out with its gradient, 100 simulated slides, M = 100 (CPU).
"""

import argparse
import dataclasses
import functools
import math
import statistics

import numpy as np
import torch
from bench import cohorts, measure

import gpmil
from gpmil import simulate
from gpmil.fast import compiled
from gpmil.inference import objective
from gpmil.inference.at_settings import Settings
from gpmil.inference.folded_cohort import Cohort
from gpmil.inference.pieces import Chunk
from gpmil.moments import with_effect
from gpmil.moments.likelihood import Group

INDUCING, MEAN = 200, -3.0
TAUS = (0.0, 0.1, 0.5, 1.0, 2.0)


# --- Passes ---------------------------------------------------------------------------------------
def drawn(patches, bags):
    """H, its bags, and a w at which half of the bags are called positive."""
    rng = np.random.default_rng(0)
    sizes = rng.multinomial(patches - bags, np.full(bags, 1 / bags)) + 1
    offsets = torch.from_numpy(np.concatenate([[0], np.cumsum(sizes)]))
    H = torch.from_numpy(rng.normal(size=(patches, INDUCING)) / math.sqrt(INDUCING))
    sigma = torch.from_numpy(rng.uniform(0.5, 1, patches))
    positive = torch.from_numpy(rng.random(bags) < 0.5)
    group = Group(sigma, offsets, positive, None, slice(0, patches))
    return H, group, torch.from_numpy(rng.normal(size=INDUCING) * 0.8)


def passes(H, group, w):
    """What is timed, by name, tau and way."""
    for tau in TAUS:
        chunk = Chunk(H, with_effect.patches(dataclasses.replace(group, effect=tau)))
        for way, worth in (("compiled", 0), ("torch", math.inf))[: 2 if tau else 1]:
            yield ("gradient", tau, way), functools.partial(one, worth, chunk.rise, w)
            yield ("Hessian", tau, way), functools.partial(one, worth, chunk.bound, w)


def one(worth, work, w):
    before, compiled.WORTH_PATCHES = compiled.WORTH_PATCHES, worth
    work(w, MEAN)
    compiled.WORTH_PATCHES = before


# --- Fits, and learning ---------------------------------------------------------------------------
def fits(patches, bags, device):
    """A fit at given settings, by tau."""
    cohort = cohorts.draw(cohorts.Shape(bags, patches / bags, 128), 0)
    Z = cohorts.inducing(cohort, INDUCING)
    for tau in TAUS:
        model = gpmil.VGPMILPRI(
            variance=20.0, lengthscale=3 * math.sqrt(128), mean=-7.0, coupling=1.0,
            slide_effect=tau, inducing=Z, kernel="rbf", device=device, random_state=0,
        )  # fmt: skip
        yield ("fit", tau, device), functools.partial(model.fit, cohort)


def learning(bags=100, inducing=100):
    """The objective of tuning with its gradient, by tau."""
    cohort = simulate.cohort(bags, seed=0)
    x = cohort.features.astype(float)
    x = torch.from_numpy((x - x.mean(0)) / x.std(0))
    Z = x[:: len(x) // inducing][:inducing]
    positive, fold = cohort.labels == 1, np.arange(bags) % 5
    made = Cohort(x, Z, cohort.adjacency, cohort.offsets, positive, "rbf", fold)
    for tau in TAUS:
        settings = Settings(20.0, 3 * math.sqrt(x.shape[1]), -7.0, 1.0, tau)
        yield ("learning", tau, "gradient"), functools.partial(objective.gradient, made, settings)


# --- Command --------------------------------------------------------------------------------------
def shown(todo, repeats, clock):
    """Times and ratios, a line each."""
    for work in todo.values():
        work()
    runs = [{key: getattr(measure.spent(work), clock) for key, work in todo.items()}
            for _ in range(repeats)]  # fmt: skip
    without = {key[0]: key for key in todo if key[1] == 0}
    for key in sorted(todo):
        took = [run[key] for run in runs]
        ratio = statistics.median(run[key] / run[without[key[0]]] for run in runs)
        print(f"{key[0]} | {key[1]} | {key[2]} | {1e3 * statistics.median(took):.1f} | {ratio:.2f}",
              flush=True)  # fmt: skip


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--patches", type=int, default=20_000)
    parser.add_argument("--bags", type=int, default=120)
    parser.add_argument("--only", choices=("passes", "fit", "learning"))
    given = parser.parse_args()
    on_cpu = given.device == "cpu"
    parts = {
        "passes": lambda: passes(*drawn(20_000, 120)),
        "fit": lambda: fits(given.patches, given.bags, given.device),
        "learning": learning,
    }
    wanted = [given.only] if given.only else list(parts) if on_cpu else ["fit"]
    print("work | tau | way | ms | times that without an effect")
    with measure.threads(1):
        for name in wanted:
            shown(dict(parts[name]()), given.repeats, "processor" if on_cpu else "seconds")


if __name__ == "__main__":
    main()
