"""How accurate and how fast the slide probability is: the numbers behind `gpmil.moments.orthant`.

    python benchmarks/orthant_accuracy.py accuracy coverage tails sampler time large

Features are those of SICAPv2 where `../shared/data` (or GPMIL_DATA) holds them, made up
otherwise. Bags are predicted by a model fitted on every other slide, at the paper's settings
(variance 1, length sqrt(D), mean 0) and at wide ones (50, 4 sqrt(D), -4). The reference is the
tilted sampler.
"""

import argparse
import os
import sys
import time
from pathlib import Path

import numpy as np
import scipy.sparse as sp
import torch
from scipy.sparse.linalg import splu
from sklearn.cluster import KMeans

from gpmil.moments.ep import ep
from gpmil.moments.orthant import log_orthant
from gpmil.moments.orthant_large import log_orthant_large
from gpmil.moments.sampling import log_union, tilted

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from oracles.genz import genz

SETTINGS = {"paper": (1.0, 1.0, 0.0), "wide": (50.0, 4.0, -4.0)}
COUPLINGS = (0.0, 0.5, 1.0, 5.0, 10.0)


def cohort():
    """Standardised features, slide, label and position of every patch."""
    root = Path(os.environ.get("GPMIL_DATA", Path(__file__).parents[1] / "../shared/data"))
    path = root / "sicapv2_split3" / "sicapv2_split3.npz"
    data = dict(np.load(path, allow_pickle=False)) if path.exists() else made_up()
    x = data["X"].astype(float)
    x = (x - x.mean(0)) / np.where(x.std(0) > 0, x.std(0), 1)
    col = data["col"] + 10_000 * data["region"]  # regions never touch
    return x, data["bag"], data["y_bag"], data["row"], col


def made_up(n_bags=30, dim=64):
    rng = np.random.default_rng(0)
    parts = []
    for b in range(n_bags):
        n = int(rng.integers(22, 214))
        row, col = np.divmod(np.arange(n), 12)
        sick = (b % 3 > 0) & (np.hypot(row - 3, col - 5) < 3)
        parts.append((rng.standard_normal((n, dim)) + 1.2 * sick[:, None], row, col))
    bag = np.repeat(np.arange(n_bags), [len(p[1]) for p in parts])
    x, row, col = (np.concatenate(a) for a in zip(*parts, strict=True))
    label = (np.arange(n_bags) % 3 > 0).astype(int)
    return {"X": x, "bag": bag, "y_bag": label, "row": row, "col": col, "region": 0 * row}


