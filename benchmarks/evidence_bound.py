"""What maximising the evidence bound over inducing points or settings brings on real data.

    python benchmarks/evidence_bound.py [--data FOLDER] [--json FILE]

Protocol and data as in coupled_moments.py; coupling 1, from variance 9, length 2 sqrt(D), mean -4.
"""

import argparse
import json
import time
from pathlib import Path

import numpy as np
import torch
from coupled_moments import SETS, metrics, out_of_fold
from real_data import DATA, read

import gpmil

MOVED = ((), ("inducing",), ("variance", "lengthscale", "mean"))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--data", type=Path, default=DATA, help="where the data sets are")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    results = []
    for name, (key, n_components, dim) in SETS.items():
        bags = read(args.data, key)
        for moved in MOVED:
            model = gpmil.VGPMILPRI(
                coupling=1.0,
                variance=9.0,
                lengthscale=2 * np.sqrt(dim),
                mean=-4.0,
                n_components=n_components,
                optimize=moved,
                random_state=0,
            )
            start = time.perf_counter()
            found = metrics(bags, *out_of_fold(bags, model))
            row = {"data": name, "moved": ", ".join(moved) or "nothing"} | found
            row |= {
                "bound (last fold)": float(model.elbo_trace_[-1]),
                "variance": model.variance_,
                "length / sqrt(D)": model.lengthscale_ / np.sqrt(dim),
                "mean": model.mean_,
                "seconds": time.perf_counter() - start,
            }
            results.append(row)
            print(
                " | ".join(f"{v:.3f}" if isinstance(v, float) else str(v) for v in row.values()),
                flush=True,
            )
    if args.json:
        args.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
