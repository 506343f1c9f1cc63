"""Cohorts drawn from the model itself: what a fit infers can be held against the truth.

w ~ N(0, I),  f | w ~ N(c + W w, Kxx - W W') bag by bag,  m_b = Sigma_b f_b + s_b 1 + noise,
noise ~ N(0, Sigma_b),  s_b ~ N(0, tau^2),  y_b = 1 where any m > 0.
"""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Float
from scipy.spatial.distance import cdist

from gpmil.data.bags import Bags
from gpmil.proof.tissue import D

SHARES = (0.35, 0.65)  # of positive bags: a cohort of nearly one class says nothing


@dataclass(frozen=True)
class Prior:
    """The settings of the model that cohorts are drawn from."""

    coupling: float  # lambda
    effect: float = 0.0  # tau
    sides: tuple[int, int] = (5, 8)  # least and most patches a side of a slide
    variance: float = 9.0
    length: float = 2.0  # / sqrt D
    n_inducing: int = 50

    def kernel(self, x: np.ndarray, z: np.ndarray) -> Float[np.ndarray, "n m"]:
        """Squared exponential."""
        s = cdist(x, z, "sqeuclidean")
        return self.variance * np.exp(-s / (2 * D * self.length**2))

    def whitened(self, x: np.ndarray, Z: np.ndarray) -> Float[np.ndarray, "n m"]:
        """W = Kxz L^-T, with L L' = Kzz + jitter."""
        Kzz = self.kernel(Z, Z) + 1e-6 * self.variance * np.eye(len(Z))
        return np.linalg.solve(np.linalg.cholesky(Kzz), self.kernel(Z, x)).T


@dataclass(frozen=True)
class SlideOfTheModel:
    """A slide before anything is drawn on it."""

    x: Float[np.ndarray, "n d"]
    cells: np.ndarray
    Sigma: Float[np.ndarray, "n n"]
    W: Float[np.ndarray, "n m"]
    root_f: Float[np.ndarray, "n n"]  # of Cov(f | w) = Kxx - W W'
    root_m: Float[np.ndarray, "n n"]  # of Cov(m | f, s) = Sigma

    @classmethod
    def draw(cls, rng: np.random.Generator, Z: Float[np.ndarray, "m d"], prior: Prior):
        """Cells of a rectangle, features N(0, I)."""
        cells = np.argwhere(np.ones(rng.integers(*prior.sides, 2, endpoint=True), dtype=bool))
        x = rng.standard_normal((len(cells), D))
        A = cdist(cells, cells, "cityblock") == 1
        # Sigma = (I + lambda C)^-1
        C = np.diag(A.sum(1)) - A.astype(float)
        Sigma = np.linalg.inv(np.eye(len(x)) + prior.coupling * C)
        W = prior.whitened(x, Z)
        left = prior.kernel(x, x) - W @ W.T + 1e-9 * prior.variance * np.eye(len(x))
        return cls(x, cells, Sigma, W, np.linalg.cholesky(left), np.linalg.cholesky(Sigma))


@dataclass(frozen=True)
class Truth:
    """A cohort, and everything that was drawn to make it."""

    bags: Bags
    Z: Float[np.ndarray, "m d"]
    c: float
    w: Float[np.ndarray, " m"]
    f: list[Float[np.ndarray, " _"]]  # of every bag
    s: Float[np.ndarray, " B"]
    slides: list[SlideOfTheModel]


def cohort(prior: Prior, n_bags: int, seed: tuple[int, ...]) -> Truth:
    """A cohort of the prior.

    c is such that half of the bags are positive on average over w; all is drawn again until 35 to
    65 % of them are. That looks at the labels alone, which every posterior is given.
    """
    rng = np.random.default_rng(seed)
    Z = rng.standard_normal((prior.n_inducing, D))
    slides = [SlideOfTheModel.draw(rng, Z, prior) for _ in range(n_bags)]
    tries = [_scores(rng, slides, prior) for _ in range(40)]
    c = -float(np.median([np.median([m.max() for m in scores]) for *_, scores in tries]))
    while True:
        w, f, s, scores = _scores(rng, slides, prior)
        h = [m + c > 0 for m in scores]
        y = np.array([one.any() for one in h])
        if SHARES[0] <= y.mean() <= SHARES[1]:
            break
    bags = Bags.from_arrays(
        [slide.x for slide in slides],
        labels=y.astype(int),
        coords=[slide.cells for slide in slides],
        step=1,
        graph="grid4",
        instance_labels=[one.astype(int) for one in h],
    )
    return Truth(bags, Z, c, w, [own + c for own in f], s, slides)


def _scores(
    rng: np.random.Generator, slides: list[SlideOfTheModel], prior: Prior
) -> tuple[np.ndarray, list[np.ndarray], np.ndarray, list[np.ndarray]]:
    """w, f - c, s and m - c: Sigma 1 = 1, so that c is added to m as to f."""
    w = rng.standard_normal(prior.n_inducing)
    f = [one.W @ w + one.root_f @ rng.standard_normal(len(one.x)) for one in slides]
    s = prior.effect * rng.standard_normal(len(slides))
    m = [
        one.Sigma @ own + effect + one.root_m @ rng.standard_normal(len(one.x))
        for one, own, effect in zip(slides, f, s)
    ]
    return w, f, s, m
