"""200 plain sweeps against the dense oracle of the tests, bag by bag with explicit inverses.

    python benchmarks/sweeps_against_oracle.py [--repeats 5]

SICAPv2 size, one thread. `gpmil bench sweeps` holds the package against a naive twin that is
written like the paper's public code; this is the same measurement with `tests/oracles.py`, the
paper's equations as they stand. Both start from the same E[m] and the same inducing points.
"""

import argparse
import sys
from pathlib import Path

import numpy as np

from gpmil.bench import cases, cohorts, engine, measure

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from oracles import Oracle
from synthetic import dense_graphs, standardised

SIZE, INDUCING = "sicapv2", 200


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=5)
    repeats = parser.parse_args().repeats
    bags = cohorts.training(SIZE)
    Z, E = cases._inducing(bags, INDUCING), cohorts.start(bags)
    x = bags.features.astype(float)
    with measure.threads(1):
        setting = engine.twin(bags.n_features)
        oracle = Oracle(
            standardised(bags), dense_graphs(bags), bags.labels, (Z - x.mean(0)) / x.std(0),
            setting.strength, setting.c, variance=setting.variance, lengthscale=setting.length,
        )  # fmt: skip
        found = []
        slow = measure.once(lambda: found.append(oracle.sweeps(bags.split(E), engine.SWEEPS)))
        print(f"{len(bags)} bags, {bags.n_instances:,} patches, M = {INDUCING}, one thread")
        print(f"dense oracle: {slow:.2f} s for {engine.SWEEPS} sweeps")
        for dtype in ("float64", "float32"):
            made = engine.Sweeper(bags, Z, "cpu", dtype)
            took = measure.timed(lambda: made.sweeps(E, engine.SWEEPS), repeats).seconds  # noqa: B023
            ours = made.sweeps(E, engine.SWEEPS)
            off = np.abs(ours - found[0]).max() / np.abs(found[0]).max()
            print(f"{dtype}: {took:.3f} s, {slow / took:.1f} times; they differ by {off:.1e}")


if __name__ == "__main__":
    main()
