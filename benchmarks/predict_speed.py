"""How fast new slides are predicted, slide probabilities included.

    python benchmarks/predict_speed.py [--coupling 1.0] [--json FILE]

* 31 slides with about 5,200 patches (`gpmil.simulate.sicapv2_like`), one thread: the package
  against a naive twin that forms the covariance of m* in every slide by the paper's equations,
  with explicit inverses, and counts 5,000 draws for the slide probability. The draws are those of
  `numpy.random.multivariate_normal` (the paper's public code), of NumPy's newer generator, and of
  the newer generator with a Cholesky factor. All in one run.
* One slide of 1,000 and one of 10,000 patches (a wide section, not a needle core), two threads,
  in a process of its own whose peak memory is reported.

Seconds are medians of three runs after one to warm up (of one where that took over 20 s).
"""

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from scipy.spatial.distance import cdist
from scipy.special import ndtr
from threadpoolctl import threadpool_limits

import gpmil

DRAWS = 5_000
JITTER = 1e-6
SETTINGS = {"variance": 1.0, "lengthscale": "sqrt_dim", "mean": 0.0}  # the paper's
SEED = 0
# At least so many times faster; at most so many seconds and GB: what is asked for.
BARS = {"ratio": 6.0, 1_000: 1.0, 10_000: 15.0, "memory": 3.0}


def legacy(mean, S):
    return np.random.multivariate_normal(mean, S, DRAWS)  # noqa: NPY002 (the one measured)


def generator(mean, S):
    return np.random.default_rng(SEED).multivariate_normal(mean, S, DRAWS)


def cholesky(mean, S):
    z = np.random.default_rng(SEED).standard_normal((DRAWS, len(mean)))
    return mean + z @ np.linalg.cholesky(S).T


class Naive:
    """Predictions from the same q(u), slide by slide, with dense matrices and explicit inverses."""

    def __init__(self, model, draw):
        self.draw = draw
        self.center, self.scale = model.feature_mean_, model.feature_scale_
        self.variance, self.length = model.variance_, model.lengthscale_
        self.c, self.strength = model.mean_, model.coupling_
        self.Z = (model.inducing_points_ - self.center) / self.scale
        self.mean_u, self.Sigma_u = model.posterior_mean_, model.posterior_covariance_
        self.Kzz = self.kernel(self.Z, self.Z) + JITTER * self.variance * np.eye(len(self.Z))
        self.Kzz_inv = np.linalg.inv(self.Kzz)

    def kernel(self, x, z):
        return self.variance * np.exp(-cdist(x, z, "sqeuclidean") / (2 * self.length**2))

    def slide(self, features, adjacency):
        """P(y = 1) and P(h_i = 1)."""
        x = (features - self.center) / self.scale
        # Sigma = (I + lambda C)^-1
        C = np.diag(adjacency.sum(1)) - adjacency
        Sigma = np.linalg.inv(np.eye(len(x)) + self.strength * C)
        # eqs. (f_star), (m_star)
        A = self.kernel(x, self.Z) @ self.Kzz_inv
        cov_f = self.kernel(x, x) - A @ (self.Kzz - self.Sigma_u) @ A.T
        mean = Sigma @ (self.c + A @ self.mean_u)
        S = Sigma + Sigma @ cov_f @ Sigma
        # eq. (pred_bag), counted; eq. (pred_instance)
        draws = self.draw(mean, S)
        return 1 - (draws < 0).all(1).mean(), ndtr(mean / np.sqrt(np.diag(S)))

    def predict(self, bags):
        slides = [
            self.slide(bags.features[rows], bags.adjacency[rows, rows].toarray())
            for rows in (slice(a, b) for a, b in zip(bags.offsets[:-1], bags.offsets[1:]))
        ]
        return np.array([p for p, _ in slides]), np.concatenate([q for _, q in slides])


def seconds(run, repeats=3):
    """Median after one run to warm up, which is returned too."""
    took = []
    while len(took) <= (repeats if not took or took[0] < 20 else 1):
        start = time.perf_counter()
        run()
        took.append(time.perf_counter() - start)
    return float(np.median(took[1:])), took[0]


def threads(count):
    """The same number for NumPy's BLAS and for torch, whatever the environment says."""
    threadpool_limits(count)
    torch.set_num_threads(count)


