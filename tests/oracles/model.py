"""Naive twins: the paper's equations with explicit inverses and loops over bags, in NumPy.

Slow and plain on purpose. Every fast path of the package is asserted equal to one of these.
"""

import mpmath as mp
import numpy as np
from scipy.linalg import block_diag
from scipy.optimize import minimize
from scipy.special import log_ndtr
from scipy.stats import norm

JITTER = 1e-6


# --- Kernel and coupling ----------------------------------------------------------------------


def kernel(x, z, name="rbf", variance=1.0, lengthscale=1.0):
    out = np.empty((len(x), len(z)))
    for i in range(len(x)):
        for j in range(len(z)):
            r = np.linalg.norm(x[i] - z[j]) / lengthscale
            out[i, j] = (
                variance
                * {
                    "rbf": np.exp(-(r**2) / 2),
                    "matern32": (1 + np.sqrt(3) * r) * np.exp(-np.sqrt(3) * r),
                    "matern52": (1 + np.sqrt(5) * r + 5 * r**2 / 3) * np.exp(-np.sqrt(5) * r),
                    "linear": x[i] @ z[j] / lengthscale**2,
                }[name]
            )
    return out


def laplacian(adjacency):
    """C_b of eq. (coupling_term), pair by pair."""
    a = np.asarray(adjacency)
    C = np.zeros_like(a, dtype=float)
    for i in range(len(a)):
        for j in range(i + 1, len(a)):
            C[i, i] += a[i, j]
            C[j, j] += a[i, j]
            C[i, j] -= a[i, j]
            C[j, i] -= a[i, j]
    return C


def coupling_matrix(adjacency, strength):
    """Sigma_b = (lambda C_b + I)^-1."""
    return np.linalg.inv(strength * laplacian(adjacency) + np.eye(len(adjacency)))


# --- Truncated moments ------------------------------------------------------------------------


def expectation(mu, sigma, label):
    """Eqs. (qmi_0) and (qmi_1), as printed in the paper."""
    E0 = mu - norm.pdf(mu / sigma) / (1 - norm.cdf(mu / sigma)) * sigma
    if label == 0:
        return E0
    Z = 1 - np.prod(1 - norm.cdf(mu / sigma))
    return (mu - (1 - Z) * E0) / Z


def expectation_mp(mu, sigma, label, digits=60):
    """The same with `digits` digits: right in every tail. Returns E (list) and log Z."""
    with mp.workdps(digits):
        t = [mp.mpf(float(m)) / mp.mpf(float(s)) for m, s in zip(mu, sigma)]
        upper = [mp.erfc(x / mp.sqrt(2)) / 2 for x in t]
        hazard = [mp.exp(-x * x / 2) / mp.sqrt(2 * mp.pi) / u for x, u in zip(t, upper)]
        log_q = sum(
            mp.log1p(-mp.erfc(-x / mp.sqrt(2)) / 2) if x < 0 else mp.log(u)
            for x, u in zip(t, upper)
        )
        m = [mp.mpf(float(a)) for a in mu]
        s = [mp.mpf(float(a)) for a in sigma]
        if label == 0:
            return [a - b * h for a, b, h in zip(m, s, hazard)], log_q
        p = -mp.expm1(log_q)
        r = mp.exp(log_q) / p
        return [a + r * b * h for a, b, h in zip(m, s, hazard)], mp.log(p)


# --- The model: Algorithm 1 and its predictions -----------------------------------------------


