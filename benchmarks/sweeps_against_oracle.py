"""200 plain sweeps against the dense oracle of the tests, bag by bag with explicit inverses.

    python benchmarks/sweeps_against_oracle.py [--repeats 5]

SICAPv2 size, one thread. `gpmil bench sweeps` holds the package against a naive twin that is
written like the paper's public code; this is the same measurement with `tests/oracles`, the
paper's equations as they stand. Both start from the same E[m] and the same inducing points.
"""

import argparse
import functools
import sys
from pathlib import Path

import numpy as np
from bench import cohorts, engine, measure

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from oracles.model import Oracle
from synthetic import dense_graphs, standardised

SIZE, INDUCING = "sicapv2", 200


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=5)
    repeats = parser.parse_args().repeats
    bags = cohorts.training(SIZE)
    Z, E = cohorts.inducing(bags, INDUCING), cohorts.start(bags)
    x = bags.features.astype(float)
    with measure.threads(1):
        setting = engine.twin(bags.n_features)
        oracle = Oracle(
            standardised(bags), dense_graphs(bags), bags.labels, (Z - x.mean(0)) / x.std(0),
            setting.strength, setting.c, variance=setting.variance, lengthscale=setting.length,
        )  # fmt: skip
        naively = functools.partial(oracle.sweeps, bags.split(E), engine.SWEEPS)
        expected = naively()
        print(f"{len(bags)} bags, {bags.n_instances:,} patches, M = {INDUCING}, one thread")
        for dtype in ("float64", "float32"):
            sweeps = engine.Sweeper(bags, Z, "cpu", dtype).sweeps
            work = functools.partial(sweeps, E, engine.SWEEPS)
            took, slow = measure.in_turn(work, naively, repeats)
            off = np.abs(work() - expected).max() / np.abs(expected).max()
            print(
                f"{dtype}: {took.seconds:.3f} s, dense oracle {slow.seconds:.2f} s, "
                f"{slow.seconds / took.seconds:.1f} times; they differ by {off:.1e}"
            )


if __name__ == "__main__":
    main()
