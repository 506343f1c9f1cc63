"""The paper's algorithm in NumPy, with what the paper's public implementation does.

This is the twin that ratios refer to. Its steps are those of the published code, and it takes about
as long on the same machine: k-means from ten random starts of ten iterations for each half
of the inducing points, one (I + lambda C_b)^-1 per bag, Kzz^-1 and Sigma^u once, one product for
A'E and the moments of all patches at once in every sweep, means bag by bag, and 5,000 draws for a
bag's probability. It is never to be made faster than that.
"""

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np
from jaxtyping import Bool, Float, Int
from scipy import sparse
from scipy.spatial.distance import cdist
from scipy.stats import norm

from gpmil.data.bags import Bags

JITTER = 1e-6  # of the variance, on the diagonal of Kzz
STARTS, ITERATIONS = 10, 10  # of k-means
DRAWS = 5_000


@dataclass(frozen=True)
class Setting:
    """The numbers of the model, in the space of standardised features."""

    strength: float  # lambda
    variance: float
    length: float
    c: float  # prior mean

    def kernel(
        self, x: Float[np.ndarray, "n d"], z: Float[np.ndarray, "m d"]
    ) -> Float[np.ndarray, "n m"]:
        """variance exp(-|x - z|^2 / 2 length^2)."""
        return self.variance * np.exp(-cdist(x, z, "sqeuclidean") / (2 * self.length**2))

    def coupling(self, adjacency: Float[np.ndarray, "n n"]) -> Float[np.ndarray, "n n"]:
        """Sigma_b = (I + lambda C_b)^-1, C_b the Laplacian of the bag's graph."""
        C = np.diag(adjacency.sum(1)) - adjacency
        if np.linalg.eigvals(C).min() < -1e-10:
            raise ValueError("expected a positive semidefinite C_b; is the graph symmetric?")
        return np.linalg.inv(np.eye(len(C)) + self.strength * C)


