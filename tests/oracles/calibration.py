"""Naive twins of calibration, marks and refer rules: double loops, exact fractions, no tricks."""

import math
from fractions import Fraction

import numpy as np
from scipy.optimize import minimize
from scipy.stats import binomtest


def p_value(scores, reference):
    """One patch. scores: of model k, a number; reference[k]: the scores of fold k, a list."""
    rank, n = 0, 0
    for s, fold in zip(scores, reference):
        for r in fold:
            rank += r >= s
            n += 1
    return (1 + rank) / (1 + n)


def p_value_by_bag(scores, reference):
    """One patch. reference[k]: the bags of fold k, each a list of scores."""
    shares, n_bags = 0.0, 0
    for s, fold in zip(scores, reference):
        for bag in fold:
            shares += sum(r >= s for r in bag) / len(bag)
            n_bags += 1
    return (1 + shares) / (1 + n_bags)


def benjamini_hochberg(p, rate):
    """The textbook: the largest k with p_(k) <= rate k / m, all p-values up to that one.

    Fractions in, fractions compared.
    """
    m, ranked, limit = len(p), sorted(p), -1
    for k in range(1, m + 1):
        if ranked[k - 1] <= Fraction(rate) * k / m:
            limit = ranked[k - 1]
    return [q <= limit for q in p]


def upper_limit(errors, n, delta):
    """Clopper-Pearson, one-sided, at level 1 - delta."""
    if n == 0:
        return 1.0
    test = binomtest(errors, n, alternative="less")
    return test.proportion_ci(confidence_level=1 - delta, method="exact").high


def refer_threshold(probability, labels, alpha, delta, groups=None):
    """Threshold, patients in, patients wrong; None, 0, 0 where none will do.

    Let patients in one by one, the surest first; test where one more error is affordable.
    """
    groups = list(range(len(labels))) if groups is None else list(groups)
    slides = [
        (max(p, 1 - p), (p > 0.5) != bool(y), g) for p, y, g in zip(probability, labels, groups)
    ]
    surest = sorted((max(c for c, _, g in slides if g == h) for h in set(groups)), reverse=True)
    walk, affordable = [], 0
    for n in range(1, len(surest) + 1):
        if upper_limit(affordable, n, delta) <= alpha + 1e-12:
            affordable += 1
            walk.append(surest[n - 1])
    kept = (None, 0, 0)
    for t in [*walk, min(c for c, _, _ in slides)] if walk else []:
        inside = {g for c, _, g in slides if c >= t}
        errors = {g for c, wrong, g in slides if c >= t and wrong}
        if upper_limit(len(errors), len(inside), delta) > alpha + 1e-12:
            break
        kept = (t, len(inside), len(errors))
    return kept


def platt(log_odds, labels):
    """Slope and intercept that minimise the cross-entropy with Platt's targets."""
    n1, n0 = sum(labels), len(labels) - sum(labels)
    targets = [(n1 + 1) / (n1 + 2) if y else 1 / (n0 + 2) for y in labels]

    def loss(theta):
        total = 0.0
        for x, t in zip(log_odds, targets):
            eta = theta[0] * x + theta[1]
            total += t * np.logaddexp(0, -eta) + (1 - t) * np.logaddexp(0, eta)
        return total

    best = minimize(loss, [0.3, 0.0], method="BFGS", options={"gtol": 1e-9}).x
    return tuple(map(float, best))


def is_fair(fold, labels, n_folds):
    """Every fold holds a negative bag, every training part both classes."""
    for f in range(n_folds):
        inside = [y for y, k in zip(labels, fold) if k == f]
        rest = [y for y, k in zip(labels, fold) if k != f]
        if 0 not in inside or set(rest) != {0, 1}:
            return False
    return True


def slides_needed(alpha, delta):
    """Count up: n slides, all right, while (1 - alpha)^n > delta; in fractions."""
    n, chance = 0, Fraction(1)
    while chance > Fraction(delta):
        n, chance = n + 1, chance * (1 - Fraction(alpha))
    return n


def mean_error_of_the_surest(threshold, deviation):
    """E[1 - c | c >= threshold], c = max(p, 1 - p), logit p ~ N(0, deviation^2): calibrated."""
    x = np.linspace(math.log(threshold / (1 - threshold)), 12 * deviation, 200_001)
    density = np.exp(-((x / deviation) ** 2) / 2)
    return float((density / (1 + np.exp(x))).sum() / density.sum())


def ridge(columns, labels, width):
    """Weights and intercept: Platt's targets, weights of standardised columns ~ N(0, width^2)."""
    n1 = sum(labels)
    n0 = len(labels) - n1
    target = [(n1 + 1) / (n1 + 2) if y else 1 / (n0 + 2) for y in labels]
    mean, scale = columns.mean(0), columns.std(0)
    z = (columns - mean) / scale

    def loss(theta):
        total = sum(t * t for t in theta[:-1]) / (2 * width**2)
        for row, t in zip(z, target):
            eta = float(row @ theta[:-1]) + theta[-1]
            total += t * np.logaddexp(0, -eta) + (1 - t) * np.logaddexp(0, eta)
        return total

    theta = minimize(loss, np.zeros(columns.shape[1] + 1), method="BFGS").x
    weights = theta[:-1] / scale
    return [*weights, theta[-1] - weights @ mean]
