"""Slide probabilities of models with a slide effect: what they are off, and what they cost.

    python benchmarks/orthant_effect.py [--effects 0.5 1 2 4] [--slides 8] [--large 41]

Models with fixed tau on `gpmil.simulate.sicapv2_like`, one thread. Of every model's mu and S of
held-out slides, whole and their first 2, 5 and 30 patches: log_orthant as a CPU does it and as a
GPU does it (batches), against a dense sum over the effect with EP run to its end at every value,
and against EP on the whole of S, effect and all; so too first and second derivatives of log P along
three directions. Then `predict_all` by turns: seconds at every tau over seconds at tau = 0. With
`--large` only one slide of so many patches squared: P, its interval and their seconds, by the way
of large slides and by dense EP.
"""

import argparse
import statistics
import time

import numpy as np
import torch
from scipy.interpolate import CubicSpline
from scipy.special import logsumexp

import gpmil
from gpmil.models import fitted
from gpmil.moments import orthant
from gpmil.moments.ep import ep
from gpmil.process.sparse_gp import joint

SETTINGS = {"variance": 1.0, "lengthscale": "sqrt_dim", "mean": 0.0, "coupling": 1.0}
CPU = torch.device("cpu")
SIZES = (2, 5, 30, None)


def reference(mu, S, tau, G, many=110):
    """log of the sum over s of N(s; 0, tau^2) P(all m + s < 0), m ~ N(mu, S - tau^2 11').

    And its first and minus its second derivative at mu + G x.
    """
    s = np.linspace(-8 * tau, 7 * tau, many)
    rest = torch.from_numpy(S - tau**2).expand(many, -1, -1)
    at = ep(torch.from_numpy(mu + s[:, None]), rest, tol=1e-7)
    dense = np.linspace(s[0], s[-1], 4001)
    f = CubicSpline(s, (at.log_p + at.c3).numpy())(dense) - (dense / tau) ** 2 / 2
    log_p = logsumexp(f) + np.log((dense[1] - dense[0]) / (tau * np.sqrt(2 * np.pi)))
    pi = np.exp((at.log_p + at.c3).numpy() - (s / tau) ** 2 / 2)
    pi /= pi.sum()
    # nu - T mhat and T - T V T
    slopes = (at.nu - at.tau * at.mean).numpy() @ G
    TG = at.tau[:, :, None] * torch.from_numpy(G)
    bends = (TG.mT @ torch.from_numpy(G) - TG.mT @ at.cov @ TG).numpy()
    slope = pi @ slopes
    apart = slopes - slope
    return log_p, slope, np.tensordot(pi, bends, 1) - (apart.T * pi) @ apart


def moments(model, bags):
    """mu and S of some slides."""
    with torch.no_grad():
        for part, x in model._dense(bags, np.ones(len(bags), bool), model.coupling_, CPU):
            mu, S = joint(model._predictor(CPU), part.sigma, part.pad(x))
            for b, rows in enumerate(part.mask):
                yield mu[b, rows], S[b][rows][:, rows]


def accuracy(model, bags):
    """Largest differences of P and shares of bags within their error, over slides and sizes."""
    tau, whole = model.slide_effect_, orthant.LARGE
    off, paths, plain, inside, first, second = [], [], [], [], [], []
    rng = np.random.default_rng(0)
    for mu, S in moments(model, bags):
        for n in SIZES:
            m, C = mu[:n][None], S[:n, :n][None]
            G = rng.normal(0, 0.3, (m.shape[1], 3))
            exact, slope, bend = reference(m[0].numpy(), C[0].numpy(), tau, G)
            every = torch.ones_like(m, dtype=torch.bool)
            moved = orthant.expand(m, C, every, torch.from_numpy(G)[None], effect=tau)
            first.append(np.abs(moved.slope[0].numpy() - slope).max() / np.abs(slope).max())
            second.append(np.abs(moved.bend[0].numpy() - bend).max() / np.abs(bend).max())
            found = orthant.log_orthant(m, C, effect=tau)
            orthant.LARGE = 10**9
            batch, old = orthant.log_orthant(m, C, effect=tau), orthant.log_orthant(m, C)
            orthant.LARGE = whole
            p, q, r = (float(x.log_p.exp()) for x in (found, batch, old))
            off.append(abs(p - np.exp(exact)))
            paths.append(abs(p - q))
            plain.append(abs(r - np.exp(exact)))
            inside.append(abs(float(found.log_p) - exact) <= float(found.error))
    print(
        f"tau {tau:g}: P off by {max(off):.1e} (CPU and batch {max(paths):.1e}, EP on the whole "
        f"of S {max(plain):.1e}); {np.mean(inside):.0%} within the error estimate; first "
        f"derivatives off by {max(first):.1%}, second by {max(second):.1%}",
        flush=True,
    )


def large(models, train, side):
    """One slide put together from negative ones: both ways to P, the interval, and seconds."""
    negative = np.repeat(train.labels == 0, train.sizes)
    x = np.resize(train.features[negative], (side * side, train.n_features))
    x = x + 0.05 * np.random.default_rng(0).standard_normal(x.shape)
    coords = np.stack(np.divmod(np.arange(len(x)), side), 1)
    bag, limit = gpmil.Bags.from_arrays([x], coords=[coords], step=1), fitted.LARGE
    for model in models:
        fitted.LARGE, took = limit, []
        for _ in range(3):
            start = time.process_time()
            p = np.exp(model.log_proba_negative(bag)[0][0])
            took.append(time.process_time() - start)
        start = time.process_time()
        low, high = (1 - end[0] for end in reversed(model.predict_interval(bag)))
        seconds = time.process_time() - start
        fitted.LARGE = len(x)
        dense = np.exp(model.log_proba_negative(bag)[0][0])
        print(
            f"{len(x)} patches, tau {model.slide_effect_:g}: P {p:.4f} in {min(took):.2f} s, dense "
            f"{dense:.4f}; interval {low:.4f} to {high:.4f} in {seconds:.2f} s",
            flush=True,
        )
    fitted.LARGE = limit


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--effects", type=float, nargs="*", default=[0.5, 1.0, 2.0, 4.0])
    parser.add_argument("--slides", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--large", type=int, help="patches on a side of one large slide")
    args = parser.parse_args()
    torch.set_num_threads(1)
    train, test = gpmil.simulate.sicapv2_like(seed=0)
    models = [
        gpmil.VGPMILPRI(**SETTINGS, slide_effect=tau, random_state=0).fit(train)
        for tau in (0.0, *args.effects)
    ]
    if args.large:
        large(models, train, args.large)
        return
    for model in models[1:]:
        accuracy(model, test[: args.slides])
    took = [[] for _ in models]
    for _ in range(args.repeats + 1):
        for model, times in zip(models, took):
            start = time.perf_counter()
            model.predict_all(test)
            times.append(time.perf_counter() - start)
    without = statistics.median(took[0][1:])
    for model, times in zip(models, took):
        median = statistics.median(times[1:])
        print(f"tau {model.slide_effect_:g}: {median:.3f} s, {median / without:.2f} times")


if __name__ == "__main__":
    main()
