"""Novelty as process/novelty.py states it, with explicit inverses and refits for every patient."""

import numpy as np


def explained(own, W, seen):
    """e_i = w'(I - (I + sum w_j w_j')^-1) w / k, `seen` the rows of the training patches."""
    inverse = np.linalg.inv(np.eye(W.shape[1]) + sum(np.outer(w, w) for w in seen))
    return np.array([w @ (np.eye(len(w)) - inverse) @ w / own for w in W])


def metric(seen, ridge=0.01):
    """A = (C + r I)^-1."""
    C = np.cov(seen.T, bias=True)
    return np.linalg.inv(C + ridge * np.trace(C) / len(C) * np.eye(len(C)))


def spread(W, A):
    """v = tr(A S), S the covariance within a slide."""
    return np.trace(A @ np.cov(W.T, bias=True).reshape(len(A), len(A)))


def distance(W, others, A, spreads):
    """min_j (phi - phi_j)' A (phi - phi_j) / (v + v_j)."""
    apart = [W.mean(0) - other.mean(0) for other in others]
    return min(a @ A @ a / (spread(W, A) + v) for a, v in zip(apart, spreads))


def scores(slides, own, patient):
    """d_b and -log mean e_i of every training slide, and all -log e_i; each without its patient."""
    d, e = [], []
    whole = metric(np.vstack(slides))
    for b, W in enumerate(slides):
        rest = [slides[j] for j in range(len(slides)) if patient[j] != patient[b]]
        d.append(distance(W, rest, metric(np.vstack(rest)), [spread(w, whole) for w in rest]))
        e.append(explained(own, W, np.vstack(rest)))
    return np.stack([d, -np.log([a.mean() for a in e])], axis=1), -np.log(np.concatenate(e))


def fence(values, c):
    """Q3 + c (Q3 - Q1) of the logarithms."""
    first, third = np.percentile(np.log(values), [25, 75])
    return np.exp(third + c * (third - first))
