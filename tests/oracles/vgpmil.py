"""Naive twins of VGPMIL: the update formulas with explicit inverses and loops, in NumPy and SciPy.

    p(h_i | f_i) = sigmoid(f_i)^h_i sigmoid(-f_i)^(1 - h_i),   p(y_b | h_b) = H^G_b / (H + 1)

u lives at the inducing points, f_i | u ~ N(c + A_i u, D_ii) with A = Kxz Kzz^-1 and FITC's diagonal
D, and q(h_i = 1) = pi_i is kept as a probability. One iteration is q(u), then xi, then q(h).
"""

from dataclasses import dataclass
from itertools import pairwise, product

import mpmath as mp
import numpy as np
from scipy.integrate import quad
from scipy.special import xlogy
from scipy.stats import norm

from oracles.model import JITTER, kernel


def sigmoid(f):
    return 1 / (1 + np.exp(-f)) if f > 0 else np.exp(f) / (1 + np.exp(f))


def jaakkola(xi):
    """l(xi) = tanh(xi / 2) / (4 xi)."""
    return np.array([np.tanh(t / 2) / (4 * t) if t else 1 / 8 for t in xi])


@dataclass
class Cohort:
    """Kernel inputs, bag by bag, and everything the formulas need of the process."""

    bags: list  # one (n_b, d) array a bag
    labels: np.ndarray
    z: np.ndarray
    c: float
    name: str = "rbf"
    variance: float = 1.0
    lengthscale: float = 1.0

    def k(self, x, z):
        return kernel(x, z, self.name, self.variance, self.lengthscale)

    def __post_init__(self):
        x = np.concatenate(self.bags)
        self.Kzz = self.k(self.z, self.z) + JITTER * self.variance * np.eye(len(self.z))
        self.Kzz_inv = np.linalg.inv(self.Kzz)
        self.A, self.D = self.project(x)
        ends = np.cumsum([0, *map(len, self.bags)])
        self.rows = [range(a, b) for a, b in pairwise(ends)]

    def project(self, x):
        """A_i = k(x_i, Z) Kzz^-1 and D_ii = k(x_i, x_i) - k(x_i, Z) Kzz^-1 k(Z, x_i)."""
        A, D = np.empty((len(x), len(self.z))), np.empty(len(x))
        for i in range(len(x)):
            row = self.k(x[i : i + 1], self.z)[0]
            A[i] = row @ self.Kzz_inv
            D[i] = self.k(x[i : i + 1], x[i : i + 1])[0, 0] - A[i] @ row
        return A, D


# --- The updates ------------------------------------------------------------------------------


def update_u(cohort, pi, xi):
    """q(u) = N(m, S):  S^-1 = Kzz^-1 + A' 2 l(xi) A,  m = S A'(pi - 1/2 - 2 l(xi) c)."""
    theta = 2 * jaakkola(xi)
    precision, pull = cohort.Kzz_inv.copy(), np.zeros(len(cohort.z))
    for i, a in enumerate(cohort.A):
        precision += theta[i] * np.outer(a, a)
        pull += a * (pi[i] - 0.5 - theta[i] * cohort.c)
    S = np.linalg.inv(precision)
    return S @ pull, S


def moments(cohort, m, S):
    """E[f_i] and E[f_i^2]."""
    Ef = np.array([cohort.c + a @ m for a in cohort.A])
    return Ef, np.array([e**2 + a @ S @ a + d for e, a, d in zip(Ef, cohort.A, cohort.D)])


def update_h(rows, labels, pi, Ef, H, rule="product"):
    """logit pi_i = E[f_i] + log H (2 y - 1)(1 - E[max of the others])."""
    new = pi.copy()
    for bag, y in zip(rows, labels):
        for i in bag:
            # one after the other sees what was just changed; all at once sees the old
            seen = new if rule == "product" else pi
            others = [seen[j] for j in bag if j != i]
            none = np.prod([1 - p for p in others]) if rule == "product" else 1 - max([0, *others])
            new[i] = sigmoid(Ef[i] + np.log(H) * (2 * y - 1) * none)
    return new


def sweeps(cohort, pi, xi, H, n_iter, rule="product"):
    """pi, m, S and the bound after every iteration."""
    trace = []
    for _ in range(n_iter):
        m, S = update_u(cohort, pi, xi)
        Ef, Eff = moments(cohort, m, S)
        xi = np.sqrt(Eff)
        pi = update_h(cohort.rows, cohort.labels, pi, Ef, H, rule)
        trace.append(bound(cohort, m, S, xi, pi, H))
    return pi, m, S, np.array(trace)


# --- The bound --------------------------------------------------------------------------------


def expected_right(pi, y):
    """E[G_b], summed over every assignment of labels to the instances."""
    total = 0.0
    for h in product((0, 1), repeat=len(pi)):
        if max(h) == y:
            total += np.prod([p if one else 1 - p for p, one in zip(pi, h)])
    return total


