"""Naive twins of inference.leave_out and inference.tuning: explicit inverses, bag by bag."""

import contextlib

import numpy as np
import torch
from scipy.optimize import minimize
from scipy.special import log_ndtr, logsumexp, ndtr
from synthetic import dense_graphs, small_cohort

from gpmil import Bags
from gpmil.inference import tuning
from gpmil.moments.ep import ep
from oracles.model import JITTER, coupling_matrix, kernel, norm_logpdf


def standard_cohort(seed=0, n_bags=14, **settings):
    """A small cohort whose features are standardised already, so that no subset of it moves."""
    bags = small_cohort(seed, n_bags, **settings)
    x = bags.features.astype(float)
    return Bags.from_arrays(
        bags.split((x - x.mean(0)) / x.std(0)),
        labels=bags.labels,
        coords=bags.split(bags.coords),
        step=7.0,
    )


# --- Derivatives ------------------------------------------------------------------------------


def difference(f, x, step):
    """f'(x) by central differences and two rounds of Richardson extrapolation: error step^6."""

    def central(h):
        return (np.asarray(f(x + h)) - np.asarray(f(x - h))) / (2 * h)

    coarse, middle, fine = central(step), central(step / 2), central(step / 4)
    first, second = (4 * middle - coarse) / 3, (4 * fine - middle) / 3
    return (16 * second - first) / 15


def jacobian(f, x, step):
    """df/dx of an array-valued f of a vector, column by column."""
    columns = [difference(lambda s, e=e: f(x + s * e), 0.0, step) for e in np.eye(len(x))]
    return np.stack(columns, axis=-1)


# --- One bag of independent patches -----------------------------------------------------------


def log_z(mu, sigma, label):
    """log P(the label) of independent patches."""
    log_q = log_ndtr(-mu / sigma).sum()
    return log_q if label == 0 else np.log(-np.expm1(log_q))


def gradient_and_curvature(mu, sigma, label):
    """gamma = d log Z / d mu and A = -d2 log Z / d mu2, by the rules of calculus."""
    t = mu / sigma
    h = np.exp(norm_logpdf(t) - log_ndtr(-t))
    # h'(t) = h (h - t); negative: log Z = sum log Phi(-t)
    if label == 0:
        return -h / sigma, np.diag(h * (h - t) / sigma**2)
    log_q = log_ndtr(-t).sum()
    r = np.exp(log_q) / -np.expm1(log_q)
    # positive: gamma = r h / sigma, dr / d mu = -r (1 + r) h / sigma
    pull = h / sigma
    return r * pull, r * (1 + r) * np.outer(pull, pull) - np.diag(r * h * (h - t) / sigma**2)


def truncated_mean(mu, sigma, label):
    """E and D = dE/dmu: E = mu + sigma^2 d log Z / d mu."""
    gamma, A = gradient_and_curvature(mu, sigma, label)
    return mu + sigma**2 * gamma, np.eye(len(mu)) - sigma[:, None] ** 2 * A


def one_factor(mu, shared, variance):
    """log P(all m < 0) with one factor for what patches share, by two thousand nodes."""
    g = ndtr(mu / np.sqrt(variance)) + 1e-12
    u = shared @ g / np.sqrt(max(g @ shared @ g, (g @ np.sqrt(1e-4 * variance)) ** 2))
    u = np.clip(u, np.sqrt(1e-4 * variance), np.sqrt(0.98 * variance))
    z = np.linspace(-12, 12, 2001)
    own = np.sqrt(variance - u**2)
    log_q = log_ndtr(-(mu + u * z[:, None]) / own).sum(1)
    return logsumexp(log_q + norm_logpdf(z)) + np.log(z[1] - z[0])


# --- A cohort ---------------------------------------------------------------------------------