class Oracle:
    """VGPMIL-PR-I on lists of bags, by the paper's equations; inputs already standardised."""

    def __init__(self, x, adjacency, labels, Z, strength, c=0.0, **kernel_settings):
        self.x, self.labels, self.Z, self.c = x, labels, Z, c
        self.kernel = lambda a, b: kernel(a, b, **kernel_settings)
        variance = kernel_settings.get("variance", 1.0)
        self.Kzz = self.kernel(Z, Z) + JITTER * variance * np.eye(len(Z))
        self.Kzz_inv = np.linalg.inv(self.Kzz)
        self.A = [self.kernel(xb, Z) @ self.Kzz_inv for xb in x]
        self.Sigma = [coupling_matrix(a, strength) for a in adjacency]
        self.strength = strength
        # eq. (sigma_u)
        precision = self.Kzz_inv + sum(A.T @ S @ A for A, S in zip(self.A, self.Sigma))
        self.Sigma_u = np.linalg.inv(precision)

    def mean_u(self, E):
        """Eq. (mu_u), with the constant prior mean taken off."""
        return self.Sigma_u @ sum(A.T @ (e - self.c) for A, e in zip(self.A, E))

    def mean_m(self, mu_u):
        """Eq. (mu_mb); Sigma_b (c 1) = c 1."""
        return [S @ (A @ mu_u + self.c) for A, S in zip(self.A, self.Sigma)]

    def expectations(self, mu_u):
        return [
            expectation(mu, np.sqrt(np.diag(S)), y)
            for mu, S, y in zip(self.mean_m(mu_u), self.Sigma, self.labels)
        ]

    def sweeps(self, E, count):
        """Algorithm 1."""
        for _ in range(count):
            mu_u = self.mean_u(E)
            E = self.expectations(mu_u)
        return mu_u

    def many_sweeps(self, count):
        """Algorithm 1 from E[m] = 0, all bags in one array: for counts that loops cannot do."""
        A, sizes = np.concatenate(self.A), [len(x) for x in self.x]
        S = block_diag(*self.Sigma)
        sigma, c = np.sqrt(np.diag(S)), self.c
        gain, smooth = self.Sigma_u @ A.T, S @ A
        starts = np.concatenate([[0], np.cumsum(sizes)[:-1]])
        positive = np.repeat(np.asarray(self.labels) == 1, sizes)
        E = np.zeros(len(A))
        for _ in range(count):
            mu_u = gain @ (E - c)
            t = (smooth @ mu_u + c) / sigma
            hazard = np.exp(norm_logpdf(t) - log_ndtr(-t))
            log_q = np.repeat(np.add.reduceat(log_ndtr(-t), starts), sizes)
            E = sigma * (t + np.where(positive, np.exp(log_q) / -np.expm1(log_q), -1) * hazard)
        return mu_u

    def bound(self, mu_u):
        """The collapsed bound in mu^u with independent patches: sum log Z_b - mu'Kzz^-1 mu / 2."""
        total = -0.5 * mu_u @ self.Kzz_inv @ mu_u
        for mu, S, y in zip(self.mean_m(mu_u), self.Sigma, self.labels):
            log_q = log_ndtr(-mu / np.sqrt(np.diag(S))).sum()
            total += log_q if y == 0 else np.log(-np.expm1(log_q))
        return total

    def joint(self, mu_u, x, adjacency):
        """Eqs. (f_star), (m_star): mean and covariance of m* in a new bag."""
        S_star = coupling_matrix(adjacency, self.strength)
        A = self.kernel(x, self.Z) @ self.Kzz_inv
        mean_f = self.c + A @ mu_u
        cov_f = self.kernel(x, x) - A @ (self.Kzz - self.Sigma_u) @ A.T
        return S_star @ mean_f, S_star + S_star @ cov_f @ S_star.T

    def probabilities(self, mu_u, x, adjacency):
        """Eq. (pred_instance)."""
        mean, cov = self.joint(mu_u, x, adjacency)
        return norm.cdf(mean / np.sqrt(np.diag(cov)))


# --- The collapsed bound and its optimum ------------------------------------------------------


