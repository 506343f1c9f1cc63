"""The paper's algorithm as one would first write it: NumPy, a loop over bags, explicit inverses.

This is the twin that ratios refer to. It has the structure of the paper's public implementation:
ten k-means starts for each half of the inducing points, one (I + lambda C_b)^-1 per bag, Kzz^-1,
sums and moments bag by bag in every sweep, and 5,000 draws for a bag's probability. It is never
to be made faster.
"""

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np
from jaxtyping import Bool, Float, Int
from scipy.spatial.distance import cdist
from scipy.stats import norm
from sklearn.cluster import KMeans

from gpmil.data.bags import Bags

JITTER = 1e-6  # of the variance, on the diagonal of Kzz
STARTS = 10
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
        return np.linalg.inv(np.eye(len(C)) + self.strength * C)


def inducing_points(
    x: Float[np.ndarray, "N d"], positive: Bool[np.ndarray, " N"], count: int, seed: int
) -> Float[np.ndarray, "M d"]:
    """K-means centres, half of the positive bags' instances and half of the others'."""
    halves = ((x[positive], count - count // 2), (x[~positive], count // 2))
    found = [
        KMeans(min(k, len(part)), n_init=STARTS, random_state=seed).fit(part).cluster_centers_
        for part, k in halves
    ]
    return np.concatenate(found)


class Training:
    """Algorithm 1: q(u) from standardised features x, inducing points Z in the same space."""

    def __init__(
        self,
        x: Float[np.ndarray, "N d"],
        bags: Bags,
        Z: Float[np.ndarray, "M d"],
        setting: Setting,
    ):
        self.setting = setting
        self.labels = bags.labels
        self.rows = [np.flatnonzero(bags.bag_index == b) for b in range(len(bags))]
        Kzz = setting.kernel(Z, Z) + JITTER * setting.variance * np.eye(len(Z))
        Kzz_inv = np.linalg.inv(Kzz)
        self.A = [setting.kernel(x[rows], Z) @ Kzz_inv for rows in self.rows]
        self.Sigma = [
            setting.coupling(bags.adjacency[rows][:, rows].toarray().astype(float))
            for rows in self.rows
        ]
        # eq. (sigma_u)  Sigma^u = (Kzz^-1 + sum_b A_b' Sigma_b A_b)^-1
        precision = Kzz_inv.copy()
        for A, Sigma in zip(self.A, self.Sigma):
            precision += A.T @ Sigma @ A
        self.Sigma_u = np.linalg.inv(precision)

    def sweeps(self, E: Float[np.ndarray, " N"], count: int) -> Float[np.ndarray, " M"]:
        """mu^u after `count` sweeps from E[m] = E."""
        each = [E[rows] for rows in self.rows]
        for _ in range(count):
            # eq. (mu_u)  mu^u = Sigma^u sum_b A_b' (E[m_b] - c)
            mean_u = self.Sigma_u @ sum(
                A.T @ (E_b - self.setting.c) for A, E_b in zip(self.A, each)
            )
            each = [self.expectation(b, mean_u) for b in range(len(self.rows))]
        return mean_u

    def expectation(self, b: int, mean_u: Float[np.ndarray, " M"]) -> Float[np.ndarray, " n"]:
        """E[m_b] by eqs. (mu_mb), (qmi_0) and (qmi_1), as printed in the paper."""
        Sigma = self.Sigma[b]
        mu, sigma = Sigma @ (self.A[b] @ mean_u + self.setting.c), np.sqrt(np.diag(Sigma))
        t = mu / sigma
        below = mu - sigma * norm.pdf(t) / (1 - norm.cdf(t))
        if not self.labels[b]:
            return below
        Z = 1 - np.prod(1 - norm.cdf(t))
        return (mu - (1 - Z) * below) / Z


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