class Model:
    """A VGPMIL-PR-I fitted on every other slide, just enough of it to predict N(mu, S)."""

    def __init__(self, setting, coupling, n_inducing=100, w=None):
        self.x, bag, self.y, self.row, self.col = cohort()
        self.variance, length, self.mean = SETTINGS[setting]
        self.length2 = length**2 * self.x.shape[1]
        self.coupling = coupling
        self.bags = [np.flatnonzero(bag == b) for b in range(len(self.y))]
        positive = self.y[bag] == 1
        self.z = np.vstack([
            KMeans(n_inducing // 2, n_init=1, random_state=0).fit(self.x[m]).cluster_centers_
            for m in (positive, ~positive)
        ])  # fmt: skip
        jitter = 1e-6 * self.variance * np.eye(n_inducing)
        self.lower = np.linalg.cholesky(self.kernel(self.z, self.z) + jitter)
        self.fit(np.zeros(n_inducing) if w is None else w)

    def kernel(self, a, b):
        square = (a**2).sum(1)[:, None] + (b**2).sum(1) - 2 * a @ b.T
        return self.variance * np.exp(-square.clip(0) / (2 * self.length2))

    def features(self, x):
        return np.linalg.solve(self.lower, self.kernel(self.z, x)).T

    def precision(self, row, col):
        """P = I + lambda C of the 4-neighbour grid, sparse."""
        index = {(r, c): i for i, (r, c) in enumerate(zip(row.tolist(), col.tolist(), strict=True))}
        steps = ((0, 1), (1, 0))
        edges = [
            (i, index[r + dr, c + dc])
            for (r, c), i in index.items()
            for dr, dc in steps
            if (r + dr, c + dc) in index
        ]
        i, j = np.array(edges, dtype=int).reshape(-1, 2).T
        a = sp.csr_array((np.ones(len(i)), (i, j)), shape=(len(row),) * 2)
        a = a + a.T
        degree = np.asarray(a.sum(axis=1)).ravel()
        return sp.csr_array(sp.diags_array(1 + self.coupling * degree) - self.coupling * a)

    def fit(self, w):
        """Maximise the collapsed bound with the factorised orthant."""
        terms, r = [], np.eye(len(w))
        for b in range(0, len(self.y), 2):
            rows = self.bags[b]
            sigma = np.linalg.inv(self.precision(self.row[rows], self.col[rows]).toarray())
            features = self.features(self.x[rows])
            r += features.T @ sigma @ features
            terms.append((torch.tensor(sigma @ features), torch.tensor(np.sqrt(np.diag(sigma))), b))
        self.r_inverse = np.linalg.inv(r)
        w = torch.tensor(w, requires_grad=True)
        optimiser = torch.optim.LBFGS([w], max_iter=500, line_search_fn="strong_wolfe")

        def closure():
            optimiser.zero_grad()
            bound = -w @ w / 2
            for h, sd, b in terms:
                q = torch.special.log_ndtr(-(h @ w + self.mean) / sd).sum().clamp(max=-1e-12)
                bound = bound + (torch.log(-torch.expm1(q)) if self.y[b] else q)
            (-bound).backward()
            return -bound

        optimiser.step(closure)
        self.w = w.detach().numpy()

    def predict(self, x, precision):
        """mu, S of a slide with features x."""
        sigma = np.linalg.inv(precision.toarray())
        w = self.features(x)
        v = self.kernel(x, x) - w @ w.T + w @ self.r_inverse @ w.T
        s = sigma + sigma @ v @ sigma
        return torch.tensor(sigma @ w @ self.w + self.mean), torch.tensor((s + s.T) / 2)

    def bag(self, b):
        rows = self.bags[b]
        return self.predict(self.x[rows], self.precision(self.row[rows], self.col[rows]))

    def mosaic(self, n, rng):
        """Features and precision of n patches: slides, one after the other, on one grid."""
        order = np.concatenate([self.bags[b] for b in rng.permutation(len(self.bags))])
        rows = np.resize(order, n)
        x = self.x[rows] + 0.3 * rng.standard_normal((n, self.x.shape[1]))
        row, col = np.divmod(np.arange(n), int(np.sqrt(n)))
        return x, self.precision(row, col)


def models(couplings=COUPLINGS):
    for setting in SETTINGS:
        w = None
        for coupling in couplings:
            model = Model(setting, coupling, w=w)
            w = model.w  # a warm start: the bound has several maxima
            yield setting, coupling, model


def one(mu, cov):
    return mu[None], cov[None]


def accuracy(points):
    """Error of independent patches, EP, EP + c3; by coupling and size."""
    rng = np.random.default_rng(0)
    print("| setting | coupling | n | log P | independent | EP | EP + c3 | estimate | ref. se |")
    print("|---|---|---|---|---|---|---|---|---|")
    for setting, coupling, model in models():
        sizes = {n: [model.predict(*model.mosaic(n, rng)) for _ in range(5)] for n in (10, 50, 174)}
        sizes["slides"] = [model.bag(b) for b in range(len(model.bags))]
        sizes[600] = [model.predict(*model.mosaic(600, rng))]
        if coupling in (1.0, 10.0):
            sizes[2000] = [model.predict(*model.mosaic(2000, rng))]
        for n, bags in sizes.items():
            rows = np.array([_errors(*bag, points) for bag in bags])
            mean, worst = rows.mean(0), np.abs(rows).max(0)
            print(
                f"| {setting} | {coupling:g} | {n} | {mean[0]:.2f} "
                f"| {worst[1]:.4f} | {worst[2]:.4f} | {worst[3]:.4f} "
                f"| {mean[4]:.4f} | {worst[5]:.4f} |",
                flush=True,
            )


def _errors(mu, cov, points):
    found, result = ep(*one(mu, cov)), log_orthant(*one(mu, cov))
    points = max(256, points * 200 // max(len(mu), 200))
    reference, se = tilted(mu, cov, n_points=points, sites=found, seed=11)
    alone = float(torch.special.log_ndtr(-mu / cov.diagonal().sqrt()).sum())
    return (
        reference,
        alone - reference,
        float(found.log_p) - reference,
        float(result.log_p) - reference,
        float(result.error),
        se,
    )


def coverage(points):
    """How often the error exceeds its estimate, over 200 random bags."""
    rng = np.random.default_rng(1)
    fitted = [m for _, _, m in models()]
    off, estimate, se = [], [], []
    for k in range(200):
        model = fitted[k % len(fitted)]
        rows = rng.choice(len(model.bags))
        n = int(rng.integers(8, len(model.bags[rows]) + 1))
        mu, cov = (a[:n] if a.ndim == 1 else a[:n, :n] for a in model.bag(rows))
        mu = mu + rng.normal() * (k % 4 == 0)
        reference, spread = tilted(mu, cov, n_points=points, seed=11)
        result = log_orthant(*one(mu, cov))
        off.append(abs(float(result.log_p) - reference))
        estimate.append(float(result.error))
        se.append(spread)
    off, estimate, se = (np.array(a) for a in (off, estimate, se))
    print(f"error > 2 x estimate + 0.002: {np.mean(off > 2 * estimate + 0.002):.3f} of 200 bags")
    print(f"error > estimate + 2 se: {np.mean(off > estimate + 2 * se):.3f}; ", end="")
    print(f"median error {np.median(off):.5f}, median estimate {np.median(estimate):.5f}")


def tails(points):
    """log P below -1000, and log(1 - P) down to 1e-8 and beyond."""
    for setting, coupling, model in models((1.0, 10.0)):
        mu, cov = model.bag(0)
        for shift in (10.0, 25.0):
            result = log_orthant(*one(mu + shift, cov))
            reference, se = tilted(mu + shift, cov, n_points=points)
            print(f"{setting} {coupling:g}: log P {reference:.3f}, ", end="")
            print(f"off {float(result.log_p) - reference:+.5f} (se {se:.5f})")
        for shift in (-0.7, -1.4, -2.0, -3.0, -9.0):
            result = log_orthant(*one(mu + shift, cov))
            runs = np.array([log_union(mu + shift, cov, seed=s) for s in range(100, 132)])
            reference = np.log(np.mean(np.exp(runs[:, 0] - runs[0, 0]))) + runs[0, 0]
            ep_only = float(sum(getattr(ep(*one(mu + shift, cov)), f) for f in ("log_p", "c3")))
            plain = np.log(-np.expm1(ep_only)) if ep_only < 0 else np.nan
            print(f"{setting} {coupling:g}: log(1 - P) {reference:.4f}, ", end="")
            print(f"off {float(result.log_1mp) - reference:+.4f} ", end="")
            print(
                f"(EP + c3 alone {plain - reference:+.4f}; estimate {float(result.error_1mp):.4f})"
            )


def sampler(points):
    """Share of 200 seeds whose error is within 3 standard errors."""
    for setting, coupling, model in models((1.0, 10.0)):
        mu, cov = (a[:60] if a.ndim == 1 else a[:60, :60] for a in model.bag(0))
        reference, _ = tilted(mu, cov, n_points=2**14, seed=999)
        runs = np.array([tilted(mu, cov, n_points=128, seed=s) for s in range(200)])
        z = (runs[:, 0] - reference) / runs[:, 1]
        plain, plain_se = genz(mu.numpy(), cov.numpy(), n_points=2**13)
        print(f"{setting} {coupling:g}: within 3 se {np.mean(np.abs(z) < 3):.3f}, ", end="")
        print(f"sd of z {z.std():.2f}; Genz off {plain - reference:+.4f} (se {plain_se:.4f})")


def timing(_):
    """Seconds a slide on this machine, and 31 slides against 5,000 draws."""
    model = Model("paper", 1.0)
    rng = np.random.default_rng(0)
    devices = ["cpu"] + ["cuda"] * torch.cuda.is_available()
    for n in (174, 1000, 2000) + (10_000,) * torch.cuda.is_available():
        x, precision = model.mosaic(n, rng)
        mu, cov = model.predict(x, precision)
        for device in devices if n < 10_000 else ["cuda"]:
            a, b = (t.to(device)[None] for t in (mu, cov))
            print(f"n = {n}, {device}: {_seconds(lambda a=a, b=b: log_orthant(a, b)):.4f} s")
    bags = [model.bag(b) for b in range(len(model.bags))]
    print(f"{len(bags)} slides, one by one: ", end="")
    print(f"{_seconds(lambda: [log_orthant(*one(*bag)) for bag in bags]):.3f} s; batched: ", end="")
    batches = list(_padded(bags, 4))
    print(
        f"{_seconds(lambda: [log_orthant(*batch) for batch in batches]):.3f} s; 5,000 draws: ",
        end="",
    )
    print(f"{_seconds(lambda: [_draws(*bag) for bag in bags], 1):.3f} s")


def _padded(bags, per_batch=8):
    bags = sorted(bags, key=lambda bag: len(bag[0]))
    for start in range(0, len(bags), per_batch):
        some = bags[start : start + per_batch]
        n = max(len(mu) for mu, _ in some)
        mu, cov = torch.zeros(len(some), n).double(), torch.zeros(len(some), n, n).double()
        mask = torch.zeros(len(some), n, dtype=torch.bool)
        for i, (m, c) in enumerate(some):
            mu[i, : len(m)], cov[i, : len(m), : len(m)], mask[i, : len(m)] = m, c, True
        yield mu, cov, mask


def _draws(mu, cov):
    m = np.random.default_rng(0).multivariate_normal(mu.numpy(), cov.numpy(), size=5000)
    return (m < 0).all(1).mean()


def _seconds(run, repeats=3):
    run()
    best = np.inf
    for _ in range(repeats):
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        start = time.perf_counter()
        run()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        best = min(best, time.perf_counter() - start)
    return best


def large(_):
    """One large slide on the CPU, and dense EP where that is still feasible."""
    for setting, coupling, model in models((1.0, 10.0)):
        for n in (2000, 10_000):
            x, precision = model.mosaic(n, np.random.default_rng(3))
            w = model.features(x)
            xt, wt = torch.tensor(x), torch.tensor(w)
            square = (xt**2).sum(1)

            def residual(i, xt=xt, wt=wt, square=square, model=model):
                out = torch.addmm(square.expand(len(i), -1), xt[i], xt.T, alpha=-2)
                out.add_(square[i][:, None]).clamp_(min=0).mul_(-1 / (2 * model.length2)).exp_()
                return out.mul_(model.variance).addmm_(wt[i], wt.T, alpha=-1)

            mu = torch.tensor(splu(precision.tocsc()).solve(w @ model.w) + model.mean)
            diagonal = (model.variance - (wt**2).sum(1)).clamp(min=0)
            factor = torch.tensor(w @ np.linalg.cholesky(model.r_inverse))
            dense = model.predict(x, precision)[1] if n <= 2000 else None
            variance = torch.full((n,), 1.5).double() if dense is None else dense.diagonal()
            start = time.perf_counter()
            result = log_orthant_large(mu, variance, precision, factor, residual, diagonal)
            took = time.perf_counter() - start
            print(f"{setting} {coupling:g} n = {n}: log P {float(result.log_p):.4f} ", end="")
            print(f"+- {float(result.error):.4f} in {took:.2f} s", end="")
            if dense is not None:
                print(f"; dense EP {float(log_orthant(*one(mu, dense)).log_p):.4f}", end="")
            print(flush=True)


STUDIES = {
    "accuracy": accuracy,
    "coverage": coverage,
    "tails": tails,
    "sampler": sampler,
    "time": timing,
    "large": large,
}

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("study", nargs="+", choices=STUDIES)
    parser.add_argument("--points", type=int, default=4096, help="reference points a replicate")
    arguments = parser.parse_args()
    for study in arguments.study:
        print(f"\n## {STUDIES[study].__doc__}\n", flush=True)
        STUDIES[study](arguments.points)