class Twin:
    """Every matrix of a fit, written out; inputs already standardised."""

    def __init__(self, bags, Z, variance, lengthscale, mean, coupling, name="rbf"):
        self.c, self.labels = mean, bags.labels
        x = bags.split(bags.features.astype(float))
        settings = {"name": name, "variance": variance, "lengthscale": lengthscale}
        self.L = np.linalg.cholesky(kernel(Z, Z, **settings) + JITTER * variance * np.eye(len(Z)))
        self.W = [kernel(xb, Z, **settings) @ np.linalg.inv(self.L).T for xb in x]
        self.K = [kernel(xb, xb, **settings) for xb in x]
        self.Sigma = [coupling_matrix(a, coupling) for a in dense_graphs(bags)]
        self.sigma = [np.sqrt(np.diag(S)) for S in self.Sigma]
        self.H = [S @ W for S, W in zip(self.Sigma, self.W)]
        self.R = np.eye(len(Z)) + sum(W.T @ H for W, H in zip(self.W, self.H))

    def mu(self, b, w):
        return self.c + self.H[b] @ w

    def derivatives(self, b, w):
        return gradient_and_curvature(self.mu(b, w), self.sigma[b], self.labels[b])

    def moments(self, b, w):
        return truncated_mean(self.mu(b, w), self.sigma[b], self.labels[b])

    def bound(self, w, chosen=None):
        """The collapsed bound of all or chosen bags, less its constant."""
        chosen = range(len(self.labels)) if chosen is None else chosen
        values = [log_z(self.mu(b, w), self.sigma[b], self.labels[b]) for b in chosen]
        return sum(values) - w @ w / 2

    def gradient(self, w, chosen=None):
        chosen = range(len(self.labels)) if chosen is None else chosen
        return sum(self.H[b].T @ self.derivatives(b, w)[0] for b in chosen) - w

    def hessian(self, w, chosen=None):
        """J = I + sum_b H_b'A_b H_b, that of minus the bound."""
        chosen = range(len(self.labels)) if chosen is None else chosen
        parts = (self.H[b].T @ self.derivatives(b, w)[1] @ self.H[b] for b in chosen)
        return np.eye(len(w)) + sum(parts)

    def fixed_point_jacobian(self, w):
        """F_w = R - sum_b W_b'D_b H_b."""
        parts = (W.T @ self.moments(b, w)[1] @ H for b, (W, H) in enumerate(zip(self.W, self.H)))
        return self.R - sum(parts)

    def fit(self, chosen=None):
        """The maximum of the bound, polished by plain Newton steps."""
        w = minimize(
            lambda w: -self.bound(w, chosen),
            np.zeros(len(self.L)),
            jac=lambda w: -self.gradient(w, chosen),
            hess=lambda w: self.hessian(w, chosen),
            method="trust-exact",
        ).x
        for _ in range(4):
            w = w + np.linalg.inv(self.hessian(w, chosen)) @ self.gradient(w, chosen)
        return w

    # Bag b taken out by one Newton step

    def direct_mean_without(self, b, w):
        """w_-b = w - (J - H_b'A_b H_b)^-1 H_b'gamma_b."""
        gamma, A = self.derivatives(b, w)
        H = self.H[b]
        left = np.linalg.inv(self.hessian(w) - H.T @ A @ H)
        return self.mu(b, w - left @ H.T @ gamma)

    def fixed_point_mean_without(self, b, w, jacobian=None, E=None, D=None):
        """w_-b = w + (F_w - W_b'(I - D_b)H_b)^-1 W_b'(mu_b - E_b)."""
        if jacobian is None:
            jacobian, (E, D) = self.fixed_point_jacobian(w), self.moments(b, w)
        W, H = self.W[b], self.H[b]
        left = np.linalg.inv(jacobian - W.T @ (np.eye(len(D)) - D) @ H)
        return self.mu(b, w + left @ W.T @ (self.mu(b, w) - E))

    def covariance_without(self, b):
        """S = Sigma + Sigma (K - W W' + W R_-b^-1 W') Sigma, R_-b = R - W_b'H_b."""
        W, S = self.W[b], self.Sigma[b]
        left = np.linalg.inv(self.R - W.T @ self.H[b])
        return S + S @ (self.K[b] - W @ W.T + W @ left @ W.T) @ S

    def left_out(self):
        """log p(y_b) of every bag left out, by plain EP on the bag alone."""
        w = self.fit()
        return np.array([
            self._score(b, self.direct_mean_without(b, w), self.covariance_without(b))
            for b in range(len(self.labels))
        ])  # fmt: skip

    def left_out_with_group(self, groups):
        """The same with all bags of a group left out together: sums over them."""
        w = self.fit()
        return np.array([
            self._score(b, *self.without_group(b, np.flatnonzero(groups == groups[b]), w))
            for b in range(len(self.labels))
        ])  # fmt: skip

    def without_group(self, b, members, w):
        """mu_b and S_b without any of the members."""
        J, R, g = self.hessian(w), self.R, np.zeros(len(w))
        for k in members:
            gamma, A = self.derivatives(k, w)
            J = J - self.H[k].T @ A @ self.H[k]
            R = R - self.W[k].T @ self.H[k]
            g = g + self.H[k].T @ gamma
        W, S = self.W[b], self.Sigma[b]
        mu = self.mu(b, w - np.linalg.inv(J) @ g)
        return mu, S + S @ (self.K[b] - W @ W.T + W @ np.linalg.inv(R) @ W.T) @ S

    def left_out_of_folds(self, fold):
        """log p(y_b) of every bag under the fit of the bags of all other folds, one factor each."""
        out = np.empty(len(fold))
        for k in np.unique(fold):
            rest = np.flatnonzero(fold != k)
            w, R = self.fit(rest), np.eye(len(self.L))
            for b in rest:
                R = R + self.W[b].T @ self.H[b]
            for b in np.flatnonzero(fold == k):
                log_p = one_factor(self.mu(b, w), *self._two_parts(b, np.linalg.inv(R)))
                out[b] = np.log(-np.expm1(log_p)) if self.labels[b] else log_p
        return out

    def _two_parts(self, b, R_inverse):
        """The covariance of m_b in two parts: what patches share, and what is their own."""
        W, S = self.W[b], self.Sigma[b]
        r = np.diag(self.K[b] - W @ W.T)
        low = S @ W @ R_inverse @ W.T @ S
        # what inducing points leave counts by its diagonal
        spread, own = S @ np.diag(r) @ S, np.diag(S)
        return S - np.diag(own) + spread + low, own + np.diag(spread + low)

    def _score(self, b, mu, S):
        found = ep(torch.from_numpy(mu)[None], torch.from_numpy(S)[None], tol=1e-10)
        log_p = float(found.log_p[0])
        return np.log(-np.expm1(log_p)) if self.labels[b] else log_p


