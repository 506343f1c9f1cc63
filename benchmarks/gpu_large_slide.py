"""log P(all negative) of one slide of 10,000 patches on a GPU.

python benchmarks/gpu_large_slide.py [n_side]
"""

import sys
import time

import numpy as np
import torch

import gpmil
from gpmil.coupling import operator as coupling
from gpmil.moments import orthant
from gpmil.process.sparse_gp import joint


def main():
    side = int(sys.argv[1]) if len(sys.argv) > 1 else 100
    device = torch.device("cuda")
    train = gpmil.simulate.cohort(n_bags=40, n_features=32, seed=0)
    model = gpmil.VGPMILPRI(
        coupling=1.0, variance=9.0, lengthscale=2 * np.sqrt(32), mean=-4.0, random_state=0,
        device="cuda",
    ).fit(train)  # fmt: skip
    rng = np.random.default_rng(0)
    xy = np.argwhere(np.ones((side, side), dtype=bool))
    rows = rng.integers(train.n_instances, size=len(xy))
    x = train.features[rows] + 0.1 * rng.normal(size=(len(xy), 32))
    slide = gpmil.Bags.from_arrays([x], coords=[xy], step=1)
    for name in ("cold", "warm", "warm"):
        torch.cuda.synchronize()
        start = time.perf_counter()
        value, error = model.log_proba_negative(slide)
        torch.cuda.synchronize()
        print(
            f"{name}: n = {len(xy)}, log P {value[0]:.4f} +- {error[0]:.4f}, "
            f"{time.perf_counter() - start:.3f} s end to end"
        )
    with torch.no_grad():
        (part,) = coupling.dense_parts(slide.adjacency, slide.offsets, np.array([0]), 1.0, device)
        inputs = model._inputs(slide.features, device)
        mean, cov = joint(model._predictor(device), part.sigma, part.pad(inputs))
        for _ in range(2):
            torch.cuda.synchronize()
            start = time.perf_counter()
            orthant.log_orthant(mean, cov, part.mask)
            torch.cuda.synchronize()
            print(f"the integral alone: {time.perf_counter() - start:.3f} s")
    print(f"peak {torch.cuda.max_memory_allocated() / 1e9:.1f} GB")


if __name__ == "__main__":
    main()