def bound(cohort, m, S, xi, pi, H):
    """E[log p(y | h)] + E[Jaakkola's bound of log p(h | f)] + entropy of q(h) - KL(q(u), p(u))."""
    Ef, Eff = moments(cohort, m, S)
    total = 0.0
    for i, l in enumerate(jaakkola(xi)):
        for p, f in ((pi[i], Ef[i]), (1 - pi[i], -Ef[i])):
            # log sigmoid(f) >= log sigmoid(xi) + (f - xi)/2 - l(xi) (f^2 - xi^2)
            log_sigmoid = -np.log1p(np.exp(-abs(xi[i]))) - max(-xi[i], 0)
            total += p * (log_sigmoid + (f - xi[i]) / 2 - l * (Eff[i] - xi[i] ** 2))
            total -= xlogy(p, p)
    for bag, y in zip(cohort.rows, cohort.labels):
        total += np.log(H) * expected_right(pi[list(bag)], y) - np.log(H + 1)
    log_det = np.linalg.slogdet(cohort.Kzz)[1] - np.linalg.slogdet(S)[1]
    fit = np.trace(cohort.Kzz_inv @ S) + m @ cohort.Kzz_inv @ m
    return total - (fit - len(m) + log_det) / 2


# --- Predictions ------------------------------------------------------------------------------


def predict(cohort, m, S, bags):
    """Mean and deviation of every f*, bag by bag."""
    found = []
    for x in bags:
        A, D = cohort.project(x)
        variance = [a @ S @ a + d for a, d in zip(A, D)]
        found.append((cohort.c + A @ m, np.sqrt(variance)))
    return found


def expected_sigmoid(mean, std):
    """E[sigmoid(f)], f ~ N(mean, std^2), by adaptive quadrature."""
    if std == 0:
        return sigmoid(mean)

    def integrand(f):
        return norm.pdf(f, mean, std) * sigmoid(f)

    # between zero and the tilted mean lies what matters when the mean is far below zero
    points = sorted({mean - 12 * std, mean, min(mean + std**2, 0.0), 0.0, mean + 12 * std})
    points = [p for p in points if mean - 12 * std <= p <= mean + 12 * std]
    pieces = [
        quad(integrand, a, b, epsabs=0, epsrel=1e-12, limit=200)[0] for a, b in pairwise(points)
    ]
    return sum(pieces)


def log_negative(mean, std, rule):
    """log P(y = 0) of one bag: no instance positive, or the likeliest is not."""
    each = [np.log(expected_sigmoid(-a, b)) for a, b in zip(mean, std)]
    return sum(each) if rule == "noisy_or" else min(each)


def curvature_mp(xi):
    """2 l(xi) with 50 digits."""
    with mp.workdps(50):
        t = mp.mpf(float(xi))
        return float(mp.tanh(t / 2) / (2 * t)) if t else 0.25


def log_expected_sigmoid_mp(mean, std):
    """log E[sigmoid(f)] with 30 digits, by the trapezoid rule on a fine grid in f.

    With step h its error is about exp(-2 pi^2 / h) from the poles of the sigmoid and
    exp(-2 pi^2 std^2 / h^2) from the Gaussian: far below 1e-16 here.
    """
    with mp.workdps(30):
        mean, std = mp.mpf(float(mean)), mp.mpf(float(std))
        if not std:
            return float(-mp.log1p(mp.exp(-mean)))
        h = min(mp.mpf(1) / 4, std / 4)
        # from the lowest of the two places where mass can lie, to the highest
        low, high = mean - 12 * std, mean + 12 * std + std**2
        n = int((high - low) / h)
        total = mp.fsum(
            mp.exp(-(((low + k * h - mean) / std) ** 2) / 2) / (1 + mp.exp(-(low + k * h)))
            for k in range(n + 1)
        )
        return float(mp.log(total * h / std) - mp.log(2 * mp.pi) / 2)


# --- Limits -----------------------------------------------------------------------------------


def full_gp(K, rows, labels, c, pi, xi, H, n_iter):
    """VGPMIL without inducing points: q(f) = N(c + m, S), S^-1 = K^-1 + 2 l(xi)."""
    for _ in range(n_iter):
        theta = 2 * jaakkola(xi)
        S = K - K @ np.linalg.inv(K + np.diag(1 / theta)) @ K
        m = S @ (pi - 0.5 - theta * c)
        xi = np.sqrt((c + m) ** 2 + np.diag(S))
        pi = update_h(rows, labels, pi, c + m, H)
    return pi, m, S


def logistic_gp(K, y, c, xi, n_iter):
    """Gaussian-process classification with known labels and Jaakkola's bound."""
    for _ in range(n_iter):
        theta = 2 * jaakkola(xi)
        S = K - K @ np.linalg.inv(K + np.diag(1 / theta)) @ K
        m = S @ (y - 0.5 - theta * c)
        xi = np.sqrt((c + m) ** 2 + np.diag(S))
    return m, S