def cohort(model, test):
    """The package and the naive twins on the same slides."""
    fast, first = seconds(lambda: model.predict_all(test), repeats=9)
    slides, _ = seconds(lambda: model.predict_proba(test))
    patches, _ = seconds(lambda: model.predict_instances(test))
    ours = model.predict_all(test)
    found = {
        "slides": len(test),
        "patches": int(test.n_instances),
        "predict_all_s": fast,
        "first_s": first,
        "predict_proba_s": slides,
        "predict_instances_s": patches,
    }
    print(f"{found['slides']} slides, {found['patches']} patches, one thread")
    print(f"  predict_all {fast:.3f} s (first run {first:.3f} s)")
    print(f"  predict_proba {slides:.3f} s, predict_instances {patches:.3f} s")
    for draw in (legacy, generator, cholesky):
        naive = Naive(model, draw)
        slow, _ = seconds(lambda naive=naive: naive.predict(test))
        p, q = naive.predict(test)
        off = np.abs(q - ours.instances.probability).max(), np.abs(p - ours.proba[:, 1]).max()
        found[draw.__name__] = {"seconds": slow, "ratio": slow / fast}
        print(
            f"  naive, {draw.__name__}: {slow:.3f} s, {slow / fast:.1f} times; largest difference: "
            f"patches {off[0]:.1e}, slides {off[1]:.3f}; exactly 0 or 1 by counting: "
            f"{np.isin(p, (0, 1)).sum()} slides",
            flush=True,
        )
    print(f"  bar: {BARS['ratio']:g} times faster than the first")
    return found


def large_slide(n):
    """A section of n patches, about as wide as long, of the population of the cohort."""
    one = gpmil.simulate.cohort(
        1,
        1,
        seed=SEED,
        part=2,
        mean_size=1.02 * n,
        size_shape=1e6,
        core_width=0.8 * np.sqrt(n),
        core_counts=(1.0,),
        off_lattice=0.0,
    )
    return gpmil.Bags.from_arrays(
        [one.features[:n]], coords=[one.coords[:n]], step=1024, graph="grid4"
    )


def child(folder, n):
    """One large slide, in this process; its numbers as one line of JSON."""
    threads(2)
    model = gpmil.load(folder)
    bags = large_slide(n)
    before = peak()
    took, first = seconds(lambda: model.log_proba_negative(bags))
    log_p, error = (float(a[0]) for a in model.log_proba_negative(bags))
    print(
        json.dumps({
            "n": int(bags.n_instances),
            "seconds": took,
            "first_s": first,
            "log_p": log_p,
            "error": error,
            "peak_gb": peak(),
            "peak_before_gb": before,
        })
    )  # fmt: skip


def peak():
    """Largest memory this process ever held, in GB (10^9 bytes)."""
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 1e9


def large(folder, n):
    run = subprocess.run(
        [sys.executable, __file__, "--child", str(folder), str(n)],
        capture_output=True,
        text=True,
    )
    if run.returncode:
        raise SystemExit(run.stderr)
    found = json.loads(run.stdout.splitlines()[-1])
    print(
        f"one slide of {found['n']} patches, two threads\n"
        f"  {found['seconds']:.2f} s (first run {found['first_s']:.2f} s; bar {BARS[n]:g} s)\n"
        f"  peak memory {found['peak_gb']:.2f} GB (bar {BARS['memory']:g} GB), "
        f"{found['peak_before_gb']:.2f} GB of it before\n"
        f"  log P {found['log_p']:.3f}, error estimate {found['error']:.3f}",
        flush=True,
    )
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--coupling", type=float, default=1.0)
    parser.add_argument("--sizes", type=int, nargs="*", default=[1_000, 10_000])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        child(args.child[0], int(args.child[1]))
        return
    threads(1)
    train, test = gpmil.simulate.sicapv2_like(seed=SEED)
    start = time.perf_counter()
    model = gpmil.VGPMILPRI(**SETTINGS, coupling=args.coupling, random_state=0).fit(train)
    print(f"fitted {len(train)} slides in {time.perf_counter() - start:.2f} s", flush=True)
    results = {"coupling": args.coupling, "cohort": cohort(model, test)}
    with tempfile.TemporaryDirectory() as folder:
        model.save(Path(folder) / "model")
        for n in args.sizes:
            results[f"n={n}"] = large(Path(folder) / "model", n)
    if args.json:
        args.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