# --- Inducing points ------------------------------------------------------------------------------
def inducing_points(
    x: Float[np.ndarray, "N d"], positive: Bool[np.ndarray, " N"], count: int, seed: int
) -> Float[np.ndarray, "M d"]:
    """K-means centres, half of the positive bags' instances and half of the others'."""
    halves = ((x[positive], count - count // 2), (x[~positive], count // 2))
    rng = np.random.default_rng(seed)
    return np.concatenate([kmeans(part, min(k, len(part)), rng) for part, k in halves])


def kmeans(
    x: Float[np.ndarray, "n d"], k: int, rng: np.random.Generator
) -> Float[np.ndarray, "k d"]:
    """The best of ten runs of Lloyd's algorithm, each from points drawn at random."""
    runs = (lloyd(x, x[rng.choice(len(x), k, replace=False)]) for _ in range(STARTS))
    return min(runs, key=lambda run: run[1])[0]


def lloyd(
    x: Float[np.ndarray, "n d"], centres: Float[np.ndarray, "k d"]
) -> tuple[Float[np.ndarray, "k d"], float]:
    """Centres after ten iterations, and the sum of squared distances to the nearest."""
    for _ in range(ITERATIONS):
        centres = means(x, assigned(x, centres)[0], centres)
    return centres, float(assigned(x, centres)[1].sum())


def assigned(
    x: Float[np.ndarray, "n d"], centres: Float[np.ndarray, "k d"]
) -> tuple[Int[np.ndarray, " n"], Float[np.ndarray, " n"]]:
    """The nearest centre, and the squared distance to it."""
    # |x - z|^2 = |x|^2 - 2 x'z + |z|^2
    distance = np.square(x).sum(1)[:, None] - 2 * x @ centres.T + np.square(centres).sum(1)
    nearest = distance.argmin(1)
    return nearest, distance[np.arange(len(x)), nearest]


def means(
    x: Float[np.ndarray, "n d"], nearest: Int[np.ndarray, " n"], centres: Float[np.ndarray, "k d"]
) -> Float[np.ndarray, "k d"]:
    """Mean of every centre's points; a centre that has none stays where it is."""
    n, k = len(x), len(centres)
    counts = np.bincount(nearest, minlength=k)[:, None]
    chosen = sparse.csr_matrix((np.ones(n), (nearest, np.arange(n))), (k, n))
    return np.where(counts > 0, chosen @ x / np.maximum(counts, 1), centres)


# --- Training -------------------------------------------------------------------------------------
class Training:
    """Algorithm 1: q(u) from standardised features x, inducing points Z in the same space."""

    def __init__(
        self,
        x: Float[np.ndarray, "N d"],
        bags: Bags,
        Z: Float[np.ndarray, "M d"],
        setting: Setting,
    ):
        self.setting, self.offsets = setting, bags.offsets
        self.positive = bags.labels[bags.bag_index] == 1
        self.rows = [np.flatnonzero(bags.bag_index == b) for b in range(len(bags))]
        Kzz = setting.kernel(Z, Z) + JITTER * setting.variance * np.eye(len(Z))
        Kzz_inv = np.linalg.inv(Kzz)
        self.At = Kzz_inv @ setting.kernel(Z, x)
        self.Sigma = [
            setting.coupling(bags.adjacency[rows][:, rows].toarray().astype(float))
            for rows in self.rows
        ]
        # eq. (sigma_u)  Sigma^u = (Kzz^-1 + sum_b A_b' Sigma_b A_b)^-1, the same in every sweep
        added = [
            self.At[:, rows] @ Sigma @ self.At[:, rows].T
            for rows, Sigma in zip(self.rows, self.Sigma)
        ]
        self.Sigma_u = np.linalg.inv(Kzz_inv + np.sum(added, axis=0))

    def sweeps(self, E: Float[np.ndarray, " N"], count: int) -> Float[np.ndarray, " M"]:
        """mu^u after `count` sweeps from E[m] = E."""
        for _ in range(count):
            # eq. (mu_u)  mu^u = Sigma^u sum_b A_b' (E[m_b] - c)
            mean_u = self.Sigma_u @ (self.At @ (E - self.setting.c))
            E = self.expectation(mean_u)
        return mean_u

    def expectation(self, mean_u: Float[np.ndarray, " M"]) -> Float[np.ndarray, " N"]:
        """E[m] by eqs. (mu_mb), (qmi_0) and (qmi_1), as printed in the paper."""
        mu, sigma = np.empty(len(self.positive)), np.empty(len(self.positive))
        for rows, Sigma in zip(self.rows, self.Sigma):
            mu[rows] = Sigma @ (self.At[:, rows].T @ mean_u + self.setting.c)
            sigma[rows] = np.sqrt(np.diag(Sigma))
        t = mu / sigma
        below = mu - sigma * norm.pdf(t) / (1 - norm.cdf(t))
        # Z_b = 1 - prod_i (1 - Phi(t_i)), written to the bag's instances
        q = np.multiply.reduceat(1 - norm.cdf(t), self.offsets[:-1])
        Z = 1 - np.repeat(q, np.diff(self.offsets))
        return np.where(self.positive, (mu - (1 - Z) * below) / Z, below)


def fit(
    bags: Bags, setting: Setting, n_inducing: int, sweeps: int, seed: int
) -> tuple[Float[np.ndarray, " M"], Float[np.ndarray, "M M"]]:
    """Everything from features to q(u): standardise, place inducing points, sweep."""
    x = standardised(bags.features)
    positive = bags.labels[bags.bag_index] == 1
    training = Training(x, bags, inducing_points(x, positive, n_inducing, seed), setting)
    start = np.random.default_rng(seed).standard_normal(len(x))
    return training.sweeps(start, sweeps), training.Sigma_u


def standardised(features: np.ndarray) -> Float[np.ndarray, "N d"]:
    """Zero mean and unit variance column by column."""
    x = np.asarray(features, dtype=float)
    scale = x.std(0)
    return (x - x.mean(0)) / np.where(scale > 0, scale, 1.0)


@runtime_checkable
class Fitted(Protocol):
    """What predictions need of a fitted model of the package."""

    feature_mean_: np.ndarray
    feature_scale_: np.ndarray
    inducing_points_: np.ndarray
    posterior_mean_: np.ndarray
    posterior_covariance_: np.ndarray


class Predicting:
    """Predictions from the q(u) of a fitted model, bag by bag with dense covariances."""

    def __init__(self, model: Fitted, setting: Setting, seed: int = 0):
        self.setting, self.seed = setting, seed
        self.center, self.scale = model.feature_mean_, model.feature_scale_
        self.Z = (model.inducing_points_ - self.center) / self.scale
        self.mean_u, self.Sigma_u = model.posterior_mean_, model.posterior_covariance_
        self.Kzz = setting.kernel(self.Z, self.Z)
        self.Kzz += JITTER * setting.variance * np.eye(len(self.Z))
        self.Kzz_inv = np.linalg.inv(self.Kzz)

    def predict(self, bags: Bags) -> tuple[Float[np.ndarray, " B"], Float[np.ndarray, " N"]]:
        """P(y_b = 1) by counting draws, and P(h_i = 1)."""
        # the generator of numpy.random.multivariate_normal, with a state of its own
        self.draws = np.random.RandomState(self.seed)
        p, q = np.empty(len(bags)), np.empty(bags.n_instances)
        for b in range(len(bags)):
            rows = np.flatnonzero(bags.bag_index == b)
            p[b], q[rows] = self.bag(bags, rows)
        return p, q

    def bag(self, bags: Bags, rows: Int[np.ndarray, " n"]) -> tuple[float, Float[np.ndarray, " n"]]:
        """One bag."""
        x = (bags.features[rows] - self.center) / self.scale
        Sigma = self.setting.coupling(bags.adjacency[rows][:, rows].toarray().astype(float))
        # eqs. (f_star), (m_star)
        A = self.setting.kernel(x, self.Z) @ self.Kzz_inv
        S_f = self.setting.kernel(x, x) - A @ (self.Kzz - self.Sigma_u) @ A.T
        mu = Sigma @ (self.setting.c + A @ self.mean_u)
        S = Sigma + Sigma @ S_f @ Sigma.T
        # eq. (pred_bag), counted; eq. (pred_instance)
        draws = self.draws.multivariate_normal(mu, S, DRAWS)
        return 1 - float((draws < 0).all(1).mean()), norm.cdf(mu / np.sqrt(np.diag(S)))
