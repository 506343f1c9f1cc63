"""What a slide effect adds to one pass over a cohort, compiled and in torch.

    python benchmarks/slide_effect_speed.py [--repeats 9]

20,000 patches in 120 bags, M = 200, float64, one thread. A gradient pass is mu = c + H w, the
gradient of log Z and its product with H; a Hessian pass has the Gram matrix of H as well. All are
run by turns; ratios are to the pass without an effect.
"""

import argparse
import dataclasses
import functools
import math
import statistics

import numpy as np
import torch
from bench import measure

from gpmil.fast import compiled
from gpmil.inference.pieces import Chunk
from gpmil.moments import with_effect
from gpmil.moments.likelihood import Group

PATCHES, BAGS, INDUCING, MEAN = 20_000, 120, 200, -3.0
TAUS = (0.0, 0.5, 1.0, 2.0)


def cohort():
    """H, its bags, and a w at which half of the bags are called positive."""
    rng = np.random.default_rng(0)
    sizes = rng.multinomial(PATCHES - BAGS, np.full(BAGS, 1 / BAGS)) + 1
    offsets = torch.from_numpy(np.concatenate([[0], np.cumsum(sizes)]))
    H = torch.from_numpy(rng.normal(size=(PATCHES, INDUCING)) / math.sqrt(INDUCING))
    sigma = torch.from_numpy(rng.uniform(0.5, 1, PATCHES))
    positive = torch.from_numpy(rng.random(BAGS) < 0.5)
    group = Group(sigma, offsets, positive, None, slice(0, PATCHES))
    return H, group, torch.from_numpy(rng.normal(size=INDUCING) * 0.8)


def works(H, group, w):
    """What is timed, by pass, tau and way."""
    for tau in TAUS:
        chunk = Chunk(H, with_effect.patches(dataclasses.replace(group, effect=tau)))
        for way, worth in (("compiled", 0), ("torch", math.inf))[: 2 if tau else 1]:
            yield ("gradient", tau, way), functools.partial(one, worth, chunk.rise, w)
            yield ("Hessian", tau, way), functools.partial(one, worth, chunk.bound, w)


def one(worth, work, w):
    compiled.WORTH_PATCHES = worth
    work(w, MEAN)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=9)
    repeats = parser.parse_args().repeats
    todo = dict(works(*cohort()))
    with measure.threads(1):
        for work in todo.values():
            work()
        runs = [{key: measure.spent(work).processor for key, work in todo.items()}
                for _ in range(repeats)]  # fmt: skip
    print("pass | tau | way | ms | times the pass without an effect")
    for key in sorted(todo):
        took = [run[key] for run in runs]
        ratio = statistics.median(run[key] / run[key[0], 0.0, "compiled"] for run in runs)
        print(f"{key[0]} | {key[1]} | {key[2]} | {1e3 * statistics.median(took):.1f} | {ratio:.2f}")


if __name__ == "__main__":
    main()