def refitted(model, bags, chosen):
    """log p(y_b) under the model really fitted again without bag b, for the chosen bags."""
    out = []
    for b in chosen:
        rest = np.delete(np.arange(len(bags)), b)
        log_odds = model.__class__(**model.get_params()).fit(bags[rest]).decision_function(bags[b])
        # log p(y = 1) = -log(1 + e^-odds)
        out.append(-np.logaddexp(0, -log_odds[0] if bags.labels[b] else log_odds[0]))
    return np.array(out)


def refitted_folds(model, bags, fold):
    """log p(y_b) under the model really fitted again without the fold of bag b."""
    out = np.empty(len(bags))
    for k in np.unique(fold):
        own = fold == k
        again = model.__class__(**model.get_params()).fit(bags[~own])
        p = again.predict_proba(bags[own])
        out[own] = np.log(p[np.arange(own.sum()), bags.labels[own]])
    return out


# --- The search, without derivatives ----------------------------------------------------------


def derivative_free(cohort, space, budget):
    """As tuning.search, by COBYQA: one fit's worth of work per step, no gradient to be wrong."""
    found, begin = tuning.started(cohort, space, budget)
    with contextlib.suppress(tuning.Spent):
        if space.learned:
            minimize(
                lambda z: -found.value(z),
                begin,
                method="COBYQA",
                bounds=space.bounds,
                options={"maxfev": budget, "initial_tr_radius": 0.5, "final_tr_radius": 0.02},
            )
    return found