def collapsed_bound(w, bags, c):
    """sum_b log Z_b(c + H_b w) - w'w / 2 in whitened w, its gradient, its Hessian.

    `bags`: (H_b, sigma_b, y_b). With t = mu / sigma, the hazard h = phi(t) / Phi(-t) and
    q = prod Phi(-t): d log q / dmu = -h / sigma, dh/dt = h (h - t), and Z = q or 1 - q.
    """
    value, gradient, hessian = -w @ w / 2, -w, -np.eye(len(w))
    for H, sigma, y in bags:
        t = (c + H @ w) / sigma
        log_q = log_ndtr(-t).sum()
        hazard = np.exp(norm_logpdf(t) - log_ndtr(-t))
        odds = np.exp(log_q) / -np.expm1(log_q)
        first, second = hazard / sigma, hazard * (hazard - t) / sigma**2
        value += np.log(-np.expm1(log_q)) if y else log_q
        factor = odds if y else -1.0
        gradient = gradient + factor * H.T @ first
        hessian = hessian + factor * H.T @ (second[:, None] * H)
        if y:  # the odds q / (1 - q) change too
            hessian -= odds * (1 + odds) * np.outer(H.T @ first, H.T @ first)
    return value, gradient, hessian


def collapsed_optimum(bags, c):
    """Its maximum by L-BFGS, then Newton: L-BFGS ends where the value no longer changes.

    There w is right to half of the digits, and which half depends on the processor. A few Newton
    steps, which look at the gradient alone, bring it to rounding.
    """

    def objective(w):
        value, gradient, _ = collapsed_bound(w, bags, c)
        return -value, -gradient

    start = np.zeros(bags[0][0].shape[1])
    w = minimize(objective, start, jac=True, method="L-BFGS-B", options={"maxiter": 5000}).x
    for _ in range(8):
        _, gradient, hessian = collapsed_bound(w, bags, c)
        w = w - np.linalg.solve(hessian, gradient)
    assert np.linalg.eigvalsh(hessian).max() < 0  # a maximum, not another stationary point
    return w


# --- Limits -----------------------------------------------------------------------------------


def probit_gp(K, Kzz, y, x_star_K, iterations):
    """Variational probit GP classification (Girolami and Rogers), every input its own bag.

    Function space: f has prior covariance Q = K Kzz^-1 K, K without and Kzz with the jitter.
    f~ = Q (I + Q)^-1 E[m];  E[m_i] = f~_i + y_i phi(f~_i) / Phi(y_i f~_i), y = +-1.
    Returns the posterior mean and variance of f at new inputs (x_star_K = k(x*, x)).
    """
    Kzz_inv = np.linalg.inv(Kzz)
    Q = K @ Kzz_inv @ K
    gain = Q @ np.linalg.inv(np.eye(len(K)) + Q)
    E = np.zeros(len(K))
    sign = 2.0 * y - 1
    for _ in range(iterations):
        f = gain @ E
        E = f + sign * norm.pdf(f) / norm.cdf(sign * f)
    u = K @ np.linalg.inv(np.eye(len(K)) + Q) @ E  # posterior mean of u: f = K Kzz^-1 u
    return f, x_star_K @ Kzz_inv @ u


def full_gp_mean(K, Kzz, Sigma, E, c):
    """Posterior mean of f in the full GP given E[m], m = Sigma f + noise of covariance Sigma.

    Prior covariance Q = K Kzz^-1 K: (Sigma Q Sigma + Sigma)^-1 (E - c) regressed back on f.
    """
    Q = K @ np.linalg.inv(Kzz) @ K
    return c + Q @ Sigma @ np.linalg.inv(Sigma @ Q @ Sigma + Sigma) @ (E - c)


def norm_logpdf(t):
    return -(t**2) / 2 - np.log(2 * np.pi) / 2


# --- Comparison -------------------------------------------------------------------------------


def relative_error(found, expected):
    """Largest absolute difference over largest absolute value."""
    found, expected = np.asarray(found), np.asarray(expected)
    assert found.shape == expected.shape
    return float(np.abs(found - expected).max() / np.abs(expected).max())
